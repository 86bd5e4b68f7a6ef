"""Column plans: what repeats in the short observations of a transition, and where each byte of them is kept.

In:  the rows of some ticks, lane by lane.  Out: a `ColumnPlan`, which columns.c packs ticks by.
Invariant: a plan is a proposal, and every plan holds every byte of an observation somewhere. Rows that do not repeat as
proposed cost memory, never truth: packing reads every row back, and keeps what comes out otherwise whole.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Bytes, Leaf
from holdall.storage.blocks import address

GROUP_FIELDS = ("window", "frame_bytes", "is_dense", "home", "first_source", "end_source")
PIECE_FIELDS = ("leaf", "group", "at", "offset", "bytes", "count", "at_step")
PLAN_FIELDS = (
    "groups", "group_count", "pieces", "piece_ends", "sources", "leaf_bytes", "leaf_starts", "leaves", "row_bytes",
)  # fmt: skip
"""Columns of tables, see `COLUMN_TABLES`."""

MOST_COLUMNS = 4096
"""Columns that are looked at; wider rows stay as they are."""
_MOST_WORDS = 1 << 19
"""Values that are looked at: so many rows as that gives."""
_MOST_SHIFTED = 1024
"""Columns of a field in which histories are looked for: every distance is tried."""
_PAIRS = 64
"""Neighbouring rows by which a history is found."""
_AGREEMENT = 0.8
"""Share of the pairs that a history must explain; resets are the rest."""
_HELD = 0.75
"""Columns that change in fewer rows than that may be kept by their changes."""
_LOOKUP_BYTES = 6
"""What a group of its own costs a row: a cursor, and the time to follow it."""
_MOST_GROUPS = 16

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]


class _Group(NamedTuple):
    """Columns that are kept in one log: chains of one column for every frame that a row shows, the oldest first."""

    chains: Sequence[tuple[int, ...]]
    is_dense: bool = False
    home: NDArray[np.uint64] | None = None  # a value for every chain
    is_constant: bool = False

    @property
    def window(self) -> int:
        return len(self.chains[0])


class ColumnFinding(NamedTuple):
    """What a plan found about one field: columns by how they are kept."""

    columns: int
    constant: int
    copied: int
    held: int
    in_histories: int
    histories: int  # terms whose past values are columns, too

    def describe(self, changed: int = 0) -> str:
        """Say it for people; nothing if nothing was found.

        Args:
            changed: How many of the constant columns changed in rows that the plan was not made for.
        """
        constant, held = self.constant - changed, self.held + changed
        words = [
            f"{constant} never change" if constant else "",
            f"{self.copied} equal others" if self.copied else "",
            f"{held} stored when they change" if held else "",
            f"{self.in_histories} are past values of {self.histories}" if self.in_histories else "",
        ]
        found = ", ".join(word for word in words if word)
        return f"of {self.columns} columns {found}" if found else ""


class ColumnPlan:
    """How the columns of some fields are shared out among groups, as tables that columns.c reads.

    Args:
        copies: Columns that equal another one, by their numbers.
        varied: Columns that are known to change.
    """

    def __init__(self, leaves: Sequence[Leaf], groups: Sequence[_Group], copies: dict[int, int], varied: Mask) -> None:
        self.varied = varied
        starts = _WordPlaces(leaves)
        self.group_count = len(groups)
        self.constants = [chain[0] for chain in groups[0].chains] if groups[0].is_constant else []
        self._constant_starts = np.cumsum([0, *(starts.sizes[column] for column in self.constants)])
        self.columns_of = starts.of  # by field
        places: dict[int, tuple[int, int]] = {}  # by column: its group, and the byte behind the first frame shown
        frame_bytes = []
        for number, group in enumerate(groups):
            ends = np.cumsum([starts.sizes[chain[0]] for chain in group.chains]).tolist()
            frame_bytes.append(ends[-1])
            for end, columns in zip(ends, group.chains, strict=True):
                for w, column in enumerate(columns):
                    places[column] = number, w * ends[-1] + end - starts.sizes[column]
        pieces = [_pieces(starts, i, places, copies) for i in range(len(leaves))]
        sources = sorted((piece for i in range(len(leaves)) for piece in _pieces(starts, i, places, None)), key=_group)
        by_group = Counter(map(_group, sources))
        ends = np.cumsum([0, *(by_group[number] for number in range(len(groups)))]).tolist()
        homes = [None if group.home is None else _frame(starts, group) for group in groups]
        table = [
            [group.window, nbytes, group.is_dense, 0 if home is None else address(home), first, end]
            for group, nbytes, home, first, end in zip(groups, frame_bytes, homes, ends[:-1], ends[1:], strict=True)
        ]
        self._shares = _shares(sources, len(groups), len(leaves))
        sizes = [leaf.nbytes for leaf in leaves]
        self.row_bytes = sum(sizes)
        piece_ends = np.cumsum([0, *map(len, pieces)])
        tables = [
            np.array(rows, np.int64)
            for rows in (
                table,
                list(chain.from_iterable(pieces)),
                piece_ends,
                sources,
                sizes,
                np.cumsum([0, *sizes])[:-1],
            )
        ]
        self._kept = homes, tables  # what the numbers below point into
        self._groups = tables[0]
        to = [address(each) for each in tables]
        numbers = [to[0], len(groups), *to[1:6], len(leaves), self.row_bytes]
        self._struct = np.array(numbers, np.int64)
        self.address = address(self._struct)
        self.findings = [_finding(starts, i, groups, copies) for i in range(len(leaves))]

    def frame_bytes(self, group: int) -> int:
        """Return the bytes of one frame of a group."""
        return int(self._groups[group, 1])

    def changed_constants(self, frames: Bytes) -> list[int]:
        """Return the columns of the first group that are not the same in all of its frames, (frames, bytes)."""
        different = np.flatnonzero((frames != frames[0]).any(axis=0))
        places = np.searchsorted(self._constant_starts, different, side="right") - 1
        return [self.constants[place] for place in np.unique(places).tolist()]

    def group_bytes(
        self, frames: NDArray[np.int64], has_cursor: Mask, rows: int, cursor_bytes: int
    ) -> NDArray[np.float64]:
        """Return the bytes of every group in a run of so many rows."""
        dense, nbytes = self._groups[:, 2] == 1, self._groups[:, 1]
        return np.asarray(np.where(dense, rows, frames) * nbytes + has_cursor * (rows * cursor_bytes), np.float64)

    def shared_out(self, group_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share the bytes of groups out among fields."""
        return np.asarray(group_bytes @ self._shares)


class _WordPlaces:
    """Numbers the words of all fields: where each begins, and how long it is."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        words = [word_bytes(leaf) for leaf in leaves]
        self.counts = [leaf.nbytes // word for leaf, word in zip(leaves, words, strict=True)]
        self.firsts = np.cumsum([0, *self.counts]).tolist()
        self.sizes = [word for word, count in zip(words, self.counts, strict=True) for _ in range(count)]

    def of(self, leaf: int) -> range:
        """Return the columns of a field."""
        return range(self.firsts[leaf], self.firsts[leaf + 1])


def word_bytes(leaf: Leaf) -> int:
    """Return how long the columns of a field are."""
    size = leaf.dtype.itemsize
    return size if size in (1, 2, 4, 8) else 8 if size % 8 == 0 else 1


def _group(piece: list[int]) -> int:
    return piece[1]


def _frame(starts: _WordPlaces, group: _Group) -> Bytes:
    """Write the frame that a group expects."""
    values = [] if group.home is None else group.home.tolist()
    sizes = [starts.sizes[chain[0]] for chain in group.chains]
    frame = b"".join(value.to_bytes(size, sys.byteorder) for value, size in zip(values, sizes, strict=True))
    return np.frombuffer(frame, np.uint8)


def _pieces(
    starts: _WordPlaces, leaf: int, places: dict[int, tuple[int, int]], copies: dict[int, int] | None
) -> list[list[int]]:
    """Describe where the columns of a field are kept, as few pieces; without `copies`, of those that are kept alone."""
    found: list[list[int]] = []
    for column in starts.of(leaf):
        original = column if copies is None else copies.get(column, column)
        if original not in places:
            continue
        (group, at), size = places[original], starts.sizes[column]
        offset = (column - starts.firsts[leaf]) * size
        last = found[-1] if found else None
        if last and last[1] == group and last[3] + last[4] == offset and last[2] + last[4] == at:
            last[4] += size
        else:
            found.append([leaf, group, at, offset, size, 1, 0])
    return _in_steps(found)


def _in_steps(pieces: list[list[int]]) -> list[list[int]]:
    """Join pieces that follow each other in an observation and lie equally far apart in a log."""
    found: list[list[int]] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and last[1] == piece[1] and last[4] == piece[4] and last[3] + last[5] * last[4] == piece[3]:
            step = piece[2] - (last[2] + (last[5] - 1) * last[6])
            if last[5] == 1 or step == last[6]:
                last[5], last[6] = last[5] + 1, step
                continue
        found.append(list(piece))
    return found


def _shares(sources: list[list[int]], groups: int, leaves: int) -> NDArray[np.float64]:
    """Return which share of each group's bytes belongs to which field."""
    shares = np.zeros((groups, leaves))
    for leaf, group, _, _, nbytes, count, _ in sources:
        shares[group, leaf] += nbytes * count
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def _finding(starts: _WordPlaces, leaf: int, groups: Sequence[_Group], copies: dict[int, int]) -> ColumnFinding:
    own = starts.of(leaf)
    chains = [(group, chain) for group in groups for chain in group.chains if chain[-1] in own]
    histories = [chain for group, chain in chains if group.window > 1]
    single = [group for group, _ in chains if group.window == 1 and not group.is_dense]
    constant = sum(group.is_constant for group in single)
    copied = sum(column in copies for column in own)
    return ColumnFinding(
        len(own), constant, copied, len(single) - constant, sum(map(len, histories)) - len(histories), len(histories)
    )


# ---------------------------------------------------------------- finding one


def find_plan(leaves: Sequence[Leaf], rows: Sequence[Bytes], varied: Mask) -> ColumnPlan | None:
    """Look for what repeats; None if nothing does.

    Args:
        rows: Of every field, (lanes, ticks, bytes): neighbours in time.
        varied: Columns that are known to change, whatever these rows show.
    """
    columns = _words(leaves, rows)
    starts = _WordPlaces(leaves)
    changes = (columns[:, :, 1:] != columns[:, :, :-1]).mean(axis=(1, 2))
    constant = (columns == columns[:, :1, :1]).all(axis=(1, 2))
    constant &= ~varied
    varying = np.flatnonzero(~constant).tolist()
    copies = _copies(columns, starts, varying)
    kept = np.array([column for column in varying if column not in copies], np.int64)
    moving = kept[changes[kept] > 0.5]
    chains = [chain for leaf in range(len(leaves)) for chain in _histories(columns, starts.of(leaf), moving)]
    chained = {column for chain in chains for column in chain}
    held = [column for column in kept.tolist() if column not in chained and changes[column] < _HELD]
    groups = [_held_at(columns, np.flatnonzero(constant).tolist())._replace(is_constant=True)]
    groups += [_Group(list(some)) for _, some in groupby(sorted(chains, key=len), key=len)]
    groups += _held_groups(columns, starts, held)
    logged = {column for group in groups for chain in group.chains for column in chain}
    dense = [(column,) for column in kept.tolist() if column not in logged]
    if not logged and not copies:
        return None
    groups.append(_Group(dense, is_dense=True))
    return ColumnPlan(leaves, [group for group in groups if group.chains], copies, ~constant)


def rows_to_look_at(leaves: Sequence[Leaf], lanes: int, ticks: int) -> tuple[int, int] | None:
    """Return how many lanes and ticks are looked at; None if there are too many columns."""
    columns = sum(leaf.nbytes // word_bytes(leaf) for leaf in leaves)
    if not 0 < columns <= MOST_COLUMNS:
        return None
    some = min(lanes, 4)
    return some, max(2, min(ticks, _MOST_WORDS // columns // some))


def _words(leaves: Sequence[Leaf], rows: Sequence[Bytes]) -> Words:
    """See rows as numbers: (columns, lanes, ticks)."""
    dtypes = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
    parts = [
        np.ascontiguousarray(some).view(dtypes[word_bytes(leaf)]).transpose(2, 0, 1)
        for leaf, some in zip(leaves, rows, strict=True)
    ]
    return np.concatenate(parts, dtype=np.uint64)


def _copies(columns: Words, starts: _WordPlaces, varying: list[int]) -> dict[int, int]:
    """Find columns that equal another one before them, but for so few rows that these may be kept whole."""
    flat = columns.reshape(len(columns), -1)
    row_bytes, quarter = sum(starts.sizes), max(1, flat.shape[1] // 4)
    quarters = [np.ascontiguousarray(flat[:, i * quarter : (i + 1) * quarter]) for i in range(4)]
    seen: dict[tuple[int, int, bytes], int] = {}
    found: dict[int, int] = {}
    for column in varying:
        size = starts.sizes[column]
        for i, part in enumerate(quarters):
            other = seen.setdefault((i, size, part[column].tobytes()), column)
            if other == column or other in found:
                continue
            if (flat[other] != flat[column]).mean() * row_bytes <= size / 2:
                found[column] = other
                break
    return found


def _histories(columns: Words, own: range, moving: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Find columns of a field that show what others showed a row before; return chains of them, the oldest first."""
    wanted = np.isin(np.arange(own.start, own.stop), moving)
    if not 2 <= len(own) <= _MOST_SHIFTED or wanted.sum() < 2:
        return []
    lanes = min(columns.shape[1], 4)
    seen = columns[own.start : own.stop, :lanes, : _PAIRS // lanes + 1]
    old, new = (part.reshape(len(own), -1) for part in (seen[:, :, :-1], seen[:, :, 1:]))
    forwards, backwards = _newer(old, new, wanted), _newer(old[::-1], new[::-1], wanted[::-1])
    last = len(own) - 1
    backwards = {last - column: last - newer for column, newer in backwards.items()}
    newer = max(forwards, backwards, key=len)
    older = {to: column for column, to in newer.items()}
    chains = []
    for newest in sorted(set(older) - set(newer)):
        chain = [newest]
        while chain[-1] in older:
            chain.append(older[chain[-1]])
        chains.append(tuple(own.start + column for column in reversed(chain)))
    return chains


def _newer(old: Words, new: Words, wanted: Mask) -> dict[int, int]:
    """Find, for columns, the nearest one further on that showed a row before what they show."""
    found: dict[int, int] = {}
    taken: set[int] = set()
    open_columns = wanted.copy()
    for step in range(1, len(old) // 2 + 1):
        hits = (new[:-step] == old[step:]).mean(axis=1) >= _AGREEMENT
        for column in np.flatnonzero(hits & open_columns[:-step] & wanted[step:]).tolist():
            if column + step not in taken:
                found[column] = column + step
                taken.add(column + step)
                open_columns[column] = False
    return found


def _held_groups(columns: Words, starts: _WordPlaces, held: list[int]) -> list[_Group]:
    """Put columns that change together into groups, if these cost less than to write all values."""
    groups: list[tuple[list[int], Mask, Mask, float]] = []
    for column in held:
        values = columns[column]
        changed = np.ones(values.shape, np.bool_)
        changed[:, 1:] = values[:, 1:] != values[:, :-1]
        alone = [column], changed.reshape(-1), (values == _mode(values)).reshape(-1)
        candidates = [(i, _joined(group, alone, starts)) for i, group in enumerate(groups)]
        best = min(candidates, key=lambda each: each[1][3] - groups[each[0]][3], default=None)
        new = _joined(([], changed.reshape(-1) & False, alone[2] | True, 0.0), alone, starts)
        if best is not None and (len(groups) == _MOST_GROUPS or best[1][3] - groups[best[0]][3] <= new[3]):
            groups[best[0]] = best[1]
        else:
            groups.append(new)
    rows = columns[0].size
    return [
        _held_at(columns, members)
        for members, _, _, cost in groups
        if cost < 0.9 * rows * sum(starts.sizes[column] for column in members)
    ]


def _joined(
    group: tuple[list[int], Mask, Mask, float], alone: tuple[list[int], Mask, Mask], starts: _WordPlaces
) -> tuple[list[int], Mask, Mask, float]:
    """Return a group with a column more, and what it costs: frames for rows that change to what is not expected."""
    members, changed, at_home = [*group[0], *alone[0]], group[1] | alone[1], group[2] & alone[2]
    pushed = np.count_nonzero(changed & ~at_home)
    cost = pushed * sum(starts.sizes[column] for column in members) + _LOOKUP_BYTES * len(changed)
    return members, changed, at_home, float(cost)


def _held_at(columns: Words, members: list[int]) -> _Group:
    home = np.array([_mode(columns[column]) for column in members], np.uint64)
    return _Group([(column,) for column in members], home=home)


def _mode(values: Words) -> np.uint64:
    """Return the most frequent value."""
    found, counts = np.unique(values, return_counts=True)
    mode: np.uint64 = found[counts.argmax()]
    return mode

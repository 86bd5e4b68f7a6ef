"""Runs: arrays that grow at one end and are given up at the other.

In:  rows, in order.  Out: rows by their number since the first one ever.
Invariant: a number names the same row for as long as the row is held.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.cluster.block import Block, SlicedField
from holdall.cluster.protocol import TravelLayout
from holdall.errors import ArgumentError
from holdall.report import FieldReport
from holdall.schema import Array
from holdall.storage.blocks import Coded
from holdall.storage.codec import Codec
from holdall.storage.layout import Window
from holdall.storage.records import codec_words, window_words
from holdall.storage.slices import NEXT_IS_WHOLE

_FIRST_ROOM = 256


class GrowingArray:
    """Rows of one shape and dtype. Not locked: whoever owns it is."""

    def __init__(self, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self._rows: Array = np.empty((_FIRST_ROOM, *shape), dtype)
        self._origin = 0  # number of the row at place 0
        self._first = 0
        self.end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held."""
        return (self.end - self._first) * self._rows[:1].nbytes

    def append(self, rows: Array) -> int:
        """Add rows, and return the number of the first."""
        start, count = self.end, len(rows)
        if start + count - self._origin > len(self._rows):
            self._make_room(count)
        place = start - self._origin
        self._rows[place : place + count] = rows
        self.end = start + count
        return start

    def drop_before(self, number: int) -> None:
        """Give up the rows before a number."""
        self._first = max(self._first, min(number, self.end))

    def begin_at(self, number: int) -> None:
        """Give the first row this number; nothing was added yet."""
        self._origin = self._first = self.end = number

    def take(self, numbers: NDArray[np.int64]) -> Array:
        """Copy the rows of some numbers, all of them held."""
        return self._rows.take(numbers - self._origin, axis=0)

    def between(self, first: int, end: int) -> Array:
        """Look at a stretch of rows; what is added next may change it."""
        return self._rows[first - self._origin : end - self._origin]

    @property
    def held(self) -> Array:
        """Look at all rows held; what is added next may change it."""
        return self.between(self._first, self.end)

    def put(self, numbers: NDArray[np.int64], rows: Array) -> None:
        """Overwrite rows."""
        self._rows[numbers - self._origin] = rows

    def _make_room(self, count: int) -> None:
        """Move what is held to the front, of a larger array unless half of this one is free."""
        kept = self.held
        needed = len(kept) + count
        if 2 * needed <= len(self._rows):
            self._rows[: len(kept)] = kept.copy()
        else:
            larger = np.empty((max(needed, len(kept) + len(kept) // 2, _FIRST_ROOM), *kept.shape[1:]), kept.dtype)
            larger[: len(kept)] = kept
            self._rows = larger
        self._origin = self._first


_FORM_SHIFT = 40
_UNIT_MASK = (1 << _FORM_SHIFT) - 1
"""Units are counted over all blocks ever held, in these bits; the number of their form stands above."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SliceForm:
    """What the slices of some blocks have in common; units of one form can be put together."""

    window: Window
    codec: Codec
    palette: NDArray[np.uint8]
    words: str  # window and codec as they travel: made once, as a form is sent over and over


@dataclass(frozen=True, slots=True)
class FoundField:
    """One sliced leaf of some rows: which slices make up its observations, and these, compressed."""

    form: NDArray[np.int32]  # (rows,): which of `forms` a row's slices have
    cursors: NDArray[np.uint32]  # (rows,)
    log: NDArray[np.uint16] | NDArray[np.uint32]  # slice numbers, each among the slices of its row's form
    forms: tuple[tuple[SliceForm, Coded], ...]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """What was found under some row numbers."""

    columns: dict[str, Array]
    fields: tuple[FoundField, ...]


class _ShardField:
    """One sliced leaf of all blocks."""

    def __init__(self) -> None:
        self.cursors = GrowingArray(np.uint32)
        self.log = GrowingArray(np.uint32)  # lane after lane, so that an observation is a stretch of it
        self.offsets = GrowingArray(np.uint32)  # one more than units, block after block
        # First log entry, entries a lane, first offset with the form above it, window, shift, slices of a unit.
        self.blocks = GrowingArray(np.int64, (6,))
        self.units: dict[int, bytes] = {}
        self.unit_bytes = 0
        self._forms: dict[int, SliceForm] = {}
        self._form_keys: dict[tuple[str, bytes], int] = {}
        self._form_uses: Counter[int] = Counter()  # blocks of a form
        self._next_form = 0

    def append(self, number: int, field: SlicedField) -> None:
        coded = field.coded
        self.cursors.append(field.cursors)
        entry = (
            self.log.append(field.log.reshape(-1)),
            field.log.shape[1],
            self.offsets.append(coded.offsets) | self._form(field) << _FORM_SHIFT,
            field.window.count,
            field.window.shift,
            coded.codec.group,
        )
        self.blocks.append(np.array([entry], np.int64))
        units = bytes(np.asarray(coded.data).data)
        self.units[number] = units
        self.unit_bytes += len(units)

    def drop(self, row: int, first: int, end: int) -> None:
        """Give up the rows before `row`, and the blocks from `first` up to `end`, without it."""
        self.cursors.drop_before(row)
        self._forget_forms((self.blocks.between(first, end)[:, 2] >> _FORM_SHIFT).tolist())
        for number in range(first, end):
            self.unit_bytes -= len(self.units.pop(number))
        if end < self.blocks.end:
            kept = self.blocks.between(end, end + 1)[0]
            self.log.drop_before(int(kept[0]))
            self.offsets.drop_before(int(kept[2]) & _UNIT_MASK)
        else:
            self.log.drop_before(self.log.end)
            self.offsets.drop_before(self.offsets.end)
        self.blocks.drop_before(end)

    def block(self, number: int, start: int, end: int, lanes: int) -> SlicedField:
        """Return what a block brought, as it came."""
        first, entries, unit = self.blocks.between(number, number + 1)[0, :3].tolist()
        is_last = number + 1 == self.blocks.end
        last = self.offsets.end if is_last else int(self.blocks.between(number + 1, number + 2)[0, 2]) & _UNIT_MASK
        kept = self._forms[unit >> _FORM_SHIFT]
        offsets = self.offsets.between(unit & _UNIT_MASK, last).copy()
        count = (len(offsets) - 1) * kept.codec.group
        units = np.frombuffer(self.units[number], np.uint8)
        return SlicedField(
            kept.window,
            self.cursors.between(start, end).copy(),
            self.log.between(first, first + lanes * entries).reshape(lanes, entries).copy(),
            Coded(kept.codec, count, offsets, kept.palette, units),
        )

    def find(self, rows: Ids, block: Ids, lane: Ids) -> FoundField:
        """Put together the units that hold the slices of some rows, form by form.

        An array operation costs more here than what it does for the rows of one answer, so there are few.
        """
        first, entries, unit, count, shift, group = self.blocks.take(block).T
        cursors = self.cursors.take(rows)
        flags = cursors & NEXT_IS_WHOLE
        length = count + np.where(flags, count, shift)
        begin = np.cumsum(length)
        end = int(begin[-1])
        begin -= length
        row = np.repeat(np.arange(len(rows)), length)
        start = first + lane * entries + (cursors ^ flags) - begin
        in_unit, number = group[row], self.log.take(np.arange(end) + start[row])
        nth, within = np.divmod(number, in_unit)
        units, example, place = _unique(unit[row] + nth)  # those of one form lie together
        forms = units >> _FORM_SHIFT
        bounds = [0, *(np.flatnonzero(forms[1:] != forms[:-1]) + 1).tolist(), len(units)]
        form = np.zeros(len(rows), np.int32)
        if len(bounds) > 2:
            form = np.searchsorted(forms[bounds[:-1]], unit >> _FORM_SHIFT).astype(np.int32)
            place -= np.array(bounds)[form][row]
        joined = self._joined(forms[bounds[:-1]].tolist(), units & _UNIT_MASK, block[row[example]], bounds)
        narrow = all(coded.count <= 1 << 16 for _, coded in joined)
        return FoundField(
            form,
            begin.astype(np.uint32) | flags,
            (place * in_unit + within).astype(np.uint16 if narrow else np.uint32),
            joined,
        )

    def _joined(
        self, forms: list[int], units: Ids, block: Ids, bounds: list[int]
    ) -> tuple[tuple[SliceForm, Coded], ...]:
        """Join the bytes of units of some blocks, those of each form for itself."""
        starts, ends = self.offsets.take(units), self.offsets.take(units + 1)
        held = self.units
        cut = [held[b][s:e] for b, s, e in zip(block.tolist(), starts.tolist(), ends.tolist(), strict=True)]
        sizes = ends - starts
        joined = []
        for number, (first, end) in zip(forms, pairwise(bounds), strict=True):
            form = self._forms[number]
            offsets = np.zeros(end - first + 1, np.uint32)
            np.cumsum(sizes[first:end], out=offsets[1:])
            data = np.frombuffer(b"".join(cut[first:end]), np.uint8)
            joined.append((form, Coded(form.codec, (end - first) * form.codec.group, offsets, form.palette, data)))
        return tuple(joined)

    def _form(self, field: SlicedField) -> int:
        codec, palette = field.coded.codec, field.coded.palette
        words = form_words(field.window, codec)
        key = words, palette.tobytes()
        number = self._form_keys.get(key)
        if number is None:
            number = self._form_keys[key] = self._next_form
            self._next_form += 1
            self._forms[number] = SliceForm(field.window, codec, palette.copy(), words)
        self._form_uses[number] += 1
        return number

    def _forget_forms(self, numbers: list[int]) -> None:
        """Give up forms with their last block: a palette is of one block alone."""
        self._form_uses.subtract(numbers)
        gone = {number for number in numbers if not self._form_uses[number]}
        for number in gone:
            del self._forms[number], self._form_uses[number]
        if gone:
            self._form_keys = {key: number for key, number in self._form_keys.items() if number not in gone}


class ShardStore:
    """All blocks of a shard. Not locked: the shard that owns it is.

    Args:
        capacity: Most rows held; older ones leave one by one.
        first_row: Number of the first row that will be accepted.
    """

    def __init__(self, layout: TravelLayout, capacity: int, first_row: int = 0) -> None:
        self.capacity = capacity
        self.reward_dtype: np.dtype[Any] | None = None
        self.flags_changed = 0
        self._layout = layout
        self._first_ever = self._first = first_row
        self.next_row = first_row
        self._columns: dict[str, GrowingArray] = {}
        self._fields = [_ShardField() for _ in layout.sliced]
        self._starts = GrowingArray(np.int64)  # first row of every block
        self._lanes = GrowingArray(np.int64)
        self._invalid = 0  # rows held that are no transitions

    @property
    def first_row(self) -> int:
        """Number of the oldest row held."""
        return max(self._first_ever, self.next_row - self.capacity)

    @property
    def transitions(self) -> int:
        """Rows held that are transitions."""
        return self.next_row - self.first_row - self._invalid

    @property
    def blocks(self) -> int:
        """Blocks held."""
        return len(self._starts.held)

    @property
    def encoded_bytes(self) -> int:
        """Bytes of compressed slices."""
        return sum(field.unit_bytes for field in self._fields)

    def require(self, block: Block) -> None:
        """Refuse a block that this shelf cannot take."""
        dtype = block.columns["reward"].dtype
        if self.reward_dtype not in (None, dtype):
            raise ArgumentError(
                f"reward has dtype {dtype}, the first add had {self.reward_dtype}; holdall never casts, so have every "
                f"writer pass np.asarray(reward, dtype=np.{self.reward_dtype.name})"
            )

    def append(self, block: Block) -> int:
        """Take a block over, and return the number of its first row; the oldest rows leave if there is no room."""
        self.require(block)
        if self.reward_dtype is None:
            self.reward_dtype = block.columns["reward"].dtype
            self._columns = {
                name: GrowingArray(dtype, shape)
                for name, (shape, dtype) in self._layout.with_reward(self.reward_dtype).items()
            }
            for run in (*self._columns.values(), *(field.cursors for field in self._fields)):
                run.begin_at(self.next_row)
        start, number = self.next_row, self._starts.end
        for name, run in self._columns.items():
            run.append(block.columns[name])
        for shelf, field in zip(self._fields, block.fields, strict=True):
            shelf.append(number, field)
        self._starts.append(np.array([start]))
        self._lanes.append(np.array([block.lanes]))
        self._invalid += block.rows - int(np.count_nonzero(block.columns["valid"]))
        self.next_row = start + block.rows
        self._evict()
        return start

    @property
    def block_numbers(self) -> range:
        """The numbers of the blocks held, oldest first."""
        return range(self._starts.end - self.blocks, self._starts.end)

    def block(self, number: int) -> tuple[int, Block]:
        """Return the first row of a block, and the block as it came."""
        start, lanes = (int(run.between(number, number + 1)[0]) for run in (self._starts, self._lanes))
        is_last = number + 1 == self._starts.end
        end = self.next_row if is_last else int(self._starts.between(number + 1, number + 2)[0])
        columns = {name: run.between(start, end).copy() for name, run in self._columns.items()}
        return start, Block(
            lanes, end - start, columns, tuple(field.block(number, start, end, lanes) for field in self._fields)
        )

    def hide_before(self, row: int) -> None:
        """Give up the rows before a number."""
        self._first_ever = max(self._first_ever, row)
        self._evict()

    def find(self, rows: Ids) -> FoundRows:
        """Read rows, all of them held."""
        if not len(rows):
            like = self._layout.with_reward(self.reward_dtype or np.dtype(np.float32))
            nothing = {name: np.empty((0, *shape), dtype) for name, (shape, dtype) in like.items() if name != "valid"}
            none = FoundField(np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0, np.uint32), ())
            return FoundRows(nothing, (none,) * len(self._fields))
        first = self._starts.held
        place = np.searchsorted(first, rows, side="right") - 1
        block = place + (self._starts.end - len(first))
        lane = (rows - first[place]) % self._lanes.take(block)
        return FoundRows(
            {name: run.take(rows) for name, run in self._columns.items() if name != "valid"},
            tuple(field.find(rows, block, lane) for field in self._fields),
        )

    @property
    def all_valid(self) -> bool:
        """Whether every row held is a transition."""
        return self._invalid == 0

    def are_valid(self, rows: Ids) -> NDArray[np.bool_]:
        """Tell transitions from lanes that made none."""
        return np.asarray(self._columns["valid"].take(rows), np.bool_)

    def are_ends(self, rows: Ids) -> NDArray[np.bool_]:
        """Tell the last transitions of episodes."""
        return np.asarray(self._columns["terminated"].take(rows) | self._columns["truncated"].take(rows), np.bool_)

    def rewards(self, rows: Ids) -> Array:
        """Copy the rewards of rows."""
        return self._columns["reward"].take(rows)

    def set_flags(self, rows: Ids, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Say anew how transitions ended."""
        self.flags_changed += 1
        self._columns["terminated"].put(rows, terminated)
        self._columns["truncated"].put(rows, truncated)

    def report(self) -> list[FieldReport]:
        """Account for every field."""
        held = self.next_row - self.first_row
        schema, layout = self._layout.schema, self._layout
        reports = []
        for i, leaf in enumerate(schema.observation.leaves):
            name, plain = _called("obs", leaf.name), 2 * held * leaf.nbytes
            if i in layout.sliced:
                field = self._fields[layout.sliced.index(i)]
                log = field.cursors.nbytes + field.log.nbytes + field.offsets.nbytes + field.blocks.nbytes
                finding = f"{len(field.units)} blocks, as their writers encoded them"
                reports.append(FieldReport(name, field.unit_bytes, log, 0, plain, finding, field.unit_bytes))
            else:
                reports.append(FieldReport(name, 0, 0, plain, plain, "flat rows"))
        for kind, tree in (("action", schema.action), ("extras", schema.extras)):
            for leaf in tree.leaves:
                nbytes = held * leaf.nbytes
                reports.append(FieldReport(_called(kind, leaf.name), 0, 0, nbytes, nbytes, "flat rows"))
        if self.reward_dtype is not None:
            nbytes = held * self.reward_dtype.itemsize
            reports.append(FieldReport("reward", 0, 0, nbytes, nbytes, "flat rows"))
        names = ("terminated", "truncated", "valid")
        return reports + [FieldReport(name, 0, 0, held, held, "flat rows") for name in names]

    def _evict(self) -> None:
        """Give up what left by capacity."""
        first = self.first_row
        if first <= self._first:
            return
        valid = self._columns["valid"].between(self._first, first)
        self._invalid -= len(valid) - int(np.count_nonzero(valid))
        self._first = first
        starts = self._starts.held
        oldest = self._starts.end - len(starts)
        gone = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
        needed = int(starts[gone])  # a block that is held in part is held whole, to be saved or moved as it came
        for run in self._columns.values():
            run.drop_before(needed)
        for field in self._fields:
            field.drop(needed, oldest, oldest + gone)
        self._starts.drop_before(oldest + gone)
        self._lanes.drop_before(oldest + gone)


def _called(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if name else prefix


def form_words(window: Window, codec: Codec) -> str:
    """Say how slices are cut and coded, in words that are compared as they are."""
    return json.dumps({"window": window_words(window), "codec": codec_words(codec)}, sort_keys=True)


def _unique(values: Ids) -> tuple[Ids, Ids, Ids]:
    """Return each value once, in order; where it is first found; and where each of `values` is among them.

    np.unique takes twice as long for few of them.
    """
    order = values.argsort(kind="stable")
    ordered = values[order]
    is_new = np.empty(len(values), np.bool_)
    is_new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    place = np.empty(len(values), np.int64)
    place[order] = np.cumsum(is_new) - 1
    return ordered[is_new], order[is_new], place

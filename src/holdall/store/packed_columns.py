"""Plans for packed runs: which values of small observations repeat, and how a run stores each of them.

`find_plan` reads a sample of rows and returns a `PackingPlan`, which `PackedRun.pack` takes. A plan is a guess about
rows that the search did not see. `PackedRun.pack` compares every row that it packs and stores the rows that differ
whole, so a wrong guess costs memory and never changes a value.

A row consists of words, one for each item of each leaf. The search sorts the words into five kinds:

- Constant words have one value in the whole sample. All of them form one group, whose log has a single frame.
- Copies equal an earlier word. They are read from the place of the earlier word.
- Histories are words that show what another word of the leaf showed one row before. The group stores each value once.
- Repeating words take few combinations of values. The group stores each combination once.
- All other words are dense. They are stored in every record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_PACKED_LEAF_BYTES = 4096
"""Maximum bytes of a leaf in a packed run."""

_MAX_LEAVES = 256
"""Maximum number of leaves in a packed run."""
_MAX_ROW_WORDS = 4096
"""Maximum words of a row for which a plan is searched."""
_MAX_SAMPLE_WORDS = 1 << 19
"""Maximum words of the sample that are examined. Further rows are ignored."""
_MAX_SAMPLE_ROWS = 4096
"""Maximum rows of the sample that are examined."""
_MAX_HISTORY_WORDS = 1024
"""Maximum words of a leaf in which histories are searched, because every distance between two words is tried."""
_HISTORY_PAIRS = 64
"""Pairs of consecutive rows by which a history is recognised."""
_MIN_HISTORY_AGREEMENT = 0.8
"""Share of the pairs that must agree with a history. Pairs at the ends of episodes do not agree."""
_MIN_HISTORY_CHANGES = 0.5
"""Share of the rows in which a word must change to be part of a history."""
_MAX_DISTINCT_SHARE = 0.75
"""Number of different values, divided by the number of rows, above which a word is dense."""
_CURSOR_COST_BYTES = 6
"""Cost per row of one more group. It covers the bytes of the cursor, and the time to follow the cursor."""
_MAX_COST_SHARE = 0.9
"""Maximum cost of a group of repeating words, divided by the bytes of the same words in dense form."""
_MAX_REPEATING_GROUPS = 32
"""Maximum number of groups of repeating words."""

Words = NDArray[np.uint64]


class PlanPiece(NamedTuple):
    """Stretches of equal length that are adjacent in a leaf, and at regular distances in the frames of one group."""

    group: int
    leaf_offset: int  # Offset of the first stretch in the leaf.
    stretch_bytes: int
    stretch_count: int
    frame_offset: int  # Offset of the first stretch, counted from the row's first frame.
    step: int  # Distance between the starts of two stretches in the frames.
    is_copy: bool  # Whether the words are copies, which are read from the bytes of earlier words.


@dataclass(frozen=True)
class PackingPlan:
    """How `PackedRun.pack` divides the bytes of a row among groups. The header packed.h explains the terms.

    Attributes:
        leaf_bytes: Bytes of a row of each leaf.
        groups: (frame_bytes, window, is_dense) of each group.
        pieces: The pieces of each leaf.
    """

    leaf_bytes: tuple[int, ...]
    groups: tuple[tuple[int, int, bool], ...]
    pieces: tuple[tuple[PlanPiece, ...], ...]


@dataclass(frozen=True)
class _Group:
    """Words that share a log.

    Attributes:
        chains: Sequences of words, oldest value first. Every chain has one word for each frame of a row.
        is_dense: Whether the words are stored in the records, and not in a log.
    """

    chains: tuple[tuple[int, ...], ...]
    is_dense: bool = False


class _Row:
    """The words of a row, numbered leaf by leaf."""

    def __init__(self, leaf_bytes: Sequence[int], item_bytes: Sequence[int]) -> None:
        self.leaf_bytes = tuple(leaf_bytes)
        self.leaf_word_bytes = [_choose_word_bytes(each) for each in item_bytes]
        counts = [total // size for total, size in zip(leaf_bytes, self.leaf_word_bytes, strict=True)]
        self._first_words = [0, *accumulate(counts)]
        self.word_count = self._first_words[-1]
        self.word_bytes = np.repeat(self.leaf_word_bytes, counts).astype(int).tolist()

    def list_words(self, leaf: int) -> range:
        """Return the numbers of the words of a leaf."""
        return range(self._first_words[leaf], self._first_words[leaf + 1])

    def read(self, leaves: Sequence[NDArray[np.uint8]], rows: int) -> Words:
        """Return the words of the first `rows` rows, (words, rows)."""
        words = np.empty((self.word_count, rows), np.uint64)
        for leaf, array in enumerate(leaves):
            own = self.list_words(leaf)
            start = np.ascontiguousarray(array[:rows])
            words[own.start : own.stop] = start.view(f"u{self.leaf_word_bytes[leaf]}").T
        return words


def find_plan(leaves: Sequence[NDArray[np.uint8]], item_bytes: Sequence[int]) -> PackingPlan | None:
    """Return a plan for rows like those of a sample, or None if no values repeat in the sample.

    Args:
        leaves: Rows of each leaf, (rows, leaf bytes). All rows of the first lane precede those of the next lane.
        item_bytes: Bytes of an item of each leaf.
    """
    row = _describe_row(leaves, item_bytes)
    if row is None:
        return None
    rows = min(len(leaves[0]), _MAX_SAMPLE_ROWS, max(2, _MAX_SAMPLE_WORDS // row.word_count))
    words = row.read(leaves, rows)
    is_constant = (words == words[:, :1]).all(axis=1)
    varying = np.flatnonzero(~is_constant).tolist()
    copies = _find_copies(words, row, varying)
    originals = [word for word in varying if word not in copies]
    histories: list[tuple[int, ...]] = []
    for leaf in range(len(leaves)):
        histories += _find_histories(words, row.list_words(leaf), originals)
    history_words = {word for chain in histories for word in chain}
    repeating = _group_repeating(words, row, [word for word in originals if word not in history_words])
    grouped_words = history_words.union(*repeating)
    dense = [word for word in originals if word not in grouped_words]
    if len(dense) == row.word_count:
        return None
    groups = [_Group(_make_chains(np.flatnonzero(is_constant).tolist()))]
    # All chains of a group must have the same length.
    groups += [_Group(tuple(chains)) for _, chains in groupby(sorted(histories, key=len), key=len)]
    groups += [_Group(_make_chains(sorted(members))) for members in repeating]
    groups.append(_Group(_make_chains(dense), is_dense=True))
    return _make_plan(row, [group for group in groups if group.chains], copies)


def _choose_word_bytes(item_bytes: int) -> int:
    if item_bytes in (1, 2, 4, 8):
        return item_bytes
    return 8 if item_bytes % 8 == 0 else 1


def _describe_row(leaves: Sequence[NDArray[np.uint8]], item_bytes: Sequence[int]) -> _Row | None:
    """Return the words of a row, or None if there are too few rows or too many words to search for a plan."""
    if not 0 < len(leaves) <= _MAX_LEAVES or len(leaves[0]) < 2:
        return None
    leaf_bytes = [array.shape[1] for array in leaves]
    if max(leaf_bytes) > MAX_PACKED_LEAF_BYTES or min(leaf_bytes) == 0:
        return None
    row = _Row(leaf_bytes, item_bytes)
    return row if row.word_count <= _MAX_ROW_WORDS else None


def _make_chains(words: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return a chain of one word for each word."""
    return tuple((word,) for word in words)


# ---------------------------------------------------------------- copies


def _find_copies(words: Words, row: _Row, varying: list[int]) -> dict[int, int]:
    """Return the copies, each with the earlier word that it equals.

    The two words may differ in a few rows, because such rows can be stored whole. Two words that are equal in one
    quarter of the sample are candidates, and are compared in all rows.
    """
    quarters = np.array_split(words, min(4, words.shape[1]), axis=1)
    row_bytes = sum(row.leaf_bytes)
    first_with: dict[tuple[int, int, bytes], int] = {}
    copies: dict[int, int] = {}
    for word in varying:
        size = row.word_bytes[word]
        for i, quarter in enumerate(quarters):
            original = first_with.setdefault((i, size, quarter[word].tobytes()), word)
            if original == word or original in copies:
                continue
            # A row that is stored whole costs `row_bytes`. The copy saves `size` bytes in all other rows.
            if (words[original] != words[word]).mean() * row_bytes <= size / 2:
                copies[word] = original
                break
    return copies


# ---------------------------------------------------------------- histories


def _find_histories(words: Words, leaf_words: range, originals: list[int]) -> list[tuple[int, ...]]:
    """Return the chains of words of a leaf in which each word shows what the next word showed one row before."""
    is_candidate = np.isin(np.arange(leaf_words.start, leaf_words.stop), originals)
    values = words[leaf_words.start : leaf_words.stop]
    is_candidate &= (values[:, 1:] != values[:, :-1]).mean(axis=1) > _MIN_HISTORY_CHANGES
    if len(leaf_words) > _MAX_HISTORY_WORDS or is_candidate.sum() < 2:
        return []
    pairs = np.unique(np.linspace(0, values.shape[1] - 2, _HISTORY_PAIRS).astype(int))
    before = values[:, pairs]
    after = values[:, pairs + 1]
    newer_to_the_right = _find_newer(before, after, is_candidate)
    mirrored = _find_newer(before[::-1], after[::-1], is_candidate[::-1])
    last = len(leaf_words) - 1
    newer_to_the_left = {last - word: last - newer for word, newer in mirrored.items()}
    newer_by_word = max(newer_to_the_right, newer_to_the_left, key=len)
    older_by_word = {newer: word for word, newer in newer_by_word.items()}
    chains = []
    for newest in sorted(set(older_by_word) - set(newer_by_word)):
        chain = [newest]
        while chain[-1] in older_by_word:
            chain.append(older_by_word[chain[-1]])
        chains.append(tuple(leaf_words.start + word for word in reversed(chain)))
    return chains


def _find_newer(before: Words, after: Words, is_candidate: NDArray[np.bool_]) -> dict[int, int]:
    """Return, by word, the nearest word to its right that showed the same value one row before."""
    newer_by_word: dict[int, int] = {}
    used: set[int] = set()
    for distance in range(1, len(before) // 2 + 1):
        agrees = (after[:-distance] == before[distance:]).mean(axis=1) >= _MIN_HISTORY_AGREEMENT
        agrees &= is_candidate[:-distance] & is_candidate[distance:]
        for word in np.flatnonzero(agrees).tolist():
            if word not in newer_by_word and word + distance not in used:
                newer_by_word[word] = word + distance
                used.add(word + distance)
    return newer_by_word


# ---------------------------------------------------------------- repeating words


class _RepeatingGroup:
    """Words of which every combination of values is stored once.

    Attributes:
        labels: Number of the combination that each row of the sample has.
        frame_count: Number of different combinations.
        frame_bytes: Bytes of one combination.
        cost_bytes: Cost of the log and the cursors for the sample.
    """

    def __init__(self, words: list[int], labels: NDArray[np.intp], frame_count: int, row: _Row) -> None:
        self.words = words
        self.labels = labels
        self.frame_count = frame_count
        self.frame_bytes = sum(row.word_bytes[word] for word in words)
        self.cost_bytes = frame_count * self.frame_bytes + _CURSOR_COST_BYTES * len(labels)

    def join(self, other: _RepeatingGroup, row: _Row) -> _RepeatingGroup:
        """Return a group with the words of both."""
        combined = self.labels * other.frame_count + other.labels
        values, labels = np.unique(combined, return_inverse=True)
        return _RepeatingGroup(self.words + other.words, labels, len(values), row)


def _group_repeating(words: Words, row: _Row, candidates: list[int]) -> list[list[int]]:
    """Return groups of words that cost less than the same words in dense form."""
    rows = words.shape[1]
    singles = []
    for word in candidates:
        values, labels = np.unique(words[word], return_inverse=True)
        if len(values) <= _MAX_DISTINCT_SHARE * rows:
            singles.append(_RepeatingGroup([word], labels, len(values), row))
    groups: list[_RepeatingGroup] = []
    # Words with few values are first, so that they form the groups, and words with many values join them.
    for single in sorted(singles, key=lambda each: each.frame_count):
        joined = [group.join(single, row) for group in groups]
        increases = [new.cost_bytes - old.cost_bytes for new, old in zip(joined, groups, strict=True)]
        best = min(range(len(groups)), key=increases.__getitem__, default=-1)
        dense_bytes = rows * single.frame_bytes
        if best >= 0 and increases[best] <= min(single.cost_bytes, dense_bytes):
            groups[best] = joined[best]
        elif len(groups) < _MAX_REPEATING_GROUPS:
            groups.append(single)
    return [group.words for group in groups if group.cost_bytes < _MAX_COST_SHARE * rows * group.frame_bytes]


# ---------------------------------------------------------------- the tables of a plan


def _make_plan(row: _Row, groups: Sequence[_Group], copies: dict[int, int]) -> PackingPlan:
    places: dict[int, tuple[int, int]] = {}  # By word: group, and offset from the row's first frame.
    tables = []
    for number, group in enumerate(groups):
        window = len(group.chains[0])
        sizes = [row.word_bytes[chain[0]] for chain in group.chains]
        frame_bytes = sum(sizes)
        offsets = [0, *accumulate(sizes)]
        for chain, offset in zip(group.chains, offsets, strict=False):
            for frame, word in enumerate(chain):
                places[word] = (number, frame * frame_bytes + offset)
        tables.append((frame_bytes, window, group.is_dense))
    pieces = tuple(_make_pieces(row, leaf, places, copies) for leaf in range(len(row.leaf_bytes)))
    return PackingPlan(row.leaf_bytes, tuple(tables), pieces)


def _make_pieces(
    row: _Row, leaf: int, places: dict[int, tuple[int, int]], copies: dict[int, int]
) -> tuple[PlanPiece, ...]:
    """Return the pieces of a leaf, as few as possible."""
    stretches: list[PlanPiece] = []
    leaf_offset = 0
    for word in row.list_words(leaf):
        group, frame_offset = places[copies.get(word, word)]
        size = row.word_bytes[word]
        _append_stretch(stretches, PlanPiece(group, leaf_offset, size, 1, frame_offset, 0, word in copies))
        leaf_offset += size
    pieces: list[PlanPiece] = []
    for stretch in stretches:
        _append_piece(pieces, stretch)
    return tuple(pieces)


def _append_stretch(stretches: list[PlanPiece], new: PlanPiece) -> None:
    """Append a piece of one stretch, or extend the last stretch if the new one follows it in the frame."""
    if stretches:
        last = stretches[-1]
        last_end = last.frame_offset + last.stretch_bytes
        if (last.group, last_end, last.is_copy) == (new.group, new.frame_offset, new.is_copy):
            stretches[-1] = last._replace(stretch_bytes=last.stretch_bytes + new.stretch_bytes)
            return
    stretches.append(new)


def _append_piece(pieces: list[PlanPiece], new: PlanPiece) -> None:
    """Append a piece of one stretch, or add the stretch to the last piece if the distances are regular."""
    if pieces:
        last = pieces[-1]
        last_stretch_offset = last.frame_offset + (last.stretch_count - 1) * last.step
        step = new.frame_offset - last_stretch_offset
        is_alike = (last.group, last.stretch_bytes, last.is_copy) == (new.group, new.stretch_bytes, new.is_copy)
        if is_alike and (last.stretch_count == 1 or step == last.step):
            pieces[-1] = last._replace(stretch_count=last.stretch_count + 1, step=step)
            return
    pieces.append(new)

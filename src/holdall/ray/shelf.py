"""Shelves: what a shard holds, blocks of many writers in the order in which they were accepted.

In:  blocks.  Out: the rows of given numbers: small fields as they are, and the compressed units that hold their slices.
Invariant: nothing is decoded here. Row numbers count the rows ever accepted, and are never used again; a block goes
with its last row.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.checkpoint.records import window_words
from holdall.errors import ArgumentError
from holdall.experience.disk.slice_record import codec_words
from holdall.experience.part import NEXT_IS_WHOLE
from holdall.experience.sealing.codec import Codec
from holdall.experience.sealing.sealed import Coded
from holdall.experience.window import Window
from holdall.ray.block import Block, SlicedField
from holdall.ray.layout import Layout
from holdall.ray.runs import Run
from holdall.report import FieldReport
from holdall.schema import Array

_FORM_SHIFT = 40
_UNIT_MASK = (1 << _FORM_SHIFT) - 1
"""Units are counted over all blocks ever held, in fewer bits than these."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Form:
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
    forms: tuple[tuple[Form, Coded], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What was found under some row numbers."""

    columns: dict[str, Array]
    fields: tuple[FoundField, ...]


class _FieldShelf:
    """One sliced leaf of all blocks."""

    def __init__(self) -> None:
        self.cursors = Run(np.uint32)
        self.log = Run(np.uint32)  # lane after lane, so that an observation is a stretch of it
        self.offsets = Run(np.uint32)  # one more than units, block after block
        self.blocks = Run(np.int64, (4,))  # first log entry, entries a lane, first offset, form
        self.units: dict[int, bytes] = {}
        self.unit_bytes = 0
        self._forms: dict[int, Form] = {}
        self._form_keys: dict[tuple[str, bytes], int] = {}
        self._form_uses: Counter[int] = Counter()  # blocks of a form
        self._next_form = 0

    def append(self, number: int, field: SlicedField) -> None:
        coded = field.coded
        self.cursors.append(field.cursors)
        entry = (
            self.log.append(field.log.reshape(-1)),
            field.log.shape[1],
            self.offsets.append(coded.offsets),
            self._form(field),
        )
        self.blocks.append(np.array([entry], np.int64))
        units = bytes(np.asarray(coded.data).data)
        self.units[number] = units
        self.unit_bytes += len(units)

    def drop(self, row: int, first: int, end: int) -> None:
        """Give up the rows before `row`, and the blocks from `first` up to `end`, without it."""
        self.cursors.drop_before(row)
        self._forget_forms(self.blocks.between(first, end)[:, 3].tolist())
        for number in range(first, end):
            self.unit_bytes -= len(self.units.pop(number))
        if end < self.blocks.end:
            kept = self.blocks.between(end, end + 1)[0]
            self.log.drop_before(int(kept[0]))
            self.offsets.drop_before(int(kept[2]))
        else:
            self.log.drop_before(self.log.end)
            self.offsets.drop_before(self.offsets.end)
        self.blocks.drop_before(end)

    def block(self, number: int, start: int, end: int, lanes: int) -> SlicedField:
        """Return what a block brought, as it came."""
        first, entries, offset, form = self.blocks.between(number, number + 1)[0].tolist()
        is_last = number + 1 == self.blocks.end
        last = self.offsets.end if is_last else int(self.blocks.between(number + 1, number + 2)[0, 2])
        kept = self._forms[form]
        offsets = self.offsets.between(offset, last).copy()
        count = (len(offsets) - 1) * kept.codec.group
        units = np.frombuffer(self.units[number], np.uint8)
        return SlicedField(
            kept.window,
            self.cursors.between(start, end).copy(),
            self.log.between(first, first + lanes * entries).reshape(lanes, entries).copy(),
            Coded(kept.codec, count, offsets, kept.palette, units),
        )

    def find(self, rows: Ids, block: Ids, lane: Ids) -> FoundField:
        """Put together the units that hold the slices of some rows, form by form."""
        entries = self.blocks.take(block)
        cursors = self.cursors.take(rows)
        is_whole = cursors >= NEXT_IS_WHOLE
        numbers, form = _unique(entries[:, 3])
        forms = [self._forms[number] for number in numbers.tolist()]
        count, shift, group = (
            np.array([(f.window.count, f.window.shift, f.codec.group) for f in forms]).take(form, axis=0).T
        )
        length = count + np.where(is_whole, count, shift)
        end = np.cumsum(length)
        begin = end - length
        start = entries[:, 0] + lane * entries[:, 1] + (cursors & ~NEXT_IS_WHOLE)
        row = np.repeat(np.arange(len(rows)), length)
        log = self.log.take(np.arange(end[-1]) + (start - begin)[row])
        in_unit = group[row]
        # Sorted by form first, so that the units of one lie together.
        units, place = _unique(entries[row, 2] + log // in_unit + (form[row] << _FORM_SHIFT))
        bounds = np.searchsorted(units, np.arange(len(forms) + 1) << _FORM_SHIFT)
        joined = self._joined(forms, units & _UNIT_MASK, bounds.tolist())
        narrow = all(coded.count <= 1 << 16 for _, coded in joined)
        return FoundField(
            form.astype(np.int32),
            begin.astype(np.uint32) | (cursors & NEXT_IS_WHOLE),
            ((place - bounds[form[row]]) * in_unit + log % in_unit).astype(np.uint16 if narrow else np.uint32),
            joined,
        )

    def _joined(self, forms: list[Form], units: Ids, bounds: list[int]) -> tuple[tuple[Form, Coded], ...]:
        """Join the bytes of units, those of each form for itself."""
        starts, ends = self.offsets.take(units), self.offsets.take(units + 1)
        firsts = self.blocks.held[:, 2]
        block = np.searchsorted(firsts, units, side="right") + (self.blocks.end - len(firsts) - 1)
        held = self.units
        cut = [held[b][s:e] for b, s, e in zip(block.tolist(), starts.tolist(), ends.tolist(), strict=True)]
        sizes = ends - starts
        joined = []
        for form, (first, end) in zip(forms, pairwise(bounds), strict=True):
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
            self._forms[number] = Form(field.window, codec, palette.copy(), words)
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


class Shelf:
    """All blocks of a shard. Not locked: the shard that owns it is.

    Args:
        capacity: Most rows held; older ones leave one by one.
        first_row: Number of the first row that will be accepted.
    """

    def __init__(self, layout: Layout, capacity: int, first_row: int = 0) -> None:
        self.capacity = capacity
        self.reward_dtype: np.dtype[Any] | None = None
        self.flags_changed = 0
        self._layout = layout
        self._first_ever = self._first = first_row
        self.next_row = first_row
        self._columns: dict[str, Run] = {}
        self._fields = [_FieldShelf() for _ in layout.sliced]
        self._block_rows = Run(np.int64, (2,))  # first row and lanes of every block
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
        return len(self._block_rows.held)

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
                name: Run(dtype, shape) for name, (shape, dtype) in self._layout.with_reward(self.reward_dtype).items()
            }
            for run in (*self._columns.values(), *(field.cursors for field in self._fields)):
                run.begin_at(self.next_row)
        start, number = self.next_row, self._block_rows.end
        for name, run in self._columns.items():
            run.append(block.columns[name])
        for shelf, field in zip(self._fields, block.fields, strict=True):
            shelf.append(number, field)
        self._block_rows.append(np.array([[start, block.lanes]], np.int64))
        self._invalid += block.rows - int(np.count_nonzero(block.columns["valid"]))
        self.next_row = start + block.rows
        self._evict()
        return start

    @property
    def block_numbers(self) -> range:
        """The numbers of the blocks held, oldest first."""
        return range(self._block_rows.end - self.blocks, self._block_rows.end)

    def block(self, number: int) -> tuple[int, Block]:
        """Return the first row of a block, and the block as it came."""
        start, lanes = self._block_rows.between(number, number + 1)[0].tolist()
        is_last = number + 1 == self._block_rows.end
        end = self.next_row if is_last else int(self._block_rows.between(number + 1, number + 2)[0, 0])
        columns = {name: run.between(start, end).copy() for name, run in self._columns.items()}
        return start, Block(
            lanes, end - start, columns, tuple(field.block(number, start, end, lanes) for field in self._fields)
        )

    def hide_before(self, row: int) -> None:
        """Give up the rows before a number."""
        self._first_ever = max(self._first_ever, row)
        self._evict()

    def find(self, rows: Ids) -> Found:
        """Read rows, all of them held."""
        if not len(rows):
            like = self._layout.with_reward(self.reward_dtype or np.dtype(np.float32))
            nothing = {name: np.empty((0, *shape), dtype) for name, (shape, dtype) in like.items() if name != "valid"}
            none = FoundField(np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0, np.uint32), ())
            return Found(nothing, (none,) * len(self._fields))
        first = self._block_rows.held
        dropped = self._block_rows.end - len(first)
        place = np.searchsorted(first[:, 0], rows, side="right") - 1
        lane = (rows - first[place, 0]) % first[place, 1]
        return Found(
            {name: run.take(rows) for name, run in self._columns.items() if name != "valid"},
            tuple(field.find(rows, place + dropped, lane) for field in self._fields),
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
        starts = self._block_rows.held[:, 0]
        oldest = self._block_rows.end - len(starts)
        gone = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
        needed = int(starts[gone])  # a block that is held in part is held whole, to be saved or moved as it came
        for run in self._columns.values():
            run.drop_before(needed)
        for field in self._fields:
            field.drop(needed, oldest, oldest + gone)
        self._block_rows.drop_before(oldest + gone)


def _called(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if name else prefix


def form_words(window: Window, codec: Codec) -> str:
    """Say how slices are cut and coded, in words that are compared as they are."""
    return json.dumps({"window": window_words(window), "codec": codec_words(codec)}, sort_keys=True)


def _unique(values: Ids) -> tuple[Ids, Ids]:
    """Return each value once, in order, and where each of `values` is among them; np.unique takes twice as long."""
    order = values.argsort(kind="stable")
    ordered = values[order]
    is_new = np.empty(len(values), np.bool_)
    is_new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    place = np.empty(len(values), np.int64)
    place[order] = np.cumsum(is_new) - 1
    return ordered[is_new], place

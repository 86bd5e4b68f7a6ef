"""Where every field of a batch lies in its block on a device, and in the pinned memory that is sent there.

First what all blocks have in common, and batches that are shown in them; then those whose slices are copied or decoded
on the host, see `device_batch`; then those that a device fetches by itself, see `device_assembly`.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.delivery.batches import BatchForm
from holdall.delivery.device import DeviceStream, StagingRing, StagingSlot, torch_dtype
from holdall.native import BatchRequestStruct, Cut, Names, RowPlaceStruct
from holdall.schema import Array, Schema
from holdall.storage import ALIGNMENT_BYTES, RowSources, address

if TYPE_CHECKING:
    import torch


KEPT_BLOCKS = 4
"""Blocks of one kind of batch that are kept: one in use, one being filled, two for latecomers."""


class BlockSpan(NamedTuple):
    """Where a field lies in a block, and as what."""

    first: int  # byte
    nbytes: int
    shape: tuple[int, ...]
    kind: torch.dtype

    def of(self, memory: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """View the field in memory that begins with byte `begin` of the block."""
        strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return memory.view(self.kind).as_strided(self.shape, strides, (self.first - begin) // self.kind.itemsize)


class BlockLayout:
    """Where fields lie in blocks on a device, and the blocks that are kept.

    Spans do not overlap, and each begins where any dtype may.

    Attributes:
        spans: Those of which a block has tensors.
    """

    def __init__(self) -> None:
        self.block_bytes = 0
        self.spans: list[BlockSpan] = []
        self._blocks: list[DeviceBlock] = []

    def take(self, nbytes: int) -> int:
        """Return the first one of so many bytes that nothing else lies in."""
        first, self.block_bytes = self.block_bytes, self.block_bytes + aligned(nbytes)
        return first

    def add(self, kind: torch.dtype, shape: tuple[int, ...]) -> BlockSpan:
        """Return the place of one more field."""
        nbytes = math.prod(shape) * kind.itemsize
        return BlockSpan(self.take(nbytes), nbytes, shape, kind)

    def free_block(self, stream: DeviceStream, most: int) -> DeviceBlock:
        """Return memory that nobody else can see; at most so many blocks are kept, if torch counts who uses one."""
        for block in self._blocks:
            if block.is_free:
                return block
        block = DeviceBlock(stream, self)
        if len(self._blocks) < most and stream.count_uses is not None:
            self._blocks.append(block)
        return block


class DeviceBlock:
    """Memory on the device for one batch, and tensors over its fields, which are handed out as copies.

    These share the memory. It is free if nothing but what is here refers to it: no tensor, and no storage of Python's.
    """

    __slots__ = ("_count_uses", "_storage", "_uses", "memory", "start", "starts", "tensors")

    def __init__(self, stream: DeviceStream, layout: BlockLayout) -> None:
        self.memory, self._count_uses = stream.device_bytes(layout.block_bytes), stream.count_uses
        self.start, self.tensors = self.memory.data_ptr(), [span.of(self.memory) for span in layout.spans]
        self.starts = self.start + np.array([span.first for span in layout.spans], np.int64)  # of the tensors
        self._storage = self.memory.untyped_storage()
        self._uses = self._count()

    def _count(self) -> tuple[int, int]:
        storage, count = self._storage, self._count_uses
        return (0 if count is None else count(storage._cdata)), sys.getrefcount(storage)

    @property
    def is_free(self) -> bool:
        """Whether nobody else refers to the memory, which a user may have resized before."""
        return self._count() == self._uses and self.memory.data_ptr() == self.start


def aligned(nbytes: int) -> int:
    """Return where the next field may begin behind one of so many bytes."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---------------------------------------------------------------- batches in blocks


@dataclass(frozen=True, slots=True)
class DeviceBatch(Batch):
    """A batch, and where episodes ended that were not cut short: float32, for frameworks that want that."""

    ended: Any = None


_NESTED = ("obs", "action", "next_obs", "extras")
_NUMBERS = ("reward", "terminated", "truncated", "weights", "discount", "mask", "ended")


class BatchLayout(BlockLayout):
    """A block that is shown as a batch."""

    def __init__(self, torch: Any, schema: Schema) -> None:
        super().__init__()
        self._torch, self._schema, self._form = torch, schema, BatchForm(schema)

    def show(self, fields: Mapping[str, list[BlockSpan]], large: Mapping[int, Sequence[BlockSpan]]) -> None:
        """Say where a batch's fields lie.

        Args:
            fields: By name; of observations all leaves but the large ones, in their order.
            large: Observation and next observation of large leaves.
        """
        named = {name: list(fields.get(name, ())) for name in (*_NESTED, *_NUMBERS)}
        for leaf in sorted(large):
            for side, span in zip(("obs", "next_obs"), large[leaf], strict=True):
                named[side].insert(leaf, span)
        self.spans = [span for spans in named.values() for span in spans]
        ends = dict(zip(named, accumulate(map(len, named.values())), strict=True))
        self._nested = [slice(ends[name] - len(named[name]), ends[name]) for name in _NESTED]
        self._numbers = [ends[name] - 1 if named[name] else None for name in _NUMBERS]

    def batch(self, ids: NDArray[np.int64], block: DeviceBlock) -> Batch:
        """Show a block as a batch: `data` gives tensors that know nothing of each other, nor of those of the block."""
        found = [tensor.data for tensor in block.tensors]
        reward, terminated, truncated, *rest = (None if at is None else found[at] for at in self._numbers)
        leaves = [found[part] for part in self._nested]
        return self._form.batch(leaves, reward, terminated, truncated, ids, *rest, kind=DeviceBatch)


# ---------------------------------------------------------------- for batches that are sent


class DeviceMove(NamedTuple):
    """Names in a block, and where in it the slices go that they name."""

    names: BlockSpan  # (names,)
    first: int
    nbytes: int


class PackedField(NamedTuple):
    """An array whose bytes are sent, the field of the batch that it belongs to, and the shape that it has there."""

    name: str
    array: Array
    shape: tuple[int, ...]


class SentLayout(BatchLayout):
    """Where every field of a batch lies in its block; one layout for all batches of the same shapes and dtypes.

        block:  large observations, one field after another | small fields | names of slices
        head:                                                 small fields | names of slices

    The head is pinned memory.

    Args:
        rows: The shape of a batch's ids.
        cuts: How the leaves are cut that lie in segments, by their position; None for one that is not.
        small: All other fields.
    """

    def __init__(
        self, torch: Any, schema: Schema, stream: DeviceStream, rows: tuple[int, ...], cuts: Mapping[int, Cut | None],
        small: Sequence[PackedField],
    ) -> None:  # fmt: skip
        super().__init__(torch, schema)
        leaves, count = schema.observation.leaves, math.prod(rows)
        self.large = {
            leaf: [self.add(torch_dtype(torch, leaves[leaf].dtype), (*rows, *leaves[leaf].shape)) for _ in range(2)]
            for leaf in cuts
        }
        self.head_first = self.block_bytes
        self._small = [(self.add(torch_dtype(torch, f.array.dtype), f.shape), f.array.shape) for f in small]
        self.names_first = self.block_bytes
        named = {leaf: cut[2] for leaf, cut in cuts.items() if cut is not None}
        self._names = {
            leaf: [self.add(torch.int32, (count, window)) for _ in range(2)] for leaf, window in named.items()
        }
        self.moves = {leaf: _moves(self._names[leaf], self.large[leaf]) for leaf in named}
        fields: dict[str, list[BlockSpan]] = {}
        for field, (span, _) in zip(small, self._small, strict=True):
            fields.setdefault(field.name, []).append(span)
        self.show(fields, self.large)
        self.ring = StagingRing(stream, StagingSlot, slot_bytes=self.block_bytes - self.head_first)
        self._heads: dict[int, PinnedHead] = {}

    def next_head(self) -> PinnedHead:
        """Return pinned memory for the next batch."""
        slot = self.ring.next_slot()
        if slot.number not in self._heads:

            def seen(span: BlockSpan, shape: tuple[int, ...]) -> Array:
                array: Array = span.of(slot.host, self.head_first).numpy()
                return array.reshape(shape)

            names = {leaf: (seen(a, a.shape), seen(b, b.shape)) for leaf, (a, b) in self._names.items()}
            small = [seen(span, shape) for span, shape in self._small]
            between = self.names_first - self.head_first
            self._heads[slot.number] = PinnedHead(slot, slot.host[:between], slot.host[between:], small, names)
        return self._heads[slot.number]


class PinnedHead(NamedTuple):
    """Pinned memory for small fields and names; used by one batch at a time."""

    slot: StagingSlot
    fields: torch.Tensor
    named: torch.Tensor
    small: list[Array]
    names: dict[int, tuple[Names, Names]]


def _moves(names: list[BlockSpan], out: list[BlockSpan]) -> list[DeviceMove]:
    """Return which names go where: both observations at once, if neither names nor bytes have a gap in between."""

    def move(first: int, last: int) -> DeviceMove:
        nbytes = sum(span.nbytes for span in names[first : last + 1])
        flat = names[first]._replace(nbytes=nbytes, shape=(nbytes // names[first].kind.itemsize,))
        return DeviceMove(flat, out[first].first, sum(span.nbytes for span in out[first : last + 1]))

    has_gap = any(one.first + one.nbytes != other.first for one, other in (names, out))
    return [move(0, 0), move(1, 1)] if has_gap else [move(0, 1)]


# ---------------------------------------------------------------- for batches that a device fetches by itself


class BatchPlan(BatchLayout):
    """Where everything lies in pinned memory and on the device, for batches of one kind.

    block:  short fields, once more under the last ids | arrays of the draw | large fields
    pinned: short fields, once more under the last ids | arrays of the draw | places of slices
    """

    def __init__(self, torch: Any, schema: Schema, draw: Draw, sources: RowSources, cuts: tuple[Cut, ...]) -> None:
        super().__init__(torch, schema)
        self.table, self.cuts = sources.table, cuts
        self.described: Any = None  # what the request says about the store
        self.request = request = BatchRequestStruct()
        self._leading, count = draw.ids.shape, draw.ids.size
        _, observed, _, columns = sources.table.spans(count)
        columns = columns[: len(columns) - len(cuts)]  # not the cursors
        rest = max(first + _nbytes(shape, dtype) for shape, dtype, _, first in columns)
        starts = [(self.take(observed), self.take(rest)) for _ in range(1 if draw.last_ids is None else 2)]
        (request.observed, request.rest), (request.last_observed, request.last_rest) = starts[0], starts[-1]
        request.rows, request.column_count, request.task.fields = count, len(columns), len(cuts)
        request.lanes = schema.num_envs
        fields = self._short(columns, starts)
        self.arrays = [name for name in ("reward", "weights", "discount", "mask") if getattr(draw, name) is not None]
        request.copied_count = len(self.arrays)
        for copied, name in zip(request.copied, self.arrays, strict=False):
            array = getattr(draw, name)
            copied.bytes, copied.offset = array.nbytes, self.take(array.nbytes)
            fields[name] = [self._span(array.dtype, self._leading if name == "reward" else array.shape, copied.offset)]
        request.task.head_bytes = self.pinned_bytes = self.block_bytes
        request.columns = address(sources.table.columns())
        self.show(fields, {leaf: self._field(k, leaf, count) for k, leaf in enumerate(sources.large)})
        self._drawn_lanes, self._ones = np.empty(count, np.int64), np.ones(count, np.float32)
        request.drawn_lanes, self.ones_at = address(self._drawn_lanes), address(self._ones)
        slots = 1 << max(1, max([1, *(4 * count * window for *_, window in cuts)]) - 1).bit_length()
        self._scratch = (np.empty(slots * len(cuts), np.uint32), (RowPlaceStruct * count)())
        request.slots, request.slot_count = self._scratch[0].ctypes.data, slots
        request.found = ctypes.addressof(self._scratch[1])

    def _short(self, columns: Any, starts: list[tuple[int, int]]) -> dict[str, list[BlockSpan]]:
        """Return where the columns of short fields lie, by the name of the batch's field; see `Rings.rows`."""

        def spans(chosen: Any, start: tuple[int, int]) -> list[BlockSpan]:
            return [
                self._span(dtype, (*self._leading, *shape[1:]), (start[block] if _nbytes(shape, dtype) else 0) + first)
                for shape, dtype, block, first in chosen
            ]

        leaves, actions = len(self._schema.observation.leaves) - len(self.cuts), len(self._schema.action.leaves)
        flags, extras = 2 * leaves + actions, 2 * leaves + actions + 2
        rows, last = spans(columns, starts[0]), spans(columns, starts[-1])
        return {
            "obs": rows[0 : 2 * leaves : 2], "next_obs": last[1 : 2 * leaves : 2], "action": rows[2 * leaves : flags],
            "terminated": [last[flags]], "truncated": [last[flags + 1]], "extras": rows[extras:-2],
            "reward": [rows[-2]], "ended": [last[-1]],
        }  # fmt: skip

    def _field(self, k: int, leaf: int, count: int) -> list[BlockSpan]:
        """Make room for a field in slices, on the device and for its places; return where its observations lie."""
        source, task = self.request.source[k], self.request.task.field[k]
        task.outer, task.run_bytes, task.window = self.cuts[k]
        slices = 2 * count * task.window
        for name, nbytes in (("places", 8), ("positions", 4), ("repeats", 8)):
            setattr(source, name, self.pinned_bytes)
            self.pinned_bytes += aligned(slices * nbytes)
        nbytes = slices * task.outer * task.run_bytes
        source.to, known = self.take(nbytes), self._schema.observation.leaves[leaf]
        shape = (*self._leading, *known.shape)
        return [self._span(known.dtype, shape, first) for first in (source.to, source.to + nbytes // 2)]

    def _span(self, dtype: np.dtype[Any], shape: tuple[int, ...], first: int) -> BlockSpan:
        return BlockSpan(first, _nbytes(shape, dtype), shape, torch_dtype(self._torch, dtype))


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize

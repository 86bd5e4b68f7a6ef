"""Where every field of a batch lies in its block on a device, and in the pinned memory that is sent there.

First those whose slices are copied or decoded on the host, see `device_batch`; then those that a device fetches by
itself, see `device_assembly`.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.delivery.device import DeviceStream, StagingRing, StagingSlot
from holdall.native import BatchRequestStruct, Cut, Names, RowPlaceStruct
from holdall.schema import Array, Leaf, Schema, Tree
from holdall.storage import ALIGNMENT_BYTES, RowSources, address

if TYPE_CHECKING:
    import torch


_NAME, _PLACE = np.dtype(np.int32), np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Where a field lies in a block, in bytes and in elements."""

    first: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int  # in elements
    dtype: np.dtype[Any]
    kind: torch.dtype  # the same, as torch calls it


class DeviceMove(NamedTuple):
    """Names in a block, and where in it the slices go that they name."""

    names_offset: int  # in names
    names: int
    first: int
    nbytes: int


class PackedField(NamedTuple):
    """An array whose bytes are sent, and the shape in which the batch shows them."""

    array: Array
    shape: tuple[int, ...]


class BatchLayout:
    """Where every field of a batch lies in its block; one layout for all batches of the same shapes and dtypes.

        block:  large observations, one field after another | small fields | names of slices | places of slices
        head:                                                 small fields | names of slices | places of slices

    Spans do not overlap, and each begins where any dtype may. The head is pinned memory.

    Args:
        kind_of: Returns torch's name of a dtype.
        rows: The shape of a batch's ids.
        large: The leaves that lie in segments, by their position, and how each is cut; None for one that is not.
        small: All other fields.
    """

    def __init__(
        self,
        stream: DeviceStream,
        kind_of: Callable[[np.dtype[Any]], torch.dtype],
        rows: tuple[int, ...],
        large: dict[int, tuple[Leaf, Cut | None]],
        small: Sequence[PackedField],
    ) -> None:
        self.nbytes = 0
        self._kind_of = kind_of
        self.large = {
            position: (self._add((*rows, *leaf.shape), leaf.dtype), self._add((*rows, *leaf.shape), leaf.dtype))
            for position, (leaf, _) in large.items()
        }
        self.head_first = self.nbytes
        self.small = [self._add(shown.shape, shown.array.dtype) for shown in small]
        self.names_first = self.nbytes
        count = math.prod(rows)
        cuts = {position: cut for position, (_, cut) in large.items() if cut is not None}
        self.names = {
            position: (self._add((count, cut[2]), _NAME), self._add((count, cut[2]), _NAME))
            for position, cut in cuts.items()
        }
        self.places = {position: self._add((2 * count * cut[2],), _PLACE) for position, cut in cuts.items()}
        self.moves = {position: _moves(self.names[position], self.large[position]) for position in cuts}
        self._shapes = [shown.array.shape for shown in small]
        self.ring = StagingRing(stream, slot_bytes=self.nbytes - self.head_first)
        self._heads: dict[int, PinnedHead] = {}

    def next_head(self) -> PinnedHead:
        """Return pinned memory for the next batch."""
        slot = self.ring.next_slot()
        if slot.number not in self._heads:
            self._heads[slot.number] = PinnedHead(slot, self, self._shapes)
        return self._heads[slot.number]

    def _add(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> BlockSpan:
        nbytes = math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        first = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return BlockSpan(first, first + nbytes, shape, strides, first // dtype.itemsize, dtype, self._kind_of(dtype))


class PinnedHead:
    """Pinned memory for small fields and names; used by one batch at a time."""

    def __init__(self, slot: StagingSlot, layout: BatchLayout, shapes: list[tuple[int, ...]]) -> None:
        self.slot = slot
        small_bytes = layout.names_first - layout.head_first
        self.fields, self.named = slot.host[:small_bytes], slot.host[small_bytes:]

        def seen(span: BlockSpan, shape: tuple[int, ...]) -> Array:
            piece: Array = slot.array[span.first - layout.head_first : span.end - layout.head_first]
            return piece.view(span.dtype).reshape(shape)

        self.places: dict[int, NDArray[np.int64]] = {
            position: seen(span, span.shape) for position, span in layout.places.items()
        }
        self._small = [seen(span, shape) for span, shape in zip(layout.small, shapes, strict=True)]
        self.names: dict[int, tuple[Names, Names]] = {
            position: (seen(pair[0], pair[0].shape), seen(pair[1], pair[1].shape))
            for position, pair in layout.names.items()
        }

    def pack(self, fields: Sequence[PackedField]) -> None:
        """Copy the small fields to their places."""
        for place, shown in zip(self._small, fields, strict=True):
            place[...] = shown.array


def _moves(names: tuple[BlockSpan, BlockSpan], out: tuple[BlockSpan, BlockSpan]) -> list[DeviceMove]:
    """Return which names go where: both observations at once, if neither names nor bytes have a gap in between."""
    pairs = [
        DeviceMove(named.offset, math.prod(named.shape), span.first, span.end - span.first)
        for named, span in zip(names, out, strict=True)
    ]
    if names[0].end == names[1].first and out[0].end == out[1].first:
        first, second = pairs
        return [DeviceMove(first.names_offset, first.names + second.names, first.first, first.nbytes + second.nbytes)]
    return pairs


# ---------------------------------------------------------------- for batches that a device fetches by itself


@dataclass(frozen=True, slots=True)
class DeviceBatch(Batch):
    """A batch, and where episodes ended that were not cut short: float32, for frameworks that want that."""

    ended: Any = None


class _Span(NamedTuple):
    """A field of a batch in its block, as torch's `as_strided` takes it."""

    kind: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class BatchPlan:
    """Where everything lies in pinned memory and on the device, for batches of one kind.

    block:  short fields, once more under the last ids | arrays of the draw | large fields
    pinned: short fields, once more under the last ids | arrays of the draw | places of slices
    """

    def __init__(self, torch: Any, schema: Schema, draw: Draw, sources: RowSources, cuts: tuple[Cut, ...]) -> None:
        self._torch, self._schema = torch, schema
        self._nested = [nesting(tree) for tree in (schema.observation, schema.action, schema.extras)]
        self.table, self.cuts = sources.table, cuts
        self.described: Any = None  # what the request says about the store
        self._blocks: list[DeviceBlock] = []
        self.request = request = BatchRequestStruct()
        self._leading, count = draw.ids.shape, draw.ids.size
        self._size = 0
        _, observed, _, columns = sources.table.spans(count)
        columns = columns[: len(columns) - len(cuts)]  # not the cursors
        rest = max(first + _nbytes(shape, dtype) for shape, dtype, _, first in columns)
        starts = [(self._take(observed), self._take(rest)) for _ in range(1 if draw.last_ids is None else 2)]
        (request.observed, request.rest), (request.last_observed, request.last_rest) = starts[0], starts[-1]
        request.rows, request.column_count, request.task.fields = count, len(columns), len(cuts)
        request.lanes = schema.num_envs
        self._spans = self._short(columns, starts)
        self.arrays = [name for name in ("reward", "weights", "discount", "mask") if getattr(draw, name) is not None]
        request.copied_count = len(self.arrays)
        for copied, name in zip(request.copied, self.arrays, strict=False):
            array = getattr(draw, name)
            copied.bytes, copied.offset = array.nbytes, self._take(array.nbytes)
            shape = draw.ids.shape if name == "reward" else array.shape
            self._spans[name] = [self._span(array.dtype, shape, copied.offset)]
        request.task.head_bytes = self.pinned_bytes = self.block_bytes = self._size
        request.columns = address(sources.table.columns())
        leaves, firsts = schema.observation.leaves, [self._field(k, cut, count) for k, cut in enumerate(cuts)]
        large = zip(sources.large, firsts, strict=True)
        self._large = [
            (leaf, self._span(leaves[leaf].dtype, (2, *self._leading, *leaves[leaf].shape), first))
            for leaf, first in sorted(large)
        ]
        self._drawn_lanes, self._ones = np.empty(count, np.int64), np.ones(count, np.float32)
        request.drawn_lanes, self.ones_at = address(self._drawn_lanes), address(self._ones)
        slots = 1 << max(1, max([1, *(4 * count * window for *_, window in cuts)]) - 1).bit_length()
        self._scratch = (np.empty(slots * len(cuts), np.uint32), (RowPlaceStruct * count)())
        request.slots, request.slot_count = self._scratch[0].ctypes.data, slots
        request.found = ctypes.addressof(self._scratch[1])

    def _take(self, nbytes: int) -> int:
        first, self._size = self._size, self._size + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return first

    def _short(self, columns: Any, starts: list[tuple[int, int]]) -> dict[str, list[_Span]]:
        """Return where the columns of short fields lie, by the name of the batch's field; see `Rings.rows`."""

        def spans(chosen: Any, start: tuple[int, int]) -> list[_Span]:
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

    def _field(self, k: int, cut: Cut, count: int) -> int:
        """Make room for a field in slices, on the device and for its places; return its first byte on the device."""
        source, task = self.request.source[k], self.request.task.field[k]
        task.outer, task.run_bytes, task.window = cut
        slices = 2 * count * task.window
        for name, nbytes in (("places", 8), ("positions", 4), ("repeats", 8)):
            setattr(source, name, self.pinned_bytes)
            self.pinned_bytes += -(-slices * nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        source.to, nbytes = self.block_bytes, slices * task.outer * task.run_bytes
        self.block_bytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return int(source.to)

    def _span(self, dtype: np.dtype[Any], shape: tuple[int, ...], first: int) -> _Span:
        kind = self._torch.from_numpy(np.empty(0, dtype)).dtype
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return _Span(kind, shape, strides, first // dtype.itemsize)

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Show a block as the fields of a batch, in the order of `batch`."""

        def seen(span: _Span) -> torch.Tensor:
            return memory.view(span.kind).as_strided(span.shape, span.strides, span.offset)

        fields = {name: [seen(span) for span in spans] for name, spans in self._spans.items()}
        for leaf, span in self._large:
            for side, tensor in zip(("obs", "next_obs"), seen(span).unbind(), strict=True):
                fields[side].insert(leaf, tensor)
        named = [fields.pop(name) for name in ("obs", "next_obs", "action", "extras")]
        self._ends = list(accumulate(map(len, named)))
        at = {name: self._ends[-1] + i for i, name in enumerate(fields)}
        self._rest = [at.get(name) for name in _NUMBERS]
        return [tensor for of_name in (*named, *fields.values()) for tensor in of_name]

    def free_block(self, stream: DeviceStream, most: int) -> DeviceBlock:
        """Return memory for a batch that nobody else can see."""
        for block in self._blocks:
            if block.is_free:
                return block
        block = DeviceBlock(stream, self)
        if len(self._blocks) < most and stream.count_uses is not None:
            self._blocks.append(block)
        return block

    def batch(self, ids: NDArray[np.int64], block: DeviceBlock) -> DeviceBatch:
        """Show a block as a batch: `data` gives tensors that know nothing of each other, nor of those of the block."""
        found, (obs, following, action, extras) = [t.data for t in block.tensors], self._ends
        observed, acted, added = self._nested
        terminated, truncated, reward, ended, weights, discount, mask = (
            None if at is None else found[at] for at in self._rest
        )
        return DeviceBatch(
            observed(found[:obs]), acted(found[following:action]), reward, observed(found[obs:following]), terminated,
            truncated, added(found[action:extras]), ids, weights, discount, mask, ended,
        )  # fmt: skip


class BlockPlan(Protocol):
    """How a block is laid out."""

    block_bytes: int

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Show a block as its fields."""


class DeviceBlock:
    """Memory on the device for one batch, and tensors over all of its fields, which are handed out as copies.

    These share the memory. It is free if nothing but what is here refers to it: no tensor, and no storage of Python's.
    """

    __slots__ = ("_count_uses", "_memory", "_storage", "_uses", "start", "tensors")

    def __init__(self, stream: DeviceStream, plan: BlockPlan) -> None:
        self._memory, self._count_uses = stream.device_bytes(plan.block_bytes), stream.count_uses
        self.start, self.tensors = self._memory.data_ptr(), plan.tensors(self._memory)
        self._storage = self._memory.untyped_storage()
        self._uses = self._count()

    def _count(self) -> tuple[int, int]:
        storage, count = self._storage, self._count_uses
        return (0 if count is None else count(storage._cdata)), sys.getrefcount(storage)

    @property
    def is_free(self) -> bool:
        """Whether nobody else refers to the memory, which a user may have resized before."""
        return self._count() == self._uses and self._memory.data_ptr() == self.start


_NUMBERS = ("terminated", "truncated", "reward", "ended", "weights", "discount", "mask")


def nesting(tree: Tree) -> Callable[[list[Any]], Any]:
    """Return what puts one tensor a leaf into a space's nesting; quicker than the general way, where there is one."""
    if isinstance(tree.structure, int):
        return itemgetter(tree.structure)
    keys = tree.keys
    return tree.build if keys is None else lambda found: dict(zip(keys, found, strict=True))


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize

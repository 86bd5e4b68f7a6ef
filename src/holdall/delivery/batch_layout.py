"""Where every field of a batch lies in its block on a device, and in the pinned memory that is sent there.

For batches whose slices are copied or decoded on the host, see `device_batch`. Those that a device fetches by itself
are laid out in `device_assembly`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device import DeviceStream, StagingRing, StagingSlot
from holdall.native import Cut, Names
from holdall.schema import Array, Leaf
from holdall.storage import ALIGNMENT_BYTES

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

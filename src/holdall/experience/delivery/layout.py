"""Where every field of a batch lies in its block on a device: worked out once for all batches that look alike.

In:  shapes and dtypes.  Out: spans of the block, and pinned memory that lies as the end of it does.
Invariant: spans do not overlap, and each begins where any dtype may.

    block:  large observations, one field after another | small fields | names of slices | places of slices
    head:                                                 small fields | names of slices | places of slices

The head is pinned. Names and places are sent first, so that the bus is busy while small fields are packed; places
only tell of slices that the device reads on the host by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.experience.delivery.assemble import ALIGNMENT_BYTES
from holdall.experience.delivery.device import Line
from holdall.experience.native_unique import Cut, Names
from holdall.schema import Array, Leaf

if TYPE_CHECKING:
    import torch

_NAME, _PLACE = np.dtype(np.int32), np.dtype(np.int64)
_HEADS = 2
"""While one batch leaves its pinned memory, the next is put into the other's."""


@dataclass(frozen=True, slots=True)
class Span:
    """A field's place in a block, in bytes and as torch counts."""

    first: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int  # in elements
    dtype: np.dtype[Any]
    kind: torch.dtype  # the same, as torch calls it


class Move(NamedTuple):
    """Names in a block, and where in it the slices they name are to stand."""

    names_offset: int  # in names
    names: int
    first: int
    nbytes: int


class Shown(NamedTuple):
    """An array whose bytes are sent, and the shape in which the batch shows them."""

    array: Array
    shape: tuple[int, ...]


class BatchLayout:
    """The layout of batches with the same fields, shapes and dtypes.

    Args:
        kind_of: Returns torch's name of a dtype.
        rows: The shape of a batch's ids.
        large: The leaves that lie in segments, by their position, and how each is cut; None for one that is not.
        small: All other fields.
    """

    def __init__(
        self,
        line: Line,
        kind_of: Callable[[np.dtype[Any]], torch.dtype],
        rows: tuple[int, ...],
        large: dict[int, tuple[Leaf, Cut | None]],
        small: Sequence[Shown],
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
        shapes = [shown.array.shape for shown in small]
        self.heads = [Head(line, self, shapes) for _ in range(_HEADS)]

    def _add(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Span:
        nbytes = math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        first = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return Span(first, first + nbytes, shape, strides, first // dtype.itemsize, dtype, self._kind_of(dtype))


class Head:
    """Pinned memory for small fields and names; used by one batch at a time."""

    def __init__(self, line: Line, layout: BatchLayout, shapes: list[tuple[int, ...]]) -> None:
        self.host: torch.Tensor = line.host_bytes(layout.nbytes - layout.head_first)
        small_bytes = layout.names_first - layout.head_first
        self.fields, self.named = self.host[:small_bytes], self.host[small_bytes:]
        self.left: Any = None  # a mark behind the copy from here
        array = self.host.numpy()

        def seen(span: Span, shape: tuple[int, ...]) -> Array:
            piece: Array = array[span.first - layout.head_first : span.end - layout.head_first]
            return piece.view(span.dtype).reshape(shape)

        self.places: dict[int, NDArray[np.int64]] = {
            position: seen(span, span.shape) for position, span in layout.places.items()
        }
        self._small = [seen(span, shape) for span, shape in zip(layout.small, shapes, strict=True)]
        self.names: dict[int, tuple[Names, Names]] = {
            position: (seen(pair[0], pair[0].shape), seen(pair[1], pair[1].shape))
            for position, pair in layout.names.items()
        }

    def pack(self, fields: Sequence[Shown]) -> None:
        """Copy the small fields to their places."""
        for place, shown in zip(self._small, fields, strict=True):
            place[...] = shown.array


def _moves(names: tuple[Span, Span], out: tuple[Span, Span]) -> list[Move]:
    """Tell which names go where: both observations at once, if neither names nor bytes have a gap in between."""
    pairs = [
        Move(named.offset, math.prod(named.shape), span.first, span.end - span.first)
        for named, span in zip(names, out, strict=True)
    ]
    if names[0].end == names[1].first and out[0].end == out[1].first:
        first, second = pairs
        return [Move(first.names_offset, first.names + second.names, first.first, first.nbytes + second.nbytes)]
    return pairs

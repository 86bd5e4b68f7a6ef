"""Sealed slices: a block's slices, compressed one by one into one arena.

In:  what an encoder wrote.  Out: the same, kept for reading.
Invariant: it never changes. Slice i lies between offsets i and i + 1; a slice that did not shrink
is stored as it was coded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from holdall.experience.arena import Bytes
from holdall.experience.codec import Codec


class SealedSlices(ABC):
    """Compressed slices and the codec that reads them."""

    def __init__(self, codec: Codec, data: Bytes, offsets: NDArray[np.uint32], palette: Bytes) -> None:
        self.codec = codec
        self.data = data
        self.offsets = offsets  # (slices + 1,)
        self.palette = palette  # 256 words, or nothing

    @property
    @abstractmethod
    def address(self) -> int:
        """The number under which records name these slices."""

    @property
    def count(self) -> int:
        """Slices held."""
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, offsets and palette; a dictionary belongs to many blocks."""
        return self.data.nbytes + self.offsets.nbytes + self.palette.nbytes

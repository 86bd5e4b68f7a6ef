"""Sealed slices: a block's slices, compressed one by one into one arena.

In:  what an encoder wrote.  Out: the same, kept for reading.
Invariant: it never changes. Slice i lies between offsets i and i + 1; a slice that did not shrink
is stored as it was coded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.experience.arena import Bytes
from holdall.experience.codec import Codec


class SealedSlices(ABC):
    """Compressed slices and the codec that reads them."""

    def __init__(self, codec: Codec, data: Bytes, offsets: NDArray[np.uint32], palette: Bytes) -> None:
        transform = codec.transform
        if not transform.is_sound() or palette.size != 256 * transform.word_bytes or len(offsets) < 1:
            raise DamageError(
                f"a block claims to be coded by {transform} with a palette of {palette.size} bytes and "
                f"{len(offsets)} offsets, which do not go together; nothing of it is returned"
            )
        self.codec = codec
        self.data = data
        self.offsets = offsets  # (slices + 1,)
        self.palette = palette  # 256 words, or nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return CarriedSlices, (self.codec, self.data, self.offsets, self.palette)

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


class CarriedSlices(SealedSlices):
    """Sealed slices on their way from one process to another; a coder has to adopt them."""

    @property
    def address(self) -> int:
        """Refuse: nobody can read them yet."""
        raise DamageError("sealed slices were read before a coder adopted them; report this")

"""Unique slices: each slice of a field is kept once.

In:  slices as bytes.  Out: their numbers in a block.
Invariant: a block only grows. A slice that was numbered never moves and never changes, so it
can be read without a lock for as long as the block is referred to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.experience.arena import Bytes
from holdall.experience.disk.segment_file import Extent
from holdall.experience.sealing.sealed import SealedSlices


class SliceBlock(ABC):
    """An arena of equally long slices; how they are found by their bytes is the kernels' affair."""

    def __init__(self, slice_bytes: int, arena: Bytes) -> None:
        self.slice_bytes = slice_bytes
        self.capacity = arena.size // slice_bytes
        self.arena = arena
        self.steps_before = 0  # transitions of the closed parts that name slices of the block
        self.sealed: SealedSlices | None = None

    def replace_by(self, sealed: SealedSlices) -> None:
        """Keep the slices in their sealed form alone; readers of the raw form hold on to it."""
        self.sealed = sealed
        self.arena = np.empty(0, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        arena = self.arena  # looked at first: once it is empty, the sealed form is there
        content = self.sealed or arena[: self.used * self.slice_bytes]
        return KeptBlock, (self.slice_bytes, self.used, content)

    @property
    def is_on_disk(self) -> bool:
        """Whether the slices lie in a file."""
        return self.extent is not None

    @property
    def extent(self) -> Extent | None:
        """Where the slices lie in a file, if they do."""
        return None if self.sealed is None else self.sealed.extent

    @property
    def raw(self) -> Bytes:
        """The slices as rows, while they are raw."""
        return self.arena[: self.used * self.slice_bytes].reshape(self.used, self.slice_bytes)

    @property
    def held(self) -> object:
        """Return what a record of this block points into."""
        return self.arena if self.sealed is None else self.sealed

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays that the slices lie in."""
        return [self.arena] if self.sealed is None else self.sealed.arrays()

    @property
    @abstractmethod
    def used(self) -> int:
        """Slices held."""

    @abstractmethod
    def freeze(self) -> None:
        """Drop the index: nothing more will be added."""

    @property
    def used_bytes(self) -> int:
        """Bytes that the slices held take in memory."""
        return self.used * self.slice_bytes if self.sealed is None else self.sealed.nbytes


class KeptBlock(SliceBlock):
    """A block that was filled elsewhere and takes no more slices."""

    def __init__(self, slice_bytes: int, used: int, content: Bytes | SealedSlices) -> None:
        self.slice_bytes = slice_bytes
        self.capacity = used
        self.arena = np.empty(0, np.uint8)
        self.sealed = None
        if isinstance(content, SealedSlices):
            self.sealed = content
        else:
            self.arena = content

    @property
    def used(self) -> int:
        """Slices held."""
        return self.capacity

    def freeze(self) -> None:
        """Do nothing: there is no index."""

"""Unique slices: each slice of a field is kept once.

In:  slices as bytes.  Out: their numbers in a block.
Invariant: a block only grows. A slice that was numbered never moves and never changes, so it
can be read without a lock for as long as the block is referred to.
"""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_MAP_NORESERVE = 0x4000
"""Linux's flag; the mmap module names it from Python 3.13 on."""

_HUGE_PAGES_FROM = 4 * 2**20
"""From this size on, as NumPy does, ask for large pages: random reads then miss fewer entries
of the address cache. A page is still taken only when it is first written to."""


def reserve(nbytes: int) -> Bytes:
    """Reserve zeroed memory whose pages cost nothing until they are written to.

    It is mapped on its own, not taken from the heap, so that freeing it gives it back to the
    operating system at once, whatever else was allocated in between.
    """
    size = max(nbytes, 1)
    if sys.platform == "win32":
        block = mmap.mmap(-1, size)
    else:
        # Without NORESERVE a kernel that does not overcommit counts pages never written to.
        lazily = _MAP_NORESERVE if sys.platform == "linux" else 0
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | lazily)
    if size >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)[:nbytes]


def release_tail(array: Bytes, used_bytes: int) -> None:
    """Give back the pages of a reserved array behind its first `used_bytes`, where that can be done.

    A large page is taken whole when its first byte is written; this returns the rest of it.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    start = -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and start < len(owner):
        owner.madvise(mmap.MADV_DONTNEED, start, len(owner) - start)


def as_bytes(array: NDArray[Any], lanes: int) -> Bytes:
    """See an array with a leading lane axis as rows of bytes, copying only if it must."""
    contiguous: NDArray[Any] = np.ascontiguousarray(array)
    return contiguous.reshape(lanes, -1).view(np.uint8)


class SliceBlock(ABC):
    """An arena of equally long slices; how they are found by their bytes is the kernels' affair."""

    def __init__(self, slice_bytes: int, arena_bytes: int) -> None:
        self.slice_bytes = slice_bytes
        self.capacity = arena_bytes // slice_bytes
        self.arena = reserve(self.capacity * slice_bytes)
        self.steps_before = 0  # transitions of the closed parts that name slices of the block

    @property
    @abstractmethod
    def used(self) -> int:
        """Slices held."""

    @abstractmethod
    def freeze(self) -> None:
        """Drop the index: nothing more will be added."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the slices held."""
        return self.used * self.slice_bytes

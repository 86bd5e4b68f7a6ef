"""Arenas: memory that is mapped on its own and given back at once.

In:  a size.  Out: zeroed bytes, whose pages cost nothing until they are written to.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
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


def address(array: NDArray[Any]) -> int:
    """Return where a contiguous array's first byte lies; the caller keeps the array alive."""
    try:
        # A third of the cost of array.ctypes.
        buffer: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):  # read-only or empty
        return int(array.ctypes.data)


class ArenaPool:
    """Arenas that were given up and can be written to again, without the cost of fresh pages.

    An arena may still be read by a batch that is being built: it is handed out only when nothing
    else refers to it.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._spare: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """Return an arena of `nbytes`, used before or new."""
        for position in range(len(self._spare)):
            spare = self._spare[position].nbytes == nbytes
            # NumPy lets every view refer to the array that owns the memory: that one's references
            # are those of all views. The list's array is one, the call the other.
            unread = sys.getrefcount(self._spare[position]) <= 2 and sys.getrefcount(self._spare[position].base) <= 2
            if spare and unread:
                return self._spare.pop(position)
        return reserve(nbytes)

    def give_up(self, arena: Bytes) -> None:
        """Keep an arena that its owner no longer needs, if there is room for it."""
        if arena.nbytes:
            self._spare = [*self._spare, arena][-self._most :]

    @property
    def spare(self) -> list[Bytes]:
        """Arenas kept."""
        return list(self._spare)

    @property
    def nbytes(self) -> int:
        """Bytes kept, whether their pages were touched or not."""
        return sum(arena.nbytes for arena in self._spare)


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

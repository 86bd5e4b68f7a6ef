"""What the C library keeps of the system's memory while blocks come and go: glibc's malloc, for large blocks.

In:  the sizes of blocks in the order in which they are allocated and freed.
Out: the most that was taken from the system.
A freed block is used again for one of the same size or smaller; its rest, and what lies between blocks in use, stays.
So a process holds more than the sum of what lives in it. How much more depends on the order, which this follows.
Invariant: free blocks never touch each other, nor the top of the heap.
"""

from __future__ import annotations

from bisect import bisect_left, insort

KIB, MIB = 2**10, 2**20
SMALLEST = KIB  # smaller blocks come from caches of their own, and are too small to matter
_PAGE = 4 * KIB
_OVERHEAD = 80  # of a block that is aligned to a cache line: its header, and what alignment costs
_LEAST_REST = 32  # of a block that is divided
_TOP_PAD = 128 * KIB  # what the heap is extended by beside what is asked for
_CONSOLIDATED = 64 * KIB  # a free block from which on the heap is looked at for pages to give back
_FIRST_MAPPED = 128 * KIB  # blocks from here on are mapped on their own, until one of them is freed
LAST_MAPPED = 32 * MIB  # blocks above are always mapped on their own


class CHeap:
    """The heap of one thread, and the blocks that are mapped beside it."""

    def __init__(self) -> None:
        self.peak = 0
        self._top = 0  # where the free part at the end of the heap begins
        self._end = 0
        self._mapped = 0
        self._map_from = _FIRST_MAPPED
        self._trim_from = _FIRST_MAPPED
        self._used: dict[object, tuple[int | None, int]] = {}  # address (None: mapped on its own) and size
        self._by_size: list[tuple[int, int]] = []  # free blocks: size and address
        self._free: dict[int, int] = {}  # the same: size by address
        self._free_ends: dict[int, int] = {}  # and address by end

    @property
    def held(self) -> int:
        """Bytes that are taken from the system now."""
        return self._mapped + self._end

    def allocate(self, key: object, nbytes: int) -> None:
        """Allocate a block that is freed by its key."""
        if nbytes < SMALLEST:
            return
        size = (nbytes + _OVERHEAD + 15) // 16 * 16
        at = bisect_left(self._by_size, (size, 0))
        if at < len(self._by_size):
            self._used[key] = (self._divide(at, size), size)
        elif self._end - self._top < size + _LEAST_REST and size >= self._map_from:
            whole = (size + _PAGE - 1) // _PAGE * _PAGE
            self._used[key] = (None, whole)
            self._mapped += whole
        else:
            lacking = size + _LEAST_REST - (self._end - self._top)
            if lacking > 0:
                self._end += (lacking + _TOP_PAD + _PAGE - 1) // _PAGE * _PAGE
            self._used[key] = (self._top, size)
            self._top += size
        self.peak = max(self.peak, self.held)

    def _divide(self, at: int, size: int) -> int:
        """Take a block from the free ones, and return its rest to them."""
        found, address = self._by_size[at]
        self._remove(address, found)
        if found - size >= _LEAST_REST:
            self._insert(address + size, found - size)
        return address

    def free(self, key: object) -> None:
        """Free a block."""
        address, size = self._used.pop(key, (0, 0))
        if address is None:
            self._mapped -= size
            if self._map_from < size <= LAST_MAPPED:  # blocks of this size are used again, the library concludes
                self._map_from, self._trim_from = size, 2 * size
            return
        if size == 0:
            return
        end = address + size
        if end in self._free:  # joined with its neighbours
            behind = self._free[end]
            self._remove(end, behind)
            end += behind
        if address in self._free_ends:
            before = self._free_ends[address]
            self._remove(before, address - before)
            address = before
        if end == self._top:
            self._top = address
        else:
            self._insert(address, end - address)
        if end - address >= _CONSOLIDATED and self._end - self._top >= self._trim_from:
            self._end -= max(self._end - self._top - _LEAST_REST - _TOP_PAD, 0) // _PAGE * _PAGE

    def _insert(self, address: int, size: int) -> None:
        insort(self._by_size, (size, address))
        self._free[address] = size
        self._free_ends[address + size] = address

    def _remove(self, address: int, size: int) -> None:
        self._by_size.pop(bisect_left(self._by_size, (size, address)))
        del self._free[address], self._free_ends[address + size]

"""Arrays of Ray's object store in batches: handed out as they lie there, where that can be.

In:  arrays as Ray gives them, not to be written to.  Out: the same memory as the caller's own.
Invariant: what is handed out may be written to, and stays as long as something of it is used.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import numpy as np

from holdall.schema import Bytes

_BORROWED_BYTES = 2**18
"""Smaller arrays are copied: Ray does not hold them in shared memory."""
_MOST_BORROWED = 8


class LentArrays:
    """Arrays that Ray's object store holds, handed out as a caller's own where that can be: without a copy.

    An answer is made for one learner, so that nobody else reads it. Ray maps the store's memory for writing, and does
    not say so: it is looked up. Where it is not so, and where a caller keeps many batches, arrays are copied.
    """

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int]] = []
        self._lent = 0
        self._lock = threading.Lock()

    def writable(self, array: Bytes) -> Bytes | None:
        """Return the array as one that may be written to; None where it cannot be."""
        address = array.ctypes.data
        if array.nbytes < _BORROWED_BYTES or self._lent >= _MOST_BORROWED or not self._is_mapped(address, array.nbytes):
            return None
        lender = _Lender(array)
        with self._lock:
            self._lent += 1
        weakref.finalize(lender, self._return).atexit = False
        return np.asarray(lender)

    def _return(self) -> None:
        with self._lock:
            self._lent -= 1

    def _is_mapped(self, address: int, nbytes: int) -> bool:
        if not any(start <= address and address + nbytes <= end for start, end in self._mapped):
            self._mapped = _shared_for_writing()
        return any(start <= address and address + nbytes <= end for start, end in self._mapped)


class _Lender:
    """Keeps an array of the store from being freed while something that was made of it is used."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def _shared_for_writing() -> list[tuple[int, int]]:
    """Return where this process has memory that others share and that it may write to."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = [line.split(maxsplit=2)[:2] for line in lines]
    bounds = [places.split("-") for places, may in found if may.startswith("rw") and may.endswith("s")]
    return [(int(start, 16), int(end, 16)) for start, end in bounds]

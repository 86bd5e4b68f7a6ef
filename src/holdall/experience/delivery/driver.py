"""The CUDA driver, for copies that C starts by itself: outside the GIL, in the middle of a loop.

In:  a stream of torch's.  Out: the address of the driver's function, and the stream as it knows it.
Invariant: it is only asked for what torch would ask it for too; where it is not found, torch does it all.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_FILES = ("libcuda.so.1", "nvcuda.dll")


class Driver:
    """The driver, and the context of one stream."""

    def __init__(self, library: ctypes.CDLL, stream: int) -> None:
        self.stream = stream
        self.sender = ctypes.cast(library.cuMemcpyHtoDAsync_v2, ctypes.c_void_p).value or 0
        self._push, self._pop = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
        self._context = ctypes.c_void_p()
        self._popped = ctypes.c_void_p()
        if library.cuStreamGetCtx(ctypes.c_void_p(stream), ctypes.byref(self._context)):
            self.sender = 0

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream's context that of the calling thread: a thread that is new to CUDA has none."""
        if self.sender == 0 or self._push(self._context):
            yield
            return
        try:
            yield
        finally:
            self._pop(ctypes.byref(self._popped))


def found_driver(stream: int) -> Driver | None:
    """Return the driver, or None where torch reaches its devices by another one."""
    for file in _FILES:
        try:
            return Driver(ctypes.CDLL(file), stream)
        except (OSError, AttributeError):
            continue
    return None

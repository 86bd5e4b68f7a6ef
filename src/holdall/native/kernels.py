"""Which loops are used: the compiled ones, or NumPy's."""

from __future__ import annotations

import ctypes
import functools

from holdall.native.library import chosen_library, compiled_library, system_libraries
from holdall.native.numpy_codec import PortableCoder
from holdall.native.numpy_kernels import PortableKernels
from holdall.native.reading import NativeReading
from holdall.native.writing import NativeCoder, NativeWriting
from holdall.storage import Coder, Kernels


class NativeKernels(NativeWriting, NativeReading):
    """Makes parts and fills batches with the compiled loops."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        libraries = system_libraries()
        self._library = library
        self.packs_columns = bool(library.holdall_release(0, 0))
        self.coder: Coder = PortableCoder() if libraries is None else NativeCoder(library, libraries)


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled loops, or None if no library of this version was built."""
    library = compiled_library()
    return None if library is None else NativeKernels(library)


def chosen_kernels() -> Kernels:
    """Return the compiled loops if they can be used, else the portable ones; HOLDALL_KERNELS names one of the two."""
    native = None if chosen_library() is None else native_kernels()
    return native or PortableKernels()

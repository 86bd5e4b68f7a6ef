"""Which loops are used: the compiled ones, or NumPy's."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from holdall.native.batch_reader import NativeBatchReader, makes_arrays
from holdall.native.library import chosen_library, compiled_library, system_libraries
from holdall.native.numpy_codec import PortableCoder
from holdall.native.numpy_kernels import PortableKernels
from holdall.native.reading import NativeDecoder, NativeReading
from holdall.native.tick_writer import has_expected_objects
from holdall.native.writing import NativeCoder, NativeWriting
from holdall.storage import BatchReader, Coder, Kernels, Repair


class NativeKernels(NativeWriting, NativeReading):
    """Makes parts and fills batches with the compiled loops."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        libraries = system_libraries()
        self._library = library
        self.coder: Coder = PortableCoder() if libraries is None else NativeCoder(library, libraries)

    def new_batch_reader(
        self, lock: Any, repair: Repair, is_changed: bytearray, most_kept_bytes: int, threads: int
    ) -> BatchReader:
        """See `Kernels.new_batch_reader`."""
        if not (has_expected_objects(lock) and makes_arrays()):
            return BatchReader()
        decoder = self.coder if isinstance(self.coder, NativeDecoder) else None
        return NativeBatchReader(self._library, decoder, lock, repair, is_changed, most_kept_bytes, threads)


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled loops, or None if no library of this version was built."""
    library = compiled_library()
    return None if library is None else NativeKernels(library)


def chosen_kernels() -> Kernels:
    """Return the compiled loops if they can be used, else the portable ones; HOLDALL_KERNELS names one of the two."""
    native = None if chosen_library() is None else native_kernels()
    return native or PortableKernels()

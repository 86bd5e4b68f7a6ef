"""The system's Zstandard and LZ4, found once, for the compiled loops to call.

In:  nothing.  Out: the addresses of their functions, and contexts made with them.
Invariant: a library that lacks one function counts as missing; then NumPy and the zstandard and
lz4 packages do the same work.
"""

from __future__ import annotations

import ctypes.util
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdall.errors import DamageError

_ZSTD_LEVEL, _ZSTD_CONTENT_SIZE, _ZSTD_CHECKSUM, _ZSTD_DICT_ID = 100, 200, 201, 202
"""Numbers of ZSTD_cParameter, part of the library's stable interface."""

_FUNCTIONS = {
    "zstd": (
        "ZSTD_createCCtx", "ZSTD_freeCCtx", "ZSTD_CCtx_setParameter", "ZSTD_CCtx_refCDict",
        "ZSTD_compress2", "ZSTD_createDCtx", "ZSTD_freeDCtx", "ZSTD_decompress_usingDDict",
        "ZSTD_createCDict", "ZSTD_freeCDict", "ZSTD_createDDict", "ZSTD_freeDDict", "ZSTD_isError",
    ),
    "lz4": ("LZ4_decompress_safe", "LZ4_compress_default", "LZ4_compress_HC"),
}  # fmt: skip
_FILES = {"zstd": ("libzstd.so.1", "libzstd.1.dylib"), "lz4": ("liblz4.so.1", "liblz4.1.dylib")}


@dataclass(frozen=True)
class Libraries:
    """Both libraries, and what is asked of them."""

    functions: dict[str, Any]

    def address(self, name: str) -> int:
        """Return where a function lies, for C to call it."""
        return ctypes.cast(self.functions[name], ctypes.c_void_p).value or 0

    def new_dctx(self, owner: object) -> int:
        """Make a decompression context that lives as long as `owner`."""
        return self._owned(owner, "ZSTD_createDCtx", "ZSTD_freeDCtx")

    def new_cctx(self, owner: object, level: int, cdict: int) -> int:
        """Make a compression context that lives as long as `owner`."""
        cctx = self._owned(owner, "ZSTD_createCCtx", "ZSTD_freeCCtx")
        # Sizes are known from the schema, and damage is found by the segment's own checksums.
        for parameter, value in (
            (_ZSTD_LEVEL, level),
            (_ZSTD_CONTENT_SIZE, 0),
            (_ZSTD_CHECKSUM, 0),
            (_ZSTD_DICT_ID, 0),
        ):
            self._call("ZSTD_CCtx_setParameter", ctypes.c_void_p(cctx), parameter, value)
        if cdict:
            self._call("ZSTD_CCtx_refCDict", ctypes.c_void_p(cctx), ctypes.c_void_p(cdict))
        return cctx

    def new_ddict(self, owner: object, content: bytes) -> int:
        """Make a dictionary for decompression that lives as long as `owner`."""
        try:
            return self._owned(owner, "ZSTD_createDDict", "ZSTD_freeDDict", content, len(content))
        except MemoryError as error:
            raise DamageError(f"a dictionary of {len(content)} bytes is none; nothing is read with it") from error

    def new_cdict(self, owner: object, content: bytes, level: int) -> int:
        """Make a dictionary for compression that lives as long as `owner`."""
        return self._owned(owner, "ZSTD_createCDict", "ZSTD_freeCDict", content, len(content), level)

    def _owned(self, owner: object, create: str, free: str, *arguments: Any) -> int:
        sized = [ctypes.c_size_t(value) if index == 1 else value for index, value in enumerate(arguments)]
        handle = self._call(create, *sized)
        if not handle:
            raise MemoryError(f"{create} found no memory")
        # Not when the interpreter ends: a worker may be in the middle of a call with it.
        weakref.finalize(owner, self._call, free, ctypes.c_void_p(handle)).atexit = False
        return int(handle)

    def _call(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] = self.functions[name]
        return function(*arguments)


@functools.cache
def system_libraries() -> Libraries | None:
    """Load both libraries, or None if one of them is missing or too old."""
    functions: dict[str, Any] = {}
    for name, wanted in _FUNCTIONS.items():
        library = _load(name)
        if library is None:
            return None
        for function in wanted:
            try:
                functions[function] = library[function]
            except AttributeError:
                return None
            functions[function].restype = ctypes.c_void_p
    return Libraries(functions)


def _load(name: str) -> ctypes.CDLL | None:
    for file in (*_FILES[name], ctypes.util.find_library(name)):
        try:
            if file is not None:
                return ctypes.CDLL(file)
        except OSError:
            continue
    return None

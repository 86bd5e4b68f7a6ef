"""Coding and decoding with codec.c and the system's Zstandard and LZ4, outside the GIL.

In:  blocks of slices.  Out: sealed slices, and what C needs to read them.
Invariant: every thread decodes with a context and scratch memory of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import threading
import weakref
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.native.library import Libraries
from holdall.schema import Bytes
from holdall.storage.blocks import Coded, Coder, SealedSlices, address, reserve
from holdall.storage.codec import Codec, Dictionary, Method, Transform
from holdall.storage.remote_file import bring_slices

_REUSE_PLACES = 4096
_PALETTE_SLOTS = 1024
_MOST_READ_AT_ONCE = 1 << 20
_MOST_COMPRESSORS = 8
_of_transform = operator.attrgetter(*(field.name for field in fields(Transform)))


class _Transform(ctypes.Structure):
    _fields_ = tuple((field.name, ctypes.c_int64) for field in fields(Transform))


class _Sealed(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("checks", ctypes.c_void_p),
        ("palette", ctypes.c_void_p),
        ("ddict", ctypes.c_void_p),
        ("data_bytes", ctypes.c_int64),
        ("slice_count", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("method", ctypes.c_int64),
        ("file", ctypes.c_int64),
        ("file_start", ctypes.c_int64),
        ("form", _Transform),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("lz4_decompress_safe", ctypes.c_void_p),
        ("zstd_decompress_using_ddict", ctypes.c_void_p),
        ("dctx", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("unit", ctypes.c_void_p),
        ("unit_bytes", ctypes.c_int64),
        ("unit_of", ctypes.c_void_p),
        ("unit_number", ctypes.c_int64),
        ("read", ctypes.c_void_p),
        ("read_bytes", ctypes.c_int64),
        ("read_of", ctypes.c_void_p),
        ("read_first", ctypes.c_int64),
        ("read_end", ctypes.c_int64),
        ("error", ctypes.c_int64),
    )


class _Encoder(ctypes.Structure):
    _fields_ = (
        ("lz4_compress_default", ctypes.c_void_p),
        ("lz4_compress_hc", ctypes.c_void_p),
        ("zstd_compress2", ctypes.c_void_p),
        ("zstd_is_error", ctypes.c_void_p),
        ("cctx", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("method", ctypes.c_int64),
        ("level", ctypes.c_int64),
    )


class _ReuseEntry(ctypes.Structure):
    _fields_ = (
        ("batch", ctypes.c_uint64),
        ("sealed", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("slice", ctypes.c_void_p),
    )


class _Reuse(ctypes.Structure):
    _fields_ = (
        ("batch", ctypes.c_uint64),
        ("places", ctypes.c_int64),
        ("entries", ctypes.c_void_p),
    )


class NativeSealed(SealedSlices):
    """Sealed slices that codec.c reads."""

    def __init__(self, coder: NativeCoder, coded: Coded) -> None:
        super().__init__(coded)
        extent = self.extent
        self._struct = _Sealed(
            data=address(coded.data) if isinstance(coded.data, np.ndarray) else 0,
            offsets=address(coded.offsets),
            checks=0 if extent is None else address(extent.checks),
            palette=address(coded.palette),
            ddict=coder.ddict(coded.codec.dictionary),
            data_bytes=coded.data.nbytes,
            slice_count=coded.count,
            group=coded.codec.group,
            method=int(coded.codec.method),
            file=-1 if extent is None else extent.file.descriptor,
            file_start=0 if extent is None else extent.start,
            form=_form(coded.codec.transform),
        )

    @property
    def address(self) -> int:
        """Where the C structure lies."""
        return ctypes.addressof(self._struct)


class NativeCoder:
    """Seals and reads blocks with the compiled loops."""

    def __init__(self, library: ctypes.CDLL, libraries: Libraries) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._encode = library.holdall_encode
        self._encode.argtypes = [
            pointer, pointer, pointer, number, pointer, number, *[pointer] * 3,
        ]  # fmt: skip
        self._encode.restype = number
        self._decode = library.holdall_decode
        self._decode.argtypes = [pointer, pointer, pointer, number, pointer]
        self._decode.restype = number
        self._checksums = library.holdall_checksums
        self._checksums.argtypes = [pointer, pointer, number, pointer]
        self._checksums.restype = None
        self._chill = library.holdall_chill
        self._chill.argtypes = [pointer, number]
        self._library = library
        self._libraries = libraries
        self._thread = threading.local()
        self._batches = itertools.count(1)
        self._most_unit_bytes = 0
        self._ddicts: weakref.WeakKeyDictionary[Dictionary, int] = weakref.WeakKeyDictionary()

    def adopt(self, coded: Coded) -> SealedSlices:
        """See `Coder.adopt`."""
        sealed = NativeSealed(self, coded)
        unit_bytes = coded.codec.group * coded.codec.transform.coded_bytes
        self._most_unit_bytes = max(self._most_unit_bytes, unit_bytes)
        return sealed

    def seal(self, slices: Bytes, codec: Codec) -> SealedSlices | None:
        """Code all rows of `slices`; None if a palette does not hold their words."""
        transform = codec.transform
        count = len(slices)
        compressor = self._compressor(codec)
        room = count * transform.coded_bytes
        data = reserve(room)
        offsets = np.zeros(-(-count // codec.group) + 1, np.uint32)
        palette = np.zeros(256 * transform.word_bytes, np.uint8)
        slots = np.zeros(_PALETTE_SLOTS, np.uint16)
        function = self._libraries.address
        encoder = _Encoder(
            lz4_compress_default=function("LZ4_compress_default"),
            lz4_compress_hc=function("LZ4_compress_HC"),
            zstd_compress2=function("ZSTD_compress2"),
            zstd_is_error=function("ZSTD_isError"),
            cctx=compressor.cctx,
            scratch=address(compressor.scratch),
            scratch_bytes=compressor.scratch.size,
            group=codec.group,
            method=int(codec.method),
            level=codec.level,
        )
        form = _form(transform)
        used = self._encode(
            ctypes.addressof(encoder), ctypes.addressof(form), address(slices), count,
            address(data), room, address(offsets), address(palette), address(slots),
        )  # fmt: skip
        if used < 0:
            return None
        packed = reserve(used)
        packed[:] = data[:used]
        return self.adopt(Coded(codec, count, offsets, palette, packed))

    def keeping(self) -> Coder:
        """See `Coder.keeping`."""
        return _KeepingCoder(self._library, self._libraries)

    def _compressor(self, codec: Codec) -> _Compressor:
        return _Compressor(self._libraries, codec)

    def checksums(self, data: Bytes, offsets: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """See `Coder.checksums`."""
        checks = np.zeros(len(offsets) - 1, np.uint32)
        self._checksums(address(data), address(offsets), len(checks), address(checks))
        return checks

    def decode(self, sealed: SealedSlices, numbers: NDArray[np.int64], out: Bytes) -> None:
        """Decode slices into the rows of `out`."""
        bring_slices(sealed, numbers)
        decoder, _ = self.reading(_scratch_bytes(sealed.codec.transform))
        failed = self._decode(decoder, sealed.address, address(numbers), len(numbers), address(out))
        if failed >= 0:
            raise DamageError(f"slice {int(numbers[failed])} is damaged; nothing of it is returned")

    def chill(self, block: Bytes) -> None:
        """Push a block out of the caches, before its reading is timed."""
        self._chill(address(block), block.size)

    def next_batch(self) -> int:
        """Number a batch, so that threads tell what they decoded for it from what is older."""
        return next(self._batches)

    def reading(self, scratch_bytes: int, batch: int = 0) -> tuple[int, int]:
        """Return the calling thread's decoder and table of slices to use again, for C."""
        state: _Reading | None = getattr(self._thread, "state", None)
        unit_bytes = self._most_unit_bytes
        if state is None or state.scratch.size < scratch_bytes or state.unit.size < unit_bytes:
            state = self._thread.state = _Reading(self._libraries, scratch_bytes, unit_bytes)
        if state.reuse.batch != batch or batch == 0:
            state.forget()
        state.reuse.batch = batch
        return ctypes.addressof(state.decoder), ctypes.addressof(state.reuse)

    def decoders(self, known: list[_Reading], hands: int, scratch_bytes: int) -> NDArray[np.uint64]:
        """Return a decoder for each of several hands, for C; `known` is kept by whoever reads with them."""
        unit_bytes = self._most_unit_bytes
        known[:] = [state for state in known if state.scratch.size >= scratch_bytes and state.unit.size >= unit_bytes]
        known += [_Reading(self._libraries, scratch_bytes, unit_bytes) for _ in range(hands - len(known))]
        for state in known:
            state.forget()
        return np.array([ctypes.addressof(state.decoder) for state in known], np.uint64)

    @property
    def read_error(self) -> int:
        """What the system said when the calling thread last failed to read a file; 0 if that was not it."""
        state: _Reading | None = getattr(self._thread, "state", None)
        return 0 if state is None else int(state.decoder.error)

    def ddict(self, dictionary: Dictionary | None) -> int:
        """Return the library's form of a dictionary, made once."""
        if dictionary is None:
            return 0
        if dictionary not in self._ddicts:
            self._ddicts[dictionary] = self._libraries.new_ddict(dictionary, dictionary.content)
        return self._ddicts[dictionary]


class _Compressor:
    """A library's context for one codec, and its form of the dictionary, which live as long as this; and scratch."""

    def __init__(self, libraries: Libraries, codec: Codec) -> None:
        coded_bytes = codec.transform.coded_bytes
        self.scratch = np.empty(2 * coded_bytes + 2 * codec.group * coded_bytes + 1024, np.uint8)
        self.cctx = 0
        if codec.method is Method.ZSTD:
            content, level = codec.dictionary, codec.level
            cdict = 0 if content is None else libraries.new_cdict(self, content.content, level)
            self.cctx = libraries.new_cctx(self, level, cdict)


class _KeepingCoder(NativeCoder):
    """A coder that goes on with its compressors from block to block."""

    def __init__(self, library: ctypes.CDLL, libraries: Libraries) -> None:
        super().__init__(library, libraries)
        self._compressors: dict[Codec, _Compressor] = {}

    def _compressor(self, codec: Codec) -> _Compressor:
        kept = self._compressors.get(codec)
        if kept is None:
            if len(self._compressors) >= _MOST_COMPRESSORS:
                self._compressors.clear()
            kept = self._compressors[codec] = super()._compressor(codec)
        return kept


class _Reading:
    """One thread's context, scratch and table of decoded slices."""

    def __init__(self, libraries: Libraries, scratch_bytes: int, unit_bytes: int) -> None:
        self.scratch = np.empty(scratch_bytes, np.uint8)
        self.unit = np.empty(unit_bytes, np.uint8)
        self._read = np.empty(max(unit_bytes, min(scratch_bytes, _MOST_READ_AT_ONCE)), np.uint8)
        self._entries = np.zeros(_REUSE_PLACES * ctypes.sizeof(_ReuseEntry), np.uint8)
        self.decoder = _Decoder(
            lz4_decompress_safe=libraries.address("LZ4_decompress_safe"),
            zstd_decompress_using_ddict=libraries.address("ZSTD_decompress_usingDDict"),
            dctx=libraries.new_dctx(self),
            scratch=address(self.scratch),
            scratch_bytes=scratch_bytes,
            unit=address(self.unit),
            unit_bytes=unit_bytes,
            read=address(self._read),
            read_bytes=self._read.size,
        )
        self.reuse = _Reuse(batch=0, places=_REUSE_PLACES, entries=address(self._entries))

    def forget(self) -> None:
        """Forget what an older batch was read from: it may be gone, and another block stand at its address."""
        self.decoder.unit_of = self.decoder.read_of = None
        self.decoder.error = 0


def _scratch_bytes(transform: Transform) -> int:
    return 2 * transform.coded_bytes + transform.slice_bytes


def _form(transform: Transform) -> Any:
    return _Transform(*map(int, _of_transform(transform)))

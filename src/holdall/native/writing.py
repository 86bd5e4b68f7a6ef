"""Writing: ticks become unique slices by append.c, and blocks of slices are compressed by encode.c, without the GIL.

In:  contiguous arrays, whose sizes are checked here.  Out: parts of the open segment, and sealed slices.
Invariant: a slice that was numbered never moves; what is sealed has the bytes that numpy_codec.py reads, too.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.native.library import (
    CompressionLibraries,
    EncoderStruct,
    OpenPartStruct,
    SealedBlockStruct,
    SliceBlockStruct,
    SlicedFieldStruct,
    TransformStruct,
)
from holdall.native.reading import NativeDecoder
from holdall.native.tick_writer import DenseLayout, NativeFastTick, NativeTickWriter, has_expected_objects, struct_field
from holdall.schema import Array, Bytes
from holdall.storage import (
    TRANSFORM_FIELDS,
    Codec,
    Coded,
    Coder,
    Cursors,
    Dictionary,
    FastTick,
    FlatField,
    Method,
    OpenPart,
    Order,
    Repair,
    SealedSlices,
    SliceBlock,
    TickWriter,
    Transform,
    Window,
    address,
    places_of,
    release_tail,
    reserve,
)

_MOST_LAYOUTS = 8
"""Layouts that a part remembers; a caller has one or two."""
_PALETTE_SLOTS = 1024
_MOST_COMPRESSORS = 8
_ZSTD_LEVEL, _ZSTD_HASH_LOG, _ZSTD_CHAIN_LOG, _ZSTD_MIN_MATCH = 100, 102, 103, 105
_ZSTD_CONTENT_SIZE, _ZSTD_CHECKSUM, _ZSTD_DICT_ID = 200, 201, 202
"""Numbers of ZSTD_cParameter, part of the library's stable interface."""
_LONG_UNIT, _LONG_UNIT_TABLES = 2**18, 17
"""Of longer units Zstandard would keep tables of 10 to 30 MiB: with 1 MiB they are as small, and made faster."""
_of_transform = operator.attrgetter(*TRANSFORM_FIELDS)


# ---------------------------------------------------------------- ticks


class NativeWriting:
    """The half of `NativeKernels` that makes parts."""

    _library: ctypes.CDLL

    packs_columns: bool

    def pack_columns(
        self,
        run: NDArray[np.int64],
        rings: NDArray[np.int64],
        ring_ticks: int,
        lanes: int,
        out: Bytes,
        scratch: tuple[NDArray[np.uint32], Bytes],
    ) -> int:
        """See `Kernels.pack_columns`."""
        room, (numbers, row) = (address(out), out.size), scratch
        used = self._library.holdall_pack_columns(
            address(run), address(rings), ring_ticks, lanes, *room, address(numbers), address(row)
        )
        return int(used)

    def release(self, first: int, nbytes: int) -> None:
        """See `Kernels.release`."""
        self._library.holdall_release(first, nbytes)

    def new_block(self, slice_bytes: int, arena: Bytes) -> SliceBlock:
        """Make an empty block in `arena`."""
        return NativeBlock(slice_bytes, arena)

    def new_part(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> OpenPart:
        """Make an empty part that writes to `block`."""
        return NativePart(self._library, window, lanes, block, arena_bytes)

    def new_writer(
        self, flat: Sequence[FlatField], ring_ticks: int, ticks: tuple[int, int], _repair: Repair
    ) -> TickWriter:
        """Make a writer that has written the ticks from `ticks[0]` up to `ticks[1]`."""
        return NativeTickWriter(self._library, flat, ring_ticks, ticks)

    def new_fast_tick(self, lock: Any, repair: Repair) -> FastTick:
        """Make a short way to write ticks, for a memory with this lock."""
        return NativeFastTick(self._library, lock, repair) if has_expected_objects(lock) else FastTick()


class NativeBlock(SliceBlock):
    """Unique slices behind an open-addressing table."""

    used = struct_field("used")

    def __init__(self, slice_bytes: int, arena: Bytes) -> None:
        super().__init__(slice_bytes, arena)
        slots = 1 << max(4, (2 * self.capacity).bit_length())
        self._index: tuple[NDArray[Any], ...] = (np.empty(self.capacity, np.uint64), np.zeros(slots, np.uint32))
        self._struct = SliceBlockStruct(
            arena=address(self.arena),
            hashes=address(self._index[0]),
            slots=address(self._index[1]),
            mask=slots - 1,
            capacity=self.capacity,
            used=0,
            slice_bytes=slice_bytes,
        )
        self.address = ctypes.addressof(self._struct)

    def clear(self) -> None:
        """Forget every slice and keep the memory."""
        self._struct.used = 0
        self._index[1].fill(0)

    def freeze(self) -> None:
        """Drop the index: nothing more will be added."""
        self._struct.capacity = self._struct.used
        self._index = ()
        release_tail(self.arena, self.used_bytes)


class NativePart(OpenPart):
    """A part whose ticks are written by append.c, which counts them."""

    longest, steps = struct_field("longest"), struct_field("steps")
    broken_steps, pushed = struct_field("broken_steps"), struct_field("pushed")

    def __init__(
        self, library: ctypes.CDLL, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int
    ) -> None:
        super().__init__(window, lanes, block, arena_bytes)
        self._append_tick = library.holdall_append
        self._memory: tuple[NDArray[Any], ...] = (
            np.empty(lanes * self.obs_bytes, np.uint8),
            np.zeros(lanes, np.int64),
            np.empty(window.slice_bytes, np.uint8),
        )
        last, end, scratch = self._memory
        self._struct = OpenPartStruct(
            block=block.address if isinstance(block, NativeBlock) else None,
            direct=address(self.slices),
            log=None if self.log is None else address(self.log),
            last=address(last),
            end=address(end),
            scratch=address(scratch),
            log_rows=self.log_rows,
            lanes=lanes,
            outer=window.outer,
            run_bytes=window.run_bytes,
            window=window.count,
            shift=window.shift,
        )
        self._linked = self.log  # what the struct points to
        self.address = ctypes.addressof(self._struct)
        self._layouts: dict[tuple[int, ...], DenseLayout] = {}

    def append(self, obs: Array, next_obs: Array, cursors: Cursors) -> None:
        """See `OpenPart.append`."""
        self.lengthen_log()
        field = SlicedFieldStruct()
        kept = self.aim(field, obs, next_obs, len(cursors))
        written = self._append_tick(self.address, field.obs, field.next_obs, field.order, address(cursors))
        del kept
        if written != 0:
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    def aim(self, field: SlicedFieldStruct, obs: Array, next_obs: Array, places: int) -> tuple[Array, Array]:
        """Point C to the tick to come, of so many lanes; return the arrays, which must live until it is written."""
        self._require_tick(obs, next_obs, places)
        if self._linked is not self.log and self.log is not None:
            self._struct.log, self._struct.log_rows = address(self.log), len(self.log)
            self._linked = self.log
        layout = 0
        if not (obs.flags.c_contiguous and next_obs.flags.c_contiguous):
            obs, next_obs, layout = self._as_they_lie(obs, next_obs)
        field.obs, field.next_obs, field.order = address(obs), address(next_obs), layout
        return obs, next_obs

    def append_run(self, obs: Array, next_obs: Array, cursors: Cursors) -> None:
        """See `OpenPart.append_run`: nothing is done for every tick but the call itself."""
        first, next_first, ticks = obs[0], next_obs[0], len(obs)
        self._require_tick(first, next_first, len(cursors[0]))
        is_plain = first.flags.c_contiguous and next_first.flags.c_contiguous and cursors.flags.c_contiguous
        if not (is_plain and len(next_obs) == len(cursors) == ticks):
            super().append_run(obs, next_obs, cursors)
            return
        self.lengthen_log(ticks)
        self.aim(SlicedFieldStruct(), first, next_first, self.lanes)
        now, after, places = address(first), address(next_first), address(cursors)
        step, next_step, width = obs.strides[0], next_obs.strides[0], cursors.strides[0]
        write, part = self._append_tick, self.address
        for t in range(ticks):
            if write(part, now + t * step, after + t * next_step, 0, places + t * width) != 0:
                raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    def clear(self) -> None:
        """See `OpenPart.clear`."""
        if isinstance(self.block, NativeBlock):
            self.block.clear()
        self._memory[1].fill(0)  # the lanes' ends
        struct = self._struct
        struct.longest = struct.steps = struct.broken_steps = struct.pushed = 0
        self._used_before = 0

    def _as_they_lie(self, obs: Array, next_obs: Array) -> tuple[Array, Array, int]:
        """Return both arrays in the order of their memory, and the layout that leads back.

        Images often come with transposed axes; C then puts them in order while it writes them.
        Arrays that differ in layout, or do not fill their memory, are copied.
        """
        strides = obs.strides
        if strides == next_obs.strides:
            dense = self._layouts.get(strides)
            if dense is None and len(self._layouts) < _MOST_LAYOUTS:
                dense = self._layouts[strides] = DenseLayout(obs)
                self._make_layout_room()
            if dense is not None and dense.order is not None:
                raw, next_raw = obs.transpose(dense.order), next_obs.transpose(dense.order)
                return raw, next_raw, dense.address
        return np.ascontiguousarray(obs), np.ascontiguousarray(next_obs), 0

    def _make_layout_room(self) -> None:
        """Give C memory to put ticks in order in, when a first one needs it."""
        if not self._struct.packed:
            tick_bytes = self.lanes * self.obs_bytes
            raw, packed = np.empty(tick_bytes, np.uint8), np.empty(2 * tick_bytes, np.uint8)
            self._memory = (*self._memory, raw, packed)
            self._struct.last_raw, self._struct.packed = address(raw), address(packed)

    @property
    def shortest(self) -> int:
        """See `OpenPart.shortest`."""
        return int(self._memory[1].min())


# ---------------------------------------------------------------- compressed blocks


class NativeSealed(SealedSlices):
    """Sealed slices that decode.c reads."""

    def __init__(self, coded: Coded, ddict: int) -> None:
        super().__init__(coded)
        extent, dictionary = self.extent, coded.codec.dictionary
        common = (0, 0)
        if dictionary is not None and dictionary.content and coded.codec.method is Method.LZ4:
            common = address(np.frombuffer(dictionary.content, np.uint8)), len(dictionary.content)
        self._struct = SealedBlockStruct(
            data=address(coded.data) if isinstance(coded.data, np.ndarray) else 0,
            offsets=address(coded.offsets),
            checks=0 if extent is None else address(extent.checks),
            palette=address(coded.palette),
            places=address(coded.places) if len(coded.places) else 0,
            ddict=ddict,
            common=common[0],
            common_bytes=common[1],
            place_bytes=coded.places.itemsize,
            data_bytes=coded.data.nbytes,
            slice_count=coded.count,
            group=coded.codec.group,
            key=coded.codec.key,
            method=int(coded.codec.method),
            file=-1 if extent is None else extent.file.descriptor,
            file_start=0 if extent is None else extent.start,
            form=_form(coded.codec.transform),
        )

    @property
    def address(self) -> int:
        """Where the C structure lies."""
        return ctypes.addressof(self._struct)


class NativeCoder(NativeDecoder):
    """Seals blocks, and reads them as `NativeDecoder` does."""

    def __init__(self, library: ctypes.CDLL, libraries: CompressionLibraries) -> None:
        super().__init__(library, libraries)
        self._ddicts: weakref.WeakKeyDictionary[Dictionary, int] = weakref.WeakKeyDictionary()

    def adopt(self, coded: Coded) -> SealedSlices:
        """See `Coder.adopt`."""
        sealed = NativeSealed(coded, self._ddict(coded.codec.dictionary, coded.codec.method))
        unit_bytes = coded.codec.group * coded.codec.transform.coded_bytes
        self._most_unit_bytes = max(self._most_unit_bytes, unit_bytes)
        return sealed

    def seal(self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1) -> SealedSlices | None:
        """See `Coder.seal`."""
        transform, count = codec.transform, len(slices)
        slices = np.ascontiguousarray(slices)  # C reads row after row
        if slices.nbytes != count * transform.slice_bytes:
            raise DamageError(f"slices of {slices.shape} came to a codec of {transform.slice_bytes} bytes; report this")
        if order is not None and (len(order) != count or order.dtype != np.uint32):
            raise DamageError(f"an order of {len(order)} came with {count} slices; report this")
        share = codec.group * max(codec.key, 1)  # slices that stay together
        share *= max(1, -(-count // (share * threads)))
        encode = partial(self._encode, slices, codec, order, reserve(count * transform.coded_bytes), share)
        if share >= count:
            pieces = [encode(0)]
        else:
            with ThreadPoolExecutor(threads, "holdall-sealer") as helpers:
                pieces = list(helpers.map(encode, range(0, count, share)))
        done = [piece for piece in pieces if piece is not None]
        if len(done) < len(pieces):
            return None
        packed = np.concatenate([units for units, _, _ in done], out=reserve(sum(len(units) for units, _, _ in done)))
        offsets = np.zeros(1, np.uint32)
        for _, ends, _ in done:
            offsets = np.concatenate([offsets, offsets[-1] + ends])
        return self.adopt(Coded(codec, count, offsets, done[0][2], packed, places_of(order)))

    def _encode(
        self, slices: Bytes, codec: Codec, order: Order | None, data: Bytes, share: int, first: int
    ) -> tuple[Bytes, NDArray[np.uint32], Bytes] | None:
        """Code slices from `first` on; return their units, where these end, and the palette; None: it does not hold."""
        compressor, form = self._compressor(codec), _form(codec.transform)
        count, coded_bytes = min(share, len(slices) - first), codec.transform.coded_bytes
        own = data[first * coded_bytes : (first + count) * coded_bytes]
        offsets = np.zeros(-(-count // codec.group) + 1, np.uint32)
        palette, slots = np.zeros(256 * codec.transform.word_bytes, np.uint8), np.zeros(_PALETTE_SLOTS, np.uint16)
        used = self._library.holdall_encode(
            ctypes.addressof(compressor.encoder), ctypes.addressof(form), address(slices),
            0 if order is None else address(order), len(slices), first, first + count, address(own), own.size,
            address(offsets), address(palette), address(slots),
        )  # fmt: skip
        return None if used < 0 else (own[:used], offsets[1:], palette)

    def count_work(self, sealed: SealedSlices, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Coder.count_work`."""
        units, work = np.ascontiguousarray(units), np.zeros((len(units), 3), np.int64)
        self._library.holdall_count_work(sealed.address, address(units), len(units), address(work))
        return work

    def keeping(self) -> Coder:
        """See `Coder.keeping`."""
        return _KeepingCoder(self._library, self._libraries)

    def checksums(self, data: Bytes, offsets: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """See `Coder.checksums`."""
        checks = np.zeros(len(offsets) - 1, np.uint32)
        self._library.holdall_checksums(address(data), address(offsets), len(checks), address(checks))
        return checks

    def _compressor(self, codec: Codec) -> _Compressor:
        return _Compressor(self._libraries, codec)

    def _ddict(self, dictionary: Dictionary | None, method: Method) -> int:
        """Return the library's form of a dictionary, made once."""
        if dictionary is None or method is not Method.ZSTD:
            return 0
        if dictionary not in self._ddicts:
            content, functions = dictionary.content, self._libraries.functions
            ddict = functions["ZSTD_createDDict"](content, len(content))
            if not ddict:
                raise DamageError(f"a dictionary of {len(content)} bytes is none; nothing is read with it")
            weakref.finalize(dictionary, functions["ZSTD_freeDDict"], ddict).atexit = False
            self._ddicts[dictionary] = ddict
        return self._ddicts[dictionary]


class _KeepingCoder(NativeCoder):
    """A coder that keeps its compressors from block to block."""

    def __init__(self, library: ctypes.CDLL, libraries: CompressionLibraries) -> None:
        super().__init__(library, libraries)
        self._compressors: dict[Codec, _Compressor] = {}

    def _compressor(self, codec: Codec) -> _Compressor:
        kept = self._compressors.get(codec)
        if kept is None:
            if len(self._compressors) >= _MOST_COMPRESSORS:
                self._compressors.clear()
            kept = self._compressors[codec] = super()._compressor(codec)
        return kept


class _Compressor:
    """A library's context for one codec, its form of the dictionary, and scratch memory, which live as long as this."""

    def __init__(self, libraries: CompressionLibraries, codec: Codec) -> None:
        coded_bytes = codec.transform.coded_bytes
        self._functions = libraries.functions
        self._scratch = np.empty(2 * coded_bytes + 3 * codec.group * coded_bytes + 1024, np.uint8)
        self._codec = codec  # its dictionary is read by C
        common = codec.dictionary.content if codec.dictionary is not None and codec.method is Method.LZ4 else b""
        is_against = codec.method is Method.LZ4 and (codec.key > 0 or common)
        self.encoder = EncoderStruct(
            lz4_compress_default=libraries.addresses["LZ4_compress_default"],
            lz4_compress_hc=libraries.addresses["LZ4_compress_HC"],
            lz4_reset_hc=libraries.addresses["LZ4_resetStreamHC_fast"],
            lz4_load_dict_hc=libraries.addresses["LZ4_loadDictHC"],
            lz4_continue_hc=libraries.addresses["LZ4_compress_HC_continue"],
            zstd_compress2=libraries.addresses["ZSTD_compress2"],
            zstd_ref_prefix=libraries.addresses["ZSTD_CCtx_refPrefix"],
            zstd_is_error=libraries.addresses["ZSTD_isError"],
            cctx=self._context(codec) if codec.method is Method.ZSTD else None,
            stream=self._owned("LZ4", "StreamHC") if is_against else None,
            loaded=self._owned("LZ4", "StreamHC") if is_against else None,
            stream_bytes=libraries.functions["LZ4_sizeofStateHC"](),
            scratch=address(self._scratch),
            scratch_bytes=self._scratch.size,
            common=address(np.frombuffer(common, np.uint8)) if common else None,
            common_bytes=len(common),
            group=codec.group,
            key=codec.key,
            keeps_keys_raw=codec.raw_keys,
            method=int(codec.method),
            level=codec.level,
        )

    def _context(self, codec: Codec) -> int:
        context = self._owned("ZSTD", "CCtx")
        # Sizes are known from the schema, and damage is found by the segment's own checksums.
        settings = {_ZSTD_LEVEL: codec.level, _ZSTD_CONTENT_SIZE: 0, _ZSTD_CHECKSUM: 0, _ZSTD_DICT_ID: 0}
        if codec.group * codec.transform.coded_bytes > _LONG_UNIT:
            settings |= {_ZSTD_HASH_LOG: _LONG_UNIT_TABLES, _ZSTD_CHAIN_LOG: _LONG_UNIT_TABLES}
        if codec.shortest_match:
            settings[_ZSTD_MIN_MATCH] = codec.shortest_match
        for parameter, value in settings.items():
            self._functions["ZSTD_CCtx_setParameter"](context, parameter, value)
        if codec.dictionary is not None:
            content = codec.dictionary.content
            self._functions["ZSTD_CCtx_refCDict"](
                context, self._owned("ZSTD", "CDict", content, len(content), codec.level)
            )
        return context

    def _owned(self, library: str, kind: str, *arguments: Any) -> int:
        """Make a thing of a library's that is freed with this object."""
        handle = self._functions[f"{library}_create{kind}"](*arguments)
        if not handle:
            raise MemoryError(f"{library}_create{kind} found no memory")
        # Not when the interpreter ends: a worker may be in the middle of a call with it.
        weakref.finalize(self, self._functions[f"{library}_free{kind}"], handle).atexit = False
        return int(handle)


def _form(transform: Transform) -> TransformStruct:
    return TransformStruct(*map(int, _of_transform(transform)))

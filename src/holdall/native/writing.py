"""Writing: ticks become unique slices by append.c, and blocks of slices are compressed by encode.c, without the GIL.

In:  arrays, whose sizes are checked here.  Out: ticks written and counted, parts of the open segment, sealed slices.
Invariant: a slice that was numbered never moves.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall import _native
from holdall.errors import DamageError
from holdall.native.library import (
    EncoderStruct,
    FlatFieldStruct,
    OpenPartStruct,
    SealedBlockStruct,
    SliceBlockStruct,
    SlicedFieldStruct,
    TickWriterStruct,
    TransformStruct,
)
from holdall.native.reading import DenseLayout, NativeDecoder, as_they_lie
from holdall.schema import Array, Bytes
from holdall.storage import (
    TRANSFORM_FIELDS,
    WATCHED_BYTES,
    Codec,
    Coded,
    Coder,
    Cursors,
    Dictionary,
    FlatField,
    Method,
    OpenPart,
    Order,
    Repair,
    SealedSlices,
    SliceBlock,
    SlicedTick,
    TickWriter,
    Transform,
    Watch,
    Window,
    address,
    first_bytes,
    mapping_of,
    places_in,
    release_tail,
    reserve,
)

_WORD_TABLE_BYTES, _COLOUR_TABLE_BYTES, _MOST_COMPRESSORS = 2 * 1024, 16 * 2**16, 8
"""Tables that find words and colours in a palette, see encode.c and colours.c; and compressors that are kept."""
_LONG_UNIT, _LONG_UNIT_TABLES = 2**18, 17
"""Of longer units Zstandard would keep tables of 10 to 30 MiB: with 1 MiB they are as small, and made faster."""


# ---------------------------------------------------------------- ticks


def struct_field(name: str) -> Any:
    """Return a property that is a field of an object's `_struct`, read without a call of Python: C counts there."""
    return property(operator.attrgetter(f"_struct.{name}"), lambda self, value: setattr(self._struct, name, value))


class NativeWriting:
    """The half of `NativeKernels` that makes parts."""

    _library: ctypes.CDLL

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


class NativeTickWriter(TickWriter):
    """Writes a tick, or several, by one call of append.c."""

    next_tick, pause_tick = struct_field("next_tick"), struct_field("pause_tick")
    blocks_pause_tick = struct_field("blocks_pause_tick")

    def __init__(
        self, library: ctypes.CDLL, flat: Sequence[FlatField], ring_ticks: int, ticks: tuple[int, int]
    ) -> None:
        self.flat, self.first_tick = tuple(flat), ticks[0]
        self._write, self._write_ticks = library.holdall_write_tick, library.holdall_write_ticks
        rings = [
            FlatFieldStruct(
                address(rows), None if beside is None else address(beside), None, rows[0].nbytes, is_observation
            )
            for rows, beside, is_observation, _ in flat
        ]
        self._flat = (FlatFieldStruct * len(rings))(*rings)
        self._sliced = (SlicedFieldStruct * 0)()
        self._parts, self._cursors = list[OpenPart](), list[Cursors]()
        self._sealed: ctypes.c_int64 | None = None  # what the struct points to
        self._apart: list[Any] = []  # likewise
        self._struct = TickWriterStruct(
            next_tick=ticks[1], first_tick=ticks[0], ring_ticks=ring_ticks, flat=ctypes.addressof(self._flat),
            packed_bytes=sum((1 + field.is_observation) * field.rows[0].nbytes for field in flat),
            flat_count=len(rings), lanes=flat[0].rows.shape[1] if flat else 1,
        )  # fmt: skip
        self._address = ctypes.addressof(self._struct)

    def limit(self, ahead: int, sealed: ctypes.c_int64 | None = None) -> None:
        """See `TickWriter.limit`; blocks may hold slices of the segments before."""
        self._sealed, self._struct.sealed_bytes = sealed, None if sealed is None else ctypes.addressof(sealed)
        self._struct.most_ahead = ahead + sum(part.used_bytes - part.added_bytes for part in self._parts)

    def keep_apart(self, is_changed: bytearray) -> None:
        """See `TickWriter.keep_apart`."""
        kept: list[Any] = [np.frombuffer(is_changed, np.uint8)]
        self._struct.is_changed = None
        for struct, field in zip(self._flat, self.flat, strict=True):
            if field.apart is not None:
                kept.append(field.apart.room)
                struct.apart = address(kept[-1])
        self._apart, self._struct.is_changed = kept, address(kept[0])

    @property
    def places(self) -> tuple[TickWriterStruct, Any]:
        """The struct that C writes ticks by, and what must live as long as it."""
        return self._struct, self

    def write(self, rows: Sequence[Array], sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """See `TickWriter.write`."""
        return self.write_packed(b"".join([row.tobytes() for row in rows]), sliced, is_kept=is_kept)

    def write_packed(self, packed: bytes, sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """See `TickWriter.write_packed`."""
        kept = None if sliced is None else self._aim(sliced)
        ticks: int = self._write(self._address, packed, len(packed), int(is_kept))
        del kept
        return ticks

    def write_run(self, packed: Bytes, sliced: SlicedTick | None) -> int:
        """See `TickWriter.write_run`."""
        kept, observed = None, [] if sliced is None else [*sliced.obs, *sliced.next_obs]
        if not (packed.flags.c_contiguous and all(a.flags.c_contiguous and len(a) == len(packed) for a in observed)):
            return 0
        if sliced is not None:
            first, next_first = ([array[0] for array in arrays] for arrays in (sliced.obs, sliced.next_obs))
            kept = self._aim(sliced._replace(obs=first, next_obs=next_first))
        written = self._write_ticks(self._address, address(packed), packed.shape[1], len(packed))
        del kept
        return int(written)

    def _aim(self, sliced: SlicedTick) -> list[tuple[Array, Array]]:
        """Point C to the slices of the tick to come."""
        parts: Any = sliced.parts
        if self._parts is not parts:
            fields = zip(parts, sliced.cursors, strict=True)
            rings = [SlicedFieldStruct(part.address, address(cursors)) for part, cursors in fields]
            structs = (SlicedFieldStruct * len(rings))(*rings)
            self._struct.sliced_count = 0
            if self._sealed is not None:
                self._struct.most_ahead = -(1 << 62)  # what it said was of other parts
            self._sliced = structs
            self._struct.sliced, self._struct.sliced_count = ctypes.addressof(structs), len(rings)
            self._parts, self._cursors = parts, sliced.cursors
        arrays = zip(parts, self._sliced, sliced.obs, sliced.next_obs, sliced.cursors, strict=True)
        return [part.aim(field, obs, next_obs, ring.shape[1]) for part, field, obs, next_obs, ring in arrays]


class NativeBlock(SliceBlock):
    """Unique slices behind an open-addressing table."""

    used = struct_field("used")

    def __init__(self, slice_bytes: int, arena: Bytes) -> None:
        super().__init__(slice_bytes, arena)
        slots = 1 << max(4, (2 * self.capacity).bit_length())
        self._index: tuple[NDArray[Any], ...] = (np.empty(self.capacity, np.uint64), np.zeros(slots, np.uint32))
        self._struct = SliceBlockStruct(
            arena=address(self.arena), hashes=address(self._index[0]), slots=address(self._index[1]), mask=slots - 1,
            capacity=self.capacity, used=0, slice_bytes=slice_bytes,
        )  # fmt: skip
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
        last, scratch = (np.empty(nbytes, np.uint8) for nbytes in (lanes * self.obs_bytes, window.slice_bytes))
        end = np.zeros(lanes, np.int64)
        self._memory: tuple[NDArray[Any], ...] = last, end, scratch
        self._struct = OpenPartStruct(
            block=block.address if isinstance(block, NativeBlock) else None, direct=address(self.slices),
            log=None if self.log is None else address(self.log), last=address(last), end=address(end),
            scratch=address(scratch), log_rows=self.log_rows, lanes=lanes, outer=window.outer,
            run_bytes=window.run_bytes, window=window.count, shift=window.shift,
        )  # fmt: skip
        self.address, self._linked = ctypes.addressof(self._struct), self.log  # what the struct points to
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
        self.link_log()
        layout = 0
        if not (obs.flags.c_contiguous and next_obs.flags.c_contiguous):
            obs, next_obs, dense = as_they_lie(obs, next_obs, self._layouts)
            if dense is not None:
                layout = field.known = dense.address
                field.strides = dense.strides_address
                if not self._struct.packed:
                    self._make_layout_room()
        field.obs, field.next_obs, field.order = address(obs), address(next_obs), layout
        return obs, next_obs

    def link_log(self) -> None:
        """Point C to the log, which is another one after it was lengthened."""
        if self._linked is not self.log and self.log is not None:
            self._struct.log, self._struct.log_rows = address(self.log), len(self.log)
            self._linked = self.log

    def clear(self) -> None:
        """See `OpenPart.clear`."""
        if isinstance(self.block, NativeBlock):
            self.block.clear()
        self._memory[1].fill(0)  # the lanes' ends
        struct, self._used_before = self._struct, 0
        struct.longest = struct.steps = struct.broken_steps = struct.pushed = 0

    def _make_layout_room(self) -> None:
        """Give C memory to put ticks in order in."""
        raw, packed = (np.empty(ticks * self.lanes * self.obs_bytes, np.uint8) for ticks in (1, 2))
        self._memory = (*self._memory, raw, packed)
        self._struct.last_raw, self._struct.packed = address(raw), address(packed)

    @property
    def shortest(self) -> int:
        """See `OpenPart.shortest`."""
        return int(self._memory[1].min())


# ---------------------------------------------------------------- compressed blocks


class NativeSealed(SealedSlices):
    """Sealed slices that decode.c reads."""

    address = property(lambda self: ctypes.addressof(self._struct), doc="Where the C structure lies.")

    def __init__(self, coded: Coded, ddict: int) -> None:
        super().__init__(coded)
        extent, codec, common = self.extent, coded.codec, (0, 0)
        if codec.dictionary is not None and codec.common and codec.method is Method.LZ4:
            # Where the dictionary has it, which all blocks share.
            content = np.frombuffer(codec.dictionary.content, np.uint8)[len(codec.known_palette) :]
            common = address(content), content.nbytes
        self._struct = SealedBlockStruct(
            data=address(coded.data) if isinstance(coded.data, np.ndarray) else 0, offsets=address(coded.offsets),
            checks=0 if extent is None else address(extent.checks), palette=address(coded.palette),
            ddict=ddict, common=common[0], common_bytes=common[1], data_bytes=coded.data.nbytes,
            slice_count=coded.count, group=coded.codec.group, method=int(coded.codec.method),
            file=-1 if extent is None else extent.file.descriptor, file_start=0 if extent is None else extent.start,
            form=_form(coded.codec.transform), places=0 if coded.places is None else address(coded.places),
            place_bytes=0 if coded.places is None else coded.places.itemsize,
        )  # fmt: skip


class NativeCoder(NativeDecoder):
    """Seals blocks, and reads them as `NativeDecoder` does."""

    def __init__(self, most_kept: int = 0) -> None:
        super().__init__()
        self._compressors: dict[Codec, _Compressor] = {}
        self._most_kept = most_kept  # compressors, from block to block
        self._dictionaries: weakref.WeakKeyDictionary[Dictionary, _native.Handle] = weakref.WeakKeyDictionary()

    def adopt(self, coded: Coded) -> SealedSlices:
        """See `Coder.adopt`."""
        sealed = NativeSealed(coded, self._read_dictionary(coded.codec))
        self._unit_bytes.add(coded.codec.unit_bytes)
        return sealed

    def seal(
        self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1, watch: Watch | None = None
    ) -> SealedSlices | None:
        """See `Coder.seal`."""
        transform, count, slices = codec.transform, len(slices), np.ascontiguousarray(slices)  # C reads row after row
        if slices.nbytes != count * transform.slice_bytes:
            raise DamageError(f"slices of {slices.shape} came to a codec of {transform.slice_bytes} bytes; report this")
        if order is not None and (len(order) != count or order.dtype != np.uint32):
            raise DamageError(f"an order of {len(order)} came with {count} slices; report this")
        piece = codec.group * max(1, -(-count // (codec.group * threads)))
        if watch is not None and not transform.palette_bytes:  # every piece would make the palette of all slices again
            piece = min(piece, codec.group * max(1, WATCHED_BYTES // (codec.group * transform.slice_bytes)))
        encode, tell = partial(self._encode, slices, codec, order), watch or bool
        firsts = range(0, max(count, 1), piece)
        ends, is_shared, pieces = [*firsts[1:], count], threads > 1 and piece < count, []
        most = min(piece, count) if is_shared else count
        room = most * transform.coded_bytes + -(-most // codec.group) * transform.head_bytes
        data = reserve(room * (len(firsts) if is_shared else 1), in_small_pages=True)
        if is_shared:
            spare = [self._new_compressor(codec) for _ in range(threads)]  # one for each that runs
            with ThreadPoolExecutor(threads, "holdall-sealer") as helpers:
                for made in helpers.map(partial(_lent, spare, encode), data.reshape(-1, room), firsts, ends):
                    pieces.append(made)
                    tell(ends[len(pieces) - 1])
        else:
            memory, compressor = mapping_of(data), self._compressor(codec)
            for first, end in zip(firsts, ends, strict=True):
                pieces.append(encode(compressor, data, first, end))
                data = data[len(pieces[-1][0]) :]
                tell(end)
        units, stops, palettes = zip(*pieces, strict=True)
        if any(palette is None for palette in palettes):
            return None
        bases = np.cumsum([0, *map(len, units)], dtype=np.uint32)
        offsets = np.concatenate([bases[:1], *(base + stop for base, stop in zip(bases, stops, strict=False))])
        if is_shared:
            packed = np.concatenate(units, out=reserve(int(bases[-1]), in_small_pages=True))
        else:
            del pieces, units, data  # views of it
            packed = first_bytes(memory, int(bases[-1]))
        places = None if order is None else places_in(order)
        return self.adopt(Coded(codec, count, offsets, palettes[0], packed, places))

    def _encode(
        self, slices: Bytes, codec: Codec, order: Order | None, compressor: _Compressor, data: Bytes, first: int,
        end: int,
    ) -> tuple[Bytes, NDArray[np.uint32], Any]:  # fmt: skip
        """Code slices [first, end) into `data`; return their units, the units' ends, the palette (None: too small)."""
        form = _form(codec.transform)
        offsets = np.zeros(-(-(end - first) // codec.group) + 1, np.uint32)
        palette = np.zeros(codec.transform.palette_bytes, np.uint8)
        if codec.is_of_colours:
            palette[:] = np.frombuffer(codec.known_palette or b"\xff" * palette.size, np.uint8)
        slots = np.zeros(_COLOUR_TABLE_BYTES if codec.is_of_colours else _WORD_TABLE_BYTES, np.uint8)
        used = self._library.holdall_encode(
            ctypes.addressof(compressor.encoder), ctypes.addressof(form), address(slices),
            0 if order is None else address(order), len(slices), first, end, address(data), data.size,
            address(offsets), address(palette), address(slots),
        )  # fmt: skip
        return data[: max(used, 0)], offsets[1:], None if used < 0 else palette

    def keeping(self) -> Coder:
        """See `Coder.keeping`."""
        return NativeCoder(_MOST_COMPRESSORS)

    def checksums(self, data: Bytes, offsets: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """See `Coder.checksums`."""
        checks = np.zeros(len(offsets) - 1, np.uint32)
        self._library.holdall_checksums(address(data), address(offsets), len(checks), address(checks))
        return checks

    def _compressor(self, codec: Codec) -> _Compressor:
        found = self._compressors.get(codec)
        if found is None:
            found = self._new_compressor(codec)
            if len(self._compressors) >= self._most_kept:
                self._compressors.clear()
            if self._most_kept:
                self._compressors[codec] = found
        return found

    def _new_compressor(self, codec: Codec) -> _Compressor:
        return _Compressor(codec)

    def _read_dictionary(self, codec: Codec) -> int:
        """Return the form in which C reads a dictionary; made once, and kept as long as the dictionary."""
        dictionary = codec.dictionary
        if dictionary is None or codec.method is not Method.ZSTD:
            return 0
        made = self._dictionaries.get(dictionary)
        if made is None:
            try:
                made = _native.new_decompression_dictionary(codec.common)
            except ValueError as error:
                raise DamageError(f"a dictionary is none ({error}); nothing is read with it") from error
            # Another thread may have made one in the meantime. The first one is in use and must stay.
            made = self._dictionaries.setdefault(dictionary, made)
        return made.address


def _lent(spare: list[_Compressor], encode: Callable[..., Any], *of_a_piece: Any) -> Any:
    compressor = spare.pop()
    made = encode(compressor, *of_a_piece)
    spare.append(compressor)
    return made


class _Compressor:
    """A context and scratch memory for one codec; used by one thread at a time."""

    def __init__(self, codec: Codec) -> None:
        self._scratch = np.empty((2 + 3 * codec.group) * codec.transform.coded_bytes + 4096, np.uint8)
        self._common = common = codec.common if codec.method is Method.LZ4 else b""  # read by C
        self._context = _zstd_context(codec) if codec.method is Method.ZSTD else None
        self._streams = [_native.new_lz4_stream() for _ in range(2)] if common else []
        stream, loaded = (each.address for each in self._streams) if common else (None, None)
        self.encoder = EncoderStruct(
            cctx=None if self._context is None else self._context.address, stream=stream, loaded=loaded,
            scratch=address(self._scratch), scratch_bytes=self._scratch.size,
            common=address(np.frombuffer(common, np.uint8)) if common else None,
            common_bytes=len(common), group=codec.group, method=int(codec.method), level=codec.level,
        )  # fmt: skip


def _zstd_context(codec: Codec) -> _native.Handle:
    """Return a context of Zstandard that compresses as `codec` says."""
    is_long = codec.group * codec.transform.coded_bytes > _LONG_UNIT
    content = None if codec.dictionary is None else codec.common
    return _native.new_compressor(codec.level, codec.shortest_match, _LONG_UNIT_TABLES if is_long else 0, content)


def _form(transform: Transform) -> TransformStruct:
    return TransformStruct(*(int(getattr(transform, name)) for name in TRANSFORM_FIELDS))

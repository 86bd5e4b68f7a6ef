"""A second implementation of the block format, in plain NumPy, as the oracle of the compiled one.

It is written to be read, not to be fast. It compresses with the zstandard and lz4 packages. The tests check that each
implementation reads what the other one wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import lz4.block
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Bytes
from holdall.storage import (
    MOST_UNIT_COLOURS,
    NO_COLOUR,
    WATCHED_BYTES,
    Codec,
    Coded,
    Coder,
    Method,
    Order,
    Predictor,
    SealedSlices,
    Transform,
    Watch,
    places_in,
    places_of,
    unit_of,
)

Compress = Callable[[bytes], bytes]
"""Compresses a unit."""
Decompress = Callable[[bytes, int], bytes]
"""Takes a unit and how many bytes must come of it; returns others if it is damaged."""


_MOST_COLOURS = 2**15
"""Colours of a block that are counted, as in colours.c."""
_EQUAL_BETWEEN, _MOST_COUNT_BYTES = 4, 5
"""Changes that so many bytes part are two, as in encode.c; and the most bytes of a number there."""
_TABLE_FROM = 1000
"""Bytes from which on a unit of Zstandard's mostly brings a table of Huffman's code."""


class ReferenceSealed(SealedSlices):
    """Sealed slices that Python reads."""

    @property
    def address(self) -> int:
        """A number of its own; the places that name it hold on to it."""
        return id(self)


class ReferenceCoder:
    """Seals and reads blocks slice by slice."""

    def adopt(self, coded: Coded) -> SealedSlices:
        """See `Coder.adopt`."""
        return ReferenceSealed(coded)

    def seal(
        self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1, watch: Watch | None = None
    ) -> SealedSlices | None:
        """See `Coder.seal`; one thread does all."""
        transform = codec.transform
        staged, palette = slices if order is None else slices[order], np.zeros(0, np.uint8)
        if transform.word_bytes:
            words = staged.view(f"u{transform.word_bytes}")
            kinds, numbers = np.unique(words, return_inverse=True)
            if len(kinds) > 256:
                return None
            palette = np.zeros(256 * transform.word_bytes, np.uint8)
            palette[: kinds.nbytes] = kinds.view(np.uint8)
            staged = numbers.reshape(words.shape).astype(np.uint8)
        heads: list[bytes] = []
        if codec.is_of_colours:
            numbered = _number_colours(staged, codec)
            if numbered is None:
                return None
            staged, palette, heads = numbered
        compress = _compressor(codec)
        rows = np.ascontiguousarray(_shuffled(_differences(staged, transform), transform))
        pieces = []
        for unit, first in enumerate(range(0, len(rows), codec.group)):
            coded = rows[first : first + codec.group].tobytes()
            noted = _noted(rows[first : first + codec.group]) if transform.predictor is Predictor.CHANGES else b""
            packed = compress(noted or coded)
            head = heads[unit] if heads else b""
            pieces.append(head + (packed if len(packed) < len(coded) else coded))
            if watch is not None and (unit + 1) % max(1, WATCHED_BYTES // (codec.group * transform.slice_bytes)) == 0:
                watch(min(first + codec.group, len(rows)))
        offsets = np.zeros(len(pieces) + 1, np.uint32)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        data = np.frombuffer(b"".join(pieces), np.uint8).copy()
        places = None if order is None else places_in(order)
        return self.adopt(Coded(codec, len(slices), offsets, palette, data, places))

    def count_work(self, sealed: SealedSlices, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Coder.count_work`: by the units' sizes, as it was on the average of seven recorded environments."""
        packed = np.diff(sealed.coded.offsets)[units].astype(np.int64)
        nothing = np.zeros_like(packed)
        if sealed.codec.method is Method.ZSTD:
            return np.column_stack([packed // 4, packed // 4, packed > _TABLE_FROM])
        sequences = packed // 6 if sealed.codec.method is Method.LZ4 else nothing
        return np.column_stack([sequences, nothing, nothing])

    def keeping(self) -> Coder:
        """See `Coder.keeping`; there is nothing to keep."""
        return self

    def checksums(self, data: Bytes, offsets: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """See `Coder.checksums`."""
        units = pairwise(offsets.tolist())
        sums = [xxhash.xxh64_intdigest(data[start:end].tobytes()) & 0xFFFFFFFF for start, end in units]
        return np.array(sums, np.uint32)

    def decode(self, sealed: SealedSlices, numbers: NDArray[np.int64], out: Bytes) -> None:
        """See `Coder.decode`."""
        if not len(numbers):
            return
        transform = sealed.codec.transform
        unit, within = np.divmod(places_of(sealed.coded, numbers), sealed.codec.group)
        units, position = np.unique(unit, return_inverse=True)
        whole = np.empty((len(units), sealed.codec.group, transform.coded_bytes), np.uint8)
        reader = _UnitReader(sealed.coded)
        palettes = np.empty((len(units), transform.palette_bytes), np.uint8)
        for place, number in enumerate(units.tolist()):
            rows = reader.read(number)
            whole[place, : len(rows)] = rows
            palettes[place] = reader.palette
        staged = whole[position, within]
        if sealed.codec.is_of_colours:
            out[:] = _look_up_colours(staged, palettes[position], transform)
            return
        values = _sums(_unshuffled(staged, transform), transform)
        if transform.word_bytes:
            words = sealed.coded.palette.view(f"u{transform.word_bytes}")[values]
            values = words.view(np.uint8).reshape(len(numbers), -1)
        out[:] = values


class _UnitReader:
    """Decompresses units of one block."""

    def __init__(self, coded: Coded) -> None:
        self._coded = coded
        self._decompress = _decompressor(coded.codec)
        self.palette = coded.palette  # of the unit that was read last

    def read(self, number: int) -> Bytes:
        """Return the coded slices of one unit."""
        whole = self._whole(number)
        return np.frombuffer(whole, np.uint8).reshape(-1, self._coded.codec.transform.coded_bytes)

    def _whole(self, number: int) -> bytes:
        codec = self._coded.codec
        rows = min(codec.group, self._coded.count - number * codec.group)
        expected, piece = rows * codec.transform.coded_bytes, unit_of(self._coded, number)
        if codec.is_of_colours:
            piece = self._without_colours(number, piece)
        whole = piece if len(piece) == expected else self._decompress(piece, expected)
        if codec.transform.predictor is Predictor.CHANGES and len(whole) != expected:
            whole = _changed(whole, rows, codec.transform.coded_bytes)
        if len(whole) != expected:
            raise DamageError(f"unit {number} is damaged; nothing of it is returned")
        return whole

    def _without_colours(self, number: int, piece: bytes) -> bytes:
        """Note the colours that a unit brings, and return the rest of it."""
        head = 1 + 4 * piece[0] if piece else 1
        if len(piece) < head:
            raise DamageError(f"unit {number} is damaged; nothing of it is returned")
        self.palette = self._coded.palette.copy()
        brought = np.frombuffer(piece, np.uint8, head - 1, 1).reshape(-1, 4)
        for entry in brought:  # the last one counts, should a number come twice
            self.palette[4 * int(entry[0]) : 4 * int(entry[0]) + 3] = entry[1:]
        return piece[head:]


# ---------------------------------------------------------------- changes


def _noted(rows: Bytes) -> bytes:
    """Return the first row and how each of the others differs from the one before; nothing if that spares no row."""
    noted = bytearray(rows[0].tobytes())
    for before, row in pairwise(rows):
        differs = np.flatnonzero(before != row)
        parted = np.flatnonzero(np.diff(differs) > _EQUAL_BETWEEN)
        starts = differs[np.append(0, parted + 1)] if len(differs) else differs
        ends = differs[np.append(parted, -1)] + 1 if len(differs) else differs
        noted += _count(len(starts))
        for behind, start, end in zip([0, *ends.tolist()], starts.tolist(), ends.tolist(), strict=False):
            noted += _count(start - behind) + _count(end - start) + row[start:end].tobytes()
    return bytes(noted) if len(noted) <= (len(rows) - 1) * rows.shape[1] else b""


def _changed(noted: bytes, rows: int, row_bytes: int) -> bytes:
    """Return the rows that `_noted` was made of; nothing if it is damaged."""
    if not row_bytes <= len(noted) <= (rows - 1) * row_bytes:
        return b""
    made, row, at = [noted[:row_bytes]], bytearray(noted[:row_bytes]), row_bytes
    try:
        for _ in range(rows - 1):
            (changes, at), place = _counted(noted, at), 0
            for _ in range(changes):
                skipped, at = _counted(noted, at)
                length, at = _counted(noted, at)
                place += skipped
                if place + length > row_bytes or at + length > len(noted):
                    return b""
                row[place : place + length] = noted[at : at + length]
                place, at = place + length, at + length
            made.append(bytes(row))
    except IndexError:
        return b""
    return b"".join(made)


def _count(number: int) -> bytes:
    """Write a number, seven bits a byte, the lowest first."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])


def _counted(noted: bytes, at: int) -> tuple[int, int]:
    """Read a number; return it, and what stands behind it. IndexError if it does not end."""
    number = 0
    for place in range(_MOST_COUNT_BYTES):
        number |= (noted[at + place] & 127) << (7 * place)
        if noted[at + place] < 128:
            return number, at + place + 1
    raise IndexError(at)


# ---------------------------------------------------------------- colours


def _number_colours(slices: Bytes, codec: Codec) -> tuple[Bytes, Bytes, list[bytes]] | None:
    """Turn pixels into numbers; return these, the palette, and what stands in front of every unit.

    None if there are too many colours.
    """
    transform, units = codec.transform, range(0, len(slices), codec.group)
    planes = _planes(slices, transform).reshape(len(slices), 3, -1).astype(np.uint32)
    colours: NDArray[np.uint32] = planes[:, 0] | planes[:, 1] << np.uint32(8) | planes[:, 2] << np.uint32(16)
    kinds, shown = np.unique(np.concatenate([np.unique(row) for row in [colours[:0], *colours]]), return_counts=True)
    if len(kinds) > _MOST_COLOURS:
        return None
    palette = np.full(256, NO_COLOUR, np.uint32)
    if codec.known_palette:
        palette[:] = np.frombuffer(codec.known_palette, "<u4")
        palette[palette != NO_COLOUR] &= 0xFFFFFF
        first = np.zeros(256, bool)
        first[np.unique(palette, return_index=True)[1]] = True
        palette[~(first & np.isin(palette, kinds))] = NO_COLOUR
    others = ~np.isin(kinds, palette)
    ranked = kinds[others][np.lexsort((kinds[others], -shown[others]))]
    free = np.flatnonzero(palette == NO_COLOUR)[: len(ranked)]
    palette[free] = ranked[: len(free)]
    numbers, heads = np.empty(colours.shape, np.uint8), []
    for first_slice in units:
        unit = colours[first_slice : first_slice + codec.group]
        head = _number_unit(unit, palette, numbers[first_slice : first_slice + codec.group])
        if head is None:
            return None
        heads.append(head)
    if transform.predictor is Predictor.COLUMNS:
        numbers = _turned(numbers, transform.rows, transform.columns)
    return numbers, palette.astype("<u4").view(np.uint8), heads


def _turned(numbers: Bytes, rows: int, columns: int) -> Bytes:
    """Make columns of the rows of images."""
    return np.ascontiguousarray(numbers.reshape(-1, rows, columns).transpose(0, 2, 1)).reshape(len(numbers), -1)


def _number_unit(colours: NDArray[np.uint32], palette: NDArray[np.uint32], out: Bytes) -> bytes | None:
    """Number the colours of a unit, some of which it brings itself; return what stands in front of it."""
    kinds, first, places = np.unique(colours, return_index=True, return_inverse=True)
    known = {int(colour): number for number, colour in enumerate(palette) if colour != NO_COLOUR}
    numbers = np.array([known.get(int(colour), -1) for colour in kinds], np.int64)
    missing = np.flatnonzero(numbers < 0)
    missing = missing[np.argsort(first[missing])]
    if len(kinds) > 256 or len(missing) > MOST_UNIT_COLOURS or 1 + 4 * len(missing) > 2 * colours.size:
        return None  # the last: they would take more than numbers spare
    used, brought = set(numbers.tolist()), bytes([len(missing)])
    for position in missing.tolist():
        colour = int(kinds[position])
        number = (colour * 0x9E3779B1 & 0xFFFFFFFF) >> 24
        while number in used:
            number = (number + 1) & 255
        used.add(number)
        numbers[position] = number
        brought += bytes([number]) + colour.to_bytes(3, "little")
    out[:] = numbers[places].reshape(colours.shape)
    return brought


def _look_up_colours(numbers: Bytes, palettes: Bytes, transform: Transform) -> Bytes:
    """Turn numbers into pixels again, each row by its own palette."""
    if transform.predictor is Predictor.COLUMNS:
        numbers = _turned(numbers, transform.columns, transform.rows)
    colours = palettes.reshape(len(numbers), 256, 4)
    pixels = np.take_along_axis(colours[:, :, :3], numbers[:, :, None].astype(np.int64), axis=1)
    ordered = pixels if transform.interleaved else pixels.transpose(0, 2, 1)
    return ordered.reshape(len(numbers), -1)


# ---------------------------------------------------------------- compressors


def _compressor(codec: Codec) -> Compress:
    common = codec.common

    def lz(piece: bytes) -> bytes:
        known = {"dict": common} if common else {}
        if not codec.level and not known:
            return bytes(lz4.block.compress(piece, store_size=False))
        level = codec.level or 1
        packed = lz4.block.compress(piece, mode="high_compression", compression=level, store_size=False, **known)
        return bytes(packed)

    if codec.method is Method.ZSTD:
        return _zstd_compressor(codec).compress
    return lz if codec.method is Method.LZ4 else lambda piece: piece


def _zstd_compressor(codec: Codec) -> zstandard.ZstdCompressor:
    data = None
    if codec.dictionary is not None:
        data = zstandard.ZstdCompressionDict(codec.common)
    settings = {"compression_level": codec.level, "write_content_size": 0, "write_checksum": 0, "write_dict_id": 0}
    if codec.shortest_match:
        settings["min_match"] = codec.shortest_match
    return zstandard.ZstdCompressor(dict_data=data, compression_params=zstandard.ZstdCompressionParameters(**settings))


def _decompressor(codec: Codec) -> Decompress:
    def zstd(piece: bytes, expected: int) -> bytes:
        if zstandard.frame_content_size(piece) > expected:
            return b""  # the package would allocate what the header claims
        return reader.decompress(piece, max_output_size=expected)

    def lz(piece: bytes, expected: int) -> bytes:
        known = {"dict": content} if content else {}
        return bytes(lz4.block.decompress(piece, uncompressed_size=expected, **known))

    def as_it_is(piece: bytes, _expected: int) -> bytes:
        return piece

    content = codec.common
    try:
        data = zstandard.ZstdCompressionDict(content) if content and codec.method is Method.ZSTD else None
        reader = zstandard.ZstdDecompressor(dict_data=data)
    except (zstandard.ZstdError, ValueError) as error:
        raise DamageError(f"a dictionary is none ({error}); nothing is read with it") from error
    inner = {Method.ZSTD: zstd, Method.LZ4: lz}.get(codec.method, as_it_is)

    def checked(piece: bytes, expected: int) -> bytes:
        try:
            return inner(piece, expected)
        except (zstandard.ZstdError, lz4.block.LZ4BlockError):
            return b""

    return checked


def _planes(rows: Bytes, transform: Transform) -> Bytes:
    """See rows of bytes as (rows, planes, height, width)."""
    height, width = transform.rows, transform.columns
    if transform.interleaved:
        return rows.reshape(len(rows), height, width, transform.planes).transpose(0, 3, 1, 2)
    return rows.reshape(len(rows), transform.planes, height, width)


def _differences(rows: Bytes, transform: Transform) -> Bytes:
    if transform.predictor in {Predictor.NOTHING, Predictor.CHANGES} or transform.is_of_colours:
        return rows
    if transform.predictor is Predictor.PIXELS:
        return rows.reshape(len(rows), transform.planes, -1).transpose(0, 2, 1).reshape(len(rows), -1)
    planes = _planes(rows, transform).copy()
    if transform.green:
        planes[:, 0] -= planes[:, 1]
        planes[:, 2] -= planes[:, 1]
    differences = planes.copy()
    if transform.predictor is Predictor.LEFT:
        differences[..., 1:] -= planes[..., :-1]
        differences[..., 1:, 0] -= planes[..., :-1, 0]
    else:
        differences[..., 1:, :] -= planes[..., :-1, :]
    return differences.reshape(len(rows), -1)


def _sums(rows: Bytes, transform: Transform) -> Bytes:
    if transform.predictor in {Predictor.NOTHING, Predictor.CHANGES}:
        return rows
    if transform.predictor is Predictor.PIXELS:
        return rows.reshape(len(rows), -1, transform.planes).transpose(0, 2, 1).reshape(len(rows), -1)
    shape = (len(rows), transform.planes, transform.rows, transform.columns)
    planes = rows.reshape(shape).copy()
    if transform.predictor is Predictor.LEFT:
        planes[..., 0] = np.cumsum(planes[..., 0], axis=-1, dtype=np.uint8)
        planes = np.cumsum(planes, axis=-1, dtype=np.uint8)
    else:
        planes = np.cumsum(planes, axis=-2, dtype=np.uint8)
    if transform.green:
        planes[:, 0] += planes[:, 1]
        planes[:, 2] += planes[:, 1]
    if transform.interleaved:
        planes = planes.transpose(0, 2, 3, 1)
    return planes.reshape(len(rows), -1)


def _shuffled(rows: Bytes, transform: Transform) -> Bytes:
    if not transform.shuffle:
        return rows
    words = rows.reshape(len(rows), -1, transform.shuffle)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(len(rows), -1)


def _unshuffled(rows: Bytes, transform: Transform) -> Bytes:
    if not transform.shuffle:
        return rows
    words = rows.reshape(len(rows), transform.shuffle, -1)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(len(rows), -1)

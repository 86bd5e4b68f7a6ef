"""Coding and decoding with NumPy and the zstandard and lz4 packages.

In:  blocks of slices.  Out: sealed slices, which decode.c reads, as this reads those of encode.c.
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
from holdall.storage import Codec, Coded, Coder, Method, Predictor, SealedSlices, Transform

Decompress = Callable[[bytes, int], bytes]
"""Takes a unit and how many bytes must come of it; returns others if it is damaged."""


class PortableSealed(SealedSlices):
    """Sealed slices that Python reads."""

    @property
    def address(self) -> int:
        """A number of its own; the places that name it hold on to it."""
        return id(self)


class PortableCoder:
    """Seals and reads blocks slice by slice."""

    is_compiled = False

    def adopt(self, coded: Coded) -> SealedSlices:
        """See `Coder.adopt`."""
        return PortableSealed(coded)

    def seal(self, slices: Bytes, codec: Codec) -> SealedSlices | None:
        """See `Coder.seal`."""
        transform = codec.transform
        staged, palette = slices, np.zeros(0, np.uint8)
        if transform.word_bytes:
            words = slices.view(f"u{transform.word_bytes}")
            kinds, numbers = np.unique(words, return_inverse=True)
            if len(kinds) > 256:
                return None
            palette = np.zeros(256 * transform.word_bytes, np.uint8)
            palette[: kinds.nbytes] = kinds.view(np.uint8)
            staged = numbers.reshape(words.shape).astype(np.uint8)
        compress = _compressor(codec)
        rows = np.ascontiguousarray(_shuffled(_differences(staged, transform), transform))
        pieces = []
        for first in range(0, len(rows), codec.group):
            coded = rows[first : first + codec.group].tobytes()
            packed = compress(coded)
            pieces.append(packed if len(packed) < len(coded) else coded)
        offsets = np.zeros(len(pieces) + 1, np.uint32)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        data = np.frombuffer(b"".join(pieces), np.uint8).copy()
        return self.adopt(Coded(codec, len(slices), offsets, palette, data))

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
        outside = numbers[(numbers < 0) | (numbers >= sealed.count)]
        if outside.size:
            raise DamageError(f"slice {int(outside[0])} is not in its block; nothing of it is returned")
        unit, within = np.divmod(numbers, sealed.codec.group)
        units, position = np.unique(unit, return_inverse=True)
        whole = np.empty((len(units), sealed.codec.group, transform.coded_bytes), np.uint8)
        decompress = _decompressor(sealed.codec)
        for place, number in enumerate(units.tolist()):
            rows = _unit_rows(sealed.coded, number, decompress)
            whole[place, : len(rows)] = rows
        staged = whole[position, within]
        values = _sums(_unshuffled(staged, transform), transform)
        if transform.word_bytes:
            words = sealed.coded.palette.view(f"u{transform.word_bytes}")[values]
            values = words.view(np.uint8).reshape(len(numbers), -1)
        out[:] = values


def _unit_rows(coded: Coded, number: int, decompress: Decompress) -> Bytes:
    """Return the coded slices of one unit."""
    group, row_bytes = coded.codec.group, coded.codec.transform.coded_bytes
    rows = min(group, coded.count - number * group)
    piece = coded.unit(number)
    whole = piece if len(piece) == rows * row_bytes else decompress(piece, rows * row_bytes)
    if len(whole) != rows * row_bytes:
        raise DamageError(f"unit {number} is damaged; nothing of it is returned")
    return np.frombuffer(whole, np.uint8).reshape(rows, row_bytes)


def _compressor(codec: Codec) -> Callable[[bytes], bytes]:
    if codec.method is Method.ZSTD:
        content = codec.dictionary
        data = None if content is None else zstandard.ZstdCompressionDict(content.content)
        return zstandard.ZstdCompressor(
            level=codec.level,
            dict_data=data,
            write_content_size=False,
            write_checksum=False,
            write_dict_id=False,
        ).compress
    if codec.method is Method.LZ4 and codec.level:
        return lambda piece: lz4.block.compress(
            piece, mode="high_compression", compression=codec.level, store_size=False
        )
    if codec.method is Method.LZ4:
        return lambda piece: lz4.block.compress(piece, store_size=False)
    return bytes


def _decompressor(codec: Codec) -> Decompress:
    def zstd(piece: bytes, expected: int) -> bytes:
        if zstandard.frame_content_size(piece) > expected:
            return b""  # the package would allocate what the header claims
        return decompressor.decompress(piece, max_output_size=expected)

    def lz(piece: bytes, expected: int) -> bytes:
        return bytes(lz4.block.decompress(piece, uncompressed_size=expected))

    def damaged(_piece: bytes, _expected: int) -> bytes:
        return b""

    content = codec.dictionary
    try:
        data = None if content is None else zstandard.ZstdCompressionDict(content.content)
        decompressor = zstandard.ZstdDecompressor(dict_data=data)
    except (zstandard.ZstdError, ValueError) as error:
        raise DamageError(f"a dictionary is none ({error}); nothing is read with it") from error
    inner = {Method.ZSTD: zstd, Method.LZ4: lz, Method.STORED: damaged}[codec.method]

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
    if transform.predictor is Predictor.NOTHING:
        return rows
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
    if transform.predictor is Predictor.NOTHING:
        return rows
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

"""A second implementation of decoding, in plain NumPy, as the oracle of the compiled one.

It is written to be read, not to be fast, and shares no code with holdall. It decompresses with the zstandard and lz4
packages. `decode_slice` returns one slice of a `Coded` object whose data is in memory.
"""

from __future__ import annotations

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall._native import Coded
from holdall.codec.codec import Codec, Method, Transform

Bytes = NDArray[np.uint8]

_COLOURS = {Transform.COLOURS, Transform.COLOUR_COLUMNS}


def decode_slice(coded: Coded, number: int) -> bytes:
    """Return one slice. Raise an error of any kind if it is damaged."""
    codec: Codec = coded.codec
    place = number if coded.places is None else int(coded.places[number])
    unit, within = divmod(place, codec.group)
    slices = min(codec.group, coded.slice_count - unit * codec.group)
    packed = _read_unit(coded, unit)
    palette = coded.palette
    if codec.transform in _COLOURS:
        palette, packed = _split_colours(palette, packed)
    staged = _unpack_unit(codec, packed, slices)[within]
    if codec.shuffle_bytes:
        staged = staged.reshape(codec.shuffle_bytes, -1).T.reshape(-1)
    if codec.transform in _COLOURS:
        return _look_up_colours(codec, staged, palette)
    values = _undo_image(codec, staged)
    if codec.word_bytes:
        return palette.view(f"u{codec.word_bytes}")[values].tobytes()
    return values.tobytes()


def _count_transformed_bytes(codec: Codec) -> int:
    """Return the bytes of a slice before compression."""
    if codec.transform in _COLOURS:
        return codec.slice_bytes // 3
    return codec.slice_bytes // max(codec.word_bytes, 1)


def _read_unit(coded: Coded, unit: int) -> bytes:
    assert coded.data is not None
    return coded.data[int(coded.offsets[unit]) : int(coded.offsets[unit + 1])].tobytes()


def _unpack_unit(codec: Codec, packed: bytes, slices: int) -> Bytes:
    """Return the transformed slices of a unit, one per row."""
    width = _count_transformed_bytes(codec)
    content = packed
    if len(packed) != slices * width:
        content = _decompress(codec, packed, slices * width)
    if codec.transform is Transform.CHANGES and len(content) != slices * width:
        content = _apply_changes(content, slices, width)
    return np.frombuffer(content, np.uint8).reshape(slices, width)


def _decompress(codec: Codec, packed: bytes, max_bytes: int) -> bytes:
    known = b"" if codec.dictionary is None else codec.dictionary.content
    if codec.method is Method.LZ4:
        arguments = {"dict": known} if known else {}
        return bytes(lz4.block.decompress(packed, uncompressed_size=max_bytes, **arguments))
    if codec.method is Method.ZSTANDARD:
        dictionary = zstandard.ZstdCompressionDict(known) if known else None
        return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(packed, max_output_size=max_bytes)
    return packed


# ---------------------------------------------------------------- changes


def _apply_changes(content: bytes, slices: int, width: int) -> bytes:
    """Return all slices of a unit that holds its first slice and the changes of the others.

    The changes of a slice are their number, and for each the bytes that stay, its length, and the new bytes.
    """
    current = bytearray(content[:width])
    made = [bytes(current)]
    at = width
    for _ in range(slices - 1):
        changes, at = _read_number(content, at)
        position = 0
        for _ in range(changes):
            skipped, at = _read_number(content, at)
            length, at = _read_number(content, at)
            position += skipped
            current[position : position + length] = content[at : at + length]
            position += length
            at += length
        made.append(bytes(current))
    return b"".join(made)


def _read_number(content: bytes, at: int) -> tuple[int, int]:
    """Read a number of seven bits per byte, the lowest first. Return it and the place after it."""
    number = 0
    shift = 0
    while content[at] > 127:
        number |= (content[at] & 127) << shift
        shift += 7
        at += 1
    return number | content[at] << shift, at + 1


# ---------------------------------------------------------------- images


def _split_colours(palette: Bytes, packed: bytes) -> tuple[Bytes, bytes]:
    """Return the palette of a unit and the rest of the unit.

    A unit begins with the number of its own colours, and for each its number and its three bytes.
    """
    count = packed[0]
    own = palette.copy().reshape(256, 4)
    for entry in range(count):
        number, *colour = packed[1 + 4 * entry : 5 + 4 * entry]
        own[number, :3] = colour
    return own, packed[1 + 4 * count :]


def _look_up_colours(codec: Codec, numbers: Bytes, palette: Bytes) -> bytes:
    if codec.transform is Transform.COLOUR_COLUMNS:
        numbers = numbers.reshape(codec.columns, codec.rows).T.reshape(-1)
    pixels = palette.reshape(256, 4)[numbers, :3]
    return pixels.tobytes() if codec.is_interleaved else pixels.T.tobytes()


def _undo_image(codec: Codec, staged: Bytes) -> Bytes:
    if codec.transform is Transform.PIXELS:
        return np.ascontiguousarray(staged.reshape(-1, codec.planes).T).reshape(-1)
    if codec.transform is not Transform.LEFT:
        return staged
    planes = staged.reshape(codec.planes, codec.rows, codec.columns).copy()
    # The first value of a row is a difference to the value above it.
    planes[:, :, 0] = np.cumsum(planes[:, :, 0], axis=1, dtype=np.uint8)
    planes = np.cumsum(planes, axis=2, dtype=np.uint8)
    if codec.subtracts_green:
        planes[0] += planes[1]
        planes[2] += planes[1]
    if codec.is_interleaved:
        planes = planes.transpose(1, 2, 0)
    return np.ascontiguousarray(planes).reshape(-1)

"""Presets: the few codecs that are tried on a kind of field, and what decoding each of them costs.

    kind          fields
    GREY          images of one plane, one byte per pixel
    COLOURS       images of several planes, such as camera images
    FEW_COLOURS   images of three planes whose neighbouring slices have at most 256 colours: tiles and sprites
    FEW_WORDS     words of 2, 4 or 8 bytes that have at most 256 values: images divided by 255, flags, small integers
    WORDS         other words of 2, 4 or 8 bytes
    BYTES         everything else

`choice` measures how small the presets of a field's kind make the field's own slices. Decision 027 has the recordings
by which the presets were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from holdall._native import encode
from holdall.codec.codec import Codec, Method, Transform
from holdall.schema import Leaf
from holdall.store.windows import Window

_MAX_DICTIONARY_SLICE_BYTES = 32 * 1024
"""Largest slices for which a dictionary is trained. Larger ones fill the window of a compressor by themselves."""

_MAX_CHANNELS = 4
"""Maximum length of a last axis that counts as the channels of an image."""
_MAX_PLANES = 16
"""Maximum length of a first axis that counts as the planes of an image. NetHack has 21 planes of text."""
_MIN_IMAGE_SIDE = 8
"""Minimum number of rows and of columns of an image."""
_COLOUR_GROUP = 8
"""Neighbouring slices that must have at most 256 colours together."""
_MAX_UNIT_BYTES = 4 * 2**20
"""Maximum raw bytes of a unit."""
_LZ4_LEVEL = 7
_ZSTANDARD_LEVEL = 9
_DIFFERENCES_MIN_MATCH = 6
"""Shorter repetitions of differences happen by chance. Referring to them takes longer to decode and saves no bytes."""


class Kind(Enum):
    """The kinds of fields. Each has presets of its own."""

    GREY = "grey image"
    COLOURS = "colour image"
    FEW_COLOURS = "image of few colours"
    FEW_WORDS = "words of few values"
    WORDS = "words"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Preset:
    """The part of a codec that does not depend on the field. Slice bytes and sides of images are added later."""

    transform: Transform
    method: Method
    group: int = 1  # Slices per unit.
    has_shuffle: bool = False  # Whether the bytes of words are shuffled.
    may_have_dictionary: bool = True  # Whether a dictionary is trained if the slices are small enough.


_LZ4 = Method.LZ4
_ZSTD = Method.ZSTANDARD
_NONE = Transform.NONE
_LEFT = Transform.LEFT
_PIXELS = Transform.PIXELS
_COLOURS = Transform.COLOURS
_COLUMNS = Transform.COLOUR_COLUMNS
_CHANGES = Transform.CHANGES
_IMAGE_TRANSFORMS = frozenset([_LEFT, _PIXELS, _COLOURS, _COLUMNS])
"""Transforms of images. Their codecs have the planes, rows and columns of the image."""

PRESETS: dict[Kind, tuple[Preset, ...]] = {
    Kind.GREY: (
        Preset(_NONE, _LZ4),
        Preset(_NONE, _ZSTD),
        Preset(_NONE, _ZSTD, 8),
        Preset(_LEFT, _LZ4),
        Preset(_LEFT, _ZSTD),
        Preset(_CHANGES, _LZ4, 32),
        Preset(_CHANGES, _LZ4, 64),
        Preset(_CHANGES, _ZSTD, 32),
    ),
    Kind.COLOURS: (
        Preset(_NONE, _LZ4),
        Preset(_PIXELS, _LZ4, may_have_dictionary=False),  # Pixels of a dictionary are useless once the light changes.
        Preset(_PIXELS, _ZSTD),
        Preset(_LEFT, _LZ4),
        Preset(_LEFT, _LZ4, 4),
        Preset(_LEFT, _ZSTD),
        Preset(_LEFT, _ZSTD, 4),
        Preset(_CHANGES, _LZ4, 32),
    ),
    Kind.FEW_COLOURS: (
        Preset(_COLOURS, _LZ4, 4),
        Preset(_COLOURS, _LZ4, 8),
        Preset(_COLOURS, _ZSTD, 8),
        Preset(_COLOURS, _ZSTD, 16),
        Preset(_COLUMNS, _LZ4),
        Preset(_COLUMNS, _ZSTD, 4),
        Preset(_CHANGES, _LZ4, 32),
    ),
    Kind.FEW_WORDS: (
        Preset(_NONE, _LZ4),
        Preset(_NONE, _LZ4, 4),
        Preset(_NONE, _LZ4, 8),
        Preset(_NONE, _ZSTD, 16),
        Preset(_LEFT, _LZ4),
        Preset(_LEFT, _ZSTD),
        Preset(_LEFT, _ZSTD, 8),
        Preset(_CHANGES, _LZ4, 64),
    ),
    Kind.WORDS: (
        Preset(_NONE, _LZ4),
        Preset(_NONE, _LZ4, 4),
        Preset(_NONE, _ZSTD),
        Preset(_NONE, _ZSTD, 8),
        Preset(_NONE, _LZ4, has_shuffle=True),
        Preset(_CHANGES, _LZ4, 16, has_shuffle=True),
    ),
    Kind.BYTES: (
        Preset(_NONE, _LZ4),
        Preset(_NONE, _LZ4, 4),
        Preset(_NONE, _ZSTD),
        Preset(_NONE, _ZSTD, 4),
        Preset(_NONE, _ZSTD, 8),
        Preset(_CHANGES, _LZ4, 32),
    ),
}
"""The codecs that are tried on each kind of field."""

_FAST_TRANSFORMS = (_NONE, _LEFT, _PIXELS)
"""Transforms that compress several hundred megabytes per second with LZ4's fast compressor."""


# ---------------------------------------------------------------- kinds of fields


def list_kinds(leaf: Leaf, window: Window) -> list[Kind]:
    """Return the one or two kinds that a field may be. The first of two is for slices that fit a palette."""
    if leaf.dtype.itemsize in {2, 4, 8}:
        return [Kind.FEW_WORDS, Kind.WORDS]
    image = _make_image_codec(leaf, window)
    if image is None or leaf.dtype.itemsize != 1:
        return [Kind.BYTES]
    if image.planes == 1:
        return [Kind.GREY]
    if image.planes == 3:
        return [Kind.FEW_COLOURS, Kind.COLOURS]
    return [Kind.COLOURS]


def find_kind(leaf: Leaf, window: Window, slices: NDArray[np.uint8]) -> Kind:
    """Return the kind of a field that has slices like the given ones."""
    kinds = list_kinds(leaf, window)
    if len(kinds) == 1:
        return kinds[0]
    if kinds[0] is Kind.FEW_WORDS:
        palette_codec = Codec(window.slice_bytes, word_bytes=leaf.dtype.itemsize)
    else:
        image = _make_image_codec(leaf, window)
        assert image is not None  # Only images can have few colours.
        palette_codec = replace(image, transform=_COLOURS, group=min(_COLOUR_GROUP, max(len(slices), 1)))
    return kinds[1] if encode(slices, palette_codec) is None else kinds[0]


def list_codecs(kind: Kind, leaf: Leaf, window: Window) -> dict[Codec, bool]:
    """Return the presets of `kind` as codecs for a field, and whether a dictionary should be trained for each."""
    codecs: dict[Codec, bool] = {}
    for preset in PRESETS[kind]:
        codec = _make_codec(preset, kind, leaf, window)
        if codec is not None:
            codecs.setdefault(codec, preset.may_have_dictionary and _can_have_dictionary(codec))
    return codecs


def list_fast_codecs(kind: Kind, leaf: Leaf, window: Window) -> list[Codec]:
    """Return the codecs from which a compactor that is behind chooses."""
    codecs = [_make_codec(Preset(transform, _LZ4), kind, leaf, window) for transform in _FAST_TRANSFORMS]
    return list(dict.fromkeys(replace(codec, level=0) for codec in codecs if codec is not None))


def is_of_colours(codec: Codec) -> bool:
    """Return whether the codec replaces pixels by the numbers of their colours."""
    return codec.transform in {Transform.COLOURS, Transform.COLOUR_COLUMNS}


def has_palette(codec: Codec) -> bool:
    """Return whether the codec refuses slices that have too many different words or colours."""
    return codec.word_bytes > 0 or is_of_colours(codec)


def _can_have_dictionary(codec: Codec) -> bool:
    """Return whether a dictionary may make slices of this codec smaller."""
    return codec.slice_bytes <= _MAX_DICTIONARY_SLICE_BYTES and not (codec.word_bytes or codec.shuffle_bytes)


def describe_codec(codec: Codec) -> str:
    """Return the steps of a codec for reports, such as "left + LZ4 with dictionary, 4 slices together"."""
    if codec.method is Method.STORED:
        return "uncompressed"
    steps = []
    if codec.word_bytes:
        steps.append("palette")
    if codec.subtracts_green:
        steps.append("green")
    if codec.transform is not Transform.NONE:
        steps.append(codec.transform.name.lower().replace("_", " "))
    if codec.shuffle_bytes:
        steps.append("shuffle")
    steps.append("LZ4" if codec.method is Method.LZ4 else "Zstandard")
    dictionary = " with dictionary" if codec.dictionary is not None else ""
    group = f", {codec.group} slices together" if codec.group > 1 else ""
    return " + ".join(steps) + dictionary + group


# ---------------------------------------------------------------- the cost of decoding

_SLICE_COST = 0.8
"""Cost of a decoded slice, whatever its codec."""
_TRANSFORM_COST = 0.5
"""Cost of undoing a transform, a shuffle or a palette."""
_LEFT_COST = 0.65
"""Cost of adding up differences to the left neighbour."""
_DICTIONARY_COST = 0.25
"""Cost of an extra copy. LZ4 decompresses a slice that is alone in its unit to the bytes after its dictionary."""
_UNPACK_COST = 0.4
"""Cost of decompressing a slice, apart from the cost of its compressed bytes."""
_COMPRESSED_COST = {Method.STORED: 0.0, Method.LZ4: 2.0, Method.ZSTANDARD: 17.0}
"""Cost of reading compressed bytes, if they are as many as the bytes of a raw slice."""
_START_BYTES = {Method.STORED: 0, Method.LZ4: 0, Method.ZSTANDARD: 7_000}
"""Cost of beginning a unit, in raw bytes that are copied in the same time. Zstandard reads tables first."""


def estimate_cost(codec: Codec, window: Window, compressed_share: float) -> float:
    """Return the estimated time in which one thread decodes random transitions, divided by that of a raw gather.

    The unit of all costs is one copy of a raw slice out of a large memory. The constants above are rounded from gathers
    of the recordings in decision 027 (`benchmarks/memory/trace_codecs.py --presets`). The result follows from the codec
    and from the measured size, never from a clock, so that the same data gets the same codec on every machine.

    Args:
        compressed_share: Compressed bytes divided by raw bytes.
    """
    copied_slices = 2 * window.count
    # Slices that the observation and the next observation share are decoded once.
    decoded_slices = window.count + window.shift
    # The first needed slice has a random place in its unit, so other slices of units are decompressed, too.
    unpacked_slices = decoded_slices + codec.group - 1
    unpack_cost = _UNPACK_COST / _bytes_per_number(codec)
    if codec.transform is Transform.CHANGES:
        unpack_cost /= codec.group
    unpack_cost += _START_BYTES[codec.method] / (codec.group * codec.slice_bytes)
    unpack_cost += _COMPRESSED_COST[codec.method] * compressed_share
    decode_cost = _SLICE_COST
    if codec.transform is not Transform.NONE or codec.shuffle_bytes or codec.word_bytes:
        transform_cost = _LEFT_COST if codec.transform is Transform.LEFT else _TRANSFORM_COST
        decode_cost += transform_cost / max(codec.word_bytes, 1)
    if codec.method is Method.LZ4 and codec.group == 1 and codec.dictionary is not None:
        decode_cost += _DICTIONARY_COST
    return (unpacked_slices * unpack_cost + decoded_slices * decode_cost) / copied_slices


def _bytes_per_number(codec: Codec) -> int:
    """Return how many bytes of a slice become one byte before compression. 1 without a palette."""
    return 3 if is_of_colours(codec) else max(codec.word_bytes, 1)


# ---------------------------------------------------------------- codecs


def _make_codec(preset: Preset, kind: Kind, leaf: Leaf, window: Window) -> Codec | None:
    """Return the codec of a preset for a field. None if the field has no such codec."""
    if preset.group > 1 and preset.group * window.slice_bytes > _MAX_UNIT_BYTES:
        return None
    transform = preset.transform
    codec = Codec(window.slice_bytes)
    if transform in _IMAGE_TRANSFORMS:
        image = None if kind in {Kind.WORDS, Kind.BYTES} else _make_image_codec(leaf, window)
        if image is None or (transform is _PIXELS and image.planes == 1):
            return None
        if transform is _PIXELS and image.is_interleaved:
            transform = _NONE
        else:
            codec = image
    word_bytes = leaf.dtype.itemsize
    return replace(
        codec,
        transform=transform,
        method=preset.method,
        level=_LZ4_LEVEL if preset.method is _LZ4 else _ZSTANDARD_LEVEL,
        group=preset.group,
        word_bytes=word_bytes if kind is Kind.FEW_WORDS else 0,
        shuffle_bytes=word_bytes if preset.has_shuffle else 0,
        subtracts_green=transform is _LEFT and codec.planes == 3,
        min_match=_DIFFERENCES_MIN_MATCH if transform is _LEFT and preset.method is _ZSTD else 0,
    )


def _make_image_codec(leaf: Leaf, window: Window) -> Codec | None:
    """Return a codec with the planes, rows and columns of the slices. None if they do not look like images."""
    shape = _compute_image_shape(leaf, window)
    if len(shape) not in {2, 3}:
        return None
    is_interleaved = len(shape) == 3 and shape[-1] <= _MAX_CHANNELS
    if is_interleaved:
        rows, columns, planes = shape
    else:
        planes, rows, columns = [1, *shape][-3:]
    if rows < _MIN_IMAGE_SIDE or columns < _MIN_IMAGE_SIDE or planes > _MAX_PLANES:
        return None
    return Codec(window.slice_bytes, planes=planes, rows=rows, columns=columns, is_interleaved=is_interleaved)


def _compute_image_shape(leaf: Leaf, window: Window) -> list[int]:
    """Return the shape of one slice, without its first axes of length 1, and without a last axis of length 1."""
    shape = list(leaf.shape)
    if window.count > 1:
        shape[window.axis] = window.unit
    while shape and shape[0] == 1:
        shape = shape[1:]
    if shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape

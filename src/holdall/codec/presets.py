"""Presets: the codecs that are tried on the slices of a field, and what decoding each of them costs.

A preset is a transform that suits the kind of field, a compressor, a number of slices per unit, and whether a
dictionary is trained. `choice` measures how small the presets make a field's own slices.

    kind of field          transforms
    grey image             none, left, changes
    colour image           none or pixels, left, colours, colour columns, changes
    words of 2, 4, 8 bytes none, shuffle, palette, changes of palette numbers or of shuffled words; as an image also
                           palette and left
    other bytes            none, changes

Decoding costs are counted in raw copies: 1.0 means that decoding takes as long as copying the raw slice out of a large
memory. A cost follows from the preset and from the measured size alone, never from a clock, so that the same data gets
the same codec on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdall.codec.codec import Codec, Method, Transform
from holdall.schema import Leaf
from holdall.store.windows import Window

MAX_DICTIONARY_SLICE_BYTES = 32 * 1024
"""Larger slices fill the window of a compressor by themselves, so a dictionary adds nothing."""

_MAX_CHANNELS = 4
"""Length of the last axis up to which it counts as the channels of an image."""
_MIN_IMAGE_SIDE = 8
"""Rows and columns from which on an array counts as an image."""
_MAX_UNIT_BYTES = 4 * 2**20
"""Raw bytes of the largest unit."""
_LZ4_LEVEL = 7
_ZSTANDARD_LEVEL = 9
_DIFFERENCES_MIN_MATCH = 6
"""Shorter repetitions of differences happen by chance. Referring to them takes longer to decode and saves no bytes."""
_GROUPS = (4, 8, 16)
"""Slices per unit, apart from single slices. A transition of a stack of 4 needs 5 neighbours."""
_CHANGE_GROUPS = (32, 64)
"""Slices per unit of changes."""
_SHUFFLED_CHANGE_GROUPS = (4, 16)
"""Slices per unit of changes of shuffled words. Noise changes most of the last bytes, so larger units gain little."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A codec to try, without its dictionary."""

    codec: Codec
    has_dictionary: bool


def list_single_codecs(leaf: Leaf, window: Window) -> list[Codec]:
    """Return every transform with every compressor. Slices are compressed alone and without a dictionary."""
    return [
        _with_method(base, method)
        for base in _list_transforms(leaf, window)
        for method in (Method.LZ4, Method.ZSTANDARD)
    ]


def list_presets(single: Codec) -> list[Preset]:
    """Return the transform of `single` without and with a dictionary, and with several slices per unit."""
    can_have_dictionary = _can_have_dictionary(single)
    alone = [Preset(single, has_dictionary) for has_dictionary in (False, True)]
    groups = [group for group in _GROUPS if group * single.slice_bytes <= _MAX_UNIT_BYTES]
    together = [Preset(replace(single, group=group), can_have_dictionary) for group in groups]
    return [*alone[: 1 + can_have_dictionary], *together]


def list_change_presets(leaf: Leaf, window: Window) -> list[Preset]:
    """Return the presets that store a unit as its first slice and the changes of the others."""
    base = Codec(window.slice_bytes, transform=Transform.CHANGES, word_bytes=_palette_word_bytes(leaf))
    return [
        Preset(replace(_with_method(base, method), group=group), _can_have_dictionary(base))
        for method in (Method.LZ4, Method.ZSTANDARD)
        for group in _CHANGE_GROUPS
        if group * window.slice_bytes <= _MAX_UNIT_BYTES
    ]


def list_shuffled_change_presets(leaf: Leaf, window: Window) -> list[Preset]:
    """Return presets of changes that first shuffle words, for cameras whose images were resized to floats."""
    word_bytes = _palette_word_bytes(leaf)
    if not word_bytes:
        return []
    base = Codec(window.slice_bytes, transform=Transform.CHANGES, shuffle_bytes=word_bytes)
    return [
        Preset(replace(_with_method(base, Method.LZ4), group=group), has_dictionary=False)
        for group in _SHUFFLED_CHANGE_GROUPS
        if group * window.slice_bytes <= _MAX_UNIT_BYTES
    ]


def list_fast_codecs(leaf: Leaf, window: Window) -> list[Codec]:
    """Return codecs that compress several hundred megabytes per second, for a compactor that is behind."""
    transforms = [base for base in _list_transforms(leaf, window) if not is_of_colours(base)]
    return [replace(base, method=Method.LZ4, level=0) for base in transforms]


def is_of_colours(codec: Codec) -> bool:
    """Return whether pixels become numbers of their colours."""
    return codec.transform in {Transform.COLOURS, Transform.COLOUR_COLUMNS}


def has_palette(codec: Codec) -> bool:
    """Return whether the codec refuses slices that have too many different words or colours."""
    return codec.word_bytes > 0 or is_of_colours(codec)


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

_SLICE_COST = 0.85
"""Raw copies that every decoded slice takes, whatever its codec."""
_COPY_COST = 0.4
"""Raw copies to copy a slice that was just decoded."""
_UNPACK_COST = {Method.STORED: 0.0, Method.LZ4: 0.35, Method.ZSTANDARD: 0.45}
"""Additional raw copies to decompress a slice that takes hardly any bytes."""
_LZ4_WORK_COST = {
    Transform.NONE: 2.0,
    Transform.LEFT: 2.0,
    Transform.PIXELS: 2.0,
    Transform.COLOURS: 5.0,
    Transform.COLOUR_COLUMNS: 5.0,
    Transform.CHANGES: 2.8,
}
_SHUFFLED_CHANGES_WORK_COST = 1.7
"""The same for changes of shuffled words: LZ4 copies long stretches of bytes that do not repeat."""
_ZSTANDARD_WORK_COST = {
    Transform.NONE: 17.0,
    Transform.LEFT: 17.0,
    Transform.PIXELS: 11.0,
    Transform.COLOURS: 30.0,
    Transform.COLOUR_COLUMNS: 30.0,
    Transform.CHANGES: 30.0,
}
"""Additional raw copies to decompress a slice, times its compressed share."""
_START_BYTES = {Method.STORED: 0, Method.LZ4: 0, Method.ZSTANDARD: 7_000}
"""Raw bytes that are copied in the time in which Zstandard reads the tables of a unit."""
_UNDO_COST = {
    Transform.NONE: 0.0,
    Transform.LEFT: 0.65,
    Transform.PIXELS: 0.75,
    Transform.COLOURS: 0.45,
    Transform.COLOUR_COLUMNS: 0.8,
    Transform.CHANGES: 0.8,
}
"""Additional raw copies to undo a transform of a slice."""
_BUFFER_COST = 0.25
"""Additional raw copies to copy a single slice that LZ4 decompresses after its dictionary."""
_SHUFFLE_COST = 0.3
_WORDS_COST = 0.3


def estimate_cost(codec: Codec, window: Window, coded_share: float) -> float:
    """Return how many times as long as a raw gather it takes one thread to decode random transitions.

    The constants describe gathers of nine recorded fields on one machine. Most gathers took 0.7 to 1.4 times as long.

    Args:
        coded_share: Compressed bytes over raw bytes.
    """
    copied = 2 * window.count
    decoded = window.count + window.shift
    # The slices that a transition needs begin at a random slice of a unit.
    unpacked = decoded + codec.group - 1
    unpack = _UNPACK_COST[codec.method] * _bytes_to_compress(codec) / codec.slice_bytes
    if codec.transform is Transform.CHANGES:
        unpack /= codec.group
    work = 0.0
    if codec.method is Method.LZ4:
        is_shuffled_changes = codec.transform is Transform.CHANGES and codec.shuffle_bytes > 0
        work = _SHUFFLED_CHANGES_WORK_COST if is_shuffled_changes else _LZ4_WORK_COST[codec.transform]
    elif codec.method is Method.ZSTANDARD:
        work = _ZSTANDARD_WORK_COST[codec.transform]
    start = _START_BYTES[codec.method] / (codec.group * codec.slice_bytes)
    undo = _SLICE_COST + _UNDO_COST[codec.transform] / max(codec.word_bytes, 1)
    if codec.group == 1 and codec.method is Method.LZ4 and codec.dictionary is not None:
        undo += _BUFFER_COST
    if codec.shuffle_bytes:
        undo += _SHUFFLE_COST
    if codec.word_bytes:
        undo += _WORDS_COST
    total = unpacked * (start + unpack + work * coded_share) + decoded * undo
    # Slices that both observations show are decoded once and then copied.
    return (total + _COPY_COST * (copied - decoded)) / copied


def _bytes_to_compress(codec: Codec) -> int:
    """Return the bytes of a slice after its transform."""
    if is_of_colours(codec):
        return codec.slice_bytes // 3
    return codec.slice_bytes // max(codec.word_bytes, 1)


# ---------------------------------------------------------------- transforms


def _list_transforms(leaf: Leaf, window: Window) -> Iterator[Codec]:
    """Yield codecs that have a transform, and no compressor yet."""
    plain = Codec(window.slice_bytes)
    word_bytes = _palette_word_bytes(leaf)
    yield plain
    if word_bytes:
        yield replace(plain, shuffle_bytes=word_bytes)
        yield replace(plain, word_bytes=word_bytes)
    if word_bytes or leaf.dtype.itemsize == 1:
        yield from _list_image_transforms(replace(plain, word_bytes=word_bytes), leaf, window)


def _palette_word_bytes(leaf: Leaf) -> int:
    """Return the bytes of the words of `leaf`; 0 for single bytes and for words that no palette can number."""
    return leaf.dtype.itemsize if leaf.dtype.itemsize in {2, 4, 8} else 0


def _list_image_transforms(plain: Codec, leaf: Leaf, window: Window) -> Iterator[Codec]:
    """Yield the transforms of an image. Yield nothing if the slices do not look like images."""
    shape = _slice_shape(leaf, window)
    if len(shape) not in {2, 3}:
        return
    is_interleaved = len(shape) == 3 and shape[-1] <= _MAX_CHANNELS
    if is_interleaved:
        rows, columns, planes = shape
    else:
        planes, rows, columns = [1, *shape][-3:]
    if rows < _MIN_IMAGE_SIDE or columns < _MIN_IMAGE_SIDE:
        return
    image = replace(plain, planes=planes, rows=rows, columns=columns, is_interleaved=is_interleaved)
    yield replace(image, transform=Transform.LEFT, subtracts_green=planes == 3)
    if planes > 1 and not is_interleaved:
        yield replace(image, transform=Transform.PIXELS)
    if planes == 3 and not plain.word_bytes:
        yield replace(image, transform=Transform.COLOURS)
        yield replace(image, transform=Transform.COLOUR_COLUMNS)


def _slice_shape(leaf: Leaf, window: Window) -> list[int]:
    """Return the shape of one slice, without axes of length 1 at its start and its end."""
    shape = list(leaf.shape)
    if window.count > 1:
        shape[window.axis] = window.unit
    while shape and shape[0] == 1:
        shape = shape[1:]
    if shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _with_method(base: Codec, method: Method) -> Codec:
    if method is Method.LZ4:
        return replace(base, method=method, level=_LZ4_LEVEL)
    min_match = _DIFFERENCES_MIN_MATCH if base.transform is Transform.LEFT else 0
    return replace(base, method=method, level=_ZSTANDARD_LEVEL, min_match=min_match)


def _can_have_dictionary(base: Codec) -> bool:
    """Return whether slices may have bytes in common that a dictionary can hold."""
    return base.slice_bytes <= MAX_DICTIONARY_SLICE_BYTES and not (base.word_bytes or base.shuffle_bytes)

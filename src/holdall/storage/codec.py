"""Codecs: which are worth measuring on the slices of a field, and what else is known of one; codec_choice.py chooses.

In:  a field's dtype and the shape of its slices.  Out: the codecs that are worth measuring.
Invariant: what a codec is, and that it is lossless, blocks.py says. A choice only moves bytes and time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdall.schema import Leaf
from holdall.storage.blocks import Codec, Method, Predictor, Transform

if TYPE_CHECKING:
    from holdall.storage.slices import Window

_WIDEST_CHANNELS = 4
_SMALLEST_IMAGE = 8
_DICTIONARY_UP_TO = 32 * 1024
"""Slices beyond this fill a compressor's window by themselves: a dictionary adds nothing."""


_METHODS = (Method.LZ4, 0), (Method.LZ4, 7), (Method.ZSTD, 9)
"""Methods and levels: higher ones take hardly less room, and longer to compress than frames take to come."""


def candidates(leaf: Leaf, window: Window) -> list[Codec]:
    """Name the codecs worth measuring on slices of `leaf` cut by `window`."""
    whole = Transform(window.slice_bytes)
    transforms = [whole]
    itemsize = leaf.dtype.itemsize
    if itemsize == 1:
        transforms += _predictions(whole, leaf, window)
    elif itemsize in {2, 4, 8}:
        numbered = replace(whole, word_bytes=itemsize)
        transforms += [replace(whole, shuffle=itemsize), numbered]
        transforms += _predictions(numbered, leaf, window)
    return [Codec(method, level, form) for form in transforms for method, level in _METHODS]


def candidates_by_changes(leaf: Leaf, window: Window) -> list[Codec]:
    """Name the codecs by which slices that are sealed together may be changes of each other."""
    itemsize = leaf.dtype.itemsize
    words = itemsize if itemsize in {2, 4, 8} else 0
    form = Transform(window.slice_bytes, words, Predictor.CHANGES)
    return [Codec(method, level, form) for method, level in _METHODS if level > 0]


def _predictions(base: Transform, leaf: Leaf, window: Window) -> list[Transform]:
    """Predict each byte by its neighbour, where slices look like images."""
    shape = list(leaf.shape)
    if window.count > 1:
        shape[window.axis] = window.unit
    while shape and shape[0] == 1:
        shape = shape[1:]
    if shape and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) not in {2, 3}:
        return []
    interleaved = len(shape) == 3 and shape[-1] <= _WIDEST_CHANNELS
    planes, rows, columns = (shape[2], *shape[:2]) if interleaved else [1, *shape][-3:]
    if rows < _SMALLEST_IMAGE or columns < _SMALLEST_IMAGE:
        return []
    image = replace(base, planes=planes, rows=rows, columns=columns, interleaved=interleaved, green=planes == 3)
    predicted = [replace(image, predictor=which) for which in (Predictor.LEFT, Predictor.UP)]
    if planes > 1 and not interleaved:
        predicted.append(replace(image, predictor=Predictor.PIXELS, green=False))
    if planes == 3 and not base.word_bytes:
        predicted += [replace(image, predictor=which, green=False) for which in (Predictor.COLOURS, Predictor.COLUMNS)]
    return predicted


def wants_dictionary(codec: Codec) -> bool:
    """Whether a dictionary could help."""
    transform = codec.transform
    # It is trained on slices as they are, as pixels, or with changes of others.
    in_pixels = transform.predictor in {Predictor.PIXELS, Predictor.CHANGES} or transform.is_of_colours
    plain = transform == Transform(transform.slice_bytes) or in_pixels
    plain = plain and not transform.word_bytes
    alone = codec.method is not Method.STORED and codec.level > 0 and codec.group == 1 and not codec.key
    return alone and plain and transform.slice_bytes <= _DICTIONARY_UP_TO


def wants_differences(codec: Codec) -> bool:
    """Whether a dictionary of differences could help: LZ4 has no other way to know what slices begin with."""
    form = codec.transform
    is_image = form.is_of_differences and not form.word_bytes and not codec.dictionary
    return is_image and codec.method is Method.LZ4 and codec.level > 0 and form.slice_bytes <= _DICTIONARY_UP_TO


def hurried(codec: Codec) -> Codec:
    """Return the same code at the compressor's fastest useful level, for when time is short."""
    if codec.method is Method.PAIRS:
        return replace(codec, method=Method.ZSTD, level=1, dictionary=None)
    return replace(codec, level=min(codec.level, 0 if codec.method is Method.LZ4 else 1))


def without_palette(codec: Codec) -> Codec:
    """Return a code for slices that a palette does not hold."""
    form = Transform(codec.transform.slice_bytes)
    if codec.is_of_colours and not codec.transform.interleaved:
        form = replace(codec.transform, predictor=Predictor.PIXELS)
    return replace(codec, transform=form, dictionary=None)


def describe(codec: Codec) -> str:
    """Say what is done, for people."""
    if codec.method is Method.STORED:
        return "raw"
    steps = []
    if codec.transform.word_bytes:
        steps.append("palette")
    if codec.transform.green:
        steps.append("green")
    if codec.transform.predictor:
        steps.append(codec.transform.predictor.name.lower())
    if codec.transform.shuffle:
        steps.append("shuffle")
    names = {Method.LZ4: "lz4" if codec.level == 0 else "lz4hc", Method.ZSTD: "zstd", Method.PAIRS: "pairs"}
    steps.append(f"{names[codec.method]}{codec.level or ''}")
    beside = " with dictionary" if codec.dictionary and codec.method is not Method.PAIRS else ""
    if codec.key:
        beside = f" behind a {'raw ' if codec.raw_keys else ''}key of {codec.key * codec.group}"
    return "+".join(steps) + beside + (f", {codec.group} together" if codec.group > 1 else "")

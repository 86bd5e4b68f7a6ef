"""Codecs: which are worth measuring on the slices of a field, and how long decoding takes; codec_choice.py chooses.

In:  a field's dtype and the shape of its slices; sealed slices.  Out: codecs; microseconds, counted without a clock.
Invariant: blocks.py says what a codec is, and that it is lossless. A choice only moves bytes and time. The same data
gives the same count, whatever else runs, and without compiled loops, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Leaf
from holdall.storage.blocks import Codec, Method, Predictor, Transform
from holdall.storage.coded_units import places_of, unpacked_bytes

if TYPE_CHECKING:
    from holdall.storage.blocks import SealedSlices
    from holdall.storage.slices import Window
    from holdall.storage.ticks import Coder

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
    alone = codec.method is not Method.STORED and codec.level > 0 and codec.group == 1
    return alone and plain and transform.slice_bytes <= _DICTIONARY_UP_TO


def wants_differences(codec: Codec) -> bool:
    """Whether a dictionary of differences could help: LZ4 has no other way to know what slices begin with."""
    form = codec.transform
    is_image = form.is_of_differences and not form.word_bytes and not codec.dictionary
    return is_image and codec.method is Method.LZ4 and codec.level > 0 and form.slice_bytes <= _DICTIONARY_UP_TO


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
    names = {Method.LZ4: "lz4" if codec.level == 0 else "lz4hc", Method.ZSTD: "zstd"}
    steps.append(f"{names[codec.method]}{codec.level or ''}")
    dictionary = " with dictionary" if codec.dictionary else ""
    return "+".join(steps) + dictionary + (f", {codec.group} together" if codec.group > 1 else "")


# ---------------------------------------------------------------- how long decoding takes

_LARGE_MEMORY = 1.9
"""A gather from a large memory also misses the address caches: measured on Atari and camera
memories of 0.4 GB, against cold copies of single slices."""
_UNIT_US = {
    # Of a unit, a kilobyte that comes of it, a sequence, a literal of Huffman's code, a table of that code.
    Method.STORED: (0.0, 0.02, 0.0, 0.0, 0.0),
    Method.LZ4: (0.05, 0.030, 0.0038, 0.0, 0.0),
    Method.ZSTD: (0.17, 0.023, 0.0121, 0.0007, 1.13),
}
"""Microseconds on two busy cores of an AMD EPYC, fitted to 652 codecs of 18 recorded fields: 8 in 10 of them took from
0.9 to 1.4 times as long as this says, and the worst 2.9 times."""
_NEAR_BYTES, _FAR_US = 2**17, 0.03
"""Additional microseconds per kilobyte of units that are larger than `_NEAR_BYTES`, which do not fit the caches."""
_TRANSFORM_US = {"copy": 0.02, "left": 0.07, "up": 0.05, "green": 0.03, "pixels": 0.035,
                 "shuffle": 0.26, "words": 0.21, "colours": 0.12, "columns": 0.06}  # fmt: skip
"""The same for a kilobyte of a slice: to copy it from where its unit is decompressed, and to undo each transform."""
_CHANGED_US = {Method.STORED: 0.06, Method.LZ4: 0.06, Method.ZSTD: 0.4}
"""The same for a kilobyte of changes that are made; with all that Zstandard takes longer for such units than is
counted. Fitted to frames of nine games, of which LZ4's took from 0.9 to 1.2 times as long as this says. Where nearly
all bytes change it takes twice as long, and other codecs are chosen."""
_COPY_US = (0.03, 0.088)
"""The same for a slice that is copied, and a kilobyte of it."""


def raw_us(slice_bytes: int) -> float:
    """Return what it takes to copy a slice that no cache holds, as those of a large memory are."""
    return _LARGE_MEMORY * (_COPY_US[0] + _COPY_US[1] * slice_bytes / 1000)


def decode_us(
    coder: Coder, sealed: SealedSlices, drawn: NDArray[np.int64], unpacked: NDArray[np.int64] | None = None
) -> float:
    """Say how long a slice takes to decode, by those of transitions that were drawn, a row each.

    Args:
        unpacked: How many bytes come of each unit; None: as many as its slices have.
    """
    codec, form = sealed.codec, sealed.codec.transform
    units, within = np.divmod(places_of(sealed.coded, drawn), codec.group)
    if unpacked is None:
        unpacked = unpacked_bytes(sealed.coded, np.arange(len(sealed.coded.offsets) - 1))
    # Those of one transition in one unit are decoded once; the next transition lies elsewhere in a memory.
    decoded = len(units) + np.count_nonzero(np.diff(units, axis=1))
    total_us = decoded * _mean_unit_us(coder, sealed, units, unpacked)
    if codec.is_of_changes:
        # Up to the last slice of a transition in its unit; from there on the next unit begins, or the transition ends.
        share = float(np.mean(within[np.diff(units, axis=1, append=-1) != 0])) / codec.group
        noted = float(unpacked.mean()) - form.coded_bytes
        changed_us = _CHANGED_US[codec.method] * share * noted
        total_us += decoded * (changed_us + _TRANSFORM_US["copy"] * form.coded_bytes) / 1000
    is_apart = codec.group > 1 or (codec.method is Method.LZ4 and codec.dictionary is not None)
    undone = {
        "copy": is_apart and not (form.predictor is Predictor.PIXELS or form.shuffle or form.is_of_colours),
        "left": form.predictor is Predictor.LEFT, "up": form.predictor is Predictor.UP,
        "pixels": form.predictor is Predictor.PIXELS, "green": form.green,
        "colours": codec.is_of_colours, "columns": form.predictor is Predictor.COLUMNS,
        "shuffle": form.shuffle > 0, "words": form.word_bytes > 0,
    }  # fmt: skip
    per_slice = sum(_TRANSFORM_US[name] for name, is_done in undone.items() if is_done) * form.coded_bytes / 1000
    return float(total_us / drawn.size + per_slice)


def _mean_unit_us(coder: Coder, sealed: SealedSlices, units: NDArray[np.int64], unpacked: NDArray[np.int64]) -> float:
    """Count what has to be done for some units."""
    codec, units = sealed.codec, np.unique(units)
    packed, unpacked = np.diff(sealed.coded.offsets)[units], unpacked[units]
    is_stored = packed >= unpacked
    work = np.column_stack([np.ones(len(units)), unpacked / 1000, coder.count_work(sealed, units)])
    rates = np.array([_UNIT_US[codec.method], _UNIT_US[Method.STORED]])[is_stored.astype(np.int64)]
    total_us = float((rates * work).sum())
    is_far = unpacked > _NEAR_BYTES
    total_us += _FAR_US * float(unpacked[is_far].sum()) / 1000
    return total_us / max(len(units), 1)

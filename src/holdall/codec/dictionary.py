"""Dictionaries: bytes that the slices of a field have in common, trained on a sample of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import zstandard

from holdall._native import Dictionary, encode
from holdall.codec.codec import Codec, Method, Transform
from holdall.codec.presets import is_of_colours
from holdall.codec.sample import TRAINED_RUN, Bytes

_MIN_SLICES = 32
"""Minimum number of slices to train on."""
_MAX_CONTENT_BYTES = 64 * 1024
"""Largest dictionary. LZ4 refers to no more than the preceding 64 KiB."""
_MIN_CONTENT_BYTES = 1024
_SAMPLES_PER_CONTENT = 4
"""Minimum number of bytes to train on, per byte of the dictionary."""
_COVER_PIECE_BYTES = 2048
"""Bytes of the pieces of samples that form the dictionary: parameter k of the COVER algorithm."""
_COVER_MATCH_BYTES = 8
"""Bytes of the repetitions that the COVER algorithm counts: its parameter d."""
_TRAINED_LEVEL = 3
"""Level of Zstandard for which the trainer counts how often symbols are used."""


def train_dictionary(codec: Codec, slices: Bytes) -> Dictionary | None:
    """Return a dictionary for `codec`, trained on runs of slices. None if the slices have too little in common."""
    if len(slices) < _MIN_SLICES:
        return None
    group = TRAINED_RUN if codec.transform is Transform.CHANGES else 1
    palette, units = _list_units(replace(codec, group=group), slices)
    content_bytes = min(sum(map(len, units)) // _SAMPLES_PER_CONTENT, _MAX_CONTENT_BYTES)
    if content_bytes < _MIN_CONTENT_BYTES:
        return None
    samples: Any = units
    try:
        trained = zstandard.train_dictionary(
            content_bytes,
            samples,
            k=min(_COVER_PIECE_BYTES, content_bytes // 2),
            d=_COVER_MATCH_BYTES,
            level=_TRAINED_LEVEL,
        )
    except zstandard.ZstdError:
        return None
    return Dictionary(trained.as_bytes(), palette)


def _list_units(codec: Codec, slices: Bytes) -> tuple[bytes, list[bytes]]:
    """Return the palette of some slices, and their units after the transform and before compression."""
    coded = encode(slices, replace(codec, method=Method.STORED, level=0, min_match=0, dictionary=None))
    if coded is None or coded.data is None:
        return b"", []
    data = coded.data.tobytes()
    units = [data[start:end] for start, end in pairwise(coded.offsets.tolist())]
    if not is_of_colours(codec):
        return b"", units
    # A unit begins with the colours that the palette lacks: their number in one byte, and four bytes for each colour.
    return coded.palette.tobytes(), [unit[1 + 4 * unit[0] :] for unit in units]

"""Codecs: what may be done to the slices of a field so that they take less room.

In:  a field's dtype and the shape of its slices.  Out: the transforms and methods worth measuring.
Invariant: every codec is lossless by construction. A palette holds the very bits of the words it
numbers; predictors are differences modulo 256; what does not shrink is stored as it is.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from enum import IntEnum

from holdall.experience.window import Window
from holdall.schema import Leaf

_WIDEST_CHANNELS = 4
_SMALLEST_IMAGE = 8
_DICTIONARY_UP_TO = 32 * 1024
"""Slices beyond this fill a compressor's window by themselves: a dictionary adds nothing."""

_MOST_IN_A_UNIT = 64


class Method(IntEnum):
    """How bytes are compressed; the numbers are those of codec.h."""

    STORED = 0
    LZ4 = 1
    ZSTD = 2


class Predictor(IntEnum):
    """What a byte is told by; the numbers are those of codec.h."""

    NOTHING = 0
    LEFT = 1
    UP = 2


@dataclass(frozen=True, slots=True)
class Transform:
    """What is done to a slice before it is compressed, in this order; see codec.h."""

    slice_bytes: int
    word_bytes: int = 0
    predictor: Predictor = Predictor.NOTHING
    planes: int = 0
    rows: int = 0
    columns: int = 0
    interleaved: bool = False
    green: bool = False
    shuffle: int = 0

    @property
    def coded_bytes(self) -> int:
        """Bytes of a slice that reach the compressor."""
        return self.slice_bytes // self.word_bytes if self.word_bytes else self.slice_bytes

    def is_sound(self) -> bool:
        """Whether the numbers agree with each other: they may come from a file. See codec.c."""
        whole = 0 < self.slice_bytes < 2**31 and self.word_bytes in {0, 2, 4, 8} and self.shuffle >= 0
        if not whole or (self.word_bytes and self.slice_bytes % self.word_bytes):
            return False
        if self.predictor == Predictor.NOTHING:
            return self.shuffle == 0 or self.coded_bytes % self.shuffle == 0
        image = min(self.planes, self.rows, self.columns) >= 1 and (self.planes >= 3 or not self.green)
        return image and self.shuffle == 0 and self.planes * self.rows * self.columns == self.coded_bytes


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Bytes that slices of one field have in common; compared by identity."""

    content: bytes

    @functools.cached_property
    def name(self) -> str:
        """Name it by its content."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class Codec:
    """One way of coding slices."""

    method: Method
    level: int
    transform: Transform
    dictionary: Dictionary | None = None
    group: int = 1  # neighbours that are compressed together

    @property
    def wants_dictionary(self) -> bool:
        """Whether a dictionary could help."""
        transform = self.transform
        plain = transform == Transform(transform.slice_bytes)  # it is trained on slices as they are
        alone = self.method is Method.ZSTD and self.group == 1
        return alone and plain and transform.slice_bytes <= _DICTIONARY_UP_TO

    def is_cut_soundly(self) -> bool:
        """Whether units are of a size that readers make room for: it may come from a file. See codec.c."""
        return 1 <= self.group <= _MOST_IN_A_UNIT and self.group * self.transform.coded_bytes < 2**31

    def hurried(self) -> Codec:
        """Return the same code at the compressor's fastest useful level, for when time is short."""
        return replace(self, level=min(self.level, 3 if self.method is Method.LZ4 else 1))

    def describe(self) -> str:
        """Say what is done, for people."""
        if self.method is Method.STORED:
            return "raw"
        steps = []
        if self.transform.word_bytes:
            steps.append("palette")
        if self.transform.green:
            steps.append("green")
        if self.transform.predictor:
            steps.append(self.transform.predictor.name.lower())
        if self.transform.shuffle:
            steps.append("shuffle")
        name = {Method.LZ4: "lz4" if self.level == 0 else "lz4hc", Method.ZSTD: "zstd"}[self.method]
        steps.append(f"{name}{self.level or ''}")
        together = f", {self.group} together" if self.group > 1 else ""
        return "+".join(steps) + (" with dictionary" if self.dictionary else "") + together


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
    methods = ((Method.LZ4, 0), (Method.LZ4, 5), (Method.ZSTD, 3))
    return [Codec(method, level, form) for form in transforms for method, level in methods]


def _predictions(base: Transform, leaf: Leaf, window: Window) -> list[Transform]:
    """Predict each byte by its neighbour, where slices look like images."""
    shape = list(leaf.shape)
    if window.count > 1:
        shape[window.axis] = window.unit
    while shape and shape[0] == 1:
        shape = shape[1:]
    if shape and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) == 2:
        planes, (rows, columns), interleaved = 1, shape, False
    elif len(shape) == 3 and shape[-1] <= _WIDEST_CHANNELS:
        rows, columns, planes = shape
        interleaved = True
    elif len(shape) == 3:
        planes, rows, columns = shape
        interleaved = False
    else:
        return []
    if rows < _SMALLEST_IMAGE or columns < _SMALLEST_IMAGE:
        return []
    image = replace(
        base,
        planes=planes,
        rows=rows,
        columns=columns,
        interleaved=interleaved,
        green=planes == 3,
    )
    return [replace(image, predictor=which) for which in (Predictor.LEFT, Predictor.UP)]

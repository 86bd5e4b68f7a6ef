"""Codecs: what may be done to the slices of a field so that they take less room; codec_choice.py finds what pays.

In:  a field's dtype and the shape of its slices.  Out: the codecs that are worth measuring.
Invariant: every codec is lossless by construction. A palette holds the very bits of words or pixels that it numbers;
predictors are differences modulo 256; what does not shrink is stored as it is. A choice only moves bytes and time.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Bytes, Leaf

if TYPE_CHECKING:
    from holdall.storage.slices import Window

_WIDEST_CHANNELS = 4
_SMALLEST_IMAGE = 8
_DICTIONARY_UP_TO = 32 * 1024
"""Slices beyond this fill a compressor's window by themselves: a dictionary adds nothing."""

_REPEATED_DIFFERENCES = 6
"""Shorter runs of differences repeat by chance: referring to them takes longer to decode and no less room."""

COLOUR_PALETTE_BYTES = 1024
"""A palette of colours: 256, of four bytes each; those of 0xFFFFFFFF are free."""
NO_COLOUR = 0xFFFFFFFF
MOST_UNIT_COLOURS = 255
"""Colours that a unit may have besides those of its block's palette; the numbers are those of codec.h."""

_PIXELS_OF_PAIRS = 64, 2**16
"""The fewest and the most of a plane whose differences are coded as pairs."""
_MOST_IN_A_UNIT = 64
_MOST_OF_A_KEY = 2**32 - 1


class Method(IntEnum):
    """How bytes are compressed; the numbers are those of codec.h."""

    STORED = 0
    LZ4 = 1
    ZSTD = 2
    PAIRS = 3  # of differences, by tables that were trained: see pairs.py


_METHODS = (Method.LZ4, 0), (Method.LZ4, 7), (Method.ZSTD, 9)
"""Methods and levels: higher ones take hardly less room, and longer to compress than frames take to come."""


class Predictor(IntEnum):
    """What a byte is predicted from; the numbers are those of codec.h."""

    NOTHING = 0
    LEFT = 1
    UP = 2
    PIXELS = 3  # nothing: planes are coded pixel by pixel
    COLOURS = 4  # nothing: a pixel becomes the number of its colour
    COLUMNS = 5  # the same, column by column
    CHANGES = 6  # the slice before it in its unit: of slices together, the first is whole, of others it is what changed


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
    coded_bytes: int = field(init=False, repr=False, compare=False)  # of a slice that reach the compressor
    is_of_colours: bool = field(init=False, repr=False, compare=False)  # whether pixels become numbers of their colours
    is_of_differences: bool = field(init=False, repr=False, compare=False)  # whether neighbours predict each other
    palette_bytes: int = field(init=False, repr=False, compare=False)  # of a block
    # That may stand in front of a unit: how many colours it has of its own, and these.
    head_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_of_colours = self.predictor in {Predictor.COLOURS, Predictor.COLUMNS}
        for name, value in (
            ("coded_bytes", self.slice_bytes // (3 if is_of_colours else max(self.word_bytes, 1))),
            ("is_of_colours", is_of_colours),
            ("is_of_differences", self.predictor in {Predictor.LEFT, Predictor.UP}),
            ("palette_bytes", COLOUR_PALETTE_BYTES if is_of_colours else 256 * self.word_bytes),
            ("head_bytes", 1 + 4 * MOST_UNIT_COLOURS if is_of_colours else 0),
        ):
            object.__setattr__(self, name, value)

    def is_sound(self) -> bool:
        """Whether the numbers agree with each other: they may come from a file. See decode.c."""
        whole = 0 < self.slice_bytes < 2**31 and self.word_bytes in {0, 2, 4, 8} and self.shuffle >= 0
        if not whole or (self.word_bytes and self.slice_bytes % self.word_bytes):
            return False
        if self.predictor in {Predictor.NOTHING, Predictor.CHANGES}:
            return self.shuffle == 0 or self.coded_bytes % self.shuffle == 0
        image = min(self.planes, self.rows, self.columns) >= 1 and (self.planes >= 3 or not self.green)
        image = image and not (self.predictor == Predictor.PIXELS and (self.interleaved or self.green))
        if self.is_of_colours:
            whole = not self.green and self.planes == 3 and self.word_bytes == 0 == self.shuffle
            return image and whole and 3 * self.rows * self.columns == self.slice_bytes
        return image and self.shuffle == 0 and self.planes * self.rows * self.columns == self.coded_bytes


TRANSFORM_FIELDS = tuple(each.name for each in fields(Transform) if each.init)
"""What says all about a transform, in the order in which the compiled loops expect it."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Bytes that slices of one field have in common; compared by identity.

    Where slices are numbers of colours, it begins with the palette that these are of. For pairs it is their tables.
    """

    content: bytes

    @functools.cached_property
    def name(self) -> str:
        """Name it by its content."""
        return hashlib.sha256(self.content).hexdigest()

    @functools.cached_property
    def behind_palette(self) -> bytes:
        """What follows on a palette; once for all codecs of a field, each block of which may have its own."""
        return self.content[COLOUR_PALETTE_BYTES:]


@dataclass(frozen=True, slots=True)
class Codec:
    """One way of coding slices."""

    method: Method
    level: int
    transform: Transform
    dictionary: Dictionary | None = None
    group: int = 1  # neighbours that are compressed together: a unit
    key: int = 0  # units of which the first is the key that the others are compressed against; 0: there are none
    raw_keys: bool = False  # whether keys stay as they are, so that they need no decoding
    reason: str = field(default="", repr=False, compare=False)  # why it was chosen, for people
    is_sound: bool = field(init=False, repr=False, compare=False)  # it may come from a file
    # How many bytes must repeat for Zstandard to refer to them; 0: as many as it says itself.
    shortest_match: int = field(init=False, repr=False, compare=False)
    is_of_colours: bool = field(init=False, repr=False, compare=False)
    known_palette: bytes = field(
        init=False, repr=False, compare=False
    )  # the colours that its dictionary numbers, if any
    common: bytes = field(init=False, repr=False, compare=False)  # what the compressor is given beforehand
    unit_bytes: int = field(init=False, repr=False, compare=False)  # of memory that reading a unit takes

    def __post_init__(self) -> None:
        palette = common = b""
        if self.dictionary is not None:
            common = self.dictionary.content
            if self.transform.is_of_colours:
                palette, common = common[:COLOUR_PALETTE_BYTES], self.dictionary.behind_palette
        object.__setattr__(self, "is_of_colours", self.transform.is_of_colours)
        object.__setattr__(self, "known_palette", palette)
        object.__setattr__(self, "common", common)
        # Units are of a size that readers make room for, see codec.h.
        fits = 1 <= self.group <= _MOST_IN_A_UNIT and self.group * self.transform.coded_bytes < 2**31
        fits = fits and 0 <= self.key <= _MOST_OF_A_KEY and not (self.key and self.dictionary)
        fits = fits and not (self.key and self.is_of_changes)
        if self.is_of_colours:
            fits = (
                fits and not self.key and (self.dictionary is None or len(self.known_palette) == COLOUR_PALETTE_BYTES)
            )
        form, unit_bytes = self.transform, self.group * self.transform.coded_bytes + self.transform.head_bytes
        if self.method is Method.PAIRS:
            fewest, most = _PIXELS_OF_PAIRS
            fits = fits and form.is_of_differences and fewest <= form.rows * form.columns <= most
            fits = fits and self.group == 1 and not self.key and self.dictionary is not None
            unit_bytes = 6 * form.coded_bytes + 1024  # see pairs.c
        object.__setattr__(self, "is_sound", fits and form.is_sound())
        object.__setattr__(self, "shortest_match", _REPEATED_DIFFERENCES if form.is_of_differences else 0)
        object.__setattr__(self, "unit_bytes", unit_bytes)

    @property
    def wants_dictionary(self) -> bool:
        """Whether a dictionary could help."""
        transform = self.transform
        # It is trained on slices as they are, as pixels, or with changes of others.
        in_pixels = transform.predictor in {Predictor.PIXELS, Predictor.CHANGES} or transform.is_of_colours
        plain = transform == Transform(transform.slice_bytes) or in_pixels
        plain = plain and not transform.word_bytes
        alone = self.method is not Method.STORED and self.level > 0 and self.group == 1 and not self.key
        return alone and plain and transform.slice_bytes <= _DICTIONARY_UP_TO

    @property
    def is_of_changes(self) -> bool:
        """Whether slices together are coded as changes of each other."""
        return self.transform.predictor is Predictor.CHANGES

    @property
    def wants_differences(self) -> bool:
        """Whether a dictionary of differences could help: LZ4 has no other way to know what slices begin with."""
        form = self.transform
        is_image = form.is_of_differences and not form.word_bytes and not self.dictionary
        return is_image and self.method is Method.LZ4 and self.level > 0 and form.slice_bytes <= _DICTIONARY_UP_TO

    def grouped(self, group: int, key: int = 0, *, raw_keys: bool = False) -> Codec:
        """Return the same code for units of so many slices, behind keys if so."""
        return replace(self, group=group, key=key, raw_keys=raw_keys)

    def hurried(self) -> Codec:
        """Return the same code at the compressor's fastest useful level, for when time is short."""
        if self.method is Method.PAIRS:
            return replace(self, method=Method.ZSTD, level=1, dictionary=None)
        return replace(self, level=min(self.level, 0 if self.method is Method.LZ4 else 1))

    def without_palette(self) -> Codec:
        """Return a code for slices that a palette does not hold."""
        form = Transform(self.transform.slice_bytes)
        if self.is_of_colours and not self.transform.interleaved:
            form = replace(self.transform, predictor=Predictor.PIXELS)
        return replace(self, transform=form, dictionary=None)

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
        names = {Method.LZ4: "lz4" if self.level == 0 else "lz4hc", Method.ZSTD: "zstd", Method.PAIRS: "pairs"}
        steps.append(f"{names[self.method]}{self.level or ''}")
        beside = " with dictionary" if self.dictionary and self.method is not Method.PAIRS else ""
        if self.key:
            beside = f" behind a {'raw ' if self.raw_keys else ''}key of {self.key * self.group}"
        return "+".join(steps) + beside + (f", {self.group} together" if self.group > 1 else "")


@functools.cache
def stored(slice_bytes: int) -> Codec:
    """Return the codec of slices that stay as they are."""
    return Codec(Method.STORED, 0, Transform(slice_bytes))


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


# ---------------------------------------------------------------- lanes side by side

Order = NDArray[np.uint32]
MOST_LANES = 256
_IN_HALF_BYTES = 16
_RUNS = 256, 512
"""Slices from one count to the next, of up to 16 lanes and of more; as in decode.c."""


@dataclass(frozen=True, slots=True, eq=False)
class SlicePlaces:
    """Where the slices of a block stand in its units: lane after lane, those of a lane in the order of their numbers.

    Whatever the lanes are, every slice has a place of its own. To find it, C counts the slices of its lane in a run.
    """

    lanes: Bytes  # that brought each slice; two in a byte where there are no more than 16
    firsts: NDArray[np.uint16] | NDArray[np.uint32]  # (runs, lanes): where the first slice of a lane in a run stands

    @classmethod
    def of(cls, order: Order) -> SlicePlaces | None:
        """Find lanes in an order, which says what slice stands in every place; None: they stand by their numbers."""
        if np.array_equal(order, np.arange(len(order))):
            return None
        if not np.array_equal(np.sort(order), np.arange(len(order))):
            raise DamageError("two slices stand in one place, or one in none; nothing of their block is used")
        passed = np.cumsum(order[1:] < order[:-1])
        if passed[-1] >= MOST_LANES:
            raise DamageError(f"slices stand in {passed[-1] + 1} lanes, and {MOST_LANES} are the most; report this")
        lanes = np.zeros(len(order), np.uint8)
        lanes[order[1:]] = passed
        return cls.counted(lanes)

    @classmethod
    def counted(cls, lanes: Bytes) -> SlicePlaces:
        """Count the slices of each lane."""
        count, most = len(lanes), int(lanes.max(initial=0)) + 1
        in_halves, dtype = most <= _IN_HALF_BYTES, "u2" if count <= 1 << 16 else "u4"
        run = _RUNS[not in_halves]
        runs = -(-count // run)
        within = np.bincount(np.arange(count) // run * most + lanes, minlength=runs * most).reshape(runs, most)
        total = within.sum(axis=0)
        firsts = (total.cumsum() - total + within.cumsum(axis=0) - within).astype(dtype)
        even = np.append(lanes, np.zeros(count % 2, np.uint8))
        halves: Bytes = even[::2] | even[1::2] << np.uint8(4)
        return cls(halves if in_halves else lanes, firsts)

    @classmethod
    def stored(cls, lanes: Bytes, count: int) -> SlicePlaces:
        """Count lanes as they were stored; a DamageError if they are those of another number of slices."""
        if len(lanes) == -(-count // 2):
            lanes = _apart(lanes)[:count]
        if len(lanes) != count:
            raise DamageError(f"{len(lanes)} lanes are said to have brought {count} slices; nothing of them is used")
        return cls.counted(lanes)

    def are_of(self, count: int) -> bool:
        """Whether they can be the places of so many slices."""
        in_halves = self.firsts.shape[1] <= _IN_HALF_BYTES
        runs = -(-count // _RUNS[not in_halves])
        return len(self.lanes) == (-(-count // 2) if in_halves else count) and len(self.firsts) == runs

    def find(self, numbers: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the places of some of `count` slices."""
        lanes = _apart(self.lanes)[:count] if self.firsts.shape[1] <= _IN_HALF_BYTES else self.lanes
        places = np.empty(count, np.int64)
        places[lanes.argsort(kind="stable")] = np.arange(count)
        return places[numbers]


def order_by_lanes(log: NDArray[Any], count: int) -> Order | None:
    """Order slices as lane after lane brought them, by the rows of their numbers; None if these name others."""
    lanes = log.shape[1]
    seen, first = np.unique(log, return_index=True)
    if seen.size and seen[-1] >= count:
        return None
    brought = np.full(count, MOST_LANES)  # what nothing names comes last
    brought[seen] = first % lanes * (MOST_LANES - 1) // max(lanes, MOST_LANES - 1)
    return brought.argsort(kind="stable").astype(np.uint32)


def _apart(halves: Bytes) -> Bytes:
    return np.column_stack([halves & 15, halves >> 4]).reshape(-1)

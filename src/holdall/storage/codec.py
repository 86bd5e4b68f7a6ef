"""Codecs: what may be done to the slices of a field so that they take less room, and which of it pays.

In:  a field's dtype, its slices, and how much slower sampling may get.  Out: the codec that shrinks them most.
Invariant: every codec is lossless by construction. A palette holds the very bits of the words it numbers; predictors
are differences modulo 256; what does not shrink is stored as it is. A choice only moves bytes and time.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.schema import Bytes, Leaf
from holdall.storage.layout import Window

if TYPE_CHECKING:
    from holdall.storage.blocks import Coder, SealedSlices


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
    """What a byte is predicted from; the numbers are those of codec.h."""

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
    coded_bytes: int = field(init=False, repr=False, compare=False)  # of a slice that reach the compressor

    def __post_init__(self) -> None:
        object.__setattr__(self, "coded_bytes", self.slice_bytes // max(self.word_bytes, 1))

    def is_sound(self) -> bool:
        """Whether the numbers agree with each other: they may come from a file. See decode.c."""
        whole = 0 < self.slice_bytes < 2**31 and self.word_bytes in {0, 2, 4, 8} and self.shuffle >= 0
        if not whole or (self.word_bytes and self.slice_bytes % self.word_bytes):
            return False
        if self.predictor == Predictor.NOTHING:
            return self.shuffle == 0 or self.coded_bytes % self.shuffle == 0
        image = min(self.planes, self.rows, self.columns) >= 1 and (self.planes >= 3 or not self.green)
        return image and self.shuffle == 0 and self.planes * self.rows * self.columns == self.coded_bytes


TRANSFORM_FIELDS = tuple(each.name for each in fields(Transform) if each.init)
"""What says all about a transform, in the order in which the compiled loops expect it."""


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
    reason: str = field(default="", repr=False, compare=False)  # why it was chosen, for people
    is_sound: bool = field(init=False, repr=False, compare=False)  # it may come from a file

    def __post_init__(self) -> None:
        # Units are of a size that readers make room for, see codec.h.
        fits = 1 <= self.group <= _MOST_IN_A_UNIT and self.group * self.transform.coded_bytes < 2**31
        object.__setattr__(self, "is_sound", fits and self.transform.is_sound())

    @property
    def wants_dictionary(self) -> bool:
        """Whether a dictionary could help."""
        transform = self.transform
        plain = transform == Transform(transform.slice_bytes)  # it is trained on slices as they are
        alone = self.method is Method.ZSTD and self.group == 1
        return alone and plain and transform.slice_bytes <= _DICTIONARY_UP_TO

    def hurried(self) -> Codec:
        """Return the same code at the compressor's fastest useful level, for when time is short."""
        return replace(self, level=min(self.level, 0 if self.method is Method.LZ4 else 1))

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
    if len(shape) not in {2, 3}:
        return []
    interleaved = len(shape) == 3 and shape[-1] <= _WIDEST_CHANNELS
    planes, rows, columns = (shape[2], *shape[:2]) if interleaved else [1, *shape][-3:]
    if rows < _SMALLEST_IMAGE or columns < _SMALLEST_IMAGE:
        return []
    image = replace(base, planes=planes, rows=rows, columns=columns, interleaved=interleaved, green=planes == 3)
    return [replace(image, predictor=which) for which in (Predictor.LEFT, Predictor.UP)]


COST_CAPS = {"speed": 1.2, "balanced": 2.0, "memory": 4.0}
"""How many times as long as a raw gather sampling compressed slices may take, by preference."""

_SAMPLED_SLICES = 256
"""Slices that are measured: they chose right in 27 of 29 recorded environments."""
_SAMPLED_BYTES = 4 * 2**20
_FEWEST_SAMPLES = 8
"""Of large slices no more are sampled than take _SAMPLED_BYTES, but at least so many."""
_TRAININGS: tuple[tuple[int, dict[str, int]], ...] = (
    (4 * 1024, {}),
    (32 * 1024, {}),
    (32 * 1024, {"k": 1024, "d": 8}),
    (64 * 1024, {"k": 2048, "d": 8}),
)
"""Sizes of dictionaries, and how the trainer cuts its samples."""
_GROUPS = (4, 8, 16)
"""How many neighbours are tried together: a transition of a stack of 4 needs 5 of them."""
_TOGETHER_PAYS = 1.25
"""Neighbours together must shrink this much more than the best codec for one: each is decoded with the others. And they
must keep the cap on one core: right after a trainer's own step its idle threads still spin on the others."""
_LEADING = 3
"""Codecs for single slices that are also tried on groups; and the best by LZ4, whose groups are quicker to decode."""
_MOST_UNIT_BYTES = 4 * 2**20
_WORTHWHILE = 1.3
"""Less than this ratio is not worth coding and decoding: floats of a sensor or a market come to 1.0 to 1.3."""
_WORTHWHILE_FOR_MEMORY = 1.1
"""The same for those who prefer memory to time."""
_LARGE_MEMORY = 1.9
"""A gather from a large memory also misses the address caches: measured on Atari and camera
memories of 0.4 GB, against cold copies of single slices."""
_RAW_SPEED_UP = 1.3
"""What a second core adds to a raw gather, which waits for memory; decoding scales with cores."""


@dataclass(frozen=True, slots=True)
class MeasuredCodec:
    """A codec, how much it shrank the samples, and how long it takes to decode one."""

    codec: Codec
    ratio: float
    decode_us: float  # as `_counted_us` says; by the clock for the NumPy twins


def choose(coder: Coder, leaf: Leaf, window: Window, slices: Bytes, cap: float, threads: int, lanes: int = 1) -> Codec:
    """Measure every candidate on samples of `slices` and return the best one within the cap.

    Args:
        slices: A block, in the order in which lanes that advance together brought it.
    """
    most = max(_FEWEST_SAMPLES, min(_SAMPLED_SLICES, _SAMPLED_BYTES // window.slice_bytes))
    picked = np.linspace(0, len(slices) - 1, min(most, len(slices))).astype(np.int64)
    samples = np.ascontiguousarray(slices[picked])
    raw_us = _raw_us(coder, samples)
    allowed_us = cap * raw_us * (threads if threads == 1 else threads / _RAW_SPEED_UP)
    measured = [m for m in measure(coder, leaf, window, samples) if m.decode_us <= allowed_us]
    leading = sorted(measured, key=lambda m: m.ratio)[-_LEADING:]
    quick = [m for m in measured if m.codec.method is Method.LZ4 and m not in leading]
    grouped = [*leading, *sorted(quick, key=lambda m: m.ratio)[-1:]]
    together = [
        m
        for m in measure_together(coder, grouped, window, slices, lanes)
        if m.decode_us <= cap * raw_us and m.ratio >= _TOGETHER_PAYS * leading[-1].ratio
    ]
    best = max(leading[-1:] + together, key=lambda m: m.ratio, default=None)
    worthwhile = _WORTHWHILE_FOR_MEMORY if cap >= COST_CAPS["memory"] else _WORTHWHILE
    if best is None or best.ratio < worthwhile:
        why = f"raw, since nothing decoded in {allowed_us / raw_us:.1f} raw copies makes it {worthwhile} times smaller"
        return Codec(Method.STORED, 0, Transform(window.slice_bytes), reason=why)
    allowed = cap if best.codec.group > 1 else allowed_us / raw_us
    why = f"{best.ratio:.1f} times smaller, decoded in {best.decode_us / raw_us:.1f} of {allowed:.1f} raw copies"
    trained = best.codec.dictionary and train(coder, replace(best.codec, group=1), slices)
    return replace(best.codec, dictionary=trained, reason=why)


def measure_together(
    coder: Coder, leading: list[MeasuredCodec], window: Window, slices: Bytes, lanes: int
) -> list[MeasuredCodec]:
    """Seal neighbours together, and decode them as a batch does: the slices of one transition at a time."""
    reach = (window.count + window.shift - 1) * lanes + 1  # of a transition, in the block
    length = max(reach, 2 * max(_GROUPS))
    most = min(_SAMPLED_SLICES, _SAMPLED_BYTES // window.slice_bytes)
    stretches = max(1, min(most // length, len(slices) // length))
    if len(slices) < length:
        return []
    first = np.linspace(0, len(slices) - length, stretches).astype(np.int64)
    samples = np.concatenate([slices[start : start + length] for start in first]) if stretches > 1 else slices[:length]
    draws = max(1, min(8, most // (stretches * (window.count + window.shift))))
    starts = np.random.default_rng(0).integers(0, length - reach + 1, (draws, stretches)) + length * np.arange(
        stretches
    )
    order = (starts.reshape(-1, 1) + lanes * np.arange(window.count + window.shift)).reshape(-1).astype(np.int64)
    groups = [group for group in _GROUPS if group * window.slice_bytes <= _MOST_UNIT_BYTES]
    together = [replace(one.codec, group=group) for one in leading for group in groups]
    results = [_measure_one(coder, codec, samples, order) for codec in together]
    return [result for result in results if result is not None]


def measure(coder: Coder, leaf: Leaf, window: Window, samples: Bytes) -> list[MeasuredCodec]:
    """Seal and decode the samples with every candidate."""
    results = []
    odd = np.ascontiguousarray(samples[1::2]) if len(samples) > 1 else samples
    dictionary = None
    for codec in candidates(leaf, window):
        results.append(_measure_one(coder, codec, odd))
        if codec.wants_dictionary and len(samples) >= 32:
            # Trained on the even samples and measured on the odd: a dictionary must not know them.
            dictionary = dictionary or train(coder, codec, samples[::2])
            if dictionary is not None:
                results.append(_measure_one(coder, replace(codec, dictionary=dictionary), odd))
    return [result for result in results if result is not None]


def train(coder: Coder, codec: Codec, slices: Bytes) -> Dictionary | None:
    """Train dictionaries in several ways and return the best; None if there is nothing in common.

    Which segment length suits a game is not to be known beforehand: measured on Atari frames,
    the trainer's own choice ranges from a ratio of 23 to 40 with the dictionary's size.
    """
    picked = np.linspace(0, len(slices) - 1, min(2 * _SAMPLED_SLICES, len(slices))).astype(np.int64)
    learnt = [slices[i].tobytes() for i in picked[::2]]
    unseen = np.ascontiguousarray(slices[picked[1::2]])
    best, best_bytes = None, unseen.nbytes
    for size, arguments in _TRAININGS:
        if size * 4 > sum(map(len, learnt)):
            continue
        try:
            content = zstandard.train_dictionary(size, learnt, level=codec.level, **arguments)
        except zstandard.ZstdError:
            continue
        dictionary = Dictionary(content.as_bytes())
        sealed = coder.seal(unseen, replace(codec, dictionary=dictionary))
        if sealed is not None and sealed.nbytes < best_bytes:
            best, best_bytes = dictionary, sealed.nbytes
    return best


def _measure_one(
    coder: Coder, codec: Codec, samples: Bytes, order: NDArray[np.int64] | None = None
) -> MeasuredCodec | None:
    sealed = coder.seal(samples, codec)
    if sealed is None:
        return None
    if order is None:
        order = np.random.default_rng(0).permutation(len(samples)).astype(np.int64)
    wanted = order
    out = np.empty((len(wanted), samples.shape[1]), np.uint8)
    if coder.is_compiled:
        decode_us = _counted_us(sealed, wanted)
    else:
        decode_us = min(_timed_us(lambda: coder.decode(sealed, wanted, out)) for _ in range(3)) / len(wanted)
    return MeasuredCodec(codec, samples.nbytes / max(sealed.nbytes, 1), decode_us)


def _raw_us(coder: Coder, samples: Bytes) -> float:
    """Return what it takes to copy a slice that no cache holds, as those of a large memory are."""
    if coder.is_compiled:
        return float(_LARGE_MEMORY * (_COPY_US[0] + _COPY_US[1] * samples.shape[1] / 1000))
    out = np.empty_like(samples)
    order = np.random.default_rng(0).permutation(len(samples))
    copied_us = min(_timed_us(lambda: samples.take(order, axis=0, out=out, mode="clip")) for _ in range(3))
    return _LARGE_MEMORY * copied_us / len(samples)


# ---------------------------------------------------------------- what decoding takes, without a clock

_UNIT_US = {
    # Of a unit, a kilobyte that comes of it, a sequence, a literal of Huffman's code, a table of that code.
    Method.STORED: (0.0, 0.02, 0.0, 0.0, 0.0),
    Method.LZ4: (0.05, 0.030, 0.0038, 0.0, 0.0),
    Method.ZSTD: (0.17, 0.023, 0.0121, 0.0007, 1.13),
}
"""Microseconds on two busy cores of an AMD EPYC, fitted to 652 codecs of 18 recorded fields: 8 in 10 of them took from
0.9 to 1.4 times as long as this says, and the worst 2.9 times."""
_TRANSFORM_US = {"copy": 0.02, "left": 0.16, "up": 0.06, "green": 0.06, "shuffle": 0.26, "words": 0.21}
"""The same for a kilobyte of a slice: to copy it out of its group, and to undo each transform."""
_COPY_US = (0.03, 0.088)
"""The same for a slice that is copied, and a kilobyte of it."""
_COUNTED_BYTES = 2**16
"""Compressed bytes that are counted, at least one unit."""


def _counted_us(sealed: SealedSlices, order: NDArray[np.int64]) -> float:
    """Say how long decoding takes by what has to be done: the same data gives the same answer, whatever else runs."""
    codec, form = sealed.codec, sealed.codec.transform
    units = order // codec.group
    counted, counted_bytes, total_us = 0, 0, 0.0
    for number in units[np.sort(np.unique(units, return_index=True)[1])].tolist():
        packed = sealed.coded.unit(number)
        slices = min(codec.group, sealed.coded.count - number * codec.group)
        work = _work_in(packed, codec.method, slices * form.coded_bytes)
        method = codec.method if len(packed) < slices * form.coded_bytes else Method.STORED
        total_us += sum(us * amount for us, amount in zip(_UNIT_US[method], work, strict=True))
        counted, counted_bytes = counted + 1, counted_bytes + len(packed)
        if counted_bytes > _COUNTED_BYTES:
            break
    decoded = 1 + np.count_nonzero(np.diff(units))  # neighbours in one unit are decoded once
    undone = {
        "copy": codec.group > 1, "left": form.predictor is Predictor.LEFT, "up": form.predictor is Predictor.UP,
        "green": form.green, "shuffle": form.shuffle > 0, "words": form.word_bytes > 0,
    }  # fmt: skip
    per_slice = sum(_TRANSFORM_US[name] for name, is_done in undone.items() if is_done) * form.coded_bytes / 1000
    return float(total_us / max(counted, 1) * decoded / len(order) + per_slice)


def _work_in(packed: bytes, method: Method, unpacked: int) -> tuple[float, ...]:
    """Count what `_UNIT_US` names in one unit."""
    sequences, literals, tables = 0, 0, 0
    if len(packed) < unpacked and method is Method.LZ4:
        sequences = _lz4_sequences(packed)
    elif len(packed) < unpacked and method is Method.ZSTD:
        sequences, literals, tables = _zstd_work(packed)
    return 1, unpacked / 1000, sequences, literals, tables


def _lz4_sequences(packed: bytes) -> int:
    """Count the sequences of an LZ4 block: a token, literals, and a match each."""
    place, found = 0, 0
    while place < len(packed):
        token, place, found = packed[place], place + 1, found + 1
        literals = token >> 4
        if literals == 15:
            more = _long_length(packed, place)
            literals, place = literals + more, place + more // 255 + 1
        place += literals + 2
        if token & 15 == 15:
            place += _long_length(packed, place) // 255 + 1
    return found


def _long_length(packed: bytes, place: int) -> int:
    """Read the rest of a length: bytes of 255, and a last one below."""
    last = place
    while last < len(packed) and packed[last] == 255:
        last += 1
    return 255 * (last - place) + (packed[last] if last < len(packed) else 0)


def _zstd_work(packed: bytes) -> tuple[int, int, int]:
    """Count the sequences, literals of Huffman's code and its tables in a frame, by the headers of its blocks."""
    head = packed[4]
    is_single = head >> 5 & 1
    place = 5 + (1 - is_single) + (0, 1, 2, 4)[head & 3] + (is_single, 2, 4, 8)[head >> 6]
    sequences, literals, tables, is_last = 0, 0, 0, False
    while not is_last and place + 3 <= len(packed):
        block = int.from_bytes(packed[place : place + 3], "little")
        is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        place += 3
        if kind == 2:
            counted = _zstd_block(packed, place)
            sequences, literals, tables = sequences + counted[0], literals + counted[1], tables + counted[2]
        place += 1 if kind == 1 else size
    return sequences, literals, tables


def _zstd_block(packed: bytes, place: int) -> tuple[int, int, int]:
    kind, form = packed[place] & 3, packed[place] >> 2 & 3
    literals = 0
    if kind < 2:  # literals as they are, or one of them repeated
        head, shift = ((1, 3), (2, 4), (1, 3), (3, 4))[form]
        count = int.from_bytes(packed[place : place + head], "little") >> shift
        place += head + (count if kind == 0 else 1)
    else:
        head, bits = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
        sizes = int.from_bytes(packed[place : place + head], "little") >> 4
        literals = sizes & ((1 << bits) - 1)
        place += head + (sizes >> bits)
    first, second, third = (*packed[place : place + 3], 0, 0, 0)[:3]
    sequences = first if first < 128 else (first - 128 << 8) + second if first < 255 else second + (third << 8) + 0x7F00
    return sequences, literals, int(kind == 2)


_CLOCK = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter
"""CPU time, which does not count the time of others; Windows reads it too coarsely."""


def _timed_us(act: Callable[[], object]) -> float:
    start = _CLOCK()
    act()
    return (_CLOCK() - start) * 1e6

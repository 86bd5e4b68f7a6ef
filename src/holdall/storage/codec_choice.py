"""Which codec pays: candidates are measured on a field's own slices.

In:  a block of slices, and how much slower sampling may get.  Out: the codec that is worth most, and why.
Invariant: with the compiled loops no clock decides, so that the same slices get the same codec on a busy machine, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.schema import Bytes, Leaf
from holdall.storage.codec import Codec, Dictionary, Method, Predictor, Transform, candidates
from holdall.storage.layout import Window

if TYPE_CHECKING:
    from holdall.storage.blocks import Coder, SealedSlices

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
"""How many neighbours are tried together: a transition of a stack of 4 needs 5 of them. They must keep the cap on one
core: right after a trainer's own step its idle threads still spin on the others."""
_LEADING = 3
"""Codecs for single slices that are also tried on groups; and the best by LZ4, whose groups are quicker to decode."""
_KEY_SLICES, _RAW_KEY_SLICES = 64, 256
"""Slices that share a key; more if it stays raw, since it costs a whole slice then."""
_KEY_GROUPS = (1, 4)
_QUICK_ENOUGH = 1.0
"""Raw copies; nobody notices whether decoding takes less."""
_TIME_MATTERS = 0.8
"""A codec is worth its ratio over its time to the power of this over the cap: with `balanced`, one that takes twice as
long must shrink slices 1.3 times as much, with `memory` 1.15 times."""
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


def choose(
    coder: Coder, leaf: Leaf, window: Window, slices: Bytes, cap: float, threads: int, lanes: int = 1,
    order: NDArray[np.uint32] | None = None, *, has_dictionary: bool = True,
) -> Codec:  # fmt: skip
    """Measure every candidate on samples of `slices` and return the best one within the cap.

    Args:
        slices: A block, in the order in which lanes that advance together brought it.
        order: The order in which it will be sealed; None: as it is.
        has_dictionary: Whether slices may depend on bytes outside of their block.
    """
    most = max(_FEWEST_SAMPLES, min(_SAMPLED_SLICES, _SAMPLED_BYTES // window.slice_bytes))
    picked = np.linspace(0, len(slices) - 1, min(most, len(slices))).astype(np.int64)
    samples = np.ascontiguousarray(slices[picked])
    raw_us = _raw_us(coder, samples)
    allowed_us = cap * raw_us * (threads if threads == 1 else threads / _RAW_SPEED_UP)
    measured = measure(coder, leaf, window, samples, has_dictionary=has_dictionary)
    affordable = [m for m in measured if m.decode_us <= allowed_us]
    neighbours = measure_together(coder, _leading(affordable), window, slices, lanes, order)
    neighbours += measure_behind_keys(coder, _without_dictionary(measured), window, slices, lanes, order)
    together = [m for m in neighbours if m.decode_us <= (cap * raw_us if m.codec.group > 1 else allowed_us)]
    weight = _TIME_MATTERS / cap
    best = max(
        affordable + together,
        key=lambda m: m.ratio / max(m.decode_us / raw_us, _QUICK_ENOUGH) ** weight,
        default=None,
    )
    worthwhile = _WORTHWHILE_FOR_MEMORY if cap >= COST_CAPS["memory"] else _WORTHWHILE
    if best is None or best.ratio < worthwhile:
        why = f"raw, since nothing decoded in {allowed_us / raw_us:.1f} raw copies makes it {worthwhile} times smaller"
        return Codec(Method.STORED, 0, Transform(window.slice_bytes), reason=why)
    allowed = cap if best.codec.group > 1 else allowed_us / raw_us
    why = f"{best.ratio:.1f} times smaller, decoded in {best.decode_us / raw_us:.1f} of {allowed:.1f} raw copies"
    trained = best.codec.dictionary and train(coder, replace(best.codec, group=1), slices)
    return replace(best.codec, dictionary=trained, reason=why)


def _leading(measured: list[MeasuredCodec]) -> list[MeasuredCodec]:
    leading = sorted(measured, key=lambda m: m.ratio)[-_LEADING:]
    quick = [m for m in measured if m.codec.method is Method.LZ4 and m not in leading]
    return [*leading, *sorted(quick, key=lambda m: m.ratio)[-1:]]


def _without_dictionary(measured: list[MeasuredCodec]) -> list[MeasuredCodec]:
    """Return the best codec of each method that is worth trying behind a key."""
    plain = [m for m in measured if m.codec.dictionary is None and m.codec.level > 0]
    best = {m.codec.method: m for m in sorted(plain, key=lambda m: m.ratio)}
    return list(best.values())


def measure_together(
    coder: Coder, leading: list[MeasuredCodec], window: Window, slices: Bytes, lanes: int,
    order: NDArray[np.uint32] | None = None,
) -> list[MeasuredCodec]:  # fmt: skip
    """Seal neighbours together, and decode them as a batch does: the slices of one transition at a time."""
    groups = [group for group in _GROUPS if group * window.slice_bytes <= _MOST_UNIT_BYTES]
    together = [one.codec.grouped(group) for one in leading for group in groups]
    return _measure_neighbours(coder, together, window, slices, lanes, order, 2 * max(_GROUPS))


def measure_behind_keys(
    coder: Coder, bases: list[MeasuredCodec], window: Window, slices: Bytes, lanes: int,
    order: NDArray[np.uint32] | None = None,
) -> list[MeasuredCodec]:  # fmt: skip
    """Seal slices against keys, and decode them as a batch does."""
    length = min(_KEY_SLICES, max(_FEWEST_SAMPLES, _SAMPLED_BYTES // window.slice_bytes))
    results: list[MeasuredCodec] = []
    for in_all, groups in ((_KEY_SLICES, _KEY_GROUPS), (_RAW_KEY_SLICES, (1,))):
        if len(slices) < in_all:
            continue
        is_raw = in_all == _RAW_KEY_SLICES
        fitting = [group for group in groups if group * window.slice_bytes <= _MOST_UNIT_BYTES and length >= 2 * group]
        keyed = [one.codec.grouped(g, length // g, raw_keys=is_raw) for one in bases for g in fitting]
        # Of many slices that share a key some are measured, as far from it as the others are.
        step = in_all // length if is_raw else 1
        for found in _measure_neighbours(coder, keyed, window, slices, lanes, order, length, step):
            ratio, group = found.ratio, found.codec.group
            if is_raw:
                beyond_key = max(1 / ratio - 1 / length, 0) * length / (length - 1)
                ratio = 1 / (beyond_key * (1 - 1 / in_all) + 1 / in_all)
            results.append(MeasuredCodec(replace(found.codec, key=in_all // group), ratio, found.decode_us))
    return results


def _measure_neighbours(
    coder: Coder, codecs: list[Codec], window: Window, slices: Bytes, lanes: int, order: NDArray[np.uint32] | None,
    length: int, step: int = 1,
) -> list[MeasuredCodec]:  # fmt: skip
    """Measure codecs on stretches of `length` slices, neighbours or every so many, read as those of transitions."""
    lanes = 1 if order is not None else lanes
    reach = (window.count + window.shift - 1) * lanes + 1  # of a transition, in the block
    length = max(reach, length)
    most = min(_SAMPLED_SLICES, _SAMPLED_BYTES // window.slice_bytes)
    stretches = max(1, min(most // length, len(slices) // (length * step)))
    if len(slices) < length * step or not codecs:
        return []
    first = np.linspace(0, len(slices) - length * step, stretches).astype(np.int64)
    picked = (first[:, None] + step * np.arange(length)).reshape(-1)
    samples = np.ascontiguousarray(slices[picked if order is None else order[picked]])
    draws = max(1, min(8, most // (stretches * (window.count + window.shift))))
    starts = np.random.default_rng(0).integers(0, length - reach + 1, (draws, stretches))
    starts = (starts + length * np.arange(stretches)).reshape(-1, 1)
    wanted = (starts + lanes * np.arange(window.count + window.shift)).reshape(-1).astype(np.int64)
    results = [_measure_one(coder, codec, samples, wanted) for codec in codecs]
    return [result for result in results if result is not None]


def measure(
    coder: Coder, leaf: Leaf, window: Window, samples: Bytes, *, has_dictionary: bool = True
) -> list[MeasuredCodec]:
    """Seal and decode the samples with every candidate."""
    results = []
    odd = np.ascontiguousarray(samples[1::2]) if len(samples) > 1 else samples
    trained: dict[Transform, Dictionary | None] = {}
    for codec in candidates(leaf, window):
        results.append(_measure_one(coder, codec, odd))
        if has_dictionary and codec.wants_dictionary and len(samples) >= 32:
            # Trained on the even samples and measured on the odd: a dictionary must not know them.
            if codec.transform not in trained:
                by_zstd = replace(codec, method=Method.ZSTD, level=3)
                trained[codec.transform] = train(coder, by_zstd, samples[::2])
            dictionary = trained[codec.transform]
            if dictionary is not None:
                results.append(_measure_one(coder, replace(codec, dictionary=dictionary), odd))
    return [result for result in results if result is not None]


def train(coder: Coder, codec: Codec, slices: Bytes) -> Dictionary | None:
    """Train dictionaries in several ways and return the best; None if there is nothing in common.

    Which segment length suits a game is not to be known beforehand: measured on Atari frames,
    the trainer's own choice ranges from a ratio of 23 to 40 with the dictionary's size.
    """
    picked = np.linspace(0, len(slices) - 1, min(2 * _SAMPLED_SLICES, len(slices))).astype(np.int64)
    known = coder.seal(np.ascontiguousarray(slices[picked[::2]]), replace(codec, method=Method.STORED, dictionary=None))
    learnt: list[Any] = [] if known is None else [known.coded.unit(number) for number in range(known.count)]
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
    if coder.is_compiled:
        decode_us = _counted_us(sealed, order)
    else:
        wanted, out = order, np.empty((len(order), samples.shape[1]), np.uint8)
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
_BEHIND_KEY_US = {Method.STORED: 0.0, Method.LZ4: 0.05, Method.ZSTD: 0.3}
"""The same for a unit that is decompressed against a key."""
_FAR_SEQUENCE_US = 0.0048
"""The same for a sequence of LZ4's, on top, where it may point into a key or a dictionary."""
_NEAR_BYTES, _FAR_US = 2**17, 0.03
"""The same for a kilobyte, on top, of units that fill the caches with their keys."""
_TRANSFORM_US = {"copy": 0.02, "left": 0.12, "up": 0.06, "green": 0.06, "pixels": 0.05,
                 "shuffle": 0.26, "words": 0.21}  # fmt: skip
"""The same for a kilobyte of a slice: to copy it out of its group, and to undo each transform."""
_COPY_US = (0.03, 0.088)
"""The same for a slice that is copied, and a kilobyte of it."""
_COUNTED_BYTES = 2**16
"""Compressed bytes that are counted, at least one unit."""


def _counted_us(sealed: SealedSlices, order: NDArray[np.int64]) -> float:
    """Say how long decoding takes by what has to be done: the same data gives the same answer, whatever else runs."""
    codec, form = sealed.codec, sealed.codec.transform
    units = sealed.coded.place(order) // codec.group
    decoded = 1 + np.count_nonzero(np.diff(units))  # neighbours in one unit are decoded once
    total_us = decoded * _mean_unit_us(sealed, units)
    if codec.key:
        total_us += decoded * _BEHIND_KEY_US[codec.method]
        keys = (units - units % codec.key)[units % codec.key > 0]
        changes = len(keys) and 1 + np.count_nonzero(np.diff(keys))
        raw_us = _COPY_US[1] * codec.group * form.coded_bytes / 1000  # it is not in a cache
        total_us += changes * (raw_us if codec.raw_keys else _mean_unit_us(sealed, keys))
    undone = {
        "copy": codec.group > 1, "left": form.predictor is Predictor.LEFT, "up": form.predictor is Predictor.UP,
        "pixels": form.predictor is Predictor.PIXELS, "green": form.green,
        "shuffle": form.shuffle > 0, "words": form.word_bytes > 0,
    }  # fmt: skip
    per_slice = sum(_TRANSFORM_US[name] for name, is_done in undone.items() if is_done) * form.coded_bytes / 1000
    return float(total_us / len(order) + per_slice)


def _mean_unit_us(sealed: SealedSlices, units: NDArray[np.int64]) -> float:
    """Count what has to be done for some units, those that come first."""
    codec = sealed.codec
    counted, counted_bytes, total_us = 0, 0, 0.0
    for number in units[np.sort(np.unique(units, return_index=True)[1])].tolist():
        packed = sealed.coded.unit(number)
        unpacked = min(codec.group, sealed.coded.count - number * codec.group) * codec.transform.coded_bytes
        work = _work_in(packed, codec.method, unpacked)
        method = codec.method if len(packed) < unpacked else Method.STORED
        total_us += sum(us * amount for us, amount in zip(_UNIT_US[method], work, strict=True))
        if method is Method.LZ4 and (codec.key or codec.dictionary):
            total_us += _FAR_SEQUENCE_US * work[2]
        total_us += _FAR_US * unpacked / 1000 if unpacked * (2 if codec.key else 1) > _NEAR_BYTES else 0.0
        counted, counted_bytes = counted + 1, counted_bytes + len(packed)
        if counted_bytes > _COUNTED_BYTES:
            break
    return total_us / max(counted, 1)


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

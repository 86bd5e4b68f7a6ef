"""Which codec pays: candidates are measured on a field's own slices.

In:  a block of slices, and how much slower sampling may get.  Out: the codec that is worth most, and why.
Invariant: with the compiled loops no clock decides, so that the same slices get the same codec on a busy machine, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.schema import Bytes, Leaf
from holdall.storage.block_sample import (
    CHANGED,
    FEWEST_SAMPLES,
    KNOWN_BYTES,
    LEARNT_TOGETHER,
    BlockSample,
    flat,
    groups_of,
    spread_over,
    transitions_in,
)  # fmt: skip
from holdall.storage.blocks import Codec, Dictionary, Method, Predictor, Transform
from holdall.storage.codec import (
    candidates,
    candidates_by_changes,
    decode_us,
    raw_us,
    wants_dictionary,
    wants_differences,
)
from holdall.storage.coded_units import unit_of

if TYPE_CHECKING:
    from holdall.storage.slices import Window
    from holdall.storage.ticks import Coder

Training = tuple[int, dict[str, int]]

COST_CAPS = {"speed": 1.2, "balanced": 2.0, "memory": 4.0}
"""How many times as long as a raw gather sampling compressed slices may take, by preference."""

_MEASURED_SLICES, _MEASURED_BYTES = 128, 3 * 2**19
"""Slices that every candidate compresses alone."""
_CHANGED_TRAINING, _CHANGED_SUFFICE = (32 * 1024, {"k": 1024, "d": 8}), 2
"""How a dictionary of changes is trained. They repeat nothing, so half as many bytes suffice for it."""
_SUFFICE = 4
"""Bytes that a dictionary is trained on, over its own."""
_FEWEST_TRAINED = 32
"""Fewest slices that a dictionary is trained on."""
_TRAININGS: tuple[Training, ...] = (
    (4 * 1024, {}),
    (32 * 1024, {}),
    (32 * 1024, {"k": 1024, "d": 8}),
    (64 * 1024, {"k": 2048, "d": 8}),
)
"""Sizes of dictionaries, and how the trainer cuts its samples."""
_LEADING = 2
"""Codecs for single slices that are also tried on groups; and the best by LZ4, and
of colours, whose groups are quicker to decode."""
_TOGETHER = 1.2
"""How much smaller neighbours must be together than alone, unless memory is preferred: the slices of a transition need
not be neighbours, where a scene comes back."""
_BESIDE_DECODING = 0.4
"""Raw copies that a batch takes besides: they count little where decoding takes long."""
_TIME_MATTERS = 2.8
"""A codec is worth its ratio over its time to the power of this over the cap's cube: with `balanced`, one that takes
two copies in place of one must shrink slices 1.21 times as much, with `memory` 1.02 times."""
_QUICK_ENOUGH = 0.5
"""Raw copies below which time does not matter: a batch is drawn faster than a raw one by either codec."""
_NEAR_THE_CAP, _WORTH_LESS = 0.8, 0.7
"""One that takes nearly all the time that is allowed must shrink slices 1.4 times as much, unless memory is preferred:
it is for slices that nothing quicker makes small."""
_FAR_SMALLER = 1.15
"""How much smaller single slices must be by columns: turning them takes time, and in groups rows gain more."""
_WORTHWHILE = 1.3
"""Less than this ratio is not worth coding and decoding: floats of a sensor or a market come to 1.0 to 1.3."""
_WORTHWHILE_FOR_MEMORY = 1.1
"""The same for those who prefer memory to time."""
_RAW_SPEED_UP = 1.3
"""What a second core adds to a raw gather, which waits for memory; decoding scales with cores."""
_SHARED_BY = 2
"""Threads that decoding is expected to have. More make batches faster, and leave the choice of a codec as it is: the
same data gives the same bytes on a workstation and on a large server, whose other cores run environments."""


@dataclass(frozen=True, slots=True)
class MeasuredCodec:
    """A codec, how much it shrank the samples, and how long it takes to decode one."""

    codec: Codec
    ratio: float
    decode_us: float  # by compiled loops, whichever coder is used: the choice is the same


def choose(
    coder: Coder, leaf: Leaf, window: Window, block: Bytes | BlockSample, cap: float, threads: int, lanes: int = 1,
    *, has_dictionary: bool = True,
) -> Codec:  # fmt: skip
    """Measure candidates on samples of a block and return the best one within the cap.

    Args:
        block: Its slices, see `BlockSample.of`, or what that made of them; then `lanes` are known.
        has_dictionary: Whether slices may depend on bytes outside of their block.
    """
    sample = block if isinstance(block, BlockSample) else BlockSample.of(block, window, lanes)
    copy_us = raw_us(window.slice_bytes)
    worth = _Worth(cap, copy_us, cap * copy_us * (1 if threads == 1 else _SHARED_BY / _RAW_SPEED_UP))
    measured = measure(coder, leaf, window, sample.spread, has_dictionary=has_dictionary)
    affordable = [m for m in measured if worth.allows(m)]
    leading = _leading(affordable)
    together = measure_together(coder, leading, window, sample, worth)
    found = affordable + together
    if together:
        found += measure_changes(coder, leaf, window, sample, leading[0], has_dictionary=has_dictionary)
    best = max(filter(worth.allows, found), key=worth.of, default=None)
    worthwhile = _WORTHWHILE_FOR_MEMORY if cap >= COST_CAPS["memory"] else _WORTHWHILE
    if best is None or best.ratio < worthwhile:
        allowed = worth.allowed_us / copy_us
        why = f"raw, since nothing decoded in {allowed:.1f} raw copies makes it {worthwhile} times smaller"
        return Codec(Method.STORED, 0, Transform(window.slice_bytes), reason=why)
    allowed = cap if best.codec.group > 1 else worth.allowed_us / copy_us
    why = f"{best.ratio:.1f} times smaller, decoded in {best.decode_us / copy_us:.1f} of {allowed:.1f} raw copies"
    known = best.codec.dictionary
    if best.codec.is_of_changes and has_dictionary:
        known = _trained_on_changes(coder, best.codec, sample.learnt) or known
    elif known is not None:
        size = min(size for size, _ in _TRAININGS if size >= len(best.codec.common))
        likewise = [training for training in _TRAININGS if training[0] == size]
        known = train(coder, replace(best.codec, group=1), sample.spread, likewise) or known
    return replace(best.codec, dictionary=known, reason=why)


def choose_fast_preset(coder: Coder, leaf: Leaf, window: Window, slices: Bytes) -> Codec:
    """Return LZ4's fastest level with the transform that suits some of the slices best."""
    few = spread_over(slices, FEWEST_SAMPLES, KNOWN_BYTES)
    named = [codec for codec in candidates(leaf, window) if not codec.is_of_colours]  # counting colours takes longer
    fast = [codec for codec in named if codec.method is Method.LZ4 and codec.level == 0]
    sealed = [(codec, coder.seal(few, codec)) for codec in fast]
    return min(sealed, key=lambda pair: few.nbytes if pair[1] is None else pair[1].nbytes)[0]


@dataclass(frozen=True, slots=True)
class _Worth:
    """What a codec is worth, by its ratio and the time that it takes to decode a slice."""

    cap: float
    raw_us: float
    allowed_us: float  # for slices alone: threads share them out

    def allows(self, found: MeasuredCodec) -> bool:
        # With a dictionary LZ4 makes numbers of colours so small that Zstandard is not worth twice its time.
        codec = found.codec
        alone = replace(codec, group=1)
        is_slow = codec.is_of_colours and codec.method is Method.ZSTD and wants_dictionary(alone)
        return found.decode_us <= self._most_us(found) and (self.prefers_memory or not is_slow)

    @property
    def prefers_memory(self) -> bool:
        return self.cap >= COST_CAPS["memory"]

    def of(self, found: MeasuredCodec) -> float:
        copies = max(found.decode_us / self.raw_us, _QUICK_ENOUGH)
        time = (copies + _BESIDE_DECODING) ** (_TIME_MATTERS / self.cap**3)
        is_late = found.decode_us > _NEAR_THE_CAP * self._most_us(found) and not self.prefers_memory
        return float(found.ratio / time * (_WORTH_LESS if is_late else 1))

    def _most_us(self, found: MeasuredCodec) -> float:
        return self.cap * self.raw_us if found.codec.group > 1 else self.allowed_us


ANY_WORTH = _Worth(1e9, 1.0, 1e9)
"""All is allowed, and only the ratio counts."""


def _leading(measured: list[MeasuredCodec]) -> list[MeasuredCodec]:
    leading = sorted(measured, key=lambda m: m.ratio)[-_LEADING:]
    quick = [m for m in measured if m.codec.method is Method.LZ4 and m not in leading]
    coloured = [m for m in measured if m.codec.is_of_colours and m not in leading and m not in quick]
    return [*leading, *sorted(quick, key=lambda m: m.ratio)[-1:], *sorted(coloured, key=lambda m: m.ratio)[-1:]]


def measure_together(
    coder: Coder, leading: list[MeasuredCodec], window: Window, sample: BlockSample, worth: _Worth = ANY_WORTH
) -> list[MeasuredCodec]:
    """Seal neighbours together, in larger and larger groups while that pays; decode them as a batch does."""
    results = []
    for before in leading:
        alone, scale = before.ratio, _scale(coder, before, window, sample.near)
        for group in groups_of(window)[1:]:
            codec = replace(before.codec, group=group)
            found = _measure_neighbours(coder, codec, window, sample.near, sample.stride, scale)
            if found is None or (found.ratio < _TOGETHER * alone and not worth.prefers_memory):
                break
            results.append(found)
            if not worth.allows(found) or worth.of(found) <= worth.of(before):
                break
            before = found  # noqa: PLW2901  the next one has to be worth more than this one
    return results


def measure_changes(
    coder: Coder, leaf: Leaf, window: Window, sample: BlockSample, alone: MeasuredCodec, *, has_dictionary: bool = True
) -> list[MeasuredCodec]:
    """Seal neighbours as changes of each other, in groups of several sizes; `alone` is a codec of single slices."""
    if not len(sample.changing):
        return []
    named, dictionary = candidates_by_changes(leaf, window), None
    if has_dictionary:
        dictionary = _trained_on_changes(coder, named[0], sample.learnt[: sample.apart])
    codecs = [replace(codec, dictionary=dictionary, group=group) for codec in named for group in CHANGED]
    scale = _scale(coder, alone, window, sample.changing)
    found = [_measure_neighbours(coder, codec, window, sample.changing, sample.stride, scale) for codec in codecs]
    return [one for one in found if one is not None]


def _trained_on_changes(coder: Coder, codec: Codec, stretches: Bytes) -> Dictionary | None:
    by_zstd = replace(codec, method=Method.ZSTD, level=3, dictionary=None, group=1)
    if not (wants_dictionary(by_zstd) and len(stretches)):
        return None
    learnt = _learnt(coder, replace(by_zstd, group=LEARNT_TOGETHER), flat(stretches))
    return _trained(*learnt, by_zstd.level, _CHANGED_TRAINING, _CHANGED_SUFFICE)


def _scale(coder: Coder, alone: MeasuredCodec, window: Window, stretches: Bytes) -> float:
    """Say how much smaller slices of the whole block become alone than these, so that few of them stand for all."""
    found = _measure_neighbours(coder, alone.codec, window, stretches, 1)
    return 1.0 if found is None else alone.ratio / found.ratio


def _measure_neighbours(
    coder: Coder, codec: Codec, window: Window, stretches: Bytes, stride: int, scale: float = 1.0
) -> MeasuredCodec | None:
    """Measure a codec on stretches of slices, read as those of transitions."""
    count, length, _ = stretches.shape
    if not count:
        return None
    wanted = transitions_in(window, count, length, stride)
    found = _measure_one(coder, codec, flat(stretches), wanted)
    return None if found is None else replace(found, ratio=scale * found.ratio)


def measure(
    coder: Coder, leaf: Leaf, window: Window, samples: Bytes, *, has_dictionary: bool = True
) -> list[MeasuredCodec]:
    """Seal and decode some of the samples with every candidate."""
    results = []
    odd = spread_over(samples[1::2] if len(samples) > 1 else samples, _MEASURED_SLICES, _MEASURED_BYTES)
    trained: dict[Transform, Dictionary | None] = {}
    for codec in _turned_once(coder, candidates(leaf, window), odd):
        results.append(_measure_one(coder, codec, odd))
        if has_dictionary and wants_dictionary(codec) and len(samples) >= _FEWEST_TRAINED:
            # Trained on the even samples and measured on the odd: a dictionary must not know them.
            if codec.transform not in trained:
                by_zstd = replace(codec, method=Method.ZSTD, level=3)
                even = spread_over(samples[::2], 2 * _MEASURED_SLICES, 2 * _MEASURED_BYTES)
                trained[codec.transform] = train(coder, by_zstd, even)
            dictionary = trained[codec.transform]
            if dictionary is not None:
                results.append(_measure_one(coder, replace(codec, dictionary=dictionary), odd))
    if has_dictionary and len(samples) >= _FEWEST_TRAINED:
        results.append(
            _measure_predicted(coder, results, spread_over(samples[::2], _MEASURED_SLICES, _MEASURED_BYTES), odd)
        )
    return [result for result in results if result is not None]


def _turned_once(coder: Coder, named: list[Codec], samples: Bytes) -> list[Codec]:
    """Leave out colours by columns, or by rows where columns are far smaller; both if a slice has too many of them."""
    tried = {codec.transform: codec for codec in named if codec.is_of_colours and codec.method is Method.LZ4}
    sealed = {form: coder.seal(samples, codec) for form, codec in tried.items()}
    taken = {form: float(found.nbytes) for form, found in sealed.items() if found is not None}
    by_columns = [form for form in taken if form.predictor is Predictor.COLUMNS]
    taken |= {form: _FAR_SMALLER * taken[form] for form in by_columns}
    best = min(taken, key=lambda form: taken[form], default=None)
    return [codec for codec in named if not codec.is_of_colours or codec.transform == best]


def _measure_predicted(
    coder: Coder, measured: Sequence[MeasuredCodec | None], known: Bytes, unseen: Bytes
) -> MeasuredCodec | None:
    """Measure the prediction that suits LZ4 best with a dictionary of differences."""
    predicted = [m for m in measured if m is not None and wants_differences(m.codec)]
    if not predicted:
        return None
    codec = max(predicted, key=lambda m: m.ratio).codec
    largest = [training for training in _TRAININGS if 8 * training[0] <= known.nbytes][-1:]  # half of them are learnt
    dictionary = train(coder, replace(codec, method=Method.ZSTD, level=3), known, largest)
    return None if dictionary is None else _measure_one(coder, replace(codec, dictionary=dictionary), unseen)


def train(coder: Coder, codec: Codec, slices: Bytes, trainings: Sequence[Training] = _TRAININGS) -> Dictionary | None:
    """Train dictionaries in several ways and return the best; None if there is nothing in common.

    Which segment length suits a game is not to be known beforehand: measured on Atari frames,
    the trainer's own choice ranges from a ratio of 23 to 40 with the dictionary's size.
    """
    unseen = np.ascontiguousarray(slices[1::2])
    learnt = _learnt(coder, codec, np.ascontiguousarray(slices[::2]))
    best, best_bytes = None, unseen.nbytes
    for training in trainings:
        dictionary = _trained(*learnt, codec.level, training)
        sealed = None if dictionary is None else coder.seal(unseen, replace(codec, dictionary=dictionary))
        if sealed is not None and sealed.nbytes < best_bytes:
            best, best_bytes = dictionary, sealed.nbytes
    return best


def _learnt(coder: Coder, codec: Codec, slices: Bytes) -> tuple[bytes, list[Any]]:
    """Return the palette of some slices, if they have one, and their units before they are compressed."""
    known = coder.seal(slices, replace(codec, method=Method.STORED, dictionary=None))
    if known is None:
        return b"", []
    units: list[Any] = [unit_of(known.coded, number) for number in range(len(known.coded.offsets) - 1)]
    if codec.is_of_colours:
        return known.coded.palette.tobytes(), [unit[1 + 4 * unit[0] :] for unit in units]
    return b"", units


def _trained(
    palette: bytes, units: list[Any], level: int, training: Training, suffice: int = _SUFFICE
) -> Dictionary | None:
    """Train a dictionary in one way; None if there is nothing in common, or too little to learn it from."""
    size, arguments = training
    if size * suffice > sum(map(len, units)):
        return None
    try:
        return Dictionary(palette + zstandard.train_dictionary(size, units, level=level, **arguments).as_bytes())
    except zstandard.ZstdError:
        return None


def _measure_one(
    coder: Coder, codec: Codec, samples: Bytes, order: NDArray[np.int64] | None = None
) -> MeasuredCodec | None:
    sealed = coder.seal(samples, codec)
    if sealed is None:
        return None
    if order is None:
        order = np.random.default_rng(0).permutation(len(samples)).astype(np.int64).reshape(-1, 1)
    unpacked = None
    if codec.is_of_changes:
        as_they_are = coder.seal(samples, replace(codec, method=Method.STORED, dictionary=None))
        unpacked = None if as_they_are is None else np.diff(as_they_are.coded.offsets).astype(np.int64)
    return MeasuredCodec(codec, samples.nbytes / max(sealed.nbytes, 1), decode_us(coder, sealed, order, unpacked))

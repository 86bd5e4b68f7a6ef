"""The choice of a codec, by measurement on a field's own slices.

In:  a block that was just filled, and what sampling may cost.  Out: the codec that shrinks it most.
Invariant: a choice only moves bytes and time; any codec gives the same rows back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.experience.arena import Bytes
from holdall.experience.sealing.codec import Codec, Dictionary, Method, Transform, candidates
from holdall.experience.window import Window
from holdall.schema import Leaf

if TYPE_CHECKING:
    from holdall.experience.sealing.sealed import Coder

COST_CAPS = {"speed": 1.2, "balanced": 2.0, "memory": 4.0}
"""How dear sampling compressed slices may be, over a raw gather, by preference."""

_SAMPLES = 256
"""Slices that are measured: they chose right in 27 of 29 recorded environments."""
_TRAININGS: tuple[tuple[int, dict[str, int]], ...] = (
    (4 * 1024, {}),
    (32 * 1024, {}),
    (32 * 1024, {"k": 1024, "d": 8}),
    (64 * 1024, {"k": 2048, "d": 8}),
)
"""Sizes of dictionaries, and how the trainer is told to cut its samples."""
_GROUPS = (4, 8, 16)
"""How many neighbours are tried together: a transition of a stack of 4 needs 5 of them."""
_TOGETHER_PAYS = 1.25
"""Neighbours together must shrink this much more than the best codec for one: each is decoded with the others. And they
must keep the cap on one core: right after a trainer's own step its idle threads still spin on the others."""
_LEADING = 3
"""Codecs for single slices that are also tried on groups."""
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
class Measured:
    """A codec, how much it shrank the samples, and how long it takes to decode one."""

    codec: Codec
    ratio: float
    decode_us: float


def choose(coder: Coder, leaf: Leaf, window: Window, slices: Bytes, cap: float, hands: int, lanes: int = 1) -> Codec:
    """Measure every candidate on samples of `slices` and return the best one within the cap.

    Args:
        slices: A block, in the order in which lanes that advance together brought it.
    """
    picked = np.linspace(0, len(slices) - 1, min(_SAMPLES, len(slices))).astype(np.int64)
    samples = np.ascontiguousarray(slices[picked])
    raw_us = _raw_us(coder, samples)
    allowed_us = cap * raw_us * (hands if hands == 1 else hands / _RAW_SPEED_UP)
    measured = [m for m in measure(coder, leaf, window, samples) if m.decode_us <= allowed_us]
    leading = sorted(measured, key=lambda m: m.ratio)[-_LEADING:]
    together = [
        m
        for m in measure_together(coder, leading, window, slices, lanes)
        if m.decode_us <= cap * raw_us and m.ratio >= _TOGETHER_PAYS * leading[-1].ratio
    ]
    best = max(leading[-1:] + together, key=lambda m: m.ratio, default=None)
    if best is None or best.ratio < (_WORTHWHILE_FOR_MEMORY if cap >= COST_CAPS["memory"] else _WORTHWHILE):
        return Codec(Method.STORED, 0, Transform(window.slice_bytes))
    if best.codec.dictionary is not None:
        return replace(best.codec, dictionary=train(coder, replace(best.codec, group=1), slices))
    return best.codec


def measure_together(
    coder: Coder, leading: list[Measured], window: Window, slices: Bytes, lanes: int
) -> list[Measured]:
    """Seal neighbours together, and decode them as a batch does: the slices of one transition at a time."""
    reach = (window.count + window.shift - 1) * lanes + 1  # of a transition, in the block
    length = max(reach, 2 * max(_GROUPS))
    stretches = max(1, min(_SAMPLES // length, len(slices) // length))
    if len(slices) < length:
        return []
    first = np.linspace(0, len(slices) - length, stretches).astype(np.int64)
    samples = np.ascontiguousarray(slices[(first[:, None] + np.arange(length)).reshape(-1)])
    starts = np.random.default_rng(0).integers(0, length - reach + 1, (8, stretches)) + length * np.arange(stretches)
    order = (starts.reshape(-1, 1) + lanes * np.arange(window.count + window.shift)).reshape(-1).astype(np.int64)
    groups = [group for group in _GROUPS if group * window.slice_bytes <= _MOST_UNIT_BYTES]
    together = [replace(one.codec, group=group) for one in leading for group in groups]
    results = [_measure_one(coder, codec, samples, order) for codec in together]
    return [result for result in results if result is not None]


def measure(coder: Coder, leaf: Leaf, window: Window, samples: Bytes) -> list[Measured]:
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
    picked = np.linspace(0, len(slices) - 1, min(2 * _SAMPLES, len(slices))).astype(np.int64)
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


def _measure_one(coder: Coder, codec: Codec, samples: Bytes, order: NDArray[np.int64] | None = None) -> Measured | None:
    sealed = coder.seal(samples, codec)
    if sealed is None:
        return None
    if order is None:
        order = np.random.default_rng(0).permutation(len(samples)).astype(np.int64)
    wanted = order
    out = np.empty((len(wanted), samples.shape[1]), np.uint8)
    decode_us = min(_timed_us(lambda: coder.decode(sealed, wanted, out)) for _ in range(3))
    return Measured(codec, samples.nbytes / max(sealed.nbytes, 1), decode_us / len(wanted))


def _raw_us(coder: Coder, samples: Bytes) -> float:
    """Time copying slices that no cache holds, as those of a large memory are, in us each."""
    out = np.empty_like(samples)
    order = np.random.default_rng(0).permutation(len(samples))
    times = []
    for _ in range(5):
        coder.chill(samples)
        coder.chill(out)
        times.append(_timed_us(lambda: samples.take(order, axis=0, out=out, mode="clip")))
    return _LARGE_MEMORY * float(np.median(times)) / len(samples)


def _timed_us(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e6

"""The choice of a codec: presets are measured on a field's own slices.

A preset is worth more if it makes a sample smaller, and less if it decodes more slowly. `prefer` says how much time may
count and which time is too long. The decision depends on the slices alone, never on a clock or on the machine, so that
the same data always gets the same codec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdall._native import Block, Coded, Dictionary, encode
from holdall.codec.codec import Codec, Method, Transform
from holdall.codec.dictionary import train_dictionary
from holdall.codec.presets import (
    Preset,
    describe_codec,
    estimate_cost,
    has_palette,
    list_change_presets,
    list_fast_codecs,
    list_presets,
    list_shuffled_change_presets,
    list_single_codecs,
)
from holdall.codec.sample import Bytes, Sample
from holdall.schema import Leaf
from holdall.store.tuning import Tuning
from holdall.store.windows import Window


@dataclass(frozen=True, slots=True)
class Preference:
    """What `prefer` means for the choice."""

    max_cost: float  # Decoding time over that of a raw gather, both on one thread.
    cost_exponent: float  # How much cost counts against size: with 0.6, twice the cost must save a third of the bytes.
    min_ratio: float  # Ratio below which slices are stored as they are.
    # Ratio of several slices together over that of single slices. Where a scene comes back, the slices of a transition
    # are not neighbours, and decoding them costs more than `estimate_cost` says.
    min_group_gain: float


PREFERENCES = {
    "speed": Preference(max_cost=2.7, cost_exponent=1.2, min_ratio=1.3, min_group_gain=1.2),
    "balanced": Preference(max_cost=3.0, cost_exponent=0.6, min_ratio=1.3, min_group_gain=1.2),
    "memory": Preference(max_cost=6.2, cost_exponent=0.1, min_ratio=1.1, min_group_gain=1.1),
}
"""Threads share the decoding. A raw gather waits for memory and gains little from a second thread. So with two threads,
the greatest costs are about 1.8, 2 and 4 raw gathers."""

_LEADING_SHARE = 4
"""The transform is chosen on one in this many runs of the sample."""
_LEADING_EXPONENT = 0.6
"""How much cost counts against size in the choice of the transform."""
_FAST_SAMPLE_SLICES = 8
_FAST_RATIO = 32
"""A codec that makes the sample this many times smaller compresses about as fast as memory is filled. It is used while
the worker is behind, too. Atari frames compress at 1,300 MB/s, and a fast codec makes them nine times larger."""
_DRIFT = 1.25
"""The codec is chosen again if a block compresses worse than the first one by this factor."""
_FEW_SLICES = 256
_MUCH_LARGER = 4
"""A codec that was chosen by fewer than `_FEW_SLICES` is chosen again by a block with this many times as many."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, and how it did on the sample."""

    codec: Codec
    ratio: float  # Raw bytes over compressed bytes of the sample.
    cost: float  # Decoding time over that of a raw gather, see `estimate_cost`.

    def rate(self, exponent: float) -> float:
        """Return what the codec is worth: more if slices become smaller or are cheaper to decode."""
        return float(self.ratio / self.cost**exponent)


def choose_codec(leaf: Leaf, window: Window, sample: Sample, prefer: str) -> Choice:
    """Return the codec for slices like those of `sample`."""
    preference = PREFERENCES[prefer]
    search = _Search(window, sample, preference)
    for codec in search.find_leading(list_single_codecs(leaf, window)):
        search.measure(list_presets(codec))
    search.measure(list_change_presets(leaf, window))
    search.measure(list_shuffled_change_presets(leaf, window))
    good = [found for found in search.found if search.is_affordable(found) and found.ratio >= preference.min_ratio]
    stored = Choice(Codec(window.slice_bytes), 1.0, 0.0)
    return max(good, key=lambda found: found.rate(preference.cost_exponent), default=stored)


class _Search:
    """The presets that were measured so far."""

    def __init__(self, window: Window, sample: Sample, preference: Preference) -> None:
        self.found: list[Choice] = []
        self._window = window
        self._sample = sample
        self._preference = preference
        self._dictionaries: dict[Transform, Dictionary | None] = {}

    def find_leading(self, codecs: list[Codec]) -> list[Codec]:
        """Return the codec of each compressor that makes a part of the sample smallest, and the one worth most.

        Codecs that cannot represent the whole sample are left out.
        """
        slices = self._sample.take_runs(_LEADING_SHARE)
        fitting = [codec for codec in codecs if self._can_represent_sample(codec)]
        measured = [choice for choice in (self._try(codec, slices) for codec in fitting) if choice is not None]
        leading: list[Codec] = []
        for method in (Method.LZ4, Method.ZSTANDARD):
            by_method = [choice for choice in measured if choice.codec.method is method]
            leading.append(max(by_method, key=lambda choice: choice.ratio).codec)
            leading.append(max(by_method, key=lambda choice: choice.rate(_LEADING_EXPONENT)).codec)
        return list(dict.fromkeys(leading))

    def measure(self, presets: list[Preset]) -> None:
        """Measure presets in order. Stop when several slices per unit cost too much or gain too little."""
        alone_ratio = 0.0
        for preset in presets:
            codec = preset.codec
            if codec.group > self._sample.run:
                continue
            if preset.has_dictionary:
                codec = replace(codec, dictionary=self._train(codec))
            found = self._try(codec, self._sample.measured)
            if found is None:
                return
            if codec.group == 1:
                alone_ratio = max(alone_ratio, found.ratio)
            elif not self.is_affordable(found) or found.ratio < self._preference.min_group_gain * alone_ratio:
                return
            self.found.append(found)

    def is_affordable(self, choice: Choice) -> bool:
        """Return whether decoding costs no more than the preference allows."""
        return choice.cost <= self._preference.max_cost

    def _can_represent_sample(self, codec: Codec) -> bool:
        """Return whether the sample does not have too many words or colours for a palette."""
        if not has_palette(codec):
            return True
        return encode(self._sample.measured, replace(codec, method=Method.STORED, level=0)) is not None

    def _try(self, codec: Codec, slices: Bytes) -> Choice | None:
        """Measure a codec on some slices. Return None if it cannot represent them."""
        coded = encode(slices, codec)
        if coded is None:
            return None
        ratio = slices.nbytes / max(coded.nbytes, 1)
        return Choice(codec, ratio, estimate_cost(codec, self._window, 1 / ratio))

    def _train(self, codec: Codec) -> Dictionary | None:
        """Return the dictionary for the transform of `codec`, which both compressors share."""
        if codec.transform not in self._dictionaries:
            self._dictionaries[codec.transform] = train_dictionary(codec, self._sample.trained)
        return self._dictionaries[codec.transform]


class FieldCodec:
    """The codec of one observation field that is cut into slices.

    The codec is chosen on the field's first block. It is chosen again if later blocks compress much worse, or if the
    first block was very small. Only the worker thread of the compactor uses it.
    """

    def __init__(self, leaf: Leaf, window: Window, prefer: str, tuning: Tuning) -> None:
        self._leaf = leaf
        self._window = window
        self._prefer = prefer
        self._tuning = tuning
        self._sample: Sample | None = None  # Of the block to choose by, until the worker has time to choose.
        self._choice: Choice | None = None
        self._fast: Codec | None = None
        self._sampled_slices = 0  # Slices of the block that the codec was chosen by.
        self._first_ratio = 0.0  # Of the first block that was compressed with the chosen codec.
        self._age_blocks = 0  # Blocks since the codec was chosen.
        self._hurried_blocks = 0  # Blocks since then that were compressed with a fast codec.

    def encode(self, block: Block, is_behind: bool) -> Coded:
        """Compress a raw block. With `is_behind`, use a fast codec unless the chosen one is fast, and choose later."""
        if block.slice_count == 0:
            return encode_whole(block, Codec(block.slice_bytes))
        if self._needs_sample(block):
            self._sample = Sample.of(block)
            self._sampled_slices = block.slice_count
        if is_behind and self._should_hurry():
            self._hurried_blocks += 1
            return self._encode_fast(block)
        if self._sample is not None:
            self._choice = choose_codec(self._leaf, self._window, self._sample, self._prefer)
            self._sample = None
            self._first_ratio = 0.0
            self._age_blocks = 0
            self._hurried_blocks = 0
        assert self._choice is not None
        coded = encode_whole(block, self._choice.codec)
        self._watch_ratio(block, coded)
        return coded

    @property
    def chosen(self) -> Codec | None:
        """The chosen codec. None before the choice."""
        choice = self._choice
        return None if choice is None else choice.codec

    def describe(self) -> str:
        """Return what was chosen and why, for reports."""
        choice = self._choice
        if choice is None:
            return "not chosen yet"
        preference = PREFERENCES[self._prefer]
        if choice.ratio == 1.0:
            return (
                f"uncompressed, because nothing that decodes in {preference.max_cost} raw copies makes it "
                f"{preference.min_ratio} times smaller"
            )
        return (
            f"{describe_codec(choice.codec)}: {choice.ratio:.1f} times smaller on a sample, "
            f"decoded in about {choice.cost:.1f} of {preference.max_cost} raw copies"
        )

    def _needs_sample(self, block: Block) -> bool:
        """Return whether the codec should be chosen by this block."""
        if block.slice_count >= _MUCH_LARGER * self._sampled_slices and self._sampled_slices < _FEW_SLICES:
            return True
        return self._choice is None and self._sample is None

    def _should_hurry(self) -> bool:
        """Return whether a fast codec is used while the worker is behind.

        The choice takes about a second, so it waits for the end of a short burst. A long burst gets its codec.
        """
        if self._choice is None or self._sample is not None:
            return self._hurried_blocks < self._tuning.max_hurried_blocks
        return self._choice.ratio < _FAST_RATIO

    def _watch_ratio(self, block: Block, coded: Coded) -> None:
        """Choose again with the next block if this one compressed much worse than the first."""
        ratio = block.slice_count * block.slice_bytes / max(coded.nbytes, 1)
        self._age_blocks += 1
        if self._first_ratio == 0.0:
            self._first_ratio = ratio
        is_worse = ratio * _DRIFT < self._first_ratio
        is_uncompressed = self._choice is not None and self._choice.ratio == 1.0
        if self._age_blocks > self._tuning.codec_rest_blocks and (is_worse or is_uncompressed):
            self._choice = None

    def _encode_fast(self, block: Block) -> Coded:
        if self._fast is None:
            slices = block.read(0, min(block.slice_count, _FAST_SAMPLE_SLICES))
            codecs = list_fast_codecs(self._leaf, self._window)
            self._fast = min(codecs, key=lambda codec: _coded_bytes(slices, codec))
        return encode_whole(block, self._fast)


def _coded_bytes(slices: Bytes, codec: Codec) -> int:
    coded = encode(slices, codec)
    return slices.nbytes if coded is None else coded.nbytes


def encode_whole(block: Block, codec: Codec) -> Coded:
    """Compress a block. Where its words or colours do not fit a palette, or it does not shrink, use a simpler codec."""
    order = block.lane_order()
    coded = encode(block, codec, order)
    if coded is None and has_palette(codec):
        plain = Codec(codec.slice_bytes, codec.method, codec.level, codec.group)
        coded = encode(block, plain, order)
    if coded is None or coded.nbytes >= block.slice_count * block.slice_bytes:
        coded = encode(block, Codec(codec.slice_bytes))
    assert coded is not None
    return coded

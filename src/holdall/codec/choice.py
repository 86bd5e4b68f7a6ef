"""The choice of a codec: the presets of a field's kind are measured on the field's own slices.

A preset scores higher if it makes a sample smaller, and lower if it decodes more slowly. `prefer` says how much the
time of decoding counts, and which time is too long. The decision depends on the slices alone, never on a clock or on
the machine, so that the same data always gets the same codec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdall._native import Block, Coded, Dictionary, encode
from holdall.codec.codec import Codec, Transform
from holdall.codec.dictionary import train_dictionary
from holdall.codec.presets import (
    describe_codec,
    estimate_cost,
    find_kind,
    has_palette,
    list_codecs,
    list_fast_codecs,
)
from holdall.codec.sample import Bytes, Sample
from holdall.schema import Leaf
from holdall.store.tuning import Tuning
from holdall.store.windows import Window


@dataclass(frozen=True, slots=True)
class Preference:
    """What `prefer` means for the choice."""

    max_cost: float  # Maximum time of decoding, divided by that of a raw gather. Both on one thread.
    cost_exponent: float  # How much cost counts against size: with 0.5, twice the cost must save 29 % of the bytes.
    min_ratio: float  # Ratio of raw to compressed bytes below which slices are stored uncompressed.


PREFERENCES = {
    "speed": Preference(max_cost=2.7, cost_exponent=1.2, min_ratio=1.3),
    "balanced": Preference(max_cost=3.0, cost_exponent=0.5, min_ratio=1.3),
    "memory": Preference(max_cost=6.2, cost_exponent=0.1, min_ratio=1.1),
}
"""Preferences by the name that users pass as `prefer`.

With two threads, the maximum costs are about 1.8, 2 and 4 raw gathers: threads share the decoding, but a raw gather
waits for memory and gains little from a second thread."""

_FAST_SAMPLE_SLICES = 8
_FAST_RATIO = 32
"""Ratio from which on a codec is also used while the worker is behind, because it compresses about as fast as memory is
filled: Atari frames at 1,300 MB/s. A fast codec makes them nine times larger."""
_DRIFT = 1.25
"""The codec is chosen again if a block compresses worse than the first block by this factor."""
_FEW_SLICES = 256
"""A codec that was chosen by a block of fewer slices is chosen again by a much larger block."""
_MUCH_LARGER = 4
"""Factor by which that block must be larger."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, and its results on the sample."""

    codec: Codec
    ratio: float  # Raw bytes divided by compressed bytes of the sample.
    cost: float  # Time of decoding, divided by that of a raw gather, see `estimate_cost`.

    def rate(self, exponent: float) -> float:
        """Return the codec's score. It is higher if slices become smaller, or are cheaper to decode."""
        return float(self.ratio / self.cost**exponent)


def choose_codec(leaf: Leaf, window: Window, sample: Sample, prefer: str) -> Choice:
    """Return the codec for slices like those of `sample`."""
    preference = PREFERENCES[prefer]
    acceptable = [
        choice
        for choice in try_presets(leaf, window, sample)
        if choice.cost <= preference.max_cost and choice.ratio >= preference.min_ratio
    ]
    stored = Choice(Codec(window.slice_bytes), 1.0, 0.0)
    return max(acceptable, key=lambda choice: choice.rate(preference.cost_exponent), default=stored)


def try_presets(leaf: Leaf, window: Window, sample: Sample) -> list[Choice]:
    """Compress the sample with every preset of the field's kind. Leave out presets that cannot represent the sample."""
    measured: list[Choice] = []
    dictionaries: dict[Transform, Dictionary | None] = {}
    kind = find_kind(leaf, window, sample.measured)
    for plain_codec, may_have_dictionary in list_codecs(kind, leaf, window).items():
        if plain_codec.group > sample.run:
            continue
        codec = plain_codec
        if may_have_dictionary:
            # LZ4 and Zstandard can use the same dictionary.
            if codec.transform not in dictionaries:
                dictionaries[codec.transform] = train_dictionary(codec, sample.trained)
            codec = replace(codec, dictionary=dictionaries[codec.transform])
        coded = encode(sample.measured, codec)
        if coded is not None:
            ratio = sample.measured.nbytes / max(coded.nbytes, 1)
            measured.append(Choice(codec, ratio, estimate_cost(codec, window, 1 / ratio)))
    return measured


class FieldCodec:
    """The codec of one observation field that is cut into slices.

    The codec is chosen by the field's first block. It is chosen again if later blocks compress much worse or stay
    uncompressed, and if the first block was very small.

    Only one thread may call `encode`, such as the worker of the compactor. The other members may be used by any thread.
    """

    def __init__(self, leaf: Leaf, window: Window, prefer: str, tuning: Tuning) -> None:
        self._leaf = leaf
        self._window = window
        self._prefer = prefer
        self._tuning = tuning
        self._sample: Sample | None = None  # Slices to choose by, until `encode` has time to choose.
        self._choice: Choice | None = None
        self._fast: Codec | None = None
        self._sampled_slices = 0  # Slices of the block that was sampled last.
        self._first_ratio = 0.0  # Ratio of the first block that was compressed with the chosen codec. 0: no such block.
        self._age_blocks = 0  # Blocks that were compressed with the chosen codec.
        self._hurried_blocks = 0  # Blocks that were compressed with a fast codec since the choice.

    def encode(self, block: Block, is_behind: bool) -> Coded:
        """Compress a raw block. With `is_behind`, choose later, and use a fast codec unless the chosen one is fast."""
        if block.slice_count == 0:
            return encode_whole(block, Codec(block.slice_bytes))
        if self._needs_sample(block):
            self._sample = Sample.from_block(block)
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
        """Return the chosen codec and the reason for it as a sentence for reports."""
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
        """Discard the choice if this block compressed much worse than the first one, or if blocks stay uncompressed.

        The next block then gets a new choice. The first `Tuning.codec_rest_blocks` blocks of a choice discard nothing.
        """
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
            kind = find_kind(self._leaf, self._window, slices)
            codecs = list_fast_codecs(kind, self._leaf, self._window)
            self._fast = min(codecs, key=lambda codec: _coded_bytes(slices, codec))
        return encode_whole(block, self._fast)


def _coded_bytes(slices: Bytes, codec: Codec) -> int:
    coded = encode(slices, codec)
    return slices.nbytes if coded is None else coded.nbytes


def encode_whole(block: Block, codec: Codec) -> Coded:
    """Compress a block. If the palette of `codec` cannot represent the block, use only its compressor.

    If the result is not smaller than the block, store the slices uncompressed.
    """
    order = block.lane_order()
    coded = encode(block, codec, order)
    if coded is None and has_palette(codec):
        plain = Codec(codec.slice_bytes, codec.method, codec.level, codec.group)
        coded = encode(block, plain, order)
    if coded is None or coded.nbytes >= block.slice_count * block.slice_bytes:
        coded = encode(block, Codec(codec.slice_bytes))
    assert coded is not None
    return coded

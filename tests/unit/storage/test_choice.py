"""A codec is chosen by what it does to a field's own slices, and by what sampling may cost."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall.native import NativeCoder, chosen_kernels
from holdall.schema import Bytes, Leaf
from holdall.storage import codec_choice as choice
from holdall.storage.block_sample import BlockSample
from holdall.storage.blocks import Codec, Method, Predictor, SealedSlices, Transform
from holdall.storage.codec import describe
from holdall.storage.codec_choice import (
    COST_CAPS,
    MeasuredCodec,
    choose,
    choose_fast_preset,
    measure,
    measure_together,
    train,
)
from holdall.storage.coded_units import unit_of
from holdall.storage.slices import Window
from holdall.storage.ticks import Coder

FRAME = Leaf("", (36, 36), np.dtype("u1"))
WHOLE = Window.whole(FRAME)
ANY_COST = 1e9


def noise(count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, FRAME.nbytes), np.uint8)


def games(count: int) -> Bytes:
    """Draw frames of noise that all frames share, and a ball in another place in each: nothing alone shrinks."""
    frames = np.repeat(noise(1), count, axis=0)
    for number, place in enumerate(np.random.default_rng(1).permutation(FRAME.nbytes)[:count]):
        frames[number, place : place + 4] = 255
    return frames


@pytest.fixture(scope="module")
def coder() -> Coder:
    return chosen_kernels().coder


def ratio_of(coder: Coder, slices: Bytes, codec: Codec) -> float:
    sealed = coder.seal(slices, codec)
    assert sealed is not None
    return slices.nbytes / sealed.nbytes


# ---------------------------------------------------------------- the cap


PRICES = [("fast", 10.0, 2.0), ("dense", 100.0, 6.0), ("densest", 300.0, 20.0), ("slow and poor", 500.0, 1.5)]
"""Name, microseconds to decode a slice, and ratio."""


def chosen_at(patch: pytest.MonkeyPatch, cap: float, raw_us: float, threads: int = 1) -> float:
    """Choose among codecs of known prices; return the ratio of the one chosen, 0.0 for none."""
    ratio_by_codec = {Codec(Method.ZSTD, level, Transform(1296)): p for level, p in enumerate(PRICES, start=1)}
    known = [MeasuredCodec(codec, ratio, us) for codec, (_, us, ratio) in ratio_by_codec.items()]
    patch.setattr(choice, "measure", lambda *_, **__: known)
    patch.setattr(choice, "raw_us", lambda *_: raw_us)
    codec = choose(NativeCoder(), FRAME, WHOLE, noise(3), cap, threads)
    return 0.0 if codec.method is Method.STORED else ratio_by_codec[codec][2]


@pytest.mark.parametrize(
    ("cap", "raw_us", "ratio"),
    [(1.0, 9.9, 0.0), (1.0, 10.0, 2.0), (9.9, 10.0, 2.0), (10.0, 10.0, 6.0), (29.0, 10.0, 6.0), (31.0, 10.0, 20.0)],
)
def test_the_densest_codec_within_the_cap_is_chosen(
    monkeypatch: pytest.MonkeyPatch, cap: float, raw_us: float, ratio: float
) -> None:
    """A slower one never is, however small it makes slices; if all are slower, slices stay raw."""
    assert chosen_at(monkeypatch, cap, raw_us) == ratio


def test_hands_that_share_a_batch_may_each_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is shared out; a raw gather waits for memory, and gains less from that."""
    assert chosen_at(monkeypatch, 9.0, 10.0, threads=1) == 2.0
    assert chosen_at(monkeypatch, 9.0, 10.0, threads=2) == 6.0


def test_more_than_two_threads_leave_the_choice_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same data gets the same codec on a workstation and on a server: its cores have other work, too."""
    for cap, raw_us in ((9.0, 10.0), (3.0, 10.0), (1.5, 10.0)):
        alike = {chosen_at(monkeypatch, cap, raw_us, threads=threads) for threads in (2, 4, 8, 64)}
        assert len(alike) == 1


def test_preferences_allow_more_and_more() -> None:
    """What is preferred is what may be paid."""
    assert 1 < COST_CAPS["speed"] < COST_CAPS["balanced"] < COST_CAPS["memory"]


def test_a_codec_that_hardly_shrinks_is_not_worth_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then slices stay raw, and as fast as memory."""
    poor = MeasuredCodec(Codec(Method.LZ4, 0, Transform(1296)), 1.05, 0.1)
    monkeypatch.setattr(choice, "measure", lambda *_, **__: [poor])
    assert choose(NativeCoder(), FRAME, WHOLE, noise(3), ANY_COST, 1).method is Method.STORED


class SlowZstd(NativeCoder):
    """Has much to do for each unit of Zstandard's."""

    def count_work(self, sealed: SealedSlices, units: NDArray[np.int64]) -> NDArray[np.int64]:
        return super().count_work(sealed, units) + (100_000 if sealed.codec.method is Method.ZSTD else 0)


def test_the_time_to_decode_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coder that is slow at one method is not asked for it where speed counts, and is where memory does."""
    slices = (games(64) // 64) * 64
    coder = SlowZstd()
    slow = {m.codec.method: m.decode_us for m in measure(coder, FRAME, WHOLE, slices)}
    assert slow[Method.ZSTD] > 300 > slow[Method.LZ4]
    assert choose(coder, FRAME, WHOLE, slices, ANY_COST, 1).method is Method.ZSTD
    monkeypatch.setattr(choice, "raw_us", lambda *_: 1.0)
    assert choose(coder, FRAME, WHOLE, slices, 300, 1).method is not Method.ZSTD


# ---------------------------------------------------------------- the slices


@pytest.mark.parametrize("count", [1, 2, 31, 300])
def test_noise_stays_raw(coder: Coder, count: int) -> None:
    """Nothing pays, at any price."""
    assert choose(coder, FRAME, WHOLE, noise(count), ANY_COST, 1) == Codec(Method.STORED, 0, Transform(FRAME.nbytes))


def test_frames_that_have_much_in_common_get_a_dictionary(coder: Coder) -> None:
    """Each alone is noise; told what they share, next to nothing is left of them."""
    frames = games(300)
    codec = choose(coder, FRAME, WHOLE, frames, ANY_COST, 1)
    assert codec.dictionary is not None
    assert ratio_of(coder, frames, replace(codec, dictionary=None, group=1)) < 1.1
    assert ratio_of(coder, frames, replace(codec, group=1)) > 8
    assert choose(coder, FRAME, WHOLE, frames, ANY_COST, 1, has_dictionary=False).dictionary is None


def test_neighbours_that_resemble_each_other_are_compressed_together(coder: Coder) -> None:
    """Each is noise, with nothing in common with the rest of the block, and nearly the same as the one before."""
    generator = np.random.default_rng(0)
    scenes = generator.integers(0, 256, (20, 1, FRAME.nbytes), np.uint8).repeat(16, axis=1)
    scenes[:, :, :16] = generator.integers(0, 256, (20, 16, 16), np.uint8)
    frames = scenes.reshape(320, -1)
    codec = choose(coder, FRAME, WHOLE, frames, ANY_COST, 1)
    assert codec.group > 1
    assert ratio_of(coder, frames, codec) > 3
    assert ratio_of(coder, frames, replace(codec, group=1, dictionary=None)) < 1.1


def slow_scenes(count: int, changed: int) -> Bytes:
    """Draw frames of noise of which so many bytes change from one to the next, in one place that moves."""
    generator = np.random.default_rng(5)
    frames = generator.integers(0, 256, (1, FRAME.nbytes), np.uint8).repeat(count, axis=0)
    for number in range(1, count):
        frames[number] = frames[number - 1]
        place = 7 * number % (FRAME.nbytes - changed)
        frames[number, place : place + changed] = generator.integers(0, 256, changed)
    return frames


def test_neighbours_that_change_little_are_coded_as_changes(coder: Coder) -> None:
    """As many together as are tried: what a slice takes to decode does not grow with the bytes of all of them."""
    frames = slow_scenes(640, 4)
    codec = choose(coder, FRAME, WHOLE, frames, COST_CAPS["balanced"], 2)
    assert codec.is_of_changes, codec
    assert codec.group == 64
    whole = replace(codec, transform=Transform(FRAME.nbytes))
    assert ratio_of(coder, frames, codec) > 1.1 * ratio_of(coder, frames, whole)
    known = {m.codec: m for m in measure(coder, FRAME, WHOLE, frames)}
    sample = BlockSample.of(frames, WHOLE)
    alone = max(known.values(), key=lambda m: m.ratio)
    groups = {m.codec.group: m for m in measure_together(coder, [alone], WHOLE, sample)}
    assert choice.measure_changes(coder, FRAME, WHOLE, sample, alone)[0].decode_us < groups[16].decode_us


def test_neighbours_that_change_altogether_are_not(coder: Coder) -> None:
    """There is nothing to spare then; nor where too few of them lie side by side."""
    frames = games(300)
    assert not choose(coder, FRAME, WHOLE, frames, ANY_COST, 1).is_of_changes
    alone = MeasuredCodec(Codec(Method.LZ4, 7, Transform(FRAME.nbytes)), 1.0, 1.0)
    few = BlockSample.of(slow_scenes(40, 4), WHOLE)
    assert choice.measure_changes(coder, FRAME, WHOLE, few, alone) == []


@pytest.mark.parametrize("lanes", [63, 64, 200])
def test_changes_are_tried_only_where_a_transition_reaches_no_further(lanes: int) -> None:
    """Where lanes are sealed in turn, its slices are apart by those of all other lanes."""
    frames = slow_scenes(640, 4)
    assert len(BlockSample.of(frames, WHOLE, lanes).changing) == (5 if lanes < 64 else 0)
    assert choose(NativeCoder(), FRAME, WHOLE, frames, COST_CAPS["balanced"], 1, lanes, has_dictionary=False).is_sound


def test_few_slices_stand_for_all_of_a_block() -> None:
    """Slices that happen to shrink better than others do not make groups of them look better than the same alone."""
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (512, FRAME.nbytes), np.uint8)
    frames[:, ::2] = 0
    coder, window = chosen_kernels().coder, WHOLE
    codec = Codec(Method.ZSTD, 3, Transform(FRAME.nbytes))
    alone = MeasuredCodec(codec, ratio_of(coder, frames, codec), 1.0)
    sample = BlockSample.of(frames, window)
    easy = replace(sample, near=np.ascontiguousarray(np.zeros_like(sample.near)))
    for each in (sample, easy):
        each.near[:, :, :600] = generator.integers(0, 256, (*each.near.shape[:2], 600))
        group = measure_together(coder, [alone], window, each)[0]
        assert group.ratio < 1.2 * alone.ratio


def test_slices_are_measured_in_the_order_in_which_they_are_sealed(coder: Coder) -> None:
    """The frames of four lanes that take turns have nothing in common, unless they are sorted by lane."""
    frames = noise(4).repeat(64, axis=0)
    order = np.arange(256).reshape(64, 4).T.reshape(-1).astype(np.uint32)
    in_turn = np.empty_like(frames)
    in_turn[order] = frames
    alone = MeasuredCodec(Codec(Method.ZSTD, 1, Transform(FRAME.nbytes)), 1.0, 1.0)
    samples = [BlockSample.of(in_turn, WHOLE, 4, each) for each in (order, None)]
    by_lane, mixed = (measure_together(coder, [alone], WHOLE, sample)[0] for sample in samples)
    assert by_lane.ratio > 3 * mixed.ratio


def test_lanes_in_turn_are_not_neighbours(coder: Coder) -> None:
    """What a batch reads of one lane lies in many groups then, and that is what is counted."""
    alone = MeasuredCodec(Codec(Method.ZSTD, 3, Transform(FRAME.nbytes)), 2.0, 1.0)
    costs = {}
    for lanes in (1, 7):
        group = measure_together(coder, [alone], WHOLE, BlockSample.of(noise(256), WHOLE, lanes))[0]
        assert group.codec.group == 4
        costs[lanes] = group.decode_us
    # Two neighbours lie in one group of 4 three times in four; two that are 7 apart never do.
    assert costs[7] / costs[1] == pytest.approx(2 / 1.25, rel=0.1)


def test_a_dictionary_is_measured_on_frames_that_it_does_not_know(coder: Coder) -> None:
    """Otherwise noise would seem to shrink: a dictionary can hold the very frames it was trained on."""
    assert train(coder, Codec(Method.ZSTD, 3, Transform(FRAME.nbytes)), noise(300)) is None
    known = [m for m in measure(coder, FRAME, WHOLE, noise(64)) if m.codec.dictionary]
    assert all(m.ratio < 1.1 for m in known)


def test_the_best_prediction_is_measured_with_a_dictionary_of_differences(coder: Coder) -> None:
    """Slopes that come back in other places and heights are alike as differences only."""
    generator = np.random.default_rng(3)
    slopes = generator.integers(0, 4, (20, 12))
    rows = slopes[generator.integers(0, 20, (96, 36, 3))].reshape(96, 36, 36).cumsum(axis=2)
    slices = (rows + generator.integers(0, 256, (96, 1, 1))).astype(np.uint8).reshape(96, -1)
    found = measure(coder, FRAME, WHOLE, slices)
    by_lz4 = [m for m in found if m.codec.method is Method.LZ4 and m.codec.transform.predictor is Predictor.LEFT]
    known = [m for m in by_lz4 if m.codec.dictionary is not None]
    assert len(known) == 1
    assert known[0].ratio > 1.1 * max(m.ratio for m in by_lz4 if m.codec.dictionary is None)
    assert not [m for m in measure(coder, FRAME, WHOLE, slices, has_dictionary=False) if m.codec.dictionary]


def test_floats_that_take_few_values_are_numbered(coder: Coder) -> None:
    """An image scaled to floats shrinks to its bytes, and from there on as an image does."""
    leaf = Leaf("", (36, 36), np.dtype("f4"))
    pixels = np.random.default_rng(0).integers(0, 3, (64, 36, 36)).cumsum(axis=2) % 256
    slices = (pixels.astype(np.uint8) / np.float32(255)).reshape(64, -1).view(np.uint8)
    codec = choose(coder, leaf, Window.whole(leaf), slices, ANY_COST, 1)
    assert codec.transform.word_bytes == 4
    assert codec.transform.predictor
    assert ratio_of(coder, slices, codec) > 7


def test_a_field_of_too_many_words_does_without_a_palette(coder: Coder) -> None:
    """What a coder refuses is no candidate."""
    leaf = Leaf("", (400,), np.dtype("f4"))
    slices = np.random.default_rng(0).normal(size=(64, 400)).astype("f4").view(np.uint8)
    assert {m.codec.transform.word_bytes for m in measure(coder, leaf, Window.whole(leaf), slices)} == {0}


TILED = Leaf("", (3, 24, 24), np.dtype("u1"))


def tiles(count: int, colours: int) -> Bytes:
    """Draw scenes of columns of noise in some colours, which move sideways."""
    generator = np.random.default_rng(9)
    palette = generator.integers(0, 256, (colours, 3), np.uint8)
    kinds = generator.integers(0, colours, (24, 12))
    strip = kinds[:, generator.integers(0, 12, count + 24)]
    frames = np.stack([strip[:, i : i + 24] for i in range(count)])
    return np.ascontiguousarray(palette[frames].transpose(0, 3, 1, 2)).reshape(count, -1)


def test_images_of_few_colours_are_numbered_by_columns_if_these_repeat(coder: Coder) -> None:
    """And a dictionary of numbers begins with the palette that they are of."""
    slices = tiles(300, 40)
    codec = choose(coder, TILED, Window.whole(TILED), slices[::2].copy(), COST_CAPS["balanced"], threads=2)
    assert codec.transform.predictor is Predictor.COLUMNS, codec
    assert codec.is_sound
    assert ratio_of(coder, slices[1::2].copy(), codec) > 5


def test_images_of_too_many_colours_are_not_numbered(coder: Coder) -> None:
    """One slice of them is enough."""
    slices = tiles(300, 40)
    assert any(m.codec.is_of_colours for m in measure(coder, TILED, Window.whole(TILED), slices))
    slices[1::2] = np.random.default_rng(0).integers(0, 256, slices[1::2].shape, np.uint8)
    assert not any(m.codec.is_of_colours for m in measure(coder, TILED, Window.whole(TILED), slices))


def test_what_was_measured_is_what_sealing_gives(coder: Coder) -> None:
    """Ratios are those of the samples themselves, with offsets and palette."""
    slices = games(40)
    for result in measure(coder, FRAME, WHOLE, slices):
        odd = np.ascontiguousarray(slices[1::2])
        assert result.ratio == pytest.approx(ratio_of(coder, odd, result.codec))
        assert result.decode_us > 0


# ---------------------------------------------------------------- whatever else the machine does


def scenes(count: int) -> Bytes:
    """Draw frames that resemble their neighbours, so that groups of several sizes come near to the cap."""
    generator = np.random.default_rng(2)
    frames = (generator.integers(0, 6, (count // 16 + 1, 1, FRAME.nbytes), np.uint8) * 40).repeat(16, axis=1)
    frames = frames.reshape(-1, FRAME.nbytes)[:count].copy()
    for number, place in enumerate(generator.integers(0, FRAME.nbytes - 60, count)):
        frames[number, place : place + 60] = generator.integers(0, 256, 60)
    return frames


@pytest.mark.parametrize("prefer", COST_CAPS)
@pytest.mark.parametrize("frames", [scenes, games], ids=["scenes", "games"])
def test_the_choice_asks_no_clock(coder: Coder, frames: Any, prefer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time varies when other processes share a core or its caches; what is counted does not."""

    def asked() -> float:
        raise AssertionError("a clock was asked")

    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(f"time.{clock}", asked)
    window = replace(WHOLE, count=4)
    first, again = (choose(coder, FRAME, window, frames(300), COST_CAPS[prefer], 2) for _ in range(2))
    assert describe(first) == describe(again)


def test_one_codec_is_chosen_beside_busy_processes() -> None:
    """Quiet or loaded, again and again."""
    slices, coder, window = scenes(300), chosen_kernels().coder, replace(WHOLE, count=4)
    burn = "import numpy as np\na = np.zeros(30_000_000, np.uint8)\nwhile True: a.copy(), sum(range(20_000))"

    def chosen() -> set[str]:
        return {describe(choose(coder, FRAME, window, slices, cap, 2)) + str(cap) for cap in COST_CAPS.values()}

    quiet = chosen()
    busy = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(3)]
    try:
        loaded = chosen() | chosen()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert quiet == loaded
    assert len(quiet) == len(COST_CAPS)


@given(st.binary(min_size=1, max_size=3000), st.integers(1, 300), st.booleans())
def test_what_decoding_has_to_do_is_counted(text: bytes, repeats: int, by_zstd: bool) -> None:
    """As many sequences as the formats' own definitions give, for any content: long matches, long literals, none."""
    content = (text * repeats)[:70_000] + text[::-1]
    coder = chosen_kernels().coder
    codec = Codec(Method.ZSTD if by_zstd else Method.LZ4, 3 if by_zstd else 0, Transform(len(content)))
    sealed = coder.seal(np.frombuffer(content, np.uint8).reshape(1, -1), codec)
    assert sealed is not None
    sequences, literals, tables = coder.count_work(sealed, np.zeros(1, np.int64))[0].tolist()
    if sealed.coded.data.nbytes == len(content):  # stored as it is
        assert (sequences, literals, tables) == (0, 0, 0)
    elif by_zstd:
        assert 0 <= sequences <= len(content) // 3 + 1
        assert 0 <= literals <= len(content)
        assert tables <= 1 + len(content) // 2**17
    else:
        assert sequences == sequences_by_definition(unit_of(sealed.coded, 0))
        assert (literals, tables) == (0, 0)


@given(st.integers(0, 255), st.integers(0, 400), st.booleans())
def test_damaged_units_are_counted_without_reading_beyond_them(value: int, place: int, by_zstd: bool) -> None:
    """Whatever stands there, and for units that are not there."""
    coder = chosen_kernels().coder
    codec = Codec(Method.ZSTD if by_zstd else Method.LZ4, 3 if by_zstd else 0, Transform(FRAME.nbytes))
    sealed = coder.seal(games(2) // 64, codec)
    assert sealed is not None
    data = np.array(sealed.coded.data)
    data[place % len(data)] = value
    harmed = coder.adopt(replace(sealed.coded, data=data))
    work = coder.count_work(harmed, np.array([0, 1, 2, -1, 2**40]))
    assert (work >= 0).all()
    assert not work[2:].any()


def sequences_by_definition(packed: bytes) -> int:
    """Walk through an LZ4 block byte by byte."""
    stream, found = iter(packed), 0
    for token in stream:
        found += 1
        lengths = [token >> 4, token & 15]
        for which, length in enumerate(lengths):
            while length == 15 and (more := next(stream)) is not None:
                lengths[which] += more
                if more < 255:
                    break
            if which == 0 and len([*itertools.islice(stream, lengths[0] + 2)]) < lengths[0] + 2:
                break
    return found


def test_a_quick_codec_is_the_best_of_the_fast_ones(coder: Coder) -> None:
    """For slices that must not wait for a choice: LZ4 behind the transform that suits them, whatever they hold."""
    ramp = (np.arange(36)[:, None] * 5 + np.arange(36) * 3).astype(np.uint8)
    smooth = np.stack([(ramp + i).reshape(-1) for i in range(20)])
    quick = choose_fast_preset(coder, FRAME, WHOLE, smooth)
    assert (quick.method, quick.level) == (Method.LZ4, 0)
    assert quick.transform.predictor
    assert ratio_of(coder, smooth, quick) > ratio_of(coder, smooth, Codec(Method.LZ4, 0, Transform(FRAME.nbytes)))
    assert choose_fast_preset(coder, FRAME, WHOLE, noise(1)).method is Method.LZ4


def test_a_block_may_be_given_up_while_a_codec_is_chosen(coder: Coder) -> None:
    """What is chosen by is copied; the same codec comes of it, whatever happens to the block."""
    frames = scenes(300)
    chosen = choose(coder, FRAME, WHOLE, frames, ANY_COST, 1)
    sample = BlockSample.of(frames, WHOLE)
    frames[:] = 0
    again = choose(coder, FRAME, WHOLE, sample, ANY_COST, 1)
    assert describe(chosen) == describe(again)


def test_a_choice_says_why() -> None:
    """How much smaller, and what it costs; or that nothing pays."""
    coder = chosen_kernels().coder
    codec = choose(coder, FRAME, WHOLE, games(300), ANY_COST, 1)
    assert re.fullmatch(r"\d+\.\d times smaller, decoded in \d+\.\d of [\d.]+ raw copies", codec.reason)
    assert choose(coder, FRAME, WHOLE, noise(40), 2.0, 1).reason.startswith("raw, since nothing decoded in 2.0 raw")


def test_choosing_takes_little_memory_whatever_the_size_of_a_slice() -> None:
    """A block of large frames has few of them; copies of all would take more than is promised beside transitions."""
    leaf = Leaf("", (256, 280, 3), np.dtype("u1"))
    slices = np.random.default_rng(0).integers(0, 3, (78, leaf.nbytes), np.uint8)
    tracemalloc.start()
    choose(chosen_kernels().coder, leaf, Window.whole(leaf), slices, 2.0, 2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 24 * 2**20, f"{most / 2**20:.0f} MiB"


@pytest.mark.parametrize("prefer", COST_CAPS)
def test_time_does_not_matter_among_codecs_that_are_quick_enough(prefer: str) -> None:
    """What is decoded in less than half a raw copy is chosen by its size; beyond that, time counts."""
    cap = COST_CAPS[prefer]
    worth = choice._Worth(cap, 1.0, cap)
    codec = Codec(Method.LZ4, 7, Transform(100))
    smaller, quicker = MeasuredCodec(codec, 10.1, 0.49), MeasuredCodec(codec, 10.0, 0.2)
    assert worth.of(smaller) > worth.of(quicker)
    slower = MeasuredCodec(codec, 10.0, 0.9)
    assert worth.of(quicker) > worth.of(slower)

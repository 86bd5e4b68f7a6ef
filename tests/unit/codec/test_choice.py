"""The choice of a codec: what is promised for every field, and what must not change the decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall._native import Block, Coded, Raw, decode
from holdall.codec.choice import FieldCodec
from holdall.codec.codec import Codec, Method
from holdall.codec.presets import Kind, find_kind, list_codecs, list_kinds
from holdall.schema import Leaf
from holdall.store.tuning import Tuning
from holdall.store.windows import Window

Bytes = NDArray[np.uint8]
COUNT = 160


def moving_square(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    frames = np.full((COUNT, *shape), rng.integers(0, 256, shape[-1:], np.uint8), np.uint8)
    for number, frame in enumerate(frames):
        frame[..., number % 20 : number % 20 + 4, 3:9] = rng.integers(0, 256)
    return frames


def smooth_noise(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    steps = rng.integers(-2, 3, (COUNT, int(np.prod(shape))))
    return np.cumsum(steps, axis=1).astype(np.uint8).reshape(COUNT, *shape)


def few_floats(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.choice(np.array([0.0, 0.5, -0.0, np.nan], np.float32), (COUNT, *shape))


def noise(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.integers(0, 256, (COUNT, *shape), np.uint8)


def constant(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    frames = np.full((COUNT, *shape), 7, np.uint8)
    frames.reshape(COUNT, -1)[:, :2] = np.arange(COUNT)[:, None]
    return frames


def floats(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return rng.normal(size=(COUNT, *shape))


FIELDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "grey image": (moving_square, (84, 84)),
    "colour image": (moving_square, (32, 32, 3)),
    "colours and opacity": (moving_square, (32, 32, 4)),
    "planes": (moving_square, (3, 32, 32)),
    "camera": (smooth_noise, (3, 24, 24)),
    "few floats": (few_floats, (40, 30)),
    "floats": (floats, (300,)),
    "noise": (noise, (30, 30)),
    "constant": (constant, (5000,)),
    "one byte": (noise, (1,)),
}


def field(name: str, seed: int = 0) -> tuple[Leaf, Window, Bytes]:
    make, shape = FIELDS[name]
    frames = make(shape, np.random.default_rng(seed))
    leaf = Leaf(name, shape, frames.dtype)
    return leaf, Window.whole(leaf), np.ascontiguousarray(frames).view(np.uint8).reshape(COUNT, -1)


def block_of(slices: Bytes) -> Block:
    return Block(slices.shape[1], len(slices), slices)


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("prefer", ["speed", "balanced", "memory"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_block_comes_back_bit_for_bit_and_does_not_grow(name: str, prefer: str, is_behind: bool) -> None:
    leaf, window, slices = field(name)
    codec = FieldCodec(leaf, window, prefer, Tuning())
    for count in (0, COUNT, 1, 7):
        coded = codec.encode(block_of(slices[:count]), is_behind)
        assert decode(coded, 0, count).tobytes() == slices[:count].tobytes()
        tables = coded.offsets.nbytes + coded.palette.nbytes
        assert coded.nbytes <= slices[:count].nbytes + tables


@pytest.mark.parametrize("name", ["grey image", "colour image", "planes", "few floats", "constant"])
def test_repetitive_slices_become_much_smaller(name: str) -> None:
    leaf, window, slices = field(name)
    coded = FieldCodec(leaf, window, "balanced", Tuning()).encode(block_of(slices), is_behind=False)
    assert coded.nbytes * 5 < slices.nbytes


@pytest.mark.parametrize("prefer", ["speed", "balanced", "memory"])
def test_noise_is_stored_as_it_is(prefer: str) -> None:
    leaf, window, slices = field("noise")
    codec = FieldCodec(leaf, window, prefer, Tuning())
    assert codec.encode(block_of(slices), is_behind=False).codec == Codec(slices.shape[1])
    assert codec.describe().startswith("uncompressed")


@pytest.mark.parametrize("name", FIELDS)
def test_the_same_data_gets_the_same_bytes(name: str) -> None:
    """Also if the worker was behind when the first block came."""
    leaf, window, slices = field(name)
    _, _, later = field(name, seed=1)
    first = FieldCodec(leaf, window, "balanced", Tuning())
    first.encode(block_of(slices), is_behind=False)
    hurried = FieldCodec(leaf, window, "balanced", Tuning())
    hurried.encode(block_of(slices), is_behind=True)
    one = first.encode(block_of(later), is_behind=False)
    other = hurried.encode(block_of(later), is_behind=False)
    assert one.codec == other.codec
    assert one.data is not None
    assert other.data is not None
    assert one.data.tobytes() == other.data.tobytes()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grey image", Kind.GREY),
        ("colour image", Kind.FEW_COLOURS),
        ("colours and opacity", Kind.COLOURS),
        ("planes", Kind.FEW_COLOURS),
        ("camera", Kind.COLOURS),
        ("few floats", Kind.FEW_WORDS),
        ("floats", Kind.WORDS),
        ("noise", Kind.GREY),
        ("constant", Kind.BYTES),
        ("one byte", Kind.BYTES),
    ],
)
def test_presets_are_those_of_the_kind_of_the_slices(name: str, kind: Kind) -> None:
    leaf, window, slices = field(name)
    assert find_kind(leaf, window, slices) is kind
    chosen = FieldCodec(leaf, window, "balanced", Tuning()).encode(block_of(slices), is_behind=False).codec
    presets = list(list_codecs(kind, leaf, window))
    assert replace(chosen, dictionary=None) in [*presets, Codec(slices.shape[1])]


def test_every_kind_has_a_preset_of_single_slices_for_blocks_of_few_large_slices() -> None:
    for shape, dtype in (((2000, 2000), "u1"), ((2000, 2000, 3), "u1"), ((1000, 1000), "f4"), ((6_000_000,), "u1")):
        leaf = Leaf("large", shape, np.dtype(dtype))
        window = Window.whole(leaf)
        for kind in list_kinds(leaf, window):
            assert any(codec.group == 1 for codec in list_codecs(kind, leaf, window)), kind


def test_a_fast_codec_is_used_while_the_worker_is_behind() -> None:
    leaf, window, slices = field("camera")
    coded = FieldCodec(leaf, window, "memory", Tuning()).encode(block_of(slices), is_behind=True)
    assert coded.codec.method is Method.LZ4
    assert coded.codec.level == 0
    assert coded.codec.dictionary is None


def test_a_codec_that_compresses_fast_is_used_while_the_worker_is_behind() -> None:
    leaf, window, slices = field("constant")
    codec = FieldCodec(leaf, window, "balanced", Tuning())
    chosen = codec.encode(block_of(slices), is_behind=False).codec
    assert codec.encode(block_of(slices), is_behind=True).codec == chosen
    leaf, window, slices = field("camera")
    codec = FieldCodec(leaf, window, "balanced", Tuning())
    chosen = codec.encode(block_of(slices), is_behind=False).codec
    assert codec.encode(block_of(slices), is_behind=True).codec != chosen


def test_the_codec_is_chosen_while_the_worker_is_behind_for_long() -> None:
    leaf, window, slices = field("constant")
    codec = FieldCodec(leaf, window, "balanced", Tuning(max_hurried_blocks=3))
    hurried = [codec.encode(block_of(slices), is_behind=True).codec for _ in range(3)]
    chosen = codec.encode(block_of(slices), is_behind=True).codec
    assert chosen not in hurried
    assert chosen == codec.encode(block_of(slices), is_behind=False).codec


def test_the_codec_is_chosen_again_when_blocks_compress_much_worse() -> None:
    leaf, window, slices = field("constant")
    codec = FieldCodec(leaf, window, "balanced", Tuning(codec_rest_blocks=2))
    chosen = codec.encode(block_of(slices), is_behind=False).codec
    noisy = np.random.default_rng(1).integers(0, 256, slices.shape, np.uint8)
    for _ in range(4):
        codec.encode(block_of(noisy), is_behind=False)
    assert codec.describe().startswith("uncompressed")
    for _ in range(4):
        later = codec.encode(block_of(slices), is_behind=False).codec
    assert later == chosen


def test_the_codec_is_chosen_again_when_the_first_block_was_very_small() -> None:
    leaf, window, slices = field("grey image")
    at_once = FieldCodec(leaf, window, "balanced", Tuning())
    later = FieldCodec(leaf, window, "balanced", Tuning())
    later.encode(block_of(slices[:3]), is_behind=False)
    assert later.encode(block_of(slices), False).codec == at_once.encode(block_of(slices), False).codec


def test_slices_with_too_many_words_for_the_palette_are_still_compressed() -> None:
    leaf, window, slices = field("few floats")
    codec = FieldCodec(leaf, window, "balanced", Tuning())
    codec.encode(block_of(slices), is_behind=False)
    words = np.repeat(np.arange(COUNT * 3, dtype=np.float32), slices.shape[1] // 12).reshape(COUNT, -1)
    other = words.view(np.uint8)
    coded = codec.encode(block_of(other), is_behind=False)
    assert decode(coded, 0, COUNT).tobytes() == other.tobytes()
    assert coded.nbytes * 4 < other.nbytes


def test_a_block_may_take_the_result_as_its_form() -> None:
    leaf, window, slices = field("planes")
    block = block_of(slices)
    assert isinstance(block.form, Raw)
    block.form = FieldCodec(leaf, window, "balanced", Tuning()).encode(block, is_behind=False)
    assert isinstance(block.form, Coded)

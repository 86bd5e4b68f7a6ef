"""Which codecs are worth measuring follows from a field's dtype and the shape of its slices."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdall.schema import Leaf
from holdall.storage.blocks import Codec, Dictionary, Method, Predictor, Transform
from holdall.storage.codec import candidates, describe, wants_dictionary
from holdall.storage.slices import Window
from holdall.testing.strategies import dtypes


def transforms_of(shape: tuple[int, ...], dtype: str = "u1", axis: int | None = None, step: int = 1) -> list[Transform]:
    """Return the transforms proposed for a leaf that slides along `axis`, each once."""
    leaf = Leaf("", shape, np.dtype(dtype))
    window = Window.whole(leaf) if axis is None else Window.along(leaf, axis, step)
    return list(dict.fromkeys(codec.transform for codec in candidates(leaf, window)))


def image_of(transforms: list[Transform]) -> tuple[int, int, int, bool, bool] | None:
    """Return planes, rows, columns, interleaved and green of the image that is predicted, if one is."""
    plain = {Predictor.NOTHING, Predictor.PIXELS}
    predicted = [form for form in transforms if form.predictor not in plain and not form.is_of_colours]
    if not predicted:
        return None
    assert [form.predictor for form in predicted] == [Predictor.LEFT, Predictor.UP]
    form = predicted[0]
    return form.planes, form.rows, form.columns, form.interleaved, form.green


@pytest.mark.parametrize(
    ("shape", "axis", "step", "image"),
    [
        pytest.param((4, 84, 80), 0, 1, (1, 84, 80, False, False), id="stack on the first axis"),
        pytest.param((84, 80, 4), 2, 1, (1, 84, 80, False, False), id="stack on the last axis"),
        pytest.param((84, 80, 12), 2, 3, (3, 84, 80, True, True), id="stack of RGB on the last axis"),
        pytest.param((12, 84, 80), 0, 3, (3, 84, 80, False, True), id="stack of RGB on the first axis"),
        pytest.param((4, 84, 80, 3), 0, 1, (3, 84, 80, True, True), id="stack of RGB images"),
        pytest.param((84, 80, 3), None, 1, (3, 84, 80, True, True), id="RGB, channels last"),
        pytest.param((3, 84, 80), None, 1, (3, 84, 80, False, True), id="RGB, channels first"),
        pytest.param((84, 80, 4), None, 1, (4, 84, 80, True, False), id="four channels last"),
        pytest.param((4, 84, 80), None, 1, (4, 84, 80, False, False), id="four channels first"),
        pytest.param((84, 80), None, 1, (1, 84, 80, False, False), id="grey"),
        pytest.param((84, 80, 1), None, 1, (1, 84, 80, False, False), id="grey with an axis of one"),
        pytest.param((1, 84, 80), None, 1, (1, 84, 80, False, False), id="grey with a first axis of one"),
        pytest.param((7056,), None, 1, None, id="vector"),
        pytest.param((504, 60), 0, 1, None, id="rows of a market"),
        pytest.param((84, 7), None, 1, None, id="too narrow"),
        pytest.param((7, 84), None, 1, None, id="too low"),
        pytest.param((2, 2, 84, 84), None, 1, None, id="four axes"),
    ],
)
def test_slices_that_look_like_images_are_predicted(
    shape: tuple[int, ...], axis: int | None, step: int, image: tuple[int, int, int, bool, bool] | None
) -> None:
    """Rows, columns and channels are those of a slice, wherever the stack's axis and the channels lie."""
    for dtype in ("u1", "?", "i1"):
        assert image_of(transforms_of(shape, dtype, axis, step)) == image


def test_bytes_have_no_palette_and_no_shuffle() -> None:
    """Both are about words."""
    for dtype in ("u1", "i1", "?"):
        for form in transforms_of((84, 84), dtype):
            assert (form.word_bytes, form.shuffle) == (0, 0)


@pytest.mark.parametrize("dtype", ["f2", "u2", "f4", "i4", "f8", "i8"])
def test_words_are_shuffled_or_numbered(dtype: str) -> None:
    """A few different words, as in an image scaled to floats, are numbered; their image is then predicted."""
    size = np.dtype(dtype).itemsize
    vector = transforms_of((500,), dtype)
    assert vector == [Transform(500 * size), Transform(500 * size, shuffle=size), Transform(500 * size, size)]
    image = transforms_of((3, 20, 30), dtype)
    assert image_of(image) == (3, 20, 30, False, True)
    assert all(form.word_bytes == size for form in image if form.predictor)


def test_every_transform_is_measured_with_every_method() -> None:
    """Fast and dense LZ4, and Zstandard."""
    leaf = Leaf("", (3, 20, 30), np.dtype("f4"))
    tried = candidates(leaf, Window.whole(leaf))
    for form in {codec.transform for codec in tried}:
        methods = [(codec.method, codec.level > 0) for codec in tried if codec.transform == form]
        assert methods == [(Method.LZ4, False), (Method.LZ4, True), (Method.ZSTD, True)]
    assert not [codec for codec in tried if codec.dictionary]


@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple), dtype=dtypes, data=st.data())
def test_what_is_predicted_is_all_of_a_slice(
    shape: tuple[int, ...], dtype: np.dtype[np.generic], data: st.DataObject
) -> None:
    """Planes, rows and columns make up the bytes that are coded, words fill the slice: the loops go by that."""
    leaf = Leaf("", shape, dtype)
    axis = data.draw(st.integers(0, len(shape) - 1))
    step = data.draw(st.integers(1, shape[axis]))
    for window in (Window.whole(leaf), Window.along(leaf, axis, step)):
        for codec in candidates(leaf, window):
            form = codec.transform
            assert form.slice_bytes == window.slice_bytes
            in_one = 3 if form.is_of_colours else max(form.word_bytes, 1)
            assert form.is_sound()
            assert form.coded_bytes * in_one == form.slice_bytes
            assert form.slice_bytes % max(form.shuffle, 1) == 0
            if form.predictor:
                pixels = prod((form.planes, form.rows, form.columns))
                assert pixels == (form.slice_bytes if form.is_of_colours else form.coded_bytes)
                assert not form.green or form.planes >= 3
                assert not form.shuffle, "predictor and shuffle are undone in one order only"


def test_a_dictionary_is_wanted_for_small_slices_that_are_not_predicted() -> None:
    """Large slices fill a compressor's window by themselves, and differences have nothing in common."""
    small, large = Transform(7056), Transform(100_000)
    predicted = Transform(7056, 0, Predictor.LEFT, 1, 84, 84)
    assert wants_dictionary(Codec(Method.ZSTD, 3, small))
    assert not wants_dictionary(Codec(Method.LZ4, 0, small))
    assert not wants_dictionary(Codec(Method.ZSTD, 3, large))
    assert not wants_dictionary(Codec(Method.ZSTD, 3, predicted))


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (Codec(Method.STORED, 0, Transform(9)), "raw"),
        (Codec(Method.LZ4, 0, Transform(9)), "lz4"),
        (Codec(Method.LZ4, 5, Transform(12, shuffle=4)), "shuffle+lz4hc5"),
        (Codec(Method.ZSTD, 3, Transform(9), Dictionary(b"x")), "zstd3 with dictionary"),
        (Codec(Method.ZSTD, 3, Transform(48, 4, Predictor.UP, 3, 2, 2, green=True)), "palette+green+up+zstd3"),
    ],
    ids=str,
)
def test_a_codec_says_what_it_does(codec: Codec, words: str) -> None:
    """Reports show it."""
    assert describe(codec) == words

"""Every codec returns the slices that it was given, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall._native import Block, decode, encode
from holdall.codec.codec import Codec, Method, Transform

Bytes = NDArray[np.uint8]
HEIGHT = 8
WIDTH = 12
IMAGE = HEIGHT * WIDTH * 3
RNG = np.random.default_rng(0)


def few_colours(count: int) -> Bytes:
    palette = RNG.integers(0, 256, (20, 3), np.uint8)
    return palette[RNG.integers(0, 20, (count, HEIGHT * WIDTH))].reshape(count, IMAGE)


def slowly_changing(count: int) -> Bytes:
    slices = np.repeat(RNG.integers(0, 256, (1, IMAGE), np.uint8), count, axis=0)
    slices[np.arange(count), RNG.integers(0, IMAGE, count)] += 1
    return slices


def floats_with_nan(count: int) -> Bytes:
    words = RNG.integers(0, 3, (count, IMAGE // 4)).astype(np.float32)
    words[0, :2] = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)
    return words.view(np.uint8)


DATA: dict[str, Bytes] = {
    "colours": few_colours(40),
    "changing": slowly_changing(40),
    "floats": floats_with_nan(40),
    "noise": RNG.integers(0, 256, (7, IMAGE), np.uint8),
    "constant": np.zeros((3, IMAGE), np.uint8),
    "one": few_colours(1),
}
PLAIN = Codec(IMAGE)
PICTURE = replace(PLAIN, planes=3, rows=HEIGHT, columns=WIDTH, is_interleaved=True)
CODECS: dict[str, Codec] = {
    "stored": PLAIN,
    "palette": replace(PLAIN, word_bytes=4),
    "shuffle": replace(PLAIN, shuffle_bytes=4),
    "left": replace(PICTURE, transform=Transform.LEFT, subtracts_green=True),
    "pixels": replace(PICTURE, transform=Transform.PIXELS, is_interleaved=False),
    "colours": replace(PICTURE, transform=Transform.COLOURS),
    "colour columns": replace(PICTURE, transform=Transform.COLOUR_COLUMNS),
    "changes": replace(PLAIN, transform=Transform.CHANGES),
}


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize(
    ("method", "level"), [(Method.STORED, 0), (Method.LZ4, 0), (Method.LZ4, 7), (Method.ZSTANDARD, 9)]
)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("data", DATA)
def test_slices_come_back_bit_for_bit(data: str, name: str, method: Method, level: int, group: int) -> None:
    slices = DATA[data]
    codec = replace(CODECS[name], method=method, level=level, group=group)
    coded = encode(slices, codec)
    if coded is None:  # Too many different words or colours.
        assert codec.word_bytes or codec.transform in {Transform.COLOURS, Transform.COLOUR_COLUMNS}
        return
    assert decode(coded, 0, len(slices)).tobytes() == slices.tobytes()
    last = len(slices) - 1
    assert decode(coded, last, 1).tobytes() == slices[last:].tobytes()


def test_slices_may_be_stored_in_another_order() -> None:
    slices = DATA["changing"]
    order = RNG.permutation(len(slices)).astype(np.uint32)
    coded = encode(slices, replace(PLAIN, method=Method.LZ4, group=8), order)
    assert coded is not None
    assert decode(coded, 0, len(slices)).tobytes() == slices.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"group": 0},
        {"group": 65},
        {"level": 23},
        {"word_bytes": 3},
        {"planes": 2, "transform": Transform.LEFT, "rows": 2, "columns": 2},
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        encode(DATA["one"], replace(PLAIN, **change))


def test_a_block_takes_a_form_of_its_own_slices_only() -> None:
    slices = DATA["colours"]
    block = Block(IMAGE, len(slices), slices)
    codec = replace(PLAIN, method=Method.LZ4)
    too_few = encode(slices[:39], codec)
    coded = encode(block, codec)
    assert too_few is not None
    assert coded is not None
    with pytest.raises(ValueError, match="does not have 40 slices"):
        block.form = too_few
    block.form = coded
    assert block.form is coded
    assert decode(coded, 0, len(slices)).tobytes() == slices.tobytes()

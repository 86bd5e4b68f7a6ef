"""What a codec costs to read, by which it is chosen, and how reports describe it.

The exact costs are free to change. These relations between them are not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from holdall._native import Dictionary
from holdall.codec.codec import Codec, Method, Transform
from holdall.codec.presets import describe_codec, estimate_cost
from holdall.store.windows import Window

SINGLE = Window(axis=0, unit=1, count=1, outer=1, run_bytes=7_056, shift=1)
STACK = replace(SINGLE, count=4)
PLAIN = Codec(7_056, Method.LZ4)


def cost(codec: Codec, window: Window = SINGLE) -> float:
    return estimate_cost(codec, window, 0.1)


def test_the_cost_of_single_slices_is_proportional_to_the_slices_that_are_decoded() -> None:
    """A transition of one slice decodes 2 of the 2 that it returns, one of a stack of four decodes 5 of 8."""
    assert cost(PLAIN, STACK) == pytest.approx(cost(PLAIN) * 5 / 8)


def test_every_further_slice_of_a_unit_costs_the_same() -> None:
    costs = [cost(replace(PLAIN, group=group)) for group in (1, 2, 3, 5)]
    steps = np.diff(costs) / np.diff([1, 2, 3, 5])
    assert steps[0] > 0
    assert steps == pytest.approx(steps[0])


def test_a_transform_costs_something_and_differences_to_the_left_neighbour_most() -> None:
    pixels = cost(replace(PLAIN, transform=Transform.PIXELS))
    left = cost(replace(PLAIN, transform=Transform.LEFT))
    assert cost(PLAIN) < pixels < left


def test_only_single_slices_of_lz4_pay_for_a_dictionary() -> None:
    dictionary = Dictionary(np.zeros(64, np.uint8).tobytes())
    for method, group, pays in ((Method.LZ4, 1, True), (Method.LZ4, 4, False), (Method.ZSTANDARD, 1, False)):
        codec = replace(PLAIN, method=method, group=group)
        assert (cost(replace(codec, dictionary=dictionary)) > cost(codec)) is pays


def test_a_codec_is_described_by_its_steps() -> None:
    assert describe_codec(PLAIN) == "LZ4"
    left = replace(PLAIN, method=Method.ZSTANDARD, transform=Transform.LEFT, group=4)
    assert describe_codec(left) == "left + Zstandard, 4 slices together"

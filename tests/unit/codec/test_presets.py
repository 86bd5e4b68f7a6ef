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
    """A transition of whole images decodes 2 slices and returns 2. One of stacks of four decodes 5 and returns 8."""
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


@pytest.mark.parametrize(
    ("method", "group", "has_cost"), [(Method.LZ4, 1, True), (Method.LZ4, 4, False), (Method.ZSTANDARD, 1, False)]
)
def test_a_dictionary_costs_time_only_for_single_slices_of_lz4(method: Method, group: int, has_cost: bool) -> None:
    codec = replace(PLAIN, method=method, group=group)
    dictionary = Dictionary(np.zeros(64, np.uint8).tobytes())
    assert (cost(replace(codec, dictionary=dictionary)) > cost(codec)) is has_cost


def test_a_codec_is_described_by_its_steps() -> None:
    assert describe_codec(PLAIN) == "LZ4"
    left = replace(PLAIN, method=Method.ZSTANDARD, transform=Transform.LEFT, group=4)
    assert describe_codec(left) == "left + Zstandard, 4 slices together"

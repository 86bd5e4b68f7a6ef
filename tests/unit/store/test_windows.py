"""The detector finds how observations overlap, and never finds an overlap that most pairs contradict."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Leaf
from holdall.store.tuning import Tuning
from holdall.store.windows import Window, WindowDetector

TUNING = Tuning()


def make_leaf(shape: tuple[int, ...], dtype: str = "u1") -> Leaf:
    return Leaf("", shape, np.dtype(dtype))


def make_observations(leaf: Leaf, axis: int, step: int, count: int) -> list[NDArray[Any]]:
    """Return consecutive observations that shift by `step` along `axis`, with one lane."""
    tape_shape = list(leaf.shape)
    tape_shape[axis] += step * count
    tape = np.random.default_rng(0).integers(0, 255, tape_shape).astype(leaf.dtype)
    length = leaf.shape[axis]
    return [tape.take(range(step * t, step * t + length), axis)[None] for t in range(count)]


def show_pairs(leaf: Leaf, observations: list[NDArray[Any]]) -> WindowDetector:
    detector = WindowDetector(leaf, TUNING)
    for obs, next_obs in itertools.pairwise(observations):
        detector.look(obs, next_obs)
    return detector


@pytest.mark.parametrize(
    ("shape", "dtype", "axis", "step", "layout"),
    [
        ((4, 12, 12), "u1", 0, 1, ("sliced", 4, 1, 144, 1)),
        ((12, 12, 4), "u1", 2, 1, ("sliced", 4, 144, 1, 1)),
        ((9, 9, 12), "u1", 2, 3, ("sliced", 4, 81, 3, 1)),
        ((504, 17), "f4", 0, 1, ("sliced", 504, 1, 68, 1)),
        ((8, 16, 8), "f8", 1, 1, ("sliced", 16, 8, 64, 1)),
        ((10, 9, 9), "u1", 0, 4, ("sliced", 5, 1, 162, 2)),
        ((100,), "f4", 0, 10, ("sliced", 10, 1, 40, 1)),
    ],
)
def test_the_window_of_shifting_observations_is_found(
    shape: tuple[int, ...], dtype: str, axis: int, step: int, layout: tuple[object, ...]
) -> None:
    leaf = make_leaf(shape, dtype)
    detector = show_pairs(leaf, make_observations(leaf, axis, step, TUNING.detector_min_pairs + 1))
    assert not detector.is_searching
    assert detector.window == Window.along(leaf, axis, step)
    assert detector.window.layout() == layout
    assert detector.window.slice_bytes * detector.window.count == leaf.nbytes


@pytest.mark.parametrize(
    ("shape", "step"), [((6, 9, 9), 4), ((6, 9, 9), 6)], ids=["more than half of the axis", "no overlap"]
)
def test_shifts_that_save_too_little_are_not_windows(shape: tuple[int, ...], step: int) -> None:
    leaf = make_leaf(shape)
    detector = show_pairs(leaf, make_observations(leaf, 0, step, TUNING.detector_max_pairs + 1))
    assert not detector.is_searching
    assert detector.window is None


@pytest.mark.parametrize(("broken_pairs", "is_found"), [(1, True), (2, True), (8, False), (32, False)])
def test_a_window_must_explain_most_pairs(broken_pairs: int, is_found: bool) -> None:
    leaf = make_leaf((4, 9, 9))
    observations = make_observations(leaf, 0, 1, TUNING.detector_max_pairs + 1)
    detector = WindowDetector(leaf, TUNING)
    for number, (obs, next_obs) in enumerate(itertools.pairwise(observations)):
        is_broken = number % TUNING.detector_min_pairs < broken_pairs
        detector.look(obs, 255 - next_obs if is_broken else next_obs)
    assert (detector.window is not None) is is_found


def test_equal_observations_are_no_evidence() -> None:
    leaf = make_leaf((4, 9, 9))
    detector = show_pairs(leaf, [np.zeros((1, 4, 9, 9), np.uint8)] * 100)
    assert detector.is_searching
    assert detector.window is None


def test_bytes_are_compared_and_not_values() -> None:
    leaf = make_leaf((8, 3), "f4")
    observations = make_observations(leaf, 0, 1, TUNING.detector_min_pairs + 1)
    for observation in observations:
        observation[observation < 64] = np.nan
    assert show_pairs(leaf, observations).window == Window.along(leaf, 0, 1)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0, 4)])
def test_a_field_that_cannot_shift_is_never_searched(shape: tuple[int, ...]) -> None:
    detector = WindowDetector(make_leaf(shape), TUNING)
    detector.end_segment()
    assert not detector.is_searching


def test_the_pause_doubles_after_every_search_without_a_result() -> None:
    leaf = make_leaf((6, 9, 9))
    observations = make_observations(leaf, 0, 6, TUNING.detector_max_pairs + 1)
    detector = WindowDetector(leaf, TUNING)
    pauses = []
    for _ in range(3):
        for obs, next_obs in itertools.pairwise(observations):
            detector.look(obs, next_obs)
        pauses.append(0)
        while not detector.is_searching:
            detector.end_segment()
            pauses[-1] += 1
    assert pauses == [2, 4, 8]


@pytest.mark.parametrize("window", [Window.whole(make_leaf((6, 3))), Window.along(make_leaf((6, 3)), 0, 4)])
def test_a_window_is_restored_from_json(window: Window) -> None:
    assert Window.from_json(window.to_json(), make_leaf((6, 3))) == window


@pytest.mark.parametrize(
    "value",
    [
        0,
        [],
        "axis",
        {},
        {"axis": 0},
        {"axis": 0, "step": 1, "more": 1},
        {"axis": 0, "step": 1.0},
        {"axis": True, "step": 1},
        {"axis": -1, "step": 1},
        {"axis": 2, "step": 1},
        {"axis": 0, "step": 0},
        {"axis": 0, "step": 6},
        {"axis": 1, "step": -1},
    ],
)
def test_a_corrupt_window_is_refused(value: object) -> None:
    with pytest.raises(DamageError, match="Corrupt window"):
        Window.from_json(value, make_leaf((6, 3)))

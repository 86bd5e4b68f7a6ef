"""The scout finds how observations overlap, and never sees an overlap where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from holdall.schema import Bytes, Leaf
from holdall.storage.slices import Window, WindowScout
from holdall.testing import LeafPlan, Mishaps, Stream
from holdall.testing.strategies import box
from holdall.testing.streams import Padding


def scouted(
    shape: tuple[int, ...],
    plan: LeafPlan,
    mishaps: Mishaps | None = None,
    dtype: str = "u1",
    lanes: int = 1,
    ticks: int = 60,
) -> WindowScout:
    """Show a scout some ticks of a stream, until it is done."""
    stream = Stream(
        box(shape, dtype), spaces.Discrete(2), lanes, plans=[plan], mishaps=mishaps or Mishaps(ends=0.02), seed=1
    )
    scout = WindowScout(Leaf("", shape, np.dtype(dtype)))
    for _ in range(ticks):
        if scout.done:
            break
        step = stream.tick()
        scout.look(rows_of(step.obs), rows_of(step.next_obs))
    return scout


def rows_of(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Bytes:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


FOUND = [
    # shape, dtype, axis, step, slices in a window, elements in a slice, shift
    ((4, 84, 84), "u1", 0, 1, 4, 1, 1),
    ((84, 84, 4), "u1", 2, 1, 4, 1, 1),
    ((144, 160, 12), "u1", 2, 3, 4, 3, 1),
    ((12, 36, 36), "u1", 0, 3, 4, 3, 1),
    ((504, 17), "f4", 0, 1, 504, 1, 1),
    ((504, 117, 8), "f4", 0, 1, 504, 1, 1),
    ((2, 30, 30), "u1", 0, 1, 2, 1, 1),
    ((60, 3), "f4", 0, 5, 12, 5, 1),  # five rows a step
    ((6, 30, 30), "u1", 0, 4, None, None, None),  # further than half a window: not worth its index
    ((10, 30, 30), "u1", 0, 4, 5, 2, 2),  # a step that does not divide the window
    ((8, 16, 8), "f8", 1, 1, 16, 1, 1),  # an axis in the middle
    ((1000,), "f4", 0, 10, 100, 10, 1),
]


@pytest.mark.parametrize(("shape", "dtype", "axis", "step", "count", "unit", "shift"), FOUND)
def test_the_window_of_a_stream_is_found(
    shape: tuple[int, ...], dtype: str, axis: int, step: int, count: int | None, unit: int | None, shift: int | None
) -> None:
    """Axis, slices, and how many of them are new: all are read from the bytes, nothing is set."""
    scout = scouted(shape, LeafPlan(axis=axis, step=step, padding="fresh"), dtype=dtype)
    found = scout.finding
    if count is None:
        assert found is None
        return
    assert found is not None
    assert (found.axis, found.count, found.unit, found.shift) == (axis, count, unit, shift)
    assert found.outer * found.run_bytes * found.count == np.zeros(shape, dtype).nbytes


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_eight_telling_pairs_are_enough(lanes: int) -> None:
    """A window is named after eight steps in all lanes together, four lanes a tick at most."""
    ticks = -(-8 // min(lanes, 4))
    assert not scouted((4, 20, 20), LeafPlan(axis=0), Mishaps(ends=0.0), lanes=lanes, ticks=ticks - 1).done
    assert scouted((4, 20, 20), LeafPlan(axis=0), Mishaps(ends=0.0), lanes=lanes, ticks=ticks).finding is not None


def test_a_constant_screen_is_no_evidence() -> None:
    """Equal observations fit every window; the scout waits for some that differ."""
    scout = scouted((4, 20, 20), LeafPlan(content="constant"), Mishaps(ends=0.0), ticks=200)
    assert not scout.done
    assert scout.finding is None


def test_a_window_behind_a_static_start_is_found() -> None:
    """A title screen only makes the search longer."""
    later = LeafPlan(axis=0)
    scout = scouted((4, 20, 20), LeafPlan(content="constant", later=later, later_from=100), ticks=150)
    assert scout.finding is not None
    assert (scout.finding.axis, scout.finding.count) == (0, 4)


def test_most_frames_repeated_do_not_hide_a_window() -> None:
    """Sticky frames show nothing, and the rest of them is enough."""
    scout = scouted((4, 20, 20), LeafPlan(axis=0, repeats=0.7), ticks=200)
    assert scout.finding is not None
    assert (scout.finding.axis, scout.finding.count) == (0, 4)


def test_noise_is_given_up_after_thirty_two_pairs() -> None:
    """Where nothing overlaps, nothing is found, and the search ends."""
    assert not scouted((4, 20, 20), LeafPlan(), ticks=31).done
    scout = scouted((4, 20, 20), LeafPlan(), ticks=32)
    assert scout.done
    assert scout.finding is None


def test_a_window_that_half_of_the_steps_break_is_not_taken() -> None:
    """Three quarters of the pairs have to agree; with fewer, the window would be a burden."""
    scout, generator = WindowScout(Leaf("", (4, 100), np.dtype("u1"))), np.random.default_rng(0)
    frames = generator.integers(0, 256, (40, 100), np.uint8)
    for start in range(32):
        slides = start % 2 == 1
        following = frames[start + 1 : start + 5] if slides else generator.integers(0, 256, (4, 100), np.uint8)
        assert not scout.done
        scout.look(frames[start : start + 4].reshape(1, -1), following.reshape(1, -1))
    assert scout.done
    assert scout.finding is None


def test_a_tenth_of_broken_steps_does_not_hide_a_window() -> None:
    """Resets and skipped steps are the rest that need not agree."""
    scout = scouted((4, 20, 20), LeafPlan(axis=0), Mishaps(ends=0.0, foreign_next=0.1), ticks=100)
    assert scout.finding is not None


@pytest.mark.parametrize("padding", ["zero", "first", "fresh"])
@pytest.mark.parametrize(("shape", "step"), [((4, 20, 20), 1), ((504, 9), 1), ((500, 9), 5)], ids=str)
def test_padding_at_a_reset_is_no_obstacle(padding: Padding, shape: tuple[int, ...], step: int) -> None:
    """Zero padding and a repeated first frame fit more than one window; the true one is taken."""
    scout = scouted(shape, LeafPlan(axis=0, step=step, padding=padding), Mishaps(ends=0.05), ticks=100)
    assert scout.finding is not None
    assert (scout.finding.axis, scout.finding.shift, scout.finding.count) == (0, 1, shape[0] // step)


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()], ids=str)
def test_a_leaf_that_cannot_slide_is_not_searched(shape: tuple[int, ...]) -> None:
    """Without an axis of two there is nothing to find."""
    assert WindowScout(Leaf("", shape, np.dtype("f8"))).done


def test_the_smallest_step_of_several_that_fit_is_taken() -> None:
    """A periodic stream fits several steps; the one that shares most is taken."""
    rows = np.tile(np.arange(4, dtype=np.uint8), 8)  # steps of one and of five fit alike
    scout = WindowScout(Leaf("", (12,), np.dtype("u1")))
    for start in range(8):
        scout.look(rows[None, start : start + 12], rows[None, start + 1 : start + 13])
    assert scout.finding is not None
    assert (scout.finding.count, scout.finding.shift) == (12, 1)


def test_a_whole_observation_is_a_window_of_one() -> None:
    """Where nothing slides, the observation is its own only slice."""
    leaf = Leaf("", (3, 5), np.dtype("f4"))
    window = Window.whole(leaf)
    assert (window.count, window.slice_bytes) == (1, leaf.nbytes)
    assert window.describe() == "whole observations"


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize(("axis", "shape"), [(0, (4, 3, 5)), (1, (3, 4, 5)), (2, (3, 5, 4))])
def test_newest_slices_are_cut_in_order(axis: int, shape: tuple[int, ...], slices: int) -> None:
    """The last slices along the axis, oldest first, each contiguous."""
    observation = np.arange(60, dtype=np.uint8).reshape(shape)
    window = Window.along(Leaf("", shape, np.dtype("u1")), axis, 1)
    cut = window.newest(observation.reshape(1, -1), slices)
    expected = np.moveaxis(observation, axis, 0)[-slices:]
    assert cut.shape == (1, slices, 15)
    assert cut.tobytes() == np.ascontiguousarray(expected).tobytes()

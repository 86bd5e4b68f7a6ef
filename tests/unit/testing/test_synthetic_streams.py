"""Streams follow their plans, and cause every layout in which a memory stores a field."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given

from holdall import ReplayMemory
from holdall.schema import Leaf, Tree
from holdall.store.tuning import Tuning
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits, random_rows
from holdall.testing.strategies import DTYPES, any_space, box, streams

QUIET = Mishaps(ends=0.0)


def make_stream(shape: tuple[int, ...], plan: LeafPlan, mishaps: Mishaps = QUIET, **options: Any) -> Stream:
    return Stream(box(shape, "u1"), spaces.Discrete(2), plans=[plan], mishaps=mishaps, **options)


def test_one_seed_gives_one_stream() -> None:
    """So a failure can be reproduced."""
    plan = LeafPlan(axis=0, repeats=0.2)
    mishaps = Mishaps(0.1, 0.1, 0.1, 0.1)
    one, same, other = (make_stream((4, 5), plan, mishaps, seed=seed).ticks(30).arguments() for seed in (1, 1, 2))
    assert_same_bits(one, same)
    with pytest.raises(AssertionError):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("axis", "step"), [(0, 1), (1, 1), (2, 3), (0, 2)])
def test_a_sliding_leaf_slides_along_its_axis(axis: int, step: int) -> None:
    """`next_obs` is `obs` moved by the step. The new slices are at the end."""
    steps = make_stream((4, 5, 6), LeafPlan(axis=axis, step=step)).ticks(20)
    old = np.moveaxis(steps.obs, axis + 2, 0)[step:]
    new = np.moveaxis(steps.next_obs, axis + 2, 0)
    assert np.array_equal(old, new[:-step])
    assert not np.array_equal(new[-step:], old[-step:])


def test_without_mishaps_next_obs_is_the_next_obs() -> None:
    """The episodes of such a stream never end."""
    steps = make_stream((7,), LeafPlan()).ticks(20)
    assert np.array_equal(steps.obs[1:], steps.next_obs[:-1])
    assert not steps.terminated.any()
    assert not steps.truncated.any()


def test_an_episodes_end_is_flagged_and_followed_by_a_reset() -> None:
    """Both kinds of end occur. After each, the next `obs` differs from `next_obs`."""
    steps = make_stream((7,), LeafPlan(), Mishaps(ends=0.3)).ticks(100)
    ended = (steps.terminated | steps.truncated)[:-1, 0]
    differs = (steps.obs[1:] != steps.next_obs[:-1]).any(axis=(1, 2))
    assert np.array_equal(ended, differs)
    assert steps.terminated.any()
    assert steps.truncated.any()
    assert not (steps.terminated & steps.truncated).any()


@pytest.mark.parametrize(
    "mishaps",
    [Mishaps(0.0, silent_resets=0.3), Mishaps(0.0, skipped_steps=0.3), Mishaps(0.0, foreign_next=0.3)],
    ids=["silent resets", "skipped steps", "foreign next"],
)
def test_mishaps_break_the_stream_without_a_flag(mishaps: Mishaps) -> None:
    """Only the bytes show a mishap."""
    steps = make_stream((7,), LeafPlan(), mishaps).ticks(100)
    assert not (steps.terminated | steps.truncated).any()
    broken = (steps.obs[1:] != steps.next_obs[:-1]).any(axis=(1, 2))
    assert 10 < np.count_nonzero(broken) < 60


@pytest.mark.parametrize(
    ("padding", "kept"), [("zero", lambda obs: (obs[:-1] == 0).all()), ("first", lambda obs: (obs == obs[-1]).all())]
)
def test_a_reset_pads_as_the_plan_says(padding: Any, kept: Any) -> None:
    """It pads with zeros before the first frame, or repeats the first frame."""
    assert kept(make_stream((4, 50), LeafPlan(axis=0, padding=padding)).tick().obs[0])


def test_a_table_repeats_its_rows_and_a_constant_never_changes() -> None:
    """A table is like market days, which occur in every episode. A constant is like a static screen."""
    table = make_stream((30, 8), LeafPlan(axis=0, content="table", padding="fresh"), Mishaps(ends=0.1)).ticks(200).obs
    assert len(np.unique(table.reshape(-1, 8), axis=0)) <= 40
    constant = make_stream((30, 8), LeafPlan(content="constant")).ticks(50).obs
    assert len(np.unique(constant.reshape(50, -1), axis=0)) == 1


def test_the_axis_of_a_stack_changes_when_the_plan_says() -> None:
    """At first the stack is along one axis, and later along another."""
    steps = make_stream((4, 9, 4), LeafPlan(axis=0, later=LeafPlan(axis=2), later_from=10)).ticks(20)
    first = (steps.obs[:, 0, 1:] == steps.next_obs[:, 0, :-1]).all(axis=(1, 2, 3))
    last = (steps.obs[:, 0, ..., 1:] == steps.next_obs[:, 0, ..., :-1]).all(axis=(1, 2, 3))
    assert first.tolist() == [True] * 10 + [False] * 10
    assert last.tolist() == [False] * 10 + [True] * 10


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.kind == "f"], ids=str)
def test_random_floats_have_payloads_and_negative_zeros(dtype: np.dtype[Any]) -> None:
    """A cast or an arithmetic copy would lose these values."""
    rows = random_rows(Leaf("", (1000,), dtype), (1,), np.random.default_rng(0))[0]
    assert np.count_nonzero((rows == 0) & np.signbit(rows)) > 20
    assert np.count_nonzero(np.isnan(rows)) > 20
    assert len(np.unique(rows.view(f"u{dtype.itemsize}"))) > 500


def test_random_flags_are_flags() -> None:
    """A boolean is the byte 0 or 1."""
    rows = random_rows(Leaf("", (1000,), np.dtype("?")), (2,), np.random.default_rng(0))
    assert set(np.unique(rows.view(np.uint8))) == {0, 1}


@given(space=any_space)
def test_every_space_that_the_strategies_draw_has_leaves(space: spaces.Space[Any]) -> None:
    assert Tree.of(space, "space").leaves


@given(stream=streams())
def test_a_drawn_stream_fits_its_own_spaces(stream: Stream) -> None:
    """A memory with the stream's spaces accepts its ticks."""
    lanes = stream.num_envs
    memory = ReplayMemory(stream.observation_space, stream.action_space, 3 * lanes, lanes, extras=stream.extras)
    memory.add(**stream.tick().arguments())
    assert len(memory) == lanes
    assert "seed=" in repr(stream)


REACHED = {
    # Shape, plan and mishaps, and what the report says.
    "a window": ((4, 36, 36), LeafPlan(axis=0), QUIET, "window of 4 along axis 0"),
    "a window of a small field": ((4, 12, 12), LeafPlan(axis=0), QUIET, "window of 4 along axis 0"),
    "a long window": ((500, 12), LeafPlan(axis=0, step=1), QUIET, "window of 500 along axis 0"),
    "whole observations": ((36, 36, 4), LeafPlan(), QUIET, "whole observations"),
    "shared rows": ((7,), LeafPlan(), QUIET, "each observation once"),
    "paired rows": ((7,), LeafPlan(), Mishaps(foreign_next=0.9), "observations and next observations in full"),
    "shared rows of a larger field": ((20, 20), LeafPlan(), QUIET, "each observation once"),
}


@pytest.mark.parametrize(("shape", "plan", "mishaps", "finding"), REACHED.values(), ids=REACHED)
def test_streams_cause_every_layout_of_a_field(
    shape: tuple[int, ...], plan: LeafPlan, mishaps: Mishaps, finding: str
) -> None:
    """Tests with these streams check all layouts."""
    stream = make_stream(shape, plan, mishaps)
    small = Tuning(block_bytes=20_000, min_segment_ticks=4)
    memory = ReplayMemory(stream.observation_space, stream.action_space, 200, _tuning=small)
    memory.extend(**stream.ticks(60).arguments())
    assert finding in memory.report().fields[0].finding


def test_hypothesis_is_needed_for_the_strategies_only() -> None:
    """The oracle can be used without hypothesis."""
    program = "import sys, holdall.testing; print('hypothesis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

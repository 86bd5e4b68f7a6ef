"""The slices of windows that a view reads for devices, against the observations that it reads for the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.store.tuning import Tuning
from holdall.store.view import View, WindowSlices
from holdall.testing import LeafPlan, Mishaps, Stream
from holdall.testing.strategies import box

LANES = 2
TICKS = 120
TUNING = Tuning(block_bytes=4096, max_segment_ticks=24, min_segment_ticks=4, small_field_bytes=64, tiny_field_bytes=16)
SPACES: dict[str, tuple[spaces.Space[Any], LeafPlan]] = {
    "stack": (box((4, 5, 5), "u1"), LeafPlan(axis=0)),
    "stack on the last axis": (box((5, 5, 3), "u1"), LeafPlan(axis=2)),
    "window of floats": (box((6, 3), "f4"), LeafPlan(axis=0)),
    "whole images": (box((9, 9), "u1"), LeafPlan()),
}


def draw_ids(rng: np.random.Generator, end: int) -> list[NDArray[np.int64]]:
    """Return ids in any order, twice the same, and of steps that follow each other, forwards and backwards."""
    steps = rng.integers(0, end - 8 * LANES) + LANES * np.arange(8)
    some = rng.integers(0, end, 20)
    return [some, np.sort(some), np.repeat(some, 2), steps, np.sort(np.repeat(steps, 2)), steps[::-1].copy()]


def join_slices(found: WindowSlices, into: NDArray[np.uint8], first: int) -> bytes:
    """Return the bytes of the observation whose first slice has number `first`."""
    slices = into[: found.nbytes].reshape(found.slice_count, found.outer, found.run_bytes)
    return slices[first : first + found.window_count].swapaxes(0, 1).tobytes()


def assert_same_observations(view: View, ids: NDArray[np.int64], *, with_whole: bool) -> int:
    """Return the number of observations that were compared."""
    rows = view.read(ids, (view.columns.obs_outputs[0], view.columns.next_obs_outputs[0]))
    into = np.full(rows[0].nbytes + rows[1].nbytes, 0xAA, np.uint8)
    found = view.read_windows(ids, 0, into, with_whole)
    if found is None:
        return 0
    assert found.starts.shape == (2, len(ids))
    compared = 0
    for observations, starts in zip(rows, found.starts, strict=True):
        for observation, first in zip(observations, starts.tolist(), strict=True):
            if first >= 0:
                assert join_slices(found, into, first) == observation.tobytes()
                compared += 1
    assert (into[found.nbytes :] == 0xAA).all()
    return compared


@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize("name", SPACES)
def test_slices_of_windows_are_those_of_the_observations(name: str, budget: str | None) -> None:
    space, plan = SPACES[name]
    mishaps = Mishaps(ends=0.1, silent_resets=0.03, skipped_steps=0.03, foreign_next=0.03)
    stream = Stream(space, spaces.Discrete(3), LANES, plans=[plan], mishaps=mishaps, seed=6)
    rng = np.random.default_rng(7)
    compared = 0
    with ReplayMemory(space, spaces.Discrete(3), 1000, LANES, budget=budget, _tuning=TUNING) as memory:
        for _ in range(TICKS):
            memory.add(**stream.tick().arguments())
        memory.store.wait_idle()
        for _ in range(20):
            for ids in draw_ids(rng, memory.next_id):
                compared += assert_same_observations(memory.host_store.view(), ids, with_whole=name == "whole images")
    assert compared > 1000

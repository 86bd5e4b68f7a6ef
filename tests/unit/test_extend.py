"""`extend` writes what `add` writes step by step."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall

STACK = spaces.Box(0, 255, (3, 24, 24), np.uint8)
SPACE = spaces.Dict({"stack": STACK, "vector": spaces.Box(-1, 1, (5,), np.float32)})
EXTRAS: dict[str, spaces.Space[Any]] = {
    "log_prob": spaces.Box(-1, 1, (2,), np.float64),
    "seen": spaces.Box(0, 1, (), np.bool_),
}


def _make_steps(rng: np.random.Generator, count: int, lanes: int) -> dict[str, Any]:
    """Return steps with stacks that shift, episodes that end at random, and sometimes an unrelated next observation."""
    frames = rng.integers(0, 9, (count + 3, lanes, 24, 24)).astype(np.uint8)
    stacks = np.stack([frames[k : k + count + 1] for k in range(3)], axis=2)
    vectors = rng.random((count + 1, lanes, 5), np.float32)
    next_stack = stacks[1:].copy()
    next_vector = vectors[1:].copy()
    jumps = rng.random((count, lanes)) < 0.05
    next_stack[jumps] = 7
    next_vector[jumps] = -1.5
    return {
        "obs": {"stack": stacks[:-1].copy(), "vector": vectors[:-1].copy()},
        "action": rng.integers(0, 4, (count, lanes)),
        "reward": rng.random((count, lanes), np.float32),
        "next_obs": {"stack": next_stack, "vector": next_vector},
        "terminated": jumps,
        "truncated": rng.random((count, lanes)) < 0.02,
        "extras": {"log_prob": rng.random((count, lanes, 2)), "seen": rng.random((count, lanes)) < 0.5},
    }


def _select(value: Any, where: int | slice) -> Any:
    if isinstance(value, dict):
        return {key: _select(part, where) for key, part in value.items()}
    return value[where]


def _describe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _describe(part) for key, part in value.items()}
    return (value.shape, value.dtype, value.tobytes())


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("budget", [None, "auto"])
def test_extend_stores_the_rows_that_add_stores(lanes: int, budget: str | None) -> None:
    rng = np.random.default_rng(lanes)
    made = [
        holdall.ReplayMemory(SPACE, spaces.Discrete(4), 500 * lanes, lanes, budget=budget, extras=EXTRAS)
        for _ in range(2)
    ]
    with made[0] as extended, made[1] as added:
        for count in (1, 90, 233, 7, 400):
            steps = _make_steps(rng, count, lanes)
            extended.extend(**steps)
            for t in range(count):
                added.add(**_select(steps, t))
            assert (extended.first_id, extended.next_id) == (added.first_id, added.next_id)
            ids = np.arange(added.first_id, added.next_id)
            one = extended.gather(ids)
            other = added.gather(ids)
            for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated", "extras"):
                assert _describe(getattr(one, name)) == _describe(getattr(other, name)), name

"""estimate_advantages: the bits of the definition, computed in single precision."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall._native import estimate_advantages

Floats = NDArray[np.float32]


def estimate_with_numpy(rewards: Floats, values: Floats, ends: Floats, last: Floats) -> tuple[Floats, Floats]:
    """Return advantages and returns with gamma 0.99 and lambda 0.95."""
    gamma = np.float32(0.99)
    decay = np.float32(0.99 * 0.95)
    advantages = np.empty_like(values)
    next_values = last
    later = np.zeros_like(last)
    for t in reversed(range(len(values))):
        continues = np.float32(1) - ends[t]
        delta = rewards[t] + gamma * next_values * continues - values[t]
        later = delta + decay * continues * later
        advantages[t] = later
        next_values = values[t]
    return advantages, advantages + values


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (64, 3), (33, 16), (9, 7), (5, 65)])
def test_advantages_are_the_bits_of_the_definition(shape: tuple[int, int], seed: int) -> None:
    """The rule also holds where rewards and advantages are one array."""
    generator = np.random.default_rng(seed)
    rewards, values = (100 * generator.standard_normal((2, *shape), np.float32)) ** 3
    ends = (generator.random(shape) < 0.1).astype(np.float32)
    last = generator.standard_normal(shape[1], np.float32)
    expected, expected_returns = estimate_with_numpy(rewards, values, ends, last)
    advantages = np.empty(shape, np.float32)
    returns = np.empty(shape, np.float32)
    estimate_advantages(rewards, values, ends, last, 0.99, 0.95, advantages, returns)
    assert advantages.tobytes() == expected.tobytes()
    assert returns.tobytes() == expected_returns.tobytes()
    estimate_advantages(rewards, values, ends, last, 0.99, 0.95, rewards, returns)
    assert rewards.tobytes() == expected.tobytes()
    assert returns.tobytes() == expected_returns.tobytes()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rewards", np.zeros((4, 2))),
        ("values", np.zeros((4, 4), np.float32)[:, ::2]),
        ("ends", np.zeros((3, 2), np.float32)),
        ("last_values", np.zeros(3, np.float32)),
        ("advantages", np.zeros(8, np.float32)),
        ("returns", np.broadcast_to(np.float32(0), (4, 2))),
    ],
)
def test_the_error_names_the_array_that_does_not_fit(name: str, wrong: NDArray[np.float32]) -> None:
    """The wrong arrays differ in dtype, layout, shape or number of axes, or cannot be written to."""
    arrays: dict[str, Floats] = {
        key: np.zeros((4, 2), np.float32) for key in ("rewards", "values", "ends", "advantages", "returns")
    }
    arrays |= {"last_values": np.zeros(2, np.float32)}
    arrays[name] = wrong
    inputs = (arrays["rewards"], arrays["values"], arrays["ends"], arrays["last_values"])
    with pytest.raises((TypeError, ValueError), match=name):
        estimate_advantages(*inputs, 0.99, 0.95, arrays["advantages"], arrays["returns"])

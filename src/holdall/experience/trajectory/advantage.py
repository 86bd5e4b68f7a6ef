"""Advantages: generalised advantage estimation (Schulman et al. 2016), in place.

In:  rewards, values and episode ends as (steps, lanes), and the values behind the last step.
Out: advantages and returns, written into arrays of the caller.
Invariant: single precision, in the order of Stable-Baselines3's own loop, so the bits are its bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdall.experience.arena import address
from holdall.experience.trajectory.native_rollout import rollout_loops

Floats = NDArray[np.float32]


def estimate_advantages(
    rewards: Floats,
    values: Floats,
    ends: Floats,
    last_values: Floats,
    gamma: float,
    gae_lambda: float,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Fill `advantages` and `returns`; all arrays are contiguous float32 of one shape.

    Args:
        ends: 1 where the episode ended with the step, else 0.
        last_values: Of the observations behind the last step, one per lane.
        advantages: May be `rewards` itself.
    """
    decay = gamma * gae_lambda
    loops = rollout_loops()
    if loops is None:
        _estimate_portably(rewards, values, ends, last_values, gamma, decay, advantages, returns)
        return
    steps, lanes = values.shape
    loops.advantages(
        address(rewards), address(values), address(ends), address(last_values), gamma, decay,
        steps, lanes, address(advantages), address(returns),
    )  # fmt: skip


def _estimate_portably(
    rewards: Floats,
    values: Floats,
    ends: Floats,
    last_values: Floats,
    gamma: float,
    decay: float,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Do what advantage.c does, a row of lanes at a time."""
    going = np.float32(1) - ends
    gamma_, decay_ = np.float32(gamma), np.float32(decay)
    next_values, later = last_values, np.zeros_like(last_values)
    for t in range(len(values) - 1, -1, -1):
        delta = rewards[t] + gamma_ * next_values * going[t] - values[t]
        later = delta + decay_ * going[t] * later
        advantages[t] = later
        next_values = values[t]
    np.add(advantages, values, out=returns)

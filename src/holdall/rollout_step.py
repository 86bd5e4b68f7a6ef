"""RolloutStep: one step of a rollout, as `RolloutMemory.add` gets it."""

from __future__ import annotations

from typing import Any, NamedTuple

ESTIMATES = ("value", "log_prob", "advantage", "returns")
"""The float32 fields of a `RolloutBatch`, in the order in which a rollout delivers them."""


class RolloutStep(NamedTuple):
    """The arguments of `RolloutMemory.add`, which describes them. They are not checked yet."""

    obs: Any  # None if `observe` was given the observations.
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    value: Any
    log_prob: Any
    extras: Any = None
    final_obs: Any = None
    valid: Any = None

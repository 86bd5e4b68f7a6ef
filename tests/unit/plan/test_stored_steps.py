"""The bytes per transition that a plan measures with holdall's memories, for runs with many environments."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdall.tools.probe.measurement import measure_model
from holdall.tools.probe.stored import fill_memories

LANES = 1024


class Envs:
    """Vectorised environments whose observations are different in every step."""

    num_envs = LANES
    action_space = SimpleNamespace(sample=lambda: np.zeros(2, np.float32))

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def reset(self) -> Any:
        return self._rng.random((LANES, 8), np.float32)

    def step(self, _actions: Any) -> tuple[Any, Any, Any, Any]:
        return self.reset(), np.zeros(LANES, np.float32), np.zeros(LANES, bool), [{}] * LANES


def test_many_environments_play_enough_steps_to_measure_a_transition() -> None:
    """With one step of 1,000 environments, the plan of holdall had 0 bytes per transition."""
    measured = measure_model(SimpleNamespace(env=Envs()), 1.0)
    assert measured["stored"].steps == 4 * LANES
    assert measured["stored"].raw_bytes >= 8 * 4


def test_fewer_than_four_steps_are_not_measured() -> None:
    envs = Envs()
    observations = [envs.reset() for _ in range(4)]
    flags = np.zeros(LANES, bool)
    steps = [
        (obs, np.zeros((LANES, 2), np.float32), np.zeros(LANES, np.float32), next_obs, flags, flags)
        for obs, next_obs in pairwise(observations)
    ]
    with pytest.raises(ValueError, match="3 vectorised steps are too few"):
        fill_memories(steps)

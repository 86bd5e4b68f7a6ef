"""Descriptions of a run: the bytes of a transition, and the settings that are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.plan.spec import Spec, count_transition_bytes, parse_version

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
CONTINUOUS = spaces.Box(-1, 1, (4,), np.float32)
KEYS = spaces.Dict({"a": spaces.Discrete(3), "b": VECTOR})


@pytest.mark.parametrize(
    "observation",
    [
        VECTOR,
        spaces.Box(0, 255, (84, 84, 4), np.uint8),
        spaces.Box(-1, 1, (2, 5), np.float64),
        spaces.Discrete(7),
        spaces.MultiDiscrete([3, 4, 5]),
        spaces.MultiBinary([2, 3]),
        KEYS,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "action",
    [
        CONTINUOUS,
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Box(-1, 1, (2,), np.float16),
        spaces.Discrete(4),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(5),
    ],
    ids=str,
)
def test_a_transition_has_the_bytes_that_stable_baselines3_allocates(
    observation: spaces.Space[Any], action: spaces.Space[Any]
) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    kind = buffers.DictReplayBuffer if isinstance(observation, spaces.Dict) else buffers.ReplayBuffer
    buffer = kind(50, observation, action, device="cpu", n_envs=2)
    arrays: list[Any] = []
    for value in vars(buffer).values():
        arrays += value.values() if isinstance(value, dict) else [value]
    allocated = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert allocated == 50 * count_transition_bytes(observation, action)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"algo": "rainbow"}, "rainbow"),
        ({"capacity": 0}, "capacity"),
        ({"num_envs": 2**21}, "num_envs"),
        ({"device": "tpu"}, "device"),
        ({"vec_env": "thread"}, "vec_env"),
        ({"start_method": "vfork"}, "start_method"),
        ({"wrapper": "gray"}, "wrapper"),
        ({"action": spaces.Discrete(4)}, "continuous"),
        ({"algo": "dqn"}, "discrete"),
        ({"buffer_class": "Replay"}, "buffer_class"),
        ({"buffer_class": "RolloutBuffer"}, "buffer_class"),
        ({"buffer_class": "ReplayBuffer", "observation": KEYS}, "DictReplayBuffer"),
        ({"observation": spaces.Dict({"a": KEYS})}, "nested"),
        ({"optimize_memory_usage": True}, "handle_timeout_termination"),
        ({"optimize_memory_usage": True, "buffer_class": "NStepReplayBuffer"}, "optimize_memory_usage"),
        ({"optimize_memory_usage": True, "observation": KEYS}, "optimize_memory_usage"),
    ],
    ids=str,
)
def test_settings_that_stable_baselines3_refuses_are_refused(settings: dict[str, Any], named: str) -> None:
    Spec(algo="sac", observation=VECTOR, action=CONTINUOUS)
    with pytest.raises(ArgumentError, match=named):
        Spec(**({"algo": "sac", "observation": VECTOR, "action": CONTINUOUS} | settings))


@pytest.mark.parametrize(("text", "numbers"), [("2.7.0", (2, 7, 0)), ("2.8.0a3", (2, 8, 0)), ("2.9", (2, 9, 0))])
def test_versions_are_compared_as_numbers(text: str, numbers: tuple[int, int, int]) -> None:
    assert parse_version(text) == numbers


def test_checks_need_neither_torch_nor_stable_baselines3() -> None:
    check = (
        "import sys, holdall.tools.plan.spec; sys.exit(bool({'torch', 'stable_baselines3', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0

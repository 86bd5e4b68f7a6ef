"""Facts about Stable-Baselines3 for plan and lint: its algorithms, their defaults, and the bytes of a transition.

Neither torch nor Stable-Baselines3 is imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.schema import Tree

Version = tuple[int, int, int]

DEFAULT_BUFFER_SIZE = 1_000_000
ROLLOUTS_KEEP_DTYPES: Version = (2, 7, 1)
"""In older versions of Stable-Baselines3, rollouts store observations and actions as float32."""
_CONTRIB = "sb3_contrib"
_OUTCOME_BYTES = 3 * 4
"""Reward, done and timeout, each as float32."""
_ESTIMATE_BYTES = 6 * 4
"""Reward, return, episode start, value, log probability and advantage, each as float32."""


def parse_version(text: str) -> Version:
    """Read `2.7.0` or `2.8.0a3` as numbers."""
    matches = [re.match(r"\d+", part) for part in [*text.split("."), "0", "0"][:3]]
    if None in matches:
        raise ArgumentError(f"sb3 version ({text!r}) must be written like '2.7.1'.")
    major, minor, patch = (int(match[0]) for match in matches if match)
    return major, minor, patch


def count_transition_bytes(observation: spaces.Space[Any], action: spaces.Space[Any]) -> int:
    """Return the bytes of one transition in Stable-Baselines3's replay buffer, which stores observations twice."""
    (leaf,) = Tree.of(action, "action").leaves
    number_bytes = leaf.dtype.itemsize
    if leaf.dtype.kind == "f":  # Stable-Baselines3 stores float64 actions as float32.
        number_bytes = min(number_bytes, 4)
    observation_bytes = sum(count_observation_bytes(observation))
    return 2 * observation_bytes + prod(leaf.shape) * number_bytes + _OUTCOME_BYTES


def count_step_bytes(observation: spaces.Space[Any], action: spaces.Space[Any]) -> int:
    """Return the bytes of one step of one environment in Stable-Baselines3's rollout buffer."""
    (leaf,) = Tree.of(action, "action").leaves
    return sum(count_observation_bytes(observation)) + prod(leaf.shape) * leaf.dtype.itemsize + _ESTIMATE_BYTES


def count_observation_bytes(observation: spaces.Space[Any]) -> list[int]:
    """Return the bytes of every array of one observation."""
    leaves = Tree.of(observation, "observation").leaves
    return [prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm, with the defaults that memory depends on."""

    name: str
    on_policy: bool
    batch_size: int | None
    """None: the whole rollout is one batch."""
    n_steps: int = 1
    """Steps of a rollout, or of n-step returns."""
    package: str = "stable_baselines3"
    has_plain_buffer: bool = True
    """Whether its buffer takes the arguments of Stable-Baselines3's own buffers."""


ALGORITHM_CLASSES = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("A2C", True, None, 5),
        Algorithm("DDPG", False, 256),
        Algorithm("DQN", False, 32),
        Algorithm("PPO", True, 64, 2048),
        Algorithm("SAC", False, 256),
        Algorithm("TD3", False, 256),
        Algorithm("CrossQ", False, 256, package=_CONTRIB),
        Algorithm("QRDQN", False, 32, package=_CONTRIB),
        Algorithm("TQC", False, 256, package=_CONTRIB),
        Algorithm("TRPO", True, 128, 2048, _CONTRIB),
        Algorithm("MaskablePPO", True, 64, 2048, _CONTRIB, has_plain_buffer=False),
        Algorithm("RecurrentPPO", True, 128, 128, _CONTRIB, has_plain_buffer=False),
    )
}
"""Algorithms by the names of their classes. A test compares them with the installed Stable-Baselines3."""
ALGORITHMS = {name.lower(): algorithm for name, algorithm in ALGORITHM_CLASSES.items() if algorithm.has_plain_buffer}
"""Algorithms that can be planned without a script, by the names that users write."""

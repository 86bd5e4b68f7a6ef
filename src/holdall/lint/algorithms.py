"""The algorithms of Stable-Baselines3 and sb3-contrib: what their constructors take, and their defaults.

In:  nothing.  Out: for every algorithm the arguments that rules ask for.
Invariant: a test holds the tables to the signatures of the installed version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_PACKAGES = ("stable_baselines3", "sb3_contrib")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm."""

    name: str
    on_policy: bool
    positional: tuple[str, ...]  # the leading arguments, whose order no version has changed
    defaults: Mapping[str, object]
    has_plain_buffer: bool = True  # False: a buffer class of its own, whose size is not known here


def _off_policy(name: str, batch_size: int, train_freq: int, **more: object) -> Algorithm:
    positional = ("policy", "env", "learning_rate", "buffer_size", "learning_starts", "batch_size")
    defaults = {
        "buffer_size": 1_000_000,
        "learning_starts": 100,
        "batch_size": batch_size,
        "train_freq": train_freq,
        "gradient_steps": 1,
        "replay_buffer_class": None,
        "replay_buffer_kwargs": None,
        "optimize_memory_usage": False,
        "n_steps": 1,
        "device": "auto",
    }
    return Algorithm(name, False, positional, defaults | more)


def _on_policy(name: str, has_plain_buffer: bool = True, **defaults: object) -> Algorithm:
    positional = ("policy", "env", "learning_rate", "n_steps", *(("batch_size",) if "batch_size" in defaults else ()))
    return Algorithm(
        name, True, positional, defaults | {"rollout_buffer_class": None, "device": "auto"}, has_plain_buffer
    )


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        _off_policy("DQN", 32, 4, target_update_interval=10_000),
        _off_policy("DDPG", 256, 1),
        _off_policy("TD3", 256, 1),
        _off_policy("SAC", 256, 1),
        _off_policy("QRDQN", 32, 4, target_update_interval=10_000),
        _off_policy("TQC", 256, 1),
        _off_policy("CrossQ", 256, 1),
        _on_policy("PPO", n_steps=2048, batch_size=64, n_epochs=10, normalize_advantage=True),
        _on_policy("A2C", n_steps=5, normalize_advantage=False),
        _on_policy("TRPO", n_steps=2048, batch_size=128, normalize_advantage=True),
        _on_policy("MaskablePPO", False, n_steps=2048, batch_size=64, n_epochs=10, normalize_advantage=True),
        _on_policy("RecurrentPPO", False, n_steps=128, batch_size=128, n_epochs=10, normalize_advantage=True),
    )
}

# The names that rl-baselines3-zoo gives to files and folders.
_ZOO_NAMES = {name.lower(): name for name in ALGORITHMS} | {"ppo_lstm": "RecurrentPPO"}


def named(dotted: str) -> Algorithm | None:
    """Return the algorithm that a full name such as `stable_baselines3.PPO` means."""
    package, _, rest = dotted.partition(".")
    return ALGORITHMS.get(rest.rpartition(".")[2]) if package in _PACKAGES else None


def nicknamed(word: str) -> Algorithm | None:
    """Return the algorithm that a file or key calls `ppo` or `PPO`."""
    return ALGORITHMS.get(_ZOO_NAMES.get(word.lower(), ""))

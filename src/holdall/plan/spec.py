"""What is to be trained: one record, whatever it was read from.

In:  an algorithm, spaces, sizes; what is left out takes the value that Stable-Baselines3 would give it.
Out: a `Spec`, the layout of its buffer, and the same as plain data for another process.
Invariant: every number in it is either given or Stable-Baselines3's own default; nothing is guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.plan import spacetext
from holdall.plan.buffers import (
    BufferLayout,
    Version,
    default_class,
    installed_version,
    leaves_of,
    replay_buffer,
    rollout_buffer,
)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What an algorithm's constructor takes when nothing is said."""

    on_policy: bool
    batch_size: int | None  # None: the whole rollout at once
    n_steps: int = 1
    package: str = "stable_baselines3"
    class_name: str = ""


ALGORITHMS = {
    "a2c": Algorithm(True, None, n_steps=5, class_name="A2C"),
    "ddpg": Algorithm(False, 256, class_name="DDPG"),
    "dqn": Algorithm(False, 32, class_name="DQN"),
    "ppo": Algorithm(True, 64, n_steps=2048, class_name="PPO"),
    "sac": Algorithm(False, 256, class_name="SAC"),
    "td3": Algorithm(False, 256, class_name="TD3"),
    "crossq": Algorithm(False, 256, package="sb3_contrib", class_name="CrossQ"),
    "qrdqn": Algorithm(False, 32, package="sb3_contrib", class_name="QRDQN"),
    "tqc": Algorithm(False, 256, package="sb3_contrib", class_name="TQC"),
    "trpo": Algorithm(True, 128, n_steps=2048, package="sb3_contrib", class_name="TRPO"),
}
START_METHODS = ("fork", "forkserver", "spawn")
_CONTINUOUS = {"ddpg", "sac", "td3", "tqc", "crossq"}
_DISCRETE = {"dqn", "qrdqn"}
_FEWEST = {"capacity": 1, "num_envs": 1, "frame_stack": 1, "n_steps": 1, "batch_size": 1, "total_timesteps": 1}


@dataclass(frozen=True, slots=True)
class Spec:
    """One training run."""

    algo: str
    observation: spaces.Space[Any]  # as the buffer sees it: after frame stacks and wrappers
    action: spaces.Space[Any]
    capacity: int = 1_000_000  # transitions of a replay buffer, as passed to the constructor
    num_envs: int = 1
    n_steps: int = 0  # 0: the algorithm's own; on-policy the rollout's steps, off-policy those of n-step returns
    batch_size: int = 0  # 0: the algorithm's own
    policy: str = ""  # "": the one that suits the observations
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    vec_env: str = "dummy"  # or "subproc", or "shared": processes that write to `holdall.SharedObservations`
    start_method: str = ""  # "": the one that Stable-Baselines3 takes on this system
    preloads: bool = False  # whether a fork server imports torch before it forks
    device: str = "cpu"
    total_timesteps: int | None = None
    frame_stack: int = 1  # of `observation`, which is stacked already
    buffer_class: str = ""
    optimize_memory_usage: bool = False
    handle_timeout_termination: bool = True
    saves_buffer: bool = False
    uses_holdall: bool = False  # whether holdall's buffer is in place of Stable-Baselines3's
    sb3: Version | None = None  # None: the one that is installed, or the newest
    env_id: str = ""
    wrapper: str = ""  # "atari": Stable-Baselines3's wrapper of that name
    name: str = ""

    def __post_init__(self) -> None:
        if self.algo not in ALGORITHMS:
            raise ArgumentError(f"algo ({self.algo!r}) must be one of {', '.join(ALGORITHMS)}")
        for name, fewest in _FEWEST.items():
            count = getattr(self, name)
            if count is not None and not (name in {"n_steps", "batch_size"} and count == 0) and count < fewest:
                raise ArgumentError(f"{name} ({count}) must be at least {fewest}")
        if self.vec_env not in {"dummy", "subproc", "shared"}:
            raise ArgumentError(f"vec_env ({self.vec_env!r}) must be 'dummy', 'subproc' or 'shared'")
        if self.start_method and self.start_method not in START_METHODS:
            raise ArgumentError(f"start_method ({self.start_method!r}) must be one of {', '.join(START_METHODS)}")
        if self.wrapper not in {"", "atari"}:
            raise ArgumentError(f"wrapper ({self.wrapper!r}) must be 'atari' or nothing")
        _require_action(self.algo, self.action)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm's defaults."""
        return ALGORITHMS[self.algo]

    @property
    def on_policy(self) -> bool:
        """Whether experience is used once and then dropped."""
        return self.algorithm.on_policy

    @property
    def is_dict(self) -> bool:
        """Whether observations have keys."""
        return isinstance(self.observation, spaces.Dict)

    @property
    def rollout_steps(self) -> int:
        """Steps per environment and rollout; of n-step returns where there are no rollouts."""
        return self.n_steps or self.algorithm.n_steps

    @property
    def batch(self) -> int:
        """Transitions in one update."""
        if self.algorithm.batch_size is None:
            return self.rollout_steps * self.num_envs
        batch = self.batch_size or self.algorithm.batch_size
        return min(batch, self.rollout_steps * self.num_envs) if self.on_policy else batch

    @property
    def policy_name(self) -> str:
        """The policy, as Stable-Baselines3 names it."""
        if self.policy:
            return self.policy
        if self.is_dict:
            return "MultiInputPolicy"
        return "CnnPolicy" if spacetext.has_images(self.observation) else "MlpPolicy"

    @property
    def method(self) -> str:
        """How processes of a vector environment start."""
        return self.start_method or ("forkserver" if sys.platform.startswith("linux") else "spawn")

    @property
    def sb3_buffer(self) -> str:
        """The buffer class of Stable-Baselines3 that this run uses, or would use without holdall."""
        steps = 1 if self.on_policy else self.rollout_steps
        return self.buffer_class or default_class(self.on_policy, self.is_dict, steps)

    def layout(self) -> BufferLayout:
        """Lay out the buffer as the version of Stable-Baselines3 allocates it."""
        observation = leaves_of(self.observation, "obs")
        (action,) = leaves_of(self.action, "action")
        sb3 = self.sb3 or installed_version()
        if self.on_policy:
            return rollout_buffer(
                observation, action, self.rollout_steps, self.num_envs, buffer_class=self.sb3_buffer, sb3=sb3
            )
        return replay_buffer(
            observation,
            action,
            self.capacity,
            self.num_envs,
            buffer_class=self.sb3_buffer,
            optimize_memory_usage=self.optimize_memory_usage,
            handle_timeout_termination=self.handle_timeout_termination,
            sb3=sb3,
        )

    def but(self, **changes: Any) -> Spec:
        """Return the same run with some values changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        data = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        data["observation"] = spacetext.describe(self.observation)
        data["action"] = spacetext.describe(self.action)
        data["policy_kwargs"] = dict(self.policy_kwargs)
        data["sb3"] = None if self.sb3 is None else list(self.sb3)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spec:
        """Make a spec of what `as_dict` returned."""
        sb3 = data["sb3"]
        spaces_ = {name: spacetext.restore(data[name]) for name in ("observation", "action")}
        return cls(**{**data, **spaces_, "sb3": None if sb3 is None else tuple(sb3)})


def _require_action(algo: str, action: spaces.Space[Any]) -> None:
    """Refuse an action space that the algorithm's constructor refuses."""
    if algo in _DISCRETE and not isinstance(action, spaces.Discrete):
        raise ArgumentError(f"action ({action}) must be discrete for {algo}; write --action 'discrete(4)'")
    if algo in _CONTINUOUS and not isinstance(action, spaces.Box):
        raise ArgumentError(f"action ({action}) must be continuous for {algo}; write --action 8")

"""One training run: its algorithm, spaces and sizes.

In:  an algorithm, spaces, sizes, a version of Stable-Baselines3; what is left out takes its default there.
Out: a `Spec`, which knows its batches, its policy and the layout of its buffer. Nothing heavy is imported.
Invariant: no number of a spec is guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.plan import buffer_layout
from holdall.tools.plan.environments import has_images, space_from_dict, space_to_dict
from holdall.units import require_count

_CONTRIB = "sb3_contrib"
START_METHODS = ("fork", "forkserver", "spawn")
_CONTINUOUS = {"ddpg", "sac", "td3", "tqc", "crossq"}
_DISCRETE = {"dqn", "qrdqn"}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm, with the arguments of its constructor that memory and training depend on."""

    name: str
    on_policy: bool
    defaults: Mapping[str, Any]
    package: str = "stable_baselines3"
    has_plain_buffer: bool = True  # False: a buffer class of its own, whose size is not known here

    @property
    def batch_size(self) -> int | None:
        """The default; None: the whole rollout is one batch."""
        return self.defaults.get("batch_size")

    @property
    def n_steps(self) -> int:
        """The default: steps of a rollout, or of n-step returns."""
        return int(self.defaults["n_steps"])

    @property
    def positional(self) -> tuple[str, ...]:
        """The leading arguments, whose order no version has changed."""
        own = ("n_steps",) if self.on_policy else ("buffer_size", "learning_starts")
        return ("policy", "env", "learning_rate", *own, *(("batch_size",) if "batch_size" in self.defaults else ()))


_OFF_POLICY = {
    "buffer_size": 1_000_000, "learning_starts": 100, "batch_size": 256, "train_freq": 1, "gradient_steps": 1,
    "replay_buffer_class": None, "replay_buffer_kwargs": None, "optimize_memory_usage": False, "n_steps": 1,
    "device": "auto",
}  # fmt: skip


def _off_policy(name: str, package: str = "stable_baselines3", **defaults: Any) -> Algorithm:
    return Algorithm(name, False, _OFF_POLICY | defaults, package)


def _on_policy(
    name: str, n_steps: int, batch_size: int | None, package: str = "stable_baselines3", plain: bool = True
) -> Algorithm:
    defaults: dict[str, Any] = {"n_steps": n_steps, "rollout_buffer_class": None, "device": "auto"}
    defaults |= {"normalize_advantage": name != "A2C"}
    if batch_size is not None:
        defaults["batch_size"] = batch_size
    if "PPO" in name:
        defaults["n_epochs"] = 10
    return Algorithm(name, True, defaults, package, plain)


ALGORITHM_CLASSES = {
    algorithm.name: algorithm
    for algorithm in (
        _on_policy("A2C", 5, None),
        _off_policy("DDPG"),
        _off_policy("DQN", batch_size=32, train_freq=4, target_update_interval=10_000),
        _on_policy("PPO", 2048, 64),
        _off_policy("SAC"),
        _off_policy("TD3"),
        _off_policy("CrossQ", _CONTRIB),
        _off_policy("QRDQN", _CONTRIB, batch_size=32, train_freq=4, target_update_interval=10_000),
        _off_policy("TQC", _CONTRIB),
        _on_policy("TRPO", 2048, 128, _CONTRIB),
        _on_policy("MaskablePPO", 2048, 64, _CONTRIB, plain=False),
        _on_policy("RecurrentPPO", 128, 128, _CONTRIB, plain=False),
    )
}
"""By the names of their classes. A test compares them with the signatures of the installed Stable-Baselines3."""
ALGORITHMS = {name.lower(): algorithm for name, algorithm in ALGORITHM_CLASSES.items() if algorithm.has_plain_buffer}
"""Those that can be planned, by the names that users write."""


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
    holdall_budget: int | None = None  # bytes that holdall's buffer keeps in memory; what is beyond goes to disk
    sb3: buffer_layout.Version | None = None  # None: the one that is installed, or the newest
    env_id: str = ""
    wrapper: str = ""  # "atari": Stable-Baselines3's wrapper of that name
    name: str = ""

    def __post_init__(self) -> None:
        if self.algo not in ALGORITHMS:
            raise ArgumentError(f"algo ({self.algo!r}) must be one of {', '.join(ALGORITHMS)}")
        for name in ("capacity", "num_envs", "frame_stack", "n_steps", "batch_size", "total_timesteps"):
            if (count := getattr(self, name)) is not None and not (name in {"n_steps", "batch_size"} and count == 0):
                require_count(name, count)
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
    def observation_bytes(self) -> int:
        """Bytes of one observation."""
        return sum(leaf.nbytes for leaf in buffer_layout.leaves_of(self.observation, "obs"))

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
        return "CnnPolicy" if has_images(self.observation) else "MlpPolicy"

    @property
    def method(self) -> str:
        """How processes of a vector environment start."""
        return self.start_method or ("forkserver" if sys.platform.startswith("linux") else "spawn")

    @property
    def sb3_buffer(self) -> str:
        """The buffer class of Stable-Baselines3 that this run uses, or would use without holdall."""
        steps = 1 if self.on_policy else self.rollout_steps
        return self.buffer_class or buffer_layout.default_class(self.on_policy, self.is_dict, steps)

    def layout(self) -> buffer_layout.BufferLayout:
        """Lay out the buffer as the version of Stable-Baselines3 allocates it."""
        observation = buffer_layout.leaves_of(self.observation, "obs")
        (action,) = buffer_layout.leaves_of(self.action, "action")
        kind: dict[str, Any] = {"buffer_class": self.sb3_buffer, "sb3": self.sb3 or buffer_layout.installed_version()}
        if self.on_policy:
            return buffer_layout.rollout_buffer(observation, action, self.rollout_steps, self.num_envs, **kind)
        kind |= {name: getattr(self, name) for name in ("optimize_memory_usage", "handle_timeout_termination")}
        return buffer_layout.replay_buffer(observation, action, self.capacity, self.num_envs, **kind)

    def but(self, **changes: Any) -> Spec:
        """Return the same run with some values changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        data = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        data["observation"] = space_to_dict(self.observation)
        data["action"] = space_to_dict(self.action)
        data["policy_kwargs"] = dict(self.policy_kwargs)
        data["sb3"] = None if self.sb3 is None else list(self.sb3)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spec:
        """Make a spec of what `as_dict` returned."""
        sb3 = data["sb3"]
        spaces_ = {name: space_from_dict(data[name]) for name in ("observation", "action")}
        return cls(**{**data, **spaces_, "sb3": None if sb3 is None else tuple(sb3)})


def _require_action(algo: str, action: spaces.Space[Any]) -> None:
    """Refuse an action space that the algorithm's constructor refuses."""
    if algo in _DISCRETE and not isinstance(action, spaces.Discrete):
        raise ArgumentError(f"action ({action}) must be discrete for {algo}; write --action 'discrete(4)'")
    if algo in _CONTINUOUS and not isinstance(action, spaces.Box):
        raise ArgumentError(f"action ({action}) must be continuous for {algo}; write --action 8")

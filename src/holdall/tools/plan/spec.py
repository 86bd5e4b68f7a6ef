"""The algorithms of Stable-Baselines3 that options and files may describe, and the checks of such a description.

In:  an algorithm, spaces and sizes. A missing value takes Stable-Baselines3's default.  Out: a `Spec`, or an
ArgumentError that names the option. Neither torch nor Stable-Baselines3 is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from gymnasium import spaces

from holdall.checks import require_count
from holdall.errors import ArgumentError
from holdall.schema import Leaf, Tree

Version = tuple[int, int, int]

REPLAY_CLASSES = ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "HerReplayBuffer")
ROLLOUT_CLASSES = ("RolloutBuffer", "DictRolloutBuffer")
ROLLOUTS_KEEP_DTYPES: Version = (2, 7, 1)
"""In older versions of Stable-Baselines3, rollouts store observations and actions as float32."""
_DICT_CLASSES = ("DictReplayBuffer", "HerReplayBuffer", "DictRolloutBuffer")
_CONTRIB = "sb3_contrib"
_MOST_ENVS = 2**20
_START_METHODS = ("fork", "forkserver", "spawn")
_CONTINUOUS = {"ddpg", "sac", "td3", "tqc", "crossq"}
_DISCRETE = {"dqn", "qrdqn"}
_OUTCOME_BYTES = 3 * 4
"""Reward, done and timeout, each as float32."""


def parse_version(text: str) -> Version:
    """Read `2.7.0` or `2.8.0a3` as numbers."""
    found = [re.match(r"\d+", part) for part in [*text.split("."), "0", "0"][:3]]
    if None in found:
        raise ArgumentError(f"sb3 version ({text!r}) must be written like '2.7.1'.")
    major, minor, patch = (int(one[0]) for one in found if one)
    return major, minor, patch


def leaves_of(space: spaces.Space[Any], argument: str) -> tuple[Leaf, ...]:
    """Return the leaves of a space that Stable-Baselines3 can store: a plain space, or one Dict of plain spaces."""
    is_flat = not isinstance(space, spaces.Tuple)
    if isinstance(space, spaces.Dict):
        is_flat = not any(isinstance(child, spaces.Dict | spaces.Tuple) for child in space.spaces.values())
    if not is_flat:
        raise ArgumentError(
            f"{argument} ({space}) is nested. Stable-Baselines3 stores at most one Dict of plain spaces. Flatten it."
        )
    return Tree.of(space, argument).leaves


def count_transition_bytes(observation: spaces.Space[Any], action: spaces.Space[Any]) -> int:
    """Return the bytes of one transition in Stable-Baselines3's replay buffer, which stores observations twice."""
    (taken,) = leaves_of(action, "action")
    action_bytes = min(taken.dtype.itemsize, 4) if taken.dtype.kind == "f" else taken.dtype.itemsize
    observed = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves_of(observation, "observation"))
    return 2 * observed + prod(taken.shape) * action_bytes + _OUTCOME_BYTES


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm, with the arguments of its constructor that memory and training depend on."""

    name: str
    on_policy: bool
    defaults: Mapping[str, Any]
    package: str = "stable_baselines3"
    has_plain_buffer: bool = True  # Whether its buffers are `REPLAY_CLASSES` or `ROLLOUT_CLASSES`.

    @property
    def batch_size(self) -> int | None:
        """Default batch size. None: the whole rollout is one batch."""
        return self.defaults.get("batch_size")

    @property
    def n_steps(self) -> int:
        """Default number of steps of a rollout, or of n-step returns."""
        return int(self.defaults["n_steps"])


_OFF_POLICY = {
    "buffer_size": 1_000_000,
    "learning_starts": 100,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": 1,
    "replay_buffer_class": None,
    "replay_buffer_kwargs": None,
    "optimize_memory_usage": False,
    "n_steps": 1,
    "device": "auto",
}


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
"""Algorithms by the names of their classes. A test compares them with the installed Stable-Baselines3."""
ALGORITHMS = {name.lower(): algorithm for name, algorithm in ALGORITHM_CLASSES.items() if algorithm.has_plain_buffer}
"""Algorithms that can be planned, by the names that users write."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A checked description of one training run."""

    algo: str
    observation: spaces.Space[Any]
    """As the buffer stores it: after frame stacks and wrappers."""
    action: spaces.Space[Any]
    capacity: int = 1_000_000
    """Transitions of a replay buffer."""
    num_envs: int = 1
    n_steps: int = 0
    """Steps of a rollout, or of n-step returns. 0: the algorithm's default."""
    batch_size: int = 0
    """0: the algorithm's default."""
    vec_env: str = "dummy"
    start_method: str = ""
    """Empty: the default of Stable-Baselines3."""
    device: str = "cpu"
    frame_stack: int = 1
    """Frames in `observation`."""
    buffer_class: str = ""
    """Empty: the default of Stable-Baselines3."""
    optimize_memory_usage: bool = False
    handle_timeout_termination: bool = True
    wrapper: str = ""

    def __post_init__(self) -> None:
        if self.algo not in ALGORITHMS:
            raise ArgumentError(f"algo ({self.algo!r}) must be one of {', '.join(ALGORITHMS)}.")
        for name in ("capacity", "num_envs", "frame_stack", "n_steps", "batch_size"):
            count = getattr(self, name)
            if count or name not in {"n_steps", "batch_size"}:
                require_count(name, count)
        if self.num_envs > _MOST_ENVS:
            raise ArgumentError(f"num_envs ({self.num_envs:,}) must be at most {_MOST_ENVS:,}.")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ArgumentError(f"device ({self.device!r}) must be 'cpu', 'cuda', 'cuda:0', 'mps' or 'auto'.")
        if self.vec_env not in {"dummy", "subproc"}:
            raise ArgumentError(f"vec_env ({self.vec_env!r}) must be 'dummy' or 'subproc'.")
        if self.start_method and self.start_method not in _START_METHODS:
            raise ArgumentError(f"start_method ({self.start_method!r}) must be one of {', '.join(_START_METHODS)}.")
        if self.wrapper not in {"", "atari"}:
            raise ArgumentError(f"wrapper ({self.wrapper!r}) must be 'atari' or nothing.")
        _require_action(self.algo, self.action)
        leaves_of(self.observation, "obs")
        leaves_of(self.action, "action")
        self._require_buffer()

    def _require_buffer(self) -> None:
        """Refuse the buffers that Stable-Baselines3 refuses."""
        known = ROLLOUT_CLASSES if ALGORITHMS[self.algo].on_policy else REPLAY_CLASSES
        is_dict = isinstance(self.observation, spaces.Dict)
        if self.buffer_class and self.buffer_class not in known:
            raise ArgumentError(f"buffer_class ({self.buffer_class!r}) must be one of {list(known)} for {self.algo}.")
        if self.buffer_class and is_dict and self.buffer_class not in _DICT_CLASSES:
            wanted = f"Dict{self.buffer_class.removeprefix('NStep')}"
            raise ArgumentError(
                f"buffer_class ({self.buffer_class}) stores one array per observation, and this observation has keys. "
                f"Use {wanted}."
            )
        if not self.optimize_memory_usage:
            return
        if is_dict or self.buffer_class not in {"", "ReplayBuffer"} or known is ROLLOUT_CLASSES:
            raise ArgumentError(
                "optimize_memory_usage (True) needs Stable-Baselines3's ReplayBuffer, without keys in observations. "
                "Leave it out, or use holdall.sb3.ReplayBuffer, which always stores each observation once."
            )
        if self.handle_timeout_termination:
            raise ArgumentError(
                "optimize_memory_usage (True) is refused by Stable-Baselines3 together with timeout handling. Pass "
                "replay_buffer_kwargs={'handle_timeout_termination': False}, or use holdall.sb3.ReplayBuffer."
            )


def _require_action(algo: str, action: spaces.Space[Any]) -> None:
    """Refuse an action space that the algorithm's constructor refuses."""
    if algo in _DISCRETE and not isinstance(action, spaces.Discrete):
        raise ArgumentError(f"action ({action}) must be discrete for {algo}. Write --action 'discrete(4)'.")
    if algo in _CONTINUOUS and not isinstance(action, spaces.Box):
        raise ArgumentError(f"action ({action}) must be continuous for {algo}. Write --action 8.")

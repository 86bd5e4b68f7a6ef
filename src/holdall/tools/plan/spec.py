"""One training run, and the buffers that Stable-Baselines3 allocates for it, byte for byte, in every version since 2.0.

In:  an algorithm, spaces, sizes, a version of Stable-Baselines3; what is left out takes its default there.
Out: a `Spec`, which knows its batches and its policy, and the `BufferLayout` of its buffer: name, shape, dtype and
bytes of every array, how much is in RAM, and what is copied while a rollout is flattened. Nothing heavy is imported.
Invariant: no number of a spec is guessed. The bytes of a layout are those of the real buffer; tests compare them with
installed versions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.checks import require_count
from holdall.errors import ArgumentError
from holdall.schema import Leaf, Tree

Version = tuple[int, int, int]

REPLAY_CLASSES = ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "HerReplayBuffer")
ROLLOUT_CLASSES = ("RolloutBuffer", "DictRolloutBuffer")
DICT_CLASSES = ("DictReplayBuffer", "HerReplayBuffer", "DictRolloutBuffer")

OLDEST_KNOWN: Version = (2, 0, 0)
ROLLOUTS_KEEP_DTYPES: Version = (2, 7, 1)  # before, their observations and actions became float32
_REPLAY_CASTS_ACTIONS: Version = (2, 1, 0)
_HAS_NSTEP: Version = (2, 7, 0)
_NEWEST: Version = (sys.maxsize, 0, 0)

_FLOAT32 = np.dtype(np.float32)
_INT64 = np.dtype(np.int64)
_POINTER = np.dtype(np.object_)
_ROLLOUT_SCALARS = ("rewards", "returns", "episode_starts", "values", "log_probs", "advantages")
# What `RolloutBuffer.get` copies into one axis, array after array.
_FLATTENED = ("observations", "actions", "values", "log_probs", "advantages", "returns")


@dataclass(frozen=True, slots=True)
class BufferArray:
    """One array of a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_written: bool = True  # False: allocated, but its pages are never touched

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return prod(self.shape) * self.dtype.itemsize

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype.name, "bytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """All that a buffer of Stable-Baselines3 allocates."""

    buffer_class: str
    rows: int  # vectorised steps
    n_envs: int
    arrays: tuple[BufferArray, ...]
    object_bytes: int = 0  # Python objects that arrays of pointers point to

    @property
    def transitions(self) -> int:
        """How many transitions fit: less than asked for where n_envs does not divide it."""
        return self.rows * self.n_envs

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self.arrays) + self.object_bytes

    @property
    def bytes_per_transition(self) -> float:
        """Bytes allocated, over the transitions that fit."""
        return self.nbytes / self.transitions

    def resident_bytes(self, transitions: int | None = None) -> int:
        """Bytes in RAM after so many transitions were added; None: the buffer is full.

        Arrays start as untouched zero pages, so they cost nothing until a row is written.
        """
        rows = self.rows if transitions is None else min(-(-transitions // self.n_envs), self.rows)
        written = sum(array.nbytes for array in self.arrays if array.is_written)
        return written * rows // self.rows + self.object_bytes

    @property
    def flatten_bytes(self) -> int:
        """Bytes held in addition while a rollout is flattened: the largest array, once more.

        With one environment, or one step, the two leading axes are joined without a copy.
        """
        if self.buffer_class not in ROLLOUT_CLASSES or 1 in {self.n_envs, self.rows}:
            return 0
        return max(array.nbytes for array in self.arrays if array.name.partition(".")[0] in _FLATTENED)


@cache
def installed_version() -> Version | None:
    """Return the version of Stable-Baselines3 that is installed, without importing it."""
    try:
        return parse_version(version("stable_baselines3"))
    except PackageNotFoundError:
        return None


def parse_version(text: str) -> Version:
    """Read `2.7.0` or `2.8.0a3` as numbers."""
    found = [re.match(r"\d+", part) for part in [*text.split("."), "0", "0"][:3]]
    if None in found:
        raise ArgumentError(f"sb3 version ({text!r}) must be written like '2.7.1'")
    major, minor, patch = (int(one[0]) for one in found if one)
    return major, minor, patch


def default_class(on_policy: bool, is_dict: bool, n_steps: int = 1) -> str:
    """Name the class that Stable-Baselines3 takes when none is given."""
    if on_policy:
        return "DictRolloutBuffer" if is_dict else "RolloutBuffer"
    if is_dict:
        return "DictReplayBuffer"
    return "NStepReplayBuffer" if n_steps > 1 else "ReplayBuffer"


def leaves_of(space: spaces.Space[Any], argument: str) -> tuple[Leaf, ...]:
    """Return a space's leaves, if Stable-Baselines3 can store it: no nesting but one Dict."""
    is_flat = not isinstance(space, spaces.Tuple)
    if isinstance(space, spaces.Dict):
        is_flat = not any(isinstance(child, spaces.Dict | spaces.Tuple) for child in space.spaces.values())
    if not is_flat:
        raise ArgumentError(
            f"{argument} ({space}) is nested; Stable-Baselines3 stores one Dict of plain spaces at most, so flatten it"
        )
    return Tree.of(space, argument).leaves


def replay_buffer(
    observation: Sequence[Leaf],
    action: Leaf,
    buffer_size: int,
    n_envs: int = 1,
    *,
    buffer_class: str = "ReplayBuffer",
    optimize_memory_usage: bool = False,
    handle_timeout_termination: bool = True,
    sb3: Version | None = None,
) -> BufferLayout:
    """Lay out a replay buffer.

    Args:
        buffer_size: As passed to Stable-Baselines3, which divides it by `n_envs` and drops the rest.
        sb3: The version whose layout is meant; None: the newest one.
    """
    version_ = _NEWEST if sb3 is None else sb3
    _require(buffer_class, REPLAY_CLASSES, version_, {"buffer_size": buffer_size, "n_envs": n_envs})
    _require_legal(buffer_class, optimize_memory_usage, handle_timeout_termination)
    rows = max(buffer_size // n_envs, 1)
    lead = (rows, n_envs)
    arrays = _observations(buffer_class, "observations", lead, observation)
    if not optimize_memory_usage:
        arrays += _observations(buffer_class, "next_observations", lead, observation)
    casts = version_ >= _REPLAY_CASTS_ACTIONS and action.dtype == np.float64
    arrays.append(BufferArray("actions", (*lead, prod(action.shape)), _FLOAT32 if casts else action.dtype))
    arrays += [BufferArray(name, lead, _FLOAT32) for name in ("rewards", "dones")]
    arrays.append(BufferArray("timeouts", lead, _FLOAT32, is_written=handle_timeout_termination))
    if buffer_class != "HerReplayBuffer":
        return BufferLayout(buffer_class, rows, n_envs, tuple(arrays))
    arrays += [BufferArray("infos", lead, _POINTER)]
    arrays += [BufferArray(name, lead, _INT64) for name in ("ep_start", "ep_length")]
    arrays += [BufferArray("_current_ep_start", (n_envs,), _INT64)]
    # One empty dict per transition stands in `infos`, filled or not.
    return BufferLayout(buffer_class, rows, n_envs, tuple(arrays), sys.getsizeof({}) * rows * n_envs)


def rollout_buffer(
    observation: Sequence[Leaf],
    action: Leaf,
    n_steps: int,
    n_envs: int = 1,
    *,
    buffer_class: str = "RolloutBuffer",
    sb3: Version | None = None,
) -> BufferLayout:
    """Lay out a rollout buffer of `n_steps` vectorised steps; `sb3` as for a replay buffer."""
    version_ = _NEWEST if sb3 is None else sb3
    _require(buffer_class, ROLLOUT_CLASSES, version_, {"n_steps": n_steps, "n_envs": n_envs})
    lead = (n_steps, n_envs)
    if version_ < ROLLOUTS_KEEP_DTYPES:
        observation = [Leaf(leaf.name, leaf.shape, _FLOAT32) for leaf in observation]
        action = Leaf(action.name, action.shape, _FLOAT32)
    arrays = _observations(buffer_class, "observations", lead, observation)
    arrays.append(BufferArray("actions", (*lead, prod(action.shape)), action.dtype))
    arrays += [BufferArray(name, lead, _FLOAT32) for name in _ROLLOUT_SCALARS]
    return BufferLayout(buffer_class, n_steps, n_envs, tuple(arrays))


def _observations(
    buffer_class: str, name: str, lead: tuple[int, int], observation: Sequence[Leaf]
) -> list[BufferArray]:
    if buffer_class not in DICT_CLASSES:
        if len(observation) != 1 or observation[0].name:
            raise ArgumentError(
                f"buffer_class ({buffer_class}) stores one array per observation, this one has the keys "
                f"{[leaf.name for leaf in observation]}; use {'Dict' + buffer_class.removeprefix('NStep')}"
            )
        return [BufferArray(name, lead + observation[0].shape, observation[0].dtype)]
    return [BufferArray(f"{name}.{leaf.name}", lead + leaf.shape, leaf.dtype) for leaf in observation]


def _require(buffer_class: str, classes: tuple[str, ...], sb3: Version, counts: dict[str, int]) -> None:
    if buffer_class not in classes:
        raise ArgumentError(f"buffer_class ({buffer_class!r}) must be one of {list(classes)}")
    for name, count in counts.items():
        require_count(name, count)
    oldest = _HAS_NSTEP if buffer_class == "NStepReplayBuffer" else OLDEST_KNOWN
    if sb3 < oldest:
        raise ArgumentError(
            f"sb3 ({'.'.join(map(str, sb3))}) has no {buffer_class} that holdall knows; "
            f"it knows those from {'.'.join(map(str, oldest))} on"
        )


def _require_legal(buffer_class: str, optimize_memory_usage: bool, handle_timeout_termination: bool) -> None:
    """Refuse what Stable-Baselines3 refuses."""
    if not optimize_memory_usage:
        return
    if buffer_class != "ReplayBuffer":
        raise ArgumentError(
            f"optimize_memory_usage (True) is refused by Stable-Baselines3's {buffer_class}; leave it out, "
            "or use holdall.sb3.ReplayBuffer, which keeps each observation once in any case"
        )
    if handle_timeout_termination:
        raise ArgumentError(
            "optimize_memory_usage (True) is refused by Stable-Baselines3 together with timeout handling; pass "
            "replay_buffer_kwargs={'handle_timeout_termination': False}, or use holdall.sb3.ReplayBuffer"
        )


_CONTRIB = "sb3_contrib"
_MOST_ENVS = 2**20
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
    vec_env: str = "dummy"  # or "subproc"
    start_method: str = ""  # "": the one that Stable-Baselines3 takes on this system
    device: str = "cpu"
    frame_stack: int = 1  # of `observation`, which is stacked already
    buffer_class: str = ""
    optimize_memory_usage: bool = False
    handle_timeout_termination: bool = True
    sb3: Version | None = None  # None: the one that is installed, or the newest
    wrapper: str = ""  # "atari": Stable-Baselines3's wrapper of that name

    def __post_init__(self) -> None:
        if self.algo not in ALGORITHMS:
            raise ArgumentError(f"algo ({self.algo!r}) must be one of {', '.join(ALGORITHMS)}")
        for name in ("capacity", "num_envs", "frame_stack", "n_steps", "batch_size"):
            count = getattr(self, name)
            if count or name not in {"n_steps", "batch_size"}:
                require_count(name, count)
        if self.num_envs > _MOST_ENVS:
            raise ArgumentError(
                f"num_envs ({self.num_envs:,}) must be at most {_MOST_ENVS:,}; more do not fit anywhere"
            )
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ArgumentError(f"device ({self.device!r}) must be 'cpu', 'cuda', 'cuda:0', 'mps' or 'auto'")
        if self.vec_env not in {"dummy", "subproc"}:
            raise ArgumentError(f"vec_env ({self.vec_env!r}) must be 'dummy' or 'subproc'")
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
    def sb3_buffer(self) -> str:
        """The buffer class of Stable-Baselines3 that this run uses, or would use without holdall."""
        steps = 1 if self.on_policy else self.rollout_steps
        return self.buffer_class or default_class(self.on_policy, self.is_dict, steps)

    def layout(self) -> BufferLayout:
        """Lay out the buffer as the version of Stable-Baselines3 allocates it."""
        observation = leaves_of(self.observation, "obs")
        (action,) = leaves_of(self.action, "action")
        kind: dict[str, Any] = {"buffer_class": self.sb3_buffer, "sb3": self.sb3 or installed_version()}
        if self.on_policy:
            return rollout_buffer(observation, action, self.rollout_steps, self.num_envs, **kind)
        kind |= {name: getattr(self, name) for name in ("optimize_memory_usage", "handle_timeout_termination")}
        return replay_buffer(observation, action, self.capacity, self.num_envs, **kind)


def _require_action(algo: str, action: spaces.Space[Any]) -> None:
    """Refuse an action space that the algorithm's constructor refuses."""
    if algo in _DISCRETE and not isinstance(action, spaces.Discrete):
        raise ArgumentError(f"action ({action}) must be discrete for {algo}; write --action 'discrete(4)'")
    if algo in _CONTINUOUS and not isinstance(action, spaces.Box):
        raise ArgumentError(f"action ({action}) must be continuous for {algo}; write --action 8")

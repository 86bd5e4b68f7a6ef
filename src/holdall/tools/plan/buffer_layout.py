"""The buffers that Stable-Baselines3 allocates, byte for byte, in every version since 2.0.

In:  the leaves of spaces, sizes, a buffer class, a version.
Out: a `BufferLayout`: name, shape, dtype and bytes of every array, how much of it is in RAM, and what is copied while a
rollout is flattened. Nothing heavy is imported.
Invariant: the bytes of a layout are those of the real buffer; tests compare them with installed versions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.schema import Leaf, Tree
from holdall.units import require_count

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
    numbers = []
    for part in text.split(".")[:3]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            raise ArgumentError(f"sb3 version ({text!r}) must be written like '2.7.1'")
        numbers.append(int(digits))
    padded = [*numbers, 0, 0, 0]
    return (padded[0], padded[1], padded[2])


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
    observation: Sequence[Leaf], action: Leaf, buffer_size: int, n_envs: int = 1,
    *,
    buffer_class: str = "ReplayBuffer", optimize_memory_usage: bool = False, handle_timeout_termination: bool = True,
    sb3: Version | None = None,
) -> BufferLayout:  # fmt: skip
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

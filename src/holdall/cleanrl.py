"""ReplayBuffer: CleanRL's replay buffer over a ReplayMemory, without Stable-Baselines3.

In:  the arguments of CleanRL's `add`.  Out: its named tuple of tensors.
Invariant: the same seed draws the same rows from NumPy's global generator in the same order, so the trained weights are
the same. Where CleanRL casts (observations and actions to their space's dtype, rewards to float32), this class casts,
too; a cast to whole numbers that would change a value is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.delivery import of_ids
from holdall.errors import ArgumentError, MissingPackageError, SpaceError
from holdall.native import draw_slots
from holdall.replay import ReplayMemory
from holdall.report import MemoryReport
from holdall.schema import Leaf, as_array, stored_space
from holdall.units import require_count, require_flag

try:
    import torch
except ImportError as error:
    raise MissingPackageError("holdall.cleanrl needs torch; run \"pip install 'holdall[torch]'\"") from error

_FLAG = Leaf("", (), np.dtype(np.bool_))
_REWARD = Leaf("", (), np.dtype(np.float32))
_CUT = "TimeLimit.truncated"


class ReplayBufferSamples(NamedTuple):
    """What `sample` returns; `dones` and `rewards` have shape (batch, 1)."""

    observations: torch.Tensor
    actions: torch.Tensor
    next_observations: torch.Tensor
    dones: torch.Tensor
    rewards: torch.Tensor


class ReplayBuffer:
    """Drop-in for CleanRL's `cleanrl_utils.buffers.ReplayBuffer`.

    Args:
        buffer_size: Transitions over all environments; a rest that does not fill all of them is dropped.
        device: Where batches are wanted; "auto" for a CUDA device if there is one.
        optimize_memory_usage: Changes which rows are drawn, as it does there: a full buffer never draws the oldest
            ones. Observations are always stored once, and truncation is right either way.
        handle_timeout_termination: Read `infos[i]["TimeLimit.truncated"]`: such ends are no `dones`. CleanRL's scripts
            pass False, and terminations as `done`.
        budget: See `holdall.ReplayMemory`.
        prefer: The same.
        spill_dir: The same. Without it, a budget in bytes that does not hold `buffer_size` keeps the newest that fit.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.n_envs = require_count("n_envs", n_envs)
        self.buffer_size = max(require_count("buffer_size", buffer_size) // self.n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        self.optimize_memory_usage = require_flag("optimize_memory_usage", optimize_memory_usage)
        self.handle_timeout_termination = require_flag("handle_timeout_termination", handle_timeout_termination)
        self.device = _device_of(device)
        self._obs = _stored(observation_space, "observation_space")
        self._action = _stored(action_space, "action_space", is_flat=True)
        self.obs_shape, self.action_dim = self._obs.shape, self._action.shape[0]
        self._tiers: dict[str, Any] = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir}
        self._nothing_cut = np.zeros(self.n_envs, np.bool_)
        self.memory = self._new_memory()
        self._count_steps()

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add one transition per environment.

        Args:
            next_obs: At a truncation the final observation, as CleanRL's scripts pass it.
            infos: One dict per environment; not looked at without `handle_timeout_termination`.
        """
        ended, cut = self._fit(_FLAG, done, "done", "flags are True or False"), self._nothing_cut
        if self.handle_timeout_termination:
            cut = self._cuts(infos)
            ended = ended > cut
        self.memory.add(
            self._fit(self._obs, obs, "obs"), self._fit(self._action, action, "action"),
            self._fit(_REWARD, reward, "reward"), self._fit(self._obs, next_obs, "next_obs"), ended, cut,
        )  # fmt: skip
        self._count_steps()

    def extend(self, *steps: Iterable[Any]) -> None:
        """Add several steps: the arguments of `add`, each with a leading axis of steps."""
        for step in zip(*steps, strict=True):
            self.add(*step)

    def sample(self, batch_size: int) -> ReplayBufferSamples:
        """Draw transitions, in the order of CleanRL's own buffer."""
        require_count("batch_size", batch_size)
        if not self.size():
            raise ArgumentError(f"sample({batch_size}) cannot draw: nothing was added yet; call add before")
        ids = self._held(self._drawn(batch_size))
        if self.device.type == "cuda":
            batch = self.memory.follow(of_ids(ids), device=str(self.device))
            ended = (batch.terminated > batch.truncated).to(torch.float32).reshape(-1, 1)
            return ReplayBufferSamples(batch.obs, batch.action, batch.next_obs, ended, batch.reward.reshape(-1, 1))
        rows = self.memory.rows(ids)
        obs, next_obs = rows.small[0]
        arrays = (obs, rows.action[0], next_obs, rows.ended.reshape(-1, 1), rows.reward.reshape(-1, 1))
        tensors = map(torch.from_numpy, arrays)
        return ReplayBufferSamples(*(tensors if self.device.type == "cpu" else (t.to(self.device) for t in tensors)))

    def size(self) -> int:
        """Count the steps held, each of all environments."""
        return self.buffer_size if self.full else self.pos

    def reset(self) -> None:
        """Forget every transition."""
        self.memory.close()
        self.memory = self._new_memory()
        self._count_steps()

    def adopt(self, memory: ReplayMemory) -> None:
        """Continue with a memory that was loaded; the one before is closed."""
        capacity = self.buffer_size * self.n_envs
        if (memory.capacity, memory.num_envs) != (capacity, self.n_envs):
            raise ArgumentError(
                f"a memory of {memory.capacity} transitions in {memory.num_envs} lanes does not fit a buffer of "
                f"{capacity} in {self.n_envs}; make the buffer with the settings that it was saved with"
            )
        self.memory.close()
        self.memory = memory
        self._count_steps()

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        return self.memory.report()

    def _new_memory(self) -> ReplayMemory:
        observed, acted = (stored_space(leaf.shape, leaf.dtype) for leaf in (self._obs, self._action))
        return ReplayMemory(observed, acted, self.buffer_size * self.n_envs, self.n_envs, **self._tiers)

    def _count_steps(self) -> None:
        ticks = self.memory.next_id // self.n_envs
        self.pos, self.full = ticks % self.buffer_size, ticks >= self.buffer_size

    def _drawn(self, count: int) -> NDArray[np.int64]:
        """Draw slots and lanes from NumPy's global generator, and return the ids of what lies there."""
        newest = self.memory.next_id // self.n_envs - 1
        if not (self.optimize_memory_usage and self.full and self.buffer_size > 1):
            return draw_slots(count, self.size(), self.buffer_size, newest, self.n_envs)
        # Its own layout has no next observation for the oldest: the place is that of the newest one's.
        ticks = newest + 1 - self.buffer_size + np.random.randint(1, self.buffer_size, size=count)  # noqa: NPY002  its own
        return ticks * self.n_envs + np.random.randint(0, high=self.n_envs, size=count)  # noqa: NPY002  likewise

    def _held(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw again for ids that are gone: a budget without a disk tier may hold less than all slots."""
        first_id, next_id = self.memory.first_id, self.memory.next_id
        if next_id - first_id < self.size() * self.n_envs and (gone := ids < first_id).any():
            return np.where(gone, np.random.randint(first_id, next_id, size=len(ids)), ids)  # noqa: NPY002  its own
        return ids

    def _cuts(self, infos: Any) -> NDArray[np.bool_]:
        """Return which environments' episodes were cut by a time limit."""
        if isinstance(infos, Mapping):
            raise ArgumentError(
                "infos is a dict, as Gymnasium's vector environments give it, and does not say which episodes a time "
                "limit has cut; pass handle_timeout_termination=False and terminations as done, as CleanRL's scripts do"
            )
        if not hasattr(infos, "__len__") or len(infos) != self.n_envs:
            given = f"has {len(infos)} entries" if hasattr(infos, "__len__") else f"is a {type(infos).__name__}"
            raise ArgumentError(f"infos {given}; pass a list of dicts, one for each of {self.n_envs} environments")
        for i, info in enumerate(infos):
            if not isinstance(info, Mapping):
                raise ArgumentError(f"infos[{i}] is a {type(info).__name__}; pass a dict per environment")
        if not any(info.get(_CUT, False) for info in infos):
            return self._nothing_cut
        flags = [info.get(_CUT, False) for info in infos]
        return self._fit(_FLAG, flags, f'infos[...]["{_CUT}"]', "pass True or False")

    def _fit(self, leaf: Leaf, value: Any, argument: str, rule: str = "it would be rounded") -> NDArray[Any]:
        """Do what assigning to one of CleanRL's arrays does to shape and dtype, if no whole number changes."""
        array = value if type(value) is np.ndarray else as_array(value, argument)
        if array.dtype != leaf.dtype:
            cast = array.astype(leaf.dtype)
            if leaf.dtype.kind in "biu" and (changed := cast != array).any():
                raise ArgumentError(
                    f"{argument} holds {array[changed].flat[0]}, which is no {leaf.dtype}: {rule}; pass values of "
                    f"that dtype, or another space"
                )
            array = cast
        shape = (self.n_envs, *leaf.shape)
        return array.reshape(shape) if array.shape != shape and array.size == prod(shape) else array


def _stored(space: spaces.Space[Any], argument: str, is_flat: bool = False) -> Leaf:
    """Describe a space as CleanRL stores it: one axis for actions, float32 for those of float64."""
    kinds = spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete
    if not isinstance(space, kinds) or space.shape is None:
        raise SpaceError(
            f"{argument} is a {type(space).__name__}; CleanRL's buffer takes Box, Discrete, MultiBinary and "
            "MultiDiscrete spaces, so use holdall.ReplayMemory, which takes all"
        )
    dtype = np.dtype(space.dtype)
    if is_flat:
        return Leaf("", (prod(space.shape),), np.dtype(np.float32) if dtype == np.float64 else dtype)
    return Leaf("", (1,) if isinstance(space, spaces.Discrete) else tuple(space.shape), dtype)


def _device_of(device: torch.device | str) -> torch.device:
    """Return a device, the CPU in the place of a CUDA device that is not there, as CleanRL does."""
    try:
        found = torch.device("cuda" if device == "auto" else device)
    except RuntimeError as error:
        raise ArgumentError(f"device ({device}) is none that torch knows ({error}); use 'cpu' or 'cuda'") from error
    return torch.device("cpu") if found.type == "cuda" and not torch.cuda.is_available() else found

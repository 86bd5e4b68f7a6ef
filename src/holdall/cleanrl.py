"""ReplayBuffer: CleanRL's replay buffer over a ReplayMemory, without Stable-Baselines3.

In:  the arguments of CleanRL's `add`.  Out: its named tuple of tensors.
Invariant: the same seed draws the same rows from NumPy's global generator in the same order, so the trained weights are
the same. Where CleanRL casts (observations and actions to their space's dtype, rewards to float32), this class casts,
too; a cast to whole numbers that would change a value is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import of_ids
from holdall.errors import ArgumentError, MissingPackageError, SpaceError
from holdall.native import draw_slots
from holdall.replay import ReplayMemory
from holdall.report import MemoryReport
from holdall.schema import as_array, require_count, require_flag, whole
from holdall.space_leaves import stored_space

try:
    import torch
except ImportError as error:
    raise MissingPackageError("holdall.cleanrl needs torch; run \"pip install 'holdall[torch]'\"") from error

_CUT = "TimeLimit.truncated"
_FLOAT32 = np.dtype(np.float32)
_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]  # NumPy documents it


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
        buffer_size: float,
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
        self.buffer_size = max(require_count("buffer_size", whole(buffer_size)) // self.n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        self.optimize_memory_usage = require_flag("optimize_memory_usage", optimize_memory_usage)
        self.handle_timeout_termination = require_flag("handle_timeout_termination", handle_timeout_termination)
        self.device = _device_of(device)
        self._obs = _form_of(observation_space, self.n_envs, "observation_space")
        acted, dtype = _form_of(action_space, self.n_envs, "action_space")
        self._action = acted, _FLOAT32 if dtype == np.float64 else dtype
        self._reward, self._flag = ((self.n_envs,), _FLOAT32), ((self.n_envs,), np.dtype(np.bool_))
        self.obs_shape, self.action_dim = self._obs[0][1:] or (1,), prod(acted[1:])
        self._tiers: dict[str, Any] = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir}
        self._nothing_cut = np.zeros(self.n_envs, np.bool_)
        self.memory = self._new_memory()

    @property
    def pos(self) -> int:
        """The slot that the next step goes to."""
        return self.memory.next_id // self.n_envs % self.buffer_size

    @property
    def full(self) -> bool:
        """Whether every slot has been written to."""
        return self.memory.next_id // self.n_envs >= self.buffer_size

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add one transition per environment.

        Args:
            next_obs: At a truncation the final observation, as CleanRL's scripts pass it.
            infos: One dict per environment; not looked at without `handle_timeout_termination`.
        """
        ended, cut = _fit(self._flag, done, "done"), self._nothing_cut
        if self.handle_timeout_termination and (cut := self._cuts(infos)) is not self._nothing_cut:
            ended = ended > cut
        self.memory.add(
            _fit(self._obs, obs, "obs"), _fit(self._action, action, "action"), _fit(self._reward, reward, "reward"),
            _fit(self._obs, next_obs, "next_obs"), ended, cut,
        )  # fmt: skip

    def extend(self, *steps: Iterable[Any]) -> None:
        """Add several steps: the arguments of `add`, each with a leading axis of steps."""
        for step in zip(*steps, strict=True):
            self.add(*step)

    def sample(self, batch_size: int) -> ReplayBufferSamples:
        """Draw transitions, in the order of CleanRL's own buffer."""
        require_count("batch_size", batch_size)
        found = self._drawn_at_once(batch_size)
        if type(found) is tuple:
            acted, ends, rewards, *observed = map(torch.from_numpy, found)
            return self._samples(observed[0], acted, observed[1], ends, rewards)
        ids = self._held(self._drawn(batch_size)) if type(found) is int else found
        if self.device.type == "cuda":
            batch = self.memory.follow(of_ids(ids), device=str(self.device))
            ended = (batch.terminated > batch.truncated).to(torch.float32)
            return self._samples(batch.obs, batch.action, batch.next_obs, ended, batch.reward)
        rows = self.memory.rows(ids)
        obs, next_obs = rows.small[0]
        samples = map(torch.from_numpy, self._samples(obs, rows.action[0], next_obs, rows.ended, rows.reward))
        return ReplayBufferSamples(*(samples if self.device.type == "cpu" else (t.to(self.device) for t in samples)))

    def _drawn_at_once(self, batch_size: int) -> Any:
        """Draw and copy in one call, if that can be done, see `BatchReader`."""
        if self.optimize_memory_usage or self.device.type != "cpu":
            return 0
        slots, steps = self.buffer_size, self.memory.next_id // self.n_envs
        return self.memory.draw_at_once(_generator(), batch_size, min(steps, slots), slots)

    def _samples(self, obs: Any, action: Any, next_obs: Any, ended: Any, reward: Any) -> ReplayBufferSamples:
        """Give arrays or tensors the shapes that CleanRL's have."""
        rows = len(ended)
        if obs.ndim == 1:
            obs, next_obs = obs.reshape(rows, 1), next_obs.reshape(rows, 1)
        flat = action if action.ndim == 2 else action.reshape(rows, self.action_dim)
        return ReplayBufferSamples(obs, flat, next_obs, ended.reshape(rows, 1), reward.reshape(rows, 1))

    def size(self) -> int:
        """Count the steps held, each of all environments; a budget without a disk tier may hold less than all slots."""
        return (self.memory.next_id - self.memory.first_id) // self.n_envs

    def reset(self) -> None:
        """Forget every transition."""
        self.memory.close()
        self.memory = self._new_memory()

    def adopt(self, memory: ReplayMemory) -> None:
        """Continue with a memory that was loaded; the one before is closed."""
        if memory.capacity != self.memory.capacity or memory.num_envs != self.n_envs:
            raise ArgumentError(
                f"a memory of {memory.capacity} transitions in {memory.num_envs} lanes does not fit a buffer of "
                f"{self.memory.capacity} in {self.n_envs}; make the buffer with the settings that it was saved with"
            )
        if memory.schema != self.memory.schema:
            fields = [[(leaf.shape, leaf.dtype.name) for leaf in each.schema.leaves] for each in (memory, self.memory)]
            raise ArgumentError(
                f"a memory of {fields[0]} does not fit a buffer of {fields[1]}: observation and action must be the "
                "same; make the buffer with the spaces that it was saved with"
            )
        self.memory.close()
        self.memory = memory

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        return self.memory.report()

    def _new_memory(self) -> ReplayMemory:
        observed, acted = (stored_space(shape[1:], dtype) for shape, dtype in (self._obs, self._action))
        return ReplayMemory(observed, acted, self.buffer_size * self.n_envs, self.n_envs, **self._tiers)

    def _drawn(self, count: int) -> NDArray[np.int64]:
        """Draw slots and lanes from NumPy's global generator, and return the ids of what lies there."""
        steps = self.memory.next_id // self.n_envs
        if self.memory.next_id == self.memory.first_id:
            raise ArgumentError(f"sample({count}) cannot draw: no transition is held; call add before")
        filled = min(steps, self.buffer_size)
        if not self.optimize_memory_usage or steps < self.buffer_size or self.buffer_size == 1:
            return draw_slots(count, filled, self.buffer_size, steps - 1, self.n_envs)
        # Its own layout has no next observation for the oldest step: the newest one's lies in that place.
        ticks = steps - filled + np.random.randint(1, filled, size=count)  # noqa: NPY002  its own generator
        return ticks * self.n_envs + np.random.randint(0, high=self.n_envs, size=count)  # noqa: NPY002  likewise

    def _held(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw again for ids that are gone: a budget without a disk tier may hold less than all slots."""
        first_id, next_id = self.memory.first_id, self.memory.next_id
        gone = ids < first_id
        if gone.any():
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
        return _fit(self._flag, flags, f'infos[...]["{_CUT}"]')


Form = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape, environments first, and dtype of an array that is stored."""


def _fit(form: Form, value: Any, argument: str) -> NDArray[Any]:
    """Do what assigning to one of CleanRL's arrays does to shape and dtype, if no whole number changes.

    Axes of length 1 may be missing, or too many; actions alone are reshaped, as they are there.
    """
    shape, dtype = form
    array = value if type(value) is np.ndarray else as_array(value, argument)
    if array.dtype is not dtype:
        given, array = array, array.astype(dtype)
        if dtype.kind in "biu" and (changed := array != given).any():
            raise ArgumentError(
                f"{argument} holds {given[changed].flat[0]}, which {dtype} cannot hold; pass values of that dtype"
                + (", True or False" if dtype == np.bool_ else ", or a space of another one")
            )
    if array.shape == shape:
        return array
    is_same = [axis for axis in array.shape if axis != 1] == [axis for axis in shape if axis != 1]
    if array.size != prod(shape) or not (is_same or argument == "action"):
        raise ArgumentError(
            f"{argument} has shape {array.shape}, expected {shape}: n_envs={shape[0]} environments, then the space's "
            f"{shape[1:]}; pass an array of that shape"
        )
    return array.reshape(shape)


def _form_of(space: spaces.Space[Any], n_envs: int, argument: str) -> Form:
    """Describe what is stored of a space that CleanRL's buffer takes."""
    kinds = spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete
    if not isinstance(space, kinds) or space.shape is None:
        raise SpaceError(
            f"{argument} is a {type(space).__name__}; CleanRL's buffer takes Box, Discrete, MultiBinary and "
            "MultiDiscrete spaces, so use holdall.ReplayMemory, which takes all"
        )
    return (n_envs, *space.shape), np.dtype(space.dtype)


def _device_of(device: torch.device | str) -> torch.device:
    """Return a device, the CPU in the place of a CUDA device that is not there, as CleanRL does."""
    try:
        found = torch.device("cuda" if device == "auto" else device)
    except RuntimeError as error:
        raise ArgumentError(f"device ({device}) is none that torch knows ({error}); use 'cpu' or 'cuda'") from error
    return torch.device("cpu") if found.type == "cuda" and not torch.cuda.is_available() else found

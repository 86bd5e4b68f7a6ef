"""ReplayBuffer: CleanRL's replay buffer over a ReplayMemory, without Stable-Baselines3.

Guarantee: the same seed draws the same rows from NumPy's global generator in the same order, so the trained weights are
the same. Where CleanRL casts (observations and actions to the dtype of their space, rewards to float32), this class
casts, too. A cast to integers that would change a value is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall._native import draw_slots
from holdall.batch import Draw
from holdall.checks import require_count, require_flag, to_whole
from holdall.errors import ArgumentError, MissingPackageError, SpaceError
from holdall.memory import ReplayMemory
from holdall.report import MemoryReport
from holdall.schema import as_array
from holdall.space_leaves import stored_space
from holdall.store.tuning import Tuning

try:
    import torch
except ImportError as error:
    raise MissingPackageError("holdall.cleanrl needs torch; run \"pip install 'holdall[torch]'\"") from error

_TIME_LIMIT_KEY = "TimeLimit.truncated"
_FLOAT32 = np.dtype(np.float32)
_BOOL = np.dtype(np.bool_)
_get_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]  # NumPy documents it.

Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of one step of a stored array. The first axis of the shape is the environments."""


class ReplayBufferSamples(NamedTuple):
    """The result of `sample`. `dones` and `rewards` have shape (batch, 1)."""

    observations: torch.Tensor
    actions: torch.Tensor
    next_observations: torch.Tensor
    dones: torch.Tensor
    rewards: torch.Tensor


class ReplayBuffer:
    """Drop-in for CleanRL's `cleanrl_utils.buffers.ReplayBuffer`.

    Args:
        buffer_size: Transitions over all environments, rounded down to whole steps.
        device: Device of the batches; "auto" for a CUDA device if there is one.
        optimize_memory_usage: Changes which rows are drawn, as it does in CleanRL: a full buffer never draws the oldest
            step. Observations are always stored once, and truncation is right either way.
        handle_timeout_termination: Read `infos[i]["TimeLimit.truncated"]`. Such ends are not `dones`. CleanRL's scripts
            pass False, and terminations as `done`.
        budget: See `holdall.ReplayMemory`.
        prefer: See `holdall.ReplayMemory`.
        spill_dir: See `holdall.ReplayMemory`. Without it, a budget in bytes that does not hold `buffer_size` keeps the
            newest transitions that fit.

    Examples:
        >>> from holdall.cleanrl import ReplayBuffer
        >>> rb = ReplayBuffer(1_000, env.observation_space, env.action_space, "cpu", handle_timeout_termination=False)
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
        _tuning: Tuning | None = None,
    ) -> None:
        self.n_envs = require_count("n_envs", n_envs)
        self.buffer_size = max(require_count("buffer_size", to_whole(buffer_size)) // self.n_envs, 1)
        self.observation_space = observation_space
        self.action_space = action_space
        self.optimize_memory_usage = require_flag("optimize_memory_usage", optimize_memory_usage)
        self.handle_timeout_termination = require_flag("handle_timeout_termination", handle_timeout_termination)
        self.device = _find_device(device)
        self._obs = _describe_space(observation_space, self.n_envs, "observation_space")
        action_shape, action_dtype = _describe_space(action_space, self.n_envs, "action_space")
        self._action: Spec = (action_shape, _FLOAT32 if action_dtype == np.float64 else action_dtype)
        self._reward: Spec = ((self.n_envs,), _FLOAT32)
        self._flag: Spec = ((self.n_envs,), _BOOL)
        self.obs_shape = self._obs[0][1:] or (1,)
        self.action_dim = prod(action_shape[1:])
        self._memory_settings: dict[str, Any] = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "_tuning": _tuning,
        }
        self._never_truncated = np.zeros(self.n_envs, np.bool_)
        # Whether `add` has to convert steps, because the memory refuses them otherwise.
        self._has_to_cast = self.handle_timeout_termination
        self.memory = self._new_memory()
        columns = self.memory.store.columns
        self._outputs = (
            *columns.obs_outputs,
            *columns.action_outputs,
            *columns.next_obs_outputs,
            columns.ended_output,
            columns.reward_output,
        )

    @property
    def pos(self) -> int:
        """The slot of the next step."""
        return self._count_steps() % self.buffer_size

    @property
    def full(self) -> bool:
        """Whether every slot has been written to."""
        return self._count_steps() >= self.buffer_size

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add one transition per environment.

        Args:
            next_obs: At a truncation the final observation, as CleanRL's scripts pass it.
            infos: One dict per environment. Not read without `handle_timeout_termination`.
        """
        if not self._has_to_cast:
            try:
                self.memory.store.append(obs, action, reward, next_obs, done, self._never_truncated)
            except ArgumentError:
                pass  # The memory has written nothing.
            else:
                return
        self._add_cast(obs, next_obs, action, reward, done, infos)
        self._has_to_cast = True

    def _add_cast(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Cast a step as CleanRL does, and add it."""
        truncated = self._never_truncated
        terminated = _cast(self._flag, done, "done")
        if self.handle_timeout_termination:
            truncated = self._read_time_limits(infos)
            terminated = terminated & ~truncated
        self.memory.add(
            _cast(self._obs, obs, "obs"),
            _cast(self._action, action, "action"),
            _cast(self._reward, reward, "reward"),
            _cast(self._obs, next_obs, "next_obs"),
            terminated,
            truncated,
        )

    def extend(self, *steps: Iterable[Any]) -> None:
        """Add several steps: the arguments of `add`, each with a leading axis of steps."""
        for step in zip(*steps, strict=True):
            self.add(*step)

    def sample(self, batch_size: int) -> ReplayBufferSamples:
        """Draw the transitions that CleanRL's own buffer draws, in the same order."""
        require_count("batch_size", batch_size)
        ids = self._replace_evicted(self._draw_ids(batch_size))
        if self.device.type != "cpu":
            batch = self.memory.batch_source.deliver(Draw.from_ids(ids), device=str(self.device))
            ended = (batch.terminated > batch.truncated).to(torch.float32)
            return self._make_samples(batch.obs, batch.action, batch.next_obs, ended, batch.reward)
        samples = self._make_samples(*self.memory.store.view().read(ids, self._outputs))
        return ReplayBufferSamples(*map(torch.from_numpy, samples))

    def _make_samples(self, obs: Any, action: Any, next_obs: Any, ended: Any, reward: Any) -> ReplayBufferSamples:
        """Return arrays or tensors in the shapes of CleanRL's samples."""
        rows = len(ended)
        if obs.ndim == 1:
            obs = obs.reshape(rows, 1)
            next_obs = next_obs.reshape(rows, 1)
        flat = action if action.ndim == 2 else action.reshape(rows, self.action_dim)
        return ReplayBufferSamples(obs, flat, next_obs, ended.reshape(rows, 1), reward.reshape(rows, 1))

    def size(self) -> int:
        """Return the number of steps held. A budget without a disk tier may hold fewer than `buffer_size`."""
        return (self.memory.next_id - self.memory.first_id) // self.n_envs

    def reset(self) -> None:
        """Remove every transition."""
        self.memory.close()
        self.memory = self._new_memory()

    def adopt(self, memory: ReplayMemory) -> None:
        """Use a memory that was loaded, and close the present one."""
        if memory.capacity != self.memory.capacity or memory.num_envs != self.n_envs:
            raise ArgumentError(
                f"A memory of {memory.capacity} transitions in {memory.num_envs} lanes does not fit a buffer of "
                f"{self.memory.capacity} in {self.n_envs}. Make the buffer with the settings of the saved one."
            )
        if memory.schema != self.memory.schema:
            raise ArgumentError(
                f"A memory of {_describe_leaves(memory)} does not fit a buffer of {_describe_leaves(self.memory)}: "
                "observation and action must have the same shapes and dtypes. Make the buffer with the spaces that the "
                "memory was saved with."
            )
        self.memory.close()
        self.memory = memory

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        return self.memory.report()

    def _new_memory(self) -> ReplayMemory:
        obs_shape, obs_dtype = self._obs
        action_shape, action_dtype = self._action
        memory = ReplayMemory(
            stored_space(obs_shape[1:], obs_dtype),
            stored_space(action_shape[1:], action_dtype),
            self.buffer_size * self.n_envs,
            self.n_envs,
            **self._memory_settings,
        )
        memory.host_store.set_reward_dtype(_FLOAT32)
        return memory

    def _count_steps(self) -> int:
        """Return the number of steps that were added."""
        return self.memory.next_id // self.n_envs

    def _draw_ids(self, count: int) -> NDArray[np.int64]:
        """Draw slots and environments from NumPy's global generator, and return the ids of their transitions."""
        if self.memory.next_id == self.memory.first_id:
            raise ArgumentError(f"sample({count}) was called before a step was added. Call add first.")
        steps = self._count_steps()
        filled = min(steps, self.buffer_size)
        if not self.optimize_memory_usage or steps < self.buffer_size or self.buffer_size == 1:
            return draw_slots(_get_generator(), count, filled, self.buffer_size, steps - 1, self.n_envs)
        # CleanRL does not draw the oldest step. The newest step has overwritten its next observation there.
        ticks = steps - filled + np.random.randint(1, filled, size=count)  # noqa: NPY002  CleanRL's generator
        lanes = np.random.randint(0, high=self.n_envs, size=count)  # noqa: NPY002  CleanRL's generator
        return ticks * self.n_envs + lanes

    def _replace_evicted(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw again for ids that a budget without a disk tier has evicted."""
        first_id = self.memory.first_id
        if first_id == 0:
            return ids
        is_evicted = ids < first_id
        if not is_evicted.any():
            return ids
        held_ids = np.random.randint(first_id, self.memory.next_id, size=len(ids))  # noqa: NPY002  CleanRL's generator
        return np.where(is_evicted, held_ids, ids)

    def _read_time_limits(self, infos: Any) -> NDArray[np.bool_]:
        """Return in which environments a time limit ended the episode."""
        if isinstance(infos, Mapping):
            raise ArgumentError(
                "infos is a dict, as Gymnasium's vector environments return it, and does not say which episodes a time "
                "limit ended. Pass handle_timeout_termination=False and terminations as done, as CleanRL's scripts do."
            )
        if not hasattr(infos, "__len__") or len(infos) != self.n_envs:
            given = f"has {len(infos)} entries" if hasattr(infos, "__len__") else f"is a {type(infos).__name__}"
            raise ArgumentError(f"infos {given}. Pass a list of dicts, one for each of {self.n_envs} environments.")
        for i, info in enumerate(infos):
            if not isinstance(info, Mapping):
                raise ArgumentError(f"infos[{i}] is a {type(info).__name__}. Pass a dict per environment.")
        flags = [info.get(_TIME_LIMIT_KEY, False) for info in infos]
        if not any(flags):
            return self._never_truncated
        return _cast(self._flag, flags, f'infos[...]["{_TIME_LIMIT_KEY}"]')


def _cast(spec: Spec, value: Any, argument: str) -> NDArray[Any]:
    """Return `value` in the dtype and shape of `spec`. Raise ArgumentError if a cast to integers would change a value.

    Axes of length 1 may be added or removed. Actions may have any shape, as in CleanRL.
    """
    shape, dtype = spec
    array = value if type(value) is np.ndarray else as_array(value, argument)
    if array.dtype != dtype:
        given = array
        array = given.astype(dtype)
        if dtype.kind in "biu":
            is_changed = array != given
            if is_changed.any():
                remedy = "True or False" if dtype == np.bool_ else "or a space of another dtype"
                raise ArgumentError(
                    f"{argument} has the value {given[is_changed].flat[0]}, which does not fit into {dtype}. Pass "
                    f"values of that dtype, {remedy}."
                )
    if array.shape == shape:
        return array
    has_same_axes = [axis for axis in array.shape if axis != 1] == [axis for axis in shape if axis != 1]
    if array.size != prod(shape) or not (has_same_axes or argument == "action"):
        raise ArgumentError(
            f"{argument} has shape {array.shape}, expected {shape}: n_envs={shape[0]} environments, then the shape "
            f"{shape[1:]} of the space. Pass an array of that shape."
        )
    return array.reshape(shape)


def _describe_space(space: spaces.Space[Any], n_envs: int, argument: str) -> Spec:
    """Return the shape and dtype of one step of a space. Raise SpaceError if CleanRL's buffer does not accept it."""
    kinds = spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete
    if not isinstance(space, kinds) or space.shape is None:
        raise SpaceError(
            f"{argument} is a {type(space).__name__}. CleanRL's buffer accepts Box, Discrete, MultiBinary and "
            "MultiDiscrete spaces. For other spaces, use holdall.ReplayMemory."
        )
    return (n_envs, *space.shape), np.dtype(space.dtype)


def _describe_leaves(memory: ReplayMemory) -> list[tuple[tuple[int, ...], str]]:
    return [(leaf.shape, leaf.dtype.name) for leaf in memory.schema.leaves]


def _find_device(device: torch.device | str) -> torch.device:
    """Return a device of torch. Without CUDA, return the CPU instead of a CUDA device, as CleanRL does."""
    try:
        found = torch.device("cuda" if device == "auto" else device)
    except RuntimeError as error:
        raise ArgumentError(f"device ({device}) is not a device of torch ({error}). Use 'cpu' or 'cuda'.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return found

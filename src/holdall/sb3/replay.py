"""ReplayBuffer: Stable-Baselines3's replay buffers, Box and Dict, over a ReplayMemory.

Guarantee: the same seed draws the same rows from NumPy's global generator in the same order, and the tensors are equal
bit for bit, n-step returns included. So the trained weights are the same. Where Stable-Baselines3 casts (observations
to the dtype of their space, actions from float64, rewards to float32), this class casts, too.

Tick `t` is in slot `t % buffer_size`. Arrays over slots are gathered when they are read.

`BatchPath` lists the three ways in which a batch is made. If `device` is a GPU, batches are made there. With
`prefetch`, a background thread makes them ahead of time. Each batch is then drawn `prefetch` calls earlier, so later
steps and priorities do not affect it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any, Self

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from holdall import ReplayMemory
from holdall._native import draw_slots
from holdall.batch import Batch, Draw
from holdall.checks import require_count, to_whole
from holdall.errors import ArgumentError
from holdall.report import MemoryReport
from holdall.sb3.ahead import BatchesAhead
from holdall.sb3.batch_path import BatchPath
from holdall.sb3.casts import cast, cast_flags, read_time_limits
from holdall.sb3.n_steps import require_steps, sum_rewards, warn_of_ignored_steps
from holdall.sb3.slot_arrays import ReadRows, SlotArray, SlotField, WriteRows
from holdall.space_leaves import stored_space
from holdall.store.columns import Columns
from holdall.store.tuning import Tuning

Ids = NDArray[np.int64]
Spec = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape, environments first, and dtype of an array that is stored."""

_FLOAT32 = np.dtype(np.float32)
_get_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]  # NumPy documents it.
_COPIED_SLOTS = 64
"""Slots of another buffer that are copied in one call."""
_MAX_READ_BYTES = 8 * 2**20
"""Maximum number of bytes of a field that one call gathers when its array is read."""
_TORCH_ALIGNMENT_BYTES = 64
"""Alignment of torch's own tensors. Matrix products of floats with another alignment add up in another order, so their
last bits differ, and so do the weights (seen with MKL on rows at 4 and 8 bytes after a multiple of 16)."""
_BOX_DEFAULTS = tuple(ReplayBufferSamples._field_defaults.values())
_CONVERSIONS = ("_normalize_obs", "_normalize_reward", "to_torch")
"""Methods that Stable-Baselines3 calls between the rows of a batch and its tensors."""


class ReplayBuffer(buffers.ReplayBuffer):
    """Drop-in for Stable-Baselines3's `ReplayBuffer` and `DictReplayBuffer`.

    Args:
        buffer_size: Transitions over all environments, as in Stable-Baselines3.
        optimize_memory_usage: Accepted and without effect: each observation is always stored once, and the final
            observation of a truncated episode is always kept.
        handle_timeout_termination: As in Stable-Baselines3.
        n_steps: Steps of the returns, as in Stable-Baselines3's `NStepReplayBuffer`. Dict observations work, too.
        gamma: Discount of a reward one step later, for `n_steps` above 1.
        budget: See `holdall.ReplayMemory`; through `replay_buffer_kwargs`.
        prefer: See `holdall.ReplayMemory`.
        spill_dir: See `holdall.ReplayMemory`. Without it, a budget in bytes that does not hold `buffer_size` keeps the
            newest transitions that fit.
        prefetch: Batches that are made ahead on a GPU. Each is drawn `prefetch` calls of `sample` early.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from holdall.sb3 import ReplayBuffer
        >>> model = DQN("MlpPolicy", env, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs={"budget": "1GiB"})
        >>> _ = model.learn(50)
        >>> model.replay_buffer.report().dropped_early
        0
    """

    observations: Any = SlotField()
    next_observations: Any = SlotField()
    actions: Any = SlotField()
    rewards: Any = SlotField()
    dones: Any = SlotField()
    timeouts: Any = SlotField()

    _accepts_n_steps = True
    _assigned_pos: int | None = None  # `pos` that a user has assigned. None: derived from the steps that were added.
    _assigned_full: bool | None = None  # `full` that a user has assigned. None: derived as well.
    _is_moved = False  # Whether a user has assigned `pos` or `full` since the last step.
    _checked_device: th.device | None = None  # Device that `_is_cpu` describes.
    _is_cpu = False
    _casts = False  # Whether steps have to be cast before the memory accepts them.
    # Whether a subclass, or this object, overrides `_get_samples`.
    _overrides_get_samples = False
    # Whether a subclass, or this object, overrides one of `_CONVERSIONS`.
    _overrides_conversion = False

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        prefetch: int = 0,
        _tuning: Tuning | None = None,
    ) -> None:
        # This call skips the constructor of the parent class, which allocates the arrays that this class avoids.
        buffer_size = require_count("buffer_size", to_whole(buffer_size), 0)
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        # Settings of the memory. `reset` makes the next memory with them, too.
        self.tiers: dict[str, Any] = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir}
        self._tuning = _tuning
        self.handle_timeout_termination = handle_timeout_termination
        self.prefetch = require_count("prefetch", prefetch, 0)
        self._ahead = BatchesAhead()
        self.n_steps = require_steps(n_steps)
        if n_steps == 1:
            warn_of_ignored_steps(type(self).__name__, accepts_n_steps=self._accepts_n_steps)
        self.gamma = gamma
        self._is_dict = isinstance(observation_space, spaces.Dict)
        self._lane_shape = (n_envs,)
        self._action_shape = (n_envs, self.action_dim)
        # Actions of a Discrete space are one number per environment.
        self._number_shape = (n_envs,) if self.action_dim == 1 else None
        self._action_dtype = np.dtype(self._maybe_cast_dtype(action_space.dtype))
        self._obs_specs = self._describe_observations(observation_space)
        self._none_truncated = np.zeros(n_envs, np.bool_)
        self.memory = self._new_memory()
        self._columns = Columns(self.memory.schema)
        self._outputs = self._order_outputs(self._columns)
        self._forget_moves()

    def __init_subclass__(cls, **settings: Any) -> None:
        """Record which methods of Stable-Baselines3 a subclass overrides."""
        super().__init_subclass__(**settings)
        cls._overrides_get_samples = cls._get_samples is not ReplayBuffer._get_samples
        cls._overrides_conversion = any(getattr(cls, name) is not getattr(ReplayBuffer, name) for name in _CONVERSIONS)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. If it is a method of Stable-Baselines3, record that this object overrides it."""
        if name == "_get_samples":
            self._overrides_get_samples = True
        elif name in _CONVERSIONS:
            self._overrides_conversion = True
        super().__setattr__(name, value)

    # ---------------------------------------------------------------- which steps are held

    @property
    def pos(self) -> int:
        """The slot of the next step."""
        if self._assigned_pos is not None:
            return self._assigned_pos
        return self._count_ticks() % self.buffer_size

    @pos.setter
    def pos(self, value: int) -> None:
        self._assigned_pos = value
        self._is_moved = True

    @property
    def full(self) -> bool:
        """Whether every slot has been written to."""
        if self._assigned_full is not None:
            return self._assigned_full
        return self._count_ticks() >= self.buffer_size

    @full.setter
    def full(self, value: bool) -> None:
        self._assigned_full = value
        self._is_moved = True

    def size(self) -> int:
        """Return the number of steps held. Without a disk tier, a budget may hold fewer than `buffer_size` steps."""
        first_tick = self.memory.first_id // self.n_envs
        next_tick = self.memory.next_id // self.n_envs
        dropped_early = first_tick - max(0, next_tick - self.buffer_size)
        return max(0, self._filled - dropped_early)

    @property
    def _filled(self) -> int:
        """Number of slots that draws are made from. Draws do not use `size`, which a subclass may override."""
        return self.buffer_size if self.full else self.pos

    def _count_ticks(self) -> int:
        """Return how many steps this buffer has added."""
        return self.memory.next_id // self.n_envs

    def _forget_moves(self) -> None:
        """Derive `pos` and `full` from the steps that were added."""
        self._assigned_pos = None
        self._assigned_full = None
        self._is_moved = False

    def _follow_moves(self) -> None:
        """Reset the buffer if a user has set `pos` to 0 and `full` to False. Raise ArgumentError for other values."""
        wanted = (self.pos, self.full)
        ticks = self._count_ticks()
        actual = (ticks % self.buffer_size, ticks >= self.buffer_size)
        if wanted != actual and ticks > 0:
            if wanted != (0, False):
                raise ArgumentError(
                    f"pos was set to {self.pos} and full to {self.full}, but the next step can only be added at "
                    f"pos={actual[0]} with full={actual[1]}. Set these values, or call reset() to forget all steps."
                )
            self.reset()
        self._forget_moves()

    # ---------------------------------------------------------------- adding

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one transition per environment.

        If a user has set `pos` to 0 and `full` to False, forget all earlier transitions first.
        """
        if self._is_moved:
            self._follow_moves()
        if not self._casts:
            if type(action) is np.ndarray and action.shape == self._number_shape:
                action = action.reshape(self._action_shape)
            read_infos = infos if self.handle_timeout_termination else None
            try:
                self.memory.host_store.append(
                    obs, action, reward, next_obs, done, self._none_truncated, None, None, read_infos
                )
            except ArgumentError:
                pass  # The memory has written nothing.
            else:
                return
        self._add_cast(obs, next_obs, action, reward, done, infos)
        self._casts = True

    def _add_cast(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Cast a step as Stable-Baselines3 does, and add it."""
        terminated = cast_flags(done, self._lane_shape, "done")
        truncated = read_time_limits(infos, self._lane_shape) if self.handle_timeout_termination else None
        if truncated is None:
            truncated = self._none_truncated
        else:
            terminated = terminated ^ truncated
        self.memory.add(
            self._cast_observation(obs, "obs"),
            cast(action, self._action_shape, self._action_dtype, "action", reshapes=True),
            cast(reward, self._lane_shape, _FLOAT32, "reward"),
            self._cast_observation(next_obs, "next_obs"),
            terminated,
            truncated,
        )

    def _cast_observation(self, obs: Any, name: str) -> Any:
        if not self._is_dict:
            return cast(obs, *self._obs_specs[""], name)
        try:
            return {key: cast(obs[key], *spec, f"{name}[{key!r}]") for key, spec in self._obs_specs.items()}
        except (KeyError, IndexError, TypeError) as error:
            raise ArgumentError(
                f"{name} has no {error}. Pass a dict with the keys {list(self._obs_specs)}, one array each."
            ) from error

    # ---------------------------------------------------------------- sampling

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions, in the order of Stable-Baselines3's own buffers."""
        if type(batch_size) is not int or batch_size < 0:
            batch_size = require_count("batch_size", batch_size, 0)
        if self._is_moved and self.full and self._count_ticks() == 0:
            return self._make_samples_of_zeros(batch_size, env)
        if self._overrides_get_samples:
            self._require_steps(batch_size)
            slots = np.random.randint(0, self._filled, size=batch_size)  # noqa: NPY002  Stable-Baselines3's generator
            return self._get_samples(slots, env=env)
        return self._draw_samples(batch_size, env)

    def _draw_samples(self, batch_size: int, env: VecNormalize | None) -> Any:
        """Draw a batch, and return its samples."""
        path = self._choose_path(env)
        if path is BatchPath.DIRECT:
            # Making a `Draw` would add a fifth to the time of a small batch.
            return self._read_samples(self._draw_ids(batch_size))
        if path is BatchPath.DEVICE and self.prefetch > 0:
            batch = self._ahead.take(self.memory, str(self.device), batch_size, self.prefetch, self._draw)
            return self._make_device_samples(batch)
        return self._make_samples(self._draw(batch_size, env), path, env)

    def _get_samples(self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None) -> Any:
        slots = np.asarray(batch_inds)
        if slots.ndim != 1 or (slots.size and not -self.buffer_size <= slots.min() <= slots.max() < self.buffer_size):
            raise ArgumentError(
                f"batch_inds ({batch_inds}) must be a row of slots, each below buffer_size ({self.buffer_size}). Pass "
                "an array of such numbers."
            )
        lanes = np.random.randint(0, high=self.n_envs, size=slots.shape)  # noqa: NPY002  Stable-Baselines3's generator
        return self._gather_samples(self._replace_evicted(self._find_ids(slots, lanes)), env)

    def _gather_samples(self, ids: Ids, env: VecNormalize | None) -> Any:
        """Return samples of transitions, or of the n-step returns that begin with them."""
        return self._make_samples(self._make_draw(ids, env), self._choose_path(env), env)

    def _choose_path(self, env: VecNormalize | None) -> BatchPath:
        """Return how a batch is made."""
        if env is not None or self._overrides_conversion:
            return BatchPath.HOST
        if not self._is_on_cpu():
            return BatchPath.DEVICE
        return BatchPath.DIRECT if self.n_steps == 1 else BatchPath.HOST

    def _is_on_cpu(self) -> bool:
        """Return whether `device` is the CPU. Users may assign another device."""
        if self.device is not self._checked_device:
            self._is_cpu = self.device.type == "cpu"  # Reading the type takes longer than drawing an id.
            self._checked_device = self.device
        return self._is_cpu

    def _require_steps(self, batch_size: int) -> None:
        if self._filled == 0:
            raise ArgumentError(f"sample({batch_size}) was called before a step was added. Call add first.")

    def _draw_ids(self, batch_size: int) -> Ids:
        """Draw slots and environments from NumPy's global generator, and return the ids of their transitions.

        Stable-Baselines3 draws differently with `optimize_memory_usage`. This class never does.
        """
        catalog = self.memory.host_store.catalog
        ticks = catalog.next_tick
        slots = self.buffer_size
        filled = self._filled if self._is_moved else min(ticks, slots)
        if filled == 0:
            self._require_steps(batch_size)
        ids = draw_slots(_get_generator(), batch_size, filled, slots, ticks - 1, self.n_envs)
        first_tick = catalog.first_tick
        if first_tick > 0 and first_tick > ticks - slots:
            return self._replace_evicted(ids)
        return ids

    def _replace_evicted(self, ids: Ids) -> Ids:
        """Draw again for ids that a budget without a disk tier has evicted."""
        first_id = self.memory.first_id
        next_id = self.memory.next_id
        if next_id == first_id and ids.size:
            raise ArgumentError(f"{ids.size} transitions were requested, but the buffer is empty. Call add first.")
        is_evicted = ids < first_id
        if next_id - first_id < self._filled * self.n_envs and is_evicted.any():
            redrawn = np.random.randint(first_id, next_id, size=len(ids))  # noqa: NPY002  Stable-Baselines3's generator
            return np.where(is_evicted, redrawn, ids)
        return ids

    def _draw(self, batch_size: int, env: VecNormalize | None = None) -> Draw:
        """Draw a batch, in Stable-Baselines3's order."""
        return self._make_draw(self._draw_ids(batch_size), env)

    def _make_draw(self, ids: Ids, env: VecNormalize | None, weights: NDArray[np.float32] | None = None) -> Draw:
        """Return the draw of transitions, or of the n-step returns that begin with them. None: all weights are 1."""
        if weights is None:
            weights = np.ones(len(ids), np.float32)
        if self.n_steps == 1:
            return Draw(ids, weights)
        rewards, ends = self._read_following(ids)
        returns, discounts, steps = sum_rewards(self._normalize_reward(rewards, env), ends, self.gamma)
        last_ids = ids + steps * self.n_envs
        return Draw(ids, weights, last_ids, reward=returns[:, 0], discount=discounts[:, 0])

    def _read_following(self, ids: Ids) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the rewards of `n_steps` steps from `ids` on, and which steps end a return: (batch, n_steps) each.

        Steps are read slot by slot, as Stable-Baselines3 does. A return also ends at the newest step.
        """
        ticks, lanes = np.divmod(ids, self.n_envs)
        slots = (ticks % self.buffer_size)[:, None] + np.arange(self.n_steps)
        steps = self._find_ids(slots % self.buffer_size, lanes[:, None])
        is_written = steps >= self.memory.first_id
        rewards, terminated, truncated = self.memory.store.view().outcomes(np.where(is_written, steps, ids[:, None]))
        is_newest = steps // self.n_envs == self._count_ticks() - 1
        return np.where(is_written, rewards, np.float32(0)), terminated | truncated | is_newest

    # ---------------------------------------------------------------- from rows to samples

    def _make_samples(self, draw: Draw, path: BatchPath, env: VecNormalize | None) -> Any:
        """Return the samples of a draw. `path` and `env` are those of the draw."""
        if path is BatchPath.DIRECT:
            return self._read_samples(draw.ids)
        if path is BatchPath.DEVICE:
            return self._make_device_samples(self.memory.batch_source.deliver(draw, device=str(self.device)))
        return self._make_host_samples(self.memory.batch_source.deliver(draw), env)

    def _read_samples(self, ids: Ids) -> Any:
        """Return samples of one-step transitions. For `BatchPath.DIRECT`."""
        to_tensor = th.from_numpy
        arrays = self.memory.store.view().read(ids, self._outputs)
        rewards = to_tensor(arrays[-1].reshape(-1, 1))
        if not self._is_dict:
            obs, action, next_obs, ended, _ = arrays
            tensors = (to_tensor(obs), to_tensor(action), to_tensor(next_obs), to_tensor(ended), rewards)
            # This is faster than calling the class.
            return tuple.__new__(ReplayBufferSamples, (*tensors, *_BOX_DEFAULTS))
        keys = self._obs_specs
        count = len(keys)
        return DictReplayBufferSamples(
            dict(zip(keys, map(to_tensor, arrays[:count]), strict=True)),
            to_tensor(arrays[count]),
            dict(zip(keys, map(to_tensor, arrays[count + 1 : -2]), strict=True)),
            to_tensor(arrays[-2]),
            rewards,
        )

    def _make_device_samples(self, batch: Batch) -> Any:
        """Return a batch of tensors on the GPU as Stable-Baselines3's samples. For `BatchPath.DEVICE`."""
        kind: Any = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        ended = (batch.terminated > batch.truncated).to(th.float32)
        discounts = () if batch.discount is None else (batch.discount.unsqueeze(1),)
        # Positional arguments are faster than named ones.
        return kind(batch.obs, batch.action, batch.next_obs, ended.unsqueeze(1), batch.reward.unsqueeze(1), *discounts)

    def _make_host_samples(self, batch: Batch, env: VecNormalize | None) -> Any:
        """Return a batch of NumPy arrays as Stable-Baselines3's samples. For `BatchPath.HOST`."""
        rewards = batch.reward.reshape(-1, 1)
        if self.n_steps == 1:  # The rewards of longer returns were normalized before they were summed.
            rewards = self._normalize_reward(rewards, env)
        ended = (batch.terminated & ~batch.truncated).astype(np.float32).reshape(-1, 1)
        kind: Any = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        further = {} if batch.discount is None else {"discounts": self._to_tensor(batch.discount.reshape(-1, 1))}
        return kind(
            observations=self._to_tensors(self._normalize_obs(batch.obs, env)),
            actions=self._to_tensor(batch.action),
            next_observations=self._to_tensors(self._normalize_obs(batch.next_obs, env)),
            dones=self._to_tensor(ended),
            rewards=self._to_tensor(rewards),
            **further,
        )

    def _make_samples_of_zeros(self, count: int, env: VecNormalize | None) -> Any:
        """Return samples of zeros, which Stable-Baselines3 returns for slots that were never written to."""
        zeros = {key: np.zeros((count, *shape[1:]), dtype) for key, (shape, dtype) in self._obs_specs.items()}
        obs = zeros if self._is_dict else zeros[""]
        flags = np.zeros(count, np.bool_)
        rewards = np.zeros(count, np.float32)
        action = np.zeros((count, self.action_dim), self._action_dtype)
        batch = Batch(obs, action, rewards, obs, flags, flags, {}, np.full(count, -1), np.ones(count, np.float32))
        return self._make_host_samples(batch, env)

    def _to_tensors(self, observed: Any) -> Any:
        if self._is_dict:
            return {key: self._to_tensor(rows) for key, rows in observed.items()}
        return self._to_tensor(observed)

    def _to_tensor(self, array: Any) -> th.Tensor:
        """Return a gathered array as a tensor on the buffer's device.

        On the CPU, the tensor shares the memory of the array unless torch needs another alignment.
        """
        if self._overrides_conversion:
            return self.to_torch(array)
        tensor = th.from_numpy(array)
        if not self._is_on_cpu():
            return tensor.to(self.device)
        if tensor.is_floating_point() and tensor.data_ptr() % _TORCH_ALIGNMENT_BYTES:
            return tensor.clone()
        return tensor

    # ---------------------------------------------------------------- arrays over slots

    def view_field(self, name: str) -> SlotArray | dict[str, SlotArray]:
        """Return the array of a field. For Dict observations, return an array for every key."""
        columns = self._columns
        if name == "observations":
            return self._view_observations(name, columns.obs_outputs)
        if name == "next_observations":
            return self._view_observations(name, columns.next_obs_outputs)
        if name == "actions":
            action_spec: Spec = (self._action_shape, self._action_dtype)
            return self._view_slots(name, action_spec, self._make_read(columns.action_outputs[0]))
        spec: Spec = (self._lane_shape, _FLOAT32)
        if name == "rewards":
            return self._view_slots(name, spec, self._make_read(columns.reward_output))
        if name == "timeouts":
            return self._view_slots(name, spec, self._make_read(columns.truncated_output), self._write_timeouts)
        return self._view_slots(name, spec, self._read_dones, self._write_dones)

    def _view_observations(self, name: str, outputs: tuple[int, ...]) -> SlotArray | dict[str, SlotArray]:
        views = {
            key: self._view_slots(name, spec, self._make_read(output))
            for (key, spec), output in zip(self._obs_specs.items(), outputs, strict=True)
        }
        return views if self._is_dict else views[""]

    def _view_slots(self, name: str, spec: Spec, read: ReadRows, write: WriteRows | None = None) -> SlotArray:
        shape, dtype = spec
        row_bytes = prod(shape[1:]) * dtype.itemsize
        max_rows = max(1, _MAX_READ_BYTES // max(1, row_bytes))
        return SlotArray(name, (self.buffer_size, *shape), dtype, self._find_held_ids, read, max_rows, write)

    def _make_read(self, output: int) -> ReadRows:
        """Return a function that reads one output of the memory's columns."""

        def read(ids: Ids) -> NDArray[Any]:
            rows: NDArray[Any] = self.memory.store.view().read(ids, (output,))[0]
            return rows

        return read

    def _read_flags(self, ids: Ids) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the flags `dones` and `timeouts` of Stable-Baselines3 for `ids`.

        The memory stores them as `terminated` and `truncated`: a step with `dones` alone is terminated, and a step with
        both is truncated. A step with `timeouts` alone, which only assigning to `timeouts` can give, is stored as both.
        """
        outputs = (self._columns.terminated_output, self._columns.truncated_output)
        terminated, truncated = self.memory.store.view().read(ids, outputs)
        return terminated ^ truncated, truncated

    def _read_dones(self, ids: Ids) -> NDArray[np.bool_]:
        dones, _ = self._read_flags(ids)
        return dones

    def _write_dones(self, ids: Ids, rows: NDArray[Any]) -> None:
        _, timeouts = self._read_flags(ids)
        self.memory.store.set_flags(ids, rows.astype(np.bool_) ^ timeouts, timeouts)

    def _write_timeouts(self, ids: Ids, rows: NDArray[Any]) -> None:
        dones, _ = self._read_flags(ids)
        timeouts = rows.astype(np.bool_)
        self.memory.store.set_flags(ids, dones ^ timeouts, timeouts)

    def _find_ids(self, slots: NDArray[np.int64], lanes: NDArray[np.int64]) -> Ids:
        """Return the ids of the newest transitions in slots. The ids of slots without a transition are below 0."""
        newest = self._count_ticks() - 1
        ticks = newest - (newest - slots) % self.buffer_size
        return ticks * self.n_envs + lanes

    def _find_held_ids(self, positions: NDArray[np.int64]) -> Ids:
        """Return the ids at flat positions of (slots, environments), and -1 where no transition is held."""
        ids = self._find_ids(*np.divmod(positions, self.n_envs))
        return np.where(ids >= self.memory.first_id, ids, -1)

    # ---------------------------------------------------------------- the memory

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        return self.memory.report()

    def reset(self) -> None:
        """Forget every transition."""
        self.memory.close()
        self.memory = self._new_memory()
        self._forget_moves()

    def adopt(self, memory: ReplayMemory) -> None:
        """Replace the memory by `memory`, which was loaded, and close the old one."""
        lanes = self.n_envs
        # Shards of a memory hold equal numbers of transitions, so its capacity may be below `buffer_size`.
        capacity = self.memory.capacity
        if memory.num_envs != lanes or memory.capacity != capacity:
            raise ArgumentError(
                f"A memory of {memory.capacity} transitions in {memory.num_envs} lanes does not fit a buffer of "
                f"{capacity} in {lanes}. Make the model with the settings that it was saved with."
            )
        self.memory.close()
        self.memory = memory
        self._forget_moves()

    @classmethod
    def copy_of(cls, buffer: buffers.ReplayBuffer, **settings: Any) -> Self:
        """Return a copy of one of Stable-Baselines3's buffers. Transitions keep their slots, so draws are the same.

        If `model.load_replay_buffer(path)` has loaded Stable-Baselines3's buffer, continue with holdall's:
        `model.replay_buffer = ReplayBuffer.copy_of(model.replay_buffer)`.

        Args:
            settings: Settings of the constructor, such as budget, prefer and spill_dir.
        """
        if isinstance(buffer, ReplayBuffer) or buffer.optimize_memory_usage:
            raise ArgumentError(
                f"buffer ({type(buffer).__module__}.{type(buffer).__name__}) must be one of Stable-Baselines3's own, "
                "without optimize_memory_usage, which has overwritten last observations with first ones."
            )
        copy = cls(
            buffer.buffer_size * buffer.n_envs,
            buffer.observation_space,
            buffer.action_space,
            device=buffer.device,
            n_envs=buffer.n_envs,
            handle_timeout_termination=buffer.handle_timeout_termination,
            **(cls._read_settings(buffer) | settings),
        )
        copy._copy_slots(buffer)
        return copy

    @classmethod
    def _read_settings(cls, buffer: Any) -> dict[str, Any]:
        """Return the n-step settings of one of Stable-Baselines3's buffers, if it has them."""
        return {name: getattr(buffer, name) for name in ("n_steps", "gamma") if hasattr(buffer, name)}

    def _copy_slots(self, buffer: Any) -> None:
        """Add the steps of another buffer so that each step gets the same slot here."""
        written = np.arange(buffer.buffer_size if buffer.full else buffer.pos)
        ticks = written
        if buffer.full:
            # The slots before `pos` have the newest steps, so they are added a second time, after all other slots.
            ticks = np.concatenate([written, np.arange(buffer.pos)])
        for begin in range(0, len(ticks), _COPIED_SLOTS):
            slots = ticks[begin : begin + _COPIED_SLOTS]
            truncated = buffer.timeouts[slots].astype(np.bool_)
            terminated = buffer.dones[slots].astype(np.bool_) ^ truncated
            self.memory.extend(
                _select_rows(buffer.observations, slots),
                buffer.actions[slots],
                buffer.rewards[slots],
                _select_rows(buffer.next_observations, slots),
                terminated,
                truncated,
            )

    def _new_memory(self) -> ReplayMemory:
        observation_space, action_space = self._describe_spaces()
        memory = ReplayMemory(
            observation_space,
            action_space,
            self.buffer_size * self.n_envs,
            self.n_envs,
            **self.tiers,
            **self._choose_sampler(),
            _tuning=self._tuning,
        )
        memory.host_store.set_reward_dtype(_FLOAT32)
        return memory

    def _choose_sampler(self) -> dict[str, Any]:
        """Return the settings of the memory's sampler: none, because this class draws slots itself."""
        return {}

    def _describe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Return the spaces of observations and actions as they are stored."""
        stored = {key: stored_space(shape[1:], dtype) for key, (shape, dtype) in self._obs_specs.items()}
        # Gymnasium sorts the keys of a plain dict, but not those of an OrderedDict.
        observation_space = spaces.Dict(OrderedDict(stored)) if self._is_dict else stored[""]
        return observation_space, stored_space((self.action_dim,), self._action_dtype)

    def _describe_observations(self, space: spaces.Space[Any]) -> dict[str, Spec]:
        """Return shape and dtype of every observation key, as Stable-Baselines3 stores it."""
        shapes: Any = self.obs_shape
        if isinstance(space, spaces.Dict):
            return {key: ((self.n_envs, *shapes[key]), np.dtype(space[key].dtype)) for key in shapes}
        return {"": ((self.n_envs, *shapes), np.dtype(space.dtype))}

    @staticmethod
    def _order_outputs(columns: Columns) -> tuple[int, ...]:
        """Return the outputs of a transition in the order of Stable-Baselines3's samples."""
        return (
            *columns.obs_outputs,
            *columns.action_outputs,
            *columns.next_obs_outputs,
            columns.ended_output,
            columns.reward_output,
        )


def _select_rows(observations: Any, slots: NDArray[np.int64]) -> Any:
    """Return rows of an array of observations, or of a dict of such arrays."""
    if isinstance(observations, dict):
        return {key: rows[slots] for key, rows in observations.items()}
    return observations[slots]

"""ReplayBuffer: Stable-Baselines3's replay buffers, Box and Dict, over a ReplayMemory.

Invariant: the same seed draws the same rows from NumPy's global generator in the same order, and the tensors are equal
bit for bit; n-step returns too, so the trained weights are the same. Where Stable-Baselines3 casts (observations to
their space's dtype, actions from float64, rewards to float32), this class casts, too. Tick t is in slot t modulo the
number of slots; arrays over slots are gathered when they are read.

On a GPU, what is drawn is delivered by the memory's own device path, and ahead of time if asked for. Without
`prefetch`, tensors are those of Stable-Baselines3 on the same GPU. With it they are those of batches that were drawn
`prefetch` calls earlier: what was added, prioritised or learnt in between is not in them.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from holdall import ReplayMemory
from holdall.batch import Batch, Draw
from holdall.delivery import BatchJob, DeviceBatch, SlotDraw
from holdall.errors import ArgumentError
from holdall.native import draw_slots
from holdall.report import MemoryReport
from holdall.sb3.buffer_parts import (
    BufferArrays,
    cast,
    cut_flags,
    flags_of,
    n_step_returns,
    require_steps,
    warn_of_ignored_steps,
)
from holdall.schema import require_count, whole
from holdall.space_leaves import stored_space
from holdall.storage import fresh_bytes

_FLOAT32 = np.dtype(np.float32)
_COPIED_AT_ONCE = 64
"""Slots of another buffer that are copied in one go."""
_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]  # NumPy documents it
_BOX_DEFAULTS, _DICT_DEFAULTS = (
    tuple(kind._field_defaults.values()) for kind in (ReplayBufferSamples, DictReplayBufferSamples)
)
_HOOKS = frozenset({"_get_samples", "_normalize_obs", "_normalize_reward", "to_torch"})
"""Methods that Stable-Baselines3 calls between a draw and its tensors."""
_ONLY_SAMPLES = frozenset({"_get_samples"})
_TORCH_ALIGNMENT_BYTES = 64
"""Where torch's own tensors begin. Matrix products of floats that begin elsewhere add up in another order: the
last bits differ, and with them the weights (seen with MKL on rows at 4 and 8 bytes past a multiple of 16)."""


class MadeAhead(deque[BatchJob]):
    """Batches that were drawn, and not asked for yet; a copy of it, or one that is loaded, is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: tuple[Any, ...] = ()

    def require(self, *kind: Any) -> None:
        """Drop batches of another kind: another size, or of a memory that was replaced."""
        if len(kind) != len(self.kind) or any(a is not b and a != b for a, b in zip(kind, self.kind, strict=True)):
            self.clear()
            self.kind = kind

    def __reduce__(self) -> Any:
        return MadeAhead, ()


class ReplayBuffer(BufferArrays, buffers.ReplayBuffer):
    """Drop-in for Stable-Baselines3's `ReplayBuffer` and `DictReplayBuffer`.

    `SAC("MultiInputPolicy", env, replay_buffer_class=holdall.sb3.ReplayBuffer)`

    Args:
        buffer_size: Transitions over all environments, as in Stable-Baselines3.
        optimize_memory_usage: Accepted and without effect: observations are always shared, and
            truncation is right all the same.
        handle_timeout_termination: As in Stable-Baselines3.
        n_steps: Steps of the returns, as in its `NStepReplayBuffer`; Dict observations too.
        gamma: What a reward is worth a step later, for `n_steps` above 1.
        budget: See `holdall.ReplayMemory`; through `replay_buffer_kwargs`.
        prefer: The same.
        spill_dir: The same. Without it, a budget in bytes that does not hold `buffer_size` keeps the newest that fit.
        prefetch: Batches that are made ahead on a GPU: each is drawn so many calls of `sample` before it is returned.
    """

    _takes_steps = True
    _left_at: tuple[int, bool] = (0, False)
    """`pos` and `full` after the last step, which somebody may have changed since."""
    _number_shape: tuple[int, ...] | None = None
    """Of actions that come as numbers; neither is in a buffer that version 0.1.0 pickled."""

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
    ) -> None:
        # Not the parent's constructor: it allocates everything that this class avoids.
        buffer_size = require_count("buffer_size", whole(buffer_size), 0)
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.tiers: dict[str, Any] = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir}
        """Of the memory, and of the next one after a `reset`."""
        self.handle_timeout_termination = handle_timeout_termination
        self.prefetch, self._ahead = require_count("prefetch", prefetch, 0), MadeAhead()
        self.n_steps = require_steps(n_steps)
        if n_steps == 1:
            warn_of_ignored_steps(type(self).__name__, takes_steps=self._takes_steps)
        self.gamma = gamma
        self._is_dict = isinstance(observation_space, spaces.Dict)
        self._lane_shape = (n_envs,)
        self._action_shape = (n_envs, self.action_dim)
        self._number_shape = (n_envs,) if self.action_dim == 1 else None
        self._action_dtype = np.dtype(self._maybe_cast_dtype(action_space.dtype))
        self._obs_specs = self._specs_of(observation_space)
        self._nothing_cut = np.zeros(n_envs, np.bool_)
        self.memory = self._new_memory()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one transition per environment; if `pos` was set to 0 and `full` to False, all others go first."""
        if (self.pos, self.full) != self._left_at:
            self._follow_pos()
        if type(action) is np.ndarray and action.shape == self._number_shape:  # of a Discrete space
            action = action.reshape(self._action_shape)
        ticks = self.memory.add_at_once(
            obs, action, reward, next_obs, done, self._nothing_cut, infos if self.handle_timeout_termination else None
        ) or self._add_otherwise(obs, next_obs, action, reward, done, infos)
        self.pos, self.full = self._left_at = ticks % self.buffer_size, ticks >= self.buffer_size

    def _follow_pos(self) -> None:
        """Do what somebody wanted who has set `pos` or `full`, as one may where arrays are written over."""
        if self.pos == 0 and not self.full:
            self.reset()
        elif self._left_at != (0, False):
            raise ArgumentError(
                f"pos ({self.pos}) and full ({self.full}) were set; the last step left {self._left_at}, and the next "
                "one goes behind it. Set them back, or call reset() to forget all steps"
            )

    def _add_otherwise(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]
    ) -> int:  # fmt: skip
        """Add what takes more than one step, or has to be cast first; return how many ticks were added in all."""
        looked_at = infos if self.handle_timeout_termination else None
        ticks = self.memory.add_as_is(obs, action, reward, next_obs, done, self._nothing_cut, looked_at)
        if ticks:
            return ticks
        ended, cut = flags_of(done, self._lane_shape, "done"), None
        if self.handle_timeout_termination and (cut := cut_flags(infos, self._lane_shape)) is not None:
            ended = ended ^ cut
        self.memory.add(
            self._cast_observation(obs, "obs"),
            cast(action, self._action_shape, self._action_dtype, "action", reshapes=True),
            cast(reward, self._lane_shape, _FLOAT32, "reward"),
            self._cast_observation(next_obs, "next_obs"),
            ended,
            self._nothing_cut if cut is None else cut,
        )
        return self._ticks_added()

    def _ticks_added(self) -> int:
        """Return how many ticks were added in all, after one was; over shards another process may have added some."""
        return self.memory.next_id // self.n_envs

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions, in the order of Stable-Baselines3's own buffers."""
        replaced = self._replaced()
        if env is None and self.n_steps == 1 and self.device.type == "cpu" and not replaced and type(batch_size) is int:
            slots = self.buffer_size
            found = self.memory.draw_at_once(_generator(), batch_size, slots if self.full else self.pos, slots)
            if type(found) is tuple:
                return self._samples_at_once(*found)
            if type(found) is not int:  # what lies under these ids cannot be read: say why
                return self._samples(found, env)
        if type(batch_size) is not int or batch_size < 0:
            batch_size = require_count("batch_size", batch_size, 0)
        if not self._filled:
            raise ArgumentError(f"sample({batch_size}) was called, and nothing was added yet; call add before")
        if self.full and self.memory.next_id == 0:  # somebody set `full`
            return self._samples_of_nothing(batch_size, env)
        if "_get_samples" in replaced:
            return self._get_samples(np.random.randint(0, self._filled, size=batch_size), env=env)  # noqa: NPY002  as they do
        if self._is_delivered(env):
            return self._delivered(batch_size)
        return self._samples(self._drawn(batch_size), env)

    def size(self) -> int:
        """Count the steps held, each of all environments; a budget without a disk tier may hold less than all slots."""
        first_tick = self.memory.first_id // self.n_envs
        next_tick = self.memory.next_id // self.n_envs
        dropped_early = first_tick - max(0, next_tick - self.buffer_size)
        return max(0, self._filled - dropped_early)

    @property
    def _filled(self) -> int:
        """Slots that draws are made from; `size` may be a subclass's own."""
        return self.buffer_size if self.full else self.pos

    def _replaced(self) -> frozenset[str]:
        """Return the methods between a draw and its tensors that a subclass, or this object, has of its own."""
        return _overridden(type(self)) if self.__dict__.keys().isdisjoint(_HOOKS) else _HOOKS

    def _is_delivered(self, env: VecNormalize | None) -> bool:
        """Whether batches are made on the GPU: what is normalised on the host is copied there as it is."""
        return env is None and self.device.type == "cuda" and self._replaced() <= _ONLY_SAMPLES

    def _samples_at_once(self, action: Any, ended: Any, reward: Any, *observed: Any) -> Any:
        """Return arrays of which nothing is normalised or moved as tensors: they begin where tensors do."""
        tensor = th.from_numpy
        if not self._is_dict:
            obs, next_obs = observed
            found = tensor(obs), tensor(action), tensor(next_obs), tensor(ended), tensor(reward), *_BOX_DEFAULTS
            return tuple.__new__(ReplayBufferSamples, found)
        tensors, keys = [tensor(array) for array in observed], self._obs_specs
        all_obs, all_next = (dict(zip(keys, each, strict=True)) for each in (tensors[::2], tensors[1::2]))
        rest = tensor(ended), tensor(reward), *_DICT_DEFAULTS
        return tuple.__new__(DictReplayBufferSamples, (all_obs, tensor(action), all_next, *rest))

    def _drawn(self, batch_size: int) -> NDArray[np.int64]:
        """Draw ids; its own buffer draws differently with optimize_memory_usage, and this one never does."""
        newest = self.memory.next_id // self.n_envs - 1
        return self._held(draw_slots(batch_size, self._filled, self.buffer_size, newest, self.n_envs))

    def _delivered(self, batch_size: int) -> Any:
        """Return the next samples on the GPU; with `prefetch`, others are drawn and under way then."""
        if not self.prefetch:
            return self._samples_on_device(self._begun(batch_size).receive())
        ahead = self._ahead
        ahead.require(batch_size, self.memory)
        while len(ahead) <= self.prefetch:
            ahead.append(self._begun(batch_size))
        return self._samples_on_device(ahead.popleft().receive())

    def _begun(self, batch_size: int) -> BatchJob:
        """Draw a batch, and have it put together."""
        job = self._draw_at_once(batch_size)
        if job is None:
            job = self.memory.begin(self._next_recipe(batch_size), str(self.device), ahead=self.prefetch > 0)
        return job

    def _samples_on_device(self, batch: Batch) -> Any:
        """Return a batch that is on the GPU as Stable-Baselines3's tuple of tensors."""
        kind: Any = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        ended = batch.ended if isinstance(batch, DeviceBatch) else (batch.terminated > batch.truncated).to(th.float32)
        discounts = () if batch.discount is None else (batch.discount.unsqueeze(1),)
        # In the order of the fields, which is quicker than by name.
        return kind(batch.obs, batch.action, batch.next_obs, ended.unsqueeze(1), batch.reward.unsqueeze(1), *discounts)

    def _draw_at_once(self, batch_size: int) -> BatchJob | None:
        """Draw a batch and begin it in one step, if there is such a way."""
        if self.n_steps > 1 or self._replaced() or type(self)._next_recipe is not ReplayBuffer._next_recipe:
            return None
        drawn = SlotDraw(_generator(), self._filled, self.buffer_size)
        return self.memory.draw_on(str(self.device), batch_size, drawn, ahead=self.prefetch > 0)

    def _next_recipe(self, batch_size: int) -> Draw:
        """Draw the recipe of a batch, in Stable-Baselines3's order."""
        return self._recipe(self._drawn(batch_size))

    def _recipe(self, ids: NDArray[np.int64], env: VecNormalize | None = None) -> Draw:
        """Return the recipe of transitions, or of the n-step returns that begin with them."""
        weights = np.ones(len(ids), np.float32)
        if self.n_steps == 1:
            return Draw(ids, weights)
        rewards, ends = self._following(ids)
        returns, discounts, steps = n_step_returns(self._normalize_reward(rewards, env), ends, self.gamma)
        last = ids + steps * self.n_envs
        return Draw(ids, weights, last, reward=returns[:, 0], discount=discounts[:, 0])

    def _get_samples(self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None) -> Any:
        slots = np.asarray(batch_inds)
        if slots.ndim != 1 or (slots.size and not -self.buffer_size <= slots.min() <= slots.max() < self.buffer_size):
            raise ArgumentError(
                f"batch_inds ({batch_inds}) must be a row of slots, each below buffer_size ({self.buffer_size}); pass "
                "an array of such numbers"
            )
        env_indices = np.random.randint(0, high=self.n_envs, size=slots.shape)  # noqa: NPY002  its generator
        return self._samples(self._held(self._ids(slots, env_indices)), env)

    def _held(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw again for ids that are gone: a budget without a disk tier may hold less than all slots."""
        first_id, next_id = self.memory.first_id, self.memory.next_id
        if next_id == first_id and ids.size:
            raise ArgumentError(f"{ids.size} transitions were asked for, and the buffer holds none; call add before")
        if next_id - first_id < self._filled * self.n_envs and (left_early := ids < first_id).any():
            held = np.random.randint(first_id, next_id, size=len(ids))  # noqa: NPY002  its generator
            return np.where(left_early, held, ids)
        return ids

    def _samples(self, ids: NDArray[np.int64], env: VecNormalize | None) -> Any:
        """Gather transitions, or the n-step returns that begin with them."""
        if self._is_delivered(env):
            return self._samples_on_device(self.memory.follow(self._recipe(ids), str(self.device)))
        if self.n_steps == 1 and env is None and self.device.type == "cpu" and self._replaced() <= _ONLY_SAMPLES:
            rows = self.memory.rows(ids)
            observed = (array for i in range(len(self._obs_specs)) for array in rows.small[i])
            ended, rewards = rows.ended.reshape(-1, 1), rows.reward.reshape(-1, 1)
            return self._samples_at_once(rows.action[0], ended, rewards, *observed)
        batch = self.memory.follow(self._recipe(ids, env))
        rewards = batch.reward.reshape(-1, 1)
        if self.n_steps > 1:  # which were normalised before they were added up
            return self._as_samples(batch, rewards, env, batch.discount.reshape(-1, 1))
        return self._as_samples(batch, self._normalize_reward(rewards, env), env)

    def _following(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Read rewards and ends of `n_steps` steps from `ids` on, slot by slot as Stable-Baselines3 does."""
        ticks, lanes = np.divmod(ids, self.n_envs)
        slots = (ticks % self.buffer_size)[:, None] + np.arange(self.n_steps)
        steps = self._ids(slots % self.buffer_size, lanes[:, None])
        written = steps >= self.memory.first_id
        rewards, terminated, truncated = self.memory.outcomes(np.where(written, steps, ids[:, None]))
        newest = steps // self.n_envs == self.memory.next_id // self.n_envs - 1
        return np.where(written, rewards, np.float32(0)), terminated | truncated | newest

    def _as_samples(self, batch: Batch, rewards: Any, env: VecNormalize | None, discounts: Any = None) -> Any:
        """Return a batch as Stable-Baselines3's tuple of tensors."""
        ended = fresh_bytes(_FLOAT32.itemsize * len(batch)).view(_FLOAT32)
        np.greater(batch.terminated, batch.truncated, out=ended)
        tensor_of = self._tensor
        kind: Any = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        return kind(
            observations=self._tensors(self._normalize_obs(batch.obs, env)),
            actions=tensor_of(batch.action),
            next_observations=self._tensors(self._normalize_obs(batch.next_obs, env)),
            dones=tensor_of(ended.reshape(-1, 1)),
            rewards=tensor_of(rewards),
            **({} if discounts is None else {"discounts": tensor_of(discounts)}),
        )

    def _samples_of_nothing(self, count: int, env: VecNormalize | None) -> Any:
        """Return rows of slots that were never written to: zeros."""
        zeros = {key: np.zeros((count, *shape[1:]), dtype) for key, (shape, dtype) in self._obs_specs.items()}
        obs = zeros if self._is_dict else zeros[""]
        none, rewards = np.zeros(count, np.bool_), np.zeros(count, np.float32)
        action = np.zeros((count, self.action_dim), self._action_dtype)
        batch = Batch(obs, action, rewards, obs, none, none, {}, np.full(count, -1), np.ones(count, np.float32))
        return self._as_samples(batch, self._normalize_reward(rewards.reshape(-1, 1), env), env)

    def reset(self) -> None:
        """Forget every transition."""
        super().reset()
        self._left_at = (0, False)
        self.memory.close()
        self.memory = self._new_memory()

    def adopt(self, memory: ReplayMemory) -> None:
        """Continue with a memory that was loaded; the one before is closed."""
        lanes, ticks = self.n_envs, memory.next_id // self.n_envs
        if memory.num_envs != lanes or memory.capacity != self.buffer_size * lanes:
            raise ArgumentError(
                f"a memory of {memory.capacity} transitions in {memory.num_envs} lanes does not fit a buffer of "
                f"{self.buffer_size * lanes} in {lanes}; make the model with the settings that it was saved with"
            )
        self.memory.close()
        self.memory = memory
        self.pos, self.full = self._left_at = ticks % self.buffer_size, ticks >= self.buffer_size

    @classmethod
    def copy_of(cls, buffer: buffers.ReplayBuffer, **settings: Any) -> Self:
        """Return a buffer with the transitions of one of Stable-Baselines3's, in the same slots, so draws are the same.

        `model.load_replay_buffer(path)` of a file that Stable-Baselines3's buffer was saved to gives the model that
        buffer; this makes it holdall's: `model.replay_buffer = ReplayBuffer.copy_of(model.replay_buffer)`.

        Args:
            settings: budget, prefer and spill_dir, as in the constructor.
        """
        if isinstance(buffer, ReplayBuffer) or buffer.optimize_memory_usage:
            raise ArgumentError(
                f"buffer ({type(buffer).__module__}.{type(buffer).__name__}) must be one of Stable-Baselines3's own, "
                "without optimize_memory_usage, which has written first observations over last ones"
            )
        made = cls(
            buffer.buffer_size * buffer.n_envs, buffer.observation_space, buffer.action_space, device=buffer.device,
            n_envs=buffer.n_envs, handle_timeout_termination=buffer.handle_timeout_termination,
            **(cls._settings_of(buffer) | settings),
        )  # fmt: skip
        made._copy_slots(buffer)
        return made

    @classmethod
    def _settings_of(cls, buffer: Any) -> dict[str, Any]:
        """Return what a buffer of Stable-Baselines3's was made with, beside what all buffers have."""
        return {name: getattr(buffer, name) for name in ("n_steps", "gamma") if hasattr(buffer, name)}

    def _copy_slots(self, buffer: Any) -> None:
        """Add what another buffer's slots hold, so that it lies in the same ones."""
        written = np.arange(buffer.buffer_size if buffer.full else buffer.pos)
        # The slot to be written to next is the oldest: what lies before it is the newest, and is added again.
        ticks = np.concatenate([written, np.arange(buffer.pos)]) if buffer.full else written

        def rows(name: str, slots: NDArray[np.int64]) -> Any:
            found = getattr(buffer, name)
            return {key: each[slots] for key, each in found.items()} if isinstance(found, dict) else found[slots]

        for begin in range(0, len(ticks), _COPIED_AT_ONCE):
            slots = ticks[begin : begin + _COPIED_AT_ONCE]
            cut = buffer.timeouts[slots].astype(np.bool_)
            obs, following = rows("observations", slots), rows("next_observations", slots)
            ended = buffer.dones[slots].astype(np.bool_) ^ cut
            self.memory.extend(obs, buffer.actions[slots], buffer.rewards[slots], following, ended, cut)
        self.pos, self.full = self._left_at = buffer.pos, buffer.full

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field."""
        return self.memory.report()

    def _stored_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Describe observations and actions as they are stored, here or over shards."""
        stored = {key: stored_space(shape[1:], dtype) for key, (shape, dtype) in self._obs_specs.items()}
        observed = spaces.Dict(OrderedDict(stored)) if self._is_dict else stored[""]  # a plain dict would be sorted
        return observed, stored_space((self.action_dim,), self._action_dtype)

    def _new_memory(self) -> ReplayMemory:
        settings = self.tiers | self._own_draws()
        return ReplayMemory(*self._stored_spaces(), self.buffer_size * self.n_envs, self.n_envs, **settings)

    def _own_draws(self) -> dict[str, Any]:
        """Return how the memory draws by itself, if it does: this class draws slots, in Stable-Baselines3's order."""
        return {}

    def _specs_of(self, space: spaces.Space[Any]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Batched shape and dtype of every observation key, as Stable-Baselines3 stores it."""
        shapes: Any = self.obs_shape
        if isinstance(space, spaces.Dict):
            return {key: ((self.n_envs, *shapes[key]), np.dtype(space[key].dtype)) for key in shapes}
        return {"": ((self.n_envs, *shapes), np.dtype(space.dtype))}

    def _cast_observation(self, obs: Any, name: str) -> Any:
        if not self._is_dict:
            return cast(obs, *self._obs_specs[""], name)
        try:
            return {key: cast(obs[key], *spec, f"{name}[{key!r}]") for key, spec in self._obs_specs.items()}
        except (KeyError, IndexError, TypeError) as error:
            raise ArgumentError(
                f"{name} has no {error}; pass a dict with the keys {list(self._obs_specs)}, one array each"
            ) from error

    def _ids(self, slots: NDArray[np.int64], lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Name the transitions in the given slots."""
        newest = self.memory.next_id // self.n_envs - 1
        ticks = newest - (newest - slots) % self.buffer_size
        return ticks if self.n_envs == 1 else ticks * self.n_envs + lanes

    def _tensors(self, observed: Any) -> Any:
        return {key: self._tensor(rows) for key, rows in observed.items()} if self._is_dict else self._tensor(observed)

    def _tensor(self, array: Any) -> th.Tensor:
        """Return a gathered array as a tensor; its memory is the batch's own, so it is copied only to align it."""
        if not self._replaced() <= _ONLY_SAMPLES:
            return self.to_torch(array)
        tensor = th.from_numpy(array)
        if self.device.type != "cpu":
            return tensor.to(self.device)
        if tensor.is_floating_point() and tensor.data_ptr() % _TORCH_ALIGNMENT_BYTES:
            return tensor.clone()
        return tensor


@cache
def _overridden(kind: type[ReplayBuffer]) -> frozenset[str]:
    """Return the methods between a draw and its tensors that a subclass overrides."""
    return frozenset(name for name in _HOOKS if getattr(kind, name) is not getattr(ReplayBuffer, name))

"""HerReplayBuffer: Stable-Baselines3's hindsight experience replay over a ReplayMemory.

Guarantee: the same seed draws the same transitions and goals in the same order, and every tensor is equal bit for bit,
so the trained weights are the same. Observations and goals are stored once. Infos are stored as JSON and arrays, so
reading them back cannot run code.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her import her_replay_buffer
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY, GoalSelectionStrategy

from holdall.batch import Draw, Goals
from holdall.errors import ArgumentError, DamageError
from holdall.sb3.batch_path import BatchPath
from holdall.sb3.replay import ReplayBuffer
from holdall.store.tuning import Tuning

_ACHIEVED = "achieved_goal"
_DESIRED = "desired_goal"
_TYPE_KEY = "~holdall"
_STORED_DTYPE_KINDS = "biuf"
_JSON_TYPES = (bool, int, float, str)
_GOAL_HOOKS = ("_get_real_samples", "_get_virtual_samples", "_sample_goals")
"""Methods of Stable-Baselines3's `sample`, which is used if one of these methods is overridden."""


class HerReplayBuffer(ReplayBuffer, her_replay_buffer.HerReplayBuffer):
    """Drop-in for Stable-Baselines3's `HerReplayBuffer`.

    Args:
        env: The training environment. Stable-Baselines3's algorithms pass it.
        n_sampled_goal: Number of transitions with another goal for every transition that keeps its goal.
        goal_selection_strategy: "future", "final" or "episode".
        copy_info_dict: Store infos, and pass them to `compute_reward`. They are stored as JSON and arrays. Values of
            other types are refused.
        budget: See `holdall.ReplayMemory`; through `replay_buffer_kwargs`.
        prefer: See `holdall.ReplayMemory`.
        spill_dir: See `holdall.ReplayMemory`.
        prefetch: See `ReplayBuffer`.

    Examples:
        >>> from stable_baselines3 import SAC
        >>> from stable_baselines3.common.envs import BitFlippingEnv
        >>> from holdall.sb3 import HerReplayBuffer
        >>> goals = BitFlippingEnv(n_bits=3, continuous=True)
        >>> _ = SAC("MultiInputPolicy", goals, replay_buffer_class=HerReplayBuffer, learning_starts=20).learn(30)
    """

    _accepts_n_steps = False
    _drawable: NDArray[np.int64] | None  # Flat positions of the steps of finished episodes. None: not known.
    _held_from: int  # First tick that the memory held when evicted episodes were last forgotten.

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        *,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        prefetch: int = 0,
        _tuning: Tuning | None = None,
    ) -> None:
        ReplayBuffer.__init__(
            self,
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            budget=budget,
            prefer=prefer,
            spill_dir=spill_dir,
            prefetch=prefetch,
            _tuning=_tuning,
        )
        achieved_spec = self._obs_specs.get(_ACHIEVED)
        if achieved_spec is None or achieved_spec != self._obs_specs.get(_DESIRED):
            raise ArgumentError(
                f"observation_space ({observation_space}) must have {_ACHIEVED} and {_DESIRED}, of one shape and "
                "dtype. Use ReplayBuffer for spaces without goals."
            )
        strategy: Any = goal_selection_strategy
        if isinstance(strategy, str):
            strategy = KEY_TO_GOAL_STRATEGY.get(strategy.lower())
        if not isinstance(strategy, GoalSelectionStrategy):
            raise ArgumentError(
                f"goal_selection_strategy ({goal_selection_strategy!r}) must be one of {list(KEY_TO_GOAL_STRATEGY)}"
            )
        self.env = env
        self.copy_info_dict = copy_info_dict
        self.goal_selection_strategy = strategy
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - (1.0 / (self.n_sampled_goal + 1))
        self.infos: Any = InfoSlots(self.buffer_size if copy_info_dict else 0, n_envs)
        self._forget_episodes()

    def add(  # type: ignore[override]  # Observations are dicts.
        self,
        obs: dict[str, NDArray[Any]],
        next_obs: dict[str, NDArray[Any]],
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one transition per environment. An episode whose first step is overwritten can no longer be drawn."""
        slot = self.pos
        packed = [pack_info(info) for info in infos] if self.copy_info_dict else []
        ReplayBuffer.add(self, obs, next_obs, action, reward, done, infos)
        if self.copy_info_dict:
            self.infos.write(slot, packed)
        self._forget_evicted_episodes()
        self.ep_start[slot] = self._current_ep_start
        for lane in np.flatnonzero(done).tolist():
            self._compute_episode_length(lane)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions of finished episodes, most of them with another goal, in Stable-Baselines3's order."""
        self._forget_evicted_episodes()
        if self._overrides_conversion or self._overrides_goals():
            return her_replay_buffer.HerReplayBuffer.sample(self, batch_size, env)
        return self._draw_samples(batch_size, env)

    def _choose_path(self, env: VecNormalize | None) -> BatchPath:
        """Return how a batch is made. Goals are replaced in a batch, so there is no direct path."""
        path = super()._choose_path(env)
        return BatchPath.HOST if path is BatchPath.DIRECT else path

    def _overrides_goals(self) -> bool:
        """Return whether a subclass, or this object, overrides methods that choose goals."""
        return _has_overridden_goals(type(self)) or not self.__dict__.keys().isdisjoint(_GOAL_HOOKS)

    def _draw(self, batch_size: int, env: VecNormalize | None = None) -> Draw:
        if self._drawable is None:
            self._drawable = np.flatnonzero(self.ep_length > 0)
        if self._drawable.size == 0:
            raise RuntimeError(
                "Unable to sample before the end of the first episode: learning_starts must be greater than the "
                "longest episode of the environment." + self._describe_early_eviction()
            )
        positions = np.random.choice(self._drawable, size=batch_size)  # noqa: NPY002  Stable-Baselines3's generator
        slots, lanes = np.unravel_index(positions, self.ep_length.shape)
        num_relabelled = int(self.her_ratio * batch_size)
        relabelled_slots = slots[:num_relabelled]
        relabelled_lanes = lanes[:num_relabelled]
        outcome_slots = self._choose_outcomes(relabelled_slots, relabelled_lanes)
        order = np.roll(np.arange(batch_size), -num_relabelled)  # Transitions that keep their goal come first.
        rows = np.arange(batch_size - num_relabelled, batch_size)

        def compute_rewards(achieved: Any, desired: Any, _infos: Any) -> Any:
            return self._compute_rewards(achieved, desired, relabelled_slots, relabelled_lanes)

        outcome_ids = self._find_ids(outcome_slots, relabelled_lanes)
        goals = Goals(rows, outcome_ids, _ACHIEVED, _DESIRED, compute_rewards)
        ids = self._find_ids(slots[order], lanes[order])
        return Draw(ids, np.ones(batch_size, np.float32), goals=goals)

    def _describe_early_eviction(self) -> str:
        """Return advice if the budget has evicted transitions early. Otherwise return an empty text."""
        held = self.memory.next_id - self.memory.first_id
        if held >= self._filled * self.n_envs:
            return ""
        return (
            f" The budget holds {held} transitions, and an episode without its first step cannot be drawn: raise "
            "budget, or pass a spill_dir."
        )

    def reset(self) -> None:
        """Forget every transition and episode."""
        ReplayBuffer.reset(self)
        self.infos = InfoSlots(*self.infos.shape)
        self._forget_episodes()

    @classmethod
    def _read_settings(cls, buffer: Any) -> dict[str, Any]:
        names = ("env", "n_sampled_goal", "goal_selection_strategy", "copy_info_dict")
        return {name: getattr(buffer, name) for name in names}

    def _copy_slots(self, buffer: Any) -> None:
        ReplayBuffer._copy_slots(self, buffer)
        self.ep_start[:] = buffer.ep_start
        self.ep_length[:] = buffer.ep_length
        self._current_ep_start[:] = buffer._current_ep_start
        self._forget_incomplete_episodes()
        if self.copy_info_dict:
            for slot in range(self.buffer_size if buffer.full else buffer.pos):
                self.infos.write(slot, [pack_info(info) for info in buffer.infos[slot]])

    def episode_state(self) -> dict[str, NDArray[Any]]:
        """Return the slots of episodes, and the infos, for a checkpoint."""
        infos, lengths = self.infos.state()
        return {
            "her/infos": infos,
            "her/info_lengths": lengths,
            "her/start": self.ep_start,
            "her/length": self.ep_length,
            "her/current": self._current_ep_start,
        }

    def restore_episodes(self, state: Any) -> None:
        """Restore the result of `episode_state`. Restore the memory first."""
        self.ep_start[:] = state["her/start"]
        self.ep_length[:] = state["her/length"]
        self._current_ep_start[:] = state["her/current"]
        self.infos.restore(state["her/infos"], state["her/info_lengths"])
        self._forget_incomplete_episodes()

    def _forget_evicted_episodes(self) -> None:
        """Forget finished episodes whose first step was evicted since the last call."""
        first_tick = self.memory.first_id // self.n_envs
        for tick in range(self._held_from, first_tick):
            self._forget_rest_of_episodes(tick % self.buffer_size)
        self._held_from = first_tick

    def _forget_incomplete_episodes(self) -> None:
        """Forget all finished episodes whose first step the memory does not hold."""
        first_tick = self.memory.first_id // self.n_envs
        newest_tick = self.memory.next_id // self.n_envs - 1
        slots, lanes = np.nonzero(self.ep_length)
        ticks = newest_tick - (newest_tick - slots) % self.buffer_size
        start_ticks = ticks - (slots - self.ep_start[slots, lanes]) % self.buffer_size
        is_incomplete = start_ticks < first_tick
        self.ep_length[slots[is_incomplete], lanes[is_incomplete]] = 0
        self._held_from = first_tick
        self._drawable = None

    def _forget_rest_of_episodes(self, slot: int) -> None:
        """Forget the remaining steps of the episodes whose step in `slot` was evicted."""
        for lane in np.flatnonzero(self.ep_length[slot]).tolist():
            end = self.ep_start[slot, lane] + self.ep_length[slot, lane]
            self.ep_length[np.arange(slot, end) % self.buffer_size, lane] = 0
            self._drawable = None

    def _forget_episodes(self) -> None:
        self.ep_start = np.zeros((self.buffer_size, self.n_envs), dtype=np.int64)
        self.ep_length = np.zeros((self.buffer_size, self.n_envs), dtype=np.int64)
        self._current_ep_start = np.zeros(self.n_envs, dtype=np.int64)
        self._held_from = 0
        self._drawable = None

    def _compute_episode_length(self, env_idx: int) -> None:
        """Record the length of an episode that just ended, unless a budget has evicted its first step already."""
        self._drawable = None
        start = self._current_ep_start[env_idx]
        super()._compute_episode_length(env_idx)
        length = (self.pos - start) % self.buffer_size
        start_id = self.memory.next_id - length * self.n_envs
        if start_id < self.memory.first_id:
            self.ep_length[np.arange(start, start + length) % self.buffer_size, env_idx] = 0

    def _choose_outcomes(self, slots: NDArray[np.int64], lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw a slot of the same episode for every transition, in the order of Stable-Baselines3's draws."""
        start = self.ep_start[slots, lanes]
        length = self.ep_length[slots, lanes]
        if self.goal_selection_strategy == GoalSelectionStrategy.FINAL:
            chosen = length - 1
        else:
            is_future = self.goal_selection_strategy == GoalSelectionStrategy.FUTURE
            first = (slots - start) % self.buffer_size if is_future else 0
            chosen = np.random.randint(first, length)  # noqa: NPY002  Stable-Baselines3's generator
        return np.asarray((chosen + start) % self.buffer_size)

    def _compute_rewards(self, achieved: Any, desired: Any, slots: NDArray[np.int64], lanes: NDArray[np.int64]) -> Any:
        """Let the first environment compute the rewards of transitions with another goal. Return the rewards."""
        if self.env is None:
            raise ArgumentError(
                "env is not set, so no reward can be computed for another goal. Call set_env(env) first."
            )
        infos = self.infos[slots, lanes] if self.copy_info_dict else [{} for _ in range(len(slots))]
        rewards = self.env.env_method("compute_reward", achieved, desired, infos, indices=[0])
        return rewards[0].astype(np.float32).reshape(-1)


@cache
def _has_overridden_goals(kind: type[HerReplayBuffer]) -> bool:
    return any(getattr(kind, name) is not getattr(her_replay_buffer.HerReplayBuffer, name) for name in _GOAL_HOOKS)


def pack_info(info: dict[str, Any]) -> bytes:
    """Return an info as one line of JSON, followed by the bytes of its arrays."""
    arrays: list[bytes] = []
    plain = _to_json(info, "infos", arrays)
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n" + b"".join(arrays)


def unpack_info(packed: bytes) -> dict[str, Any]:
    """Return the info that `pack_info` packed."""
    text, _, rows = packed.partition(b"\n")
    info: dict[str, Any] = _from_json(json.loads(text), rows)
    return info


class InfoSlots:
    """Infos as an array of (slots, environments) that exists only while it is read."""

    def __init__(self, slots: int, lanes: int) -> None:
        self.shape = (slots, lanes)
        self._packed: list[bytes | None] = [None] * (slots * lanes)

    def write(self, slot: int, packed: list[bytes]) -> None:
        """Store the packed infos of one tick."""
        lanes = self.shape[1]
        self._packed[slot * lanes : (slot + 1) * lanes] = packed

    def state(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return all infos as bytes, one after another, and their lengths. The length of a missing info is -1."""
        lengths = [-1 if packed is None else len(packed) for packed in self._packed]
        joined = b"".join(packed for packed in self._packed if packed is not None)
        return np.frombuffer(joined, np.uint8), np.array(lengths, np.int64)

    def restore(self, joined: NDArray[np.uint8], lengths: NDArray[np.int64]) -> None:
        """Restore the result of `state`. Raise DamageError if the lengths do not fit."""
        if lengths.shape != (len(self._packed),) or np.maximum(lengths, 0).sum() != joined.size:
            raise DamageError(
                f"The checkpoint has {lengths.size} infos of {joined.size} bytes, but the buffer has "
                f"{len(self._packed)} infos."
            )
        ends = np.cumsum(np.maximum(lengths, 0))
        raw = joined.tobytes()
        self._packed = [
            None if length < 0 else raw[end - length : end]
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]

    def __getitem__(self, key: Any) -> Any:
        positions = np.arange(self.shape[0] * self.shape[1]).reshape(self.shape)[key]
        flat = [self._packed[position] for position in np.atleast_1d(positions).reshape(-1).tolist()]
        infos: NDArray[Any] = np.empty(len(flat), object)
        infos[:] = [{} if packed is None else unpack_info(packed) for packed in flat]
        return infos[0] if np.ndim(positions) == 0 else infos.reshape(np.shape(positions))


def _to_json(value: Any, path: str, arrays: list[bytes]) -> Any:
    """Return a value as JSON. Append the bytes of its arrays to `arrays`: the JSON has their offsets."""
    if value is None or type(value) in _JSON_TYPES:
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _STORED_DTYPE_KINDS:
        rows = np.asarray(value)
        arrays.append(rows.tobytes())
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {_TYPE_KEY: kind, "dtype": rows.dtype.str, "shape": rows.shape, "at": sum(map(len, arrays[:-1]))}
    if isinstance(value, dict) and all(type(key) is str for key in value) and _TYPE_KEY not in value:
        return {key: _to_json(child, f"{path}[{key!r}]", arrays) for key, child in value.items()}
    if isinstance(value, tuple | list):
        items = [_to_json(child, f"{path}[{index}]", arrays) for index, child in enumerate(value)]
        return items if isinstance(value, list) else {_TYPE_KEY: "tuple", "items": items}
    raise ArgumentError(
        f"{path} is a {type(value).__name__}. copy_info_dict stores None, bool, int, float, str, lists, tuples, dicts "
        "with string keys, and NumPy arrays of numbers. Remove the value in a wrapper, or use copy_info_dict=False."
    )


def _from_json(value: Any, rows: bytes) -> Any:
    if isinstance(value, list):
        return [_from_json(child, rows) for child in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE_KEY)
    if kind is None:
        return {key: _from_json(child, rows) for key, child in value.items()}
    if kind == "tuple":
        return tuple(_from_json(child, rows) for child in value["items"])
    dtype = np.dtype(value["dtype"])
    shape = tuple(value["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(rows, dtype, count, value["at"]).reshape(shape).copy()
    return array if kind == "array" else array[()]

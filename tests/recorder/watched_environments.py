"""Environments that log their own transitions: the oracle of the recorder's tests.

Every lane is a `WatchedEnv`. A memory must have the transitions of its log: no reset, no step twice, and the true final
observation of every episode.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

import holdall
from holdall.testing.oracle import assert_same_bits, map_leaves, stack_rows

SPACES: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "image": spaces.Box(0, 255, (4, 6, 6), np.uint8),
    "number": spaces.Discrete(50),
    "bits": spaces.MultiBinary(5),
    "dict": spaces.Dict({"image": spaces.Box(0, 255, (5, 5), np.uint8), "number": spaces.Discrete(9)}),
    "nested": spaces.Dict(
        {"inner": spaces.Dict({"vector": spaces.Box(-1, 1, (2,), np.float64)}), "bits": spaces.MultiBinary(2)}
    ),
    "tuple": spaces.Tuple((spaces.Discrete(7), spaces.Box(-1, 1, (2,), np.float32))),
}


class Seen(NamedTuple):
    """One transition in the log of an environment."""

    obs: Any
    action: Any
    reward: float
    next_obs: Any
    terminated: bool
    truncated: bool


class WatchedEnv(gym.Env[Any, Any]):
    """Random observations, and episodes that end at any step with the probability `ends`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 as in the base class

    def __init__(self, space: str, ends: float, seed: int, action: spaces.Space[Any] | None = None) -> None:
        self.observation_space = copy.deepcopy(SPACES[space])
        self.observation_space.seed(seed)
        self.action_space = spaces.Discrete(5) if action is None else action
        self._random = np.random.default_rng(seed)
        self._ends = ends
        self._obs: Any = None
        self.log: list[Seen] = []
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._obs = self.observation_space.sample()
        self.resets += 1
        return map_leaves(np.array, self._obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._obs is not None, "stepped before it was reset"
        following = self.observation_space.sample()
        reward = float(self._random.integers(1, 9))
        is_end = bool(self._random.random() < self._ends)
        is_cut = bool(self._random.random() < 0.5)
        both = bool(self._random.random() < 0.1)
        terminated = is_end and (both or not is_cut)
        truncated = is_end and (both or is_cut)
        self.log.append(Seen(self._obs, map_leaves(np.array, action), reward, following, terminated, truncated))
        self._obs = None if is_end else following
        return map_leaves(np.array, following), reward, terminated, truncated, {"steps": len(self.log)}


class InPlaceVectorEnv(gym.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A vector environment that overwrites its last observations and the actions that it is given.

    Args:
        says: Whether its metadata names its autoreset mode.
        form: The form of final observations: "rows" (an object for each lane), "batched" (like observations), "masked"
            (the same, with a mask for each key), "list", or "legacy" (with the name that Gymnasium used before 1.0).
    """

    def __init__(self, lanes: list[WatchedEnv], mode: AutoresetMode, *, says: bool = True, form: str = "rows") -> None:
        self.lanes = lanes
        self.num_envs = len(lanes)
        self.mode = mode
        self.form = form
        self.metadata = {"autoreset_mode": mode} if says else {}
        self.single_observation_space = lanes[0].observation_space
        self.single_action_space = lanes[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._last: list[Any] = [None] * self.num_envs
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._obs: Any = create_empty_array(self.single_observation_space, self.num_envs)

    def _batch(self) -> Any:
        self._obs = concatenate(self.single_observation_space, self._last, self._obs)
        return self._obs

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = np.ones(self.num_envs, np.bool_) if options is None else options.pop("reset_mask")
        for lane in np.flatnonzero(mask):
            self._last[lane] = self.lanes[lane].reset()[0]
        self._ended &= ~mask
        return self._batch(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        reward = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        final: list[Any] = [None] * self.num_envs
        for lane, action in enumerate(iterate(self.action_space, actions)):
            env = self.lanes[lane]
            if self._ended[lane]:
                assert self.mode == AutoresetMode.NEXT_STEP, "stepped an episode that had ended"
                self._last[lane] = env.reset()[0]
                continue
            self._last[lane], reward[lane], terminated[lane], truncated[lane], _ = env.step(action)
            if self.mode == AutoresetMode.SAME_STEP and (terminated[lane] or truncated[lane]):
                final[lane] = self._last[lane]
                self._last[lane] = env.reset()[0]
        ends = terminated | truncated
        self._ended = ends if self.mode != AutoresetMode.SAME_STEP else np.zeros_like(ends)
        if isinstance(actions, np.ndarray):
            actions[...] = 0
        return self._batch(), reward, terminated, truncated, self._final_info(final)

    def _final_info(self, final: list[Any]) -> dict[str, Any]:
        mask = np.array([value is not None for value in final])
        if not mask.any():
            return {}
        rows = np.full(self.num_envs, None, dtype=object)
        for lane in np.flatnonzero(mask):
            rows[lane] = final[lane]
        if self.form == "list":
            return {"final_obs": list(rows)}
        if self.form == "legacy":
            return {"final_observation": rows, "_final_observation": mask}
        if self.form == "rows":
            return {"final_obs": rows, "_final_obs": mask}
        batched: Any = create_empty_array(self.single_observation_space, self.num_envs)
        filled = [self.single_observation_space.sample() if value is None else value for value in final]
        values = concatenate(self.single_observation_space, filled, batched)
        if self.form == "masked" and isinstance(values, dict):
            return {"final_obs": {**values, **{f"_{key}": mask for key in values}}}
        return {"final_obs": values, "_final_obs": mask}


def assert_holds(memory: holdall.ReplayMemory, logs: list[list[Seen]]) -> None:
    """Raise AssertionError unless every lane of the memory has the transitions of its environment's log."""
    assert len(memory) == sum(map(len, logs))
    every = np.arange(memory.first_id, memory.next_id)
    every = every[memory.are_valid(every)]
    for lane, log in enumerate(logs):
        ids = every[every % memory.num_envs == lane]
        assert len(ids) == len(log)
        if not log:
            continue
        batch = memory.gather(ids)
        seen = stack_rows(log)
        for held, happened in zip((batch.obs, batch.action, batch.next_obs), (seen[0], seen[1], seen[3]), strict=True):
            assert_same_bits(held, _cast_like(held, happened))
        np.testing.assert_array_equal(batch.reward, seen[2])
        np.testing.assert_array_equal(batch.terminated, seen[4])
        np.testing.assert_array_equal(batch.truncated, seen[5])


def _cast_like(held: Any, seen: Any) -> Any:
    """Return `seen` with the dtypes of `held`. Require that the cast changes no value."""
    if isinstance(held, dict):
        return {key: _cast_like(held[key], seen[key]) for key in held}
    if isinstance(held, tuple):
        return tuple(map(_cast_like, held, seen))
    cast = np.asarray(seen).astype(held.dtype)
    np.testing.assert_array_equal(cast, seen)
    return cast

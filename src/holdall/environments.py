"""One interface to vector environments, single environments and the VecEnvs of Stable-Baselines3.

    make_source(envs) -> EnvironmentSource.step(actions) -> StepResult
                         ReportedFinals.find(info) -> the true final observation of a lane

A source returns the results of every step with a leading lane axis. It also has the autoreset mode of its environment,
which says when a lane is reset after the end of an episode. `holdall.Recorder` makes transitions from the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.schema import Array, Leaf, Tree, as_array, fit_flags, move_to_host

NEXT_STEP = "next_step"
SAME_STEP = "same_step"
DISABLED = "disabled"
_MODES = (NEXT_STEP, SAME_STEP, DISABLED)
_MODE_BY_WRAPPER = {"Autoreset": NEXT_STEP, "AutoResetWrapper": SAME_STEP}
"""Modes of the wrappers that reset a single environment: that of Gymnasium, and that of versions before 1.0."""
_FINAL_KEYS = ("final_obs", "final_observation", "terminal_observation")
"""Keys of true final observations in `info`: Gymnasium, Gymnasium before 1.0, Stable-Baselines3."""


class StepResult(NamedTuple):
    """Results of one step of all lanes, with a leading lane axis."""

    obs: Any  # Observations in the form in which the environment returned them.
    reward: Array
    terminated: Any
    truncated: Any
    info: Any


class EnvironmentSource(ABC):
    """An environment, or several that step together, whose results have a leading lane axis.

    Attributes:
        envs: The environment.
        lanes: Number of environments that step together.
        observation_space: Space of one lane's observation.
        action_space: Space of one lane's action.
        mode: Autoreset mode, or None if it is not known.
        declares_mode: Whether the environment itself says what its autoreset mode is.
    """

    def __init__(
        self,
        envs: Any,
        lanes: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        mode: str | None,
        *,
        declares_mode: bool,
    ) -> None:
        self.envs = envs
        self.lanes = lanes
        self.observation_space = observation_space
        self.action_space = action_space
        self.mode = mode
        self.declares_mode = declares_mode
        self._library: str | None = None  # Package of the arrays in the first observations: "numpy", "torch", "jax".

    @abstractmethod
    def step(self, actions: Any) -> tuple[Any, StepResult]:
        """Step all lanes. Return the environment's own return value, and its parts."""

    @abstractmethod
    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        """Reset the lanes. Return the environment's own return value, and the observations in it."""

    def flatten(self, tree: Tree, value: Any, argument: str) -> list[Array]:
        """Return one checked array per leaf, with a leading lane axis."""
        return tree.flatten(value, (self.lanes,), argument, Leaf.fit if type(value) is np.ndarray else _fit_lanes)

    def add_lane_axis(self, value: Any) -> Any:
        """Return the output of a network with a leading lane axis."""
        return value

    def convert_actions(self, tree: Tree, actions: Any, checked: list[Array], obs: Any) -> Any:
        """Return actions in a form that the environment accepts.

        NumPy arrays, and arrays of the library that `obs` has, are returned unchanged. Other actions, such as tensors
        for an environment of NumPy, are replaced by copies of the `checked` arrays.
        """
        if type(tree.structure) is int and self._is_accepted(tree.leaves[0], actions):
            return actions
        if self._library is None:
            self._library = _find_library(obs)
        library = self._library

        def is_accepted(leaf: Leaf, value: Any, *_: Any) -> bool:
            return self._is_accepted(leaf, value) or _find_library(value) == library != "numpy"

        if all(tree.flatten(actions, (), "actions", is_accepted)):
            return actions
        return tree.build([self._convert_checked(leaf) for leaf in checked])

    def _is_accepted(self, leaf: Leaf, value: Any) -> bool:
        """Return whether every environment of this kind accepts `value` for a leaf of the action."""
        return isinstance(value, np.ndarray)

    def _convert_checked(self, checked: Array) -> Any:
        """Return a copy of a checked action for the environment, which may write to it."""
        return checked.copy()


class _VectorSource(EnvironmentSource):
    """A vector environment of Gymnasium."""

    def __init__(self, envs: Any) -> None:
        declared = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
        super().__init__(
            envs,
            int(envs.num_envs),
            envs.single_observation_space,
            envs.single_action_space,
            None if declared is None else parse_mode(declared, "envs.metadata['autoreset_mode']"),
            declares_mode=declared is not None,
        )

    def step(self, actions: Any) -> tuple[Any, StepResult]:
        returned = self.envs.step(actions)
        obs, reward, terminated, truncated, info = _require_parts(returned, "step", 5)
        if type(terminated) is not np.ndarray:
            terminated = move_to_host(terminated)
            truncated = move_to_host(truncated)
        return returned, StepResult(obs, _make_rewards(reward), terminated, truncated, info)

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        returned = _require_parts(self.envs.reset(seed=seed, options=options), "reset", 2)
        return returned, returned[0]


class _SB3Source(EnvironmentSource):
    """A VecEnv of Stable-Baselines3.

    It resets a lane in the step that ends an episode, has one flag for both kinds of ends, and returns a list of infos.
    """

    def __init__(self, envs: Any) -> None:
        super().__init__(
            envs, int(envs.num_envs), envs.observation_space, envs.action_space, SAME_STEP, declares_mode=True
        )

    def step(self, actions: Any) -> tuple[Any, StepResult]:
        returned = self.envs.step(actions)
        obs, reward, dones, infos = returned
        done = fit_flags(dones, (self.lanes,), "dones")
        is_cut = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos], np.bool_)
        # SubprocVecEnv stacks the rewards of its processes, so a step may return integers and the next one floats.
        rewards = _make_rewards(reward, may_change_dtype=True)
        return returned, StepResult(obs, rewards, done & ~is_cut, done & is_cut, infos)

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        if options is not None and "reset_mask" in options:
            raise ArgumentError(
                "options has a 'reset_mask', but a VecEnv of Stable-Baselines3 always resets all lanes, and resets a "
                "lane by itself when its episode ends. Leave reset_mask out."
            )
        if seed is not None:
            self.envs.seed(seed)
        if options is not None:
            self.envs.set_options(options)
        obs = self.envs.reset()
        return obs, obs


class _SingleSource(EnvironmentSource):
    """One environment. Its values have no lane axis. Its caller resets it, unless a wrapper does."""

    def __init__(self, envs: gymnasium.Env[Any, Any]) -> None:
        wrapped: Any = envs
        while isinstance(wrapped, gymnasium.Wrapper) and type(wrapped).__name__ not in _MODE_BY_WRAPPER:
            wrapped = wrapped.env
        declared = _MODE_BY_WRAPPER.get(type(wrapped).__name__)
        super().__init__(
            envs,
            1,
            envs.observation_space,
            envs.action_space,
            DISABLED if declared is None else declared,
            declares_mode=declared is not None,
        )
        self._reward_dtype: np.dtype[Any] | None = None

    def _is_accepted(self, leaf: Leaf, value: Any) -> bool:
        return isinstance(value, int | np.generic | np.ndarray) and getattr(value, "shape", ()) == leaf.shape

    def _convert_checked(self, checked: Array) -> Any:
        return checked[0].copy()

    def step(self, actions: Any) -> tuple[Any, StepResult]:
        returned = self.envs.step(actions)
        obs, reward, terminated, truncated, info = _require_parts(returned, "step", 5)
        rewards = self._keep_reward_dtype(reward)
        return returned, StepResult(obs, rewards, np.array([bool(terminated)]), np.array([bool(truncated)]), [info])

    def _keep_reward_dtype(self, given: Any) -> Array:
        """Return a reward in the dtype of the first reward, if that changes no value.

        An environment may return 1 in one step and 0.5 in the next.
        """
        reward = _make_rewards(given, may_change_dtype=type(given) is not np.ndarray or given.ndim == 0)
        if self._reward_dtype is None:
            self._reward_dtype = reward.dtype
        if reward.dtype == self._reward_dtype:
            return reward
        converted = reward.astype(self._reward_dtype)
        return converted if np.array_equal(converted, reward, equal_nan=True) else reward

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        options = {name: value for name, value in (options or {}).items() if name != "reset_mask"}
        returned = _require_parts(self.envs.reset(seed=seed, options=options or None), "reset", 2)
        return returned, returned[0]

    def flatten(self, tree: Tree, value: Any, argument: str) -> list[Array]:
        return tree.flatten(value, (1,), argument, _fit_single)

    def add_lane_axis(self, value: Any) -> Any:
        if isinstance(value, float) and float(np.float32(value)) == value:
            return np.array([value], np.float32)
        return value.reshape(1) if getattr(value, "ndim", 1) == 0 else value


def _fit_lanes(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    """Check the values of all lanes, which may be tensors on any device."""
    return leaf.fit(value if type(value) is np.ndarray else move_to_host(value), leading, argument)


def _fit_single(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    """Check a value of a single environment, and add the lane axis. Python numbers get the leaf's dtype if they fit."""
    array = value if type(value) is np.ndarray else as_array(move_to_host(value), leaf.describe(argument))
    if array.dtype != leaf.dtype and isinstance(value, int | float) and leaf.dtype.type(value) == value:
        array = np.asarray(value, leaf.dtype)
    return leaf.fit(array[None] if array.shape == leaf.shape else array, leading, argument)


def _require_parts(returned: Any, method: str, count: int) -> Any:
    """Return the return value of an environment's method, if it has the `count` parts that Gymnasium defines."""
    if isinstance(returned, (tuple, list)) and len(returned) == count:
        return returned
    parts = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
    raise ArgumentError(
        f"envs.{method} returned {parts}, but {count} values are expected, as in Gymnasium. An environment of an older "
        "gym needs a wrapper, such as shimmy.GymV21CompatibilityV0."
    )


def _make_rewards(given: Any, *, may_change_dtype: bool = False) -> Array:
    """Return rewards as an array.

    Whole numbers become float64 if they are given as Python numbers, or if rewards `may_change_dtype` between steps.
    """
    if type(given) is np.ndarray and not may_change_dtype:
        return given
    rewards = as_array(move_to_host(given), "reward")
    if rewards.dtype.kind not in "biu" or not (may_change_dtype or type(given) in {list, tuple}):
        return rewards
    floats = rewards.astype(np.float64)
    is_changed = floats.astype(rewards.dtype) != rewards
    if is_changed.any():
        raise ArgumentError(
            f"reward has the value {rewards[is_changed].flat[0]}, which float64 cannot hold. Divide the rewards, or "
            "return arrays of integers in every step."
        )
    return floats


def _find_library(value: Any) -> str:
    """Return the package of a value's type, or of the first value in it. Python's own numbers count as NumPy's."""
    while isinstance(value, Mapping | list | tuple) and value:
        value = next(iter(value.values() if isinstance(value, Mapping) else value))
    return type(value).__module__.partition(".")[0].replace("builtins", "numpy")


def make_source(envs: Any) -> EnvironmentSource:
    """Return the source for an environment, chosen by its attributes."""
    innermost = getattr(envs, "unwrapped", envs)  # Wrappers before Gymnasium 1.0 warn when an attribute is looked up.
    if all(hasattr(innermost, name) for name in ("single_observation_space", "single_action_space", "num_envs")):
        return _VectorSource(envs)
    if isinstance(envs, gymnasium.Env):
        return _SingleSource(envs)
    if all(hasattr(envs, name) for name in ("num_envs", "observation_space", "step_wait", "env_method")):
        return _SB3Source(envs)
    raise ArgumentError(
        f"envs ({type(envs).__name__}) is not an environment that can be recorded. Pass a gymnasium.vector.VectorEnv, "
        "a gymnasium.Env, or a VecEnv of Stable-Baselines3."
    )


def parse_mode(value: Any, argument: str) -> str:
    """Return one of the three autoreset modes, given as Gymnasium's `AutoresetMode`, its name or its value."""
    name = str(getattr(value, "value", value)).lower().replace("_", "").replace("-", "")
    for mode in _MODES:
        if mode.replace("_", "") == name:
            return mode
    raise ArgumentError(f"{argument} is {value!r}. Pass one of {', '.join(map(repr, _MODES))}.")


class ReportedFinals(NamedTuple):
    """The true final observations of a step, in the form in which the environment returned them.

    Attributes:
        values: A sequence of one observation per lane, or one batch like the observations of a step. Lanes whose
            episode did not end have None, a False entry in a mask, or a missing key.
        mask: Lanes that have a final observation, or None if the environment returned no mask.
    """

    values: Any
    mask: Any

    @classmethod
    def find(cls, info: Any) -> ReportedFinals | None:
        """Return the final observations in `info`: a dict of all lanes, or a list of one dict per lane."""
        for key in _FINAL_KEYS:
            if isinstance(info, Mapping):
                if info.get(key) is not None:
                    return cls(info[key], info.get(f"_{key}"))
            elif any(key in each for each in info):
                return cls([each.get(key) for each in info], None)
        return None

    def get_leaves(self, tree: Tree, lane: int) -> list[Array] | None:
        """Return the final observation of a lane, leaf by leaf, or None if the lane has none."""
        if self.mask is not None and not self.mask[lane]:
            return None
        value = _get_lane(tree.structure, self.values, lane)
        return None if value is None else tree.flatten(value, (), f"info['final_obs'][{lane}]", _fit_final)


def _get_lane(structure: Any, values: Any, lane: int) -> Any:
    """Return the value of one lane, from a sequence of lanes or from batched leaves. None: the lane has no value."""
    if isinstance(structure, dict) and isinstance(values, Mapping):
        parts = {}
        for key, child in structure.items():
            mask = values.get(f"_{key}") if f"_{key}" not in structure else None
            has_value = key in values and (mask is None or mask[lane])
            parts[key] = _get_lane(child, values[key], lane) if has_value else None
        return None if any(part is None for part in parts.values()) else parts
    if isinstance(structure, tuple) and isinstance(values, tuple):
        batched = tuple(_get_lane(child, part, lane) for child, part in zip(structure, values, strict=True))
        return None if any(part is None for part in batched) else batched
    return values[lane]


def _fit_final(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    """Check a final observation. Dtypes that vector environments cast, and single numbers, are converted."""
    array = as_array(move_to_host(value), argument)
    if array.dtype != leaf.dtype and (np.can_cast(array.dtype, leaf.dtype, "same_kind") or array.ndim == 0):
        array = array.astype(leaf.dtype)
    return leaf.fit(array, leading, argument)

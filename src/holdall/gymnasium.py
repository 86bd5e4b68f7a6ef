"""How environments step, reset and report final observations, in one form; and resets that were added as steps.

In:  a Gymnasium vector environment, one environment, or a VecEnv of Stable-Baselines3.
Out: what each of their steps made, with a leading lane axis; their autoreset mode; a lane's true final observation.
`holdall.Recorder` puts transitions together from these.

Those who call `memory.add` themselves get a warning: the newest transitions of a memory are looked at, a few times in
its life. A vector environment resets by itself. A loop that does not look at the mode adds either the reset step as a
transition (Gymnasium's next-step mode), or the first observation of the next episode as the final one (same-step mode).
Both leave episodes whose end is continued: the observation after it is its next observation. So do programs that cut
episodes without a reset, or end them when a life is lost, and these are right. Hence more is asked for:

* next-step: every step after an end has no reward, and the other steps have rewards too often for that to be chance;
* same-step: at time limits, which come whatever the environment does, observations change much more than elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from math import comb, inf
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.schema import Array, Leaf, Tree, as_array, fit_flags, on_host

NEXT_STEP, SAME_STEP, DISABLED = "next_step", "same_step", "disabled"
_MODES = (NEXT_STEP, SAME_STEP, DISABLED)
_SINGLE_MODES = {"Autoreset": NEXT_STEP, "AutoResetWrapper": SAME_STEP}
"""Wrappers that reset a single environment: Gymnasium's, and the one before 1.0."""
_FINAL = ("final_obs", "final_observation", "terminal_observation")
"""Where environments put the true final observation: Gymnasium, Gymnasium before 1.0, Stable-Baselines3."""

_OF_NUMPY = (int, np.generic, np.ndarray)
"""What one environment takes as it is."""


class Made(NamedTuple):
    """What one step made, with a leading lane axis."""

    obs: Any  # as the environment gave them
    reward: Array
    terminated: Any
    truncated: Any
    info: Any


class _VectorSource:
    """A Gymnasium vector environment."""

    _of_library: str | None = None  # the package of the observations that it gave first

    def __init__(self, envs: Any) -> None:
        self.envs, self.lanes = envs, int(envs.num_envs)
        self.observation_space: spaces.Space[Any] = envs.single_observation_space
        self.action_space: spaces.Space[Any] = envs.single_action_space
        said = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
        self.mode = None if said is None else mode_named(said, "envs.metadata['autoreset_mode']")
        self.says_mode = said is not None

    def taken(self, tree: Tree, actions: Any, checked: list[Array], obs: Any) -> Any:
        """Return actions as the environment takes them: as they are, if they are of NumPy or of its own library.

        Others, of torch, JAX or lists, are made arrays of the space's dtype, out of what was checked.
        """
        if type(tree.structure) is int and self._is_taken(tree.leaves[0], actions):
            return actions
        library = self._of_library = self._of_library or _library(obs)

        def is_taken(leaf: Leaf, value: Any, *_: Any) -> bool:
            return self._is_taken(leaf, value) or _library(value) == library != "numpy"

        if all(tree.flatten(actions, (), "actions", is_taken)):
            return actions
        return tree.build([self._one_taken(leaf) for leaf in checked])

    def _is_taken(self, leaf: Leaf, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def _one_taken(self, checked: Array) -> Any:
        return checked.copy()  # environments may write to what they get

    def step(self, actions: Any) -> tuple[Any, Made]:
        """Step all lanes; return what the environment returned, and what it made."""
        returned = self.envs.step(actions)
        obs, reward, terminated, truncated, info = _of_gymnasium(returned, "step", 5)
        if type(terminated) is not np.ndarray:
            terminated, truncated = on_host(terminated), on_host(truncated)
        return returned, Made(obs, _rewards(reward), terminated, truncated, info)

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        """Reset; return what the environment returned, and the observations in it."""
        returned = _of_gymnasium(self.envs.reset(seed=seed, options=options), "reset", 2)
        return returned, returned[0]

    def flatten(self, tree: Tree, value: Any, argument: str) -> list[Array]:
        """Return one checked array a leaf, with a leading lane axis."""
        return tree.flatten(value, (self.lanes,), argument, Leaf.fit if type(value) is np.ndarray else _fit_lanes)

    def batched_floats(self, value: Any) -> Any:
        """Return a network's output with a leading lane axis."""
        return value


class _SB3Source(_VectorSource):
    """A VecEnv of Stable-Baselines3: resets in the same step, one flag for both kinds of ends, a list of infos."""

    def __init__(self, envs: Any) -> None:
        self.envs, self.lanes, self.mode, self.says_mode = envs, int(envs.num_envs), SAME_STEP, True
        self.observation_space, self.action_space = envs.observation_space, envs.action_space

    def step(self, actions: Any) -> tuple[Any, Made]:
        returned = self.envs.step(actions)
        obs, reward, dones, infos = returned
        done = fit_flags(dones, (self.lanes,), "dones")
        cut = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos], np.bool_)
        rewards = _rewards(reward, are_mixed=True)  # SubprocVecEnv stacks what came: integers in one step, then floats
        return returned, Made(obs, rewards, done & ~cut, done & cut, infos)

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        if seed is not None:
            self.envs.seed(seed)
        if options is not None and "reset_mask" in options:
            raise ArgumentError(
                "options has a 'reset_mask', but a VecEnv of Stable-Baselines3 resets all its lanes, and resets those "
                "whose episode ended by itself; leave it out"
            )
        if options is not None:
            self.envs.set_options(options)
        obs = self.envs.reset()
        return obs, obs


class _SingleSource(_VectorSource):
    """One environment: nothing has a lane axis, and the caller resets it."""

    def __init__(self, envs: gymnasium.Env[Any, Any]) -> None:
        self.envs, self.lanes = envs, 1
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        wrapped: Any = envs
        while isinstance(wrapped, gymnasium.Wrapper) and type(wrapped).__name__ not in _SINGLE_MODES:
            wrapped = wrapped.env
        self.says_mode = type(wrapped).__name__ in _SINGLE_MODES
        self.mode = _SINGLE_MODES.get(type(wrapped).__name__, DISABLED)
        self._reward_dtype: np.dtype[Any] | None = None

    def _is_taken(self, leaf: Leaf, value: Any) -> bool:
        return isinstance(value, _OF_NUMPY) and getattr(value, "shape", ()) == leaf.shape

    def _one_taken(self, checked: Array) -> Any:
        return checked[0].copy()

    def step(self, actions: Any) -> tuple[Any, Made]:
        returned = self.envs.step(actions)
        obs, reward, terminated, truncated, info = _of_gymnasium(returned, "step", 5)
        ends = np.array([bool(terminated)]), np.array([bool(truncated)])
        return returned, Made(obs, self._in_dtype_of_first(reward), *ends, [info])

    def _in_dtype_of_first(self, given: Any) -> Array:
        """Return a reward in the dtype of the first: an integer in one step may be a float in another."""
        reward = _rewards(given, are_mixed=type(given) is not np.ndarray or given.ndim == 0)
        if self._reward_dtype is None:
            self._reward_dtype = reward.dtype
        if reward.dtype != self._reward_dtype:
            cast = reward.astype(self._reward_dtype)
            reward = cast if np.array_equal(cast, reward, equal_nan=True) else reward
        return reward

    def reset(self, seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        options = {name: value for name, value in (options or {}).items() if name != "reset_mask"}
        returned = _of_gymnasium(self.envs.reset(seed=seed, options=options or None), "reset", 2)
        return returned, returned[0]

    def flatten(self, tree: Tree, value: Any, argument: str) -> list[Array]:
        return tree.flatten(value, (1,), argument, _fit_one)

    def batched_floats(self, value: Any) -> Any:
        if isinstance(value, float) and float(np.float32(value)) == value:
            return np.array([value], np.float32)
        return value.reshape(1) if getattr(value, "ndim", 1) == 0 else value


def _fit_lanes(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    """Check the values of all lanes; tensors are taken as a network or an environment on a GPU returns them."""
    return leaf.fit(value if type(value) is np.ndarray else on_host(value), leading, argument)


def _fit_one(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    """Return the value of a single environment with a lane axis of one; Python numbers take the leaf's dtype."""
    array = value if type(value) is np.ndarray else as_array(on_host(value), leaf.called(argument))
    if array.dtype != leaf.dtype and isinstance(value, int | float) and leaf.dtype.type(value) == value:
        array = np.asarray(value, leaf.dtype)
    return leaf.fit(array[None] if array.shape == leaf.shape else array, leading, argument)


def _of_gymnasium(returned: Any, call: str, count: int) -> Any:
    """Return what an environment returned, if it has as many parts as Gymnasium says."""
    if isinstance(returned, (tuple, list)) and len(returned) == count:
        return returned
    parts = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
    raise ArgumentError(
        f"envs.{call} returned {parts}, Gymnasium's returns {count}: it is made for an older gym; wrap it, for example "
        "in shimmy.GymV21CompatibilityV0"
    )


def _rewards(given: Any, *, are_mixed: bool = False) -> Array:
    """Return rewards as an array; whole numbers that are no array, or mixed with others, as float64."""
    if type(given) is np.ndarray and not are_mixed:
        return given
    rewards = as_array(on_host(given), "reward")
    if rewards.dtype.kind not in "biu" or not (are_mixed or type(given) in {list, tuple}):
        return rewards
    floats = rewards.astype(np.float64)
    if (changed := floats.astype(rewards.dtype) != rewards).any():
        raise ArgumentError(
            f"reward holds {rewards[changed].flat[0]}, which float64 cannot hold; divide the rewards, or return arrays "
            "of integers in every step"
        )
    return floats


def _library(value: Any) -> str:
    """Return the package of a value's type, or of the first value in it; Python's own numbers are as NumPy's."""
    while isinstance(value, Mapping | list | tuple) and value:
        value = next(iter(value.values() if isinstance(value, Mapping) else value))
    return type(value).__module__.partition(".")[0].replace("builtins", "numpy")


def source_of(envs: Any) -> _VectorSource:
    """Return the source that speaks to an environment, by what it offers."""
    innermost = getattr(envs, "unwrapped", envs)  # wrappers before Gymnasium 1.0 warn if they are asked
    if all(hasattr(innermost, name) for name in ("single_observation_space", "single_action_space", "num_envs")):
        return _VectorSource(envs)
    if isinstance(envs, gymnasium.Env):
        return _SingleSource(envs)
    if all(hasattr(envs, name) for name in ("num_envs", "observation_space", "step_wait", "env_method")):
        return _SB3Source(envs)
    raise ArgumentError(
        f"envs ({type(envs).__name__}) is no environment that can be recorded; pass a gymnasium.vector.VectorEnv, a "
        "gymnasium.Env, or a VecEnv of Stable-Baselines3"
    )


def mode_named(value: Any, argument: str) -> str:
    """Return one of the three modes, given as Gymnasium's `AutoresetMode`, its name or its value."""
    name = str(getattr(value, "value", value)).lower().replace("_", "").replace("-", "")
    for mode in _MODES:
        if mode.replace("_", "") == name:
            return mode
    raise ArgumentError(f"{argument} is {value!r}; pass one of {', '.join(map(repr, _MODES))}")


# ---------------------------------------------------------------- final observations


class FinalInfo(NamedTuple):
    """The true final observations of a step, as an environment gives them.

    A sequence of one lane's observations each, or batched as the observations themselves; None, a mask or a missing key
    say that a lane has none.
    """

    values: Any
    mask: Any

    @classmethod
    def of(cls, info: Any) -> FinalInfo | None:
        """Find them in a dict of all lanes, or in a list of one dict a lane."""
        for key in _FINAL:
            if isinstance(info, Mapping):
                if info.get(key) is not None:
                    return cls(info[key], info.get(f"_{key}"))
            elif any(key in each for each in info):
                return cls([each.get(key) for each in info], None)
        return None

    def leaves_of(self, tree: Tree, lane: int) -> list[Array] | None:
        """Return a lane's final observation by leaf; None if there is none."""
        if self.mask is not None and not self.mask[lane]:
            return None
        value = _of_lane(tree.structure, self.values, lane)
        return None if value is None else tree.flatten(value, (), f"info['final_obs'][{lane}]", _fit_final)


def _of_lane(structure: Any, values: Any, lane: int) -> Any:
    """Return one lane's value, out of a sequence of lanes or of batched leaves; None if there is none."""
    if isinstance(structure, dict) and isinstance(values, Mapping):
        parts = {}
        for key, child in structure.items():
            mask = values.get(f"_{key}") if f"_{key}" not in structure else None
            is_there = key in values and (mask is None or mask[lane])
            parts[key] = _of_lane(child, values[key], lane) if is_there else None
        return None if any(part is None for part in parts.values()) else parts
    if isinstance(structure, tuple) and isinstance(values, tuple):
        batched = tuple(_of_lane(child, part, lane) for child, part in zip(structure, values, strict=True))
        return None if any(part is None for part in batched) else batched
    return values[lane]


def _fit_final(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    """Check a final observation; its dtype may differ as far as vector environments cast their observations."""
    array = as_array(on_host(value), argument)
    if array.dtype != leaf.dtype and (np.can_cast(array.dtype, leaf.dtype, "same_kind") or array.ndim == 0):
        array = array.astype(leaf.dtype)
    return leaf.fit(array, leading, argument)


# ---------------------------------------------------------------- resets that were added as steps

FIRST_LOOK_TICKS, LAST_LOOK_TICKS, _LOOKS_APART = 256, 2**16, 4
"""When a memory is looked at: after so many ticks, and again after 4 times as many, up to the last look."""
_LOOKED_AT = 4096
"""Transitions that a look takes in, at most."""
_FEWEST_ENDS, _MOST_ENDS = 8, 64
_CHANCE = 1e-6
"""A warning that is a coincidence in a right program is rarer than this."""
_LARGE_CHANGE = 0.95
"""Changes above this share of all are large."""
_MOST_BYTES = 2**20
"""Observations above this size are not compared by how much they change."""

Ids = NDArray[np.int64]
Pairs = list[tuple[NDArray[Any], NDArray[Any]]]
"""Observations and next observations, field by field."""


class Newest(NamedTuple):
    """What is looked at: ids of (ticks, lanes), and how to read transitions."""

    ids: Ids
    outcomes: Callable[[Ids], tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]]
    pairs: Callable[[Ids], Pairs]  # Observations and next observations, leaf by leaf.


def next_look(ticks: int) -> float:
    """Return the tick from which on a memory is looked at again."""
    look: float = FIRST_LOOK_TICKS
    while look <= ticks:
        look *= _LOOKS_APART
    return look if look <= LAST_LOOK_TICKS else inf


def newest_ids(first_id: int, next_id: int, lanes: int) -> Ids:
    """Return the ids of the newest ticks, (ticks, lanes)."""
    ticks = min((next_id - first_id) // lanes, max(2, _LOOKED_AT // lanes))
    return np.arange(next_id - ticks * lanes, next_id).reshape(ticks, lanes)


def warn_of_resets(found: str, stacklevel: int) -> float:
    """Warn of resets of an autoreset mode that were added as steps; return when to look again: never."""
    shown = (
        "the step after an episode's end was added as a transition: it starts from the final observation and has no "
        "reward. The environment resets in that step (next-step autoreset), so it is none"
        if found == "next_step"
        else "at time limits next_obs is the first observation of the next episode, not the final one of its own: the "
        "environment resets at once (same-step autoreset), and info['final_obs'] has the true one"
    )
    warnings.warn(
        f"{shown}. Let holdall.Recorder(envs, memory) step the environment, which adds what really happened; or pass "
        "valid= and the true next_obs to add. If nothing is reset there, this is no mistake",
        UserWarning,
        stacklevel=stacklevel,
    )
    return inf


def added_resets(held: Newest) -> str | None:
    """Return the autoreset mode whose resets were added as steps: "next_step", "same_step", or None."""
    reward, terminated, truncated = held.outcomes(held.ids)
    ended = terminated | truncated
    tick, lane = np.nonzero(ended[:-1])
    tick, lane = tick[-_MOST_ENDS:], lane[-_MOST_ENDS:]
    if len(tick) < _FEWEST_ENDS or not _are_continued(held, held.ids[tick, lane], held.ids[tick + 1, lane]):
        return None
    has_none = (reward == 0).reshape(*ended.shape, -1).all(axis=2)
    after = np.zeros_like(ended)
    after[tick + 1, lane] = True
    if has_none[after].all() and not ended[after].any():
        share = (np.count_nonzero(has_none[~after]) + 1) / (np.count_nonzero(~after) + 1)
        return "next_step" if share ** len(tick) < _CHANCE else None
    cut = (truncated & ~terminated)[tick, lane]
    return "same_step" if _changes_much(held, held.ids[tick, lane][cut], held.ids[~ended]) else None


def _are_continued(held: Newest, ends: Ids, after: Ids) -> bool:
    """Whether every end's next observation is the one after it, and they differ from end to end."""
    final, first = held.pairs(ends), held.pairs(after)
    if not all(before[1].tobytes() == now[0].tobytes() for before, now in zip(final, first, strict=True)):
        return False
    shown = {b"".join(row.tobytes() for row in rows) for rows in zip(*(now[0] for now in first), strict=True)}
    return len(shown) >= _FEWEST_ENDS


def _changes_much(held: Newest, ends: Ids, others: Ids) -> bool:
    """Whether observations change more at some ends than elsewhere, and too often for that to be chance."""
    if len(ends) < _FEWEST_ENDS or len(others) < _FEWEST_ENDS:
        return False
    ordinary = others[:: max(1, len(others) // 256)]
    if sum(pair[0].nbytes for pair in held.pairs(ends[:1])) > _MOST_BYTES:
        return False
    limit = np.quantile(_changes(held.pairs(ordinary)), _LARGE_CHANGE)
    count, large = len(ends), int(np.count_nonzero(_changes(held.pairs(ends)) > limit))
    share = 1 - _LARGE_CHANGE
    chance = sum(comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(large, count + 1))
    return chance < _CHANCE


def _changes(pairs: Pairs) -> NDArray[np.float64]:
    """Return by how much each observation differs from the next one."""
    total = np.zeros(len(pairs[0][0]))
    with np.errstate(all="ignore"):  # infinite and unknown values compare as they do
        for now, after in pairs:
            change = after.astype(np.float64) - now.astype(np.float64)
            total += (change.reshape(len(total), -1) ** 2).sum(axis=1)
    return total

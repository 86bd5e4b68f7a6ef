"""Checks of the arguments of `add` and `extend`, and their conversion to arrays in leaf order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.schema import Array, Schema, as_array, fit_flags, fit_reward

_TIME_LIMIT_KEY = "TimeLimit.truncated"
"""Key of an info dict that says whether a time limit ended the step."""


class RawStep(NamedTuple):
    """The arguments of `add`, or of `extend` with a leading time axis, as the user passed them."""

    obs: Any
    action: Any
    reward: Any
    next_obs: Any
    terminated: Any
    truncated: Any
    extras: Any = None
    valid: Any = None
    # Info dicts, one per lane, that say which steps a time limit ended. `terminated` is then the `done` of
    # Stable-Baselines3, and `truncated` is ignored. See `Writer.append`.
    infos: Any = None


class Step(NamedTuple):
    """The arguments of `Writer.append` or `Writer.extend`, checked: C order, and tuples in leaf order."""

    obs: tuple[Array, ...]
    action: tuple[Array, ...]
    reward: Array
    next_obs: tuple[Array, ...]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    extras: tuple[Array, ...] | None
    valid: NDArray[np.bool_] | None


def check_step(schema: Schema, leading: tuple[int, ...], reward_dtype: np.dtype[Any] | None, given: RawStep) -> Step:
    """Return the checked arguments of `add`, or of `extend` if `leading` has a time axis. Raise ArgumentError.

    `reward_dtype` is the dtype of the rewards that are held. None: the first rewards set it.
    """
    extras = schema.extras.flatten({} if given.extras is None else given.extras, leading, "extras")
    terminated = given.terminated
    truncated = given.truncated
    if given.infos is not None:
        # As in `Writer.append`, `done` is always `terminated ^ truncated`, even if a step was truncated but not done.
        truncated = fit_flags(_read_time_limits(given.infos), leading, "infos")
        terminated = fit_flags(terminated, leading, "done") ^ truncated
    return Step(
        obs=_in_c_order(schema.observation.flatten(given.obs, leading, "obs")),
        action=_in_c_order(schema.action.flatten(given.action, leading, "action")),
        reward=np.ascontiguousarray(fit_reward(given.reward, leading, reward_dtype, schema.reward_shape)),
        next_obs=_in_c_order(schema.observation.flatten(given.next_obs, leading, "next_obs")),
        terminated=np.ascontiguousarray(fit_flags(terminated, leading, "terminated")),
        truncated=np.ascontiguousarray(fit_flags(truncated, leading, "truncated")),
        extras=_in_c_order(extras) if schema.extras.leaves else None,
        valid=None if given.valid is None else np.ascontiguousarray(fit_flags(given.valid, leading, "valid")),
    )


def _read_time_limits(infos: Any) -> NDArray[np.bool_]:
    """Return which steps a time limit ended, according to the info dicts of all lanes."""
    try:
        flags = [info.get(_TIME_LIMIT_KEY, False) for info in infos]
    except (AttributeError, TypeError) as error:
        raise ArgumentError(f"infos is a {type(infos).__name__} without a dict for each lane ({error}).") from error
    for flag in flags:
        if not isinstance(flag, bool | np.bool_):
            raise ArgumentError(f'infos[...]["{_TIME_LIMIT_KEY}"] is {flag!r}. Pass True or False.')
    return np.array(flags, np.bool_)


def count_steps(reward: Any) -> int:
    """Return the number of steps of trajectories, which is the length of the leading axis of their rewards."""
    shape = reward.shape if hasattr(reward, "shape") else as_array(reward, "reward").shape
    if not shape:
        raise ArgumentError("reward is a scalar. extend takes arrays with a leading time axis.")
    return int(shape[0])


def _in_c_order(arrays: list[Array]) -> tuple[Array, ...]:
    # `ascontiguousarray` gives an array without dimensions one dimension, so contiguous arrays are left as they are.
    return tuple(array if array.flags.c_contiguous else np.ascontiguousarray(array) for array in arrays)

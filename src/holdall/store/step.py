"""Checks of what users add: the arguments of `add` and `extend` become arrays in leaf order, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Schema, fit_flags, fit_reward


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


def check_step(
    schema: Schema,
    leading: tuple[int, ...],
    reward_dtype: np.dtype[Any] | None,
    obs: Any,
    action: Any,
    reward: Any,
    next_obs: Any,
    terminated: Any,
    truncated: Any,
    extras: Mapping[str, Any] | None = None,
    valid: Any = None,
) -> Step:
    """Return the arguments of an `add`, or of an `extend` if `leading` has a time axis. Raise ArgumentError.

    `reward_dtype` is the dtype of the rewards that are held; None before the first one.
    """
    checked_extras = schema.extras.flatten({} if extras is None else extras, leading, "extras")
    return Step(
        obs=_in_c_order(schema.observation.flatten(obs, leading, "obs")),
        action=_in_c_order(schema.action.flatten(action, leading, "action")),
        reward=np.ascontiguousarray(fit_reward(reward, leading, reward_dtype, schema.reward_shape)),
        next_obs=_in_c_order(schema.observation.flatten(next_obs, leading, "next_obs")),
        terminated=np.ascontiguousarray(fit_flags(terminated, leading, "terminated")),
        truncated=np.ascontiguousarray(fit_flags(truncated, leading, "truncated")),
        extras=_in_c_order(checked_extras) if schema.extras.leaves else None,
        valid=None if valid is None else np.ascontiguousarray(fit_flags(valid, leading, "valid")),
    )


def _in_c_order(arrays: list[Array]) -> tuple[Array, ...]:
    # `ascontiguousarray` makes one dimension of none, so arrays without dimensions are left as they are.
    return tuple(array if array.flags.c_contiguous else np.ascontiguousarray(array) for array in arrays)

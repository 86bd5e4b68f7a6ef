"""A tick: what one `add` was given, checked; or several, as one `extend` was.

In:  a user's arguments.  Out: arrays, leaf by leaf, each of the shape and dtype that the schema says.
Invariant: what does not fit is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from holdall.schema import Array, Schema, fit_flags, fit_reward


class Tick(NamedTuple):
    """One vectorised step, leaf by leaf; every array has a leading lane axis. Several have a time axis before it."""

    obs: list[Array]
    action: list[Array]
    reward: Array
    next_obs: list[Array]
    terminated: Array
    truncated: Array
    extras: list[Array]
    valid: Array | None

    @classmethod
    def fitted(
        cls,
        schema: Schema,
        leading: tuple[int, ...],
        reward_dtype: np.dtype[Any] | None,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Mapping[str, Any] | None,
        valid: Any,
    ) -> Tick:
        """Check every argument of an `add`, or of an `extend` with one more leading axis."""
        return cls(
            reward=fit_reward(reward, leading, reward_dtype),
            obs=schema.observation.flatten(obs, leading, "obs"),
            action=schema.action.flatten(action, leading, "action"),
            next_obs=schema.observation.flatten(next_obs, leading, "next_obs"),
            terminated=fit_flags(terminated, leading, "terminated"),
            truncated=fit_flags(truncated, leading, "truncated"),
            extras=schema.extras.flatten({} if extras is None else extras, leading, "extras"),
            valid=None if valid is None else fit_flags(valid, leading, "valid"),
        )

    def cut(self, where: int | slice) -> Tick:
        """Return one tick of several, or some of them; nothing is copied."""
        return Tick(
            obs=[array[where] for array in self.obs],
            action=[array[where] for array in self.action],
            reward=self.reward[where],
            next_obs=[array[where] for array in self.next_obs],
            terminated=self.terminated[where],
            truncated=self.truncated[where],
            extras=[array[where] for array in self.extras],
            valid=None if self.valid is None else self.valid[where],
        )

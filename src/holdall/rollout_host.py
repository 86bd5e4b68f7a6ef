"""HostRollout: the steps of one rollout in the memory of the host.

    add     -> schema (check)  -> RolloutFields (observations), FlatRows (everything else)
    finish  -> estimate_advantages
    gather  -> Minibatches

`RolloutMemory` checks the order of the calls. Every call may be repeated if it was interrupted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall._native import estimate_advantages
from holdall.delivery.host import require_torch_dtype
from holdall.delivery.minibatches import Field, Minibatches
from holdall.errors import ArgumentError
from holdall.report import FieldReport, field_name
from holdall.rollout_fields import FinalObservations, FlatRows, Places, new_rollout_fields
from holdall.rollout_step import ESTIMATES, RolloutStep
from holdall.schema import Array, Leaf, Schema, as_array, fit_flags, fit_reward, move_to_host
from holdall.store.tuning import Tuning

_MASK = Leaf("mask", (), np.dtype(np.bool_))
_FLOAT32 = np.dtype(np.float32)


class HostRollout:
    """The steps of one rollout. The next rollout overwrites them.

    Attributes:
        fields: The observations.
    """

    def __init__(
        self,
        schema: Schema,
        num_steps: int,
        compress: str | None,
        minibatches: Minibatches,
        tuning: Tuning | None = None,
    ) -> None:
        self._schema = schema
        self._num_steps = num_steps
        self._lanes = schema.num_envs
        self._minibatches = minibatches
        observation_leaves = schema.observation.leaves
        self.fields = new_rollout_fields(observation_leaves, num_steps, self._lanes, compress, tuning)
        self._final = FinalObservations(observation_leaves)
        self._actions = [self._new_rows(leaf) for leaf in schema.action.leaves]
        self._extras = [self._new_rows(leaf) for leaf in schema.extras.leaves]
        self._estimates = {name: self._new_rows(Leaf(name, (), _FLOAT32)) for name in ESTIMATES}
        self._ends = self._new_rows(Leaf("ends", (), _FLOAT32))  # 1 where an episode ended with the step.
        self._rewards: FlatRows | None = None  # Made at the first step, which sets the dtype.
        self._valid: NDArray[np.bool_] | None = None  # False where a lane made no step. None: all lanes made all steps.

    def _new_rows(self, leaf: Leaf) -> FlatRows:
        return FlatRows(leaf, self._num_steps, self._lanes)

    def observe(self, step: int, obs: Any) -> None:
        """Write the observations of a step."""
        self.fields.write(step, self._schema.observation.flatten(obs, (self._lanes,), "obs"))

    def add(self, step: int, given: RolloutStep) -> None:
        """Write step number `step`. If a part of `given` does not fit, raise ArgumentError and write nothing."""
        lanes = (self._lanes,)
        schema = self._schema
        observations = None if given.obs is None else schema.observation.flatten(given.obs, lanes, "obs")
        actions = schema.action.flatten(given.action, lanes, "action")
        extras = schema.extras.flatten({} if given.extras is None else given.extras, lanes, "extras")
        rewards = fit_reward(given.reward, lanes, None if self._rewards is None else self._rewards.array.dtype)
        values = fit_floats(given.value, lanes, "value")
        log_probs = fit_floats(given.log_prob, lanes, "log_prob")
        is_terminated = fit_flags(given.terminated, lanes, "terminated")
        is_truncated = fit_flags(given.truncated, lanes, "truncated")
        is_valid = None if given.valid is None else fit_flags(given.valid, lanes, "valid")
        cut_lanes = (is_truncated & ~is_terminated).nonzero()[0]
        final = self._fit_final(given.final_obs, cut_lanes)
        if self._rewards is None:
            self._rewards = self._new_rewards(rewards.dtype)
        if observations is not None:
            self.fields.write(step, observations)
        for rows, new in zip(self._actions, actions, strict=True):
            rows.array[step] = new
        for rows, new in zip(self._extras, extras, strict=True):
            rows.array[step] = new
        self._rewards.array[step] = rewards
        self._estimates["value"].array[step] = values
        self._estimates["log_prob"].array[step] = log_probs
        np.logical_or(is_terminated, is_truncated, out=self._ends.array[step])
        # An interrupted call, or the rollout before, may have left final observations of later steps.
        self._final.drop_from(step * self._lanes)
        if final is not None:
            self._final.append(step * self._lanes + cut_lanes, final)
        if is_valid is not None and self._valid is None:
            self._valid = np.ones((self._num_steps, self._lanes), np.bool_)
        if self._valid is not None:
            self._valid[step] = True if is_valid is None else is_valid

    def _new_rewards(self, dtype: np.dtype[Any]) -> FlatRows:
        leaf = Leaf("reward", (), dtype)
        if self._minibatches.gives_tensors:
            require_torch_dtype(leaf)
        return self._new_rows(leaf)

    def _fit_final(self, final_obs: Any, lanes: NDArray[np.intp]) -> list[Array] | None:
        """Return the final observations of `lanes`, checked. None if `lanes` is empty."""
        if len(lanes) == 0:
            return None
        if final_obs is None:
            raise ArgumentError(
                f"truncated is set in lane {int(lanes[0])}, but final_obs is None; pass the true final observations, "
                "which are next_obs in next-step autoreset and info['final_obs'] in same-step autoreset"
            )
        return [rows[lanes] for rows in self._schema.observation.flatten(final_obs, (self._lanes,), "final_obs")]

    def final_obs(self, steps: int) -> Any:
        """Return the final observations of all truncated episodes of the first `steps` steps."""
        self._final.drop_from(steps * self._lanes)
        leaves = self._schema.observation.leaves
        fields = [Field(leaf, partial(self._final.gather, i)) for i, leaf in enumerate(leaves)]
        return self._schema.observation.build(self._minibatches.deliver(np.arange(len(self._final)), fields))

    def finish(self, steps: int, last_values: Any, gamma: float, gae_lambda: float, final_values: Any) -> None:
        """Estimate advantages and returns of the first `steps` steps."""
        self._final.drop_from(steps * self._lanes)
        count = len(self._final)
        last = np.ascontiguousarray(fit_floats(last_values, (self._lanes,), "last_values"))
        if final_values is None and count:
            raise ArgumentError(
                f"final_values is None, but {count} episodes were truncated; an advantage there needs the value of the "
                "true final observation, so pass final_values=value_of(memory.final_obs())"
            )
        final = fit_floats([] if final_values is None else final_values, (count,), "final_values")
        advantages = self._estimates["advantage"].array[:steps]
        returns = self._estimates["returns"].array[:steps]
        values = self._estimates["value"].array[:steps]
        ends = self._ends.array[:steps]
        with np.errstate(all="ignore"):  # Infinite rewards give infinite advantages.
            if self._rewards is not None:
                advantages[:] = self._rewards.array[:steps]
            advantages.reshape(-1)[self._final.places] += np.float32(gamma) * final
            estimate_advantages(advantages, values, ends, last, gamma, gae_lambda, advantages, returns)
        self.fields.finish()

    def find_ends(self, steps: int) -> NDArray[np.bool_]:
        """Return which steps ended an episode: (steps, lanes)."""
        return np.asarray(self._ends.array[:steps] != 0)

    def find_valid(self, steps: int) -> NDArray[np.bool_]:
        """Return which lanes made a step: (steps, lanes)."""
        if self._valid is None:
            return np.ones((steps, self._lanes), np.bool_)
        return self._valid[:steps]

    def gather(self, places: Places, *, padded: bool) -> list[Any]:
        """Return rows of all fields: observations, actions, extras, the reward, `ESTIMATES`, and a mask if `padded`.

        A negative place gives zeros.
        """
        leaves = self._schema.observation.leaves
        fields = [Field(leaf, partial(self.fields.gather, i)) for i, leaf in enumerate(leaves)]
        rewards = [] if self._rewards is None else [self._rewards]
        plain = (*self._actions, *self._extras, *rewards, *self._estimates.values())
        fields += [Field(Leaf("", rows.array.shape[2:], rows.array.dtype), rows.gather) for rows in plain]
        if padded:
            fields.append(Field(_MASK, _fill_mask))
        return self._minibatches.deliver(places, fields)

    def reset(self) -> None:
        """Remove all steps. The next rollout uses the same memory."""
        self.fields.reset()
        self._minibatches.release()

    def report(self, steps: int) -> list[FieldReport]:
        """Return the bytes of every field."""
        rows: dict[str, FlatRows] = {} if self._rewards is None else {"reward": self._rewards}
        rows |= {"ends": self._ends, **self._estimates}
        for leaf, actions in zip(self._schema.action.leaves, self._actions, strict=True):
            rows[field_name("action", leaf.name)] = actions
        for leaf, extras in zip(self._schema.extras.leaves, self._extras, strict=True):
            rows[field_name("extras", leaf.name)] = extras
        sizes = {name: flat_rows.array[:steps].nbytes for name, flat_rows in rows.items()}
        plain = [FieldReport(name, 0, 0, nbytes, nbytes, "flat rows") for name, nbytes in sizes.items()]
        final_bytes = self._final.nbytes
        final = FieldReport("final_obs", 0, 0, final_bytes, final_bytes, "whole observations")
        return [*self.fields.report(steps), *plain, final]


def fit_floats(value: Any, shape: tuple[int, ...], argument: str) -> NDArray[np.float32]:
    """Return the float32 output of a network, an array or a tensor of shape (n,) or (n, 1), as an array of `shape`."""
    host = as_array(move_to_host(value), argument)
    if host.size == 0 and shape == (0,):
        return np.empty(0, np.float32)
    if host.dtype != np.float32:
        raise ArgumentError(
            f"{argument} has dtype {host.dtype}, estimates are float32; pass them as the network gave them"
        )
    if host.shape not in {shape, (*shape, 1)}:
        raise ArgumentError(f"{argument} has shape {host.shape}, expected {shape}; pass one number each")
    return np.asarray(host.reshape(shape))


def _fill_mask(places: Places, out: Array) -> None:
    np.greater_equal(places, 0, out=out)

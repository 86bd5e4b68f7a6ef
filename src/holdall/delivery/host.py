"""Batches of NumPy arrays, or of torch tensors on the CPU that share the memory of such arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdall.batch import Batch, Draw, Goals, import_torch
from holdall.delivery.delivery import Delivery, Nesting, Rows, compute_rewards, find_goal_leaves
from holdall.errors import ArgumentError
from holdall.schema import Array, Leaf, Schema
from holdall.store.columns import Columns


@dataclass(slots=True)
class DrawnRows:
    """The rows of a draw, leaf by leaf: NumPy arrays, or other objects after `convert`."""

    obs: list[Any]
    next_obs: list[Any]  # Of the last step of each row.
    action: list[Any]
    extras: list[Any]
    reward: Any  # Rewards of the draw if it has some, or else the stored rewards.
    terminated: Any  # Of the last step of each row.
    truncated: Any  # Of the last step of each row.

    @classmethod
    def read(cls, columns: Columns, draw: Draw, rows: Rows) -> DrawnRows:
        """Read the rows of a draw. Goals are not relabelled."""
        if draw.last_ids is None:
            arrays = rows.read(draw.ids.reshape(-1), columns.batch_outputs)
        else:
            first = rows.read(draw.ids.reshape(-1), columns.first_step_outputs)
            arrays = first + rows.read(draw.last_ids.reshape(-1), columns.last_step_outputs)
        drawn = cls.split(columns, arrays)
        if draw.reward is not None:
            drawn.reward = draw.reward
        return drawn

    @classmethod
    def split(cls, columns: Columns, arrays: Sequence[Any]) -> DrawnRows:
        """Return the arrays of `columns.batch_outputs` as rows."""
        leaf_count = len(columns.obs_outputs)
        action_end = leaf_count + len(columns.action_outputs)
        extras_end = action_end + len(columns.extra_outputs)
        return cls(
            obs=list(arrays[:leaf_count]),
            next_obs=list(arrays[extras_end + 1 : -2]),
            action=list(arrays[leaf_count:action_end]),
            extras=list(arrays[action_end:extras_end]),
            reward=arrays[extras_end],
            terminated=arrays[-2],
            truncated=arrays[-1],
        )

    def relabel(self, schema: Schema, goals: Goals, goal: Array) -> None:
        """Replace the goals of `goals.rows` by `goal`, and compute their rewards."""
        achieved, desired = find_goal_leaves(schema, goals)
        self.obs[desired][goals.rows] = goal
        self.next_obs[desired][goals.rows] = goal
        extras = [array[goals.rows] for array in self.extras]
        self.reward[goals.rows] = compute_rewards(schema, goals, self.next_obs[achieved][goals.rows], goal, extras)

    def reshape(self, leading: tuple[int, ...]) -> None:
        """Replace the leading axis of all arrays by the axes `leading`, for a draw of sequences."""
        self.convert(lambda array: array.reshape(*leading, *array.shape[1:]))

    def convert(self, function: Callable[[Any], Any]) -> None:
        """Replace every array by `function(array)`."""
        self.obs = [function(array) for array in self.obs]
        self.next_obs = [function(array) for array in self.next_obs]
        self.action = [function(array) for array in self.action]
        self.extras = [function(array) for array in self.extras]
        self.reward = function(self.reward)
        self.terminated = function(self.terminated)
        self.truncated = function(self.truncated)


def read_goal(schema: Schema, columns: Columns, goals: Goals, rows: Rows) -> Array:
    """Return the goals that the transitions `goals.ids` achieved."""
    achieved, _ = find_goal_leaves(schema, goals)
    (goal,) = rows.read(goals.ids, (columns.next_obs_outputs[achieved],))
    return goal


def require_torch_dtype(leaf: Leaf) -> None:
    """Raise ArgumentError if torch has no dtype for a leaf."""
    try:
        import_torch().from_numpy(np.empty(0, leaf.dtype))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"device: torch has no dtype for {leaf.name or 'the space'} ({leaf.dtype}). Use device=None for NumPy "
            "arrays."
        ) from error


class HostDelivery(Delivery):
    """Delivery to the host.

    Args:
        device: None for NumPy arrays, "cpu" for torch tensors, "jax" for arrays of JAX.
    """

    def __init__(self, schema: Schema, device: str | None = None) -> None:
        self._schema = schema
        self._columns = Columns(schema)
        self._observation = Nesting(schema.observation)
        self._action = Nesting(schema.action)
        self._extras = Nesting(schema.extras)
        self._is_jax = device == "jax"
        self._as_tensor: Any = None
        if device is not None and not self._is_jax:
            self._as_tensor = import_torch().from_numpy
            for leaf in schema.leaves:
                require_torch_dtype(leaf)

    def prepare(self, draw: Draw, rows: Rows) -> Batch:
        """Read the rows, and return their batch."""
        drawn = DrawnRows.read(self._columns, draw, rows)
        if draw.goals is not None and draw.goals.rows.size:
            drawn.relabel(self._schema, draw.goals, read_goal(self._schema, self._columns, draw.goals, rows))
        return self.prepare_drawn(draw, drawn)

    def prepare_drawn(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """Return a batch that shares the memory of the rows."""
        if draw.ids.ndim > 1:
            drawn.reshape(draw.ids.shape)
        if self._as_tensor is not None:
            drawn.convert(self._as_tensor)
        batch = Batch(
            self._observation.build(drawn.obs),
            self._action.build(drawn.action),
            drawn.reward,
            self._observation.build(drawn.next_obs),
            drawn.terminated,
            drawn.truncated,
            self._extras.build(drawn.extras),
            draw.ids,
            self._convert(draw.weights),
            self._convert(draw.discount),
            self._convert(draw.mask),
        )
        return batch.jax() if self._is_jax else batch

    def receive(self, prepared: Batch) -> Batch:
        """Return the batch, which needs no further work."""
        return prepared

    def _convert(self, array: Array | None) -> Any:
        if array is None or self._as_tensor is None:
            return array
        return self._as_tensor(array)

"""DrawnRows: the rows of a draw, leaf by leaf, between the store and the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from holdall.batch import Draw, Goals
from holdall.delivery.delivery import Rows, compute_rewards, find_goal_leaves
from holdall.schema import Array, Schema
from holdall.store.columns import Columns

_Record = TypeVar("_Record", bound=tuple[Any, ...])


class DrawnRows(NamedTuple):
    """The rows of a draw, leaf by leaf: NumPy arrays or torch tensors."""

    obs: Sequence[Any]
    next_obs: Sequence[Any]  # Of the last step of each row.
    action: Sequence[Any]
    extras: Sequence[Any]
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
        return drawn if draw.reward is None else drawn._replace(reward=draw.reward)

    @classmethod
    def split(cls, columns: Columns, arrays: Sequence[Any]) -> DrawnRows:
        """Return the arrays of `columns.batch_outputs` as rows."""
        leaf_count = len(columns.obs_outputs)
        action_end = leaf_count + len(columns.action_outputs)
        extras_end = action_end + len(columns.extra_outputs)
        return cls(
            obs=tuple(arrays[:leaf_count]),
            next_obs=tuple(arrays[extras_end + 1 : -2]),
            action=tuple(arrays[leaf_count:action_end]),
            extras=tuple(arrays[action_end:extras_end]),
            reward=arrays[extras_end],
            terminated=arrays[-2],
            truncated=arrays[-1],
        )

    def join(self) -> list[Any]:
        """Return all arrays in the order of `columns.batch_outputs`. The inverse of `split`."""
        first = [*self.obs, *self.action, *self.extras, self.reward]
        return [*first, *self.next_obs, self.terminated, self.truncated]

    def relabel(self, schema: Schema, goals: Goals, goal: Array) -> None:
        """Replace the goals of `goals.rows` by `goal`, and compute their rewards. The rows must be NumPy arrays."""
        achieved, desired = find_goal_leaves(schema, goals)
        self.obs[desired][goals.rows] = goal
        self.next_obs[desired][goals.rows] = goal
        extras = [array[goals.rows] for array in self.extras]
        self.reward[goals.rows] = compute_rewards(schema, goals, self.next_obs[achieved][goals.rows], goal, extras)

    def reshape(self, leading: tuple[int, ...]) -> DrawnRows:
        """Return the rows with the axes `leading` in place of the first axis, for a draw of sequences."""
        return map_arrays(self, lambda array: array.reshape(*leading, *array.shape[1:]))


def read_goal(schema: Schema, columns: Columns, goals: Goals, rows: Rows) -> Array:
    """Return the goals that the transitions `goals.ids` achieved."""
    achieved, _ = find_goal_leaves(schema, goals)
    (goal,) = rows.read(goals.ids, (columns.next_obs_outputs[achieved],))
    return goal


def map_arrays(record: _Record, function: Callable[[Any], Any]) -> _Record:
    """Return a named tuple with `function(array)` in place of each array.

    Every field is an array, a list or a tuple of arrays, or None. The order is that of `list_arrays`.
    """
    kind: Any = type(record)
    mapped: _Record = kind._make([_map_field(field, function) for field in record])
    return mapped


def _map_field(field: Any, function: Callable[[Any], Any]) -> Any:
    if field is None:
        return None
    if isinstance(field, list | tuple):
        return type(field)([function(array) for array in field])
    return function(field)


def list_arrays(record: tuple[Any, ...]) -> list[Any]:
    """Return all arrays of a named tuple whose fields are arrays, lists or tuples of arrays, or None."""
    arrays: list[Any] = []
    for field in record:
        if isinstance(field, list | tuple):
            arrays += field
        elif field is not None:
            arrays.append(field)
    return arrays

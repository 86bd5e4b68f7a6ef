"""Columns: the arrays of a transition, in the order in which the native writer stores them.

Observation leaves come first, then action leaves, the reward, extras, and one byte of flags. Every column has two
outputs of `Reader.gather`. Output `2 * column` is the row, the observation or `terminated`. Output `2 * column + 1` is
the next observation or `truncated`. Two more outputs follow, see `flags_output` and `ended_output`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from holdall._native import MAX_COLUMNS, MAX_NDIM, ROLE_FLAGS, ROLE_OBSERVATION, ROLE_ROW
from holdall.errors import SpaceError
from holdall.schema import MAX_LEAF_BYTES, Leaf, Schema, Tree
from holdall.units import format_bytes

NativeColumn = tuple[int, int, tuple[int, ...]]
NativeGroup = tuple[int, tuple[str, ...] | None]

_UNKNOWN_TYPE = -1
"""The type number of rewards before the first reward, which sets their dtype."""
_ASSUMED_REWARD_ITEM_BYTES = 8
"""Bytes of one number of a reward before the first reward."""
_ASSUMED_LOG_BYTES = 4
"""Bytes of log that one observation takes if it is stored as slices."""


class Columns:
    """The columns of a schema, and the numbers of their outputs.

    Attributes:
        observations: Number of observation leaves, which have the first columns.
        reward: Number of the reward's column.
        first_extra: Number of the first extra's column.
        flags: Number of the column of flags.
        obs_outputs: Outputs of the observation, leaf by leaf.
        next_obs_outputs: Outputs of the next observation, leaf by leaf.
        action_outputs: Outputs of the action, leaf by leaf.
        reward_output: Output of the reward.
        extra_outputs: Outputs of the extras, leaf by leaf.
        terminated_output: Output of `terminated`.
        truncated_output: Output of `truncated`.
        flags_output: Output of the flags as they are stored, one byte per transition: see `FLAG_TERMINATED`.
        first_step_outputs: Outputs that a batch takes from the first step of each row: all except `last_step_outputs`.
        last_step_outputs: Outputs that a batch takes from the last step: next observation, terminated, truncated.
        batch_outputs: `first_step_outputs`, then `last_step_outputs`.
        ended_output: Output of `terminated and not truncated` as float32, of shape (rows, 1).
    """

    def __init__(self, schema: Schema) -> None:
        _require_storable(schema)
        self._schema = schema
        obs_count = len(schema.observation.leaves)
        action_count = len(schema.action.leaves)
        extra_count = len(schema.extras.leaves)
        self.observations = obs_count
        self.reward = obs_count + action_count
        self.first_extra = self.reward + 1
        self.flags = self.first_extra + extra_count
        self.obs_outputs = tuple(2 * i for i in range(obs_count))
        self.next_obs_outputs = tuple(2 * i + 1 for i in range(obs_count))
        self.action_outputs = tuple(2 * i for i in range(obs_count, self.reward))
        self.reward_output = 2 * self.reward
        self.extra_outputs = tuple(2 * i for i in range(self.first_extra, self.flags))
        self.terminated_output = 2 * self.flags
        self.truncated_output = 2 * self.flags + 1
        self.flags_output = 2 * self.flags + 2
        self.ended_output = 2 * self.flags + 3
        self.first_step_outputs = (
            *self.obs_outputs,
            *self.action_outputs,
            *self.extra_outputs,
            self.reward_output,
        )
        self.last_step_outputs = (*self.next_obs_outputs, self.terminated_output, self.truncated_output)
        self.batch_outputs = self.first_step_outputs + self.last_step_outputs

    def list_columns(self) -> tuple[NativeColumn, ...]:
        """Return role, type number and shape of every column. The type of the reward is `_UNKNOWN_TYPE`."""
        schema = self._schema
        return (
            *[_native_column(ROLE_OBSERVATION, leaf) for leaf in schema.observation.leaves],
            *[_native_column(ROLE_ROW, leaf) for leaf in schema.action.leaves],
            (ROLE_ROW, _UNKNOWN_TYPE, tuple(schema.reward_shape)),
            *[_native_column(ROLE_ROW, leaf) for leaf in schema.extras.leaves],
            (ROLE_FLAGS, int(np.dtype(np.uint8).num), ()),
        )

    def list_groups(self) -> tuple[NativeGroup, NativeGroup, NativeGroup]:
        """Return the number and the keys of the leaves, for observations, actions and extras."""
        return (
            _native_group(self._schema.observation),
            _native_group(self._schema.action),
            _native_group(self._schema.extras),
        )

    def count_row_bytes(self, column: int, reward_dtype: np.dtype[Any] | None) -> int | None:
        """Return the bytes of one lane's row of a column. None for rewards if `reward_dtype` is None."""
        schema = self._schema
        if column == self.flags:
            return 1
        if column == self.reward:
            return None if reward_dtype is None else prod(schema.reward_shape) * reward_dtype.itemsize
        if column > self.reward:
            return schema.extras.leaves[column - self.first_extra].nbytes
        return (*schema.observation.leaves, *schema.action.leaves)[column].nbytes

    def estimate_row_bytes(self, sliced: set[int]) -> int:
        """Return about how many bytes of rows and logs one transition takes.

        Observation leaves in `sliced` are stored as slices, and take only bytes of their log.
        """
        leaves = enumerate(self._schema.observation.leaves)
        obs_bytes = sum(_ASSUMED_LOG_BYTES if i in sliced else leaf.nbytes for i, leaf in leaves)
        others = (*self._schema.action.leaves, *self._schema.extras.leaves)
        return obs_bytes + sum(leaf.nbytes for leaf in others) + estimate_reward_bytes(self._schema) + 1


def estimate_reward_bytes(schema: Schema) -> int:
    """Return the assumed bytes of one lane's reward. Its dtype is not known before the first step."""
    return _ASSUMED_REWARD_ITEM_BYTES * prod(schema.reward_shape)


def _require_storable(schema: Schema) -> None:
    """Raise SpaceError if the native writer has no room for the leaves of a schema."""
    leaves = [("observation_space", leaf) for leaf in schema.observation.leaves]
    leaves += [("action_space", leaf) for leaf in schema.action.leaves]
    leaves += [("extras", leaf) for leaf in schema.extras.leaves]
    max_leaves = MAX_COLUMNS - 2  # The reward and the flags are columns, too.
    if len(leaves) > max_leaves:
        raise SpaceError(
            f"observation_space, action_space and extras have {len(leaves)} arrays together, but a memory stores at "
            f"most {max_leaves}. Stack arrays of the same shape and dtype along a further axis."
        )
    leaves.append(("reward_shape", schema.reward_leaf(np.dtype(np.float64))))
    for argument, leaf in leaves:
        if len(leaf.shape) > MAX_NDIM:
            raise SpaceError(
                f"{leaf.describe(argument)} has {len(leaf.shape)} axes, but a memory stores arrays of at most "
                f"{MAX_NDIM}. Join some of the axes."
            )
        if leaf.nbytes > MAX_LEAF_BYTES:
            raise SpaceError(
                f"{leaf.describe(argument)} has {format_bytes(leaf.nbytes)} per step, but a memory stores arrays of at "
                f"most {format_bytes(MAX_LEAF_BYTES)}. Split it into several keys."
            )


def _native_column(role: int, leaf: Leaf) -> NativeColumn:
    return role, int(leaf.dtype.num), tuple(leaf.shape)


def _native_group(tree: Tree) -> NativeGroup:
    keys: Any = tree.keys
    return len(tree.leaves), keys

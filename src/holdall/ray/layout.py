"""Layouts: which arrays a transition consists of on its way between processes.

In:  a schema.  Out: the columns that travel and lie as rows, and the leaves that are cut into slices.
Invariant: writers, shards and learners of one memory derive the same layout from the same schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from holdall.schema import Leaf, Schema

ROW_BYTES = 256
"""Observation leaves up to this size travel as rows, obs and next_obs: cutting them into slices spares nothing."""

Column = tuple[tuple[int, ...], np.dtype[Any]]
_FLAG: Column = ((), np.dtype(np.bool_))


@dataclass(frozen=True, slots=True)
class Layout:
    """The fields of a transition, by how they travel."""

    schema: Schema
    sliced: tuple[int, ...]  # observation leaves that are cut into slices, in the order of their fields
    columns: dict[str, Column]  # all else but the reward, whose dtype the first add says

    @classmethod
    def of(cls, schema: Schema) -> Layout:
        """Lay out the transitions of a schema."""
        leaves = schema.observation.leaves
        sliced = tuple(i for i, leaf in enumerate(leaves) if leaf.nbytes > ROW_BYTES)
        columns: dict[str, Column] = {}
        for i, leaf in enumerate(leaves):
            if i not in sliced:
                columns[f"obs.{i}"] = columns[f"next.{i}"] = (leaf.shape, leaf.dtype)
        columns |= {f"action.{i}": (leaf.shape, leaf.dtype) for i, leaf in enumerate(schema.action.leaves)}
        columns |= {f"extras.{i}": (leaf.shape, leaf.dtype) for i, leaf in enumerate(schema.extras.leaves)}
        columns |= dict.fromkeys(("terminated", "truncated", "valid"), _FLAG)
        return cls(schema, sliced, columns)

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves that are cut into slices."""
        return [self.schema.observation.leaves[i] for i in self.sliced]

    def with_reward(self, dtype: np.dtype[Any]) -> dict[str, Column]:
        """Return all columns, the reward's among them."""
        return self.columns | {"reward": ((), dtype)}

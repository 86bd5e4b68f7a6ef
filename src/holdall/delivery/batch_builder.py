"""BatchBuilder: makes the batch of rows, which all deliveries have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdall.batch import Batch
from holdall.delivery.drawn_rows import DrawnRows
from holdall.schema import Schema, Tree


class BatchBuilder:
    """Makes batches whose fields are nested like the spaces of a schema."""

    def __init__(self, schema: Schema) -> None:
        self._observation = _Nesting(schema.observation)
        self._action = _Nesting(schema.action)
        self._extras = _Nesting(schema.extras)

    def build(self, rows: DrawnRows, ids: Any, weights: Any, discount: Any, mask: Any) -> Batch:
        """Return a batch that shares the memory of the rows. The other arguments are fields of the batch."""
        return Batch(
            self._observation.build(rows.obs),
            self._action.build(rows.action),
            rows.reward,
            self._observation.build(rows.next_obs),
            rows.terminated,
            rows.truncated,
            self._extras.build(rows.extras),
            ids,
            weights,
            discount,
            mask,
        )


class _Nesting:
    """The nesting of a space, in which arrays or tensors of its leaves are returned."""

    def __init__(self, tree: Tree) -> None:
        self._build = tree.build
        self._position = tree.structure if isinstance(tree.structure, int) else None
        self._keys = tree.keys

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the leaves as an array, a dict or a nested structure."""
        if self._position is not None:
            return leaves[self._position]
        if self._keys is not None:
            return dict(zip(self._keys, leaves, strict=True))
        return self._build(leaves)

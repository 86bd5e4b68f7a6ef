"""Batches of NumPy arrays, or of torch tensors on the CPU that share the memory of such arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdall.batch import Batch, Draw, import_torch
from holdall.delivery.batch_builder import BatchBuilder
from holdall.delivery.delivery import Delivery, Rows
from holdall.delivery.drawn_rows import DrawnRows, map_arrays, read_goal
from holdall.errors import ArgumentError
from holdall.schema import Array, Leaf, Schema
from holdall.store.columns import Columns


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
        self._builder = BatchBuilder(schema)
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
            drawn = drawn.reshape(draw.ids.shape)
        if self._as_tensor is not None:
            drawn = map_arrays(drawn, self._as_tensor)
        others = [self._convert(array) for array in (draw.weights, draw.discount, draw.mask)]
        batch = self._builder.build(drawn, draw.ids, *others)
        return batch.jax() if self._is_jax else batch

    def receive(self, prepared: Batch) -> Batch:
        """Return the batch, which needs no further work."""
        return prepared

    def _convert(self, array: Array | None) -> Any:
        if array is None or self._as_tensor is None:
            return array
        return self._as_tensor(array)

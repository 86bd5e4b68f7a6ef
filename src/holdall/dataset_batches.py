"""Batches of indices of a dataset, in random order or by weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.checks import require_count
from holdall.errors import ArgumentError
from holdall.sampling import new_generator
from holdall.schema import as_array

Indices = NDArray[np.int64]


class Batches:
    """Batches of indices. Every `for` loop over it is one pass.

    Attributes:
        epoch: Number of the next pass. Set it to continue an earlier training with the same order.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        weights: Any = None,
        seed: int | None = None,
        num_batches: int | None = None,
    ) -> None:
        self._count = count
        self._batch_size = require_count("batch_size", batch_size, 1)
        self._weight_sums = None if weights is None else _sum_weights(weights, count)
        self._num_batches = count // self._batch_size
        if num_batches is not None:
            self._num_batches = require_count("num_batches", num_batches, 1)
        new_generator(seed)  # Raises an error for an invalid seed.
        self._seed = np.random.SeedSequence(seed).entropy
        self.epoch = 0
        if self._num_batches == 0:
            raise ArgumentError(
                f"batch_size ({batch_size}) is more than the {count} transitions of the dataset. Pass a smaller one, "
                "or num_batches to repeat transitions."
            )

    def __len__(self) -> int:
        """Return the number of batches in one pass."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        # `epoch` is increased when the first batch is requested, because torch makes iterators that it does not use.
        generator = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(self.epoch,)))
        self.epoch += 1
        size = self._batch_size
        if self._weight_sums is not None:
            total = self._weight_sums[-1]
            for _ in range(self._num_batches):
                points = generator.random(size) * total
                points = np.minimum(points, np.nextafter(total, 0.0))  # A product may be rounded up to `total`.
                yield np.searchsorted(self._weight_sums, points, side="right").tolist()
            return
        order: Indices = np.empty(0, np.int64)
        for _ in range(self._num_batches):
            while len(order) < size:
                order = np.concatenate([order, generator.permutation(self._count)])
            yield order[:size].tolist()
            order = order[size:]


def _sum_weights(weights: Any, count: int) -> NDArray[np.float64]:
    """Return the cumulative sums of the weights."""
    array = as_array(weights, "weights")
    if array.shape != (count,) or array.dtype.kind not in "biuf":
        raise ArgumentError(
            f"weights has shape {array.shape} and dtype {array.dtype}. Pass one number per transition, {count} in all."
        )
    values = array.astype(np.float64)
    if not np.isfinite(values).all() or values.min(initial=0.0) < 0 or not values.any():
        raise ArgumentError("weights must be finite numbers of at least 0, and one of them above 0. Pass such weights.")
    return np.cumsum(values)

"""Samples: the slices of a block by which a codec is chosen.

Slices are sampled in runs of neighbours, because codecs compress neighbours together. The measured slices and the
slices on which dictionaries are trained are different ones, because a dictionary compresses the slices that it was
trained on better than all others. The same block always gives the same sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdall._native import Block

Bytes = NDArray[np.uint8]

TRAINED_RUN = 8
"""Slices of a run for training. The runs are short, so that they come from many places of the block."""

_MAX_MEASURED_RUN = 64
"""Slices of a measured run, unless they take more than `_MAX_RUN_BYTES` or more than half of the block."""
_MIN_MEASURED_RUN = 16
_MAX_RUN_BYTES = 6 * 2**20
_MAX_MEASURED_SLICES = 512
_MAX_MEASURED_BYTES = 4 * 2**20
_MAX_TRAINED_SLICES = 512
_MAX_TRAINED_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """Copies of some slices of a block. Each array is (slices, bytes), and neighbours are next to each other."""

    measured: Bytes  # Runs of `run` neighbours.
    trained: Bytes  # Runs of TRAINED_RUN neighbours, or no slices.
    run: int  # Slices of a measured run.

    @classmethod
    def from_block(cls, block: Block) -> Sample:
        """Copy slices of a raw block in the order in which the block will be compressed."""
        count = block.slice_count
        slice_bytes = block.slice_bytes
        run = _choose_measured_run(count, slice_bytes)
        measured = _spread_runs(count, run, min(_MAX_MEASURED_SLICES, _MAX_MEASURED_BYTES // slice_bytes))
        # Runs for training must not overlap measured runs, so twice as many candidates are made as are needed.
        max_trained = min(_MAX_TRAINED_SLICES, _MAX_TRAINED_BYTES // slice_bytes)
        max_candidates = min(2 * _MAX_TRAINED_SLICES, 2 * _MAX_TRAINED_BYTES // slice_bytes)
        candidates = _spread_runs(count, TRAINED_RUN, max_candidates)
        is_after = candidates[:, None] >= measured + run
        is_before = candidates[:, None] + TRAINED_RUN <= measured
        trained = candidates[(is_after | is_before).all(axis=1)]
        max_runs = max(max_trained // TRAINED_RUN, 1)
        if len(trained) > max_runs:
            trained = trained[np.linspace(0, len(trained) - 1, max_runs).astype(np.int64)]
        order = block.lane_order()
        return cls(_copy_runs(block, order, measured, run), _copy_runs(block, order, trained, TRAINED_RUN), run)


def _choose_measured_run(count: int, slice_bytes: int) -> int:
    """Return the slices of a measured run: at most half of a small block, so that the rest can be trained on."""
    run = _MAX_MEASURED_RUN
    while run > _MIN_MEASURED_RUN and (run * slice_bytes > _MAX_RUN_BYTES or 2 * run > count):
        run //= 2
    return min(run, count)


def _spread_runs(count: int, run: int, max_slices: int) -> NDArray[np.int64]:
    """Return the starts of runs that are spread evenly over `count` slices.

    The runs have about `max_slices` slices together. There is at least one run, unless `count` is less than `run`.
    """
    if count < run or run == 0:
        return np.zeros(0, np.int64)
    runs = max(1, min(max_slices, count // 2) // run)
    return np.unique(np.linspace(0, count - run, runs).astype(np.int64))


def _copy_runs(block: Block, order: NDArray[np.uint32] | None, starts: NDArray[np.int64], run: int) -> Bytes:
    """Copy runs of slices, one run after another."""
    places = (starts[:, None] + np.arange(run)).reshape(-1)
    if order is None:
        runs = [block.read(start, run) for start in starts.tolist()]
    else:
        runs = [block.read(number, 1) for number in order[places].tolist()]
    if not runs:
        return np.zeros((0, block.slice_bytes), np.uint8)
    return np.concatenate(runs)

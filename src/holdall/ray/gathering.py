"""Transitions by their ids, from the shards that hold them.

In:  ids.  Out: a batch, in their order; ShardError if one of these shards does not answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.errors import ShardError, TransitionIdError
from holdall.ray.cluster import LOSSES, Cluster
from holdall.ray.deliver import Deliverer
from holdall.ray.drawing import Drawing, received
from holdall.ray.ids import rows_of, shards_of


def gathered(
    wanted: NDArray[np.int64], cluster: Cluster, drawing: Drawing, deliverer: Deliverer, patience_s: float
) -> Batch:
    """Return the transitions `wanted`, in that order."""
    numbers = set(cluster.numbers)
    shards = shards_of(wanted)
    unknown = np.flatnonzero(~np.isin(shards, list(numbers)))
    if unknown.size:
        raise TransitionIdError(f"ids holds {int(wanted[unknown[0]])}, which is of no shard of this memory")
    calls = []
    for shard in np.unique(shards).tolist() or [min(numbers)]:
        rows = np.flatnonzero(shards == shard)
        calls.append((shard, rows, cluster.handle(shard).gather.remote(rows_of(wanted[rows]).tobytes())))
    answers, where = [], []
    for shard, rows, call in calls:
        try:
            answers.append(drawing.answer(shard, received(call, patience_s)))
        except LOSSES as error:
            raise ShardError(f"shard {shard} does not answer, and ids are wanted that it holds") from error
        where.append(rows)
    return deliverer.batch(answers, where, wanted, np.ones(len(wanted), np.float32))

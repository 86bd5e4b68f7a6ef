"""Priorities on their way to the shards, without waiting for them.

In:  ids of a batch and numbers.  Out: the same at the shards, before they draw for this client again.
Invariant: what a shard refuses is raised by a later call. Only so many updates are under way at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.ray.cluster import LOSSES, Cluster
from holdall.ray.drawing import received
from holdall.ray.ids import rows_of, shards_of
from holdall.ray.standing import Standing
from holdall.sampling.draw import as_ids
from holdall.schema import Array, as_array

_MOST_UNDER_WAY = 16

Ids = NDArray[np.int64]


class Priorities:
    """Tells shards what a learner found out about their rows."""

    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        self._under_way: deque[tuple[int, Any]] = deque()
        self._lock = threading.Lock()

    def tell(self, wanted: Ids, told: Array) -> None:
        """Send priorities on their way; rows of shards that do not answer are passed over."""
        shards = shards_of(wanted)
        reachable = set(self._cluster.numbers) - set(self._cluster.lost)
        for shard in np.unique(shards).tolist():
            if shard in reachable:
                rows = np.flatnonzero(shards == shard)
                sent = (rows_of(wanted[rows]).tobytes(), told[rows].tobytes(), told.dtype.str)
                with self._lock:
                    self._under_way.append((shard, self._cluster.call(shard, "update_priorities", *sent)))
        self.hear()

    def hear(self) -> None:
        """Look at what became of updates, and wait if too many are under way."""
        while True:
            with self._lock:
                if not self._under_way:
                    return
                crowded = len(self._under_way) > _MOST_UNDER_WAY
                shard, call = self._under_way[0]
                ready, _ = ray.wait([call], timeout=self._patience_s if crowded else 0)
                if not ready and not crowded:
                    return
                self._under_way.popleft()
            try:
                self._cluster.note(shard, Standing.of(received(call, self._patience_s)))
            except LOSSES:
                self._cluster.lose(shard)


def checked(ids: Any, priorities: Any) -> tuple[Ids, Array]:
    """Return ids and priorities as arrays of one length, or say why they are none."""
    told = as_array(priorities.detach().cpu() if hasattr(priorities, "detach") else priorities, "priorities")
    wanted = as_ids(ids)
    if told.shape != wanted.shape or told.dtype.kind not in "iuf":
        raise ArgumentError(
            f"priorities has shape {told.shape} and dtype {told.dtype} for ids of shape {wanted.shape}; pass one "
            "number for every row drawn"
        )
    if told.size and not (np.isfinite(told).all() and told.min() >= 0):
        raise ArgumentError(f"priorities holds {told.min()}; pass finite numbers of at least 0")
    return wanted, told

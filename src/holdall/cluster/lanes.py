"""Lanes that stay together: writers of a memory whose sampler follows episodes.

In:  ticks of several lanes.  Out: segments of few lanes each, that stay on one shard until an episode ends.
Invariant: an episode lies on one shard, unless the shard is lost, or the shard would hold far more than another for it.
It is then cut: each of its parts is followed as far as it goes, as the newest steps of a memory are.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.cluster.protocol import ShardCounters, is_newer
from holdall.cluster.writer import Address, Writer, digest_of


def new_writer(address: Address, num_envs: int, spread: int | None = None) -> Writer:
    """Return a writer: one that sends its lanes in groups, where episodes have to stay together."""
    grouped = address.lane_groups > 1 and num_envs > 1
    return LaneWriters(address, num_envs, spread) if grouped else Writer(address, num_envs, spread)


class LaneWriters(Writer):
    """A writer whose lanes go to the shards in groups, each by a writer of its own."""

    def _begin(self) -> None:
        super()._begin()
        lanes = np.array_split(np.arange(self._lanes), min(self._lanes, self._address.lane_groups))
        address, first = replace(self._address, lane_groups=1), secrets.randbelow(2**16)
        self._groups = [
            (slice(int(some[0]), int(some[-1]) + 1), Writer(address, len(some), self._spread, first + group))
            for group, some in enumerate(lanes)
        ]
        self._stopped_in: tuple[bytes, int] | None = None  # an `extend` that raised: its steps, and in which group

    @property
    def waiting_rows(self) -> int:
        """See `Writer`."""
        return sum(writer.waiting_rows for _, writer in self._groups)

    @property
    def unacknowledged_rows(self) -> int:
        """See `Writer`."""
        return sum(writer.unacknowledged_rows for _, writer in self._groups)

    @property
    def unacknowledged_bytes(self) -> int:
        """See `Writer`."""
        return sum(writer.unacknowledged_bytes for _, writer in self._groups)

    @property
    def counters_by_shard(self) -> dict[int, ShardCounters]:
        """See `Writer`."""
        found: dict[int, ShardCounters] = {}
        for _, writer in self._groups:
            for shard, counters in writer.counters_by_shard.items():
                if is_newer(counters, found.get(shard)):
                    found[shard] = counters
        return found

    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """See `Writer`; all groups have room for the tick before one takes it."""
        self._require_open()
        tick = self._fit((self._lanes,), obs, action, reward, next_obs, terminated, truncated, extras, valid)
        for _, writer in self._groups:
            writer.make_room()
        for lanes, writer in self._groups:
            writer.take(tick.cut(lanes))

    def extend(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """See `Writer`; one group after another, and after an error from the one that raised it on."""
        self._require_open()
        leading = (len(reward), self._lanes)
        steps = self._fit(leading, obs, action, reward, next_obs, terminated, truncated, extras, valid)
        stopped, group = self._stopped_in or (b"", 0)
        begin = group if group and digest_of(steps) == stopped else 0
        for group in range(begin, len(self._groups)):
            lanes, writer = self._groups[group]
            try:
                writer.take_steps(steps.cut((slice(None), lanes)))
            except BaseException:
                self._stopped_in = digest_of(steps), group
                raise
        self._stopped_in = None

    def flush(self) -> None:
        """See `Writer`."""
        for _, writer in self._groups:
            writer.flush()
        self.waited_s = sum(writer.waited_s for _, writer in self._groups)

    def close(self, *, flush: bool = True) -> None:
        """See `Writer`."""
        for _, writer in self._groups:
            writer.close(flush=flush and not self._closed)
        super().close(flush=False)

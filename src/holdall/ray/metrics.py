"""Metrics: what shards and learners say of themselves through `ray.util.metrics`, for Prometheus.

In:  standings, and how long calls took.  Out: gauges and histograms, with the memory's name and the shard's number.
Invariant: a metric costs a call no more than some microseconds, and one that cannot be told never makes a call fail.
What a shard tells is a second old at most, whether it is called or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.util import metrics

from holdall.ray.standing import Standing

_SHARD = {
    "transitions": "Transitions that can be drawn",
    "inserted": "Transitions ever accepted",
    "mass": "What draws are in proportion to",
    "backlog": "Bytes that wait to be made durable",
    "epoch": "Another one after every restart",
    "held_bytes": "Bytes of transitions, as they are held",
    "plain_bytes": "Bytes of the same transitions as plain arrays of obs and next_obs",
    "anonymous_bytes": "Memory of the shard's process that no file backs",
}
_LEARNER = {
    "coverage": "Share of the shards that answer",
    "losses": "How often a shard did not answer",
    "unacknowledged_bytes": "Bytes that this process sent and that no shard has acknowledged",
    "credit_wait_seconds": "Seconds that adding waited for shards, all in all",
}
_LIMITER = {
    "error": "Rows that samples are behind inserts",
    "lowest": "Lower bound of the error",
    "highest": "Upper bound of the error",
    "inserted": "Transitions that the shards took, as the limiter counts them",
    "sampled": "Rows that were granted to be drawn",
}
_BOUNDARIES = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
_PAUSE_S = 1.0


class _Gauges:
    """Gauges of one kind."""

    def __init__(self, prefix: str, described: dict[str, str], tags: dict[str, str]) -> None:
        self._gauges: dict[str, Any] = {}
        for name, text in described.items():
            gauge = metrics.Gauge(f"holdall_{prefix}_{name}", description=text, tag_keys=tuple(tags))
            gauge.set_default_tags(tags)
            self._gauges[name] = gauge

    def tell(self, **values: float) -> None:
        """Set gauges."""
        for name, value in values.items():
            self._gauges[name].set(float(value))


class _AskedFor(_Gauges):
    """Gauges that are told once a second at most, by whoever is called anyway."""

    def __init__(self, prefix: str, described: dict[str, str], memory: str) -> None:
        super().__init__(prefix, described, {"memory": memory})
        self._told_at = -_PAUSE_S
        self._lock = threading.Lock()

    @property
    def is_due(self) -> bool:
        """Whether it is time to tell again; who is told so has to."""
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < _PAUSE_S:
                return False
            self._told_at = now
            return True


class LearnerMetrics(_AskedFor):
    """What one learner tells."""

    def __init__(self, memory: str) -> None:
        super().__init__("learner", _LEARNER, memory)


class LimiterMetrics(_AskedFor):
    """What the limiter of a memory tells."""

    def __init__(self, memory: str) -> None:
        super().__init__("limiter", _LIMITER, memory)


class ShardMetrics(_Gauges):
    """What one shard tells."""

    def __init__(self, memory: str, shard: int) -> None:
        tags = {"memory": memory, "shard": str(shard)}
        super().__init__("shard", _SHARD, tags)
        self._seconds: Any = metrics.Histogram(
            "holdall_shard_call_seconds",
            description="How long calls took",
            boundaries=_BOUNDARIES,
            tag_keys=("memory", "shard", "call"),
        )
        self._seconds.set_default_tags(tags)

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Time a call."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.observe(time.perf_counter() - began, tags={"call": call})

    def follow(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Tell what a shard says of its process, see status.py, every second from now on."""
        threading.Thread(target=self._tell, args=(figures,), name="holdall-metrics", daemon=True).start()

    def _tell(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        while True:
            told = figures()
            standing = Standing.of(told["standing"])
            values = {name: getattr(standing, name) for name in _SHARD if hasattr(standing, name)}
            self.tell(**values, **{name: told[name] for name in _SHARD if name in told})
            time.sleep(_PAUSE_S)

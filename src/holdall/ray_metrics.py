"""Figures for Prometheus: what shards, learners and the limiter report to Ray, whose agents serve it.

In:  methods that return figures by name.  Out: gauges and histograms of `ray.util.metrics`, set in the background.
Invariant: reporting never waits for anybody, takes at most a fiftieth of a core, and ends with what it reports of.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.util import metrics

_DESCRIBED = {
    "shard": {
        "transitions": "Transitions that can be drawn",
        "inserted": "Transitions ever accepted",
        "mass": "What draws are in proportion to",
        "backlog": "Bytes that wait to be made durable",
        "epoch": "Another one after every restart",
        "held_bytes": "Bytes of transitions, as they are held",
        "plain_bytes": "Bytes of the same transitions as plain arrays of obs and next_obs",
        "anonymous_bytes": "Memory of the shard's process that no file backs",
    },
    "learner": {
        "coverage": "Share of the shards that answer",
        "losses": "How often a shard did not answer",
        "unacknowledged_bytes": "Bytes that this process sent and that no shard has acknowledged",
        "credit_wait_seconds": "Seconds that adding waited for shards, all in all",
    },
    "limiter": {
        "error": "Rows that samples are behind inserts",
        "lowest": "Lower bound of the error",
        "highest": "Upper bound of the error",
        "inserted": "Transitions that the shards took, as the limiter counts them",
        "sampled": "Rows that were granted to be drawn",
    },
}
_BOUNDARIES = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
_REPORT_S = 1.0


class Gauges:
    """What a shard, a learner or the limiter reports."""

    def __init__(self, kind: str, **tags: str) -> None:
        self._gauges: dict[str, Any] = {}
        for name, text in _DESCRIBED[kind].items():
            gauge = self._gauges[name] = metrics.Gauge(f"holdall_{kind}_{name}", text, tuple(tags))
            gauge.set_default_tags(tags)

    def follow(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Set gauges from now on by what a method returns, for as long as its object lives.

        That is every second, or after fifty times the CPU that it took: a shard looks at all of its segments.
        """
        method = weakref.WeakMethod(figures)
        threading.Thread(target=self._follow, args=(method,), name="holdall-metrics", daemon=True).start()

    def _follow(self, method: weakref.WeakMethod[Callable[[], Mapping[str, Any]]]) -> None:
        while (figures := method()) is not None:
            began, found = time.thread_time(), figures()
            for name in found.keys() & self._gauges.keys():
                self._gauges[name].set(float(found[name]))
            del figures
            time.sleep(max(_REPORT_S, 50 * (time.thread_time() - began)))


class ShardMetrics(Gauges):
    """What one shard reports, and how long its calls take."""

    def __init__(self, memory: str, shard: int) -> None:
        tags = {"memory": memory, "shard": str(shard)}
        super().__init__("shard", **tags)
        name, text = "holdall_shard_call_seconds", "How long calls took"
        self._seconds: Any = metrics.Histogram(name, text, _BOUNDARIES, (*tags, "call"))
        self._seconds.set_default_tags(tags)

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Time a call."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.observe(time.perf_counter() - began, tags={"call": call})

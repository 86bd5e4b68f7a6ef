"""Figures for Prometheus. Shards, learners and the limiter report to `ray.util.metrics`. Ray's agents publish them.

A background thread sets the gauges. It takes at most a fiftieth of a core, and ends with the object that it reports on.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.util import metrics

_DESCRIPTIONS = {
    "shard": {
        "transitions": "Transitions that can be drawn",
        "inserted": "Transitions ever accepted",
        "mass": "Transitions, or the sum of their scaled priorities. Shards are drawn in proportion to it",
        "backlog": "Bytes that are not durable yet",
        "epoch": "Number that changes with every restart",
        "held_bytes": "Bytes of the stored transitions",
        "plain_bytes": "Bytes of the same transitions as plain arrays of obs and next_obs",
        "anonymous_bytes": "Memory of the shard's process that no file backs",
    },
    "learner": {
        "coverage": "Share of the shards that answer",
        "losses": "Number of times that a shard did not answer",
        "unacknowledged_bytes": "Bytes that this process sent and that no shard has acknowledged",
        "credit_wait_seconds": "Seconds that adding has waited for shards",
    },
    "limiter": {
        "error": "Rows by which samples are behind inserts",
        "lowest": "Lower bound of the error",
        "highest": "Upper bound of the error",
        "inserted": "Transitions that the shards accepted, as the limiter counts them",
        "sampled": "Rows that may be drawn or were drawn",
    },
}
_BOUNDARIES_S = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
_REPORT_S = 1.0
"""Seconds between two reports, at least."""
_MIN_PAUSE_RATIO = 50
"""The pause after a report is at least this many times the CPU time of the report."""


class Gauges:
    """The gauges of a shard, a learner or the limiter."""

    def __init__(self, kind: str, **tags: str) -> None:
        self._gauges: dict[str, Any] = {}
        for name, text in _DESCRIPTIONS[kind].items():
            gauge: Any = metrics.Gauge(f"holdall_{kind}_{name}", text, tuple(tags))
            gauge.set_default_tags(tags)
            self._gauges[name] = gauge

    def follow(self, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Set the gauges in a background thread to the results of the method `measure`, while its object lives."""
        method = weakref.WeakMethod(measure)
        threading.Thread(target=self._follow, args=(method,), name="holdall-metrics", daemon=True).start()

    def _follow(self, method: weakref.WeakMethod[Callable[[], Mapping[str, Any]]]) -> None:
        while True:
            measure = method()
            if measure is None:
                return
            began_s = time.thread_time()
            figures = measure()
            for name in figures.keys() & self._gauges.keys():
                self._gauges[name].set(float(figures[name]))
            del measure
            time.sleep(max(_REPORT_S, _MIN_PAUSE_RATIO * (time.thread_time() - began_s)))


class ShardMetrics(Gauges):
    """The gauges of one shard, and a histogram of the time that its calls take."""

    def __init__(self, memory: str, shard: int) -> None:
        tags = {"memory": memory, "shard": str(shard)}
        super().__init__("shard", **tags)
        name = "holdall_shard_call_seconds"
        self._seconds: Any = metrics.Histogram(name, "Seconds that calls took", _BOUNDARIES_S, (*tags, "call"))
        self._seconds.set_default_tags(tags)

    @contextmanager
    def time_call(self, call: str) -> Iterator[None]:
        """Measure the time that the body of the `with` statement takes."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.observe(time.perf_counter() - began_s, tags={"call": call})

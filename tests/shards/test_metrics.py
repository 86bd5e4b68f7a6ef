"""Ray's metrics have the figures of shards, learners and the limiter."""

from __future__ import annotations

import importlib.util
import re
import urllib.request
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces

from holdall.cluster import metrics
from holdall.cluster.metrics import Gauges
from holdall.ray import RateLimit, ReplayMemory

from .processes import wait_until

_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")


def read_metrics(memory: str) -> dict[tuple[str, str, str], float]:
    """Return the metrics of one memory on the pages of all nodes, by name, shard and call."""
    nodes: Any = ray.nodes
    found = {}
    for node in nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:  # The agent has not started yet.
            continue
        for line in text.splitlines():
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                continue
            name, words, value = sample.groups()
            tags = dict(re.findall(r'(\w+)="([^"]*)"', words))
            if tags.get("memory") == memory and "le" not in tags:
                found[name, tags.get("shard", ""), tags.get("call", "")] = float(value)
    return found


class Figures:
    """Figures that cost `cpu_s` seconds of CPU, and a clock."""

    def __init__(self, cpu_s: float) -> None:
        self.cpu_s = cpu_s
        self.clock = 0.0
        self.paused = list[float]()

    def measured(self) -> dict[str, float]:
        self.clock += self.cpu_s
        return {"coverage": 0.5, "unknown": 1.0}

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)


@pytest.mark.parametrize(("cpu_s", "pause_s"), [(0.0, 1.0), (0.01, 1.0), (0.2, 10.0)])
def test_figures_that_need_much_cpu_are_reported_less_often(
    cpu_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures without a gauge are ignored."""
    figures = Figures(cpu_s)
    values = list[float]()
    clock = SimpleNamespace(thread_time=lambda: figures.clock, sleep=figures.pause)
    monkeypatch.setattr(metrics, "time", clock)
    gauges = object.__new__(Gauges)
    gauges._gauges = {"coverage": SimpleNamespace(set=values.append)}
    turns = iter([figures.measured, figures.measured, None])
    gauges._follow(lambda: next(turns))  # type: ignore[arg-type]  # In place of a weak method.
    assert values == [0.5, 0.5]
    assert figures.paused == pytest.approx([pause_s] * 2)


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("opencensus", "aiohttp_cors", "opentelemetry")),
    reason="Ray exports metrics only with its extra: pip install 'ray[default]'",
)
def test_prometheus_gets_the_figures_of_shards_learners_and_the_limiter() -> None:
    row = np.zeros((1, 3), np.float32)
    no = np.zeros(1, np.bool_)
    space = spaces.Box(-1, 1, (3,), np.float32)
    limit = RateLimit(4.0, 1, 10_000)
    with ReplayMemory(space, spaces.Discrete(2), 1_000, shards=2, limit=limit) as memory:
        for _ in range(600):
            memory.add(row, np.zeros(1, np.int64), np.zeros(1, np.float32), row, no, no)
        seen: dict[tuple[str, str, str], float] = {}

        def is_complete() -> bool:
            memory.sample(32)
            seen.update(read_metrics(memory.name))
            values = [seen.get(("ray_holdall_shard_transitions", shard, ""), 0.0) for shard in "01"]
            return sum(values) == 600 and ("ray_holdall_limiter_error", "", "") in seen

        wait_until(is_complete, patience_s=90)
        statuses = memory.shards()
        for status in statuses:
            shard = str(status.number)
            assert status.counters is not None
            of_shard = {name: value for (name, number, call), value in seen.items() if number == shard and not call}
            exact = {
                "transitions": status.counters.transitions,
                "inserted": status.counters.inserted,
                "mass": status.counters.mass,
                "epoch": status.counters.epoch,
                "backlog": 0,
                "held_bytes": status.held_bytes,
                "plain_bytes": status.plain_bytes,
            }
            assert of_shard.keys() == {f"ray_holdall_shard_{name}" for name in (*exact, "anonymous_bytes")}
            assert all(of_shard[f"ray_holdall_shard_{name}"] == value for name, value in exact.items())
            assert of_shard["ray_holdall_shard_anonymous_bytes"] == pytest.approx(status.uss_bytes, rel=0.5)
            for call in ("insert", "sample"):
                count = seen["ray_holdall_shard_call_seconds_count", shard, call]
                assert 0 < seen["ray_holdall_shard_call_seconds_sum", shard, call] < 5 * count
        assert seen["ray_holdall_learner_coverage", "", ""] == 1
        assert seen["ray_holdall_learner_losses", "", ""] == 0
        assert seen["ray_holdall_learner_unacknowledged_bytes", "", ""] >= 0
        assert seen["ray_holdall_learner_credit_wait_seconds", "", ""] >= 0
        inserted, sampled = (seen[f"ray_holdall_limiter_{name}", "", ""] for name in ("inserted", "sampled"))
        assert inserted <= 600
        assert sampled % 32 == 0
        assert seen["ray_holdall_limiter_error", "", ""] == 4 * inserted - sampled
        assert seen["ray_holdall_limiter_highest", "", ""] == limit.highest

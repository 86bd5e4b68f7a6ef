"""What shards and learners say of themselves reaches whoever scrapes Ray's metrics."""

from __future__ import annotations

import urllib.request
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces

from holdall.ray import ReplayMemory

from .processes import wait_until


def scraped() -> str:
    nodes: Any = ray.nodes
    text = ""
    for node in nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                text += answer.read().decode()
        except OSError:
            continue
    return text


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_shards_and_learners_are_seen_by_prometheus() -> None:
    if not scraped():
        pytest.skip("Ray exports no metrics here")
    row, no = np.zeros((1, 3), np.float32), np.zeros(1, np.bool_)
    with ReplayMemory(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), 1_000, shards=2) as memory:
        for _ in range(600):
            memory.add(row, np.zeros(1, np.int64), np.zeros(1, np.float32), row, no, no)

        def is_seen() -> bool:
            memory.sample(32)
            text = scraped()
            names = ("shard_transitions", "shard_epoch", "shard_call_seconds", "learner_coverage")
            return all(f"holdall_{name}" in text for name in names)

        wait_until(is_seen, patience_s=60)
        assert f'memory="{memory._name}"' in scraped().replace("Memory=", "memory=")

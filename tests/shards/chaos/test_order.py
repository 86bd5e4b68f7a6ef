"""Segments that reach a shard several times, late, or after it lost its rows: each is held once, and in order."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

import ray

from holdall import ShardError
from holdall.cluster.members import Members
from holdall.cluster.messages import InsertRequest
from holdall.cluster.shard import Shard
from holdall.cluster.stream import SegmentStream, SentSegment
from holdall.cluster.tuning import ClusterTuning
from holdall.schema_json import schema_to_json

from ..processes import make_config
from .test_slow_disk import SCHEMA, WRITER, make_segment

ROWS = 4
pytestmark = pytest.mark.usefixtures("cluster")


def make_payloads(count: int) -> list[bytes]:
    return [make_segment(range(ROWS * number, ROWS * (number + 1))) for number in range(count)]


def start_shard(folder: Path) -> Any:
    return Shard(0, make_config(schema_to_json(SCHEMA), 10_000, folder), 0)


def read_numbers(shard: Any) -> list[int]:
    view = shard._data.store.view()
    found: list[int] = view.extra(0, np.arange(view.first_id, view.next_id)).tolist()
    return found


def insert(shard: Any, first: int, payloads: list[bytes]) -> Any:
    return shard.insert(InsertRequest(WRITER, first, payloads))


def test_a_call_that_is_executed_twice_or_late_is_accepted_once(tmp_path: Path) -> None:
    shard = start_shard(tmp_path)
    sent = make_payloads(4)
    assert insert(shard, 0, sent[:2]).expected == 2
    assert insert(shard, 0, sent[:3]).expected == 3
    assert insert(shard, 0, sent[:2]).expected == 3
    assert insert(shard, 3, sent[3:]).expected == 4
    assert read_numbers(shard) == list(range(4 * ROWS))


def test_a_shard_that_lost_its_rows_continues_with_the_oldest_segment_in_flight(tmp_path: Path) -> None:
    shard = start_shard(tmp_path)
    sent = make_payloads(7)
    assert insert(shard, 5, sent[5:]).expected == 7
    assert insert(shard, 5, sent[5:6]).expected == 7
    assert read_numbers(shard) == list(range(5 * ROWS, 7 * ROWS))


def test_a_refused_segment_is_skipped(tmp_path: Path) -> None:
    shard = start_shard(tmp_path)
    first, _, third = make_payloads(3)
    damaged = first[:-1] + bytes([first[-1] ^ 1])
    ack = insert(shard, 0, [first, damaged, third])
    assert ack.expected == 1
    assert ack.refusal
    assert insert(shard, 2, [third]).expected == 3
    assert read_numbers(shard) == [*range(ROWS), *range(2 * ROWS, 3 * ROWS)]


class FaultyLine:
    """Executes the calls to a shard in threads, late or never, and loses some answers."""

    def __init__(self, shard: Any, seed: int) -> None:
        self._shard = shard
        self._generator = np.random.default_rng(seed)
        self._threads = ThreadPoolExecutor(16)
        self.insert = SimpleNamespace(remote=self._call)
        self.calls = 0

    def _call(self, request: InsertRequest) -> Future[Any]:
        fate = self._generator.random()
        late_s = 0.004 * self._generator.random()
        self.calls += 1

        def run() -> Any:
            time.sleep(late_s)
            if fate < 0.1:
                raise ray.exceptions.RayActorError
            answer = self._shard.insert(request)
            if fate < 0.2:
                raise ray.exceptions.RayActorError
            return answer

        return self._threads.submit(run)


@pytest.mark.parametrize("seed", range(6))
def test_segments_of_a_stream_are_held_once_and_in_order_over_a_faulty_line(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_calls(calls: list[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        done, rest = wait(calls, timeout)
        return list(done), list(rest)

    faulty = SimpleNamespace(wait=wait_for_calls, exceptions=ray.exceptions, is_initialized=ray.is_initialized)
    monkeypatch.setattr("holdall.cluster.stream.ray", faulty)
    monkeypatch.setattr("holdall.cluster.stream.get_result", lambda call: call.result())
    shard = start_shard(tmp_path)
    sent = make_payloads(60)
    sent[20] = sent[20][:-1] + bytes([sent[20][-1] ^ 1])  # The shard refuses this one.
    line = FaultyLine(shard, seed)
    tuning = ClusterTuning(pause_s=0.001)
    members = Members(None, 1.0, tuning)
    members._set_handles({0: line})
    stream = SegmentStream(members, 0, WRITER, tuning)
    refused = 0

    def refusing(act: Any, *arguments: Any) -> None:
        nonlocal refused
        try:
            act(*arguments)
        except ShardError as error:
            assert "refused" in str(error)  # noqa: PT017
            refused += 1

    for payload in sent:
        while not stream.has_room:
            refusing(stream.poll, 0.01)
        refusing(stream.send, SentSegment(payload, ROWS, None))
    while stream.in_flight:
        refusing(stream.flush, 60.0)
    line._threads.shutdown()
    assert refused == 1
    assert read_numbers(shard) == [number for number in range(60 * ROWS) if number // ROWS != 20]

"""A journal on a slow disk: a shard acknowledges a segment only when it is durable."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall.checkpoint.directory_blobs import DirectoryBlobs
from holdall.cluster.messages import Ack, InsertRequest
from holdall.cluster.segment import SegmentBuilder
from holdall.cluster.shard import Shard
from holdall.schema import Schema
from holdall.schema_json import schema_to_json
from holdall.store.tuning import Tuning

from ..processes import make_config
from .ledger import ACTION, EXTRAS, OBSERVATION, make_step

WRITER = b"w" * 16
SCHEMA = Schema.of(OBSERVATION, ACTION, EXTRAS, 1)


def make_segment(numbers: range) -> bytes:
    builder = SegmentBuilder(SCHEMA, len(numbers), "balanced", Tuning())
    for number in numbers:
        assert builder.append((*make_step(number), None))
    return builder.close()


@pytest.mark.usefixtures("cluster")  # Without a cluster, the shard would start Ray to find the id of its machine.
def test_a_segment_is_acknowledged_only_when_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    create = DirectoryBlobs.create

    def create_slowly(blobs: DirectoryBlobs, name: str, content: bytes) -> bool:
        disk.wait()
        return create(blobs, name, content)

    shard: Any = Shard(0, make_config(schema_to_json(SCHEMA), 1_000, tmp_path), 0)
    monkeypatch.setattr(DirectoryBlobs, "create", create_slowly)
    acks: list[Ack] = []
    payload = make_segment(range(50))
    calls = [InsertRequest(WRITER, *call) for call in ((0, [payload]), (0, [payload]), (1, []))]
    threads = [threading.Thread(target=lambda call=call: acks.append(shard.insert(call))) for call in calls]
    for thread in threads:
        thread.start()
        while shard._expected.get(WRITER, 0) == 0:
            time.sleep(0.01)
    time.sleep(0.2)
    assert acks == []
    disk.set()
    for thread in threads:
        thread.join()
    assert [(ack.expected, ack.counters.transitions) for ack in acks] == [(1, 50)] * 3

"""A journal on a slow disk: a writer that asks what was accepted is told of nothing that could still be lost."""

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

from ..processes import shard_config
from .ledger import ACTION, EXTRAS, OBSERVATION, step

WRITER = b"w" * 16
SCHEMA = Schema.of(OBSERVATION, ACTION, EXTRAS, 1)


def segment(numbers: range) -> bytes:
    builder = SegmentBuilder(SCHEMA, len(numbers), "balanced", Tuning())
    for number in numbers:
        assert builder.append((*step(number), None))
    return builder.close()


@pytest.mark.usefixtures("cluster")  # or the shard, which asks where it runs, starts a Ray of its own
def test_a_segment_that_is_not_durable_yet_does_not_count_as_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    create = DirectoryBlobs.create

    def create_slowly(blobs: DirectoryBlobs, name: str, content: bytes) -> bool:
        disk.wait()
        return create(blobs, name, content)

    shard: Any = Shard(0, shard_config(schema_to_json(SCHEMA), 1_000, tmp_path), 0)
    monkeypatch.setattr(DirectoryBlobs, "create", create_slowly)
    told: list[Ack] = []
    payload = segment(range(50))
    calls = [InsertRequest(WRITER, *call) for call in ((0, [payload]), (0, [payload]), (1, []))]
    asking = [threading.Thread(target=lambda call=call: told.append(shard.insert(call))) for call in calls]
    for thread in asking:
        thread.start()
        while shard._expected.get(WRITER, 0) == 0:
            time.sleep(0.01)
    time.sleep(0.2)
    assert told == []
    disk.set()
    for thread in asking:
        thread.join()
    assert [(ack.expected, ack.counters.transitions) for ack in told] == [(1, 50)] * 3

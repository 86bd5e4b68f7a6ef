"""A journal on a slow disk: a writer that asks what was accepted is told of nothing that could still be lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall.cluster import shard as shard_module
from holdall.cluster.journal import Slots
from holdall.cluster.protocol import Ack, AckKind, SegmentHeader
from holdall.cluster.shard import Shard
from holdall.errors import ShardError
from holdall.json_state import schema_words
from holdall.native import chosen_kernels
from holdall.sampling.draw import Uniform
from holdall.schema import Schema
from holdall.storage import Encoder, pack_segment
from holdall.storage.ticks import Tick

from .ledger import ACTION, EXTRAS, OBSERVATION, step

WRITER = b"w" * 16
SCHEMA = Schema.of(OBSERVATION, ACTION, EXTRAS, 1)


def segment(numbers: range) -> bytes:
    kernels = chosen_kernels()
    encoder = Encoder(SCHEMA, 1, len(numbers), kernels)
    for number in numbers:
        obs, action, reward, next_obs, ends, no, extras = step(number)
        encoder.add(Tick([obs], [action], reward, [next_obs], ends, no, [extras["number"]], None))
    return pack_segment(encoder.close({}), kernels.coder)


def test_a_segment_that_is_not_durable_yet_does_not_count_as_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, create = threading.Event(), Slots.create

    def create_slowly(slots: Slots, number: int, content: bytes) -> bool:
        disk.wait()
        return create(slots, number, content)

    shard: Any = Shard(0, schema_words(SCHEMA), 1_000, Uniform(), 0, "nobody", str(tmp_path))
    monkeypatch.setattr(Slots, "create", create_slowly)
    monkeypatch.setattr(shard_module, "_SETTLED_S", 0.2)
    told: list[Ack] = []
    sent = (SegmentHeader(WRITER, 0, 0), segment(range(50)))
    inserting = threading.Thread(target=lambda: told.append(shard.insert(*sent)))
    inserting.start()
    while shard._expected.get(WRITER, 0) == 0:
        time.sleep(0.01)
    with pytest.raises(ShardError, match="disk"):
        shard.expect(WRITER)
    disk.set()
    inserting.join()
    assert told[0].kind is AckKind.ACCEPTED
    assert shard.expect(WRITER).expected == 1

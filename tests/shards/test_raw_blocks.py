"""Uncompressed blocks of a shard: the newest ones that fit. Checkpoints have their compressed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall import ReplayMemory, Uniform
from holdall._native import Coded, Segment
from holdall.checkpoint import Savers
from holdall.checkpoint.save import BlockEncoder
from holdall.cluster.segment import SegmentBuilder, unpack_payload
from holdall.cluster.shard_data import ShardData
from holdall.cluster.shard_store import ShardStore
from holdall.cluster.tuning import ClusterTuning
from holdall.sampling import WriterRun
from holdall.schema import Schema
from holdall.schema_json import schema_to_json
from holdall.store.tuning import Tuning

SCHEMA = Schema.of(spaces.Box(0, 255, (24, 24), np.uint8), spaces.Discrete(3), {}, 1)
ROWS = 10
BLOCK_BYTES = (ROWS + 1) * 24 * 24
TUNING = Tuning(small_field_bytes=0, tiny_field_bytes=10_000)


def list_raw(segments: list[Segment]) -> list[bool]:
    blocks = [segment.parts[0].block for segment in segments]
    return [block is not None and not isinstance(block.form, Coded) for block in blocks]


def fill(store: ShardStore, count: int) -> list[Segment]:
    """Adopt segments of noise, whose frames have nothing in common."""
    generator = np.random.default_rng(0)
    builder = SegmentBuilder(SCHEMA, ROWS, "balanced", TUNING)
    adopted = []
    no = np.zeros(1, np.bool_)
    obs = generator.integers(0, 256, (1, 24, 24), dtype=np.uint8)
    for _ in range(count):
        for _ in range(ROWS):
            next_obs = generator.integers(0, 256, (1, 24, 24), dtype=np.uint8)
            step = (obs, np.zeros(1, np.int64), np.zeros(1, np.float32), next_obs, no, no, None, None)
            assert builder.append(step)
            obs = next_obs
        received = unpack_payload(builder.close(), store.columns)
        store.require_reward_dtype(received.reward_dtype)
        store.adopt(received.segment)
        adopted.append(received.segment)
    return adopted


def read_all(store: ShardStore) -> bytes:
    view = store.view()
    (obs,) = view.read(np.arange(view.first_id, view.next_id), store.columns.obs_outputs)
    return obs.tobytes()


def test_the_newest_blocks_that_fit_are_kept_uncompressed() -> None:
    store = ShardStore(SCHEMA, 1_000, 0, 1, Tuning(), max_raw_bytes=3 * BLOCK_BYTES)
    plain = ShardStore(SCHEMA, 1_000, 0, 1, Tuning())
    assert list_raw(fill(store, 5)) == [False, False, True, True, True]
    assert list_raw(fill(plain, 5)) == [False] * 5
    assert read_all(store) == read_all(plain)


def test_a_checkpoint_has_the_forms_that_writers_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompressed blocks are not compressed again. They stay uncompressed, so draws are as fast as before."""
    monkeypatch.setattr(BlockEncoder, "encode", None)
    config = ClusterTuning(store=TUNING)
    data = ShardData(schema_to_json(SCHEMA), 1_000, Uniform(), np.random.default_rng(0), config)
    segments = fill(data.store, 3)
    data._runs.append(WriterRun("w", 0, 1, 0, 3 * ROWS))
    before = read_all(data.store)
    assert list_raw(segments) == [True] * 3
    savers = Savers()
    savers.save(data.snapshot, tmp_path, keep=None).result()
    savers.close()
    assert list_raw(segments) == [True] * 3
    with ReplayMemory.load(tmp_path, sampler=Uniform()) as loaded:
        view = loaded.store.view()
        (obs,) = view.read(np.arange(view.first_id, view.next_id), data.store.columns.obs_outputs)
        assert obs.tobytes() == before


def test_blocks_of_evicted_rows_are_not_kept_uncompressed() -> None:
    store = ShardStore(SCHEMA, 2 * ROWS, 0, 1, Tuning(), max_raw_bytes=2**20)
    assert list_raw(fill(store, 5)) == [False, False, False, True, True]

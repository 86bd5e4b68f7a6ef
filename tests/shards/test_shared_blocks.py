"""Batches in memory that shards and a learner share. They belong to the caller, like copied batches."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from holdall import Uniform
from holdall.batch import Batch
from holdall.cluster import learner
from holdall.cluster.answer import Answer
from holdall.cluster.messages import RestartedError, SampleRequest, ShardCounters
from holdall.cluster.shared_block import BatchBlocks, BlockRows, OpenedBlocks, SharedBlock, block_bytes
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import ReplayMemory, attach
from holdall.schema import Leaf

SPACE = spaces.Dict(image=spaces.Box(0, 255, (48, 48, 3), np.uint8), state=spaces.Box(-9, 9, (3,), np.float32))
FRAMES = np.random.default_rng(0).integers(0, 256, (400, 1, 48, 48, 3), dtype=np.uint8)
LEAVES = [Leaf("", (48, 48, 3), np.dtype(np.uint8))]
MIN_BYTES = ClusterTuning().min_shared_bytes
needs_sharing = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory needs memfd_create of Linux")


def require_right(batch: Batch) -> None:
    numbers = np.asarray(batch.reward).astype(int)
    assert np.array_equal(batch.obs["image"], FRAMES[numbers, 0])
    assert np.array_equal(batch.next_obs["image"], FRAMES[numbers - 1, 0])
    assert np.array_equal(batch.obs["state"][:, 0], numbers)


def is_shared(batch: Batch, leaf: str = "image") -> bool:
    memory: Any = batch.obs[leaf]
    while isinstance(memory, np.ndarray):
        memory = memory.base
    return isinstance(memory.obj if isinstance(memory, memoryview) else memory, SharedBlock)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_batch_in_shared_memory_belongs_to_the_caller(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    no = np.zeros((400, 1), np.bool_)
    numbers = np.arange(400, dtype=np.float32)[:, None]
    with ReplayMemory(SPACE, spaces.Discrete(2), 3_000, shards=shards, seed=0) as memory:
        state = np.repeat(numbers[..., None], 3, axis=2)
        obs, next_obs = ({"image": frames, "state": state} for frames in (FRAMES, np.roll(FRAMES, 1, axis=0)))
        memory.extend(obs, no.astype(np.int64), numbers, next_obs, no, no)
        first = memory.sample(64)
        second = memory.sample(64)
        assert is_shared(first) == is_shared(second) == hasattr(os, "memfd_create")
        assert is_shared(first, "state") == is_shared(first)  # Keeps answers small.
        require_right(first)
        first.obs["image"][:] = 7
        first.next_obs["image"][:] = 9
        require_right(second)
        kept = [memory.sample(64) for _ in range(12)]  # A caller may keep any number of batches.
        for batch in kept:
            require_right(batch)
        del kept, first
        gc.collect()
        with memory.loader(64, prefetch=3) as loader:
            for _ in range(9):
                require_right(next(loader))
        require_right(second)
        with monkeypatch.context() as far:
            far.setattr("holdall.cluster.learner.get_machine_id", lambda: b"other")
            with attach(memory.name) as elsewhere:  # As on another machine.
                require_right(elsewhere.sample(64))
                with elsewhere.loader(64, prefetch=3) as loader:
                    for _ in range(9):
                        require_right(next(loader))
        few = memory.sample(2)  # Too few rows for a block.
        assert not is_shared(few)
        require_right(few)
    require_right(second)  # Also after the shards have ended.


@needs_sharing
def test_a_block_is_reused_after_its_batch_was_freed_and_its_answers_were_received() -> None:
    blocks = BatchBlocks(LEAVES, MIN_BYTES)
    taken: Any = blocks.take(64)
    arrays = taken.arrays()
    name = taken.block.place.name
    blocks.release(taken)
    del taken
    other: Any = blocks.take(64)
    assert other.block.place.name != name  # Its arrays are in use.
    arrays = other.arrays()
    again: Any = blocks.take(64)
    assert again.block.place.name == name
    unanswered = other.block.place.name
    del other, arrays
    gc.collect()
    newest: Any = blocks.take(64)
    assert newest.block.place.name not in {name, unanswered}  # A shard may still write to it.


def open_block(shard: OpenedBlocks, place: BlockRows) -> Any:
    return shard.open(place.place, block_bytes(LEAVES, place.rows))


class TwoShards:
    """Two shards. Shard 1 is lost when it is asked for rows. It may still write to the block of that request."""

    patience_s = 1.0
    transitions = 1_000

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.requests: list[tuple[int, SampleRequest]] = []

    def masses(self) -> dict[int, float]:
        return {number: 1.0 for number in (0, 1) if number not in self.lost}

    def submit(self, shard: int, call: Any) -> int:
        def remote(request: SampleRequest) -> int:
            self.requests.append((shard, request))
            return len(self.requests) - 1

        number: int = call(SimpleNamespace(sample=SimpleNamespace(remote=remote)))
        return number

    def mark_lost(self, shard: int) -> None:
        self.lost.append(shard)

    def record(self, *_: Any) -> None:
        pass

    def probe(self, _shards: Any) -> None:
        pass


@needs_sharing
def test_late_writes_of_a_lost_shard_do_not_reach_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    members: Any = TwoShards()
    made: list[Any] = []
    blocks = BatchBlocks(LEAVES, MIN_BYTES)
    maker: Any = SimpleNamespace(blocks=blocks, prepare=lambda *given: made.append(given))

    def get_result(call: int, _timeout_s: float) -> Any:
        shard, request = members.requests[call]
        if shard == 1:
            raise RestartedError("killed")
        count = request.rows
        return Answer(ShardCounters(0, 0, 9, 9, 9, 0, 0, 1.0), np.arange(count), np.ones(count), cast("Any", None))

    monkeypatch.setattr(learner, "get_result", get_result)
    monkeypatch.setattr(learner, "get_machine_id", lambda: b"")
    drawing = learner.Learner(
        members, maker, Uniform(), np.random.default_rng(0), "degrade", ClusterTuning(), seeds=False
    )
    request = drawing.start(64)
    assert request.block is not None
    drawing.finish(request)
    ((_, positions, shards, _, _, block),) = made
    assert [shard for shard, _ in members.requests] == [0, 1, 0]
    assert (shards, sorted(positions[0])) == ([0], list(range(64)))  # All rows are drawn again.
    assert block is None
    assert members.requests[-1][1].block is None
    names = {sent.block.place.name for _, sent in members.requests if sent.block is not None}
    del request
    gc.collect()
    newest: Any = blocks.take(64)
    assert newest.block.place.name not in names


@needs_sharing
def test_nothing_is_written_to_another_file_with_the_descriptor_of_a_block() -> None:
    blocks = BatchBlocks(LEAVES, MIN_BYTES)
    taken: Any = blocks.take(64)
    place = taken.describe_rows(np.arange(64))
    shard = OpenedBlocks()
    assert open_block(shard, place._replace(place=place.place._replace(name="holdall-another"))) is None
    assert open_block(shard, place._replace(rows=65)) is None  # Another size.
    assert open_block(shard, place._replace(place=place.place._replace(descriptor=9_999))) is None
    assert open_block(shard, place) is not None
    del taken
    gc.collect()
    other: Any = blocks.take(80)
    assert open_block(shard, other.describe_rows(np.arange(80))) is not None
    names = [block.name for block in shard._opened]
    assert names == [other.block.place.name]  # The block that the learner freed is closed.
    assert open_block(shard, place) is None


@needs_sharing
def test_blocks_of_a_learner_that_ended_are_closed() -> None:
    ended = BatchBlocks(LEAVES, MIN_BYTES)
    continuing = BatchBlocks(LEAVES, MIN_BYTES)
    shard = OpenedBlocks()
    lost: Any = ended.take(64)
    kept: Any = continuing.take(64)
    place = kept.describe_rows(np.arange(64))
    assert open_block(shard, lost.describe_rows(np.arange(64))) is not None
    assert open_block(shard, place) is not None
    del lost, ended
    gc.collect()
    for _ in range(300):  # The shard checks its blocks from time to time.
        assert open_block(shard, place) is not None
    assert [block.name for block in shard._opened] == [kept.block.place.name]


@needs_sharing
def test_many_kept_batches_need_few_open_files() -> None:
    blocks = BatchBlocks(LEAVES, MIN_BYTES)
    before = psutil.Process().num_fds()
    kept = []
    for _ in range(500):
        block = blocks.take(64)
        kept.append(block)
        if block is not None:
            blocks.release(block)
    assert psutil.Process().num_fds() - before <= 2 * 64
    assert kept[-1] is None
    kept.clear()
    gc.collect()
    assert blocks.take(64) is not None

"""Batches that shards write to memory that they share with a learner: the caller's own, as those that were copied."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.batch import Batch
from holdall.cluster import answer, learner, protocol
from holdall.cluster.answer import BatchBlocks, RowsPlace, block_bytes, pairs_in
from holdall.ray import ReplayMemory, attach
from holdall.schema import Leaf
from holdall.shared import OpenedBlocks, SharedBlock

SPACE = spaces.Dict(image=spaces.Box(0, 255, (48, 48, 3), np.uint8), state=spaces.Box(-9, 9, (3,), np.float32))
FRAMES = np.random.default_rng(0).integers(0, 256, (400, 1, 48, 48, 3), dtype=np.uint8)
LEAVES = {0: Leaf("", (48, 48, 3), np.dtype(np.uint8))}
needs_sharing = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared so on Linux alone")


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
@pytest.mark.parametrize("shards", [1, 2])
def test_a_batch_in_shared_memory_belongs_to_the_caller(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "_FROM_SHARDS", 2)  # from two, some batches come with one call
    no, numbers = np.zeros((400, 1), np.bool_), np.arange(400, dtype=np.float32)[:, None]
    with ReplayMemory(SPACE, spaces.Discrete(2), 3_000, shards=shards, seed=0) as memory:
        state = np.repeat(numbers[..., None], 3, axis=2)
        obs, next_obs = ({"image": frames, "state": state} for frames in (FRAMES, np.roll(FRAMES, 1, axis=0)))
        memory.extend(obs, no.astype(np.int64), numbers, next_obs, no, no)
        first, second = memory.sample(64), memory.sample(64)
        assert is_shared(first) == is_shared(second) == hasattr(os, "memfd_create")
        assert is_shared(first, "state") == is_shared(first)  # so that answers stay small, however many batches
        require_right(first)
        first.obs["image"][:] = 7
        first.next_obs["image"][:] = 9
        require_right(second)
        kept = [memory.sample(64) for _ in range(12)]  # as many as a caller likes
        for batch in kept:
            require_right(batch)
        del kept, first
        gc.collect()
        with memory.loader(64, prefetch=3) as loader:
            for _ in range(9):
                require_right(next(loader))
        require_right(second)
        with monkeypatch.context() as far:
            far.setattr(protocol, "this_machine", lambda: b"other")
            with attach(memory.name) as elsewhere:  # as from another machine
                require_right(elsewhere.sample(64))
                with elsewhere.loader(64, prefetch=3) as loader:
                    for _ in range(9):
                        require_right(next(loader))
        monkeypatch.setattr(answer, "_SHARED_FROM", 1 << 40)
        copied = memory.sample(65)  # of another size, so that none waits that was drawn before
        assert not is_shared(copied)
        require_right(copied)
    require_right(second)  # also when the shards are gone


@needs_sharing
def test_a_block_is_used_again_when_its_batch_is_gone_and_nobody_writes_to_it() -> None:
    blocks = BatchBlocks(LEAVES)
    taken: Any = blocks.take(64)
    pairs = taken.pairs()
    name = taken.block.place.name
    blocks.settle(taken)
    del taken
    other: Any = blocks.take(64)
    assert other.block.place.name != name  # its arrays are in use
    pairs = other.pairs()
    again: Any = blocks.take(64)
    assert again.block.place.name == name
    unanswered = other.block.place.name
    del other, pairs
    gc.collect()
    newest: Any = blocks.take(64)
    assert newest.block.place.name not in {name, unanswered}  # a shard may still write to it


def opened(shard: OpenedBlocks, place: RowsPlace) -> Any:
    return shard.memory(place.place, block_bytes(LEAVES, place.rows))


@needs_sharing
def test_what_a_shard_writes_late_does_not_reach_the_batch() -> None:
    blocks, shard = BatchBlocks(LEAVES), OpenedBlocks()
    taken: Any = blocks.take(64)
    written = pairs_in(opened(shard, taken.place(np.arange(64))), LEAVES, 64)
    written[0][0][:] = 5
    taken.is_given_up = True
    obs = taken.pairs()[0][0]
    written[0][0][:] = 6
    assert (obs == 5).all()


@needs_sharing
def test_nothing_is_written_to_what_took_a_blocks_descriptor() -> None:
    blocks = BatchBlocks(LEAVES)
    taken: Any = blocks.take(64)
    place = taken.place(np.arange(64))
    shard = OpenedBlocks()
    assert opened(shard, place._replace(place=place.place._replace(name="holdall-another"))) is None
    assert opened(shard, place._replace(rows=65)) is None  # of another size
    assert opened(shard, place._replace(place=place.place._replace(descriptor=9_999))) is None
    assert opened(shard, place) is not None
    del taken
    gc.collect()
    other: Any = blocks.take(80)
    assert opened(shard, other.place(np.arange(80))) is not None
    names = [block.name for block in shard._opened]
    assert names == [other.block.place.name]  # that of a learner that gave it up takes no more memory
    assert opened(shard, place) is None

"""Batches that shards write to memory that they share with a learner: the caller's own, as those that were copied."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from holdall import Uniform, shared
from holdall.batch import Batch
from holdall.cluster import learner, protocol
from holdall.ray import ReplayMemory, attach
from holdall.schema import Leaf
from holdall.shared import BatchBlocks, OpenedBlocks, RowsPlace, SharedBlock, block_bytes

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
        monkeypatch.setattr(shared, "_SHARED_FROM", 1 << 40)
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


class TwoShards:
    """Shard 1 is lost when it is asked for rows, and stays so; it may still write to a block that it was given."""

    patience_s, transitions = 1.0, 1_000

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.given: list[tuple[int, list[RowsPlace]]] = []

    def masses(self) -> dict[int, float]:
        return {number: 1.0 for number in (0, 1) if number not in self.lost}

    def call(self, shard: int, _method: str, _machine: bytes, _seed: int, counts: Any, blocks: Any) -> tuple[int, int]:
        self.given.append((shard, blocks))
        return shard, counts[0][0]

    def lose(self, shard: int) -> None:
        self.lost.append(shard)

    def note(self, *_: Any) -> None:
        pass

    ask_again = note


@needs_sharing
def test_what_a_shard_writes_late_does_not_reach_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = TwoShards()
    made: list[Any] = []
    blocks = BatchBlocks(LEAVES)
    deliverer: Any = SimpleNamespace(blocks=blocks, batch=lambda *given: made.append(given))

    def received(call: tuple[int, int], _patience_s: float) -> Any:
        if call[0] == 1:
            raise protocol.RestartedError("killed")
        return call

    def answered(call: tuple[int, int]) -> Any:
        answer = SimpleNamespace(counters=SimpleNamespace(mass=1.0), scaled=np.ones(call[1]), order=None)
        answer.counted_at, answer.part = None, lambda *_: answer
        return answer

    for name, stub in {"received": received, "read_answer": answered, "this_machine": lambda: b""}.items():
        monkeypatch.setattr(learner, name, stub)
    drawing = learner.Drawing(cluster, deliverer, Uniform(), np.random.default_rng(0), "degrade", seeds=False)
    (request,) = drawing.start(64)
    assert request.block is not None
    drawing.finish(request)
    ((_, where, shards, _, _, block),) = made
    assert [shard for shard, _ in cluster.given] == [0, 1, 0]
    assert (shards, sorted(where[0])) == ([0], list(range(64)))  # all of it again
    assert block is None
    assert cluster.given[-1][1] == []
    names = {place.place.name for _, places in cluster.given for place in places}
    del request
    gc.collect()
    newest: Any = blocks.take(64)
    assert newest.block.place.name not in names


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


@needs_sharing
def test_blocks_of_a_learner_that_ended_are_let_go_though_no_other_is_opened() -> None:
    ended, going_on, shard = BatchBlocks(LEAVES), BatchBlocks(LEAVES), OpenedBlocks()
    lost: Any = ended.take(64)
    kept: Any = going_on.take(64)
    place = kept.place(np.arange(64))
    assert opened(shard, lost.place(np.arange(64))) is not None
    assert opened(shard, place) is not None
    del lost, ended
    gc.collect()
    for _ in range(shared._LOOK_EVERY):
        assert opened(shard, place) is not None
    assert [block.name for block in shard._opened] == [kept.block.place.name]


@needs_sharing
def test_who_keeps_many_batches_keeps_few_files_open() -> None:
    blocks = BatchBlocks(LEAVES)
    before, kept = psutil.Process().num_fds(), []
    for _ in range(500):
        block = blocks.take(64)
        kept.append(block)
        if block is not None:
            blocks.settle(block)
    assert psutil.Process().num_fds() - before <= 2 * 64
    assert kept[-1] is None
    kept.clear()
    gc.collect()
    assert blocks.take(64) is not None

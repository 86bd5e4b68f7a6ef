"""A shard that is away for longer than a writer's patience: the writer says so, and loses nothing that it was given."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from holdall import ShardError
from holdall.ray import ReplayMemory

from ..processes import process_of, repeat, wait_until, writer_with
from .ledger import ACTION, EXTRAS, OBSERVATION, checked, step


@pytest.fixture(scope="module")
def memory(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayMemory]:
    where = tmp_path_factory.mktemp("journals")
    with ReplayMemory(
        OBSERVATION, ACTION, 10_000, shards=1, durability="segment", url=where, extras=EXTRAS, patience_s=2.0
    ) as made:
        yield made


@pytest.mark.parametrize("is_known", [False, True])
def test_what_a_writer_was_given_outlives_its_patience(is_known: bool, memory: ReplayMemory) -> None:
    shard = psutil.Process(process_of(memory._members.handle(0)))
    before = memory._members.refresh()[0].next_row
    writer = writer_with(memory, writer_patience_s=0.1)
    added = 0
    if is_known:
        writer.add(*step(0))
        repeat(writer.flush)
        added = 1
    shard.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):  # what raised is not held: it is added again, and not twice
            with pytest.raises(ShardError, match="Repeat the call"):  # noqa: PT012  which of them it is does not matter
                while added < 2_000:
                    writer.add(*step(added))
                    added += 1
    finally:
        shard.send_signal(signal.SIGCONT)
    repeat(lambda: writer.add(*step(added)))
    added += 1
    repeat(writer.flush)
    after = memory._members.refresh()[0].next_row
    numbers = checked(memory.gather(np.arange(before, after)))
    assert numbers.tolist() == list(range(added))


def is_gone(actor: Any) -> bool:
    try:
        ray.get(actor.shards.remote(-1), timeout=1.0)
    except ray.exceptions.ActorDiedError:
        return True
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        pass
    return False


@pytest.mark.nightly
def test_a_block_that_finds_no_shard_stays_with_its_writer(cluster: None) -> None:
    with ReplayMemory(OBSERVATION, ACTION, 1_000, shards=1, extras=EXTRAS, patience_s=1.0) as closed:
        writer = closed.writer()
    wait_until(lambda: is_gone(closed._fleet.roster))  # Ray ends actors by and by
    added = 0
    with pytest.raises(ShardError, match="closed"):  # noqa: PT012  which of them it is does not matter
        while added < 2_000:
            writer.add(*step(added))
            added += 1
    assert writer.waiting_rows == added

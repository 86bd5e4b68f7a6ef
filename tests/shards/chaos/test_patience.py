"""A shard that is silent for longer than a writer waits: the writer raises an error, and loses nothing."""

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

from ..processes import find_process, make_impatient_writer, repeat_until_accepted, wait_until
from .ledger import ACTION, EXTRAS, OBSERVATION, check_batch, make_step


@pytest.fixture(scope="module")
def memory(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayMemory]:
    where = tmp_path_factory.mktemp("journals")
    with ReplayMemory(
        OBSERVATION, ACTION, 10_000, shards=1, durability="segment", url=where, extras=EXTRAS, patience_s=2.0
    ) as made:
        yield made


@pytest.mark.parametrize("is_known", [False, True])
def test_a_writer_loses_nothing_when_a_shard_is_silent_for_too_long(is_known: bool, memory: ReplayMemory) -> None:
    shard = psutil.Process(find_process(memory._members.handle(0)))
    before = memory._members.refresh()[0].next_row
    writer = make_impatient_writer(memory)
    added = 0
    if is_known:
        writer.add(*make_step(0))
        repeat_until_accepted(writer.flush)
        added = 1
    shard.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):  # The transition of a call that raised is not held.
            with pytest.raises(ShardError, match="Repeat the call"):  # noqa: PT012  which of them it is does not matter
                while added < 2_000:
                    writer.add(*make_step(added))
                    added += 1
    finally:
        shard.send_signal(signal.SIGCONT)
    repeat_until_accepted(lambda: writer.add(*make_step(added)))
    added += 1
    repeat_until_accepted(writer.flush)
    after = memory._members.refresh()[0].next_row
    numbers = check_batch(memory.gather(np.arange(before, after)))
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
def test_a_writer_of_a_closed_memory_keeps_its_transitions(cluster: None) -> None:
    with ReplayMemory(OBSERVATION, ACTION, 1_000, shards=1, extras=EXTRAS, patience_s=1.0) as closed:
        writer = closed.writer()
    wait_until(lambda: is_gone(closed._fleet.roster))  # Ray ends actors in the background.
    added = 0
    with pytest.raises(ShardError, match="closed"):  # noqa: PT012  which of them it is does not matter
        while added < 2_000:
            writer.add(*make_step(added))
            added += 1
    assert writer.waiting_rows == added

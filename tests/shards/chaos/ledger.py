"""The ledger: numbered transitions, a record of those that were acknowledged, and the checks of what the shards hold.

Every field of a transition follows from its number. A feeder is a process that adds transitions. It appends the count
of acknowledged transitions to a file of its own, which survives the death of the feeder.

Invariant: an acknowledged transition is held once, any other transition at most once, and every bit is as it was added.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.cluster.ids import make_ids
from holdall.cluster.journal import open_journal
from holdall.cluster.segment import unpack_payload
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import ReplayMemory, Writer
from holdall.schema import Schema
from holdall.store.columns import Columns

Numbers = NDArray[np.int64]

OBSERVATION = spaces.Box(0, 255, (4, 12, 12), np.uint8)
ACTION = spaces.Discrete(7)
EXTRAS = {"number": spaces.Box(0, 2**62, (), np.int64)}
NUMBERS_PER_FEEDER = 1_000_000
"""A feeder adds the numbers from `feeder * NUMBERS_PER_FEEDER` on."""
_LANE = np.arange(144, dtype=np.int64).reshape(12, 12)


def make_frames(numbers: Numbers) -> NDArray[np.uint8]:
    """Return the frame of every number. Frames differ in a few pixels."""
    moving = (numbers[..., None, None] * 2_654_435_761 >> 7) * (_LANE % 13 == 0)
    shown: NDArray[np.uint8] = (moving + _LANE).astype(np.uint8)
    return shown


def make_stacks(numbers: Numbers) -> NDArray[np.uint8]:
    """Return the observation of every number: its frame, and the three that follow."""
    return make_frames(numbers[..., None] + np.arange(4))


def make_step(number: int) -> tuple[Any, ...]:
    """Return the arguments that add one transition."""
    numbers = np.array([number])
    no = np.zeros(1, np.bool_)
    ends = numbers % 50 == 49
    reward = numbers.astype(np.float64)
    return make_stacks(numbers), numbers % 7, reward, make_stacks(numbers + 1), ends, no, {"number": numbers}


def feed(
    writer: Writer, feeder: int, count: int, seed: int, ledger: Path, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Add transitions. After every flush, append the count of acknowledged transitions to the file of the feeder."""
    generator = np.random.default_rng([seed, feeder])
    page = os.open(ledger / str(feeder), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    due = added = 0
    while added < count and not is_over():
        writer.add(*make_step(feeder * NUMBERS_PER_FEEDER + added))
        added += 1
        if added >= due:
            writer.flush()
            os.write(page, f"{added}\n".encode())
            due = added + int(generator.integers(1, 80))
    writer.flush()
    os.write(page, f"{added}\n".encode())
    os.close(page)


def read_counts(ledger: Path) -> dict[int, int]:
    """Return the last count in the file of each process."""
    return {int(page.name): max(map(int, page.read_text().split()), default=0) for page in ledger.iterdir()}


def read_held(memory: ReplayMemory) -> dict[int, Numbers]:
    """Read and check all transitions that the shards hold. Return their numbers by shard."""
    found = {}
    for shard, counters in memory._members.refresh().items():
        rows = np.arange(counters.first_row, counters.next_row)
        parts = [memory.gather(make_ids(shard, some)) for some in np.array_split(rows, max(1, len(rows) // 2_000))]
        found[shard] = np.concatenate([check_batch(part) for part in parts])
    return found


def read_journal(url: Path, shard: int) -> Numbers:
    """Take over the journal of a shard. Return the numbers of its transitions in their order."""
    journal = open_journal(str(url), shard, ClusterTuning())
    columns = Columns(Schema.of(OBSERVATION, ACTION, EXTRAS, 1))
    numbers = [np.empty(0, np.int64)]
    for page in journal.open():
        for entry in page.entries:
            part = unpack_payload(entry.payload, columns).segment.parts[columns.first_extra]
            numbers.append(part.arrays()["rows"].view(np.int64))
    return np.concatenate(numbers)


def check_batch(batch: Batch, *, is_whole: bool = True) -> Numbers:
    """Compare every bit of a batch with the transitions that were added. Return their numbers.

    Args:
        is_whole: Whether no transition is truncated. A local memory that loads a checkpoint of shards marks the last
            transition of every piece of a lane as truncated.
    """
    numbers: Numbers = np.asarray(batch.extras["number"])
    assert np.array_equal(batch.obs, make_stacks(numbers))
    assert np.array_equal(batch.next_obs, make_stacks(numbers + 1))
    assert np.array_equal(batch.action, numbers % 7)
    assert np.array_equal(batch.reward, numbers.astype(np.float64))
    assert np.array_equal(batch.terminated, numbers % 50 == 49)
    assert not is_whole or not np.asarray(batch.truncated).any()
    return numbers


def check_ledger(found: dict[int, Numbers], acknowledged: dict[int, int]) -> None:
    """Check that the shards hold all acknowledged transitions, once and in order.

    Args:
        found: Numbers of the held transitions, by shard.
        acknowledged: Number of acknowledged transitions, by feeder.
    """
    everything = np.concatenate(list(found.values()))
    assert len(np.unique(everything)) == len(everything), "transitions are held twice"
    for feeder, count in acknowledged.items():
        own = everything[everything // NUMBERS_PER_FEEDER == feeder] % NUMBERS_PER_FEEDER
        lost = np.setdiff1d(np.arange(count), own)
        assert not lost.size, f"{lost.size} of {count} acknowledged transitions of feeder {feeder} are lost: {lost[:9]}"
    for shard, numbers in found.items():
        for feeder in np.unique(numbers // NUMBERS_PER_FEEDER):
            own = numbers[numbers // NUMBERS_PER_FEEDER == feeder]
            assert (np.diff(own) > 0).all(), f"shard {shard} holds the transitions of feeder {feeder} in another order"

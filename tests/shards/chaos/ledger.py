"""The ledger: transitions that tell which one they are, who was promised what, and what is held in the end.

A feeder writes down what was acknowledged in a file of its own, line by line, so that it survives the feeder's death.
Invariant to be checked: what was acknowledged is held once; what was not is held once or not at all; every bit of it is
what was added.
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
MOST_OF_ONE = 1_000_000
"""Numbers that belong to one feeder."""
_LANE = np.arange(144, dtype=np.int64).reshape(12, 12)


def frames(numbers: Numbers) -> NDArray[np.uint8]:
    """Return the frame of every number: mostly the same, and no two alike."""
    moving = (numbers[..., None, None] * 2_654_435_761 >> 7) * (_LANE % 13 == 0)
    shown: NDArray[np.uint8] = (moving + _LANE).astype(np.uint8)
    return shown


def stacks(numbers: Numbers) -> NDArray[np.uint8]:
    """Return the observation of every number: its frame, and the three that follow."""
    return frames(numbers[..., None] + np.arange(4))


def step(number: int) -> tuple[Any, ...]:
    """Return the arguments that add one transition."""
    told = np.array([number])
    no = np.zeros(1, np.bool_)
    ends = told % 50 == 49
    return stacks(told), told % 7, told.astype(np.float64), stacks(told + 1), ends, no, {"number": told}


def feed(
    writer: Writer, feeder: int, count: int, seed: int, ledger: Path, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Add transitions, and write down after every flush how many were acknowledged."""
    generator = np.random.default_rng([seed, feeder])
    page = os.open(ledger / str(feeder), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    due = added = 0
    while added < count and not is_over():
        writer.add(*step(feeder * MOST_OF_ONE + added))
        added += 1
        if added >= due:
            writer.flush()
            os.write(page, f"{added}\n".encode())
            due = added + int(generator.integers(1, 80))
    writer.flush()
    os.write(page, f"{added}\n".encode())
    os.close(page)


def read_counts(ledger: Path) -> dict[int, int]:
    """Return the last number in the file of each process: how many transitions were acknowledged, or drawn."""
    return {int(page.name): max(map(int, page.read_text().split()), default=0) for page in ledger.iterdir()}


def held(memory: ReplayMemory) -> dict[int, Numbers]:
    """Read everything that the shards hold, check its bits, and return the numbers, shard by shard."""
    found = {}
    for shard, counters in memory._members.refresh().items():
        rows = np.arange(counters.first_row, counters.next_row)
        parts = [memory.gather(make_ids(shard, some)) for some in np.array_split(rows, max(1, len(rows) // 2_000))]
        found[shard] = np.concatenate([checked(part) for part in parts])
    return found


def written(url: Path, shard: int) -> Numbers:
    """Return the numbers of everything in a shard's journal, in its order. Whoever had the journal has it no more."""
    journal = open_journal(str(url), shard, ClusterTuning())
    columns = Columns(Schema.of(OBSERVATION, ACTION, EXTRAS, 1))
    numbers = [np.empty(0, np.int64)]
    for page in journal.open():
        for entry in page.entries:
            part = unpack_payload(entry.payload, columns).segment.parts[columns.first_extra]
            numbers.append(part.arrays()["rows"].view(np.int64))
    return np.concatenate(numbers)


def checked(batch: Batch, *, is_whole: bool = True) -> Numbers:
    """Return the numbers of a batch, if every bit of it is what was added under them.

    Args:
        is_whole: Whether rows stand where they were added; a local memory marks the last row of every piece of a
            checkpoint of shards as truncated.
    """
    numbers: Numbers = np.asarray(batch.extras["number"])
    assert np.array_equal(batch.obs, stacks(numbers))
    assert np.array_equal(batch.next_obs, stacks(numbers + 1))
    assert np.array_equal(batch.action, numbers % 7)
    assert np.array_equal(batch.reward, numbers.astype(np.float64))
    assert np.array_equal(batch.terminated, numbers % 50 == 49)
    assert not is_whole or not np.asarray(batch.truncated).any()
    return numbers


def settle(found: dict[int, Numbers], promised: dict[int, int]) -> None:
    """Check that all that was promised is there, and nothing twice or out of order."""
    everything = np.concatenate(list(found.values()))
    assert len(np.unique(everything)) == len(everything), "transitions are held twice"
    for feeder, count in promised.items():
        own = everything[everything // MOST_OF_ONE == feeder] % MOST_OF_ONE
        lost = np.setdiff1d(np.arange(count), own)
        assert not lost.size, f"feeder {feeder} was promised {count} transitions, and {lost.size} are lost: {lost[:9]}"
    for shard, numbers in found.items():
        for feeder in np.unique(numbers // MOST_OF_ONE):
            own = numbers[numbers // MOST_OF_ONE == feeder]
            assert (np.diff(own) > 0).all(), f"shard {shard} holds what feeder {feeder} added in another order"

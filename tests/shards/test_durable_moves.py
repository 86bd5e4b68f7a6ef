"""Shards that are killed while they load a checkpoint, or while they are drained: every row is there once.

Slots of a journal are only ever added, each whole or not at all. So what a kill -9 leaves is its first slots, and every
moment of it can be tried: by a copy of so many.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from gymnasium import spaces

from holdall import ArgumentError, ShardError
from holdall.checkpoint import open_reader, restored_state
from holdall.cluster import shard_data as loading
from holdall.cluster.shard import Shard
from holdall.cluster.writer import SegmentStream
from holdall.errors import CheckpointError
from holdall.ray import ReplayMemory

from . import test_losses
from .processes import kill, process_of, shard_terms, wait_until
from .test_losses import ACTION, held

pytestmark = pytest.mark.usefixtures("cluster")
SPACE = spaces.Box(-np.inf, np.inf, (80,), np.float32)
"""Long enough that a shard moves it in the segments in which it came."""


def numbered(memory: Any, first: int, end: int) -> None:
    test_losses.numbered(memory, first, end, *SPACE.shape)


def slots_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.slot"))


def first_slots(source: Path, count: int, target: Path) -> Path:
    """Copy the first slots of a journal, as a kill would have left them."""
    target.mkdir(parents=True)
    for slot in slots_of(source)[:count]:
        shutil.copy(slot, target)
    return target


@pytest.fixture(scope="module")
def checkpoint(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one shard that holds the transitions 500 to 1,499."""
    place = tmp_path_factory.mktemp("checkpoint")
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, seed=1) as memory:
        numbered(memory, 0, 1_500)
        memory.save(place).result()
    return place


def loaded(place: Path, journal: Path) -> Shard:
    """Start a shard in this process, as its actor would."""
    reader = open_reader(place)
    manifest = reader.manifest(reader.numbers()[0])
    (shard,) = manifest.shards
    saved, rows = (f"{reader.url}/{shard.folder}", shard.number), restored_state(manifest, reader)["shard_rows"]
    return Shard(0, shard_terms(manifest.schema, rows, journal), None, saved=saved)


def rewards(shard: Shard) -> list[int]:
    store = shard._data.store
    found = store.rewards(np.arange(store.first_tick, store.next_tick))
    return [int(reward) for reward in found]


def test_a_checkpoint_whose_loading_was_cut_short_is_loaded_to_its_end(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SLOT_BYTES", 8_000)
    assert rewards(loaded(checkpoint, tmp_path / "whole")) == list(range(500, 1_500))
    whole = tmp_path / "whole" / "journal" / "00000"
    count = len(slots_of(whole))
    assert count > 4
    for kept in range(count + 1):
        journal = tmp_path / f"cut-{kept}"
        first_slots(whole, kept, journal / "journal" / "00000")
        for _ in range(2):  # also if it is restarted once more
            shard = loaded(checkpoint, journal)
            assert rewards(shard) == list(range(500, 1_500))
            assert shard._is_durable
            assert shard._journal.state.loading == ""


def test_half_a_checkpoint_is_not_taken_for_a_journal_nor_for_another(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SLOT_BYTES", 8_000)
    loaded(checkpoint, tmp_path / "whole")
    half = tmp_path / "half"
    first_slots(tmp_path / "whole" / "journal" / "00000", 3, half / "journal" / "00000")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    with pytest.raises(CheckpointError, match="contains a partially loaded checkpoint"):
        loaded(other, half)
    with pytest.raises(ShardError, match="contains a partially loaded checkpoint"):
        ReplayMemory(SPACE, ACTION, 1_000, shards=1, durability="segment", url=half)


@pytest.mark.nightly
def test_what_came_after_a_checkpoint_is_there_after_a_kill(checkpoint: Path, tmp_path: Path) -> None:
    with ReplayMemory.load(checkpoint, durability="segment", journal_url=tmp_path) as memory:
        numbered(memory, 1_500, 1_700)
        memory.flush()
        kill(process_of(memory._cluster.handle(0)))
        assert all_held(memory) == list(range(700, 1_700))


def all_held(memory: ReplayMemory) -> list[int]:
    """Return which transitions are held, once all shards answer."""
    wait_until(lambda: len(memory._cluster.refresh()) == memory.num_shards)
    return held(memory)


def durable(url: Path) -> ReplayMemory:
    return ReplayMemory(SPACE, ACTION, 40_000, shards=2, durability="segment", url=url, seed=1, patience_s=60)


def during(memory: ReplayMemory, method: str, turn: int, do: Callable[[], None]) -> None:
    """Have something done once, right before the drain makes a call for the so-manieth time."""
    fleet, calls = memory._fleet, [0]
    ask = fleet._ask

    def asked(actor: Any, called: str, *arguments: Any) -> Any:
        calls[0] += called == method
        if called == method and calls[0] == turn:
            do()
        return ask(actor, called, *arguments)

    vars(fleet)["_ask"] = asked  # so that it happens at the same place every time


@pytest.mark.parametrize(
    ("method", "turn", "victim"),
    [
        ("oldest", 3, 0),
        pytest.param("give_up", 2, 0, marks=pytest.mark.nightly),
        pytest.param("close_to_writers", 1, 0, marks=pytest.mark.nightly),
        pytest.param("give_up", 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_drain_goes_on_over_the_death_of_either_shard(method: str, turn: int, victim: int, tmp_path: Path) -> None:
    with durable(tmp_path) as memory:
        numbered(memory, 0, 1_200)
        memory.flush()
        during(memory, method, turn, lambda: kill(process_of(memory._cluster.handle(victim))))
        memory.drain_shard(0)
        assert memory.num_shards == 1
        assert all_held(memory) == list(range(1_200))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_a_drain_goes_on_over_kills_at_any_moment(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    with durable(tmp_path) as memory:
        numbered(memory, 0, 6_000)
        memory.flush()
        actors = [memory._cluster.handle(number) for number in (0, 1)]
        timers = []
        for victim in generator.permutation(2).tolist():
            process = psutil.Process(process_of(actors[victim]))
            timers.append(threading.Timer(float(generator.uniform(0, 0.5)), process.kill))
        for timer in timers:
            timer.start()
        memory.drain_shard(0)
        for timer in timers:
            timer.join()
        assert all_held(memory) == list(range(6_000))


@pytest.mark.nightly
def test_a_shard_that_was_restarted_while_it_is_drained_stays_closed(tmp_path: Path) -> None:
    with durable(tmp_path) as memory:
        numbered(memory, 0, 300)
        memory.flush()
        actor = memory._cluster.handle(0)
        ray.get(actor.close_to_writers.remote())
        kill(process_of(actor))
        all_held(memory)
        writer = memory.writer()
        numbered(writer, 300, 1_300)
        writer.flush()  # what it does not take goes to the other
        assert held(memory) == list(range(1_300))
        assert memory.shards()[1].counters.transitions > 1_000  # type: ignore[union-attr]  # it answers


@pytest.mark.nightly
@pytest.mark.parametrize("arrived", [False, True])
def test_a_memory_that_ended_in_the_middle_of_a_drain_has_every_row_once(arrived: bool, tmp_path: Path) -> None:
    with durable(tmp_path) as memory:
        numbered(memory, 0, 1_200)
        memory.flush()
        actor = memory._cluster.handle(0)
        ray.get(actor.close_to_writers.remote())
        payload, rows, first_row, end = ray.get(actor.oldest.remote())
        stream = SegmentStream(memory._cluster.handle(1), 1, b"m" * 16, 60.0)
        ray.get(actor.give_up.remote(first_row, end, 1, b"m" * 16, stream.sequence))
        if arrived:
            stream.send(payload, rows)
            stream.flush()
    with durable(tmp_path) as again:
        assert held(again) == list(range(1_200))
        numbered(again, 1_200, 1_300)  # the shard takes blocks again
        again.flush()
        kill(process_of(again._cluster.handle(0)))
        assert all_held(again) == list(range(1_300))


@pytest.mark.nightly
def test_journals_of_more_shards_are_not_left_out_unnoticed(tmp_path: Path) -> None:
    with durable(tmp_path) as memory:
        added = memory.add_shard()
        numbered(memory, 0, 2_000)
        memory.flush()
        assert all_held(memory) == list(range(2_000))
    with pytest.raises(ArgumentError, match=rf"leaves out \[{added}\].*shards=3"):
        durable(tmp_path)
    with ReplayMemory(SPACE, ACTION, 60_000, shards=3, durability="segment", url=tmp_path) as memory:
        assert all_held(memory) == list(range(2_000))
        memory.drain_shard(0)  # what is left of it is one that does not count
        memory.drain_shard(added)
    with durable(tmp_path) as memory:
        assert all_held(memory) == list(range(2_000))

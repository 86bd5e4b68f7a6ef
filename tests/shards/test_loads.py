"""Shards that are killed while they load a checkpoint: every row is there once.

Slots of a journal are only ever added, each whole or not at all. So a kill -9 leaves the first slots of a journal, and
a copy of so many of them shows every moment at which it may come.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall.checkpoint
from holdall import ArgumentError, ShardError
from holdall.checkpoint import open_reader, read_saved_state
from holdall.cluster.ids import first_row_of_life
from holdall.cluster.journal import open_journal
from holdall.cluster.shard import Shard
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import CheckpointError
from holdall.ray import ReplayMemory
from holdall.sampling import Uniform
from holdall.schema import Schema

from . import test_losses
from .desk import Desk
from .processes import kill, process_of, shard_config, wait_until
from .test_losses import ACTION, held

pytestmark = pytest.mark.usefixtures("cluster")
SPACE = spaces.Box(-np.inf, np.inf, (80,), np.float32)


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
    saved = (f"{reader.url}/{shard.folder}", shard.number)
    rows = read_saved_state(manifest, reader)["shard_rows"]
    return Shard(0, shard_config(manifest.schema, rows, journal, slot_bytes=500), None, saved=saved)


def rewards(shard: Shard) -> list[int]:
    view = shard._data.store.view()
    return [int(reward) for reward in view.rewards(np.arange(view.first_id, view.next_id))]


@pytest.mark.nightly
def test_a_checkpoint_whose_loading_was_cut_short_is_loaded_to_its_end(checkpoint: Path, tmp_path: Path) -> None:
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
            assert shard._journal is not None
            assert shard._journal.state.loading == ""


def test_half_a_checkpoint_is_not_taken_for_a_journal_nor_for_another(checkpoint: Path, tmp_path: Path) -> None:
    loaded(checkpoint, tmp_path / "whole")
    half = tmp_path / "half"
    first_slots(tmp_path / "whole" / "journal" / "00000", 3, half / "journal" / "00000")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    with pytest.raises(CheckpointError, match="contains a partially loaded checkpoint"):
        loaded(other, half)
    with pytest.raises(ShardError, match="contains a partially loaded checkpoint"):
        ReplayMemory(SPACE, ACTION, 1_000, shards=1, durability="segment", url=half)


def test_a_restarted_shard_counts_transitions_without_the_number_of_their_life(tmp_path: Path) -> None:
    """The limiter would otherwise wait for billions of draws."""
    tuning = ClusterTuning()
    saved = Desk(Schema.of(SPACE, ACTION, None, 1), Uniform(), 1_000, seed=0)
    saved.shard.start_at(first_row_of_life(3))
    for number in range(100):
        row = np.zeros((1, 80), np.float32)
        no = np.zeros(1, np.bool_)
        saved.add(row, np.zeros(1, np.int64), np.array([number], np.float64), row, no, no)
    saved.send()
    journal = open_journal(str(tmp_path), 0, tuning)
    assert list(journal.open()) == []
    saved.shard.write_loaded(journal, "place:1", 0)
    restarted = Desk(Schema.of(SPACE, ACTION, None, 1), Uniform(), 1_000, seed=0).shard
    restarted.replay(open_journal(str(tmp_path), 0, tuning), retries=False)
    assert restarted.rows == saved.shard.rows
    assert restarted.inserted == saved.shard.inserted == 100


@pytest.mark.nightly
def test_what_came_after_a_checkpoint_is_there_after_a_kill(checkpoint: Path, tmp_path: Path) -> None:
    with ReplayMemory.load(checkpoint, durability="segment", journal_url=tmp_path) as memory:
        numbered(memory, 1_500, 1_700)
        memory.flush()
        kill(process_of(memory._members.handle(0)))
        assert all_held(memory) == list(range(700, 1_700))


@pytest.mark.nightly
def test_a_checkpoint_that_is_removed_while_shards_start_is_replaced_by_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_saved_state
    with ReplayMemory(SPACE, ACTION, 2_000, shards=1) as memory:
        numbered(memory, 0, 300)
        memory.save(tmp_path, keep=1).result()

        def replace_and_read(*arguments: Any) -> dict[str, Any]:
            monkeypatch.undo()
            state = read(*arguments)
            for first in (300, 600):  # Shards keep one checkpoint more than the memory.
                numbered(memory, first, first + 300)
                memory.save(tmp_path, keep=1).result()
            return state

        monkeypatch.setattr(holdall.checkpoint, "read_saved_state", replace_and_read)
        with ReplayMemory.load(tmp_path) as loaded:
            assert held(loaded) == list(range(900))


def all_held(memory: ReplayMemory) -> list[int]:
    """Return which transitions are held, once all shards answer."""
    wait_until(lambda: len(memory._members.refresh()) == memory.num_shards)
    return held(memory)


@pytest.mark.nightly
def test_journals_of_more_shards_are_not_left_out_unnoticed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path, "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings) as memory:
        added = memory.add_shard()
        numbered(memory, 0, 2_000)
        memory.flush()
        assert all_held(memory) == list(range(2_000))
    with pytest.raises(ArgumentError, match=rf"leaves out shards \[{added}\].*shards=3"):
        ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings)
    with ReplayMemory(SPACE, ACTION, 60_000, shards=3, **settings) as memory:
        assert all_held(memory) == list(range(2_000))

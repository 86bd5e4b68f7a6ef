"""Loading a checkpoint into shards, also if they are killed meanwhile: every transition is held once.

A slot of a journal is written completely or not at all. So kill -9 leaves the first slots of a journal, and a copy of
the first `count` slots is the journal after a kill at some moment.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces

import holdall.checkpoint
from holdall import ArgumentError, ShardError
from holdall.checkpoint import open_reader, read_saved_state
from holdall.cluster.ids import first_row_of_life
from holdall.cluster.journal import open_journal
from holdall.cluster.shard import SavedShard, Shard
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import CheckpointError
from holdall.ray import ReplayMemory, attach
from holdall.sampling import Uniform
from holdall.schema import Schema

from . import test_losses
from .desk import Desk
from .processes import find_process, kill, make_config, wait_until
from .test_losses import ACTION, read_numbers

pytestmark = pytest.mark.usefixtures("cluster")
SPACE = spaces.Box(-np.inf, np.inf, (80,), np.float32)


def add_numbered(memory: Any, first: int, end: int) -> None:
    test_losses.add_numbered(memory, first, end, *SPACE.shape)


def list_slots(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.slot"))


def copy_first_slots(source: Path, count: int, target: Path) -> Path:
    """Copy the first `count` slots of a journal, as a kill would have left them."""
    target.mkdir(parents=True)
    for slot in list_slots(source)[:count]:
        shutil.copy(slot, target)
    return target


@pytest.fixture(scope="module")
def checkpoint(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one shard with the transitions 500 to 1,499."""
    place = tmp_path_factory.mktemp("checkpoint")
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, seed=1) as memory:
        add_numbered(memory, 0, 1_500)
        memory.save(place).result()
    return place


def load_shard(place: Path, journal: Path) -> Shard:
    """Start a shard in this process, as its actor would."""
    reader = open_reader(place)
    manifest = reader.manifest(reader.numbers()[0])
    (shard,) = manifest.shards
    saved = SavedShard(f"{reader.url}/{shard.folder}", shard.number)
    rows = read_saved_state(manifest, reader)["shard_rows"]
    return Shard(0, make_config(manifest.schema, rows, journal, slot_bytes=500), None, saved=saved)


def read_rewards(shard: Shard) -> list[int]:
    view = shard._data.store.view()
    return [int(reward) for reward in view.rewards(np.arange(view.first_id, view.next_id))]


@pytest.mark.nightly
def test_an_interrupted_load_is_completed_at_the_next_start(checkpoint: Path, tmp_path: Path) -> None:
    assert read_rewards(load_shard(checkpoint, tmp_path / "whole")) == list(range(500, 1_500))
    whole = tmp_path / "whole" / "journal" / "00000"
    count = len(list_slots(whole))
    assert count > 4
    for kept in range(count + 1):
        journal = tmp_path / f"cut-{kept}"
        copy_first_slots(whole, kept, journal / "journal" / "00000")
        for _ in range(2):  # The second start finds a complete journal.
            shard = load_shard(checkpoint, journal)
            assert read_rewards(shard) == list(range(500, 1_500))
            assert shard._journal is not None
            assert shard._journal.state.loading == ""


def test_a_part_of_a_checkpoint_is_not_used_as_a_journal(checkpoint: Path, tmp_path: Path) -> None:
    load_shard(checkpoint, tmp_path / "whole")
    half = tmp_path / "half"
    copy_first_slots(tmp_path / "whole" / "journal" / "00000", 3, half / "journal" / "00000")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    with pytest.raises(CheckpointError, match="contains a partially loaded checkpoint"):
        load_shard(other, half)
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
def test_transitions_added_after_a_load_outlive_a_kill(checkpoint: Path, tmp_path: Path) -> None:
    with ReplayMemory.load(checkpoint, durability="segment", journal_url=tmp_path) as memory:
        add_numbered(memory, 1_500, 1_700)
        memory.flush()
        kill(find_process(memory._members.handle(0)))
        assert wait_and_read_numbers(memory) == list(range(700, 1_700))


@pytest.mark.nightly
def test_a_checkpoint_that_is_removed_while_shards_start_is_replaced_by_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_saved_state
    with ReplayMemory(SPACE, ACTION, 2_000, shards=1) as memory:
        add_numbered(memory, 0, 300)
        memory.save(tmp_path, keep=1).result()

        def replace_and_read(*arguments: Any) -> dict[str, Any]:
            monkeypatch.undo()
            state = read(*arguments)
            for first in (300, 600):  # Shards keep one checkpoint more than the memory.
                add_numbered(memory, first, first + 300)
                memory.save(tmp_path, keep=1).result()
            return state

        monkeypatch.setattr(holdall.checkpoint, "read_saved_state", replace_and_read)
        with ReplayMemory.load(tmp_path) as loaded:
            assert read_numbers(loaded) == list(range(900))


@pytest.mark.parametrize(
    ("keep", "transitions"),
    [
        pytest.param(3, 100, id="the checkpoint stays"),
        pytest.param(1, 200, id="the save removes the checkpoint"),
    ],
)
def test_a_save_during_a_load_into_other_shards_does_not_mix_two_checkpoints(
    keep: int, transitions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_saved_state
    with holdall.ReplayMemory(SPACE, ACTION, 1_000) as memory:
        add_numbered(memory, 0, 100)
        memory.save(tmp_path).result()

        def read_and_save(*arguments: Any) -> dict[str, Any]:
            monkeypatch.undo()
            state = read(*arguments)
            add_numbered(memory, 100, 200)
            memory.save(tmp_path, keep=keep).result()
            return state

        monkeypatch.setattr(holdall.checkpoint, "read_saved_state", read_and_save)
        with ReplayMemory.load(tmp_path, shards=1) as loaded:
            assert read_numbers(loaded) == list(range(transitions))


def test_a_checkpoint_is_not_added_to_journals_a_second_time(tmp_path: Path) -> None:
    journals: dict[str, Any] = {"durability": "segment", "patience_s": 60.0}
    with holdall.ReplayMemory(SPACE, ACTION, 1_000) as memory:
        add_numbered(memory, 0, 100)
        memory.save(tmp_path / "saved").result()
    load = partial(ReplayMemory.load, tmp_path / "saved", shards=1, journal_url=tmp_path / "journals", **journals)
    with load() as loaded:
        assert read_numbers(loaded) == list(range(100))
    with pytest.raises(ArgumentError, match=r"^journal_url .* has journals already"):
        load()
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, url=tmp_path / "journals", **journals) as again:
        assert read_numbers(again) == list(range(100))


def test_a_loaded_memory_has_its_name_and_reserves_its_resources(checkpoint: Path) -> None:
    settings: dict[str, Any] = {"name": "loaded", "placement": "pack", "resources": {"num_cpus": 1.0}}
    with ReplayMemory.load(checkpoint, **settings), attach("loaded") as handle:
        assert len(handle) == 1_000
        wait_until(lambda: ray.available_resources().get("CPU", 0.0) == ray.cluster_resources()["CPU"] - 1.0)


def wait_and_read_numbers(memory: ReplayMemory) -> list[int]:
    """Return the numbers of all held transitions, once all shards answer."""
    wait_until(lambda: len(memory._members.refresh()) == memory.num_shards)
    return read_numbers(memory)


@pytest.mark.nightly
def test_a_memory_with_fewer_shards_than_journals_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path, "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings) as memory:
        added = memory.add_shard()
        add_numbered(memory, 0, 2_000)
        memory.flush()
        assert wait_and_read_numbers(memory) == list(range(2_000))
    with pytest.raises(ArgumentError, match=rf"leaves out shards \[{added}\].*shards=3"):
        ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings)
    with ReplayMemory(SPACE, ACTION, 60_000, shards=3, **settings) as memory:
        assert wait_and_read_numbers(memory) == list(range(2_000))

"""Memories over shards: every shard saves like any memory, and one manifest names the checkpoints of all shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ArgumentError, CheckpointError, NStep, Prioritized, ReplayMemory
from holdall.checkpoint import (
    Checkpoint,
    MemorySnapshot,
    SaveHandle,
    Savers,
    ShardsSnapshot,
    Streams,
    collect_all,
    find_damage,
    load_newest,
    open_reader,
    read_saved_state,
    runs_of,
    runs_state,
    shard_url,
)
from holdall.errors import DamageError
from holdall.sampling import WriterRun, get_generator_state
from holdall.schema import Schema
from holdall.schema_json import schema_to_json

SPACE = spaces.Dict({"image": spaces.Box(0, 255, (4, 40, 40), np.uint8), "at": spaces.Box(-9, 9, (2,), np.float32)})
ACTIONS = spaces.Discrete(99)
LANES = 2
TICKS = 12


def make_observation(lane: int, tick: int) -> dict[str, Any]:
    frames = [np.full((40, 40), (7 * lane + max(0, tick - back)) % 256, np.uint8) for back in (3, 2, 1, 0)]
    return {"image": np.stack(frames), "at": np.array([lane, tick], np.float32)}


class ShardOfOneLane:
    """The parts of a shard that matter for checkpoints: a memory of one lane, and the runs of rows of each writer."""

    def __init__(self, url: str | Path, number: int, capacity: int = 1000) -> None:
        self.memory = ReplayMemory(SPACE, ACTIONS, capacity, seed=number)
        self.url = shard_url(url, number)
        self.savers = Savers()
        self.runs: list[WriterRun] = []

    def insert(self, writer: int, first_tick: int, ticks: int) -> None:
        """Add ticks of a writer with two lanes. `at` has the number of the writer's lane."""
        row = self.memory.next_id
        self.runs.append(WriterRun(f"w{writer}", first_tick, LANES, row, ticks * LANES))
        for tick in range(first_tick, first_tick + ticks):
            for lane in range(LANES):
                stream = LANES * writer + lane
                obs = make_observation(stream, tick)
                after = make_observation(stream, tick + 1)
                batched = [{key: value[None] for key, value in one.items()} for one in (obs, after)]
                ended = np.array([tick % 7 == 6])
                reward = np.array([1000 * stream + tick], np.float32)
                self.memory.add(batched[0], np.array([tick]), reward, batched[1], ended, np.array([False]))

    def save(self) -> SaveHandle:
        held = [run for run in self.runs if run.first_row + run.rows > self.memory.first_id]
        state = {
            "sampler": {"kind": "Uniform", "settings": {}, "state": {}},
            "generator": get_generator_state(self.memory.batch_source.generator),
            "runs": runs_state(held),
        }
        words = schema_to_json(self.memory.schema)

        def take() -> MemorySnapshot:
            return MemorySnapshot(self.memory.store.snapshot(), words, self.memory.capacity, state)

        return self.savers.save(take, self.url, keep=None)

    def close(self) -> None:
        self.savers.close()
        self.memory.close()


class MemoryOfShards:
    """Shards, and a learner that saves them."""

    def __init__(self, url: str | Path, shards: int, sampler: str = "Uniform") -> None:
        self.url = url
        self.shards = {number: ShardOfOneLane(url, number) for number in range(shards)}
        self.savers = Savers()
        self._sampler = sampler

    def save(self, keep: int = 3, wait: Callable[[Mapping[int, SaveHandle]], Any] | None = None) -> SaveHandle:
        handles = {number: shard.save() for number, shard in self.shards.items()}

        def wait_for_shards() -> dict[int, Checkpoint]:
            if wait is not None:
                wait(handles)
            return {number: handle.result() for number, handle in handles.items()}

        schema = Schema.of(SPACE, ACTIONS, None, LANES)
        state = {
            "generator": get_generator_state(np.random.default_rng(5)),
            "sampler": {"kind": self._sampler, "settings": {}},
        }
        snapshot = ShardsSnapshot(schema_to_json(schema), 500, state, wait_for_shards)
        return self.savers.save(lambda: snapshot, self.url, {"a": b"b"}, keep)

    def close(self) -> None:
        self.savers.close()
        for shard in self.shards.values():
            shard.close()


def fill_shards(url: str | Path, shards: int = 3, sampler: str = "Uniform") -> MemoryOfShards:
    """Return shards with the steps of two writers, which change the shard every few ticks."""
    memory = MemoryOfShards(url, shards, sampler)
    for first in range(0, 3 * TICKS, TICKS):
        for writer in range(2):
            memory.shards[(first // TICKS + writer) % shards].insert(writer, first, TICKS)
    return memory


def check_rows(memory: ReplayMemory) -> dict[int, int]:
    """Check every transition. Return a dictionary from rewards to ids."""
    ids = np.arange(memory.first_id, memory.next_id)
    ids = ids[memory.are_valid(ids)]
    batch = memory.gather(ids)
    for row, (stream, tick) in enumerate(batch.obs["at"].astype(int).tolist()):
        expected = make_observation(stream, tick)
        after = make_observation(stream, tick + 1)
        for key in SPACE:
            assert np.array_equal(batch.obs[key][row], expected[key])
            assert np.array_equal(batch.next_obs[key][row], after[key])
        assert batch.reward[row] == 1000 * stream + tick
        assert batch.action[row] == tick
        assert batch.terminated[row] == (tick % 7 == 6)
    found = {int(reward): int(one) for reward, one in zip(batch.reward, ids, strict=True)}
    assert len(found) == len(ids)
    return found


@pytest.mark.parametrize("num_envs", [None, 1, 3, 5])
def test_shards_load_as_one_memory(tmp_path: Path, num_envs: int | None) -> None:
    """Every transition is loaded once. The steps of a writer's lane keep their order."""
    saved = fill_shards(tmp_path)
    saved.save().result()
    saved.close()
    with ReplayMemory.load(tmp_path, num_envs=num_envs) as memory:
        lanes = LANES if num_envs is None else num_envs
        assert memory.num_envs == lanes
        assert memory.capacity >= 500 * LANES - lanes
        assert memory.attached["a"] == b"b"
        ids = check_rows(memory)
        assert len(memory) == len(ids) == 2 * LANES * 3 * TICKS
        cuts = 0
        for stream in range(2 * LANES):
            for tick in range(3 * TICKS - 1):
                here = ids[1000 * stream + tick]
                after = ids[1000 * stream + tick + 1]
                if after != here + lanes:
                    cuts += 1
                    assert memory.gather([here]).truncated[0] or memory.gather([here]).terminated[0]
        assert cuts <= lanes
        memory.sample(10)
        memory.save(tmp_path / "local").result()


def test_returns_stay_within_a_writers_lane(tmp_path: Path) -> None:
    """In the new lane, a step is followed by the next step of the same writer, or by an end."""
    saved = fill_shards(tmp_path)
    saved.save().result()
    saved.close()
    with ReplayMemory.load(tmp_path, sampler=NStep(3, 1.0)) as memory:
        batch = memory.sample(140)
        first = batch.obs["at"]
        last = batch.next_obs["at"]
        assert (first[:, 0] == last[:, 0]).all()
        assert ((last - first)[:, 1] <= 3).all()
        assert ((last - first)[:, 1] >= 1).all()


def test_a_smaller_capacity_keeps_the_newest_rows_of_every_shard(tmp_path: Path) -> None:
    saved = fill_shards(tmp_path, shards=1)
    saved.save().result()
    saved.close()
    with ReplayMemory.load(tmp_path, capacity=40) as memory:
        assert len(memory) == 40
        assert min(reward % 1000 for reward in check_rows(memory)) >= 3 * TICKS - 12


def test_a_sampler_with_state_must_be_passed_to_load(tmp_path: Path) -> None:
    saved = fill_shards(tmp_path, sampler="Prioritized")
    saved.save().result()
    saved.close()
    with pytest.raises(ArgumentError, match="sampler was not given"):
        ReplayMemory.load(tmp_path)
    with ReplayMemory.load(tmp_path, sampler=Prioritized()) as memory:
        assert (memory.sample(20).weights == 1).all()


def test_overlapping_saves_are_all_whole(tmp_path: Path) -> None:
    """Several saves run at the same time."""
    memory = fill_shards(tmp_path)
    handles = []
    for first in range(3 * TICKS, 8 * TICKS, TICKS):
        memory.shards[0].insert(0, first, TICKS)
        handles.append(memory.save(keep=2, wait=lambda begun: [handle.result() for handle in begun.values()]))
    for handle in handles:
        assert handle.result().number
    memory.close()
    reader = open_reader(tmp_path)
    assert reader.numbers() == [5, 4]
    for number in reader.numbers():
        assert not find_damage(reader, reader.manifest(number))
    with ReplayMemory.load(tmp_path) as loaded:
        check_rows(loaded)


def test_shards_are_saved_to_an_object_store_and_loaded(url: str) -> None:
    """The saves overlap, and old checkpoints are removed."""
    memory = fill_shards(url)
    handles = []
    for first in range(3 * TICKS, 6 * TICKS, TICKS):
        memory.shards[0].insert(0, first, TICKS)
        handles.append(memory.save(keep=2))
    for handle in handles:
        handle.result()
    memory.close()
    reader = open_reader(url)
    assert reader.numbers() == [3, 2]
    assert not find_damage(reader, reader.manifest(3))
    collect_all(reader, 1)
    assert open_reader(shard_url(url, 0)).numbers() == [3]
    with ReplayMemory.load(url) as loaded:
        assert len(check_rows(loaded)) == LANES * 9 * TICKS


def test_no_collection_removes_files_that_a_manifest_names(tmp_path: Path) -> None:
    """The rule holds for a collection of one shard, too."""
    memory = fill_shards(tmp_path)
    for first in range(3 * TICKS, 6 * TICKS, TICKS):
        memory.shards[1].insert(0, first, TICKS)
        memory.save().result()
    memory.close()
    below = open_reader(shard_url(tmp_path, 1))
    collect_all(below, 1)
    assert below.numbers() == [3, 2, 1]
    assert collect_all(open_reader(tmp_path), 1) > 0
    assert open_reader(tmp_path).numbers() == [3]
    assert open_reader(shard_url(tmp_path, 1)).numbers() == [3]
    with ReplayMemory.load(tmp_path) as loaded:
        check_rows(loaded)


@pytest.mark.parametrize("what", ["manifests/0000000000000002.json", "segments"])
def test_an_older_checkpoint_is_loaded_if_a_shard_lacks_a_file(tmp_path: Path, what: str) -> None:
    """It is the newest checkpoint of which every shard is whole."""
    memory = fill_shards(tmp_path)
    memory.save().result()
    before = set((tmp_path / "shards/00002/segments").iterdir())
    memory.shards[2].insert(0, 3 * TICKS, TICKS)
    memory.save().result()
    memory.close()
    broken = tmp_path / "shards/00002" / what
    gone = [broken] if broken.is_file() else sorted(set(broken.iterdir()) - before)
    for file in gone:
        file.unlink()
    with ReplayMemory.load(tmp_path) as loaded:
        assert len(check_rows(loaded)) == 2 * LANES * 3 * TICKS


def test_a_save_that_fails_in_a_shard_makes_no_checkpoint(tmp_path: Path) -> None:
    """The previous checkpoint stays the newest one."""
    memory = fill_shards(tmp_path)
    memory.save().result()

    def fail(_handles: Mapping[int, SaveHandle]) -> None:
        raise CheckpointError("shard 1 is gone")

    with pytest.raises(CheckpointError, match="shard 1 is gone"):
        memory.save(wait=fail).result()
    memory.save().result()
    memory.close()
    assert open_reader(tmp_path).numbers() == [2, 1]


def test_the_generator_and_sampler_of_the_learner_are_loaded(tmp_path: Path) -> None:
    memory = fill_shards(tmp_path)
    memory.save().result()
    memory.close()
    reader = open_reader(tmp_path)
    state = load_newest(reader, lambda manifest: read_saved_state(manifest, reader))
    assert state["sampler"]["kind"] == "Uniform"
    with ReplayMemory.load(tmp_path) as one, ReplayMemory.load(tmp_path) as other:
        assert np.array_equal(one.sample(9).ids, other.sample(9).ids)


def test_evicted_rows_are_in_no_stream() -> None:
    """A run begins after its evicted rows, and no other run continues into it."""
    runs = [WriterRun("w", 0, 2, 10, 8), WriterRun("w", 4, 2, 18, 8), WriterRun("v", -1, 1, 26, 3)]
    streams = Streams.of_shards([(13, 29, runs_of(runs_state(runs)))])
    assert len(streams) == 16
    runs_of_ids = zip(streams.first_id, streams.stride, streams.count, strict=True)
    ids = [first + stride * step for first, stride, count in runs_of_ids for step in range(count)]
    assert sorted(ids) == list(range(13, 29))
    with pytest.raises(DamageError):
        Streams.of_shards([(13, 30, runs)])
    with pytest.raises(DamageError):
        runs_of(runs_state([runs[0], runs[2]]))

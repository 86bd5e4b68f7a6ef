"""Loading into another number of lanes: every transition is held, and no stream continues in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ArgumentError, NStep, Prioritized, ReplayMemory, Uniform
from holdall.checkpoint.streams import LaneLayout, Streams

SPACE = spaces.Dict({"image": spaces.Box(0, 255, (4, 40, 40), np.uint8), "at": spaces.Box(-9, 9, (2,), np.float32)})


def observation(lane: int, tick: int) -> dict[str, Any]:
    frames = [np.full((40, 40), (7 * lane + max(0, tick - back)) % 256, np.uint8) for back in (3, 2, 1, 0)]
    return {"image": np.stack(frames), "at": np.array([lane, tick], np.float32)}


def save_memory(path: Path, lanes: int, ticks: int, capacity: int = 10_000, **settings: Any) -> None:
    """Save a memory whose rewards are 1,000 times the lane, plus the tick."""
    with ReplayMemory(SPACE, spaces.Discrete(99), capacity, lanes, seed=1, budget=None, **settings) as memory:
        for tick in range(ticks):
            obs, after = ([observation(lane, t) for lane in range(lanes)] for t in (tick, tick + 1))
            reward = np.array([1000 * lane + tick for lane in range(lanes)], np.float32)
            ended = np.array([(tick + lane) % 11 == 10 for lane in range(lanes)])
            valid = np.array([(tick + lane) % 11 != 0 or tick == 0 for lane in range(lanes)])
            stacked = [{key: np.stack([one[key] for one in each]) for key in SPACE} for each in (obs, after)]
            action = np.arange(lanes) + tick % 7
            memory.add(stacked[0], action, reward, stacked[1], ended, np.zeros(lanes, np.bool_), valid=valid)
        if memory.sampler.__class__ is Prioritized:
            memory.sample(4)
        memory.save(path, attach={"agent": b"weights"}).result()


@pytest.mark.parametrize(("lanes", "new_lanes"), [(4, 1), (4, 2), (1, 4), (3, 2), (2, 3), (6, 4)])
def test_every_transition_is_held_once_and_unchanged(tmp_path: Path, lanes: int, new_lanes: int) -> None:
    """Bit for bit, except the flag where a stream was cut. Entries added with `valid=False` stay invalid."""
    save_memory(tmp_path, lanes, 101)
    with ReplayMemory.load(tmp_path, num_envs=new_lanes) as memory, ReplayMemory.load(tmp_path) as old:
        assert memory.num_envs == new_lanes
        assert len(memory) == len(old)
        assert memory.attached["agent"] == b"weights"
        ids = np.arange(memory.first_id, memory.next_id)
        mine = memory.gather(ids[memory.are_valid(ids)])
        ids = np.arange(old.first_id, old.next_id)
        theirs = old.gather(ids[old.are_valid(ids)])
        order = np.argsort(mine.reward)
        expected = np.argsort(theirs.reward)
        for key in SPACE:
            assert np.array_equal(mine.obs[key][order], theirs.obs[key][expected])
            assert np.array_equal(mine.next_obs[key][order], theirs.next_obs[key][expected])
        for name in ("action", "reward", "terminated"):
            assert np.array_equal(getattr(mine, name)[order], getattr(theirs, name)[expected])
        cut = mine.truncated[order] & ~theirs.truncated[expected]
        assert 0 < cut.sum() <= lanes * new_lanes
        memory.add(
            {key: np.zeros((new_lanes, *space.shape), space.dtype) for key, space in SPACE.items() if space.shape},
            np.zeros(new_lanes, np.int64),
            np.zeros(new_lanes, np.float32),
            {key: np.zeros((new_lanes, *space.shape), space.dtype) for key, space in SPACE.items() if space.shape},
            np.zeros(new_lanes, np.bool_),
            np.zeros(new_lanes, np.bool_),
        )


@pytest.mark.parametrize(("lanes", "new_lanes"), [(4, 1), (2, 3)])
def test_returns_of_several_steps_stay_within_a_stream(tmp_path: Path, lanes: int, new_lanes: int) -> None:
    """The next step in a new lane may belong to another time."""
    save_memory(tmp_path, lanes, 60)
    with ReplayMemory.load(tmp_path, num_envs=new_lanes, sampler=NStep(3, 1.0)) as memory:
        batch = memory.sample(100)
        first = batch.obs["at"]
        last = batch.next_obs["at"]
        assert (first[:, 0] == last[:, 0]).all()
        assert (last[:, 1] - first[:, 1] <= 3).all()
        assert (last[:, 1] > first[:, 1]).all()


def test_a_smaller_memory_keeps_the_newest_transitions(tmp_path: Path) -> None:
    save_memory(tmp_path, 4, 100)
    with ReplayMemory.load(tmp_path, capacity=120, num_envs=2) as memory:
        assert memory.capacity == 120
        ids = np.arange(memory.first_id, memory.next_id)
        assert (memory.gather(ids[memory.are_valid(ids)]).reward % 1000 >= 70).all()


def test_priorities_of_other_lanes_are_refused_and_a_new_sampler_is_accepted(tmp_path: Path) -> None:
    save_memory(tmp_path, 2, 30, sampler=Prioritized())
    with pytest.raises(ArgumentError, match="sampler was not given"):
        ReplayMemory.load(tmp_path, num_envs=1)
    with ReplayMemory.load(tmp_path, num_envs=1, sampler=Prioritized()) as memory:
        assert (memory.sample(20).weights == 1).all()
    with ReplayMemory.load(tmp_path, num_envs=1, sampler=Uniform()) as memory:
        assert len(memory.sample(20)) == 20


@pytest.mark.parametrize("num_envs", [0, -1, True, 1.5, "two"])
def test_wrong_lanes_are_refused_before_anything_is_read(tmp_path: Path, num_envs: Any) -> None:
    with pytest.raises(ArgumentError, match="num_envs"):
        ReplayMemory.load(tmp_path, num_envs=num_envs)


@pytest.mark.parametrize("lanes", range(1, 7))
@pytest.mark.parametrize("new_lanes", range(1, 7))
def test_a_layout_has_every_id_once_and_in_order(lanes: int, new_lanes: int) -> None:
    for first, end in ((0, 1), (3, 10), (5, 305)):
        layout = LaneLayout(Streams.of_lanes(first * lanes, end * lanes, lanes), new_lanes)
        ids = []
        last: dict[int, int] = {}
        for start in range(0, layout.ticks, 64):
            part = layout.find_ticks(start, min(start + 64, layout.ticks))
            ids += part.ids[part.is_held].tolist()
            for row, held, seam in zip(part.ids, part.is_held, part.is_last, strict=True):
                for lane in np.flatnonzero(held).tolist():
                    before = last.pop(lane, None)
                    assert before is None or row[lane] == before + lanes
                    if not seam[lane]:
                        last[lane] = int(row[lane])
        assert not last
        assert sorted(ids) == list(range(first * lanes, end * lanes))

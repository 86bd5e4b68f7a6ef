"""DrQ-v2's storage and loader over a memory: the batches of its rules, episodes that resume, wrong use refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from holdall.drqv2 import ReplayBufferStorage, make_replay_loader
from holdall.errors import ArgumentError


class Spec(NamedTuple):
    """A spec of dm_env."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


SPECS = (
    Spec("observation", (9, 12, 12), np.uint8),
    Spec("action", (2,), np.float32),
    Spec("reward", (1,), np.float32),
    Spec("discount", (1,), np.float32),
)


class TimeStep:
    """An extended time step of DrQ-v2."""

    def __init__(self, position: str, **values: Any) -> None:
        self._position = position
        self._values = values

    def first(self) -> bool:
        return self._position == "first"

    def last(self) -> bool:
        return self._position == "last"

    def __getitem__(self, name: str) -> Any:
        return self._values[name]


def make_episode(length: int, seed: int, *, is_terminal: bool = False) -> list[TimeStep]:
    """Return the time steps of an episode: stacks of three RGB frames, of which every step brings one."""
    generator = np.random.default_rng(seed)
    frames = [generator.integers(0, 256, (3, 12, 12)).astype(np.uint8) for _ in range(length + 1)]
    steps = []
    for i in range(length + 1):
        stack = np.concatenate([frames[max(i + k, 0)] for k in (-2, -1, 0)])
        position = "first" if i == 0 else "last" if i == length else "mid"
        values = {
            "observation": stack,
            "action": generator.normal(size=2).astype(np.float32),
            "reward": float(np.float32(generator.normal())) if i else 0.0,
            "discount": 0.0 if is_terminal and i == length else 1.0 - 0.01 * (i % 3),
        }
        steps.append(TimeStep(position, **values))
    return steps


def fill(storage: ReplayBufferStorage, episodes: list[list[TimeStep]]) -> None:
    for steps in episodes:
        for step in steps:
            storage.add(step)


def draw_by_rule(episodes: list[list[TimeStep]], count: int, size: int, nstep: int, gamma: float) -> list[list[Any]]:
    """Return DrQ-v2's batches, row by row: an episode, a start in it, then n steps accumulated in float32."""
    batches = []
    for _ in range(count):
        rows = []
        for _ in range(size):
            steps = random.choice(episodes)
            start = np.random.randint(0, len(steps) - nstep)  # noqa: NPY002
            reward = np.zeros(1, np.float32)
            discount = np.ones(1, np.float32)
            for step in steps[start + 1 : start + nstep + 1]:
                reward += discount * np.float32(step["reward"])
                discount *= np.float32(step["discount"]) * gamma
            after = steps[start + nstep]["observation"]
            rows.append((steps[start]["observation"], steps[start + 1]["action"], reward, discount, after))
        batches.append([np.stack(column) for column in zip(*rows, strict=True)])
    return batches


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("nstep", [1, 3])
def test_one_seed_gives_the_batches_of_drqv2s_rule(nstep: int, num_workers: int, tmp_path: Path) -> None:
    episodes = [make_episode(length, seed, is_terminal=seed == 2) for seed, length in enumerate((20, 7, 13, 3))]
    storage = ReplayBufferStorage(SPECS, tmp_path, budget=None)
    loader = make_replay_loader(tmp_path, 500, 16, num_workers, False, nstep, 0.99)
    fill(storage, episodes)
    assert len(storage) == 43
    seed_all(4)
    wanted = draw_by_rule(episodes, 5, 16, nstep, 0.99)
    seed_all(4)
    iterator = iter(loader)
    for batch in wanted:
        tensors = next(iterator)
        for tensor, array in zip(tensors, batch, strict=True):
            assert tensor.numpy().dtype == array.dtype
            assert np.array_equal(tensor.numpy(), array)
    assert [tuple(tensor.shape) for tensor in tensors] == [(16, 9, 12, 12), (16, 2), (16, 1), (16, 1), (16, 9, 12, 12)]
    storage.close()


def test_an_episode_that_lost_a_step_is_not_drawn(tmp_path: Path) -> None:
    storage = ReplayBufferStorage(SPECS, tmp_path)
    loader = make_replay_loader(tmp_path, 30, 64, 0, False, 2, 0.9)
    episodes = [make_episode(10, seed) for seed in range(5)]
    fill(storage, episodes)
    seed_all(0)
    wanted = draw_by_rule(episodes[2:], 1, 64, 2, 0.9)
    seed_all(0)
    for tensor, array in zip(next(iter(loader)), wanted[0], strict=True):
        assert np.array_equal(tensor.numpy(), array)
    fill(storage, [make_episode(4, 9)])
    storage.draw(1, 1, 0.9)
    assert storage.memory.first_id == 24  # In the middle of the third episode.
    drawn = storage.draw(200, 1, 0.9)
    assert drawn.first_ids.min() == 30
    storage.close()


def test_the_current_episode_is_drawn_once_it_is_complete(tmp_path: Path) -> None:
    storage = ReplayBufferStorage(SPECS, tmp_path)
    loader = make_replay_loader(tmp_path, 100, 8, 0, False, 1, 0.99)
    steps = make_episode(6, 0)
    for step in steps[:-1]:
        storage.add(step)
    assert len(storage) == 0
    with pytest.raises(ArgumentError, match="No complete episode has 1 steps"):
        next(iter(loader))
    storage.add(steps[-1])
    assert len(storage) == 6
    next(iter(loader))
    storage.close()


def test_a_reset_in_the_middle_ends_the_episode(tmp_path: Path) -> None:
    storage = ReplayBufferStorage(SPECS, tmp_path)
    fill(storage, [make_episode(8, 0)[:5], make_episode(3, 1)])
    assert len(storage) == 7
    assert storage.memory.gather([3, 6]).truncated.tolist() == [True, True]
    assert np.array_equal(storage.memory.gather([4]).obs[0], make_episode(3, 1)[0]["observation"])
    storage.close()


def test_snapshots_resume_with_the_same_batches(tmp_path: Path) -> None:
    episodes = [make_episode(9, seed) for seed in range(4)]
    storage = ReplayBufferStorage(SPECS, tmp_path / "buffer")
    make_replay_loader(tmp_path / "buffer", 200, 8, 0, True, 3, 0.99)
    fill(storage, episodes)
    storage.close()
    resumed = ReplayBufferStorage(SPECS, tmp_path / "buffer")
    assert len(resumed) == 36
    fill(resumed, [make_episode(5, 7)])
    loader = make_replay_loader(tmp_path / "buffer", 200, 8, 0, True, 3, 0.99)
    seed_all(1)
    wanted = draw_by_rule([*episodes, make_episode(5, 7)], 3, 8, 3, 0.99)
    seed_all(1)
    iterator = iter(loader)
    for batch in wanted:
        for tensor, array in zip(next(iterator), batch, strict=True):
            assert np.array_equal(tensor.numpy(), array)
    resumed.close()


def test_frames_of_stacks_are_stored_once(tmp_path: Path) -> None:
    storage = ReplayBufferStorage(SPECS, tmp_path, max_size=3_000, budget=None)
    fill(storage, [make_episode(250, seed) for seed in range(8)])
    storage.memory.store.wait_idle()
    stacks = 2 * 9 * 12 * 12
    assert stacks / (storage.report().total_bytes / 2_000) > 4
    storage.close()


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"lacks \['discount'\]"):
        ReplayBufferStorage(SPECS[:3], tmp_path)
    with pytest.raises(ArgumentError, match="has no storage in this process"):
        make_replay_loader(tmp_path / "other", 100, 8, 0, False, 3, 0.99)
    storage = ReplayBufferStorage(SPECS, tmp_path)
    wrong = make_episode(2, 0)[0]
    values = {name: wrong[name] for name in ("observation", "action", "reward", "discount")}
    with pytest.raises(ArgumentError, match=r"time_step\['action'\] has shape \(2,\) and dtype float64"):
        storage.add(TimeStep("first", **{**values, "action": np.zeros(2)}))
    fill(storage, [make_episode(3, 0)])
    with pytest.raises(ArgumentError, match="Make the loader before the first add"):
        make_replay_loader(tmp_path, 100, 8, 0, False, 3, 0.99)
    make_replay_loader(tmp_path, 1e6, 8, 0, False, 3, 0.99)
    assert torch.is_tensor(storage.read(storage.draw(2, 3, 0.9))[0])
    storage.close()

"""Budgets of the drop-ins. With a disk tier, all steps are drawn. Without one, the newest that fit are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common import buffers
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.her import her_replay_buffer

from holdall.sb3 import HerReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from holdall.store.tuning import Tuning

SPACE = spaces.Dict(
    image=spaces.Box(0, 255, (40, 40, 3), np.uint8),
    vector=spaces.Box(-9, 9, (5,), np.float32),
)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
ENVS = 2
SLOTS = 400
BUDGET = "1.5MiB"
TUNING = Tuning(block_bytes=100_000)


def observe(tick: int) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(tick)
    return {
        "image": generator.integers(0, 256, (ENVS, 40, 40, 3), np.uint8),  # Noise cannot be compressed.
        "vector": np.full((ENVS, 5), tick, np.float32),
    }


def make_ticks(count: int) -> Iterator[tuple[Any, ...]]:
    for tick in range(count):
        done = np.full(ENVS, tick % 9 == 8)
        rewards = np.arange(ENVS, dtype=np.float32) + tick
        yield observe(tick), observe(tick + 1), np.zeros((ENVS, 2), np.float32), rewards, done, [{}] * ENVS


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_with_a_disk_tier_every_slot_is_drawn_as_stable_baselines3_draws_it(tmp_path: Path, budget: str | None) -> None:
    """Most blocks are in files."""
    theirs = DictReplayBuffer(SLOTS * ENVS, SPACE, ACTIONS, "cpu", ENVS)
    ours = ReplayBuffer(SLOTS * ENVS, SPACE, ACTIONS, "cpu", ENVS, budget=budget, spill_dir=tmp_path, _tuning=TUNING)
    for tick in make_ticks(SLOTS + 150):
        theirs.add(*tick)
        ours.add(*tick)
    ours.memory.store.wait_idle()
    assert ours.report().disk_bytes > 1_000_000
    for seed in range(5):
        np.random.seed(seed)  # noqa: NPY002  Stable-Baselines3's generator
        wanted = theirs.sample(64)
        np.random.seed(seed)  # noqa: NPY002
        got = ours.sample(64)
        for name in ("observations", "next_observations"):
            for key, tensor in getattr(wanted, name).items():
                assert th.equal(getattr(got, name)[key], tensor)
        assert th.equal(got.rewards, wanted.rewards)
    ours.memory.close()


@pytest.mark.parametrize("n_steps", [1, 3] if hasattr(buffers, "NStepReplayBuffer") else [1])
@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
def test_without_a_disk_tier_the_newest_steps_that_fit_are_drawn(kind: type[ReplayBuffer], n_steps: int) -> None:
    """Steps that were dropped early are never drawn, and all others are."""
    ours = kind(SLOTS * ENVS, SPACE, ACTIONS, "cpu", ENVS, budget=BUDGET, n_steps=n_steps, _tuning=TUNING)
    for tick in make_ticks(SLOTS + 50):
        ours.add(*tick)
        if ours.pos % 50 == 49:
            ours.sample(16)
    first = ours.memory.first_id // ENVS
    end = ours.memory.next_id // ENVS
    assert 50 < first < end, "some steps must be dropped early"
    assert ours.full
    assert ours.size() == end - first
    drawn = np.concatenate([ours.sample(256).observations["vector"][:, 0].numpy() for _ in range(20)])
    assert set(drawn.astype(int)) == set(range(first, end))
    ours.memory.close()


class GoalEnv:
    """The part of a vectorised environment that computes hindsight's rewards."""

    def env_method(self, _name: str, achieved: NDArray[Any], *_: Any, **__: Any) -> list[NDArray[Any]]:
        return [np.zeros(len(achieved), np.float32)]


def make_goal_space() -> spaces.Dict:
    goal = spaces.Box(-9, 9, (3,), np.float32)
    return spaces.Dict(observation=SPACE["image"], achieved_goal=goal, desired_goal=goal)


def make_goal_buffer() -> HerReplayBuffer:
    env: Any = GoalEnv()
    return HerReplayBuffer(SLOTS * ENVS, make_goal_space(), ACTIONS, env, "cpu", ENVS, budget=BUDGET, _tuning=TUNING)


def add_goal_step(buffer: her_replay_buffer.HerReplayBuffer, tick: int, *, is_last: bool) -> None:
    def as_goals(obs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        goals = obs["vector"][:, :3]
        return {"observation": obs["image"], "achieved_goal": goals, "desired_goal": goals}

    action = np.zeros((ENVS, 2), np.float32)
    reward = np.zeros(ENVS, np.float32)
    obs = as_goals(observe(tick))
    next_obs = as_goals(observe(tick + 1))
    buffer.add(obs, next_obs, action, reward, np.full(ENVS, is_last), [{}] * ENVS)


def draw_all_ticks(buffer: HerReplayBuffer) -> set[int]:
    drawn = [buffer.sample(256).observations["achieved_goal"][:, 0].numpy() for _ in range(20)]
    return set(np.concatenate(drawn).astype(int).tolist())


def test_only_a_buffer_that_dropped_steps_early_advises_a_larger_budget() -> None:
    """Before the end of the first episode, there is nothing to draw."""
    ours = make_goal_buffer()
    for tick in range(SLOTS + 50):
        add_goal_step(ours, tick, is_last=False)
        if tick in (5, SLOTS + 49):
            has_dropped = tick > 5
            assert (ours.memory.first_id > 0) is has_dropped
            with pytest.raises(RuntimeError, match="first episode") as error:
                ours.sample(4)
            assert ("raise budget" in str(error.value)) is has_dropped
    ours.memory.close()


def test_hindsight_draws_no_episode_that_lost_a_step_early() -> None:
    """An episode whose first steps were dropped early is not relabelled."""
    ours = make_goal_buffer()
    for tick in range(SLOTS + 50):
        add_goal_step(ours, tick, is_last=tick % 9 == 8)
    first = ours.memory.first_id // ENVS
    assert first > 50
    whole = -(-first // 9) * 9  # The first tick of the first whole episode.
    assert draw_all_ticks(ours) == set(range(whole, (SLOTS + 50) // 9 * 9))
    ours.memory.close()


@pytest.mark.parametrize("is_truncated_by_loading", [False, True])
def test_hindsight_draws_no_episode_that_lost_a_step_before_it_ended(is_truncated_by_loading: bool) -> None:
    """An episode that is longer than the budget holds is never drawn, and those after it are."""
    ours = make_goal_buffer()
    end_of_long = SLOTS - 10
    for tick in range(end_of_long):
        add_goal_step(ours, tick, is_last=tick == end_of_long - 1 and not is_truncated_by_loading)
    assert ours.memory.first_id > 0, "the first steps of the long episode must be dropped"
    if is_truncated_by_loading:
        with pytest.warns(UserWarning, match="last trajectory"):
            ours.truncate_last_trajectory()
    with pytest.raises(RuntimeError, match=r"The budget holds .* raise budget"):
        ours.sample(16)
    for tick in range(end_of_long, end_of_long + 18):
        add_goal_step(ours, tick, is_last=(tick - end_of_long) % 9 == 8)
    assert draw_all_ticks(ours) == set(range(end_of_long, end_of_long + 18))
    ours.memory.close()


def test_hindsight_draws_no_episode_that_lost_a_step_when_it_was_copied() -> None:
    """Stable-Baselines3's buffer holds whole episodes. A copy with a budget drops steps of them while it is made."""
    env: Any = GoalEnv()
    theirs = her_replay_buffer.HerReplayBuffer(SLOTS * ENVS, make_goal_space(), ACTIONS, env, "cpu", ENVS)
    for tick in range(SLOTS):
        add_goal_step(theirs, tick, is_last=tick % 9 == 8)
    ours = HerReplayBuffer.copy_of(theirs, budget=BUDGET, _tuning=TUNING)
    first = ours.memory.first_id // ENVS
    assert first > 9, "the copy must drop some steps"
    assert draw_all_ticks(ours) == set(range(-(-first // 9) * 9, SLOTS // 9 * 9))
    ours.memory.close()

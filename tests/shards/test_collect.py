"""`collect`: actors that play and feed a memory, and the replay buffer of Stable-Baselines3 over shards."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import ray
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.logger import configure
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

import holdall.ray.sb3
from holdall import NStep, Prioritized, ShardError
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import RateLimit, ReplayMemory, collect

from .processes import find_process, kill, wait_until

pytestmark = pytest.mark.usefixtures("cluster")
# Workers cannot import the tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counting(gym.Env[Any, Any]):
    """An environment with episodes of seven steps. The reward of a step is the number of all steps before it."""

    observation_space = spaces.Box(0, 10, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 0

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.steps += 1
        return self._observe(), self.steps - 1.0, self.count == 7, False, {}

    def _observe(self) -> Any:
        return np.full(2, self.count, np.float32)


@pytest.mark.nightly  # In make test, other tests cover actors and shards.
def test_a_learner_trains_on_transitions_of_actors_that_play_with_its_weights() -> None:
    settings = {"shards": 2, "sampler": Prioritized(), "seed": 1}
    buffer = holdall.ray.sb3.ReplayBuffer
    model = DQN("MlpPolicy", Counting(), 10_000, replay_buffer_class=buffer, replay_buffer_kwargs=settings, seed=0)
    model.set_logger(configure(None, []))
    assert isinstance(model.replay_buffer, buffer)
    memory: Any = model.replay_buffer.memory
    make_act = holdall.ray.sb3.epsilon_greedy(model, 2)
    with memory, collect(Counting, 2, memory, make_act, num_cpus=0) as actors:
        wait_until(lambda: model.replay_buffer is not None and model.replay_buffer.size() >= 600)
        actors.send(holdall.ray.sb3.weights_of(model))
        before = {name: array.copy() for name, array in holdall.ray.sb3.weights_of(model).items()}
        model.train(gradient_steps=4, batch_size=32)
        assert any((before[name] != array).any() for name, array in holdall.ray.sb3.weights_of(model).items())
        samples = model.replay_buffer.sample(64)
        assert (samples.next_observations == samples.observations + 1).all()
        assert (samples.dones.flatten() == (samples.next_observations[:, 0] == 7)).all()
        model.replay_buffer.update_priorities(samples.ids, np.ones(64))
        wait_until(lambda: all(each.steps > 0 and each.episodes > 0 for each in actors.progress()))
        progress = actors.progress()
        assert all(total % 7 == 0 for each in progress for total in each.returns)
        kill(find_process(actors._actors[0]))
        held = len(memory)
        wait_until(lambda: len(memory) >= held + 600)
        batch = memory.sample(500)
        assert (batch.next_obs == batch.obs + 1).all()


@pytest.mark.nightly
def test_actors_continue_after_a_shard_was_frozen_for_longer_than_their_patience(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If they are stopped while the shard is frozen, the log has the number of lost transitions."""
    settings: dict[str, Any] = {"shards": 1, "patience_s": 0.5}
    with ReplayMemory(Counting.observation_space, Counting.action_space, 100_000, **settings) as memory:
        with collect(Counting, 1, memory, num_cpus=0) as actors:
            wait_until(lambda: actors.progress()[0].steps > 300)
            shard = psutil.Process(find_process(memory._members.handle(0)))
            shard.send_signal(signal.SIGSTOP)
            try:
                stopped_at = -1
                while actors.progress()[0].steps != stopped_at:  # Until the writer has no room.
                    stopped_at = actors.progress()[0].steps
                    time.sleep(1.0)
            finally:
                shard.send_signal(signal.SIGCONT)
            wait_until(lambda: actors.progress()[0].steps > stopped_at + 300)
            shard.send_signal(signal.SIGSTOP)
            try:
                is_full = stopped_at  # The writer has room again for some steps.
                wait_until(lambda: actors.progress()[0].steps > is_full)
                time.sleep(0.1)
                lost = actors.stop(timeout_s=2.0)
            finally:
                shard.send_signal(signal.SIGCONT)
        assert lost > 0
        assert f"Actor 0 ended with {lost} transitions that could not be added" in caplog.text
        batch = memory.sample(500)
        assert (batch.next_obs == batch.obs + 1).all()


def read_rewards(memory: ReplayMemory) -> list[int]:
    """Return the rewards in a memory of one shard, in the order in which they were added."""
    return [int(reward) for reward in memory.gather(np.arange(memory.first_id, memory.next_id)).reward]


class Failing(Counting):
    """An environment that fails at its 51st step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps == 50:
            raise RuntimeError("no display")
        return super().step(action)


@pytest.mark.nightly
def test_all_steps_of_an_actor_are_added_before_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Also if the actor fails, and if the limiter grants no inserts because the learner has stopped drawing."""
    limit = RateLimit(samples_per_insert=1.0, min_size=1, tolerance=50 + 256)
    with ReplayMemory(Counting.observation_space, Counting.action_space, 10_000, shards=1, limit=limit) as memory:
        failing = collect(Failing, 1, memory, num_cpus=0)
        with pytest.raises(ShardError, match="no display"):
            wait_until(lambda: bool(failing.progress()) and False)
        wait_until(lambda: len(memory) == 50)
        assert failing.stop() == 0
        assert read_rewards(memory) == list(range(50))
        with collect(Counting, 1, memory, num_cpus=0) as actors:
            # Two segments are granted, a third is full, and one more step waits for room.
            wait_until(lambda: actors.progress()[0].steps == 3 * 128)
            assert actors.stop(timeout_s=3_600) == 0
        assert read_rewards(memory)[50:] == list(range(3 * 128 + 1))
        # An actor that Ray has no room for has played nothing, so `stop` does not wait for it.
        tuning = ClusterTuning(progress_s=0.1)
        with collect(Counting, 1, memory, num_cpus=1_000, _tuning=tuning) as never:
            assert [progress.steps for progress in never.progress()] == [0]
            assert never.stop(timeout_s=3_600) == 0
    assert "could not add" not in caplog.text
    assert "did not answer" not in caplog.text


class Unknown:
    """Makes an environment from a module that actors cannot import."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("a_module_of_this_machine_alone",)

    def __call__(self) -> Counting:
        return Counting()


@pytest.mark.nightly
def test_an_actor_that_cannot_start_has_an_error_and_keeps_no_weights() -> None:
    with ReplayMemory(Counting.observation_space, Counting.action_space, 1_000, shards=1) as memory:
        with collect(Unknown(), 1, memory, num_cpus=0) as actors, pytest.raises(ShardError, match="of_this_machine"):
            wait_until(lambda: bool(actors.progress()) and False)
        with collect(Counting, 1, memory, num_cpus=1_000) as waiting:  # Ray has no room for the actor.
            for number in range(30):  # The object store has room for sixteen.
                waiting.send(np.full(2**20, number, np.float64))
            wait_until(lambda: ray.available_resources()["object_store_memory"] > 100 * 2**20)


@pytest.mark.nightly
def test_a_pickled_replay_buffer_over_shards_continues(tmp_path: Path) -> None:
    """It has all transitions and priorities, and continues to draw where it was."""
    settings: dict[str, Any] = {"shards": 2, "sampler": NStep(3, 0.9, by=Prioritized()), "seed": 1, "patience_s": 60.0}
    buffer: Any = holdall.ray.sb3.ReplayBuffer(
        5_001, Counting.observation_space, Counting.action_space, "cpu", **settings
    )
    env = Counting()
    obs, _ = env.reset()
    for step in range(900):
        next_obs, reward, ended, _, _ = env.step(step % 2)
        buffer.add(obs, next_obs, np.array([step % 2]), np.array([reward]), np.array([ended]), [{}])
        obs = env.reset()[0] if ended else next_obs
    samples = buffer.sample(64)
    assert (samples.discounts[:, 0] > 0.7).all()
    buffer.update_priorities(samples.ids, np.arange(64.0))
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    again: Any = load_from_pkl(tmp_path / "buffer.pkl")
    with buffer.memory, again.memory:
        assert again.size() == buffer.size() == 900
        for _ in range(3):
            one = buffer.sample(32)
            other = again.sample(32)
            assert (one.ids == other.ids).all()
            assert (one.weights == other.weights).all()
            assert (one.observations == other.observations).all()
        # Two shards of a buffer of 5,001 transitions hold 5,000. The buffer adopts such a memory.
        buffer.memory.save(tmp_path / "memory").result()
        drawn = buffer.sample(32)
        with ReplayMemory.load(tmp_path / "memory", patience_s=60.0) as loaded:
            again.adopt(loaded)
            assert (again.sample(32).ids == drawn.ids).all()

"""Environment workers write observations into shared memory, and a RolloutMemory reads them there, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv
from numpy.typing import NDArray

from holdall import ArgumentError, RolloutMemory, SharedObservations
from holdall.testing import assert_same_bits

SPACE = spaces.Dict({"screen": spaces.Box(0, 255, (4, 40, 40), np.uint8), "speed": spaces.Box(-9, 9, (3,), np.float64)})
BUTTONS = spaces.Discrete(2)
LANES = 2
STEPS = 60


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the root to the path, because a spawned process imports this module by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


class Film(gym.Env[Any, Any]):
    """An environment with a stack of frames, which shifts by one frame per step, and a speed."""

    observation_space = SPACE
    action_space = BUTTONS

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._stack = np.zeros((4, 40, 40), np.uint8)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observe(), float(action), bool(self.np_random.random() < 0.03), False, {}

    def _observe(self) -> Any:
        newest = self.np_random.integers(0, 256, (1, 40, 40), np.uint8)
        self._stack = np.concatenate([self._stack[1:], newest])
        return {"screen": self._stack, "speed": self.np_random.standard_normal(3)}


def play_in_worker(board: SharedObservations, lane: int, pipe: Connection) -> None:
    """Play in a worker process. Write observations to the board, and send everything else through the pipe."""
    env = Film()
    board.write(lane, env.reset(seed=lane)[0])
    pipe.send(None)
    while (action := pipe.recv()) is not None:
        obs, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()
        board.write(lane, obs)
        pipe.send((reward, terminated, truncated))


def play_here(lane: int) -> list[Any]:
    """Play the same steps in this process. Return the observations."""
    env = Film()
    seen = [env.reset(seed=lane)[0]]
    for _ in range(STEPS - 1):
        obs, _, terminated, _, _ = env.step(0)
        seen.append(env.reset()[0] if terminated else obs)
    return seen


def assert_rows(memory: RolloutMemory, expected: list[list[Any]]) -> None:
    for batch in memory.minibatches(32):
        for position, number in enumerate(batch.ids.tolist()):
            step, lane = divmod(number, LANES)
            assert_same_bits({key: rows[position] for key, rows in batch.obs.items()}, expected[lane][step])


@pytest.mark.parametrize("method", [m for m in ("fork", "spawn") if m in multiprocessing.get_all_start_methods()])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Other tests have started threads.
def test_observations_that_workers_write_are_read_bit_for_bit(method: Any) -> None:
    """The pipes carry only actions, rewards and flags."""
    context: Any = multiprocessing.get_context(method)
    board = SharedObservations(SPACE, LANES, context)
    memory = RolloutMemory(SPACE, BUTTONS, STEPS, LANES, seed=0)
    pipes = []
    workers = []
    for lane in range(LANES):
        ours, theirs = context.Pipe()
        worker = context.Process(target=play_in_worker, args=(board, lane, theirs), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()
    floats = np.zeros(LANES, np.float32)
    for _ in range(STEPS):
        memory.observe(board.obs)
        for pipe in pipes:
            pipe.send(0)
        reward, terminated, truncated = (np.array(part) for part in zip(*(pipe.recv() for pipe in pipes), strict=True))
        memory.add(None, np.zeros(LANES, np.int64), reward, terminated, truncated, floats, floats)
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join(30)
        assert worker.exitcode == 0
    memory.finish(floats)
    assert_rows(memory, [play_here(lane) for lane in range(LANES)])
    assert "window of 4" in memory.report().fields[0].finding


def test_the_observations_are_the_shared_memory_itself() -> None:
    board = SharedObservations(SPACE, LANES)
    before = board.obs
    again = board.obs
    assert all(np.shares_memory(before[key], again[key]) for key in before)
    board.lane(1)["speed"][:] = 7.5
    assert before["speed"].tolist() == [[0.0] * 3, [7.5] * 3]
    assert all(rows.ctypes.data % 64 == 0 for rows in before.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_observations_of_a_killed_worker_stay() -> None:
    """The shared memory has no name, so it needs no removal."""
    board = SharedObservations(SPACE, LANES, multiprocessing.get_context("fork"))

    def write_and_wait(pipe: Any) -> None:
        board.write(0, {"screen": np.full((4, 40, 40), 9, np.uint8), "speed": np.ones(3)})
        pipe.send(None)
        signal.pause()

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=write_and_wait, args=(theirs,))
    worker.start()
    ours.recv()
    worker.kill()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL
    assert (board.obs["screen"][0] == 9).all()


def test_gymnasiums_shared_memory_is_read_without_a_copy() -> None:
    """AsyncVectorEnv overwrites its observations in every step. `observe` reads them before."""
    envs = AsyncVectorEnv([Film] * LANES, shared_memory=True, copy=False, context="fork")
    try:
        memory = RolloutMemory(SPACE, BUTTONS, STEPS, LANES, seed=0)
        obs, _ = envs.reset(seed=[0, 1])
        floats = np.zeros(LANES, np.float32)
        resetting = np.zeros(LANES, np.bool_)
        expected: list[list[Any]] = [[], []]
        for _ in range(STEPS):
            memory.observe(obs)
            for lane in range(LANES):
                expected[lane].append({key: rows[lane].copy() for key, rows in obs.items()})
            after, reward, terminated, truncated, _ = envs.step(np.zeros(LANES, np.int64))
            assert all(np.shares_memory(after[key], obs[key]) for key in obs)
            memory.add(None, np.zeros(LANES, np.int64), reward, terminated, truncated, floats, floats, valid=~resetting)
            resetting = terminated | truncated
        memory.finish(floats)
        assert_rows(memory, expected)
    finally:
        envs.close()


def test_a_wrong_lane_observation_or_number_of_lanes_is_refused() -> None:
    board = SharedObservations(SPACE, LANES)
    good: dict[str, NDArray[Any]] = {"screen": np.zeros((4, 40, 40), np.uint8), "speed": np.zeros(3)}
    with pytest.raises(ArgumentError, match="lane"):
        board.write(2, good)
    with pytest.raises(ArgumentError, match="dtype float32"):
        board.write(0, good | {"speed": np.zeros(3, np.float32)})
    with pytest.raises(ArgumentError, match="num_envs"):
        SharedObservations(SPACE, 0)

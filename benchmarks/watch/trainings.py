"""Trainings that `promises.py` and `showings.py` watch: `python benchmarks/watch/trainings.py sac --steps 2000`.

The output is JSON lines. With --pause, the training waits at its end, after it has counted the touched pages of its
buffers by itself. The watch is compared with this count.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

from holdall.sb3 import ReplayBuffer, WatchCallback
from holdall.tools.watch.guard import MemoryGuard
from holdall.watch import start

BYTES_OBJECT = 33
"""Size of an empty `bytes` object."""


class Camera(gym.Env[Any, Any]):
    """Random frames and a state vector. An episode has 100 steps."""

    def __init__(self, side: int = 84, *, discrete: bool = False, plain: bool = False) -> None:
        image = spaces.Box(0, 255, (3, side, side), np.uint8)
        state = spaces.Box(-1, 1, (31,), np.float32)
        self.observation_space = state if plain else spaces.Dict({"camera": image, "state": state})
        self.action_space = spaces.Discrete(4) if discrete else spaces.Box(-1, 1, (2,), np.float32)
        self._plain = plain
        self._generator = np.random.default_rng(0)
        self._frames = self._generator.integers(0, 256, (64, 3, side, side), np.uint8)
        self._time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._time = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return random data. Nothing depends on the action."""
        self._time += 1
        return self._observed(), float(self._generator.normal()), self._time >= 100, False, {}

    def _observed(self) -> Any:
        state = self._generator.normal(size=31).astype(np.float32).clip(-1, 1)
        if self._plain:
            return state
        return {"camera": self._frames[self._generator.integers(64)], "state": state}


SMALL: dict[str, Any] = {"device": "cpu", "policy_kwargs": {"net_arch": [64, 64]}}
OFF_POLICY: dict[str, Any] = {**SMALL, "learning_starts": 100, "train_freq": 16, "gradient_steps": 1, "batch_size": 32}


def sac(seed: int, size: int) -> Any:
    """SAC with Dict observations with a camera, as of a robot."""
    return SAC("MultiInputPolicy", Camera(), buffer_size=size, seed=seed, **OFF_POLICY | {"train_freq": 64})


def sac_small(seed: int, size: int) -> Any:
    """SAC with a small camera, for many steps."""
    return SAC("MultiInputPolicy", Camera(36), buffer_size=size, seed=seed, **OFF_POLICY | {"train_freq": 64})


def dqn_vector(seed: int, size: int) -> Any:
    """DQN with a state vector and four actions."""
    return DQN("MlpPolicy", Camera(discrete=True, plain=True), buffer_size=size, seed=seed, **OFF_POLICY)


def td3_vector(seed: int, size: int) -> Any:
    """TD3 with a state vector and continuous actions."""
    return TD3("MlpPolicy", Camera(plain=True), buffer_size=size, seed=seed, **OFF_POLICY)


def dqn_holdall(seed: int, size: int) -> Any:
    """DQN with holdall's buffer."""
    kinds = {"replay_buffer_class": ReplayBuffer}
    env = Camera(36, discrete=True)
    return DQN("MultiInputPolicy", env, buffer_size=size, seed=seed, **OFF_POLICY | {"train_freq": 64} | kinds)


def dqn_atari(seed: int, size: int) -> Any:
    """DQN with four stacked frames of a game."""
    import ale_py  # noqa: PLC0415  an extra

    gym.register_envs(ale_py)
    env = VecFrameStack(make_atari_env("SeaquestNoFrameskip-v4", n_envs=1, seed=seed), 4)
    return DQN("CnnPolicy", env, buffer_size=size, seed=seed, device="cpu", learning_starts=200, train_freq=64)


def ppo_workers(seed: int, _size: int) -> Any:
    """PPO with four workers in processes of their own."""
    env = make_vec_env(Camera, 4, seed=seed, vec_env_cls=SubprocVecEnv)
    return PPO("MultiInputPolicy", env, n_steps=256, batch_size=128, n_epochs=1, seed=seed, **SMALL)


def ppo_vector(seed: int, _size: int) -> Any:
    """PPO with four lanes in this process."""
    env = make_vec_env(lambda: Camera(plain=True), 4, seed=seed)
    return PPO("MlpPolicy", env, n_steps=512, batch_size=256, n_epochs=2, seed=seed, **SMALL)


MODELS: dict[str, Callable[[int, int], Any]] = {
    "sac": sac,
    "sac-small": sac_small,
    "dqn-vector": dqn_vector,
    "td3-vector": td3_vector,
    "dqn-holdall": dqn_holdall,
    "dqn-atari": dqn_atari,
    "ppo-workers": ppo_workers,
    "ppo-vector": ppo_vector,
}


class Leaking(BaseCallback):
    """Leak some bytes in every step, and write the step to a file that survives a kill."""

    def __init__(self, nbytes: int, counter: Path | None) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._kept: list[bytes] = []
        self._counter = None
        if counter is not None:
            counter.write_bytes(bytes(8))
            with counter.open("r+b") as file:
                self._counter = mmap.mmap(file.fileno(), 8)

    def _on_step(self) -> bool:
        if self._nbytes:
            self._kept += [bytes(self._nbytes - BYTES_OBJECT) for _ in range(self.training_env.num_envs)]
        if self._counter is not None:
            self._counter[:8] = self.num_timesteps.to_bytes(8, "little")
        return True


def touched_bytes(array: NDArray[Any]) -> int:
    """Return the bytes of an array whose pages are in memory, counted in another way than the watch's."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    first = array.ctypes.data // mmap.PAGESIZE
    last = (array.ctypes.data + array.nbytes - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        entries = np.frombuffer(os.pread(file.fileno(), 8 * (last - first + 1), 8 * first), np.uint64)
    present = (entries >> np.uint64(63)).astype(np.int64) * mmap.PAGESIZE
    present[0] -= (array.ctypes.data - first * mmap.PAGESIZE) * (present[0] > 0)
    present[-1] -= ((last + 1) * mmap.PAGESIZE - array.ctypes.data - array.nbytes) * (present[-1] > 0)
    return int(present.sum())


def buffer_arrays(model: Any) -> Iterator[NDArray[Any]]:
    """Yield the arrays of a model's buffer."""
    buffer = getattr(model, "replay_buffer", None) or model.rollout_buffer
    for value in vars(buffer).values():
        yield from (one for one in (value.values() if isinstance(value, dict) else [value]) if _is_array(one))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def say(**words: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(words), flush=True)


class Toggling(BaseCallback):
    """Switch the watch on and off by turns, and print the time of a step in each turn.

    A turn lasts for several of the watcher's readings: one that was stopped reads at once when it goes on.
    """

    def __init__(self, turn_s: float, turns: int) -> None:
        super().__init__()
        self._turn_s = turn_s
        self._turns = turns
        self._watch = start()
        self._guard: MemoryGuard | None = None
        self._turn = -1
        self._steps = 0
        self._begun = (0.0, 0.0)

    def _on_training_start(self) -> None:
        self._watch.agent.follow_model(self.model)

    def _on_step(self) -> bool:
        if self._guard is not None:
            self._watch.agent.publish_if_due()
        self._steps += 1
        return time.perf_counter() - self._begun[0] < self._turn_s or self._turn_over()

    def _turn_over(self) -> bool:
        now = (time.perf_counter(), time.process_time())
        if self._turn >= 0:  # what is made once is made before the first turn
            wall, cpu = (after - before for before, after in zip(self._begun, now, strict=True))
            say(watched=self._guard is not None, wall=wall / self._steps, cpu=cpu / self._steps)
        self._turn += 1
        self._watch_in_turn(watched=self._turn % 4 in {0, 3})  # with, without, without, with
        self._steps = 0
        self._begun = (time.perf_counter(), time.process_time())
        return self._turn < self._turns

    def _watch_in_turn(self, *, watched: bool) -> None:
        agent = self._watch.agent
        beside = self._watch.pid
        if self._guard is not None:
            self._guard.stop()
        self._guard = MemoryGuard(agent, "warn") if watched else None
        agent.next_publish = time.monotonic() + (0.0 if watched else 1e6)
        os.kill(beside, signal.SIGCONT if watched else signal.SIGSTOP)

    def _on_training_end(self) -> None:
        os.kill(self._watch.pid, signal.SIGCONT)
        self._watch.stop()


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS), metavar="MODEL", help=", ".join(sorted(MODELS)))
    parser.add_argument("--steps", type=int, default=2000, help="steps of the training (%(default)s)")
    parser.add_argument("--size", type=int, default=20_000, help="capacity of the buffer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", type=int, default=0, metavar="BYTES", help="bytes to leak in each step")
    parser.add_argument("--counter", type=Path, metavar="FILE", help="file for the number of the step")
    parser.add_argument("--record", type=Path, metavar="FILE", help="file for the record of the watch")
    parser.add_argument("--rates", type=int, default=0, metavar="TURNS", help="time steps with and without a watch")
    parser.add_argument("--turn", type=float, default=12.0, help="seconds of a turn of --rates (%(default)s)")
    parser.add_argument("--pause", action="store_true", help="count the touched pages at the end, and wait for a line")
    parser.add_argument("--plain", action="store_true", help="train without a callback of holdall")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    model = MODELS[wanted.model](wanted.seed, wanted.size)
    if wanted.rates:
        model.learn(10**9, callback=Toggling(wanted.turn, wanted.rates))
        return
    if wanted.plain:
        model.learn(wanted.steps)
        return
    watch = WatchCallback(0.5, record=wanted.record, verbose=0)
    model.learn(wanted.steps, callback=CallbackList([Leaking(wanted.leak, wanted.counter), watch]))
    if wanted.pause:
        from holdall.tools.watch.agent import get_agent  # noqa: PLC0415  for the one look that both sides take

        get_agent().publish()
        touched = sum(touched_bytes(array) for array in buffer_arrays(model))
        say(touched=touched, nbytes=sum(array.nbytes for array in buffer_arrays(model)))
        sys.stdin.readline()


if __name__ == "__main__":
    main()

"""Whole trainings with the drop-in and with Stable-Baselines3's buffers: steps a second, and `add` and `sample` inside.

    python benchmarks/trainings.py [--case atari|dqn|camera|vectors] [--rounds 5] [--plain-malloc] [--json FILE]

`atari` is DQN on Seaquest, and needs ale-py; `dqn` is DQN on made-up stacks of four frames; both draw batches of 32.
`camera` is SAC on a Dict of image and vector and `vectors` is TD3 on Pendulum, both with batches of 256. A buffer is
filled first, and what shall be compressed is, so that training draws what it draws after hours. Every side of every
round is a fresh process, and the sides take turns. Environments and networks are small, so that buffers count for
much. Shown are steps a second by the CPU time of the process, and the medians of calls by the CPU time of the thread:
the best rounds, and of the ratios to Stable-Baselines3's of the same round the median, the least and the most.

torch runs on one thread, and the C library keeps memory that torch gives back. By itself it returns it to the system
whenever much of it lies at the end of the heap, which is a matter of chance: the same training took 100,000 or 680,000
page faults, a fifth of its time, with either buffer. `--plain-malloc` leaves it so.

Exit status 1 if a bar is not met by the medians: 1.0 of Stable-Baselines3's steps a second, and with DQN 0.8 (raw) and
1.1 (compressed) of the time of its `sample`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from process import commit, emit, machine, versions
from small_batches import made_up_frames
from small_observations import Times, buffer_class

SIDES: dict[str, dict[str, Any]] = {"sb3": {}, "raw": {"budget": "auto"}, "compressed": {"budget": None}}
SAMPLE_BARS = {case: {"raw": 0.8, "compressed": 1.1} for case in ("atari", "dqn")}
GAME = "SeaquestNoFrameskip-v4"
FRAMES = 1_500
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


class Film(gym.Env[Any, Any]):
    """Made-up frames one after another, as stacks, or as images beside a vector; episodes of 300 steps."""

    def __init__(self, *, stacks: bool) -> None:
        self._frames = made_up_frames(FRAMES)
        self._stacks, self._at = stacks, 0
        if stacks:
            self.observation_space: Any = spaces.Box(0, 255, (4, 84, 84), np.uint8)
            self.action_space: Any = spaces.Discrete(4)
        else:
            image, vector = spaces.Box(0, 255, (3, 84, 84), np.uint8), spaces.Box(-9, 9, (31,), np.float32)
            self.observation_space = spaces.Dict({"image": image, "vector": vector})
            self.action_space = spaces.Box(-1, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin somewhere."""
        super().reset(seed=seed, options=options)
        self._at, self._left = int(self.np_random.integers(0, FRAMES - 400)), 300
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Show the next frame."""
        self._at, self._left = self._at + 1, self._left - 1
        return self._seen(), float(np.sum(action)) % 1.0, self._left == 0, False, {}

    def _seen(self) -> Any:
        first = self._at
        if self._stacks:
            return self._frames[first : first + 4]
        vector = np.full(31, first / FRAMES, np.float32)
        return {"image": self._frames[first : first + 3], "vector": vector}


def one_of(make_env: Callable[[], gym.Env[Any, Any]]) -> Callable[[], Any]:
    """Return what makes environments as Stable-Baselines3 has them, of one."""

    def made() -> Any:
        from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: PLC0415  children alone need it

        return DummyVecEnv([make_env])

    return made


def atari() -> Any:
    """Make a game as Stable-Baselines3's users do."""
    import ale_py  # noqa: PLC0415  this case alone needs it
    from stable_baselines3.common.env_util import make_atari_env  # noqa: PLC0415  children alone need it
    from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage  # noqa: PLC0415  likewise

    gym.register_envs(ale_py)
    return VecTransposeImage(VecFrameStack(make_atari_env(GAME, seed=0), n_stack=4))


class Case(NamedTuple):
    """What is trained: how many steps fill the buffer before, and how many are timed."""

    algorithm: str
    policy: str
    make_env: Callable[[], Any]
    settings: dict[str, Any]
    filled: int
    steps: int


CASES = {
    "atari": Case("DQN", "CnnPolicy", atari, {"batch_size": 32, "train_freq": 4}, 8_000, 1_600),
    "dqn": Case(
        "DQN", "CnnPolicy", one_of(lambda: Film(stacks=True)), {"batch_size": 32, "train_freq": 8}, 8_000, 1_600
    ),
    "camera": Case(
        "SAC", "MultiInputPolicy", one_of(lambda: Film(stacks=False)), {"batch_size": 256, "train_freq": 8}, 4_000, 200
    ),
    "vectors": Case("TD3", "MlpPolicy", one_of(lambda: gym.make("Pendulum-v1")), {"batch_size": 256}, 4_000, 1_500),
}


def train(name: str, side: str) -> dict[str, Any]:
    """Fill and train one side, with its calls timed from outside while it trains."""
    import stable_baselines3  # noqa: PLC0415  children alone need it

    case = CASES[name]
    times, env = Times(), case.make_env()
    parent: Any = buffer_class("sb3" if side == "sb3" else "holdall", env.observation_space)

    class Timed(parent):  # type: ignore[misc]  # chosen at run time
        def add(self, *arguments: Any) -> None:
            times.of("add", lambda: parent.add(self, *arguments))

        def sample(self, *arguments: Any, **options: Any) -> Any:
            return times.of("sample", lambda: parent.sample(self, *arguments, **options))

    small: dict[str, Any] = {"features_extractor_kwargs": {"features_dim": 64}} if case.policy == "CnnPolicy" else {}
    model = getattr(stable_baselines3, case.algorithm)(
        case.policy, env, replay_buffer_class=Timed, replay_buffer_kwargs=SIDES[side], buffer_size=20_000, seed=0,
        device="cpu", policy_kwargs=small, learning_starts=case.filled, **case.settings,
    )  # fmt: skip
    model.learn(case.filled)
    if side != "sb3":
        model.replay_buffer.memory.store.wait_idle()
    times.wall.update(add=[], sample=[])
    times.cpu.update(add=[], sample=[])
    began, cpu = time.perf_counter(), time.process_time()
    model.learn(case.steps, reset_num_timesteps=False)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    return {"steps_per_cpu_s": case.steps / cpu, "steps_per_s": case.steps / wall, **times.summary()}


def measured(cases: list[str], rounds: int, *, plain_malloc: bool) -> Iterator[dict[str, Any]]:
    """Run all sides in turn, each in a fresh process; compare them after each round."""
    found: dict[str, dict[str, list[Any]]] = {case: {side: [] for side in SIDES} for case in cases}
    surroundings = os.environ | ONE_THREAD | ({} if plain_malloc else KEPT_MEMORY)
    for turn in range(rounds):
        for case in cases:
            for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
                command = [sys.executable, __file__, "--case", case, "--side", side]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=surroundings)
                found[case][side].append(json.loads(done.stdout.splitlines()[-1])["result"])
        yield {case: _compared(case, sides) for case, sides in found.items()}


def _compared(case: str, sides: dict[str, list[Any]]) -> dict[str, Any]:
    figures = {
        side: {
            "steps_per_cpu_s": [each["steps_per_cpu_s"] for each in rounds],
            "steps_per_s": [each["steps_per_s"] for each in rounds],
            "sample_us": [each["sample"]["cpu_us"] for each in rounds],
            "add_us": [each["add"]["cpu_us"] for each in rounds],
        }
        for side, rounds in sides.items()
    }
    compared: dict[str, Any] = {}
    for side, of_rounds in figures.items():
        row: dict[str, Any] = {"sample_bar": SAMPLE_BARS.get(case, {}).get(side)}
        for name, taken in of_rounds.items():
            ratios = [one / plain for one, plain in zip(taken, figures["sb3"][name], strict=True)]
            row[name] = max(taken) if name.startswith("steps") else min(taken)
            row[f"{name}_of_sb3"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        compared[side] = row
    return compared


def show(found: dict[str, Any]) -> bool:
    """Print a table to stderr; return whether all bars are met."""
    is_met = True
    for case, sides in found.items():
        for side, row in sides.items():
            steps, sample, add = (row[f"{name}_of_sb3"] for name in ("steps_per_cpu_s", "sample_us", "add_us"))
            is_met &= steps["median"] >= 1.0
            is_met &= row["sample_bar"] is None or sample["median"] <= row["sample_bar"]
            text = f"{row['steps_per_cpu_s']:.0f} steps a CPU second ({_spread(steps)})"
            text += (
                f", sample {row['sample_us']:.0f} us ({_spread(sample)}), add {row['add_us']:.0f} us ({_spread(add)})"
            )
            print(f"{case:8} {side:11} {text}", file=sys.stderr)
    return is_met


def _spread(ratios: dict[str, float]) -> str:
    return f"{ratios['median']:.2f}, {ratios['min']:.2f} to {ratios['max']:.2f}"


def main() -> int:
    """Read the command line; train one side here, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # a child's
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain-malloc", action="store_true", help="leave the C library's settings as they are")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    if wanted.side:
        emit({"result": train(wanted.case, wanted.side)})
        return 0
    is_met = False
    cases = [wanted.case] if wanted.case else list(CASES)
    for rounds, found in enumerate(measured(cases, wanted.rounds, plain_malloc=wanted.plain_malloc), start=1):
        print(f"after round {rounds} of {wanted.rounds}:", file=sys.stderr)
        is_met = show(found)
        result = {"commit": commit(), "machine": machine(), "versions": versions(), "rounds": rounds, "found": found}
        if wanted.json:
            wanted.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Small observations: `add` and `sample` of the drop-in beside Stable-Baselines3's, alone and inside a real training.

    python benchmarks/small_observations.py [--case pendulum] [--way alone|training] [--rounds 3] [--json FILE]

Every side of every round is a fresh process, and the sides take turns. `alone` adds 20,000 steps and draws 2,000
batches of 256, the default of SAC and TD3. `training` trains that algorithm with its default settings, and times every
call of `add` and `sample` from outside. Times of a round are medians over calls, or over blocks of calls `alone`;
shown is the best round of each side, by the wall clock and by the CPU time of the thread: other programs on the machine
make the first one longer and change the second one little. Exit status 1 if a bar is not met: 0.9 of
Stable-Baselines3's time alone, 1.0 in training, by CPU time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from process import commit, emit, machine, versions

BARS = {"alone": 0.9, "training": 1.0}
ACTS = ("add", "sample")
SIDES = ("sb3", "holdall")
BATCH, FILLED_STEPS, DRAWN, BLOCK = 256, 20_000, 2_000, 50
TRAINING_STEPS, LEARNING_STARTS, SEED = 1_000, 200, 0


class GoalWalk(gym.Env[Any, Any]):
    """A Dict of goals with 105 float64, the size of AntMaze; episodes of 200 steps."""

    observation_space = spaces.Dict(
        {
            "observation": spaces.Box(-np.inf, np.inf, (105,), np.float64),
            "achieved_goal": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "desired_goal": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        }
    )
    action_space = spaces.Box(-1, 1, (8,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin anew with another goal."""
        super().reset(seed=seed, options=options)
        self._state, self._goal, self._steps = self.np_random.normal(size=105), self.np_random.normal(size=2), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move on at random, a little by the action."""
        self._state = self._state + 0.1 * self.np_random.normal(size=105) + 0.01 * float(np.sum(action))
        self._steps += 1
        reward = -float(np.linalg.norm(self._state[:2] - self._goal))
        return self._seen(), reward, False, self._steps >= 200, {}

    def _seen(self) -> dict[str, Any]:
        return {"observation": self._state.copy(), "achieved_goal": self._state[:2].copy(), "desired_goal": self._goal}


class Case(NamedTuple):
    """What is trained."""

    algorithm: str
    policy: str
    make_env: Callable[[], Any]
    lanes: int


CASES = {
    "pendulum": Case("SAC", "MlpPolicy", lambda: gym.make("Pendulum-v1"), 1),
    "four": Case("TD3", "MlpPolicy", lambda: gym.make("Pendulum-v1"), 4),
    "goals": Case("SAC", "MultiInputPolicy", lambda: gym.wrappers.TimeLimit(GoalWalk(), 200), 1),
}


# ---------------------------------------------------------------- one side in one process


class Times:
    """Seconds of calls, by the wall clock and of this thread's CPU time."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {act: [] for act in ACTS}
        self.cpu: dict[str, list[float]] = {act: [] for act in ACTS}

    def of(self, act: str, call: Callable[[], Any], calls: int = 1) -> Any:
        """Time what makes some calls."""
        wall, cpu = time.perf_counter(), time.thread_time()
        result = call()
        self.cpu[act].append((time.thread_time() - cpu) / calls)
        self.wall[act].append((time.perf_counter() - wall) / calls)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        """Return microseconds a call."""
        return {
            act: {
                "wall_us": 1e6 * float(np.median(self.wall[act])), "wall_min_us": 1e6 * min(self.wall[act]),
                "cpu_us": 1e6 * float(np.median(self.cpu[act])), "cpu_min_us": 1e6 * min(self.cpu[act]),
            }
            for act in ACTS
        }  # fmt: skip


def buffer_class(side: str, space: spaces.Space[Any]) -> type[Any]:
    """Return the class that a side uses for a space."""
    from stable_baselines3.common import buffers  # noqa: PLC0415  children alone need it

    import holdall.sb3  # noqa: PLC0415  likewise

    if side == "holdall":
        return holdall.sb3.ReplayBuffer
    return buffers.DictReplayBuffer if isinstance(space, spaces.Dict) else buffers.ReplayBuffer


def alone(side: str, case: Case) -> dict[str, Any]:
    """Fill a buffer and draw from it; steps were made before, so that nothing but the calls is timed."""
    env = case.make_env()
    space, action_space, times = env.observation_space, env.action_space, Times()
    buffer = buffer_class(side, space)(100_000, space, action_space, device="cpu", n_envs=case.lanes)
    steps = [_step(env, case.lanes, t) for t in range(400)]

    def add_block(first: int) -> None:
        for step in steps[first : first + BLOCK]:
            buffer.add(*step)

    def sample_block() -> None:
        for _ in range(BLOCK):
            buffer.sample(BATCH)

    for turn in range(FILLED_STEPS // case.lanes // BLOCK):
        times.of("add", lambda turn=turn: add_block(turn * BLOCK % len(steps)), BLOCK)  # type: ignore[misc]
    for _ in range(DRAWN // BLOCK):
        times.of("sample", sample_block, BLOCK)
    return times.summary()


def _step(env: Any, lanes: int, number: int) -> tuple[Any, ...]:
    """Make one vectorised step up, the next observation of which is the next one's observation."""

    def seen(tick: int) -> Any:
        env.observation_space.seed(tick)
        drawn = [env.observation_space.sample() for _ in range(lanes)]
        if isinstance(drawn[0], dict):
            return {key: np.stack([one[key] for one in drawn]) for key in drawn[0]}
        return np.stack(drawn)

    ends = number % 200 == 199
    actions = np.stack([env.action_space.sample() for _ in range(lanes)])
    infos: list[dict[str, Any]] = [{"TimeLimit.truncated": ends} for _ in range(lanes)]
    return (
        seen(number),
        seen(-1 % 2**31 - number if ends else number + 1),
        actions,
        np.ones(lanes, np.float32),  # as vectorised environments give them
        np.full(lanes, ends),
        infos,
    )


def training(side: str, case: Case) -> dict[str, Any]:
    """Train with a buffer whose calls are timed from outside."""
    import stable_baselines3  # noqa: PLC0415  children alone need it
    from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: PLC0415  likewise

    times = Times()
    envs = DummyVecEnv([case.make_env] * case.lanes)
    parent: Any = buffer_class(side, envs.observation_space)

    class Timed(parent):  # type: ignore[misc]  # chosen at run time
        def add(self, *arguments: Any) -> None:
            times.of("add", lambda: parent.add(self, *arguments))

        def sample(self, *arguments: Any, **options: Any) -> Any:
            return times.of("sample", lambda: parent.sample(self, *arguments, **options))

    model = getattr(stable_baselines3, case.algorithm)(
        case.policy, envs, replay_buffer_class=Timed, learning_starts=LEARNING_STARTS, seed=SEED, device="cpu"
    )
    model.learn(TRAINING_STEPS * case.lanes)
    return times.summary()


# ---------------------------------------------------------------- all of them


def measure(ways: list[str], cases: list[str], rounds: int) -> dict[str, Any]:
    """Run both sides in turn, each in a fresh process; return the best round of each."""
    found: dict[str, Any] = {}
    for turn in range(rounds):
        for way in ways:
            for case in cases:
                for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                    command = [sys.executable, __file__, "--way", way, "--case", case, "--side", side]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    result = json.loads(done.stdout.splitlines()[-1])["result"]
                    found.setdefault(f"{way} {case}", {}).setdefault(side, []).append(result)
                    print(f"round {turn + 1} of {rounds}: {way}, {case}, {side} done", file=sys.stderr)
    return {name: _compared(sides) for name, sides in found.items()}


def _compared(sides: dict[str, list[Any]]) -> dict[str, Any]:
    rows = {}
    for act in ACTS:
        row: dict[str, Any] = {}
        for side, results in sides.items():
            row[side] = {kind: min(result[act][kind] for result in results) for kind in results[0][act]}
        row["ratio"] = {kind: row["holdall"][kind] / row["sb3"][kind] for kind in row["sb3"]}
        rows[act] = row
    return rows


def show(found: dict[str, Any]) -> bool:
    """Print a table to stderr; return whether all bars are met."""
    print(f"{'':24}{'SB3 wall, CPU us':>20}{'holdall wall, CPU':>20}{'ratio wall, CPU':>18}{'bar':>6}", file=sys.stderr)
    is_met = True
    for name, rows in found.items():
        bar = BARS[name.split()[0]]
        for act, row in rows.items():
            pairs = [f"{row[side]['wall_us']:.0f}, {row[side]['cpu_us']:.0f}" for side in SIDES]
            ratio = row["ratio"]
            is_met &= ratio["cpu_us"] <= bar
            line = f"{name + ' ' + act:24}{pairs[0]:>20}{pairs[1]:>20}"
            print(f"{line}{ratio['wall_us']:>11.2f}, {ratio['cpu_us']:.2f}{bar:>7}", file=sys.stderr)
    return is_met


def main() -> int:
    """Read the command line; measure one side here, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--way", choices=BARS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # a child's
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    if wanted.side:
        emit({"result": {"alone": alone, "training": training}[wanted.way](wanted.side, CASES[wanted.case])})
        return 0
    found = measure(
        [wanted.way] if wanted.way else list(BARS), [wanted.case] if wanted.case else list(CASES), wanted.rounds
    )
    is_met = show(found)
    result = {"commit": commit(), "machine": machine(), "versions": versions(), "rounds": wanted.rounds, "found": found}
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())

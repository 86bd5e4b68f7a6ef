"""Vectors in which columns repeat: bytes per transition, `add` and `sample`, compared with Stable-Baselines3's buffer.

    python benchmarks/memory/vectors.py [--case ant] [--rounds 2] [--traces DIR] [--short] [--json FILE]

There are three sides: Stable-Baselines3's buffer, the drop-in by default, and the drop-in with `budget=None`, which
packs vectors. Every side of every round is a fresh process, and the sides take turns. A process fills a buffer of
60,000 steps and draws 800 batches of 256. Bytes per transition are the growth of its anonymous memory until the buffer
is full: whole pages, and all fixed costs. (A slope would not count small arrays that huge pages bring in at once.)
Times are CPU time of the thread: the mean of all blocks of 50 adds, because some of them also pack ticks, and the
median of all blocks of 20 draws. The table shows the best round of each side.

`ant` makes up vectors that repeat as those of Gymnasium-Robotics' AntMaze do: 105 float64, of which 24 never change and
54 are contact forces of 9 bodies, which are 0 most of the time, and a goal in each episode. If that package is
installed, its own environment is recorded instead. `terms` and `frames` are 10 past values of 30 terms in one flat
vector: term by term, or step by step. Recordings (`panda_*.npz`, `robotics_FetchPush_*.npz`, `highway_*.npz`) are read
from --traces and are not part of the repository. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from holdall.machine import held_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.process import emit

SIDES = {"sb3": {}, "holdall": {}, "packed": {"budget": None}}
"""Arguments of each buffer. By default, holdall packs vectors once a quarter of the free memory is full."""
STEPS = 60_000
BATCH = 256
ADDED = 50
DRAWN = 20
DRAWS = 800
EPISODE = 300
PAST = 10
TERMS = 30
RECORDED = {"panda": "panda_*.npz", "fetch": "robotics_FetchPush_*.npz", "highway": "highway_*.npz"}
BARS = {"ant": (4.0, 0.8, 0.9), "terms": (8.0, None, None), "frames": (8.0, None, None)}
"""Of packed vectors: how many times less memory at least, and `add` and `sample` over Stable-Baselines3's at most."""
Step = tuple[Any, Any, bool]
"""Observation, next observation, whether the episode ends, without a lane axis."""


class Source(NamedTuple):
    """What is added."""

    space: spaces.Space[Any]
    steps: Iterator[Step]
    kind: str  # recorded, or made up


def _box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, dtype)


# ---------------------------------------------------------------- what repeats


def ant(_traces: Path | None) -> Source:
    """Return AntMaze, recorded, or vectors that repeat as its do."""
    try:
        gym.register_envs(importlib.import_module("gymnasium_robotics"))
        return _recorded_env(gym.make("AntMaze_UMaze-v5", max_episode_steps=EPISODE))
    except ImportError:
        space = spaces.Dict(
            achieved_goal=_box((2,), "f8"), desired_goal=_box((2,), "f8"), observation=_box((105,), "f8")
        )
        return Source(space, _ant_like(), "made up")


def _recorded_env(env: Any) -> Source:
    """Record some episodes, and add them again and again."""
    env.action_space.seed(0)
    seen, _ = env.reset(seed=0)
    steps = []
    for _ in range(5 * EPISODE):
        after, _, terminated, truncated, _ = env.step(env.action_space.sample())
        steps.append((seen, after, bool(terminated or truncated)))
        seen = env.reset()[0] if steps[-1][2] else after
    return Source(env.observation_space, itertools.cycle(steps), "recorded")


def _ant_like() -> Iterator[Step]:
    rng = np.random.default_rng(0)
    touched = np.repeat([0.31, *[0.03, 0.1] * 4], 6)  # how often the force on a body changes
    for _ in itertools.count():
        body = rng.normal(size=29)
        goal = rng.normal(size=2)
        forces = np.zeros(54)
        seen = None
        for t in range(EPISODE + 1):
            body = body + 0.1 * rng.normal(size=29)
            is_on = np.repeat(rng.random(9), 6) < touched
            forces = np.where(is_on, rng.normal(size=54), 0.0)
            observation = np.concatenate([body[:27], np.zeros(24), forces])
            after = {"achieved_goal": body[27:], "desired_goal": goal, "observation": observation}
            if seen is not None:
                yield seen, after, t == EPISODE
            seen = after


def _histories(order: tuple[int, int]) -> Source:
    """Past values of terms in one flat vector, which begin again with every episode."""

    def steps() -> Iterator[Step]:
        rng = np.random.default_rng(0)
        for _ in itertools.count():
            past = np.zeros((PAST, TERMS), np.float32)
            seen = None
            for t in range(EPISODE + 1):
                past = np.concatenate([past[1:], rng.normal(size=(1, TERMS)).astype(np.float32)])
                after = np.ascontiguousarray(past.transpose(order)).reshape(-1)
                if seen is not None:
                    yield seen, after, t == EPISODE
                seen = after

    return Source(_box((PAST * TERMS,), "f4"), steps(), "made up")


def _recorded(name: str) -> Callable[[Path | None], Source]:
    def source(traces: Path | None) -> Source:
        file = np.load(next(iter((traces or Path()).glob(RECORDED[name]))))
        seen = {key.removeprefix("f_"): file[key] for key in file.files if key.startswith("f_")}
        steps = []
        for first, count in file["ep"].tolist():
            rows = [{key: rows[first + t] for key, rows in seen.items()} for t in range(count + 1)]
            if set(seen) == {"obs"}:
                rows = [row["obs"] for row in rows]
            steps += [(rows[t], rows[t + 1], t == count - 1) for t in range(count)]
        boxes: dict[str, spaces.Space[Any]] = {
            key: _box(rows.shape[1:], rows.dtype) for key, rows in sorted(seen.items())
        }
        space = boxes["obs"] if set(seen) == {"obs"} else spaces.Dict(boxes)
        return Source(space, itertools.cycle(steps), "recorded")

    return source


CASES: dict[str, Callable[[Path | None], Source]] = {
    "ant": ant,
    **{name: _recorded(name) for name in RECORDED},
    "terms": lambda _: _histories((1, 0)),
    "frames": lambda _: _histories((0, 1)),
}


# ---------------------------------------------------------------- one side in one process


def measure_side(side: str, case: str, traces: Path | None) -> dict[str, Any]:
    """Fill a buffer and draw from it. Nothing but its calls is timed."""
    from stable_baselines3.common import buffers  # noqa: PLC0415  children alone need it

    import holdall.sb3  # noqa: PLC0415  likewise

    source = CASES[case](traces)
    theirs: Any = buffers.DictReplayBuffer if isinstance(source.space, spaces.Dict) else buffers.ReplayBuffer
    made: Any = theirs if side == "sb3" else holdall.sb3.ReplayBuffer
    for _ in itertools.islice(source.steps, 1_000):  # what a source allocates for itself
        continue
    before = held_bytes().anonymous
    buffer = made(STEPS, source.space, spaces.Box(-1, 1, (8,), np.float32), device="cpu", n_envs=1, **SIDES[side])
    times: dict[str, list[float]] = {"add": [], "sample": []}
    for _ in range(STEPS // ADDED):
        given = [_arguments(step) for step in itertools.islice(source.steps, ADDED)]
        start = time.thread_time()
        for each in given:
            buffer.add(*each)
        times["add"].append((time.thread_time() - start) / ADDED)
    held = held_bytes().anonymous - before
    for _ in range(DRAWS // DRAWN):
        start = time.thread_time()
        for _ in range(DRAWN):
            buffer.sample(BATCH)
        times["sample"].append((time.thread_time() - start) / DRAWN)
    found = "" if side == "sb3" else str(buffer.memory.report())
    return {
        "bytes": held / STEPS,
        "add_us": 1e6 * float(np.mean(times["add"])),
        "add_median_us": 1e6 * float(np.median(times["add"])),
        "sample_us": 1e6 * float(np.median(times["sample"])),
        "report": found,
        "kind": source.kind,
    }


def _arguments(step: Step) -> tuple[Any, ...]:
    obs, next_obs, ends = step
    lanes = [{key: rows[None] for key, rows in o.items()} if isinstance(o, dict) else o[None] for o in (obs, next_obs)]
    action = np.zeros((1, 8), np.float32)
    reward = np.ones(1, np.float32)
    return *lanes, action, reward, np.array([ends]), [{"TimeLimit.truncated": ends}]


# ---------------------------------------------------------------- all of them


def measure(cases: list[str], rounds: int, traces: Path | None) -> dict[str, Any]:
    """Run both sides in turn, each in a fresh process. Return the best round of each."""
    found: dict[str, Any] = {case: {side: [] for side in SIDES} for case in cases}
    for turn in range(rounds):
        for case in cases:
            for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
                command = [sys.executable, __file__, "--case", case, "--side", side]
                command += ["--traces", str(traces)] if traces else []
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[case][side].append(json.loads(done.stdout.splitlines()[-1])["result"])
                print(f"round {turn + 1} of {rounds}: {case}, {side} done", file=sys.stderr)
    return {case: _compared(sides) for case, sides in found.items()}


def _compared(sides: dict[str, list[Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for side, results in sides.items():
        row[side] = {key: min(result[key] for result in results) for key in results[0] if key.endswith("_us")}
        row[side]["bytes"] = float(np.median([result["bytes"] for result in results]))
    row["kind"] = sides["sb3"][0]["kind"]
    for side in ("holdall", "packed"):
        row[side]["report"] = sides[side][-1]["report"]
        row[side]["times_less"] = row["sb3"]["bytes"] / row[side]["bytes"]
        row[side]["ratio"] = {key: row[side][key] / row["sb3"][key] for key in ("add_us", "sample_us")}
    return row


NAMES = {
    "ant": "AntMaze: Dict of 105 float64 and goals",
    "panda": "PandaPickAndPlace: Dict of 19 float32 and goals",
    "fetch": "FetchPush: Dict of 25 float64 and goals",
    "highway": "highway-fast: 15 x 5 float32",
    "terms": "10 past values of 30 terms, term by term, float32",
    "frames": "10 past values of 30 terms, step by step, float32",
}


def figures_of(case: str, row: dict[str, Any]) -> list[Figure]:
    """Return the figures of a case."""
    name = f"{NAMES[case]}, {row['kind']}"
    figures = [Figure(name, "SB3", "B", row["sb3"]["bytes"])]
    times_less, add, sample = BARS.get(case, (1.0, None, None))
    for side, title in (("holdall", "holdall"), ("packed", "packed")):
        ours = row[side]
        is_judged = side == "packed"
        figures += [
            Figure(name, title, "B", ours["bytes"]),
            Figure(name, f"{title}, less by", "times", ours["times_less"], _bar("at least", times_less, is_judged)),
            Figure(name, f"{title}, `add`", "of SB3's time", ours["ratio"]["add_us"], _bar("at most", add, is_judged)),
            Figure(
                name,
                f"{title}, `sample(256)`",
                "of SB3's time",
                ours["ratio"]["sample_us"],
                _bar("at most", sample, is_judged),
            ),
        ]
    return figures


def _bar(words: str, limit: float | None, is_judged: bool) -> str | None:
    return f"{words} {limit}" if is_judged and limit is not None else None


def are_met(found: dict[str, Any]) -> bool:
    """Whether all bars are met."""
    met = True
    for case, row in found.items():
        times_less, add, sample = BARS.get(case, (1.0, None, None))
        packed = row["packed"]
        met &= packed["times_less"] >= times_less
        met &= all(bar is None or packed["ratio"][key] <= bar for key, bar in (("add_us", add), ("sample_us", sample)))
    return bool(met)


def main() -> int:
    """Read the command line. Measure one side here, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # a child's
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side (%(default)s)")
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="folder of the recordings; without it, their cases are left out"
    )
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    if wanted.side:
        emit({"result": measure_side(wanted.side, wanted.case, wanted.traces)})
        return 0
    cases = [wanted.case] if wanted.case else [case for case in CASES if wanted.traces or case not in RECORDED]
    rounds = 1 if wanted.short else wanted.rounds
    run = describe_run({"short": wanted.short, "rounds": rounds})
    found = measure(cases, rounds, wanted.traces)
    for case, row in found.items():
        figures = figures_of(case, row)
        show(figures)
        if wanted.json:
            store(wanted.json, figures, run)
    return 0 if are_met(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())

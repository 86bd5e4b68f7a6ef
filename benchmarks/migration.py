"""What moving to holdall changes: bytes and times before and after, a case for every guide in docs/guides.

    python benchmarks/migration.py [--case loop] [--steps 10000] [--json results/migration.json] [--docs]

Memory is what the process's own pages (USS) have grown by when all transitions are held, each side in a fresh process,
without what libraries take.
Times are medians of all sides in one process, turn by turn, on the same steps: one step in blocks of 100, by the CPU
time of the loop's thread, which other programs on the machine change little; one batch of 256, by the wall clock.
`--docs` writes the tables of the guides from the results, and measures nothing. A case whose packages are missing says
so, and keeps the results that are there.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from process import commit, emit, machine, versions
from streams import Step, Stream

import holdall
from holdall.machine import held_bytes
from holdall.units import format_bytes

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "migration.json"
BATCH, BLOCK, DRAWN, WARM_UP = 256, 100, 5, 300
SIDES = ("before", "holdall", "compressed")
AGENTS = ("red", "green", "blue", "white")


class Side:
    """One way to keep transitions: what a loop calls at every step, and what it draws."""

    def __init__(self, stream: Stream, capacity: int, budget: str | None) -> None:
        self.stream, self.capacity, self.budget = stream, capacity, budget

    def memory(self, **settings: Any) -> holdall.ReplayMemory:
        """Make a memory for the stream."""
        spaces_ = self.stream.observation_space, self.stream.action_space
        return holdall.ReplayMemory(*spaces_, self.capacity, budget=self.budget, seed=0, **settings)

    def add(self, step: Step) -> None:
        """Keep one step."""
        raise NotImplementedError

    def sample(self) -> Any:
        """Draw a batch."""
        raise NotImplementedError


# ---------------------------------------------------------------- a plain loop


class PlayedEnv(gym.Env[Any, Any]):
    """Gives the steps that it is handed: an environment that costs nothing."""

    def __init__(self, stream: Stream) -> None:
        self.observation_space, self.action_space = stream.observation_space, stream.action_space
        self.next: Step

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the observation that the next step begins with."""
        return self.next.obs[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return what the step that was handed over led to."""
        step = self.next
        return step.next_obs[0], float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), {}


class Deque(Side):
    """A deque of tuples, and `random.sample`."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.env, self.obs = PlayedEnv(self.stream), None
        self.held: deque[Any] = deque(maxlen=self.capacity)

    def add(self, step: Step) -> None:
        """Step, append, and reset where an episode ended."""
        self.env.next = step
        if self.obs is None:
            self.obs, _ = self.env.reset()
        action = step.action[0]
        next_obs, reward, terminated, truncated, _ = self.env.step(action)
        self.held.append((self.obs, action, reward, next_obs, terminated))
        self.obs = None if terminated or truncated else next_obs

    def sample(self) -> Any:
        """Stack what was drawn."""
        return [np.stack(column) for column in zip(*random.sample(self.held, BATCH), strict=True)]


class Recorded(Side):
    """A recorder."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.env, self.held = PlayedEnv(self.stream), self.memory()
        self.recorder = holdall.Recorder(self.env, self.held)

    def add(self, step: Step) -> None:
        """Step and add."""
        self.env.next = step
        self.recorder.step(step.action[0])

    def sample(self) -> Any:
        """Draw arrays."""
        return self.held.sample(BATCH)


# ---------------------------------------------------------------- Tianshou


class TianshouBuffer(Side):
    """The replay buffer of Tianshou."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        data = importlib.import_module("tianshou.data")
        self.batch, self.held = data.Batch, data.ReplayBuffer(self.capacity)

    def add(self, step: Step) -> None:
        """Make a Batch, and add it."""
        self.held.add(
            self.batch(
                obs=step.obs[0], act=step.action[0], rew=step.reward[0], obs_next=step.next_obs[0],
                terminated=step.terminated[0], truncated=step.truncated[0], info={},
            )
        )  # fmt: skip

    def sample(self) -> Any:
        """Draw a Batch of arrays."""
        return self.held.sample(BATCH)[0]


class Added(Side):
    """A memory, by `add`."""

    device: str | None = None

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.held = self.memory(device=self.device)

    def add(self, step: Step) -> None:
        """Add a tick."""
        self.held.add(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated)

    def sample(self) -> Any:
        """Draw arrays."""
        return self.held.sample(BATCH)


# ---------------------------------------------------------------- JAX


class Rings(Side):
    """Arrays of NumPy, written in turn; batches go to JAX by `jnp.asarray`."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        observed, count = self.stream.observation_space, self.capacity
        self.jnp, self.added = importlib.import_module("jax.numpy"), 0
        self.rings = {
            "obs": np.zeros((count, *observed.shape), observed.dtype),  # type: ignore[misc]  # a Box has a shape
            "next_obs": np.zeros((count, *observed.shape), observed.dtype),  # type: ignore[misc]  # likewise
            "action": np.zeros(count, np.int64), "reward": np.zeros(count, np.float32),
            "terminated": np.zeros(count, np.bool_),
        }  # fmt: skip
        self.random = np.random.default_rng(0)

    def add(self, step: Step) -> None:
        """Write one row of every array."""
        place = self.added % self.capacity
        for name, ring in self.rings.items():
            ring[place] = getattr(step, name)[0]
        self.added += 1

    def sample(self) -> Any:
        """Gather rows and bring them to JAX."""
        rows = self.random.integers(0, min(self.added, self.capacity), BATCH)
        return [self.jnp.asarray(ring[rows]).block_until_ready() for ring in self.rings.values()]


class AddedForJax(Added):
    """A memory that gives arrays of JAX."""

    device = "jax"

    def sample(self) -> Any:
        """Draw arrays of JAX, and wait for them as the other side does."""
        batch = self.held.sample(BATCH)
        arrays = (batch.obs, batch.next_obs, batch.action, batch.reward, batch.terminated)
        return [array.block_until_ready() for array in arrays]


# ---------------------------------------------------------------- several agents


class PerAgent(Side):
    """One set of arrays for every agent, drawn at the same rows."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.added, self.random = 0, np.random.default_rng(0)
        count, seen = self.capacity, self.stream.observation_space
        self.rings: dict[str, dict[str, NDArray[Any]]] = {
            agent: {
                "obs": np.zeros((count, *seen[agent].shape), np.uint8),  # type: ignore[index]  # a Dict
                "next_obs": np.zeros((count, *seen[agent].shape), np.uint8),  # type: ignore[index]  # a Dict
                "action": np.zeros(count, np.int64),
            }
            for agent in AGENTS
        }
        self.reward, self.terminated = np.zeros((count, len(AGENTS)), np.float32), np.zeros(count, np.bool_)

    def add(self, step: Step) -> None:
        """Write a row of every agent's arrays."""
        place, action = self.added % self.capacity, {agent: step.action[0, i] for i, agent in enumerate(AGENTS)}
        for agent, rings in self.rings.items():
            rings["obs"][place], rings["next_obs"][place] = step.obs[agent][0], step.next_obs[agent][0]
            rings["action"][place] = action[agent]
        self.reward[place], self.terminated[place] = step.reward[0], step.terminated[0]
        self.added += 1

    def sample(self) -> Any:
        """Gather the same rows of every agent."""
        rows = self.random.integers(0, min(self.added, self.capacity), BATCH)
        drawn = {agent: {name: ring[rows] for name, ring in rings.items()} for agent, rings in self.rings.items()}
        return drawn, self.reward[rows], self.terminated[rows]


def plaza(seed: int = 0) -> Stream:
    """Four agents walk on a common map; each sees 11 x 11 cells around itself as an image of 88 x 88 x 3."""
    observed = spaces.Dict({agent: spaces.Box(0, 255, (88, 88, 3), np.uint8) for agent in AGENTS})
    return Stream(observed, spaces.MultiDiscrete([5] * len(AGENTS)), 1, _walk(np.random.default_rng(seed)))


def _walk(generator: np.random.Generator) -> Iterator[Step]:
    colours = generator.integers(0, 256, (8, 3), np.uint8)
    moves = np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)])
    for episode in itertools.count():
        cells, places = generator.integers(0, 4, (40, 40)), generator.integers(5, 35, (len(AGENTS), 2))
        obs = _views(cells, places, colours)
        for t in range(1, 101):
            action = generator.integers(0, 5, len(AGENTS))
            places = np.clip(places + moves[action], 5, 34)
            cells[tuple(generator.integers(0, 40, 2))] = generator.integers(0, 4)
            next_obs, ended = _views(cells, places, colours), np.array([t == 100])
            cut = ended if episode % 2 else ~ended & ended
            yield Step(obs, action[None], np.array([0.0], np.float32), next_obs, ended & ~cut, cut)
            obs = next_obs


def _views(cells: NDArray[Any], places: NDArray[Any], colours: NDArray[np.uint8]) -> dict[str, NDArray[np.uint8]]:
    drawn = cells.copy()
    for number, place in enumerate(places):
        drawn[tuple(place)] = 4 + number
    return {
        agent: colours[np.kron(drawn[y - 5 : y + 6, x - 5 : x + 6], np.ones((8, 8), np.int64))][None]
        for agent, (y, x) in zip(AGENTS, places, strict=True)
    }


# ---------------------------------------------------------------- measuring


def _atari() -> Stream:
    return importlib.import_module("streams.atari").stream()  # type: ignore[no-any-return]  # loaded where it is played


class Case(NamedTuple):
    """A guide's own: what is played, both sides, what they were called before, and what must be installed."""

    guide: str
    played: str
    before: str
    stream: Callable[[], Stream]
    sides: tuple[type[Side], type[Side]]
    needs: str | None = None


CASES = {
    "loop": Case("plain_loop", "Seaquest, stacks of 4 frames", "deque of tuples", _atari, (Deque, Recorded)),
    "tianshou": Case(
        "tianshou", "Seaquest, stacks of 4 frames", "Tianshou", _atari, (TianshouBuffer, Added), "tianshou"
    ),
    "jax": Case("jax", "Seaquest, stacks of 4 frames", "NumPy arrays", _atari, (Rings, AddedForJax), "jax"),
    "multi-agent": Case(
        "multi_agent", "4 agents, images of 88 x 88 x 3", "arrays for each agent", plaza, (PerAgent, Added)
    ),
}


def made(case: Case, side: str, stream: Stream, capacity: int) -> Side:
    """Make one side of a case."""
    return case.sides[side != "before"](stream, capacity, None if side == "compressed" else "auto")


def measure_memory(name: str, side: str, steps: int) -> int:
    """Return the bytes that this process holds for all transitions of one side."""
    stream = CASES[name].stream()
    first = made(CASES[name], side, stream, WARM_UP)
    for step in itertools.islice(stream.steps, WARM_UP):
        first.add(step)
    first.sample()  # libraries are loaded: they are not counted
    del first
    gc.collect()
    before = held_bytes().unique
    held = made(CASES[name], side, stream, steps)
    for step in itertools.islice(stream.steps, steps):
        held.add(step)
    if side == "compressed":
        held.held.store.wait_idle()  # type: ignore[attr-defined]  # a memory's
    return held_bytes().unique - before


def measure_times(name: str, steps: int) -> dict[str, dict[str, float]]:
    """Return microseconds of an `add` and of a `sample`, by side: medians, turn by turn."""
    case = CASES[name]
    stream = case.stream()
    sides = {side: made(case, side, stream, steps) for side in SIDES}
    times: dict[str, dict[str, list[float]]] = {side: {"add": [], "sample": []} for side in SIDES}
    for turn in range(steps // BLOCK):
        block = list(itertools.islice(stream.steps, BLOCK))
        for side in SIDES[turn % 3 :] + SIDES[: turn % 3]:
            start = time.thread_time()
            for step in block:
                sides[side].add(step)
            times[side]["add"].append((time.thread_time() - start) / BLOCK)
    sides["compressed"].held.store.wait_idle()  # type: ignore[attr-defined]  # a memory's
    for turn in range(40):
        for side in SIDES[turn % 3 :] + SIDES[: turn % 3]:
            for _ in range(DRAWN):
                start = time.perf_counter()
                batch = sides[side].sample()
                times[side]["sample"].append(time.perf_counter() - start)
                del batch
    return {side: {act: 1e6 * float(np.median(found)) for act, found in of.items()} for side, of in times.items()}


def in_child(*arguments: str) -> Any:
    """Run this script in a fresh process and return its result."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])["result"]


def measure(name: str, steps: int) -> dict[str, Any]:
    """Measure a case, in processes of its own."""
    common = ("--case", name, "--steps", str(steps))
    memory = {side: in_child(*common, "--memory", side) for side in SIDES}
    return {
        "transitions": steps, "held_bytes": memory, "times_us": in_child(*common, "--times"),
        "machine": machine(), "versions": versions(*filter(None, [CASES[name].needs])), "commit": commit(),
    }  # fmt: skip


def table(name: str, result: dict[str, Any]) -> str:
    """Write a case as the table of its guide."""
    case, taken, times = CASES[name], result["held_bytes"], result["times_us"]
    others = SIDES[1:]
    lines = [
        f"| {case.played}, {result['transitions']:,} transitions | {case.before} | holdall | holdall, `budget=None` |",
        "|---|---|---|---|",
        f"| memory | {format_bytes(taken['before'])} | "
        + " | ".join(f"{format_bytes(taken[side])}, {taken['before'] / taken[side]:,.1f} x less" for side in others)
        + " |",
    ]
    for act, words in (("add", "one step, CPU time"), ("sample", f"a batch of {BATCH}")):
        cells = [f"{times[side][act]:,.0f} us" for side in SIDES]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rewritten(name: str, results: dict[str, Any]) -> tuple[Path, str]:
    """Return a case's guide, and its text with the table of the results."""
    path = ROOT / "docs" / "guides" / f"{CASES[name].guide}.md"
    pattern = r"(<!-- measured: [^>]*-->\n).*?(<!-- end of measured -->)"
    text = path.read_text(encoding="utf-8")
    return path, re.sub(pattern, lambda found: found[1] + table(name, results[name]) + found[2], text, flags=re.DOTALL)


def main() -> None:
    """Read the command line; measure, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--memory", choices=SIDES)
    parser.add_argument("--times", action="store_true")
    wanted = parser.parse_args()
    if wanted.memory:
        emit({"result": measure_memory(wanted.case, wanted.memory, wanted.steps)})
        return
    if wanted.times:
        emit({"result": measure_times(wanted.case, wanted.steps)})
        return
    results = json.loads(wanted.json.read_text(encoding="utf-8")) if wanted.json.exists() else {}
    for name in [] if wanted.docs else [wanted.case] if wanted.case else CASES:
        if (needs := CASES[name].needs) and importlib.util.find_spec(needs) is None:
            print(f"{name}: not measured, needs pip install {needs}", file=sys.stderr)
            continue
        results[name] = measure(name, wanted.steps)
        print(table(name, results[name]))
        wanted.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name in results if wanted.docs else ():
        path, text = rewritten(name, results)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

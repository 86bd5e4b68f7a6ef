"""Memory and times of other ways to keep transitions, compared with holdall.

    python benchmarks/libraries.py [--case buffers|loop|tianshou|jax|multi-agent] [--short] [--json FILE]

`buffers` runs `holdall bench buffers`, which gives the same recorded steps to every installed library and compares all
rows afterwards (docs/bench.md). The other cases are those of the guides: a deque of tuples, Tianshou, arrays of NumPy
for JAX, and arrays for each agent.

In the cases of the guides, memory is the growth of the process's own pages (USS) until all transitions are held. Each
side has a fresh process, and libraries are not counted. Times are medians of all sides in one process, in turns, on the
same steps: one step in blocks of 100, by the CPU time of the thread, and one batch of 256, by the wall clock. A case
whose packages are missing is skipped and named.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from results import Figure, describe_run, show, store
from shared.process import emit
from shared.streams import Step, Stream

import holdall
from holdall.machine import held_bytes
from holdall.tools.bench.compare_buffers import make_table_rows

MIB = 2**20
BATCH = 256
BLOCK = 100
DRAWN = 5
WARM_UP = 300
STEPS = 10_000
SHORT_STEPS = 4_000
SIDES = ("before", "holdall", "compressed")
AGENTS = ("red", "green", "blue", "white")


class Side:
    """One way to keep transitions: what a loop calls at every step, and what it draws."""

    def __init__(self, stream: Stream, capacity: int, budget: str | None) -> None:
        self.stream = stream
        self.capacity = capacity
        self.budget = budget

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
        self.observation_space = stream.observation_space
        self.action_space = stream.action_space
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
        self.env = PlayedEnv(self.stream)
        self.obs = None
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
                obs=step.obs[0],
                act=step.action[0],
                rew=step.reward[0],
                obs_next=step.next_obs[0],
                terminated=step.terminated[0],
                truncated=step.truncated[0],
                info={},
            )
        )

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
    """Arrays of NumPy, written in turn. Batches go to JAX by `jnp.asarray`."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        observed = self.stream.observation_space
        count = self.capacity
        self.jnp = importlib.import_module("jax.numpy")
        self.added = 0
        self.rings = {
            "obs": np.zeros((count, *observed.shape), observed.dtype),  # type: ignore[misc]  # a Box has a shape
            "next_obs": np.zeros((count, *observed.shape), observed.dtype),  # type: ignore[misc]  # likewise
            "action": np.zeros(count, np.int64),
            "reward": np.zeros(count, np.float32),
            "terminated": np.zeros(count, np.bool_),
        }
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
        self.added = 0
        self.random = np.random.default_rng(0)
        count = self.capacity
        seen = self.stream.observation_space
        self.rings: dict[str, dict[str, NDArray[Any]]] = {
            agent: {
                "obs": np.zeros((count, *seen[agent].shape), np.uint8),  # type: ignore[index]  # a Dict
                "next_obs": np.zeros((count, *seen[agent].shape), np.uint8),  # type: ignore[index]  # a Dict
                "action": np.zeros(count, np.int64),
            }
            for agent in AGENTS
        }
        self.reward = np.zeros((count, len(AGENTS)), np.float32)
        self.terminated = np.zeros(count, np.bool_)

    def add(self, step: Step) -> None:
        """Write a row of every agent's arrays."""
        place = self.added % self.capacity
        action = {agent: step.action[0, i] for i, agent in enumerate(AGENTS)}
        for agent, rings in self.rings.items():
            rings["obs"][place] = step.obs[agent][0]
            rings["next_obs"][place] = step.next_obs[agent][0]
            rings["action"][place] = action[agent]
        self.reward[place] = step.reward[0]
        self.terminated[place] = step.terminated[0]
        self.added += 1

    def sample(self) -> Any:
        """Gather the same rows of every agent."""
        rows = self.random.integers(0, min(self.added, self.capacity), BATCH)
        drawn = {agent: {name: ring[rows] for name, ring in rings.items()} for agent, rings in self.rings.items()}
        return drawn, self.reward[rows], self.terminated[rows]


def plaza(seed: int = 0) -> Stream:
    """Four agents walk on a common map. Each sees 11 x 11 cells around itself as an image of 88 x 88 x 3."""
    observed = spaces.Dict({agent: spaces.Box(0, 255, (88, 88, 3), np.uint8) for agent in AGENTS})
    return Stream(observed, spaces.MultiDiscrete([5] * len(AGENTS)), 1, _walk(np.random.default_rng(seed)))


def _walk(generator: np.random.Generator) -> Iterator[Step]:
    colours = generator.integers(0, 256, (8, 3), np.uint8)
    moves = np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)])
    for episode in itertools.count():
        cells = generator.integers(0, 4, (40, 40))
        places = generator.integers(5, 35, (len(AGENTS), 2))
        obs = _views(cells, places, colours)
        for t in range(1, 101):
            action = generator.integers(0, 5, len(AGENTS))
            places = np.clip(places + moves[action], 5, 34)
            cells[tuple(generator.integers(0, 40, 2))] = generator.integers(0, 4)
            next_obs = _views(cells, places, colours)
            ended = np.array([t == 100])
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
    return importlib.import_module("shared.streams.atari").stream()  # type: ignore[no-any-return]  # loaded where it is played


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


def measure_way(name: str, steps: int) -> dict[str, Any]:
    """Measure a case of a guide, in processes of its own."""
    common = ("--case", name, "--steps", str(steps))
    held = {side: in_child(*common, "--memory", side) for side in SIDES}
    return {"held_bytes": held, "times_us": in_child(*common, "--times")}


def figures_of_way(name: str, result: dict[str, Any]) -> list[Figure]:
    """Return the figures of a case of a guide."""
    case = CASES[name]
    figures = []
    for side in SIDES:
        label = f"{case.before}: {case.played}" if side == "before" else f"holdall instead of {case.before}"
        label = f"ways: {label}" + (", compressed" if side == "compressed" else "")
        held = result["held_bytes"][side]
        figures += [
            Figure(label, "memory", "MiB", held / MIB),
            Figure(label, "less by", "times", result["held_bytes"]["before"] / held),
            Figure(label, "`add`", "us", result["times_us"][side]["add"]),
            Figure(label, f"`sample({BATCH})`", "us", result["times_us"][side]["sample"]),
        ]
    return figures


# ---------------------------------------------------------------- libraries, by `holdall bench buffers`


def measure_buffers(rounds: int) -> list[dict[str, Any]]:
    """Run `holdall bench buffers`, and return the lines of its file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "buffers.jsonl")
        command = [sys.executable, "-m", "holdall", "bench", "buffers", "--rounds", str(rounds), "--out", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def figures_of_buffers(records: list[dict[str, Any]]) -> list[Figure]:
    """Return the figures of all libraries. Table cells with text come from `holdall bench buffers` itself."""
    figures = []
    for record in records:
        if record["kind"] == "buffer":
            played = "Seaquest" if record["case"] == "atari" else record["case"]
            label = f"{played}: {record['library']} {record['version'] or ''}".strip()
            right = make_table_rows([record], record["case"])[0][-1]
            figures += [
                Figure(label, "memory", "MiB", record["bytes"] / MIB),
                Figure(label, "`add`", "us", record["add_us"]),
                Figure(label, "`sample(256)`", "ms", record["sample_ms"]),
                Figure(label, "save", "s", record["save_s"]),
                Figure(label, "bytes on disk", "MiB", record["file_bytes"] / MIB),
                Figure(label, "load", "s", record["load_s"]),
                Figure(label, "came back right", "", right),
                Figure(label, "transitions", "", record["transitions"]),
            ]
    return figures


def main() -> None:
    """Read the command line, and measure one part here or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("buffers", *CASES), action="append")
    parser.add_argument("--short", action="store_true", help="4,000 transitions for the guides, one round of libraries")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--memory", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.memory:
        emit({"result": measure_memory(wanted.case[0], wanted.memory, wanted.steps)})
        return
    if wanted.times:
        emit({"result": measure_times(wanted.case[0], wanted.steps)})
        return
    run = describe_run({"short": wanted.short}, ("torchrl", "tianshou", "cpprb", "sb3-extra-buffers", "jax"))
    for name in wanted.case or ("buffers", *CASES):
        if name == "buffers":
            figures = figures_of_buffers(measure_buffers(1 if wanted.short else 3))
        elif (needs := CASES[name].needs) and importlib.util.find_spec(needs) is None:
            print(f"{name}: skipped, needs pip install {needs}", file=sys.stderr)
            continue
        else:
            figures = figures_of_way(name, measure_way(name, SHORT_STEPS if wanted.short else STEPS))
        show(figures)
        if wanted.json is not None:
            store(wanted.json, figures, run)


if __name__ == "__main__":
    main()

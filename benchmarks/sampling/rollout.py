"""Rollouts compared with Stable-Baselines3's: memory, its peak, minibatch time, allocations, advantages.

    python benchmarks/sampling/rollout.py [--only memory] [--short] [--json FILE]

The data is 144 x 160 x 3 screens, stacks of 4, 8,192 steps in 2 environments. Memory is the unique set size (USS) of a
fresh process for each side, less its USS before the buffer was made. The peak is the high-water mark of the resident
set while minibatches are drawn, less one minibatch. Times are taken in one process, turn by turn. Linux only. The exit
status is 1 if a bar was not met.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer as PlainRolloutBuffer

from holdall import RolloutMemory
from holdall.machine import held_bytes
from holdall.sb3 import RolloutBuffer

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.process import emit
from shared.streams import screens

MIB = 2**20
LANES = 2
STEPS = 8_192
SHORT_STEPS = 768
BATCH = 2_048
TIMED_STEPS = 4_096  # two buffers in one process; a minibatch takes as long as from a longer rollout
UPDATE_STEPS = 256
SPACE = spaces.Box(0, 255, screens.OBSERVED, np.uint8)
BUTTONS = spaces.Discrete(6)
OBS_BYTES = int(np.prod(screens.OBSERVED))
SIDES = ("sb3", "holdall")

Steps = Iterator[tuple[Any, Any]]


class Side:
    """One buffer, filled and read in its own way."""

    def __init__(self, name: str, steps: int, compress: str | None = None) -> None:
        self.name = name
        self._steps = steps
        self._compress = compress
        self._floats = np.random.default_rng(0).standard_normal(LANES, np.float32)
        self._tensor = torch.from_numpy(self._floats)
        self._never = np.zeros(LANES, np.bool_)
        self._actions = np.zeros(LANES, np.int64)
        self._began = self._never
        self.buffer: Any = self._new()

    def _new(self) -> Any:
        if self.name == "core":
            compress = self._compress
            return RolloutMemory(SPACE, BUTTONS, self._steps, LANES, device="cpu", compress=compress, seed=0)
        settings: dict[str, Any] = {"device": "cpu", "gae_lambda": 0.95, "gamma": 0.99, "n_envs": LANES}
        if self.name == "sb3":
            return PlainRolloutBuffer(self._steps, SPACE, BUTTONS, **settings)
        return RolloutBuffer(self._steps, SPACE, BUTTONS, compress=self._compress, **settings)

    def add(self, obs: Any, began: Any) -> None:
        """Add one step."""
        if self.name == "core":
            # An end is told with its step there, which nobody knows before the next one begins: none is told.
            floats = self._floats
            never = self._never
            self.buffer.add(obs, self._actions, floats, never, never, floats, floats)
        else:
            self.buffer.add(obs, self._actions, self._floats, began, self._tensor, self._tensor)

    def finish(self) -> None:
        """Estimate advantages."""
        if self.name == "core":
            self.buffer.finish(self._floats)
        else:
            self.buffer.compute_returns_and_advantage(self._tensor, self._never)

    def minibatches(self) -> Iterator[Any]:
        """Draw one epoch."""
        return iter(self.buffer.minibatches(BATCH) if self.name == "core" else self.buffer.get(BATCH))

    def collect(self, steps: Steps) -> None:
        """Reset the buffer and fill it."""
        self.buffer.reset()
        for obs, began in itertools.islice(steps, self._steps):
            self.add(obs, began)
        self.finish()


def source(name: str) -> Steps:
    """Yield stacks for ever."""
    make = screens.noise if name == "noise" else screens.game
    return screens.stacks([make(seed) for seed in range(LANES)])


def resident(field: str) -> int:
    """Read a line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def memory_of(side_name: str, steps: int, frames: str, compress: str | None) -> dict[str, Any]:
    """Fill a buffer twice over and draw an epoch of minibatches each time."""
    given = source(frames)
    for _ in itertools.islice(given, 32):
        pass
    small = Side(side_name, 8)  # what its code and torch take the first time is no memory of rollouts
    small.collect(given)
    for batch in small.minibatches():
        del batch
    del small
    gc.collect()
    before = held_bytes().unique
    resident_before = resident("VmRSS")
    side = Side(side_name, steps, compress)
    rounds = []
    for _ in range(2):
        side.collect(given)
        gc.collect()
        after = held_bytes().unique - before
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Reset the high-water mark.
        minibatch = 0
        for batch in side.minibatches():
            obs = batch.obs if side_name == "core" else batch.observations
            minibatch = max(minibatch, obs.nbytes)
            del batch, obs
        peak = resident("VmHWM") - resident_before - minibatch
        rounds.append({"after_mib": after / MIB, "peak_mib": peak / MIB, "minibatch_mib": minibatch / MIB})
    told = {} if side_name == "sb3" else {"told_mib": side.buffer.report().total_bytes / MIB}
    return (
        {"after_mib": max(r["after_mib"] for r in rounds), "peak_mib": max(r["peak_mib"] for r in rounds)}
        | told
        | {
            "rounds": rounds,
            "finding": "" if side_name == "sb3" else side.buffer.report().fields[0].finding,
        }
    )


def timed_s(act: Callable[[], Any]) -> tuple[float, Any]:
    """Time one act. Return what it gave."""
    start = time.perf_counter()
    got = act()
    return time.perf_counter() - start, got


def summarise(times: dict[str, list[float]], ours: tuple[str, ...]) -> dict[str, Any]:
    """Return medians and minima in milliseconds, and ours over Stable-Baselines3's."""
    result: dict[str, Any] = {
        name: {"median_ms": statistics.median(taken) * 1e3, "min_ms": min(taken) * 1e3} for name, taken in times.items()
    }
    for name in ours:
        result[f"{name}_ratio"] = statistics.median(times[name]) / statistics.median(times["sb3"])
        result[f"{name}_ratio_of_minima"] = min(times[name]) / min(times["sb3"])
    return result


def add_times(sides: list[Side], given: Steps, steps: int) -> dict[str, list[float]]:
    """Fill all sides in turn, twice. Time the adds of the second rollout, since all but one are such."""
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for rollout in range(2):
        for side in sides:
            side.buffer.reset()
        for turn, (obs, began) in enumerate(itertools.islice(given, steps)):
            for side in sides[turn % 3 :] + sides[: turn % 3]:
                taken, _ = timed_s(lambda side=side, obs=obs, began=began: side.add(obs, began))  # type: ignore[misc]
                if rollout == 1:
                    times[side.name].append(taken)
    return times


def minibatch_times(steps: int, epochs: int) -> dict[str, Any]:
    """Time every add and every minibatch of some epochs, and compare the drop-in's minibatches with SB3's."""
    sides = [Side(name, steps) for name in SIDES]
    adding = add_times(sides, source("noise"), steps)
    drawing: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.finish()
    wrong = 0
    drawn: dict[str, Iterator[Any]] = {}
    for epoch, turn in itertools.product(range(epochs + 1), range(steps * LANES // BATCH)):
        got: dict[str, Any] = {}
        for side in sides[turn % 3 :] + sides[: turn % 3]:
            if turn == 0:
                np.random.seed(epoch)  # noqa: NPY002  the generator that Stable-Baselines3 draws from
                drawn[side.name] = side.minibatches()
            taken, batch = timed_s(lambda it=drawn[side.name]: next(it))  # type: ignore[misc]  # bound now
            if epoch > 0:  # in the first one Stable-Baselines3 copies the whole rollout
                drawing[side.name].append(taken)
            if turn == 0:
                got[side.name] = batch
            del batch
        if turn == 0:
            wrong += not torch.equal(got["sb3"].observations, got["holdall"].observations)
            wrong += not torch.equal(got["sb3"].advantages, got["holdall"].advantages)
    return {
        "minibatch": summarise(drawing, SIDES[1:]),
        "add": summarise(adding, SIDES[1:]),
        "wrong_minibatches": wrong,
    }


def updates(side_name: str, count: int) -> dict[str, Any]:
    """Run updates in a row. Say what arrays were left over and how the process's memory moved."""
    given = source("noise")
    side = Side(side_name, UPDATE_STEPS)

    def update() -> None:
        side.collect(given)
        for batch in side.minibatches():
            del batch

    for _ in range(4):
        update()
    gc.collect()
    held = [held_bytes().unique]
    for _ in range(count):
        update()
        held.append(held_bytes().unique)
    tracemalloc.start()
    update()
    arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)

    def live() -> int:
        gc.collect()
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)

    before = live()
    for _ in range(5):
        update()
    left = live() - before
    tracemalloc.clear_traces()
    side.buffer.reset()  # what a reset allocates is traced alone
    reset_bytes = live()
    tracemalloc.stop()
    return {
        "updates": count,
        "arrays_left_bytes": left,
        "allocated_by_reset_bytes": reset_bytes,
        "uss_first_mib": held[0] / MIB,
        "uss_last_mib": held[-1] / MIB,
        "uss_spread_percent": 100 * (max(held) - min(held)) / held[0],
    }


def advantages(rounds: int) -> dict[str, Any]:
    """Time the estimates of 2,048 steps in 64 environments, and compare every bit."""
    steps = 2_048
    lanes = 64
    space = spaces.Box(-1, 1, (1,), np.float32)
    settings: dict[str, Any] = {"device": "cpu", "gae_lambda": 0.95, "gamma": 0.99, "n_envs": lanes}
    sides = {
        "sb3": PlainRolloutBuffer(steps, space, BUTTONS, **settings),
        "holdall": RolloutBuffer(steps, space, BUTTONS, **settings),
    }
    generator = np.random.default_rng(0)
    for _ in range(steps):
        reward, value = generator.standard_normal((2, lanes), np.float32)
        start = generator.random(lanes) < 0.01
        obs = np.zeros((lanes, 1), np.float32)
        for side in sides.values():
            value_tensor = torch.from_numpy(value)
            side.add(obs, np.zeros(lanes, np.int64), reward, start, value_tensor, value_tensor)
    last = torch.from_numpy(generator.standard_normal(lanes, np.float32))
    dones = generator.random(lanes) < 0.5
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            taken, _ = timed_s(lambda side=side: side.compute_returns_and_advantage(last, dones))  # type: ignore[misc]
            times[name].append(taken)
    same = all(
        getattr(sides["sb3"], name).tobytes() == getattr(sides["holdall"], name).tobytes()
        for name in ("advantages", "returns")
    )
    result = summarise(times, ("holdall",))
    return result | {"times_faster": 1 / result["holdall_ratio"], "same_bits": same}


def child(*arguments: str) -> Any:
    """Run this script in a fresh process for one figure."""
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"MALLOC_ARENA_MAX": "2"}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child_main(what: str, *arguments: str) -> None:
    """Measure one figure, and write it as a line of JSON."""
    torch.set_num_threads(1)
    if what == "memory":
        side, steps, frames, compress = arguments
        emit(memory_of(side, int(steps), frames, compress or None))
    elif what == "minibatch":
        emit(minibatch_times(*map(int, arguments)))
    elif what == "updates":
        emit(updates(arguments[0], int(arguments[1])))
    else:
        emit(advantages(int(arguments[0])))


Judged = list[tuple[Figure, bool]]
"""Figures, and whether each meets its bar."""


def measure_memory(is_short: bool) -> Judged:
    """Measure what a rollout of noise takes, and the peak while it is read."""
    steps = SHORT_STEPS if is_short else STEPS
    rows = {side: child("memory", side, str(steps), "noise", "") for side in SIDES}
    limit = 1_120 * steps / STEPS
    after = "memory after a rollout of noise"
    peak = "peak while minibatches are drawn, less the minibatch"
    return [
        (Figure(after, "SB3", "MiB", rows["sb3"]["after_mib"]), True),
        (
            Figure(after, "holdall", "MiB", rows["holdall"]["after_mib"], f"at most {limit:,.0f} MiB"),
            rows["holdall"]["after_mib"] <= limit,
        ),
        (Figure(peak, "SB3", "MiB", rows["sb3"]["peak_mib"]), True),
        (
            Figure(peak, "holdall", "MiB", rows["holdall"]["peak_mib"], "at most 1.05 of the memory after a rollout"),
            rows["holdall"]["peak_mib"] <= 1.05 * rows["holdall"]["after_mib"],
        ),
    ]


def measure_compressed(is_short: bool) -> Judged:
    """Measure what a compressed rollout of a game takes."""
    steps = SHORT_STEPS if is_short else STEPS
    held = child("memory", "core", str(steps), "game", "balanced")["after_mib"]
    name = 'memory after a rollout of Seaquest, `compress="balanced"`'
    return [(Figure(name, "holdall", "MiB", held, "at most 300 MiB"), held <= 300)]


def measure_minibatch(is_short: bool) -> Judged:
    """Time minibatches and adds."""
    timed = child("minibatch", str(TIMED_STEPS // 2 if is_short else TIMED_STEPS), "1" if is_short else "3")
    ratio = timed["minibatch"]["holdall_ratio"]
    wrong = timed["wrong_minibatches"]
    unit = "of SB3's time"
    return [
        (Figure("minibatch of 2,048 to torch", "holdall over SB3", unit, ratio, "at most 0.7"), ratio <= 0.7),
        (Figure("`add`", "holdall over SB3", unit, timed["add"]["holdall_ratio"]), True),
        (Figure("minibatches that differ from SB3's", "holdall", "", wrong, "0"), wrong == 0),
    ]


def measure_updates(is_short: bool) -> Judged:
    """Run many updates in a row."""
    count = 10 if is_short else 100
    rows = {side: child("updates", side, str(count)) for side in SIDES}
    judged: Judged = []
    for side, name in (("sb3", "SB3"), ("holdall", "holdall")):
        row = rows[side]
        is_ours = side == "holdall"
        for what, unit, value, limit in (
            ("arrays left by updates", "B", row["arrays_left_bytes"], 0),
            ("arrays allocated by `reset`", "B", row["allocated_by_reset_bytes"], 0),
            (f"spread of USS over {count} updates", "%", row["uss_spread_percent"], 1),
        ):
            bar = f"at most {limit} {unit}" if is_ours else None
            judged.append((Figure(what, name, unit, value, bar), not is_ours or value <= limit))
    return judged


def measure_advantages(_is_short: bool) -> Judged:
    """Time advantages."""
    timed = child("advantages", "20")
    name = "advantages, 2,048 steps in 64 environments"
    faster = timed["times_faster"]
    return [
        (Figure(name, "as fast as SB3's", "times", faster, "at least 3"), faster >= 3),
        (Figure(name, "bits", "", "the same" if timed["same_bits"] else "others", "the same"), timed["same_bits"]),
    ]


MEASURES: dict[str, Callable[[bool], Judged]] = {
    "memory": measure_memory,
    "compressed": measure_compressed,
    "minibatch": measure_minibatch,
    "updates": measure_updates,
    "advantages": measure_advantages,
}


def main() -> int:
    """Measure, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--short", action="store_true", help="shorter rollouts and fewer rounds")
    parser.add_argument("--only", choices=MEASURES, action="append", help="default: all")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child_main(*arguments.child)
        return 0
    run = describe_run({"short": arguments.short})
    is_met = True
    for name in arguments.only or MEASURES:
        judged = MEASURES[name](arguments.short)
        figures = [figure for figure, _ in judged]
        show(figures)
        is_met &= all(is_figure_met for _, is_figure_met in judged)
        if arguments.json is not None:
            store(arguments.json, figures, run)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

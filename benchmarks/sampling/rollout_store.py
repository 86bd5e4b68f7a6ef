"""Two ways to hold the observations of a raw rollout: `python benchmarks/sampling/rollout_store.py --json FILE`.

    log      `RawFields`, which `RolloutMemory` uses: one `ObservationLog` per field, which every rollout overwrites
    store    a `Store` whose blocks all stay raw, and which evicts the rollout at every reset

Both hold stacks of four frames of 144 x 160 x 3 of noise, from 2 environments. Every rollout is written tick by tick,
and then read once in random order in minibatches. The script takes turns between both, and reports the median of all
rounds after the first. Memory is measured in one more process per side: the unique set size over what it was before.
Linux only.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holdall.machine import held_bytes
from holdall.rollout_fields import RawFields
from holdall.schema import Leaf, Schema, Tree
from holdall.store.budget import Budget
from holdall.store.store import Store
from holdall.store.tuning import Tuning

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.streams import screens

LANES = 2
STEPS = 2_048
BATCH = 256
ROUNDS = 7
LEAF = Leaf("", screens.OBSERVED, np.dtype(np.uint8))
SIDES = ("log", "store")


class LogSide:
    """The observations in an `ObservationLog`."""

    def __init__(self) -> None:
        self._fields = RawFields([LEAF], STEPS, LANES, Tuning())

    def write(self, tick: int, obs: Any) -> None:
        """Write one tick."""
        self._fields.write(tick, [obs])

    def gather(self, places: Any, out: Any) -> None:
        """Copy observations to `out`."""
        self._fields.gather(0, places, out)

    def reset(self) -> None:
        """Forget the rollout."""
        self._fields.reset()


class StoreSide:
    """The observations in a `Store`. Each of them is the next observation of a transition."""

    def __init__(self) -> None:
        nothing = Tree((), ())
        schema = Schema(Tree((LEAF,), 0), nothing, nothing, LANES)
        tuning = Tuning()
        budget = Budget.from_settings("auto", schema, can_spill=False, tuning=tuning)
        budget = replace(budget, max_raw_bytes=2**40, is_provisional=False)
        self._store = Store(schema, STEPS + 1, budget, tuning=tuning)
        self._store.set_reward_dtype(np.dtype(np.bool_))
        self._flags = np.zeros(LANES, np.bool_)
        self._previous = np.zeros((LANES, *LEAF.shape), LEAF.dtype)
        self._first_tick = 0

    def write(self, tick: int, obs: Any) -> None:
        """Write one tick."""
        previous = obs if tick == 0 else self._previous
        self._store.append((previous,), (), self._flags, (obs,), self._flags, self._flags)
        self._previous[...] = obs

    def gather(self, places: Any, out: Any) -> None:
        """Copy observations to `out`."""
        ids = places + self._first_tick * LANES
        self._store.view().read(ids, self._store.columns.next_obs_outputs, out.reshape(-1))

    def reset(self) -> None:
        """Forget the rollout."""
        self._store.evict(self._store.next_tick)
        self._first_tick = self._store.next_tick


def new_side(name: str) -> LogSide | StoreSide:
    """Return an empty side."""
    return LogSide() if name == "log" else StoreSide()


def stacks() -> Iterator[Any]:
    """Yield observations for ever."""
    return (obs for obs, _ in screens.stacks([screens.noise(seed) for seed in range(LANES)]))


def write_rollout(side: LogSide | StoreSide, source: Iterator[Any]) -> float:
    """Write a rollout. Return the microseconds per tick."""
    side.reset()
    spent = 0.0
    for tick, obs in enumerate(itertools.islice(source, STEPS)):
        began = time.perf_counter()
        side.write(tick, obs)
        spent += time.perf_counter() - began
    return spent / STEPS * 1e6


def read_rollout(side: LogSide | StoreSide, out: Any, order: Any) -> float:
    """Read a rollout once. Return the milliseconds per minibatch."""
    began = time.perf_counter()
    for places in order:
        side.gather(places, out)
    return (time.perf_counter() - began) / len(order) * 1e3


def new_minibatch() -> Any:
    """Return memory for a minibatch that begins at a multiple of 64 bytes, as the native reader asks."""
    memory = np.empty(BATCH * LEAF.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + BATCH * LEAF.nbytes].reshape(BATCH, *LEAF.shape)


def measure_times() -> dict[str, dict[str, float]]:
    """Take turns between both sides. Return the medians."""
    source = stacks()
    sides = {name: new_side(name) for name in SIDES}
    writes: dict[str, list[float]] = {name: [] for name in SIDES}
    reads: dict[str, list[float]] = {name: [] for name in SIDES}
    out = new_minibatch()
    for number in range(ROUNDS):
        order = np.random.default_rng(number).permutation(STEPS * LANES).reshape(-1, BATCH)
        for name in SIDES if number % 2 else reversed(SIDES):
            writes[name].append(write_rollout(sides[name], source))
            reads[name].append(read_rollout(sides[name], out, order))
    return {
        name: {"write_us": statistics.median(writes[name][1:]), "minibatch_ms": statistics.median(reads[name][1:])}
        for name in SIDES
    }


def measure_memory(name: str) -> float:
    """Return the MiB that this process holds for two rollouts that were written and read one after the other."""
    source = stacks()
    out = new_minibatch()
    out[...] = 0
    for _ in itertools.islice(source, 32):
        pass
    gc.collect()
    before = held_bytes().unique
    side = new_side(name)
    for number in range(2):
        order = np.random.default_rng(number).permutation(STEPS * LANES).reshape(-1, BATCH)
        write_rollout(side, source)
        read_rollout(side, out, order)
    gc.collect()
    return (held_bytes().unique - before) / 2**20


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(measure_memory(arguments.child))
        return
    figures = measure_times()
    for name in SIDES:
        command = [sys.executable, __file__, "--child", name]
        figures[name]["memory_mib"] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    shown = {
        "log": "a rollout in a log of its own, which every rollout overwrites",
        "store": "a rollout in a store whose blocks stay raw",
    }
    units = {"write_us": "us", "minibatch_ms": "ms", "memory_mib": "MiB"}
    names = {"write_us": "write a tick", "minibatch_ms": "read a minibatch", "memory_mib": "memory"}
    rows = [
        Figure(shown[side], names[name], units[name], figures[side][name]) for side in SIDES for name in figures[side]
    ]
    show(rows)
    if arguments.json is not None:
        settings = {"lanes": LANES, "steps": STEPS, "batch": BATCH, "rounds": ROUNDS}
        store(arguments.json, rows, describe_run(settings))


if __name__ == "__main__":
    main()

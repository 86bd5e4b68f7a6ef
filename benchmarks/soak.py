"""Add a hundred million rows to memories of every tier, gather as many, and compare every byte of them.

    python benchmarks/soak.py [--rows 1e8] [--seed 0] [--json FILE]

Every field of a transition follows from its id. So a torn, mixed or outdated row is found, and the expected rows of
a batch are computed as fast as the batch. One round is one memory. The main thread adds, and compares what it added.
It is interrupted by signals whose handler raises, in the middle of any call. Other threads draw, gather, overwrite
flags, save and load. After that a forked child uses the memory, and a child that loads, adds and saves is killed.
What the killed child acknowledged is loaded and compared. The last line of the output is a JSON object with all counts.
The exit status is 1 if a row was wrong, or if an interrupted call was neither done nor undone.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from results import Figure, describe_run, store

from holdall import ClosedError, ReplayMemory, RolloutMemory, TransitionIdError
from holdall.store.tuning import Tuning

LANES = 4
FINAL = 1 << 40
"""Added to the number of an observation that ends an episode: no later step shows it."""
FRAME_BYTES = 360
HANG_S = 900
"""A round takes a minute or two. One that takes longer hangs, and the stacks of its threads are printed."""
_FRAMES = (np.random.default_rng(0).integers(0, 3, (1021, FRAME_BYTES)).cumsum(axis=1) & 31).astype(np.uint8)
_FACTORS = np.random.default_rng(1).integers(1, 2**63, 8, np.uint64) | np.uint64(1)
_ACTIONS = spaces.Discrete(2**62)

Ids = NDArray[np.int64]


# ---------------------------------------------------------------- what a transition holds, by its id


def hashed(numbers: Ids, width: int) -> NDArray[np.int64]:
    """Return `width` numbers for each of some numbers."""
    mixed = numbers.astype(np.uint64)[..., None] * _FACTORS[:width]
    found: NDArray[np.int64] = (mixed ^ (mixed >> np.uint64(29))).view(np.int64)
    return found


def frames(numbers: Ids, count: int) -> NDArray[np.uint8]:
    """Return stacks of `count` frames. Each says its own number, and the next stack shares all but one."""
    stamps = numbers[:, None] + LANES * np.arange(count)
    stacked: NDArray[np.uint8] = _FRAMES[stamps * 7919 % len(_FRAMES)]
    stacked[..., :8] = stamps[..., None].view(np.uint8)
    return stacked


def windows(numbers: Ids, count: int) -> NDArray[np.float32]:
    """Return windows of `count` rows of 4 numbers. Their bits are any, NaNs of all kinds among them."""
    return hashed(numbers[:, None] + LANES * np.arange(count), 2).view(np.float32)


@dataclass(frozen=True)
class Look:
    """What is observed: a space, and what is seen under a number."""

    space: spaces.Space[Any]
    seen: Callable[[Ids], Any]


def _box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    if dtype is np.int64:
        low = -(2**62)
        high = 2**62
    return spaces.Box(low, high, shape, dtype)


FLAT = Look(_box((6,), np.int64), lambda numbers: hashed(numbers, 6))
STACK = Look(_box((4, FRAME_BYTES), np.uint8), lambda numbers: frames(numbers, 4))
WINDOW = Look(_box((64, 4), np.float32), lambda numbers: windows(numbers, 64))
MIXED = Look(
    spaces.Dict({"flat": FLAT.space, "stack": STACK.space}),
    lambda numbers: {"flat": FLAT.seen(numbers), "stack": STACK.seen(numbers)},
)


def ends(ids: Ids) -> NDArray[np.bool_]:
    """Return whether an episode ends with a transition."""
    found: NDArray[np.bool_] = ids * 2654435761 % 4093 < 80
    return found


def is_marked(ids: Ids) -> NDArray[np.bool_]:
    """Return whether flags of a transition are overwritten later."""
    found: NDArray[np.bool_] = ids % 7 == 3
    return found


def tick_of(look: Look, ids: Ids) -> tuple[Any, ...]:
    """Return the arguments of `add` for some ids: a tick's, or those of many ticks."""
    flat = ids.reshape(-1)
    after = np.where(ends(flat), flat + FINAL, flat + LANES)
    shaped = _reshaped(look.seen(flat), ids.shape), _reshaped(look.seen(after), ids.shape)
    return shaped[0], ids.copy(), ids.astype(np.float64), shaped[1], ends(ids), ids % 5 == 0


def _reshaped(tree: Any, leading: tuple[int, ...]) -> Any:
    if isinstance(tree, dict):
        return {key: _reshaped(child, leading) for key, child in tree.items()}
    return tree.reshape(*leading, *tree.shape[1:])


def wrong_rows(look: Look, batch: Any) -> int:
    """Count the rows of a batch that are not what was added under their ids."""
    ids = np.asarray(batch.ids)
    obs, action, reward, next_obs, terminated, truncated = tick_of(look, ids)
    wrong = _differ(batch.obs, obs) | _differ(batch.next_obs, next_obs)
    wrong |= (np.asarray(batch.action) != action) | (np.asarray(batch.reward) != reward)
    as_added = (np.asarray(batch.terminated) == terminated) & (np.asarray(batch.truncated) == truncated)
    as_marked = (
        is_marked(ids) & (np.asarray(batch.terminated) != terminated) & (np.asarray(batch.truncated) != truncated)
    )
    return int((wrong | ~(as_added | as_marked)).sum())


def _differ(got: Any, wanted: Any) -> NDArray[np.bool_]:
    if isinstance(wanted, dict):
        return np.asarray(np.any([_differ(got[key], wanted[key]) for key in wanted], axis=0), np.bool_)
    rows = len(wanted)
    mine, right = (np.ascontiguousarray(np.asarray(one)).reshape(rows, -1).view(np.uint64) for one in (got, wanted))
    differs: NDArray[np.bool_] = (mine != right).any(axis=1)
    return differs


# ---------------------------------------------------------------- rounds


@dataclass(frozen=True)
class Tier:
    """One kind of memory, and its share of the rows."""

    look: Look
    capacity: int
    share: float
    batch: int
    max_ticks: int  # of one `extend`
    options: dict[str, Any] = field(default_factory=dict)
    spills: bool = False


SMALL_BLOCKS = Tuning(block_bytes=2**18)
"""Blocks that fill within a second, so that they are compressed and moved to disk while the soak reads them."""

TIERS = {
    "vectors": Tier(FLAT, 200_000, 0.78, 16_384, 16_000),
    "vectors, tensors": Tier(FLAT, 50_000, 0.15, 8_192, 4_000, {"device": "cpu"}),
    "raw stacks": Tier(STACK, 20_000, 0.01, 2_048, 600, {"budget": "1GiB"}),
    "compressed": Tier(STACK, 30_000, 0.01, 2_048, 600, {"budget": None, "_tuning": SMALL_BLOCKS}),
    "compressed, tensors": Tier(
        MIXED, 30_000, 0.005, 1_024, 600, {"budget": None, "device": "cpu", "_tuning": SMALL_BLOCKS}
    ),
    "spilled": Tier(STACK, 60_000, 0.01, 1_024, 600, {"budget": None, "_tuning": SMALL_BLOCKS}, spills=True),
    "windows": Tier(WINDOW, 30_000, 0.005, 1_024, 600, {"budget": None, "_tuning": SMALL_BLOCKS}),
    "vectors and stacks": Tier(MIXED, 20_000, 0.01, 2_048, 600),
}
ROLLOUT_SHARE = 0.02
ROUNDS = 20
"""Rounds of a tier, so that memories are filled, wrapped and closed several times."""


class InterruptedCallError(KeyboardInterrupt):
    """What the handler of the signal raises."""


@dataclass
class Tally:
    """What was done, over all rounds."""

    rows: Counter[str] = field(default_factory=Counter)  # Rows that were compared, by tier.
    added: Counter[str] = field(default_factory=Counter)  # Rows that were added and then compared, by tier.
    done: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, number: int = 1) -> None:
        """Count what was done."""
        with self.lock:
            self.done[what] += number

    def compare(self, tier: str, look: Look, batch: Any) -> None:
        """Hold a batch against what was added."""
        wrong = wrong_rows(look, batch)
        with self.lock:
            self.rows[tier] += len(batch.ids)
            if wrong:
                self.done["wrong rows"] += wrong
                self.problems.append(f"{tier}: {wrong} of {len(batch.ids)} rows are wrong")


class Round:
    """One memory, the threads that use it, and the signals that interrupt the one that adds."""

    def __init__(self, name: str, folder: Path, tally: Tally, rows: int, seed: int, *, interrupts: bool) -> None:
        self.name = name
        self.tier = TIERS[name]
        self.tally = tally
        self.folder = folder
        self.stop = threading.Event()
        self.max_rows = tally.rows[name] + rows
        self.max_added = tally.added[name] + rows
        self.interrupts = interrupts
        self.seed = seed
        options = dict(self.tier.options)
        if self.tier.spills:
            options["spill_dir"] = folder / "spill"
        self.memory = ReplayMemory(self.tier.look.space, _ACTIONS, self.tier.capacity, LANES, seed=seed, **options)

    def run(self) -> None:
        """Fill the memory, use it from all sides until enough rows were compared, then fork and kill."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        with self.memory:
            fill = self.tier.capacity // LANES * float(np.random.default_rng(self.seed).choice([0.05, 0.4, 1.1]))
            while self.memory.next_id < fill * LANES:
                self.extend(500)
            if self.tier.spills:
                self.memory.store.wait_idle()
            works = [(self.read, 0.0), (self.read, 0.005), (self.flag, 0.01), (self.save, 0.3)]
            threads = [
                threading.Thread(target=self._repeat, args=(work, pause_s, number), daemon=True)
                for number, (work, pause_s) in enumerate(works)
            ]
            for thread in threads:
                thread.start()
            generator = np.random.default_rng([self.seed, len(works)])
            with Interrupts(self.seed, is_on=self.interrupts) as interrupts:
                while not self.is_over():
                    self.write(interrupts, generator)
            self.stop.set()
            for thread in threads:
                thread.join(HANG_S / 2)
                if thread.is_alive():
                    self.problem(f"{thread.name} does not end")
            self.tally.count("bytes spilled", self.memory.disk_bytes)
            self.tally.count("bytes compressed", sum(f.compressed_bytes for f in self.memory.report().fields))
            self.fork()
            self.kill()
        faulthandler.cancel_dump_traceback_later()

    def is_over(self) -> bool:
        """Whether enough rows were added and compared, or something is wrong already."""
        tally = self.tally
        has_enough = tally.rows[self.name] >= self.max_rows and tally.added[self.name] >= self.max_added
        return has_enough or bool(tally.problems)

    def problem(self, what: str) -> None:
        """Take down what must not be."""
        with self.tally.lock:
            self.tally.problems.append(f"{self.name}: {what}")

    def _repeat(self, work: Callable[[np.random.Generator], None], pause_s: float, number: int) -> None:
        generator = np.random.default_rng([self.seed, number])
        try:
            while not self.stop.is_set():
                work(generator)
                self.stop.wait(pause_s)  # not in `work`: an interrupt in it would leave the event's own lock behind
        except ClosedError:
            pass
        except BaseException as error:
            self.problem(f"{work.__name__}: {type(error).__name__}: {error}")

    # ------------------------------------------------------------ the thread that adds

    def write(self, interrupts: Interrupts, generator: np.random.Generator) -> None:
        """Call something, most often to add. A call that was interrupted left everything as it was, or is done."""
        first = self.memory.next_id
        ticks = 1
        name = str(generator.choice(["add", "extend", "read", "flag", "save"], p=[0.6, 0.3, 0.05, 0.04, 0.01]))
        calls: dict[str, Callable[[], None]] = {
            "add": lambda: self.add(ticks),
            "extend": lambda: self.extend(ticks),
            "read": lambda: self.read(generator),
            "flag": lambda: self.flag(generator),
            "save": lambda: self.save(generator),
        }
        if name == "extend":
            ticks = int(generator.integers(1, self.tier.max_ticks))
        if interrupts.cut_off(calls[name]):
            self.tally.count(f"interrupts of {name}")
        done = self.memory.next_id - first
        if done not in {0, ticks * LANES}:
            self.problem(f"{name} of {ticks} ticks was left at {done} ids")
        if done:
            self.check_newest(first)

    def add(self, ticks: int) -> None:
        """Add tick by tick."""
        for _ in range(ticks):
            self.memory.add(*tick_of(self.tier.look, self.memory.next_id + np.arange(LANES)))
        self.tally.count("ticks added", ticks)

    def extend(self, ticks: int) -> None:
        """Add many ticks at once."""
        ids = self.memory.next_id + np.arange(ticks * LANES).reshape(ticks, LANES)
        self.memory.extend(*tick_of(self.tier.look, ids))
        self.tally.count("ticks added", ticks)

    def check_newest(self, first: int) -> None:
        """Compare all rows from id `first` on, which were just added."""
        end = self.memory.next_id
        for start in range(first, end, self.tier.batch):
            ids = np.arange(start, min(start + self.tier.batch, end))
            self.tally.compare(self.name, self.tier.look, self.memory.gather(ids))
        with self.tally.lock:
            self.tally.added[self.name] += end - first

    # ------------------------------------------------------------ the others

    def read(self, generator: np.random.Generator) -> None:
        """Draw, or gather what is asked for. What was evicted meanwhile is refused."""
        with contextlib.suppress(TransitionIdError):
            if generator.random() < 0.5:
                batch = self.memory.sample(min(len(self.memory), self.tier.batch))
            else:
                first = self.memory.first_id
                end = self.memory.next_id
                ids = generator.integers(first + (end - first) // 16, end, self.tier.batch)
                batch = self.memory.gather(ids)
                if not np.array_equal(batch.ids, ids):
                    self.problem("gather returned other ids than were asked for")
            self.tally.compare(self.name, self.tier.look, batch)

    def flag(self, generator: np.random.Generator) -> None:
        """Overwrite the flags of transitions that are marked for it, always with the same."""
        first = self.memory.first_id
        end = self.memory.next_id
        ids = np.unique(generator.integers(first, end, 50))
        ids = ids[is_marked(ids)]
        with contextlib.suppress(TransitionIdError):
            self.memory.set_flags(ids, ~ends(ids), ids % 5 != 0)
            self.tally.count("flags set", len(ids))

    def save(self, generator: np.random.Generator) -> None:
        """Save, and load what was saved."""
        run = self.folder / "run"
        added = self.memory.next_id
        self.memory.save(run, keep=2).result(300)
        self.tally.count("saves")
        with ReplayMemory.load(run) as memory:
            self.tally.count("loads")
            if memory.next_id < added:  # two threads save: it may be more
                self.problem(f"{added} transitions were saved, and {memory.next_id} are loaded")
            self.tally.compare(self.name, self.tier.look, memory.gather(self._some(memory, generator)))

    def _some(self, memory: ReplayMemory, generator: np.random.Generator) -> Ids:
        return generator.integers(memory.first_id, memory.next_id, 2 * self.tier.batch)

    # ------------------------------------------------------------ other processes

    def fork(self) -> None:
        """Fork a child, which must be told that the memory is its parent's."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.memory.gather([self.memory.first_id])
            except ClosedError:
                status = 0
            finally:
                os._exit(status)
        if not _ends_well(child):
            self.problem("a forked child uses its parent's memory, or does not end")
        self.tally.count("forks")

    def kill(self) -> None:
        """Kill a child that loads a checkpoint, adds and saves. What it acknowledged is loaded."""
        run = self.folder / "killed"
        begun = self.folder / "begun"
        self.memory.save(begun).result()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self.memory = ReplayMemory.load(begun)
                while True:
                    self.extend(16)
                    self.memory.save(run, keep=2).result()
                    os.write(writing, self.memory.next_id.to_bytes(8, "little"))
            finally:
                os._exit(1)
        os.close(writing)
        acknowledged = os.read(reading, 8)  # The first save takes longest.
        time.sleep(float(np.random.default_rng(self.seed).random() * 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 8):
            acknowledged = more
        os.close(reading)
        self.tally.count("kills")
        with ReplayMemory.load(run) as memory:
            if memory.next_id < int.from_bytes(acknowledged, "little"):
                self.problem(f"{acknowledged!r} was acknowledged before a kill, and {memory.next_id} is loaded")
            self.tally.compare(self.name, self.tier.look, memory.gather(self._some(memory, np.random.default_rng(1))))


def _ends_well(child: int) -> bool:
    deadline = time.monotonic() + HANG_S / 2
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


class Interrupts:
    """Signals that raise in the main thread, hundreds of times a second, while it is in a call that may be cut off."""

    def __init__(self, seed: int, *, is_on: bool) -> None:
        self._generator = np.random.default_rng(seed)
        self._is_on = is_on
        self._is_armed = False

    def __enter__(self) -> Interrupts:
        if self._is_on:
            self._before = signal.signal(signal.SIGALRM, self._interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            # First ignore the signal, because its handler would start the timer again.
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

    def cut_off(self, call: Callable[[], None]) -> bool:
        """Call something. Return whether it was interrupted."""
        try:
            self._is_armed = True
            call()
            self._is_armed = False
        except InterruptedCallError:
            return True
        return False

    def _interrupt(self, _number: int, _frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0003 + 0.004 * float(self._generator.random()))
        if self._is_armed:
            self._is_armed = False
            raise InterruptedCallError


def roll_out(tally: Tally, rows: int, seed: int) -> None:
    """Fill rollout memories again and again, and compare every minibatch of them."""
    looks = {"rollouts, flat": FLAT, "rollouts, raw slices": STACK, "rollouts, compressed": STACK}
    for number, (name, look) in enumerate(looks.items()):
        compress = "balanced" if name.endswith("compressed") else None
        until = tally.added[name] + rows // len(looks)
        base = seed * 10**6
        with RolloutMemory(look.space, _ACTIONS, 128, LANES, compress=compress, seed=number) as memory:
            while tally.added[name] < until and not tally.problems:
                for step in range(128):
                    ids = base + step * LANES + np.arange(LANES)
                    zeros = np.zeros(LANES, np.float32)
                    memory.add(look.seen(ids), ids, ids.astype(np.float64), ends(ids), ends(ids) & False, zeros, zeros)
                memory.finish(np.zeros(LANES, np.float32))
                tally.added[name] += 128 * LANES
                for batch in memory.minibatches(256, epochs=4):
                    ids = base + np.asarray(batch.ids)
                    wrong = _differ(batch.obs, look.seen(ids)) | (np.asarray(batch.action) != ids)
                    wrong |= np.asarray(batch.reward) != ids
                    tally.rows[name] += len(ids)
                    if wrong.any():
                        tally.problems.append(f"{name}: {wrong.sum()} of {len(ids)} rows are wrong")
                memory.reset()
                base += 128 * LANES
                tally.count("rollouts")


# ---------------------------------------------------------------- the whole


def soak(rows: float, rounds: int, seed: int, tiers: list[str], *, interrupts: bool) -> Tally:
    """Add and compare `rows` rows, tier by tier."""
    tally = Tally()
    began = time.perf_counter()
    number = 0
    share = ROLLOUT_SHARE + sum(TIERS[name].share for name in tiers)
    goals = {name: int(rows * TIERS[name].share / share) for name in tiers}
    while not tally.problems and any(tally.added[name] < goal for name, goal in goals.items()):
        for name, goal in goals.items():
            if tally.added[name] >= goal or tally.problems:
                continue
            number += 1
            with tempfile.TemporaryDirectory(prefix="holdall-soak-") as folder:
                some = goal // rounds + 1
                Round(name, Path(folder), tally, some, seed + number, interrupts=interrupts).run()
            seconds = time.perf_counter() - began
            added = sum(tally.added.values())
            print(f"{seconds:7.0f} s  {added:>13,} added  {sum(tally.rows.values()):>13,} compared  {name}", flush=True)
        roll_out(tally, int(rows * ROLLOUT_SHARE / share) // rounds + 1, seed + number)
    while not tally.problems and sum(tally.added.values()) < rows:
        roll_out(tally, int(rows - sum(tally.added.values())) + 3, seed + number)
    return tally


def figures_of(result: dict[str, Any]) -> list[Figure]:
    """Return the counts of a soak. Each seed is a case, so that the soaks of several seeds add up."""
    case = f"seed {result['seed']}"
    done = result["done"]
    interrupts = sum(count for what, count in done.items() if what.startswith("interrupts"))
    return [
        Figure(case, "rows added", "", result["rows_added"]),
        Figure(case, "rows compared", "", result["rows"]),
        Figure(case, "wrong rows", "", result["wrong_rows"], "0"),
        Figure(case, "problems", "", len(result["problems"]), "0"),
        *(Figure(case, what, "", done.get(what, 0)) for what in ("saves", "loads", "forks", "kills")),
        Figure(case, "interrupts", "", interrupts),
        Figure(case, "duration", "s", result["seconds"]),
    ]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e8, help="rows to add (%(default)g)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="memories of each tier (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", choices=TIERS, nargs="+", default=list(TIERS), metavar="TIER", help="default: all")
    parser.add_argument("--no-interrupts", action="store_true", help="send no signals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the counts are written to")
    arguments = parser.parse_args()
    began = time.perf_counter()
    run = describe_run({"rounds": arguments.rounds, "interrupts": not arguments.no_interrupts})
    tally = soak(
        arguments.rows,
        arguments.rounds,
        arguments.seed,
        arguments.tier,
        interrupts=not arguments.no_interrupts,
    )
    result = {
        "seed": arguments.seed,
        "rows": sum(tally.rows.values()),
        "rows_added": sum(tally.added.values()),
        "wrong_rows": tally.done.pop("wrong rows", 0),
        "seconds": round(time.perf_counter() - began),
        "by_tier": dict(tally.rows),
        "added_by_tier": dict(tally.added),
        "done": dict(tally.done),
        "problems": tally.problems,
    }
    print(json.dumps(result))
    if arguments.json is not None:
        store(arguments.json, figures_of(result), run)
    return int(bool(tally.problems))


if __name__ == "__main__":
    sys.exit(main())

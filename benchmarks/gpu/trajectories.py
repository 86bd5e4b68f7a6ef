"""Trajectories on their way to a GPU, compared with the usual ways.

    python benchmarks/gpu/trajectories.py [--json FILE]

All ways are timed in one process, turn by turn, five updates a turn, each from an idle device to an idle device. The
figures are the median over all updates, and that over the first update of each turn, which finds its threads asleep.
Device memory is the peak that an update reaches beyond what is held between updates. Every tensor is compared with its
source. Needs torch with CUDA. The exit status is 1 if a bar was not met or a bit differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from holdall import RolloutMemory
from holdall.elegantrl import TrajectoryBuffer
from holdall.machine import held_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_run import describe_gpu_run
from results import Figure, show, store

WORKERS = 3
STEPS = 1_024
UPDATES = 100
UPDATES_A_TURN = 5
MIB = 2**20
SWEPT_SLOTS_MIB = (2, 4, 8, 16, 32)

Trajectories = list[list[torch.Tensor]]


class Case(NamedTuple):
    """States of one kind, and how long an update with them may take."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bar_ms: float


CASES = (
    Case("84x84x3 frames", (84, 84, 3), torch.uint8, 3.0),
    Case("12x144x160 frames", (12, 144, 160), torch.uint8, 32.0),
    Case("71 floats", (71,), torch.float32, 0.15),
)


class ConcatenatedThenMoved(list[torch.Tensor]):
    """The usual way: join on the host, then move. Like all ways, it returns the mean reward, computed on the host."""

    def update_buffer(self, traj_list: Trajectories) -> float:
        """Take over trajectories."""
        joined = [torch.cat(item) for item in map(list, zip(*traj_list, strict=True))]
        self[:] = [item.to("cuda") for item in joined]
        return float(joined[1].mean())


class MovedThenConcatenated(list[torch.Tensor]):
    """A remedy that is often advised: move each tensor, then join on the device."""

    def update_buffer(self, traj_list: Trajectories) -> float:
        """Take over trajectories."""
        moved = ([tensor.to("cuda") for tensor in item] for item in zip(*traj_list, strict=True))
        self[:] = [torch.cat(item) for item in moved]
        return float(torch.cat([trajectory[1] for trajectory in traj_list]).mean())


def trajectories(case: Case, seed: int) -> Trajectories:
    """Return the trajectories of the workers of an on-policy algorithm: states and rewards."""
    generator = torch.Generator().manual_seed(seed)
    given = []
    for _ in range(WORKERS):
        shape = (STEPS, *case.shape)
        if case.dtype == torch.uint8:
            states = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        else:
            states = torch.randn(shape, generator=generator)
        given.append([states, torch.randn(STEPS, generator=generator)])
    return given


def timed_ms(act: Callable[[], object]) -> float:
    """Time `act` from an idle device to an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def summary(times: list[float]) -> dict[str, float]:
    """Return median and minimum."""
    return {"median_ms": statistics.median(times), "min_ms": min(times)}


def extra_bytes(act: Callable[[], object]) -> int:
    """Return the peak of device memory during `act`, less the memory before."""
    act()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    act()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_case(case: Case, rounds: int) -> dict[str, Any]:
    """Time all three ways in turns, and compare their tensors."""
    given = [trajectories(case, seed) for seed in range(2)]
    sides: dict[str, Any] = {
        "cat then to": ConcatenatedThenMoved(),
        "to then cat": MovedThenConcatenated(),
        "holdall": TrajectoryBuffer("cuda"),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            update = sides[name].update_buffer
            for again in range(UPDATES_A_TURN):
                data = given[(turn + again) % 2]
                took = timed_ms(lambda update=update, data=data: update(data))  # type: ignore[misc]  # bound now
                if turn >= 1:  # the first ones allocate
                    times[name].append(took)
    expected = [torch.cat(item) for item in map(list, zip(*given[(rounds + UPDATES_A_TURN - 1) % 2], strict=True))]
    wrong = sum(
        not torch.equal(tensor.cpu(), plain)
        for side in sides.values()
        for tensor, plain in zip(side, expected, strict=True)
    )
    result: dict[str, Any] = {name: summary(taken) for name, taken in times.items()}
    for name, taken in times.items():
        result[name]["first_of_turn_median_ms"] = statistics.median(taken[::UPDATES_A_TURN])
    for name, side in sides.items():
        result[name]["extra_mib"] = extra_bytes(lambda side=side: side.update_buffer(given[0])) / MIB  # type: ignore[misc]
    ours = result["holdall"]
    result["payload_mib"] = sum(tensor.nbytes for tensor in expected) / MIB
    result["held_mib"] = sides["holdall"].nbytes / MIB
    result["wrong_tensors"] = wrong
    result["bar_ms"] = case.bar_ms
    result["met"] = ours["median_ms"] <= case.bar_ms and ours["extra_mib"] == 0 and wrong == 0
    return result


def sweep(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Time holdall's update with slots of other sizes."""
    given = [trajectories(case, seed) for seed in range(2)]
    buffers = {f"slots of {size} MiB": TrajectoryBuffer("cuda", slot_bytes=size * MIB) for size in SWEPT_SLOTS_MIB}
    times: dict[str, list[float]] = {name: [] for name in buffers}
    for turn in range(rounds + 2):
        for name, buffer in buffers.items():
            took = timed_ms(lambda buffer=buffer, turn=turn: buffer.update_buffer(given[turn % 2]))  # type: ignore[misc]
            if turn >= 2:
                times[name].append(took)
    return {name: summary(taken) for name, taken in times.items()}


def steady_state(updates: int) -> dict[str, Any]:
    """Count the allocations of updates on the device, and the change of the process's own memory."""
    case = CASES[0]
    given = trajectories(case, 0)
    buffer = TrajectoryBuffer("cuda")
    for _ in range(5):
        buffer.update_buffer(given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    held = held_bytes().unique
    for _ in range(updates):
        buffer.update_buffer(given)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    later = held_bytes().unique
    allocations = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    return {
        "updates": updates,
        "device_allocations": allocations,
        "uss_change_percent": 100 * (later - held) / held,
        "met": allocations == 0 and abs(later - held) <= 0.01 * held,
    }


def frames(steps: int, lanes: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yield stacks of four frames of 144 x 160 x 3, channels first."""
    generator = np.random.default_rng(0)
    stack = np.zeros((lanes, 12, 144, 160), np.uint8)
    for _ in range(steps):
        stack = np.concatenate([stack[:, 3:], generator.integers(0, 256, (lanes, 3, 144, 160), np.uint8)], axis=1)
        yield stack


def minibatches(steps: int, batch: int, rounds: int) -> dict[str, Any]:
    """Copy minibatches of frame stacks to the device, from a plain flattened array and from a RolloutMemory."""
    lanes = 2
    space = spaces.Box(0, 255, (12, 144, 160), np.uint8)
    memory = RolloutMemory(space, spaces.Discrete(4), steps, lanes, device="cuda", seed=0)
    plain = np.empty((steps * lanes, 12, 144, 160), np.uint8)
    floats = np.zeros(lanes, np.float32)
    flags = np.zeros(lanes, np.bool_)
    for t, obs in enumerate(frames(steps, lanes)):
        memory.add(obs, np.zeros(lanes, np.int64), floats, flags, flags, floats, floats)
        plain[t * lanes : (t + 1) * lanes] = obs
    memory.finish(floats)
    usual: list[float] = []
    ours: list[float] = []
    wrong = 0
    segments = 0
    for turn in range(rounds + 1):
        if turn == 1:
            segments = torch.cuda.memory_stats()["segment.all.allocated"]
        drawn = memory.minibatches(batch)
        kept: list[Any] = []
        ours.append(timed_ms(lambda drawn=drawn, kept=kept: kept.append(next(drawn))))  # type: ignore[misc]  # bound now
        ids = kept[0].ids
        usual.append(timed_ms(lambda ids=ids, kept=kept: kept.append(torch.from_numpy(plain[ids]).to("cuda"))))  # type: ignore[misc]
        wrong += not torch.equal(kept[0].obs, kept[1])
        del drawn
    grown = torch.cuda.memory_stats()["segment.all.allocated"] - segments
    ratio = statistics.median(ours[1:]) / statistics.median(usual[1:])
    return {
        "batch": batch,
        "plain array, then to": summary(usual[1:]),
        "holdall": summary(ours[1:]),
        "ratio": ratio,
        "device_segments_taken": grown,
        "wrong_minibatches": wrong,
        "met": wrong == 0 and grown == 0 and ratio <= 0.7,
    }


WAYS = {"cat then to": "join, then move", "to then cat": "move, then join", "holdall": "holdall"}
"""The ways of an update, as they are called in the results."""


def figures_of(result: dict[str, Any]) -> list[Figure]:
    """Return the figures of all cases."""
    figures = []
    for name, row in result["updates"].items():
        case = f"trajectories: {name}, {row['payload_mib']:.1f} MiB"
        for way, title in WAYS.items():
            bar = f"at most {row['bar_ms']}" if way == "holdall" else None
            figures.append(Figure(case, title, "ms", row[way]["median_ms"], bar))
            figures.append(Figure(case, f"{title}, first of a turn", "ms", row[way]["first_of_turn_median_ms"]))
            figures.append(Figure(case, f"{title}, least", "ms", row[way]["min_ms"]))
            figures.append(Figure(case, f"{title}, extra memory", "MiB", row[way]["extra_mib"]))
        figures.append(Figure(case, "tensors that differ", "", row["wrong_tensors"], "0"))
        for size, times in result["slots"][name].items():
            figures.append(Figure(case, f"holdall alone, {size}", "ms", times["median_ms"]))
    steady = result["steady_state"]
    case = f"steady state: {steady['updates']} updates"
    figures.append(Figure(case, "allocations on the device", "", steady["device_allocations"], "0"))
    figures.append(Figure(case, "change of USS", "%", steady["uss_change_percent"], "at most 1 %"))
    drawn = result["minibatches"]
    case = f"minibatches: {drawn['batch']:,} stacks of 144 x 160 x 3 screens"
    figures.append(Figure(case, "plain array, then move", "ms", drawn["plain array, then to"]["median_ms"]))
    figures.append(Figure(case, "holdall", "ms", drawn["holdall"]["median_ms"]))
    figures.append(Figure(case, "ratio", "of a plain array's time", drawn["ratio"], "at most 0.7"))
    figures.append(Figure(case, "memory segments taken", "", drawn["device_segments_taken"], "0"))
    figures.append(Figure(case, "minibatches that differ", "", drawn["wrong_minibatches"], "0"))
    return figures


def main() -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer rounds, for a look at the figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    short = arguments.short
    run = describe_gpu_run({"short": short, "torch_threads": torch.get_num_threads()})
    many_rounds = {case.name: 4 if case.shape[0] == 12 else 20 for case in CASES}
    rounds = dict.fromkeys(many_rounds, 2) if short else many_rounds
    result: dict[str, Any] = {
        "updates": {case.name: measure_case(case, rounds[case.name]) for case in CASES},
        "slots": {case.name: sweep(case, rounds[case.name]) for case in CASES},
        "steady_state": steady_state(10 if short else UPDATES),
        "minibatches": minibatches(256 if short else 2_048, 128 if short else 2_048, 3 if short else 6),
    }
    figures = figures_of(result)
    show(figures)
    if arguments.json is not None:
        store(arguments.json, figures, run)
    checked = [*result["updates"].values(), result["steady_state"], result["minibatches"]]
    return 0 if all(row["met"] for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Rollouts on a GPU, beside the usual ways: `python benchmarks/gpu_rollout.py [--json FILE] [--quick]`.

Out: a table on stdout, and one JSON object with every figure; exit status 1 if a bar was not met or a bit differs.
All sides are timed in one process, turn by turn, five updates a turn, each from an idle device to an idle device; the
median is over all of them, and that over each turn's first, which finds its threads asleep, is told beside it. Device
memory is the peak that an update reaches beyond what is held between updates. Needs torch with CUDA, and nothing that
holdall does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from process import commit, machine, versions

from holdall import RolloutMemory
from holdall.elegantrl import TrajectoryBuffer
from holdall.machine import held_bytes

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
    """The usual way: joined on the host, then moved. As everywhere, the mean reward is returned, taken on the host."""

    def update_buffer(self, traj_list: Trajectories) -> float:
        """Take over trajectories."""
        joined = [torch.cat(item) for item in map(list, zip(*traj_list, strict=True))]
        self[:] = [item.to("cuda") for item in joined]
        return float(joined[1].mean())


class MovedThenConcatenated(list[torch.Tensor]):
    """A remedy that is often advised: each moved, then joined on the device."""

    def update_buffer(self, traj_list: Trajectories) -> float:
        """Take over trajectories."""
        moved = ([tensor.to("cuda") for tensor in item] for item in zip(*traj_list, strict=True))
        self[:] = [torch.cat(item) for item in moved]
        return float(torch.cat([trajectory[1] for trajectory in traj_list]).mean())


def trajectories(case: Case, seed: int) -> Trajectories:
    """Make what the workers of an on-policy algorithm hand in: states and rewards."""
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
    """Return the device memory that `act` takes at its peak, beyond what was held before."""
    act()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    act()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_case(case: Case, rounds: int) -> dict[str, Any]:
    """Time all three ways in turn, and compare what they hold."""
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
    """Count what a hundred updates allocate on the device, and how the process's own memory moves."""
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


def table(result: dict[str, Any]) -> str:
    """Lay the figures out for people."""
    lines = [
        "| 3 workers x 1,024 steps | cat then to | to then cat | holdall | bar | met |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["updates"].items():
        cells = [
            f"{row[side]['median_ms']:.3f} ms (first of a turn {row[side]['first_of_turn_median_ms']:.3f}, least "
            f"{row[side]['min_ms']:.3f}), +{row[side]['extra_mib']:.1f} MiB"
            for side in ("cat then to", "to then cat", "holdall")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['bar_ms']} ms | {row['met']} |")
    lines += ["", "| holdall with | " + " | ".join(result["slots"]) + " |", "|---|" + "---|" * len(result["slots"])]
    for size in next(iter(result["slots"].values())):
        cells = [f"{result['slots'][case][size]['median_ms']:.3f} ms" for case in result["slots"]]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    steady = result["steady_state"]
    drawn = result["minibatches"]
    lines += [
        "",
        (
            f"{steady['updates']} updates: {steady['device_allocations']} device allocations, USS "
            f"{steady['uss_change_percent']:+.2f} %, met: {steady['met']}"
        ),
    ]
    lines += [
        (
            f"minibatch of {drawn['batch']} stacks: {drawn['holdall']['median_ms']:.1f} ms, a plain array's "
            f"{drawn['plain array, then to']['median_ms']:.1f} ms, ratio {drawn['ratio']:.2f}, wrong "
            f"{drawn['wrong_minibatches']}, met: {drawn['met']}"
        )
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--quick", action="store_true", help="a look, not a result")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    quick = arguments.quick
    rounds = {case.name: 2 if quick else 4 if case.shape[0] == 12 else 20 for case in CASES}
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch_threads": torch.get_num_threads(),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "updates": {case.name: measure_case(case, rounds[case.name]) for case in CASES},
        "slots": {case.name: sweep(case, rounds[case.name]) for case in CASES},
        "steady_state": steady_state(10 if quick else UPDATES),
        "minibatches": minibatches(256 if quick else 2_048, 128 if quick else 2_048, 3 if quick else 6),
    }
    checked = [*result["updates"].values(), result["steady_state"], result["minibatches"]]
    result["met"] = all(row["met"] for row in checked)
    print(table(result))
    print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())

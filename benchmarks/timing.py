"""Times of all sides in one process, turn by turn, and every kind of row compared: `python benchmarks/timing.py`.

Out: JSON lines on stdout, {"done", "total"} while it runs and {"result"} last.
All sides are given the same steps. Each adds a block and draws some batches before the next one's turn, and whose turn
comes first changes; so what else the machine does falls on all of them. Nothing is dropped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import BATCH, CASES, SIDES, Side, SideName, Sizes, sb3_capacity
from numpy.typing import NDArray
from process import emit
from streams import Stream

_COMPARED_ROWS = 2_000
_COMPARED_BYTES = 64_000_000  # in one go


class Clock:
    """Seconds by side and act; one entry per block of adds or batch."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[SideName, list[float]]] = {}

    def note(self, act: str, side: SideName, seconds: float) -> None:
        """Take one measurement down."""
        self.seconds.setdefault(act, {}).setdefault(side, []).append(seconds)

    def summary(self) -> dict[str, Any]:
        """Return median, minimum and mean in microseconds, and both sides over Stable-Baselines3's."""
        return {act: _summarise(sides) for act, sides in self.seconds.items()}


def measure(case_name: str, quick: bool, trace: Path | None, prefer: str | None) -> dict[str, Any]:
    """Fill all sides, draw from them, wrap them around, and compare what they hold."""
    case = CASES[case_name]
    sizes = case.sizes(quick)
    stream = case.stream(trace)
    sb3_held = sb3_capacity(stream, sizes.held)
    sides = [Side(name, stream, sb3_held if name == "sb3" else sizes.held, prefer) for name in SIDES]
    clock, turns = Clock(), _turns(sides)
    total = sizes.held + sizes.wrapped + sizes.batches
    held = _add(stream, sides, turns, clock, sizes.held, sizes.block, ("add", "add_further"), (0, total))
    held += _add(stream, sides, turns, clock, sizes.wrapped, sizes.block, ("add_wrapped", ""), (held, total))
    for side in sides:
        if side.name != "sb3":
            side.memory.store.wait_idle()
    _sample(turns, clock, sizes, (held, total))
    return {
        "times": clock.summary(),
        "sb3_holds": sb3_held,
        "rows": compare(sides, stream.lanes, held // stream.lanes),
        "threads": {"torch": torch.get_num_threads(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")},
    }


def _add(
    stream: Stream,
    sides: list[Side],
    turns: Iterator[list[Side]],
    clock: Clock,
    transitions: int,
    block: int,
    acts: tuple[str, str],
    progress: tuple[int, int],
) -> int:
    """Add to all sides, block by block; beyond what the smallest can hold, time is noted under the second act."""
    smallest = min(side.capacity for side in sides)
    ticks = transitions // stream.lanes
    for begin in range(0, ticks, block):
        steps = list(itertools.islice(stream.steps, min(block, ticks - begin)))
        act = acts[0] if begin * stream.lanes < smallest else acts[1] or acts[0]
        arranged = {side.name: [side.arguments(step) for step in steps] for side in sides}
        for side in next(turns):
            add, batch = side.add, arranged[side.name]
            start = time.perf_counter()
            for arguments in batch:
                add(*arguments)
            clock.note(act, side.name, (time.perf_counter() - start) / len(batch))
        emit({"done": progress[0] + begin * stream.lanes, "total": progress[1]})
    return ticks * stream.lanes


def _sample(turns: Iterator[list[Side]], clock: Clock, sizes: Sizes, progress: tuple[int, int]) -> None:
    np.random.seed(0)  # noqa: NPY002  what Stable-Baselines3 draws from
    for begin in range(0, sizes.batches, sizes.in_a_row):
        for side in next(turns):
            held = None  # as in training, the last batch is held until the next one was drawn
            for _ in range(sizes.in_a_row):
                start = time.perf_counter()
                held = side.sample(BATCH)
                clock.note("sample", side.name, time.perf_counter() - start)
            del held
        emit({"done": progress[0] + begin, "total": progress[1]})


def compare(sides: list[Side], lanes: int, ticks: int) -> dict[str, Any]:
    """Count rows of holdall's that differ in any bit from Stable-Baselines3's: ends, their neighbours, and others."""
    plain = next(side for side in sides if side.name == "sb3").store
    first = max(0, ticks - plain.buffer_size)
    slots = np.arange(first, ticks) % plain.buffer_size
    done, cut = (flags[slots].reshape(-1).astype(bool) for flags in (plain.dones, plain.timeouts))
    ends = np.flatnonzero(done)
    rng = np.random.default_rng(1)
    places = np.concatenate([ends, ends + lanes, ends - lanes, rng.integers(0, len(done), _COMPARED_ROWS)])
    ids = first * lanes + np.unique(places[(places >= 0) & (places < len(done))])
    return {
        "compared": len(ids),
        "terminated": int(np.count_nonzero(done & ~cut)),
        "truncated": int(np.count_nonzero(cut)),
        "wrong": {side.name: _wrong_rows(plain, side, ids, lanes) for side in sides if side.name != "sb3"},
    }


def _wrong_rows(plain: Any, side: Side, ids: NDArray[np.int64], lanes: int) -> int:
    observed = plain.observations if isinstance(plain.observations, dict) else {"": plain.observations}
    row_bytes = sum(2 * array[0, 0].nbytes for array in observed.values())
    wrong = 0
    for some in np.array_split(ids, max(1, len(ids) * row_bytes // _COMPARED_BYTES)):
        batch = side.memory.gather(some)
        ticks, lane = np.divmod(some, lanes)
        slot = ticks % plain.buffer_size
        differs = np.zeros(len(some), np.bool_)
        for theirs, ours in _fields_of(plain, batch):
            differs |= (_rows(theirs[slot, lane]) != _rows(np.asarray(ours))).any(axis=1)
        wrong += int(np.count_nonzero(differs))
    return wrong


def _fields_of(plain: Any, batch: Any) -> Iterator[tuple[NDArray[Any], Any]]:
    for theirs, ours in ((plain.observations, batch.obs), (plain.next_observations, batch.next_obs)):
        if isinstance(theirs, dict):
            yield from ((theirs[key], ours[key]) for key in theirs)
        else:
            yield theirs, ours
    yield plain.actions, batch.action
    yield plain.rewards, batch.reward
    yield plain.dones.astype(np.bool_), np.asarray(batch.terminated) | np.asarray(batch.truncated)
    yield plain.timeouts.astype(np.bool_), batch.truncated


def _rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8).reshape(len(array), -1)


def _turns(sides: list[Side]) -> Iterator[list[Side]]:
    """Whose turn comes first changes from one round to the next."""
    for first in itertools.cycle(range(len(sides))):
        yield sides[first:] + sides[:first]


def _summarise(sides: dict[SideName, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, seconds in sides.items():
        us = np.array(seconds) * 1e6
        figures[name] = {"median_us": float(np.median(us)), "min_us": float(us.min()), "mean_us": float(us.mean())}
        figures[name]["count"] = len(us)
    for name in sides:
        if name != "sb3":
            kinds = ("median", "min", "mean")
            figures[name] |= {
                f"ratio_{kind}": figures[name][f"{kind}_us"] / figures["sb3"][f"{kind}_us"] for kind in kinds
            }
    return figures


def main() -> None:
    """Read the command line, measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compressed", metavar="PREFER")
    wanted = parser.parse_args()
    emit({"result": measure(wanted.case, wanted.quick, wanted.trace, wanted.compressed)})


if __name__ == "__main__":
    main()

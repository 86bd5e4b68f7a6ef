"""Memories on a GPU, compared with plain torch tensors: `python benchmarks/gpu/resident.py [--json FILE]`.

The data is random tensors that are made on the device. The other side is what users of GPU simulators write: tensors of
(ticks, lanes, ...) for `obs`, `next_obs`, `action`, `reward` and two flags, filled with `copy_`, and read with a random
index. Both sides take turns. A time is from the call until the stream has the result, the median over all turns. Rows
are compared with what was added before times are taken.

Needs torch with CUDA. `--device cpu --short` runs every line of it anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

import holdall

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_run import describe_gpu_run
from results import Figure, show, store

MIB = 2**20
ACTION = spaces.Box(-1, 1, (8,), np.float32)
WARM_UP = 20
STEPS = 7
"""Number of observations that are added again and again. It is larger than the frames of a stack."""


class Plain:
    """Two copies of every observation, as plain torch keeps them."""

    def __init__(self, device: str, ticks: int, lanes: int, space: spaces.Box) -> None:
        observed = (space.shape, torch.from_numpy(np.empty(0, space.dtype)).dtype)
        rest: list[Any] = [((8,), torch.float32), ((), torch.float32), ((), torch.bool), ((), torch.bool)]
        fields = [observed, observed, *rest]
        self.rows = [torch.zeros((ticks, lanes, *shape), dtype=kind, device=device) for shape, kind in fields]
        self._added = 0

    def add(self, *fields: torch.Tensor) -> None:
        """Write one tick."""
        slot = self._added % len(self.rows[0])
        for rows, field in zip(self.rows, fields, strict=True):
            rows[slot].copy_(field)
        self._added += 1

    def sample(self, count: int) -> list[torch.Tensor]:
        """Draw rows."""
        held = min(self._added, len(self.rows[0])) * self.rows[0].shape[1]
        ids = torch.randint(0, held, (count,), device=self.rows[0].device)
        return [rows.view(-1, *rows.shape[2:])[ids] for rows in self.rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(rows.nbytes for rows in self.rows)


def in_turns(device: str, ways: list[Callable[[], Any]], turns: int) -> list[float]:
    """Return the median milliseconds of every way."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    times: list[list[float]] = [[] for _ in ways]
    for turn in range(WARM_UP + turns):
        for way, found in zip(ways, times, strict=True):
            wait()
            begun = time.perf_counter()
            way()
            wait()
            if turn >= WARM_UP:
                found.append(time.perf_counter() - begun)
    return [statistics.median(found) * 1e3 for found in times]


def observations(device: str, space: spaces.Box, lanes: int, stacked: bool) -> list[torch.Tensor]:
    """Return observations of consecutive steps. The first one follows the last one. Stacks shift by one frame."""
    kind = torch.from_numpy(np.empty(0, space.dtype)).dtype
    if not stacked:
        return [(torch.randn((lanes, *space.shape), device=device) * 50).to(kind) for _ in range(STEPS)]
    frames = [(torch.randn((lanes, *space.shape[1:]), device=device) * 50).to(kind) for _ in range(STEPS)]
    return [
        torch.stack([frames[(i + k) % STEPS] for k in range(space.shape[0])], dim=1).contiguous() for i in range(STEPS)
    ]


class Case(NamedTuple):
    """One kind of observation, and sizes."""

    name: str
    space: spaces.Box
    lanes: int
    ticks: int
    batches: tuple[int, ...]
    is_stacked: bool = False


VECTOR = spaces.Box(-9, 9, (100,), np.float32)
IMAGE = spaces.Box(0, 255, (84, 84, 3), np.uint8)
STACK = spaces.Box(0, 255, (4, 84, 84), np.uint8)
HISTORY = spaces.Box(-9, 9, (5, 48), np.float32)
CASES = (
    Case("100 floats", VECTOR, 4096, 500, (256, 2048, 8192, 32768)),
    Case("84 x 84 x 3", IMAGE, 16, 2000, (256, 2048)),
    Case("stacks of 4 x 84 x 84", STACK, 64, 500, (256, 2048), is_stacked=True),
    Case("histories of 5 x 48 floats", HISTORY, 4096, 300, (2048, 32768), is_stacked=True),
)
SHORT_CASES = (
    Case("100 floats", VECTOR, 64, 20, (64,)),
    Case("84 x 84 x 3", IMAGE, 2, 20, (16,)),
    Case("stacks of 4 x 84 x 84", STACK, 2, 20, (16,), is_stacked=True),
    Case("histories of 5 x 48 floats", HISTORY, 64, 20, (64,), is_stacked=True),
)


def measure(device: str, case: Case, turns: int) -> list[Figure]:
    """Compare adding, sampling and memory for one kind of observation."""
    name, space, lanes, ticks, batches, is_stacked = case
    steps = observations(device, space, lanes, is_stacked)
    action = torch.randn((lanes, 8), device=device)
    reward = torch.randn(lanes, device=device)
    flag = torch.zeros(lanes, dtype=torch.bool, device=device)
    memory = holdall.ReplayMemory(space, ACTION, ticks * lanes, lanes, store_device=device, seed=0)
    plain = Plain(device, ticks, lanes, space)
    count = [0, 0]

    def add_here() -> None:
        i = count[0] = count[0] + 1
        memory.add(steps[i % STEPS], action, reward, steps[(i + 1) % STEPS], flag, flag)

    def add_plainly() -> None:
        i = count[1] = count[1] + 1
        plain.add(steps[i % STEPS], steps[(i + 1) % STEPS], action, reward, flag, flag)

    for _ in range(ticks + 3):
        add_here()
        add_plainly()
    check(memory, steps, ticks, lanes)
    ours, theirs = in_turns(device, [add_here, add_plainly], turns)
    figures = figures_of(f"{name}: add {lanes:,} lanes", "us", 1e3 * ours, 1e3 * theirs)
    for batch in batches:
        ways: list[Callable[[], Any]] = [partial(memory.sample, batch), partial(plain.sample, batch)]
        ours, theirs = in_turns(device, ways, turns)
        figures += figures_of(f"{name}: sample {batch:,}", "us", 1e3 * ours, 1e3 * theirs)
    held = sum(field.total_bytes for field in memory.report().fields)
    figures += figures_of(f"{name}: bytes", "MiB", held / MIB, plain.nbytes / MIB)
    memory.close()
    return figures


def figures_of(case: str, unit: str, ours: float, theirs: float) -> list[Figure]:
    """Return the figures of both sides, and their ratio."""
    name = f"resident: {case}"
    return [
        Figure(name, "holdall", unit, ours),
        Figure(name, "plain torch", unit, theirs),
        Figure(name, "ratio", "of plain torch's", ours / theirs),
    ]


def check(memory: holdall.ReplayMemory, steps: list[torch.Tensor], ticks: int, lanes: int) -> None:
    """Exit with an error if rows differ from what was added."""
    ids = np.arange(memory.first_id, memory.next_id, max(1, ticks * lanes // 4096))
    batch = memory.gather(ids)
    tick, lane = np.divmod(ids, lanes)
    for got, later in ((batch.obs, 1), (batch.next_obs, 2)):
        expected = torch.stack([steps[(int(t) + later) % STEPS][int(i)] for t, i in zip(tick, lane, strict=True)])
        if not torch.equal(got, expected):
            sys.exit("error: rows came back wrong")


def main() -> None:
    """Measure, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="device of the data (%(default)s)")
    parser.add_argument("--short", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --short runs every line on the CPU")
    turns = 5 if args.short else 200
    run = describe_gpu_run({"short": args.short})
    figures = []
    for case in SHORT_CASES if args.short else CASES:
        figures += measure(args.device, case, turns)
    show(figures)
    if args.json is not None:
        store(args.json, figures, run)


if __name__ == "__main__":
    main()

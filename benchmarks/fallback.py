"""What the compiled loops and the linked compression save: `python benchmarks/fallback.py`.

Three sides hold the same frames in one process: the compiled loops (`native`); the same without Zstandard and LZ4 in C,
so that the Python packages compress (`packages`); and NumPy (`portable`). Turn by turn each adds a block of steps or
draws a batch of 256, raw and compressed. Shown is the minimum over turns of the CPU time of all threads of the process,
over that of `native`.
Out: benchmarks/results/fallback.json, the table in docs/troubleshooting.md, and the figures of the warning in
src/holdall/native/__init__.py. `--kept` writes the last two from the results that are there.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np

import holdall
from holdall.native import native_kernels

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fallback.json"
PAGE = ROOT / "docs" / "troubleshooting.md"
WARNING = ROOT / "src" / "holdall" / "native" / "__init__.py"
STEPS, TURNS, BLOCK, SHAPE = 12_000, 30, 100, (4, 84, 84)
SIDES = ("native", "packages", "portable")
ACTS = {
    "add": "`add`, one step of 4 stacked frames",
    "sample": "`sample(256)`, raw",
    "compress": "`add` and compressing",
    "sample_compressed": "`sample(256)`, compressed",
    "bytes": "memory, compressed",
}


def frames() -> np.ndarray:
    """Return stacks of 4 frames: a background that stays, and a sprite and some noise that move."""
    random = np.random.default_rng(0)
    screens = np.repeat(random.integers(0, 255, (1, 84, 84), np.uint8), STEPS + 4, axis=0)
    for step, screen in enumerate(screens):
        screen[step % 70 : step % 70 + 12, (3 * step) % 70 : (3 * step) % 70 + 8] = random.integers(0, 255, (12, 8))
    return np.lib.stride_tricks.sliding_window_view(screens, 4, axis=0).transpose(0, 3, 1, 2)


def memory(side: str, budget: str | None) -> holdall.ReplayMemory:
    """Make a memory that uses one side's loops."""
    os.environ["HOLDALL_KERNELS"] = "portable" if side == "portable" else "native"
    lacking: dict[str, Any] = {
        "system_libraries": lambda: None, "linked_libraries": lambda _: None,
        "native_kernels": native_kernels.__wrapped__, "_warn_once": lambda: None,
    }  # fmt: skip
    space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    with mock.patch.multiple("holdall.native", **lacking) if side == "packages" else nullcontext():
        return holdall.ReplayMemory(space, gym.spaces.Discrete(4), STEPS, budget=budget, seed=0)


class Best:
    """The least that an act took, by act and side, in microseconds."""

    def __init__(self) -> None:
        self.numbers: dict[str, dict[str, float]] = {act: dict.fromkeys(SIDES, float("inf")) for act in ACTS}

    def note(self, act: str, side: str, work: Callable[[], Any], count: int = 1) -> None:
        """Time a call, which does the act `count` times."""
        begun = time.process_time()
        work()
        self.numbers[act][side] = min(self.numbers[act][side], (time.process_time() - begun) / count * 1e6)


def add(held: holdall.ReplayMemory, stacks: np.ndarray, begin: int, count: int) -> None:
    """Add some steps."""
    for step in range(begin, begin + count):
        held.add(stacks[step], 0, 0.0, stacks[step + 1], False, False)


def fill(held: holdall.ReplayMemory, stacks: np.ndarray) -> None:
    """Add all steps and wait until they are compressed."""
    add(held, stacks, 0, STEPS)
    held.drain()


def measure() -> dict[str, dict[str, float]]:
    """Return microseconds by act and side, and bytes a transition."""
    stacks, best = frames(), Best()
    raw = {side: memory(side, "4GiB") for side in SIDES}
    sealed = {side: memory(side, None) for side in SIDES}
    for begin, (side, held) in itertools.product(range(0, STEPS, BLOCK), raw.items()):
        best.note("add", side, functools.partial(add, held, stacks, begin, BLOCK), BLOCK)
    for side, held in sealed.items():
        best.note("compress", side, functools.partial(fill, held, stacks), STEPS)
        best.numbers["bytes"][side] = held.report().bytes_per_transition
    for _, side in itertools.product(range(TURNS), SIDES):
        best.note("sample", side, functools.partial(raw[side].sample, 256))
        best.note("sample_compressed", side, functools.partial(sealed[side].sample, 256))
    return best.numbers


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the results as the lines of docs/troubleshooting.md."""
    lines = ["| of what compiled code takes | no libzstd, liblz4 | no compiled library |", "|---|---|---|"]
    for act, words in ACTS.items():
        native, packages, portable = (results[act][side] for side in SIDES)
        lines.append(f"| {words} | {packages / native:.1f} x | {portable / native:.1f} x |")
    return "\n".join(lines)


def sentences(results: dict[str, dict[str, float]]) -> dict[str, str]:
    """Return what the warning says without compiled loops, and without linked compression."""

    def worst(side: str, *acts: str) -> str:
        return f"{max(results[act][side] / results[act]['native'] for act in acts):.1f}"

    def held(side: str) -> str:
        larger = worst(side, "bytes")
        return "as much memory as with it" if larger == "1.0" else f"{larger} times the memory"

    slower = worst("portable", "add", "sample", "compress", "sample_compressed")
    loops = f"add and sample take up to {slower} times as long, and compressed data {held('portable')}"
    slower = worst("packages", "sample_compressed")
    compression = f"sampling compressed data takes {slower} times as long, and the data {held('packages')}"
    return {"_WITHOUT_LOOPS": loops, "_WITHOUT_COMPRESSION": compression}


def rewritten(path: Path) -> str:
    """Return the page or the source with the figures of the kept results."""
    results, text = json.loads(RESULTS.read_text(encoding="utf-8")), path.read_text(encoding="utf-8")
    if path == PAGE:
        place = re.compile(r"(<!-- fallback: .*? -->\n).*?(<!-- end of fallback -->)", re.DOTALL)
        return place.sub(lambda found: f"{found[1]}{table(results)}\n{found[2]}", text)
    for name, words in sentences(results).items():
        text = re.sub(rf'^{name} = ".*"$', f'{name} = "{words}"', text, flags=re.MULTILINE)
    return text


if __name__ == "__main__":
    if "--kept" not in sys.argv:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(RESULTS.read_text(encoding="utf-8"))))
    for file in (PAGE, WARNING):
        file.write_text(rewritten(file), encoding="utf-8")

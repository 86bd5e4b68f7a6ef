"""Batches on a GPU, beside the bus and beside what others do: `python benchmarks/gpu_delivery.py [--json FILE]`.

Needs torch with CUDA; without a device it says so and ends. `--device cpu --quick` runs every line of it anywhere.
In:  noise, since nothing here depends on what is in a frame.  Out: the bits compared, a table, and JSON.

All ways of one row take turns, batch by batch, in an order that is drawn anew for every turn. A time is that of one
batch: from asking for it until the consumer's stream has it. Medians and minima over all turns; nothing is dropped but
the first turns, which allocate. After the two ways of others torch's idle threads spin for some milliseconds and take
cores from whoever comes next, so holdall is timed by itself as well: "alone".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

import holdall
from holdall.testing import assert_same_bits

CAMERA = spaces.Dict({"image": spaces.Box(0, 255, (84, 84, 3), np.uint8), "state": spaces.Box(-9, 9, (31,))})
STACK = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTION = spaces.Box(-1, 1, (8,))
FRAME_BYTES = 84 * 84 * 3
WARM_UP = 5

Way = Callable[[], Any]


class Rig:
    """A device, and how to wait for it."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device = device
        self.on_gpu = device.startswith("cuda")
        self.held = 3_000 if quick else 100_000
        self.stacks = 3_000 if quick else 40_000
        self.turns = 5 if quick else 60
        self.large = 64 if quick else 2_048  # rows: as many observations, and as many next ones
        self.small = 16 if quick else 128
        self.stacked_rows = 64 if quick else 4_096

    def wait(self) -> None:
        """Wait for the consumer's stream alone."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate memory that the device reads by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu)


def frames(count: int, frame_bytes: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Make noise of which no two frames are the same."""
    pool = rng.integers(0, 256, (64, frame_bytes), np.uint8)
    made = pool[np.arange(count) % len(pool)]
    made[:, :8] = np.arange(count, dtype=np.int64).view(np.uint8).reshape(count, 8)
    return made


def camera_memory(rig: Rig, images: NDArray[np.uint8], **how: Any) -> holdall.ReplayMemory:
    """Hold images and vectors. An episode ends every 200 steps."""
    rng = np.random.default_rng(1)
    memory = holdall.ReplayMemory(CAMERA, ACTION, rig.held, seed=0, **how)
    states = rng.standard_normal((rig.held + 1, 31), np.float32)
    for begin in range(0, rig.held, 1_000):
        at = slice(begin, begin + 1_000)
        after = slice(begin + 1, begin + 1_001)
        steps = 1_000
        ends = np.arange(begin, begin + steps) % 200 == 199
        memory.extend(
            *({"image": _as_images(images[at]), "state": states[at, None]},),
            np.zeros((steps, 1, 8), np.float32),
            np.zeros((steps, 1), np.float32),
            {"image": _as_images(images[after]), "state": states[after, None]},
            ends[:, None],
            np.zeros((steps, 1), bool),
        )
    return memory


def _as_images(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return rows.reshape(-1, 1, 84, 84, 3)


def stack_memory(rig: Rig, film: NDArray[np.uint8], **how: Any) -> holdall.ReplayMemory:
    """Hold stacks of four frames of one film."""
    memory = holdall.ReplayMemory(STACK, ACTION, rig.stacks, seed=0, **how)
    windows = np.lib.stride_tricks.sliding_window_view(film.reshape(-1, 84, 84), 4, axis=0)
    windows = windows.transpose(0, 3, 1, 2)[:, None]
    for begin in range(0, rig.stacks, 500):
        obs = windows[begin : begin + 500]
        after = windows[begin + 1 : begin + 501]
        flags = np.zeros((500, 1), bool)
        actions = np.zeros((500, 1, 8), np.float32)
        memory.extend(obs, actions, np.zeros((500, 1), np.float32), after, flags, flags)
    return memory


def take_turns(rig: Rig, ways: dict[str, Way]) -> dict[str, Any]:
    """Time all ways, turn by turn. The last batch of each is held until its next one is there."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, Any] = {}
    order = np.random.default_rng(3)
    for turn in range(WARM_UP + rig.turns):
        for name in order.permutation(list(ways)).tolist():
            way = ways[name]
            rig.wait()
            start = time.perf_counter()
            kept[name] = way()
            rig.wait()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "median_ms": 1e3 * float(np.median(times)),
            "least_ms": 1e3 * min(times),
        }
        for name, times in seconds.items()
    }


def flow(rig: Rig, loader: Iterator[Any]) -> dict[str, Any]:
    """Time a loader as it flows: batches one after the other, each waited for, all of them over their number."""
    kept = None
    for _ in range(WARM_UP):
        kept = next(loader)
    rig.wait()
    start = time.perf_counter()
    marks = []
    for _ in range(rig.turns):
        kept = next(loader)
        rig.wait()
        marks.append(time.perf_counter())
    del kept
    times = np.diff([start, *marks])
    return {
        "mean_ms": 1e3 * (marks[-1] - start) / rig.turns,
        "median_ms": 1e3 * float(np.median(times)),
        "least_ms": 1e3 * float(times.min()),
    }


def device_time(rig: Rig, way: Way) -> float | None:
    """Return the milliseconds a batch takes on the device alone: kernels and copies, added up."""
    if not rig.on_gpu:
        return None
    for _ in range(WARM_UP):
        way()
    rig.wait()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(10):
            way()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages())) / 1e3 / 10


def bus(rig: Rig, nbytes: int) -> Way:
    """Return the way of copying `nbytes` pinned bytes to the device."""
    host = rig.pinned(nbytes)
    there = torch.empty(nbytes, dtype=torch.uint8, device=rig.device)
    return lambda: there.copy_(host, non_blocking=True)


def plain_ways(rig: Rig, images: NDArray[np.uint8], rows: int) -> dict[str, Way]:
    """Do as Stable-Baselines3 does, and as one does who writes it by hand, from plain arrays."""
    rng = np.random.default_rng(2)
    obs = images[: rig.held]
    after = images[1 : rig.held + 1]
    both = [torch.from_numpy(obs), torch.from_numpy(after)]
    pinned = rig.pinned(2 * rows * FRAME_BYTES).view(2, rows, FRAME_BYTES)
    there = torch.empty((2, rows, FRAME_BYTES), dtype=torch.uint8, device=rig.device)

    def as_sb3() -> Any:
        ids = rng.integers(0, rig.held, rows)
        return [torch.tensor(part[ids], device=rig.device) for part in (obs, after)]

    def by_hand() -> Any:
        ids = torch.from_numpy(rng.integers(0, rig.held, rows))
        for part, out in zip(both, pinned, strict=True):
            torch.index_select(part, 0, ids, out=out)
        return there.copy_(pinned, non_blocking=True)

    return {"NumPy and .to(device), as SB3": as_sb3, "gather into pinned memory, copy": by_hand}


def same_bits(rig: Rig, there: holdall.ReplayMemory, here: holdall.ReplayMemory, rows: int) -> int:
    """Compare whole batches with those of a memory in arrays. Return how many rows were compared."""
    for _ in range(3):
        assert_same_bits(there.sample(rows), here.sample(rows))
    rig.wait()
    return 3 * rows


def same_rows(there: holdall.ReplayMemory, here: holdall.ReplayMemory, rows: int) -> int:
    """Compare batches that a device drew with the same rows of a memory in arrays. Return how many were compared."""
    for _ in range(3):
        batch: Any = there.sample(rows)
        ids = batch.ids.cpu().numpy()
        assert_same_bits(there.gather(ids), here.gather(ids))
        assert_same_bits(batch.obs, here.gather(ids).obs)
    return 3 * rows


def measure_camera(rig: Rig) -> dict[str, Any]:
    """Measure the rows of the table with camera images."""
    images = frames(rig.held + 1, FRAME_BYTES, np.random.default_rng(0))
    found: dict[str, Any] = {}
    with camera_memory(rig, images) as here, camera_memory(rig, images, device=rig.device) as host_store:
        found["rows_compared"] = same_bits(rig, host_store, here, 500 if rig.held > 5_000 else 100)
        for name, rows in (("4096", rig.large), ("256", rig.small)):
            ways = {"bus alone": bus(rig, 2 * rows * FRAME_BYTES), **plain_ways(rig, images, rows)}
            ways["holdall, no prefetch"] = lambda rows=rows: host_store.sample(rows)  # type: ignore[misc]  # bound now
            found[name] = take_turns(rig, ways)
            found[name]["holdall, alone"] = take_turns(rig, {"": ways["holdall, no prefetch"]})[""]
            with host_store.loader(rows, prefetch=2) as loader:
                found[name]["holdall, prefetch"] = flow(rig, loader)
        here.sample(8)
    with camera_memory(rig, images) as here, camera_memory(rig, images, store_device=rig.device) as store:
        found["rows_compared_store"] = same_rows(store, here, 500 if rig.held > 5_000 else 100)
        for name, rows in (("store", rig.large), ("store, few rows", 2 * rig.small)):
            found[name] = take_turns(
                rig,
                {
                    "holdall, store on the device": lambda rows=rows: store.sample(rows),  # type: ignore[misc]  # bound now
                    "plain torch, indexed": plain_store(rig, images, rows),
                },
            )
            with store.loader(rows, prefetch=2) as loader:
                found[name]["holdall, store on the device, prefetch"] = flow(rig, loader)
            found[name]["on the device alone"] = {
                "median_ms": device_time(rig, lambda rows=rows: store.sample(rows))  # type: ignore[misc]  # bound now
            }
    return found


def measure_loader(rig: Rig) -> tuple[float, float]:
    """Return the milliseconds of a large batch over the bus alone, and through the loader."""
    images = frames(rig.held + 1, FRAME_BYTES, np.random.default_rng(0))
    with camera_memory(rig, images, device=rig.device) as memory, memory.loader(rig.large, prefetch=2) as loader:
        bus_ms = take_turns(rig, {"": bus(rig, 2 * rig.large * FRAME_BYTES)})[""]["median_ms"]
        return bus_ms, flow(rig, loader)["mean_ms"]


def plain_store(rig: Rig, images: NDArray[np.uint8], rows: int) -> Way:
    """Return the way of plain tensors on the device, two copies of every observation: drawn and indexed there."""
    held = rig.held
    there = torch.from_numpy(images).to(rig.device)
    shapes = [(31,), (31,), (8,), ()]
    fields = [there[:held], there[1 : held + 1].clone()]
    fields += [torch.zeros((held, *shape), device=rig.device) for shape in shapes]
    fields += [torch.zeros(held, dtype=torch.bool, device=rig.device) for _ in range(2)]

    def indexed() -> list[torch.Tensor]:
        ids = torch.randint(0, held, (rows,), device=rig.device)
        return [field[ids] for field in fields]

    return indexed


def measure_stacks(rig: Rig) -> dict[str, Any]:
    """Measure the row with frame stacks."""
    film = frames(rig.stacks + 5, 84 * 84, np.random.default_rng(0))
    rows = rig.stacked_rows
    found: dict[str, Any] = {}
    with stack_memory(rig, film) as here, stack_memory(rig, film, device=rig.device) as host_store:
        found["rows_compared"] = same_bits(rig, host_store, here, 200 if rig.held > 5_000 else 50)
        ways = {
            "bus alone, 8 frames a row": bus(rig, rows * 8 * 84 * 84),
            "bus alone, 5 frames a row": bus(rig, rows * 5 * 84 * 84),
            "holdall, no prefetch": lambda: host_store.sample(rows),
        }
        found["stacks"] = take_turns(rig, ways)
        found["stacks"]["holdall, alone"] = take_turns(rig, {"": ways["holdall, no prefetch"]})[""]
        with host_store.loader(rows, prefetch=2) as loader:
            found["stacks"]["holdall, prefetch"] = flow(rig, loader)
    return found


def table(found: dict[str, Any]) -> str:
    """Lay the bars beside what was measured."""
    large = found["4096"]
    small = found["256"]
    store = found["store"]
    stacks = found["stacks"]
    bus_ms = large["bus alone"]["median_ms"]
    alone = store["on the device alone"]["median_ms"]
    rows: list[tuple[str, float | None, str, float]] = [
        ("4,096 frames, the bus alone", bus_ms, "", np.inf),
        ("4,096 frames, as SB3 does", large["NumPy and .to(device), as SB3"]["median_ms"], "", np.inf),
        ("4,096 frames, gathered by hand", large["gather into pinned memory, copy"]["median_ms"], "", np.inf),
        ("4,096 frames, prefetch", large["holdall, prefetch"]["mean_ms"], "1.6 x bus", 1.6 * bus_ms),
        ("4,096 frames, no prefetch, alone", large["holdall, alone"]["median_ms"], "3.0", 3.0),
        ("4,096 frames, no prefetch, in turns", large["holdall, no prefetch"]["median_ms"], "3.0", 3.0),
        ("256 frames, as SB3 does", small["NumPy and .to(device), as SB3"]["median_ms"], "", np.inf),
        ("256 frames, gathered by hand", small["gather into pinned memory, copy"]["median_ms"], "", np.inf),
        ("256 frames, no prefetch, alone", small["holdall, alone"]["median_ms"], "0.25", 0.25),
        ("256 frames, no prefetch, in turns", small["holdall, no prefetch"]["median_ms"], "0.25", 0.25),
        ("256 frames, prefetch", small["holdall, prefetch"]["mean_ms"], "", np.inf),
        ("4,096 frames, store on the GPU: the GPU's part", alone, "0.1", 0.1),
        *store_rows("the same, until the consumer has it", store),
        *store_rows("256 rows, until the consumer has it", found["store, few rows"]),
        ("4,096 stacks, 8 frames a row, the bus alone", stacks["bus alone, 8 frames a row"]["median_ms"], "", np.inf),
        ("4,096 stacks, no prefetch, alone", stacks["holdall, alone"]["median_ms"], "3.0", 3.0),
        ("4,096 stacks, no prefetch, in turns", stacks["holdall, no prefetch"]["median_ms"], "3.0", 3.0),
        ("4,096 stacks, prefetch", stacks["holdall, prefetch"]["mean_ms"], "3.0", 3.0),
    ]
    lines = ["| batch on the GPU, obs + next_obs | measured, ms | bar | |", "|---|---|---|---|"]
    for name, value, bar, limit in rows:
        told = "not measured here" if value is None else f"{value:.3f}"
        verdict = "" if value is None or not bar else ("met" if value <= limit else "missed")
        lines.append(f"| {name} | {told} | {bar} | {verdict} |")
    return "\n".join(lines)


def store_rows(name: str, found: dict[str, Any]) -> list[tuple[str, float | None, str, float]]:
    """Lay a store on the device beside plain torch."""
    plain = found["plain torch, indexed"]["median_ms"]
    own = found["holdall, store on the device"]
    ahead = found["holdall, store on the device, prefetch"]
    return [
        (name, own["median_ms"], "1.3 x plain torch", 1.3 * plain),
        ("the same, prefetch", ahead["mean_ms"], "1.3 x plain torch", 1.3 * plain),
        ("the same, plain torch, indexed", plain, "", np.inf),
    ]


def main() -> int:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small memories, few turns: to see that it runs")
    parser.add_argument("--loader", action="store_true", help="only 4,096 frames through the loader, and the bus")
    parser.add_argument("--json", type=Path, help="write the result there")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device here")
        return 0
    rig = Rig(arguments.device, arguments.quick)
    if arguments.loader:
        bus_ms, loader_ms = measure_loader(rig)
        print(
            f"{2 * rig.large} frames: the bus {bus_ms:.3f} ms, the loader {loader_ms:.3f} ms, {loader_ms / bus_ms:.2f}"
        )
        return 0
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if rig.on_gpu else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "held": rig.held,
        **measure_camera(rig),
        **measure_stacks(rig),
    }
    print(json.dumps(found, indent=1))
    print(table(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Batches for a GPU, compared with the bus and with the usual ways: `python benchmarks/gpu/delivery.py [--json FILE]`.

The data is noise, because nothing here depends on what is in a frame. Batches are compared with those of a memory in
arrays, bit for bit.

All ways of one case take turns, batch by batch, in an order that is drawn anew for every turn. A time is that of one
batch: from the call until the consumer's stream has it. Figures are medians over all turns but the first ones, which
allocate. After the usual ways, torch's idle threads spin for some milliseconds and take cores from the next way, so
holdall is timed alone as well. "Flowing" is the mean time per batch of a loader with `prefetch=2`.

Needs torch with CUDA. `--device cpu --short` runs every line of it anywhere.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_run import describe_gpu_run
from results import Figure, show, store

CAMERA = spaces.Dict({"image": spaces.Box(0, 255, (84, 84, 3), np.uint8), "state": spaces.Box(-9, 9, (31,))})
STACK = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTION = spaces.Box(-1, 1, (8,))
FRAME_BYTES = 84 * 84 * 3
WARM_UP = 5

Way = Callable[[], Any]


class Rig:
    """A device, and the sizes of memories and batches."""

    def __init__(self, device: str, *, is_short: bool) -> None:
        self.device = device
        self.on_gpu = device.startswith("cuda")
        self.held = 3_000 if is_short else 100_000
        self.stacks = 3_000 if is_short else 40_000
        self.turns = 5 if is_short else 60
        self.large = 64 if is_short else 2_048  # rows: as many observations, and as many next ones
        self.small = 16 if is_short else 128
        self.stacked_rows = 64 if is_short else 4_096

    def wait(self) -> None:
        """Wait until the consumer's stream is idle."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory, which the device reads directly."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu)


def frames(count: int, frame_bytes: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return frames of noise that all differ."""
    pool = rng.integers(0, 256, (64, frame_bytes), np.uint8)
    made = pool[np.arange(count) % len(pool)]
    made[:, :8] = np.arange(count, dtype=np.int64).view(np.uint8).reshape(count, 8)
    return made


def camera_memory(rig: Rig, images: NDArray[np.uint8], **how: Any) -> holdall.ReplayMemory:
    """Return a full memory of images and vectors. An episode ends every 200 steps."""
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
    """Return a full memory of stacks of four frames of `film`."""
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
    """Time all ways, turn by turn. The last batch of each way is kept until its next one is complete."""
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
    """Time a loader: wait for one batch after another. The mean is the whole time over the number of batches."""
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
    """Return the milliseconds of all kernels and copies of a batch on the device."""
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
    """Return the ways of Stable-Baselines3 and of code written by hand, both with plain arrays."""
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


def check_same_bits(rig: Rig, there: holdall.ReplayMemory, here: holdall.ReplayMemory, rows: int) -> None:
    """Compare whole batches of `rows` transitions with those of a memory in arrays."""
    for _ in range(3):
        assert_same_bits(there.sample(rows), here.sample(rows))
    rig.wait()


def check_same_rows(there: holdall.ReplayMemory, here: holdall.ReplayMemory, rows: int) -> None:
    """Compare batches drawn on a device with the same rows of a memory in arrays."""
    for _ in range(3):
        batch: Any = there.sample(rows)
        ids = batch.ids.cpu().numpy()
        assert_same_bits(there.gather(ids), here.gather(ids))
        assert_same_bits(batch.obs, here.gather(ids).obs)


def measure_camera(rig: Rig) -> dict[str, Any]:
    """Measure the cases with camera images."""
    images = frames(rig.held + 1, FRAME_BYTES, np.random.default_rng(0))
    found: dict[str, Any] = {}
    with camera_memory(rig, images) as here, camera_memory(rig, images, device=rig.device) as host_store:
        check_same_bits(rig, host_store, here, 500 if rig.held > 5_000 else 100)
        for name, rows in (("4096", rig.large), ("256", rig.small)):
            ways = {"bus alone": bus(rig, 2 * rows * FRAME_BYTES), **plain_ways(rig, images, rows)}
            ways["holdall, no prefetch"] = lambda rows=rows: host_store.sample(rows)  # type: ignore[misc]  # bound now
            found[name] = take_turns(rig, ways)
            found[name]["holdall, alone"] = take_turns(rig, {"": ways["holdall, no prefetch"]})[""]
            with host_store.loader(rows, prefetch=2) as loader:
                found[name]["holdall, prefetch"] = flow(rig, loader)
        here.sample(8)
    with camera_memory(rig, images) as here, camera_memory(rig, images, store_device=rig.device) as store:
        check_same_rows(store, here, 500 if rig.held > 5_000 else 100)
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
    """Return the way of plain tensors on the device, with two copies of every observation and a random index."""
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
    """Measure the case with frame stacks."""
    film = frames(rig.stacks + 5, 84 * 84, np.random.default_rng(0))
    rows = rig.stacked_rows
    found: dict[str, Any] = {}
    with stack_memory(rig, film) as here, stack_memory(rig, film, device=rig.device) as host_store:
        check_same_bits(rig, host_store, here, 200 if rig.held > 5_000 else 50)
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


CASES = {
    "4096": "4,096 frames (87 MB)",
    "256": "256 frames",
    "store": '4,096 frames, `store_device="cuda"`',
    "store, few rows": '512 frames, `store_device="cuda"`',
    "stacks": "4,096 stacks of 4",
}
"""The cases, as they are called in the results."""
COLUMNS = {
    "holdall, prefetch": "flowing",
    "holdall, alone": "alone",
    "holdall, no prefetch": "in turns",
    "holdall, store on the device, prefetch": "flowing",
    "holdall, store on the device": "in turns",
    "on the device alone": "the GPU's own part",
    "gather into pinned memory, copy": "by hand",
    "NumPy and .to(device), as SB3": "as SB3",
    "plain torch, indexed": "plain torch",
    "bus alone": "the bus alone",
    "bus alone, 8 frames a row": "the bus alone",
    "bus alone, 5 frames a row": "the bus alone, 5 frames a row",
}
"""The ways, as they are called in the results."""


def find_bars(found: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the maximum milliseconds by case and way."""
    bars = {
        ("4096", "holdall, prefetch"): 1.6 * found["4096"]["bus alone"]["median_ms"],
        ("4096", "holdall, alone"): 3.0,
        ("4096", "holdall, no prefetch"): 3.0,
        ("256", "holdall, alone"): 0.25,
        ("256", "holdall, no prefetch"): 0.25,
        ("store", "on the device alone"): 0.1,
        ("stacks", "holdall, alone"): 3.0,
        ("stacks", "holdall, no prefetch"): 3.0,
        ("stacks", "holdall, prefetch"): 3.0,
    }
    for case in ("store", "store, few rows"):
        plain_ms = found[case]["plain torch, indexed"]["median_ms"]
        bars[case, "holdall, store on the device"] = 1.3 * plain_ms
        bars[case, "holdall, store on the device, prefetch"] = 1.3 * plain_ms
    return bars


def figures_of(found: dict[str, Any]) -> list[Figure]:
    """Return the milliseconds of a batch in each case and way: the mean of a loader, and medians of the others."""
    bars = find_bars(found)
    figures = []
    for case, title in CASES.items():
        for way, column in COLUMNS.items():
            if way in found[case]:
                times = found[case][way]
                most = bars.get((case, way))
                bar = None if most is None else f"at most {most:.3g}"
                milliseconds = times.get("mean_ms", times["median_ms"])
                figures.append(Figure(f"delivery: {title}", column, "ms", milliseconds, bar))
    return figures


def main() -> int:
    """Measure, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="device of the batches (%(default)s)")
    parser.add_argument("--loader", action="store_true", help="only 4,096 frames through the loader, and the bus")
    parser.add_argument("--short", action="store_true", help="small memories, few turns: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device here")
        return 0
    rig = Rig(arguments.device, is_short=arguments.short)
    run = describe_gpu_run({"short": arguments.short, "transitions": rig.held})
    if arguments.loader:
        bus_ms, loader_ms = measure_loader(rig)
        figures = [
            Figure(f"delivery: {CASES['4096']}", "flowing", "ms", loader_ms, f"at most {1.6 * bus_ms:.3g}"),
            Figure(f"delivery: {CASES['4096']}", "the bus alone", "ms", bus_ms),
        ]
    else:
        figures = figures_of(measure_camera(rig) | measure_stacks(rig))
    show(figures)
    if arguments.json is not None:
        store(arguments.json, figures, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A recording of PushT in HDF5, Lance and holdall: bytes, samples per second of a DataLoader, memory of its processes.

    pip install gym-pusht h5py pylance opencv-python-headless
    python benchmarks/offline.py [--frames 16000] [--parts step window] [--json FILE]

The recording has images of 96 x 96 x 3 bytes, positions and actions, made with the public environment gym-pusht and a
scripted player. It is stored in .cache. Every side stores it without loss, and every row that is read is compared once
with the recording.

Times: the loaders of all sides take turns in one process. Each DataLoader has four spawned workers. A turn is a number
of batches after those that were prepared before are used up. Samples per second are the median over the turns, and the
factor over Lance is the median of the ratios within a turn. The processor time of a sample, of all processes, depends
less on other programs. The side `none` passes zeros on, which shows what the DataLoader itself takes: torch sends each
array in new shared memory. `holdall_threads` is `Dataset.loader`, which needs no other processes.

Memory: the proportional set size of the main process and its workers, in fresh processes for each side.

The exit status is 1 if holdall is larger than Lance, or less than twice as fast as the fastest Lance: with four workers
as well as with `Dataset.loader`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from gymnasium import spaces
from numpy.typing import NDArray
from results import Figure, describe_run, show, store
from torch.utils.data import DataLoader

import holdall
from holdall.dataset_batches import Batches

ROOT = Path(__file__).parents[1] / ".cache" / "offline"
SHAPE = (96, 96, 3)
IMAGE_BYTES = 96 * 96 * 3
FPS = 10
BATCH = 64
WORKERS = 4
CASES = {"step": ((0,), (0,)), "window": ((-1, 0), tuple(range(16)))}
"""Offsets of the images and of the actions that a sample has."""
BAR_SPEED = 2.0
THREADS = "holdall_threads"
"""`Dataset.loader`, which reads in threads of the main process."""
FAST = ("holdall", THREADS)
"""Sides that have to reach the bar."""
TIMED = ["none", "hdf5", "lance", "holdall", THREADS]
PARTS = ["sizes", "step", "window", "smallest", "memory"]

TITLES = {
    "none": "workers that read nothing",
    "hdf5": "HDF5, four workers",
    "lance": "Lance, images, four workers",
    "lance_pages": "Lance, pages, four workers",
    "holdall": "holdall, four workers",
    "holdall_memory": "holdall, `--prefer memory`, four workers",
    THREADS: "holdall, `dataset.loader`",
}
PART_TITLES = {
    "step": "one image, one action",
    "window": "two images, 16 actions",
    "smallest": "one image, smallest forms",
}

Rows = dict[str, NDArray[Any]]


# ---------------------------------------------------------------- the recording


def record(frames: int) -> dict[str, NDArray[Any]]:
    """Play PushT, or return the recording of an earlier call."""
    path = ROOT / f"pusht-{frames}.npz"
    if path.exists():
        with np.load(path) as found:
            return dict(found)
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    import gym_pusht  # noqa: F401, PLC0415  registers the environment
    import gymnasium  # noqa: PLC0415

    size = {"observation_width": SHAPE[1], "observation_height": SHAPE[0]}
    settings: Any = {"obs_type": "pixels_agent_pos", "max_episode_steps": 150, **size}
    env: Any = gymnasium.make("gym_pusht/PushT-v0", **settings)
    generator = np.random.default_rng(0)
    made: dict[str, NDArray[Any]] = {
        "images": np.empty((frames, *SHAPE), np.uint8),
        "states": np.empty((frames, 2), np.float32),
        "actions": np.empty((frames, 2), np.float32),
        "rewards": np.empty(frames, np.float32),
        "ends": np.zeros(frames, np.bool_),
    }
    obs, info = env.reset(seed=0)
    noise = np.zeros(2)
    for tick in range(frames):
        block = np.array(info["block_pose"][:2])
        away = block - np.array(info["goal_pose"][:2])
        side = 40 if generator.random() < 0.7 else -40
        noise = 0.9 * noise + generator.normal(0, 25, 2)
        action = np.clip(block + side * away / (np.linalg.norm(away) + 1e-6) + noise, 0, 512).astype(np.float32)
        made["images"][tick] = obs["pixels"]
        made["states"][tick] = obs["agent_pos"]
        made["actions"][tick] = action
        obs, made["rewards"][tick], terminated, truncated, info = env.step(action)
        if terminated or truncated:
            made["ends"][tick] = True
            obs, info = env.reset(seed=tick + 1)
            noise = np.zeros(2)
    made["ends"][-1] = True
    ROOT.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **made)
    return made


def find_steps(ends: NDArray[np.bool_], indices: NDArray[np.int64], offsets: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the steps at `offsets` from each index, within its episode."""
    last = np.flatnonzero(ends)
    episode = np.searchsorted(last, indices)
    first = np.where(episode > 0, last[episode - 1] + 1, 0)
    steps: NDArray[np.int64] = np.clip(indices[:, None] + np.array(offsets), first[:, None], last[episode][:, None])
    return steps


# ---------------------------------------------------------------- sides


class Side:
    """One form of the recording, which a worker opens when it reads first."""

    def __init__(self, folder: Path, ends: NDArray[np.bool_], case: str) -> None:
        self.folder = folder
        self.ends = ends
        self.images, self.actions = CASES[case]
        self._file: Any = None

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, indices: Any) -> Rows:
        wanted = np.asarray(indices, np.int64)
        steps = {name: find_steps(self.ends, wanted, getattr(self, name)) for name in ("images", "actions")}
        flat = self.read({name: each.reshape(-1) for name, each in steps.items()}, wanted)
        rows = {name: array.reshape(*steps[name].shape, *array.shape[1:]) for name, array in flat.items()}
        return {**rows, "id": wanted}

    def read(self, steps: dict[str, NDArray[np.int64]], indices: NDArray[np.int64]) -> Rows:
        """Return images and actions at their steps."""
        raise NotImplementedError


class Nothing(Side):
    """Reads nothing."""

    def read(self, steps: dict[str, NDArray[np.int64]], indices: NDArray[np.int64]) -> Rows:
        """Return zeros."""
        return {
            "images": np.zeros((len(steps["images"]), *SHAPE), np.uint8),
            "actions": np.zeros((len(steps["actions"]), 2), np.float32),
        }


class Hdf5(Side):
    """One chunk per image, not compressed."""

    @staticmethod
    def write(folder: Path, made: dict[str, NDArray[Any]]) -> None:
        """Write the file."""
        import h5py  # noqa: PLC0415

        folder.mkdir(parents=True)
        with h5py.File(folder / "recording.h5", "w") as file:
            file.create_dataset("images", data=made["images"], chunks=(1, *SHAPE))
            for name in ("states", "actions", "rewards", "ends"):
                file[name] = made[name]

    def read(self, steps: dict[str, NDArray[np.int64]], indices: NDArray[np.int64]) -> Rows:
        """Read image by image, because a list of rows has to be sorted and without repetitions."""
        import h5py  # noqa: PLC0415

        if self._file is None:
            self._file = h5py.File(self.folder / "recording.h5", "r")
            self._actions = self._file["actions"][:]
        images = np.empty((len(steps["images"]), *SHAPE), np.uint8)
        dataset = self._file["images"]
        for row, step in enumerate(steps["images"].tolist()):
            dataset.read_direct(images, np.s_[step], np.s_[row])
        return {"images": images, "actions": self._actions[steps["actions"]]}


class Lance(Side):
    """Images as blobs, each compressed with Zstandard: the fastest form that is compressed without loss."""

    version: Any = "2.1"

    @classmethod
    def write(cls, folder: Path, made: dict[str, NDArray[Any]]) -> None:
        """Write the table."""
        import lance  # noqa: PLC0415
        import pyarrow as pa  # noqa: PLC0415

        blobs = pa.array([image.tobytes() for image in made["images"]], pa.large_binary())
        packing = {"lance-encoding:compression": "zstd", "lance-encoding:compression-level": "9"}
        pairs = {name: pa.FixedSizeListArray.from_arrays(made[name].reshape(-1), 2) for name in ("states", "actions")}
        fields = [pa.field("images", blobs.type, metadata=packing)]
        fields += [pa.field(name, column.type) for name, column in pairs.items()]
        table = pa.Table.from_arrays([blobs, *pairs.values()], schema=pa.schema(fields))
        table = table.append_column("rewards", pa.array(made["rewards"])).append_column("ends", pa.array(made["ends"]))
        lance.write_dataset(table, str(folder), data_storage_version=cls.version)

    def read(self, steps: dict[str, NDArray[np.int64]], indices: NDArray[np.int64]) -> Rows:
        """Take all images at once."""
        import lance  # noqa: PLC0415

        if self._file is None:
            self._file = lance.dataset(str(self.folder))
            column = self._file.to_table(columns=["actions"]).column("actions").combine_chunks()
            self._actions = column.flatten().to_numpy().reshape(-1, 2)
        blobs = self._file.take(steps["images"], columns=["images"]).column("images").combine_chunks()
        offsets = np.frombuffer(blobs.buffers()[1], np.int64)[blobs.offset :]
        pixels = np.frombuffer(blobs.buffers()[2], np.uint8)[offsets[0] : offsets[0] + len(blobs) * IMAGE_BYTES]
        return {"images": pixels.reshape(-1, *SHAPE).copy(), "actions": self._actions[steps["actions"]]}


class LancePages(Lance):
    """Whole pages of images compressed with Zstandard: the smallest form, and slow to read at random."""

    version = "2.0"


def write_holdall(folder: Path, made: dict[str, NDArray[Any]], prefer: str) -> None:
    """Add all episodes to a memory, and save it."""
    box = spaces.Box(0, 512, (2,), np.float32)
    space = spaces.Dict({"image": spaces.Box(0, 255, SHAPE, np.uint8), "state": box})
    last = np.flatnonzero(made["ends"])
    with holdall.ReplayMemory(space, box, len(made["ends"]), budget=None, prefer=prefer) as memory:
        for first, end in zip([0, *(last[:-1] + 1)], last + 1, strict=True):
            steps = np.arange(first, end)[:, None]
            following = np.minimum(steps + 1, end - 1)
            memory.extend(
                {"image": made["images"][steps], "state": made["states"][steps]},
                made["actions"][steps],
                made["rewards"][steps],
                {"image": made["images"][following], "state": made["states"][following]},
                np.zeros(steps.shape, np.bool_),
                steps == end - 1,
            )
            memory.store.wait_idle()  # As `holdall checkpoint import` does: no block is compressed in a hurry.
        memory.save(folder).result()


def open_holdall(folder: Path, case: str) -> Any:
    """Open the dataset of a case."""
    images, actions = CASES[case]
    keys = ["observation.image", "action"]
    deltas = None
    if case != "step":
        deltas = {keys[0]: [each / FPS for each in images], keys[1]: [each / FPS for each in actions]}
    return holdall.Dataset.open(folder, keys=keys, delta_timestamps=deltas, fps=FPS)


def require_same_rows(side: Any, made: dict[str, NDArray[Any]], case: str) -> None:
    """Compare rows of a side with the recording."""
    indices = np.random.default_rng(1).integers(0, len(made["ends"]), 200)
    rows = side[indices]
    images, actions = (find_steps(made["ends"], indices, offsets) for offsets in CASES[case])
    image_key, action_key = ("images", "actions") if "images" in rows else ("observation.image", "action")
    np.testing.assert_array_equal(rows[image_key].reshape(-1, *SHAPE), made["images"][images.reshape(-1)])
    np.testing.assert_array_equal(rows[action_key].reshape(-1, 2), made["actions"][actions.reshape(-1)])


SIDES: dict[str, Callable[[NDArray[np.bool_], str], Any]] = {
    "none": lambda ends, case: Nothing(ROOT, ends, case),
    "hdf5": lambda ends, case: Hdf5(ROOT / "hdf5", ends, case),
    "lance": lambda ends, case: Lance(ROOT / "lance", ends, case),
    "lance_pages": lambda ends, case: LancePages(ROOT / "lance_pages", ends, case),
    "holdall": lambda _, case: open_holdall(ROOT / "holdall", case),
    "holdall_memory": lambda _, case: open_holdall(ROOT / "holdall_memory", case),
}
WRITERS: dict[str, Callable[[Path, dict[str, NDArray[Any]]], None]] = {
    "hdf5": Hdf5.write,
    "lance": Lance.write,
    "lance_pages": LancePages.write,
    "holdall": lambda folder, made: write_holdall(folder, made, "balanced"),
    "holdall_memory": lambda folder, made: write_holdall(folder, made, "memory"),
}


# ---------------------------------------------------------------- measurements


def new_loader(side: Any, method: str = "spawn") -> Iterator[Any]:
    """Return an endless iterator over batches that four workers read."""
    batches = Batches(len(side), BATCH, seed=0, num_batches=10**9)
    loader: DataLoader[Any] = DataLoader(
        side, batch_size=None, sampler=batches, num_workers=WORKERS, multiprocessing_context=method
    )
    return iter(loader)


def processor_s(loader: Any) -> float:
    """Return the processor time of this process and of a loader's workers."""
    processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in getattr(loader, "_workers", ()))]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure_times(names: list[str], ends: NDArray[np.bool_], case: str, rounds: int, batches: int) -> dict[str, Any]:
    """Run the loaders of all sides in turn."""
    loaders = {name: new_loader(SIDES[name](ends, case)) for name in names if name != THREADS}
    if THREADS in names:
        loaders[THREADS] = open_holdall(ROOT / "holdall", case).loader(BATCH, seed=0)
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            loader = loaders[name]
            for _ in range(3 * WORKERS):  # Batches that were prepared before this turn.
                next(loader)
            before = processor_s(loader)
            began = time.perf_counter()
            for _ in range(batches):
                next(loader)
            seconds = time.perf_counter() - began
            if turn > 0:
                rates[name].append(batches * BATCH / seconds)
                costs[name].append((processor_s(loader) - before) / batches / BATCH * 1e6)
    loaders.clear()
    return {
        name: {
            "samples_per_s": round(statistics.median(rates[name])),
            "times_lance": round(
                statistics.median(own / other for own, other in zip(rates[name], rates["lance"], strict=True)), 2
            ),
            "cpu_us": round(statistics.median(costs[name]), 1),
        }
        for name in names
    }


def measure_memory(name: str, method: str, frames: int) -> dict[str, Any]:
    """Start a process that loads batches, and return the proportional set size of it and its workers."""
    command = [sys.executable, __file__, "--memory", name, "--method", method, "--frames", str(frames)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_memory(name: str, method: str, frames: int) -> None:
    """Load some batches, and print the proportional set sizes."""
    with np.load(ROOT / f"pusht-{frames}.npz") as found:
        ends = found["ends"]
    loader: Any = new_loader(SIDES[name](ends, "step"), method)
    for _ in range(8 * WORKERS):
        next(loader)
    workers = [psutil.Process(worker.pid) for worker in loader._workers]
    pss = [int(process.memory_full_info().pss) for process in (psutil.Process(), *workers)]
    print(json.dumps({"side": name, "method": method, "pss_mib": round(sum(pss) / 2**20, 1)}))


def measure_sizes(made: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Write every side, compare its rows with the recording, and return the bytes per step."""
    sizes = {}
    for name, write in WRITERS.items():
        folder = ROOT / name
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, made)
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        sizes[name] = round(nbytes / len(made["ends"]), 1)
        for case in CASES:
            require_same_rows(SIDES[name](made["ends"], case), made, case)
    return sizes


def measure_memories(frames: int) -> list[dict[str, Any]]:
    """Return the memory of all sides."""
    sides = [("spawn", name) for name in ("none", "hdf5", "lance", "holdall")]
    sides += [("fork", name) for name in ("none", "hdf5", "holdall")]
    return [measure_memory(name, method, frames) for method, name in sides]


def figures_of(part: str, found: Any) -> list[Figure]:
    """Return the figures of a part."""
    if part == "sizes":
        return [
            Figure(f"stored: {TITLES[name].removesuffix(', four workers')}", "bytes per step", "B", nbytes)
            for name, nbytes in found.items()
        ]
    if part == "memory":
        return [
            Figure(f"memory, {row['method']}: {TITLES[row['side']]}", "all processes", "MiB", row["pss_mib"])
            for row in found
        ]
    figures = []
    for name, row in found.items():
        case = f"{PART_TITLES[part]}: {TITLES[name]}"
        bar = f"at least {BAR_SPEED}" if part in CASES and name in FAST else None
        figures += [
            Figure(case, "samples per second", "", row["samples_per_s"]),
            Figure(case, "over Lance", "times", row["times_lance"], bar),
            Figure(case, "processor time of a sample", "us", row["cpu_us"]),
        ]
    return figures


def main() -> int:
    """Run the parts that were asked for, and add their results to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=16_000, help="steps of the recording (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (%(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="batches of a turn (%(default)s)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help=f"{', '.join(PARTS)}; sizes comes first",
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=[*SIDES, THREADS],
        default=TIMED,
        metavar="SIDE",
        help=f"{', '.join([*SIDES, THREADS])}; of the parts step and window",
    )
    parser.add_argument("--short", action="store_true", help="one round of 20 batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--memory", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--method", default="spawn", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        print_memory(given.memory, given.method, given.frames)
        return 0
    made = record(given.frames)
    ends = made["ends"]
    turns = (1, 20) if given.short else (given.rounds, given.batches)
    measures: dict[str, Callable[[], Any]] = {
        "sizes": lambda: measure_sizes(made),
        "step": lambda: measure_times(given.sides, ends, "step", *turns),
        "window": lambda: measure_times(given.sides, ends, "window", *turns),
        "smallest": lambda: measure_times(["lance", "lance_pages", "holdall_memory"], ends, "step", *turns),
        "memory": lambda: measure_memories(given.frames),
    }
    result: dict[str, Any] = {}
    settings = {"short": given.short, "frames": given.frames, "episodes": int(ends.sum())}
    run = describe_run(settings, ("h5py", "pylance", "gym-pusht"))
    for part in given.parts:
        result[part] = measures[part]()
        figures = figures_of(part, result[part])
        show(figures)
        if given.json:
            store(given.json, figures, run)
    if "sizes" not in result:
        return 0
    sizes = result["sizes"]
    is_small = sizes["holdall"] <= sizes["lance"] and sizes["holdall_memory"] <= sizes["lance_pages"]
    ratios = [result[case][name]["times_lance"] for case in CASES for name in FAST if name in result.get(case, {})]
    is_fast = all(ratio >= BAR_SPEED for ratio in ratios)
    return 0 if is_small and is_fast else 1


if __name__ == "__main__":
    sys.exit(main())

"""Samplers, the loader and `update` on a CPU.

    python benchmarks/sampling/samplers.py [--part NAME] [--short] [--json FILE]

Sides take turns in one process, and ratios are of medians.

`prioritized`  draws and updates of priorities compared with uniform draws, of a million transitions
`loader`       the share of the sampling time that a loader hides behind a training step of the same length, on one core
`sequences`    64 x 16 frame stacks compared with TorchRL's SliceSampler, if torchrl is installed
`update`       `memory.update` compared with an assignment to a NumPy array, and the bytes of the following checkpoint
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer

import holdall

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store

STACK = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (17,), np.float32)
ACTION = spaces.Box(-1, 1, (6,))
BATCH = 256
SEQUENCES = 64
STEPS = 16
EPISODE = 500
WARM_UP = 5
PARTS = ("prioritized", "loader", "sequences", "update")

Way = Callable[[], Any]


def film(frames: int) -> NDArray[np.uint8]:
    """Show a few blocks that move over a still picture, as many games do. No two frames in a row are the same."""
    rng = np.random.default_rng(0)
    shown = np.repeat((rng.integers(0, 4, (1, 84, 84)) * 40).astype(np.uint8), frames, axis=0)
    for block in range(6):
        rows = (np.arange(frames) * (block + 1) + 13 * block) % 76
        columns = (np.arange(frames) * (7 - block) // 3 + 29 * block) % 76
        for t in range(frames):
            shown[t, rows[t] : rows[t] + 8, columns[t] : columns[t] + 8] = 200 + block
    return shown


def stacks(shown: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return every four frames in a row, as views."""
    windows = np.lib.stride_tricks.sliding_window_view(shown, 4, axis=0)
    return windows.transpose(0, 3, 1, 2)


def fill(memory: holdall.ReplayMemory, observed: NDArray[Any], transitions: int) -> holdall.ReplayMemory:
    """Add observations from the first on, over and over."""
    usable = len(observed) - 1
    for begin in range(0, transitions, 1_000):
        ids = np.arange(begin, begin + 1_000) % usable
        ends = (np.arange(begin, begin + 1_000) % EPISODE == EPISODE - 1)[:, None]
        count = len(ids)
        memory.extend(
            observed[ids][:, None],
            np.zeros((count, 1, 6), np.float32),
            np.zeros((count, 1), np.float32),
            observed[ids + 1][:, None],
            ends,
            np.zeros_like(ends),
        )
    memory.store.wait_idle()
    return memory


def take_turns(ways: dict[str, Way], turns: int) -> dict[str, NDArray[np.float64]]:
    """Time all ways, turn by turn. The last result of each is held, as in training."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, Any] = {}
    for turn in range(WARM_UP + turns):
        for name, way in ways.items():
            start = time.perf_counter()
            kept[name] = way()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: np.array(times) for name, times in seconds.items()}


def told(times: dict[str, NDArray[np.float64]], over: str) -> dict[str, Any]:
    """Return microseconds, and ratios to one of the ways."""
    return {
        name: {
            "median_us": 1e6 * float(np.median(taken)),
            "least_us": 1e6 * float(taken.min()),
            "of_median": float(np.median(taken) / np.median(times[over])),
            "of_least": float(taken.min() / times[over].min()),
        }
        for name, taken in times.items()
    }


def prioritized(observed: NDArray[Any], space: spaces.Space[Any], held: int, turns: int, beside_sb3: bool) -> Any:
    """Compare prioritized draws and updates with uniform draws."""
    how: dict[str, Any] = {"capacity": held, "seed": 0, "budget": None}
    uniform = fill(holdall.ReplayMemory(space, ACTION, **how), observed, held)
    sampler = holdall.Prioritized(0.6, 0.4)
    ranked = fill(holdall.ReplayMemory(space, ACTION, sampler=sampler, **how), observed, held)
    errors = np.random.default_rng(0).random(BATCH, np.float32)

    def draw_and_tell() -> Any:
        batch = ranked.sample(BATCH)
        ranked.update_priorities(batch.ids, errors)
        return batch

    ways: dict[str, Way] = {"uniform": lambda: uniform.sample(BATCH), "prioritized": draw_and_tell}
    if beside_sb3:
        plain = ReplayBuffer(held, space, ACTION, device="cpu")
        plain.full = True
        plain.observations[:] = observed[np.arange(held) % len(observed)][:, None]
        ways["sb3, uniform"] = lambda: plain.sample(BATCH)
    found = told(take_turns(ways, turns), "uniform")
    uniform.close()
    ranked.close()
    return found


def hidden(held: int, turns: int) -> dict[str, Any]:
    """Measure how much of the sampling time is hidden behind a step of the same length."""
    os.environ["HOLDALL_THREADS"] = "1"
    memory = fill(holdall.ReplayMemory(STACK, ACTION, held, seed=0, device="cpu"), stacks(film(3_000)), held)
    del os.environ["HOLDALL_THREADS"]
    torch.set_num_threads(1)
    sampling = float(np.median(take_turns({"": lambda: memory.sample(BATCH)}, turns)[""]))
    weights = torch.randn(256, 256)

    def step() -> None:
        """Multiply matrices for as long as a batch takes: what a training step does, and as it does on one core."""
        end = time.perf_counter() + sampling
        while time.perf_counter() < end:
            torch.mm(weights, weights)

    def draw_then_step() -> Any:
        batch = memory.sample(BATCH)
        step()
        return batch

    with memory.loader(BATCH, prefetch=2) as loader:

        def load_then_step() -> Any:
            batch = next(loader)
            step()
            return batch

        times = take_turns({"loader": load_then_step}, turns)
        times |= take_turns({"in turn": draw_then_step}, turns)
        alone = float(np.median(take_turns({"": step}, turns)[""]))
    in_turn, loaded = (float(np.median(times[name])) for name in ("in turn", "loader"))
    memory.close()
    return {
        "sample_us": 1e6 * sampling,
        "step_us": 1e6 * alone,
        "in_turn_us": 1e6 * in_turn,
        "loader_us": 1e6 * loaded,
        "hidden_share": (in_turn - loaded) / (in_turn - alone),
    }


def sequences(held: int, turns: int) -> dict[str, Any] | str:
    """Compare sequences of frame stacks with TorchRL's, of the same transitions, as torch tensors."""
    if importlib.util.find_spec("torchrl") is None:
        return "skipped: torchrl is not installed; 'pip install torchrl' measures it"
    data = importlib.import_module("torchrl.data")
    tensors = importlib.import_module("tensordict")
    observed = np.ascontiguousarray(stacks(film(held + 4)))
    sampler = holdall.Sequence(STEPS)
    memory = fill(holdall.ReplayMemory(STACK, ACTION, held, seed=0, device="cpu", sampler=sampler), observed, held)
    slices = data.SliceSampler(num_slices=SEQUENCES, traj_key="episode", strict_length=True, cache_values=True)
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(held), sampler=slices, batch_size=SEQUENCES * STEPS
    )
    for begin in range(0, held, 1_000):
        ids = np.arange(begin, begin + 1_000)
        ends = torch.from_numpy(ids % EPISODE == EPISODE - 1)[:, None]
        after = {"observation": torch.from_numpy(observed[ids + 1]), "reward": torch.zeros(1_000, 1)}
        buffer.extend(
            tensors.TensorDict(
                {
                    "observation": torch.from_numpy(observed[ids]),
                    "action": torch.zeros(1_000, 6),
                    "episode": torch.from_numpy(ids // EPISODE),
                    "next": {**after, "terminated": ends, "truncated": torch.zeros_like(ends), "done": ends},
                },
                batch_size=[1_000],
            )
        )
    ways = {"torchrl": buffer.sample, "holdall": lambda: memory.sample(SEQUENCES)}
    found = told(take_turns(ways, turns), "torchrl")
    found["torchrl"]["version"] = importlib.import_module("torchrl").__version__
    memory.close()
    return found


UPDATE_CAPACITY = 20_000
UPDATES = {  # transitions of an update, numbers of each
    "R2D2: 64 sequences of 80 steps, 2 x 512 numbers": (64 * 80, 1024),
    "DreamerV3: 16 sequences of 64 steps, 5,120 numbers": (16 * 64, 5120),
    "MuZero: 2,048 values": (2048, 1),
}


def fill_with_state(numbers: int, transitions: int) -> holdall.ReplayMemory:
    """Return a memory with an extra of `numbers` numbers."""
    box = spaces.Box(-1, 1, (4,), np.float32)
    state = spaces.Box(-1, 1, (numbers,), np.float32)
    memory = holdall.ReplayMemory(box, spaces.Discrete(2), transitions, 100, extras={"state": state}, seed=0)
    rng = np.random.default_rng(0)
    flags = np.zeros(100, np.bool_)
    obs = rng.random((100, 4), np.float32)
    for _ in range(transitions // 100):
        rows = {"state": rng.random((100, numbers), np.float32)}
        memory.add(obs, np.zeros(100, np.int64), np.zeros(100, np.float32), obs, flags, flags, extras=rows)
    return memory


def measure_updates(rounds: int) -> dict[str, Any]:
    """Write rows on both sides, in turns."""
    found = {}
    for name, (count, numbers) in UPDATES.items():
        rng = np.random.default_rng(1)
        taken: dict[str, list[float]] = {"plain": [], "holdall": []}
        plain = np.zeros((UPDATE_CAPACITY, numbers), np.float32)
        with fill_with_state(numbers, UPDATE_CAPACITY) as memory:
            for turn in range(rounds):
                ids = rng.integers(0, UPDATE_CAPACITY, count)
                rows = rng.random((count, numbers), np.float32)
                for side in ("plain", "holdall") if turn % 2 else ("holdall", "plain"):
                    begun = time.perf_counter()
                    if side == "plain":
                        plain[ids % UPDATE_CAPACITY] = rows
                    else:
                        memory.update(ids, state=rows)
                    taken[side].append(time.perf_counter() - begun)
            wrong = int((memory.gather(np.arange(UPDATE_CAPACITY)).extras["state"][ids] != plain[ids]).sum())
        medians = {side: statistics.median(seconds) * 1e6 for side, seconds in taken.items()}
        found[name] = medians | {"ratio": medians["holdall"] / medians["plain"], "wrong": wrong}
    return found


def measure_checkpoints() -> dict[Any, Any]:
    """Return the bytes that a checkpoint writes, by the number of rewritten transitions. 0: the first checkpoint."""
    written = {}
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder, fill_with_state(64, 200_000) as memory:
        for count in (0, 1, 1_000, 100_000):
            memory.update(rng.integers(0, 200_000, count), state=rng.random((count, 64), np.float32))
            written[count] = memory.save(Path(folder) / "run").result().bytes_written
    return written


# ---------------------------------------------------------------- figures


def figures_of(part: str, held: int, turns: int, *, is_short: bool) -> tuple[list[Figure], bool]:
    """Measure a part. Return its figures, and whether they meet their bars."""
    if part == "prioritized":
        vectors = np.random.default_rng(0).standard_normal((5_001, 17), np.float32)
        found = prioritized(vectors, VECTOR, held, turns, beside_sb3=True)
        images = np.ascontiguousarray(stacks(film(2_004)))
        of_images = prioritized(images, STACK, held, turns, beside_sb3=False)["prioritized"]["of_median"]
        return figures_of_prioritized(found, of_images)
    if part == "loader":
        return figures_of_loader(hidden(min(held, 20_000), max(turns // 4, 20)))
    if part == "sequences":
        return figures_of_sequences(sequences(min(held, 20_000), max(turns // 8, 10)))
    return figures_of_updates(measure_updates(20 if is_short else 200), measure_checkpoints())


def figures_of_prioritized(found: dict[str, Any], of_images: float) -> tuple[list[Figure], bool]:
    """Return the figures of prioritized draws."""
    of_vectors = found["prioritized"]["of_median"]
    unit = "of a uniform draw's time"
    figures = [
        Figure("`Prioritized` with updated priorities, 17 floats", "`sample(256)`", unit, of_vectors, "at most 1.5"),
        Figure("SB3's uniform buffer, 17 floats", "`sample(256)`", unit, found["sb3, uniform"]["of_median"]),
        Figure("`Prioritized`, compressed frame stacks", "`sample(256)`", unit, of_images, "at most 1.5"),
    ]
    return figures, max(of_vectors, of_images) <= 1.5


def figures_of_loader(found: dict[str, Any]) -> tuple[list[Figure], bool]:
    """Return the figures of the loader."""
    share = found["hidden_share"]
    figure = Figure("loader, training step as long as a batch", "hidden", "of the sampling time", share, "at least 0.8")
    return [figure], share >= 0.8


def figures_of_sequences(found: dict[str, Any] | str) -> tuple[list[Figure], bool]:
    """Return the figures of sequences."""
    if isinstance(found, str):
        print(found, file=sys.stderr)
        return [], True
    faster = 1 / found["holdall"]["of_median"]
    name = "sequences of 64 x 16 stacks, TorchRL's SliceSampler"
    return [Figure(name, "as fast", "times", faster, "at least 3")], faster >= 3


def figures_of_updates(times: dict[str, Any], written: dict[Any, Any]) -> tuple[list[Figure], bool]:
    """Return the figures of `update`."""
    figures = []
    for name, row in times.items():
        figures.append(Figure(f"`update`, {name}", "time", "of NumPy's assignment", row["ratio"]))
        figures.append(Figure(f"`update`, {name}", "wrong values", "", row["wrong"], "0"))
    figures += [
        Figure(f"checkpoint after {count:,} of 200,000 transitions were rewritten", "bytes", "MiB", nbytes / 2**20)
        for count, nbytes in written.items()
    ]
    return figures, not any(row["wrong"] for row in times.values())


def main() -> int:
    """Measure the parts, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--short", action="store_true", help="100,000 transitions, and fewer turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    arguments = parser.parse_args()
    held, turns = (100_000, 60) if arguments.short else (1_000_000, 400)
    run = describe_run({"short": arguments.short, "held": held}, ("torchrl",))
    is_met = True
    for part in arguments.part or PARTS:
        figures, is_part_met = figures_of(part, held, turns, is_short=arguments.short)
        show(figures)
        is_met &= is_part_met
        if arguments.json is not None:
            store(arguments.json, figures, run)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

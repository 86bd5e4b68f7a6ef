"""Samplers and the loader on a CPU, each beside what it is measured against: `python benchmarks/samplers.py`.

Out: a table and JSON. Sides take turns in one process; ratios are of medians, with those of minima beside them.

* prioritized draws and updates against uniform ones, of a million transitions, and Stable-Baselines3's uniform buffer
* how much of the sampling time a loader hides behind a training step of the same length; either has one core
* sequences of 64 x 16 frame stacks against TorchRL's SliceSampler on the same data; skipped where it is not installed
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from process import machine, versions
from stable_baselines3.common.buffers import ReplayBuffer

import holdall

STACK = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (17,), np.float32)
ACTION = spaces.Box(-1, 1, (6,))
BATCH = 256
SEQUENCES, STEPS = 64, 16
EPISODE = 500
WARM_UP = 5

Way = Callable[[], Any]


def film(frames: int) -> NDArray[np.uint8]:
    """Show a few blocks that move over a still picture, as many games do; no two frames in a row are the same."""
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
    """Time all ways, turn by turn; the last result of each is held, as in training."""
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
        plain.full, plain.observations[:] = True, observed[np.arange(held) % len(observed)][:, None]
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
    data, tensors = importlib.import_module("torchrl.data"), importlib.import_module("tensordict")
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


def table(found: dict[str, Any]) -> str:
    """Lay the bars beside what was measured."""
    rows = ["| | measured | by the minima | bar | |", "|---|---|---|---|---|"]

    def row(name: str, value: float, least: float, bar: str, met: bool) -> None:
        rows.append(f"| {name} | {value:.2f} | {least:.2f} | {bar} | {'met' if met else 'missed'} |")

    for case, name in (("vectors", "17 floats"), ("stacks", "frame stacks, compressed")):
        ranked = found[case]["prioritized"]
        of, least = ranked["of_median"], ranked["of_least"]
        row(f"prioritized, of uniform's time, {name}", of, least, "at most 1.5", of <= 1.5)
    share = found["loader"]["hidden_share"]
    row("sampling time that a loader hides", share, share, "at least 0.8", share >= 0.8)
    if isinstance(found["sequences"], str):
        rows.append(f"| sequences | {found['sequences']} | | at least 3 x TorchRL | |")
    else:
        ours = found["sequences"]["holdall"]
        faster = 1 / ours["of_median"]
        row("sequences, times as fast as TorchRL", faster, 1 / ours["of_least"], "at least 3", faster >= 3)
    return "\n".join(rows)


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small memories, few turns: to see that it runs")
    parser.add_argument("--json", type=Path, help="write the result there")
    arguments = parser.parse_args()
    held, turns = (20_000, 30) if arguments.quick else (1_000_000, 400)
    vectors = np.random.default_rng(0).standard_normal((5_001, 17), np.float32)
    found = {
        "held": held,
        "vectors": prioritized(vectors, VECTOR, held, turns, beside_sb3=True),
        "stacks": prioritized(np.ascontiguousarray(stacks(film(2_004))), STACK, held, turns, beside_sb3=False),
        "loader": hidden(min(held, 20_000), max(turns // 4, 20)),
        "sequences": sequences(min(held, 20_000), max(turns // 8, 10)),
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(found, indent=1))
    print(table(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

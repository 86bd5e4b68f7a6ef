"""The drop-in for Stable-Baselines3 on a GPU, beside its own buffer: `python benchmarks/gpu_sb3.py [--json FILE]`.

Needs torch with CUDA, and Stable-Baselines3; without a device it says so and ends. `--device cpu --quick` runs every
line of it anywhere. In:  camera images and vectors.  Out: the tensors compared, a table, and JSON.

Both buffers hold the same transitions and take turns, batch by batch. A time is from the call until the stream has the
batch, the median over all turns; "host" is how long the call itself takes. Then SAC trains on both, and on a batch that
costs nothing: one that is there already. The ways take turns, two gradient steps each, in an order that is drawn
for every turn. Medians; a second buffer that costs nothing shows what the medians are worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from process import commit, machine, versions
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.logger import configure

import holdall.sb3

CAMERA = spaces.Dict(
    {"camera": spaces.Box(0, 255, (3, 84, 84), np.uint8), "state": spaces.Box(-9, 9, (31,), np.float32)}
)
ACTION = spaces.Box(-1, 1, (6,), np.float32)
WARM_UP = 5
STEPS_A_TURN = 2


def fill(buffers: list[Any], steps: int) -> None:
    """Add the same steps to all. An episode has 300."""
    draw = np.random.default_rng(0)
    base = draw.integers(0, 255, (1, 3, 84, 84)).astype(np.uint8)

    def observed(step: int) -> dict[str, Any]:
        camera = base.copy()
        camera[0, :, :20, :20] = draw.integers(0, 255, (3, 20, 20))
        return {"camera": camera, "state": np.full((1, 31), step, np.float32)}

    obs = observed(0)
    for step in range(steps):
        following = observed(step + 1)
        done = np.array([step % 300 == 299])
        for buffer in buffers:
            buffer.add(obs, following, np.zeros((1, 6), np.float32), np.zeros(1, np.float32), done, [{}])
        obs = following


def check(mine: Any, theirs: Any) -> None:
    """Refuse to time what returns other tensors."""
    found = []
    for buffer in (mine, theirs):
        np.random.seed(0)  # noqa: NPY002  theirs
        found.append(buffer.sample(64))
    for name in ("observations", "next_observations"):
        for key in CAMERA.spaces:
            if not torch.equal(getattr(found[0], name)[key], getattr(found[1], name)[key]):
                sys.exit("error: tensors differ")


def synchronized(device: str) -> float:
    """Return the time at which everything that was asked for is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(device: str, buffer: Any, rows: int) -> tuple[float, float]:
    """Return the milliseconds of one batch, and those of the call."""
    begun = synchronized(device)
    found = buffer.sample(rows)
    called = time.perf_counter()
    done = synchronized(device)
    del found
    return (done - begun) * 1e3, (called - begun) * 1e3


def medians(times: list[tuple[float, float]]) -> list[float]:
    """Return the medians of both, without those of the first turns, which allocate."""
    return [statistics.median(side) for side in zip(*times[WARM_UP:], strict=True)]


class NoCost:
    """A buffer whose batch is there already."""

    def __init__(self, buffer: Any, rows: int) -> None:
        self._samples = buffer.sample(rows)

    def sample(self, _rows: int, env: Any = None) -> Any:
        """Return the same batch."""
        return self._samples


class Camera(gym.Env[Any, Any]):
    """What a model needs to know of an environment."""

    observation_space = CAMERA
    action_space = ACTION

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return anything."""
        return CAMERA.sample(), {}


def train(device: str, ways: dict[str, Any], rows: int, turns: int) -> dict[str, float]:
    """Return the gradient steps a second of SAC with each buffer, which take turns."""
    model = SAC("MultiInputPolicy", Camera(), batch_size=rows, buffer_size=10, device=device, seed=0)
    model.set_logger(configure(None, []))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = np.random.default_rng(3)
    warm_up = min(turns, WARM_UP)
    for turn in range(turns + warm_up):
        for name in order.permutation(list(ways)).tolist():
            model.replay_buffer = ways[name]
            begun = synchronized(device)
            model.train(STEPS_A_TURN, rows)
            if turn >= warm_up:
                seconds[name].append(synchronized(device) - begun)
    return {name: STEPS_A_TURN / statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where batches go")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--turns", type=int, default=400, help="turns of every way to train")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --quick runs every line on the CPU")
    held = 500 if args.quick else 20_000
    turns = 3 if args.quick else 40
    theirs = DictReplayBuffer(held, CAMERA, ACTION, device=args.device)
    mine = holdall.sb3.ReplayBuffer(held, CAMERA, ACTION, device=args.device)
    fill([theirs, mine], held)
    mine.memory.store.wait_idle()
    check(mine, theirs)
    rows = []
    print("| rows | holdall.sb3 | Stable-Baselines3 | ratio | holdall.sb3 alone | of that, the host |")
    print("|---|---|---|---|---|---|")
    for batch in (32, 256) if args.quick else (32, 256, 2048):
        pairs = [(timed(args.device, mine, batch), timed(args.device, theirs, batch)) for _ in range(turns + WARM_UP)]
        (ours, _), (other, _) = (medians(list(side)) for side in zip(*pairs, strict=True))
        alone, host = medians([timed(args.device, mine, batch) for _ in range(5 * turns + WARM_UP)])
        rows.append({"rows": batch, "holdall": ours, "sb3": other, "alone": alone, "host": host})
        ratio = ours / other
        print(f"| {batch} | {ours:.2f} ms | {other:.2f} ms | {ratio:.3f} | {alone:.2f} ms | {host:.3f} ms |")
    batch = 4 if args.quick else 256
    ahead = holdall.sb3.ReplayBuffer(held, CAMERA, ACTION, device=args.device, prefetch=2)
    fill([ahead], held)
    free = NoCost(theirs, batch)
    ways = {"no cost": free, "holdall": mine, "holdall, prefetch": ahead, "no cost, again": NoCost(theirs, batch)}
    rates = train(args.device, ways, batch, 1 if args.quick else args.turns)
    beside = train(args.device, {"no cost": free, "sb3": theirs}, batch, 1 if args.quick else -(-args.turns // 8))
    rates["sb3"] = rates["no cost"] * beside["sb3"] / beside["no cost"]
    print("\n| batches of | gradient steps a second | over a batch that costs nothing |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.1f} | {rate / rates['no cost']:.3f} |")
    if args.json:
        result = {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "batches": rows,
            "steps_per_second": rates,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

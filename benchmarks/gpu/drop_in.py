"""The drop-in for Stable-Baselines3 on a GPU, compared with Stable-Baselines3's own buffer.

    python benchmarks/gpu/drop_in.py [--json FILE]

Both buffers hold the same transitions of camera images and vectors, and take turns, batch by batch. A time is from the
call until the stream has the batch, the median over all turns; "host" is how long the call itself takes. Then SAC
trains with both buffers, and with a batch that costs nothing, because it is there already. The ways take turns, two
gradient steps each, in an order that is drawn for every turn. A second buffer that costs nothing shows the precision of
the medians.

Needs torch with CUDA, and Stable-Baselines3. `--device cpu --short` runs every line of it anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.logger import configure

import holdall.sb3

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_run import describe_gpu_run
from results import Figure, show, store

CAMERA = spaces.Dict(
    {"camera": spaces.Box(0, 255, (3, 84, 84), np.uint8), "state": spaces.Box(-9, 9, (31,), np.float32)}
)
ACTION = spaces.Box(-1, 1, (6,), np.float32)
WARM_UP = 5
STEPS_A_TURN = 2


def fill(buffers: list[Any], steps: int) -> None:
    """Add the same steps to all buffers. An episode has 300 steps."""
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
    """Exit with an error if the buffers return different tensors."""
    found = []
    for buffer in (mine, theirs):
        np.random.seed(0)  # noqa: NPY002  theirs
        found.append(buffer.sample(64))
    for name in ("observations", "next_observations"):
        for key in CAMERA.spaces:
            if not torch.equal(getattr(found[0], name)[key], getattr(found[1], name)[key]):
                sys.exit("error: tensors differ")


def synchronized(device: str) -> float:
    """Wait until the device is idle, and return the time."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(device: str, buffer: Any, rows: int) -> tuple[float, float]:
    """Return the milliseconds until a batch is complete, and those of the call alone."""
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
    """A buffer that returns the same batch again and again."""

    def __init__(self, buffer: Any, rows: int) -> None:
        self._samples = buffer.sample(rows)

    def sample(self, _rows: int, env: Any = None) -> Any:
        """Return the same batch."""
        return self._samples


class Camera(gym.Env[Any, Any]):
    """An environment with spaces only, which is enough to make a model."""

    observation_space = CAMERA
    action_space = ACTION

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return a random observation."""
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


WAYS = {
    "no cost": "one batch, again and again",
    "no cost, again": "the same once more",
    "holdall": "`holdall.sb3`",
    "holdall, prefetch": "`holdall.sb3`, `prefetch=2`",
    "sb3": "Stable-Baselines3",
}
"""The ways to get batches, as they are called in the results."""


def main() -> None:
    """Measure, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="device of the batches (%(default)s)")
    parser.add_argument("--turns", type=int, default=400, help="turns of every way to train (%(default)s)")
    parser.add_argument("--short", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --short runs every line on the CPU")
    run = describe_gpu_run({"short": args.short, "turns": args.turns})
    held = 500 if args.short else 20_000
    turns = 3 if args.short else 40
    theirs = DictReplayBuffer(held, CAMERA, ACTION, device=args.device)
    mine = holdall.sb3.ReplayBuffer(held, CAMERA, ACTION, device=args.device)
    fill([theirs, mine], held)
    mine.memory.store.wait_idle()
    check(mine, theirs)
    figures = []
    for batch in (32, 256) if args.short else (32, 256, 2048):
        pairs = [(timed(args.device, mine, batch), timed(args.device, theirs, batch)) for _ in range(turns + WARM_UP)]
        (ours, _), (other, _) = (medians(list(side)) for side in zip(*pairs, strict=True))
        alone, host = medians([timed(args.device, mine, batch) for _ in range(5 * turns + WARM_UP)])
        case = f"drop-in: {batch:,} rows"
        figures += [
            Figure(case, "`holdall.sb3`", "ms", ours),
            Figure(case, "Stable-Baselines3", "ms", other),
            Figure(case, "ratio", "of SB3's time", ours / other),
            Figure(case, "`holdall.sb3` alone", "ms", alone),
            Figure(case, "of that, the host", "ms", host),
        ]
    batch = 4 if args.short else 256
    ahead = holdall.sb3.ReplayBuffer(held, CAMERA, ACTION, device=args.device, prefetch=2)
    fill([ahead], held)
    free = NoCost(theirs, batch)
    ways = {"no cost": free, "holdall": mine, "holdall, prefetch": ahead, "no cost, again": NoCost(theirs, batch)}
    rates = train(args.device, ways, batch, 1 if args.short else args.turns)
    beside = train(args.device, {"no cost": free, "sb3": theirs}, batch, 1 if args.short else -(-args.turns // 8))
    rates["sb3"] = rates["no cost"] * beside["sb3"] / beside["no cost"]
    for name, title in WAYS.items():
        case = f"gradient steps: {title}"
        figures.append(Figure(case, "gradient steps a second", "", rates[name]))
        figures.append(Figure(case, "ratio", "of the rate without cost", rates[name] / rates["no cost"]))
    show(figures)
    if args.json is not None:
        store(args.json, figures, run)


if __name__ == "__main__":
    main()

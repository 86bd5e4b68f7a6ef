"""What `memory.update` takes beside rows written into a plain NumPy array, and what the next checkpoint writes.

    python benchmarks/update.py [--rounds 200] [--json FILE]

Both sides of every round write the same rows under the same ids, in turns; times are medians of all rounds. The plain
side is one assignment, `array[ids % capacity] = rows`: it checks nothing, and survives neither an interrupt nor a save.
Checkpoints are of a memory of 200,000 transitions with a recurrent state of 64 numbers: the first one, and those after
1, 1,000 and 100,000 random transitions were rewritten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from process import commit, machine, versions

import holdall

CAPACITY = 20_000
CASES = {  # transitions of an update, numbers of each
    "R2D2: 64 sequences of 80 steps, 2 x 512 numbers": (64 * 80, 1024),
    "DreamerV3: 16 sequences of 64 steps, 5,120 numbers": (16 * 64, 5120),
    "MuZero: 2,048 values": (2048, 1),
}


def filled(numbers: int, transitions: int) -> holdall.ReplayMemory:
    """Return a memory with an extra of so many numbers."""
    box, state = spaces.Box(-1, 1, (4,), np.float32), spaces.Box(-1, 1, (numbers,), np.float32)
    memory = holdall.ReplayMemory(box, spaces.Discrete(2), transitions, 100, extras={"state": state}, seed=0)
    rng, flags = np.random.default_rng(0), np.zeros(100, np.bool_)
    obs = rng.random((100, 4), np.float32)
    for _ in range(transitions // 100):
        rows = {"state": rng.random((100, numbers), np.float32)}
        memory.add(obs, np.zeros(100, np.int64), np.zeros(100, np.float32), obs, flags, flags, extras=rows)
    return memory


def times(rounds: int) -> dict[str, Any]:
    """Write rows on both sides, in turns."""
    found = {}
    for name, (count, numbers) in CASES.items():
        rng = np.random.default_rng(1)
        taken: dict[str, list[float]] = {"plain": [], "holdall": []}
        plain = np.zeros((CAPACITY, numbers), np.float32)
        with filled(numbers, CAPACITY) as memory:
            for turn in range(rounds):
                ids = rng.integers(0, CAPACITY, count)
                rows = rng.random((count, numbers), np.float32)
                for side in ("plain", "holdall") if turn % 2 else ("holdall", "plain"):
                    begun = time.perf_counter()
                    if side == "plain":
                        plain[ids % CAPACITY] = rows
                    else:
                        memory.update(ids, state=rows)
                    taken[side].append(time.perf_counter() - begun)
            wrong = int((memory.gather(np.arange(CAPACITY)).extras["state"][ids] != plain[ids]).sum())
        medians = {side: statistics.median(seconds) * 1e6 for side, seconds in taken.items()}
        found[name] = medians | {"ratio": medians["holdall"] / medians["plain"], "wrong": wrong}
    return found


def checkpoints() -> dict[Any, Any]:
    """Return the bytes that a checkpoint writes, by how many transitions were rewritten before it; 0 is the first."""
    written, rng = {}, np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder, filled(64, 200_000) as memory:
        for count in (0, 1, 1_000, 100_000):
            memory.update(rng.integers(0, 200_000, count), state=rng.random((count, 64), np.float32))
            written[count] = memory.save(Path(folder) / "run").result().bytes_written
    return written


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, dict[Any, Any]] = {"times_us": times(options.rounds), "checkpoint_bytes": checkpoints()}
    for name, row in result["times_us"].items():
        print(
            f"{name}: {row['plain']:.0f} us plain, {row['holdall']:.0f} us holdall, {row['ratio']:.2f} times, ", end=""
        )
        print(f"{row['wrong']} wrong")
    for count, nbytes in result["checkpoint_bytes"].items():
        print(f"a checkpoint after {count} transitions were rewritten writes {nbytes / 1e6:.2f} MB")
    if options.json is not None:
        measured = {"machine": machine(), "versions": versions(), "commit": commit()}
        options.json.write_text(json.dumps(measured | result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A process that starts trainers by forking, so that each of them costs milliseconds and not an import.

In:  lines "FOLDER SEED" on stdin.  Out: lines on stdout: "born PID" from here, and from each trainer "loaded TICK" and
"saved TICK" as soon as a checkpoint is acknowledged, or "refused". "gone STATUS" when a trainer ended, however it did.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import CheckpointError, FencedError, ReplayMemory
from holdall.store.tuning import Tuning

LEASE_S = os.environ.get("HOLDALL_LEASE_S")
LANES = 2
TUNING = Tuning(block_bytes=60_000, max_segment_ticks=40)
"""A few dozen ticks fill a segment."""
CAPACITY_TICKS = 400
SPACE = spaces.Dict(
    {"frames": spaces.Box(0, 255, (4, 36, 36), np.uint8), "state": spaces.Box(-np.inf, np.inf, (7,), np.float32)}
)
_NOISE = np.random.default_rng(0).integers(0, 256, (97, 36, 36), np.uint8)


def frame(tick: int, lane: int) -> Any:
    """Return the observation of a lane at a tick. It is always the same."""
    return _NOISE[(tick + 31 * lane) % 97] ^ np.uint8(tick // 97 % 251)


def observation(tick: int) -> dict[str, Any]:
    """Return all lanes' observation at a tick: the last four frames, and numbers."""
    frames = [[frame(max(0, tick - back), lane) for back in (3, 2, 1, 0)] for lane in range(LANES)]
    state = np.array([[tick + 0.5 * lane] * 7 for lane in range(LANES)], np.float32)
    return {"frames": np.array(frames, np.uint8), "state": state}


def add(memory: ReplayMemory, tick: int) -> None:
    """Add the transition of a tick."""
    ended = np.array([tick % 37 == 0, tick % 53 == 0])
    action = np.array([tick % 5, tick % 3])
    reward = np.array([tick, -tick], np.float32)
    memory.add(observation(tick), action, reward, observation(tick + 1), ended, np.zeros(LANES, np.bool_))


def require_right(memory: ReplayMemory, ids: Any = None) -> None:
    """Hold every transition, or those of `ids`, to what was added."""
    ids = np.arange(memory.first_id, memory.next_id) if ids is None else ids
    if not len(ids):
        return
    batch = memory.gather(ids)
    ticks = ids // LANES
    lanes = ids % LANES
    for tick in np.unique(ticks).tolist():
        places = np.flatnonzero(ticks == tick)
        for mine, expected in ((batch.obs, observation(tick)), (batch.next_obs, observation(tick + 1))):
            for key in ("frames", "state"):
                if not np.array_equal(mine[key][places], expected[key][lanes[places]]):
                    raise SystemExit(f"tick {tick}: {key} is not what was added")
        rewards = np.array([tick, -tick])[lanes[places]]
        actions = np.array([tick % 5, tick % 3])[lanes[places]]
        if not (np.array_equal(batch.reward[places], rewards) and np.array_equal(batch.action[places], actions)):
            raise SystemExit(f"tick {tick}: reward or action is not what was added")


def new_memory(folder: Path) -> ReplayMemory:
    """Make a memory that spills after a few blocks."""
    return ReplayMemory(
        SPACE,
        spaces.Discrete(5),
        CAPACITY_TICKS * LANES,
        LANES,
        budget=None,
        spill_dir=folder / "spill",
        seed=1,
        _tuning=TUNING,
    )


def train(url: str, folder: Path, seed: int) -> None:
    """Go on from the last checkpoint, and save until the end comes."""
    generator = np.random.default_rng(seed)
    try:
        memory = ReplayMemory.load(url, budget=None, spill_dir=folder / "spill", _tuning=TUNING)
    except OSError as error:
        nothing = ("No complete checkpoint found in", "there is no bucket")  # The first object makes the bucket.
        if not any(words in str(error) for words in nothing):
            raise
        memory = new_memory(folder)
    require_right(memory)
    tick = memory.next_id // LANES
    tell(f"loaded {tick}")
    for _ in range(1000):
        for _ in range(int(generator.integers(1, 40))):
            add(memory, tick)
            tick += 1
        try:
            memory.save(url, keep=2, progress=linger if LEASE_S is not None and seed % 7 == 6 else None).result()
        except CheckpointError as error:
            if LEASE_S is None or not isinstance(error, FencedError):
                raise
            tell("refused")  # A collector has the lock, or had it: nothing was acknowledged.
        else:
            tell(f"saved {tick}")


def linger(phase: str, _nbytes: int) -> None:
    """Make a save take longer than a lease: wait once, when everything but the manifest was written."""
    if phase == "commit":
        time.sleep(1.5 * float(LEASE_S or 0))


def tell(line: str) -> None:
    """Write a line at once: the next moment may not come."""
    os.write(1, line.encode() + b"\n")


def main() -> None:
    """Fork a trainer for every line."""
    for line in sys.stdin:
        url, folder, seed = line.split()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train(url, Path(folder), int(seed))
                status = 0
            except BaseException as error:
                tell(f"failed {type(error).__name__}: {error}".replace("\n", " "))
            finally:
                os._exit(status)
        tell(f"born {child}")
        _, status = os.waitpid(child, 0)
        tell(f"gone {status}")


if __name__ == "__main__":
    main()

"""A process that starts trainers by forking, so that a trainer starts in milliseconds, without imports.

It reads lines "URL FOLDER SEED" from stdin. It prints "born PID" when a trainer has started, and "gone STATUS" when the
trainer has ended. A trainer prints "loaded TICK", "saved TICK" when a checkpoint is acknowledged, "refused" when it is
fenced, and "failed ERROR".
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


def make_frame(tick: int, lane: int) -> Any:
    """Return the newest frame of a lane at a tick."""
    return _NOISE[(tick + 31 * lane) % 97] ^ np.uint8(tick // 97 % 251)


def make_observation(tick: int) -> dict[str, Any]:
    """Return the observations of all lanes at a tick: the last four frames, and numbers."""
    frames = [[make_frame(max(0, tick - back), lane) for back in (3, 2, 1, 0)] for lane in range(LANES)]
    state = np.array([[tick + 0.5 * lane] * 7 for lane in range(LANES)], np.float32)
    return {"frames": np.array(frames, np.uint8), "state": state}


def add(memory: ReplayMemory, tick: int) -> None:
    """Add the transition of a tick."""
    ended = np.array([tick % 37 == 0, tick % 53 == 0])
    action = np.array([tick % 5, tick % 3])
    reward = np.array([tick, -tick], np.float32)
    memory.add(make_observation(tick), action, reward, make_observation(tick + 1), ended, np.zeros(LANES, np.bool_))


def grow(memory: ReplayMemory, ticks: int) -> None:
    """Add the next `ticks` ticks."""
    for _ in range(ticks):
        add(memory, memory.next_id // LANES)


def require_right(memory: ReplayMemory, ids: Any = None) -> None:
    """Compare every transition, or those of `ids`, with what was added."""
    ids = np.arange(memory.first_id, memory.next_id) if ids is None else ids
    if not len(ids):
        return
    batch = memory.gather(ids)
    ticks = ids // LANES
    lanes = ids % LANES
    for tick in np.unique(ticks).tolist():
        places = np.flatnonzero(ticks == tick)
        for mine, expected in ((batch.obs, make_observation(tick)), (batch.next_obs, make_observation(tick + 1))):
            for key in ("frames", "state"):
                if not np.array_equal(mine[key][places], expected[key][lanes[places]]):
                    raise SystemExit(f"tick {tick}: {key} is not what was added")
        rewards = np.array([tick, -tick])[lanes[places]]
        actions = np.array([tick % 5, tick % 3])[lanes[places]]
        if not (np.array_equal(batch.reward[places], rewards) and np.array_equal(batch.action[places], actions)):
            raise SystemExit(f"tick {tick}: reward or action is not what was added")


def make_memory(folder: Path) -> ReplayMemory:
    """Return a memory that spills after a few blocks."""
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
    """Continue from the last checkpoint, and save until the process is killed."""
    generator = np.random.default_rng(seed)
    try:
        memory = ReplayMemory.load(url, budget=None, spill_dir=folder / "spill", _tuning=TUNING)
    except OSError as error:
        nothing = ("No complete checkpoint found in", "there is no bucket")  # The first object creates the bucket.
        if not any(words in str(error) for words in nothing):
            raise
        memory = make_memory(folder)
    require_right(memory)
    tick = memory.next_id // LANES
    print_line(f"loaded {tick}")
    for _ in range(1000):
        for _ in range(int(generator.integers(1, 40))):
            add(memory, tick)
            tick += 1
        try:
            memory.save(
                url, keep=2, progress=wait_before_commit if LEASE_S is not None and seed % 7 == 6 else None
            ).result()
        except CheckpointError as error:
            if LEASE_S is None or not isinstance(error, FencedError):
                raise
            print_line("refused")  # A collector has or had the lock, so no checkpoint was acknowledged.
        else:
            print_line(f"saved {tick}")


def wait_before_commit(phase: str, _nbytes: int) -> None:
    """Wait longer than a lease when everything but the manifest was written."""
    if phase == "commit":
        time.sleep(1.5 * float(LEASE_S or 0))


def print_line(line: str) -> None:
    """Print a line without a buffer, because the process may be killed at any moment."""
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
                print_line(f"failed {type(error).__name__}: {error}".replace("\n", " "))
            finally:
                os._exit(status)
        print_line(f"born {child}")
        _, status = os.waitpid(child, 0)
        print_line(f"gone {status}")


if __name__ == "__main__":
    main()

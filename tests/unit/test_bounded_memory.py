"""A memory stays within a budget in bytes, as the operating system counts it. A budget that is too small is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ArgumentError, ReplayMemory
from holdall._native import Raw
from holdall.testing import assert_same_bits
from holdall.testing.strategies import box
from holdall.units import parse_bytes

MIB = 1 << 20
SLACK = 64 * MIB
"""Bytes that a process takes whatever the budget: libraries, threads, allocators."""
FRAME = (84, 84, 3)

FILL = """
import json, sys, threading, time
import numpy as np
import psutil
from gymnasium import spaces
from holdall import ReplayMemory

budget, folder, frames, lanes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
generator = np.random.default_rng(0)
# A camera that moves over a landscape: neighbouring pixels resemble each other. But a sensor's noise of four bits
# a pixel leaves no codec more than a half.
landscape = (generator.integers(-2, 3, (84, 84 + frames + 12 * lanes, 3)).cumsum(axis=1) // 2).astype(np.uint8)
noise = generator.integers(0, 16, (101, 84, 84, 3), np.uint8)
flags, zeros, ones = np.zeros(lanes, bool), np.zeros(lanes, np.int64), np.ones(lanes, np.float32)


def look(at):
    return landscape[:, at : at + 84] + noise[at % 101]


def observe(tick):
    return np.stack([look(tick + 11 * lane) for lane in range(lanes)])


process, done, most = psutil.Process(), threading.Event(), [0]
np.stack([observe(0)] * 300)  # The caller's own memory.
before = process.memory_full_info().uss


def watch():
    while not done.wait(0.02):
        most[0] = max(most[0], process.memory_full_info().uss)


watching = threading.Thread(target=watch)
watching.start()
memory = ReplayMemory(
    spaces.Box(0, 255, (84, 84, 3), np.uint8), spaces.Discrete(4), 1_000_000 // 4, lanes,
    budget=int(budget) if budget.isdecimal() else budget, spill_dir=folder or None, seed=0,
)
wrong = 0
for tick in range(frames // lanes):
    memory.add(observe(tick), zeros, ones, observe(tick + 1), flags, flags)
    if tick % 200 == 199:
        batch = memory.sample(64)
        for row, number in enumerate(batch.ids.tolist()):
            tick_of, lane = divmod(number, lanes)
            wrong += not np.array_equal(batch.obs[row], look(tick_of + 11 * lane))
            wrong += not np.array_equal(batch.next_obs[row], look(tick_of + 1 + 11 * lane))
memory.store.wait_idle()
done.set()
watching.join()
report = memory.report()
print(json.dumps({
    "grown": most[0] - before, "wrong": wrong, "first_id": memory.first_id, "disk": report.disk_bytes,
    "reported": report.total_bytes, "failure": report.failure, "fits": report.capacity_that_fits,
}))
memory.close()
"""


def fill_in_process(budget: str, folder: str, frames: int, lanes: int = 1, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", FILL, budget, folder, str(frames), str(lanes)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def find_least_budget(**settings: Any) -> int:
    with pytest.raises(ArgumentError, match=r"^budget \(1 B\) is too small") as caught:
        ReplayMemory(box(FRAME, "u1"), spaces.Discrete(4), 250_000, budget=1, **settings)
    return read_least_budget(caught.value)


def read_least_budget(refusal: ArgumentError) -> int:
    """Return the least budget that a refusal names."""
    return int(str(refusal).split("Pass at least ")[1].split(" bytes")[0])


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the system's own count of memory there")


@needs_linux
@pytest.mark.parametrize("spills", [True, False], ids=["with a disk", "without one"])
@pytest.mark.parametrize(
    ("budget", "frames"), [("48MiB", 3_000), pytest.param("96MiB", 7_000, marks=pytest.mark.nightly)]
)
def test_a_process_grows_by_the_budget_and_no_more(spills: bool, budget: str, frames: int, tmp_path: Path) -> None:
    """More is added than the budget holds. All of it is kept on disk, or the oldest transitions are evicted."""
    result = fill_in_process(budget, str(tmp_path) if spills else "", frames)
    assert result["failure"] == ""
    assert result["wrong"] == 0
    assert result["grown"] <= parse_bytes(budget) + SLACK, f"{result['grown'] / MIB:.0f} MiB"
    assert result["reported"] <= parse_bytes(budget)
    assert (result["first_id"] == 0) == spills
    assert (result["disk"] > 0) == spills
    assert not list(tmp_path.iterdir())


@needs_linux
@pytest.mark.parametrize("lanes", [1, 8])
def test_the_least_budget_that_is_named_works(lanes: int, tmp_path: Path) -> None:
    """A memory with the least budget keeps to it, and returns what was added."""
    least = find_least_budget(num_envs=lanes)
    result = fill_in_process(str(least), str(tmp_path), 3_000, lanes)
    assert result["failure"] == ""
    assert result["wrong"] == 0
    assert result["first_id"] == 0
    assert result["grown"] <= least + SLACK, f"{result['grown'] / MIB:.0f} MiB of {least / MIB:.0f}"
    assert result["disk"] > 0


@pytest.mark.parametrize("spills", [True, False])
def test_one_byte_less_than_the_least_is_refused(spills: bool, tmp_path: Path) -> None:
    """The refusal comes before a folder is made."""
    least = find_least_budget()
    given: dict[str, Any] = {"spill_dir": tmp_path} if spills else {}
    with pytest.raises(ArgumentError, match=rf"^budget .* at least {least} bytes"):
        ReplayMemory(box(FRAME, "u1"), spaces.Discrete(4), 250_000, budget=least - 1, **given)
    assert not list(tmp_path.iterdir())
    with ReplayMemory(box(FRAME, "u1"), spaces.Discrete(4), 250_000, budget=least, **given) as memory:
        assert memory.report().budget_bytes == least
        flag = np.zeros(1, np.bool_)
        frame = np.ones((1, *FRAME), np.uint8)
        memory.add(frame, np.zeros(1, np.int64), np.ones(1, np.float32), frame, flag, flag)
        assert len(memory) == 1


def is_accepted(sizes: list[int], capacity: int, lanes: int, budget: int) -> tuple[bool, int]:
    """Return whether a memory accepts a budget, and the least budget that the refusal names."""
    space = spaces.Dict({f"k{i}": box((size,), "u1") for i, size in enumerate(sizes)})
    try:
        ReplayMemory(space, spaces.Discrete(2), capacity * lanes, lanes, budget=budget).close()
    except ArgumentError as refusal:
        return False, read_least_budget(refusal)
    return True, 0


FIELDS = [
    [1000] * 8,
    [8],
    [4096],
    [5000],
    [300, 300, 300],
    [3000, 300],
    [20_000, 1000, 1000],
    [257] * 20,
    [8] * 5,
    [4096, 4097],
    [100_000, 4000, 2000, 260],
]


@pytest.mark.parametrize("sizes", FIELDS, ids=str)
@pytest.mark.parametrize(("capacity", "lanes"), [(1, 1), (1000, 1), (300, 7), (20_000, 1)])
def test_every_budget_above_the_least_is_accepted(sizes: list[int], capacity: int, lanes: int) -> None:
    """The least budget that a refusal names is the least one: one byte less is refused."""
    accepted, least = is_accepted(sizes, capacity, lanes, 1)
    assert not accepted
    for budget in (least - 1, *(int(least * share) for share in (0.3, 0.7, 0.99))):
        assert is_accepted(sizes, capacity, lanes, budget) == (False, least)
    for budget in (least, *(int(least * 1.17**power) for power in range(1, 30))):
        assert is_accepted(sizes, capacity, lanes, budget) == (True, 0), budget / least


def test_a_checkpoint_is_loaded_with_another_budget_or_the_budget_is_refused(tmp_path: Path) -> None:
    """A budget that is too small is refused with the least one that works."""
    generator = np.random.default_rng(0)
    flag = np.zeros(1, np.bool_)
    with ReplayMemory(box((3000,), "u1"), spaces.Discrete(2), 1000) as memory:
        for _ in range(40):
            obs, next_obs = generator.integers(0, 256, (2, 1, 3000), np.uint8)
            memory.add(obs, np.zeros(1, np.int64), np.ones(1, np.float32), next_obs, flag, flag)
        expected = memory.gather(np.arange(40))
        memory.save(tmp_path).result()
    with pytest.raises(ArgumentError, match=r"^budget .* is too small") as refusal:
        ReplayMemory.load(tmp_path, budget="100kB")
    least = read_least_budget(refusal.value)
    with ReplayMemory.load(tmp_path, budget=2 * least) as loaded:
        assert_same_bits(loaded.gather(np.arange(40)), expected)


def test_a_larger_capacity_holds_as_many_transitions() -> None:
    """Memory is reserved for the transitions that are held, and not for the capacity."""
    flag = np.zeros(1, np.bool_)
    held = []
    for capacity in (5_000, 20_000, 200_000):
        generator = np.random.default_rng(0)
        frames = generator.integers(0, 256, (64, 1, 64, 64), np.uint8)
        with ReplayMemory(box((64, 64), "u1"), spaces.Discrete(4), capacity, budget="4MiB") as memory:
            for number in range(2_000):
                frame = frames[number % 64]
                frame[0, 0] = generator.integers(0, 256, 64)
                memory.add(frame, np.zeros(1, np.int64), np.ones(1, np.float32), frame[:, ::-1], flag, flag)
            memory.store.wait_idle()
            assert memory.report().dropped_early == memory.first_id > 0
            held.append(len(memory))
    assert min(held) > 300
    assert max(held) - min(held) <= 0.05 * max(held), held


@needs_linux
@pytest.mark.nightly
def test_large_frames_have_no_more_overhead_than_small_ones() -> None:
    """The stacks have 4 frames of 215,040 bytes."""
    script = Path(__file__).with_name("fixed_cost.py")
    command = [sys.executable, str(script), "--transitions", "400"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["peak_overhead_mib"] <= SLACK / MIB


@pytest.mark.parametrize("spills", [True, False], ids=["with a disk", "without one"])
def test_raw_blocks_are_freed_when_they_are_compressed_or_evicted(spills: bool, tmp_path: Path) -> None:
    """A batch that was read from a block does not keep it alive."""
    generator = np.random.default_rng(0)
    flag = np.zeros(1, np.bool_)
    settings: dict[str, Any] = {"budget": "8MiB", "spill_dir": tmp_path if spills else None, "seed": 0}

    def count_raw_bytes(memory: ReplayMemory) -> int:
        parts = [part for segment in memory.host_store.catalog.segments for part in segment.parts]
        blocks = {part.block for part in parts if part.block is not None}
        return sum(block.form.nbytes for block in blocks if isinstance(block.form, Raw))

    with ReplayMemory(box(FRAME, "u1"), spaces.Discrete(4), 250_000, **settings) as memory:
        batches = []
        for _ in range(6):
            for _ in range(200):
                obs, next_obs = generator.integers(0, 256, (2, 1, *FRAME), np.uint8)
                memory.add(obs, np.zeros(1, np.int64), np.zeros(1, np.float32), next_obs, flag, flag)
            batches.append(memory.sample(32))
        memory.store.wait_idle()
        assert count_raw_bytes(memory) < 2 * MIB
        assert memory.report().total_bytes <= 8 * MIB


def test_a_memory_whose_first_frames_are_noise_does_not_warn_of_drops_that_never_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first compressed blocks say little about the later ones."""
    image = spaces.Box(0, 255, (84, 84), np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (3_000, 84, 84), np.uint8)
    with ReplayMemory(image, spaces.Discrete(2), capacity=20_000, budget="64MiB") as memory:
        for step in range(10_000):
            obs = noise[min(step, len(noise) - 1)]
            next_obs = noise[min(step + 1, len(noise) - 1)]
            memory.add(obs, 0, 0.0, next_obs, terminated=False, truncated=False)
        memory.store.wait_idle()
        assert memory.report().dropped_early == 0
        assert len(memory) == 10_000
    assert "holds about" not in caplog.text
    assert "dropped early" not in caplog.text

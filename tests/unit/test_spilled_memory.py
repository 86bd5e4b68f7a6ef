"""Blocks on disk read bit for bit as they were added. Without a disk tier, what does not fit is dropped early."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from camera_ticks import (
    RARE,
    check_pickle_in_another_process,
    check_readers_while_adding,
    make_smooth_images,
    make_ticks,
)
from gymnasium import spaces

from holdall import ReplayMemory, TransitionIdError
from holdall._native import Block, Coded
from holdall.report import MemoryReport
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.strategies import box

SPACE = spaces.Dict(
    camera=box((36, 44, 3), "u1"),
    screen=box((36, 36, 4), "u1"),
    scaled=box((36, 36), "f4"),
    words=box((600,), "f8"),
    state=box((6,), "f4"),
)
ACTIONS = spaces.Discrete(3)


SMALL = Tuning(block_bytes=240_000)
"""Small blocks: those of the four large fields share these bytes."""
TIGHT = replace(SMALL, segments_per_limit=16, staging_divisor=64)
"""A limit is divided among few small segments, so that a small limit is soon full."""


TILES = np.random.default_rng(99).integers(0, 256, (6, 36, 36), np.uint8)
"""Noise that many frames have in common. A dictionary compresses it."""


def observe(generator: np.random.Generator, lanes: int, before: Any = None) -> dict[str, Any]:
    newest = TILES[generator.integers(0, 6, lanes)][..., None].copy()
    newest[:, :4] = generator.integers(0, 256, (lanes, 4, 36, 1), np.uint8)
    frames = np.zeros((lanes, 36, 36, 4), np.uint8) if before is None else before["screen"]
    return {
        "camera": make_smooth_images(generator, (lanes, 36, 3, 44)).swapaxes(2, 3).copy(),
        "screen": np.concatenate([frames[..., 1:], newest], axis=-1),
        "scaled": make_smooth_images(generator, (lanes, 36, 36)) / np.float32(255),
        "words": RARE[generator.integers(0, 4, (lanes, 600))],
        "state": generator.normal(size=(lanes, 6)).astype("f4"),
    }


class Pair:
    """A memory and the oracle, fed with the same ticks."""

    def __init__(self, capacity: int = 6_000, lanes: int = 1, _tuning: Tuning = SMALL, **settings: Any) -> None:
        settings |= {"prefer": "memory", "seed": 0, "_tuning": _tuning}
        self.memory = ReplayMemory(SPACE, ACTIONS, capacity, lanes, **settings)
        self.oracle = OracleMemory(capacity, lanes)
        self._lanes = lanes
        self._ticks = make_ticks(observe, lanes)
        self._generator = np.random.default_rng(7)
        self.added = 0  # Transitions, without invalid entries.

    def feed(self, count: int, *, invalid: float = 0.0) -> None:
        for _ in range(count):
            tick = next(self._ticks)
            if invalid:
                tick["valid"] = self._generator.random(self._lanes) >= invalid
            self.memory.add(**tick)
            self.oracle.add(**tick)
            self.added += int(np.sum(tick.get("valid", np.ones(self._lanes, np.bool_))))

    def evict_early(self) -> None:
        """Evict from the oracle what did not fit the budget."""
        assert self.memory.first_id >= self.oracle.first_id
        self.oracle.evict(self.memory.first_id)

    def check(self, count: int, seed: int = 0) -> None:
        ids = np.random.default_rng(seed).choice(self.oracle.ids, count)
        assert_same_bits(self.memory.gather(ids), self.oracle.gather(ids))

    def check_all(self) -> None:
        assert len(self.memory) == len(self.oracle)
        assert (self.memory.first_id, self.memory.next_id) == (self.oracle.first_id, self.oracle.next_id)
        assert_same_bits(self.memory.gather(self.oracle.ids), self.oracle.gather(self.oracle.ids))


def find_closed_blocks(memory: ReplayMemory) -> list[Block]:
    """Return the closed blocks of all fields, oldest first."""
    parts = [part for segment in memory.host_store.catalog.segments for part in segment.parts]
    blocks = {part.block: None for part in parts if part.block is not None}
    return [block for block in blocks if not block.is_open]


def is_on_disk(block: Block) -> bool:
    return isinstance(block.form, Coded) and block.form.location is not None


def find_spilled_fields(report: MemoryReport) -> set[str]:
    """Return the names of the fields that have blocks on disk."""
    return {field.name for field in report.fields if field.disk_bytes}


LIMIT = 2_500_000
"""A limit that holds about a hundred transitions uncompressed."""


LARGE = {"obs.camera", "obs.screen", "obs.scaled", "obs.words"}


# ---------------------------------------------------------------- all on disk


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_batch_is_the_oracles_before_while_and_after_spilling(lanes: int, tmp_path: Path) -> None:
    """Rows are the same whether their block is raw, compressed, on disk, or on its way there."""
    pair = Pair(lanes=lanes, budget=None, spill_dir=tmp_path)
    with pair.memory:
        for seed in range(12):
            pair.feed(12)
            pair.check(40, seed)
        pair.check_all()
        pair.memory.store.wait_idle()
        pair.check_all()
        assert find_spilled_fields(pair.memory.report()) == LARGE
        blocks = find_closed_blocks(pair.memory)
        assert all(is_on_disk(block) for block in blocks)
        assert len(blocks) > 10
        batch = pair.memory.sample(64)
        assert_same_bits(batch, pair.oracle.gather(batch.ids))


def test_incompressible_blocks_are_spilled_raw(tmp_path: Path) -> None:
    """On disk, noise takes as many bytes as it has. In memory it takes no more than an index."""
    generator = np.random.default_rng(0)
    memory = ReplayMemory(box((5000,), "u1"), ACTIONS, 4_000, budget=None, spill_dir=tmp_path, _tuning=SMALL)
    oracle = OracleMemory(4_000)
    flag = np.zeros(1, np.bool_)
    rows = generator.integers(0, 256, (301, 1, 5000), np.uint8)
    with memory:
        for tick in range(300):
            given = (rows[tick], np.zeros(1, np.int64), np.zeros(1, np.float32), rows[tick + 1], flag, flag)
            memory.add(*given)
            oracle.add(*given)
        memory.store.wait_idle()
        field = memory.report().fields[0]
        assert field.disk_bytes > 0.8 * rows.nbytes
        assert field.slice_bytes < 0.2 * rows.nbytes
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


def test_blocks_are_evicted_while_others_are_spilled(tmp_path: Path) -> None:
    """Blocks are evicted from disk, from memory, and while they are written. Rows that are held are right."""
    pair = Pair(capacity=90, budget=None, spill_dir=tmp_path)
    with pair.memory:
        for seed in range(20):
            pair.feed(20)
            pair.check(40, seed)
        pair.memory.store.wait_idle()
        pair.check_all()
        assert pair.memory.first_id == 310
        with pytest.raises(TransitionIdError):
            pair.memory.gather([309])
        assert pair.memory.report().disk_bytes < 2_000_000


def test_batches_that_are_held_stay_as_they_were_when_their_files_are_gone(tmp_path: Path) -> None:
    """A batch belongs to the caller. It does not change when its blocks are evicted."""
    pair = Pair(capacity=60, budget=None, spill_dir=tmp_path)
    held = []
    with pair.memory:
        pair.feed(60)
        pair.memory.store.wait_idle()
        for seed in range(5):
            ids = np.random.default_rng(seed).choice(pair.oracle.ids, 24)
            held.append((pair.memory.gather(ids), pair.oracle.gather(ids)))
        pair.feed(80)
        pair.memory.store.wait_idle()
    assert not list(tmp_path.iterdir())
    for batch, expected in held:
        assert_same_bits(batch, expected)


def test_threads_read_the_added_rows_while_blocks_are_compressed_and_spilled(tmp_path: Path) -> None:
    ticks = list(itertools.islice(make_ticks(observe, 1), 200))
    settings: dict[str, Any] = {"budget": None, "prefer": "memory", "spill_dir": tmp_path, "_tuning": SMALL}
    with ReplayMemory(SPACE, ACTIONS, 200, **settings) as memory:
        check_readers_while_adding(memory, ticks)
        assert find_spilled_fields(memory.report()) == LARGE


# ---------------------------------------------------------------- a budget


def test_the_oldest_blocks_move_to_disk_and_the_newest_stay_in_memory(tmp_path: Path) -> None:
    """No transition is lost, and the bytes in memory stay within the limit."""
    limit = LIMIT
    pair = Pair(budget=limit, spill_dir=tmp_path, _tuning=TIGHT)
    with pair.memory:
        for seed in range(8):
            pair.feed(60)
            pair.check(40, seed)
            assert pair.memory.report().total_bytes <= limit
        pair.memory.store.wait_idle()
        pair.check_all()
        report = pair.memory.report()
        assert find_spilled_fields(report) == LARGE
        assert report.total_bytes <= limit
        assert report.capacity_that_fits is None
        oldest = find_closed_blocks(pair.memory)[0]
        newest = find_closed_blocks(pair.memory)[-1]
        assert is_on_disk(oldest)
        assert not is_on_disk(newest)


@pytest.mark.parametrize("invalid", [0.0, 0.4], ids=["all valid", "some invalid"])
def test_without_a_disk_tier_the_oldest_transitions_are_evicted_early(invalid: float) -> None:
    """`first_id` and `len` are exact. Every transition from `first_id` on is held, and no earlier one is returned."""
    limit = 2 * LIMIT
    pair = Pair(lanes=2, budget=limit, _tuning=TIGHT)
    with pair.memory:
        for seed in range(8):
            pair.feed(40, invalid=invalid)
            pair.evict_early()
            assert len(pair.memory) == len(pair.oracle)
            pair.check(40, seed)
            assert pair.memory.report().total_bytes <= limit
        pair.memory.store.wait_idle()
        pair.evict_early()
        pair.check_all()
        first = pair.memory.first_id
        assert first > 0
        assert pair.memory.report().dropped_early == pair.added - len(pair.oracle)
        assert pair.memory.next_id - first < 6_000
        for gone in (0, first - 1):
            with pytest.raises(TransitionIdError, match=f"ids holds {gone}"):
                pair.memory.gather([gone])
        batch = pair.memory.sample(60)
        assert batch.ids.min() >= first
        assert_same_bits(batch, pair.oracle.gather(batch.ids))


def test_the_reported_capacity_that_fits_is_right_within_a_quarter() -> None:
    """It is computed from the measured ratio, as soon as one block of every field was compressed."""
    limit = LIMIT
    pair = Pair(budget=limit, _tuning=TIGHT)
    with pair.memory:
        reported = None
        for _ in range(20):
            pair.feed(30)
            pair.memory.store.wait_idle()
            reported = reported or pair.memory.report().capacity_that_fits
        assert reported is not None
        assert "holds about" in str(pair.memory.report())
        pair.evict_early()
        assert pair.memory.first_id > 0
        assert len(pair.memory) == pytest.approx(reported, rel=0.25)


def test_transitions_that_fit_when_compressed_are_not_evicted_early() -> None:
    """The memory compresses blocks before it evicts transitions."""
    limit = LIMIT
    pair = Pair(budget=limit, _tuning=TIGHT)
    with pair.memory:
        pair.feed(40)
        raw = sum(block.form.nbytes for block in find_closed_blocks(pair.memory))
        pair.memory.store.wait_idle()
        assert 0 < raw < limit
        pair.check_all()
    roomy = Pair(budget="1GiB")
    with roomy.memory:
        roomy.feed(150)
        roomy.memory.store.wait_idle()
        roomy.check_all()
        assert roomy.memory.report().capacity_that_fits is None


def test_a_machine_with_memory_to_spare_spills_nothing(tmp_path: Path) -> None:
    """By default, blocks stay in memory until they take half of the available memory."""
    pair = Pair(budget="auto", spill_dir=tmp_path)
    with pair.memory:
        pair.feed(100)
        pair.memory.store.wait_idle()
        pair.check_all()
        assert pair.memory.report().disk_bytes == 0


def test_a_machine_with_little_memory_left_spills(tmp_path: Path) -> None:
    """Half of the available memory is used before blocks move to disk."""
    pair = Pair(budget="auto", spill_dir=tmp_path, _tuning=replace(SMALL, available_bytes=800_000))
    with pair.memory:
        pair.feed(250)
        pair.memory.store.wait_idle()
        pair.check_all()
        assert find_spilled_fields(pair.memory.report()) == LARGE
        assert sum(block.form.nbytes for block in find_closed_blocks(pair.memory)) <= 400_000


# ---------------------------------------------------------------- pickling


@pytest.mark.parametrize("setting", ["all on disk", "a limit"])
def test_a_pickled_memory_has_the_same_rows_and_spills_to_a_folder_of_its_own(setting: str, tmp_path: Path) -> None:
    """The pickle contains the blocks that are on disk. The original and the copy share no file."""
    limit = None if setting == "all on disk" else LIMIT
    pair = Pair(budget=limit, spill_dir=tmp_path, _tuning=TIGHT)
    with pair.memory:
        pair.feed(150 if limit is None else 400)
        pair.memory.store.wait_idle()
        pickled = pickle.dumps(pair.memory, protocol=5)
        assert pair.memory.report().disk_bytes > 0
    assert not list(tmp_path.iterdir())
    pair.memory = pickle.loads(pickled)
    with pair.memory:
        assert len(list(tmp_path.iterdir())) == 1
        pair.check_all()
        pair.memory.store.wait_idle()
        pair.check_all()
        assert find_spilled_fields(pair.memory.report()) == LARGE
        if limit is not None:
            assert pair.memory.report().total_bytes <= limit
        pair.feed(60)
        pair.memory.store.wait_idle()
        pair.check_all()


def test_another_process_reads_a_pickle_of_spilled_blocks(tmp_path: Path) -> None:
    """The folder of spilled blocks is deleted when its process ends."""
    pair = Pair(budget=None, spill_dir=tmp_path / "spilled")
    with pair.memory:
        pair.feed(120)
        pair.memory.store.wait_idle()
        check_pickle_in_another_process(pair.memory, pair.oracle, tmp_path / "memory.pkl")
    assert not list((tmp_path / "spilled").iterdir())


# ---------------------------------------------------------------- files


def test_files_are_deleted_with_their_last_block(tmp_path: Path) -> None:
    """An evicted block takes no space on disk once no other block of its file is held."""
    tuning = replace(SMALL, spill_file_bytes=100_000)
    pair = Pair(capacity=120, budget=None, spill_dir=tmp_path, _tuning=tuning)
    with pair.memory:
        most = 0
        for _ in range(10):
            pair.feed(40)
            pair.memory.store.wait_idle()
            gc.collect()
            files = list(tmp_path.glob("*/*.seg"))
            most = max(most, sum(file.stat().st_size for file in files))
        held = pair.memory.report().disk_bytes
        assert most < held + 2 * 200_000 + 400_000
        assert min(int(file.stem) for file in tmp_path.glob("*/*.seg")) > 3
        pair.check_all()


# ---------------------------------------------------------------- the end of a program

ENDS_WITHOUT_CLOSE = """
import sys, time
import numpy as np, holdall
from gymnasium import spaces
from holdall.store.spill import SpillFolder

spill_dir, url = sys.argv[1:]
store = SpillFolder.store

def store_slowly(folder, coded):
    time.sleep(delay_s)
    return store(folder, coded)

delay_s = 0
SpillFolder.store = store_slowly
memory = holdall.ReplayMemory(
    spaces.Box(0, 255, (84, 84, 3), np.uint8), spaces.Discrete(2), 10_000, budget="24MiB", spill_dir=spill_dir
)
frames = np.random.default_rng(0).integers(0, 256, (900, 1, 84, 84, 3), np.uint8)
done = np.zeros(1, bool)

def add(first, end):
    for obs, next_obs in zip(frames[first:end], frames[first + 1 : end + 1]):
        memory.add(obs, np.zeros(1, np.int64), np.zeros(1, np.float32), next_obs, done, done)

add(0, 880)
memory.store.wait_idle()
assert memory.report().disk_bytes
if url:
    memory.save(url, progress=lambda *_: time.sleep(0.01))  # The program ends while the checkpoint is written.
else:
    delay_s = 0.2  # The program ends while a block is written.
    memory.relieve(2**30)
    time.sleep(0.05)
    assert memory.report().backlog
"""


@pytest.mark.parametrize("saves", [False, True])
def test_a_program_that_ends_without_close_spills_and_saves_to_its_end(tmp_path: Path, saves: bool) -> None:
    """Files are closed after the threads that use them have ended. So there is no error, and no checkpoint is lost."""
    spill_dir = tmp_path / "spilled"
    url = tmp_path / "run"
    command = [sys.executable, "-c", ENDS_WITHOUT_CLOSE, str(spill_dir), str(url) if saves else ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(spill_dir.iterdir())
    if saves:
        with ReplayMemory.load(url) as memory:
            assert len(memory) == 880
            memory.gather(np.arange(memory.first_id, memory.next_id))


def test_closing_a_memory_frees_its_files_although_its_store_is_still_referenced(tmp_path: Path) -> None:
    """A traceback or a loader may refer to the store for a long time."""
    pair = Pair(budget=None, spill_dir=tmp_path)
    pair.feed(300)
    store = pair.memory.store
    store.wait_idle()
    assert any(is_on_disk(block) for block in find_closed_blocks(pair.memory))
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    pair.memory.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    del store

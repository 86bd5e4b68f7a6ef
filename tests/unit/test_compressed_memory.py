"""A memory that compresses everything returns, bit for bit, what was added: before, during and after compression."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
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

from holdall import DamageError, ReplayMemory
from holdall._native import Block, Coded
from holdall.report import FieldReport
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.strategies import box

SPACE = spaces.Dict(
    camera=box((36, 44, 3), "u1"),
    scaled=box((36, 36), "f4"),
    stack=box((36, 36, 4), "u1"),
    state=box((6,), "f4"),
    words=box((600,), "f8"),
)
ACTIONS = spaces.Discrete(3)
LARGE = ("obs.camera", "obs.scaled", "obs.stack", "obs.words")


SMALL = Tuning(block_bytes=240_000)
"""Small blocks: those of the four large fields share these bytes."""


def observe(generator: np.random.Generator, lanes: int, before: Any = None) -> dict[str, Any]:
    newest = make_smooth_images(generator, (lanes, 36, 36))[..., None]
    frames = np.zeros((lanes, 36, 36, 4), np.uint8) if before is None else before["stack"]
    return {
        "camera": make_smooth_images(generator, (lanes, 36, 3, 44)).swapaxes(2, 3).copy(),
        "scaled": make_smooth_images(generator, (lanes, 36, 36)) / np.float32(255),
        "stack": np.concatenate([frames[..., 1:], newest], axis=-1),
        "state": generator.normal(size=(lanes, 6)).astype("f4"),
        "words": RARE[generator.integers(0, 4, (lanes, 600))],
    }


class Pair:
    """A memory that compresses all, and the oracle, fed with the same ticks."""

    def __init__(self, capacity: int = 6_000, lanes: int = 1, prefer: str = "memory") -> None:
        self.memory = ReplayMemory(SPACE, ACTIONS, capacity, lanes, budget=None, prefer=prefer, seed=0, _tuning=SMALL)
        self.oracle = OracleMemory(capacity, lanes)
        self._ticks = make_ticks(observe, lanes)

    def feed(self, count: int) -> None:
        for _ in range(count):
            tick = next(self._ticks)
            self.memory.add(**tick)
            self.oracle.add(**tick)

    def check(self, count: int, seed: int = 0) -> None:
        ids = np.random.default_rng(seed).choice(self.oracle.ids, count)
        assert_same_bits(self.memory.gather(ids), self.oracle.gather(ids))

    def check_all(self) -> None:
        assert_same_bits(self.memory.gather(self.oracle.ids), self.oracle.gather(self.oracle.ids))


def list_fields(memory: ReplayMemory) -> dict[str, FieldReport]:
    return {field.name: field for field in memory.report().fields}


def find_closed_blocks(memory: ReplayMemory, name: str) -> list[Block]:
    """Return the closed blocks of an observation field, oldest first."""
    column = [field.name for field in memory.report().fields].index(name)
    parts = [segment.parts[column] for segment in memory.host_store.catalog.segments]
    blocks = {part.block: None for part in parts if part.block is not None}
    return [block for block in blocks if not block.is_open]


def count_coded(memory: ReplayMemory, name: str) -> tuple[int, int]:
    """Return how many blocks of a field are compressed, and how many are closed."""
    blocks = find_closed_blocks(memory, name)
    return sum(isinstance(block.form, Coded) for block in blocks), len(blocks)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_batch_is_the_oracles_before_during_and_after_compression(lanes: int) -> None:
    """Rows are the same whether their block is raw, being compressed, or compressed by any codec."""
    pair = Pair(lanes=lanes)
    with pair.memory:
        for seed in range(12):
            pair.feed(15)
            pair.check(40, seed)
        pair.check_all()
        pair.memory.store.wait_idle()
        pair.check_all()
        batch = pair.memory.sample(64)
        assert_same_bits(batch, pair.oracle.gather(batch.ids))
        for name in LARGE:
            assert count_coded(pair.memory, name)[0] >= 2, name


@pytest.mark.parametrize("prefer", ["speed", "balanced"])
def test_a_batch_is_the_oracles_with_every_preference(prefer: str) -> None:
    """A preference changes bytes and time, and no row."""
    pair = Pair(prefer=prefer)
    with pair.memory:
        pair.feed(150)
        pair.memory.store.wait_idle()
        pair.check_all()


def test_blocks_are_evicted_while_others_are_compressed() -> None:
    """Some blocks are evicted while they are queued. Rows that are held are right, and evicted ones are refused."""
    pair = Pair(capacity=90)
    with pair.memory:
        for seed in range(20):
            pair.feed(20)
            pair.check(60, seed)
        pair.memory.store.wait_idle()
        pair.check_all()
        assert pair.memory.first_id == pair.oracle.first_id == 310


def test_batches_that_are_held_stay_as_they_were() -> None:
    """Ten batches are held while blocks are compressed and evicted, and a hundred more batches are drawn."""
    pair = Pair(capacity=120)
    with pair.memory:
        pair.feed(60)
        held = []
        for seed in range(10):
            ids = np.random.default_rng(seed).choice(pair.oracle.ids, 24)
            held.append((pair.memory.gather(ids), pair.oracle.gather(ids)))
            pair.feed(5)
        for _ in range(20):
            pair.feed(8)
            for _ in range(5):
                pair.memory.sample(24)
        pair.memory.store.wait_idle()
        pair.memory.sample(24)
        for batch, expected in held:
            assert_same_bits(batch, expected)
    for batch, expected in held:
        assert_same_bits(batch, expected)


def test_threads_read_the_added_rows_while_blocks_are_compressed() -> None:
    ticks = list(itertools.islice(make_ticks(observe, 1), 220))
    with ReplayMemory(SPACE, ACTIONS, 220, budget=None, prefer="memory", _tuning=SMALL) as memory:
        check_readers_while_adding(memory, ticks)
        assert count_coded(memory, "obs.camera")[0] >= 2


# ---------------------------------------------------------------- bytes and words


def test_floats_that_are_scaled_bytes_take_a_quarter() -> None:
    """Wrappers divide uint8 by 255 to float32. The images are noise, so only the palette makes them smaller."""
    generator = np.random.default_rng(0)
    tuning = Tuning(block_bytes=400_000)
    memory = ReplayMemory(box((40, 40), "f4"), ACTIONS, 4_000, budget=None, prefer="memory", _tuning=tuning)
    oracle = OracleMemory(4_000)
    images = generator.integers(0, 256, (501, 1, 40, 40), np.uint8) / np.float32(255)
    flag = np.zeros(1, np.bool_)
    with memory:
        for obs, next_obs in itertools.pairwise(images):
            for each in (memory, oracle):
                each.add(obs, np.zeros(1, np.int64), np.zeros(1, np.float32), next_obs, flag, flag)
        memory.store.wait_idle()
        coded, closed = count_coded(memory, "obs")
        assert coded == closed >= 7
        raw_bytes = sum(block.slice_count * block.slice_bytes for block in find_closed_blocks(memory, "obs"))
        field = list_fields(memory)["obs"]
        assert 0.25 * raw_bytes < field.compressed_bytes < 0.28 * raw_bytes
        assert "palette" in field.finding
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


def test_the_report_names_the_codecs_and_the_bytes_that_they_saved() -> None:
    """It names the codec of each field that has one, and reports no backlog and no failure."""
    pair = Pair()
    with pair.memory:
        pair.feed(200)
        pair.memory.store.wait_idle()
        report = pair.memory.report()
        assert report.backlog == 0
        assert report.failure == ""
        for field in report.fields:
            assert ("times smaller on a sample" in field.finding) == (field.name in LARGE), field
        fields = list_fields(pair.memory)
        assert "palette" in fields["obs.scaled"].finding
        assert fields["obs.camera"].slice_bytes < 0.65 * 200 * 36 * 44 * 3
        assert fields["obs.words"].slice_bytes < 0.25 * 200 * 4800
        assert report.total_bytes == sum(field.total_bytes for field in report.fields)


def test_blocks_that_fit_the_budget_stay_raw() -> None:
    """By default, blocks stay raw until they take a quarter of the available memory."""
    memory = ReplayMemory(SPACE, ACTIONS, 2_000, _tuning=SMALL)
    with memory:
        for tick in itertools.islice(make_ticks(observe, 1), 100):
            memory.add(**tick)
        memory.store.wait_idle()
        assert {count_coded(memory, name)[0] for name in LARGE} == {0}


def test_damaged_bytes_are_an_error_and_the_rest_is_read() -> None:
    """No row of a damaged slice is returned. Transitions in other blocks are still read."""
    pair = Pair()
    with pair.memory:
        pair.feed(150)
        pair.memory.store.wait_idle()
        first, *_ = pair.memory.host_store.catalog.closed_segments(20)
        block = find_closed_blocks(pair.memory, "obs.camera")[0]
        form = block.form
        assert isinstance(form, Coded)
        assert form.data is not None
        damaged = np.full_like(form.data, 255)
        block.form = Coded(form.codec, form.slice_count, form.offsets, form.palette, damaged, form.places)
        with pytest.raises(DamageError):
            pair.memory.gather(np.arange(first.first_tick))
        later = np.arange(100, 150)
        assert_same_bits(pair.memory.gather(later), pair.oracle.gather(later))


# ---------------------------------------------------------------- pickling


def test_a_pickled_memory_has_the_same_rows_and_can_be_added_to() -> None:
    """A pickle contains compressed blocks as they are. Blocks that are added later are compressed, too."""
    pair = Pair()
    pair.feed(120)
    pair.memory.store.wait_idle()
    with pair.memory:
        coded, _ = count_coded(pair.memory, "obs.camera")
        pickled = pickle.dumps(pair.memory, protocol=5)
    pair.memory = pickle.loads(pickled)
    with pair.memory:
        assert count_coded(pair.memory, "obs.camera")[0] >= coded > 0
        pair.check_all()
        pair.feed(100)
        pair.memory.store.wait_idle()
        pair.check_all()
        assert count_coded(pair.memory, "obs.camera")[0] > coded


def test_a_pickled_memory_is_read_by_another_process(tmp_path: Path) -> None:
    pair = Pair()
    with pair.memory:
        pair.feed(120)
        pair.memory.store.wait_idle()
        check_pickle_in_another_process(pair.memory, pair.oracle, tmp_path / "memory.pkl")


def test_raw_blocks_of_a_pickle_are_compressed_later() -> None:
    """A loaded memory keeps to its budget, too."""
    pair = Pair()
    pair.feed(5)
    with pair.memory:
        pickled = pickle.dumps(pair.memory, protocol=5)
    pair.memory = pickle.loads(pickled)
    with pair.memory:
        pair.feed(150)
        pair.memory.store.wait_idle()
        coded, closed = count_coded(pair.memory, "obs.camera")
        assert coded == closed
        pair.check_all()


AT_THE_END = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if thread.name == "holdall compactor"]))
import numpy as np, holdall
from gymnasium import spaces

memory = holdall.ReplayMemory(spaces.Box(0, 255, (84, 84), np.uint8), spaces.Discrete(2), 10_000, budget=None)
rng = np.random.default_rng(0)
done = np.zeros(1, bool)
while not memory.report().backlog:
    frames = rng.integers(0, 4, (2, 1, 84, 84), np.uint8)
    memory.add(frames[0], np.zeros(1, np.int64), np.zeros(1), frames[1], done, done)
"""


def test_a_program_ends_its_worker_before_python_does() -> None:
    """Python ends threads in the middle of a call, and C++ inside NumPy then aborts the process."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")

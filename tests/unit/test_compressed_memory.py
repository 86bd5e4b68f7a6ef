"""A memory that compresses everything returns, bit for bit, what was added: before, during and after compression."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from camera_ticks import RARE, make_ticks, smooth
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


def observed(generator: np.random.Generator, lanes: int, before: Any = None) -> dict[str, Any]:
    newest = smooth(generator, (lanes, 36, 36))[..., None]
    frames = np.zeros((lanes, 36, 36, 4), np.uint8) if before is None else before["stack"]
    return {
        "camera": smooth(generator, (lanes, 36, 3, 44)).swapaxes(2, 3).copy(),
        "scaled": smooth(generator, (lanes, 36, 36)) / np.float32(255),
        "stack": np.concatenate([frames[..., 1:], newest], axis=-1),
        "state": generator.normal(size=(lanes, 6)).astype("f4"),
        "words": RARE[generator.integers(0, 4, (lanes, 600))],
    }


class Pair:
    """A memory that compresses all, and the oracle, fed with the same ticks."""

    def __init__(self, capacity: int = 6_000, lanes: int = 1, prefer: str = "memory") -> None:
        self.memory = ReplayMemory(SPACE, ACTIONS, capacity, lanes, budget=None, prefer=prefer, seed=0, _tuning=SMALL)
        self.oracle = OracleMemory(capacity, lanes)
        self._ticks = make_ticks(observed, lanes)

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


def fields_of(memory: ReplayMemory) -> dict[str, FieldReport]:
    return {field.name: field for field in memory.report().fields}


def closed_blocks(memory: ReplayMemory, name: str) -> list[Block]:
    """Return the closed blocks of an observation field, oldest first."""
    column = [field.name for field in memory.report().fields].index(name)
    parts = [segment.parts[column] for segment in memory.store.catalog.segments]
    blocks = {part.block: None for part in parts if part.block is not None}
    return [block for block in blocks if not block.is_open]


def count_coded(memory: ReplayMemory, name: str) -> tuple[int, int]:
    """Return how many blocks of a field are compressed, and how many are closed."""
    blocks = closed_blocks(memory, name)
    return sum(isinstance(block.form, Coded) for block in blocks), len(blocks)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_batch_is_the_oracles_before_during_and_after_compression(lanes: int) -> None:
    """Palettes, predictors, dictionaries, raw blocks and those half way: no row tells them apart."""
    pair = Pair(lanes=lanes)
    with pair.memory:
        for seed in range(12):
            pair.feed(15)
            pair.check(40, seed)
        pair.check_all()
        pair.memory.store.wait_idle()
        pair.check_all()
        assert_same_bits(batch := pair.memory.sample(64), pair.oracle.gather(batch.ids))
        for name in LARGE:
            assert count_coded(pair.memory, name)[0] >= 2, name


@pytest.mark.parametrize("prefer", ["speed", "balanced"])
def test_a_batch_is_the_oracles_whatever_is_preferred(prefer: str) -> None:
    """A preference moves bytes and time, and nothing else."""
    pair = Pair(prefer=prefer)
    with pair.memory:
        pair.feed(150)
        pair.memory.store.wait_idle()
        pair.check_all()


def test_blocks_are_evicted_while_others_are_compressed() -> None:
    """Blocks are compressed, queued, or evicted while they are queued. What is held is right, and the rest is gone."""
    pair = Pair(capacity=90)
    with pair.memory:
        for seed in range(20):
            pair.feed(20)
            pair.check(60, seed)
        pair.memory.store.wait_idle()
        pair.check_all()
        assert pair.memory.first_id == pair.oracle.first_id == 310


def test_batches_that_are_held_stay_as_they_were() -> None:
    """Ten of them, while blocks are compressed and evicted and a hundred more are drawn."""
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


def test_threads_read_what_was_added_while_it_is_compressed() -> None:
    """One adds, three gather, one draws: every row is the one that was added under its id."""
    count = 220
    steps = [tick for tick, _ in zip(make_ticks(observed, 1), range(count), strict=False)]
    oracle = OracleMemory(count)
    for step in steps:
        oracle.add(**step)
    memory = ReplayMemory(SPACE, ACTIONS, count, budget=None, prefer="memory", _tuning=SMALL)
    errors: list[BaseException] = []
    added = threading.Event()
    memory.add(**steps[0])

    def read(seed: int, draws: bool) -> None:
        generator = np.random.default_rng(seed)
        while not added.is_set():
            held = memory.next_id
            ids = generator.integers(0, held, 16)
            batch = memory.sample(min(16, held)) if draws else memory.gather(ids)
            assert_same_bits(batch, oracle.gather(batch.ids))

    def guarded(seed: int, draws: bool) -> None:
        try:
            read(seed, draws)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(seed, seed == 3)) for seed in range(4)]
    with memory:
        for thread in threads:
            thread.start()
        try:
            for step in steps[1:]:
                memory.add(**step)
            memory.store.wait_idle()
        finally:
            added.set()
            for thread in threads:
                thread.join(60)
        assert not errors, errors[0]
        assert count_coded(memory, "obs.camera")[0] >= 2
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


# ---------------------------------------------------------------- bytes and words


def test_floats_that_are_scaled_bytes_take_a_quarter() -> None:
    """A wrapper's habit: uint8 / 255 as float32. Noise, so that nothing but the palette shrinks it."""
    generator = np.random.default_rng(0)
    tuning = Tuning(block_bytes=400_000)
    memory = ReplayMemory(box((40, 40), "f4"), ACTIONS, 4_000, budget=None, prefer="memory", _tuning=tuning)
    oracle = OracleMemory(4_000)
    images = generator.integers(0, 256, (501, 1, 40, 40), np.uint8) / np.float32(255)
    flag = np.zeros(1, np.bool_)
    with memory:
        for obs, next_obs in pairwise(images):
            for each in (memory, oracle):
                each.add(obs, np.zeros(1, np.int64), np.zeros(1, np.float32), next_obs, flag, flag)
        memory.store.wait_idle()
        coded, closed = count_coded(memory, "obs")
        assert coded == closed >= 7
        raw_bytes = sum(block.slice_count * block.slice_bytes for block in closed_blocks(memory, "obs"))
        field = fields_of(memory)["obs"]
        assert 0.25 * raw_bytes < field.compressed_bytes < 0.28 * raw_bytes
        assert "palette" in field.finding
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


def test_the_report_says_what_was_chosen_and_what_it_gave() -> None:
    """Codecs by name for each field that has one, fewer bytes than before, nothing left to do, nothing wrong."""
    pair = Pair()
    with pair.memory:
        pair.feed(200)
        pair.memory.store.wait_idle()
        report = pair.memory.report()
        assert report.backlog == 0
        assert report.failure == ""
        for field in report.fields:
            assert ("times smaller on a sample" in field.finding) == (field.name in LARGE), field
        fields = fields_of(pair.memory)
        assert "palette" in fields["obs.scaled"].finding
        assert fields["obs.camera"].slice_bytes < 0.65 * 200 * 36 * 44 * 3
        assert fields["obs.words"].slice_bytes < 0.25 * 200 * 4800
        assert report.total_bytes == sum(field.total_bytes for field in report.fields)


def test_what_fits_the_budget_stays_raw() -> None:
    """By default a quarter of what is available stays raw, and as fast as memory."""
    memory = ReplayMemory(SPACE, ACTIONS, 2_000, _tuning=SMALL)
    with memory:
        for tick, _ in zip(make_ticks(observed, 1), range(100), strict=False):
            memory.add(**tick)
        memory.store.wait_idle()
        assert {count_coded(memory, name)[0] for name in LARGE} == {0}


def test_damaged_bytes_are_an_error_and_the_rest_is_read() -> None:
    """Nothing of a damaged slice is returned. Transitions in other blocks are as they were."""
    pair = Pair()
    with pair.memory:
        pair.feed(150)
        pair.memory.store.wait_idle()
        first, *_ = pair.memory.store.catalog.closed_segments(20)
        block = closed_blocks(pair.memory, "obs.camera")[0]
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


def test_a_pickled_memory_is_the_same_and_goes_on() -> None:
    """Compressed blocks travel as they are. What is added later is compressed, too."""
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


LOAD = """
import pickle, sys
import numpy as np
from pathlib import Path
memory = pickle.loads(Path(sys.argv[1]).read_bytes())
batch = memory.gather(np.arange(memory.next_id))
sys.stdout.buffer.write(batch.obs["camera"].tobytes() + batch.next_obs["words"].tobytes())
"""


def test_a_pickled_memory_is_read_by_another_process(tmp_path: Path) -> None:
    pair = Pair()
    with pair.memory:
        pair.feed(120)
        pair.memory.store.wait_idle()
        (tmp_path / "memory.pkl").write_bytes(pickle.dumps(pair.memory, protocol=5))
    command = [sys.executable, "-c", LOAD, str(tmp_path / "memory.pkl")]
    done = subprocess.run(command, capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    expected = pair.oracle.gather(pair.oracle.ids)
    assert done.stdout == expected.obs["camera"].tobytes() + expected.next_obs["words"].tobytes()


def test_what_was_raw_when_it_was_pickled_is_compressed_later() -> None:
    """A loaded memory keeps to its budget too."""
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

"""Steps of environments with cameras, for tests that compare large memories with the oracle."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.testing import OracleMemory, assert_same_bits

Observe = Callable[..., dict[str, Any]]

RARE = np.array([0x7FF4000000000001, 0xFFF8000000000123, 0x8000000000000000, 0], np.uint64).view("f8")
"""NaNs with payloads, and zeros of either sign."""


def make_smooth_images(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return images in which neighbouring pixels have similar values."""
    return generator.integers(0, 3, shape, np.uint8).cumsum(axis=-1, dtype=np.uint8)


def make_ticks(observe: Observe, lanes: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield arguments of `add`. All lanes end an episode at every 17th tick.

    `observe` returns the observations of all lanes. Its arguments are a generator, the number of lanes, and the
    observations before, or nothing at the start of an episode.
    """
    generator = np.random.default_rng(seed)
    obs = observe(generator, lanes)
    for tick in itertools.count():
        next_obs = observe(generator, lanes, obs)
        ends = np.full(lanes, tick % 17 == 16)
        yield {
            "obs": obs,
            "action": generator.integers(0, 3, lanes),
            "reward": generator.normal(size=lanes).astype("f4"),
            "next_obs": next_obs,
            "terminated": ends,
            "truncated": np.zeros(lanes, np.bool_),
        }
        obs = observe(generator, lanes) if ends[0] else next_obs


READ_PICKLE = """
import pickle, sys
import numpy as np
from pathlib import Path
memory = pickle.loads(Path(sys.argv[1]).read_bytes())
memory.store.wait_idle()
batch = memory.gather(np.arange(memory.next_id))
for observation in (batch.obs, batch.next_obs):
    for key in sorted(observation):
        sys.stdout.buffer.write(observation[key].tobytes())
assert memory.report().disk_bytes > 0 or memory.spill_dir is None
"""


def check_pickle_in_another_process(memory: ReplayMemory, oracle: OracleMemory, file: Path) -> None:
    """Pickle a memory of camera ticks to `file`, and require that another process reads the oracle's rows from it."""
    file.write_bytes(pickle.dumps(memory, protocol=5))
    command = [sys.executable, "-c", READ_PICKLE, str(file)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    expected = oracle.gather(oracle.ids)
    rows = [part[key].tobytes() for part in (expected.obs, expected.next_obs) for key in sorted(part)]
    assert done.stdout == b"".join(rows)


def check_readers_while_adding(memory: ReplayMemory, ticks: list[dict[str, Any]]) -> None:
    """Add `ticks` while three threads gather and one thread draws.

    Every row that a thread reads is the one that was added under its id. The empty `memory` must have room for all
    ticks.
    """
    oracle = OracleMemory(len(ticks))
    for tick in ticks:
        oracle.add(**tick)
    errors: list[BaseException] = []
    is_done = threading.Event()
    memory.add(**ticks[0])

    def read(seed: int, draws: bool) -> None:
        generator = np.random.default_rng(seed)
        try:
            while not is_done.is_set():
                held = memory.next_id
                ids = generator.integers(0, held, 16)
                batch = memory.sample(min(16, held)) if draws else memory.gather(ids)
                assert_same_bits(batch, oracle.gather(batch.ids))
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(seed, seed == 3)) for seed in range(4)]
    for reader in readers:
        reader.start()
    try:
        for tick in ticks[1:]:
            memory.add(**tick)
        memory.store.wait_idle()
    finally:
        is_done.set()
        for reader in readers:
            reader.join(60)
    assert not errors, errors[0]
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))

"""A loaded memory has the rows of the saved one, bit for bit, and draws the same batches."""

from __future__ import annotations

import copy
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall import ReplayMemory
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, Stream, assert_same_bits
from holdall.testing.strategies import streams

BUDGETS = (None, "auto")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60)),
        st.tuples(st.just("save"), st.sampled_from([0, 1, 3, 12, 30, 90])),
        st.tuples(st.just("load"), st.sampled_from([None, None, None, 7, 30, 300])),
        st.tuples(st.just("set_flags"), st.integers(0, 2**31)),
        st.tuples(st.just("update"), st.integers(0, 2**31)),
    ),
    min_size=4,
    max_size=12,
)


class Pair:
    """A memory, an oracle with the same steps, and a copy of the oracle from the last save."""

    def __init__(self, stream: Stream, capacity_ticks: int, budget: Any, tuning: Tuning, folder: Path) -> None:
        lanes = stream.num_envs
        self.stream = stream
        self.folder = folder
        self.budget = budget
        self.tuning = tuning
        self.memory = ReplayMemory(
            stream.observation_space,
            stream.action_space,
            capacity=capacity_ticks * lanes,
            num_envs=lanes,
            budget=budget,
            extras=stream.extras,
            seed=5,
            _tuning=tuning,
        )
        self.oracle = OracleMemory(capacity_ticks * lanes, lanes)
        self.saved: tuple[OracleMemory, list[Any]] | None = None
        self.gate = threading.Event()  # Until it is set, only one record is written.
        self._generator = np.random.default_rng(1)

    def add(self, ticks: int) -> None:
        for _ in range(ticks):
            tick = self.stream.tick().arguments()
            if self._generator.random() < 0.2:
                tick["valid"] = self._generator.random(self.stream.num_envs) < 0.7
            self.memory.add(**tick)
            self.oracle.add(**tick)

    def save(self, ticks_meanwhile: int) -> None:
        handle = self.memory.save(self.folder, progress=self.wait_for_gate)
        then = copy.deepcopy(self.oracle)
        generator = copy.deepcopy(self.memory.batch_source.generator)
        self.add(ticks_meanwhile)
        if ticks_meanwhile % 2:
            self.set_flags(ticks_meanwhile)
            self.update(ticks_meanwhile)
        self.gate.set()
        handle.result()
        self.gate.clear()
        self.saved = then, [generator]

    def wait_for_gate(self, _phase: str, _nbytes: int) -> None:
        """Block the saver after its first record."""
        self.gate.wait()

    def set_flags(self, seed: int) -> None:
        ids = self.oracle.ids
        if ids.size:
            generator = np.random.default_rng(seed)
            some = np.unique(generator.choice(ids, min(5, ids.size)))
            ended = generator.random(some.size) < 0.5
            cut = generator.random(some.size) < 0.5
            self.memory.set_flags(some, ended, cut)
            self.oracle.set_flags(some, ended, cut)

    def update(self, seed: int) -> None:
        """Rewrite extras of some transitions. An id may occur several times."""
        ids = self.oracle.ids
        if ids.size and self.stream.extras:
            generator = np.random.default_rng(seed)
            some = generator.choice(ids, 8)
            made = self.stream.ticks(8).arguments()["extras"]
            rows = {name: made[name][:, 0] for name in made if len(made) == 1 or generator.random() < 0.7}
            if rows:
                self.memory.update(some, **rows)
                self.oracle.update(some, **rows)

    def load(self, capacity_ticks: int | None) -> None:
        if self.saved is None:
            return
        oracle, (generator,) = copy.deepcopy(self.saved)
        self.memory.close()
        lanes = self.stream.num_envs
        capacity = None if capacity_ticks is None else capacity_ticks * lanes
        self.memory = ReplayMemory.load(self.folder, capacity=capacity, budget=self.budget, _tuning=self.tuning)
        if capacity_ticks is not None:
            oracle = oracle.copy_newest(capacity_ticks * lanes)
        self.oracle = oracle
        self.check()
        if capacity_ticks is None and len(oracle):
            other = copy.deepcopy(generator)
            batch = self.memory.sample(min(8, len(oracle)))
            ids = other.integers(oracle.first_id, oracle.next_id, size=len(batch.ids))
            if len(oracle) == oracle.next_id - oracle.first_id:
                assert batch.ids.tolist() == ids.tolist()

    def check(self) -> None:
        assert len(self.memory) == len(self.oracle)
        assert (self.memory.first_id, self.memory.next_id) == (self.oracle.first_id, self.oracle.next_id)
        if len(self.oracle):
            assert_same_bits(self.memory.gather(self.oracle.ids), self.oracle.gather(self.oracle.ids))


tunings = st.builds(
    Tuning,
    block_bytes=st.sampled_from([1, 30_000, 200_000, 2**24]),
    max_segment_ticks=st.sampled_from([4, 17, 16_384]),
    min_segment_ticks=st.sampled_from([2, 16]),
    small_field_bytes=st.sampled_from([64, 4096]),
    tiny_field_bytes=st.sampled_from([16, 256]),
    min_packed_rows=st.sampled_from([4, 512]),
)
"""Small limits close segments and blocks within a few ticks."""


@settings(max_examples=(settings.default or settings()).max_examples // 8)  # Examples write dozens of files.
@given(streams(), st.sampled_from([3, 20, 75, 200]), st.sampled_from(BUDGETS), tunings, steps)
def test_a_loaded_memory_has_the_state_at_the_call_of_save(
    stream: Stream, capacity_ticks: int, budget: Any, tuning: Tuning, course: list[tuple[str, Any]]
) -> None:
    """Before and during the save, steps are added and evicted, and flags and extras are rewritten."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(stream, capacity_ticks, budget, tuning, Path(folder) / "run")
        try:
            for what, argument in [("add", 3), *course, ("save", 2), ("load", None), ("add", 70)]:
                getattr(pair, what)(argument)
            pair.check()
        finally:
            pair.gate.set()
            pair.memory.close()

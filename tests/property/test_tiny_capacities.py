"""Memories of one to three ticks have the rows that were added, also after a window was found or a pickle was made."""

from __future__ import annotations

import pickle
import tempfile
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.testing import OracleMemory, assert_same_bits

ROW_BYTES = {"tiny": 8, "middle": 100, "other": 60, "large": 700}
"""Bytes of a row of each field. A field has 8 rows, so the fields have different layouts."""


class Sliding:
    """Steps whose fields are constant for the ticks in `quiet`, and slide by one row per tick after that."""

    def __init__(self, quiet: dict[str, int], lanes: int) -> None:
        self.space = spaces.Dict({name: spaces.Box(0, 255, (8, ROW_BYTES[name]), np.uint8) for name in quiet})
        self._quiet = quiet
        self._lanes = lanes
        self._ticks = 0
        self._generator = np.random.default_rng(3)
        self._obs = {name: np.zeros((lanes, 8, ROW_BYTES[name]), np.uint8) for name in sorted(quiet)}

    def tick(self) -> dict[str, Any]:
        following = {name: self._slide(name, rows) for name, rows in self._obs.items()}
        never = np.zeros(self._lanes, np.bool_)
        number = np.full(self._lanes, self._ticks, np.float32)
        step = (self._obs, never.astype(np.int64), number, following, never, never)
        self._obs = following
        self._ticks += 1
        return dict(zip(("obs", "action", "reward", "next_obs", "terminated", "truncated"), step, strict=True))

    def _slide(self, name: str, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self._ticks < self._quiet[name]:
            return rows.copy()
        new = self._generator.integers(0, 256, (self._lanes, 1, ROW_BYTES[name]), np.uint8)
        return np.concatenate([rows[:, 1:], new], axis=1)


def replace_memory(memory: ReplayMemory, how: str, budget: Any) -> ReplayMemory:
    """Return a copy of the memory that was pickled, or saved and loaded with `budget`."""
    if how == "pickle":
        copied: ReplayMemory = pickle.loads(pickle.dumps(memory))
        return copied
    with tempfile.TemporaryDirectory() as folder:
        memory.save(folder).result()
        memory.close()
        return ReplayMemory.load(folder, budget=budget)


quiet_ticks = st.dictionaries(st.sampled_from(sorted(ROW_BYTES)), st.sampled_from([0, 5, 9, 12, 20, 40]), min_size=1)
moves = st.dictionaries(st.integers(0, 60), st.sampled_from(["save", "pickle"]), max_size=3)
budgets = st.sampled_from([None, "auto", "3MB", "64MB"])


@settings(max_examples=40, deadline=None)
@given(quiet=quiet_ticks, ticks=st.integers(1, 3), lanes=st.integers(1, 2), moves=moves, budget=budgets, later=budgets)
def test_a_tiny_memory_returns_the_rows_that_were_added(
    quiet: dict[str, int], ticks: int, lanes: int, moves: dict[int, str], budget: Any, later: Any
) -> None:
    """A segment is evicted as soon as it is closed, so a new layout begins with few rows."""
    steps = Sliding(quiet, lanes)
    memory = ReplayMemory(steps.space, spaces.Discrete(2), ticks * lanes, lanes, budget=budget)
    oracle = OracleMemory(ticks * lanes, lanes)
    for tick in range(70):
        step = steps.tick()
        memory.add(**step)
        oracle.add(**step)
        if tick in moves:
            memory = replace_memory(memory, moves[tick], later)
        assert (memory.first_id, memory.next_id) == (oracle.first_id, oracle.next_id)
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))
    memory.close()

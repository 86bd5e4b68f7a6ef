"""The rules of a memory, as a test class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import TransitionIdError
from holdall.space_leaves import stored_space
from holdall.testing.oracle import OracleMemory, assert_same_bits
from holdall.testing.rules import require, require_raises
from holdall.testing.streams import LeafPlan, Mishaps, Stream, StreamStep

COMPARED = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
"""Fields of a batch that are compared with the oracle."""


class MemoryContract:
    """The promises of a memory, compared with the oracle. For a memory of your own, or an adapter to a framework.

    Override `make_memory` and, if the framework has other names, `add`, `gather` and `sample`. holdall's own memories
    pass these rules and those of `ReplayMemoryContract`.
    """

    capacity = 90
    num_envs = 3

    def make_memory(self, stream: Stream) -> Any:
        """Return an empty memory of `capacity` transitions for the spaces and lanes of a stream."""
        raise NotImplementedError("Override make_memory, and return the memory that is tested.")

    def add(self, memory: Any, step: StreamStep) -> None:
        """Add one tick."""
        memory.add(**step.arguments())

    def gather(self, memory: Any, ids: NDArray[np.int64]) -> dict[str, Any]:
        """Return fields of transitions by their names in `holdall.Batch`. Other fields are not compared."""
        batch = memory.gather(ids)
        return {name: getattr(batch, name) for name in COMPARED}

    def sample(self, memory: Any, count: int) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Draw `count` transitions. Return their ids, and their fields as `gather` does."""
        batch = memory.sample(count)
        return np.array(batch.ids.tolist(), np.int64), {name: getattr(batch, name) for name in COMPARED}

    def streams(self) -> Iterator[Stream]:
        """Yield streams of frame stacks, vectors and images, with ends, silent resets and skipped steps."""
        stack = stored_space((4, 12, 12), np.dtype("u1"))
        image = stored_space((9, 8, 3), np.dtype("u1"))
        vector = stored_space((5,), np.dtype("f4"))
        stacked = [LeafPlan(axis=0, padding="first", content="table")]
        for mishaps in (Mishaps(), Mishaps(ends=0.2, silent_resets=0.1, skipped_steps=0.1, foreign_next=0.1)):
            for space, plans in ((stack, stacked), (image, []), (vector, [])):
                yield Stream(space, stored_space((2,), np.dtype("f4")), self.num_envs, plans=plans, mishaps=mishaps)

    def test_every_held_transition_comes_back_bit_for_bit(self) -> None:
        """`gather` is tested while the memory fills and after it wrapped around."""
        for stream in self.streams():
            memory = self.make_memory(stream)
            oracle = OracleMemory(self.capacity, self.num_envs)
            for tick in range(self._count_ticks()):
                self._add_tick(memory, oracle, stream)
                if tick % 11 == 0:
                    ids = np.random.default_rng(tick).permutation(oracle.ids)
                    self._compare(self.gather(memory, ids), oracle, ids)

    def test_a_batch_has_only_transitions_that_are_held(self) -> None:
        """`sample` is tested while the memory fills and after it wrapped around."""
        for stream in self.streams():
            memory = self.make_memory(stream)
            oracle = OracleMemory(self.capacity, self.num_envs)
            for tick in range(self._count_ticks()):
                self._add_tick(memory, oracle, stream)
                if tick % 11 == 0:
                    count = min(16, len(oracle))
                    ids, rows = self.sample(memory, count)
                    require(len(ids) == count, f"{count} transitions were requested, and {len(ids)} were drawn")
                    require(bool(np.isin(ids, oracle.ids).all()), f"ids {ids} were drawn, and not all of them are held")
                    self._compare(rows, oracle, ids)

    def test_an_evicted_transition_is_refused(self) -> None:
        """The oldest ticks are evicted when the memory is full, and their ids are never used again."""
        for stream in self.streams():
            memory = self.make_memory(stream)
            oracle = OracleMemory(self.capacity, self.num_envs)
            for _ in range(self._count_ticks()):
                self._add_tick(memory, oracle, stream)
            for wrong in (oracle.first_id - 1, oracle.next_id):
                ids = np.array([oracle.first_id, wrong])
                act = partial(self.gather, memory, ids)
                require_raises(
                    TransitionIdError, act, f"gather({ids}) of ids {oracle.first_id} to {oracle.next_id - 1}"
                )

    def test_a_batch_belongs_to_the_caller(self) -> None:
        """The rows of a batch do not change when the memory wraps around."""
        for stream in self.streams():
            memory = self.make_memory(stream)
            oracle = OracleMemory(self.capacity, self.num_envs)
            self._add_tick(memory, oracle, stream)
            ids, rows = self.sample(memory, self.num_envs)
            expected = oracle.gather(ids)
            for _ in range(self._count_ticks()):
                self._add_tick(memory, oracle, stream)
            for name, found in rows.items():
                assert_same_bits(found, getattr(expected, name))

    def _count_ticks(self) -> int:
        """Return a number of ticks after which every entry was overwritten."""
        return 2 * self.capacity // self.num_envs

    def _add_tick(self, memory: Any, oracle: OracleMemory, stream: Stream) -> None:
        step = stream.tick()
        self.add(memory, step)
        oracle.add(**step.arguments())

    def _compare(self, rows: dict[str, Any], oracle: OracleMemory, ids: NDArray[np.int64]) -> None:
        """Raise AssertionError if a row differs from what was added."""
        expected = oracle.gather(ids)
        for name, found in rows.items():
            assert_same_bits(found, getattr(expected, name))

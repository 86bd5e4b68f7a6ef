"""The rules of a memory, as a test class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.space_leaves import stored_space
from holdall.testing.oracle import OracleMemory, assert_same_bits
from holdall.testing.streams import LeafPlan, Mishaps, Stream, StreamStep


class MemoryContract:
    """The promises of a memory, compared with the oracle. For a memory of your own, or an adapter to a framework.

    Override `make_memory` and, if the framework has other names, `add` and `gather`.
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
        """Return fields of transitions by their names in `holdall.Batch`. Fields that are left out are not compared."""
        batch = memory.gather(ids)
        return {name: getattr(batch, name) for name in ("obs", "action", "reward", "next_obs")}

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
        """While the memory fills, and after it wrapped around."""
        for stream in self.streams():
            memory = self.make_memory(stream)
            oracle = OracleMemory(self.capacity, self.num_envs)
            for tick in range(2 * self.capacity // self.num_envs):
                step = stream.tick()
                self.add(memory, step)
                oracle.add(**step.arguments())
                if tick % 11 == 0:
                    ids = np.random.default_rng(tick).permutation(oracle.ids)
                    expected = oracle.gather(ids)
                    for name, rows in self.gather(memory, ids).items():
                        assert_same_bits(rows, getattr(expected, name))

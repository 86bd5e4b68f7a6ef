"""The rules of a drop-in for a framework's replay buffer, as a test class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from holdall.space_leaves import stored_space
from holdall.testing.oracle import assert_same_bits, map_leaves
from holdall.testing.streams import LeafPlan, Mishaps, Stream, StreamStep

_BATCH = 16
_TICKS_BETWEEN_DRAWS = 7


class ReplayContract:
    """The promises of a drop-in, compared with the buffer that it replaces.

    Both buffers are given the same steps and the same seeds, and must return the same batches, bit for bit. Override
    `make_buffers`, `add` and `sample` with calls of the framework's methods.
    """

    capacity = 60
    num_envs = 3

    def make_buffers(self, stream: Stream) -> tuple[Any, Any]:
        """Return two empty buffers of `capacity` transitions: the drop-in and the framework's own."""
        raise NotImplementedError("Override make_buffers, and return the drop-in and the buffer that it replaces.")

    def add(self, buffer: Any, step: StreamStep) -> None:
        """Add one step of every environment."""
        raise NotImplementedError("Override add, and call the method by which the framework adds a step.")

    def sample(self, buffer: Any, count: int, seed: int) -> dict[str, Any]:
        """Draw `count` transitions after seeding the generator. Return the fields of the batch by name."""
        raise NotImplementedError("Override sample, and return the fields of a batch.")

    def streams(self) -> Iterator[Stream]:
        """Yield streams of frame stacks, images and vectors, with ends, silent resets and foreign next observations."""
        mishaps = Mishaps(ends=0.2, silent_resets=0.1, skipped_steps=0.1, foreign_next=0.1)
        stacked = [LeafPlan(axis=0, padding="first", content="table")]
        for shape, dtype, plans in (((4, 12, 12), "u1", stacked), ((9, 8, 3), "u1", []), ((5,), "f4", [])):
            space = stored_space(shape, np.dtype(dtype))
            yield Stream(space, stored_space((2,), np.dtype("f4")), self.num_envs, plans=plans, mishaps=mishaps)

    def test_one_seed_draws_the_rows_of_the_frameworks_buffer(self) -> None:
        """Batches are compared while the buffers fill and after they wrapped around."""
        for stream in self.streams():
            dropped_in, original = self.make_buffers(stream)
            for tick in range(self._count_ticks()):
                self._add_tick(dropped_in, original, stream)
                if tick % _TICKS_BETWEEN_DRAWS == 0:
                    self._require_same_batches(dropped_in, original, seed=tick)

    def test_a_batch_belongs_to_the_caller(self) -> None:
        """The rows of a batch do not change when the buffer wraps around."""
        for stream in self.streams():
            dropped_in, original = self.make_buffers(stream)
            self._add_tick(dropped_in, original, stream)
            batch = self.sample(dropped_in, _BATCH, seed=1)
            expected = copy.deepcopy(batch)
            for _ in range(self._count_ticks()):
                self._add_tick(dropped_in, original, stream)
            assert_same_bits(batch, expected)

    def test_added_arrays_stay_the_callers(self) -> None:
        """Changing the arrays after `add` changes no transition."""
        for stream in self.streams():
            dropped_in, original = self.make_buffers(stream)
            for _ in range(_TICKS_BETWEEN_DRAWS):
                step = stream.tick()
                self.add(original, copy.deepcopy(step))
                self.add(dropped_in, step)
                map_leaves(_overwrite, step.arguments())
            self._require_same_batches(dropped_in, original, seed=2)

    def test_a_pickled_buffer_continues_as_the_frameworks_does(self) -> None:
        """Both restored buffers draw the same rows, also after one more step."""
        for stream in self.streams():
            buffers = self.make_buffers(stream)
            for _ in range(self._count_ticks()):
                self._add_tick(*buffers, stream)
            dropped_in, original = (pickle.loads(pickle.dumps(buffer)) for buffer in buffers)
            self._require_same_batches(dropped_in, original, seed=3)
            self._add_tick(dropped_in, original, stream)
            self._require_same_batches(dropped_in, original, seed=4)

    def _count_ticks(self) -> int:
        """Return a number of ticks after which every entry was overwritten."""
        return 2 * self.capacity // self.num_envs

    def _add_tick(self, dropped_in: Any, original: Any, stream: Stream) -> None:
        step = stream.tick()
        self.add(dropped_in, step)
        self.add(original, step)

    def _require_same_batches(self, dropped_in: Any, original: Any, seed: int) -> None:
        """Raise AssertionError if one seed gives other rows than the framework's buffer returns."""
        assert_same_bits(self.sample(dropped_in, _BATCH, seed), self.sample(original, _BATCH, seed))


def _overwrite(array: Any) -> Any:
    array[...] = 1
    return array

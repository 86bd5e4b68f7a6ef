"""A pickle has the state at the moment when pickling began."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall


class AddingFile(io.BytesIO):
    """A file during whose first large write another step is added."""

    def __init__(self, memory: holdall.ReplayMemory) -> None:
        super().__init__()
        self._memory = memory
        self._added = False

    def write(self, data: Any) -> int:
        if not self._added and memoryview(data).nbytes > 1_000:
            self._added = True
            add(self._memory, 6_000)
        return super().write(data)


def add(memory: holdall.ReplayMemory, number: int) -> None:
    row = np.full((1, *memory.schema.observation.leaves[0].shape), number % 251, np.uint8)
    flag = np.zeros(1, np.bool_)
    memory.add(row, np.zeros(1, np.int64), np.array([number], np.float32), row, flag, flag)


@pytest.mark.parametrize("shape", [(17,), (80, 80)], ids=["small", "large"])
def test_a_memory_that_is_added_to_while_it_is_pickled_is_restored_as_it_was_before(shape: tuple[int, ...]) -> None:
    memory = holdall.ReplayMemory(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2), capacity=5_000)
    for number in range(6_000):
        add(memory, number)
    file = AddingFile(memory)
    pickle.dump(memory, file, protocol=5)
    loaded = pickle.loads(file.getvalue())
    assert memory.next_id == 6_001
    assert (loaded.first_id, loaded.next_id) == (1_000, 6_000)
    batch = loaded.gather(np.arange(1_000, 6_000))
    assert batch.reward.tolist() == list(range(1_000, 6_000))
    assert (batch.obs.reshape(5_000, -1)[:, -1] == batch.reward.astype(int) % 251).all()

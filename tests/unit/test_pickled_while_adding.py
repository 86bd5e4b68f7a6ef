"""A pickle is of one moment, or none at all."""

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
        if not self._added and memoryview(data).nbytes > 100_000:
            self._added = True
            add(self._memory)
        return super().write(data)


def add(memory: holdall.ReplayMemory) -> None:
    row, flag = np.ones((1, 17), np.float32), np.zeros(1, np.bool_)
    memory.add(row, np.zeros(1, np.int64), np.zeros(1, np.float32), row, flag, flag)


def test_a_memory_that_is_added_to_while_it_is_pickled_is_refused() -> None:
    """What a load would give back is no state that the memory ever had."""
    memory = holdall.ReplayMemory(spaces.Box(-1, 1, (17,)), spaces.Discrete(2), capacity=5_000)
    for _ in range(5_000):
        add(memory)
    with pytest.raises(holdall.HoldallError, match="added to while it was pickled"):
        pickle.dump(memory, AddingFile(memory), protocol=5)
    assert len(pickle.loads(pickle.dumps(memory, protocol=5))) == 5_000

"""The object in place of a store: of a closed memory, and of the store on the host of a memory on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.errors import ArgumentError, ClosedError


def set_before_read(memory: ReplayMemory) -> None:
    memory.host_store.before_read = None


USES: dict[str, Callable[[ReplayMemory], Any]] = {
    "a method": lambda memory: memory.host_store.set_reward_dtype(np.dtype(np.float32)),
    "a property": lambda memory: memory.host_store.catalog,
    "an assignment": set_before_read,
    "len": lambda memory: len(memory.host_store),
}


def new_memory(**settings: Any) -> ReplayMemory:
    return ReplayMemory(spaces.Discrete(2), spaces.Discrete(2), 10, **settings)


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_memory_on_a_device_has_no_store_on_the_host(use: Callable[[ReplayMemory], Any]) -> None:
    pytest.importorskip("torch")
    memory = new_memory(store_device="cpu")
    with pytest.raises(ArgumentError, match="without store_device"):
        use(memory)


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_the_store_of_a_closed_memory_cannot_be_used(use: Callable[[ReplayMemory], Any]) -> None:
    memory = new_memory()
    use(memory)
    memory.close()
    with pytest.raises(ClosedError, match="The memory was closed"):
        use(memory)


def test_a_closed_memory_holds_nothing_and_can_be_closed_again() -> None:
    memory = new_memory()
    memory.add(0, 0, 0.0, 0, terminated=False, truncated=False)
    memory.close()
    assert memory.fill == 0
    assert memory.disk_bytes == 0
    memory.close()

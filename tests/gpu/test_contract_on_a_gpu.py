"""Memories and batches on a GPU follow the rules of the memory on the host."""

from __future__ import annotations

from typing import Any

import pytest

import holdall
from holdall.testing import MemoryContract, Stream

pytestmark = pytest.mark.gpu


class TestMemoryOnAGpu(MemoryContract):
    def make_memory(self, stream: Stream) -> Any:
        spaces = (stream.observation_space, stream.action_space)
        return holdall.ReplayMemory(*spaces, self.capacity, self.num_envs, store_device="cuda")


class TestBatchesOnAGpu(MemoryContract):
    def make_memory(self, stream: Stream) -> Any:
        spaces = (stream.observation_space, stream.action_space)
        return holdall.ReplayMemory(*spaces, self.capacity, self.num_envs, device="cuda")

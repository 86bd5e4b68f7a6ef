"""Memories and batches on a GPU follow the rules of the memory on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import holdall
from holdall.testing import MemoryContract, Stream
from holdall.testing.oracle import map_leaves
from holdall.testing.streams import StreamStep

pytestmark = pytest.mark.gpu


class TestMemoryOnAGpu(MemoryContract):
    def make_memory(self, stream: Stream) -> Any:
        spaces = (stream.observation_space, stream.action_space)
        return holdall.ReplayMemory(*spaces, self.capacity, self.num_envs, store_device="cuda")


class TestTensorsOnAGpu(TestMemoryOnAGpu):
    """The same, with tensors in place of arrays."""

    def add(self, memory: Any, step: StreamStep) -> None:
        given = {name: value for name, value in step.arguments().items() if value is not None}
        memory.add(**map_leaves(lambda array: torch.from_numpy(np.array(array)).to("cuda"), given))


class TestBatchesOnAGpu(MemoryContract):
    def make_memory(self, stream: Stream) -> Any:
        spaces = (stream.observation_space, stream.action_space)
        return holdall.ReplayMemory(*spaces, self.capacity, self.num_envs, device="cuda")

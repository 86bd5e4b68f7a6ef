"""Memories and batches on a GPU pass the contract of memories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from holdall.testing import ReplayMemoryContract
from holdall.testing.oracle import map_leaves
from holdall.testing.streams import StreamStep

pytestmark = pytest.mark.gpu


class TestMemoryOnAGpu(ReplayMemoryContract):
    def settings(self) -> Mapping[str, Any]:
        return {"store_device": "cuda"}


class TestTensorsOnAGpu(TestMemoryOnAGpu):
    """The arguments of `add` are tensors."""

    def add(self, memory: Any, step: StreamStep, valid: Any = None) -> None:
        memory.add(**to_tensors(step), valid=valid)

    def extend(self, memory: Any, steps: StreamStep) -> None:
        memory.extend(**to_tensors(steps))


class TestBatchesOnAGpu(ReplayMemoryContract):
    def settings(self) -> Mapping[str, Any]:
        return {"device": "cuda"}


def to_tensors(step: StreamStep) -> Any:
    """Return the arguments of `add` as tensors on the GPU."""
    return map_leaves(lambda array: torch.from_numpy(np.array(array)).to("cuda"), step.arguments())

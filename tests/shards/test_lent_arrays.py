"""Batches that lie in Ray's object store: the caller's own, as those that were copied."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.batch import Batch
from holdall.cluster import lent_arrays
from holdall.ray import ReplayMemory

SPACE = spaces.Box(0, 255, (48, 48, 3), np.uint8)
FRAMES = np.random.default_rng(0).integers(0, 256, (400, 1, 48, 48, 3), dtype=np.uint8)


def require_right(batch: Batch) -> None:
    numbers = np.asarray(batch.reward).astype(int)
    assert np.array_equal(batch.obs, FRAMES[numbers, 0])
    assert np.array_equal(batch.next_obs, FRAMES[numbers - 1, 0])


def is_lent(batch: Batch) -> bool:
    lender: Any = batch.obs
    while isinstance(lender, np.ndarray):
        lender = lender.base
    return isinstance(lender, lent_arrays._Lender)


@pytest.mark.usefixtures("cluster")
def test_a_batch_of_the_object_store_belongs_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    no, numbers = np.zeros((400, 1), np.bool_), np.arange(400, dtype=np.float32)[:, None]
    with ReplayMemory(SPACE, spaces.Discrete(2), 1_000, shards=1, seed=0) as memory:
        memory.extend(FRAMES, no.astype(np.int64), numbers, np.roll(FRAMES, 1, axis=0), no, no)
        first, second = memory.sample(64), memory.sample(64)
        assert is_lent(first) == is_lent(second) == bool(lent_arrays._shared_for_writing())
        require_right(first)
        first.obs[:] = 7
        first.next_obs[:] = 9
        require_right(second)
        kept = [memory.sample(64) for _ in range(12)]
        assert not is_lent(kept[-1])  # who keeps many gets copies, so that the store does not fill up
        del kept, first
        gc.collect()
        assert is_lent(memory.sample(64)) == is_lent(second)
        with memory.loader(64, prefetch=2) as loader:
            for _ in range(5):
                require_right(next(loader))
        monkeypatch.setattr(lent_arrays, "_shared_for_writing", list)
        memory._deliverer._store = lent_arrays.LentArrays()
        copied = memory.sample(64)
        assert not is_lent(copied)
        require_right(copied)
    require_right(second)  # also when the shards are gone

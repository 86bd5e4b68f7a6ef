"""ArrayPool: memory of freed arrays is used again, and never while something refers to it."""

from __future__ import annotations

import numpy as np
import pytest

from holdall._native import ArrayPool

MIB = 1 << 20


def test_memory_is_used_again_once_no_view_refers_to_it() -> None:
    """A view keeps the memory as an array does."""
    pool = ArrayPool(64 * MIB)
    array = pool.empty((MIB,), np.uint8)
    address = array.ctypes.data
    view = array[5:10]
    del array
    assert pool.kept_bytes == 0
    assert pool.empty((MIB,), np.uint8).ctypes.data != address
    del view
    addresses = {pool.empty((MIB,), np.uint8).ctypes.data for _ in range(2)}
    assert address in addresses or pool.kept_bytes >= 2 * MIB


def test_arrays_have_shape_dtype_and_alignment() -> None:
    """The rule also holds for empty arrays and for arrays without axes."""
    pool = ArrayPool(MIB)
    for shape in [(3, 4, 5), (0, 7), (), (1000, 1000)]:
        array = pool.empty(shape, np.float32)
        assert array.shape == shape
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0
        array[...] = 1.0


def test_no_more_than_the_limit_is_kept() -> None:
    """The oldest memory is freed first, so memory of sizes that are no longer used does not stay."""
    pool = ArrayPool(4 * MIB)
    for size in range(1, 60):
        pool.empty((size * MIB // 16,), np.uint8)
        assert pool.kept_bytes <= 4 * MIB
    pool.clear()
    pool.empty((MIB,), np.uint8)
    assert MIB <= pool.kept_bytes < MIB + 4096
    for size in range(1, 40):
        pool.empty((size * 1000,), np.uint8)
    assert pool.kept_bytes < MIB
    pool.clear()
    assert pool.kept_bytes == 0


def test_arrays_outlive_the_pool() -> None:
    """The memory is freed with the last array."""
    pool = ArrayPool(MIB)
    array = pool.empty((1000,), np.int64)
    array[...] = 7
    del pool
    assert array.sum() == 7000


@pytest.mark.parametrize(("shape", "dtype"), [((-1,), "u1"), ((2**40, 2**40), "u1"), ((2,), "O")])
def test_impossible_arrays_are_refused(shape: tuple[int, ...], dtype: str) -> None:
    """The refusal comes before memory is reserved."""
    with pytest.raises((ValueError, TypeError)):
        ArrayPool(0).empty(shape, dtype)

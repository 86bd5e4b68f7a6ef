"""Memory that costs nothing until it is written to."""

import numpy as np
import pytest

from holdall.storage.blocks import reserve
from holdall.storage.slices import as_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5 * 2**20])
def test_reserved_memory_is_zeroed_writable_and_as_long_as_asked(nbytes: int) -> None:
    """Any size can be asked for, none among them."""
    block = reserve(nbytes)
    assert block.shape == (nbytes,)
    assert not block.any()
    block[:] = 7
    assert np.count_nonzero(block == 7) == nbytes


def test_a_view_keeps_reserved_memory_alive() -> None:
    """The last array that looks into it frees it, and none before."""
    view = reserve(1 << 20)[1000:1010]
    view[:] = 3
    blocks = [reserve(1 << 20) for _ in range(20)]
    for block in blocks:
        block[:] = 1
    assert view.tolist() == [3] * 10


def test_reserving_far_more_than_there_is_costs_nothing() -> None:
    """A capacity is address space; pages are taken when they are written to."""
    block = reserve(1 << 40)
    block[1 << 39] = 1
    assert block[1 << 39] == 1


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 0), (2, 3, 0), (2, 3, 4)], ids=str)
def test_arrays_are_seen_as_rows_of_bytes(shape: tuple[int, ...]) -> None:
    """One row per lane, in the array's own order of elements, whatever its layout in memory."""
    array = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    for laid_out in (array, np.asfortranarray(array)):
        rows = as_bytes(laid_out, 2)
        assert rows.shape == (2, array[0].nbytes)
        assert rows.tobytes() == array.tobytes()


def test_a_contiguous_array_is_not_copied() -> None:
    """The usual case costs nothing."""
    array = np.zeros((2, 3), "f4")
    assert np.shares_memory(as_bytes(array, 2), array)

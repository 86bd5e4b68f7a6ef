"""Memory that costs nothing until it is written to."""

import numpy as np
import pytest

from holdall.experience.slices import reserve


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

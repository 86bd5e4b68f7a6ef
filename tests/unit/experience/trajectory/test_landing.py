"""Landing: minibatches belong to the caller; large blocks go between updates, small ones stay."""

from __future__ import annotations

import numpy as np
import torch

from holdall.delivery.to_device import MinibatchDelivery
from holdall.schema import Array, Leaf

LEAVES = [
    Leaf("a", (3,), np.dtype(np.float32)),
    Leaf("b", (), np.dtype(np.bool_)),
    Leaf("c", (5, 5), np.dtype(np.uint8)),
]


def landed(landing: MinibatchDelivery, rows: int, value: int) -> list[torch.Tensor]:
    def fill(first: int, end: int, out: Array) -> None:
        assert (first, end) == (0, rows)
        out[...] = value

    return landing.land(rows, [(leaf, fill) for leaf in LEAVES])


def test_fields_have_their_dtypes_and_shapes_and_begin_where_torchs_own_would() -> None:
    tensors = landed(MinibatchDelivery("cpu", LEAVES), 7, 1)
    assert [tuple(tensor.shape) for tensor in tensors] == [(7, 3), (7,), (7, 5, 5)]
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.bool, torch.uint8]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_a_minibatch_that_is_held_is_not_written_to() -> None:
    landing = MinibatchDelivery("cpu", LEAVES)
    held = [landed(landing, 5_000, value) for value in range(8)]
    for value, tensors in enumerate(held):
        assert bool((tensors[2] == value).all())


def test_memory_is_used_again_once_it_was_let_go() -> None:
    landing = MinibatchDelivery("cpu", LEAVES)
    places = {landed(landing, 5_000, value)[0].data_ptr() for value in range(20)}
    assert len(places) <= 2


def test_only_large_blocks_go_between_updates() -> None:
    landing = MinibatchDelivery("cpu", LEAVES)
    landed(landing, 5_000, 1)
    kept = landing.nbytes
    landing.rest()
    assert landing.nbytes == kept > 0
    landed(landing, 2_000_000, 1)
    landing.rest()
    assert landing.nbytes == 0


def test_without_a_device_arrays_are_handed_over() -> None:
    landing = MinibatchDelivery(None, LEAVES)

    def fill(_first: int, _end: int, out: Array) -> None:
        out[...] = 0

    (array,) = landing.land(4, [(LEAVES[0], fill)])
    assert isinstance(array, np.ndarray)

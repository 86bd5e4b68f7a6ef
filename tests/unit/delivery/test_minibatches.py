"""Minibatches of rollouts: they have the requested rows, in memory that belongs to the caller."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdall.delivery.minibatches import DeviceMinibatches, Field, HostMinibatches, Minibatches, new_minibatches
from holdall.errors import ArgumentError
from holdall.schema import Leaf

LEAVES = [
    Leaf("frames", (3, 40), np.dtype(np.uint8)),
    Leaf("speed", (), np.dtype(np.float64)),
    Leaf("flag", (), np.dtype(np.bool_)),
    Leaf("nothing", (0,), np.dtype(np.float32)),
    Leaf("action", (2,), np.dtype(np.int64)),
]
ROWS = 500


def make_arrays() -> list[NDArray[Any]]:
    generator = np.random.default_rng(0)
    arrays = []
    for leaf in LEAVES:
        content = generator.integers(0, 2, (ROWS, leaf.nbytes), np.uint8)
        arrays.append(content.view(leaf.dtype).reshape(ROWS, *leaf.shape))
    return arrays


def gather_rows(rows: NDArray[Any], places: NDArray[np.int64], out: NDArray[Any]) -> None:
    out[...] = rows[places]


def make_fields(arrays: list[NDArray[Any]]) -> list[Field]:
    return [Field(leaf, partial(gather_rows, rows)) for leaf, rows in zip(LEAVES, arrays, strict=True)]


MAKERS: dict[str, Any] = {
    "arrays": lambda: HostMinibatches(as_tensors=False),
    "tensors": lambda: HostMinibatches(as_tensors=True),
    "one piece": lambda: DeviceMinibatches(torch.device("cpu"), LEAVES),
    "many pieces": lambda: DeviceMinibatches(torch.device("cpu"), LEAVES, slot_bytes=700),
    "pieces of one row": lambda: DeviceMinibatches(torch.device("cpu"), LEAVES, slot_bytes=1),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("count", [0, 1, 7, 256])
def test_every_field_has_the_rows_at_the_places(name: str, count: int) -> None:
    """Shapes and dtypes are those of the leaves."""
    maker: Minibatches = MAKERS[name]()
    arrays = make_arrays()
    places = np.random.default_rng(count).integers(0, ROWS, count)
    delivered = maker.deliver(places, make_fields(arrays))
    for got, rows in zip(delivered, arrays, strict=True):
        array = np.asarray(got)
        assert array.dtype == rows.dtype
        assert array.shape == (count, *rows.shape[1:])
        assert array.tobytes() == rows[places].tobytes()
        assert isinstance(got, torch.Tensor) == maker.gives_tensors


@pytest.mark.parametrize("name", MAKERS)
def test_a_minibatch_does_not_change_while_others_are_made(name: str) -> None:
    """Its memory is reused only when nothing refers to it."""
    maker: Minibatches = MAKERS[name]()
    arrays = make_arrays()
    kept = []
    for seed in range(20):
        places = np.random.default_rng(seed).integers(0, ROWS, 64)
        delivered = maker.deliver(places, make_fields(arrays))
        if seed % 3 == 0:
            kept.append((places, delivered[0]))
        del delivered
    for places, frames in kept:
        assert np.asarray(frames).tobytes() == arrays[0][places].tobytes()


def test_large_memory_is_released_between_rollouts() -> None:
    """Minibatches of one rollout reuse it. It is free while the next rollout is collected."""
    maker = HostMinibatches(as_tensors=False)
    field = Field(Leaf("", (1 << 20,), np.dtype(np.uint8)), lambda _, out: out.fill(1))
    for _ in range(3):
        maker.deliver(np.arange(100), [field])
        assert 100 << 20 <= maker.nbytes < 110 << 20
    maker.release()
    assert maker.nbytes == 0


def test_a_device_or_dtype_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ArgumentError, match="device \\(abacus\\)"):
        new_minibatches("abacus", LEAVES)
    with pytest.raises(ArgumentError, match="torch has no dtype for wide"):
        new_minibatches("cpu", [Leaf("wide", (2,), np.dtype(np.longdouble))])
    assert not new_minibatches(None, LEAVES).gives_tensors

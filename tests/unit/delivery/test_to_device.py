"""Minibatches on their way: they belong to the caller; large blocks go between updates, small ones stay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdall.delivery import to_device
from holdall.delivery.batches import Delivery
from holdall.delivery.device import DeviceStream
from holdall.delivery.to_device import CopySpan, DeviceCopier, Gather, MinibatchDelivery
from holdall.schema import Array, Leaf

LEAVES = [
    Leaf("a", (3,), np.dtype(np.float32)),
    Leaf("b", (), np.dtype(np.bool_)),
    Leaf("c", (5, 5), np.dtype(np.uint8)),
]


def delivered(delivery: MinibatchDelivery, rows: int, value: int) -> list[torch.Tensor]:
    def gather(places: NDArray[np.int64], out: Array) -> None:
        assert len(places) == rows
        out[...] = value

    return delivery.deliver(np.arange(rows), [(leaf, gather) for leaf in LEAVES])


def test_fields_have_their_dtypes_and_shapes_and_begin_where_torchs_own_would() -> None:
    tensors = delivered(MinibatchDelivery("cpu", LEAVES), 7, 1)
    assert [tuple(tensor.shape) for tensor in tensors] == [(7, 3), (7,), (7, 5, 5)]
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.bool, torch.uint8]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_a_minibatch_that_is_held_is_not_written_to() -> None:
    delivery = MinibatchDelivery("cpu", LEAVES)
    held = [delivered(delivery, 5_000, value) for value in range(8)]
    for value, tensors in enumerate(held):
        assert bool((tensors[2] == value).all())


def test_memory_is_used_again_once_it_was_let_go() -> None:
    delivery = MinibatchDelivery("cpu", LEAVES)
    places = {delivered(delivery, 5_000, value)[0].data_ptr() for value in range(20)}
    assert len(places) <= 2


def test_only_large_blocks_go_between_updates() -> None:
    delivery = MinibatchDelivery("cpu", LEAVES)
    delivered(delivery, 5_000, 1)
    kept = delivery.nbytes
    delivery.release_large()
    assert delivery.nbytes == kept > 0
    delivered(delivery, 2_000_000, 1)
    delivery.release_large()
    assert delivery.nbytes == 0


def test_without_a_device_arrays_are_handed_over() -> None:
    delivery = MinibatchDelivery(None, LEAVES)

    def gather(_places: NDArray[np.int64], out: Array) -> None:
        out[...] = 0

    (array,) = delivery.deliver(np.arange(4), [(LEAVES[0], gather)])
    assert isinstance(array, np.ndarray)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the host go the way of a device, and note the events that it waits for."""
    waited: list[int] = []
    recorded = itertools.count()
    monkeypatch.setattr(Delivery, "is_remote", property(lambda self: self.torch_device is not None))
    monkeypatch.setattr(DeviceStream, "record_consumer", lambda self: next(recorded))
    monkeypatch.setattr(DeviceStream, "synchronize", lambda self, event: waited.append(event))
    return waited


@pytest.mark.parametrize("slot_bytes", [200, 4_096, 1 << 20])
def test_minibatches_go_through_pinned_slots_in_pieces(
    events: list[int], monkeypatch: pytest.MonkeyPatch, slot_bytes: int
) -> None:
    """Whatever the slot's size; a slot is filled again only after the copies from it."""
    monkeypatch.setattr(to_device, "SLOT_BYTES", slot_bytes)
    delivery = MinibatchDelivery("cpu", LEAVES)
    numbers = [np.arange(300 * int(np.prod(leaf.shape, dtype=int))).reshape(300, *leaf.shape) for leaf in LEAVES]
    rows = [array.astype(leaf.dtype) for array, leaf in zip(numbers, LEAVES, strict=True)]

    def gathering(array: Array) -> Gather:
        return lambda places, out: np.copyto(out, array[places])

    for seed in range(8):
        order = np.random.default_rng(seed).permutation(300)
        tensors = delivery.deliver(order, [(leaf, gathering(array)) for leaf, array in zip(LEAVES, rows, strict=True)])
        for tensor, array in zip(tensors, rows, strict=True):
            assert tensor.numpy().tobytes() == array[order].tobytes()
    assert delivery.nbytes <= 4 * slot_bytes
    assert events == list(range(len(events)))
    assert len(events) >= 4


class Launching(DeviceStream):
    """A device that is the host, and to which loops of C send."""

    launches_here = True


@pytest.mark.parametrize("slot_bytes", [7, 1_000, 1 << 16])
@pytest.mark.parametrize("stream", [DeviceStream, Launching])
def test_a_copier_puts_sources_where_they_belong(
    events: list[int], stream: type[DeviceStream], slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources that share a slot and sources that take many, with a gap between them that stays as it was."""
    monkeypatch.setattr(to_device, "_PIECE_BYTES", 300)
    monkeypatch.setattr("holdall.native.sending._BYTES_PER_THREAD", 500)
    copier = DeviceCopier(stream(torch), slot_bytes)
    target = torch.zeros(5_000, dtype=torch.uint8)
    spans = [CopySpan(10, 40), CopySpan(50, 3_000), CopySpan(3_050, 0), CopySpan(3_050, 800)]
    loads = copier.plan(target, spans)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        sources = [torch.randint(0, 256, (span.nbytes,), generator=generator, dtype=torch.uint8) for span in spans]
        copier.send(loads, sources)
        assert torch.equal(target[10:3_850], torch.cat(sources))
    assert not target[:10].any()
    assert not target[3_850:].any()
    assert events == list(range(len(events)))

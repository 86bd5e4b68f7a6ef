"""Batches on a device have the bits of batches of arrays. Tested on the CPU, and on CUDA if there is a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdall
from holdall.batch import Draw
from holdall.delivery import HostDelivery
from holdall.delivery.device import DeviceDelivery
from holdall.delivery.staging import Staging
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits
from holdall.testing.strategies import box

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SPACE = spaces.Dict(image=box((4, 12, 12), "u1"), state=box((3,), "f4"), nothing=box((0,), "f4"))
LANES = 2


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def feed(ticks: int = 150, **options: Any) -> holdall.ReplayMemory:
    extras: dict[str, spaces.Space[Any]] = {"hidden": box((2,), "f8")}
    stream = Stream(SPACE, spaces.Discrete(3), LANES, plans=[LeafPlan(axis=0), LeafPlan(), LeafPlan()], extras=extras)
    memory = holdall.ReplayMemory(SPACE, spaces.Discrete(3), 200, LANES, seed=4, extras=extras, **options)
    for _ in range(ticks):
        memory.add(**stream.tick().arguments())
    return memory


@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize(
    "sampler",
    [
        holdall.Uniform,
        lambda: holdall.NStep(3, 0.9),
        lambda: holdall.Sequence(4, burn_in=2),
        holdall.Prioritized,
    ],
    ids=["uniform", "n-step", "sequence", "prioritized"],
)
def test_batches_have_the_bits_of_arrays(device: str, sampler: Any, budget: str | None) -> None:
    with feed(sampler=sampler(), budget=budget) as memory:
        delivery = DeviceDelivery(memory.schema, device)
        expected = HostDelivery(memory.schema)
        for count in (1, 7, 64):
            draw = memory.batch_source.draw(count)
            view = memory.host_store.view()
            batch = delivery.deliver(draw, view)
            assert batch.obs["image"].device.type == device
            assert batch.weights.device.type == device
            assert isinstance(batch.ids, np.ndarray)
            assert_same_bits(batch, expected.deliver(draw, view))
        delivery.close()


def test_goals_are_relabelled_as_in_arrays(device: str) -> None:
    keys: dict[str, spaces.Space[Any]] = {
        name: box((2,), "f4") for name in ("observation", "achieved_goal", "desired_goal")
    }
    space = spaces.Dict(keys)
    sampler = holdall.Hindsight("future", 4, lambda achieved, goal, info: (achieved < goal)[:, 0] * 1.0)
    with holdall.ReplayMemory(space, spaces.Discrete(2), 60, 2, seed=3, sampler=sampler) as memory:
        stream = Stream(space, spaces.Discrete(2), 2)
        for _ in range(40):
            memory.add(**stream.tick().arguments())
        draw = memory.batch_source.draw(30)
        view = memory.host_store.view()
        assert_same_bits(
            DeviceDelivery(memory.schema, device).deliver(draw, view), HostDelivery(memory.schema).deliver(draw, view)
        )


def test_rows_are_read_into_given_memory() -> None:
    with feed() as memory:
        view = memory.host_store.view()
        ids = np.arange(view.first_id, view.first_id + 33)
        expected = view.read(ids, view.columns.batch_outputs)
        memory_of_64 = np.zeros(sum(array.nbytes + 64 for array in expected) + 64, np.uint8)
        into = memory_of_64[-memory_of_64.ctypes.data % 64 :]
        found = view.read(ids, view.columns.batch_outputs, into)
        start = 0
        for array, other in zip(found, expected, strict=True):
            assert array.ctypes.data - into.ctypes.data == start
            start += -(-array.nbytes // 64) * 64
            assert_same_bits(array, other)
        wrong: Any
        for wrong in (into[: start - 64], into[1:], into.view(np.int8)):
            with pytest.raises((holdall.DamageError, ValueError), match="into must be a writable array"):
                view.read(ids, view.columns.batch_outputs, wrong)


def test_a_batch_does_not_change_while_others_are_delivered(device: str) -> None:
    """A batch belongs to the caller."""
    with feed() as memory:
        delivery = DeviceDelivery(memory.schema, device)
        batches = [delivery.deliver(memory.batch_source.draw(16), memory.host_store.view()) for _ in range(12)]
        copies = [batch.obs["image"].clone() for batch in batches]
        for _ in range(20):
            delivery.deliver(memory.batch_source.draw(16), memory.host_store.view()).obs["image"].zero_()
        assert all(torch.equal(batch.obs["image"], copy) for batch, copy in zip(batches, copies, strict=True))


def test_prepared_batches_keep_their_rows_until_they_are_sent(device: str) -> None:
    """Others may be delivered before they are sent, and `start` may be called twice."""
    with feed() as memory:
        delivery = DeviceDelivery(memory.schema, device)
        expected = HostDelivery(memory.schema)
        view = memory.host_store.view()
        draws = [memory.batch_source.draw(16) for _ in range(9)]
        prepared = [delivery.prepare(draw, view) for draw in draws]
        others = [memory.batch_source.draw(32) for _ in range(9)]
        for other in others:
            assert_same_bits(delivery.deliver(other, view), expected.deliver(other, view))
        for _ in range(2):
            for batch in prepared[::2]:
                delivery.start(batch)
        for draw, batch in zip(draws, prepared, strict=True):
            assert_same_bits(delivery.receive(batch), expected.deliver(draw, view))


def test_pinned_memory_is_reused(device: str) -> None:
    """There are as many slots as batches waited at the same time, but at least three."""
    with feed() as memory:
        delivery = DeviceDelivery(memory.schema, device)
        view = memory.host_store.view()
        for _ in range(3):
            delivery.deliver(memory.batch_source.draw(16), view)
        before = delivery.pinned_bytes
        for _ in range(10):
            delivery.deliver(memory.batch_source.draw(16), view)
            assert delivery.pinned_bytes == before
        for _ in range(3):
            prepared = [delivery.prepare(memory.batch_source.draw(16), view) for _ in range(9)]
            for batch in prepared:
                delivery.receive(batch)
            assert delivery.pinned_bytes == 3 * before
        dropped = [delivery.prepare(memory.batch_source.draw(16), view) for _ in range(9)]
        del prepared, batch, dropped
        assert delivery.pinned_bytes == 0


def test_a_batch_without_room_on_the_device_names_its_size(device: str) -> None:
    """Later batches are complete."""

    class Full:
        """A view whose rows do not fit into the memory of the device."""

        def read(self, *_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        read_windows = read

    with feed() as memory:
        delivery = DeviceDelivery(memory.schema, device)
        view = memory.host_store.view()
        draw = memory.batch_source.draw(16)
        with pytest.raises(holdall.ArgumentError, match=rf"^batch_size \(16\) needs more memory than {device}"):
            delivery.deliver(draw, Full())
        assert_same_bits(delivery.deliver(draw, view), HostDelivery(memory.schema).deliver(draw, view))


def test_a_row_that_was_evicted_is_refused(device: str) -> None:
    with feed() as memory:
        delivery = DeviceDelivery(memory.schema, device)
        draw = memory.batch_source.draw(4)
        memory.host_store.evict(memory.host_store.next_tick - 1)
        with pytest.raises(holdall.TransitionIdError):
            delivery.deliver(draw, memory.host_store.view())


@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize(
    ("shape", "dtype", "plan"),
    [
        ((4, 40, 40), "u1", LeafPlan(axis=0)),
        ((40, 40, 4), "u1", LeafPlan(axis=2)),
        ((50, 12), "f4", LeafPlan(axis=0)),
        ((30, 25, 2), "f8", LeafPlan(axis=1, step=5)),
    ],
    ids=["frames first", "frames last", "history", "columns"],
)
def test_windows_have_the_bits_of_arrays(
    device: str, shape: tuple[int, ...], dtype: str, plan: LeafPlan, budget: str | None
) -> None:
    """Windows are sent as slices, except for rows that were added before the window was found."""
    space = spaces.Dict(image=box(shape, dtype), state=box((3,), "f4"))
    mishaps = Mishaps(ends=0.1, silent_resets=0.02, skipped_steps=0.03, foreign_next=0.03)
    with holdall.ReplayMemory(space, spaces.Discrete(3), 4000, 2, seed=4, budget=budget) as memory:
        stream = Stream(space, spaces.Discrete(3), 2, plans=[plan, LeafPlan()], mishaps=mishaps)
        for _ in range(600):
            memory.add(**stream.tick().arguments())
        memory.store.wait_idle()
        view = memory.host_store.view()
        slices = view.read_windows(np.arange(900, 903), 0, np.empty(6 * 8 * int(np.prod(shape)), np.uint8))
        assert slices is not None
        delivery = DeviceDelivery(memory.schema, device)
        for ids in (np.arange(700, 1200), np.arange(1200), np.arange(1199, 1200), np.arange(0), *make_sequences(1200)):
            draw = Draw(ids, np.ones(len(ids), np.float32))
            assert_same_bits(delivery.deliver(draw, view), HostDelivery(memory.schema).deliver(draw, view))


def make_sequences(end: int) -> list[np.ndarray[Any, Any]]:
    """Return ids below `end` of sequences of steps of two lanes: forwards, with repeated steps, and in any order."""
    draw = np.random.default_rng(0)
    steps = draw.integers(0, end - 40, (30, 1)) + LANES * np.arange(20)
    return [steps, np.sort(np.concatenate([steps, steps[:, :7]], axis=1), axis=1), draw.permuted(steps, axis=1)]


def feed_images_and_stacks(budget: str | None, mishaps: Mishaps) -> holdall.ReplayMemory:
    space = spaces.Dict(image=box((3, 60, 60), "u1"), stack=box((4, 40, 40), "u1"))
    stream = Stream(space, spaces.Discrete(3), LANES, plans=[LeafPlan(), LeafPlan(axis=0)], mishaps=mishaps)
    memory = holdall.ReplayMemory(space, spaces.Discrete(3), 4000, LANES, seed=4, budget=budget)
    for _ in range(600):
        memory.add(**stream.tick().arguments())
    memory.store.wait_idle()
    return memory


@pytest.mark.parametrize("budget", ["auto", None])
def test_large_batches_of_sequences_have_the_bits_of_arrays(device: str, budget: str | None) -> None:
    """Images are sent as slices, too, because steps share them."""
    mishaps = Mishaps(ends=0.02, silent_resets=0.02, skipped_steps=0.02, foreign_next=0.02)
    with feed_images_and_stacks(budget, mishaps) as memory:
        view = memory.host_store.view()
        delivery = DeviceDelivery(memory.schema, device)
        for ids in make_sequences(1200):
            draw = Draw(np.concatenate([ids, ids]), np.ones(2 * len(ids), np.float32))
            assert_same_bits(delivery.deliver(draw, view), HostDelivery(memory.schema).deliver(draw, view))


@pytest.mark.parametrize("budget", ["auto", None])
def test_steps_of_a_sequence_share_slices(budget: str | None) -> None:
    """Repeated steps share them, too. Observations of one slice are read as slices only if the caller asks for it."""
    with feed_images_and_stacks(budget, Mishaps(ends=0)) as memory:
        view = memory.host_store.view()
        for first in range(600, 608):
            steps = first + LANES * np.sort(np.append(np.arange(10), [0, 4, 4]))
            into = np.empty(2 * len(steps) * 3 * 60 * 60, np.uint8)
            assert view.read_windows(steps, 0, into) is None
            for leaf, expected in ((0, 10 + 1), (1, 10 + 4)):
                found = view.read_windows(steps, leaf, into, True)
                assert found is not None
                assert found.slice_count == expected


def test_batches_larger_than_a_piece_have_the_bits_of_arrays(device: str) -> None:
    """Large rows are sent in several pieces, and small rows share one."""
    space = spaces.Dict(image=box((3, 60, 60), "u1"), state=box((3,), "f4"))
    with holdall.ReplayMemory(space, spaces.Discrete(3), 400, 2, seed=4, sampler=holdall.NStep(2, 0.9)) as memory:
        stream = Stream(space, spaces.Discrete(3), 2)
        for _ in range(150):
            memory.add(**stream.tick().arguments())
        delivery = DeviceDelivery(memory.schema, device)
        for draw in (memory.batch_source.draw(3_000), memory.batch_source.draw(3_001)):
            view = memory.host_store.view()
            assert_same_bits(delivery.deliver(draw, view), HostDelivery(memory.schema).deliver(draw, view))


@pytest.mark.parametrize("slot_bytes", [1_000, 1 << 20])
def test_arrays_of_any_size_and_dtype_reach_the_device(device: str, slot_bytes: int) -> None:
    """A piece has several arrays, or a part of one. Arrays may change once `send` has returned."""
    draw = np.random.default_rng(0)
    staging = Staging(torch.device(device), slot_bytes)
    for _ in range(5):
        arrays: list[Any] = [
            draw.integers(0, 2, (17, 3)).astype(dtype) for dtype in ("?", "u1", "u2", "u4", "u8", "i2", "f2", "f8")
        ]
        arrays += [np.zeros((0, 4), np.float32), draw.standard_normal((50, 7)), np.asfortranarray(arrays[0])]
        arrays.append(draw.integers(0, 9, 5).astype(np.int64)[::2])
        expected = [array.copy() for array in arrays]
        sent = staging.send(arrays)
        for array in arrays:
            array[...] = 0
        for tensor, array in zip(sent, expected, strict=True):
            assert tensor.device.type == device
            assert_same_bits(tensor, array)

"""Memories of the host whose rows are kept on a device, too: their batches have the bits of those in arrays.

On the CPU torch does the loops; on a CUDA device kernels do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from holdall import ArgumentError, Hindsight, NStep, Prioritized, ReplayMemory, Sequence, TransitionIdError
from holdall.delivery import device_mirror
from holdall.delivery.device_mirror import MirroredBatches
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits
from holdall.testing.strategies import box

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CAMERA = spaces.Dict(image=box((4, 20, 20), "u1"), state=box((7,), "f4"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name a device; rows are kept there, whatever it is."""
    monkeypatch.setattr(MirroredBatches, "device_types", {"cpu", "cuda"})
    return str(request.param)


class Pair:
    """Two memories that are fed alike: one in arrays, one on a device."""

    def __init__(self, device: str, lanes: int = 2, sampler: Any = None, space: Any = CAMERA, **options: Any) -> None:
        self.stream = Stream(
            space, spaces.Discrete(3), lanes, plans=[LeafPlan(axis=0, padding="first")],
            mishaps=Mishaps(ends=0.05, skipped_steps=0.02, foreign_next=0.02), extras={"log_prob": box((2,), "f4")},
        )  # fmt: skip
        self.arrays, self.there = (
            ReplayMemory(
                space, spaces.Discrete(3), 60 * lanes, lanes, seed=3, extras=self.stream.extras,
                sampler=sampler and sampler(), **options, **how,
            )
            for how in [dict[str, Any](), dict[str, Any](store_device=device)]
        )  # fmt: skip

    def add(self, ticks: int = 1, **more: Any) -> None:
        for _ in range(ticks):
            step = self.stream.tick().arguments() | more
            self.arrays.add(**step)
            self.there.add(**step)

    def check(self, rows: int = 20) -> None:
        batch = self.there.sample(rows)
        assert isinstance(batch.reward, torch.Tensor)
        assert_same_bits(batch, self.arrays.sample(rows))
        batches: Any = self.there._batches
        assert batches._writer is not None, "the rows are not on the device"
        assert batches._writer.next_tick == self.there.next_id // self.there.num_envs


@pytest.mark.parametrize("lanes", [1, 5])
@pytest.mark.parametrize("budget", ["auto", None])
def test_batches_follow_a_memory_that_grows_and_evicts(device: str, lanes: int, budget: Any) -> None:
    pair = Pair(device, lanes, budget=budget)
    pair.add(30)
    for ticks in (1, 1, 2, 20, 1, 45, 3):
        pair.add(ticks)
        pair.check()
        ids = np.arange(pair.there.first_id, pair.there.next_id)
        assert_same_bits(pair.there.gather(ids), pair.arrays.gather(ids))


def test_ticks_that_left_before_they_were_sent_are_passed_over(device: str) -> None:
    pair = Pair(device)
    pair.add(25)
    for ticks in (100, 61, 200, 5):
        pair.add(ticks)
        pair.check()


def test_ticks_are_sent_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_mirror, "_SENT_AT_ONCE_BYTES", 10_000)
    pair = Pair(device)
    for ticks in (37, 59):
        pair.add(ticks)
        pair.check()


@pytest.mark.parametrize(
    "sampler",
    [lambda: NStep(3, 0.9), lambda: Sequence(6, 3), Prioritized, lambda: Sequence(5, by=Prioritized())],
    ids=["n-step", "sequence", "prioritized", "prioritized sequence"],
)
def test_every_sampler_goes_the_same_way(device: str, sampler: Any) -> None:
    pair = Pair(device, sampler=sampler)
    for ticks in (50, 30):
        pair.add(ticks)
        for _ in range(3):
            pair.check(16)


def test_hindsight_goes_the_same_way(device: str) -> None:
    space = spaces.Dict({name: box((3,), "f4") for name in ("achieved_goal", "desired_goal", "observation")})
    pair = Pair(device, 1, lambda: Hindsight("future", 4, lambda a, b, _: (a == b).all(-1).astype(np.float32)), space)
    pair.add(50)
    for _ in range(4):
        pair.check()


def test_lanes_that_made_no_transition_are_never_drawn(device: str) -> None:
    pair = Pair(device, 3)
    for _ in range(40):
        pair.add(valid=np.array([True, False, True]))
    for _ in range(5):
        pair.check()


def test_what_is_written_again_is_sent_again(device: str) -> None:
    """Extras by their ids, and flags, between batches and before the first one."""
    pair = Pair(device)
    pair.add(40)
    for turn in range(4):
        ids = np.array([3 + turn, 70, 9])
        for memory in (pair.arrays, pair.there):
            memory.update(ids, log_prob=np.full((3, 2), turn, np.float32))
            if turn % 2:
                memory.set_flags(ids, np.array([True, False, True]), np.array([False, True, False]))
        pair.check(60)
        pair.add(2)


def test_batches_of_a_loader_are_those_of_sample(device: str) -> None:
    pair = Pair(device)
    pair.add(50)
    with pair.there.loader(20, prefetch=2) as loader:
        kept = [(next(loader), pair.arrays.sample(20)) for _ in range(12)]
        for batch, expected in kept:
            assert_same_bits(batch, expected)


def test_a_memory_that_was_copied_or_saved_is_sent_again(device: str, tmp_path: Path) -> None:
    pair = Pair(device, budget=None)
    pair.add(80)
    pair.check()
    pair.there.save(tmp_path).result()
    pair.there = pickle.loads(pickle.dumps(pair.there))
    pair.check()
    loaded, arrays = (ReplayMemory.load(tmp_path, budget=None, store_device=where) for where in (device, None))
    for _ in range(2):
        assert_same_bits(loaded.sample(20), arrays.sample(20))


def test_ids_that_are_not_held_are_refused(device: str) -> None:
    pair = Pair(device)
    pair.add(80)
    pair.check()
    for ids in ([pair.there.next_id], [pair.there.first_id - 1], [-1]):
        with pytest.raises(TransitionIdError, match=str(ids[0])):
            pair.there.gather(ids)
    pair.check()


def test_where_rows_do_not_fit_batches_are_sent(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches are the same."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ArgumentError("too much")

    monkeypatch.setattr("holdall.delivery.device_rings.require_room", refuse)
    pair = Pair(device)
    for ticks in (30, 40):
        pair.add(ticks)
        assert_same_bits(pair.there.sample(20), pair.arrays.sample(20))
    assert isinstance(pair.there._batches, MirroredBatches)
    assert pair.there._batches._writer is None


def test_an_interrupt_while_rows_are_sent_loses_none(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a launch, and after one that was not counted yet."""
    pair = Pair(device)
    pair.add(30)
    pair.check()
    kind = type(pair.there._batches._rings.loops)  # type: ignore[attr-defined]
    write = kind.write_packed
    for launches_first in (False, True):
        calls: list[bool] = []

        def interrupted(
            self: Any, *given: Any, launches: bool = launches_first, calls: list[bool] = calls, **named: Any
        ) -> None:
            calls.append(launches)
            if launches or len(calls) > 1:
                write(self, *given, **named)
            if len(calls) == 1:
                raise KeyboardInterrupt

        pair.add(3)
        with monkeypatch.context() as patched:
            patched.setattr(kind, "write_packed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pair.there.gather([pair.there.first_id])
        pair.check(60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drawing_waits_for_nothing(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    pair = Pair("cuda")
    pair.add(59)
    for _ in range(20):
        pair.there.sample(30)
    pair.add()
    with no_waiting():
        for _ in range(4):
            pair.there.sample(30)

"""Frame stacks and sliding windows on a device: every slice is stored once, and every row comes back.

The oracle is a plain list. Episodes end in several lanes at once, steps are skipped, and some next observations are
unrelated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdall
from holdall.store.tuning import Tuning
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits
from holdall.testing.oracle import map_leaves
from holdall.testing.strategies import box

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPACES: dict[str, tuple[spaces.Space[Any], list[LeafPlan]]] = {
    "frames first": (box((4, 12, 12), "u1"), [LeafPlan(axis=0)]),
    "frames last": (box((9, 12, 4), "u1"), [LeafPlan(axis=2, padding="first")]),
    "colour frames last": (box((8, 5, 12), "u1"), [LeafPlan(axis=2, step=3, padding="first")]),
    "history": (box((5, 20), "f4"), [LeafPlan(axis=0)]),
    "flat history": (box((100,), "f4"), [LeafPlan(axis=0, step=20)]),
    "two of three": (
        spaces.Dict(far=box((3, 10, 10), "u1"), near=box((50, 3), "f4"), state=box((90,), "f4")),
        [LeafPlan(axis=0, padding="first"), LeafPlan(axis=None), LeafPlan(axis=None)],
    ),
    "never": (box((4, 12, 12), "u1"), [LeafPlan(axis=None)]),
    "no more": (box((4, 12, 12), "u1"), [LeafPlan(axis=0, later=LeafPlan(axis=None), later_from=20)]),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Pair:
    """A memory on a device, the oracle, and the stream that feeds both."""

    def __init__(
        self, device: str, name: str, lanes: int, ticks: int, *, ends: float = 0.1, seed: int = 0, **options: Any
    ) -> None:
        space, plans = SPACES[name]
        mishaps = Mishaps(ends=ends, silent_resets=0.02, skipped_steps=0.03, foreign_next=0.03)
        self.stream = Stream(space, spaces.Discrete(3), lanes, plans=plans, mishaps=mishaps, seed=seed)
        self.oracle = OracleMemory(ticks * lanes, lanes)
        self.device = device
        self.memory = holdall.ReplayMemory(
            space, spaces.Discrete(3), ticks * lanes, lanes, store_device=device, seed=1, **options
        )

    def send(self, arguments: dict[str, Any]) -> dict[str, Any]:
        def copy_to_device(array: Any) -> Any:
            return torch.from_numpy(np.array(array)).to(self.device)

        return {name: None if value is None else map_leaves(copy_to_device, value) for name, value in arguments.items()}

    def add(self, count: int = 1, *, extends: bool = False) -> None:
        if extends:
            steps = self.stream.ticks(count).arguments()
            self.oracle.extend(**steps)
            self.memory.extend(**self.send(steps))
            return
        for _ in range(count):
            step = self.stream.tick().arguments()
            self.memory.add(**self.send(step))
            self.oracle.add(**step)

    def check(self, memory: holdall.ReplayMemory | None = None) -> None:
        memory = memory or self.memory
        assert (memory.first_id, memory.next_id, len(memory)) == (
            self.oracle.first_id,
            self.oracle.next_id,
            len(self.oracle),
        )
        ids = self.oracle.ids
        assert_same(memory.gather(ids), self.oracle.gather(ids))


def assert_same(batch: Any, expected: Any) -> None:
    for field in ("obs", "next_obs", "action", "reward", "terminated", "truncated"):
        assert_same_bits(getattr(batch, field), getattr(expected, field))


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize(("lanes", "ticks"), [(1, 9), (40, 7), (3, 30)])
def test_every_row_comes_back(device: str, name: str, lanes: int, ticks: int) -> None:
    """The rule holds while the memory is filled, and after all of its slots were overwritten several times."""
    pair = Pair(device, name, lanes, ticks)
    for _ in range(70 if lanes < 40 else 30):
        pair.add()
        pair.check()


def test_lanes_that_end_together_keep_their_own_observations(device: str) -> None:
    """Nearly all lanes end in every tick. So few observations are shared, and the pool grows."""
    pair = Pair(device, "frames first", 16, 12, ends=0.95)
    for _ in range(40):
        pair.add()
    pair.check()


@pytest.mark.parametrize("name", ["frames first", "colour frames last", "history"])
def test_every_slice_is_stored_once(device: str, name: str) -> None:
    """For example, stacks of four frames take an eighth of the bytes of obs and next_obs in full."""
    pair = Pair(device, name, 32, 200, ends=0.0)
    pair.add(20)
    pair.check()
    field = pair.memory.report().fields[0]
    assert "window of" in field.finding
    space: Any = SPACES[name][0]
    count = {"frames first": 4, "colour frames last": 4, "history": 5}[name]
    two_copies = 2 * 200 * 32 * int(np.prod(space.shape)) * space.dtype.itemsize
    assert field.total_bytes < two_copies * (1 / (2 * count) + 0.12)


def test_observations_that_do_not_shift_are_stored_whole(device: str) -> None:
    pair = Pair(device, "never", 8, 90)
    pair.add(70)
    pair.check()
    assert "whole observations" in pair.memory.report().fields[0].finding


def test_a_window_is_found_after_a_screen_that_does_not_change_at_first(device: str) -> None:
    pair = Pair(device, "frames first", 2, 200, ends=0.0)
    still = pair.stream.tick().arguments()
    still["obs"][:] = 7
    still["next_obs"][:] = 7
    still |= {"terminated": np.zeros(2, np.bool_), "truncated": np.zeros(2, np.bool_)}
    for _ in range(20):
        pair.memory.add(**pair.send(still))
        pair.oracle.add(**still)
    pair.add(40)
    pair.check()
    assert "window of 4" in pair.memory.report().fields[0].finding


def test_extend_stores_windows_as_add_does(device: str) -> None:
    pair = Pair(device, "two of three", 4, 25)
    for count in (1, 12, 30):
        pair.add(count, extends=True)
        pair.check()
    assert "window of 3" in pair.memory.report().fields[0].finding


def test_the_newest_tick_has_its_own_next_observation(device: str) -> None:
    """No later tick contains that observation yet."""
    pair = Pair(device, "frames first", 6, 10, ends=0.3)
    for _ in range(25):
        pair.add()
        ids = np.arange(pair.memory.next_id - 6, pair.memory.next_id)
        assert_same(pair.memory.gather(ids), pair.oracle.gather(ids))


@pytest.mark.parametrize("sampler", [None, holdall.NStep(3, 0.9), holdall.Sequence(4), holdall.Prioritized()])
def test_every_sampler_reads_windows(device: str, sampler: Any) -> None:
    pair = Pair(device, "frames last", 5, 30, sampler=sampler)
    pair.add(50)
    batch: Any = pair.memory.sample(64)
    ids = batch.ids.cpu().numpy()
    assert_same_bits(batch.obs.flatten(0, ids.ndim - 1), pair.oracle.gather(ids.reshape(-1)).obs)


@pytest.mark.parametrize("steps", [1, 2, 9, 45])
@pytest.mark.parametrize("name", ["frames first", "two of three", "no more"])
def test_a_checkpoint_is_loaded_to_the_host_and_to_the_device(
    device: str, name: str, steps: int, tmp_path: Path
) -> None:
    pair = Pair(device, name, 4, 20)
    pair.add(steps)
    pair.memory.save(tmp_path).result()
    pair.check(holdall.ReplayMemory.load(tmp_path))
    loaded = holdall.ReplayMemory.load(tmp_path, store_device=device)
    pair.check(loaded)
    pair.memory = loaded
    for _ in range(30):
        pair.add()
        pair.check()


def test_a_budget_counts_slices_and_not_whole_observations(device: str) -> None:
    """A capacity that fits only as slices is accepted. The refusal of a larger capacity names one that fits."""
    pair = Pair(device, "frames first", 8, 500, budget="1200KiB")
    pair.add(70)
    pair.check()
    pair = Pair(device, "frames first", 8, 2_000, budget="1200KiB")
    with pytest.raises(holdall.ArgumentError, match=r"capacity=\d+ fits") as refused:
        pair.add(70)
    pair.check()
    fitting = int(str(refused.value).split("capacity=")[1].split()[0])
    assert fitting > 8 * 500
    pair = Pair(device, "frames first", 8, fitting // 8, budget="1200KiB")
    pair.add(3)
    pair.check()


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_interrupted_add_writes_the_whole_tick_or_nothing(step: int, interrupt_at_line: Any) -> None:
    """The interrupt comes at each line in turn, or at some lines. The tick is the one that applies the windows."""
    for line in itertools.count(0, step):
        pair = Pair("cpu", "frames first", 3, 6, ends=0.4)
        pair.add(4)
        tick = pair.stream.tick().arguments()
        is_interrupted = interrupt_at_line(line, partial(pair.memory.add, **pair.send(tick)))
        if pair.memory.next_id == 15:
            pair.oracle.add(**tick)
        pair.check()
        pair.add(4)
        pair.check()
        if not is_interrupted:
            assert line > 20
            return


@on_cuda
def test_adding_and_drawing_never_wait(
    forbid_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    pair = Pair("cuda", "frames first", 64, 20)
    pair.add(30)
    steps = [pair.stream.tick().arguments() for _ in range(10)]
    there = [pair.send(step) for step in steps]
    pair.memory.sample(32)
    with forbid_waiting():
        for step in there:
            pair.memory.add(**step)
            pair.memory.sample(32)
    for step in steps:
        pair.oracle.add(**step)
    pair.check()


@on_cuda
def test_thousands_of_lanes_are_read_as_they_were_added() -> None:
    pair = Pair("cuda", "history", 4096, 12, ends=0.05)
    for _ in range(30):
        pair.add()
    ids = np.arange(pair.memory.first_id, pair.memory.next_id, 7)
    assert_same(pair.memory.gather(ids), pair.oracle.gather(ids))


@on_cuda
def test_a_cuda_graph_reads_the_windows_that_are_held_at_its_replay() -> None:
    pair = Pair("cuda", "frames first", 8, 20)
    pair.add(25)
    pair.memory.sample(64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch: Any = pair.memory.sample(64)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert_same(batch, pair.oracle.gather(batch.ids.cpu().numpy()))
        pair.add()
        torch.cuda.synchronize()


@pytest.mark.parametrize(("tiny_field_bytes", "is_window"), [(16, True), (1000, False)])
def test_the_search_for_windows_follows_the_tuning(device: str, tiny_field_bytes: int, is_window: bool) -> None:
    pair = Pair(device, "history", 2, 30, _tuning=Tuning(tiny_field_bytes=tiny_field_bytes))
    pair.add(40)
    (obs, *_) = pair.memory.report().fields
    assert ("window of" in obs.finding) is is_window

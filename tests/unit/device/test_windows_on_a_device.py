"""Frame stacks and sliding windows on a device: every slice is stored once, and every row comes back.

The oracle is a plain list. Episodes end in several lanes at once, steps are skipped, next observations are of nobody.
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


class Fed:
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

    def there(self, arguments: dict[str, Any]) -> dict[str, Any]:
        def sent(array: Any) -> Any:
            return torch.from_numpy(np.array(array)).to(self.device)

        return {name: None if value is None else map_leaves(sent, value) for name, value in arguments.items()}

    def add(self, count: int = 1, *, extends: bool = False) -> None:
        if extends:
            steps = self.stream.ticks(count).arguments()
            self.oracle.extend(**steps)
            self.memory.extend(**self.there(steps))
            return
        for _ in range(count):
            step = self.stream.tick().arguments()
            self.memory.add(**self.there(step))
            self.oracle.add(**step)

    def check(self, memory: holdall.ReplayMemory | None = None) -> None:
        memory = memory or self.memory
        assert (memory.first_id, memory.next_id, len(memory)) == (
            self.oracle.first_id,
            self.oracle.next_id,
            len(self.oracle),
        )
        ids = self.oracle.ids
        same(memory.gather(ids), self.oracle.gather(ids))


def same(batch: Any, expected: Any) -> None:
    for field in ("obs", "next_obs", "action", "reward", "terminated", "truncated"):
        assert_same_bits(getattr(batch, field), getattr(expected, field))


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize(("lanes", "ticks"), [(1, 9), (40, 7), (3, 30)])
def test_every_row_comes_back(device: str, name: str, lanes: int, ticks: int) -> None:
    """While the ring is filled for the first time, and after it wrapped around again and again."""
    fed = Fed(device, name, lanes, ticks)
    for _ in range(70 if lanes < 40 else 30):
        fed.add()
        fed.check()


def test_lanes_that_end_together_keep_their_own_observations(device: str) -> None:
    """All of them, tick after tick: nothing continues, and the pool has to grow."""
    fed = Fed(device, "frames first", 16, 12, ends=0.95)
    for _ in range(40):
        fed.add()
    fed.check()


@pytest.mark.parametrize("name", ["frames first", "colour frames last", "history"])
def test_every_slice_is_stored_once(device: str, name: str) -> None:
    """A stack of four takes an eighth of what two copies of whole observations take."""
    fed = Fed(device, name, 32, 200, ends=0.0)
    fed.add(20)
    fed.check()
    field = fed.memory.report().fields[0]
    assert "window of" in field.finding
    space: Any = SPACES[name][0]
    count = {"frames first": 4, "colour frames last": 4, "history": 5}[name]
    two_copies = 2 * 200 * 32 * int(np.prod(space.shape)) * space.dtype.itemsize
    assert field.total_bytes < two_copies * (1 / (2 * count) + 0.12)


def test_observations_that_do_not_shift_are_stored_whole(device: str) -> None:
    fed = Fed(device, "never", 8, 90)
    fed.add(70)
    fed.check()
    assert "whole observations" in fed.memory.report().fields[0].finding


def test_a_screen_that_stands_still_at_first_hides_no_window(device: str) -> None:
    fed = Fed(device, "frames first", 2, 200, ends=0.0)
    still = fed.stream.tick().arguments()
    still["obs"][:] = 7
    still["next_obs"][:] = 7
    still |= {"terminated": np.zeros(2, np.bool_), "truncated": np.zeros(2, np.bool_)}
    for _ in range(20):
        fed.memory.add(**fed.there(still))
        fed.oracle.add(**still)
    fed.add(40)
    fed.check()
    assert "window of 4" in fed.memory.report().fields[0].finding


def test_steps_of_a_trajectory_are_kept_the_same_way(device: str) -> None:
    fed = Fed(device, "two of three", 4, 25)
    for count in (1, 12, 30):
        fed.add(count, extends=True)
        fed.check()
    assert "window of 3" in fed.memory.report().fields[0].finding


def test_the_newest_tick_shows_its_own_next_observation(device: str) -> None:
    """Which no tick has confirmed yet."""
    fed = Fed(device, "frames first", 6, 10, ends=0.3)
    for _ in range(25):
        fed.add()
        ids = np.arange(fed.memory.next_id - 6, fed.memory.next_id)
        same(fed.memory.gather(ids), fed.oracle.gather(ids))


@pytest.mark.parametrize("sampler", [None, holdall.NStep(3, 0.9), holdall.Sequence(4), holdall.Prioritized()])
def test_every_sampler_reads_windows(device: str, sampler: Any) -> None:
    fed = Fed(device, "frames last", 5, 30, sampler=sampler)
    fed.add(50)
    batch: Any = fed.memory.sample(64)
    ids = batch.ids.cpu().numpy()
    assert_same_bits(batch.obs.flatten(0, ids.ndim - 1), fed.oracle.gather(ids.reshape(-1)).obs)


@pytest.mark.parametrize("steps", [1, 2, 9, 45])
@pytest.mark.parametrize("name", ["frames first", "two of three", "no more"])
def test_a_checkpoint_goes_to_the_host_and_back(device: str, name: str, steps: int, tmp_path: Path) -> None:
    fed = Fed(device, name, 4, 20)
    fed.add(steps)
    fed.memory.save(tmp_path).result()
    fed.check(holdall.ReplayMemory.load(tmp_path))
    loaded = holdall.ReplayMemory.load(tmp_path, store_device=device)
    fed.check(loaded)
    fed.memory = loaded
    for _ in range(30):
        fed.add()
        fed.check()


def test_a_budget_counts_slices_and_not_whole_observations(device: str) -> None:
    """What would not fit as whole observations fits as slices. Beyond that, the error names what fits."""
    fed = Fed(device, "frames first", 8, 500, budget="1200KiB")
    fed.add(70)
    fed.check()
    fed = Fed(device, "frames first", 8, 2_000, budget="1200KiB")
    with pytest.raises(holdall.ArgumentError, match=r"capacity=\d+ fits") as refused:
        fed.add(70)
    fed.check()
    fitting = int(str(refused.value).split("capacity=")[1].split()[0])
    assert fitting > 8 * 500
    fed = Fed(device, "frames first", 8, fitting // 8, budget="1200KiB")
    fed.add(3)
    fed.check()


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_interrupt_leaves_a_tick_written_or_not(step: int, interrupted: Any) -> None:
    """At every line in turn, or at some of them. The tick is the one with which the windows are applied."""
    for line in itertools.count(0, step):
        fed = Fed("cpu", "frames first", 3, 6, ends=0.4)
        fed.add(4)
        tick = fed.stream.tick().arguments()
        is_interrupted = interrupted(line, partial(fed.memory.add, **fed.there(tick)))
        if fed.memory.next_id == 15:
            fed.oracle.add(**tick)
        fed.check()
        fed.add(4)
        fed.check()
        if not is_interrupted:
            assert line > 20
            return


@on_cuda
def test_adding_and_drawing_wait_for_nothing(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    fed = Fed("cuda", "frames first", 64, 20)
    fed.add(30)
    steps = [fed.stream.tick().arguments() for _ in range(10)]
    there = [fed.there(step) for step in steps]
    fed.memory.sample(32)
    with no_waiting():
        for step in there:
            fed.memory.add(**step)
            fed.memory.sample(32)
    for step in steps:
        fed.oracle.add(**step)
    fed.check()


@on_cuda
def test_thousands_of_lanes_come_back() -> None:
    fed = Fed("cuda", "history", 4096, 12, ends=0.05)
    for _ in range(30):
        fed.add()
    ids = np.arange(fed.memory.first_id, fed.memory.next_id, 7)
    same(fed.memory.gather(ids), fed.oracle.gather(ids))


@on_cuda
def test_a_cuda_graph_reads_windows_as_they_are_at_its_replay() -> None:
    fed = Fed("cuda", "frames first", 8, 20)
    fed.add(25)
    fed.memory.sample(64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch: Any = fed.memory.sample(64)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        same(batch, fed.oracle.gather(batch.ids.cpu().numpy()))
        fed.add()
        torch.cuda.synchronize()

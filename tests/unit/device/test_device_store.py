"""Memories on a device: every row comes back, errors change nothing, and nothing waits for the device.

The rules are tested on the CPU, and on a CUDA device where there is one.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch._subclasses import FakeTensorMode

import holdall
from holdall.delivery.device import find_device
from holdall.device.arguments import TensorCheck
from holdall.sampling import Held
from holdall.schema import Schema
from holdall.testing.oracle import map_leaves

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class World:
    """Random steps of lanes whose episodes end at different times. `rows` is a plain list of all steps."""

    def __init__(
        self,
        device: str,
        lanes: int,
        shape: tuple[int, ...] = (5,),
        dtype: Any = np.float32,
        ends: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.device = device
        self.lanes = lanes
        self.ends = ends
        self.generator = np.random.default_rng(seed)
        low, high = (-9, 9) if dtype == np.float32 else (0, 255)
        self.space = spaces.Dict(
            {"image": spaces.Box(low, high, shape, dtype), "state": spaces.Box(-9, 9, (3,), np.float32)}
        )
        self.action = spaces.Box(-1, 1, (2,), np.float32)
        self.extras: dict[str, Any] = {"goal": spaces.Discrete(7)}
        self.rows: list[dict[str, Any]] = []
        self._obs = self._observation()

    def make_memory(self, ticks: int, **settings: Any) -> holdall.ReplayMemory:
        return holdall.ReplayMemory(
            self.space,
            self.action,
            ticks * self.lanes,
            self.lanes,
            seed=1,
            extras=self.extras,
            **{"store_device": self.device, **settings},
        )

    def _observation(self) -> dict[str, Any]:
        def draw_values(box: Any) -> Any:
            return self.generator.integers(0, 200, (self.lanes, *box.shape)).astype(box.dtype)

        return {name: draw_values(box) for name, box in self.space.spaces.items()}

    def step(self, *, some_invalid: bool = False, reward_dtype: str = "f4") -> dict[str, Any]:
        """Return the next step of all lanes, and record it in `rows`."""
        lanes = self.lanes
        draw = self.generator
        terminated = draw.random(lanes) < self.ends
        truncated = draw.random(lanes) < self.ends / 2
        row: dict[str, Any] = {
            "obs": self._obs,
            "action": draw.random((lanes, 2)).astype(np.float32),
            "reward": (100 * np.abs(draw.standard_normal(lanes))).astype(reward_dtype),
            "next_obs": self._observation(),
            "terminated": terminated,
            "truncated": truncated,
            "extras": {"goal": draw.integers(0, 7, lanes)},
            "valid": draw.random(lanes) > 0.2 if some_invalid else None,
        }
        first = self._observation()
        ended = terminated | truncated
        self._obs = {
            name: np.where(ended.reshape(-1, *[1] * (value.ndim - 1)), first[name], value)
            for name, value in row["next_obs"].items()
        }
        self.rows.append(row)
        return row

    def send(self, row: Any) -> Any:
        """Copy nested arrays to the device."""
        if isinstance(row, dict):
            return {name: self.send(value) for name, value in row.items()}
        return None if row is None else torch.from_numpy(np.ascontiguousarray(row)).to(self.device)

    def add(self, memory: holdall.ReplayMemory, **how: Any) -> None:
        memory.add(**self.send(self.step(**how)))

    def read_expected(self, field: str, ids: Any, key: str | None = None) -> Any:
        values = [self.rows[i // self.lanes][field] for i in ids]
        return np.stack([(v if key is None else v[key])[i % self.lanes] for v, i in zip(values, ids, strict=True)])

    def check(self, batch: holdall.Batch) -> None:
        """Compare every field of a plain batch with what was added."""
        ids = to_numpy(batch.ids).reshape(-1)
        for field in ("obs", "next_obs"):
            for key in self.space.spaces:
                assert_same(getattr(batch, field)[key], self.read_expected(field, ids, key))
        assert_same(batch.extras["goal"], self.read_expected("extras", ids, "goal"))
        for field in ("action", "reward", "terminated", "truncated"):
            assert_same(getattr(batch, field), self.read_expected(field, ids))

    def check_all(self, memory: holdall.ReplayMemory) -> None:
        held = [i for i in range(memory.first_id, memory.next_id) if self.is_valid(i)]
        assert len(memory) == len(held)
        self.check(memory.gather(np.array(held)))

    def is_valid(self, i: int) -> bool:
        valid = self.rows[i // self.lanes]["valid"]
        return valid is None or bool(valid[i % self.lanes])


def to_numpy(value: Any) -> Any:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def assert_same(got: Any, expected: Any) -> None:
    found = to_numpy(got)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("lanes", "ticks", "steps", "shape", "dtype", "ends"),
    [
        (1, 5, 40, (7,), np.float32, 0.1),
        (3, 4, 40, (40, 40, 3), np.uint8, 0.1),
        (17, 1, 12, (5,), np.uint8, 0.3),
        (64, 20, 60, (33,), np.float32, 0.4),
        (5, 33, 100, (16, 16, 3), np.uint8, 0.9),
        (2, 8, 30, (1,), np.uint8, 0.0),
    ],
)
def test_every_row_comes_back(
    device: str, lanes: int, ticks: int, steps: int, shape: tuple[int, ...], dtype: Any, ends: float
) -> None:
    world = World(device, lanes, shape, dtype, ends)
    memory = world.make_memory(ticks)
    for step in range(steps):
        world.add(memory, some_invalid=step % 3 == 1)
        if step % 7 == 0 or step == steps - 1:
            world.check_all(memory)
            world.check(memory.sample(1))


@pytest.mark.parametrize("dtype", ["f2", "f4", "i4", "u4", "f8"])
def test_rows_stay_when_observations_need_more_room(device: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """Long episodes are followed by episodes of one step, which share no observation. So the tensors are enlarged."""
    world = World(device, 3, ends=0.0)
    memory = world.make_memory(300)
    for _ in range(70):
        world.add(memory, reward_dtype=dtype)
    world.ends = 1.0
    caplog.set_level("INFO", "holdall")
    for _ in range(150):
        world.add(memory, reward_dtype=dtype)
    world.check_all(memory)
    assert "was enlarged" in caplog.text


def test_batches_are_tensors_on_the_device(device: str) -> None:
    world = World(device, 4)
    memory = world.make_memory(10)
    for _ in range(5):
        world.add(memory)
    batch = memory.sample(8)
    for tensor in (batch.obs["image"], batch.next_obs["state"], batch.action, batch.reward, batch.weights, batch.ids):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.device.type == device


def test_every_valid_transition_is_drawn_equally_often(device: str) -> None:
    world = World(device, 8)
    memory = world.make_memory(10)
    for _ in range(25):
        world.add(memory, some_invalid=True)
    held = [i for i in range(memory.first_id, memory.next_id) if world.is_valid(i)]
    ids = np.concatenate([to_numpy(memory.sample(64).ids) for _ in range(300)])
    counts = np.bincount(ids - memory.first_id, minlength=memory.next_id - memory.first_id)
    assert set(np.flatnonzero(counts) + memory.first_id) == set(held)
    expected = len(ids) / len(held)
    assert (((counts[np.array(held) - memory.first_id] - expected) ** 2) / expected).sum() < 2 * len(held)


def test_batches_share_no_memory(device: str) -> None:
    """A caller may write to every tensor of a batch."""
    world = World(device, 4)
    with world.make_memory(20) as memory:
        for _ in range(10):
            memory.add(**world.step())
        batches = [memory.sample(6) for _ in range(40)]
        for i, batch in enumerate(batches):
            assert torch.equal(batch.weights, torch.ones(6, device=device))
            batch.weights.fill_(i)
            batch.reward.fill_(i)
        for i, batch in enumerate(batches):
            assert torch.equal(batch.weights, torch.full((6,), float(i), device=device))
            assert torch.equal(batch.reward, torch.full((6,), float(i), device=device))


def test_one_seed_gives_one_sequence_of_batches(device: str) -> None:
    drawn = []
    for _ in range(2):
        world = World(device, 4)
        memory = world.make_memory(10)
        for _ in range(6):
            world.add(memory)
        drawn.append([to_numpy(memory.sample(16).ids).tolist() for _ in range(3)])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_extend_stores_the_rows_that_add_stores(device: str) -> None:
    world = World(device, 3)
    memory = world.make_memory(20)
    rows = [world.step() for _ in range(7)]

    def stack(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: stack([value[name] for value in values]) for name in values[0]}
        return None if values[0] is None else np.stack(values)

    memory.extend(**world.send(stack(rows)))
    world.check_all(memory)


def test_rows_that_are_not_contiguous_are_accepted(device: str) -> None:
    world = World(device, 4, (6,))
    memory = world.make_memory(5)
    for _ in range(8):
        row = world.send(world.step())
        for side in ("obs", "next_obs"):
            wide = torch.zeros((4, 12), device=device)
            wide[:, ::2] = row[side]["image"]
            row[side]["image"] = wide[:, ::2]
        memory.add(**row)
    world.check_all(memory)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_a_field_may_have_no_elements(device: str, dtype: Any, tmp_path: Path) -> None:
    """For example, a robot may lack a sensor. The field is saved and loaded, too."""
    world = World(device, 4, (0, 3), dtype)
    memory = world.make_memory(5)
    for _ in range(12):
        world.add(memory)
    world.check_all(memory)
    world.check(memory.sample(7))
    memory.save(tmp_path).result()
    world.check_all(holdall.ReplayMemory.load(tmp_path, store_device=device))


def test_returns_over_n_steps_are_those_of_the_host(device: str) -> None:
    world = World(device, 4, ends=0.2)
    memory = world.make_memory(12, sampler=holdall.NStep(3, 0.9))
    for _ in range(30):
        world.add(memory)
    check_returns(world, memory.sample(200), memory.next_id)


def check_returns(world: World, batch: Any, next_id: int) -> None:
    """Compare returns over 3 steps of 4 lanes with those of the plain list."""
    for i, first in enumerate(to_numpy(batch.ids)):
        total = np.float32(0)
        last = int(first)
        steps = 0
        for k in range(3):
            step = int(first) + 4 * k
            if step >= next_id:
                break
            last = step
            steps = k + 1
            row = world.rows[step // 4]
            term = row["reward"][step % 4] * np.float32(0.9**k)
            total = term if k == 0 else total + term
            if row["terminated"][step % 4] or row["truncated"][step % 4]:
                break
        assert to_numpy(batch.reward)[i] == total
        assert to_numpy(batch.discount)[i] == np.float32(0.9**steps)
        assert_same(batch.next_obs["image"][i], world.read_expected("next_obs", [last], "image")[0])
        assert to_numpy(batch.terminated)[i] == world.rows[last // 4]["terminated"][last % 4]


@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "f2", "f4", "f8"])
def test_returns_have_the_dtype_that_the_host_gives_them(device: str, dtype: str) -> None:
    """float32 has too few digits for whole numbers of 32 bits."""
    world = World(device, 2, ends=0.1)
    there = world.make_memory(12, sampler=holdall.NStep(3, 0.9))
    plain = world.make_memory(12, store_device=None, sampler=holdall.NStep(3, 0.9))
    for _ in range(12):
        row = world.step()
        row["reward"] = world.generator.integers(0, min(2**30, np.iinfo("i1").max ** np.dtype(dtype).itemsize), 2)
        row["reward"] = row["reward"].astype(dtype)
        there.add(**world.send(row))
        plain.add(**row)
    returns: dict[int, Any] = {}
    while len(returns) < 24:  # Until the host has drawn every row.
        drawn = plain.sample(24)
        returns |= dict(zip(drawn.ids.tolist(), drawn.reward, strict=True))
    batch = there.sample(24)
    expected = np.array([returns[i] for i in to_numpy(batch.ids).tolist()])
    assert expected.dtype == np.result_type(np.dtype(dtype), np.float32)
    assert_same(batch.reward, expected)


def test_sequences_stay_in_their_episode(device: str) -> None:
    world = World(device, 4, ends=0.2)
    memory = world.make_memory(12, sampler=holdall.Sequence(4, burn_in=2))
    for _ in range(30):
        world.add(memory)
    batch = memory.sample(100)
    ids = to_numpy(batch.ids)
    mask = to_numpy(batch.mask)
    assert ids.shape == mask.shape == (100, 6)
    assert mask[:, 2].all()
    for row in range(100):
        real = ids[row][mask[row]]
        assert (np.diff(real) == 4).all()
        for step in real[:-1]:
            assert not world.rows[step // 4]["terminated"][step % 4]
            assert not world.rows[step // 4]["truncated"][step % 4]
    world.check(memory.gather(ids.reshape(-1)))
    assert_same(batch.obs["image"].reshape(-1, 5), world.read_expected("obs", ids.reshape(-1), "image"))


def test_priorities_decide_how_often_a_row_is_drawn(device: str) -> None:
    world = World(device, 4)
    sampler = holdall.Prioritized(alpha=1.0, beta=1.0)
    memory = world.make_memory(10, sampler=sampler)
    for _ in range(10):
        world.add(memory)
    priorities = torch.arange(40, dtype=torch.float32, device=device)
    memory.update_priorities(torch.arange(40, device=device), priorities)
    memory.update_priorities(torch.tensor([3, 3], device=device), torch.tensor([1.0, 100.0], device=device))
    wanted = np.arange(40) + 1e-6
    wanted[3] = 100.0 + 1e-6
    drawn = [memory.sample(100) for _ in range(200)]
    counts = np.bincount(np.concatenate([to_numpy(batch.ids) for batch in drawn]), minlength=40)
    expected = wanted / wanted.sum() * counts.sum()
    assert (((counts - expected) ** 2) / expected)[1:].sum() < 80
    batch = drawn[0]
    share = wanted[to_numpy(batch.ids)]
    np.testing.assert_allclose(to_numpy(batch.weights), share.min() / share, rtol=1e-5)
    world.add(memory)  # New transitions have the highest priority.
    assert (to_numpy(memory.sample(400).ids) >= 40).sum() > 90


def test_a_draw_never_returns_a_slot_without_priority(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are rounded on a device, so a search may find a slot of priority 0, whose weight would be NaN."""
    world = World(device, 2)
    memory = world.make_memory(50, sampler=holdall.Prioritized())
    for _ in range(5):
        world.add(memory)
    memory.sample(1)
    search = torch.searchsorted

    def search_wrongly(*arguments: Any, **how: Any) -> Any:
        slots = search(*arguments, **how)
        slots[::3] = 77  # An unused slot.
        return slots

    monkeypatch.setattr(torch, "searchsorted", search_wrongly)
    batch = memory.sample(10)
    assert to_numpy(batch.ids).max() < 10
    assert to_numpy(batch.weights).tolist() == [1.0] * 10
    world.check(batch)


def test_a_nan_priority_is_refused_when_the_memory_is_saved(device: str, tmp_path: Any) -> None:
    world = World(device, 2)
    memory = world.make_memory(5, sampler=holdall.Prioritized())
    for _ in range(3):
        world.add(memory)
    memory.sample(2)
    memory.update_priorities(torch.tensor([1], device=device), torch.tensor([float("nan")], device=device))
    with pytest.raises(holdall.ArgumentError, match="priorities"):
        memory.save(tmp_path).result()
    memory.save(tmp_path).result()


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: holdall.Prioritized(1.0),
        lambda: holdall.NStep(2, 0.9, by=holdall.Prioritized(1.0)),
        lambda: holdall.Sequence(3, 1, by=holdall.Prioritized(1.0)),
    ],
    ids=["prioritized", "n-step", "sequence"],
)
def test_loaders_copies_and_checkpoints_have_the_priorities(device: str, sampler: Any, tmp_path: Path) -> None:
    """Only the device has the priorities of the last update."""
    world = World(device, 4)
    memory = world.make_memory(10, sampler=sampler())
    for _ in range(10):
        world.add(memory)
    first = partial(list_first_steps, sampler())
    memory.sample(3)
    memory.update_priorities(np.arange(40), np.where(np.arange(40) == 17, 1e9, 0.0))

    def check(each: holdall.ReplayMemory) -> None:
        with each.loader(20, prefetch=1) as loader:
            batch = next(loader)
        assert (
            set(first(batch.ids))
            == set(first(each.batch_source.draw(20).ids))
            == set(first(each.sample(20).ids))
            == {17}
        )
        assert_same(
            batch.obs["image"].reshape(-1, 5), world.read_expected("obs", to_numpy(batch.ids).reshape(-1), "image")
        )

    check(memory)
    check(pickle.loads(pickle.dumps(memory)))
    memory.update_priorities([17, 18], [0.0, 1e9])  # The next update does not reach the copy.
    copied = copy.deepcopy(memory)
    memory.update_priorities([17, 18], [1e9, 0.0])
    assert set(first(copied.sample(20).ids)) == {18}
    memory.save(tmp_path).result()
    check(holdall.ReplayMemory.load(tmp_path))
    check(holdall.ReplayMemory.load(tmp_path, store_device=device))


def list_first_steps(sampler: Any, ids: Any) -> list[int]:
    steps: list[int] = (to_numpy(ids)[:, sampler.burn_in] if to_numpy(ids).ndim > 1 else to_numpy(ids)).tolist()
    return steps


def test_an_invalid_entry_gets_no_priority(device: str, tmp_path: Path) -> None:
    """With a priority, it would be drawn."""
    world = World(device, 4)
    memory = world.make_memory(10, sampler=holdall.Prioritized(1.0))
    for _ in range(10):
        world.add(memory, some_invalid=True)
    memory.sample(1)
    memory.update_priorities(np.arange(40), np.where(np.arange(40) == 17, 5.0, 1.0))
    assert all(world.is_valid(i) for i in to_numpy(memory.sample(40).ids).tolist())
    with pytest.raises(holdall.ArgumentError, match=r"update_priorities ignored invalid entries.*valid=False"):
        memory.save(tmp_path).result()


@pytest.mark.parametrize("sampler", [None, holdall.Prioritized(), holdall.NStep(2, 0.9)])
def test_a_draw_from_a_memory_without_transitions_is_an_error(device: str, sampler: Any) -> None:
    """The sampler neither searches for ever nor returns an invalid entry."""
    world = World(device, 2)
    memory = world.make_memory(3, sampler=copy.deepcopy(sampler))
    with pytest.raises(holdall.ArgumentError, match="more than the 0 transitions held"):
        memory.sample(1)
    for valid in ([False, False], [True, False], [False, False], [False, False], [False, False]):
        world.step(some_invalid=True)["valid"] = np.array(valid)
        memory.add(**world.send(world.rows[-1]))
        if len(memory):
            assert to_numpy(memory.sample(1).ids).tolist() == [2]
        else:
            with pytest.raises(holdall.ArgumentError, match="more than the 0 transitions held"):
                memory.sample(1)


@pytest.mark.parametrize(
    ("ids", "priorities", "error", "message"),
    [
        ([0], [-1.0], holdall.ArgumentError, "priorities holds -1.0"),
        ([0], [np.nan], holdall.ArgumentError, "priorities holds nan"),
        ([0.5], [1.0], holdall.ArgumentError, "ids has shape"),
        ([-1], [1.0], holdall.TransitionIdError, "ids holds -1"),
        ([0, 1], [1.0], holdall.ArgumentError, "priorities has shape"),
    ],
)
def test_wrong_priorities_in_host_memory_are_refused_at_once(
    device: str, ids: Any, priorities: Any, error: Any, message: str
) -> None:
    """The check does not wait for the device. An empty array is accepted."""
    world = World(device, 2)
    memory = world.make_memory(5, sampler=holdall.Prioritized())
    world.add(memory)
    with pytest.raises(error, match=message):
        memory.update_priorities(ids, priorities)
    memory.update_priorities([], [])


def test_a_checkpoint_is_loaded_to_the_host_and_to_the_device(device: str, tmp_path: Any) -> None:
    world = World(device, 4, (40, 40, 3), np.uint8, ends=0.3)
    memory = world.make_memory(10)
    for step in range(27):
        world.add(memory, some_invalid=step > 20)
    memory.save(tmp_path).result()
    on_host = holdall.ReplayMemory.load(tmp_path)
    world.check_all(on_host)
    again = holdall.ReplayMemory.load(tmp_path, store_device=device)
    world.check_all(again)
    assert to_numpy(again.sample(16).ids).tolist() == to_numpy(memory.sample(16).ids).tolist()
    for _ in range(15):
        world.add(again)
    world.check_all(again)


def test_a_checkpoint_has_the_state_at_the_call_of_save(device: str, tmp_path: Any) -> None:
    world = World(device, 4, ends=0.3)
    memory = world.make_memory(300)
    for _ in range(450):
        world.add(memory)
    saved = memory.save(tmp_path)
    first = memory.first_id
    end = memory.next_id
    for _ in range(300):
        world.add(memory)
    saved.result()
    loaded = holdall.ReplayMemory.load(tmp_path)
    assert (loaded.first_id, loaded.next_id) == (first, end)
    world.check_all(loaded)


@pytest.mark.parametrize(
    ("argument", "change", "says"),
    [
        ("reward", lambda v: v.double(), "reward has dtype torch.float64"),
        ("action", lambda v: v[:, :1], r"action has shape \(4, 1\)"),
        ("terminated", lambda v: v.int(), "terminated has dtype"),
        ("obs", lambda v: {"image": v["image"]}, "state"),
        ("next_obs", lambda v: v | {"image": v["image"].half()}, "image"),
    ],
)
def test_a_wrong_argument_of_add_is_refused_and_nothing_changes(
    device: str, argument: str, change: Any, says: str
) -> None:
    world = World(device, 4)
    memory = world.make_memory(5)
    for _ in range(3):
        world.add(memory)
    row = world.send(world.step())
    with pytest.raises(holdall.ArgumentError, match=says):
        memory.add(**row | {argument: change(row[argument])})
    memory.add(**row)
    world.check_all(memory)


def test_the_refusal_of_an_image_says_how_to_pass_it(device: str) -> None:
    space = spaces.Box(0, 255, (3, 8, 9), np.uint8)
    memory = holdall.ReplayMemory(space, spaces.Discrete(2), 10, num_envs=2, store_device=device)
    flags = torch.zeros(2, dtype=torch.bool, device=device)
    image = torch.zeros((2, 3, 8, 9), dtype=torch.uint8, device=device)
    for wrong, advice in (
        (image.half(), r"declare the space with dtype float16, or .* multiply by 255"),
        (image.moveaxis(-3, -1), r"pass torch\.moveaxis\(value, -1, -3\)"),
    ):
        with pytest.raises(holdall.ArgumentError, match=advice):
            memory.add(wrong, flags.long(), flags.float(), image, flags, flags)


def test_arrays_of_the_host_and_tensors_can_be_added_in_turn(device: str) -> None:
    world = World(device, 4)
    memory = world.make_memory(7)
    for step in range(20):
        row = world.step(some_invalid=step % 5 == 4)
        memory.add(**(row if step % 2 else world.send(row)))
    world.check_all(memory)


def test_arrays_may_change_after_they_were_added(device: str) -> None:
    world = World(device, 4)
    memory = world.make_memory(7)
    for _ in range(10):
        row = copy.deepcopy(world.step())
        memory.add(**row)
        row["obs"]["image"][:] = 77
        row["reward"][:] = 77
    world.check_all(memory)


def test_one_lane_may_be_added_without_its_axis(device: str) -> None:
    world = World(device, 1)
    memory = world.make_memory(5)
    for step in range(8):
        row = world.step()
        row["valid"] = None
        given = world.send(row) if step % 2 else row

        def drop(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: drop(part) for name, part in value.items()}
            return None if value is None else value[0]

        memory.add(**drop(given))
    world.check_all(memory)


def test_a_budget_that_is_too_small_names_the_capacity_that_fits(device: str) -> None:
    world = World(device, 4, (40,))
    with pytest.raises(holdall.ArgumentError, match=r"capacity=\d+ fits") as refused:
        world.make_memory(3000, budget="1MiB")
    fitting = int(str(refused.value).split("capacity=")[1].split()[0])
    smaller = world.make_memory(fitting // 4, budget="1MiB")
    world.add(smaller)
    world.check_all(smaller)
    assert smaller.report().fields
    assert sum(field.total_bytes for field in smaller.report().fields) <= 2**20


def test_a_budget_that_is_too_small_for_one_tick_is_refused(device: str) -> None:
    with pytest.raises(holdall.ArgumentError, match=r"Even capacity=4 does not fit"):
        World(device, 4, (40,)).make_memory(3000, budget="1KiB")


def test_extras_can_be_rewritten(device: str, tmp_path: Path) -> None:
    """The rows are tensors on the device or arrays. A checkpoint has the rows that were written last."""
    world = World(device, 3)
    memory = world.make_memory(100)
    for _ in range(90):
        world.add(memory)
    for turn, ids in enumerate(([1, 5, 1], [200, 0, 200])):
        rows = np.array([4, 5, 6 - turn])
        memory.update(memory.gather(ids).ids, goal=world.send(rows) if turn else rows)
        for i, row in zip(ids, rows, strict=True):
            world.rows[i // 3]["extras"]["goal"][i % 3] = row
        world.check_all(memory)
        memory.save(tmp_path).result(60)
    before = memory.gather([1])
    with pytest.raises(holdall.ArgumentError, match=r"^goal has dtype torch.int32, expected torch.int64"):
        memory.update([1], goal=world.send(np.array([4], np.int32)))
    with pytest.raises(holdall.ArgumentError, match=r"^goal has shape \(2,\), expected \(1,\): one row per id, then"):
        memory.update([1], goal=world.send(np.array([4, 4])))
    with pytest.raises(holdall.TransitionIdError, match="ids holds 270"):
        memory.update([1, 270], goal=world.send(np.array([4, 4])))
    assert_same(before.extras["goal"], np.array([6]))
    world.check_all(memory)
    memory.close()
    with holdall.ReplayMemory.load(tmp_path, store_device=device) as loaded:
        world.check_all(loaded)


@pytest.mark.parametrize("shape", [(), (2, 2)])
@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i2", "f2", "f8"])
def test_extras_of_any_dtype_and_shape_can_be_rewritten(device: str, dtype: str, shape: tuple[int, ...]) -> None:
    world = World(device, 2)
    world.extras = {"goal": spaces.Box(0, 1, shape, np.dtype(dtype).type)}
    memory = world.make_memory(6)
    for t in range(4):
        step = world.step()
        step["extras"]["goal"] = np.full((2, *shape), t % 2, dtype)
        memory.add(**world.send(step))
    rows = np.arange(2 * int(np.prod(shape))).reshape(2, *shape) % 2
    rows = np.asfortranarray(rows.astype(dtype))
    memory.update([3, 6], goal=world.send(rows))
    memory.update([], goal=world.send(rows[:0]))
    for i, row in zip((3, 6), rows, strict=True):
        world.rows[i // 2]["extras"]["goal"][i % 2] = row
    world.check_all(memory)


def test_set_flags_changes_the_flags_of_its_ids(device: str) -> None:
    world = World(device, 3)
    memory = world.make_memory(6)
    for _ in range(4):
        world.add(memory)
    memory.set_flags([1, 5], [True, False], [False, True])
    world.rows[0]["terminated"][1] = True
    world.rows[0]["truncated"][1] = False
    world.rows[1]["terminated"][2] = False
    world.rows[1]["truncated"][2] = True
    world.check_all(memory)


@on_cuda
def test_adding_and_drawing_never_wait(
    forbid_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    world = World("cuda", 64, (33,))
    memory = world.make_memory(20)
    rows = [world.send(world.step()) for _ in range(40)]
    for row in rows[:30]:
        memory.add(**row)
    memory.sample(32)
    with forbid_waiting():
        for row in rows[30:]:
            memory.add(**row)
            batch = memory.sample(32)
    world.check(batch)
    world.check_all(memory)


def capture_sample(memory: holdall.ReplayMemory) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record a draw of 64 rows as a CUDA graph. Return the graph and the batch that every replay fills."""
    memory.sample(64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = memory.sample(64)
    return graph, batch


@on_cuda
def test_a_cuda_graph_draws_other_rows_at_every_replay() -> None:
    world = World("cuda", 8)
    memory = world.make_memory(20)
    for _ in range(25):
        world.add(memory)
    graph, batch = capture_sample(memory)
    seen = []
    for _ in range(5):
        graph.replay()
        world.check(batch)
        seen.append(to_numpy(batch.ids).tolist())
        world.add(memory)
        torch.cuda.synchronize()
    assert all(a != b for a, b in itertools.pairwise(seen))


@on_cuda
@pytest.mark.parametrize("sampler", [holdall.NStep(3, 0.9), holdall.Sequence(4, burn_in=2)], ids=["n-step", "sequence"])
def test_a_cuda_graph_can_contain_samplers_that_read_later_steps(sampler: Any) -> None:
    """Every replay reads the later steps that are held at that moment."""
    world = World("cuda", 4, ends=0.2)
    memory = world.make_memory(12, sampler=sampler)
    for _ in range(14):
        world.add(memory)
    graph, batch = capture_sample(memory)
    seen = []
    for _ in range(6):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(to_numpy(batch.ids).tolist())
        if batch.mask is None:
            check_returns(world, batch, memory.next_id)
        else:
            assert_same(
                batch.obs["image"].reshape(-1, 5), world.read_expected("obs", to_numpy(batch.ids).reshape(-1), "image")
            )
            assert (np.diff(to_numpy(batch.ids)[to_numpy(batch.mask).all(axis=1)]) == 4).all()
        assert to_numpy(batch.ids).min() >= memory.first_id
        world.add(memory)
    assert all(a != b for a, b in itertools.pairwise(seen))


@on_cuda
def test_streams_take_turns_in_the_order_of_the_calls() -> None:
    world = World("cuda", 256, (64,))
    memory = world.make_memory(10)
    rows = [world.send(world.step()) for _ in range(120)]
    streams: list[Any] = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    batches = []
    for i, row in enumerate(rows):
        with torch.cuda.stream(streams[i % 3]):
            memory.add(**row)
        with torch.cuda.stream(streams[(i + 1) % 3]):
            batches.append(memory.sample(128))
    torch.cuda.synchronize()
    for batch in batches:
        world.check(batch)
    world.check_all(memory)


@on_cuda
def test_the_refusal_of_a_capacity_beyond_the_device_names_one_that_fits() -> None:
    with pytest.raises(holdall.ArgumentError, match=r"capacity=\d+ fits"):
        World("cuda", 1024, (64,)).make_memory(2_000_000)
    world = World("cuda", 1024, (4096,))
    memory = world.make_memory(200_000)  # Whether it fits depends on windows, which the first steps show.

    def add_until_it_fails() -> None:
        for _ in range(100):
            world.add(memory)

    with pytest.raises(holdall.ArgumentError, match=r"capacity=\d+ fits"):
        add_until_it_fails()
    world.rows.pop()
    world.check_all(memory)


def test_an_interrupted_add_writes_the_whole_tick_or_nothing(interrupt_at_line: Any) -> None:
    """The interrupt comes at every seventh line, in turn."""
    for line in itertools.count(0, 7):
        world = World("cpu", 3, ends=0.4)
        memory = world.make_memory(4)
        for _ in range(7):
            world.add(memory)
        row = world.send(world.step())
        is_interrupted = interrupt_at_line(line, partial(memory.add, **row))
        if memory.next_id == 21:  # The tick was not written.
            world.rows.pop()
            world._obs = {name: to_numpy(value) for name, value in row["next_obs"].items()}
        world.check_all(memory)
        for _ in range(6):
            world.add(memory)
            world.check_all(memory)
        if not is_interrupted:
            assert line > 20
            return


def test_samplers_and_snapshots_have_the_flags_of_an_interrupted_set_flags(interrupt_at_line: Any) -> None:
    ids = np.arange(9, 99, 10)
    for line in itertools.count():
        sampler = holdall.Sequence(2, stride=50, by=holdall.Prioritized())  # It draws on the host.
        memory = holdall.ReplayMemory(
            spaces.Box(-9, 9, (3,)), spaces.Discrete(2), 1000, store_device="cpu", sampler=sampler, seed=0
        )
        shown = np.zeros((100, 1, 3), np.float32)
        never = np.zeros((100, 1), np.bool_)
        memory.extend(shown, np.zeros((100, 1), np.int64), np.zeros((100, 1), np.float32), shown, never, never)
        memory.sample(64)
        memory.store.snapshot()
        is_interrupted = interrupt_at_line(line, partial(memory.set_flags, ids, [True] * 9, [False] * 9))
        held = Held(memory.first_id, memory.next_id, 1, memory.capacity, memory.store.view())
        new = holdall.Sequence(2, stride=50, by=holdall.Prioritized())
        drawn = [each.draw(held, 200, np.random.default_rng(1)).ids.tolist() for each in (sampler, new)]
        assert drawn[0] == drawn[1], line
        copied = holdall.ReplayMemory(spaces.Box(-9, 9, (3,)), spaces.Discrete(2), 1000)
        copied.store.restore(memory.store.snapshot())
        every = np.arange(100)
        assert copied.gather(every).terminated.tolist() == memory.gather(every).terminated.tolist(), line
        copied.close()
        memory.close()
        if not is_interrupted:
            assert line > 10
            return


def test_use_of_a_closed_memory_is_refused_and_its_batches_stay(device: str) -> None:
    world = World(device, 2)
    memory = world.make_memory(4)
    world.add(memory)
    batch = memory.sample(2)
    memory.close()
    world.check(batch)
    for call in (lambda: memory.sample(1), lambda: memory.gather([0]), lambda: world.add(memory)):
        with pytest.raises(holdall.ClosedError, match="was closed"):
            call()


@pytest.mark.parametrize("argument", ["obs", "action", "reward", "next_obs", "terminated", "truncated", "extras"])
def test_a_tensor_on_another_device_is_refused(device: str, argument: str) -> None:
    world = World(device, 2)
    memory = world.make_memory(4)
    world.add(memory)
    row = world.send(world.step())
    elsewhere = map_leaves(lambda tensor: tensor.to("meta"), row[argument])
    with pytest.raises(holdall.ArgumentError, match=rf"^{argument}.* is on meta, but the memory is on {device}"):
        memory.add(**row | {argument: elsewhere})
    memory.add(**row)
    world.check_all(memory)


@pytest.mark.parametrize("name", ["cuda", "mps", "xpu", "cpu"])
def test_tensors_are_accepted_on_a_device_that_was_named_without_a_number(name: str) -> None:
    """torch calls their device "mps:0", which is not equal to "mps". Fake tensors need no such device."""
    box = spaces.Box(-1, 1, (3,), np.float32)
    with FakeTensorMode():
        device = find_device(name)
    check = TensorCheck(Schema.of(box, box, None, 2), device)
    with FakeTensorMode():
        rows = torch.zeros((2, 3), device=name)
        flags = torch.zeros(2, dtype=torch.bool, device=name)
        rewards = torch.zeros(2, device=name)
        step = check.check_tick(np.dtype(np.float32), (rows, rows, rewards, rows, flags, flags, None, None))
        assert step.obs[0] is rows


@pytest.mark.parametrize(
    ("owner", "operation"), [(torch, "rand"), (torch.Tensor, "index_select")], ids=["drawing", "reading"]
)
def test_a_batch_without_room_on_the_device_names_its_size(
    device: str, owner: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory can still be used."""

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory.")

    world = World(device, 2)
    memory = world.make_memory(4, sampler=holdall.Prioritized())
    world.add(memory)
    with monkeypatch.context() as patch:
        patch.setattr(owner, operation, fail)
        with pytest.raises(holdall.ArgumentError, match=rf"^batch_size \(3\) needs more memory than {device}"):
            memory.sample(3)
    world.check(memory.sample(3))


@on_cuda
def test_a_tensor_on_the_host_among_tensors_on_the_device_is_refused() -> None:
    world = World("cuda", 2)
    memory = world.make_memory(4)
    row = world.send(world.step())
    with pytest.raises(holdall.ArgumentError, match=r"action is on cpu, but the memory is on cuda:0"):
        memory.add(**row | {"action": row["action"].cpu()})


@pytest.mark.parametrize("stride", [1, 3])
def test_samplers_that_draw_on_the_host_read_the_device(device: str, stride: int) -> None:
    """Only sequences with a stride are drawn on the host."""
    world = World(device, 4, ends=0.2)
    memory = world.make_memory(20, sampler=holdall.Sequence(3, stride=stride))
    for _ in range(30):
        world.add(memory)
    batch = memory.sample(40)
    ids = to_numpy(batch.ids)
    assert_same(batch.obs["image"].reshape(-1, 5), world.read_expected("obs", ids.reshape(-1), "image"))


def test_goals_are_relabelled_as_on_the_host(device: str) -> None:
    keys: dict[str, spaces.Space[Any]] = {
        name: spaces.Box(-9, 9, (2,), np.float32) for name in ("observation", "achieved_goal", "desired_goal")
    }

    def make(where: str | None) -> holdall.ReplayMemory:
        sampler = holdall.Hindsight("future", 4, lambda achieved, goal, info: -np.abs(achieved - goal).sum(-1))
        return holdall.ReplayMemory(
            spaces.Dict(keys), spaces.Discrete(2), 60, 2, store_device=where, seed=3, sampler=sampler
        )

    draw = np.random.default_rng(0)
    there = make(device)
    plain = make(None)
    obs = {name: draw.standard_normal((2, 2)).astype(np.float32) for name in keys}
    for step in range(40):
        following = {name: draw.standard_normal((2, 2)).astype(np.float32) for name in keys}
        ended = np.array([step % 7 == 6, step % 5 == 4])
        for memory in (there, plain):
            memory.add(obs, np.zeros(2, np.int64), np.zeros(2), following, ended, np.zeros(2, np.bool_))
        obs = following
    for _ in range(3):
        batch = there.sample(30)
        expected = plain.sample(30)
        assert_same(batch.ids, expected.ids)
        assert_same(batch.reward, expected.reward)
        for name in keys:
            assert_same(batch.obs[name], expected.obs[name])
            assert_same(batch.next_obs[name], expected.next_obs[name])

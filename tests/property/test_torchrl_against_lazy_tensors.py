"""HoldallStorage has the elements of LazyTensorStorage: random TensorDicts, written in any order, read in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torchrl")

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement, SliceSampler

from holdall.torchrl import HoldallStorage

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
]
KEYS = ["pixels", "vector", ("agents", "observation"), ("agents", "deep", "state"), "action", "log_prob"]
SHAPES = [(), (1,), (3,), (2, 0), (4, 6, 6), (30,), (300,)]

leaves = st.tuples(
    st.sampled_from(KEYS), st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(["both", "now", "next"])
)
operations = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "add", "write", "slice", "patch", "patch", "key", "empty"]),
        st.integers(1, 30),
    ),
    max_size=8,
)


class Source:
    """Makes TensorDicts of one structure: streams whose next observation is the following one, and noise."""

    def __init__(self, structure: list[Any], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.structure = {key: (shape, dtype, where) for key, shape, dtype, where in structure}

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.from_numpy(self.rng.random(shape) < 0.5).reshape(shape)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        nbytes = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
        return torch.from_numpy(self.rng.integers(0, 256, nbytes).astype(np.uint8)).view(dtype).reshape(shape)

    def batch(self, time: int, others: tuple[int, ...]) -> TensorDictBase:
        """Return (time, others) transitions. In some keys, the next value is the following step's. Stacks shift."""
        data = TensorDict({}, batch_size=[time, *others])
        for key, (shape, dtype, where) in self.structure.items():
            path = (key,) if isinstance(key, str) else key
            now = self.random((time, *others, *shape), dtype)
            after = self.random((time, *others, *shape), dtype)
            if where == "both" and self.rng.random() < 0.7:
                if shape and shape[0] == 4:
                    frames = self.random((time + 4, *others, *shape[1:]), dtype)
                    stacks = torch.stack([frames[k : k + time + 1] for k in range(4)], dim=1 + len(others))
                    now = stacks[:-1].clone()
                    after = stacks[1:].clone()
                else:
                    now[1:] = after[:-1]
            if where != "next":
                data.set(path, now)
            if where != "now":
                data.set(("next", *path), after)
        done = torch.from_numpy(self.rng.random((time, *others, 1)) < 0.2)
        data.set(("next", "done"), done)
        data.set(("next", "terminated"), done.clone())
        data.set(("next", "reward"), self.random((time, *others, 1), torch.float32))
        return data


def require_same(held: TensorDictBase, wanted: TensorDictBase) -> None:
    """Compare keys, batch sizes, shapes, dtypes and bits."""
    assert held.batch_size == wanted.batch_size
    assert set(held.keys(include_nested=True)) == set(wanted.keys(include_nested=True))
    for key in wanted.keys(include_nested=True, leaves_only=True):
        one = held.get(key)
        other = wanted.get(key)
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device), key
        one, other = (tensor.clone().contiguous().unsqueeze(-1).view(torch.uint8) for tensor in (one, other))
        assert torch.equal(one, other), key


def run_on_each(buffers: list[Any], do: Callable[[Any], Any], seed: int = 0) -> list[Any]:
    """Call `do` with every buffer. Each call has the same random numbers."""
    results = []
    for buffer in buffers:
        torch.manual_seed(seed)
        results.append(do(buffer))
    return results


def operate(buffers: list[Any], source: Source, others: tuple[int, ...], name: str, count: int) -> None:
    """Perform the operation `name` on both buffers."""
    storage = buffers[0].storage
    held = len(storage)
    size = storage.max_size if not others else None
    if name == "extend":
        # A longer extend would write two rows to one position, and torch may keep either of them.
        data = source.batch(min(count, storage.max_size // max(sum(others), 1)), others)
        given = data.transpose(0, 1) if others else data
        run_on_each(buffers, lambda buffer: buffer.extend(given.clone()))
    elif name == "add" and not others:
        data = source.batch(1, others)[0]
        run_on_each(buffers, lambda buffer: buffer.add(data.clone()))
    elif name == "write" and held and size is not None:
        positions = torch.from_numpy(source.rng.permutation(held)[:count].copy())
        data = source.batch(len(positions), others)
        for buffer in buffers:
            buffer.storage[positions] = data.clone()
    elif name == "slice" and held and size is not None:
        end = min(count, held)
        data = source.batch(end, others)
        for buffer in buffers:
            buffer.storage[:end] = data.clone()
    elif name == "patch" and held:  # Some keys of some cells.
        cells = tuple(torch.from_numpy(source.rng.integers(0, along, count)) for along in storage.shape)
        if size is not None:
            cells = (torch.from_numpy(source.rng.permutation(held)[:count].copy()),)
        else:
            flat = np.unique(np.ravel_multi_index([part.numpy() for part in cells], storage.shape))
            cells = tuple(torch.from_numpy(part) for part in np.unravel_index(flat, storage.shape))
        data = source.batch(len(cells[0]), ())
        keys = list(data.keys(include_nested=True, leaves_only=True))
        data = data.select(*[key for key in keys if source.rng.random() < 0.5] or keys[:1])
        for buffer in buffers:
            buffer.storage[cells if len(cells) > 1 else cells[0]] = data.clone()
    elif name == "key" and held and size is not None:
        positions = torch.from_numpy(source.rng.permutation(held)[:count].copy())
        data = source.batch(len(positions), others)
        keys = list(data.keys(include_nested=True, leaves_only=True))
        key = keys[int(source.rng.integers(len(keys)))]
        for buffer in buffers:
            buffer.set_at_(key, data.get(key).clone(), positions)
    elif name == "empty":
        run_on_each(buffers, lambda buffer: buffer.empty())


def read_both(buffers: list[Any], source: Source, seed: int) -> None:
    """Compare all elements, some elements, one element and a sample of both storages."""
    ours, theirs = buffers
    assert len(ours) == len(theirs)
    if not len(theirs):
        return
    require_same(ours.storage[:], theirs.storage[:])
    along = theirs.storage.shape[0]
    index = torch.from_numpy(source.rng.integers(0, along, 7))
    require_same(ours.storage[index], theirs.storage[index])
    require_same(ours.storage[int(index[0])], theirs.storage[int(index[0])])
    require_same(*run_on_each(buffers, lambda buffer: buffer.sample(5), seed))


@given(
    structure=st.lists(leaves, min_size=1, max_size=4, unique_by=lambda leaf: str(leaf[0])),
    program=operations,
    others=st.sampled_from([(), (), (3,)]),
    size=st.sampled_from([7, 24, 61]),
    seed=st.integers(0, 2**32 - 1),
    make_sampler=st.sampled_from([RandomSampler, SamplerWithoutReplacement]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_position_has_the_element_that_was_written_last(
    structure: list[Any],
    program: list[tuple[str, int]],
    others: tuple[int, ...],
    size: int,
    seed: int,
    make_sampler: Callable[[], Any],
) -> None:
    source = Source(structure, seed)
    ndim = 1 + len(others)
    buffers = [
        ReplayBuffer(storage=storage(size, ndim=ndim), sampler=make_sampler(), batch_size=5)
        for storage in (HoldallStorage, LazyTensorStorage)
    ]
    for name, count in [("extend", 11), *program, ("extend", 5)]:
        operate(buffers, source, others, name, count)
        read_both(buffers, source, seed)


@pytest.mark.parametrize("key", [None, ("collector", "traj_ids")])
@pytest.mark.parametrize("others", [(), (3,)])
def test_slices_of_trajectories_are_those_of_lazy_tensors(key: Any, others: tuple[int, ...]) -> None:
    source = Source([("pixels", (4, 6, 6), torch.uint8, "both"), ("vector", (3,), torch.float32, "both")], 5)
    buffers = []
    for storage in (HoldallStorage, LazyTensorStorage):
        named = {"traj_key": key} if key else {"end_key": ("next", "done")}
        sampler = SliceSampler(slice_len=3, strict_length=False, **named)
        buffers.append(ReplayBuffer(storage=storage(60, ndim=1 + len(others)), sampler=sampler, batch_size=12))
    for round_ in range(9):
        data = source.batch(11, others)
        ends = data["next", "done"].long().cumsum(0)
        trajectories = (ends - data["next", "done"].long()).squeeze(-1) + 100 * round_
        data["collector", "traj_ids"] = trajectories
        given = data.transpose(0, 1) if others else data
        run_on_each(buffers, lambda buffer, given=given: buffer.extend(given.clone()))  # type: ignore[misc]  # The data of this round.
        require_same(*run_on_each(buffers, lambda buffer: buffer.sample(), round_))

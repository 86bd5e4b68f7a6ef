"""Batches on a GPU have the bits of batches of arrays, whichever streams and threads are used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdall
from holdall.testing import assert_same_bits

pytestmark = pytest.mark.gpu

OBSERVATIONS = spaces.Dict({"image": spaces.Box(0, 255, (4, 40, 40), np.uint8), "vector": spaces.Box(-1, 1, (9,))})


def fill_memory(device: str | None, budget: str | int | None = "auto", **how: Any) -> holdall.ReplayMemory:
    """Return a memory of frame stacks and vectors. They are the same in every call."""
    memory = holdall.ReplayMemory(
        OBSERVATIONS, spaces.Discrete(3), capacity=2_000, num_envs=2, device=device, budget=budget, seed=0, **how
    )
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 4, (1_004, 2, 40, 40), np.uint8)
    vectors = generator.standard_normal((1_001, 2, 9), np.float32)
    for t in range(1_000):
        obs, next_obs = (
            {"image": np.ascontiguousarray(frames[at : at + 4].swapaxes(0, 1)), "vector": vectors[at]}
            for at in (t, t + 1)
        )
        ended = generator.random((2, 2)) < 0.02
        reward = generator.standard_normal(2, np.float32)
        memory.add(obs, generator.integers(0, 3, 2), reward, next_obs, *ended)
    memory.store.wait_idle()
    return memory


@pytest.mark.parametrize("budget", ["auto", None])
def test_a_batch_on_the_gpu_has_the_bits_of_one_in_arrays(budget: str | None) -> None:
    """One seed gives the same draws in both memories. Every tensor is on the device."""
    with fill_memory("cuda", budget) as there, fill_memory(None, budget) as here:
        for _ in range(20):
            batch = there.sample(256)
            expected = here.sample(256)
            assert batch.obs["image"].is_cuda
            assert batch.reward.is_cuda
            assert batch.weights.is_cuda
            assert_same_bits(batch, expected)


def test_a_store_on_the_gpu_gives_the_same_bits() -> None:
    """The device draws other ids than the host."""
    with fill_memory(None, store_device="cuda") as there, fill_memory(None) as here:
        for _ in range(20):
            batch: Any = there.sample(256)
            ids = batch.ids.cpu().numpy()
            assert_same_bits(replace(batch, ids=ids), here.gather(ids))


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: holdall.NStep(3, 0.99),
        lambda: holdall.Sequence(8, 4),
        lambda: holdall.Sequence(8, by=holdall.Prioritized()),
    ],
    ids=["n-step", "sequences", "prioritized sequences"],
)
def test_every_sampler_gives_the_same_bits(sampler: Any) -> None:
    """The batches have two ids per row, two axes, masks or weights."""
    with fill_memory("cuda", sampler=sampler()) as there, fill_memory(None, sampler=sampler()) as here:
        for _ in range(5):
            assert_same_bits(there.sample(64), here.sample(64))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_gives_the_same_bits(prefetch: int) -> None:
    """The memory itself returns arrays."""
    with fill_memory(None) as memory, fill_memory(None) as same, memory.loader(128, prefetch, device="cuda") as loader:
        for _ in range(10):
            batch = next(loader)
            assert batch.obs["image"].is_cuda
            assert_same_bits(batch, same.sample(128))


def test_a_batch_is_not_overwritten_while_the_consumer_still_reads_it() -> None:
    """The test deletes the tensors before the device has executed the operations that read them."""
    with fill_memory("cuda") as memory, fill_memory(None) as here:
        big = torch.randn(4_096, 4_096, device="cuda")
        sums = []
        for _ in range(40):
            batch = memory.sample(256)
            for _ in range(3):
                big = torch.tanh(big @ big)  # The host continues before the device has finished.
            sums.append(batch.obs["image"].to(torch.int64).sum())
            del batch
        expected = [int(here.sample(256).obs["image"].astype(np.int64).sum()) for _ in range(40)]
        assert [int(total) for total in sums] == expected


def test_held_batches_do_not_change_while_others_are_drawn() -> None:
    """The rule holds for ten batches, and for a view of another one, while a hundred are drawn."""
    with fill_memory("cuda") as memory:
        held = [memory.sample(64) for _ in range(10)]
        view = memory.sample(64).next_obs["image"][3:9, 1:]
        copies = [batch.obs["image"].clone() for batch in held]
        view_copy = view.clone()
        for _ in range(100):
            memory.sample(64).obs["image"].zero_()
        assert all(torch.equal(batch.obs["image"], copy) for batch, copy in zip(held, copies, strict=True))
        assert torch.equal(view, view_copy)


def test_threads_that_never_used_the_device_get_batches() -> None:
    """Such a thread needs the context of the device first."""
    with (
        fill_memory("cuda") as memory,
        fill_memory(None) as here,
        ThreadPoolExecutor(1) as first,
        ThreadPoolExecutor(1) as second,
    ):
        for thread in (first, second, first, second):
            assert_same_bits(thread.submit(memory.sample, 64).result(), here.sample(64))


def test_a_consumer_on_another_stream_gets_batches() -> None:
    """Events order the consumer's stream and the stream of the copies."""
    own: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation.
    with fill_memory("cuda") as memory, fill_memory(None) as here, torch.cuda.stream(own):
        for _ in range(10):
            assert_same_bits(memory.sample(128), here.sample(128))


@pytest.mark.parametrize("budget", ["auto", 200_000_000])
def test_batches_outlive_a_memory_that_was_deleted(budget: Any) -> None:
    """Copies may not be complete when the last reference is deleted."""
    there = fill_memory("cuda", budget)
    here = fill_memory(None)
    batches = [there.sample(1_500) for _ in range(8)]
    del there
    # This would overwrite memory that was freed too early.
    torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True).fill_(7)
    for batch in batches:
        assert_same_bits(batch, here.sample(1_500))

"""A memory that was emptied, whose next id is not 0, is saved, loaded, copied and added to as any other.

Shards reach this state when all of their rows moved to another shard.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ArgumentError, NStep, Prioritized, ReplayMemory, Sequence, Uniform
from holdall.checkpoint import open_reader
from holdall.cleanrl import ReplayBuffer as CleanRLBuffer
from holdall.sampling import Sampler
from holdall.sb3 import PrioritizedReplayBuffer, ReplayBuffer
from holdall.testing import OracleMemory, assert_same_bits

LANES = 3
TICKS = 40
IMAGE = spaces.Box(0, 255, (80, 80), np.uint8)  # Too large for a ring buffer.
VECTOR = spaces.Box(-9, 9, (3,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {
    "small": VECTOR,
    "large": IMAGE,
    "both": spaces.Dict(image=IMAGE, vector=VECTOR),
}
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": Uniform,
    "prioritized": Prioritized,
    "n-step": lambda: NStep(3, 0.9),
    "sequence": lambda: Sequence(4),
}


def observe(fields: str, tick: int) -> Any:
    generator = np.random.default_rng(tick)
    image = generator.integers(0, 256, (LANES, 80, 80), np.uint8)
    vector = np.full((LANES, 3), tick, np.float32)
    return {"small": vector, "large": image, "both": {"image": image, "vector": vector}}[fields]


def feed(fields: str, first: int, count: int, *memories: Any) -> None:
    flags = np.zeros(LANES, np.bool_)
    for tick in range(first, first + count):
        reward = np.full(LANES, tick, np.float32)
        step = observe(fields, tick), np.zeros(LANES, np.int64), reward, observe(fields, tick + 1), flags, flags
        for memory in memories:
            memory.add(*step)


def make_memory(fields: str, sampler: Sampler) -> ReplayMemory:
    return ReplayMemory(SPACES[fields], spaces.Discrete(2), 200 * LANES, LANES, seed=0, sampler=sampler)


def make_emptied_memory(fields: str, sampler: Sampler, origin: str, folder: Path) -> ReplayMemory:
    """Return a memory whose transitions were all evicted: from an open, a loaded or an adopted segment."""
    memory = make_memory(fields, sampler)
    feed(fields, 0, TICKS, memory)
    if origin == "loaded":
        memory.save(folder).result()
        memory.close()
        memory = ReplayMemory.load(folder)
    elif origin == "adopted":
        source = memory
        memory = make_memory(fields, sampler)
        state = source.store.snapshot()
        assert state.reward_dtype is not None
        memory.host_store.set_reward_dtype(state.reward_dtype)
        for segment in state.segments:
            memory.host_store.adopt(segment)
        source.close()
    memory.host_store.evict(TICKS)
    assert (memory.first_id, memory.next_id) == (TICKS * LANES, TICKS * LANES)
    return memory


def check_empty(memory: ReplayMemory) -> None:
    assert len(memory) == 0
    assert (memory.first_id, memory.next_id) == (TICKS * LANES, TICKS * LANES)
    with pytest.raises(ArgumentError, match="0 transitions"):
        memory.sample(4)
    report = memory.report()
    assert report.transitions == 0
    assert report.plain_bytes == 0
    assert "nan" not in str(report)


def check_adds(memory: ReplayMemory, fields: str) -> None:
    """Check that added transitions get the next ids and are read as they were added."""
    oracle = OracleMemory(200 * LANES, LANES)
    feed(fields, 100, TICKS, memory, oracle)
    assert len(memory) == TICKS * LANES
    ids = oracle.ids + TICKS * LANES
    assert_same_bits(memory.gather(ids), replace(oracle.gather(oracle.ids), ids=ids))
    memory.sample(8)


CASES = [("uniform", fields, origin) for fields in SPACES for origin in ("filled", "loaded", "adopted")]
CASES += [(sampler, "both", "filled") for sampler in SAMPLERS if sampler != "uniform"]


@pytest.mark.parametrize(("sampler", "fields", "origin"), CASES)
def test_emptied_memories_and_their_copies_can_be_added_to(
    sampler: str, fields: str, origin: str, tmp_path: Path
) -> None:
    """The copies are a pickle, a copy, and a memory that was saved and loaded."""
    with make_emptied_memory(fields, SAMPLERS[sampler](), origin, tmp_path / "before") as memory:
        check_empty(memory)
        again: list[ReplayMemory] = [pickle.loads(pickle.dumps(memory)), copy.copy(memory)]
        memory.save(tmp_path / "run").result()
        again += [ReplayMemory.load(tmp_path / "run"), ReplayMemory.load(tmp_path / "run", recover=True)]
        for other in [memory, *again]:
            check_empty(other)
            check_adds(other, fields)
        for other in again:
            other.close()


@pytest.mark.parametrize("fields", SPACES)
def test_the_checkpoint_of_an_emptied_memory_names_no_segments(fields: str, tmp_path: Path) -> None:
    with make_emptied_memory(fields, Uniform(), "filled", tmp_path / "before") as memory:
        memory.save(tmp_path / "run").result()
    manifest = open_reader(tmp_path / "run").manifest(1)
    assert manifest.segments == ()
    assert (manifest.first_tick, manifest.next_tick) == (TICKS, TICKS)
    with ReplayMemory.load(tmp_path / "run", num_envs=2) as other:
        assert len(other) == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_emptied_memory_is_loaded_to_a_device(sampler: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with make_emptied_memory("small", SAMPLERS[sampler](), "filled", tmp_path / "before") as memory:
        memory.save(tmp_path / "run").result()
    with ReplayMemory.load(tmp_path / "run", device="cpu", store_device="cpu") as there:
        check_empty(there)


def add_to_buffer(fields: str, first: int, count: int, buffer: Any) -> None:
    for tick in range(first, first + count):
        rewards = np.full(LANES, tick, np.float32)
        done = np.zeros(LANES, np.bool_)
        action = np.zeros((LANES, 1), np.int64)
        buffer.add(observe(fields, tick), observe(fields, tick + 1), action, rewards, done, [{}] * LANES)


ADAPTERS: dict[str, Callable[[spaces.Space[Any]], Any]] = {
    "sb3": lambda space: ReplayBuffer(200 * LANES, space, spaces.Discrete(2), "cpu", LANES),
    "sb3 n-step": lambda space: ReplayBuffer(200 * LANES, space, spaces.Discrete(2), "cpu", LANES, n_steps=3),
    "sb3 prioritized": lambda space: PrioritizedReplayBuffer(200 * LANES, space, spaces.Discrete(2), "cpu", LANES),
    "sb3 alpha 0": lambda space: PrioritizedReplayBuffer(
        200 * LANES, space, spaces.Discrete(2), "cpu", LANES, alpha=0.0
    ),
    "cleanrl": lambda space: CleanRLBuffer(200 * LANES, space, spaces.Discrete(2), "cpu", LANES),
    "cleanrl optimized": lambda space: CleanRLBuffer(
        200 * LANES, space, spaces.Discrete(2), "cpu", LANES, optimize_memory_usage=True
    ),
}


@pytest.mark.parametrize("fields", ["small", "large"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_emptied_buffer_refuses_to_sample_until_steps_are_added(adapter: str, fields: str) -> None:
    buffer = ADAPTERS[adapter](SPACES[fields])
    add_to_buffer(fields, 0, TICKS, buffer)
    buffer.sample(8)
    buffer.memory.host_store.evict(TICKS)
    with pytest.raises(ArgumentError, match=r"Call add first|0 transitions (are )?held"):
        buffer.sample(8)
    add_to_buffer(fields, 100, 2, buffer)
    drawn = {int(reward) for _ in range(10) for reward in buffer.sample(16).rewards.flatten()}
    assert drawn == ({100, 101} if adapter != "sb3 n-step" else {101, 199})
    buffer.memory.close()

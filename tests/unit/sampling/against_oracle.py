"""A memory and an oracle with the same steps, for the tests of all samplers, and the oracle's sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import Batch, ReplayMemory
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream
from holdall.testing.oracle import ends, is_held, map_leaves, steps_from
from holdall.testing.strategies import box


def feed(
    sampler: Any,
    lanes: int = 3,
    ticks: int = 120,
    capacity: int = 240,
    valid_share: float = 1.0,
    ends: float = 0.1,
    reward_dtype: Any = np.float32,
    seed: int = 0,
    **options: Any,
) -> tuple[ReplayMemory, OracleMemory]:
    """Return a memory and an oracle with `ticks` ticks of frame stacks and a vector. Episodes end in every way."""
    space = spaces.Dict(image=box((4, 36, 36), "u1"), state=box((3,), "f4"))
    stream = Stream(
        space,
        spaces.Discrete(3),
        lanes,
        plans=[LeafPlan(axis=0), LeafPlan()],
        mishaps=Mishaps(ends=ends),
        extras={"log_prob": box((), "f4")},
        reward_dtype=reward_dtype,
        seed=seed,
    )
    memory = ReplayMemory(
        space, spaces.Discrete(3), capacity, lanes, seed=seed, extras=stream.extras, sampler=sampler, **options
    )
    oracle = OracleMemory(capacity, lanes)
    generator = np.random.default_rng(seed)
    for _ in range(ticks):
        given = stream.tick().arguments()
        if given["reward"].dtype.kind == "f":
            given["reward"] = np.nan_to_num(given["reward"], nan=1.0, posinf=2.0, neginf=-2.0).clip(-1e3, 1e3)
        if valid_share < 1:
            given["valid"] = generator.random(lanes) < valid_share
        memory.add(**given)
        oracle.add(**given)
    return memory, oracle


def build_sequences(
    oracle: OracleMemory, starts: NDArray[np.int64], length: int, burn_in: int = 0, crossing: bool = False
) -> Batch:
    """Return the batch of `Sequence(length, burn_in)` for the first steps `starts`. Weights are ones."""
    ids = []
    mask = []
    for start in starts.tolist():
        if crossing:
            steps = [start + oracle.num_envs * k for k in range(-burn_in, length)]
            real = [step if is_held(oracle, step) else None for step in steps]
        else:
            before = list_steps_before(oracle, start, burn_in)
            after = steps_from(oracle, start, length)
            real = [None] * (burn_in - len(before)) + before + after + [None] * (length - len(after))
        nearest = next(step for step in real if step is not None)
        for step in real:
            nearest = nearest if step is None else step
            ids.append(nearest)
            mask.append(step is not None)
    shape = (len(starts), burn_in + length)
    flat = oracle.gather(ids)
    names = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "extras", "ids")
    rows = {
        name: map_leaves(lambda array: array.reshape(*shape, *array.shape[1:]), getattr(flat, name)) for name in names
    }
    return Batch(**rows, weights=np.ones(len(starts), np.float32), mask=np.array(mask).reshape(shape))


def list_steps_before(oracle: OracleMemory, first: int, count: int) -> list[int]:
    """Return the steps before `first` in its episode, `count` at most, oldest first."""
    run: list[int] = []
    step = first - oracle.num_envs
    while len(run) < count and is_held(oracle, step) and not ends(oracle, step):
        run.insert(0, step)
        step -= oracle.num_envs
    return run

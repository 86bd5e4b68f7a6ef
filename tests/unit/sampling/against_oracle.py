"""A memory and its oracle, fed alike, for every sampler's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream
from holdall.testing.strategies import box


def fed(
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
    """Feed frame stacks and a vector whose episodes end in every way; `capacity` below the ticks wraps around."""
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

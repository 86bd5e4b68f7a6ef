"""The rows of a shard: their masses, with which a learner chooses the shard of every row of a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gymnasium import spaces

from holdall import NStep, Prioritized, Uniform
from holdall.sampling import Sampler
from holdall.schema import Schema

from .desk import Desk

CAPACITY = 20
SCHEMA = Schema.of(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), None, 1)


def add(desk: Desk, count: int) -> None:
    row = np.zeros((1, 3), np.float32)
    no = np.zeros(1, np.bool_)
    for _ in range(count):
        desk.add(row, np.zeros(1, np.int64), np.zeros(1, np.float32), row, no, no)
    desk.send()


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": Uniform,
    "prioritized": lambda: Prioritized(alpha=1.0),
    "n-step by priority": lambda: NStep(2, 0.9, by=Prioritized(alpha=1.0)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("added", [10, 50])
def test_accepted_rows_have_their_mass_at_once_and_evicted_rows_have_none(sampler: str, added: int) -> None:
    desk = Desk(SCHEMA, SAMPLERS[sampler](), CAPACITY, seed=0, segment_rows=5)
    assert desk.shard.mass == 0.0
    add(desk, added)
    assert desk.shard.mass == pytest.approx(min(added, CAPACITY), rel=1e-5)


def test_new_priorities_change_the_mass() -> None:
    desk = Desk(SCHEMA, Prioritized(alpha=1.0), CAPACITY, seed=0)
    add(desk, 10)
    desk.update_priorities([3, 4], np.array([5.0, 0.0]))
    assert desk.shard.mass == pytest.approx(8 + 5.0, rel=1e-5)

"""The table of samplers: it agrees with the classes, and it decides which draws are verified."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall import ArgumentError, Hindsight, Prioritized, ReplayMemory, TransitionIdError
from holdall.batch import Draw
from holdall.sampling import SAVED_SETTINGS, Held, Stateless
from holdall.testing import assert_same_bits


@pytest.mark.parametrize("sampler_class", SAVED_SETTINGS, ids=lambda each: each.__name__)
def test_a_sampler_in_the_table_is_public_and_has_the_settings(sampler_class: type) -> None:
    assert getattr(holdall, sampler_class.__name__) is sampler_class
    parameters = set(inspect.signature(sampler_class).parameters)
    settings = SAVED_SETTINGS[sampler_class]
    if settings is not None:
        assert set(settings) == parameters - {"by"}


class DrawsEvicted(Prioritized):
    """A user's sampler that draws an evicted transition."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        return Draw.from_ids(np.zeros(count, np.int64))


@pytest.mark.parametrize("is_composed", [False, True])
def test_draws_of_a_sampler_outside_of_the_table_are_verified(is_composed: bool) -> None:
    by = DrawsEvicted()
    sampler = Hindsight("final", 0, lambda *_: 0.0, by=by) if is_composed else by
    memory = ReplayMemory(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), 4, sampler=sampler)
    obs = np.zeros((1, 2), np.float32)
    no = np.zeros(1, np.bool_)
    for _ in range(6):
        memory.add(obs, np.zeros(1, np.int64), np.zeros(1, np.float32), obs, no, no)
    with pytest.raises(TransitionIdError, match=r"ids holds 0\b"):
        memory.batch_source.draw(2)


class DrawsIds(Stateless):
    """A user's sampler that returns its ids converted by the function `convert`."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        ids = generator.integers(held.first_id, held.next_id, count)
        return Draw(self.convert(ids), np.ones(count, np.float32), last_ids=self.convert(ids))


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "int32": lambda ids: ids.astype(np.int32),
    "longlong": lambda ids: ids.astype("q"),
    "uint64": lambda ids: ids.astype(np.uint64),
    "other byte order": lambda ids: ids.astype(">i8"),
    "every second": lambda ids: np.repeat(ids, 2)[::2],
    "a list": lambda ids: ids.tolist(),
}


def make_memory(sampler: Any) -> ReplayMemory:
    memory = ReplayMemory(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), 4, sampler=sampler, seed=3)
    for number in range(4):
        obs = np.full(2, number, np.float32)
        memory.add(obs, 0, float(number), obs, terminated=False, truncated=False)
    return memory


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_sampler_outside_of_the_table_may_draw_integers_of_any_kind(convert: Callable[[Any], Any]) -> None:
    expected = make_memory(DrawsIds(lambda ids: ids)).sample(3)
    batch = make_memory(DrawsIds(convert)).sample(3)
    assert batch.ids.dtype == np.int64
    assert_same_bits(batch, expected)


def test_a_sampler_outside_of_the_table_may_not_draw_fractions() -> None:
    memory = make_memory(DrawsIds(lambda ids: ids + 0.5))
    with pytest.raises(ArgumentError, match=r"ids has shape .* and dtype float64"):
        memory.sample(3)

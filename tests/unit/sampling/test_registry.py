"""The table of samplers: it agrees with the classes, and it decides which draws are verified."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall import Hindsight, Prioritized, ReplayMemory, TransitionIdError
from holdall.batch import Draw
from holdall.sampling import SAVED_SETTINGS, Held


@pytest.mark.parametrize("sampler_class", SAVED_SETTINGS, ids=lambda each: each.__name__)
def test_a_sampler_in_the_table_is_public_and_has_the_settings(sampler_class: type) -> None:
    assert getattr(holdall, sampler_class.__name__) is sampler_class
    parameters = set(inspect.signature(sampler_class).parameters)
    settings = SAVED_SETTINGS[sampler_class]
    if settings is not None:
        assert set(settings) == parameters - {"by"}


class DrawsEvicted(Prioritized):
    """A sampler of a user that draws a transition that was evicted."""

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

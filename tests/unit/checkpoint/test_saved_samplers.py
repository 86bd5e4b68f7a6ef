"""Samplers in checkpoints: their states, and the settings of holdall's samplers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ArgumentError, DamageError, Hindsight, NStep, Prioritized, ReplayMemory, Sequence, Uniform
from holdall.checks import refuse_malformed
from holdall.sampling import choose_sampler
from holdall.testing import assert_same_bits

LANES = 2


def add(memory: ReplayMemory) -> None:
    tick = memory.next_id // LANES
    rows = np.full((LANES, 3), tick, np.float32)
    numbers = np.full(LANES, tick, np.float32)
    ends = np.full(LANES, tick % 9 == 8)
    flags = np.zeros(LANES, np.bool_)
    memory.add(rows, np.zeros(LANES, np.int64), numbers, rows + 1, ends, flags)


def fill_memory(sampler: Any, ticks: int) -> ReplayMemory:
    memory = ReplayMemory(spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(2), 300, LANES, seed=3, sampler=sampler)
    for _ in range(ticks):
        add(memory)
    return memory


class Own(Prioritized):
    """A user's sampler. Checkpoints have no settings of it."""


SAMPLERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Uniform": (Uniform, []),
    "Prioritized": (lambda: Prioritized(0.7, 0.3, 1e-3), ["alpha", "beta", "floor"]),
    "NStep": (lambda: NStep(4, 0.93), ["n", "gamma"]),
    "NStep by Prioritized": (lambda: NStep(2, 0.9, by=Prioritized(0.5)), ["n", "gamma", "by.alpha", "by.beta"]),
    "Sequence": (lambda: Sequence(5, 2, 3, crossing=True), ["length", "burn_in", "stride", "crossing"]),
}


@pytest.mark.parametrize("capacity", [90, 300, 1000])
def test_transitions_keep_their_priorities_with_another_capacity(capacity: int, tmp_path: Path) -> None:
    with fill_memory(Prioritized(1.0), 200) as memory:  # 400 transitions, of which 300 are held.
        ids = np.arange(memory.first_id, memory.next_id)
        memory.update_priorities(ids, np.where(ids % 7 == 0, 5.0, 0.0))
        memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path, capacity=capacity) as loaded:
        assert loaded.next_id == 400
        drawn = loaded.batch_source.draw(20_000).ids
        held = np.arange(loaded.first_id, loaded.next_id)
        assert np.array_equal(np.unique(drawn), held[held % 7 == 0])
        add(loaded)
        loaded.sample(64)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_restored_with_its_settings(name: str, tmp_path: Path) -> None:
    """The next batches, and those after more steps, are the batches of the saved memory."""
    make, settings = SAMPLERS[name]
    with fill_memory(make(), 120) as memory:
        if "alpha" in str(settings):
            ids = memory.sample(40).ids
            memory.update_priorities(ids, np.linspace(0, 3, 40))
            prioritized: Any = getattr(memory.sampler, "by", memory.sampler)
            prioritized.beta = 0.9  # As agents do that anneal it.
        memory.save(tmp_path).result()
        with ReplayMemory.load(tmp_path) as loaded:
            assert type(loaded.sampler) is type(memory.sampler)
            for name_of in settings:
                value_of = operator.attrgetter(name_of)
                assert value_of(loaded.sampler) == value_of(memory.sampler)
            for _ in range(5):
                assert_same_bits(loaded.sample(32), memory.sample(32))
                for each in (loaded, memory):
                    add(each)


@pytest.mark.parametrize("sampler", [Own(), Hindsight("final", 4, lambda *_: np.zeros(1)), NStep(2, 0.9, by=Own())])
def test_a_sampler_whose_settings_are_not_saved_has_to_be_passed(sampler: Any, tmp_path: Path) -> None:
    """A user's class and a function are code. Checkpoints have no code."""
    with fill_memory(sampler, 20) as memory:
        memory.save(tmp_path).result()
    kind = type(sampler).__name__
    with pytest.raises(ArgumentError, match=rf"sampler was not given, .* {kind}.* pass sampler={kind}\(\.\.\.\)"):
        ReplayMemory.load(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "Prioritized", "settings": {"alpha": -1.0}},
        {"kind": "Prioritized", "settings": {"alpha": "much"}},
        {"kind": "Prioritized", "settings": {"beta": 0.5, "gamma": 1}},
        {"kind": "Prioritized", "settings": 5},
        {"kind": "NStep", "settings": {"n": 2**40, "gamma": 0.9}, "by": {"kind": "Uniform", "settings": {}}},
        {"kind": "NStep", "settings": {"n": 2, "gamma": 0.9}, "by": {"kind": "NStep", "settings": {}}},
        {"kind": "Hindsight", "settings": {"strategy": "final", "k": 1, "reward_fn": "print"}},
        {"kind": "system", "settings": {}},
    ],
    ids=str,
)
def test_wrong_settings_are_damage(wrong: dict[str, Any]) -> None:
    """Only classes of holdall are found by their names."""
    with pytest.raises(DamageError), refuse_malformed("a checkpoint"):
        choose_sampler(None, wrong, has_same_ids=True)


def test_a_users_sampler_with_the_name_of_a_shipped_one_is_not_replaced(tmp_path: Path) -> None:
    """A checkpoint has no settings of it, so `load` asks for the sampler instead of drawing with holdall's."""
    own = type("Uniform", (Uniform,), {})
    space = spaces.Box(0, 1, (2,), np.float32)
    with ReplayMemory(space, spaces.Discrete(2), 8, sampler=own()) as memory:
        memory.add(np.zeros(2, np.float32), 0, 0.0, np.zeros(2, np.float32), False, False)
        memory.save(tmp_path / "run").result()
    with pytest.raises(ArgumentError, match="sampler was not given"):
        ReplayMemory.load(tmp_path / "run")

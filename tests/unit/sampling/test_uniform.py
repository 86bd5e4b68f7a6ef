"""Uniform sampling: every transition that is held is equally likely, and no other is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ReplayMemory, TransitionIdError
from holdall.batch import Draw
from holdall.sampling import Held, Uniform
from holdall.testing import Stream
from holdall.testing.strategies import box

from .chi_square import compute_chi_square, draw_ids


def make_memory(ticks: int, capacity: int, lanes: int, valid: NDArray[np.bool_] | None = None) -> ReplayMemory:
    stream = Stream(box((2,), "f4"), spaces.Discrete(2), lanes)
    memory = ReplayMemory(stream.observation_space, stream.action_space, capacity, lanes, seed=7)
    for tick in range(ticks):
        memory.add(**stream.tick().arguments(), valid=None if valid is None else valid[tick])
    return memory


@pytest.mark.parametrize(("ticks", "capacity"), [(30, 1000), (30, 60), (77, 60)], ids=["filling", "full", "wrapped"])
def test_every_transition_held_is_equally_likely(ticks: int, capacity: int) -> None:
    """Evicted transitions are never drawn."""
    memory = make_memory(ticks, capacity, 2)
    ids = draw_ids(memory)
    allowed = np.arange(memory.first_id, memory.next_id)
    assert 0.6 < compute_chi_square(ids, allowed, np.ones(len(allowed))) < 1.5


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_invalid_entries_are_never_drawn_and_others_equally_often(share: float) -> None:
    """The rule holds for small and large shares of invalid entries."""
    valid = np.random.default_rng(0).random((77, 3)) < share
    memory = make_memory(77, 150, 3, valid)
    held = np.arange(memory.first_id, memory.next_id)
    allowed = held[valid.reshape(-1)[held]]
    assert len(memory) == len(allowed)
    ids = draw_ids(memory)
    assert 0.4 < compute_chi_square(ids, allowed, np.ones(len(allowed))) < 1.8


def test_draws_do_not_depend_on_each_other() -> None:
    """All pairs of transitions are equally likely to be neighbours in a batch."""
    ids = draw_ids(make_memory(10, 10, 1))
    pairs = ids[:-1] * 10 + ids[1:]
    assert 0.6 < compute_chi_square(pairs, np.arange(100), np.ones(100)) < 1.5


def test_one_seed_gives_one_sequence_of_batches() -> None:
    """Another seed gives other ids."""
    one = make_memory(50, 1000, 2)
    same = make_memory(50, 1000, 2)
    other = ReplayMemory(box((2,), "f4"), spaces.Discrete(2), 1000, 2, seed=8)
    other.extend(**Stream(box((2,), "f4"), spaces.Discrete(2), 2).ticks(50).arguments())
    for _ in range(5):
        batch = one.sample(16)
        assert batch.ids.tolist() == same.sample(16).ids.tolist()
        assert batch.ids.tolist() != other.sample(16).ids.tolist()


def test_gather_and_report_do_not_change_the_generator() -> None:
    """Later batches are the same as without these calls."""
    one = make_memory(50, 1000, 2)
    same = make_memory(50, 1000, 2)
    one.gather([3, 4])
    one.report()
    assert one.sample(16).ids.tolist() == same.sample(16).ids.tolist()


def test_weights_are_ones() -> None:
    """Importance weights are 1 where all transitions are equally likely."""
    weights = make_memory(5, 10, 1).sample(4).weights
    assert weights.dtype == np.float32
    assert weights.tolist() == [1, 1, 1, 1]


def test_a_single_transition_can_be_drawn() -> None:
    """The smallest memory works."""
    assert make_memory(1, 1, 1).sample(1).ids.tolist() == [0]
    fields = make_memory(1, 1, 1).store.view()
    assert Uniform().draw(Held(41, 42, 1, 1, fields), 3, np.random.default_rng(0)).ids.tolist() == [41, 41, 41]


class Fixed:
    """A sampler that draws the ids that it was made with."""

    def __init__(self, *ids: int) -> None:
        self.ids = np.array(ids)

    def __len__(self) -> int:
        return 0  # So the sampler is false in a condition, and must still be used.

    def draw(self, _held: Held, _count: int, _generator: np.random.Generator) -> Draw:
        return Draw(self.ids, np.full(len(self.ids), 0.5, np.float32))

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, _state: Any) -> None:
        pass


def make_memory_with(sampler: Any) -> ReplayMemory:
    stream = Stream(box((2,), "f4"), spaces.Discrete(2), 2)
    memory = ReplayMemory(stream.observation_space, stream.action_space, 10, 2, sampler=sampler)
    memory.extend(**stream.ticks(8).arguments(), valid=np.array([[True, True]] * 7 + [[True, False]]))
    return memory


def test_a_users_sampler_decides_ids_and_weights() -> None:
    """The batch has the sampler's ids, in its order, and its weights."""
    batch = make_memory_with(Fixed(9, 6, 9)).sample(3)
    assert batch.ids.tolist() == [9, 6, 9]
    assert batch.weights.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("drawn", [5, -1, 16, 15], ids=["evicted", "negative", "not added yet", "not valid"])
def test_a_sampler_that_draws_an_id_that_is_not_held_is_refused(drawn: int) -> None:
    """The ids of a user's sampler are checked as those of `gather`."""
    with pytest.raises(TransitionIdError, match=rf"ids holds {drawn}\b"):
        make_memory_with(Fixed(9, drawn)).sample(2)

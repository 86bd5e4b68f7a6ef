"""Likelihood: the mass by which a sampler draws each transition, and the sum of all masses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdall import Hindsight, NStep, Prioritized, Sequence, Uniform
from holdall.memory import ReplayMemory
from holdall.sampling import Held, Likelihood

from .against_oracle import feed


def describe_held(memory: ReplayMemory) -> Held:
    """Return the `Held` that the sampler of a memory gets."""
    view = memory.store.view()
    return Held(view.first_id, view.next_id, memory.num_envs, memory.capacity, view)


@pytest.mark.parametrize("valid_share", [1.0, 0.7])
@pytest.mark.parametrize(
    "sampler",
    [Uniform(), NStep(3, 0.9), Sequence(4), Hindsight("future", 1, lambda *_: 0.0)],
    ids=lambda each: type(each).__name__,
)
def test_without_priorities_the_mass_is_the_number_of_transitions(sampler: Any, valid_share: float) -> None:
    memory, oracle = feed(sampler, valid_share=valid_share)
    likelihood = Likelihood(sampler)
    held = describe_held(memory)
    assert likelihood.compute_total_mass(held) == len(oracle.ids) == len(memory)
    assert likelihood.compute_masses(held, oracle.ids[:9]).tolist() == [1.0] * 9
    assert (likelihood.highest, likelihood.prioritized) == (0.0, None)


def test_the_mass_of_sequences_with_a_stride_is_the_number_of_starts() -> None:
    sampler = Sequence(4, stride=5)
    memory, _ = feed(sampler, valid_share=0.7)
    held = describe_held(memory)
    starts = np.flatnonzero(sampler.restrict_to_starts(held).are_allowed(np.arange(held.first_id, held.next_id)))
    assert 0 < Likelihood(sampler).compute_total_mass(held) == len(starts) < len(memory)


@pytest.mark.parametrize("composed", [False, True])
def test_the_mass_is_the_sum_of_priorities_and_raising_the_highest_keeps_it(composed: bool) -> None:
    by = Prioritized(alpha=1.0, floor=1e-30)
    sampler: Any = NStep(3, 0.9, by=by) if composed else by
    memory, oracle = feed(sampler)
    priorities = 1.0 + np.arange(len(oracle.ids))
    memory.update_priorities(oracle.ids, priorities)
    likelihood = Likelihood(sampler)
    held = describe_held(memory)
    assert likelihood.compute_total_mass(held) == priorities.sum()
    assert likelihood.compute_masses(held, oracle.ids[::7]).tolist() == priorities[::7].tolist()
    likelihood.raise_highest(held, 1e6)
    assert likelihood.highest == by.highest == 1e6
    assert likelihood.compute_total_mass(held) == priorities.sum()  # Present transitions keep their priority.

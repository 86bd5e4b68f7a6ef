"""How likely a sampler draws each transition: what rows were drawn in proportion to, and how much that is in all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdall import Hindsight, NStep, Prioritized, Sequence, Uniform
from holdall.memory import ReplayMemory
from holdall.sampling import Held, Likelihood

from .against_oracle import fed


def describe_held(memory: ReplayMemory) -> Held:
    """Return what the sampler of a memory sees."""
    view = memory.store.view()
    return Held(view.first_id, view.next_id, memory.num_envs, memory.capacity, view)


@pytest.mark.parametrize("valid_share", [1.0, 0.7])
@pytest.mark.parametrize(
    "sampler",
    [Uniform(), NStep(3, 0.9), Sequence(4), Hindsight("future", 1, lambda *_: 0.0)],
    ids=lambda each: type(each).__name__,
)
def test_where_all_is_as_likely_transitions_are_counted(sampler: Any, valid_share: float) -> None:
    memory, oracle = fed(sampler, valid_share=valid_share)
    likelihood = Likelihood(sampler)
    held = describe_held(memory)
    assert likelihood.compute_total_mass(held) == len(oracle.ids) == len(memory)
    assert likelihood.compute_masses(held, oracle.ids[:9]).tolist() == [1.0] * 9
    assert (likelihood.highest, likelihood.prioritized) == (0.0, None)


def test_of_sequences_with_a_stride_their_starts_are_counted() -> None:
    sampler = Sequence(4, stride=5)
    memory, _ = fed(sampler, valid_share=0.7)
    held = describe_held(memory)
    starts = np.flatnonzero(sampler.restrict_to_starts(held).are_allowed(np.arange(held.first_id, held.next_id)))
    assert 0 < Likelihood(sampler).compute_total_mass(held) == len(starts) < len(memory)


@pytest.mark.parametrize("composed", [False, True])
def test_priorities_add_up_to_the_total_and_new_ones_get_the_highest(composed: bool) -> None:
    by = Prioritized(alpha=1.0, floor=1e-30)
    sampler: Any = NStep(3, 0.9, by=by) if composed else by
    memory, oracle = fed(sampler)
    priorities = 1.0 + np.arange(len(oracle.ids))
    memory.update_priorities(oracle.ids, priorities)
    likelihood = Likelihood(sampler)
    held = describe_held(memory)
    assert likelihood.compute_total_mass(held) == priorities.sum()
    assert likelihood.compute_masses(held, oracle.ids[::7]).tolist() == priorities[::7].tolist()
    likelihood.raise_highest(held, 1e6)
    assert likelihood.highest == by.highest == 1e6
    assert likelihood.compute_total_mass(held) == priorities.sum()  # what is there keeps its own

"""RolloutSequences: every valid step is in exactly one sequence, and a sequence has one episode and one lane."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall.rollout_sequences import RolloutSequences

TICKS = 30
LANES = 3


def make_sequences(seed: int, longest: int) -> tuple[RolloutSequences, NDArray[np.bool_], set[int]]:
    generator = np.random.default_rng(seed)
    ends = generator.random((TICKS, LANES)) < 0.2
    made = generator.random((TICKS, LANES)) < 0.9
    return RolloutSequences.cut(ends, made, longest), ends, set(np.flatnonzero(made).tolist())


@pytest.mark.parametrize("longest", [1, 4, TICKS])
@pytest.mark.parametrize("seed", range(5))
def test_sequences_hold_every_step_once_and_end_with_their_episode(seed: int, longest: int) -> None:
    sequences, ends, made = make_sequences(seed, longest)
    seen: list[int] = []
    for places in sequences.iterate_batches(11, np.random.default_rng(0)):
        for row in places:
            steps = row[row >= 0]
            assert 1 <= len(steps) <= longest
            assert (row[len(steps) :] == -1).all()
            assert (np.diff(steps) == LANES).all()
            assert not ends.reshape(-1)[steps[:-1]].any()
            seen.extend(steps.tolist())
    assert len(seen) == len(set(seen))
    assert set(seen) == made


def test_a_batch_has_at_most_the_asked_steps_unless_one_sequence_has_more() -> None:
    sequences, _, _ = make_sequences(1, TICKS)
    for most in (1, 7, 1_000):
        for places in sequences.iterate_batches(most, np.random.default_rng(2)):
            assert (places >= 0).sum() <= most or len(places) == 1


def test_the_generator_decides_the_order() -> None:
    sequences, _, _ = make_sequences(3, 5)
    first, same, other = (
        [places.tolist() for places in sequences.iterate_batches(20, np.random.default_rng(seed))] for seed in (0, 0, 1)
    )
    assert first == same != other

"""Sequences against the oracle: consecutive steps of one episode, and a mask of the steps that are not padding."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ArgumentError, NStep, Prioritized, ReplayMemory, Sequence, TransitionIdError
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.oracle import ends, is_held

from .against_oracle import build_sequences, feed
from .chi_square import DRAWS, compute_chi_square


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize(("length", "burn_in"), [(1, 0), (6, 0), (5, 4), (16, 16)])
@pytest.mark.parametrize(
    ("lanes", "capacity", "valid_share", "ends"),
    [(1, 1000, 1.0, 0.1), (3, 90, 1.0, 0.1), (4, 160, 0.8, 0.05), (2, 60, 1.0, 0.0)],
    ids=["one lane", "wrapped", "invalid lanes", "no ends but the write head"],
)
def test_every_sequence_is_the_oracles(
    length: int, burn_in: int, crossing: bool, lanes: int, capacity: int, valid_share: float, ends: float
) -> None:
    """Every field of every step, and the mask."""
    memory, oracle = feed(Sequence(length, burn_in, crossing=crossing), lanes, 60, capacity, valid_share, ends)
    batch = memory.sample(30)
    assert batch.obs["image"].shape == (30, burn_in + length, 4, 36, 36)
    assert batch.mask[:, burn_in].all()
    expected = build_sequences(oracle, batch.ids[:, burn_in], length, burn_in, crossing)
    assert_same_bits(batch, expected)


def list_starts(oracle: OracleMemory, stride: int) -> list[int]:
    """List the steps that sequences may begin with, one by one."""
    found = []
    for number in oracle.ids.tolist():
        before = number - oracle.num_envs
        held = before >= oracle.first_id
        first = held and (not is_held(oracle, before) or ends(oracle, before))
        if number // oracle.num_envs % stride == 0 or first:
            found.append(number)
    return found


@pytest.mark.parametrize(("stride", "valid_share"), [(1, 0.8), (4, 1.0), (4, 0.8), (500, 0.8)])
@pytest.mark.parametrize("by", [None, Prioritized], ids=["uniform", "prioritized"])
def test_a_million_sequences_begin_equally_often_at_every_start(stride: int, valid_share: float, by: Any) -> None:
    """These are every `stride`-th tick and every first step of an episode."""
    memory, oracle = feed(Sequence(4, 2, stride, by=by and by(1.0)), valid_share=valid_share)
    allowed = np.array(list_starts(oracle, stride))
    drawn = np.concatenate([memory.batch_source.draw(100_000).ids[:, 2] for _ in range(DRAWS // 100_000)])
    assert 0.5 < compute_chi_square(drawn, allowed, np.ones(len(allowed))) < 1.6


def test_a_priority_belongs_to_the_first_step_of_a_sequence() -> None:
    """`update_priorities` accepts the ids of a whole batch, and one priority for each sequence."""
    memory, oracle = feed(Sequence(4, 2, by=Prioritized(1.0, 1.0)))
    ids = build_sequences(oracle, oracle.ids, 4, 2).ids
    memory.update_priorities(ids, np.where(oracle.ids % 3 == 0, 20.0, 1e-3))
    batch = memory.sample(100)
    assert (batch.ids[:, 2] % 3 == 0).mean() > 0.95
    assert batch.weights.shape == (100,)
    assert_same_bits(batch.obs, build_sequences(oracle, batch.ids[:, 2], 4, 2).obs)


def draw_starts(memory: ReplayMemory) -> list[int]:
    """Return the steps that sequences begin with. There are enough draws to find all of them."""
    return sorted(set(memory.batch_source.draw(20_000).ids[:, 2].tolist()))


@pytest.mark.parametrize("by", [None, Prioritized], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("valid_share", [1.0, 0.8])
def test_starts_follow_eviction_and_flags_that_are_set_later(by: Any, valid_share: float, tmp_path: Path) -> None:
    """The rule holds at every moment, and also for a pickled and a loaded memory."""
    memory, oracle = feed(Sequence(4, 2, 7, by=by and by(1.0)), 2, 40, 60, valid_share, ends=0.2)
    generator = np.random.default_rng(1)
    for turn in range(12):
        assert draw_starts(memory) == list_starts(oracle, 7)
        ids = np.unique(generator.choice(oracle.ids[oracle.are_valid(oracle.ids)], 9))
        ended, cut = generator.random((2, ids.size)) < 0.4
        for each in (memory, oracle):
            each.set_flags(ids, ended, cut)
        if turn % 4 == 1:
            memory = pickle.loads(pickle.dumps(memory))
        elif turn % 4 == 2:
            memory.save(tmp_path / str(turn)).result()
            memory.close()
            memory = ReplayMemory.load(tmp_path / str(turn), sampler=Sequence(4, 2, 7, by=by and by(1.0)))
        elif turn % 4 == 3:
            newest = oracle.gather(oracle.ids[-2:])
            step: dict[str, Any] = {
                name: getattr(newest, name) for name in ("obs", "action", "reward", "next_obs", "extras")
            }
            step |= {"terminated": generator.random(2) < 0.5, "truncated": np.zeros(2, np.bool_)}
            for each in (memory, oracle):
                each.add(**step)
    assert draw_starts(memory) == list_starts(oracle, 7)


def test_priorities_of_steps_that_are_not_starts_are_refused() -> None:
    """The message names such a step, and no priority changes. Steps that were starts when drawn are ignored."""
    memory, oracle = feed(Sequence(4, 2, 7, by=Prioritized(1.0)), 2, 40, 60, ends=0.2)
    allowed = list_starts(oracle, 7)
    wrong = next(i for i in oracle.ids[2:].tolist() if i not in allowed)
    with pytest.raises(TransitionIdError, match=rf"^ids holds {wrong}, with which no sequence begins.*stride \(7\)"):
        memory.update_priorities([allowed[0], wrong], [1e6, 1e6])
    assert draw_starts(memory) == allowed
    batch = memory.sample(60)
    before = np.unique(batch.ids[:, 2]) - 2
    before = before[before >= oracle.first_id]
    for each in (memory, oracle):
        each.set_flags(before, np.zeros(len(before), np.bool_), np.zeros(len(before), np.bool_))
    assert list_starts(oracle, 7) != allowed
    memory.update_priorities(batch.ids, np.ones(60))
    assert draw_starts(memory) == list_starts(oracle, 7)


def test_the_oldest_step_no_longer_begins_a_sequence_when_the_end_before_it_is_evicted() -> None:
    """Its priority is ignored, although the step itself is still held."""
    memory = ReplayMemory(
        spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(3), 8, sampler=Sequence(4, 2, 7, by=Prioritized(1.0))
    )

    def add(tick: int) -> None:
        done = np.array([tick == 4])
        row = np.full((1, 1), tick, np.float32)
        memory.add(row, np.zeros(1, np.int64), np.zeros(1), row + 1, done, np.zeros(1, np.bool_))

    for tick in range(8):
        add(tick)
    assert draw_starts(memory) == [0, 5, 7]
    for tick in range(8, 13):
        add(tick)
    assert memory.first_id == 5
    assert draw_starts(memory) == [7]
    memory.update_priorities(np.array([5, 7]), np.array([1e6, 1.0]))
    assert draw_starts(memory) == [7]


def test_a_stride_without_any_start_is_an_error() -> None:
    """The sampler does not search for ever."""
    memory, _ = feed(Sequence(4, stride=10_000), lanes=1, capacity=50, ends=0.0)
    with pytest.raises(ArgumentError, match="none of the transitions held may be drawn"):
        memory.sample(5)


def test_sequences_are_the_same_with_compressed_observations() -> None:
    """Slices that several steps share are decoded once."""
    memory, oracle = feed(Sequence(8), ticks=150, budget=None)
    memory.store.wait_idle()
    batch = memory.sample(20)
    assert_same_bits(batch, build_sequences(oracle, batch.ids[:, 0], 8))


@pytest.mark.parametrize(
    "given", [{"length": 0}, {"burn_in": -1}, {"stride": 0}, {"length": True}, {"by": NStep(2, 0.9)}]
)
def test_a_wrong_argument_of_sequence_is_refused(given: dict[str, Any]) -> None:
    """The refusal names the argument."""
    with pytest.raises(ArgumentError, match=rf"^{next(iter(given))} \("):
        Sequence(**{"length": 4, **given})


def test_tensors_have_the_bits_of_the_arrays() -> None:
    """The mask is a tensor, too."""
    arrays, _ = feed(Sequence(5, 2))
    tensors, _ = feed(Sequence(5, 2), device="cpu")
    batch = tensors.sample(10)
    assert hasattr(batch.mask, "detach")
    assert_same_bits(batch, arrays.sample(10))

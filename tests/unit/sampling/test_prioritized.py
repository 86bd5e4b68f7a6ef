"""Prioritized sampling: draws in proportion to priorities, which evicted ids lose and checkpoints keep."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from holdall import (
    ArgumentError,
    DamageError,
    Prioritized,
    TransitionIdError,
    Uniform,
)
from holdall.testing import assert_same_bits

from .against_oracle import feed
from .chi_square import compute_chi_square, draw_ids


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("valid_share", [1.0, 0.7])
def test_a_million_draws_are_in_proportion_to_the_priorities(alpha: float, valid_share: float) -> None:
    """The memory is more than full and has invalid entries. Priorities differ by a factor of ten."""
    memory, oracle = feed(Prioritized(alpha), valid_share=valid_share)
    priorities = 0.5 + 5 * np.random.default_rng(0).random(len(oracle.ids))
    memory.update_priorities(oracle.ids, priorities)
    assert 0.7 < compute_chi_square(draw_ids(memory), oracle.ids, priorities**alpha) < 1.35


def test_rows_and_weights_are_those_of_the_ids() -> None:
    """A weight is (lowest / own) ** beta, of the scaled priorities."""
    memory, oracle = feed(Prioritized(0.5, 0.8, floor=1e-12))
    priorities = 1.0 + np.random.default_rng(0).random(len(oracle.ids))
    memory.update_priorities(oracle.ids, priorities)
    batch = memory.sample(200)
    own = priorities[np.searchsorted(oracle.ids, batch.ids)]
    assert batch.weights.dtype == np.float32
    np.testing.assert_allclose(batch.weights, (own.min() / own) ** 0.4, rtol=1e-5)
    expected = oracle.gather(batch.ids)
    for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated", "extras"):
        assert_same_bits(getattr(batch, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
@pytest.mark.parametrize(("alpha", "floor"), [(0.5, 1e-6), (1.0, 1e-3), (2.0, 1e-6), (3.0, 1e-12)])
def test_priorities_of_any_dtype_are_scaled_as_those_of_float64(dtype: Any, alpha: float, floor: float) -> None:
    """In half precision, the floor would be zero and some powers infinite."""
    sampler = Prioritized(alpha, floor=floor)
    memory, oracle = feed(sampler)
    largest = 1e20 if dtype in (np.float32, np.float64) else 60_000
    given = np.array([0, 1, 3, 1000, largest], dtype)
    memory.update_priorities(oracle.ids[:5], given)
    expected = (given.astype(np.float64) + floor) ** alpha
    np.testing.assert_allclose(sampler.state()["scaled"][oracle.ids[:5] % memory.capacity], expected, rtol=1e-6)


def test_new_transitions_have_the_highest_priority_seen() -> None:
    """A priority that is set later does not change them."""
    sampler = Prioritized(1.0)
    memory, oracle = feed(sampler, ticks=30, capacity=1000)
    memory.update_priorities(oracle.ids, np.full(len(oracle.ids), 4.0))
    again, _ = feed(None, ticks=32, capacity=1000)
    later = again.gather(np.arange(90, 96))
    memory.add(
        *({key: rows[:3] for key, rows in later.obs.items()}, later.action[:3], later.reward[:3]),
        *({key: rows[:3] for key, rows in later.next_obs.items()}, later.terminated[:3], later.truncated[:3]),
        extras={"log_prob": later.extras["log_prob"][:3]},
    )
    memory.update_priorities([0], [50.0])
    scaled = sampler.state()["scaled"]
    assert scaled[[0, 1, 89, 90, 91, 92]].round(3).tolist() == [50.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    assert scaled[93:].max() == 0


def test_priorities_of_evicted_ids_are_ignored() -> None:
    """A batch may be evicted before its errors are known. The transition in its slot keeps its priority."""
    memory, oracle = feed(Prioritized(1.0))
    memory.sample(1)
    memory.update_priorities(np.arange(0, oracle.first_id), np.full(oracle.first_id, 1e6))
    assert 0.7 < compute_chi_square(draw_ids(memory), oracle.ids, np.ones(len(oracle.ids))) < 1.35


@pytest.mark.parametrize(
    ("ids", "priorities", "error", "message"),
    [
        ([400], [1.0], TransitionIdError, "ids holds 400"),
        ([200], [-1.0], ArgumentError, "priorities holds -1.0"),
        ([200], [np.nan], ArgumentError, "priorities holds nan"),
        ([200], [np.inf], ArgumentError, "priorities holds inf"),
        ([200, 201], [1.0], ArgumentError, r"priorities has shape \(1,\) for ids of shape \(2,\)"),
        ([200], [1e300], ArgumentError, r"priorities holds 1e\+300, which to the power of alpha \(1.0\) is beyond"),
        ([200, 201], [1e280, 1e281], ArgumentError, r"priorities holds 1e\+281, which .* is beyond 1e\+280"),
        ([200], [True], ArgumentError, "priorities has dtype bool"),
        ([2.5], [1.0], ArgumentError, "ids has shape"),
    ],
)
def test_bad_priorities_are_refused_and_change_nothing(ids: Any, priorities: Any, error: Any, message: str) -> None:
    """The refusal names the argument and its value."""
    sampler = Prioritized(1.0)
    memory, _ = feed(sampler)
    memory.sample(1)
    before = sampler.state()["scaled"].tobytes()
    with pytest.raises(error, match=message):
        memory.update_priorities(ids, priorities)
    assert sampler.state()["scaled"].tobytes() == before


def test_an_invalid_entry_gets_no_priority() -> None:
    """With a priority, it would be drawn."""
    memory, oracle = feed(Prioritized(), valid_share=0.5)
    invalid = next(number for number in range(memory.first_id, memory.next_id) if number not in oracle.ids)
    with pytest.raises(TransitionIdError, match="valid=False"):
        memory.update_priorities([invalid], [1.0])


def test_a_restored_sampler_draws_as_the_saved_one() -> None:
    """Its state has arrays and numbers only, and later updates have the same effect."""
    saved, oracle = feed(Prioritized(0.7, 0.3), valid_share=0.9)
    generator = np.random.default_rng(3)
    for _ in range(20):
        ids = saved.sample(32).ids
        saved.update_priorities(ids, generator.random(32))
    state = saved.sampler.state()
    assert all(isinstance(value, np.ndarray | int | float) for value in state.values())
    restored, _ = feed(Prioritized(0.7), valid_share=0.9)
    restored.sampler.restore(state)
    restored.batch_source.generator.bit_generator.state = saved.batch_source.generator.bit_generator.state
    for _ in range(20):
        batch = restored.sample(32)
        expected = saved.sample(32)
        assert_same_bits(batch, expected)
        for memory in (restored, saved):
            memory.update_priorities(expected.ids, np.arange(32.0))
    assert len(oracle)


def test_restoring_an_earlier_state_forgets_later_priorities() -> None:
    """The restored sampler had priorities of later transitions."""
    early, later = (feed(Prioritized(1.0), ticks=ticks, capacity=1000)[0] for ticks in (20, 50))
    for memory in (early, later):
        memory.sample(1)
    state = {name: np.copy(value) for name, value in early.sampler.state().items()}
    later.sampler.state()
    later.sampler.restore(state)
    assert_same_bits(later.sampler.state()["scaled"], state["scaled"])
    assert (state["scaled"] > 0).sum() == 60


def test_a_sampler_that_never_drew_can_be_saved() -> None:
    """Its state has no priorities yet."""
    fresh = Prioritized()
    fresh.restore(Prioritized(beta=0.9).state())
    assert fresh.beta == 0.9


@pytest.mark.parametrize(
    "state",
    [{}, {"scaled": np.array([-1.0]), "highest": 1.0, "next_id": 1, "beta": 0.4}, {"scaled": np.array([np.nan])}],
)
def test_a_damaged_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(DamageError):
        Prioritized().restore(state)
    with pytest.raises(DamageError, match="Uniform has no state"):
        Uniform().restore({"scaled": np.zeros(3)})


def test_a_pickle_has_the_priorities() -> None:
    """Stable-Baselines3 saves buffers as pickles."""
    memory, oracle = feed(Prioritized(1.0))
    memory.update_priorities(oracle.ids, np.arange(1.0, 1 + len(oracle.ids)))
    copied = pickle.loads(pickle.dumps(memory))
    for _ in range(5):
        assert_same_bits(copied.sample(64), memory.sample(64))


def test_tensors_are_accepted_as_priorities() -> None:
    """TD errors are tensors that carry gradients."""
    torch = pytest.importorskip("torch")
    memory, _ = feed(Prioritized(), device="cpu")
    batch = memory.sample(8)
    memory.update_priorities(batch.ids, torch.ones(8, requires_grad=True).abs())


def test_tensors_in_half_precision_are_accepted_as_priorities() -> None:
    """The rule also holds for bfloat16, which NumPy does not have."""
    torch = pytest.importorskip("torch")
    sampler = Prioritized(1.0)
    memory, oracle = feed(sampler)
    ids = oracle.ids[:2]
    for dtype in (torch.bfloat16, torch.float16):
        memory.update_priorities(ids, torch.tensor([0.0, 1.5], dtype=dtype))
        np.testing.assert_allclose(sampler.state()["scaled"][ids % memory.capacity], [1e-6, 1.500001], rtol=1e-6)


def test_one_sampler_serves_one_memory() -> None:
    """A second memory cannot use the sampler of the first."""
    sampler = Prioritized()
    first, _ = feed(sampler)
    first.sample(1)
    second, _ = feed(sampler, ticks=20, capacity=60)
    with pytest.raises(ArgumentError, match="every memory needs its own"):
        second.sample(1)


@pytest.mark.parametrize("given", [{"alpha": -1}, {"beta": -0.1}, {"floor": 0.0}, {"alpha": "much"}], ids=str)
def test_a_wrong_argument_of_prioritized_is_refused(given: dict[str, Any]) -> None:
    """The refusal names the argument."""
    with pytest.raises(ArgumentError, match=next(iter(given))):
        Prioritized(**given)


def test_beta_may_be_annealed() -> None:
    """`beta` can be set between draws. It changes the weights, and not the draws."""
    memory, oracle = feed(Prioritized(1.0, 0.0))
    memory.update_priorities(oracle.ids, 1.0 + oracle.ids % 5)
    assert set(memory.sample(50).weights.tolist()) == {1.0}
    sampler: Any = memory.sampler
    sampler.beta = 1.0
    assert memory.sample(50).weights.min() < 0.5


def test_priorities_for_a_memory_without_them_are_refused() -> None:
    """The error says which sampler to pass."""
    memory, _ = feed(None)
    with pytest.raises(ArgumentError, match=r"sampler \(Uniform\) has no priorities\. .* sampler=Prioritized"):
        memory.update_priorities([200], [1.0])

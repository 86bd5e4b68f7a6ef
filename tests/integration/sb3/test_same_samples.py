"""The same steps and the same seed give the same samples, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from .environments import VECTOR, Wander, make_dict_space, repeat
from .pair import Case, Pair, assert_same_batch, assert_same_bits, call_seeded

IMAGE = spaces.Box(0, 255, (3, 40, 40), np.uint8)  # Too large for rows.
FRAMES = spaces.Box(0, 255, (4, 36, 36), np.uint8)
DICT = make_dict_space((3, 40, 40))

CASES = [
    Case(VECTOR),
    Case(VECTOR, lanes=4),
    Case(spaces.Box(-1, 1, (4,), np.float64), lanes=2),
    Case(spaces.Box(-1, 1, (4,), np.float16)),
    Case(spaces.Box(-100, 100, (2, 3), np.int64), lanes=2),
    Case(spaces.Box(0, 1, (3,), np.bool_)),
    Case(spaces.Box(-1, 1, (1100,), np.float32), lanes=2),
    Case(spaces.Box(-1, 1, (60, 7), np.float32), lanes=2, stacked=True),
    Case(spaces.Box(-1, 1, (0,), np.float32)),
    Case(FRAMES, stacked=True),
    Case(FRAMES, lanes=4, stacked=True, transposed=True),
    Case(IMAGE, lanes=2, transposed=True),
    Case(spaces.Discrete(7)),
    Case(spaces.Discrete(7, start=-3), lanes=4),
    Case(spaces.MultiDiscrete([3, 5]), lanes=4),
    Case(spaces.MultiBinary(6), lanes=4),
    Case(spaces.MultiBinary([2, 3])),
    Case(DICT, transposed=True),
    Case(DICT, lanes=4, transposed=True),
    Case(VECTOR, spaces.Discrete(4), lanes=4),
    Case(VECTOR, spaces.MultiDiscrete([2, 9])),
    Case(VECTOR, spaces.MultiBinary(3), lanes=4),
    Case(VECTOR, spaces.Box(-1, 1, (2, 3), np.float32), lanes=4),
    Case(VECTOR, spaces.Box(-1, 1, (3,), np.float64)),
    Case(VECTOR, lanes=2, given_as="float64"),
    Case(spaces.Box(-1, 1, (3,), np.float64), given_as="float32"),
    Case(FRAMES, lanes=2, stacked=True, given_as="float32"),
    Case(DICT, lanes=2, given_as="float64"),
]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


@EVERY_CASE
def test_samples_are_equal_while_the_buffer_fills_and_after_it_wraps(case: Case) -> None:
    """The number of lanes does not divide the size of the buffer."""
    pair = Pair(case)
    for ticks in (1, 12, 60, 150):
        pair.feed(ticks)
        pair.assert_same_samples()
        pair.assert_same_arrays()
    assert pair.ours.full


@EVERY_CASE
def test_time_limits_may_count_as_terminations(case: Case) -> None:
    """With `handle_timeout_termination=False`, every end is a termination."""
    pair = Pair(case, handle_timeout_termination=False)
    pair.feed(90)
    pair.assert_same_samples()
    pair.assert_same_arrays()
    assert pair.plain.dones.any()
    assert not np.asarray(pair.ours.timeouts).any()


@pytest.mark.parametrize("case", [Case(VECTOR, lanes=2), Case(DICT, lanes=2)], ids=str)
def test_optimize_memory_usage_draws_as_without_it(case: Case) -> None:
    """It also works with Dict observations and with time limits, which Stable-Baselines3 refuses."""
    pair = Pair(case, optimize_memory_usage=True)
    for ticks in (20, 120):
        pair.feed(ticks)
        pair.assert_same_samples()
        pair.assert_same_arrays()
    assert pair.plain.timeouts.any()


@pytest.mark.parametrize("case", [Case(VECTOR, lanes=2), Case(DICT, lanes=2)], ids=str)
def test_normalised_samples_are_equal(case: Case) -> None:
    """Observations and rewards are normalised with the statistics of a VecNormalize."""
    keys = ["state"] if isinstance(case.observation, spaces.Dict) else None
    env = VecNormalize(DummyVecEnv(repeat(lambda: Wander(case.observation), 2)), norm_obs_keys=keys)
    env.reset()
    for _ in range(30):
        env.step(np.zeros((2, 2), np.float32))
    pair = Pair(case)
    pair.feed(50)
    pair.assert_same_samples(env=env)


def test_rewards_that_are_not_float32_are_rounded_as_sb3_rounds_them() -> None:
    """Some environments return rewards in float64 and flags as integers."""
    pair = Pair(Case(VECTOR, lanes=2))
    for _ in range(20):
        obs, next_obs, action, reward, done, infos = next(pair.steps)
        for buffer in (pair.plain, pair.ours):
            buffer.add(obs, next_obs, action, reward.astype(np.float64) * np.pi, done.astype(np.int8), infos)
    pair.assert_same_samples()
    pair.assert_same_arrays()


def test_odd_floats_are_sampled_bit_for_bit() -> None:
    """These are NaN payloads, negative zeros, infinities and subnormal numbers."""
    pair = Pair(Case(spaces.Box(-np.inf, np.inf, (6,), np.float32)))
    odd = np.array([[0x7FC01234, 0xFFC00001, 0x80000000, 0x7F800000, 0x00000001, 0xFF800000]], np.uint32)
    for buffer in (pair.plain, pair.ours):
        one = np.ones((1, 2), np.float32)
        obs = odd.view(np.float32)
        next_obs = np.roll(odd, 1, axis=1).view(np.float32)
        buffer.add(obs, next_obs, one, np.array([-0.0], np.float32), np.array([False]), [{}])
    pair.assert_same_samples(batch=2)


@pytest.mark.parametrize("case", [Case(FRAMES, stacked=True), Case(DICT, lanes=3)], ids=str)
def test_get_samples_returns_the_slots_that_it_is_given(case: Case) -> None:
    """The caller chooses the slots. The environments are drawn, in Stable-Baselines3's order."""
    pair = Pair(case)
    pair.feed(90)
    slots = np.array([0, 5, 5, pair.ours.size() - 1, 1])
    expected = call_seeded(1, lambda: pair.plain._get_samples(slots))
    assert_same_batch(expected, call_seeded(1, lambda: pair.ours._get_samples(slots)))


def test_a_sample_advances_the_generator_as_sb3s_sample_does() -> None:
    """The next random number after a sample is the same."""
    pair = Pair(Case(VECTOR, lanes=3))
    pair.feed(40)
    drawn_after = []
    for buffer in _list_buffers(pair):
        call_seeded(4, lambda buffer=buffer: buffer.sample(9))
        drawn_after.append(np.random.random())  # noqa: NPY002  Stable-Baselines3's generator.
    assert drawn_after[0] == drawn_after[1]


def test_a_held_sample_does_not_change() -> None:
    """Meanwhile a hundred more are drawn, and all slots are overwritten."""
    pair = Pair(Case(FRAMES, stacked=True))
    pair.feed(80)
    held = [call_seeded(seed, lambda: pair.ours.sample(64)) for seed in range(10)]
    expected = [call_seeded(seed, lambda: pair.plain.sample(64)) for seed in range(10)]
    for _ in range(100):
        pair.ours.sample(64)
    pair.feed(80)
    for theirs, ours in zip(expected, held, strict=True):
        assert_same_batch(theirs, ours)


def test_a_sample_belongs_to_the_caller() -> None:
    """Writing into a sample, as augmentations do, leaves the buffer as it was."""
    pair = Pair(Case(DICT, transposed=True))
    pair.feed(30)
    sample = pair.ours.sample(64)
    for tensor in (*sample.observations.values(), *sample.next_observations.values(), sample.actions, sample.rewards):
        tensor.fill_(1)
    pair.assert_same_arrays()
    pair.assert_same_samples()


@pytest.mark.parametrize("case", [Case(VECTOR, lanes=2), Case(DICT, lanes=2)], ids=str)
def test_extend_adds_the_steps_that_add_adds(case: Case) -> None:
    """Every argument is a list, as in Stable-Baselines3."""
    pair = Pair(case)
    taken = [next(pair.steps) for _ in range(50)]
    for buffer in _list_buffers(pair):
        buffer.extend(*zip(*taken, strict=True))
    pair.assert_same_arrays()
    pair.assert_same_samples()


@pytest.mark.parametrize("case", [Case(VECTOR), Case(FRAMES, lanes=2, stacked=True), Case(DICT)], ids=str)
def test_reset_removes_all_steps(case: Case) -> None:
    """After a reset, only steps that are added later are drawn."""
    pair = Pair(case)
    pair.feed(90)
    for buffer in _list_buffers(pair):
        buffer.reset()
        assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
    pair.feed(7)
    pair.assert_same_samples()
    pair.feed(90)
    pair.assert_same_arrays()
    pair.assert_same_samples()


def test_a_buffer_size_below_the_number_of_lanes_gives_one_slot() -> None:
    """A buffer size below the number of environments holds one step of each, as in Stable-Baselines3."""
    pair = Pair(Case(VECTOR, lanes=4), buffer_size=3)
    assert pair.ours.buffer_size == pair.plain.buffer_size == 1
    pair.feed(3)
    pair.assert_same_samples()
    pair.assert_same_arrays()


def test_swapped_and_flattened_arrays_are_equal() -> None:
    """Other methods of Stable-Baselines3's buffers work, too."""
    pair = Pair(Case(VECTOR, lanes=3))
    pair.feed(30)
    expected = pair.plain.swap_and_flatten(pair.plain.observations)
    assert_same_bits(expected, pair.ours.swap_and_flatten(np.asarray(pair.ours.observations)), "observations")
    array = np.arange(3.0, dtype=np.float32)
    assert pair.ours.to_torch(array).tolist() == array.tolist()


def _list_buffers(pair: Pair) -> tuple[Any, Any]:
    return pair.plain, pair.ours

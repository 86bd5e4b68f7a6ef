"""Users' subclasses, callbacks that change `pos`, and odd steps have the effect that they have on SB3's buffers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.her import her_replay_buffer

from holdall.errors import ArgumentError
from holdall.sb3 import HerReplayBuffer, ReplayBuffer, RolloutBuffer

from .environments import VECTOR, make_dict_space
from .pair import Case, Pair, assert_same_batch, assert_same_bits, call_seeded, make_steps
from .test_same_her import Reach

Subclass = Callable[[Any], Any]


def double_tensors(base: Any) -> Any:
    class Doubled(base):  # type: ignore[misc]  # The base is an argument.
        def to_torch(self, array: Any, copy: bool = True) -> Any:
            return super().to_torch(array, copy) * 2

    return Doubled


def clip_rewards(base: Any) -> Any:
    class Clipped(base):  # type: ignore[misc]  # The base is an argument.
        @staticmethod
        def _normalize_reward(reward: Any, env: Any = None) -> Any:
            return np.clip(reward, -0.5, 0.5)

    return Clipped


def negate_observations(base: Any) -> Any:
    class Negative(base):  # type: ignore[misc]  # The base is an argument.
        @staticmethod
        def _normalize_obs(obs: Any, env: Any = None) -> Any:
            return {key: 1 - rows for key, rows in obs.items()} if isinstance(obs, dict) else 1 - obs

    return Negative


def scale_samples(base: Any) -> Any:
    class Scaled(base):  # type: ignore[misc]  # The base is an argument.
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            samples = super()._get_samples(batch_inds, env)
            return samples._replace(rewards=samples.rewards * 3)

    return Scaled


def scale_advantages(base: Any) -> Any:
    class Scaled(base):  # type: ignore[misc]  # The base is an argument.
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            samples = super()._get_samples(batch_inds, env)
            return samples._replace(advantages=samples.advantages * 3)

    return Scaled


def limit_size(base: Any) -> Any:
    class Small(base):  # type: ignore[misc]  # The base is an argument.
        def size(self) -> int:
            return min(5, super().size())  # type: ignore[no-any-return]  # The base is an argument.

    return Small


SUBCLASSES = [double_tensors, clip_rewards, negate_observations, scale_samples, limit_size]


def make_pair(subclass: Subclass, case: Case) -> Pair:
    """Return a pair of buffers, each of which is the user's subclass of its class."""
    pair = Pair(case)
    is_dict = isinstance(case.observation, spaces.Dict)
    plain = subclass(buffers.DictReplayBuffer if is_dict else buffers.ReplayBuffer)
    how: dict[str, Any] = {"device": "cpu", "n_envs": case.lanes}
    pair.plain = plain(70, case.observation, case.action, **how)
    pair.ours = subclass(ReplayBuffer)(70, case.observation, case.action, **how)
    return pair


@pytest.mark.parametrize("subclass", SUBCLASSES)
@pytest.mark.parametrize("case", [Case(VECTOR, lanes=2), Case(make_dict_space((3, 40, 40)), lanes=2)], ids=str)
def test_methods_that_a_subclass_overrides_are_called(subclass: Subclass, case: Case) -> None:
    """The methods are those that Stable-Baselines3 calls after a draw, and `size`, which does not affect draws."""
    pair = make_pair(subclass, case)
    for ticks in (9, 60):
        pair.feed(ticks)
        pair.assert_same_samples()


def test_methods_that_are_set_on_one_buffer_are_called() -> None:
    pair = Pair(Case(VECTOR, lanes=2))
    pair.feed(30)
    whole: Any = buffers.BaseBuffer.to_torch
    for buffer in (pair.plain, pair.ours):
        buffer.to_torch = types.MethodType(lambda self, array: whole(self, array) * 2, buffer)  # type: ignore[method-assign]
    pair.assert_same_samples()


def change_goals(base: Any) -> Any:
    class Other(base):  # type: ignore[misc]  # The base is an argument.
        def _sample_goals(self, batch_indices: Any, env_indices: Any) -> Any:
            return super()._sample_goals(batch_indices, env_indices) + np.float32(1)

    return Other


@pytest.mark.parametrize("subclass", [change_goals, double_tensors, clip_rewards])
def test_methods_that_a_subclass_of_hindsight_overrides_are_called(subclass: Subclass) -> None:
    env = DummyVecEnv([Reach])
    how: dict[str, Any] = {"env": env, "device": "cpu"}
    spaces_of: Any = env.observation_space, env.action_space
    both = [subclass(kind)(60, *spaces_of, **how) for kind in (her_replay_buffer.HerReplayBuffer, HerReplayBuffer)]
    stream = make_steps(Case(*spaces_of), np.random.default_rng(1))
    for _ in range(80):
        step = next(stream)
        for buffer in both:
            buffer.add(*step)
    assert_same_batch(*(call_seeded(2, lambda buffer=buffer: buffer.sample(40)) for buffer in both))


@pytest.mark.parametrize("ticks", [9, 70, 90], ids=["filling", "at slot 0", "wrapped"])
def test_resetting_pos_and_full_removes_all_steps(ticks: int) -> None:
    """Some callbacks empty a buffer in this way."""
    pair = Pair(Case(VECTOR, lanes=2), buffer_size=70)
    pair.feed(ticks)
    for buffer in (pair.plain, pair.ours):
        buffer.pos = 0
        buffer.full = False
    pair.feed(4)
    assert (pair.ours.pos, pair.ours.full, len(pair.ours.memory)) == (4, False, 8)
    pair.assert_same_samples()


def test_the_next_step_after_a_change_of_pos_is_refused() -> None:
    """holdall would store the step in another slot than Stable-Baselines3. The step is not added."""
    pair = Pair(Case(VECTOR, lanes=2))
    pair.feed(9)
    pair.ours.pos -= 3
    with pytest.raises(ArgumentError, match=r"pos was set to 6.*reset\(\)"):
        pair.ours.add(*next(pair.steps))
    pair.ours.pos += 3
    pair.feed(3)
    pair.assert_same_arrays()


def test_steps_that_are_added_to_a_copy_follow_its_last_step() -> None:
    pair = Pair(Case(VECTOR, lanes=2), buffer_size=20)
    pair.feed(13)
    pair.ours = ReplayBuffer.copy_of(pair.plain)
    pair.feed(3)
    pair.assert_same_arrays()


LAYOUTS: dict[str, tuple[Case, Callable[[Any], Any]]] = {
    "channels last": (Case(spaces.Box(0, 255, (3, 36, 36), np.uint8)), lambda rows: rows.transpose(0, 2, 3, 1)),
    "environments last": (Case(VECTOR, lanes=2), np.transpose),
    "a piece": (Case(VECTOR, lanes=2), lambda rows: rows[:, :2]),
    "not one array": (Case(VECTOR, lanes=2), lambda rows: [[1.0], [1.0, 2.0]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_observations_in_another_layout_are_refused(layout: str) -> None:
    """Stable-Baselines3 refuses them, too. The same numbers in another order are another observation."""
    case, rearrange = LAYOUTS[layout]
    pair = Pair(case)
    pair.feed(2)
    obs, *rest = next(pair.steps)
    with pytest.raises(ValueError, match=r"shape|inhomogeneous"):
        pair.plain.add(rearrange(obs), *rest)
    with pytest.raises(ArgumentError, match="obs"):
        pair.ours.add(rearrange(obs), *rest)
    assert pair.ours.pos == 2


def test_a_value_without_an_axis_for_environments_is_used_for_all() -> None:
    """NumPy broadcasts values in the same way when they are assigned to an array."""
    pair = Pair(Case(VECTOR, lanes=3))
    obs, next_obs, action, _, _, infos = next(pair.steps)
    for buffer in (pair.plain, pair.ours):
        buffer.add(obs[0], next_obs[:1], action, 1.5, True, infos)  # type: ignore[arg-type]  # The step has numbers, not arrays.
    pair.assert_same_arrays()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("done", np.array([0.5, 0.0])),
        ("done", np.array([2, 0])),
        ("infos", {"TimeLimit.truncated": np.array([True, False])}),
        ("TimeLimit.truncated", [{"TimeLimit.truncated": "yes"}] * 2),
        ("action", np.zeros((2, 1), np.float32)),
        ("reward", np.zeros(3)),
    ],
)
def test_the_refusal_of_a_wrong_step_names_the_argument(name: str, given: Any) -> None:
    pair = Pair(Case(VECTOR, lanes=2))
    pair.feed(2)
    names = ("obs", "next_obs", "action", "reward", "done", "infos")
    step = dict(zip(names, next(pair.steps), strict=True))
    step["infos" if name.startswith("TimeLimit") else name] = given
    with pytest.raises(ArgumentError, match=name):
        pair.ours.add(**step)
    assert pair.ours.pos == 2


def test_the_refusal_of_an_observation_names_the_missing_key() -> None:
    pair = Pair(Case(make_dict_space((3, 40, 40)), lanes=2))
    obs, *rest = next(pair.steps)
    with pytest.raises(ArgumentError, match=r"obs has no 'state'.*keys"):
        pair.ours.add({key: rows for key, rows in obs.items() if key != "state"}, *rest)


@pytest.mark.parametrize("batch_size", [-1, 2.0, None, (3,), "3"])
def test_a_wrong_batch_size_is_refused(batch_size: Any) -> None:
    pair = Pair(Case(VECTOR))
    with pytest.raises(ArgumentError, match="before a step was added"):
        pair.ours.sample(3)
    pair.feed(3)
    with pytest.raises(ArgumentError, match="batch_size"):
        pair.ours.sample(batch_size)


@pytest.mark.parametrize("slots", [[70], [-71], [[1, 2], [3, 4]]], ids=str)
def test_slots_outside_of_the_buffer_are_refused(slots: Any) -> None:
    pair = Pair(Case(VECTOR))
    pair.feed(90)
    with pytest.raises(ArgumentError, match="batch_inds"):
        pair.ours._get_samples(np.array(slots))


def make_rollouts(subclass: Subclass, observed: spaces.Space[Any]) -> list[Any]:
    """Return full rollouts of both buffers, each of the user's subclass of its class."""
    is_dict = isinstance(observed, spaces.Dict)
    made = []
    for kind in (buffers.DictRolloutBuffer if is_dict else buffers.RolloutBuffer, RolloutBuffer):
        rollout = subclass(kind)(6, observed, VECTOR, device="cpu", n_envs=2)
        rng = np.random.default_rng(2)
        stream = make_steps(Case(observed, VECTOR, lanes=2), np.random.default_rng(1))
        for _ in range(6):
            obs, _, action, reward, done, _ = next(stream)
            value, log_prob = (torch.from_numpy(rng.normal(size=2).astype(np.float32)) for _ in range(2))
            rollout.add(obs, action, reward, done, value, log_prob)
        made.append(rollout)
    return made


@pytest.mark.parametrize("subclass", [double_tensors, scale_advantages])
@pytest.mark.parametrize("observed", [VECTOR, make_dict_space((3, 40, 40))], ids=["vector", "dict"])
def test_methods_that_a_subclass_of_rollouts_overrides_are_called(subclass: Subclass, observed: Any) -> None:
    drawn = []
    for rollout in make_rollouts(subclass, observed):
        rollout.compute_returns_and_advantage(torch.ones(2, 1), np.array([True, False]))
        drawn.append(call_seeded(3, lambda rollout=rollout: [*rollout.get(5), *rollout.get()]))
    for theirs, ours in zip(*drawn, strict=True):
        assert_same_batch(theirs, ours)


def test_values_in_double_precision_are_not_rounded_before_the_computation() -> None:
    """A policy of float64 gives float64 values for the end of a rollout, and NumPy continues in that precision."""
    theirs, ours = make_rollouts(lambda base: base, VECTOR)
    for rollout in (theirs, ours):
        rollout.compute_returns_and_advantage(
            torch.tensor([[0.1], [1 / 3]], dtype=torch.float64), np.array([False] * 2)
        )
    assert_same_bits(theirs.advantages, ours.advantages, "advantages")


def test_arrays_that_are_replaced_between_epochs_are_used() -> None:
    """The plan of a gather is cached until an array is replaced."""
    drawn = []
    for rollout in make_rollouts(lambda base: base, VECTOR):
        rollout.compute_returns_and_advantage(torch.ones(2, 1), np.array([True, False]))
        found = call_seeded(3, lambda rollout=rollout: list(rollout.get(5)))
        rollout.advantages[:] = 7
        found += rollout.get(5)
        rollout.returns = rollout.returns[::-1] * 2
        found += rollout.get(5)
        rollout.returns[:] = 3
        found += rollout.get(5)
        drawn.append(found)
    for theirs, ours in zip(*drawn, strict=True):
        assert_same_batch(theirs, ours)


def test_a_step_for_a_full_rollout_is_refused() -> None:
    _, ours = make_rollouts(lambda base: base, VECTOR)
    row = np.zeros((2, 5), np.float32)
    number = torch.zeros(2)
    with pytest.raises(ArgumentError, match=r"all 6 steps.*reset\(\)"):
        ours.add(row, row, np.zeros(2), np.zeros(2), number, number)
    for size in (0, -1, 2.0):
        with pytest.raises(ArgumentError, match="batch_size"):
            list(ours.get(size))

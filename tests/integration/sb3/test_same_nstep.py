"""n-step returns: `ReplayBuffer(n_steps=...)` gives the samples and trained weights of `NStepReplayBuffer`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from holdall.errors import ArgumentError
from holdall.sb3 import ReplayBuffer
from holdall.testing import OracleMemory
from holdall.testing.oracle import assert_same_bits, n_step_batch

from .comparison import Task, assert_same_learning, make_learning, train
from .environments import ARM, BUTTONS, VECTOR, Stacked, Wander, make_dict_space, repeat
from .pair import Case, assert_same_batch, call_seeded, make_steps

if not hasattr(buffers, "NStepReplayBuffer"):
    pytest.skip("Stable-Baselines3 has n-step returns from 2.7 on", allow_module_level=True)
NStepReplayBuffer: Any = buffers.NStepReplayBuffer

HOW: dict[str, Any] = {"n_steps": 3, "gamma": 0.97}


@pytest.mark.parametrize("n_steps", [2, 3, 11])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("handle_timeout_termination", [True, False])
def test_every_sample_is_sb3s(n_steps: int, lanes: int, handle_timeout_termination: bool) -> None:
    """The rule holds before the buffer is full and after it. Every tensor is the same, also the discounts."""
    case = Case(VECTOR, lanes=lanes)
    how: dict[str, Any] = {"n_envs": lanes, "n_steps": n_steps, "gamma": 0.9, "device": "cpu"}
    how["handle_timeout_termination"] = handle_timeout_termination
    plain = NStepReplayBuffer(40, case.observation, case.action, **how)
    ours = ReplayBuffer(40, case.observation, case.action, **how)
    stream = make_steps(case, np.random.default_rng(1))
    for _ in range(45):
        step = next(stream)
        plain.add(*copy.deepcopy(step))
        ours.add(*copy.deepcopy(step))
        expected = call_seeded(3, lambda: plain.sample(50))
        assert_same_batch(expected, call_seeded(3, lambda: ours.sample(50)))


def test_normalised_samples_are_sb3s() -> None:
    """Rewards are normalised one by one, before they are summed."""
    normalise = VecNormalize(DummyVecEnv(repeat(Wander, 2)))
    normalise.reset()
    for _ in range(20):
        normalise.step(np.zeros((2, 2)))
    case = Case(VECTOR, lanes=2)
    how: dict[str, Any] = {"n_envs": 2, "device": "cpu", **HOW}
    plain = NStepReplayBuffer(40, case.observation, case.action, **how)
    ours = ReplayBuffer(40, case.observation, case.action, **how)
    stream = make_steps(case, np.random.default_rng(1))
    for _ in range(30):
        step = next(stream)
        plain.add(*copy.deepcopy(step))
        ours.add(*copy.deepcopy(step))
    expected = call_seeded(3, lambda: plain.sample(50, env=normalise))
    assert_same_batch(expected, call_seeded(3, lambda: ours.sample(50, env=normalise)))


@pytest.mark.parametrize("algorithm", ["DQN", "SAC", pytest.param("TD3", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_training_ends_in_the_same_weights(algorithm: str, lanes: int) -> None:
    """The buffer becomes full. Some episodes terminate, and some are truncated."""
    actions = BUTTONS if algorithm == "DQN" else ARM
    task = Task(partial(Wander, VECTOR, actions), algorithm, lanes=lanes, buffer_size=90)
    assert_same_n_step_training(task, lanes)


def test_frame_stacks_end_in_the_same_weights() -> None:
    """The first and the last observation of a return share frames."""
    assert_same_n_step_training(Task(partial(Stacked, BUTTONS), "DQN", "CnnPolicy", buffer_size=90), 1)


def test_normalised_training_ends_in_the_same_weights() -> None:
    """VecNormalize normalises with the statistics at the moment of the draw."""

    def normalise(vec_env: VecEnv) -> VecEnv:
        return VecNormalize(vec_env)

    assert_same_n_step_training(Task(Wander, lanes=2, wrap=normalise, buffer_size=90), 2)


def assert_same_n_step_training(task: Task, lanes: int) -> None:
    acts = (make_learning(150 * lanes),)
    plain = train(task.make_model(NStepReplayBuffer, replay_buffer_kwargs=HOW), *acts)
    ours = train(task.make_model(ReplayBuffer, replay_buffer_kwargs=HOW), *acts)
    assert type(plain.replay_buffer) is NStepReplayBuffer
    assert plain._n_updates > 50
    assert_same_learning(plain, ours)


@pytest.mark.parametrize("lanes", [1, 3])
def test_dict_samples_are_the_oracles(lanes: int) -> None:
    """Stable-Baselines3's own buffer refuses Dict observations, so the samples are compared with the oracle."""
    space = make_dict_space((3, 40, 40))
    ours = ReplayBuffer(40 * lanes, space, ARM, device="cpu", n_envs=lanes, **HOW)
    oracle = OracleMemory(40 * lanes, lanes)
    stream = make_steps(Case(space, ARM, lanes), np.random.default_rng(2))
    for _ in range(70):
        obs, next_obs, action, reward, done, infos = next(stream)
        cut = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        ours.add(obs, next_obs, action, reward, done, infos)
        oracle.add(obs, action, reward, next_obs, done & ~cut, cut)
    batch = call_seeded(1, lambda: ours.sample(60))
    slots, envs = call_seeded(1, lambda: (np.random.randint(0, 40, 60), np.random.randint(0, lanes, 60)))  # noqa: NPY002
    ids = ours._find_ids(slots, envs)
    expected = n_step_batch(oracle, ids, 3, 0.97)
    for key in space.spaces:
        shape = tuple(batch.observations[key].shape)
        assert_same_bits(batch.observations[key], expected.obs[key].reshape(shape))
        assert_same_bits(batch.next_observations[key], expected.next_obs[key].reshape(shape))
    assert_same_bits(batch.dones, (expected.terminated & ~expected.truncated).astype(np.float32).reshape(-1, 1))
    np.testing.assert_allclose(batch.rewards.numpy()[:, 0], expected.reward, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(batch.discounts.numpy()[:, 0], expected.discount, rtol=1e-6)


def test_dict_observations_can_be_trained_on() -> None:
    """Stable-Baselines3's own buffer refuses Dict observations."""
    task = Task(partial(Wander, make_dict_space()), "SAC", "MultiInputPolicy", lanes=2)
    model = train(task.make_model(ReplayBuffer, replay_buffer_kwargs=HOW), make_learning(100))
    assert model._n_updates > 20


def test_a_wrong_number_of_steps_is_refused() -> None:
    """The refusal names the argument."""
    with pytest.raises(ArgumentError, match=r"^n_steps \(0\)"):
        ReplayBuffer(40, VECTOR, spaces.Discrete(2), n_steps=0)

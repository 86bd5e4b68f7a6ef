"""Copies of SB3's buffers to holdall's, and settings of a model that do not reach a buffer."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stable_baselines3
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.her import her_replay_buffer

from holdall.errors import ArgumentError, CheckpointError
from holdall.sb3 import CheckpointCallback, HerReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

from .comparison import Task, assert_same_learning, make_learning, train
from .environments import BUTTONS, VECTOR, Wander, make_dict_space, repeat
from .pair import Case, Pair, assert_same_batch, call_seeded, make_steps
from .test_same_her import Reach

HAS_STEPS = hasattr(buffers, "NStepReplayBuffer")


@pytest.mark.parametrize("case", [Case(VECTOR, lanes=3), Case(make_dict_space((3, 40, 40)), BUTTONS, 2)], ids=str)
@pytest.mark.parametrize("ticks", [0, 9, 23, 46, 61], ids=["empty", "begun", "just full", "full twice", "wrapped"])
def test_a_copy_has_the_slots_of_the_original(case: Case, ticks: int) -> None:
    """The copy draws the same rows and continues in the same way."""
    pair = Pair(case, buffer_size=23 * case.lanes)
    pair.feed(ticks)
    pair.ours = ReplayBuffer.copy_of(pair.plain, budget=None)
    pair.assert_same_arrays()
    if ticks:
        pair.assert_same_samples()
    pair.feed(30)
    pair.assert_same_arrays()
    pair.assert_same_samples()


@pytest.mark.skipif(not HAS_STEPS, reason="Stable-Baselines3 has n-step returns from 2.7 on")
def test_a_copy_keeps_n_step_returns() -> None:
    kind: Any = getattr(buffers, "NStepReplayBuffer", None)
    plain = kind(40, VECTOR, BUTTONS, n_steps=4, gamma=0.9, device="cpu")
    stream = make_steps(Case(VECTOR, BUTTONS), np.random.default_rng(0))
    for _ in range(55):
        plain.add(*copy.deepcopy(next(stream)))
    ours = ReplayBuffer.copy_of(plain)
    assert (ours.n_steps, ours.gamma) == (4, 0.9)
    assert_same_batch(call_seeded(1, lambda: plain.sample(50)), call_seeded(1, lambda: ours.sample(50)))


@pytest.mark.parametrize("copy_info_dict", [False, True])
def test_a_copy_keeps_episodes_and_infos(copy_info_dict: bool) -> None:
    """Hindsight draws the same transitions and goals from a copy."""
    env = DummyVecEnv([lambda: Reach(informed=True)] * 2)
    settings: dict[str, Any] = {"replay_buffer_kwargs": {"copy_info_dict": copy_info_dict}, "learning_starts": 1_000}
    model = SAC(
        "MultiInputPolicy",
        env,
        replay_buffer_class=her_replay_buffer.HerReplayBuffer,
        buffer_size=80,
        seed=1,
        device="cpu",
        **settings,
    )
    model.learn(130)
    plain: Any = model.replay_buffer
    ours = HerReplayBuffer.copy_of(plain)
    assert_same_batch(call_seeded(1, lambda: plain.sample(60)), call_seeded(1, lambda: ours.sample(60)))


def test_a_saved_buffer_of_sb3_can_be_copied(tmp_path: Path) -> None:
    """`load_replay_buffer` gives the model SB3's buffer. A checkpoint is refused, with the line that copies it."""
    task = Task(partial(Wander, VECTOR), "SAC", lanes=2, buffer_size=60)
    train(task.make_model(None), make_learning(90)).save_replay_buffer(tmp_path / "buffer")
    plain = task.make_model(None)
    ours = task.make_model(ReplayBuffer)
    for model in (plain, ours):
        model.load_replay_buffer(tmp_path / "buffer")
    callback = CheckpointCallback(1, tmp_path / "run")
    callback.init_callback(ours)
    with pytest.raises(CheckpointError, match=r"ReplayBuffer\.copy_of\(model\.replay_buffer\)"):
        callback.save()
    ours.replay_buffer = ReplayBuffer.copy_of(ours.replay_buffer)  # type: ignore[arg-type]  # The model has a buffer.
    for model in (plain, ours):
        model.set_random_seed(3)
        model.learn(80)
    assert_same_learning(plain, ours)
    callback.save().result()


def test_a_buffer_that_cannot_be_copied_is_refused() -> None:
    how: dict[str, Any] = {"device": "cpu", "optimize_memory_usage": True, "handle_timeout_termination": False}
    for buffer in (buffers.ReplayBuffer(10, VECTOR, BUTTONS, **how), ReplayBuffer(10, VECTOR, BUTTONS)):
        with pytest.raises(ArgumentError, match="buffer"):
            ReplayBuffer.copy_of(buffer)


@pytest.mark.skipif(not HAS_STEPS, reason="Stable-Baselines3 has n-step returns from 2.7 on")
@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize("version", [stable_baselines3.__version__, "2.9.0"])
def test_n_steps_that_do_not_reach_the_buffer_cause_a_warning(
    kind: type[ReplayBuffer], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning has the right line. Newer versions of Stable-Baselines3 warn by themselves."""
    monkeypatch.setattr(stable_baselines3, "__version__", version)
    env = DummyVecEnv(repeat(partial(Wander, VECTOR, BUTTONS), 1))
    with pytest.warns(UserWarning, match=r'replay_buffer_kwargs=\{"n_steps": 5, "gamma": 0.97\}'):
        DQN("MlpPolicy", env, n_steps=5, gamma=0.97, replay_buffer_class=kind, buffer_size=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        how = {"n_steps": 5, "gamma": 0.97}
        model = DQN("MlpPolicy", env, replay_buffer_class=kind, replay_buffer_kwargs=how, buffer_size=50)
        kind(50, VECTOR, BUTTONS)
    assert model.replay_buffer.n_steps == 5  # type: ignore[union-attr]  # The model has a buffer.


@pytest.mark.filterwarnings("ignore:.*is ignored because a custom:UserWarning")  # SB3 warns, too, from 2.9.1 on.
@pytest.mark.skipif(not HAS_STEPS, reason="Stable-Baselines3 has n-step returns from 2.7 on")
def test_hindsight_has_one_step_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stable_baselines3, "__version__", "2.8.0")
    with pytest.warns(UserWarning, match="one-step returns only"):
        SAC("MultiInputPolicy", Reach(), n_steps=5, replay_buffer_class=HerReplayBuffer, buffer_size=50)


def test_n_steps_need_a_version_that_has_them() -> None:
    if HAS_STEPS:
        assert ReplayBuffer(50, VECTOR, spaces.Discrete(2), n_steps=2).n_steps == 2
        return
    with pytest.raises(ArgumentError, match=r"2\.7"):
        ReplayBuffer(50, VECTOR, spaces.Discrete(2), n_steps=2)

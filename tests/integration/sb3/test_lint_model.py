"""Lint of live models, and the callback that runs it when training starts."""

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

import holdall
from holdall import lint
from holdall.sb3 import LintCallback, LintError, LintWarning, ReplayBuffer
from holdall.tools.probe.inspection import inspect_model
from holdall.tools.probe.snapshot import Snapshot


class Camera(gym.Env[Any, Any]):
    def __init__(self, dtype: type = np.uint8) -> None:
        image = spaces.Box(0, 255, (36, 36, 3), dtype)
        self.observation_space = spaces.Dict({"image": image, "vector": spaces.Box(-1, 1, (31,), np.float32)})
        self.action_space = spaces.Box(-1, 1, (8,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


def find_rules(*arguments: Any, **keywords: Any) -> set[str]:
    return {finding.rule for finding in lint.model(*arguments, **keywords)}


class OwnSAC(SAC):
    pass


def test_all_settings_of_a_live_model_are_inspected() -> None:
    live = OwnSAC("MultiInputPolicy", Camera(), buffer_size=100)
    run = Snapshot("", "live", **inspect_model(live, 50, []))
    (model,) = run.learning_models
    assert model.algorithm == "SAC"
    assert model.class_name.endswith(".OwnSAC")
    assert not model.is_on_policy
    assert (model.n_envs, model.device) == (1, "cpu")
    assert model.count("buffer_size") == 100
    assert model.train_freq == (1, "step")
    assert model.run_steps == 50
    buffer = run.find_buffer(model)
    assert buffer is not None
    assert (buffer.transitions, buffer.is_sb3) == (100, True)


def test_the_total_of_a_resumed_run_is_not_its_number_of_steps() -> None:
    live = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").learn(8)
    (model,) = Snapshot("", "live", **inspect_model(live, 50, [])).learning_models
    assert model.is_on_policy
    assert (model.rollout_transitions, model.train_freq) == (8, None)
    assert (model.total_timesteps, model.run_steps) == (50, None)


def test_a_buffer_beyond_the_budget_is_found_with_the_bytes_that_were_allocated() -> None:
    model = SAC("MultiInputPolicy", Camera(), buffer_size=1_000)
    buffer: Any = model.replay_buffer
    arrays = [*buffer.observations.values(), *buffer.next_observations.values(), buffer.actions]
    allocated = sum(array.nbytes for array in [*arrays, buffer.rewards, buffer.dones, buffer.timeouts])
    (finding,) = lint.model(model, settings=lint.Settings(select=("M01",), budget=allocated - 1))
    assert finding.numbers["needed_bytes"] == allocated
    assert finding.severity is lint.Severity.WARNING  # The run may be too short to fill the buffer.
    (certain,) = lint.model(model, 2_000, settings=lint.Settings(select=("M01",), budget=allocated - 1))
    assert certain.severity is lint.Severity.ERROR
    assert lint.model(model, 500, settings=lint.Settings(select=("M01",), budget=allocated - 1)) == []
    assert lint.model(model, settings=lint.Settings(select=("M01",), budget=allocated)) == []


def test_holdalls_own_buffer_is_judged_by_its_budget() -> None:
    kwargs = {"budget": "64MiB"}
    model = SAC(
        "MultiInputPolicy", Camera(), buffer_size=1_000, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs=kwargs
    )
    (finding,) = lint.model(model, settings=lint.Settings(select=("M",), budget="32MiB"))
    assert (finding.rule, finding.numbers["needed_bytes"]) == ("M01", 64 * 2**20)
    assert "may take its budget of 64.0 MiB" in finding.message
    assert lint.model(model, settings=lint.Settings(select=("M",), budget="128MiB")) == []


def test_holdalls_own_buffer_without_a_budget_is_not_judged_by_the_plain_layout() -> None:
    model = SAC("MultiInputPolicy", Camera(), buffer_size=1_000, replay_buffer_class=ReplayBuffer)
    assert lint.model(model, settings=lint.Settings(select=("M",), budget=1)) == []


def test_rules_about_steps_and_batches_see_a_live_model() -> None:
    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2), n_steps=50, batch_size=50, device="cpu")
    model.batch_size = 64
    assert "L05" in find_rules(model)
    assert "L10" in find_rules(model, total_timesteps=150)
    assert "L10" not in find_rules(model)
    assert "L03" in find_rules(
        DQN("MlpPolicy", "CartPole-v1", learning_starts=1000, buffer_size=100), total_timesteps=100
    )


def test_images_as_floats_and_stacks_are_seen() -> None:
    class Screen(Camera):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(0, 255, (36, 36, 1), np.float32)
            self.action_space = spaces.Discrete(2)

    env = VecFrameStack(make_vec_env(Screen, n_envs=1), n_stack=4)
    model = DQN("MlpPolicy", env, buffer_size=100)
    assert "M06" in find_rules(model)
    (copies,) = lint.model(model, settings=lint.Settings(select=("M07",), budget=1_000_000))
    assert copies.numbers["times"] == 8
    assert copies.numbers["repeated_bytes"] == 100 * 36 * 36 * 4 * 7


def test_an_object_that_is_not_a_model_is_refused() -> None:
    with pytest.raises(holdall.ArgumentError, match="model"):
        lint.model(object())


def test_the_callback_warns_before_the_first_step() -> None:
    env = make_vec_env("CartPole-v1", n_envs=2)
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu")
    callback = LintCallback()
    evaluate = EvalCallback(env, eval_freq=1_000_000, verbose=0)
    with pytest.warns(LintWarning) as caught:
        model.learn(16, callback=CallbackList([callback, evaluate]))
    codes = {str(warning.message).split(": ")[1].split()[0] for warning in caught}
    assert codes == {"L17", "L18"}
    assert {finding.rule for finding in callback.findings} >= codes


def test_the_callback_stops_a_run_that_cannot_learn() -> None:
    model = DQN("MlpPolicy", "CartPole-v1", learning_starts=1000, buffer_size=100)
    with pytest.raises(LintError, match="L03"):
        model.learn(100, callback=LintCallback())
    assert model.num_timesteps == 0
    with pytest.warns(LintWarning, match="L03"):
        model.learn(8, callback=LintCallback(lint.Settings(fail_on="never")))


def test_a_run_without_mistakes_causes_no_warning(tmp_path: Any) -> None:
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(16, callback=[LintCallback(), CheckpointCallback(8, str(tmp_path))])

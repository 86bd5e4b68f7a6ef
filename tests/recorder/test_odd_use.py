"""A recorder accepts actions of other libraries and odd rewards, and refuses modes and spaces that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import holdall

from .watched_environments import InPlaceVectorEnv, WatchedEnv, assert_holds

NUMBER = spaces.Discrete(5)
VECTOR = spaces.Box(-1, 1, (2,), np.float32)
NESTED = spaces.Dict({"move": VECTOR, "button": NUMBER})


class Strict(WatchedEnv):
    """Refuses actions that its space does not contain, as many environments do."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} ({type(action)}) invalid"
        return super().step(action)


def make_memory(env: Any, lanes: int = 1, **settings: Any) -> holdall.ReplayMemory:
    return holdall.ReplayMemory(env.observation_space, env.action_space, 1000, lanes, **settings)


def make_vector(envs: list[Any]) -> Any:
    makers: list[Any] = [lambda env=env: env for env in envs]
    return gym.vector.SyncVectorEnv(makers)


class Foreign:
    """A stand-in for the array of another library. JAX itself would make every later fork of this process unsafe."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)

    def __array__(self, *given: Any, **options: Any) -> Any:
        return self.value


# ---------------------------------------------------------------- actions


MAKERS = {"torch": torch.as_tensor, "foreign": Foreign, "lists": lambda value: value.tolist()}


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("lanes", [None, 1, 3], ids=["one environment", "one lane", "three lanes"])
def test_environments_get_actions_of_every_library_as_arrays(made: Callable[[Any], Any], lanes: int | None) -> None:
    numbers = np.arange(lanes or 1)
    both = {"move": np.zeros((lanes or 1, 2), np.float32), "button": made(numbers)}
    for space, action in ((NUMBER, made(numbers)), (NESTED, both)):
        envs = [Strict("vector", 0.3, seed, space) for seed in range(lanes or 1)]
        memory = make_memory(envs[0], len(envs))
        stepped = make_vector(envs) if lanes else envs[0]
        recorder = holdall.Recorder(stepped, memory)
        for _ in range(12):
            recorder.step(action)
        assert_holds(memory, [env.log for env in envs])


def test_an_environment_of_tensors_gets_tensors() -> None:
    class Tensors(InPlaceVectorEnv):
        def step(self, actions: Any) -> Any:
            assert isinstance(actions, torch.Tensor)
            obs, *rest = super().step(actions.numpy())
            return torch.as_tensor(obs), *rest

        def reset(self, **how: Any) -> Any:
            obs, info = super().reset(**how)
            return torch.as_tensor(obs), info

    for mode in AutoresetMode:
        envs = Tensors([WatchedEnv("vector", 0.3, seed) for seed in range(2)], mode)
        memory = make_memory(envs.lanes[0], 2)
        holdall.Recorder(envs, memory).collect(lambda obs: (torch.as_tensor(obs)[:, 0] > 0).long(), 12)
        assert_holds(memory, [lane.log for lane in envs.lanes])


def test_a_policy_may_return_actions_and_states_as_predict_of_stable_baselines3_does() -> None:
    env = Strict("vector", 0.3, 0)
    memory = make_memory(env)
    recorder = holdall.Recorder(env, memory)
    recorder.collect(lambda _: (np.array(1), None), 1e1)
    recorder.step(2.0)  # An integer as a float.
    assert_holds(memory, [env.log])
    assert len(memory) == 11


def test_a_wrong_policy_or_wrong_extras_are_refused_before_a_step() -> None:
    env = WatchedEnv("vector", 0.3, 0)
    recorder = holdall.Recorder(env, make_memory(env, extras={"log_prob": spaces.Box(-9, 9, (), np.float32)}))
    with pytest.raises(holdall.ArgumentError, match=r"policy \(3\) must be a function"):
        recorder.collect(3, 5)  # type: ignore[arg-type]  # The test passes a wrong type.
    with pytest.raises(holdall.ArgumentError, match=r"extras \(0.5\) must be a dict"):
        recorder.step(1, 0.5)  # type: ignore[arg-type]
    with pytest.raises(holdall.ArgumentError, match=r"extras\['log_prob'\] is a list of unequal"):
        recorder.step(1, log_prob=[None])
    assert env.resets == 0


@pytest.mark.parametrize("lanes", [None, 2], ids=["one environment", "two lanes"])
def test_tensors_with_gradients_are_accepted_as_actions_and_extras(lanes: int | None) -> None:
    envs = [WatchedEnv("vector", 0.3, seed, VECTOR) for seed in range(lanes or 1)]
    memory = make_memory(envs[0], len(envs), extras={"log_prob": spaces.Box(-9, 9, (), np.float32)})
    stepped = make_vector(envs) if lanes else envs[0]
    shape = (lanes,) if lanes else ()
    given = torch.full((*shape, 2), 0.5, requires_grad=True), {"log_prob": torch.full(shape, 2.0, requires_grad=True)}
    holdall.Recorder(stepped, memory).collect(lambda _: given, 12)
    assert_holds(memory, [env.log for env in envs])
    assert set(memory.sample(8).extras["log_prob"]) == {2.0}


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (lambda reward: np.array([reward]), ()),
        (torch.tensor, ()),
        (lambda reward: [int(reward), 1] if reward < 5 else [reward, 0.5], (2,)),
    ],
    ids=["one number in an array", "a tensor", "lists of numbers"],
)
def test_a_reward_of_one_environment_may_be_an_array_a_tensor_or_a_list(given: Any, shape: tuple[int, ...]) -> None:
    env = WatchedEnv("vector", 0.3, 1)
    memory = make_memory(env, reward_shape=shape)
    holdall.Recorder(gym.wrappers.TransformReward(env, given), memory).collect(lambda _: 1, 20)
    kept = memory.gather(np.arange(20)).reward
    np.testing.assert_array_equal(kept, [np.asarray(given(seen.reward)).reshape(shape) for seen in env.log])


def test_a_list_of_integers_may_be_followed_by_fractions() -> None:
    class Lists(InPlaceVectorEnv):
        def step(self, actions: Any) -> Any:
            obs, reward, *rest = super().step(actions)
            return obs, [0, 0] if len(self.lanes[0].log) == 1 else (reward + 0.5).tolist(), *rest

    envs = Lists([WatchedEnv("vector", 0.0, seed) for seed in range(2)], AutoresetMode.NEXT_STEP)
    memory = make_memory(envs.lanes[0], 2)
    holdall.Recorder(envs, memory).collect(lambda _: np.zeros(2, np.int64), 3)
    expected = [0, 0, *(lane.log[step].reward + 0.5 for step in (1, 2) for lane in envs.lanes)]
    np.testing.assert_array_equal(memory.gather(np.arange(6)).reward, expected)


def test_an_integer_that_no_float_represents_is_refused() -> None:
    env = WatchedEnv("vector", 0.0, 1)
    memory = make_memory(env)
    recorder = holdall.Recorder(gym.wrappers.TransformReward(env, lambda _: 2**60 + 1), memory)
    with pytest.raises(holdall.ArgumentError, match="reward has the value 1152921504606846977"):
        recorder.step(1)
    assert memory.next_id == 0


# ---------------------------------------------------------------- wrong modes and spaces


def test_a_mode_that_the_environment_contradicts_is_refused() -> None:
    envs = InPlaceVectorEnv([WatchedEnv("vector", 0.3, 0)], AutoresetMode.SAME_STEP)
    with pytest.raises(holdall.ArgumentError, match=r"autoreset_mode is 'next_step', but.*says 'same_step'; leave"):
        holdall.Recorder(envs, make_memory(envs.lanes[0]), autoreset_mode="next-step")
    vector = DummyVecEnv([lambda: WatchedEnv("vector", 0.3, 0)])
    with pytest.raises(holdall.ArgumentError, match=r"autoreset_mode is 'disabled', but.*'same_step'"):
        holdall.Recorder(vector, make_memory(vector), autoreset_mode=AutoresetMode.DISABLED)


def test_an_end_in_a_step_that_should_only_reset_is_refused() -> None:
    """The environment never resets. Every step after an end would count as a reset."""

    class NeverReset(WatchedEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), 0.0, True, False, {}

    env = NeverReset("vector", 1.0, 0)
    memory = make_memory(env)
    recorder = holdall.Recorder(env, memory, autoreset_mode="next_step")
    recorder.step(1)
    with pytest.raises(holdall.ArgumentError, match=r"lanes \[0\] have a reward or an end in the step after"):
        recorder.step(1)
    assert memory.next_id == 1


def test_a_wrapper_may_add_rewards_to_steps_that_reset() -> None:
    env = WatchedEnv("vector", 0.5, 0)
    paid = gym.wrappers.TransformReward(gym.wrappers.Autoreset(env), lambda reward: float(reward) + 1)
    memory = make_memory(env)
    holdall.Recorder(paid, memory).collect(lambda _: 1, 30)
    ids = np.arange(memory.next_id)
    rewards = memory.gather(ids[memory.are_valid(ids)]).reward
    np.testing.assert_array_equal(rewards, [seen.reward + 1 for seen in env.log])


def test_an_observation_of_another_dtype_than_its_space_is_refused_with_a_remedy() -> None:
    """Stable-Baselines3's normalisation returns float32, whatever the dtype of its space."""
    env = WatchedEnv("vector", 0.3, 0)
    env.observation_space = spaces.Box(-1, 1, (3,), np.float64)
    envs = VecNormalize(DummyVecEnv([lambda: env]))
    with pytest.raises(holdall.ArgumentError, match=r"obs has dtype float32.*set envs.observation_space.*the memory"):
        holdall.Recorder(envs, make_memory(envs)).step(np.zeros(1, np.int64))
    envs.observation_space = spaces.Box(-10, 10, (3,), np.float32)
    memory = make_memory(envs)
    holdall.Recorder(envs, memory).collect(lambda _: np.zeros(1, np.int64), 8)
    assert len(memory) == 8


def test_steps_from_elsewhere_in_the_middle_of_an_episode_cause_one_warning() -> None:
    """Two recorders of one memory add to one lane in turn."""
    envs = [WatchedEnv("vector", 0.0, seed) for seed in range(2)]
    memory = make_memory(envs[0])
    first, second = (holdall.Recorder(env, memory) for env in envs)
    first.step(1)
    second.step(1)
    with pytest.warns(UserWarning, match=r"outside of this Recorder.*lanes \[0\].*one Recorder"):
        first.step(1)
    for _ in range(3):
        first.step(1)


def test_steps_from_elsewhere_between_episodes_are_accepted() -> None:
    """For example, demonstrations may be added after an episode of the recorder has ended."""
    env = WatchedEnv("vector", 1.0, 0)
    memory = make_memory(env)
    recorder = holdall.Recorder(env, memory)
    obs = np.zeros(3, np.float32)
    for _ in range(3):
        recorder.step(1)
        memory.add(obs, 1, 1.0, obs, True, False)
    assert len(memory) == 6


def test_a_reset_of_one_lane_causes_no_warning() -> None:
    envs = InPlaceVectorEnv([WatchedEnv("vector", 0.0, seed) for seed in range(2)], AutoresetMode.DISABLED)
    memory = make_memory(envs.lanes[0], 2)
    recorder = holdall.Recorder(envs, memory)
    for _ in range(3):
        recorder.step(np.zeros(2, np.int64))
        recorder.reset(options={"reset_mask": np.array([True, False])})
    assert_holds(memory, [lane.log for lane in envs.lanes])


def test_attributes_of_vector_environments_are_not_read_from_one_environment() -> None:
    """Gymnasium before 1.0 warns at each such access."""

    class Asked(gym.Wrapper[Any, Any, Any, Any]):
        def __getattr__(self, name: str) -> Any:
            assert not name.startswith("single_")
            raise AttributeError(name)

    env = WatchedEnv("vector", 0.3, 0)
    assert holdall.Recorder(Asked(env), make_memory(env)).collect(lambda _: 1, 5) == 5


def test_environments_of_an_older_gym_are_refused() -> None:
    class Four(WatchedEnv):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated or truncated, info

    class Alone(WatchedEnv):
        def reset(self, **how: Any) -> Any:
            return super().reset(**how)[0]

    for kind, message in (
        (Four, "envs.step returned 4 values, but 5 values are expected"),
        (Alone, "envs.reset returned a nda"),
    ):
        env = kind("vector", 0.3, 0)
        memory = make_memory(env)
        recorder = holdall.Recorder(env, memory)
        with pytest.raises(holdall.ArgumentError, match=message):
            recorder.step(1)
        assert memory.next_id == 0


class FailsOnce(WatchedEnv):
    """Its first step fails."""

    has_failed = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.has_failed:
            self.has_failed = True
            raise OSError("the simulator is not ready")
        return super().step(action)


class AddOnly:
    """A memory with `add` and `schema` alone, such as the writer of a memory over shards."""

    def __init__(self, memory: holdall.ReplayMemory) -> None:
        self.schema = memory.schema
        self.add = memory.add


def test_a_writer_can_be_recorded_to_after_the_first_step_has_failed() -> None:
    env = FailsOnce("vector", 0.3, 0)
    memory = make_memory(env)
    recorder = holdall.Recorder(env, AddOnly(memory))
    with pytest.raises(OSError, match="not ready"):
        recorder.step(1)
    recorder.collect(lambda _: 1, 12)
    assert_holds(memory, [env.log])

"""A recorder with every kind of environment, and the arguments that it refuses."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

import holdall

from .watched_environments import InPlaceVectorEnv, Seen, WatchedEnv, assert_holds

MODES = list(AutoresetMode)


def list_makers(lanes: int, space: str = "dict", ends: float = 0.3) -> list[Callable[[], Any]]:
    return [functools.partial(WatchedEnv, space, ends, lane) for lane in range(lanes)]


def make_memory(env: WatchedEnv, lanes: int = 1, **settings: Any) -> holdall.ReplayMemory:
    return holdall.ReplayMemory(env.observation_space, env.action_space, 1000, lanes, seed=0, **settings)


def make_custom_envs(mode: AutoresetMode, lanes: int = 2, ends: float = 0.3, **how: Any) -> InPlaceVectorEnv:
    return InPlaceVectorEnv([make() for make in list_makers(lanes, "vector", ends)], mode, **how)


def make_random_policy(lanes: int) -> Callable[[Any], Any]:
    generator = np.random.default_rng(0)
    return lambda _: generator.integers(0, 5, lanes)


# ---------------------------------------------------------------- kinds of environments


@pytest.mark.parametrize(("mode", "shared_memory"), [*((mode, True) for mode in MODES), (MODES[1], False)])
def test_steps_of_workers_in_processes_are_recorded(mode: AutoresetMode, shared_memory: bool) -> None:
    # Importing TorchRL makes "spawn" the default of the process, whose workers would not find this module.
    how: dict[str, Any] = {"shared_memory": shared_memory, "copy": False, "context": "fork", "autoreset_mode": mode}
    envs = gym.vector.AsyncVectorEnv(list_makers(2), **how)
    memory = make_memory(WatchedEnv("dict", 0, 0), 2)
    recorder = holdall.Recorder(envs, memory)
    recorder.reset(seed=1)
    for _ in range(25):
        returned = recorder.step(np.random.default_rng(0).integers(0, 5, 2))
        assert len(returned) == 5
    assert_holds(memory, list(envs.get_attr("log")))
    envs.close()


@pytest.mark.parametrize("kind", [DummyVecEnv, functools.partial(SubprocVecEnv, start_method="fork")])
def test_steps_of_a_vecenv_of_stable_baselines3_are_recorded(
    kind: Callable[[Any], DummyVecEnv | SubprocVecEnv],
) -> None:
    envs = kind(list_makers(3))
    memory = make_memory(WatchedEnv("dict", 0, 0), 3)
    recorder = holdall.Recorder(envs, memory)
    first = recorder.reset(seed=1)
    assert first.keys() == {"image", "number"}
    for _ in range(25):
        obs, reward, dones, infos = recorder.step(np.array([1, 2, 3]))
        assert len(infos) == len(dones) == len(reward) == 3
        assert recorder.obs is obs
    logs = [
        [seen._replace(truncated=seen.truncated and not seen.terminated) for seen in log]
        for log in envs.get_attr("log")
    ]
    assert any(seen.terminated or seen.truncated for log in logs for seen in log)
    assert_holds(memory, logs)
    envs.close()


def test_final_stacks_of_wrappers_of_stable_baselines3_are_recorded() -> None:
    envs = VecFrameStack(DummyVecEnv(list_makers(2, "image", ends=0.5)), 2, "first")
    memory = holdall.ReplayMemory(envs.observation_space, envs.action_space, 1000, 2)
    holdall.Recorder(envs, memory).collect(make_random_policy(2), 20)
    assert len(memory) == 40
    logs = envs.get_attr("log")
    batch = memory.gather(np.arange(0, 40, 2))
    np.testing.assert_array_equal(batch.next_obs[:, 4:], [seen.next_obs for seen in logs[0]])
    np.testing.assert_array_equal(batch.obs[:, 4:], [seen.obs for seen in logs[0]])


def test_the_caller_or_the_recorder_resets_one_environment() -> None:
    for resets in (True, False):
        env = WatchedEnv("nested", 0.4, seed=3)
        memory = make_memory(env)
        recorder = holdall.Recorder(env, memory)
        obs, info = recorder.reset(seed=0)
        assert obs.keys() == {"inner", "bits"}
        ends = 0
        for action in range(30):
            _, _, terminated, truncated, info = recorder.step(action % 5)
            assert info["steps"] == action + 1
            ends += terminated or truncated
            if resets and (terminated or truncated):
                recorder.reset()
        assert env.resets == 1 + ends - (not resets and (terminated or truncated))
        assert_holds(memory, [env.log])


def mix_types(reward: Any) -> Any:
    return int(reward) if reward > 4 else np.float32(reward)


@pytest.mark.parametrize("space", ["number", "vector", "tuple"])
def test_rewards_of_one_environment_may_change_their_type(space: str) -> None:
    env = WatchedEnv(space, 0.3, seed=4)
    wrapped = gym.wrappers.TransformReward(env, mix_types)
    memory = make_memory(env)
    assert holdall.Recorder(wrapped, memory).collect(lambda _: 2, 20) == 20
    assert_holds(memory, [env.log])


def test_rewards_of_several_numbers_are_recorded() -> None:
    env = WatchedEnv("vector", 0.3, seed=5)
    wrapped = gym.wrappers.TransformReward(env, lambda reward: np.array([reward, -1], np.float32))
    memory = holdall.ReplayMemory(env.observation_space, env.action_space, 100, reward_shape=(2,))
    recorder = holdall.Recorder(wrapped, memory)
    recorder.collect(lambda _: 1, 20)
    recorder.reset()  # The episode may not have ended.
    recorder.collect(lambda _: 1, 5)
    ids = np.arange(memory.next_id)
    rewards = memory.gather(ids[memory.are_valid(ids)]).reward
    np.testing.assert_array_equal(rewards, [(seen.reward, -1) for seen in env.log])


def test_an_environment_that_resets_itself_is_recorded() -> None:
    env = WatchedEnv("vector", 0.5, seed=0)
    memory = make_memory(env)
    made = holdall.Recorder(gym.wrappers.OrderEnforcing(gym.wrappers.Autoreset(env)), memory).collect(lambda _: 1, 30)
    assert made == len(env.log) < 30
    assert_holds(memory, [env.log])


def test_actions_of_several_numbers_are_recorded() -> None:
    action = spaces.Box(-1, 1, (2,), np.float32)
    env = WatchedEnv("vector", 0.2, 0, action)
    memory = make_memory(env)
    holdall.Recorder(env, memory).collect(lambda _: action.sample(), 10)
    assert_holds(memory, [env.log])


# ---------------------------------------------------------------- resets


def test_the_policy_gets_the_observation_that_the_step_begins_with() -> None:
    for mode in MODES:
        envs = make_custom_envs(mode, lanes=3, ends=0.5)
        memory = make_memory(envs.lanes[0], 3)
        recorder = holdall.Recorder(envs, memory)
        acted_on = []
        for _ in range(20):
            acted_on.append(np.array(recorder.obs))
            recorder.step(np.zeros(3, np.int64))
        for number in range(memory.next_id):
            if memory.are_valid([number])[0]:
                tick, lane = divmod(number, 3)
                np.testing.assert_array_equal(memory.gather([number]).obs[0], acted_on[tick][lane])


def test_lanes_that_the_caller_has_reset_are_not_reset_again() -> None:
    envs = make_custom_envs(AutoresetMode.DISABLED, ends=0.6)
    memory = make_memory(envs.lanes[0], 2)
    recorder = holdall.Recorder(envs, memory)
    recorder.reset()
    ends = np.ones(2, np.int64)
    for _ in range(20):
        _, _, terminated, truncated, _ = recorder.step(np.zeros(2, np.int64))
        ended = terminated | truncated
        ends += ended
        if ended.any():
            recorder.reset(options={"reset_mask": ended})
    assert [lane.resets for lane in envs.lanes] == ends.tolist()
    assert_holds(memory, [lane.log for lane in envs.lanes])


def test_a_return_does_not_reach_beyond_a_reset() -> None:
    env = WatchedEnv("vector", 0.0, seed=0)
    memory = make_memory(env, sampler=holdall.NStep(n=3, gamma=1.0))
    recorder = holdall.Recorder(env, memory)
    for _ in range(6):
        recorder.reset()
        recorder.collect(lambda _: 1, 2)
    assert_holds(memory, [env.log])
    reward = [seen.reward for seen in env.log]
    allowed = {reward[i] + reward[i + 1] for i in range(0, 12, 2)} | {reward[i] for i in range(1, 12, 2)}
    drawn = [memory.sample(10).reward.tolist() for _ in range(20)]
    assert {number for numbers in drawn for number in numbers} <= allowed


def test_a_return_does_not_reach_beyond_the_steps_of_its_recorder() -> None:
    env = WatchedEnv("vector", 0.0, seed=0)
    memory = make_memory(env, sampler=holdall.NStep(n=2, gamma=1.0))
    for _ in range(3):  # Three recorders, one after another, as after a restart.
        holdall.Recorder(env, memory).collect(lambda _: 1, 1)
    assert_holds(memory, [env.log])
    drawn = [memory.sample(2).reward.tolist() for _ in range(20)]
    assert {number for numbers in drawn for number in numbers} == {seen.reward for seen in env.log}


# ---------------------------------------------------------------- environments without a declared mode


def test_the_mode_of_an_environment_that_does_not_declare_it_is_found() -> None:
    envs = make_custom_envs(AutoresetMode.SAME_STEP, says=False)
    memory = make_memory(envs.lanes[0], 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        holdall.Recorder(envs, memory).collect(make_random_policy(2), 20)
    assert not caught
    assert_holds(memory, [lane.log for lane in envs.lanes])


def test_an_undeclared_mode_causes_one_warning_unless_it_is_passed() -> None:
    for mode, expected in ((None, 1), ("next_step", 0), (AutoresetMode.NEXT_STEP, 0), ("NextStep", 0)):
        envs = make_custom_envs(AutoresetMode.NEXT_STEP, says=False)
        memory = make_memory(envs.lanes[0], 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            holdall.Recorder(envs, memory, autoreset_mode=mode).collect(make_random_policy(2), 30)
        assert len(caught) == expected
        assert all("autoreset_mode='next_step'" in str(each.message) for each in caught)
        assert_holds(memory, [lane.log for lane in envs.lanes])


class Forgetful(InPlaceVectorEnv):
    """Resets in the same step, and loses the final observations."""

    def _final_info(self, final: list[Any]) -> dict[str, Any]:
        return {}


@pytest.mark.filterwarnings("ignore:envs.metadata has no 'autoreset_mode'")
def test_an_undeclared_same_step_mode_without_final_observations_is_refused() -> None:
    envs = Forgetful([WatchedEnv("vector", 1.0, seed=0)], AutoresetMode.SAME_STEP, says=False)
    memory = make_memory(envs.lanes[0])
    recorder = holdall.Recorder(envs, memory)
    recorder.step(np.zeros(1, np.int64))
    with pytest.raises(holdall.ArgumentError, match=r"lanes \[0\] have a reward or an end.*autoreset_mode='same_step'"):
        recorder.step(np.zeros(1, np.int64))
    assert memory.next_id == 1


# ---------------------------------------------------------------- wrong use


def test_same_step_without_final_observations_is_refused_and_recording_continues() -> None:
    envs = Forgetful([WatchedEnv("vector", 0.3, seed) for seed in range(2)], AutoresetMode.SAME_STEP)
    memory = make_memory(envs.lanes[0], 2)
    recorder = holdall.Recorder(envs, memory)
    refused = 0
    lost = [set[int](), set[int]()]
    for _ in range(30):
        before = len(memory)
        counts = [len(lane.log) for lane in envs.lanes]
        try:
            recorder.step(np.zeros(2, np.int64))
        except holdall.ArgumentError as error:
            message = str(error)
        else:
            continue
        assert "info has no 'final_obs' for lane" in message
        assert "AutoresetMode.NEXT_STEP" in message
        assert len(memory) == before
        refused += 1
        for lane, count in enumerate(counts):
            lost[lane].add(count)
    assert refused > 3
    kept = [[seen for i, seen in enumerate(env.log) if i not in lost[lane]] for lane, env in enumerate(envs.lanes)]
    assert_holds(memory, kept)


def test_final_observations_that_miss_a_key_are_refused() -> None:
    class Partial(InPlaceVectorEnv):
        def _final_info(self, final: list[Any]) -> dict[str, Any]:
            info = super()._final_info(final)
            if info:
                del info["final_obs"]["number"]
            return info

    envs = Partial([WatchedEnv("dict", 1.0, 0)], AutoresetMode.SAME_STEP, form="batched")
    memory = make_memory(envs.lanes[0])
    with pytest.raises(holdall.ArgumentError, match="no 'final_obs' for lane 0"):
        holdall.Recorder(envs, memory).step(np.zeros(1, np.int64))
    assert memory.next_id == 0


Box = spaces.Box(-1, 1, (3,), np.float32)
Discrete = spaces.Discrete(5)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ((Box, Discrete, 3), "num_envs=3, envs has 2 environments; make the memory with"),
        ((Discrete, Discrete, 2), r"observation_space of envs is float32\(3,\), that of memory is int64\(\); make"),
        ((Box, Box, 2), r"action_space of envs is int64\(\), that of memory is float32\(3,\)"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(of: tuple[Any, Any, int], message: str) -> None:
    memory = holdall.ReplayMemory(of[0], of[1], 100, of[2])
    with pytest.raises(holdall.ArgumentError, match=message):
        holdall.Recorder(make_custom_envs(AutoresetMode.NEXT_STEP), memory)


def test_a_wrong_environment_memory_or_mode_is_refused() -> None:
    envs = make_custom_envs(AutoresetMode.NEXT_STEP)
    memory = make_memory(envs.lanes[0], 2)
    with pytest.raises(holdall.ArgumentError, match=r"envs \(int\) is not an environment"):
        holdall.Recorder(3, memory)
    with pytest.raises(holdall.ArgumentError, match=r"memory \(list\) cannot be recorded to"):
        holdall.Recorder(envs, [])
    with pytest.raises(holdall.ArgumentError, match=r"autoreset_mode is 'never'\. Pass one of 'next_step'"):
        holdall.Recorder(envs, memory, autoreset_mode="never")


def test_wrong_actions_and_extras_are_refused_before_a_step() -> None:
    envs = make_custom_envs(AutoresetMode.NEXT_STEP)
    extras = {"log_prob": spaces.Box(-np.inf, np.inf, (), np.float32)}
    memory = make_memory(envs.lanes[0], 2, extras=extras)
    recorder = holdall.Recorder(envs, memory)
    good: dict[str, Any] = {"log_prob": np.zeros(2, np.float32)}
    for actions, fields, message in (
        (np.zeros(3, np.int64), good, "actions has shape"),
        (np.zeros(2, np.float32), good, "actions has dtype"),
        (np.zeros(2, np.int64), {}, "extras has the keys"),
        (np.zeros(2, np.int64), {**good, "value": good["log_prob"]}, "unknown"),
    ):
        with pytest.raises(holdall.ArgumentError, match=message):
            recorder.step(actions, **fields)
    assert memory.next_id == 0
    assert all(lane.resets == 0 for lane in envs.lanes)
    recorder.step(np.zeros(2, np.int64), good)
    assert len(memory) == 2


def test_a_mask_that_leaves_out_lanes_that_were_never_reset_is_refused() -> None:
    envs = make_custom_envs(AutoresetMode.DISABLED)
    recorder = holdall.Recorder(envs, make_memory(envs.lanes[0], 2))
    with pytest.raises(holdall.ArgumentError, match=r"leaves out lanes \[1\]"):
        recorder.reset(options={"reset_mask": np.array([True, False])})


def test_a_mask_for_a_vecenv_is_refused() -> None:
    recorder = holdall.Recorder(DummyVecEnv(list_makers(2, "vector")), make_memory(WatchedEnv("vector", 0, 0), 2))
    with pytest.raises(holdall.ArgumentError, match="always resets all lanes"):
        recorder.reset(options={"reset_mask": np.ones(2, np.bool_)})


def test_a_return_does_not_reach_beyond_an_interrupted_step() -> None:
    env = WatchedEnv("vector", 0.0, seed=0)
    memory = make_memory(env, sampler=holdall.NStep(n=2, gamma=1.0))
    recorder = holdall.Recorder(env, memory)
    add = memory.add

    def add_and_interrupt(*of: Any, **named: Any) -> None:
        add(*of, **named)
        raise KeyboardInterrupt

    for _ in range(4):
        memory.add = add_and_interrupt  # type: ignore[method-assign]  # As a signal right after the add.
        with pytest.raises(KeyboardInterrupt):
            recorder.step(1)
        memory.add = add  # type: ignore[method-assign]  # The reset ends the episode.
        recorder.reset()
    assert_holds(memory, [env.log])
    assert {float(memory.sample(1).reward[0]) for _ in range(40)} == {seen.reward for seen in env.log}


def test_no_transition_begins_before_an_interrupted_reset() -> None:
    """The environment was reset, so an observation of before does not lead to the next one."""

    class Interrupted(WatchedEnv):
        is_interrupted = False

        def reset(self, **options: Any) -> Any:
            returned = super().reset(**options)
            if self.is_interrupted:
                raise KeyboardInterrupt
            return returned

    env = Interrupted("vector", 0.0, seed=0)
    memory = make_memory(env)
    recorder = holdall.Recorder(env, memory)
    recorder.step(1)
    env.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        recorder.reset()
    env.is_interrupted = False
    recorder.step(1)
    recorder.step(1)
    assert_holds(memory, [env.log])


def test_a_step_of_an_environment_that_fails_is_not_added() -> None:
    class Failing(InPlaceVectorEnv):
        fails = False

        def step(self, actions: Any) -> Any:
            if self.fails:
                raise ConnectionError("lost")
            return super().step(actions)

    envs = Failing([WatchedEnv("vector", 0.0, 0)], AutoresetMode.NEXT_STEP)
    memory = make_memory(envs.lanes[0])
    recorder = holdall.Recorder(envs, memory)
    recorder.step(np.zeros(1, np.int64))
    envs.fails = True
    with pytest.raises(ConnectionError):
        recorder.step(np.zeros(1, np.int64))
    envs.fails = False
    recorder.step(np.zeros(1, np.int64))
    assert envs.lanes[0].resets == 2
    assert_holds(memory, [envs.lanes[0].log])


# ---------------------------------------------------------------- rollouts and collecting


def make_rollout(env: WatchedEnv, steps: int, lanes: int) -> holdall.RolloutMemory:
    return holdall.RolloutMemory(env.observation_space, env.action_space, steps, lanes, seed=0)


def test_steps_that_would_make_advantages_wrong_are_refused() -> None:
    envs = make_custom_envs(AutoresetMode.DISABLED, lanes=1, ends=1.0)
    rollout = make_rollout(envs.lanes[0], 3, 1)
    recorder = holdall.Recorder(envs, rollout)
    estimates: dict[str, Any] = {"value": np.zeros(1, np.float32), "log_prob": np.zeros(1, np.float32)}
    action = np.zeros(1, np.int64)
    with pytest.raises(holdall.ArgumentError, match="value is missing"):
        recorder.step(action, log_prob=estimates["log_prob"])
    recorder.reset()
    recorder.step(action, **estimates)
    with pytest.raises(holdall.ArgumentError, match=r"lanes \[0\] were not reset.*recorder.obs"):
        recorder.step(action, **estimates)
    for _ in range(2):
        assert recorder.obs is not None
        recorder.step(action, **estimates)
    assert recorder.obs is not None
    with pytest.raises(holdall.ArgumentError, match="has all its num_steps"):
        recorder.step(action, **estimates)
    assert len(rollout) == 3


def test_a_reset_within_a_rollout_is_refused() -> None:
    envs = make_custom_envs(AutoresetMode.NEXT_STEP, ends=0.0)
    rollout = make_rollout(envs.lanes[0], 4, 2)
    recorder = holdall.Recorder(envs, rollout)
    estimates: dict[str, Any] = {"value": np.zeros(2, np.float32), "log_prob": np.zeros(2, np.float32)}
    recorder.reset()
    recorder.step(np.zeros(2, np.int64), **estimates)
    with pytest.raises(holdall.ArgumentError, match=r"episodes of lanes \[0, 1\].*memory.reset\(\) first"):
        recorder.reset()
    assert all(lane.resets == 1 for lane in envs.lanes)
    rollout.reset()
    recorder.reset()
    assert all(lane.resets == 2 for lane in envs.lanes)


def test_one_environment_fills_a_rollout_with_estimates_of_a_network() -> None:
    torch = pytest.importorskip("torch")
    env = WatchedEnv("vector", 0.3, 0)
    rollout = make_rollout(env, 8, 1)
    recorder = holdall.Recorder(env, rollout)
    made = recorder.collect(lambda _: (1, {"value": torch.tensor(0.5), "log_prob": -0.25}))
    assert made == len(rollout) == 8
    with pytest.raises(holdall.ArgumentError, match=r"steps \(1\) is more than the 0"):
        recorder.collect(lambda _: 1, 1)


def test_collect_shows_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, progress, is_shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        env = WatchedEnv("vector", 0.1, 0)
        assert holdall.Recorder(env, make_memory(env)).collect(lambda _: 1, 5, progress=progress) == 5
        assert ("recording" in stream.getvalue()) == is_shown


def test_extras_of_a_policy_are_recorded() -> None:
    envs = make_custom_envs(AutoresetMode.NEXT_STEP, lanes=3)
    extras = {"log_prob": spaces.Box(-np.inf, np.inf, (), np.float32)}
    memory = make_memory(envs.lanes[0], 3, extras=extras)
    holdall.Recorder(envs, memory).collect(lambda obs: (np.zeros(3, np.int64), {"log_prob": np.array(obs[:, 0])}), 20)
    ids = np.arange(memory.next_id)
    batch = memory.gather(ids[memory.are_valid(ids)])
    np.testing.assert_array_equal(batch.extras["log_prob"], batch.obs[:, 0])


def test_a_log_has_the_steps_of_its_environment() -> None:
    """This tests the oracle of these tests."""
    env = WatchedEnv("number", 1.0, 0)
    first, _ = env.reset()
    last, reward, *_ = env.step(3)
    seen = env.log[0]
    assert isinstance(seen, Seen)
    assert (int(seen.obs), int(seen.action), seen.reward, int(seen.next_obs)) == (int(first), 3, reward, int(last))

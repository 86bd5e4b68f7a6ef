"""A recorder adds exactly the transitions that the environments made."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import holdall

from .watched_environments import SPACES, InPlaceVectorEnv, Seen, WatchedEnv, assert_holds

FORMS = ["rows", "batched", "masked", "list", "legacy"]


class Plan(NamedTuple):
    """A run: its environments and the calls of its recorder."""

    kind: str
    mode: AutoresetMode
    lanes: int
    space: str
    ends: float
    form: str
    steps: int
    seed: int
    cuts: int  # Steps after which all lanes are reset in the middle of their episodes. 0: never.


plans = st.builds(
    Plan,
    kind=st.sampled_from(["sync", "uncopied", "custom", "silent"]),
    mode=st.sampled_from(list(AutoresetMode)),
    lanes=st.sampled_from([1, 2, 3, 5, 17, 64]),
    space=st.sampled_from(list(SPACES)),
    ends=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    form=st.sampled_from(FORMS),
    steps=st.integers(1, 24),
    seed=st.integers(0, 2**31),
    cuts=st.sampled_from([0, 0, 0, 3, 7]),
)


def make_envs(plan: Plan) -> tuple[list[WatchedEnv], Any]:
    """Return the lanes of a plan, and the vector environment around them."""
    lanes = [WatchedEnv(plan.space, plan.ends, plan.seed + lane) for lane in range(plan.lanes)]
    if plan.kind in {"sync", "uncopied"}:
        makers = [lambda lane=lane: lane for lane in lanes]
        return lanes, gym.vector.SyncVectorEnv(makers, copy=plan.kind == "sync", autoreset_mode=plan.mode)
    return lanes, InPlaceVectorEnv(lanes, plan.mode, says=plan.kind != "silent", form=plan.form)


@pytest.mark.filterwarnings("ignore:envs.metadata has no 'autoreset_mode'")
@settings(max_examples=settings().max_examples // 3)
@given(plan=plans)
def test_a_recorder_adds_exactly_the_transitions_of_the_environments(plan: Plan) -> None:
    lanes, envs = make_envs(plan)
    memory = holdall.ReplayMemory(
        envs.single_observation_space,
        envs.single_action_space,
        3 * plan.steps * plan.lanes,
        plan.lanes,
        extras={"log_prob": spaces.Box(-np.inf, np.inf, (), np.float32)},
    )
    is_unknowable = plan.kind == "silent" and plan.mode == AutoresetMode.DISABLED
    recorder = holdall.Recorder(envs, memory, autoreset_mode=plan.mode if is_unknowable else None)
    generator = np.random.default_rng(plan.seed)
    given_extras: list[list[np.float32]] = [[] for _ in lanes]
    for step in range(1, plan.steps + 1):
        if plan.cuts and step % plan.cuts == 0:
            recorder.reset()
        log_prob = generator.random(plan.lanes, dtype=np.float32)
        before = [len(lane.log) for lane in lanes]
        recorder.step(generator.integers(0, 5, plan.lanes), log_prob=log_prob)
        for lane, env in enumerate(lanes):
            given_extras[lane] += [log_prob[lane]] * (len(env.log) - before[lane])
    assert_holds(memory, [lane.log for lane in lanes])
    assert_has_extras(memory, given_extras)
    memory.close()


def assert_has_extras(memory: holdall.ReplayMemory, given_extras: list[list[Any]]) -> None:
    """Raise AssertionError unless every lane of the memory has the extras that were given with its steps."""
    every = np.arange(memory.next_id)
    for lane, numbers in enumerate(given_extras):
        ids = every[memory.are_valid(every) & (every % memory.num_envs == lane)]
        if numbers:
            np.testing.assert_array_equal(memory.gather(ids).extras["log_prob"], numbers)


@settings(max_examples=settings().max_examples // 10)
@given(plan=plans.map(lambda plan: plan._replace(cuts=0)))
@pytest.mark.filterwarnings("ignore:envs.metadata has no 'autoreset_mode'")
def test_a_rollout_has_every_step_and_its_advantages_end_with_their_episode(plan: Plan) -> None:
    lanes, envs = make_envs(plan)
    rollout = holdall.RolloutMemory(
        envs.single_observation_space, envs.single_action_space, plan.steps, plan.lanes, seed=0
    )
    is_unknowable = plan.kind == "silent" and plan.mode == AutoresetMode.DISABLED
    recorder = holdall.Recorder(envs, rollout, autoreset_mode=plan.mode if is_unknowable else None)
    generator = np.random.default_rng(plan.seed)

    def policy(_: Any) -> tuple[Any, dict[str, Any]]:
        estimates = generator.random((2, plan.lanes), dtype=np.float32)
        return generator.integers(0, 5, plan.lanes), {"value": estimates[0], "log_prob": estimates[1]}

    assert recorder.collect(policy) == len(rollout) == sum(len(lane.log) for lane in lanes)
    truncated = [seen for lane in lanes for seen in lane.log if seen.truncated and not seen.terminated]
    final_values = np.full(len(truncated), 10, np.float32)
    rollout.finish(np.full(plan.lanes, 100, np.float32), gamma=0.5, gae_lambda=1.0, final_values=final_values)
    batch = next(rollout.minibatches(batch_size=max(1, len(rollout))))
    order = np.argsort(batch.ids)
    rows = {int(place): row for row, place in enumerate(np.asarray(batch.ids))}
    for lane, env in enumerate(lanes):
        places = [int(place) for place in np.asarray(batch.ids)[order] if place % plan.lanes == lane]
        returns = compute_returns(env.log, 0.5, 10.0, 100.0)
        got = [float(batch.returns[rows[place]]) for place in places]
        np.testing.assert_allclose(got, returns, rtol=1e-4)
        assert [float(batch.reward[rows[place]]) for place in places] == [seen.reward for seen in env.log]
    rollout.close()


def compute_returns(log: list[Seen], gamma: float, cut_value: float, last_value: float) -> list[float]:
    """Return the returns of a lane's steps. With lambda 1 they do not depend on the values in between."""
    returns: list[float] = []
    later = last_value
    for seen in reversed(log):
        if seen.terminated:
            later = 0.0
        elif seen.truncated:
            later = cut_value
        later = seen.reward + gamma * later
        returns.append(later)
    return returns[::-1]

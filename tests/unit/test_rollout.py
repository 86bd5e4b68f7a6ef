"""RolloutMemory: advantages, truncation, valid entries, constant memory, and refused arguments."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ArgumentError, ClosedError, RolloutMemory
from holdall.testing import LeafPlan, Stream, assert_same_bits

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
FRAMES = spaces.Box(0, 255, (4, 40, 40), np.uint8)
BUTTONS = spaces.Discrete(3)
LANES = 2
NEVER = np.zeros(LANES, np.bool_)
ZEROS = np.zeros(LANES, np.float32)


def make_step(seed: int = 0) -> dict[str, Any]:
    """Return arguments of `add` that fit a memory of vectors."""
    generator = np.random.default_rng(seed)
    reward, value, log_prob = generator.standard_normal((3, LANES), np.float32)
    obs = generator.standard_normal((LANES, 3), np.float32)
    flags = {"terminated": NEVER, "truncated": NEVER}
    action = generator.integers(0, 3, LANES)
    return {"obs": obs, "action": action, "reward": reward, "value": value, "log_prob": log_prob} | flags


def make_memory(num_steps: int, **settings: Any) -> RolloutMemory:
    return RolloutMemory(VECTOR, BUTTONS, num_steps, LANES, seed=0, **settings)


def read_rollout(memory: RolloutMemory) -> Any:
    """Return the only minibatch of a rollout, sorted by id: (steps, lanes) per field."""
    (batch,) = memory.minibatches(10_000)
    order = np.argsort(batch.ids)
    names = ("advantage", "returns", "value", "reward")
    return {name: np.asarray(getattr(batch, name))[order].reshape(-1, LANES) for name in names}


def sum_by_definition(
    rewards: NDArray[Any], values: NDArray[Any], after: NDArray[Any], ended: NDArray[Any], gamma: float, decay: float
) -> NDArray[np.float64]:
    """Sum the discounted temporal differences up to the episode's end, in double precision."""
    steps, lanes = rewards.shape
    advantages = np.zeros((steps, lanes))
    for lane in range(lanes):
        for start in range(steps):
            weight = 1.0
            for t in range(start, steps):
                delta = float(rewards[t, lane]) + gamma * float(after[t, lane]) - float(values[t, lane])
                advantages[start, lane] += weight * delta
                weight *= gamma * decay
                if ended[t, lane]:
                    break
    return advantages


@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_those_of_the_definition(seed: int) -> None:
    """Only the end of a truncated episode uses the value of its final observation."""
    generator = np.random.default_rng(seed)
    steps = 40
    memory = make_memory(steps)
    given_steps: list[tuple[Any, ...]] = []
    for t in range(steps):
        given = make_step(100 * seed + t)
        given["terminated"] = generator.random(LANES) < 0.1
        given["truncated"] = generator.random(LANES) < 0.1
        final = generator.standard_normal((LANES, 3), np.float32)
        memory.add(**given, final_obs=final)
        given_steps.append((given["reward"], given["value"], given["terminated"], given["truncated"], final))
    rewards, values, terminated, truncated, final = (np.array(part) for part in zip(*given_steps, strict=True))
    cut = truncated & ~terminated
    assert_same_bits(memory.final_obs(), final[cut])
    last = generator.standard_normal(LANES, np.float32)
    final_values = final[cut].sum(axis=1)
    memory.finish(last, gamma=0.9, gae_lambda=0.8, final_values=final_values)
    after = np.concatenate([values[1:], last[None]])
    after[cut] = final_values
    after[terminated] = 0
    expected = sum_by_definition(rewards, values, after, terminated | truncated, 0.9, 0.8)
    got = read_rollout(memory)
    np.testing.assert_allclose(got["advantage"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got["returns"], got["advantage"] + got["value"])


def test_a_truncated_episode_without_its_final_observation_is_refused() -> None:
    memory = make_memory(3)
    with pytest.raises(ArgumentError, match="lane 1, but final_obs is None"):
        memory.add(**(make_step() | {"truncated": np.array([False, True])}))
    assert len(memory) == 0
    memory.add(**(make_step() | {"truncated": np.array([False, True])}), final_obs=np.ones((LANES, 3), np.float32))
    with pytest.raises(ArgumentError, match="1 episodes were truncated"):
        memory.finish(ZEROS)


def test_invalid_entries_are_in_no_minibatch() -> None:
    """Gymnasium's next-step autoreset: the lane that ended only resets in the next step."""
    envs = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    memory = RolloutMemory(envs.single_observation_space, envs.single_action_space, 120, 3, seed=0)
    obs, _ = envs.reset(seed=0)
    envs.action_space.seed(0)
    resetting = np.zeros(3, np.bool_)
    made = []
    for _ in range(120):
        action = envs.action_space.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        estimates = np.zeros(3, np.float32)
        memory.add(
            obs, action, reward, terminated, truncated, estimates, estimates, final_obs=next_obs, valid=~resetting
        )
        made.append(~resetting)
        obs = next_obs
        resetting = terminated | truncated
    memory.finish(np.zeros(3, np.float32))
    expected = np.flatnonzero(np.array(made))
    assert len(memory) == len(expected) < 360
    for batches in (memory.minibatches(50), memory.sequences(50)):
        ids = np.concatenate([batch.ids.reshape(-1) for batch in batches])
        assert np.array_equal(np.sort(ids[ids >= 0]), expected)


def test_minibatches_are_the_same_for_one_seed_and_differ_from_epoch_to_epoch() -> None:
    runs = []
    for _ in range(2):
        memory = make_memory(20)
        for t in range(20):
            memory.add(**make_step(t))
        memory.finish(ZEROS)
        runs.append([batch.ids.tolist() for batch in memory.minibatches(16, epochs=2)])
    assert runs[0] == runs[1]
    assert [len(ids) for ids in runs[0]] == [16, 16, 8] * 2
    assert runs[0][:3] != runs[0][3:]


def test_a_minibatch_does_not_change_while_others_are_drawn_and_the_next_rollout_is_written() -> None:
    memory = make_memory(64, device="cpu")
    kept = []
    for rollout in range(3):
        memory.reset()
        for t in range(64):
            memory.add(**make_step(1_000 * rollout + t))
        memory.finish(ZEROS)
        kept += [(batch, batch.obs.clone(), batch.advantage.clone()) for batch in memory.minibatches(32, epochs=3)]
    assert all(torch.equal(batch.obs, obs) and torch.equal(batch.advantage, a) for batch, obs, a in kept)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("which", ["minibatches", "sequences"])
def test_minibatches_of_a_rollout_that_was_reset_are_refused(which: str, begun: bool) -> None:
    """The rule also holds when the next rollout is finished: its rows would appear in the order of the previous one."""
    memory = make_memory(6)
    for rollout in range(2):
        for t in range(6):
            memory.add(**make_step(10 * rollout + t))
        memory.finish(ZEROS)
        if rollout == 0:
            old = getattr(memory, which)(4)
            if begun:
                next(old)
            memory.reset()
    with pytest.raises(ArgumentError, match=r"^these minibatches are of a rollout that ended with reset; call"):
        next(old)
    assert sum(len(batch) for batch in memory.minibatches(4)) == 6 * LANES


def test_extras_carry_recurrent_states_to_the_start_of_each_sequence() -> None:
    memory = make_memory(12, extras={"hidden": spaces.Box(-1, 1, (2,), np.float32)})
    hidden = np.random.default_rng(0).standard_normal((12, LANES, 2), np.float32)
    for t in range(12):
        memory.add(**make_step(t), extras={"hidden": hidden[t]})
    memory.finish(ZEROS)
    for batch in memory.sequences(8, length=4):
        assert batch.obs.shape == (2, 4, 3)
        assert batch.mask.all()
        assert np.array_equal(batch.extras["hidden"][:, 0], hidden.reshape(-1, 2)[batch.ids[:, 0]])


def make_frames(lanes: int) -> Stream:
    return Stream(FRAMES, BUTTONS, lanes, plans=[LeafPlan(axis=0, padding="first")], seed=1)


def run_update(memory: RolloutMemory, ticks: list[Any]) -> None:
    memory.reset()
    for tick in ticks:
        flags = (tick.terminated, tick.truncated)
        memory.add(tick.obs, tick.action, tick.reward, *flags, ZEROS, ZEROS, final_obs=tick.next_obs)
    finals = np.zeros(sum(int(tick.truncated.sum()) for tick in ticks), np.float32)
    memory.finish(ZEROS, final_values=finals)
    for batch in memory.minibatches(32, epochs=2):
        del batch


def test_updates_allocate_nothing_in_steady_state() -> None:
    """The first two updates find windows and size tables. The bytes after the third and the last one are equal."""
    stream = make_frames(LANES)
    memory = RolloutMemory(FRAMES, BUTTONS, 128, LANES, seed=0)
    ticks = [stream.tick() for _ in range(128)]
    for tick in ticks:
        np.nan_to_num(tick.reward, copy=False, posinf=0, neginf=0)
    for _ in range(2):
        run_update(memory, ticks)
    before = memory.report()
    tracemalloc.start()
    try:
        run_update(memory, ticks)
        held = count_array_bytes()
        for _ in range(20):
            run_update(memory, ticks)
        assert count_array_bytes() == held
    finally:
        tracemalloc.stop()
    assert memory.report().total_bytes == before.total_bytes


def count_array_bytes() -> int:
    """Count the bytes of all arrays that were allocated since tracing began and still exist."""
    gc.collect()
    arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([arrays])
    return sum(trace.size for trace in traces.traces)


def test_each_frame_is_stored_once() -> None:
    stream = make_frames(LANES)
    memory = RolloutMemory(FRAMES, BUTTONS, 200, LANES)
    run_update(memory, [stream.tick() for _ in range(200)])
    observed = memory.report().fields[0]
    assert "window of 4 along axis 0" in observed.finding
    assert observed.slice_bytes < 0.45 * observed.plain_bytes  # Episodes end every twenty steps.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((LANES, 4), np.float32)}, "obs has shape"),
        ({"obs": np.zeros((LANES, 3))}, "obs has dtype float64"),
        ({"obs": None}, "observe was not called"),
        ({"action": np.zeros(LANES, np.float32)}, "action has dtype float32"),
        ({"reward": np.zeros(3, np.float32)}, "reward has shape"),
        ({"value": np.zeros(LANES)}, "value has dtype float64, estimates are float32"),
        ({"log_prob": np.zeros((LANES, 2), np.float32)}, "log_prob has shape"),
        ({"terminated": np.zeros(LANES)}, "terminated has dtype float64"),
        ({"valid": np.ones(3, np.bool_)}, "valid has shape"),
        ({"extras": {"x": 1}}, "unknown"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    memory = make_memory(3)
    memory.add(**make_step())
    with pytest.raises(ArgumentError, match=message):
        memory.add(**(make_step(1) | change))
    memory.add(**make_step(2))
    memory.finish(ZEROS)
    (batch,) = memory.minibatches(10)
    assert_same_bits(batch.obs[np.argsort(batch.ids)], np.concatenate([make_step()["obs"], make_step(2)["obs"]]))


def test_calls_out_of_order_are_refused() -> None:
    memory = make_memory(1)
    with pytest.raises(ArgumentError, match="finish was called before add"):
        memory.finish(ZEROS)
    with pytest.raises(ArgumentError, match="no advantages yet"):
        memory.minibatches(2)
    memory.observe(make_step()["obs"])
    with pytest.raises(ArgumentError, match="twice"):
        memory.observe(make_step()["obs"])
    with pytest.raises(ArgumentError, match="give the observations of a step once"):
        memory.add(**make_step())
    memory.add(**(make_step() | {"obs": None}))
    assert memory.is_full
    with pytest.raises(ArgumentError, match="has all its num_steps"):
        memory.add(**make_step())
    memory.finish(ZEROS)
    batches = memory.minibatches(1)
    next(batches)
    memory.reset()
    with pytest.raises(ArgumentError, match="no advantages yet"):
        next(batches)


@pytest.mark.parametrize(
    "settings",
    [{"num_steps": 0}, {"num_envs": 0}, {"compress": "much"}, {"seed": "x"}, {"device": "abacus"}],
    ids=str,
)
def test_the_constructor_names_the_wrong_argument(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        RolloutMemory(**{"observation_space": VECTOR, "action_space": BUTTONS, "num_steps": 4, **settings})


@pytest.mark.parametrize("argument", ["gamma", "gae_lambda"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.9", True])
def test_discounts_are_between_0_and_1(argument: str, value: Any) -> None:
    memory = make_memory(2)
    memory.add(**make_step())
    with pytest.raises(ArgumentError, match=argument):
        memory.finish(ZEROS, **{argument: value})


def test_use_after_close_is_refused() -> None:
    with make_memory(2) as memory:
        memory.add(**make_step())
    with pytest.raises(ClosedError):
        memory.add(**make_step())
    memory.close()


def test_tensors_that_carry_gradients_are_stored_as_values() -> None:
    memory = make_memory(1)
    value = torch.arange(float(LANES), requires_grad=True).reshape(LANES, 1)
    memory.add(**(make_step() | {"value": value * 2, "log_prob": value}))
    memory.finish(value)
    assert read_rollout(memory)["value"].tolist() == [[0.0, 2.0]]


def test_the_report_adds_up() -> None:
    memory = make_memory(8)
    for t in range(5):
        memory.add(**make_step(t))
    report = memory.report()
    assert report.transitions == 10
    names = {field.name: field.total_bytes for field in report.fields}
    assert names["obs"] == 5 * LANES * 12
    assert names["value"] == 5 * LANES * 4

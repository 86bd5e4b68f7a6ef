"""Hindsight: `holdall.sb3.HerReplayBuffer` gives the samples and trained weights of Stable-Baselines3's class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import DDPG, DQN, SAC
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from stable_baselines3.her import her_replay_buffer
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy

from holdall.errors import ArgumentError
from holdall.sb3 import HerReplayBuffer
from holdall.sb3.her import pack_info, unpack_info

from .comparison import assert_same_learning, make_learning, train
from .environments import repeat
from .pair import assert_same_batch, call_seeded

pytestmark = pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer:UserWarning")


class Reach(gym.Env[Any, Any]):
    """Walk towards a point that differs in every episode. Rewards also depend on the infos."""

    def __init__(self, discrete: bool = False, informed: bool = False) -> None:
        point = spaces.Box(-9, 9, (2,), np.float32)
        self.observation_space = spaces.Dict(
            observation=spaces.Box(-9, 9, (3,), np.float32), achieved_goal=point, desired_goal=point
        )
        self.action_space = spaces.Discrete(4) if discrete else spaces.Box(-1, 1, (2,), np.float32)
        self._informed = informed
        self.at = np.zeros(2, np.float32)
        self.goal = np.zeros(2, np.float32)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.at = self.np_random.normal(size=2).astype(np.float32)
        self.goal = self.np_random.normal(size=2).astype(np.float32)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        move = np.asarray(action, np.float32)
        if isinstance(self.action_space, spaces.Discrete):
            move = np.array([np.cos(action * 1.57), np.sin(action * 1.57)], np.float32)
        self.at = (self.at + 0.3 * move + self.np_random.normal(0, 0.05, 2)).astype(np.float32)
        info: dict[str, Any] = {}
        if self._informed:
            info = {"wind": np.float64(self.np_random.normal()), "note": "plain", "path": (self.steps, [1.5, None])}
        reward = float(self.compute_reward(self.at[None], self.goal[None], [info])[0])
        terminated = bool(self.np_random.random() < 0.05)
        return self._observe(), reward, terminated, self.steps >= 13, info

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> NDArray[np.float64]:
        """Return minus one until the goal is near, as gymnasium-robotics does, plus some wind."""
        wind = np.array([info.get("wind", 0.0) for info in infos])
        return np.asarray(0.01 * wind - (np.linalg.norm(achieved - desired, axis=-1) > 0.5))

    def _observe(self) -> dict[str, NDArray[np.float32]]:
        seen = np.append(self.at, np.float32(self.steps)).astype(np.float32)
        return {"observation": seen, "achieved_goal": self.at.copy(), "desired_goal": self.goal.copy()}


def make_model(
    buffer_class: Any, algorithm: Any = DDPG, lanes: int = 1, wrap: Any = None, buffer_size: int = 1000, **how: Any
) -> OffPolicyAlgorithm:
    vec_env: VecEnv = DummyVecEnv(
        repeat(partial(Reach, discrete=algorithm is DQN, informed=how.get("copy_info_dict", False)), lanes)
    )
    model: OffPolicyAlgorithm = algorithm(
        "MultiInputPolicy",
        vec_env if wrap is None else wrap(vec_env),
        replay_buffer_class=buffer_class,
        replay_buffer_kwargs=how,
        policy_kwargs={"net_arch": [8]},
        learning_starts=40,
        batch_size=16,
        train_freq=1,
        buffer_size=buffer_size,
        learning_rate=0.01,
        seed=5,
        device="cpu",
    )
    return model


def assert_same_hindsight(*acts: Any, **how: Any) -> None:
    acts = acts or (make_learning(150 * how.get("lanes", 1)),)
    plain = train(make_model(her_replay_buffer.HerReplayBuffer, **how), *acts)
    ours = train(make_model(HerReplayBuffer, **how), *acts)
    assert type(ours.replay_buffer) is HerReplayBuffer
    assert plain._n_updates > 50
    assert_same_learning(plain, ours)


@pytest.mark.parametrize("algorithm", [pytest.param(SAC, marks=pytest.mark.nightly), DQN], ids=["SAC", "DQN"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_every_strategy_ends_in_the_same_weights(algorithm: Any, strategy: str) -> None:
    """Some episodes terminate, and some are truncated."""
    assert_same_hindsight(algorithm=algorithm, goal_selection_strategy=strategy)


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_a_buffer_that_wraps_around_ends_in_the_same_weights(lanes: int) -> None:
    """An episode is removed when its first step is evicted."""
    assert_same_hindsight(make_learning(210 * lanes), lanes=lanes, buffer_size=60 * lanes)


def test_infos_reach_compute_reward() -> None:
    """The infos have numbers, arrays, text and nested values."""
    assert_same_hindsight(copy_info_dict=True, buffer_size=90)


@pytest.mark.parametrize("n_sampled_goal", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_any_share_of_other_goals_ends_in_the_same_weights(n_sampled_goal: int) -> None:
    """The share of relabelled rows is zero, or a half."""
    assert_same_hindsight(n_sampled_goal=n_sampled_goal, goal_selection_strategy=GoalSelectionStrategy.FUTURE)


def test_normalised_samples_end_in_the_same_weights() -> None:
    """Goals are normalised before they are returned, and rewards after they were computed."""
    assert_same_hindsight(wrap=VecNormalize, lanes=2)


@pytest.mark.nightly
def test_learning_twice_ends_in_the_same_weights() -> None:
    """The second call begins a new episode."""
    assert_same_hindsight(make_learning(93), make_learning(90))


def test_saving_and_loading_ends_in_the_same_weights(tmp_path: Path) -> None:
    """On loading, the last trajectory is truncated, as Stable-Baselines3 does by default, or it continues."""
    for truncate in (True, False):
        models = []
        for name, buffer_class in (("plain", her_replay_buffer.HerReplayBuffer), ("ours", HerReplayBuffer)):
            path = tmp_path / f"{name}{truncate}.pkl"

            def save_and_load(model: OffPolicyAlgorithm, path: Path = path, truncate: bool = truncate) -> None:
                model.save_replay_buffer(path)
                model.load_replay_buffer(path, truncate_last_traj=truncate)

            models.append(
                train(
                    make_model(buffer_class, lanes=2, copy_info_dict=True, buffer_size=120),
                    make_learning(150),
                    save_and_load,
                    make_learning(80, reset_num_timesteps=False),
                )
            )
        assert_same_learning(*models)


def test_episodes_and_infos_by_slot_are_those_of_sb3() -> None:
    plain, ours = (
        train(make_model(kind, lanes=2, copy_info_dict=True, buffer_size=80), make_learning(200)).replay_buffer
        for kind in (her_replay_buffer.HerReplayBuffer, HerReplayBuffer)
    )
    assert isinstance(plain, her_replay_buffer.HerReplayBuffer)
    assert isinstance(ours, HerReplayBuffer)
    assert ours.ep_start.tolist() == plain.ep_start.tolist()
    assert ours.ep_length.tolist() == plain.ep_length.tolist()
    slots = np.array([3, 17, 30])
    lanes = np.array([0, 1, 1])
    for theirs, mine in zip(plain.infos[slots, lanes], ours.infos[slots, lanes], strict=True):
        assert mine["wind"] == theirs["wind"]
        assert type(mine["wind"]) is np.float64
        assert mine["path"] == theirs["path"]
        assert mine.keys() == theirs.keys()
    assert_same_batch(call_seeded(0, lambda: plain.sample(50)), call_seeded(0, lambda: ours.sample(50)))
    ours.reset()
    with pytest.raises(RuntimeError, match="end of the first episode"):
        ours.sample(3)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"a": 1, "b": 2.5, "c": None, "d": "é", "e": True, "f": float("inf"), "g": -0.0, "h": 2**80},
        {"x": np.arange(6, dtype=np.int16).reshape(2, 3), "y": np.float32(1.5), "z": np.bool_(True), "e": np.empty(0)},
        {"nest": {"deep": [1, (2, {"z": np.ones(3)})]}, "terminal_observation": {"image": np.zeros((2, 2), np.uint8)}},
    ],
    ids=str,
)
def test_infos_come_back_as_they_were(info: dict[str, Any]) -> None:
    """Values, types, dtypes and shapes are the same. Every call returns a new copy."""
    packed = pack_info(info)
    restored = unpack_info(packed)
    np.testing.assert_equal(restored, info)
    assert repr(restored) == repr(info)
    assert unpack_info(packed) is not restored


@pytest.mark.parametrize("value", [object(), {1: 2}, {"s": {1, 2}}, np.array(["text"]), 1j, b"bytes"], ids=type)
def test_infos_that_are_neither_json_nor_arrays_are_refused(value: Any) -> None:
    """The error names the key."""
    with pytest.raises(ArgumentError, match=r"^infos\['odd'\].*copy_info_dict=False"):
        pack_info({"fine": 1, "odd": value})


def test_a_space_without_goals_is_refused() -> None:
    """The refusal names the keys."""
    with pytest.raises(ArgumentError, match="must have achieved_goal and desired_goal"):
        HerReplayBuffer(
            10,
            spaces.Dict(observation=spaces.Box(0, 1, (2,))),
            spaces.Discrete(2),
            DummyVecEnv([Reach]),
            device="cpu",
        )
    with pytest.raises(ArgumentError, match=r"goal_selection_strategy \('best'\)"):
        make_model(HerReplayBuffer, goal_selection_strategy="best")

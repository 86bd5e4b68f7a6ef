"""One seed, one policy: training with holdall's buffer ends in the very weights of Stable-Baselines3's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, VecTransposeImage

from holdall.sb3 import ReplayBuffer

from .comparison import ALGORITHMS, Task, assert_same_learning, assert_same_training, learn, trained
from .environments import ARM, BUTTONS, VECTOR, Stacked, Stretched, Wander, dict_space

pytestmark = pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer:UserWarning")


def actions_of(algorithm: str) -> spaces.Space[Any]:
    return BUTTONS if algorithm == "DQN" else ARM


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_the_same_from_vectors(algorithm: str) -> None:
    """DQN, DDPG, TD3 and SAC on a float vector."""
    assert_same_training(Task(partial(Wander, VECTOR, actions_of(algorithm)), algorithm))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_the_same_from_dicts(algorithm: str) -> None:
    """An image that Stable-Baselines3 transposes, a vector and a discrete key, in two environments."""
    environment = partial(Wander, dict_space(), actions_of(algorithm))
    assert_same_training(Task(environment, algorithm, "MultiInputPolicy", lanes=2), learn(160))


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_frame_stacks_transposed_by_sb3_give_the_same_weights(algorithm: str) -> None:
    """Images reach the buffer as (C, H, W) views that are not contiguous."""
    environment = partial(Stacked, actions_of(algorithm))
    assert_same_training(Task(environment, algorithm, "CnnPolicy"))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(6),
        spaces.MultiDiscrete([3, 4, 2]),
        spaces.MultiBinary(5),
        spaces.Box(-1, 1, (3, 2), np.float32),
        spaces.Box(-1, 1, (4,), np.float64),
    ],
    ids=str,
)
def test_every_observation_space_gives_the_same_weights(space: spaces.Space[Any]) -> None:
    """Whatever Stable-Baselines3 can observe."""
    assert_same_training(Task(partial(Wander, space)))


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_wide_float_observations_give_the_same_weights(algorithm: str) -> None:
    """Sums of floats depend on where in memory a batch begins, so that has to be where torch would put it."""
    space = spaces.Box(-1, 1, (1025,), np.float32)  # rows whose length no alignment divides, in an odd number
    task = Task(partial(Wander, space, actions_of(algorithm)), algorithm, settings={"batch_size": 33})
    assert_same_training(task)


@pytest.mark.parametrize("space", [spaces.Box(-3, 3, (2,), np.float64), spaces.Box(0, 9, (2,), np.float32)], ids=str)
def test_every_action_space_gives_the_same_weights(space: spaces.Space[Any]) -> None:
    """Stable-Baselines3 stores float64 actions as float32."""
    assert_same_training(Task(partial(Wander, VECTOR, space)))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_four_environments_give_the_same_weights(policy: str) -> None:
    """Four lanes whose episodes end at different steps. The size is no multiple of four."""
    space = VECTOR if policy == "MlpPolicy" else dict_space()
    assert_same_training(Task(partial(Wander, space), "TD3", policy, lanes=4, buffer_size=203), learn(320))


@pytest.mark.parametrize("handle_timeout_termination", [True, False])
@pytest.mark.parametrize("endings", [{"terminates": 0.2, "max_steps": 10_000}, {"terminates": 0.0, "max_steps": 7}])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_endings_are_told_apart_as_sb3_does(
    policy: str, endings: dict[str, Any], handle_timeout_termination: bool
) -> None:
    """Terminating and truncating tasks, with time limits bootstrapped through or taken as ends."""
    space = VECTOR if policy == "MlpPolicy" else dict_space()
    settings = {"replay_buffer_kwargs": {"handle_timeout_termination": handle_timeout_termination}}
    environment = partial(Wander, space, ARM, **endings)
    assert_same_training(Task(environment, policy=policy, lanes=2, settings=settings))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_normalised_samples_give_the_same_weights(policy: str) -> None:
    """VecNormalize: stored as observed, normalised with the statistics of the moment of the draw."""
    space = VECTOR if policy == "MlpPolicy" else dict_space()
    keys = None if policy == "MlpPolicy" else ["state"]

    def normalise(vec_env: VecEnv) -> VecEnv:
        return VecNormalize(VecTransposeImage(vec_env) if keys else vec_env, norm_obs_keys=keys)

    assert_same_training(Task(partial(Wander, space), policy=policy, lanes=2, wrap=normalise), learn(160))


def test_observations_in_another_dtype_are_cast_as_sb3_casts_them() -> None:
    """Observations in float64 where the space says float32."""
    assert_same_training(Task(Wander, lanes=2, wrap=Stretched))


@pytest.mark.parametrize("reset_num_timesteps", [True, False])
def test_learning_twice_gives_the_same_weights(reset_num_timesteps: bool) -> None:
    """The second call begins a new episode, or continues the last one."""
    again = learn(60, reset_num_timesteps=reset_num_timesteps)
    assert_same_training(Task(partial(Wander, dict_space()), policy="MultiInputPolicy"), learn(73), again)


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_small_buffer_that_wraps_around_gives_the_same_weights(lanes: int) -> None:
    """Old transitions leave in the middle of episodes, several times over."""
    task = Task(partial(Stacked, BUTTONS), "DQN", "CnnPolicy", lanes, buffer_size=41)
    assert_same_training(task, learn(150 * lanes))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_optimize_memory_usage_changes_nothing(policy: str) -> None:
    """Unlike Stable-Baselines3's, it goes with Dict observations and with truncation, and draws as without it."""
    space = VECTOR if policy == "MlpPolicy" else dict_space()
    task = Task(partial(Wander, space, ARM, 0.0, 7), policy=policy, lanes=2, buffer_size=60)
    assert_same_training(task, learn(160), optimize_memory_usage=True)


def test_optimize_memory_usage_lets_sb3_end_the_last_episode() -> None:
    """Stable-Baselines3 writes to `dones` before it learns again. The test does so for its plain buffer."""
    task = Task(Wander, lanes=2, buffer_size=50)

    def end_last_episode(model: OffPolicyAlgorithm) -> None:
        assert model.replay_buffer is not None
        model.replay_buffer.dones[model.replay_buffer.pos - 1] = True

    plain = trained(task.model(None), learn(93), end_last_episode, learn(60))
    ours = trained(task.model(ReplayBuffer, optimize_memory_usage=True), learn(93), learn(60))
    assert_same_learning(plain, ours)


def test_one_wrong_reward_would_be_noticed() -> None:
    """The comparison of weights tells runs apart that differ in one stored number."""

    class Wrong(PlainReplayBuffer):
        def add(self, *args: Any) -> None:
            super().add(*args)
            if self.pos == 15:
                self.rewards[14] = np.nextafter(self.rewards[14], np.float32(9))

    task = Task(Wander)
    plain = trained(task.model(None), learn(75))
    wrong = trained(task.model(Wrong), learn(75))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_learning(plain, wrong)

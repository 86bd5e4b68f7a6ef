"""With one seed, training with holdall's buffer ends in the weights of Stable-Baselines3's."""

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

from .comparison import ALGORITHMS, Task, assert_same_learning, assert_same_training, make_learning, train
from .environments import ARM, BUTTONS, VECTOR, Stacked, Stretched, Wander, make_dict_space

pytestmark = pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer:UserWarning")


def get_action_space(algorithm: str) -> spaces.Space[Any]:
    return BUTTONS if algorithm == "DQN" else ARM


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_the_same_from_vectors(algorithm: str) -> None:
    assert_same_training(Task(partial(Wander, VECTOR, get_action_space(algorithm)), algorithm))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_the_same_from_dicts(algorithm: str) -> None:
    """The observations have an image that Stable-Baselines3 transposes, a vector and a discrete key."""
    environment = partial(Wander, make_dict_space(), get_action_space(algorithm))
    assert_same_training(Task(environment, algorithm, "MultiInputPolicy", lanes=2), make_learning(160))


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_frame_stacks_transposed_by_sb3_give_the_same_weights(algorithm: str) -> None:
    """Images reach the buffer as (C, H, W) views that are not contiguous."""
    environment = partial(Stacked, get_action_space(algorithm))
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
    assert_same_training(Task(partial(Wander, space)))


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_wide_float_observations_give_the_same_weights(algorithm: str) -> None:
    """Sums of floats depend on the alignment of a batch, so it must be that of torch's own tensors."""
    space = spaces.Box(-1, 1, (1025,), np.float32)  # The length is odd, so rows are not aligned.
    task = Task(partial(Wander, space, get_action_space(algorithm)), algorithm, settings={"batch_size": 33})
    assert_same_training(task)


@pytest.mark.parametrize("space", [spaces.Box(-3, 3, (2,), np.float64), spaces.Box(0, 9, (2,), np.float32)], ids=str)
def test_every_action_space_gives_the_same_weights(space: spaces.Space[Any]) -> None:
    """Stable-Baselines3 stores float64 actions as float32."""
    assert_same_training(Task(partial(Wander, VECTOR, space)))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_four_environments_give_the_same_weights(policy: str) -> None:
    """Their episodes end at different steps. The size of the buffer is not a multiple of four."""
    space = VECTOR if policy == "MlpPolicy" else make_dict_space()
    assert_same_training(Task(partial(Wander, space), "TD3", policy, lanes=4, buffer_size=203), make_learning(320))


@pytest.mark.parametrize("handle_timeout_termination", [True, False])
@pytest.mark.parametrize("endings", [{"terminates": 0.2, "max_steps": 10_000}, {"terminates": 0.0, "max_steps": 7}])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_terminations_and_time_limits_count_as_in_sb3(
    policy: str, endings: dict[str, Any], handle_timeout_termination: bool
) -> None:
    """The tasks terminate or are truncated, and time limits count as terminations or not."""
    space = VECTOR if policy == "MlpPolicy" else make_dict_space()
    settings = {"replay_buffer_kwargs": {"handle_timeout_termination": handle_timeout_termination}}
    environment = partial(Wander, space, ARM, **endings)
    assert_same_training(Task(environment, policy=policy, lanes=2, settings=settings))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_normalised_samples_give_the_same_weights(policy: str) -> None:
    """VecNormalize normalises with the statistics at the moment of the draw. Stored observations are not normalised."""
    space = VECTOR if policy == "MlpPolicy" else make_dict_space()
    keys = None if policy == "MlpPolicy" else ["state"]

    def normalise(vec_env: VecEnv) -> VecEnv:
        return VecNormalize(VecTransposeImage(vec_env) if keys else vec_env, norm_obs_keys=keys)

    assert_same_training(Task(partial(Wander, space), policy=policy, lanes=2, wrap=normalise), make_learning(160))


def test_observations_in_another_dtype_are_cast_as_sb3_casts_them() -> None:
    """The observations are float64, and the space is float32."""
    assert_same_training(Task(Wander, lanes=2, wrap=Stretched))


@pytest.mark.parametrize("reset_num_timesteps", [True, False])
def test_learning_twice_gives_the_same_weights(reset_num_timesteps: bool) -> None:
    """The second call begins a new episode, or continues the last one."""
    again = make_learning(60, reset_num_timesteps=reset_num_timesteps)
    assert_same_training(Task(partial(Wander, make_dict_space()), policy="MultiInputPolicy"), make_learning(73), again)


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_small_buffer_gives_the_same_weights(lanes: int) -> None:
    """Transitions are evicted in the middle of episodes."""
    task = Task(partial(Stacked, BUTTONS), "DQN", "CnnPolicy", lanes, buffer_size=41)
    assert_same_training(task, make_learning(150 * lanes))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_optimize_memory_usage_changes_nothing(policy: str) -> None:
    """It also works with Dict observations and with time limits, which Stable-Baselines3 refuses."""
    space = VECTOR if policy == "MlpPolicy" else make_dict_space()
    task = Task(partial(Wander, space, ARM, 0.0, 7), policy=policy, lanes=2, buffer_size=60)
    assert_same_training(task, make_learning(160), optimize_memory_usage=True)


def test_optimize_memory_usage_lets_sb3_end_the_last_episode() -> None:
    """Stable-Baselines3 writes to `dones` before it learns again. The test does so for its plain buffer."""
    task = Task(Wander, lanes=2, buffer_size=50)

    def end_last_episode(model: OffPolicyAlgorithm) -> None:
        assert model.replay_buffer is not None
        model.replay_buffer.dones[model.replay_buffer.pos - 1] = True

    plain = train(task.make_model(None), make_learning(93), end_last_episode, make_learning(60))
    ours = train(task.make_model(ReplayBuffer, optimize_memory_usage=True), make_learning(93), make_learning(60))
    assert_same_learning(plain, ours)


def test_one_wrong_reward_would_be_noticed() -> None:
    """The comparison of weights fails if one stored number differs."""

    class Wrong(PlainReplayBuffer):
        def add(self, *args: Any) -> None:
            super().add(*args)
            if self.pos == 15:
                self.rewards[14] = np.nextafter(self.rewards[14], np.float32(9))

    task = Task(Wander)
    plain = train(task.make_model(None), make_learning(75))
    wrong = train(task.make_model(Wrong), make_learning(75))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_learning(plain, wrong)

"""With one seed, PPO and A2C with holdall's rollout buffer end in the weights of Stable-Baselines3's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common import buffers
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize

from holdall.errors import ArgumentError
from holdall.sb3 import RolloutBuffer

from .comparison import SmallExtractor, list_learned_tensors
from .environments import ARM, BUTTONS, VECTOR, Stacked, Stretched, Wander, make_dict_space, repeat

STEPS = 24

pytestmark = [
    # The last minibatch is smaller.
    pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of 17:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are trying to run:UserWarning"),
]


@dataclass(frozen=True)
class Task:
    """The settings of a training, except for the buffer."""

    environment: Callable[[], Any]
    algorithm: type[OnPolicyAlgorithm] = PPO
    policy: str = "MlpPolicy"
    lanes: int = 3
    wrap: Callable[[VecEnv], VecEnv] = lambda vec_env: vec_env
    settings: dict[str, Any] = field(default_factory=dict)

    def learn(self, buffer_class: type[buffers.RolloutBuffer] | None, **buffer: Any) -> tuple[Any, list[Any]]:
        """Train. Return the model and everything that it logged."""
        policy: dict[str, Any] = {"net_arch": [8]}
        if self.policy != "MlpPolicy":
            policy["features_extractor_class"] = SmallExtractor
        chosen: dict[str, Any] = {"rollout_buffer_class": buffer_class, "rollout_buffer_kwargs": buffer, "seed": 5}
        chosen |= {"policy_kwargs": policy, "n_steps": STEPS, "device": "cpu", "learning_rate": 0.01}
        if self.algorithm is PPO:
            chosen |= {"batch_size": 17, "n_epochs": 3}
        vec_env = self.wrap(DummyVecEnv(repeat(self.environment, self.lanes)))
        kind: Any = self.algorithm
        model = kind(self.policy, vec_env, **(chosen | self.settings))
        curve: list[Any] = []

        def record_logs(_locals: dict[str, Any], _globals: dict[str, Any]) -> bool:
            logged = model.logger.name_to_value
            curve.append({name: value for name, value in logged.items() if not name.startswith("time/")})
            return True

        model.learn(4 * STEPS * self.lanes, callback=record_logs)
        return model, curve


def assert_same_training(task: Task, **buffer: Any) -> Any:
    """Train with either buffer and compare every bit of what was learned and logged."""
    plain, expected = task.learn(None)
    ours, curve = task.learn(RolloutBuffer, **buffer)
    assert type(plain.rollout_buffer) in {buffers.RolloutBuffer, buffers.DictRolloutBuffer}
    assert type(ours.rollout_buffer) is RolloutBuffer
    weights = dict(list_learned_tensors(plain))
    our_weights = dict(list_learned_tensors(ours))
    differing = [name for name, bits in weights.items() if our_weights[name] != bits]
    assert not differing, f"{len(differing)} of {len(weights)} tensors differ, for example {differing[:3]}"
    assert any("train/explained_variance" in logged for logged in expected)
    assert repr(curve) == repr(expected)
    return ours


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize("lanes", [1, 3])
def test_vectors_give_the_same_weights_and_curve(algorithm: type[OnPolicyAlgorithm], lanes: int) -> None:
    assert_same_training(Task(partial(Wander, VECTOR, ARM), algorithm, lanes=lanes))


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_dicts_give_the_same_weights_and_curve(algorithm: type[OnPolicyAlgorithm]) -> None:
    """The observations have an image that Stable-Baselines3 transposes, a vector and a discrete key."""
    assert_same_training(Task(partial(Wander, make_dict_space(), BUTTONS), algorithm, "MultiInputPolicy"))


@pytest.mark.parametrize("compress", [None, "memory"])
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_frame_stacks_give_the_same_weights_and_each_frame_is_stored_once(
    algorithm: type[OnPolicyAlgorithm], compress: str | None
) -> None:
    """The environment stacks frames with channels last, so the buffer gets transposed views."""
    endings = {"terminates": 0.01, "max_steps": 90}
    task = Task(partial(Stacked, BUTTONS, **endings), algorithm, "CnnPolicy", settings={"n_steps": 64})
    ours = assert_same_training(task, compress=compress)
    observed = ours.rollout_buffer.report().fields[0]
    assert "window of 4" in observed.finding
    assert observed.slice_bytes < 0.4 * observed.plain_bytes


def test_stacks_made_by_sb3_give_the_same_weights() -> None:
    """VecFrameStack pads the first observations of an episode with zeros."""
    pixels = spaces.Box(0, 255, (14, 14, 3), np.uint8)
    task = Task(
        partial(Wander, pixels, BUTTONS, terminates=0.02, max_steps=40),
        policy="CnnPolicy",
        wrap=lambda vec_env: VecFrameStack(vec_env, 4),
        settings={"n_steps": 60},
    )
    ours = assert_same_training(task)
    assert "window of 4" in ours.rollout_buffer.report().fields[0].finding


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(6), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(5), spaces.Box(-1, 1, (2, 3))],
    ids=str,
)
def test_every_observation_space_gives_the_same_weights(space: spaces.Space[Any]) -> None:
    assert_same_training(Task(partial(Wander, space, ARM)))


@pytest.mark.parametrize("space", [BUTTONS, spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(3), ARM], ids=str)
def test_every_action_space_gives_the_same_weights(space: spaces.Space[Any]) -> None:
    assert_same_training(Task(partial(Wander, VECTOR, space)))


def test_wide_floats_give_the_same_weights() -> None:
    """Sums of floats depend on the alignment of a batch."""
    assert_same_training(Task(partial(Wander, spaces.Box(-1, 1, (1025,), np.float32), ARM)))


def test_normalised_and_stretched_observations_give_the_same_weights() -> None:
    """Some wrappers return another dtype than their space has."""
    assert_same_training(Task(partial(Wander, VECTOR, ARM), wrap=VecNormalize))
    assert_same_training(Task(partial(Wander, VECTOR, ARM), wrap=Stretched))


@pytest.mark.parametrize("gamma", [0.99, 1, np.float64(0.97), np.float32(0.9)], ids=repr)
def test_advantages_have_the_bits_of_sb3s_own(gamma: Any) -> None:
    """Gamma may be a number of Python or NumPy. They are computed with in different precision."""
    generator = np.random.default_rng(0)
    sides = [
        kind(STEPS, VECTOR, ARM, device="cpu", gae_lambda=0.95, gamma=gamma, n_envs=7)
        for kind in (buffers.RolloutBuffer, RolloutBuffer)
    ]
    for _ in range(STEPS):
        obs = generator.standard_normal((7, 5), np.float32)
        reward, value, log_prob = generator.standard_normal((3, 7), np.float32)
        start = generator.random(7) < 0.2
        for side in sides:
            action = np.zeros((7, 2), np.float32)
            side.add(obs, action, reward, start, torch.from_numpy(value), torch.from_numpy(log_prob))
    last = torch.from_numpy(generator.standard_normal(7, np.float32))
    dones = generator.random(7) < 0.5
    for side in sides:
        side.compute_returns_and_advantage(last, dones)
    plain, ours = sides
    for name in ("advantages", "returns"):
        assert getattr(ours, name).tobytes() == getattr(plain, name).tobytes()
    assert np.array_equal(np.asarray(ours.observations), plain.observations)


def test_a_buffer_that_is_not_full_gives_no_minibatches() -> None:
    buffer = RolloutBuffer(4, VECTOR, ARM, device="cpu")
    with pytest.raises(ArgumentError, match="0 of 4 steps"):
        next(buffer.get(2))

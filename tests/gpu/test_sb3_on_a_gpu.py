"""Drop-ins on a GPU give the tensors and trained weights of Stable-Baselines3's own buffers on that GPU."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common import buffers  # noqa: E402

import holdall.sb3  # noqa: E402

pytestmark = pytest.mark.gpu

CAMERA = spaces.Dict(
    {"camera": spaces.Box(0, 255, (36, 36, 3), np.uint8), "state": spaces.Box(-9, 9, (7,), np.float32)}
)
IMAGE = spaces.Box(0, 255, (4, 36, 36), np.uint8)
VECTOR = spaces.Box(-9, 9, (5,), np.float64)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


def draw_observation(space: Any, lanes: int, draw: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: draw_observation(part, lanes, draw) for key, part in space.spaces.items()}
    return draw.integers(0, 200, (lanes, *space.shape)).astype(space.dtype)


def fill_both(mine: Any, theirs: Any, space: Any, lanes: int) -> None:
    """Add the same steps to both, with episodes that end and are cut in different lanes."""
    draw = np.random.default_rng(0)
    obs = draw_observation(space, lanes, draw)
    for _ in range(150):
        following = draw_observation(space, lanes, draw)
        done = draw.random(lanes) < 0.2
        infos = [{"TimeLimit.truncated": bool(d and draw.random() < 0.5)} for d in done]
        step = (
            obs,
            following,
            draw.random((lanes, 2)).astype(np.float32),
            draw.random(lanes).astype(np.float32),
            done,
            infos,
        )
        mine.add(*step)
        theirs.add(*step)
        obs = following


def assert_same_batch(got: Any, expected: Any) -> None:
    for name in expected._fields:
        mine = getattr(got, name)
        theirs = getattr(expected, name)
        pairs = [(mine[key], theirs[key]) for key in theirs] if isinstance(theirs, dict) else [(mine, theirs)]
        for ours, other in pairs:
            if other is None:
                assert ours is None
                continue
            assert (ours.device, ours.dtype, ours.shape) == (other.device, other.dtype, other.shape), name
            assert torch.equal(ours, other), name


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("space", [CAMERA, IMAGE, VECTOR], ids=["camera", "stack", "vector"])
@pytest.mark.parametrize("budget", ["auto", None], ids=["raw", "compressed"])
def test_samples_are_those_of_stable_baselines3(space: Any, lanes: int, budget: Any) -> None:
    theirs_class: Any = buffers.DictReplayBuffer if isinstance(space, spaces.Dict) else buffers.ReplayBuffer
    theirs = theirs_class(100 * lanes, space, ACTION, device="cuda", n_envs=lanes)
    mine = holdall.sb3.ReplayBuffer(100 * lanes, space, ACTION, device="cuda", n_envs=lanes, budget=budget)
    fill_both(mine, theirs, space, lanes)
    mine.memory.store.wait_idle()
    for size in (1, 32, 256):
        for _ in range(5):
            np.random.seed(size)  # noqa: NPY002  Stable-Baselines3's generator.
            expected = theirs.sample(size)
            np.random.seed(size)  # noqa: NPY002  Stable-Baselines3's generator.
            assert_same_batch(mine.sample(size), expected)


def test_batches_made_ahead_are_those_of_earlier_draws() -> None:
    """They are made on another stream than the consumer's, which is busy. Their memory is reused meanwhile."""
    theirs = buffers.DictReplayBuffer(100, CAMERA, ACTION, device="cuda")
    mine = holdall.sb3.ReplayBuffer(100, CAMERA, ACTION, device="cuda", prefetch=2)
    fill_both(mine, theirs, CAMERA, 1)
    np.random.seed(0)  # noqa: NPY002  Stable-Baselines3's generator.
    expected = [theirs.sample(64) for _ in range(20)]
    np.random.seed(0)  # noqa: NPY002  Stable-Baselines3's generator.
    busy = torch.rand(2_000, 2_000, device="cuda")
    for other in expected:
        busy = busy @ busy / 1_000
        assert_same_batch(mine.sample(64), other)


@pytest.mark.skipif(not hasattr(buffers, "NStepReplayBuffer"), reason="needs Stable-Baselines3 2.7")
def test_returns_over_n_steps_are_those_of_stable_baselines3() -> None:
    theirs = buffers.NStepReplayBuffer(100, VECTOR, ACTION, device="cuda", n_steps=3, gamma=0.9)
    mine = holdall.sb3.ReplayBuffer(100, VECTOR, ACTION, device="cuda", n_steps=3, gamma=0.9)
    fill_both(mine, theirs, VECTOR, 1)
    for seed in range(5):
        np.random.seed(seed)  # noqa: NPY002  Stable-Baselines3's generator.
        expected = theirs.sample(64)
        np.random.seed(seed)  # noqa: NPY002  Stable-Baselines3's generator.
        assert_same_batch(mine.sample(64), expected)


class Reach(gym.Env[Any, Any]):
    """Walk to a goal. An episode has 20 steps."""

    action_space = ACTION

    def __init__(self, goals: bool) -> None:
        place = spaces.Box(-9, 9, (2,), np.float32)
        parts: dict[str, spaces.Space[Any]] = {"observation": place, "achieved_goal": place, "desired_goal": place}
        self._goals = goals
        self.observation_space = spaces.Dict(parts) if goals else CAMERA

    def _observation(self) -> Any:
        if self._goals:
            return {"observation": self._at.copy(), "achieved_goal": self._at.copy(), "desired_goal": self._goal.copy()}
        camera = np.full((36, 36, 3), 128, np.uint8)
        camera[: int(10 + self._at[0]), : int(10 + self._at[1])] = 7
        return {"camera": camera, "state": np.resize(self._at, 7).astype(np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        self._at = np.zeros(2, np.float32)
        self._goal = self.np_random.uniform(-3, 3, 2).astype(np.float32)
        return self._observation(), {}

    def compute_reward(self, achieved: Any, desired: Any, _: Any) -> Any:
        return -np.linalg.norm(np.asarray(achieved) - np.asarray(desired), axis=-1).astype(np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._at = np.clip(self._at + action, -9, 9).astype(np.float32)
        return self._observation(), float(self.compute_reward(self._at, self._goal, {})), False, self._steps == 20, {}


@pytest.mark.parametrize("kind", ["camera", "hindsight"])
def test_trained_weights_are_those_of_stable_baselines3(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    mine: Any = holdall.sb3.HerReplayBuffer if kind == "hindsight" else holdall.sb3.ReplayBuffer
    theirs: Any = sb3.HerReplayBuffer if kind == "hindsight" else buffers.DictReplayBuffer
    trained = []
    for buffer in (theirs, mine):
        model = sb3.SAC(
            "MultiInputPolicy",
            Reach(kind == "hindsight"),
            replay_buffer_class=buffer,
            device="cuda",
            seed=3,
            buffer_size=500,
            learning_starts=50,
            batch_size=32,
            policy_kwargs={"net_arch": [16]},
        )
        model.learn(120)
        trained.append([value.cpu() for value in model.policy.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


class Buttons(gym.Env[Any, Any]):
    """Vectors or frame stacks, three buttons, episodes of 20 steps."""

    action_space = spaces.Discrete(3)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space

    def _observation(self) -> Any:
        return draw_observation(self.observation_space, 1, self.np_random)[0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        ends = self._steps == 20
        return self._observation(), float(self.np_random.normal()), ends and bool(action), ends and not action, {}


def train(algorithm: Any, policy: str, **settings: Any) -> Any:
    space = VECTOR if policy == "MlpPolicy" else IMAGE
    model = algorithm(
        policy,
        Buttons(space),
        device="cuda",
        seed=3,
        buffer_size=100,
        learning_starts=50,
        batch_size=33,
        policy_kwargs={"net_arch": [16]},
        target_update_interval=25,
        train_freq=1,
        **settings,
    )
    return model.learn(160)


@pytest.mark.parametrize("policy", ["MlpPolicy", "CnnPolicy"])
def test_prioritized_dqn_with_alpha_0_gives_the_weights_of_dqn(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    plain = train(sb3.DQN, policy)
    ours = train(holdall.sb3.PrioritizedDQN, policy, alpha=0.0)
    assert ours._n_updates > 50
    for mine, theirs in zip(ours.policy.state_dict().values(), plain.policy.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_prioritized_batches_are_on_the_gpu_and_errors_become_priorities() -> None:
    model = train(holdall.sb3.PrioritizedDQN, "CnnPolicy", alpha=0.7)
    samples = model.replay_buffer.sample(16)
    tensors = [samples.observations, samples.next_observations, samples.rewards, samples.weights, samples.actions]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    assert len(set(model.replay_buffer.sampler.state()["scaled"].tolist())) > 40

"""`PrioritizedDQN` and its mix-in: DQN's update, on rows that are drawn by priority and weighted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sb3_contrib import QRDQN
from sb3_contrib.common.utils import quantile_huber_loss
from stable_baselines3 import DQN, SAC
from stable_baselines3.common import buffers
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv
from torch.nn import functional

from holdall import ArgumentError
from holdall.sb3 import PrioritizedDQN, PrioritizedReplay, PrioritizedReplayBuffer, ReplayBuffer
from holdall.sb3.contrib import PrioritizedQRDQN

from .comparison import SmallExtractor, assert_same_learning
from .environments import BUTTONS, VECTOR, Stacked, Wander, make_dict_space, repeat

HAS_STEPS = hasattr(buffers, "NStepReplayBuffer")  # From 2.7 on.
ENVIRONMENTS: dict[str, Any] = {
    "MlpPolicy": partial(Wander, VECTOR, BUTTONS),
    "CnnPolicy": partial(Stacked, BUTTONS),
    "MultiInputPolicy": partial(Wander, make_dict_space(), BUTTONS),
}
SEEDS = {"MlpPolicy": 5, "CnnPolicy": 7, "MultiInputPolicy": 5}
"""Seeds with which one surplus draw before the training changes the weights. Other seeds may hide such a draw."""


def make_model(algorithm: Any, policy: str = "MlpPolicy", lanes: int = 1, **settings: Any) -> Any:
    network: dict[str, Any] = {} if policy == "MlpPolicy" else {"features_extractor_class": SmallExtractor}
    network |= {"n_quantiles": 20} if issubclass(algorithm, QRDQN) else {}
    chosen: dict[str, Any] = {"policy_kwargs": {"net_arch": [8], **network}, "seed": SEEDS[policy], "device": "cpu"}
    chosen |= {"learning_starts": 20, "batch_size": 16, "train_freq": 1, "buffer_size": 90, "learning_rate": 0.01}
    chosen |= {"target_update_interval": 25}
    return algorithm(policy, DummyVecEnv(repeat(ENVIRONMENTS[policy], lanes)), **(chosen | settings))


def train(algorithm: Any, *args: Any, steps: int = 100, **settings: Any) -> Any:
    model = make_model(algorithm, *args, **settings)
    model.learn(steps * model.n_envs)
    assert model._n_updates > 50, "the training was too short for a comparison"
    return model


class PlainUpdate(DQN):
    """The update of the paper, line by line. The mix-in must give the same weights."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        buffer: Any = self.replay_buffer
        for _ in range(gradient_steps):
            buffer.sampler.beta = 1 - 0.6 * self._current_progress_remaining
            data = buffer.sample(batch_size)
            with torch.no_grad():
                value = self.q_net_target(data.next_observations).max(dim=1, keepdim=True).values
                discounts = self.gamma if data.discounts is None else data.discounts
                target = data.rewards + (1 - data.dones) * discounts * value
            current = self.q_net(data.observations).gather(1, data.actions.long())
            loss = (data.weights * functional.smooth_l1_loss(current, target, reduction="none")).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            buffer.update_priorities(data.ids, (current - target).abs())
        self._n_updates += gradient_steps


@pytest.mark.parametrize(
    ("policy", "lanes", "batch_size"),
    [("MlpPolicy", 1, 16), ("MlpPolicy", 3, 33), ("CnnPolicy", 2, 33), ("MultiInputPolicy", 1, 33)],
)
def test_with_alpha_0_the_weights_are_those_of_dqn(policy: str, lanes: int, batch_size: int) -> None:
    """Rows are drawn by Stable-Baselines3's generator, and all weights are 1."""
    plain = train(DQN, policy, lanes, batch_size=batch_size)
    ours = train(PrioritizedDQN, policy, lanes, batch_size=batch_size, alpha=0.0)
    assert type(ours.replay_buffer) is PrioritizedReplayBuffer
    assert_same_learning(plain, ours)


@pytest.mark.skipif(not HAS_STEPS, reason="n-step returns need Stable-Baselines3 2.7")
def test_with_alpha_0_n_step_returns_are_those_of_dqn() -> None:
    """The buffer gets the model's `n_steps`."""
    ours = train(PrioritizedDQN, n_steps=3, gamma=0.9, alpha=0.0)
    assert (ours.replay_buffer.n_steps, ours.replay_buffer.gamma) == (3, 0.9)
    assert_same_learning(train(DQN, n_steps=3, gamma=0.9), ours)


@pytest.mark.parametrize("policy", ["MlpPolicy", "CnnPolicy"])
def test_with_alpha_0_the_weights_are_those_of_qr_dqn(policy: str) -> None:
    """The mix-in works for sb3-contrib's algorithm, whose network has quantiles."""
    plain = train(QRDQN, policy)
    assert_same_learning(plain, train(PrioritizedQRDQN, policy, alpha=0.0))


@pytest.mark.parametrize("policy", ["MlpPolicy", "CnnPolicy"])
@pytest.mark.parametrize("n_steps", [1, 3] if HAS_STEPS else [1])
def test_priorities_weights_and_beta_are_those_of_the_plain_update(policy: str, n_steps: int) -> None:
    """Every bit of the weights and every priority is equal. A division by 16 is exact."""
    kwargs = {"alpha": 0.7} | ({"n_steps": 3, "gamma": 0.99} if n_steps > 1 else {})
    ours = train(PrioritizedDQN, policy, alpha=0.7, replay_buffer_kwargs={} if n_steps == 1 else kwargs)
    oracle = train(PlainUpdate, policy, replay_buffer_class=PrioritizedReplayBuffer, replay_buffer_kwargs=kwargs)
    assert_same_learning(oracle, ours)
    mine = ours.replay_buffer.sampler.state()
    theirs = oracle.replay_buffer.sampler.state()
    assert mine["scaled"].tobytes() == theirs["scaled"].tobytes()
    assert len(set(mine["scaled"].tolist())) > 40, "no TD error has become a priority"
    assert mine["beta"] == theirs["beta"] > 0.9


class PlainQuantileUpdate(QRDQN):
    """QR-DQN's loss, computed row by row with the weight of each row."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        buffer: Any = self.replay_buffer
        rows = torch.arange(batch_size)
        for _ in range(gradient_steps):
            buffer.sampler.beta = 0.5
            data = buffer.sample(batch_size)
            with torch.no_grad():
                following = self.quantile_net_target(data.next_observations)
                best = following.mean(dim=1).argmax(dim=1)
                target = data.rewards + (1 - data.dones) * self.gamma * following[rows, :, best]
            current = self.quantile_net(data.observations)[rows, :, data.actions[:, 0].long()]
            losses = [quantile_huber_loss(current[i : i + 1], target[i : i + 1]) for i in rows]
            loss = (data.weights[:, 0] * torch.stack(losses)).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            self.policy.optimizer.step()
            buffer.update_priorities(data.ids, (current.mean(dim=1) - target.mean(dim=1)).abs())
        self._n_updates += gradient_steps


def test_every_quantile_is_weighted() -> None:
    """Sums over rows may be rounded differently. `beta` is a function here."""
    ours = train(PrioritizedQRDQN, beta=lambda remaining: 0.5)
    oracle = train(PlainQuantileUpdate, replay_buffer_class=PrioritizedReplayBuffer)
    for mine, theirs in zip(ours.policy.parameters(), oracle.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    mine, theirs = (model.replay_buffer.sampler.state()["scaled"] for model in (ours, oracle))
    np.testing.assert_allclose(mine, theirs, rtol=1e-2)


def test_a_loaded_model_continues_as_the_saved_one(tmp_path: Path) -> None:
    """Stable-Baselines3's own methods save and load the model, the buffer and the settings."""
    settings = {"n_steps": 3} if HAS_STEPS else {}
    model = train(PrioritizedDQN, alpha=0.5, beta=0.3, **settings)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded: Any = PrioritizedDQN.load(tmp_path / "model", env=model.get_env(), device="cpu")
    assert (loaded.alpha, loaded.beta, loaded.replay_buffer.sampler.alpha) == (0.5, 0.3, 0.5)
    assert loaded.replay_buffer.n_steps == model.replay_buffer.n_steps == settings.get("n_steps", 1)
    loaded.load_replay_buffer(tmp_path / "buffer")
    loaded.set_logger(model.logger)
    for each_model in (model, loaded):
        each_model._current_progress_remaining = 0.25
        each_model.train(gradient_steps=20, batch_size=16)
        assert each_model.replay_buffer.sampler.beta == pytest.approx(1 - 0.7 * 0.25)
    assert_same_learning(model, loaded)
    assert loaded.replay_buffer.on_sample is None


def test_settings_of_the_buffer_override_those_of_the_model() -> None:
    model = make_model(PrioritizedDQN, replay_buffer_kwargs={"alpha": 0.9, "budget": None})
    assert model.replay_buffer.sampler.alpha == 0.9
    assert model.replay_buffer.tiers["budget"] is None


@pytest.mark.parametrize("beta", [-1, None, "0.4", float("nan")])
def test_a_wrong_beta_is_refused_before_training(beta: Any) -> None:
    with pytest.raises(ArgumentError, match=r"beta \("):
        make_model(PrioritizedDQN, beta=beta)


def test_an_algorithm_without_values_of_actions_is_refused_before_training() -> None:
    class PrioritizedSAC(PrioritizedReplay, SAC):
        pass

    with pytest.raises(ArgumentError, match=r"PrioritizedSAC has neither a q_net.*samples.weights"):
        PrioritizedSAC("MlpPolicy", "Pendulum-v1", buffer_size=1e2, device="cpu")


def test_a_buffer_without_priorities_is_refused(tmp_path: Path) -> None:
    """The refusal comes from the constructor, and from `learn` if such a buffer was loaded."""
    with pytest.raises(ArgumentError, match=r"replay_buffer_class \(holdall.sb3.replay.ReplayBuffer\)"):
        make_model(PrioritizedDQN, replay_buffer_class=ReplayBuffer)
    plain = train(DQN)
    model = make_model(PrioritizedDQN)
    plain.save_replay_buffer(tmp_path / "buffer")
    model.load_replay_buffer(tmp_path / "buffer")
    with pytest.raises(
        ArgumentError, match=r"replay_buffer \(stable_baselines3.common.buffers.ReplayBuffer\).*copy_of"
    ):
        model.learn(40)
    model.replay_buffer = PrioritizedReplayBuffer.copy_of(model.replay_buffer)
    model.learn(40)
    assert model._n_updates == 20


class Double(DQN):
    """A user's own algorithm: double DQN."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        for _ in range(gradient_steps):
            data: Any = self.replay_buffer.sample(batch_size)  # type: ignore[union-attr]  # The buffer exists.
            with torch.no_grad():
                best = self.q_net(data.next_observations).argmax(dim=1, keepdim=True)
                value = self.q_net_target(data.next_observations).gather(1, best)
                target = data.rewards + (1 - data.dones) * self.gamma * value
            current = self.q_net(data.observations).gather(1, data.actions.long())
            self.policy.optimizer.zero_grad()
            functional.smooth_l1_loss(current, target).backward()  # type: ignore[no-untyped-call]  # torch has no annotation.
            self.policy.optimizer.step()
        self._n_updates += gradient_steps


def test_the_mix_in_works_for_a_users_own_algorithm() -> None:
    class PrioritizedDouble(PrioritizedReplay, Double):
        pass

    assert_same_learning(train(Double), train(PrioritizedDouble, alpha=0.0))
    model = train(PrioritizedDouble)
    assert len(set(model.replay_buffer.sampler.state()["scaled"].tolist())) > 40


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", [PrioritizedDQN, PrioritizedQRDQN])
def test_prioritized_algorithms_learn_cartpole(algorithm: Any) -> None:
    """The hyperparameters are rl-zoo's for DQN. A random policy has a return of 20, and a good one 500."""
    model = algorithm(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1_000,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=1,
        device="cpu",
    )
    before: Any = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
    model.learn(30_000)
    after: Any = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
    assert before[0] < 60
    assert after[0] > 195

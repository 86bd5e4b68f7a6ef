# /// script
# dependencies = ["holdall[torchrl]"]
# ///
"""DQN with TorchRL on stacks of four frames: TorchRL's collector, loss and buffer, with holdall as the storage.

    python examples/dqn_torchrl.py [STEPS]

The game is part of the example: a ball falls, and a paddle must catch it. One frame does not show which way it flies.
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import Storage
from torchrl.envs import CatFrames, Compose, GymWrapper, InitTracker, TransformedEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

from holdall.torchrl import HoldallStorage  # 1

SIZE = 12
BATCH = 32
BLOCK = 64


class Catch(gym.Env[np.ndarray, np.int64]):
    """A ball flies down and sideways, bouncing off the walls. A paddle at the bottom moves left, stays, moves right."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Throw the next ball."""
        super().reset(seed=seed, options=options)
        self.row = 0
        self.column = int(self.np_random.integers(SIZE))
        self.paddle = SIZE // 2
        self.flight = int(self.np_random.choice([-1, 1]))
        return self.draw_frame(), {}

    def draw_frame(self) -> np.ndarray:
        """Draw the ball and the paddle."""
        image = np.zeros(self.observation_space.shape, np.uint8)
        image[0, self.row, self.column] = 255
        image[0, -1, max(self.paddle - 1, 0) : self.paddle + 2] = 128
        return image

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move the ball and the paddle. The episode ends when the ball is at the bottom."""
        self.paddle = int(np.clip(self.paddle + action - 1, 0, SIZE - 1))
        if not 0 <= self.column + self.flight < SIZE:
            self.flight = -self.flight
        self.row += 1
        self.column += self.flight
        at_bottom = self.row == SIZE - 1
        reward = 0.0
        if at_bottom:
            reward = 1.0 if abs(self.column - self.paddle) <= 1 else -1.0
        return self.draw_frame(), reward, at_bottom, False, {}


class Network(torch.nn.Module):
    """A network that returns values of actions for stacks of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(4, 16, 4, stride=2),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 5 * 5, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 3),
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the values for one stack, or for a batch of stacks."""
        values = self.layers(pixels.reshape(-1, *pixels.shape[-3:]) / 255)
        return values.reshape(*pixels.shape[:-3], 3)


def train(storage: Storage, steps: int) -> tuple[torch.nn.Module, float]:
    """Collect and learn in turn. Return the network, and the share of the last 100 balls that were caught."""
    torch.manual_seed(0)
    game = GymWrapper(Catch(), categorical_action_encoding=True)
    env = TransformedEnv(game, Compose(InitTracker(), CatFrames(4, dim=-3, in_keys=["observation"])))
    env.set_seed(0)
    actor = QValueActor(Network(), in_keys=["observation"], spec=env.action_spec, action_space="categorical")
    explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=max(steps // 2, 1))
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)  # 2
    loss = DQNLoss(actor, action_space="categorical", delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.97)
    target = HardUpdate(loss, value_network_update_interval=100)
    optimizer = torch.optim.Adam(actor.parameters(), 1e-3)
    policy = TensorDictSequential(actor, explore)
    caught: list[float] = []
    for block in Collector(env, policy, frames_per_batch=BLOCK, total_frames=steps):
        buffer.extend(block)
        explore.step(BLOCK)
        caught += (block["next", "reward"][block["next", "done"]] > 0).float().tolist()
        for _ in range(BLOCK // 2):
            optimizer.zero_grad()
            loss(buffer.sample())["loss"].backward()
            optimizer.step()
            target.step()
    return actor, sum(caught[-100:]) / max(len(caught[-100:]), 1)


if __name__ == "__main__":
    storage = HoldallStorage(100_000, budget=None)  # 3: compress everything
    _, share = train(storage, int(sys.argv[1]) if len(sys.argv) > 1 else 29_952)
    print(f"caught {share:.0%} of the last 100 balls")
    print(storage.memory.report())

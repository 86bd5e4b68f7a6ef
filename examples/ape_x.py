# /// script
# dependencies = ["holdall[ray,torch]"]
# ///
"""Ape-X, in a game of catch: actors feed shards, and a learner draws n-step returns by priority.

    python examples/ape_x.py [UPDATES] [FOLDER]

A ball falls, and a paddle must be under it at the end; only then there is a reward. `limit` makes actors and the
learner wait for each other, so that each transition is drawn about 8 times, however fast they are. Kill everything at
any moment, with kill -9 if you like, and run it again: it continues with the transitions, their priorities and the
network.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import ray
import torch
from gymnasium import spaces

import holdall.ray

ROWS = 10
COLUMNS = 5
ACTORS = 2
BATCH = 64
STEPS = 3
GAMMA = 0.97


class Catch(gym.Env):
    """A ball falls one row per step. The paddle at the bottom stays, or moves to the left or right."""

    observation_space = spaces.Box(0, 1, (2 * ROWS * COLUMNS,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Drop another ball."""
        super().reset(seed=seed)
        self.row = 0
        self.ball = int(self.np_random.integers(COLUMNS))
        self.paddle = COLUMNS // 2
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move ball and paddle. At the bottom, the reward shows whether the ball was caught."""
        self.row += 1
        self.paddle = min(COLUMNS - 1, max(0, self.paddle + int(action) - 1))
        ended = self.row == ROWS - 1
        return self.observe(), float(ended) * (1 if self.paddle == self.ball else -1), ended, False, {}

    def observe(self) -> np.ndarray:
        """Return ball and paddle, each in its own grid."""
        grid = np.zeros((2, ROWS, COLUMNS), np.float32)
        grid[0, self.row, self.ball] = 1
        grid[1, ROWS - 1, self.paddle] = 1
        return grid.reshape(-1)


def make_network() -> torch.nn.Sequential:
    """Return a network that values actions."""
    inputs = 2 * ROWS * COLUMNS
    return torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))


class Policy:
    """Chooses actions for an actor. Each actor has its own probability of a random one."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)
        self.network = make_network()
        self.rng = np.random.default_rng(number)
        self.curiosity = 0.4 ** (1 + 7 * number / max(1, ACTORS - 1)) if number else 0.4

    def load(self, weights: dict) -> None:
        """Load the learner's weights."""
        self.network.load_state_dict(weights)

    def __call__(self, obs: np.ndarray) -> int:
        """Return the action for an observation."""
        if self.rng.random() < self.curiosity:
            return int(self.rng.integers(3))
        with torch.no_grad():
            return int(self.network(torch.from_numpy(obs)).argmax())


def measure_catches(network: torch.nn.Module, games: int = 200) -> float:
    """Return the share of balls that the best actions catch."""
    env = Catch()
    policy = Policy(0)
    total = 0
    policy.network = network
    policy.curiosity = 0.0
    for game in range(games):
        (obs, _), ended = env.reset(seed=game), False
        while not ended:
            obs, reward, ended, *_ = env.step(policy(obs))
        total += reward > 0
    return total / games


class Learner:
    """A double DQN, with its state in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.update = 0
        self.network = make_network()
        self.target = make_network()
        self.optimizer = torch.optim.Adam(self.network.parameters(), 1e-3)
        if file.exists():
            saved = torch.load(file, weights_only=True)
            self.update = saved["update"]
            for name in ("network", "target", "optimizer"):
                getattr(self, name).load_state_dict(saved[name])

    def learn(self, batch: holdall.Batch) -> np.ndarray:
        """Take one step, and return the errors that become priorities."""
        with torch.no_grad():
            best = self.network(batch.next_obs).argmax(dim=-1, keepdim=True)
            value = self.target(batch.next_obs).gather(-1, best).squeeze(-1)
            goal = batch.reward + batch.discount * ~batch.terminated * value
        error = self.network(batch.obs).gather(-1, batch.action[:, None]).squeeze(-1) - goal
        self.optimizer.zero_grad()
        (batch.weights * error**2).mean().backward()
        self.optimizer.step()
        self.update += 1
        return error.detach().abs().numpy()

    def save(self) -> None:
        """Write the state to a new file, and rename it. An interrupted save changes nothing."""
        states = {name: getattr(self, name).state_dict() for name in ("network", "target", "optimizer")}
        torch.save(states | {"update": self.update}, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)


def main(updates: int, folder: Path) -> None:
    """Train until this many updates were made, over all runs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    learner = Learner(folder / "learner.pt")
    memory = holdall.ray.ReplayMemory(  # 1
        Catch.observation_space,
        Catch.action_space,
        50_000,
        shards=2,
        device="cpu",
        seed=0,
        sampler=holdall.NStep(STEPS, GAMMA, by=holdall.Prioritized(0.6, 0.4)),
        limit=holdall.ray.RateLimit(samples_per_insert=8, min_size=500, tolerance=8_192),
        durability="segment",
        url=folder,
    )
    print(f"begins with {len(memory)} transitions, after update {learner.update}", flush=True)
    with memory, holdall.ray.collect(Catch, ACTORS, memory, Policy, num_cpus=0.5) as actors:  # 2
        while learner.update < updates:
            if learner.update % 50 == 0:
                actors.send(learner.network.state_dict())
                learner.target.load_state_dict(learner.network.state_dict())
            batch = memory.sample(BATCH)
            memory.update_priorities(batch.ids, learner.learn(batch))  # 3
            if learner.update % 200 == 0:
                learner.save()
                print(f"update {learner.update}: {measure_catches(learner.network):.0%} caught", flush=True)
        print(memory.report())


if __name__ == "__main__":
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4_000, Path(sys.argv[2] if len(sys.argv) > 2 else "ape_x"))
    ray.shutdown()

# /// script
# dependencies = ["holdall[torch]"]
# ///
"""Recurrent Q-learning from sequences: consecutive steps with a burn-in, drawn from the same memory as single steps.

    python examples/recurrent_sequences.py [STEPS]

The task is CartPole without velocities. Only a network with a state of its own can balance the pole.
"""

import sys

import gymnasium as gym
import numpy as np
import torch

import holdall

LENGTH = 10
BURN_IN = 5
BATCH = 32
GAMMA = 0.99


class Recurrent(torch.nn.Module):
    """A GRU over positions, and a value for each action."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.nn.GRU(2, 32, batch_first=True)
        self.values = torch.nn.Linear(32, 2)

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values for every step, and the state after the last one."""
        seen, state = self.memory(obs, state)
        return self.values(seen), state


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
env = gym.make("CartPole-v1")
positions = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
memory = holdall.ReplayMemory(
    positions,
    env.action_space,
    capacity=50_000,
    device="cpu",
    seed=0,
    sampler=holdall.Sequence(LENGTH, burn_in=BURN_IN),  # 1
)
network = Recurrent()
optimizer = torch.optim.Adam(network.parameters(), 1e-3)
rng = np.random.default_rng(0)


def learn() -> float:
    """Draw sequences, warm the state up, and learn from the steps after the burn-in."""
    batch = memory.sample(BATCH)  # 2: fields are (batch, burn_in + length, ...)
    values, _ = network(batch.obs)
    with torch.no_grad():
        following = network(batch.next_obs)[0].max(dim=-1).values
    target = batch.reward + GAMMA * following * ~batch.terminated
    taken = values.gather(-1, batch.action.long().unsqueeze(-1)).squeeze(-1)
    real = batch.mask[:, BURN_IN:]  # 3: real steps; the rest is padding
    loss = ((taken - target)[:, BURN_IN:] ** 2)[real].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


obs, _ = env.reset(seed=0)
state: torch.Tensor | None = None
for step in range(steps):
    seen = obs[[0, 2]].astype(np.float32)
    with torch.no_grad():
        values, state = network(torch.from_numpy(seen).reshape(1, 1, 2), state)
    action = int(rng.integers(2)) if rng.random() < 0.1 else int(values[0, 0].argmax())
    obs, reward, terminated, truncated, _ = env.step(action)
    memory.add(
        seen[None],
        np.array([action]),
        np.array([reward], np.float32),
        obs[[0, 2]].astype(np.float32)[None],
        np.array([terminated]),
        np.array([truncated]),
    )
    if terminated or truncated:
        obs = env.reset()[0]
        state = None
    if step > 4 * BATCH and step % 4 == 0:
        loss = learn()
        if step % 1_000 == 0:
            print(f"step {step}: loss {loss:.4f}")
print(memory.report())

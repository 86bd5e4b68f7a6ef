# /// script
# dependencies = ["holdall[torch]"]
# ///
"""R2D2: recurrent Q-learning with stored states, on a maze that only an agent with a memory solves.

    python examples/r2d2_t_maze.py [STEPS]

A sign at the entrance of a corridor shows which way to turn at its far end, ten steps later. The same program trains a
network with a recurrent state and one without, and prints how often each turns the right way: always, and by chance.
"""

import sys

import numpy as np
import torch
from gymnasium import spaces

import holdall

CORRIDOR = 10
LANES = 16
HIDDEN = 32
LENGTH = 14
BURN_IN = 4
BATCH = 32
GAMMA = 0.97
FORWARD, LEFT, RIGHT = range(3)


class TMaze:
    """Several corridors. An observation is the sign (only at the entrance), and whether this is the junction."""

    def __init__(self, lanes: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.place = np.zeros(lanes, np.int64)
        self.steps = np.zeros(lanes, np.int64)
        self.sign = self._rng.choice([LEFT, RIGHT], lanes)

    def obs(self) -> np.ndarray:
        """Return the present observations: left sign, right sign, junction."""
        at_entrance = self.place == 0
        seen = [at_entrance & (self.sign == LEFT), at_entrance & (self.sign == RIGHT), self.place == CORRIDOR]
        return np.stack(seen, axis=1).astype(np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Move. Return rewards, true next observations, terminated, truncated. Lanes that ended begin again."""
        at_junction = self.place == CORRIDOR
        forward = action == FORWARD
        terminated = at_junction & ~forward
        reward = np.where(
            terminated, np.where(action == self.sign, 1.0, -1.0), np.where(at_junction == forward, -0.1, 0.0)
        )
        self.place += forward & ~at_junction
        self.steps += 1
        truncated = ~terminated & (self.steps == 4 * CORRIDOR)
        next_obs = self.obs()
        ended = terminated | truncated
        self.sign = np.where(ended, self._rng.choice([LEFT, RIGHT], len(ended)), self.sign)
        self.place[ended] = 0
        self.steps[ended] = 0
        return reward.astype(np.float32), next_obs, terminated, truncated


class Network(torch.nn.Module):
    """A network that returns values of actions. Its state is that of a GRU, or zeros that are not used."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(3, HIDDEN) if recurrent else None
        self.layer = torch.nn.Linear(3, HIDDEN)
        self.head = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 3))

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, and the state after this observation."""
        if self.cell is None:
            return self.head(torch.tanh(self.layer(obs))), state
        state = self.cell(obs, state)
        return self.head(state), state

    def unroll(self, obs: torch.Tensor, state: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
        """Return values, states before and states after every step. Padding leaves the state as it is."""
        values = []
        before = []
        after = []
        for t in range(obs.shape[1]):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= BURN_IN):
                value, new = self(obs[:, t], state)
            before.append(state)
            state = torch.where(real[:, t, None], new, state)
            values.append(value)
            after.append(state)
        return [torch.stack(each, dim=1) for each in (values, before, after)]


def make_memory() -> holdall.ReplayMemory:
    """Return a memory that keeps, with every step, the recurrent state before it."""
    state = spaces.Box(-np.inf, np.inf, (HIDDEN,), np.float32)
    return holdall.ReplayMemory(
        spaces.Box(0, 1, (3,), np.float32),
        spaces.Discrete(3),
        100_000,
        LANES,
        device="cpu",
        seed=0,
        extras={"hidden": state},
        sampler=holdall.Sequence(LENGTH, burn_in=BURN_IN),  # 1
    )


def learn(memory: holdall.ReplayMemory, network: Network, target: Network, optimizer: torch.optim.Optimizer) -> None:
    """Draw sequences, start from their stored states, learn from the steps after the burn-in, and store new states."""
    batch = memory.sample(BATCH)  # 2: fields are (batch, burn_in + length, ...)
    first = batch.extras["hidden"][:, 0]
    real = batch.mask
    values, before, after = network.unroll(batch.obs, first, real)
    with torch.no_grad():
        best = network(batch.next_obs.flatten(0, 1), after.flatten(0, 1))[0].argmax(dim=-1, keepdim=True)
        states = target.unroll(batch.obs, first, real)[2]
        following = target(batch.next_obs.flatten(0, 1), states.flatten(0, 1))[0].gather(-1, best)
        goal = batch.reward + GAMMA * following.view(batch.reward.shape) * ~batch.terminated
    taken = values.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    loss = ((taken - goal)[:, BURN_IN:] ** 2)[real[:, BURN_IN:]].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory.update(batch.ids[real.numpy()], hidden=before[real])  # 3: states that the network computes now


def train(recurrent: bool, ticks: int) -> tuple[Network, holdall.ReplayMemory]:
    """Play in all lanes, and learn once per tick."""
    torch.manual_seed(0)
    maze = TMaze(LANES, seed=1)
    rng = np.random.default_rng(2)
    memory = make_memory()
    network = Network(recurrent)
    target = Network(recurrent)
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    state = torch.zeros(LANES, HIDDEN)
    for tick in range(ticks):
        obs = maze.obs()
        hidden = state
        with torch.no_grad():
            values, state = network(torch.from_numpy(obs), state)
        curious = rng.random(LANES) < max(0.05, 1 - tick / (0.5 * ticks))
        action = np.where(curious, rng.choice(3, LANES, p=[0.7, 0.15, 0.15]), values.argmax(dim=-1).numpy())
        reward, next_obs, terminated, truncated = maze.step(action)
        memory.add(obs, action, reward, next_obs, terminated, truncated, extras={"hidden": hidden.numpy()})
        state = torch.where(torch.from_numpy(terminated | truncated)[:, None], 0.0, state)
        if tick % 100 == 0:
            target.load_state_dict(network.state_dict())
        if tick > 60:
            learn(memory, network, target, optimizer)
    return network, memory


def measure_success(network: Network, lanes: int = 400) -> float:
    """Return the share of mazes in which the best actions turn the right way."""
    maze = TMaze(lanes, seed=3)
    state = torch.zeros(lanes, HIDDEN)
    right = np.zeros(lanes, np.bool_)
    going = ~right
    for _ in range(4 * CORRIDOR):
        with torch.no_grad():
            values, state = network(torch.from_numpy(maze.obs()), state)
        reward, _, terminated, truncated = maze.step(values.argmax(dim=-1).numpy())
        right |= going & terminated & (reward > 0)
        going &= ~(terminated | truncated)
    return float(right.mean())


if __name__ == "__main__":
    torch.set_num_threads(1)  # The networks are small.
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 48_000
    for name, recurrent in (("without a memory", False), ("with a recurrent state", True)):
        network, memory = train(recurrent, steps // LANES)
        print(f"{name}: {measure_success(network):.0%} of the mazes solved")
    print(memory.report())

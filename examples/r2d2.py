# /// script
# dependencies = ["holdall[ray,torch]"]
# ///
"""R2D2 over shards, in a T-shaped maze: recurrent actors feed them, and a learner draws sequences by priority.

    python examples/r2d2.py [UPDATES] [FOLDER]

The maze and the network are those of r2d2_t_maze.py: a sign at the entrance shows which way to turn ten steps later.
Actors store the recurrent state with every step; the learner starts from it, and warms it up with the burn-in. Kill
everything at any moment, with kill -9 if you like, and run it again: it continues with the sequences, their
priorities and the network.
"""

import sys
from pathlib import Path

import numpy as np
import ray
import torch
from gymnasium import spaces
from r2d2_t_maze import BURN_IN, GAMMA, HIDDEN, LENGTH, Network, TMaze, measure_success

import holdall.ray

ACTORS = 2
LANES = 8
BATCH = 64
STEPS = 3
ETA = 0.9


@ray.remote(num_cpus=0.5, max_restarts=-1, max_task_retries=-1)
class Actor:
    """Plays several mazes at the same time. Each lane sometimes takes a random action."""

    def __init__(self, number: int, writer: holdall.ray.Writer) -> None:
        torch.set_num_threads(1)
        self.writer = writer
        self.network = Network(recurrent=True)
        self.maze = TMaze(LANES, seed=number)
        self.rng = np.random.default_rng(number)
        lanes = np.arange(number * LANES, (number + 1) * LANES)
        self.curiosity = 0.4 ** (1 + 3 * lanes / (ACTORS * LANES - 1))
        self.state = torch.zeros(LANES, HIDDEN)

    def play(self, weights: dict, ticks: int) -> int:
        """Play some ticks with the learner's weights. Return the number of steps."""
        self.network.load_state_dict(weights)
        for _ in range(ticks):
            obs = self.maze.obs()
            hidden = self.state
            with torch.no_grad():
                values, state = self.network(torch.from_numpy(obs), hidden)
            random = self.rng.choice(3, LANES, p=[0.7, 0.15, 0.15])
            action = np.where(self.rng.random(LANES) < self.curiosity, random, values.argmax(dim=-1).numpy())
            reward, next_obs, terminated, truncated = self.maze.step(action)
            extras = {"hidden": hidden.numpy()}
            self.writer.add(obs, action, reward, next_obs, terminated, truncated, extras=extras)  # 2
            self.state = torch.where(torch.from_numpy(terminated | truncated)[:, None], 0.0, state)
        self.writer.flush()
        return ticks * LANES


class Learner:
    """A recurrent double DQN with n-step targets, with its state in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.update = 0
        self.network = Network(recurrent=True)
        self.target = Network(recurrent=True)
        self.optimizer = torch.optim.Adam(self.network.parameters(), 2e-3)
        if file.exists():
            saved = torch.load(file, weights_only=True)
            self.update = saved["update"]
            for name in ("network", "target", "optimizer"):
                getattr(self, name).load_state_dict(saved[name])

    def learn(self, batch: holdall.Batch) -> np.ndarray:
        """Take one step, and return the priorities of the sequences: their errors, between mean and largest."""
        first = batch.extras["hidden"][:, 0]
        real = batch.mask
        values, _, after = self.network.unroll(batch.obs, first, real)
        with torch.no_grad():
            best = self.network(batch.next_obs.flatten(0, 1), after.flatten(0, 1))[0].argmax(dim=-1, keepdim=True)
            states = self.target.unroll(batch.obs, first, real)[2]
            following = self.target(batch.next_obs.flatten(0, 1), states.flatten(0, 1))[0].gather(-1, best)
            goal = self.compute_targets(batch, following.view(batch.reward.shape))
        error = values.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1) - goal
        learned = real[:, BURN_IN:]
        error = torch.where(learned, error[:, BURN_IN:], 0.0)
        steps = learned.sum(dim=1).clamp(min=1)
        self.optimizer.zero_grad()
        (batch.weights * (error**2).sum(dim=1) / steps).mean().backward()
        self.optimizer.step()
        self.update += 1
        sizes = error.detach().abs()
        return (ETA * sizes.max(dim=1).values + (1 - ETA) * sizes.sum(dim=1) / steps).numpy()

    @staticmethod
    def compute_targets(batch: holdall.Batch, following: torch.Tensor) -> torch.Tensor:
        """Return n-step targets, shorter ones where an episode or the sequence ends."""
        goal = batch.reward + GAMMA * following * ~batch.terminated
        ends = batch.terminated | batch.truncated | ~batch.mask
        one = goal
        for _ in range(STEPS - 1):
            later = torch.cat([goal[:, 1:], goal[:, -1:]], dim=1)
            is_last = ends | torch.cat([~batch.mask[:, 1:], torch.ones_like(ends[:, :1])], dim=1)
            goal = torch.where(is_last, one, batch.reward + GAMMA * later)
        return goal

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
    state = spaces.Box(-np.inf, np.inf, (HIDDEN,), np.float32)
    memory = holdall.ray.ReplayMemory(  # 1
        spaces.Box(0, 1, (3,), np.float32),
        spaces.Discrete(3),
        100_000,
        LANES,
        shards=2,
        device="cpu",
        seed=0,
        extras={"hidden": state},
        durability="segment",
        url=folder,
        sampler=holdall.Sequence(LENGTH, BURN_IN, stride=LENGTH // 2, by=holdall.Prioritized(0.9, 0.6)),
    )
    print(f"begins with {len(memory)} transitions, after update {learner.update}", flush=True)
    with memory:
        actors = [Actor.remote(number, memory.writer()) for number in range(ACTORS)]
        playing = [actor.play.remote(learner.network.state_dict(), 100) for actor in actors]
        ray.get(playing)
        while learner.update < updates:
            if learner.update % 20 == 0:
                ray.get(playing)
                playing = [actor.play.remote(learner.network.state_dict(), 20) for actor in actors]
            if learner.update % 100 == 0:
                learner.target.load_state_dict(learner.network.state_dict())
            batch = memory.sample(BATCH)
            memory.update_priorities(batch.ids, learner.learn(batch))  # 3
            if learner.update % 200 == 0:
                learner.save()
                share = measure_success(learner.network)
                print(f"update {learner.update}: {share:.0%} of the mazes solved", flush=True)
        ray.get(playing)
        print(memory.report())


if __name__ == "__main__":
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4_000, Path(sys.argv[2] if len(sys.argv) > 2 else "r2d2"))
    ray.shutdown()

"""A search over hyperparameters in one process, as note 003 describes it: `python benchmarks/watch/search.py`.

PPO with networks of width 768, a state of 71 numbers and 7 actions, rollouts of 4,096 steps by 3 workers (threads of
this process, each running the policy), 12 torch threads, batches of 2,048 to 8,192; one trial after the other. At the
end, the process waits for a line on stdin, so that its memory can be read.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from holdall import watch
from holdall.tools.watch.agent import get_agent

STATE = 71
ACTIONS = 7
STEPS = 4096
WORKERS = 3
WIDTH = 768
THREADS = 12
TRIALS = 4


def network(outputs: int) -> nn.Module:
    """Make one network of the note: an input layer, three hidden ones, an output layer."""
    sizes = [STATE, *[WIDTH] * 4]
    layers: list[nn.Module] = []
    for width, following in pairwise(sizes):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def collect(actor: nn.Module, worker: int, into: dict[str, NDArray[Any]]) -> None:
    """Fill a worker's rollout, with the policy run in this thread."""
    generator = np.random.default_rng(worker)
    for first in range(0, STEPS, 64):
        states = generator.normal(size=(64, STATE)).astype(np.float32)
        with torch.no_grad():
            actions = actor(torch.from_numpy(states)).numpy()
        into["states"][first : first + 64] = states
        into["actions"][first : first + 64] = actions
        into["rewards"][first : first + 64] = generator.normal(size=64)


def trial(number: int, workers: ThreadPoolExecutor) -> float:
    """Train once with one choice of hyperparameters."""
    batch = (2048, 4096, 8192, 4096)[number % 4]
    actor = network(ACTIONS)
    critic = network(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 3e-4)
    shapes = {"states": (STEPS, STATE), "actions": (STEPS, ACTIONS), "rewards": (STEPS,)}
    rollouts = [{name: np.zeros(shape, np.float32) for name, shape in shapes.items()} for _ in range(WORKERS)]
    for worker, rollout in enumerate(rollouts):
        for name, array in rollout.items():
            watch.track(f"rollout {worker}.{name}", array)
    loss = torch.zeros(())
    for _ in range(2):
        for done in [workers.submit(collect, actor, i, rollout) for i, rollout in enumerate(rollouts)]:
            done.result()
        states = torch.from_numpy(np.concatenate([rollout["states"] for rollout in rollouts]))
        actions = torch.from_numpy(np.concatenate([rollout["actions"] for rollout in rollouts]))
        rewards = torch.from_numpy(np.concatenate([rollout["rewards"] for rollout in rollouts]))
        for _ in range(2):
            chosen = torch.randint(len(states), (batch,))
            value = critic(states[chosen])[:, 0]
            fit = (actor(states[chosen]) - actions[chosen]).square().mean()
            loss = fit + (value - rewards[chosen]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if number == TRIALS - 1:  # the last one is still there when the process is read
        keep.update({"actor": actor, "critic": critic, "optimizer": optimizer, "rollouts": rollouts})
        for name, held in (("actor", actor), ("critic", critic), ("optimizer", optimizer)):
            watch.track(name, held)
    return float(loss.detach())


keep: dict[str, Any] = {}


def main() -> None:
    """Search, and wait until the memory of the process was read."""
    torch.set_num_threads(THREADS)
    with ThreadPoolExecutor(WORKERS) as workers:
        results = [trial(number, workers) for number in range(TRIALS)]
        get_agent().publish()
        print(json.dumps({"trials": len(results)}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()

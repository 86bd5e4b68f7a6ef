# /// script
# dependencies = ["holdall[ray,torch]"]
# ///
"""Data-parallel learning: two ranks draw different rows from one memory, and share their gradients.

    python examples/data_parallel.py [UPDATES]

One process fills the memory with random games of catch. Every rank attaches to the memory by its name. All ranks have
one seed and the same network, but `rank` makes each draw different rows. In your own launcher, call
`holdall.ray.attach` in every process; ranks may run on any machine of the cluster.
"""

import sys
import tempfile

import numpy as np
import ray
import torch
from ape_x import BATCH, GAMMA, STEPS, Catch, make_network, measure_catches
from torch import distributed

import holdall.ray

RANKS = 2


@ray.remote(num_cpus=0.5)
def learn(name: str, rank: int, meeting: str, updates: int) -> tuple[dict, list[int]]:
    """Learn from a share of every batch. Return the weights, and the first rows that were drawn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # All ranks have one seed, so that their networks start equal.
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    network = make_network()
    target = make_network()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    first: list[int] = []
    memory = holdall.ray.attach(name, rank=rank, seed=0, device="cpu")  # 2
    with memory, memory.loader(BATCH // RANKS) as batches:
        for update in range(updates):
            batch = next(batches)  # 3
            first = first or batch.ids.tolist()
            if update % 50 == 0:
                target.load_state_dict(network.state_dict())
            with torch.no_grad():
                best = network(batch.next_obs).argmax(dim=-1, keepdim=True)
                value = target(batch.next_obs).gather(-1, best).squeeze(-1)
                goal = batch.reward + batch.discount * ~batch.terminated * value
            loss = ((network(batch.obs).gather(-1, batch.action[:, None]).squeeze(-1) - goal) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in network.parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= RANKS
            optimizer.step()
    distributed.destroy_process_group()
    return network.state_dict(), first


def play_random_games(memory: holdall.ray.ReplayMemory, games: int) -> None:
    """Fill the memory with random games."""
    env = Catch()
    rng = np.random.default_rng(0)
    for game in range(games):
        (obs, _), ended = env.reset(seed=game), False
        while not ended:
            action = int(rng.integers(3))
            next_obs, reward, ended, truncated, _ = env.step(action)
            memory.add(obs, action, reward, next_obs, ended, truncated)
            obs = next_obs


if __name__ == "__main__":
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 1_500
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    sampler = holdall.NStep(STEPS, GAMMA)
    spaces = Catch.observation_space, Catch.action_space
    with holdall.ray.ReplayMemory(*spaces, 50_000, shards=2, sampler=sampler, name="catch") as memory:  # 1
        play_random_games(memory, 1_000)
        with tempfile.TemporaryDirectory() as folder:
            ranks = [learn.remote(memory.name, rank, f"{folder}/meeting", updates) for rank in range(RANKS)]
            (weights, one), (others, other) = ray.get(ranks)
        alike = all(torch.equal(weights[name], others[name]) for name in weights)
        network = make_network()
        network.load_state_dict(weights)
        in_common = len(set(one) & set(other))
        print(f"{RANKS} ranks, weights {'alike' if alike else 'different'}, {in_common} rows of a batch in common")
        print(f"{measure_catches(network):.0%} caught")
        print(memory.report())
    ray.shutdown()

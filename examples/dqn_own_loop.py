# /// script
# dependencies = ["holdall[torch]"]
# ///
"""DQN in one file, in the style of CleanRL and without Stable-Baselines3: the loop is yours, the memory is holdall's.

python examples/dqn_own_loop.py [STEPS]
"""

import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import holdall

LANES = 4
BATCH = 128
GAMMA = 0.99
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
torch.manual_seed(0)
rng = np.random.default_rng(0)
envs = gym.make_vec("CartPole-v1", num_envs=LANES, vectorization_mode="sync")
q_network, target_network = (
    nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)) for _ in range(2)
)
target_network.load_state_dict(q_network.state_dict())
optimizer = torch.optim.Adam(q_network.parameters(), 2.5e-4)
memory = holdall.ReplayMemory(  # 1
    envs.single_observation_space, envs.single_action_space, 50_000, LANES, device="cpu", seed=0
)

recorder = holdall.Recorder(envs, memory)
recorder.reset(seed=0)
for step in range(steps // LANES):
    epsilon = max(0.05, 1.0 - step * LANES / (0.5 * steps))
    with torch.no_grad():
        greedy = q_network(torch.from_numpy(recorder.obs)).argmax(dim=1).numpy()
    action = np.where(rng.random(LANES) < epsilon, rng.integers(0, 2, LANES), greedy)
    recorder.step(action)  # 2: adds each step; a lane that only reset adds no transition
    if len(memory) < BATCH:
        continue
    batch = memory.sample(BATCH)  # 3: torch tensors; at the end of an episode, next_obs is the true final one
    with torch.no_grad():
        best = target_network(batch.next_obs).max(dim=1).values
        target = batch.reward.float() + GAMMA * best * ~batch.terminated
    taken = q_network(batch.obs).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    loss = nn.functional.mse_loss(target, taken)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        target_network.load_state_dict(q_network.state_dict())
print(f"loss {loss.item():.3f}")
print(memory.report())

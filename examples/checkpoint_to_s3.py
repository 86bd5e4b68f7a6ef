# /// script
# dependencies = ["holdall[cloud]"]
# ///
"""Checkpoints in an object store: only new data is sent, in the background, and a loaded memory draws the same batches.

    AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... python examples/checkpoint_to_s3.py s3://bucket/run [STEPS]

gs:// and az:// work the same way; holdall reads the same keys from the environment as the provider's own tools.
"""

import sys

import gymnasium as gym
import numpy as np

import holdall

url = sys.argv[1]
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
env = gym.make("CartPole-v1")
memory = holdall.ReplayMemory(env.observation_space, env.action_space, capacity=100_000, seed=0)

obs, _ = env.reset(seed=0)
for step in range(1, steps + 1):
    action = env.action_space.sample()
    next_obs, reward, terminated, truncated, _ = env.step(action)
    memory.add(
        obs[None],
        np.array([action]),
        np.array([reward], np.float32),
        next_obs[None],
        np.array([terminated]),
        np.array([truncated]),
    )
    obs = env.reset()[0] if terminated or truncated else next_obs
    if step % max(steps // 2, 1) == 0:
        handle = memory.save(url)  # 1: returns at once
handle.result()  # 2: waits until the last one is safe

with holdall.ReplayMemory.load(url) as loaded:  # 3
    same = np.array_equal(loaded.sample(64).ids, memory.sample(64).ids)
    print(f"loaded {len(loaded):,} transitions; the next batch is {'the same' if same else 'DIFFERENT'}")

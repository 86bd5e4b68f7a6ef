# /// script
# dependencies = ["holdall[sb3]", "ale-py", "opencv-python-headless"]
# ///
"""PPO on stacked frames: the rollout is allocated once, each frame is stored once, and nothing is copied to flatten it.

python examples/ppo_stacked_frames.py [STEPS]
"""

import sys

import ale_py
import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from holdall.sb3 import RolloutBuffer  # 1

gym.register_envs(ale_py)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=2, seed=0), n_stack=4)
model = PPO(
    "CnnPolicy",
    env,
    n_steps=min(512, steps // 2),
    batch_size=64,
    n_epochs=2,
    rollout_buffer_class=RolloutBuffer,  # 2
    verbose=1,
)
model.learn(steps)
print(model.rollout_buffer.report())  # 3

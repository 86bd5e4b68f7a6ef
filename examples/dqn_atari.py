# /// script
# dependencies = ["holdall[sb3]", "ale-py", "opencv-python-headless"]
# ///
"""DQN on Atari: a million transitions of four stacked frames in 2 GiB instead of 56 GB.

    python examples/dqn_atari.py [STEPS]

`budget` limits everything that the memory holds. The newest transitions stay raw, older ones are compressed.
"""

import sys

import ale_py
import gymnasium as gym
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from holdall.sb3 import ReplayBuffer  # 1

gym.register_envs(ale_py)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
env = VecFrameStack(make_atari_env("SeaquestNoFrameskip-v4", n_envs=1, seed=0), n_stack=4)
model = DQN(
    "CnnPolicy",
    env,
    buffer_size=1_000_000,
    replay_buffer_class=ReplayBuffer,  # 2
    replay_buffer_kwargs={"budget": "2GiB"},  # 3
    learning_starts=min(50_000, steps // 2),
    verbose=1,
)
model.learn(steps)
print(model.replay_buffer.memory.report())

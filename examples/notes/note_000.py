"""SAC on a camera and a vector, with a replay buffer that did not fit. The code follows the advice of the note.

`holdall lint` reads this file. It has the mistakes of the note, and is not meant to be run.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3 import SAC


class Dog(gym.Env):
    def __init__(self):
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (84, 84, 3), np.uint8),
                "vector": spaces.Box(-np.inf, np.inf, (31,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (8,), np.float32)


# A buffer of 300,000 had just been refused: "12.79GB > 9.21GB". This is the size that was recommended instead.
BUFFER_SIZE = 400_000


def train():
    model = SAC("MultiInputPolicy", Dog(), buffer_size=BUFFER_SIZE)
    model.learn(total_timesteps=1_000_000)


def try_the_other_layout():
    return SAC("MultiInputPolicy", Dog(), buffer_size=BUFFER_SIZE, optimize_memory_usage=True)


def compare_profiles():
    for buffer_size in (200_000, 300_000, 400_000, 500_000):
        model = SAC("MultiInputPolicy", Dog(), buffer_size=buffer_size)
        model.learn(total_timesteps=50_000)
        nbytes = buffer_size * 42_621
        print(f"{buffer_size}: {nbytes / 1024**3:.1f} GB")


if __name__ == "__main__":
    train()

"""PPO on stacked screens of a handheld console. A calculation by hand said that it takes much less than 32 GB.

`holdall lint` reads this file. It has the mistakes of the note, and is not meant to be run.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, EvalCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

NUM_ENVS = 2
EP_LENGTH = 8192
FRAME_STACK_SIZE = 4
BATCH_SIZE = 2048
N_EPOCHS = 10
TOTAL_TIMESTEPS = 10_000_000
SAVE_FREQ = EP_LENGTH * 10
SAVE_REPLAY_BUFFER = True


class Console(gym.Env):
    def __init__(self):
        self.observation_space = spaces.Box(0, 255, (144, 160, 3), np.uint8)
        self.action_space = spaces.Discrete(8)


def make_env():
    return TimeLimit(Console(), max_episode_steps=500)


def main():
    env = SubprocVecEnv([make_env for _ in range(NUM_ENVS)])
    env = VecFrameStack(env, n_stack=FRAME_STACK_SIZE)
    eval_env = VecFrameStack(DummyVecEnv([make_env]), n_stack=FRAME_STACK_SIZE)

    checkpoint_callback = CheckpointCallback(
        save_freq=SAVE_FREQ, save_path="checkpoints", save_replay_buffer=SAVE_REPLAY_BUFFER
    )
    eval_callback = EvalCallback(eval_env, eval_freq=SAVE_FREQ)
    callback_list = CallbackList([checkpoint_callback])

    model = PPO("CnnPolicy", env, n_steps=EP_LENGTH, batch_size=BATCH_SIZE, n_epochs=N_EPOCHS)
    model.learn(total_timesteps=TOTAL_TIMESTEPS, callback=callback_list)


def raise_the_number_of_environments():
    for num_envs in (2, 4, 6):
        env = VecFrameStack(SubprocVecEnv([make_env for _ in range(num_envs)]), n_stack=FRAME_STACK_SIZE)
        PPO("CnnPolicy", env, n_steps=EP_LENGTH, batch_size=BATCH_SIZE, n_epochs=N_EPOCHS)


if __name__ == "__main__":
    main()

"""What a script's environments are, as far as its text says."""

import ast

import pytest

from holdall.tools.lint.run import UNKNOWN, Environments
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script

HEAD = """
import functools
import numpy as np
import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

class Screen(gym.Env):
    def __init__(self, size=84):
        self.observation_space = spaces.Box(0, 255, shape=(84, 84, 3), dtype=np.uint8)
        self.action_space = spaces.Discrete(6)

class Sized(gym.Env):
    def __init__(self, size=84):
        self.observation_space = spaces.Box(0, 255, shape=(size, size, 3), dtype=np.uint8)

def make_env(rank):
    def init():
        env = Screen()
        return Monitor(env)
    return init

def make_plain():
    return Screen()

"""


def environments(expression: str, before: str = "") -> Environments:
    script = Script.parse(HEAD + before + f"\nuse({expression})", "train.py")
    training = TrainingReader(script)
    (call,) = [call for call in script.calls if isinstance(call.func, ast.Name) and call.func.id == "use"]
    return training.environments(call.args[0])


@pytest.mark.parametrize(
    ("expression", "count", "vector", "shape"),
    [
        ("'CartPole-v1'", 1, "single", (4,)),
        ("gym.make('CartPole-v1')", 1, "single", (4,)),
        ("gym.make('CrafterReward-v7')", 1, "single", (64, 64, 3)),  # of another version
        ("Screen()", 1, "single", (84, 84, 3)),
        ("Monitor(Screen())", 1, "single", (84, 84, 3)),
        ("Sized(64)", 1, "single", (64, 64, 3)),
        ("DummyVecEnv([lambda: Screen()])", 1, "dummy", (84, 84, 3)),
        ("DummyVecEnv([Screen] * 3)", 3, "dummy", (84, 84, 3)),
        ("SubprocVecEnv([make_env(i) for i in range(8)])", 8, "subproc", (84, 84, 3)),
        ("SubprocVecEnv([make_plain for i in range(8)])", 8, "subproc", (84, 84, 3)),
        ("VecFrameStack(DummyVecEnv([Screen]), n_stack=4)", 1, "dummy", (84, 84, 12)),
        ("VecFrameStack(DummyVecEnv([Screen]), 4)", 1, "dummy", (84, 84, 12)),
        ("VecFrameStack(DummyVecEnv([Screen]), n_stack=k)", 1, "dummy", None),
        ("VecNormalize(DummyVecEnv([Screen]))", 1, "dummy", (84, 84, 3)),
        ("SomeWrapper(Screen())", 1, "single", None),
        ("make_vec_env('CartPole-v1', n_envs=4)", 4, "dummy", (4,)),
        ("make_vec_env(Screen, 4)", 4, "dummy", (84, 84, 3)),
        ("make_vec_env(lambda: Screen(), 4, vec_env_cls=SubprocVecEnv)", 4, "subproc", (84, 84, 3)),
        ("make_vec_env('ALE/Pong-v5', 4, wrapper_class=AtariWrapper)", 4, "dummy", (84, 84, 1)),
        ("make_vec_env(Screen, 4, wrapper_class=Other)", 4, "dummy", None),
        ("make_vec_env(Screen, 4, vec_env_cls=choose())", 4, "", (84, 84, 3)),
        ("VecFrameStack(make_atari_env('PongNoFrameskip-v4', n_envs=8), n_stack=4)", 8, "dummy", (84, 84, 4)),
        ("make_atari_env('PongNoFrameskip-v4', wrapper_kwargs=dict(screen_size=64))", 1, "dummy", (64, 64, 1)),
        ("make_vec_env('CartPole-v1', n_envs=n)", UNKNOWN, "dummy", (4,)),
        ("make_vec_env('CartPole-v1', **kwargs)", UNKNOWN, "", None),
        ("elsewhere()", UNKNOWN, "", None),
    ],
)
def test_environments_are_read_as_far_as_they_are_certain(
    expression: str, count: object, vector: str, shape: tuple[int, ...] | None
) -> None:
    made = environments(expression)
    assert (made.count, made.vector) == (count, vector)
    assert (made.observation.leaves[0].shape if made.observation else None) == shape


def test_an_environment_that_is_wrapped_step_by_step_is_followed() -> None:
    made = environments("env", "env = make_vec_env(Screen, n_envs=2)\nenv = VecFrameStack(env, n_stack=4)")
    assert made.number == 2
    assert made.stack == 4
    assert made.observation is not None
    assert made.observation.leaves[0].shape == (84, 84, 12)


def test_the_leaves_of_a_dict_have_their_names_and_dtypes() -> None:
    made = environments(
        "Dog()",
        "class Dog(gym.Env):\n"
        "    observation_space = spaces.Dict({'image': spaces.Box(0, 255, (8, 8, 3), np.uint8)}, "
        "vector=spaces.Box(-1, 1, (31,)))\n"
        "    action_space = spaces.Box(-1, 1, (8,), np.float32)",
    )
    assert made.observation is not None
    assert [(leaf.name, leaf.nbytes) for leaf in made.observation.leaves] == [("image", 192), ("vector", 124)]
    assert made.action is not None
    assert made.action.leaves[0].nbytes == 32

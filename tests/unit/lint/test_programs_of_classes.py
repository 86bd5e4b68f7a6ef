"""Programs whose settings and objects go by other ways than arguments: dicts, hooks, delegation; each a small one."""

from pathlib import Path

import pytest

from holdall.tools.lint.engine import FileChecker
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

BUFFER = """
import numpy as np

class ReplayBuffer:
    def __init__(self, capacity):
        self.obs = np.zeros((capacity, 4, 84, 84), dtype=np.uint8)
"""
DQN = """
import os
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

env = VecFrameStack(make_atari_env("PongNoFrameskip-v4"), 4)
"""
STACK = 4 * 84 * 84
SEARCH = ", ".join(f"dict(lr=1e-{i})" for i in range(1, 20))
LIGHTNING = """
import numpy as np
from collections import deque
from pytorch_lightning import LightningModule, Trainer

class Agent(LightningModule):
    def __init__(self, capacity=1_000, start=10):
        super().__init__()
        self.save_hyperparameters()
        self.memory = deque(maxlen=self.hparams.capacity)

    def on_fit_start(self):
        while len(self.memory) < self.hparams.start:
            self.play()

    def play(self):
        self.memory.append((np.zeros((4, 84, 84), np.uint8), 0))

Trainer(max_epochs=3).fit(Agent(capacity=100_000))
"""
DELEGATED = """
import numpy as np
from collections import deque

class Game:
    def frame(self):
        return np.zeros((4, 84, 84), np.uint8)

class Logged:
    def __init__(self, game):
        self.game = game

    def __getattr__(self, name):
        return getattr(self.game, name)

game, memory = Logged(Game()), deque(maxlen=100_000)
while True:
    memory.append((game.frame(), 0))
"""
WINDOW = """
import numpy as np
from collections import deque

class Window:
    def __init__(self):
        self.frames = np.zeros((4, 84, 84), np.uint8)

    def state(self, frame):
        self.frames = self.frames[1:]
        self.frames = np.concatenate([self.frames, frame[np.newaxis]])
        return {"screen": self.frames}

window, memory = Window(), deque(maxlen=100_000)
while True:
    if input():
        state = window.state(np.zeros((84, 84), np.uint8))
        after = window.state(np.zeros((84, 84), np.uint8))
        memory.append((state, 0, after))
"""
GREY = """
import cv2
import numpy as np
from collections import deque

def grey(frame):
    return cv2.resize(np.dot(frame[..., :3], [0.299, 0.587, 0.114]), (84, 84))

memory = deque(maxlen=100_000)
while True:
    memory.append((grey(camera.read()), 0))
"""
CARRIED = """
import numpy as np
from collections import deque

class Brain:
    def __init__(self):
        self.memory = deque(maxlen=100_000)
        self.state = np.zeros((4, 84, 84), np.uint8)

    def perceive(self, frame, action):
        after = np.append(self.state[1:], frame, axis=0)
        self.memory.append((self.state, action, after))
        self.state = after

brain = Brain()
while True:
    brain.perceive(np.zeros((1, 84, 84), np.uint8), 0)
"""
STEPS = """
import gymnasium as gym
import numpy as np
import torch
from collections import deque
from gymnasium.wrappers import AtariPreprocessing

env, memory = AtariPreprocessing(gym.make("PongNoFrameskip-v4")), deque(maxlen=200_000)
state, _ = env.reset()
while True:
    after, reward, done, stopped, _ = env.step(0)
    memory.append({stored})
    state = after
"""
WAITING = """
import gymnasium as gym
import numpy as np
from collections import deque
from gymnasium.wrappers import AtariPreprocessing, FrameStack, LazyFrames

env, memory = FrameStack(AtariPreprocessing(gym.make("PongNoFrameskip-v4")), 4), deque(maxlen=100_000)

def copied(frames):
    if isinstance(frames, LazyFrames):
        frames = np.asarray(frames, dtype=np.uint8).copy()
    return frames

state, _ = env.reset()
while True:
    after, reward, done, stopped, _ = env.step(0)
    memory.append((copied(state), 0, reward, copied(after)))
    state = after
"""
GROWING = """
import gymnasium as gym
import numpy as np
import torch
import torchvision.transforms as T
from collections import deque

class Sequences:
    def __init__(self, env):
        self.env = env

    def reset(self):
        self.play = [self.env.reset()[0] for _ in range(4)]
        return np.stack(self.play[-4:])

    def step(self, action):
        self.play.append(self.env.step(action)[0])
        return np.stack(self.play[-4:])

def grey(frames):
    frames = T.functional.convert_image_dtype(torch.from_numpy(frames), dtype=torch.float)
    return T.Compose([T.Grayscale(1), T.Resize((84, 84))])(frames.permute(0, 3, 1, 2)).squeeze(1)

env, memory = Sequences(gym.make("ALE/Pong-v5")), deque(maxlen=30_000)
state = env.reset()
while True:
    after = env.step(0)
    memory.append((grey(state), 0, grey(after)))
    state = after
"""
MEAN = """
from collections import deque

memory = deque(maxlen=100_000)
while True:
    memory.append((camera.read()[1:176:2, ::2].mean(axis=2).reshape(88, 80, 1), 0))
"""
LISTS = """
class Lists:
    def __init__(self, n):
        self.n, self.at, self.states, self.others = n, 0, [None] * n, [None] * n

    def add(self, state, other):
        self.states[self.at], self.others[self.at] = state, other
        self.at = (self.at + 1) % self.n
"""
ACTORS = """
import numpy as np
import ray
from collections import deque

@ray.remote
class Replay:
    def __init__(self, n):
        self.rows = deque(maxlen=n)

    def add(self, *row):
        self.rows.append(row)

@ray.remote
class Actor:
    def run(self, replay):
        while True:
            replay.add.remote(np.zeros((4, 84, 84), np.uint8), 0)

replay = Replay.remote(100_000)
ray.get([Actor.remote().run.remote(replay) for _ in range(4)])
"""
PICTURES = """
import skimage
import torch
import torch.nn.functional as F
from collections import deque
from skimage import color, exposure, transform

def scaled(picture):
    picture = transform.resize(color.rgb2gray(picture), (100, 100))
    return exposure.rescale_intensity(picture, out_range=(0, 255)) / 255.0

memory = deque(maxlen=100_000)
while True:
    frame = torch.from_numpy(scaled(camera.read())).float().reshape(1, 1, 100, 100)
    memory.append((F.interpolate(frame, size=(84, 84)), 0))
"""
SENSOR = """
import numpy as np
{imported}
from collections import deque

class Car:
    picture = None

    def __init__(self):
        {listen}

    def keep(self, image):
        rows = np.array(image.raw_data).reshape((100, 200, 4))
        self.picture = rows[:, :, :3]

    def step(self):
        return self.picture

car, memory = Car(), deque(maxlen=50_000)
state = car.step()
while True:
    after = car.step()
    memory.append((state, 0, after))
    state = after
"""
BYTES = """
import cv2
import numpy as np
import pygame
from collections import deque

def seen():
    one = np.frombuffer(camera.read(), dtype=np.uint8).reshape((84, 84, 3))
    return one, cv2.resize(pygame.surfarray.array3d(pygame.display.get_surface()), (84, 84))

memory = deque(maxlen=100_000)
while True:
    memory.append((*seen(), 0))
"""
PROGRAMS = {
    "more settings than a reader would list": (
        DQN + f"for one in [{SEARCH}, dict(buffer_size=100_000)]:\n"
        "    DQN('CnnPolicy', env, buffer_size=one.get('buffer_size', 1_000)).learn(1_000_000)\n",
        100_000 * (2 * STACK + 20),
    ),
    "one of two lists of settings": (
        DQN + f"import os\nall_of_them = [{SEARCH}, dict(buffer_size=100_000)]\n"
        "chosen = all_of_them[:3] if os.getenv('QUICK') else all_of_them\nfor one in chosen:\n"
        "    DQN('CnnPolicy', env, buffer_size=one.get('buffer_size', 1_000)).learn(1_000_000)\n",
        100_000 * (2 * STACK + 20),
    ),
    "settings without those that are None": (
        DQN + "given = {'buffer_size': 100_000, 'tau': None}\n"
        "DQN('CnnPolicy', env, **{k: v for k, v in given.items() if v is not None}).learn(1_000_000)\n",
        100_000 * (2 * STACK + 20),
    ),
    "an option that a function reads": (
        DQN + "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--size', type=lambda text: int(float(text)), default='1e5')\n"
        "DQN('CnnPolicy', env, buffer_size=parser.parse_args().size).learn(1_000_000)\n",
        100_000 * (2 * STACK + 20),
    ),
    "settings that a tracker was given": (
        DQN + "import wandb\nrun = wandb.init(config={'size': 100_000, 'steps': 1_000_000})\n"
        "DQN('CnnPolicy', env, buffer_size=wandb.config.size).learn(run.config['steps'])\n",
        100_000 * (2 * STACK + 20),
    ),
    "as many environments as there are cores": (
        DQN.replace('-v4")', '-v4", n_envs=os.cpu_count())')
        + "DQN('CnnPolicy', env, buffer_size=100_000).learn(1_000_000)\n",
        100_000 * (2 * STACK + 20),
    ),
    "many sizes": (
        DQN + "for size in [1_000, 2_000, 3_000, 4_000, 5_000, 6_000, 100_000, 7_000]:\n"
        "    DQN('CnnPolicy', env, buffer_size=size).learn(1_000_000)\n",
        100_000 * (2 * STACK + 20),
    ),
    "attributes from the names of a function": (
        BUFFER + "class Agent:\n    def __init__(self, size=100_000, lr=1e-4):\n"
        "        for key, value in locals().items():\n            if key == 'self':\n                continue\n"
        "            setattr(self, key, value)\n        self.memory = ReplayBuffer(self.size)\nAgent()\n",
        100_000 * STACK,
    ),
    "attributes from keywords": (
        BUFFER + "class Agent:\n    def __init__(self, **kwargs):\n        self.__dict__.update(kwargs)\n"
        "        self.memory = ReplayBuffer(self.size)\nAgent(size=100_000)\n",
        100_000 * STACK,
    ),
    "attributes by vars": (
        BUFFER + "class Agent:\n    def __init__(self, size):\n        vars(self).update(locals())\n"
        "        self.memory = ReplayBuffer(self.size)\nAgent(100_000)\n",
        100_000 * STACK,
    ),
    "a changed copy of a data class": (
        BUFFER + "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    size: int = 1_000\n"
        "ReplayBuffer(dataclasses.replace(Config(), size=100_000).size)\n",
        100_000 * STACK,
    ),
    "a dict with pairs as keys": (
        BUFFER + "sizes = {('pong', 1): 100_000, ('pong', 2): 10}\nReplayBuffer(sizes[('pong', 1)])\n",
        100_000 * STACK,
    ),
    "arrays that a function makes for a buffer": (
        "import numpy as np\n" + "def zeros(n):\n    return np.zeros((n, 4, 84, 84), np.uint8)\n"
        "class ReplayBuffer:\n    def __init__(self, n):\n"
        "        self.obs = zeros(n)\n        self.next_obs = zeros(n)\nReplayBuffer(100_000)\n",
        100_000 * 2 * STACK,
    ),
    "arrays that are made again": (
        "import numpy as np\n" + "class ReplayBuffer:\n    def __init__(self, n):\n        self.n = n\n"
        "        self.reset()\n    def reset(self):\n        self.obs = np.zeros((self.n, 4, 84, 84), np.uint8)\n"
        "memory = ReplayBuffer(100_000)\nmemory.reset()\n",
        100_000 * STACK,
    ),
    "hooks of Lightning": (LIGHTNING, 100_000 * (STACK + 112)),
    "a wrapper that asks what it wraps": (DELEGATED, 100_000 * (STACK + 112)),
    "a window that is cut and filled under a condition": (WINDOW, 100_000 * 2 * (STACK + 112)),
    "a state that an object hands from step to step": (CARRIED, 100_000 * (STACK + 112)),
    "an array that numpy need not copy": (
        STEPS.replace("{stored}", "(np.array(state, copy=False), 0, np.array(after, copy=False))"),
        200_000 * (84 * 84 + 112),
    ),
    "a state that is copied for the next step": (
        STEPS.replace("{stored}", "(state, 0, after)").replace("state = after", "state = after.copy()"),
        200_000 * 2 * (84 * 84 + 112),
    ),
    "an array of objects": (
        STEPS.replace("{stored}", "np.array([state, 0, reward, after], dtype=object)"),
        200_000 * (84 * 84 + 112),
    ),
    "transitions of an episode": (
        STEPS.replace("memory.append({stored})", "played.append((state, 0, after))")
        .replace("state, _ = env", "played = []\nstate, _ = env")
        + "    if done:\n        memory.extend(played)\n        played = []\n",
        200_000 * (84 * 84 + 112),
    ),
    "a tensor of an array's own dtype": (
        STEPS.replace("{stored}", "(torch.ByteTensor(state), 0, torch.ByteTensor(after))"),
        200_000 * (84 * 84 + 112),
    ),
    "frames that wait to be stacked, copied": (WAITING, 100_000 * 2 * (STACK + 112)),
    "the latest frames of a list that grows": (GROWING, 30_000 * 2 * (4 * STACK + 112)),
    "the mean of channels that nobody knows": (MEAN, 100_000 * (88 * 80 * 8 + 112)),
    "lists side by side, filled by number": (
        LISTS + STEPS.replace("memory.append({stored})", "lists.add(state, after.copy())").replace(
            "state, _ = env", "lists = Lists(200_000)\nstate, _ = env"
        ),
        200_000 * 2 * (84 * 84 + 112),
    ),
    "a camera of CARLA": (
        SENSOR.format(imported="import carla", listen="self.camera.listen(lambda image: self.keep(image))"),
        50_000 * (100 * 200 * 4 + 112),  # three channels are a view of four
    ),
    "a camera of ROS": (
        SENSOR.format(imported="import rospy", listen="rospy.Subscriber('/camera', Image, self.keep)"),
        50_000 * (100 * 200 * 4 + 112),  # three channels are a view of four
    ),
    "pictures from bytes and windows": (BYTES, 100_000 * 2 * (84 * 84 * 3 + 112)),
    "actors of Ray": (ACTORS, 100_000 * (STACK + 112)),
    "pictures of skimage and torch": (PICTURES, 100_000 * (4 * 84 * 84 + 112)),
    "all names of a library": (
        DQN.replace("import VecFrameStack", "import *")
        + "DQN('CnnPolicy', env, buffer_size=100_000).learn(1_000_000)\n",
        100_000 * (2 * STACK + 20),
    ),
    "grey pictures of a camera": (GREY, 100_000 * (84 * 84 * 8 + 112)),
}  # fmt: skip


def found_in(folder: Path, source: str) -> list[Finding]:
    (folder / "train.py").write_text(source, encoding="utf-8")
    return FileChecker(RULES, REFERENCE_MACHINE).check(folder / "train.py")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_buffer_of_a_program_is_sized(name: str, tmp_path: Path) -> None:
    source, nbytes = PROGRAMS[name]
    (large,) = (one for one in found_in(tmp_path, source) if one.rule == "M19")
    assert large.numbers["needed_bytes"] == pytest.approx(nbytes, rel=0.01)


def test_settings_that_never_meet_are_not_compared(tmp_path: Path) -> None:
    source = (
        "from stable_baselines3 import PPO\n"
        "for one in [dict(n=64, batch=32), dict(n=1024, batch=512)]:\n"
        "    PPO('MlpPolicy', 'CartPole-v1', n_steps=one['n'], batch_size=one['batch'])\n"
    )
    assert "L05" not in {one.rule for one in found_in(tmp_path, source)}
    wrong = source.replace("one['batch']", "one['n'] - 1").replace("[dict(n=64, batch=32), ", "[")
    assert "L05" in {one.rule for one in found_in(tmp_path, wrong)}


def test_what_happens_once_in_thousands_of_rounds_is_no_mistake(tmp_path: Path) -> None:
    source = "import torch\nfor step in range(10**6):\n    if step % {} == 0:\n        torch.cuda.empty_cache()\n"
    assert found_in(tmp_path, source.format("(50_000 - n)")) == []
    assert [one.rule for one in found_in(tmp_path, source.format(100))] == ["P02"]


def test_the_number_of_environments_is_the_one_by_default(tmp_path: Path) -> None:
    source = (
        "import argparse\nfrom stable_baselines3 import PPO\n"
        "from stable_baselines3.common.callbacks import CheckpointCallback\n"
        "from stable_baselines3.common.env_util import make_vec_env\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--test', action='store_true')\n"
        "env = make_vec_env('CartPole-v1', n_envs=1 if parser.parse_args().test else 8)\n"
        "PPO('MlpPolicy', env).learn(10**7, callback=CheckpointCallback(save_freq=100_000, save_path='models'))\n"
    )
    assert "L02" in {one.rule for one in found_in(tmp_path, source)}

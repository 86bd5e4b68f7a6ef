"""How people write trainings: what lint must follow to size a buffer, each in a program as small as possible."""

from pathlib import Path

import pytest

from holdall.tools.lint.engine import FileChecker
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

FRAMES = """
import gymnasium as gym
import numpy as np
from collections import deque
from gymnasium.wrappers import AtariPreprocessing

class Stack(gym.Wrapper):
    def __init__(self, env, k=4):
        super().__init__(env)
        self.k, self.frames = k, deque(maxlen=k)

    def reset(self):
        ob = self.env.reset()
        for _ in range(self.k):
            self.frames.append(ob)
        return np.array(self.frames)

    def step(self, action):
        ob, reward, done, info = self.env.step(action)
        self.frames.append(ob)
        return np.array(self.frames), reward, done, info

env = Stack(AtariPreprocessing(gym.make("PongNoFrameskip-v4")))
"""
LOOP = """
obs = env.reset()
while True:
    action = env.action_space.sample()
    next_obs, reward, done, info = env.step(action)
    memory.add(obs, action, reward, next_obs, done)
    obs = next_obs
"""
ARRAYS = """
import numpy as np

class ReplayBuffer:
    def __init__(self, capacity):
        self.obs = np.zeros((capacity, 4, 84, 84), dtype=np.uint8)
"""
BESIDE = (
    ARRAYS
    + """
from multiprocessing import Process

class Learner(Process):
    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity

    def run(self):
        memory = ReplayBuffer(self.capacity)
"""
)
FRAME = 84 * 84
PROGRAMS = {
    "an array of objects": (
        FRAMES + "class Memory:\n    def __init__(self, n):\n        self.at, self.rows = 0, np.empty(n, dtype=object)"
        "\n"
        "    def add(self, ob, action, reward, ob_nx, done):\n"
        "        self.rows[self.at] = [ob, action, reward, ob_nx, done]\nmemory = Memory(100_000)\n" + LOOP,
        100_000 * (4 * FRAME + 112),
        {"M19", "P04"},
    ),
    "a dict for every transition": (
        FRAMES + "class Memory:\n    def __init__(self, size):\n        self.rows = [dict() for _ in range(size)]\n"
        "    def add(self, obs, action, reward, next_obs, done):\n        self.rows[0]['obs'] = obs\n"
        "memory = Memory(100_000)\n" + LOOP,
        100_000 * (4 * FRAME + 112),
        {"M19"},
    ),
    "arrays that a program's own class makes of itself": (
        FRAMES + "class Lazy:\n    def __init__(self, frames):\n        self.frames, self.out = frames, None\n"
        "    def __array__(self, dtype=None):\n        self.out = np.stack(self.frames)\n        self.frames = None\n"
        "        return self.out\nmemory = deque(maxlen=100_000)\nob = env.env.reset()\n"
        "memory.append((np.array(Lazy([ob, ob, ob, ob])), 0, 1.0, 0))\n",
        100_000 * (4 * FRAME + 112),
        {"M19"},
    ),
    "settings in a class that extends dict": (
        ARRAYS + "class Config(dict):\n    __getattr__ = dict.get\nconfig = Config({'capacity': 100_000})\n"
        "memory = ReplayBuffer(config.capacity)\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "options that are passed on only if they are given": (
        ARRAYS + "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--capacity', type=int)\n"
        "args = parser.parse_args()\ngiven = {}\nif args.capacity is not None:\n    given['capacity'] = args.capacity\n"
        "def build(capacity=100_000):\n    return ReplayBuffer(capacity)\nmemory = build(**given)\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "a flag of the command line, copied to a name": (
        ARRAYS + "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--train', action='store_true')\ntrain = parser.parse_args().train\n"
        "if train:\n    memory = ReplayBuffer(100_000)\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "one memory for each seed, one after the other": (
        ARRAYS + "for seed in [0, 1, 2, 3, 4]:\n    memory = ReplayBuffer(100_000)\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "a buffer of TorchRL with what is added to it": (
        FRAMES + "import torch\nfrom torchrl.data import ListStorage, ReplayBuffer\n"
        "memory = ReplayBuffer(storage=ListStorage(100_000))\nobs = torch.FloatTensor(env.reset())\n"
        "memory.add((obs, 0, 1.0, torch.FloatTensor(env.reset()), False))\n",
        100_000 * 2 * 16 * FRAME,
        {"M19", "P15"},
    ),
    "a process of the program's own class": (
        "from beside import Learner\nprocesses = [Learner(100_000)]\n[one.start() for one in processes]\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "a function that a process or thread runs": (
        ARRAYS + "import torch.multiprocessing as mp\ndef learn(rank, capacity):\n"
        "    memory = ReplayBuffer(capacity)\nctx = mp.get_context('spawn')\n"
        "learner = ctx.Process(target=learn, args=(0,), kwargs={'capacity': 100_000})\nlearner.start()\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "an array of one dtype or another, as a conditional expression": (
        ("import numpy as np\nclass ReplayBuffer:\n    def __init__(self, size, discrete=False):\n"
        "        self.frames = np.zeros((size, 4, 84, 84), np.uint8)\n"
        "        self.actions = np.zeros((size, 2), np.float32) if not discrete else np.zeros(size, np.int64)\n"
        "memory = ReplayBuffer(100_000)\n"),
        100_000 * (4 * FRAME + 8),
        {"M19"},
    ),
    "an array of one dtype or another, in two branches": (
        ("import sys\nimport numpy as np\nclass ReplayBuffer:\n    def __init__(self, size):\n"
        "        if sys.platform == 'linux':\n            self.frames = np.zeros((size, 84, 84), np.uint8)\n"
        "        else:\n            self.frames = np.zeros((size, 4, 84, 84), np.uint8)\n"
        "memory = ReplayBuffer(100_000)\n"),
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "lists under the keys of a class that extends dict": (
        FRAMES + "class Lazy:\n    def __init__(self, frames):\n        self.frames = frames\n"
        "class LazyStack(Stack):\n    def reset(self):\n        super().reset()\n"
        "        return Lazy(list(self.frames))\n    def step(self, action):\n"
        "        _, reward, done, info = super().step(action)\n"
        "        return Lazy(list(self.frames)), reward, done, info\n"
        "class Memory(dict):\n    def __init__(self, capacity):\n        super().__init__()\n"
        "        self.capacity = int(capacity)\n        self['obs'], self['next_obs'] = [], []\n"
        "    def add(self, obs, action, reward, next_obs, done):\n        self['obs'].append(obs)\n"
        "        self['next_obs'].append(next_obs)\n        while len(self['obs']) > self.capacity:\n"
        "            del self['obs'][0]\n            del self['next_obs'][0]\n"
        "env = LazyStack(AtariPreprocessing(gym.make('PongNoFrameskip-v4')))\nmemory = Memory(1e6)\n" + LOOP,
        1_000_000 * (FRAME + 112),
        {"M19"},
    ),
    "one deque for each field": (
        FRAMES + "class Memory:\n    def __init__(self, size):\n        self.obs = deque(maxlen=size)\n"
        "        self.next_obs = deque(maxlen=size)\n        self.rewards = deque(maxlen=size)\n"
        "    def add(self, obs, action, reward, next_obs, done):\n        self.obs.append(obs)\n"
        "        self.next_obs.append(np.array(next_obs))\n        self.rewards.append(reward)\n"
        "memory = Memory(100_000)\n" + LOOP,
        100_000 * 2 * (4 * FRAME + 112),
        {"M19"},
    ),
    "a wrapper around a wrapper whose frames are shared": (
        FRAMES + "class Lazy:\n    def __init__(self, frames):\n        self.frames = frames\n"
        "class LazyStack(gym.Wrapper):\n    def __init__(self, env):\n        gym.Wrapper.__init__(self, env)\n"
        "        self.frames = deque(maxlen=4)\n"
        "        self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)\n"
        "    def reset(self):\n        ob = self.env.reset()\n        for _ in range(4):\n"
        "            self.frames.append(ob)\n        return Lazy(list(self.frames))\n"
        "    def step(self, action):\n        ob, reward, done, info = self.env.step(action)\n"
        "        self.frames.append(ob)\n        return Lazy(list(self.frames)), reward, done, info\n"
        "class Counter(gym.Wrapper):\n    def __init__(self, env):\n        gym.Wrapper.__init__(self, env)\n"
        "        self.steps = 0\n    def reset(self):\n        return self.env.reset()\n"
        "    def step(self, action):\n        self.steps += 1\n        return self.env.step(action)\n"
        "class Memory:\n    def __init__(self, capacity):\n        self.capacity, self.rows = capacity, []\n"
        "    def add(self, obs, action, reward, next_obs, done):\n        self.rows.append((obs, next_obs))\n"
        "env = Counter(LazyStack(AtariPreprocessing(gym.make('PongNoFrameskip-v4'))))\n"
        "memory = Memory(1_000_000)\n" + LOOP,
        1_000_000 * (FRAME + 112),
        {"M19"},
    ),
    "a function whose command line is made of its annotations": (
        ARRAYS + "import dataclasses\nimport tyro\nclass Trainer:\n    @dataclasses.dataclass\n    class Config:\n"
        "        capacity: int = 100_000\n    def __init__(self, config: Config = Config()):\n"
        "        self.config = dataclasses.asdict(config)\n"
        "        self.memory = ReplayBuffer(self.config['capacity'])\n"
        "def main(trainer: Trainer.Config) -> None:\n    Trainer(trainer)\nif __name__ == '__main__':\n"
        "    tyro.cli(main)\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "frames that are pushed along with numpy.roll": (
        FRAMES + "class Agent:\n    def __init__(self):\n        self.frames = np.zeros((4, 80, 80))\n"
        "        self.memory = deque(maxlen=20_000)\n    def seen(self, frame):\n"
        "        self.frames = np.roll(self.frames, 1, axis=0)\n        self.frames[0, :, :] = frame\n"
        "        return np.expand_dims(self.frames, axis=0)\n    def run(self):\n"
        "        state = self.seen(env.reset())\n        while True:\n"
        "            frame, reward, done, info = env.step(0)\n            after = self.seen(frame)\n"
        "            self.memory.append((state, 0, reward, after, done))\n            state = after\n"
        "Agent().run()\n",
        20_000 * (4 * 80 * 80 * 8 + 112),
        {"M19", "P04", "P15"},
    ),
    "a list whose oldest items are deleted": (
        FRAMES + "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--size', type=int, default=50_000)\nopt = parser.parse_args()\nmemory = []\n"
        "obs = env.reset()\nwhile True:\n    next_obs, reward, done, info = env.step(0)\n"
        "    memory.append([obs, 0, reward, next_obs, done])\n    if len(memory) > opt.size:\n"
        "        del memory[0]\n    obs = next_obs\n",
        50_000 * (4 * FRAME + 112),
        {"M19", "P04"},
    ),
    "a list that grows up to a number, and is then written over": (
        FRAMES + "LIMIT = 50_000\nrows = []\nobs = env.reset()\nwhile True:\n"
        "    next_obs, reward, done, info = env.step(0)\n    if len(rows) < LIMIT:\n        rows.append(None)\n"
        "    rows[0] = (obs, next_obs)\n    obs = next_obs\n",
        50_000 * (4 * FRAME + 112),
        {"M19"},
    ),
    "pictures of unknown size that are made small and grey": (
        ("import cv2\nimport numpy as np\nimport torch\nfrom game import Game\n"
        "def small(image, side):\n    image = cv2.cvtColor(cv2.resize(image, (side, side)), cv2.COLOR_BGR2GRAY)\n"
        "    _, image = cv2.threshold(image, 1, 255, cv2.THRESH_BINARY)\n"
        "    return image[None, :, :].astype(np.float32)\n"
        "game = Game()\nimage = torch.from_numpy(small(game.frame(), 84))\n"
        "state = torch.cat(tuple(image for _ in range(4)))[None, :, :, :]\nmemory = []\nwhile True:\n"
        "    image = torch.from_numpy(small(game.frame(), 84))\n"
        "    after = torch.cat((state[0, 1:, :, :], image))[None, :, :, :]\n"
        "    memory.append([state, 0, 1.0, after, False])\n    if len(memory) > 50_000:\n"
        "        del memory[0]\n    state = after\n"),
        50_000 * (16 * FRAME + 112),
        {"M19", "P04", "P15"},
    ),
    "a memory that a manager shares between processes": (
        ARRAYS + "from multiprocessing.managers import BaseManager\nclass Manager(BaseManager):\n    pass\n"
        "Manager.register('memory', ReplayBuffer)\nmanager = Manager()\nmanager.start()\n"
        "memory = manager.memory(100_000)\n",
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "pictures that Pillow makes small and grey": (
        ("import gymnasium as gym\nimport numpy as np\nfrom collections import deque\nfrom PIL import Image\n"
        "env = gym.make('BreakoutNoFrameskip-v4')\n"
        "def small(frame):\n    picture = Image.fromarray(frame).resize((84, 84)).convert('L')\n"
        "    return np.array(picture).astype('uint8')\nmemory = deque(maxlen=1_000_000)\nwhile True:\n"
        "    frame, reward, done, info = env.step(0)\n    memory.append(small(frame))\n"),
        1_000_000 * (FRAME + 112),
        {"M19"},
    ),
    "observations that a function transforms": (
        FRAMES + "from gym.wrappers import FrameStack, TransformObservation\nimport torch\n"
        "env = AtariPreprocessing(gym.make('PongNoFrameskip-v4'))\n"
        "env = FrameStack(TransformObservation(env, f=lambda x: x / 255.), num_stack=4)\n"
        "memory = deque(maxlen=20_000)\ndef cache(obs, action, reward, next_obs, done):\n"
        "    memory.append((torch.FloatTensor(obs), action, reward, torch.FloatTensor(next_obs), done))\n"
        + LOOP.replace("memory.add", "cache"),
        20_000 * 2 * (4 * 4 * FRAME + 112),
        {"M19", "P04", "P15"},
    ),
    "a module that is imported from one place or another": (
        ("try:\n    from nowhere.else_ import ReplayBuffer\nexcept ImportError:\n    from beside import ReplayBuffer\n"
        "memory = ReplayBuffer(100_000)\n"),
        100_000 * 4 * FRAME,
        {"M19"},
    ),
    "environments of two kinds, one of them without a known space": (
        ("import envpool\nimport gymnasium as gym\nimport numpy as np\n"
        "from tianshou.data import Collector, VectorReplayBuffer\nfrom tianshou.env import ShmemVectorEnv\n"
        "class Doom(gym.Env):\n    def __init__(self):\n"
        "        self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.float32)\n"
        "if envpool is not None:\n    envs = envpool.make_gymnasium('Doom-v1', num_envs=8)\n"
        "else:\n    envs = ShmemVectorEnv([lambda: Doom() for _ in range(8)])\n"
        "buffer = VectorReplayBuffer(400_000, buffer_num=8, ignore_obs_next=True, save_only_last_obs=True)\n"
        "Collector(policy, envs, buffer)\n"),
        400_000 * 4 * FRAME,
        {"M19", "P15"},
    ),
    "Tianshou's own Atari environments": (
        ("from tianshou.data import Collector, CollectStats, VectorReplayBuffer\n"
        "from tianshou.env.atari.atari_wrapper import make_atari_env\n"
        "def main(task='PongNoFrameskip-v4', buffer_size=1_000_000, scale=0):\n"
        "    env, envs, tests = make_atari_env(task, 0, 10, 10, scale=scale, frame_stack=4)\n"
        "    buffer = VectorReplayBuffer(buffer_size, buffer_num=len(envs), ignore_obs_next=True,\n"
        "                                save_only_last_obs=True, stack_num=4)\n"
        "    Collector[CollectStats](algorithm, envs, buffer)\nif __name__ == '__main__':\n    main()\n"),
        1_000_000 * FRAME,
        {"M19"},
    ),
    "a state that is None at the end of an episode": (
        FRAMES + "import torch\nmemory = deque(maxlen=20_000)\ndef seen(state):\n    if state is not None:\n"
        "        return torch.tensor(state / 255.0, dtype=torch.float)\n    return state\nobs = env.reset()\n"
        "while True:\n    after, reward, done, info = env.step(0)\n    if done:\n        after = None\n"
        "    memory.append((seen(obs), 0, reward, seen(after)))\n    obs = after\n",
        20_000 * 2 * (16 * FRAME + 112),
        {"M19", "P04", "P15"},
    ),
    "records of several fields in one array": (
        ("import numpy as np\nkind = np.dtype([('frame', np.uint8, (84, 84)), ('action', np.int32)])\nempty = (0, 0)\n"
        "class ReplayMemory:\n    rows = np.array([empty] * 1_000_000, dtype=kind)\n"),
        1_000_000 * (FRAME + 4),
        {"M19"},
    ),
    "methods that the first versions of gym call": (
        FRAMES + "class Half(gym.Wrapper):\n    def _reset(self):\n        return self.env.reset()[:, ::2]\n"
        "    def _step(self, action):\n        obs, reward, done, info = self.env.step(action)\n"
        "        return obs[:, ::2], reward, done, info\nenv = Half(env)\nmemory = deque(maxlen=200_000)\n"
        + LOOP.replace("memory.add(obs, action, reward, next_obs, done)", "memory.append((obs, next_obs))"),
        200_000 * (4 * FRAME + 112),  # every second column is a view of all of them
        {"M19"},
    ),
    "frames that are joined when somebody looks at them": (
        FRAMES + "class Lazy:\n    def __init__(self, frames):\n        self.frames, self.out = frames, None\n"
        "    def __array__(self, dtype=None):\n        if self.out is None:\n"
        "            self.out, self.frames = np.concatenate(self.frames), None\n        return self.out\n"
        "class LazyStack(Stack):\n    def reset(self):\n        super().reset()\n"
        "        return Lazy(list(self.frames))\n    def step(self, action):\n"
        "        _, reward, done, info = super().step(action)\n"
        "        return Lazy(list(self.frames)), reward, done, info\n"
        "env = LazyStack(AtariPreprocessing(gym.make('PongNoFrameskip-v4')))\nmemory = deque(maxlen=100_000)\n"
        "obs = env.reset()\nwhile True:\n    network(np.array(obs))\n    next_obs, reward, done, info = env.step(0)\n"
        "    memory.append((obs, next_obs))\n    obs = next_obs\n",
        100_000 * (4 * FRAME + 112),
        {"M19"},
    ),
    "steps that wait in a short deque": (
        FRAMES + "waiting, memory = deque(maxlen=3), deque(maxlen=100_000)\nobs = env.reset()\nwhile True:\n"
        "    next_obs, reward, done, info = env.step(0)\n    waiting.append((obs, 0, next_obs.copy()))\n"
        "    state, action, _ = waiting[0]\n    memory.append((state, action, waiting[-1][2], done))\n"
        "    obs = waiting[-1][2]\n",
        100_000 * (4 * FRAME + 112),
        {"M19", "P04"},
    ),
    "a deque that a class limits by itself": (
        FRAMES + "class Memory:\n    def __init__(self, buffer_size):\n        self.buffer_size = buffer_size\n"
        "        self.count, self.rows = 0, deque()\n    def add(self, obs, action, reward, next_obs, done):\n"
        "        if self.count < self.buffer_size:\n            self.count += 1\n        else:\n"
        "            self.rows.popleft()\n"
        "        self.rows.append((obs[:, :, np.newaxis], action, reward, next_obs, done))\n"
        "memory = Memory(100_000)\n" + LOOP,
        100_000 * (4 * FRAME + 112),
        {"M19", "P04"},
    ),
}  # fmt: skip


def checked(folder: Path, **files: str) -> list[Finding]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return FileChecker(RULES, REFERENCE_MACHINE).check(folder / "train.py")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_buffer_of_a_program_is_sized(name: str, tmp_path: Path) -> None:
    source, nbytes, rules = PROGRAMS[name]
    found = checked(tmp_path, train=source, beside=BESIDE)
    assert {one.rule for one in found} == rules
    (large,) = (one for one in found if one.rule == "M19")
    assert large.numbers["needed_bytes"] == pytest.approx(nbytes, rel=0.01)


def test_a_script_that_only_starts_what_other_modules_make_is_followed_into_them(tmp_path: Path) -> None:
    agent = "from memory import ReplayBuffer\nclass Agent:\n    def __init__(self, n):\n        ReplayBuffer(n)\n"
    start = "from agent import Agent\nif __name__ == '__main__':\n    Agent(100_000)\n"
    (found,) = checked(tmp_path, memory=ARRAYS, agent=agent, train=start)
    assert (found.rule, found.place.line) == ("M19", 3)
    assert checked(tmp_path, train="from agent import Agent\n\ndef main():\n    Agent(100_000)\n") == []


def test_a_model_that_is_loaded_has_the_mistakes_of_its_callbacks(tmp_path: Path) -> None:
    source = (
        "import gymnasium as gym\nfrom stable_baselines3 import PPO\n"
        "from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback\n"
        "env = gym.make('CartPole-v1')\nmodel = PPO.load('agent', env=env)\n"
        "save = CheckpointCallback(save_freq=10_000, save_path='models', save_replay_buffer=True)\n"
        "model.learn(100_000, callback=[save, EvalCallback(env)])\n"
    )
    assert {one.rule for one in checked(tmp_path, train=source)} == {"L18", "S02"}


def test_what_python_warns_about_is_no_syntax_error(tmp_path: Path) -> None:
    assert checked(tmp_path, train='path = "logs\\dqn"\n') == []

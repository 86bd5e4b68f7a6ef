"""How values travel to a buffer: through wrappers, files of settings, packages of the repository, other libraries."""

from pathlib import Path

import pytest

from holdall.tools.lint.engine import FileChecker
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

FRAME = 84 * 84
ARRAYS = (
    "import numpy as np\nclass ReplayBuffer:\n    def __init__(self, capacity, shape=(4, 84, 84)):\n"
    "        self.obs = np.zeros((capacity, *shape), dtype=np.uint8)\n"
)
SCREEN = (
    "import gymnasium as gym\nimport numpy as np\nclass Screen(gym.Env):\n    def __init__(self):\n"
    "        self.observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)\n"
    "        self.action_space = gym.spaces.Discrete(4)\n"
)
LOOP = (
    "obs, _ = env.reset()\nwhile True:\n    next_obs, reward, done, truncated, info = env.step(0)\n"
    "    memory.append((obs, 0, reward, next_obs, done))\n    obs = next_obs\n"
)
# Files by their paths, and the bytes of the buffers that train.py makes.
FLOWS: dict[str, tuple[dict[str, str], list[int]]] = {
    "an observation wrapper that does not declare what it returns": (
        {"train.py": "import gymnasium as gym\nimport cv2\nfrom collections import deque\n"
         "class Small(gym.ObservationWrapper):\n    def observation(self, obs):\n"
         "        grey = cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY)\n"
         "        return cv2.resize(grey, (84, 84)) / 255.0\n"
         "env = Small(gym.make('PongNoFrameskip-v4'))\nmemory = deque(maxlen=100_000)\n" + LOOP},
        [100_000 * (FRAME * 8 + 112)],
    ),
    "a wrapper that calls reset and step of what it extends": (
        {"train.py": "import gymnasium as gym\nfrom collections import deque\n"
         "class Half(gym.Wrapper):\n    def reset(self, **kwargs):\n        obs, info = super().reset(**kwargs)\n"
         "        return obs[::2, ::2, 0], info\n    def step(self, action):\n"
         "        obs, reward, done, truncated, info = super().step(action)\n"
         "        return obs[::2, ::2, 0], reward, done, truncated, info\n"
         "env = Half(gym.make('PongNoFrameskip-v4'))\nmemory = deque(maxlen=200_000)\n" + LOOP},
        [200_000 * (210 * 160 * 3 + 112)],  # a view keeps the whole picture
    ),
    "one of many environments, by the number of a loop": (
        {"train.py": "import gymnasium as gym\nfrom collections import deque\nmemory = deque(maxlen=100_000)\n"
         "envs = gym.make_vec('PongNoFrameskip-v4', num_envs=16)\nobs, _ = envs.reset()\nwhile True:\n"
         "    for i in range(16):\n        memory.append((obs[i].copy(), 0))\n"},
        [100_000 * (210 * 160 * 3 + 112)],
    ),
    "a file of settings that is required and not named": (
        {"train.py": ARRAYS + "import argparse\nimport yaml\nparser = argparse.ArgumentParser()\n"
         "parser.add_argument('--config', required=True)\ndef load(path):\n    with open(path) as file:\n"
         "        return yaml.safe_load(file)\nsettings = load(parser.parse_args().config)\n"
         "ReplayBuffer(settings['buffer_size'])\n",
         "configs/pong.yaml": "buffer_size: 100_000\n", "configs/site.yaml": "title: no settings\n"},
        [100_000 * 4 * FRAME],
    ),
    "one of two files of settings": (
        {"train.py": ARRAYS + "import json\nimport sys\nsettings = json.load(open(sys.argv[1]))\n"
         "memory = ReplayBuffer(settings['buffer_size'])\n",
         "conf/one.json": '{"buffer_size": 100000}', "conf/two.json": '{"buffer_size": 200000}'},
        [100_000 * 4 * FRAME],
    ),
    "files of hydra that name others of their group": (
        {"train.py": ARRAYS + "import hydra\n@hydra.main(config_path='conf', config_name='config')\n"
         "def main(cfg):\n    ReplayBuffer(cfg.agent.capacity)\nmain()\n",
         "conf/config.yaml": "defaults:\n  - agent: large\n", "conf/agent/large.yaml": "defaults:\n  - base\n",
         "conf/agent/base.yaml": "capacity: 100_000\n"},
        [100_000 * 4 * FRAME],
    ),
    "a package that is somewhere else in the repository": (
        {"scripts/train.py": "import sys\nsys.path.append('../libraries')\nfrom memories.arrays import ReplayBuffer\n"
         "ReplayBuffer(100_000)\n", "libraries/memories/__init__.py": "", "libraries/memories/arrays.py": ARRAYS},
        [100_000 * 4 * FRAME],
    ),
    "environments that are numbered until there are enough": (
        {"train.py": SCREEN + "from stable_baselines3 import PPO\n"
         "from stable_baselines3.common.vec_env import SubprocVecEnv\nimport random\nseeds = set()\n"
         "while len(seeds) < 32:\n    seeds.add(random.randint(0, 10**9))\n"
         "PPO('CnnPolicy', SubprocVecEnv([lambda: Screen() for _ in seeds]), n_steps=4096)\n"},
        [4096 * 32 * 84 * 84 * 3],
    ),
    "a rollout with masks of actions": (
        {"train.py": SCREEN + "from sb3_contrib import MaskablePPO\n"
         "from stable_baselines3.common.env_util import make_vec_env\n"
         "MaskablePPO('CnnPolicy', make_vec_env(Screen, n_envs=32), n_steps=4096)\n"},
        [4096 * 32 * 84 * 84 * 3],
    ),
    "a class of the program that extends a library's buffer": (
        {"train.py": SCREEN + "from stable_baselines3.common.buffers import ReplayBuffer\n"
         "class Own(ReplayBuffer):\n    def __init__(self, size, env):\n"
         "        super().__init__(size, env.observation_space, env.action_space)\nOwn(100_000, Screen())\n"},
        [100_000 * 2 * 84 * 84 * 3],
    ),
    "a buffer of pfrl": (
        {"train.py": "from pfrl import replay_buffers\nfrom pfrl.wrappers import atari_wrappers\n"
         "env = atari_wrappers.wrap_deepmind(atari_wrappers.make_atari('PongNoFrameskip-v4'))\n"
         "buffer = replay_buffers.ReplayBuffer(10**6)\n"},
        [10**6 * FRAME],
    ),
    "a buffer of cpprb": (
        {"train.py": "import numpy as np\nfrom cpprb import ReplayBuffer\n"
         "ReplayBuffer(10**6, {'obs': {'shape': (84, 84, 4), 'dtype': np.uint8}, 'next_obs': {'shape': (84, 84, 4)},\n"
         "                     'act': {}}, next_of='obs', stack_compress='obs')\n"},
        [10**6 * (FRAME + 4)],
    ),
    "a memory of keras-rl with a processor": (
        {"train.py": "import cv2\nimport gymnasium as gym\nfrom rl.agents.dqn import DQNAgent\n"
         "from rl.core import Processor\nfrom rl.memory import SequentialMemory\nclass Small(Processor):\n"
         "    def process_observation(self, obs):\n"
         "        return cv2.resize(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY), (84, 84))\n"
         "env = gym.make('PongNoFrameskip-v4')\nmemory = SequentialMemory(limit=1_000_000, window_length=4)\n"
         "DQNAgent(model=None, memory=memory, processor=Small())\n"},
        [10**6 * FRAME],
    ),
    "a game of retro": (
        {"train.py": "import retro\nfrom stable_baselines3 import DQN\n"
         "DQN('CnnPolicy', retro.make(game='SonicTheHedgehog-Genesis'), buffer_size=10_000)\n"},
        [10_000 * 2 * 224 * 320 * 3],
    ),
    "a wrapper of another library that is about something else": (
        {"train.py": "import gymnasium as gym\nfrom rl_zoo3.wrappers import FrameSkip\n"
         "from stable_baselines3 import DQN\n"
         "DQN('CnnPolicy', FrameSkip(gym.make('CarRacing-v3', continuous=False)), buffer_size=100_000)\n"},
        [100_000 * 2 * 96 * 96 * 3],
    ),
    "environments of PettingZoo that SuperSuit wraps": (
        {"train.py": "import supersuit as ss\nfrom pettingzoo.atari import pong_v3\nfrom stable_baselines3 import DQN\n"
         "env = ss.frame_stack_v1(ss.resize_v1(ss.color_reduction_v0(pong_v3.parallel_env(), mode='B'), 84, 84), 4)\n"
         "env = ss.concat_vec_envs_v1(ss.pettingzoo_env_to_vec_env_v1(env), 2, base_class='stable_baselines3')\n"
         "DQN('CnnPolicy', env, buffer_size=100_000)\n"},
        [100_000 * 2 * 4 * FRAME],
    ),
    "a package that is only a folder, imported with its module": (
        {"train.py": "import memories.arrays\nmemories.arrays.ReplayBuffer(100_000)\n", "memories/arrays.py": ARRAYS},
        [100_000 * 4 * FRAME],
    ),
    "a library's stack of frames that are not what is declared": (
        {"train.py": "import gymnasium as gym\nimport numpy as np\nfrom collections import deque\n"
         "from gymnasium.wrappers import FrameStackObservation\nclass Scaled(gym.ObservationWrapper):\n"
         "    def observation(self, obs):\n        return obs[:84, :84, 0].astype(np.float32) / 255\n"
         "env = FrameStackObservation(Scaled(gym.make('PongNoFrameskip-v4')), 4)\nmemory = deque(maxlen=20_000)\n"
         + LOOP},
        [20_000 * (4 * FRAME * 4 + 112)],
    ),
    "states that are made twice, for both ends of a step": (
        {"train.py": "import gymnasium as gym\nimport numpy as np\nfrom collections import deque\n"
         "env = gym.make('CarRacing-v3')\nframe, _ = env.reset()\nframes = deque([frame[..., 0]] * 4, maxlen=4)\n"
         "def stacked(frames):\n    return np.stack(frames, axis=0)\nmemory = deque(maxlen=50_000)\nwhile True:\n"
         "    now = stacked(frames)\n    frame, reward, done, truncated, info = env.step(0)\n"
         "    frames.append(frame[..., 0])\n    memory.append((now, 0, reward, stacked(frames), done))\n"},
        [50_000 * 2 * (4 * 96 * 96 + 112)],
    ),
    "a class method that makes what a table names": (
        {"train.py": ARRAYS + "class Memories:\n    known = {'arrays': ReplayBuffer}\n    @classmethod\n"
         "    def create(cls, name, size):\n        return cls.known[name.lower()](size)\n"
         "Memories.create('Arrays', 100_000)\n"},
        [100_000 * 4 * FRAME],
    ),
    "wrappers that are applied one after the other by reduce": (
        {"train.py": "import gymnasium as gym\nfrom functools import reduce\nfrom stable_baselines3 import DQN\n"
         "from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation, ResizeObservation\n"
         "steps = [GrayscaleObservation, lambda env: ResizeObservation(env, (84, 84))]\n"
         "env = reduce(lambda env, wrap: wrap(env), steps, gym.make('CarRacing-v3', continuous=False))\n"
         "DQN('CnnPolicy', FrameStackObservation(env, 4), buffer_size=100_000)\n"},
        [100_000 * 2 * 4 * FRAME],
    ),
    "arrays that map makes": (
        {"train.py": "import numpy as np\nfrom collections import deque\nmemory = deque(maxlen=100_000)\n"
         "frames = [np.zeros((210, 160, 3), np.uint8)] * 4\n"
         "memory.append((np.stack(list(map(lambda one: one[::2, ::2, 0], frames))), 0))\n"},
        [100_000 * (4 * 105 * 80 + 112)],
    ),
    "the largest of the settings that a loop tries": (
        {"train.py": SCREEN + "from stable_baselines3 import DQN\ntried = [{'lr': 0.1, 'batch': 32, 'size': 60_000},\n"
         "    {'lr': 0.2, 'batch': 64, 'size': 90_000}, {'lr': 0.3, 'batch': 128, 'size': 30_000}]\n"
         "for i, one in enumerate(tried):\n    DQN('CnnPolicy', Screen(), one['lr'], batch_size=one['batch'],\n"
         "        buffer_size=one['size'])\n"},
        [90_000 * 2 * 84 * 84 * 3],
    ),
    "a function that takes what older and newer environments return": (
        {"train.py": "import gymnasium as gym\nfrom collections import deque\nmemory = deque(maxlen=100_000)\n"
         "def first(seen):\n    if isinstance(seen, tuple):\n        return seen[0]\n    return seen\n"
         "env = gym.make('PongNoFrameskip-v4')\nobs = first(env.reset())\n"
         "while True:\n    memory.append((first(env.step(0)[0]), 0))\n"},
        [100_000 * (210 * 160 * 3 + 112)],
    ),
    "a file of settings by its path, and variables of the system": (
        {"src/train.py": ARRAYS + "import os\nfrom pathlib import Path\nimport yaml\n"
         "root = Path(__file__).resolve().parents[1]\nsettings = yaml.safe_load(open(root / 'conf' / 'a.yaml'))\n"
         "ReplayBuffer(int(os.getenv('SIZE', settings['size'])))\n", "conf/a.yaml": "size: 100_000\n"},
        [100_000 * 4 * FRAME],
    ),
    "an observation that is an empty array until there is one": (
        {"train.py": "import cv2\nimport gymnasium as gym\nimport numpy as np\nfrom collections import deque\n"
         "class Noop(gym.Wrapper):\n    def reset(self):\n        obs = np.zeros(0)\n"
         "        for _ in range(self.count()):\n"
         "            obs, *rest = self.env.step(0)\n            obs, _ = self.env.reset()\n        return obs, {}\n"
         "class Grey(gym.ObservationWrapper):\n    def observation(self, obs):\n"
         "        return cv2.resize(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY), (84, 84))\n"
         "class Signs(gym.RewardWrapper):\n    def reward(self, reward):\n        return np.sign(reward)\n"
         "env = Signs(Grey(Noop(gym.make('PongNoFrameskip-v4'))))\nmemory = deque(maxlen=400_000)\n"
         "obs, _ = env.reset()\nmemory.append((obs, 0))\n"},
        [400_000 * (FRAME + 112)],
    ),
    "a list of the latest frames, of which each state is a part": (
        {"train.py": "import gymnasium as gym\nenv = gym.make('PongNoFrameskip-v4')\nmemory = []\n"
         "def start():\n    frames = []\n    first, _ = env.reset()\n    for i in range(5):\n"
         "        frames.append(first)\n    return frames\nframes = start()\nstate = frames[1:5]\nwhile True:\n"
         "    frame, reward, done, truncated, info = env.step(0)\n    frames.pop(0)\n    frames.append(frame)\n"
         "    after = frames[1:5]\n    if len(memory) >= 50_000:\n        memory.pop(0)\n"
         "    memory.append([state, 0, reward, after, done])\n    state = after\n"},
        [50_000 * (210 * 160 * 3 + 112)],
    ),
    "options of tensorflow's flags": (
        {"train.py": ARRAYS + "import tensorflow as tf\nflags = tf.app.flags\n"
         "flags.DEFINE_integer('size', 100_000, '')\n"
         "def main(config):\n    ReplayBuffer(config.size)\nmain(flags.FLAGS)\n"},
        [100_000 * 4 * FRAME],
    ),
    "a file of sections": (
        {"train.py": ARRAYS + "import configparser\nconfig = configparser.ConfigParser()\nconfig.read('a.ini')\n"
         "assert config.getint('MEMORY', 'size') == int(config['MEMORY']['size'])\n"
         "ReplayBuffer(config['MEMORY'].getint('size'))\n", "a.ini": "[MEMORY]\nsize = 100000\n"},
        [100_000 * 4 * FRAME],
    ),
    "a class by its name": (
        {"train.py": ARRAYS + "settings = {'memory': 'ReplayBuffer'}\nmade = globals()[settings['memory']](100_000)\n"
         "assert type(made) is eval(settings['memory'])\n"},
        [100_000 * 4 * FRAME],
    ),
    "one of several numbers of environments, with the settings of each": (
        {"train.py": SCREEN + "from stable_baselines3 import DQN\n"
         "from stable_baselines3.common.env_util import make_vec_env\n"
         "for one in [{'envs': 4, 'size': 60_000}, {'envs': 1, 'size': 90_000}]:\n"
         "    DQN('CnnPolicy', make_vec_env(Screen, n_envs=one['envs']), buffer_size=one['size'])\n"},
        [90_000 * 2 * 84 * 84 * 3],
    ),
    "a part of a picture, by torchvision's functions": (
        {"train.py": "import torch\nimport torchvision.transforms.functional as F\nfrom collections import deque\n"
         "from game import screen\nframes, memory = deque(maxlen=4), deque(maxlen=20_000)\nwhile True:\n"
         "    frames.append(F.resized_crop(F.rgb_to_grayscale(F.to_tensor(screen())), 0, 0, 84, 96, [84, 84]))\n"
         "    memory.append((torch.vstack(list(frames)).squeeze(1), 0))\n"},
        [20_000 * (4 * FRAME * 4 + 112)],
    ),
    "environments that a package registers in a loop, by names that it joins": (
        {"train.py": "import gymnasium as gym\nfrom cameras.envs import Near\nfrom stable_baselines3 import SAC\n"
         "SAC('MultiInputPolicy', gym.make('NearDense-v3'), buffer_size=100_000)\n",
         "cameras/__init__.py": "from gymnasium.envs.registration import register\nfor task in ['Near', 'Far']:\n"
         "    for kind in ['sparse', 'dense']:\n        suffix = 'Dense' if kind == 'dense' else ''\n"
         "        register(id=f'{task}{suffix}-v3', entry_point=f'cameras.envs:{task}', kwargs={'side': 40})\n",
         "cameras/envs.py": "import gymnasium as gym\nimport numpy as np\nfrom gymnasium import spaces\n"
         "from simulator import photo, position\nclass Near(gym.Env):\n    def __init__(self, side):\n"
         "        seen = np.concatenate([np.array(photo()).reshape(side, side, 4)[:, :, :3]] * 2)\n"
         "        self.observation_space = spaces.Dict({\n"
         "            'image': spaces.Box(0, 255, seen.shape, np.uint8),\n"
         "            'goal': spaces.Box(-1, 1, np.array(position()).shape)})\n"
         "        self.action_space = spaces.Box(-1, 1, (3,))\nclass Far(Near):\n    pass\n"},
        [100_000 * 2 * 80 * 40 * 3],
    ),
    "lists side by side that a loop cuts": (
        {"train.py": "import gymnasium as gym\nimport numpy as np\nenv = gym.make('PongNoFrameskip-v4')\n"
         "states, after_states, rewards = [], [], []\nmost_memory = 50_000\nobs, _ = env.reset()\n"
         "state = np.array(obs)\nwhile True:\n    obs, reward, done, truncated, info = env.step(0)\n"
         "    after = np.array(obs)\n    states.append(state)\n    after_states.append(after)\n"
         "    rewards.append(reward)\n    state = after\n    if len(rewards) > most_memory:\n"
         "        for history in [rewards, states, after_states]:\n            del history[:1]\n"
         "replay = states\n"},
        [50_000 * (210 * 160 * 3 + 112)],
    ),
    "an environment of highway-env that is told what it sees": (
        {"train.py": "import gymnasium as gym\nimport numpy as np\nfrom collections import deque\n"
         "env = gym.make('highway-v0').unwrapped\nmemory = deque(maxlen=20_000)\nenv.configure({'observation': {\n"
         "    'type': 'GrayscaleObservation', 'observation_shape': (200, 100), 'stack_size': 4}})\nwhile True:\n"
         "    obs, reward, done, truncated, info = env.step(0)\n    memory.append((obs.astype(np.float32), 0))\n"},
        [20_000 * (4 * 200 * 100 * 4 + 112)],
    ),
}  # fmt: skip


def checked(folder: Path, files: dict[str, str]) -> list[Finding]:
    (folder / ".git").mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    train = next(name for name in files if name.endswith("train.py"))
    return FileChecker(RULES, REFERENCE_MACHINE).check(folder / train)


@pytest.mark.parametrize("name", FLOWS)
def test_a_buffer_is_sized_wherever_its_values_come_from(name: str, tmp_path: Path) -> None:
    files, expected = FLOWS[name]
    found = [one.numbers["needed_bytes"] for one in checked(tmp_path, files) if one.rule == "M19"]
    assert found == [pytest.approx(nbytes, rel=0.01) for nbytes in expected]


def test_a_callback_of_the_program_is_the_callback_that_it_extends(tmp_path: Path) -> None:
    text = (
        f"{SCREEN}from stable_baselines3 import PPO\nfrom stable_baselines3.common.callbacks import EvalCallback\n"
        "class Own(EvalCallback):\n    def __init__(self, env, folder):\n"
        "        super().__init__(env, log_path=folder)\n"
        "env = Screen()\nPPO('CnnPolicy', env, n_steps=10_000).learn(100_000, callback=Own(env, 'logs'))\n"
    )
    assert "L18" in {one.rule for one in checked(tmp_path, {"train.py": text})}


def test_a_loss_that_a_function_returns_is_kept_with_its_graph(tmp_path: Path) -> None:
    text = (
        "def train():\n    loss = criterion(model(batch()))\n    loss.backward()\n    return loss{}\n"
        "total = 0.0\nfor step in range(100):\n    total += train()\n"
    )
    (found,) = checked(tmp_path, {"train.py": text.format("")})
    assert (found.rule, found.place.line) == ("P01", 7)
    (tmp_path / "train.py").write_text(text.format(".item()"))
    assert FileChecker(RULES, REFERENCE_MACHINE).check(tmp_path / "train.py") == []


@pytest.mark.parametrize(("shape", "rules"), [("84, 84", {"M19", "P15"}), ("40, 200", {"M19"})])
def test_a_square_of_floats_is_taken_for_a_picture(shape: str, rules: set[str], tmp_path: Path) -> None:
    rows = f"np.zeros((100_000, {shape}), np.float32)"
    text = f"import numpy as np\nclass ReplayBuffer:\n    rows = {rows}\nReplayBuffer()\n"
    assert {one.rule for one in checked(tmp_path, {"train.py": text})} == rules


def test_models_that_a_loop_trains_one_after_the_other_do_not_start_over(tmp_path: Path) -> None:
    text = (
        "from stable_baselines3 import SAC, TD3\nname = 'Pendulum-v1'\n"
        "models = [SAC('MlpPolicy', name), TD3('MlpPolicy', name)]\n"
        "for model, title in zip(models, ['sac', 'td3']):\n    model.learn(200_000)\n"
    )
    assert {one.rule for one in checked(tmp_path, {"train.py": text})} == {"M09"}


def test_names_that_a_star_brings_are_known(tmp_path: Path) -> None:
    text = "from parts import *\nfor episode in range(10):\n    play(episode)\n    torch.cuda.empty_cache()\n"
    assert [one.rule for one in checked(tmp_path, {"train.py": text})] == ["P02"]


def test_a_loss_that_a_function_of_another_module_returns_is_kept_with_its_graph(tmp_path: Path) -> None:
    step = "def train():\n    loss = criterion(model(batch()))\n    loss.backward()\n    return loss\n"
    text = (
        "from step import train\nreplay_losses = []\nwhile True:\n    loss = train()\n    replay_losses.append(loss)\n"
    )
    assert [one.rule for one in checked(tmp_path, {"train.py": text, "step.py": step})] == ["P01"]


@pytest.mark.parametrize(("handles", "rules"), [("", ["M16"]), (", handle_timeout_termination=False", [])])
def test_a_buffer_that_is_refused_is_found_without_a_model(handles: str, rules: list[str], tmp_path: Path) -> None:
    text = (
        f"{SCREEN}from stable_baselines3.common.buffers import ReplayBuffer\nenv = Screen()\n"
        f"ReplayBuffer(100, env.observation_space, env.action_space, 'cpu', 1, optimize_memory_usage=True{handles})\n"
    )
    found = checked(tmp_path, {"train.py": text})
    assert [one.rule for one in found] == rules
    assert all("the buffer is not even constructed" in one.message for one in found)


def test_the_number_of_environments_that_a_condition_sets_is_not_taken_for_granted(tmp_path: Path) -> None:
    text = (
        f"{SCREEN}from gpus import name\nfrom stable_baselines3 import SAC\n"
        "from stable_baselines3.common.vec_env import SubprocVecEnv\ncount = 24 if 'large' in name() else 4\n"
        "SAC('MlpPolicy', SubprocVecEnv([Screen for _ in range(count)]), buffer_size=1_000).learn(100_000)\n"
    )
    assert "L19" not in {one.rule for one in checked(tmp_path, {"train.py": text})}


def test_a_list_for_returns_over_several_steps_is_no_replay_buffer(tmp_path: Path) -> None:
    text = "multi_step_transitions = []\nwhile True:\n    multi_step_transitions.append((state, 0, 1.0, next_state))\n"
    assert checked(tmp_path, {"train.py": text}) == []


def test_a_list_that_a_function_makes_anew_is_no_replay_buffer(tmp_path: Path) -> None:
    text = (
        "def rollout():\n    transitions = []\n    for i in range(5):\n"
        "        transitions.append((state, 0, 1.0, next_state))\n    return transitions\nwhile True:\n    rollout()\n"
    )
    assert checked(tmp_path, {"train.py": text}) == []


def test_a_size_of_which_a_part_is_not_known_is_not_told(tmp_path: Path) -> None:
    text = (
        "import numpy as np\nfrom collections import deque\nfrom game import play\nmemory = deque(maxlen=10_000)\n"
        "while True:\n    state, next_state = play()\n"
        "    memory.append((np.array(state), np.zeros(1), 1.0, np.array(next_state)))\n"
    )
    (found,) = checked(tmp_path, {"train.py": text})
    assert found.rule == "P04"
    assert "once it is full" not in found.message


@pytest.mark.parametrize("older", [
    "print 'a', capacity", "print >>log, 'a %d' % (\n    1)", "try:\n    pass\nexcept ValueError, error:\n    pass",
    "start(async=True)", "if True: print 'a'", "mode = 0755", "for i in xrange(2):\n\tprint i\n        print i",
])  # fmt: skip
def test_what_only_older_versions_of_python_accept_is_read(older: str, tmp_path: Path) -> None:
    found = checked(tmp_path, {"train.py": f"{ARRAYS}{older}\nReplayBuffer(100_000)\n"})
    assert [one.rule for one in found] == ["M19"]


def test_what_no_version_of_python_accepts_costs_one_line(tmp_path: Path) -> None:
    (found,) = checked(tmp_path, {"train.py": "print 'a'\nclass class:\n    pass\n"})
    assert (found.rule, found.place.line) == ("F01", 1)

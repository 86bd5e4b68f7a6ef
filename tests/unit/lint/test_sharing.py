"""Which arrays two transitions share, and what a reader takes for granted where a value cannot be followed."""

from pathlib import Path

import pytest

from holdall.tools.lint.engine import FileChecker
from holdall.tools.lint.finding import Finding
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

SCREEN, FRAME, ROWS = 210 * 160 * 3, 84 * 84, 100_000
IMPORTS = (
    "import copy\nimport cv2\nimport gymnasium as gym\nimport numpy as np\nimport torch\n"
    "from collections import deque\n"
)
PREPARE = "def prepare(obs):\n    return cv2.resize(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY), (84, 84))\n"
ATARI = f"{IMPORTS}{PREPARE}env = gym.make('PongNoFrameskip-v4')\nmemory = deque(maxlen={ROWS})\n"
LOOP = """
obs, _ = env.reset()
state = {first}
while True:
    obs, reward, done, truncated, info = env.step(0)
    next_state = {first}
    memory.append(({stored}, 0, reward, {stored_next}, done))
    {last}
"""
HANDED = "state = next_state"
# What a state is made of, how it is stored, what ends the round: and the bytes of a transition, each array once.
STEPS = {
    ("obs", "{}", HANDED): SCREEN,
    ("obs", "torch.from_numpy({})", HANDED): SCREEN,
    ("obs", "torch.tensor({})", HANDED): 2 * SCREEN,
    ("obs", "np.array({})", HANDED): 2 * SCREEN,
    ("obs", "np.asarray({})", HANDED): SCREEN,
    ("obs", "{}[None]", HANDED): SCREEN,
    ("obs", "copy.deepcopy({})", HANDED): 2 * SCREEN,
    ("obs", "{} / 255.0", HANDED): 2 * SCREEN * 8,
    ("obs", "{}.tobytes()", HANDED): 2 * SCREEN,
    ("obs", "prepare({})", HANDED): 2 * FRAME,
    ("obs", "{}", "state = next_state.copy()"): 2 * SCREEN,
    ("obs", "{}", "state = copy.deepcopy(next_state)"): 2 * SCREEN,
    ("obs", "{}", "state = next_state if not done else env.reset()[0]"): SCREEN,
    ("obs.astype(np.float32)", "{}", HANDED): SCREEN * 4,
    ("torch.FloatTensor(obs)", "{}.unsqueeze(0).cpu()", HANDED): SCREEN * 4,
    ("torch.from_numpy(obs).float()", "{}.detach()", HANDED): SCREEN * 4,
    ("obs[:, :, :2]", "{}", HANDED): SCREEN,
    ("obs[:, :, :2].copy()", "{}", HANDED): 210 * 160 * 2,
}
AGENT = """
class Agent:
    def __init__(self):
        self.memory = deque(maxlen=100_000)
        self.reset()
    def reset(self):
        self.state = np.stack([prepare(env.reset()[0])] * 4)
    def play(self):
        obs, reward, done, truncated, info = env.step(0)
        after = np.concatenate((self.state[1:], prepare(obs)[None]))
        self.memory.append((self.state, 0, reward, after, done))
        self.state = after
        if done:
            self.reset()
agent = Agent()
while True:
    agent.play()
"""
GRAPH = """
import tensorflow.compat.v1 as tf
class Processor:
    def __init__(self):
        self.screen = tf.placeholder(shape=[210, 160, 3], dtype=tf.uint8)
        grey = tf.image.crop_to_bounding_box(tf.image.rgb_to_grayscale(self.screen), 34, 0, 160, 160)
        small = tf.image.resize_images(grey, [84, 84], method=tf.image.ResizeMethod.NEAREST_NEIGHBOR)
        self.output = tf.squeeze(small)
    def process(self, session, obs):
        return session.run(self.output, {self.screen: obs})
processor, replay = Processor(), []
with tf.Session() as session:
    state = np.stack([processor.process(session, env.reset())] * 4, axis=2)
    while True:
        obs, reward, done, info = env.step(0)
        after = np.append(state[:, :, 1:], processor.process(session, obs)[:, :, None], axis=2)
        if len(replay) == 100_000:
            replay.pop(0)
        replay.append((state, 0, reward, after, done))
        state = after
"""
QUEUES = """
class Queue:
    def __init__(self, size):
        self.size, self.rows = size, []
    def append(self, row):
        if len(self.rows) < self.size:
            self.rows.append(row)
        else:
            self.rows[0] = row
    def __iadd__(self, rows):
        for row in rows:
            self.append(row)
        return self
frames = Queue(100_000)
while True:
    obs, reward, done, truncated, info = env.step(0)
    frames += [obs]
"""
DOOM = """
import vizdoom
game = vizdoom.DoomGame()
game.set_screen_format(vizdoom.ScreenFormat.GRAY8)
game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
while True:
    state = game.get_state().screen_buffer
    game.make_action([0])
    memory.append((state, game.get_state().screen_buffer))
"""
PROGRAMS = {
    "an agent that keeps its state": (ATARI + AGENT, [ROWS * 4 * FRAME]),
    "a graph of TensorFlow": (ATARI + GRAPH, [ROWS * 4 * FRAME]),
    "an operator that a class defines": (ATARI + QUEUES, [ROWS * SCREEN]),
    "a game of ViZDoom": (ATARI + DOOM, [ROWS * 2 * 160 * 120]),
    "frames that a loop joins": (
        ATARI + "def joined(frames):\n    for i, frame in enumerate(frames):\n        one = prepare(frame)[None]\n"
        "        state = one if i == 0 else np.concatenate((state, one))\n    return state\nwhile True:\n"
        "    obs, reward, done, truncated, info = env.step(0)\n    memory.append((joined([obs] * 4), 0))\n",
        [ROWS * 4 * FRAME],
    ),
    "frames until they suffice": (
        ATARI + "while True:\n    obs, _ = env.reset()\n    state = torch.tensor(prepare(obs))[None]\n"
        "    while state.shape[0] < 4:\n        state = torch.cat([state, torch.tensor(prepare(obs))[None]])\n"
        "    memory.append((state, 0))\n",
        [ROWS * 4 * FRAME],
    ),
    "a state that a function hands back": (
        ATARI + "def play(state):\n    obs, reward, done, truncated, info = env.step(0)\n"
        "    after = np.concatenate((state[1:], prepare(obs)[None]))\n    memory.append((state, 0, reward, after))\n"
        "    return after\nstate = np.stack([prepare(env.reset()[0])] * 4)\nwhile True:\n    state = play(state)\n",
        [ROWS * 4 * FRAME],
    ),
    "steps that wait in a list": (
        ATARI + "waiting = []\nstate = prepare(env.reset()[0])\nwhile True:\n"
        "    after = prepare(env.step(0)[0])\n    waiting.append((state, after))\n    if len(waiting) >= 3:\n"
        "        memory.append((waiting[0][0], 0, 1.0, waiting[-1][1]))\n        waiting.pop(0)\n    state = after\n",
        [],  # 0.7 GB: the last of one is the first of another
    ),
    "two buffers that one line adds to": (
        ATARI + "left, right = deque(maxlen=100_000), deque(maxlen=100_000)\nfor agent in env.agents():\n"
        "    obs, reward, done, truncated, info = env.step(0)\n    held = left if agent == 'left' else right\n"
        "    held.append((obs, 0))\n",
        [ROWS * SCREEN] * 2,
    ),
    "an entry whose key is not known": (
        ATARI + "last = {'left': None, 'right': None}\nfor agent in env.agents():\n"
        "    obs, reward, done, truncated, info = env.step(0)\n    state = prepare(obs) / 255.0\n"
        "    if last[agent] is not None:\n        memory.append((last[agent], 0, reward, state))\n"
        "    last[agent] = state\n",
        [ROWS * FRAME * 8],
    ),
    "arrays of a comprehension, and a named tuple": (
        ATARI + "from typing import NamedTuple\nclass Size(NamedTuple):\n    rows: int\n    shape: tuple\n"
        "class Replay:\n    def __init__(self, size):\n        rows, shape = size\n"
        "        self.obs, self.after = (np.zeros((rows, *shape), np.uint8) for _ in range(2))\n"
        "replay = Replay(Size(100_000, (4, 84, 84)))\n",
        [ROWS * 8 * FRAME],
    ),
    "a copy of what is allocated": (
        ATARI + "class Replay:\n    def __init__(self):\n        self.obs = np.zeros((100_000, 4, 84, 84), np.uint8)\n"
        "        self.after = np.array(self.obs)\nreplay = Replay()\n",
        [ROWS * 8 * FRAME],
    ),
    "wrappers that a loop puts around each other": (
        ATARI + "from gymnasium.wrappers import GrayscaleObservation, ResizeObservation, FrameStackObservation\n"
        "for wrapper, more in ((GrayscaleObservation, {}), (ResizeObservation, {'shape': (84, 84)}),\n"
        "                      (FrameStackObservation, {'stack_size': 4})):\n    env = wrapper(env, **more)\n"
        + LOOP.format(first="obs", stored="state", stored_next="next_state", last=HANDED),
        [ROWS * 4 * FRAME],
    ),
    "objects that a loop asks one after the other": (
        ATARI + "class Small:\n    def process(self, x):\n        return prepare(x)\nclass Stacked:\n"
        "    def __init__(self):\n        self.frames = deque(maxlen=4)\n    def process(self, x):\n"
        "        self.frames.append(x)\n        return np.stack(self.frames)\nsteps = [Small(), Stacked()]\n"
        "def processed(x):\n    for step in steps:\n        x = step.process(x)\n    return x\nwhile True:\n"
        "    obs, reward, done, truncated, info = env.step(0)\n    memory.append((processed(obs), 0))\n",
        [ROWS * 4 * FRAME],
    ),
    "all rows of an array, as a tuple": (
        ATARI + "while True:\n    obs, reward, done, truncated, info = env.step(0)\n"
        "    state = np.stack([prepare(obs)] * 4)\n    memory.append(tuple(map(tuple, (state, [0]))))\n",
        [ROWS * 4 * FRAME],
    ),
    "a class that is a deque": (
        ATARI + "class Replay(deque):\n    def __init__(self, rows):\n        super().__init__(maxlen=rows)\n"
        "    def push(self, *row):\n        self.append(row)\nreplay = Replay(100_000)\nwhile True:\n"
        "    obs, reward, done, truncated, info = env.step(0)\n    replay.push(obs, 0, reward)\n",
        [ROWS * SCREEN],
    ),
    "settings by a member of an enumeration": (
        ATARI + "from enum import Enum\nclass Size(Enum):\n    SMALL = 'small'\n    LARGE = 'large'\n"
        "ROWS = {Size.SMALL: 100, Size.LARGE: 100_000}\ndef train(size=Size.LARGE):\n"
        "    replay = deque(maxlen=ROWS[size])\n    while True:\n        replay.append((env.step(0)[0], 0))\ntrain()\n",
        [ROWS * SCREEN],
    ),
    "a module that nobody imported": (
        "class Replay:\n    def __init__(self):\n        self.obs = np.zeros((100_000, 4, 7056), np.uint8)\nReplay()\n",
        [ROWS * 4 * FRAME],
    ),
    "a wrapper of vectors that passes its space on": (
        IMPORTS + "from stable_baselines3 import DQN\n"
        "from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper\nclass Coded(VecEnvWrapper):\n"
        "    def __init__(self, venv):\n"
        "        super().__init__(venv, observation_space=gym.spaces.Box(-1, 1, (2048,), np.float32))\n"
        "env = Coded(DummyVecEnv([lambda: gym.make('PongNoFrameskip-v4')]))\n"
        "DQN('MlpPolicy', env, buffer_size=100_000).learn(1_000_000)\n",
        [ROWS * (2 * 2048 * 4 + 20)],
    ),
    "what a wrapper declares and nobody can follow": (
        ATARI + "from elsewhere import drawn\nclass Drawn(gym.Wrapper):\n    def __init__(self, env):\n"
        "        super().__init__(env)\n"
        "        self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)\n"
        "    def reset(self):\n        return drawn(self.env.reset()), {}\n    def step(self, action):\n"
        "        return drawn(self.env.step(action)), 1.0, False, False, {}\nenv = Drawn(env)\n"
        + LOOP.format(first="obs", stored="state", stored_next="next_state", last=HANDED),
        [ROWS * 4 * FRAME],
    ),
    "settings that a loop tries, by what they say": (
        IMPORTS + "from stable_baselines3 import DQN\n"
        "from stable_baselines3.common.atari_wrappers import AtariWrapper\n"
        "TRIALS = [{'name': 'a', 'policy': 'CnnPolicy'}, {'name': 'b', 'policy': 'CnnPolicy'},\n"
        "          {'name': 'c', 'policy': 'MlpPolicy'}]\ndef make(policy):\n    env = gym.make('PongNoFrameskip-v4')\n"
        "    return AtariWrapper(env) if policy == 'CnnPolicy' else env\nfor trial in TRIALS:\n"
        "    DQN(trial['policy'], make(trial['policy']), buffer_size=100_000).learn(1_000_000)\n",
        [ROWS * (2 * FRAME + 20), ROWS * (2 * SCREEN + 20)],
    ),
    "a buffer of TF-Agents": (
        IMPORTS + "from tf_agents.environments import suite_atari, tf_py_environment\n"
        "from tf_agents.environments.atari_preprocessing import AtariPreprocessing\n"
        "from tf_agents.environments.atari_wrappers import FrameStack4\n"
        "from tf_agents.replay_buffers import tf_uniform_replay_buffer\nenv = tf_py_environment.TFPyEnvironment(\n"
        "    suite_atari.load('BreakoutNoFrameskip-v4', gym_env_wrappers=[AtariPreprocessing, FrameStack4]))\n"
        "replay = tf_uniform_replay_buffer.TFUniformReplayBuffer(\n"
        "    data_spec=agent.collect_data_spec, batch_size=env.batch_size, max_length=100_000)\n",
        [ROWS * 4 * FRAME],
    ),
    "what MiniGrid draws": (
        IMPORTS + "from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper\n"
        "from stable_baselines3 import DQN\nenv = RGBImgPartialObsWrapper(gym.make('MiniGrid-Empty-8x8-v0'))\n"
        "DQN('CnnPolicy', ImgObsWrapper(env), buffer_size=100_000).learn(1_000_000)\n",
        [ROWS * (2 * 56 * 56 * 3 + 20)],
    ),
    "a camera whose package is not there": (
        IMPORTS + "from stable_baselines3 import SAC\n"
        "SAC('CnnPolicy', gym.make('donkey-warehouse-v0'), buffer_size=100_000).learn(1_000_000)\n",
        [ROWS * (2 * 120 * 160 * 3 + 16)],
    ),
    "a part of a picture that nobody knows": (
        IMPORTS + "from screens import grab\nmemory = deque(maxlen=100_000)\nwhile True:\n"
        "    memory.append((cv2.resize(grab()[:, :, :3], (84, 84)), 0))\n",
        [ROWS * FRAME * 3],
    ),
}  # fmt: skip


def checked(folder: Path, text: str) -> list[Finding]:
    (folder / "train.py").write_text(text, encoding="utf-8")
    return FileChecker(RULES, REFERENCE_MACHINE).check(folder / "train.py")


def sizes(folder: Path, text: str) -> list[int]:
    return [int(one.numbers["needed_bytes"]) for one in checked(folder, text) if one.rule == "M19"]


@pytest.mark.parametrize("step", STEPS, ids=" ; ".join)
def test_an_array_that_two_transitions_share_counts_once(step: tuple[str, str, str], tmp_path: Path) -> None:
    first, stored, last = step
    loop = LOOP.format(first=first, stored=stored.format("state"), stored_next=stored.format("next_state"), last=last)
    assert sizes(tmp_path, ATARI + loop) == [pytest.approx(ROWS * STEPS[step], rel=0.02)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_buffer_of_a_program_is_what_a_reader_finds(name: str, tmp_path: Path) -> None:
    text, expected = PROGRAMS[name]
    assert sorted(sizes(tmp_path, text)) == [pytest.approx(size, rel=0.02) for size in expected]


def test_an_object_is_pickled_with_the_buffer_that_it_has(tmp_path: Path) -> None:
    text = ATARI + AGENT.replace(
        "while True:", "import pickle\npickle.dump(agent, open('agent.pkl', 'wb'))\nwhile True:"
    )
    assert "S03" in {one.rule for one in checked(tmp_path, text)}


def test_a_lambda_may_have_named_parameters(tmp_path: Path) -> None:
    assert (
        checked(tmp_path, "import numpy as np\nmake = lambda *, rows, kind=int: np.zeros(rows)\nmake(rows=3)\n") == []
    )

"""Positions of the arguments that rules look for in calls of Python, Gymnasium, Stable-Baselines3, LeRobot and holdall.

A test compares this table with the signatures of the installed libraries.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from holdall.tools.lint.source import get_argument
from holdall.tools.plan.algorithms import ALGORITHM_CLASSES


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a call may pass by name or by position."""

    name: str
    index: int
    """Position in the call, without `self`."""
    functions: tuple[str, ...]
    """Full names of the functions and classes that have the argument at this position."""

    def find(self, call: ast.Call) -> ast.expr | None:
        """Return the argument of a call of one of the functions, or None if the call does not pass it."""
        return get_argument(call, self.name, self.index)


_MODELS = tuple(f"{algorithm.package}.{algorithm.name}" for algorithm in ALGORITHM_CLASSES.values())
_VEC_ENV = "stable_baselines3.common.vec_env"
_CALLBACKS = "stable_baselines3.common.callbacks"
VEC_WRAPPERS = (
    "VecNormalize",
    "VecFrameStack",
    "VecMonitor",
    "VecTransposeImage",
    "VecCheckNan",
    "VecVideoRecorder",
)
"""Wrappers of Stable-Baselines3 for vector environments."""

MODEL_ENV = Argument("env", 1, (*_MODELS, *(f"{model}.load" for model in _MODELS)))
RESET_NUM_TIMESTEPS = Argument("reset_num_timesteps", 4, tuple(f"{model}.learn" for model in _MODELS))
WRAPPED_VEC_ENV = Argument("venv", 0, tuple(f"{_VEC_ENV}.{wrapper}" for wrapper in VEC_WRAPPERS))
ENV_FUNCTIONS = Argument("env_fns", 0, (f"{_VEC_ENV}.DummyVecEnv", f"{_VEC_ENV}.SubprocVecEnv"))
START_METHOD = Argument("start_method", 1, (f"{_VEC_ENV}.SubprocVecEnv",))
N_ENVS = Argument(
    "n_envs", 1, ("stable_baselines3.common.env_util.make_vec_env", "stable_baselines3.common.env_util.make_atari_env")
)
# MaskableEvalCallback of sb3-contrib passes all its arguments to EvalCallback.
EVAL_ENV = Argument("eval_env", 0, (f"{_CALLBACKS}.EvalCallback",))
EVAL_FREQ = Argument("eval_freq", 4, (f"{_CALLBACKS}.EvalCallback",))
SAVE_FREQ = Argument("save_freq", 0, (f"{_CALLBACKS}.CheckpointCallback",))
WRAPPED_ENV = Argument("env", 0, ("gymnasium.wrappers.vector.RecordEpisodeStatistics",))
OPTIMIZE_MEMORY = Argument("optimize_memory", 6, ("lerobot.rl.buffer.ReplayBuffer",))
OPTIMIZE_MEMORY_OF_DATASET = Argument("optimize_memory", 7, ("lerobot.rl.buffer.ReplayBuffer.from_lerobot_dataset",))
VALID = Argument("valid", 7, ("holdall.ReplayMemory.add",))
PICKLE_PROTOCOL = Argument("protocol", 2, ("pickle.dump",))
MAX_LENGTH = Argument("maxlen", 1, ("collections.deque",))

"""Whatever a file says, lint answers with findings."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdall.tools.lint.engine import as_json, as_sarif, check_text
from holdall.tools.lint.finding import apply_edits
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES
from holdall.tools.plan.spec import ALGORITHM_CLASSES

NAMES = [
    "action", "batch_size", "buffer_class", "buffer_size", "capacity", "device", "frame_stack", "gradient_steps",
    "handle_timeout_termination", "learning_starts", "n_envs", "n_steps", "n_timesteps", "normalize_advantage",
    "num_envs", "obs", "optimize_memory_usage", "policy", "replay_buffer_class", "replay_buffer_kwargs",
    "target_update_interval", "total_timesteps", "train_freq", "vec_env",
]  # fmt: skip
SCALARS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([0, 1, 2**31, 10**30, -(10**12)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.booleans(),
    st.none(),
    st.sampled_from(["MlpPolicy", "MultiInputPolicy", "84x84x4:uint8", "cuda", "subproc", "episode", "dict(a=1)", ""]),
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text("ab", max_size=2), SCALARS, max_size=2)
)
ENTRIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12)
MACHINES = st.builds(
    lambda limit, cores, disk: replace(REFERENCE_MACHINE, limit_bytes=limit, cores=cores, disk_bytes=disk),
    st.integers(1, 2**40),
    st.integers(1, 64),
    st.integers(0, 2**40),
)


@given(st.sampled_from(sorted(ALGORITHM_CLASSES)), ENTRIES, MACHINES)
def test_any_hyperparameters_are_answered(algorithm: str, entry: dict[str, object], machine: object) -> None:
    text = json.dumps({"algo": algorithm, "policy": "MlpPolicy"} | entry)
    found = check_text(text, "any.yml", RULES, machine)  # type: ignore[arg-type]  # a Machine
    json.dumps([as_json(found, 1), as_sarif(found, RULES, "0")])
    corrected, _ = apply_edits(text, found)
    json.loads(corrected)


@given(st.sampled_from(["PPO", "SAC", "DQN", "A2C", "TD3"]), ENTRIES, st.integers(-2, 9), VALUES, MACHINES)
def test_any_arguments_in_a_script_are_answered(
    algorithm: str, entry: dict[str, object], count: int, steps: object, machine: object
) -> None:
    arguments = "".join(f", {name}={value!r}" for name, value in entry.items() if name != "policy")
    text = f"""
import numpy as np
from gymnasium import spaces, Env
from stable_baselines3 import {algorithm}
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack
nan = inf = 0.5
class Screen(Env):
    observation_space = spaces.Box(0, 255, (8, 8, {count}), np.uint8)
    action_space = spaces.Discrete(2)
env = VecFrameStack(SubprocVecEnv([Screen for _ in range({count})]), n_stack={count})
model = {algorithm}("CnnPolicy", env{arguments})
model.learn({steps!r}, callback=CheckpointCallback({steps!r}, "x", save_replay_buffer=True))
"""
    found = check_text(text, "train.py", RULES, machine)  # type: ignore[arg-type]  # a Machine
    assert "F01" not in {finding.rule for finding in found}
    compile(apply_edits(text, found)[0], "train.py", "exec")

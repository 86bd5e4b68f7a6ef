"""The numbers of each rule, worked out here once more by hand, and what happens exactly at a limit."""

from dataclasses import replace

import pytest

from holdall.tools.lint.engine import check_text
from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.rule import REFERENCE_MACHINE, SETUPS
from holdall.tools.lint.rules import RULES

GIB = 2**30

STEP = (
    2 * (84 * 84 * 3 + 31 * 4) + 8 * 4 + 3 * 4
)  # bytes of a transition of the camera: reward, done and timeout as float32
FRAME = 144 * 160 * 3  # bytes of a screen
ROLL = 4 * FRAME + 8 + 6 * 4  # bytes of a rollout's step: four screens, an int64 action, six float32

NUMBERS: dict[str, dict[str, int | float | str]] = {
    "L01": {"callback": "EvalCallback"},
    "L02": {"every": 81_920, "every_steps": 163_840, "n_envs": 2},
    "L03": {"learning_starts": 10_000, "total_timesteps": 5_000},
    "L04": {"buffer_size": 128, "batch_size": 256},
    "L05": {"collected": 200, "batch_size": 64, "remainder": 8},
    "L06": {"steps_per_update": 8, "n_envs": 8},
    "L07": {"n_steps": 8192, "episode_steps": 500},
    "L08": {"n_envs": 8, "n_steps": 2048},
    "L09": {"threads": 12 * (3 + 2), "cores": 8},
    "L10": {"rollouts": 611, "steps": 611 * 16_384},
    "L14": {"n_envs": 4},
    "L15": {"interval": 10, "n_envs": 16},
    "L17": {"every": 81_920, "calls": 7 * 8192},
    "L19": {"processes": 64, "cores": 8},
    "M01": {"needed_bytes": 1_000_000 * STEP, "limit_bytes": 32 * GIB},
    "M02": {"needed_bytes": 700_000 * STEP, "limit_bytes": 32 * GIB},
    "M03": {"needed_bytes": 500_000 * STEP, "limit_bytes": 16 * GIB, "ram_bytes": 32 * GIB},
    "M04": {"rollout_bytes": 4096 * (4 * 4 * FRAME + 4 + 6 * 4), "saved_bytes": 3 * 4096 * 4 * FRAME},
    "M05": {"rollout_bytes": 40_000 * ROLL, "flatten_bytes": 40_000 * 4 * FRAME, "limit_bytes": 32 * GIB},
    "M06": {"bytes_per_step": 84 * 84 * 3 * 4, "narrow_bytes_per_step": 84 * 84 * 3},
    "M07": {"repeated_bytes": 400_000 * (84 * 84 * 3 + 31 * 4), "needed_bytes": 400_000 * STEP, "times": 2},
    "M09": {"buffer_size": 200_000, "total_timesteps": 50_000},
    "M10": {"buffer_size": 100_000, "capacity": 99_996},
    "M11": {"processes": 4},
    "M13": {"shared_bytes": 32 * 720 * 1280 * 3, "shm_bytes": 64 * 2**20},
    "M14": {
        "smallest_bytes": 16_384 * (ROLL + 4 * FRAME),
        "largest_bytes": 3 * 16_384 * (ROLL + 4 * FRAME),
        "limit_bytes": 32 * GIB,
    },
    "M15": {"batch_bytes": 16_384 * 4 * FRAME * 4, "vram_bytes": 16 * GIB},
    "M17": {"stored_bytes": 2048 * 4 * FRAME, "batch_bytes": 2048 * 4 * FRAME * 4},
    "M18": {"smallest": 200_000, "largest": 500_000, "total_timesteps": 50_000},
    "M19": {"needed_bytes": 2 * 100_000 * 4 * 84 * 84, "repeated_bytes": 100_000 * 4 * 84 * 84},
    "P03": {"used_line": 3},
    "P04": {"capacity": 50_000},
    "P11": {"import_line": 2},
    "P13": {"ram_bytes": 32 * GIB, "limit_bytes": 4 * GIB},
    "P15": {"wide_bytes": 100_000 * 4 * 84 * 84 * 4, "saved_bytes": 3 * 100_000 * 4 * 84 * 84},
    "S01": {"checkpoints": 100, "checkpoint_bytes": 200_000 * STEP, "disk_bytes": 200 * 10**9},
    "S03": {"protocol": 4},
    "S04": {"needed_bytes": 2 * 500_000 * STEP, "limit_bytes": 32 * GIB},
}


def found(rule: str, text: str, file: str = "train.py", /, **machine: object) -> list[Finding]:
    on = replace(REFERENCE_MACHINE, **machine)  # type: ignore[arg-type]  # fields of Machine
    return [finding for finding in check_text(text, file, RULES, on) if finding.rule == rule]


def first(rule: str) -> Finding:
    case = RULES[rule].doc.bad[0]
    return found(rule, case.source, case.file, **dict(case.machine))[0]


@pytest.mark.parametrize("rule", RULES)
def test_the_numbers_are_those_worked_out_by_hand(rule: str) -> None:
    assert dict(first(rule).numbers) == NUMBERS.get(rule, {})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("L02", "saves every 163,840 steps, which is every 10 rollouts"),
        ("L05", "200 samples (n_steps x n_envs) in batches of 64 leave one of 8; divisors near it: 40, 50, 100, 200"),
        ("L06", "one update for every 8 steps (8 environments, train_freq 1)"),
        ("L07", "at least 16.4 episodes"),
        ("L08", "n_envs=8 with n_steps=2,048 collects the same 16,384 transitions"),
        ("L13", "batch_size is 1"),
        ("L10", "611 rollouts, 10,010,624 steps"),
        ("M02", f"{100 * 700_000 * STEP / (32 * GIB):.0f} % of RAM"),
        ("M05", "11.06 GB (10.30 GiB)"),
        ("M07", "each observation is stored twice: 8.52 GB (7.93 GiB) of 17.05 GB (15.88 GiB) (50 %)"),
        ("M09", "25 % of it is used"),
        ("S01", "100 checkpoints of 8.53 GB (7.94 GiB) are 852.56 GB"),
    ],
)
def test_the_words_say_the_same(rule: str, words: str) -> None:
    assert words in first(rule).message


def test_a_frame_of_a_stack_is_there_twice_for_each_of_its_places() -> None:
    text = SETUPS["screens"].replace("import PPO", "import DQN") + (
        "env = VecFrameStack(DummyVecEnv([Screen]), n_stack=4)\nDQN('CnnPolicy', env, buffer_size=20_000)"
    )
    (finding,) = found("M07", text)
    assert finding.numbers["times"] == 8
    assert finding.numbers["repeated_bytes"] == 20_000 * 7 * FRAME
    assert "each frame is stored 8 times" in finding.message


def test_a_buffer_of_exactly_the_limit_fits() -> None:
    text = SETUPS["camera"] + 'SAC("MultiInputPolicy", Dog(), buffer_size=1_000)'
    need = 1_000 * STEP
    assert found("M01", text, limit_bytes=need) == []
    assert len(found("M01", text, limit_bytes=need - 1)) == 1
    assert len(found("M02", text, limit_bytes=need)) == 1
    assert found("M02", text, limit_bytes=need - 1) == []
    assert found("M02", text, limit_bytes=-(-need * 10 // 8)) == []
    group = {"limit_name": "control group /a", "ram_bytes": need}
    assert found("M01", text, limit_bytes=need - 1, **group) == []
    assert len(found("M03", text, limit_bytes=need - 1, **group)) == 1
    assert len(found("M01", text, limit_bytes=need - 2, **(group | {"ram_bytes": need - 1}))) == 1
    assert found("M03", text, limit_bytes=need - 2, **(group | {"ram_bytes": need - 1})) == []


def test_without_an_action_space_the_size_is_a_lower_bound_and_says_so() -> None:
    text = (
        SETUPS["camera"].replace("self.action_space", "self.other")
        + 'SAC("MultiInputPolicy", Dog(), buffer_size=1_000_000)'
    )
    (finding,) = found("M01", text)
    assert finding.numbers["needed_bytes"] == 1_000_000 * (STEP - 8 * 4)
    assert "takes at least" in finding.message
    assert "at least" not in first("M01").message


def test_a_run_of_unknown_length_may_never_fill_its_buffer() -> None:
    text = SETUPS["camera"] + 'SAC("MultiInputPolicy", Dog(), buffer_size=1_000_000).learn(steps)'
    (finding,) = found("M01", text)
    assert finding.severity is Severity.WARNING
    assert "42.63 GB (39.70 GiB) once it is full" in finding.message
    assert first("M01").severity is Severity.ERROR
    assert "once it is full" not in first("M01").message


def test_a_replay_buffer_is_only_as_large_as_the_run_makes_it() -> None:
    text = SETUPS["camera"] + 'SAC("MultiInputPolicy", Dog(), buffer_size=1_000_000).learn(50_000)'
    assert found("M01", text, limit_bytes=50_000 * STEP) == []
    (finding,) = found("M01", text, limit_bytes=50_000 * STEP - 1)
    assert finding.numbers["needed_bytes"] == 50_000 * STEP


def test_several_environments_share_the_capacity_that_is_advised() -> None:
    text = SETUPS["camera"].replace(
        "import SAC", "import SAC\nfrom stable_baselines3.common.env_util import make_vec_env"
    )
    text += 'SAC("MultiInputPolicy", make_vec_env(Dog, n_envs=4), buffer_size=1_000_000)'
    (finding,) = found("M01", text)
    rows = int(0.8 * 32 * GIB) // (4 * STEP)
    assert f"buffer_size={rows * 4:,} would take 80 % of it" in finding.message


def test_checkpoints_are_counted_in_calls() -> None:
    text = SETUPS["camera"].replace(
        "import SAC", "import SAC\nfrom stable_baselines3.common.env_util import make_vec_env"
    )
    text += (
        "from stable_baselines3.common.callbacks import CheckpointCallback\n"
        "model = SAC('MultiInputPolicy', make_vec_env(Dog, n_envs=4), buffer_size=200_000)\n"
        "model.learn(1_000_000, callback=CheckpointCallback(10_000, 'models', save_replay_buffer=True))\n"
    )
    (finding,) = found("S01", text)
    assert finding.numbers["checkpoints"] == 25


def test_learning_that_starts_with_the_last_step_never_starts() -> None:
    text = 'from stable_baselines3 import SAC\nSAC("MlpPolicy", "Pendulum-v1", learning_starts={}).learn(100)'
    assert len(found("L03", text.format(100))) == 1
    assert found("L03", text.format(99)) == []


def test_a_call_of_learn_on_a_model_that_cannot_be_told_may_be_this_ones() -> None:
    text = "from stable_baselines3 import SAC\nmodel = SAC('M', 'Pendulum-v1', learning_starts=100)\nmodel.learn(50)\n"
    assert len(found("L03", text)) == 1
    assert found("L03", text + "def more(model):\n    model.learn(1_000_000)\nmore(model)\n") == []


def test_a_threshold_is_where_it_is_said_to_be() -> None:
    rollout = (
        "import gymnasium as gym\nfrom stable_baselines3 import PPO\n"
        "PPO('MlpPolicy', gym.make('Env-v0', max_episode_steps=100), n_steps={})"
    )
    assert len(found("L07", rollout.format(1000))) == 1
    assert found("L07", rollout.format(999)) == []
    threads = "import torch\ntorch.set_num_threads({})"
    assert found("L09", threads.format(8)) == []
    assert len(found("L09", threads.format(9))) == 1
    workers = "worker_num = 2\nthread_num = {}"
    assert found("L09", workers.format(4)) == []
    assert len(found("L09", workers.format(5))) == 1

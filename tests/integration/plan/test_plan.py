"""`holdall plan` as users call it: real processes, real libraries, real environments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("stable_baselines3")

import holdall.plan
from holdall.errors import ArgumentError
from holdall.tools.plan.needs import FitVerdict

CAMERA_BYTES = 2 * (3 * 84 * 84 + 31 * 4) + 8 * 4 + 3 * 4
SAC = """
from holdall.tools.demo import CameraRover
from stable_baselines3 import SAC

def main():
    env = CameraRover()
    model = SAC("MultiInputPolicy", env, buffer_size=BUFFER_SIZE, batch_size=32, policy_kwargs={"net_arch": [16]}EXTRA)
    model.learn(1_000_000)

main()
open("trained", "w").close()
"""


def _plan(*arguments: str, cwd: Path | None = None) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "holdall", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def _plan_script(folder: Path, script: str, *options: str) -> tuple[int, dict[str, Any]]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    code, out, err = _plan(*options, "--json", "--", sys.executable, "train.py", cwd=folder)
    assert not (folder / "trained").exists()
    assert out, err
    return code, json.loads(out)


@pytest.mark.timeout(300)
def test_a_script_is_planned_and_its_advice_fits(tmp_path: Path) -> None:
    plain = SAC.replace("BUFFER_SIZE", "100_000").replace("EXTRA", "")
    code, found = _plan_script(tmp_path, plain, "--memory", "3GiB")
    row_bytes = found["buffer"]["plain_bytes"] / 100_000
    assert (code, found["verdict"]) == (2, "does not fit")
    assert found["buffer"]["transitions"] == 100_000
    assert found["buffer"]["is_exact"]
    assert row_bytes == int(row_bytes)
    assert {part["source"] for part in found["parts"]} == {"exact", "measured"}
    assert found["need_bytes"] == sum(part["nbytes"] for part in found["parts"]) > found["buffer"]["plain_bytes"]
    # The camera's frames are stored once and compressed; both were measured on frames of this environment.
    assert found["stored"]["steps"] >= 500
    assert found["stored"]["compressed_bytes"] < row_bytes / 2
    assert found["change"]["title"].startswith("keep the experience in holdall's buffer")
    assert found["largest"]["capacity with holdall's"] > 100_000 > found["largest"]["capacity with SB3's buffer"] > 0
    assert "replay_buffer_class=ReplayBuffer" in found["code"]

    extra = ', replay_buffer_class=ReplayBuffer, replay_buffer_kwargs={"budget": None}'
    advised = "from holdall.sb3 import ReplayBuffer\n" + SAC.replace("BUFFER_SIZE", "100_000").replace("EXTRA", extra)
    code, followed = _plan_script(tmp_path, advised, "--memory", "3GiB")
    assert (code, followed["verdict"]) == (0, "fits")
    assert followed["buffer"]["library"] == "holdall"
    assert followed["buffer"]["plain_bytes"] == found["buffer"]["plain_bytes"]


@pytest.mark.nightly  # `make test` has the next test, whose buffer cannot be allocated either.
def test_a_buffer_that_cannot_be_allocated_is_planned_with_its_real_size(tmp_path: Path) -> None:
    script = SAC.replace("BUFFER_SIZE", "10**10").replace("EXTRA", "")
    code, found = _plan_script(tmp_path, script)
    assert (code, found["verdict"]) == (2, "does not fit")
    assert found["buffer"]["transitions"] == 10**10
    assert any("Unable to allocate" in note for note in found["notes"])
    assert 0 < found["largest"]["capacity with SB3's buffer"] < 10**10


def test_the_exit_code_the_table_and_the_change_agree(tmp_path: Path) -> None:
    script = """
from stable_baselines3 import SAC
SAC("MlpPolicy", "Pendulum-v1", buffer_size=3_000_000_000, device="cpu").learn(400_000)
"""
    code, found = _plan_script(tmp_path, script)
    assert (code, found["verdict"]) == (2, "does not fit")
    assert found["table"][0]["plain_verdict"] == "does not fit"
    assert 0 < found["largest"]["capacity with SB3's buffer"] < 3_000_000_000
    assert found["change"]["title"] == "a capacity of 400,000"
    assert "buffer_size=400_000" in found["code"]


def test_more_environments_than_there_are_cost_memory(tmp_path: Path) -> None:
    script = """
from stable_baselines3 import DQN
DQN("MlpPolicy", "CartPole-v1", buffer_size=1_000_000, device="cpu").learn(10**9)
"""
    code, found = _plan_script(tmp_path, script, "--set", "n_envs=200000", "--memory", "1GiB")
    (further,) = [part for part in found["parts"] if "further environments" in part["name"]]
    # One CartPole has some kilobytes of Python objects.
    assert 199_999 * 1_000 < further["nbytes"] < 199_999 * 50_000
    assert further["source"] == "estimate"
    assert code == 2
    assert any("outside Python" in note for note in found["notes"])


def test_another_size_is_planned_after_a_line_that_the_command_runs(tmp_path: Path) -> None:
    script = """
from stable_baselines3 import DQN
DQN("MlpPolicy", "CartPole-v1", buffer_size=50_000, device="cpu").learn(10**9)
"""
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    command = (sys.executable, "train.py")
    code, out, err = _plan("--set", "buffer_size=200000", "--", *command, cwd=tmp_path)
    assert code == 0, err
    first, second, *_ = out.splitlines()
    assert first == f"Running {' '.join(command)} until it is about to train. It is stopped then."
    assert second == "DQN, 200,000 transitions, 1 environment, batches of 32  fits"
    assert "replay buffer (SB3)" in out
    assert "10.40 9.92" in " ".join(out.split())  # MB and MiB of 200,000 transitions
    assert 'model = DQN("MlpPolicy", env, buffer_size=200_000, batch_size=32)' in out
    assert max(len(line) for line in out.splitlines()[1:]) <= 80


LOOP = """
import gymnasium as gym, numpy as np
import holdall

FEATURES
envs = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
memory = holdall.ReplayMemory(
    envs.single_observation_space,
    envs.single_action_space,
    capacity=1_000_000,
    num_envs=4,
    budget="2GiB",
    seed=0,
)
obs, _ = envs.reset(seed=0)
for _ in range(3_000):
    action = envs.action_space.sample()
    next_obs, reward, terminated, truncated, _ = envs.step(action)
    memory.add(obs, action, reward, next_obs, terminated, truncated)
    obs = next_obs
"""


@pytest.mark.parametrize("features", ["", "features = np.ones(3_000_000)"])
def test_the_loop_of_the_readme_is_planned(tmp_path: Path, features: str) -> None:
    code, found = _plan_script(tmp_path, LOOP.replace("FEATURES", features), "--memory", "4GiB")
    assert (code, found["verdict"]) == (0, "fits")
    assert (found["buffer"]["name"], found["buffer"]["library"]) == ("memory", "holdall")
    assert (found["buffer"]["transitions"], found["buffer"]["num_envs"]) == (1_000_000, 4)
    assert found["title"] == "memory, 1,000,000 transitions, 4 environments"
    assert found["stored"]["steps"] == 4_000
    parts = {part["name"]: part["nbytes"] for part in found["parts"]}
    assert "features (arrays)" in parts if features else len(parts) <= 4
    assert parts.get("features (arrays)", 24_000_000) == 24_000_000
    assert 20 * 2**20 < parts["replay buffer (holdall)"] < 2**31
    assert not [name for name in parts if "Hook" in name or "_recorded" in name]


def test_transitions_above_the_budget_are_counted_on_disk(tmp_path: Path) -> None:
    script = LOOP.replace("FEATURES", "").replace('"2GiB"', '"64MiB", spill_dir="spill"')
    code, found = _plan_script(tmp_path, script, "--memory", "1GiB")
    assert (code, found["verdict"]) == (0, "fits")
    (memory,) = [part for part in found["parts"] if "holdall" in part["name"]]
    assert memory["nbytes"] <= 128 * 2**20


@pytest.mark.nightly  # `make test` tests this rule in probe/test_probe.py.
def test_a_plan_does_not_count_the_copies_of_the_probe(tmp_path: Path) -> None:
    script = """
import gymnasium as gym, numpy as np, torch
from stable_baselines3.common.buffers import ReplayBuffer

optimizer = torch.optim.Adam(torch.nn.Linear(4, 2).parameters())
space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
rb = ReplayBuffer(20_000, space, gym.spaces.Discrete(4), "cpu", handle_timeout_termination=False)
rng = np.random.default_rng(0)
obs = rng.integers(0, 256, (1, 4, 84, 84), np.uint8)
for step in range(3_000):
    following = rng.integers(0, 256, (1, 4, 84, 84), np.uint8)
    rb.add(obs, following, np.array([1]), np.zeros(1), np.zeros(1, bool), [{}])
    obs = following
    if step == LAST_STEP:
        optimizer.step()
"""
    libraries = []
    for last_step in ("20", "1_100"):
        _, found = _plan_script(tmp_path, script.replace("LAST_STEP", last_step), "--memory", "8GiB")
        assert found["buffer"]["name"] == "rb"
        parts = {part["name"]: part["nbytes"] for part in found["parts"]}
        assert not [name for name in parts if "Hook" in name or "list" in name]
        libraries.append(parts["interpreter, libraries, environments, weights"])
    # In the second run, the probe copied 54 MiB.
    assert libraries[1] - libraries[0] < 25 * 2**20


def test_a_cleanrl_style_script_is_planned_to_the_byte(tmp_path: Path) -> None:
    script = """
import gymnasium as gym, numpy as np, torch
from stable_baselines3.common.buffers import ReplayBuffer

envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")])
rb = ReplayBuffer(500_000, envs.single_observation_space, envs.single_action_space, "cpu",
                  handle_timeout_termination=False)
network = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(network.parameters())
obs, _ = envs.reset(seed=1)
for step in range(100_000):
    actions = np.array([envs.single_action_space.sample()])
    next_obs, rewards, terminations, truncations, infos = envs.step(actions)
    rb.add(obs, next_obs, actions, rewards, terminations, [{}])
    obs = next_obs
    if step > 200:
        network(rb.sample(64).observations.float()).sum().backward()
        optimizer.step()
"""
    code, found = _plan_script(tmp_path, script)
    assert (code, found["verdict"]) == (0, "fits")
    assert found["buffer"]["name"] == "rb"
    assert found["buffer"]["plain_bytes"] == 500_000 * (2 * 16 + 8 + 12)
    assert "measured" in {part["source"] for part in found["parts"] if "gradients" in part["name"]}


def test_flags_describe_a_run_without_a_script() -> None:
    flags = ("--algo", "sac", "--obs", "image=84x84x3:uint8", "--obs", "vector=31", "--action", "8", "--net-arch", "16")
    code, out, err = _plan(*flags, "--capacity", "1e6", "--batch-size", "16", "--budget", "8GiB", "--json")
    assert out, err
    found = json.loads(out)
    assert (code, found["verdict"]) == (2, "does not fit")
    assert found["buffer"]["plain_bytes"] == 1_000_000 * CAMERA_BYTES
    assert found["limits"][0]["free_bytes"] <= 8 * 2**30
    sizes = found["largest"]
    assert 0 < sizes["capacity with SB3's buffer"] < sizes["capacity with holdall's"] < 1_000_000
    assert any("made up" in note and "--env" in note for note in found["notes"])
    (memory,) = [part for part in found["holdall_parts"] if "holdall" in part["name"]]
    assert memory["source"] == "upper bound (noise)"


def test_a_file_describes_a_run(tmp_path: Path) -> None:
    text = 'name = "cart"\nalgo = "ppo"\nenv = "CartPole-v1"\nnum_envs = 2\nn_steps = 256\n'
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    code, out, err = _plan("run.toml", cwd=tmp_path)
    assert code == 0, err
    assert out.startswith("cart: PPO, rollouts of 256 steps, 2 environments, batches of 64  fits")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--capacitee", "5"), "capacitee"),
        ((), "No run was named"),
        (("--algo", "sac"), "obs is missing"),
        (("train.py",), "holdall plan -- python train.py"),
        (("--set", "buffer_size", "--", "python"), "NAME=VALUE"),
        (("--algo", "sac", "--", "python", "x.py"), "--set"),
        (("--", "no-such-program"), "no-such-program"),
        (("--", sys.executable, "-c", "raise ValueError('no rom')"), "ValueError: no rom"),
        (("--", sys.executable, "-c", "print('done')"), "ended before it trained"),
    ],
)
def test_every_mistake_ends_with_exit_code_64(arguments: tuple[str, ...], words: str) -> None:
    code, _, err = _plan(*arguments)
    assert code == 64
    assert words in " ".join(err.split())


def test_a_live_model_is_planned_and_not_changed() -> None:
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=100_000)
    plan = holdall.plan.model(model, budget="2GiB")
    assert plan.verdict is FitVerdict.FITS
    assert plan.needs.experience.allocated_bytes == 100_000 * 40
    assert model.replay_buffer is not None
    assert model.replay_buffer.size() == 0
    assert model.num_timesteps == 0
    with pytest.raises(ArgumentError, match="model"):
        holdall.plan.model({})

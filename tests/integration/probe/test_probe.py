"""`probe` runs a command until training is about to start: one script per framework, and every way to end."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from holdall.errors import ArgumentError
from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import Snapshot

CAMERA = """
import gymnasium as gym, numpy as np

class Camera(gym.Env):
    observation_space = gym.spaces.Dict({
        "image": gym.spaces.Box(0, 255, (3, 84, 84), np.uint8), "vector": gym.spaces.Box(-1, 1, (31,), np.float32)})
    action_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    def reset(self, **options):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
"""


def probe_script(folder: Path, script: str, timeout_s: float = 60.0, **options: float) -> Snapshot:
    """Probe a script that creates the file `trained` if it is not stopped."""
    file = folder / "train.py"
    end = "\nif __name__ == '__main__':\n    open('trained', 'w').close()\n"
    file.write_text(textwrap.dedent(script) + end, encoding="utf-8")
    snapshot = probe([sys.executable, str(file)], timeout_s, cwd=folder, **options)  # type: ignore[arg-type]
    assert not (folder / "trained").exists()
    return snapshot


def test_sb3_is_stopped_before_it_learns(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        CAMERA
        + """
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback

def main():
    evaluation = EvalCallback(Camera())
    model = SAC("MultiInputPolicy", Camera(), buffer_size=20_000, learning_starts=500, batch_size=64)
    model.learn(3000, callback=[CheckpointCallback(1000, "saved", save_replay_buffer=True)])

main()
""",
    )
    assert snapshot.trigger == "learn"
    assert snapshot.error is None
    (model,) = snapshot.models
    assert model.algorithm == "SAC"
    assert model.total_timesteps == 3000
    assert model.settings["learning_starts"] == 500
    assert model.settings["batch_size"] == 64
    assert model.settings["train_freq"] == [1, "step"]
    assert model.observation_space is not None
    assert model.observation_space["spaces"]["image"]["shape"] == [3, 84, 84]
    assert model.parameter_bytes > 0
    (buffer,) = snapshot.buffers
    assert buffer.owner == model.buffer_owner == "model.replay_buffer"
    assert buffer.kind == "replay"
    assert buffer.is_exact
    assert buffer.rows == 20_000
    assert buffer.nbytes == 20_000 * (2 * (3 * 84 * 84 + 31 * 4) + 8 * 4 + 3 * 4)
    passed = {callback.class_name.rpartition(".")[2]: callback for callback in snapshot.callbacks}
    assert passed["CheckpointCallback"].is_passed
    assert passed["CheckpointCallback"].settings["save_replay_buffer"] is True
    assert not passed["EvalCallback"].is_passed
    assert any("Camera" in name for env in snapshot.environments for name in env.class_names)
    assert snapshot.versions["stable_baselines3"]
    assert snapshot.resident_bytes > 100 * 2**20


def test_rollouts_and_worker_processes_are_found_and_ended(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import SubprocVecEnv

        if __name__ == "__main__":
            options = {"start_method": "fork"}
            env = make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs=options)
            PPO("MlpPolicy", env, n_steps=512).learn(10_000)
        """,
    )
    (buffer,) = snapshot.buffers
    assert (buffer.kind, buffer.rows, buffer.n_envs) == ("rollout", 512, 2)
    assert buffer.nbytes == 512 * 2 * (4 * 4 + 8 + 6 * 4)
    (environment,) = snapshot.environments
    assert environment.n_envs == 2
    assert environment.start_method == "fork"
    assert len(snapshot.processes) == 3
    assert sum(process.is_reporter for process in snapshot.processes) == 1
    assert not [process.pid for process in snapshot.processes if psutil.pid_exists(process.pid) and _runs(process.pid)]


@pytest.mark.nightly
def test_environments_of_the_script_itself_run_in_fresh_processes(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        CAMERA
        + """
from stable_baselines3 import SAC
from stable_baselines3.common.vec_env import SubprocVecEnv

if __name__ == "__main__":
    SAC("MultiInputPolicy", SubprocVecEnv([Camera, Camera]), buffer_size=1000).learn(3000)
""",
    )
    assert snapshot.trigger == "learn"
    assert snapshot.environments[0].n_envs == 2
    assert snapshot.environments[0].start_method == "forkserver"


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def test_a_torch_loop_is_stopped_at_its_first_optimizer_step(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import torch

        def train():
            network = torch.nn.Linear(2048, 2048)
            optimizer = torch.optim.Adam(network.parameters())
            observations = torch.zeros(2000, 4, 84, 84, dtype=torch.uint8)
            for _ in range(3):
                network(torch.zeros(8, 2048)).sum().backward()
                optimizer.step()
                open("trained", "w").close()

        train()
        """,
    )
    assert snapshot.trigger == "optimizer"
    (optimizer,) = snapshot.optimizers
    assert optimizer.parameter_bytes == 4 * (2048 * 2048 + 2048)
    (buffer,) = snapshot.buffers
    assert buffer.owner == "observations"
    assert buffer.nbytes == 2000 * 4 * 84 * 84


def test_the_cleanrl_style_is_stopped_after_the_first_add(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import gymnasium as gym, numpy as np, torch
        from stable_baselines3.common.buffers import ReplayBuffer

        if __name__ == "__main__":
            envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")])
            rb = ReplayBuffer(10_000, envs.single_observation_space, envs.single_action_space, "cpu",
                              handle_timeout_termination=False)
            obs, _ = envs.reset(seed=1)
            for step in range(20_000):
                actions = np.array([envs.single_action_space.sample()])
                next_obs, rewards, terminations, truncations, infos = envs.step(actions)
                rb.add(obs, next_obs, actions, rewards, terminations, [{}])
                obs = next_obs
        """,
    )
    assert snapshot.trigger == "add"
    (buffer,) = snapshot.buffers
    assert buffer.owner == "rb"
    assert buffer.items_now == 1
    assert buffer.nbytes == 10_000 * (2 * 16 + 8 + 3 * 4)


def test_torchrl_allocates_in_its_first_extend(tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    snapshot = probe_script(
        tmp_path,
        """
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5_000), batch_size=32)
        step = {"obs": torch.zeros(8, 4, 84, 84, dtype=torch.uint8), "reward": torch.zeros(8)}
        for _ in range(5):
            rb.extend(TensorDict(step, batch_size=[8]))
        """,
    )
    assert snapshot.trigger == "add"
    (buffer,) = snapshot.buffers
    assert buffer.rows == 5_000
    sizes = {array.name.rpartition(".")[2]: array.nbytes for array in buffer.arrays}
    assert sizes["obs"] == 5_000 * 4 * 84 * 84
    assert sizes["reward"] == 5_000 * 4


def test_a_plain_loop_is_stopped_after_some_environment_steps(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        from collections import deque
        import gymnasium as gym, numpy as np

        class Buffer:
            def __init__(self, size):
                self.observations = np.zeros((size, 84, 84, 4), np.uint8)
                self.rewards = np.zeros(size, np.float32)

        class Agent:
            def __init__(self):
                self.memory = deque(maxlen=50_000)
                self.episodes = []
                self.capacity = 40_000

        def main():
            env = gym.make("CartPole-v1")
            buffer, agent = Buffer(10_000), Agent()
            frame = np.zeros((84, 84), np.uint8)
            env.reset()
            for step in range(5_000):
                _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
                following = frame + 1
                agent.memory.append((frame, following))
                agent.episodes.append(np.zeros(4_000, np.uint8))
                frame = following
                if terminated or truncated:
                    env.reset()

        main()
        """,
        max_env_steps=500,
    )
    assert snapshot.trigger == "steps"
    assert snapshot.env_steps == 500
    found = {buffer.owner: buffer for buffer in snapshot.buffers}
    assert found["buffer"].nbytes == 10_000 * (84 * 84 * 4 + 4)
    deque = found["agent.memory"]
    assert deque.rows == 50_000
    # Each frame belongs to two items and is counted once; an array and a tuple have headers.
    assert 50_000 * 84 * 84 < deque.nbytes < 50_000 * (84 * 84 + 400)
    assert found["agent.episodes"].rows == 40_000
    assert 40_000 * 4_000 < found["agent.episodes"].nbytes < 40_000 * 4_200


def test_a_failed_allocation_is_reported_with_its_size(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import numpy as np

        def main():
            small = np.zeros((3_000, 84, 84), np.uint8)
            large = np.zeros((100_000_000, 210, 160, 3), np.uint8)

        main()
        """,
    )
    assert snapshot.trigger == "error"
    assert snapshot.allocation is not None
    assert snapshot.allocation.nbytes == 100_000_000 * 210 * 160 * 3
    assert snapshot.allocation.shape == (100_000_000, 210, 160, 3)
    assert snapshot.allocation.is_exact
    assert [buffer.owner for buffer in snapshot.buffers] == ["small"]


def test_a_failed_allocation_of_torch_is_reported_with_its_size(tmp_path: Path) -> None:
    snapshot = probe_script(tmp_path, "import torch\ntorch.empty(10**15, dtype=torch.uint8)")
    assert snapshot.allocation is not None
    assert snapshot.allocation.nbytes == 10**15
    assert snapshot.allocation.library == "torch"


def test_an_error_keeps_the_traceback_and_what_was_built(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import numpy as np

        replay = np.zeros((3_000, 84, 84), np.uint8)
        print("almost there")
        raise FileNotFoundError("rom.bin")
        """,
    )
    assert snapshot.trigger == "error"
    assert snapshot.error is not None
    assert "FileNotFoundError: rom.bin" in snapshot.error
    assert "almost there" in snapshot.output
    assert [buffer.owner for buffer in snapshot.buffers] == ["replay"]


def test_a_timeout_reports_what_exists_and_ends_the_command(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import os, time
        import numpy as np

        open("pid", "w").write(str(os.getpid()))
        replay = np.zeros((3_000, 84, 84), np.uint8)
        time.sleep(1_000)
        """,
        timeout_s=8.0,
    )
    assert snapshot.trigger == "timeout"
    assert [buffer.owner for buffer in snapshot.buffers] == ["replay"]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_command_that_ends_by_itself_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "help.py"
    file.write_text("print('usage')", encoding="utf-8")
    snapshot = probe([sys.executable, str(file)], 30)
    assert snapshot.trigger == "exit"
    assert not snapshot.is_ready
    assert snapshot.output == "usage"


_ADD = """
obs, _ = env.reset()
for _ in range(10):
    action = env.action_space.sample()
    following, reward, terminated, truncated, _ = env.step(action)
    memory.add(obs, action, reward, following, terminated, truncated)
    obs = following
"""
_RECORD = """
envs = gym.make_vec("Pendulum-v1", num_envs=1)
recorder = holdall.Recorder(envs, memory)
recorder.reset()
for _ in range(10):
    recorder.step(envs.action_space.sample())
"""


@pytest.mark.parametrize("loop", [_ADD, _RECORD], ids=["add", "recorder"])
def test_holdalls_own_memories_are_described(loop: str, tmp_path: Path) -> None:
    script = """
        import gymnasium as gym
        import holdall

        env = gym.make("Pendulum-v1")
        memory = holdall.ReplayMemory(env.observation_space, env.action_space, 1e6,
                                      budget="100MiB", prefer="memory", spill_dir="spill")
        """
    snapshot = probe_script(tmp_path, textwrap.dedent(script) + loop)
    assert snapshot.trigger == "add"
    assert snapshot.buffers == ()
    (memory,) = snapshot.memories
    assert memory.owner == "memory"
    assert memory.capacity == 1_000_000
    assert (memory.budget, memory.prefer, memory.spill_dir) == ("100MiB", "memory", "spill")
    assert memory.transitions == 1
    assert memory.plain_bytes >= 2 * 12 + 4 + 8


def test_holdalls_drop_in_is_described_with_its_settings(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        CAMERA
        + """
from holdall.sb3 import ReplayBuffer
from stable_baselines3 import SAC

model = SAC("MultiInputPolicy", Camera(), buffer_size=20_000, replay_buffer_class=ReplayBuffer,
            replay_buffer_kwargs={"budget": "200MiB", "spill_dir": "spill"})
model.learn(3000)
""",
    )
    assert snapshot.buffers == ()
    (memory,) = snapshot.memories
    assert memory.owner == snapshot.models[0].buffer_owner
    assert memory.class_name == "holdall.sb3.replay.ReplayBuffer"
    assert memory.capacity == 20_000
    assert memory.budget == "200MiB"


def test_holdalls_rollout_buffer_is_described(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        from holdall.sb3 import RolloutBuffer

        env = make_vec_env("CartPole-v1", n_envs=2)
        PPO("MlpPolicy", env, n_steps=128, rollout_buffer_class=RolloutBuffer).learn(1_000)
        """,
    )
    assert snapshot.trigger == "learn"
    assert snapshot.buffers == ()
    (memory,) = snapshot.memories
    assert memory == snapshot.find_memory(snapshot.models[0])
    assert (memory.class_name, memory.capacity, memory.n_envs) == ("holdall.sb3.rollout.RolloutBuffer", 256, 2)


def test_processes_that_left_the_group_are_ended(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import subprocess, sys, time

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        open("child", "w").write(str(child.pid))
        raise SystemExit("done")
        """,
    )
    assert snapshot.trigger in {"exit", "error"}
    assert not _runs(int((tmp_path / "child").read_text(encoding="utf-8")))


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_customized = True", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "show.py"
    script = "import os, sys; print(sys.was_customized, os.environ['WANDB_MODE'], os.environ['HOLDALL_PROBE'])"
    file.write_text(script, encoding="utf-8")
    assert probe([sys.executable, str(file)], 30).output == "True disabled 1"


@pytest.mark.parametrize(
    "arguments", [["multiprocessing_train.py"], ["train.py", "--workers=multiprocessing"], ["train.py", "-c", "x.yml"]]
)
def test_a_command_is_probed_whatever_its_arguments_are_called(tmp_path: Path, arguments: list[str]) -> None:
    script = "import numpy as np\nreplay = np.zeros((3_000, 84, 84), np.uint8)\nraise ValueError"
    (tmp_path / arguments[0]).write_text(script, encoding="utf-8")
    snapshot = probe([sys.executable, *arguments], 30, cwd=tmp_path)
    assert [buffer.owner for buffer in snapshot.buffers] == ["replay"]


def test_hydra_is_asked_for_the_whole_error(tmp_path: Path) -> None:
    file = tmp_path / "show.py"
    file.write_text("import os; print(os.environ['HYDRA_FULL_ERROR'])", encoding="utf-8")
    assert probe([sys.executable, str(file)], 30).output == "1"


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no-such-program"):
        probe(["no-such-program"], 5)
    with pytest.raises(ArgumentError, match="empty"):
        probe([], 5)


def test_a_snapshot_survives_json(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path, "import numpy as np\nreplay = np.zeros((3_000, 84, 84), np.uint8)\nraise ValueError"
    )
    assert Snapshot.from_json(snapshot.as_json()) == snapshot
    with pytest.raises(TypeError):
        Snapshot.from_json("[]")
    assert os.getpid() not in {process.pid for process in snapshot.processes}


def test_an_empty_buffer_of_tianshou_gets_the_arrays_of_a_filled_one(tmp_path: Path) -> None:
    package = tmp_path / "tianshou" / "data" / "buffer"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "buffer_base.py").write_text(
        textwrap.dedent("""
        import numpy as np

        class Batch:
            pass

        class ReplayBuffer:
            def __init__(self, size):
                self.maxsize = size
                self._size = 0
                self._meta = Batch()

            def add(self, observation):
                self._meta.obs = np.zeros((self.maxsize, *observation.shape), observation.dtype)
                self._size = 1
        """)
    )
    snapshot = probe_script(
        tmp_path,
        """
        import numpy as np
        from tianshou.data.buffer.buffer_base import ReplayBuffer

        tests = ReplayBuffer(10_000)
        training = ReplayBuffer(1_000_000)
        tests.add(np.zeros(24, np.float32))
        """,
    )
    assert snapshot.trigger == "add"
    found = {buffer.owner: buffer for buffer in snapshot.buffers}
    assert (found["tests"].nbytes, found["tests"].is_exact) == (10_000 * 24 * 4, True)
    assert found["training"].nbytes == 1_000_000 * 24 * 4
    assert not found["training"].is_exact


def test_copies_of_the_probe_are_not_reported(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import gymnasium as gym, numpy as np, torch
        from stable_baselines3.common.buffers import ReplayBuffer

        optimizer = torch.optim.Adam(torch.nn.Linear(4, 2).parameters())
        space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        rb = ReplayBuffer(2_000, space, gym.spaces.Discrete(4), "cpu", handle_timeout_termination=False)
        rng = np.random.default_rng(0)
        obs = rng.integers(0, 256, (1, 4, 84, 84), np.uint8)
        for step in range(3_000):
            following = rng.integers(0, 256, (1, 4, 84, 84), np.uint8)
            rb.add(obs, following, np.array([1]), np.zeros(1), np.zeros(1, bool), [{}])
            obs = following
            if step == 1_100:
                optimizer.step()
        """,
        measure_s=60.0,
    )
    assert snapshot.trigger == "add"
    assert [buffer.owner for buffer in snapshot.buffers] == ["rb"]
    assert snapshot.arrays == ()
    assert snapshot.stored is not None
    assert snapshot.stored.steps == 1_000
    copied = 1_000 * 2 * 4 * 84 * 84
    assert copied < snapshot.probe_bytes < copied * 1.05


@pytest.mark.nightly
def test_large_steps_are_copied_up_to_a_bound(tmp_path: Path) -> None:
    snapshot = probe_script(
        tmp_path,
        """
        import gymnasium as gym, numpy as np
        import holdall

        space = gym.spaces.Box(0, 255, (20 * 2**20,), np.uint8)
        memory = holdall.ReplayMemory(space, gym.spaces.Discrete(4), 100)
        obs = np.zeros((1, 20 * 2**20), np.uint8)
        while True:
            zero = np.zeros(1)
            memory.add(obs, zero.astype(int), zero, obs, zero.astype(bool), zero.astype(bool))
        """,
        measure_s=5.0,
    )
    assert snapshot.arrays == ()
    # A space has arrays of its bounds. It also has a dtype, which is no setting.
    assert sorted(buffer.owner for buffer in snapshot.buffers) == ["obs", "space"]
    assert snapshot.notes == ()
    assert snapshot.probe_bytes < 300 * 2**20

"""One training in a process of its own: `python -m holdall.tools.demo.training TASK`, with the task as JSON.

Out: messages, `ChildProgress` during the training, `CheckpointFingerprint` when a checkpoint is saved or resumed, and
`DemoResult` at the end.
Two trainings with different buffers must end with the same weights, even if one of them is killed and resumed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from holdall.machine import peak_bytes
from holdall.memory import ReplayMemory
from holdall.sb3 import CheckpointCallback, WatchCallback, resume
from holdall.sb3 import ReplayBuffer as HoldallReplayBuffer
from holdall.tools.bench import count_folder_bytes
from holdall.tools.bench.child import ChildProgress, emit
from holdall.tools.bench.training import CameraExtractor, MeasureCallback
from holdall.tools.demo import CameraRover, CheckpointFingerprint, DemoResult, DemoTask

BUFFERS: dict[str, type[ReplayBuffer]] = {"sb3": DictReplayBuffer, "holdall": HoldallReplayBuffer}
RANDOM_STEPS = 100  # Steps before the first gradient step.

BATCHES = 3  # Number of batches that are compared after a resume.
SEED = 7


class SafeCheckpoint(CheckpointCallback):
    """Checkpoint callback that waits until the checkpoint is on disk, and reports the batches that are drawn next."""

    def save(self) -> Any:
        """Save, wait for the disk, and report the fingerprint of the next batches."""
        start = time.perf_counter()
        handle = super().save()
        handle.result()
        seconds = time.perf_counter() - start
        buffer: Any = self.model.replay_buffer  # type: ignore[attr-defined]  # SAC has a replay buffer.
        _emit_fingerprint(self.num_timesteps, buffer.memory, seconds, Path(self.path))
        return handle


def train(task: DemoTask) -> DemoResult:
    """Train for `steps`, then let random actions fill the same buffer up to `transitions`."""
    steps = task.steps
    transitions = task.transitions
    # The sums of several threads would depend on the number of threads.
    torch.set_num_threads(1)
    if task.is_resumed:
        model = _resume_model(task.checkpoint)
    else:
        model = _make_model(task.buffer, steps + transitions, task.buffer_kwargs)
    first_step = model.num_timesteps
    progress = MeasureCallback("train", steps + transitions, first_step)
    callbacks: list[BaseCallback] = [progress]
    if task.record:
        callbacks.append(WatchCallback(interval_s=1.0, record=task.record, limit=task.limit_bytes, verbose=0))
    if task.checkpoint and not task.is_resumed:
        callbacks.append(SafeCheckpoint(steps // 2, task.checkpoint, env_state=(get_env_state, set_env_state)))
    model.learn(steps - first_step, callback=CallbackList(callbacks), reset_num_timesteps=False)
    # The median, because other processes of a busy machine distort the mean.
    steps_per_second = 1.0 / float(np.median(np.diff(progress.moments[max(RANDOM_STEPS - first_step, 0) :])))
    weights = hash_weights(model.policy)

    # SB3's own loop fills the buffer: no gradient step happens before `learning_starts`, only random actions.
    model.learning_starts = steps + transitions + 1
    progress.readings.clear()
    model.learn(transitions, callback=CallbackList(callbacks[:2]), reset_num_timesteps=False)
    held_transitions, process_bytes = np.array(progress.readings, np.float64).T
    growth_bytes = process_bytes.max() - process_bytes[0]
    return DemoResult(
        buffer=task.buffer,
        bytes_per_transition=float(growth_bytes / (held_transitions[-1] - held_transitions[0])),
        peak_bytes=peak_bytes(),
        steps_per_second=steps_per_second,
        transitions=model.num_timesteps,
        weights_sha256=weights,
    )


def _make_model(buffer: str, capacity: int, buffer_kwargs: dict[str, Any] | None) -> Any:
    network = {"features_extractor_class": CameraExtractor, "net_arch": [64, 64], "share_features_extractor": True}
    settings: dict[str, Any] = {"buffer_size": capacity, "learning_starts": RANDOM_STEPS, "batch_size": 32}
    settings |= {"replay_buffer_class": BUFFERS[buffer], "replay_buffer_kwargs": buffer_kwargs}
    return SAC("MultiInputPolicy", make_environment(), **settings, seed=SEED, policy_kwargs=network, device="cpu")


def _resume_model(checkpoint: str) -> Any:
    """Return the model of a checkpoint. Report the fingerprint of batches that a second copy of its memory draws."""
    start = time.perf_counter()
    model = resume(checkpoint, make_environment(), device="cpu", env_state=(get_env_state, set_env_state))
    seconds = time.perf_counter() - start
    with ReplayMemory.load(checkpoint) as memory:
        _emit_fingerprint(model.num_timesteps, memory, seconds, Path(checkpoint))
    return model


def _emit_fingerprint(step: int, memory: ReplayMemory, seconds: float, folder: Path) -> None:
    """Send a hash of the next batches of `memory`, and the size of the checkpoint in `folder`."""
    digest = hashlib.sha256()
    for _ in range(BATCHES):
        batch = memory.sample(32)
        for array in (*batch.obs.values(), batch.action, batch.reward, *batch.next_obs.values(), batch.ids):
            digest.update(np.ascontiguousarray(array).tobytes())
    emit(CheckpointFingerprint(step, digest.hexdigest(), seconds, count_folder_bytes(folder)))


def make_environment() -> VecEnv:
    """Return the rover, with the wrappers that Stable-Baselines3 adds to an environment."""
    return DummyVecEnv([lambda: Monitor(CameraRover())])


def get_env_state(env: VecEnv) -> bytes:
    """Return the state of the rover without its random generator, which holdall saves."""
    return json.dumps(_get_rover(env).get_state()).encode()


def set_env_state(env: VecEnv, state: bytes) -> None:
    """Restore the state of the rover."""
    env.reset()
    _get_rover(env).set_state(json.loads(state))


def _get_rover(env: Any) -> Any:
    return env.unwrapped.envs[0].unwrapped


def hash_weights(policy: torch.nn.Module) -> str:
    """Return a hash of the name and the bytes of every parameter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Read the task, train, and print the result."""
    task = DemoTask(**json.loads(sys.argv[1]))
    emit(ChildProgress(0, task.steps + task.transitions))
    emit(train(task))


if __name__ == "__main__":
    main()

"""One training in a process of its own: `python -m holdall.tools.demo.training TASK`, the task as JSON.

Out: JSON lines, {"done", "total"} while it runs, {"saved"} or {"resumed"}, and {"result"} last.
Two runs that differ only in the buffer, or in being killed and resumed, must end with the same weights.
"""

from __future__ import annotations

import dataclasses
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
from holdall.tools.bench import emit, folder_bytes
from holdall.tools.bench.training import CameraExtractor, MeasureCallback
from holdall.tools.demo import CameraRover, CheckpointFingerprint, DemoResult

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
        _emit_fingerprint("saved", self.num_timesteps, buffer.memory, seconds, Path(self.path))
        return handle


def train(
    buffer: str,
    steps: int,
    transitions: int,
    checkpoint: str = "",
    record: str = "",
    resumes: bool = False,
    limit: int | None = None,
    buffer_kwargs: dict[str, Any] | None = None,
) -> DemoResult:
    """Train for `steps`, then let random actions fill the same buffer up to `transitions`.

    Args:
        checkpoint: Folder of the checkpoint that is saved half-way, or resumed from. Empty: none.
        record: File of the watch's record. Empty: the training is not watched.
        limit: Memory limit that the page of the record shows.
        buffer_kwargs: Settings of a new buffer. A resumed buffer keeps its own.
    """
    # With several threads, sums would depend on the number of threads.
    torch.set_num_threads(1)
    model = _resumed(checkpoint) if resumes else _new(buffer, steps + transitions, buffer_kwargs)
    begun = model.num_timesteps
    progress = MeasureCallback("train", steps + transitions, begun)
    callbacks: list[BaseCallback] = [progress]
    if record:
        callbacks.append(WatchCallback(interval_s=1.0, record=record, limit=limit, verbose=0))
    if checkpoint and not resumes:
        callbacks.append(SafeCheckpoint(steps // 2, checkpoint, env_state=(get_env_state, set_env_state)))
    model.learn(steps - begun, callback=CallbackList(callbacks), reset_num_timesteps=False)
    # The median, because other processes of a busy machine distort the mean.
    steps_per_second = 1.0 / float(np.median(np.diff(progress.moments[max(RANDOM_STEPS - begun, 0) :])))
    weights = weights_digest(model.policy)

    # SB3's own loop fills the buffer: no gradient step happens before `learning_starts`, only random actions.
    model.learning_starts = steps + transitions + 1
    progress.readings.clear()
    model.learn(transitions, callback=CallbackList(callbacks[:2]), reset_num_timesteps=False)
    filled, held = np.array(progress.readings, np.float64).T
    bytes_per_transition = float((held.max() - held[0]) / (filled[-1] - filled[0]))
    return DemoResult(buffer, bytes_per_transition, peak_bytes(), steps_per_second, model.num_timesteps, weights)


def _new(buffer: str, capacity: int, buffer_kwargs: dict[str, Any] | None) -> Any:
    network = {"features_extractor_class": CameraExtractor, "net_arch": [64, 64], "share_features_extractor": True}
    settings: dict[str, Any] = {"buffer_size": capacity, "learning_starts": RANDOM_STEPS, "batch_size": 32}
    settings |= {"replay_buffer_class": BUFFERS[buffer], "replay_buffer_kwargs": buffer_kwargs}
    return SAC("MultiInputPolicy", environment(), **settings, seed=SEED, policy_kwargs=network, device="cpu")


def _resumed(checkpoint: str) -> Any:
    """Continue from a checkpoint; a second memory draws the batches whose fingerprint is reported."""
    start = time.perf_counter()
    model = resume(checkpoint, environment(), device="cpu", env_state=(get_env_state, set_env_state))
    seconds = time.perf_counter() - start
    with ReplayMemory.load(checkpoint) as memory:
        _emit_fingerprint("resumed", model.num_timesteps, memory, seconds, Path(checkpoint))
    return model


def _emit_fingerprint(what: str, step: int, memory: ReplayMemory, seconds: float, place: Path) -> None:
    fingerprint = hashlib.sha256()
    for _ in range(BATCHES):
        batch = memory.sample(32)
        for array in (*batch.obs.values(), batch.action, batch.reward, *batch.next_obs.values(), batch.ids):
            fingerprint.update(np.ascontiguousarray(array).tobytes())
    found = CheckpointFingerprint(step, fingerprint.hexdigest(), seconds, folder_bytes(place))
    emit({what: dataclasses.asdict(found)})


def environment() -> VecEnv:
    """Return the task, wrapped as Stable-Baselines3 would."""
    return DummyVecEnv([lambda: Monitor(CameraRover())])


def get_env_state(env: VecEnv) -> bytes:
    """Return the state of the rover; its generator is saved by holdall."""
    return json.dumps(_rover(env).get_state()).encode()


def set_env_state(env: VecEnv, state: bytes) -> None:
    """Put the rover back into a state."""
    env.reset()
    _rover(env).set_state(json.loads(state))


def _rover(env: Any) -> Any:
    return env.unwrapped.envs[0].unwrapped


def weights_digest(policy: torch.nn.Module) -> str:
    """Return a fingerprint of every parameter's name and bytes."""
    fingerprint = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        fingerprint.update(name.encode())
        fingerprint.update(tensor.cpu().contiguous().numpy().tobytes())
    return fingerprint.hexdigest()


def main() -> None:
    """Read the task, train, and print the result."""
    task = json.loads(sys.argv[1])
    emit({"done": 0, "total": task["steps"] + task["transitions"]})
    emit({"result": dataclasses.asdict(train(**task))})


if __name__ == "__main__":
    main()

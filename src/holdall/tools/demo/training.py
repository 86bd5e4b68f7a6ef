"""One training in a process of its own: `python -m holdall.tools.demo.training --buffer holdall`.

Out: JSON lines, {"done", "total"} while it runs, {"saved"} or {"resumed"}, and {"result"} last.
Two runs that differ only in the buffer, or in being killed and resumed, must end with the same weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
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

from holdall.machine import held_bytes, peak_bytes
from holdall.replay import ReplayMemory
from holdall.sb3 import CheckpointCallback, WatchCallback, resume
from holdall.sb3 import ReplayBuffer as HoldallReplayBuffer
from holdall.tools.bench import CameraExtractor, emit, folder_bytes, slope
from holdall.tools.demo.camera import CameraRover, CheckpointFingerprint, DemoResult

BUFFERS: dict[str, type[ReplayBuffer]] = {"sb3": DictReplayBuffer, "holdall": HoldallReplayBuffer}
RANDOM_STEPS = 100  # before the first gradient step
READ_EVERY = 500  # transitions between two readings of the process's memory
BATCHES = 3  # drawn to compare a memory with the one that was saved
SEED = 7


class ProgressCallback(BaseCallback):
    """Print how far the run is, and read the process's memory at even distances."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self.moments: list[tuple[int, float]] = []  # steps, and when they were done, in seconds
        self.readings: list[tuple[int, int]] = []  # transitions held, unique bytes

    def _on_step(self) -> bool:
        self.moments.append((self.num_timesteps, time.perf_counter()))
        if self.num_timesteps % READ_EVERY == 0:
            self.readings.append((self.num_timesteps, held_bytes().unique))
        if self.num_timesteps % 50 == 0:
            emit({"done": self.num_timesteps, "total": self.total})
        return True

    def steps_per_second(self) -> float:
        """Return the median speed of the steps that train: a mean shows the machine's other users more than the run."""
        trained = [moment for step, moment in self.moments if step > RANDOM_STEPS]
        return 1.0 / float(np.median(np.diff(trained)))


class SafeCheckpoint(CheckpointCallback):
    """Waits until its checkpoint is safe, and reports which batches the memory would draw next."""

    def save(self) -> Any:
        """Save, wait, draw."""
        start = time.perf_counter()
        handle = super().save()
        handle.result()
        seconds = time.perf_counter() - start
        buffer: Any = self.model.replay_buffer  # type: ignore[attr-defined]  # SAC has one
        _emit_fingerprint("saved", self.num_timesteps, buffer.memory, seconds, Path(self.path))
        return handle


def train(
    buffer: str, steps: int, transitions: int, checkpoint: Path | None, record: Path | None, *, resumes: bool
) -> DemoResult:
    """Train for `steps`, then let random actions fill the same buffer up to `transitions`."""
    # Sums over threads depend on how many there are; one thread keeps the runs comparable on any machine.
    torch.set_num_threads(1)
    progress = ProgressCallback(steps + transitions)
    callbacks: list[BaseCallback] = [progress]
    if record is not None:
        callbacks.append(WatchCallback(interval_s=1.0, record=record, verbose=0))
    if checkpoint is not None and resumes:
        model = _resumed(checkpoint)
    else:
        model = _new(buffer, steps + transitions)
        if checkpoint is not None:
            callbacks.append(SafeCheckpoint(steps // 2, checkpoint, env_state=(get_env_state, set_env_state)))
    model.learn(steps - model.num_timesteps, callback=CallbackList(callbacks), reset_num_timesteps=False)
    steps_per_second = progress.steps_per_second()
    weights = weights_digest(model.policy)

    # SB3's own loop fills the buffer: no gradient step happens before `learning_starts`, only random actions.
    model.learning_starts = steps + transitions + 1
    progress.readings.clear()
    model.learn(transitions, callback=CallbackList(callbacks[:2]), reset_num_timesteps=False)
    return DemoResult(
        buffer=buffer,
        bytes_per_transition=slope(progress.readings),
        peak_bytes=peak_bytes(),
        steps_per_second=steps_per_second,
        transitions=model.num_timesteps,
        weights_sha256=weights,
    )


def _new(buffer: str, capacity: int) -> Any:
    return SAC(
        "MultiInputPolicy",
        environment(),
        seed=SEED,
        buffer_size=capacity,
        learning_starts=RANDOM_STEPS,
        batch_size=32,
        replay_buffer_class=BUFFERS[buffer],
        policy_kwargs={
            "features_extractor_class": CameraExtractor,
            "net_arch": [64, 64],
            "share_features_extractor": True,
        },
        device="cpu",
    )


def _resumed(checkpoint: Path) -> Any:
    """Continue from a checkpoint; a second memory draws the batches whose fingerprint is reported."""
    start = time.perf_counter()
    model = resume(checkpoint, environment(), device="cpu", env_state=(get_env_state, set_env_state))
    seconds = time.perf_counter() - start
    with ReplayMemory.load(checkpoint) as memory:
        _emit_fingerprint("resumed", model.num_timesteps, memory, seconds, checkpoint)
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


def _rover(env: Any) -> CameraRover:
    while not isinstance(env, DummyVecEnv):
        env = env.venv
    rover = env.envs[0].unwrapped
    if not isinstance(rover, CameraRover):
        msg = f"env is a {type(rover).__name__}; the demo trains a CameraRover"
        raise TypeError(msg)
    return rover


def weights_digest(policy: torch.nn.Module) -> str:
    """Return a fingerprint of every parameter's name and bytes."""
    fingerprint = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        fingerprint.update(name.encode())
        fingerprint.update(tensor.cpu().contiguous().numpy().tobytes())
    return fingerprint.hexdigest()


def main() -> None:
    """Read the command line, train, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m holdall.tools.demo.training")
    parser.add_argument("--buffer", choices=sorted(BUFFERS), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--transitions", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, help="save half-way there")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--record", type=Path, help="watch this process, and write the readings there")
    wanted = parser.parse_args()
    emit({"done": 0, "total": wanted.steps + wanted.transitions})
    result = train(
        wanted.buffer, wanted.steps, wanted.transitions, wanted.checkpoint, wanted.record, resumes=wanted.resume
    )
    emit({"result": dataclasses.asdict(result)})


if __name__ == "__main__":
    main()

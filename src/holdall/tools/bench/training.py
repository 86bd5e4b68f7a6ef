"""One training in a process of its own: `python -m holdall.tools.bench.training TASK`, with the task as JSON.

Out: messages, `ChildProgress` during the training and `TrainingFigures` at the end. With an off-policy algorithm,
random actions fill the buffer before training. Peaks are resident bytes, and are measured separately for every phase.
The features extractor of the shipped environment is here because it needs torch and Stable-Baselines3, as a training
does.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from holdall.machine import begin_peak, held_bytes, peak_bytes
from holdall.tools.bench import SaveFigures, measure_save
from holdall.tools.bench.child import ChildProgress, emit
from holdall.tools.bench.settings import ALGOS
from holdall.tools.bench.task import Task, TrainingFigures
from holdall.tools.plan.environments import make_env
from holdall.tools.probe.arrays import count_bytes, walk_arrays

PATCH_PX = 12  # Side of the patch that one convolution covers.
_EMIT_EVERY_S = 0.2
_READINGS = 50  # Readings of the memory in every phase.
_WARM_UP_SHARE = 0.2  # Share of the steps at the beginning that are not timed.


class CameraExtractor(BaseFeaturesExtractor):
    """Features: the camera through one wide convolution, and the state vector."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, features_dim=32 + observation_space["state"].shape[0])
        channels, height, width = observation_space["camera"].shape  # SB3 moves the channels to the front.
        patches = (height // PATCH_PX) * (width // PATCH_PX)
        self.look = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 8, kernel_size=PATCH_PX, stride=PATCH_PX),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * patches, 32),
            torch.nn.ReLU(),
        )

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the features of the camera and the state vector, one after the other."""
        return torch.cat([self.look(observations["camera"]), observations["state"]], dim=1)


class MeasureCallback(BaseCallback):
    """Records the time of every step, the return of every episode, and the memory at regular intervals.

    In a resumed training, `steps` of the `total` steps are done already.
    """

    def __init__(self, phase: str, total: int, steps: int = 0) -> None:
        super().__init__()
        self.phase = phase
        self.total = total
        self.moments: list[float] = []  # Start time of every rollout, and the end. Off-policy, a rollout is one step.
        self.readings: list[tuple[int, int]] = []  # Steps done, and bytes that only this process uses.
        self.returns: list[float] = []
        self._every = max(total // _READINGS, 1)
        self._emitted_at = 0.0
        self._steps = steps

    def _on_rollout_start(self) -> None:
        self.moments.append(time.perf_counter())

    def _on_step(self) -> bool:
        self._steps += self.training_env.num_envs
        now = time.perf_counter()
        self.returns += [float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info]
        if self._steps // self._every != (self._steps - self.training_env.num_envs) // self._every:
            self.readings.append((self._steps, held_bytes().unique))
        if now - self._emitted_at > _EMIT_EVERY_S:
            self._emitted_at = now
            emit(ChildProgress(self._steps, self.total, self.phase, held_bytes().resident))
        return True

    def _on_training_end(self) -> None:
        self.moments.append(time.perf_counter())


def measure_training(task: Task) -> TrainingFigures:
    """Construct a model, fill its buffer, train and save. Return the figures of each phase."""
    started = time.perf_counter()
    peaks = {"base": held_bytes().resident}
    if task.threads:
        torch.set_num_threads(task.threads)
    begin_peak()
    model = _make_model(task)
    peaks["construct"] = peak_bytes()
    measure = _measure_on_policy if hasattr(model, "rollout_buffer") else _measure_off_policy
    figures = measure(model, task, peaks)
    saved = _measure_save(model, task, peaks)
    seconds = time.perf_counter() - started
    return TrainingFigures(**figures, checkpoint=saved, peaks=peaks, seconds=seconds)


def count_buffer_bytes(buffer: Any) -> int:
    """Return the bytes of a buffer: the total of `report()` for holdall's, all arrays for Stable-Baselines3's."""
    memory = getattr(buffer, "memory", buffer)
    if hasattr(memory, "report"):
        return int(memory.report().total_bytes)
    return sum(count_bytes(array) for _, array in walk_arrays(dict(vars(buffer)), "", 0))


def _measure_off_policy(model: Any, task: Task, peaks: dict[str, int]) -> dict[str, Any]:
    fill = task.size if task.fills else max(2 * task.batch_size, 100)
    filling = MeasureCallback("fill", fill)
    begin_peak()
    model.learning_starts = fill + 1  # Before that, actions are random and nothing is learned.
    model.learn(fill, callback=filling)
    peaks["collect"] = peak_bytes()
    if task.buffer == "holdall":
        model.replay_buffer.memory.store.wait_idle()
    filled = model.replay_buffer.size()
    model.learning_starts = 0
    training = MeasureCallback("train", task.timesteps)
    begin_peak()
    model.learn(task.timesteps, callback=training, reset_num_timesteps=False)
    peaks["train"] = peak_bytes()
    seconds = np.diff(training.moments)
    settled = seconds[int(_WARM_UP_SHARE * len(seconds)) :]
    return {
        "steps": len(seconds) * task.num_envs,
        "buffer_bytes": count_buffer_bytes(model.replay_buffer),
        "filled": filled / model.replay_buffer.buffer_size,
        # The median, because other processes of a busy machine distort the mean.
        "steps_per_second": task.num_envs / float(np.median(settled)),
        "fill_per_second": task.num_envs / float(np.median(np.diff(filling.moments))),
        # During a short fill, the process grows mostly for other reasons.
        "bytes_per_transition": fit_late_slope(filling.readings) if task.fills else None,
        "rewards": training.returns[-1_000:],
    }


def _measure_on_policy(model: Any, task: Task, peaks: dict[str, int]) -> dict[str, Any]:
    rollout = task.size * task.num_envs
    total = max(task.timesteps, rollout) if task.fills else task.timesteps
    training = MeasureCallback("train", -(-total // rollout) * rollout)
    begin_peak()
    model.learn(total, callback=training)
    peaks["train"] = peak_bytes()
    peaks["collect"] = peaks["train"]
    seconds = np.diff(training.moments)
    return {
        "steps": training.num_timesteps,
        "buffer_bytes": count_buffer_bytes(model.rollout_buffer),
        "filled": min(training.num_timesteps / rollout, 1.0),
        "steps_per_second": rollout / float(np.median(seconds)),
        "fill_per_second": None,
        "bytes_per_transition": fit_late_slope([reading for reading in training.readings if reading[0] <= rollout]),
        "rewards": training.returns[-1_000:],
    }


def _make_model(task: Task) -> Any:
    env = make_vec_env(partial(make_env, task.env_id), n_envs=task.num_envs)
    kind = getattr(stable_baselines3, ALGOS[task.algo])
    settings: dict[str, Any] = {"batch_size": task.batch_size, "policy_kwargs": dict(task.policy_kwargs)}
    if issubclass(kind, OnPolicyAlgorithm):
        settings |= {"n_steps": task.size, "n_epochs": 2}
        if task.buffer == "holdall":
            settings["rollout_buffer_class"] = importlib.import_module("holdall.sb3").RolloutBuffer
    else:
        # As many updates as transitions, however many environments there are.
        settings |= {"buffer_size": task.size, "train_freq": 1, "gradient_steps": -1}
        if task.buffer == "holdall":
            settings["replay_buffer_class"] = importlib.import_module("holdall.sb3").ReplayBuffer
    if task.features:
        module, _, name = task.features.partition(":")
        settings["policy_kwargs"]["features_extractor_class"] = getattr(importlib.import_module(module), name)
    policy = "MlpPolicy"
    if hasattr(env.observation_space, "spaces"):
        policy = "MultiInputPolicy"
    elif is_image_space(env.observation_space):
        policy = "CnnPolicy"
    model = kind(policy, env, seed=task.seed, device="cpu", **settings)
    model.set_logger(configure(None, []))
    return model


def _measure_save(model: Any, task: Task, peaks: dict[str, int]) -> SaveFigures:
    """Save the model, and the replay buffer if there is one, so that the training could be resumed."""
    replay = getattr(model, "replay_buffer", None)

    def save(folder: Path) -> None:
        if replay is not None and task.buffer == "holdall":
            files = importlib.import_module("holdall.sb3.checkpoint").training_files(model, None)
            replay.memory.save(folder / "run", attach=files).result()
            return
        model.save(folder / "model.zip")
        if replay is not None:
            model.save_replay_buffer(folder / "buffer.pkl")

    emit(ChildProgress(0, 1, "save"))
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        figures = measure_save(save, Path(folder))
    peaks["save"] = peak_bytes()
    return figures


def fit_late_slope(readings: list[tuple[int, int]]) -> float | None:
    """Return the bytes per transition, from the readings without their first quarter. None: too few readings."""
    late = readings[len(readings) // 4 :]
    if len(late) < 3:
        return None
    transitions, nbytes = np.array(late, np.float64).T
    return float(np.polyfit(transitions, nbytes, 1)[0])


def main() -> None:
    """Read the task, train, and print the result."""
    task = Task(**json.loads(sys.argv[1]))
    emit(ChildProgress(0, 1, "construct"))
    emit(measure_training(task))


if __name__ == "__main__":
    main()

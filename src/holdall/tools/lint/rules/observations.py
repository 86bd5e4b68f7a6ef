"""Rules about observations: their dtypes, the copies that rollouts make, and batches on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine, format_share
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.run import locate_model
from holdall.tools.plan.algorithms import ROLLOUTS_KEEP_DTYPES, parse_version
from holdall.tools.probe.snapshot import FoundModel, Snapshot
from holdall.units import format_bytes

_MAX_FLATTEN_SHARE = 0.25
_MAX_VRAM_SHARE = 0.85
_MIN_LARGE_BATCH_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class _Part:
    """A Box of an observation."""

    name: str
    """Empty if the observation is one Box."""
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    bounds: tuple[float | None, float | None]

    @property
    def nbytes(self) -> int:
        """Bytes of one observation."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_image(self) -> bool:
        """Whether Stable-Baselines3 takes this part for an image."""
        return len(self.shape) == 3 and self.dtype == np.uint8


def _list_parts(model: FoundModel) -> list[_Part]:
    """Return the boxes of a model's observations. Other spaces are left out, because they take only a few bytes."""
    space = model.observation_space or {}
    children = space["spaces"] if space.get("kind") == "dict" else {"": space}
    return [
        _Part(name, tuple(child["shape"]), np.dtype(child["dtype"]), (child["low"], child["high"]))
        for name, child in children.items()
        if child is not None and child.get("kind") == "box"
    ]


class RolloutStoresImagesAsFloat(Rule):
    """Finds images in the rollouts of a Stable-Baselines3 that stores them as float32.

    Why: Up to version 2.7.0, a rollout stores every observation as float32: four bytes for each byte of an image.
    Fix: Upgrade: `pip install 'stable-baselines3>=2.7.1'` stores images as they are.

    Bad (sb3_version=2.7.0):
        from stable_baselines3 import PPO
        from stable_baselines3.common.envs import FakeImageEnv
        PPO("CnnPolicy", FakeImageEnv(), n_steps=64).learn(100_000)

    Good:
        from stable_baselines3 import PPO
        from stable_baselines3.common.envs import FakeImageEnv
        PPO("CnnPolicy", FakeImageEnv(), n_steps=64).learn(100_000)
    """

    code = "M04"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look at the version and at the images of the observation."""
        version = run.versions.get("stable_baselines3")
        if version is None or parse_version(version) >= ROLLOUTS_KEEP_DTYPES:
            return
        for model in run.learning_models:
            buffer = run.find_buffer(model)
            image_bytes = sum(part.nbytes for part in _list_parts(model) if part.is_image)
            if not image_bytes or buffer is None or buffer.kind != "rollout" or buffer.transitions is None:
                continue
            saved = 3 * image_bytes * buffer.transitions
            text = (
                f"Stable-Baselines3 {version} stores the images of this rollout as float32: "
                f"{format_bytes(buffer.nbytes)}, of which {format_bytes(saved)} are not needed from 2.7.1 on"
            )
            yield Match(text, locate_model(model), {"rollout_bytes": buffer.nbytes, "saved_bytes": saved})


class FlattenDoublesRollout(Rule):
    """Finds rollouts whose flattening copies more than a quarter of the memory.

    Why: Before the first minibatch, Stable-Baselines3 joins the axes of steps and environments. With more than one
    environment that copies the observations, so for a moment they are in memory twice, at every update.
    Fix: A smaller `n_steps`, one environment (then nothing is copied), or `holdall.sb3.RolloutBuffer`.

    Bad (limit_bytes=10MB):
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.envs import FakeImageEnv
        env = make_vec_env(FakeImageEnv, n_envs=2)
        PPO("CnnPolicy", env, n_steps=512, batch_size=64).learn(100_000)

    Good (limit_bytes=10MB):
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.envs import FakeImageEnv
        env = make_vec_env(FakeImageEnv, n_envs=2)
        PPO("CnnPolicy", env, n_steps=128, batch_size=64).learn(100_000)
    """

    code = "M05"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the copy with the memory of the machine."""
        for model in run.learning_models:
            buffer = run.find_buffer(model)
            if buffer is None or buffer.flattened_bytes <= _MAX_FLATTEN_SHARE * machine.limit_bytes:
                continue
            peak_bytes = buffer.nbytes + buffer.flattened_bytes
            text = (
                f"n_steps x n_envs = {buffer.transitions:,}: the rollout takes {format_bytes(buffer.nbytes)}, and "
                f"{format_bytes(buffer.flattened_bytes)} more while it is flattened, together "
                f"{format_share(peak_bytes, machine.limit_bytes)} of {machine.limit_name}"
            )
            numbers = {
                "rollout_bytes": buffer.nbytes,
                "flatten_bytes": buffer.flattened_bytes,
                "limit_bytes": machine.limit_bytes,
            }
            yield Match(text, locate_model(model), numbers)


class ObservationsWiderThanNeeded(Rule):
    """Finds images of 0 to 255 that are declared as floats, and float64 observations.

    Why: Buffers store the dtype of the space. An image of whole numbers from 0 to 255 takes four (float32) or eight
    (float64) times its bytes, and the network computes in float32 in any case.
    Fix: Declare images as `np.uint8` and vectors as `np.float32`, and return them in this dtype.

    Bad:
        import gymnasium as gym
        import numpy as np
        from gymnasium import spaces
        from stable_baselines3 import DQN

        class Screen(gym.Env):
            observation_space = spaces.Box(0, 255, (36, 36, 3), np.float32)
            action_space = spaces.Discrete(4)

        DQN("MlpPolicy", Screen(), buffer_size=100).learn(100_000)

    Good:
        import gymnasium as gym
        import numpy as np
        from gymnasium import spaces
        from stable_baselines3 import DQN

        class Screen(gym.Env):
            observation_space = spaces.Box(0, 255, (36, 36, 3), np.uint8)
            action_space = spaces.Discrete(4)

        DQN("CnnPolicy", Screen(), buffer_size=100).learn(100_000)
    """

    code = "M06"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look at the dtypes of the observation space."""
        for model in run.learning_models:
            for part in _list_parts(model):
                is_image = len(part.shape) == 3 and part.bounds == (0, 255)
                wanted = np.dtype(np.uint8 if is_image else np.float32)
                if part.dtype.kind != "f" or part.dtype.itemsize <= wanted.itemsize:
                    continue
                narrow_bytes = prod(part.shape) * wanted.itemsize
                called = f"observation {part.name!r}" if part.name else "the observation"
                text = (
                    f"{called} of shape {part.shape} is {part.dtype}: {part.nbytes:,} B per step, "
                    f"{narrow_bytes:,} B as {wanted}"
                )
                numbers = {"bytes_per_step": part.nbytes, "narrow_bytes_per_step": narrow_bytes}
                yield Match(text, locate_model(model), numbers)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Bytes of the observations of one batch."""

    stored_bytes: int
    """Bytes in the dtype of the buffer."""
    float_bytes: int
    """Bytes in float32, the dtype that the network gets."""


def _measure_batch(model: FoundModel) -> _Batch | None:
    """Return the size of a batch, or None if the model has no batch size."""
    transitions = model.count("batch_size")
    parts = _list_parts(model)
    if transitions is None or not parts:
        return None
    transitions = min(transitions, model.rollout_transitions or transitions)
    observations = transitions if model.is_on_policy else 2 * transitions
    stored_bytes = sum(part.nbytes for part in parts) * observations
    float_bytes = sum(prod(part.shape) for part in parts) * 4 * observations
    return _Batch(stored_bytes, float_bytes)


class BatchBeyondVram(Rule):
    """Compares one batch, as the network gets it, with the GPU's memory. It needs `--vram`.

    Why: Images are stored as bytes and reach the network as float32, four times as large. An off-policy batch contains
    the next observations, too. Activations, gradients, the optimizer and the CUDA context need memory in addition.
    Fix: A smaller `batch_size`.

    Bad (vram_bytes=10MB, device=cuda):
        from stable_baselines3 import DQN
        from stable_baselines3.common.envs import FakeImageEnv
        DQN("CnnPolicy", FakeImageEnv(), buffer_size=1_000, batch_size=1_024).learn(100_000)

    Good (vram_bytes=10MB, device=cuda):
        from stable_baselines3 import DQN
        from stable_baselines3.common.envs import FakeImageEnv
        DQN("CnnPolicy", FakeImageEnv(), buffer_size=1_000, batch_size=64).learn(100_000)
    """

    code = "M15"
    severity = Severity.WARNING

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Compare the batch as float32 with the GPU's memory."""
        if machine.vram_bytes is None:
            return
        for model in run.learning_models:
            batch = _measure_batch(model)
            if batch is None or model.device == "cpu" or batch.float_bytes <= _MAX_VRAM_SHARE * machine.vram_bytes:
                continue
            text = (
                f"the observations of a batch take {format_bytes(batch.float_bytes)} as float32, but the GPU has "
                f"{format_bytes(machine.vram_bytes)}"
            )
            numbers = {"batch_bytes": batch.float_bytes, "vram_bytes": machine.vram_bytes}
            yield Match(text, locate_model(model), numbers)


class ImageBatchBecomesFloat(Rule):
    """Reports the size of a large batch of images as the network gets it.

    Why: An estimate from the stored bytes is four times too small, because the network gets float32. Activations that
    the layers keep for the backward pass need memory in addition.
    Fix: Plan with the larger figure, or use a smaller `batch_size`.

    Bad:
        from stable_baselines3 import DQN
        from stable_baselines3.common.envs import FakeImageEnv
        DQN("CnnPolicy", FakeImageEnv(), buffer_size=1_000, batch_size=131_072).learn(100_000)

    Good:
        from stable_baselines3 import DQN
        from stable_baselines3.common.envs import FakeImageEnv
        DQN("CnnPolicy", FakeImageEnv(), buffer_size=1_000, batch_size=256).learn(100_000)
    """

    code = "M17"
    severity = Severity.INFO

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Look at batches of images of 1 GiB or more."""
        for model in run.learning_models:
            batch = _measure_batch(model)
            has_images = any(part.is_image for part in _list_parts(model))
            if batch is None or not has_images or batch.float_bytes < _MIN_LARGE_BATCH_BYTES:
                continue
            text = (
                f"the observations of a batch are stored in {format_bytes(batch.stored_bytes)} and reach the network "
                f"as float32, {format_bytes(batch.float_bytes)}"
            )
            numbers = {"stored_bytes": batch.stored_bytes, "batch_bytes": batch.float_bytes}
            yield Match(text, locate_model(model), numbers)

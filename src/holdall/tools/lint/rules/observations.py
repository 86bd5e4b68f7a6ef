"""Rules about observations: their dtypes, the copies that rollouts make, and batches on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import Machine, format_share, format_size
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.subjects import TrainedModel

_ROLLOUTS_KEEP_DTYPES = (2, 7, 1)
"""First version of Stable-Baselines3 whose rollouts store observations in their own dtype."""
_MAX_FLATTEN_SHARE = 0.25
_MAX_VRAM_SHARE = 0.85
_MIN_LARGE_BATCH_BYTES = 2**30


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

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Look at the version and at the images of the observation."""
        is_old = bool(model.sb3_version) and model.sb3_version < _ROLLOUTS_KEEP_DTYPES
        images = [part for part in model.observation if part.is_image_space]
        buffer = model.buffer
        if not is_old or not images or buffer is None or buffer.kind != "rollout" or buffer.capacity is None:
            return
        saved = 3 * sum(part.nbytes for part in images) * buffer.capacity
        version = ".".join(map(str, model.sb3_version))
        text = (
            f"Stable-Baselines3 {version} stores the images of this rollout as float32: {format_size(buffer.nbytes)}, "
            f"of which {format_size(saved)} are not needed from 2.7.1 on"
        )
        yield Match(text, buffer.place, {"rollout_bytes": buffer.nbytes, "saved_bytes": saved})


class FlattenDoublesRollout(Rule):
    """Finds rollouts that are so large that the copy of flattening matters.

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

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Compare the copy with the memory of the machine."""
        buffer = model.buffer
        if buffer is None or buffer.flatten_bytes <= _MAX_FLATTEN_SHARE * machine.limit_bytes:
            return
        text = (
            f"n_steps x n_envs = {buffer.capacity:,}: the rollout takes {format_size(buffer.nbytes)}, and "
            f"{format_size(buffer.flatten_bytes)} more while it is flattened, together "
            f"{format_share(buffer.peak_bytes, machine.limit_bytes)} of {machine.limit_name}"
        )
        numbers = {
            "rollout_bytes": buffer.nbytes,
            "flatten_bytes": buffer.flatten_bytes,
            "limit_bytes": machine.limit_bytes,
        }
        yield Match(text, buffer.place, numbers)


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

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Look at the dtypes of the observation space."""
        for part in model.observation:
            is_image = len(part.shape) == 3 and part.bounds == (0, 255)
            wanted = np.dtype(np.uint8 if is_image else np.float32)
            if part.dtype.kind != "f" or part.dtype.itemsize <= wanted.itemsize:
                continue
            narrow_bytes = part.elements * wanted.itemsize
            called = f"observation {part.name!r}" if part.name else "the observation"
            text = (
                f"{called} of shape {part.shape} is {part.dtype}: {part.nbytes:,} B per step, "
                f"{narrow_bytes:,} B as {wanted}"
            )
            yield Match(text, model.place, {"bytes_per_step": part.nbytes, "narrow_bytes_per_step": narrow_bytes})


def _batch_bytes(model: TrainedModel) -> tuple[int, int] | None:
    """Return the bytes of a batch's observations as stored, and as float32, or None if the model has no batch size."""
    batch = model.count("batch_size")
    if batch is None or not model.observation:
        return None
    if model.rollout_steps:
        batch = min(batch, model.rollout_steps)
    observations = batch if model.is_on_policy else 2 * batch
    stored = sum(part.nbytes for part in model.observation) * observations
    as_float = sum(part.elements for part in model.observation) * 4 * observations
    return stored, as_float


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

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Compare the batch as float32 with the GPU's memory."""
        sizes = _batch_bytes(model)
        if sizes is None or machine.vram_bytes is None or model.device == "cpu":
            return
        if sizes[1] > _MAX_VRAM_SHARE * machine.vram_bytes:
            text = (
                f"the observations of a batch take {format_size(sizes[1])} as float32, but the GPU has "
                f"{format_size(machine.vram_bytes)}"
            )
            yield Match(text, model.place, {"batch_bytes": sizes[1], "vram_bytes": machine.vram_bytes})


class ImageBatchBecomesFloat(Rule):
    """Reports the size of a large batch of images as the network gets it.

    Why: A batch that is computed from the bytes that are stored is four times too small, because the network gets
    float32. What the layers keep for the backward pass needs memory in addition.
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

    def check_model(self, model: TrainedModel, machine: Machine) -> Iterator[Match]:
        """Look at batches of images of 1 GiB or more."""
        sizes = _batch_bytes(model)
        has_images = any(part.is_image_space for part in model.observation)
        if sizes is None or not has_images or sizes[1] < _MIN_LARGE_BATCH_BYTES:
            return
        text = (
            f"the observations of a batch are stored in {format_size(sizes[0])} and reach the network as float32, "
            f"{format_size(sizes[1])}"
        )
        yield Match(text, model.place, {"stored_bytes": sizes[0], "batch_bytes": sizes[1]})

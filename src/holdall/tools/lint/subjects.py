"""What the rules about runs look at: a model with its environments and callbacks, and a buffer, as plain data.

`described.py` makes these from a snapshot of a run. Every value is the one that the run had when it was about to train.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from holdall.tools.lint.finding import Place

_MIN_SQUARE_SIDE = 64
"""Pixels from which a square array without a telling name is taken for a picture."""
_MIN_SIDE = 32
_MIN_SHORT_SIDE = 24
_MAX_CHANNELS = 16
_PICTURE_NAME = re.compile(r"frame|image|img|screen|pixel", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoredField:
    """One array that a buffer keeps, or one part of an observation, for one transition."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bounds: tuple[float, float] | None = None
    """Lowest and highest value that the space declares, if it declares the same for all elements."""

    @property
    def elements(self) -> int:
        """Numbers in one transition."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one transition."""
        return self.elements * self.dtype.itemsize

    @property
    def is_image_space(self) -> bool:
        """Whether Stable-Baselines3 takes this part of an observation for an image."""
        return len(self.shape) == 3 and self.dtype == np.uint8

    @property
    def looks_like_image(self) -> bool:
        """Whether the shape, or the name, is that of a picture or a stack of pictures."""
        sides = sorted(self.shape)
        if len(sides) == 2:
            is_square = sides[0] == sides[1] >= _MIN_SQUARE_SIDE
            return sides[0] >= _MIN_SIDE and (is_square or _PICTURE_NAME.search(self.name) is not None)
        has_sides = len(sides) >= 3 and sides[-1] >= _MIN_SIDE and sides[-2] >= _MIN_SHORT_SIDE
        return has_sides and sides[0] <= _MAX_CHANNELS


@dataclass(frozen=True, slots=True)
class TrainedBuffer:
    """A buffer of a run: of a model, of another library, or of the program's own."""

    title: str
    """Words for messages, such as `the replay buffer`."""
    place: Place
    kind: str
    """`replay`, `rollout`, `arrays`, `deque`, `list`; `memory` for a memory of holdall; `refused` if it did not fit."""
    library: str
    """`sb3`, `cleanrl`, `torchrl`, `holdall`; empty for the program's own."""
    capacity: int | None
    """Transitions that fit; None if unknown."""
    nbytes: int
    """Bytes of the full buffer. Of a memory of holdall: its budget in bytes, or 0."""
    n_envs: int = 1
    steps: int | None = None
    """Transitions that the run adds; None if unknown."""
    fields: tuple[StoredField, ...] = ()
    flatten_bytes: int = 0
    """Bytes that Stable-Baselines3 copies while it flattens a rollout."""
    frame_stack: int = 1
    is_exact: bool = True
    device: str = "cpu"
    """`cpu`, a GPU, or `disk`."""

    @property
    def is_filled(self) -> bool:
        """Whether the run certainly fills the buffer. Rollouts are always completed."""
        is_long = self.steps is not None and self.capacity is not None and self.steps >= self.capacity
        return self.kind in {"rollout", "memory", "refused"} or is_long

    @property
    def is_certain(self) -> bool:
        """Whether the memory that the run needs is certain: the number of steps is known, or does not matter."""
        return self.is_filled or self.steps is not None

    @property
    def resident_bytes(self) -> int:
        """Bytes in RAM at the end of the run. Pages that are never written cost nothing."""
        if self.is_filled or self.steps is None or not self.capacity:
            return self.nbytes
        return self.nbytes * self.steps // self.capacity

    @property
    def peak_bytes(self) -> int:
        """Bytes in RAM at most, with the copy that flattening makes."""
        return self.resident_bytes + self.flatten_bytes

    @property
    def repeated_bytes(self) -> int:
        """Bytes of next observations and of frames of stacks that the full buffer holds more than once."""
        if self.kind not in {"replay", "arrays"} or self.capacity is None or not self.fields:
            return 0
        observations, successors = self._split_observations()
        stored = sum(one.nbytes for one in (*observations, *successors))
        unique = sum(one.nbytes for one in observations) / self.frame_stack
        return int(self.capacity * (stored - unique))

    @property
    def copies_of_frame(self) -> int:
        """Times that the buffer stores each frame, or each observation without a stack."""
        _, successors = self._split_observations()
        return self.frame_stack * (2 if successors else 1)

    def _split_observations(self) -> tuple[list[StoredField], list[StoredField]]:
        """Return the fields of observations and of next observations. The latter are missing in some layouts."""
        if self.library == "sb3":
            observations = [one for one in self.fields if one.name.partition(".")[0] == "observations"]
            successors = [one for one in self.fields if one.name.partition(".")[0] == "next_observations"]
            return observations, successors
        largest = max(self.fields, key=lambda one: one.nbytes)
        alike = [one for one in self.fields if (one.shape, one.dtype) == (largest.shape, largest.dtype)]
        return alike[:1], alike[1:2]


@dataclass(frozen=True, slots=True)
class TrainedCallback:
    """A callback that `learn` gets, directly or inside another callback."""

    kind: str
    settings: Mapping[str, Any]
    shares_env: bool = False
    """Whether the callback evaluates on the environment that the model is trained on."""

    def count(self, name: str) -> int | None:
        """Return a setting that is a positive whole number, or None."""
        return _positive(self.settings.get(name))


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model of Stable-Baselines3 that is about to be trained."""

    algorithm: str
    place: Place
    is_on_policy: bool
    settings: Mapping[str, Any]
    """Attributes of the model, such as `batch_size`."""
    policy: str
    n_envs: int
    device: str = "cpu"
    observation: tuple[StoredField, ...] = ()
    is_subprocess: bool = False
    """Whether each environment runs in a process of its own."""
    frame_stack: int = 1
    episode_steps: int | None = None
    """Time limit of an episode."""
    total_timesteps: int | None = None
    """Steps that `learn` makes from zero; None if unknown."""
    callbacks: tuple[TrainedCallback, ...] = ()
    buffer: TrainedBuffer | None = None
    sb3_version: tuple[int, ...] = field(default=())

    def count(self, name: str) -> int | None:
        """Return a setting that is a positive whole number, or None."""
        return _positive(self.settings.get(name))

    @property
    def rollout_steps(self) -> int | None:
        """Transitions of one rollout: `n_steps` times the number of environments."""
        steps = self.count("n_steps")
        return steps * self.n_envs if self.is_on_policy and steps else None

    @property
    def train_freq(self) -> tuple[int, str] | None:
        """Number and unit (`step` or `episode`) between two phases of updates; None for on-policy models."""
        value = self.settings.get("train_freq")
        if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], int):
            return value[0], str(value[1])
        return (value, "step") if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None  # type: ignore[return-value]  # `is_count` says that it is an int

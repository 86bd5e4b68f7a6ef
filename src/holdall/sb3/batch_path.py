"""The ways in which a replay buffer makes a batch."""

from __future__ import annotations

from enum import Enum


class BatchPath(Enum):
    """How `ReplayBuffer` makes a batch. `ReplayBuffer._choose_path` decides, and nothing else does."""

    DIRECT = "direct"
    """The rows become tensors on the CPU, which share the memory of the rows. For one-step transitions."""

    DEVICE = "device"
    """The memory sends the rows to the GPU of the buffer, where the samples are made."""

    HOST = "host"
    """The rows pass through normalization and `to_torch` as NumPy arrays, as in Stable-Baselines3.

    For `VecNormalize`, for subclasses that override these methods, and on the CPU for n-step returns and hindsight
    goals.
    """

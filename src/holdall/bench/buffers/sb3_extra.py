"""sb3-extra-buffers: Stable-Baselines3's buffers with every observation compressed."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from sb3_extra_buffers.compressed.compressed_replay import CompressedDictReplayBuffer, CompressedReplayBuffer

from holdall.bench.buffers.sb3_own import Sb3Buffer


def opened(observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, method: str) -> Sb3Buffer:
    """Make a buffer with the element type of the space; a Dict has one for all keys, of which bytes are the default."""
    if isinstance(observation, spaces.Dict):
        return Sb3Buffer(CompressedDictReplayBuffer(capacity, observation, action, "cpu", compression_method=method))
    types = {"elem_type": np.dtype(observation.dtype).type, "runs_type": np.uint16}
    return Sb3Buffer(
        CompressedReplayBuffer(capacity, observation, action, "cpu", compression_method=method, dtypes=types)
    )

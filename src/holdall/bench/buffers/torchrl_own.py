"""TorchRL's TensorDictReplayBuffer over a LazyTensorStorage, transition by transition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from holdall.bench.buffers.ways import Buffer
from holdall.bench.trace import Step

_FIELDS = ("reward", "terminated", "truncated")


def opened(observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int) -> TorchrlBuffer:
    """Make a buffer."""
    return TorchrlBuffer(capacity)


class TorchrlBuffer(Buffer):
    """A buffer of TorchRL."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=1)

    def arranged(self, step: Step) -> Any:
        """Make the nested record that TorchRL's collectors make."""
        after = {"obs": _tensors(step.next_obs)} | {name: torch.as_tensor(getattr(step, name)) for name in _FIELDS}
        return TensorDict({"obs": _tensors(step.obs), "action": torch.as_tensor(step.action[0]), "next": after})

    def add(self, arranged: Any) -> None:
        """Add one transition."""
        self.buffer.add(arranged)

    def sample(self, batch_size: int) -> Any:
        """Draw a batch."""
        return self.buffer.sample(batch_size)

    def rows(self, ids: Any) -> dict[str, Any]:
        """Read rows from the storage."""
        batch = self.buffer.storage.get(torch.as_tensor(ids))
        found = {"obs": _plain(batch["obs"]), "next_obs": _plain(batch["next", "obs"]), "action": batch["action"]}
        return found | {name: batch["next", name] for name in _FIELDS}

    def save(self, folder: Path) -> None:
        """Write memory maps."""
        self.buffer.dumps(folder)

    def load(self, folder: Path) -> TorchrlBuffer:
        """Read them into a new buffer."""
        loaded = TorchrlBuffer(self._capacity)
        loaded.buffer.loads(folder)
        return loaded


def _tensors(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {key: _tensors(part) for key, part in observation.items()}
    return torch.as_tensor(np.ascontiguousarray(observation[0]))


def _plain(observed: Any) -> Any:
    return {key: observed[key] for key in observed.keys()} if isinstance(observed, TensorDict) else observed  # noqa: SIM118 a TensorDict iterates over its rows

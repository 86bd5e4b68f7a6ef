"""Tianshou's ReplayBuffer; with `ignore_obs_next`, observations once, and of a stack of frames the last one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from tianshou.data import Batch, ReplayBuffer

from holdall.bench.buffers.ways import Buffer
from holdall.bench.trace import Step


def opened(
    observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, ignore_obs_next: bool = False
) -> TianshouBuffer:
    """Make a buffer; small leading axes of bytes are taken to be stacked frames."""
    settings: dict[str, Any] = {"ignore_obs_next": ignore_obs_next}
    shape = observation.shape or ()
    is_stack = isinstance(observation, spaces.Box) and len(shape) == 3 and shape[0] == 4
    if ignore_obs_next and is_stack:
        settings |= {"stack_num": shape[0], "save_only_last_obs": True}
    return TianshouBuffer(ReplayBuffer(capacity, **settings))


class TianshouBuffer(Buffer):
    """A buffer of Tianshou."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer

    def arranged(self, step: Step) -> Any:
        """Make the record that Tianshou's collector makes."""
        return Batch(
            obs=_lane(step.obs),
            act=step.action[0],
            rew=step.reward[0],
            terminated=step.terminated[0],
            truncated=step.truncated[0],
            obs_next=_lane(step.next_obs),
            info={},
        )

    def add(self, arranged: Any) -> None:
        """Add one transition."""
        self.buffer.add(arranged)

    def sample(self, batch_size: int) -> Any:
        """Draw a batch."""
        batch, _ = self.buffer.sample(batch_size)
        return batch.to_torch_()

    def rows(self, ids: Any) -> dict[str, Any]:
        """Read rows as `sample` does."""
        batch = self.buffer[np.asarray(ids)]
        found = {"obs": _plain(batch.obs), "next_obs": _plain(batch.obs_next), "action": batch.act}
        return found | {"reward": batch.rew, "terminated": batch.terminated, "truncated": batch.truncated}

    def save(self, folder: Path) -> None:
        """Write HDF5."""
        self.buffer.save_hdf5(str(folder / "buffer.h5"))

    def load(self, folder: Path) -> TianshouBuffer:
        """Read it."""
        return TianshouBuffer(ReplayBuffer.load_hdf5(str(folder / "buffer.h5")))


def _lane(observation: Any) -> Any:
    return {key: part[0] for key, part in observation.items()} if isinstance(observation, dict) else observation[0]


def _plain(observed: Any) -> Any:
    return {key: observed[key] for key in observed.keys()} if isinstance(observed, Batch) else observed  # noqa: SIM118 a Batch iterates over its rows

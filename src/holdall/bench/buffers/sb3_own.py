"""Stable-Baselines3's own replay buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from holdall.bench.buffers.ways import Buffer
from holdall.bench.trace import Step


def opened(
    observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int, *, optimize_memory_usage: bool = False
) -> Sb3Buffer:
    """Make a buffer; with `optimize_memory_usage`, Stable-Baselines3 allows no time limits."""
    cls: Any = DictReplayBuffer if isinstance(observation, spaces.Dict) else ReplayBuffer
    settings: dict[str, Any] = {}
    if optimize_memory_usage:
        settings = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    return Sb3Buffer(cls(capacity, observation, action, "cpu", n_envs=1, **settings))


class Sb3Buffer(Buffer):
    """A buffer of Stable-Baselines3, or one that is used like it."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def arranged(self, step: Step) -> Any:
        """Both kinds of ending are `done` to Stable-Baselines3."""
        infos = [{"TimeLimit.truncated": bool(step.truncated[0])}]
        return step.obs, step.next_obs, step.action, step.reward, step.terminated | step.truncated, infos

    def add(self, arranged: Any) -> None:
        """Add one transition."""
        self.buffer.add(*arranged)

    def sample(self, batch_size: int) -> Any:
        """Draw a batch."""
        return self.buffer.sample(batch_size)

    def rows(self, ids: Any) -> dict[str, Any]:
        """Read rows as `sample` does, and the flags from their arrays."""
        batch = self.buffer._get_samples(ids)
        ended, cut = (flags[ids, 0].astype(np.bool_) for flags in (self.buffer.dones, self.buffer.timeouts))
        found = {
            "obs": batch.observations,
            "next_obs": batch.next_observations,
            "action": batch.actions,
            "reward": batch.rewards,
        }
        if not self.buffer.handle_timeout_termination:
            return found | {"done": ended}
        return found | {"terminated": ended & ~cut, "truncated": cut}

    def save(self, folder: Path) -> None:
        """Pickle it, as `model.save_replay_buffer` does."""
        save_to_pkl(folder / "buffer.pkl", self.buffer)

    def load(self, folder: Path) -> Sb3Buffer:
        """Read the pickle."""
        return Sb3Buffer(load_from_pkl(folder / "buffer.pkl"))

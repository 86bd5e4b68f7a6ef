"""cpprb, with every observation stored once (`next_of`) and every episode's end told to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpprb import ReplayBuffer
from gymnasium import spaces

from holdall.bench.buffers.ways import Buffer
from holdall.bench.trace import Step

_FLAGS = ("terminated", "truncated")


def opened(observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int) -> CpprbBuffer:
    """Make a buffer."""
    return CpprbBuffer(observation, action, capacity)


class CpprbBuffer(Buffer):
    """A buffer of cpprb; the keys of a Dict are fields of their own."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any], capacity: int) -> None:
        self._made_of = (observation, action, capacity)
        parts = observation.spaces if isinstance(observation, spaces.Dict) else {"": observation}
        self._observed = {f"obs_{key}": part for key, part in parts.items()}
        self._is_dict = isinstance(observation, spaces.Dict)
        fields: dict[str, Any] = {
            name: {"shape": part.shape, "dtype": part.dtype} for name, part in self._observed.items()
        }
        fields |= {"action": {"shape": action.shape or 1, "dtype": action.dtype}, "reward": {"dtype": np.float32}}
        fields |= {name: {"dtype": np.bool_} for name in _FLAGS}
        self.buffer = ReplayBuffer(capacity, fields, next_of=tuple(self._observed))

    def arranged(self, step: Step) -> Any:
        """Name every field; the flag beside them says whether the episode ends."""
        given = {"action": step.action[0], "reward": step.reward[0]}
        given |= {name: getattr(step, name)[0] for name in _FLAGS}
        for name in self._observed:
            given[name] = self._part(step.obs, name)
            given[f"next_{name}"] = self._part(step.next_obs, name)
        return given, bool(step.terminated[0] or step.truncated[0])

    def add(self, arranged: Any) -> None:
        """Add one transition."""
        given, ends = arranged
        self.buffer.add(**given)
        if ends:
            self.buffer.on_episode_end()

    def sample(self, batch_size: int) -> Any:
        """Draw a batch."""
        return {name: torch.as_tensor(array) for name, array in self.buffer.sample(batch_size).items()}

    def rows(self, ids: Any) -> dict[str, Any]:
        """Read rows as `sample` does."""
        batch = self.buffer._encode_sample(ids)
        found = {name: batch[name] for name in ("action", "reward", *_FLAGS)}
        for side, start in (("obs", ""), ("next_obs", "next_")):
            parts = {name.removeprefix("obs_"): batch[f"{start}{name}"] for name in self._observed}
            found[side] = parts if self._is_dict else parts[""]
        return found

    def save(self, folder: Path) -> None:
        """Write what it calls safe: whole transitions."""
        self.buffer.save_transitions(str(folder / "buffer.npz"), safe=True)

    def load(self, folder: Path) -> CpprbBuffer:
        """Read them into a new buffer."""
        loaded = CpprbBuffer(*self._made_of)
        loaded.buffer.load_transitions(str(folder / "buffer.npz"))
        return loaded

    def _part(self, observation: Any, name: str) -> Any:
        return (observation[name.removeprefix("obs_")] if self._is_dict else observation)[0]

"""Samples on the GPU: what a buffer draws, delivered by the memory's own device path, and ahead of time if asked for.

In:  recipes of batches.  Out: Stable-Baselines3's tuples of tensors.
Invariant: without `prefetch`, tensors are those of Stable-Baselines3 on the same GPU. With it they are those of batches
that were drawn `prefetch` calls earlier: what was added, prioritised or learnt in between is not in them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch as th
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples

from holdall.batch import Batch, Draw
from holdall.delivery import BatchJob, DeviceBatch
from holdall.replay import ReplayMemory


class MadeAhead(deque[BatchJob]):
    """Batches that were drawn, and not asked for yet; a copy of it, or one that is loaded, is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: tuple[Any, ...] = ()

    def require(self, *kind: Any) -> None:
        """Drop batches of another kind: another size, or of a memory that was replaced."""
        if len(kind) != len(self.kind) or any(a is not b and a != b for a, b in zip(kind, self.kind, strict=True)):
            self.clear()
            self.kind = kind

    def __reduce__(self) -> Any:
        return MadeAhead, ()


class OnDevice:
    """The part of the buffers that delivers to a GPU.

    Attributes:
        prefetch: Batches under way besides the one that is asked for.
    """

    memory: ReplayMemory
    device: th.device
    prefetch: int = 0
    _is_dict: bool
    _ahead: MadeAhead

    def _next_recipe(self, batch_size: int) -> Draw:
        """Draw the recipe of a batch, in Stable-Baselines3's order."""
        raise NotImplementedError

    def _draw_at_once(self, batch_size: int) -> BatchJob | None:
        """Draw a batch and begin it in one step, if there is such a way."""
        return None

    def _delivered(self, batch_size: int) -> Any:
        """Return the next samples on the GPU; with `prefetch`, others are drawn and under way then."""
        if not self.prefetch:
            return self._samples_on_device(self._begun(batch_size).receive())
        ahead = self._ahead
        ahead.require(batch_size, self.memory)
        while len(ahead) <= self.prefetch:
            ahead.append(self._begun(batch_size))
        return self._samples_on_device(ahead.popleft().receive())

    def _begun(self, batch_size: int) -> BatchJob:
        """Draw a batch, and have it put together."""
        job = self._draw_at_once(batch_size)
        if job is None:
            job = self.memory.begin(self._next_recipe(batch_size), str(self.device), ahead=self.prefetch > 0)
        return job

    def _followed(self, draw: Draw) -> Any:
        """Return the samples that a recipe describes, made on the GPU."""
        return self._samples_on_device(self.memory.follow(draw, str(self.device)))

    def _samples_on_device(self, batch: Batch) -> Any:
        """Return a batch that is on the GPU as Stable-Baselines3's tuple of tensors."""
        kind: Any = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        ended = batch.ended if isinstance(batch, DeviceBatch) else (batch.terminated > batch.truncated).to(th.float32)
        discounts = () if batch.discount is None else (batch.discount.unsqueeze(1),)
        # In the order of the fields, which is quicker than by name.
        return kind(batch.obs, batch.action, batch.next_obs, ended.unsqueeze(1), batch.reward.unsqueeze(1), *discounts)


def n_step_returns(
    rewards: NDArray[np.float32], ends: NDArray[np.bool_], gamma: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Add up the rewards of each row until its first end, in Stable-Baselines3's order of operations.

    Args:
        rewards: (batch, n), of the steps from some transitions on.
        ends: (batch, n): last steps of episodes, and the newest step.

    Returns:
        Returns and discounts, (batch, 1); and how many steps lie between the first and the last, (batch,).
    """
    n = ends.shape[1]
    last = np.where(ends.any(axis=1), ends.argmax(axis=1), n - 1)
    counts = np.arange(n).reshape(1, -1) <= last[:, None]
    powers = gamma ** np.arange(n, dtype=np.float32).reshape(1, -1)
    returns = (rewards * powers * counts).sum(axis=1, keepdims=True)
    discounts = gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32)
    return returns, discounts, last

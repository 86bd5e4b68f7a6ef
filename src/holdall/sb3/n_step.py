"""n-step returns in Stable-Baselines3: who passes `n_steps` to a buffer, and what the buffer makes of it.

In:  a model's or a buffer's `n_steps`; rewards and ends of steps.  Out: returns and discounts.
Invariant: returns and discounts are those of its `NStepReplayBuffer`, bit for bit.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import stable_baselines3
from numpy.typing import NDArray
from stable_baselines3.common import buffers
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from holdall.errors import ArgumentError
from holdall.units import require_count

_WARNS_OF_STEPS = (2, 9, 1)
"""From this version on Stable-Baselines3 itself warns that it ignores a model's `n_steps`."""
_FRAMES_TO_MODEL = 4
"""Calls between a model that makes its buffer and the buffer's constructor: those of subclasses, at most."""


def require_steps(n_steps: int) -> int:
    """Return `n_steps`, or say why it cannot be."""
    if require_count("n_steps", n_steps, 1) > 1 and "discounts" not in ReplayBufferSamples._fields:
        raise ArgumentError(
            f"n_steps ({n_steps}) above 1 needs Stable-Baselines3 2.7, whose algorithms know the discounts of such "
            f"returns; this is {stable_baselines3.__version__}: run 'pip install -U stable-baselines3'"
        )
    return n_steps


def warn_of_ignored_steps(kind: type, takes_steps: bool) -> None:
    """Warn if the model that makes this buffer wants n-step returns: it sets them up in buffers of its own only."""
    version = tuple(int(part) for part in stable_baselines3.__version__.split(".")[:3] if part.isdigit())
    if version >= _WARNS_OF_STEPS:
        return
    frame = sys._getframe(2)
    for _ in range(_FRAMES_TO_MODEL):
        model = frame.f_locals.get("self")
        if isinstance(model, OffPolicyAlgorithm) and getattr(model, "n_steps", 1) > 1:
            line = f'replay_buffer_kwargs={{"n_steps": {model.n_steps}, "gamma": {model.gamma}}}'
            remedy = f"write {line}" if takes_steps else "it has one-step returns only"
            warnings.warn(
                f"n_steps={model.n_steps} is ignored: Stable-Baselines3 does not pass it to a replay_buffer_class, "
                f"here {kind.__name__}; {remedy}",
                UserWarning,
                stacklevel=2,
            )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


@contextmanager
def made_with(model: OffPolicyAlgorithm, kind: type[buffers.ReplayBuffer], **settings: Any) -> Iterator[None]:
    """While a model is set up: give it a buffer of this kind, and its `n_steps` to the buffer.

    Args:
        settings: Of the buffer; what the model's own `replay_buffer_kwargs` say comes before them.
    """
    asked, n_steps = model.replay_buffer_kwargs, getattr(model, "n_steps", 1)
    if n_steps > 1:
        settings |= {"n_steps": n_steps, "gamma": model.gamma}
        model.n_steps = 1  # else Stable-Baselines3 warns that the buffer does not get it
    model.replay_buffer_class, model.replay_buffer_kwargs = kind, settings | asked
    try:
        yield
    finally:
        model.replay_buffer_kwargs = asked
        if n_steps > 1:
            model.n_steps = n_steps


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

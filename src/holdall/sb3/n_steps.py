"""n-step returns: the same sums as Stable-Baselines3, bit for bit, and checks of its version."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import stable_baselines3
from numpy.typing import NDArray
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from holdall.checks import require_count
from holdall.errors import ArgumentError

_FIRST_VERSION_THAT_WARNS = (2, 9, 1)
"""First version of Stable-Baselines3 that warns by itself that it ignores a model's `n_steps`."""
_MAX_FRAMES_TO_MODEL = 4
"""Maximum number of calls between the constructor of a model and that of its buffer. Subclasses add such calls."""


def require_steps(n_steps: int) -> int:
    """Return `n_steps`. Raise ArgumentError if this version of Stable-Baselines3 has no n-step returns."""
    if require_count("n_steps", n_steps, 1) > 1 and "discounts" not in ReplayBufferSamples._fields:
        raise ArgumentError(
            f"n_steps ({n_steps}) above 1 needs Stable-Baselines3 2.7, whose algorithms know the discounts of such "
            f"returns; this is {stable_baselines3.__version__}. Run 'pip install -U stable-baselines3'."
        )
    return n_steps


def warn_of_ignored_steps(buffer: str, *, accepts_n_steps: bool) -> None:
    """Warn if a model with n-step returns makes the buffer. Stable-Baselines3 passes `n_steps` only to its own buffers.

    Args:
        buffer: Name of the buffer's class, whose constructor calls this function.
        accepts_n_steps: Whether the class accepts `n_steps` itself.
    """
    if _parse_version() >= _FIRST_VERSION_THAT_WARNS:
        return
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES_TO_MODEL):
        model = frame.f_locals.get("self")
        if isinstance(model, OffPolicyAlgorithm) and getattr(model, "n_steps", 1) > 1:
            line = f'replay_buffer_kwargs={{"n_steps": {model.n_steps}, "gamma": {model.gamma}}}'
            remedy = f"write {line}" if accepts_n_steps else "it has one-step returns only"
            warnings.warn(
                f"n_steps={model.n_steps} is ignored: Stable-Baselines3 does not pass it to a replay_buffer_class, "
                f"here {buffer}; {remedy}",
                UserWarning,
                stacklevel=2,
            )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def _parse_version() -> tuple[int, ...]:
    return tuple(int(part) for part in stable_baselines3.__version__.split(".")[:3] if part.isdigit())


def sum_rewards(
    rewards: NDArray[np.float32], ends: NDArray[np.bool_], gamma: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Sum the rewards of each row until its first end, in Stable-Baselines3's order of operations.

    Args:
        rewards: Rewards of n consecutive steps, (batch, n).
        ends: Whether a step is the last one of its episode, or the newest step, (batch, n).

    Returns:
        Returns and discounts, (batch, 1), and the position of the last step in each row, (batch,).
    """
    n = ends.shape[1]
    last = np.where(ends.any(axis=1), ends.argmax(axis=1), n - 1)
    counts = np.arange(n).reshape(1, -1) <= last[:, None]
    powers = gamma ** np.arange(n, dtype=np.float32).reshape(1, -1)
    returns = (rewards * powers * counts).sum(axis=1, keepdims=True)
    discounts = gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32)
    return returns, discounts, last

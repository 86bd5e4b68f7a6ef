"""What sampling returns.

In: nothing.  Out: a record that belongs to the caller; holdall never writes to it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """Transitions side by side: every array has the batch as its first axis.

    `obs`, `next_obs`, `action` and `extras` have the nesting of their spaces. Arrays are
    NumPy's, or torch tensors on the memory's device; `ids` are always NumPy's, since they
    are handed back to the memory and not to a network.
    """

    obs: Any
    action: Any
    reward: Any  # (batch,)
    next_obs: Any
    terminated: Any  # (batch,) bool
    truncated: Any  # (batch,) bool
    extras: dict[str, Any]
    ids: NDArray[np.int64]  # (batch,)
    weights: Any  # (batch,) float32, importance weights; ones where all draws are equal

    def __len__(self) -> int:
        return len(self.ids)

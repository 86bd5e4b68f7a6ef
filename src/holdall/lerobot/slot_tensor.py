"""SlotTensor: one field of a buffer as a tensor whose rows are read when they are indexed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class SlotTensor:
    """The rows of one field by slot, as LeRobot's buffer shows its tensors. Rows are copies.

    Args:
        count: Number of slots that have a row.
        read: Returns the rows of slots.
    """

    def __init__(self, count: int, read: Callable[[NDArray[np.int64]], torch.Tensor]) -> None:
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Return the rows of an integer, a slice, a list, or a tensor of integers or flags."""
        if isinstance(key, torch.Tensor):
            key = key.cpu().numpy()
        slots = np.arange(self._count)[key]
        rows = self._read(slots.reshape(-1))
        return rows.reshape((*slots.shape, *rows.shape[1:]))

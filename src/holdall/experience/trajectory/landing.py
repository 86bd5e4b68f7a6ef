"""Landing: the fields of a minibatch, filled where the caller will use them.

In:  leaves, and functions that fill rows of them.  Out: arrays, or tensors on a device.
Invariant: a minibatch belongs to the caller. On the host all of it is one block, used again once the
caller let go of it; to a GPU it goes piece by piece through a few pinned slots, and never exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.experience.delivery.assemble import ALIGNMENT_BYTES, Delivery, Staging
from holdall.schema import Array, Leaf

if TYPE_CHECKING:
    import torch

    from holdall.experience.trajectory.pinned import PinnedRing

Fill = Callable[[int, int, Array], None]
"""Fills an array with rows [first, end) of the minibatch."""

_KEPT_BYTES = 64 * 2**20
"""Host memory of minibatches that is kept between updates; what is larger is quickly had again beside its use."""


class Landing:
    """Brings minibatches to one device; None stands for NumPy arrays."""

    def __init__(self, device: str | None, leaves: list[Leaf]) -> None:
        self._delivery = Delivery(device, leaves)
        self._staging = Staging()
        self._gpu: _Gpu | None = None
        if device is not None and not device.startswith("cpu"):
            self._gpu = _Gpu(device, max((leaf.nbytes for leaf in leaves), default=0))

    def land(self, rows: int, fields: Sequence[tuple[Leaf, Fill]]) -> list[Any]:
        """Return one array or tensor of `rows` rows per field."""
        if self._gpu is not None:
            return self._gpu.land(rows, fields)
        sizes = [-(-rows * leaf.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for leaf, _ in fields]
        block = self._staging.take(sum(sizes))
        arrays, start = [], 0
        for (leaf, fill), size in zip(fields, sizes, strict=True):
            array = block[start : start + rows * leaf.nbytes].view(leaf.dtype).reshape(rows, *leaf.shape)
            fill(0, rows, array)
            arrays.append(self._delivery.hand_over(array))
            start += size
        return arrays

    def require(self, leaf: Leaf) -> None:
        """Refuse a leaf that cannot be brought to the device."""
        self._delivery.require(leaf)

    def rest(self) -> None:
        """Let go of large blocks, for the time until the next update."""
        if self._staging.nbytes > _KEPT_BYTES:
            self._staging = Staging()

    def arrays(self) -> list[Array]:
        """Return the host arrays kept for the next minibatches; pinned slots are torch's."""
        return [*self._staging.arrays()]

    @property
    def nbytes(self) -> int:
        """Host memory kept for the next minibatches."""
        return self._staging.nbytes if self._gpu is None else self._gpu.ring.nbytes


class _Gpu:
    """The way to a GPU: filled in pieces, each on its way while the next one is filled."""

    def __init__(self, device: str, row_bytes: int) -> None:
        import torch  # noqa: PLC0415  heavy, and only for those who ask for tensors

        from holdall.experience.trajectory.pinned import SLOT_BYTES, PinnedRing  # noqa: PLC0415  it imports torch

        self._torch = torch
        self._device: torch.device = torch.device(device)
        self.ring: PinnedRing = PinnedRing(self._device, max(SLOT_BYTES, row_bytes))

    def land(self, rows: int, fields: Sequence[tuple[Leaf, Fill]]) -> list[torch.Tensor]:
        """Return one tensor per field; its copies are under way on the current stream."""
        tensors = []
        for leaf, fill in fields:
            dtype = self._torch.from_numpy(np.empty(0, leaf.dtype)).dtype
            tensor = self._torch.empty((rows, *leaf.shape), dtype=dtype, device=self._device)
            step = max(1, self.ring.slot_bytes // max(leaf.nbytes, 1))
            for first in range(0, rows, step):
                end = min(first + step, rows)
                staged = self.ring.take((end - first) * leaf.nbytes)
                shape = (end - first, *leaf.shape)
                fill(first, end, staged.numpy().view(leaf.dtype).reshape(shape))
                tensor[first:end].copy_(staged.view(dtype).reshape(shape), non_blocking=True)
            tensors.append(tensor)
        self.ring.next_slot()
        return tensors

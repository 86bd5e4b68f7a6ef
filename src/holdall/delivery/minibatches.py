"""Minibatches of rollouts: rows of several fields, gathered into new arrays or tensors.

    HostMinibatches      NumPy arrays, or torch tensors on the CPU that share their memory
    DeviceMinibatches    torch tensors on another device, filled through pinned memory

A minibatch belongs to the caller. Its memory is used again only when no array or tensor refers to it any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall._native import ArrayPool
from holdall.batch import import_torch
from holdall.delivery import check_device
from holdall.delivery.host import require_torch_dtype
from holdall.schema import Array, Leaf

if TYPE_CHECKING:
    import torch

    from holdall.delivery.staging import Fill, Staging

_MAX_KEPT_BYTES = 4 * 2**30
"""Maximum memory of earlier minibatches that is kept for new ones while a rollout is used."""
_MAX_IDLE_BYTES = 64 * 2**20
"""Maximum memory of earlier minibatches that is kept while the next rollout is collected."""
_ALIGNMENT_BYTES = 256

Gather = Callable[[NDArray[np.int64], Array], object]
"""Copies the rows of a field at given places to an array."""


class Field(NamedTuple):
    """One field of a minibatch."""

    leaf: Leaf
    gather: Gather


class Minibatches(ABC):
    """Builder of minibatches for one device."""

    @abstractmethod
    def deliver(self, places: NDArray[np.int64], fields: Sequence[Field]) -> list[Any]:
        """Return the rows at `places`: one array or tensor per field."""

    @abstractmethod
    def release(self) -> None:
        """Free memory that is kept for the next minibatches, if it is large."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Host memory that is kept for the next minibatches."""

    @property
    def device(self) -> torch.device | None:
        """The device of the minibatches, or None if they are on the host."""
        return None

    @property
    def gives_tensors(self) -> bool:
        """Whether minibatches are tensors. Otherwise they are NumPy arrays."""
        return True


def new_minibatches(device: str | None, leaves: Sequence[Leaf]) -> Minibatches:
    """Return a builder of minibatches of `leaves`: tensors on `device`, or NumPy arrays if `device` is None.

    Raise ArgumentError if torch does not have the device, or a dtype of a leaf.
    """
    if device is None:
        return HostMinibatches(as_tensors=False)
    torch_device = check_device(device, "device")
    for leaf in leaves:
        require_torch_dtype(leaf)
    if torch_device.type == "cpu":
        return HostMinibatches(as_tensors=True)
    return DeviceMinibatches(torch_device, leaves)


class HostMinibatches(Minibatches):
    """Minibatches on the host.

    Args:
        as_tensors: Return torch tensors that share the memory of the arrays.
    """

    def __init__(self, *, as_tensors: bool) -> None:
        self._pool = ArrayPool(_MAX_KEPT_BYTES)
        self._as_tensor: Any = import_torch().from_numpy if as_tensors else None

    def deliver(self, places: NDArray[np.int64], fields: Sequence[Field]) -> list[Any]:
        """See `Minibatches`."""
        delivered = []
        for leaf, gather in fields:
            array = self._pool.empty((len(places), *leaf.shape), leaf.dtype)
            gather(places, array)
            delivered.append(array if self._as_tensor is None else self._as_tensor(array))
        return delivered

    @property
    def gives_tensors(self) -> bool:
        """See `Minibatches`."""
        return self._as_tensor is not None

    def release(self) -> None:
        """See `Minibatches`."""
        if self._pool.kept_bytes > _MAX_IDLE_BYTES:
            self._pool.clear()

    @property
    def nbytes(self) -> int:
        """See `Minibatches`."""
        return self._pool.kept_bytes


class _Piece(NamedTuple):
    """A part of a field of a minibatch."""

    start: int  # First byte in the memory of the minibatch.
    nbytes: int
    fill: Fill


class DeviceMinibatches(Minibatches):
    """Minibatches on a device whose memory is not the host's.

    Rows are gathered into pinned memory and copied from there on the caller's stream. Large fields are sent in pieces:
    while one piece is sent, the next one is gathered. So a minibatch of any size needs the same pinned memory.

    Args:
        leaves: Fields of the minibatches.
        slot_bytes: Minimum size of a slot of pinned memory. A slot also has room for one row of each leaf.
    """

    def __init__(self, device: torch.device, leaves: Sequence[Leaf], slot_bytes: int | None = None) -> None:
        from holdall.delivery.staging import SLOT_BYTES, Staging  # noqa: PLC0415  It imports torch.

        self._torch = import_torch()
        self._device = device
        # A piece consists of whole rows.
        self._piece_bytes = max([slot_bytes or SLOT_BYTES, *(leaf.nbytes for leaf in leaves)])
        self._staging: Staging = Staging(device, self._piece_bytes)

    @property
    def device(self) -> torch.device:
        """See `Minibatches`."""
        return self._device

    def deliver(self, places: NDArray[np.int64], fields: Sequence[Field]) -> list[Any]:
        """See `Minibatches`."""
        pieces: list[_Piece] = []
        starts = []
        end = 0
        for field in fields:
            starts.append(end)
            pieces += self._split(end, places, field)
            end += -(-len(places) * field.leaf.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        block = self._torch.empty(end, dtype=self._torch.uint8, device=self._device)
        self._send(block, pieces)
        return [self._view(block, start, len(places), field.leaf) for start, field in zip(starts, fields, strict=True)]

    def release(self) -> None:
        """Do nothing: the pinned memory is small, so it is kept."""

    @property
    def nbytes(self) -> int:
        """See `Minibatches`."""
        return self._staging.nbytes

    def _split(self, start: int, places: NDArray[np.int64], field: Field) -> list[_Piece]:
        """Return the pieces of a field. Each piece consists of whole rows."""
        row_bytes = field.leaf.nbytes
        rows = max(1, self._piece_bytes // max(row_bytes, 1))
        parts = [(first, places[first : first + rows]) for first in range(0, len(places), rows)]
        return [
            _Piece(start + first * row_bytes, len(part) * row_bytes, partial(_fill_rows, field, part))
            for first, part in parts
        ]

    def _send(self, block: torch.Tensor, pieces: list[_Piece]) -> None:
        """Copy pieces to `block`. One copy sends as many pieces as fit into a slot of pinned memory."""
        group: list[_Piece] = []
        for piece in pieces:
            if group and piece.start + piece.nbytes - group[0].start > self._piece_bytes:
                self._send_group(block, group)
                group = []
            group.append(piece)
        self._send_group(block, group)

    def _send_group(self, block: torch.Tensor, pieces: list[_Piece]) -> None:
        starts = [piece.start for piece in pieces]
        fills = [piece.fill for piece in pieces]
        sizes = [piece.nbytes for piece in pieces]
        self._staging.copy(block, starts, fills, sizes)

    def _view(self, block: torch.Tensor, start: int, rows: int, leaf: Leaf) -> torch.Tensor:
        dtype = self._torch.from_numpy(np.empty(0, leaf.dtype)).dtype
        return block[start : start + rows * leaf.nbytes].view(dtype).view(rows, *leaf.shape)


def _fill_rows(field: Field, places: NDArray[np.int64], piece: NDArray[np.uint8], _start: int) -> None:
    """Gather rows into `piece`, which is pinned memory. `_start` is 0, because a piece is filled by one call."""
    field.gather(places, piece.view(field.leaf.dtype).reshape(len(places), *field.leaf.shape))

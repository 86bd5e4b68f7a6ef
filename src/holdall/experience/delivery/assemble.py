"""Batches: rows of all fields, brought together for the caller.

In:  places of observations and rows of small fields.  Out: arrays, or tensors on a device.
Invariant: a batch belongs to the caller. Its memory is used again only after the caller let
go of every array and tensor that looks into it.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.errors import ArgumentError, MissingPackageError
from holdall.experience.arena import Bytes, address
from holdall.experience.crew import Crew
from holdall.experience.part import Kernels, Places
from holdall.schema import Array, Leaf

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64
"""Where torch's own tensors begin. Matrix products of floats that begin elsewhere add up in another
order, so that the last bits differ."""
_POOLED_BYTES = 1 << 16
"""Arrays below this are cheap to allocate; above, fresh pages cost more than the copy."""
_POOLED_ARRAYS = 4
"""Arrays of one size that are kept: one in use, one being filled, two for stragglers."""
_POOLED_SIZES = 16
"""Sizes that are kept: a batch has one per large field, and batches of ever new sizes must not pile up."""


class Staging:
    """Memory for batches that is used again when nothing refers to it any more."""

    def __init__(self, most_bytes: int = 1 << 62) -> None:
        self.most = _POOLED_ARRAYS
        self._most_bytes = most_bytes
        self._blocks_by_size: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return `nbytes` bytes that nobody else can see, from an aligned address on."""
        if nbytes < _POOLED_BYTES:
            return _aligned(np.empty(nbytes + ALIGNMENT_BYTES, np.uint8), nbytes)
        with self._lock:
            blocks = self._blocks_by_size[nbytes] = self._blocks_by_size.pop(nbytes, [])
            if len(self._blocks_by_size) > _POOLED_SIZES:
                del self._blocks_by_size[next(iter(self._blocks_by_size))]  # the size not asked for the longest
            for position in range(len(blocks)):
                # One reference by the list, one by the call: no view and no tensor is left.
                if sys.getrefcount(blocks[position]) <= 2:
                    return _aligned(blocks[position], nbytes)
            block = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
            kept = sum(size * len(pooled) for size, pooled in self._blocks_by_size.items())
            if len(blocks) < self.most and kept + nbytes <= self._most_bytes:
                blocks.append(block)
            return _aligned(block, nbytes)

    def arrays(self) -> list[Bytes]:
        """Return the arrays kept for the next batches."""
        with self._lock:
            return [block for blocks in self._blocks_by_size.values() for block in blocks]

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next batches."""
        with self._lock:
            return sum(size * len(blocks) for size, blocks in self._blocks_by_size.items())


class ObservationAssembler:
    """Copies windows of slices into staging: observations and next observations of a batch."""

    def __init__(self, kernels: Kernels, crew: Crew, most_staged_bytes: int) -> None:
        self.staging = Staging(most_staged_bytes)
        self.crew = crew
        self._kernels = kernels

    def assemble(
        self, places: Places, field: int, leaf: Leaf, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Array, Array]:
        """Build observation and next observation of one field for every place; those not wanted stay empty."""
        rows = len(places.segment)
        nbytes = rows * leaf.nbytes
        second = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if all(wanted) else 0
        both = self.staging.take(second + nbytes)
        ends = (both[:nbytes], both[second:])
        obs, next_obs = (
            end.reshape(rows, leaf.nbytes) if want else None for end, want in zip(ends, wanted, strict=True)
        )
        if rows:
            self._kernels.gather(places, field, obs, next_obs, self.crew)
        shape = (rows, *leaf.shape)
        return ends[0].view(leaf.dtype).reshape(shape), ends[1].view(leaf.dtype).reshape(shape)


def _aligned(block: Bytes, nbytes: int) -> Bytes:
    """View `nbytes` bytes of a block from its first aligned address on."""
    start = -address(block) % ALIGNMENT_BYTES
    return block[start : start + nbytes]


class Delivery:
    """Hands arrays over as they are, or as tensors on a device."""

    def __init__(self, device: str | None, leaves: list[Leaf]) -> None:
        self._torch_device: torch.device | None = None
        self._torch: Any = None
        if device is None:
            return
        self._torch = _import_torch()
        try:
            self._torch_device = self._torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"device ({device}) is none that torch knows ({error}); use 'cpu' or 'cuda', or None for NumPy arrays"
            ) from error
        if self._torch_device.type == "cuda" and not self._torch.cuda.is_available():
            raise ArgumentError(
                f"device ({device}): torch finds no CUDA device here; use 'cpu', or None for NumPy arrays"
            )
        for leaf in leaves:
            self.require(leaf)

    @classmethod
    def of(cls, device: str | None, store_device: str | None, leaves: list[Leaf]) -> Delivery:
        """Deliver to the device that the store is on, unless none was named for it."""
        if store_device is not None and device not in {None, store_device}:
            raise ArgumentError(
                f"store_device ({store_device}) and device ({device}) differ; batches are made where the store is, so "
                "leave device out"
            )
        return cls(device if store_device is None else store_device, leaves)

    @property
    def module(self) -> Any:
        """Torch itself, if tensors are asked for."""
        return self._torch

    @property
    def torch_device(self) -> torch.device | None:
        """Where tensors are asked for; None for arrays."""
        return self._torch_device

    def hand_over(self, array: Array) -> Any:
        """Return the array, or a tensor that shares its memory or is its copy on the device."""
        if self._torch_device is None:
            return array
        return self._torch.from_numpy(array).to(self._torch_device)

    def require(self, leaf: Leaf) -> None:
        """Refuse a leaf that cannot be handed over."""
        if self._torch_device is None:
            return
        try:
            self._torch.from_numpy(np.empty(0, leaf.dtype))
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"device ({self._torch_device}): torch has no dtype for {leaf.name or 'the space'} "
                f"({leaf.dtype}); use device=None for NumPy arrays"
            ) from error


def _import_torch() -> Any:
    try:
        import torch  # noqa: PLC0415  heavy, and only for those who ask for tensors
    except ImportError as error:
        raise MissingPackageError(
            "device is given, but torch is not installed; run \"pip install 'holdall[torch]'\" "
            "or use device=None for NumPy arrays"
        ) from error
    return torch

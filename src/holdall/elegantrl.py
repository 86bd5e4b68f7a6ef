"""TrajectoryBuffer: ElegantRL's list of trajectories as tensors on a device, which every update overwrites.

Guarantee: the tensors equal, bit for bit, the concatenated trajectories. An update allocates device memory only if it
has more data than every update before, and never holds the data twice there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError

try:
    import torch
except ImportError as error:
    raise MissingPackageError("holdall.elegantrl needs torch; run \"pip install 'holdall[torch]'\"") from error

from holdall.delivery.staging import SLOT_BYTES, Staging

_ALIGNMENT_BYTES = 256
"""Alignment of device tensors that torch allocates."""
_GROWTH = 1.5
"""Smallest factor by which the device memory grows."""
_REWARDS = 1
"""Index of the rewards in ElegantRL's order: states, rewards, masks, actions, noises."""

Trajectory = Sequence[torch.Tensor]
Item = tuple[torch.Tensor, ...]
"""The tensors of one kind, such as the rewards, of all workers."""


class _Section(NamedTuple):
    """The place of one item in the buffer's memory. `start` and `nbytes` are bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    nbytes: int

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the section of `memory` as a tensor."""
        return memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class TrajectoryBuffer(list[torch.Tensor]):
    """Drop-in for ElegantRL's on-policy buffer, a list: `buffer[0]` has the states of all workers, and so on.

    The next update overwrites the tensors. Clone tensors that you want to keep.

    Args:
        device: Device of the tensors. None for a CUDA device if there is one, else the CPU.
        slot_bytes: Bytes of one of the four slots of pinned memory through which data is sent to a GPU.

    Examples:
        >>> import torch
        >>> from holdall.elegantrl import TrajectoryBuffer
        >>> buffer = TrajectoryBuffer("cpu")
        >>> states, rewards, masks = torch.rand(16, 4, 8), torch.rand(16, 4), torch.ones(16, 4)
        >>> rollout = [states, rewards, masks, torch.rand(16, 4, 2), torch.rand(16, 4, 2)]
        >>> steps, mean_reward = buffer.update_buffer([rollout, rollout])
        >>> steps
        32
    """

    def __init__(self, device: torch.device | str | None = None, slot_bytes: int = SLOT_BYTES) -> None:
        super().__init__()
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise ArgumentError(
                f"device ({device}) is not a device of torch ({error}). Use 'cpu' or 'cuda'."
            ) from error
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ArgumentError(f"device ({device}): torch finds no CUDA device here. Use 'cpu'.")
        if slot_bytes < 1:
            raise ArgumentError(f"slot_bytes ({slot_bytes}) must be at least 1. Pass some MiB.")
        self._staging = None if self.device.type == "cpu" else Staging(self.device, slot_bytes)
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        # Number of trajectories, and shape, dtype and device of every tensor, of the last update that was checked.
        self._checked_forms: list[Any] = []
        self._sections: list[_Section] = []

    @torch.no_grad()
    def update_buffer(self, traj_list: Sequence[Trajectory]) -> tuple[int, float]:
        """Copy trajectories into the buffer. Return the number of steps and the mean reward.

        The mean of rewards on the CPU is computed there, so nothing waits for the device.
        """
        items = self._check(traj_list)
        for group in _group_host_items(items):
            self._send(group, items)
        for item, tensor in zip(items, self, strict=True):
            if item[0].device == tensor.device:
                torch.cat(item, out=tensor)
            elif item[0].device.type != "cpu":
                _copy_parts(item, tensor)
        is_on_host = items[_REWARDS][0].device.type == "cpu"
        rewards = torch.cat(items[_REWARDS]) if is_on_host else self[_REWARDS]
        if not rewards.is_floating_point():
            rewards = rewards.to(torch.float64)
        return self[_REWARDS].shape[0], rewards.mean().item()

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._memory.nbytes

    def _check(self, traj_list: Sequence[Trajectory]) -> list[Item]:
        """Check trajectories, give every item a section, and return the items.

        Trajectories with the forms of the last ones are not checked again.
        """
        try:
            forms = [len(traj_list), *[(t.shape, t.dtype, t.device) for trajectory in traj_list for t in trajectory]]
        except (TypeError, AttributeError) as error:
            raise ArgumentError(
                f"traj_list is a {type(traj_list).__name__} that holds no trajectories ({error}); pass a list of them, "
                "each a list of tensors"
            ) from error
        if forms != self._checked_forms:
            items = _transpose(traj_list)
            self._checked_forms = []  # If memory runs out below, the next update is checked again.
            self._lay_out(items)
            self._checked_forms = forms
        return list(zip(*traj_list, strict=True))

    def _lay_out(self, items: list[Item]) -> None:
        """Give every item a section of the memory. Allocate more memory if there is too little."""
        sections = []
        end = 0
        for item in items:
            shape = (sum(len(tensor) for tensor in item), *item[0].shape[1:])
            section = _Section(shape, item[0].dtype, end, prod(shape) * item[0].itemsize)
            sections.append(section)
            end += -(-section.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if sections == self._sections:
            return
        self.clear()
        self._sections = []
        if end > self._memory.nbytes:
            nbytes = max(end, int(_GROWTH * self._memory.nbytes))
            # The contents are about to be overwritten, so the old memory is freed before new memory is allocated.
            self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._sections = sections
        self.extend(section.view(self._memory) for section in sections)

    def _send(self, group: list[int], items: list[Item]) -> None:
        """Send neighbouring items from the host to the device. Do nothing if the device is the CPU."""
        if self._staging is None:
            return
        starts = []
        sizes = []
        fills = []
        for number in group:
            start = self._sections[number].start
            for tensor in items[number]:
                starts.append(start)
                sizes.append(tensor.nbytes)
                fills.append(partial(_fill, tensor.contiguous().flatten().view(torch.uint8)))
                start += tensor.nbytes
        self._staging.copy(self._memory, starts, fills, sizes)


def _group_host_items(items: list[Item]) -> list[list[int]]:
    """Return the indices of items on the host, in groups of neighbours. A copy of a group changes no other item."""
    on_host = [number for number, item in enumerate(items) if item[0].device.type == "cpu"]
    # In a group of neighbours, the item's index minus its position in `on_host` is constant.
    groups = groupby(enumerate(on_host), lambda pair: pair[1] - pair[0])
    return [[number for _, number in group] for _, group in groups]


def _copy_parts(item: Item, tensor: torch.Tensor) -> None:
    """Copy the tensors of an item from another device."""
    start = 0
    for part in item:
        tensor[start : start + len(part)].copy_(part)
        start += len(part)


def _fill(source: torch.Tensor, piece: NDArray[np.uint8], start: int) -> None:
    """Fill `piece`, which is pinned memory, with the bytes of `source` from `start` on."""
    torch.from_numpy(piece).copy_(source[start : start + len(piece)])


def _transpose(traj_list: Sequence[Trajectory]) -> list[Item]:
    """Return the tensors by kind instead of by worker. Raise ArgumentError if they do not fit together."""
    if not traj_list:
        raise ArgumentError("traj_list is empty; pass at least one trajectory")
    kinds = len(traj_list[0])
    if kinds <= _REWARDS or any(len(trajectory) != kinds for trajectory in traj_list):
        counts = [len(trajectory) for trajectory in traj_list]
        raise ArgumentError(
            f"traj_list has trajectories of {counts} items; all must have the same number, at least states and rewards"
        )
    items: list[Item] = list(zip(*traj_list, strict=True))
    for i, item in enumerate(items):
        first = item[0]
        for worker, tensor in enumerate(item):
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(
                    f"traj_list[{worker}][{i}] is a {type(tensor).__name__}, not a tensor; pass torch.as_tensor(...)"
                )
            if tensor.ndim == 0 or tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
                raise ArgumentError(
                    f"traj_list[{worker}][{i}] has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, the first "
                    f"trajectory's has {tuple(first.shape)} and {first.dtype}; all but the first axis must be equal"
                )
            if tensor.device != first.device:
                raise ArgumentError(
                    f"traj_list[{worker}][{i}] is on {tensor.device}, the first trajectory's on {first.device}; "
                    "bring them to one device"
                )
    return items

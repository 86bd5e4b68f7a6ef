"""TrajectoryBuffer: ElegantRL's list of trajectories as one set of tensors on the device, used again and again.

In:  trajectories, one list of tensors per worker.  Out: a list of tensors, each all workers' items of one kind.
Invariant: the tensors are, bit for bit, what concatenating the items gives. An update copies into place; it allocates
device memory only if it brings more than any update before, and never holds the data twice there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from holdall.errors import ArgumentError, MissingPackageError

try:
    import torch
except ImportError as error:
    raise MissingPackageError("holdall.elegantrl needs torch; run \"pip install 'holdall[torch]'\"") from error

from holdall.delivery import SLOT_BYTES, CopyLoads, CopySpan, DeviceCopier, stream_to

_ALIGNMENT_BYTES = 256
"""Where torch's own device tensors begin at the least."""
_GROWTH = 1.5
_REWARDS = 1  # ElegantRL's order: states, rewards, masks, actions, noises

Trajectory = Sequence[torch.Tensor]
Item = tuple[torch.Tensor, ...]
"""What all workers bring of one kind."""


class _Section(NamedTuple):
    """Where one item lies in the buffer's memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    nbytes: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """View the section in memory that begins with the first one."""
        return memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class TrajectoryBuffer(list[torch.Tensor]):
    """Drop-in for ElegantRL's on-policy buffer, a list: `buffer[0]` are the states of all workers, and so on.

    The next update overwrites the tensors: clone what you want to keep.

    Args:
        device: Where the tensors lie; None for a CUDA device if there is one, else the CPU.
        slot_bytes: Size of a pinned staging slot; there are four.
    """

    def __init__(self, device: torch.device | str | None = None, slot_bytes: int = SLOT_BYTES) -> None:
        super().__init__()
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise ArgumentError(f"device ({device}) is none that torch knows ({error}); use 'cpu' or 'cuda'") from error
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ArgumentError(f"device ({device}): torch finds no CUDA device here; use 'cpu'")
        if slot_bytes < 1:
            raise ArgumentError(f"slot_bytes ({slot_bytes}) must be at least 1; pass some MiB")
        self._copier = DeviceCopier(stream_to(torch, self.device), slot_bytes) if self.device.type == "cuda" else None
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._given: list[Any] = []  # what the last update was given, but for the numbers
        self._sections: list[_Section] = []
        self._copies: list[tuple[list[int], CopyLoads]] = []  # of neighbouring items on the host

    @torch.no_grad()
    def update_buffer(self, traj_list: Sequence[Trajectory]) -> tuple[int, float]:
        """Take over trajectories; return the number of steps and the mean reward.

        The mean of rewards on the CPU is taken there, so nothing waits for the device.
        """
        try:
            given = [len(traj_list), *[(t.shape, t.dtype, t.device) for trajectory in traj_list for t in trajectory]]
        except (TypeError, AttributeError) as error:
            raise ArgumentError(
                f"traj_list is a {type(traj_list).__name__} that holds no trajectories ({error}); pass a list of them, "
                "each a list of tensors"
            ) from error
        if given != self._given:
            items = _transposed(traj_list)
            self._given = []  # if memory runs out, what is held is not what was given
            self._lay_out(items)
            self._given = given
        items = list(zip(*traj_list, strict=True))
        for which, loads in self._copies:
            if self._copier is not None:
                self._copier.send(loads, [tensor.contiguous() for i in which for tensor in items[i]])
        for item, tensor in zip(items, self, strict=True):
            if item[0].device == tensor.device:
                torch.cat(item, out=tensor)
            elif item[0].device.type != "cpu":  # on another device
                start = 0
                for part in item:
                    tensor[start : start + len(part)].copy_(part)
                    start += len(part)
        on_host = items[_REWARDS][0].device.type == "cpu"
        rewards = torch.cat(items[_REWARDS]) if on_host else self[_REWARDS]
        if not rewards.is_floating_point():
            rewards = rewards.to(torch.float64)
        return self[_REWARDS].shape[0], rewards.mean().item()

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._memory.nbytes

    def _lay_out(self, items: list[Item]) -> None:
        """Give every item its section, in the memory that is there or, if that is too small, in more."""
        sections, start = [], 0
        for item in items:
            shape = (sum(len(tensor) for tensor in item), *item[0].shape[1:])
            sections.append(_Section(shape, item[0].dtype, start, prod(shape) * item[0].itemsize))
            start += -(-sections[-1].nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if sections != self._sections:
            self.clear()
            self._sections, self._copies = [], []
            if start > self._memory.nbytes:
                most = int(_GROWTH * self._memory.nbytes)
                # What it holds is about to be overwritten, so it goes before more is taken.
                self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
                self._memory = torch.empty(max(start, most), dtype=torch.uint8, device=self.device)
            self._sections = sections
            self.extend(section.of(self._memory) for section in sections)
        self._plan_copies(items)

    def _plan_copies(self, items: list[Item]) -> None:
        """Plan one copy for each group of neighbouring items on the host; what lies between groups is not touched."""
        self._copies = []
        if self._copier is None:
            return
        on_host = [i for i, item in enumerate(items) if item[0].device.type == "cpu"]
        for _, group in groupby(enumerate(on_host), lambda pair: pair[1] - pair[0]):  # neighbours have one difference
            which, spans = [i for _, i in group], []
            for i in which:
                start = self._sections[i].start
                for tensor in items[i]:
                    spans.append(CopySpan(start, tensor.nbytes))
                    start += tensor.nbytes
            self._copies.append((which, self._copier.plan(self._memory, spans)))


def _transposed(traj_list: Sequence[Trajectory]) -> list[Item]:
    """Return the tensors by kind instead of by worker, checked."""
    if not traj_list:
        raise ArgumentError("traj_list is empty; pass at least one trajectory")
    kinds = len(traj_list[0])
    if kinds <= _REWARDS or any(len(trajectory) != kinds for trajectory in traj_list):
        counts = [len(trajectory) for trajectory in traj_list]
        raise ArgumentError(
            f"traj_list has trajectories of {counts} items; all must have the same, states and rewards at least"
        )
    items: list[Item] = list(zip(*traj_list, strict=True))
    for i, item in enumerate(items):
        first = item[0]
        for worker, tensor in enumerate(item):
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(
                    f"traj_list[{worker}][{i}] is a {type(tensor).__name__}, no tensor; pass torch.as_tensor(...) of it"
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

"""TrajectoryBuffer: ElegantRL's list of trajectories as one set of tensors on the device, used for ever.

In:  trajectories, one list of tensors per worker.  Out: a list of tensors, each all workers' items of one kind.
Invariant: the tensors are, bit for bit, what concatenating the items gives. An update copies into place; it allocates
device memory only if it brings more than any update before, and never holds the data twice there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from holdall.errors import ArgumentError, MissingPackageError

try:
    import torch
except ImportError as error:
    raise MissingPackageError("holdall.elegantrl needs torch; run \"pip install 'holdall[torch]'\"") from error

from holdall.experience.pinned import SLOT_BYTES, PinnedRing

_ALIGNMENT_BYTES = 256
"""Where torch's own device tensors begin at the least."""
_GROWTH = 1.5
_REWARDS = 1  # ElegantRL's order: states, rewards, masks, actions, noises

Trajectory = Sequence[torch.Tensor]


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

    The tensors are overwritten by the next update: clone what is to outlive it.

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
        self._ring = PinnedRing(self.device, slot_bytes) if self.device.type == "cuda" else None
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._sections: list[_Section] = []

    def update_buffer(self, traj_list: Sequence[Trajectory]) -> tuple[int, float]:
        """Take over trajectories; return the number of steps and the mean reward.

        The mean of rewards on the CPU is taken there, so nothing waits for the device.
        """
        items = _transposed(traj_list)
        self._lay_out(items)
        if self._ring is None:
            for item, tensor in zip(items, self, strict=True):
                torch.cat(item, out=tensor)
        else:
            self._upload(items, self._ring)
        rewards = items[_REWARDS]
        mean = self[_REWARDS] if self._ring is None or rewards[0].is_cuda else torch.cat(rewards)
        return self[_REWARDS].shape[0], mean.mean().item()

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._memory.nbytes

    def _lay_out(self, items: list[list[torch.Tensor]]) -> None:
        """Give every item its section, in the memory that is there or, if that is too small, in more."""
        sections, start = [], 0
        for item in items:
            shape = (sum(len(tensor) for tensor in item), *item[0].shape[1:])
            sections.append(_Section(shape, item[0].dtype, start, prod(shape) * item[0].itemsize))
            start += -(-sections[-1].nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if sections == self._sections:
            return
        self.clear()
        if start > self._memory.nbytes:
            most = int(_GROWTH * self._memory.nbytes)
            # What it holds is about to be overwritten, so it goes before more is taken.
            self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
            self._memory = torch.empty(max(start, most), dtype=torch.uint8, device=self.device)
        self._sections = sections
        self.extend(section.of(self._memory) for section in sections)

    def _upload(self, items: list[list[torch.Tensor]], ring: PinnedRing) -> None:
        """Copy items to the device: short ones together, long ones piece by piece, those there already as they are."""
        together: list[int] = []
        for i, item in enumerate(items):
            if item[0].is_cuda:
                torch.cat(item, out=self[i])
                continue
            first = self._sections[together[0] if together else i].start
            if self._sections[i].start + self._sections[i].nbytes - first > ring.slot_bytes:
                self._send_together(items, together, ring)
                together = []
            if self._sections[i].nbytes > ring.slot_bytes:
                self._send_in_pieces(item, self._sections[i], ring)
            else:
                together.append(i)
        self._send_together(items, together, ring)
        ring.next_slot()

    def _send_together(self, items: list[list[torch.Tensor]], which: list[int], ring: PinnedRing) -> None:
        """Send items that fit into one slot in one copy; sections of items left out in between are not touched."""
        for run in _runs(which):
            start, end = self._sections[run[0]].start, self._sections[run[-1]].start + self._sections[run[-1]].nbytes
            staged = ring.take(end - start)
            for i in run:
                section = self._sections[i]
                torch.cat(items[i], out=section._replace(start=section.start - start).of(staged))
            self._memory[start:end].copy_(staged, non_blocking=True)

    def _send_in_pieces(self, item: list[torch.Tensor], section: _Section, ring: PinnedRing) -> None:
        """Fill one slot after another, each on its way while the next one is filled."""
        slot_bytes, at = ring.slot_bytes, section.start
        staged, used = ring.take(slot_bytes), 0
        for tensor in item:
            source = tensor.contiguous().flatten().view(torch.uint8)
            taken = 0
            while taken < len(source):
                if used == slot_bytes:
                    self._memory[at : at + used].copy_(staged, non_blocking=True)
                    at += used
                    staged, used = ring.take(slot_bytes), 0
                piece = source[taken : taken + slot_bytes - used]
                staged[used : used + len(piece)].copy_(piece)
                used += len(piece)
                taken += len(piece)
        self._memory[at : at + used].copy_(staged[:used], non_blocking=True)


def _runs(numbers: list[int]) -> list[list[int]]:
    """Part ascending numbers into runs without gaps."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _transposed(traj_list: Sequence[Trajectory]) -> list[list[torch.Tensor]]:
    """Return the tensors by kind instead of by worker, checked."""
    if not traj_list:
        raise ArgumentError("traj_list is empty; pass at least one trajectory")
    kinds = len(traj_list[0])
    if kinds <= _REWARDS or any(len(trajectory) != kinds for trajectory in traj_list):
        counts = [len(trajectory) for trajectory in traj_list]
        raise ArgumentError(
            f"traj_list has trajectories of {counts} items; all must have the same, states and rewards at least"
        )
    items = [list(item) for item in zip(*traj_list, strict=True)]
    for i, item in enumerate(items):
        first = item[0]
        for worker, tensor in enumerate(item):
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

"""TrajectoryBuffer: ElegantRL's list of trajectories as one set of tensors on the device, used for ever.

In:  trajectories, one list of tensors per worker.  Out: a list of tensors, each all workers' items of one kind.
Invariant: the tensors are, bit for bit, what concatenating the items gives. An update copies into place; it allocates
device memory only if it brings more than any update before, and never holds the data twice there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

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


class _Together:
    """Short items that lie one after another: joined in one slot, sent in one copy."""

    def __init__(self, which: list[int], sections: list[_Section], memory: torch.Tensor) -> None:
        self.which = which
        self._start = sections[which[0]].start
        end = sections[which[-1]].start + sections[which[-1]].nbytes
        self._sections = [sections[i]._replace(start=sections[i].start - self._start) for i in which]
        self._target = memory[self._start : end]
        self._views_by_place: dict[int, list[torch.Tensor]] = {}  # making a view costs as much as a short copy

    def send(self, items: list[Item], ring: PinnedRing) -> list[torch.Tensor]:
        """Start the copy; return the items as they stand on the host."""
        staged = ring.take(len(self._target))
        views = self._views_by_place.get(staged.data_ptr())
        if views is None:
            views = self._views_by_place[staged.data_ptr()] = [section.of(staged) for section in self._sections]
        for i, view in zip(self.which, views, strict=True):
            torch.cat(items[i], out=view)
        self._target.copy_(staged, non_blocking=True)
        return views


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
        self._given: list[Any] = []  # what the last update was given, but for the numbers
        self._sections: list[_Section] = []
        self._together: list[_Together] = []
        self._in_pieces: list[int] = []
        self._there_already: list[int] = []

    def update_buffer(self, traj_list: Sequence[Trajectory]) -> tuple[int, float]:
        """Take over trajectories; return the number of steps and the mean reward.

        The mean of rewards on the CPU is taken there, so nothing waits for the device.
        """
        given = [len(traj_list), *[(t.shape, t.dtype, t.device) for trajectory in traj_list for t in trajectory]]
        if given != self._given:
            items = _transposed(traj_list)
            self._given = []  # if memory runs out, what is held is not what was given
            self._lay_out(items)
            self._given = given
        items = list(zip(*traj_list, strict=True))
        rewards = self[_REWARDS]
        if self._ring is None:
            self._there(items, range(len(items)))
        else:
            rewards = self._upload(items, self._ring)
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
            self._sections = []
            if start > self._memory.nbytes:
                most = int(_GROWTH * self._memory.nbytes)
                # What it holds is about to be overwritten, so it goes before more is taken.
                self._together.clear()
                self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
                self._memory = torch.empty(max(start, most), dtype=torch.uint8, device=self.device)
            self._sections = sections
            self.extend(section.of(self._memory) for section in sections)
        if self._ring is not None:
            self._plan(items, self._ring.slot_bytes)

    def _plan(self, items: list[Item], slot_bytes: int) -> None:
        """Decide how each item comes to the device."""
        self._there_already = [i for i, item in enumerate(items) if item[0].is_cuda]
        self._in_pieces = [i for i, section in enumerate(self._sections) if section.nbytes > slot_bytes]
        self._in_pieces = [i for i in self._in_pieces if i not in self._there_already]
        runs: list[list[int]] = []
        for i, section in enumerate(self._sections):
            if i in self._there_already or i in self._in_pieces:
                continue
            follows = bool(runs) and runs[-1][-1] == i - 1
            if follows and section.start + section.nbytes - self._sections[runs[-1][0]].start <= slot_bytes:
                runs[-1].append(i)
            else:
                runs.append([i])
        self._together = [_Together(run, self._sections, self._memory) for run in runs]

    def _upload(self, items: list[Item], ring: PinnedRing) -> torch.Tensor:
        """Copy all items to the device, the long ones first; return the rewards, from the host if they are there."""
        rewards = None
        for i in self._in_pieces:
            self._send_in_pieces(items[i], self._sections[i], ring)
        for together in self._together:
            views = together.send(items, ring)
            if _REWARDS in together.which:
                rewards = views[together.which.index(_REWARDS)]
        self._there(items, self._there_already)
        if rewards is None:
            rewards = torch.cat(items[_REWARDS]) if _REWARDS in self._in_pieces else self[_REWARDS]
        ring.next_slot()
        return rewards  # where they are in a slot, nobody writes to it before the next update

    def _there(self, items: list[Item], which: Iterable[int]) -> None:
        """Join items on the device that they are on."""
        for i in which:
            torch.cat(items[i], out=self[i])

    def _send_in_pieces(self, item: Item, section: _Section, ring: PinnedRing) -> None:
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

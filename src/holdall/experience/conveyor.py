"""The conveyor: host tensors brought to their places in a device's memory, through pinned slots. Imports torch.

In:  contiguous tensors on the host, and where in a device tensor their bytes belong.  Out: copies under way on the
current stream.
Invariant: a slot is filled again only after the device has read it, and the sources are read before `send` returns.
Threads share the filling out piece by piece while the calling thread sends slots as they become full, so that neither
the device nor the host waits for the other.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.experience.arena import address
from holdall.experience.native_rollout import JobStruct, RolloutLoops, rollout_loops
from holdall.threads import usable_cores

SLOT_BYTES = 4 * 2**20
_SLOTS = 8
PIECE_FIELDS = ("source", "to", "bytes", "chunk")
"""Columns of a table of pieces, in the order of `piece` in pieces.c."""

_PIECE_BYTES = 512 * 2**10
_MOST_HANDS = 8
_BYTES_PER_HAND = 2 * 2**20
"""A thread is woken only for at least this much to copy."""
_ALL = 2**62


class Span(NamedTuple):
    """Where the bytes of one source belong in the target."""

    start: int
    nbytes: int


class Route:
    """Everything about a transfer that does not change with the numbers: its pieces, slot by slot."""

    def __init__(self, target: torch.Tensor, spans: Sequence[Span], slots: list[torch.Tensor]) -> None:
        slot_bytes = slots[0].nbytes
        first = min(span.start for span in spans)
        end = max(span.start + span.nbytes for span in spans)
        chunks = max(1, -(-(end - first) // slot_bytes))
        bases = np.array([slot.data_ptr() for slot in slots], np.int64)
        parts = [_cut(number, span.start - first, span.nbytes, slot_bytes) for number, span in enumerate(spans)]
        source, offset, start, nbytes = np.concatenate(parts, axis=1)
        order = np.argsort(start, kind="stable")  # slots are filled one after another, whatever the order of spans
        self._source, self._offset, start = source[order], offset[order], start[order]
        chunk = start // slot_bytes
        self.table = np.empty((len(order), len(PIECE_FIELDS)), np.int64)
        self.table[:, 1] = bases[chunk % len(slots)] + start % slot_bytes
        self.table[:, 2], self.table[:, 3] = nbytes[order], chunk
        self.pieces_by_chunk = np.bincount(chunk, minlength=chunks)
        self.last_piece = np.cumsum(self.pieces_by_chunk)
        self.nbytes = end - first
        self.sends: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(chunks):
            size = min(slot_bytes, self.nbytes - number * slot_bytes)
            begin = first + number * slot_bytes
            self.sends.append((target[begin : begin + size], slots[number % len(slots)][:size]))

    def point_at(self, sources: Sequence[torch.Tensor]) -> None:
        """Fill in where the sources lie this time."""
        starts = np.array([source.data_ptr() for source in sources], np.int64)
        np.add(starts[self._source], self._offset, out=self.table[:, 0])


class Conveyor:
    """Pinned slots, used over and over, and the threads that fill them."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self._device = device
        pinned = torch.empty(_SLOTS * slot_bytes, dtype=torch.uint8, pin_memory=True)
        self._slots = [pinned[first : first + slot_bytes] for first in range(0, pinned.nbytes, slot_bytes)]
        with torch.cuda.device(device):
            self._read = [torch.cuda.Event() for _ in self._slots]  # type: ignore[no-untyped-call]  # torch leaves it so
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._hands = min(_hands(), _MOST_HANDS)

    def plan(self, target: torch.Tensor, spans: Sequence[Span]) -> Route:
        """Prepare transfers of sources of these sizes to these places of `target`, bytes on the device."""
        return Route(target, spans, self._slots)

    def send(self, plan: Route, sources: Sequence[torch.Tensor]) -> None:
        """Send contiguous sources; they have been read when this returns, and may be changed."""
        plan.point_at(sources)
        loops = rollout_loops()
        if loops is None:
            self._send_alone(plan)
            return
        left = plan.pieces_by_chunk.copy()
        allowed = min(len(self._slots), len(plan.sends))
        for event in self._read[:allowed]:
            event.synchronize()  # of the time before, long done
        job = JobStruct(address(plan.table), len(plan.table), 0, int(plan.last_piece[allowed - 1]), address(left))
        helping = self._call(loops, job, min(self._hands, plan.nbytes // _BYTES_PER_HAND) - 1)
        try:
            self._send_as_filled(plan, loops, job, allowed)
        finally:
            job.count = 0  # whoever still waits stops
            for future in helping:
                if not future.cancel():
                    future.result()

    def _send_as_filled(self, plan: Route, loops: RolloutLoops, job: JobStruct, allowed: int) -> None:
        """Copy pieces until a slot is full, send it, and let slots that were read be filled again.

        Args:
            allowed: Chunks that may be filled: those before it have, or had, a slot that was free.
        """
        at, stream = ctypes.addressof(job), torch.cuda.current_stream(self._device)
        slots, chunks = len(self._slots), len(plan.sends)
        for sent, (target, staged) in enumerate(plan.sends):
            while loops.pieces_left(at, sent):
                idle = loops.copy_pieces(at, 1, 0) == 0
                # The slot of the next chunk to allow was sent already; once it was read it is free.
                if idle and allowed < chunks and allowed - slots < sent:
                    event = self._read[allowed % slots]
                    if allowed == sent:
                        event.synchronize()
                    if event.query():  # type: ignore[no-untyped-call]  # torch leaves it so
                        allowed += 1
                        job.allowed = int(plan.last_piece[allowed - 1])
            target.copy_(staged, non_blocking=True)
            self._read[sent % slots].record(stream)

    def _send_alone(self, plan: Route) -> None:
        """Do the same without the compiled loop, one slot after another."""
        stream = torch.cuda.current_stream(self._device)
        pieces = iter(plan.table.tolist())
        for chunk, (target, staged) in enumerate(plan.sends):
            event = self._read[chunk % len(self._slots)]
            event.synchronize()
            for _ in range(int(plan.pieces_by_chunk[chunk])):
                source, to, nbytes, _chunk = next(pieces)
                ctypes.memmove(to, source, nbytes)
            target.copy_(staged, non_blocking=True)
            event.record(stream)

    def _call(self, loops: RolloutLoops, job: JobStruct, helpers: int) -> list[Future[int]]:
        if helpers < 1:
            return []
        if self._pool is None or self._process != os.getpid():  # a fork leaves its child without the threads
            self._pool = ThreadPoolExecutor(self._hands - 1, thread_name_prefix="holdall-conveyor")
            self._process = os.getpid()
        return [self._pool.submit(loops.copy_pieces, ctypes.addressof(job), _ALL, 1) for _ in range(helpers)]


def _cut(number: int, start: int, nbytes: int, slot_bytes: int) -> NDArray[np.int64]:
    """Cut one source at the ends of slots and into pieces: rows of source, offset in it, offset in all, bytes."""
    if nbytes == 0:
        return np.empty((4, 0), np.int64)
    ends = np.arange(start, start + nbytes, _PIECE_BYTES)[1:]
    slot_ends = np.arange(-(-(start + 1) // slot_bytes) * slot_bytes, start + nbytes, slot_bytes)
    begins = np.unique(np.concatenate([[start], ends, slot_ends])).astype(np.int64)
    sizes = np.diff(begins, append=start + nbytes)
    return np.stack([np.full(len(begins), number), begins - start, begins, sizes])


def _hands() -> int:
    wish = os.environ.get("HOLDALL_THREADS", "")
    return int(wish) if wish.isdecimal() and int(wish) > 0 else usable_cores()

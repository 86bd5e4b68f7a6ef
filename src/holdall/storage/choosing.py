"""When a codec is chosen: at leisure, step by step, and by the first block of a field.

In:  blocks of a field whose codec is not chosen yet.  Out: its codec, and what is remembered of it.
Invariant: the same blocks get the same codec, however fast they come and whatever was sealed before it was chosen.
Nobody waits for a choice who need not: blocks that come meanwhile are sealed quickly between two of its steps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdall.schema import Bytes
from holdall.storage.block_sample import BlockSample
from holdall.storage.blocks import Codec, SealedSlices
from holdall.storage.codec import hurried
from holdall.storage.codec_choice import choose
from holdall.storage.coded_units import Order
from holdall.storage.slices import FrozenBlock, Window
from holdall.storage.ticks import Coder
from holdall.storage.tiers import SealJob, SealQueue

_QUIET_S = 0.1
"""A codec is chosen when no block came for so long: about as long as its longest step, the training of a dictionary."""
_MOST_UNCHOSEN = 64
"""Or after so many blocks of a field: if they go on coming, they would never be sealed better."""

FieldKind = tuple[int, Window]
"""Slices that get a codec of their own: those of a field, cut in one way."""


@dataclass(slots=True)
class ChosenCodec:
    """What was chosen for a field's slices, and how well it did then."""

    codec: Codec
    hurried: Codec  # the same, for when time is short
    seconds_per_byte: float = 0.0  # that sealing takes
    hurried_seconds: float = 0.0  # the same in a hurry
    ratio: float = 0.0
    age: int = 0  # blocks since


class WorkerStoppedError(Exception):
    """The worker ends: what it was choosing is not needed."""


class ChoosingWorker(ABC):
    """The half of the sealer's worker that chooses codecs.

    Args:
        cap: How much longer sampling may take, over a raw gather.
        threads: Threads that share the decoding of a batch.

    Attributes:
        seals_quickly: Whether blocks may be sealed quickly for now, to be sealed again later.
    """

    def __init__(self, queue: SealQueue, coder: Coder, cap: float, threads: int) -> None:
        self._queue, self._coder = queue, coder
        self._cap, self._threads = cap, threads
        self._chosen: dict[FieldKind, ChosenCodec] = {}
        # Of fields whose codec is not chosen yet: the first block, which it is chosen by, and how many were sealed.
        self._first: dict[FieldKind, tuple[FrozenBlock, Order | None]] = {}
        self._unchosen: Counter[FieldKind] = Counter()
        self.seals_quickly = True
        self.choosing: SealJob | None = None  # the job that a codec is chosen for

    @property
    def is_choosing(self) -> bool:
        """Whether a codec is being chosen."""
        return self.choosing is not None

    def reason(self, field: int) -> str:
        """Say why the newest codec of a field was chosen."""
        reasons = [chosen.codec.reason for (of, _), chosen in tuple(self._chosen.items()) if of == field]
        return reasons[-1] if reasons else ""

    @abstractmethod
    def _do_quickly(self, job: SealJob) -> None:
        """Seal the block that a codec is chosen for quickly, and hand it in."""

    @abstractmethod
    def _try(self, job: SealJob) -> None:
        """Do another job."""

    @abstractmethod
    def _as_raw(self, frozen: FrozenBlock) -> FrozenBlock:
        """Return a block with its slices as they were."""

    def _may_choose(self, kind: FieldKind) -> bool:
        """Whether there is time to choose a codec: wait a little, and see that no block comes."""
        return not self.seals_quickly or self._unchosen[kind] >= _MOST_UNCHOSEN or self._is_quiet()

    def _is_quiet(self) -> bool:
        """Wait until no block came for a while; False if one has to be sealed before."""
        queue, last = self._queue, self._queue.last_came
        while not (queue.stopped or queue.has_leisure):
            if queue.jobs and (queue.is_pressed or queue.last_came > last):
                return False
            left = queue.last_came + _QUIET_S - time.monotonic()
            if left <= 0:
                break
            queue.wakes_worker.acquire(timeout=left)
        return True

    def _leave_for_later(self, frozen: FrozenBlock) -> None:
        """Know of a block that is sealed quickly; the first of its kind is kept until its codec is chosen."""
        kind = (frozen.field, frozen.window)
        if kind not in self._chosen:
            if kind not in self._first:
                self._first[kind] = frozen, frozen.lane_order()
            self._unchosen[kind] += 1

    def _choose(self, job: SealJob) -> ChosenCodec:
        """Choose a codec by the first block of a kind, or by this one; what comes meanwhile is sealed in between."""
        # Here, and not in a thread of its own: what that one's allocator keeps would be 20 MiB more.
        frozen, kind = job.frozen, (job.frozen.field, job.frozen.window)
        first, order = self._first.get(kind) or (frozen, frozen.lane_order())
        coder: Any = _MeasuringCoder(self._coder, self._see_to_others)
        self.choosing = job
        try:
            sample = BlockSample.of(self._as_raw(first).block.raw, frozen.window, frozen.lanes, order)
            codec = choose(coder, frozen.leaf, frozen.window, sample, self._cap, self._threads)
            times = coder.seconds_of(codec), coder.seconds_of(hurried(codec))
            self._chosen[kind] = chosen = ChosenCodec(codec, hurried(codec), *times)
            return chosen
        finally:
            self.choosing = None
            self._first.pop(kind, None)
            self._unchosen.pop(kind, None)

    def _see_to_others(self) -> None:
        """Leave Python's lock to a snapshot. If `add` waits, seal blocks for as long as they come.

        The first of them is the one that a codec is being chosen for.
        """
        queue, job = self._queue, self.choosing
        if queue.stopped:
            raise WorkerStoppedError
        if (left := queue.away_until - time.monotonic()) > 0:
            time.sleep(left)
        if job is None or not (queue.is_pressed and self.seals_quickly):
            return
        if job in queue.progress.begun and not job.again:
            self._do_quickly(job)
        while True:
            other = queue.begin_next()
            if other is not None:
                queue.tell()
                self._try(other)
            elif self._may_choose((job.frozen.field, job.frozen.window)):
                return


class _MeasuringCoder:
    """A coder that calls `pause` between pieces of samples that it seals, and remembers how long codecs take."""

    def __init__(self, coder: Coder, pause: Callable[[], None]) -> None:
        self._coder, self._pause = coder, pause
        self._seconds: dict[tuple[Any, ...], float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coder, name)

    def seal(self, slices: Bytes, codec: Codec) -> SealedSlices | None:
        """Seal samples."""
        paused = 0.0

        def pause(_: int = 0) -> None:
            nonlocal paused
            before = time.thread_time()
            self._pause()
            paused += time.thread_time() - before

        began = time.thread_time()
        pause()
        sealed = self._coder.seal(slices, codec, watch=pause)
        self._seconds[_cost_of(codec)] = (time.thread_time() - began - paused) / max(slices.nbytes, 1)
        return sealed

    def seconds_of(self, codec: Codec) -> float:
        """Say how many seconds a byte takes; 0 if it is not known."""
        return self._seconds.get(_cost_of(codec), 0.0)


def _cost_of(codec: Codec) -> tuple[Any, ...]:
    """Return what decides how long compressing takes."""
    return codec.method, codec.level, codec.transform, codec.group, codec.key > 0, codec.dictionary is not None

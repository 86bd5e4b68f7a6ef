"""Sealing: full blocks are compressed, and moved to files, by one worker outside the training thread.

In:  blocks that take no more slices.  Out: the same slices, sealed or on disk; readers change over when they next look
a place up.
Invariant: a block stays as it is until its next form is complete; whatever goes wrong, it stays as it is. The worker
changes no block: it lists what became of each, and who owns the sealer collects that under a lock of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from holdall.report import GROWTH_CHECKS
from holdall.storage.blocks import Coder, SealedSlices, reserve
from holdall.storage.codec import Codec, Method, Transform
from holdall.storage.codec_choice import choose
from holdall.storage.layout import Window
from holdall.storage.seal_queue import FrozenBlock, HurriedBlock, SealJob, SealQueue, SealResult, new_bell, ring

_WAIT_FROM = 1
"""Blocks waiting from which on `add` waits, so that memory stays bounded: beside these there are the
one being sealed and the open one. More may wait where a limit leaves room for them."""
_WAIT_WHILE_CHOOSING_FROM = 4
_WAIT_WHILE_CHOOSING_BYTES = 8 * 2**20
"""The same while a codec is chosen, which takes a second and happens once or twice: training need not stand still for
it, unless the blocks that wait are large."""
_FAST_BYTES_PER_SECOND, _BUSY_SHARE = 32 * 2**20, 0.7
"""Blocks that come faster than this are sealed in a hurry if sealing them well would take more than this share of the
worker's time: once they queue up, it is late."""
_DRIFT = 0.85
"""A block that shrinks this much worse than the one the codec was chosen on asks for a new choice."""
_REST = 8
"""Blocks of a field between two choices, so that data that defies compression costs little."""
_SAY_AFTER_S = 10.0
"""Who waits longer says so in the log."""
_STOP_S = 30.0
"""How long the end of a memory waits for the block that is being worked at: a disk may hang."""
_LOOK_AGAIN_S = 1.0
"""How often who waits for the worker looks whether there is one."""

_LOG = logging.getLogger("holdall")


Write = Callable[[SealedSlices], SealedSlices]
Wake = Callable[[], None]


@dataclass(slots=True)
class _ChosenCodec:
    """What was chosen for a field's slices, and how well it did then."""

    codec: Codec
    hurried: Codec  # the same, for when time is short
    ratio: float = 0.0
    seconds_per_byte: float = 0.0  # that sealing took, of the worker's CPU time
    age: int = 0  # blocks since


class Sealer:
    """Seals and spills blocks in the order in which they come, one at a time.

    Args:
        cap: How much longer sampling may take, over a raw gather.
        threads: Threads that share the decoding of a batch.
        wake: Called by the worker after every block, for its owner to collect the result at once; a bound method, held
            weakly, so that a memory which is simply dropped ends its worker too. None: the owner looks by itself, and
            no block is sealed again, since the owner may write over it.
        write: Writes sealed slices to a file and returns them as they are read from there; None without a disk tier.

    Attributes:
        spare_bytes: Bytes of blocks that may wait, beside those that always may: what a limit leaves.
    """

    def __init__(
        self, coder: Coder, cap: float, threads: int, wake: Wake | None = None, write: Write | None = None
    ) -> None:
        self._queue = SealQueue(seals_again=wake is not None)
        self._work = _Work(coder, cap, threads, write)
        self._wake = None if wake is None else weakref.WeakMethod(wake)
        self._thread: threading.Thread | None = None
        self._busy = threading.Lock()  # held by the worker: there is never more than one
        self._process = os.getpid()
        self.spare_bytes = 0
        self.grown_bytes = 0  # raw blocks that were filled since a guard was asked
        weakref.finalize(self, self._queue.stop)

    def submit(self, frozen: FrozenBlock) -> None:
        """Have a block sealed, unless it is about to be."""
        self._enqueue(SealJob(frozen, spill=False))

    def spill(self, frozen: FrozenBlock) -> None:
        """Have a block moved to a file, unless it is about to be."""
        self._enqueue(SealJob(frozen, spill=True))

    def withdraw(self, evicted: set[int]) -> None:
        """Forget the blocks with these identities, unless their turn has come."""
        for job in tuple(self._queue.jobs):
            if id(job.frozen.block) in evicted:
                with contextlib.suppress(ValueError):
                    self._queue.jobs.remove(job)
        self._queue.tell()

    @property
    def waiting(self) -> set[int]:
        """Identities of the blocks whose turn has not come."""
        return {id(job.frozen.block) for job in tuple(self._queue.jobs)}

    def collect(self) -> Iterator[SealResult]:
        """Return what became of blocks; one is forgotten when the next is asked for, so that none is lost."""
        results = self._queue.results
        while results:
            yield results[0]
            results.popleft()

    @property
    def backlog(self) -> int:
        """Blocks that wait, are being worked at or about to be collected."""
        return len(self._queue.under_way())

    @property
    def failure(self) -> str:
        """What went wrong last, if anything."""
        return self._queue.failure

    def reason(self, field: int) -> str:
        """Say why the slices of a field are coded as they are; nothing if that was not chosen yet."""
        return self._work.reason(field)

    @property
    def is_crowded(self) -> bool:
        """Whether so many blocks are queued that no more should come."""
        jobs = tuple(self._queue.jobs)
        if len(jobs) < _WAIT_FROM:
            return False
        waiting = sum(job.frozen.block.used_bytes for job in jobs)
        if self._work.is_choosing and len(jobs) < _WAIT_WHILE_CHOOSING_FROM and waiting <= _WAIT_WHILE_CHOOSING_BYTES:
            return False
        return waiting > self.spare_bytes

    def wait_for_room(self) -> None:
        """Wait while too many blocks are queued, or for all if memory is short; not under the memory's lock."""
        grown, self.grown_bytes = self.grown_bytes, 0
        if grown and any(is_short(grown) for is_short in tuple(GROWTH_CHECKS)):
            self.drain()
        elif self.is_crowded:
            self._wait_until(lambda: not self.is_crowded)

    def drain(self) -> None:
        """Wait until everything submitted is sealed or spilled, what was sealed in a hurry sealed again."""
        queue = self._queue
        queue.has_leisure = True
        ring(queue.wakes_worker)
        try:
            self._wait_until(lambda: self.backlog == 0 and not queue.hurried)
        finally:
            queue.has_leisure = False

    def stop(self) -> None:
        """End the worker after the block that it is at."""
        self._queue.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)
        self._thread = None

    def _enqueue(self, job: SealJob) -> None:
        queue, block = self._queue, job.frozen.block
        known = [(other.frozen.block, other.spill) for other in queue.under_way()]
        known += [(result.block, result.is_spilled) for result in tuple(queue.results)]
        # A block that was just sealed, and is what the worker is at, may have to be spilled next.
        if all(other is not block or spill != job.spill for other, spill in known):
            queue.jobs.append(job)
            if not job.spill:
                queue.came(block.used_bytes)
        ring(queue.wakes_worker)
        self._see_to_worker()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        began, is_said = time.monotonic(), False
        while not condition() and not self._queue.stopped:
            self._see_to_worker()
            if not is_said and time.monotonic() - began >= _SAY_AFTER_S:
                is_said = True
                reason = f" ({self.failure})" if self.failure else ""
                _LOG.warning("still waiting: %d blocks are to be compressed or spilled%s", self.backlog, reason)
            bell = new_bell()
            self._queue.waiting.append(bell)
            if not condition() and not self._queue.stopped:
                bell.acquire(timeout=_LOOK_AGAIN_S)

    def _see_to_worker(self) -> None:
        """Start the worker if there is none: at first, after a fork, and should it have died."""
        if self._queue.stopped or (self._thread is not None and self._thread.is_alive()):
            return
        if self._process != os.getpid():  # the parent's worker is not here, and holds its locks for ever
            self._busy, self._queue.current = threading.Lock(), None
            self._process = os.getpid()
        self._thread = threading.Thread(
            target=_run_worker,
            args=(self._queue, self._work, self._wake, self._busy),
            name="holdall-sealer",
            daemon=True,
        )
        self._thread.start()


class _Work:
    """Chooses codecs, seals and spills; used by the worker alone."""

    def __init__(self, coder: Coder, cap: float, threads: int, write: Write | None) -> None:
        self._coder = coder
        self._write = write
        self._cap = cap
        self._threads = threads
        self._chosen: dict[tuple[int, Window], _ChosenCodec] = {}
        self.is_choosing = False

    def reason(self, field: int) -> str:
        """Say why the newest codec of a field was chosen."""
        reasons = [chosen.codec.reason for (of, _), chosen in tuple(self._chosen.items()) if of == field]
        return reasons[-1] if reasons else ""

    def do(self, job: SealJob, queue: SealQueue) -> SealedSlices | None:
        """Give a block its next form; None if it stays as it is."""
        if job.again:
            return self.seal_again(job.frozen)
        return self.spill(job.frozen) if job.spill else self.seal(job.frozen, queue)

    def spill(self, frozen: FrozenBlock) -> SealedSlices | None:
        """Move one block to a file, as it is: what did not shrink is written raw."""
        if self._write is None:
            return None
        sealed = frozen.block.sealed
        if sealed is None:
            stored = Codec(Method.STORED, 0, Transform(frozen.block.slice_bytes))
            sealed = self._coder.seal(frozen.block.raw, stored)
        return None if sealed is None else self._write(sealed)

    def seal(self, frozen: FrozenBlock, queue: SealQueue) -> SealedSlices | None:
        """Seal one block, worse and faster if blocks come faster than they are sealed; None if nothing pays."""
        slices = frozen.block.raw
        key = (frozen.field, frozen.window)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self._choose(frozen)
        chosen.age += 1
        if chosen.codec.method is Method.STORED:
            if chosen.age > _REST:
                del self._chosen[key]
            return None
        rate = queue.bytes_per_second
        is_late = rate > _FAST_BYTES_PER_SECOND and rate * chosen.seconds_per_byte > _BUSY_SHARE
        order = frozen.lane_order()
        ordered = () if order is None else (order,)  # a coder need not know of orders where there is one lane
        if (is_late or queue.jobs) and chosen.hurried != chosen.codec:
            queue.hurried.append(HurriedBlock(frozen))
            return _smaller(self._coder.seal(slices, chosen.hurried, *ordered), slices.nbytes)
        began = time.thread_time()
        sealed = self._coder.seal(slices, chosen.codec, *ordered)
        chosen.seconds_per_byte = (time.thread_time() - began) / max(slices.nbytes, 1)
        ratio = 0.0 if sealed is None else slices.nbytes / max(sealed.nbytes, 1)
        chosen.ratio = chosen.ratio or ratio
        if ratio < _DRIFT * chosen.ratio and chosen.age > _REST and not queue.jobs:
            self._chosen[key] = chosen = self._choose(frozen)
            stays = chosen.codec.method is Method.STORED
            sealed = None if stays else self._coder.seal(slices, chosen.codec, *ordered)
            chosen.ratio = 0.0 if sealed is None else slices.nbytes / max(sealed.nbytes, 1)
        return _smaller(sealed, slices.nbytes)

    def seal_again(self, frozen: FrozenBlock) -> SealedSlices | None:
        """Seal a block better that was sealed in a hurry; None if that does not pay."""
        chosen, before = self._chosen.get((frozen.field, frozen.window)), frozen.block.sealed
        if chosen is None or before is None or chosen.codec.method is Method.STORED:
            return None
        numbers = np.arange(frozen.block.used)
        slices = reserve(frozen.block.used * frozen.block.slice_bytes).reshape(-1, frozen.block.slice_bytes)
        self._coder.decode(before, numbers, slices)
        order = frozen.lane_order()
        ordered = () if order is None else (order,)
        return _smaller(self._coder.seal(slices, chosen.codec, *ordered), before.nbytes)

    def _choose(self, frozen: FrozenBlock) -> _ChosenCodec:
        # Here, and not in a thread of its own: what that one's allocator keeps would be 20 MiB more.
        self.is_choosing = True
        try:
            slices, cap, threads, order = frozen.block.raw, self._cap, self._threads, frozen.lane_order()
            codec = choose(self._coder, frozen.leaf, frozen.window, slices, cap, threads, frozen.lanes, order)
            return _ChosenCodec(codec, codec.hurried())
        finally:
            self.is_choosing = False


def _smaller(sealed: SealedSlices | None, nbytes: int) -> SealedSlices | None:
    return sealed if sealed is not None and sealed.nbytes < nbytes else None


def _run_worker(queue: SealQueue, work: _Work, wake: weakref.WeakMethod[Wake] | None, busy: threading.Lock) -> None:
    """Work until the queue is stopped; one that was started beside another waits for it to end."""
    with busy:
        is_idle = False  # nothing came for a while
        while not queue.stopped:
            job = queue.begin_next() or (queue.begin_again() if is_idle or queue.has_leisure else None)
            queue.tell()
            if job is None:
                is_idle = not queue.wakes_worker.acquire(timeout=_LOOK_AGAIN_S)
                continue
            _try(job, work, queue, wake)
            del job
            queue.current = None
            queue.tell()


def _try(job: SealJob, work: _Work, queue: SealQueue, wake: weakref.WeakMethod[Wake] | None) -> None:
    """Have a job done; if that fails, the block stays as it is, and training goes on."""
    try:
        _do(job, work, queue, wake)
        queue.failure = "" if job.spill else queue.failure
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        if failure != queue.failure:
            _LOG.warning("a block could not be %s (%s)", "spilled" if job.spill else "compressed", failure)
            _LOG.debug("the reason", exc_info=error)
        queue.failure = failure


def _do(job: SealJob, work: _Work, queue: SealQueue, wake: weakref.WeakMethod[Wake] | None) -> None:
    """Have a job done, list the result, and have it collected if anybody is there: also if it failed."""
    sealed: SealedSlices | None = None
    try:
        sealed = work.do(job, queue)
    finally:
        queue.results.append(SealResult(job.frozen.block, sealed, job.spill, job.again))
        collect = None if wake is None else wake()
        if collect is not None:
            try:
                collect()
            finally:
                queue.results.clear()  # one that could not be taken is not offered again

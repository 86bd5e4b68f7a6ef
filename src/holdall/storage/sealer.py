"""Sealing: full blocks are compressed, and moved to files, by one worker outside the training thread.

In:  blocks that take no more slices.  Out: the same slices, sealed or on disk; readers change over when they next look
a place up.
Invariant: a block stays as it is until its next form is complete; whatever goes wrong, it stays as it is. The worker
changes no block: it lists what became of each, and who owns the sealer collects that under a lock of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.background import end_before_python
from holdall.report import GROWTH_CHECKS
from holdall.storage.blocks import Codec, KeptBlock, Method, SealedSlices, reserve, stored
from holdall.storage.choosing import ChoosingWorker, FieldKind, WorkerStoppedError
from holdall.storage.codec import without_palette
from holdall.storage.codec_choice import choose_quickly
from holdall.storage.slices import FrozenBlock
from holdall.storage.ticks import Coder
from holdall.storage.tiers import NO_LIMIT, SealJob, SealProgress, SealQueue, SealResult, new_bell, ring

_RAW_SEGMENTS = 2
"""While blocks wait, the open ones, those that wait and what is left of the one being sealed take at most so many
segments, so that memory stays bounded, and what a limit leaves. Beyond that, `add` waits for pieces of blocks."""
_LEAST_RAW_BYTES = 8 * 2**20
"""Without a limit it never waits for less: small blocks are many."""
_FAST_BYTES_PER_SECOND, _BUSY_SHARE = 32 * 2**20, 0.7
"""Blocks that come faster than this are sealed in a hurry if sealing them well would take more than this share of the
worker's time: once they queue up, it is late."""
_MOST_HELPERS = 4
"""Threads that share a block in a hurry, if there are so many cores beside the one that training takes."""
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
        queue: What it shares with its worker.
        spare_bytes: Bytes of blocks that may wait, beside those that always may: what a limit leaves; None without one.
    """

    def __init__(
        self, coder: Coder, cap: float, threads: int, wake: Wake | None = None, write: Write | None = None
    ) -> None:
        self._queue = self.queue = SealQueue(seals_again=wake is not None)
        self._work = _Work(self._queue, coder, cap, threads, write, None if wake is None else weakref.WeakMethod(wake))
        self._is_sealed_again = write is None and wake is not None
        self.may_seal_quickly(is_harmless=True)
        self._thread: threading.Thread | None = None
        self._busy = threading.Lock()  # held by the worker: there is never more than one
        self._process = os.getpid()
        self.spare_bytes: int | None = None
        self._segment_bytes = 0  # of the blocks that were filled last
        self._grown_bytes = 0  # of those that were filled since a guard was asked
        weakref.finalize(self, self._queue.stop)

    def may_seal_quickly(self, *, is_harmless: bool) -> None:
        """Say whether blocks may be sealed worse than a chosen codec does, while none is chosen or `add` would wait.

        Not if what they take more makes others leave early; nor where they go to disk: there they are not sealed again.
        """
        self._work.seals_quickly = is_harmless and self._is_sealed_again

    def grew(self, nbytes: int) -> None:
        """Know that so much was filled: blocks that are sealed now, or stay raw for a while."""
        self._segment_bytes = nbytes
        self._grown_bytes += nbytes
        self._queue.came(nbytes)

    @property
    def bytes_per_second(self) -> float:
        """How fast blocks are filled, or would be if `add` never waited; 0 if it is not known, or all is waited for."""
        return 0.0 if self._queue.has_leisure else self._queue.bytes_per_second

    @property
    def is_fed_fast(self) -> bool:
        """Whether blocks are filled so fast that making room for the next one takes a good part of the time."""
        return self.bytes_per_second > _FAST_BYTES_PER_SECOND

    def submit(self, frozen: FrozenBlock) -> None:
        """Have a block sealed, unless it is about to be."""
        self._enqueue(SealJob(frozen, spill=False, nbytes=frozen.block.used_bytes))

    def spill(self, frozen: FrozenBlock) -> None:
        """Have a block moved to a file, unless it is about to be."""
        self._enqueue(SealJob(frozen, spill=True, nbytes=frozen.block.used_bytes))

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

    @property
    def is_behind(self) -> bool:
        """Whether a codec is being chosen, or blocks that were sealed in a hurry will be sealed again."""
        return self._work.is_choosing or bool(self._queue.hurried)

    def reason(self, field: int) -> str:
        """Say why the slices of a field are coded as they are; nothing if that was not chosen yet."""
        return self._work.reason(field)

    def allowance(self) -> tuple[int, int]:
        """Return what open blocks may take before `add` waits, and how much was sealed so far.

        What is sealed from now on may come on top, without another look, until the next block is submitted.
        """
        if not self._queue.jobs:
            return NO_LIMIT, 0
        allowed, spare = _RAW_SEGMENTS * self._segment_bytes, self.spare_bytes
        allowed = max(allowed, _LEAST_RAW_BYTES) if spare is None else allowed + spare
        outstanding, sealed = self._queue.outstanding()
        return allowed - outstanding, sealed

    @property
    def sealed_bytes(self) -> ctypes.c_int64:
        """How much was sealed so far; it changes at any time."""
        return self._queue.sealed_bytes

    def is_crowded(self, open_bytes: int = 0) -> bool:
        """Whether so much waits to be sealed that no tick should come; open blocks hold so much."""
        return self.allowance()[0] < open_bytes

    def wait_for_room(self, open_bytes: Callable[[], int] = int) -> None:
        """Wait while too much waits to be sealed, or for all if memory is short; not under the memory's lock.

        What is added to open blocks shortens what may wait. So a tick waits for the worker's next piece, and none
        waits for a whole block.
        """
        grown, self._grown_bytes = self._grown_bytes, 0
        if grown and any(is_short(grown) for is_short in tuple(GROWTH_CHECKS)):
            self.drain()
        elif self._queue.jobs and self.is_crowded(taken := open_bytes()):
            with self._queue.waiting_for_room():
                self._wait_until(lambda: not self.is_crowded(taken))

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
            self._busy, self._queue.progress = threading.Lock(), SealProgress(ended=self._queue.sealed_bytes.value)
            self._work.choosing, self._process = None, os.getpid()
        self._thread = threading.Thread(target=self._work.run, args=(self._busy,), name="holdall-sealer", daemon=True)
        end_before_python(self._thread, self._queue.stop)
        self._thread.start()


class HurriedBlock:
    """A block that was sealed in a hurry; it goes with its last segment all the same.

    Args:
        is_raw: Whether it did not shrink then.
    """

    def __init__(self, frozen: FrozenBlock, *, is_raw: bool) -> None:
        self._block = weakref.ref(frozen.block)
        self._before, self._behind = (frozen.field, frozen.leaf, frozen.window), (frozen.lanes, frozen.logs)
        self._is_raw = is_raw
        self.whole_bytes = frozen.block.used * frozen.block.slice_bytes

    def frozen(self) -> FrozenBlock | None:
        """Return it; None if it is gone, or no longer in memory."""
        block = self._block()
        if block is None or block.is_on_disk or (block.sealed is None and not self._is_raw):
            return None
        return FrozenBlock(*self._before, block, *self._behind)


class _PressedError(Exception):
    """`add` waits: what is being sealed well has to be sealed quickly."""


class _Work(ChoosingWorker):
    """Chooses codecs, seals and spills; used by the worker alone."""

    def __init__(
        self, queue: SealQueue, coder: Coder, cap: float, threads: int, write: Write | None,
        wake: weakref.WeakMethod[Wake] | None,
    ) -> None:  # fmt: skip
        super().__init__(queue, coder, cap, threads)
        self._write = write
        self._wake = wake
        self._quick: dict[FieldKind, Codec] = {}

    # ---------------------------------------------------------------- one job after another

    def run(self, busy: threading.Lock) -> None:
        """Work until the queue is stopped; a thread that was started beside another waits for it to end."""
        queue = self._queue
        with busy:
            is_idle = False  # nothing came for a while
            while not queue.stopped:
                job = queue.begin_next() or (queue.begin_again() if self._has_leisure(is_idle=is_idle) else None)
                queue.tell()
                if job is None:
                    is_idle = not queue.wakes_worker.acquire(timeout=_LOOK_AGAIN_S)
                    continue
                self._try(job)
                del job

    def _has_leisure(self, *, is_idle: bool) -> bool:
        """Whether there is time to seal a block again: nothing comes, or nothing should before it is done."""
        queue = self._queue
        if is_idle or queue.has_leisure or not queue.hurried:
            return True
        slowest = max((chosen.seconds_per_byte for chosen in self._chosen.values()), default=0.0)
        return 0 < 2 * slowest * queue.hurried[0].whole_bytes < queue.quiet_s

    def _try(self, job: SealJob) -> None:
        """Do a job; if that fails, the block stays as it is, and training goes on."""
        queue = self._queue
        try:
            self._do(job)
            queue.failure = "" if job.spill else queue.failure
        except WorkerStoppedError:
            pass
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            if failure != queue.failure:
                _LOG.warning("a block could not be %s (%s)", "spilled" if job.spill else "compressed", failure)
                _LOG.debug("the reason", exc_info=error)
            queue.failure = failure
        finally:
            queue.end(job)
            queue.tell()

    def _do(self, job: SealJob) -> None:
        sealed: SealedSlices | None = None
        try:
            sealed = self.do(job)
        finally:
            # Nobody takes the lock for a block that stays as it was before; only to hear that none is left.
            stays = job.again and sealed is None and self._queue.hurried
            if job in self._queue.progress.begun and not stays:  # else it was handed in while its codec was chosen
                self._hand_in(job, sealed)

    def do(self, job: SealJob) -> SealedSlices | None:
        """Give a block its next form; None if it stays as it is."""
        act = self._seal_again if job.again else self._spill if job.spill else self._seal
        return act(job)

    def _hand_in(self, job: SealJob, sealed: SealedSlices | None) -> None:
        """List what became of a block, and have it collected if anybody is there: also if it failed."""
        queue = self._queue
        queue.results.append(SealResult(job.frozen.block, sealed, job.spill, job.again))
        collect = None if self._wake is None else self._wake()
        if collect is not None:
            try:
                collect()
            finally:
                queue.results.clear()  # one that could not be taken is not offered again

    def _do_quickly(self, job: SealJob) -> None:
        """See `ChoosingWorker`."""
        self._hand_in(job, self._seal_quickly(job))
        self._queue.end(job)

    # ---------------------------------------------------------------- one block

    def _spill(self, job: SealJob) -> SealedSlices | None:
        """Move one block to a file, as it is: what did not shrink is written raw."""
        block = job.frozen.block
        if self._write is None:
            return None
        sealed = block.sealed
        if sealed is None:
            sealed = self._coder.seal(block.raw, stored(block.slice_bytes))
        return None if sealed is None else self._write(sealed)

    def _seal(self, job: SealJob) -> SealedSlices | None:
        """Seal one block, worse and faster if blocks come faster than they are sealed; None if nothing pays."""
        try:
            return self._seal_well(job)
        except _PressedError:
            return self._seal_quickly(job)

    def _seal_well(self, job: SealJob) -> SealedSlices | None:
        """Seal one block as well as there is time for."""
        frozen, queue = job.frozen, self._queue
        kind = (frozen.field, frozen.window)
        chosen = self._chosen.get(kind)
        if chosen is None and (self.is_choosing or not self._may_choose(kind)):
            return self._seal_quickly(job)
        if chosen is None:
            chosen = self._choose(job)
            if job not in queue.progress.begun:
                return None
        chosen.age += 1
        if chosen.codec.method is Method.STORED:
            if chosen.age > _REST:
                del self._chosen[kind]
            return None
        rate = queue.bytes_per_second
        is_fast = rate > _FAST_BYTES_PER_SECOND
        if is_fast and rate * chosen.hurried_seconds > 1 and self.seals_quickly:
            return self._seal_quickly(job)
        is_late = bool(queue.jobs) or (is_fast and rate * chosen.seconds_per_byte > _BUSY_SHARE)
        if is_late and chosen.hurried != chosen.codec:
            sealed, chosen.hurried_seconds = self._sealed(job, chosen.hurried, in_a_hurry=True)
            return sealed
        sealed, chosen.seconds_per_byte = self._sealed(job, chosen.codec)
        ratio = _ratio(frozen, sealed)
        chosen.ratio = chosen.ratio or ratio
        if ratio < _DRIFT * chosen.ratio and chosen.age > _REST and not queue.jobs and not self.is_choosing:
            chosen = self._choose(job)
            if job in queue.progress.begun:
                stays = chosen.codec.method is Method.STORED
                sealed = None if stays else self._sealed(job, chosen.codec)[0]
                chosen.ratio = _ratio(frozen, sealed)
        return sealed

    def _sealed(self, job: SealJob, codec: Codec, *, in_a_hurry: bool = False) -> tuple[SealedSlices | None, float]:
        """Seal a block piece by piece, if that makes it smaller; say how many seconds a byte took."""
        frozen, helpers = job.frozen, min(self._threads - 1, _MOST_HELPERS) if in_a_hurry else 1
        slices, order, queue = frozen.block.raw, frozen.lane_order(), self._queue
        is_quick = codec == self._quick.get((frozen.field, frozen.window)) or not self.seals_quickly

        def watch(done: int = 0) -> None:
            queue.got_on(job, done * frozen.block.slice_bytes)
            queue.tell()
            if queue.is_pressed and not is_quick:
                raise _PressedError

        watch()
        given: dict[str, Any] = {} if order is None else {"order": order}  # a coder need not know of what is not asked
        given |= {"threads": helpers} if helpers > 1 else {}
        clock = time.monotonic if helpers > 1 else time.thread_time
        began = clock()
        sealed = self._coder.seal(slices, codec, watch=watch, **given)
        if sealed is None:
            sealed = self._coder.seal(slices, without_palette(codec), watch=watch, **given)
        sealed = _smaller(sealed, slices.nbytes)
        seconds = (clock() - began) / max(slices.nbytes, 1)
        if in_a_hurry:
            queue.hurried.append(HurriedBlock(frozen, is_raw=sealed is None))
        return sealed, seconds

    def _seal_quickly(self, job: SealJob) -> SealedSlices | None:
        """Seal a block as fast as can be, to be sealed again later."""
        frozen, kind = job.frozen, (job.frozen.field, job.frozen.window)
        if kind not in self._quick:
            self._quick[kind] = choose_quickly(self._coder, frozen.leaf, frozen.window, frozen.block.raw)
        self._leave_for_later(frozen)
        return self._sealed(job, self._quick[kind], in_a_hurry=True)[0]

    def _seal_again(self, job: SealJob) -> SealedSlices | None:
        """Seal a block better that was sealed in a hurry; None if that does not pay, or somebody waits."""
        before = job.frozen.block.sealed
        chosen = self._chosen.get((job.frozen.field, job.frozen.window)) or self._choose(job)
        if chosen.codec.method is Method.STORED:
            return None
        try:
            sealed, _ = self._sealed(replace(job, frozen=self._as_raw(job.frozen)), chosen.codec)
        except _PressedError:
            self._queue.hurried.appendleft(HurriedBlock(job.frozen, is_raw=before is None))
            return None
        return sealed if before is None or sealed is None else _smaller(sealed, before.nbytes)

    def _as_raw(self, frozen: FrozenBlock) -> FrozenBlock:
        """Return a block with its slices as they were."""
        block, sealed = frozen.block, frozen.block.sealed
        if sealed is None:
            return frozen
        raw = KeptBlock(block.slice_bytes, block.used, reserve(block.used * block.slice_bytes))
        self._coder.decode(sealed, np.arange(block.used), raw.raw)
        return replace(frozen, block=raw)


def _smaller(sealed: SealedSlices | None, nbytes: int) -> SealedSlices | None:
    return sealed if sealed is not None and sealed.nbytes < nbytes else None


def _ratio(frozen: FrozenBlock, sealed: SealedSlices | None) -> float:
    return 0.0 if sealed is None else sealed.count * frozen.block.slice_bytes / max(sealed.nbytes, 1)

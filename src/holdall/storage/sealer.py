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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdall.background import end_before_python
from holdall.report import GROWTH_CHECKS
from holdall.schema import Bytes
from holdall.storage.blocks import Coder, KeptBlock, SealedSlices, reserve
from holdall.storage.codec import Codec, Method, stored
from holdall.storage.codec_choice import BlockSample, choose, choose_quickly
from holdall.storage.slices import FrozenBlock, Window
from holdall.storage.tiers import HurriedBlock, SealJob, SealQueue, SealResult, new_bell, ring

_WAIT_FROM = 1
"""Blocks waiting from which on `add` waits, so that memory stays bounded: beside these there are the
one being sealed and the open one. More may wait where a limit leaves room for them."""
_WAIT_WHILE_CHOOSING_FROM = 4
_WAIT_WHILE_CHOOSING_BYTES = 8 * 2**20
"""The same while a codec is chosen, unless the blocks that wait are large: the worker looks at them now and then."""
_BETWEEN_MEASUREMENTS = 4
"""Blocks that are sealed at most before the choice of a codec goes on."""
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


@dataclass(slots=True)
class _ChosenCodec:
    """What was chosen for a field's slices, and how well it did then."""

    codec: Codec
    hurried: Codec  # the same, for when time is short
    seconds_per_byte: float = 0.0  # that sealing takes
    hurried_seconds: float = 0.0  # the same in a hurry
    ratio: float = 0.0
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
        seals_quickly: Whether blocks may be sealed worse than a chosen codec does while one is being chosen, or when
            they come faster than it seals even in a hurry. Not under a limit: what they take more would make others
            leave early. Nor where they go to disk: there they are not sealed again.

    Attributes:
        spare_bytes: Bytes of blocks that may wait, beside those that always may: what a limit leaves.
    """

    def __init__(
        self, coder: Coder, cap: float, threads: int, wake: Wake | None = None, write: Write | None = None,
        *, seals_quickly: bool = True,
    ) -> None:  # fmt: skip
        self._queue = SealQueue(seals_again=wake is not None)
        self._work = _Work(self._queue, coder, cap, threads, write, None if wake is None else weakref.WeakMethod(wake))
        self._work.seals_quickly = seals_quickly and write is None and wake is not None
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

    @property
    def is_behind(self) -> bool:
        """Whether a codec is being chosen, or blocks that were sealed in a hurry will be sealed again."""
        return self._work.is_choosing or bool(self._queue.hurried)

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
            with self._queue.waiting_for_room():
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
            self._busy, self._queue.begun = threading.Lock(), ()
            self._work.choosing, self._process = None, os.getpid()
        self._thread = threading.Thread(target=self._work.run, args=(self._busy,), name="holdall-sealer", daemon=True)
        end_before_python(self._thread, self._queue.stop)
        self._thread.start()


class _StoppedError(Exception):
    """The worker ends: what it was choosing is not needed."""


class _Work:
    """Chooses codecs, seals and spills; used by the worker alone."""

    def __init__(
        self, queue: SealQueue, coder: Coder, cap: float, threads: int, write: Write | None,
        wake: weakref.WeakMethod[Wake] | None,
    ) -> None:  # fmt: skip
        self._queue = queue
        self._coder = coder
        self._cap, self._threads = cap, threads
        self._write = write
        self._wake = wake
        self._chosen: dict[_Kind, _ChosenCodec] = {}
        self._quick: dict[_Kind, Codec] = {}
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
        except _StoppedError:
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
            if job in self._queue.begun:  # else it was handed in while its codec was chosen
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
        frozen, queue = job.frozen, self._queue
        kind = (frozen.field, frozen.window)
        chosen = self._chosen.get(kind)
        if chosen is None and self.is_choosing:
            return self._seal_quickly(frozen)
        if chosen is None:
            chosen = self._chosen[kind] = self._choose(job)
            if job not in queue.begun:
                return None
        chosen.age += 1
        if chosen.codec.method is Method.STORED:
            if chosen.age > _REST:
                del self._chosen[kind]
            return None
        rate = queue.bytes_per_second
        is_fast = rate > _FAST_BYTES_PER_SECOND
        if is_fast and rate * chosen.hurried_seconds > 1 and self.seals_quickly:
            return self._seal_quickly(frozen)
        is_late = bool(queue.jobs) or (is_fast and rate * chosen.seconds_per_byte > _BUSY_SHARE)
        if is_late and chosen.hurried != chosen.codec:
            sealed, chosen.hurried_seconds = self._sealed(frozen, chosen.hurried, in_a_hurry=True)
            return sealed
        sealed, chosen.seconds_per_byte = self._sealed(frozen, chosen.codec)
        ratio = _ratio(frozen, sealed)
        chosen.ratio = chosen.ratio or ratio
        if ratio < _DRIFT * chosen.ratio and chosen.age > _REST and not queue.jobs and not self.is_choosing:
            self._chosen[kind] = chosen = self._choose(job)
            if job in queue.begun:
                stays = chosen.codec.method is Method.STORED
                sealed = None if stays else self._sealed(frozen, chosen.codec)[0]
                chosen.ratio = _ratio(frozen, sealed)
        return sealed

    def _sealed(
        self, frozen: FrozenBlock, codec: Codec, *, in_a_hurry: bool = False
    ) -> tuple[SealedSlices | None, float]:
        """Seal a block, if that makes it smaller; say how many seconds a byte took."""
        slices, order = frozen.block.raw, frozen.lane_order()
        helpers = min(self._threads - 1, _MOST_HELPERS) if in_a_hurry else 1
        given: dict[str, Any] = {} if order is None else {"order": order}  # a coder need not know of what is not asked
        given |= {"threads": helpers} if helpers > 1 else {}
        clock = time.monotonic if helpers > 1 else time.thread_time
        began = clock()
        sealed = self._coder.seal(slices, codec, **given)
        if sealed is None:
            sealed = self._coder.seal(slices, codec.without_palette(), **given)
        sealed = _smaller(sealed, slices.nbytes)
        seconds = (clock() - began) / max(slices.nbytes, 1)
        if in_a_hurry:
            self._queue.hurried.append(HurriedBlock(frozen, is_raw=sealed is None))
        return sealed, seconds

    def _seal_quickly(self, frozen: FrozenBlock) -> SealedSlices | None:
        """Seal a block as fast as can be, to be sealed again later."""
        kind = (frozen.field, frozen.window)
        if kind not in self._quick:
            self._quick[kind] = choose_quickly(self._coder, frozen.leaf, frozen.window, frozen.block.raw)
        return self._sealed(frozen, self._quick[kind], in_a_hurry=True)[0]

    def _seal_again(self, job: SealJob) -> SealedSlices | None:
        """Seal a block better that was sealed in a hurry; None if that does not pay."""
        frozen, before = job.frozen, job.frozen.block.sealed
        if before is not None:
            slices = reserve(frozen.block.used * frozen.block.slice_bytes)
            frozen = replace(frozen, block=KeptBlock(frozen.block.slice_bytes, frozen.block.used, slices))
            self._coder.decode(before, np.arange(frozen.block.used), frozen.block.raw)
        kind = (frozen.field, frozen.window)
        chosen = self._chosen.get(kind)
        if chosen is None:  # it came while another one was being chosen
            chosen = self._chosen[kind] = self._choose(replace(job, frozen=frozen))
        sealed = None if chosen.codec.method is Method.STORED else self._sealed(frozen, chosen.codec)[0]
        return sealed if before is None or sealed is None else _smaller(sealed, before.nbytes)

    # ---------------------------------------------------------------- the choice

    def _choose(self, job: SealJob) -> _ChosenCodec:
        """Choose a codec by a block; what comes meanwhile is sealed between two measurements."""
        # Here, and not in a thread of its own: what that one's allocator keeps would be 20 MiB more.
        frozen, self.choosing = job.frozen, job
        coder: Any = _MeasuringCoder(self._coder, self._see_to_others)
        try:
            sample = BlockSample.of(frozen.block.raw, frozen.window, frozen.lanes, frozen.lane_order())
            codec = choose(coder, frozen.leaf, frozen.window, sample, self._cap, self._threads)
            return _ChosenCodec(codec, codec.hurried(), coder.seconds_of(codec), coder.seconds_of(codec.hurried()))
        finally:
            self.choosing = None

    def _see_to_others(self) -> None:
        """Seal blocks that came while a codec is chosen, if somebody waits for room; first the one it is chosen for."""
        queue, job = self._queue, self.choosing
        if queue.stopped:
            raise _StoppedError
        if not (queue.is_pressed and self.seals_quickly):
            return
        if job is not None and job in queue.begun and not job.again:
            self._hand_in(job, self._seal_quickly(job.frozen))
            queue.end(job)
        for _ in range(_BETWEEN_MEASUREMENTS):
            other = queue.begin_next()
            if other is None:
                break
            queue.tell()
            self._try(other)


_Kind = tuple[int, Window]


class _MeasuringCoder:
    """A coder that calls `pause` before it seals samples, and remembers how long codecs take."""

    def __init__(self, coder: Coder, pause: Callable[[], None]) -> None:
        self._coder, self._pause = coder, pause
        self._seconds: dict[tuple[Any, ...], float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coder, name)

    def seal(self, slices: Bytes, codec: Codec) -> SealedSlices | None:
        """Seal samples."""
        self._pause()
        began = time.thread_time()
        sealed = self._coder.seal(slices, codec)
        self._seconds[_cost_of(codec)] = (time.thread_time() - began) / max(slices.nbytes, 1)
        return sealed

    def seconds_of(self, codec: Codec) -> float:
        """Say how many seconds a byte takes; 0 if it is not known."""
        return self._seconds.get(_cost_of(codec), 0.0)


def _cost_of(codec: Codec) -> tuple[Any, ...]:
    """Return what decides how long compressing takes."""
    return codec.method, codec.level, codec.transform, codec.group, codec.key > 0, codec.dictionary is not None


def _smaller(sealed: SealedSlices | None, nbytes: int) -> SealedSlices | None:
    return sealed if sealed is not None and sealed.nbytes < nbytes else None


def _ratio(frozen: FrozenBlock, sealed: SealedSlices | None) -> float:
    return 0.0 if sealed is None else sealed.count * frozen.block.slice_bytes / max(sealed.nbytes, 1)

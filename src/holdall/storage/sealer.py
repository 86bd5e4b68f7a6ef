"""Sealing: full blocks are compressed, and moved to files, by one worker outside the training thread.

In:  blocks that take no more slices.  Out: the same slices, sealed or on disk; readers change over when they next look
a place up.
Invariant: a block stays as it is until its next form is complete; whatever goes wrong, it stays as it is. The worker
changes no block: it lists what became of each, and who owns the sealer collects that under a lock of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import NamedTuple

from holdall.schema import Bytes
from holdall.storage.blocks import Coder, FrozenBlock, SealedSlices, SliceBlock
from holdall.storage.codec import Codec, Method, Transform, choose
from holdall.storage.layout import Window
from holdall.threads import fork_safe

_WAIT_FROM = 1
"""Blocks waiting from which on `add` waits, so that memory stays bounded: beside these there are the
one being sealed and the open one."""
_WAIT_WHILE_CHOOSING_FROM = 4
_WAIT_WHILE_CHOOSING_BYTES = 8 * 2**20
"""The same while a codec is chosen, which takes a second and happens once or twice: training need not stand still for
it, unless the blocks that wait are large."""
_DRIFT = 0.85
"""A block that shrinks this much worse than the one the codec was chosen on asks for a new choice."""
_REST = 8
"""Blocks of a field between two choices, so that data that defies compression costs little."""
_LOOK_AGAIN_S = 1.0
"""How often who waits for the worker looks whether there is one."""

_LOG = logging.getLogger("holdall")


Write = Callable[[SealedSlices], SealedSlices]
Wake = Callable[[], None]


class SealResult(NamedTuple):
    """What became of a block."""

    block: SliceBlock
    sealed: SealedSlices | None  # None: it stays as it is


class _SealJob(NamedTuple):
    frozen: FrozenBlock
    spill: bool  # move it to a file, instead of sealing it


@dataclass(slots=True)
class _ChosenCodec:
    """What was chosen for a field's slices, and how well it did then."""

    codec: Codec
    hurried: Codec  # the same, for when time is short
    ratio: float = 0.0
    age: int = 0  # blocks since


@dataclass(slots=True)
class _Queue:
    """What the worker and the memory share."""

    jobs: deque[_SealJob] = attribute(default_factory=deque)
    results: list[SealResult] = attribute(default_factory=list)
    changed: threading.Condition = attribute(default_factory=lambda: threading.Condition(fork_safe(threading.RLock())))
    at_work: int = 0
    stopped: bool = False
    failure: str = ""


class Sealer:
    """Seals and spills blocks in the order in which they come, one at a time.

    Args:
        cap: How much longer sampling may take, over a raw gather.
        threads: Threads that share the decoding of a batch.
        wake: Called by the worker after every block, for its owner to collect the result at once; a bound method, held
            weakly, so that a memory which is simply dropped ends its worker too. None: the owner looks by itself.
        write: Writes sealed slices to a file and returns them as they are read from there; None without a disk tier.
    """

    def __init__(
        self, coder: Coder, cap: float, threads: int, wake: Wake | None = None, write: Write | None = None
    ) -> None:
        self._queue = _Queue()
        self._work = _Work(coder, cap, threads, write)
        self._wake = None if wake is None else weakref.WeakMethod(wake)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _stop, self._queue)

    def submit(self, frozen: FrozenBlock) -> None:
        """Have a block sealed."""
        self._enqueue(_SealJob(frozen, spill=False))

    def spill(self, frozen: FrozenBlock) -> None:
        """Have a block moved to a file."""
        self._enqueue(_SealJob(frozen, spill=True))

    def withdraw(self, evicted: set[int]) -> None:
        """Forget the blocks with these identities, unless their turn has come."""
        with self._queue.changed:
            left = [job for job in self._queue.jobs if id(job.frozen.block) not in evicted]
            self._queue.jobs = deque(left)
            self._queue.changed.notify_all()

    def collect(self) -> list[SealResult]:
        """Return what became of blocks since the last time."""
        with self._queue.changed:
            results, self._queue.results = self._queue.results, []
        return results

    @property
    def backlog(self) -> int:
        """Blocks that wait, are being worked at or about to be collected."""
        return len(self._queue.jobs) + self._queue.at_work

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
        if len(jobs) < _WAIT_FROM or not self._work.is_choosing or len(jobs) >= _WAIT_WHILE_CHOOSING_FROM:
            return len(jobs) >= _WAIT_FROM
        return sum(job.frozen.block.used_bytes for job in jobs) > _WAIT_WHILE_CHOOSING_BYTES

    def wait_for_room(self) -> None:
        """Wait while too many blocks are queued; not to be called under the memory's lock."""
        if self.is_crowded:
            self._wait_until(lambda: not self.is_crowded)

    def drain(self) -> None:
        """Wait until everything submitted is sealed or spilled."""
        self._wait_until(lambda: self.backlog == 0)

    def stop(self) -> None:
        """End the worker after the block that it is at."""
        _stop(self._queue)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _enqueue(self, job: _SealJob) -> None:
        with self._queue.changed:
            self._queue.jobs.append(job)
            self._queue.changed.notify_all()
        self._see_to_worker()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._queue.stopped:
            self._see_to_worker()
            with self._queue.changed:
                self._queue.changed.wait_for(lambda: condition() or self._queue.stopped, timeout=_LOOK_AGAIN_S)

    def _see_to_worker(self) -> None:
        """Start the worker if there is none: at first, after a fork, and should it have died."""
        if self._queue.stopped or (self._thread is not None and self._thread.is_alive()):
            return
        with self._queue.changed:
            self._queue.at_work = 0
        self._thread = threading.Thread(
            target=_run_worker, args=(self._queue, self._work, self._wake), name="holdall-sealer", daemon=True
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

    def do(self, job: _SealJob, hurry: bool) -> SealedSlices | None:
        """Give a block its next form; None if it stays as it is."""
        return self.spill(job.frozen) if job.spill else self.seal(job.frozen, hurry)

    def spill(self, frozen: FrozenBlock) -> SealedSlices | None:
        """Move one block to a file, as it is: what did not shrink is written raw."""
        if self._write is None:
            return None
        sealed = frozen.block.sealed
        if sealed is None:
            stored = Codec(Method.STORED, 0, Transform(frozen.block.slice_bytes))
            sealed = self._coder.seal(frozen.block.raw, stored)
        return None if sealed is None else self._write(sealed)

    def seal(self, frozen: FrozenBlock, hurry: bool) -> SealedSlices | None:
        """Seal one block; None if nothing pays."""
        slices = frozen.block.raw
        key = (frozen.field, frozen.window)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self._choose(frozen, slices)
        chosen.age += 1
        if chosen.codec.method is Method.STORED:
            if chosen.age > _REST:
                del self._chosen[key]
            return None
        sealed = self._coder.seal(slices, chosen.hurried if hurry else chosen.codec)
        ratio = 0.0 if sealed is None else slices.nbytes / max(sealed.nbytes, 1)
        chosen.ratio = chosen.ratio or ratio
        if ratio < _DRIFT * chosen.ratio and chosen.age > _REST and not hurry:
            self._chosen[key] = chosen = self._choose(frozen, slices)
            stays = chosen.codec.method is Method.STORED
            sealed = None if stays else self._coder.seal(slices, chosen.codec)
            chosen.ratio = 0.0 if sealed is None else slices.nbytes / max(sealed.nbytes, 1)
        return sealed if sealed is not None and sealed.nbytes < slices.nbytes else None

    def _choose(self, frozen: FrozenBlock, slices: Bytes) -> _ChosenCodec:
        self.is_choosing = True
        try:
            codec = choose(self._coder, frozen.leaf, frozen.window, slices, self._cap, self._threads, frozen.lanes)
            return _ChosenCodec(codec, codec.hurried())
        finally:
            self.is_choosing = False


def _run_worker(queue: _Queue, work: _Work, wake: weakref.WeakMethod[Wake] | None) -> None:
    hurry = False
    while True:
        with queue.changed:
            queue.changed.wait_for(lambda: queue.jobs or queue.stopped)
            if queue.stopped:
                return
            job = queue.jobs.popleft()
            queue.at_work = 1
            queue.changed.notify_all()
        try:
            _do(job, hurry, work, queue, wake)
            queue.failure = "" if job.spill else queue.failure
        except Exception as error:  # the block stays as it is, and training goes on
            failure = f"{type(error).__name__}: {error}"
            if failure != queue.failure:
                _LOG.warning("a block could not be %s (%s)", "spilled" if job.spill else "compressed", failure)
                _LOG.debug("the reason", exc_info=error)
            queue.failure = failure
        finally:
            del job
            with queue.changed:
                queue.at_work = 0
                hurry = bool(queue.jobs)  # one that is there already: the worker falls behind
                queue.changed.notify_all()


def _do(job: _SealJob, hurry: bool, work: _Work, queue: _Queue, wake: weakref.WeakMethod[Wake] | None) -> None:
    """Have a job done, list the result, and have it collected if anybody is there: also if it failed."""
    sealed: SealedSlices | None = None
    try:
        sealed = work.do(job, hurry)
    finally:
        with queue.changed:
            queue.results.append(SealResult(job.frozen.block, sealed))
        collect = None if wake is None else wake()
        if collect is not None:
            collect()


def _stop(queue: _Queue) -> None:
    with queue.changed:
        queue.stopped = True
        queue.changed.notify_all()

"""Background compression of full blocks. One worker thread compresses blocks and writes them to files.

A block stays readable in its old form until the new one is complete, so a failure never loses data. The worker changes
no block: it lists the results, and the owner of the sealer collects them under its own lock.

Every block is compressed once. The codec of a field is chosen on its first block. While the worker is behind, it uses a
fast preset instead, so that `add` rarely waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdall.background import end_before_python
from holdall.report import GROWTH_CHECKS
from holdall.schema import Bytes
from holdall.storage.block_sample import BlockSample
from holdall.storage.blocks import Codec, Method, SealedSlices, stored
from holdall.storage.codec import without_palette
from holdall.storage.codec_choice import choose, choose_fast_preset
from holdall.storage.slices import FrozenBlock, Window
from holdall.storage.ticks import Coder
from holdall.storage.tiers import NO_LIMIT, SealJob, SealProgress, SealQueue, SealResult, new_bell, ring

_FAST_BYTES_PER_SECOND = 32 * 2**20
"""From this rate on, a good part of the time goes to making room for the next block."""
_MAX_HELPERS = 4
"""Threads that share a block when the fast preset is used, if that many cores are left beside the training thread."""
_DRIFT = 0.85
"""If a block's compression ratio is below this share of the first block's, the codec is chosen again."""
_REST = 8
"""Blocks of a field between two choices, so that data that cannot be compressed costs little."""
_SAY_AFTER_S = 10.0
"""Who waits longer says so in the log."""
_STOP_S = 30.0
"""How long the end of a memory waits for the block that is being worked at: a disk may hang."""
_WARN_AGAIN_S = 600.0
"""Seconds until a failure of the same kind is logged again."""
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
            weakly, so that a memory which is simply dropped ends its worker too. None: the owner looks by itself.
        write: Writes sealed slices to a file and returns them as they are read from there; None without a disk tier.
        min_waiting_bytes: See `SealQueue`.

    Attributes:
        queue: What it shares with its worker.
    """

    def __init__(
        self, coder: Coder, cap: float, threads: int, wake: Wake | None = None, write: Write | None = None,
        min_waiting_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._queue = self.queue = SealQueue(min_waiting_bytes)
        self._work = _Work(self._queue, coder, cap, threads, write, None if wake is None else weakref.WeakMethod(wake))
        self._thread: threading.Thread | None = None
        self._busy = threading.Lock()  # held by the worker: there is never more than one
        self._process = os.getpid()
        self._grown_bytes = 0  # of those that were filled since a guard was asked
        weakref.finalize(self, self._queue.stop)

    def allow_fast_preset(self, *, is_allowed: bool) -> None:
        """Set whether the fast preset may be used: not if its larger blocks would evict others early.

        With a disk tier it is never used. There the disk may be the reason why the worker is behind.
        """
        self._work.may_use_fast_preset = is_allowed and self._work.write is None

    def record_filled(self, nbytes: int) -> None:
        """Record `nbytes` of newly filled blocks. They are compressed now, or stay raw for a while."""
        self._grown_bytes += nbytes
        self._queue.came(nbytes)

    @property
    def bytes_per_second(self) -> float:
        """How fast blocks are filled, or would be if `add` never waited; 0 if it is not known, or all is waited for."""
        return 0.0 if self._queue.is_drained else self._queue.bytes_per_second

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
    def is_choosing(self) -> bool:
        """Whether the worker is choosing a codec."""
        return self._work.is_choosing

    def reason(self, field: int) -> str:
        """Say why the slices of a field are coded as they are; nothing if that was not chosen yet."""
        return self._work.reason(field)

    def allowance(self) -> tuple[int, int]:
        """Return what open blocks may take before `add` waits, and how much was sealed so far.

        What is sealed from now on may come on top, without another look, until the next block is submitted.
        """
        if not self._queue.jobs:
            return NO_LIMIT, 0
        outstanding, sealed = self._queue.outstanding()
        return self._queue.max_waiting_bytes - outstanding, sealed

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
        """Wait until every submitted block is compressed or spilled; meanwhile the fast preset is not used."""
        self._queue.is_drained = True
        try:
            self._wait_until(lambda: self.backlog == 0)
        finally:
            self._queue.is_drained = False

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
            self._work.is_choosing, self._process = False, os.getpid()
        self._thread = threading.Thread(target=self._work.run, args=(self._busy,), name="holdall-sealer", daemon=True)
        end_before_python(self._thread, self._queue.stop)
        self._thread.start()


FieldKind = tuple[int, Window]
"""Slices that get a codec of their own: those of a field, cut in one way."""


@dataclass(slots=True)
class _ChosenCodec:
    """The codec of a field, and how well it did on the first block."""

    codec: Codec
    ratio: float = 0.0  # of the first block that was compressed with it
    age: int = 0  # blocks of the field since it was chosen


class _WorkerStoppedError(Exception):
    """The worker ends, so the result of its present step is not needed."""


class _AddWaitsError(Exception):
    """`add` waits for room, so the present block has to be compressed with the fast preset."""


class _Work:
    """Chooses codecs, compresses and spills; used by the worker alone.

    Attributes:
        may_use_fast_preset: Whether the worker may use the fast preset while it is behind.
        is_choosing: Whether a codec is being chosen.
    """

    def __init__(
        self, queue: SealQueue, coder: Coder, cap: float, threads: int, write: Write | None,
        wake: weakref.WeakMethod[Wake] | None,
    ) -> None:  # fmt: skip
        self._queue = queue
        self._coder = coder
        self._cap = cap
        self._threads = threads
        self._wake = wake
        self._warned_at: dict[str, float] = {}  # when a failure was last logged, by its kind
        self._chosen: dict[FieldKind, _ChosenCodec] = {}
        self._fast_presets: dict[FieldKind, Codec] = {}
        self.write = write
        self.may_use_fast_preset = write is None
        self.is_choosing = False

    def reason(self, field: int) -> str:
        """Return why the newest codec of a field was chosen."""
        reasons = [chosen.codec.reason for (of, _), chosen in tuple(self._chosen.items()) if of == field]
        return reasons[-1] if reasons else ""

    # ---------------------------------------------------------------- one job after another

    def run(self, busy: threading.Lock) -> None:
        """Work until the queue is stopped; a thread that was started beside another waits for it to end."""
        queue = self._queue
        with busy:
            while not queue.stopped:
                job = queue.begin_next()
                queue.tell()
                if job is None:
                    queue.wakes_worker.acquire(timeout=_LOOK_AGAIN_S)
                    continue
                self._try(job)
                del job

    def _try(self, job: SealJob) -> None:
        """Do a job; if it fails, the block stays as it is, and training continues."""
        queue = self._queue
        try:
            self._do(job)
            queue.failure = "" if job.spill else queue.failure
        except _WorkerStoppedError:
            pass
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            if self._is_worth_a_warning(error):
                _LOG.warning("a block could not be %s (%s)", "spilled" if job.spill else "compressed", failure)
                _LOG.debug("the reason", exc_info=error)
            queue.failure = failure
        finally:
            queue.end(job)
            queue.tell()

    def _is_worth_a_warning(self, error: Exception) -> bool:
        """Whether no failure of this kind was logged lately: a full disk may refuse every other block for hours."""
        cause = error.__cause__
        kind = f"{type(error).__name__} {cause.errno}" if isinstance(cause, OSError) else str(error)
        now = time.monotonic()
        is_new = now - self._warned_at.get(kind, -math.inf) >= _WARN_AGAIN_S
        if is_new:
            self._warned_at[kind] = now
        return is_new

    def _do(self, job: SealJob) -> None:
        sealed: SealedSlices | None = None
        try:
            sealed = self.do(job)
        finally:
            self._hand_in(job, sealed)

    def do(self, job: SealJob) -> SealedSlices | None:
        """Compress or spill a block; None if it stays as it is."""
        return self._spill(job) if job.spill else self._seal(job)

    def _hand_in(self, job: SealJob, sealed: SealedSlices | None) -> None:
        """List the result of a job, also if it failed, and let the owner collect it."""
        queue = self._queue
        queue.results.append(SealResult(job.frozen.block, sealed, job.spill))
        collect = None if self._wake is None else self._wake()
        if collect is not None:
            try:
                collect()
            finally:
                queue.results.clear()  # one that could not be taken is not offered again

    # ---------------------------------------------------------------- one block

    def _spill(self, job: SealJob) -> SealedSlices | None:
        """Write one block to a file in its present form; a block that did not shrink is written raw."""
        block = job.frozen.block
        if self.write is None:
            return None
        sealed = block.sealed
        if sealed is None:
            sealed = self._coder.seal(block.raw, stored(block.slice_bytes))
        return None if sealed is None else self.write(sealed)

    def _seal(self, job: SealJob) -> SealedSlices | None:
        """Compress one block with the codec of its field, or with the fast preset; None if it stays raw."""
        kind = (job.frozen.field, job.frozen.window)
        chosen = self._chosen.get(kind)
        if chosen is None and self.is_choosing:  # a block that came during the choice
            return self._seal_fast(job)
        if chosen is None:
            chosen = self._chosen[kind] = _ChosenCodec(self._choose(job.frozen))
        chosen.age += 1
        if chosen.codec.method is Method.STORED:
            if chosen.age > _REST:
                del self._chosen[kind]
            return None
        if self._needs_fast_preset:
            return self._seal_fast(job)
        try:
            sealed = self._compress(job, chosen.codec, yields=self.may_use_fast_preset)
        except _AddWaitsError:
            return self._seal_fast(job)
        ratio = 0.0 if sealed is None else sealed.count * job.frozen.block.slice_bytes / max(sealed.nbytes, 1)
        chosen.ratio = chosen.ratio or ratio
        if ratio < _DRIFT * chosen.ratio and chosen.age > _REST:
            del self._chosen[kind]  # the next block of the field gets a new one
        return sealed

    @property
    def _needs_fast_preset(self) -> bool:
        return self.may_use_fast_preset and self._queue.is_behind

    def _seal_fast(self, job: SealJob) -> SealedSlices | None:
        """Compress one block with the fast preset; threads share the block."""
        kind = (job.frozen.field, job.frozen.window)
        if kind not in self._fast_presets:
            leaf, window = job.frozen.leaf, job.frozen.window
            self._fast_presets[kind] = choose_fast_preset(self._coder, leaf, window, job.frozen.block.raw)
        helpers = min(self._threads - 1, _MAX_HELPERS)
        return self._compress(job, self._fast_presets[kind], threads=max(helpers, 1))

    def _compress(self, job: SealJob, codec: Codec, *, threads: int = 1, yields: bool = False) -> SealedSlices | None:
        """Compress a block piece by piece, and report every piece; None if the block would not get smaller.

        Args:
            yields: Whether to raise `_AddWaitsError` if `add` waits for room.
        """
        frozen = job.frozen
        queue = self._queue
        slices = frozen.block.raw

        def watch(done: int = 0) -> None:
            queue.got_on(job, done * frozen.block.slice_bytes)
            queue.tell()
            if yields and queue.is_pressed:
                raise _AddWaitsError

        watch()
        # A coder need not know arguments that are not used.
        options: dict[str, Any] = {"threads": threads} if threads > 1 else {}
        order = frozen.lane_order()
        if order is not None:
            options["order"] = order
        sealed = self._coder.seal(slices, codec, watch=watch, **options)
        if sealed is None:
            sealed = self._coder.seal(slices, without_palette(codec), watch=watch, **options)
        return sealed if sealed is not None and sealed.nbytes < slices.nbytes else None

    # ---------------------------------------------------------------- the choice of a codec

    def _choose(self, frozen: FrozenBlock) -> Codec:
        """Choose the codec of a field on one of its blocks. Blocks that come meanwhile do not wait for the choice."""
        # Not in a thread of its own: the memory that its allocator keeps would be 20 MiB more.
        coder: Any = _PausingCoder(self._coder, self._pause_choice)
        self.is_choosing = True
        try:
            sample = BlockSample.of(frozen.block.raw, frozen.window, frozen.lanes, frozen.lane_order())
            return choose(coder, frozen.leaf, frozen.window, sample, self._cap, self._threads)
        finally:
            self.is_choosing = False

    def _pause_choice(self) -> None:
        """Leave Python's lock to a snapshot, and compress waiting blocks while the worker is behind."""
        queue = self._queue
        if queue.stopped:
            raise _WorkerStoppedError
        left = queue.away_until - time.monotonic()
        if left > 0:
            time.sleep(left)
        while self._needs_fast_preset:
            job = queue.begin_next()
            if job is None:
                return
            queue.tell()
            self._try(job)


class _PausingCoder:
    """A coder that calls `pause` between pieces of the samples that it compresses."""

    def __init__(self, coder: Coder, pause: Callable[[], None]) -> None:
        self._coder = coder
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coder, name)

    def seal(self, slices: Bytes, codec: Codec) -> SealedSlices | None:
        """Compress samples."""
        self._pause()
        return self._coder.seal(slices, codec, watch=lambda _done: self._pause())

"""Saving: `save` returns a handle at once, and a thread for each url writes one checkpoint after another.

In:  snapshots.  Out: handles, which wait for the checkpoint or for its error.
Invariant: saves to one url are written in the order in which they were asked for, whichever memory, shard or timer
asks. A save that fails changes nothing: the checkpoints before it are as they were, and the memory goes on.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdall.background import CLOSE_S, JOBS, left
from holdall.checkpoint.attached import checked_files
from holdall.checkpoint.directory import DirectoryWriter, disk_errors_explained
from holdall.checkpoint.files import CheckpointWriter
from holdall.checkpoint.load import is_remote, normalized_url
from holdall.checkpoint.manifest import CheckpointReader, Waiting
from holdall.checkpoint.write import Report, RowsKey, SavedRecords, SnapshotWriter
from holdall.errors import ArgumentError, CheckpointError, FencedError
from holdall.storage import Coder, FrozenRows, FrozenStore, FullBlock, RowChunk, SliceBlock

if TYPE_CHECKING:
    from holdall.checkpoint.autosave import CheckpointMirror
    from holdall.checkpoint.streams import ShardsSnapshot

_MOST_NUMBER = 10**16 - 1
_LOOK_S, _LOOK_AGAIN_S = 0.1, 0.05
_GIVE_UP_SHARE = 0.9
"""Of the time that `close` has: after it the job is given up, and has the rest to end."""
_IDLE_S = 60.0
"""A thread stays this long without a job: to start one takes milliseconds on a busy machine."""
_YIELD_S = 0.001
"""A thread that was woken takes Python's lock, and would make the one that woke it wait for a whole turn."""
_CANCELLED_S = 5.0
"""How long a save that was cancelled has to end."""

_LOG = logging.getLogger("holdall")

Progress = Callable[[str, int], None] | Callable[[str, int, int], None]
"""Called with what is written now ("rows", "logs", "blocks", "files", "commit"), and the bytes written so far; with the
bytes in all, about, if it takes three arguments."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was acknowledged."""

    url: str
    number: int
    bytes_written: int  # by this save: what earlier checkpoints wrote is not written again
    bytes_total: int  # of all files that the checkpoint names
    transitions: int
    seconds: float


@dataclass(slots=True)
class Snapshot:
    """All that a checkpoint holds, at the moment of `save`."""

    store: FrozenStore | None  # None once its parts are being written, so that they can be freed one by one
    schema: dict[str, Any]
    capacity_ticks: int
    state: dict[str, Any]  # of sampler and generator, and what else the owner wants back
    attach: Mapping[str, Path | bytes]
    lock: threading.Lock  # of the memory: rows are read under it
    release: Callable[[FrozenRows], None]
    take_again: Callable[[FrozenRows, int, int], RowChunk | None] = lambda _rows, _number, _version: None
    """Returns a chunk of rows that was thought to be saved, in a version; None if it was written over since."""

    @property
    def transitions(self) -> int:
        """How many it holds, before it is written."""
        return 0 if self.store is None else self.store.transitions

    def write(self, writer: SnapshotWriter) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write all of it; return its state, and what the manifest says of the rest."""
        return writer.write_store(self)

    def drop(self) -> None:
        """Let the memory go on without it, if it was not written."""
        store, self.store = self.store, None
        if store is not None:
            with self.lock:
                self.release(store.rows)


class SaveHandle:
    """A save under way."""

    def __init__(self, saver: Saver) -> None:
        self.url, self._saver = saver.url, saver
        self.mirror: CheckpointMirror | None = None  # what sends it on
        self._ended = threading.Event()
        self._outcome: Checkpoint | BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is safe, and return it; raise what went wrong if it is not."""
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"The checkpoint at {self.url} was not complete after {timeout} s. The save is still running. Call "
                "result() again."
            )
        if not isinstance(self._outcome, Checkpoint):
            raise self._outcome or CheckpointError(f"the checkpoint at {self.url} ended without a result; report this")
        return self._outcome

    def finish(self, timeout: float = CLOSE_S) -> Checkpoint:
        """Wait as long as the save gets on; cancel it if it does not for `timeout` seconds. Return the checkpoint."""
        began = time.monotonic()
        while not self._ended.wait(_LOOK_S):
            if time.monotonic() - self._saver.waiting.stuck_since(began) >= timeout:
                self.cancel()
                return self.result(_CANCELLED_S)
        return self.result()

    def mirrored(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint, or a newer one, stands in the mirror too, and return it."""
        if self.mirror is None:
            raise ArgumentError("mirrored() was called, but the save had no mirror; call save(path, mirror=url)")
        began = time.monotonic()
        checkpoint = self.result(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        self.mirror.wait(checkpoint.number, left)
        return checkpoint

    def cancel(self) -> None:
        """Give this save up, and its copy in the mirror: wherever it is, its `result` raises. Later saves go on."""
        self._saver.cancel(self)
        if self.mirror is not None:
            self.mirror.cancel()

    def end(self, outcome: Checkpoint | BaseException) -> None:
        """End it, well or not."""
        self._outcome = outcome
        self._ended.set()


def checked_save(
    url: str | os.PathLike[str], attach: Mapping[str, Any] | None, progress: Any
) -> tuple[str, dict[str, Path | bytes]]:
    """Check the arguments of a save; return the url in one way of writing it, and the attached files by name."""
    location = normalized_url(url)
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress ({progress!r}) must be a function of text and bytes; pass one, or None")
    return location, {} if attach is None else checked_files(attach)


def open_writer(url: str | os.PathLike[str], waiting: Waiting | None = None) -> CheckpointWriter:
    """Begin to write checkpoints to a url; `waiting` ends if the store does not answer."""
    location = normalized_url(url)
    if is_remote(location):
        from holdall.checkpoint.object_store import ObjectStoreWriter  # noqa: PLC0415  not for a local path
        from holdall.checkpoint.objects import Objects  # noqa: PLC0415

        return ObjectStoreWriter(location, Objects(location, waiting))
    return DirectoryWriter(Path(location))


def reporting(progress: Callable[..., None] | None, waiting: Waiting) -> Report:
    """Note that the save gets on, end it if it was given up, and call the user's callback, whatever that does."""
    wants_total = False
    if progress is not None:
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(progress).bind("", 0, 0)
            wants_total = True

    def report(phase: str, nbytes: int, total: int) -> None:
        waiting.require()
        waiting.got_on()
        if progress is None:
            return
        try:
            progress(phase, nbytes, *([total] if wants_total else []))
        except Exception as error:  # a broken progress bar is no reason to lose a checkpoint
            _LOG.warning("the progress callback failed (%s)", error)

    return report


class JobThread:
    """Does jobs one after another in a thread, which is started when it is first needed.

    Args:
        work: Does a job; it raises nothing.
    """

    def __init__(self, name: str, waiting: Waiting, work: Callable[[Any], None]) -> None:
        self.lock: Any = threading.RLock()
        self.changed = threading.Condition(self.lock)  # all that follows is read and changed under it
        self.waiting = waiting
        self.jobs: deque[Any] = deque()
        self.at_work: Any = None  # the job that is being done
        self.has_given_up = False  # at the end: what is left of the jobs fails
        self._is_ending, self._name, self._work = False, name, work
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way, or waits for its turn."""
        return self._process == os.getpid() and (self.at_work is not None or bool(self.jobs))

    def locked(self) -> Any:
        """Return the lock, for `with`; a thread that was interrupted in it leaves it first."""
        if self.lock._is_owned():
            left(self.lock)
        return self.lock

    def put(self, job: Any) -> None:
        """Have a job done after those before it, unless no thread can be started; called under `changed`."""
        if self._process != os.getpid():  # the child of a fork has what was queued, and nobody who does it
            self._thread, self.at_work, self._process = None, None, os.getpid()
            self.jobs.clear()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()  # RuntimeError if there are too many: it is not alive then
            JOBS.add(self)
        self.jobs.append(job)
        self.changed.notify_all()

    def end(self, timeout: float, began: float) -> None:
        """Wait until all is done; what does not get on for `timeout` seconds is given up, which is an error.

        Args:
            began: When the waiting began.
        """
        with self.locked():
            self._is_ending = True
            self.changed.notify_all()
        waiting, since, reason = self.waiting, time.monotonic(), ""
        while self.is_busy:
            waited = time.monotonic() - waiting.stuck_since(began)
            if waited >= _GIVE_UP_SHARE * timeout and not reason:
                reason = waiting.reason or "it does not get on"
                self.has_given_up = True
                waiting.give_up()
            if waited >= timeout:
                break
            waiting.remind(since, f"{waiting.url} is being saved ({waiting.reason or 'it gets on'})")
            with self.locked():
                self.changed.wait_for(lambda: not self.is_busy, _LOOK_AGAIN_S)
        if reason:
            raise CheckpointError(
                f"{waiting.url} was not saved: {reason}, and close() waits {timeout:g} s at most; check the url "
                "and the endpoint. Earlier checkpoints are intact"
            )

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._is_ending or self.jobs, _IDLE_S)
                if not self.jobs:
                    self._thread = None  # under the lock: who puts a job now starts another
                    return
            time.sleep(_YIELD_S)
            with self.changed:
                if not self.jobs:
                    continue  # what there was has been cancelled
                self.at_work = self.jobs.popleft()
                if not self.has_given_up:
                    self.waiting.begin()
            try:
                self._work(self.at_work)
            finally:
                with self.changed:
                    self.at_work = None
                    self.changed.notify_all()


@dataclass(frozen=True, slots=True, eq=False)
class _SaveJob:
    """A checkpoint to be made."""

    snapshot: Snapshot | ShardsSnapshot
    handle: SaveHandle
    keep: int | None
    progress: Progress | None


def next_number(reader: CheckpointReader, numbers: list[int], last: int, writer_id: str) -> int:
    """Return the number of a writer's next checkpoint; `last` was the newest when it came, or is its own last one.

    A writer whose number was taken by another stops for good: what it wrote may have been collected meanwhile.
    """
    found = reader.newest(number for number in numbers if number > last)
    if found is not None and found.writer_id != writer_id:
        raise FencedError(
            f"{reader.url} holds checkpoint {found.number}, which another writer made since {last}; save to a place of "
            "its own, or load what is there"
        )
    number = 1 + (last if found is None else found.number)
    while number in numbers:
        number += 1
    if number > _MOST_NUMBER:
        raise CheckpointError(
            f"{reader.url} holds checkpoint {number - 1}, the last that there is; save to a place of its own"
        )
    return number


class Saver:
    """Writes checkpoints to one url.

    Args:
        saved: What lies there of the memory already, if it was loaded from there.
    """

    def __init__(self, url: str, coder: Coder, saved: SavedRecords | None = None) -> None:
        self.url, self._coder = url, coder
        self._records = saved or SavedRecords()
        self._target: CheckpointWriter | None = None  # opened with the first save
        self._last = 0  # the newest checkpoint when the url was opened, or this saver's own last one
        self._has_leftovers = True  # perhaps: files that no checkpoint names, of a save that failed, or of others
        self.mirrors: dict[str, CheckpointMirror] = {}
        self._saving: SnapshotWriter | None = None  # begun by blocks that were written ahead
        self.waiting = Waiting(url)
        self._thread = JobThread("holdall-saver", self.waiting, self._work)

    def save(
        self, take: Callable[[dict[int, RowsKey]], Snapshot | ShardsSnapshot], keep: int | None,
        progress: Progress | None, mirror: str | None,
    ) -> SaveHandle:  # fmt: skip
        """Have a snapshot written, after those before it.

        Args:
            take: Takes it; it is given the chunks of rows that need not be written again.
            keep: How many checkpoints stay. None: what the manifest above names, or will name; for shards.
        """
        handle = SaveHandle(self)
        with self._thread.locked():  # from the snapshot until it is queued: an older one never comes later
            if mirror is not None:
                from holdall.checkpoint.autosave import mirror_of  # noqa: PLC0415  needs object stores

                handle.mirror = mirror_of(self, mirror)
            snapshot, is_queued = take(self._records.rows_saved()), False
            try:
                self._thread.put(_SaveJob(snapshot, handle, keep, progress))
                is_queued = True
            finally:
                if not is_queued:
                    snapshot.drop()
        return handle

    def write_ahead(self, full_blocks: Callable[[Callable[[SliceBlock], bool]], list[FullBlock]]) -> None:
        """Have blocks written that are full, for the next checkpoint; nothing if the saver is busy.

        Args:
            full_blocks: Returns those that are not known already.
        """
        with self._thread.locked():
            if not self._thread.is_busy:
                saving = self._saving
                known = self._records.blocks.__contains__ if saving is None else saving.knows
                if ahead := full_blocks(known)[::-1]:
                    self._thread.put(ahead)

    def close(self, timeout: float = CLOSE_S, began: float | None = None) -> None:
        """Wait for every save, and let another writer in; see `JobThread.end`."""
        began = time.monotonic() if began is None else began
        try:
            self._thread.end(timeout, began)
        finally:
            for mirror in self.mirrors.values():
                mirror.close(timeout, began)
            if not self._thread.is_busy:  # else a disk hangs: its writer goes with the program
                self._let_go()

    def _let_go(self) -> None:
        """Throw away what was written ahead, and let another writer in."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.abandon()
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def cancel(self, handle: SaveHandle) -> None:
        """Give up the save of a handle, whether it waits or is under way."""
        with self._thread.locked():
            jobs, at_work = self._thread.jobs, self._thread.at_work
            queued = [job for job in jobs if isinstance(job, _SaveJob) and job.handle is handle]
            for job in queued:
                jobs.remove(job)
            if isinstance(at_work, _SaveJob) and at_work.handle is handle:
                self.waiting.give_up()
        for job in queued:
            job.snapshot.drop()
            handle.end(CheckpointError(f"the save to {self.url} was cancelled before it began"))

    def _work(self, job: _SaveJob | list[FullBlock]) -> None:
        """Make a checkpoint, or write blocks for the next one; if that fails, the next one will say so."""
        if isinstance(job, _SaveJob):
            try:
                checkpoint = self._written(job)
            except BaseException as error:  # raised by the handle; training goes on
                self._has_leftovers = True
                _LOG.warning("a checkpoint could not be saved to %s (%s)", self.url, error)
                job.snapshot.drop()
                job.handle.end(error)
            else:
                job.handle.end(checkpoint)
            return
        try:
            with disk_errors_explained(self.url, "written to"):
                self._saving = self._saving or SnapshotWriter(self._opened(), self._records, self._coder)
                self._saving.write_ahead(job)
        except Exception as error:
            self._saving, self._has_leftovers = None, True
            _LOG.info("nothing was written to %s ahead of the next checkpoint (%s)", self.url, error)

    def _written(self, job: _SaveJob) -> Checkpoint:
        began = time.perf_counter()
        transitions = job.snapshot.transitions
        with disk_errors_explained(self.url, "written to"):
            target = self._opened()
            numbers = target.reader.numbers()
            number = next_number(target.reader, numbers, self._last, target.writer_id)
            saving, self._saving = self._saving or SnapshotWriter(target, self._records, self._coder), None
            manifest = saving.run(job.snapshot, number, reporting(job.progress, self.waiting))
        self._last = number
        if job.handle.mirror is not None and job.keep is not None:
            job.handle.mirror.send(manifest, job.keep)
        if self._has_leftovers or job.keep is None or len(numbers) >= job.keep:
            self._collect(target, job.keep)
        return Checkpoint(
            url=self.url,
            number=number,
            bytes_written=saving.bytes_written,
            bytes_total=sum(manifest.files.values()) + sum(shard.nbytes for shard in manifest.shards),
            transitions=transitions + sum(shard.transitions for shard in manifest.shards),
            seconds=time.perf_counter() - began,
        )

    def _opened(self) -> CheckpointWriter:
        if self._target is not None and not self._target.is_there():
            self._let_go()
        if self._target is None:
            target = open_writer(self.url, self.waiting)
            try:
                newest = target.reader.newest(target.reader.numbers())
                self._last = 0 if newest is None else newest.number
                self._has_leftovers = bool(target.reader.file_sizes())
                if is_remote(self.url):
                    # What was loaded may have been collected since: only what the newest checkpoint names is safe.
                    self._records.keep_only({} if newest is None else newest.files)
            except BaseException:
                target.close()
                raise
            self._target = target
        return self._target

    def _collect(self, target: CheckpointWriter, keep: int | None) -> None:
        """Remove what is not needed any more; the checkpoint stands, whatever comes of it."""
        try:
            mirrored = [mirror.pinned() for mirror in self.mirrors.values()]
            target.collect(keep, set(self._records.files).union(*mirrored))
        except OSError as error:
            _LOG.warning("old checkpoints in %s could not be removed (%s)", self.url, error)


class Savers:
    """The savers of one memory, by url."""

    def __init__(self, coder: Coder) -> None:
        self._coder, self._savers = coder, dict[str, Saver]()

    def to(self, url: str, saved: SavedRecords | None = None) -> Saver:
        """Return the saver to a url; `saved` is what lies there of a memory that was loaded from it."""
        saver = self._savers.get(url)
        if saver is None:
            saver = self._savers[url] = Saver(url, self._coder, saved)
        return saver

    def after_fork(self) -> None:
        """Close a child's copies of locks, which would keep others out after the parent was killed."""
        for target in (saver._target for saver in self._savers.values() if isinstance(saver._target, DirectoryWriter)):
            target.close()

    def close(self, timeout: float = CLOSE_S) -> None:
        """Wait for all that is being saved; raise if something did not get on for `timeout` seconds."""
        savers, errors, began = list(self._savers.values()), [], time.monotonic()
        for saver in savers:
            try:
                saver.close(timeout, began)
            except CheckpointError as error:
                errors.append(error)
        self._savers = {}
        if errors:
            raise errors[0]

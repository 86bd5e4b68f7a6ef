"""Save a memory: `save` returns a handle at once, and one thread per place writes one checkpoint after another.

Guarantee: saves to one place are written in the order in which they were started. A save that fails changes nothing:
the earlier checkpoints are as they were, the memory continues to work, and the handle raises the error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdall.background import CLOSE_S
from holdall.checkpoint.attached import check_files
from holdall.checkpoint.blobs import Lease, describe_process, open_blobs
from holdall.checkpoint.jobs import JobThread
from holdall.checkpoint.manifest import (
    CHECKSUM_LINE_BYTES,
    Manifest,
    encode,
    generate_file_names,
    manifest_name,
    new_writer_id,
)
from holdall.checkpoint.reader import MANIFESTS, CheckpointReader, require_whole
from holdall.checkpoint.retention import collect
from holdall.checkpoint.save import BlockEncoder, OnWrite, SavedRecords, Snapshot, SnapshotWriter
from holdall.checkpoint.urls import normalized_url
from holdall.checkpoint.waiting import Waiting
from holdall.errors import ArgumentError, CheckpointError, DamageError, FencedError

if TYPE_CHECKING:
    from holdall.checkpoint.autosave import Autosave, AutosavedMemory
    from holdall.checkpoint.load import Restored
    from holdall.checkpoint.mirror import CheckpointMirror

_MAX_NUMBER = 10**16 - 1
_POLL_S = 0.1
_PACE_S = 0.05
"""Seconds after which a pausing save checks whether somebody waits for it."""
_CANCEL_S = 5.0
"""Seconds that a cancelled save has to end."""

_LOG = logging.getLogger("holdall")

Progress = Callable[[str, int], None] | Callable[[str, int, int], None]
"""Called with the phase ("segments", "shards", "files" or "commit") and the bytes written so far. If it takes three
arguments, also with the approximate total of bytes."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was committed.

    Examples:
        >>> memory.save("saved").result().number
        1
    """

    url: str
    number: int
    bytes_written: int  # Bytes that this save wrote. Data of earlier checkpoints is not written again.
    bytes_total: int  # Bytes of all files of the checkpoint.
    transitions: int
    seconds: float


class SaveHandle:
    """A save in progress.

    Examples:
        >>> handle = memory.save("saved")  # returns at once
        >>> handle.result().transitions  # waits
        100
    """

    def __init__(self, saver: Saver) -> None:
        self.url = saver.url
        self.mirror: CheckpointMirror | None = None  # Copies the checkpoint to an object store.
        self._saver = saver
        self._ended = threading.Event()
        self._waiters = 0  # Threads that wait for the result.
        self._outcome: Checkpoint | BaseException | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for the result, so that the save should be as fast as possible."""
        return self._waiters > 0

    def done(self) -> bool:
        """Return whether the save has ended, with success or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is safe and return it. Raise the error of a save that failed."""
        self._waiters += 1
        try:
            is_ended = self._ended.wait(timeout)
        finally:
            self._waiters -= 1
        if not is_ended:
            raise TimeoutError(
                f"The checkpoint at {self.url} was not complete after {timeout} s. The save is still running. Call "
                "result() again."
            )
        if not isinstance(self._outcome, Checkpoint):
            raise self._outcome or CheckpointError(f"The save to {self.url} has no result. Please report this.")
        return self._outcome

    def finish(self, timeout: float = CLOSE_S) -> Checkpoint:
        """Wait for the checkpoint and return it. Cancel the save after `timeout` seconds without progress."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                return self.result(_POLL_S)
            if time.monotonic() - self._saver.waiting.last_progress_after(began) >= timeout:
                self.cancel()
                return self.result(_CANCEL_S)

    def mirrored(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint, or a newer one, is in the mirror. Return the checkpoint."""
        if self.mirror is None:
            raise ArgumentError("mirrored() was called, but the save has no mirror. Call save(path, mirror=url).")
        began = time.monotonic()
        checkpoint = self.result(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        self.mirror.wait(checkpoint.number, left)
        return checkpoint

    def cancel(self) -> None:
        """Cancel this save, and every copy to its mirror that is queued or in progress. Later saves are not affected.

        `result` then raises, unless the checkpoint was complete already.
        """
        self._saver.cancel(self)
        if self.mirror is not None:
            self.mirror.cancel()

    def end(self, outcome: Checkpoint | BaseException) -> None:
        """Set the result or the error."""
        self._outcome = outcome
        self._ended.set()


@dataclass(frozen=True, slots=True, eq=False)
class _SaveJob:
    """A checkpoint to write."""

    snapshot: Snapshot
    handle: SaveHandle
    keep: int | None
    progress: Progress | None


class CheckpointPlace:
    """A place that this process may write to: its reader and its lock. Closed by `close`."""

    def __init__(self, url: str, waiting: Waiting) -> None:
        self.url = url
        self.reader = CheckpointReader(open_blobs(url, waiting))
        self.writer_id = new_writer_id()
        self.names = generate_file_names(self.writer_id)
        self._lease: Lease | None = None
        self._last_number = 0  # Number of the newest checkpoint that this writer found or made. 0: none.

    def open(self) -> Manifest | None:
        """Take the lock and return the newest checkpoint. Return None if this writer has the lock already.

        Raise FencedError if another writer made a checkpoint since this writer's last one.
        """
        if self._lease is not None:
            try:
                self._lease.check()
            except FencedError:
                self.close()
            else:
                return None
        self._lease = self.reader.blobs.lock(describe_process())
        try:
            newest = self._find_newest()
        except BaseException:
            self.close()
            raise
        self._last_number = 0 if newest is None else newest.number
        return newest

    def _find_newest(self) -> Manifest | None:
        newest = self.reader.find_newest()
        if newest is not None and 0 < self._last_number < newest.number and newest.writer_id != self.writer_id:
            raise FencedError(
                f"Another writer made checkpoint {newest.number} in {self.url} after checkpoint {self._last_number}. "
                "Save to another place, or load that checkpoint."
            )
        return newest

    def find_number(self, after: int = 0) -> int:
        """Return the number of the next checkpoint, which is greater than `after`."""
        numbers = self.reader.numbers()
        number = max(self._last_number, after) + 1
        while number in numbers:
            number += 1
        if number > _MAX_NUMBER:
            raise CheckpointError(
                f"{self.url} has checkpoint {number - 1}, the last possible one. Save to another place."
            )
        return number

    @property
    def lease(self) -> Lease:
        """The lock. Raise FencedError if `open` was not called."""
        if self._lease is None:
            raise FencedError(f"The lock of {self.url} was released.")
        return self._lease

    def commit(self, manifest: Manifest) -> Manifest:
        """Create the manifest, whose files exist. Return it. It has a higher number if its own was taken.

        When this returns, this writer has held the lock without a break since `open`, so nobody has removed a file.
        """
        self._require_files(manifest)
        raw = encode(manifest)
        while not self.reader.blobs.create(MANIFESTS + manifest_name(manifest.number), raw):
            # The last request of a cancelled save arrived late and took the number.
            self.lease.check()
            manifest = replace(manifest, number=self.find_number(manifest.number))
            raw = encode(manifest)
        self.lease.check()
        self.reader.remember(raw[-CHECKSUM_LINE_BYTES:], manifest)
        self._last_number = manifest.number
        return manifest

    def close(self) -> None:
        """Release the lock."""
        lease = self._lease
        self._lease = None
        if lease is not None:
            lease.release()

    def _require_files(self, manifest: Manifest) -> None:
        self.lease.check()
        try:
            require_whole(manifest, self.reader, self.reader.file_sizes())
        except (CheckpointError, DamageError) as error:
            raise CheckpointError(
                error.errno or errno.ENOENT,
                f"{error} It was removed or changed while {self.url} was saved to, so nothing was committed. Save "
                "again.",
            ) from error


class Saver:
    """Writes checkpoints of one memory to one place.

    Args:
        saved: Records that the place has already, if the memory was loaded from it.
    """

    def __init__(self, url: str, saved: SavedRecords | None = None) -> None:
        self.url = url
        self.mirrors: dict[str, CheckpointMirror] = {}
        self.waiting = Waiting(url)
        # Made by the first save, because opening an object store needs a package that may be missing.
        self._place: CheckpointPlace | None = None
        self._saved = saved or SavedRecords()
        self._encoder = BlockEncoder()
        self._has_leftovers = True  # Whether there may be files that no checkpoint names.
        self._is_closing = False
        self._thread = JobThread("holdall-saver", self.waiting, self._work)

    def save(
        self, take_snapshot: Callable[[], Snapshot], keep: int | None, progress: Progress | None, mirror: str | None
    ) -> SaveHandle:
        """Take a snapshot and queue it.

        Args:
            take_snapshot: Called while the queue is locked, so that snapshots are saved in the order in which they were
                taken.
            keep: Number of checkpoints to keep. None, for shards: see `retention.collect`.
        """
        handle = SaveHandle(self)

        def make_job() -> _SaveJob:
            if mirror is not None:
                from holdall.checkpoint.mirror import find_mirror  # noqa: PLC0415  imports this module

                handle.mirror = find_mirror(self, mirror)
            return _SaveJob(take_snapshot(), handle, keep, progress)

        self._thread.put(make_job)
        return handle

    def cancel(self, handle: SaveHandle) -> None:
        """Cancel the save of a handle, whether it is queued or being written."""
        if self._thread.cancel(lambda job: job.handle is handle):
            handle.end(CheckpointError(f"The save to {self.url} was cancelled before it started."))

    def close(self, timeout: float = CLOSE_S, began: float | None = None) -> None:
        """Wait for every save, and release the place. Raise CheckpointError if a save makes no progress."""
        began = time.monotonic() if began is None else began
        self._is_closing = True
        # The stack calls all of them, the last one first, also if one raises.
        with contextlib.ExitStack() as closing:
            closing.callback(self._release_unless_busy)
            for mirror in self.mirrors.values():
                closing.callback(mirror.close, timeout, began)
            self._thread.end(timeout, began)

    def _release_unless_busy(self) -> None:
        """Release the place. A thread that hangs in a call of the disk keeps the lock until the process ends."""
        if not self._thread.is_busy:
            self.release()

    def release(self) -> None:
        """Release the lock of the place."""
        if self._place is not None:
            self._place.close()

    def _work(self, job: _SaveJob) -> None:
        try:
            checkpoint = self._write(job)
        except BaseException as error:
            self._has_leftovers = True
            _LOG.warning("A checkpoint could not be saved to %s: %s", self.url, error)
            job.handle.end(error)
        else:
            job.handle.end(checkpoint)

    def _write(self, job: _SaveJob) -> Checkpoint:
        began = time.perf_counter()
        place = self._open()
        writing = SnapshotWriter(
            place.reader,
            place.names,
            self._saved,
            self._encoder,
            _make_on_write(job.progress, self.waiting),
            functools.partial(self._pause, job.handle),
        )
        manifest = writing.write(job.snapshot, place.find_number(), place.writer_id)
        manifest = place.commit(manifest)
        self._saved = writing.saved
        if job.handle.mirror is not None and job.keep is not None:
            job.handle.mirror.send(manifest, job.keep)
        self._collect(place, manifest, job.keep)
        return Checkpoint(
            url=self.url,
            number=manifest.number,
            bytes_written=writing.bytes_written,
            bytes_total=sum(manifest.files.values()) + sum(shard.nbytes for shard in manifest.shards),
            transitions=manifest.transitions,
            seconds=time.perf_counter() - began,
        )

    def _open(self) -> CheckpointPlace:
        """Return the place, and take its lock if this process does not have it."""
        if self._place is None:
            self._place = CheckpointPlace(self.url, self.waiting)
        newest = self._place.open()
        if newest is not None:
            # Another writer may have removed files. Only those of the newest checkpoint certainly exist.
            self._saved = self._saved.keep_only(newest.files)
        return self._place

    def _pause(self, handle: SaveHandle, seconds: float) -> None:
        """Leave the cores to training for `seconds`, unless somebody waits for the save."""
        until = time.monotonic() + seconds
        while not (handle.is_awaited or self._is_closing) and time.monotonic() < until:
            self.waiting.pause(min(_PACE_S, max(0.0, until - time.monotonic())))

    def _collect(self, place: CheckpointPlace, manifest: Manifest, keep: int | None) -> None:
        """Remove old checkpoints and unnamed files. Log an error, because the new checkpoint is safe already."""
        if not (self._has_leftovers or keep is None or len(place.reader.numbers()) > keep):
            return
        try:
            pinned = [mirror.list_pinned() for mirror in self.mirrors.values()]
            collect(place.reader, place.lease, keep, set(manifest.files).union(*pinned))
            self._has_leftovers = False
        except OSError as error:
            _LOG.warning("Old checkpoints in %s could not be removed: %s", self.url, error)


class Savers:
    """The savers of one memory, by place. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._savers: dict[str, Saver] = {}
        self._lock = threading.Lock()

    def save(
        self,
        take_snapshot: Callable[[], Snapshot],
        url: str | os.PathLike[str],
        attach: Mapping[str, Any] | None = None,
        keep: int | None = 3,
        mirror: str | None = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Take a snapshot and write it in the background. The arguments are those of `ReplayMemory.save`.

        `keep=None` is for shards, see `retention.collect`.
        """
        location = normalized_url(url)
        files = {} if attach is None else check_files(attach)
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress ({progress!r}) must be a function of a text and a number, or None.")

        def take_with_files() -> Snapshot:
            snapshot = take_snapshot()
            snapshot.attach = files
            return snapshot

        return self.find(location).save(take_with_files, keep, progress, mirror)

    def save_every(
        self,
        memory: AutosavedMemory,
        url: str | os.PathLike[str],
        seconds: float | None,
        transitions: int | None,
        keep: int,
        mirror: str | None,
    ) -> Autosave:
        """Save a memory at intervals until the returned `Autosave` is stopped, see `ReplayMemory.save_every`."""
        from holdall.checkpoint.autosave import start_autosave  # noqa: PLC0415  few memories need it

        return start_autosave(memory, normalized_url(url), seconds, transitions, keep, mirror)

    def adopt(self, restored: Restored) -> None:
        """Remember the records of a memory that was loaded, so that they are not written again to the same place."""
        if restored.saved is not None:
            self.find(restored.url, restored.saved)

    def find(self, url: str, saved: SavedRecords | None = None) -> Saver:
        """Return the saver to a normalized `url`. Make it if it does not exist, with `saved` as in `Saver`."""
        with self._lock:
            saver = self._savers.get(url)
            if saver is None:
                saver = Saver(url, saved)
                self._savers[url] = saver
            return saver

    def after_fork(self) -> None:
        """In a forked child, close the inherited lock files, because other writers are refused while they are open."""
        self._lock = threading.Lock()
        for saver in self._savers.values():
            saver.release()
        self._savers = {}

    def close(self, timeout: float = CLOSE_S) -> None:
        """Wait for all saves. Raise CheckpointError if one makes no progress for `timeout` seconds."""
        with self._lock:
            savers = list(self._savers.values())
            self._savers = {}
        began = time.monotonic()
        errors = []
        for saver in savers:
            try:
                saver.close(timeout, began)
            except CheckpointError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _make_on_write(progress: Callable[..., None] | None, waiting: Waiting) -> OnWrite:
    """Return a function that records progress, raises if the save was cancelled, and calls `progress`."""
    wants_total = False
    if progress is not None:
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(progress).bind("", 0, 0)
            wants_total = True

    def on_write(phase: str, nbytes: int, total: int) -> None:
        waiting.check()
        waiting.record_progress()
        if progress is None:
            return
        try:
            progress(phase, nbytes, *([total] if wants_total else []))
        except Exception as error:  # A broken progress bar is no reason to lose a checkpoint.
            _LOG.warning("The progress callback failed: %s", error)

    return on_write

"""Save a memory: `save` returns a handle at once, and one thread per place writes one checkpoint after another.

Guarantee: saves to one place are written in the order in which they were started. A save that fails changes nothing:
the earlier checkpoints are as they were, the memory continues to work, and the handle raises the error.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdall.background import CLOSE_S
from holdall.checkpoint.attached import checked_files
from holdall.checkpoint.directory import DirectoryWriter, disk_errors_explained
from holdall.checkpoint.jobs import JobThread
from holdall.checkpoint.manifest import CheckpointReader, Manifest, Waiting
from holdall.checkpoint.places import open_writer
from holdall.checkpoint.retention import CheckpointWriter
from holdall.checkpoint.urls import is_remote, normalized_url
from holdall.checkpoint.write import (
    BlockEncoder,
    Content,
    Report,
    SavedRecords,
    Snapshot,
    SnapshotWriter,
    require_unsaved,
)
from holdall.errors import ArgumentError, CheckpointError, FencedError
from holdall.schema import schema_of
from holdall.store.snapshot import StoreState

if TYPE_CHECKING:
    from holdall.checkpoint.autosave import Autosave, AutosavedMemory
    from holdall.checkpoint.load import Restored
    from holdall.checkpoint.mirror import CheckpointMirror

_MAX_NUMBER = 10**16 - 1
_POLL_S = 0.1
_CANCEL_S = 5.0
"""Seconds that a cancelled save has to end."""

_LOG = logging.getLogger("holdall")

Progress = Callable[[str, int], None] | Callable[[str, int, int], None]
"""Called with the phase ("segments", "shards", "files" or "commit") and the bytes written so far. If it takes three
arguments, also with the approximate total of bytes."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is safe."""

    url: str
    number: int
    bytes_written: int  # Bytes that this save wrote. Data of earlier checkpoints is not written again.
    bytes_total: int  # Bytes of all files of the checkpoint.
    transitions: int
    seconds: float


@dataclass(slots=True)
class MemorySnapshot:
    """Everything that a checkpoint of a memory contains, at the moment of `save`."""

    store: StoreState | None  # None once it is being written, so that segments can be released one by one.
    schema: dict[str, Any]  # Result of `schema_words`.
    capacity_ticks: int
    state: dict[str, Any]  # State of sampler and generator, and further values of the owner.
    attach: Mapping[str, Path | bytes] = field(default_factory=dict)
    transitions: int = field(init=False)

    def __post_init__(self) -> None:
        state = require_unsaved(self.store)
        entries = (state.next_tick - state.first_tick) * int(self.schema["num_envs"])
        self.transitions = max(0, entries - sum(segment.invalid_count for segment in state.segments))

    def write(self, writer: SnapshotWriter) -> Content:
        """Write the content of the memory."""
        state = require_unsaved(self.store)
        self.store = None
        return writer.write_store(state, schema_of(self.schema), self.state)


class SaveHandle:
    """A save in progress."""

    def __init__(self, saver: Saver) -> None:
        self.url = saver.url
        self.mirror: CheckpointMirror | None = None  # Copies the checkpoint to an object store.
        self._saver = saver
        self._ended = threading.Event()
        self._outcome: Checkpoint | BaseException | None = None

    def done(self) -> bool:
        """Return whether the save has ended, with success or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is safe and return it. Raise the error of a save that failed."""
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"The checkpoint at {self.url} was not complete after {timeout} s. The save is still running. Call "
                "result() again."
            )
        if not isinstance(self._outcome, Checkpoint):
            raise self._outcome or CheckpointError(f"The save to {self.url} has no result. Please report this.")
        return self._outcome

    def finish(self, timeout: float = CLOSE_S) -> Checkpoint:
        """Wait while the save makes progress, and return the checkpoint. Cancel it after `timeout` seconds without."""
        began = time.monotonic()
        while not self._ended.wait(_POLL_S):
            if time.monotonic() - self._saver.waiting.stuck_since(began) >= timeout:
                self.cancel()
                return self.result(_CANCEL_S)
        return self.result()

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
        """Give up this save and its copy in the mirror. Its `result` raises. Later saves are not affected."""
        self._saver.cancel(self)
        if self.mirror is not None:
            self.mirror.cancel()

    def end(self, outcome: Checkpoint | BaseException) -> None:
        """Set the result or the error."""
        self._outcome = outcome
        self._ended.set()


@dataclass(frozen=True, slots=True, eq=False)
class _SaveJob:
    """A checkpoint that is to be written."""

    snapshot: Snapshot
    handle: SaveHandle
    keep: int | None
    progress: Progress | None


class Saver:
    """Writes checkpoints of one memory to one place.

    Args:
        saved: Records that the place has already, if the memory was loaded from it.
    """

    def __init__(self, url: str, saved: SavedRecords | None = None) -> None:
        self.url = url
        self.mirrors: dict[str, CheckpointMirror] = {}
        self.waiting = Waiting(url)
        self.target: CheckpointWriter | None = None  # Opened by the first save.
        self._saved = saved or SavedRecords()
        self._encoder = BlockEncoder()
        self._last = 0  # Newest checkpoint when the place was opened, or the last one of this saver.
        self._has_leftovers = True  # Whether there may be files that no checkpoint names.
        self._thread = JobThread("holdall-saver", self.waiting, self._work)

    def save(
        self, take: Callable[[], Snapshot], keep: int | None, progress: Progress | None, mirror: str | None
    ) -> SaveHandle:
        """Take a snapshot and queue it.

        Args:
            keep: Number of checkpoints to keep. None: those that the manifest above names, for shards.
        """
        handle = SaveHandle(self)
        with self._thread.lock:  # A snapshot is queued before a later one is taken.
            if mirror is not None:
                from holdall.checkpoint.mirror import find_mirror  # noqa: PLC0415  needs an optional package

                handle.mirror = find_mirror(self, mirror)
            self._thread.put(_SaveJob(take(), handle, keep, progress))
        return handle

    def cancel(self, handle: SaveHandle) -> None:
        """Give up the save of a handle, whether it is queued or being written."""
        with self._thread.lock:
            queued = [job for job in self._thread.jobs if job.handle is handle]
            for job in queued:
                self._thread.jobs.remove(job)
            current = self._thread.current
            if current is not None and current.handle is handle:
                self.waiting.give_up()
        if queued:
            handle.end(CheckpointError(f"The save to {self.url} was cancelled before it started."))

    def close(self, timeout: float = CLOSE_S, began: float | None = None) -> None:
        """Wait for every save, and release the place. Raise CheckpointError if a save makes no progress."""
        began = time.monotonic() if began is None else began
        try:
            self._thread.end(timeout, began)
        finally:
            for mirror in self.mirrors.values():
                mirror.close(timeout, began)
            if not self._thread.is_busy:  # Otherwise a disk hangs, and its writer ends with the program.
                self._release()

    def _release(self) -> None:
        target = self.target
        self.target = None
        if target is not None:
            target.close()

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
        transitions = job.snapshot.transitions
        with disk_errors_explained(self.url, "written to"):
            target = self._open()
            numbers = target.reader.numbers()
            writing = SnapshotWriter(target, self._saved, self._encoder, _make_report(job.progress, self.waiting))
            manifest = writing.run(job.snapshot, lambda: self._find_next_number(target))
        self._saved = writing.saved
        self._last = manifest.number
        if job.handle.mirror is not None and job.keep is not None:
            job.handle.mirror.send(manifest, job.keep)
        if self._has_leftovers or job.keep is None or len(numbers) >= job.keep:
            self._collect(target, manifest, job.keep)
        return Checkpoint(
            url=self.url,
            number=manifest.number,
            bytes_written=writing.bytes_written,
            bytes_total=sum(manifest.files.values()) + sum(shard.nbytes for shard in manifest.shards),
            transitions=transitions + sum(shard.transitions for shard in manifest.shards),
            seconds=time.perf_counter() - began,
        )

    def _find_next_number(self, target: CheckpointWriter) -> int:
        return find_next_number(target.reader, target.reader.numbers(), self._last, target.writer_id)

    def _open(self) -> CheckpointWriter:
        """Return the writer, a new one if the directory was removed or replaced."""
        if self.target is not None and not self.target.is_there():
            self._release()
        if self.target is None:
            target = open_writer(self.url, self.waiting)
            try:
                newest = target.reader.newest(target.reader.numbers())
                self._last = 0 if newest is None else newest.number
                self._has_leftovers = bool(target.reader.file_sizes())
                if is_remote(self.url):
                    # Another writer may have collected what was loaded. Files of the newest checkpoint are safe.
                    self._saved = self._saved.keep_only({} if newest is None else newest.files)
            except BaseException:
                target.close()
                raise
            self.target = target
        return self.target

    def _collect(self, target: CheckpointWriter, manifest: Manifest, keep: int | None) -> None:
        """Remove what is no longer needed. An error does not affect the checkpoint."""
        try:
            pinned = [mirror.list_pinned() for mirror in self.mirrors.values()]
            target.collect(keep, set(manifest.files).union(*pinned))
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
        take: Callable[[], Snapshot],
        url: str | os.PathLike[str],
        attach: Mapping[str, Any] | None = None,
        keep: int | None = 3,
        mirror: str | None = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Take a snapshot and write it in the background. The arguments are those of `ReplayMemory.save`.

        `keep=None` keeps the checkpoints that a manifest above names, for shards.
        """
        location = normalized_url(url)
        files = {} if attach is None else checked_files(attach)
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress ({progress!r}) must be a function of a text and a number, or None.")

        def take_all() -> Snapshot:
            snapshot = take()
            snapshot.attach = files
            return snapshot

        return self.find(location).save(take_all, keep, progress, mirror)

    def save_every(
        self,
        memory: AutosavedMemory,
        url: str | os.PathLike[str],
        seconds: float | None,
        transitions: int | None,
        keep: int,
        mirror: str | None,
    ) -> Autosave:
        """Save a memory at intervals until the result is stopped, see `ReplayMemory.save_every`."""
        from holdall.checkpoint.autosave import start_autosave  # noqa: PLC0415  few memories need it

        return start_autosave(memory, normalized_url(url), seconds, transitions, keep, mirror)

    def adopt(self, restored: Restored) -> None:
        """Remember the records of a memory that was loaded, so that they are not written again to the same place."""
        if restored.saved is not None:
            self.find(restored.url, restored.saved)

    def find(self, url: str, saved: SavedRecords | None = None) -> Saver:
        """Return the saver to a normalized `url`. `saved` are the records that the place has already."""
        with self._lock:
            saver = self._savers.get(url)
            if saver is None:
                saver = Saver(url, saved)
                self._savers[url] = saver
            return saver

    def after_fork(self) -> None:
        """Close a forked child's copies of locks, which would keep others out after the parent ended."""
        self._lock = threading.Lock()
        for saver in self._savers.values():
            if isinstance(saver.target, DirectoryWriter):
                saver.target.close()
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


def find_next_number(reader: CheckpointReader, numbers: list[int], last: int, writer_id: str) -> int:
    """Return the number of a writer's next checkpoint.

    `last` is the newest checkpoint when the writer opened the place, or the writer's own last one. Raise FencedError if
    another writer made a checkpoint since: it may have collected what this writer wrote.
    """
    found = reader.newest(number for number in numbers if number > last)
    if found is not None and found.writer_id != writer_id:
        raise FencedError(
            f"Another writer made checkpoint {found.number} in {reader.url} after checkpoint {last}. Save to another "
            "place, or load that checkpoint."
        )
    number = 1 + (last if found is None else found.number)
    while number in numbers:
        number += 1
    if number > _MAX_NUMBER:
        raise CheckpointError(
            f"{reader.url} has checkpoint {number - 1}, the last possible one. Save to another place."
        )
    return number


def _make_report(progress: Callable[..., None] | None, waiting: Waiting) -> Report:
    """Return a function that records progress, ends a save that was given up, and calls `progress`."""
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
        except Exception as error:  # A broken progress bar is no reason to lose a checkpoint.
            _LOG.warning("The progress callback failed: %s", error)

    return report

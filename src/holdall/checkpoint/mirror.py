"""Mirrors: copies of the checkpoints of a directory in an object store, made in the background.

Guarantee: a checkpoint is safe in its directory before it is copied. An error of the copy is raised by the handle's
`mirrored()`. It does not affect the local checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from holdall.checkpoint.jobs import JobThread
from holdall.checkpoint.manifest import Manifest, Waiting
from holdall.checkpoint.object_store import ObjectStoreWriter
from holdall.checkpoint.objects import Objects
from holdall.checkpoint.retention import commit_unique
from holdall.checkpoint.save import Saver, find_next_number
from holdall.checkpoint.urls import is_remote
from holdall.errors import ArgumentError, CheckpointError

_LOG = logging.getLogger("holdall")


def require_mirror(mirror: Any, url: str) -> None:
    """Raise ArgumentError if checkpoints of `url` cannot be copied to `mirror`."""
    if is_remote(url):
        raise ArgumentError(f"mirror ({mirror!r}) is for saves to a directory, and {url} is not a directory.")
    if not (isinstance(mirror, str) and is_remote(mirror)):
        raise ArgumentError(f"mirror ({mirror!r}) must be a prefix of an object store: s3://, gs:// or az://.")


def find_mirror(saver: Saver, mirror: str) -> CheckpointMirror:
    """Return the mirror of a saver's checkpoints at prefix `mirror`. It is made when it is first needed."""
    require_mirror(mirror, saver.url)
    if mirror not in saver.mirrors:
        saver.mirrors[mirror] = CheckpointMirror(mirror, Path(saver.url) / "segments")
    return saver.mirrors[mirror]


class _MirrorJob(NamedTuple):
    """A checkpoint that is to be copied."""

    manifest: Manifest
    keep: int


class CheckpointMirror:
    """Copies the checkpoints of one directory to one prefix of an object store.

    While one checkpoint is copied, only the newest of the following ones is queued.
    """

    def __init__(self, url: str, segments: Path) -> None:
        self._url = url
        self._segments = segments
        self._waiting = Waiting(url)
        self._objects = Objects(url, self._waiting)
        self._target: ObjectStoreWriter | None = None
        self._last = 0  # Newest checkpoint when the prefix was opened, or the last one that was copied.
        self._thread = JobThread("holdall-mirror", self._waiting, self._work)
        self._changed = self._thread.changed
        self._sent = 0
        self._error: BaseException | None = None

    def send(self, manifest: Manifest, keep: int) -> None:
        """Queue a checkpoint."""
        with self._thread.lock:
            self._thread.jobs.clear()  # Only the newest is needed.
            try:
                self._thread.put(_MirrorJob(manifest, keep))
                self._error = None
            except RuntimeError as error:  # `wait` raises it.
                self._error = CheckpointError(
                    f"Checkpoint {manifest.number} could not be copied to {self._url}: {error}."
                )

    def list_pinned(self) -> set[str]:
        """Return the names of files that are still to be copied."""
        with self._thread.lock:
            jobs = filter(None, (*self._thread.jobs, self._thread.current))
            return {name for job in jobs for name in job.manifest.files}

    def wait(self, number: int, timeout: float | None) -> None:
        """Wait until checkpoint `number`, or a newer one, is in the store. Raise the error of a copy that failed."""
        with self._thread.lock:
            if not self._changed.wait_for(lambda: self._sent >= number or self._error is not None, timeout):
                raise TimeoutError(
                    f"Checkpoint {number} was not in {self._url} after {timeout} s. The copy is still running. Call "
                    "mirrored() again."
                )
            if self._sent < number and self._error is not None:
                raise self._error

    def cancel(self) -> None:
        """Give up all copies that are queued or in progress."""
        with self._thread.lock:
            self._thread.jobs.clear()
            if self._thread.current is not None:
                self._waiting.give_up()
            else:
                self._error = self._error or CheckpointError(f"The copy to {self._url} was cancelled.")
            self._changed.notify_all()

    def close(self, timeout: float, began: float) -> None:
        """Wait until everything is copied, see `JobThread.end`."""
        try:
            self._thread.end(timeout, began)
        finally:
            if self._target is not None and not self._thread.is_busy:
                self._target.close()

    def _work(self, job: _MirrorJob) -> None:
        error: BaseException | None = None
        try:
            self._copy(job)
        except BaseException as caught:  # `wait` raises it.
            error = caught
            _LOG.warning("Checkpoint %d could not be mirrored to %s: %s", job.manifest.number, self._url, caught)
        with self._thread.lock:
            self._error = error
            self._sent = self._sent if error is not None else max(self._sent, job.manifest.number)
            self._changed.notify_all()

    def _copy(self, job: _MirrorJob) -> None:
        """Copy a checkpoint: its files, and then its manifest."""
        if self._target is None:
            self._target = ObjectStoreWriter(self._url, self._objects)
            self._last = max(self._target.reader.numbers(), default=0)
        target = self._target
        manifest = job.manifest

        # The number is that of the directory, unless the store has a higher one: a run that lost its disk starts at 1.
        def find_number() -> int:
            numbers = target.reader.numbers()
            next_number = find_next_number(target.reader, numbers, self._last, job.manifest.writer_id)
            return max(job.manifest.number, next_number)

        manifest = replace(manifest, number=find_number())
        target.mark(manifest.files)
        self._upload(target, manifest)
        manifest = commit_unique(target, manifest, find_number)
        self._last = manifest.number
        self._upload(target, manifest)  # Another process may have collected files of a copy that was interrupted.
        try:
            target.collect(job.keep, manifest.files)
        except (CheckpointError, OSError) as error:
            _LOG.warning("Old checkpoints in %s could not be removed: %s", self._url, error)

    def _upload(self, target: ObjectStoreWriter, manifest: Manifest) -> None:
        """Upload the files that the store does not have."""
        there = target.reader.file_sizes()
        for name, nbytes in manifest.files.items():
            if there.get(name) != nbytes:
                target.upload(name, self._segments / name)

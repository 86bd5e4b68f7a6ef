"""Mirrors: copies of the checkpoints of a directory in an object store, made in the background.

Guarantee: a checkpoint is safe in its directory before it is copied. An error of the copy is raised by the handle's
`mirrored()`. It does not affect the local checkpoint.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any, NamedTuple

from holdall.checkpoint.blobs import open_blobs
from holdall.checkpoint.jobs import JobThread
from holdall.checkpoint.manifest import Manifest
from holdall.checkpoint.reader import SEGMENTS
from holdall.checkpoint.retention import collect
from holdall.checkpoint.savers import CheckpointPlace, Saver
from holdall.checkpoint.urls import is_remote
from holdall.checkpoint.waiting import Waiting
from holdall.errors import ArgumentError, CheckpointError

_LOG = logging.getLogger("holdall")


def require_mirror(mirror: Any, url: str) -> None:
    """Raise ArgumentError if checkpoints of `url` cannot be copied to `mirror`."""
    if is_remote(url):
        raise ArgumentError(f"mirror ({mirror!r}) is for saves to a directory, and {url} is not a directory.")
    if not (isinstance(mirror, str) and is_remote(mirror)):
        raise ArgumentError(f"mirror ({mirror!r}) must be a prefix of an object store: s3://, gs:// or az://.")


def find_mirror(saver: Saver, mirror: str) -> CheckpointMirror:
    """Return the object that copies the checkpoints of `saver` to the prefix `mirror`. The first call makes it."""
    require_mirror(mirror, saver.url)
    if mirror not in saver.mirrors:
        saver.mirrors[mirror] = CheckpointMirror(mirror, saver.url)
    return saver.mirrors[mirror]


class _MirrorJob(NamedTuple):
    """A checkpoint to copy."""

    manifest: Manifest
    keep: int


class CheckpointMirror:
    """Copies the checkpoints of one directory to one prefix of an object store.

    While one checkpoint is copied, only the newest of the following ones is queued.
    """

    def __init__(self, url: str, source: str) -> None:
        self._url = url
        self._waiting = Waiting(url)
        self._source = open_blobs(source)
        self._place = CheckpointPlace(url, self._waiting)
        self._thread = JobThread("holdall-mirror", self._waiting, self._work)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # Notified when one of the attributes below changes.
        self._copied_number = 0  # Number of the newest checkpoint that was copied.
        self._error: BaseException | None = None

    def send(self, manifest: Manifest, keep: int) -> None:
        """Queue a checkpoint."""
        with self._lock:
            self._error = None
            try:
                self._thread.replace(_MirrorJob(manifest, keep))  # Only the newest checkpoint is needed.
            except RuntimeError as error:  # `wait` raises it.
                self._error = CheckpointError(
                    f"Checkpoint {manifest.number} could not be copied to {self._url}: {error}."
                )
                self._changed.notify_all()

    def list_pinned(self) -> set[str]:
        """Return the names of files that were not copied yet, so that they are not removed."""
        return {name for job in self._thread.list_jobs() for name in job.manifest.files}

    def wait(self, number: int, timeout: float | None) -> None:
        """Wait until checkpoint `number`, or a newer one, is in the store. Raise the error of a copy that failed."""
        with self._lock:
            if not self._changed.wait_for(lambda: self._copied_number >= number or self._error is not None, timeout):
                raise TimeoutError(
                    f"Checkpoint {number} was not in {self._url} after {timeout:.3g} s. The copy is still running. "
                    "Call mirrored() again."
                )
            if self._copied_number < number and self._error is not None:
                raise self._error

    def cancel(self) -> None:
        """Give up all copies that are queued or in progress."""
        with self._lock:
            self._thread.cancel(lambda _: True)
            if not self._thread.is_busy:
                self._error = self._error or CheckpointError(f"The copy to {self._url} was cancelled.")
            self._changed.notify_all()

    def close(self, timeout: float, began: float) -> None:
        """Wait until every queued checkpoint is copied, see `JobThread.end`."""
        try:
            self._thread.end(timeout, began)
        finally:
            if not self._thread.is_busy:
                self._place.close()

    def _work(self, job: _MirrorJob) -> None:
        error: BaseException | None = None
        try:
            self._copy(job)
        except BaseException as caught:  # `wait` raises it.
            error = caught
            _LOG.warning("Checkpoint %d could not be mirrored to %s: %s", job.manifest.number, self._url, caught)
        with self._lock:
            self._error = error
            if error is None:
                self._copied_number = max(self._copied_number, job.manifest.number)
            self._changed.notify_all()

    def _copy(self, job: _MirrorJob) -> None:
        """Copy a checkpoint: its files, and then its manifest."""
        place = self._place
        place.open()
        copied_sizes = place.reader.file_sizes()
        for name, nbytes in job.manifest.files.items():
            if copied_sizes.get(name) != nbytes:
                place.reader.blobs.create(SEGMENTS + name, self._source.read(SEGMENTS + name, 0, nbytes))
        # The number is that of the directory, unless the store has a higher one: a run that lost its disk starts at 1.
        number = max(job.manifest.number, place.find_number())
        manifest = place.commit(replace(job.manifest, number=number, writer_id=place.writer_id))
        try:
            collect(place.reader, place.lease, job.keep, manifest.files)
        except OSError as error:
            _LOG.warning("Old checkpoints in %s could not be removed: %s", self._url, error)

"""Mirrors: checkpoints that are safe on a disk are copied to an object store behind it, in order.

In:  manifests of a local place.  Out: the same checkpoints in the store.
Invariant: a manifest appears in the store after every file that it names. Files that are there already are not sent
again, so an upload that was interrupted goes on where it was. What is not mirrored yet is not collected here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from holdall.checkpoint.manifest import Manifest
from holdall.checkpoint.objectstore import Objects, RemotePlace
from holdall.checkpoint.place import next_number
from holdall.errors import CheckpointError

_LOG = logging.getLogger("holdall")


class _Job(NamedTuple):
    manifest: Manifest
    keep: int


class Mirror:
    """Sends the checkpoints of one local place to one prefix of an object store.

    Checkpoints between the one that is being sent and the newest are passed over: who falls behind catches up.
    """

    def __init__(self, url: str, segments: Path) -> None:
        self._url = url
        self._segments = segments
        self._objects = Objects(url)
        self._place: RemotePlace | None = None
        self._last = 0  # the newest checkpoint there when it was opened, or the last one that was sent
        self._jobs: deque[_Job] = deque()
        self._at_work: _Job | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sent = 0
        self._error: BaseException | None = None

    def send(self, manifest: Manifest, keep: int) -> None:
        """Have a checkpoint sent."""
        with self._changed:
            self._jobs.append(_Job(manifest, keep))
            self._error = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdall-mirror")
                self._thread.start()

    def pinned(self) -> set[str]:
        """Name the files that are still to be sent."""
        with self._changed:
            jobs = [*self._jobs, *([] if self._at_work is None else [self._at_work])]
            return {name for job in jobs for name in job.manifest.files}

    def wait(self, number: int, timeout: float | None) -> None:
        """Wait until a checkpoint, or a newer one, stands in the store."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._sent >= number or self._error is not None, timeout):
                raise TimeoutError(f"checkpoint {number} was not in {self._url} after {timeout} s; it goes on")
            if self._sent < number and self._error is not None:
                raise self._error

    def interrupt(self) -> None:
        """Give up waiting for the store."""
        self._objects.stopped.set()

    def close(self) -> None:
        """Wait for all that is to be sent."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._at_work = self._jobs.pop()
                self._jobs.clear()
                job = self._at_work
            error: BaseException | None = None
            try:
                self._copy(job)
            except BaseException as caught:  # whoever waits is told; the local checkpoint stands
                error = caught
                _LOG.warning("checkpoint %d could not be mirrored to %s (%s)", job.manifest.number, self._url, caught)
            with self._changed:
                self._at_work, self._error = None, error
                self._sent = self._sent if error is not None else max(self._sent, job.manifest.number)
                self._changed.notify_all()

    def _copy(self, job: _Job) -> None:
        if self._place is None:
            self._place = RemotePlace(self._url, self._objects)
            self._last = max(self._place.library.numbers(), default=0)
        place, manifest = self._place, job.manifest
        # The same number as on the disk, unless the store has come further: a run that lost its disk begins at 1 again.
        number = max(manifest.number, next_number(place.library, self._last, manifest.epoch))
        manifest = replace(manifest, number=number)
        there = place.library.file_sizes()
        for name, nbytes in manifest.files.items():
            if there.get(name) != nbytes:
                place.upload(name, self._segments / name)
        place.commit(manifest)
        self._last = number
        try:
            place.collect(job.keep, manifest.files)
        except (CheckpointError, OSError) as error:
            _LOG.warning("old checkpoints in %s could not be removed (%s)", self._url, error)

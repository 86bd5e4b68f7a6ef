"""In the background: checkpoints at intervals, copies of them in an object store, and the rest of what was loaded.

In:  a memory; checkpoints that are safe on a disk; blocks that lie in an object store.  Out: the same, saved, sent,
fetched.
Invariant: nothing here holds training up. A failure is logged and tried again, or raised where somebody waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from holdall.background import end_before_python
from holdall.checkpoint.load import Restored, is_remote, normalized_url
from holdall.checkpoint.manifest import Manifest, Waiting
from holdall.checkpoint.object_store import ObjectStoreWriter
from holdall.checkpoint.objects import Objects
from holdall.checkpoint.save import JobThread, Saver, Savers, next_number
from holdall.errors import ArgumentError, CheckpointError, ClosedError, HoldallError
from holdall.schema import require_count, require_number
from holdall.storage import Extent, FullBlock, SegmentFile, SliceBlock

if TYPE_CHECKING:
    from holdall.checkpoint.save import SaveHandle

_LOOK_S = 0.1
"""How often to look whether something has to be written."""

_STOP_S = 5.0
"""How long to wait for a thread that was stopped, which notices at its next look; a disk that hangs is left behind."""

_LOG = logging.getLogger("holdall")


class AutosavedMemory(Protocol):
    """What is saved."""

    @property
    def next_id(self) -> int:
        """Id of the next transition."""

    def save(self, url: str, /, *, keep: int, mirror: str | None) -> SaveHandle:
        """Begin a save."""

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the blocks that are full and not known yet."""


class SaveInterval(NamedTuple):
    """When a checkpoint is due: whichever comes first, counted from the end of the last one."""

    seconds: float | None
    transitions: int | None

    @classmethod
    def checked(cls, seconds: float | None, transitions: int | None) -> SaveInterval:
        """Check the arguments of `save_every`."""
        if seconds is None and transitions is None:
            raise ArgumentError("save_every was given neither seconds nor transitions; name one of them, or both")
        return cls(
            None if seconds is None else require_number("seconds", seconds, 0.01),
            None if transitions is None else require_count("transitions", transitions, 1),
        )

    @property
    def look_s(self) -> float:
        """How long nothing needs to be looked at."""
        return _LOOK_S if self.seconds is None else min(_LOOK_S, self.seconds)

    def is_due(self, seconds: float, transitions: int) -> bool:
        """Whether so many seconds, or transitions, are enough."""
        by_time = self.seconds is not None and seconds >= self.seconds
        return by_time or (self.transitions is not None and transitions >= self.transitions)


class Autosave:
    """Writes blocks as they are sealed, and makes a checkpoint at every interval, until it is stopped.

    Args:
        owner: What is saved; held weakly, so that a memory which is simply dropped ends its thread.
        saver: Writes its blocks that are full.
        how: `keep` and `mirror` of every save.
    """

    def __init__(self, owner: AutosavedMemory, saver: Saver, how: dict[str, Any], interval: SaveInterval) -> None:
        self._stopped = threading.Event()
        arguments = (weakref.ref(owner), saver, how, interval, owner.next_id, self._stopped)
        self._thread = threading.Thread(target=_run_autosave, args=arguments, name="holdall-autosave", daemon=True)
        end_before_python(self._thread, self._stopped.set)
        self._thread.start()

    def stop(self) -> None:
        """End it, after the save that is under way."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)


def autosaved(
    memory: AutosavedMemory,
    savers: Savers,
    url: str | os.PathLike[str],
    seconds: float | None,
    transitions: int | None,
    keep: int,
    mirror: str | None,
) -> Autosave:
    """Save a memory at intervals from now on, see `ReplayMemory.save_every`."""
    interval = SaveInterval.checked(seconds, transitions)
    how = {"keep": require_count("keep", keep, 1), "mirror": mirror}
    saver = savers.to(normalized_url(url))
    if mirror is not None:
        require_mirror(mirror, saver.url)
    return Autosave(memory, saver, how, interval)


def _run_autosave(
    owner: weakref.ref[AutosavedMemory],
    saver: Saver,
    how: dict[str, Any],
    interval: SaveInterval,
    first_id: int,
    stopped: threading.Event,
) -> None:
    began, saved_id = time.monotonic(), first_id
    while not stopped.wait(interval.look_s):
        memory = owner()
        if memory is None:
            return
        try:
            next_id = memory.next_id
            if not interval.is_due(time.monotonic() - began, next_id - saved_id):
                saver.write_ahead(memory.full_blocks)
                continue
            began, saved_id = time.monotonic(), next_id
            handle = memory.save(saver.url, **how)
            del memory
            while not (handle.done() or stopped.wait(_LOOK_S)):
                pass
            if stopped.is_set():
                return  # who closes the memory waits for the save
            handle.result()
            began = time.monotonic()
        except ClosedError:
            return
        except (HoldallError, OSError, RuntimeError) as error:
            _LOG.warning("a checkpoint could not be saved (%s); the next one is tried when it is due", error)
        finally:
            memory = None


def require_mirror(mirror: Any, url: str) -> None:
    """Refuse a mirror that checkpoints saved to `url` cannot be copied to."""
    if is_remote(url):
        raise ArgumentError(f"mirror ({mirror!r}) is for saves to a directory; {url} is no directory")
    if not (isinstance(mirror, str) and is_remote(mirror)):
        raise ArgumentError(f"mirror ({mirror!r}) must be a prefix of an object store: s3://, gs:// or az://")


def mirror_of(saver: Saver, mirror: str) -> CheckpointMirror:
    """Return what sends a saver's checkpoints to a prefix; made with the first of them."""
    require_mirror(mirror, saver.url)
    if mirror not in saver.mirrors:
        saver.mirrors[mirror] = CheckpointMirror(mirror, Path(saver.url) / "segments")
    return saver.mirrors[mirror]


class _MirrorJob(NamedTuple):
    manifest: Manifest
    keep: int


class CheckpointMirror:
    """Sends the checkpoints of one directory to one prefix of an object store.

    Checkpoints between the one that is being sent and the newest are passed over: who falls behind catches up.
    """

    def __init__(self, url: str, segments: Path) -> None:
        self._url = url
        self._segments = segments
        self._waiting = Waiting(url)
        self._objects = Objects(url, self._waiting)
        self._target: ObjectStoreWriter | None = None
        self._last = 0  # the newest checkpoint there when it was opened, or the last one that was sent
        self._thread = JobThread("holdall-mirror", self._waiting, self._work)
        self._changed = self._thread.changed
        self._sent = 0
        self._error: BaseException | None = None

    def send(self, manifest: Manifest, keep: int) -> None:
        """Have a checkpoint sent."""
        with self._changed:
            self._thread.jobs.clear()  # the newest is enough
            try:
                self._thread.put(_MirrorJob(manifest, keep))
                self._error = None
            except RuntimeError as error:  # raised by `wait`: the local checkpoint stands
                self._error = CheckpointError(
                    f"checkpoint {manifest.number} could not be sent to {self._url} ({error})"
                )

    def pinned(self) -> set[str]:
        """Name the files that are still to be sent."""
        with self._changed:
            jobs = filter(None, (*self._thread.jobs, self._thread.at_work))
            return {name for job in jobs for name in job.manifest.files}

    def wait(self, number: int, timeout: float | None) -> None:
        """Wait until a checkpoint, or a newer one, stands in the store."""
        with self._thread.locked():
            if not self._changed.wait_for(lambda: self._sent >= number or self._error is not None, timeout):
                raise TimeoutError(
                    f"Checkpoint {number} was not in {self._url} after {timeout} s. The copy is still running. Call "
                    "mirrored() again."
                )
            if self._sent < number and self._error is not None:
                raise self._error

    def cancel(self) -> None:
        """Give up what is being sent, or about to be."""
        with self._thread.locked():
            self._thread.jobs.clear()
            if self._thread.at_work is not None:
                self._waiting.give_up()
            else:
                self._error = self._error or CheckpointError(f"what was to be sent to {self._url} was cancelled")
            self._changed.notify_all()

    def close(self, timeout: float, began: float) -> None:
        """Wait until everything was sent; see `JobThread.end`."""
        try:
            self._thread.end(timeout, began)
        finally:
            if self._target is not None and not self._thread.is_busy:
                self._target.close()

    def _work(self, job: _MirrorJob) -> None:
        error: BaseException | None = None
        try:
            self._copy(job)
        except BaseException as caught:  # raised by `wait`; the local checkpoint stands
            error = caught
            _LOG.warning("checkpoint %d could not be mirrored to %s (%s)", job.manifest.number, self._url, caught)
        with self._changed:
            self._error = error
            self._sent = self._sent if error is not None else max(self._sent, job.manifest.number)
            self._changed.notify_all()

    def _copy(self, job: _MirrorJob) -> None:
        if self._target is None:
            self._target = ObjectStoreWriter(self._url, self._objects)
            self._last = max(self._target.reader.numbers(), default=0)
        target, manifest = self._target, job.manifest
        # The same number as on the disk, unless the store has come further: a run that lost its disk begins at 1 again.
        numbers = target.reader.numbers()
        number = max(manifest.number, next_number(target.reader, numbers, self._last, manifest.writer_id))
        manifest = replace(manifest, number=number)
        target.mark(manifest.files)
        self._upload(target, manifest)
        target.commit(manifest)
        self._last = number
        self._upload(target, manifest)  # a copy that was interrupted long ago was being collected, perhaps
        try:
            target.collect(job.keep, manifest.files)
        except (CheckpointError, OSError) as error:
            _LOG.warning("old checkpoints in %s could not be removed (%s)", self._url, error)

    def _upload(self, target: ObjectStoreWriter, manifest: Manifest) -> None:
        there = target.reader.file_sizes()
        for name, nbytes in manifest.files.items():
            if there.get(name) != nbytes:
                target.upload(name, self._segments / name)


_AT_ONCE_BYTES = 4 * 2**20


def the_rest_of(found: Restored) -> BackgroundFetch | None:
    """Begin to fetch the blocks of what was loaded from an object store, newest first; None if there are none."""
    segments = [] if found.content is None else found.content.segments
    blocks = {id(part.block): part.block for segment in reversed(segments) for part in segment.parts}
    extents = [extent for block in blocks.values() if (extent := block.extent) is not None]
    if found.waiting is None or not any(extent.file.is_awaited for extent in extents):
        return None
    return BackgroundFetch(extents, found.waiting)


class _BlockRange(NamedTuple):
    file: weakref.ref[SegmentFile]  # a memory that drops its blocks needs them no more
    start: int
    nbytes: int


class BackgroundFetch:
    """Fetches the blocks of one memory.

    Args:
        extents: Where they lie, in the order in which they are wanted.
        waiting: For the store.
    """

    def __init__(self, extents: Iterable[Extent], waiting: Waiting) -> None:
        self._waiting = waiting
        self._stopped = threading.Event()
        runs = [_BlockRange(weakref.ref(e.file), e.start, e.nbytes) for e in extents if e.file.is_awaited]
        self._thread: threading.Thread | None = None
        if runs:
            arguments = (runs, self._stopped)
            thread = threading.Thread(target=_fetch_blocks, args=arguments, name="holdall-fetch", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:
                _LOG.warning("what was loaded is fetched when it is sampled from (%s)", error)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all of it is here, or cannot be had; for measurements and tests."""
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self) -> None:
        """End it, and all waiting for the store."""
        self._stopped.set()
        self._waiting.give_up()
        self.wait(_STOP_S)


def _fetch_blocks(runs: list[_BlockRange], stopped: threading.Event) -> None:
    try:
        for run in runs:
            for first in range(0, run.nbytes, _AT_ONCE_BYTES):
                file = run.file()
                if stopped.is_set() or file is None:
                    break
                start = run.start + first
                file.bring(np.array([start]), np.array([min(start + _AT_ONCE_BYTES, run.start + run.nbytes)]))
                del file
    except HoldallError as error:
        if not stopped.is_set():
            _LOG.warning("the rest of a loaded checkpoint is fetched when it is sampled from (%s)", error)
        return
    if stopped.is_set():
        return
    for run in runs:
        if (arrived := run.file()) is not None:
            arrived.is_awaited = False

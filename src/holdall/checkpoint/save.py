"""Saving: `save` returns a handle at once, and a thread for each url writes one checkpoint after another.

In:  snapshots.  Out: handles, which wait for the checkpoint or for its error.
Invariant: saves to one url are written in the order in which they were asked for, whichever memory, shard or timer
asks. A save that fails changes nothing: the checkpoints before it are as they were, and the memory goes on.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdall.background import CLOSE_S, JobThread, Waiting, left
from holdall.checkpoint.directory import DirectoryWriter
from holdall.checkpoint.file_system import CheckpointWriter, disk_errors_explained
from holdall.checkpoint.manifest import (
    ATTACHMENT_NAME,
    is_remote,
    last_number,
    newest_manifest,
    next_number,
    normalized_url,
)
from holdall.checkpoint.saved_records import RowsKey, SavedRecords
from holdall.checkpoint.write import Report, ShardsSnapshot, Snapshot, SnapshotWriter
from holdall.errors import ArgumentError, CheckpointError
from holdall.storage import Coder, FullBlock, SliceBlock
from holdall.units import require_count, require_number

if TYPE_CHECKING:
    from holdall.checkpoint.autosave import Autosave, CheckpointMirror


_LOOK_S = 0.1
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


class SaveHandle:
    """A save under way."""

    def __init__(
        self,
        url: str,
        interrupt: Callable[[], None],
        wait_for_mirror: Callable[[int, float | None], None] | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        self.url = url
        self._interrupt = interrupt
        self._waiting = waiting or Waiting(url)
        self._wait_for_mirror = wait_for_mirror
        self._ended = threading.Event()
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is safe, and return it; raise what went wrong if it is not."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the checkpoint at {self.url} was not complete after {timeout} s; it goes on")
        if self._error is not None:
            raise self._error
        if self._checkpoint is None:
            raise CheckpointError(f"the checkpoint at {self.url} ended without a result; report this")
        return self._checkpoint

    def finish(self, timeout: float = CLOSE_S) -> Checkpoint:
        """Wait as long as the save gets on; cancel it if it does not for `timeout` seconds. Return the checkpoint."""
        began = time.monotonic()
        while not self._ended.wait(_LOOK_S):
            if time.monotonic() - self._waiting.stuck_since(began) >= timeout:
                self.cancel()
                return self.result(_CANCELLED_S)
        return self.result()

    def mirrored(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint, or a newer one, stands in the mirror too, and return it."""
        if self._wait_for_mirror is None:
            raise ArgumentError("mirrored() was called, but the save had no mirror; call save(path, mirror=url)")
        began = time.monotonic()
        checkpoint = self.result(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        self._wait_for_mirror(checkpoint.number, left)
        return checkpoint

    def cancel(self) -> None:
        """Give this save up, and its copy in the mirror: wherever it is, its `result` raises. Later saves go on."""
        self._interrupt()

    def succeed(self, checkpoint: Checkpoint) -> None:
        """End well."""
        self._checkpoint = checkpoint
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """End badly."""
        self._error = error
        self._ended.set()


def require_mirror(mirror: Any, url: str) -> None:
    """Refuse a mirror, unless it is None, that checkpoints saved to `url` cannot be copied to."""
    if mirror is not None and is_remote(url):
        raise ArgumentError(f"mirror ({mirror!r}) is for saves to a directory; {url} is no directory")
    if mirror is not None and not (isinstance(mirror, str) and is_remote(mirror)):
        raise ArgumentError(f"mirror ({mirror!r}) must be a prefix of an object store: s3://, gs:// or az://")


def checked_save(
    url: str | os.PathLike[str], attach: Mapping[str, Any] | None, progress: Any, mirror: Any
) -> tuple[str, dict[str, Path | bytes]]:
    """Check the arguments of a save; return the url in one way of writing it, and the attached files by name."""
    location = normalized_url(url)
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress ({progress!r}) must be a function of text and bytes; pass one, or None")
    require_mirror(mirror, location)
    if attach is not None and not isinstance(attach, Mapping):
        raise ArgumentError(f"attach ({attach!r}) must map names to bytes or paths; pass a dict")
    return location, {_checked_name(name): _checked_content(name, content) for name, content in (attach or {}).items()}


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not ATTACHMENT_NAME.fullmatch(name):
        raise ArgumentError(
            f"attach has the name {name!r}; use letters, digits, '_', '-', '.', and '/' between parts that begin with "
            "none of the last two"
        )
    return name


def _checked_content(name: str, content: Any) -> Path | bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, str | os.PathLike):
        path = Path(content)
        if path.is_file():
            return path
        raise ArgumentError(f"attach[{name!r}] ({str(path)!r}) is no file; write it first, or pass its bytes")
    raise ArgumentError(f"attach[{name!r}] is a {type(content).__name__}; pass bytes or the path of a file")


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
    wants_total = progress is not None and _takes_three(progress)

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


def _takes_three(progress: Callable[..., None]) -> bool:
    try:
        inspect.signature(progress).bind("", 0, 0)
    except (TypeError, ValueError):
        return False
    return True


class _SaveJob(NamedTuple):
    """A checkpoint to be made."""

    snapshot: Snapshot | ShardsSnapshot
    handle: SaveHandle
    keep: int | None
    progress: Progress | None
    mirror: CheckpointMirror | None


class Saver:
    """Writes checkpoints to one url.

    Args:
        open_writer: Opens the url for writing; called in the background, with the first save.
        saved: What lies there of the memory already, if it was loaded from there.
    """

    def __init__(
        self,
        url: str,
        open_writer: Callable[[Waiting], CheckpointWriter],
        coder: Coder,
        saved: SavedRecords | None = None,
    ) -> None:
        self.url = url
        self._open_target = open_writer
        self._coder = coder
        self._records = saved or SavedRecords()
        self._target: CheckpointWriter | None = None
        self._last = 0  # the newest checkpoint when the url was opened, or this saver's own last one
        self._mirrors: dict[str, CheckpointMirror] = {}
        self._saving: SnapshotWriter | None = None  # begun by blocks that were written ahead
        self._ahead: list[FullBlock] = []
        self._jobs: deque[_SaveJob] = deque()
        self._at_work: _SaveJob | None = None
        self._waiting = Waiting(url)
        self._thread = JobThread("holdall-saver", self._waiting, self._work, lambda: bool(self._jobs or self._ahead))
        self._changed = self._thread.changed
        self.in_order = threading.RLock()  # held from a snapshot until it is queued: an older one never comes later

    def rows_saved(self) -> dict[int, RowsKey]:
        """Name the chunks of rows that need not be written again."""
        return self._records.rows_saved()

    def save(
        self, snapshot: Snapshot | ShardsSnapshot, keep: int | None, progress: Progress | None, mirror: str | None
    ) -> SaveHandle:
        """Have a snapshot written, after those before it.

        Args:
            keep: How many checkpoints stay. None: what the manifest above names, or will name; for shards.
        """
        if mirror is not None and isinstance(snapshot, ShardsSnapshot):
            raise ArgumentError(f"mirror ({mirror!r}) is for a memory without shards; save to the object store itself")
        is_queued = False
        try:
            behind = None if mirror is None else self._mirror(mirror)
            wait = None if behind is None else behind.wait
            handle = SaveHandle(self.url, lambda: self._cancel(handle, behind), wait, self._waiting)
            with left(self._thread.lock):
                self._leave_to_parent()
                self._thread.wake()
                self._jobs.append(_SaveJob(snapshot, handle, keep, progress, behind))
                is_queued = True
        finally:
            if not is_queued:
                self._drop(snapshot)
        return handle

    def write_ahead(self, full_blocks: Callable[[Callable[[SliceBlock], bool]], list[FullBlock]]) -> None:
        """Have blocks written that are full, for the next checkpoint; nothing if the saver is busy.

        Args:
            full_blocks: Returns those that are not known already.
        """
        with left(self._thread.lock):
            if self._thread.is_busy:
                return
            self._leave_to_parent()
            saving = self._saving
            known = self._records.blocks.__contains__ if saving is None else saving.knows
            ahead = full_blocks(known)[::-1]
            if ahead:
                self._thread.wake()
                self._ahead = ahead

    def close(self, timeout: float = CLOSE_S, began: float | None = None) -> None:
        """Wait for every save, and let another writer in; see `JobThread.end`."""
        began = time.monotonic() if began is None else began
        try:
            self._thread.end(timeout, began)
        finally:
            for mirror in self._mirrors.values():
                mirror.close(timeout, began)
            if not self._thread.is_busy:  # else a disk hangs: its writer goes with the program
                saving, self._saving = self._saving, None
                if saving is not None:
                    saving.abandon()
                target, self._target = self._target, None
                if target is not None:
                    target.close()

    def _leave_to_parent(self) -> None:
        """Forget, in the child of a fork, what its parent does."""
        if self._thread.is_forked:
            self._jobs, self._ahead, self._at_work = deque(), [], None

    def _cancel(self, handle: SaveHandle, mirror: CheckpointMirror | None) -> None:
        with left(self._thread.lock):
            queued = [job for job in self._jobs if job.handle is handle]
            self._jobs = deque(job for job in self._jobs if job.handle is not handle)
            if self._at_work is not None and self._at_work.handle is handle:
                self._waiting.give_up()
        for job in queued:
            self._drop(job.snapshot)
            handle.fail(CheckpointError(f"the save to {self.url} was cancelled before it began"))
        if mirror is not None:
            mirror.cancel()

    def _work(self) -> None:
        """Do what is next."""
        with self._changed:
            ahead, self._ahead = self._ahead, []
            job = self._at_work = self._jobs.popleft() if self._jobs else None
            if not self._thread.has_given_up:
                self._waiting.begin()
        try:
            if job is not None:
                self._do(job)
            elif ahead:  # else what there was has been cancelled
                self._write_ahead(ahead)
        finally:
            with self._changed:
                self._at_work = None

    def _do(self, job: _SaveJob) -> None:
        try:
            checkpoint = self._written(job)
        except BaseException as error:  # raised by the handle; training goes on
            _LOG.warning("a checkpoint could not be saved to %s (%s)", self.url, error)
            self._drop(job.snapshot)
            job.handle.fail(error)
        else:
            job.handle.succeed(checkpoint)

    def _written(self, job: _SaveJob) -> Checkpoint:
        began = time.perf_counter()
        store = None if isinstance(job.snapshot, ShardsSnapshot) else job.snapshot.store
        transitions = 0 if store is None else store.transitions
        del store  # its parts are freed as they are written
        with disk_errors_explained(self.url, "written to"):
            target = self._opened()
            number = next_number(target.reader, self._last, target.writer_id)
            saving, self._saving = self._saving or SnapshotWriter(target, self._records, self._coder), None
            manifest = saving.run(job.snapshot, number, reporting(job.progress, self._waiting))
        self._last = number
        if job.mirror is not None and job.keep is not None:
            job.mirror.send(manifest, job.keep)
        self._collect(target, job.keep)
        return Checkpoint(
            url=self.url,
            number=number,
            bytes_written=saving.bytes_written,
            bytes_total=sum(manifest.files.values()) + sum(shard.nbytes for shard in manifest.shards),
            transitions=transitions + sum(shard.transitions for shard in manifest.shards),
            seconds=time.perf_counter() - began,
        )

    def _write_ahead(self, blocks: list[FullBlock]) -> None:
        """Write blocks for the next checkpoint; if that fails, it will say so."""
        try:
            with disk_errors_explained(self.url, "written to"):
                if self._saving is None:
                    self._saving = SnapshotWriter(self._opened(), self._records, self._coder)
                self._saving.write_ahead(blocks)
        except Exception as error:
            self._saving = None
            _LOG.info("nothing was written to %s ahead of the next checkpoint (%s)", self.url, error)

    def _mirror(self, url: str) -> CheckpointMirror:
        require_mirror(url, self.url)
        found = self._mirrors.get(url)
        if found is None:
            from holdall.checkpoint.autosave import CheckpointMirror  # noqa: PLC0415  needs object stores

            found = self._mirrors[url] = CheckpointMirror(url, Path(self.url) / "segments")
        return found

    def _opened(self) -> CheckpointWriter:
        if self._target is not None and not self._target.is_there():
            saving, self._saving = self._saving, None
            if saving is not None:
                saving.abandon()
            target, self._target = self._target, None
            target.close()
        if self._target is None:
            target = self._open_target(self._waiting)
            try:
                self._last = last_number(target.reader)
                if is_remote(self.url):
                    # What was loaded may have been collected since: only what the newest checkpoint names is safe.
                    newest = newest_manifest(target.reader, target.reader.numbers())
                    self._records.keep_only({} if newest is None else newest.files)
            except BaseException:
                target.close()
                raise
            self._target = target
        return self._target

    def _collect(self, target: CheckpointWriter, keep: int | None) -> None:
        """Remove what is not needed any more; the checkpoint stands, whatever comes of it."""
        try:
            mirrored = [mirror.pinned() for mirror in self._mirrors.values()]
            target.collect(keep, set(self._records.files).union(*mirrored))
        except OSError as error:
            _LOG.warning("old checkpoints in %s could not be removed (%s)", self.url, error)

    @staticmethod
    def _drop(snapshot: Snapshot | ShardsSnapshot) -> None:
        if isinstance(snapshot, ShardsSnapshot):
            return
        store, snapshot.store = snapshot.store, None
        if store is not None:
            with snapshot.lock:
                snapshot.release(store.rows)


class Savers:
    """The savers of one memory, by url."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self._savers: dict[str, Saver] = {}

    def to(self, url: str, saved: SavedRecords | None = None) -> Saver:
        """Return the saver to a url; `saved` is what lies there of a memory that was loaded from it."""
        saver = self._savers.get(url)
        if saver is None:
            saver = self._savers[url] = Saver(url, lambda waiting: open_writer(url, waiting), self._coder, saved)
        return saver

    def every(
        self,
        memory: Any,
        url: str | os.PathLike[str],
        seconds: float | None,
        transitions: int | None,
        keep: int,
        mirror: str | None,
    ) -> Autosave:
        """Save a memory at intervals from now on, see `ReplayMemory.save_every`."""
        if seconds is None and transitions is None:
            raise ArgumentError("save_every was given neither seconds nor transitions; name one of them, or both")
        pause = None if seconds is None else require_number("seconds", seconds, 0.01)
        if transitions is not None:
            require_count("transitions", transitions, 1)
        kept = require_count("keep", keep, 1)
        location, _ = checked_save(url, None, None, mirror)
        from holdall.checkpoint.autosave import Autosave, SaveInterval  # noqa: PLC0415  not for every memory

        how = {"keep": kept, "mirror": mirror}
        return Autosave(memory, self.to(location), how, SaveInterval(pause, transitions))

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

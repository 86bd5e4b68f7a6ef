"""Attachments: a trainer's own files, checked before anything is saved."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from holdall.checkpoint.background import Checkpoint, CheckpointMirror, Progress, SaveHandle
from holdall.checkpoint.directory import told
from holdall.checkpoint.ledger import Ledger, RowsKey
from holdall.checkpoint.manifest import ATTACHMENT_NAME, CheckpointWriter, next_number
from holdall.checkpoint.object_store import is_remote
from holdall.checkpoint.save import Saving, ShardsSnapshot, Snapshot
from holdall.checkpoint.source import open_writer
from holdall.errors import ArgumentError, HoldallError
from holdall.storage.blocks import Coder, SliceBlock
from holdall.storage.snapshot import FullBlock


def checked_attachments(attach: Mapping[str, Any] | None) -> dict[str, Path | bytes]:
    """Return files by name, as bytes or as paths that are there."""
    if attach is None:
        return {}
    if not isinstance(attach, Mapping):
        raise ArgumentError(f"attach ({attach!r}) must map names to bytes or paths; pass a dict")
    return {_checked_name(name): _checked_content(name, content) for name, content in attach.items()}


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


_YIELD_S = 0.001
"""A thread that was woken takes Python's lock, and would keep the one that woke it waiting for a whole turn."""

_LOG = logging.getLogger("holdall")


class _SaveJob(NamedTuple):
    """A checkpoint to be made."""

    snapshot: Snapshot | ShardsSnapshot
    handle: SaveHandle
    keep: int | None
    progress: Progress | None
    mirror: CheckpointMirror | None


class Saver:
    """Writes checkpoints to one place.

    Args:
        open_writer: Takes hold of the place; called in the background, with the first save.
        ledger: What the place holds of the memory already, if it was loaded from there.
    """

    def __init__(
        self, url: str, open_writer: Callable[[], CheckpointWriter], coder: Coder, ledger: Ledger | None = None
    ) -> None:
        self.url = url
        self._open_place = open_writer
        self._coder = coder
        self._ledger = ledger or Ledger()
        self._place: CheckpointWriter | None = None
        self._last = 0  # the newest checkpoint when the place was opened, or this saver's own last one
        self._mirrors: dict[str, CheckpointMirror] = {}
        self._saving: Saving | None = None  # begun by blocks that were written ahead
        self._ahead: list[FullBlock] = []
        self._jobs: deque[_SaveJob] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        # It stays when it is idle: to start one takes milliseconds on a busy machine. A program that ends waits for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdall-saver")
        self._process = os.getpid()

    def rows_saved(self) -> dict[int, RowsKey]:
        """Name the chunks of rows that need not be written again."""
        return self._ledger.rows_saved()

    def save(
        self,
        snapshot: Snapshot | ShardsSnapshot,
        keep: int | None,
        progress: Progress | None,
        mirror: str | None,
    ) -> SaveHandle:
        """Have a snapshot written, after those before it.

        Args:
            keep: How many checkpoints stay. None: what the manifest above names, or will name; for shards.
        """
        if mirror is not None and isinstance(snapshot, ShardsSnapshot):
            raise ArgumentError(f"mirror ({mirror!r}) is for a memory without shards; save to the object store itself")
        behind = None if mirror is None else self._mirror(mirror)
        handle = SaveHandle(self.url, self.interrupt, None if behind is None else behind.wait)
        with self._changed:
            self._jobs.append(_SaveJob(snapshot, handle, keep, progress, behind))
            self._wake()
        return handle

    def write_ahead(self, full_blocks: Callable[[Callable[[SliceBlock], bool]], list[FullBlock]]) -> None:
        """Have blocks written that are full, for the next checkpoint; nothing if the saver is busy.

        Args:
            full_blocks: Returns those that it is not told to be known.
        """
        with self._changed:
            if self._is_busy:
                return
            saving = self._saving
            known = self._ledger.blocks.__contains__ if saving is None else saving.knows
            self._ahead = full_blocks(known)[::-1]
            if self._ahead:
                self._wake()

    def _wake(self) -> None:
        if self._process != os.getpid():  # a fork's child has the saver, not its thread
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdall-saver")
            self._process, self._is_busy = os.getpid(), False
        if not self._is_busy:
            self._is_busy = True
            self._thread.submit(self._run)

    def interrupt(self) -> None:
        """Give up waiting for a server that does not answer."""
        place = self._place
        if place is not None:
            place.interrupt()
        for mirror in self._mirrors.values():
            mirror.interrupt()

    def close(self) -> None:
        """Wait for every save, and let another writer in."""
        self._thread.shutdown()
        for mirror in self._mirrors.values():
            mirror.close()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.abandon()
        place, self._place = self._place, None
        if place is not None:
            place.close()

    def _run(self) -> None:
        time.sleep(_YIELD_S)
        while True:
            with self._changed:
                ahead, self._ahead = self._ahead, []
                if not self._jobs and not ahead:
                    self._is_busy = False
                    return
                job = self._jobs.popleft() if self._jobs else None
            if job is None:
                self._write_ahead(ahead)
                continue
            try:
                checkpoint = self._saved(job)
            except BaseException as error:  # whoever waits for the handle is told; training goes on
                _LOG.warning("a checkpoint could not be saved to %s (%s)", self.url, error)
                self._drop(job.snapshot)
                job.handle.fail(error)
            else:
                job.handle.succeed(checkpoint)
            del job

    def _saved(self, job: _SaveJob) -> Checkpoint:
        began = time.perf_counter()
        store = None if isinstance(job.snapshot, ShardsSnapshot) else job.snapshot.store
        transitions = 0 if store is None else store.transitions
        del store  # its parts are freed as they are written
        with told(self.url, "written to"):
            place = self._opened()
            number = next_number(place.reader, self._last, place.epoch)
            saving, self._saving = self._saving or Saving(place, self._ledger, self._coder), None
            manifest = saving.run(job.snapshot, number, _telling(job.progress))
        self._last = number
        if job.mirror is not None and job.keep is not None:
            job.mirror.send(manifest, job.keep)
        self._collect(place, job.keep)
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
            with told(self.url, "written to"):
                if self._saving is None:
                    self._saving = Saving(self._opened(), self._ledger, self._coder)
                self._saving.write_ahead(blocks)
        except (HoldallError, OSError) as error:
            self._saving = None
            _LOG.info("nothing was written to %s ahead of the next checkpoint (%s)", self.url, error)

    def _mirror(self, url: str) -> CheckpointMirror:
        if is_remote(self.url):
            raise ArgumentError(f"mirror ({url!r}) is for saves to a directory; {self.url} is no directory")
        if not is_remote(url):
            raise ArgumentError(f"mirror ({url!r}) must be a prefix of an object store: s3://, gs:// or az://")
        found = self._mirrors.get(url)
        if found is None:
            found = self._mirrors[url] = CheckpointMirror(url, Path(self.url) / "segments")
        return found

    def _opened(self) -> CheckpointWriter:
        if self._place is None:
            place = self._open_place()
            try:
                self._last = max(place.reader.numbers(), default=0)
                # Between loading and now another writer may have collected what was loaded.
                self._ledger.keep_only(place.reader.file_sizes())
            except BaseException:
                place.close()
                raise
            self._place = place
        return self._place

    def _collect(self, place: CheckpointWriter, keep: int | None) -> None:
        """Remove what is not needed any more; the checkpoint stands, whatever comes of it."""
        try:
            mirrored = [mirror.pinned() for mirror in self._mirrors.values()]
            place.collect(keep, self._ledger.files_in_use().union(*mirrored))
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
    """The savers of one memory, by place."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self._savers: dict[str, Saver] = {}

    def to(self, place: str, ledger: Ledger | None = None) -> Saver:
        """Return the saver to a place; `ledger` is what it holds of a memory that was loaded from there."""
        saver = self._savers.get(place)
        if saver is None:
            saver = self._savers[place] = Saver(place, lambda: open_writer(place), self._coder, ledger)
        return saver

    def close(self) -> None:
        """Wait for all that is being saved."""
        savers, self._savers = self._savers, {}
        for saver in savers.values():
            saver.close()


def _telling(progress: Progress | None) -> Callable[[str, int], None]:
    """Tell the user's callback, and survive whatever it does."""

    def tell(phase: str, nbytes: int) -> None:
        if progress is None:
            return
        try:
            progress(phase, nbytes)
        except Exception as error:  # a broken progress bar is no reason to lose a checkpoint
            _LOG.warning("the progress callback failed (%s)", error)

    return tell

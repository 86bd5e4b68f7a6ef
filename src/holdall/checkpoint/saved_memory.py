"""A memory that can be saved: by a call, or at intervals in the background.

In:  snapshots, which the memory takes under its lock.  Out: checkpoints, and what the memory was loaded with.
Invariant: the memory is held up for as long as a snapshot takes, and no longer.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdall.checkpoint.autosave import Autosave, BackgroundFetch, SaveInterval
from holdall.checkpoint.load import Restored
from holdall.checkpoint.manifest import normalized_url
from holdall.checkpoint.save import Progress, SaveHandle, Savers, checked_attachments
from holdall.checkpoint.saved_records import Attached, RowsKey
from holdall.checkpoint.write import Snapshot
from holdall.errors import ArgumentError
from holdall.storage.blocks import Coder, SliceBlock
from holdall.storage.snapshot import FullBlock
from holdall.units import require_count, require_number


class SavedMemory(ABC):
    """What a memory has to do with checkpoints: those that it writes, and the one that it came from."""

    def __init__(self, coder: Coder) -> None:
        self._savers = Savers(coder)
        self._attached = Attached()
        self._autosave: Autosave | None = None
        self._fetch: BackgroundFetch | None = None

    @property
    @abstractmethod
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""

    @abstractmethod
    def _snapshot(self, saved: Mapping[int, RowsKey], attach: Mapping[str, Path | bytes]) -> Snapshot:
        """Return all that a checkpoint holds at this moment, without the rows that are saved as they are."""

    @abstractmethod
    def _full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the blocks that take no more slices and are not known yet."""

    def save(
        self,
        url: str | os.PathLike[str],
        *,
        attach: Mapping[str, Any] | None = None,
        keep: int = 3,
        mirror: str | None = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Write a checkpoint of this moment in the background, and return at once.

        Saving again to the same place writes only what is new. A save that fails says so when its handle is asked for
        the result; the memory goes on, and the checkpoints before are intact.

        Args:
            url: A directory, or a prefix of an object store: s3://bucket/run, gs://bucket/run, az://container/run.
            attach: A trainer's own files, by name: bytes, or paths of files that stay as they are until the save is
                done. They are part of the checkpoint, see `attached`.
            keep: How many checkpoints stay; older ones are removed once this one is safe.
            mirror: A prefix of an object store to which a checkpoint is copied once it is safe in its directory; the
                handle's `mirrored()` waits for that.
            progress: Called in the background with what is written now and the bytes so far.
        """
        require_count("keep", keep, 1)
        files = checked_attachments(attach)
        saver = self._savers.to(normalized_url(url))
        return saver.save(self._snapshot(saver.rows_saved(), files), int(keep), progress, mirror)

    def save_every(
        self,
        url: str | os.PathLike[str],
        seconds: float | None = None,
        *,
        transitions: int | None = None,
        keep: int = 3,
        mirror: str | None = None,
    ) -> None:
        """Save in the background, until the memory is closed; a crash costs no more than what was added since.

        Every block is written as soon as it is full and compressed; a checkpoint is made of them when it is due, and
        has little left to write then. Calling it again replaces what was said before.

        Args:
            seconds: Make a checkpoint after so many seconds ...
            transitions: ... or after so many transitions, whichever comes first.
        """
        if seconds is None and transitions is None:
            raise ArgumentError("save_every was told neither seconds nor transitions; name one of them, or both")
        pause = None if seconds is None else require_number("seconds", seconds, 0.01)
        if transitions is not None:
            require_count("transitions", transitions, 1)
        require_count("keep", keep, 1)
        interval, place, kept = SaveInterval(pause, transitions), normalized_url(url), int(keep)
        _ = self.next_id  # a memory that was closed is refused
        if self._autosave is not None:
            self._autosave.stop()

        def save(memory: Any) -> SaveHandle:
            handle: SaveHandle = memory.save(place, keep=kept, mirror=mirror)
            return handle

        def write_ahead(memory: Any) -> None:
            memory._savers.to(place).write_ahead(memory._full_blocks)

        self._autosave = Autosave(self, save, write_ahead, interval)

    @property
    def attached(self) -> Attached:
        """Files that were saved with the memory that this one was loaded from, by name."""
        return self._attached

    @abstractmethod
    def close(self) -> None:
        """Free everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _came_from(self, found: Restored) -> None:
        """Remember a checkpoint, for the next one to hold only what is new, and fetch what is left there."""
        if found.saved is not None:
            self._savers.to(found.url, found.saved)
        self._fetch = found.fetch_the_rest()
        self._attached = found.attached

    def _end_saving(self) -> None:
        """Wait for what is being saved, and end all that goes on in the background."""
        autosave, self._autosave = self._autosave, None
        if autosave is not None:
            autosave.stop()
        self._savers.close()
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.stop()

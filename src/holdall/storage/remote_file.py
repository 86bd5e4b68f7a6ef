"""Files that lie elsewhere and arrive here page by page, when they are read or before.

In:  a way to fetch ranges of bytes.  Out: a file of this machine that can be read by position where its pages are here.
Invariant: a page is read only after all of it was written. What is held in memory is what is being fetched, a few
megabytes whatever the size of the file; pages that are not here take no room on the disk either.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import CheckpointError
from holdall.storage.batch_source import Places
from holdall.storage.blocks import SEEKING, SealedSlices, SegmentFile
from holdall.storage.coded_units import places_of, units_for
from holdall.storage.slices import NEXT_IS_WHOLE

PAGE_BYTES = 2**14
_FETCHED_AT_ONCE_BYTES = 2 * 2**20
_FILES_AT_ONCE = 4

Positions = NDArray[np.int64]
Buffer = bytes | bytearray | memoryview
Fetch = Callable[[list[int], list[int]], Sequence[Buffer]]
"""Returns the bytes of ranges, given where they start and how long they are."""


class AwaitedFile(SegmentFile):
    """A file whose pages are fetched when they are first asked for.

    Args:
        descriptor: Of an empty file of this machine that nobody else writes to.
    """

    def __init__(self, path: Path, descriptor: int, nbytes: int, fetch: Fetch) -> None:
        super().__init__(path, descriptor, is_temporary=False)
        os.ftruncate(descriptor, nbytes)
        self.is_awaited = True
        self._nbytes = nbytes
        self._fetch = fetch
        self._is_here = np.zeros(-(-nbytes // PAGE_BYTES), np.bool_)

    def read(self, start: int, nbytes: int) -> bytes:
        """Read from a position; shorter at the file's end."""
        self.bring(np.array([start], np.int64), np.array([start + nbytes], np.int64))
        return super().read(start, nbytes)

    def bring(self, starts: Positions, ends: Positions) -> None:
        """Fetch what is not here of some ranges; two threads that want the same page may both do it."""
        first = np.clip(starts, 0, self._nbytes) // PAGE_BYTES
        last = -(-np.clip(ends, 0, self._nbytes) // PAGE_BYTES)
        # +1 where a range begins and -1 behind its end: pages are wanted where the sum is above 0.
        edges = np.zeros(len(self._is_here) + 1, np.int64)
        np.add.at(edges, first, 1)
        np.add.at(edges, np.maximum(first, last), -1)
        missing = np.flatnonzero((np.cumsum(edges[:-1]) > 0) & ~self._is_here)
        at_once = _FETCHED_AT_ONCE_BYTES // PAGE_BYTES
        for begin in range(0, len(missing), at_once):
            self._fetch_pages(missing[begin : begin + at_once])

    def _fetch_pages(self, pages: NDArray[np.intp]) -> None:
        """Fetch some pages, neighbours in one request."""
        runs = np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1)
        starts = [int(run[0]) * PAGE_BYTES for run in runs]
        ends = [min((int(run[-1]) + 1) * PAGE_BYTES, self._nbytes) for run in runs]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        for start, length, content in zip(starts, lengths, self._fetch(starts, lengths), strict=True):
            piece = memoryview(content).cast("B")
            if piece.nbytes != length:
                raise CheckpointError(f"{self.path} gave {piece.nbytes} bytes of {length} asked for; nothing is used")
            self._write(start, piece)
        self._is_here[pages] = True

    def _write(self, start: int, piece: memoryview) -> None:
        try:
            while piece.nbytes:
                written = write_at(self.descriptor, piece, start)
                start, piece = start + written, piece[written:]
        except OSError as error:
            raise CheckpointError(
                error.errno,
                f"there is no place on this machine for what is read of {self.path} ({error.strerror}); free some "
                "room, or load with spill_dir on a disk that has it",
            ) from error


class Demand(NamedTuple):
    """Ranges of a file that are about to be read."""

    file: SegmentFile
    starts: Positions
    ends: Positions


def bring(demands: Iterable[Demand]) -> None:
    """See to it that ranges of several files can be read, some of them at a time where they have to be fetched."""
    wanted = list(demands)
    awaited = [demand for demand in wanted if demand.file.is_awaited]
    if len(awaited) <= 1:
        for file, starts, ends in wanted:
            file.bring(starts, ends)
        return
    left, errors = list(awaited), list[BaseException]()

    def fetch() -> None:
        while left and not errors:
            with contextlib.suppress(IndexError):  # another thread took the last
                file, starts, ends = left.pop()
                try:
                    file.bring(starts, ends)
                except BaseException as error:
                    errors.append(error)

    # Not a pool: the end of the program would wait for its threads, and they for a store that is gone.
    threads = [threading.Thread(target=fetch, name="holdall-fetch", daemon=True) for _ in awaited[1:_FILES_AT_ONCE]]
    for thread in threads:
        thread.start()
    fetch()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def bring_slices(sealed: SealedSlices, numbers: NDArray[np.int64]) -> None:
    """Fetch the units of given slices, if they lie in a file that is awaited."""
    demand = _demand(sealed, numbers)
    if demand is not None:
        bring([demand])


def bring_places(places: Places) -> None:
    """Fetch all that a batch is about to read of files that are awaited."""
    if not places.awaits_files:
        return
    wanted: dict[int, list[Demand]] = {}
    for field, held in enumerate(places.held):
        for number in np.unique(places.segment).tolist():
            log, sealed = held[number]
            if not isinstance(sealed, SealedSlices) or not isinstance(log, np.ndarray):
                continue
            demand = _demand(sealed, _numbers(places, field, number, log))
            if demand is not None:
                wanted.setdefault(id(demand.file), []).append(demand)
    bring(
        Demand(of[0].file, np.concatenate([each.starts for each in of]), np.concatenate([each.ends for each in of]))
        for of in wanted.values()
    )


def _numbers(places: Places, field: int, segment: int, log: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the slices of the observations and next observations of a batch that lie in one segment."""
    rows = np.flatnonzero(places.segment == segment)
    window = places.window(field, segment)
    start = (places.cursors[field][rows] & ~NEXT_IS_WHOLE).astype(np.int64)
    # A next observation begins within the window, or right behind it.
    entries = np.minimum(start[:, None] + np.arange(2 * window), len(log) - 1)
    return np.unique(log[entries, places.lane[rows][:, None]]).astype(np.int64)


def _demand(sealed: SealedSlices, numbers: NDArray[np.int64]) -> Demand | None:
    """Say where the units of slices lie; None if they are here."""
    extent, coded = sealed.extent, sealed.coded
    if extent is None or not extent.file.is_awaited:
        return None
    units = units_for(coded, places_of(coded, numbers[(numbers >= 0) & (numbers < coded.count)]))
    offsets = np.minimum(coded.offsets.astype(np.int64), extent.nbytes)
    return Demand(extent.file, extent.start + offsets[units], extent.start + offsets[units + 1])


def write_at(descriptor: int, data: memoryview, start: int) -> int:
    """Write some of `data` from a position on; return how many bytes it was."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, start)
    with SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.write(descriptor, data)

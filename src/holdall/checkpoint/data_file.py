"""Data files: open files of records, on this machine or in an object store.

`DataFile` reads a local file by position. `RemoteFile` is a sparse local file whose pages are fetched from an object
store before they are read. `bring` fetches ranges of several files at a time.

Guarantee: a page of a remote file is read only after all of it was written. What is fetched at a time takes a few
megabytes of memory, whatever the size of the file. Pages that were not fetched take no space on the local disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import CheckpointError, DamageError
from holdall.store.records import Buffer

PAGE_BYTES = 2**14
_MAX_FETCH_BYTES = 2 * 2**20
_MAX_THREADS = 4
_MAX_POSITION = 2**63 - 1

Positions = NDArray[np.int64]
Fetch = Callable[[list[int], list[int]], Sequence[Buffer]]
"""Returns the bytes of ranges, given their starts and lengths."""

_SEEKING = threading.Lock()  # Windows cannot read by position, so that a seek and a read must not be interrupted.


class DataFile:
    """An open file of records. The descriptor is closed when nothing refers to this object any more.

    Attributes:
        path: Path or url, for errors.
        descriptor: Descriptor that compressed blocks are read from.
        is_remote: Whether ranges must be brought before native code may read them.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.is_remote = False
        weakref.finalize(self, os.close, descriptor)

    def read(self, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `start`. The result is shorter at the end of the file."""
        pieces = []
        try:
            while nbytes > 0:
                piece = _read_at(self.descriptor, nbytes, start)
                if not piece:
                    break
                pieces.append(piece)
                start += len(piece)
                nbytes -= len(piece)
        except OSError as error:
            raise DamageError(error.errno, f"{self.path} cannot be read: {error.strerror}.") from error
        return b"".join(pieces)

    def bring(self, starts: Positions, ends: Positions) -> None:
        """Ask the system to read ranges ahead, all of them at once."""
        if hasattr(os, "posix_fadvise"):
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                os.posix_fadvise(self.descriptor, start, end - start, os.POSIX_FADV_WILLNEED)


class RemoteFile(DataFile):
    """A file in an object store, with a sparse copy on this machine.

    Args:
        descriptor: Descriptor of an empty local file that nobody else writes to.
    """

    def __init__(self, path: Path, descriptor: int, nbytes: int, fetch: Fetch) -> None:
        super().__init__(path, descriptor)
        os.ftruncate(descriptor, nbytes)
        self.is_remote = True
        self._nbytes = nbytes
        self._fetch = fetch
        self._is_here = np.zeros(-(-nbytes // PAGE_BYTES), np.bool_)

    def read(self, start: int, nbytes: int) -> bytes:
        """Fetch a range and return it. The result is shorter at the end of the file."""
        self.bring(np.array([start], np.int64), np.array([min(start, _MAX_POSITION - nbytes) + nbytes], np.int64))
        return super().read(start, nbytes)

    def bring(self, starts: Positions, ends: Positions) -> None:
        """Fetch the pages of ranges that are not here yet. Two threads may fetch the same page."""
        first = np.clip(starts, 0, self._nbytes) // PAGE_BYTES
        last = -(-np.clip(ends, 0, self._nbytes) // PAGE_BYTES)
        # Add 1 where a range starts and -1 where it ends. Pages are needed where the sum is positive.
        edges = np.zeros(len(self._is_here) + 1, np.int64)
        np.add.at(edges, first, 1)
        np.add.at(edges, np.maximum(first, last), -1)
        missing = np.flatnonzero((np.cumsum(edges[:-1]) > 0) & ~self._is_here)
        max_pages = _MAX_FETCH_BYTES // PAGE_BYTES
        for begin in range(0, len(missing), max_pages):
            self._fetch_pages(missing[begin : begin + max_pages])

    def _fetch_pages(self, pages: NDArray[np.intp]) -> None:
        """Fetch pages, with one range for neighbours."""
        runs = np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1)
        starts = [int(run[0]) * PAGE_BYTES for run in runs]
        ends = [min((int(run[-1]) + 1) * PAGE_BYTES, self._nbytes) for run in runs]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        for start, length, content in zip(starts, lengths, self._fetch(starts, lengths), strict=True):
            piece = memoryview(content).cast("B")
            if piece.nbytes != length:
                raise CheckpointError(f"{self.path} returned {piece.nbytes} bytes instead of {length}.")
            self._write(start, piece)
        self._is_here[pages] = True

    def _write(self, start: int, piece: memoryview) -> None:
        try:
            while piece.nbytes:
                written = _write_at(self.descriptor, piece, start)
                start += written
                piece = piece[written:]
        except OSError as error:
            raise CheckpointError(
                error.errno,
                f"The local copy of {self.path} cannot be written: {error.strerror}. Free some disk space, or pass a "
                "spill_dir on a disk that has enough.",
            ) from error


class Demand(NamedTuple):
    """Ranges of a file that are read next."""

    file: DataFile
    starts: Positions
    ends: Positions


def bring(demands: Iterable[Demand]) -> None:
    """Make ranges of files readable. Several remote files are fetched at a time."""
    remote: list[Demand] = []
    for demand in demands:
        if demand.file.is_remote:
            remote.append(demand)
        else:
            demand.file.bring(demand.starts, demand.ends)
    errors: list[BaseException] = []

    def fetch() -> None:
        while remote and not errors:
            with contextlib.suppress(IndexError):  # Another thread took the last one.
                demand = remote.pop()
                try:
                    demand.file.bring(demand.starts, demand.ends)
                except BaseException as error:
                    errors.append(error)

    # Daemon threads and not a pool, because the end of the program would wait for a pool.
    count = min(len(remote), _MAX_THREADS) - 1
    threads = [threading.Thread(target=fetch, name="holdall-fetch", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    fetch()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _read_at(descriptor: int, nbytes: int, start: int) -> bytes:
    if start > _MAX_POSITION - nbytes:
        return b""
    if hasattr(os, "pread"):
        return os.pread(descriptor, nbytes, start)
    with _SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, nbytes)


def _write_at(descriptor: int, data: memoryview, start: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, start)
    with _SEEKING:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.write(descriptor, data)

"""Data files: open files of records, on this machine or in an object store.

`DataFile` reads a local file by position. `RemoteFile` is a sparse local file whose pages are fetched from a blob store
before they are read. `fetch_ranges` fetches ranges of several files with a few parallel requests.

Guarantee: a page of a remote file is read only after all of it was written. Requests in progress take a few megabytes
of memory, whatever the size of the file. Pages that were not fetched take no space on the local disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.checkpoint.blobs import BlobStore
from holdall.checkpoint.directory_blobs import DirectoryBlobs
from holdall.errors import CheckpointError, DamageError

if os.name != "nt":
    import resource

PAGE_BYTES = 2**14
_MAX_FETCH_BYTES = 2**20
_MAX_THREADS = 8
_MAX_POSITION = 2**63 - 1
_SPARE_FILES = 256
"""Number of files that a program may have open besides those of a checkpoint."""

Positions = NDArray[np.int64]

_SEEKING = threading.Lock()  # Windows cannot read by position. No other thread may seek between a seek and its read.


class DataFile:
    """An open file of records. The descriptor is closed when this object is garbage-collected.

    Attributes:
        path: Path or URL, for errors.
        descriptor: Descriptor that compressed blocks are read from.
        is_remote: Whether `fetch` must be called with a range before native code may read it.
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

    def fetch(self, starts: Positions, ends: Positions) -> None:
        """Prepare ranges for reading. A local file asks the operating system to read them ahead."""
        if hasattr(os, "posix_fadvise"):
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                os.posix_fadvise(self.descriptor, start, end - start, os.POSIX_FADV_WILLNEED)


class PageRun(NamedTuple):
    """Pages that are fetched with one request."""

    first: int
    length: int


class RemoteFile(DataFile):
    """A blob in an object store, with a sparse copy on this machine.

    Args:
        descriptor: Descriptor of an empty local file that nobody else writes to.
    """

    def __init__(self, blobs: BlobStore, name: str, nbytes: int, descriptor: int) -> None:
        super().__init__(Path(f"{blobs.url}/{name}"), descriptor)
        os.ftruncate(descriptor, nbytes)
        self.is_remote = True
        self._blobs = blobs
        self._name = name
        self._nbytes = nbytes
        self._has_page = np.zeros(-(-nbytes // PAGE_BYTES), np.bool_)  # Whether the local copy has each page.

    def read(self, start: int, nbytes: int) -> bytes:
        """Fetch a range and return it. The result is shorter at the end of the file."""
        end = min(start, _MAX_POSITION - nbytes) + nbytes  # A damaged record may name a position beyond int64.
        self.fetch(np.array([start], np.int64), np.array([end], np.int64))
        return super().read(start, nbytes)

    def fetch(self, starts: Positions, ends: Positions) -> None:
        """Fetch the pages of ranges that the local copy lacks. Two threads may fetch the same page."""
        fetch_ranges([Demand(self, starts, ends)])

    def list_missing(self, starts: Positions, ends: Positions) -> list[PageRun]:
        """Return the pages of ranges that the local copy lacks. Neighbouring pages are in one run, up to a maximum."""
        first = np.clip(starts, 0, self._nbytes) // PAGE_BYTES
        last = -(-np.clip(ends, 0, self._nbytes) // PAGE_BYTES)
        # Add 1 where a range starts and -1 where it ends. Pages are needed where the sum is positive.
        edges = np.zeros(len(self._has_page) + 1, np.int64)
        np.add.at(edges, first, 1)
        np.add.at(edges, np.maximum(first, last), -1)
        missing = np.flatnonzero((np.cumsum(edges[:-1]) > 0) & ~self._has_page)
        max_pages = _MAX_FETCH_BYTES // PAGE_BYTES
        runs = []
        for neighbours in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            for begin in range(0, len(neighbours), max_pages):
                pages = neighbours[begin : begin + max_pages]
                runs.append(PageRun(int(pages[0]), len(pages)))
        return runs

    def fetch_pages(self, run: PageRun) -> None:
        """Fetch pages with one request."""
        start = run.first * PAGE_BYTES
        end = min((run.first + run.length) * PAGE_BYTES, self._nbytes)
        self._write(start, memoryview(self._blobs.read(self._name, start, end - start)))
        self._has_page[run.first : run.first + run.length] = True

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
                "spill_dir (for a Dataset, a cache_dir) on a disk that has enough.",
            ) from error


class SharedFile(RemoteFile):
    """A remote file whose sparse copy has a name, so that several processes fetch each page once.

    A file next to the copy records which pages were fetched. Every process maps that file.
    """

    def __init__(self, blobs: BlobStore, name: str, nbytes: int, copy: Path) -> None:
        descriptor = os.open(copy, os.O_RDWR | os.O_CREAT, 0o644)
        super().__init__(blobs, name, nbytes, descriptor)
        pages = len(self._has_page)
        with copy.with_suffix(".pages").open("a+b") as file:
            if file.seek(0, os.SEEK_END) < pages:
                file.truncate(pages)
            if pages:
                self._has_page = np.frombuffer(mmap.mmap(file.fileno(), pages), np.bool_)


def open_data_file(
    blobs: BlobStore,
    name: str,
    nbytes: int,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    is_shared: bool = False,
) -> DataFile:
    """Open a blob of `nbytes` bytes. A blob in an object store gets a sparse local copy in `cache_dir`.

    `is_shared` says that other processes use the copies in `cache_dir`, too.
    """
    if isinstance(blobs, DirectoryBlobs):
        descriptor = blobs.open(name)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return DataFile(blobs.root / name, descriptor)
    try:
        if cache_dir is not None:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
            if is_shared:
                return SharedFile(blobs, name, nbytes, Path(cache_dir) / Path(name).name)
        with tempfile.TemporaryFile(prefix="holdall-", dir=cache_dir) as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise CheckpointError(
            error.errno,
            f"No temporary file can be made for the data of {blobs.url} ({error.strerror}). Pass a spill_dir "
            "(for a Dataset, a cache_dir) that can be written.",
        ) from error
    return RemoteFile(blobs, name, nbytes, descriptor)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files of this process, if the system allows it, so that `count` more can be opened."""
    if os.name == "nt":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


class Demand(NamedTuple):
    """Ranges of a file that are read next."""

    file: DataFile
    starts: Positions
    ends: Positions


def fetch_ranges(demands: Iterable[Demand]) -> None:
    """Prepare ranges of files for reading. Up to `_MAX_THREADS` requests of remote files are sent at a time."""
    tasks = []
    for demand in demands:
        if isinstance(demand.file, RemoteFile):
            runs = demand.file.list_missing(demand.starts, demand.ends)
            tasks += [partial(demand.file.fetch_pages, run) for run in runs]
        else:
            demand.file.fetch(demand.starts, demand.ends)
    errors: list[BaseException] = []

    def work() -> None:
        while tasks and not errors:
            try:
                task = tasks.pop()
            except IndexError:  # Another thread took the last task.
                return
            try:
                task()
            except BaseException as error:
                errors.append(error)

    # Daemon threads instead of a pool, because Python would wait for the threads of a pool when the program ends.
    count = min(len(tasks), _MAX_THREADS) - 1
    threads = [threading.Thread(target=work, name="holdall-fetch", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    work()
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

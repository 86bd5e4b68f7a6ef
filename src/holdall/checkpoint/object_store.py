"""Checkpoints in object stores: s3://, gs:// and az:// through obstore, with the same commit protocol as on a disk.

A file of records is written to a local file first and then uploaded. A manifest is created on the condition that its
number is free.

Guarantee: a checkpoint is acknowledged only if the manifest in the store is this writer's own. If an answer was lost,
the manifest is read back. A server that does not answer costs time, and no data.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from holdall.checkpoint.data_file import DataFile, RemoteFile
from holdall.checkpoint.manifest import (
    DATA_NAME,
    LEASE_S,
    LOAD_S,
    MOST_FORMAT_BYTES,
    MOST_MANIFEST_BYTES,
    CheckpointReader,
    Manifest,
    Waiting,
    data_names,
    encode,
    format_text,
    manifest_name,
    new_writer_id,
)
from holdall.checkpoint.objects import PART_BYTES, Objects, sent, short
from holdall.checkpoint.retention import CheckpointWriter
from holdall.errors import CheckpointError, FencedError
from holdall.store.records import Buffer

_LOG = logging.getLogger("holdall")


class ObjectStoreReader(CheckpointReader):
    """Reader of the checkpoints below a prefix of an object store."""

    kind, check = "object", "check the url"

    def __init__(self, objects: Objects, cache_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(objects.url)
        self.waiting = objects.waiting
        self._objects = objects
        self._cache_dir = cache_dir
        self._sizes: dict[str, int] = {}

    def names(self, folder: str) -> Iterable[str]:
        """Return the names in a folder."""
        return self._objects.sizes(folder)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return the content of an object, or None if it does not exist. Raise DamageError if it is larger."""
        return self._objects.get(name, most_bytes)

    def file_sizes(self) -> dict[str, int]:
        """Return the sizes of all files of records, by name."""
        sizes = self._objects.sizes("segments")
        self._sizes = {name: nbytes for name, nbytes in sizes.items() if DATA_NAME.fullmatch(name)}
        return self._sizes

    def open(self, name: str) -> tuple[DataFile, int]:
        """Open a file of records. Its pages are fetched as they are read, into a temporary local file."""
        nbytes = self._sizes.get(name) or self.file_sizes().get(name)
        if nbytes is None:
            raise CheckpointError(f"{self.url}/segments/{name} is not there")
        key = f"segments/{name}"
        try:
            if self._cache_dir is not None:
                Path(self._cache_dir).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(prefix="holdall-", dir=self._cache_dir) as file:
                descriptor = os.dup(file.fileno())
        except OSError as error:
            raise CheckpointError(
                error.errno, f"no file can be made for what is read of {self.url} ({error.strerror}); check spill_dir"
            ) from error
        return RemoteFile(Path(f"{self.url}/{key}"), descriptor, nbytes, partial(self._objects.ranges, key)), nbytes

    def reopened(self) -> ObjectStoreReader:
        """Return a reader of the same place that waits independently of this one."""
        return ObjectStoreReader(Objects(self.url, Waiting(self.url, LOAD_S)), self._cache_dir)

    def below(self, folder: str) -> ObjectStoreReader:
        """Return the reader of one shard's checkpoints."""
        return ObjectStoreReader(self._objects.elsewhere(f"{self.url}/{folder}"), self._cache_dir)

    def top(self) -> ObjectStoreReader:
        """Return the reader of the checkpoints two folders above."""
        return ObjectStoreReader(self._objects.elsewhere(self.url.rsplit("/", 2)[0]), self._cache_dir)


class ObjectStoreFile:
    """A file of records that is written to a local file, and uploaded when it is finished."""

    def __init__(self, objects: Objects, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self._objects = objects
        self._file: Any = tempfile.TemporaryFile(prefix="holdall-", buffering=0)  # noqa: SIM115  until it is finished

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        left = memoryview(data).cast("B")
        self.nbytes += left.nbytes
        while left.nbytes:
            left = left[self._file.write(left) :]

    def finish(self) -> None:
        """Upload the file."""
        put_file(self._objects, f"segments/{self.name}", self._file.fileno(), self.nbytes)
        self.abandon()

    def abandon(self) -> None:
        """Delete the local file."""
        self._file.close()


def put_file(objects: Objects, key: str, descriptor: int, nbytes: int) -> None:
    """Upload a file in parts, so that it takes little memory whatever its size."""
    if nbytes <= PART_BYTES:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            objects.put(key, file.read())
    else:
        objects.put_in_parts(key, descriptor)


_TRUSTED_SHARE = 0.75
"""Share of the lease after which a writer does not trust its own mark, and commits nothing."""


class WriterMark:
    """Objects that show that a writer is active, and are renewed. Others then do not remove its files.

    Others measure the age of a mark by the clock of the store. The writer trusts its mark for a shorter time than they
    do.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._writer_ids: set[str] = set()
        self._renewed: tuple[float, float] | None = None
        self._renewal: Any = None
        self._is_needed = False  # Whether something was uploaded that no manifest names yet.

    def set(self, *writer_ids: str) -> None:
        """Put the marks of `writer_ids` if they are missing, and renew them from now on. Called before any upload."""
        if not self._is_needed and self._age > _TRUSTED_SHARE * LEASE_S:
            self._renewed, self._writer_ids = None, set()
        self._is_needed = True
        for writer_id in set(writer_ids) - self._writer_ids:
            self._renewed = self._renewed or _clocks()
            self._objects.put(_mark_of(writer_id), b"")
            self._writer_ids.add(writer_id)
        if self._renewal is None:
            self._renewal = sent(partial(_renewed_for_good, weakref.ref(self)))

    def require(self) -> None:
        """Raise CheckpointError if others may have removed uploaded files, because the mark is too old."""
        if self._is_needed and self._age > _TRUSTED_SHARE * LEASE_S:
            self._is_needed = False
            raise CheckpointError(
                f"{self._objects.url} could not be reached for {self._age:.0f} s, so what was put there may have been "
                "removed by others; save again. Earlier checkpoints are intact"
            )

    def release(self) -> None:
        """Record that a manifest names everything that was uploaded."""
        self._is_needed = False

    def remove(self) -> None:
        """Remove the marks, as far as the store answers at once."""
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.cancel()
        for writer_id in self._writer_ids:
            self._objects.try_delete(_mark_of(writer_id))
        self._writer_ids = set()

    @property
    def _age(self) -> float:
        """Seconds since the marks were put, by the faster of two clocks. One of them stops while a machine sleeps."""
        then = self._renewed or _clocks()
        return max(now - before for now, before in zip(_clocks(), then, strict=True))

    async def renew(self) -> None:
        """Put the marks again. Marks that are too old to be trusted stay so until `set`."""
        now = _clocks()
        for writer_id in list(self._writer_ids):
            await self._objects.put_once(_mark_of(writer_id), b"")
        if self._age <= _TRUSTED_SHARE * LEASE_S:
            self._renewed = now


def _mark_of(writer_id: str) -> str:
    return f"writers/{writer_id}"


def _clocks() -> tuple[float, float]:
    return time.time(), time.monotonic()


async def _renewed_for_good(mark: weakref.ref[WriterMark]) -> None:
    """Renew a mark until its writer is released."""
    while True:
        await asyncio.sleep(LEASE_S / 12)
        held = mark()
        if held is None:
            return
        try:
            await held.renew()
        except Exception as error:
            _LOG.info("the mark of a writer could not be renewed (%s); trying again", short(error))
        del held


class ObjectStoreWriter(CheckpointWriter):
    """The only writer of the checkpoints below a prefix, as far as the store honours conditions."""

    def __init__(self, url: str, objects: Objects | None = None) -> None:
        self._objects = objects or Objects(url)
        self.url = self._objects.url
        self.writer_id = new_writer_id()
        self.reader = ObjectStoreReader(self._objects)
        self._mark = WriterMark(self._objects)
        self._names = data_names(self.writer_id)
        self._seen: set[str] | None = None  # Files that existed before the last manifest was created.
        self._require_format()
        self.is_fenced = self._objects.honours_conditions()
        if not self.is_fenced:
            _LOG.warning(
                "%s ignores conditions: two writers would not notice each other there. See that only one saves to it",
                self.url,
            )

    def new_file(self) -> ObjectStoreFile:
        """Start a file of records."""
        self._mark.set(self.writer_id)
        return ObjectStoreFile(self._objects, next(self._names))

    def mark(self, names: Iterable[str]) -> None:
        """Keep other processes from removing files of these names."""
        self._mark.set(*(name.partition("-")[0] for name in names))

    def upload(self, name: str, path: Path) -> None:
        """Upload a finished file of a directory, whose name was marked before."""
        with path.open("rb") as file:
            put_file(self._objects, f"segments/{name}", file.fileno(), path.stat().st_size)

    def commit(self, manifest: Manifest) -> None:
        """Create the manifest if all its files exist. Read it back if the store does not confirm its creation."""
        sizes = self.reader.file_sizes()
        gone = sorted(name for name, nbytes in manifest.files.items() if sizes.get(name) != nbytes)
        if gone and manifest.number in self.reader.numbers():
            raise FencedError(f"{self.url} has a checkpoint {manifest.number} of another writer; save to another place")
        if gone:
            raise CheckpointError(
                f"{self.url}/segments/{gone[0]} was removed while it was needed ({len(gone)} files in all); save again:"
                " what is gone is written then"
            )
        self._seen = set(sizes)
        self._require_format()  # Others may have removed everything.
        self._mark.require()
        key = f"manifests/{manifest_name(manifest.number)}"
        content = encode(manifest)
        if not self.is_fenced:
            self._objects.put(key, content)
        while self.is_fenced and not self._objects.create(key, content):
            standing = self._objects.get(key, MOST_MANIFEST_BYTES)
            if standing == content:
                break  # The answer to an earlier attempt was lost.
            if standing is not None:
                raise FencedError(f"{self.url}/{key} is another writer's; save to a place of its own")
        self._mark.require()
        self.reader.committed.append((content, manifest))
        self._mark.release()  # A collector that listed manifests before this one saw a valid mark.

    def unclaimed(self) -> tuple[dict[str, int], set[str]]:
        """Return the sizes of all files of records, and the names of those that no save in progress can name.

        Files of other writers cannot be named if they existed before this writer's last manifest, because their writers
        need a number that is taken. A writer without a manifest returns only files that are older than a lease, of
        writers whose mark is older than a lease.
        """
        found = self._objects.listed("segments")
        sizes = {name: entry.nbytes for name, entry in found.items()}
        names = {name for name in found if DATA_NAME.fullmatch(name)}
        own = {name for name in names if self._seen is not None and name.startswith(self.writer_id)}
        if self._seen is not None and self.is_fenced:
            return sizes, own | names & self._seen
        marks, limit = self._objects.listed("writers"), self._objects.time() - timedelta(seconds=LEASE_S)
        at_work = {name for name, mark in marks.items() if mark.modified >= limit}
        self._objects.delete([f"writers/{name}" for name in marks.keys() - at_work])
        old = {name for name in names if found[name].modified < limit and name.partition("-")[0] not in at_work}
        return sizes, own | old

    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove objects."""
        self._objects.delete([f"{folder}/{name}" for name in names])

    def _require_format(self) -> None:
        raw = self.reader.read("FORMAT", MOST_FORMAT_BYTES)
        if raw is None:
            self._objects.create("FORMAT", format_text())
        elif not self.reader.require(raw):
            self._objects.put("FORMAT", format_text())

    def close(self) -> None:
        """Remove the mark, so that others may remove files that no manifest names."""
        self._mark.remove()

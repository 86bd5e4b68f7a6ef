"""Places in object stores: s3://, gs:// and az:// through obstore, with the same commit as on a disk.

In:  files of records, first spooled to a local file, then put in parts.  Out: objects; a manifest is created only if
nothing has its number.
Invariant: a checkpoint is acknowledged only if the manifest that stands in the store is this writer's own. Whether a
put succeeded whose answer was lost is found out by reading it back. A server that is away costs time alone.
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

from holdall.checkpoint.files import CheckpointWriter
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
from holdall.errors import CheckpointError, FencedError
from holdall.storage import AwaitedFile, Buffer, SegmentFile

_LOG = logging.getLogger("holdall")


class ObjectStoreReader(CheckpointReader):
    """Checkpoints in an object store, to be read."""

    kind, check = "object", "check the url"

    def __init__(self, objects: Objects, cache_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(objects.url)
        self.waiting = objects.waiting
        self._objects = objects
        self._cache_dir = cache_dir
        self._sizes: dict[str, int] = {}

    def names(self, folder: str) -> Iterable[str]:
        """List a folder."""
        return self._objects.sizes(folder)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Read an object whole; None if it is not there, DamageError if it has more bytes than that."""
        return self._objects.get(name, most_bytes)

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""
        sizes = self._objects.sizes("segments")
        self._sizes = {name: nbytes for name, nbytes in sizes.items() if DATA_NAME.fullmatch(name)}
        return self._sizes

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records, of which pages are fetched as they are read; they go with its descriptor."""
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
        return AwaitedFile(Path(f"{self.url}/{key}"), descriptor, nbytes, partial(self._objects.ranges, key)), nbytes

    def reopened(self) -> ObjectStoreReader:
        """Return the same checkpoints, with a waiting of their own."""
        return ObjectStoreReader(Objects(self.url, Waiting(self.url, LOAD_S)), self._cache_dir)

    def below(self, folder: str) -> ObjectStoreReader:
        """Return the checkpoints of one shard."""
        return ObjectStoreReader(self._objects.elsewhere(f"{self.url}/{folder}"), self._cache_dir)

    def top(self) -> ObjectStoreReader:
        """Return the checkpoints two folders above."""
        return ObjectStoreReader(self._objects.elsewhere(self.url.rsplit("/", 2)[0]), self._cache_dir)


class ObjectStoreFile:
    """A file of records that is spooled to a disk, and put when it is finished."""

    def __init__(self, objects: Objects, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self._objects = objects
        self._file: Any = tempfile.TemporaryFile(prefix="holdall-", buffering=0)  # noqa: SIM115  until it is finished

    def write(self, data: Buffer) -> None:
        """Add bytes at its end."""
        left = memoryview(data).cast("B")
        self.nbytes += left.nbytes
        while left.nbytes:
            left = left[self._file.write(left) :]

    def settle(self) -> None:
        """Nothing: it is put when it is finished."""

    def finish(self) -> None:
        """Put it into the store."""
        put_file(self._objects, f"segments/{self.name}", self._file.fileno(), self.nbytes)
        self.abandon()

    def abandon(self) -> None:
        """Throw the spooled bytes away."""
        self._file.close()


def put_file(objects: Objects, key: str, descriptor: int, nbytes: int) -> None:
    """Put a file, a few pieces of it at a time, so that it takes little memory whatever its size."""
    if nbytes <= PART_BYTES:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            objects.put(key, file.read())
    else:
        objects.put_in_parts(key, descriptor)


_TRUSTED_SHARE = 0.75
"""Of the lease: a writer whose mark is older commits nothing."""


class WriterMark:
    """Objects that say that a writer is at work, put again and again: nobody else removes files under these names.

    Others tell the age of a mark by the store's own clock; the writer trusts its mark less long than they do.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._writer_ids: set[str] = set()
        self._renewed: tuple[float, float] | None = None
        self._renewal: Any = None
        self._is_needed = False  # something was put that no manifest names yet

    def set(self, *writer_ids: str) -> None:
        """Put marks, unless they stand, and have them renewed from now on; before anything is put."""
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
        """Refuse to commit what others may have removed."""
        if self._is_needed and self._age > _TRUSTED_SHARE * LEASE_S:
            self._is_needed = False
            raise CheckpointError(
                f"{self._objects.url} could not be reached for {self._age:.0f} s, so what was put there may have been "
                "removed by others; save again. Earlier checkpoints are intact"
            )

    def release(self) -> None:
        """All that was put is named by a manifest."""
        self._is_needed = False

    def remove(self) -> None:
        """Take the marks away, as far as the store does so at once."""
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.cancel()
        for writer_id in self._writer_ids:
            self._objects.try_delete(_mark_of(writer_id))
        self._writer_ids = set()

    @property
    def _age(self) -> float:
        """Seconds since the marks were put; the longer of two clocks, since one stops while a machine sleeps."""
        then = self._renewed or _clocks()
        return max(now - before for now, before in zip(_clocks(), then, strict=True))

    async def renew(self) -> None:
        """Put the marks again; those that were not trusted any more stay so, until they are set again."""
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
    """Renew a mark until its writer is gone."""
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
    """A prefix of an object store that this writer holds, as far as the store lets it."""

    behind_bytes = 16 * 2**20

    def __init__(self, url: str, objects: Objects | None = None) -> None:
        self._objects = objects or Objects(url)
        self.url = self._objects.url
        self.writer_id = new_writer_id()
        self.reader = ObjectStoreReader(self._objects)
        self._mark = WriterMark(self._objects)
        self._names = data_names(self.writer_id)
        self._seen: set[str] | None = None  # the files that were there when the last manifest was about to be
        self._require_format()
        self.is_fenced = self._objects.honours_conditions()
        if not self.is_fenced:
            _LOG.warning(
                "%s ignores conditions: two writers would not notice each other there. See that only one saves to it",
                self.url,
            )

    def new_file(self) -> ObjectStoreFile:
        """Begin a file of records."""
        self._mark.set(self.writer_id)
        return ObjectStoreFile(self._objects, next(self._names))

    def mark(self, names: Iterable[str]) -> None:
        """Keep others from removing files, whether they are there or not."""
        self._mark.set(*(name.partition("-")[0] for name in names))

    def upload(self, name: str, path: Path) -> None:
        """Put a finished file of a directory, which was marked before."""
        with path.open("rb") as file:
            put_file(self._objects, f"segments/{name}", file.fileno(), path.stat().st_size)

    def commit(self, manifest: Manifest) -> None:
        """Create the manifest if all is there that it names; see whose it is if no answer says that it was created."""
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
        self._require_format()  # others may have removed all there was
        self._mark.require()
        key = f"manifests/{manifest_name(manifest.number)}"
        content = encode(manifest)
        if not self.is_fenced:
            self._objects.put(key, content)
        while self.is_fenced and not self._objects.create(key, content):
            standing = self._objects.get(key, MOST_MANIFEST_BYTES)
            if standing == content:
                break  # our own: the answer to an earlier try was lost
            if standing is not None:
                raise FencedError(f"{self.url}/{key} is another writer's; save to a place of its own")
        self._mark.require()
        self.reader.committed.append((content, manifest))
        self._mark.release()  # a collector that looked before the manifest was there saw that the mark holds

    def unclaimed(self) -> tuple[dict[str, int], set[str]]:
        """Return the files of records, and those of them that no save under way can be about to name.

        Of other writers' files these are the ones that were there before this writer's last manifest: their writers
        want a number that is taken, and will be refused. Without a manifest of its own, only those are that are older
        than a lease, of writers whose mark is, too.
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
        """Let others remove what this writer put and did not name."""
        self._mark.remove()

"""Places in object stores: s3://, gs:// and az:// through obstore, with the same commit as on a disk.

In:  files of records, first spooled to a local file, then put in parts.  Out: objects; a manifest is created only if
nothing has its number.
Invariant: a checkpoint is acknowledged only if the manifest that stands in the store is this writer's own. Whether a
put succeeded whose answer was lost is found out by reading it back. A server that is away costs time alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdall.checkpoint.manifest import (
    DATA_NAME,
    MOST_FORMAT_BYTES,
    MOST_MANIFEST_BYTES,
    SHARD_FOLDER,
    Buffer,
    Manifest,
    data_name,
    decode,
    encode,
    format_text,
    kept_and_stale,
    manifest_name,
    new_writer_id,
    numbers_of,
    require_format,
)
from holdall.errors import (
    CheckpointError,
    DamageError,
    FencedError,
    MissingPackageError,
)
from holdall.storage import AwaitedFile, SegmentFile

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 10.0
_PART_BYTES, _PARTS_AT_ONCE = 8 * 2**20, 2
_FINAL = re.compile(r"status code: (4(?!08|09|25|29)\d\d|501)")
"""Answers that stay the same however often one asks; the rest is waited out."""
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""Of a single request; beyond that, the loop here tries for as long as it takes."""

_LOG = logging.getLogger("holdall")
_T = TypeVar("_T")


class Objects:
    """The objects below a url; every call goes on until the store answers, or somebody stops it."""

    def __init__(self, url: str) -> None:
        try:
            import obstore  # noqa: PLC0415  an extra
            import obstore.exceptions  # noqa: PLC0415
            import obstore.store  # noqa: PLC0415
        except ImportError as error:
            raise MissingPackageError(f"{url} needs obstore; run \"pip install 'holdall[cloud]'\"") from error
        self.url = url.rstrip("/")
        self.stopped = threading.Event()
        self._obstore: Any = obstore
        self._errors: Any = obstore.exceptions
        try:
            self._store: Any = obstore.store.from_url(self.url, retry_config=_RETRIES)
        except Exception as error:
            raise CheckpointError(f"{url} cannot be opened ({error}); check the url and the credentials") from error

    def elsewhere(self, url: str) -> Objects:
        """Return the objects below another url; to stop these is to stop those."""
        other = Objects(url)
        other.stopped = self.stopped
        return other

    def create(self, key: str, content: Buffer) -> bool:
        """Put an object where none is; return whether it was done, as far as the answer says."""
        try:
            self._patiently(lambda: self._obstore.put(self._store, key, content, mode="create", use_multipart=False))
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            return False
        return True

    def put(self, key: str, content: Buffer) -> None:
        """Put an object, over one of the same name if there is one."""
        self._patiently(lambda: self._obstore.put(self._store, key, content, use_multipart=False))

    def put_in_parts(self, key: str, descriptor: int) -> None:
        """Put a large object in parts; it appears when the last of them was taken."""

        def put() -> None:
            with os.fdopen(os.dup(descriptor), "rb") as file:
                file.seek(0)
                self._obstore.put(
                    self._store, key, file, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )

        try:
            self._patiently(put)
        except (self._errors.NotFoundError, FileNotFoundError):
            # Its last answer was lost, and the store has forgotten the upload; a name is only ever given one content.
            self._patiently(put)

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Return an object; None if it is not there."""
        try:
            answer = self._patiently(lambda: self._obstore.get(self._store, key))
        except (self._errors.NotFoundError, FileNotFoundError):
            return None
        if answer.meta["size"] > most_bytes:
            raise DamageError(f"{self.url}/{key} has more than {most_bytes} bytes, which none of holdall's has")
        return bytes(self._patiently(answer.bytes))

    def ranges(self, key: str, starts: list[int], lengths: list[int]) -> Sequence[Buffer]:
        """Read ranges of an object, several at a time."""
        try:
            found: Sequence[Buffer] = self._patiently(
                lambda: self._obstore.get_ranges(self._store, key, starts=starts, lengths=lengths, coalesce=0)
            )
        except (self._errors.NotFoundError, FileNotFoundError) as error:
            raise CheckpointError(
                f"{self.url}/{key} is gone: another writer removed it since the memory was loaded; load it again"
            ) from error
        return found

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of the objects in a folder, by name."""
        listed = self._patiently(lambda: self._obstore.list(self._store, folder).collect())
        return {entry["path"].rpartition("/")[2]: int(entry["size"]) for entry in listed}

    def folders(self) -> list[str]:
        """Return the names of the folders right below the url."""
        listed = self._patiently(lambda: self._obstore.list_with_delimiter(self._store))
        return [name.rstrip("/").rpartition("/")[2] for name in listed["common_prefixes"]]

    def delete(self, keys: list[str]) -> None:
        """Remove objects; some may be gone already."""
        for key in keys:
            with contextlib.suppress(self._errors.NotFoundError, FileNotFoundError):
                self._patiently(partial(self._obstore.delete, self._store, key))

    def honours_conditions(self) -> bool:
        """Whether creating an object twice fails the second time."""
        key = f"probe/{new_writer_id()}"
        try:
            self.create(key, b"first")
            return not self.create(key, b"second")
        finally:
            self.delete([key])

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """Do something until it is answered; a server that restarts is waited for."""
        wait, is_logged = _FIRST_WAIT_S, False
        while True:
            try:
                return call()
            except (
                self._errors.AlreadyExistsError,
                self._errors.PreconditionError,
                self._errors.NotFoundError,
                FileNotFoundError,
            ):
                raise
            except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
                raise CheckpointError(f"{self.url} refuses access ({_short(error)}); check the credentials") from error
            except Exception as error:
                if _FINAL.search(str(error)):
                    raise CheckpointError(f"{self.url} refuses a request ({_short(error)}); check the store") from error
                if not is_logged:
                    _LOG.warning("%s does not answer (%s); trying until it does", self.url, _short(error))
                is_logged = True
            if self.stopped.wait(wait):
                raise CheckpointError(f"{self.url} did not answer before the save was cancelled, or the memory closed")
            wait = min(2 * wait, _LONGEST_WAIT_S)


class ObjectStoreReader:
    """Checkpoints in an object store, to be read."""

    def __init__(self, objects: Objects, cache_dir: str | os.PathLike[str] | None = None) -> None:
        self.url = objects.url
        self._objects = objects
        self._cache_dir = cache_dir
        self._sizes: dict[str, int] = {}

    def require(self) -> bool:
        """Refuse a prefix that holds no checkpoints; return whether FORMAT says that it does."""
        return require_format(self, self._format)

    def _format(self) -> bytes:
        raw = self._objects.get("FORMAT", MOST_FORMAT_BYTES)
        if raw is None:
            raise CheckpointError(f"{self.url} holds no checkpoints: there is no FORMAT object in it; check the url")
        return raw

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""
        return numbers_of(self._objects.sizes("manifests"))

    def manifest(self, number: int) -> Manifest:
        """Read a manifest."""
        key = f"manifests/{manifest_name(number)}"
        raw = self._objects.get(key, MOST_MANIFEST_BYTES)
        if raw is None:
            raise CheckpointError(f"{self.url} has no checkpoint {number}")
        return decode(raw, f"{self.url}/{key}", number)

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
        """Return the same checkpoints; `interrupt` does not end reading them."""
        return ObjectStoreReader(Objects(self.url), self._cache_dir)

    def below(self, folder: str) -> ObjectStoreReader:
        """Return the checkpoints of one shard."""
        return ObjectStoreReader(self._objects.elsewhere(f"{self.url}/{folder}"), self._cache_dir)

    def above(self) -> ObjectStoreReader | None:
        """Return the checkpoints whose manifests may name those here."""
        if not SHARD_FOLDER.fullmatch("/".join(self.url.split("/")[-2:])):
            return None
        top = self._objects.elsewhere(self.url.rsplit("/", 2)[0])
        above = ObjectStoreReader(top, self._cache_dir)
        return above if top.get("FORMAT", MOST_FORMAT_BYTES) is not None or above.numbers() else None

    def interrupt(self) -> None:
        """Give up waiting for the store."""
        self._objects.stopped.set()


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
    if nbytes <= _PART_BYTES:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            objects.put(key, file.read())
    else:
        objects.put_in_parts(key, descriptor)


class ObjectStoreWriter:
    """A prefix of an object store that this writer holds, as far as the store lets it."""

    behind_bytes = 16 * 2**20

    def __init__(self, url: str, objects: Objects | None = None) -> None:
        self._objects = objects or Objects(url)
        self.url = self._objects.url
        self.writer_id = new_writer_id()
        self.reader = ObjectStoreReader(self._objects)
        self._sequence = 0
        self._seen: set[str] | None = None  # the files that were there when the last manifest was about to be
        if not self._objects.create("FORMAT", format_text()) and not self.reader.require():
            self._objects.put("FORMAT", format_text())
        self.is_fenced = self._objects.honours_conditions()
        if not self.is_fenced:
            _LOG.warning(
                "%s ignores conditions: two writers would not notice each other there. See that only one saves to it",
                self.url,
            )

    def new_file(self) -> ObjectStoreFile:
        """Begin a file of records."""
        self._sequence += 1
        return ObjectStoreFile(self._objects, data_name(self.writer_id, self._sequence))

    def is_there(self) -> bool:
        """Say yes: a prefix is there as soon as something is put below it."""
        return True

    def stamp(self) -> object:
        """Return nothing: to look into the store takes long."""
        return None

    def adopt(self, file: SegmentFile) -> None:
        """Nothing of a disk can be taken over by a store."""
        return

    def upload(self, name: str, path: Path) -> None:
        """Put a finished file of a directory."""
        with path.open("rb") as file:
            put_file(self._objects, f"segments/{name}", file.fileno(), path.stat().st_size)

    def commit(self, manifest: Manifest) -> None:
        """Create the manifest; if the answer says that it is there, or none comes, look whose it is."""
        key = f"manifests/{manifest_name(manifest.number)}"
        content = encode(manifest)
        self._seen = set(self.reader.file_sizes())
        if not self.is_fenced:
            self._objects.put(key, content)
            return
        while not self._objects.create(key, content):
            standing = self._objects.get(key, MOST_MANIFEST_BYTES)
            if standing == content:
                return  # our own: the answer to an earlier try was lost
            if standing is not None:
                raise FencedError(f"{self.url}/{key} is another writer's; save to a place of its own")

    def collect(self, keep: int | None, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` checkpoints, and the files that none of them nor `in_use` names.

        Another writer's files stay if they came after this one's last manifest: it may be about to name them. One
        whose files were there before it wants a number that is taken, and will be refused.
        """
        kept, stale = kept_and_stale(self.reader, keep)
        named = set(in_use).union(*(manifest.files for manifest in kept))
        self._objects.delete([f"manifests/{manifest_name(number)}" for number in stale])
        sizes = self.reader.file_sizes()
        old = (
            sizes if self._seen is None else {*self._seen, *(name for name in sizes if name.startswith(self.writer_id))}
        )
        unnamed = {name: nbytes for name, nbytes in sizes.items() if name in old and name not in named}
        self._objects.delete([f"segments/{name}" for name in unnamed])
        return sum(unnamed.values())

    def close(self) -> None:
        """Nothing is held."""

    def interrupt(self) -> None:
        """Give up waiting for the store."""
        self._objects.stopped.set()


def _short(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]

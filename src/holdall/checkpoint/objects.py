"""Requests to an object store (s3://, gs://, az://) through obstore, and numbered files for journals.

A request is sent in the background and repeated until the store answers, or until the caller's `Waiting` is given up.
`Slots` are numbered files, in a directory or in an object store, that are each created once.

Guarantee: a server that does not answer costs time, and no data. Every wait can be ended at any moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent import futures
from datetime import datetime, timedelta
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdall.checkpoint.directory import FileSystem, create_whole
from holdall.checkpoint.manifest import Waiting, new_writer_id
from holdall.checkpoint.urls import is_remote
from holdall.errors import CheckpointError, DamageError, HoldallError, MissingPackageError
from holdall.store.records import Buffer

if TYPE_CHECKING:
    import asyncio

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 10.0
_LOOK_S = 0.1
"""Seconds between checks whether a request was given up."""
_AT_ONCE_S = 2.0
PART_BYTES = 8 * 2**20
_PARTS_AT_ONCE = 2
_FINAL = re.compile(r"status code: (4(?!08|09|25|29)\d\d|501)")
"""Answers that another attempt would not change. All others are tried again."""
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""Retries of obstore within one attempt."""

_LOG = logging.getLogger("holdall")

Request = Callable[[], Awaitable[Any]]


class StoredObject(NamedTuple):
    """An object in a listing."""

    nbytes: int
    modified: datetime  # By the clock of the store.


class Objects:
    """The objects below a URL. Every call waits until the store answers, or until `waiting` is given up."""

    def __init__(self, url: str, waiting: Waiting | None = None) -> None:
        try:
            import obstore  # noqa: PLC0415  an extra
            import obstore.exceptions  # noqa: PLC0415
            import obstore.store  # noqa: PLC0415
        except ImportError as error:
            raise MissingPackageError(f"{url} needs obstore; run \"pip install 'holdall[cloud]'\"") from error
        self.url = url.rstrip("/")
        self.waiting = waiting or Waiting(self.url)
        self._obstore: Any = obstore
        self._errors: Any = obstore.exceptions
        try:
            self._store: Any = obstore.store.from_url(self.url, retry_config=_RETRIES)
        except Exception as error:
            raise CheckpointError(
                f"{url} cannot be opened ({short(error)}); check the url and the credentials"
            ) from error

    def elsewhere(self, url: str) -> Objects:
        """Return the objects below another URL, with the same `waiting`."""
        return Objects(url, self.waiting)

    def create(self, key: str, content: Buffer) -> bool:
        """Create an object. Return False if the answer says that it exists, perhaps from an earlier attempt."""
        put = partial(self._obstore.put_async, self._store, key, content, mode="create", use_multipart=False)
        try:
            self._put(put)
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            return False
        return True

    def put(self, key: str, content: Buffer) -> None:
        """Write an object, or replace it."""
        self._put(partial(self._obstore.put_async, self._store, key, content, use_multipart=False))

    def put_in_parts(self, key: str, descriptor: int) -> None:
        """Write a large object in parts. It appears when the last part has arrived."""

        async def put() -> None:
            with os.fdopen(os.dup(descriptor), "rb") as file:
                file.seek(0)
                parts = _SentParts(file, self.waiting)
                await self._obstore.put_async(
                    self._store, key, parts, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )

        try:
            self._patiently(put)
        except self._missing:
            # The last answer was lost, and the store has forgotten the upload. A name never gets another content.
            self._put(put)

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Return the content of an object, or None if it does not exist."""

        async def read() -> bytes:
            answer = await self._obstore.get_async(self._store, key)
            if answer.meta["size"] > most_bytes:
                raise DamageError(f"{self.url}/{key} has more than {most_bytes} bytes, which none of holdall's has")
            return bytes(await answer.bytes_async())

        try:
            found: bytes = self._patiently(read)
        except self._missing:
            return None
        return found

    def ranges(self, key: str, starts: list[int], lengths: list[int]) -> Sequence[Buffer]:
        """Return ranges of an object."""
        read = partial(self._obstore.get_ranges_async, self._store, key, starts=starts, lengths=lengths, coalesce=0)
        try:
            found: Sequence[Buffer] = self._patiently(read)
        except self._missing as error:
            raise CheckpointError(
                f"{self.url}/{key} is gone: another writer removed it since the memory was loaded; load it again"
            ) from error
        return found

    def listed(self, folder: str) -> dict[str, StoredObject]:
        """Return the objects in a folder, by name."""

        async def collected() -> Any:
            return await self._obstore.list(self._store, folder).collect_async()

        found = self._put(collected)
        return {
            entry["path"].rpartition("/")[2]: StoredObject(int(entry["size"]), entry["last_modified"])
            for entry in found
        }

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the objects in a folder, by name."""
        return {name: entry.nbytes for name, entry in self.listed(folder).items()}

    def names(self) -> list[str]:
        """Return the names of the objects below the URL."""
        return list(self.sizes(""))

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the URL."""
        listed = self._put(partial(self._obstore.list_with_delimiter_async, self._store))
        return [name.rstrip("/").rpartition("/")[2] for name in listed["common_prefixes"]]

    def delete(self, keys: list[str]) -> None:
        """Remove objects. Missing objects are ignored."""
        for key in keys:
            with contextlib.suppress(*self._missing):
                self._patiently(partial(self._obstore.delete_async, self._store, key))

    def try_delete(self, key: str) -> None:
        """Remove an object if the store answers at once. Errors are ignored."""
        if not self.waiting.is_given_up:
            with contextlib.suppress(Exception):
                sent(lambda: self._obstore.delete_async(self._store, key)).result(_AT_ONCE_S)

    async def put_once(self, key: str, content: Buffer) -> None:
        """Write an object with a single attempt."""
        await self._obstore.put_async(self._store, key, content, use_multipart=False)

    def time(self) -> datetime:
        """Return the time by the clock of the store."""
        key = f"probe/{new_writer_id()}"
        self.put(key, b"now")
        try:
            return self.listed("probe")[key.rpartition("/")[2]].modified
        finally:
            self.delete([key])

    def honours_conditions(self) -> bool:
        """Return whether creating an object twice fails the second time."""
        key = f"probe/{new_writer_id()}"
        try:
            self.create(key, b"first")
            return not self.create(key, b"second")
        finally:
            self.delete([key])

    @property
    def _missing(self) -> tuple[type[BaseException], ...]:
        return self._errors.NotFoundError, FileNotFoundError

    def _put(self, request: Request) -> Any:
        """Do a request that needs no object. If the store reports a missing one, the bucket is missing."""
        try:
            return self._patiently(request)
        except self._missing as error:
            raise CheckpointError(
                f"{self.url} has no bucket or container of that name ({short(error)}); create it, or check the url"
            ) from error

    def _patiently(self, request: Request) -> Any:
        """Repeat a request until it is answered."""
        wait, is_logged, began = _FIRST_WAIT_S, False, time.monotonic()
        self.waiting.got_on()  # the request before was answered, however long ago
        while True:
            try:
                answer = self._answer(request, began)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError, *self._missing, HoldallError):
                raise
            except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
                raise CheckpointError(f"{self.url} refuses access ({short(error)}); check the credentials") from error
            except Exception as error:
                refused = _FINAL.search(str(error))
                if refused is not None and refused[1] == "404":
                    raise FileNotFoundError(short(error)) from error
                if refused is not None:
                    raise CheckpointError(f"{self.url} refuses a request ({short(error)}); check the store") from error
                self.waiting.reason = f"{_endpoint(str(error))} does not answer ({_cause(error)})"
                if not is_logged:
                    _LOG.warning("%s: %s; trying until it does", self.url, self.waiting.reason)
                is_logged = True
            else:
                self.waiting.got_on()
                return answer
            self.waiting.remind(began, f"{self.url}: {self.waiting.reason}")
            self.waiting.pause(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    def _answer(self, request: Request, began: float) -> Any:
        """Send a request and wait for its answer, or until it is given up."""
        self.waiting.require()
        future = sent(request)
        try:
            while not futures.wait([future], _LOOK_S).done:
                self.waiting.reason = self.waiting.reason or f"{_endpoint()} has not answered yet"
                self.waiting.require()
                self.waiting.remind(began, f"{self.url}: {self.waiting.reason}")
            return future.result()
        except futures.CancelledError as error:
            raise CheckpointError(f"{self.url} was given up: the program ends") from error
        finally:
            future.cancel()


class _SentParts:
    """The parts of a file that is uploaded. Reading a part shows that earlier ones have arrived."""

    def __init__(self, file: Any, waiting: Waiting) -> None:
        self._file, self._waiting = file, waiting

    def __iter__(self) -> Iterator[bytes]:
        while piece := self._file.read(PART_BYTES):
            self._waiting.got_on()
            yield piece


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def _request_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that sends requests. There is one per process."""
    import asyncio  # noqa: PLC0415  only for stores

    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="holdall-requests", daemon=True).start()
            _loops[os.getpid()] = loop
            util.Finalize(None, _end_requests, (loop,), exitpriority=0)
        return loop


def sent(request: Request) -> futures.Future[Any]:
    """Send a request in the background."""
    import asyncio  # noqa: PLC0415  only for stores

    async def send() -> Any:
        return await request()

    return asyncio.run_coroutine_threadsafe(send(), _request_loop())


def _end_requests(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all requests, because an answer that arrives while Python ends would crash."""
    import asyncio  # noqa: PLC0415  only for stores

    async def cancel() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(1)


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")


def _endpoint(told: str = "") -> str:
    """Return the server that an error names, or the one that the environment sets."""
    found = re.search(r"https?://[^/\s\"]+", told)
    if found is not None:
        return found.group()
    return next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "the store")


def _cause(error: BaseException) -> str:
    """Return the message of the operating system in an error of the client, or the first line of the error."""
    found = re.search(r'(?:message|error): "([^"]+)"', str(error))
    return short(error) if found is None else found[1]


def short(error: BaseException) -> str:
    """Return the first line of an error, without the internals of the client."""
    return str(error).strip().partition("\n")[0].partition(": <")[0][:200]


# ---------------------------------------------------------------- files that are made once

_SLOT = re.compile(r"[0-9a-f]{16}\.slot")
_MOST_SLOT_BYTES = 2**30
_REQUEST_S = 0.2


class FileObjects:
    """The files of a directory, with the methods of `Objects` that slots need."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url, self._root, self._disk = str(root), root, disk or FileSystem()
        try:
            for folder in (*reversed(root.parents), root):
                if not folder.exists() and self._disk.make_directory(folder):
                    self._disk.sync_directory(folder.parent)
        except OSError as error:
            raise CheckpointError(f"{root} cannot be made ({error}); check the path and its permissions") from error

    def create(self, key: str, content: Buffer) -> bool:
        """Create a file, which is durable when this returns. Return False if it exists."""
        try:
            return create_whole(self._disk, self._root / key, content, new_writer_id(), is_locked=False)
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be written to ({error}); make room, or check the disk") from error

    def get(self, key: str, _most_bytes: int) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.url}/{key} cannot be read ({error})") from error

    def names(self) -> list[str]:
        """Return the names of all files."""
        return self._disk.names(self._root)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below."""
        return [each.name for each in self._root.iterdir() if each.is_dir()]

    def delete(self, keys: list[str]) -> None:
        """Remove files. Missing files are ignored."""
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def honours_conditions(self) -> bool:
        """Return True, because every file system creates a link only once."""
        return True


class Slots:
    """Numbered files, on a disk or in an object store, that are each created once and never written again.

    If several processes create the same slot, exactly one succeeds.
    """

    def __init__(self, objects: Objects | FileObjects) -> None:
        self._objects, self.url = objects, objects.url
        # Seconds to wait for more data before a slot is created, because a request costs time and money.
        self.batching_s = _REQUEST_S if isinstance(objects, Objects) else 0.0

    @classmethod
    def at(cls, url: str | os.PathLike[str], *folders: str) -> Slots:
        """Return the slots in a folder below a URL or path."""
        return cls(objects_at(url, *folders))

    def require_fencing(self) -> None:
        """Raise an error if a number could be created twice, because the store ignores conditions."""
        if not self._objects.honours_conditions():
            raise CheckpointError(
                f"{self.url} ignores conditions, so a shard that was taken for dead looks like its "
                "successor; use a store that has conditional puts, or durability='memory' and checkpoints"
            )

    def numbers(self) -> list[int]:
        """Return the numbers of all slots, in order."""
        return sorted(int(name[:16], 16) for name in self._objects.names() if _SLOT.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot. Return False if it exists with another content than that of an earlier attempt."""
        return self._objects.create(_name(number), content) or self.read(number) == content

    def read(self, number: int) -> bytes | None:
        """Return the content of a slot, or None if it does not exist."""
        return self._objects.get(_name(number), _MOST_SLOT_BYTES)

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""
        self._objects.delete([_name(number) for number in numbers])


def _name(number: int) -> str:
    return f"{number:016x}.slot"


def objects_at(url: str | os.PathLike[str], *folders: str) -> Objects | FileObjects:
    """Return the objects in a folder below a URL or path."""
    if is_remote(url):
        return Objects("/".join((os.fspath(url).rstrip("/"), *folders)))
    return FileObjects(Path(os.fspath(url)).joinpath(*folders))

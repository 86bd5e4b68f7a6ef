"""Requests to an object store: each is sent in the background and tried until it is answered, or given up.

At the end, what journals need of a store, in a directory as well: numbered files that are each made once.

In:  keys and bytes.  Out: objects, of s3://, gs:// and az:// through obstore; errors of one line.
Invariant: a server that is away costs time alone. Who waits can give up at any moment, also in the middle of a request.
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
from holdall.checkpoint.load import is_remote
from holdall.checkpoint.manifest import Waiting, new_writer_id
from holdall.errors import CheckpointError, DamageError, HoldallError, MissingPackageError
from holdall.storage import Buffer

if TYPE_CHECKING:
    import asyncio

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 10.0
_LOOK_S = 0.1
"""How often who waits for an answer looks whether it was given up."""
_AT_ONCE_S = 2.0
PART_BYTES = 8 * 2**20
_PARTS_AT_ONCE = 2
_FINAL = re.compile(r"status code: (4(?!08|09|25|29)\d\d|501)")
"""Answers that stay the same however often one asks; the rest is waited out."""
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""Of a single request; beyond that, the loop here tries for as long as it takes."""

_LOG = logging.getLogger("holdall")

Request = Callable[[], Awaitable[Any]]


class StoredObject(NamedTuple):
    """What a listing says of an object."""

    nbytes: int
    modified: datetime  # by the store's own clock


class Objects:
    """The objects below a url; every call goes on until the store answers, or somebody gives it up."""

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
        """Return the objects below another url; to give these up is to give those up."""
        return Objects(url, self.waiting)

    def create(self, key: str, content: Buffer) -> bool:
        """Put an object where none is; return whether it was done, as far as the answer says."""
        put = partial(self._obstore.put_async, self._store, key, content, mode="create", use_multipart=False)
        try:
            self._put(put)
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            return False
        return True

    def put(self, key: str, content: Buffer) -> None:
        """Put an object, over one of the same name if there is one."""
        self._put(partial(self._obstore.put_async, self._store, key, content, use_multipart=False))

    def put_in_parts(self, key: str, descriptor: int) -> None:
        """Put a large object in parts; it appears when the last of them was taken."""

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
            # Its last answer was lost, and the store has forgotten the upload; a name is only ever given one content.
            self._put(put)

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Return an object; None if it is not there."""

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
        """Read ranges of an object, several at a time."""
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
        """Return the bytes of the objects in a folder, by name."""
        return {name: entry.nbytes for name, entry in self.listed(folder).items()}

    def names(self) -> list[str]:
        """Return the names of the objects below the url."""
        return list(self.sizes(""))

    def folders(self) -> list[str]:
        """Return the names of the folders right below the url."""
        listed = self._put(partial(self._obstore.list_with_delimiter_async, self._store))
        return [name.rstrip("/").rpartition("/")[2] for name in listed["common_prefixes"]]

    def delete(self, keys: list[str]) -> None:
        """Remove objects; some may be gone already."""
        for key in keys:
            with contextlib.suppress(*self._missing):
                self._patiently(partial(self._obstore.delete_async, self._store, key))

    def try_delete(self, key: str) -> None:
        """Remove an object if the store does it at once; nothing is lost if it does not."""
        if not self.waiting.is_given_up:
            with contextlib.suppress(Exception):
                sent(lambda: self._obstore.delete_async(self._store, key)).result(_AT_ONCE_S)

    async def put_once(self, key: str, content: Buffer) -> None:
        """Put an object, in the loop of requests; an error is raised at once."""
        await self._obstore.put_async(self._store, key, content, use_multipart=False)

    def time(self) -> datetime:
        """Return the store's own time."""
        key = f"probe/{new_writer_id()}"
        self.put(key, b"now")
        try:
            return self.listed("probe")[key.rpartition("/")[2]].modified
        finally:
            self.delete([key])

    def honours_conditions(self) -> bool:
        """Whether creating an object twice fails the second time."""
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
        """Do what cannot miss an object: what is missing is the bucket."""
        try:
            return self._patiently(request)
        except self._missing as error:
            raise CheckpointError(
                f"{self.url} has no bucket or container of that name ({short(error)}); create it, or check the url"
            ) from error

    def _patiently(self, request: Request) -> Any:
        """Do something until it is answered; a server that restarts is waited for."""
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
        """Have a request sent, and wait for its answer, or until it is given up."""
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
    """A file whose parts are sent; each that is read shows that those before were taken."""

    def __init__(self, file: Any, waiting: Waiting) -> None:
        self._file, self._waiting = file, waiting

    def __iter__(self) -> Iterator[bytes]:
        while piece := self._file.read(PART_BYTES):
            self._waiting.got_on()
            yield piece


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def _request_loop() -> asyncio.AbstractEventLoop:
    """Return the loop in which requests are sent, so that who waits can give them up; one a process."""
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
    """Have a request sent in the background."""
    import asyncio  # noqa: PLC0415  only for stores

    async def send() -> Any:
        return await request()

    return asyncio.run_coroutine_threadsafe(send(), _request_loop())


def _end_requests(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is under way: an answer that came while Python ends would find nobody."""
    import asyncio  # noqa: PLC0415  only for stores

    async def cancel() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(1)


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")


def _endpoint(told: str = "") -> str:
    """Name the server: as an error tells, or as it is set."""
    found = re.search(r"https?://[^/\s\"]+", told)
    if found is not None:
        return found.group()
    return next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "the store")


def _cause(error: BaseException) -> str:
    """Return what the operating system said, which the client puts behind its own words; or these."""
    found = re.search(r'(?:message|error): "([^"]+)"', str(error))
    return short(error) if found is None else found[1]


def short(error: BaseException) -> str:
    """Return the first line of an error; the client adds many lines of its own insides."""
    return str(error).strip().partition("\n")[0].partition(": <")[0][:200]


# ---------------------------------------------------------------- files that are made once

_SLOT = re.compile(r"[0-9a-f]{16}\.slot")
_MOST_SLOT_BYTES = 2**30
_REQUEST_S = 0.2


class FileObjects:
    """The files of a directory, with those calls of `Objects` that make each of them once."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url, self._root, self._disk = str(root), root, disk or FileSystem()
        try:
            for folder in (*reversed(root.parents), root):
                if not folder.exists() and self._disk.make_directory(folder):
                    self._disk.sync_directory(folder.parent)
        except OSError as error:
            raise CheckpointError(f"{root} cannot be made ({error}); check the path and its permissions") from error

    def create(self, key: str, content: Buffer) -> bool:
        """Make a file where none is; return whether it was done. It is durable then."""
        try:
            return create_whole(self._disk, self._root / key, content, new_writer_id(), is_locked=False)
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be written to ({error}); make room, or check the disk") from error

    def get(self, key: str, _most_bytes: int) -> bytes | None:
        """Return a file's bytes; None if it is not there."""
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.url}/{key} cannot be read ({error})") from error

    def names(self) -> list[str]:
        """Return the names of what is there."""
        return self._disk.names(self._root)

    def folders(self) -> list[str]:
        """Return the names of the folders right below."""
        return [each.name for each in self._root.iterdir() if each.is_dir()]

    def delete(self, keys: list[str]) -> None:
        """Remove files; some may be gone already."""
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def honours_conditions(self) -> bool:
        """Whether making a file twice fails the second time: every file system makes a link once."""
        return True


class Slots:
    """Numbered files, on a disk or in an object store, that are each created once and never written again.

    Of several that create one at a time, one succeeds.
    """

    def __init__(self, objects: Objects | FileObjects) -> None:
        self._objects, self.url = objects, objects.url
        # How long to wait for more to write before the next one is created: a request costs time and money.
        self.batching_s = _REQUEST_S if isinstance(objects, Objects) else 0.0

    @classmethod
    def at(cls, url: str | os.PathLike[str], *folders: str) -> Slots:
        """Return those in a folder below a url or path."""
        return cls(objects_at(url, *folders))

    def require_fencing(self) -> None:
        """Refuse a place where a number could be created twice: some stores take conditions, and do not keep them."""
        if not self._objects.honours_conditions():
            raise CheckpointError(
                f"{self.url} ignores conditions, so a shard that was taken for dead looks like its "
                "successor; use a store that has conditional puts, or durability='memory' and checkpoints"
            )

    def numbers(self) -> list[int]:
        """Return the numbers that are there, in order."""
        return sorted(int(name[:16], 16) for name in self._objects.names() if _SLOT.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot; False if another stands there, and not one of an earlier try whose answer was lost."""
        return self._objects.create(_name(number), content) or self.read(number) == content

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a slot; None if it is not there: slots may be removed at any time."""
        return self._objects.get(_name(number), _MOST_SLOT_BYTES)

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""
        self._objects.delete([_name(number) for number in numbers])


def _name(number: int) -> str:
    return f"{number:016x}.slot"


def objects_at(url: str | os.PathLike[str], *folders: str) -> Objects | FileObjects:
    """Return what lies in a folder below a url or path."""
    if is_remote(url):
        return Objects("/".join((os.fspath(url).rstrip("/"), *folders)))
    return FileObjects(Path(os.fspath(url)).joinpath(*folders))

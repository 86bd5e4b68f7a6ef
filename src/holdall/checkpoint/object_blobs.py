"""Blobs in an object store: s3://, gs:// and az:// through obstore.

obstore handles credentials, connections, timeouts and retries. A request runs on an event loop in the background, so
that the caller can stop waiting for it at any moment.

The lock is the object LOCK, which its owner replaces every few seconds. Another process takes the lock if the object
does not change for `lease_s` seconds by its own clock, so no clocks are compared. All changes of the object are
conditional on its version.

Guarantee: a server that does not answer costs time, but no data. Every wait can be cancelled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent import futures
from datetime import timedelta
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NamedTuple

from holdall.checkpoint.blobs import check_name, explain_lock, has_exclusive_create
from holdall.checkpoint.waiting import Waiting
from holdall.errors import (
    BlobMissingError,
    CheckpointError,
    DamageError,
    FencedError,
    HoldallError,
    MissingPackageError,
)
from holdall.store.records import Buffer

if TYPE_CHECKING:
    import asyncio

LEASE_S = 20.0
"""Seconds without a renewal after which another process may take the lock. HOLDALL_LEASE_S overrides it."""
_RENEWALS_PER_LEASE = 4
_POLL_S = 0.1
"""Seconds between checks whether a request was cancelled."""
_RELEASE_S = 2.0
"""Seconds that `ObjectLease.release` waits for the store."""
_CANCEL_S = 1.0
"""Seconds that the end of the program waits for requests to be cancelled, and then for obstore to drop them."""
_RELEASE_POLL_S = 0.001
"""Seconds between checks whether obstore's threads still hold cancelled requests."""
_LOCK = "LOCK"
_MAX_LOCK_BYTES = 4096
_RETRIES: Any = {"max_retries": 1000, "retry_timeout": timedelta(minutes=3)}
"""Retries of obstore: with its own pauses, until three minutes have passed."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")

_LOG = logging.getLogger("holdall")

Request = Callable[[], Awaitable[Any]]


class ObjectBlobs:
    """The blobs below a prefix of an object store.

    Args:
        url: Like s3://bucket/prefix.
        waiting: Progress of calls, and the way to cancel them.
        lease_s: Seconds without a renewal after which another process may take the lock. None: `LEASE_S`.
    """

    def __init__(self, url: str, waiting: Waiting | None = None, lease_s: float | None = None) -> None:
        try:
            import obstore  # noqa: PLC0415  an extra
            import obstore.exceptions  # noqa: PLC0415
            import obstore.store  # noqa: PLC0415
        except ImportError as error:
            raise MissingPackageError(
                f"{url} is in an object store, which needs obstore. Run: pip install 'holdall[cloud]'"
            ) from error
        self.url = url.rstrip("/")
        self.waiting = waiting or Waiting(self.url)
        self.lease_s = float(os.environ.get("HOLDALL_LEASE_S", LEASE_S)) if lease_s is None else lease_s
        self._obstore: Any = obstore
        self._errors: Any = obstore.exceptions
        try:
            self._store: Any = obstore.store.from_url(self.url, retry_config=_RETRIES)
        except Exception as error:
            raise CheckpointError(
                f"{url} cannot be opened ({_shorten(error)}). Check the URL and the credentials."
            ) from error

    def create(self, name: str, data: Buffer) -> bool:
        """Create a blob with one conditional put. See `BlobStore.create`."""
        check_name(name)
        put = partial(self._obstore.put_async, self._store, name, data, mode="create", use_multipart=False)
        try:
            self.run(put)
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            # Either another process created it, or the answer to an earlier attempt of obstore was lost.
            return self._has(name, data)
        except self._missing as error:
            raise self._explain_bucket(error) from error
        return True

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return a part of a blob. See `BlobStore.read`."""
        check_name(name)
        if length == 0:
            self._run_on(name, partial(self._obstore.head_async, self._store, name))
            return b""
        get = partial(self._obstore.get_range_async, self._store, name, start=start, length=length)
        try:
            content = bytes(self._run_on(name, get))
        except CheckpointError as error:
            if error.errno != errno.ERANGE:
                raise
            content = b""
        if len(content) != length:
            raise DamageError(
                f"{self.url}/{name} ends at byte {start + len(content)}. Byte {start + length - 1} is missing."
            )
        return content

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and sizes. See `BlobStore.list`."""
        folder = prefix.rpartition("/")[0]

        async def collect() -> Any:
            return await _track(self._obstore.list(self._store, folder or None).collect_async())

        try:
            found = self.run(collect)
        except self._missing as error:
            raise self._explain_bucket(error) from error
        for entry in found:
            name = entry["path"]
            if name.startswith(prefix) and name != _LOCK:
                yield name, int(entry["size"])

    def delete(self, name: str) -> None:
        """Delete a blob if it exists."""
        check_name(name)
        with contextlib.suppress(*self._missing):
            self.run(partial(self._obstore.delete_async, self._store, name))

    def lock(self, owner: str) -> ObjectLease:
        """Become the only writer. If a process that was killed still has the lock, this takes `lease_s` seconds."""
        if not has_exclusive_create(self):
            _LOG.warning(
                "%s overwrites existing objects although it was asked not to, so two writers would not notice each "
                "other. Make sure that only one process saves to it.",
                self.url,
            )
        return ObjectLease(self, owner)

    def read_lock(self) -> LockState | None:
        """Return the content and the version of the lock, or None if there has never been one."""

        async def get() -> Any:
            answer = await _track(self._obstore.get_async(self._store, _LOCK))
            if answer.meta["size"] > _MAX_LOCK_BYTES:
                raise DamageError(f"{self.url}/{_LOCK} is not a lock of holdall. Use another prefix.")
            return bytes(await _track(answer.bytes_async())), answer.meta

        try:
            content, meta = self.run(get)
        except self._missing:
            return None
        try:
            words = json.loads(content)
            return LockState(str(words["owner"]), str(words["token"]), words["held"] is True, _read_version(meta))
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(f"{self.url}/{_LOCK} is not a lock of holdall. Use another prefix.") from error

    async def put_lock(self, content: bytes, version: dict[str, str] | None) -> dict[str, str]:
        """Create the lock, or replace the given version of it. Return the new version.

        Raise an error for which `is_conflict` is true if there is another version.
        """
        mode = "create" if version is None else version
        put = self._obstore.put_async(self._store, _LOCK, content, mode=mode, use_multipart=False)
        return _read_version(await _track(put))

    def is_conflict(self, error: BaseException) -> bool:
        """Return whether `put_lock` failed because another process changed the lock."""
        conflicts = (self._errors.AlreadyExistsError, self._errors.PreconditionError, *self._missing)
        return isinstance(error, conflicts)

    def run(self, request: Request) -> Any:
        """Send a request, and wait until it is answered or cancelled. Repeat it if the body of its answer broke off.

        Errors for which `is_conflict` is true, and errors of missing objects, are raised as obstore raised them.

        obstore does not repeat a request whose answer has begun. Every request may be repeated: a put is conditional,
        so the second put finds the object of the first one. Other requests have no further effect.
        """
        try:
            return self._send_once(request)
        except CheckpointError as error:
            if "body error" not in str(error):
                raise
        return self._send_once(request)

    @property
    def _missing(self) -> tuple[type[BaseException], ...]:
        return self._errors.NotFoundError, FileNotFoundError

    def _has(self, name: str, data: Buffer) -> bool:
        """Return whether a blob has the content `data`."""
        view = memoryview(data).cast("B")
        try:
            meta = self._run_on(name, partial(self._obstore.head_async, self._store, name))
        except BlobMissingError:
            return False
        return meta["size"] == view.nbytes and self.read(name, 0, view.nbytes) == view

    def _run_on(self, name: str, request: Request) -> Any:
        """Run a request that needs an existing blob."""
        try:
            return self.run(request)
        except self._missing as error:
            raise BlobMissingError(
                errno.ENOENT,
                f"{self.url}/{name} does not exist. If a memory that saves there has removed it, load again.",
            ) from error

    def _send_once(self, request: Request) -> Any:
        """Send a request, and wait until it is answered or cancelled."""
        self.waiting.check()
        self.waiting.record_progress()  # Time that passed between two requests does not count as waiting.
        began = time.monotonic()
        future = send(request)
        try:
            while not futures.wait([future], _POLL_S).done:
                self.waiting.reason = f"{_find_endpoint()} has not answered for {time.monotonic() - began:.0f} s"
                self.waiting.check()
                self.waiting.remind(began, f"{self.url}: {_find_endpoint()} has not answered yet.")
            answer = future.result()
        except futures.CancelledError as error:
            raise CheckpointError(f"The work at {self.url} was cancelled, because the program ends.") from error
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError, *self._missing, HoldallError):
            raise
        except Exception as error:
            raise self._explain(error) from error
        finally:
            future.cancel()
        self.waiting.record_progress()
        return answer

    def _explain(self, error: Exception) -> BaseException:
        """Return the error to raise for an error of obstore."""
        text = str(error)
        status = re.search(r"status code: (\d\d\d)|status: (\d\d\d)|HTTP status client error \((\d\d\d)", text)
        code = "" if status is None else next(filter(None, status.groups()))
        if code == "404":
            return FileNotFoundError(_shorten(error))
        if code == "416" or ("range" in text.lower() and "invalid" in text.lower()):
            return CheckpointError(errno.ERANGE, f"{self.url}: {_shorten(error)}.")
        is_denied = isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError)
        if is_denied or code in ("401", "403"):
            return CheckpointError(
                errno.EACCES, f"{self.url} refuses access ({_shorten(error)}). Check the credentials."
            )
        if code.startswith("4"):
            return CheckpointError(errno.EIO, f"{self.url} refuses a request ({_shorten(error)}). Check the store.")
        return CheckpointError(
            errno.ETIMEDOUT,
            f"{_find_endpoint(text)} does not answer requests for {self.url} ({_find_cause(error)}). Check the URL and "
            "the endpoint.",
        )

    def _explain_bucket(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            errno.ENODEV,
            f"{self.url}: there is no bucket or container of this name ({_shorten(error)}). Create it, or check the "
            "URL.",
        )


# ---------------------------------------------------------------- the lock


class LockState(NamedTuple):
    """The content of the lock object, and its version."""

    owner: str
    token: str  # Random name of the lease.
    is_held: bool  # False: the owner has released it.
    version: dict[str, str]


class ObjectLease:
    """The lock of an object store. It is renewed in the background until it is released or garbage-collected.

    The constructor waits for the lock.
    """

    def __init__(self, blobs: ObjectBlobs, owner: str) -> None:
        self._blobs = blobs
        self._owner = owner
        self._token = secrets.token_hex(8)
        self._version: dict[str, str] = {}
        self._renewed_at = 0.0
        self._taken_by = ""  # Owner that took the lock from this lease.
        self._is_released = False
        self._renewing = threading.Lock()
        self._process = os.getpid()
        self._acquire()
        self._renewal = send(partial(_renew_until_released, weakref.ref(self), blobs.lease_s / _RENEWALS_PER_LEASE))

    def check(self) -> None:
        """Raise FencedError if another process has taken the lock. Renew the lock first if it was renewed long ago."""
        if self._is_released:
            raise FencedError(f"The lock of {self._blobs.url} was released.")
        if time.monotonic() - self._renewed_at > self._blobs.lease_s / 2:
            with self._renewing:
                self._renew_now()
        if self._taken_by:
            raise FencedError(
                f"{self._blobs.url} was taken over by {self._taken_by}, because this process did not renew its lock "
                f"for {self._blobs.lease_s:g} s. Save to another place."
            )

    def release(self) -> None:
        """Give the lock up, if the store answers within `_RELEASE_S`. A forked child does nothing."""
        if self._is_released or self._process != os.getpid():
            return
        self._is_released = True
        self._renewal.cancel()
        if self._taken_by:
            return
        with contextlib.suppress(Exception):
            send(lambda: self._blobs.put_lock(self._describe(is_held=False), self._version)).result(_RELEASE_S)

    async def renew(self) -> None:
        """Replace the lock object by a new version of itself. An error is logged, and the next renewal tries again."""
        if not self._renewing.acquire(blocking=False):
            return  # `check` is renewing it.
        try:
            began = time.monotonic()
            self._version = await self._blobs.put_lock(self._describe(is_held=True), self._version)
            self._renewed_at = began
        except Exception as error:
            _LOG.debug("The lock of %s could not be renewed: %s", self._blobs.url, _shorten(error))
        finally:
            self._renewing.release()

    def _renew_now(self) -> None:
        """Renew the lock. If another process has taken the lock, record the name of that process."""
        while not self._taken_by:
            began = time.monotonic()
            try:
                self._put(self._version)
            except Exception as error:
                if not self._blobs.is_conflict(error):
                    raise
                found = self._blobs.read_lock()
                if found is None or found.token != self._token:
                    self._taken_by = "another process" if found is None else found.owner
                    return
                self._version = found.version  # The answer to an earlier renewal was lost.
            else:
                self._renewed_at = began
                return

    def _acquire(self) -> None:
        """Wait for the lock. Raise LockedError if its owner renews it meanwhile."""
        waiting = self._blobs.waiting
        began = time.monotonic()
        found = self._blobs.read_lock()
        while True:
            if found is None or not found.is_held or time.monotonic() - began >= self._blobs.lease_s:
                if self._try_take(found):
                    return
            else:
                waiting.reason = f"the lock of {found.owner}, which has not been renewed yet"
                expiry = f"It expires after {self._blobs.lease_s:g} s."
                waiting.remind(began, f"{self._blobs.url}: {waiting.reason}. {expiry}")
                waiting.pause(min(1.0, self._blobs.lease_s / 10))
            seen = self._blobs.read_lock()
            if seen is not None and seen.is_held and (found is None or seen.version != found.version):
                if seen.token == self._token:  # The answer to `_try_take` was lost.
                    self._version = seen.version
                    return
                raise explain_lock(self._blobs.url, seen.owner, self._owner)
            found = seen

    def _try_take(self, found: LockState | None) -> bool:
        """Take the lock if it is still in the state `found`. Return whether it was."""
        began = time.monotonic()
        try:
            self._put(None if found is None else found.version)
        except Exception as error:
            if not self._blobs.is_conflict(error):
                raise
            return False
        self._renewed_at = began
        return True

    def _put(self, version: dict[str, str] | None) -> None:
        content = self._describe(is_held=True)
        self._version = self._blobs.run(lambda: self._blobs.put_lock(content, version))

    def _describe(self, *, is_held: bool) -> bytes:
        words = {"owner": self._owner, "token": self._token, "held": is_held, "nonce": secrets.token_hex(8)}
        return json.dumps(words).encode()


async def _renew_until_released(reference: weakref.ref[ObjectLease], pause_s: float) -> None:
    """Renew a lock while its lease exists."""
    import asyncio  # noqa: PLC0415  only for stores

    while True:
        await asyncio.sleep(pause_s)
        lease = reference()
        if lease is None:
            return
        await lease.renew()
        del lease


def _read_version(meta: Any) -> dict[str, str]:
    """Return the version of an object, as a condition for replacing it."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


# ---------------------------------------------------------------- requests in the background

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_unfinished: weakref.WeakSet[Awaitable[Any]] = weakref.WeakSet()
"""Requests that obstore's threads still hold. These threads call Python once more, even after a cancellation."""
_starting = threading.Lock()


def send(request: Request) -> futures.Future[Any]:
    """Send a request in the background."""
    import asyncio  # noqa: PLC0415  only for stores

    async def await_request() -> Any:
        return await _track(request())

    return asyncio.run_coroutine_threadsafe(await_request(), _get_loop())


def _track(request: Awaitable[Any]) -> Awaitable[Any]:
    """Return `request`, and make the end of the program wait for it."""
    _unfinished.add(request)
    return request


def _get_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that sends requests. There is one per process."""
    import asyncio  # noqa: PLC0415  only for stores

    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            _unfinished.clear()  # A forked child has the requests of its parent, but not obstore's threads.
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="holdall-requests", daemon=True).start()
            _loops[os.getpid()] = loop
            util.Finalize(None, _cancel_requests, (loop,), exitpriority=0)
        return loop


def _cancel_requests(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all requests, and wait until obstore's threads hold none. The threads would panic after Python's end."""
    import asyncio  # noqa: PLC0415  only for stores

    async def cancel() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(_CANCEL_S)
    until = time.monotonic() + _CANCEL_S
    while _unfinished and time.monotonic() < until:
        time.sleep(_RELEASE_POLL_S)


# ---------------------------------------------------------------- messages


def _find_endpoint(message: str = "") -> str:
    """Return the server that an error message names, or else the one that the environment sets."""
    found = re.search(r"https?://[^/\s\"]+", message)
    if found is not None:
        return found.group()
    return next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "the object store")


def _find_cause(error: BaseException) -> str:
    """Return the message of the operating system in an error of obstore, or the first line of the error."""
    found = re.search(r'(?:message|error): "([^"]+)"', str(error))
    return _shorten(error) if found is None else found[1]


def _shorten(error: BaseException) -> str:
    """Return the first line of an error, without the internals of obstore."""
    return str(error).strip().partition("\n")[0].partition(": <")[0][:200]

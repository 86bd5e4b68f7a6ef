"""A memory and what is kept of it elsewhere: checkpoints that it writes or came from, and pickles.

In:  a memory with its store, sampler and generator.  Out: snapshots of one moment, and the memory that one becomes.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from holdall.background import CLOSE_S, LOAD_S, fork_safe, left, tell_of_forks
from holdall.checkpoint.directory import open_reader
from holdall.checkpoint.load import Loading, Restored
from holdall.checkpoint.manifest import ATTACHMENT_NAME, normalized_url
from holdall.checkpoint.save import Progress, SaveHandle, Savers, require_mirror
from holdall.checkpoint.saved_records import Attached, RowsKey
from holdall.checkpoint.write import Snapshot
from holdall.delivery import Prefetched
from holdall.errors import ArgumentError, CheckpointError
from holdall.json_state import childs_generator, generator_state, restored_generator, schema_words
from holdall.sampling import Sampler, resume, sampler_to_resume, sampler_words
from holdall.schema import Schema
from holdall.storage import Coder, FullBlock, SliceBlock, Store, UnchangedStore
from holdall.units import require_count, require_flag, require_number, whole

if TYPE_CHECKING:
    from holdall.checkpoint.autosave import Autosave, BackgroundFetch


_LOG = logging.getLogger("holdall")


class SavedMemory(ABC):
    """A memory's checkpoints and pickles; the subclass has the store, and takes its arguments.

    Args:
        settings: The rest of the subclass's arguments, as they were given.
    """

    sampler: Sampler
    _generator: np.random.Generator

    def __init__(self, schema: Schema, capacity: int, settings: dict[str, Any], coder: Coder) -> None:
        self.schema, self.num_envs = schema, schema.num_envs
        self.capacity = capacity // schema.num_envs * schema.num_envs  # transitions: whole ticks, over all lanes
        self._settings = settings
        self._lock: Any = fork_safe(threading.RLock())  # entered once: see `_locked`
        self._prefetched: Prefetched | None = None  # made with the first loader
        self._savers, self._coder = Savers(coder), coder
        self._parents: list[Any] = []  # what a forked child must neither use nor close
        tell_of_forks(self)
        self._attached = Attached()
        self._autosave: Autosave | None = None
        self._fetch: BackgroundFetch | None = None

    @abstractmethod
    def _open(self) -> Store:
        """Return the store, or refuse a memory that was closed."""

    @abstractmethod
    def _whole(self) -> Store:
        """Return the store, under the lock, after what an interrupted call left to do is done."""

    @abstractmethod
    def _locked(self) -> Any:
        """Return the lock, for `with`: an exception at any instruction inside leaves it."""

    @property
    @abstractmethod
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""

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
            progress: Called in the background with what is written now and the bytes so far; with the bytes in all as
                well, about, if it takes three arguments.
        """
        require_count("keep", keep, 1)
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress ({progress!r}) must be a function of text and bytes; pass one, or None")
        files = checked_attachments(attach)
        require_mirror(mirror, normalized_url(url))
        saver = self._savers.to(normalized_url(url))
        with left(saver.in_order):
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
            raise ArgumentError("save_every was given neither seconds nor transitions; name one of them, or both")
        pause = None if seconds is None else require_number("seconds", seconds, 0.01)
        if transitions is not None:
            require_count("transitions", transitions, 1)
        require_count("keep", keep, 1)
        require_mirror(mirror, normalized_url(url))
        from holdall.checkpoint.autosave import Autosave, SaveInterval  # noqa: PLC0415  not for every memory

        interval, location, kept = SaveInterval(pause, transitions), normalized_url(url), int(keep)
        self._open()

        def save(memory: Any) -> SaveHandle:
            handle: SaveHandle = memory.save(location, keep=kept, mirror=mirror)
            return handle

        def write_ahead(memory: Any) -> None:
            memory._savers.to(location).write_ahead(memory._full_blocks)

        before, self._autosave = self._autosave, Autosave(self, save, write_ahead, interval)
        if before is not None:
            before.stop()

    @classmethod
    def load(
        cls,
        url: str | os.PathLike[str],
        capacity: int | None = None,
        device: str | None = None,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        sampler: Sampler | None = None,
        *,
        num_envs: int | None = None,
        recover: bool = False,
        store_device: str | None = None,
        timeout: float = LOAD_S,
    ) -> Self:
        """Load the newest checkpoint that is whole; the memory goes on exactly where it was saved.

        Compressed and raw blocks stay in their files and are read when they are sampled from. Of an object store,
        what a batch needs is fetched when it is drawn, and the rest meanwhile, to temporary files or `spill_dir`.

        Args:
            url: Where it was saved.
            capacity: Transitions to hold, if not as many as before; the newest are kept.
            sampler: None: the saved one, with its settings, priorities and the like. A class of your own, and
                `Hindsight` with its function, have to be passed; one of another kind than the saved starts afresh.
            num_envs: Lanes, if not as many as before. Every transition is then added again, under a new id; where a
                lane's stream is cut, the last transition before is marked as truncated; samplers start afresh.
            recover: Take the newest checkpoint even if records of it are damaged or files are gone: transitions that
                touch them count as none, all others are loaded, and the log says what is lost. Everything is read.
            store_device: As of the constructor; a memory whose data was born on a device goes back there.
            timeout: An object store that does not answer for so many seconds is given up, and an error says so. What
                is sampled later waits until it answers, or the memory is closed.
        """
        require_number("timeout", timeout, 0)
        if num_envs is not None:
            require_count("num_envs", num_envs, 1)
        require_flag("recover", recover)

        made: Any = cls

        def make(schema: Schema, ticks: int, is_final: bool) -> Any:
            most = ticks * schema.num_envs
            if not is_final:
                return made(schema, None, most, budget=None, prefer=prefer)
            settings = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir, "device": device}
            return made(schema, None, most, store_device=store_device, **settings)

        loading: Loading[Any] = Loading(make, made._take_over, sampler, whole(capacity), num_envs, recover)
        reader = open_reader(url, spill_dir, timeout)
        memory: Self = loading.load(reader)
        reader.wait_on()
        return memory

    @property
    def attached(self) -> Attached:
        """Files that were saved with the memory that this one was loaded from, by name."""
        return self._attached

    def close(self, timeout: float = CLOSE_S) -> None:
        """Wait for saves, and free everything; batches that were handed out stay as they are.

        Args:
            timeout: A save that does not get on for so many seconds is given up, and an error says so.
        """
        require_number("timeout", timeout, 0)
        try:
            self._end_saving(timeout)
        except CheckpointError:
            self._free()
            raise
        self._free()

    @abstractmethod
    def _free(self) -> None:
        """Free everything, whatever became of saves."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as given_up:
            if error is None:
                raise
            _LOG.warning("%s", given_up)  # the error that ended the block is the one to see

    def _came_from(self, found: Restored) -> None:
        """Remember a checkpoint, for the next one to hold only what is new, and fetch what is left there."""
        if found.saved is not None:
            self._savers.to(found.url, found.saved)
        self._fetch = found.fetch_the_rest()
        self._attached = found.attached

    def _end_saving(self, timeout: float) -> None:
        """Wait for what is being saved as long as it gets on, and end all that goes on in the background."""
        autosave, fetch = self._autosave, self._fetch
        try:
            if autosave is not None:
                autosave.stop()
            if fetch is not None:
                fetch.stop()
        finally:
            self._savers.close(timeout)
        self._autosave = self._fetch = None

    def after_fork(self) -> None:
        """In a child, draw other batches than the parent, and leave its checkpoints to it."""
        self._generator = childs_generator(self._generator)
        self._parents += [self._savers, self._autosave, self._fetch]
        self._savers, self._autosave, self._fetch = Savers(self._coder), None, None

    def _take_over(self, found: Restored, sampler: Sampler | None) -> None:
        """Become what was saved."""
        with self._locked():
            found.fill(self._whole())
        self._generator = restored_generator(found.state["generator"])
        saved = found.state["sampler"]
        self.sampler = sampler_to_resume(sampler, saved, goes_on=found.content is not None)
        first_id = self._open().first_tick * self.num_envs
        continues = found.content is not None and resume(self.sampler, saved, self.capacity, first_id)
        if continues and (recipes := found.state.get("prefetched")):
            self._prefetched = Prefetched(recipes, getattr(self.sampler, "reward_fn", None))
        self._came_from(found)

    def _snapshot(self, saved: Mapping[int, RowsKey], attach: Mapping[str, Path | bytes]) -> Snapshot:
        with self._locked():
            store = self._whole()
            frozen = store.freeze(saved)
            state = {
                "sampler": {**sampler_words(self.sampler), "state": self.sampler.state()},
                "generator": generator_state(self._generator),
                "prefetched": [] if self._prefetched is None else self._prefetched.state(),
            }
            words, ticks = schema_words(self.schema), self.capacity // self.num_envs
            release, again = store.release, store.take_again
            return Snapshot(frozen, words, ticks, state, attach, self._lock, release, again)

    def _full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        with self._locked():
            return self._whole().full_blocks(is_known)

    def __getstate__(self) -> dict[str, Any]:
        """Return the content as arrays that pickle protocol 5 writes without copying them."""
        with self._locked():
            store = self._whole()
            return {
                "schema": self.schema,
                "capacity": self.capacity,
                "settings": self._settings,
                "generator": self._generator,
                "sampler": self.sampler,
                "store": store.content(),
                "rows": store.rows(),
                "unchanged": UnchangedStore(store),  # last: it is written when all the rest was
            }


def checked_attachments(attach: Mapping[str, Any] | None) -> dict[str, Path | bytes]:
    """Return files by name, as bytes or as paths that are there."""
    if attach is None:
        return {}
    if not isinstance(attach, Mapping):
        raise ArgumentError(f"attach ({attach!r}) must map names to bytes or paths; pass a dict")
    return {_checked_name(name): _checked_content(name, content) for name, content in attach.items()}


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not ATTACHMENT_NAME.fullmatch(name):
        raise ArgumentError(
            f"attach has the name {name!r}; use letters, digits, '_', '-', '.', and '/' between parts that begin with "
            "none of the last two"
        )
    return name


def _checked_content(name: str, content: Any) -> Path | bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, str | os.PathLike):
        path = Path(content)
        if path.is_file():
            return path
        raise ArgumentError(f"attach[{name!r}] ({str(path)!r}) is no file; write it first, or pass its bytes")
    raise ArgumentError(f"attach[{name!r}] is a {type(content).__name__}; pass bytes or the path of a file")

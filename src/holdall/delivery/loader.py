"""How batches are handed out: ahead of time, in order, by a loader; and to JAX.

In:  a way to start a batch.  Out: an endless stream of batches.
Invariant: what a batch holds depends only on the consumer's calls, never on how quick a thread is. The consumer's own
call draws a batch and looks it up; a thread, or the device alone, puts it together in the background.
A batch is drawn `prefetch` batches before it is handed out; with `prefetch=0` when it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np

from holdall.background import left
from holdall.batch import Batch, Draw, Goals, RewardFunction
from holdall.delivery.batches import Batches, BatchJob, Delivery, DrawnRows, HostBatches, ObservationAssembler
from holdall.delivery.device import stream_to
from holdall.delivery.device_batch import DeviceBatches
from holdall.delivery.device_mirror import MirroredBatches
from holdall.errors import ClosedError, DamageError, TransitionIdError
from holdall.sampling import Held
from holdall.schema import Schema
from holdall.storage import Kernels, Store


class Loader:
    """An endless iterator over batches; also a context manager. Threads may share one: each batch goes to one of them.

    Args:
        start: Draws a batch, and looks up where its rows are.
        prefetch: Batches that are under way besides the one that is asked for.
        finish: Called when the loader is closed and nothing is under way any more.
        forget: Called with how many batches are still under way, when one of them is handed out or failed.
    """

    def __init__(
        self,
        start: Callable[[], BatchJob],
        prefetch: int,
        finish: Callable[[], None] | None = None,
        forget: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._start = start
        self._finish = finish
        self._forget = forget
        self._prefetch = prefetch
        self._under_way: deque[tuple[BatchJob, Future[None] | _Done]] = deque()
        self._worker: ThreadPoolExecutor | None = None
        if prefetch:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="holdall-loader")
        self._closed = False
        self._process = os.getpid()
        self._lock: Any = threading.RLock()  # a forked child never takes it

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; if making it failed in the background, the error is raised here."""
        if self._process != os.getpid():
            raise ClosedError("the loader's thread is in the parent of this process; make a new one here")
        with left(self._lock):
            if self._closed:
                raise ClosedError("the loader was closed; make a new one with memory.loader(...)")
            return self._next()

    def _next(self) -> Batch:
        if self._worker is None:
            try:
                job = self._start()
                job.work()
                return job.receive()
            finally:
                self._forget(0)
        self.begin(self._prefetch + 1)
        job, done = self._under_way[0]  # it stays until it is there: an interrupt only costs the time
        error = done.exception()
        self._under_way.popleft()
        self._forget(len(self._under_way))
        if error is not None:
            raise error
        return job.receive()

    def begin(self, batches: int) -> None:
        """Have so many batches under way, as far as they are made ahead."""
        while self._worker is not None and len(self._under_way) < min(batches, self._prefetch + 1):
            job = self._start()
            self._under_way.append((job, _Done(job) if job.is_quick else self._worker.submit(job.work)))

    @property
    def is_closed(self) -> bool:
        """Whether it hands out nothing more."""
        return self._closed

    def close(self) -> None:
        """Stop; batches under way are dropped, batches handed out stay as they are."""
        self._closed = True
        with left(self._lock) if self._process == os.getpid() else contextlib.nullcontext():
            for _, future in self._under_way:
                future.cancel()
            if self._worker is not None:
                self._worker.shutdown(wait=True)
            self._under_way.clear()
            if self._finish is not None:
                self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Done:
    """A job that is done at once; an error is raised when its batch is asked for."""

    def __init__(self, job: BatchJob) -> None:
        self._error: Exception | None = None
        try:
            job.work()
        except Exception as error:
            self._error = error

    def exception(self) -> Exception | None:
        """Return what the job raised."""
        return self._error

    def cancel(self) -> None:
        """Do nothing: it is done."""


_ARRAYS = {"ids": "i8", "weights": "f4", "last_ids": "i8", "reward": None, "discount": "f4", "mask": "b1"}


class LoaderDraws:
    """The recipes of one loader, which a save writes: those of batches that were not handed out yet.

    Args:
        saved: What a loader had under way when the memory was saved: this one begins with them.
        batch_size: Of this loader; saved recipes of another size are left out.
    """

    def __init__(self, saved: Iterable[Draw], batch_size: int) -> None:
        recipes = list(saved)
        self._saved = deque(recipes if all(len(draw.ids) == batch_size for draw in recipes) else ())
        self._under_way = deque[Draw]()

    @property
    def saved(self) -> int:
        """How many recipes that were saved are left."""
        return len(self._saved)

    def next_held(self, held: Held) -> Draw | None:
        """Return the next recipe that was saved, if everything that it names is still held."""
        try:
            draw = self._saved.popleft()
            held.require_drawn(draw)
        except (IndexError, TransitionIdError):
            return None
        return draw

    def begin(self, draw: Draw) -> None:
        """Note that a batch is under way; under the memory's lock, so that a save knows of every draw."""
        self._under_way.append(draw)

    def give_up(self) -> None:
        """Note that the last batch was not begun after all."""
        self._under_way.pop()

    def forget(self, under_way: int) -> None:
        """Note that only so many batches are still under way: the oldest were handed out."""
        while len(self._under_way) > under_way:
            self._under_way.popleft()

    def state(self) -> list[dict[str, Any]]:
        """Describe all batches that will be handed out next and are drawn already, in this order."""
        return [_words(draw) for draw in (*self._under_way, *self._saved)]


class Prefetched:
    """What the loaders of one memory have under way.

    Args:
        saved: What `state` returned, by loader of the memory that was saved; goals get this reward function.
    """

    def __init__(self, saved: Any = (), reward_fn: RewardFunction | None = None) -> None:
        self._loaders: list[tuple[weakref.ref[Loader], LoaderDraws]] = []
        self._saved = deque([_draw(words, reward_fn) for words in loader] for loader in saved)

    def new_loader(
        self,
        batches: Batches,
        look_up: Callable[[LoaderDraws], tuple[Draw, DrawnRows]],
        batch_size: int,
        prefetch: int,
        finish: Callable[[], None] | None,
    ) -> Loader:
        """Make a loader, and remember the recipes of its batches.

        Args:
            look_up: Begins the next recipe, one that was saved if any is left; returns it, and where its rows are.
            finish: Called when the loader is closed.
        """
        batches.keep(prefetch + 2)
        draws = LoaderDraws(self._saved.popleft() if self._saved else (), batch_size)

        def start() -> BatchJob:
            draw, rows = look_up(draws)
            try:
                return batches.start(draw, rows)
            except BaseException:
                draws.give_up()
                raise

        loader = Loader(start, prefetch, finish, draws.forget)
        self._loaders = self._open_loaders()
        self._loaders.append((weakref.ref(loader), draws))
        loader.begin(draws.saved)  # now: what is added later must not evict a row of them
        return loader

    def _open_loaders(self) -> list[tuple[weakref.ref[Loader], LoaderDraws]]:
        """Return the loaders that may be asked for batches, in the order in which they were made."""
        loaders = ((ref(), ref, draws) for ref, draws in self._loaders)
        return [(ref, draws) for loader, ref, draws in loaders if loader is not None and not loader.is_closed]

    def state(self) -> list[Any]:
        """Describe what is under way, loader by loader; at the end what was loaded and no loader has taken over yet."""
        taken = [draws.state() for _, draws in self._open_loaders()]
        return [*taken, *([_words(draw) for draw in draws] for draws in self._saved)]


def _words(draw: Draw) -> dict[str, Any]:
    words: dict[str, Any] = {name: getattr(draw, name) for name in _ARRAYS}
    goals = draw.goals
    if goals is not None:
        words["goals"] = {"rows": goals.rows, "ids": goals.ids, "keys": [goals.achieved_key, goals.desired_key]}
    return words


def _draw(words: Mapping[str, Any], reward_fn: Any) -> Draw:
    arrays = {name: words[name] for name in _ARRAYS}
    for name, dtype in _ARRAYS.items():
        array = arrays[name]
        if array is None and name not in {"ids", "weights"}:
            continue
        if not isinstance(array, np.ndarray) or (dtype is not None and array.dtype != np.dtype(dtype)):
            raise DamageError(f"the {name} of a prefetched batch are no array of {dtype}")
        if array.ndim < 1 or len(array) != len(arrays["ids"]):
            raise DamageError(f"the {name} of a prefetched batch have shape {array.shape}, not a row an id")
    goals = words.get("goals")
    if goals is None:
        return Draw(**arrays)
    rows, ids = np.asarray(goals["rows"], np.int64), np.asarray(goals["ids"], np.int64)
    if (
        rows.shape != ids.shape
        or rows.ndim != 1
        or (rows.size and not 0 <= rows.min() <= rows.max() < len(arrays["ids"]))
    ):
        raise DamageError("the goals of a prefetched batch are not of its rows")
    achieved, desired = (str(key) for key in goals["keys"])
    return Draw(**arrays, goals=Goals(rows, ids, achieved, desired, reward_fn))


# ---------------------------------------------------------------- what makes them, and for JAX


def batches_for(
    schema: Schema,
    kernels: Kernels,
    assembler: ObservationAssembler,
    delivery: Delivery,
    store_on_device: bool = False,
    pins: bool = False,
) -> Batches:
    """Return what makes batches for a delivery.

    Args:
        store_on_device: Keep all rows on the delivery's device, where there is room, and make batches of them there.
        pins: Whether raw blocks may be pinned; they then stay a while longer than they are needed.
    """
    plain, device = HostBatches(schema, assembler, delivery), delivery.torch_device
    batches: Batches = plain
    if device is not None and (store_on_device or delivery.is_remote):
        torch = delivery.torch
        sent = DeviceBatches(schema, plain, stream_to(torch, device), kernels, torch, pins)
        batches = MirroredBatches(schema, sent, assembler) if store_on_device else sent
    to_jax: Any = JaxBatches(batches)
    return to_jax if delivery.is_jax else batches


class JaxBatches:
    """Makes batches as another does, and hands them to JAX; in all else it is the other one."""

    takes_arrays = False

    def __init__(self, inner: Batches) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draw(self, sampler: Any, count: int, generator: np.random.Generator, store: Store) -> Batch | None:
        """See `Batches`."""
        batch = self._inner.draw(sampler, count, generator, store)
        return None if batch is None else batch.jax()

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`."""
        return _JaxJob(self._inner.start(draw, drawn))

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """See `Batches`."""
        return self._inner.make(draw, drawn).jax()


class _JaxJob(BatchJob):
    """A batch that JAX gets."""

    def __init__(self, inner: BatchJob) -> None:
        self._inner, self.is_quick = inner, inner.is_quick

    def work(self) -> None:
        """See `BatchJob`."""
        self._inner.work()

    def receive(self) -> Batch:
        """See `BatchJob`."""
        return self._inner.receive().jax()

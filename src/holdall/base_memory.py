"""A memory as a whole: how it is made, locked, saved, loaded and closed; and the short ways in and out, for adapters.

What training calls is in replay.py. The first tensors that are added to a memory with a `store_device` say that
everything lives on their device. From then on the store's rings are there, and batches are made of them, see
`delivery.resident`.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.background import CLOSE_S, left
from holdall.batch import Batch, Draw
from holdall.checkpoint import (
    LOAD_S,
    Attached,
    Loading,
    Progress,
    Restored,
    RowsKey,
    SaveHandle,
    Savers,
    Snapshot,
    autosaved,
    checked_save,
    the_rest_of,
)
from holdall.delivery import (
    Batches,
    BatchJob,
    Delivery,
    ObservationAssembler,
    Prefetched,
    ResidentBatches,
    SlotDraw,
    TensorFit,
    batches_for,
    rings_on,
)
from holdall.errors import ArgumentError, CheckpointError, ClosedError, HoldallError
from holdall.native import kernels_for
from holdall.report import LIVING
from holdall.sampling import (
    Held,
    Sampler,
    childs_generator,
    generator_of,
    generator_state,
    required_sampler,
    restored_generator,
    resume,
    sampler_to_resume,
    sampler_words,
)
from holdall.schema import Schema, require_choice, require_count, require_number, schema_words, whole
from holdall.storage import (
    COST_CAPS,
    BatchReader,
    Budget,
    FastTick,
    FullBlock,
    Rows,
    SliceBlock,
    SpillFolder,
    Store,
    StoreContent,
    Tick,
)
from holdall.units import parse_bytes

_LOG = logging.getLogger("holdall")


class BaseMemory:
    """The part of `ReplayMemory` that has the store and the lock, knows devices, and is saved and loaded.

    Its arguments are those of `ReplayMemory`.
    """

    _tensor_fit: TensorFit | None = None  # of a memory that lives on its device
    _resident: ResidentBatches | None = None  # the same one's batches
    # These two do nothing before the first tick, or batch, that goes the general way; for adapters.
    add_at_once: Callable[..., int] = staticmethod(FastTick.add)  # adds a tick in one step
    draw_at_once: Callable[..., Any] = staticmethod(BatchReader.draw)  # draws a batch in one step
    fork_lock = property(operator.attrgetter("_lock"), doc="See `Tracked`.")

    def __init__(
        self, observation_space: spaces.Space[Any] | Schema, action_space: spaces.Space[Any] | None,
        capacity: float = 1_000_000, num_envs: int = 1,
        *,
        budget: str | int | None = "auto", prefer: str = "balanced", spill_dir: str | os.PathLike[str] | None = None,
        device: str | None = None, store_device: str | None = None, seed: int | None = None,
        extras: Mapping[str, spaces.Space[Any]] | None = None, sampler: Sampler | None = None,
        reward_shape: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        capacity = whole(capacity)
        if isinstance(observation_space, Schema):
            schema = observation_space
        else:
            require_count("num_envs", num_envs, 1)
            of_lanes = " (num_envs: it counts transitions over all lanes)"
            capacity = require_count("capacity", capacity, num_envs, of_lanes)
            schema = Schema.of(observation_space, action_space, extras, num_envs, reward_shape)
        settings: dict[str, Any] = {
            "budget": budget, "prefer": prefer, "spill_dir": spill_dir, "device": device, "store_device": store_device,
        }  # fmt: skip
        self.schema, self.num_envs = schema, schema.num_envs
        self.capacity = int(capacity) // schema.num_envs * schema.num_envs  # transitions: whole ticks, over all lanes
        self._settings, self._kernels = settings, kernels_for(os.environ.get("HOLDALL_KERNELS", ""))
        self.spill_dir, self._generator = spill_dir, generator_of(seed)
        self.sampler = required_sampler(sampler)
        self._lock: Any = threading.RLock()  # entered once: see `_locked`
        self._prefetched: Prefetched | None = None  # made with the first loader
        self._elsewhere: dict[str, Batches] = {}  # by device, beside the memory's own
        self._savers, self._attached = Savers(self._kernels.coder), Attached()
        self._parents: list[Any] = []  # what a forked child must neither use nor close
        self._autosave: Any = None  # both are ended by `close`
        self._fetch: Any = None
        if device is not None or store_device is not None:
            self._delivery = Delivery.of(device, store_device, schema.leaves)  # now: it may be refused
        require_choice("prefer", prefer, COST_CAPS)
        limit = None if budget is None or budget == "auto" else parse_bytes(budget, "budget")
        self._budget = Budget(limit, budget == "auto", spill_dir is not None, COST_CAPS[prefer])
        if "HOLDALL_THREADS" in os.environ:
            _ = self._budget.threads  # now: it may be refused
        folder = None if spill_dir is None else SpillFolder(spill_dir, self._kernels.coder)
        try:
            ticks = self.capacity // schema.num_envs
            self._store: Store | None = Store(schema, ticks, self._kernels, self._lock, self._budget, folder)
        except (OSError, OverflowError, MemoryError) as error:
            raise ArgumentError(
                f"capacity ({self.capacity}) takes more address space than this machine gives ({error}); lower it"
            ) from error
        LIVING.add(self)

    def _open(self) -> Store:
        if self._store is None:
            raise ClosedError("the memory was closed; make a new ReplayMemory")
        return self._store

    def _whole(self) -> Store:
        store = self._open()
        if store.repair.is_pending[0]:
            store.repair.run()
        return store

    def _held(self, store: Store) -> Held:
        first, end = store.first_tick * self.num_envs, store.next_tick * self.num_envs
        return Held(first, end, self.num_envs, self.capacity, store)

    def _locked(self) -> Any:
        if self._lock._is_owned():
            self._leave_interrupted()
        return self._lock

    def _leave_interrupted(self) -> None:
        """Release the lock for a call of this thread that was interrupted where it was about to do so.

        Refuse to go on if the call is still under way: a signal handler, or a sampler, called the memory from inside.
        """
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_locals.get("self") is self:
            frame = frame.f_back
        while frame is not None:
            if frame.f_locals.get("self") is self:
                raise HoldallError(
                    "the memory was called from inside one of its own calls; let signal handlers and samplers do "
                    "without it, and call it when they have returned"
                )
            frame = frame.f_back
        left(self._lock)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return self._open().first_tick * self.num_envs

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self._open().next_tick * self.num_envs

    def drain(self) -> None:
        """Wait until no block waits to be compressed or spilled; for measurements and tests."""
        with self._locked():
            sealer = self._whole().sealer
        if sealer is not None:
            sealer.drain()

    def arrays(self) -> list[tuple[str, NDArray[Any]]]:
        """Return every array held, by field; let go of them at once, since an array that is looked at is not reused."""
        with self._locked():
            if self._store is None:
                return []
            staged = [*self._assembler.staging.arrays(), *self._store.batch_reader.arrays()]
            return [*self._store.arrays(), *(("staging", block) for block in staged)]

    @property
    def fill(self) -> float:
        """How full the memory is, of 1."""
        store = self._store
        return 0.0 if store is None else (store.next_tick - store.first_tick) * self.num_envs / self.capacity

    @functools.cached_property
    def _delivery(self) -> Delivery:
        return Delivery.of(self._settings["device"], self._settings["store_device"], self.schema.leaves)

    @functools.cached_property
    def _assembler(self) -> ObservationAssembler:
        return ObservationAssembler(self._kernels, self._budget.staging_bytes // 2, self._budget.threads)

    @functools.cached_property
    def _batches(self) -> Batches:
        return self._resident or self._batches_to(
            self._delivery, store_on_device=self._settings["store_device"] is not None
        )

    def _batches_on(self, device: str) -> Batches:
        """Return what makes batches for another device than the memory's own."""
        if device not in self._elsewhere:
            self._elsewhere[device] = self._batches_to(Delivery(device, self.schema.leaves))
        return self._elsewhere[device]

    def _batches_to(self, delivery: Delivery, *, store_on_device: bool = False) -> Batches:
        pins = self._budget.limit is None
        return batches_for(self.schema, self._kernels, self._assembler, delivery, store_on_device, pins)

    def _close_batches(self) -> None:
        """End the threads that make batches, and release what is pinned."""
        while self._elsewhere:
            self._elsewhere.popitem()[1].close()
        for made in {"_batches", "_assembler"} & vars(self).keys():
            getattr(self, made).close()

    def add_as_is(self, *arguments: Any) -> int:
        """Add a tick the short way, if it has one; return how many were added in all, or 0 if not; for adapters.

        Args:
            arguments: Those of `add_at_once`, which was tried before.
        """
        store = self._store
        fast = None if store is None else vars(store).get("fast_tick")  # made under the lock, with the first tick
        packed = None if fast is None else fast.pack(*arguments)
        if store is None or not packed:
            return 0
        store.wait_for_room()
        with self._locked():
            if self._store is not store or not store.fast_tick.is_open:
                return 0
            return max(store.write_fast(packed, arguments[0], arguments[3]), 0)

    def draw_on(self, device: str, count: int, rows: SlotDraw, *, ahead: bool) -> BatchJob | None:
        """Draw rows and begin a batch of them on a device in one step, if there is such a way; for adapters."""
        with self._locked():
            store = self._whole()
            return self._batches_on(device).draw_slots(rows, count, store, ahead=ahead)

    def follow(self, draw: Draw, device: str | None = None) -> Batch:
        """Return the batch that a recipe describes, on the memory's device or another; for adapters."""
        return self.begin(draw, device, ahead=False).receive()

    def begin(self, draw: Draw, device: str | None = None, *, ahead: bool = True) -> BatchJob:
        """Begin such a batch, before it is wanted if `ahead`; for adapters."""
        with self._locked():
            store = self._whole()
            if type(draw) is not Draw or not store.all_valid:
                self._held(store).require_drawn(draw)
            batches = self._batches if device is None else self._batches_on(device)
            drawn = batches.look_up(draw, store, ahead=ahead)
        (job := batches.start(draw, drawn)).work()
        return job

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """Return copies of all fields of held and valid `ids`, as arrays; for adapters."""
        with self._locked():
            store = self._whole()
            rows = store.read(ids, self._assembler.staging.take)
            store.offer_batches(len(ids))
            self.draw_at_once = store.batch_reader.draw
        return self._assembler.complete(rows, self.schema.observation.leaves)

    @property
    def _staged_bytes(self) -> int:
        return self._assembler.staging.nbytes + self._batches.pinned_bytes + self._open().batch_reader.nbytes

    def _move_to_device(self, fit: TensorFit, steps: Tick | None) -> None:
        """Let everything live on the store's device; nothing was added yet."""
        ticks = self.capacity // self.num_envs
        rings: Any = rings_on(fit, self.schema, ticks, self._budget.limit, steps)
        budget = replace(self._budget, limit=None, spills=False)  # the limit was one of the device
        store = Store(self.schema, ticks, self._kernels, self._lock, budget, None, large=(), rings=rings)
        before, batches = self._open(), ResidentBatches(self.schema, rings, self.capacity)
        # In one step, since an interrupt may come between any two; `_batches` were those of the host.
        here = {"_store": store, "add_at_once": store.fast_tick.add, "draw_at_once": store.batch_reader.draw}
        vars(self).update(here, _tensor_fit=fit, _resident=batches, _batches=batches)
        before.close()

    def _choose_home(self, content: StoreContent | None) -> None:
        """Move to the store's device what was saved, if nothing of it is compressed."""
        if self._settings["store_device"] is not None and content is not None and not content.large:
            self._move_to_device(TensorFit(self._delivery, self.schema), None)

    # ------------------------------------------------------------ checkpoints

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
        location, files = checked_save(url, attach, progress)
        saver = self._savers.to(location)
        return saver.save(lambda saved: self._snapshot(saved, files), int(keep), progress, mirror)

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
        autosave = autosaved(self, self._savers, url, seconds, transitions, keep, mirror)
        before, self._autosave = self._autosave, autosave
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
        settings = {
            "budget": budget, "prefer": prefer, "spill_dir": spill_dir, "device": device, "store_device": store_device,
        }  # fmt: skip
        loading: Loading[Any] = Loading(cls, settings, sampler, whole(capacity), num_envs, recover)
        memory: Self = loading.load(url, timeout)
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
            try:
                for background in (self._autosave, self._fetch):
                    if background is not None:
                        background.stop()
            finally:
                self._savers.close(timeout)
            self._autosave = self._fetch = None
        except CheckpointError:
            self._free()
            raise
        self._free()

    def _free(self) -> None:
        """Free everything, whatever became of saves."""
        with self._locked():
            if self._store is not None:
                self._store.end_writing()
            store, self._store = self._store, None
        if store is not None:  # an interrupt leaves it to be freed with the last that refers to it
            store.close()
        self._close_batches()

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

    def after_fork(self) -> None:
        """In a child, draw other batches than the parent, and leave its checkpoints to it."""
        self._generator = childs_generator(self._generator)
        self._savers.after_fork()
        self._parents += [self._savers, self._autosave, self._fetch]
        self._savers, self._autosave, self._fetch = Savers(self._kernels.coder), None, None

    def take_over(self, found: Restored, sampler: Sampler | None) -> None:
        """Become what was saved, in a memory as it was made; for `load`."""
        self._choose_home(found.content)
        with self._locked():
            found.fill(self._whole())
        self._generator = restored_generator(found.state["generator"])
        saved = found.state["sampler"]
        self.sampler = sampler_to_resume(sampler, saved, goes_on=found.content is not None)
        first_id = self._open().first_tick * self.num_envs
        continues = found.content is not None and resume(self.sampler, saved, self.capacity, first_id)
        if continues and (recipes := found.state.get("prefetched")):
            self._prefetched = Prefetched(recipes, getattr(self.sampler, "reward_fn", None))
        if found.saved is not None:  # then the next save writes only what is new
            self._savers.to(found.url, found.saved)
        self._fetch, self._attached = None if found.waiting is None else the_rest_of(found), found.attached

    def _snapshot(self, saved: Mapping[int, RowsKey], attach: Mapping[str, Path | bytes]) -> Snapshot:
        with self._locked():
            if self._resident is not None:
                self._resident.bring_back()
            store = self._whole()
            frozen = store.freeze(saved)
            state = {
                "sampler": {**sampler_words(self.sampler), "state": self.sampler.state()},
                "generator": generator_state(self._generator),
                "prefetched": [] if self._prefetched is None else self._prefetched.state(),
            }
            described = schema_words(self.schema), self.capacity // self.num_envs
            return Snapshot(frozen, *described, state, attach, self._lock, store.release, store.take_again)

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the blocks that are full and not known yet, newest first; for autosaves."""
        with self._locked():
            return self._whole().full_blocks(is_known)

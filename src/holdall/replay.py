"""ReplayMemory: exact off-policy experience in a fraction of the memory.

The flow, one stage a file:

    add    -> schema (check) -> store -> ring | window, segment, part (write)
    sample -> sampling (recipe) -> store -> ring | segment, part (copy) -> assemble, build (batch)

Invariant: `gather(ids)` returns bit for bit what `add` was given. An argument that does not
fit is refused before anything is written.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.checkpoint.background import Arrival, Autosave, Progress, SaveHandle, SaveInterval
from holdall.checkpoint.load import Attached, Restored
from holdall.checkpoint.save import Snapshot
from holdall.checkpoint.saver import Savers, checked_attachments
from holdall.checkpoint.source import Loading, normalized_url, open_reader
from holdall.delivery.batches import Batches
from holdall.delivery.host import BatchJob, Delivery, ObservationAssembler, of_ids
from holdall.delivery.loader import Loader, Prefetched
from holdall.errors import ArgumentError, ClosedError, HoldallError
from holdall.json_state import (
    generator_of,
    generator_state,
    restored_generator,
    schema_words,
)
from holdall.native.kernels import chosen_kernels
from holdall.report import MemoryReport, enlist
from holdall.sampling.draw import Held, Sampler, Uniform, as_ids, require_number
from holdall.sampling.episodic import Hindsight, NStep, Sequence
from holdall.sampling.prioritized import Prioritized
from holdall.schema import Leaf, Schema, as_array, fit_flags
from holdall.storage.blocks import SliceBlock
from holdall.storage.snapshot import FullBlock, Tick
from holdall.storage.spill import SpillFolder
from holdall.storage.store import Store
from holdall.storage.tiers import Budget
from holdall.threads import ThreadPool
from holdall.units import require_count

_SETTINGS = ("schema", "capacity_ticks", "device", "budget", "prefer", "spill_dir", "store_device")
_OWN_SAMPLERS = frozenset([Uniform, Prioritized, NStep, Sequence, Hindsight])
"""Samplers whose tests show that they draw what is held alone; what others draw is checked."""


class ReplayMemory:
    """Replay memory for `num_envs` lanes that advance together.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple.
        action_space: The same.
        capacity: Transitions over all lanes; rounded down to whole ticks, see `capacity`.
        num_envs: Lanes: the leading axis of everything that is added.
        budget: RAM that may be used: "8GiB" or bytes is a limit over everything that the memory holds; "auto" leaves
            the newest transitions raw, up to a quarter of what is available now, and compresses the rest; None
            compresses all.
        prefer: How dear sampling compressed data may be, over a raw gather: "speed" 1.2 times,
            "balanced" 2 times, "memory" 4 times.
        spill_dir: Where the oldest compressed transitions go that the budget does not hold; None: nowhere. Without
            it, transitions that do not fit a limit leave before their time, see `report().capacity_that_fits`.
        device: None for NumPy batches; "cpu" or "cuda" for torch tensors there.
        store_device: "cuda" keeps every slice there, uncompressed, and makes batches of them; the host keeps
            what `budget` says, for saving. For those whose memory fits on their GPU.
        seed: Seeds the sampler's generator.
        extras: Further fields per transition, by name.
        sampler: How `sample` draws; `Uniform()` by default.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        capacity: int = 1_000_000,
        num_envs: int = 1,
        *,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        device: str | None = None,
        store_device: str | None = None,
        seed: int | None = None,
        extras: Mapping[str, spaces.Space[Any]] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        require_count("num_envs", num_envs, 1)
        require_count("capacity", capacity, num_envs, " (num_envs: it counts transitions over all lanes)")
        schema = Schema.of(observation_space, action_space, extras, num_envs)
        self._set_up(schema, capacity // num_envs, device, budget, prefer, spill_dir, store_device)
        self._generator = generator_of(seed)
        self._sampler: Sampler = Uniform() if sampler is None else sampler

    def _set_up(
        self,
        schema: Schema,
        capacity_ticks: int,
        device: str | None,
        budget: str | int | None,
        prefer: str,
        spill_dir: str | os.PathLike[str] | None,
        store_device: str | None,
    ) -> None:
        self._schema = schema
        self._lanes = schema.num_envs
        self._capacity_ticks = capacity_ticks
        self._device, self._store_device = device, store_device
        self._delivery = Delivery.of(device, store_device, schema.leaves)
        kernels = chosen_kernels()
        self._lock = threading.Lock()
        self._savers = Savers(kernels.coder)
        self._attached = Attached()
        self._autosave: Autosave | None = None
        self._arrival: Arrival | None = None
        self._prefetched = Prefetched()
        self._budget, self._prefer, self._spill_dir = budget, prefer, spill_dir
        crew = ThreadPool()
        allowed = Budget.of(budget, prefer, crew.hands, spills=spill_dir is not None)
        self._limit = allowed.limit
        self._assembler = ObservationAssembler(kernels, crew, allowed.staging_bytes)
        self._batches = Batches(
            schema,
            kernels,
            self._assembler,
            self._delivery,
            mirrored=store_device is not None,
            pins=allowed.limit is None,
        )
        folder = None if spill_dir is None else SpillFolder(spill_dir, kernels.coder)
        try:
            self._store: Store | None = Store(schema, capacity_ticks, kernels, self._lock, allowed, folder)
        except (OSError, OverflowError, MemoryError) as error:
            raise ArgumentError(
                f"capacity ({capacity_ticks * self._lanes}) takes more address space than this machine gives "
                f"({error}); lower it"
            ) from error
        enlist(self)

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Mapping[str, Any] | None = None,
        valid: Any = None,
    ) -> None:
        """Add one transition per lane; every array has a leading axis of `num_envs`.

        Args:
            next_obs: The true next observation: at the end of an episode its final one, not the
                first of the next episode.
            valid: Lanes marked False made no transition (the step after an episode's end in
                Gymnasium's next-step autoreset); they are never sampled and not counted.
        """
        if extras is None and valid is None and self.add_as_is(obs, action, reward, next_obs, terminated, truncated):
            return
        with self._lock:
            store = self._open()
            store.write(self._fit((self._lanes,), obs, action, reward, next_obs, terminated, truncated, extras, valid))
        store.sealer.wait_for_room()

    def add_as_is(self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any) -> bool:
        """Add a tick the short way, if there is one and every argument fits; say whether it was.

        For adapters that would otherwise look at every array once more than `add` does.
        """
        store = self._store
        if store is None or (quick := store.quick) is None:
            return False
        if not quick.fits(obs, action, reward, next_obs, terminated, truncated):
            return False
        with self._lock:
            if self._store is not store or store.quick is not quick:
                return False
            now = store.next_tick
            quick.write(now, obs, action, reward, next_obs, terminated, truncated)
            store.next_tick = now + 1
        if quick.fills_blocks:
            store.sealer.wait_for_room()
        return True

    def extend(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Mapping[str, Any] | None = None,
        valid: Any = None,
    ) -> None:
        """Add whole trajectories: the same as `add`, with a leading time axis before the lanes.

        Everything is checked before the first step is written.
        """
        leading = (_length_of(reward), self._lanes)
        with self._lock:
            store = self._open()
            steps = self._fit(leading, obs, action, reward, next_obs, terminated, truncated, extras, valid)
            written = self._write_steps(store, steps, 0)
        while written < leading[0]:
            store.sealer.wait_for_room()
            with self._lock:
                written = self._write_steps(self._open(), steps, written)

    def _write_steps(self, store: Store, steps: Tick, first: int) -> int:
        """Write steps from `first` on until blocks pile up; return the first that is left."""
        for t in range(first, len(steps.reward)):
            store.write(steps.cut(t))
            if store.sealer.is_crowded:
                return t + 1
        return len(steps.reward)

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions with the memory's sampler."""
        require_count("batch_size", batch_size, 1)
        with self._lock:
            store = self._open()
            draw = self._draw(store, self._require_enough(store, batch_size))
            reading = self._batches.look_up(draw, store)
        return self._batches.make(draw, reading)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        return self.follow(of_ids(as_ids(ids)))

    def loader(self, batch_size: int, prefetch: int = 2, device: str | None = None) -> Loader:
        """Return an endless iterator over batches of `batch_size`, made ahead in the background.

        A batch is drawn when the one `prefetch` before it is asked for, in that very call, so one seed gives one
        sequence of batches. Transitions added and priorities told since then are not in it: it is `prefetch`
        batches old, and never more. With `prefetch=0` it is what `sample` would return.

        Args:
            prefetch: Batches under way besides the one asked for; each takes the memory of a batch.
            device: Where batches are wanted; the memory's own device by default.
        """
        require_count("batch_size", batch_size, 1)
        require_count("prefetch", prefetch, 0)
        batches = self._batches
        if device is not None and device != self._device:
            delivery = Delivery(device, self._schema.leaves)
            batches = self._batches.elsewhere(delivery)
        batches.keep(prefetch + 2)

        saved = self._prefetched.saved(batch_size)
        drawn: deque[Draw] = deque(maxlen=prefetch + 1)

        def start() -> BatchJob:
            with self._lock:
                store = self._open()
                draw = self._prefetched.next_of(saved, self._held(store))
                if draw is None:
                    draw = self._draw(store, self._require_enough(store, batch_size))
                reading = batches.look_up(draw, store)
            drawn.append(draw)
            return batches.start(draw, reading)

        loader = Loader(start, prefetch, None if batches is self._batches else batches.dismiss)
        self._prefetched.watch(loader, drawn)
        return loader

    def draw(self, batch_size: int) -> Draw:
        """Draw as `sample` does, more rows than there are if need be, and return the recipe alone; for adapters."""
        require_count("batch_size", batch_size, 1)
        with self._lock:
            return self._draw(self._open(), batch_size)

    def follow(self, draw: Draw) -> Batch:
        """Return the batch that a recipe describes; for adapters that draw by themselves."""
        with self._lock:
            store = self._open()
            self._held(store).require_drawn(draw)
            reading = self._batches.look_up(draw, store)
        return self._batches.make(draw, reading)

    def outcomes(self, ids: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return rewards, terminated and truncated of `ids`, of any shape; no observation is touched."""
        with self._lock:
            store = self._open()
            self._held(store).require(ids)
            return store.outcomes(ids)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Tell the sampler how much it would pay to see transitions again, such as their TD errors' sizes.

        Args:
            ids: Of a batch, as they are; those evicted since are passed over.
            priorities: Numbers of at least 0, one a row of the batch.
        """
        told = as_array(priorities.detach().cpu() if hasattr(priorities, "detach") else priorities, "priorities")
        given = np.asarray(ids)
        wanted = as_ids(given) if given.ndim == 1 else as_ids(given.reshape(-1)).reshape(given.shape)
        update = getattr(self._sampler, "update_priorities", None)
        if update is None:
            raise ArgumentError(
                f"update_priorities was called, but the memory's sampler ({type(self._sampler).__name__}) has no "
                "priorities; construct the memory with sampler=Prioritized(...)"
            )
        with self._lock:
            update(self._held(self._open()), wanted, told)

    def set_flags(self, ids: Any, terminated: Any, truncated: Any) -> None:
        """Say anew how transitions ended: some frameworks cut the last episode afterwards."""
        wanted = as_ids(ids)
        ended = fit_flags(terminated, wanted.shape, "terminated", "one flag per id")
        cut = fit_flags(truncated, wanted.shape, "truncated", "one flag per id")
        with self._lock:
            store = self._open()
            self._held(store).require(wanted)
            store.set_flags(wanted, ended, cut)

    def __len__(self) -> int:
        """Count the transitions that can be sampled."""
        with self._lock:
            return self._open().transitions

    @property
    def capacity(self) -> int:
        """Most transitions that are held: whole ticks, over all lanes."""
        return self._capacity_ticks * self._lanes

    @property
    def num_envs(self) -> int:
        """Lanes."""
        return self._lanes

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return self._open().first_tick * self._lanes

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self._open().next_tick * self._lanes

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field, against the plain layout."""
        with self._lock:
            store = self._open()
            return MemoryReport(
                transitions=store.transitions,
                fields=tuple(store.report()),
                staging_bytes=self._assembler.staging.nbytes + self._batches.pinned_bytes,
                segments=store.segments,
                backlog=store.sealer.backlog,
                failure=store.sealer.failure,
                budget_bytes=self._limit,
                capacity_that_fits=store.capacity_that_fits,
            )

    def arrays(self) -> list[tuple[str, NDArray[Any]]]:
        """Return every array that the memory holds, by field, for a watch that asks where they lie.

        To be let go of at once: an array that somebody looks at is not used again.
        """
        with self._lock:
            if self._store is None:
                return []
            return [*self._store.arrays(), *(("staging", block) for block in self._assembler.staging.arrays())]

    def relieve(self, nbytes: int) -> None:
        """Hold that much less in memory from now on, where that can be done without losing a transition.

        What is raw is compressed, and with a `spill_dir` the oldest goes to disk; in the background, and adding waits
        for it. Called when memory runs short, see `holdall.tools.watch`.
        """
        require_count("nbytes", nbytes, 0)
        with self._lock:
            self._open().large_segments.relieve(int(nbytes))

    @property
    def spill_dir(self) -> str | os.PathLike[str] | None:
        """Where transitions go that the budget does not hold."""
        return self._spill_dir

    @property
    def disk_bytes(self) -> int:
        """Bytes that lie there."""
        with self._lock:
            return 0 if self._store is None else self._store.disk_bytes

    @property
    def fill(self) -> float:
        """How full the memory is, of 1."""
        store = self._store
        return 0.0 if store is None else (store.next_tick - store.first_tick) / self._capacity_ticks

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
            progress: Is told, in the background, of what is written and of the bytes so far.
        """
        require_count("keep", keep, 1)
        files = checked_attachments(attach)
        saver = self._savers.to(normalized_url(url))
        with self._lock:
            store = self._open()
            frozen = store.freeze(saver.rows_saved())
            state = {
                "sampler": {"kind": type(self._sampler).__name__, "state": self._sampler.state()},
                "generator": generator_state(self._generator),
                "prefetched": self._prefetched.state(),
            }
        words = schema_words(self._schema)
        snapshot = Snapshot(frozen, words, self._capacity_ticks, state, files, self._lock, store.release)
        return saver.save(snapshot, int(keep), progress, mirror)

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
            raise ArgumentError("save_every was told neither seconds nor transitions; name one of them, or both")
        pause = None if seconds is None else require_number("seconds", seconds, 0.01)
        if transitions is not None:
            require_count("transitions", transitions, 1)
        require_count("keep", keep, 1)
        self._open()
        if self._autosave is not None:
            self._autosave.stop()
        place, kept = normalized_url(url), int(keep)

        def save(memory: Any) -> SaveHandle:
            handle: SaveHandle = memory.save(place, keep=kept, mirror=mirror)
            return handle

        def write_ahead(memory: Any) -> None:
            memory._write_ahead(place)

        self._autosave = Autosave(self, save, write_ahead, SaveInterval(pause, transitions))

    def _write_ahead(self, place: str) -> None:
        """Have blocks written that are full, for the next checkpoint there."""

        def full_blocks(is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
            with self._lock:
                return self._open().full_blocks(is_known)

        self._savers.to(place).write_ahead(full_blocks)

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
    ) -> Self:
        """Load the newest checkpoint that is whole; the memory goes on exactly where it was saved.

        Compressed and raw blocks stay in their files and are read when they are sampled from. Of an object store,
        what a batch needs is fetched when it is drawn, and the rest meanwhile, to temporary files or `spill_dir`.

        Args:
            url: Where it was saved.
            capacity: Transitions to hold, if not as many as before; the newest are kept.
            sampler: One with the settings of the saved memory's, which goes on with the saved priorities and the like;
                one of another kind starts anew. None: `Uniform()`.
            num_envs: Lanes, if not as many as before. Every transition is then added anew, under a new id; where a
                lane's stream is cut, the last transition before is marked as truncated; samplers start anew.
            recover: Take the newest checkpoint even if records of it are damaged: transitions that touch them count as
                none, all others are loaded, and the log says what is lost. Everything is read for that.
        """
        if num_envs is not None:
            require_count("num_envs", num_envs, 1)

        def make(schema: Schema, ticks: int, is_final: bool) -> Self:  # type: ignore[type-var]  # it is the class's own
            memory = cls.__new__(cls)
            memory._set_up(schema, ticks, device if is_final else None, budget, prefer, spill_dir, None)
            return memory

        loading: Loading[Self] = Loading(make, cls._take_over, sampler, capacity, num_envs, recover)
        return loading.load(open_reader(url, spill_dir))

    @property
    def schema(self) -> Schema:
        """What a transition consists of."""
        return self._schema

    def are_valid(self, ids: Any) -> NDArray[np.bool_]:
        """Tell which of some held ids are transitions: lanes added with valid=False made none."""
        wanted = as_ids(ids)
        with self._lock:
            return self._open().are_valid(wanted)

    @property
    def sampler(self) -> Sampler:
        """How `sample` draws."""
        return self._sampler

    @property
    def attached(self) -> Attached:
        """Files that were saved with the memory that this one was loaded from, by name."""
        return self._attached

    def drain(self) -> None:
        """Wait until everything that is to be compressed or spilled is; for measurements and tests."""
        self._open().sealer.drain()

    def close(self) -> None:
        """Free everything; batches that were handed out stay as they are."""
        autosave, self._autosave = self._autosave, None
        if autosave is not None:
            autosave.stop()
        self._savers.close()
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.stop()
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()
        self._assembler.crew.dismiss()
        self._batches.dismiss()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the content as arrays that pickle protocol 5 writes without copying them."""
        with self._lock:
            store = self._open()
            return {
                "schema": self._schema,
                "capacity_ticks": self._capacity_ticks,
                "device": self._device,
                "store_device": self._store_device,
                "budget": self._budget,
                "prefer": self._prefer,
                "spill_dir": self._spill_dir,
                "generator": self._generator,
                "sampler": self._sampler,
                "store": store.state(),
                "unchanged": _Unchanged(store),  # last: it is written when all the rest was
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = (state[name] for name in _SETTINGS)
        self._set_up(*settings)
        self._generator, self._sampler = state["generator"], state["sampler"]
        with self._lock:  # the sealer may be at the first block before all are taken over
            self._open().restore(state["store"])

    def _fit(self, leading: tuple[int, ...], *arguments: Any) -> Tick:
        """Check every argument; nothing is written if one does not fit."""
        reward_dtype = self._open().reward_dtype
        tick = Tick.fitted(self._schema, leading, reward_dtype, *arguments)
        if reward_dtype is None:
            self._delivery.require(Leaf("reward", (), tick.reward.dtype))
        return tick

    def _require_enough(self, store: Store, batch_size: int) -> int:
        if batch_size > store.transitions:
            raise ArgumentError(
                f"batch_size ({batch_size}) is more than the {store.transitions} transitions "
                "held; add more first, or draw a smaller batch"
            )
        return batch_size

    def _draw(self, store: Store, count: int) -> Draw:
        if store.transitions == 0:
            raise ArgumentError(f"batch_size ({count}) is more than the 0 transitions held; add some first")
        held = self._held(store)
        draw = self._sampler.draw(held, count, self._generator)
        if type(self._sampler) not in _OWN_SAMPLERS:
            held.require_drawn(draw)
        return draw

    def _take_over(self, found: Restored, sampler: Sampler | None) -> None:
        """Become what was saved."""
        with self._lock:
            store = self._open()
            found.fill(store)
        self._generator = restored_generator(found.state["generator"])
        saved = found.state["sampler"]
        self._sampler = Uniform() if sampler is None else sampler
        if sampler is None and saved["kind"] != type(self._sampler).__name__:
            raise ArgumentError(
                f"sampler was not given, and the checkpoint was saved with {saved['kind']}; pass "
                f"sampler={saved['kind']}(...) with its settings, or another one to start anew"
            )
        if found.content is not None and type(self._sampler).__name__ == saved["kind"]:
            self._sampler.restore(saved["state"])
            self._prefetched.restore(found.state.get("prefetched", []), getattr(self._sampler, "_reward_fn", None))
            for one in (self._sampler, getattr(self._sampler, "by", None)):
                if isinstance(one, Prioritized):
                    one.resize(self.capacity, store.first_tick * self._lanes)
        if found.ledger is not None:
            self._savers.to(found.url, found.ledger)
        self._arrival = Arrival(found.blocks, found.interrupt)
        self._attached = found.attached

    def _open(self) -> Store:
        if self._store is None:
            raise ClosedError("the memory was closed; make a new ReplayMemory")
        return self._store

    def _held(self, store: Store) -> Held:
        first, end = store.first_tick * self._lanes, store.next_tick * self._lanes
        return Held(first, end, self._lanes, self._capacity_ticks * self._lanes, store)


class _Unchanged:
    """Refuses to be pickled once its store was added to: what was written before is torn then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next_tick = store.next_tick

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        if self._store.next_tick != self._next_tick:
            raise HoldallError(
                f"the memory was added to while it was pickled ({self._store.next_tick - self._next_tick} ticks), so "
                "what was written is not one moment; throw it away, hold the adding threads, and save again"
            )
        return bool, ()


def _length_of(reward: Any) -> int:
    shape = as_array(reward, "reward").shape
    if not shape:
        raise ArgumentError("reward is a scalar; extend takes arrays with a leading time axis")
    return int(shape[0])

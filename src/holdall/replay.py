"""ReplayMemory: exact off-policy experience in a fraction of the memory.

    add    -> storage: layout (check) -> store -> rings | segment, slices (write) -> tiers, sealer (compress, spill)
    sample -> sampling (recipe) -> storage: store -> rings | segment (find) -> delivery (batch)

Invariant: `gather(ids)` returns bit for bit what `add` was given. What does not fit is refused before it is written.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.checkpoint import Loading, Restored, RowsKey, SavedMemory, Snapshot, open_reader
from holdall.delivery import Delivery, DrawnRows, Loader, ObservationAssembler, Prefetched, batches_for, of_ids
from holdall.errors import ArgumentError, ClosedError
from holdall.json_state import generator_of, generator_state, restored_generator, schema_words
from holdall.native import chosen_kernels
from holdall.report import MemoryReport, enlist
from holdall.sampling import (
    Held,
    Sampler,
    Uniform,
    drawn_from,
    priorities_of,
    resume,
    reward_function_of,
    sampler_to_resume,
)
from holdall.schema import Leaf, Schema, as_array, as_ids, fit_flags, require_held
from holdall.storage import Budget, FullBlock, SliceBlock, SpillFolder, Store, Tick, UnchangedStore, steps_in
from holdall.threads import ThreadPool
from holdall.units import require_count


class ReplayMemory(SavedMemory):
    """Replay memory for `num_envs` lanes that advance together. All methods may be called from any thread.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple. Or the schema of
            another memory, which says all that this, `action_space`, `num_envs` and `extras` would.
        action_space: The same.
        capacity: Transitions over all lanes; rounded down to whole ticks, see `capacity`.
        num_envs: Lanes: the leading axis of everything that is added.
        budget: RAM that may be used: "8GiB" or bytes is a limit over everything that the memory holds; "auto" leaves
            the newest transitions raw, up to a quarter of what is available now, and compresses the rest; None
            compresses all.
        prefer: How much longer sampling may take when data is compressed: "speed" 1.2 times as long as without,
            "balanced" 2 times, "memory" 4 times.
        spill_dir: Where the oldest compressed transitions go that the budget does not hold; None: nowhere. Without
            it, the oldest are dropped early when a limit is reached, see `report().capacity_that_fits`.
        device: None for NumPy batches; "cpu" or "cuda" for torch tensors there.
        store_device: "cuda" keeps every slice there, uncompressed, and makes batches of them; the host keeps
            what `budget` says, for saving. For those whose memory fits on their GPU.
        seed: Seeds the sampler's generator.
        extras: Further fields per transition, by name.
        sampler: How `sample` draws; `Uniform()` by default.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | Schema,
        action_space: spaces.Space[Any] | None,
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
        if isinstance(observation_space, Schema):
            schema = observation_space
        else:
            require_count("num_envs", num_envs, 1)
            require_count("capacity", capacity, num_envs, " (num_envs: it counts transitions over all lanes)")
            schema = Schema.of(observation_space, action_space, extras, num_envs)  # type: ignore[arg-type]  # it says so
        kernels, pool = chosen_kernels(), ThreadPool()
        super().__init__(kernels.coder)
        self.schema = schema
        self.num_envs = schema.num_envs
        self._capacity_ticks = capacity // schema.num_envs
        self.capacity = self._capacity_ticks * schema.num_envs  # transitions: whole ticks, over all lanes
        self.spill_dir = spill_dir
        self.sampler: Sampler = Uniform() if sampler is None else sampler
        self._settings = {
            "budget": budget, "prefer": prefer, "spill_dir": spill_dir, "device": device, "store_device": store_device,
        }  # fmt: skip
        self._delivery = Delivery.of(device, store_device, schema.leaves)
        self._lock = threading.Lock()
        self._generator = generator_of(seed)
        self._prefetched = Prefetched()
        allowed = Budget.of(budget, prefer, pool.threads, spills=spill_dir is not None)
        self._limit = allowed.limit
        self._kernels = kernels
        self._assembler = ObservationAssembler(kernels, pool, allowed.staging_bytes)
        on_device, pins = store_device is not None, allowed.limit is None
        self._batches = batches_for(
            schema, kernels, self._assembler, self._delivery, store_on_device=on_device, pins=pins
        )
        folder = None if spill_dir is None else SpillFolder(spill_dir, kernels.coder)
        try:
            self._store: Store | None = Store(schema, self._capacity_ticks, kernels, self._lock, allowed, folder)
        except (OSError, OverflowError, MemoryError) as error:
            raise ArgumentError(
                f"capacity ({self.capacity}) takes more address space than this machine gives ({error}); lower it"
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
            store.write(
                self._fit((self.num_envs,), obs, action, reward, next_obs, terminated, truncated, extras, valid)
            )
        store.sealer.wait_for_room()

    def add_as_is(self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any) -> bool:
        """Add a tick the short way, if there is one and every argument fits; say whether it was.

        For adapters that would otherwise look at every array once more than `add` does.
        """
        store = self._store
        fast = None if store is None else store.fast_tick
        if store is None or fast is None or not fast.fits(obs, action, reward, next_obs, terminated, truncated):
            return False
        with self._lock:
            if self._store is not store or store.fast_tick is not fast:
                return False
            now = store.next_tick
            fast.write(now, obs, action, reward, next_obs, terminated, truncated)
            store.next_tick = now + 1
        if fast.fills_blocks:
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
        with self._lock:
            leading = (steps_in(reward), self.num_envs)
            steps = self._fit(leading, obs, action, reward, next_obs, terminated, truncated, extras, valid)
            written = self._open().write_steps(steps, 0)
        while written < leading[0]:
            self._open().sealer.wait_for_room()
            with self._lock:
                written = self._open().write_steps(steps, written)

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions with the memory's sampler."""
        require_count("batch_size", batch_size, 1)
        with self._lock:
            store = self._open()
            draw = self._draw(store, batch_size, batch_size)
            reading = self._batches.look_up(draw, store)
        return self._batches.make(draw, reading)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        return self.follow(of_ids(as_ids(ids)))

    def loader(self, batch_size: int, prefetch: int = 2, device: str | None = None) -> Loader:
        """Return an endless iterator over batches of `batch_size`, made ahead in the background.

        A batch is drawn when the one `prefetch` before it is asked for, in that very call, so one seed gives one
        sequence of batches. What is added or prioritised later is not in it. `prefetch=0` is as `sample`.

        Args:
            prefetch: Batches under way besides the one asked for; each takes the memory of a batch.
            device: Where batches are wanted; the memory's own device by default.
        """
        require_count("batch_size", batch_size, 1)
        require_count("prefetch", prefetch, 0)
        batches, finish = self._batches, None
        if device is not None and device != self._settings["device"]:
            delivery = Delivery(device, self.schema.leaves)
            batches = batches_for(self.schema, self._kernels, self._assembler, delivery, pins=self._limit is None)
            finish = batches.close

        def look_up(saved: deque[Draw]) -> tuple[Draw, DrawnRows]:
            with self._lock:
                store = self._open()
                draw = self._prefetched.next_of(saved, self._held(store))
                if draw is None:
                    draw = self._draw(store, batch_size, batch_size)
                return draw, batches.look_up(draw, store)

        return self._prefetched.new_loader(batches, look_up, batch_size, prefetch, finish)

    def draw(self, batch_size: int) -> Draw:
        """Draw as `sample` does, more rows than there are if need be, and return the recipe alone; for adapters."""
        require_count("batch_size", batch_size, 1)
        with self._lock:
            return self._draw(self._open(), batch_size, 1)

    def follow(self, draw: Draw) -> Batch:
        """Return the batch that a recipe describes; for adapters that draw by themselves."""
        with self._lock:
            store = self._open()
            for ids in (draw.ids, draw.last_ids, None if draw.goals is None else draw.goals.ids):
                if ids is not None:
                    self._require_held(store, ids)
            reading = self._batches.look_up(draw, store)
        return self._batches.make(draw, reading)

    def outcomes(self, ids: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return rewards, terminated and truncated of `ids`, of any shape; no observation is touched."""
        with self._lock:
            store = self._open()
            self._require_held(store, ids)
            return store.outcomes(ids)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set how much it would pay to see transitions again, such as their TD errors' sizes.

        Args:
            ids: Of a batch, as they are; those evicted since are passed over.
            priorities: Numbers of at least 0, one a row of the batch.
        """
        update = priorities_of(self.sampler)
        given = np.asarray(ids)
        wanted = as_ids(given.reshape(-1)).reshape(given.shape)
        values = as_array(priorities.detach().cpu() if hasattr(priorities, "detach") else priorities, "priorities")
        with self._lock:
            update(self._held(self._open()), wanted, values)

    def set_flags(self, ids: Any, terminated: Any, truncated: Any) -> None:
        """Overwrite how transitions ended: some frameworks cut the last episode afterwards."""
        wanted = as_ids(ids)
        ended = fit_flags(terminated, wanted.shape, "terminated", "one flag per id")
        cut = fit_flags(truncated, wanted.shape, "truncated", "one flag per id")
        with self._lock:
            store = self._open()
            self._require_held(store, wanted)
            store.set_flags(wanted, ended, cut)

    def __len__(self) -> int:
        """Count the transitions that can be sampled."""
        with self._lock:
            return self._open().transitions

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return self._open().first_tick * self.num_envs

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self._open().next_tick * self.num_envs

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
            self._open().relieve(int(nbytes))

    @property
    def disk_bytes(self) -> int:
        """Bytes in files of `spill_dir`."""
        with self._lock:
            return 0 if self._store is None else self._store.disk_bytes

    @property
    def fill(self) -> float:
        """How full the memory is, of 1."""
        store = self._store
        return 0.0 if store is None else (store.next_tick - store.first_tick) / self._capacity_ticks

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
            most = ticks * schema.num_envs
            if not is_final:
                return cls(schema, None, most, budget=None, prefer=prefer)
            return cls(schema, None, most, budget=budget, prefer=prefer, spill_dir=spill_dir, device=device)

        loading: Loading[Self] = Loading(make, cls._take_over, sampler, capacity, num_envs, recover)
        return loading.load(open_reader(url, spill_dir))

    def _take_over(self, found: Restored, sampler: Sampler | None) -> None:
        """Become what was saved."""
        with self._lock:
            found.fill(self._open())
        self._generator = restored_generator(found.state["generator"])
        self.sampler = sampler_to_resume(sampler, found.state["sampler"]["kind"])
        if found.content is not None and type(self.sampler).__name__ == found.state["sampler"]["kind"]:
            resume(self.sampler, found.state["sampler"]["state"], self.capacity, self.first_id)
            self._prefetched.restore(found.state.get("prefetched", []), reward_function_of(self.sampler))
        self._came_from(found)

    def _snapshot(self, saved: Mapping[int, RowsKey], attach: Mapping[str, Path | bytes]) -> Snapshot:
        with self._lock:
            store = self._open()
            frozen = store.freeze(saved)
            state = {
                "sampler": {"kind": type(self.sampler).__name__, "state": self.sampler.state()},
                "generator": generator_state(self._generator),
                "prefetched": self._prefetched.state(),
            }
            words, ticks = schema_words(self.schema), self._capacity_ticks
            return Snapshot(frozen, words, ticks, state, attach, self._lock, store.release)

    def _full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        with self._lock:
            return self._open().full_blocks(is_known)

    def are_valid(self, ids: Any) -> NDArray[np.bool_]:
        """Tell which of some held ids are transitions: lanes added with valid=False made none."""
        with self._lock:
            return self._open().are_valid(as_ids(ids))

    def drain(self) -> None:
        """Wait until everything that is to be compressed or spilled is; for measurements and tests."""
        self._open().sealer.drain()

    def close(self) -> None:
        """Free everything; batches that were handed out stay as they are."""
        self._end_saving()
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()
        self._assembler.pool.dismiss()
        self._batches.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the content as arrays that pickle protocol 5 writes without copying them."""
        with self._lock:
            store = self._open()
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = {"sampler": state["sampler"], **state["settings"]}
        ReplayMemory.__init__(self, state["schema"], None, state["capacity"], **settings)
        self._generator = state["generator"]
        with self._lock:  # the sealer may be at the first block before all are taken over
            self._open().thaw(state["store"], state["rows"])

    def _fit(self, leading: tuple[int, ...], *arguments: Any) -> Tick:
        """Check every argument; nothing is written if one does not fit."""
        reward_dtype = self._open().reward_dtype
        tick = Tick.fitted(self.schema, leading, reward_dtype, *arguments)
        if reward_dtype is None:
            self._delivery.require(Leaf("reward", (), tick.reward.dtype))
        return tick

    def _draw(self, store: Store, count: int, least: int) -> Draw:
        """Draw rows, if so many transitions at least are held."""
        if store.transitions < least:
            raise ArgumentError(
                f"batch_size ({count}) is more than the {store.transitions} transitions held; add more first, or draw "
                "a smaller batch"
            )
        return drawn_from(self.sampler, self._held(store), count, self._generator)

    def _open(self) -> Store:
        if self._store is None:
            raise ClosedError("the memory was closed; make a new ReplayMemory")
        return self._store

    def _require_held(self, store: Store, ids: NDArray[np.int64]) -> None:
        require_held(ids, store.first_tick * self.num_envs, store.next_tick * self.num_envs, store)

    def _held(self, store: Store) -> Held:
        first, end = store.first_tick * self.num_envs, store.next_tick * self.num_envs
        return Held(first, end, self.num_envs, self.capacity, store)

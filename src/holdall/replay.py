"""ReplayMemory: exact off-policy experience in a fraction of the memory.

    add    -> schema (check) -> storage: store -> rings | segment, slices (write) -> tiers, sealer (compress, spill)
    sample -> sampling (draw) -> storage: store -> rings | segment (locate) -> delivery (batch)
    save   -> storage: snapshot -> checkpoint (write in the background)

The first tensors that are added to a memory with a `store_device` decide that its data lives on their device. From then
on the store's rings are there, and batches are made of them, see `delivery.resident`.

Guarantee: `gather(ids)` returns bit for bit what `add` was given. `add` refuses arguments that do not fit before it
writes anything.
"""

from __future__ import annotations

import copy
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
from holdall.batch import Batch, Draw, as_ids, ids_of_any_shape, of_ids, require_in_range
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
    DrawnRows,
    Loader,
    LoaderDraws,
    ObservationAssembler,
    Prefetched,
    ResidentBatches,
    SlotDraw,
    TensorFit,
    batches_for,
    is_on_device,
    rings_on,
)
from holdall.errors import ArgumentError, CheckpointError, ClosedError, HoldallError
from holdall.gymnasium import FIRST_LOOK_TICKS, Newest, added_resets, newest_ids, next_look, warn_of_resets
from holdall.native import chosen_kernels
from holdall.report import LIVING, MemoryReport
from holdall.sampling import (
    Held,
    Prioritized,
    Sampler,
    Uniform,
    childs_generator,
    drawn_from,
    generator_of,
    generator_state,
    require_enough,
    required_sampler,
    restored_generator,
    resume,
    sampler_to_resume,
    sampler_words,
    set_priorities,
)
from holdall.schema import (
    Array,
    Leaf,
    Schema,
    fit_flags,
    on_host,
    require_choice,
    require_count,
    require_number,
    schema_words,
    whole,
)
from holdall.storage import (
    COST_CAPS,
    BatchReader,
    Budget,
    FastTick,
    FullBlock,
    Rows,
    SliceBlock,
    SpillFolder,
    StepsLeft,
    Store,
    StoreContent,
    Tick,
    UnchangedStore,
    last_rows,
    steps_in,
)
from holdall.units import parse_bytes

_LOG = logging.getLogger("holdall")
_PLAIN_SAMPLERS = frozenset({Uniform, Prioritized})
"""Samplers whose draws consist of ids and weights only, and that draw once per batch."""


class ReplayMemory:
    """Replay memory for `num_envs` lanes that advance together. All methods may be called from any thread.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple. The schema of another
            memory may be passed instead. It then also replaces `action_space`, `num_envs`, `extras` and `reward_shape`.
        action_space: Any of these spaces.
        capacity: Transitions over all lanes, rounded down to whole ticks. 1e6 is a million.
        num_envs: Number of lanes, which is the leading axis of everything that is added.
        budget: RAM that the memory may use. "8GiB" or a number of bytes is a hard limit. "auto" keeps the newest
            transitions raw, up to a quarter of the RAM that is available when the first block is full, and compresses
            all others. None compresses all transitions.
        prefer: How much slower sampling compressed data may be than sampling raw data: "speed" 1.2 times, "balanced" 2
            times, "memory" 4 times.
        spill_dir: Directory for the oldest compressed transitions that exceed the budget. Without it, a memory with a
            hard limit drops its oldest transitions early, see `report().capacity_that_fits`.
        device: None for batches of NumPy arrays; "cpu" or "cuda" for torch tensors there.
        store_device: "cuda" keeps every slice there, uncompressed, and makes batches there. The host keeps the copy
            that `budget` describes.
        seed: Seed of the sampler's generator.
        extras: Further fields per transition, by name.
        sampler: Sampler that `sample` uses; `Uniform()` by default.
        reward_shape: Shape of one lane's reward if it is not a number: `(n,)` for one reward per agent or objective.
    """

    # Both fast paths return 0 until the general path has described the memory to them. For adapters.
    add_at_once: Callable[..., int] = staticmethod(FastTick.add)
    draw_at_once: Callable[..., Any] = staticmethod(BatchReader.draw)
    fork_lock = property(operator.attrgetter("_lock"), doc="See `Tracked`.")

    def __init__(
        self,
        observation_space: spaces.Space[Any] | Schema,
        action_space: spaces.Space[Any] | None,
        capacity: float = 1_000_000,
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
        reward_shape: tuple[int, ...] = (),
    ) -> None:
        capacity = whole(capacity)
        if isinstance(observation_space, Schema):
            schema = observation_space
        else:
            require_count("num_envs", num_envs, 1)
            of_lanes = " (num_envs: it counts transitions over all lanes)"
            capacity = require_count("capacity", capacity, num_envs, of_lanes)
            schema = Schema.of(observation_space, action_space, extras, num_envs, reward_shape)
        self._settings: dict[str, Any] = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "device": device,
            "store_device": store_device,
        }
        self.schema = schema
        self.num_envs = schema.num_envs
        self.capacity = int(capacity) // schema.num_envs * schema.num_envs  # transitions over all lanes
        self.spill_dir = spill_dir
        self.sampler = required_sampler(sampler)
        self._generator = generator_of(seed)
        self._next_look: float = FIRST_LOOK_TICKS  # tick of the next `_look_for_resets`
        self._kernels = chosen_kernels()
        self._lock: Any = threading.RLock()  # never entered twice by one thread: see `_locked`
        self._delivery = Delivery.of(device, store_device, schema.leaves)
        self._batches_by_device: dict[str | None, Batches] = {}  # batch builders; None: the memory's own device
        self._tensor_fit: TensorFit | None = None  # checks tensors, if the data lives on a device
        self._resident: ResidentBatches | None = None  # batch builder of a memory whose data lives on a device
        self._prefetched: Prefetched | None = None  # created with the first loader
        self._savers = Savers(self._kernels.coder)
        self._attached = Attached()
        self._autosave: Any = None
        self._fetch: Any = None  # background download of a checkpoint in an object store
        self._parents: list[Any] = []  # in a forked child: background jobs of the parent, which stay referenced
        require_choice("prefer", prefer, COST_CAPS)
        limit = None if budget is None or budget == "auto" else parse_bytes(budget, "budget")
        self._budget = Budget(limit, budget == "auto", spill_dir is not None, COST_CAPS[prefer])
        self._assembler = ObservationAssembler(self._kernels, self._budget.staging_bytes // 2, self._budget.threads)
        folder = None if spill_dir is None else SpillFolder(spill_dir, self._kernels.coder)
        try:
            ticks = self.capacity // schema.num_envs
            self._store: Store | None = Store(schema, ticks, self._kernels, self._lock, self._budget, folder)
        except (OSError, OverflowError, MemoryError) as error:
            raise ArgumentError(
                f"capacity ({self.capacity}) takes more address space than this machine gives ({error}); lower it"
            ) from error
        LIVING.add(self)

    # ---------------------------------------------------------------- adding

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
        """Add one transition per lane. Every array has a leading axis of `num_envs`.

        With `num_envs=1` that axis may be left out, so that `add` accepts the results of `env.step`. The shape of the
        space, and `reward_shape`, decide for each field whether the axis is present. A space of shape (1,) accepts
        (1, 1) and (1,). Integers of any dtype are accepted if they fit into the space's integer dtype. Nothing else is
        ever cast.

        Args:
            reward: The first reward sets the dtype of all rewards. Python numbers are float64.
            next_obs: The true next observation. At the end of an episode this is its final observation, not the first
                one of the next episode.
            valid: False marks lanes that made no transition, such as the step after the end of an episode in
                Gymnasium's next-step autoreset. Such entries are never sampled and not counted.
        """
        if extras is None and valid is None:
            arguments = obs, action, reward, next_obs, terminated, truncated
            if self.add_at_once(*arguments) or self.add_as_is(*arguments):
                return
        self._open().wait_for_room()
        with self._locked():
            tick = self._fit((self.num_envs,), obs, action, reward, next_obs, terminated, truncated, extras, valid)
            self._open_repaired().write(tick)

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
        """Add whole trajectories. The arguments are those of `add`, with a leading time axis before the lanes.

        Everything is checked before the first step is written. An interrupt is raised after the last step. A second
        interrupt leaves the first steps, each of them complete.
        """
        with self._locked():
            leading = (steps_in(reward), self.num_envs)
            steps = self._fit(leading, obs, action, reward, next_obs, terminated, truncated, extras, valid)
        self._write_steps(StepsLeft(steps))

    def add_as_is(self, *arguments: Any) -> int:
        """Try the second fast path. Return the total number of ticks, or 0 if the path was unavailable. For adapters.

        Args:
            arguments: The arguments of `add_at_once`, which the caller has tried before.
        """
        store = self._store
        if store is None:
            return 0
        packed = store.fast_tick.pack(*arguments)
        if not packed:
            return 0
        store.wait_for_room()
        with self._locked():
            if self._store is not store or not store.fast_tick.is_open:
                return 0
            return max(store.write_packed(packed, arguments[0], arguments[3]), 0)

    def _fit(self, leading: tuple[int, ...], *arguments: Any) -> Tick:
        """Check the arguments of `add` or `extend`, and return them as canonical arrays. Nothing is written."""
        store = self._open()
        reward_dtype = store.reward_dtype
        self.add_at_once = store.fast_tick.add
        may_live_there = self._settings["store_device"] is not None
        if may_live_there and (self._tensor_fit is not None or is_on_device(self._delivery, arguments[0])):
            return self._fit_tensors(leading, reward_dtype, arguments)
        tick = Tick.fitted(self.schema, leading, reward_dtype, *arguments)
        if reward_dtype is None:
            self._delivery.require(self.schema.reward_leaf(tick.reward.dtype, "reward"))
        return tick

    def _fit_tensors(self, leading: tuple[int, ...], reward_dtype: Any, arguments: tuple[Any, ...]) -> Tick:
        """Check tensors on the store's device. The first of them move the memory to that device."""
        fit = self._tensor_fit or TensorFit(self._delivery, self.schema)
        tick = fit.tick(leading, reward_dtype, *arguments)
        if self._tensor_fit is None:
            if self._open().next_tick:
                raise ArgumentError(
                    f"obs is on {fit.device}, but the memory was begun with arrays of the host; go on with these, or "
                    "make a new memory"
                )
            self._move_to_device(fit, tick)
        return tick

    def _write_steps(self, left: StepsLeft, *, waits: bool = True) -> None:
        """Write all steps of an `extend`, and release the lock when the sealer falls behind.

        With `waits`, the first interrupt is raised after the last step.
        """
        try:
            while left:
                with self._locked():
                    store = self._open_repaired()
                    left.write(store)
                store.wait_for_room()
        except BaseException:
            if waits:
                self._write_steps(left, waits=False)
            raise

    # ---------------------------------------------------------------- sampling

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions with the memory's sampler."""
        require_count("batch_size", batch_size, 1)
        if self._open().next_tick >= self._next_look:
            self._look_for_resets()
        batches = self._batches
        is_plain = type(self.sampler) in _PLAIN_SAMPLERS and batches.takes_arrays
        with self._locked():
            store = self._open_repaired()
            if store.next_tick > store.first_tick:
                batch = batches.draw(self.sampler, batch_size, self._generator, store)
                if batch is not None:
                    return batch
            draw = self._draw(store, batch_size, batch_size)
            drawn = None if is_plain else batches.look_up(draw, store)
        if drawn is None:
            arrays = store.batch_reader.gather(draw.ids)  # a tuple, or 0 if the fast path is unavailable
            if type(arrays) is tuple:
                return batches.of_arrays(draw, arrays)
            with self._locked():
                store = self._open_repaired()
                is_evicted = draw.ids.min() < store.held[0]  # another thread may have added in between
                if is_evicted:
                    draw = self._draw(store, batch_size, batch_size)
                drawn = batches.look_up(draw, store)
                store.offer_batches(batch_size)
        return batches.make(draw, drawn)

    def _draw(self, store: Store, count: int, least: int) -> Draw:
        """Draw `count` rows, if at least `least` transitions are held."""
        require_enough(count, store.transitions, least)
        if type(self.sampler) not in _PLAIN_SAMPLERS or not store.all_valid:
            bits = self._generator.bit_generator
            store.repair.begin(functools.partial(setattr, bits, "state", bits.state))
        draw = None if self._resident is None else self._resident.recipe(self.sampler, count, self._generator)
        draw = draw or drawn_from(self.sampler, self._held(store), count, self._generator)
        store.repair.end()
        return draw

    def _look_for_resets(self) -> None:
        """Warn once if resets were added as steps."""
        found = None
        with self._locked():
            store = self._open_repaired()
            self._next_look = next_look(store.next_tick)
            if self._resident is None and store.all_valid:
                complete = self._assembler.complete
                leaves = self.schema.observation.leaves
                ids = newest_ids(self.first_id, self.next_id, self.num_envs)
                found = added_resets(Newest(ids, store.outcomes, lambda ids: complete(store.read(ids), leaves)))
        if found is not None:
            self._next_look = warn_of_resets(found, stacklevel=4)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        return self.follow(of_ids(as_ids(ids)))

    def loader(self, batch_size: int, prefetch: int = 2, device: str | None = None) -> Loader:
        """Return an endless iterator over batches of `batch_size`, which are made ahead in the background.

        A batch is drawn when the batch `prefetch` before it is requested, so one seed gives one sequence of batches.
        A batch does not contain transitions or priorities that were added after it was drawn. `prefetch=0` is the same
        as `sample`.

        Args:
            prefetch: Number of batches that are made ahead. Each takes the memory of a batch.
            device: Device of the batches; the memory's own device by default.
        """
        require_count("batch_size", batch_size, 1)
        require_count("prefetch", prefetch, 0)
        is_own = device is None or device == self._settings["device"]
        batches = self._batches if is_own else self._new_batches(Delivery(device, self.schema.leaves))

        def look_up(draws: LoaderDraws) -> tuple[Draw, DrawnRows]:
            with self._locked():
                store = self._open_repaired()
                draw = draws.next_held(self._held(store)) or self._draw(store, batch_size, batch_size)
                rows = batches.look_up(draw, store, ahead=prefetch > 0)
                draws.begin(draw)
                return draw, rows

        self._prefetched = self._prefetched or Prefetched()
        return self._prefetched.new_loader(batches, look_up, batch_size, prefetch, None if is_own else batches.close)

    def draw(self, batch_size: int) -> Draw:
        """Draw as `sample` does, but return only the ids and weights. Rows may repeat. For adapters."""
        require_count("batch_size", batch_size, 1)
        with self._locked():
            return self._draw(self._open_repaired(), batch_size, 1)

    def draw_on(self, device: str, count: int, rows: SlotDraw, *, ahead: bool) -> BatchJob | None:
        """Draw rows and begin their batch on a device in one step. Return None if this is impossible. For adapters."""
        with self._locked():
            store = self._open_repaired()
            return self._batches_on(device).draw_slots(rows, count, store, ahead=ahead)

    def follow(self, draw: Draw, device: str | None = None) -> Batch:
        """Return the batch of a draw, on the memory's device or on `device`. For adapters."""
        return self.begin(draw, device, ahead=False).receive()

    def begin(self, draw: Draw, device: str | None = None, *, ahead: bool = True) -> BatchJob:
        """Begin the batch of a draw. `ahead`: the batch is made before the caller needs it. For adapters."""
        with self._locked():
            store = self._open_repaired()
            if type(draw) is not Draw or not store.all_valid:
                self._held(store).require_drawn(draw)
            batches = self._batches_on(device)
            drawn = batches.look_up(draw, store, ahead=ahead)
        job = batches.start(draw, drawn)
        job.work()
        return job

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """Return copies of all fields of `ids` as arrays. All ids must be transitions that are held. For adapters."""
        with self._locked():
            store = self._open_repaired()
            rows = store.read(ids, self._assembler.staging.take)
            store.offer_batches(len(ids))
            self.draw_at_once = store.batch_reader.draw
        return self._assembler.complete(rows, self.schema.observation.leaves)

    def outcomes(self, ids: Any) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return rewards, terminated and truncated of `ids`, which may have any shape. Observations are not read."""
        with self._locked():
            store = self._open_repaired()
            wanted = ids_of_any_shape(ids)
            self._held(store).require(wanted)
            return store.outcomes(wanted)

    def extra(self, name: str, ids: Any) -> Array:
        """Return one extra of `ids`, which may have any shape. Nothing else is read. For adapters."""
        with self._locked():
            store = self._open_repaired()
            wanted = ids_of_any_shape(ids)
            self._held(store).require(wanted)
            return store.extra((self.schema.extras.keys or ()).index(name), wanted)

    def are_valid(self, ids: Any) -> NDArray[np.bool_]:
        """Return which of some held ids are transitions. Entries added with `valid=False` are not."""
        with self._locked():
            store = self._open_repaired()
            wanted = as_ids(ids)
            require_in_range(wanted, store.first_tick * self.num_envs, store.next_tick * self.num_envs)
            return store.are_valid(wanted)

    # ---------------------------------------------------------------- rewriting

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set the priorities of transitions, such as the absolute values of their TD errors.

        Args:
            ids: Ids of a batch. Ids that were evicted since are ignored.
            priorities: Numbers of at least 0, one per row of the batch.
        """
        with self._locked():
            store = self._open_repaired()
            if self._resident is None or not self._resident.update_priorities(self.sampler, ids, priorities):
                set_priorities(self.sampler, self._held(store), ids, priorities)

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Rewrite extras of transitions that are held: recurrent states, latents, values that were computed again.

        Batches that were already returned, or drawn ahead by a loader, do not change.

        Args:
            ids: Ids of transitions; for sequences `batch.ids[batch.mask]`. If an id occurs twice, its last row counts.
            columns: New rows by the name of their extra, one per id, with the extra's shape and dtype.
        """
        self._open()
        fit = self._tensor_fit
        wanted = as_ids(on_host(ids))
        if not columns:
            raise ArgumentError("update was given no rows; name an extra: update(ids, hidden=...)")
        rows = self.schema.extras.flatten_some(columns, wanted.shape, _fit_rows if fit is None else fit.rows)
        wanted, copies = last_rows(wanted, {f"extras.{leaf}": new for leaf, new in rows.items()})
        with self._locked():
            store = self._open_repaired()
            self._held(store).require(wanted)
            store.rewrite(wanted, copies)
            for batches in self._batches_by_device.values():
                batches.rewritten(wanted)

    def set_flags(self, ids: Any, terminated: Any, truncated: Any) -> None:
        """Overwrite terminated and truncated of transitions: some frameworks cut the last episode afterwards."""
        wanted = as_ids(ids)
        ended = fit_flags(terminated, wanted.shape, "terminated", "one flag per id")
        cut = fit_flags(truncated, wanted.shape, "truncated", "one flag per id")
        with self._locked():
            store = self._open_repaired()
            self._held(store).require(wanted)
            store.set_flags(wanted, ended, cut)

    # ---------------------------------------------------------------- size and accounting

    def __len__(self) -> int:
        """Count the transitions that can be sampled."""
        with self._locked():
            return self._open_repaired().transitions

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return self._open().first_tick * self.num_envs

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self._open().next_tick * self.num_envs

    @property
    def fill(self) -> float:
        """Fraction of the capacity that is filled, from 0 to 1."""
        store = self._store
        return 0.0 if store is None else (store.next_tick - store.first_tick) * self.num_envs / self.capacity

    def report(self) -> MemoryReport:
        """Account for the bytes that the memory holds, field by field, and compare them with the plain layout."""
        with self._locked():
            store = self._open_repaired()
            return MemoryReport(
                transitions=store.transitions,
                fields=tuple(store.report()),
                segments=store.segments,
                staging_bytes=self._assembler.staging.nbytes + self._batches.pinned_bytes + store.batch_reader.nbytes,
                backlog=store.backlog,
                failure=store.failure,
                dropped_early=store.early_drops.transitions,
                drop_reason=store.early_drops.reason,
                budget_bytes=self._budget.limit,
                capacity_that_fits=store.capacity_that_fits,
            )

    def relieve(self, nbytes: int) -> None:
        """Reduce the RAM in use by `nbytes`, as far as this evicts nothing.

        Raw data is compressed. With `spill_dir`, compressed data is spilled.
        """
        require_count("nbytes", nbytes, 0)
        with self._locked():
            self._open_repaired().relieve(int(nbytes))

    @property
    def disk_bytes(self) -> int:
        """Bytes in files of `spill_dir`."""
        with self._locked():
            return 0 if self._store is None else self._store.disk_bytes

    def drain(self) -> None:
        """Wait until no block is left to compress or spill. For measurements and tests."""
        with self._locked():
            sealer = self._open_repaired().sealer
        if sealer is not None:
            sealer.drain()

    def arrays(self) -> list[tuple[str, NDArray[Any]]]:
        """Return every array that the memory holds, by field.

        Drop the result at once: the memory does not reuse an array while somebody refers to it.
        """
        with self._locked():
            if self._store is None:
                return []
            staged = [*self._assembler.staging.arrays(), *self._store.batch_reader.arrays()]
            return [*self._store.arrays(), *(("staging", block) for block in staged)]

    # ---------------------------------------------------------------- devices

    @property
    def _batches(self) -> Batches:
        """Batch builder of the memory's own device."""
        return self._batches_on(None)

    def _batches_on(self, device: str | None) -> Batches:
        """Return the batch builder for `device`, or for the memory's own device if that is None."""
        batches = self._batches_by_device.get(device)
        if batches is None:
            if device is None:
                batches = self._new_batches(self._delivery, store_on_device=self._settings["store_device"] is not None)
            else:
                batches = self._new_batches(Delivery(device, self.schema.leaves))
            self._batches_by_device[device] = batches
        return batches

    def _new_batches(self, delivery: Delivery, *, store_on_device: bool = False) -> Batches:
        pins = self._budget.limit is None
        return batches_for(self.schema, self._kernels, self._assembler, delivery, store_on_device, pins)

    def _move_to_device(self, fit: TensorFit, steps: Tick | None) -> None:
        """Keep all data on the store's device from now on. Called before the first tick is written."""
        ticks = self.capacity // self.num_envs
        rings: Any = rings_on(fit, self.schema, ticks, self._budget.limit, steps)
        budget = replace(self._budget, limit=None, spills=False)  # the limit applies to the device, see `rings_on`
        store = Store(self.schema, ticks, self._kernels, self._lock, budget, None, large=(), rings=rings)
        before = self._open()
        resident = ResidentBatches(self.schema, rings, self.capacity)
        # One step, because an interrupt may come between any two.
        vars(self).update(
            _store=store,
            _tensor_fit=fit,
            _resident=resident,
            _batches_by_device={None: resident},
            add_at_once=store.fast_tick.add,
            draw_at_once=store.batch_reader.draw,
        )
        before.close()

    def _move_restored_to_device(self, content: StoreContent | None) -> None:
        """Keep all data on the store's device if the restored data has no large fields."""
        if self._settings["store_device"] is not None and content is not None and not content.large:
            self._move_to_device(TensorFit(self._delivery, self.schema), None)

    # ---------------------------------------------------------------- checkpoints

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

        Another save to the same place writes only new data. If a save fails, the handle raises the error when the
        result is requested. The memory continues to work, and the earlier checkpoints are intact.

        Args:
            url: A directory, or a prefix of an object store: s3://bucket/run, gs://bucket/run, az://container/run.
            attach: A trainer's own files, by name: bytes, or paths of files that do not change until the save is
                complete. They are part of the checkpoint, see `attached`.
            keep: Number of checkpoints to keep. Older ones are removed once this one is safe.
            mirror: A prefix of an object store to which the checkpoint is copied once it is safe in its directory. The
                handle's `mirrored()` waits for that.
            progress: Called in the background with the current phase and the bytes so far. If it takes three arguments,
                also with the approximate total of bytes.
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
        """Save in the background until the memory is closed. A crash loses only what was added since the last save.

        Every block is written as soon as it is full and compressed, so a checkpoint has little left to write when it is
        due. Another call replaces the earlier settings.

        Args:
            seconds: Seconds between two checkpoints.
            transitions: Transitions between two checkpoints. With both limits, the first that is reached counts.
        """
        autosave = autosaved(self, self._savers, url, seconds, transitions, keep, mirror)
        before = self._autosave
        self._autosave = autosave
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
        """Load the newest complete checkpoint. The memory continues exactly where it was saved.

        Compressed and raw blocks stay in their files and are read when they are sampled. From an object store, the data
        of a batch is fetched when the batch is drawn. The rest is fetched in the background, to temporary files or
        `spill_dir`.

        Args:
            url: The place that `save` was given.
            capacity: Transitions to hold; the saved capacity by default. The newest transitions are kept.
            sampler: None restores the saved sampler with its settings and priorities. A sampler class of your own, and
                `Hindsight` with its function, must be passed. A sampler of another kind than the saved one starts
                without state.
            num_envs: Number of lanes; the saved number by default. With another number, every transition is added again
                under a new id. Where a lane's stream is cut, the transition before the cut is marked as truncated.
                Samplers start without state.
            recover: Load the newest checkpoint even if some of its records are damaged or missing. All transitions
                that do not need these records are loaded, and the log says what is lost. Everything is read.
            store_device: As in the constructor. A memory whose data lived on a device returns there.
            timeout: Seconds without an answer of an object store after which `load` raises an error. Later, sampling
                waits until the store answers or the memory is closed.
        """
        settings = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "device": device,
            "store_device": store_device,
        }
        loading: Loading[Any] = Loading(cls, settings, sampler, whole(capacity), num_envs, recover)
        memory: Self = loading.load(url, timeout)
        return memory

    @property
    def attached(self) -> Attached:
        """Files that were saved with the checkpoint that this memory was loaded from, by name."""
        return self._attached

    def take_over(self, found: Restored, sampler: Sampler | None) -> None:
        """Restore a checkpoint in a new memory. For `load`."""
        self._move_restored_to_device(found.content)
        with self._locked():
            found.fill(self._open_repaired())
        self._generator = restored_generator(found.state["generator"])
        saved = found.state["sampler"]
        self.sampler = sampler_to_resume(sampler, saved, goes_on=found.content is not None)
        first_id = self._open().first_tick * self.num_envs
        continues = found.content is not None and resume(self.sampler, saved, self.capacity, first_id)
        recipes = found.state.get("prefetched")
        if continues and recipes:
            self._prefetched = Prefetched(recipes, getattr(self.sampler, "reward_fn", None))
        if found.saved is not None:  # the next save then writes only new data
            self._savers.to(found.url, found.saved)
        self._fetch = None if found.waiting is None else the_rest_of(found)
        self._attached = found.attached

    def _snapshot(self, saved: Mapping[int, RowsKey], attach: Mapping[str, Path | bytes]) -> Snapshot:
        with self._locked():
            if self._resident is not None:
                self._resident.bring_back()
            store = self._open_repaired()
            frozen = store.freeze(saved)
            state = {
                "sampler": {**sampler_words(self.sampler), "state": self.sampler.state()},
                "generator": generator_state(self._generator),
                "prefetched": [] if self._prefetched is None else self._prefetched.state(),
            }
            return Snapshot(
                frozen,
                schema_words(self.schema),
                self.capacity // self.num_envs,
                state,
                attach,
                self._lock,
                store.release,
                store.take_again,
            )

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks that are not known yet, newest first. For autosaves."""
        with self._locked():
            return self._open_repaired().full_blocks(is_known)

    # ---------------------------------------------------------------- pickles and copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the content as arrays that pickle protocol 5 writes without copying them."""
        with self._locked():
            if self._resident is not None:
                self._resident.bring_back()
            store = self._open_repaired()
            return {
                "schema": self.schema,
                "capacity": self.capacity,
                "settings": self._settings,
                "generator": self._generator,
                "sampler": self.sampler,
                "store": store.content(),
                "rows": store.rows(),
                "unchanged": UnchangedStore(store),  # last, because it checks that nothing changed until then
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        schema = state["schema"]
        ReplayMemory.__init__(self, schema, None, state["capacity"], sampler=state["sampler"], **state["settings"])
        self._generator = state["generator"]
        self._move_restored_to_device(state["store"])
        with self._locked():  # the worker may finish the first block before all rows are restored
            self._open().thaw(state["store"], state["rows"])

    def __copy__(self) -> Self:
        """Return an independent memory, as `copy.deepcopy` does: two memories cannot share a sampler."""
        return copy.deepcopy(self)

    # ---------------------------------------------------------------- closing and locking

    def close(self, timeout: float = CLOSE_S) -> None:
        """Wait for saves, and free everything. Batches that were returned stay valid.

        Args:
            timeout: Seconds without progress after which a save is abandoned and an error is raised.
        """
        require_number("timeout", timeout, 0)
        try:
            try:
                for background in (self._autosave, self._fetch):
                    if background is not None:
                        background.stop()
            finally:
                self._savers.close(timeout)
            self._autosave = None
            self._fetch = None
        except CheckpointError:
            self._free()
            raise
        self._free()

    def _free(self) -> None:
        """Free everything, even if a save failed."""
        with self._locked():
            store = self._store
            if store is not None:
                store.end_writing()
            self._store = None
        if store is not None:  # after an interrupt here, the store is freed with its last reference
            store.close()
        while self._batches_by_device:
            self._batches_by_device.popitem()[1].close()
        self._assembler.close()

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
            _LOG.warning("%s", given_up)  # the error that ended the block is raised, not this one

    def after_fork(self) -> None:
        """In a child, draw other batches than the parent, and leave its checkpoints to it."""
        self._generator = childs_generator(self._generator)
        self._savers.after_fork()
        self._parents += [self._savers, self._autosave, self._fetch]
        self._savers = Savers(self._kernels.coder)
        self._autosave = None
        self._fetch = None

    def _open(self) -> Store:
        """Return the store, or raise if the memory was closed."""
        if self._store is None:
            raise ClosedError("the memory was closed; make a new ReplayMemory")
        return self._store

    def _open_repaired(self) -> Store:
        """Return the store after repairing an interrupted change. Called with the lock."""
        store = self._open()
        if store.repair.is_pending[0]:
            store.repair.run()
        return store

    def _held(self, store: Store) -> Held:
        first, end = store.held
        return Held(first, end, self.num_envs, self.capacity, store)

    def _locked(self) -> Any:
        """Return the lock for a `with` statement."""
        if self._lock._is_owned():
            self._leave_interrupted()
        return self._lock

    def _leave_interrupted(self) -> None:
        """Release the lock if an interrupted call of this thread still holds it.

        Raise if that call is still running: then a signal handler or a sampler called the memory from inside.
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


def _fit_rows(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    return leaf.fit(on_host(value), leading, argument, "one row per id")

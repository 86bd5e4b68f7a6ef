"""ReplayMemory: exact off-policy experience in a fraction of the memory.

    add    -> Store.append -> Writer.append                one native call, if the arguments need no conversion
    sample -> Sampler.draw -> View.read -> Delivery        one native call for the rows
    save   -> Store.snapshot -> checkpoint                 written in the background

This class has the methods that users call. Adapters also use `memory.store`, `memory.draw` and `memory.deliver`.

Guarantee: `gather(ids)` returns, bit for bit, what `add` was given. `add` refuses arguments that do not fit before it
writes anything.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.background import CLOSE_S
from holdall.batch import Batch, Draw, check_ids, check_ids_of_any_shape, require_in_range
from holdall.checkpoint import LOAD_S, Attached, MemorySnapshot, Progress, Restored, SaveHandle, Savers, load_memory
from holdall.checks import require_choice, require_count, require_number, require_path, to_whole
from holdall.codec.choice import PREFERENCES
from holdall.delivery import Delivery, Loader, new_delivery
from holdall.device.store import DeviceStore
from holdall.errors import ArgumentError, CheckpointError
from holdall.memory_registry import MEMORIES, PressureCheck
from holdall.report import MemoryReport
from holdall.reset_check import (
    FIRST_CHECK_TICK,
    RecentTransitions,
    find_added_resets,
    next_check_tick,
    recent_ids,
    warn_of_resets,
)
from holdall.sampling import (
    Held,
    Sampler,
    Uniform,
    check_sampler,
    choose_sampler,
    describe_sampler,
    draw_from,
    get_generator_state,
    new_generator,
    require_enough,
    restore_generator,
    resume_sampler,
    set_priorities,
)
from holdall.schema import Array, Leaf, Schema, fit_flags, on_host
from holdall.schema_json import schema_to_json
from holdall.store.budget import Budget
from holdall.store.closed import FORKED, ClosedStore
from holdall.store.spill import SpillFolder
from holdall.store.store import Store
from holdall.store.tuning import Tuning
from holdall.store.view import View

_LOG = logging.getLogger("holdall")


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
        device: None for batches of NumPy arrays; "cpu" or "cuda" for torch tensors there; "jax" for arrays of JAX.
        store_device: "cuda" keeps all transitions on that device, and makes batches there.
        seed: Seed of the sampler's generator.
        extras: Further fields per transition, by name.
        sampler: Sampler that `sample` uses; `Uniform()` by default.
        reward_shape: Shape of one lane's reward if it is not a number: `(n,)` for one reward per agent or objective.

    Attributes:
        store: Every transition that is held. For adapters.
        schema: Spaces of all fields.
        sampler: The memory's sampler.
        capacity: Transitions over all lanes that are held at most.
    """

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
        _tuning: Tuning | None = None,
    ) -> None:
        capacity = to_whole(capacity)
        if isinstance(observation_space, Schema):
            schema = observation_space
        else:
            require_count("num_envs", num_envs, 1)
            of_lanes = " (num_envs: it counts transitions over all lanes)"
            capacity = require_count("capacity", capacity, num_envs, of_lanes)
            schema = Schema.of(observation_space, action_space, extras, num_envs, reward_shape)
        require_choice("prefer", prefer, PREFERENCES)
        self._settings: dict[str, Any] = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "device": device,
            "store_device": store_device,
            "_tuning": _tuning,
        }
        self.schema = schema
        self.num_envs = schema.num_envs
        self.capacity = int(capacity) // schema.num_envs * schema.num_envs
        self.spill_dir = spill_dir
        self.sampler = check_sampler(sampler)
        self._generator = new_generator(seed)
        self._lock = threading.RLock()  # Guards the sampler and the generator.
        self._next_reset_check: float = FIRST_CHECK_TICK  # Tick of the next `_check_for_resets`.
        self._savers = Savers()
        self._attached = Attached()
        self._autosave: Any = None
        self._fetch: Any = None  # Background download of a checkpoint in an object store.
        self._deliveries: dict[str | None, Delivery] = {}
        self._loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
        self.store: Any = self._new_store()
        MEMORIES.add(self)

    def _new_store(self) -> Store | DeviceStore:
        """Return the empty store that the settings describe."""
        tuning = self._settings["_tuning"] or Tuning()
        ticks = self.capacity // self.num_envs
        store_device = self._settings["store_device"]
        device = self._settings["device"]
        if store_device is not None:
            if device not in (None, store_device):
                raise ArgumentError(
                    f"store_device ({store_device}) and device ({device}) differ. Batches are made where the store is: "
                    "leave device out."
                )
            return DeviceStore(self.schema, ticks, store_device, self._settings["budget"])
        self._deliveries[None] = new_delivery(self.schema, device)
        spill_dir = self.spill_dir
        budget = Budget.from_settings(
            self._settings["budget"], self.schema, can_spill=spill_dir is not None, tuning=tuning
        )
        spill = None if spill_dir is None else SpillFolder(require_path("spill_dir", spill_dir), tuning)
        try:
            return Store(self.schema, ticks, budget, prefer=self._settings["prefer"], tuning=tuning, spill=spill)
        except (OSError, OverflowError, MemoryError) as error:
            raise ArgumentError(
                f"capacity ({self.capacity}) takes more address space than this machine gives ({error}). Lower it."
            ) from error

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
        self.store.append(obs, action, reward, next_obs, terminated, truncated, extras, valid)

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
        self.store.extend(obs, action, reward, next_obs, terminated, truncated, extras, valid)

    # ---------------------------------------------------------------- sampling

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions with the memory's sampler."""
        store = self.store
        if type(batch_size) is not int or batch_size < 1:
            batch_size = require_count("batch_size", batch_size, 1)
        if store.next_tick >= self._next_reset_check:
            self._check_for_resets()
        if isinstance(store, DeviceStore):
            with self._lock:
                return store.sample(self.sampler, batch_size, self._generator)
        with self._lock:
            view = store.view()
            draw = self._draw(view, batch_size, batch_size)
        return self._deliveries[None].deliver(draw, view)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        return self.deliver(Draw.from_ids(check_ids(ids)))

    def loader(self, batch_size: int, prefetch: int = 2, device: str | None = None) -> Loader:
        """Return an endless iterator over batches of `batch_size`, which are made ahead in the background.

        A batch is drawn when the batch `prefetch` before it is requested, so one seed gives one sequence of batches.
        A batch does not contain transitions or priorities that were added after it was drawn. `prefetch=0` is the same
        as `sample`.

        Args:
            prefetch: Number of batches that are made ahead. Each takes the memory of a batch.
            device: Device of the batches; the memory's own device by default.
        """
        batch_size = require_count("batch_size", batch_size, 1)
        prefetch = require_count("prefetch", prefetch, 0)
        if isinstance(self.store, DeviceStore):
            return Loader(lambda: partial(_return, self.sample(batch_size)), _return, prefetch)
        delivery = self._delivery_for(device)

        def draw() -> Callable[[], Any]:
            with self._lock:
                view = self.store.view()
                drawn = self._draw(view, batch_size, batch_size)
            return partial(delivery.prepare, drawn, view)

        loader = Loader(draw, delivery.receive, prefetch, delivery.start)
        self._loaders.add(loader)
        return loader

    def load_draws(self, draw: Callable[[], Draw], prefetch: int, device: str | None = None) -> Loader:
        """Return a loader over the batches of draws that the function `draw` makes. For adapters.

        Rewards of other goals are computed by the thread that requests batches, because a framework's environments may
        compute them, and the same thread steps these environments.
        """
        delivery = self._delivery_for(device)

        def start() -> Callable[[], Any]:
            drawn = draw()
            view = self.store.view()
            self._held(view).require_draw(drawn)
            if drawn.goals is not None:
                return partial(_return, delivery.prepare(drawn, view))
            return partial(delivery.prepare, drawn, view)

        loader = Loader(start, delivery.receive, prefetch, delivery.start)
        self._loaders.add(loader)
        return loader

    def draw(self, batch_size: int) -> Draw:
        """Draw as `sample` does, but return only the ids and weights. Rows may repeat. For adapters."""
        batch_size = require_count("batch_size", batch_size, 1)
        store = self.store
        with self._lock:
            if isinstance(store, DeviceStore):
                return store.draw(self.sampler, batch_size, self._generator)
            return self._draw(store.view(), batch_size, 1)

    def deliver(self, draw: Draw, device: str | None = None) -> Batch:
        """Return the batch of a draw, on the memory's device or on `device`. For adapters."""
        store = self.store
        if isinstance(store, DeviceStore):
            self._held(store.view()).require_draw(draw)
            return store.deliver(draw)
        view = store.view()
        self._held(view).require_draw(draw)
        return self._delivery_for(device).deliver(draw, view)

    def _draw(self, view: View, count: int, min_transitions: int) -> Draw:
        """Draw `count` rows if at least `min_transitions` are held. Called with the lock.

        If the draw fails or is interrupted, the generator is as before.
        """
        held = self._held(view)
        if type(self.sampler) is Uniform and view.all_valid:
            require_enough(count, view.next_id - view.first_id, min_transitions)
            return self.sampler.draw(held, count, self._generator)
        require_enough(count, len(view), min_transitions)
        bits = self._generator.bit_generator
        state = bits.state
        try:
            return draw_from(self.sampler, held, count, self._generator)
        except BaseException:
            bits.state = state
            raise

    def _held(self, view: View | DeviceStore) -> Held:
        return Held(view.first_id, view.next_id, self.num_envs, self.capacity, view)

    def _delivery_for(self, device: Any) -> Delivery:
        """Return the delivery to `device`, or to the memory's own device if that is None."""
        if device is not None and not isinstance(device, str):
            raise ArgumentError(f"device ({device!r}) must be a name, such as 'cuda', or None. Pass one.")
        if device == self._settings["device"]:
            device = None
        delivery = self._deliveries.get(device)
        if delivery is None:
            delivery = new_delivery(self.schema, device)
            self._deliveries[device] = delivery
        return delivery

    def _check_for_resets(self) -> None:
        """Warn once if resets of the environment were added as transitions."""
        view = self.store.view()
        self._next_reset_check = next_check_tick(view.next_id // self.num_envs)
        if isinstance(self.store, DeviceStore) or not view.all_valid:
            return
        ids = recent_ids(view.first_id, view.next_id, self.num_envs)
        mode = find_added_resets(RecentTransitions(ids, view.outcomes, view.observation_pairs))
        if mode is not None:
            self._next_reset_check = math.inf
            warn_of_resets(mode, stacklevel=4)

    # ---------------------------------------------------------------- outcomes and rewriting

    def outcomes(self, ids: Any) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return rewards, terminated and truncated of `ids`, which may have any shape. Observations are not read."""
        view = self.store.view()
        wanted = check_ids_of_any_shape(ids)
        self._held(view).require_ids(wanted)
        rewards, terminated, truncated = view.outcomes(wanted)
        return rewards, terminated, truncated

    def are_valid(self, ids: Any) -> NDArray[np.bool_]:
        """Return which of some held ids are transitions. Entries added with `valid=False` are not."""
        view = self.store.view()
        wanted = check_ids(ids)
        require_in_range(wanted, view.first_id, view.next_id)
        valid: NDArray[np.bool_] = view.are_valid(wanted)
        return valid

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set the priorities of transitions, such as the absolute values of their TD errors.

        Args:
            ids: Ids of a batch. Ids that were evicted since are ignored.
            priorities: Numbers of at least 0, one per row of the batch.
        """
        store = self.store
        with self._lock:
            if isinstance(store, DeviceStore):
                store.update_priorities(self.sampler, ids, priorities)
            else:
                set_priorities(self.sampler, self._held(store.view()), ids, priorities)

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Rewrite extras of transitions that are held: recurrent states, latents, values that were computed again.

        Batches that were already returned, or drawn ahead by a loader, do not change.

        Args:
            ids: Ids of transitions; for sequences `batch.ids[batch.mask]`. If an id occurs twice, its last row counts.
            columns: New rows by the name of their extra, one per id, with the extra's shape and dtype.
        """
        store = self.store
        held = self._held(store.view())
        wanted = check_ids(on_host(ids))
        if not columns:
            raise ArgumentError("update was given no rows. Name an extra: update(ids, hidden=...).")
        fit = store.fit_rows if isinstance(store, DeviceStore) else _fit_rows
        rows = self.schema.extras.flatten_some(columns, wanted.shape, fit)
        held.require_ids(wanted)
        self._wait_for_loaders()
        store.rewrite(wanted, rows)

    def set_flags(self, ids: Any, terminated: Any, truncated: Any) -> None:
        """Overwrite terminated and truncated of transitions: some frameworks cut the last episode afterwards."""
        wanted = check_ids(ids)
        ended = fit_flags(terminated, wanted.shape, "terminated", "one flag per id")
        cut = fit_flags(truncated, wanted.shape, "truncated", "one flag per id")
        self._held(self.store.view()).require_ids(wanted)
        self._wait_for_loaders()
        self.store.set_flags(wanted, ended, cut)

    def _wait_for_loaders(self) -> None:
        """Wait until loaders have read the batches that they drew, so that a rewrite does not change these batches."""
        for loader in list(self._loaders):
            loader.wait_until_read()

    # ---------------------------------------------------------------- size and accounting

    def __len__(self) -> int:
        """Count the transitions that can be sampled."""
        return len(self.store)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        first_id: int = self.store.first_id
        return first_id

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        next_id: int = self.store.next_id
        return next_id

    @property
    def fill(self) -> float:
        """Fraction of the capacity that is filled, from 0 to 1."""
        store = self.store
        if isinstance(store, ClosedStore):
            return 0.0
        return float((store.next_id - store.first_id) / self.capacity)

    def report(self) -> MemoryReport:
        """Account for the bytes that the memory holds, field by field, and compare them with the plain layout."""
        store = self.store
        return MemoryReport(
            transitions=len(store),
            fields=tuple(store.report()),
            segments=store.segments,
            staging_bytes=store.staging_bytes,
            backlog=store.backlog,
            failure=store.failure,
            dropped_early=store.dropped_early,
            drop_reason=store.drop_reason,
            budget_bytes=store.budget.max_bytes,
            capacity_that_fits=store.capacity_that_fits,
        )

    def relieve(self, nbytes: int) -> None:
        """Reduce the RAM in use by `nbytes`, as far as this evicts nothing.

        Raw data is compressed. With `spill_dir`, compressed data is spilled.
        """
        self.store.relieve(require_count("nbytes", nbytes, 0))

    @property
    def disk_bytes(self) -> int:
        """Bytes in files of `spill_dir`."""
        store = self.store
        return 0 if isinstance(store, ClosedStore) else int(store.disk_bytes)

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
        return self._savers.save(self._snapshot, url, attach, require_count("keep", keep, 1), mirror, progress)

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

        Another call replaces the earlier settings.

        Args:
            seconds: Seconds between two checkpoints.
            transitions: Transitions between two checkpoints. With both limits, the first that is reached counts.
        """
        autosave = self._savers.save_every(self, url, seconds, transitions, keep, mirror)
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
        _tuning: Tuning | None = None,
    ) -> Self:
        """Load the newest complete checkpoint. The memory continues exactly where it was saved.

        Compressed blocks stay in their files and are read when they are sampled. From an object store, the data of a
        batch is fetched when the batch is drawn. The rest is fetched in the background, to temporary files or
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
            "_tuning": _tuning,
        }
        memory: Self = load_memory(cls, url, settings, sampler, to_whole(capacity), num_envs, recover, timeout)
        return memory

    @property
    def attached(self) -> Attached:
        """Files that were saved with the checkpoint that this memory was loaded from, by name."""
        return self._attached

    def _snapshot(self) -> MemorySnapshot:
        """Return everything that a checkpoint contains. Takes milliseconds."""
        with self._lock:
            store = self.store
            if isinstance(store, DeviceStore):
                store.bring_back_priorities(self.sampler)
            return MemorySnapshot(
                store=store.snapshot(),
                schema=schema_to_json(self.schema),
                capacity_ticks=self.capacity // self.num_envs,
                source=store if isinstance(store, Store) else None,
                state={
                    "sampler": {**describe_sampler(self.sampler), "state": self.sampler.state()},
                    "generator": get_generator_state(self._generator),
                },
            )

    def take_over(self, restored: Restored, sampler: Sampler | None) -> None:
        """Restore a checkpoint in a new memory. For `load`."""
        restored.fill(self.store)
        saved = restored.state["sampler"]
        self._generator = restore_generator(restored.state["generator"])
        self.sampler = choose_sampler(sampler, saved, has_same_ids=restored.keeps_ids)
        if restored.keeps_ids:
            resume_sampler(self.sampler, saved, self.capacity, self.store.first_id)
        self._savers.adopt(restored)
        self._fetch = restored.fetch
        self._attached = restored.attached

    # ---------------------------------------------------------------- pickles and copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the content as arrays that pickle protocol 5 writes without copying them."""
        with self._lock:
            store = self.store
            if isinstance(store, DeviceStore):
                store.bring_back_priorities(self.sampler)
            return {
                "schema": self.schema,
                "capacity": self.capacity,
                "settings": self._settings,
                "generator": copy.deepcopy(self._generator),
                "sampler": copy.deepcopy(self.sampler),
                "store": store.snapshot(),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = state["settings"]
        ReplayMemory.__init__(self, state["schema"], None, state["capacity"], sampler=state["sampler"], **settings)
        self._generator = state["generator"]
        self.store.restore(state["store"])

    def __copy__(self) -> Self:
        """Return an independent memory, as `copy.deepcopy` does: two memories cannot share a sampler."""
        return copy.deepcopy(self)

    # ---------------------------------------------------------------- closing

    def close(self, timeout: float = CLOSE_S) -> None:
        """Wait for saves, and free everything. Batches that were returned stay valid.

        Args:
            timeout: Seconds without progress after which a save is abandoned and an error is raised.
        """
        require_number("timeout", timeout, 0)
        try:
            for background in (self._autosave, self._fetch):
                if background is not None:
                    background.stop()
            self._autosave = None
            self._fetch = None
            self._savers.close(timeout)
        finally:
            self._free()

    def _free(self) -> None:
        store = self.store
        self.store = ClosedStore()
        if not isinstance(store, ClosedStore):
            store.close()
        for delivery in self._deliveries.values():
            delivery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as abandoned:
            if error is None:
                raise
            _LOG.warning("%s", abandoned)  # The error that ended the block is raised, not this one.

    def set_pressure_check(self, check: PressureCheck | None) -> None:
        """Call `check` each time the memory grew by a segment. A memory on a device ignores it."""
        if isinstance(self.store, Store):
            self.store.pressure_check = check

    def after_fork(self) -> None:
        """Close the memory in a forked child. Called there, by its only thread."""
        self.store = ClosedStore(FORKED)
        self._lock = threading.RLock()
        self._savers.after_fork()
        self._autosave = None
        self._fetch = None


def _fit_rows(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    return leaf.fit(on_host(value), leading, argument, "one row per id")


def _return(value: Any) -> Any:
    """Return the argument, for batches that need no preparation."""
    return value

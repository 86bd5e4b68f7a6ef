"""ReplayMemory: exact off-policy experience in a fraction of the memory.

    add    -> Store.append -> Writer.append                one native call, if the arguments need no conversion
    sample -> BatchSource -> Sampler.draw -> Delivery      one native call for the rows
    save   -> Store.snapshot -> checkpoint                 written in the background

This class has the methods that users call. Adapters also use `memory.store`, which holds every field of every
transition, `memory.host_store`, and `memory.batch_source`, which draws ids and makes batches.

Guarantee: `gather(ids)` returns, bit for bit, what `add` was given. `add` refuses arguments that do not fit before it
writes anything.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.background import CLOSE_S
from holdall.batch import Batch, Draw, check_ids, require_held, require_in_range
from holdall.checkpoint import (
    LOAD_S,
    Attached,
    CheckpointReader,
    Loading,
    Manifest,
    MemorySnapshot,
    Progress,
    Restored,
    SaveHandle,
    Savers,
)
from holdall.checks import require_choice, require_count, require_number, require_path, to_whole
from holdall.codec.choice import PREFERENCES
from holdall.delivery import Loader, new_delivery
from holdall.delivery.batch_source import BatchSource, HostBatchSource
from holdall.device.batch_source import DeviceBatchSource
from holdall.device.store import DeviceStore
from holdall.errors import ArgumentError, CheckpointError
from holdall.memory_registry import MEMORIES, Hooks, PressureCheck
from holdall.report import MemoryReport
from holdall.sampling import (
    Sampler,
    Uniform,
    check_sampler,
    choose_sampler,
    describe_sampler,
    get_generator_state,
    new_generator,
    restore_generator,
    resume_sampler,
)
from holdall.schema import MAX_LANES, Schema, fit_flags, move_to_host
from holdall.schema_json import schema_to_json
from holdall.store.budget import Budget
from holdall.store.memory_store import MemoryStore
from holdall.store.missing import FORKED, ON_DEVICE, MissingStore
from holdall.store.spill import SpillFolder
from holdall.store.store import Store
from holdall.store.tuning import Tuning

_LOG = logging.getLogger("holdall")

_MAX_CAPACITY = 2**60
"""With this limit, ids stay below 2**63, however many transitions are added."""


class ReplayMemory:
    """Replay memory for `num_envs` lanes that advance together. All methods may be called from any thread.

    Args:
        observation_space: Any gymnasium Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple. The schema of another
            memory may be passed instead. It then also replaces `action_space`, `num_envs`, `extras` and `reward_shape`.
        action_space: Any of these spaces.
        capacity: Maximum number of transitions over all lanes, rounded down to whole ticks. 1e6 is a million.
        num_envs: Number of lanes, which is the leading axis of everything that is added.
        budget: RAM that the memory may use. "8GiB" or a number of bytes is a hard limit. "auto" keeps the newest
            transitions raw, up to a quarter of the RAM that is available when the first block is full, and compresses
            all others. None compresses all transitions.
        prefer: How much slower sampling compressed data may be than sampling raw data: "speed" about 1.8 times,
            "balanced" 2 times, "memory" 4 times.
        spill_dir: Directory for the oldest compressed transitions that exceed the budget. Without it, a memory with a
            hard limit drops its oldest transitions early, see `report().capacity_that_fits`.
        device: None for batches of NumPy arrays; "cpu" or "cuda" for torch tensors there; "jax" for arrays of JAX.
        store_device: "cuda" keeps all transitions on that device, and makes batches there.
        seed: Seed of the sampler's generator.
        extras: Further fields per transition, by name.
        sampler: Sampler that `sample` uses; `Uniform()` by default.
        reward_shape: Shape of one lane's reward if it is not a number: `(n,)` for one reward per agent or objective.

    Attributes:
        store: The `MemoryStore` that holds every transition. For adapters.
        host_store: The same store, for adapters that use methods which only a store on the host has. If the memory is
            on a device, they raise ArgumentError.
        batch_source: The sampler and the generator, and the methods that make batches with them. For adapters.
        schema: Spaces of all fields.
        capacity: Maximum number of transitions over all lanes.

    Examples:
        >>> with holdall.ReplayMemory(Box(-1, 1, (3,)), Discrete(2), capacity=100, seed=0) as small:
        ...     obs = np.zeros(3, np.float32)
        ...     for _ in range(10):
        ...         small.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
        ...     batch = small.sample(4)
        >>> batch.obs.shape, batch.reward
        ((4, 3), array([1., 1., 1., 1.]))
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
        if isinstance(observation_space, Schema):
            num_envs = observation_space.num_envs
        require_count("num_envs", num_envs, 1, most=MAX_LANES)
        of_lanes = " (num_envs: it counts transitions over all lanes)"
        transitions = require_count("capacity", to_whole(capacity), num_envs, of_lanes, _MAX_CAPACITY)
        if isinstance(observation_space, Schema):
            schema = observation_space
        else:
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
        self.capacity = transitions // schema.num_envs * schema.num_envs
        self.spill_dir = spill_dir
        self._savers = Savers()
        self._attached = Attached()
        self._autosave: Any = None
        self._fetch: Any = None  # Background download of a checkpoint in an object store.
        self.store: MemoryStore
        self.host_store: Store | MissingStore
        self.batch_source: BatchSource
        if store_device is None:
            self._make_host_store(check_sampler(sampler), new_generator(seed))
        else:
            self._make_device_store(store_device, check_sampler(sampler), new_generator(seed))
        MEMORIES.add(self, _HOOKS)

    def _make_device_store(self, store_device: str, sampler: Sampler, generator: np.random.Generator) -> None:
        """Make an empty store on `store_device`, and the source of its batches."""
        device = self._settings["device"]
        if device not in (None, store_device):
            raise ArgumentError(
                f"store_device ({store_device}) and device ({device}) differ. Batches are made where the store is: "
                "leave device out."
            )
        ticks = self.capacity // self.num_envs
        tuning = self._settings["_tuning"]
        store = DeviceStore(self.schema, ticks, store_device, self._settings["budget"], tuning)
        self.store = store
        self.host_store = MissingStore(ON_DEVICE, ArgumentError)
        self.batch_source = DeviceBatchSource(store, sampler, generator)

    def _make_host_store(self, sampler: Sampler, generator: np.random.Generator) -> None:
        """Make an empty store on the host, and the source of its batches."""
        device = self._settings["device"]
        delivery = new_delivery(self.schema, device)
        tuning = self._settings["_tuning"] or Tuning()
        spill_dir = self.spill_dir
        budget = Budget.from_settings(
            self._settings["budget"], self.schema, can_spill=spill_dir is not None, tuning=tuning
        )
        ticks = self.capacity // self.num_envs
        spill = None if spill_dir is None else SpillFolder(require_path("spill_dir", spill_dir), tuning)
        try:
            store = Store(self.schema, ticks, budget, prefer=self._settings["prefer"], tuning=tuning, spill=spill)
        except (OSError, OverflowError, MemoryError) as error:
            raise ArgumentError(
                f"capacity ({self.capacity}) takes more address space than this machine gives ({error}). Lower it."
            ) from error
        self.store = store
        self.host_store = store
        self.batch_source = HostBatchSource(store, self.schema, self.capacity, device, delivery, sampler, generator)

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

        Examples:
            >>> obs, _ = env.reset(seed=0)
            >>> next_obs, reward, terminated, truncated, _ = env.step(1)
            >>> memory.add(obs, 1, reward, next_obs, terminated, truncated)
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

        Examples:
            >>> obs = np.zeros((20, 1, 4), np.float32)  # 20 steps of one environment
            >>> actions = np.zeros((20, 1), np.int64)
            >>> never = np.zeros((20, 1), np.bool_)
            >>> memory.extend(obs, actions, np.ones((20, 1)), obs, terminated=never, truncated=never)
        """
        self.store.extend(obs, action, reward, next_obs, terminated, truncated, extras, valid)

    # ---------------------------------------------------------------- sampling

    @property
    def sampler(self) -> Sampler:
        """The sampler that `sample` uses."""
        return self.batch_source.sampler

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions with the memory's sampler.

        Examples:
            >>> memory.sample(32).obs.shape
            (32, 4)
        """
        if type(batch_size) is not int or batch_size < 1:
            batch_size = require_count("batch_size", batch_size, 1)
        return self.batch_source.sample(batch_size)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order.

        Examples:
            >>> memory.gather([memory.first_id, memory.next_id - 1]).reward
            array([1., 1.])
        """
        return self.batch_source.deliver(Draw.from_ids(check_ids(ids)))

    def loader(self, batch_size: int, prefetch: int = 2, device: str | None = None) -> Loader:
        """Return an endless iterator over batches of `batch_size`, which are made ahead in the background.

        A batch is drawn when the batch `prefetch` before it is requested, so one seed gives one sequence of batches.
        A batch does not contain transitions or priorities that were added after it was drawn. `prefetch=0` is the same
        as `sample`.

        Args:
            prefetch: Number of batches that are made ahead. Each takes the memory of a batch.
            device: Device of the batches; the memory's own device by default.

        Examples:
            >>> with memory.loader(32, prefetch=2) as batches:
            ...     for step, batch in zip(range(10), batches):
            ...         assert batch.obs.shape == (32, 4)
        """
        batch_size = require_count("batch_size", batch_size, 1)
        return self.batch_source.load(batch_size, require_count("prefetch", prefetch, 0), device)

    # ---------------------------------------------------------------- validity and rewriting

    def are_valid(self, ids: Any) -> NDArray[np.bool_]:
        """Return which of the held `ids` are transitions. Entries added with `valid=False` are not.

        Examples:
            >>> memory.are_valid([memory.first_id])
            array([ True])
        """
        view = self.store.view()
        wanted = check_ids(ids)
        require_in_range(wanted, view.first_id, view.next_id)
        return view.are_valid(wanted)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set the priorities of transitions, such as the absolute values of their TD errors.

        Args:
            ids: Ids of a batch. Ids that were evicted since are ignored.
            priorities: Numbers of at least 0, one per row of the batch.

        Examples:
            >>> memory = holdall.ReplayMemory(env.observation_space, env.action_space, sampler=holdall.Prioritized())
            >>> obs, _ = env.reset(seed=0)
            >>> memory.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
            >>> batch = memory.sample(1)
            >>> memory.update_priorities(batch.ids, np.array([0.5]))
        """
        self.batch_source.update_priorities(ids, priorities)

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Rewrite extras of held transitions, such as recurrent states, latents, or values that were computed again.

        Batches that were already returned, or drawn ahead by a loader, do not change.

        Args:
            ids: Ids of transitions; for sequences `batch.ids[batch.mask]`. If an id occurs twice, its last row counts.
            columns: New rows by the name of their extra, one per id, with the extra's shape and dtype.

        Examples:
            >>> extras = {"value": Box(-np.inf, np.inf, (), np.float32)}
            >>> memory = holdall.ReplayMemory(env.observation_space, env.action_space, extras=extras)
            >>> obs, _ = env.reset(seed=0)
            >>> memory.add(obs, 0, 1.0, obs, False, False, extras={"value": np.zeros(1, np.float32)})
            >>> memory.update([0], value=np.ones(1, np.float32))
            >>> memory.gather([0]).extras["value"]
            array([1.], dtype=float32)
        """
        store = self.store
        view = store.view()
        wanted = check_ids(move_to_host(ids))
        if not columns:
            raise ArgumentError("update was given no rows. Name an extra: update(ids, hidden=...).")
        rows = self.schema.extras.flatten_some(columns, wanted.shape, store.fit_rows)
        require_held(wanted, view.first_id, view.next_id, view)
        self.batch_source.wait_until_read()
        store.rewrite(wanted, rows)

    def set_flags(self, ids: Any, terminated: Any, truncated: Any) -> None:
        """Overwrite `terminated` and `truncated` of held transitions.

        For frameworks that cut an episode after its last transition was added.

        Examples:
            >>> newest = [memory.next_id - 1]
            >>> memory.set_flags(newest, terminated=[False], truncated=[True])
            >>> memory.gather(newest).truncated
            array([ True])
        """
        store = self.store
        view = store.view()
        wanted = check_ids(ids)
        new_terminated = fit_flags(terminated, wanted.shape, "terminated", "one flag per id")
        new_truncated = fit_flags(truncated, wanted.shape, "truncated", "one flag per id")
        require_held(wanted, view.first_id, view.next_id, view)
        self.batch_source.wait_until_read()
        store.set_flags(wanted, new_terminated, new_truncated)

    # ---------------------------------------------------------------- size and accounting

    def __len__(self) -> int:
        """Count the transitions that can be sampled."""
        return len(self.store)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return self.store.first_id

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self.store.next_id

    @property
    def fill(self) -> float:
        """Fraction of the capacity that is filled, from 0 to 1."""
        return self.store.held_count / self.capacity

    def report(self) -> MemoryReport:
        """Account for the bytes that the memory holds, field by field, and compare them with the plain layout.

        Examples:
            >>> memory.report().transitions == len(memory)
            True
        """
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

        Examples:
            >>> memory.relieve(64 * 2**20)
        """
        self.store.relieve(require_count("nbytes", nbytes, 0))

    @property
    def disk_bytes(self) -> int:
        """Bytes in files of `spill_dir`."""
        return self.store.disk_bytes

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

        Examples:
            >>> checkpoint = memory.save("runs/first", attach={"notes.txt": b"lr 3e-4"}).result()
            >>> checkpoint.number, checkpoint.transitions == len(memory)
            (1, True)
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

        Examples:
            >>> memory.save_every("runs/often", seconds=60)
            >>> memory.close()
        """
        autosave = self._savers.save_every(self, url, seconds, transitions, keep, mirror)
        previous = self._autosave
        self._autosave = autosave
        if previous is not None:
            previous.stop()

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
                that do not need these records are loaded, and the log says what is lost. All data is read and checked.
            store_device: As in the constructor. A memory whose data lived on a device returns there.
            timeout: Seconds without an answer of an object store after which `load` raises an error. After `load`,
                sampling waits until the object store answers or the memory is closed.

        Examples:
            >>> _ = memory.save("runs/second").result()
            >>> loaded = holdall.ReplayMemory.load("runs/second")
            >>> bool((loaded.sample(32).ids == memory.sample(32).ids).all())
            True
        """
        settings = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "device": device,
            "store_device": store_device,
            "_tuning": _tuning,
        }
        loading: Loading[Self] = Loading(
            cls, cls._restore, settings, sampler, to_whole(capacity), num_envs, recover=recover
        )
        return loading.load(url, timeout)

    @property
    def attached(self) -> Attached:
        """Files that were saved with the checkpoint that this memory was loaded from, by name.

        Examples:
            >>> _ = memory.save("runs/third", attach={"notes.txt": b"lr 3e-4"}).result()
            >>> holdall.ReplayMemory.load("runs/third").attached["notes.txt"]
            b'lr 3e-4'
        """
        return self._attached

    def _snapshot(self) -> MemorySnapshot:
        """Return everything that a checkpoint contains. Takes milliseconds."""
        source = self.batch_source
        with source.lock:
            store = self.store
            source.bring_back_priorities()
            return MemorySnapshot(
                store=store.snapshot(),
                schema=schema_to_json(self.schema),
                capacity_ticks=self.capacity // self.num_envs,
                source=store.block_source,
                state={
                    "sampler": {**describe_sampler(source.sampler), "state": source.sampler.state()},
                    "generator": get_generator_state(source.generator),
                },
            )

    def _restore(self, restored: Restored, sampler: Sampler | None) -> None:
        """Take over the content of a checkpoint. Requires a new memory."""
        restored.fill(self.store)
        saved = restored.state["sampler"]
        self.batch_source.generator = restore_generator(restored.state["generator"])
        chosen = choose_sampler(sampler, saved, has_same_ids=restored.keeps_ids)
        self.batch_source.replace_sampler(chosen)
        if restored.keeps_ids:
            resume_sampler(chosen, saved, self.capacity, self.store.first_id)
        self._savers.adopt(restored)
        self._fetch = restored.fetch
        self._attached = restored.attached

    # ---------------------------------------------------------------- pickles and copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the content as arrays that pickle protocol 5 writes without copying them."""
        source = self.batch_source
        with source.lock:
            store = self.store
            source.bring_back_priorities()
            return {
                "schema": self.schema,
                "capacity": self.capacity,
                "settings": self._settings,
                "generator": copy.deepcopy(source.generator),
                "sampler": copy.deepcopy(source.sampler),
                "store": store.snapshot(),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = state["settings"]
        ReplayMemory.__init__(self, state["schema"], None, state["capacity"], sampler=state["sampler"], **settings)
        self.batch_source.generator = state["generator"]
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
        """Close the store. Later calls raise ClosedError."""
        store = self.store
        self.batch_source.close()
        self._replace_store(MissingStore())
        store.close()

    def _replace_store(self, missing: MissingStore) -> None:
        """Make every use of the store raise the error of `missing`."""
        self.host_store = missing
        self.store = missing

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
            _LOG.warning("%s", abandoned)  # The error that ended the `with` block is raised instead.

    def _set_pressure_check(self, check: PressureCheck | None) -> None:
        """Call `check` each time the memory grows by a segment. A memory on a device ignores `check`."""
        self.store.set_pressure_check(check)

    def _close_in_child(self) -> None:
        """Close the memory in a forked child. Called there, by its only thread."""
        self._replace_store(MissingStore(FORKED))
        self.batch_source.close_in_child(FORKED)
        self._savers.after_fork()
        self._autosave = None
        self._fetch = None


def load_checkpoint(manifest: Manifest, reader: CheckpointReader) -> ReplayMemory:
    """Load one checkpoint, to read its transitions. `ReplayMemory.load` loads the newest one, with its sampler."""
    loading = Loading(ReplayMemory, ReplayMemory._restore, {"prefer": "balanced"}, Uniform())
    return loading.load_manifest(manifest, reader.reopen(LOAD_S))


_HOOKS = Hooks(ReplayMemory._set_pressure_check, ReplayMemory._close_in_child)

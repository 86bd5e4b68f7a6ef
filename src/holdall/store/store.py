"""The store: every transition that is held, each field stored in the form that costs least.

    append -> Writer.append                    one native call, if the arguments need no conversion
    view   -> View.read -> Reader.gather       one native call

`append` writes one tick. When the open segment is full, the store closes it, chooses the layouts of the next one, and
asks `placement` which blocks to compress or to move to disk, and which ticks to evict. `view` returns the transitions
that are held now, which can be read by their ids.

Guarantee: `view().read(ids, outputs)` returns, bit for bit, the rows that were written under these ids, whether they
are raw, compressed or on disk by then.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall._native import FULL, UNCHECKED, WRITTEN, Block, Catalog, Coded, Reader, Segment, Writer
from holdall.batch import Flags, Ids
from holdall.codec.choice import FieldCodec
from holdall.codec.codec import Codec
from holdall.errors import ArgumentError, HoldallError, TransitionIdError
from holdall.machine import pool_threads
from holdall.memory_registry import PressureCheck
from holdall.report import FieldReport
from holdall.schema import Array, Leaf, Schema, move_to_host
from holdall.store import placement
from holdall.store.budget import Budget
from holdall.store.columns import Columns
from holdall.store.compactor import Compactor, Job, Result
from holdall.store.early_drops import EarlyDrops
from holdall.store.field_reports import report_fields
from holdall.store.inventory import Inventory
from holdall.store.layout_search import LayoutSearch
from holdall.store.layouts import PAIRED, SlicedLayout
from holdall.store.packer import SegmentPacker
from holdall.store.placement import Form, Holdings, PlacementPlan
from holdall.store.reader_threads import ReaderThreads
from holdall.store.snapshot import StoreState
from holdall.store.spill import DiskRoom, SpillFolder
from holdall.store.step import RawStep, Step, check_step, count_steps
from holdall.store.tuning import Tuning
from holdall.store.view import View
from holdall.store.windows import Window
from holdall.units import format_bytes

_LOG = logging.getLogger("holdall")


class Store:
    """Every field of every transition of one memory.

    `append` and `view` may be called from any thread, because each of them accesses the transitions in one native call.
    A lock guards only the work between two segments.

    Attributes:
        schema: Spaces of all fields.
        columns: Numbers of the columns and of their outputs.
        tuning: Sizes and limits.
        budget: How much RAM the store may use.
        prefer: How much slower sampling may get, which decides the codecs.
        reward_dtype: Dtype of all rewards, which the first reward sets. None before the first reward.
        before_read: Function that fetches blocks which are not on this machine yet. It is called with a catalog and ids
            before rows are read. None: all blocks are on this machine.
    """

    def __init__(
        self,
        schema: Schema,
        capacity_ticks: int,
        budget: Budget,
        *,
        prefer: str = "balanced",
        tuning: Tuning | None = None,
        spill: SpillFolder | None = None,
        first_tick: int = 0,
        max_kept_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.schema = schema
        self.columns = Columns(schema)
        self.tuning = Tuning() if tuning is None else tuning
        self.budget = budget
        self.prefer = prefer
        self.reward_dtype: np.dtype[Any] | None = None
        self.before_read: Callable[[Catalog, Ids], None] | None = None
        self._pressure_check: PressureCheck | None = None  # Called each time a segment is full.
        self._capacity_ticks = capacity_ticks
        self._spill = spill
        self._disk_room = DiskRoom(self.tuning.disk_trial_interval)
        self._compactor = Compactor(self.tuning, budget.max_queued_bytes)
        weakref.finalize(self, self._compactor.stop)  # A store that is dropped without `close` leaves no thread.
        self._codecs: dict[tuple[int, SlicedLayout], FieldCodec] = {}  # By observation leaf and layout.
        self._drops = EarlyDrops(self.tuning.drop_warning_factor)
        self._inventory: Inventory | None = Inventory()  # None: the next `_balance` makes a new one.
        self._is_fit_logged = False
        self._start_tick = first_tick  # First tick when the store was made or restored. Only `failure` uses it.
        self._roll_lock = threading.RLock()  # Re-entrant, because a signal handler may add, too.
        self._layouts = LayoutSearch(schema, self.tuning)  # Guarded by `_roll_lock`.
        self._packer = SegmentPacker(schema.observation.leaves, self.tuning)
        self._writer = self._new_writer(first_tick)
        kept_bytes = budget.staging_bytes if max_kept_bytes is None else max_kept_bytes
        self._reader = Reader(kept_bytes, self.tuning.bytes_per_thread)
        self._helpers = ReaderThreads(self._reader, pool_threads() if threads is None else threads)

    def _new_writer(self, first_tick: int) -> Writer:
        """Return an empty writer whose first tick is `first_tick`."""
        sliced = {i for i, layout in enumerate(self._layouts.layouts) if isinstance(layout, SlicedLayout)}
        tick_bytes = self.schema.num_envs * self.columns.estimate_row_bytes(sliced)
        max_rows_bytes = self.budget.max_rows_bytes(self.tuning)
        self._segment_ticks = self.tuning.choose_segment_ticks(self._capacity_ticks, tick_bytes, max_rows_bytes)
        writer = Writer(
            self.columns.list_columns(),
            self.columns.list_groups(),
            self.schema.num_envs,
            self._capacity_ticks,
            self._segment_ticks,
            self._choose_max_block_bytes(),
            self._layouts.list_layouts(self.columns.flags + 1),
            first_tick,
        )
        if self.reward_dtype is not None:
            writer.set_type(self.columns.reward, int(self.reward_dtype.num))
        return writer

    def _choose_max_block_bytes(self) -> int:
        """Return the maximum bytes of a block."""
        # Every sliced field fills a block of its own, so the fields share the bytes of a segment.
        sliceable_leaves = self._layouts.sliceable_leaves
        block_bytes = self.budget.max_segment_bytes // max(len(sliceable_leaves), 1)
        # A block is freed with its last tick. In a small memory, one block must not span many times the capacity.
        ticks = max(self._capacity_ticks // self.tuning.segments_per_capacity, self.tuning.min_segment_ticks)
        leaves = self.schema.observation.leaves
        largest_bytes = max((leaves[i].nbytes for i in sliceable_leaves), default=0)
        if largest_bytes > 0:
            block_bytes = min(block_bytes, ticks * self.schema.num_envs * largest_bytes)
        return max(block_bytes, 1)

    # ---------------------------------------------------------------- which transitions are held

    @property
    def catalog(self) -> Catalog:
        """The segments that are held right now."""
        return self._writer.catalog

    @property
    def first_tick(self) -> int:
        """The oldest tick that is held."""
        return self._writer.first_tick

    @property
    def next_tick(self) -> int:
        """The tick that is written next."""
        return self._writer.next_tick

    @property
    def first_id(self) -> int:
        """The oldest transition id that is held."""
        return self._writer.first_tick * self.schema.num_envs

    @property
    def next_id(self) -> int:
        """The id of the transition that is written next."""
        return self._writer.next_tick * self.schema.num_envs

    @property
    def held_count(self) -> int:
        """Number of entries that are held, also those that are not transitions."""
        catalog = self._writer.catalog
        return (catalog.next_tick - catalog.first_tick) * self.schema.num_envs

    def __len__(self) -> int:
        """Return the number of transitions. Entries added with `valid=False` are not transitions."""
        catalog = self._writer.catalog
        return (catalog.next_tick - catalog.first_tick) * self.schema.num_envs - catalog.invalid_count

    @property
    def all_valid(self) -> bool:
        """Whether every entry that is held is a transition."""
        return self._writer.catalog.invalid_count == 0

    # ---------------------------------------------------------------- writing

    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
        infos: Any = None,
    ) -> None:
        """Write one tick, or raise ArgumentError and write nothing.

        Waits first if too many blocks are still uncompressed.

        Args:
            infos: Info dicts that say which steps a time limit ended. `terminated` is then the `done` of
                Stable-Baselines3, and `truncated` is ignored.
        """
        # A call without a `RawStep`, because making one would take as long as writing the tick.
        outcome = self._writer.append(obs, action, reward, next_obs, terminated, truncated, extras, valid, infos)
        if outcome != WRITTEN or self._layouts.is_searching:
            given = RawStep(obs, action, reward, next_obs, terminated, truncated, extras, valid, infos)
            self._finish_append(outcome, given)

    def _finish_append(self, outcome: int, given: RawStep) -> None:
        """Write a tick that the writer did not accept at once, and then show the tick to the search for windows."""
        step: RawStep | Step = given
        while outcome != WRITTEN:
            if outcome == UNCHECKED:
                step = self._check((self.schema.num_envs,), given)
            elif outcome == FULL:
                self._roll()
                self._wait_for_room()
            outcome = self._writer.append(*step)
        if self._layouts.is_searching:
            self._search_windows(step.obs, step.next_obs)

    def extend(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
    ) -> None:
        """Write whole trajectories: the arguments of `append` with a leading time axis.

        All arguments are checked before the first step is written. An interrupt is raised after the last step. A second
        interrupt leaves the first steps, each of them complete.
        """
        given = RawStep(obs, action, reward, next_obs, terminated, truncated, extras, valid)
        steps = self._check((count_steps(reward), self.schema.num_envs), given)
        progress = np.zeros(1, np.int64)
        try:
            self._write_steps(steps, progress)
        except BaseException:
            self._write_steps(steps, progress)
            raise

    def _write_steps(self, steps: Step, progress: NDArray[np.int64]) -> None:
        """Write all steps but the first `progress[0]` ones, which are written already."""
        while progress[0] < len(steps.reward):
            first = int(progress[0])
            count = self._writer.extend(steps, progress)
            for position in range(first, first + min(count, self.tuning.detector_max_pairs)):
                if self._layouts.is_searching:
                    obs = tuple(array[position] for array in steps.obs)
                    next_obs = tuple(array[position] for array in steps.next_obs)
                    self._search_windows(obs, next_obs)
            if progress[0] < len(steps.reward):
                self._roll()
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait while too many blocks are queued. Wait for all of them if the RAM of this machine is nearly full."""
        check = self._pressure_check
        if check is not None and check(self.budget.max_segment_bytes):
            self.wait_idle()
        self._compactor.wait_for_room()

    def fit_rows(self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
        """Return new rows of an extra as an array, or raise ArgumentError."""
        return leaf.fit(move_to_host(value), leading, argument, "one row per id")

    def rewrite(self, ids: Ids, rows_by_extra: Mapping[int, Array]) -> None:
        """Overwrite rows of extras, which are named by their numbers. Raise TransitionIdError if an id is not held.

        Closed segments store some extras in two bytes or one bit per value. If a new value does not fit, the extra is
        stored in full again. The store then compares its bytes with the budget at once.
        """
        columns = tuple(self.columns.first_extra + extra for extra in rows_by_extra)
        rows = tuple(array if array.flags.c_contiguous else array.copy() for array in rows_by_extra.values())
        try:
            has_grown = self._writer.rewrite(np.ascontiguousarray(ids), columns, rows)
        except IndexError as error:
            raise TransitionIdError(str(error)) from None
        if has_grown:
            with self._roll_lock:
                self._inventory = None
                self._balance()

    def set_flags(self, ids: Ids, terminated: Flags, truncated: Flags) -> None:
        """Overwrite `terminated` and `truncated`. Raise TransitionIdError if an id is not held.

        The same native call increases `Catalog.flags_changed`, by which samplers notice that flags were overwritten.
        """
        flags = np.asarray(terminated, np.bool_).astype(np.uint8)
        flags |= np.asarray(truncated, np.bool_).astype(np.uint8) << np.uint8(1)
        try:
            self._writer.rewrite(np.ascontiguousarray(ids), (self.columns.flags,), (flags,))
        except IndexError as error:
            raise TransitionIdError(str(error)) from None

    def set_reward_dtype(self, dtype: np.dtype[Any]) -> None:
        """Set the dtype of rewards before the first reward. Raise ArgumentError if rewards have another dtype."""
        with self._roll_lock:
            if self.reward_dtype is None:
                self._writer.set_type(self.columns.reward, int(dtype.num))
                self.reward_dtype = dtype
        if self.reward_dtype != dtype:
            raise ArgumentError(f"The rewards that are held are {self.reward_dtype}, so rewards cannot be {dtype}.")

    def evict(self, before_tick: int) -> None:
        """Drop all transitions of ticks before `before_tick`. If nothing is left, free the open segment, too.

        The memory of other segments is freed when the next segment is closed: until then, the inventory and the jobs
        of the compactor refer to their blocks.
        """
        self._writer.evict(before_tick)
        if before_tick >= self._writer.next_tick:
            self._roll()

    def adopt(self, segment: Segment) -> int:
        """Append a closed segment that was built elsewhere. Return its first tick.

        Call `set_reward_dtype` first. Raise ValueError if the segment has other columns or lanes.
        """
        with self._roll_lock:
            while True:
                self._close_segment()
                try:
                    first_tick = self._writer.adopt(segment)
                    break
                except ValueError:
                    # Another thread may have added a tick since the open segment was closed.
                    if self._writer.catalog.last_segment.ticks == 0:
                        raise
            self._balance()
        self._wait_for_room()
        return first_tick

    def _check(self, leading: tuple[int, ...], given: RawStep) -> Step:
        """Return the checked arguments of `Writer.append` or `extend`. The first step sets the dtype of rewards."""
        checked = check_step(self.schema, leading, self.reward_dtype, given)
        if self.reward_dtype is None:
            with self._roll_lock:
                if self.reward_dtype is None:
                    self._writer.set_type(self.columns.reward, int(checked.reward.dtype.num))
                    self.reward_dtype = checked.reward.dtype
        if checked.reward.dtype != self.reward_dtype:  # Another thread set it meanwhile.
            return check_step(self.schema, leading, self.reward_dtype, given)
        return checked

    # ---------------------------------------------------------------- reading

    def view(self) -> View:
        """Return the transitions that are held now. They stay readable until the view is dropped."""
        if self._reader.wanted_helpers > self._helpers.count:
            self._helpers.start()
        return View(self._writer.catalog, self._reader, self.columns, self.before_read)

    # ---------------------------------------------------------------- between two segments

    def _roll(self) -> None:
        """Close the open segment, start the next one, and compare the bytes held with the budget.

        Does nothing if the open segment has no ticks.
        """
        with self._roll_lock:
            if self._writer.catalog.last_segment.ticks == 0:
                return
            self._close_segment()
            self._balance()

    def _close_segment(self) -> None:
        """Close the open segment, even an empty one, and start the next one with the layouts that fit its data best."""
        open_segment = self._writer.catalog.last_segment
        if open_segment.ticks > 0:
            self._layouts.adapt(open_segment)
        closed = self._writer.roll(self._layouts.list_layouts(self.columns.flags + 1))
        if closed is not None and self.budget.should_pack(self._holdings.memory_bytes):
            parts = self._packer.pack(closed)
            if parts:
                self._writer.replace(closed, parts)

    def _balance(self, *, can_evict: bool = True, can_try_disk: bool = True) -> bool:
        """Compare the bytes held with the budget, and start the work that brings them back within the budget.

        Everything here is derived from the catalog. If an interrupt stops it half-way, the next call decides again.

        Args:
            can_evict: Whether ticks may be evicted early.
            can_try_disk: Whether a block may be written on trial, to find out whether a full disk has room again.

        Returns:
            Whether there is work for the compactor.
        """
        inventory = self._inventory
        self._inventory = None
        if inventory is None:
            inventory = Inventory()
        results = self._compactor.take_results()
        self._record_spills(results)
        self._forget(inventory.update(self._writer.catalog, results))
        self.budget = self.budget.settle(inventory.holdings.memory_bytes, self.tuning)
        self._compactor.max_queued_bytes = self.budget.max_queued_bytes
        plan = placement.plan(inventory.holdings, self.budget, self._disk_room.free_bytes, can_evict=can_evict)
        if plan.evict_before_tick is not None:
            self._evict_early(plan, inventory)
        self._compactor.can_hurry = placement.has_room_for_speed(inventory.holdings, self.budget)
        jobs = self._make_jobs(plan, inventory, can_try_disk=can_try_disk)
        self._compactor.submit(jobs)
        self._log_fit(inventory)
        self._keep_inventory(inventory)
        return bool(jobs)

    @property
    def _holdings(self) -> Holdings[Block]:
        """Sizes of all closed segments and blocks, as of the last call of `_balance`. Empty if it was interrupted."""
        return Holdings() if self._inventory is None else self._inventory.holdings

    def _keep_inventory(self, inventory: Inventory) -> None:
        """Keep an inventory for the next call of `_balance`."""
        if self._inventory is None:
            self._inventory = inventory
        else:
            # A signal handler ran `_balance` meanwhile. Each of the two calls has results that the other one lacks.
            self._inventory = None

    def _forget(self, evicted: list[Block]) -> None:
        """Withdraw the work on blocks that were evicted."""
        self._compactor.withdraw(evicted)
        self._disk_room.record_eviction(evicted)

    def _record_spills(self, results: list[Result]) -> None:
        """Record which blocks the disk took and which it refused."""
        for result in results:
            if result.is_spill and result.error is not None:
                self._disk_room.record_failure(result.block, result.describe_failure())
            elif result.is_spill:
                form = result.block.form
                self._disk_room.record_success(result.block, form.disk_bytes if isinstance(form, Coded) else 0)

    def _evict_early(self, plan: PlacementPlan[Block], inventory: Inventory) -> None:
        """Evict the oldest ticks, because they fit neither into memory nor on the disk."""
        assert plan.evict_before_tick is not None
        self._drops.reason = self._explain_drop()
        self._writer.evict(plan.evict_before_tick, True)
        self._drops.warn(self._writer.dropped_early)
        self._forget(inventory.evict(plan.evict_before_tick))
        self._disk_room.record_freed(plan.freed_disk_bytes)

    def _explain_drop(self) -> str:
        limit = format_bytes(self.budget.max_bytes or 0)
        if self._spill is None:
            return f"budget ({limit}) is full, and there is no spill_dir. Raise budget, pass one, or lower capacity."
        if self._disk_room.free_bytes is not None:
            return self._disk_room.failure
        return f"budget ({limit}) is full of small fields, which stay in memory. Raise budget, or lower capacity."

    def _make_jobs(self, plan: PlacementPlan[Block], inventory: Inventory, *, can_try_disk: bool) -> list[Job]:
        """Return the jobs of a plan, and mark their blocks."""
        holdings = inventory.holdings
        jobs = []
        for block in plan.to_compress:
            jobs.append(Job(block, self._find_codec(inventory, block).encode, holdings[block].memory_bytes))
            inventory.mark(block, Form.COMPRESSING)
        to_spill = list(plan.to_spill)
        if can_try_disk and self._disk_room.is_trial_due():
            trial = next((block for block in holdings.list_blocks(Form.CODED) if block not in plan.to_spill), None)
            self._disk_room.trial = trial
            if trial is not None:
                to_spill.append(trial)
        for block in to_spill:
            assert self._spill is not None  # `placement` spills blocks only if the budget has a disk tier.
            jobs.append(Job(block, self._spill.move, holdings[block].memory_bytes, is_spill=True))
            inventory.mark(block, Form.MOVING)
        return jobs

    def _find_codec(self, inventory: Inventory, block: Block) -> FieldCodec:
        """Return the codec of the field that a block belongs to."""
        key = inventory.layout_of(block)
        if key not in self._codecs:
            leaf, layout = key
            observation = self.schema.observation.leaves[leaf]
            window = Window.from_layout(observation, layout)
            self._codecs[key] = FieldCodec(observation, window, self.prefer, self.tuning)
        return self._codecs[key]

    def find_chosen_codec(self, leaf: int, layout: SlicedLayout) -> Codec | None:
        """Return the codec chosen for an observation leaf, or None before the choice. Any thread may call this."""
        field = self._codecs.get((leaf, layout))
        return None if field is None else field.chosen

    def offer_form(self, block: Block, coded: Coded) -> None:
        """Use `coded`, which a save has compressed, if the block is queued for compression."""
        self._compactor.offer(block, coded)

    def _log_fit(self, inventory: Inventory) -> None:
        """Log once how many transitions the limit holds, if that is less than the capacity.

        An estimate from the first compressed blocks can be several times too low, so half of the limit is in use first.
        """
        if self._is_fit_logged:
            return
        ticks = placement.count_ticks_that_fit(inventory.holdings, self.budget)
        if ticks is None or 2 * inventory.holdings.memory_bytes < (self.budget.max_held_bytes or 0):
            return
        self._is_fit_logged = True
        if ticks < self._capacity_ticks:
            _LOG.warning(
                "budget (%s) holds about %d of the %d transitions of this capacity. After that, the oldest are "
                "dropped early. Raise budget, pass spill_dir, or lower capacity.",
                format_bytes(self.budget.max_bytes or 0),
                ticks * self.schema.num_envs,
                self._capacity_ticks * self.schema.num_envs,
            )

    def _search_windows(self, obs: Any, next_obs: Any) -> None:
        """Show a tick to the search for windows. If the search finds a window, start a segment that uses the window."""
        with self._roll_lock:
            if self._layouts.look(obs, next_obs):
                self._roll()

    # ---------------------------------------------------------------- snapshots

    def snapshot(self) -> StoreState:
        """Return everything that is held. The state never changes and shares its memory with the store."""
        with self._roll_lock:
            catalog = self._writer.snapshot()
            return StoreState(
                first_tick=catalog.first_tick,
                next_tick=catalog.next_tick,
                segments=_list_held_segments(catalog),
                layouts=tuple(self._layouts.layouts),
                windows=tuple(self._layouts.windows),
                reward_dtype=self.reward_dtype,
            )

    @property
    def block_source(self) -> Store:
        """The store itself. A save gets codecs from it, and offers it compressed blocks."""
        return self

    def restore(self, state: StoreState) -> None:
        """Load the transitions of `state` under their ids. New ticks follow them. Only for a store without ticks.

        A smaller capacity keeps the newest ticks.
        """
        with self._roll_lock:
            if self._writer.next_tick > self._writer.first_tick:
                raise HoldallError("A state can only be restored in a store that holds no transitions.")
            first_tick = max(state.first_tick, state.next_tick - self._capacity_ticks)
            segments = [segment for segment in state.segments if segment.first_tick + segment.ticks > first_tick]
            self._layouts.restore(state.layouts, state.windows)
            self.reward_dtype = state.reward_dtype
            writer = self._new_writer(segments[0].first_tick if segments else state.next_tick)
            for segment in segments:
                writer.adopt(segment)
            writer.evict(first_tick)
            self._writer = writer
            self._inventory = None
            self._start_tick = first_tick
            self._balance()

    # ---------------------------------------------------------------- accounting

    def report(self) -> list[FieldReport]:
        """Return the bytes of every field."""
        return report_fields(
            self._writer.catalog, self.schema, self.columns, self.reward_dtype, self._segment_ticks, self.describe
        )

    @property
    def segments(self) -> int:
        """Number of segments, with the open one."""
        return len(self._writer.catalog.segments)

    @property
    def backlog(self) -> int:
        """Number of blocks that are to be compressed or moved to disk."""
        return self._compactor.backlog

    @property
    def failure(self) -> str:
        """Why a block could not be compressed or moved to disk. Empty if all could.

        With a disk tier, this is also the reason why ticks were dropped early, while fewer ticks are held than the
        capacity allows.
        """
        failure = self._compactor.failure
        if failure or self._spill is None:
            return failure
        is_short = self.first_tick > max(self._start_tick, self.next_tick - self._capacity_ticks)
        return self._drops.reason if is_short else ""

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier."""
        return 0 if self._spill is None else self._spill.disk_bytes

    @property
    def staging_bytes(self) -> int:
        """Memory of freed batches that is kept for later batches."""
        return self._reader.kept_bytes

    @property
    def dropped_early(self) -> int:
        """Number of transitions that were evicted before the capacity was reached."""
        return self._writer.dropped_early

    @property
    def drop_reason(self) -> str:
        """Why transitions were evicted early, and what to do. Empty if none were."""
        return self._drops.reason if self._writer.dropped_early > 0 else ""

    @property
    def capacity_that_fits(self) -> int | None:
        """Transitions that the limit holds, if that is known and less than the capacity."""
        with self._roll_lock:
            ticks = placement.count_ticks_that_fit(self._holdings, self.budget)
        if ticks is None or ticks >= self._capacity_ticks:
            return None
        return ticks * self.schema.num_envs

    def set_pressure_check(self, check: PressureCheck | None) -> None:
        """Replace the function that is called each time a segment is full. None: no function."""
        self._pressure_check = check

    def relieve(self, nbytes: int) -> None:
        """Lower the budget so that compressing blocks, or moving them to disk, frees `nbytes`. Nothing is evicted."""
        with self._roll_lock:
            self._balance(can_evict=False)
            holdings = self._holdings
            self.budget = self.budget.lower(
                nbytes, raw_bytes=holdings.block_bytes[Form.RAW], held_bytes=holdings.memory_bytes
            )
            self._balance(can_evict=False)

    def wait_idle(self) -> None:
        """Wait until every block is compressed or moved to disk as the budget demands."""
        is_busy = True
        while is_busy:
            self._compactor.wait_idle()
            with self._roll_lock:
                is_busy = self._balance(can_evict=False, can_try_disk=False)

    def close(self) -> None:
        """Stop all threads and delete the disk tier. Nothing may be written or read after this."""
        self._compactor.close()
        self._helpers.dismiss()
        if self._spill is not None:
            self._spill.close()

    def describe(self, leaf: int) -> str:
        """Return how observation leaf number `leaf` is stored, for reports."""
        layout = self._layouts.layouts[leaf]
        if isinstance(layout, SlicedLayout):
            return self._describe_slices(leaf, layout)
        if layout == PAIRED:
            return "observations and next observations in full"
        closed = self._writer.catalog.segments[-2:-1]
        is_packed = bool(closed) and closed[0].parts[leaf].kind == "packed"
        if is_packed:
            return "each observation once, without values that repeat"
        return "each observation once"

    def _describe_slices(self, leaf: int, layout: SlicedLayout) -> str:
        """Return the window and the codec of an observation leaf that is stored as slices."""
        window = self._layouts.windows[leaf]
        description = window.describe()
        if window.count > 1:
            description += f"; {self._average_shared_slices(leaf):.2f} of them are shared with the step before"
        codec = self._codecs.get((leaf, layout))
        return description if codec is None else f"{description}; {codec.describe()}"

    def _average_shared_slices(self, leaf: int) -> float:
        """Return the average number of slices that a next observation shares with its observation."""
        window = self._layouts.windows[leaf]
        transitions = 0
        broken = 0
        for segment in self._writer.catalog.segments:
            part = segment.parts[leaf]
            if part.layout == window.layout():
                transitions += segment.ticks * segment.lanes
                broken += part.broken
        return (window.count - window.shift) * (1 - broken / max(transitions, 1))


def _list_held_segments(catalog: Catalog) -> tuple[Segment, ...]:
    """Return the segments of a catalog that have a held tick.

    A segment whose ticks exceed the capacity stays in the catalog until the next roll. The oldest ticks are evicted
    first, so only the first segments are checked: a memory may have thousands of segments.
    """

    def is_evicted(segment: Segment) -> bool:
        return segment.first_tick + segment.ticks <= catalog.first_tick

    return tuple(itertools.dropwhile(is_evicted, catalog.segments))

"""The store: every field of every transition that a memory holds.

    write(tick)         write one tick to ring buffers and segments; compress and spill full blocks by the budget
    read(ids)           copy rows of small fields, and locate the slices of large ones
    rewrite(ids)        overwrite flags and extras of transitions
    freeze(), thaw()    take a snapshot for a checkpoint, and restore one
    content(), rows()   the same for pickles, sharing memory with the store
    adopt(segment)      append ticks that another process compressed; `segment_at` returns such segments
    report()            account for the bytes of every field

A shard is a store of one lane that only adopts: the id of a transition is the number of its row there. A segment that
is sent over the network or written to a journal is a `SealedSegment`.

Guarantee: what is read under an id is, bit for bit, what was written under it. A snapshot never changes. Control has
one direction: the store asks the segments which blocks are full, the tiers what to do with them, and the sealer for
results. A signal handler may raise between any two instructions. A tick is then written completely or not at all, and
the next call undoes or completes every other change, see `Repair`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError, HoldallError
from holdall.report import FieldReport, field_name
from holdall.schema import Array, Bytes, Schema
from holdall.storage.batch_source import BatchSource, Places, Rows, RowSources, RowTable, fresh_bytes
from holdall.storage.blocks import SliceBlock
from holdall.storage.records import SpillFolder
from holdall.storage.repair import Repair
from holdall.storage.rings import CURSOR_BYTES, TINY_BYTES, Rings, field_layouts
from holdall.storage.sealed_segment import SealedSegment, travelling
from holdall.storage.sealer import Sealer
from holdall.storage.segment import SEGMENT_BYTES, FullBlock, Segments
from holdall.storage.slices import ClosedPart, OpenSlices, Segment, Window, WindowScout
from holdall.storage.snapshot import (
    FrozenRows,
    FrozenStore,
    Ring,
    RowChunk,
    RowSnapshots,
    StoreContent,
    chunk_ticks_of,
    chunks_of,
    put_rows,
    rows_of,
)
from holdall.storage.ticks import NO_ROOM, NOT_CONTINUED, Kernels, SlicedTick, StepsLeft, Tick, TickWriter
from holdall.storage.tiers import NO_LIMIT, Allowance, Budget, EarlyDrops, Tiers
from holdall.units import format_bytes

_SNAPSHOT_S = 0.003
"""Seconds without a choice of codecs after a snapshot begins. A snapshot that has the GIL to itself takes less."""
_WARN_AGAIN_FACTOR = 10
"""A warning of early drops is repeated when this many times as many transitions were dropped."""
_LOG = logging.getLogger("holdall")


class Store:
    """All fields of a memory, in ring buffers and segments.

    The store owns the segments, the tiers, and the sealer with its worker thread. Not thread-safe: callers hold `lock`,
    except for `wait_for_room` and `close`.

    Args:
        lock: Lock that guards every call. The worker takes it to deliver compressed blocks.
        folder: Disk tier; None without one.
        first_tick: Number of the first tick that will be written.
        large: Observation leaves that are stored in segments. None: chosen by their size and by detected windows.
        rings: Ring buffers for all other fields, if these are not in host memory.

    Attributes:
        repair: Repairs a change that was interrupted.
        sealer: Background compression; None before the first block is full.
        large_segments: Segments of the large fields.
        fast_tick: Fast path that writes ticks in one native call.
        batch_reader: Fast path that draws batches in one native call.
        flags_changed: Number of `set_flags` calls.
        rewrites: Number of `rewrite` calls.
    """

    def __init__(
        self,
        schema: Schema,
        capacity_ticks: int,
        kernels: Kernels,
        lock: Any,
        budget: Budget,
        folder: SpillFolder | None = None,
        *,
        first_tick: int = 0,
        large: Collection[int] | None = None,
        rings: Rings | None = None,
    ) -> None:
        self._schema = schema
        self._lanes = schema.num_envs
        self._capacity_ticks = capacity_ticks
        self._ring_ticks = capacity_ticks + 1
        self._kernels = kernels
        self._lock = lock
        self._budget = budget
        self._folder = folder
        self._begun_at = first_tick  # first tick that was ever written to this store
        self._not_before = first_tick  # ticks before this one were dropped by `forget_before` or `thaw`
        self.repair = Repair()
        self.flags_changed = 0
        self.rewrites = 0

        leaves = schema.observation.leaves
        layouts = field_layouts(schema, self._ring_ticks, large)
        self._large = layouts[0].large  # numbers of the observation leaves that are stored in segments
        most_bytes = NO_LIMIT
        if budget.limit is not None:
            self._large, most_bytes = budget.choose(layouts)
        small = [i for i in range(len(leaves)) if i not in self._large]
        searched = small if large is None else []
        self._rings = Rings(schema, self._ring_ticks, small, first_tick) if rings is None else rings
        self._rings.scouts = {i: WindowScout(leaves[i]) for i in searched if leaves[i].nbytes > TINY_BYTES}
        most_raw = NO_LIMIT if budget.is_auto else budget.limit or 0
        self.large_segments = Segments(
            kernels,
            [leaves[i] for i in self._large],
            self._lanes,
            capacity_ticks,
            self.repair,
            most_bytes,
            first_tick,
            most_raw,
        )

        self.sealer: Sealer | None = None
        self._tiers = Tiers(budget, measures_early=budget.limit is not None and folder is None)
        self._is_fit_known = (
            budget.limit is None or folder is not None
        )  # whether a budget below the capacity was logged
        self._spare_bytes: int | None = None  # of `Sealer.spare_bytes`
        self._may_use_fast_preset = True
        self._writer = self._new_writer(first_tick, first_tick)
        self._snapshots = RowSnapshots(self._lanes)
        self.early_drops = EarlyDrops()
        self._warns_at_drops = 1  # the number of early drops that is worth a warning
        self._row_table: RowTable | None = None  # see `row_table`
        self.fast_tick = kernels.new_fast_tick(lock, self.repair)
        self.batch_reader = kernels.new_batch_reader(
            lock, self.repair, self.large_segments.index, budget.staging_bytes // 2, budget.threads
        )

    # ---------------------------------------------------------------- which ticks are held

    @property
    def first_tick(self) -> int:
        """Oldest tick that is held. The capacity and the budget limit it."""
        return max(self._not_before, self.next_tick - self._capacity_ticks, self._first_large)

    @property
    def next_tick(self) -> int:
        """Number of the tick that is written next."""
        return self._writer.next_tick

    @property
    def held(self) -> tuple[int, int]:
        """The first id that is held, and the id after the last one."""
        return self.first_tick * self._lanes, self.next_tick * self._lanes

    @property
    def _first_large(self) -> int:
        """Oldest tick in segments; 0 without large fields."""
        return int(self.large_segments.index.first_ticks[0]) if self._large else 0

    @property
    def transitions(self) -> int:
        """Number of transitions that are held. Entries added with `valid=False` are not transitions."""
        first = self.first_tick
        return (self.next_tick - first) * self._lanes - self._rings.count_invalid(first, self.next_tick)

    @property
    def all_valid(self) -> bool:
        """Whether every entry that is held is a transition."""
        return self._rings.invalid is None or self._rings.count_invalid(self.first_tick, self.next_tick) == 0

    @property
    def reward_dtype(self) -> np.dtype[Any] | None:
        """Dtype of all rewards, which the first reward sets; None before it."""
        return None if self._rings.reward is None else self._rings.reward.dtype

    # ---------------------------------------------------------------- writing ticks

    def write(self, tick: Tick) -> None:
        """Write one tick whose arrays were checked. If the store is full, the oldest tick is evicted."""
        now = self.next_tick
        self.fast_tick.end()
        for frozen in self._snapshots.pending:
            frozen.before_ticks(now, now + 1)
        rows = self._rings.prepare(tick, self.first_tick, now)
        sliced = None
        if self._large:
            obs = [tick.obs[i] for i in self._large]
            next_obs = [tick.next_obs[i] for i in self._large]
            sliced = self.large_segments.prepare_tick(now, obs, next_obs)
        self._write(tick.obs, rows, sliced)
        if sliced is not None:
            self._finish_write(sliced)
        if self._rings.scouts:
            self._look_for_windows(tick)
        self._pack(self.next_tick)
        if not self._snapshots.pending and self._writer.writes(self._rings.flat()):
            self.fast_tick.offer(self._writer, partial(self._rings.fast_arguments, self._large))

    def _write(self, obs: list[Array], rows: list[Array], sliced: SlicedTick | None) -> None:
        """Write a tick in one step. Before it, save the rows that it would overwrite, and make room in the logs."""
        is_kept = False
        for _ in range(3):
            if not self._writer.writes(self._rings.flat()):
                self._writer = self._new_writer(self._writer.first_tick, self.next_tick)
            ticks = self._writer.write(rows, sliced, is_kept=is_kept)
            if ticks == NOT_CONTINUED:
                self._invalidate_batches()
                self._rings.keep_apart(self.next_tick, dict(enumerate(obs)))
                self._writer.keep_apart(self.large_segments.index.is_changed)
                is_kept = True
            elif ticks == NO_ROOM:
                self.large_segments.lengthen_logs()
            else:
                break
        if ticks <= 0:
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    def write_packed(self, packed: bytes, obs: Any, next_obs: Any) -> int:
        """Write a tick whose small fields `fast_tick` packed. Return the result of `TickWriter.write`."""
        if self.repair.is_pending[0]:
            self.repair.run()
        fast = self.fast_tick
        write = self._writer.write_packed
        sliced = None
        if fast.fills_blocks:
            large = [_pick(each, fast.large_keys, is_dict=fast.is_dict) for each in (obs, next_obs)]
            sliced = self.large_segments.prepare_tick(self.next_tick, *large)
        ticks = write(packed, sliced, is_kept=False)
        if ticks == NO_ROOM:
            self.large_segments.lengthen_logs()
            ticks = write(packed, sliced, is_kept=False)
        if ticks == NOT_CONTINUED:
            self._invalidate_batches()
            fast.end()  # another thread may add before `fast` has a writer for the new rings
            small = _pick(obs, fast.small_keys, is_dict=fast.is_dict)
            self._rings.keep_apart(self.next_tick, dict(zip(self._rings.small, small, strict=True)))
            if self._writer.writes(self._rings.flat()):
                self._writer.keep_apart(self.large_segments.index.is_changed)
                ticks = write(packed, sliced, is_kept=True)
                fast.is_open = True
        if ticks > 0 and sliced is not None:
            self._finish_write(sliced)
        self._pack(self.next_tick)
        return ticks

    def write_steps(self, left: StepsLeft, first: int) -> None:
        """Write the step `first` of an `extend`, and the following steps that need no other work in between."""
        segments = self.large_segments
        writer = self._writer
        written = 0
        sliced = None
        if left.steps.valid is None and not (self._snapshots.pending or segments.searches.scouts):
            is_sealing = self.sealer is not None and bool(self.sealer.waiting)
            most = segments.ticks_in_a_piece if is_sealing else NO_LIMIT
            written, sliced = left.write_run(first, writer, self._rings, segments, self._large, most)
        if not written:
            self.write(left.steps.cut(first))
        elif sliced is not None:
            self._finish_write(sliced)
        self._pack(self.next_tick)

    def _finish_write(self, sliced: SlicedTick) -> None:
        """Search large fields for windows, send full blocks to the sealer, and evict old segments."""
        segments = self.large_segments
        now = self.next_tick
        segments.look(now - 1, sliced.obs, sliced.next_obs)
        if segments.frozen:
            self._ensure_sealer().record_filled(sum(frozen.block.used_bytes for frozen in segments.frozen))
            self._settle(may_evict=True)
        self._evict_before(now - self._capacity_ticks)
        self._writer.blocks_pause_tick = segments.pause_tick(self._capacity_ticks)

    def _new_writer(self, first_tick: int, next_tick: int) -> TickWriter:
        self._invalidate_batches()
        writer = self._rings.new_writer(self._kernels, (first_tick, next_tick), self.repair)
        if self.sealer is None:
            writer.limit(NO_LIMIT)
        return writer

    def _invalidate_batches(self) -> None:
        """Stop the fast path of batches until `offer_batches`, because rows move or are about to move."""
        self.large_segments.index.is_changed[0] = 1

    def _pack(self, end_tick: int) -> None:
        """Compress the columns of small observations before `end_tick`, once a run of ticks is complete."""
        if end_tick >= self._rings.pause_tick:
            self._invalidate_batches()
            self._rings.pack(self._kernels, self.first_tick, end_tick, self._writer)

    def _look_for_windows(self, tick: Tick) -> None:
        """Search the fields in rings for windows, and move a field to segments when a window was detected."""
        may_move = self.large_segments.can_admit(self.first_tick, self.next_tick)
        self.repair.begin(self._rollback_action())
        for i, window in self._rings.look_for_windows(tick, may_move=may_move).items():
            self._move_to_segments(i, window)
        self.repair.end()

    def _move_to_segments(self, i: int, window: Window) -> None:
        """Move the observation leaf `i` from its ring to segments."""
        first = self.first_tick
        end = self.next_tick
        ring = self._rings.give_up(i)
        ticks = list(zip(ring.rows(first, end), ring.following(first, end), strict=True))
        self.large_segments.admit(ring.leaf, window, first, ticks)
        self._large.append(i)

    # ---------------------------------------------------------------- budget, compression and eviction

    def _rollback_action(self) -> Callable[[], None]:
        targets = (self, self._rings, *self.large_segments.rollback_targets(), *self._tiers.rollback_targets())
        return self.repair.restoring(*targets)

    def _change_or_roll_back(self, action: Callable[[], object]) -> None:
        """Run an action. If it is interrupted, the next call undoes it."""
        self.repair.begin(self._rollback_action())
        action()
        self.repair.end()

    def _settle(self, *, may_evict: bool) -> None:
        """Compress, spill and evict blocks by the budget."""
        self._change_or_roll_back(lambda: self._decide(may_evict))
        self.repair.do(self._send_orders)

    def _decide(self, may_evict: bool) -> None:
        """Decide which blocks are compressed and spilled, and evict segments that do not fit."""
        tiers = self._tiers
        segments = self.large_segments
        for frozen in segments.take_frozen():
            tiers.keep(frozen)
        allowance = tiers.allowance(self._fixed_bytes, segments.overhead_bytes, segments.segment_bytes)
        tiers.settle(allowance, 0.0 if self.sealer is None else self.sealer.bytes_per_second)
        freed_bytes = self._evict_early(allowance) if may_evict else 0
        tiers.try_again(allowance, freed_bytes)
        self._spare_bytes = tiers.spare_bytes(allowance)
        self._may_use_fast_preset = tiers.has_room(allowance, 2 * segments.segment_bytes)

    def _evict_early(self, allowance: Allowance) -> int:
        """Drop the oldest segments while the tiers ask for it; count their transitions, and return the freed disk."""
        freed_bytes = 0
        held = None
        while self._tiers.is_over(allowance, freed_bytes):
            held = self.transitions if held is None else held
            gone = self.large_segments.evict_oldest()
            if gone is None:
                break
            freed_bytes += self._tiers.forget(gone)
        if held is not None and held > self.transitions:
            self.early_drops = self.early_drops.plus(held - self.transitions, self._drop_reason)
        return freed_bytes

    @property
    def _drop_reason(self) -> str:
        if self._folder is not None:
            return self.failure
        limit = format_bytes(self._budget.limit or 0)
        return f"budget ({limit}) is full, and there is no spill_dir; raise budget, name a spill_dir, or lower capacity"

    def _next_drop_warning(self) -> str:
        """Return a warning of early drops if one is due, under the lock: the first drop, and ten times as many."""
        dropped = self.early_drops.transitions
        if dropped < self._warns_at_drops:
            return ""
        self._warns_at_drops = _WARN_AGAIN_FACTOR * dropped
        return f"{dropped} transitions were dropped early so far: {self.early_drops.reason}"

    def _send_orders(self) -> None:
        """Submit the tiers' new orders to the sealer, and withdraw those that no longer hold."""
        sealing, spilling = self._tiers.under_way()
        if self.sealer is None and not sealing and not spilling:
            return
        sealer = self._ensure_sealer()
        sealer.queue.spare_bytes = self._spare_bytes
        sealer.allow_fast_preset(is_allowed=self._may_use_fast_preset)
        sealer.withdraw(sealer.waiting - {id(frozen.block) for frozen in (*sealing, *spilling)})
        for frozen in sealing:
            sealer.submit(frozen)
        for frozen in spilling:
            sealer.spill(frozen)
        self._writer.limit(-NO_LIMIT)  # the fast path waits until `wait_for_room` computes the limit again

    def _ensure_sealer(self) -> Sealer:
        """Return the sealer, which is created for the first full block."""
        if self.sealer is None:
            budget = self._budget
            write = None if self._folder is None else self._folder.write
            self.sealer = Sealer(
                self._kernels.coder, budget.cost_cap, budget.threads, self._collect_sealed, write, budget.waiting_bytes
            )
        return self.sealer

    def wait_for_room(self) -> None:
        """Wait until the sealer is ready for another tick. Called without the lock. The fast path checks by itself."""
        sealer = self.sealer
        if sealer is None:
            return
        sealer.wait_for_room(self.large_segments.open_bytes)
        with self._lock:  # so that no other thread submits a block before the limit is set
            allowed, sealed = sealer.allowance()
            self._writer.limit(allowed - sealed, sealer.sealed_bytes)
            warning = self._next_drop_warning()
        if warning:
            _LOG.warning(warning)

    @property
    def is_crowded(self) -> bool:
        """Whether so many bytes wait for the sealer that the caller has to wait before it writes another tick."""
        return self.sealer is not None and self.sealer.is_crowded(self.large_segments.open_bytes())

    def relieve(self, nbytes: int) -> None:
        """Reduce the bytes in RAM by `nbytes`: raw blocks are compressed and spilled. Nothing is evicted."""
        if self.large_segments.frozen:  # blocks that `thaw` left for later
            self._settle(may_evict=False)
        self._change_or_roll_back(lambda: self._tiers.relieve(nbytes))
        self._settle(may_evict=False)

    def forget_before(self, tick: int) -> None:
        """Drop the ticks before `tick`."""
        self._invalidate_batches()
        self._not_before = max(self._not_before, min(tick, self.next_tick))
        self._evict_before(self._not_before)

    def _evict_before(self, tick: int) -> None:
        """Evict the segments whose last tick is older than `tick`."""
        if self.large_segments.has_before(tick):
            gone, evict = self.large_segments.prepare_eviction(tick)
            self.repair.begin(self.repair.restoring(*self._tiers.rollback_targets()))
            # The tiers come first: a segment that stays because of an interrupt is evicted with the next one.
            self._tiers.forget(gone)
            self.repair.do(evict)
            self.repair.do(self._send_orders)

    def _collect_sealed(self) -> None:
        """Publish the blocks that the worker compressed or spilled. Called by the worker thread."""
        with self._lock:
            self.repair.run()
            sealer = self._ensure_sealer()
            self.large_segments.recycles = sealer.is_fed_fast
            for block, sealed, _ in sealer.collect():
                if sealed is not None:
                    self.large_segments.seal(block, sealed)
                self._tiers.take_back(block)
            # The worker evicts nothing: ids that a caller was just given stay valid until it adds more.
            self._settle(may_evict=False)
            if self._is_fit_known or sealer.is_choosing or self._ticks_that_fit is None:
                return
            self._is_fit_known = True
            fits = self.capacity_that_fits
        if fits is not None:
            _LOG.warning(
                "budget holds about %d of the %d transitions of this capacity: from then on the oldest leave early; "
                "raise budget, name a spill_dir, or lower capacity",
                fits,
                self._capacity_ticks * self._lanes,
            )

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of rings and cursors once all of their rows are written."""
        row_bytes = self._rings.row_bytes + CURSOR_BYTES * len(self._large)
        return self._ring_ticks * self._lanes * row_bytes

    @property
    def _ticks_that_fit(self) -> int | None:
        segments = self.large_segments
        ticks = sum(segment.ticks for segment in segments.closed)
        parts = [part for segment in segments.closed for part in segment.parts if part.log is not None]
        raw_bytes_per_tick = sum(part.new_slices * part.window.slice_bytes for part in parts) / max(ticks, 1)
        return self._tiers.ticks_that_fit(
            self._fixed_bytes, segments.overhead_bytes, segments.segment_bytes, ticks, raw_bytes_per_tick
        )

    @property
    def capacity_that_fits(self) -> int | None:
        """Transitions that fit into a budget in bytes without a disk tier; None if unknown, or if the capacity fits."""
        if not self._large or self._folder is not None:
            return None
        ticks = self._ticks_that_fit
        if ticks is None or ticks >= self._capacity_ticks:
            return None
        return ticks * self._lanes

    # ---------------------------------------------------------------- reading rows

    @property
    def row_table(self) -> RowTable:
        """Description of how rows are copied from rings. It is replaced when a field moves."""
        table = self._row_table
        cursors = self.large_segments.cursors
        if table is None or not table.fits(self._rings, cursors):
            table = RowTable(self._rings, cursors)
            self._row_table = table
        return table

    def read(self, ids: NDArray[np.int64], take: Callable[[int], Bytes] = fresh_bytes) -> Rows:
        """Copy the small fields of `ids`, and locate the large ones. All ids must be held.

        Args:
            take: Returns aligned memory for the copies, see `BlockPool.take`.
        """
        large = tuple(self._large)
        table = self.row_table
        wanted = ids if ids.flags.carray else ids.copy()
        columns = table.read(self._kernels, wanted, self.held, take)
        places = None
        if large:
            cursors = columns[-len(large) :]
            places = Places.found(self._kernels, self.large_segments, wanted, cursors, self._lanes)
        return table.rows(columns, large, places)

    def offer_batches(self, rows: int) -> None:
        """Describe the store to `batch_reader`, so that it draws batches of up to `rows` rows, if it can."""
        if self.large_segments.blocks_on_disk or self._rings.reward is None or not self.batch_reader.needs(rows):
            return
        ticks = max(self._not_before, self._first_large), self._capacity_ticks
        self.batch_reader.offer(BatchSource.of(self.sources(), self._rings, self._writer, ticks), rows)

    def sources(self) -> RowSources:
        """Return the arrays that batches are read from."""
        index = self.large_segments.index
        return RowSources(
            self.row_table,
            self.held,
            self._ring_ticks * self._lanes,
            tuple(self._large),
            self.large_segments.cursors,
            index.first_ticks,
            index.records,
            tuple(index.held),
        )

    def are_valid(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of `ids` are transitions. Entries added with `valid=False` are not."""
        return self._rings.are_valid(ids)

    def are_ends(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of `ids` are the last transitions of an episode."""
        return np.asarray(np.logical_or(*self._rings.flags(ids)))

    def rewards(self, ids: NDArray[np.int64]) -> Array:
        """Copy the rewards of `ids`, which may have any shape."""
        return self._rings.rewards(ids)

    def outcomes(self, ids: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
        """Copy rewards, terminated and truncated of `ids`, which may have any shape."""
        return self._rings.rewards(ids), *self._rings.flags(ids)

    def extra(self, number: int, ids: NDArray[np.int64]) -> Array:
        """Copy the extra with this number of `ids`, which may have any shape."""
        return self._rings.extra(number, ids)

    # ---------------------------------------------------------------- rewriting rows

    def set_flags(self, ids: NDArray[np.int64], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Overwrite terminated and truncated of transitions."""
        self.flags_changed += 1
        self.rewrite(*last_rows(ids, {"terminated.0": terminated, "truncated.0": truncated}))

    def rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        """Overwrite rows of some columns.

        After an interrupt, the next call writes `columns` again, so they must be copies, as `last_rows` returns them.
        """
        self.rewrites += 1
        self.repair.do(partial(self._rewrite, ids, columns))

    def _rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        self._snapshots.before_rewrite(ids, tuple(columns), self.chunk_ticks)
        self._rings.rewrite(ids, columns)

    # ---------------------------------------------------------------- snapshots

    def freeze(self, saved: Mapping[int, tuple[int, tuple[str, ...]]]) -> FrozenStore:
        """Return a snapshot of the store. Call `release` when its rows were read.

        Args:
            saved: Chunks of rows that the snapshot may leave out, by number: the version and columns that were saved.
        """
        if self.sealer is not None:
            self.sealer.queue.away_until = time.monotonic() + _SNAPSHOT_S
        rows, versions = self._snapshots.freeze(
            self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self.chunk_ticks, saved
        )
        if rows.is_pending:
            self.fast_tick.end()
        opened = self.large_segments.open
        parts = [part.closed() for part in opened.parts]
        return FrozenStore(
            **self._content(parts),
            filling=[OpenSlices.of(*each) for each in zip(opened.parts, parts, strict=True)],
            open_tick=opened.first_tick,
            transitions=self.transitions,
            rows=rows,
            versions=versions,
        )

    def release(self, rows: FrozenRows) -> None:
        """Forget the rows of a snapshot that were read, or that nobody needs any more."""
        self._snapshots.release(rows)

    def take_again(self, rows: FrozenRows, number: int, version: int) -> RowChunk | None:
        """Return a chunk of rows that a snapshot left out as saved; None if it was overwritten since."""
        return self._snapshots.take_again(rows, number, version, self.next_tick)

    def content(self) -> StoreContent:
        """Return everything but the rows. It shares memory with the store, and later ticks do not change it."""
        return StoreContent(**self._content([part.closed() for part in self.large_segments.open.parts]))

    def _content(self, open_parts: list[ClosedPart]) -> dict[str, Any]:
        """Return everything but the rows, by name. Closed segments are immutable and returned by reference."""
        segments = self.large_segments
        first = segments.open.first_tick
        held = list(segments.closed)
        if self._large and self.next_tick > first:
            held.append(Segment(first, self.next_tick - first, open_parts))
        shared = {i: ring for i, ring in self._rings.small.items() if ring.is_shared}
        newest = {i: ring.newest_next(self.next_tick) for i, ring in shared.items() if self.next_tick}
        return {
            "first_tick": self.first_tick,
            "next_tick": self.next_tick,
            "large": list(self._large),
            "windows": list(segments.windows),
            "searches": segments.searches.state(),
            "segments": held,
            "newest": newest,
            "paired": [i for i in self._rings.small if i not in shared],
            "scouts": {str(i): scout.state() for i, scout in self._rings.scouts.items()},
            "reward_dtype": self.reward_dtype,
            "has_invalid": self._rings.invalid is not None,
        }

    def rows(self) -> list[RowChunk]:
        """Return the rows of all ticks in order. They share memory with the rings."""
        return chunks_of(self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self._lanes)

    def thaw(self, content: StoreContent, rows: Iterable[RowChunk] = ()) -> None:
        """Restore a snapshot in a new store. More rows may follow with `take_rows`, oldest first."""
        leaves = self._schema.observation.leaves
        rings = self._rings
        self._large = list(content.large)
        self._not_before = content.first_tick
        self._begun_at = content.first_tick
        self._writer = self._new_writer(content.first_tick, content.next_tick)
        rings.keep(i for i in range(len(leaves)) if i not in self._large)
        if self._budget.limit is not None:  # the snapshot's large fields may not fit this budget: `choose` raises then
            self._budget.choose(field_layouts(self._schema, self._ring_ticks, self._large))
        sliced = [leaves[i] for i in self._large]
        self.large_segments.thaw(self.next_tick, sliced, content.windows, content.segments, content.searches)
        raw_bytes = sum(frozen.block.used_bytes for frozen in self.large_segments.frozen)
        if raw_bytes > SEGMENT_BYTES or not self._budget.is_auto or self._budget.spills:
            self._settle(may_evict=True)  # otherwise the first tick settles the blocks
        rings.thaw(self.next_tick, self.first_tick, content.newest, content.paired, content.scouts)
        if content.reward_dtype is not None:
            rings.begin(content.reward_dtype, has_invalid=content.has_invalid)
        for chunk in rows:
            self.take_rows(chunk)

    def take_rows(self, chunk: RowChunk) -> None:
        """Restore the rows of some ticks. Ticks before `first_tick` are skipped."""
        held = chunk.since(self.first_tick, self._lanes)
        if held is None:
            return
        self._invalidate_batches()
        self._rings.put(held.first_tick, held.columns, held.apart)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            put_rows(cursors, held.first_tick, held.columns[f"cursors.{i}"])
        self._pack(held.first_tick + held.ticks)

    @property
    def chunk_ticks(self) -> int:
        """Ticks whose rows form one chunk of a checkpoint."""
        return chunk_ticks_of(sum(prod(ring.shape[1:]) * ring.dtype.itemsize for ring in self._columns().values()))

    def columns_like(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shape and dtype of one tick of every column."""
        return {name: (ring.shape[1:], ring.dtype) for name, ring in self._columns().items()}

    def _columns(self) -> dict[str, Ring]:
        """Return all rings by name, with those of cursors: the columns of a chunk of rows."""
        cursors = zip(self._large, self.large_segments.cursors, strict=True)
        return self._rings.columns() | {f"cursors.{i}": ring for i, ring in cursors}

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks of large fields that are neither known nor about to be compressed, newest first."""
        if not self._large:
            return []
        return [full for full in self.large_segments.full_blocks(is_known) if not self._tiers.is_changing(full.block)]

    # ---------------------------------------------------------------- segments of other processes

    def require(self, segment: SealedSegment) -> None:
        """Raise if `adopt` would refuse a segment."""
        segment.require(self._lanes, self._large, self.reward_dtype)

    def adopt(self, segment: SealedSegment) -> int:
        """Append a segment that another process compressed, and return the number of its first tick.

        A store of one lane appends the lanes of a segment tick by tick: row r of the segment becomes tick first + r.
        The slices stay compressed as they are. If the store is full, the oldest ticks are evicted. After an interrupt,
        `repair.run` or the next call completes the change, and `next_tick` shows whether the segment was appended.
        """
        self.repair.run()
        self.require(segment)
        if segment.lanes != self._lanes:
            segment = segment.in_one_lane()
        rings = self._rings
        first = self.next_tick
        ticks = segment.rows.ticks
        end = first + ticks
        self.fast_tick.end()
        # The ticks whose rows are overwritten are dropped before anything is written.
        self.forget_before(min(first, end - self._capacity_ticks))
        for frozen in self._snapshots.pending:
            frozen.before_ticks(first, end)
        rings.pair(max(self.first_tick, first + 2 - self._ring_ticks), first)
        # Invalid entries are counted while the rows of the dropped ticks still exist.
        rings.count_invalid(max(self.first_tick, end - self._capacity_ticks), first)
        held = min(ticks, self._capacity_ticks)
        columns = {name: column[ticks - held :] for name, column in segment.rows.columns.items()}
        rings.begin(columns["reward.0"].dtype, has_invalid="invalid.0" in columns)
        rings.put(end - held, columns, {})
        # Compressed blocks can still be spilled or evicted early. Without a limit and a disk tier, nothing happens.
        may_leave = self._budget.limit is not None or self._folder is not None
        append: Callable[[], None] | None = None
        if self._large:
            cursors = [columns[f"cursors.{i}"] for i in self._large]
            append = self.large_segments.prepare_adoption(first, ticks, segment.parts, cursors, lists_blocks=may_leave)
        self.repair.do(partial(self._append_adopted, append, end))
        if may_leave:
            self._settle(may_evict=True)
        self._evict_before(self.next_tick - self._capacity_ticks)
        return first

    def _append_adopted(self, append: Callable[[], None] | None, next_tick: int) -> None:
        if append is not None:
            append()
        self._writer.next_tick = next_tick

    def segment_at(self, tick: int) -> SealedSegment:
        """Return the segment that holds `tick`, from its first held tick on, in a form that `adopt` takes.

        To visit all segments, ask for `first_tick`, and then for the tick after the last one of each segment.
        """
        first = tick
        end = min(self.next_tick, tick + self.chunk_ticks)
        parts: list[ClosedPart] = []
        if self._large:
            found = self._find_segment(tick)
            first = max(found.first_tick, self.first_tick)
            end = found.first_tick + found.ticks
            fields = sorted(range(len(found.parts)), key=lambda field: self._large[field])
            parts = [travelling(found.parts[field], self._kernels.coder) for field in fields]
        columns = self._rings.copy(first, end)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            columns[f"cursors.{i}"] = rows_of(cursors, first, end)
        return SealedSegment(RowChunk(first, end - first, columns, {}), tuple(parts))

    def _find_segment(self, tick: int) -> Segment[ClosedPart]:
        """Return the segment of large fields that holds `tick`, with its blocks in their current form."""
        segments = self.large_segments
        number = int(np.searchsorted(segments.index.first_ticks, tick, side="right")) - 1
        if number < len(segments.closed):
            return segments.closed[number]
        first = segments.open.first_tick
        return Segment(first, self.next_tick - first, [part.closed() for part in segments.open.parts])

    # ---------------------------------------------------------------- accounting

    @property
    def segments(self) -> int:
        """Number of segments, with the open one."""
        return len(self.large_segments.closed) + 1 if self._large else 0

    @property
    def backlog(self) -> int:
        """Number of blocks that wait to be compressed or spilled."""
        return 0 if self.sealer is None else self.sealer.backlog

    @property
    def failure(self) -> str:
        """Message of the last failure to compress or spill a block. It stays while transitions are missing for it."""
        failure = "" if self.sealer is None else self.sealer.failure
        is_short = self.first_tick > max(self._begun_at, self.next_tick - self._capacity_ticks)
        if not failure and self._folder is not None and is_short:
            return self.early_drops.reason
        return failure

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""
        return sum(self.large_segments.disk_bytes(field) for field in range(len(self._large)))

    def report(self) -> list[FieldReport]:
        """Account for the bytes of every field."""
        held = (self.next_tick - self.first_tick) * self._lanes
        touched = min(self.next_tick - self._begun_at, self._ring_ticks) * self._lanes
        first_in_rings = max(0, self.next_tick - self._capacity_ticks)  # rings also keep ticks that were evicted early
        observed = []
        for i, leaf in enumerate(self._schema.observation.leaves):
            name = field_name("obs", leaf.name)
            plain_bytes = 2 * held * leaf.nbytes
            ring = self._rings.small.get(i)
            if ring is None:
                observed.append(self._report_large(self._large.index(i), name, plain_bytes, touched))
            else:
                finding = ring.describe(first_in_rings, self.next_tick)
                observed.append(FieldReport(name, 0, 0, ring.bytes_of(touched), plain_bytes, finding))
        return observed + self._rings.report(held, touched)

    def _report_large(self, field: int, name: str, plain_bytes: int, cursors: int) -> FieldReport:
        report = self.large_segments.report(field, name, plain_bytes, cursors)
        reason = "" if self.sealer is None else self.sealer.reason(field)
        return replace(report, finding=f"{report.finding}: {reason}") if reason else report

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array with the name that `report` gives its field."""
        found: list[tuple[str, Array]] = []
        for i, leaf in enumerate(self._schema.observation.leaves):
            ring = self._rings.small.get(i)
            held = self.large_segments.arrays(self._large.index(i)) if ring is None else ring.arrays()
            found += [(field_name("obs", leaf.name), array) for array in held]
        return found + self._rings.arrays() + [("spare", array) for array in self.large_segments.arenas.spare]

    # ---------------------------------------------------------------- closing

    def end_writing(self) -> None:
        """Close the fast path of ticks and release its references to rings. Called with the lock."""
        self.fast_tick.close()

    def close(self) -> None:
        """Stop all threads and delete spilled files. Called without the lock, after `end_writing`."""
        self.batch_reader.close()
        if self.sealer is not None:
            self.sealer.stop()
        if self._folder is not None:
            self._folder.close()


def _pick(obs: Any, keys: Sequence[str], *, is_dict: bool) -> list[Array]:
    """Return the leaves `keys` of an observation, in this order."""
    return [obs[key] for key in keys] if is_dict else [obs] * len(keys)


def last_rows(ids: NDArray[np.int64], columns: Mapping[str, Any]) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return every id once, with copies of the last row that each id has in every column."""
    unique, from_the_end = np.unique(ids[::-1], return_index=True)
    last = len(ids) - 1 - from_the_end
    return unique, {name: rows[last] for name, rows in columns.items()}


class UnchangedStore:
    """Guard that makes a pickle fail if its store is written to while it is pickled.

    The pickle would otherwise contain rows of different moments. The guard is pickled last.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._next_tick = store.next_tick
        self._rewrites = store.rewrites

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        ticks = self._store.next_tick - self._next_tick
        updates = self._store.rewrites - self._rewrites
        if ticks or updates:
            raise HoldallError(
                f"the memory was added to while it was pickled ({ticks} ticks, and {updates} updates), so what was "
                "written is not one moment; throw it away, hold the threads that write, and save again"
            )
        return bool, ()

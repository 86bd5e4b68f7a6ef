"""The store: every field of every transition held, each where it costs least.

    write(tick)         rings and segments take a tick; blocks that are full go to the tiers
    freeze(), thaw()    all of it at one moment, for checkpoints

How it is read, and what else is done with all of it, is in store.py.
Invariant: what is read under an id is, bit for bit, what was written under it. Control goes one way: the store asks
the segments which blocks are full or dropped, the tiers what to do with them, and the sealer what became of them.
A signal handler may raise between any two instructions: a tick is then written whole or not at all, and everything else
that a call was in the middle of is undone or finished by the next call, see `Repair`. What is frozen never changes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np

from holdall.errors import DamageError
from holdall.schema import Array, Schema
from holdall.storage.records import SpillFolder
from holdall.storage.rings import CURSOR_BYTES, TINY_BYTES, Rings, field_layouts
from holdall.storage.sealer import Sealer
from holdall.storage.segment import SEGMENT_BYTES, Segments
from holdall.storage.slices import ClosedPart, OpenSlices, Segment, Window, WindowScout
from holdall.storage.snapshot import (
    FrozenRows,
    FrozenStore,
    Ring,
    RowChunk,
    RowSnapshots,
    StoreContent,
    chunk_ticks_of,
    put_rows,
)
from holdall.storage.ticks import NO_ROOM, NOT_CONTINUED, FastTick, Kernels, SlicedTick, Tick, TickWriter
from holdall.storage.tiers import NO_LIMIT, Budget, Tiers

_SNAPSHOT_S = 0.003
"""For so long no codec is chosen: a snapshot takes less, if it has Python's lock to itself."""
_LOG = logging.getLogger("holdall")


class Repair:
    """What the next call has to do first if this one does not get to its end.

    A change of several steps names, before its first one, the action that undoes it, or the one that does all of it
    again. The action gives the same result however often it is run, and whenever it was interrupted itself.
    """

    def __init__(self) -> None:
        self._action: Callable[[], None] | None = None
        self.is_pending = bytearray(1)  # 0: there is nothing to do; read by C

    def begin(self, action: Callable[[], None]) -> None:
        """Name what the next call does if the change that follows is interrupted; it replaces what was named before."""
        self.is_pending[0] = 1
        self._action = action

    def end(self) -> None:
        """The change is complete."""
        self._action = None
        self.is_pending[0] = 0

    def do(self, action: Callable[[], None]) -> None:
        """Do something that the next call does again if it is interrupted."""
        self.begin(action)
        action()
        self.end()

    def run(self) -> None:
        """Do what an interrupted call left to do, if there is any."""
        if self.is_pending[0]:
            if self._action is not None:
                self._action()
            self.end()

    @staticmethod
    def restoring(*changing: object) -> Callable[[], None]:
        """Return an action that sets all attributes of some objects to what they are now.

        Lists, dicts and the like are copied; what they hold is not, so a change must replace it, not write to it.
        """
        copied = (list, dict, set, deque)
        saved = [
            (vars(each), {k: v.copy() if isinstance(v, copied) else v for k, v in vars(each).items()})
            for each in changing
        ]

        def restore() -> None:
            for attributes, values in saved:
                attributes.update(values)

        return restore


class TickStore:
    """Writes and reads all fields of a memory, see `Store`. Not locked: the memory that owns it is.

    Args:
        lock: Guards every call of the store; its worker takes it to hand in what it did.
        first_tick: Number of the first tick that will be held.
        large: Observation leaves that lie in segments, and always will; None: by their size and what is found.
        rings: Where all fields lie that are not large, if not in memory of the host.
    """

    segments_kind: type[Segments] = Segments

    def __init__(
        self, schema: Schema, capacity_ticks: int, kernels: Kernels, lock: Any, budget: Budget,
        folder: SpillFolder | None = None, *, first_tick: int = 0, large: Collection[int] | None = None,
        rings: Rings | None = None,
    ) -> None:  # fmt: skip
        self._begun_at = self._not_before = first_tick
        self.sealer: Sealer | None = None  # made under the lock, with the first block that is full
        self.flags_changed, self.rewrites = 0, 0  # how often flags, or any rows, were written again
        self.repair = Repair()
        self._schema, self._lanes = schema, schema.num_envs
        self._capacity_ticks, self._ring_ticks = capacity_ticks, capacity_ticks + 1
        self._kernels, self._lock, self._folder, self._budget = kernels, lock, folder, budget
        leaves, layouts = schema.observation.leaves, field_layouts(schema, self._ring_ticks, large)
        self._large, most_bytes = (layouts[0].large, NO_LIMIT) if budget.limit is None else budget.choose(layouts)
        small = [i for i in range(len(leaves)) if i not in self._large]
        searched = small if large is None else []
        self._rings = Rings(schema, self._ring_ticks, small, first_tick) if rings is None else rings
        self._rings.scouts = {i: WindowScout(leaves[i]) for i in searched if leaves[i].nbytes > TINY_BYTES}
        sliced, most_raw = [leaves[i] for i in self._large], NO_LIMIT if budget.is_auto else budget.limit or 0
        self.large_segments = self.segments_kind(
            kernels, sliced, self._lanes, capacity_ticks, self.repair, most_bytes, first_tick, most_raw
        )
        self._writer = self._new_writer(first_tick, first_tick)
        self._is_fit_known = budget.limit is None or folder is not None
        self._spare_bytes: int | None = None  # that may wait for it, see `Sealer`
        self._may_hurry = True  # whether it may seal quickly
        self._snapshots = RowSnapshots(self._lanes)

    @cached_property
    def _tiers(self) -> Tiers:
        return Tiers(self._budget, measures_early=self._budget.limit is not None and self._folder is None)

    @cached_property
    def fast_tick(self) -> FastTick:
        """A short way to write ticks; made with the first one."""
        return self._kernels.new_fast_tick(self._lock, self.repair)

    def _end_batches(self) -> None:
        """Draw no batches the short way until it is described again: rows lie elsewhere, or are about to."""
        self.large_segments.index.is_changed[0] = 1

    @property
    def next_tick(self) -> int:
        """Number of the tick that is written next: what was written before it is held."""
        return self._writer.next_tick

    def write(self, tick: Tick) -> None:
        """Write one tick whose arrays were checked; the oldest leaves if the store is full."""
        now = self.next_tick
        self.fast_tick.end()
        for frozen in self._snapshots.pending:
            frozen.before_ticks(now, now + 1)
        rows = self._rings.prepare(tick, self.first_tick, now)
        obs, next_obs = [tick.obs[i] for i in self._large], [tick.next_obs[i] for i in self._large]
        sliced = self.large_segments.sliced(now, obs, next_obs) if self._large else None
        self._write(tick.obs, rows, sliced)
        if sliced is not None:
            self.after_write(sliced)
        if self._rings.scouts:
            self._look_for_windows(tick)
        self._pack(self.next_tick)
        if not self._snapshots.pending and self._writer.writes(self._rings.flat()):
            self.fast_tick.offer(self._writer, partial(self._rings.fast_arguments, self._large))

    def _write(self, obs: list[Array], rows: list[Array], sliced: SlicedTick | None) -> None:
        """Write a tick in one step, after what it would be written over is kept, and there is room for it."""
        is_kept = False
        for _ in range(3):
            if not self._writer.writes(self._rings.flat()):
                self._writer = self._new_writer(self._writer.first_tick, self.next_tick)
            ticks = self._writer.write(rows, sliced, is_kept=is_kept)
            if ticks == NOT_CONTINUED:
                self._end_batches()
                self._rings.keep_apart(self.next_tick, dict(enumerate(obs)))
                self._writer.keep_apart(self.large_segments.index.is_changed)
                is_kept = True
            elif ticks == NO_ROOM:
                self.large_segments.lengthen_logs()
            else:
                break
        if ticks <= 0:
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    def _new_writer(self, first_tick: int, next_tick: int) -> TickWriter:
        self._end_batches()
        writer = self._rings.new_writer(self._kernels, (first_tick, next_tick), self.repair)
        if self.sealer is None:
            writer.limit(NO_LIMIT)
        return writer

    def _pack(self, end_tick: int) -> None:
        """Keep short observations up to a tick without what repeats in them, once enough ticks are complete."""
        if end_tick >= self._rings.pause_tick:
            self._end_batches()
            self._rings.pack(self._kernels, self.first_tick, end_tick, self._writer)

    def write_fast(self, packed: bytes, obs: Any, next_obs: Any) -> int:
        """Write a tick that `fast_tick` packed; return what `TickWriter.write` does."""
        if self.repair.is_pending[0]:
            self.repair.run()
        fast, write, sliced = self.fast_tick, self._writer.write_packed, None
        if fast.fills_blocks:
            large = [_picked(each, fast.large_keys, is_dict=fast.is_dict) for each in (obs, next_obs)]
            sliced = self.large_segments.sliced(self.next_tick, *large)
        ticks = write(packed, sliced, is_kept=False)
        if ticks == NO_ROOM:
            self.large_segments.lengthen_logs()
            ticks = write(packed, sliced, is_kept=False)
        if ticks == NOT_CONTINUED:
            self._end_batches()
            fast.end()  # others may add before its writer is one for the rings that there are then
            small = _picked(obs, fast.small_keys, is_dict=fast.is_dict)
            self._rings.keep_apart(self.next_tick, dict(zip(self._rings.small, small, strict=True)))
            if self._writer.writes(self._rings.flat()):
                self._writer.keep_apart(self.large_segments.index.is_changed)
                ticks, fast.is_open = write(packed, sliced, is_kept=True), True
        if ticks > 0 and sliced is not None:
            self.after_write(sliced)
        self._pack(self.next_tick)
        return ticks

    def after_write(self, sliced: SlicedTick) -> None:
        """Look for windows in large fields, have full blocks sealed, and drop the segments whose ticks left."""
        segments, now = self.large_segments, self.next_tick
        segments.look(now - 1, sliced.obs, sliced.next_obs)
        if segments.frozen:
            self._made_sealer().grew(sum(frozen.block.used_bytes for frozen in segments.frozen))
            self._settle(may_evict=True)
        self._evict_before(now - self._capacity_ticks)
        self._writer.blocks_pause_tick = segments.pause_tick(self._capacity_ticks)

    def _look_for_windows(self, tick: Tick) -> None:
        """Show a tick to the searches in rings, and move fields in which a window was found."""
        may_move = self.large_segments.can_admit(self.first_tick, self.next_tick)
        self.repair.begin(self._restoring())
        for i, window in self._rings.look_for_windows(tick, may_move=may_move).items():
            self._move_to_segments(i, window)
        self.repair.end()

    def _move_to_segments(self, i: int, window: Window) -> None:
        """Move a field in which a window was found."""
        first, end = self.first_tick, self.next_tick
        ring = self._rings.give_up(i)
        ticks = list(zip(ring.rows(first, end), ring.following(first, end), strict=True))
        self.large_segments.admit(ring.leaf, window, first, ticks)
        self._large.append(i)

    def _change(self, action: Callable[[], object]) -> None:
        """Change where things lie; an interrupt leaves them where they were."""
        self.repair.begin(self._restoring())
        action()
        self.repair.end()

    def _restoring(self) -> Callable[[], None]:
        return self.repair.restoring(self, self._rings, *self.large_segments.changing(), *self._tiers.changing())

    def _settle(self, *, may_evict: bool) -> None:
        """Have blocks sealed, spilled and evicted as the budget says."""
        self._change(lambda: self._decide(may_evict))
        self.repair.do(self._send_orders)

    def _decide(self, may_evict: bool) -> None:
        """Decide what is sealed, spilled and evicted."""
        tiers, segments = self._tiers, self.large_segments
        for frozen in segments.take_frozen():
            tiers.keep(frozen)
        allowance = tiers.allowance(self._fixed_bytes, segments.overhead_bytes, segments.segment_bytes)
        tiers.settle(allowance, 0.0 if self.sealer is None else self.sealer.bytes_per_second)
        freed = 0
        while may_evict and tiers.is_over(allowance, freed):
            gone = segments.evict_oldest()
            if gone is None:
                break
            freed += tiers.forget(gone)
        tiers.try_again()
        self._spare_bytes = tiers.spare_bytes(allowance)
        self._may_hurry = tiers.has_room(allowance, 2 * segments.segment_bytes)

    def _made_sealer(self) -> Sealer:
        if self.sealer is None:
            budget, write = self._budget, None if self._folder is None else self._folder.write
            self.sealer = Sealer(self._kernels.coder, budget.cost_cap, budget.threads, self._on_sealed, write)
        return self.sealer

    def wait_for_room(self) -> None:
        """Wait until a tick may come, see `Sealer.wait_for_room`; not under the lock. A short way looks by itself."""
        sealer, segments = self.sealer, self.large_segments
        if sealer is not None:
            sealer.wait_for_room(segments.open_bytes)
            with self._lock:  # so that nobody submits a block meanwhile
                allowed, sealed = sealer.allowance()
                self._writer.limit(allowed - sealed, sealer.sealed_bytes)

    def _send_orders(self) -> None:
        """Tell the worker what was decided: what is new to it, and what is not wanted any more."""
        sealing, spilling = self._tiers.under_way()
        if self.sealer is None and not sealing and not spilling:
            return
        sealer = self._made_sealer()
        sealer.spare_bytes = self._spare_bytes
        sealer.may_seal_quickly(is_harmless=self._may_hurry)
        sealer.withdraw(sealer.waiting - {id(frozen.block) for frozen in (*sealing, *spilling)})
        for frozen in sealing:
            sealer.submit(frozen)
        for frozen in spilling:
            sealer.spill(frozen)
        self._writer.limit(-NO_LIMIT)  # until somebody looks again how much may come

    def _evict_before(self, tick: int) -> None:
        """Drop the segments whose last tick is older than `tick`."""
        if self.large_segments.has_before(tick):
            gone, evict = self.large_segments.evicting(tick)
            self.repair.begin(self.repair.restoring(*self._tiers.changing()))
            self._tiers.forget(gone)  # first: a segment that stays after an interrupt leaves with the next one
            self.repair.do(evict)
            self.repair.do(self._send_orders)

    def _on_sealed(self) -> None:
        """Collect what the worker did; called by its thread."""
        with self._lock:
            self.repair.run()
            sealer = self._made_sealer()
            self.large_segments.recycles = sealer.is_fed_fast
            for block, sealed, _, is_again in sealer.collect():
                if sealed is not None and is_again:
                    self._tiers.exchange_again(block, partial(self.large_segments.seal, block, sealed))
                elif sealed is not None:
                    self.large_segments.seal(block, sealed)
                if not is_again:  # then it may be on its way to disk
                    self._tiers.take_back(block)
            # Nothing leaves here: ids that the caller was just given must stay good until it adds more.
            self._settle(may_evict=False)
            if self._is_fit_known or sealer.is_behind or self._ticks_that_fit is None:
                return
            self._is_fit_known = True
            fits = self.capacity_that_fits
        if fits is not None:
            _LOG.warning(
                "budget holds about %d of the %d transitions of this capacity: from then on the oldest leave early; "
                "raise budget, name a spill_dir, or lower capacity", fits, self._capacity_ticks * self._lanes,
            )  # fmt: skip

    @property
    def _fixed_bytes(self) -> int:
        """What rings and cursors take once all of their rows were written."""
        row_bytes = self._rings.row_bytes + CURSOR_BYTES * len(self._large)
        return self._ring_ticks * self._lanes * row_bytes

    @property
    def _ticks_that_fit(self) -> int | None:
        segments = self.large_segments
        ticks = sum(segment.ticks for segment in segments.closed)
        parts = [part for segment in segments.closed for part in segment.parts if part.log is not None]
        slice_bytes = sum(part.new_slices * part.window.slice_bytes for part in parts) / max(ticks, 1)  # as they came
        return self._tiers.ticks_that_fit(
            self._fixed_bytes, segments.overhead_bytes, segments.segment_bytes, ticks, slice_bytes
        )

    @property
    def capacity_that_fits(self) -> int | None:
        """Transitions that a budget in bytes holds without a disk tier; None if it is not known, or holds all."""
        ticks = self._ticks_that_fit if self._large and self._folder is None else None
        return None if ticks is None or ticks >= self._capacity_ticks else ticks * self._lanes

    @property
    def first_tick(self) -> int:
        """Oldest tick held: by capacity, or by what fits the budget."""
        return max(self._not_before, self.next_tick - self._capacity_ticks, self._first_large)

    @property
    def _first_large(self) -> int:
        """Oldest tick that segments hold; 0 if there are none."""
        return int(self.large_segments.index.first_ticks[0]) if self._large else 0

    @property
    def transitions(self) -> int:
        """Transitions held, without lanes that made none."""
        first = self.first_tick
        return (self.next_tick - first) * self._lanes - self._rings.count_invalid(first, self.next_tick)

    @property
    def reward_dtype(self) -> np.dtype[Any] | None:
        """Of all rewards: that of the first."""
        return None if self._rings.reward is None else self._rings.reward.dtype

    def _content(self, open_parts: list[ClosedPart]) -> dict[str, Any]:
        """All but the rows, by name; closed segments by reference, since they never change."""
        segments, first = self.large_segments, self.large_segments.open.first_tick
        opened = Segment(first, self.next_tick - first, open_parts)
        held = [*segments.closed, opened] if opened.ticks and self._large else list(segments.closed)
        shared = {i: ring for i, ring in self._rings.small.items() if ring.is_shared}
        return {
            "first_tick": self.first_tick, "next_tick": self.next_tick, "large": list(self._large),
            "windows": list(segments.windows), "searches": segments.searches.state(), "segments": held,
            "newest": {i: ring.newest_next(self.next_tick) for i, ring in shared.items() if self.next_tick},
            "paired": [i for i in self._rings.small if i not in shared],
            "scouts": {str(i): scout.state() for i, scout in self._rings.scouts.items()},
            "reward_dtype": self.reward_dtype, "has_invalid": self._rings.invalid is not None,
        }  # fmt: skip

    def freeze(self, saved: Mapping[int, tuple[int, tuple[str, ...]]]) -> FrozenStore:
        """Return what is held now; `release` when its rows were read.

        Args:
            saved: Chunks of rows that are not needed, by number: the version and the columns in which they were saved.
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
        filling = [OpenSlices.of(*each) for each in zip(opened.parts, parts, strict=True)]
        shown: dict[str, Any] = {"filling": filling, "open_tick": opened.first_tick, "transitions": self.transitions}
        return FrozenStore(**self._content(parts), **shown, rows=rows, versions=versions)

    def release(self, rows: FrozenRows) -> None:
        """Forget a snapshot whose rows were read, or are not wanted any more."""
        self._snapshots.release(rows)

    def thaw(self, content: StoreContent, rows: Iterable[RowChunk] = ()) -> None:
        """Take over what was frozen, in a store as it was made; more rows may follow with `take_rows`, oldest first."""
        leaves, rings, self._large = self._schema.observation.leaves, self._rings, list(content.large)
        self._not_before = self._begun_at = content.first_tick
        self._writer = self._new_writer(content.first_tick, content.next_tick)
        rings.keep(i for i in range(len(leaves)) if i not in self._large)
        if self._budget.limit is not None:  # it may be another than here
            self._budget.choose(field_layouts(self._schema, self._ring_ticks, self._large))
        sliced = [leaves[i] for i in self._large]
        self.large_segments.thaw(self.next_tick, sliced, content.windows, content.segments, content.searches)
        raw_bytes = sum(frozen.block.used_bytes for frozen in self.large_segments.frozen)
        if raw_bytes > SEGMENT_BYTES or not self._budget.is_auto or self._budget.spills:
            self._settle(may_evict=True)  # else with the first tick
        rings.thaw(self.next_tick, self.first_tick, content.newest, content.paired, content.scouts)
        if content.reward_dtype is not None:
            rings.begin(content.reward_dtype, has_invalid=content.has_invalid)
        for chunk in rows:
            self.take_rows(chunk)

    def take_rows(self, chunk: RowChunk) -> None:
        """Take over the rows of some ticks; those that this store would not hold any more are passed over."""
        held = chunk.since(self.first_tick, self._lanes)
        if held is None:
            return
        self._end_batches()
        self._rings.put(held.first_tick, held.columns, held.apart)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            put_rows(cursors, held.first_tick, held.columns[f"cursors.{i}"])
        self._pack(held.first_tick + held.ticks)

    @property
    def chunk_ticks(self) -> int:
        """Ticks whose rows are written to a checkpoint as one chunk."""
        return chunk_ticks_of(sum(prod(ring.shape[1:]) * ring.dtype.itemsize for ring in self._columns().values()))

    def columns_like(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shape and dtype of one tick of every column."""
        return {name: (ring.shape[1:], ring.dtype) for name, ring in self._columns().items()}

    def _columns(self) -> dict[str, Ring]:
        """All rings by name, those of cursors too: what a chunk of rows consists of."""
        cursors = zip(self._large, self.large_segments.cursors, strict=True)
        return self._rings.columns() | {f"cursors.{i}": ring for i, ring in cursors}

    def end_writing(self) -> None:
        """Write no more ticks the short way, and let go of the rings; under the lock."""
        if "fast_tick" in vars(self):
            self.fast_tick.close()

    def close(self) -> None:
        """End all threads and delete what was spilled."""
        reader: Any = vars(self).get("batch_reader")  # made with the first batch, see `Store`
        if reader is not None:
            reader.close()
        if self.sealer is not None:
            self.sealer.stop()
        if self._folder is not None:
            self._folder.close()


def _picked(obs: Any, keys: Sequence[str], *, is_dict: bool) -> list[Array]:
    """Return some leaves of an observation, in the order of their keys."""
    return [obs[key] for key in keys] if is_dict else [obs] * len(keys)

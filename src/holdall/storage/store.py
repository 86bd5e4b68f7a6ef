"""All that a store holds at once: taken over from elsewhere, handed out, rewritten, accounted for.

    freeze()         all of it at one moment, for checkpoints and pickles; `thaw` and `take_rows` take it over
    adopt(segment)   ticks that were sealed elsewhere; `segment_at` hands such out

A shard is a store of one lane that only adopts: a transition's id is the number of its row there. A segment that
travels, over the network or to a journal, is a `SealedSegment`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.report import FieldReport
from holdall.schema import Array
from holdall.storage.blocks import SliceBlock
from holdall.storage.layout import field_layouts
from holdall.storage.rings import field_name
from holdall.storage.sealed_segment import SealedSegment, travelling
from holdall.storage.slices import ClosedPart
from holdall.storage.snapshot import (
    FrozenRows,
    FrozenStore,
    FullBlock,
    Ring,
    RowChunk,
    StoreContent,
    chunk_ticks_of,
    chunks_of,
    last_rows,
    put_rows,
    rows_of,
)
from holdall.storage.tick_store import TickStore


class Store(TickStore):
    """All fields of a memory. Not locked: the memory that owns it is."""

    def forget_before(self, tick: int) -> None:
        """Drop the ticks before one."""
        self._not_before = max(self._not_before, min(tick, self.next_tick))
        self._evict_before(self._not_before)

    def require(self, segment: SealedSegment) -> None:
        """Refuse a segment that `adopt` would refuse."""
        segment.require(self._lanes, self._large, self.reward_dtype)

    def adopt(self, segment: SealedSegment) -> int:
        """Take over a segment that was sealed elsewhere as the newest ticks; return the number of its first one.

        A store of one lane takes over the lanes of a segment one after another, tick by tick: row r of it becomes tick
        first + r. Its slices stay as they came. The oldest ticks leave if the store is full.
        """
        self.require(segment)
        if segment.lanes != self._lanes:
            segment = segment.in_one_lane()
        rings, first, ticks = self._rings, self.next_tick, segment.rows.ticks
        self.fast_tick.end()
        self.forget_before(min(first, first + ticks - self._capacity_ticks))  # before anything is written over it
        for frozen in self._snapshots.pending:
            frozen.before_ticks(first, first + ticks)
        rings.pair(max(self.first_tick, first + 2 - self._ring_ticks), first)
        staying = max(self.first_tick, first + ticks - self._capacity_ticks)
        rings.count_invalid(staying, first)  # while the ticks that leave are still there
        held = min(ticks, self._capacity_ticks)
        columns = {name: column[ticks - held :] for name, column in segment.rows.columns.items()}
        rings.begin(columns["reward.0"].dtype, has_invalid="invalid.0" in columns)
        rings.put(first + ticks - held, columns, {})
        restore = self._restoring()
        self.repair.begin(lambda: restore() if self.next_tick == first else None)
        if self._large:
            self.large_segments.adopt(first, ticks, segment.parts, [columns[f"cursors.{i}"] for i in self._large])
        self._writer.next_tick = first + ticks
        self.repair.end()
        self._settle(may_evict=True)
        self._evict_before(self.next_tick - self._capacity_ticks)
        return first

    def segment_at(self, tick: int) -> SealedSegment:
        """Return the segment that holds a tick, from its first tick that is held on, as one that another can adopt.

        Walk over all of them by asking for `first_tick`, and then for the tick behind the last of each.
        """
        first, end = tick, min(self.next_tick, tick + self.chunk_ticks)
        parts: list[ClosedPart] = []
        if self._large:
            found = self.large_segments.segment_at(tick, self.next_tick)
            first, end = max(found.first_tick, self.first_tick), found.first_tick + found.ticks
            fields = sorted(range(len(found.parts)), key=lambda field: self._large[field])
            parts = [travelling(found.parts[field], self._kernels.coder) for field in fields]
        columns = self._rings.copy(first, end)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            columns[f"cursors.{i}"] = rows_of(cursors, first, end)
        return SealedSegment(RowChunk(first, end - first, columns, {}), tuple(parts))

    def set_flags(self, ids: NDArray[np.int64], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Overwrite how transitions ended."""
        self.flags_changed += 1
        self.rewrite(*last_rows(ids, {"terminated.0": terminated, "truncated.0": truncated}))

    def rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        """Write rows of some columns again; they are copies, see `last_rows`, since the next call may have to do so."""
        self.rewrites += 1
        self.repair.do(partial(self._rewrite, ids, columns))

    def _rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        self._snapshots.before_rewrite(ids, tuple(columns), self.chunk_ticks)
        self._rings.rewrite(ids, columns)

    def content(self) -> StoreContent:
        """Return all but the rows, sharing memory with the store; what is added later does not change it."""
        segments = self.large_segments.freeze(self.next_tick)
        held = [segment for segment in (*segments.closed, segments.open) if segment.ticks and self._large]
        return StoreContent(**self._described(), windows=segments.windows, segments=held, searches=segments.searches)

    def _described(self) -> dict[str, Any]:
        """All that is neither rows nor segments."""
        shared = {i: ring for i, ring in self._rings.small.items() if ring.is_shared}
        return {
            "first_tick": self.first_tick, "next_tick": self.next_tick, "large": list(self._large),
            "newest": {i: ring.newest_next(self.next_tick) for i, ring in shared.items() if self.next_tick},
            "paired": [i for i in self._rings.small if i not in shared],
            "scouts": {str(i): scout.state() for i, scout in self._rings.scouts.items()},
            "reward_dtype": self.reward_dtype, "has_invalid": self._rings.invalid is not None,
        }  # fmt: skip

    def rows(self) -> list[RowChunk]:
        """Return the rows of all ticks held, in order, sharing memory with the rings."""
        return chunks_of(self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self._lanes)

    def freeze(self, saved: Mapping[int, tuple[int, tuple[str, ...]]]) -> FrozenStore:
        """Return what is held now; `release` when its rows were read.

        Args:
            saved: Chunks of rows that are not needed, by number: the version and the columns in which they were saved.
        """
        rows, versions = self._snapshots.freeze(
            self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self.chunk_ticks, saved
        )
        if rows.is_pending:
            self.fast_tick.end()
        segments = self.large_segments.freeze(self.next_tick) if self._large else None
        held = self._described() | {"transitions": self.transitions}
        return FrozenStore(**held, rows=rows, versions=versions, segments=segments)

    def take_again(self, rows: FrozenRows, number: int, version: int) -> RowChunk | None:
        """Return a chunk of a snapshot's rows that was thought to be saved; None if it was written over since."""
        return self._snapshots.take_again(rows, number, version, self.next_tick)

    def release(self, rows: FrozenRows) -> None:
        """Forget a snapshot whose rows were read, or are not wanted any more."""
        self._snapshots.release(rows)

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks of large fields that are not known yet nor about to be sealed, newest first."""
        full = self.large_segments.full_blocks(is_known) if self._large else []
        return [block for block in full if not self._tiers.is_changing(block.block)]

    def thaw(self, content: StoreContent, rows: Iterable[RowChunk] = ()) -> None:
        """Take over what was frozen, in a store as it was made; more rows may follow with `take_rows`, oldest first."""
        leaves = self._schema.observation.leaves
        self._not_before = self._begun_at = content.first_tick
        self._large = list(content.large)
        self._writer = self._new_writer(content.first_tick, content.next_tick)
        rings = self._rings
        rings.keep(i for i in range(len(leaves)) if i not in self._large)
        self._budget.choose(field_layouts(self._schema, self._ring_ticks, self._large))  # it may be another than here
        sliced = [leaves[i] for i in self._large]
        self.large_segments.thaw(self.next_tick, sliced, content.windows, content.segments, content.searches)
        self._settle(may_evict=True)
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
        self.batch_reader.end()
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

    @property
    def segments(self) -> int:
        """Segments held, the open one among them."""
        return self.large_segments.count if self._large else 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""
        return sum(self.large_segments.disk_bytes(field) for field in range(len(self._large)))

    def report(self) -> list[FieldReport]:
        """Account for every field."""
        held, observed = (self.next_tick - self.first_tick) * self._lanes, []
        touched = min(self.next_tick - self._begun_at, self._ring_ticks) * self._lanes
        kept = min(self.next_tick, self._capacity_ticks) * self._lanes  # also of ticks that left early
        for i, leaf in enumerate(self._schema.observation.leaves):
            name, plain, ring = field_name("obs", leaf), 2 * held * leaf.nbytes, self._rings.small.get(i)
            if ring is None:
                field = self._large.index(i)
                found, why = self.large_segments.report(field, name, plain, touched), self.sealer.reason(field)
                observed.append(replace(found, finding=f"{found.finding}: {why}") if why else found)
            else:
                observed.append(FieldReport(name, 0, 0, ring.bytes_of(touched), plain, ring.describe(kept)))
        return observed + self._rings.report(held, touched)

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, under the name that `report` gives its field."""
        found: list[tuple[str, Array]] = []
        for i, leaf in enumerate(self._schema.observation.leaves):
            small = self._rings.small.get(i)
            held = self.large_segments.arrays(self._large.index(i)) if small is None else small.arrays()
            found += [(field_name("obs", leaf), array) for array in held]
        return found + self._rings.arrays() + [("spare", array) for array in self.large_segments.arenas.spare]

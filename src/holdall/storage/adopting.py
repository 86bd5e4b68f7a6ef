"""A store that takes over segments that were sealed elsewhere, as the newest ticks, and hands its own out.

A shard is such a store, of one lane, that only adopts: a transition's id is the number of its row there.
"""

from __future__ import annotations

from holdall.storage.sealed_segment import SealedSegment, travelling
from holdall.storage.slices import ClosedPart
from holdall.storage.snapshot import RowChunk, rows_of
from holdall.storage.store import Store


class AdoptingStore(Store):
    """A store whose ticks may come as segments. Not locked, as `Store`."""

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
        for ring in rings.small.values():
            ring.pair(max(self.first_tick, first + 2 - self._ring_ticks), first)
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

"""The store, whole: what it adopts and hands out, and what it accounts for.

    adopt(segment)   ticks that were sealed elsewhere; `segment_at` hands such out
    report()         where the bytes of every field are

A shard is a store of one lane that only adopts: a transition's id is the number of its row there. A segment that
travels, over the network or to a journal, is a `SealedSegment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from holdall.report import FieldReport
from holdall.schema import Array
from holdall.storage.rings import CURSOR_BYTES, field_name
from holdall.storage.saved_store import SavedStore
from holdall.storage.sealed_segment import SealedSegment, travelling
from holdall.storage.segment import Segments
from holdall.storage.slices import AnyPart, ClosedPart, Segment, Window
from holdall.storage.snapshot import RowChunk, rows_of


class Store(SavedStore):
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
            found = self._segment_at(tick)
            first, end = max(found.first_tick, self.first_tick), found.first_tick + found.ticks
            fields = sorted(range(len(found.parts)), key=lambda field: self._large[field])
            parts = [travelling(found.parts[field], self._kernels.coder) for field in fields]
        columns = self._rings.copy(first, end)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            columns[f"cursors.{i}"] = rows_of(cursors, first, end)
        return SealedSegment(RowChunk(first, end - first, columns, {}), tuple(parts))

    def _segment_at(self, tick: int) -> Segment[ClosedPart]:
        """Return the segment of large fields that holds a tick, as it stands."""
        segments = self.large_segments
        number = int(np.searchsorted(segments.index.first_ticks, tick, side="right")) - 1
        if number < len(segments.closed):
            return segments.closed[number]
        parts, first = [part.closed() for part in segments.open.parts], segments.open.first_tick
        return Segment(first, self.next_tick - first, parts)

    @property
    def segments(self) -> int:
        """Segments held, the open one among them."""
        return len(self.large_segments.closed) + 1 if self._large else 0

    @property
    def backlog(self) -> int:
        """Blocks that wait to be sealed or spilled."""
        return 0 if self.sealer is None else self.sealer.backlog

    @property
    def failure(self) -> str:
        """What went wrong last when blocks were sealed or spilled."""
        return "" if self.sealer is None else self.sealer.failure

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""
        return sum(_disk_bytes(self.large_segments, field) for field in range(len(self._large)))

    def report(self) -> list[FieldReport]:
        """Account for every field."""
        held, observed = (self.next_tick - self.first_tick) * self._lanes, []
        touched = min(self.next_tick - self._begun_at, self._ring_ticks) * self._lanes
        kept = [max(0, self.next_tick - self._capacity_ticks), self.next_tick]  # also ticks that left early
        for i, leaf in enumerate(self._schema.observation.leaves):
            name, plain, ring = field_name("obs", leaf), 2 * held * leaf.nbytes, self._rings.small.get(i)
            if ring is None:
                field = self._large.index(i)
                found = _field_report(self.large_segments, field, name, plain, touched)
                why = "" if self.sealer is None else self.sealer.reason(field)
                observed.append(replace(found, finding=f"{found.finding}: {why}") if why else found)
            else:
                observed.append(FieldReport(name, 0, 0, ring.bytes_of(touched), plain, ring.describe(*kept)))
        return observed + self._rings.report(held, touched)

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, under the name that `report` gives its field."""
        found: list[tuple[str, Array]] = []
        for i, leaf in enumerate(self._schema.observation.leaves):
            small = self._rings.small.get(i)
            held = _field_arrays(self.large_segments, self._large.index(i)) if small is None else small.arrays()
            found += [(field_name("obs", leaf), array) for array in held]
        return found + self._rings.arrays() + [("spare", array) for array in self.large_segments.arenas.spare]


def _disk_bytes(segments: Segments, field: int) -> int:
    """Count the bytes of one field on disk; a block counts once, however many segments name it."""
    blocks = {id(s.parts[field].block): s.parts[field].block for s in segments.closed}
    return sum(block.sealed.disk_bytes for block in blocks.values() if block.sealed is not None)


def _field_report(segments: Segments, field: int, name: str, plain_bytes: int, cursors: int) -> FieldReport:
    """Say where the bytes of one large field are."""
    closed = {id(s.parts[field].block): s.parts[field].block for s in segments.closed}
    part, parts = segments.open.parts[field], segments.parts(field)
    blocks = [block for key, block in closed.items() if key != id(part.block)]
    raw = part.used_bytes + sum(block.used_bytes for block in blocks if block.sealed is None)
    sealed = sum(block.used_bytes for block in blocks if block.sealed is not None)
    log = sum(part.log_bytes for part in parts) + cursors * CURSOR_BYTES
    newest = part.window if part.steps or not segments.closed else segments.closed[-1].parts[field].window
    finding = describe_parts(parts, newest)
    return FieldReport(name, raw + sealed, log, 0, plain_bytes, finding, sealed, _disk_bytes(segments, field))


def _field_arrays(segments: Segments, field: int) -> list[Array]:
    """Return the arrays that one large field lies in; an arena that two segments name comes once."""
    parts, direct = segments.parts(field), segments.open.parts[field]
    logs: list[Array] = [part.log for part in parts if part.log is not None]
    blocks = {id(part.block): part.block for part in parts if part.block is not None}
    slices = [array for block in blocks.values() for array in block.arrays()]
    return [*slices, *logs, segments.cursors[field], *([direct.slices] if direct.block is None else [])]


def describe_parts(parts: Sequence[AnyPart], window: Window) -> str:
    """Say what was found about a field by its parts, the open one last, for people."""
    found = window.describe()
    fitting = [part for part in parts if part.window == window]
    steps = sum(part.steps for part in fitting)
    if window.count > 1 and steps:
        shared = max(window.count - sum(part.new_slices for part in fitting) / steps, 0.0)
        found = f"{found}; {shared:.1f} of {window.count} slices shared"
    closed = [part for part in parts if isinstance(part, ClosedPart)]
    sealed = [part.block.sealed for part in closed if part.block.sealed is not None]
    if not sealed:
        return found
    kinds = sorted({each.codec.describe() for each in sealed})
    return f"{found}; {len(sealed)} of {len(closed)} segments sealed by {', '.join(kinds)}"

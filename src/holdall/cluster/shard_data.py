"""What a shard holds: an ordinary store of one lane, whose ticks are row numbers, and how rows are drawn from it.

In:  segments that writers sealed, a journal, or a checkpoint.  Out: rows for answers; segments to move; checkpoints.
Invariant: row numbers only grow, and name the same transition for as long as it is held. Not locked: the shard is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall import storage
from holdall.checkpoint import Restored, SaveHandle, Savers, Snapshot, WriterRun, runs_of, runs_state
from holdall.cluster.answer import Answer, AnswerPacker, BlockPlace, Payload, RowDraw, followed
from holdall.cluster.journal import SLOT_BYTES, Entry, Journal
from holdall.cluster.protocol import ShardCounters
from holdall.cluster.row_reader import ShardReader
from holdall.delivery import Prefetched
from holdall.errors import DamageError
from holdall.json_state import generator_state, restored_generator, schema_of
from holdall.machine import memory_limits
from holdall.native import chosen_kernels
from holdall.sampling import LANE, ComposedSampler, Held, Hindsight, Prioritized, Sampler, resume

_LOADED = bytes(16)
"""Stands for the writer of segments that a checkpoint brought."""
_NO_TICK = 2**40 - 1
"""First tick of a segment whose rows are not known to follow each other: it was held by another shard."""
_SHARE_OF_AVAILABLE = 4

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


class ShardData:
    """All rows of a shard, and what draws from it depend on.

    Args:
        words: The memory's schema, see `holdall.json_state.schema_words`.
        capacity: Most rows held.
        lock: The shard's own.
        neighbours: Shards on a machine, this one counted; together they keep decoded what a memory there would.
    """

    def __init__(
        self, words: dict[str, Any], capacity: int, sampler: Sampler, generator: np.random.Generator,
        lock: threading.Lock, neighbours: int = 1,
    ) -> None:  # fmt: skip
        self.capacity, self.sampler, self.generator = capacity, sampler, generator
        self.inserted = 0  # transitions ever accepted
        self._words = words | {"num_envs": 1}
        self._schema, self._lock, self._kernels = schema_of(self._words), lock, chosen_kernels()
        self._large = storage.sliced_leaves(self._schema)
        decoded_bytes = memory_limits()[0].free_bytes // _SHARE_OF_AVAILABLE // neighbours
        self._reader = ShardReader(self._schema, self._large, self._kernels, decoded_bytes, neighbours)
        self._packer = AnswerPacker()
        self._savers = Savers(self._kernels.coder)
        self._codecs: dict[storage.Codec, storage.Codec] = {}
        self._runs: deque[WriterRun] = deque()
        self._by = followed(sampler)
        self._starts = Prioritized(alpha=0.0)  # counts what a sequence may begin with
        self._order: RowOrder | None = None
        self.store = self.begin_at(0)

    def begin_at(self, first_row: int) -> storage.Store:
        """Hold nothing, and number the next row so."""
        self._runs.clear()
        self._order = RowOrder() if isinstance(self.sampler, ComposedSampler) else None
        budget = storage.Budget.of(None, "balanced", 1)
        self.store = storage.Store(
            self._schema, self.capacity, self._kernels, self._lock, budget, first_tick=first_row, large=self._large
        )
        return self.store

    def unpacked(self, payload: bytes) -> storage.SealedSegment:
        """Read a segment."""
        segment = storage.unpack_segment(payload, self._schema, {}, self._kernels.coder)
        self._bring(part.block for part in segment.parts)
        return segment

    def _bring(self, blocks: Iterable[storage.SliceBlock]) -> None:
        """Have slices in memory, with codecs that they share."""
        for block in blocks:
            if block.sealed is not None:
                coded = block.sealed.coded.in_memory()
                codec = self._codecs.setdefault(coded.codec, coded.codec)
                block.sealed = storage.CarriedSlices(replace(coded, codec=codec))

    def take(self, writer: bytes, segment: storage.SealedSegment) -> None:
        """Take a segment of a writer over."""
        first = self.store.adopt(segment)
        rows, tick, lanes = self.store.next_tick - first, segment.rows.first_tick, segment.lanes
        run = WriterRun(writer.hex(), tick, lanes, first, rows)
        if tick == _NO_TICK:
            run = run._replace(first_tick=-1, lanes=rows)
        self._runs.append(run)
        if self._order is not None:
            self._order.add(run, self.store.first_tick)
        while self._runs[0].first_row + self._runs[0].rows <= self.store.first_tick:
            self._runs.popleft()
        self.inserted += rows

    def segment_at(self, row: int) -> tuple[int, storage.SealedSegment]:
        """Return the first row of a segment that is held, and the segment as one that another shard can adopt."""
        segment = self.store.segment_at(row)
        return segment.rows.first_tick, replace(segment, rows=replace(segment.rows, first_tick=_NO_TICK))

    def packed(self, segment: storage.SealedSegment) -> bytes:
        """Return a segment as bytes."""
        return storage.pack_segment(segment, self._kernels.coder)

    def replay(self, journal: Journal, memory: str, *, waits: bool) -> None:
        """Take a journal over for a memory of this name, and hold all that it holds and shows; see `Journal.open`."""
        for page in journal.open(waits=waits):
            if page.begins:
                self.begin_at(page.first_row)
            elif page.first_row != self.store.next_tick:
                raise DamageError(f"{journal.url} lacks segments before row {page.first_row}; load a checkpoint")
            for entry in page.entries:
                self.take(entry.writer, self.unpacked(entry.payload))
        move = journal.state.move
        # What another memory was moving when it ended may not have arrived; this one's will.
        is_other = move is not None and move.memory != memory
        self.store.forget_before(move.first_row if move is not None and is_other else journal.state.hidden_before)
        self.inserted = self.store.next_tick
        self._resume_priorities(journal)

    def _resume_priorities(self, journal: Journal) -> None:
        """Go on with the priorities that the journal has, if they were made with the same settings."""
        saved, by = journal.priorities, self._by
        if saved is not None and isinstance(by, Prioritized) and [by.alpha, by.floor] == saved["settings"]:
            resume(by, {"kind": Prioritized.__name__, "state": saved}, self.capacity, self.store.first_tick)

    def priorities(self) -> dict[str, Any] | None:
        """Return all that `replay` needs of a sampler with priorities; None of one without."""
        by = self._by
        if not isinstance(by, Prioritized) or self.store.next_tick == self.store.first_tick:
            return None
        by.mass(self._startable())  # so that what is new has a priority
        state = by.state()
        used = state["scaled"][: self.store.next_tick]  # a shard that was never full has nothing behind
        return state | {"scaled": used, "settings": [by.alpha, by.floor]}

    def load(self, checkpoint: Restored) -> None:
        """Hold what was saved, all of it in memory, and draw on from there."""
        content = checkpoint.content
        if content is not None:
            self._bring(part.block for segment in content.segments for part in segment.parts)
        store = self.begin_at(checkpoint.manifest.first_tick)
        checkpoint.fill(store)
        state = checkpoint.state
        if checkpoint.saved is not None:
            self._savers.to(checkpoint.url, checkpoint.saved)
        self._runs.extend(runs_of(state["runs"]))
        if self._order is not None:
            for run in self._runs:
                self._order.add(run, store.first_tick)
        self.inserted = int(state["inserted"])
        self.generator = restored_generator(state["generator"])
        resume(self.sampler, state["sampler"], self.capacity, store.first_tick)

    def write_loaded(self, journal: Journal, checkpoint: str, written: int) -> None:
        """Write the segments of a checkpoint that a journal does not have yet.

        Args:
            written: The row behind the last that the journal holds.
        """
        journal.state = replace(journal.state, loading=checkpoint)
        waiting: list[bytes] = []
        begin = row = max(self.store.first_tick, written)
        while row < self.store.next_tick:
            first, segment = self.segment_at(row)
            waiting.append(self.packed(segment))
            row = first + segment.rows.ticks
            if sum(map(len, waiting)) >= SLOT_BYTES or row == self.store.next_tick:
                entries = [Entry(_LOADED, 0, payload) for payload in waiting]
                journal.append(entries, begin)
                begin, waiting = row, []
        journal.say(loading="", hidden_before=self.store.first_tick)

    def save(self, url: str) -> SaveHandle:
        """Begin a checkpoint of this moment; the memory removes those that none of its manifests names."""
        saver = self._savers.to(url)
        state = {
            "sampler": {"kind": type(self.sampler).__name__, "state": self.sampler.state()},
            "generator": generator_state(self.generator),
            "prefetched": Prefetched().state(),
            "inserted": self.inserted,
            "runs": runs_state(self._runs),
        }
        frozen = self.store.freeze(saver.rows_saved())
        snapshot = Snapshot(frozen, self._words, self.capacity, state, {}, self._lock, self.store.release)
        return saver.save(snapshot, None, None, None)

    def end_saves(self) -> None:
        """Wait for checkpoints that are under way, and let others write there."""
        self._savers.close()

    @staticmethod
    def in_order(draw: RowDraw, counts: Sequence[tuple[int, int]]) -> tuple[RowDraw, Ids | None]:
        """Return rows for each batch from the oldest to the newest: neighbours compress well together."""
        if not draw.is_plain:  # steps follow each other anyway
            return draw, None
        batch = np.repeat(np.arange(len(counts)), [count for count, _ in counts])
        order = np.lexsort((draw.rows, batch))
        return RowDraw(draw.rows[order]), order

    def draw(self, counts: Sequence[tuple[int, int]], generator: np.random.Generator | None = None) -> RowDraw:
        """Draw rows of some batches, those of each for itself.

        Args:
            counts: Of every batch how many, and how many of these get another goal.
        """
        held, chosen, draw = self.held(), generator or self.generator, self.sampler.draw
        numbers: Any = counts if isinstance(self.sampler, Hindsight) else [(count,) for count, _ in counts]
        return RowDraw.of([draw(held, count, chosen, *goals) for count, *goals in numbers])

    def found(self, draw: RowDraw) -> tuple[NDArray[np.float64], storage.Rows]:
        """Look rows up: what each was drawn in proportion to, and where it lies."""
        drawn, by = draw.drawn, self._by
        rows = (
            self.sampler.first_ids(drawn) if isinstance(self.sampler, ComposedSampler) and draw.steps else drawn[:, 0]
        )
        scaled = by.scaled(self._startable(), rows) if isinstance(by, Prioritized) else np.ones(len(rows))
        return scaled, self.store.read(draw.rows)

    def answer(
        self, counters: ShardCounters, draw: RowDraw, found: tuple[NDArray[np.float64], storage.Rows],
        counts: Sequence[tuple[int, int]] = (), blocks: Sequence[BlockPlace] = (), order: Ids | None = None,
        *, is_near: bool = False, count: BlockPlace | None = None,
    ) -> Payload | bytes:  # fmt: skip
        """Make an answer of what was looked up; that takes no lock.

        Args:
            counts: See `draw`.
            blocks: Where a learner on this machine has rows written, of every batch.
            order: See `Answer`.
            is_near: Whether it goes to this machine.
            count: See `Answer`.
        """
        rows = self._reader.read(found[1], [count for count, _ in counts], blocks if is_near else ())
        return self._packer.pack(Answer(counters, draw, found[0], rows, order, count), is_near=is_near)

    def mass(self) -> float:
        """Return what draws are in proportion to: transitions, starts of sequences, or the sum of scaled priorities."""
        if self.store.next_tick == self.store.first_tick:
            return 0.0
        startable = self._startable()
        if isinstance(self._by, Prioritized):
            return self._by.mass(startable)
        return float(self.store.transitions) if startable.only is None else self._starts.mass(startable)

    @property
    def highest(self) -> float:
        """The scaled priority of a new row; 0 where there are none."""
        return self._by.highest if isinstance(self._by, Prioritized) else 0.0

    def raise_highest(self, scaled: float) -> None:
        """Give the rows that come from now on no lower priority than this one."""
        if isinstance(self._by, Prioritized):
            self._by.raise_highest(self._startable(), scaled)

    def held(self) -> Held:
        """Describe the rows that can be drawn."""
        if self._order is not None:
            self._order.forget_before(self.store.first_tick)
        return Held(self.store.first_tick, self.store.next_tick, 1, self.capacity, self.store, order=self._order)

    def _startable(self) -> Held:
        """Describe the rows that can be drawn as the first of what a batch holds."""
        return self.sampler.starts(self.held()) if isinstance(self.sampler, ComposedSampler) else self.held()


_ROW, _TICKS, _LANES, _PLACE, _SPACING, _PAST = range(6)
"""Of a run: its first row; its ticks and lanes; the place of its first row; how far apart the places of its ticks are;
the row behind the run before it, or -1."""
_FAR = 2**19
"""Places between rows that are not known to follow each other: no sequence is as long."""


class RowOrder:
    """Which rows of a shard follow each other in time: it holds pieces of many writers' lanes, in the order they came.

    Invariant: a lane of a writer has a number of its own, and its steps their ticks, so the step after one is the next
    tick of that lane, or is not held here. Steps of two writers never follow each other.
    """

    def __init__(self) -> None:
        self._by_row = np.empty((6, 0), np.int64)
        self._by_place = np.empty((6, 0), np.int64)
        self._lanes: dict[tuple[str, int], int] = {}  # the first lane of a writer with so many
        self._first_lanes: Ids = np.empty(0, np.int64)
        self._next_lane = 0
        self._first_row = 0

    def add(self, run: WriterRun, first_row: int) -> None:
        """Take a run over whose rows are the newest; those before `first_row` have left."""
        self.forget_before(first_row)
        # Rows that are not known to follow each other lie far apart, in a lane of their own.
        is_ordered = run.first_tick >= 0
        lanes, tick, spacing = (run.lanes, run.first_tick, 1) if is_ordered else (1, 0, _FAR)
        place = self._lane_of(run.writer if is_ordered else "", lanes) * LANE + tick
        at = int(np.searchsorted(self._by_place[_PLACE], place))
        past = -1
        if at and self._by_place[_PLACE, at - 1] + self._by_place[_TICKS, at - 1] == place:
            before = self._by_place[:, at - 1]
            past = int(before[_ROW] + before[_TICKS] * before[_LANES])
        entry = np.array([run.first_row, run.rows // lanes, lanes, place, spacing, past], np.int64)
        self._by_row = np.concatenate([self._by_row, entry[:, None]], axis=1)
        self._by_place = np.insert(self._by_place, at, entry, axis=1)

    def _lane_of(self, writer: str, lanes: int) -> int:
        """Return the number of a writer's first lane; who has no name gets another one every time."""
        known = self._lanes.get((writer, lanes)) if writer else None
        if known is None:
            known, self._next_lane = self._next_lane, self._next_lane + lanes
            self._first_lanes = np.append(self._first_lanes, known)
            if writer:
                self._lanes[writer, lanes] = known
        return known

    def forget_before(self, first_row: int) -> None:
        """Hear that rows have left."""
        if first_row == self._first_row:
            return
        self._first_row = first_row
        ends = self._by_row[_ROW] + self._by_row[_TICKS] * self._by_row[_LANES]
        left = int(np.searchsorted(ends, first_row, "right"))
        if left:
            self._by_place = self._by_place[:, ~np.isin(self._by_place[_ROW], self._by_row[_ROW, :left])]
            self._by_row = self._by_row[:, left:]

    def places(self, ids: Ids) -> Ids:
        """See `StepOrder`."""
        run = self._by_row[:, np.searchsorted(self._by_row[_ROW], ids, "right") - 1]
        tick, lane = np.divmod(ids - run[_ROW], run[_LANES])
        return np.asarray(run[_PLACE] + lane * LANE + tick * run[_SPACING])

    def at(self, places: Ids) -> tuple[Ids, Flags]:
        """See `StepOrder`."""
        if not self._by_place.shape[1]:
            return places, np.zeros(places.shape, np.bool_)
        lane, wanted = self._in_first_lanes(places)
        index = np.searchsorted(self._by_place[_PLACE], wanted, "right") - 1
        run = self._by_place[:, index]
        tick, between = np.divmod(wanted - run[_PLACE], run[_SPACING])
        rows = run[_ROW] + tick * run[_LANES] + lane
        known = (index >= 0) & (between == 0) & (tick < run[_TICKS]) & (rows >= self._first_row)
        return rows, known & (lane >= 0) & (lane < run[_LANES])

    def _in_first_lanes(self, places: Ids) -> tuple[Ids, Ids]:
        """Return which lane of its writer each place is of, and the place of the same tick in the writer's first."""
        lane, tick = np.divmod(places, LANE)
        first = self._first_lanes[np.searchsorted(self._first_lanes, lane, "right") - 1]
        return lane - first, first * LANE + tick

    def pieces(self, ids: Ids) -> tuple[Ids, Ids]:
        """See `StepOrder`."""
        runs = self._by_place
        end = runs[_PLACE] + (runs[_TICKS] - 1) * runs[_SPACING] + 1
        breaks = np.flatnonzero(end[:-1] != runs[_PLACE, 1:])
        places = self.places(ids)
        lane, wanted = self._in_first_lanes(places)
        piece = np.searchsorted(breaks, np.searchsorted(runs[_PLACE], wanted, "right") - 1)
        begin, last = np.append(-1, breaks)[piece] + 1, np.append(breaks, len(end) - 1)[piece]
        # Of the oldest run some rows may have left.
        left = np.maximum(0, -((runs[_ROW, begin] + lane - self._first_row) // runs[_LANES, begin]))
        first, behind = runs[_PLACE, begin] + left + lane * LANE, end[last] + lane * LANE
        is_alone = runs[_SPACING, begin] > 1
        return np.where(is_alone, places, first), np.where(is_alone, places, behind - 1)

    def without_past(self, first_id: int) -> Ids:
        """See `StepOrder`."""
        runs, held_from = self._by_row, self._first_row
        # Rows of the oldest run, behind those that left; and the first rows of runs that follow one that left.
        is_cut = runs[_ROW] < held_from
        follows = (runs[_PAST] > first_id) & (runs[_PAST] - runs[_LANES] < held_from)
        begin = np.maximum(runs[_ROW], held_from)
        end = np.minimum(begin + runs[_LANES], runs[_ROW] + runs[_TICKS] * runs[_LANES])
        found = [np.arange(begin[run], end[run]) for run in np.flatnonzero(is_cut | follows)]
        return np.concatenate([np.empty(0, np.int64), *found])

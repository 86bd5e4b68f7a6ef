"""What a shard holds: an ordinary store of one lane, whose ticks are row numbers, and how rows are drawn from it.

In:  segments that writers sealed, a journal, or a checkpoint.  Out: rows for answers; segments to move; checkpoints.
Invariant: row numbers only grow, and name the same transition for as long as it is held. Not locked: the shard is.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.checkpoint.background import SaveHandle
from holdall.checkpoint.load import Restored
from holdall.checkpoint.save import Snapshot
from holdall.checkpoint.saver import Savers
from holdall.checkpoint.streams import WriterRun, runs_of, runs_state
from holdall.cluster.answer import Answer, Payload, RowFinder, pack_answer
from holdall.cluster.encode import sliced_leaves
from holdall.cluster.journal import SLOT_BYTES, Entry, Journal
from holdall.cluster.protocol import ShardCounters
from holdall.delivery.loader import Prefetched
from holdall.errors import DamageError
from holdall.json_state import generator_state, restored_generator, schema_of
from holdall.native.kernels import chosen_kernels
from holdall.sampling.draw import Held, Sampler
from holdall.sampling.prioritized import Prioritized
from holdall.storage.blocks import CarriedSlices
from holdall.storage.codec import Codec, Dictionary
from holdall.storage.records import SealedSegment, dictionary_name, pack_segment, unpack_segment
from holdall.storage.store import Rows, Store
from holdall.storage.tiers import Budget

_LOADED = bytes(16)
"""Stands for the writer of segments that a checkpoint brought."""
_NO_TICK = 2**40 - 1
"""First tick of a segment whose rows are not known to follow each other: it was held by another shard."""

Ids = NDArray[np.int64]


class ShardData:
    """All rows of a shard, and what draws from it depend on.

    Args:
        words: The memory's schema, see `holdall.json_state.schema_words`.
        capacity: Most rows held.
        lock: The shard's own.
    """

    def __init__(
        self,
        words: dict[str, Any],
        capacity: int,
        sampler: Sampler,
        generator: np.random.Generator,
        lock: threading.Lock,
    ) -> None:
        self.capacity = capacity
        self.sampler = sampler
        self.generator = generator
        self.inserted = 0  # transitions ever accepted
        self.dictionaries: dict[str, Dictionary] = {}
        self._words = words | {"num_envs": 1}
        self._schema = schema_of(self._words)
        self._lock = lock
        self._kernels = chosen_kernels()
        self._finder = RowFinder(self._schema, self._kernels)
        self._savers = Savers(self._kernels.coder)
        self._codecs: dict[Codec, Codec] = {}
        self._runs: deque[WriterRun] = deque()
        self.store = self.begin_at(0)

    def begin_at(self, first_row: int) -> Store:
        """Hold nothing, and number the next row so."""
        self._runs.clear()
        self.store = Store(
            self._schema,
            self.capacity,
            self._kernels,
            self._lock,
            Budget.of(None, "balanced", 1),
            first_tick=first_row,
            large=sliced_leaves(self._schema),
        )
        return self.store

    def unpacked(self, payload: bytes, dictionaries: dict[str, Dictionary]) -> SealedSegment:
        """Read a segment; the codecs that segments have in common are kept once, so that answers can compare them."""
        segment = unpack_segment(payload, self._schema, dictionaries, self._kernels.coder)
        for part in segment.parts:
            if part.block.sealed is not None:
                coded = part.block.sealed.coded
                codec = self._codecs.setdefault(coded.codec, coded.codec)
                part.block.sealed = CarriedSlices(replace(coded, codec=codec))
        return segment

    def take(self, writer: bytes, segment: SealedSegment) -> None:
        """Take a segment of a writer over."""
        first = self.store.adopt(segment)
        rows, tick, lanes = self.store.next_tick - first, segment.rows.first_tick, segment.lanes
        run = WriterRun(writer.hex(), tick, lanes, first, rows)
        self._runs.append(run._replace(first_tick=-1, lanes=rows) if tick == _NO_TICK else run)
        while self._runs[0].first_row + self._runs[0].rows <= self.store.first_tick:
            self._runs.popleft()
        self.inserted += rows

    def segment_at(self, row: int) -> tuple[int, SealedSegment]:
        """Return the first row of a segment that is held, and the segment as one that another shard can adopt."""
        segment = self.store.segment_at(row)
        return segment.rows.first_tick, replace(segment, rows=replace(segment.rows, first_tick=_NO_TICK))

    def packed(self, segment: SealedSegment) -> bytes:
        """Return a segment as bytes."""
        return pack_segment(segment, self._kernels.coder)

    def replay(self, journal: Journal, memory: str) -> None:
        """Take a journal over for a memory of this name, and hold all that it holds and shows."""
        for page in journal.open():
            if page.begins:
                self.begin_at(page.first_row)
            elif page.first_row != self.store.next_tick:
                raise DamageError(f"{journal.url} lacks segments before row {page.first_row}; load a checkpoint")
            for entry in page.entries:
                self.take(entry.writer, self.unpacked(entry.payload, journal.dictionaries))
        move = journal.move
        # What another memory was moving when it ended may not have arrived; this one's will.
        is_other = move is not None and move.memory != memory
        self.store.forget_before(move.first_row if move is not None and is_other else journal.hidden_before)
        self.dictionaries = dict(journal.dictionaries)
        self.inserted = self.store.next_tick

    def load(self, checkpoint: Restored) -> None:
        """Hold what was saved, and draw on from there."""
        store = self.begin_at(checkpoint.manifest.first_tick)
        checkpoint.fill(store)
        state = checkpoint.state
        self._runs.extend(runs_of(state["runs"]))
        self.inserted = int(state["inserted"])
        self.generator = restored_generator(state["generator"])
        if state["sampler"]["kind"] == type(self.sampler).__name__:
            self.sampler.restore(state["sampler"]["state"])
        if isinstance(self.sampler, Prioritized):
            self.sampler.resize(self.capacity, store.first_tick)
        segments = [] if checkpoint.content is None else checkpoint.content.segments
        for part in (part for segment in segments for part in segment.parts):
            named = None if part.block.sealed is None else part.block.sealed.codec.dictionary
            if named is not None:
                self.dictionaries[dictionary_name(named)] = named

    def write_loaded(self, journal: Journal, checkpoint: str, written: int) -> None:
        """Write the segments of a checkpoint that a journal does not have yet.

        Args:
            written: The row behind the last that the journal holds.
        """
        journal.loading = checkpoint
        waiting: list[bytes] = []
        begin = row = max(self.store.first_tick, written)
        while row < self.store.next_tick:
            first, segment = self.segment_at(row)
            waiting.append(self.packed(segment))
            row = first + segment.rows.ticks
            if sum(map(len, waiting)) >= SLOT_BYTES or row == self.store.next_tick:
                entries = [Entry(_LOADED, 0, payload) for payload in waiting]
                journal.append(entries, begin, list(self.dictionaries.values()))
                begin, waiting = row, []
        journal.end_loading(self.store.first_tick)

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

    def draw(self, counts: list[int]) -> Ids:
        """Draw rows of some batches, those of each for itself."""
        drawn = [self.sampler.draw(self.held(), count, self.generator).ids for count in counts]
        return drawn[0] if len(drawn) == 1 else np.concatenate(drawn)

    def found(self, rows: Ids) -> tuple[NDArray[np.float64], Rows]:
        """Look rows up: what each was drawn in proportion to, and where it lies."""
        sampler = self.sampler
        scaled = sampler.scaled(self.held(), rows) if isinstance(sampler, Prioritized) else np.ones(len(rows))
        return scaled, self.store.read(rows)

    def answer(self, counters: ShardCounters, rows: Ids, scaled: NDArray[np.float64], found: Rows) -> Payload:
        """Make an answer of what was looked up; that takes no lock."""
        columns, fields = self._finder.columns(found), self._finder.fields(found)
        return pack_answer(Answer(counters, rows, scaled, columns, fields))

    def mass(self) -> float:
        """Return what draws are in proportion to: transitions, or the sum of scaled priorities."""
        if not isinstance(self.sampler, Prioritized):
            return float(self.store.transitions)
        return self.sampler.mass(self.held()) if self.store.next_tick > self.store.first_tick else 0.0

    def held(self) -> Held:
        """Describe the rows that can be drawn."""
        return Held(self.store.first_tick, self.store.next_tick, 1, self.capacity, self.store)

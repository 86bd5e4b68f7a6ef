"""What a shard holds: an ordinary store of one lane, whose ticks are row numbers, and how rows are drawn from it.

In:  segments that writers sealed, a journal, or a checkpoint.  Out: rows for answers; segments to move; checkpoints.
Invariant: row numbers only grow, and name the same transition for as long as it is held. Not locked: the shard is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from holdall import sampling, storage
from holdall.batch import Draw, of_ids
from holdall.checkpoint import Restored, RowsKey, SaveHandle, Savers, Snapshot, runs_of, runs_state
from holdall.cluster.answer import Answer, AnswerPacker, Payload
from holdall.cluster.journal import SLOT_BYTES, Entry, Journal
from holdall.cluster.protocol import ShardCounters
from holdall.delivery import DrawnRows, ObservationAssembler, Prefetched
from holdall.errors import DamageError
from holdall.machine import available_bytes
from holdall.native import chosen_kernels
from holdall.sampling import ComposedSampler, Held, Hindsight, Likelihood, RowOrder, Sampler, WriterRun
from holdall.schema import Schema, schema_of
from holdall.shared import OpenedBlocks, Pair, RowsPlace, SharedCount, block_bytes, block_leaves, pairs_in

_LOADED = bytes(16)
"""Stands for the writer of segments that a checkpoint brought."""
_NO_TICK = 2**40 - 1
"""First tick of a segment whose rows are not known to follow each other: it was held by another shard."""
_SHARE_OF_AVAILABLE = 4


class ShardData:
    """All rows of a shard, and what draws from it depend on.

    Args:
        words: The memory's schema, see `holdall.schema.schema_words`.
        capacity: Most rows held.
        lock: The shard's own.
        neighbours: Shards on a machine, this one counted; together they keep decoded what a memory there would.
    """

    def __init__(
        self, words: dict[str, Any], capacity: int, sampler: Sampler, generator: np.random.Generator,
        lock: Any, neighbours: int = 1,
    ) -> None:  # fmt: skip
        self.capacity, self.sampler, self.generator = capacity, sampler, generator
        self.inserted = 0  # transitions ever accepted
        self._words = words | {"num_envs": 1}
        self._schema, self._lock, self._kernels = schema_of(self._words), lock, chosen_kernels()
        self._large = storage.sliced_leaves(self._schema)
        decoded_bytes = available_bytes() // _SHARE_OF_AVAILABLE // neighbours
        self._reader = ShardReader(self._schema, self._large, self._kernels, decoded_bytes, neighbours)
        self._packer = AnswerPacker()
        self.savers = Savers(self._kernels.coder)
        self.changes = SharedCount()  # of what is held or of priorities, since it was started
        self._codecs: dict[storage.Codec, storage.Codec] = {}
        self._runs: deque[WriterRun] = deque()
        self.likelihood = Likelihood(sampler)
        self._order: RowOrder | None = None
        self.store = self.begin_at(0)

    def begin_at(self, first_row: int) -> storage.Store:
        """Hold nothing, and number the next row so."""
        self._runs.clear()
        self._order = RowOrder() if isinstance(self.sampler, ComposedSampler) else None
        budget = storage.Budget(most_threads=1)
        self.store = storage.Store(
            self._schema, self.capacity, self._kernels, self._lock, budget, first_tick=first_row, large=self._large
        )
        return self.store

    @property
    def rows(self) -> range:
        """Rows that are held."""
        return range(self.store.first_tick, self.store.next_tick)

    def unpacked(self, payload: bytes) -> storage.SealedSegment:
        """Read a segment."""
        segment = storage.unpack_segment(payload, self._schema, {}, self._kernels.coder)
        self._bring(part.block for part in segment.parts)
        return segment

    def _bring(self, blocks: Iterable[storage.SliceBlock]) -> None:
        """Have slices in memory, with codecs that they share."""
        for block in blocks:
            if block.sealed is not None:
                coded = storage.in_memory(block.sealed.coded)
                codec = self._codecs.setdefault(coded.codec, coded.codec)
                block.sealed = storage.CarriedSlices(replace(coded, codec=codec))

    def take(self, entry: Entry) -> None:
        """Take a segment of a writer over."""
        segment = entry.segment or self.unpacked(entry.payload)
        first = self.store.adopt(segment)
        rows, tick, lanes = self.store.next_tick - first, segment.rows.first_tick, segment.lanes
        run = WriterRun(entry.writer.hex(), tick, lanes, first, rows)
        if tick == _NO_TICK:
            run = run._replace(first_tick=-1, lanes=rows)
        self._runs.append(run)
        if self._order is not None:
            self._order.add(run, self.store.first_tick)
        self._forget_runs()
        self.inserted += rows

    def _forget_runs(self) -> None:
        """Forget the runs of which no row is held any more: others came, or were moved to another shard."""
        while self._runs and self._runs[0].first_row + self._runs[0].rows <= self.store.first_tick:
            self._runs.popleft()

    def packed_at(self, row: int) -> tuple[bytes, int, int, int]:
        """Return the segment that holds a row, for another shard: as bytes, its rows, the first, and the one behind."""
        segment = self.store.segment_at(row)
        first, rows = segment.rows.first_tick, segment.rows.ticks
        payload = storage.pack_segment(
            replace(segment, rows=replace(segment.rows, first_tick=_NO_TICK)), self._kernels.coder
        )
        return payload, rows, first, first + rows

    def replay(self, journal: Journal, memory: str, *, waits: bool) -> None:
        """Take a journal over for a memory of this name, and hold all that it holds and shows; see `Journal.open`."""
        for page in journal.open(waits=waits):
            if page.begins:
                self.begin_at(page.first_row)
            elif page.first_row != self.store.next_tick:
                raise DamageError(f"{journal.url} lacks segments before row {page.first_row}; load a checkpoint")
            for entry in page.entries:
                self.take(entry)
        move = journal.state.move
        # What another memory was moving when it ended may not have arrived; this one's will.
        is_other = move is not None and move.memory != memory
        self.store.forget_before(move.first_row if move is not None and is_other else journal.state.hidden_before)
        self.inserted = self.store.next_tick
        saved, by = journal.priorities, self.likelihood.prioritized
        # Priorities that were made with other settings are worth nothing.
        if saved is not None and by is not None and [by.alpha, by.floor] == saved["settings"]:
            sampling.resume(by, {"kind": type(by).__name__, "state": saved}, self.capacity, self.store.first_tick)

    def priorities(self) -> dict[str, Any] | None:
        """Return all that `replay` needs of a sampler with priorities; None of one without."""
        by = self.likelihood.prioritized
        if by is None or self.store.next_tick == self.store.first_tick:
            return None
        self.mass()  # so that what is new has a priority
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
            self.savers.to(checkpoint.url, checkpoint.saved)
        self._runs.extend(runs_of(state["runs"]))
        if self._order is not None:
            for run in self._runs:
                self._order.add(run, store.first_tick)
        self.inserted = int(state["inserted"])
        self.generator = sampling.restored_generator(state["generator"])
        sampling.resume(self.sampler, state["sampler"], self.capacity, store.first_tick)

    def write_loaded(self, journal: Journal, checkpoint: str, written: int) -> None:
        """Write the segments of a checkpoint that a journal does not have yet.

        Args:
            written: The row behind the last that the journal holds.
        """
        journal.state = replace(journal.state, loading=checkpoint)
        waiting: list[bytes] = []
        begin = row = max(self.store.first_tick, written)
        while row < self.store.next_tick:
            payload, *_, row = self.packed_at(row)
            waiting.append(payload)
            if sum(map(len, waiting)) >= SLOT_BYTES or row == self.store.next_tick:
                entries = [Entry(_LOADED, 0, payload) for payload in waiting]
                journal.append(entries, begin)
                begin, waiting = row, []
        journal.say(loading="", hidden_before=self.store.first_tick)

    def save(self, url: str) -> SaveHandle:
        """Begin a checkpoint of this moment; the memory removes those that none of its manifests names."""
        self._forget_runs()
        state = {
            "sampler": {"kind": type(self.sampler).__name__, "state": self.sampler.state()},
            "generator": sampling.generator_state(self.generator),
            "prefetched": Prefetched().state(),
            "inserted": self.inserted,
            "runs": runs_state(self._runs),
        }

        def taken(saved: Mapping[int, RowsKey]) -> Snapshot:
            frozen = self.store.freeze(saved)
            return Snapshot(frozen, self._words, self.capacity, state, {}, self._lock, self.store.release)

        return self.savers.to(url).save(taken, None, None, None)

    def draw(self, counts: Sequence[tuple[int, int]], generator: np.random.Generator | None = None) -> Draw:
        """Draw rows of some batches, those of each for itself; of several batches they are single rows.

        Args:
            counts: Of every batch how many, and how many of these get another goal.
        """
        held, chosen, draw = self.held(), generator or self.generator, self.sampler.draw
        numbers: Any = counts if isinstance(self.sampler, Hindsight) else [(count,) for count, _ in counts]
        draws = [draw(held, count, chosen, *goals) for count, *goals in numbers]
        return draws[0] if len(draws) == 1 else of_ids(np.concatenate([each.ids for each in draws]))

    def found(self, counters: ShardCounters, draw: Draw, counts: Sequence[tuple[int, int]], *, is_near: bool) -> Answer:
        """Look up what was drawn; for another machine each batch from its oldest row on: neighbours compress well."""
        order = None
        if not is_near and not isinstance(self.sampler, ComposedSampler):  # steps follow each other anyway
            batch = np.repeat(np.arange(len(counts)), [count for count, _ in counts])
            order = np.lexsort((draw.ids, batch))
            draw = of_ids(draw.ids[order])
        scaled = self.likelihood.of(self.held(), draw.ids)
        return Answer(counters, draw, scaled, DrawnRows.of(draw, self.store, storage.fresh_bytes), order)

    def answer(
        self, found: Answer, counts: Sequence[tuple[int, int]] = (), blocks: Sequence[RowsPlace] = (),
        *, is_near: bool = False,
    ) -> Payload:  # fmt: skip
        """Decode what was looked up, and pack it; that takes no lock.

        Args:
            counts: See `draw`.
            blocks: Where a learner on this machine has rows written, of every batch.
            is_near: Whether it goes to this machine.
        """
        read = self._reader.read
        rows, last, outcomes, *_ = found.found
        decoded = DrawnRows(read(rows, counts, blocks if is_near else ()), read(last), read(outcomes))
        return self._packer.pack(found._replace(found=decoded), is_near=is_near)

    def mass(self) -> float:
        """Return what draws are in proportion to, see `Likelihood.total`."""
        return self.likelihood.total(self.held())

    def raise_highest(self, scaled: float) -> None:
        """Give the rows that come from now on no lower priority than this one."""
        self.likelihood.raise_highest(self.held(), scaled)

    def held(self) -> Held:
        """Describe the rows that can be drawn."""
        if self._order is not None:
            self._order.forget_before(self.store.first_tick)
        return Held(self.store.first_tick, self.store.next_tick, 1, self.capacity, self.store, order=self._order)


class ShardReader:
    """Decodes rows of a shard's store; several threads may use it.

    Args:
        neighbours: Shards on a machine, this one counted; each has its share of the cores.
    """

    def __init__(
        self, schema: Schema, large: Sequence[int], kernels: storage.Kernels, decoded_bytes: int = 0,
        neighbours: int = 1,
    ) -> None:  # fmt: skip
        self._leaves = schema.observation.leaves
        self._assembler = ObservationAssembler(kernels, 0, max(1, (os.cpu_count() or 1) // neighbours))
        self._kept = storage.DecodedSegments(kernels.coder, decoded_bytes)
        self._blocks, self._in_blocks = OpenedBlocks(), block_leaves(schema, large)

    def read(
        self, found: storage.Rows | None, counts: Sequence[tuple[int, int]] = (), blocks: Sequence[RowsPlace] = ()
    ) -> Any:
        """Return rows with all of their observations; those that could be written to blocks are not among them.

        Args:
            counts: See `ShardData.draw`.
            blocks: Where the rows of every batch are written; nothing: nowhere.
        """
        if found is None or found.places is None:
            return found
        if found.places.awaits_files:
            storage.bring_places(found.places)
        places = self._kept.instead(found.places)
        opened: list[Any] = [
            self._blocks.memory(block.place, block_bytes(self._in_blocks, block.rows)) for block in blocks
        ]
        if not blocks or any(memory is None for memory in opened):
            return self._assembler.complete(found._replace(places=places), self._leaves)
        end = 0
        for memory, block, (count, _) in zip(opened, blocks, counts, strict=True):
            some, end = slice(end, end + count), end + count
            self._write(found, places, some, block, pairs_in(memory, self._in_blocks, block.rows))
        return found._replace(small={}, large=(), places=None)

    def _write(
        self, found: storage.Rows, places: storage.Places, some: slice, block: RowsPlace, pairs: Mapping[int, Pair]
    ) -> None:
        """Write the rows of one batch to where they belong in its block."""
        rows = np.frombuffer(block.positions, np.int64).copy() if block.positions else None
        part = places.cut(some, rows)
        for field, i in enumerate(found.large):
            obs, next_obs = (side.view(np.uint8).reshape(len(side), self._leaves[i].nbytes) for side in pairs[i])
            self._assembler.fill(part, field, obs, next_obs)
        for i, sides in found.small.items():
            for side, values in zip(pairs[i], sides, strict=True):
                side[slice(None) if rows is None else rows] = values[some]

"""Shards: the actors that hold transitions, each in an ordinary store of one lane whose ticks are row numbers.

In:  segments that writers sealed; counts to draw; priorities.  Out: acknowledgements; answers.
Invariant: a writer's segments are accepted in order and each once. What was acknowledged can be drawn, and, where there
is a journal, was written to it first.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.checkpoint.load import Restored, restored
from holdall.checkpoint.save import Snapshot, store_words
from holdall.checkpoint.saver import Savers
from holdall.checkpoint.source import library_at
from holdall.cluster.answer import Answer, Payload, RowFinder, pack_answer
from holdall.cluster.encode import sliced_leaves
from holdall.cluster.journal import (
    SLOT_BYTES,
    Committer,
    Entry,
    Journal,
    SegmentMove,
    Staged,
    dictionaries_of,
    journal_of,
    journals_in_use,
)
from holdall.cluster.protocol import (
    Ack,
    AckKind,
    CallOrder,
    CallOrderError,
    CallQueue,
    SegmentHeader,
    ShardCounters,
    dictionary_of,
    first_row_of,
    life_of,
    packed_dictionary,
)
from holdall.cluster.roster import NAMESPACE
from holdall.cluster.status import Process, ShardMetrics
from holdall.delivery.loader import Prefetched
from holdall.errors import ArgumentError, CheckpointError, DamageError, ShardError
from holdall.json_state import generator_of, generator_state, restored_generator, schema_of
from holdall.native.kernels import chosen_kernels
from holdall.sampling.draw import Held, Sampler, as_ids
from holdall.sampling.prioritized import Prioritized
from holdall.storage.blocks import CarriedSlices
from holdall.storage.codec import Codec, Dictionary
from holdall.storage.records import SealedSegment, dictionary_name, pack_segment, segment_needs, unpack_segment
from holdall.storage.store import Rows, Store
from holdall.storage.tiers import Budget

GROUPS = {"insert": 32, "sample": 4, "control": 4}
"""Threads by kind of call, so that none waits behind another kind."""
_MOST_CREDITS = 4
_CROWDED_BYTES = 32 * 2**20
_SETTLED_S = 5.0
_OVERTAKEN_S = 2.0
"""How long a segment waits for those before it, which Ray may deliver later, before the writer is asked for them."""
_ALL = 2**31
"""Checkpoints that a shard keeps by itself: the memory removes those that none of its manifests names."""
_LOADED = bytes(16)
"""Stands for the writer of segments that a checkpoint brought."""

Ids = NDArray[np.int64]


class Shard:
    """One shard of a memory.

    Args:
        number: Which one.
        words: The memory's schema, see `holdall.json_state.schema_words`.
        capacity: Most rows held.
        memory: The name of the memory's roster. A handle in its place could not be found again after a restart.
        url: Where the journal is kept; None: nowhere, and what the shard held is lost with it.
        saved: The place and number of a checkpoint of this shard that it begins with.
    """

    def __init__(
        self,
        number: int,
        words: dict[str, Any],
        capacity: int,
        sampler: Sampler,
        seed: int | None,
        memory: str,
        url: str | None = None,
        saved: tuple[str, int] | None = None,
    ) -> None:
        self._number = number
        self._memory = memory
        self._url = url
        self._capacity = capacity
        self._words = words | {"num_envs": 1}
        self._schema = schema_of(self._words)
        self._kernels = chosen_kernels()
        self._finder = RowFinder(self._schema, self._kernels)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._call_queue = CallQueue()
        self._process = Process()
        self._metrics = ShardMetrics(memory, number)
        self._savers = Savers(self._kernels.coder)
        self._dictionaries: dict[str, Dictionary] = {}
        self._codecs: dict[Codec, Codec] = {}
        self._expected: dict[bytes, int] = {}  # the number of every writer's next segment, staged ones counted
        self._staged: Counter[bytes] = Counter()  # segments of every writer that are not durable yet
        self._is_closed = threading.Event()
        self._inserted = 0
        self._changes = 0
        self._sampler = sampler
        self._committer: Committer | None = None
        checkpoint = None if saved is None else _checkpoint_of(*saved)
        first_life = 0 if checkpoint is None else life_of(checkpoint.manifest.next_tick)
        if url is None:
            roster: Any = ray.get_actor(memory, NAMESPACE)
            self._epoch: int = ray.get(roster.begin_life.remote(number, first_life))
            self._store = self._new_store(first_row_of(self._epoch))
        else:
            journal = journal_of(url, number)
            self._store = self._replayed(journal)
            self._take_over(journal)
        # A checkpoint is what a shard begins with, and not what one that was restarted goes back to.
        name = "" if saved is None else f"{saved[0]}:{saved[1]}"
        written = self._store.next_tick
        is_new = self._epoch == first_life if url is None else _begins_with(journal, written, name)
        # The first life of the only shard draws as a local memory with the same seed does.
        first = number == 0 and self._epoch == 0
        own_seed = seed if seed is None or first else [seed, number, self._epoch]
        self._generator: np.random.Generator = generator_of(own_seed)
        if checkpoint is not None and is_new:
            self._load(checkpoint)
            if url is not None:
                self._write_loaded(journal, name, written)
        if url is not None:
            self._committer = Committer(journal, self._store.next_tick, self._apply)
        self._metrics.follow(lambda: self._figures() | {"anonymous_bytes": self._process.anonymous_bytes()})

    @ray.method(concurrency_group="insert")
    def insert(self, header: bytes, payload: bytes) -> bytes:
        """Take a block over, if it is the next one of its writer."""
        with self._metrics.timed("insert"):
            return self._insert(SegmentHeader.of(header), payload)

    def _insert(self, sent: SegmentHeader, payload: bytes) -> bytes:
        try:
            with self._lock:
                if sent.epoch != self._epoch or sent.sequence < self._expected.get(sent.writer, 0):
                    return self._ack(sent.writer, AckKind.EXPECTED_ANOTHER)
                if self._is_closed.is_set():
                    return self._ack(sent.writer, AckKind.CLOSED)
                if not segment_needs(payload)[1] <= self._dictionaries.keys():
                    return self._ack(sent.writer, AckKind.NEEDS_DICTIONARY)
                dictionaries = dict(self._dictionaries)
            segment = self._unpacked(payload, dictionaries)
            staged = Staged(Entry(sent.writer, sent.sequence, payload), segment)
            with self._changed:
                self._changed.wait_for(lambda: self._is_due(sent), _OVERTAKEN_S)
                if self._is_closed.is_set():
                    return self._ack(sent.writer, AckKind.CLOSED)
                if sent.sequence != self._expected.get(sent.writer, 0):
                    return self._ack(sent.writer, AckKind.EXPECTED_ANOTHER)
                self._store.require(segment)
                self._expected[sent.writer] = sent.sequence + 1
                if self._committer is None:
                    self._take(staged)
                else:
                    self._staged[sent.writer] += 1
                    self._committer.stage(staged)
                self._changed.notify_all()
            staged.wait()
            with self._lock:
                return self._ack(sent.writer, AckKind.ACCEPTED)
        except (ArgumentError, DamageError) as error:
            with self._lock:
                return self._ack(sent.writer, AckKind.REFUSED, str(error))

    @ray.method(concurrency_group="insert")
    def expect(self, writer: bytes) -> bytes:
        """Say which block of a writer is the next: all before it are drawn from, and durable if any are."""
        with self._changed:
            # The writer forgets what was accepted, so it is told of nothing that could still be lost.
            if not self._changed.wait_for(lambda: not self._staged[writer], _SETTLED_S):
                raise ShardError(f"shard {self._number} waits for its disk; ask again")
            return self._ack(writer, AckKind.EXPECTED_ANOTHER)

    @ray.method(concurrency_group="control")
    def learn(self, record: bytes) -> None:
        """Keep a dictionary that blocks will name."""
        dictionary = dictionary_of(record)
        with self._lock:
            self._dictionaries[dictionary_name(dictionary)] = dictionary

    @ray.method(concurrency_group="control")
    def dictionary(self, name: str) -> bytes:
        """Return a dictionary that answers name."""
        with self._lock:
            found = self._dictionaries.get(name)
        if found is None:
            raise DamageError(f"shard {self._number} has no dictionary {name}; report this")
        return packed_dictionary(found)

    @ray.method(concurrency_group="sample")
    def sample(self, order: bytes, counts: list[int]) -> Payload:
        """Draw rows of some batches, those of each for itself; of an empty shard, return the counters alone."""
        with self._metrics.timed("sample"):
            with self._call_queue.taken(self._required(order)), self._lock:
                if self._store.transitions == 0:
                    return self._counters().packed()
                drawn = [self._sampler.draw(self._held(), count, self._generator).ids for count in counts]
                found = self._found(drawn[0] if len(drawn) == 1 else np.concatenate(drawn))
            return self._answer(*found)

    @ray.method(concurrency_group="sample")
    def gather(self, rows: bytes) -> Payload:
        """Return rows by their numbers."""
        wanted = np.frombuffer(rows, np.int64)
        with self._lock:
            self._held().require(wanted)
            found = self._found(wanted)
        return self._answer(*found)

    @ray.method(concurrency_group="sample")
    def update_priorities(self, order: bytes, rows: bytes, priorities: bytes, dtype: str) -> bytes:
        """Set the priorities of rows; those that left are passed over."""
        wanted, told = as_ids(np.frombuffer(rows, np.int64)), np.frombuffer(priorities, np.dtype(dtype))
        if not isinstance(self._sampler, Prioritized):
            raise ArgumentError("update_priorities was called, but the memory's sampler has no priorities")
        with self._call_queue.taken(self._required(order)), self._lock:
            # Rows of an earlier life are lost; their numbers are below all that are held now.
            self._sampler.update_priorities(self._held(), wanted, told)
            self._changes += 1
            return self._counters().packed()

    @ray.method(concurrency_group="control")
    def close_to_writers(self) -> None:
        """Accept nothing more, so that what is held can be moved elsewhere."""
        with self._changed:
            self._is_closed.set()
            self._changed.notify_all()
            committer = self._committer
        if committer is not None:
            committer.drain()
            committer.close_to_writers(self._memory)

    @ray.method(concurrency_group="control")
    def oldest(self) -> tuple[bytes, int, int, int]:
        """Return the oldest segment, its rows, the first of them, and the row behind it; none: no bytes."""
        with self._lock:
            store = self._store
            if store.transitions == 0:
                return b"", 0, store.next_tick, store.next_tick
            first, segment = self._segment_at(store.first_tick)
        end = first + segment.rows.ticks
        return pack_segment(segment, self._kernels.coder), segment.rows.ticks, first, end

    @ray.method(concurrency_group="control")
    def give_up(self, first_row: int, end: int, to: int, writer: bytes, sequence: int) -> None:
        """Draw rows no more that go to another shard; the journal keeps them, and says where they go.

        Args:
            end: The row behind them.
            writer: Under whose name they are sent there, and as which of its blocks.
        """
        with self._lock:
            self._store.forget_before(end)
            self._changes += 1
        if self._committer is not None:
            self._committer.hide(end, SegmentMove(self._memory, to, writer.hex(), sequence, first_row))

    @ray.method(concurrency_group="control")
    def move(self) -> tuple[int, bytes, int] | None:
        """Say which block was on its way to another shard when the memory before this one ended: to, writer, number."""
        move = None if self._committer is None else self._committer.journal.move
        if move is None or move.memory == self._memory:
            return None
        return move.shard, bytes.fromhex(move.writer), move.sequence

    @ray.method(concurrency_group="control")
    def end_move(self, arrived: bool) -> None:
        """Hear whether that block arrived; if not, it stays here."""
        with self._lock:
            if self._committer is None or self._committer.journal.move is None:
                return
            journal = self._committer.journal
            if arrived:
                self._store.forget_before(journal.hidden_before)
            self._committer.hide(self._store.first_tick, None)
            self._changes += 1

    @ray.method(concurrency_group="control")
    def end_drain(self) -> None:
        """Hear that all blocks have arrived elsewhere."""
        if self._committer is not None:
            self._committer.end_drain()

    @ray.method(concurrency_group="control")
    def journals(self) -> list[int]:
        """Return the shards whose journals lie beside this one's, and hold something as far as one can tell."""
        return [] if self._url is None else journals_in_use(self._url)

    @ray.method(concurrency_group="control")
    def save(self, place: str) -> dict[str, int]:
        """Write a checkpoint of what is held now to a place of this shard's own; return its number and sizes."""
        saver = self._savers.to(place)
        with self._lock:
            frozen = self._store.freeze(saver.rows_saved())
            state = {
                "store": store_words(frozen),
                "sampler": {"kind": type(self._sampler).__name__, "state": self._sampler.state()},
                "generator": generator_state(self._generator),
                "prefetched": Prefetched().state(),
                "inserted": self._inserted,
            }
        snapshot = Snapshot(frozen, self._words, self._capacity, state, {}, self._lock, self._store.release)
        written = saver.save(snapshot, frozen.transitions, _ALL, None, None).result()
        return {name: getattr(written, name) for name in ("number", "transitions", "bytes_written", "bytes_total")}

    @ray.method(concurrency_group="control")
    def counters(self) -> bytes:
        """Say what is held."""
        with self._lock:
            return self._counters().packed()

    @ray.method(concurrency_group="control")
    def process(self) -> dict[str, Any]:
        """Say where this shard runs, what its process takes, and how it stands, as plain numbers and text."""
        return self._figures() | self._process.words()

    def _figures(self) -> dict[str, Any]:
        with self._lock:
            fields = self._store.report()
            return {
                "counters": self._counters().packed(),
                "held_bytes": sum(field.total_bytes for field in fields),
                "plain_bytes": sum(field.plain_bytes for field in fields),
                "capacity": self._capacity,
                "is_durable": self._committer is not None,
            }

    @ray.method(concurrency_group="control")
    def report(self) -> list[dict[str, Any]]:
        """Account for every field, as plain numbers and text."""
        with self._lock:
            return [asdict(field) for field in self._store.report()]

    @ray.method(concurrency_group="control")
    def reward_dtype(self) -> str | None:
        """Name the dtype of the rewards held."""
        with self._lock:
            return None if self._store.reward_dtype is None else self._store.reward_dtype.str

    def _required(self, sent: bytes) -> CallOrder:
        """Return a call's order; refuse one that counts on what was said to this shard before it was restarted."""
        order = CallOrder.of(sent)
        if order.epoch != self._epoch:
            raise CallOrderError(
                f"shard {self._number} was restarted since; its epoch is {self._epoch}, not {order.epoch}"
            )
        return order

    def _is_due(self, sent: SegmentHeader) -> bool:
        return sent.sequence <= self._expected.get(sent.writer, 0)

    def _new_store(self, first_row: int) -> Store:
        budget = Budget.of(None, "balanced", 1)
        large = sliced_leaves(self._schema)
        return Store(
            self._schema, self._capacity, self._kernels, self._lock, budget, first_tick=first_row, large=large
        )  # fmt: skip

    def _unpacked(self, payload: bytes, dictionaries: dict[str, Dictionary]) -> SealedSegment:
        """Read a segment; the codecs that segments have in common are kept once, so that answers can compare them."""
        segment = unpack_segment(payload, self._schema, dictionaries, self._kernels.coder)
        for part in segment.parts:
            if part.block.sealed is not None:
                coded = part.block.sealed.coded
                part.block.sealed = CarriedSlices(
                    replace(coded, codec=self._codecs.setdefault(coded.codec, coded.codec))
                )
        return segment

    def _segment_at(self, row: int) -> tuple[int, SealedSegment]:
        """Return the first row of a segment that is held, and the segment as one that another shard can adopt."""
        segment = self._store.segment_at(row)
        return segment.rows.first_tick, replace(segment, rows=replace(segment.rows, first_tick=0))

    def _replayed(self, journal: Journal) -> Store:
        """Take a journal over, and return a store with all that it holds and shows."""
        store = self._new_store(0)
        for page in journal.open():
            if page.begins:
                store = self._new_store(page.first_row)
            elif page.first_row != store.next_tick:
                raise DamageError(f"{journal.url} lacks segments before row {page.first_row}; load a checkpoint")
            for entry in page.entries:
                store.adopt(self._unpacked(entry.payload, journal.dictionaries))
        move = journal.move
        # What another memory was moving when it ended may not have arrived; this one's will.
        is_own = move is None or move.memory == self._memory
        store.forget_before(journal.hidden_before if is_own or move is None else move.first_row)
        return store

    def _take_over(self, journal: Journal) -> None:
        """Go on with all that the journal says."""
        if journal.closed_by == self._memory:
            self._is_closed.set()
        self._epoch = journal.epoch
        self._expected = dict(journal.expected)
        self._dictionaries = dict(journal.dictionaries)
        self._inserted = self._store.next_tick

    def _load(self, checkpoint: Restored) -> None:
        """Begin with what was saved."""
        self._store = self._new_store(checkpoint.manifest.first_tick)
        self._store.thaw(checkpoint.content)
        for chunk in checkpoint.rows(self._store.columns_like()):
            self._store.take_rows(chunk)
        state = checkpoint.state
        self._inserted = int(state["inserted"])
        self._generator = restored_generator(state["generator"])
        if state["sampler"]["kind"] == type(self._sampler).__name__:
            self._sampler.restore(state["sampler"]["state"])
        if isinstance(self._sampler, Prioritized):
            self._sampler.resize(self._capacity, self._store.first_tick)

    def _write_loaded(self, journal: Journal, checkpoint: str, written: int) -> None:
        """Write the segments of a checkpoint that a journal does not have yet.

        Args:
            written: The row behind the last that the journal holds.
        """
        journal.loading = checkpoint
        waiting: list[bytes] = []
        dictionaries: dict[str, Dictionary] = {}
        begin = row = max(self._store.first_tick, written)
        while row < self._store.next_tick:
            first, segment = self._segment_at(row)
            dictionaries |= {dictionary_name(each): each for each in dictionaries_of(segment)}
            waiting.append(pack_segment(segment, self._kernels.coder))
            row = first + segment.rows.ticks
            if sum(map(len, waiting)) >= SLOT_BYTES or row == self._store.next_tick:
                entries = [Entry(_LOADED, 0, payload) for payload in waiting]
                journal.append(entries, begin, list(dictionaries.values()))
                begin, waiting = row, []
        self._dictionaries |= dictionaries
        journal.end_loading(self._store.first_tick)

    def _apply(self, staged: list[Staged]) -> int:
        """Show what is durable now; return the first row that is still needed."""
        with self._lock:
            for each in staged:
                self._take(each)
                self._staged[each.entry.writer] -= 1
            self._staged = +self._staged
            self._changed.notify_all()
            return self._store.first_tick

    def _take(self, staged: Staged) -> None:
        first = self._store.adopt(staged.segment)
        self._inserted += self._store.next_tick - first
        self._changes += 1
        staged.done.set()

    def _ack(self, writer: bytes, kind: AckKind, reason: str = "") -> bytes:
        return Ack(kind, self._expected.get(writer, 0), self._credits(), self._counters(), reason).packed()

    def _credits(self) -> int:
        """Blocks that a writer may have under way: fewer when much waits to be made durable."""
        waiting = 0 if self._committer is None else self._committer.backlog
        return _MOST_CREDITS if waiting < _CROWDED_BYTES else 1

    def _found(self, rows: Ids) -> tuple[ShardCounters, Ids, NDArray[np.float64], Rows]:
        """Look rows up, under the lock."""
        held = self._held()
        scaled = self._sampler.scaled(held, rows) if isinstance(self._sampler, Prioritized) else np.ones(len(rows))
        return self._counters(), rows, scaled, self._store.read(rows)

    def _answer(self, counters: ShardCounters, rows: Ids, scaled: NDArray[np.float64], found: Rows) -> Payload:
        """Make an answer of what was looked up; that takes no lock."""
        columns, fields = self._finder.columns(found), self._finder.fields(found)
        return pack_answer(Answer(counters, rows, scaled, columns, fields))

    def _counters(self) -> ShardCounters:
        store = self._store
        mass = float(store.transitions)
        if isinstance(self._sampler, Prioritized):
            mass = self._sampler.mass(self._held()) if store.next_tick > store.first_tick else 0.0
        backlog = 0 if self._committer is None else self._committer.backlog
        rows = (store.first_tick, store.next_tick, store.transitions)
        return ShardCounters(self._epoch, *rows, self._inserted, self._changes, backlog, mass)

    def _held(self) -> Held:
        store = self._store
        return Held(store.first_tick, store.next_tick, 1, self._capacity, store)


def _checkpoint_of(place: str, number: int) -> Restored:
    """Read a checkpoint of one shard: all but its rows, which follow, and its full blocks, which stay."""
    reader = library_at(place)
    return restored(reader.manifest(number), reader, None)


def _begins_with(journal: Journal, next_row: int, checkpoint: str) -> bool:
    """Whether a shard still has to load its checkpoint, or the rest of it.

    Args:
        next_row: The row behind the last that the journal holds; 0: it holds none.
        checkpoint: Which one; nothing if there is none to load.
    """
    if journal.loading not in {"", checkpoint}:
        raise CheckpointError(
            f"{journal.url} holds a part of the checkpoint {journal.loading}: a memory that loaded it was ended before "
            "it had all; load that one again with this journal_url, or name another"
        )
    return bool(checkpoint) and (journal.loading == checkpoint or next_row == 0)

"""Shards: the actors that hold transitions.

In:  blocks of many writers; counts to draw; priorities.  Out: acknowledgements; answers, still compressed.
Invariant: a writer's blocks are accepted in order and each once. What was acknowledged can be drawn, and, where there
is a journal, was written to it first. Nothing is decoded here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.cluster.answer import Answer, pack_answer
from holdall.cluster.block import (
    dictionaries_of,
    pack_block,
    pack_dictionary,
    unpack_block,
    unpack_dictionary,
)
from holdall.cluster.checkpoint import Kept, ShardSaver, saved_blocks, saved_state, shard_slots
from holdall.cluster.commit import (
    Committer,
    Staged,
    begins_with,
    shelf_of_journal,
    write_loaded,
)
from holdall.cluster.journal import SegmentMove, Entry, Journal, journal_of, journals_in_use
from holdall.cluster.protocol import (
    Ack,
    AckKind,
    CallOrder,
    CallQueue,
    SegmentHeader,
    CallOrderError,
    ShardCounters,
    TravelLayout,
    first_row_of,
    life_of,
)
from holdall.cluster.roster import NAMESPACE
from holdall.cluster.status import ShardMetrics
from holdall.cluster.shelf import ShardStore
from holdall.cluster.status import Process
from holdall.errors import ArgumentError, DamageError, ShardError
from holdall.json_state import generator_of, generator_state, restored_generator, schema_of
from holdall.sampling.draw import Held, Sampler, as_ids
from holdall.sampling.prioritized import Prioritized
from holdall.storage.codec import Dictionary
from holdall.storage.records import dictionary_name

GROUPS = {"insert": 32, "sample": 4, "control": 4}
"""Threads by kind of call, so that none waits behind another kind."""
_MOST_CREDITS = 4
_CROWDED_BYTES = 32 * 2**20
_SETTLED_S = 5.0
_OVERTAKEN_S = 2.0
"""How long a block waits for those before it, which Ray may deliver later, before the writer is asked for them."""

Ids = NDArray[np.int64]


class Shard:
    """One shard of a memory.

    Args:
        number: Which one.
        words: The memory's schema, see checkpoint/schema_words.py.
        capacity: Most rows held.
        memory: The name of the memory's roster. A handle in its place could not be had again after a restart.
        url: Where the journal is kept; None: nowhere, and what the shard held is lost with it.
        saved: Where a checkpoint lies that the shard begins with, and what its manifest says of this shard.
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
        saved: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        self._number = number
        self._memory = memory
        self._url = url
        self._layout = TravelLayout.of(schema_of(words))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._call_queue = CallQueue()
        self._process = Process()
        self._metrics = ShardMetrics(memory, number)
        self._dictionaries: dict[str, Dictionary] = {}
        self._expected: dict[bytes, int] = {}  # the number of every writer's next block, staged ones counted
        self._staged: Counter[bytes] = Counter()  # blocks of every writer that are not durable yet
        self._is_closed = threading.Event()
        self._inserted = 0
        self._changes = 0
        self._sampler = sampler
        self._shelf: ShardStore = ShardStore(self._layout, capacity)
        self._committer: Committer | None = None
        self._savers: dict[str, ShardSaver] = {}
        state = None if saved is None else saved_state(shard_slots(saved[0], number), saved[1]["state"])
        first_life = 0 if state is None else life_of(state["next_row"])
        if url is None:
            roster: Any = ray.get_actor(memory, NAMESPACE)
            self._epoch: int = ray.get(roster.begin_life.remote(number, first_life))
            self._shelf = ShardStore(self._layout, capacity, first_row_of(self._epoch))
        else:
            journal = journal_of(url, number)
            self._take_over(journal, capacity)
        # A checkpoint is what a shard begins with, and not what one that was restarted goes back to.
        checkpoint = "" if saved is None else f"{saved[0]}:{saved[1]['state']}"
        written = self._shelf.next_row
        is_new = self._epoch == first_life if url is None else begins_with(journal, written, checkpoint)
        # The first life of the only shard draws as a local memory with the same seed does.
        first = number == 0 and self._epoch == 0
        own_seed = seed if seed is None or first else [seed, number, self._epoch]
        self._generator: np.random.Generator = generator_of(own_seed)
        if saved is not None and state is not None and is_new:
            self._load(*saved, state, capacity)
            if url is not None:
                blocks = self._saved(*saved, state)
                dictionaries = list(self._dictionaries.values())
                write_loaded(journal, checkpoint, blocks, written, self._shelf.first_row, dictionaries)
        if url is not None:
            self._committer = Committer(journal, self._shelf.next_row, self._apply)
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
                if any(name not in self._dictionaries for name in dictionaries_of(payload)):
                    return self._ack(sent.writer, AckKind.NEEDS_DICTIONARY)
                dictionaries = dict(self._dictionaries)
            block = unpack_block(payload, self._layout, dictionaries)
            staged = Staged(Entry(sent.writer, sent.sequence, payload), block)
            with self._changed:
                self._changed.wait_for(lambda: self._is_due(sent), _OVERTAKEN_S)
                if self._is_closed.is_set():
                    return self._ack(sent.writer, AckKind.CLOSED)
                if sent.sequence != self._expected.get(sent.writer, 0):
                    return self._ack(sent.writer, AckKind.EXPECTED_ANOTHER)
                self._shelf.require(block)
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
        dictionary = unpack_dictionary(record)
        with self._lock:
            self._dictionaries[dictionary_name(dictionary)] = dictionary

    @ray.method(concurrency_group="control")
    def dictionary(self, name: str) -> bytes:
        """Return a dictionary that answers name."""
        with self._lock:
            found = self._dictionaries.get(name)
        if found is None:
            raise DamageError(f"shard {self._number} has no dictionary {name}; report this")
        return pack_dictionary(found)

    @ray.method(concurrency_group="sample")
    def sample(self, order: bytes, counts: list[int]) -> bytes:
        """Draw rows of some batches, those of each for itself; of an empty shard, return how it stands."""
        with self._call_queue.taken(self._required(order)), self._metrics.timed("sample"), self._lock:
            if self._shelf.transitions == 0:
                return self._counters().packed()
            drawn = [self._sampler.draw(self._held(), count, self._generator).ids for count in counts]
            return self._answer(drawn[0] if len(drawn) == 1 else np.concatenate(drawn))

    @ray.method(concurrency_group="sample")
    def gather(self, rows: bytes) -> bytes:
        """Return rows by their numbers."""
        wanted = np.frombuffer(rows, np.int64)
        with self._lock:
            self._held().require(wanted)
            return self._answer(wanted)

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
        """Return the oldest block, its rows, the first of them held, and the row behind it; none: no bytes."""
        with self._lock:
            shelf = self._shelf
            if shelf.transitions == 0:
                return b"", 0, shelf.next_row, shelf.next_row
            start, block = shelf.block(shelf.block_numbers[0])
            block.columns["valid"][: max(0, shelf.first_row - start)] = False  # they had left already
            return pack_block(block), block.rows, max(start, shelf.first_row), start + block.rows

    @ray.method(concurrency_group="control")
    def give_up(self, first_row: int, end: int, to: int, writer: bytes, sequence: int) -> None:
        """Draw rows no more that go to another shard; the journal keeps them, and says where they go.

        Args:
            end: The row behind them.
            writer: Under whose name they are sent there, and as which of its blocks.
        """
        with self._lock:
            self._shelf.hide_before(end)
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
                self._shelf.hide_before(min(journal.hidden_before, self._shelf.next_row))
            self._committer.hide(self._shelf.first_row, None)
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
    def save(self, url: str) -> dict[str, Any]:
        """Write what is held now to a place; return what the manifest has to say of it."""
        saver = self._savers.setdefault(url, ShardSaver(shard_slots(url, self._number)))
        with self._lock:
            shelf = self._shelf
            numbers = list(shelf.block_numbers)
            state = {
                "first_row": shelf.first_row,
                "next_row": shelf.next_row,
                "inserted": self._inserted,
                "sampler": {"kind": type(self._sampler).__name__, "state": self._sampler.state()},
                "generator": generator_state(self._generator),
            }
            transitions = shelf.transitions
        words = saver.save(shelf, self._lock, state, numbers)
        return words | {"transitions": transitions, "bytes_written": saver.bytes_written}

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
            fields = self._shelf.report()
            return {
                "counters": self._counters().packed(),
                "held_bytes": sum(field.total_bytes for field in fields),
                "plain_bytes": sum(field.plain_bytes for field in fields),
                "capacity": self._shelf.capacity,
                "is_durable": self._committer is not None,
            }

    @ray.method(concurrency_group="control")
    def report(self) -> list[dict[str, Any]]:
        """Account for every field, as plain numbers and text."""
        with self._lock:
            return [asdict(field) for field in self._shelf.report()]

    @ray.method(concurrency_group="control")
    def reward_dtype(self) -> str | None:
        """Name the dtype of the rewards held."""
        with self._lock:
            return None if self._shelf.reward_dtype is None else self._shelf.reward_dtype.str

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

    def _take_over(self, journal: Journal, capacity: int) -> None:
        """Go on with all that the journal holds."""
        self._shelf = shelf_of_journal(journal, self._layout, capacity, self._memory)
        if journal.closed_by == self._memory:
            self._is_closed.set()
        self._epoch = journal.epoch
        self._expected = dict(journal.expected)
        self._dictionaries = dict(journal.dictionaries)
        self._inserted = self._shelf.next_row

    def _saved(self, url: str, words: dict[str, Any], state: dict[str, Any]) -> Iterator[Kept]:
        """Read the blocks of a checkpoint, without those that were written after its state was taken."""
        for kept in saved_blocks(shard_slots(url, self._number), words["blocks"], self._dictionaries):
            if kept.first_row < state["next_row"]:
                yield kept

    def _load(self, url: str, words: dict[str, Any], state: dict[str, Any], capacity: int) -> None:
        """Begin with what was saved."""
        shelf: ShardStore | None = None
        for kept in self._saved(url, words, state):
            shelf = shelf or ShardStore(self._layout, capacity, kept.first_row)
            shelf.append(unpack_block(kept.payload, self._layout, self._dictionaries))
        self._shelf = shelf or ShardStore(self._layout, capacity, state["next_row"])
        self._shelf.hide_before(state["first_row"])
        if self._shelf.next_row != state["next_row"]:
            raise DamageError(f"the checkpoint at {url} lacks blocks of shard {self._number}; load an older one")
        self._inserted = int(state["inserted"])
        self._generator = restored_generator(state["generator"])
        if state["sampler"]["kind"] == type(self._sampler).__name__:
            self._sampler.restore(state["sampler"]["state"])
        if isinstance(self._sampler, Prioritized):
            self._sampler.resize(capacity, self._shelf.first_row)

    def _apply(self, staged: list[Staged]) -> int:
        """Show what is durable now; return the first row that is still needed."""
        with self._lock:
            for each in staged:
                self._take(each)
                self._staged[each.entry.writer] -= 1
            self._staged = +self._staged
            self._changed.notify_all()
            return self._shelf.first_row

    def _take(self, staged: Staged) -> None:
        before = self._shelf.next_row
        self._shelf.append(staged.block)
        self._inserted += self._shelf.next_row - before
        self._changes += 1
        staged.done.set()

    def _ack(self, writer: bytes, kind: AckKind, reason: str = "") -> bytes:
        return Ack(kind, self._expected.get(writer, 0), self._credits(), self._counters(), reason).packed()

    def _credits(self) -> int:
        """Blocks that a writer may have under way: fewer when much waits to be made durable."""
        waiting = 0 if self._committer is None else self._committer.backlog
        return _MOST_CREDITS if waiting < _CROWDED_BYTES else 1

    def _answer(self, rows: Ids) -> bytes:
        held = self._held()
        scaled = self._sampler.scaled(held, rows) if isinstance(self._sampler, Prioritized) else np.ones(len(rows))
        return pack_answer(Answer(self._counters(), rows, scaled, self._shelf.find(rows)))

    def _counters(self) -> ShardCounters:
        shelf = self._shelf
        mass = float(shelf.transitions)
        if isinstance(self._sampler, Prioritized):
            mass = self._sampler.mass(self._held()) if shelf.next_row > shelf.first_row else 0.0
        backlog = 0 if self._committer is None else self._committer.backlog
        rows = (shelf.first_row, shelf.next_row, shelf.transitions)
        return ShardCounters(self._epoch, *rows, self._inserted, self._changes, backlog, mass)

    def _held(self) -> Held:
        shelf = self._shelf
        return Held(shelf.first_row, shelf.next_row, 1, shelf.capacity, shelf)

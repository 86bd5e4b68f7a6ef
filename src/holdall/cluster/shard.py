"""Shards: the actors that hold transitions, each in an ordinary store of one lane whose ticks are row numbers.

In:  segments that writers sealed; counts to draw; priorities.  Out: acknowledgements; answers.
Invariant: a writer's segments are accepted in order and each once. What was acknowledged can be drawn, and, where there
is a journal, was written to it first.
"""

from __future__ import annotations

import functools
import math
import pickle
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.checkpoint import Checkpoint, Restored, SaveHandle, open_reader, restored
from holdall.cluster import protocol
from holdall.cluster.answer import BlockPlace, ChangeCount, Payload, RowDraw
from holdall.cluster.journal import Committer, Entry, Journal, SegmentMove, Staged, journal_of, journals_in_use
from holdall.cluster.roster import NAMESPACE, is_restarted
from holdall.cluster.shard_data import ShardData
from holdall.cluster.status import Process, ShardMetrics
from holdall.errors import ArgumentError, CheckpointError, DamageError, ShardError
from holdall.json_state import generator_of
from holdall.native import fallback
from holdall.sampling import Sampler
from holdall.schema import Array

GROUPS = {"insert": 32, "sample": 4, "control": 4, "save": 4}
"""Threads by kind of call, so that none waits behind another kind."""
_ORDERED = frozenset({"sample", "update_priorities", "begin_save"})
"""What a client may call by name, see `Shard.ordered`."""
_MOST_LEARNERS = 1024
_MOST_CREDITS = 4
_CROWDED_BYTES = 32 * 2**20
_SETTLED_S = 5.0
_OVERTAKEN_S = 2.0
"""How long a segment waits for those before it, which Ray may deliver later, before the writer is asked for them."""
Ids = NDArray[np.int64]


class Shard:
    """One shard of a memory.

    Args:
        number: Which one.
        words: The memory's schema, see `holdall.json_state.schema_words`.
        capacity: Most rows held.
        memory: The name of the memory's roster. A handle in its place could not be found again after a restart.
        url: Where the journal is kept; None: nowhere, and what the shard held is lost with it.
        neighbours: Shards on a machine, this one counted.
        saved: The place and number of a checkpoint of this shard that it begins with.
    """

    def __init__(
        self, number: int, words: dict[str, Any], capacity: int, sampler: Sampler, seed: int | None, memory: str,
        url: str | None = None, neighbours: int = 1, saved: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._number, self._memory, self._url = number, memory, url
        self._machine = protocol.machine_of(protocol.client_name())
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._call_queue = protocol.CallQueue()
        self._process = Process()
        self._metrics = ShardMetrics(memory, number)
        self._expected: dict[bytes, int] = {}  # the number of every writer's next segment, staged ones counted
        self._staged: Counter[bytes] = Counter()  # segments of every writer that are not durable yet
        self._is_closed = threading.Event()
        self._generators: dict[int, np.random.Generator] = {}  # of handles elsewhere
        self._changes, self._written_changes = ChangeCount(), 0  # the latter when priorities were last written
        self._handles: dict[int, SaveHandle] = {}  # of checkpoints that were begun
        self._committer: Committer | None = None
        self._data = ShardData(words, capacity, sampler, generator_of(seed), self._lock, neighbours)
        self._epoch, highest = begun_life(memory, number, 0, has_journal=url is not None)
        # A checkpoint is what a shard begins with, and not what one that was restarted goes back to.
        is_new, checkpoint = self._epoch == 0 or not is_restarted(), None
        if url is not None:
            journal = journal_of(url, number)
            self._take_over(journal, waits=is_restarted())
            written, name = self._data.store.next_tick, "" if saved is None else f"{saved[0]}:{saved[1]}"
            is_new = _begins_with(journal, written, name)
        if saved is not None and is_new:
            checkpoint = _checkpoint_of(*saved)
        if url is None:
            first_life = 0 if checkpoint is None else protocol.life_of(checkpoint.manifest.next_tick)
            if first_life:
                self._epoch, _ = begun_life(memory, number, first_life, has_journal=False)
            self._data.begin_at(protocol.first_row_of(self._epoch))
        # The first life of the only shard draws as a local memory with the same seed does.
        if seed is not None and (number, self._epoch) != (0, 0):
            self._data.generator = generator_of([seed, number, self._epoch])
        if checkpoint is not None:
            self._data.load(checkpoint)
            if url is not None:
                self._data.write_loaded(journal, name, written)
        self._data.raise_highest(highest)
        if url is not None:
            self._committer = Committer(journal, self._data.store.next_tick, self._apply, self._changed_priorities)
        self._metrics.follow(lambda: self._figures() | {"anonymous_bytes": self._process.anonymous_bytes()})

    def _changed_priorities(self) -> dict[str, Any] | None:
        """Return the sampler's state for the journal, if it has changed since the last time."""
        with self._lock:
            if self._changes.value == self._written_changes:
                return None
            self._written_changes = self._changes.value
            return self._data.priorities()

    def _take_over(self, journal: Journal, *, waits: bool) -> None:
        """Go on with all that the journal holds."""
        self._data.replay(journal, self._memory, waits=waits)
        if journal.state.closed_by == self._memory:
            self._is_closed.set()
        self._epoch = journal.epoch
        self._expected = dict(journal.expected)

    @ray.method(concurrency_group="insert")
    def insert(self, sent: protocol.SegmentHeader, payload: bytes) -> protocol.Ack:
        """Take a segment over, if it is the next one of its writer."""
        with self._metrics.timed("insert"):
            return self._insert(sent, payload)

    def _insert(self, sent: protocol.SegmentHeader, payload: bytes) -> protocol.Ack:
        try:
            self._require_journal()
            with self._lock:
                if sent.epoch != self._epoch or sent.sequence < self._expected.get(sent.writer, 0):
                    return self._ack(sent.writer, protocol.AckKind.EXPECTED_ANOTHER)
                if self._is_closed.is_set():
                    return self._ack(sent.writer, protocol.AckKind.CLOSED)
            segment = self._data.unpacked(payload)
            staged = Staged(Entry(sent.writer, sent.sequence, payload), segment, Future())
            with self._changed:
                self._changed.wait_for(lambda: sent.sequence <= self._expected.get(sent.writer, 0), _OVERTAKEN_S)
                if self._is_closed.is_set():
                    return self._ack(sent.writer, protocol.AckKind.CLOSED)
                if sent.sequence != self._expected.get(sent.writer, 0):
                    return self._ack(sent.writer, protocol.AckKind.EXPECTED_ANOTHER)
                self._data.store.require(segment)
                self._expected[sent.writer] = sent.sequence + 1
                if self._committer is None:
                    self._take(staged)
                else:
                    self._staged[sent.writer] += 1
                    self._committer.stage(staged)
                self._changed.notify_all()
            staged.done.result()
            with self._lock:
                return self._ack(sent.writer, protocol.AckKind.ACCEPTED)
        except (ArgumentError, DamageError) as error:
            with self._lock:
                return self._ack(sent.writer, protocol.AckKind.REFUSED, str(error))

    @ray.method(concurrency_group="insert")
    def expect(self, writer: bytes) -> protocol.Ack:
        """Say which segment of a writer is the next: all before it can be drawn, and are durable if any are."""
        self._require_journal()
        with self._changed:
            # The writer forgets what was accepted, so nothing counts as accepted that could still be lost.
            if not self._changed.wait_for(lambda: not self._staged[writer], _SETTLED_S):
                raise ShardError(f"shard {self._number} waits for its disk; ask again")
            is_closed = self._is_closed.is_set()
            return self._ack(writer, protocol.AckKind.CLOSED if is_closed else protocol.AckKind.EXPECTED_ANOTHER)

    @ray.method(concurrency_group="control")
    def trouble(self) -> str:
        """Say why segments are not acknowledged, if there is a reason."""
        return "" if self._committer is None else self._committer.trouble

    def _require_journal(self) -> None:
        """Refuse what a shard must not do any more whose journal another one has."""
        if self._committer is not None and self._committer.fenced is not None:
            raise self._committer.fenced

    @ray.method(concurrency_group="sample")
    def ordered(self, packed: bytes) -> Any:
        """Run a call that keeps its client's order, see `Cluster.call`."""
        method, order, *arguments = pickle.loads(packed)  # as Ray does with what processes of a cluster send
        if method not in _ORDERED:
            raise ArgumentError(f"method ({method!r}) must be one of {', '.join(sorted(_ORDERED))}; call it by itself")
        return getattr(self, method)(order, *arguments)

    def sample(
        self, order: protocol.CallOrder, counts: list[tuple[int, int]], blocks: list[BlockPlace]
    ) -> Payload | bytes | protocol.ShardCounters:
        """Draw rows of some batches, see `ShardData.draw`; of an empty shard, return the counters alone.

        Args:
            blocks: Of every batch, where its rows are written if that can be; nothing: they are in the answer.
        """
        with self._metrics.timed("sample"):
            self._require_journal()
            is_near, turned = self._is_near(order.client), None
            with self._in_turn(order):
                counters = self._counters()
                if counters.mass == 0:
                    return counters
                drawn = self._data.draw(counts, self._generator_of(order))
                if not is_near:
                    drawn, turned = self._data.in_order(drawn, counts)
                found = self._data.found(drawn)
            count = self._changes.place if is_near else None
            return self._data.answer(counters, drawn, found, counts, blocks, turned, is_near=is_near, count=count)

    def _is_near(self, client: bytes) -> bool:
        """Whether a client runs on this machine: arrays then reach it without a network."""
        return protocol.machine_of(client) == self._machine

    def _generator_of(self, call: protocol.CallOrder) -> np.random.Generator:
        """Return what rows are drawn with for a handle; the one whose memory this is draws with the shard's own."""
        if call.learner == 0:
            return self._data.generator
        known = self._generators.pop(call.handle, None)
        found = self._generators[call.handle] = known or generator_of([call.learner, self._number, self._epoch])
        if len(self._generators) > _MOST_LEARNERS:
            del self._generators[next(iter(self._generators))]
        return found

    @ray.method(concurrency_group="sample")
    def gather(self, client: bytes, rows: bytes) -> Payload | bytes:
        """Return rows by their numbers, to a client of this name."""
        wanted = np.frombuffer(rows, np.int64)
        with self._lock:
            self._data.held().require(wanted)
            counters, found = self._counters(), self._data.found(RowDraw(wanted))
        return self._data.answer(counters, RowDraw(wanted), found, is_near=self._is_near(client))

    def update_priorities(self, order: protocol.CallOrder, rows: Ids, priorities: Array) -> protocol.ShardCounters:
        """Set the priorities of rows; those that left are passed over."""
        sampler: Any = self._data.sampler
        with self._in_turn(order):
            # Rows of an earlier life are lost; their numbers are below all that are held now.
            sampler.update_priorities(self._data.held(), rows, priorities)
            self._changes.raise_by_one()
            return self._counters()

    @ray.method(concurrency_group="control")
    def raise_highest(self, scaled: float) -> protocol.ShardCounters:
        """Hear of the highest priority of all shards: new rows get it."""
        with self._lock:
            self._data.raise_highest(scaled)
            self._changes.raise_by_one()
            return self._counters()

    @ray.method(concurrency_group="control")
    def close_to_writers(self) -> None:
        """Accept nothing more, so that what is held can be moved elsewhere."""
        with self._changed:
            self._is_closed.set()
            self._changed.notify_all()
        if self._committer is not None:
            self._committer.drain()
            self._say(closed_by=self._memory)

    @ray.method(concurrency_group="control")
    def oldest(self) -> tuple[bytes, int, int, int]:
        """Return the oldest segment, its rows, the first of them, and the row behind it; none: no bytes."""
        with self._lock:
            store = self._data.store
            if store.transitions == 0:
                return b"", 0, store.next_tick, store.next_tick
            first, segment = self._data.segment_at(store.first_tick)
        return self._data.packed(segment), segment.rows.ticks, first, first + segment.rows.ticks

    @ray.method(concurrency_group="control")
    def give_up(self, first_row: int, end: int, to: int, writer: bytes, sequence: int) -> None:
        """Draw rows no more that go to another shard; the journal keeps them, and says where they go.

        Args:
            end: The row behind them.
            writer: Under whose name they are sent there, and as which of its segments.
        """
        with self._lock:
            self._data.store.forget_before(end)
            self._changes.raise_by_one()
        self._say(hidden_before=end, move=SegmentMove(self._memory, to, writer.hex(), sequence, first_row))

    def _say(self, **changes: Any) -> None:
        """Have the journal, if there is one, say more of this shard, see `JournalState`."""
        if self._committer is not None:
            self._committer.record(lambda journal: journal.say(**changes))

    @ray.method(concurrency_group="control")
    def move(self) -> tuple[int, bytes, int] | None:
        """Say which segment was on its way to a shard when the memory before this one ended: to, writer, number."""
        move = None if self._committer is None else self._committer.journal.state.move
        if move is None or move.memory == self._memory:
            return None
        return move.shard, bytes.fromhex(move.writer), move.sequence

    @ray.method(concurrency_group="control")
    def end_move(self, arrived: bool) -> None:
        """Hear whether that segment arrived; if not, it stays here."""
        with self._lock:
            if self._committer is None or self._committer.journal.state.move is None:
                return
            if arrived:
                self._data.store.forget_before(self._committer.journal.state.hidden_before)
            self._say(hidden_before=self._data.store.first_tick, move=None)
            self._changes.raise_by_one()

    @ray.method(concurrency_group="control")
    def end_drain(self) -> None:
        """Hear that all segments have arrived elsewhere."""
        self._say(move=None, drained=True)

    @ray.method(concurrency_group="control")
    def journals(self) -> list[int]:
        """Return the shards whose journals lie beside this one's, and hold something as far as is known."""
        return [] if self._url is None else journals_in_use(self._url)

    def begin_save(self, order: protocol.CallOrder, url: str) -> int:
        """Begin a checkpoint of this moment at a place of this shard's own; return what `end_save` is called with."""
        with self._in_turn(order):
            number = secrets.randbits(62)  # unlike those of an earlier life
            self._handles[number] = self._data.save(url)
            return number

    @ray.method(concurrency_group="save")
    def end_save(self, number: int) -> Checkpoint:
        """Wait for a checkpoint."""
        if number not in self._handles:
            raise protocol.CallOrderError(f"shard {self._number} was restarted after the checkpoint was begun")
        return self._handles.pop(number).result()

    @ray.method(concurrency_group="control")
    def end_saves(self) -> None:
        """Wait for checkpoints that are under way, and let others write there; make priorities durable."""
        self._data.end_saves()
        if self._committer is not None and self._committer.fenced is None:
            self._committer.write_priorities()

    @ray.method(concurrency_group="control")
    def counters(self) -> protocol.ShardCounters:
        """Say what is held."""
        with self._lock:
            return self._counters()

    @ray.method(concurrency_group="control")
    def process(self) -> dict[str, Any]:
        """Say where this shard runs, what its process takes, and how it stands, as plain numbers and text."""
        return self._figures() | self._process.words()

    def _figures(self) -> dict[str, Any]:
        with self._lock:
            fields = self._data.store.report()
            return {
                "counters": self._counters(),
                "held_bytes": sum(field.total_bytes for field in fields),
                "plain_bytes": sum(field.plain_bytes for field in fields),
                "capacity": self._data.capacity,
                "is_durable": self._committer is not None,
                "is_draining": self._is_closed.is_set(),
            }

    @ray.method(concurrency_group="control")
    def report(self) -> tuple[list[dict[str, Any]], str]:
        """Account for every field, as plain numbers and text; say what is done without compiled code."""
        with self._lock:
            return [asdict(field) for field in self._data.store.report()], fallback()

    @contextmanager
    def _in_turn(self, order: protocol.CallOrder) -> Iterator[None]:
        """Hold the lock in a call's turn; refuse one that counts on what was said to this shard before a restart."""
        if order.epoch != self._epoch:
            raise protocol.CallOrderError(
                f"shard {self._number} was restarted since; its epoch is {self._epoch}, not {order.epoch}"
            )
        with self._call_queue.taken(order), self._lock:
            yield

    def _apply(self, staged: list[Staged]) -> int:
        """Show what is durable now; return the first row that is still needed."""
        with self._lock:
            for each in staged:
                self._take(each)
                self._staged[each.entry.writer] -= 1
            self._staged = +self._staged
            self._changed.notify_all()
            return self._data.store.first_tick

    def _take(self, staged: Staged) -> None:
        self._data.take(staged.entry.writer, staged.segment)
        self._changes.raise_by_one()
        staged.done.set_result(None)

    def _ack(self, writer: bytes, kind: protocol.AckKind, reason: str = "") -> protocol.Ack:
        counters = self._counters()
        # Segments that a writer may have under way: fewer when much waits to be made durable.
        under_way = _MOST_CREDITS if counters.backlog < _CROWDED_BYTES else 1
        return protocol.Ack(kind, self._expected.get(writer, 0), under_way, counters, reason)

    def _counters(self) -> protocol.ShardCounters:
        data, store = self._data, self._data.store
        backlog = 0 if self._committer is None else self._committer.backlog
        rows = (store.first_tick, store.next_tick, store.transitions)
        mass, highest = data.mass(), data.highest  # in this order: what is new gets its priority with the first
        changes = self._changes.value
        return protocol.ShardCounters(self._epoch, *rows, data.inserted, changes, backlog, mass, highest)


def begun_life(memory: str, number: int, first_life: int, *, has_journal: bool) -> tuple[int, float]:
    """Return which life of a shard this is, and the highest priority of the memory, as its roster has them.

    A roster that is being restarted is waited for: Ray gives up an actor for good whose constructor raises.
    """
    find = functools.partial(ray.get_actor, memory, NAMESPACE)
    try:
        life, highest = protocol.asked(find, "begin_life", number, first_life, patience_s=math.inf, timeout_s=None)
    except (ValueError, protocol.GoneError):  # the memory was closed
        if has_journal:  # which has both, as they were
            return first_life, 0.0
        raise
    return life, highest


def _checkpoint_of(url: str, number: int) -> Restored:
    """Read a checkpoint of one shard: all but its rows, which follow, and its full blocks, which stay."""
    reader = open_reader(url, timeout=math.inf)
    return restored(reader.manifest(number), reader, None)


def _begins_with(journal: Journal, next_row: int, checkpoint: str) -> bool:
    """Whether a shard still has to load its checkpoint, or the rest of it.

    Args:
        next_row: The row behind the last that the journal holds; 0: it holds none.
        checkpoint: Which one; nothing if there is none to load.
    """
    if journal.state.loading not in {"", checkpoint}:
        raise CheckpointError(
            f"{journal.url} holds a part of the checkpoint {journal.state.loading}: a memory that loaded it was ended "
            "before it had all; load that one again with this journal_url, or name another"
        )
    return bool(checkpoint) and (journal.state.loading == checkpoint or next_row == 0)

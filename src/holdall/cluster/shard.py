"""Shards: the actors that hold transitions, each in an ordinary store of one lane whose ticks are row numbers.

In:  segments that writers sealed; counts to draw; priorities.  Out: acknowledgements; answers.
Invariant: a writer's segments are accepted in order and each once. What was acknowledged can be drawn, and, where there
is a journal, was written to it first.
"""

from __future__ import annotations

import math
import os
import pickle
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import ray

from holdall.batch import of_ids
from holdall.checkpoint import Checkpoint, Restored, SaveHandle, open_reader, restored
from holdall.cluster import protocol
from holdall.cluster.answer import Payload
from holdall.cluster.journal import Entry, SegmentMove, journal_of
from holdall.cluster.roster import MemoryTerms, is_restarted, roster_of
from holdall.cluster.shard_data import ShardData
from holdall.errors import ArgumentError, CheckpointError, DamageError, ShardError
from holdall.machine import HeldReader, anonymous_bytes, memory_limits
from holdall.ray_metrics import ShardMetrics
from holdall.report import MemoryReport
from holdall.sampling import generator_of
from holdall.schema import Array
from holdall.shared import RowsPlace

THREADS = {"max_concurrency": 4, "concurrency_groups": {"insert": 32, "sample": 1, "save": 4}}
"""For all calls but some kinds, and for these: none waits behind another kind, and one keeps calls in their order."""
_BEFORE_S = 1.0
"""How long a segment waits for the one before it, which was sent earlier, and may be lost."""


class Shard:
    """One shard of a memory.

    Args:
        number: Which one.
        neighbours: Shards on a machine, this one counted.
        saved: The place and number of a checkpoint of this shard that it begins with.
    """

    def __init__(
        self, number: int, terms: MemoryTerms, seed: int | None, neighbours: int = 1,
        saved: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        # The name of the memory's roster: a handle in its place could not be found again after a restart.
        self._number, self._memory, self._is_durable = number, terms.name, terms.url is not None
        self._machine = protocol.this_machine()
        self._lock = threading.RLock()
        self._staged = threading.Condition(self._lock)  # a segment was, so that those that come next may be
        self._held = HeldReader()
        self._metrics = ShardMetrics(terms.name, number)
        self._is_closed = threading.Event()
        self._written_changes = 0  # when priorities were last written
        self._handles: dict[int, SaveHandle] = {}  # of checkpoints that were begun
        self._data = ShardData(terms.words, terms.shard_rows, terms.sampler, generator_of(seed), self._lock, neighbours)
        self._journal = journal_of(terms.url, number)
        self._epoch, highest = begun_life(terms.name, number, 0, has_journal=self._is_durable)
        # A checkpoint is what a shard begins with, and not what one that was restarted goes back to.
        is_new = self._epoch == 0 or not is_restarted()
        name = "" if saved is None else f"{saved[0]}:{saved[1]}"
        if self._is_durable:
            is_new = self._take_over(name)
        written = self._data.store.next_tick
        checkpoint = _checkpoint_of(*saved) if saved is not None and is_new else None
        if not self._is_durable:
            first_life = 0 if checkpoint is None else protocol.life_of(checkpoint.manifest.next_tick)
            if first_life:
                self._epoch, _ = begun_life(terms.name, number, first_life, has_journal=False)
            self._data.begin_at(protocol.first_row_of(self._epoch))
        # The first life of the only shard draws as a local memory with the same seed does.
        if seed is not None and (number, self._epoch) != (0, 0):
            self._data.generator = generator_of([seed, number, self._epoch])
        if checkpoint is not None:
            self._data.load(checkpoint)
            if self._is_durable:
                self._data.write_loaded(self._journal, name, written)
        self._data.raise_highest(highest)
        # The number of every writer's next segment, staged ones counted.
        self._expected = dict(self._journal.expected)
        self._journal.follow(self._data.rows, self._apply, self._changed_priorities)
        self._metrics.follow(self._measured)

    def _changed_priorities(self) -> dict[str, Any] | None:
        """Return the sampler's state for the journal, if it has changed since the last time."""
        with self._lock:
            if self._data.changes.value == self._written_changes:
                return None
            self._written_changes = self._data.changes.value
            return self._data.priorities()

    def _take_over(self, checkpoint: str) -> bool:
        """Go on with all that the journal holds; say whether a checkpoint, or the rest of it, is still to be loaded.

        Args:
            checkpoint: Which one; nothing if there is none to load.
        """
        journal = self._journal
        self._data.replay(journal, self._memory, waits=is_restarted())
        if journal.state.closed_by == self._memory:
            self._is_closed.set()
        self._epoch, loading = journal.epoch, journal.state.loading
        if loading not in {"", checkpoint}:
            raise CheckpointError(
                f"{journal.url} contains a partially loaded checkpoint: the load of {loading} was interrupted. Repeat "
                "that load with the same journal_url, or choose another directory for the journals."
            )
        return bool(checkpoint) and (loading == checkpoint or self._data.store.next_tick == 0)

    @ray.method(concurrency_group="insert")
    def send(self, packed: bytes) -> bytes:
        """Run `insert`: what it is given, and what it returns, as one each, see `Cluster.call`."""
        return pickle.dumps(self.insert(*pickle.loads(packed)))

    def insert(self, writer: bytes, first: int, payloads: list[bytes], oldest: int = 0) -> protocol.Ack:
        """Take over those segments of a writer that come next, and say which one does then.

        Args:
            first: The number of the first of them; those that are there already are passed over.
            oldest: The number of the oldest that the writer has: no others come any more.
        """
        with self._metrics.timed("insert"):
            self._require_journal()
            with self._lock:
                self._expected[writer] = max(self._expected.get(writer, 0), oldest)
            refused = ""
            for number, payload in enumerate(payloads, first):
                try:
                    self._stage(writer, number, payload)
                except (ArgumentError, DamageError) as error:
                    refused = str(error) if number == self._expected[writer] else ""
                    break
            with self._lock:
                expected, is_closed = self._expected[writer], self._is_closed.is_set()
            self._journal.commit()  # the writer forgets what was accepted: nothing of it may still be lost
            with self._lock:
                return protocol.Ack(expected, self.counters(), is_closed, refused)

    def _stage(self, writer: bytes, number: int, payload: bytes) -> None:
        """Have a segment taken over, if it is the next one of its writer; another thread may have the one before it."""
        segment = self._data.unpacked(payload)
        with self._staged:
            self._staged.wait_for(lambda: self._is_closed.is_set() or self._expected[writer] >= number, _BEFORE_S)
            if number != self._expected[writer] or self._is_closed.is_set():
                return
            self._data.store.require(segment)
            self._journal.stage(Entry(writer, number, payload, segment))
            self._expected[writer] = number + 1
            self._staged.notify_all()

    def trouble(self) -> str:
        """Say why segments are not acknowledged, if there is a reason."""
        return self._journal.trouble

    def _require_journal(self) -> None:
        """Refuse what a shard must not do any more whose journal another one has."""
        if self._journal.fenced is not None:
            raise self._journal.fenced

    @ray.method(concurrency_group="sample")
    def ordered(self, packed: bytes) -> Any:
        """Run a call that is taken in the order in which its client makes them, see `Cluster.call`."""
        method, *arguments = pickle.loads(packed)  # as Ray does with what processes of a cluster send
        return getattr(self, method)(*arguments)

    def sample(
        self, machine: bytes, seed: int, counts: list[tuple[int, int]], blocks: list[RowsPlace]
    ) -> Payload | protocol.ShardCounters:
        """Draw rows of some batches; of an empty shard, return the counters alone.

        Args:
            machine: That who asks runs on.
            seed: What rows are drawn with; 0: the shard's own generator, for the one whose memory this is.
            counts: See `ShardData.draw`.
            blocks: Of every batch, where its rows are written if that can be; nothing: they are in the answer.
        """
        with self._metrics.timed("sample"):
            self._require_journal()
            is_near = machine == self._machine
            with self._lock:
                counters = self.counters()
                if counters.mass == 0:
                    return counters
                drawn = self._data.draw(counts, generator_of(seed) if seed else None)
                found = self._data.found(counters, drawn, counts, is_near=is_near)
            return self._data.answer(found, counts, blocks, is_near=is_near)

    def gather(self, machine: bytes, rows: protocol.Ids) -> Payload:
        """Return rows by their numbers."""
        is_near = machine == self._machine
        with self._lock:
            self._data.held().require(rows)
            found = self._data.found(self.counters(), of_ids(rows), [(len(rows), 0)], is_near=is_near)
        return self._data.answer(found, is_near=is_near)

    def update_priorities(self, rows: protocol.Ids, priorities: Array) -> protocol.ShardCounters:
        """Set the priorities of rows; those that left are passed over."""
        sampler: Any = self._data.sampler
        with self._lock:
            # Rows of another life are lost; their numbers may be above those that are held now.
            end = self._data.store.next_tick
            known = (rows < end) | (protocol.life_of(rows) == protocol.life_of(end))
            sampler.update_priorities(self._data.held(), rows[known], priorities[known])
            self._data.changes.raise_by_one()
            return self.counters()

    def raise_highest(self, scaled: float) -> protocol.ShardCounters:
        """Take over the highest priority of all shards: new rows get it."""
        with self._lock:
            self._data.raise_highest(scaled)
            self._data.changes.raise_by_one()
            return self.counters()

    def close_to_writers(self) -> None:
        """Accept nothing more, so that what is held can be moved elsewhere."""
        with self._lock:
            self._is_closed.set()
        self._journal.commit()
        self._journal.say(closed_by=self._memory)

    def oldest(self) -> tuple[bytes, int, int, int]:
        """Return the oldest segment, its rows, the first of them, and the row behind it.

        No bytes: all have arrived elsewhere, since each is asked for when the one before has.
        """
        with self._lock:
            if self._data.store.transitions:
                return self._data.packed_at(self._data.store.first_tick)
        self._journal.say(move=None, drained=True)
        return b"", 0, 0, 0

    def give_up(self, first_row: int, end: int, to: int, writer: bytes, sequence: int) -> None:
        """Draw rows no more that go to another shard; the journal keeps them, and says where they go.

        Args:
            end: The row behind them.
            writer: Under whose name they are sent there, and as which of its segments.
        """
        with self._lock:
            self._data.store.forget_before(end)
            self._data.changes.raise_by_one()
        self._journal.say(hidden_before=end, move=SegmentMove(self._memory, to, writer.hex(), sequence, first_row))

    def move(self) -> tuple[int, bytes, int] | None:
        """Say which segment was on its way to a shard when the memory before this one ended: to, writer, number."""
        move = self._journal.state.move
        if move is None or move.memory == self._memory:
            return None
        return move.shard, bytes.fromhex(move.writer), move.sequence

    def end_move(self, arrived: bool) -> None:
        """Settle that move: if the segment arrived, it is not shown here any more; if not, it stays here."""
        with self._lock:
            if self._journal.state.move is None:
                return
            if arrived:
                self._data.store.forget_before(self._journal.state.hidden_before)
            first_row = self._data.store.first_tick
            self._data.changes.raise_by_one()
        self._journal.say(hidden_before=first_row, move=None)

    def begin_save(self, url: str) -> int:
        """Begin a checkpoint of this moment at a place of this shard's own; return what `end_save` is called with."""
        with self._lock:
            number = secrets.randbits(62)  # unlike those of an earlier life
            self._handles[number] = self._data.save(url)
            return number

    @ray.method(concurrency_group="save")
    def end_save(self, number: int) -> Checkpoint:
        """Wait for a checkpoint."""
        if number not in self._handles:
            raise protocol.RestartedError(f"shard {self._number} was restarted after the checkpoint was begun")
        return self._handles.pop(number).result()

    def end_saves(self) -> None:
        """Wait for checkpoints that are under way, and let others write there; make priorities durable."""
        self._data.savers.close()
        if self._is_durable and self._journal.fenced is None:
            self._journal.write_priorities()

    def counters(self) -> protocol.ShardCounters:
        """Say what is held."""
        with self._lock:
            data, store = self._data, self._data.store
            rows = (store.first_tick, store.next_tick, store.transitions)
            mass = data.mass()  # first: what is new gets its priority with it
            counted = data.inserted, data.changes.value, self._journal.backlog
            priorities = mass, data.likelihood.highest
            return protocol.ShardCounters(self._epoch, *rows, *counted, *priorities, data.changes.place)

    def process(self) -> dict[str, Any]:
        """Say where this shard runs, what its process takes, and how it stands, as plain numbers and text."""
        held, limit = self._held.read(), memory_limits()[0]
        return self._figures() | {
            "node": protocol.this_node(), "pid": os.getpid(), "uss_bytes": held.unique, "pss_bytes": held.proportional,
            "limit": limit.name, "limit_bytes": limit.total_bytes, "limit_free_bytes": limit.free_bytes,
        }  # fmt: skip

    def _measured(self) -> dict[str, Any]:
        figures = self._figures()
        return {**figures["counters"]._asdict(), **figures, "anonymous_bytes": anonymous_bytes()}

    def _figures(self) -> dict[str, Any]:
        with self._lock:
            fields = self._data.store.report()
            return {
                "counters": self.counters(),
                "held_bytes": sum(field.total_bytes for field in fields),
                "plain_bytes": sum(field.plain_bytes for field in fields),
                "capacity": self._data.capacity,
                "is_durable": self._is_durable,
                "is_draining": self._is_closed.is_set(),
            }

    def report(self) -> MemoryReport:
        """Account for every field; say what is done without compiled code."""
        with self._lock:
            store = self._data.store
            return MemoryReport(store.transitions, tuple(store.report()), 0, store.segments)

    def _apply(self, entries: Sequence[Entry]) -> range:
        """Show what is durable now; return the rows that are held then."""
        with self._lock:
            for entry in entries:
                self._data.take(entry)
                self._data.changes.raise_by_one()
            return self._data.rows


def begun_life(memory: str, number: int, first_life: int, *, has_journal: bool) -> tuple[int, float]:
    """Return which life of a shard this is, and the highest priority of the memory, as its roster has them.

    A roster that is being restarted is waited for: Ray gives up an actor for good whose constructor raises.
    """
    try:
        call = "begin_life", number, first_life
        life, highest = protocol.asked(roster_of(memory), *call, patience_s=math.inf, timeout_s=None)
    except ShardError:  # the memory was closed
        if has_journal:  # which has both, as they were
            return first_life, 0.0
        raise
    return life, highest


def _checkpoint_of(url: str, number: int) -> Restored:
    """Read a checkpoint of one shard: all but its rows, which follow, and its full blocks, which stay."""
    reader = open_reader(url, timeout=math.inf)
    return restored(reader.manifest(number), reader, None)

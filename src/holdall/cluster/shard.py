"""Shards: the actors that hold the transitions of a memory.

A shard accepts the segments of every writer in order, and each of them once. Acknowledged segments can be drawn. If
there is a journal, a segment is written to the journal before it is acknowledged or drawn.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from holdall.checkpoint import Checkpoint, Restored, SaveHandle, Savers, open_reader, read_checkpoint
from holdall.cluster.answer import Answer
from holdall.cluster.calls import ask, get_machine_address, get_machine_id
from holdall.cluster.config import MemoryConfig
from holdall.cluster.ids import Ids, first_row_of_life, life_of_row, lives_of_rows
from holdall.cluster.journal import Entry, Journal, open_journal
from holdall.cluster.messages import (
    Ack,
    GatherRequest,
    InsertRequest,
    RestartedError,
    SampleRequest,
    ShardCounters,
    ShardStatus,
)
from holdall.cluster.metrics import ShardMetrics
from holdall.cluster.roster import find_roster, is_restarted
from holdall.cluster.shard_data import ShardData
from holdall.errors import ArgumentError, CheckpointError, DamageError, ShardError
from holdall.machine import HeldReader, anonymous_bytes
from holdall.report import MemoryReport
from holdall.sampling import new_generator
from holdall.schema import Array

THREADS = {"max_concurrency": 4, "concurrency_groups": {"insert": 32, "sample": 1, "save": 4}}
"""Ray's options for the threads of a shard. Calls of one group do not wait for those of another. The only thread of
"sample" executes the calls of a learner in their order."""


class SavedShard(NamedTuple):
    """The checkpoint that a shard starts with."""

    url: str
    number: int

    @property
    def name(self) -> str:
        """Name of the checkpoint in a journal, see `JournalState.loading`."""
        return f"{self.url}:{self.number}"

    def read(self) -> Restored:
        """Read the checkpoint, except for its blocks."""
        reader = open_reader(self.url, timeout=math.inf)
        return read_checkpoint(reader.manifest(self.number), reader, None)


class Shard:
    """One shard of a memory.

    Args:
        number: Number of the shard.
        seed: Seed of the shard's generator. None: a different one every time.
        shards_per_machine: Number of shards that share the cores and the memory of a machine.
        saved: Checkpoint that the memory was loaded from. None: the memory is new.
    """

    def __init__(
        self,
        number: int,
        config: MemoryConfig,
        seed: int | None,
        shards_per_machine: int = 1,
        saved: SavedShard | None = None,
    ) -> None:
        settings = config.settings
        self._number = number
        self._memory = config.name
        self._machine = get_machine_id()
        self._lock = threading.RLock()  # Guards `_data`.
        self._staging_lock = threading.Lock()  # Guards `_expected` and the order of segments. Draws do not need it.
        self._process = HeldReader()
        self._metrics = ShardMetrics(config.name, number)
        self._written_changes = 0  # `ShardData.changes` when priorities were last written to the journal.
        self._saves: dict[int, SaveHandle] = {}  # Checkpoints that were begun, by the number for `end_save`.
        self._savers = Savers()
        self._epoch = 0
        self._expected: dict[bytes, int] = {}  # Number of every writer's next segment, staged ones included.
        self._data = ShardData(
            config.schema_json,
            config.shard_rows,
            config.sampler,
            new_generator(seed),
            settings.tuning,
            shards_per_machine,
        )
        self._journal = None if settings.url is None else open_journal(settings.url, number, settings.tuning)
        life, highest = begin_life(config.name, number, 0, has_journal=self._journal is not None)
        if self._journal is None:
            self._start_without_journal(life, seed, saved)
        else:
            self._start_with_journal(self._journal, seed, saved)
        self._data.raise_highest(highest)
        if self._journal is not None:
            self._expected.update(self._journal.expected)
            self._journal.start(self._data.rows, self._apply, self._read_changed_priorities)
        self._metrics.follow(self._measure)

    # ---------------------------------------------------------------- starting

    def _start_without_journal(self, life: int, seed: int | None, saved: SavedShard | None) -> None:
        """Start empty, or with the checkpoint."""
        checkpoint = None
        if saved is not None and must_load_in_life(life, is_restarted=is_restarted()):
            checkpoint = saved.read()
            saved_life = life_of_row(checkpoint.manifest.next_tick)
            if saved_life > 0:  # No id of an earlier life may be used again.
                life, _ = begin_life(self._memory, self._number, saved_life, has_journal=False)
        self._epoch = life
        self._data.start_at(first_row_of_life(life))
        self._seed_generator(seed)
        if checkpoint is not None:
            self._load(checkpoint)

    def _start_with_journal(self, journal: Journal, seed: int | None, saved: SavedShard | None) -> None:
        """Take over the journal, and write the checkpoint to it if it lacks the checkpoint."""
        self._data.replay(journal, retries=is_restarted())
        self._epoch = journal.epoch
        self._seed_generator(seed)
        first_missing = self._data.store.next_row
        name = "" if saved is None else saved.name
        must_load = must_load_beside_journal(name, journal.state.loading, journal.url, has_rows=first_missing > 0)
        if saved is not None and must_load:
            self._load(saved.read())
            self._data.write_loaded(journal, name, first_missing)

    def _seed_generator(self, seed: int | None) -> None:
        """Give every life of every shard a generator of its own.

        The first life of the first shard draws as a local memory with the same seed.
        """
        if seed is not None and (self._number, self._epoch) != (0, 0):
            self._data.generator = new_generator([seed, self._number, self._epoch])

    def _load(self, checkpoint: Restored) -> None:
        """Hold the rows of a checkpoint, and draw as it would have drawn."""
        self._data.load(checkpoint)
        self._savers.adopt(checkpoint)

    # ---------------------------------------------------------------- segments

    @ray.method(concurrency_group="insert")
    def insert(self, request: InsertRequest) -> Ack:
        """Accept the segments of a writer that were not accepted before. Return the number of the next one.

        A writer sends one call at a time. A call that it gave up may still be executed during the next one, so the
        numbers ensure that every segment is accepted once.
        """
        writer = request.writer
        refusal = ""
        with self._metrics.time_call("insert"):
            self._require_ownership()
            with self._staging_lock:
                expected = max(self._expected.get(writer, 0), request.first)
                for number, payload in enumerate(request.payloads, request.first):
                    if number != expected:
                        continue
                    try:
                        received = self._data.unpack(payload)
                        self._data.store.require_reward_dtype(received.reward_dtype)
                    except (ArgumentError, DamageError) as error:
                        refusal = str(error)
                        break
                    self._accept(Entry(writer, number, payload, received))
                    expected += 1
                self._expected[writer] = expected
            if self._journal is not None:
                self._journal.commit()  # Once the writer gets the acknowledgement, it drops the segments.
            return Ack(expected, self.counters(), refusal)

    def _accept(self, entry: Entry) -> None:
        """Hold a segment, or queue it for the journal if there is one."""
        if self._journal is None:
            self._apply([entry])
        else:
            self._journal.stage(entry)

    def _apply(self, entries: Sequence[Entry]) -> range:
        """Hold segments. Return the rows that are held. If there is a journal, it must have the segments already."""
        with self._lock:
            self._data.accept(entries)
            return self._data.rows

    def trouble(self) -> str:
        """Return why the journal cannot be written at the moment. Empty if it can."""
        return "" if self._journal is None else self._journal.trouble

    def _require_ownership(self) -> None:
        """Raise FencedError if another shard has taken over the journal."""
        if self._journal is not None and self._journal.fenced is not None:
            raise self._journal.fenced

    # ---------------------------------------------------------------- batches and priorities

    @ray.method(concurrency_group="sample")
    def sample(self, request: SampleRequest) -> Answer | bytes | ShardCounters:
        """Draw rows. A shard without rows that may be drawn returns its counters alone."""
        with self._metrics.time_call("sample"):
            self._require_ownership()
            is_near = request.machine == self._machine
            with self._lock:
                counters = self.counters()
                if counters.mass == 0:
                    return counters
                generator = new_generator(request.seed) if request.seed else None
                drawn = self._data.draw(request.rows, request.goals, generator, is_near=is_near)
            return self._data.read(drawn, counters, is_near=is_near, block=request.block)

    @ray.method(concurrency_group="sample")
    def gather(self, request: GatherRequest) -> Answer | bytes:
        """Return rows by their numbers."""
        with self._lock:
            drawn = self._data.find(request.rows)
            counters = self.counters()
        return self._data.read(drawn, counters, is_near=request.machine == self._machine)

    @ray.method(concurrency_group="sample")
    def update_priorities(self, rows: Ids, priorities: Array) -> ShardCounters:
        """Set the priorities of rows. Rows that were evicted are ignored."""
        with self._lock:
            # Rows of another life are lost. Their numbers may be higher than those of this life.
            next_row = self._data.store.next_row
            is_known = (rows < next_row) | (lives_of_rows(rows) == life_of_row(next_row))
            self._data.update_priorities(rows[is_known], priorities[is_known])
            return self.counters()

    def raise_highest(self, scaled: float) -> ShardCounters:
        """Give new rows at least the scaled priority `scaled`, the highest of all shards."""
        with self._lock:
            self._data.raise_highest(scaled)
            return self.counters()

    def _read_changed_priorities(self) -> dict[str, Any] | None:
        """Return the sampler's state for the journal, or None if it has not changed since the last call."""
        with self._lock:
            if self._data.changes == self._written_changes:
                return None
            self._written_changes = self._data.changes
            return self._data.priorities()

    # ---------------------------------------------------------------- checkpoints

    @ray.method(concurrency_group="sample")
    def begin_save(self, url: str) -> int:
        """Start a checkpoint of this moment at `url`. Return the number for `end_save`.

        The call is in the group of draws, so that the checkpoint contains exactly the draws that were made before it.
        """
        with self._lock:
            number = secrets.randbits(62)  # Random, so that it differs from the numbers before a restart.
            self._saves[number] = self._savers.save(self._data.snapshot, url, keep=None)
            return number

    @ray.method(concurrency_group="save")
    def end_save(self, number: int) -> Checkpoint:
        """Wait for a checkpoint. Raise RestartedError if this process did not begin it."""
        if number not in self._saves:
            raise RestartedError(f"Shard {self._number} was restarted after the checkpoint was begun.")
        return self._saves.pop(number).result()

    def end_saves(self) -> None:
        """Wait for checkpoints that are being written, and write the priorities to the journal."""
        self._savers.close()
        if self._journal is not None and self._journal.fenced is None:
            self._journal.write_priorities()

    # ---------------------------------------------------------------- figures

    def counters(self) -> ShardCounters:
        """Return the state of the shard in numbers."""
        with self._lock:
            data = self._data
            return ShardCounters(
                epoch=self._epoch,
                first_row=data.store.first_row,
                next_row=data.store.next_row,
                transitions=len(data.store),
                inserted=data.inserted,
                changes=data.changes,
                backlog=0 if self._journal is None else self._journal.backlog,
                mass=data.mass,
                highest=data.likelihood.highest,
            )

    def status(self) -> ShardStatus:
        """Return the machine, the process, the size and the memory of the shard."""
        report = self.report()
        return ShardStatus(
            number=self._number,
            answers=True,
            node=get_machine_address(),
            pid=os.getpid(),
            uss_bytes=self._process.read().unique,
            counters=self.counters(),
            held_bytes=report.total_bytes,
            plain_bytes=report.plain_bytes,
            capacity=self._data.capacity,
            is_durable=self._journal is not None,
        )

    def report(self) -> MemoryReport:
        """Return the bytes of every field."""
        store = self._data.store
        return MemoryReport(len(store), tuple(store.report()), 0, store.segments)

    def _measure(self) -> dict[str, Any]:
        report = self.report()
        return self.counters()._asdict() | {
            "held_bytes": report.total_bytes,
            "plain_bytes": report.plain_bytes,
            "anonymous_bytes": anonymous_bytes(),
        }


def begin_life(memory: str, number: int, first_life: int, *, has_journal: bool) -> tuple[int, float]:
    """Return the number of a shard's new life, and the highest priority of the memory, from the roster.

    Wait for a roster that Ray restarts, because Ray gives up an actor whose constructor raises.
    """
    try:
        roster = find_roster(memory)
        life, highest = ask(lambda: roster.begin_life.remote(number, first_life), "The memory's roster", math.inf)
    except ShardError:  # The memory was closed.
        if has_journal:  # The journal has the life and the priorities.
            return first_life, 0.0
        raise
    return life, highest


def must_load_in_life(life: int, *, is_restarted: bool) -> bool:
    """Return whether a shard without a journal starts with the checkpoint that the memory was loaded from.

    After its first life, a restarted shard starts empty. The transitions that it held are lost, and their ids must not
    be used again.
    """
    return life == 0 or not is_restarted


def must_load_beside_journal(checkpoint: str, loading: str, journal_url: str, *, has_rows: bool) -> bool:
    """Return whether a shard with a journal must load a checkpoint, or the rest of it.

    Args:
        checkpoint: Name of the checkpoint that the memory was loaded from. Empty: the memory is new.
        loading: See `JournalState`.
        has_rows: Whether the journal ever had rows.

    Raises:
        CheckpointError: The journal has a part of another checkpoint.
    """
    if loading not in {"", checkpoint}:
        raise CheckpointError(
            f"{journal_url} contains a partially loaded checkpoint: the load of {loading} was interrupted. Repeat that "
            "load with the same journal_url, or choose another directory for the journals."
        )
    return bool(checkpoint) and (loading == checkpoint or not has_rows)

"""Journals: the segments that a shard accepted, written before they are drawn or acknowledged.

A journal consists of numbered blobs of a `BlobStore`, which are called slots. A slot is created once and never changed,
and only one process can create a number. A shard that takes over a journal creates the next slot, so a shard that was
taken for dead notices that its next number exists and writes nothing more: it is fenced.

A slot consists of records (store/records.py): a `slot` record with its owner and the state, then an `entry` record per
segment, or a `priorities` record. The `slot` record of a full slot also has the number of every writer's next segment,
so that older slots can be deleted. A write that fails is repeated with the same bytes until it succeeds, because it may
have succeeded without an answer. Writers wait meanwhile, and nothing is lost.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from holdall.checkpoint import BlobStore, has_exclusive_create, is_remote, open_blobs
from holdall.checks import read_count, refuse_malformed
from holdall.cluster.segment import ReceivedSegment
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import BlobMissingError, CheckpointError, DamageError, FencedError, ShardError
from holdall.store.records import MAX_RECORD_BYTES, Buffer, Record, pack_record, reader_of, split_records

FOLDER = "journal"
LOADED_WRITER = bytes(16)
"""Stands for the writer of segments that were loaded from a checkpoint."""

_SLOT = "slot"
_ENTRY = "entry"
_PRIORITIES = "priorities"
_MIN_PAUSE_RATIO = 50
"""Priorities are written at most a fiftieth of the time."""
_WRITER_BYTES = 16
_BATCHING_S = 0.2
"""Seconds to wait for more segments before a slot is created in an object store, where requests cost time and money."""
_NAME = re.compile(r"journal/([0-9]{5})/([0-9a-f]{16})\.slot")
_LOG = logging.getLogger("holdall")


class Run(NamedTuple):
    """Writer, first tick and lanes of a segment that was loaded from a checkpoint.

    The payload of a segment that a writer sent has its own tick and lanes.
    """

    writer: str
    first_tick: int
    lanes: int


class Entry(NamedTuple):
    """A segment that was accepted."""

    writer: bytes
    sequence: int  # Number of the segment among those of the writer.
    payload: bytes
    segment: ReceivedSegment | None = None  # The checked content of `payload`, before it is written.
    run: Run | None = None


class Page(NamedTuple):
    """The segments of one slot."""

    first_row: int
    entries: list[Entry]
    is_first: bool  # Whether the slot is the oldest one. Can be true again: older slots may be deleted during reading.


@dataclass(frozen=True, slots=True)
class JournalState:
    """State of a shard that every slot contains."""

    first_row: int = 0  # First row that a restarted shard holds.
    loading: str = ""  # Checkpoint whose segments are being copied to the journal.

    @classmethod
    def read(cls, head: Mapping[str, Any]) -> JournalState:
        """Return the state in the head of a `slot` record."""
        return cls(read_count(head["state"]["first_row"]), str(head["state"]["loading"]))


Apply = Callable[[Sequence[Entry]], range]
"""Adds segments that are durable to the shard, and returns the rows that the shard holds."""


class Journal:
    """The journal of one shard.

    `stage` and `commit` may be called from any thread. The first thread in `commit` writes the segments of all threads.

    Attributes:
        url: Place of the journal.
        epoch: Number of the slot with which the shard took over the journal.
        expected: Number of every writer's next segment, by writer.
        state: State that the newest slot has.
        priorities: Newest state of the shard's sampler. None before the first one.
        trouble: Why writing fails at the moment. Empty if writing works.
        fenced: The error to raise since another shard took over the journal. None before.
    """

    def __init__(self, blobs: BlobStore, shard: int, tuning: ClusterTuning) -> None:
        self.url = f"{blobs.url}/{FOLDER}/{shard:05d}"
        self.epoch = -1
        self.expected: dict[bytes, int] = {}
        self.state = JournalState()
        self.priorities: dict[str, Any] | None = None
        self.trouble = ""
        self.fenced: FencedError | None = None
        self._blobs = blobs
        self._shard = shard
        # Written to every slot, so that `create` never mistakes a slot of another process for one of this process.
        self._owner = secrets.token_hex(8)
        self._tuning = tuning
        self._lock = threading.RLock()
        self._retries = False  # Whether operations that fail are repeated until they succeed.
        self._next_slot = 0  # Number of the next slot.
        self._slots_since_full = 0  # Slots since the last full one.
        self._full_slot = -1  # Number of the last full slot. Older slots may be deleted.
        self._first_rows: dict[int, int] = {}  # First row of every slot with segments.
        self._priorities_slot = -1  # Slot of the newest priorities.
        self._obsolete_slots: set[int] = set()  # Slots that are still to be deleted.
        self._queue: deque[Entry] = deque()  # Segments that were staged and are not written yet.
        self._staged_bytes = 0  # Bytes that were ever staged.
        self._committed_bytes = 0  # Those of them that are durable.
        self._held_rows = range(0)
        self._apply: Apply | None = None
        self._read_priorities: Callable[[], Mapping[str, Any] | None] = lambda: None

    # ---------------------------------------------------------------- taking over

    def open(self, *, retries: bool = False) -> Iterator[Page]:
        """Yield all segments, and take over the journal.

        Args:
            retries: Whether a disk that fails is tried again until it works. Otherwise its error is raised.
        """
        self._retries = retries
        # A restarted shard retries. It made this check before.
        if not retries and not has_exclusive_create(self._blobs):
            raise CheckpointError(
                f"{self.url} ignores the conditions of puts, so a shard that was taken for dead could overwrite its "
                "successor. Use a store with conditional puts, or durability='memory' and checkpoints."
            )
        while True:
            try:
                yield from self._read_all()
            except BlobMissingError:  # The last owner is still at work, and deleted a slot that it no longer needs.
                self._first_rows.clear()
            except CheckpointError as error:
                self._pause(error)
                self._first_rows.clear()
            else:
                return

    def _read_all(self) -> Iterator[Page]:
        sizes = self._list_slots()
        for number in sorted(sizes):
            yield from self._read_slot(number, sizes[number])
        self._next_slot = max(sizes, default=-1) + 1
        while not self._create([], is_full=True):  # The last owner wrote one more slot.
            yield from self._read_slot(self._next_slot, self._list_slots(self._next_slot).get(self._next_slot, 0))
            self._next_slot += 1
        self.epoch = self._next_slot - 1

    def _name(self, number: int) -> str:
        return f"{FOLDER}/{self._shard:05d}/{number:016x}.slot"

    def _list_slots(self, number: int | None = None) -> dict[int, int]:
        """Return the bytes of every slot by number, or those of slot `number` if it exists."""
        prefix = f"{FOLDER}/{self._shard:05d}/" if number is None else self._name(number)
        found = [(_NAME.fullmatch(name), nbytes) for name, nbytes in self._blobs.list(prefix)]
        return {int(match[2], 16): nbytes for match, nbytes in found if match is not None}

    def _read_slot(self, number: int, nbytes: int) -> Iterator[Page]:
        content = self._blobs.read(self._name(number), 0, nbytes)
        records = split_records(content)
        with refuse_malformed(f"slot {number} of {self.url}"):
            if not records or records[0].kind != _SLOT or records[0].head["number"] != number:
                raise DamageError(f"Slot {number} of {self.url} is not a slot of a journal. It is not used.")
            head = records[0].head
            if "expected" in head:
                self._expect({_parse_writer(name): read_count(count) for name, count in head["expected"].items()})
                self._full_slot = number
            self.state = JournalState.read(head)
            first_row = read_count(head["first_row"])
            entries = [_read_entry(record, content) for record in records[1:] if record.kind == _ENTRY]
            for record in records[1:]:
                if record.kind == _PRIORITIES:
                    self.priorities = _read_priorities(record, content)
                    self._priorities_slot = number
        if entries:
            is_first = not self._first_rows
            self._expect({entry.writer: entry.sequence + 1 for entry in entries})
            self._first_rows[number] = first_row
            yield Page(first_row, entries, is_first)

    def _expect(self, numbers: Mapping[bytes, int]) -> None:
        self.expected |= {writer: max(self.expected.get(writer, 0), number) for writer, number in numbers.items()}

    # ---------------------------------------------------------------- writing

    def append(self, entries: Sequence[Entry], first_row: int) -> None:
        """Write segments. They are durable when this returns. Raise FencedError if the journal has another owner."""
        parts: list[Buffer] = []
        for entry in entries:
            head: dict[str, Any] = {"writer": entry.writer.hex(), "sequence": entry.sequence, "run": entry.run}
            parts += pack_record(_ENTRY, head, {"segment": entry.payload}, is_compressed=False)
        with self._lock:
            number = self._write(parts, self._slots_since_full >= self._tuning.full_slot_interval, first_row)
            self._first_rows[number] = first_row
            self.expected |= {entry.writer: entry.sequence + 1 for entry in entries}

    def set_state(self, **changes: Any) -> None:
        """Change fields of the state, see `JournalState`, and write it."""
        with self._lock:
            self.state = replace(self.state, **changes)
            self._write([], is_full=True)

    def start(self, held: range, apply: Apply, read_priorities: Callable[[], Mapping[str, Any] | None]) -> None:
        """Accept segments from now on. In the background, write priorities and check who owns the journal.

        Args:
            held: Rows that the shard holds.
            apply: See `Apply`.
            read_priorities: Returns the state of the shard's sampler, or None if it has not changed.
        """
        self._held_rows = held
        self._apply = apply
        self._read_priorities = read_priorities
        self._retries = True
        threading.Thread(target=self._watch, name="holdall-journal", daemon=True).start()

    @property
    def backlog(self) -> int:
        """Bytes that are not durable yet."""
        return self._staged_bytes - self._committed_bytes

    def stage(self, entry: Entry) -> None:
        """Queue a segment. The caller holds a lock that keeps the segments of a writer in order."""
        self._queue.append(entry)
        self._staged_bytes += len(entry.payload)

    def commit(self) -> None:
        """Wait until all segments that are queued now are durable and can be drawn."""
        staged = self._staged_bytes
        while self._committed_bytes < staged:
            with self._lock:
                if self._committed_bytes < staged:
                    self._commit_slot()

    def _commit_slot(self) -> None:
        """Write the next slot of queued segments, and add them to the shard."""
        if not self._queue or self._apply is None:
            raise ShardError(
                f"{self.url} has segments that could not be added to the shard. Restart the shard, and report this."
            )
        if is_remote(self.url):
            time.sleep(_BATCHING_S)
        entries = []
        nbytes = 0
        while self._queue and nbytes < self._tuning.slot_bytes:
            entries.append(self._queue.popleft())
            nbytes += len(entries[-1].payload)
        self.append(entries, self._held_rows.stop)
        self._held_rows = self._apply(entries)
        self._committed_bytes += nbytes
        if self._full_slot == self._next_slot - 1:
            self.trim(self._held_rows.start)

    def write_priorities(self) -> None:
        """Write the priorities if they have changed, and delete the slot with the earlier ones."""
        state = self._read_priorities()
        if state is None:
            return
        settings = {name: value for name, value in state.items() if name != "scaled"}
        part = pack_record(_PRIORITIES, {"state": settings}, {"scaled": np.asarray(state["scaled"], "<f8")})
        with self._lock:
            earlier = self._priorities_slot
            self._priorities_slot = self._write(part, is_full=False)
            if earlier >= 0:
                self._delete([earlier])

    def trim(self, first_row: int) -> None:
        """Delete the slots of which all rows are before `first_row`."""
        rows = self._first_rows
        old = [
            number
            for number, following in pairwise(sorted(rows))
            if rows[following] <= first_row and number < self._full_slot
        ]
        for number in old:
            del rows[number]
        self._delete(old)

    def _delete(self, numbers: Sequence[int]) -> None:
        """Delete slots, oldest first. If the disk fails, log why, and leave the rest to the next call."""
        self._obsolete_slots.update(numbers)
        try:
            for number in sorted(self._obsolete_slots):
                self._blobs.delete(self._name(number))
                self._obsolete_slots.remove(number)
        except CheckpointError as error:
            _LOG.warning("%s %d slots that are no longer needed are deleted later.", error, len(self._obsolete_slots))

    def _watch(self) -> None:
        due_s = 0.0
        with suppress(FencedError):
            while True:
                time.sleep(self._tuning.ownership_s)
                if time.monotonic() > due_s:
                    began_s = time.monotonic()
                    self.write_priorities()
                    took_s = time.monotonic() - began_s
                    due_s = time.monotonic() + max(self._tuning.priorities_s, _MIN_PAUSE_RATIO * took_s)
                with self._lock:
                    self._require_ownership(lambda: not self._list_slots(self._next_slot))

    def _write(self, parts: Sequence[Buffer], is_full: bool, first_row: int = 0) -> int:
        """Create the next slot, and return its number."""
        number = self._next_slot
        self._require_ownership(lambda: self._create(parts, is_full, first_row))
        return number

    def _create(self, parts: Sequence[Buffer], is_full: bool, first_row: int = 0) -> bool:
        """Create the next slot. Return False if another process has created it."""
        head: dict[str, Any] = {
            "number": self._next_slot,
            "owner": self._owner,
            "first_row": first_row,
            "state": asdict(self.state),
        }
        if is_full:
            head["expected"] = {writer.hex(): number for writer, number in self.expected.items()}
        start = pack_record(_SLOT, head, {})
        if not self._blobs.create(self._name(self._next_slot), b"".join([*start, *parts])):
            return False
        self._slots_since_full += 1
        if is_full:
            self._slots_since_full = 0
            self._full_slot = self._next_slot
        self._next_slot += 1
        return True

    def _require_ownership(self, try_operation: Callable[[], bool]) -> None:
        """Repeat an operation until the disk works. Raise FencedError if it returns False.

        The operation returns False if another shard owns the journal.
        """
        while self.fenced is None:
            try:
                if try_operation():
                    self.trouble = ""
                    return
            except CheckpointError as error:
                self._pause(error)
            else:
                self.fenced = FencedError(
                    f"{self.url}: another shard has opened this journal. It continues with everything that was "
                    "acknowledged here. Close this memory, and use the new one."
                )
                _LOG.warning("%s", self.fenced)
        raise self.fenced

    def _pause(self, error: CheckpointError) -> None:
        """Log why an operation failed, and wait before it is repeated. Raise the error if it is not to be repeated."""
        if not self._retries:
            raise error
        self.trouble = str(error)
        _LOG.warning("%s The operation is tried again.", error)
        time.sleep(self._tuning.retry_s)


def _read_entry(record: Record, content: bytes) -> Entry:
    head = record.head
    run = None
    if head["run"] is not None:
        writer, first_tick, lanes = head["run"]
        run = Run(str(writer), read_count(first_tick), read_count(lanes))
    payload = record.read_bytes("segment", reader_of(content), MAX_RECORD_BYTES)
    return Entry(_parse_writer(head["writer"]), read_count(head["sequence"]), payload, run=run)


def _read_priorities(record: Record, content: bytes) -> dict[str, Any]:
    scaled = record.read_items("scaled", reader_of(content), "<f8", MAX_RECORD_BYTES)
    state: dict[str, Any] = record.head["state"]
    return state | {"scaled": scaled}


def _parse_writer(name: str) -> bytes:
    writer = bytes.fromhex(name)
    if len(writer) != _WRITER_BYTES:
        raise ValueError("the id of a writer must have 16 bytes")
    return writer


def open_journal(url: str, shard: int, tuning: ClusterTuning) -> Journal:
    """Return the journal of a shard. `Journal.open` takes it over."""
    return Journal(open_blobs(url), shard, tuning)


def list_journals(url: str) -> list[int]:
    """Return the shards that have a journal below `url`."""
    found = [_NAME.fullmatch(name) for name, _ in open_blobs(url).list(f"{FOLDER}/")]
    return sorted({int(match[1]) for match in found if match is not None})

"""Journals: the segments that a shard accepted, written before they are drawn or acknowledged.

A journal consists of numbered blobs of a `BlobStore`, which are called slots. A slot is created once and never changed,
and only one process can create a number. A shard that takes over a journal creates the next slot, so a shard that was
taken for dead notices that its next number exists and writes nothing more: it is fenced.

A slot consists of records (store/records.py): a `slot` record with its owner and the state, then an `entry` record per
segment, or a `priorities` record. A write that fails is repeated with the same bytes until it succeeds, because it
may have succeeded without an answer. Writers wait meanwhile, and nothing is lost.
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
    """The writer and the ticks of a segment that was loaded from a checkpoint. Other segments have their own ticks."""

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
    is_first: bool  # Whether the slot is the oldest one. Older ones may have been deleted while they were read.


@dataclass(frozen=True, slots=True)
class JournalState:
    """The state of a shard that a journal has besides the segments."""

    first_row: int = 0  # First row that a restarted shard shows.
    loading: str = ""  # Checkpoint whose segments are being copied to the journal.

    @classmethod
    def read(cls, head: Mapping[str, Any]) -> JournalState:
        """Return the state in the head of a slot."""
        return cls(read_count(head["state"]["first_row"]), str(head["state"]["loading"]))


Apply = Callable[[Sequence[Entry]], range]
"""Shows segments that are durable now, and returns the rows that are held."""


class Journal:
    """The journal of one shard.

    `stage` and `commit` may be called from any thread. The first thread that waits in `commit` writes for all.

    Attributes:
        url: Place of the journal.
        epoch: Number of the slot with which the shard took over the journal.
        expected: Number of the next segment of every writer, by writer.
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
        # In every slot, so that `create` never takes the slot of another process for an earlier attempt of this one.
        self._owner = secrets.token_hex(8)
        self._tuning = tuning
        self._lock = threading.RLock()
        self._waits = False  # Whether operations that fail are repeated until they succeed.
        self._next = 0  # Number of the next slot.
        self._since_full = 0  # Slots since the last full one, which has `expected`.
        self._full_at = -1  # Number of that slot. Older slots may be deleted.
        self._first_rows: dict[int, int] = {}  # First row of every slot with segments.
        self._priorities_at = -1  # Slot of the newest priorities.
        self._waiting: deque[Entry] = deque()
        self._staged_bytes = 0
        self._committed_bytes = 0
        self._held = range(0)
        self._apply: Apply | None = None
        self._read_priorities: Callable[[], Mapping[str, Any] | None] = lambda: None

    # ---------------------------------------------------------------- taking over

    def open(self, *, waits: bool = False) -> Iterator[Page]:
        """Yield all segments, and take over the journal.

        Args:
            waits: Whether a disk that fails is tried again until it works, instead of an error.
        """
        self._waits = waits
        if not waits and not has_exclusive_create(self._blobs):  # A shard that was restarted has checked that already.
            raise CheckpointError(
                f"{self.url} ignores the conditions of puts, so a shard that was taken for dead could overwrite its "
                "successor. Use a store with conditional puts, or durability='memory' and checkpoints."
            )
        while True:
            try:
                yield from self._read_all()
            except BlobMissingError:  # The last owner is still at work. It has evicted these rows and all before them.
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
        self._next = max(sizes, default=-1) + 1
        while not self._create([], is_full=True):  # The last owner wrote one more slot.
            yield from self._read_slot(self._next, self._list_slots(self._next).get(self._next, 0))
            self._next += 1
        self.epoch = self._next - 1

    def _name(self, number: int) -> str:
        return f"{FOLDER}/{self._shard:05d}/{number:016x}.slot"

    def _list_slots(self, number: int | None = None) -> dict[int, int]:
        """Return the bytes of every slot by number, or those of slot `number` if it exists."""
        prefix = f"{FOLDER}/{self._shard:05d}/" if number is None else self._name(number)
        found = [(_NAME.fullmatch(name), nbytes) for name, nbytes in self._blobs.list(prefix)]
        return {int(match[2], 16): nbytes for match, nbytes in found if match is not None}

    def _delete(self, number: int) -> None:
        self._blobs.delete(self._name(number))

    def _read_slot(self, number: int, nbytes: int) -> Iterator[Page]:
        content = self._blobs.read(self._name(number), 0, nbytes)
        records = split_records(content)
        with refuse_malformed(f"slot {number} of {self.url}"):
            if not records or records[0].kind != _SLOT or records[0].head["number"] != number:
                raise DamageError(f"Slot {number} of {self.url} is not a slot of a journal. It is not used.")
            head = records[0].head
            if "expected" in head:
                self._expect({_parse_writer(name): read_count(count) for name, count in head["expected"].items()})
                self._full_at = number
            self.state = JournalState.read(head)
            first_row = read_count(head["first_row"])
            entries = [_read_entry(record, content) for record in records[1:] if record.kind == _ENTRY]
            for record in records[1:]:
                if record.kind == _PRIORITIES:
                    self.priorities = _read_priorities(record, content)
                    self._priorities_at = number
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
            number = self._write(parts, self._since_full >= self._tuning.full_slot_interval, first_row)
            self._first_rows[number] = first_row
            self.expected |= {entry.writer: entry.sequence + 1 for entry in entries}

    def set_state(self, **changes: Any) -> None:
        """Write a state with some changes, see `JournalState`."""
        with self._lock:
            self.state = replace(self.state, **changes)
            self._write([], is_full=True)

    def start(self, held: range, apply: Apply, read_priorities: Callable[[], Mapping[str, Any] | None]) -> None:
        """Accept segments from now on. Write priorities, and check in the background who owns the journal.

        Args:
            held: Rows that the shard holds.
            apply: Shows segments that are durable, and returns the rows that are held then.
            read_priorities: Returns the state of the shard's sampler, or None if it has not changed.
        """
        self._held = held
        self._apply = apply
        self._read_priorities = read_priorities
        self._waits = True
        threading.Thread(target=self._watch, name="holdall-journal", daemon=True).start()

    @property
    def backlog(self) -> int:
        """Bytes that are not durable yet."""
        return self._staged_bytes - self._committed_bytes

    def stage(self, entry: Entry) -> None:
        """Queue a segment. The shard's lock keeps segments in order."""
        self._waiting.append(entry)
        self._staged_bytes += len(entry.payload)

    def commit(self) -> None:
        """Wait until all segments that are queued now are durable and can be drawn."""
        staged = self._staged_bytes
        while self._committed_bytes < staged:
            with self._lock:
                if self._committed_bytes < staged:
                    self._commit_slot()

    def _commit_slot(self) -> None:
        """Write the next slot of queued segments, and show them."""
        if not self._waiting or self._apply is None:
            raise ShardError(f"{self.url} has segments that could not be shown. Restart the shard, and report this.")
        if is_remote(self.url):
            time.sleep(_BATCHING_S)
        entries = []
        nbytes = 0
        while self._waiting and nbytes < self._tuning.slot_bytes:
            entries.append(self._waiting.popleft())
            nbytes += len(entries[-1].payload)
        self.append(entries, self._held.stop)
        self._held = self._apply(entries)
        self._committed_bytes += nbytes
        if self._full_at == self._next - 1:
            self.trim(self._held.start)

    def write_priorities(self) -> None:
        """Write the priorities if they have changed, and delete those written before."""
        state = self._read_priorities()
        if state is None:
            return
        words = {name: value for name, value in state.items() if name != "scaled"}
        part = pack_record(_PRIORITIES, {"state": words}, {"scaled": np.asarray(state["scaled"], "<f8")})
        with self._lock:
            before = self._priorities_at
            self._priorities_at = self._write(part, is_full=False)
            if before >= 0:
                self._delete(before)

    def trim(self, first_row: int) -> None:
        """Delete slots all of whose rows are before `first_row`."""
        rows = self._first_rows
        old = [
            number for number, after in pairwise(sorted(rows)) if rows[after] <= first_row and number < self._full_at
        ]
        for number in old:
            self._delete(number)
            del self._first_rows[number]

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
                    self._require_ownership(lambda: not self._list_slots(self._next))

    def _write(self, parts: Sequence[Buffer], is_full: bool, first_row: int = 0) -> int:
        """Create the next slot, and return its number."""
        number = self._next
        self._require_ownership(lambda: self._create(parts, is_full, first_row))
        return number

    def _create(self, parts: Sequence[Buffer], is_full: bool, first_row: int = 0) -> bool:
        head: dict[str, Any] = {
            "number": self._next,
            "owner": self._owner,
            "first_row": first_row,
            "state": asdict(self.state),
        }
        if is_full:
            head["expected"] = {writer.hex(): number for writer, number in self.expected.items()}
        start = pack_record(_SLOT, head, {})
        if not self._blobs.create(self._name(self._next), b"".join([*start, *parts])):
            return False
        self._since_full = 0 if is_full else self._since_full + 1
        if is_full:
            self._full_at = self._next
        self._next += 1
        return True

    def _require_ownership(self, try_operation: Callable[[], bool]) -> None:
        """Repeat an operation until the disk works. If it returns False, another shard owns the journal: raise."""
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
        if not self._waits:
            raise error
        self.trouble = str(error)
        _LOG.warning("%s It is tried again.", error)
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
    """Return the journal of a shard. Nobody owns it before `Journal.open`."""
    return Journal(open_blobs(url), shard, tuning)


def list_journals(url: str) -> list[int]:
    """Return the shards that have a journal below `url`."""
    found = [_NAME.fullmatch(name) for name, _ in open_blobs(url).list(f"{FOLDER}/")]
    return sorted({int(match[1]) for match in found if match is not None})

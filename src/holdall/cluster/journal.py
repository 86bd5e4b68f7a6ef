"""Journals: the segments that a shard accepted, in slots that are each created once and by one shard alone.

In:  segments in the order in which they were accepted.  Out: slots; and the segments again after a crash.
Invariant: a shard that was taken for dead writes nothing more, since the next number is taken. A segment is written
first; only then it can be drawn and is acknowledged to its writer. A write that fails is repeated until it succeeds;
writers wait meanwhile, and nothing is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from holdall.checkpoint import Slots, objects_at
from holdall.errors import CheckpointError, DamageError, FencedError, ShardError
from holdall.schema import count_of, malformed_refused
from holdall.storage import SealedSegment, pack, records_in

SLOT, ENTRY, PRIORITIES, FOLDER = "slot", "entry", "priorities", "journal"
SLOT_BYTES = 16 * 2**20
_FULL_EVERY = 32
"""Slots between two that say what is expected of every writer; what is older than the last of them may be removed."""
_TRY_AGAIN_S = 0.5
_PRIORITIES_S = 5.0
"""How often priorities are written: a crash undoes what was learned since."""
_OWNED_S = 5.0
"""How often a shard looks whether the journal is still its own."""
_LOG = logging.getLogger("holdall")


class Entry(NamedTuple):
    """A segment that was accepted."""

    writer: bytes
    sequence: int
    payload: bytes
    segment: SealedSegment | None = None  # what the bytes say, before they are written


class Page(NamedTuple):
    """What one slot holds."""

    first_row: int
    entries: list[Entry]
    begins: bool  # it is the oldest; also if others were handed out before, which were removed while they were read


@dataclass(frozen=True, slots=True)
class SegmentMove:
    """A segment that is hidden here, and on its way to another shard."""

    memory: str  # by whose doing
    shard: int
    writer: str  # under whose name it is sent there, in hexadecimals
    sequence: int
    first_row: int  # here


@dataclass(frozen=True, slots=True)
class JournalState:
    """What a journal says of its shard beside rows."""

    hidden_before: int = 0  # the first row that a restart shows
    loading: str = ""  # the checkpoint of which segments were written, if not all were yet
    closed_by: str = ""  # the memory that closed the shard to writers
    drained: bool = False  # all rows have arrived elsewhere, for good
    move: SegmentMove | None = None  # where the last of the hidden rows are going

    @classmethod
    def of(cls, head: Mapping[str, Any]) -> JournalState:
        """Read what a slot says."""
        move = None if head.get("move") is None else SegmentMove(**head["move"])
        if move is not None:
            _writer_of(move.writer)
            count_of(move.shard, 2**16), count_of(move.sequence), count_of(move.first_row)
        words = str(head.get("loading", "")), str(head.get("closed_by", "")), head.get("drained") is True
        return cls(count_of(head["hidden_before"]), *words, move)


Priorities = Callable[[], Mapping[str, Any] | None]


class _RemovedError(Exception):
    """A slot that was listed, and removed before it was read."""


class Journal:
    """The journal that one shard keeps, from its opening on.

    Args:
        slots: None: nothing is written, and what a shard held is lost with it.
    """

    def __init__(self, slots: Slots | None) -> None:
        self._slots: Any = slots
        self.url = "" if slots is None else slots.url
        self._writing, self._waits = threading.RLock(), False  # whether a disk that fails is tried until it does not
        self._next = self._since_full = 0
        self._first_rows: dict[int, int] = {}  # of slots with entries: the number of their first row
        self._full_at = -1  # the last slot that says what is expected of every writer
        self.epoch = -1
        self.expected: dict[bytes, int] = {}
        self.state = JournalState()
        self.priorities: dict[str, Any] | None = None  # the state of the shard's sampler when it was last written
        self._priorities_at = -1  # the slot that has it
        self.trouble = ""  # why nothing is written, as long as that lasts
        self.fenced: FencedError | None = None  # as soon as another shard has the journal
        self._waiting: deque[Entry] = deque()
        self._staged_bytes = self._committed_bytes = 0

    def open(self, *, waits: bool = False) -> Iterator[Page]:
        """Return everything that was accepted, and take the journal over.

        Args:
            waits: Whether a disk that fails is tried again until it does not.
        """
        self._waits = waits
        if self._slots is None:
            return
        if not waits:
            self._slots.require_fencing()  # which an earlier life has done
        while True:
            try:
                yield from self._read_all()
            except _RemovedError:  # by the last owner, who is still at it: its rows have left, and so have those before
                self._first_rows.clear()
            except CheckpointError as error:
                self._wait(error)
                self._first_rows.clear()
            else:
                return

    def _read_all(self) -> Iterator[Page]:
        kept = self._slots.numbers()
        for number in kept:
            yield from self._replay(number)
        self._next = kept[-1] + 1 if kept else 0
        self.state = replace(self.state, drained=False)
        while not self._create([], is_full=True):  # the last owner was at it until now
            yield from self._replay(self._next)
            self._next += 1
        self.epoch = self._next - 1

    def append(self, entries: Sequence[Entry], first_row: int) -> None:
        """Write entries; they are durable when this returns. FencedError if somebody else has the journal now."""
        parts: list[bytes] = []
        for entry in entries:
            head = {"writer": entry.writer.hex(), "sequence": entry.sequence}
            parts.append(b"".join(pack(ENTRY, head, {"segment": entry.payload}, frozenset())))
        with self._writing:
            self._first_rows[self._write(parts, self._since_full >= _FULL_EVERY, first_row)] = first_row
            self.expected |= {entry.writer: entry.sequence + 1 for entry in entries}

    def say(self, **changes: Any) -> None:
        """Write a state with some changes, see `JournalState`."""
        with self._writing:
            self.state = replace(self.state, **changes)
            if self._slots is not None:
                self._write([], is_full=True)

    def follow(self, held: range, apply: Callable[[Sequence[Entry]], range], priorities: Priorities) -> None:
        """Write what is staged from now on, the priorities now and then, and see whether the journal is still owned.

        Args:
            held: Rows that the shard holds.
            apply: Shows segments that are durable, and returns which rows are held then.
            priorities: Returns the state of the shard's sampler; None if it has not changed.
        """
        self._held, self._apply, self._priorities, self._waits = held, apply, priorities, True
        if self._slots is not None:
            threading.Thread(target=self._watch, name="holdall-journal", daemon=True).start()

    @property
    def backlog(self) -> int:
        """Bytes that wait to be made durable."""
        return self._staged_bytes - self._committed_bytes

    def stage(self, entry: Entry) -> None:
        """Have a segment written. The shard's lock keeps them in order."""
        self._waiting.append(entry)
        self._staged_bytes += len(entry.payload)

    def commit(self) -> None:
        """Return when all segments so far can be drawn: the first who waits writes all, and others find it done."""
        staged = self._staged_bytes
        while self._committed_bytes < staged:
            with self._writing:
                if self._committed_bytes < staged:
                    self._commit_some()

    def _commit_some(self) -> None:
        if not self._waiting:
            raise ShardError(f"{self.url} has segments that could not be shown; restart the shard, and report this")
        if self._slots is not None:
            time.sleep(self._slots.batching_s)
        taken, nbytes = [], 0
        while self._waiting and nbytes < SLOT_BYTES:
            taken.append(self._waiting.popleft())
            nbytes += len(taken[-1].payload)
        if self._slots is not None:
            self.append(taken, self._held.stop)
        self._held = self._apply(taken)
        self._committed_bytes += nbytes
        if self._full_at == self._next - 1:
            self.trim(self._held.start)

    def write_priorities(self) -> float:
        """Write the priorities, in place of those before, if they have changed; return when they may be again.

        That is after fifty times as long.
        """
        began, state = time.monotonic(), self._priorities()
        if state is not None:
            words = {name: value for name, value in state.items() if name != "scaled"}
            scaled = np.asarray(state["scaled"], "<f8")
            part = b"".join(pack(PRIORITIES, words, {"scaled": scaled.data}, frozenset()))
            with self._writing:
                before, self._priorities_at = self._priorities_at, self._write([part], is_full=False)
                if before >= 0:
                    self._slots.delete([before])
        now = time.monotonic()
        return now + max(_PRIORITIES_S, 50 * (now - began))

    def _watch(self) -> None:
        due = 0.0
        with suppress(FencedError):
            while True:
                time.sleep(_OWNED_S)
                if time.monotonic() > due:
                    due = self.write_priorities()
                with self._writing:
                    self._require(lambda: self._slots.read(self._next) is None)

    def _write(self, parts: list[bytes], is_full: bool, first_row: int = 0) -> int:
        """Create the next slot, and return its number."""
        number = self._next
        self._require(lambda: self._create(parts, is_full, first_row))
        return number

    def _require(self, is_owned: Callable[[], bool]) -> None:
        """Try something until the disk takes it: the same again, as it may be done already."""
        while self.fenced is None:
            try:
                if is_owned():
                    self.trouble = ""
                    return
            except CheckpointError as error:
                self._wait(error)
            else:
                self.fenced = FencedError(
                    f"{self.url}: another shard has opened this journal, and goes on with all that was acknowledged "
                    "here; this memory takes and gives nothing more: close it, and use the new one"
                )
                _LOG.warning("%s", self.fenced)
        raise self.fenced

    def _wait(self, error: CheckpointError) -> None:
        if not self._waits:
            raise error
        self.trouble = str(error)
        _LOG.warning("%s; trying again", error)
        time.sleep(_TRY_AGAIN_S)

    def trim(self, first_row: int) -> None:
        """Remove slots all of whose rows lie before `first_row`."""
        rows = self._first_rows
        gone = [n for n, after in pairwise(sorted(rows)) if rows[after] <= first_row and n < self._full_at]
        if gone:
            self._slots.delete(gone)
            for number in gone:
                del self._first_rows[number]

    def _create(self, parts: list[bytes], is_full: bool, first_row: int = 0) -> bool:
        head: dict[str, object] = {"number": self._next, "first_row": first_row} | asdict(self.state)
        if is_full:
            head["expected"] = {writer.hex(): number for writer, number in self.expected.items()}
        start = b"".join(pack(SLOT, head, {}, frozenset()))
        if not self._slots.create(self._next, b"".join([start, *parts])):
            return False
        self._since_full = 0 if is_full else self._since_full + 1
        self._full_at = self._next if is_full else self._full_at
        self._next += 1
        return True

    def _replay(self, number: int) -> Iterator[Page]:
        content: bytes | None = self._slots.read(number)
        if content is None:
            raise _RemovedError

        def read(start: int, nbytes: int) -> bytes:
            return content[start : start + nbytes]

        records = list(records_in(content))
        with malformed_refused(f"slot {number} of {self.url}"):
            if not records or records[0].kind != SLOT or records[0].head["number"] != number:
                raise DamageError(f"slot {number} of {self.url} is none; it is not used")
            head = records[0].head
            self._expect({_writer_of(name): count_of(n) for name, n in head.get("expected", {}).items()})
            self._full_at = number if "expected" in head else self._full_at
            self.state = JournalState.of(head)
            entries = []
            for record in records[1:]:
                if record.kind == PRIORITIES:
                    scaled = np.frombuffer(record.part("scaled", read), "<f8")
                    self.priorities, self._priorities_at = record.head | {"scaled": scaled}, number
                elif record.kind == ENTRY:
                    named = _writer_of(record.head["writer"]), count_of(record.head["sequence"])
                    entries.append(Entry(*named, record.part("segment", read)))
            page = Page(count_of(head["first_row"]), entries, not self._first_rows)
        if entries:
            self._expect({entry.writer: entry.sequence + 1 for entry in entries})
            self._first_rows[number] = page.first_row
            yield page

    def _expect(self, numbers: Mapping[bytes, int]) -> None:
        self.expected |= {writer: max(self.expected.get(writer, 0), number) for writer, number in numbers.items()}


def journal_of(url: str | None, shard: int) -> Journal:
    """Return the journal of a shard; it is nobody's until it is opened."""
    return Journal(None if url is None else Slots.at(url, FOLDER, f"{shard:05d}"))


def journals_in_use(url: str) -> list[int]:
    """Return the shards that have journals below a url, but for those that were drained."""
    names = sorted(objects_at(url, FOLDER).folders())
    return [int(name) for name in names if name.isdecimal() and not _is_drained(url, name)]


def _is_drained(url: str, name: str) -> bool:
    slots = Slots.at(url, FOLDER, name)
    numbers = slots.numbers()
    content = slots.read(numbers[-1]) if numbers else b""
    last = next(iter(records_in(content)), None) if content else None
    return last is None or last.head.get("drained") is True


def _writer_of(name: str) -> bytes:
    """Read a writer's name."""
    found = bytes.fromhex(name)
    if len(found) != 16:
        raise ValueError("a writer's name has 16 bytes")
    return found

"""Journals: the segments that a shard accepted, in numbered files that are each created once and by one shard alone.

In:  segments in the order in which they were accepted.  Out: files, called slots; and the segments again after a crash.
Invariant: a number that was created is never written again. Of several that create the same number at once, on a disk
or in an object store, one succeeds, so that a shard that was taken for dead writes nothing more. A segment can be
drawn, and its writer hears of it, only after it was written. A disk that fails is tried again until it does not;
writers wait meanwhile, and nothing is lost.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdall.checkpoint import FileSystem, Objects, is_remote
from holdall.cluster.protocol import dictionary_of, packed_dictionary, whole
from holdall.errors import CheckpointError, DamageError, FencedError, HoldallError
from holdall.storage import DICTIONARY, Dictionary, Record, SealedSegment, dictionary_name, pack, records_in

_NAME = re.compile(r"[0-9a-f]{16}\.slot")
MOST_SLOT_BYTES = 2**30


def slots_at(url: str | os.PathLike[str], *folders: str) -> LocalSlots | RemoteSlots:
    """Return the slots in a folder below a url or path."""
    if is_remote(url):
        return RemoteSlots("/".join((os.fspath(url).rstrip("/"), *folders)))
    return LocalSlots(Path(os.fspath(url)).joinpath(*folders))


def folders_at(url: str | os.PathLike[str], folder: str) -> list[str]:
    """Return the names of the folders in a folder below a url or path."""
    if is_remote(url):
        return Objects(f"{os.fspath(url).rstrip('/')}/{folder}").folders()
    place = Path(os.fspath(url)) / folder
    return [each.name for each in place.iterdir() if each.is_dir()] if place.is_dir() else []


class LocalSlots:
    """Numbered files in a directory."""

    batching_s = 0.0
    """How long to wait for more segments before the next one is created: a request to a store costs time and money."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self._root = root
        self._disk = disk or FileSystem()
        try:
            for folder in (*reversed(root.parents), root):
                if not folder.exists() and self._disk.make_directory(folder):
                    self._disk.sync_directory(folder.parent)
        except OSError as error:
            raise CheckpointError(f"{root} cannot be made ({error}); check the path and its permissions") from error

    def require_fencing(self) -> None:
        """Refuse a place where a number could be created twice; every file system makes a link once."""

    def numbers(self) -> list[int]:
        """Return the numbers that are there, in order."""
        return sorted(int(name[:16], 16) for name in self._disk.names(self._root) if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot; False if another stands there."""
        temporary = self._root / f"{secrets.token_hex(8)}.tmp"
        try:
            file = self._disk.create(temporary)
            try:
                self._disk.write(file, content)
                self._disk.sync(file)
            finally:
                self._disk.close(file)
            try:
                self._disk.link(temporary, self._root / _name(number))
            except FileExistsError:
                return self.read(number) == content  # an earlier try may have got this far
            finally:
                self._disk.unlink(temporary)
            self._disk.sync_directory(self._root)
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be written to ({error}); make room, or check the disk") from error
        return True

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a slot; None if it is not there: slots may be removed at any time."""
        try:
            return (self._root / _name(number)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.url}/{_name(number)} cannot be read ({error})") from error

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""
        for number in numbers:
            (self._root / _name(number)).unlink(missing_ok=True)


class RemoteSlots:
    """The same in an object store."""

    batching_s = 0.2

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects = Objects(url)

    def require_fencing(self) -> None:
        """See `LocalSlots`; some stores take conditions, and do not keep to them."""
        if not self._objects.honours_conditions():
            raise CheckpointError(
                f"{self.url} ignores conditions, so a shard that was taken for dead could not be told from its "
                "successor; use a store that has conditional puts, or durability='memory' and checkpoints"
            )

    def numbers(self) -> list[int]:
        """See `LocalSlots`."""
        return sorted(int(name[:16], 16) for name in self._objects.sizes("") if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """See `LocalSlots`; whether a put succeeded whose answer was lost is found out by reading it back."""
        return self._objects.create(_name(number), content) or self.read(number) == content

    def read(self, number: int) -> bytes | None:
        """See `LocalSlots`."""
        return self._objects.get(_name(number), MOST_SLOT_BYTES)

    def delete(self, numbers: list[int]) -> None:
        """See `LocalSlots`."""
        self._objects.delete([_name(number) for number in numbers])


def _name(number: int) -> str:
    return f"{number:016x}.slot"


SLOT, ENTRY, FOLDER = "slot", "entry", "journal"
_FULL_EVERY = 32
"""Slots between two that say what is expected of every writer; what is older than the last of them may be removed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A block that was accepted."""

    writer: bytes
    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """What one slot holds."""

    first_row: int
    entries: list[Entry]
    begins: bool  # it is the oldest; also if others were handed out before, which were removed while they were read


@dataclass(frozen=True, slots=True)
class SegmentMove:
    """A block that is hidden here, and on its way to another shard."""

    memory: str  # by whose doing
    shard: int
    writer: str  # under whose name it is sent there, in hexadecimals
    sequence: int
    first_row: int  # here


class _RemovedError(Exception):
    """A slot that was listed, and removed before it was read."""


class Journal:
    """The journal that one shard keeps, from its opening on."""

    def __init__(self, slots: LocalSlots | RemoteSlots) -> None:
        self._slots = slots
        self._next = self._since_full = 0
        self._first_rows: dict[int, int] = {}  # of slots with entries: the number of their first row
        self._full_at = -1  # the last slot that says what is expected of every writer
        self._known: set[str] = set()  # dictionaries that lie in the journal
        self.epoch = -1
        self.expected: dict[bytes, int] = {}
        self.dictionaries: dict[str, Dictionary] = {}
        self.hidden_before = 0
        self.loading = ""  # the checkpoint of which blocks were written, if not all were yet
        self.closed_by = ""  # the memory that closed the shard to writers
        self.move: SegmentMove | None = None
        self._drained = False  # all its rows are elsewhere, for good
        self.fenced = False
        self.url, self.batching_s = slots.url, slots.batching_s

    def open(self) -> Iterator[Page]:
        """Return everything that was accepted, and take the journal over."""
        self._slots.require_fencing()
        while True:
            try:
                yield from self._read_all()
            except _RemovedError:  # by the last owner, who is still at it: its rows have left, and so have those before
                self._first_rows.clear()
            else:
                return

    def _read_all(self) -> Iterator[Page]:
        kept = self._slots.numbers()
        for number in kept:
            yield from self._replay(number)
        self._next = kept[-1] + 1 if kept else 0
        self._drained = False
        while not self._create([], is_full=True):  # the last owner was at it until now
            yield from self._replay(self._next)
            self._next += 1
        self.epoch = self._next - 1

    def append(self, entries: Sequence[Entry], first_row: int, dictionaries: Sequence[Dictionary]) -> None:
        """Write entries; they are durable when this returns. FencedError if somebody else has the journal now.

        After any other error the same call has to be made again: the slot may stand there already.
        """
        parts = [packed_dictionary(each) for each in dictionaries if dictionary_name(each) not in self._known]
        for entry in entries:
            head = {"writer": entry.writer.hex(), "sequence": entry.sequence}
            parts.append(b"".join(pack(ENTRY, head, {"segment": entry.payload}, frozenset())))
        number = self._next
        self._require(self._create(parts, self._since_full >= _FULL_EVERY, first_row))
        self.expected |= {entry.writer: entry.sequence + 1 for entry in entries}
        self._first_rows[number] = first_row
        self._known |= {dictionary_name(each) for each in dictionaries}
        self.dictionaries |= {dictionary_name(each): each for each in dictionaries}

    def hide(self, row: int, move: SegmentMove | None) -> None:
        """Say that the rows before a number are not to be read again, and where the last of them are going."""
        self.hidden_before, self.move = row, move
        self._write_state()

    def close_to_writers(self, memory: str) -> None:
        """Say that nothing more is taken, for as long as this memory is there."""
        self.closed_by = memory
        self._write_state()

    def end_drain(self) -> None:
        """Say that nothing is held here any more, and that all of it has arrived elsewhere."""
        self.move, self._drained = None, True
        self._write_state()

    def end_loading(self, hidden_before: int) -> None:
        """Say that all blocks of a checkpoint were written, and which of their rows had left."""
        self.loading, self.hidden_before = "", hidden_before
        self._write_state()

    def _write_state(self) -> None:
        self._require(self._create([], is_full=True))

    def require_owned(self) -> None:
        """Find out whether another shard has opened this journal, without writing to it."""
        self._require(self._slots.read(self._next) is None)

    def _require(self, is_owned: bool) -> None:
        self.fenced |= not is_owned
        if self.fenced:
            raise FencedError(
                f"{self.url}: another shard has opened this journal, and goes on with all that was acknowledged here; "
                "this memory takes and gives nothing more: close it, and use the new one"
            )

    def trim(self, first_row: int) -> None:
        """Remove slots all of whose rows lie before `first_row`."""
        rows = self._first_rows
        gone = [n for n, after in pairwise(sorted(rows)) if rows[after] <= first_row and n < self._full_at]
        if gone:
            self._slots.delete(gone)
            for number in gone:
                del self._first_rows[number]

    def _create(self, parts: list[bytes], is_full: bool, first_row: int = 0) -> bool:
        head: dict[str, object] = {"number": self._next, "first_row": first_row, "hidden_before": self.hidden_before}
        head |= {"loading": self.loading, "closed_by": self.closed_by, "drained": self._drained}
        head["move"] = None if self.move is None else asdict(self.move)
        if is_full:
            head["expected"] = {writer.hex(): number for writer, number in self.expected.items()}
            # What is removed later must not take dictionaries with it that are still in use.
            parts = [packed_dictionary(each) for each in self.dictionaries.values()] + parts
        start = b"".join(pack(SLOT, head, {}, frozenset()))
        if self.fenced or not self._slots.create(self._next, b"".join([start, *parts])):
            return False
        self._since_full = 0 if is_full else self._since_full + 1
        self._full_at = self._next if is_full else self._full_at
        self._next += 1
        return True

    def _replay(self, number: int) -> Iterator[Page]:
        content = self._slots.read(number)
        if content is None:
            raise _RemovedError
        records = list(records_in(content))
        try:
            if not records or records[0].kind != SLOT or records[0].head["number"] != number:
                raise DamageError(f"slot {number} of {self.url} is none; it is not used")
            head = records[0].head
            for writer, expected in head.get("expected", {}).items():
                name = bytes.fromhex(writer)
                self.expected[name] = max(self.expected.get(name, 0), whole(expected, 2**53))
            self._full_at = number if "expected" in head else self._full_at
            self.hidden_before = whole(head["hidden_before"], 2**62)
            self.loading, self.closed_by = str(head.get("loading", "")), str(head.get("closed_by", ""))
            self.move = None if head.get("move") is None else _move_of(head["move"])
            entries = []
            for record in records[1:]:
                if record.kind == DICTIONARY:
                    dictionary = dictionary_of(content[record.start : record.start + record.nbytes])
                    self.dictionaries.setdefault(dictionary_name(dictionary), dictionary)
                    self._known.add(dictionary_name(dictionary))
                elif record.kind == ENTRY:
                    entries.append(_entry_of(record, content))
            page = Page(whole(head["first_row"], 2**53), entries, not self._first_rows)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"slot {number} of {self.url} makes no sense ({error})") from error
        for entry in entries:
            self.expected[entry.writer] = max(self.expected.get(entry.writer, 0), entry.sequence + 1)
        if entries:
            self._first_rows[number] = page.first_row
            yield page


def journal_of(url: str, shard: int) -> Journal:
    """Return the journal of a shard; it is nobody's until it is opened."""
    return Journal(slots_at(url, FOLDER, f"{shard:05d}"))


def journals_in_use(url: str) -> list[int]:
    """Return the shards that have journals below a url, but for those that were drained."""
    return [int(name) for name in sorted(folders_at(url, FOLDER)) if name.isdecimal() and not _is_drained(url, name)]


def _is_drained(url: str, name: str) -> bool:
    slots = slots_at(url, FOLDER, name)
    numbers = slots.numbers()
    content = slots.read(numbers[-1]) if numbers else b""
    last = next(iter(records_in(content)), None) if content else None
    return last is None or last.head.get("drained") is True


def _move_of(words: dict[str, Any]) -> SegmentMove:
    if len(bytes.fromhex(words["writer"])) != 16:
        raise ValueError("a writer's name has 16 bytes")
    numbers = (whole(words["shard"], 2**16), whole(words["sequence"], 2**53), whole(words["first_row"], 2**53))
    return SegmentMove(str(words["memory"]), numbers[0], str(words["writer"]), *numbers[1:])


def _entry_of(record: Record, content: bytes) -> Entry:
    writer = bytes.fromhex(record.head["writer"])
    payload = record.part("segment", lambda start, nbytes: content[start : start + nbytes])
    if len(writer) != 16:
        raise DamageError("an entry of a journal is none of holdall's; it is not used")
    return Entry(writer, whole(record.head["sequence"], 2**53), payload)


SLOT_BYTES = 16 * 2**20
_TRY_AGAIN_S = 0.5
_LOOK_AGAIN_S = 0.01
_TRIM_EVERY = 64
_OWNED_S = 5.0
"""How often a shard that is given nothing looks whether the journal is still its own."""

_LOG = logging.getLogger("holdall")


@dataclass(slots=True)
class Staged:
    """A segment on its way to the journal."""

    entry: Entry
    segment: SealedSegment
    done: threading.Event = field(default_factory=threading.Event)
    error: HoldallError | None = None

    def wait(self) -> None:
        """Return when the segment can be drawn; raise if it never will be."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Committer:
    """Writes what is staged, in a thread of its own.

    Args:
        apply: Shows segments that are durable, and returns the number of the first row that is still needed.
    """

    def __init__(self, journal: Journal, next_row: int, apply: Callable[[list[Staged]], int]) -> None:
        self.journal = journal
        self._apply = apply
        self._next_row = next_row
        self._staged: list[Staged] = []
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._commits = 0
        self.backlog = 0  # bytes
        self.trouble = ""  # why nothing is written, as long as that lasts
        self.fenced: FencedError | None = None  # as soon as another shard has the journal
        threading.Thread(target=self._run, name="holdall-journal", daemon=True).start()

    def stage(self, staged: Staged) -> None:
        """Have a segment written; the shard's lock keeps them in order."""
        with self._changed:
            if self.fenced is not None:
                raise self.fenced
            self._staged.append(staged)
            self.backlog += len(staged.entry.payload)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything that is staged is durable."""
        while self.backlog and self.fenced is None:
            time.sleep(_LOOK_AGAIN_S)

    def record(self, write: Callable[[Journal], None]) -> None:
        """Have something else written to the journal; nothing may be staged."""
        self._write_until_taken(lambda: write(self.journal))

    def _run(self) -> None:
        while self.fenced is None:
            with self._changed:
                has_work = self._changed.wait_for(lambda: self._staged, _OWNED_S)
            try:
                if not has_work:
                    self._write_until_taken(self.journal.require_owned)
                    continue
                if self.journal.batching_s:
                    time.sleep(self.journal.batching_s)
                self._write(self._taken())
            except FencedError as error:  # nothing of this shard is ever acknowledged again
                _LOG.warning("%s", error)
                self.fenced = error
        with self._changed:
            for each in self._staged:
                each.error = self.fenced
                each.done.set()

    def _taken(self) -> list[Staged]:
        with self._changed:
            taken, nbytes = 0, 0
            while taken < len(self._staged) and (taken == 0 or nbytes < SLOT_BYTES):
                nbytes += len(self._staged[taken].entry.payload)
                taken += 1
            return self._staged[:taken]

    def _write(self, batch: list[Staged]) -> None:
        dictionaries: dict[str, Dictionary] = {}
        for each in batch:
            dictionaries |= {dictionary_name(named): named for named in dictionaries_of(each.segment)}
        entries = [each.entry for each in batch]
        self._write_until_taken(lambda: self.journal.append(entries, self._next_row, list(dictionaries.values())))
        self._next_row += sum(each.segment.rows.ticks * each.segment.lanes for each in batch)
        needed = self._apply(batch)
        with self._changed:
            del self._staged[: len(batch)]
            self.backlog -= sum(len(each.entry.payload) for each in batch)
        self._commits += 1
        if self._commits % _TRIM_EVERY == 0:
            self.journal.trim(needed)

    def _write_until_taken(self, write: Callable[[], None]) -> None:
        """Write until the disk takes it; FencedError if somebody else has the journal."""
        while True:
            try:
                with self._writing:
                    write()
            except FencedError:
                raise
            except CheckpointError as error:
                _LOG.warning("%s; trying again", error)
                self.trouble = str(error)
                time.sleep(_TRY_AGAIN_S)
            else:
                self.trouble = ""
                return


def dictionaries_of(segment: SealedSegment) -> list[Dictionary]:
    """Return the dictionaries that a segment needs."""
    found = [part.block.sealed.codec.dictionary for part in segment.parts if part.block.sealed is not None]
    return [dictionary for dictionary in found if dictionary is not None]

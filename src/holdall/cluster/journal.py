"""Slots: numbered files at a place, each created once and by one writer alone.

In:  a number and bytes.  Out: whether they stand there now; the bytes of a number.
Invariant: a number that was created is never written again. Of several that create the same number at once, on a
disk or in an object store, one succeeds, and the bytes are durable when it is told so.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from holdall.checkpoint import FileSystem, Objects, is_remote
from holdall.cluster.block import (
    DICTIONARY,
    MOST_BYTES,
    pack_dictionary,
    read_part,
    records_in,
    unpack_dictionary,
    whole,
)
from holdall.errors import CheckpointError, DamageError, FencedError
from holdall.storage.codec import Dictionary
from holdall.storage.records import Record, dictionary_name, pack

_NAME = re.compile(r"[0-9a-f]{16}\.slot")
MOST_SLOT_BYTES = 2**30


class Slots(Protocol):
    """Numbered files."""

    url: str
    lingers_s: float
    """How long to gather more before the next one is created: a request to a store costs time and money."""

    def require_fencing(self) -> None:
        """Refuse a place where a number could be created twice."""

    def numbers(self) -> list[int]:
        """Return the numbers that are there, in order."""

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot; False if another stands there."""

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a slot; None if it is not there: who removes slots may do so at any time."""

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""


def slots_at(url: str | os.PathLike[str], *folders: str) -> Slots:
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
    """Slots in a directory."""

    lingers_s = 0.0

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
        """See `Slots`; a link is made once on every file system that has them."""

    def numbers(self) -> list[int]:
        """See `Slots`."""
        return sorted(int(name[:16], 16) for name in self._disk.names(self._root) if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """See `Slots`."""
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
        """See `Slots`."""
        try:
            return (self._root / _name(number)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.url}/{_name(number)} cannot be read ({error})") from error

    def delete(self, numbers: list[int]) -> None:
        """See `Slots`."""
        for number in numbers:
            (self._root / _name(number)).unlink(missing_ok=True)


class RemoteSlots:
    """Slots in an object store."""

    lingers_s = 0.2

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects = Objects(url)

    def require_fencing(self) -> None:
        """See `Slots`; some stores take conditions, and do not keep to them."""
        if not self._objects.honours_conditions():
            raise CheckpointError(
                f"{self.url} ignores conditions, so a shard that was taken for dead could not be told from its "
                "successor; use a store that has conditional puts, or durability='memory' and checkpoints"
            )

    def numbers(self) -> list[int]:
        """See `Slots`."""
        return sorted(int(name[:16], 16) for name in self._objects.sizes("") if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """See `Slots`; whether a put succeeded whose answer was lost is found out by reading it back."""
        return self._objects.create(_name(number), content) or self.read(number) == content

    def read(self, number: int) -> bytes | None:
        """See `Slots`."""
        return self._objects.get(_name(number), MOST_SLOT_BYTES)

    def delete(self, numbers: list[int]) -> None:
        """See `Slots`."""
        self._objects.delete([_name(number) for number in numbers])


def _name(number: int) -> str:
    return f"{number:016x}.slot"


SLOT, ENTRY, FOLDER = "slot", "entry", "journal"
_TELL_ALL = 32
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
class BlockMove:
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

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._next = 0
        self._since_told = 0
        self._first_rows: dict[int, int] = {}  # of slots with entries: the number of their first row
        self._told_at = -1  # the last slot that says what is expected of every writer
        self._known: set[str] = set()  # dictionaries that lie in the journal
        self.epoch = -1
        self.expected: dict[bytes, int] = {}
        self.dictionaries: dict[str, Dictionary] = {}
        self.hidden_before = 0
        self.loading = ""  # the checkpoint of which blocks were written, if not all were yet
        self.closed_by = ""  # the memory that closed the shard to writers
        self.move: BlockMove | None = None
        self._drained = False  # all its rows are elsewhere, for good
        self.fenced = False
        self.lingers_s = slots.lingers_s

    @property
    def url(self) -> str:
        """Where it lies."""
        return self._slots.url

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
        while not self._create([], tells_all=True):  # the last owner was at it until now
            yield from self._replay(self._next)
            self._next += 1
        self.epoch = self._next - 1

    def append(self, entries: Sequence[Entry], first_row: int, dictionaries: Sequence[Dictionary]) -> None:
        """Write entries; they are durable when this returns. FencedError if somebody else has the journal now.

        After any other error the same call has to be made again: the slot may stand there already.
        """
        parts = [pack_dictionary(each) for each in dictionaries if dictionary_name(each) not in self._known]
        for entry in entries:
            head = {"writer": entry.writer.hex(), "sequence": entry.sequence}
            parts.append(b"".join(pack(ENTRY, head, {"block": entry.payload}, frozenset())))
        number = self._next
        if self.fenced or not self._create(parts, self._since_told >= _TELL_ALL, first_row):
            self.fenced = True
            raise FencedError(
                f"{self._slots.url}: another shard has opened this journal, so nothing more is accepted here; it has "
                "all that was acknowledged"
            )
        self.expected |= {entry.writer: entry.sequence + 1 for entry in entries}
        self._first_rows[number] = first_row
        self._known |= {dictionary_name(each) for each in dictionaries}
        self.dictionaries |= {dictionary_name(each): each for each in dictionaries}

    def hide(self, row: int, move: BlockMove | None) -> None:
        """Say that the rows before a number are not to be read again, and where the last of them are going."""
        self.hidden_before, self.move = row, move
        self._tell("it has what was not moved yet")

    def close_to_writers(self, memory: str) -> None:
        """Say that nothing more is taken, for as long as this memory is there."""
        self.closed_by = memory
        self._tell("it goes on taking blocks")

    def end_drain(self) -> None:
        """Say that nothing is held here any more, and that all of it has arrived elsewhere."""
        self.move, self._drained = None, True
        self._tell("it has what was not moved yet")

    def end_loading(self, hidden_before: int) -> None:
        """Say that all blocks of a checkpoint were written, and which of their rows had left."""
        self.loading, self.hidden_before = "", hidden_before
        self._tell("it loads the checkpoint")

    def _tell(self, otherwise: str) -> None:
        if self.fenced or not self._create([], tells_all=True):
            self.fenced = True
            raise FencedError(f"{self._slots.url}: another shard has opened this journal; {otherwise}")

    def trim(self, first_row: int) -> None:
        """Remove slots all of whose rows lie before `first_row`."""
        numbers = sorted(self._first_rows)
        gone = [
            number
            for number, following in pairwise(numbers)
            if self._first_rows[following] <= first_row and number < self._told_at
        ]
        if gone:
            self._slots.delete(gone)
            for number in gone:
                del self._first_rows[number]

    def _create(self, parts: list[bytes], tells_all: bool, first_row: int = 0) -> bool:
        head: dict[str, object] = {"number": self._next, "first_row": first_row, "hidden_before": self.hidden_before}
        head |= {"loading": self.loading, "closed_by": self.closed_by, "drained": self._drained}
        head["move"] = None if self.move is None else asdict(self.move)
        if tells_all:
            head["expected"] = {writer.hex(): number for writer, number in self.expected.items()}
            # What is removed later must not take dictionaries with it that are still in use.
            parts = [pack_dictionary(each) for each in self.dictionaries.values()] + parts
        start = b"".join(pack(SLOT, head, {}, frozenset()))
        if not self._slots.create(self._next, b"".join([start, *parts])):
            return False
        self._since_told = 0 if tells_all else self._since_told + 1
        self._told_at = self._next if tells_all else self._told_at
        self._next += 1
        return True

    def _replay(self, number: int) -> Iterator[Page]:
        content = self._slots.read(number)
        if content is None:
            raise _RemovedError
        records = list(records_in(content))
        try:
            if not records or records[0].kind != SLOT or records[0].head["number"] != number:
                raise DamageError(f"slot {number} of {self._slots.url} is none; it is not used")
            head = records[0].head
            for writer, expected in head.get("expected", {}).items():
                name = bytes.fromhex(writer)
                self.expected[name] = max(self.expected.get(name, 0), whole(expected, 2**53))
            self._told_at = number if "expected" in head else self._told_at
            self.hidden_before = whole(head["hidden_before"], 2**62)
            self.loading, self.closed_by = str(head.get("loading", "")), str(head.get("closed_by", ""))
            self.move = None if head.get("move") is None else _move_of(head["move"])
            entries = []
            for record in records[1:]:
                raw = content[record.start : record.start + record.nbytes]
                if record.kind == DICTIONARY:
                    dictionary = unpack_dictionary(raw)
                    self.dictionaries.setdefault(dictionary_name(dictionary), dictionary)
                    self._known.add(dictionary_name(dictionary))
                elif record.kind == ENTRY:
                    entries.append(_entry_of(record, content))
            page = Page(whole(head["first_row"], 2**53), entries, not self._first_rows)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"slot {number} of {self._slots.url} makes no sense ({error})") from error
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


def _move_of(words: dict[str, Any]) -> BlockMove:
    if len(bytes.fromhex(words["writer"])) != 16:
        raise ValueError("a writer's name has 16 bytes")
    numbers = (whole(words["shard"], 2**16), whole(words["sequence"], 2**53), whole(words["first_row"], 2**53))
    return BlockMove(str(words["memory"]), numbers[0], str(words["writer"]), *numbers[1:])


def _entry_of(record: Record, content: bytes) -> Entry:
    writer = bytes.fromhex(record.head["writer"])
    payload = read_part(record, content, "block")
    if len(writer) != 16 or len(payload) > MOST_BYTES:
        raise DamageError("an entry of a journal is none of holdall's; it is not used")
    return Entry(writer, whole(record.head["sequence"], 2**53), payload)

"""The journal of a shard: what it accepted, written before it is acknowledged.

In:  blocks with their envelopes, in the order in which they are accepted.  Out: numbered slots at a place; and back.
Invariant: whoever opens a journal reads all of it and then creates the next slot, as its opening. From then on nobody
who opened it before can create one: its next number is taken. So a shard that Ray took for dead and that goes on
acknowledges nothing more, and nothing that it acknowledged before is missed. Openings are never removed.
Besides, a slot says whether a checkpoint is being loaded, whether the shard takes nothing more, and which block is on
its way to another shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from holdall.errors import DamageError, FencedError
from holdall.experience.disk.record import Record, pack
from holdall.experience.disk.slice_record import dictionary_name
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.block import MOST_BYTES, read_part, records_in, whole
from holdall.ray.dictionaries import DICTIONARY, pack_dictionary, unpack_dictionary
from holdall.ray.slots import Slots, folders_at, slots_at

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
class Move:
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
        self.move: Move | None = None
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

    def hide(self, row: int, move: Move | None) -> None:
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


def _move_of(words: dict[str, Any]) -> Move:
    if len(bytes.fromhex(words["writer"])) != 16:
        raise ValueError("a writer's name has 16 bytes")
    numbers = (whole(words["shard"], 2**16), whole(words["sequence"], 2**53), whole(words["first_row"], 2**53))
    return Move(str(words["memory"]), numbers[0], str(words["writer"]), *numbers[1:])


def _entry_of(record: Record, content: bytes) -> Entry:
    writer = bytes.fromhex(record.head["writer"])
    payload = read_part(record, content, "block")
    if len(writer) != 16 or len(payload) > MOST_BYTES:
        raise DamageError("an entry of a journal is none of holdall's; it is not used")
    return Entry(writer, whole(record.head["sequence"], 2**53), payload)

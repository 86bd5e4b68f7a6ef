"""The journal of a shard: what it accepted, written before it is acknowledged.

In:  blocks with their envelopes, in the order in which they are accepted.  Out: numbered slots at a place; and back.
Invariant: whoever opens a journal reads all of it and then creates the next slot, as its opening. From then on nobody
who opened it before can create one: its next number is taken. So a shard that Ray took for dead and that goes on
acknowledges nothing more, and nothing that it acknowledged before is missed. Openings are never removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdall.errors import DamageError, FencedError
from holdall.experience.disk.record import Record, pack
from holdall.experience.disk.slice_record import dictionary_name
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.block import MOST_BYTES, read_part, records_in, whole
from holdall.ray.dictionaries import DICTIONARY, pack_dictionary, unpack_dictionary
from holdall.ray.slots import Slots

SLOT, ENTRY = "slot", "entry"
_TELL_ALL = 32
"""Slots between two that say what is expected of every writer; what is older than the last of them may be removed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A block that was accepted."""

    writer: bytes
    sequence: int
    payload: bytes


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
        self.first_row = 0
        self.hidden_before = 0
        self.fenced = False
        self.lingers_s = slots.lingers_s

    def open(self) -> Iterator[Entry]:
        """Return everything that was accepted, and take the journal over."""
        kept = self._slots.numbers()
        for number in kept:
            yield from self._replay(number)
        self._next = kept[-1] + 1 if kept else 0
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

    def hide(self, row: int) -> None:
        """Say that the rows before a number are elsewhere now, and not to be read again."""
        self.hidden_before = max(self.hidden_before, row)
        if self.fenced or not self._create([], tells_all=True):
            self.fenced = True
            raise FencedError(
                f"{self._slots.url}: another shard has opened this journal; it has what was not moved yet"
            )

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

    def _replay(self, number: int) -> Iterator[Entry]:
        content = self._slots.read(number)
        records = list(records_in(content))
        try:
            if not records or records[0].kind != SLOT or records[0].head["number"] != number:
                raise DamageError(f"slot {number} of {self._slots.url} is none; it is not used")
            head = records[0].head
            for writer, expected in head.get("expected", {}).items():
                name = bytes.fromhex(writer)
                self.expected[name] = max(self.expected.get(name, 0), whole(expected, 2**53))
            self._told_at = number if "expected" in head else self._told_at
            self.hidden_before = max(self.hidden_before, whole(head["hidden_before"], 2**62))
            entries = []
            for record in records[1:]:
                raw = content[record.start : record.start + record.nbytes]
                if record.kind == DICTIONARY:
                    dictionary = unpack_dictionary(raw)
                    self.dictionaries.setdefault(dictionary_name(dictionary), dictionary)
                    self._known.add(dictionary_name(dictionary))
                elif record.kind == ENTRY:
                    entries.append(_entry_of(record, content))
            if entries:
                if not self._first_rows:
                    self.first_row = whole(head["first_row"], 2**53)
                self._first_rows[number] = whole(head["first_row"], 2**53)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"slot {number} of {self._slots.url} makes no sense ({error})") from error
        for entry in entries:
            self.expected[entry.writer] = max(self.expected.get(entry.writer, 0), entry.sequence + 1)
        yield from entries


def _entry_of(record: Record, content: bytes) -> Entry:
    writer = bytes.fromhex(record.head["writer"])
    payload = read_part(record, content, "block")
    if len(writer) != 16 or len(payload) > MOST_BYTES:
        raise DamageError("an entry of a journal is none of holdall's; it is not used")
    return Entry(writer, whole(record.head["sequence"], 2**53), payload)

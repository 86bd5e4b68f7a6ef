"""Checkpoints of a memory over shards: every shard writes its own blocks, then one manifest names them all.

    shards/NUMBER/SLOT      blocks as their writers encoded them, and what else later draws depend on
    manifests/SLOT          one a checkpoint

In:  the blocks of a shard.  Out: slots; and back.
Invariant: a manifest is created after everything that it names. A block is written once, however many checkpoints name
it. Nothing that is loaded runs code.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdall.checkpoint.records import pack_state, unpack_state
from holdall.errors import CheckpointError, DamageError
from holdall.experience.disk.record import pack
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.block import open_record, pack_block, read_part, records_in, whole
from holdall.ray.dictionaries import pack_dictionary, unpack_dictionary
from holdall.ray.shelf import Shelf
from holdall.ray.slots import Slots, slots_at

KEPT, STATE = "kept", "state"
_SLOT_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Kept:
    """A block that was saved."""

    first_row: int
    payload: bytes


@dataclass(slots=True)
class ShardSaver:
    """Saves one shard to one place, again and again."""

    slots: Slots
    next_slot: int = -1
    slot_of: dict[int, int] = field(default_factory=dict)  # block number: where it was written
    bytes_written: int = 0

    def save(self, shelf: Shelf, lock: threading.Lock, state: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
        """Write the blocks that are new, and a state; return what a manifest has to say of them.

        Args:
            numbers: The blocks that were held when the state was taken.
        """
        self.bytes_written = 0
        known = self.slots.numbers()
        self.next_slot = max(self.next_slot, known[-1] + 1 if known else 0)
        there = set(known)
        self.slot_of = {number: slot for number, slot in self.slot_of.items() if slot in there and number in numbers}
        waiting: list[bytes] = []
        taken: list[int] = []
        for number in numbers:
            if number in self.slot_of:
                continue
            with lock:
                if number not in shelf.block_numbers:  # it left meanwhile; nothing that is loaded would see it
                    continue
                first_row, block = shelf.block(number)
            dictionaries = {each.coded.codec.dictionary for each in block.fields} - {None}
            waiting += [pack_dictionary(each) for each in dictionaries if each is not None]
            waiting.append(b"".join(pack(KEPT, {"first_row": first_row}, {"block": pack_block(block)}, frozenset())))
            taken.append(number)
            if sum(map(len, waiting)) >= _SLOT_BYTES:
                self._put(waiting, taken)
        if taken:
            self._put(waiting, taken)
        blocks = sorted({self.slot_of[number] for number in numbers if number in self.slot_of})
        return {"blocks": blocks, "state": self._create(b"".join(pack_state(state)))}

    def _put(self, waiting: list[bytes], taken: list[int]) -> None:
        slot = self._create(b"".join(waiting))
        self.slot_of |= dict.fromkeys(taken, slot)
        waiting.clear()
        taken.clear()

    def _create(self, content: bytes) -> int:
        while not self.slots.create(self.next_slot, content):
            self.next_slot += 1
        self.bytes_written += len(content)
        self.next_slot += 1
        return self.next_slot - 1


def shard_slots(url: str, shard: int) -> Slots:
    """Return where a shard's part of checkpoints lies."""
    return slots_at(url, "shards", f"{shard:05d}")


def manifest_slots(url: str) -> Slots:
    """Return where manifests lie."""
    return slots_at(url, "manifests")


def saved_state(slots: Slots, slot: int) -> dict[str, Any]:
    """Read a state back."""
    content = _content(slots, slot)
    try:
        return unpack_state(open_record(content, STATE), lambda start, nbytes: content[start : start + nbytes])
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"the state in slot {slot} of {slots.url} makes no sense ({error})") from error


def saved_blocks(slots: Slots, numbers: list[int], dictionaries: dict[str, Dictionary]) -> Iterator[Kept]:
    """Read blocks back, oldest first; their dictionaries are put beside."""
    from_row = -1
    for number in numbers:
        content = _content(slots, number)
        for record in records_in(content):
            if record.kind != KEPT:
                dictionary = unpack_dictionary(content[record.start : record.start + record.nbytes])
                dictionaries[str(record.head["name"])] = dictionary
                continue
            first_row = whole(record.head["first_row"], 2**62)
            if first_row > from_row:
                from_row = first_row
                yield Kept(first_row, read_part(record, content, "block"))


def _content(slots: Slots, number: int) -> bytes:
    content = slots.read(number)
    if content is None:
        raise CheckpointError(f"slot {number} of {slots.url} is gone: another writer removed it; load anew")
    return content


def write_manifest(url: str, words: dict[str, Any]) -> int:
    """Make a checkpoint of what was written; return its number."""
    slots = manifest_slots(url)
    known = slots.numbers()
    number = known[-1] + 1 if known else 1
    while not slots.create(number, b"".join(pack_state(words))):
        number += 1
    return number


def newest_manifest(url: str) -> dict[str, Any]:
    """Read the newest checkpoint's manifest."""
    slots = manifest_slots(url)
    numbers = slots.numbers()
    if not numbers:
        raise CheckpointError(f"{url} holds no checkpoint of a memory over shards; check the path")
    return saved_state(slots, numbers[-1])


def collect(url: str, keep: int) -> None:
    """Remove all but the last `keep` checkpoints, and what nothing names any more."""
    slots = manifest_slots(url)
    numbers = slots.numbers()
    slots.delete(numbers[:-keep])
    named: dict[int, set[int]] = {}
    newest: dict[int, int] = {}
    for number in numbers[-keep:]:
        for shard, words in saved_state(slots, number)["shards"].items():
            of_shard = {*words["blocks"], words["state"]}
            named.setdefault(int(shard), set()).update(of_shard)
            newest[int(shard)] = max(of_shard)
    for shard, kept in named.items():
        own = shard_slots(url, shard)
        # A save that is under way writes behind what the newest manifest names.
        own.delete([number for number in own.numbers() if number not in kept and number < newest[shard]])

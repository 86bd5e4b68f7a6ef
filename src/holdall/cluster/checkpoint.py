"""Checkpoints of a memory over shards: every shard writes its own blocks, then one manifest names them all.

    shards/NUMBER/SLOT      blocks as their writers encoded them, and what else later draws depend on
    manifests/SLOT          one a checkpoint

In:  the blocks of a shard.  Out: slots; and back.
Invariant: a manifest is created after everything that it names. A block is written once, however many checkpoints name
it. Nothing that is loaded runs code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from holdall.checkpoint import Checkpoint, SaveHandle
from holdall.cluster.block import (
    open_record,
    pack_block,
    pack_dictionary,
    read_part,
    records_in,
    unpack_dictionary,
    whole,
)
from holdall.cluster.journal import Slots, slots_at
from holdall.cluster.shelf import ShardStore
from holdall.errors import CheckpointError, DamageError, HoldallError
from holdall.storage.codec import Dictionary
from holdall.storage.records import pack, pack_state, unpack_state

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

    def save(
        self, shelf: ShardStore, lock: threading.Lock, state: dict[str, Any], numbers: list[int]
    ) -> dict[str, Any]:
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


def save(url: str, shards: Mapping[int, Any], words: Mapping[str, Any], keep: int) -> SaveHandle:
    """Have every shard write what is new, and then the manifest.

    Args:
        words: What the manifest says besides.
    """
    calls = {number: shard.save.remote(url) for number, shard in shards.items()}
    handle = SaveHandle(url, lambda: None)
    work = (handle, url, calls, words, keep)
    threading.Thread(target=_finish, args=work, name="holdall-save", daemon=True).start()
    return handle


def _finish(handle: SaveHandle, url: str, calls: Mapping[int, Any], words: Mapping[str, Any], keep: int) -> None:
    began = time.monotonic()
    try:
        written = {str(number): ray.get(call) for number, call in calls.items()}
        number = write_manifest(url, {**words, "shards": written})
        collect(url, keep)
    except HoldallError as error:
        handle.fail(error)
    except Exception as error:
        failed = CheckpointError(f"the checkpoint at {url} is not complete ({error}); the one before is; save again")
        failed.__cause__ = error
        handle.fail(failed)
    else:
        nbytes = sum(each["bytes_written"] for each in written.values())
        transitions = sum(each["transitions"] for each in written.values())
        handle.succeed(Checkpoint(url, number, nbytes, nbytes, transitions, time.monotonic() - began))

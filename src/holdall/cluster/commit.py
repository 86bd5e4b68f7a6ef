"""Commits: blocks that were accepted become durable, several at a time, and can be drawn from then on.

In:  blocks in the order in which they were accepted.  Out: slots of a journal; then the blocks, in the same order.
Invariant: a block can be drawn, and its writer hears of it, only after it was written. A disk that fails is tried again
until it does not; writers wait meanwhile, and nothing is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from holdall.cluster.block import Block, unpack_block
from holdall.cluster.checkpoint import Kept
from holdall.cluster.journal import SegmentMove, Entry, Journal
from holdall.cluster.protocol import TravelLayout
from holdall.cluster.shelf import ShardStore
from holdall.errors import CheckpointError, DamageError, FencedError, HoldallError
from holdall.storage.codec import Dictionary

_SLOT_BYTES = 16 * 2**20
_TRY_AGAIN_S = 0.5
_LOOK_AGAIN_S = 0.01
_TRIM_EVERY = 64

_LOG = logging.getLogger("holdall")


@dataclass(slots=True)
class Staged:
    """A block on its way to the journal."""

    entry: Entry
    block: Block
    done: threading.Event = field(default_factory=threading.Event)
    error: HoldallError | None = None

    def wait(self) -> None:
        """Return when the block can be drawn; raise if it never will be."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Committer:
    """Writes what is staged, in a thread of its own.

    Args:
        apply: Shows blocks that are durable, and returns the number of the first row that is still needed.
    """

    def __init__(self, journal: Journal, next_row: int, apply: Callable[[list[Staged]], int]) -> None:
        self._journal = journal
        self._apply = apply
        self._next_row = next_row
        self._staged: list[Staged] = []
        self._changed = threading.Condition()
        self._commits = 0
        self.backlog = 0  # bytes
        threading.Thread(target=self._run, name="holdall-journal", daemon=True).start()

    def stage(self, staged: Staged) -> None:
        """Have a block written; the shard's lock keeps blocks in order."""
        with self._changed:
            self._staged.append(staged)
            self.backlog += len(staged.entry.payload)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything that is staged is durable."""
        while self.backlog:
            time.sleep(_LOOK_AGAIN_S)

    @property
    def journal(self) -> Journal:
        """What is written to, to be looked at."""
        return self._journal

    def hide(self, row: int, move: SegmentMove | None) -> None:
        """Have the rows before a number left out when the journal is read; nothing may be staged."""
        _write_until_taken(lambda: self._journal.hide(row, move))

    def end_drain(self) -> None:
        """Have it remembered that all is elsewhere; nothing may be staged."""
        _write_until_taken(self._journal.end_drain)

    def close_to_writers(self, memory: str) -> None:
        """Have it remembered that nothing more is taken; nothing may be staged."""
        _write_until_taken(lambda: self._journal.close_to_writers(memory))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._staged)
            if self._journal.batching_s:
                time.sleep(self._journal.batching_s)
            batch = self._taken()
            try:
                self._write(batch)
            except HoldallError as error:  # fenced: nothing of this shard is ever acknowledged again
                _LOG.warning("%s", error)
                for each in batch:
                    each.error = error
                    each.done.set()
            finally:
                with self._changed:
                    self.backlog -= sum(len(each.entry.payload) for each in batch)

    def _taken(self) -> list[Staged]:
        with self._changed:
            taken, nbytes = 0, 0
            while taken < len(self._staged) and (taken == 0 or nbytes < _SLOT_BYTES):
                nbytes += len(self._staged[taken].entry.payload)
                taken += 1
            batch, self._staged = self._staged[:taken], self._staged[taken:]
            return batch

    def _write(self, batch: list[Staged]) -> None:
        dictionaries: dict[int, Dictionary] = {}
        for each in batch:
            for sliced in each.block.fields:
                if sliced.coded.codec.dictionary is not None:
                    dictionaries[id(sliced.coded.codec.dictionary)] = sliced.coded.codec.dictionary
        entries = [each.entry for each in batch]
        _write_until_taken(lambda: self._journal.append(entries, self._next_row, list(dictionaries.values())))
        self._next_row += sum(each.block.rows for each in batch)
        needed = self._apply(batch)
        self._commits += 1
        if self._commits % _TRIM_EVERY == 0:
            self._journal.trim(needed)


def _write_until_taken(write: Callable[[], None]) -> None:
    """Write until the disk takes it; FencedError if somebody else has the journal."""
    while True:
        try:
            write()
        except FencedError:
            raise
        except CheckpointError as error:
            _LOG.warning("%s; trying again", error)
            time.sleep(_TRY_AGAIN_S)
        else:
            return


_LOADED = bytes(16)
"""Stands for the writer of blocks that a checkpoint brought."""


def shelf_of_journal(journal: Journal, layout: TravelLayout, capacity: int, memory: str) -> ShardStore:
    """Take a journal over, for a memory of this name, and return a shelf with all that it holds and shows."""
    shelf = ShardStore(layout, capacity)
    for page in journal.open():
        if page.begins:
            shelf = ShardStore(layout, capacity, page.first_row)
        elif page.first_row != shelf.next_row:
            raise DamageError(f"{journal.url} lacks blocks before row {page.first_row}; load a checkpoint")
        for entry in page.entries:
            shelf.append(unpack_block(entry.payload, layout, journal.dictionaries))
    move = journal.move
    # What another memory was moving when it ended may not have arrived; this one's is in good hands.
    hidden = journal.hidden_before if move is None or move.memory == memory else move.first_row
    shelf.hide_before(min(hidden, shelf.next_row))
    return shelf


def begins_with(journal: Journal, next_row: int, checkpoint: str) -> bool:
    """Whether a shard still has to load its checkpoint, or the rest of it.

    Args:
        next_row: The row behind the last that the journal holds; 0: it holds none.
        checkpoint: Which one; nothing if there is none to load.
    """
    if journal.loading not in {"", checkpoint}:
        raise CheckpointError(
            f"{journal.url} holds a part of the checkpoint {journal.loading}: a memory that loaded it was ended before "
            "it had all; load that one again with this journal_url, or name another"
        )
    return bool(checkpoint) and (journal.loading == checkpoint or next_row == 0)


def write_loaded(
    journal: Journal,
    checkpoint: str,
    blocks: Iterable[Kept],
    next_row: int,
    hidden_before: int,
    dictionaries: Sequence[Dictionary],
) -> None:
    """Write the blocks that a journal does not have yet."""
    journal.loading = checkpoint
    waiting: list[Kept] = []
    for kept in blocks:
        if kept.first_row < next_row:
            continue
        waiting.append(kept)
        if sum(len(each.payload) for each in waiting) >= _SLOT_BYTES:
            _append(journal, waiting, dictionaries)
    _append(journal, waiting, dictionaries)
    journal.end_loading(hidden_before)


def _append(journal: Journal, waiting: list[Kept], dictionaries: Sequence[Dictionary]) -> None:
    if waiting:
        entries = [Entry(_LOADED, 0, kept.payload) for kept in waiting]
        journal.append(entries, waiting[0].first_row, dictionaries)
        waiting.clear()

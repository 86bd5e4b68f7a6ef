"""What a shard with a journal begins with: what that holds, and a checkpoint, which is then as durable as the rest.

In:  a journal; the blocks of a checkpoint, of which it may have some since a shard was killed over loading it.
Out: a shelf; a journal that has them all, and says so.
Invariant: every slot that is written says which checkpoint it belongs to, and one more that it is complete. Before that
nothing else is accepted, so what is there of it are its first blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdall.errors import CheckpointError, DamageError
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.block import unpack_block
from holdall.ray.journal import Entry, Journal
from holdall.ray.layout import Layout
from holdall.ray.saving import Kept
from holdall.ray.shelf import Shelf

_LOADED = bytes(16)
"""Stands for the writer of blocks that a checkpoint brought."""
_SLOT_BYTES = 16 * 2**20


def shelf_of_journal(journal: Journal, layout: Layout, capacity: int, memory: str) -> Shelf:
    """Take a journal over, for a memory of this name, and return a shelf with all that it holds and shows."""
    shelf = Shelf(layout, capacity)
    for page in journal.open():
        if page.begins:
            shelf = Shelf(layout, capacity, page.first_row)
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

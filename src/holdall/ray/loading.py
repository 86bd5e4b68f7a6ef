"""Loading a checkpoint into a journal: what a shard begins with is as durable as what it accepts later.

In:  the blocks of a checkpoint, and a journal that has none of them, or some since a shard was killed over it.
Out: a journal that has them all, and says so.
Invariant: every slot that is written says which checkpoint it belongs to, and one more that it is complete. Before that
nothing else is accepted, so what is there of it are its first blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdall.errors import CheckpointError
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.journal import Entry, Journal
from holdall.ray.saving import Kept

_LOADED = bytes(16)
"""Stands for the writer of blocks that a checkpoint brought."""
_SLOT_BYTES = 16 * 2**20


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

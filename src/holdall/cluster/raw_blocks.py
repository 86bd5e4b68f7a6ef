"""RawBlocks: the newest blocks of a shard, uncompressed while there is memory for them.

Writers send compressed blocks. A batch from uncompressed blocks costs a copy instead of decoding, so a shard decodes
the newest blocks once, as a local memory keeps its newest blocks uncompressed. The compressed form is kept, too: it is
small, it replaces the raw form when memory is short, and checkpoints contain it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from holdall._native import Block, Coded, Raw, Segment, decode
from holdall.store.format import list_blocks

_MAX_RATIO = 20.0
"""Blocks that are compressed by more than this factor stay compressed, because decoding them is as fast as copying."""


class _KeptBlock(NamedTuple):
    end_row: int  # Row after the last one of the block's segment.
    block: Block
    coded: Coded
    raw: Raw


class RawBlocks:
    """The uncompressed blocks of one shard. Thread-safe. A reader sees every block in one form or the other.

    Args:
        max_bytes: Bytes of uncompressed blocks that are kept at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._kept: deque[_KeptBlock] = deque()
        self._lock = threading.Lock()

    def keep(self, segment: Segment, end_row: int, first_row: int) -> None:
        """Decode the blocks of a new segment. Above the limit, replace the oldest ones by their compressed form.

        Args:
            end_row: Row after the last one of the segment.
            first_row: Oldest row that the shard holds.
        """
        decoded = [_decode(block, end_row) for block in list_blocks(segment)]
        with self._lock:
            for kept in decoded:
                if kept is None:
                    continue
                self._kept.append(kept)
                self._nbytes += kept.raw.nbytes
                kept.block.form = kept.raw
            while self._kept and (self._nbytes > self._max_bytes or self._kept[0].end_row <= first_row):
                oldest = self._kept.popleft()
                self._nbytes -= oldest.raw.nbytes
                oldest.block.form = oldest.coded

    def coded_forms(self) -> dict[int, Coded]:
        """Return the compressed forms of all uncompressed blocks, by serial number of the block."""
        with self._lock:
            return {kept.block.serial: kept.coded for kept in self._kept}


def _decode(block: Block, end_row: int) -> _KeptBlock | None:
    """Return a block with both forms, or None if it should stay compressed."""
    coded = block.form
    raw_bytes = block.slice_count * block.slice_bytes
    if not isinstance(coded, Coded) or coded.data is None or raw_bytes > _MAX_RATIO * coded.nbytes:
        return None
    raw = Block(block.slice_bytes, block.slice_count, decode(coded, 0, block.slice_count)).form
    return _KeptBlock(end_row, block, coded, raw) if isinstance(raw, Raw) else None

"""The ledger: what of a memory a place holds already, so that it is not written again.

In:  records as they are written.  Out: where a chunk of rows, a segment's logs or a block lies.
Invariant: every record named here lies in a finished file, and its content is what the memory holds still: closed
segments and full blocks never change, chunks of rows are named with their version.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdall.checkpoint.manifest import Chunk, Ref
from holdall.experience.slices import SliceBlock
from holdall.experience.snapshot import is_settled

RowsKey = tuple[int, tuple[str, ...]]
"""How often flags of a chunk were set anew, and its columns."""


@dataclass(slots=True)
class Filling:
    """What was written of a block that is still being filled."""

    refs: tuple[Ref, ...] = ()
    slices: int = 0


@dataclass(slots=True)
class Ledger:
    """All that is known to lie in a place."""

    files: dict[str, int] = field(default_factory=dict)
    rows: dict[int, tuple[RowsKey, Chunk]] = field(default_factory=dict)  # by number of the chunk
    logs: dict[int, Ref] = field(default_factory=dict)  # by a closed segment's first tick
    blocks: weakref.WeakKeyDictionary[SliceBlock, tuple[Ref, ...]] = field(default_factory=weakref.WeakKeyDictionary)
    filling: weakref.WeakKeyDictionary[object, Filling] = field(default_factory=weakref.WeakKeyDictionary)
    split: weakref.WeakSet[SliceBlock] = field(default_factory=weakref.WeakSet)  # full blocks in pieces
    dictionaries: dict[str, Ref] = field(default_factory=dict)  # by the sha256 of their content

    def rows_saved(self) -> dict[int, RowsKey]:
        """Name the chunks of rows that are there."""
        return {number: key for number, (key, _) in self.rows.items()}

    def take_over(self, moved: Ledger) -> None:
        """Name records where they lie now; the same ones, in other files."""
        self.rows, self.logs, self.dictionaries = moved.rows, moved.logs, moved.dictionaries
        self.blocks, self.filling = moved.blocks, moved.filling

    def merge(self, fresh: Ledger) -> None:
        """Take over what was written since, now that its files are finished."""
        # New dicts: the training thread may be looking at the old ones.
        self.files = self.files | fresh.files
        self.rows = self.rows | fresh.rows
        self.logs = self.logs | fresh.logs
        self.dictionaries = self.dictionaries | fresh.dictionaries
        for block, refs in fresh.blocks.items():
            self.blocks[block] = refs
        self.filling = fresh.filling
        for block in fresh.split:
            self.split.add(block)

    def forget_before(self, tick: int) -> None:
        """Forget what ended before a tick; blocks are forgotten with the memory's own."""
        self.rows = {n: entry for n, entry in self.rows.items() if entry[1].first_tick + entry[1].ticks > tick}
        held = sorted(self.logs)
        for first, following in itertools.pairwise(held):
            if following <= tick:
                del self.logs[first]

    def files_in_use(self) -> set[str]:
        """Name the files that hold something of use."""
        refs = [chunk.ref for _, chunk in self.rows.values()]
        refs += [*self.logs.values(), *self.dictionaries.values()]
        refs += [ref for written in self.blocks.values() for ref in written]
        refs += [ref for filled in self.filling.values() for ref in filled.refs]
        return {ref.file for ref in refs}

    def adopt_rows(self, chunks: Iterable[Chunk], chunk_ticks: int, columns: tuple[str, ...], next_tick: int) -> None:
        """Take over the chunks of rows of a memory that was loaded."""
        for chunk in chunks:
            number = chunk.first_tick // chunk_ticks
            is_whole = chunk.first_tick + chunk.ticks == (number + 1) * chunk_ticks
            if is_whole and is_settled(number, chunk_ticks, next_tick):
                self.rows[number] = ((0, columns), chunk)

    def keep_only(self, sizes: dict[str, int]) -> None:
        """Forget what lies in files that are not there any more, or not in full."""
        gone = {name for name, nbytes in self.files.items() if sizes.get(name, -1) < nbytes}
        if not gone:
            return
        self.files = {name: nbytes for name, nbytes in self.files.items() if name not in gone}
        self.rows = {n: entry for n, entry in self.rows.items() if entry[1].ref.file not in gone}
        self.logs = {first: ref for first, ref in self.logs.items() if ref.file not in gone}
        self.dictionaries = {name: ref for name, ref in self.dictionaries.items() if ref.file not in gone}
        for block in [block for block, refs in self.blocks.items() if any(ref.file in gone for ref in refs)]:
            del self.blocks[block]
        for key in [key for key, f in self.filling.items() if any(ref.file in gone for ref in f.refs)]:
            del self.filling[key]

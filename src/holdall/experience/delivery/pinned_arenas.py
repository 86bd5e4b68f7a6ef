"""Pinned arenas: raw slices that a device reads where they lie, so that no thread has to gather them.

In:  the store, as it grows.  Out: for every segment, where its slices begin in one tensor over the host's memory.
Invariant: an arena stays pinned for as long as anybody holds on to what was said of it. Whatever cannot be
pinned, or is compressed, is said to lie nowhere, and goes the way through staging.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.experience.arena import Bytes, address
from holdall.experience.delivery.device import Line
from holdall.experience.part import ClosedPart, OpenPart, lies_direct
from holdall.experience.slices import SliceBlock
from holdall.experience.store import Store

if TYPE_CHECKING:
    import torch


class Pinned(NamedTuple):
    """What was pinned at one moment; it stays so while this is referred to."""

    span: torch.Tensor  # bytes, from the lowest arena to the end of the highest
    starts: dict[int, NDArray[np.int64]]  # by field, and by segment: the byte of `span` its slices begin with, or -1
    held: tuple[_PinnedArena, ...]
    is_whole: bool  # whether no segment's are left out


class _PinnedArena:
    """An arena that the device may read."""

    def __init__(self, arena: Bytes, nbytes: int) -> None:
        self.arena = arena
        self.nbytes = nbytes
        self.start = address(arena)
        self.end = self.start + nbytes


class PinnedArenas:
    """Pins the raw blocks of one memory's segments. Called under the memory's lock."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._by_block: dict[int, tuple[SliceBlock, _PinnedArena]] = {}
        self._given_up: list[_PinnedArena] = []
        self._can_pin = self._can_share = True
        self._version = -1
        self._pinned: Pinned | None = None
        self._registered: dict[int, Bytes] = {}
        # Memory must not be unmapped while a device may read it, even if nobody closes the store.
        self._release = weakref.finalize(self, _unpin_all, line, self._registered, os.getpid())

    def brought_up_to_date(self, store: Store) -> Pinned | None:
        """Pin what is new, let go of what nobody reads any more, and say where everything is."""
        segments = store.large_segments
        if self._version == segments.version:
            return self._pinned
        self._version, self._pinned = segments.version, None
        parts = {field: segments.parts(field) for field in range(store.large_fields)}
        blocks = {id(block): block for of_field in parts.values() for part in of_field if (block := _raw(part))}
        known, self._by_block = self._by_block, {}
        for key, (block, arena) in known.items():
            if key in blocks and blocks[key].arena is arena.arena:
                self._by_block[key] = (block, arena)
            else:
                self._given_up.append(arena)
        known.clear()
        self._let_go()
        growing = {id(of_field[-1].block) for of_field in parts.values()}
        for key, block in blocks.items():
            # Of a block that takes no more slices, the pages behind them were given back.
            nbytes = block.arena.nbytes if key in growing else block.used_bytes
            if key not in self._by_block and (pinned := self._pin(block.arena, nbytes)) is not None:
                self._by_block[key] = (block, pinned)
        if self._by_block and self._can_share:
            try:
                self._pinned = self._describe(parts)
            except RuntimeError:  # torch's, where a device does not see the host's memory under the host's addresses
                self._can_share = False
        return self._pinned

    def close(self) -> None:
        """Let go of everything; nothing may be under way."""
        self._by_block, self._given_up, self._pinned = {}, [], None
        self._release()

    def _pin(self, arena: Bytes, nbytes: int) -> _PinnedArena | None:
        pinned = _PinnedArena(arena, nbytes)
        if not self._can_pin or not self._line.pin(pinned.start, nbytes):
            self._can_pin = False  # a limit on locked memory, most often: asking again would not help
            return None
        self._registered[pinned.start] = arena
        return pinned

    def _let_go(self) -> None:
        """Unpin arenas that are gone and that no batch under way reads."""
        still_read: list[_PinnedArena] = []
        while self._given_up:
            arena = self._given_up.pop()
            # One reference by the name, one by the call.
            if sys.getrefcount(arena) > 2:
                still_read.append(arena)
            else:
                self._line.unpin(arena.start)
                self._registered.pop(arena.start, None)
        self._given_up = still_read

    def _describe(self, parts_by_field: dict[int, list[OpenPart | ClosedPart]]) -> Pinned:
        arenas = [arena for _, arena in self._by_block.values()]
        first, end = min(arena.start for arena in arenas), max(arena.end for arena in arenas)
        starts = {}
        for field, parts in parts_by_field.items():
            pinned = [self._by_block.get(id(part.block)) for part in parts]
            starts[field] = np.array([-1 if entry is None else entry[1].start - first for entry in pinned], np.int64)
        is_whole = all((of_field >= 0).all() for of_field in starts.values())
        return Pinned(self._line.span(first, end - first), starts, tuple(arenas), is_whole)


def _raw(part: OpenPart | ClosedPart) -> SliceBlock | None:
    """Return a part's block if its slices lie in an arena of their own, as they are."""
    block = part.block
    if block is None or lies_direct(part.window) or block.sealed is not None or not block.arena.nbytes:
        return None
    return block


def _unpin_all(line: Line, registered: dict[int, Bytes], process: int) -> None:
    if registered and process == os.getpid():  # a forked child has no part in the device
        line.wait(line.mark())  # batches that were handed out may still be read from here
        for start in registered:
            line.unpin(start)
    registered.clear()

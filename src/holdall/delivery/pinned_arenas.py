"""Raw slices where a device reads them: their blocks are pinned on the host.

In:  the store, as it grows.  Out: snapshots that say where each segment's slices begin.
Invariant: while a snapshot is referred to, no arena that it names is unpinned.
"""

from __future__ import annotations

import os
import weakref

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device import DeviceStream
from holdall.schema import Bytes
from holdall.storage import ClosedPart, OpenPart, SliceBlock, Store, address, lies_direct


class _PinnedArena:
    """An arena that the device may read."""

    def __init__(self, arena: Bytes) -> None:
        self.arena = arena
        self.start = address(arena)


class PinnedSlices:
    """Where all slices lay at one moment; they stay pinned while this is referred to.

    Args:
        base: An address that no slice begins before.
        starts: By field and by segment, the byte from there at which its slices begin.
    """

    def __init__(self, base: int, starts: list[NDArray[np.int64]], arenas: list[_PinnedArena]) -> None:
        self.base, self.starts, self.arenas = base, starts, arenas


class PinnedArenas:
    """Pins the raw blocks of one memory's segments. Called under the memory's lock."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._by_block: dict[int, tuple[SliceBlock, _PinnedArena]] = {}
        self._given_up: list[_PinnedArena] = []
        self._living: weakref.WeakSet[PinnedSlices] = weakref.WeakSet()
        self._can_pin = True
        self._registered: dict[int, Bytes] = {}
        # Memory must not be unmapped while a device may read it, even if nobody closes the store.
        self._release = weakref.finalize(self, _unpin_all, stream, self._registered, os.getpid())

    def up_to_date(self, store: Store) -> PinnedSlices | None:
        """Pin what is new, unpin what nobody reads any more, and return where everything is, if all of it is pinned.

        It holds until segments or their blocks are others; what was returned before must not be referred to here.
        """
        segments = store.large_segments
        parts = [segments.parts(field) for field in range(len(segments.cursors))]
        found = [_raw(part) for of_field in parts for part in of_field]
        blocks = {id(block): block for block in found if block is not None}
        known, self._by_block = self._by_block, {}
        for key, (block, arena) in known.items():
            if key in blocks and blocks[key].arena is arena.arena:
                self._by_block[key] = (block, arena)
            else:
                self._given_up.append(arena)
        self._unpin_unread()
        if None in found or not found:  # what is compressed, no device reads by itself
            return None
        growing = {id(of_field[-1].block) for of_field in parts}
        for key, block in blocks.items():
            # Of a block that takes no more slices, the pages behind them were given back.
            nbytes = block.arena.nbytes if key in growing else block.used_bytes
            if key not in self._by_block and not self._pin(key, block, nbytes):
                return None
        arenas = [arena for _, arena in self._by_block.values()]
        base, by_block = min(arena.start for arena in arenas), self._by_block
        starts = [np.array([by_block[id(part.block)][1].start - base for part in some], np.int64) for some in parts]
        pinned = PinnedSlices(base, starts, arenas)
        self._living.add(pinned)
        return pinned

    def close(self) -> None:
        """Unpin everything; nothing may be under way."""
        self._by_block, self._given_up = {}, []
        self._release()

    def _pin(self, key: int, block: SliceBlock, nbytes: int) -> bool:
        pinned = _PinnedArena(block.arena)
        # A limit on locked memory, most often: asking again would not help.
        self._can_pin = self._can_pin and self._stream.pin(pinned.start, nbytes)
        if self._can_pin:
            self._registered[pinned.start], self._by_block[key] = block.arena, (block, pinned)
        return self._can_pin

    def _unpin_unread(self) -> None:
        """Unpin arenas that are gone and that no batch under way reads."""
        in_use, given_up = {id(arena) for pinned in self._living for arena in pinned.arenas}, self._given_up
        self._given_up = [arena for arena in given_up if id(arena) in in_use]
        for arena in given_up:
            if id(arena) not in in_use:
                self._stream.unpin(arena.start)
                self._registered.pop(arena.start, None)


def _raw(part: OpenPart | ClosedPart) -> SliceBlock | None:
    """Return a part's block if its slices lie in an arena of their own, as they are."""
    block = part.block
    if block is None or lies_direct(part.window) or block.sealed is not None or not block.arena.nbytes:
        return None
    return block


def _unpin_all(stream: DeviceStream, registered: dict[int, Bytes], process: int) -> None:
    if registered and process == os.getpid():  # a forked child has no part in the device
        stream.synchronize(stream.record())  # batches that were handed out may still be read from here
        for start in registered:
            stream.unpin(start)
    registered.clear()

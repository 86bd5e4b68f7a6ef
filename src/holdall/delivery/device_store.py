"""Slices where a device reads them: copies of all of them on the device, or raw blocks pinned on the host.

In:  the store, as it grows.  Out: snapshots that say where each segment's slices begin.
Invariant: what is on the device is, slice for slice, what the segments hold. While a snapshot is referred to, no region
that it names is written to again, and no arena that it names is unpinned.

Slices are sent as they are written, before they are compressed: the host keeps what the budget says.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device import DeviceStream, StagingRing, StagingSlot
from holdall.errors import DamageError
from holdall.schema import Bytes
from holdall.storage import ClosedPart, Coder, OpenPart, SliceBlock, Store, address, lies_direct

_FIRST_REGIONS = 4
_GROWTH = 1.5
_SENT_AT_ONCE_BYTES = 4 << 20

Parts = list[OpenPart | ClosedPart]
"""What all segments hold of one field, oldest first."""


class SliceSnapshot:
    """Where a device could read all slices at one moment.

    While this is referred to, nothing of it is overwritten on the device, and nothing of it is unpinned on the host.

    Args:
        sources: By field, where its slices are, and by segment at which byte from there they begin.
        held: All that must stay as it is.
        is_on_device: Whether they lie there, or on the host.
    """

    def __init__(
        self, sources: dict[int, tuple[int, NDArray[np.int64]]], held: tuple[Any, ...], *, is_on_device: bool
    ) -> None:
        self.sources, self.held, self.is_on_device = sources, held, is_on_device


class _Snapshots:
    """The snapshots that somebody still refers to."""

    def __init__(self) -> None:
        self._living: list[weakref.ref[SliceSnapshot]] = []

    def add(self, snapshot: SliceSnapshot) -> SliceSnapshot:
        self._living = [ref for ref in self._living if ref() is not None]
        self._living.append(weakref.ref(snapshot))
        return snapshot

    def named(self) -> set[int]:
        """Return the identities of everything that they name."""
        snapshots = [snapshot for ref in self._living if (snapshot := ref()) is not None]
        return {id(item) for snapshot in snapshots for item in snapshot.held}


class _Region:
    """Room for one block's slices."""

    def __init__(self, first_slice: int) -> None:
        self.first_slice = first_slice
        self.sent = 0


class DeviceSlices:
    """Keeps all slices of one memory on a device. Called under the memory's lock."""

    def __init__(self, stream: DeviceStream, coder: Coder) -> None:
        self._stream = stream
        self._coder = coder
        self._ring = StagingRing(stream, StagingSlot)
        self._fields: dict[int, _DeviceField] = {}
        self._snapshots = _Snapshots()
        self._version = -1
        self._snapshot: SliceSnapshot | None = None
        self._sent: Any = None

    def up_to_date(self, store: Store) -> SliceSnapshot:
        """Send what is new, and return where everything is."""
        segments, snapshot = store.large_segments, self._snapshot
        if snapshot is not None and segments.index.version == self._version:
            new = [field for field in snapshot.sources if self._fields[field].has_new]
            if not new:
                return snapshot
        with self._stream.active():
            if snapshot is None or segments.index.version != self._version:
                self._version, self._snapshot = segments.index.version, None  # so that this one keeps no region in use
                parts = {field: segments.parts(field) for field in range(len(segments.cursors))}
                snapshot = self._snapshot = self._follow(parts)
                new = list(snapshot.sources)
            for field in new:
                self._fields[field].send_new()
        return snapshot

    def newly_sent(self) -> Any:
        """Return an event behind what was sent since the last call; None if that was nothing."""
        before, self._sent = self._sent, self._ring.last_read
        return None if self._sent is before else self._sent

    def _follow(self, parts_by_field: dict[int, Parts]) -> SliceSnapshot:
        sources: dict[int, tuple[int, NDArray[np.int64]]] = {}
        held: list[Any] = []
        for field, parts in parts_by_field.items():
            there = self._fields.setdefault(field, _DeviceField(self._stream, self._coder, self._ring, self._snapshots))
            window = parts[0].window
            # Slices that lie in the log itself are written lane by lane, so what was sent may still grow in between.
            if not lies_direct(window) and all(part.window == window for part in parts):
                there.follow(parts)
                starts = np.array([region.first_slice for region in there.regions], np.int64) * window.slice_bytes
                sources[field] = there.slices.data_ptr(), starts
                held += [there.slices, *there.regions]
        return self._snapshots.add(SliceSnapshot(sources, tuple(held), is_on_device=True))


class _DeviceField:
    """The slices of one field."""

    def __init__(
        self, stream: DeviceStream, coder: Coder, ring: StagingRing[StagingSlot], snapshots: _Snapshots
    ) -> None:
        self.slices = stream.device_bytes(0)
        self.regions: list[_Region] = []
        self._stream = stream
        self._coder = coder
        self._ring = ring
        self._snapshots = snapshots
        self._slice_bytes = 0
        self._room = 0  # slices of a region
        self._all: list[_Region] = []
        self._by_block: dict[int, tuple[SliceBlock, _Region]] = {}  # with the block, so that its id is nobody else's
        self._parts: Parts = []

    def follow(self, parts: Parts) -> None:
        """Give blocks that are new a region, and take back those of blocks that are gone."""
        slice_bytes = parts[0].window.slice_bytes
        room = max(_block(part).capacity for part in parts)
        if slice_bytes != self._slice_bytes or room > self._room:
            self._start_over(slice_bytes, room)
        sources = {id(_block(part)): _block(part) for part in parts}
        kept = {key: entry for key, entry in self._by_block.items() if key in sources}
        self._by_block = kept
        for key, source in sources.items():
            if key not in kept:
                kept[key] = (source, self._free_region())
        self.regions = [kept[id(_block(part))][1] for part in parts]
        self._parts = parts
        for part, region in zip(parts[:-1], self.regions, strict=False):
            self._send_up_to(part, region, _block(part).used)

    @property
    def has_new(self) -> bool:
        """Whether slices were written since the last call of `send_new`."""
        return self.regions[-1].sent < _block(self._parts[-1]).used

    def send_new(self) -> None:
        """Send the slices that were written since the last call; only the open segment grows."""
        self._send_up_to(self._parts[-1], self.regions[-1], _block(self._parts[-1]).used)

    def _send_up_to(self, part: OpenPart | ClosedPart, region: _Region, used: int) -> None:
        while region.sent < used:
            self._send(part, region, min(used, region.sent + max(1, _SENT_AT_ONCE_BYTES // self._slice_bytes)))

    def _send(self, part: OpenPart | ClosedPart, region: _Region, end: int) -> None:
        first, nbytes = region.sent, (end - region.sent) * self._slice_bytes
        slot = self._ring.next_slot(nbytes)
        out: Bytes = slot.array[:nbytes].reshape(-1, self._slice_bytes)
        block = _block(part)
        if block.sealed is not None:
            self._coder.decode(block.sealed, np.arange(first, end), out)
        else:
            out[:] = block.arena[first * self._slice_bytes : end * self._slice_bytes].reshape(out.shape)
        place = (region.first_slice + first) * self._slice_bytes
        self.slices[place : place + nbytes].copy_(slot.host[:nbytes], non_blocking=True)
        slot.read = self._stream.record()
        region.sent = end

    def _free_region(self) -> _Region:
        in_use = self._snapshots.named() | {id(region) for _, region in self._by_block.values()}
        for region in self._all:
            if id(region) not in in_use:
                region.sent = 0
                return region
        if len(self._all) * self._room * self._slice_bytes == self.slices.numel():
            self._grow(max(_FIRST_REGIONS, int(len(self._all) * _GROWTH)))
        region = _Region(len(self._all) * self._room)
        self._all.append(region)
        return region

    def _grow(self, regions: int) -> None:
        larger = self._stream.device_bytes(regions * self._room * self._slice_bytes)
        larger[: self.slices.numel()].copy_(self.slices)
        self.slices = larger

    def _start_over(self, slice_bytes: int, room: int) -> None:
        """Slices are cut in another way, or blocks are larger: nothing stays where it was."""
        self._slice_bytes, self._room = slice_bytes, room
        self._all, self._by_block, self.regions = [], {}, []
        self.slices = self._stream.device_bytes(0)


def _block(part: OpenPart | ClosedPart) -> SliceBlock:
    if part.block is None:
        raise DamageError("slices that lie in the log itself were to be kept on a device; report this")
    return part.block


class _PinnedArena:
    """An arena that the device may read."""

    def __init__(self, arena: Bytes) -> None:
        self.arena = arena
        self.start = address(arena)


class PinnedArenas:
    """Pins the raw blocks of one memory's segments. Called under the memory's lock."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._by_block: dict[int, tuple[SliceBlock, _PinnedArena]] = {}
        self._given_up: list[_PinnedArena] = []
        self._snapshots = _Snapshots()
        self._can_pin = True
        self._registered: dict[int, Bytes] = {}
        # Memory must not be unmapped while a device may read it, even if nobody closes the store.
        self._release = weakref.finalize(self, _unpin_all, stream, self._registered, os.getpid())

    def up_to_date(self, store: Store) -> SliceSnapshot | None:
        """Pin what is new, unpin what nobody reads any more, and return where everything is, if all of it is pinned.

        It holds until segments or their blocks are others; what was returned before must not be referred to here.
        """
        segments = store.large_segments
        parts = {field: segments.parts(field) for field in range(len(segments.cursors))}
        found = [_raw(part) for of_field in parts.values() for part in of_field]
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
        growing = {id(of_field[-1].block) for of_field in parts.values()}
        for key, block in blocks.items():
            # Of a block that takes no more slices, the pages behind them were given back.
            nbytes = block.arena.nbytes if key in growing else block.used_bytes
            if key not in self._by_block and (pinned := self._pin(block.arena, nbytes)) is not None:
                self._by_block[key] = (block, pinned)
        return self._describe(parts) if len(self._by_block) == len(blocks) else None

    def close(self) -> None:
        """Unpin everything; nothing may be under way."""
        self._by_block, self._given_up = {}, []
        self._release()

    def _pin(self, arena: Bytes, nbytes: int) -> _PinnedArena | None:
        pinned = _PinnedArena(arena)
        if not self._can_pin or not self._stream.pin(pinned.start, nbytes):
            self._can_pin = False  # a limit on locked memory, most often: asking again would not help
            return None
        self._registered[pinned.start] = arena
        return pinned

    def _unpin_unread(self) -> None:
        """Unpin arenas that are gone and that no batch under way reads."""
        in_use, given_up = self._snapshots.named(), self._given_up
        self._given_up = [arena for arena in given_up if id(arena) in in_use]
        for arena in given_up:
            if id(arena) not in in_use:
                self._stream.unpin(arena.start)
                self._registered.pop(arena.start, None)

    def _describe(self, parts_by_field: dict[int, Parts]) -> SliceSnapshot:
        arenas = [arena for _, arena in self._by_block.values()]
        first, sources = min(arena.start for arena in arenas), {}
        for field, parts in parts_by_field.items():
            starts = [self._by_block[id(part.block)][1].start - first for part in parts]
            sources[field] = first, np.array(starts, np.int64)
        return self._snapshots.add(SliceSnapshot(sources, tuple(arenas), is_on_device=False))


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

"""Slices where a device reads them: copies of all of them on the device, or raw blocks pinned on the host.

In:  the store, as it grows.  Out: snapshots that say where each segment's slices begin.
Invariant: what is on the device is, slice for slice, what the segments hold. While a snapshot is referred to, no region
that it names is written to again, and no arena that it names is unpinned.

Slices are sent as they are written, before they are compressed: the host keeps what the budget says.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device import DeviceStream, StagingRing
from holdall.errors import DamageError
from holdall.schema import Bytes
from holdall.storage import ClosedPart, Coder, OpenPart, SliceBlock, Store, address, lies_direct

if TYPE_CHECKING:
    import torch


_FIRST_REGIONS = 4
_GROWTH = 1.5
_SENT_AT_ONCE_BYTES = 4 << 20

Parts = list[OpenPart | ClosedPart]
"""What all segments hold of one field, oldest first."""


class _Snapshots:
    """The snapshots that somebody still refers to."""

    def __init__(self) -> None:
        self._living: list[weakref.ref[DeviceSnapshot | PinnedSnapshot]] = []

    def add(self, snapshot: DeviceSnapshot | PinnedSnapshot) -> None:
        self._living = [ref for ref in self._living if ref() is not None]
        self._living.append(weakref.ref(snapshot))

    def named(self) -> set[int]:
        """Return the identities of everything that they name."""
        snapshots = [snapshot for ref in self._living if (snapshot := ref()) is not None]
        return {id(item) for snapshot in snapshots for item in snapshot.held}


class FieldOnDevice(NamedTuple):
    """One field on the device."""

    slices: torch.Tensor  # bytes
    bases: NDArray[np.int64]  # by segment: the slice of `slices` that its slice 0 is
    starts: NDArray[np.int64]  # the same in bytes


class DeviceSnapshot:
    """What was on the device at one moment; nothing of it is overwritten while this is referred to."""

    def __init__(self, fields: dict[int, FieldOnDevice], held: tuple[_Region, ...]) -> None:
        self.fields = fields
        self.held = held

    def source(self, field: int) -> tuple[int, NDArray[np.int64]] | None:
        """Return where slices of a field are, and by segment at which byte from there they begin."""
        found = self.fields.get(field)
        return None if found is None else (found.slices.data_ptr(), found.starts)


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
        self._ring = StagingRing(stream)
        self._fields: dict[int, _DeviceField] = {}
        self._snapshots = _Snapshots()
        self._version = -1
        self._snapshot: DeviceSnapshot | None = None
        self._sent: Any = None

    def up_to_date(self, store: Store) -> DeviceSnapshot:
        """Send what is new, and return where everything is."""
        segments, snapshot = store.large_segments, self._snapshot
        if snapshot is not None and segments.index.version == self._version:
            new = [field for field in snapshot.fields if self._fields[field].has_new]
            if not new:
                return snapshot
        with self._stream.active():
            if snapshot is None or segments.index.version != self._version:
                self._version, self._snapshot = segments.index.version, None  # so that this one keeps no region in use
                parts = {field: segments.parts(field) for field in range(len(segments.cursors))}
                snapshot = self._snapshot = self._follow(parts)
                new = list(snapshot.fields)
            for field in new:
                self._fields[field].send_new()
        return snapshot

    def newly_sent(self) -> Any:
        """Return an event behind what was sent since the last call; None if that was nothing."""
        before, self._sent = self._sent, self._ring.last_read
        return None if self._sent is before else self._sent

    def _follow(self, parts_by_field: dict[int, Parts]) -> DeviceSnapshot:
        fields: dict[int, FieldOnDevice] = {}
        held: list[_Region] = []
        for field, parts in parts_by_field.items():
            there = self._fields.setdefault(field, _DeviceField(self._stream, self._coder, self._ring, self._snapshots))
            window = parts[0].window
            # Slices that lie in the log itself are written lane by lane, so what was sent may still grow in between.
            if not lies_direct(window) and all(part.window == window for part in parts):
                there.follow(parts)
                fields[field] = FieldOnDevice(there.slices, there.bases, there.bases * window.slice_bytes)
                held += there.regions
        snapshot = DeviceSnapshot(fields, tuple(held))
        self._snapshots.add(snapshot)
        return snapshot


class _DeviceField:
    """The slices of one field."""

    def __init__(self, stream: DeviceStream, coder: Coder, ring: StagingRing, snapshots: _Snapshots) -> None:
        self.slices = stream.device_bytes(0)
        self.bases = np.empty(0, np.int64)
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
        self.bases = np.array([region.first_slice for region in self.regions], np.int64)
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


class PinnedSnapshot:
    """What was pinned at one moment; it stays pinned while this is referred to.

    Args:
        span: Bytes, from the lowest arena to the end of the highest.
        starts: By field and by segment, the byte of `span` where its slices begin, or -1.
    """

    def __init__(
        self, span: torch.Tensor, starts: dict[int, NDArray[np.int64]], held: tuple[_PinnedArena, ...]
    ) -> None:
        self.span = span
        self.starts = starts
        self.held = held
        self.is_whole = all((of_field >= 0).all() for of_field in starts.values())  # no segment is left out

    def source(self, field: int) -> tuple[int, NDArray[np.int64]] | None:
        """Return where the span begins, and by segment at which byte of it the slices of a field do."""
        return (self.span.data_ptr(), self.starts[field]) if self.is_whole else None


class _PinnedArena:
    """An arena that the device may read."""

    def __init__(self, arena: Bytes, nbytes: int) -> None:
        self.arena = arena
        self.nbytes = nbytes
        self.start = address(arena)
        self.end = self.start + nbytes


class PinnedArenas:
    """Pins the raw blocks of one memory's segments. Called under the memory's lock."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._by_block: dict[int, tuple[SliceBlock, _PinnedArena]] = {}
        self._given_up: list[_PinnedArena] = []
        self._snapshots = _Snapshots()
        self._can_pin = self._can_share = True
        self._registered: dict[int, Bytes] = {}
        # Memory must not be unmapped while a device may read it, even if nobody closes the store.
        self._release = weakref.finalize(self, _unpin_all, stream, self._registered, os.getpid())

    def up_to_date(self, store: Store) -> PinnedSnapshot | None:
        """Pin what is new, unpin what nobody reads any more, and return where everything is.

        It holds until segments or their blocks are others; what was returned before must not be referred to here.
        """
        segments = store.large_segments
        parts = {field: segments.parts(field) for field in range(len(segments.cursors))}
        blocks = {id(block): block for of_field in parts.values() for part in of_field if (block := _raw(part))}
        known, self._by_block = self._by_block, {}
        for key, (block, arena) in known.items():
            if key in blocks and blocks[key].arena is arena.arena:
                self._by_block[key] = (block, arena)
            else:
                self._given_up.append(arena)
        self._unpin_unread()
        growing = {id(of_field[-1].block) for of_field in parts.values()}
        for key, block in blocks.items():
            # Of a block that takes no more slices, the pages behind them were given back.
            nbytes = block.arena.nbytes if key in growing else block.used_bytes
            if key not in self._by_block and (pinned := self._pin(block.arena, nbytes)) is not None:
                self._by_block[key] = (block, pinned)
        if self._by_block and self._can_share:
            try:
                return self._describe(parts)
            except RuntimeError:  # torch's, where a device does not see the host's memory under the host's addresses
                self._can_share = False
        return None

    def close(self) -> None:
        """Unpin everything; nothing may be under way."""
        self._by_block, self._given_up = {}, []
        self._release()

    def _pin(self, arena: Bytes, nbytes: int) -> _PinnedArena | None:
        pinned = _PinnedArena(arena, nbytes)
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

    def _describe(self, parts_by_field: dict[int, Parts]) -> PinnedSnapshot:
        arenas = [arena for _, arena in self._by_block.values()]
        first, end = min(arena.start for arena in arenas), max(arena.end for arena in arenas)
        starts = {}
        for field, parts in parts_by_field.items():
            pinned = [self._by_block.get(id(part.block)) for part in parts]
            starts[field] = np.array([-1 if entry is None else entry[1].start - first for entry in pinned], np.int64)
        snapshot = PinnedSnapshot(self._stream.view_host(first, end - first), starts, tuple(arenas))
        self._snapshots.add(snapshot)
        return snapshot


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

"""The mirror: every slice of the large fields on a device, raw, as the segments name them.

In:  the store, as it grows.  Out: where each segment's slices begin in one large tensor a field.
Invariant: what is on the device is, slice for slice, what the segments hold. A region is written to
again only when its block was evicted and nobody holds on to what was said of it.

Slices are sent as they are written, before they are compressed: the host keeps what the budget says.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device import DeviceStream, StagingBuffer
from holdall.errors import DamageError
from holdall.schema import Bytes
from holdall.storage.blocks import Coder, SliceBlock, address
from holdall.storage.slices import ClosedPart, OpenPart, lies_direct
from holdall.storage.store import Store

if TYPE_CHECKING:
    import torch


_FIRST_REGIONS = 4
_GROWTH = 1.5
_SENT_AT_ONCE_BYTES = 4 << 20


class MirroredField(NamedTuple):
    """One field on the device."""

    slices: torch.Tensor  # bytes
    bases: NDArray[np.int64]  # by segment: the slice of `slices` that its slice 0 is


class Mirrored(NamedTuple):
    """What was on the device at one moment; nothing of it is overwritten while this is referred to."""

    fields: dict[int, MirroredField]
    held: tuple[_Region, ...]


class _Region:
    """Room for one block's slices."""

    def __init__(self, first_slice: int) -> None:
        self.first_slice = first_slice
        self.sent = 0


class DeviceMirror:
    """Keeps a device up to date with the segments of one memory. Called under the memory's lock."""

    def __init__(self, line: DeviceStream, coder: Coder) -> None:
        self._line = line
        self._coder = coder
        self._passage = StagingBuffer(line)
        self._fields: dict[int, _FieldMirror] = {}
        self._version = -1
        self._mirrored: Mirrored | None = None

    def brought_up_to_date(self, store: Store) -> Mirrored:
        """Send what is new, and say where everything is."""
        segments = store.large_segments
        with self._line.at_work():
            if self._mirrored is None or segments.version != self._version:
                self._version, self._mirrored = segments.version, None  # nothing said so far keeps a region taken
                parts = {field: segments.parts(field) for field in range(store.large_fields)}
                self._mirrored = self._follow(parts)
            for field in self._mirrored.fields:
                self._fields[field].send_new()
        return self._mirrored

    def _follow(self, parts_by_field: dict[int, list[OpenPart | ClosedPart]]) -> Mirrored:
        fields: dict[int, MirroredField] = {}
        held: list[_Region] = []
        for field, parts in parts_by_field.items():
            mirror = self._fields.setdefault(field, _FieldMirror(self._line, self._coder, self._passage))
            window = parts[0].window
            # Slices that lie in the log itself are written lane by lane, so what was sent may still grow in between.
            if not lies_direct(window) and all(part.window == window for part in parts):
                mirror.follow(parts)
                fields[field] = MirroredField(mirror.slices, mirror.bases)
                held += mirror.regions
        return Mirrored(fields, tuple(held))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(mirror.slices.numel() for mirror in self._fields.values())


class _FieldMirror:
    """The slices of one field."""

    def __init__(self, line: DeviceStream, coder: Coder, passage: StagingBuffer) -> None:
        self.slices = line.device_bytes(0)
        self.bases = np.empty(0, np.int64)
        self.regions: list[_Region] = []
        self._line = line
        self._coder = coder
        self._passage = passage
        self._slice_bytes = 0
        self._room = 0  # slices of a region
        self._all: list[_Region] = []
        self._by_block: dict[int, tuple[SliceBlock, _Region]] = {}  # with the block, so that its id is nobody else's
        self._parts: list[OpenPart | ClosedPart] = []

    def follow(self, parts: list[OpenPart | ClosedPart]) -> None:
        """Give blocks that are new a region, and take back those of blocks that are gone."""
        slice_bytes = parts[0].window.slice_bytes
        room = max(_block(part).capacity for part in parts)
        if slice_bytes != self._slice_bytes or room > self._room:
            self._begin_anew(slice_bytes, room)
        sources = {id(_block(part)): _block(part) for part in parts}
        kept = {key: entry for key, entry in self._by_block.items() if key in sources}
        self._by_block, self.regions = kept, []
        for key, source in sources.items():
            if key not in kept:
                kept[key] = (source, self._free_region())
        self.regions = [kept[id(_block(part))][1] for part in parts]
        self.bases = np.array([region.first_slice for region in self.regions], np.int64)
        self._parts = parts
        for part, region in zip(parts[:-1], self.regions, strict=False):
            self._send_up_to(part, region, _block(part).used)

    def send_new(self) -> None:
        """Send the slices that were written since the last call; only the open segment grows."""
        self._send_up_to(self._parts[-1], self.regions[-1], _block(self._parts[-1]).used)

    def _send_up_to(self, part: OpenPart | ClosedPart, region: _Region, used: int) -> None:
        while region.sent < used:
            self._send(part, region, min(used, region.sent + max(1, _SENT_AT_ONCE_BYTES // self._slice_bytes)))

    def _send(self, part: OpenPart | ClosedPart, region: _Region, end: int) -> None:
        first, nbytes = region.sent, (end - region.sent) * self._slice_bytes
        self._passage.make_room(nbytes)
        out: Bytes = self._passage.array[:nbytes].reshape(-1, self._slice_bytes)
        block = _block(part)
        if block.sealed is not None:
            self._coder.decode(block.sealed, np.arange(first, end), out)
        else:
            out[:] = block.arena[first * self._slice_bytes : end * self._slice_bytes].reshape(out.shape)
        place = (region.first_slice + first) * self._slice_bytes
        self.slices[place : place + nbytes].copy_(self._passage.host[:nbytes], non_blocking=True)
        self._passage.left = self._line.mark()
        region.sent = end

    def _free_region(self) -> _Region:
        for position in range(len(self._all)):
            # One reference by the list, one by the call: no block has it, and nobody reads it.
            if sys.getrefcount(self._all[position]) <= 2:
                self._all[position].sent = 0
                return self._all[position]
        if len(self._all) * self._room * self._slice_bytes == self.slices.numel():
            self._grow(max(_FIRST_REGIONS, int(len(self._all) * _GROWTH)))
        region = _Region(len(self._all) * self._room)
        self._all.append(region)
        return region

    def _grow(self, regions: int) -> None:
        larger = self._line.device_bytes(regions * self._room * self._slice_bytes)
        larger[: self.slices.numel()].copy_(self.slices)
        self.slices = larger

    def _begin_anew(self, slice_bytes: int, room: int) -> None:
        """Slices are cut in another way, or blocks are larger: nothing stays where it was."""
        self._slice_bytes, self._room = slice_bytes, room
        self._all, self._by_block, self.regions = [], {}, []
        self.slices = self._line.device_bytes(0)


def _block(part: OpenPart | ClosedPart) -> SliceBlock:
    if part.block is None:
        raise DamageError("slices that lie in the log itself were to be mirrored; report this")
    return part.block


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

    def __init__(self, line: DeviceStream) -> None:
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


def _unpin_all(line: DeviceStream, registered: dict[int, Bytes], process: int) -> None:
    if registered and process == os.getpid():  # a forked child has no part in the device
        line.wait(line.mark())  # batches that were handed out may still be read from here
        for start in registered:
            line.unpin(start)
    registered.clear()

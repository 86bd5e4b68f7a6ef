"""Reels: the unique slices of a rollout's field, and logs of their numbers.

In:  observations of all lanes, tick by tick.  Out: rows of given places (tick * lanes + lane).
Invariant: an observation continues its lane's last one only where the bytes say so, else it is written
whole. A reel is filled once a rollout; its memory is that of the rollout before.

Parts and blocks are those of the replay memory (part.py, slices.py). A part takes pairs of an
observation and the next one; here each tick is the next one of the tick before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, DamageError
from holdall.native.codec import NativeCoder
from holdall.native.kernels import chosen_kernels
from holdall.native.rollout import TrackStruct, rollout_loops
from holdall.report import FieldReport
from holdall.schema import Array, Leaf, as_bytes
from holdall.storage.blocks import FrozenBlock, SealedSlices, SliceBlock, address, reserve
from holdall.storage.codec import COST_CAPS
from holdall.storage.layout import Window, WindowScout
from holdall.storage.sealer import Sealer
from holdall.storage.slices import NEXT_IS_WHOLE, Cursors, Kernels, OpenPart, lies_direct
from holdall.threads import ThreadPool

REEL_FIELDS = ("log", "log_rows", "slices", "slice_count", "sealed")
"""Columns of a table of reels, in the order of `reel` in track.c."""

_SPARE_ROOM = 0.25
"""Slices beyond one new one per step that a reel has room for: episodes that begin, steps that skip."""
_SEALED_REEL_BYTES = 16 * 2**20
"""Slices of a reel that is to be compressed once it is full."""
_FEWEST_CHANNELS = 4
"""Channels from which on parting them in C is faster than NumPy's own copy."""
_ALONE = ThreadPool(hands=1)


@dataclass(slots=True)
class _FrameLog:
    """A part, and once it is compressed what is left of it."""

    part: OpenPart
    log: NDArray[np.uint32] | None = None  # its own, once the part was handed on
    sealed: SealedSlices | None = None

    def record(self) -> list[int]:
        """Describe the reel to track.c."""
        if self.sealed is not None and self.log is not None:
            return [self.log.ctypes.data, len(self.log), 0, self.sealed.count, self.sealed.address]
        part = self.part
        start = 0 if part.log is None else part.log.ctypes.data
        count = part.slices.size // part.window.slice_bytes
        return [start, part.log_rows, part.slices.ctypes.data, count, 0]


class RolloutFrames:
    """One field's reels: one, or many small ones where they are compressed."""

    def __init__(
        self, leaf: Leaf, window: Window, ticks: int, lanes: int, kernels: Kernels, sealer: Sealer | None
    ) -> None:
        self._leaf = leaf
        self._window = window
        self._ticks = ticks
        self._lanes = lanes
        self._kernels = kernels
        self._sealer = None if lies_direct(window) else sealer
        self._cursors: Cursors = reserve(ticks * lanes * 4).view(np.uint32).reshape(ticks, lanes)
        self._reel_by_tick = np.zeros(ticks, np.int32)
        self._newest, self._coming = (np.zeros((lanes, *leaf.shape), leaf.dtype) for _ in range(2))
        self._loops = rollout_loops()
        self._pixel_by_pixel = _interleaved_strides(leaf)
        self._reels: list[_FrameLog] = []
        self._spare: list[OpenPart] = []
        self._table: NDArray[np.int64] | None = None
        self._struct = TrackStruct(
            reel_by_tick=address(self._reel_by_tick),
            cursors=address(self._cursors),
            ticks=ticks,
            lanes=lanes,
            outer=window.outer,
            run_bytes=window.run_bytes,
            window=window.count,
            shift=window.shift,
        )

    def write(self, tick: int, obs: Array) -> None:
        """Write one tick; it is read once, so whoever owns it may change it afterwards."""
        self._take_in(obs)
        before = self._newest
        if not self._reels or not self._reels[-1].part.has_room():
            self._open_reel()
            before = self._coming
        self._reels[-1].part.append(before, self._coming, self._cursors[tick])
        self._reel_by_tick[tick] = len(self._reels) - 1
        self._newest, self._coming = self._coming, self._newest
        self._table = None

    def read(self, tick: int) -> Array:
        """Return a copy of one tick."""
        places = np.arange(tick * self._lanes, (tick + 1) * self._lanes)
        out = np.empty((self._lanes, *self._leaf.shape), self._leaf.dtype)
        self.gather(places, out, _ALONE)
        return out

    def gather(self, places: NDArray[np.int64], out: Array, crew: ThreadPool) -> None:
        """Copy the rows of `places` to `out`; a negative place gives zeros."""
        loops, coder = rollout_loops(), self._kernels.coder
        sealed = any(reel.sealed is not None for reel in self._reels)
        if loops is None or (sealed and not isinstance(coder, NativeCoder)):
            self._gather_portably(places, out)
            return
        table = self._index()
        self._struct.reels, self._struct.reel_count = address(table), len(table)
        track, first_place, first_row = ctypes.addressof(self._struct), address(places), address(out)
        scratch_bytes = 3 * self._leaf.nbytes

        def fill(first: int, end: int) -> None:
            decoder = coder.reading(scratch_bytes)[0] if sealed and isinstance(coder, NativeCoder) else 0
            failed = loops.gather_track(track, first_place, first, end, first_row, decoder)
            if failed >= 0:
                raise _outside(int(failed))

        crew.share(fill, len(places), out.nbytes)

    def reset(self) -> None:
        """Forget every tick and keep the memory."""
        self.drain()
        for reel in self._reels:
            if reel.sealed is None:
                self._keep_spare(reel.part)
        self._reels.clear()
        self._table = None

    def fits(self) -> bool:
        """Whether observations overlap as the window says."""
        steps = sum(reel.part.steps for reel in self._reels if reel.sealed is None)
        broken = sum(reel.part.broken_steps for reel in self._reels if reel.sealed is None)
        return self._window.count > 1 and broken * 2 <= steps

    def drain(self) -> None:
        """Wait until every full reel is compressed."""
        if self._sealer is not None:
            self._sealer.drain()

    def used_bytes(self, _ticks: int) -> tuple[int, int, int]:
        """Return the bytes of slices, of logs and cursors, and of rows."""
        slices = sum(reel.part.used_bytes if reel.sealed is None else reel.sealed.nbytes for reel in self._reels)
        logs = sum(reel.part.log_bytes if reel.log is None else reel.log.nbytes for reel in self._reels)
        return slices, logs + self._cursors.nbytes, 0

    def arrays(self) -> list[Array]:
        """Return the arrays that the field lies in."""
        found: list[Array] = [self._cursors, self._reel_by_tick, self._newest, self._coming]
        for part in [*(reel.part for reel in self._reels if reel.sealed is None), *self._spare]:
            found += [array for array in (part.slices, part.log) if array is not None]
        for reel in self._reels:
            if reel.sealed is not None:
                found += [*reel.sealed.arrays(), *([] if reel.log is None else [reel.log])]
        return found

    def describe(self) -> str:
        """Say how the field lies, for people."""
        sealed = [reel.sealed for reel in self._reels if reel.sealed is not None]
        kinds = sorted({slices.codec.describe() for slices in sealed})
        ending = f"; {len(sealed)} of {len(self._reels)} reels sealed by {', '.join(kinds)}" if sealed else ""
        return self._window.describe() + ending

    def seal(self, block: SliceBlock, sealed: SealedSlices) -> bool:
        """Change over to the sealed form of a reel's slices; False if the block is none of this field's.

        Called by the sealer's thread, while the caller of `write` may open the next reel; readers
        drain the sealer first.
        """
        for reel in self._reels:
            if reel.sealed is None and reel.part.block is block:
                part = reel.part
                reel.log = None if part.log is None else part.log[: part.longest].copy()
                reel.sealed = sealed
                self._table = None
                self._keep_spare(part)
                return True
        return False

    def _take_in(self, obs: Array) -> None:
        """Copy a tick to where it is compared and cut, in the order in which it is stored."""
        if self._loops is not None and obs.strides == self._pixel_by_pixel:
            channels, *image = self._leaf.shape
            start, to = obs.ctypes.data, address(self._coming)
            self._loops.part_channels(start, to, self._lanes, prod(image), channels)
        else:
            np.copyto(self._coming, obs)

    def _open_reel(self) -> None:
        """Go on in memory of an earlier rollout, or in new."""
        if self._reels and self._sealer is not None and (block := self._reels[-1].part.block) is not None:
            self._sealer.submit(FrozenBlock(id(self), self._leaf, self._window, block, self._lanes))
            self._sealer.wait_for_room()
        part = self._spare.pop() if self._spare else self._new_part()
        self._reels.append(_FrameLog(part))

    def _new_part(self) -> OpenPart:
        window, lanes = self._window, self._lanes
        room = lanes * (int(self._ticks * window.shift * (1 + _SPARE_ROOM)) + 8 * window.count)
        if self._sealer is not None:
            room = max(_SEALED_REEL_BYTES // window.slice_bytes, 8 * window.count * lanes)
        arena_bytes = room * window.slice_bytes
        if lies_direct(window):
            return self._kernels.new_part(window, lanes, None, arena_bytes)
        block = self._kernels.new_block(window.slice_bytes, reserve(arena_bytes))
        return self._kernels.new_part(window, lanes, block, arena_bytes)

    def _keep_spare(self, part: OpenPart) -> None:
        part.clear()
        self._spare.append(part)

    def _index(self) -> NDArray[np.int64]:
        if self._table is None:
            self._table = np.array([reel.record() for reel in self._reels], np.int64).reshape(-1, len(REEL_FIELDS))
        return self._table

    def _gather_portably(self, places: NDArray[np.int64], out: Array) -> None:
        """Do what track.c does, reel by reel."""
        window, lanes = self._window, self._lanes
        rows = out.reshape(len(places), -1).view(np.uint8)
        rows[places < 0] = 0
        wanted = np.flatnonzero(places >= 0)
        if len(wanted) and places[wanted].max() >= self._ticks * lanes:
            raise _outside(int(wanted[0]))
        tick, lane = np.divmod(places[wanted], lanes)
        cursor = self._cursors.reshape(-1)[places[wanted]]
        whole = (cursor & NEXT_IS_WHOLE) != 0
        start = (cursor & ~NEXT_IS_WHOLE).astype(np.int64) + np.where(whole, window.count, window.shift)
        entry = (start[:, None] + np.arange(window.count)) * lanes + lane[:, None]
        for position in np.unique(self._reel_by_tick[tick]).tolist():
            here = np.flatnonzero(self._reel_by_tick[tick] == position)
            cut = self._slices(self._reels[position], entry[here])
            rows[wanted[here]] = cut.transpose(0, 2, 1, 3).reshape(len(here), -1)

    def _slices(self, reel: _FrameLog, entry: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Copy slices out of a reel: (rows, window, outer, run_bytes)."""
        log = reel.part.log if reel.log is None else reel.log
        number = entry if log is None else log.reshape(-1)[entry].astype(np.int64)
        outer, run_bytes = self._window.outer, self._window.run_bytes
        if reel.sealed is None:
            count = reel.part.slices.size // self._window.slice_bytes
            slices = reel.part.slices[: count * self._window.slice_bytes]
        else:
            unique, number = np.unique(number, return_inverse=True)
            slices = np.empty((len(unique), outer * run_bytes), np.uint8)
            self._kernels.coder.decode(reel.sealed, unique, slices)
            number = number.reshape(entry.shape)
        return np.asarray(slices.reshape(-1, outer, run_bytes)[number], np.uint8)


def _interleaved_strides(leaf: Leaf) -> tuple[int, ...] | None:
    """Return the strides of images with channels first that lie pixel by pixel; None where there are few channels."""
    if len(leaf.shape) != 3 or leaf.dtype.itemsize != 1 or leaf.shape[0] < _FEWEST_CHANNELS:
        return None
    channels, _, width = leaf.shape
    return leaf.nbytes, 1, width * channels, channels


def _outside(row: int) -> DamageError:
    return DamageError(
        f"row {row} of the batch points outside the rollout, or its bytes are damaged; nothing of the batch is "
        "returned. Call reset() and collect again, and report this"
    )


_TINY_BYTES = 256
"""Fields up to this size lie in flat rows, whatever they hold."""
_SMALL_BYTES = 4096
"""Fields up to this size lie in flat rows unless a window is found; larger ones are always cut into slices."""


class FlatRows:
    """A field whose observations lie one after another, as in a plain array."""

    def __init__(self, leaf: Leaf, ticks: int, lanes: int) -> None:
        self._lanes = lanes
        self._rows = reserve(ticks * lanes * leaf.nbytes).view(leaf.dtype).reshape(ticks, lanes, *leaf.shape)
        self._flat = self._rows.reshape(ticks * lanes, *leaf.shape)
        self._row_bytes = leaf.nbytes

    def write(self, tick: int, obs: Array) -> None:
        """Write one tick."""
        self._rows[tick] = obs

    def read(self, tick: int) -> Array:
        """Return one tick; it is not to be written to."""
        return np.asarray(self._rows[tick])

    def gather(self, places: NDArray[np.int64], out: Array, _crew: ThreadPool) -> None:
        """Copy the rows of `places` to `out`; a negative place gives zeros."""
        self._flat.take(places, axis=0, out=out, mode="clip")
        if len(places) and places.min() < 0:
            out[places < 0] = 0

    def reset(self) -> None:
        """Begin anew: there is nothing to forget."""

    def fits(self) -> bool:
        """Whether the layout suits what was written: nothing is known against it."""
        return True

    def drain(self) -> None:
        """Wait for nothing."""

    def used_bytes(self, ticks: int) -> tuple[int, int, int]:
        """Return the bytes of slices, logs and rows that `ticks` ticks take."""
        return 0, 0, ticks * self._lanes * self._row_bytes

    def arrays(self) -> list[Array]:
        """Return the arrays that the field lies in."""
        return [self._rows]

    def describe(self) -> str:
        """Say how the field lies, for people."""
        return "flat rows"


class RolloutField:
    """One field in the layout that suits it, which its first steps decide."""

    def __init__(self, leaf: Leaf, ticks: int, lanes: int, kernels: Kernels, sealer: Sealer | None) -> None:
        self.leaf = leaf
        self._ticks = ticks
        self._lanes = lanes
        self._kernels = kernels
        self._sealer = sealer
        flat = leaf.nbytes <= _SMALL_BYTES
        self._rows: FlatRows | RolloutFrames = (
            FlatRows(leaf, ticks, lanes)
            if flat
            else RolloutFrames(leaf, Window.whole(leaf), ticks, lanes, kernels, sealer)
        )
        self._scout = WindowScout(leaf) if leaf.nbytes > _TINY_BYTES else None
        self._rollouts = 0
        self._searches = 1

    def write(self, tick: int, obs: Array) -> None:
        """Write the observations of one tick, of exactly the leaf's shape and dtype; ticks come in order."""
        self._rows.write(tick, obs)
        if self._scout is None or tick == 0:
            return
        self._scout.look(*(as_bytes(self._rows.read(t), self._lanes) for t in (tick - 1, tick)))
        if self._scout.done:
            finding, self._scout = self._scout.finding, None
            if finding is not None:
                self._lie_along(finding, tick)

    def gather(self, places: NDArray[np.int64], out: Array, crew: ThreadPool) -> None:
        """Copy the rows of `places`, a contiguous array, to `out`; a negative place gives zeros."""
        self._rows.gather(places, out, crew)

    def reset(self) -> None:
        """Forget every tick; look for a window again where none was found or the one found does not fit."""
        self._rollouts += 1
        resting = self._rollouts < 1 << self._searches  # ever longer, since every search was in vain so far
        if self._scout is None and not resting and self.leaf.nbytes > _TINY_BYTES and not self._rows.fits():
            self._searches += 1
            self._scout = WindowScout(self.leaf)
        self._rows.reset()

    def drain(self) -> None:
        """Wait until everything that is to be compressed is."""
        self._rows.drain()

    def seal(self, block: SliceBlock, sealed: SealedSlices) -> bool:
        """Take over sealed slices; False if the block is none of this field's."""
        return isinstance(self._rows, RolloutFrames) and self._rows.seal(block, sealed)

    @property
    def name(self) -> str:
        """What reports call the field."""
        return f"obs.{self.leaf.name}" if self.leaf.name else "obs"

    def arrays(self) -> list[Array]:
        """Return the arrays that the field lies in."""
        return self._rows.arrays()

    def report(self, ticks: int) -> FieldReport:
        """Account for the field's bytes."""
        plain = ticks * self._lanes * self.leaf.nbytes
        return FieldReport(self.name, *self._rows.used_bytes(ticks), plain, self._rows.describe())

    def _lie_along(self, window: Window, tick: int) -> None:
        """Write what came so far again, cut by `window`."""
        old = self._rows
        old.drain()
        self._rows = RolloutFrames(self.leaf, window, self._ticks, self._lanes, self._kernels, self._sealer)
        for past in range(tick + 1):
            self._rows.write(past, old.read(past))


class RolloutFields:
    """All observation fields of a rollout, and the threads that serve them.

    Args:
        compress: How dear reading may be made, over a raw gather, to take less memory: a key of
            `COST_CAPS`; None leaves everything raw.
    """

    def __init__(self, leaves: Sequence[Leaf], ticks: int, lanes: int, compress: str | None) -> None:
        if compress is not None and compress not in COST_CAPS:
            raise ArgumentError(
                f"compress ({compress!r}) must be None or one of {sorted(COST_CAPS)}; pass one of these"
            )
        kernels = chosen_kernels()
        self._crew = ThreadPool()
        self.sealer = None
        if compress is not None:
            self.sealer = Sealer(kernels.coder, COST_CAPS[compress], self._crew.hands, self._on_sealed)
        self._tracks = [RolloutField(leaf, ticks, lanes, kernels, self.sealer) for leaf in leaves]

    def write(self, tick: int, obs: Sequence[Array]) -> None:
        """Write the observations of one tick, leaf by leaf."""
        for track, rows in zip(self._tracks, obs, strict=True):
            track.write(tick, rows)

    def gather(self, field: int, places: NDArray[np.int64], out: Array) -> None:
        """Copy one field's rows of `places` to `out`; a negative place gives zeros."""
        self._tracks[field].gather(places, out, self._crew)

    def reset(self) -> None:
        """Forget every tick, keep the memory."""
        for track in self._tracks:
            track.reset()

    def drain(self) -> None:
        """Wait until everything that is to be compressed is; to be called before `gather`."""
        for track in self._tracks:
            track.drain()

    def report(self, ticks: int) -> list[FieldReport]:
        """Account for every field."""
        return [track.report(ticks) for track in self._tracks]

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, by field."""
        return [(track.name, array) for track in self._tracks for array in track.arrays()]

    def close(self) -> None:
        """End the threads."""
        if self.sealer is not None:
            self.sealer.stop()
        self._crew.dismiss()

    def _on_sealed(self) -> None:
        """Hand sealed slices to the fields they belong to; called by the sealer's thread."""
        for block, sealed in [] if self.sealer is None else self.sealer.collect():
            if sealed is not None:
                any(track.seal(block, sealed) for track in self._tracks)

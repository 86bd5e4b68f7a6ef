"""Tracks: one observation field of a rollout, each frame stored once.

In:  observations of all lanes, tick by tick.  Out: rows of given places (tick * lanes + lane).
Invariant: a row is bit for bit what was written. `reset` gives no memory back and takes none: the
next rollout is written over the last one.

A rollout lives for seconds and is read a few times, so the machinery around it is light: no eviction,
no ring, one block of slices that is filled from the start again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.experience.arena import as_bytes, reserve
from holdall.experience.crew import Crew
from holdall.experience.kernels import chosen_kernels
from holdall.experience.part import Kernels
from holdall.experience.sealing.choice import COST_CAPS
from holdall.experience.sealing.seal import Sealer
from holdall.experience.sealing.sealed import SealedSlices
from holdall.experience.slices import SliceBlock
from holdall.experience.trajectory.reels import Reels
from holdall.experience.window import Window, WindowScout
from holdall.report import FieldReport
from holdall.schema import Array, Leaf

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

    def gather(self, places: NDArray[np.int64], out: Array, _crew: Crew) -> None:
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


class Track:
    """One field in the layout that suits it, which its first steps decide."""

    def __init__(self, leaf: Leaf, ticks: int, lanes: int, kernels: Kernels, sealer: Sealer | None) -> None:
        self.leaf = leaf
        self._ticks = ticks
        self._lanes = lanes
        self._kernels = kernels
        self._sealer = sealer
        flat = leaf.nbytes <= _SMALL_BYTES
        self._rows: FlatRows | Reels = (
            FlatRows(leaf, ticks, lanes) if flat else Reels(leaf, Window.whole(leaf), ticks, lanes, kernels, sealer)
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

    def gather(self, places: NDArray[np.int64], out: Array, crew: Crew) -> None:
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
        return isinstance(self._rows, Reels) and self._rows.seal(block, sealed)

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
        self._rows = Reels(self.leaf, window, self._ticks, self._lanes, self._kernels, self._sealer)
        for past in range(tick + 1):
            self._rows.write(past, old.read(past))


class Tracks:
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
        self._crew = Crew()
        self.sealer = None
        if compress is not None:
            self.sealer = Sealer(kernels.coder, COST_CAPS[compress], self._crew.hands, self._seal)
        self._tracks = [Track(leaf, ticks, lanes, kernels, self.sealer) for leaf in leaves]

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

    def _seal(self, block: SliceBlock, sealed: SealedSlices | None) -> None:
        """Hand sealed slices to the field they belong to; called by the sealer's thread."""
        if sealed is not None:
            any(track.seal(block, sealed) for track in self._tracks)

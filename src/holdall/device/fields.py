"""Fields of a memory on a device: tensors of rows, and observations of which every slice is stored once.

Tick `t` of a field is stored at index `t % slots`. There is one slot more than ticks that are held, so a tick that is
being written, or whose writing was interrupted, overwrites nothing that is held.

Observations are stored as slices in a ring buffer. A tick writes the slices that are new, and for every transition the
places of its observation and of its next observation. Most observations are the next observation of the tick before, or
overlap it. The device compares them, so nothing waits for the device, and the host does not know how many slices a tick
wrote. It counts with the worst case, see `Room`.

Writing a tick twice gives the same result as writing it once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from holdall.delivery.staging import torch_dtype
from holdall.delivery.words import as_words, choose_stored_dtype, choose_word, from_words
from holdall.schema import Leaf
from holdall.store.windows import Window

PLACE_BYTES = 4
"""Bytes of a place, which is an int32."""


class Clock(NamedTuple):
    """Where some ticks are written, as tensors of indices."""

    ticks: int  # Number of ticks.
    previous: torch.Tensor  # (1,): slot of the tick before.
    slots: torch.Tensor  # (ticks,)
    heads: torch.Tensor  # (ticks + 1,): where `heads` has the number of slices before each tick, and after the last.


class RowField:
    """One row per transition: an action leaf, the reward or an extra."""

    def __init__(self, leaf: Leaf, lanes: int, slots: int, device: torch.device) -> None:
        self.leaf = leaf
        self._slots = slots
        self._dtype = torch_dtype(leaf.dtype)
        self._stored = choose_stored_dtype(self._dtype, leaf.nbytes)
        width = leaf.nbytes // self._stored.itemsize
        shape = leaf.shape if self._stored.itemsize == self._dtype.itemsize else (width,)
        self._rows = torch.zeros((slots * lanes, *shape), dtype=self._stored, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._rows.nbytes

    def write(self, clock: Clock, rows: torch.Tensor) -> None:
        """Write the rows of some ticks, (ticks, lanes, ...)."""
        by_slot = self._rows.view(self._slots, -1)
        by_slot.index_copy_(0, clock.slots, as_words(rows, clock.ticks, self._stored))

    def read(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the rows in some cells: slot * lanes + lane."""
        rows = self._rows.index_select(0, cells)
        if self._stored == self._dtype:
            return rows
        return from_words(rows, self._dtype, self.leaf.shape)

    def put(self, cells: torch.Tensor, rows: torch.Tensor, order: torch.Tensor) -> None:
        """Overwrite the rows in some cells, all of them different, with `rows` in some order."""
        if len(cells):
            words = as_words(rows, len(rows), self._stored).index_select(0, order)
            self._rows[cells] = words.view(len(cells), *self._rows.shape[1:])


class FlagField:
    """Several flags per transition."""

    def __init__(self, count: int, lanes: int, slots: int, device: torch.device) -> None:
        self._lanes = lanes
        self._flags = torch.zeros((count, slots * lanes), dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._flags.nbytes

    def write(self, clock: Clock, *flags: torch.Tensor) -> None:
        """Write the flags of some ticks, each (ticks, lanes)."""
        by_slot = self._flags.view(len(flags), -1, self._lanes)
        by_slot.index_copy_(1, clock.slots, torch.stack(flags))

    def read(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the flags in some cells, (flags, cells)."""
        return self._flags.index_select(1, cells)

    def put(self, cells: torch.Tensor, flags: torch.Tensor) -> None:
        """Overwrite the flags in some cells, (flags, cells), all of the cells different."""
        self._flags[:, cells] = flags


class ObservationField(ABC):
    """The observations of one leaf. Immutable, except for the contents of its tensors.

    Places are kept in `starts`, (2, slots * lanes) int32: where the observation and the next observation of a
    transition begin. `starts` belongs to the caller.

    Attributes:
        window: How an observation is cut into slices.
        heads: Number of slices that were written before tick t, at index t % len(heads).
    """

    def __init__(self, leaf: Leaf, window: Window, lanes: int, slices: torch.Tensor, heads: torch.Tensor) -> None:
        self.leaf = leaf
        self.window = window
        self.heads = heads
        self._lanes = lanes
        self._slices = slices
        self._dtype = torch_dtype(leaf.dtype)
        self._lane_numbers = torch.arange(lanes, device=slices.device)

    @property
    def places(self) -> int:
        """Slices that fit."""
        return len(self._slices)

    @property
    def max_new_slices(self) -> int:
        """Slices that one tick may write."""
        return 2 * self.window.count * self._lanes

    @property
    def slice_bytes(self) -> int:
        """Bytes of all slices on the device."""
        return self._slices.nbytes

    @property
    def log_bytes(self) -> int:
        """Bytes of everything else on the device."""
        return self.heads.nbytes

    @abstractmethod
    def write(
        self, clock: Clock, starts: torch.Tensor, obs: torch.Tensor, next_obs: torch.Tensor, *, has_previous: bool
    ) -> None:
        """Write the observations of some ticks, (ticks, lanes, ...).

        There must be room for the most slices that the ticks may need. `has_previous` says whether the tick before
        the first one was written.
        """

    @abstractmethod
    def read(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the observations that begin at `starts`."""

    @abstractmethod
    def grow(self, starts: torch.Tensor, places: int, tail: int) -> tuple[ObservationField, torch.Tensor]:
        """Return a copy with more places, and its `starts`. Waits for the device.

        `tail` is the index in `heads` of the oldest tick whose slices are needed.
        """

    def _copy_slices(self, places: int, tail: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return longer slices that begin with the oldest one, their heads, and the place of the oldest one before."""
        oldest = int(self.heads[tail])
        place = oldest % self.places
        slices = self._slices.new_empty((places, self._slices.shape[1]))
        kept = self.places - place
        slices[:kept] = self._slices[place:]
        slices[kept : self.places] = self._slices[:place]
        return slices, self.heads - oldest, place


class WholeField(ObservationField):
    """Observations that are stored whole. `starts` are places of slices."""

    def __init__(self, leaf: Leaf, window: Window, lanes: int, slices: torch.Tensor, heads: torch.Tensor) -> None:
        super().__init__(leaf, window, lanes, slices, heads)
        # Added up over lanes, this is the number of the last next observation of a tick.
        self._first_counts = torch.zeros(lanes, dtype=torch.int64, device=slices.device)
        self._first_counts[0] = lanes - 1

    @classmethod
    def allocate(cls, leaf: Leaf, lanes: int, places: int, heads: int, device: torch.device) -> WholeField:
        """Return an empty field."""
        word = choose_word(leaf.nbytes)
        slices = torch.zeros((places, leaf.nbytes // word.itemsize), dtype=word, device=device)
        counts = torch.zeros(heads, dtype=torch.int64, device=device)
        return cls(leaf, Window.whole(leaf), lanes, slices, counts)

    def write(
        self, clock: Clock, starts: torch.Tensor, obs: torch.Tensor, next_obs: torch.Tensor, *, has_previous: bool
    ) -> None:
        """See `ObservationField`."""
        lanes = self._lanes
        ticks = clock.ticks
        rows = as_words(obs, ticks * lanes, self._slices.dtype)
        next_rows = as_words(next_obs, ticks * lanes, self._slices.dtype)
        by_slot = starts.view(2, -1, lanes)
        previous = by_slot[1].index_select(0, clock.previous)
        expected = self._slices.index_select(0, previous.view(-1))
        if ticks > 1:
            expected = torch.cat([expected, next_rows[:-lanes]])
        is_new = (expected != rows).any(1).view(ticks, lanes)
        if not has_previous:
            is_new[0] = True
        # The slices of a tick are the next observations of all lanes, and then the observations that do not continue.
        # `numbers` counts them from the first slice of the tick on: for each lane, of both of its observations.
        counts = (self._first_counts + is_new).cumsum(1)
        numbers = torch.stack([counts, self._lane_numbers.expand(ticks, lanes)])
        first = self.heads.index_select(0, clock.heads[:1])
        if ticks == 1:
            firsts = first
        else:
            totals = numbers[0, :, -1] + 1
            firsts = (first + totals.cumsum(0) - totals).unsqueeze(1)
        numbers = firsts + numbers
        places = numbers % self.places
        before = previous if ticks == 1 else torch.cat([previous, places[1, :-1]])
        places[0] = torch.where(is_new, places[0], before)
        # An observation that continues is written to its own place again, with the same bits.
        self._slices.index_copy_(0, places[0].view(-1), rows)
        self._slices.index_copy_(0, places[1].view(-1), next_rows)
        by_slot.index_copy_(1, clock.slots, places.to(torch.int32))
        ends = numbers[0, :, -1] + 1
        self.heads.index_copy_(0, clock.heads[1:], ends)

    def read(self, starts: torch.Tensor) -> torch.Tensor:
        """See `ObservationField`."""
        return from_words(self._slices.index_select(0, starts), self._dtype, self.leaf.shape)

    def grow(self, starts: torch.Tensor, places: int, tail: int) -> tuple[ObservationField, torch.Tensor]:
        """See `ObservationField`."""
        slices, heads, oldest = self._copy_slices(places, tail)
        grown = WholeField(self.leaf, self.window, self._lanes, slices, heads)
        return grown, (starts - oldest) % self.places


class WindowField(ObservationField):
    """Observations that are stored as slices of a window.

    Every lane has a log: a ring buffer of places of slices, in the order in which observations used them. The first
    `window.count` entries of the ring buffer are repeated after its end, so the entries of an observation always follow
    each other. `starts` are positions in the logs of all lanes, one after another.
    """

    def __init__(
        self,
        leaf: Leaf,
        window: Window,
        lanes: int,
        slices: torch.Tensor,
        heads: torch.Tensor,
        log: torch.Tensor,
    ) -> None:
        super().__init__(leaf, window, lanes, slices, heads)
        width = (len(log) - 1) // lanes  # The last entry of `log` belongs to no lane.
        self.log_length = width - window.count
        self._log = log
        self._lane_starts = self._lane_numbers * width
        self._new_positions = torch.arange(2 * window.count, device=slices.device)
        self._positions = self._new_positions[: window.count]
        self._run_words = window.run_bytes // slices.itemsize

    @classmethod
    def allocate(
        cls, leaf: Leaf, window: Window, lanes: int, places: int, heads: int, log_length: int, device: torch.device
    ) -> WindowField:
        """Return an empty field."""
        word = choose_word(window.run_bytes)
        slices = torch.zeros((places, window.slice_bytes // word.itemsize), dtype=word, device=device)
        counts = torch.zeros(heads, dtype=torch.int64, device=device)
        log = torch.zeros(lanes * (log_length + window.count) + 1, dtype=torch.int32, device=device)
        return cls(leaf, window, lanes, slices, counts, log)

    @property
    def log_bytes(self) -> int:
        """See `ObservationField`."""
        return self.heads.nbytes + self._log.nbytes

    @property
    def max_new_entries(self) -> int:
        """Entries that one tick may write to the log of a lane."""
        return 2 * self.window.count

    def count_entries(self, starts: torch.Tensor, first_slot: int, last_slot: int) -> torch.Tensor:
        """Return how many entries the longest log has, from the first to the last slot that is held."""
        by_slot = starts.view(2, -1, self._lanes)
        entries = by_slot[1, last_slot] + self.window.count - by_slot[0, first_slot]
        return (entries % self.log_length).max().to(torch.int64)

    def write(
        self, clock: Clock, starts: torch.Tensor, obs: torch.Tensor, next_obs: torch.Tensor, *, has_previous: bool
    ) -> None:
        """See `ObservationField`."""
        lanes = self._lanes
        ticks = clock.ticks
        count = self.window.count
        shift = self.window.shift
        slices = self._cut(obs, ticks * lanes)
        next_slices = self._cut(next_obs, ticks * lanes)
        by_slot = starts.view(2, -1, lanes)
        previous = by_slot[1].index_select(0, clock.previous).view(-1)
        expected = self._slices.index_select(0, self._find_places(previous)).view(lanes, count, -1)
        if ticks > 1:
            expected = torch.cat([expected, next_slices[:-lanes]])
        continues = (expected == slices).flatten(1).all(1)
        if not has_previous:
            continues[:lanes] = False
        overlaps = (slices[:, shift:] == next_slices[:, : count - shift]).flatten(1).all(1)
        old = torch.where(continues, count, 0)  # Slices of the observation that the log has already.
        new = torch.where(overlaps, count + shift, 2 * count) - old
        ends = self.heads.index_select(0, clock.heads[:1]) + new.cumsum(0)
        by_tick = new.view(ticks, lanes)
        lane_ends = previous - self._lane_starts + count + by_tick.cumsum(0)
        lane_firsts = lane_ends - by_tick
        self._write_log(lane_firsts, ends - new, new)
        both = torch.stack([lane_firsts - old.view(ticks, lanes), lane_ends - count]) % self.log_length
        both = both + self._lane_starts
        # Slices that were there before are written to their own places again, with the same bits.
        for side, written in zip(both, (slices, next_slices), strict=True):
            places = self._find_places(side.view(-1)).to(torch.int64)
            self._slices.index_copy_(0, places, written.reshape(-1, written.shape[2]))
        by_slot.index_copy_(1, clock.slots, both.to(torch.int32))
        self.heads.index_copy_(0, clock.heads[1:], ends.view(ticks, lanes)[:, -1])

    def _write_log(self, positions: torch.Tensor, serials: torch.Tensor, counts: torch.Tensor) -> None:
        """Append to the logs: for every lane of every tick, `counts` slices that are numbered from `serials` on."""
        in_log = (positions.unsqueeze(2) + self._new_positions) % self.log_length
        entries = (in_log + self._lane_starts.unsqueeze(1)).view(len(counts), -1)
        nowhere = len(self._log) - 1
        is_new = self._new_positions < counts.unsqueeze(1)
        is_repeated = is_new & (in_log.view(entries.shape) < self.window.count)
        repeated = torch.where(is_repeated, entries + self.log_length, nowhere)
        entries = torch.where(is_new, entries, nowhere)
        places = ((serials.unsqueeze(1) + self._new_positions) % self.places).to(torch.int32).view(-1)
        self._log.index_copy_(0, entries.view(-1), places)
        self._log.index_copy_(0, repeated.view(-1), places)

    def _find_places(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the places of the slices of some observations, one observation after another."""
        return self._log.index_select(0, (starts.unsqueeze(1) + self._positions).view(-1))

    def read(self, starts: torch.Tensor) -> torch.Tensor:
        """See `ObservationField`."""
        slices = self._slices.index_select(0, self._find_places(starts))
        window = self.window
        if window.outer > 1:
            stretches = slices.view(len(starts), window.count, window.outer, self._run_words)
            slices = stretches.transpose(1, 2).reshape(len(starts), -1)
        return from_words(slices.view(len(starts), -1), self._dtype, self.leaf.shape)

    def _cut(self, observations: torch.Tensor, rows: int) -> torch.Tensor:
        """Return observations as slices, (rows, count, words of a slice)."""
        words = as_words(observations, rows, self._slices.dtype)
        stretches = words.view(rows, self.window.outer, self.window.count, self._run_words)
        return stretches.transpose(1, 2).reshape(rows, self.window.count, -1)

    def grow(self, starts: torch.Tensor, places: int, tail: int) -> tuple[ObservationField, torch.Tensor]:
        """See `ObservationField`."""
        slices, heads, oldest = self._copy_slices(places, tail)
        log = (self._log - oldest) % self.places
        return WindowField(self.leaf, self.window, self._lanes, slices, heads, log), starts

    def grow_log(self, starts: torch.Tensor, length: int, first_slot: int) -> tuple[ObservationField, torch.Tensor]:
        """Return a field with the same slices and longer logs, and its `starts`.

        `first_slot` is the slot of the oldest tick that is held.
        """
        lanes = self._lanes
        count = self.window.count
        positions = starts.view(2, -1, lanes) - self._lane_starts
        oldest = positions[0, first_slot]
        numbers = torch.arange(self.log_length, device=starts.device)
        entries = (oldest.unsqueeze(1) + numbers) % self.log_length + self._lane_starts.unsqueeze(1)
        log = self._log.new_zeros(lanes * (length + count) + 1)
        by_lane = log[:-1].view(lanes, length + count)
        by_lane[:, : self.log_length] = self._log[entries]
        by_lane[:, length:] = by_lane[:, :count]
        field = WindowField(self.leaf, self.window, lanes, self._slices, self.heads, log)
        moved = (positions - oldest) % self.log_length + field._lane_starts
        return field, moved.view(2, -1).to(torch.int32)

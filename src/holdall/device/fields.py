"""Fields of a memory on a device: tensors of rows, and observations of which every slice is stored once.

Tick `t` of a field is stored in slot `t % slots`. There are more slots than held ticks, so a tick that is written, or
whose writing was interrupted, overwrites no held tick. A cell is the index of a transition: `slot * lanes + lane`.

Most observations are the next observation of the tick before, or overlap it. The device compares them, and the host
does not wait for the result. So the host does not know how many slices a tick has written, and assumes the worst case,
see `TickRing`.

A tick is written in two steps. `ObservationField.place` has all operations that depend on the comparison. They can be
captured in a CUDA graph. All other rows are then copied together: `list_by_slot` returns the tensors to copy to, and
`list_new` the new rows for them.

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
    """The slots of ticks that are written, as tensors of indices."""

    ticks: int  # Number of ticks.
    before: torch.Tensor  # (ticks,): slot of the tick before each tick.
    heads: torch.Tensor  # (ticks + 1,): slot of each tick, and of the tick after the last one. Indices of `heads`.


class RowField:
    """One row per transition: an action leaf, the reward or an extra.

    Attributes:
        by_slot: The rows, (slots, lanes, ...).
    """

    def __init__(self, leaf: Leaf, lanes: int, slots: int, rows: torch.Tensor) -> None:
        self.leaf = leaf
        self._dtype = torch_dtype(leaf.dtype)
        self._stored = rows.dtype
        self._rows = rows
        self.by_slot = from_words(self._rows, self._dtype, (slots, lanes, *leaf.shape))

    @classmethod
    def allocate(cls, leaf: Leaf, lanes: int, slots: int, device: torch.device) -> RowField:
        """Return a field with memory of its own."""
        dtype = torch_dtype(leaf.dtype)
        stored = choose_stored_dtype(dtype, leaf.nbytes)
        shape = leaf.shape if stored.itemsize == dtype.itemsize else (leaf.nbytes // stored.itemsize,)
        return cls(leaf, lanes, slots, torch.zeros((slots * lanes, *shape), dtype=stored, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._rows.nbytes

    def read(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the rows in `cells`."""
        return self.convert(self._rows.index_select(0, cells))

    def convert(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows with the dtype and shape of the field. `rows` have the dtype in which they are stored."""
        if rows.dtype == self._dtype:
            return rows
        return from_words(rows, self._dtype, (rows.shape[0], *self.leaf.shape))

    def put(self, cells: torch.Tensor, rows: torch.Tensor, order: torch.Tensor) -> None:
        """Overwrite the rows in `cells` with `rows[order]`. All cells must be different."""
        if len(cells):
            words = as_words(rows, len(rows), self._stored).index_select(0, order)
            self._rows[cells] = words.view(len(cells), *self._rows.shape[1:])


class FlagField:
    """Several flags per transition.

    Attributes:
        by_slot: One tensor per flag, (slots, lanes).
    """

    def __init__(self, count: int, lanes: int, slots: int, device: torch.device) -> None:
        self._flags = torch.zeros((count, slots * lanes), dtype=torch.bool, device=device)
        self.by_slot = self._flags.view(count, slots, lanes).unbind(0)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._flags.nbytes

    def read(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the flags in `cells`, (flags, cells)."""
        return self._flags.index_select(1, cells)

    def put(self, cells: torch.Tensor, flags: torch.Tensor) -> None:
        """Overwrite the flags in `cells` with `flags`, (flags, cells). All cells must be different."""
        self._flags[:, cells] = flags


class ObservationField(ABC):
    """The observations of one leaf. Immutable, except for the contents of its tensors.

    Slices are in a ring buffer, and the place of a slice is its index there. `starts`, (2, cells) int32, says where the
    observation and the next observation of every transition are stored. `starts` belongs to the caller.

    Attributes:
        window: How an observation is cut into slices.
        heads: Position in the ring buffer before tick t, at index t % slots. Positions are counted without wrapping: a
            `WholeField` stores the number of the last slice that was written, a `WindowField` that of the next slice.
        uses_next: Whether `place` uses next observations.
    """

    uses_next: bool

    def __init__(self, leaf: Leaf, window: Window, lanes: int, slices: torch.Tensor, heads: torch.Tensor) -> None:
        self.leaf = leaf
        self.window = window
        self.heads = heads
        self._lanes = lanes
        self._slices = slices
        self._dtype = torch_dtype(leaf.dtype)

    @property
    @abstractmethod
    def places(self) -> int:
        """Number of slices that fit into the ring buffer."""

    @property
    @abstractmethod
    def max_new_slices(self) -> int:
        """Maximum number of slices that one tick writes to the ring buffer."""

    @property
    def slice_bytes(self) -> int:
        """Bytes of all slices on the device."""
        return self._slices.nbytes

    @property
    def log_bytes(self) -> int:
        """Bytes of all other tensors on the device."""
        return self.heads.nbytes

    @abstractmethod
    def place(
        self, clock: Clock, starts: torch.Tensor, obs: torch.Tensor, next_obs: torch.Tensor, *, has_previous: bool
    ) -> torch.Tensor:
        """Find or make places for the observations of some ticks, (ticks, lanes, ...). Return them for `list_new`.

        There must be room for `max_new_slices` of every tick. `has_previous` says whether the tick before the first one
        was written.
        """

    @abstractmethod
    def list_by_slot(self, starts: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors whose rows are copied after `place`, (slots, lanes, ...) each."""

    @abstractmethod
    def list_new(self, places: torch.Tensor, next_obs: torch.Tensor) -> list[torch.Tensor]:
        """Return the new rows for the tensors of `list_by_slot`. `places` is the result of `place`."""

    @abstractmethod
    def read(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the observations and the next observations that begin at `starts`: (2, rows, ...) for (2 * rows,)."""

    @abstractmethod
    def grow(self, starts: torch.Tensor, places: int, tail: int) -> tuple[ObservationField, torch.Tensor]:
        """Return a copy with more places, and its `starts`. Waits for the device.

        `tail` is the index in `heads` of the oldest tick whose slices are needed.
        """


class WholeField(ObservationField):
    """Observations that are stored whole, so an observation is one slice. `starts` has the places of observations.

    The next observation of every transition has a fixed place. The observation of the following tick usually equals it
    and has the same place. All other observations, such as the first ones of episodes, are stored in the ring buffer.
    `_slices` has the ring buffer, followed by the next observations of all cells.
    """

    uses_next = False

    def __init__(self, leaf: Leaf, lanes: int, slots: int, slices: torch.Tensor, heads: torch.Tensor) -> None:
        super().__init__(leaf, Window.whole(leaf), lanes, slices, heads)
        self._slots = slots
        self._places = len(slices) - slots * lanes
        next_slices = slices[self._places :]
        self._next_words = next_slices.view(slots, -1)
        self._next_by_slot = from_words(next_slices, self._dtype, (slots, lanes, *leaf.shape))
        # Places of the next observations of slot 0. The places of slot s are greater by s * lanes.
        self._first_places = torch.arange(self._places, self._places + lanes, device=slices.device)

    @classmethod
    def allocate(cls, leaf: Leaf, lanes: int, places: int, slots: int, device: torch.device) -> WholeField:
        """Return an empty field, with a ring buffer of `places` observations."""
        word = choose_word(leaf.nbytes)
        shape = (places + slots * lanes, leaf.nbytes // word.itemsize)
        slices = torch.zeros(shape, dtype=word, device=device)
        heads = torch.full((slots,), -1, dtype=torch.int64, device=device)
        return cls(leaf, lanes, slots, slices, heads)

    def make_next_starts(self) -> torch.Tensor:
        """Return the places of all next observations, which never change."""
        return torch.arange(self._places, len(self._slices), dtype=torch.int32, device=self._slices.device)

    @property
    def places(self) -> int:
        """See `ObservationField`."""
        return self._places

    @property
    def max_new_slices(self) -> int:
        """See `ObservationField`."""
        return self._lanes

    def place(
        self, clock: Clock, starts: torch.Tensor, obs: torch.Tensor, next_obs: torch.Tensor, *, has_previous: bool
    ) -> torch.Tensor:
        """See `ObservationField`. Returns the places of the observations, (ticks, lanes)."""
        lanes = self._lanes
        ticks = clock.ticks
        rows = as_words(obs, ticks * lanes, self._slices.dtype)
        expected = self._next_words.index_select(0, clock.before[:1]).view(lanes, -1)
        if ticks > 1:
            next_rows = as_words(next_obs, ticks * lanes, self._slices.dtype)
            expected = torch.cat([expected, next_rows[:-lanes]])
        is_new = (expected != rows).any(1)
        if not has_previous:
            is_new[:lanes] = True
        numbers = is_new.cumsum(0) + self.heads.index_select(0, clock.heads[:1])
        before = torch.add(self._first_places, clock.before.unsqueeze(1), alpha=lanes)
        places = torch.where(is_new, numbers % self._places, before.view(-1))
        # An observation that shares the place of a next observation is written to it again, with the same bits.
        if ticks > 1:
            self._next_words.index_copy_(0, clock.heads[:-1], next_rows.view(ticks, -1))
        self._slices.index_copy_(0, places, rows)
        self.heads.index_copy_(0, clock.heads[1:], numbers.view(ticks, lanes)[:, -1])
        return places.view(ticks, lanes)

    def list_by_slot(self, starts: torch.Tensor) -> list[torch.Tensor]:
        """See `ObservationField`."""
        return [self._next_by_slot, starts[0].view(self._slots, self._lanes)]

    def list_new(self, places: torch.Tensor, next_obs: torch.Tensor) -> list[torch.Tensor]:
        """See `ObservationField`."""
        return [next_obs, places]

    def read(self, starts: torch.Tensor) -> torch.Tensor:
        """See `ObservationField`."""
        words = self._slices.index_select(0, starts)
        return from_words(words, self._dtype, (2, starts.shape[0] // 2, *self.leaf.shape))

    def grow(self, starts: torch.Tensor, places: int, tail: int) -> tuple[ObservationField, torch.Tensor]:
        """See `ObservationField`."""
        oldest = int(self.heads[tail]) + 1
        added = places - self._places
        slices = self._slices.new_empty((len(self._slices) + added, self._slices.shape[1]))
        slices[: self._places] = self._slices[: self._places].roll(-(oldest % self._places), 0)
        slices[places:] = self._slices[self._places :]
        grown = WholeField(self.leaf, self._lanes, self._slots, slices, self.heads - oldest)
        in_ring = (starts - oldest % self._places) % self._places
        return grown, torch.where(starts < self._places, in_ring, starts + added)


class WindowField(ObservationField):
    """Observations that are stored as slices of a window.

    Every lane has a log: a second ring buffer, with the places of slices in the order in which observations use them.
    Its first `window.count` entries are repeated after its end, so that the entries of an observation are contiguous.
    The logs of all lanes are stored one after another, and `starts` has positions in them.
    """

    uses_next = True

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
        self._lane_starts = torch.arange(lanes, device=slices.device) * width
        self._lane_offsets = self._lane_starts - window.count
        self._new_positions = torch.arange(2 * window.count, device=slices.device)
        self._positions = self._new_positions[: window.count]
        self._run_words = window.run_bytes // slices.itemsize

    @classmethod
    def allocate(
        cls, leaf: Leaf, window: Window, lanes: int, places: int, slots: int, log_length: int, device: torch.device
    ) -> WindowField:
        """Return an empty field."""
        word = choose_word(window.run_bytes)
        slices = torch.zeros((places, window.slice_bytes // word.itemsize), dtype=word, device=device)
        heads = torch.zeros(slots, dtype=torch.int64, device=device)
        log = torch.zeros(lanes * (log_length + window.count) + 1, dtype=torch.int32, device=device)
        return cls(leaf, window, lanes, slices, heads, log)

    @property
    def places(self) -> int:
        """See `ObservationField`."""
        return len(self._slices)

    @property
    def max_new_slices(self) -> int:
        """See `ObservationField`."""
        return 2 * self.window.count * self._lanes

    @property
    def log_bytes(self) -> int:
        """See `ObservationField`."""
        return self.heads.nbytes + self._log.nbytes

    @property
    def max_new_entries(self) -> int:
        """Maximum number of entries that one tick writes to the log of a lane."""
        return 2 * self.window.count

    def count_entries(self, starts: torch.Tensor, first_slot: int, last_slot: int) -> torch.Tensor:
        """Return how many entries of the longest log belong to the ticks from `first_slot` to `last_slot`."""
        by_slot = starts.view(2, -1, self._lanes)
        entries = by_slot[1, last_slot] + self.window.count - by_slot[0, first_slot]
        return (entries % self.log_length).max().to(torch.int64)

    def place(
        self, clock: Clock, starts: torch.Tensor, obs: torch.Tensor, next_obs: torch.Tensor, *, has_previous: bool
    ) -> torch.Tensor:
        """See `ObservationField`. Returns new positions in the logs, (2, ticks, lanes)."""
        lanes = self._lanes
        ticks = clock.ticks
        count = self.window.count
        shift = self.window.shift
        rows = ticks * lanes
        words = (as_words(obs, rows, self._slices.dtype), as_words(next_obs, rows, self._slices.dtype))
        both_slices = self._cut(torch.cat(words), 2 * rows)
        slices = both_slices[:rows]
        next_slices = both_slices[rows:]
        previous = starts[1].view(-1, lanes).index_select(0, clock.before[:1]).view(-1)
        expected = self._slices.index_select(0, self._find_places(previous)).view(lanes, count, -1)
        if ticks > 1:
            expected = torch.cat([expected, next_slices[:-lanes]])
        continues = (expected == slices).flatten(1).all(1)
        if not has_previous:
            continues[:lanes] = False
        overlaps = (slices[:, shift:] == next_slices[:, : count - shift]).flatten(1).all(1)
        old = continues * count  # Slices of the observation that are in the log already.
        new = 2 * count - overlaps * (count - shift) - old
        ends = self.heads.index_select(0, clock.heads[:1]) + new.cumsum(0)
        by_tick = new.view(ticks, lanes)
        lane_firsts = previous - self._lane_offsets  # Where the new entries of each lane begin.
        if ticks > 1:
            lane_firsts = lane_firsts + by_tick.cumsum(0) - by_tick
        self._write_log(lane_firsts.view(rows), ends - new, new, ticks)
        both = torch.stack([lane_firsts.view(rows) - old, lane_firsts.view(rows) + new - count])
        both = (both.view(2, ticks, lanes) % self.log_length) + self._lane_starts
        # Old slices are written to their places again, with the same bits.
        places = self._find_places(both.view(-1)).to(torch.int64)
        self._slices.index_copy_(0, places, both_slices.reshape(len(places), -1))
        self.heads.index_copy_(0, clock.heads[1:], ends.view(ticks, lanes)[:, -1])
        return both

    def list_by_slot(self, starts: torch.Tensor) -> list[torch.Tensor]:
        """See `ObservationField`."""
        return list(starts.view(2, -1, self._lanes).unbind(0))

    def list_new(self, places: torch.Tensor, next_obs: torch.Tensor) -> list[torch.Tensor]:
        """See `ObservationField`."""
        return list(places.unbind(0))

    def _write_log(self, positions: torch.Tensor, serials: torch.Tensor, counts: torch.Tensor, ticks: int) -> None:
        """Write to the logs at `positions`: for each lane of each tick, `counts` slices with numbers from `serials`."""
        in_log = (positions.unsqueeze(1) + self._new_positions) % self.log_length
        entries = (in_log.view(ticks, self._lanes, -1) + self._lane_starts.unsqueeze(1)).view(in_log.shape)
        if ticks > 1:
            # Entries after the last new one belong to the next tick. The unused last entry is written instead.
            entries = torch.where(self._new_positions < counts.unsqueeze(1), entries, len(self._log) - 1)
        places = (serials.unsqueeze(1) + self._new_positions) % self.places
        self._log.index_copy_(0, entries.view(-1), places.to(torch.int32).view(-1))
        by_lane = self._log[:-1].view(self._lanes, -1)
        by_lane[:, self.log_length :] = by_lane[:, : self.window.count]

    def _find_places(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the places of all slices of the observations that begin at `starts`."""
        return self._log.index_select(0, (starts.unsqueeze(1) + self._positions).view(-1))

    def read(self, starts: torch.Tensor) -> torch.Tensor:
        """See `ObservationField`."""
        slices = self._slices.index_select(0, self._find_places(starts))
        window = self.window
        if window.outer > 1:
            stretches = slices.view(len(starts), window.count, window.outer, self._run_words)
            slices = stretches.transpose(1, 2).reshape(len(starts), -1)
        return from_words(slices, self._dtype, (2, len(starts) // 2, *self.leaf.shape))

    def _cut(self, words: torch.Tensor, rows: int) -> torch.Tensor:
        """Return observations as slices, (rows, count, words of a slice)."""
        stretches = words.view(rows, self.window.outer, self.window.count, self._run_words)
        return stretches.transpose(1, 2).reshape(rows, self.window.count, -1)

    def grow(self, starts: torch.Tensor, places: int, tail: int) -> tuple[ObservationField, torch.Tensor]:
        """See `ObservationField`."""
        oldest = int(self.heads[tail])
        slices = self._slices.new_empty((places, self._slices.shape[1]))
        slices[: self.places] = self._slices.roll(-(oldest % self.places), 0)
        log = (self._log - oldest % self.places) % self.places
        return WindowField(self.leaf, self.window, self._lanes, slices, self.heads - oldest, log), starts

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

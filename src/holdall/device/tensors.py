"""Tensors: all fields of a memory on a device, for one choice of windows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch

from holdall.delivery.drawn_rows import DrawnRows, map_arrays
from holdall.delivery.staging import torch_dtype
from holdall.delivery.words import choose_stored_dtype, copy_all
from holdall.device.fields import (
    PLACE_BYTES,
    Clock,
    FlagField,
    ObservationField,
    RowField,
    WholeField,
    WindowField,
)
from holdall.schema import Leaf, Schema
from holdall.store.windows import Window

_MIN_SLACK_TICKS = 4
_MAX_SLACK_TICKS = 64
_SLACK_DIVISOR = 64
"""The slack is this fraction of the ticks: the ticks for which there is room even in the worst case."""
_TABLE_BYTES = 4
"""Bytes of a number in the table of `Tensors`."""


class TensorStep(NamedTuple):
    """Some ticks, checked: tensors of (ticks, lanes, ...) on the device, in leaf order."""

    obs: tuple[torch.Tensor, ...]
    action: tuple[torch.Tensor, ...]
    reward: torch.Tensor
    next_obs: tuple[torch.Tensor, ...]
    terminated: torch.Tensor
    truncated: torch.Tensor
    extras: tuple[torch.Tensor, ...]
    valid: torch.Tensor | None

    def add_time_axis(self) -> TensorStep:
        """Return a tick without an axis of time as ticks: all tensors get an axis of length 1."""
        return map_arrays(self, lambda tensor: tensor.unsqueeze(0))

    def cut(self, first: int, stop: int) -> TensorStep:
        """Return the ticks from index `first` to `stop` - 1."""
        return map_arrays(self, lambda tensor: tensor[first:stop])


class TensorPlan(NamedTuple):
    """Sizes of the tensors of one memory."""

    capacity_ticks: int
    windows: tuple[Window, ...]  # Of every observation leaf.
    slices_per_tick: tuple[float, ...]  # Slices that a tick of one lane is expected to write, for every leaf.
    reward: Leaf

    @property
    def slots(self) -> int:
        """Ticks that fit: the held ticks, earlier ticks that wrote slices of held ones, and an incomplete tick."""
        return self.capacity_ticks + max((self.reach_ticks(i) for i in range(len(self.windows))), default=0) + 1

    @property
    def slack_ticks(self) -> int:
        """Ticks for which the tensors have additional room, even if they write the maximum number of slices."""
        return min(max(self.capacity_ticks // _SLACK_DIVISOR, _MIN_SLACK_TICKS), _MAX_SLACK_TICKS)

    def reach_ticks(self, leaf: int) -> int:
        """Return how many of the preceding ticks may have written slices of an observation."""
        window = self.windows[leaf]
        return ceil(window.count / window.shift)

    def places(self, leaf: int, lanes: int) -> int:
        """Return the number of slices that fit into the ring buffer of a leaf."""
        window = self.windows[leaf]
        ticks = self.capacity_ticks + self.reach_ticks(leaf) + 1
        # Next observations that are stored whole are not in the ring buffer.
        per_tick = self.slices_per_tick[leaf] - (1 if window.count == 1 else 0)
        return lanes * (ceil(ticks * per_tick) + 2 * window.count * self.slack_ticks)

    def log_length(self, leaf: int) -> int:
        """Return the number of entries in the log of a lane."""
        entries = ceil((self.capacity_ticks + 1) * self.slices_per_tick[leaf])
        return entries + (2 * self.slack_ticks + 3) * self.windows[leaf].count

    def nbytes(self, schema: Schema) -> int:
        """Return the bytes that all tensors take on the device."""
        lanes = schema.num_envs
        cells = self.slots * lanes
        others = (*schema.action.leaves, *schema.extras.leaves, self.reward)
        total = cells * (sum(leaf.nbytes for leaf in others) + 2)
        for i, window in enumerate(self.windows):
            total += self.places(i, lanes) * window.slice_bytes + 2 * cells * PLACE_BYTES + 8 * self.slots
            if window.count == 1:
                total += cells * window.slice_bytes
            else:
                total += lanes * (self.log_length(i) + window.count) * PLACE_BYTES
        return total


class Tensors:
    """Every field of the transitions that are held. Not thread-safe. The callers know which transitions are held.

    All numbers of 4 bytes that every batch needs are in one table, so that one operation reads them: the places of all
    observations, and the reward if it has 4 bytes.

    Attributes:
        plan: Sizes of all tensors.
        cells: Number of transitions that fit.
        fields: The observation leaves.
    """

    def __init__(self, schema: Schema, plan: TensorPlan, device: torch.device, first_tick: int = 0) -> None:
        lanes = schema.num_envs
        slots = plan.slots
        self.plan = plan
        self.cells = slots * lanes
        self._slots = slots
        self._schema = schema
        self._lanes = lanes
        self._device = device
        leaves = schema.observation.leaves
        self.fields: list[ObservationField] = []
        self._is_reward_in_table = plan.reward.shape == () and plan.reward.nbytes == _TABLE_BYTES
        table_rows = 2 * len(leaves) + int(self._is_reward_in_table)
        self._table = torch.zeros((table_rows, slots * lanes), dtype=torch.int32, device=device)
        self._starts = self._find_starts()
        if self._is_reward_in_table:
            self.reward = self._find_reward()
        else:
            self.reward = RowField.allocate(plan.reward, lanes, slots, device)
        for i, leaf in enumerate(leaves):
            places = plan.places(i, lanes)
            window = plan.windows[i]
            if window.count == 1:
                whole = WholeField.allocate(leaf, lanes, places, slots, device)
                self._starts[i, 1] = whole.make_next_starts()
                self.fields.append(whole)
            else:
                length = plan.log_length(i)
                self.fields.append(WindowField.allocate(leaf, window, lanes, places, slots, length, device))
        self.action = [RowField.allocate(leaf, lanes, slots, device) for leaf in schema.action.leaves]
        self.extras = [RowField.allocate(leaf, lanes, slots, device) for leaf in schema.extras.leaves]
        self.ends = FlagField(2, lanes, slots, device)  # `terminated` and `truncated`.
        self.invalid: FlagField | None = None  # None: all entries are transitions.
        # The device's own count of ticks: the tick before the next one, the next one, and the one after that.
        self._clock = torch.arange(first_tick - 1, first_tick + 2, device=device)
        self.next_tick = self._clock[1:2]
        self._by_slot = self._list_by_slot()

    @property
    def has_masks(self) -> bool:
        """Whether entries that are not transitions may be stored."""
        return self.invalid is not None

    @property
    def observation_bytes(self) -> list[tuple[int, int]]:
        """Bytes of slices and bytes of places, for every observation leaf."""
        places = self._starts[:1].nbytes
        return [(field.slice_bytes, field.log_bytes + places) for field in self.fields]

    # ---------------------------------------------------------------- writing

    def write(self, step: TensorStep, first_tick: int, *, has_previous: bool) -> None:
        """Write the ticks from `first_tick` on, which is `next_tick`, and increase `next_tick`."""
        ticks = len(step.reward)
        slots = self._slots
        new = self._list_new(step, self.place(step, ticks, has_previous=has_previous))
        written = 0
        while written < ticks:
            slot = (first_tick + written) % slots
            stop = min(ticks, written + slots - slot)
            stored = [by_slot[slot : slot + stop - written] for by_slot in self._by_slot]
            copy_all(stored, [rows[written:stop] for rows in new])
            written = stop

    def write_placed(self, step: TensorStep, tick: int, places: list[torch.Tensor]) -> None:
        """Write the rows of one tick, without an axis of time. `places` is what `place` returned for the tick."""
        new = self._list_new(step, places)
        slot = tick % self._slots
        copy_all([by_slot[slot] for by_slot in self._by_slot], new)

    def set_next_tick(self, tick: int) -> None:
        """Correct the device's count of ticks, which an interrupt may have left wrong."""
        torch.arange(tick - 1, tick + 2, out=self._clock)

    def place(self, step: TensorStep, ticks: int, *, has_previous: bool) -> list[torch.Tensor]:
        """Find or make places for the observations of the next ticks, and increase `next_tick`.

        The number of the next tick is read on the device, so these operations can be captured in a CUDA graph.
        """
        numbers = self._clock
        if ticks > 1:
            numbers = self.next_tick + torch.arange(-1, ticks + 1, device=self._device)
        slots = numbers % self._slots
        clock = Clock(ticks, slots[:-2], slots[1:])
        places = []
        for field, starts, obs, next_obs in zip(self.fields, self._starts, step.obs, step.next_obs, strict=True):
            places.append(field.place(clock, starts, obs, next_obs, has_previous=has_previous))
        self._clock.add_(ticks)
        return places

    def _list_new(self, step: TensorStep, places: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the new rows for all tensors of `_by_slot`, in the same order."""
        new = []
        for i, field in enumerate(self.fields):
            new += field.list_new(places[i], step.next_obs[i])
        new += (*step.action, *step.extras, step.reward, step.terminated, step.truncated)
        if step.valid is not None and self.invalid is None:
            self.invalid = FlagField(1, self._lanes, self._slots, self._device)
            self._by_slot = self._list_by_slot()
        if self.invalid is not None:
            new.append(torch.zeros_like(step.terminated) if step.valid is None else step.valid.logical_not())
        return new

    def _list_by_slot(self) -> list[torch.Tensor]:
        """Return all tensors to which rows are copied, (slots, lanes, ...) each."""
        by_slot = []
        for i, field in enumerate(self.fields):
            by_slot += field.list_by_slot(self._starts[i])
        by_slot += [field.by_slot for field in (*self.action, *self.extras, self.reward)]
        by_slot += self.ends.by_slot
        if self.invalid is not None:
            by_slot += self.invalid.by_slot
        return by_slot

    def _find_starts(self) -> torch.Tensor:
        """Return the part of the table with the places of observations, (leaves, 2, cells)."""
        leaves = len(self._schema.observation.leaves)
        return self._table[: 2 * leaves].view(leaves, 2, self.cells)

    def _find_reward(self) -> RowField:
        """Return the part of the table with the rewards."""
        leaf = self.plan.reward
        stored = choose_stored_dtype(torch_dtype(leaf.dtype), leaf.nbytes)
        return RowField(leaf, self._lanes, self._slots, self._table[-1].view(stored))

    # ---------------------------------------------------------------- reading

    def read(self, ids: torch.Tensor, last_ids: torch.Tensor | None = None) -> DrawnRows:
        """Return the rows of `ids`. If `last_ids` is given, next observations and flags are read from these ids."""
        cells = ids % self.cells
        if last_ids is None:
            last_cells = cells
            numbers = self._table.index_select(1, cells)
            obs, next_obs = self._read_pairs(numbers, range(len(self.fields)))
            reward = self.reward.convert(numbers[-1]) if self._is_reward_in_table else self.reward.read(cells)
        else:
            last_cells = last_ids % self.cells
            obs, next_obs = self.read_observations(cells, last_cells, range(len(self.fields)))
            reward = self.reward.read(cells)
        terminated, truncated = self.ends.read(last_cells).unbind(0)
        return DrawnRows(
            obs=tuple(obs),
            next_obs=tuple(next_obs),
            action=tuple([field.read(cells) for field in self.action]),
            extras=tuple([field.read(cells) for field in self.extras]),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
        )

    def read_observations(
        self, cells: torch.Tensor, last_cells: torch.Tensor, leaves: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return observations in `cells`, and next observations in `last_cells`, of some leaves."""
        if cells is last_cells:
            return self._read_pairs(self._table.index_select(1, cells), leaves)
        parts = (self._starts[:, 0].index_select(1, cells), self._starts[:, 1].index_select(1, last_cells))
        return self._read_pairs(torch.stack(parts, dim=1).flatten(0, 1), leaves)

    def _read_pairs(
        self, numbers: torch.Tensor, leaves: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return observations and next observations of some leaves. `numbers` are columns of the table."""
        rows = numbers.shape[1]
        obs = []
        next_obs = []
        for i in leaves:
            # One operation instead of two: a slice of two rows, and a view of it as one row.
            starts = numbers.as_strided((2 * rows,), (1,), 2 * i * rows)
            before, after = self.fields[i].read(starts).unbind(0)
            obs.append(before)
            next_obs.append(after)
        return obs, next_obs

    def read_flags(self, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `terminated` and `truncated`."""
        terminated, truncated = self.ends.read(cells).unbind(0)
        return terminated, truncated

    def are_ends(self, cells: torch.Tensor) -> torch.Tensor:
        """Return which transitions are the last of their episodes."""
        return self.ends.read(cells).any(0)

    def are_invalid(self, cells: torch.Tensor) -> torch.Tensor:
        """Return which entries are not transitions."""
        if self.invalid is None:
            return torch.zeros(len(cells), dtype=torch.bool, device=self._device)
        return self.invalid.read(cells)[0]

    # ---------------------------------------------------------------- room

    def measure(self, next_tick: int, first_tick: int) -> torch.Tensor:
        """Return the slices and the entries of the longest log that are in use, for every leaf: (leaves, 2)."""
        zero = self.next_tick.new_zeros(())
        numbers = []
        slots = self._slots
        for i, field in enumerate(self.fields):
            tail = max(first_tick - self.plan.reach_ticks(i), 0)
            slices = field.heads[next_tick % slots] - field.heads[tail % slots]
            entries = zero
            if isinstance(field, WindowField) and next_tick > first_tick:
                entries = field.count_entries(self._starts[i], first_tick % slots, (next_tick - 1) % slots)
            numbers.append(torch.stack([slices, entries]))
        if not numbers:
            return zero.new_zeros((0, 2))
        return torch.stack(numbers)

    def count_room(self, used: torch.Tensor) -> int:
        """Return for how many ticks there is room in the worst case. `used` is a result of `measure`."""
        room = []
        for field, (slices, entries) in zip(self.fields, used.tolist(), strict=True):
            room.append((field.places - slices) // field.max_new_slices)
            if isinstance(field, WindowField):
                room.append((field.log_length - 1 - entries) // field.max_new_entries)
        return min(room, default=2**62)

    def grow(self, used: torch.Tensor, first_tick: int) -> Tensors:
        """Return tensors with more room for the leaves that have little. The table is copied, the rest is shared."""
        grown = copy.copy(self)
        grown.fields = list(self.fields)
        grown._table = self._table.clone()
        grown._starts = grown._find_starts()
        if self._is_reward_in_table:
            grown.reward = grown._find_reward()
        ticks = 2 * self.plan.slack_ticks
        for i, (slices, entries) in enumerate(used.tolist()):
            field = grown.fields[i]
            wanted = slices + slices // 8 + ticks * field.max_new_slices
            if field.places - slices < ticks * field.max_new_slices:
                tail = max(first_tick - self.plan.reach_ticks(i), 0) % self._slots
                field, grown._starts[i] = field.grow(grown._starts[i], wanted, tail)
            if isinstance(field, WindowField) and field.log_length - entries < ticks * field.max_new_entries:
                length = entries + entries // 8 + (ticks + 1) * field.max_new_entries
                field, grown._starts[i] = field.grow_log(grown._starts[i], length, first_tick % self._slots)
            grown.fields[i] = field
        grown._by_slot = grown._list_by_slot()
        return grown

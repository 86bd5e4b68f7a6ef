"""Flat rings: the small fields of a transition, addressed by tick; and which fields are small.

In:  rows of every lane, tick by tick.  Out: the rings, from which batch_source.py reads rows of given ids.
Invariant: the row of tick t stands at t modulo the ring's length, which is one more than the capacity, so that the
newest next observation has a place of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.report import FieldReport, field_name
from holdall.schema import Array, Leaf, Schema
from holdall.storage.column_plan import rows_to_look_at
from holdall.storage.columns import NEVER, ColumnRuns
from holdall.storage.slices import Window, WindowScout, as_bytes
from holdall.storage.snapshot import Apart, KeptApart, LiveRows, Ring, new_ring, put_rows, rows_of
from holdall.storage.ticks import Arguments, FlatField, Kernels, Tick, TickWriter

if TYPE_CHECKING:
    from holdall.storage.repair import Repair


TINY_BYTES = 256
"""Observation fields up to this size always lie in a flat ring: nothing beats it."""
_SMALL_BYTES = 4096
"""Fields up to this size lie in a flat ring, unless a window is found in their first steps, or a budget is small."""
CURSOR_BYTES = 4
"""What a transition of a field in segments takes beside them: where it lies there."""
_FEWEST_TICKS = 2
"""What the smallest segment has to hold."""
FLAG = Leaf("", (), np.dtype(np.bool_))
_REWARD_BYTES = 8
_UNSHARED_BEFORE_PAIRING = 1024
"""Next observations kept apart before it is asked whether sharing pays at all."""
_RUN_BYTES = 1 << 19
"""Rows that are packed at once, about: it takes less than a millisecond."""
_LEAST_TICKS, _MOST_TICKS = 64, 4096
"""A run has that many ticks: histories begin again with every run and lane."""
_MOST_RUN_BYTES = 1 << 23
"""Runs that would be larger, those of hundreds of lanes, stay as they are: `add` would wait for them."""
_LEAST_RUNS = 16
"""Rings that hold fewer runs stay as they are: what is spared would not pay for the room to pack one."""


# ---------------------------------------------------------------- which fields lie where


class FieldLayout(NamedTuple):
    """One way to share the observation fields out between rings and segments."""

    large: list[int]  # leaves that lie in segments
    optional: int  # bytes of the rings whose fields could lie in segments, too
    fixed: int  # rings and tables of the full capacity
    segment: int  # the smallest useful segment


def field_layouts(schema: Schema, ring_ticks: int, large: Collection[int] | None = None) -> list[FieldLayout]:
    """Return the ways to lay fields out, those with most rings first; the only one, if the large fields are known."""
    leaves = schema.observation.leaves
    by_size = sorted(range(len(leaves)), key=lambda i: -leaves[i].nbytes)
    must, may = (sum(leaf.nbytes > size for leaf in leaves) for size in (_SMALL_BYTES, TINY_BYTES))
    ways = [by_size[:count] for count in range(must, may + 1)] if large is None else [list(large)]
    return [_layout(schema, ring_ticks, sorted(way)) for way in ways]


def _layout(schema: Schema, ring_ticks: int, large: list[int]) -> FieldLayout:
    leaves, rows = schema.observation.leaves, ring_ticks * schema.num_envs
    small = [leaf for i, leaf in enumerate(leaves) if i not in large]
    fixed = rows * (row_bytes(schema, small) + CURSOR_BYTES * len(large))
    optional = rows * sum(leaf.nbytes for leaf in small if leaf.nbytes > TINY_BYTES)
    segment = _FEWEST_TICKS * 2 * schema.num_envs * sum(leaves[i].nbytes for i in large)
    return FieldLayout(large, optional, fixed, segment)


def row_bytes(schema: Schema, small: Iterable[Leaf]) -> int:
    """Count the bytes of a transition in rings, if each of the small fields lies there once."""
    leaves = (*schema.action.leaves, *schema.extras.leaves, *small)
    return sum(leaf.nbytes for leaf in leaves) + prod(schema.reward_shape) * _REWARD_BYTES + 3 * FLAG.nbytes


# ---------------------------------------------------------------- one field


class ObservationRing(LiveRows):
    """A short observation field that keeps each observation once.

    The next observation of a tick is read where the following tick's observation stands. Where the two differ (an
    episode ended in between), the older tick's next observation is kept apart under its transition id. Where they
    differ so often that this costs more than it spares, a second ring is paired with it, and both are written in full.
    Older rows may lie in runs of packed ticks, see `ColumnRuns`; the newest never do.
    """

    def __init__(self, leaf: Leaf, lanes: int, ring_ticks: int) -> None:
        self.leaf, self._lanes, self._ring_ticks = leaf, lanes, ring_ticks
        self._rows = new_ring(ring_ticks, lanes, leaf)
        self.shape, self.dtype = self._rows.shape, self._rows.dtype
        self.runs: tuple[ColumnRuns, int] | None = None  # and which of their rings this is
        self.paired: Array | None = None
        self.apart = KeptApart(leaf)

    @property
    def kept_apart(self) -> Apart:
        """Next observations that no row shows."""
        return self.apart.held

    def flat(self) -> FlatField:
        """Return where ticks are written."""
        return FlatField(self._rows, self.paired, is_observation=True, apart=self.apart)

    def keep_apart(self, tick: int, obs: Array) -> None:
        """Save the next observations of `tick` that `obs`, about to take their place, is not.

        They still stand in their place until it is written to, so it may be done again, for other observations.
        """
        if self.paired is not None:
            return
        standing = self._rows[(tick + 1) % self._ring_ticks]
        differs = np.flatnonzero((as_bytes(standing, self._lanes) != as_bytes(obs, self._lanes)).any(axis=1))
        if not differs.size:
            return
        kept = self.kept_apart.since((tick + 2 - self._ring_ticks) * self._lanes)
        most = max(_UNSHARED_BEFORE_PAIRING, min(tick + 1, self._ring_ticks - 1) * self._lanes // 2)
        self.apart.hold(kept.appended(tick * self._lanes + differs, standing[differs]), most)
        if len(self.kept_apart) > most:
            self.pair(max(0, tick + 2 - self._ring_ticks), tick + 1)

    def rows(self, first: int, end: int) -> Array:
        """See `LiveRows.rows`."""
        if self.runs is None:
            return rows_of(self._rows, first, end)
        runs, number = self.runs
        found = runs.read(number, np.arange(first * self._lanes, end * self._lanes))
        return found.reshape(end - first, *self.shape[1:])

    def following(self, first: int, end: int) -> Array:
        """Copy the next observations of ticks [first, end)."""
        if self.paired is not None:
            return rows_of(self.paired, first, end)
        rows = self.rows(first + 1, end + 1)
        ids = np.arange(first * self._lanes, end * self._lanes)
        self.kept_apart.write_over(rows.reshape(len(ids), *self.leaf.shape), ids)
        return rows

    def view(self, first: int, end: int) -> Array:
        """See `LiveRows.view`."""
        if self.runs is not None:
            return self.rows(first, end)
        return self._rows[first % self._ring_ticks :][: end - first]

    def read_from(self, runs: ColumnRuns | None, number: int) -> None:
        """Look for rows in runs, or in the ring alone, from now on."""
        self.runs = None if runs is None else (runs, number)
        self.apart.hold(replace(self.kept_apart))  # a `RowTable` sees that it is another object

    @property
    def is_shared(self) -> bool:
        """Whether next observations are found in the following tick."""
        return self.paired is None

    def arrays(self) -> list[Array]:
        """Return the arrays that the field lies in."""
        paired, kept = [] if self.paired is None else [self.paired], self.kept_apart
        packed = [] if self.runs is None or self.runs[1] else self.runs[0].arrays()
        return [self._rows, *paired, kept.ids, kept.rows, *packed]

    def bytes_of(self, rows: int) -> int:
        """Bytes that so many rows take, with the next observations that are kept apart and their ids."""
        packed, packed_bytes = (0, 0) if self.runs is None else self.runs[0].packed(self.runs[1])
        return (
            max(rows - packed, 0) * self.leaf.nbytes * (1 if self.is_shared else 2)
            + packed_bytes
            + self.kept_apart.nbytes
        )

    def describe(self, first_tick: int, next_tick: int) -> str:
        """Say what was found in ticks [first_tick, next_tick), whose rows are still there, for people."""
        if self.paired is not None:
            return "flat rows; next observations seldom shared, so kept beside"
        first, end = first_tick * self._lanes, next_tick * self._lanes
        apart, _ = self.kept_apart.between(first, end)  # older ones may not be dropped yet
        share = 100 * (1 - len(apart) / (end - first)) if end > first else 100.0
        found = "" if self.runs is None else self.runs[0].describe(self.runs[1])
        return f"flat rows; {share:.1f} % of next observations shared{found}"

    def columns(self) -> dict[str, Ring]:
        """Return the rings of rows: of observations, and of next observations if they have one of their own."""
        return {"obs": self} if self.paired is None else {"obs": self, "next": self.paired}

    def newest_next(self, next_tick: int) -> Array:
        """Copy the next observations of the newest tick, which stand where the next tick's observations will."""
        return np.array(self._rows[next_tick % self._ring_ticks])

    def refill(self, next_tick: int, newest: Array | None, *, is_paired: bool) -> None:
        """Begin to take over rows that were saved.

        Args:
            newest: Next observations of the newest tick, if they have no row of their own.
        """
        if is_paired:
            self.paired = new_ring(self._ring_ticks, self._lanes, self.leaf)
        elif newest is not None:
            self._rows[next_tick % self._ring_ticks] = newest

    def put(
        self, first_tick: int, rows: Array, following: Array | None, apart: tuple[NDArray[np.int64], Array] | None
    ) -> None:
        """Take over rows of ticks from `first_tick` on, in order.

        Args:
            following: Their next observations, if these have rows of their own.
            apart: If they have not: ascending ids of those that no later row shows, and these.
        """
        put_rows(self._rows, first_tick, rows)
        if self.paired is not None and following is not None:
            put_rows(self.paired, first_tick, following)
        if self.paired is None and apart is not None:
            self.apart.hold(self.kept_apart.appended(*apart))

    def pair(self, first_tick: int, next_tick: int) -> None:
        """Give next observations a ring of their own, with those of the ticks [first_tick, next_tick) in it."""
        if self.paired is not None:
            return
        if self.runs is not None:
            self.runs[0].end(next_tick + 1 - self._ring_ticks)
        paired = new_ring(self._ring_ticks, self._lanes, self.leaf)
        put_rows(paired, first_tick, self.following(first_tick, next_tick))
        self.paired = paired
        self.apart.hold(Apart.none_of(self.leaf))


# ---------------------------------------------------------------- all of them


class Rings:
    """The fields that share nothing, each in a flat ring: short observations, actions, rewards, flags, extras.

    Args:
        small: Observation leaves that lie here.
        first_tick: Number of the first tick that will be written.
    """

    def __init__(self, schema: Schema, ring_ticks: int, small: Iterable[int], first_tick: int) -> None:
        self.schema = schema
        self.lanes = schema.num_envs
        self.ring_ticks = ring_ticks
        self.small = {i: ObservationRing(schema.observation.leaves[i], self.lanes, ring_ticks) for i in small}
        self.action = [self._ring(leaf) for leaf in schema.action.leaves]
        self.extras = [self._ring(leaf) for leaf in schema.extras.leaves]
        self.reward: Array | None = None
        self.terminated = self._ring(FLAG)
        self.truncated = self._ring(FLAG)
        self.invalid: Array | None = None
        self.scouts: dict[int, WindowScout] = {}  # by leaf: what looks for a window in its first steps
        self._runs: ColumnRuns | None = None
        self.pause_tick = 0  # the tick before which observations may be packed
        self.row_bytes = 0  # of one transition, once all that can come has come
        self._counted = (0, first_tick, first_tick)  # lanes that made no transition in ticks [first, end)

    def new_writer(self, kernels: Kernels, ticks: tuple[int, int], repair: Repair) -> TickWriter:
        """Return what writes ticks here; `ticks` are the numbers of the first one ever and of the next."""
        writer = kernels.new_writer(self.flat(), self.ring_ticks, ticks, repair)
        writer.pause_tick = self.pause_tick
        self._count_row_bytes()  # another writer is made whenever fields lie elsewhere
        return writer

    def prepare(self, tick: Tick, first_tick: int, next_tick: int) -> list[Array]:
        """Return the rows of a tick in the order of `flat`; make the rings that it is the first to need."""
        self.begin(tick.reward.dtype, has_invalid=tick.valid is not None)
        rows = self.rows_of_steps(tick)
        if self.invalid is not None:
            self.count_invalid(first_tick, next_tick)  # while the ticks that left are still to be seen
            rows.append(np.zeros(self.lanes, np.bool_) if tick.valid is None else ~tick.valid)
        return rows

    def rows_of_steps(self, steps: Tick) -> list[Array]:
        """Return the rows of one tick, or of several, in the order of `flat`, but for lanes that made no transition."""
        rows = [row for i in self.small for row in (steps.obs[i], steps.next_obs[i])]
        return [*rows, *steps.action, *steps.extras, steps.reward, steps.terminated, steps.truncated]

    def takes_runs(self, writer: TickWriter) -> bool:
        """Whether nothing has to be done here between two ticks of a writer."""
        return not self.scouts and self.reward is not None and self.invalid is None and writer.writes(self.flat())

    def flat(self) -> list[FlatField]:
        """Return where ticks are written, field by field."""
        rings = [FlatField(ring, None, is_observation=False) for ring in self._rest() if ring is not None]
        return [ring.flat() for ring in self.small.values()] + rings

    def keep_apart(self, next_tick: int, obs: Mapping[int, Array]) -> None:
        """Save the next observations of the newest tick that these, by leaf, would be written over."""
        for i, ring in self.small.items():
            ring.keep_apart(next_tick - 1, obs[i])

    def pair(self, first_tick: int, next_tick: int) -> None:
        """Give next observations rings of their own, with those of the ticks held in them."""
        for ring in self.small.values():
            ring.pair(first_tick, next_tick)
        self._count_row_bytes()

    def give_up(self, i: int) -> ObservationRing:
        """Return the ring of a leaf that will lie elsewhere."""
        ring = self.small.pop(i)
        self._count_row_bytes()
        return ring

    def _count_row_bytes(self) -> None:
        following = sum(ring.leaf.nbytes for ring in self.small.values() if ring.paired is not None)
        self.row_bytes = row_bytes(self.schema, (ring.leaf for ring in self.small.values())) + following

    def look_for_windows(self, tick: Tick, *, may_move: bool) -> dict[int, Window]:
        """Show a tick to all searches; return the windows that were found, by leaf. Without `may_move` all end."""
        found = {}
        for i, scout in tuple(self.scouts.items()):
            scout.look(as_bytes(tick.obs[i], self.lanes), as_bytes(tick.next_obs[i], self.lanes))
            if scout.done or not may_move:
                del self.scouts[i]
                if scout.finding is not None and may_move:
                    found[i] = scout.finding
        return found

    def pack(self, kernels: Kernels, first_tick: int, end_tick: int, writer: TickWriter) -> None:
        """Keep observations of ticks from one on, up to another, without what repeats in them, where any does.

        Args:
            writer: Is told before which tick there will be more to pack.
        """
        if self.scouts:
            return
        shared = [ring for ring in self.small.values() if ring.is_shared and ring.leaf.nbytes]
        run_ticks = run_ticks_of([ring.leaf for ring in shared], self.lanes, self.ring_ticks)
        if self._runs is None and kernels.packs_columns and run_ticks <= end_tick:
            self._runs = ColumnRuns(kernels, shared, run_ticks)
        if self._runs is not None and len(self._runs.rings) <= len(shared):
            self._runs.pack(first_tick, end_tick)
            self.pause_tick = self._runs.pause_tick
        else:
            self.pause_tick = run_ticks if self._runs is None and kernels.packs_columns else NEVER
        writer.pause_tick = self.pause_tick

    def fast_arguments(self, large: list[int]) -> Arguments | None:
        """Return what the arguments of an `add` must be for a short way; None if there are fields that it cannot write.

        Args:
            large: Leaves that are not here.
        """
        if self.invalid is not None or self.scouts or self.reward is None:
            return None
        rest = [*self.action, self.reward, self.terminated, self.truncated]
        return Arguments.of(self.schema, self.small, large, rest)

    def begin(self, reward_dtype: np.dtype[Any], *, has_invalid: bool = False) -> None:
        """Make the ring of rewards with the first one; and that of lanes without transitions, if there are any."""
        if self.reward is None:
            self.reward = self._ring(self.schema.reward_leaf(reward_dtype))
        if has_invalid and self.invalid is None:
            self.invalid = self._ring(FLAG)

    def rewards(self, ids: NDArray[np.int64]) -> Array:
        """Copy the rewards of `ids`, of any shape."""
        return np.empty(0, np.float32) if self.reward is None else _take(self.reward, self.slots(ids))

    def extra(self, number: int, ids: NDArray[np.int64]) -> Array:
        """Copy one extra of `ids`, of any shape."""
        return _take(self.extras[number], self.slots(ids))

    def flags(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Copy how transitions ended."""
        slot = self.slots(ids)
        return _take(self.terminated, slot), _take(self.truncated, slot)

    def are_valid(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell real transitions from lanes that made none."""
        if self.invalid is None:
            return np.ones(ids.shape, np.bool_)
        return np.asarray(~_take(self.invalid, self.slots(ids)))

    def rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Array]) -> None:
        """Write new rows of some columns, under ids that are all different."""
        slot, rings = self.slots(ids), self.columns()
        for name, rows in columns.items():
            ring: Any = rings[name]
            ring.reshape(ring.shape[0] * ring.shape[1], *ring.shape[2:])[slot] = rows

    def count_invalid(self, first_tick: int, next_tick: int) -> int:
        """Count the lanes that made no transition in the ticks from one on; those up to `next_tick` were written."""
        if self.invalid is None:
            return 0
        count, first, end = self._counted
        if first_tick > first or next_tick > end:
            came = np.arange(max(end, first_tick), next_tick) % self.ring_ticks
            left = np.arange(first, min(first_tick, end)) % self.ring_ticks
            count += int(np.count_nonzero(self.invalid[came])) - int(np.count_nonzero(self.invalid[left]))
            self._counted = (count, max(first_tick, first), max(next_tick, end))
        return count

    def columns(self) -> dict[str, Ring]:
        """Return all rings by name."""
        rings = {"action": self.action, "extras": self.extras}
        columns: dict[str, Ring] = {f"{name}.{i}": ring for name, of in rings.items() for i, ring in enumerate(of)}
        if self.reward is not None:
            columns["reward.0"] = self.reward
        columns |= {"terminated.0": self.terminated, "truncated.0": self.truncated}
        if self.invalid is not None:
            columns["invalid.0"] = self.invalid
        for i, ring in self.small.items():
            columns |= {f"{kind}.{i}": rows for kind, rows in ring.columns().items()}
        return columns

    def apart(self) -> dict[str, Apart]:
        """Return the next observations that are kept apart now, by column."""
        return {f"obs.{i}": ring.kept_apart for i, ring in self.small.items() if ring.is_shared}

    def copy(self, first: int, end: int) -> dict[str, Array]:
        """Copy the rows of ticks [first, end), next observations too; and invalid lanes if there are any."""
        columns = {name: rows_of(ring, first, end) for name, ring in self.columns().items() if name != "invalid.0"}
        columns |= {f"next.{i}": ring.following(first, end) for i, ring in self.small.items()}
        ids = np.arange(first * self.lanes, end * self.lanes)
        if not (valid := self.are_valid(ids)).all():
            columns["invalid.0"] = ~valid.reshape(end - first, self.lanes)
        return columns

    def keep(self, small: Iterable[int]) -> None:
        """Have these observation leaves here, and no others; before anything is written."""
        leaves = self.schema.observation.leaves
        self.small = {i: self.small.get(i) or ObservationRing(leaves[i], self.lanes, self.ring_ticks) for i in small}
        self._runs, self.pause_tick = None, 0
        self._count_row_bytes()

    def thaw(
        self, next_tick: int, first_tick: int, newest: dict[int, Array], paired: Collection[int], scouts: dict[str, Any]
    ) -> None:
        """Begin to take over rows that were frozen elsewhere; they follow with `put`, oldest first."""
        self.scouts = {i: scout for i, scout in self.scouts.items() if str(i) in scouts}
        for i, scout in self.scouts.items():
            scout.restore(scouts[str(i)])
        for i, ring in self.small.items():
            ring.refill(next_tick, newest.get(i), is_paired=i in paired)
        self._count_row_bytes()
        self._counted = (0, first_tick, next_tick)

    def put(
        self, first: int, columns: Mapping[str, Array], apart: Mapping[str, tuple[NDArray[np.int64], Array]]
    ) -> None:
        """Take over rows of ticks from `first` on, in order."""
        for i, ring in self.small.items():
            ring.put(first, columns[f"obs.{i}"], columns.get(f"next.{i}"), apart.get(f"obs.{i}"))
        for name, rows in self.columns().items():
            if rows is self.invalid and name not in columns:
                put_rows(self.invalid, first, np.zeros((len(columns["terminated.0"]), self.lanes), np.bool_))
            elif isinstance(rows, np.ndarray) and not name.startswith("next."):
                put_rows(rows, first, columns[name])
        if "invalid.0" in columns and first < (counted := self._counted)[2]:  # later ones are counted in their turn
            self._counted = (counted[0] + int(np.count_nonzero(columns["invalid.0"])), *counted[1:])

    def report(self, held: int, touched: int) -> list[FieldReport]:
        """Account for all fields but observations."""
        sizes = [(name, ring[0, 0].nbytes) for name, ring in self.arrays()]
        return [FieldReport(name, 0, 0, touched * nbytes, held * nbytes, "flat rows") for name, nbytes in sizes]

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array of all fields but observations, under the name that `report` gives its field."""
        names = [field_name("action", leaf.name) for leaf in self.schema.action.leaves]
        names += [field_name("extras", leaf.name) for leaf in self.schema.extras.leaves]
        names += ["reward", "terminated", "truncated", "valid"]
        return [(name, ring) for name, ring in zip(names, self._rest(), strict=True) if ring is not None]

    def _rest(self) -> list[Array | None]:
        """All rings but those of observations."""
        return [*self.action, *self.extras, self.reward, self.terminated, self.truncated, self.invalid]

    def slots(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the rows of `ids` stand in a ring whose tick and lane axes are one."""
        return ids % (self.ring_ticks * self.lanes)

    def _ring(self, leaf: Leaf) -> Array:
        return new_ring(self.ring_ticks, self.lanes, leaf)


def run_ticks_of(leaves: Sequence[Leaf], lanes: int, ring_ticks: int) -> int:
    """Return how many ticks of observations that share a ring each are packed as one run; NEVER where none can be."""
    tick_bytes = lanes * sum(leaf.nbytes for leaf in leaves)
    if not tick_bytes:
        return NEVER
    ticks = 1 << max(0, (_RUN_BYTES // tick_bytes).bit_length() - 1)
    ticks = max(min(ticks, _MOST_TICKS), _LEAST_TICKS)
    if ticks * tick_bytes > _MOST_RUN_BYTES or _LEAST_RUNS * ticks > ring_ticks or ring_ticks * lanes >= 1 << 32:
        return NEVER
    return ticks if rows_to_look_at(leaves, lanes, ticks) else NEVER


def _take(ring: Array, slot: NDArray[np.int64]) -> Array:
    return ring.reshape(ring.shape[0] * ring.shape[1], *ring.shape[2:]).take(slot, axis=0)

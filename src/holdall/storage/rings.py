"""Flat rings: the small fields of a transition, addressed by tick; and which fields are small.

In:  rows of every lane, tick by tick.  Out: rows of given ticks and lanes.
Invariant: the row of tick t stands at t modulo the ring's length, which is one more than the
capacity, so that the newest next observation has a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.report import FieldReport
from holdall.schema import Array, Bytes, Leaf, Schema, require_in_range
from holdall.storage.batch_source import Places, RowTable
from holdall.storage.columns import NEVER, ColumnRuns, ObservationRing, new_ring
from holdall.storage.slices import Cursors, Window, WindowScout, as_bytes
from holdall.storage.snapshot import Apart, Ring, put_rows, rows_of
from holdall.storage.ticks import Arguments, FlatField, Kernels, Tick, TickWriter

if TYPE_CHECKING:
    from holdall.storage.tick_store import Repair


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


# ---------------------------------------------------------------- rings


class Rows(NamedTuple):
    """What was read under some ids: copies of the small fields, places of the large ones."""

    small: dict[int, tuple[Array, Array]]  # by observation leaf: obs and next_obs
    large: tuple[int, ...]  # observation leaves whose places follow, in this order
    places: Places | None
    action: list[Array]
    reward: Array
    terminated: Array
    truncated: Array
    extras: list[Array]
    ended: Array  # float32: 1.0 where an episode ended and was not cut short

    def cut(self, some: slice) -> Rows:
        """Return some of the rows, of which all fields were read; nothing is copied."""
        return Rows(
            {i: (obs[some], next_obs[some]) for i, (obs, next_obs) in self.small.items()}, (), None,
            [each[some] for each in self.action], self.reward[some], self.terminated[some], self.truncated[some],
            [each[some] for each in self.extras], self.ended[some],
        )  # fmt: skip


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
        self._table: RowTable | None = None
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
        rest = [*self.action, *self.extras, self.reward, self.terminated, self.truncated, self.invalid]
        rings = [FlatField(ring, None, is_observation=False) for ring in rest if ring is not None]
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
        if self._runs is None:
            self._runs = ColumnRuns.over(kernels, shared)
        if self._runs is None or len(self._runs.rings) > len(shared):
            self.pause_tick = NEVER
        else:
            self._runs.pack(first_tick, end_tick)
            self.pause_tick = self._runs.pause_tick
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

    def begin(self, reward_dtype: np.dtype[Any], *, has_invalid: bool = False) -> Array:
        """Return the ring of rewards, which the first one makes; and make that of lanes without transitions."""
        if self.reward is None:
            self.reward = self._ring(self.schema.reward_leaf(reward_dtype))
        if has_invalid and self.invalid is None:
            self.invalid = self._ring(FLAG)
        return self.reward

    def read(
        self,
        kernels: Kernels,
        ids: NDArray[np.int64],
        held: tuple[int, int],
        cursors: list[Cursors],
        take: Callable[[int], Bytes],
    ) -> list[Array]:
        """Copy all fields of `ids` that are here, and the cursors to the others, into one array a column.

        Args:
            held: The first id held, and the one behind the last; others are refused.
            take: Returns memory, from an aligned address on.
        """
        columns = self.table(cursors).copy(kernels, ids, held, self.ring_ticks * self.lanes, take)
        if columns is None:
            require_in_range(ids, *held)
            raise DamageError(f"rings of {self.ring_ticks} ticks are too short for the ids held, {held}; report this")
        return columns

    def table(self, cursors: list[Cursors]) -> RowTable:
        """Return how rows are copied from here."""
        table = self._table
        if table is None or not table.fits(len(self.small), self._rest_count, cursors):
            table = self._table = RowTable(
                self.small.values(), self._rest(), (self.terminated, self.truncated), cursors
            )
        return table

    def rows(self, columns: list[Array], large: tuple[int, ...], places: Places | None) -> Rows:
        """Name the columns that `read` returned; the fields that are not here lie at `places`."""
        first = 2 * len(self.small)
        flags = first + len(self.action)
        extras = flags + 2 + len(self.extras)
        return Rows(
            small={i: (columns[2 * k], columns[2 * k + 1]) for k, i in enumerate(self.small)},
            large=large,
            places=places,
            action=columns[first:flags],
            reward=np.empty(0, np.float32) if self.reward is None else columns[extras],
            terminated=columns[flags],
            truncated=columns[flags + 1],
            extras=columns[flags + 2 : extras],
            ended=columns[extras if self.reward is None else extras + 1],
        )

    def _rest(self) -> list[Array]:
        """All rings but those of observations, in the order in which `rows` names them."""
        reward = [] if self.reward is None else [self.reward]
        return [*self.action, self.terminated, self.truncated, *self.extras, *reward]

    @property
    def _rest_count(self) -> int:
        return len(self.action) + 2 + len(self.extras) + (self.reward is not None)

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
        return {f"obs.{i}": ring.apart() for i, ring in self.small.items() if ring.is_shared}

    def copy(self, first: int, end: int) -> dict[str, Array]:
        """Copy the rows of ticks [first, end), next observations too; and invalid lanes if there are any."""
        ids = np.arange(first * self.lanes, end * self.lanes)
        columns = {name: rows_of(ring, first, end) for name, ring in self.columns().items() if name != "invalid.0"}
        for i, ring in self.small.items():
            _, following = ring.read(ids, self.slots(ids), self.slots(ids, 1))
            columns[f"next.{i}"] = following.reshape(columns[f"obs.{i}"].shape)
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
        leaves = [replace(leaf, name=field_name("action", leaf)) for leaf in self.schema.action.leaves]
        leaves += [replace(leaf, name=field_name("extras", leaf)) for leaf in self.schema.extras.leaves]
        if self.reward is not None:
            leaves.append(self.schema.reward_leaf(self.reward.dtype, "reward"))
        flags = ("terminated", "truncated", *(("valid",) if self.invalid is not None else ()))
        leaves += [replace(FLAG, name=name) for name in flags]
        return [FieldReport(leaf.name, 0, 0, touched * leaf.nbytes, held * leaf.nbytes, "flat rows") for leaf in leaves]

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array of all fields but observations, under the name that `report` gives its field."""
        found: list[tuple[str, Array]] = []
        for prefix, tree, rings in (
            ("action", self.schema.action, self.action),
            ("extras", self.schema.extras, self.extras),
        ):
            found += [(field_name(prefix, leaf), ring) for leaf, ring in zip(tree.leaves, rings, strict=True)]
        rest = {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated}
        rest["invalid"] = self.invalid
        return found + [(name, ring) for name, ring in rest.items() if ring is not None]

    def slots(self, ids: NDArray[np.int64], ticks_later: int = 0) -> NDArray[np.int64]:
        """Where the rows of `ids` stand in a ring whose tick and lane axes are one."""
        return (ids + ticks_later * self.lanes) % (self.ring_ticks * self.lanes)

    def _ring(self, leaf: Leaf) -> Array:
        return new_ring(self.ring_ticks, self.lanes, leaf)


def _take(ring: Array, slot: NDArray[np.int64]) -> Array:
    return ring.reshape(ring.shape[0] * ring.shape[1], *ring.shape[2:]).take(slot, axis=0)


def field_name(prefix: str, leaf: Leaf) -> str:
    """Name a leaf of a space for people."""
    return f"{prefix}.{leaf.name}" if leaf.name else prefix

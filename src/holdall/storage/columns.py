"""Columns: the short observations of older ticks, packed without what repeats in them.

In:  rings of rows that will not change any more.  Out: runs of ticks that columns.c reads rows from; the pages of the
rings that held them are given back.
Invariant: a tick lies in its ring or in a run, and reads the same from both: a run is used only after all of it was
read back and compared. An interrupt leaves ticks where they were; what was packed already may be packed again.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Bytes, Leaf
from holdall.storage.blocks import address, reserve
from holdall.storage.column_plan import (
    GROUP_FIELDS,
    PIECE_FIELDS,
    PLAN_FIELDS,
    ColumnPlan,
    find_plan,
    rows_to_look_at,
    word_bytes,
)
from holdall.storage.slices import as_bytes
from holdall.storage.snapshot import Apart, LiveRows, Ring, RowsById, put_rows, rows_of
from holdall.storage.ticks import FlatField, Kernels

LOG_FIELDS = ("first", "count", "cursor_at")
RUN_FIELDS = (
    "plan", "first_tick", "ticks", "data", "logs", "records", "record_bytes", "cursor_bytes", "dense_at", "exceptions",
    "numbers", "wholes",
)  # fmt: skip
RUNS_FIELDS = ("runs", "mask", "shift", "lanes")
COLUMN_TABLES = {
    "column_group": GROUP_FIELDS, "column_piece": PIECE_FIELDS, "column_plan": PLAN_FIELDS, "column_log": LOG_FIELDS,
    "column_run": RUN_FIELDS, "column_runs": RUNS_FIELDS,
}  # fmt: skip
"""Columns of tables, in the order of the structs in structs.h; the loader compares them."""

_RUN_BYTES = 1 << 19
"""Rows that are packed at once, about: it takes less than a millisecond."""
_LEAST_TICKS, _MOST_TICKS = 64, 4096
"""A run has that many ticks: histories begin again with every run and lane."""
_MOST_RUN_BYTES = 1 << 23
"""Runs that would be larger, those of hundreds of lanes, stay as they are: `add` would wait for them."""
_LEAST_RUNS = 16
"""Rings that hold fewer runs stay as they are: what is spared would not pay for the room to pack one."""
_WORTH = 0.875
"""The share of its rows that a run may take to be worth the time of putting rows together."""
_WORSE = 1.2
"""A run that takes so much more than the one that its plan was made for has another plan looked for."""
_AS_GOOD = 1.02
"""A newer plan is taken if its run takes at most so much more."""
_PATIENCE = 4
"""Runs after a search before a plan that does not fit leads to another one; longer where searches find nothing."""
_LONGEST_WAIT = 64
"""Runs between two searches, at most."""
NEVER = 1 << 62
"""A tick, or the number of a run, that never comes."""


class ColumnRun:
    """The short observations of a run of ticks, packed by a plan; never changes."""

    def __init__(self, plan: ColumnPlan, run: NDArray[np.int64], logs: NDArray[np.int64], data: Bytes) -> None:
        self.plan = plan
        self._run, self._logs, self._data = run, logs, data
        run[RUN_FIELDS.index("data")] = address(data)
        self.address = address(run)
        self.nbytes = data.nbytes + run.nbytes + logs.nbytes

    def group_bytes(self, rows: int) -> NDArray[np.float64]:
        """Return the bytes of every group: its frames, and the cursors to them."""
        described = dict(zip(RUN_FIELDS, self._run.tolist(), strict=True))
        return self.plan.group_bytes(self._logs[:, 1], self._logs[:, 2] >= 0, rows, described["cursor_bytes"])

    def changed_constants(self) -> list[int]:
        """Return the columns that change here and did not in the run that the plan was made for."""
        first, count = self._logs[0, :2].tolist()
        if not self.plan.constants or count < 2:
            return []
        nbytes = self.plan.frame_bytes(0)
        return self.plan.changed_constants(self._data[first : first + count * nbytes].reshape(count, nbytes))

    def arrays(self) -> list[Array]:
        """Return the arrays that it lies in."""
        return [self._run, self._logs, self._data]


class ColumnRuns:
    """The runs of a memory, and the search for what repeats.

    Args:
        rings: From which ticks are packed. They are read from here, too, from the first run on.
    """

    def __init__(self, kernels: Kernels, rings: Sequence[ObservationRing], run_ticks: int) -> None:
        self.rings = tuple(rings)
        self.leaves, self._rings = [ring.leaf for ring in rings], [ring.flat().rows for ring in rings]
        self._kernels, self.run_ticks = kernels, run_ticks
        self._ring_ticks, self._lanes = rings[0].shape[:2]
        places = 1 << (self._ring_ticks // run_ticks + 1).bit_length()
        self._table = np.zeros(places, np.int64)
        self._struct = np.array(
            [address(self._table), places - 1, run_ticks.bit_length() - 1, self._lanes], np.int64
        )  # fmt: skip
        self._addresses = np.array([address(ring) for ring in self._rings], np.int64)
        self._tick_bytes = [int(ring[0].nbytes) for ring in self._rings]
        self._raw_bytes = run_ticks * sum(self._tick_bytes)
        self.runs: dict[int, ColumnRun] = {}  # by number: run n begins at tick n * run_ticks
        self.plan: ColumnPlan | None = None
        self._next = 0  # the run that is packed next
        self._searched, self._search_at, self._wait, self._patience = 0, 0, 1, _PATIENCE
        self._planned_bytes = 0  # of the run that the plan was made for
        self._varied = np.zeros(sum(leaf.nbytes // word_bytes(leaf) for leaf in self.leaves), np.bool_)

    @classmethod
    def over(cls, kernels: Kernels, rings: Sequence[ObservationRing]) -> ColumnRuns | None:
        """Make runs over some rings; None where nothing could be packed."""
        leaves = [ring.leaf for ring in rings]
        if not rings or not kernels.packs_columns:
            return None
        ring_ticks, lanes = rings[0].shape[:2]
        tick_bytes = lanes * sum(leaf.nbytes for leaf in leaves)
        ticks = 1 << max(0, (_RUN_BYTES // tick_bytes).bit_length() - 1)
        ticks = max(min(ticks, _MOST_TICKS), _LEAST_TICKS)
        if ticks * tick_bytes > _MOST_RUN_BYTES or _LEAST_RUNS * ticks > ring_ticks or ring_ticks * lanes >= 1 << 32:
            return None
        return cls(kernels, rings, ticks) if rows_to_look_at(leaves, lanes, ticks) else None

    @property
    def address(self) -> int:
        """Where columns.c finds the runs."""
        return address(self._struct)

    @property
    def pause_tick(self) -> int:
        """The tick before which a run can be packed."""
        return min((self._next + 1) * self.run_ticks, NEVER)

    def pack(self, first_tick: int, end_tick: int) -> None:
        """Pack ticks from one on, up to another, as far as their runs are complete."""
        self._next = max(self._next, -(-first_tick // self.run_ticks))
        while self.pause_tick <= end_tick:
            self._drop_before(end_tick + 1 - self._ring_ticks)
            self._pack_next(end_tick)

    def _pack_next(self, end_tick: int) -> None:
        """Pack the next run, or pass over it if nothing was found that repeats. Rings go on until `_next` is set."""
        number, run = self._next, None
        place = number & (len(self._table) - 1)
        self._table[place] = 0  # an interrupted call may have come further
        if self.plan is not None:
            run = self._packed(self.plan, number)
        is_off = run is None or self._is_off(run)
        if number >= self._search_at or (is_off and number >= self._searched + self._patience):
            run = self._searching(number, run)
        if run is None:
            self._next = number + (1 if self.runs else self._wait)
            return
        if not self.runs:
            for i, ring in enumerate(self.rings):
                ring.read_from(self, i)
        self.runs[number] = run
        self._table[place] = run.address
        self._next = number + 1
        self._release(number, end_tick)

    def _is_off(self, run: ColumnRun) -> bool:
        """Whether a run takes much more than the one that its plan was made for, or constants in it are none."""
        changed = run.changed_constants()
        self._varied[changed] = True
        return run.nbytes > _WORSE * self._planned_bytes or bool(changed)

    def _searching(self, number: int, run: ColumnRun | None) -> ColumnRun | None:
        """Look for a plan in a run, and return the run packed by it, if that is no larger; else as it was."""
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._searched, self._search_at = number, number + self._wait
        plan = find_plan(self.leaves, self._looked_at(number), self._varied)
        found = None if plan is None else self._packed(plan, number)
        if found is not None and (run is None or found.nbytes < _AS_GOOD * run.nbytes):
            self.plan, run, self._varied = plan, found, found.plan.varied
        self._patience = min(2 * self._patience, _LONGEST_WAIT) if run is None else _PATIENCE
        if run is not None:
            self._planned_bytes = run.nbytes
        return run

    def _looked_at(self, number: int) -> list[Bytes]:
        """Return rows of a run, (lanes, ticks, bytes)."""
        lanes, ticks = rows_to_look_at(self.leaves, self._lanes, self.run_ticks) or (0, 0)
        slots = np.arange(number * self.run_ticks, number * self.run_ticks + ticks) % self._ring_ticks
        return [
            np.ascontiguousarray(ring[slots, :lanes].reshape(ticks, lanes, -1).swapaxes(0, 1)).view(np.uint8)
            for ring in self._rings
        ]

    def _packed(self, plan: ColumnPlan, number: int) -> ColumnRun | None:
        """Pack a run; None if that is not worth it."""
        rows = self.run_ticks * self._lanes
        logs = np.zeros((plan.group_count, len(LOG_FIELDS)), np.int64)
        named = {"plan": plan.address, "first_tick": number * self.run_ticks, "ticks": self.run_ticks}
        named["logs"] = address(logs)
        run = np.array([named.get(name, 0) for name in RUN_FIELDS], np.int64)
        room = np.empty(int(_WORTH * self._raw_bytes), np.uint8)
        scratch = np.empty((plan.group_count + 2) * rows, np.uint32), np.empty(plan.row_bytes, np.uint8)
        used = self._kernels.pack_columns(run, self._addresses, self._ring_ticks, self._lanes, room, scratch)
        return None if used < 0 else ColumnRun(plan, run, logs, room[:used].copy())

    def _release(self, number: int, end_tick: int) -> None:
        """Give back the pages of rings that held a run; the first one too if none but packed ticks are before it."""
        first, end = number * self.run_ticks, (number + 1) * self.run_ticks
        start, stop = first % self._ring_ticks, (end - 1) % self._ring_ticks + 1
        spans = [(start, stop)] if start < stop else [(start, self._ring_ticks), (0, stop)]
        packed_from = number
        while packed_from - 1 in self.runs and (number - packed_from) * self.run_ticks < mmap.PAGESIZE:
            packed_from -= 1
        # What stood before is written over by newer ticks, the newest of which is `end_tick`.
        before = first - max(packed_from * self.run_ticks, end_tick + 1 - self._ring_ticks)
        for at, tick_bytes in zip(self._addresses.tolist(), self._tick_bytes, strict=True):
            for low, high in spans:
                back = min(before * tick_bytes, low * tick_bytes, mmap.PAGESIZE - 1)
                self._kernels.release(at + low * tick_bytes - back, (high - low) * tick_bytes + back)

    def _drop_before(self, tick: int) -> None:
        """Forget the runs whose last tick is older than one."""
        while self.runs and ((oldest := next(iter(self.runs))) + 1) * self.run_ticks <= tick:
            self._forget(oldest)

    def _forget(self, number: int) -> None:
        place = number & (len(self._table) - 1)
        if self._table[place] == self.runs[number].address:
            self._table[place] = 0
        del self.runs[number]

    def read(self, leaf: int, ids: NDArray[np.int64]) -> Array:
        """Copy the rows of ids of one leaf, wherever they lie."""
        nbytes, some = self.leaves[leaf].nbytes, np.ascontiguousarray(ids)
        column = [int(self._addresses[leaf]), nbytes, *[0] * 6, self.address, leaf]
        out, held = np.empty(len(some) * nbytes, np.uint8), (int(ids.min()), int(ids.max()) + 1) if ids.size else (0, 0)
        self._kernels.read_rows(
            np.array([column], np.int64), some, held, self._ring_ticks * self._lanes, (out, out[:0])
        )  # fmt: skip
        return out.view(self.leaves[leaf].dtype).reshape(len(some), *self.leaves[leaf].shape)

    def end(self, first_tick: int) -> None:
        """Put all ticks from one on back into their rings, and pack no more."""
        self._next = NEVER
        for number in list(self.runs):
            first, end = max(first_tick, number * self.run_ticks), (number + 1) * self.run_ticks
            ids = np.arange(first * self._lanes, end * self._lanes)
            for leaf, ring in enumerate(self._rings):
                if ids.size:
                    put_rows(ring, first, self.read(leaf, ids).reshape(end - first, *ring.shape[1:]))
            self._forget(number)
        for observed in self.rings:
            observed.read_from(None, 0)

    def packed(self, leaf: int) -> tuple[int, int]:
        """Return how many rows are packed, and the bytes that one leaf takes of them."""
        rows = len(self.runs) * self.run_ticks * self._lanes
        return rows, int(self._leaf_bytes()[leaf])

    def describe(self, leaf: int) -> str:
        """Say what was found about a leaf by the newest plan, for people."""
        if self.plan is None or not self.runs:
            return ""
        own = self.plan.columns_of(leaf)
        changed = sum(bool(self._varied[column]) for column in self.plan.constants if column in own)
        found = self.plan.findings[leaf].describe(changed)
        return f"; {found}" if found else ""

    def arrays(self) -> list[Array]:
        """Return all arrays of runs."""
        return [array for run in self.runs.values() for array in run.arrays()]

    def _leaf_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of all runs, shared out among leaves."""
        found, rows = np.zeros(len(self.leaves)), self.run_ticks * self._lanes
        by_plan: dict[int, list[ColumnRun]] = {}
        for run in self.runs.values():
            by_plan.setdefault(run.plan.address, []).append(run)
        for runs in by_plan.values():
            shares = runs[0].plan.shared_out(np.sum([run.group_bytes(rows) for run in runs], axis=0))
            found += shares / shares.sum() * sum(run.nbytes for run in runs)
        return found.astype(np.int64)


_UNSHARED_BEFORE_PAIRING = 1024
"""Next observations kept apart before it is asked whether sharing pays at all."""


def new_ring(ticks: int, lanes: int, leaf: Leaf) -> Array:
    """Reserve a ring of `ticks` rows per lane; untouched pages cost nothing."""
    rows = reserve(ticks * lanes * leaf.nbytes)
    return rows.view(leaf.dtype).reshape(ticks, lanes, *leaf.shape)


class ObservationRing(LiveRows):
    """A short observation field that keeps each observation once.

    The next observation of a tick is read where the following tick's observation stands. Where
    the two differ (an episode ended in between), the older tick's next observation is kept apart
    under its transition id. Where they differ so often that this costs more than it spares, the
    ring is paired with a second one and both are written in full.

    Older rows may lie in runs of packed ticks, see `ColumnRuns`; the newest never do.
    """

    def __init__(self, leaf: Leaf, lanes: int, ring_ticks: int) -> None:
        self.leaf = leaf
        self._lanes = lanes
        self._ring_ticks = ring_ticks
        self._rows = new_ring(ring_ticks, lanes, leaf)
        self._flat = self._rows.reshape(ring_ticks * lanes, *leaf.shape)
        self.shape, self.dtype = self._rows.shape, self._rows.dtype
        self._runs: tuple[ColumnRuns, int] | None = None  # and which of their rings this is
        self.paired: Array | None = None
        self.kept_apart = RowsById(leaf)
        self._has_apart = False  # or had

    def flat(self) -> FlatField:
        """Return where ticks are written."""
        return FlatField(self._rows, self.paired, is_observation=True, apart=self.kept_apart)

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
        self.kept_apart.drop_before((tick + 2 - self._ring_ticks) * self._lanes)
        self._has_apart = True
        kept_ticks = min(tick + 1, self._ring_ticks - 1)
        most = max(_UNSHARED_BEFORE_PAIRING, kept_ticks * self._lanes // 2)
        self.kept_apart.append(tick * self._lanes + differs, standing[differs], most)
        if len(self.kept_apart) > most:
            self._pair(max(0, tick + 2 - self._ring_ticks), tick + 1)

    def read(
        self, ids: NDArray[np.int64], slot: NDArray[np.int64], next_slot: NDArray[np.int64]
    ) -> tuple[Array, Array]:
        """Return copies of the observations and next observations at flat (tick, lane) slots."""
        if self._runs is not None:
            runs, number = self._runs
            obs, next_obs = runs.read(number, ids), runs.read(number, ids + self._lanes)
        else:
            obs = self._flat.take(slot, axis=0)
            if self.paired is not None:
                return obs, self.paired.reshape(self._flat.shape).take(slot, axis=0)
            next_obs = self._flat.take(next_slot, axis=0)
        if self._has_apart:
            self.kept_apart.replace(next_obs, ids)
        return obs, next_obs

    def rows(self, first: int, end: int) -> Array:
        """See `LiveRows.rows`."""
        if self._runs is None:
            return rows_of(self._rows, first, end)
        runs, number = self._runs
        found = runs.read(number, np.arange(first * self._lanes, end * self._lanes))
        return found.reshape(end - first, *self.shape[1:])

    def view(self, first: int, end: int) -> Array:
        """See `LiveRows.view`."""
        if self._runs is not None:
            return self.rows(first, end)
        return self._rows[first % self._ring_ticks :][: end - first]

    def read_from(self, runs: ColumnRuns | None, number: int) -> None:
        """Look for rows in runs, or in the ring alone, from now on."""
        self._runs = None if runs is None else (runs, number)
        self.kept_apart.hold(replace(self.kept_apart.held))  # a `RowTable` sees that it is another object

    def describe_columns(self) -> list[list[int]]:
        """Describe observations and next observations to the kernels, see `COLUMN_FIELDS`."""
        ring, nbytes, apart = address(self._rows), self.leaf.nbytes, self.kept_apart.held
        runs = [0, 0] if self._runs is None else [self._runs[0].address, self._runs[1]]
        obs = [ring, nbytes, 0, 0, 0, 0, 0, 0, *runs]
        if self.paired is not None:
            return [obs, [address(self.paired), nbytes, *[0] * 8]]
        ids, rows = (column[apart.first : apart.end] for column in (apart.ids, apart.rows))
        return [obs, [ring, nbytes, self._lanes, 0, len(ids), address(ids), address(rows), 0, *runs]]

    @property
    def is_shared(self) -> bool:
        """Whether next observations are found in the following tick."""
        return self.paired is None

    def arrays(self) -> list[Array]:
        """Return the arrays that the field lies in."""
        paired = [] if self.paired is None else [self.paired]
        packed = [] if self._runs is None or self._runs[1] else self._runs[0].arrays()
        return [self._rows, *paired, *self.kept_apart.arrays(), *packed]

    def bytes_of(self, rows: int) -> int:
        """Bytes that so many rows take, with the next observations that are kept apart and their ids."""
        packed, packed_bytes = (0, 0) if self._runs is None else self._runs[0].packed(self._runs[1])
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
        apart, _ = self.kept_apart.held.between(first, end)  # older ones may not be dropped yet
        share = 100 * (1 - len(apart) / (end - first)) if end > first else 100.0
        found = "" if self._runs is None else self._runs[0].describe(self._runs[1])
        return f"flat rows; {share:.1f} % of next observations shared{found}"

    def columns(self) -> dict[str, Ring]:
        """Return the rings of rows: of observations, and of next observations if they have one of their own."""
        return {"obs": self} if self.paired is None else {"obs": self, "next": self.paired}

    def apart(self) -> Apart:
        """Return the next observations kept apart now, unharmed by what comes later."""
        return self.kept_apart.freeze()

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

    def pair(self, first_tick: int, next_tick: int) -> None:
        """Give next observations a ring of their own, with those of the ticks held in it."""
        if self.paired is None:
            self._pair(first_tick, next_tick)

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
            self.kept_apart.append(*apart)
            self._has_apart = True

    def _pair(self, first_tick: int, next_tick: int) -> None:
        """Go over to two full rings, the second for next observations, here of the ticks [first_tick, next_tick)."""
        if self._runs is not None:
            self._runs[0].end(next_tick + 1 - self._ring_ticks)
        paired = new_ring(self._ring_ticks, self._lanes, self.leaf)
        ticks = np.arange(first_tick, next_tick)
        ids = ticks[:, None] * self._lanes + np.arange(self._lanes)
        next_obs = self._rows[(ticks + 1) % self._ring_ticks].reshape(ids.size, *self.leaf.shape)
        self.kept_apart.replace(next_obs, ids.reshape(-1))
        paired[ticks % self._ring_ticks] = next_obs.reshape(len(ticks), *self._rows.shape[1:])
        self.paired = paired
        self.kept_apart = RowsById(self.leaf)

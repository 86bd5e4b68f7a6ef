"""Columns: the short observations of older ticks, packed without what repeats in them.

In:  rings of rows that will not change any more.  Out: runs of ticks that columns.c reads rows from; the pages of the
rings that held them are given back.
Invariant: a tick lies in its ring or in a run, and reads the same from both: a run is used only after all of it was
read back and compared. An interrupt leaves ticks where they were; what was packed already may be packed again.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Bytes
from holdall.storage.blocks import address
from holdall.storage.column_plan import (
    GROUP_FIELDS,
    PIECE_FIELDS,
    PLAN_FIELDS,
    ColumnPlan,
    find_plan,
    rows_to_look_at,
    word_bytes,
)
from holdall.storage.snapshot import put_rows
from holdall.storage.ticks import Kernels

if TYPE_CHECKING:
    from holdall.storage.rings import ObservationRing

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

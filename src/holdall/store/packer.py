"""SegmentPacker: packs the small observations of closed segments.

The packer searches the rows of a segment for a packing plan, and uses the plan for later segments as long as it saves
memory. Every row is compared when it is packed, so a plan that does not fit costs memory and never changes a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdall._native import PackedRun, Part, Segment
from holdall.schema import Leaf
from holdall.store.packed_columns import MAX_PACKED_LEAF_BYTES, PackingPlan, find_plan
from holdall.store.tuning import Tuning

_MAX_GROWTH = 1.25
"""Growth of packed segments after which another plan is searched for."""


class SegmentPacker:
    """The plan for the small observations of one store. Not thread-safe: the store holds its lock."""

    def __init__(self, leaves: Sequence[Leaf], tuning: Tuning) -> None:
        self._leaves = leaves
        self._tuning = tuning
        self._columns: tuple[int, ...] = ()  # Observation leaves that the plan is for.
        self._plan: PackingPlan | None = None
        self._planned_share = 1.0  # Packed bytes divided by plain bytes of the segment of the last search.
        self._pause_segments = 0  # Segments before the next search.

    def pack(self, segment: Segment) -> dict[int, Part]:
        """Return packed parts for the shared parts of a closed segment, by column. Empty if packing does not pay."""
        columns = self._choose_columns(segment)
        transitions = segment.ticks * segment.lanes
        if not columns or transitions < self._tuning.min_packed_rows:
            return {}
        if columns != self._columns:
            self._columns = columns
            self._plan = None
            self._pause_segments = 0
        if self._plan is None and self._pause_segments > 0:
            self._pause_segments -= 1
            return {}
        rows = [segment.parts[column].arrays()["rows"] for column in columns]
        run = self._pack_rows(rows, segment)
        if run is None:
            return {}
        return {column: Part.pack(run, leaf, segment.parts[column]) for leaf, column in enumerate(columns)}

    def _choose_columns(self, segment: Segment) -> tuple[int, ...]:
        return tuple(
            column
            for column, leaf in enumerate(self._leaves)
            if segment.parts[column].kind == "shared" and 0 < leaf.nbytes <= MAX_PACKED_LEAF_BYTES
        )

    def _pack_rows(self, rows: list[NDArray[np.uint8]], segment: Segment) -> PackedRun | None:
        """Pack rows with the current plan. Search for another plan if the packed rows are larger than expected.

        Return None if packing does not pay.
        """
        plain_bytes = sum(each.nbytes for each in rows)
        run = None
        if self._plan is not None:
            run = PackedRun.pack(self._plan, rows, segment.ticks + 1, segment.lanes)
        if run is not None and run.nbytes <= _MAX_GROWTH * self._planned_share * plain_bytes:
            return run
        if self._pause_segments > 0:
            self._pause_segments -= 1
            return run
        self._pause_segments = self._tuning.packed_search_interval
        new_plan = self._search_plan(rows, segment)
        new_run = None if new_plan is None else PackedRun.pack(new_plan, rows, segment.ticks + 1, segment.lanes)
        if new_run is not None and (run is None or new_run.nbytes < run.nbytes):
            self._plan = new_plan
            run = new_run
        if run is None:
            self._plan = None
        else:
            self._planned_share = run.nbytes / plain_bytes
        return run

    def _search_plan(self, rows: list[NDArray[np.uint8]], segment: Segment) -> PackingPlan | None:
        """Search for a plan in the first rows of some lanes of a segment."""
        lanes = segment.lanes
        sample_lanes = min(lanes, self._tuning.packed_sample_lanes)
        ticks = min(segment.ticks, self._tuning.packed_sample_rows // sample_lanes)
        samples = []
        for each in rows:
            sample = each.reshape(segment.ticks + 1, lanes, -1)[:ticks, :sample_lanes].swapaxes(0, 1)
            samples.append(np.ascontiguousarray(sample).reshape(sample_lanes * ticks, -1))
        item_bytes = [self._leaves[column].dtype.itemsize for column in self._columns]
        return find_plan(samples, item_bytes)

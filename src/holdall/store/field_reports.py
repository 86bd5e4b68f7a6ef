"""Reports of the bytes that every field of a store takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdall._native import Block, Catalog, Coded
from holdall.report import FieldReport, field_name
from holdall.schema import Schema
from holdall.store.columns import Columns

_FINDINGS = {
    "rows": "rows",
    "halves": "rows of 2 bytes per value, because the other 2 are zero",
    "bits": "rows of 1 bit per value, because all values are 0 or 1",
}
"""How a column that is not an observation is stored, by the kind of its newest closed part."""
_PLAIN_FLAG_BYTES = 2
"""Bytes of `terminated` and `truncated` in the plain layout."""


class _ColumnBytes:
    """Bytes of one column in all segments."""

    def __init__(self) -> None:
        self.row_bytes = 0
        self.log_bytes = 0
        self.blocks: dict[Block, None] = {}


def report_fields(
    catalog: Catalog,
    schema: Schema,
    columns: Columns,
    reward_dtype: np.dtype[Any] | None,
    segment_ticks: int,
    describe: Callable[[int], str],
) -> list[FieldReport]:
    """Return the bytes of every field of a writer's catalog.

    Args:
        segment_ticks: Ticks for which the open segment has reserved memory. Only its written ticks are counted.
        describe: Returns how an observation leaf is stored.
    """
    entries = (catalog.next_tick - catalog.first_tick) * catalog.lanes
    totals = _add_up_columns(catalog, columns, segment_ticks)
    reports = []
    for column, leaf in enumerate(schema.observation.leaves):
        plain_bytes = 2 * entries * leaf.nbytes
        name = field_name("obs", leaf.name)
        reports.append(_report_observation(totals[column], name, plain_bytes, describe(column)))
    # The open segment is the last one. It counts only if no segment was closed.
    newest_closed = catalog.segments[-2:][0]
    names = [field_name("action", leaf.name) for leaf in schema.action.leaves]
    names += ["reward", *[field_name("extras", leaf.name) for leaf in schema.extras.leaves], "flags"]
    for column, name in enumerate(names, len(schema.observation.leaves)):
        plain_bytes = entries * _count_plain_bytes(columns, reward_dtype, column)
        finding = _FINDINGS[newest_closed.parts[column].kind]
        reports.append(FieldReport(name, 0, 0, totals[column].row_bytes, plain_bytes, finding))
    return reports


def _add_up_columns(catalog: Catalog, columns: Columns, segment_ticks: int) -> list[_ColumnBytes]:
    totals = [_ColumnBytes() for _ in range(columns.flags + 1)]
    open_segment = catalog.last_segment
    for segment in catalog.segments:
        for column, part in zip(totals, segment.parts, strict=True):
            nbytes = part.nbytes
            if segment is open_segment:
                nbytes = nbytes * segment.ticks // segment_ticks
            if part.block is None:
                column.row_bytes += nbytes
            else:
                column.log_bytes += nbytes
                column.blocks[part.block] = None
    return totals


def _report_observation(total: _ColumnBytes, name: str, plain_bytes: int, finding: str) -> FieldReport:
    slice_bytes = 0
    compressed_bytes = 0
    disk_bytes = 0
    for block in total.blocks:
        form = block.form
        if isinstance(form, Coded):
            slice_bytes += form.nbytes
            compressed_bytes += form.nbytes
            disk_bytes += form.disk_bytes
        else:
            slice_bytes += block.slice_count * block.slice_bytes
    return FieldReport(
        name=name,
        slice_bytes=slice_bytes,
        log_bytes=total.log_bytes,
        row_bytes=total.row_bytes,
        plain_bytes=plain_bytes,
        finding=finding,
        compressed_bytes=compressed_bytes,
        disk_bytes=disk_bytes,
    )


def _count_plain_bytes(columns: Columns, reward_dtype: np.dtype[Any] | None, column: int) -> int:
    """Return the bytes of one row of a column in the plain layout. Not for observations."""
    if column == columns.flags:
        return _PLAIN_FLAG_BYTES
    return columns.count_row_bytes(column, reward_dtype) or 0  # None: there are no rewards yet.

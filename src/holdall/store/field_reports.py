"""Reports of the bytes that every field of a store takes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
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
    held = (catalog.next_tick - catalog.first_tick) * catalog.lanes
    counted = _count_columns(catalog, columns, segment_ticks)
    reports = []
    for column, leaf in enumerate(schema.observation.leaves):
        plain_bytes = 2 * held * leaf.nbytes
        name = field_name("obs", leaf.name)
        reports.append(_report_observation(counted[column], name, plain_bytes, describe(column)))
    newest = catalog.segments[-2:][0]
    names = [field_name("action", leaf.name) for leaf in schema.action.leaves]
    names += ["reward", *[field_name("extras", leaf.name) for leaf in schema.extras.leaves], "flags"]
    for column, name in enumerate(names, len(schema.observation.leaves)):
        plain_bytes = held * _count_plain_bytes(schema, columns, reward_dtype, column)
        reports.append(
            FieldReport(name, 0, 0, counted[column].row_bytes, plain_bytes, _FINDINGS[newest.parts[column].kind])
        )
    return reports


def _count_columns(catalog: Catalog, columns: Columns, segment_ticks: int) -> list[_ColumnBytes]:
    counted = [_ColumnBytes() for _ in range(columns.flags + 1)]
    open_segment = catalog.last_segment
    for segment in catalog.segments:
        for column, part in zip(counted, segment.parts, strict=True):
            nbytes = part.nbytes
            if segment is open_segment:
                nbytes = nbytes * segment.ticks // segment_ticks
            if part.block is None:
                column.row_bytes += nbytes
            else:
                column.log_bytes += nbytes
                column.blocks[part.block] = None
    return counted


def _report_observation(counted: _ColumnBytes, name: str, plain_bytes: int, finding: str) -> FieldReport:
    slice_bytes = 0
    compressed_bytes = 0
    disk_bytes = 0
    for block in counted.blocks:
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
        log_bytes=counted.log_bytes,
        row_bytes=counted.row_bytes,
        plain_bytes=plain_bytes,
        finding=finding,
        compressed_bytes=compressed_bytes,
        disk_bytes=disk_bytes,
    )


def _count_plain_bytes(schema: Schema, columns: Columns, reward_dtype: np.dtype[Any] | None, column: int) -> int:
    """Return the bytes of one row of a column that is not an observation."""
    if column == columns.flags:
        return _PLAIN_FLAG_BYTES
    if column == columns.reward:
        return 0 if reward_dtype is None else prod(schema.reward_shape) * reward_dtype.itemsize
    if column < columns.reward:
        return schema.action.leaves[column - len(schema.observation.leaves)].nbytes
    return schema.extras.leaves[column - columns.first_extra].nbytes

"""Accounts of all shards, added up field by field.

In:  what every shard reports, as plain words.  Out: one report a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdall.report import FieldReport


def added_up(reports: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[FieldReport, ...]:
    """Add up the fields of the same name; a shard that is still empty may not know of all."""
    fields = [[FieldReport(**field) for field in of_shard] for of_shard in reports]
    longest = max(fields, key=len, default=[])
    return tuple(_sum_of([field for one in fields for field in one if field.name == f.name]) for f in longest)


def _sum_of(fields: list[FieldReport]) -> FieldReport:
    return FieldReport(
        fields[0].name,
        sum(field.slice_bytes for field in fields),
        sum(field.log_bytes for field in fields),
        sum(field.row_bytes for field in fields),
        sum(field.plain_bytes for field in fields),
        fields[0].finding,
        sum(field.sealed_bytes for field in fields),
        sum(field.disk_bytes for field in fields),
    )

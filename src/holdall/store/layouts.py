"""Layouts: the ways to store an observation column.

The native writer takes layouts as tuples and returns them as plain tuples. A plain tuple equals the named tuple of the
same layout and has the same hash.
"""

from __future__ import annotations

from typing import NamedTuple

from holdall._native import Part


class RowLayout(NamedTuple):
    """Observations as rows. See `SHARED` and `PAIRED`."""

    kind: str


class SlicedLayout(NamedTuple):
    """Observations as the numbers of their slices. `holdall.store.windows.Window` explains the numbers."""

    kind: str  # Always "sliced".
    slice_count: int
    outer: int
    run_bytes: int
    shift: int


Layout = RowLayout | SlicedLayout

SHARED = RowLayout("shared")
"""Each observation once. The next observation is the row of the following tick, or else an exception."""
PAIRED = RowLayout("paired")
"""The observation and the next observation, both in full."""


def find_sliced_layout(part: Part) -> SlicedLayout:
    """Return the layout of a sliced part. Only sliced parts have a block."""
    layout = part.layout
    assert layout is not None
    assert len(layout) == 5  # The fields of `SlicedLayout`.
    return SlicedLayout(*layout)

"""The index: which segment a tick lies in, and where its parts are, for readers without a lock.

In:  segments as they are opened, closed, sealed and dropped.  Out: tables that `Places` name.
Invariant: a table that was handed out never changes. A change makes a new one, and copies no more than numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdall.experience.part import RECORD_FIELDS, ClosedPart, Held, OpenPart

AnyPart = OpenPart | ClosedPart


class SegmentIndex:
    """First tick of every segment, and per field a record of every part; the open segment's come last."""

    def __init__(self) -> None:
        self.version = 0
        self.first_ticks: NDArray[np.int64] = np.empty(0, np.int64)
        self.records: list[NDArray[np.int64]] = []  # per field: (segments, len(RECORD_FIELDS))
        self.held: list[tuple[Held, ...]] = []  # per field and segment: what its record points into

    def rebuild(self, first_ticks: list[int], fields: list[list[AnyPart]]) -> None:
        """Start over, field by field and segment by segment."""
        self.version += 1
        self.first_ticks = np.array(first_ticks, np.int64)
        self.records = [
            np.array([part.record() for part in parts], np.int64).reshape(-1, len(RECORD_FIELDS)) for parts in fields
        ]
        self.held = [tuple(part.held for part in parts) for parts in fields]

    def open_next(self, first_tick: int, closed: list[ClosedPart], following: list[OpenPart]) -> None:
        """The open segment was closed, and another one follows."""
        self.version += 1
        self.first_ticks = np.append(self.first_ticks, first_tick)
        for field, (old, new) in enumerate(zip(closed, following, strict=True)):
            rows = np.array([old.record(), new.record()], np.int64)
            self.records[field] = np.concatenate([self.records[field][:-1], rows])
            self.held[field] = (*self.held[field][:-1], old.held, new.held)

    def drop(self, segments: int) -> None:
        """Forget the oldest segments."""
        self.version += 1
        self.first_ticks = self.first_ticks[segments:]
        self.records = [records[segments:] for records in self.records]
        self.held = [held[segments:] for held in self.held]

    def update(self, field: int, segment: int, part: AnyPart) -> None:
        """A part lies elsewhere now."""
        self.version += 1
        records = self.records[field].copy()
        records[segment] = part.record()
        self.records[field] = records
        held = list(self.held[field])
        held[segment] = part.held
        self.held[field] = tuple(held)

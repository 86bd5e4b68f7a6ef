"""What holdall's own memory takes: figures of a memory that was filled a little, and what they give for more.

In:  what `filling` measured.  Out: bytes for any number of transitions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_SEGMENTS_OF_A_CAPACITY = 16
"""A segment is at most this share of the capacity."""
_MOST_SEGMENTS = 3
"""Segments that are raw at most while the worker keeps up: the open one, one waiting, and one being sealed."""
_SPREAD = 0.1
"""What the ratio of the first thousands of steps may be off by."""


@dataclass(frozen=True, slots=True)
class Experience:
    """What holdall's memory takes."""

    raw_bytes: float  # per transition
    compressed_bytes: float | None  # per transition; None: not measured
    fixed_bytes: int  # beside the transitions: batches, tables, threads
    steps: int  # real steps that this was measured on; 0: made-up ones
    findings: dict[str, str]  # by field, in the memory's own words
    sealing_bytes: int = 0  # beside the transitions if they are compressed: what codecs work in, too
    segment_bytes: int = 0  # of unique slices; a full one is raw while it is sealed
    most_compressed_bytes: float | None = None  # per transition, where another codec was chosen in another trial

    def need(self, transitions: int) -> int:
        """Bytes for so many transitions, in the smallest form that was measured."""
        return min(self.raw_need(transitions), self._compressed_need(transitions, segments=1))

    def most(self, transitions: int) -> int:
        """An upper bound: the ratio gets worse, and the worker is as far behind as it may be."""
        raw = int(self.raw_need(transitions) * (1 + _SPREAD))
        worse = replace(self, compressed_bytes=self.most_compressed_bytes or self.compressed_bytes)
        return min(raw, int(worse._compressed_need(transitions, segments=_MOST_SEGMENTS) * (1 + _SPREAD)))

    def raw_need(self, transitions: int) -> int:
        """Bytes for so many transitions if nothing is compressed."""
        return int(self.raw_bytes * transitions) + self.fixed_bytes

    def _compressed_need(self, transitions: int, segments: int) -> int:
        if self.compressed_bytes is None:
            return self.raw_need(transitions)
        # The worker seals a segment faster than training fills the next one: one is raw, and it is full at the peak.
        segment = min(self.segment_bytes, int(self.raw_bytes * transitions) // _SEGMENTS_OF_A_CAPACITY)
        return int(self.compressed_bytes * transitions) + segments * segment + self.sealing_bytes

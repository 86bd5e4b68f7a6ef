"""Standings: what a shard says of itself with every answer.

In:  counts.  Out: 64 bytes, and back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Self

from holdall.errors import DamageError

_FORM = struct.Struct("<qqqqqqqd")


@dataclass(frozen=True, slots=True)
class Standing:
    """One shard at one moment."""

    NBYTES: ClassVar[int] = _FORM.size

    epoch: int  # another one after every restart
    first_row: int
    next_row: int
    transitions: int  # rows held that can be drawn
    inserted: int  # transitions ever accepted
    changes: int  # of what is held or of priorities, since it was started
    backlog: int  # bytes that wait to be made durable
    mass: float  # what its draws are in proportion to: transitions, or the sum of scaled priorities

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _FORM.pack(*(getattr(self, name) for name in self.__slots__))  # a third of astuple's time

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Read it back."""
        if len(raw) != _FORM.size:
            raise DamageError(f"{len(raw)} bytes are no shard's standing; nothing of them is used")
        return cls(*_FORM.unpack(raw))

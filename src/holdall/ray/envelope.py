"""Envelopes: what goes with a block, and what comes back.

In:  a writer's name, the shard's epoch that it knows, and the block's place in its order.  Out: bytes; and back.
Invariant: a shard takes a writer's blocks in order and each once: it accepts the one number that it expects, and says
which that is when it gets another.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from holdall.errors import DamageError
from holdall.ray.standing import Standing

_ENVELOPE = struct.Struct("<16sqq")
_ACK = struct.Struct("<qqq64s")


class Verdict(IntEnum):
    """What a shard did with a block."""

    ACCEPTED = 0
    EXPECTED_ANOTHER = 1  # out of order, or there already
    NEEDS_DICTIONARY = 2
    REFUSED = 3  # it will never be accepted; the reason follows
    CLOSED = 4  # the shard takes nothing more; send it to another


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who sends which block to whom."""

    writer: bytes  # 16
    epoch: int
    sequence: int

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _ENVELOPE.pack(self.writer, self.epoch, self.sequence)

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Read it back."""
        if len(raw) != _ENVELOPE.size:
            raise DamageError(f"{len(raw)} bytes are no envelope; the block is not used")
        return cls(*_ENVELOPE.unpack(raw))


@dataclass(frozen=True, slots=True)
class Ack:
    """A shard's answer to a block."""

    verdict: Verdict
    expected: int  # the number of the writer's next block
    credits: int  # blocks that the writer may have under way
    standing: Standing
    reason: str = ""

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _ACK.pack(self.verdict, self.expected, self.credits, self.standing.packed()) + self.reason.encode()

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Read it back."""
        if len(raw) < _ACK.size:
            raise DamageError(f"{len(raw)} bytes are no answer to a block; nothing of them is used")
        verdict, expected, credit, standing = _ACK.unpack(raw[: _ACK.size])
        return cls(Verdict(verdict), expected, credit, Standing.of(standing), raw[_ACK.size :].decode())

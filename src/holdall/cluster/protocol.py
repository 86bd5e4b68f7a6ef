"""Transition ids over shards: the shard, and the number of the row there.

    bits 48 to 62: shard    bits 36 to 47: life, for shards that start empty after a loss    bits 0 to 35: row

Invariant: an id is never used again, not even by a shard that lost what it held. Those of shard 0 in its first life are
those of a local memory.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError, ShardError
from holdall.schema import Leaf, Schema

Ids = NDArray[np.int64]

_SHARD_SHIFT = 48
_LIFE_SHIFT = 36
MOST_SHARDS = 1 << 15
MOST_LIVES = 1 << 12
_ROW_MASK = np.int64((1 << _SHARD_SHIFT) - 1)


def first_row_of(life: int) -> int:
    """Return the number of a shard's first row in one of its lives."""
    return (life % MOST_LIVES) << _LIFE_SHIFT


def life_of(row: int) -> int:
    """Return the life in which a row was accepted."""
    return row >> _LIFE_SHIFT


def ids_of(shard: int, rows: Ids) -> Ids:
    """Name rows of a shard."""
    return rows | np.int64(shard << _SHARD_SHIFT)


def shards_of(ids: Ids) -> Ids:
    """Return the shards of ids."""
    return ids >> _SHARD_SHIFT


def rows_of(ids: Ids) -> Ids:
    """Return the row numbers of ids, as their shards count."""
    return ids & _ROW_MASK


ROW_BYTES = 256
"""Observation leaves up to this size travel as rows, obs and next_obs: cutting them into slices spares nothing."""

Column = tuple[tuple[int, ...], np.dtype[Any]]
_FLAG: Column = ((), np.dtype(np.bool_))


@dataclass(frozen=True, slots=True)
class TravelLayout:
    """The fields of a transition, by how they travel."""

    schema: Schema
    sliced: tuple[int, ...]  # observation leaves that are cut into slices, in the order of their fields
    columns: dict[str, Column]  # all else but the reward, whose dtype the first add says

    @classmethod
    def of(cls, schema: Schema) -> TravelLayout:
        """Lay out the transitions of a schema."""
        leaves = schema.observation.leaves
        sliced = tuple(i for i, leaf in enumerate(leaves) if leaf.nbytes > ROW_BYTES)
        columns: dict[str, Column] = {}
        for i, leaf in enumerate(leaves):
            if i not in sliced:
                columns[f"obs.{i}"] = columns[f"next.{i}"] = (leaf.shape, leaf.dtype)
        columns |= {f"action.{i}": (leaf.shape, leaf.dtype) for i, leaf in enumerate(schema.action.leaves)}
        columns |= {f"extras.{i}": (leaf.shape, leaf.dtype) for i, leaf in enumerate(schema.extras.leaves)}
        columns |= dict.fromkeys(("terminated", "truncated", "valid"), _FLAG)
        return cls(schema, sliced, columns)

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves that are cut into slices."""
        return [self.schema.observation.leaves[i] for i in self.sliced]

    def with_reward(self, dtype: np.dtype[Any]) -> dict[str, Column]:
        """Return all columns, the reward's among them."""
        return self.columns | {"reward": ((), dtype)}


_FORM = struct.Struct("<qqqqqqqd")


@dataclass(frozen=True, slots=True)
class ShardCounters:
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


_MOST_CLIENTS = 4096
_TURN = struct.Struct("<16sqq")


class OutOfTurnError(ShardError):
    """A call that came before this one by its number is missing."""


@dataclass(frozen=True, slots=True)
class CallOrder:
    """One call's place in its client's order; it travels as one argument, as every one of a call takes Ray time."""

    client: bytes  # 16
    epoch: int  # of the shard, as the client knows it
    number: int

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _TURN.pack(self.client, self.epoch, self.number)

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Read it back."""
        if len(raw) != _TURN.size:
            raise DamageError(f"{len(raw)} bytes are no call's turn; nothing is done")
        return cls(*_TURN.unpack(raw))


class CallQueue:
    """Lets calls through by their numbers."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self._next: OrderedDict[bytes, int] = OrderedDict()
        self._changed = threading.Condition()
        self._patience_s = patience_s

    @contextmanager
    def taken(self, turn: CallOrder) -> Iterator[None]:
        """Wait for a turn, and end it."""
        client, number = turn.client, turn.number
        with self._changed:
            self._next.setdefault(client, 0)
            self._next.move_to_end(client)
            while len(self._next) > _MOST_CLIENTS:
                self._next.popitem(last=False)
            until = time.monotonic() + self._patience_s
            while self._next.get(client, number) < number:
                left = until - time.monotonic()
                if left <= 0:
                    raise OutOfTurnError(f"call {number} came, but {self._next.get(client)} of the same client did not")
                self._changed.wait(left)
        try:
            yield
        finally:
            with self._changed:
                self._next[client] = max(self._next.get(client, 0), number + 1)
                self._changed.notify_all()


_ENVELOPE = struct.Struct("<16sqq")
_ACK = struct.Struct("<qqq64s")


class AckKind(IntEnum):
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

    verdict: AckKind
    expected: int  # the number of the writer's next block
    credits: int  # blocks that the writer may have under way
    standing: ShardCounters
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
        return cls(AckKind(verdict), expected, credit, ShardCounters.of(standing), raw[_ACK.size :].decode())


def is_newer(told: ShardCounters, known: ShardCounters | None) -> bool:
    """Whether a shard said this after what is known; calls may overtake each other."""
    return known is None or (told.epoch, told.changes) >= (known.epoch, known.changes)

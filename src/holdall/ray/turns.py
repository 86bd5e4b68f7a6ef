"""Turns: the calls of one client, taken in the order in which it made them.

In:  a client's name and a running number with every call.  Out: the calls, one after another.
Invariant: Ray does not keep the order of calls to an actor with several threads; a client's draws and priorities do
depend on it. A call that never came is not waited for for ever: its client begins anew under another name.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from holdall.errors import DamageError, ShardError

_MOST_CLIENTS = 4096
_TURN = struct.Struct("<16sqq")


class OutOfTurnError(ShardError):
    """A call that came before this one by its number is missing."""


@dataclass(frozen=True, slots=True)
class Turn:
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


class Turns:
    """Lets calls through by their numbers."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self._next: OrderedDict[bytes, int] = OrderedDict()
        self._changed = threading.Condition()
        self._patience_s = patience_s

    @contextmanager
    def taken(self, turn: Turn) -> Iterator[None]:
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

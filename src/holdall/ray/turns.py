"""Turns: the calls of one client, taken in the order in which it made them.

In:  a client's name and a running number with every call.  Out: the calls, one after another.
Invariant: Ray does not keep the order of calls to an actor with several threads; a client's draws and priorities do
depend on it. A call that never came is not waited for for ever: its client begins anew under another name.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from holdall.errors import ShardError

_MOST_CLIENTS = 4096


class OutOfTurnError(ShardError):
    """A call that came before this one by its number is missing."""


class Turns:
    """Lets calls through by their numbers."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self._next: OrderedDict[bytes, int] = OrderedDict()
        self._changed = threading.Condition()
        self._patience_s = patience_s

    @contextmanager
    def taken(self, client: bytes, turn: int) -> Iterator[None]:
        """Wait for a turn, and end it."""
        with self._changed:
            self._next.setdefault(client, 0)
            self._next.move_to_end(client)
            while len(self._next) > _MOST_CLIENTS:
                self._next.popitem(last=False)
            until = time.monotonic() + self._patience_s
            while self._next.get(client, turn) < turn:
                left = until - time.monotonic()
                if left <= 0:
                    raise OutOfTurnError(f"call {turn} came, but {self._next.get(client)} of the same client did not")
                self._changed.wait(left)
        try:
            yield
        finally:
            with self._changed:
                self._next[client] = max(self._next.get(client, 0), turn + 1)
                self._changed.notify_all()

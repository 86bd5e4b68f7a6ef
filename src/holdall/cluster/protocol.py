"""What writers, shards and learners send each other: ids, counters, and streams of segments.

A transition id over shards is the shard, and the number of the row there:

    bits 48 to 62: shard    bits 36 to 47: life, for shards that start empty after a loss    bits 0 to 35: row

Invariant: an id is never used again, not even by a shard that lost what it held. Those of shard 0 in its first life are
those of a local memory. A segment is kept until the shard acknowledged it. Calls that change a shard are never
retried by Ray: a segment has a number, and a shard takes every number of a writer once and in order, however often it
is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.errors import HoldallError, ShardError

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


class ShardCounters(NamedTuple):
    """One shard at one moment."""

    epoch: int  # another one after every restart
    first_row: int
    next_row: int
    transitions: int  # rows held that can be drawn
    inserted: int  # transitions ever accepted
    changes: int  # of what is held or of priorities, since it was started
    backlog: int  # bytes that wait to be made durable
    mass: float  # what its draws are in proportion to: transitions, or the sum of scaled priorities
    highest: float = 0.0  # scaled priority that a new row gets


class RestartedError(ShardError):
    """A shard that does not know what it was asked before, as it was restarted since."""


def this_machine() -> bytes:
    """Name the machine that this process runs on, as Ray counts machines."""
    node: str = ray.get_runtime_context().get_node_id()
    return node.encode()


def this_node() -> str:
    """Return the address of the machine that this process runs on, as Ray has it."""
    address: Any = ray.util.get_node_ip_address  # it has no types
    return str(address())


class Ack(NamedTuple):
    """A shard's answer to some segments of a writer."""

    expected: int  # the number of the writer's next segment; all before it are there, and durable if any are
    counters: ShardCounters
    is_closed: bool = False  # the shard takes nothing more
    refused: str = ""  # why the next segment will never be accepted


class GoneError(ShardError):
    """A shard that will not come back."""


class ShardClosedError(GoneError):
    """A shard that takes nothing more; what it has not accepted is safe to send elsewhere."""


def received(call: Any, patience_s: float | None = None) -> Any:
    """Wait for a call's result; an error of holdall's own is raised as it was there."""
    try:
        return ray.get(call, timeout=patience_s)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HoldallError):
            raise cause from None
        raise


PAUSE_S = 0.05
_LOOK_AGAIN_S = 2.0
"""How often the roster is asked for new shards."""


def asked(find: Callable[[], Any], method: str, *arguments: Any, patience_s: float, timeout_s: float | None) -> Any:
    """Call what may be called twice; an actor that Ray restarts, also on another machine, is waited for.

    Args:
        find: Returns the actor, or refuses one that is gone for good.
        timeout_s: How long one call may take; None: as long as it takes, of an actor that answers as soon as it is up.
    """
    until, was_dead = time.monotonic() + patience_s, False
    while True:
        actor = find()  # which older versions of Ray lose, if nothing refers to it during the call
        try:
            return received(getattr(actor, method).remote(*arguments), timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            is_dead = isinstance(error, ray.exceptions.ActorDiedError)
            if is_dead and was_dead:
                raise GoneError(f"{method} will never be answered: the actor is gone for good ({error})") from error
            was_dead = is_dead
            if time.monotonic() > until:
                raise ShardError(
                    f"{method} was not answered for {patience_s:g} s ({type(error).__name__}); nothing is lost: see "
                    "`ray status` for room, and try again"
                ) from error
        time.sleep(PAUSE_S)


class ShardList:
    """The shards of a memory, by number, as its roster lists them. Not locked."""

    def __init__(self, roster: Any, patience_s: float) -> None:
        self._roster, self._patience_s = roster, patience_s
        self.handles: dict[int, Any] = {}
        self._version = -1
        self._looked_at = -_LOOK_AGAIN_S

    def look(self, *, now: bool = False) -> None:
        """Ask the roster, from time to time or at once; who knows no shard yet waits for one that is restarted."""
        if not now and self.handles and time.monotonic() - self._looked_at < _LOOK_AGAIN_S:
            return
        self._looked_at, roster = time.monotonic(), self._roster
        until = self._looked_at if self.handles else self._looked_at + self._patience_s
        while True:
            missing, left_s = "lists no shards", until - time.monotonic()
            try:
                known = asked(lambda: roster, "shards", self._version, patience_s=left_s, timeout_s=self._patience_s)
                if known[1] is not None:
                    self._version, self.handles = known
            except ShardError as error:
                missing = f"does not answer ({error})"
            if self.handles:
                return
            if left_s < 0:
                raise ShardError(f"the memory's roster {missing}; is the memory closed?")
            time.sleep(PAUSE_S)

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
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.errors import FencedError, HoldallError, ShardError

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


_PAUSE_S = 0.05
_REASON_S = 1.0
_LOOK_AGAIN_S = 2.0
"""How often the roster is asked for new shards."""
_MOST_UNDER_WAY, _MOST_BYTES_UNDER_WAY = 8, 16 * 2**20
"""Segments on their way to one shard: enough that it has some to take while it acknowledges others."""
_CROWDED_BYTES = 32 * 2**20


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
        time.sleep(_PAUSE_S)


class ShardList:
    """The shards of a memory, by number, as its roster lists them. Not locked."""

    def __init__(self, roster: Any, patience_s: float) -> None:
        self.roster, self._patience_s = roster, patience_s
        self.handles: dict[int, Any] = {}
        self._version = -1
        self._looked_at = -_LOOK_AGAIN_S

    def look(self, *, now: bool = False) -> None:
        """Ask the roster, from time to time or at once; who knows no shard yet waits for one that is restarted."""
        if not now and self.handles and time.monotonic() - self._looked_at < _LOOK_AGAIN_S:
            return
        self._looked_at, was_dead = time.monotonic(), False
        while True:
            missing, is_dead = "lists no shards", False
            try:
                version, handles = ray.get(self.roster.shards.remote(self._version), timeout=self._patience_s)
                if handles is not None:
                    self._version, self.handles = version, handles
            except ray.exceptions.RayError as error:
                missing = f"does not answer ({type(error).__name__})"
                is_dead = isinstance(error, ray.exceptions.ActorDiedError)
            if self.handles:
                return
            if (is_dead and was_dead) or time.monotonic() > self._looked_at + self._patience_s:
                raise ShardError(f"the memory's roster {missing}; is the memory closed?")
            was_dead = is_dead
            time.sleep(_PAUSE_S)


class SentSegment(NamedTuple):
    """A segment on its way to a shard."""

    payload: bytes
    rows: int
    lease: int  # of a limiter, which hears when the segment has arrived; -1: none


class SegmentStream:
    """Segments of one writer to one shard. Nothing waits here but `flush`; `poll` has to be called now and then.

    One call at a time brings all that wait. One that failed is made again, as a shard takes every segment once.

    Args:
        patience_s: How long a shard may be away before the caller gets an error.
    """

    def __init__(self, shard: Any, number: int, writer: bytes, patience_s: float, roster: Any = None) -> None:
        self._shard, self._roster, self.number, self._writer = shard, roster, number, writer
        self._patience_s = patience_s
        self.under_way: deque[SentSegment] = deque()
        self.sequence = 0  # number of the oldest of them, or of the next one
        self.counters: ShardCounters | None = None  # when the shard last said so
        self._call: Any = None
        self._again_at = 0.0
        self._trouble = ""
        self._was_dead = False

    @property
    def inserted(self) -> int:
        """Transitions that the shard ever took, as far as is known, with those under way."""
        taken = 0 if self.counters is None else self.counters.inserted
        return taken + self.unacknowledged_rows

    @property
    def unacknowledged_rows(self) -> int:
        """Rows of the segments under way."""
        return sum(segment.rows for segment in self.under_way)

    @property
    def has_room(self) -> bool:
        """Whether another segment may be under way: fewer may when much waits to be made durable."""
        if self.counters is not None and self.counters.backlog >= _CROWDED_BYTES:
            return not self.under_way
        nbytes = sum(len(segment.payload) for segment in self.under_way)
        return len(self.under_way) < _MOST_UNDER_WAY and nbytes < _MOST_BYTES_UNDER_WAY

    def send(self, payload: bytes, rows: int, lease: int = -1) -> None:
        """Send a segment; it is kept until the shard has acknowledged it."""
        self.under_way.append(SentSegment(payload, rows, lease))
        self.poll()

    def flush(self) -> None:
        """Wait until every segment is acknowledged."""
        left, until = 0, 0.0
        while self.under_way:
            if len(self.under_way) != left:
                left, until = len(self.under_way), time.monotonic() + self._patience_s
            elif time.monotonic() > until:
                raise self.silence()
            self.poll(min(1.0, self._patience_s))

    def silence(self) -> ShardError:
        """Return the error that says that the shard takes nothing, and why, as far as it says so."""
        try:
            said = str(ray.get(self._shard.trouble.remote(), timeout=_REASON_S))
        except ray.exceptions.RayError as error:
            said = f"it does not answer: {type(error).__name__}"
        return ShardError(
            f"shard {self.number} has not acknowledged a segment for {self._patience_s:g} s "
            f"({said or self._trouble or 'it answers, but is slow'}); the {self.unacknowledged_rows} transitions under "
            "way are kept: call flush() to try again"
        )

    def take_back(self) -> deque[SentSegment]:
        """Give up the segments that were not acknowledged, of a shard that is gone with all that it held."""
        left, self.under_way = self.under_way, deque()
        return left

    def poll(self, wait_s: float = 0.0) -> None:
        """Go on with what the shard said meanwhile; wait so long for its next word at most."""
        if self._call is None:
            self._send(wait_s)
        if self._call is None or not ray.wait([self._call], timeout=wait_s)[0]:
            return
        call, self._call = self._call, None
        try:
            ack: Ack = received(call)
        except FencedError:
            raise
        except (ray.exceptions.RayError, ShardError) as error:  # it is being restarted
            was_dead, self._was_dead = self._was_dead, isinstance(error, ray.exceptions.ActorDiedError)
            if was_dead and self._was_dead:
                raise GoneError(f"shard {self.number} is gone for good ({error})") from error
            self._trouble, self._again_at = type(error).__name__, time.monotonic() + _PAUSE_S
        else:
            self._trouble, self._was_dead = "", False
            self._hear(ack)
            self._send()

    def _send(self, wait_s: float = 0.0) -> None:
        """Make a call for all that wait; after one that failed not at once."""
        pause = self._again_at - time.monotonic()
        if self.under_way and pause > 0:
            time.sleep(min(pause, wait_s))
        if self.under_way and pause <= wait_s:
            payloads = [segment.payload for segment in self.under_way]
            self._call = self._shard.insert.remote(self._writer, self.sequence, payloads)

    def _hear(self, ack: Ack) -> None:
        """Forget what was accepted. A shard that expects an earlier segment began again, without what it held."""
        self.counters, self.sequence = ack.counters, min(self.sequence, ack.expected)
        while self.under_way and self.sequence < ack.expected:
            segment, self.sequence = self.under_way.popleft(), self.sequence + 1
            if segment.lease >= 0:
                self._roster.end_insert.remote(segment.lease, self.number, ack.counters)
        if ack.refused:
            self.under_way.popleft()
            raise ShardError(f"shard {self.number} refused a segment, which is dropped: {ack.refused}")
        if ack.is_closed:
            raise ShardClosedError(f"shard {self.number} takes nothing more")

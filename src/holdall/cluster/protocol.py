"""What writers, shards and learners send each other: ids, counters, the order of calls, and streams of segments.

A transition id over shards is the shard, and the number of the row there:

    bits 48 to 62: shard    bits 36 to 47: life, for shards that start empty after a loss    bits 0 to 35: row

Invariant: an id is never used again, not even by a shard that lost what it held. Those of shard 0 in its first life are
those of a local memory. A segment is kept until the shard acknowledged it. Calls that change a shard are never
retried by Ray, which would reorder them: after a failure the shard is asked which segment it expects, and the rest is
sent again.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
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


_MOST_CLIENTS = 4096


class CallOrderError(ShardError):
    """A call that came before this one by its number is missing."""


class CallOrder(NamedTuple):
    """One call's place in its client's order."""

    client: bytes  # 16, see `client_name`
    epoch: int  # of the shard, as the client knows it
    number: int
    learner: int = 0  # seeds the generator that draws; 0: the shard's own draws
    handle: int = 0  # whose generator it is


_MACHINE_BYTES = 6


def client_name() -> bytes:
    """Return a new name for a client of shards; it begins with the machine that the client runs on."""
    return _machine() + secrets.token_bytes(16 - _MACHINE_BYTES)


def _machine() -> bytes:
    """Name the machine that this process runs on, as Ray counts machines."""
    node: str = ray.get_runtime_context().get_node_id()
    return hashlib.blake2b(node.encode(), digest_size=_MACHINE_BYTES).digest()


def machine_of(client: bytes) -> bytes:
    """Return the part of a client's name that is the machine's."""
    return client[:_MACHINE_BYTES]


class CallQueue:
    """Lets calls through by their numbers."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self._next: OrderedDict[bytes, int] = OrderedDict()
        self._changed = threading.Condition()
        self._patience_s = patience_s

    @contextmanager
    def taken(self, order: CallOrder) -> Iterator[None]:
        """Wait for the calls before this one, and let the next one through."""
        client, number = order.client, order.number
        with self._changed:
            self._next.setdefault(client, 0)
            self._next.move_to_end(client)
            while len(self._next) > _MOST_CLIENTS:
                self._next.popitem(last=False)
            if not self._changed.wait_for(lambda: self._next.get(client, number) >= number, self._patience_s):
                raise CallOrderError(f"call {number} came, but {self._next.get(client)} of the same client did not")
        try:
            yield
        finally:
            with self._changed:
                self._next[client] = max(self._next.get(client, 0), number + 1)
                self._changed.notify_all()


class AckKind(IntEnum):
    """What a shard did with a segment."""

    ACCEPTED = 0
    EXPECTED_ANOTHER = 1  # out of order, or there already
    REFUSED = 2  # it will never be accepted; the reason follows
    CLOSED = 3  # the shard takes nothing more; send it to another


class SegmentHeader(NamedTuple):
    """Who sends which segment to whom."""

    writer: bytes  # 16
    epoch: int
    sequence: int


class Ack(NamedTuple):
    """A shard's answer to a segment."""

    kind: AckKind
    expected: int  # the number of the writer's next segment
    credits: int  # segments that the writer may have under way
    counters: ShardCounters
    reason: str = ""


def is_newer(counters: ShardCounters, known: ShardCounters | None) -> bool:
    """Whether a shard said this after what is known; calls may overtake each other."""
    return known is None or (counters.epoch, counters.changes) >= (known.epoch, known.changes)


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
        self._looked_at = time.monotonic()
        while True:
            missing = "lists no shards"
            try:
                version, handles = ray.get(self.roster.shards.remote(self._version), timeout=self._patience_s)
                if handles is not None:
                    self._version, self.handles = version, handles
            except ray.exceptions.RayError as error:
                missing = f"does not answer ({type(error).__name__})"
            if self.handles:
                return
            if time.monotonic() > self._looked_at + self._patience_s:
                raise ShardError(f"the memory's roster {missing}; is the memory closed?")
            time.sleep(_PAUSE_S)


@dataclass(slots=True)
class SentSegment:
    """A segment on its way to a shard."""

    sequence: int
    payload: bytes
    rows: int
    lease: int  # of a limiter, which hears when the segment has arrived; -1: none
    call: Any = None


class SegmentStream:
    """Segments of one writer to one shard. Nothing waits here but `flush`; `poll` has to be called now and then.

    Args:
        survives: Whether the shard holds after a restart what it acknowledged.
        patience_s: How long a shard may be away before the caller gets an error.
    """

    def __init__(
        self, shard: Any, number: int, writer: bytes, survives: bool, patience_s: float, roster: Any = None
    ) -> None:  # fmt: skip
        self._shard, self._roster, self.number, self._writer = shard, roster, number, writer
        self._survives, self._patience_s = survives, patience_s
        self.under_way: deque[SentSegment] = deque()
        self.sequence = 0  # of the next segment
        self._epoch = -1
        self._credits = 1
        self.counters: ShardCounters | None = None  # when the shard last said so
        self._is_unsure = True  # which segment the shard expects
        self._question: Any = None
        self._ask_at = 0.0
        self._settled_by = 0.0  # until then calls that were made may still be accepted
        self._trouble = ""

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
        """Whether the shard allows another segment under way."""
        return len(self.under_way) < self._credits

    def send(self, payload: bytes, rows: int, lease: int = -1) -> None:
        """Send a segment; it is kept until the shard has acknowledged it."""
        segment = SentSegment(self.sequence, payload, rows, lease)
        self.sequence += 1
        self.under_way.append(segment)
        if self._is_unsure:
            self.poll()
        else:
            self._call(segment)

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
        if self._is_unsure:
            self._ask(wait_s)
        while self.under_way and not self._is_unsure:
            oldest = self.under_way[0]
            if not ray.wait([oldest.call], timeout=wait_s)[0]:
                return
            wait_s = 0.0
            try:
                ack: Ack = received(oldest.call)
            except FencedError:
                raise
            except (ray.exceptions.RayError, ShardError) as error:
                self._doubt(error)
                return
            self._hear(ack, oldest)

    def _hear(self, ack: Ack, oldest: SentSegment) -> None:
        """Take over what the shard said of the oldest segment."""
        self._credits, self.counters = max(1, ack.credits), ack.counters
        if ack.kind is AckKind.ACCEPTED:
            self.under_way.popleft()
            if oldest.lease >= 0:
                self._roster.end_insert.remote(oldest.lease, self.number, ack.counters)
        elif ack.kind is AckKind.REFUSED:
            self.under_way.popleft()
            self._number_from(oldest.sequence)
            self._doubt(None)
            raise ShardError(f"shard {self.number} refused a segment, which is dropped: {ack.reason}")
        else:
            self._doubt(None)

    def _doubt(self, error: Exception | None) -> None:
        """Ask the shard what it expects before anything else is sent."""
        self._is_unsure, self._question = True, None
        self._settled_by = time.monotonic() + self._patience_s
        if error is not None:
            self._trouble, self._ask_at = type(error).__name__, time.monotonic() + _PAUSE_S

    def _ask(self, wait_s: float) -> None:
        """Ask which segment the shard expects, once no call runs that could still be accepted; go on from there."""
        if self._question is None:
            calls = [segment.call for segment in self.under_way if segment.call is not None]
            if calls and time.monotonic() < self._settled_by:
                ready, _ = ray.wait(calls, num_returns=len(calls), timeout=wait_s)
                if len(ready) < len(calls):
                    return
            pause = self._ask_at - time.monotonic()
            if pause > 0:
                time.sleep(min(pause, wait_s))
                if wait_s < pause:
                    return
            self._question = self._shard.expect.remote(self._writer)
        if not ray.wait([self._question], timeout=wait_s)[0]:
            return
        question, self._question = self._question, None
        try:
            ack: Ack = received(question)
        except ray.exceptions.ActorDiedError as error:
            raise GoneError(f"shard {self.number} is gone for good ({error})") from error
        except (ray.exceptions.RayError, ShardError) as error:  # it is being restarted, or waits for its disk
            self._doubt(error)
        else:
            self._resume(ack)

    def _resume(self, ack: Ack) -> None:
        """Forget what was accepted although its acknowledgement was lost, and send the rest again."""
        lost_all = self._epoch >= 0 and ack.counters.epoch != self._epoch and not self._survives
        self._epoch, self._credits, self.counters = ack.counters.epoch, max(1, ack.credits), ack.counters
        if lost_all:
            self._number_from(ack.expected)
        while self.under_way and self.under_way[0].sequence < ack.expected:
            self.under_way.popleft()
        if ack.kind is AckKind.CLOSED:
            raise ShardClosedError(f"shard {self.number} takes nothing more")
        self._is_unsure, self._trouble = False, ""
        for segment in self.under_way:
            self._call(segment)

    def _number_from(self, sequence: int) -> None:
        self.sequence = sequence
        for segment in self.under_way:
            segment.sequence, self.sequence = self.sequence, self.sequence + 1

    def _call(self, segment: SentSegment) -> None:
        header = SegmentHeader(self._writer, self._epoch, segment.sequence)
        segment.call = self._shard.insert.remote(header, segment.payload)

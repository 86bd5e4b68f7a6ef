"""What writers, shards and learners send each other: ids, counters, the order of calls, and streams of segments.

A transition id over shards is the shard, and the number of the row there:

    bits 48 to 62: shard    bits 36 to 47: life, for shards that start empty after a loss    bits 0 to 35: row

Invariant: an id is never used again, not even by a shard that lost what it held. Those of shard 0 in its first life are
those of a local memory. A segment is kept until the shard acknowledged it. Calls that change a shard are never
retried by Ray, which would reorder them: after a failure the shard is asked which segment it expects, and the rest is
sent again.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np
import ray
from numpy.typing import NDArray

from holdall.errors import DamageError, ShardError
from holdall.storage import DICTIONARY, Dictionary, dictionary_name, pack_dictionary, records_in

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


def whole(value: Any, most: int) -> int:
    """Return a whole number that was received, if it is one within bounds."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no count up to {most}")
    return value


def packed_dictionary(dictionary: Dictionary) -> bytes:
    """Return a dictionary as the bytes of a record."""
    return b"".join(pack_dictionary(dictionary))


def dictionary_of(payload: bytes) -> Dictionary:
    """Read a dictionary that was received."""
    (record,) = records_in(payload)
    dictionary = Dictionary(record.part("content", lambda start, nbytes: payload[start : start + nbytes]))
    if record.kind != DICTIONARY or dictionary_name(dictionary) != record.head.get("name"):
        raise DamageError("a dictionary was received that is not what its name says; it is not used")
    return dictionary


class Packed:
    """What travels as a few numbers of fixed widths: a dataclass whose fields are those of `LAYOUT`, in its order."""

    __slots__: tuple[str, ...] = ()
    LAYOUT: ClassVar[struct.Struct]
    REFUSED: ClassVar[str]  # what is said of bytes that are none

    def packed(self) -> bytes:
        """Return it as bytes."""
        return self.LAYOUT.pack(*(getattr(self, name) for name in self.__slots__))  # a third of astuple's time

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Read it back."""
        if len(raw) != cls.LAYOUT.size:
            raise DamageError(f"{len(raw)} bytes are {cls.REFUSED}")
        return cls(*cls.LAYOUT.unpack(raw))


@dataclass(frozen=True, slots=True)
class ShardCounters(Packed):
    """One shard at one moment."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<qqqqqqqd")
    REFUSED: ClassVar[str] = "no shard's counters; nothing of them is used"

    epoch: int  # another one after every restart
    first_row: int
    next_row: int
    transitions: int  # rows held that can be drawn
    inserted: int  # transitions ever accepted
    changes: int  # of what is held or of priorities, since it was started
    backlog: int  # bytes that wait to be made durable
    mass: float  # what its draws are in proportion to: transitions, or the sum of scaled priorities


_MOST_CLIENTS = 4096


class CallOrderError(ShardError):
    """A call that came before this one by its number is missing."""


@dataclass(frozen=True, slots=True)
class CallOrder(Packed):
    """One call's place in its client's order; it travels as one argument, as every one of a call takes Ray time."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<16sqq")
    REFUSED: ClassVar[str] = "no call's order; nothing is done"

    client: bytes  # 16
    epoch: int  # of the shard, as the client knows it
    number: int


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
            until = time.monotonic() + self._patience_s
            while self._next.get(client, number) < number:
                left = until - time.monotonic()
                if left <= 0:
                    raise CallOrderError(f"call {number} came, but {self._next.get(client)} of the same client did not")
                self._changed.wait(left)
        try:
            yield
        finally:
            with self._changed:
                self._next[client] = max(self._next.get(client, 0), number + 1)
                self._changed.notify_all()


_ACK = struct.Struct("<qqq64s")


class AckKind(IntEnum):
    """What a shard did with a segment."""

    ACCEPTED = 0
    EXPECTED_ANOTHER = 1  # out of order, or there already
    NEEDS_DICTIONARY = 2
    REFUSED = 3  # it will never be accepted; the reason follows
    CLOSED = 4  # the shard takes nothing more; send it to another


@dataclass(frozen=True, slots=True)
class SegmentHeader(Packed):
    """Who sends which segment to whom."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<16sqq")
    REFUSED: ClassVar[str] = "no header; the segment is not used"

    writer: bytes  # 16
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Ack:
    """A shard's answer to a segment."""

    kind: AckKind
    expected: int  # the number of the writer's next segment
    credits: int  # segments that the writer may have under way
    counters: ShardCounters
    reason: str = ""

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _ACK.pack(self.kind, self.expected, self.credits, self.counters.packed()) + self.reason.encode()

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """Read it back."""
        if len(raw) < _ACK.size:
            raise DamageError(f"{len(raw)} bytes are no answer to a segment; nothing of them is used")
        kind, expected, credit, counters = _ACK.unpack(raw[: _ACK.size])
        return cls(AckKind(kind), expected, credit, ShardCounters.of(counters), raw[_ACK.size :].decode())


def is_newer(counters: ShardCounters, known: ShardCounters | None) -> bool:
    """Whether a shard said this after what is known; calls may overtake each other."""
    return known is None or (counters.epoch, counters.changes) >= (known.epoch, known.changes)


class GoneError(ShardError):
    """A shard that will not come back."""


class ShardClosedError(GoneError):
    """A shard that takes nothing more; what it has not accepted is safe to send elsewhere."""


_LOG = logging.getLogger("holdall")
_PAUSE_S = 0.05

Describe = Callable[[bytes], Iterable[bytes]]
"""Returns the dictionaries that a segment needs, as records."""


@dataclass(slots=True)
class _SentSegment:
    sequence: int
    payload: bytes
    rows: int
    call: Any
    lease: int = -1
    roster: Any = None


class SegmentStream:
    """Blocks of one writer to one shard.

    Args:
        dictionaries: Finds the dictionaries that a segment names.
        survives: Whether the shard holds after a restart what it acknowledged.
        patience_s: How long a shard may be away before the caller gets an error.
    """

    def __init__(
        self, shard: Any, number: int, writer: bytes, dictionaries: Describe, survives: bool, patience_s: float
    ) -> None:
        self._shard = shard
        self.number = number
        self._writer = writer
        self._dictionaries = dictionaries
        self._survives = survives
        self._patience_s = patience_s
        self._under_way: deque[_SentSegment] = deque()
        self.sequence = 0  # of the next segment
        self._epoch = -1
        self._credits = 1
        self.counters: ShardCounters | None = None  # when the shard last said so
        self._failing_since: float | None = None
        self.waited_s = 0.0  # for room
        self.resent = 0

    @property
    def inserted(self) -> int:
        """Transitions that the shard ever took, as far as is known, with those under way."""
        taken = 0 if self.counters is None else self.counters.inserted
        return taken + sum(segment.rows for segment in self._under_way)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the segments under way."""
        return sum(len(segment.payload) for segment in self._under_way)

    def send(self, payload: bytes, rows: int) -> None:
        """Send a segment; wait while as many are under way as the shard allows. If that fails, the segment is kept."""
        segment = _SentSegment(self.sequence, payload, rows, None)
        self.sequence += 1
        self._under_way.append(segment)
        self.hear()
        start = time.monotonic()
        while segment.call is None and len(self._under_way) > self._credits:
            self.hear(wait=True)
        self.waited_s += time.monotonic() - start
        self._begin()

    def grant(self, lease: int, roster: Any) -> None:
        """Report to a limiter when the segment that was sent last has arrived."""
        if self._under_way:
            self._under_way[-1].lease, self._under_way[-1].roster = lease, roster

    def flush(self) -> None:
        """Wait until every segment is acknowledged."""
        while self._under_way:
            self.hear(wait=True)

    def take_back(self) -> list[tuple[bytes, int]]:
        """Give up the segments that were not acknowledged, of a shard that is gone with all that it held."""
        left = [(segment.payload, segment.rows) for segment in self._under_way]
        self._under_way.clear()
        return left

    def _begin(self) -> None:
        """Send the segments that were never sent: one that is new, and those that waited when patience was lost."""
        if self._epoch < 0:
            self._meet()
        for segment in self._under_way:
            if segment.call is None:
                self._call(segment)

    def _call(self, segment: _SentSegment) -> None:
        header = SegmentHeader(self._writer, self._epoch, segment.sequence).packed()
        segment.call = self._shard.insert.remote(header, segment.payload)

    def hear(self, wait: bool = False) -> None:
        """Look at the acknowledgements that came, in order; wait for the oldest if asked to."""
        while self._under_way:
            oldest = self._under_way[0]
            if oldest.call is None:
                self._begin()
                return
            ready, _ = ray.wait([oldest.call], timeout=self._patience_s if wait else 0)
            if not ready:
                if wait:
                    raise ShardError(
                        f"shard {self.number} has not acknowledged a segment for {self._patience_s:g} s; the "
                        f"{len(self._under_way)} segments under way are kept: call flush() to try again"
                    )
                return
            try:
                ack = Ack.of(ray.get(oldest.call))
            except ray.exceptions.RayError as error:
                _LOG.info("shard %d did not answer (%s); asking it what it expects", self.number, type(error).__name__)
                self._endure(error)
                self._meet()
                return
            self._credits = max(1, ack.credits)
            self.counters = ack.counters
            if ack.kind is not AckKind.ACCEPTED:
                self._settle(ack, oldest)
                return
            self._under_way.popleft()
            if oldest.roster is not None:
                oldest.roster.end_insert.remote(oldest.lease, self.number, ack.counters.packed())
            self._failing_since = None
            wait = False

    def _endure(self, error: Exception) -> None:
        """Pause before the next try; raise an error if none has succeeded for long."""
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self._patience_s:
            self._failing_since = None
            raise ShardError(
                f"shard {self.number} accepts nothing ({error}); the {len(self._under_way)} segments under way are "
                "kept: call flush() to try again"
            ) from error
        time.sleep(_PAUSE_S)

    def _settle(self, ack: Ack, oldest: _SentSegment) -> None:
        """Go on after a segment that was not accepted."""
        if ack.kind is AckKind.REFUSED:
            self._under_way.popleft()
            self.sequence = oldest.sequence
            for later in self._under_way:
                later.sequence, self.sequence = self.sequence, self.sequence + 1
            raise ShardError(f"shard {self.number} refused a segment, which is dropped: {ack.reason}")
        if ack.kind is AckKind.CLOSED:
            self._drop_before(self._asked().expected)
            raise ShardClosedError(f"shard {self.number} takes nothing more")
        if ack.kind is AckKind.NEEDS_DICTIONARY:
            ray.get([self._shard.learn.remote(record) for record in self._dictionaries(oldest.payload)])
        self._meet()

    def _meet(self) -> None:
        """Ask the shard what it expects, and send from there on again; wait while it restarts."""
        ack = self._asked()
        lost_all = self._epoch >= 0 and ack.counters.epoch != self._epoch and not self._survives
        self._epoch, self._credits = ack.counters.epoch, max(1, ack.credits)
        self.counters = ack.counters
        if lost_all:
            self.sequence = ack.expected
            for segment in self._under_way:
                segment.sequence, self.sequence = self.sequence, self.sequence + 1
        self._drop_before(ack.expected)
        self.resent += sum(segment.call is not None for segment in self._under_way)
        for segment in self._under_way:
            self._call(segment)

    def _drop_before(self, expected: int) -> None:
        """Forget the segments that were accepted and whose acknowledgements were lost."""
        while self._under_way and self._under_way[0].sequence < expected:
            self._under_way.popleft()

    def _asked(self) -> Ack:
        """Ask which segment the shard expects, once no call runs that could still be accepted."""
        calls = [segment.call for segment in self._under_way if segment.call is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=self._patience_s)
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return Ack.of(ray.get(self._shard.expect.remote(self._writer), timeout=self._patience_s))
            except ray.exceptions.ActorDiedError as error:
                raise GoneError(f"shard {self.number} is gone for good ({error})") from error
            except ray.exceptions.RayError as error:
                if time.monotonic() > until:
                    raise ShardError(
                        f"shard {self.number} does not answer ({type(error).__name__}); the {len(self._under_way)} "
                        "segments under way are kept: call flush() to try again"
                    ) from error
                time.sleep(_PAUSE_S)

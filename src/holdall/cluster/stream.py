"""Streams: the way of a writer's segments to the shards.

A stream sends the segments of one writer to one shard, and keeps each of them until the shard has acknowledged it. If a
call fails, all segments that are left are sent again with the same numbers, and the shard accepts every number once.
`ShardStreams` chooses the shard of the next segment.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import ray

from holdall.cluster.calls import get_result, require_ray
from holdall.cluster.members import ShardList
from holdall.cluster.messages import Ack, GoneError, InsertRequest, ShardCounters
from holdall.cluster.roster import find_roster
from holdall.cluster.terms import MemoryTerms
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import FencedError, ShardError


class SentSegment(NamedTuple):
    """A segment that was sent to a shard and not acknowledged yet."""

    payload: bytes
    rows: int
    lease: int  # Lease of the limiter, which is returned when the segment has arrived. -1: none.


class SegmentStream:
    """The segments of one writer to one shard. Only `flush` waits. `poll` must be called now and then.

    A shard that lost its rows continues with the oldest segment that is left.

    Args:
        patience_s: Seconds after which a silent shard raises an error.

    Attributes:
        number: Number of the shard.
        in_flight: Segments that are not acknowledged, oldest first.
        sequence: Number of the oldest segment in flight, or of the next one.
        counters: What the shard reported last. None before the first report.
        is_gone: Whether the shard has ended for good.
    """

    def __init__(
        self, shard: Any, number: int, writer: bytes, patience_s: float, tuning: ClusterTuning, roster: Any = None
    ) -> None:
        self.number = number
        self.in_flight: deque[SentSegment] = deque()
        self.sequence = 0
        self.counters: ShardCounters | None = None
        self.is_gone = False
        self._shard = shard
        self._roster = roster
        self._writer = writer
        self._patience_s = patience_s
        self._tuning = tuning
        self._calls: deque[tuple[Any, int]] = deque()  # Calls, each with the number after its last segment.
        self._retry_at = 0.0
        self._trouble = ""  # The last error of a call.
        self._was_dead = False

    @property
    def inserted(self) -> int:
        """Transitions that the shard ever accepted, as far as is known, with those in flight."""
        accepted = 0 if self.counters is None else self.counters.inserted
        return accepted + self.unacknowledged_rows

    @property
    def unacknowledged_rows(self) -> int:
        """Rows of the segments in flight. May be called from any thread."""
        return sum(segment.rows for segment in tuple(self.in_flight))

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the segments in flight. May be called from any thread."""
        return sum(len(segment.payload) for segment in tuple(self.in_flight))

    @property
    def has_room(self) -> bool:
        """Whether another segment may be sent. Only one at a time if much waits for the shard's journal."""
        if self.counters is not None and self.counters.backlog >= self._tuning.max_backlog_bytes:
            return not self.in_flight
        is_short = len(self.in_flight) < self._tuning.max_segments_in_flight
        return is_short and self.unacknowledged_bytes < self._tuning.max_bytes_in_flight

    def send(self, segment: SentSegment) -> None:
        """Send a segment, and keep it until the shard has acknowledged it."""
        self.in_flight.append(segment)
        self._send()

    def flush(self) -> None:
        """Wait until every segment is acknowledged. Raise ShardError if the shard says nothing for too long."""
        left = 0
        end_s = 0.0
        while self.in_flight:
            if len(self.in_flight) != left:
                left = len(self.in_flight)
                end_s = time.monotonic() + self._patience_s
            elif time.monotonic() > end_s:
                raise self.explain_silence()
            self.poll(min(1.0, self._patience_s))

    def explain_silence(self) -> ShardError:
        """Return an error that says that the shard accepts nothing, and why, as far as it says so."""
        try:
            reason = str(ray.get(self._shard.trouble.remote(), timeout=self._tuning.reason_s))
        except ray.exceptions.RayError as error:
            reason = f"it does not answer: {type(error).__name__}"
        return ShardError(
            f"Shard {self.number} has not acknowledged a segment for {self._patience_s:g} s "
            f"({reason or self._trouble or 'it answers, but is slow'}). The {self.unacknowledged_rows} transitions "
            "that were sent are kept. Repeat the call, with the same steps if it has any."
        )

    def poll(self, wait_s: float = 0.0) -> None:
        """Read the shard's answers and send more. Wait at most `wait_s` seconds for the next answer."""
        require_ray()
        self._send(wait_s)
        while self._calls and ray.wait([self._calls[0][0]], timeout=wait_s)[0]:
            wait_s = 0.0
            call, end = self._calls.popleft()
            try:
                ack: Ack = get_result(call)
            except FencedError:
                self._calls.clear()
                raise
            except (ray.exceptions.RayError, ShardError) as error:
                self._record_failure(error)
            else:
                self._trouble = ""
                self._was_dead = False
                self._record_ack(ack, end)
                self._send()

    def _record_failure(self, error: Exception) -> None:
        """Send everything again soon. Raise GoneError if the shard has ended for good."""
        self._calls.clear()
        was_dead = self._was_dead
        self._was_dead = isinstance(error, ray.exceptions.ActorDiedError)
        if was_dead and self._was_dead:  # The first report may be about the process that Ray is replacing.
            raise GoneError(f"Shard {self.number} has ended for good ({error})") from error
        self._trouble = type(error).__name__
        self._retry_at = time.monotonic() + self._tuning.pause_s

    def _send(self, wait_s: float = 0.0) -> None:
        """Send all segments that were not sent yet in one call, unless too many calls are in flight."""
        first = self._calls[-1][1] if self._calls else self.sequence
        payloads = [segment.payload for segment in islice(self.in_flight, first - self.sequence, None)]
        if not payloads:
            return
        pause_s = self._retry_at - time.monotonic()
        if pause_s > 0:
            time.sleep(min(pause_s, wait_s))
        if pause_s <= wait_s and len(self._calls) < self._tuning.max_calls:
            request = InsertRequest(self._writer, first, payloads, self.sequence)
            self._calls.append((self._shard.insert.remote(request), first + len(payloads)))

    def _record_ack(self, ack: Ack, end: int) -> None:
        """Forget what was accepted. If a call was accepted only in part, the rest is sent again."""
        self.counters = ack.counters
        while self.sequence < ack.expected:
            segment = self.in_flight.popleft()
            self.sequence += 1
            if segment.lease >= 0:
                self._roster.end_insert.remote(segment.lease, self.number, ack.counters)
        if ack.expected < end:
            self._calls.clear()
        if ack.refusal:
            self.in_flight.popleft()
            self.sequence += 1
            raise ShardError(f"Shard {self.number} refused a segment, which is dropped: {ack.refusal}")


class ShardStreams:
    """The streams of a writer to all shards. Not thread-safe: the writer holds its lock.

    Args:
        spread: Number of shards that segments are sent to. None: all.
        first: Index of the shard for the first segment, modulo their number. -1: any.

    Attributes:
        terms: Settings of the memory.
        writer: Id of the writer.
        roster: The memory's roster.
        streams: Streams by shard.
    """

    def __init__(self, terms: MemoryTerms, spread: int | None = None, first: int = -1) -> None:
        self.terms = terms
        self.writer = secrets.token_bytes(16)
        self.roster = find_roster(terms.name)
        self.streams: dict[int, SegmentStream] = {}
        self._spread = spread
        self._first = first
        self._generator = np.random.default_rng()
        self._home = -1  # Shard on which the writer stays while episodes continue. -1: none.
        self._list = ShardList(self.roster, terms.patience_s, terms.tuning)
        self._targets: list[int] = []  # Shards that new segments are sent to.

    def ask_roster(self, question: Callable[[Any], Any], patience_s: float | None = None) -> Any:
        """Return the roster's answer to `question(roster)`. Wait while Ray restarts the roster."""
        return self._list.ask_roster(question, patience_s)

    def flush(self) -> None:
        """Wait until the shards have acknowledged everything."""
        while any(stream.in_flight for stream in self.streams.values()):
            self.for_each(SegmentStream.flush)

    def for_each(self, act: Callable[[SegmentStream], None], numbers: Iterable[int] | None = None) -> None:
        """Call `act` with all streams, or with those of some shards."""
        chosen = list(self.streams) if numbers is None else list(numbers)
        for stream in [self.streams[number] for number in chosen]:
            with self._rerouting(stream):
                act(stream)

    def send(self, stream: SegmentStream, segment: SentSegment, *, stays: bool = False) -> None:
        """Send a segment. With `stays`, the next one goes to the same shard unless that is too full."""
        self._home = stream.number if stays else -1
        self._first = -1
        stream.send(segment)

    def choose_stream(self) -> SegmentStream:
        """Return the stream for the next segment: the less filled of two random shards that have room.

        Waits until one of them has room. A shard that does not answer has none, and does not keep others waiting.
        """
        end_s = time.monotonic() + self.terms.writer_patience_s
        while True:
            self.refresh()
            self.for_each(SegmentStream.poll, self._targets)
            targets = [self.streams[number] for number in self._targets if not self.streams[number].is_gone]
            free = [stream for stream in self._list_allowed(targets) if stream.has_room]
            if free:
                pair: list[int] = self._generator.permutation(len(free))[:2].tolist()
                return min([free[i] for i in pair], key=lambda stream: stream.inserted)
            if not targets:
                raise ShardError("No shard accepts transitions. Add one with memory.add_shard().")
            if time.monotonic() > end_s:
                raise targets[0].explain_silence()
            with self._rerouting(targets[0]):
                targets[0].poll(self.terms.tuning.pause_s)

    def _list_allowed(self, streams: list[SegmentStream]) -> list[SegmentStream]:
        """Return the streams that the next segment may use: all, or that of the shard where episodes continue."""
        if streams and self._first >= 0:
            return [streams[self._first % len(streams)]]
        home = [stream for stream in streams if stream.number == self._home]
        if not home:
            return streams
        lead = home[0].inserted - min(stream.inserted for stream in streams)
        return home if lead < self.terms.stay_rows else streams

    @contextmanager
    def _rerouting(self, stream: SegmentStream) -> Iterator[None]:
        """Send the segments of a shard to other shards if it has ended for good with everything that it held."""
        try:
            yield
        except GoneError as error:
            self.refresh(now=True)
            if self.terms.url is not None and stream.number in self._list.handles:
                raise
            stream.is_gone = True
            others = [self.streams[number] for number in self._targets if number != stream.number]
            if stream.in_flight and not others:
                raise ShardError(
                    f"No shard accepts the {stream.unacknowledged_rows} transitions that were sent to shard "
                    f"{stream.number}, which has ended. They are kept. Add a shard with memory.add_shard(), and call "
                    "flush()."
                ) from error
            while stream.in_flight:
                segment = stream.in_flight.popleft()
                target = min(others, key=lambda other: other.inserted)
                target.send(segment._replace(lease=-1))

    def refresh(self, now: bool = False) -> None:
        """Ask which shards there are, from time to time or `now`."""
        self._list.refresh(now=now)
        for number, handle in self._list.handles.items():
            if number not in self.streams:
                patience_s = self.terms.writer_patience_s
                self.streams[number] = SegmentStream(
                    handle, number, self.writer, patience_s, self.terms.tuning, self.roster
                )
        targets = sorted(number for number in self._list.handles if not self.streams[number].is_gone)
        if self._spread is not None:  # Earlier targets stay. Random others complete them.
            mixed: list[int] = self._generator.permutation(targets).tolist()
            targets = sorted(mixed, key=lambda number: number not in self._targets)[: self._spread]
        self._targets = targets

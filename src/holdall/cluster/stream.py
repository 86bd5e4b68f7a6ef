"""Streams: how the segments of a writer reach the shards.

A stream sends the segments of one writer to one shard, in numbered order and with one call at a time. It keeps each
segment until the shard has acknowledged it. If a call fails, the stream sends the same numbers again, and the shard
accepts every number once. `ShardStreams` chooses the shard of the next segment.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import ray

from holdall.cluster.calls import get_result, require_ray
from holdall.cluster.config import MemoryConfig
from holdall.cluster.members import Members
from holdall.cluster.messages import Ack, GoneError, InsertRequest, ShardCounters
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import FencedError, ShardError


class SentSegment(NamedTuple):
    """A segment that a shard has not acknowledged yet."""

    payload: bytes
    rows: int
    lease: int | None  # The limiter's lease, which ends when the segment has arrived. None: sent without the limiter.


class SegmentStream:
    """The segments of one writer to one shard. Not thread-safe: the writer holds its lock.

    Only `flush` waits. `poll` reads answers and repeats calls that failed, so it must be called at intervals. A shard
    that lost its rows continues with the oldest segment in flight.

    Attributes:
        number: Number of the shard.
        in_flight: Segments that are not acknowledged, oldest first.
        sequence: Number of the oldest segment in flight, or of the next one.
    """

    def __init__(self, members: Members, number: int, writer: bytes, tuning: ClusterTuning) -> None:
        self.number = number
        self.in_flight: deque[SentSegment] = deque()
        self.sequence = 0
        self._members = members
        self._shard = members.handle(number)
        self._writer = writer
        self._tuning = tuning
        self._call: Any = None  # The call that the shard has not answered yet.
        self._retry_at = 0.0
        self._trouble = ""  # The last error of a call.
        self._was_dead = False

    @property
    def counters(self) -> ShardCounters | None:
        """The shard's last counters. None before its first answer."""
        return self._members.last_counters(self.number)

    @property
    def inserted(self) -> int:
        """Transitions that the shard ever accepted, according to its last counters, and those in flight."""
        counters = self.counters
        accepted = 0 if counters is None else counters.inserted
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
        """Whether another segment may be sent. Only one at a time while the shard's journal has a large backlog."""
        counters = self.counters
        if counters is not None and counters.backlog >= self._tuning.max_backlog_bytes:
            return not self.in_flight
        is_short = len(self.in_flight) < self._tuning.max_segments_in_flight
        return is_short and self.unacknowledged_bytes < self._tuning.max_bytes_in_flight

    def send(self, segment: SentSegment) -> None:
        """Send a segment, and keep it until the shard has acknowledged it."""
        self.in_flight.append(segment)
        self._send()

    def flush(self, patience_s: float) -> None:
        """Wait until every segment is acknowledged.

        Raise ShardError if the shard acknowledges none for `patience_s` seconds.
        """
        in_flight_count = 0
        end_s = 0.0
        while self.in_flight:
            if len(self.in_flight) != in_flight_count:
                in_flight_count = len(self.in_flight)
                end_s = time.monotonic() + patience_s
            elif time.monotonic() > end_s:
                raise self.explain_silence(patience_s)
            self.poll(min(1.0, patience_s))

    def explain_silence(self, patience_s: float) -> ShardError:
        """Ask the shard why it accepts nothing, and return an error with the reason."""
        try:
            reason = str(ray.get(self._shard.trouble.remote(), timeout=self._tuning.reason_s))
        except ray.exceptions.RayError as error:
            reason = f"it does not answer: {type(error).__name__}"
        return ShardError(
            f"Shard {self.number} has not acknowledged a segment for {patience_s:g} s "
            f"({reason or self._trouble or 'it answers, but is slow'}). The {self.unacknowledged_rows} transitions "
            "that were sent are kept. Repeat the call, with the same steps if it has any."
        )

    def poll(self, wait_s: float = 0.0) -> None:
        """Read the shard's answer, and send the next segments. Wait at most `wait_s` seconds for the answer."""
        require_ray()
        if self._call is None and self.in_flight:
            pause_s = self._retry_at - time.monotonic()
            if pause_s > 0:
                time.sleep(min(pause_s, wait_s))
            self._send()
        if self._call is None or not ray.wait([self._call], timeout=wait_s)[0]:
            return
        call = self._call
        self._call = None
        try:
            ack: Ack = get_result(call)
        except FencedError:
            raise
        except (ray.exceptions.RayError, ShardError) as error:
            self._record_failure(error)
            return
        self._trouble = ""
        self._was_dead = False
        self._record_ack(ack)
        self._send()

    def _send(self) -> None:
        """Send all segments in flight, unless a call is unanswered or the last call has just failed."""
        if self._call is not None or not self.in_flight or time.monotonic() < self._retry_at:
            return
        payloads = [segment.payload for segment in self.in_flight]
        self._call = self._shard.insert.remote(InsertRequest(self._writer, self.sequence, payloads))

    def _record_failure(self, error: Exception) -> None:
        """Schedule the next attempt. Raise GoneError if the shard has ended for good."""
        was_dead = self._was_dead
        self._was_dead = isinstance(error, ray.exceptions.ActorDiedError)
        if was_dead and self._was_dead:  # The first report may be about the process that Ray is replacing.
            raise GoneError(
                f"Shard {self.number} has ended, and Ray does not restart it ({type(error).__name__}). The "
                f"{self.unacknowledged_rows} transitions that were sent to it are not held. Make the memory again."
            ) from error
        self._trouble = type(error).__name__
        self._retry_at = time.monotonic() + self._tuning.pause_s

    def _record_ack(self, ack: Ack) -> None:
        """Drop the segments that the shard accepted or refused. Raise ShardError if it refused one."""
        self._members.record(self.number, ack.counters)
        while self.sequence < ack.expected:
            segment = self.in_flight.popleft()
            self.sequence += 1
            if segment.lease is not None:
                self._members.end_lease(segment.lease, self.number, ack.counters)
        if ack.refusal:
            self.in_flight.popleft()
            self.sequence += 1
            raise ShardError(f"Shard {self.number} refused a segment, which is dropped: {ack.refusal}")


class ShardStreams:
    """The streams of a writer to all shards. Not thread-safe: the writer holds its lock.

    Args:
        spread: Number of shards that segments are sent to. None: all.

    Attributes:
        streams: Streams by shard.
        patience_s: Seconds after which a shard that acknowledges nothing raises an error.
    """

    def __init__(self, config: MemoryConfig, members: Members, spread: int | None = None) -> None:
        self.streams: dict[int, SegmentStream] = {}
        self.patience_s = config.settings.writer_patience_s
        self._config = config
        self._writer = secrets.token_bytes(16)
        self._members = members
        self._spread = spread
        self._generator = np.random.default_rng()
        self._home: int | None = None  # Shard on which the writer stays while episodes continue.
        self._home_rows = 0  # Rows that were sent to that shard without a change of the shard.
        self._targets: list[int] = []  # Shards that new segments are sent to.

    def flush(self) -> None:
        """Wait until the shards have acknowledged everything."""
        for stream in self.streams.values():
            stream.flush(self.patience_s)

    def poll(self) -> None:
        """Read the answers that have arrived."""
        for stream in self.streams.values():
            stream.poll()

    def send(self, stream: SegmentStream, segment: SentSegment, *, stays: bool = False) -> None:
        """Send a segment. With `stays`, the next one goes to the same shard, unless it got `stay_rows` rows."""
        is_home = stream.number == self._home
        self._home_rows = segment.rows + (self._home_rows if is_home else 0)
        can_stay = self._home_rows < self._config.stay_rows
        self._home = stream.number if stays and can_stay else None
        stream.send(segment)

    def choose_stream(self) -> SegmentStream:
        """Return the stream for the next segment: the less filled of two random shards that have room.

        Wait until a shard has room. A shard that does not answer soon has no room, and the others are used meanwhile.
        """
        end_s = time.monotonic() + self.patience_s
        while True:
            self._update_targets()
            self.poll()
            allowed = self._list_allowed()
            free = [stream for stream in allowed if stream.has_room]
            if free:
                pair: list[int] = self._generator.permutation(len(free))[:2].tolist()
                return min([free[i] for i in pair], key=lambda stream: stream.inserted)
            if time.monotonic() > end_s:
                raise allowed[0].explain_silence(self.patience_s)
            allowed[0].poll(self._config.settings.tuning.pause_s)

    def _list_allowed(self) -> list[SegmentStream]:
        """Return the streams that the next segment may use: all targets, or the shard on which the writer stays."""
        if self._home is not None and self._home in self._targets:
            return [self.streams[self._home]]
        return [self.streams[number] for number in self._targets]

    def _update_targets(self) -> None:
        """Ask from time to time which shards there are, and choose among them."""
        self._members.refresh_list()
        targets = self._members.numbers
        for number in targets:
            if number not in self.streams:
                self.streams[number] = SegmentStream(self._members, number, self._writer, self._config.settings.tuning)
        if self._spread is not None:  # Keep the earlier targets, and add random others.
            mixed: list[int] = self._generator.permutation(targets).tolist()
            targets = sorted(mixed, key=lambda number: number not in self._targets)[: self._spread]
        self._targets = targets

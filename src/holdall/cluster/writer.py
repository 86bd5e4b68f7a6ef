"""Writers: handles that actors feed a memory with, from any process.

In:  steps of an environment, as `ReplayMemory.add` takes them.  Out: encoded segments on the shards.
Invariant: what `flush` returned for was acknowledged by the shards. The bytes that wait are bounded: `add` waits when
the shards do. A segment goes to the less filled of two shards; it needs none of those before it, wherever they are.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Self

import numpy as np
import ray

from holdall import storage
from holdall.cluster import protocol
from holdall.cluster.protocol import PAUSE_S, GoneError, SentSegment, ShardClosedError, ShardCounters, ShardList
from holdall.cluster.roster import MemoryTerms, agreed_codec, roster_of, wait_for_grant
from holdall.errors import ClosedError, FencedError, ShardError
from holdall.native import chosen_kernels
from holdall.schema import Schema, schema_of

_SEGMENT_ROWS, _MOST_ROWS, _GATHERED_S = 128, 512, 0.01
"""Rows of a segment; and the most, of one that whole blocks of steps fill within so short a time."""
_REASON_S, _END_S = 1.0, 10.0
_MOST_UNDER_WAY, _MOST_BYTES_UNDER_WAY, _CROWDED_BYTES = 8, 16 * 2**20, 32 * 2**20
"""Segments on their way to one shard: enough that it has some to take while it acknowledges others."""
_MOST_CALLS = 4  # that bring them; while so many are made, others wait for the next, which brings all of them
_LOG = logging.getLogger("holdall")


class SegmentStream:
    """Segments of one writer to one shard. Only `flush` waits; `poll` must be called now and then.

    If a call fails, all segments that are left are sent again: a shard takes every number once. A number always stands
    for the same segment. A shard that lost what it held goes on with the oldest segment that is left.

    Args:
        patience_s: How long a shard may be away before the caller gets an error.
    """

    def __init__(self, shard: Any, number: int, writer: bytes, patience_s: float, roster: Any = None) -> None:
        self._shard, self._roster, self.number, self._writer = shard, roster, number, writer
        self._patience_s = patience_s
        self.under_way: deque[SentSegment] = deque()
        self.sequence = 0  # number of the oldest of them, or of the next one
        self.counters: ShardCounters | None = None  # when the shard last said so
        self._calls: deque[tuple[Any, int]] = deque()  # each with the number behind its last segment
        self._again_at = 0.0
        self._trouble = ""
        self._was_dead = False
        self.is_gone = False  # it takes nothing more

    @property
    def inserted(self) -> int:
        """Transitions that the shard ever took, as far as is known, with those under way."""
        taken = 0 if self.counters is None else self.counters.inserted
        return taken + self.unacknowledged_rows

    @property
    def unacknowledged_rows(self) -> int:
        """Rows of the segments under way; any thread may ask."""
        return sum(segment.rows for segment in tuple(self.under_way))

    @property
    def has_room(self) -> bool:
        """Whether another segment may be under way: fewer may when much waits to be made durable."""
        if self.counters is not None and self.counters.backlog >= _CROWDED_BYTES:
            return not self.under_way
        nbytes = sum(len(segment.payload) for segment in self.under_way)
        return len(self.under_way) < _MOST_UNDER_WAY and nbytes < _MOST_BYTES_UNDER_WAY

    def send(self, payload: bytes, rows: int, lease: int = -1) -> None:
        """Send a segment; it is kept until the shard has acknowledged it. `poll` reads the answers."""
        self.under_way.append(SentSegment(payload, rows, lease))
        self._send()

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
            "way are kept: make the same call again, with the same steps if it has any"
        )

    def poll(self, wait_s: float = 0.0) -> None:
        """Read the shard's answers, and send more; wait so long at most for the next answer."""
        protocol.require_ray()
        self._send(wait_s)
        while self._calls and ray.wait([self._calls[0][0]], timeout=wait_s)[0]:
            wait_s, (call, end) = 0.0, self._calls.popleft()
            try:
                ack: protocol.Ack = pickle.loads(protocol.received(call))
            except (ray.exceptions.RayError, ShardError) as error:  # it is being restarted
                self._calls.clear()
                if isinstance(error, FencedError):
                    raise
                was_dead, self._was_dead = self._was_dead, isinstance(error, ray.exceptions.ActorDiedError)
                if was_dead and self._was_dead:
                    raise GoneError(f"shard {self.number} is gone for good ({error})") from error
                self._trouble, self._again_at = type(error).__name__, time.monotonic() + PAUSE_S
            else:
                self._trouble, self._was_dead = "", False
                self._hear(ack, end)
                self._send()

    def _send(self, wait_s: float = 0.0) -> None:
        """Make a call for all that were not sent yet, unless too many are made; after one that failed not at once."""
        first = self._calls[-1][1] if self._calls else self.sequence
        payloads = [segment.payload for segment in islice(self.under_way, first - self.sequence, None)]
        pause = self._again_at - time.monotonic()
        if payloads and pause > 0:
            time.sleep(min(pause, wait_s))
        if payloads and pause <= wait_s and len(self._calls) < _MOST_CALLS:
            call = self._shard.send.remote(pickle.dumps((self._writer, first, payloads, self.sequence)))
            self._calls.append((call, first + len(payloads)))

    def _hear(self, ack: protocol.Ack, end: int) -> None:
        """Forget what was accepted; if not all of a call was, what is left is sent again."""
        self.counters = ack.counters
        while self.sequence < ack.expected:
            segment, self.sequence = self.under_way.popleft(), self.sequence + 1
            if segment.lease >= 0:
                self._roster.end_insert.remote(segment.lease, self.number, ack.counters)
        if ack.expected < end:
            self._calls.clear()
        if ack.refused:
            self.under_way.popleft()
            self.sequence += 1
            raise ShardError(f"shard {self.number} refused a segment, which is dropped: {ack.refused}")
        if ack.is_closed:
            raise ShardClosedError(f"shard {self.number} takes nothing more")


class ShardStreams:
    """The way of segments to the shards: which of them takes the next one. Not locked: who has it is.

    Args:
        spread: See `Writer`.
        first: Which of the shards gets the first segment, counted over and over; -1: any.
    """

    def __init__(self, terms: MemoryTerms, spread: int | None = None, first: int = -1) -> None:
        self.terms, self._spread, self._first = terms, spread, first
        self.writer, self.roster = secrets.token_bytes(16), roster_of(terms.name)
        self._generator = np.random.default_rng()
        self._home, self._stay_rows = -1, terms.stay_rows  # the shard on which it stays while episodes go on
        self.streams: dict[int, SegmentStream] = {}
        self._list = ShardList(self.roster, terms.patience_s)
        self._open_to: list[int] = []  # shards that it sends new segments to

    def flush(self) -> None:
        """Return when the shards have acknowledged everything."""
        while any(stream.under_way for stream in self.streams.values()):
            self.each(SegmentStream.flush)

    def each(self, act: Callable[[SegmentStream], None], numbers: Iterable[int] | None = None) -> None:
        """Do something with every stream, or with some."""
        for stream in [self.streams[number] for number in (self.streams if numbers is None else numbers)]:
            with self._rerouting(stream):
                act(stream)

    def send(self, stream: SegmentStream, payload: bytes, rows: int, lease: int = -1, *, stays: bool = False) -> None:
        """Send a segment on its way; `stays`: the next one goes to the same shard, as far as that is not too full."""
        self._home, self._first = stream.number if stays else -1, -1
        stream.send(payload, rows, lease)

    def roomy(self) -> SegmentStream:
        """Return where the next segment goes: to the less filled of two that have room for it.

        A shard that is away has none, and does not keep others waiting.
        """
        until = time.monotonic() + self.terms.writer_patience_s
        while True:
            self.look_around()
            self.each(SegmentStream.poll, self._open_to)
            chosen = [self.streams[number] for number in self._open_to if not self.streams[number].is_gone]
            roomy = [stream for stream in self._allowed(chosen) if stream.has_room]
            if roomy:
                pair: list[int] = self._generator.permutation(len(roomy))[:2].tolist()
                return min([roomy[i] for i in pair], key=lambda stream: stream.inserted)
            if not chosen:
                raise ShardError("no shard takes transitions; add one with memory.add_shard()")
            if time.monotonic() > until:
                raise chosen[0].silence()
            with self._rerouting(chosen[0]):
                chosen[0].poll(PAUSE_S)

    def _allowed(self, streams: list[SegmentStream]) -> list[SegmentStream]:
        """Return the streams that the next segment may be sent on: all, or that of the shard where episodes go on."""
        if streams and self._first >= 0:
            return [streams[self._first % len(streams)]]
        home = [stream for stream in streams if stream.number == self._home]
        lead = home[0].inserted - min(stream.inserted for stream in streams) if home else 0
        return home if home and lead < self._stay_rows else streams

    @contextmanager
    def _rerouting(self, stream: SegmentStream) -> Iterator[None]:
        """Send what is left to other shards if one turns out to be gone with all that it held."""
        try:
            yield
        except GoneError as error:
            self.look_around(now=True)
            is_closed, is_listed = isinstance(error, ShardClosedError), stream.number in self._list.handles
            if self.terms.url is not None and is_listed and not is_closed:
                raise
            stream.is_gone = True
            others = [self.streams[number] for number in self._open_to if number != stream.number]
            if stream.under_way and not others:
                raise ShardError(
                    f"no shard takes the {stream.unacknowledged_rows} transitions that were under way to shard "
                    f"{stream.number}, which is gone; they are kept: add one with memory.add_shard(), and call flush()"
                ) from error
            while stream.under_way:
                segment = stream.under_way.popleft()
                min(others, key=lambda each: each.inserted).send(segment.payload, segment.rows)

    def look_around(self, now: bool = False) -> None:
        """Ask which shards there are, from time to time, or at once."""
        self._list.look(now=now)
        for number, handle in self._list.handles.items():
            if number not in self.streams:
                patience_s = self.terms.writer_patience_s
                self.streams[number] = SegmentStream(handle, number, self.writer, patience_s, self.roster)
        taking = sorted(number for number in self._list.handles if not self.streams[number].is_gone)
        if self._spread is not None:  # those that it sends to already stay, and any others fill up
            mixed: list[int] = self._generator.permutation(taking).tolist()
            taking = sorted(mixed, key=lambda number: number not in self._open_to)[: self._spread]
        self._open_to = taking


class LaneGroup(ShardStreams):
    """Lanes of a writer whose episodes stay together, and their way to the shards.

    Args:
        schema: Of these lanes.
        lanes: Which of the writer's they are.
    """

    def __init__(self, terms: MemoryTerms, schema: Schema, lanes: slice, spread: int | None, first: int = -1) -> None:
        super().__init__(terms, spread, first)
        self.lanes, self._kernels = lanes, chosen_kernels()
        rows = max(1, (_SEGMENT_ROWS if terms.limit or self._stay_rows else _MOST_ROWS) // schema.num_envs)
        self.encoder = storage.Encoder(schema, schema.num_envs, rows, self._kernels)
        self._codecs = storage.EncoderCodecs(self.encoder, terms.prefer, partial(agreed_codec, self.roster))
        self._began = self.waited_s = 0.0
        self.is_waiting = self.ignores_limit = False  # for a grant of the limiter; whether it sends without one

    def short_way(self, lock: Any) -> Callable[..., int]:
        """Return a function that adds a tick if there is nothing else to do, see `storage.Encoder.short_way`."""
        return self.encoder.short_way(lock, _SEGMENT_ROWS // 2 if self._stay_rows else _SEGMENT_ROWS)

    def make_room(self, gathers_s: float = 0.0) -> None:
        """Have room for one more tick; wait until shards take the segment that is full.

        One that is long enough, and ends with an episode, counts as full: the next one may go elsewhere.

        Args:
            gathers_s: How long one takes more steps, as far as it can, so that fewer are sent.
        """
        rows, may_end = self.encoder.rows, self._stay_rows and self.encoder.rows >= _SEGMENT_ROWS // 2
        is_due = rows + self.encoder.lanes > _SEGMENT_ROWS and time.monotonic() >= self._began + gathers_s
        if rows and (is_due or self.encoder.is_full or (may_end and self.encoder.ends_episodes)):
            self._send()

    def flush(self, *, waits: bool = True) -> None:
        """Return when the shards have acknowledged all; not `waits`: but for what the limiter does not grant now."""
        if self.encoder.rows:
            self._send(waits)
        super().flush()

    def _send(self, waits: bool = True) -> None:
        """Close the segment and send it on its way; what could fail comes before that, so that none is lost."""
        start = time.monotonic()
        stream, rows = self.roomy(), self.encoder.rows
        if (lease := self._granted(rows, waits)) is None:
            return
        if stream.is_gone:  # while a grant was waited for
            stream = self.roomy()
        self.waited_s += time.monotonic() - start
        stays = bool(self._stay_rows) and not self.encoder.ends_episodes
        payload = storage.pack_segment(self.encoder.close(self._codecs.of_fields()), self._kernels.coder)
        self.send(stream, payload, rows, lease, stays=stays)
        self._began = time.monotonic()

    def _granted(self, rows: int, waits: bool) -> int | None:
        """Return a lease of the limiter, -1 if none is needed; None if there is none now, and it is not waited for."""

        def goes_on() -> bool:
            self.each(SegmentStream.poll)  # what has arrived meanwhile does not count as under way any more
            return waits and not self.ignores_limit

        if (limit := self.terms.limit) is None or self.ignores_limit:
            return -1
        self.is_waiting = waits
        try:
            lease = wait_for_grant(limit, "add", rows, self._list.ask, goes_on)
        finally:
            self.is_waiting = False
        return -1 if lease is None and waits else lease


_OPEN: weakref.WeakSet[Writer] = weakref.WeakSet()


def _flush_all() -> None:
    for writer in list(_OPEN):
        writer.ignore_limit()
        writer._end()


class Writer:
    """Feeds a memory; picklable while nothing waits in it, without any right over the memory's life.

    When `add` raises, its transitions are not held: call it again. When `extend` raises, call it again with the same
    steps: it goes on where it stopped. Closing a writer, leaving its `with` block, dropping it, and the normal end of
    its process flush it; a process that is killed loses its `waiting_rows` and `unacknowledged_rows`.

    Args:
        num_envs: Lanes of this writer. Where episodes have to stay together, they go to the shards in groups.
        spread: Shards that it sends to, chosen at random; None: all of them.
    """

    _what = "writer"

    def __init__(self, terms: MemoryTerms, num_envs: int, spread: int | None = None) -> None:
        self._terms, self._lanes, self._spread, self._closed = terms, num_envs, spread, False
        self._lock = threading.RLock()  # the end of a process flushes, whatever its threads do
        self.schema = replace(schema_of(terms.words), num_envs=num_envs)
        split = np.array_split(np.arange(num_envs), min(num_envs, terms.shards if terms.stay_rows else 1))
        begin = secrets.randbelow(2**16)
        self._groups = [
            LaneGroup(
                terms, replace(self.schema, num_envs=len(some)), slice(int(some[0]), int(some[-1]) + 1), spread,
                begin + number if len(split) > 1 else -1,
            )
            for number, some in enumerate(split)
        ]  # fmt: skip
        self._add_at_once = self._groups[0].short_way(self._lock) if len(split) == 1 else storage.FastTick.add
        # An `extend` that raised: its steps, the group that raised, and how many of its steps are held.
        self._stopped_at = b"", 0, 0
        if not _OPEN:
            atexit.unregister(_flush_all)
            atexit.register(_flush_all)  # before Ray's own, which was registered earlier
        _OPEN.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.waiting_rows or self.unacknowledged_rows:
            raise ShardError("a writer was pickled while transitions waited in it; call flush() first")
        return type(self), (self._terms, self._lanes, self._spread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        if not ray.is_initialized():  # nobody is called, and Python may end, where threads never begin
            self._end()
            return
        # Ray names calls of an actor that ends as those of all others that do: two at a time would end a shard. Those
        # of a new thread have names of their own.
        thread = threading.Thread(target=self._end, name="holdall-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python ends, and starts no more threads
            self._end()
        else:
            thread.join(_END_S)  # not for ever: what is interrupted here may hold a lock of Ray's that it waits for

    def _end(self) -> None:
        held = self.waiting_rows + self.unacknowledged_rows
        try:
            Writer.close(self)  # of a memory, too, only that
        except Exception as error:  # nobody could catch it here
            _LOG.warning("a writer ended with %d transitions that no shard has acknowledged: %s", held, error)
            self._closed = True  # so that it is said once

    @property
    def _streams(self) -> list[SegmentStream]:
        return [stream for group in self._groups for stream in tuple(group.streams.values())]

    @property
    def waiting_rows(self) -> int:
        """Rows that were not sent yet."""
        return sum(group.encoder.rows for group in self._groups)

    @property
    def unacknowledged_rows(self) -> int:
        """Rows that were sent and not acknowledged yet."""
        return sum(stream.unacknowledged_rows for stream in self._streams)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that were sent and not acknowledged yet."""
        return sum(len(segment.payload) for stream in self._streams for segment in tuple(stream.under_way))

    @property
    def waited_s(self) -> float:
        """Seconds that it waited for shards and the limiter, all in all."""
        return sum(group.waited_s for group in self._groups)

    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """Add one transition per lane, see `holdall.ReplayMemory.add`; after `flush` it can be sampled."""
        if extras is None and valid is None and self._add_at_once(obs, action, reward, next_obs, terminated, truncated):
            return
        with self._lock:
            self._require_open()
            tick = self._fit((self._lanes,), obs, action, reward, next_obs, terminated, truncated, extras, valid)
            for group in self._groups:  # all have room before one takes its part
                group.make_room()
            for group in self._groups:
                group.encoder.add(tick if len(self._groups) == 1 else tick.cut(group.lanes))

    def extend(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None = None, valid: Any = None,
    ) -> None:  # fmt: skip
        """Add whole trajectories: the same as `add`, with a leading time axis before the lanes."""
        with self._lock:
            self._require_open()
            leading = (len(reward), self._lanes)
            steps = self._fit(leading, obs, action, reward, next_obs, terminated, truncated, extras, valid)
            stopped, first, taken = self._stopped_at
            if not stopped or steps.digest() != stopped:
                first = taken = 0
            for number, group in enumerate(self._groups[first:], first):  # after an error it goes on where that came
                part = steps.cut((slice(None), group.lanes))
                try:
                    while taken < len(steps.reward):
                        group.make_room(_GATHERED_S)
                        taken += group.encoder.extend(part, taken)
                except BaseException:
                    self._stopped_at = steps.digest(), number, taken
                    raise
                taken = 0
            self._stopped_at = b"", 0, 0

    def flush(self) -> None:
        """Send what waits, and return when the shards have acknowledged everything."""
        with self._lock:
            for group in self._groups:
                group.flush()

    def ignore_limit(self) -> None:
        """Stop waiting for the memory's `limit`, also in a call that another thread makes: nobody draws any more."""
        for group in self._groups:
            group.ignores_limit = True

    def close(self, *, flush: bool = True) -> None:
        """Flush, and take no more."""
        with self._lock:
            if flush and not self._closed:
                self.flush()
            self._closed = True
            for group in self._groups:
                group.encoder.end_short_way()
            _OPEN.discard(self)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self._what} was closed; make a new one")
        protocol.require_ray()

    def _fit(self, leading: tuple[int, ...], *arguments: Any) -> storage.Tick:
        return storage.Tick.fitted(self.schema, leading, self._groups[0].encoder.reward_dtype, *arguments)

"""Writers: handles that actors feed a memory with, from any process.

In:  steps of an environment, as `ReplayMemory.add` takes them.  Out: encoded segments on the shards.
Invariant: what `flush` returned for was acknowledged by the shards. The bytes that wait are bounded: `add` waits when
the shards do. A segment goes to the less filled of two shards; it needs none of those before it, wherever they are.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import ray

from holdall import storage
from holdall.cluster.protocol import GoneError, SegmentStream, ShardClosedError, ShardList
from holdall.cluster.roster import MemoryTerms, wait_for_grant
from holdall.errors import ClosedError, ShardError
from holdall.json_state import schema_of
from holdall.native import chosen_kernels
from holdall.schema import Schema

_SEGMENT_ROWS = 128
_WAIT_S = 0.05
_LOG = logging.getLogger("holdall")


class LaneGroup:
    """Lanes of a writer whose episodes stay together, and their way to the shards. Not locked: the writer is.

    Args:
        schema: Of these lanes.
        lanes: Which of the writer's they are.
        spread: See `Writer`.
        first: Which of the shards gets the first segment, counted over and over; -1: any.
    """

    def __init__(self, terms: MemoryTerms, schema: Schema, lanes: slice, spread: int | None, first: int = -1) -> None:
        self._terms, self.lanes, self._spread, self._first = terms, lanes, spread, first
        self._name = secrets.token_bytes(16)
        self._roster, self._kernels = terms.roster(), chosen_kernels()
        count = schema.num_envs
        self.encoder = storage.Encoder(schema, count, max(1, _SEGMENT_ROWS // count), self._kernels)
        self._codecs = storage.EncoderCodecs(self.encoder, terms.prefer, partial(_agreed, self._roster))
        self._generator = np.random.default_rng()
        self._home, self._stay_rows = -1, terms.stay_rows  # the shard on which it stays while episodes go on
        self.streams: dict[int, SegmentStream] = {}
        self._list = ShardList(self._roster, terms.patience_s)
        self._open_to: list[int] = []  # shards that it sends new segments to
        self._left: set[int] = set()  # those that take nothing more
        self.waited_s = 0.0

    def short_way(self, lock: Any) -> Callable[..., int]:
        """Return a function that adds a tick if there is nothing else to do, see `storage.Encoder.short_way`."""
        return self.encoder.short_way(lock, _SEGMENT_ROWS // 2 if self._stay_rows else _SEGMENT_ROWS)

    def make_room(self) -> None:
        """Have room for one more tick; wait until shards take the segment that is full.

        One that is long enough, and ends with an episode, counts as full: the next one may go elsewhere.
        """
        may_end = self._stay_rows and self.encoder.rows >= _SEGMENT_ROWS // 2
        if self.encoder.is_full or (may_end and self.encoder.ends_episodes):
            self._send()

    def flush(self) -> None:
        """Send what waits, and return when the shards have acknowledged everything."""
        if self.encoder.rows:
            self._send()
        while any(stream.under_way for stream in self.streams.values()):
            self._each(SegmentStream.flush)

    def _each(self, act: Callable[[SegmentStream], None], numbers: Iterable[int] | None = None) -> None:
        """Do something with every stream, or with some."""
        for stream in [self.streams[number] for number in (self.streams if numbers is None else numbers)]:
            with self._rerouting(stream):
                act(stream)

    def _send(self) -> None:
        """Close the segment and send it on its way; what could fail comes before that, so that none is lost."""
        start = time.monotonic()
        stream, lease = self._roomy(), self._leased(self.encoder.rows)
        if self.streams.get(stream.number) is not stream:  # its shard was closed or lost while a grant was waited for
            stream = self._roomy()
        self.waited_s += time.monotonic() - start
        codecs, rows = self._codecs.of_fields(), self.encoder.rows
        stays = self._stay_rows and not self.encoder.ends_episodes
        self._home, self._first = stream.number if stays else -1, -1
        payload = storage.pack_segment(self.encoder.close(codecs), self._kernels.coder)
        with self._rerouting(stream):
            stream.send(payload, rows, lease)

    def _roomy(self) -> SegmentStream:
        """Return where the next segment goes: to the less filled of two that have room for it.

        A shard that is away has none, and does not keep others waiting.
        """
        until = time.monotonic() + self._terms.writer_patience_s
        while True:
            self._look_around()
            self._each(SegmentStream.poll, self._open_to)
            chosen = [self.streams[number] for number in self._open_to if number in self.streams]
            roomy = [stream for stream in self._allowed(chosen) if stream.has_room]
            if roomy:
                pair: list[int] = self._generator.permutation(len(roomy))[:2].tolist()
                return min([roomy[i] for i in pair], key=lambda stream: stream.inserted)
            if not chosen:
                raise ShardError("no shard takes transitions; add one with memory.add_shard()")
            if time.monotonic() > until:
                raise chosen[0].silence()
            with self._rerouting(chosen[0]):
                chosen[0].poll(_WAIT_S)

    def _allowed(self, streams: list[SegmentStream]) -> list[SegmentStream]:
        """Return the streams that the next segment may be sent on: all, or that of the shard where episodes go on."""
        if streams and self._first >= 0:
            return [streams[self._first % len(streams)]]
        home = [stream for stream in streams if stream.number == self._home]
        lead = home[0].inserted - min(stream.inserted for stream in streams) if home else 0
        return home if home and lead < self._stay_rows else streams

    def _leased(self, rows: int) -> int:
        """Wait for a grant of the memory's limiter; -1 if there is none."""
        limit = self._terms.limit
        if limit is None:
            return -1
        limit.require("block", rows * limit.samples_per_insert)
        ask, poll = partial(self._terms.ask, self._roster), partial(self._each, SegmentStream.poll)
        # What has arrived meanwhile does not count as under way any more.
        return int(wait_for_grant("add", ask, "lease_insert", rows, poll))

    @contextmanager
    def _rerouting(self, stream: SegmentStream) -> Iterator[None]:
        """Send what is left to other shards if one turns out to be gone with all that it held."""
        try:
            yield
        except GoneError as error:
            is_closed = isinstance(error, ShardClosedError)
            self._list.look(now=True)
            if self._terms.url is not None and not is_closed and stream.number in self._list.handles:
                raise
            if is_closed:
                self._left.add(stream.number)
            self._look_around()
            others = [self.streams[number] for number in self._open_to if number != stream.number]
            if stream.under_way and not others:
                raise ShardError(
                    f"no shard takes the {stream.unacknowledged_rows} transitions that were under way to shard "
                    f"{stream.number}, which is gone; they are kept: add one with memory.add_shard(), and call flush()"
                ) from error
            self.streams.pop(stream.number, None)
            for segment in stream.take_back():
                least = min(others, key=lambda each: each.inserted)
                with self._rerouting(least):
                    least.send(segment.payload, segment.rows)

    def _look_around(self, now: bool = False) -> None:
        """Ask which shards there are, from time to time, or at once."""
        self._list.look(now=now)
        taking = sorted(set(self._list.handles) - self._left)
        for number in taking:
            if number not in self.streams:
                handle, patience_s = self._list.handles[number], self._terms.writer_patience_s
                self.streams[number] = SegmentStream(handle, number, self._name, patience_s, self._roster)
        if self._spread is not None and self._spread < len(taking):
            kept = [number for number in self._open_to if number in taking]
            others = [number for number in taking if number not in kept]
            missing = max(0, self._spread - len(kept))
            taking = (kept + self._generator.permutation(others).tolist()[:missing])[: self._spread]
        self._open_to = taking


def _agreed(roster: Any, field: str, choose: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return the codec that the memory's first writer chose for a field; None: it is asked again later."""
    try:
        words: dict[str, Any] | None = ray.get(roster.codec.remote(field))
        return ray.get(roster.codec.remote(field, choose())) if words is None else words
    except ray.exceptions.RayError:
        return None


_OPEN: weakref.WeakSet[Writer] = weakref.WeakSet()


def _flush_all() -> None:
    for writer in list(_OPEN):
        writer._end()


class Writer:
    """Feeds a memory; picklable while nothing waits in it, without any right over the memory's life.

    When `add` raises, its transitions are not held: call it again. When `extend` raises, call it again with the same
    steps: it goes on where it stopped. Closing a writer, leaving its `with` block, dropping it, and the normal end of
    its process flush it; a process that is killed loses what `flush` had not returned for, `waiting_rows` and
    `unacknowledged_rows`.

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
        if getattr(self, "_closed", True) or not ray.is_initialized():
            return
        # Ray names calls of an actor that ends as those of all others that do: two at a time would end a shard. Those
        # of a new thread have names of their own.
        thread = threading.Thread(target=self._end, name="holdall-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python ends, and starts no more threads
            self._end()
        else:
            thread.join()

    def _end(self) -> None:
        held = self.waiting_rows + self.unacknowledged_rows
        try:
            Writer.close(self)  # of a memory, too, only that
        except Exception as error:  # nobody could catch it here
            _LOG.warning("a writer ended with %d transitions that no shard has acknowledged: %s", held, error)

    @property
    def _streams(self) -> list[SegmentStream]:
        return [stream for group in self._groups for stream in group.streams.values()]

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
        return sum(len(segment.payload) for stream in self._streams for segment in stream.under_way)

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
            self._extend(self._fit(leading, obs, action, reward, next_obs, terminated, truncated, extras, valid))

    def _extend(self, steps: storage.Tick) -> None:
        """Add steps that were checked, one group of lanes after another; after an error go on where it came."""
        stopped, first, taken = self._stopped_at
        if not stopped or steps.digest() != stopped:
            first = taken = 0
        for number, group in enumerate(self._groups[first:], first):
            part = steps.cut((slice(None), group.lanes))
            try:
                while taken < len(steps.reward):
                    group.make_room()
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

    def _fit(self, leading: tuple[int, ...], *arguments: Any) -> storage.Tick:
        return storage.Tick.fitted(self.schema, leading, self._groups[0].encoder.reward_dtype, *arguments)

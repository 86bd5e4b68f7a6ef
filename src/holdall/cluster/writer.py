"""Writers: handles with which any process adds transitions to a memory over shards.

    add -> SegmentBuilder (a native writer) -> compressed segment -> SegmentStream -> shard

Guarantee: when `flush` returns, the shards have acknowledged everything. The bytes in flight are bounded: `add` waits
while the shards are busy.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import ray

from holdall.cluster.calls import require_ray
from holdall.cluster.limiter import wait_for_grant
from holdall.cluster.segment import SegmentBuilder
from holdall.cluster.stream import SegmentStream, SentSegment, ShardStreams
from holdall.cluster.terms import MemoryTerms
from holdall.errors import ClosedError, ShardError
from holdall.schema import Array, Schema, schema_of
from holdall.store.step import Step, check_step

_END_S = 10.0
_LOG = logging.getLogger("holdall")


class LaneGroup:
    """Lanes of a writer that are sent together, so that their episodes stay together. Not thread-safe.

    Args:
        schema: Spaces, with the lanes of this group.
        lanes: Lanes of the writer that belong to the group.
        spread: See `Writer`.
        first: See `ShardStreams`.

    Attributes:
        lanes: See above.
        builder: The segment that is being filled.
        streams: The way to the shards.
        waited_s: Seconds that were spent waiting for shards and the limiter.
        is_waiting: Whether a thread waits for the limiter now.
        ignores_limit: Whether segments are sent without a grant.
    """

    def __init__(self, terms: MemoryTerms, schema: Schema, lanes: slice, spread: int | None, first: int = -1) -> None:
        tuning = terms.tuning
        self.lanes = lanes
        self.streams = ShardStreams(terms, spread, first)
        max_rows = tuning.segment_rows if terms.limit or terms.stay_rows else tuning.max_segment_rows
        self.builder = SegmentBuilder(schema, max_rows, terms.prefer, tuning.store)
        self.waited_s = 0.0
        self.is_waiting = False
        self.ignores_limit = False
        self._terms = terms
        self._lane_count = schema.num_envs
        self._started_at = 0.0  # When the segment was started.

    def append(self, step: tuple[Any, ...]) -> None:
        """Write one tick. Send the segment first if it is full or due."""
        if self._is_due(0.0):
            self._send()
        if not self.builder.append(step):
            self._send()
            self.builder.append(step)

    def make_room(self) -> None:
        """Send the segment if it is full or due, so that the next tick certainly fits."""
        if self._is_due(0.0) or not self.builder.has_room:
            self._send()

    def extend(self, steps: Step, first: int) -> int:
        """Write checked steps from number `first` on, and return how many were written."""
        if self._is_due(self._terms.tuning.gather_s):
            self._send()
        count = self.builder.extend(steps, first)
        if count == 0:
            self._send()
            count = self.builder.extend(steps, first)
        return count

    def _is_due(self, gather_s: float) -> bool:
        """Return whether the segment should be sent before the next tick.

        A segment that is long enough and ends with an episode counts as full, because the next one may go to another
        shard. The first segments are closed as soon as it is known what observations share. Otherwise `extend` fills a
        segment for up to `gather_s` seconds.
        """
        rows = self.builder.rows
        if self.builder.has_new_window:
            return True
        segment_rows = self._terms.tuning.segment_rows
        if rows + self._lane_count > segment_rows:
            return time.monotonic() >= self._started_at + gather_s
        is_long = rows >= segment_rows // 2
        return bool(self._terms.stay_rows) and is_long and self.builder.ends_episodes

    def flush(self, *, waits: bool = True) -> None:
        """Wait until the shards have acknowledged everything. Without `waits`, keep what the limiter does not grant."""
        if self.builder.rows:
            self._send(waits)
        self.streams.flush()

    def _send(self, waits: bool = True) -> None:
        """Send the segment and start the next one. Everything that could fail comes before that."""
        began_s = time.monotonic()
        rows = self.builder.rows
        if rows == 0:
            return
        stream = self.streams.choose_stream()
        lease = self._wait_for_lease(rows, waits)
        if lease is None:
            return
        if stream.is_gone:  # It ended during the wait for a grant.
            stream = self.streams.choose_stream()
        self.waited_s += time.monotonic() - began_s
        stays = bool(self._terms.stay_rows) and not self.builder.ends_episodes
        payload = self.builder.close()
        self.streams.send(stream, SentSegment(payload, rows, lease), stays=stays)
        self._started_at = time.monotonic()

    def _wait_for_lease(self, rows: int, waits: bool) -> int | None:
        """Return a lease of the limiter, -1 if none is needed, or None if there is none now and `waits` is False."""
        limit = self._terms.limit
        if limit is None or self.ignores_limit:
            return -1

        def is_needed() -> bool:
            self.streams.for_each(SegmentStream.poll)  # Segments that have arrived no longer count as in flight.
            return waits and not self.ignores_limit

        self.is_waiting = waits
        try:
            notice_s = self._terms.tuning.notice_s
            lease = wait_for_grant(limit, "add", rows, self.streams.ask_roster, notice_s, is_needed)
        finally:
            self.is_waiting = False
        return -1 if lease is None and waits else lease


_OPEN: weakref.WeakSet[Writer] = weakref.WeakSet()


def _flush_all() -> None:
    for writer in list(_OPEN):
        writer.ignore_limit()
        writer._end()


class Writer:
    """Feeds a memory. Can be pickled while nothing waits in it. It has no right over the memory's life.

    If `add` raises, its transitions are not held: call it again. If `extend` raises, call it again with the same steps:
    it continues where it stopped. Closing a writer, leaving its `with` block, dropping it, and the normal end of its
    process flush it. A process that is killed loses its `waiting_rows` and `unacknowledged_rows`.

    Args:
        num_envs: Lanes of this writer. Where episodes have to stay together, lanes are sent to the shards in groups.
        spread: Number of shards that it sends to, chosen at random. None: all.
    """

    _what = "writer"

    def __init__(self, terms: MemoryTerms, num_envs: int, spread: int | None = None) -> None:
        self.schema = replace(schema_of(terms.words), num_envs=num_envs)
        self._terms = terms
        self._lanes = num_envs
        self._spread = spread
        self._closed = False
        self._lock = threading.RLock()  # Re-entrant, because the end of a process flushes whatever its threads do.
        group_count = min(num_envs, terms.shards if terms.stay_rows else 1)
        begin = secrets.randbelow(2**16)
        self._groups = [
            LaneGroup(
                terms,
                replace(self.schema, num_envs=len(lanes)),
                slice(int(lanes[0]), int(lanes[-1]) + 1),
                spread,
                begin + number if group_count > 1 else -1,
            )
            for number, lanes in enumerate(np.array_split(np.arange(num_envs), group_count))
        ]
        # An `extend` that raised: a hash of its steps, the group that raised, and the number of steps that it took.
        self._stopped_at = (b"", 0, 0)
        if not _OPEN:
            atexit.unregister(_flush_all)
            atexit.register(_flush_all)  # Runs before Ray's own function, which was registered earlier.
        _OPEN.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.waiting_rows or self.unacknowledged_rows:
            raise ShardError("The writer cannot be pickled while transitions wait in it. Call flush() first.")
        return type(self), (self._terms, self._lanes, self._spread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        if not ray.is_initialized():  # Python may be ending, and then starts no threads.
            self._end()
            return
        # Ray gives the calls of an actor that ends names that others may have, too. Two such calls at a time would end
        # a shard. The calls of a new thread have names of their own.
        thread = threading.Thread(target=self._end, name="holdall-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python is ending.
            self._end()
        else:
            thread.join(_END_S)  # Not forever, because the interrupted code may hold a lock of Ray that is needed here.

    def _end(self) -> None:
        """Close the writer, and log an error, because nobody could catch it."""
        held = self.waiting_rows + self.unacknowledged_rows
        try:
            Writer.close(self)  # Of a memory, this closes the writer only.
        except Exception as error:
            _LOG.warning("A writer ended with %d transitions that no shard has acknowledged: %s", held, error)
            self._closed = True

    @property
    def _streams(self) -> list[SegmentStream]:
        return [stream for group in self._groups for stream in tuple(group.streams.streams.values())]

    @property
    def waiting_rows(self) -> int:
        """Rows that were not sent yet."""
        return sum(group.builder.rows for group in self._groups)

    @property
    def unacknowledged_rows(self) -> int:
        """Rows that were sent and not acknowledged yet."""
        return sum(stream.unacknowledged_rows for stream in self._streams)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that were sent and not acknowledged yet."""
        return sum(stream.unacknowledged_bytes for stream in self._streams)

    @property
    def waited_s(self) -> float:
        """Seconds that adding has waited for shards and the limiter."""
        return sum(group.waited_s for group in self._groups)

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Mapping[str, Any] | None = None,
        valid: Any = None,
    ) -> None:
        """Add one transition per lane, see `holdall.ReplayMemory.add`. It can be sampled after `flush`."""
        step = (obs, action, reward, next_obs, terminated, truncated, extras, valid)
        with self._lock:
            self._require_open()
            if len(self._groups) == 1:
                self._groups[0].append(step)
                return
            checked = self._check((self._lanes,), step)
            for group in self._groups:  # All groups have room before the first one takes its part.
                group.make_room()
            for group in self._groups:
                group.builder.append(_cut(checked, group.lanes))

    def extend(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Mapping[str, Any] | None = None,
        valid: Any = None,
    ) -> None:
        """Add whole trajectories: the arguments of `add`, with a leading time axis before the lanes."""
        with self._lock:
            self._require_open()
            given = (obs, action, reward, next_obs, terminated, truncated, extras, valid)
            steps = self._check((len(reward), self._lanes), given)
            first_group, taken = self._find_resume(steps)
            for number, group in enumerate(self._groups[first_group:], first_group):
                part = steps if len(self._groups) == 1 else _cut(steps, (slice(None), group.lanes))
                try:
                    while taken < len(steps.reward):
                        taken += group.extend(part, taken)
                except BaseException:
                    self._stopped_at = (_hash_step(steps), number, taken)
                    raise
                taken = 0
            self._stopped_at = (b"", 0, 0)

    def _find_resume(self, steps: Step) -> tuple[int, int]:
        """Return the group and the step at which an `extend` that raised with the same steps continues."""
        stopped, group, taken = self._stopped_at
        if stopped and _hash_step(steps) == stopped:
            return group, taken
        return 0, 0

    def flush(self) -> None:
        """Send what waits, and return when the shards have acknowledged everything."""
        with self._lock:
            for group in self._groups:
                group.flush()

    def ignore_limit(self) -> None:
        """Stop waiting for the memory's `limit`, also in a call of another thread, because nobody draws any more."""
        for group in self._groups:
            group.ignores_limit = True

    def close(self, *, flush: bool = True) -> None:
        """Flush, and accept no more transitions."""
        with self._lock:
            if flush and not self._closed:
                self.flush()
            self._closed = True
            _OPEN.discard(self)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"The {self._what} was closed. Make a new one.")
        require_ray()

    def _check(self, leading: tuple[int, ...], step: tuple[Any, ...]) -> Step:
        """Return checked steps of all lanes. The first ones set the dtype of rewards."""
        builders = [group.builder for group in self._groups]
        checked = check_step(self.schema, leading, builders[0].reward_dtype, *step)
        for builder in builders:
            builder.set_reward_dtype(checked.reward.dtype)
        return checked


def _cut(step: Step, index: Any) -> Step:
    """Return the lanes of a step that an index of its leading axes selects."""
    return Step(
        obs=_cut_leaves(step.obs, index),
        action=_cut_leaves(step.action, index),
        reward=np.ascontiguousarray(step.reward[index]),
        next_obs=_cut_leaves(step.next_obs, index),
        terminated=np.ascontiguousarray(step.terminated[index]),
        truncated=np.ascontiguousarray(step.truncated[index]),
        extras=None if step.extras is None else _cut_leaves(step.extras, index),
        valid=None if step.valid is None else np.ascontiguousarray(step.valid[index]),
    )


def _cut_leaves(leaves: tuple[Array, ...], index: Any) -> tuple[Array, ...]:
    return tuple(np.ascontiguousarray(leaf[index]) for leaf in leaves)


def _hash_step(step: Step) -> bytes:
    """Return a hash of all arrays of a step."""
    digest = hashlib.blake2b(digest_size=16)
    for value in step:
        for array in value if isinstance(value, tuple) else (value,):
            if array is not None:
                digest.update(array.tobytes())
    return digest.digest()

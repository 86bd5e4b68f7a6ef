"""Writers: handles with which any process adds transitions to a memory over shards.

    add -> SegmentBuilder (a native writer) -> compressed segment -> SegmentStream -> shard

Guarantee: when `flush` returns, the shards have acknowledged everything. The bytes in flight are bounded: `add` waits
while the shards are busy.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import ray

from holdall.cluster.calls import require_ray
from holdall.cluster.config import MemoryConfig
from holdall.cluster.limiter import wait_for_grant
from holdall.cluster.members import Members
from holdall.cluster.roster import find_roster
from holdall.cluster.segment import SegmentBuilder
from holdall.cluster.stream import SentSegment, ShardStreams
from holdall.errors import ClosedError, ShardError
from holdall.schema_json import schema_from_json
from holdall.store.step import Step

_END_S = 10.0
_LOG = logging.getLogger("holdall")


_OPEN: weakref.WeakSet[Writer] = weakref.WeakSet()


def _flush_all() -> None:
    for writer in list(_OPEN):
        writer.ignore_limit()
        writer._end()


class Writer:
    """Adds transitions to a memory, and cannot end it. Can be pickled after `flush`.

    If `add` raises, its transitions are not held: call it again. If `extend` raises, call it again with the same steps:
    it continues where it stopped. Closing a writer, leaving its `with` block, dropping it, and the normal end of its
    process flush it. A process that is killed loses its `waiting_rows` and `unacknowledged_rows`. All methods may be
    called from any thread.

    Args:
        num_envs: Lanes of this writer. All of them are sent together.
        spread: Number of shards that it sends to, chosen at random. None: all.

    Attributes:
        waited_s: Seconds that adding has waited for shards and the limiter.
    """

    _what = "writer"

    def __init__(self, config: MemoryConfig, num_envs: int, spread: int | None = None) -> None:
        tuning = config.tuning
        self.schema = replace(schema_from_json(config.words), num_envs=num_envs)
        self.waited_s = 0.0
        self._config = config
        self._lanes = num_envs
        self._spread = spread
        self._closed = False
        self._lock = threading.RLock()  # Re-entrant, because the end of a process flushes whatever its threads do.
        self._members = Members(find_roster(config.name), config.patience_s, tuning)
        self._streams = ShardStreams(config, self._members, spread)
        max_rows = tuning.segment_rows if config.limit or config.stay_rows else tuning.max_segment_rows
        self._builder = SegmentBuilder(self.schema, max_rows, config.prefer, tuning.store)
        self._started_at = 0.0  # When the segment was started.
        self._is_waiting = False  # Whether a thread waits for the limiter now.
        self._ignores_limit = False
        self._stopped_at = (b"", 0)  # A hash of the steps of an `extend` that raised, and how many of them were taken.
        if not _OPEN:
            atexit.unregister(_flush_all)
            atexit.register(_flush_all)  # Runs before Ray's own function, which was registered earlier.
        _OPEN.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.waiting_rows or self.unacknowledged_rows:
            raise ShardError("The writer cannot be pickled while transitions wait in it. Call flush() first.")
        return type(self), (self._config, self._lanes, self._spread)

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
        """Close the writer. Log transitions that are lost, because nobody could catch an error."""
        held = self.waiting_rows + self.unacknowledged_rows
        try:
            Writer.close(self)  # Of a memory, this closes the writer only.
        except Exception as error:
            if held:
                _LOG.warning("A writer ended with %d transitions that no shard has acknowledged: %s", held, error)
            self._closed = True

    # ---------------------------------------------------------------- adding

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
            if self._is_due(0.0):
                self._send()
            if not self._builder.append(step):
                self._send()
                self._builder.append(step)

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
        given = (obs, action, reward, next_obs, terminated, truncated, extras, valid)
        with self._lock:
            self._require_open()
            steps = self._builder.check((len(reward), self._lanes), given)
            stopped, taken = self._stopped_at
            if not stopped or _hash_step(steps) != stopped:
                taken = 0
            try:
                while taken < len(steps.reward):
                    if self._is_due(self._config.tuning.gather_s):
                        self._send()
                    count = self._builder.extend(steps, taken)
                    if count == 0:
                        self._send()
                    taken += count
            except BaseException:
                self._stopped_at = (_hash_step(steps), taken)
                raise
            self._stopped_at = (b"", 0)

    def flush(self) -> None:
        """Send all transitions, and return when the shards have acknowledged them."""
        with self._lock:
            self._send()
            self._streams.flush()

    def ignore_limit(self) -> None:
        """Stop waiting for the memory's `limit`, also in a call of another thread, because nobody draws any more."""
        self._ignores_limit = True

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

    # ---------------------------------------------------------------- sending

    def _is_due(self, gather_s: float) -> bool:
        """Return whether the segment should be sent before the next tick.

        A segment that is long enough and ends with an episode counts as full, because the next one may go to another
        shard. The first segments are closed as soon as it is known what observations share. Otherwise `extend` fills a
        segment for up to `gather_s` seconds.
        """
        rows = self._builder.rows
        if self._builder.has_new_window:
            return True
        segment_rows = self._config.tuning.segment_rows
        if rows + self._lanes > segment_rows:
            return time.monotonic() >= self._started_at + gather_s
        is_long = rows >= segment_rows // 2
        return bool(self._config.stay_rows) and is_long and self._builder.ends_episodes

    def _send(self, *, waits: bool = True) -> None:
        """Send the segment and start the next one. Without `waits`, keep what the limiter does not grant now.

        Everything that could fail comes before the segment is closed.
        """
        began_s = time.monotonic()
        rows = self._builder.rows
        if rows == 0:
            return
        stream = self._streams.choose_stream()
        lease = self._wait_for_lease(rows, waits)
        if lease is None:
            return
        self.waited_s += time.monotonic() - began_s
        stays = bool(self._config.stay_rows) and not self._builder.ends_episodes
        payload = self._builder.close()
        self._streams.send(stream, SentSegment(payload, rows, lease), stays=stays)
        self._started_at = time.monotonic()

    def _wait_for_lease(self, rows: int, waits: bool) -> int | None:
        """Return a lease, or -1 without a limit. None: the limiter grants none now, and `waits` is False."""
        limit = self._config.limit
        if limit is None or self._ignores_limit:
            return -1

        def is_needed() -> bool:
            self._streams.poll()  # Segments that have arrived no longer count as in flight.
            return waits and not self._ignores_limit

        self._is_waiting = waits
        try:
            notice_s = self._config.tuning.notice_s
            lease = wait_for_grant(limit, "add", rows, self._members.ask_roster, notice_s, is_needed)
        finally:
            self._is_waiting = False
        return -1 if lease is None and waits else lease

    # ---------------------------------------------------------------- rows that are not held yet

    @property
    def waiting_rows(self) -> int:
        """Rows that were not sent yet."""
        return self._builder.rows

    @property
    def unacknowledged_rows(self) -> int:
        """Rows that were sent and not acknowledged yet."""
        return sum(stream.unacknowledged_rows for stream in tuple(self._streams.streams.values()))

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that were sent and not acknowledged yet."""
        return sum(stream.unacknowledged_bytes for stream in tuple(self._streams.streams.values()))


def _hash_step(step: Step) -> bytes:
    """Return a hash of all arrays of a step."""
    digest = hashlib.blake2b(digest_size=16)
    for value in step:
        for array in value if isinstance(value, tuple) else (value,):
            if array is not None:
                digest.update(array.tobytes())
    return digest.digest()

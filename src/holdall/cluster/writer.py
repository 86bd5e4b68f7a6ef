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
from holdall.cluster.limiter import LimiterClient
from holdall.cluster.members import Members
from holdall.cluster.roster import find_roster
from holdall.cluster.segment import SegmentBuilder
from holdall.cluster.stream import SentSegment, ShardStreams
from holdall.errors import ClosedError, ShardError
from holdall.schema_json import schema_from_json
from holdall.store.step import Step

_END_S = 10.0
"""Seconds that the deletion of a writer waits for its flush."""
_LOG = logging.getLogger("holdall")
_OPEN: weakref.WeakSet[Writer] = weakref.WeakSet()
"""Writers of this process that are not closed."""


def _end_all() -> None:
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
        num_envs: Lanes of this writer. A segment has all of them.
        spread: Number of shards that the writer sends to, chosen at random. None: all.

    Attributes:
        waited_s: Seconds that adding has waited for shards and the limiter.
    """

    _kind = "writer"

    def __init__(self, config: MemoryConfig, num_envs: int, spread: int | None = None) -> None:
        settings = config.settings
        tuning = settings.tuning
        self.schema = replace(schema_from_json(config.schema_json), num_envs=num_envs)
        self.waited_s = 0.0
        self._config = config
        self._lanes = num_envs
        self._spread = spread
        self._closed = False
        self._lock = threading.RLock()  # Re-entrant, because `close` calls `flush`.
        self._members = Members(find_roster(config.name), settings.learner_patience_s, tuning)
        self._limiter = None
        if settings.limit is not None:
            self._limiter = LimiterClient(settings.limit, self._members.ask_roster, tuning.notice_s)
        self._streams = ShardStreams(config, self._members, spread)
        max_rows = tuning.segment_rows if settings.limit or config.stay_rows else tuning.max_segment_rows
        self._builder = SegmentBuilder(self.schema, max_rows, settings.prefer, tuning.store)
        self._started_at = 0.0  # When the segment was started.
        self._is_waiting = False  # Whether a thread waits for the limiter now.
        self._ignores_limit = False
        # Hash of the steps of an `extend` that raised, and how many of these steps were added before the error.
        self._interrupted = (b"", 0)
        if not _OPEN:
            atexit.unregister(_end_all)
            atexit.register(_end_all)  # Runs before Ray's own function, which was registered earlier.
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
        # Ray may give a call of an actor that is ending the id of a call of another actor. A shard that executes two
        # calls with one id at the same time ends. Calls of a new thread have ids of their own.
        thread = threading.Thread(target=self._end, name="holdall-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python is ending.
            self._end()
        else:
            thread.join(_END_S)  # Not forever, because the interrupted code may hold a lock of Ray that is needed here.

    def _end(self) -> None:
        """Close the writer. Log transitions that are lost, because nobody could catch an error."""
        unsent = self.waiting_rows + self.unacknowledged_rows
        try:
            Writer.close(self)  # If this is a memory, do not end its shards.
        except Exception as error:
            if unsent:
                _LOG.warning("A writer ended with %d transitions that no shard has acknowledged: %s", unsent, error)
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
            interrupted_hash, added = self._interrupted
            if not interrupted_hash or _hash_step(steps) != interrupted_hash:
                added = 0
            try:
                while added < len(steps.reward):
                    if self._is_due(self._config.settings.tuning.gather_s):
                        self._send()
                    count = self._builder.extend(steps, added)
                    if count == 0:
                        self._send()
                    added += count
            except BaseException:
                self._interrupted = (_hash_step(steps), added)
                raise
            self._interrupted = (b"", 0)

    def flush(self) -> None:
        """Send all transitions, and return when the shards have acknowledged them."""
        with self._lock:
            self._send()
            self._streams.flush()

    def ignore_limit(self) -> None:
        """Add without the memory's `limit` from now on, because nobody draws any more.

        A call of another thread that waits for the limit continues, too.
        """
        self._ignores_limit = True

    def close(self, *, flush: bool = True) -> None:
        """Flush if `flush`, and accept no more transitions."""
        with self._lock:
            if flush and not self._closed:
                self.flush()
            self._closed = True
            _OPEN.discard(self)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"The {self._kind} was closed. Make a new one.")
        require_ray()

    # ---------------------------------------------------------------- sending

    def _is_due(self, gather_s: float) -> bool:
        """Return whether the segment should be sent before the next tick.

        With a sampler that follows episodes, a segment of half the length is sent if it ends with an episode, because
        the next one may go to another shard. The first segments are sent as soon as the slices that observations share
        are known. Otherwise, a segment of `segment_rows` rows is sent once it is `gather_s` seconds old.
        """
        rows = self._builder.rows
        if self._builder.has_new_window:
            return True
        segment_rows = self._config.settings.tuning.segment_rows
        if rows + self._lanes > segment_rows:
            return time.monotonic() >= self._started_at + gather_s
        is_long = rows >= segment_rows // 2
        return bool(self._config.stay_rows) and is_long and self._builder.ends_episodes

    def _send(self, *, waits: bool = True) -> None:
        """Send the segment and start the next one. Without `waits`, keep it if the limiter does not grant it now.

        Everything that could fail is done before the segment is closed.
        """
        began_s = time.monotonic()
        rows = self._builder.rows
        if rows == 0:
            return
        stream = self._streams.choose_stream()
        lease = self._wait_for_lease(rows, waits)
        if lease is None and self._is_limited:
            return
        self.waited_s += time.monotonic() - began_s
        stays = bool(self._config.stay_rows) and not self._builder.ends_episodes
        payload = self._builder.close()
        self._streams.send(stream, SentSegment(payload, rows, lease), stays=stays)
        self._started_at = time.monotonic()

    @property
    def _is_limited(self) -> bool:
        return self._limiter is not None and not self._ignores_limit

    def _wait_for_lease(self, rows: int, waits: bool) -> int | None:
        """Return a lease for `rows` rows.

        Return None if the memory has no limit, if this writer ignores it, or if `waits` is False and the limiter
        refuses.
        """
        if self._limiter is None or self._ignores_limit:
            return None

        def is_needed() -> bool:
            self._streams.poll()  # Ends the leases of segments that have arrived.
            return waits and not self._ignores_limit

        self._is_waiting = waits
        try:
            return self._limiter.wait_for_lease(rows, is_needed)
        finally:
            self._is_waiting = False

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
    """Return a hash of all arrays of some steps."""
    digest = hashlib.blake2b(digest_size=16)
    for value in step:
        for array in value if isinstance(value, tuple) else (value,):
            if array is not None:
                digest.update(array.tobytes())
    return digest.digest()

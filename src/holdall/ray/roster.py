"""The roster: which shards there are, and what their writers and learners have to agree on.

In:  shards that come and go; questions.  Out: the list of shards with a version; lives of shards; the codec of a field;
grants of inserts and samples, where their ratio is limited.
Invariant: it is off the path of the data. A number is given to one shard only, a life of a shard begins once, and a
field's codec is chosen by one writer, whatever many ask at the same time.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from typing import Any

import ray

from holdall.ray.ids import MOST_LIVES
from holdall.ray.limiter import Limiter, RateLimit
from holdall.ray.metrics import LimiterMetrics
from holdall.ray.standing import Standing

NAMESPACE = "holdall"
"""Where rosters have their names."""
_LOOK_AGAIN_S = 0.05
_CHOOSING_S = 60.0
"""How long a writer may take to choose a codec before another is asked to."""


class Roster:
    """What is agreed on."""

    def __init__(self, memory: str, limit: RateLimit | None, survives: bool) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._limiter = None if limit is None else Limiter(limit)
        self._metrics = None if limit is None else LimiterMetrics(memory)
        self._survives = survives
        self._inserted: dict[tuple[int, int], int] = {}
        self._looked_at = 0.0
        # A roster that was restarted does not know which lives there were; it begins where there were none yet.
        self._first_life = 1 + secrets.randbelow(MOST_LIVES - 1) if _is_restarted() else 0
        self._recentres = _is_restarted()
        self._shards: dict[int, tuple[Any, bool]] = {}  # handle, and whether it takes new blocks
        self._lives: dict[int, int] = {}
        self._codecs: dict[str, bytes] = {}
        self._choosing: dict[str, float] = {}

    def begin_life(self, shard: int, first: int) -> int:
        """Count a shard's lives, from `first` on."""
        with self._lock:
            life = self._lives[shard] = max(first, self._first_life, self._lives.get(shard, -1) + 1)
            return life

    def admit(self, handles: dict[int, Any]) -> int:
        """Add shards to the list; it is told all there are, since it may have been restarted and know none."""
        with self._lock:
            self._shards = {shard: (handle, True) for shard, handle in handles.items()} | self._shards
            self._version = max(self._version + 1, time.time_ns())  # also higher than one before a restart
            return self._version

    def retire(self, shard: int) -> int:
        """Have no new blocks sent to a shard."""
        with self._lock:
            handle, _ = self._shards[shard]
            self._shards[shard] = (handle, False)
            self._version = max(self._version + 1, time.time_ns())
            return self._version

    def dismiss(self, shard: int) -> int:
        """Take a shard off the list."""
        with self._lock:
            self._shards.pop(shard, None)
            self._version = max(self._version + 1, time.time_ns())
            return self._version

    def shards(self, known: int) -> tuple[int, dict[int, tuple[Any, bool]] | None]:
        """Return the list and its version; no list if the version is known."""
        with self._lock:
            return self._version, None if known == self._version else dict(self._shards)

    def codec(self, key: str) -> tuple[str, bytes]:
        """Say which codec a field's slices get: "chosen" and the codec, "choose" it, or "wait"."""
        with self._lock:
            if key in self._codecs:
                return "chosen", self._codecs[key]
            now = time.monotonic()
            if now < self._choosing.get(key, 0.0):
                return "wait", b""
            self._choosing[key] = now + _CHOOSING_S
            return "choose", b""

    def chose(self, key: str, codec: bytes) -> tuple[str, bytes]:
        """Take over a choice, unless another was quicker; return the one that stands."""
        with self._lock:
            return "chosen", self._codecs.setdefault(key, codec)

    def lease_insert(self, rows: int) -> int | None:
        """Grant the insert of some rows; None: not yet."""
        self._look_at_shards()
        with self._lock:
            return -1 if self._limiter is None else self._limiter.lease_insert(rows, time.monotonic())

    def end_insert(self, lease: int, shard: int, standing: bytes) -> None:
        """Hear that rows that were granted have arrived."""
        with self._lock:
            if self._limiter is not None:
                self._note(shard, Standing.of(standing))
                self._limiter.end_insert(lease)

    def take_samples(self, rows: int) -> bool:
        """Grant the draw of some rows; False: not yet."""
        self._look_at_shards()
        with self._lock:
            return self._limiter is None or self._limiter.take_samples(rows)

    def limiter(self) -> dict[str, float]:
        """Say how the limiter stands."""
        self._look_at_shards()
        with self._lock:
            if self._limiter is None:
                return {}
            return self._limiter.words()

    def _look_at_shards(self) -> None:
        """Ask the shards what they took, now and then."""
        with self._lock:
            now = time.monotonic()
            if self._limiter is None or now - self._looked_at < _LOOK_AGAIN_S:
                return
            self._looked_at = now
            asked = {shard: handle.standing.remote() for shard, (handle, _) in self._shards.items()}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=1.0) if asked else ([], [])
        for shard, call in asked.items():
            if call in ready:
                try:
                    told = Standing.of(ray.get(call))
                except ray.exceptions.RayError:  # it counts with what it took before
                    continue
                with self._lock:
                    self._note(shard, told)
        if self._metrics is not None and self._metrics.is_due:
            with self._lock:
                words = self._limiter.words()
            self._metrics.tell(**words)

    def _note(self, shard: int, standing: Standing) -> None:
        """Add up what was ever taken; a shard that began anew counts from 0 again."""
        life = 0 if self._survives else standing.epoch
        self._inserted[shard, life] = max(self._inserted.get((shard, life), 0), standing.inserted)
        if self._limiter is None:
            return
        total = sum(self._inserted.values())
        if self._recentres:
            self._limiter.recentre(total)
            self._recentres = len(self._inserted) < len(self._shards)
        self._limiter.observe(total)


def _is_restarted() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of a name that it uses itself
        return ray.is_initialized() and bool(ray.get_runtime_context().was_current_actor_reconstructed)

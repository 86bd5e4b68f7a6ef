"""The roster: an actor that lists the shards of a memory, and runs the rate limiter."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from holdall.cluster.calls import require_ray
from holdall.cluster.config import NAMESPACE, MemoryConfig
from holdall.cluster.ids import MAX_LIVES
from holdall.cluster.limiter import Call, Limiter, RateLimit
from holdall.cluster.messages import ShardCounters
from holdall.cluster.metrics import Gauges
from holdall.errors import ShardError

_NO_LIMIT = RateLimit(1.0, 1, 2.0**62)
_POLL_S = 0.05
"""Seconds between questions to the shards for their counters."""
_ANSWER_S = 0.1
"""Seconds that `Roster.limiter` waits for the shards."""
_FIRST_RANK = 2**20
"""Ranks of learners that were attached without a rank are above this number. Users pass lower ones."""


def find_roster(name: str) -> Any:
    """Return the roster of a memory. Raise ShardError if there is none."""
    require_ray()
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError as error:
        raise ShardError(f"There is no memory named {name!r} in this cluster. Was it closed?") from error


class Roster:
    """List of the shards, limiter, and further values that all processes of a memory need. It runs one call at a time.

    Args:
        shard_namespace: Ray namespace in which the name of a shard is its number. A restarted roster finds the shards
            there.
    """

    def __init__(self, config: MemoryConfig, shard_namespace: str) -> None:
        self._config = config
        # A restarted roster does not know which ranks it gave. A random number was most likely not among them.
        self._next_rank = _FIRST_RANK + (secrets.randbits(40) if is_restarted() else 0)
        self._highest = 0.0  # Highest priority of the whole memory, as far as learners reported.
        self._limiter = Limiter(config.settings.limit or _NO_LIMIT)
        self._inserted: dict[tuple[int, int], int] = {}  # Transitions that each life of each shard accepted.
        self._questions: dict[int, Any] = {}  # Unanswered questions to shards.
        self._polled_at = 0.0  # When the shards were last asked for their counters.
        # A restarted roster does not know which lives there were, either, so it starts at a random one.
        self._first_life = 1 + secrets.randbelow(MAX_LIVES - 1) if is_restarted() else 0
        self._lives: dict[int, int] = {}
        self._must_recentre = True  # Until all shards have reported how many transitions they accepted before.
        self._asked: dict[Call, float] = {}  # When a grant was last requested.
        self._shards: dict[int, Any] = {}
        self._version = 0
        self._set_shards(_find_shards(shard_namespace))
        if config.settings.limit is not None:
            Gauges("limiter", memory=config.name).follow(self._limiter.figures)

    def config(self) -> MemoryConfig:
        """Return the settings of the memory."""
        return self._config

    def enroll(self) -> int:
        """Return a rank for a learner that was attached without one."""
        self._next_rank += 1
        return self._next_rank

    # ---------------------------------------------------------------- shards

    def shards(self, known_version: int) -> tuple[int, dict[int, Any] | None]:
        """Return the version of the list and the shards by number, or None if the caller knows this version."""
        return self._version, None if known_version == self._version else self._shards

    def admit(self, shard: int, handle: Any) -> None:
        """Add a shard to the list."""
        self._set_shards(self._shards | {shard: handle})

    def dismiss(self, shard: int) -> None:
        """Remove a shard that could not be started."""
        self._set_shards({number: handle for number, handle in self._shards.items() if number != shard})

    def _set_shards(self, shards: dict[int, Any]) -> None:
        self._shards = shards
        self._version = secrets.randbits(62)

    def begin_life(self, shard: int, first: int) -> tuple[int, float]:
        """Return the number of a shard's new life, at least `first`, and the highest priority of the memory."""
        life = max(first, self._first_life, self._lives.get(shard, -1) + 1)
        self._lives[shard] = life
        return life, self._highest

    def raise_highest(self, scaled: float) -> None:
        """Record a scaled priority. A shard that starts gets the highest one."""
        self._highest = max(self._highest, scaled)

    # ---------------------------------------------------------------- the limiter

    def begin(self, known: Mapping[int, ShardCounters]) -> None:
        """Record what the shards accepted before the first writer adds something, or after a checkpoint was copied."""
        for shard, counters in known.items():
            self._record(shard, counters)
        self._limiter.recentre(sum(self._inserted.values()))

    def lease_insert(self, rows: int) -> int | None:
        """Grant an insert and return its lease, or None if the insert has to wait."""
        return self._limiter.lease_insert(rows, self._begin_grant("add"))

    def take_samples(self, rows: int) -> bool:
        """Grant a draw. Return False if the draw has to wait."""
        self._begin_grant("sample")
        return self._limiter.take_samples(rows)

    def _begin_grant(self, call: Call) -> float:
        """Bring the limiter up to date, and record that a grant was requested. Return the present time."""
        self._poll_shards()
        now = time.monotonic()
        self._asked[call] = now
        return now

    def end_insert(self, lease: int, shard: int, counters: ShardCounters) -> None:
        """Record that the rows of an insert have arrived."""
        self._record(shard, counters)
        self._limiter.end_insert(lease)

    def limiter(self) -> dict[str, float]:
        """Return the limiter's figures.

        `add_s` and `sample_s` are the seconds since the last request for such a grant, if there was one.
        """
        self._poll_shards(_ANSWER_S)
        now = time.monotonic()
        return self._limiter.figures() | {f"{call}_s": now - asked_at for call, asked_at in self._asked.items()}

    def _poll_shards(self, wait_s: float = 0.0) -> None:
        """Ask the shards at intervals for their counters, and read the answers that arrive within `wait_s`."""
        now = time.monotonic()
        if now - self._polled_at >= _POLL_S:
            self._polled_at = now
            for shard, handle in self._shards.items():
                if shard not in self._questions:
                    self._questions[shard] = handle.counters.remote()
        calls = list(self._questions.values())
        answered = ray.wait(calls, num_returns=len(calls), timeout=wait_s)[0] if calls else []
        for shard in [shard for shard, call in self._questions.items() if call in answered]:
            call = self._questions.pop(shard)
            with suppress(ray.exceptions.RayError):  # What the shard reported before still counts.
                self._record(shard, ray.get(call))

    def _record(self, shard: int, counters: ShardCounters) -> None:
        """Count the transitions that were ever accepted. A shard without a journal starts at 0 in every life."""
        life = 0 if self._config.settings.url is not None else counters.epoch
        self._inserted[shard, life] = max(self._inserted.get((shard, life), 0), counters.inserted)
        total = sum(self._inserted.values())
        if self._must_recentre:
            self._limiter.recentre(total)
            self._must_recentre = len(self._inserted) < len(self._shards)
        self._limiter.observe(total)


def _find_shards(namespace: str) -> dict[int, Any]:
    """Return the shards that run already. A roster that was not restarted finds none."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    shards = {}
    for number in sorted(int(each["name"]) for each in listed if each["namespace"] == namespace):
        with suppress(ValueError):  # The shard has ended since.
            shards[number] = ray.get_actor(str(number), namespace)
    return shards


def is_restarted() -> bool:
    """Return whether Ray has restarted the actor of this process."""
    context = ray.get_runtime_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of an attribute that it uses itself.
        return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)

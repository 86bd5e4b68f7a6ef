"""The rate limiter: how many rows may be drawn for every transition that is added.

    error = inserts * samples_per_insert - samples

Guarantee: the error stays within its bounds, even if several processes get a grant at the same time, or a process dies
before it uses its grant. An insert that was granted and has not arrived counts as done for the upper bound, and as not
done for the lower one. Grants of inserts expire, so nobody waits for a dead process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from holdall.checks import require_count, require_number
from holdall.errors import ArgumentError

Call = Literal["add", "sample"]

LEASE_S = 30.0
"""Seconds after which a grant expires that is neither used nor returned."""
_NOTICE_AGAIN_S = 30.0
"""Seconds between log messages of a call that waits."""
_ASK_AGAIN_S = 0.01
"""Seconds before the roster is asked again for a grant."""
_LOG = logging.getLogger("holdall")


@dataclass(frozen=True, slots=True)
class RateLimit:
    """About how often a transition is drawn before it is replaced.

    Args:
        samples_per_insert: Rows drawn for every transition added, in the long run.
        min_size: Transitions added before anything is drawn.
        tolerance: How many rows too many or too few may be drawn. At least a few batches, and a few segments of 128
            transitions times `samples_per_insert`.

    Examples:
        >>> from holdall.ray import RateLimit
        >>> limit = RateLimit(samples_per_insert=4, min_size=1_000, tolerance=2_000)
    """

    samples_per_insert: float
    min_size: int
    tolerance: float

    def __post_init__(self) -> None:
        require_number("samples_per_insert", self.samples_per_insert, 1e-6)
        require_count("min_size", self.min_size, 1)
        require_number("tolerance", self.tolerance, 0.0)

    @property
    def lowest(self) -> float:
        """Lower bound of the error."""
        return self.min_size * self.samples_per_insert - self.tolerance

    @property
    def highest(self) -> float:
        """Upper bound of the error."""
        return self.min_size * self.samples_per_insert + self.tolerance

    def require(self, call: Call, rows: int) -> None:
        """Raise ArgumentError if `rows` rows could never be granted."""
        needed = float(rows)
        reason = "the number of rows of a batch"
        if call == "add":
            needed = rows * self.samples_per_insert
            reason = f"a segment of {rows} rows times samples_per_insert"
        if needed > self.tolerance:
            raise ArgumentError(
                f"tolerance ({self.tolerance:g}) must be at least {needed:g}, {reason}. Otherwise writers and learners "
                "can wait for each other forever. Raise tolerance."
            )


class LimiterClient:
    """Asks the limiter of a memory, which runs in the roster, for grants. Thread-safe.

    Args:
        ask_roster: See `Members.ask_roster`.
        notice_s: Seconds of waiting before the first log message.
    """

    def __init__(self, limit: RateLimit, ask_roster: Callable[..., Any], notice_s: float) -> None:
        self._limit = limit
        self._ask_roster = ask_roster
        self._notice_s = notice_s

    def wait_for_lease(self, rows: int, is_needed: Callable[[], bool]) -> int | None:
        """Wait until the limiter grants an insert of `rows` rows. Return its lease.

        Return None if the limiter refuses and `is_needed`, which is called after every refusal, returns False.
        """
        self._limit.require("add", rows)
        wait = _Wait("add", self._limit, self._ask_roster, self._notice_s)
        while True:
            lease: int | None = self._ask_roster(lambda roster: roster.lease_insert.remote(rows), math.inf)
            if lease is not None or not is_needed():
                return lease
            wait.pause()

    def wait_for_samples(self, rows: int) -> None:
        """Wait until the limiter grants a draw of `rows` rows."""
        self._limit.require("sample", rows)
        wait = _Wait("sample", self._limit, self._ask_roster, self._notice_s)
        while not self._ask_roster(lambda roster: roster.take_samples.remote(rows), math.inf):
            wait.pause()


class _Wait:
    """A call that waits for a grant. It logs the state of the limiter while it waits."""

    def __init__(self, call: Call, limit: RateLimit, ask_roster: Callable[..., Any], notice_s: float) -> None:
        self._call = call
        self._limit = limit
        self._ask_roster = ask_roster
        self._began_s = time.monotonic()
        self._notice_at = self._began_s + notice_s

    def pause(self) -> None:
        """Wait until the limiter should be asked again."""
        now = time.monotonic()
        if now >= self._notice_at:
            self._notice_at = now + _NOTICE_AGAIN_S
            text = _describe(self._ask_roster(lambda roster: roster.limiter.remote()))
            _LOG.warning("%s has waited %.0f s for %s: %s", self._call, now - self._began_s, self._limit, text)
        time.sleep(_ASK_AGAIN_S)


def _describe(figures: dict[str, float]) -> str:
    """Return what the limiter waits for, in words."""
    callers = []
    for who, key in (("writer", "add_s"), ("learner", "sample_s")):
        if key in figures:
            callers.append(f"a {who} last asked {figures[key]:.0f} s ago")
        else:
            callers.append(f"no {who} has asked yet")
    return (
        f"{figures['inserted']:.0f} transitions were added and {figures['sampled']:.0f} rows drawn; the error may be "
        f"{figures['lowest']:.0f} to {figures['highest']:.0f} and is {figures['error']:.0f}; {', '.join(callers)}"
    )


@dataclass
class Limiter:
    """Grants inserts and samples. Not thread-safe: the roster runs one call at a time."""

    limit: RateLimit
    inserted: int = 0  # Transitions that the shards accepted, as far as they reported.
    sampled: int = 0
    _leases: dict[int, tuple[int, float]] = field(default_factory=dict)  # Rows and expiry of granted inserts.
    _next_lease: int = 0

    @property
    def error(self) -> float:
        """Rows by which samples are behind inserts."""
        return self.inserted * self.limit.samples_per_insert - self.sampled

    def figures(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return {
            "inserted": self.inserted,
            "sampled": self.sampled,
            "error": self.error,
            "lowest": self.limit.lowest,
            "highest": self.limit.highest,
        }

    def observe(self, inserted: int) -> None:
        """Record how many transitions the shards accepted. Lower numbers than before are ignored."""
        self.inserted = max(self.inserted, inserted)

    def lease_insert(self, rows: int, now: float) -> int | None:
        """Grant an insert and return its lease, or None if the error could exceed its upper bound."""
        self._leases = {lease: (count, end) for lease, (count, end) in self._leases.items() if end > now}
        granted = sum(count for count, _ in self._leases.values())
        error = (self.inserted + granted + rows) * self.limit.samples_per_insert - self.sampled
        if error > self.limit.highest:
            return None
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = (rows, now + LEASE_S)
        return lease

    def end_insert(self, lease: int) -> None:
        """Remove a lease whose rows a shard has acknowledged."""
        self._leases.pop(lease, None)

    def take_samples(self, rows: int) -> bool:
        """Grant and count a draw. Return False if the error could fall below its lower bound."""
        if self.inserted < self.limit.min_size or self.error - rows < self.limit.lowest:
            return False
        self.sampled += rows
        return True

    def recentre(self, inserted: int) -> None:
        """Start with shards that accepted transitions before, as if the right number of rows had been drawn."""
        self.inserted = inserted
        surplus = max(0, inserted - self.limit.min_size)
        self.sampled = int(surplus * self.limit.samples_per_insert)

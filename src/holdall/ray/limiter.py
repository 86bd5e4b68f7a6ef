"""The rate limiter: samples per insert, kept within bounds over all writers and learners.

In:  what the shards took, and leases that writers and learners ask for.  Out: grants, or not yet.
Invariant: error = inserts * samples_per_insert - samples never leaves its bounds, whatever is granted at the same time
and whoever dies with a grant: an insert under way counts against the upper bound as if it were done, and against the
lower as if it never would be. Grants end by themselves, so nobody waits for the dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdall.errors import ArgumentError
from holdall.sampling.draw import require_count, require_number

_LEASE_S = 30.0
"""How long a grant lasts that is neither used nor given back."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """How often a transition is to be drawn before it is replaced, about.

    Args:
        samples_per_insert: Rows drawn for every transition added, in the long run.
        min_size: Transitions added before anything is drawn.
        tolerance: How many rows too many or too few may be drawn; at least a few batches, and a few blocks of 128
            transitions times samples_per_insert.
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

    def require(self, what: str, rows: float) -> None:
        """Refuse what could never be granted."""
        if rows > self.tolerance:
            raise ArgumentError(
                f"tolerance ({self.tolerance:g}) is less than what one {what} moves ({rows:g}), so that writers and "
                "learners could wait for each other; raise it"
            )


@dataclass(slots=True)
class Limiter:
    """Grants inserts and samples. Not locked: whoever owns it is."""

    limit: RateLimit
    inserted: int = 0  # what the shards took, as they last said
    sampled: int = 0
    _inserts: dict[int, tuple[int, float]] = field(default_factory=dict)  # lease: rows, and when it ends
    _next: int = 0

    @property
    def error(self) -> float:
        """How far samples are behind inserts."""
        return self.inserted * self.limit.samples_per_insert - self.sampled

    def words(self) -> dict[str, float]:
        """Say how it stands, as plain numbers."""
        bounds = {"lowest": self.limit.lowest, "highest": self.limit.highest}
        return {"inserted": self.inserted, "sampled": self.sampled, "error": self.error, **bounds}

    def observe(self, inserted: int) -> None:
        """Take over what the shards have taken; it only grows."""
        self.inserted = max(self.inserted, inserted)

    def lease_insert(self, rows: int, now: float) -> int | None:
        """Grant the insert of some rows; None if it would lead out of bounds."""
        self._inserts = {lease: (n, end) for lease, (n, end) in self._inserts.items() if end > now}
        under_way = sum(n for n, _ in self._inserts.values())
        then = (self.inserted + under_way + rows) * self.limit.samples_per_insert - self.sampled
        if then > self.limit.highest:
            return None
        lease, self._next = self._next, self._next + 1
        self._inserts[lease] = (rows, now + _LEASE_S)
        return lease

    def end_insert(self, lease: int) -> None:
        """Forget a grant whose rows a shard has acknowledged, so that they are in `inserted` at the next look."""
        self._inserts.pop(lease, None)

    def take_samples(self, rows: int) -> bool:
        """Grant the draw of some rows, and count them; False if it would lead out of bounds."""
        if self.inserted < self.limit.min_size or self.error - rows < self.limit.lowest:
            return False
        self.sampled += rows
        return True

    def recentre(self, inserted: int) -> None:
        """Begin anew with shards that hold something already: as if as much had been drawn as should be."""
        self.inserted = inserted
        behind = max(0, inserted - self.limit.min_size)
        self.sampled = int(behind * self.limit.samples_per_insert)

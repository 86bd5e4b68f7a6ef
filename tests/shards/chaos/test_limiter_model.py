"""The limiter as a state machine: writers and learners get grants, use them in time or late, and die with them.

The model counts the transitions that the shards have accepted. Invariants: the error stays within its bounds, except
for inserts that arrive after their grant has expired, and in every state an insert or a draw is possible.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall.cluster.limiter import LEASE_S, Limiter, RateLimit

SEGMENT = 128
BATCH = 64
WRITERS = 4


class LimiterModel(RuleBasedStateMachine):
    """The events, in any order."""

    @initialize(ratio=st.sampled_from([0.25, 1.0, 4.0, 8.0]), min_size=st.integers(1, 300), slack=st.floats(0, 100))
    def begin(self, ratio: float, min_size: int, slack: float) -> None:
        self.limit = RateLimit(ratio, min_size, max(SEGMENT * ratio, BATCH) + slack)
        self.limiter = Limiter(self.limit)
        self.now = 0.0
        self.accepted = 0  # Transitions that the shards have accepted.
        self.drawn = 0
        self.late = 0  # Transitions that arrived after their grant had expired.
        self.granted: dict[int, tuple[int, float]] = {}  # Lease and its end, by writer.

    @rule(writer=st.integers(0, WRITERS - 1))
    def ask(self, writer: int) -> None:
        if writer not in self.granted:
            self.limiter.observe(self.accepted)  # As the roster does before every grant.
            lease = self.limiter.lease_insert(SEGMENT, self.now)
            if lease is not None:
                self.granted[writer] = lease, self.now + LEASE_S

    @rule(writer=st.integers(0, WRITERS - 1), is_reported=st.booleans())
    def insert(self, writer: int, is_reported: bool) -> None:
        """A shard accepts a segment. The limiter learns this now, or when it next asks the shards."""
        if writer in self.granted:
            lease, until = self.granted.pop(writer)
            self.accepted += SEGMENT
            self.late += SEGMENT if self.now >= until else 0
            if is_reported:
                self.limiter.observe(self.accepted)
                self.limiter.end_insert(lease)

    @rule()
    def rush(self) -> None:
        """All writers get a grant, and then all insert."""
        for writer in range(WRITERS):
            self.ask(writer)
        for writer in range(WRITERS):
            self.insert(writer, is_reported=True)

    @rule(writer=st.integers(0, WRITERS - 1))
    def die(self, writer: int) -> None:
        """A writer is killed and never uses its grant."""
        self.granted.pop(writer, None)

    @rule()
    def look(self) -> None:
        self.limiter.observe(self.accepted)

    @rule(quarters=st.integers(0, 3))
    def lose_a_shard(self, quarters: int) -> None:
        """A shard that lost its rows reports fewer transitions than before. This does not lower the count."""
        self.limiter.observe(self.accepted * quarters // 4)

    @rule(rows=st.sampled_from([1, BATCH]))
    def draw(self, rows: int) -> None:
        if self.limiter.take_samples(rows):
            self.drawn += rows

    @rule(seconds=st.floats(0.1, 2 * LEASE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: hasattr(self, "limiter"))
    @invariant()
    def error_is_within_bounds(self) -> None:
        error = self.accepted * self.limit.samples_per_insert - self.drawn
        assert error <= self.limit.highest + self.late * self.limit.samples_per_insert + 1e-6
        assert self.drawn == 0 or error >= self.limit.lowest - 1e-6
        assert self.drawn == 0 or self.accepted >= self.limit.min_size
        assert self.limiter.sampled == self.drawn

    @precondition(lambda self: hasattr(self, "limiter"))
    @rule()
    def everybody_dies_and_others_go_on(self) -> None:
        """When all grants have expired, an insert or a draw is possible, again and again."""
        self.granted.clear()
        for _ in range(3):
            self.now += 2 * LEASE_S
            self.limiter.observe(self.accepted)
            lease = self.limiter.lease_insert(SEGMENT, self.now)
            if lease is not None:
                self.accepted += SEGMENT
                self.limiter.observe(self.accepted)
                self.limiter.end_insert(lease)
            elif self.limiter.take_samples(BATCH):
                self.drawn += BATCH
            else:
                pytest.fail("neither an insert nor a draw is granted: deadlock")


TestLimiter = LimiterModel.TestCase

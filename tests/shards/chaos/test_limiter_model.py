"""The limiter as a state machine: writers and learners ask, use what they were granted, forget it, die and come late.

The model knows what the shards really took. Invariants: samples never run ahead of what is allowed; inserts never run
ahead either, but for what arrives after its grant has ended; and from every state somebody can go on.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall.cluster.limiter import LEASE_S, Limiter, RateLimit

BLOCK = 128
BATCH = 64
WRITERS = 4


class LimiterModel(RuleBasedStateMachine):
    """What may happen, in any order."""

    @initialize(ratio=st.sampled_from([0.25, 1.0, 4.0, 8.0]), min_size=st.integers(1, 300), slack=st.floats(0, 100))
    def begin(self, ratio: float, min_size: int, slack: float) -> None:
        self.limit = RateLimit(ratio, min_size, max(BLOCK * ratio, BATCH) + slack)
        self.limiter = Limiter(self.limit)
        self.now = 0.0
        self.taken = 0  # transitions that the shards have
        self.drawn = 0
        self.late = 0  # transitions that arrived after their grant had ended
        self.granted: dict[int, tuple[int, float]] = {}  # by writer: lease, and when it ends

    @rule(writer=st.integers(0, WRITERS - 1))
    def ask(self, writer: int) -> None:
        if writer not in self.granted:
            self.limiter.observe(self.taken)  # as the roster does before every grant
            lease = self.limiter.lease_insert(BLOCK, self.now)
            if lease is not None:
                self.granted[writer] = lease, self.now + LEASE_S

    @rule(writer=st.integers(0, WRITERS - 1), is_heard=st.booleans())
    def insert(self, writer: int, is_heard: bool) -> None:
        """A shard takes a block. The limiter hears of it now, or when the shards are asked."""
        if writer in self.granted:
            lease, until = self.granted.pop(writer)
            self.taken += BLOCK
            self.late += BLOCK if self.now >= until else 0
            if is_heard:
                self.limiter.observe(self.taken)
                self.limiter.end_insert(lease)

    @rule()
    def rush(self) -> None:
        """All ask at once, and then all insert."""
        for writer in range(WRITERS):
            self.ask(writer)
        for writer in range(WRITERS):
            self.insert(writer, is_heard=True)

    @rule(writer=st.integers(0, WRITERS - 1))
    def die(self, writer: int) -> None:
        """A writer is killed with a grant, which nobody gives back."""
        self.granted.pop(writer, None)

    @rule()
    def look(self) -> None:
        self.limiter.observe(self.taken)

    @rule(told=st.integers(0, 3))
    def lose_a_shard(self, told: int) -> None:
        """A shard that restarts says less than it did. What was taken was taken."""
        self.limiter.observe(self.taken * told // 4)

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
        error = self.taken * self.limit.samples_per_insert - self.drawn
        assert error <= self.limit.highest + self.late * self.limit.samples_per_insert + 1e-6
        assert self.drawn == 0 or error >= self.limit.lowest - 1e-6
        assert self.drawn == 0 or self.taken >= self.limit.min_size
        assert self.limiter.sampled == self.drawn

    @precondition(lambda self: hasattr(self, "limiter"))
    @rule()
    def everybody_dies_and_others_go_on(self) -> None:
        """Whatever was granted has ended: inserting or drawing is possible, and so it stays."""
        self.granted.clear()
        for _ in range(3):
            self.now += 2 * LEASE_S
            self.limiter.observe(self.taken)
            lease = self.limiter.lease_insert(BLOCK, self.now)
            if lease is not None:
                self.taken += BLOCK
                self.limiter.observe(self.taken)
                self.limiter.end_insert(lease)
            elif self.limiter.take_samples(BATCH):
                self.drawn += BATCH
            else:
                pytest.fail("neither an insert nor a draw is granted: deadlock")


TestLimiter = LimiterModel.TestCase

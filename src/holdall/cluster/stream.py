"""Streams: one writer's blocks on their way to one shard.

In:  encoded blocks, in order.  Out: the same on the shard, each once and in order.
Invariant: a block is kept until the shard acknowledged it. Calls are never retried by Ray, which would reorder them:
after a failure the shard is asked which block it expects, and the rest is sent again from there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray

from holdall.cluster.protocol import Ack, AckKind, Envelope, ShardCounters
from holdall.errors import ShardError

_LOG = logging.getLogger("holdall")
_PAUSE_S = 0.05

Describe = Callable[[bytes], Iterable[bytes]]
"""Returns the dictionaries that a block needs, as records."""


@dataclass(slots=True)
class _SentBlock:
    sequence: int
    payload: bytes
    rows: int
    call: Any
    lease: int = -1
    roster: Any = None


class BlockStream:
    """Blocks of one writer to one shard.

    Args:
        dictionaries: Finds the dictionaries that a block names.
        survives: Whether the shard holds after a restart what it acknowledged.
        patience_s: How long a shard may be away before the caller is told.
    """

    def __init__(
        self, shard: Any, number: int, writer: bytes, dictionaries: Describe, survives: bool, patience_s: float
    ) -> None:
        self._shard = shard
        self.number = number
        self._writer = writer
        self._dictionaries = dictionaries
        self._survives = survives
        self._patience_s = patience_s
        self._under_way: deque[_SentBlock] = deque()
        self._sequence = 0
        self._epoch = -1
        self._credits = 1
        self.standing: ShardCounters | None = None  # when the shard last said so
        self._failing_since: float | None = None
        self.waited_s = 0.0  # for room
        self.resent = 0

    @property
    def inserted(self) -> int:
        """Transitions that the shard ever took, as far as is known, with those under way."""
        taken = 0 if self.standing is None else self.standing.inserted
        return taken + sum(block.rows for block in self._under_way)

    @property
    def next_sequence(self) -> int:
        """The number of the next block."""
        return self._sequence

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the blocks under way."""
        return sum(len(block.payload) for block in self._under_way)

    def send(self, payload: bytes, rows: int) -> None:
        """Send a block; wait while as many are under way as the shard allows. If that fails, the block is kept."""
        block = _SentBlock(self._sequence, payload, rows, None)
        self._sequence += 1
        self._under_way.append(block)
        self.hear()
        start = time.monotonic()
        while block.call is None and len(self._under_way) > self._credits:
            self.hear(wait=True)
        self.waited_s += time.monotonic() - start
        self._begin()

    def grant(self, lease: int, roster: Any) -> None:
        """Tell a limiter when the block that was sent last has arrived."""
        if self._under_way:
            self._under_way[-1].lease, self._under_way[-1].roster = lease, roster

    def flush(self) -> None:
        """Wait until every block is acknowledged."""
        while self._under_way:
            self.hear(wait=True)

    def take_back(self) -> list[tuple[bytes, int]]:
        """Give up the blocks that were not acknowledged, of a shard that is gone with all that it held."""
        left = [(block.payload, block.rows) for block in self._under_way]
        self._under_way.clear()
        return left

    def _begin(self) -> None:
        """Send the blocks that were never sent: one that is new, and those that waited when patience was lost."""
        if self._epoch < 0:
            self._meet()
        for block in self._under_way:
            if block.call is None:
                self._call(block)

    def _call(self, block: _SentBlock) -> None:
        envelope = Envelope(self._writer, self._epoch, block.sequence).packed()
        block.call = self._shard.insert.remote(envelope, block.payload)

    def hear(self, wait: bool = False) -> None:
        """Look at the acknowledgements that came, in order; wait for the oldest if asked to."""
        while self._under_way:
            oldest = self._under_way[0]
            if oldest.call is None:
                self._begin()
                return
            ready, _ = ray.wait([oldest.call], timeout=self._patience_s if wait else 0)
            if not ready:
                if wait:
                    raise ShardError(
                        f"shard {self.number} has not acknowledged a block for {self._patience_s:g} s; the "
                        f"{len(self._under_way)} blocks under way are kept: call flush() to try again"
                    )
                return
            try:
                ack = Ack.of(ray.get(oldest.call))
            except ray.exceptions.RayError as error:
                _LOG.info("shard %d did not answer (%s); asking it what it expects", self.number, type(error).__name__)
                self._endure(error)
                self._meet()
                return
            self._credits = max(1, ack.credits)
            self.standing = ack.standing
            if ack.verdict is not AckKind.ACCEPTED:
                self._settle(ack, oldest)
                return
            self._under_way.popleft()
            if oldest.roster is not None:
                oldest.roster.end_insert.remote(oldest.lease, self.number, ack.standing.packed())
            self._failing_since = None
            wait = False

    def _endure(self, error: Exception) -> None:
        """Pause before the next try; tell the caller if none has succeeded for long."""
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self._patience_s:
            self._failing_since = None
            raise ShardError(
                f"shard {self.number} accepts nothing ({error}); the {len(self._under_way)} blocks under way are kept: "
                "call flush() to try again"
            ) from error
        time.sleep(_PAUSE_S)

    def _settle(self, ack: Ack, oldest: _SentBlock) -> None:
        """Go on after a block that was not accepted."""
        if ack.verdict is AckKind.REFUSED:
            self._under_way.popleft()
            self._sequence = oldest.sequence
            for later in self._under_way:
                later.sequence, self._sequence = self._sequence, self._sequence + 1
            raise ShardError(f"shard {self.number} refused a block, which is dropped: {ack.reason}")
        if ack.verdict is AckKind.CLOSED:
            self._forget_accepted()
            raise ShardClosedError(f"shard {self.number} takes nothing more")
        if ack.verdict is AckKind.NEEDS_DICTIONARY:
            ray.get([self._shard.learn.remote(record) for record in self._dictionaries(oldest.payload)])
        self._meet()

    def _meet(self) -> None:
        """Ask the shard what it expects, and send from there on again; wait while it restarts."""
        calls = [block.call for block in self._under_way if block.call is not None]
        if calls:  # one that still runs could be accepted after it was sent again; it would be refused then
            ray.wait(calls, num_returns=len(calls), timeout=self._patience_s)
        ack = self._asked()
        lost_all = self._epoch >= 0 and ack.standing.epoch != self._epoch and not self._survives
        self._epoch, self._credits = ack.standing.epoch, max(1, ack.credits)
        self.standing = ack.standing
        if lost_all:
            self._sequence = ack.expected
            for block in self._under_way:
                block.sequence, self._sequence = self._sequence, self._sequence + 1
        while self._under_way and self._under_way[0].sequence < ack.expected:
            self._under_way.popleft()  # accepted; its acknowledgement was lost
        self.resent += sum(block.call is not None for block in self._under_way)
        for block in self._under_way:
            self._call(block)

    def _forget_accepted(self) -> None:
        """Keep the blocks that a shard did not accept before it was closed."""
        calls = [block.call for block in self._under_way if block.call is not None]
        ray.wait(calls, num_returns=len(calls), timeout=self._patience_s)
        expected = self._asked().expected
        while self._under_way and self._under_way[0].sequence < expected:
            self._under_way.popleft()

    def _asked(self) -> Ack:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return Ack.of(ray.get(self._shard.expect.remote(self._writer), timeout=self._patience_s))
            except ray.exceptions.ActorDiedError as error:
                raise GoneError(f"shard {self.number} is gone for good ({error})") from error
            except ray.exceptions.RayError as error:
                if time.monotonic() > until:
                    raise ShardError(
                        f"shard {self.number} does not answer ({type(error).__name__}); the {len(self._under_way)} "
                        "blocks under way are kept: call flush() to try again"
                    ) from error
                time.sleep(_PAUSE_S)


class GoneError(ShardError):
    """A shard that will not come back."""


class ShardClosedError(GoneError):
    """A shard that takes nothing more; what it has not accepted is safe to send elsewhere."""

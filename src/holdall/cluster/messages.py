"""Messages between the processes of a memory, and the errors of calls to shards."""

from __future__ import annotations

from typing import NamedTuple

import ray

from holdall.cluster.ids import Ids
from holdall.cluster.shared_block import BlockRows
from holdall.errors import ShardError


class ShardCounters(NamedTuple):
    """The state of a shard at one moment, in numbers."""

    epoch: int  # Number that changes with every restart.
    first_row: int
    next_row: int
    transitions: int  # Held rows that can be drawn.
    inserted: int  # Transitions ever accepted.
    changes: int  # Changes of rows or priorities since the shard was started.
    backlog: int  # Bytes that are not durable yet.
    mass: float  # Sum of the masses of all rows, see `Likelihood`. A shard is drawn in proportion to it.
    highest: float = 0.0  # Scaled priority of a new row.


class SampleRequest(NamedTuple):
    """Rows of a batch that a learner wants from a shard."""

    machine: bytes  # Machine of the learner, see `get_machine_id`.
    seed: int  # Seed of the draw. 0: the shard's own generator.
    rows: int
    goals: int  # How many of the rows get another goal.
    block: BlockRows | None  # Where large observations are written. None: they are sent.


class GatherRequest(NamedTuple):
    """Rows that a learner wants by number."""

    machine: bytes  # Machine of the learner.
    rows: Ids


class InsertRequest(NamedTuple):
    """Segments that a writer sends to a shard."""

    writer: bytes
    first: int  # Number of the first segment. The writer will not send earlier ones again.
    payloads: list[bytes]


class Ack(NamedTuple):
    """A shard's answer to segments of a writer."""

    expected: int  # Number of the writer's next segment. The shard has all earlier ones, durably if it has a journal.
    counters: ShardCounters
    refusal: str = ""  # Why the next segment will never be accepted.


class ShardStatus(NamedTuple):
    """One shard at one moment. Everything except the number is unknown while the shard does not answer."""

    number: int
    answers: bool
    node: str = ""
    pid: int = 0
    uss_bytes: int = 0  # Memory that only the shard's process uses.
    counters: ShardCounters | None = None
    held_bytes: int = 0  # Bytes of the stored transitions.
    plain_bytes: int = 0  # Bytes of the same transitions as plain arrays of obs and next_obs.
    capacity: int = 0  # Maximum number of transitions.
    is_durable: bool = False  # Whether the shard has a journal.


class RestartedError(ShardError):
    """A shard was restarted, and has forgotten an earlier call."""


class GoneError(ShardError):
    """An actor has ended and will not be restarted."""


LOSSES = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, RestartedError)
"""Errors of a call to a shard that does not answer."""

"""How each shard is: where it runs, what it holds, and what its process takes.

In:  an actor.  Out: a few numbers; also of one that does not answer.
Invariant: reading what a process takes costs it a fiftieth of a core at most, however large it is and whoever asks.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import ray

from holdall.cluster.members import whereabouts
from holdall.cluster.protocol import ShardCounters
from holdall.cluster.roster import NAMESPACE
from holdall.cluster.security import join_cluster, require_head
from holdall.machine import LINUX, HeldMemory, held_bytes, memory_limits

_SHARE_OF_A_CORE = 0.02


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard at one moment; all but its number is unknown while it does not answer."""

    number: int
    answers: bool
    node: str = ""
    pid: int = 0
    uss_bytes: int = 0  # memory that its process has to itself
    standing: ShardCounters | None = None
    pss_bytes: int = 0  # the same, and its share of what it has in common with others
    held_bytes: int = 0  # of transitions, as they are held
    plain_bytes: int = 0  # what the same transitions take as plain arrays of obs and next_obs
    capacity: int = 0  # most transitions
    is_durable: bool = False  # whether a journal is kept
    limit: str = ""  # what its memory meets first: its control group, or the machine
    limit_bytes: int = 0
    limit_free_bytes: int = 0

    @classmethod
    def of(cls, number: int, told: dict[str, Any]) -> Self:
        """Read what a shard told."""
        return cls(number, True, **told | {"standing": ShardCounters.of(told["standing"])})


class Process:
    """The process that a shard runs in."""

    @staticmethod
    def anonymous_bytes() -> int:
        """Return the memory that no file backs, from the kernel's counters: at no cost, whatever the size."""
        if not LINUX:
            return held_bytes().anonymous
        _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def __init__(self) -> None:
        self._held: HeldMemory | None = None
        self._read_again_at = 0.0

    def words(self) -> dict[str, Any]:
        """Say where it runs, what it takes, and how much there is."""
        now = time.monotonic()
        if self._held is None or now >= self._read_again_at:
            self._held = held_bytes()  # the kernel walks all pages for it
            self._read_again_at = now + (time.monotonic() - now) / _SHARE_OF_A_CORE
        limit = memory_limits()[0]
        address: Any = ray.util.get_node_ip_address
        return {
            "node": str(address()),
            "pid": os.getpid(),
            "uss_bytes": self._held.unique,
            "pss_bytes": self._held.proportional,
            "limit": limit.name,
            "limit_bytes": limit.total_bytes,
            "limit_free_bytes": limit.free_bytes,
        }


def status_of(number: int, actor: Any, patience_s: float) -> ShardStatus:
    """Ask a shard how it is."""
    try:
        return ShardStatus.of(number, ray.get(actor.process.remote(), timeout=patience_s))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return ShardStatus(number, answers=False)


State = Literal["answers", "drains", "starts", "restarts", "silent", "lost"]


@dataclass(frozen=True, slots=True)
class SeenShard:
    """One shard, as far as it is known."""

    number: int
    state: State
    silent_s: float = 0.0  # since its last answer, or since it was asked first
    restarts: int = 0  # since the survey began
    status: ShardStatus | None = None  # what it said last


@dataclass(frozen=True, slots=True)
class SeenMemory:
    """One memory."""

    name: str
    roster_answers: bool
    shards: tuple[SeenShard, ...]
    limiter: dict[str, float] = field(default_factory=dict)  # see `Roster.limiter`; nothing where there is none


@dataclass(slots=True)
class _Asked:
    """A shard, and the question that it was asked."""

    handle: Any
    takes: bool
    heard_at: float
    call: Any = None
    status: ShardStatus | None = None
    restarts: int = 0
    is_gone: bool = False
    was_down: bool = False  # Ray said so since its last answer

    def seen(self, number: int, now: float) -> SeenShard:
        return SeenShard(number, self._state(), self._silent_s(now), self.restarts, self.status)

    def _silent_s(self, now: float) -> float:
        return 0.0 if self.call is None and not self.is_gone else now - self.heard_at

    def _state(self) -> State:
        if self.is_gone:
            return "lost"
        if self.call is None:
            return "answers" if self.takes else "drains"
        where = whereabouts(self.handle)
        if where == "gone":
            return "lost"
        self.was_down |= where != "up"
        if not self.was_down:
            return "silent"
        return "starts" if self.status is None else "restarts"


class Survey:
    """Looks at all memories of a cluster, again and again."""

    def __init__(self, address: str | None = None, patience_s: float = 2.0) -> None:
        self.address = join_cluster(address, NAMESPACE)
        self._patience_s = patience_s
        self._memories: dict[str, dict[int, _Asked]] = {}

    @property
    def nodes(self) -> int:
        """Machines that are alive, as Ray counts them."""
        nodes: Any = ray.nodes
        return sum(bool(node["Alive"]) for node in nodes())

    def take(self) -> list[SeenMemory]:
        """Ask everybody how they are; ShardError if the cluster has ended."""
        require_head(self.address)
        until = time.monotonic() + self._patience_s
        rosters = {name: ray.get_actor(name, NAMESPACE) for name in sorted(ray.util.list_named_actors())}
        self._memories = {name: self._memories.get(name, {}) for name in rosters}
        lists: dict[str, Any] = {name: roster.shards.remote(-1) for name, roster in rosters.items()}
        limiters: dict[str, Any] = {name: roster.limiter.remote() for name, roster in rosters.items()}
        answered = {name for name, call in lists.items() if self._list(name, call, until)}
        self._ask(until)
        found = []
        for name, shards in self._memories.items():
            now = time.monotonic()
            seen = tuple(asked.seen(number, now) for number, asked in sorted(shards.items()))
            limiter = _answer(limiters[name], until) if name in answered else None
            found.append(SeenMemory(name, name in answered, seen, limiter or {}))
        return found

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()

    def _list(self, name: str, call: Any, until: float) -> bool:
        """Take over which shards a memory has; a roster that was restarted lists none until it is told."""
        told = _answer(call, until)
        if told is None:
            return False
        shards, known = told[1], self._memories[name]
        for number, (handle, takes) in shards.items():
            asked = known.setdefault(number, _Asked(handle, takes, time.monotonic()))
            asked.takes = takes
        for number in set(known) - set(shards) if shards else ():
            del known[number]
        return True

    def _ask(self, until: float) -> None:
        all_asked = [(number, asked) for shards in self._memories.values() for number, asked in shards.items()]
        for _, asked in all_asked:
            if asked.call is None and not asked.is_gone:
                asked.call = asked.handle.process.remote()
        calls = [asked.call for _, asked in all_asked if asked.call is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=max(0.0, until - time.monotonic()))
        for number, asked in all_asked:
            if asked.call is not None:
                _hear(number, asked)


def _hear(number: int, asked: _Asked) -> None:
    """Take over an answer, if one came."""
    try:
        status = ShardStatus.of(number, ray.get(asked.call, timeout=0))
    except ray.exceptions.GetTimeoutError:
        return
    except ray.exceptions.ActorDiedError:
        asked.is_gone = True
        return
    except ray.exceptions.RayError:  # it was lost while it was asked; the next question waits until it is back
        asked.call = asked.handle.process.remote()
        return
    before = asked.status
    if before is not None and before.standing is not None and status.standing is not None:
        asked.restarts += status.standing.epoch != before.standing.epoch
    asked.call, asked.status, asked.heard_at, asked.was_down = None, status, time.monotonic(), False


def _answer(call: Any, until: float) -> Any:
    try:
        return ray.get(call, timeout=max(0.0, until - time.monotonic()))
    except ray.exceptions.RayError:
        return None

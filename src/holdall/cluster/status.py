"""What shards, learners and the limiter report: where they run, what they hold and take; as numbers, and as metrics.

In:  an actor, or a process's own counters.  Out: a few numbers; also of a shard that does not answer.
Invariant: reading what a process takes costs it a fiftieth of a core at most, however large it is and often asked.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import ray
from ray.util import metrics

from holdall.cluster.protocol import ShardCounters
from holdall.machine import LINUX, HeldMemory, held_bytes, memory_limits
from holdall.report import FieldReport

_SHARE_OF_A_CORE = 0.02


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard at one moment; all but its number is unknown while it does not answer."""

    number: int
    answers: bool
    node: str = ""
    pid: int = 0
    uss_bytes: int = 0  # memory that its process has to itself
    counters: ShardCounters | None = None
    pss_bytes: int = 0  # the same, and its share of what it has in common with others
    held_bytes: int = 0  # of transitions, as they are held
    plain_bytes: int = 0  # what the same transitions take as plain arrays of obs and next_obs
    capacity: int = 0  # most transitions
    is_durable: bool = False  # whether a journal is kept
    limit: str = ""  # what its memory meets first: its control group, or the machine
    limit_bytes: int = 0
    limit_free_bytes: int = 0

    @classmethod
    def of(cls, number: int, figures: dict[str, Any]) -> Self:
        """Read what a shard reported."""
        return cls(number, True, **figures | {"counters": ShardCounters.of(figures["counters"])})


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


_SHARD = {
    "transitions": "Transitions that can be drawn",
    "inserted": "Transitions ever accepted",
    "mass": "What draws are in proportion to",
    "backlog": "Bytes that wait to be made durable",
    "epoch": "Another one after every restart",
    "held_bytes": "Bytes of transitions, as they are held",
    "plain_bytes": "Bytes of the same transitions as plain arrays of obs and next_obs",
    "anonymous_bytes": "Memory of the shard's process that no file backs",
}


_LEARNER = {
    "coverage": "Share of the shards that answer",
    "losses": "How often a shard did not answer",
    "unacknowledged_bytes": "Bytes that this process sent and that no shard has acknowledged",
    "credit_wait_seconds": "Seconds that adding waited for shards, all in all",
}


_LIMITER = {
    "error": "Rows that samples are behind inserts",
    "lowest": "Lower bound of the error",
    "highest": "Upper bound of the error",
    "inserted": "Transitions that the shards took, as the limiter counts them",
    "sampled": "Rows that were granted to be drawn",
}


_BOUNDARIES = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]


_PAUSE_S = 1.0


class _Gauges:
    """Gauges of one kind."""

    def __init__(self, prefix: str, described: dict[str, str], tags: dict[str, str]) -> None:
        self._gauges: dict[str, Any] = {}
        for name, text in described.items():
            gauge = metrics.Gauge(f"holdall_{prefix}_{name}", description=text, tag_keys=tuple(tags))
            gauge.set_default_tags(tags)
            self._gauges[name] = gauge

    def set(self, **values: float) -> None:
        """Set gauges."""
        for name, value in values.items():
            self._gauges[name].set(float(value))


class _AskedFor(_Gauges):
    """Gauges that are set once a second at most, during calls that come anyway."""

    def __init__(self, prefix: str, described: dict[str, str], memory: str) -> None:
        super().__init__(prefix, described, {"memory": memory})
        self._told_at = -_PAUSE_S
        self._lock = threading.Lock()

    @property
    def is_due(self) -> bool:
        """Whether it is time to set them again; the caller does so then."""
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < _PAUSE_S:
                return False
            self._told_at = now
            return True


class LearnerMetrics(_AskedFor):
    """What one learner reports."""

    def __init__(self, memory: str) -> None:
        super().__init__("learner", _LEARNER, memory)


class LimiterMetrics(_AskedFor):
    """What the limiter of a memory reports."""

    def __init__(self, memory: str) -> None:
        super().__init__("limiter", _LIMITER, memory)


class ShardMetrics(_Gauges):
    """What one shard reports."""

    def __init__(self, memory: str, shard: int) -> None:
        tags = {"memory": memory, "shard": str(shard)}
        super().__init__("shard", _SHARD, tags)
        self._seconds: Any = metrics.Histogram(
            "holdall_shard_call_seconds",
            description="How long calls took",
            boundaries=_BOUNDARIES,
            tag_keys=("memory", "shard", "call"),
        )
        self._seconds.set_default_tags(tags)

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Time a call."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.observe(time.perf_counter() - began, tags={"call": call})

    def follow(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Tell what a shard says of its process, see status.py, every second from now on."""
        threading.Thread(target=self._follow, args=(figures,), name="holdall-metrics", daemon=True).start()

    def _follow(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        while True:
            found = figures()
            counters = ShardCounters.of(found["counters"])
            values = {name: getattr(counters, name) for name in _SHARD if hasattr(counters, name)}
            self.set(**values, **{name: found[name] for name in _SHARD if name in found})
            time.sleep(_PAUSE_S)


ActorState = Literal["up", "starting", "restarting", "gone"]


_STATES: dict[Any, ActorState] = {0: "starting", 1: "starting", 3: "restarting", 4: "gone"}
"""By the numbers of Ray's ActorTableData; 2 is an actor that runs."""


def actor_state(handle: Any) -> ActorState:
    """Return where the actor of a handle is."""
    return _STATES.get(getattr(handle, "_get_local_state", lambda: None)(), "up")


def added_up(reports: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[FieldReport, ...]:
    """Add up the fields of the same name; a shard that is still empty may not know of all."""
    fields = [[FieldReport(**field) for field in of_shard] for of_shard in reports]
    longest = max(fields, key=len, default=[])
    return tuple(_sum_of([field for one in fields for field in one if field.name == f.name]) for f in longest)


def _sum_of(fields: list[FieldReport]) -> FieldReport:
    return FieldReport(
        fields[0].name,
        sum(field.slice_bytes for field in fields),
        sum(field.log_bytes for field in fields),
        sum(field.row_bytes for field in fields),
        sum(field.plain_bytes for field in fields),
        fields[0].finding,
        sum(field.sealed_bytes for field in fields),
        sum(field.disk_bytes for field in fields),
    )

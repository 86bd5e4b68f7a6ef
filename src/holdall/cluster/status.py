"""The shards as other processes see them: where they run, what they hold and take, and which of them answer.

In:  an actor, or a process's own counters.  Out: a few numbers, also as metrics; losses as they are noticed.
Invariant: calls of one client reach a shard in the order in which they were made. A shard that does not answer is
asked again until it does; nothing else waits for it.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.util import metrics

from holdall.cluster.protocol import RestartedError, ShardCounters, ShardList, received
from holdall.shared import BlockPlace, SeenCount

if TYPE_CHECKING:
    from holdall.cluster.roster import MemoryTerms


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
    is_draining: bool = False  # whether it takes nothing more
    limit: str = ""  # what its memory meets first: its control group, or the machine
    limit_bytes: int = 0
    limit_free_bytes: int = 0


_DESCRIBED = {
    "shard": {
        "transitions": "Transitions that can be drawn",
        "inserted": "Transitions ever accepted",
        "mass": "What draws are in proportion to",
        "backlog": "Bytes that wait to be made durable",
        "epoch": "Another one after every restart",
        "held_bytes": "Bytes of transitions, as they are held",
        "plain_bytes": "Bytes of the same transitions as plain arrays of obs and next_obs",
        "anonymous_bytes": "Memory of the shard's process that no file backs",
    },
    "learner": {
        "coverage": "Share of the shards that answer",
        "losses": "How often a shard did not answer",
        "unacknowledged_bytes": "Bytes that this process sent and that no shard has acknowledged",
        "credit_wait_seconds": "Seconds that adding waited for shards, all in all",
    },
    "limiter": {
        "error": "Rows that samples are behind inserts",
        "lowest": "Lower bound of the error",
        "highest": "Upper bound of the error",
        "inserted": "Transitions that the shards took, as the limiter counts them",
        "sampled": "Rows that were granted to be drawn",
    },
}
_BOUNDARIES = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
_PAUSE_S = 1.0


class Gauges:
    """What a shard, a learner or the limiter reports; they are set once a second at most."""

    def __init__(self, kind: str, **tags: str) -> None:
        self._gauges: dict[str, Any] = {}
        for name, text in _DESCRIBED[kind].items():
            gauge = self._gauges[name] = metrics.Gauge(f"holdall_{kind}_{name}", text, tuple(tags))
            gauge.set_default_tags(tags)
        self._set_at = -_PAUSE_S
        self._lock = threading.Lock()

    def report(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Set them if it is time for that, during a call that comes anyway."""
        with self._lock:
            now = time.monotonic()
            if now - self._set_at < _PAUSE_S:
                return
            self._set_at = now
        self.set(figures())

    def set(self, values: Mapping[str, Any]) -> None:
        """Set gauges, of what is among the values."""
        for name in self._gauges.keys() & values.keys():
            self._gauges[name].set(float(values[name]))


class ShardMetrics(Gauges):
    """What one shard reports, and how long its calls take."""

    def __init__(self, memory: str, shard: int) -> None:
        tags = {"memory": memory, "shard": str(shard)}
        super().__init__("shard", **tags)
        name, text = "holdall_shard_call_seconds", "How long calls took"
        self._seconds: Any = metrics.Histogram(name, text, _BOUNDARIES, (*tags, "call"))
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
        """Report what a shard says of its process every second from now on."""
        threading.Thread(target=self._follow, args=(figures,), name="holdall-metrics", daemon=True).start()

    def _follow(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        while True:
            found = figures()
            self.set({**found["counters"]._asdict(), **found})
            time.sleep(_PAUSE_S)


ActorState = Literal["up", "starting", "restarting", "gone"]


_STATES: dict[Any, ActorState] = {0: "starting", 1: "starting", 3: "restarting", 4: "gone"}
"""By the numbers of Ray's ActorTableData; 2 is an actor that runs."""


def actor_state(handle: Any) -> ActorState:
    """Return where the actor of a handle is."""
    return _STATES.get(getattr(handle, "_get_local_state", lambda: None)(), "up")


_PROBE_AGAIN_S, _MOST_PROBES = 0.25, 16

LOSSES = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, RestartedError)
"""What a call fails with when its shard does not answer, or not in time."""


@dataclass(slots=True)
class _Member:
    """One shard, as far as is known."""

    handle: Any
    counters: ShardCounters | None = None
    lost: bool = False
    probes: list[Any] = field(default_factory=list)  # questions to a shard that was lost, or not heard of for a while
    probed_at: float = 0.0
    count: SeenCount | None = None  # of its changes, if it runs on this machine

    @property
    def is_away(self) -> bool:
        """Whether Ray restarts the shard, or gave it up, as far as this process knows.

        A call that is made meanwhile fails after two seconds, though the shard be back after one.
        """
        return actor_state(self.handle) in {"restarting", "gone"}

    @property
    def is_as_known(self) -> bool:
        """Whether the shard has not changed since it last said how it stands, as far as can be seen from here."""
        counters, count = self.counters, self.count
        return not self.lost and counters is not None and count is not None and count.now == counters.changes

    def ask(self) -> None:
        """Have the shard say how it stands, without waiting for it."""
        self.probed_at = time.monotonic()
        self.probes = [*self.probes, self.handle.counters.remote()][-_MOST_PROBES:]


class Cluster:
    """All shards of a memory."""

    def __init__(self, terms: MemoryTerms) -> None:
        self.patience_s, roster = terms.patience_s, terms.roster()
        self.ask_roster, self._list = partial(terms.ask, roster), ShardList(roster, terms.patience_s)
        self._members: dict[int, _Member] = {}  # in its place another is put when shards come or go
        self._lock, self._looking = threading.RLock(), threading.Lock()
        self.losses = 0

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        """Call a shard; return what to wait for. Calls of one handle are taken in the order in which they are made.

        The arguments go as one, already pickled: Ray takes far longer for each than this takes for all.
        """
        with self._lock:
            return self.handle(shard).ordered.remote(pickle.dumps((method, *arguments)))

    def handle(self, shard: int) -> Any:
        """Return the actor of a shard."""
        return self._members[shard].handle

    @property
    def numbers(self) -> list[int]:
        """All shards."""
        return sorted(self._members)

    @property
    def lost(self) -> list[int]:
        """Shards that do not answer now."""
        return sorted(number for number, member in self._members.items() if member.lost)

    @property
    def known(self) -> dict[int, ShardCounters]:
        """What the shards that answer said of themselves last."""
        members = self._members.items()
        return {number: m.counters for number, m in members if m.counters is not None and not m.lost}

    def masses(self) -> dict[int, float]:
        """What can be drawn from now, by shard."""
        self._look_around()
        with self._lock:
            for number, member in self._members.items():
                self._hear(number, member)
            return {
                number: 0.0 if member.counters is None else member.counters.mass
                for number, member in self._members.items()
                if not member.lost
            }

    def note(
        self, shard: int, counters: ShardCounters, count: BlockPlace | None = None, *, answers: bool = False
    ) -> None:
        """Keep what a shard said of itself; `answers`: one that was lost, too, is there again."""
        with self._lock:
            member = self._members.get(shard)
            if member is None:
                return
            known, member.lost = member.counters, member.lost and not answers
            if known is not None and (counters.epoch, counters.changes) < (known.epoch, known.changes):
                return  # calls may overtake each other
            member.counters = counters
            if known is not None and known.epoch != counters.epoch:  # it counts its changes elsewhere now
                member.count = None
            if count is not None and member.count is None:
                member.count = SeenCount(count)

    def changes(self) -> dict[int, tuple[int, int]] | None:
        """Say of every shard how often it has changed, if all are as they are known here; None if that is not seen."""
        with self._lock:
            members = self._members.items()
            if not all(member.is_as_known for _, member in members):
                return None
            return {n: (m.counters.epoch, m.counters.changes) for n, m in members if m.counters is not None}

    def ask_again(self, shards: list[int]) -> None:
        """Have shards say how they stand, without waiting for it; those that are not drawn from would not."""
        with self._lock:
            for number in shards:
                member = self._members.get(number)
                if member is not None and not member.probes:
                    member.ask()

    def refresh(self) -> dict[int, ShardCounters]:
        """Ask every shard how it stands, and wait; return the counters of those that answered."""
        self._look_around(now=True)
        found: dict[int, ShardCounters] = self.ask_all(self.numbers, "counters")
        for number, counters in found.items():
            self.note(number, counters, answers=True)
        return found

    def ask_all(self, shards: Iterable[int], method: str, *arguments: Any) -> dict[int, Any]:
        """Call some shards at the same time, and wait; return what those say that answer."""
        members = self._members
        calls = {n: getattr(members[n].handle, method).remote(*arguments) for n in shards if n in members}
        found = {}
        for number, call in calls.items():
            try:
                found[number] = received(call, self.patience_s)
            except LOSSES:
                self.lose(number)
        return found

    def lose(self, shard: int) -> None:
        """Mark a shard that did not answer; it is asked again until it does."""
        with self._lock:
            member = self._members.get(shard)
            if member is None:
                return
            self.losses += not member.lost
            member.lost = True

    def is_away(self, shard: int) -> bool:
        """Whether Ray restarts a shard, or gave it up, as far as this process knows."""
        member = self._members.get(shard)
        return member is not None and member.is_away

    def _hear(self, number: int, member: _Member) -> None:
        """Look whether a question was answered, and ask a lost shard again.

        Without waiting for the questions before: Ray fails one that it is asked while it restarts an actor, or gives it
        up, seconds later, though the actor be back by then.
        """
        for probe in ray.wait(member.probes, num_returns=len(member.probes), timeout=0)[0] if member.probes else ():
            member.probes.remove(probe)
            try:
                self.note(number, ray.get(probe), answers=True)
            except LOSSES:
                member.lost = True
            else:
                member.probes.clear()  # those that fail now were asked before
                break
        if member.lost and time.monotonic() - member.probed_at > _PROBE_AGAIN_S:
            member.ask()

    def _look_around(self, now: bool = False) -> None:
        """Ask the roster for shards that came or went, from time to time or at once."""
        if self._looking.acquire(blocking=now or not self._members):
            try:
                self._list.look(now=now)
            finally:
                self._looking.release()
        with self._lock:
            handles = self._list.handles
            if handles.keys() != self._members.keys():
                new = {number: _Member(handles[number]) for number in handles.keys() - self._members.keys()}
                for member in new.values():
                    member.ask()
                self._members = {number: m for number, m in self._members.items() if number in handles} | new

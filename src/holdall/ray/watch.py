"""Watching memories over shards: what is wrong with them, and what will be.

In:  what the shards report, in order of time.  Out: verdicts, each with its evidence and a remedy.
Invariant: what a transition takes is measured on the shard itself: by how its process grew while it filled, or, before
it has, by what it holds. What is left on a machine is shared by all the shards that are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from holdall.cluster.protocol import ShardCounters, ShardStatus, actor_state
from holdall.cluster.roster import NAMESPACE
from holdall.ray_access import join_cluster, require_head
from holdall.tools.watch.process_watcher import AlertThrottle, WatchPass
from holdall.tools.watch.reading import AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import Severity, WatchVerdict, filling_verdicts
from holdall.tools.watch.watcher_process import record_header
from holdall.units import format_bytes, format_seconds

_SILENT_S = 5.0
"""A shard that has not answered for so long is reported."""
_WAITS_BYTES = 8 * 2**20
_GROWN_ROWS = 1_000
"""Transitions between two looks at a process, for its growth to say what one takes."""


def answering(memory: SeenMemory) -> Iterator[tuple[ShardStatus, ShardCounters]]:
    """Yield what the shards of a memory said last that answer."""
    for shard in memory.shards:
        if shard.answers and shard.status is not None and shard.status.counters is not None:
            yield shard.status, shard.status.counters


@dataclass(slots=True)
class ShardForecast:
    """Remembers how shards began, and judges how they go on."""

    # How a shard stood when this life of it was first seen, and when that was.
    _begun: dict[tuple[str, int], tuple[ShardStatus, ShardCounters, float]] = field(default_factory=dict)

    def verdicts(self, memories: Sequence[SeenMemory], moment: float) -> list[WatchVerdict]:
        """Judge, the gravest first."""
        found: list[WatchVerdict] = []
        for memory in memories:
            for status, counters in answering(memory):
                before = self._begun.get((memory.name, status.number))
                if before is None or before[1].epoch != counters.epoch:
                    self._begun[memory.name, status.number] = status, counters, moment
            found += [*_away(memory), *_restarted(memory), *_waiting(memory)]
        found += self._running_out(memories, moment)
        return sorted(found, key=lambda verdict: ("error", "warning", "info").index(verdict.severity))

    def rate(self, memory: SeenMemory, moment: float) -> float:
        """Return how many transitions a second a memory is given, since its shards were first seen."""
        return sum(self._rate(memory.name, *shard, moment) for shard in answering(memory))

    def _rate(self, name: str, status: ShardStatus, counters: ShardCounters, moment: float) -> float:
        _, begun, since = self._begun[name, status.number]
        return (counters.inserted - begun.inserted) / (moment - since) if moment > since else 0.0

    def _running_out(self, memories: Sequence[SeenMemory], moment: float) -> list[WatchVerdict]:
        """Compare what shards will still take with what is left where they are."""
        by_limit: dict[tuple[str, str], list[tuple[str, ShardStatus, ShardCounters]]] = {}
        for memory in memories:
            for status, counters in answering(memory):
                by_limit.setdefault((status.node, status.limit), []).append((memory.name, status, counters))
        found = []
        for (node, limit), shards in by_limit.items():
            to_come = sum(self._to_come(*shard) for shard in shards)
            left = min(status.limit_free_bytes for _, status, _ in shards)
            if to_come <= left:
                continue
            capacity = sum(status.capacity for _, status, _ in shards)
            full = sum(counters.transitions for _, _, counters in shards) / max(1, capacity)
            reached = full + (1.0 - full) * left / to_come
            rate = sum(self._rate(*shard, moment) for shard in shards)
            seconds = (reached - full) * capacity / rate if rate > 0 else None
            when = "" if seconds is None else f", in {format_seconds(round(seconds))}"
            numbers = _named([status.number for _, status, _ in shards])
            text = (
                f"{numbers} on {node} will take {format_bytes(to_come)} more until full, and {format_bytes(left)} are "
                f"left ({limit}): used up when {100 * reached:.0f} % full{when}"
            )
            remedy = "a smaller capacity, fewer shards on that machine, or more machines and memory.add_shard()"
            evidence = {
                "of": node, "limit": limit, "left": left, "to_come": to_come, "fill": full, "fill_then": reached,
                "seconds": seconds,
            }  # fmt: skip
            found.append(WatchVerdict("running out", "error", text, remedy, evidence))
        return found

    def _to_come(self, name: str, status: ShardStatus, counters: ShardCounters) -> float:
        """Return the bytes that a shard will still take until it is full."""
        if counters.transitions == 0:
            return 0.0
        first, begun, _ = self._begun[name, status.number]
        each, grown = status.held_bytes / counters.transitions, counters.transitions - begun.transitions
        if grown >= _GROWN_ROWS:
            each = (status.uss_bytes - first.uss_bytes) / grown
        return max(0.0, each) * max(0, status.capacity - counters.transitions)


_AWAY: dict[str, tuple[Severity, str, str]] = {
    "lost": ("error", "ended for good", "make the memory again; with a journal, on the same url"),
    "silent": (
        "error", "no answer",
        "its machine hangs or is cut off; Ray gives it up and restarts it, see docs/scale.md",
    ),
    "restarts": ("warning", "being restarted", "Ray restarts it where there is room; see `ray status`"),
    "starts": ("warning", "not up yet", "Ray starts it where there is room for it; see `ray status`"),
}  # fmt: skip
"""By the state of shards: how bad it is, in words, and what to do."""


def _away(memory: SeenMemory) -> Iterator[WatchVerdict]:
    if not memory.roster_answers:
        text = f"the roster of {memory.name} does not answer; shards go on, new writers and shards wait for it"
        yield WatchVerdict("roster", "warning", text, "Ray restarts it; see `ray status`", {"of": memory.name})
    for state, (severity, said, remedy) in _AWAY.items():
        least = 0.0 if state == "lost" else _SILENT_S
        away = [each for each in memory.shards if each.state == state and each.silent_s >= least]
        if away:
            numbers, longest = [each.number for each in away], max(each.silent_s for each in away)
            text = f"{_named(numbers)} of {memory.name}: {said}, for {format_seconds(round(longest))}"
            evidence = {"of": memory.name, "shards": numbers, "seconds": longest}
            yield WatchVerdict(state, severity, text, remedy, evidence)


def _restarted(memory: SeenMemory) -> Iterator[WatchVerdict]:
    again = [(shard, shard.status) for shard in memory.shards if shard.restarts and shard.status is not None]
    if again:
        kept = all(status.is_durable for _, status in again)
        what = "they went on with their journals" if kept else "what they held is lost"
        numbers, count = [shard.number for shard, _ in again], sum(shard.restarts for shard, _ in again)
        text = f"{_named(numbers)} of {memory.name}: {count} restarts since the watch began; {what}"
        remedy = "look for the machine's out-of-memory killer: `dmesg`, or the control group's memory.events"
        evidence = {"of": memory.name, "shards": numbers}
        yield WatchVerdict("restarted", "info" if kept else "warning", text, remedy, evidence)


def _waiting(memory: SeenMemory) -> Iterator[WatchVerdict]:
    behind = {s.number: counters.backlog for s, counters in answering(memory) if counters.backlog >= _WAITS_BYTES}
    if behind:
        slow, total = list(behind), sum(behind.values())
        text = f"{_named(slow)} of {memory.name}: {format_bytes(total)} wait to be made durable, and writers wait"
        evidence = {"of": memory.name, "shards": slow, "waiting": total}
        remedy = "a faster disk or store for the journal, or more shards"
        yield WatchVerdict("slow journal", "warning", text, remedy, evidence)


def _named(numbers: Sequence[int]) -> str:
    return f"shard {numbers[0]}" if len(numbers) == 1 else f"shards {', '.join(map(str, numbers))}"


@dataclass(frozen=True, slots=True)
class ClusterPass(WatchPass):
    """What a watch over a cluster knows now."""

    address: str = ""
    nodes: int = 0
    memories: tuple[SeenMemory, ...] = ()
    rates: tuple[float, ...] = ()  # transitions a second that each of them is given

    def lines(self) -> list[dict[str, Any]]:
        """Return what is new, as lines of a record: beside those of every pass, one for each shard."""
        shards = [
            {"kind": "shard", "time": self.reading.time, "memory": memory.name, **shard_words(shard)}
            for memory in self.memories
            for shard in memory.shards
        ]
        first, *rest = WatchPass.lines(self)
        return [first, *shards, *rest]


class ClusterWatch:
    """Looks at all memories of a cluster, again and again, remembers, and judges."""

    def __init__(self, monitor: ClusterMonitor, interval_s: float) -> None:
        self.monitor = monitor
        self.history = ReadingHistory()
        self._forecast = ShardForecast()
        self._news = AlertThrottle()
        self._interval_s = interval_s
        self._peak = 0
        self._names: set[str] | None = None

    def take(self) -> ClusterPass:
        """Look and judge."""
        memories = self.monitor.take()
        moment = time.time()
        reading = self._reading(memories, moment)
        self.history.add(reading)
        verdicts = [*self._forecast.verdicts(memories, moment), *filling_verdicts(self.history)]
        names = {memory.name for memory in memories}
        events = [] if self._names is None else [
            *((moment, f"{name} was made") for name in sorted(names - self._names)),
            *((moment, f"{name} was closed") for name in sorted(self._names - names)),
        ]  # fmt: skip
        self._names = names
        return ClusterPass(
            reading,
            verdicts,
            self._news.of(verdicts, moment),
            events=events,
            address=self.monitor.address,
            nodes=self.monitor.nodes,
            memories=tuple(memories),
            rates=tuple(self._forecast.rate(memory, moment) for memory in memories),
        )

    def pause(self) -> None:
        """Wait until the next pass is due."""
        time.sleep(self._interval_s)

    def header(self) -> dict[str, Any]:
        """Return the first line of a record; a cluster has as many limits as machines, so it names none."""
        limits = dict.fromkeys(("memory", "cgroup", "vram", "disk"))
        return record_header(os.getpid(), ["ray", self.monitor.address], self._interval_s) | {"limits": limits}

    def _reading(self, memories: list[SeenMemory], moment: float) -> MemoryReading:
        parts: list[AttributedPart] = []
        headroom: dict[str, int] = {}
        for memory in memories:
            for status, counters in answering(memory):
                fill = counters.transitions / max(1, status.capacity)
                name = f"{memory.name}.{status.number}"
                parts.append(AttributedPart("buffers", name, status.pss_bytes, status.pss_bytes, round(fill, 4)))
                place = f"{status.node}: {status.limit}"
                headroom[place] = min(status.limit_free_bytes, headroom.get(place, status.limit_free_bytes))
        pss = sum(part.resident for part in parts)
        self._peak = max(self._peak, pss)
        return MemoryReading(moment, pss, self._peak, tuple(parts), headroom=headroom or None)


def shard_words(shard: SeenShard) -> dict[str, Any]:
    """Return plain numbers and text, as they are recorded."""
    words: dict[str, Any] = {
        "shard": shard.number, "state": shard.state, "silent_s": round(shard.silent_s, 1), "restarts": shard.restarts,
    }  # fmt: skip
    if shard.status is not None:
        status = shard.status._asdict()
        for name in ("counters", "is_draining"):  # which the state says
            status.pop(name)
        counters = {} if shard.status.counters is None else shard.status.counters._asdict()
        words |= {name: value for name, value in (status | counters).items() if name not in {"number", "answers"}}
    return words


State = Literal["answers", "drains", "starts", "restarts", "silent", "lost"]


@dataclass(frozen=True, slots=True)
class SeenShard:
    """One shard, as far as it is known."""

    number: int
    state: State
    silent_s: float = 0.0  # since its last answer, or since it was asked first
    restarts: int = 0  # since the monitor began
    status: ShardStatus | None = None  # what it said last

    @property
    def answers(self) -> bool:
        """Whether it answers now."""
        return self.state in {"answers", "drains"}


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
            return "drains" if self.status is not None and self.status.is_draining else "answers"
        where = actor_state(self.handle)
        if where == "gone":
            return "lost"
        self.was_down |= where != "up"
        if not self.was_down:
            return "silent"
        return "starts" if self.status is None else "restarts"


class ClusterMonitor:
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
        """Take over which shards a memory has."""
        found = _answer(call, until)
        if found is None:
            return False
        shards, known = found[1], self._memories[name]
        for number, handle in shards.items():
            known.setdefault(number, _Asked(handle, time.monotonic()))
        for number in set(known) - set(shards):
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
        status = ShardStatus(number, True, **ray.get(asked.call, timeout=0))
    except ray.exceptions.GetTimeoutError:
        return
    except ray.exceptions.ActorDiedError:
        asked.is_gone = True
        return
    except ray.exceptions.RayError:  # it was lost while it was asked; the next question waits until it is back
        asked.call = asked.handle.process.remote()
        return
    before = asked.status
    if before is not None and before.counters is not None and status.counters is not None:
        asked.restarts += status.counters.epoch != before.counters.epoch
    asked.call, asked.status, asked.heard_at, asked.was_down = None, status, time.monotonic(), False


def _answer(call: Any, until: float) -> Any:
    try:
        return ray.get(call, timeout=max(0.0, until - time.monotonic()))
    except ray.exceptions.RayError:
        return None

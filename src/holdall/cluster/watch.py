"""The outlook of a memory over shards: what is wrong with it, and what will be.

In:  what surveys saw, in order of time.  Out: verdicts, each with its evidence and a remedy.
Invariant: what a transition takes is measured on the shard itself: by how its process grew while it filled, or, before
it has, by what it holds. What is left on a machine is shared by all the shards that are there.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdall.cluster.status import SeenMemory, SeenShard, ShardStatus, Survey
from holdall.tools.watch.one_pass import AlertThrottle, WatchPass
from holdall.tools.watch.reading import AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import Severity, WatchVerdict, filling_verdicts, format_time_span
from holdall.tools.watch.watcher_process import RECORD_FORMAT
from holdall.units import format_bytes

_SILENT_S = 5.0
"""A shard that has not answered for so long is told of."""
_WAITS_BYTES = 8 * 2**20
_GROWN_ROWS = 1_000
"""Transitions between two looks at a process, for its growth to say what one takes."""


@dataclass(frozen=True, slots=True)
class _Grown:
    """Where a shard stood when this life of it was first seen."""

    epoch: int
    inserted: int
    transitions: int
    uss_bytes: int
    time: float


@dataclass(slots=True)
class Outlook:
    """Remembers how shards began, and judges how they go on."""

    _begun: dict[tuple[str, int], _Grown] = field(default_factory=dict)

    def verdicts(self, memories: Sequence[SeenMemory], moment: float) -> list[WatchVerdict]:
        """Judge, the gravest first."""
        found: list[WatchVerdict] = []
        for memory in memories:
            self._remember(memory, moment)
            found += [*_away(memory), *_restarted(memory), *_waiting(memory)]
        found += self._running_out(memories, moment)
        return sorted(found, key=lambda verdict: ("error", "warning", "info").index(verdict.severity))

    def rate(self, memory: SeenMemory, moment: float) -> float:
        """Return how many transitions a second a memory is given, since its shards were first seen."""
        seen = [shard.status for shard in memory.shards if shard.status is not None and _answers(shard)]
        return sum(self._rate(memory.name, status, moment) for status in seen)

    def _rate(self, name: str, status: ShardStatus, moment: float) -> float:
        begun = self._begun[name, status.number]
        inserted = begun.inserted if status.standing is None else status.standing.inserted
        return (inserted - begun.inserted) / (moment - begun.time) if moment > begun.time else 0.0

    def _remember(self, memory: SeenMemory, moment: float) -> None:
        for shard in memory.shards:
            status = shard.status
            if status is None or status.standing is None:
                continue
            before = self._begun.get((memory.name, shard.number))
            standing = status.standing
            if before is None or before.epoch != standing.epoch:
                self._begun[memory.name, shard.number] = _Grown(
                    standing.epoch, standing.inserted, standing.transitions, status.uss_bytes, moment
                )

    def _running_out(self, memories: Sequence[SeenMemory], moment: float) -> list[WatchVerdict]:
        """Compare what shards will still take with what is left where they are."""
        by_limit: dict[tuple[str, str], list[tuple[str, ShardStatus]]] = {}
        for memory in memories:
            for shard in memory.shards:
                if shard.status is not None and _answers(shard):
                    by_limit.setdefault((shard.status.node, shard.status.limit), []).append((memory.name, shard.status))
        found = []
        for (node, limit), shards in by_limit.items():
            to_come = sum(self._to_come(name, status) for name, status in shards)
            left = min(status.limit_free_bytes for _, status in shards)
            if to_come <= left:
                continue
            full = _fill([status for _, status in shards])
            reached = full + (1.0 - full) * left / to_come
            capacity = sum(status.capacity for _, status in shards)
            rate = sum(self._rate(name, status, moment) for name, status in shards)
            seconds = (reached - full) * capacity / rate if rate > 0 else None
            when = "" if seconds is None else f", in {format_time_span(seconds)}"
            numbers = _named([status.number for _, status in shards])
            found.append(
                WatchVerdict(
                    name="running out",
                    severity="error",
                    text=(
                        f"{numbers} on {node} will take {format_bytes(to_come)} more until full, and "
                        f"{format_bytes(left)} are left ({limit}): used up when {100 * reached:.0f} % full{when}"
                    ),
                    remedy="a smaller capacity, fewer shards on that machine, or more machines and memory.add_shard()",
                    evidence={
                        "of": node, "limit": limit, "left": left, "to_come": to_come, "fill": full,
                        "fill_then": reached, "seconds": seconds,
                    },
                )
            )  # fmt: skip
        return found

    def _to_come(self, name: str, status: ShardStatus) -> float:
        """Return the bytes that a shard will still take until it is full."""
        standing = status.standing
        if standing is None or standing.transitions == 0:
            return 0.0
        begun = self._begun[name, status.number]
        each = status.held_bytes / standing.transitions
        if standing.transitions - begun.transitions >= _GROWN_ROWS:
            each = (status.uss_bytes - begun.uss_bytes) / (standing.transitions - begun.transitions)
        return max(0.0, each) * max(0, status.capacity - standing.transitions)


def _away(memory: SeenMemory) -> list[WatchVerdict]:
    found = []
    if not memory.roster_answers:
        text = f"the roster of {memory.name} does not answer; shards go on, new writers and shards wait for it"
        found.append(WatchVerdict("roster", "warning", text, "Ray restarts it; see `ray status`", {"of": memory.name}))
    remedies: dict[str, tuple[Severity, str]] = {
        "lost": ("error", "make the memory again; with a journal, on the same url"),
        "silent": ("error", "its machine hangs or is cut off; Ray gives it up and restarts it, see docs/scale.md"),
        "restarts": ("warning", "Ray restarts it where there is room; see `ray status`"),
        "starts": ("warning", "Ray starts it where there is room for it; see `ray status`"),
    }
    for state, (severity, remedy) in remedies.items():
        away = [
            each for each in memory.shards if each.state == state and (state == "lost" or each.silent_s >= _SILENT_S)
        ]
        if not away:
            continue
        longest = max(each.silent_s for each in away)
        said = {"lost": "ended for good", "silent": "no answer", "restarts": "being restarted", "starts": "not up yet"}
        text = (
            f"{_named([each.number for each in away])} of {memory.name}: {said[state]}, for {format_time_span(longest)}"
        )
        evidence = {"of": memory.name, "shards": [each.number for each in away], "seconds": longest}
        found.append(WatchVerdict(state, severity, text, remedy, evidence))
    return found


def _restarted(memory: SeenMemory) -> list[WatchVerdict]:
    again = [shard for shard in memory.shards if shard.restarts and shard.status is not None]
    if not again:
        return []
    kept = all(shard.status is not None and shard.status.is_durable for shard in again)
    what = "they went on with their journals" if kept else "what they held is lost"
    return [
        WatchVerdict(
            name="restarted",
            severity="info" if kept else "warning",
            text=f"{_named([shard.number for shard in again])} of {memory.name}: "
            f"{sum(shard.restarts for shard in again)} restarts since the watch began; {what}",
            remedy="look for the machine's out-of-memory killer: `dmesg`, or the control group's memory.events",
            evidence={"of": memory.name, "shards": [shard.number for shard in again]},
        )
    ]


def _waiting(memory: SeenMemory) -> list[WatchVerdict]:
    behind = {
        shard.number: shard.status.standing.backlog
        for shard in memory.shards
        if shard.status is not None and shard.status.standing is not None and _answers(shard)
    }
    slow = [number for number, nbytes in behind.items() if nbytes >= _WAITS_BYTES]
    if not slow:
        return []
    total = sum(behind[number] for number in slow)
    return [
        WatchVerdict(
            name="slow journal",
            severity="warning",
            text=f"{_named(slow)} of {memory.name}: {format_bytes(total)} wait to be made durable, and writers wait",
            remedy="a faster disk or store for the journal, or more shards",
            evidence={"of": memory.name, "shards": slow, "waiting": total},
        )
    ]


def _answers(shard: SeenShard) -> bool:
    return shard.state in {"answers", "drains"}


def _fill(shards: Sequence[ShardStatus]) -> float:
    held = sum(0 if status.standing is None else status.standing.transitions for status in shards)
    return held / max(1, sum(status.capacity for status in shards))


def _named(numbers: Sequence[int]) -> str:
    return f"shard {numbers[0]}" if len(numbers) == 1 else f"shards {', '.join(map(str, numbers))}"


@dataclass(frozen=True, slots=True)
class ClusterTurn(WatchPass):
    """What a watch over a cluster knows now."""

    address: str = ""
    nodes: int = 0
    memories: tuple[SeenMemory, ...] = ()
    rates: tuple[float, ...] = ()  # transitions a second that each of them is given

    def lines(self) -> list[dict[str, Any]]:
        """Return what is new, as lines of a record: beside those of every turn, one for each shard."""
        shards = [
            {"kind": "shard", "time": self.reading.time, "memory": memory.name, **shard_words(shard)}
            for memory in self.memories
            for shard in memory.shards
        ]
        first, *rest = WatchPass.lines(self)
        return [first, *shards, *rest]


class ClusterTurns:
    """Takes turns: looks at all memories of a cluster, remembers, and judges."""

    def __init__(self, survey: Survey, interval_s: float) -> None:
        self.survey = survey
        self.history = ReadingHistory()
        self._outlook = Outlook()
        self._news = AlertThrottle()
        self._interval_s = interval_s
        self._peak = 0
        self._names: set[str] | None = None

    def take(self) -> ClusterTurn:
        """Look and judge."""
        memories = self.survey.take()
        moment = time.time()
        reading = self._reading(memories, moment)
        self.history.add(reading)
        verdicts = [*self._outlook.verdicts(memories, moment), *filling_verdicts(self.history)]
        names = {memory.name for memory in memories}
        events = [] if self._names is None else [
            *((moment, f"{name} was made") for name in sorted(names - self._names)),
            *((moment, f"{name} was closed") for name in sorted(self._names - names)),
        ]  # fmt: skip
        self._names = names
        return ClusterTurn(
            reading,
            verdicts,
            self._news.of(verdicts, moment),
            events=events,
            address=self.survey.address,
            nodes=self.survey.nodes,
            memories=tuple(memories),
            rates=tuple(self._outlook.rate(memory, moment) for memory in memories),
        )

    def pause(self) -> None:
        """Wait until the next turn is due."""
        time.sleep(self._interval_s)

    def header(self) -> dict[str, Any]:
        """Return the first line of a record; a cluster has as many limits as machines, so it names none."""
        return {
            "kind": "header",
            "format": RECORD_FORMAT,
            "pid": os.getpid(),
            "command": ["ray", self.survey.address],
            "host": socket.gethostname(),
            "started": time.time(),
            "interval": self._interval_s,
            "limits": dict.fromkeys(("memory", "cgroup", "vram", "disk")),
            "system": platform.system(),
        }

    def _reading(self, memories: list[SeenMemory], moment: float) -> MemoryReading:
        parts: list[AttributedPart] = []
        headroom: dict[str, int] = {}
        for memory in memories:
            for shard in memory.shards:
                status = shard.status
                if status is None or status.standing is None or shard.state not in {"answers", "drains"}:
                    continue
                fill = status.standing.transitions / max(1, status.capacity)
                name = f"{memory.name}.{shard.number}"
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
        told = asdict(shard.status)
        standing = told.pop("standing") or {}
        words |= {name: value for name, value in (told | standing).items() if name not in {"number", "answers"}}
    return words

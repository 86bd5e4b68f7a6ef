"""Turns of a watch over a cluster: a survey, as a reading that can be recorded, served and judged like a process's.

In:  surveys.  Out: turns; the parts of their readings are shards, and add up to what all of these take.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from holdall.ray.outlook import Outlook
from holdall.ray.survey import SeenMemory, SeenShard, Survey
from holdall.watch.history import History
from holdall.watch.news import News
from holdall.watch.reading import Part, Reading
from holdall.watch.record import FORMAT
from holdall.watch.turn import Turn
from holdall.watch.verdicts.filling import filling


@dataclass(frozen=True, slots=True)
class ClusterTurn(Turn):
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
        first, *rest = Turn.lines(self)
        return [first, *shards, *rest]


class ClusterTurns:
    """Takes turns: looks at all memories of a cluster, remembers, and judges."""

    def __init__(self, survey: Survey, interval_s: float) -> None:
        self.survey = survey
        self.history = History()
        self._outlook = Outlook()
        self._news = News()
        self._interval_s = interval_s
        self._peak = 0
        self._names: set[str] | None = None

    def take(self) -> ClusterTurn:
        """Look and judge."""
        memories = self.survey.take()
        moment = time.time()
        reading = self._reading(memories, moment)
        self.history.add(reading)
        verdicts = [*self._outlook.verdicts(memories, moment), *filling(self.history)]
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
            "format": FORMAT,
            "pid": os.getpid(),
            "command": ["ray", self.survey.address],
            "host": socket.gethostname(),
            "started": time.time(),
            "interval": self._interval_s,
            "limits": dict.fromkeys(("memory", "cgroup", "vram", "disk")),
            "system": platform.system(),
        }

    def _reading(self, memories: list[SeenMemory], moment: float) -> Reading:
        parts: list[Part] = []
        headroom: dict[str, int] = {}
        for memory in memories:
            for shard in memory.shards:
                status = shard.status
                if status is None or status.standing is None or shard.state not in {"answers", "drains"}:
                    continue
                fill = status.standing.transitions / max(1, status.capacity)
                name = f"{memory.name}.{shard.number}"
                parts.append(Part("buffers", name, status.pss_bytes, status.pss_bytes, round(fill, 4)))
                place = f"{status.node}: {status.limit}"
                headroom[place] = min(status.limit_free_bytes, headroom.get(place, status.limit_free_bytes))
        pss = sum(part.resident for part in parts)
        self._peak = max(self._peak, pss)
        return Reading(moment, pss, self._peak, tuple(parts), headroom=headroom or None)


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

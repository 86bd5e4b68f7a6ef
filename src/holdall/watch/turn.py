"""One turn of a watch: a reading, what it means, and what is new since the turn before."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from holdall.watch.history import History
from holdall.watch.news import News
from holdall.watch.reading import Reading
from holdall.watch.sidecar import PhasePeak
from holdall.watch.verdicts import Verdict, verdicts_on
from holdall.watch.watcher import Watcher

_JUDGED_EVERY_S = 5.0
_SHARE_OF_A_CORE = 0.02
_LISTENS_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Turn:
    """What a watch knows now."""

    reading: Reading
    verdicts: list[Verdict]
    news: list[Verdict]  # verdicts that were not told within the last minute
    phases: dict[str, PhasePeak] = field(default_factory=dict)  # those that went on
    events: list[tuple[float, str]] = field(default_factory=list)

    def lines(self) -> list[dict[str, Any]]:
        """Return what is new, as lines of a record."""
        return [
            self.reading.as_words(),
            *({"kind": "phase", "name": name, **asdict(phase)} for name, phase in self.phases.items()),
            *(verdict.as_words(self.reading.time) for verdict in self.news),
            *({"kind": "event", "time": when, "text": text} for when, text in self.events),
        ]


class Turns:
    """Takes turns: reads a process tree, remembers, and judges, in at most a fiftieth of a core's time."""

    def __init__(
        self, pid: int, interval_s: float, limit_bytes: int | None = None, without: Collection[int] = ()
    ) -> None:
        self.watcher = Watcher(pid, limit_bytes, without)
        self.history = History()
        self._interval_s = interval_s
        self._verdicts: list[Verdict] = []
        self._judged = 0.0
        self._news = News()
        self._phases: dict[str, PhasePeak] = {}
        self._last_event = 0.0
        self.pause_s = interval_s

    def take(self) -> Turn:
        """Read and judge."""
        begun = time.process_time()
        self._listen()
        reading = self.watcher.read()
        self.history.add(reading)
        news: list[Verdict] = []
        if reading.time - self._judged >= _JUDGED_EVERY_S or len(self.history.readings) == 1:
            self._judged = reading.time
            self._verdicts = verdicts_on(self.history)
            news = self._news.of(self._verdicts, reading.time)
        told = self.watcher.newest_told
        phases = {} if told is None else dict(told.phases)
        changed = {name: phase for name, phase in phases.items() if self._phases.get(name) != phase}
        self._phases = phases
        events = [] if told is None else [event for event in told.events if event[0] > self._last_event]
        self._last_event = max([self._last_event, *(when for when, _ in events)])
        self.pause_s = max(self._interval_s, (time.process_time() - begun) / _SHARE_OF_A_CORE)
        return Turn(reading, self._verdicts, news, changed, events)

    def pause(self, ended_within: Callable[[float], bool] | None = None) -> bool:
        """Wait until the next turn is due, and listen meanwhile; say whether the process ended.

        Args:
            ended_within: Waits so many seconds at most, for a process that this one started.
        """
        end = time.monotonic() + self.pause_s
        while (left := end - time.monotonic()) > 0:
            if ended_within is None:
                time.sleep(min(left, _LISTENS_EVERY_S))
            elif ended_within(min(left, _LISTENS_EVERY_S)):
                return True
            self._listen()
        return False

    def _listen(self) -> None:
        live = self.watcher.listen()
        if live is not None:
            self.history.hear(live)

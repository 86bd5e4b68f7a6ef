"""One pass of a watch: a reading, its verdicts, and what is new since the pass before.

In:  a process id and an interval.  Out: passes, in at most 2 % of one core's time; the latest of them in a file that
the watched process can read within microseconds. A verdict is repeated after a minute at the earliest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from holdall.tools.watch.agent_files import PhasePeak, own_folder, read_small_file, replace_file
from holdall.tools.watch.process_watcher import ProcessWatcher
from holdall.tools.watch.reading import AttributedPart, GpuMemory, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import WatchVerdict, verdicts_for

_VERDICTS_EVERY_S = 5.0
_SHARE_OF_A_CORE = 0.02
_POLL_AGENT_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class WatchPass:
    """What a watch knows now."""

    reading: MemoryReading
    verdicts: list[WatchVerdict]
    news: list[WatchVerdict]  # verdicts that were not told within the last minute
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


class WatchLoop:
    """Takes turns: reads a process tree, remembers, and judges, in at most a fiftieth of a core's time."""

    def __init__(
        self, pid: int, interval_s: float, limit_bytes: int | None = None, without: Collection[int] = ()
    ) -> None:
        self.watcher = ProcessWatcher(pid, limit_bytes, without)
        self.history = ReadingHistory()
        self._interval_s = interval_s
        self._verdicts: list[WatchVerdict] = []
        self._judged = 0.0
        self._news = AlertThrottle()
        self._phases: dict[str, PhasePeak] = {}
        self._last_event = 0.0
        self.pause_s = interval_s

    def take(self) -> WatchPass:
        """Read and judge."""
        begun = time.process_time()
        self._listen()
        reading = self.watcher.read()
        self.history.add(reading)
        news: list[WatchVerdict] = []
        if reading.time - self._judged >= _VERDICTS_EVERY_S or len(self.history.readings) == 1:
            self._judged = reading.time
            self._verdicts = verdicts_for(self.history)
            news = self._news.of(self._verdicts, reading.time)
        told = self.watcher.newest_told
        phases = {} if told is None else dict(told.phases)
        changed = {name: phase for name, phase in phases.items() if self._phases.get(name) != phase}
        self._phases = phases
        events = [] if told is None else [event for event in told.events if event[0] > self._last_event]
        self._last_event = max([self._last_event, *(when for when, _ in events)])
        self.pause_s = max(self._interval_s, (time.process_time() - begun) / _SHARE_OF_A_CORE)
        return WatchPass(reading, self._verdicts, news, changed, events)

    def pause(self, ended_within: Callable[[float], bool] | None = None) -> bool:
        """Wait until the next turn is due, and listen meanwhile; say whether the process ended.

        Args:
            ended_within: Waits so many seconds at most, for a process that this one started.
        """
        end = time.monotonic() + self.pause_s
        while (left := end - time.monotonic()) > 0:
            if ended_within is None:
                time.sleep(min(left, _POLL_AGENT_EVERY_S))
            elif ended_within(min(left, _POLL_AGENT_EVERY_S)):
                return True
            self._listen()
        return False

    def _listen(self) -> None:
        live = self.watcher.listen()
        if live is not None:
            self.history.hear(live)


_REPEAT_AFTER_S = 60.0


class AlertThrottle:
    """Remembers what was told."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def of(self, verdicts: Iterable[WatchVerdict], moment: float) -> list[WatchVerdict]:
        """Return what is to be told now."""
        return [one for one in verdicts if self._is_news(one, moment)]

    def _is_news(self, verdict: WatchVerdict, moment: float) -> bool:
        key = f"{verdict.name} {verdict.evidence.get('buffer', verdict.evidence.get('of', ''))}"
        if moment - self._told.get(key, 0.0) < _REPEAT_AFTER_S:
            return False
        self._told[key] = moment
        return True


def publish_latest(pid: int, turn: WatchPass) -> None:
    """Put a turn where the watched process looks."""
    words = {"reading": turn.reading.as_words(), "verdicts": [one.as_words(turn.reading.time) for one in turn.verdicts]}
    replace_file(own_folder() / f"reading-{pid}.json", json.dumps(words, separators=(",", ":")).encode())


def latest_reading(pid: int) -> tuple[MemoryReading, list[WatchVerdict]] | None:
    """Return the newest turn; None if there is none yet."""
    content = read_small_file(own_folder() / f"reading-{pid}.json")
    if content is None:
        return None
    try:
        words = json.loads(content)
        return _parse_reading(words["reading"]), [_parse_verdict(one) for one in words["verdicts"]]
    except (ValueError, KeyError, TypeError):
        return None


def _parse_reading(words: dict[str, Any]) -> MemoryReading:
    words = {key: value for key, value in words.items() if key not in {"kind", "attributed"}}
    words["parts"] = tuple(AttributedPart(**part) for part in words["parts"])
    words["gpu"] = None if words["gpu"] is None else GpuMemory(**words["gpu"])
    return MemoryReading(**words)


def _parse_verdict(words: dict[str, Any]) -> WatchVerdict:
    return WatchVerdict(**{key: value for key, value in words.items() if key not in {"kind", "time"}})

"""The newest turn of a watcher, for the process that it watches.

In:  turns, in the watcher.  Out: the newest of them, in the watched process; microseconds to look at.
"""

from __future__ import annotations

import json
from typing import Any

from holdall.watch.places import own_folder, read_small, replace
from holdall.watch.reading import Gpu, Part, Reading
from holdall.watch.turn import Turn
from holdall.watch.verdicts import Verdict


def publish(pid: int, turn: Turn) -> None:
    """Put a turn where the watched process looks."""
    words = {"reading": turn.reading.as_words(), "verdicts": [one.as_words(turn.reading.time) for one in turn.verdicts]}
    replace(own_folder() / f"reading-{pid}.json", json.dumps(words, separators=(",", ":")).encode())


def newest(pid: int) -> tuple[Reading, list[Verdict]] | None:
    """Return the newest turn; None if there is none yet."""
    content = read_small(own_folder() / f"reading-{pid}.json")
    if content is None:
        return None
    try:
        words = json.loads(content)
        return _reading(words["reading"]), [_verdict(one) for one in words["verdicts"]]
    except (ValueError, KeyError, TypeError):
        return None


def _reading(words: dict[str, Any]) -> Reading:
    words = {key: value for key, value in words.items() if key not in {"kind", "attributed"}}
    words["parts"] = tuple(Part(**part) for part in words["parts"])
    words["gpu"] = None if words["gpu"] is None else Gpu(**words["gpu"])
    return Reading(**words)


def _verdict(words: dict[str, Any]) -> Verdict:
    return Verdict(**{key: value for key, value in words.items() if key not in {"kind", "time"}})

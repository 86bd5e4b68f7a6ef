"""All buffers on all cases: rounds of fresh processes, in an order that changes from round to round.

In:  cases, ways, how many transitions and rounds.  Out: records, one by one, as lines of a file would be.
Invariant: whoever stops in the middle keeps every round that is done.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdall.bench.buffers.cases import Case, recorded
from holdall.bench.buffers.result import FORMAT, summed_up
from holdall.bench.buffers.ways import Way
from holdall.bench.child import ChildError, messages, module
from holdall.bench.machine import machine, versions
from holdall.bench.trace import Trace

Tell = Callable[[str, float], None]
"""Is told what is being done, and which share of it is."""


def compared(cases: list[Case], ways: list[Way], transitions: int | None, rounds: int, tell: Tell) -> Iterator[Any]:
    """Measure everything; yield the header, then records as they come."""
    distributions = sorted({way.distribution for way in ways if way.distribution != "holdall"})
    yield {
        "kind": "header",
        "format": FORMAT,
        "command": sys.argv[1:],
        "machine": machine(),
        "versions": versions(*distributions),
        "rounds": rounds,
    }
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        for case in cases:
            if case.missing is not None:
                yield {"kind": "absent", "case": case.name, "library": None, "reason": case.missing}
                continue
            yield from _on(case, ways, transitions, rounds, Path(folder), tell)


def _on(
    case: Case, ways: list[Way], transitions: int | None, rounds: int, folder: Path, tell: Tell
) -> Iterator[dict[str, Any]]:
    file, count = recorded(case, transitions, folder, lambda share: tell(f"{case.name}: recording", share))
    trace = Trace.load(file)
    here, laps = [], count / len(trace)
    for way in ways:
        reason = way.missing(trace.observation_space)
        if reason is None:
            here.append(way)
        else:
            yield {"kind": "absent", "case": case.name, "library": way.name, "reason": reason}
    del trace
    answers: dict[str, list[dict[str, Any]]] = {way.name: [] for way in here}
    for turn in range(rounds):
        for way in here[turn % max(len(here), 1) :] + here[: turn % max(len(here), 1)]:
            if way.name not in answers:
                continue
            try:
                found = _measured(
                    way, file, count, turn, rounds, lambda what, share: tell(f"{case.name}: {what}", share)
                )
            except ChildError as error:
                del answers[way.name]
                yield {"kind": "absent", "case": case.name, "library": way.name, "reason": str(error)}
                continue
            answers[way.name].append(found)
            yield {"kind": "round", "case": case.name, "library": way.name, "round": turn} | found
    for way in here:
        if way.name in answers:
            record = summed_up(way.name, way.version, case.name, count, answers[way.name]).as_dict()
            yield record | ({"laps": laps} if laps > 1 else {})


def _measured(way: Way, file: Path, count: int, turn: int, rounds: int, tell: Tell) -> dict[str, Any]:
    command = module("bench.buffers.measure", "--way", way.name, "--trace", file, "--transitions", count)
    found: dict[str, Any] = {}
    for message in messages(command + (["--check"] if turn == 0 else [])):
        if "result" in message:
            found = message["result"]
        else:
            tell(f"{way.name}, round {turn + 1} of {rounds}", message["done"] / message["total"])
    return found

"""Compare replay buffers: cases, rounds of fresh processes, results, and their table.

Live environments are recorded first, so that every library gets the same bytes. The order of the libraries changes
from round to round. The file has a header, {"kind": "round"} for every process, {"kind": "buffer"} for every setup
whose rounds are done, {"kind": "absent"} for what could not be measured; docs/bench.md describes the fields.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from holdall.errors import ArgumentError
from holdall.tools.bench.buffer_libraries import BufferSetup
from holdall.tools.bench.child_process import ChildError, OnProgress, header_of, messages, module_command, version_of
from holdall.tools.bench.trace import Trace
from holdall.tools.report.results import BUFFERS_FORMAT
from holdall.units import format_bytes

HEADINGS = ("", "memory", "`add`", "`sample(256)`", "save", "load", "came back right")


@dataclass(frozen=True, slots=True)
class BufferCase:
    """One source of experience."""

    name: str
    env: str = ""
    wrapper: str = ""
    stack: int = 1
    needs: str = ""  # a distribution
    file: Path | None = None

    @property
    def missing(self) -> str | None:
        """Say why it cannot be played; None: it can."""
        return f"{self.needs} is not installed" if self.needs and version_of(self.needs) is None else None


CASES = {
    "atari": BufferCase("atari", "ale_py:SeaquestNoFrameskip-v4", "atari", stack=4, needs="ale-py"),
    "camera": BufferCase("camera", "holdall.tools.demo.camera:CameraRover"),
    "vector": BufferCase("vector", "Pendulum-v1"),
}
"""Seaquest's screens in stacks of four, as Stable-Baselines3 prepares them; the demo's rover; a few floats."""


def case_named(name: str) -> BufferCase:
    """Return one of the cases that are shipped."""
    if name not in CASES:
        raise ArgumentError(f"case ({name!r}) must be one of {', '.join(CASES)}; or name a --trace or an --env")
    return CASES[name]


def record_case(
    case: BufferCase, transitions: int | None, folder: Path, on_progress: Callable[[float], None]
) -> tuple[Path, int]:
    """Return the case as a trace, and how many of its transitions to hold."""
    if case.file is not None:
        return case.file, transitions or len(Trace.load(case.file))
    count = transitions or 20_000
    file = folder / f"{case.name}.npz"
    options = ("--env", case.env, "--wrapper", case.wrapper, "--stack", case.stack)
    for message in messages(module_command("tools.bench.trace", *options, "--transitions", count, "--out", file)):
        on_progress(message["done"] / message["total"])
    return file, count


def measure_buffers(
    cases: list[BufferCase], setups: list[BufferSetup], transitions: int | None, rounds: int, on_progress: OnProgress
) -> Iterator[Any]:
    """Measure everything; yield the header, then records as they come."""
    distributions = sorted({setup.distribution for setup in setups if setup.distribution != "holdall"})
    yield header_of(BUFFERS_FORMAT, *distributions) | {"rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        for case in cases:
            if case.missing is not None:
                yield {"kind": "absent", "case": case.name, "library": None, "reason": case.missing}
                continue

            def on_case(what: str, share: float, case: str = case.name) -> None:
                on_progress(f"{case}: {what}", share)

            file, count = record_case(case, transitions, Path(folder), partial(on_case, "recording"))
            for record in _compare_on_trace(file, count, setups, rounds, on_case):
                yield record | {"case": case.name}


def _compare_on_trace(
    file: Path, count: int, setups: list[BufferSetup], rounds: int, on_progress: OnProgress
) -> Iterator[dict[str, Any]]:
    trace = Trace.load(file)
    space, laps = trace.observation_space, count / len(trace)
    del trace
    measured: dict[str, list[dict[str, Any]]] = {}
    here = []
    for setup in setups:
        reason = setup.missing(space)
        if reason is not None:
            yield {"kind": "absent", "library": setup.name, "reason": reason}
        else:
            here.append(setup)
            measured[setup.name] = []
    for number in range(rounds):
        first = number % max(len(here), 1)
        for setup in here[first:] + here[:first]:
            if setup.name not in measured:
                continue
            share_done = partial(on_progress, f"{setup.name}, round {number + 1} of {rounds}")
            try:
                found = _measure_round(setup, file, count, share_done, checks=number == 0)
            except ChildError as error:
                del measured[setup.name]
                yield {"kind": "absent", "library": setup.name, "reason": str(error)}
                continue
            measured[setup.name].append(found)
            yield {"kind": "round", "library": setup.name, "round": number} | found
    for setup in here:
        if setup.name in measured:
            named = {"kind": "buffer", "library": setup.name, "version": setup.version, "transitions": count}
            yield named | summarise_rounds(measured[setup.name]) | ({"laps": laps} if laps > 1 else {})


def _measure_round(
    setup: BufferSetup, file: Path, count: int, on_progress: Callable[[float], None], *, checks: bool
) -> dict[str, Any]:
    task = {"setup_name": setup.name, "file": str(file), "transitions": count, "checks": checks}
    found: dict[str, Any] = {}
    for message in messages(module_command("tools.bench.measure_buffer", json.dumps(task))):
        found = message.get("result", found)
        if "done" in message:
            on_progress(message["done"] / message["total"])
    return found


def summarise_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds, each in a process of its own; the first one compared the rows.

    A row is wrong if any of its fields is, before saving or after loading. docs/bench.md describes the keys.
    """
    rows, loaded = rounds[0]["rows"], rounds[0]["loaded_rows"]
    figures = {
        "add_us": [1e6 * one["add_s"] for one in rounds],
        "sample_ms": [1e3 * one["sample_s"] for one in rounds],
        "save_s": [one["save_s"] for one in rounds],
        "load_s": [one["load_s"] for one in rounds],
    }
    extras = [one["save_extra_bytes"] for one in rounds if one["save_extra_bytes"] is not None]
    return {
        "bytes": int(median(one["bytes"] for one in rounds)),
        **{name: median(values) for name, values in figures.items()},
        "save_extra_bytes": int(median(extras)) if extras else None,
        "file_bytes": int(median(one["file_bytes"] for one in rounds)),
        "exact": rows["wrong"] == loaded["wrong"] == 0,
        "wrong": rows["wrong"],
        "wrong_loaded": loaded["wrong"],
        "compared": rows["compared"],
        "note": _note(rows, loaded),
        "rounds": len(rounds),
        "fastest": {name: min(values) for name, values in figures.items()},
    }


def _note(rows: dict[str, Any], loaded: dict[str, Any]) -> str:
    wrong = [("", rows)] + ([("after loading ", loaded)] if loaded["wrong"] != rows["wrong"] else [])
    notes = [
        f"{where}{', '.join(found['fields'])} wrong in {found['wrong']:,} of {found['compared']:,} rows"
        for where, found in wrong
        if found["wrong"]
    ]
    return "; ".join(notes + ([f"returns {', '.join(rows['dtypes'])}"] if rows["dtypes"] else []))


def table_rows(records: Iterable[dict[str, Any]], case: str) -> Sequence[tuple[str, ...]]:
    """Lay one case out, a row a library."""
    return [
        (
            f"{record['library']} {record['version'] or ''}".strip(),
            format_bytes(record["bytes"]),
            f"{record['add_us']:.0f} µs",
            f"{record['sample_ms']:.1f} ms",
            f"{record['save_s']:.2f} s, {format_bytes(record['file_bytes'])}",
            f"{record['load_s']:.2f} s",
            _correctness(record),
        )
        for record in records
        if record["kind"] == "buffer" and record["case"] == case
    ]


def _correctness(record: dict[str, Any]) -> str:
    if record["exact"]:
        return f"all {record['compared']:,} rows"
    if record["wrong"] == 0:
        return f"no: {record['wrong_loaded']:,} rows wrong after loading"
    return f"no: {record['wrong']:,} rows wrong"


def case_table(records: Sequence[dict[str, Any]], case: str) -> Table:
    """Draw one case."""
    count = next(r["transitions"] for r in records if r["kind"] == "buffer" and r["case"] == case)
    table = Table(title=f"{case}: {count:,} transitions", title_justify="left", title_style="bold", box=None)
    for number, heading in enumerate(HEADINGS):
        last = number == len(HEADINGS) - 1
        table.add_column(heading.strip("`"), justify="left" if number == 0 or last else "right", no_wrap=True)
    for row in table_rows(records, case):
        table.add_row(*row, style="" if row[-1].startswith("all") else "yellow")
    return table


def markdown(records: Sequence[dict[str, Any]], case: str) -> list[str]:
    """Write one case as lines of Markdown."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *table_rows(records, case)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def cases_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return the cases that were measured, in order."""
    return list(dict.fromkeys(record["case"] for record in records if record["kind"] == "buffer"))


def remarks(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return what was not measured, and why; and which figures need care."""
    played, noted, absent = [], [], []
    for record in records:
        case, library = record.get("case"), record.get("library")
        if record["kind"] == "buffer" and "laps" in record:
            times = f"{record['laps']:.1f} times over"
            played.append(f"{case} was played {times}: a buffer that shares what repeats gains by that")
        if record["kind"] == "buffer" and record["note"]:
            noted.append(f"{library} on {case}: {record['note']}")
        if record["kind"] == "absent":
            absent.append(f"{f'{library} on {case}' if library else case} was not measured: {record['reason']}")
    return list(dict.fromkeys(played + noted + absent))

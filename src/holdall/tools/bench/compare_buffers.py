"""Compare replay buffers: cases, rounds of fresh processes, results, and their table.

Live environments are recorded first, so that every library gets the same bytes. The order of the libraries changes
from round to round. The file has a header, {"kind": "round"} for every process, {"kind": "buffer"} for every setup
whose rounds are done, {"kind": "absent"} for what could not be measured; docs/bench.md describes the fields.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from holdall.errors import ArgumentError
from holdall.tools.bench.buffer_libraries import BufferSetup
from holdall.tools.bench.child_process import ChildError, machine, messages, module_command, version_of, versions
from holdall.tools.bench.trace import Trace
from holdall.units import format_bytes

FORMAT = "holdall-bench-buffers-1"
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
    case: BufferCase, transitions: int | None, folder: Path, tell: Callable[[float], None]
) -> tuple[Path, int]:
    """Return the case as a trace, and how many transitions of it are to be held."""
    if case.file is not None:
        return case.file, transitions or len(Trace.load(case.file))
    count = transitions or 20_000
    file = folder / f"{case.name}.npz"
    options = ("--env", case.env, "--wrapper", case.wrapper, "--stack", case.stack)
    for message in messages(module_command("tools.bench.trace", *options, "--transitions", count, "--out", file)):
        tell(message["done"] / message["total"])
    return file, count


OnProgress = Callable[[str, float], None]
"""Is told what is being done, and which share of it is."""


def compare_buffers(
    cases: list[BufferCase], ways: list[BufferSetup], transitions: int | None, rounds: int, tell: OnProgress
) -> Iterator[Any]:
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
            yield from _compare_on_case(case, ways, transitions, rounds, Path(folder), tell)


def _compare_on_case(
    case: BufferCase, ways: list[BufferSetup], transitions: int | None, rounds: int, folder: Path, tell: OnProgress
) -> Iterator[dict[str, Any]]:
    file, count = record_case(case, transitions, folder, lambda share: tell(f"{case.name}: recording", share))
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
                found = _measure_round(
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
            record = summarise_rounds(way.name, way.version, case.name, count, answers[way.name]).as_dict()
            yield record | ({"laps": laps} if laps > 1 else {})


def _measure_round(
    way: BufferSetup, file: Path, count: int, turn: int, rounds: int, tell: OnProgress
) -> dict[str, Any]:
    command = module_command("tools.bench.measure_buffer", "--way", way.name, "--trace", file, "--transitions", count)
    found: dict[str, Any] = {}
    for message in messages(command + (["--check"] if turn == 0 else [])):
        if "result" in message:
            found = message["result"]
        else:
            tell(f"{way.name}, round {turn + 1} of {rounds}", message["done"] / message["total"])
    return found


@dataclass(frozen=True, slots=True)
class BufferResult:
    """One way on one case; times and bytes are medians over rounds, each in a process of its own."""

    library: str
    version: str | None
    case: str
    transitions: int
    bytes: int
    add_us: float
    sample_ms: float
    save_s: float
    load_s: float
    save_extra_bytes: int | None  # memory that saving takes for a while
    file_bytes: int
    exact: bool  # every row, before saving and after loading
    wrong: int  # rows
    wrong_loaded: int  # rows, after loading
    compared: int
    note: str
    rounds: int
    fastest: dict[str, float]  # the smallest of the rounds, by figure

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": "buffer"} | asdict(self)


def summarise_rounds(
    library: str, version: str | None, case: str, transitions: int, rounds: Sequence[Any]
) -> BufferResult:
    """Make one record of the answers of several processes; the first one compared the rows."""
    rows, loaded = rounds[0]["rows"], rounds[0]["loaded_rows"]
    figures = {
        "add_us": [1e6 * one["add_s"] for one in rounds],
        "sample_ms": [1e3 * one["sample_s"] for one in rounds],
        "save_s": [one["save_s"] for one in rounds],
        "load_s": [one["load_s"] for one in rounds],
    }
    extra = rounds[0]["save_extra_bytes"]
    return BufferResult(
        library=library,
        version=version,
        case=case,
        transitions=transitions,
        bytes=int(median(one["bytes"] for one in rounds)),
        save_extra_bytes=None if extra is None else int(median(one["save_extra_bytes"] for one in rounds)),
        file_bytes=int(median(one["file_bytes"] for one in rounds)),
        exact=rows["wrong"] == loaded["wrong"] == 0,
        wrong=rows["wrong"],
        wrong_loaded=loaded["wrong"],
        compared=rows["compared"],
        note=_note(rows, loaded),
        rounds=len(rounds),
        fastest={name: min(seconds) for name, seconds in figures.items()},
        **{name: median(seconds) for name, seconds in figures.items()},
    )


def _note(rows: dict[str, Any], loaded: dict[str, Any]) -> str:
    said = []
    for where, found in (("", rows), ("after loading ", loaded)):
        if found["wrong"] and (where == "" or found["wrong"] != rows["wrong"]):
            said.append(
                f"{where}{', '.join(found['fields'])} wrong in {found['wrong']:,} of {found['compared']:,} rows"
            )
    if rows["dtypes"]:
        said.append(f"returns {', '.join(rows['dtypes'])}")
    return "; ".join(said)


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
    """Say what was not measured, and why; and which figures are to be taken with care."""
    known = list(records)
    said = [
        f"{record['case']} was played {record['laps']:.1f} times over: a buffer that shares what repeats gains by that"
        for record in known
        if record["kind"] == "buffer" and "laps" in record
    ]
    said += [
        f"{record['library']} on {record['case']}: {record['note']}"
        for record in known
        if record["kind"] == "buffer" and record["note"]
    ]
    said += (
        f"{record['library'] or record['case']}{' on ' + record['case'] if record['library'] else ''}"
        f" was not measured: {record['reason']}"
        for record in known
        if record["kind"] == "absent"
    )
    return list(dict.fromkeys(said))

"""Compare replay buffers: cases, rounds of fresh processes, results, and their table.

Live environments are recorded first, so that every library gets the same bytes. The order of the libraries changes
from round to round. The file has a header, then {"kind": "round"} for every process, {"kind": "buffer"} for every
measured setup, and {"kind": "absent"} for every setup that could not be measured. docs/bench.md describes the fields.

In the first round, every row is compared with the oracle. `measure_buffer` measures one buffer in its own process.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from holdall.errors import ArgumentError
from holdall.tools.bench import OnProgress, find_version, make_header
from holdall.tools.bench.buffer_libraries import BufferSetup
from holdall.tools.bench.child import ChildError, make_module_command, read_result, run_child
from holdall.tools.bench.measure_buffer import BufferTask, RoundFigures, RowComparison
from holdall.tools.bench.trace import Trace
from holdall.tools.report import BUFFERS_FORMAT
from holdall.units import format_bytes

HEADINGS = ("", "memory", "add", "sample", "save", "on disk", "load", "came back right")


@dataclass(frozen=True, slots=True)
class BufferCase:
    """One source of experience."""

    name: str
    env: str = ""
    wrapper: str = ""
    stack: int = 1
    needs: str = ""  # Distribution that must be installed.
    file: Path | None = None

    @property
    def absence_reason(self) -> str | None:
        """Return why the case cannot be played, or None if it can."""
        return f"{self.needs} is not installed" if self.needs and find_version(self.needs) is None else None


CASES = {
    "atari": BufferCase("atari", "ale_py:SeaquestNoFrameskip-v4", "atari", stack=4, needs="ale-py"),
    "camera": BufferCase("camera", "holdall.tools.demo:CameraRover"),
    "vector": BufferCase("vector", "Pendulum-v1"),
}
"""Stacks of four screens of Seaquest, as Stable-Baselines3 prepares them; the rover of the demo; vectors."""


def find_case(name: str) -> BufferCase:
    """Return a case of `CASES`."""
    if name not in CASES:
        raise ArgumentError(f"case ({name!r}) must be one of {', '.join(CASES)}. Or name a --trace or an --env.")
    return CASES[name]


def record_case(
    case: BufferCase, transitions: int | None, folder: Path, on_progress: Callable[[float], None]
) -> tuple[Path, int]:
    """Return the file of the case's trace, and the number of transitions to add. Record the trace if necessary."""
    if case.file is not None:
        return case.file, transitions or len(Trace.load(case.file))
    count = transitions or 20_000
    file = folder / f"{case.name}.npz"
    options = ("--env", case.env, "--wrapper", case.wrapper, "--stack", case.stack, "--transitions", count)
    for progress in run_child(make_module_command("tools.bench.trace", *options, "--out", file)):
        on_progress(progress.share)
    return file, count


def measure_buffers(
    cases: list[BufferCase], setups: list[BufferSetup], transitions: int | None, rounds: int, on_progress: OnProgress
) -> Iterator[Any]:
    """Measure all setups in all cases. Yield the header, then every record at once."""
    distributions = sorted({setup.distribution for setup in setups if setup.distribution != "holdall"})
    yield make_header(BUFFERS_FORMAT, *distributions) | {"rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        for case in cases:
            if case.absence_reason is not None:
                yield {"kind": "absent", "case": case.name, "library": None, "reason": case.absence_reason}
                continue

            def report_progress(work: str, share: float, case: str = case.name) -> None:
                on_progress(f"{case}: {work}", share)

            file, count = record_case(case, transitions, Path(folder), partial(report_progress, "recording"))
            for record in _compare_on_trace(file, count, setups, rounds, report_progress):
                yield record | {"case": case.name}


def _compare_on_trace(
    file: Path, count: int, setups: list[BufferSetup], rounds: int, on_progress: OnProgress
) -> Iterator[dict[str, Any]]:
    trace = Trace.load(file)
    space = trace.observation_space
    laps = count / len(trace)
    del trace
    results: defaultdict[str, list[RoundFigures]] = defaultdict(list)
    present = [setup for setup in setups if setup.explain_absence(space) is None]
    for setup in setups:
        if setup not in present:
            yield {"kind": "absent", "library": setup.name, "reason": setup.explain_absence(space)}
    for number in range(rounds):
        first = number % max(len(present), 1)
        for setup in present[first:] + present[:first]:
            report_share = partial(on_progress, f"{setup.name}, round {number + 1} of {rounds}")
            try:
                figures = _measure_round(setup, file, count, report_share, has_comparison=number == 0)
            except ChildError as error:
                present.remove(setup)
                yield {"kind": "absent", "library": setup.name, "reason": str(error)}
                continue
            results[setup.name].append(figures)
            yield {"kind": "round", "library": setup.name, "round": number} | figures.as_dict()
    for setup in present:
        record: dict[str, Any] = {
            "kind": "buffer",
            "library": setup.name,
            "version": setup.version,
            "transitions": count,
        }
        record |= summarise_rounds(results[setup.name])
        if laps > 1:
            record["laps"] = laps
        yield record


def _measure_round(
    setup: BufferSetup, file: Path, count: int, on_progress: Callable[[float], None], *, has_comparison: bool
) -> RoundFigures:
    task = BufferTask(setup.name, str(file), count, has_comparison)
    command = make_module_command("tools.bench.measure_buffer", json.dumps(asdict(task)))
    return read_result(run_child(command, RoundFigures), lambda progress: on_progress(progress.share))


def summarise_rounds(rounds: Sequence[RoundFigures]) -> dict[str, Any]:
    """Return the medians over rounds, and the result of comparing rows, which the first round did.

    A row is wrong if one of its fields is wrong. docs/bench.md describes the keys.
    """
    rows = rounds[0].rows
    loaded = rounds[0].loaded_rows
    assert rows is not None
    assert loaded is not None
    figures = {
        "add_us": [1e6 * one.add_s for one in rounds],
        "sample_ms": [1e3 * one.sample_s for one in rounds],
        "save_s": [one.save_s for one in rounds],
        "load_s": [one.load_s for one in rounds],
    }
    extras = [one.save_extra_bytes for one in rounds if one.save_extra_bytes is not None]
    return {
        "bytes": int(median(one.nbytes for one in rounds)),
        **{name: median(values) for name, values in figures.items()},
        "save_extra_bytes": int(median(extras)) if extras else None,
        "file_bytes": int(median(one.file_bytes for one in rounds)),
        "exact": rows.wrong == loaded.wrong == 0,
        "wrong": rows.wrong,
        "wrong_loaded": loaded.wrong,
        "compared": rows.compared,
        "note": _describe_errors(rows, loaded),
        "rounds": len(rounds),
        "fastest": {name: min(values) for name, values in figures.items()},
    }


def _describe_errors(rows: RowComparison, loaded: RowComparison) -> str:
    differences = [("", rows)]
    if loaded.wrong != rows.wrong:
        differences.append(("after loading ", loaded))
    notes = [
        f"{when}{', '.join(found.fields)} wrong in {found.wrong:,} of {found.compared:,} rows"
        for when, found in differences
        if found.wrong
    ]
    if rows.dtypes:
        notes.append(f"returns {', '.join(rows.dtypes)}")
    return "; ".join(notes)


def make_table_rows(records: Iterable[dict[str, Any]], case: str) -> Sequence[tuple[str, ...]]:
    """Return the cells of the table of one case. Each library has a row."""
    return [
        (
            record["library"],
            format_bytes(record["bytes"]),
            f"{_format_figure(record['add_us'])} µs",
            f"{_format_figure(record['sample_ms'])} ms",
            f"{record['save_s']:.2f} s",
            format_bytes(record["file_bytes"]),
            f"{record['load_s']:.2f} s",
            _describe_correctness(record),
        )
        for record in records
        if record["kind"] == "buffer" and record["case"] == case
    ]


def _format_figure(value: float) -> str:
    """Write two significant digits, and all digits before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _describe_correctness(record: dict[str, Any]) -> str:
    if record["exact"]:
        return f"all {record['compared']:,} rows"
    if record["wrong"] == 0:
        return f"no: {record['wrong_loaded']:,} rows wrong after loading"
    return f"no: {record['wrong']:,} rows wrong"


def draw_case(records: Sequence[dict[str, Any]], case: str) -> Table:
    """Return the table of one case."""
    count = next(one["transitions"] for one in records if one["kind"] == "buffer" and one["case"] == case)
    title = f"{case}: {count:,} transitions"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(HEADINGS):
        is_text = number in {0, len(HEADINGS) - 1}
        # In a narrow terminal, names are wrapped. Figures never are.
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in make_table_rows(records, case):
        table.add_row(*row, style="" if row[-1].startswith("all") else "yellow")
    return table


def list_cases(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return the cases that were measured, in order."""
    return list(dict.fromkeys(record["case"] for record in records if record["kind"] == "buffer"))


def list_remarks(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return remarks on the results: repeated traces, wrong rows, setups that were not measured, and versions."""
    versions = {}
    repeated_traces = []
    errors = []
    absent = []
    for record in records:
        case = record.get("case")
        library = record.get("library")
        if record["kind"] == "buffer":
            versions[record["library"].partition(" ")[0]] = record["version"]
        if record["kind"] == "buffer" and "laps" in record:
            times = f"{record['laps']:.1f} times"
            repeated_traces.append(f"{case} was played {times}, so buffers that store equal data once seem smaller")
        if record["kind"] == "buffer" and record["note"]:
            errors.append(f"{library} on {case}: {record['note']}")
        if record["kind"] == "absent":
            name = f"{library} on {case}" if library else case
            absent.append(f"{name} was not measured: {record['reason']}")
    lines = [*repeated_traces, *errors, *absent]
    if versions:
        lines.append(f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    return list(dict.fromkeys(lines))

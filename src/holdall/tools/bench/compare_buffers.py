"""Compare replay buffers: cases, rounds of fresh processes, results, and their table.

Live environments are recorded first, so that every library gets the same bytes. The order of the libraries changes
from round to round. The file has a header, then {"kind": "round"} for every process, {"kind": "buffer"} for every
measured setup, and {"kind": "absent"} for every setup that could not be measured. docs/bench.md describes the fields.

`python -m holdall.tools.bench.compare_buffers TASK`, with the task as JSON, measures one buffer in its own process. It
prints {"done", "total"} during the measurement and {"result"} at the end. Bytes are the growth of the process's unique
memory, from the moment before the buffer is made until the buffer is full. The library is imported and used before.
Adds are timed in blocks, samples one by one, and loading until the first batch is drawn. In the first round, every row
is compared with the oracle.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from holdall.errors import ArgumentError
from holdall.machine import held_bytes
from holdall.tools import bench
from holdall.tools.bench import ChildError, OnProgress
from holdall.tools.bench.buffer_libraries import BUFFER_SETUPS, BufferAdapter, BufferSetup
from holdall.tools.bench.trace import Trace, TraceStep
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
        return f"{self.needs} is not installed" if self.needs and bench.find_version(self.needs) is None else None


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
    for message in bench.run_child(bench.make_module_command("tools.bench.trace", *options, "--out", file)):
        on_progress(message["done"] / message["total"])
    return file, count


def measure_buffers(
    cases: list[BufferCase], setups: list[BufferSetup], transitions: int | None, rounds: int, on_progress: OnProgress
) -> Iterator[Any]:
    """Measure all setups in all cases. Yield the header, then every record at once."""
    distributions = sorted({setup.distribution for setup in setups if setup.distribution != "holdall"})
    yield bench.make_header(BUFFERS_FORMAT, *distributions) | {"rounds": rounds}
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
    results: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    present = [setup for setup in setups if setup.explain_absence(space) is None]
    for setup in setups:
        if setup not in present:
            yield {"kind": "absent", "library": setup.name, "reason": setup.explain_absence(space)}
    for number in range(rounds):
        first = number % max(len(present), 1)
        for setup in present[first:] + present[:first]:
            report_share = partial(on_progress, f"{setup.name}, round {number + 1} of {rounds}")
            try:
                result = _measure_round(setup, file, count, report_share, checks=number == 0)
            except ChildError as error:
                present.remove(setup)
                yield {"kind": "absent", "library": setup.name, "reason": str(error)}
                continue
            results[setup.name].append(result)
            yield {"kind": "round", "library": setup.name, "round": number} | result
    for setup in present:
        record: dict[str, Any] = {"kind": "buffer", "library": setup.name, "version": setup.version, "transitions": count}
        record |= summarise_rounds(results[setup.name])
        if laps > 1:
            record["laps"] = laps
        yield record


def _measure_round(
    setup: BufferSetup, file: Path, count: int, on_progress: Callable[[float], None], *, checks: bool
) -> dict[str, Any]:
    task = {"setup_name": setup.name, "file": str(file), "transitions": count, "checks": checks}

    def report_share(message: dict[str, Any]) -> None:
        if "done" in message:
            on_progress(message["done"] / message["total"])

    lines = bench.run_child(bench.make_module_command("tools.bench.compare_buffers", json.dumps(task)))
    return bench.read_result(lines, report_share)


def summarise_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds, and the result of comparing rows, which the first round did.

    A row is wrong if one of its fields is wrong. docs/bench.md describes the keys.
    """
    rows = rounds[0]["rows"]
    loaded = rounds[0]["loaded_rows"]
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
        "note": _describe_errors(rows, loaded),
        "rounds": len(rounds),
        "fastest": {name: min(values) for name, values in figures.items()},
    }


def _describe_errors(rows: dict[str, Any], loaded: dict[str, Any]) -> str:
    differences = [("", rows)]
    if loaded["wrong"] != rows["wrong"]:
        differences.append(("after loading ", loaded))
    notes = [
        f"{when}{', '.join(found['fields'])} wrong in {found['wrong']:,} of {found['compared']:,} rows"
        for when, found in differences
        if found["wrong"]
    ]
    if rows["dtypes"]:
        notes.append(f"returns {', '.join(rows['dtypes'])}")
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


# ---------------------------------------------------------------- measuring one buffer, in its own process

_COMPARED_BYTES = 32 * 2**20
"""Bytes of observations that are compared at once."""
BATCH = 256
"""Transitions of a batch."""
_BLOCK = 50
"""Transitions whose adding is timed together."""
_EMIT_EVERY = 20 * _BLOCK
"""Transitions between two reports of progress."""
_WARM_UP_STEPS = 64
"""Capacity of the small buffer that is used before anything is measured."""
_BATCHES = 60
"""Batches whose sampling is timed."""


@dataclass(slots=True)
class RowDifferences:
    """Result of comparing rows with the oracle."""

    compared: int = 0
    wrong: int = 0
    fields: set[str] = field(default_factory=set)  # Fields in which rows differ.
    dtypes: set[str] = field(default_factory=set)  # Fields that were returned with another dtype.

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"fields": sorted(self.fields), "dtypes": sorted(self.dtypes)}


def compare_rows(buffer: BufferAdapter, steps: Iterator[TraceStep], count: int) -> RowDifferences:
    """Compare every one of the first `count` transitions."""
    from holdall.testing import OracleMemory  # noqa: PLC0415  Only a measured process compares.

    found = RowDifferences()
    first = next(steps)
    steps = chain([first], steps)
    parts = first.obs.values() if isinstance(first.obs, dict) else [first.obs]
    rows_at_once = max(1, _COMPARED_BYTES // max(2 * sum(part.nbytes for part in parts), 1))
    while found.compared < count:
        added = list(islice(steps, min(rows_at_once, count - found.compared)))
        oracle = OracleMemory(capacity=len(added))
        for step in added:
            oracle.add(*step)
        ids = np.arange(len(added))
        _compare_fields(buffer.read_rows(found.compared + ids), oracle.gather(ids), len(added), found)
        found.compared += len(added)
    return found


def _compare_fields(rows: dict[str, Any], oracle_batch: Any, count: int, found: RowDifferences) -> None:
    """Compare `count` rows of a buffer with the rows of the oracle. Add the differences to `found`."""
    wrong = np.zeros(count, np.bool_)
    for name, value in rows.items():
        ends = oracle_batch.terminated | oracle_batch.truncated
        expected = ends if name == "done" else getattr(oracle_batch, name)
        pairs = {name: (value, expected)}
        if isinstance(expected, dict):
            pairs = {f"{name}.{key}": (value[key], expected[key]) for key in expected}
        for path, (read, wanted) in pairs.items():
            differs = _find_different_rows(np.asarray(read), np.asarray(wanted), path, found)
            if differs.any():
                found.fields.add(path)
                wrong |= differs
    found.wrong += int(np.count_nonzero(wrong))


def _find_different_rows(
    read: NDArray[Any], expected: NDArray[Any], path: str, found: RowDifferences
) -> NDArray[np.bool_]:
    """Return a flag for every row that differs. Rows of the same dtype are compared byte for byte."""
    count = len(expected)
    if read.size != expected.size:
        return np.ones(count, np.bool_)
    read = read.reshape(count, -1)
    expected = expected.reshape(count, -1)
    if read.dtype == expected.dtype:
        read = np.ascontiguousarray(read).view(np.uint8)
        expected = np.ascontiguousarray(expected).view(np.uint8)
    else:
        found.dtypes.add(f"{path} as {read.dtype}")
    return np.asarray((read != expected).any(axis=1))


def measure(setup_name: str, file: str, transitions: int, *, checks: bool) -> dict[str, Any]:
    """Measure one setup: fill its buffer, sample, save and load. With `checks`, compare every row."""
    setup = BUFFER_SETUPS[setup_name]
    importlib.import_module("torch")  # Every library returns batches of its tensors.
    trace = Trace.load(Path(file))
    _warm_up(setup, trace)
    before = held_bytes().unique
    buffer = setup.open(trace.observation_space, trace.action_space, transitions + 1)
    result: dict[str, Any] = {"add_s": _time_adds(buffer, trace.repeat_steps(), transitions)}
    result["bytes"] = held_bytes().unique - before
    result["sample_s"] = _time_samples(buffer)
    if checks:
        result["rows"] = compare_rows(buffer, trace.repeat_steps(), transitions).as_dict()
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        saved = bench.measure_save(buffer.save, Path(folder))
        result |= {"save_s": saved["seconds"], "save_extra_bytes": saved["extra"], "file_bytes": saved["bytes"]}
        load = buffer.load
        buffer.close()
        del buffer
        gc.collect()
        result |= _measure_load(load, Path(folder), trace, transitions if checks else 0)
    return result


def _warm_up(setup: BufferSetup, trace: Trace) -> None:
    """Use a small buffer once, so that the library loads all of its modules before anything is measured."""
    buffer = setup.open(trace.observation_space, trace.action_space, _WARM_UP_STEPS)
    for step in islice(trace.repeat_steps(), _WARM_UP_STEPS // 2):
        buffer.add(buffer.prepare(step))
    buffer.sample(_WARM_UP_STEPS // 4)
    buffer.close()
    del buffer
    gc.collect()


def _time_adds(buffer: BufferAdapter, steps: Iterator[TraceStep], transitions: int) -> float:
    """Add all transitions. Return the median over blocks of the seconds per `add`."""
    blocks = []
    for begin in range(0, transitions, _BLOCK):
        prepared = [buffer.prepare(step) for step in islice(steps, min(_BLOCK, transitions - begin))]
        add = buffer.add
        start = time.perf_counter()
        for one in prepared:
            add(one)
        blocks.append((time.perf_counter() - start) / len(prepared))
        if begin % _EMIT_EVERY == 0:
            bench.emit({"done": begin, "total": transitions})
    del prepared
    buffer.wait()
    return float(np.median(blocks))


def _time_samples(buffer: BufferAdapter) -> float:
    seconds = []
    batch = None  # As in training, the last batch is held until the next one is drawn.
    for _ in range(_BATCHES):
        start = time.perf_counter()
        batch = buffer.sample(BATCH)
        seconds.append(time.perf_counter() - start)
    del batch
    return float(np.median(seconds))


def _measure_load(load: Callable[[Path], BufferAdapter], folder: Path, trace: Trace, compared: int) -> dict[str, Any]:
    start = time.perf_counter()
    loaded = load(folder)
    loaded.sample(BATCH)
    result: dict[str, Any] = {"load_s": time.perf_counter() - start}
    if compared:
        result["loaded_rows"] = compare_rows(loaded, trace.repeat_steps(), compared).as_dict()
    return result


def main() -> None:
    """Read the task, measure, and print the result."""
    task = json.loads(sys.argv[1])
    bench.emit({"done": 0, "total": task["transitions"]})
    warnings.simplefilter("ignore")  # Warnings of other libraries are not measured.
    bench.emit({"result": measure(**task)})


if __name__ == "__main__":
    main()

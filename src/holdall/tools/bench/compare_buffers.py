"""Compare replay buffers: cases, rounds of fresh processes, results, and their table.

Live environments are recorded first, so that every library gets the same bytes. The order of the libraries changes
from round to round. The file has a header, then {"kind": "round"} for every process, {"kind": "buffer"} for every
measured setup, and {"kind": "absent"} for every setup that could not be measured. docs/bench.md describes the fields.

`python -m holdall.tools.bench.compare_buffers TASK`, the task as JSON, measures one buffer in its own process. It
prints {"done", "total"} while it runs and {"result"} last. Bytes are the growth of the process's unique memory, from
the time before the buffer is made until it is full. Libraries are imported and used before that. Adding is timed by
blocks, sampling by batch, loading up to the first batch. Every row is compared with the oracle afterwards.
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
    def missing(self) -> str | None:
        """Return why the case cannot be played, or None if it can."""
        return f"{self.needs} is not installed" if self.needs and bench.version_of(self.needs) is None else None


CASES = {
    "atari": BufferCase("atari", "ale_py:SeaquestNoFrameskip-v4", "atari", stack=4, needs="ale-py"),
    "camera": BufferCase("camera", "holdall.tools.demo:CameraRover"),
    "vector": BufferCase("vector", "Pendulum-v1"),
}
"""Seaquest's screens in stacks of four, as Stable-Baselines3 prepares them, the rover of the demo, and a few floats."""


def case_named(name: str) -> BufferCase:
    """Return a case of `CASES`."""
    if name not in CASES:
        raise ArgumentError(f"case ({name!r}) must be one of {', '.join(CASES)}; or name a --trace or an --env")
    return CASES[name]


def record_case(
    case: BufferCase, transitions: int | None, folder: Path, on_progress: Callable[[float], None]
) -> tuple[Path, int]:
    """Return the file of the case's trace, and the number of transitions to hold."""
    if case.file is not None:
        return case.file, transitions or len(Trace.load(case.file))
    count = transitions or 20_000
    file = folder / f"{case.name}.npz"
    options = ("--env", case.env, "--wrapper", case.wrapper, "--stack", case.stack, "--transitions", count)
    for message in bench.messages(bench.module_command("tools.bench.trace", *options, "--out", file)):
        on_progress(message["done"] / message["total"])
    return file, count


def measure_buffers(
    cases: list[BufferCase], setups: list[BufferSetup], transitions: int | None, rounds: int, on_progress: OnProgress
) -> Iterator[Any]:
    """Measure all setups in all cases. Yield the header, then every record at once."""
    distributions = sorted({setup.distribution for setup in setups if setup.distribution != "holdall"})
    yield bench.header_of(BUFFERS_FORMAT, *distributions) | {"rounds": rounds}
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
    space = trace.observation_space
    laps = count / len(trace)
    del trace
    measured: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    here = [setup for setup in setups if setup.missing(space) is None]
    for setup in setups:
        if setup not in here:
            yield {"kind": "absent", "library": setup.name, "reason": setup.missing(space)}
    for number in range(rounds):
        first = number % max(len(here), 1)
        for setup in here[first:] + here[:first]:
            share_done = partial(on_progress, f"{setup.name}, round {number + 1} of {rounds}")
            try:
                found = _measure_round(setup, file, count, share_done, checks=number == 0)
            except ChildError as error:
                here.remove(setup)
                yield {"kind": "absent", "library": setup.name, "reason": str(error)}
                continue
            measured[setup.name].append(found)
            yield {"kind": "round", "library": setup.name, "round": number} | found
    for setup in here:
        named = {"kind": "buffer", "library": setup.name, "version": setup.version, "transitions": count}
        yield named | summarise_rounds(measured[setup.name]) | ({"laps": laps} if laps > 1 else {})


def _measure_round(
    setup: BufferSetup, file: Path, count: int, on_progress: Callable[[float], None], *, checks: bool
) -> dict[str, Any]:
    task = {"setup_name": setup.name, "file": str(file), "transitions": count, "checks": checks}
    lines = bench.messages(bench.module_command("tools.bench.compare_buffers", json.dumps(task)))
    return bench.read_result(lines, lambda one: on_progress(one["done"] / one["total"]) if "done" in one else None)


def summarise_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds, each in a process of its own. The first round compared the rows.

    A row is wrong if any of its fields is, before saving or after loading. docs/bench.md describes the keys.
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
    """Return the table of one case, with one row per library."""
    return [
        (
            record["library"],
            format_bytes(record["bytes"]),
            f"{_round(record['add_us'])} µs",
            f"{_round(record['sample_ms'])} ms",
            f"{record['save_s']:.2f} s",
            format_bytes(record["file_bytes"]),
            f"{record['load_s']:.2f} s",
            _correctness(record),
        )
        for record in records
        if record["kind"] == "buffer" and record["case"] == case
    ]


def _round(value: float) -> str:
    """Write two significant digits, and all digits before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _correctness(record: dict[str, Any]) -> str:
    if record["exact"]:
        return f"all {record['compared']:,} rows"
    if record["wrong"] == 0:
        return f"no: {record['wrong_loaded']:,} rows wrong after loading"
    return f"no: {record['wrong']:,} rows wrong"


def case_table(records: Sequence[dict[str, Any]], case: str) -> Table:
    """Draw one case."""
    count = next(r["transitions"] for r in records if r["kind"] == "buffer" and r["case"] == case)
    title = f"{case}: {count:,} transitions"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(HEADINGS):
        is_text = number in {0, len(HEADINGS) - 1}
        # In a narrow terminal, names may be broken, and figures may not.
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in table_rows(records, case):
        table.add_row(*row, style="" if row[-1].startswith("all") else "yellow")
    return table


def cases_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return the cases that were measured, in order."""
    return list(dict.fromkeys(record["case"] for record in records if record["kind"] == "buffer"))


def remarks(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return notes: figures that need care, setups that were not measured with the reason, and versions."""
    versions = {}
    played = []
    noted = []
    absent = []
    for record in records:
        case = record.get("case")
        library = record.get("library")
        if record["kind"] == "buffer":
            versions[record["library"].partition(" ")[0]] = record["version"]
        if record["kind"] == "buffer" and "laps" in record:
            times = f"{record['laps']:.1f} times over"
            played.append(f"{case} was played {times}: a buffer that shares what repeats gains by that")
        if record["kind"] == "buffer" and record["note"]:
            noted.append(f"{library} on {case}: {record['note']}")
        if record["kind"] == "absent":
            absent.append(f"{f'{library} on {case}' if library else case} was not measured: {record['reason']}")
    measured = [f"{name} {version}" for name, version in versions.items()]
    return list(dict.fromkeys(played + noted + absent + ([f"versions: {', '.join(measured)}"] if measured else [])))


_AT_ONCE_BYTES = 32 * 2**20
BATCH = 256
_BLOCK = 50
_EMIT_EVERY = 20 * _BLOCK
_WARM_UP_STEPS = 64  # Transitions of a first buffer, which is not measured.
_BATCHES = 60


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
    rows = max(1, _AT_ONCE_BYTES // max(2 * sum(part.nbytes for part in parts), 1))
    while found.compared < count:
        few = list(islice(steps, min(rows, count - found.compared)))
        oracle = OracleMemory(capacity=len(few))
        for step in few:
            oracle.add(*step)
        ids = np.arange(len(few))
        _compare_fields(buffer.rows(found.compared + ids), oracle.gather(ids), len(few), found)
        found.compared += len(few)
    return found


def _compare_fields(rows: dict[str, Any], expected: Any, count: int, found: RowDifferences) -> None:
    wrong = np.zeros(count, np.bool_)
    for name, value in rows.items():
        wanted = expected.terminated | expected.truncated if name == "done" else getattr(expected, name)
        pairs = {f"{name}.{key}": (value[key], wanted[key]) for key in wanted} if isinstance(wanted, dict) else None
        for path, (got, want) in (pairs or {name: (value, wanted)}).items():
            differs = _differing(np.asarray(got), np.asarray(want), path, found)
            if differs.any():
                found.fields.add(path)
                wrong |= differs
    found.wrong += int(np.count_nonzero(wrong))


def _differing(got: NDArray[Any], want: NDArray[Any], path: str, found: RowDifferences) -> NDArray[np.bool_]:
    count = len(want)
    if got.size != want.size:
        return np.ones(count, np.bool_)
    got = got.reshape(count, -1)
    want = want.reshape(count, -1)
    if got.dtype == want.dtype:
        got, want = (np.ascontiguousarray(rows).view(np.uint8) for rows in (got, want))
    else:
        found.dtypes.add(f"{path} as {got.dtype}")
    return np.asarray((got != want).any(axis=1))


def measure(setup_name: str, file: str, transitions: int, *, checks: bool) -> dict[str, Any]:
    """Fill, sample, save, load, and compare."""
    setup = BUFFER_SETUPS[setup_name]
    importlib.import_module("torch")  # Every library returns batches of its tensors.
    trace = Trace.load(Path(file))
    _warm_up(setup, trace)
    before = held_bytes().unique
    buffer = setup.open(trace.observation_space, trace.action_space, transitions + 1)
    found: dict[str, Any] = {"add_s": _time_adds(buffer, trace.repeated(), transitions)}
    found["bytes"] = held_bytes().unique - before
    found["sample_s"] = _time_samples(buffer)
    if checks:
        found["rows"] = compare_rows(buffer, trace.repeated(), transitions).as_dict()
    with tempfile.TemporaryDirectory(prefix="holdall-bench-") as folder:
        saved = bench.measured_save(buffer.save, Path(folder))
        found |= {"save_s": saved["seconds"], "save_extra_bytes": saved["extra"], "file_bytes": saved["bytes"]}
        reopen = buffer.load
        buffer.close()
        del buffer
        gc.collect()
        found |= _measure_load(reopen, Path(folder), trace, transitions if checks else 0)
    return found


def _warm_up(setup: BufferSetup, trace: Trace) -> None:
    """Use a small buffer once, so that the library loads all of its modules before anything is measured."""
    buffer = setup.open(trace.observation_space, trace.action_space, _WARM_UP_STEPS)
    for step in islice(trace.repeated(), _WARM_UP_STEPS // 2):
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


def _measure_load(reopen: Any, folder: Path, trace: Trace, compared: int) -> dict[str, Any]:
    start = time.perf_counter()
    loaded: BufferAdapter = reopen(folder)
    loaded.sample(BATCH)
    found: dict[str, Any] = {"load_s": time.perf_counter() - start}
    if compared:
        found["loaded_rows"] = compare_rows(loaded, trace.repeated(), compared).as_dict()
    return found


def main() -> None:
    """Read the task, measure, and print the result."""
    task = json.loads(sys.argv[1])
    bench.emit({"done": 0, "total": task["transitions"]})
    warnings.simplefilter("ignore")  # Warnings of other libraries are not measured.
    bench.emit({"result": measure(**task)})


if __name__ == "__main__":
    main()

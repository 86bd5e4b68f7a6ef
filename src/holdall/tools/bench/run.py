"""Run a bench: every profile, buffer and seed, each in a fresh process, and the file of results.

Results are JSON lines, flushed one by one: a header, then one record a run. A run that fails is a record, too. Ctrl-C
keeps what is done; `--resume` runs what the header says and nothing twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from holdall.errors import ArgumentError
from holdall.tools.bench.child_process import ChildError, OnProgress, header_of, run_task
from holdall.tools.bench.settings import BenchSettings, Calibration
from holdall.tools.report.json_lines import JsonLine
from holdall.tools.report.results import BENCH_FORMAT, TrainingRun

_PHASE_SHARES = {"construct": 0.0, "fill": 0.1, "train": 0.4, "save": 0.95}
"""Where a run is when a phase begins, roughly: for the bar alone."""
MAX_LINES = 100_000


class PlannedRun(NamedTuple):
    """One run of the bench, and what names it in the results."""

    profile: str
    buffer: str
    seed: int


def header(settings: BenchSettings, calibration: Calibration, seconds: float) -> dict[str, Any]:
    """Describe what is measured, where, and how long it is expected to take."""
    measured = {"env": settings.env, "algo": settings.algo, "limit": settings.limit_bytes, "announced_seconds": seconds}
    full = {"settings": settings.as_dict(), "calibration": calibration.as_dict()}
    return header_of(BENCH_FORMAT) | measured | full


def planned_runs(settings: BenchSettings) -> list[PlannedRun]:
    """Order the runs: which comes first changes with every seed, so that no profile has the quiet hours."""
    found = []
    names = [(profile, buffer) for profile in settings.profiles for buffer in settings.buffers]
    for seed in range(settings.seeds):
        first = seed * max(len(names) // max(settings.seeds, 1), 1) % len(names)
        found += [PlannedRun(profile, buffer, seed) for profile, buffer in names[first:] + names[:first]]
    return found


def expected_seconds(settings: BenchSettings, calibration: Calibration, done: Sequence[TrainingRun] = ()) -> float:
    """Return the seconds that what is left is expected to take."""
    return sum(_expected(planned, calibration) for planned in _left(settings, done))


def _left(settings: BenchSettings, done: Sequence[TrainingRun]) -> list[PlannedRun]:
    over = {run.key for run in done if run.status in {"done", "does not fit"}}
    return [planned for planned in planned_runs(settings) if planned not in over]


def run_bench(
    settings: BenchSettings, calibration: Calibration, done: Sequence[TrainingRun], on_progress: OnProgress
) -> Iterator[TrainingRun]:
    """Run what is left; yield every run as it ends.

    `on_progress` gets the name of the run, and how many of the expected seconds are over.
    """
    behind = 0.0
    for planned in _left(settings, done):
        expected = _expected(planned, calibration)
        title = f"{planned.profile}, {planned.buffer}, seed {planned.seed}"
        yield _run(planned, settings, calibration, lambda share: on_progress(title, behind + share * expected))  # noqa: B023 used before the next one
        behind += expected
        on_progress(title, behind)


def _run(
    planned: PlannedRun, settings: BenchSettings, calibration: Calibration, on_progress: Callable[[float], None]
) -> TrainingRun:
    size = calibration.sizes[planned.profile]
    run = TrainingRun(planned.profile, planned.buffer, planned.seed, "does not fit", size.size, size.batch_size)
    if planned.buffer not in size.fits:
        why = f"{size.share:.0%} of the limit does not hold the process and one batch with this buffer"
        return replace(run, reason=why)
    task = settings.task(planned.buffer, size.size, size.batch_size, settings.timesteps, planned.seed)
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        for message in run_task(task):
            found = message.get("result", found)
            if "phase" in message:
                on_progress(_share(message))
    except ChildError as error:
        return replace(run, status="failed", reason=str(error), seconds=time.perf_counter() - start)
    names = ("steps", "filled", "steps_per_second", "peaks", "bytes_per_transition", "checkpoint")
    measured = {name: found[name] for name in names} | {"rewards": tuple(found["rewards"])}
    return replace(run, status="done", seconds=time.perf_counter() - start, **measured)


def _share(message: dict[str, Any]) -> float:
    begin: float = _PHASE_SHARES[message["phase"]]
    end = min((share for share in _PHASE_SHARES.values() if share > begin), default=1.0)
    done: float = message["done"] / max(message["total"], 1)
    return begin + (end - begin) * min(done, 1.0)


def _expected(planned: PlannedRun, calibration: Calibration) -> float:
    return calibration.seconds.get(f"{planned.profile}/{planned.buffer}", 0.0)


class ResultWriter:
    """A file of JSON lines that is written one by one; None: nowhere."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one line, and push it out."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def read_results(path: Path, form: str = BENCH_FORMAT) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a file: its header, and its other records; a last line that was cut off is passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:MAX_LINES]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"results ({path}) cannot be read ({error}); name a file that `holdall bench` wrote"
        ) from error
    records = [record for line in lines if isinstance(record := _json(line), dict)]
    if not records or records[0].get("kind") != "header" or records[0].get("format") != form:
        raise ArgumentError(f"results ({path}) do not begin with a header of {form}; name a file that it wrote")
    return records[0], records[1:]


def runs_of(records: Iterable[Mapping[str, Any]]) -> list[TrainingRun]:
    """Return the runs among some records; of those with one name the last."""
    lines = [JsonLine(dict(record), "a run of the results") for record in records if record.get("kind") == "run"]
    return list({run.key: run for run in map(TrainingRun.read, lines)}.values())


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None

"""Run a bench: every profile, buffer and seed, each in a fresh process, and the file of results.

Results are JSON lines, flushed one by one: a header, then one record a run. A run that fails is a record, too. Ctrl-C
keeps what is done; `--resume` runs what the header says and nothing twice.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from holdall.errors import ArgumentError
from holdall.tools.bench.child_process import ChildError, Task, machine, run_task, versions
from holdall.tools.bench.settings import BenchSettings, Calibration

OnProgress = Callable[[str, float], None]
_PHASE_SHARES = {"construct": 0.0, "fill": 0.1, "train": 0.4, "save": 0.95}
"""Where a run is when a phase begins, roughly: for the bar alone."""
FORMAT = "holdall-bench-1"
MAX_LINES = 100_000


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run that is to be made."""

    profile: str
    buffer: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        """What names it."""
        return self.profile, self.buffer, self.seed


def header(settings: BenchSettings, calibration: Calibration, seconds: float) -> dict[str, Any]:
    """Describe what is measured, where, and how long it was said to take."""
    return {
        "kind": "header",
        "format": FORMAT,
        "command": sys.argv[1:],
        "machine": machine(),
        "versions": versions(),
        "env": settings.env,
        "algo": settings.algo,
        "limit": settings.limit_bytes,
        "announced_seconds": seconds,
        "settings": settings.as_dict(),
        "calibration": calibration.as_dict(),
    }


def planned_runs(settings: BenchSettings) -> list[PlannedRun]:
    """Order the runs: whose turn comes first changes with every seed, so that no profile has the quiet hours."""
    found = []
    names = [(profile, buffer) for profile in settings.profiles for buffer in settings.buffers]
    for seed in range(settings.seeds):
        first = seed * max(len(names) // max(settings.seeds, 1), 1) % len(names)
        found += [PlannedRun(profile, buffer, seed) for profile, buffer in names[first:] + names[:first]]
    return found


def expected_seconds(settings: BenchSettings, calibration: Calibration, done: Sequence[TrainingRun] = ()) -> float:
    """Return the seconds that what is left is expected to take."""
    over = {run.key for run in done if run.status in {"done", "does not fit"}}
    return sum(_expected(turn, calibration) for turn in planned_runs(settings) if turn.key not in over)


def run_bench(
    settings: BenchSettings, calibration: Calibration, done: Sequence[TrainingRun], tell: OnProgress
) -> Iterator[TrainingRun]:
    """Run what is left; yield every run as it ends.

    `tell` is told what is being run, and the seconds, of those announced, that are behind.
    """
    over = {run.key for run in done if run.status in {"done", "does not fit"}}
    behind = 0.0
    for turn in planned_runs(settings):
        if turn.key in over:
            continue
        expected = _expected(turn, calibration)
        title = f"{turn.profile}, {turn.buffer}, seed {turn.seed}"
        yield _run(turn, settings, calibration, lambda share: tell(title, behind + share * expected))  # noqa: B023 used before the next turn
        behind += expected
        tell(title, behind)


def _run(
    turn: PlannedRun, settings: BenchSettings, calibration: Calibration, tell: Callable[[float], None]
) -> TrainingRun:
    size = calibration.sizes[turn.profile]
    run = TrainingRun(turn.profile, turn.buffer, turn.seed, "does not fit", size.size, size.batch_size)
    if turn.buffer not in size.fits:
        why = f"{size.share:.0%} of the limit does not hold the process and one batch with this buffer"
        return _changed(run, reason=why)
    task = Task(
        settings.env_id,
        settings.algo,
        turn.buffer,
        size.size,
        size.batch_size,
        settings.timesteps,
        turn.seed,
        settings.fills,
        settings.features,
        dict(settings.policy_kwargs),
        settings.threads,
    )
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        for message in run_task(task):
            found = message.get("result", found)
            if "phase" in message:
                tell(_share(message))
    except ChildError as error:
        return _changed(run, status="failed", reason=str(error), seconds=time.perf_counter() - start)
    names = ("steps", "filled", "steps_per_second", "peaks", "bytes_per_transition", "rewards", "checkpoint")
    measured = {name: found[name] for name in names}
    return _changed(run, status="done", seconds=time.perf_counter() - start, **measured)


def _changed(run: TrainingRun, **changes: Any) -> TrainingRun:
    return TrainingRun.from_dict(run.as_dict() | changes)


def _share(message: dict[str, Any]) -> float:
    begin: float = _PHASE_SHARES[message["phase"]]
    end = min((share for share in _PHASE_SHARES.values() if share > begin), default=1.0)
    done: float = message["done"] / max(message["total"], 1)
    return begin + (end - begin) * min(done, 1.0)


def _expected(turn: PlannedRun, calibration: Calibration) -> float:
    return calibration.seconds.get(f"{turn.profile}/{turn.buffer}", 0.0)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training, or why there is none."""

    profile: str
    buffer: str
    seed: int
    status: str  # done, failed, stopped, does not fit
    size: int  # capacity of a replay buffer, or steps of a rollout
    batch_size: int
    steps: int = 0
    filled: float = 0.0  # share of the buffer that was full before training was measured
    steps_per_second: float | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)
    bytes_per_transition: float | None = None
    rewards: tuple[float, ...] = ()
    checkpoint: Mapping[str, Any] | None = None
    seconds: float = 0.0
    reason: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What names it."""
        return self.profile, self.buffer, self.seed

    @property
    def peak_bytes(self) -> int:
        """The most that was resident in any phase."""
        return max(self.peaks.values(), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": "run"} | asdict(self) | {"peaks": dict(self.peaks), "rewards": list(self.rewards)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainingRun:
        """Make a run of a line of a file; keys that are not known are passed over."""
        known = {name: data[name] for name in cls.__slots__ if name in data}
        return cls(**known | {"rewards": tuple(data.get("rewards", ()))})


class ResultWriter:
    """A file of JSON lines that is written one by one; None: nowhere."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one line, and push it out."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def read_results(path: Path, form: str = FORMAT) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a file: its header, and its other records; a last line that was cut off is passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:MAX_LINES]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"results ({path}) cannot be read ({error}); name a file that `holdall bench` wrote"
        ) from error
    records = list(_records(lines))
    if not records or records[0].get("kind") != "header" or records[0].get("format") != form:
        raise ArgumentError(f"results ({path}) do not begin with a header of {form}; name a file that it wrote")
    return records[0], records[1:]


def runs_of(records: Iterable[Mapping[str, Any]]) -> list[TrainingRun]:
    """Return the runs among some records; of those with one name the last."""
    found = [TrainingRun.from_dict(record) for record in records if record.get("kind") == "run"]
    return list({run.key: run for run in found}.values())


def _records(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record

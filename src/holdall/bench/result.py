"""What a bench found, line by line: a header, a record a run, the rankings.

In:  records as they come.  Out: a file of JSON lines, flushed one by one, which `--resume` and `holdall report` read.
Invariant: a line that is in the file is whole; a bench that is resumed runs what the header says, and nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from holdall.errors import ArgumentError

FORMAT = "holdall-bench-1"
MOST_LINES = 100_000


@dataclass(frozen=True, slots=True)
class Run:
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
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """Make a run of a line of a file; keys that are not known are passed over."""
        known = {name: data[name] for name in cls.__slots__ if name in data}
        return cls(**known | {"rewards": tuple(data.get("rewards", ()))})


class Lines:
    """A file of JSON lines that is written one by one; None: nowhere."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one line, and push it out."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def read(path: Path, form: str = FORMAT) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a file: its header, and its other records; a last line that was cut off is passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:MOST_LINES]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"results ({path}) cannot be read ({error}); name a file that `holdall bench` wrote"
        ) from error
    records = list(_records(lines))
    if not records or records[0].get("kind") != "header" or records[0].get("format") != form:
        raise ArgumentError(f"results ({path}) do not begin with a header of {form}; name a file that it wrote")
    return records[0], records[1:]


def runs_of(records: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Return the runs among some records; of those with one name the last."""
    found = [Run.from_dict(record) for record in records if record.get("kind") == "run"]
    return list({run.key: run for run in found}.values())


def _records(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record

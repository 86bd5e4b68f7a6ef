"""Results of `holdall bench buffers`, read for a page.

In:  lines.  Out: one record a library and case, and what could not be measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdall.page.jsonlines import Line

FORMAT = "holdall-bench-buffers-1"
_MOST_RECORDS = 5_000


@dataclass(frozen=True, slots=True)
class Measured:
    """One library on one case; what was not measured is None."""

    library: str
    version: str
    case: str
    transitions: float | None
    nbytes: float | None
    add_us: float | None
    sample_ms: float | None
    save_s: float | None
    load_s: float | None
    exact: bool | None
    note: str
    laps: float | None  # how often the trace was played over, if more than once

    @property
    def bytes_per_transition(self) -> float | None:
        """What one transition takes."""
        return self.nbytes / self.transitions if self.nbytes is not None and self.transitions else None


@dataclass(frozen=True, slots=True)
class BufferResults:
    """Everything of a file that a page shows."""

    header: Line
    measured: tuple[Measured, ...]
    absent: tuple[tuple[str, str], ...]  # what, and why

    @classmethod
    def read(cls, header: Line, lines: Iterable[Line]) -> BufferResults:
        """Read the rest of a file; of records that are there twice the last counts."""
        found: dict[tuple[str, str], Measured] = {}
        absent: dict[tuple[str, str], str] = {}
        for line in lines:
            if line.kind == "buffer" and len(found) < _MOST_RECORDS:
                one = _measured(line)
                found[one.case, one.library] = one
            elif line.kind == "absent" and len(absent) < _MOST_RECORDS:
                absent[line.text("case") or "", line.text("library") or ""] = line.text("reason") or ""
        named = {" on ".join(part for part in (library, case) if part): why for (case, library), why in absent.items()}
        return cls(header, tuple(found.values()), tuple(named.items()))

    @property
    def cases(self) -> list[str]:
        """Names of the cases, in the file's order."""
        return list(dict.fromkeys(one.case for one in self.measured))


def _measured(line: Line) -> Measured:
    return Measured(
        line.text("library") or "without a name",
        line.text("version") or "",
        line.text("case") or "without a name",
        line.size("transitions"),
        line.size("bytes"),
        line.size("add_us"),
        line.size("sample_ms"),
        line.size("save_s"),
        line.size("load_s"),
        line.flag("exact"),
        line.text("note") or "",
        line.size("laps"),
    )

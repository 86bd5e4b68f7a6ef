"""What a comparison of buffers found: one record a case and a way, and the lines of its file.

The file: a header, {"kind": "round"} for every process that was run, {"kind": "buffer"} for every way once all of its
rounds are done, {"kind": "absent"} for what could not be measured. docs/bench.md describes the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

FORMAT = "holdall-bench-buffers-1"


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


def summed_up(library: str, version: str | None, case: str, transitions: int, rounds: Sequence[Any]) -> BufferResult:
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

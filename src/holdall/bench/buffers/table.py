"""The comparison in the terminal, and the same rows as Markdown.

In:  the records of a file.  Out: a table of rich, or lines of Markdown; the figures are the same in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from holdall.units import format_bytes

HEADINGS = ("", "memory", "`add`", "`sample(256)`", "save", "load", "came back right")


def rows(records: Iterable[dict[str, Any]], case: str) -> Sequence[tuple[str, ...]]:
    """Lay one case out, a row a library."""
    return [
        (
            f"{record['library']} {record['version'] or ''}".strip(),
            format_bytes(record["bytes"]),
            f"{record['add_us']:.0f} µs",
            f"{record['sample_ms']:.1f} ms",
            f"{record['save_s']:.2f} s, {format_bytes(record['file_bytes'])}",
            f"{record['load_s']:.2f} s",
            _right(record),
        )
        for record in records
        if record["kind"] == "buffer" and record["case"] == case
    ]


def _right(record: dict[str, Any]) -> str:
    if record["exact"]:
        return f"all {record['compared']:,} rows"
    if record["wrong"] == 0:
        return f"no: {record['wrong_loaded']:,} rows wrong after loading"
    return f"no: {record['wrong']:,} rows wrong"


def drawn(records: Sequence[dict[str, Any]], case: str) -> Table:
    """Draw one case."""
    count = next(r["transitions"] for r in records if r["kind"] == "buffer" and r["case"] == case)
    table = Table(title=f"{case}: {count:,} transitions", title_justify="left", title_style="bold", box=None)
    for number, heading in enumerate(HEADINGS):
        last = number == len(HEADINGS) - 1
        table.add_column(heading.strip("`"), justify="left" if number == 0 or last else "right", no_wrap=True)
    for row in rows(records, case):
        table.add_row(*row, style="" if row[-1].startswith("all") else "yellow")
    return table


def markdown(records: Sequence[dict[str, Any]], case: str) -> list[str]:
    """Write one case as lines of Markdown."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows(records, case)]
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

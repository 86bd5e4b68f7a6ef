"""Report: one self-contained HTML page from a file that holdall wrote; no requests, no frameworks, light and dark.

file -> json_lines -> recording | results -> *_page -> charts, document

In:  a path to JSON lines; the header says which kind it is.  Out: the text of a page, and a summary as plain data.
Invariant: text becomes markup only through `charts.tag`, which escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.tools.report.json_lines import JsonLine, read_lines
from holdall.tools.report.recording import RECORDING_FORMAT, Recording
from holdall.tools.report.recording_page import summarize_recording, write_recording_page
from holdall.tools.report.results import BENCH_FORMAT, BUFFERS_FORMAT, BufferResults, Results
from holdall.tools.report.results_page import summarize_bench, summarize_buffers, write_bench_page, write_buffers_page

_KINDS: dict[str, tuple[Callable[[JsonLine, Iterable[JsonLine]], Any], Callable[[Any], str], Callable[[Any], Any]]] = {
    RECORDING_FORMAT: (Recording.read, write_recording_page, summarize_recording),
    BENCH_FORMAT: (Results.read, write_bench_page, summarize_bench),
    BUFFERS_FORMAT: (BufferResults.read, write_buffers_page, summarize_buffers),
}


@dataclass(frozen=True, slots=True)
class Report:
    """A file that was read: its format, and what writes its page and its summary."""

    form: str
    page: Callable[[], str]
    summary: Callable[[], dict[str, Any]]


def read_report(path: Path) -> Report:
    """Read a file of `holdall watch --record`, `holdall bench` or `holdall bench buffers`."""
    lines = read_lines(path)
    header = next(lines, None)
    form = "" if header is None or header.kind != "header" else header.text("format") or ""
    if header is None or form not in _KINDS:
        found = (
            "is empty" if header is None else f"begins with format {form!r}" if form else "does not begin with a header"
        )
        raise ArgumentError(
            f"file ({path}) {found}; it must be what `holdall watch --record`, `holdall bench` or `holdall bench "
            f"buffers` wrote ({', '.join(_KINDS)})"
        )
    read, write_page, summarize = _KINDS[form]
    found = read(header, lines)
    return Report(form, lambda: write_page(found), lambda: summarize(found))

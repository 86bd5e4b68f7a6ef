"""Report: one self-contained HTML page from a file that holdall wrote; no requests, no frameworks, light and dark.

file -> json_lines -> recording | results | buffer_results -> *_page -> charts, document

In:  a path to JSON lines; the header says which kind it is.  Out: the text of a page, and a summary as plain data.
Invariant: text becomes markup only through `charts.tag`, which escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.tools.report.buffer_results import BUFFERS_FORMAT, BufferResults, summarize_buffers, write_buffers_page
from holdall.tools.report.json_lines import JsonLine, read_lines
from holdall.tools.report.recording import RECORDING_FORMAT, Recording
from holdall.tools.report.recording_page import summarize_recording, write_recording_page
from holdall.tools.report.results import BENCH_FORMAT, Results
from holdall.tools.report.results_page import summarize_bench, write_bench_page


@dataclass(frozen=True, slots=True)
class Report:
    """What a file says."""

    form: str
    page: Callable[[], str]
    summary: Callable[[], dict[str, Any]]


def read_report(path: Path) -> Report:
    """Read a file of `holdall watch --record`, `holdall bench` or `holdall bench buffers`."""
    lines = read_lines(path)
    header = next(lines, None)
    form = "" if header is None or header.kind != "header" else header.text("format") or ""
    makers: dict[str, Callable[[JsonLine, Iterable[JsonLine]], Report]] = {
        RECORDING_FORMAT: _recording_report,
        BENCH_FORMAT: _bench_report,
        BUFFERS_FORMAT: _buffers_report,
    }
    if header is None or form not in makers:
        found = (
            "is empty" if header is None else f"begins with format {form!r}" if form else "does not begin with a header"
        )
        raise ArgumentError(
            f"file ({path}) {found}; it must be what `holdall watch --record`, `holdall bench` or `holdall bench "
            f"buffers` wrote ({', '.join(makers)})"
        )
    return makers[form](header, lines)


def _recording_report(header: JsonLine, lines: Iterable[JsonLine]) -> Report:
    found = Recording.read(header, lines)
    return Report(RECORDING_FORMAT, lambda: write_recording_page(found), lambda: summarize_recording(found))


def _bench_report(header: JsonLine, lines: Iterable[JsonLine]) -> Report:
    found = Results.read(header, lines)
    return Report(BENCH_FORMAT, lambda: write_bench_page(found), lambda: summarize_bench(found))


def _buffers_report(header: JsonLine, lines: Iterable[JsonLine]) -> Report:
    found = BufferResults.read(header, lines)
    return Report(BUFFERS_FORMAT, lambda: write_buffers_page(found), lambda: summarize_buffers(found))

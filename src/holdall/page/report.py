"""Any file that holdall wrote, as a page or in short.

In:  a path to JSON lines.  Out: the text of a page, and the same as plain data; which kind it is, its header says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.page import buffer_results_page, recording_page, results_page
from holdall.page import recording as recordings
from holdall.page import results as benches
from holdall.page.buffer_results import FORMAT as BUFFERS
from holdall.page.buffer_results import BufferResults
from holdall.page.jsonlines import Line, read_lines


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
    makers: dict[str, Callable[[Line, Iterable[Line]], Report]] = {
        recordings.FORMAT: _recording,
        benches.FORMAT: _results,
        BUFFERS: _buffers,
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


def _recording(header: Line, lines: Iterable[Line]) -> Report:
    found = recordings.Recording.read(header, lines)
    return Report(recordings.FORMAT, lambda: recording_page.page(found), lambda: recording_page.summary(found))


def _results(header: Line, lines: Iterable[Line]) -> Report:
    found = benches.Results.read(header, lines)
    return Report(benches.FORMAT, lambda: results_page.page(found), lambda: results_page.summary(found))


def _buffers(header: Line, lines: Iterable[Line]) -> Report:
    found = BufferResults.read(header, lines)
    return Report(BUFFERS, lambda: buffer_results_page.page(found), lambda: buffer_results_page.summary(found))

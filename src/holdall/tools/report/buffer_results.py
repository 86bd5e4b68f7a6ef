"""Results of `holdall bench buffers` and their page: bytes, times, and whether the data came back right.

In:  lines.  Out: one record for each library and case, the page, and a summary as plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdall.tools.report import charts
from holdall.tools.report.charts import Markup, number, or_dash, tag
from holdall.tools.report.document import Tile, document, section, table, tiles, toned_word
from holdall.tools.report.json_lines import JsonLine
from holdall.tools.report.results_page import machine_section
from holdall.units import format_bytes, format_seconds

BUFFERS_FORMAT = "holdall-bench-buffers-1"
_MOST_RECORDS = 5_000
_OURS = "holdall"
_EXACT = {True: "every row came back right", False: "rows came back wrong", None: "not compared"}


@dataclass(frozen=True, slots=True)
class BufferFigures:
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

    header: JsonLine
    measured: tuple[BufferFigures, ...]
    absent: tuple[tuple[str, str], ...]  # what, and why

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> BufferResults:
        """Read the rest of a file; of records that are there twice the last counts."""
        found: dict[tuple[str, str], BufferFigures] = {}
        absent: dict[tuple[str, str], str] = {}
        for line in lines:
            if line.kind == "buffer" and len(found) < _MOST_RECORDS:
                one = _read_figures(line)
                found[one.case, one.library] = one
            elif line.kind == "absent" and len(absent) < _MOST_RECORDS:
                absent[line.text("case") or "", line.text("library") or ""] = line.text("reason") or ""
        named = {" on ".join(part for part in (library, case) if part): why for (case, library), why in absent.items()}
        return cls(header, tuple(found.values()), tuple(named.items()))

    @property
    def cases(self) -> list[str]:
        """Names of the cases, in the file's order."""
        return list(dict.fromkeys(one.case for one in self.measured))


def _read_figures(line: JsonLine) -> BufferFigures:
    values: dict[str, Any] = {name: line.text(name) or "without a name" for name in ("library", "case")}
    values |= {name: line.text(name) or "" for name in ("version", "note")}
    values |= {name: line.size(name) for name in ("transitions", "add_us", "sample_ms", "save_s", "load_s", "laps")}
    return BufferFigures(**values, nbytes=line.size("bytes"), exact=line.flag("exact"))


def _bytes(value: float) -> str:
    return f"{value:,.0f} B" if value < 100_000 else format_bytes(value)


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("memory of a transition", "bytes_per_transition", _bytes),
    ("add, of one step", "add_us", lambda value: f"{number(value)} µs"),
    ("sample, of one batch", "sample_ms", lambda value: f"{number(value)} ms"),
    ("save", "save_s", format_seconds),
    ("load", "load_s", format_seconds),
)


def write_buffers_page(results: BufferResults) -> str:
    """Write the page."""
    sections = [_tiles(results), *(_case(results, case) for case in results.cases), _not_measured(results)]
    facts = [f"{len(results.cases)} cases", f"{len({one.library for one in results.measured})} libraries"]
    return document("Replay buffers alone", "bench buffers", facts, (
        part for part in [*sections, machine_section(results.header)] if part
    ))  # fmt: skip


def summarize_buffers(results: BufferResults) -> dict[str, Any]:
    """Return the page in short, as plain data."""
    return {
        "buffers": [asdict(one) | {"bytes_per_transition": one.bytes_per_transition} for one in results.measured],
        "absent": [{"what": what, "why": why} for what, why in results.absent],
    }


def _figures_of_case(results: BufferResults, case: str) -> list[BufferFigures]:
    return [one for one in results.measured if one.case == case]


def _tiles(results: BufferResults) -> Markup:
    shown = []
    for case in results.cases[:4]:
        known = [one for one in _figures_of_case(results, case) if one.bytes_per_transition is not None and one.exact]
        if known:
            least = min(known, key=lambda one: one.bytes_per_transition or 0.0)
            size = _bytes(least.bytes_per_transition or 0.0)
            shown.append(Tile(f"{case}, least and exact", size, f"a transition, {least.library}"))
    wrong = [one for one in results.measured if one.exact is False]
    tone = "error" if wrong else "good"
    shown.append(Tile("data came back wrong", f"{len(wrong)} of {len(results.measured)}", "library and case", tone))
    return tiles(shown)


def _case(results: BufferResults, case: str) -> Markup:
    known = _figures_of_case(results, case)
    drawn = [_chart(known, *figure) for figure in _FIGURES]
    count = max((one.transitions or 0.0 for one in known), default=0.0)
    lead = f"{count:,.0f} transitions. Shorter is better, if the data came back right."
    laps = max((one.laps or 0.0 for one in known), default=0.0)
    if laps > 1:
        lead += f" They were played {laps:.1f} times over: a buffer that shares what repeats gains by that."
    keys = charts.legend_of((("holdall", "c0"), ("others", "c5"), ("rows came back wrong", "unused")))
    return section(case, keys, tag("div", *drawn, class_="columns wide"), _table(known), lead=lead)


def _chart(known: Sequence[BufferFigures], name: str, figure: str, written: Callable[[float], str]) -> Markup | None:
    values = [getattr(one, figure) for one in known]
    largest = max((value for value in values if value is not None), default=None)
    if largest is None:
        return None
    scale = charts.bytes_scale(largest) if written is _bytes else charts.number_scale(largest)
    rows = []
    for one, value in zip(known, values, strict=True):
        text = or_dash(value, written)
        colour = "unused" if one.exact is False else "c0" if one.library.startswith(_OURS) else "c5"
        tip = f"{one.library} {one.version}\n{name}: {text}\n{_EXACT[one.exact]}"
        rows.append(charts.BarRow(one.library, [] if value is None else [charts.BarPiece(value, colour, tip)], text))
    return tag("div", tag("h4", name.capitalize()), charts.bars(rows, scale, name))


def _table(known: Sequence[BufferFigures]) -> Markup:
    heads = ["library", "version", "a transition", "add", "sample", "save", "load", "exact", "note"]
    exact = {None: tag("span", "not compared"), True: toned_word("yes", "good"), False: toned_word("no", "error")}
    rows = []
    for one in known:
        figures = [or_dash(getattr(one, figure), written) for _, figure, written in _FIGURES]
        rows.append([one.library, one.version or "-", *figures, exact[one.exact], one.note])
    return table(heads, rows, "All figures", words=2, prose=True)


def _not_measured(results: BufferResults) -> Markup | None:
    items = [tag("li", f"{what}: {why}" if why else what) for what, why in results.absent]
    return section("Not measured", tag("ul", *items, class_="notes")) if items else None

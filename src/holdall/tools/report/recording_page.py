"""The page of a recorded run: memory over time, verdicts, peaks by phase, buffers, the GPU.

In:  a `Recording`.  Out: the page, and a summary as plain data.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.tools.report import RECORDING_FORMAT, charts
from holdall.tools.report.charts import Markup, joined, number, tag
from holdall.tools.report.document import card, cards, details, document, section, sentence, table, tile, tiles
from holdall.tools.report.recording import GROUP_TITLES, NAMED_LIMIT, RecordedPart, RecordedVerdict, Recording
from holdall.units import counted, format_bytes, format_seconds

_MOST_POINTS = 600
_MOST_ROWS = 120
_MOST_BARS = 40
_NAMED_LIMIT_IN_SIGHT = 6.0
"""A limit that the user names for a run is drawn up to this many times the peak."""
_NEAR = 0.9
_COLOURS = {name: f"c{at}" for at, name in enumerate(GROUP_TITLES)}
_NOT_MEASURED = "not measured"
_PHASES_LEAD = (
    "The most that the process itself had resident in each phase. Pages that it shares with others count whole here, "
    "and in proportion above."
)
_SIZES = frozenset(
    {
        "bytes",
        "final",
        "final_pss",
        "grown",
        "high",
        "left",
        "low",
        "resident",
        "retained",
        "stacks_resident",
        "stacks_virtual",
    }
)
_RATES = frozenset({"slope", "low", "high"})
_COUNTS_WITH_A_BUFFER = frozenset({"left", "slope"})


def write_recording_page(recording: Recording) -> str:
    """Write the page."""
    sections = [_tiles(recording), _verdicts(recording), _memory(recording), _phases(recording), _buffers(recording)]
    sections += [_gpu(recording), _speed(recording), _parts(recording), _events(recording)]
    return document(_title(recording), "memory of a run", _facts(recording), (part for part in sections if part))


def summarize_recording(recording: Recording) -> dict[str, Any]:
    """Return the page in short, as plain data."""
    pss = recording.pss
    limit = recording.limit
    return {
        "readings": len(pss),
        "seconds": float(recording.times[-1]) if len(pss) else 0.0,
        "peak_bytes": int(recording.peak) if len(pss) else None,
        "last_bytes": int(pss[-1]) if len(pss) else None,
        "limit_bytes": None if limit is None else int(limit[0]),
        "groups": {name: int(values[-1]) for name, values in recording.groups.items() if len(values)},
        "groups_at_peak": {
            name: sum(int(part.resident) for part in recording.parts if part.group == name) for name in recording.groups
        },
        "buffers": [
            {
                "name": part.name,
                "resident_bytes": int(part.resident),
                "allocated_bytes": _whole(part.allocated),
                "fill": part.fill,
            }
            for part in recording.parts
            if part.group == "buffers"
        ],
        "phases": [
            {
                "name": phase.name,
                "peak_bytes": _whole(phase.peak),
                "count": _whole(phase.count),
                "seconds": phase.seconds,
            }
            for phase in recording.phases.values()
        ],
        "verdicts": [
            {
                "name": verdict.name,
                "severity": verdict.severity,
                "text": verdict.text,
                "remedy": verdict.remedy,
                "evidence": dict(verdict.evidence),
                "times": verdict.times,
            }
            for verdict in recording.graded()
        ],
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _title(recording: Recording) -> str:
    """Name the script that ran, or else the program or the process."""
    command = recording.header.texts("command")
    pid = recording.header.size("pid")
    if not command:
        return f"process {pid:.0f}" if pid else "a recorded run"
    module = command[command.index("-m") + 1 :] if "-m" in command[:-1] else []
    script = next((word for word in command if word.endswith(".py")), module[0] if module else command[0])
    return script.replace("\\", "/").rpartition("/")[2] or script


def _facts(recording: Recording) -> list[str]:
    header = recording.header
    started = header.number("started")
    pid = header.size("pid")
    interval = header.size("interval")
    readings = len(recording.pss)
    return [
        shlex.join(header.texts("command")),
        f"on {header.text('host')}" if header.text("host") else "",
        f"process {pid:.0f}" if pid else "",
        _moment(started) if started is not None else "",
        counted(readings, "reading") + (f", one every {format_seconds(interval)}" if interval else ""),
        header.text("system") or "",
    ]


def _moment(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%d %B %Y, %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def _tiles(recording: Recording) -> Markup:
    pss = recording.pss
    limit = recording.limit
    if not len(pss):
        return tag("p", "No reading was recorded.", class_="lead")
    peak = recording.peak
    highest = float(pss.max())
    tone = ""
    held = _NOT_MEASURED
    used = ""
    if limit:
        share = peak / limit[0]
        held = format_bytes(limit[0])
        used = f"{limit[1]}, {share:.0%} used at most"
        if share >= _NEAR:
            tone = "error" if share >= 1 else "warning"
    note = _at_peak(recording)
    if peak > highest:  # The kernel also counts peaks between two readings.
        note = f"between two readings; {format_bytes(highest)} at the highest one, {note}"
    shown = [
        tile("peak", format_bytes(peak), note, tone),
        tile("limit", held, used),
        tile("at the end", format_bytes(pss[-1]), f"after {format_seconds(recording.times[-1])}"),
    ]
    buffers = [part for part in recording.parts if part.group == "buffers"]
    if buffers:
        resident = sum(part.resident for part in buffers)
        allocated = sum(part.allocated or part.resident for part in buffers)
        shown.append(tile("buffers at the peak", format_bytes(resident), f"of {format_bytes(allocated)} allocated"))
    steps, rate = (np.array(recording.series[name]) for name in ("step", "steps_per_second"))
    if np.isfinite(steps).any():
        speed = f"{number(float(np.nanmedian(rate)))} a second" if np.isfinite(rate).any() else ""
        shown.append(tile("steps", f"{np.nanmax(steps):,.0f}", speed))
    return tiles(shown)


def _at_peak(recording: Recording) -> str:
    return f"after {format_seconds(recording.times[int(recording.pss.argmax())])}"


def _verdicts(recording: Recording) -> Markup:
    found = [_card(recording, verdict) for verdict in recording.graded()]
    if not found:
        found = [card("good", "Nothing to report", "No verdict was recorded for this run.")]
    return section("Verdicts", cards(*found))


def _card(recording: Recording, verdict: RecordedVerdict) -> Markup:
    moment = recording.since_start(verdict.time)
    first = recording.since_start(verdict.first_time)
    when = "" if moment is None else f"after {format_seconds(moment)}"
    if verdict.times > 1 and first is not None:
        when += f", {verdict.times} times, first after {format_seconds(first)}"
    name = verdict.name.replace("_", " ").capitalize()
    evidence = list(evidence_in_words(verdict.evidence))
    return card(verdict.severity, name, sentence(verdict.text), evidence, sentence(verdict.remedy), when)


def _memory(recording: Recording) -> Markup | None:
    pss = recording.pss
    if not len(pss):
        return None
    bands = {
        GROUP_TITLES[name]: (_COLOURS[name], np.array(values))
        for name, values in recording.groups.items()
        if any(values)
    }
    limit = recording.limit
    named = limit and (limit[0], f"limit {format_bytes(limit[0])}, {limit[1]}")
    thinned = "" if len(pss) <= _MOST_POINTS else f" {len(pss):,} readings are thinned; peaks and lows are kept."
    lead = f"Proportional set size of the process and its children: all parts add up to it.{thinned}"
    label = "Memory over time, by what holds it"
    sight = _NAMED_LIMIT_IN_SIGHT if limit and limit[1] == NAMED_LIMIT else charts.LIMIT_IN_SIGHT
    plot = _stacked_bytes(recording, pss, bands, named, "Memory over time", label, flags=True, sight=sight)
    return section("Memory over time", plot, lead=lead)


def _stacked_bytes(
    recording: Recording,
    total: charts.Floats,
    bands: dict[str, tuple[str, charts.Floats]],
    limit: tuple[float, str] | None,
    caption: str,
    label: str,
    *,
    flags: bool = False,
    sight: float = charts.LIMIT_IN_SIGHT,
) -> Markup:
    """Plot parts of a total of bytes, and write some readings as a table, always the first and the last one."""
    chosen = charts.thinned_positions(total, _MOST_POINTS)
    layers = [charts.PlotLayer(name, colour, values[chosen]) for name, (colour, values) in bands.items()]
    stacked = np.sum([layer.values for layer in layers], axis=0) if layers else total
    scale = charts.limited_scale(max(float(total.max()), float(stacked.max()), 1.0), limit and limit[0], sight)
    plot = _over_time(recording, chosen, layers, scale, label, limit=limit, flags=flags)
    times = recording.times
    lines = []
    for row in np.unique(np.linspace(0, len(chosen) - 1, min(_MOST_ROWS, len(chosen))).astype(np.int64)):
        at = chosen[row]
        step = recording.series["step"][at]
        held = [format_bytes(values[row]) for values in (total[chosen], *(layer.values for layer in layers))]
        lines.append([format_seconds(times[at]), f"{step:,.0f}" if np.isfinite(step) else "-", *held])
    heads = ["after", "step", "all", *bands]
    return joined(plot, details("These figures as a table", table(heads, lines, caption)))


def _over_time(
    recording: Recording,
    chosen: NDArray[np.int64],
    layers: Sequence[charts.PlotLayer],
    scale: charts.Scale,
    label: str,
    *,
    limit: tuple[float, str] | None = None,
    flags: bool = False,
    stacked: bool = True,
) -> Markup:
    times = recording.times
    axis = charts.seconds_scale(max(float(times[-1]), 1e-9))
    steps = [recording.series["step"][at] for at in chosen]
    heads = [
        f"after {format_seconds(times[at])}" + (f", step {step:,.0f}" if np.isfinite(step) else "")
        for at, step in zip(chosen, steps, strict=True)
    ]
    ticks = [(axis.share(value), axis.text(value)) for value in axis.ticks]
    noted = list(_flags(recording, axis)) if flags else []
    titles = "time since the first reading", "memory" if scale.unit == "bytes" else label
    plot = charts.Plot(label, times[chosen] / axis.end, heads, layers, scale, ticks, stacked, limit, noted, *titles)
    return plot.markup()


def _flags(recording: Recording, axis: charts.Scale) -> Iterator[tuple[float, str, str]]:
    peak = int(recording.pss.argmax())
    yield axis.share(recording.times[peak]), "info", f"peak, {_at_peak(recording)}\n{format_bytes(recording.pss[peak])}"
    for verdict in recording.verdicts.values():
        moment = recording.since_start(verdict.first_time)
        if moment is not None:
            text = f"{verdict.name.replace('_', ' ')}, after {format_seconds(moment)}\n{verdict.text}"
            yield axis.share(moment), verdict.severity, text
    for time, text in recording.events[:_MOST_BARS]:
        moment = recording.since_start(time)
        if moment is not None:
            yield axis.share(moment), "info", f"after {format_seconds(moment)}\n{text}"


def _phases(recording: Recording) -> Markup | None:
    peaks = [(phase, phase.peak) for phase in recording.phases.values() if phase.peak is not None]
    if not peaks:
        return None
    limit = recording.limit
    most = max(peak for _, peak in peaks)
    rows = []
    for phase, peak in peaks[:_MOST_BARS]:
        text = format_bytes(peak)
        note = _count_and_time(phase.count, phase.seconds)
        piece = charts.BarPiece(peak, "c0", f"{phase.name}\npeak {text}")
        rows.append(charts.BarRow(phase.name, [piece], text, note, strong=peak == most))
    named = limit and (limit[0], f"limit {format_bytes(limit[0])}")
    chart = charts.bars(rows, charts.limited_scale(most, limit and limit[0]), "Peak memory by phase", limit=named)
    return section("Peaks by phase", chart, lead=_PHASES_LEAD)


def _count_and_time(count: float | None, seconds: float | None) -> str:
    parts = [] if count is None else ["once" if count == 1 else f"{count:,.0f} times"]
    return ", ".join(parts + ([format_seconds(seconds)] if seconds is not None else []))


def _buffers(recording: Recording) -> Markup | None:
    buffers = sorted((part for part in recording.parts if part.group == "buffers"), key=_allocated, reverse=True)
    if not buffers:
        return None
    scale = charts.bytes_scale(max(max(_allocated(part), part.resident) for part in buffers))
    rows = [_buffer(part) for part in buffers[:_MOST_BARS]]
    legend = [("resident", "c0"), ("allocated, not touched yet", "unused")]
    left = f" The {_MOST_BARS} largest of {len(buffers)}." if len(buffers) > _MOST_BARS else ""
    when = f"At the peak, {_at_peak(recording)}."
    lead = f"{when} Pages that were never written to cost nothing, and will as the buffer fills.{left}"
    chart = charts.bars(rows, scale, "Buffers, resident beside allocated", legend=legend)
    return section("Buffers at the peak", chart, lead=lead)


def _allocated(part: RecordedPart) -> float:
    return part.allocated if part.allocated is not None else part.resident


def _buffer(part: RecordedPart) -> charts.BarRow:
    untouched = max(_allocated(part) - part.resident, 0.0)
    tip = f"{part.name}\n{format_bytes(part.resident)} resident\n{format_bytes(_allocated(part))} allocated"
    fill = "" if part.fill is None else f"{min(part.fill, 1.0):.0%} full"
    text = f"{format_bytes(part.resident)} of {format_bytes(_allocated(part))}"
    return charts.BarRow(
        part.name, [charts.BarPiece(part.resident, "c0", tip), charts.BarPiece(untouched, "unused", tip)], text, fill
    )


def _gpu(recording: Recording) -> Markup | None:
    columns = [np.array(values) for name, values in recording.gpu.items() if name != "limit"]
    if not np.isfinite(columns).any():
        return None
    requested, allocated, reserved, fragmented, other = map(np.nan_to_num, columns)
    kinds = {
        "tensors": ("c0", np.where(requested > 0, requested, allocated)),
        "rounded up to blocks": ("c1", np.where(requested > 0, np.maximum(allocated - requested, 0.0), 0.0)),
        "kept free, in pieces": ("c3", np.minimum(fragmented, np.maximum(reserved - allocated, 0.0))),
        "kept free": ("c2", np.maximum(reserved - allocated - fragmented, 0.0)),
        "context and libraries": ("c5", other),
    }
    total = np.sum([values for _, values in kinds.values()], axis=0)
    bands = {name: kind for name, kind in kinds.items() if kind[1].any()}
    limit = recording.vram
    named = None if limit is None else (limit, f"the GPU's memory, {format_bytes(limit)}")
    plot = _stacked_bytes(recording, total, bands, named, "GPU memory over time", "GPU memory over time")
    lead = "Bytes of tensors, bytes that torch's pool keeps besides them, and the rest of this process on the GPU."
    return section("GPU memory", plot, lead=lead)


def _speed(recording: Recording) -> Markup | None:
    shown = []
    for name, key, unit in (
        ("steps a second", "steps_per_second", ""),
        ("waiting for memory, % of the time", "pressure", " %"),
    ):
        column = np.array(recording.series[key])
        if not np.isfinite(column).any():
            continue
        filled = np.nan_to_num(column)
        chosen = charts.thinned_positions(filled, _MOST_POINTS)
        scale = charts.number_scale(float(filled.max()))
        plot = _over_time(recording, chosen, [charts.PlotLayer(name, "c0", column[chosen])], scale, name, stacked=False)
        median = f"median {number(float(np.nanmedian(column)))}{unit}"
        shown.append(tag("div", tag("h4", f"{name.capitalize()}, {median}"), plot, class_="small"))
    return section("Speed", tag("div", *shown, class_="columns")) if shown else None


def _parts(recording: Recording) -> Markup | None:
    if not recording.parts:
        return None
    largest = sorted(recording.parts, key=lambda part: part.resident, reverse=True)[: 2 * _MOST_ROWS]
    total = sum(part.resident for part in recording.parts) or 1.0
    rows = []
    for part in largest:
        allocated = _NOT_MEASURED if part.allocated is None else format_bytes(part.allocated)
        held = [format_bytes(part.resident), f"{part.resident / total:.1%}"]
        rows.append([part.name, GROUP_TITLES[part.group], *held, allocated])
    figures = table(["part", "group", "resident", "share", "allocated"], rows, "Parts at the peak", words=2)
    return section("Everything at the peak", details(f"{counted(len(rows), 'part')}, the largest first", figures))


def _events(recording: Recording) -> Markup | None:
    if not recording.events:
        return None
    moments = [(recording.since_start(time), text) for time, text in recording.events]
    rows = [["-" if moment is None else format_seconds(moment), text] for moment, text in moments]
    return section("Events", table(["after", "what happened"], rows, "Events", words=2))


def evidence_in_words(evidence: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield every piece of evidence in words."""
    values = dict(evidence)
    unit = values.get("unit")
    for name, value in evidence:
        if name != "unit" and value is not None:
            yield name.replace("_", " "), _evidence_text(name, value, unit, "buffer" in values)


def _evidence_text(name: str, value: Any, unit: Any, of_a_buffer: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if isinstance(unit, str) and name in _RATES:
        return f"{format_bytes(value)} {unit}"
    if name == "fill":
        return f"{value:.0%}"
    if name == "seconds":
        return format_seconds(value)
    if (name in _SIZES or name.endswith("_bytes")) and not (of_a_buffer and name in _COUNTS_WITH_A_BUFFER):
        return format_bytes(value)
    return number(value)


KINDS = {RECORDING_FORMAT: (Recording.read, write_recording_page, summarize_recording)}
"""By format: the functions that read a file, write its page and write its summary."""

"""The page of a recorded run: memory over time, verdicts, peaks by phase, buffers, the GPU.

In:  a `Recording`.  Out: the page, and a summary as plain data.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from holdall.tools.report import RECORDING_FORMAT
from holdall.tools.report.page import (
    LIMIT_IN_SIGHT,
    BarPiece,
    BarRow,
    Block,
    Floats,
    Limit,
    PlotLayer,
    Tone,
    bars,
    card,
    cards,
    columns,
    number,
    plot,
    section,
    sentence,
    table,
    thinned_positions,
    tile,
    tiles,
    write_page,
)
from holdall.tools.report.recording import GROUP_TITLES, NAMED_LIMIT, RecordedPart, RecordedVerdict, Recording
from holdall.units import counted, format_bytes, format_seconds

_MOST_POINTS = 600
_MOST_ROWS = 240
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
    parts = (_tiles, _verdicts, _memory, _phases, _buffers, _gpu, _speed, _parts, _events)
    sections = [part(recording) for part in parts]
    return write_page(_title(recording), "memory of a run", _facts(recording), sections)


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


def _tiles(recording: Recording) -> Block:
    pss = recording.pss
    limit = recording.limit
    if not len(pss):
        return section("", lead="No reading was recorded.")
    peak = recording.peak
    highest = float(pss.max())
    tone: Tone = ""
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
    return section("", tiles(*shown))


def _at_peak(recording: Recording) -> str:
    return f"after {format_seconds(recording.times[int(recording.pss.argmax())])}"


def _verdicts(recording: Recording) -> Block:
    found = [_card(recording, verdict) for verdict in recording.graded()]
    if not found:
        found = [card("good", "Nothing to report", "No verdict was recorded for this run.")]
    return section("Verdicts", cards(*found))


def _card(recording: Recording, verdict: RecordedVerdict) -> Block:
    moment = recording.since_start(verdict.time)
    first = recording.since_start(verdict.first_time)
    when = "" if moment is None else f"after {format_seconds(moment)}"
    if verdict.times > 1 and first is not None:
        when += f", {verdict.times} times, first after {format_seconds(first)}"
    name = verdict.name.replace("_", " ").capitalize()
    evidence = evidence_in_words(verdict.evidence)
    return card(verdict.severity, name, sentence(verdict.text), evidence, sentence(verdict.remedy), when)


def _memory(recording: Recording) -> Block | None:
    pss = recording.pss
    if not len(pss):
        return None
    bands = [
        PlotLayer(GROUP_TITLES[name], _COLOURS[name], np.array(values))
        for name, values in recording.groups.items()
        if any(values)
    ]
    limit = recording.limit
    named = limit and (limit[0], f"limit {format_bytes(limit[0])}, {limit[1]}")
    thinned = "" if len(pss) <= _MOST_POINTS else f" {len(pss):,} readings are thinned; peaks and lows are kept."
    lead = f"Proportional set size of the process and its children: all parts add up to it.{thinned}"
    sight = _NAMED_LIMIT_IN_SIGHT if limit and limit[1] == NAMED_LIMIT else LIMIT_IN_SIGHT
    shown = _plot(recording, pss, bands, "Memory over time", limit=named, flags=_flags(recording), sight=sight)
    return section("Memory over time", shown, lead=lead)


def _plot(
    recording: Recording,
    levels: Floats,
    layers: Sequence[PlotLayer],
    label: str,
    *,
    unit: Literal["bytes", "number"] = "bytes",
    limit: Limit | None = None,
    sight: float = LIMIT_IN_SIGHT,
    flags: Iterable[tuple[float, str, str]] = (),
) -> Block:
    """Plot layers over time. `levels` decides which readings of a long recording are drawn."""
    chosen = thinned_positions(levels, _MOST_POINTS)
    times = recording.times[chosen]
    heads = []
    for at in chosen:
        step = recording.series["step"][at]
        reached = f", step {step:,.0f}" if np.isfinite(step) else ""
        heads.append(f"after {format_seconds(recording.times[at])}{reached}")
    drawn = [PlotLayer(layer.name, layer.colour, layer.values[chosen]) for layer in layers]
    is_bytes = unit == "bytes"
    return plot(
        label, times, heads, drawn, unit, stacked=is_bytes, small=not is_bytes, limit=limit, sight=sight, flags=flags
    )


def _flags(recording: Recording) -> Iterator[tuple[float, str, str]]:
    peak = int(recording.pss.argmax())
    text = f"peak, {_at_peak(recording)}\n{format_bytes(recording.pss[peak])}"
    yield float(recording.times[peak]), "info", text
    for verdict in recording.verdicts.values():
        moment = recording.since_start(verdict.first_time)
        if moment is not None:
            text = f"{verdict.name.replace('_', ' ')}, after {format_seconds(moment)}\n{verdict.text}"
            yield moment, verdict.severity, text
    for time, text in recording.events[:_MOST_BARS]:
        moment = recording.since_start(time)
        if moment is not None:
            yield moment, "info", f"after {format_seconds(moment)}\n{text}"


def _phases(recording: Recording) -> Block | None:
    peaks = [(phase, phase.peak) for phase in recording.phases.values() if phase.peak is not None]
    if not peaks:
        return None
    limit = recording.limit
    most = max(peak for _, peak in peaks)
    rows = []
    for phase, peak in peaks[:_MOST_BARS]:
        text = format_bytes(peak)
        note = _count_and_time(phase.count, phase.seconds)
        piece = BarPiece(peak, "c0", f"{phase.name}\npeak {text}")
        rows.append(BarRow(phase.name, [piece], text, note, is_strong=peak == most))
    named = limit and (limit[0], f"limit {format_bytes(limit[0])}")
    return section("Peaks by phase", bars(rows, "Peak memory by phase", "bytes", limit=named), lead=_PHASES_LEAD)


def _count_and_time(count: float | None, seconds: float | None) -> str:
    parts = [] if count is None else ["once" if count == 1 else f"{count:,.0f} times"]
    return ", ".join(parts + ([format_seconds(seconds)] if seconds is not None else []))


def _buffers(recording: Recording) -> Block | None:
    buffers = sorted((part for part in recording.parts if part.group == "buffers"), key=_allocated, reverse=True)
    if not buffers:
        return None
    rows = [_buffer(part) for part in buffers[:_MOST_BARS]]
    left = f" The {_MOST_BARS} largest of {len(buffers)}." if len(buffers) > _MOST_BARS else ""
    when = f"At the peak, {_at_peak(recording)}."
    lead = f"{when} Pages that were never written to cost nothing, and will as the buffer fills.{left}"
    keys = [("resident", "c0"), ("allocated, not touched yet", "unused")]
    return section("Buffers at the peak", bars(rows, "Buffers, resident and allocated", "bytes", keys=keys), lead=lead)


def _allocated(part: RecordedPart) -> float:
    return part.allocated if part.allocated is not None else part.resident


def _buffer(part: RecordedPart) -> BarRow:
    untouched = max(_allocated(part) - part.resident, 0.0)
    tip = f"{part.name}\n{format_bytes(part.resident)} resident\n{format_bytes(_allocated(part))} allocated"
    fill = "" if part.fill is None else f"{min(part.fill, 1.0):.0%} full"
    text = f"{format_bytes(part.resident)} of {format_bytes(_allocated(part))}"
    return BarRow(part.name, [BarPiece(part.resident, "c0", tip), BarPiece(untouched, "unused", tip)], text, fill)


def _gpu(recording: Recording) -> Block | None:
    columns_of_gpu = [np.array(values) for name, values in recording.gpu.items() if name != "limit"]
    if not np.isfinite(columns_of_gpu).any():
        return None
    requested, allocated, reserved, fragmented, other = map(np.nan_to_num, columns_of_gpu)
    free = np.maximum(reserved - allocated, 0.0)
    layers = [
        PlotLayer("tensors", "c0", np.where(requested > 0, requested, allocated)),
        PlotLayer("rounded up to blocks", "c1", np.where(requested > 0, np.maximum(allocated - requested, 0.0), 0.0)),
        PlotLayer("kept free, in pieces", "c3", np.minimum(fragmented, free)),
        PlotLayer("kept free", "c2", np.maximum(free - fragmented, 0.0)),
        PlotLayer("context and libraries", "c5", other),
    ]
    total: Floats = np.sum([layer.values for layer in layers], axis=0)
    limit = recording.vram
    named = None if limit is None else (limit, f"the GPU's memory, {format_bytes(limit)}")
    shown = _plot(recording, total, [one for one in layers if one.values.any()], "GPU memory over time", limit=named)
    lead = "Bytes of tensors, bytes that torch's pool keeps besides them, and the rest of this process on the GPU."
    return section("GPU memory", shown, lead=lead)


def _speed(recording: Recording) -> Block | None:
    shown = []
    for name, key, unit in (
        ("steps a second", "steps_per_second", ""),
        ("waiting for memory, % of the time", "pressure", " %"),
    ):
        series = np.array(recording.series[key])
        if np.isfinite(series).sum() < 2:  # A curve needs two points.
            continue
        title = f"{name.capitalize()}, median {number(float(np.nanmedian(series)))}{unit}"
        shown.append(
            (title, _plot(recording, np.nan_to_num(series), [PlotLayer(name, "c0", series)], name, unit="number"))
        )
    return section("Speed", columns(*shown)) if shown else None


def _parts(recording: Recording) -> Block | None:
    if not recording.parts:
        return None
    largest = sorted(recording.parts, key=lambda part: part.resident, reverse=True)[:_MOST_ROWS]
    total = sum(part.resident for part in recording.parts) or 1.0
    rows = []
    for part in largest:
        allocated = _NOT_MEASURED if part.allocated is None else format_bytes(part.allocated)
        held = [format_bytes(part.resident), f"{part.resident / total:.1%}"]
        rows.append([part.name, GROUP_TITLES[part.group], *held, allocated])
    heads = ["part", "group", "resident", "share", "allocated"]
    fold = f"{counted(len(rows), 'part')}, the largest first"
    return section("Everything at the peak", table(heads, rows, "Parts at the peak", words=2, fold=fold))


def _events(recording: Recording) -> Block | None:
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
        return f"{number(value)} {unit}"
    if name == "left" and of_a_buffer and isinstance(unit, str):
        return f"{number(value)} steps" if unit.endswith("step") else format_seconds(value)
    if name == "grown" and isinstance(unit, str) and unit.startswith("objects"):
        return f"{number(value)} objects"
    if name == "fill":
        return f"{value:.0%}"
    if name == "seconds":
        return format_seconds(value)
    if (name in _SIZES or name.endswith("_bytes")) and not (of_a_buffer and name in _COUNTS_WITH_A_BUFFER):
        return format_bytes(value)
    return number(value)


KINDS = {RECORDING_FORMAT: (Recording.read, write_recording_page, summarize_recording)}
"""By format: the functions that read a file, write its page and write its summary."""

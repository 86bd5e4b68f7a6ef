"""The page of a recorded run: memory over time, verdicts, peaks by phase, buffers, the GPU.

In:  a `Recording`.  Out: the page, and a summary as plain data.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from holdall.tools.part_groups import GROUP_BY_NAME, PART_GROUPS
from holdall.tools.recording_format import BYTES, RECORDING_FORMAT, SECONDS, SHARE, TIME
from holdall.tools.report.page import (
    MAX_LIMIT_RATIO,
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
    choose_positions,
    columns,
    format_number,
    format_sentence,
    plot,
    section,
    table,
    tile,
    tiles,
    write_page,
)
from holdall.tools.report.recording import GIVEN_LIMIT, RecordedEvidence, RecordedPart, RecordedVerdict, Recording
from holdall.units import count_noun, format_bytes, format_seconds

_MAX_POINTS = 600
_MAX_ROWS = 240
_MAX_BARS = 40
_MAX_GIVEN_LIMIT_RATIO = 6.0
"""A limit that the user gave is drawn if it is at most this many times the peak."""
_NEAR_SHARE = 0.9
"""Share of the limit from which on the peak is marked with a warning."""
_NOT_MEASURED = "not measured"
_PHASES_LEAD = (
    "The largest resident set of the process itself in each phase. Pages that it shares with other processes count "
    "whole here, and in proportion above."
)


def write_recording_page(recording: Recording) -> str:
    """Return the page of a recorded run as HTML."""
    describers = (
        _describe_figures,
        _describe_verdicts,
        _describe_memory,
        _describe_phases,
        _describe_buffers,
        _describe_gpu,
        _describe_speed,
        _describe_parts,
        _describe_events,
    )
    sections = [describe(recording) for describe in describers]
    return write_page(_make_title(recording), "memory of a run", _list_facts(recording), sections)


def summarize_recording(recording: Recording) -> dict[str, Any]:
    """Return the figures of the page as plain data."""
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
                "allocated_bytes": _to_int(part.allocated),
                "fill": part.fill,
            }
            for part in recording.parts
            if part.group == "buffers"
        ],
        "phases": [
            {
                "name": phase.name,
                "peak_bytes": _to_int(phase.peak),
                "count": _to_int(phase.count),
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
                "evidence": {one.name: one.value for one in verdict.evidence},
                "times": verdict.times,
            }
            for verdict in recording.sort_verdicts()
        ],
    }


def _to_int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _make_title(recording: Recording) -> str:
    """Name the script that ran, or else the program or the process."""
    command = recording.header.texts("command")
    pid = recording.header.size("pid")
    if not command:
        return f"process {pid:.0f}" if pid else "a recorded run"
    module = command[command.index("-m") + 1 :] if "-m" in command[:-1] else []
    script = next((word for word in command if word.endswith(".py")), module[0] if module else command[0])
    return script.replace("\\", "/").rpartition("/")[2] or script


def _list_facts(recording: Recording) -> list[str]:
    header = recording.header
    started = header.number("started")
    pid = header.size("pid")
    interval = header.size("interval")
    readings = len(recording.pss)
    return [
        shlex.join(header.texts("command")),
        f"on {header.text('host')}" if header.text("host") else "",
        f"process {pid:.0f}" if pid else "",
        _format_moment(started) if started is not None else "",
        count_noun(readings, "reading") + (f", one every {format_seconds(interval)}" if interval else ""),
        header.text("system") or "",
    ]


def _format_moment(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%d %B %Y, %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def _describe_figures(recording: Recording) -> Block:
    pss = recording.pss
    limit = recording.limit
    if not len(pss):
        return section("", lead="No reading was recorded.")
    peak = recording.peak
    highest = float(pss.max())
    tone: Tone = ""
    limit_text = _NOT_MEASURED
    limit_note = ""
    if limit:
        share = peak / limit[0]
        limit_text = format_bytes(limit[0])
        limit_note = f"{limit[1]}, {share:.0%} used at most"
        if share >= _NEAR_SHARE:
            tone = "error" if share >= 1 else "warning"
    note = _format_peak_time(recording)
    if peak > highest:  # The kernel also counts peaks between two readings.
        note = f"between two readings; {format_bytes(highest)} at the highest one, {note}"
    figures = [
        tile("peak", format_bytes(peak), note, tone),
        tile("limit", limit_text, limit_note),
        tile("at the end", format_bytes(pss[-1]), f"after {format_seconds(recording.times[-1])}"),
    ]
    buffers = [part for part in recording.parts if part.group == "buffers"]
    if buffers:
        resident = sum(part.resident for part in buffers)
        allocated = sum(part.allocated or part.resident for part in buffers)
        figures.append(tile("buffers at the peak", format_bytes(resident), f"of {format_bytes(allocated)} allocated"))
    steps = np.array(recording.series["step"])
    rates = np.array(recording.series["steps_per_second"])
    if np.isfinite(steps).any():
        speed = f"{format_number(float(np.nanmedian(rates)))} a second" if np.isfinite(rates).any() else ""
        figures.append(tile("steps", f"{np.nanmax(steps):,.0f}", speed))
    return section("", tiles(*figures))


def _format_peak_time(recording: Recording) -> str:
    return f"after {format_seconds(recording.times[int(recording.pss.argmax())])}"


def _describe_verdicts(recording: Recording) -> Block:
    verdicts = [_describe_verdict(recording, verdict) for verdict in recording.sort_verdicts()]
    if not verdicts:
        verdicts = [card("good", "Nothing to report", "No verdict was recorded for this run.")]
    return section("Verdicts", cards(*verdicts))


def _describe_verdict(recording: Recording, verdict: RecordedVerdict) -> Block:
    moment = recording.count_seconds(verdict.time)
    first = recording.count_seconds(verdict.first_time)
    when = "" if moment is None else f"after {format_seconds(moment)}"
    if verdict.times > 1 and first is not None:
        when += f", {verdict.times} times, first after {format_seconds(first)}"
    name = verdict.name.replace("_", " ").capitalize()
    evidence = format_evidence(verdict.evidence)
    remedy = format_sentence(verdict.remedy)
    return card(verdict.severity, name, format_sentence(verdict.text), evidence, remedy, when)


def _describe_memory(recording: Recording) -> Block | None:
    pss = recording.pss
    if not len(pss):
        return None
    bands = [
        PlotLayer(group.title, group.colour, np.array(recording.groups[group.name]))
        for group in PART_GROUPS
        if any(recording.groups[group.name])
    ]
    limit = recording.limit
    drawn_limit = limit and (limit[0], f"limit {format_bytes(limit[0])}, {limit[1]}")
    thinned = "" if len(pss) <= _MAX_POINTS else f" {len(pss):,} readings are thinned; peaks and lows are kept."
    lead = f"Proportional set size of the process and its children: all parts add up to it.{thinned}"
    max_limit_ratio = _MAX_GIVEN_LIMIT_RATIO if limit and limit[1] == GIVEN_LIMIT else MAX_LIMIT_RATIO
    memory_plot = _describe_plot(
        recording,
        pss,
        bands,
        "Memory over time",
        limit=drawn_limit,
        max_limit_ratio=max_limit_ratio,
        flags=_list_flags(recording),
    )
    return section("Memory over time", memory_plot, lead=lead)


def _describe_plot(
    recording: Recording,
    levels: Floats,
    layers: Sequence[PlotLayer],
    label: str,
    *,
    unit: Literal["bytes", "number"] = "bytes",
    limit: Limit | None = None,
    max_limit_ratio: float = MAX_LIMIT_RATIO,
    flags: Iterable[tuple[float, str, str]] = (),
) -> Block:
    """Describe a plot over time. `levels` decides which readings of a long recording are drawn."""
    positions = choose_positions(levels, _MAX_POINTS)
    times = recording.times[positions]
    heads = []
    for position, time in zip(positions, times, strict=True):
        step = recording.series["step"][position]
        step_text = f", step {step:,.0f}" if np.isfinite(step) else ""
        heads.append(f"after {format_seconds(time)}{step_text}")
    drawn = [PlotLayer(layer.name, layer.colour, layer.values[positions]) for layer in layers]
    is_bytes = unit == "bytes"
    return plot(
        label,
        times,
        heads,
        drawn,
        unit,
        stacked=is_bytes,
        small=not is_bytes,
        limit=limit,
        max_limit_ratio=max_limit_ratio,
        flags=flags,
    )


def _list_flags(recording: Recording) -> Iterator[tuple[float, str, str]]:
    peak = int(recording.pss.argmax())
    text = f"peak, {_format_peak_time(recording)}\n{format_bytes(recording.pss[peak])}"
    yield float(recording.times[peak]), "info", text
    for verdict in recording.verdicts.values():
        moment = recording.count_seconds(verdict.first_time)
        if moment is not None:
            text = f"{verdict.name.replace('_', ' ')}, after {format_seconds(moment)}\n{verdict.text}"
            yield moment, verdict.severity, text
    for time, text in recording.events[:_MAX_BARS]:
        moment = recording.count_seconds(time)
        if moment is not None:
            yield moment, "info", f"after {format_seconds(moment)}\n{text}"


def _describe_phases(recording: Recording) -> Block | None:
    peaks = [(phase, phase.peak) for phase in recording.phases.values() if phase.peak is not None]
    if not peaks:
        return None
    limit = recording.limit
    highest = max(peak for _, peak in peaks)
    rows = []
    for phase, peak in peaks[:_MAX_BARS]:
        text = format_bytes(peak)
        note = _format_count_and_time(phase.count, phase.seconds)
        piece = BarPiece(peak, "c0", f"{phase.name}\npeak {text}")
        rows.append(BarRow(phase.name, [piece], text, note, is_strong=peak == highest))
    drawn_limit = limit and (limit[0], f"limit {format_bytes(limit[0])}")
    chart = bars(rows, "Peak memory by phase", "bytes", limit=drawn_limit)
    return section("Peaks by phase", chart, lead=_PHASES_LEAD)


def _format_count_and_time(count: float | None, seconds: float | None) -> str:
    words = []
    if count is not None:
        words.append("once" if count == 1 else f"{count:,.0f} times")
    if seconds is not None:
        words.append(format_seconds(seconds))
    return ", ".join(words)


def _describe_buffers(recording: Recording) -> Block | None:
    buffers = sorted((part for part in recording.parts if part.group == "buffers"), key=_get_allocated, reverse=True)
    if not buffers:
        return None
    rows = [_describe_buffer(part) for part in buffers[:_MAX_BARS]]
    omission = f" The {_MAX_BARS} largest of {len(buffers)}." if len(buffers) > _MAX_BARS else ""
    when = f"At the peak, {_format_peak_time(recording)}."
    lead = f"{when} Pages that were never written take no memory yet. They will as the buffer fills.{omission}"
    keys = [("resident", "c0"), ("allocated, not touched yet", "unused")]
    return section("Buffers at the peak", bars(rows, "Buffers, resident and allocated", "bytes", keys=keys), lead=lead)


def _get_allocated(part: RecordedPart) -> float:
    return part.allocated if part.allocated is not None else part.resident


def _describe_buffer(part: RecordedPart) -> BarRow:
    untouched = max(_get_allocated(part) - part.resident, 0.0)
    tip = f"{part.name}\n{format_bytes(part.resident)} resident\n{format_bytes(_get_allocated(part))} allocated"
    fill = "" if part.fill is None else f"{min(part.fill, 1.0):.0%} full"
    text = f"{format_bytes(part.resident)} of {format_bytes(_get_allocated(part))}"
    return BarRow(part.name, [BarPiece(part.resident, "c0", tip), BarPiece(untouched, "unused", tip)], text, fill)


def _describe_gpu(recording: Recording) -> Block | None:
    series = {name: np.array(values) for name, values in recording.gpu.items() if name != "limit"}
    if not np.isfinite(list(series.values())).any():
        return None
    requested = np.nan_to_num(series["requested"])
    allocated = np.nan_to_num(series["allocated"])
    reserved = np.nan_to_num(series["reserved"])
    fragmented = np.nan_to_num(series["fragmented"])
    other = np.nan_to_num(series["other"])
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
    drawn_limit = None if limit is None else (limit, f"the GPU's memory, {format_bytes(limit)}")
    used_layers = [layer for layer in layers if layer.values.any()]
    gpu_plot = _describe_plot(recording, total, used_layers, "GPU memory over time", limit=drawn_limit)
    lead = "Bytes of tensors, further bytes that torch's pool keeps, and the rest of this process on the GPU."
    return section("GPU memory", gpu_plot, lead=lead)


def _describe_speed(recording: Recording) -> Block | None:
    plots = []
    for name, key, unit in (
        ("steps a second", "steps_per_second", ""),
        ("waiting for memory, % of the time", "pressure", " %"),
    ):
        series = np.array(recording.series[key])
        if np.isfinite(series).sum() < 2:  # A curve needs two points.
            continue
        title = f"{name.capitalize()}, median {format_number(float(np.nanmedian(series)))}{unit}"
        layer = PlotLayer(name, "c0", series)
        plots.append((title, _describe_plot(recording, np.nan_to_num(series), [layer], name, unit="number")))
    return section("Speed", columns(*plots)) if plots else None


def _describe_parts(recording: Recording) -> Block | None:
    if not recording.parts:
        return None
    largest = sorted(recording.parts, key=lambda part: part.resident, reverse=True)[:_MAX_ROWS]
    total = sum(part.resident for part in recording.parts) or 1.0
    rows = []
    for part in largest:
        allocated = _NOT_MEASURED if part.allocated is None else format_bytes(part.allocated)
        share = f"{part.resident / total:.1%}"
        rows.append([part.name, GROUP_BY_NAME[part.group].title, format_bytes(part.resident), share, allocated])
    heads = ["part", "group", "resident", "share", "allocated"]
    fold = f"{count_noun(len(rows), 'part')}, the largest first"
    return section("Everything at the peak", table(heads, rows, "Parts at the peak", words=2, fold=fold))


def _describe_events(recording: Recording) -> Block | None:
    if not recording.events:
        return None
    moments = [(recording.count_seconds(time), text) for time, text in recording.events]
    rows = [["-" if moment is None else format_seconds(moment), text] for moment, text in moments]
    return section("Events", table(["after", "what happened"], rows, "Events", words=2))


def format_evidence(evidence: Iterable[RecordedEvidence]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of every piece of evidence in words."""
    for one in evidence:
        if one.value is not None:
            yield one.name.replace("_", " "), _format_value(one.value, one.unit)


def _format_value(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if unit == BYTES:
        return format_bytes(value)
    if unit == SECONDS:
        return format_seconds(value)
    if unit == SHARE:
        return f"{value:.0%}"
    if unit == TIME:
        return _format_moment(value)
    return f"{format_number(value)} {unit}".rstrip()


KINDS = {RECORDING_FORMAT: (Recording.read, write_recording_page, summarize_recording)}
"""By format: the functions that read a file, write its page and write its summary."""

"""How a watch looks in a terminal: one table, one line of history, and what it means; made for 80 columns.

In:  a turn.  Out: something that rich can print, once or again and again.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdall.units import format_bytes
from holdall.watch.history import History
from holdall.watch.reading import GROUPS, Part, Reading
from holdall.watch.turn import Turn
from holdall.watch.verdicts import Verdict

_TITLES = {
    "buffers": "buffers", "torch": "torch and heap in use", "python": "Python", "heap_retained": "heap, kept",
    "stacks": "thread stacks", "libraries": "libraries", "shared": "shared memory", "workers": "workers",
    "other": "other", "unattributed": "unattributed",
}  # fmt: skip
_OPENED = ("buffers", "torch", "workers", "unattributed")
"""Groups whose parts are shown, too."""
_MOST_PARTS = 4
_BAR = 16
_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = {"error": "bold red", "warning": "yellow", "info": "green"}


def view(turn: Turn, history: History, title: str, width: int = 80) -> RenderableType:
    """Return a turn as it is shown."""
    reading = turn.reading
    lines: list[RenderableType] = [_headline(title, reading, width), _curve(history, reading, width), _table(reading)]
    if reading.gpu is not None:
        lines.append(_gpu(reading))
    if beside := _beside(reading):
        lines.append(Text(f"beside it: {', '.join(beside)}", style="dim"))
    lines += [verdict_line(verdict) for verdict in turn.verdicts]
    if not reading.exact:
        lines.append(Text("This system tells only sums: mappings and pages are not told apart.", style="yellow"))
    return Group(*lines)


def verdict_line(verdict: Verdict) -> Text:
    """Return a verdict as it is shown."""
    text = Text(f"{verdict.name}: ", style=_COLOURS[verdict.severity])
    text.append(verdict.text, style="default")
    if verdict.severity != "info":
        text.append(f" -> {verdict.remedy}", style="dim")
    return text


def curve_of(history: History, room: int) -> str:
    """Return what was taken in the course of time, in so many columns."""
    levels = [one.pss for one in history.readings]
    levels = [max(levels[i * len(levels) // room : max((i + 1) * len(levels) // room, i * len(levels) // room + 1)])
              for i in range(min(room, len(levels)))]  # fmt: skip
    high = max([*levels, 1])
    return "".join(_LEVELS[min(int(8 * level / high), 7)] for level in levels)


def _headline(title: str, reading: Reading, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    facts = []
    if reading.step is not None:
        facts.append(f"step {reading.step:,}" + (f" of {reading.goal:,}" if reading.goal else ""))
    if reading.steps_per_second:
        facts.append(f"{reading.steps_per_second:,.0f}/s")
    if reading.phase:
        facts.append(reading.phase)
    facts.append(f"{reading.threads} threads")
    tail = "  ".join(facts)
    text.append(title[: max(width - len(tail) - 2, 10)], style="bold")
    return text.append("  " + tail)


def _curve(history: History, reading: Reading, width: int) -> Text:
    left = f"{format_bytes(reading.pss)} (peak {format_bytes(reading.peak)})"
    right = ""
    if reading.headroom:
        name, free = min(reading.headroom.items(), key=lambda limit: limit[1])
        right = f"{format_bytes(max(free, 0))} left" + (
            " in the control group" if name.startswith("control group") else ""
        )
    room = max(width - len(left) - len(right) - 4, 8)
    drawn = curve_of(history, room)
    text = Text(no_wrap=True, overflow="crop")
    return text.append(left, style="bold cyan").append(f"  {drawn}  ", style="cyan").append(right)


def _table(reading: Reading) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("part", no_wrap=True, overflow="ellipsis", min_width=26, max_width=34)
    table.add_column("resident", justify="right", no_wrap=True)
    table.add_column("", width=_BAR, no_wrap=True)
    table.add_column("allocated", justify="right", no_wrap=True)
    table.add_column("full", justify="right", no_wrap=True)
    for group in GROUPS:
        parts = [part for part in reading.parts if part.group == group]
        if not parts:
            continue
        whole = Part(group, _TITLES[group], sum(p.resident for p in parts), sum(p.allocated for p in parts))
        _row(table, whole, reading.pss, style="bold")
        if group in _OPENED and (len(parts) > 1 or group == "buffers"):
            for part in parts[:_MOST_PARTS]:
                _row(table, part, reading.pss, indent="  ")
            if len(parts) > _MOST_PARTS:
                rest = sum(part.resident for part in parts[_MOST_PARTS:])
                table.add_row(f"  {len(parts) - _MOST_PARTS} more", format_bytes(rest), style="dim")
    return table


def _row(table: Table, part: Part, pss: int, style: str = "", indent: str = "") -> None:
    share = part.resident / pss if pss else 0.0
    bar = "█" * round(share * _BAR) if not indent else "─" * round(share * _BAR)
    fill = "" if part.fill is None else f"{100 * part.fill:.0f} %"
    table.add_row(indent + part.name, format_bytes(part.resident), bar, format_bytes(part.allocated), fill, style=style)


def _beside(reading: Reading) -> list[str]:
    """Return what is no part of the process's memory, and matters to it."""
    words = []
    if reading.page_cache is not None:
        words.append(f"page cache of the control group {format_bytes(reading.page_cache)}")
    if reading.pressure is not None:
        words.append(f"memory pressure {reading.pressure:.1f} %")
    if reading.spilled:
        words.append(f"{format_bytes(reading.spilled)} spilled to disk")
    return words


def _gpu(reading: Reading) -> Text:
    gpu = reading.gpu
    words = [] if gpu is None else [
        f"{name} {format_bytes(value)}"
        for name in ("requested", "allocated", "reserved", "fragmented", "other", "limit")
        if (value := getattr(gpu, name)) is not None
    ]  # fmt: skip
    return Text("GPU: " + ", ".join(words))

"""`holdall watch`: where the memory of a training process is, how it grows, and why. Drawn for 80 columns and more.

Takes a process id, or a command to start. Shows a live table, prints JSON lines, writes a record, serves metrics.
Exit codes: that of the command for `holdall watch -- command`; else 0, 1 for an error of holdall, 2 for a mistake on
the command line.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdall.cli import AsJson, OptInt, OptPath, OptText, OptTexts, Verbose, option
from holdall.errors import ArgumentError, WatchError
from holdall.tools.part_groups import PART_GROUPS
from holdall.tools.watch.exchange import replace_unprintable
from holdall.tools.watch.launch import LaunchedCommand
from holdall.tools.watch.reading import AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import WatchVerdict
from holdall.tools.watch.watcher import Watcher, WatchPass, WatchRecorder, make_header
from holdall.units import count_noun, format_bytes, format_seconds, parse_bytes

_TARGET = "A process id; or, after --, a command to start and watch."
_MAX_PARTS = 4
_MIN_OTHER_BYTES = 2**20
_BAR_WIDTH = 16
_WIDE = 72
"""Fewest columns of a table with the bar and the allocated bytes."""
_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = {"error": "bold red", "warning": "yellow", "info": "green"}


def watch(
    target: Annotated[OptTexts, typer.Argument(help=_TARGET)] = None,
    once: Annotated[bool, option("Take one reading, print it, and end.", "--once")] = False,
    interval: Annotated[float, option("Seconds between two readings.", min=0.1)] = 2.0,
    record: Annotated[OptPath, option("Write every reading to this file, for `holdall report`.")] = None,
    prometheus: Annotated[OptInt, option("Serve the newest reading on this port.")] = None,
    bind: Annotated[str, option("The address to serve on.")] = "127.0.0.1",
    limit: Annotated[OptText, option("Memory that the process tree may use, as in 8GiB.")] = None,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Watch a process that runs, or start one and watch it."""
    if not target:
        raise typer.BadParameter("name a process id, or a command after --", param_hint="TARGET")
    is_pid = len(target) == 1 and target[0].isdigit()
    if json and not is_pid:
        raise ArgumentError("--json prints to stdout, which belongs to the command. Use --record FILE with a command.")
    if once and not is_pid:
        raise ArgumentError("--once reads a process that runs, and a command has hardly started. Pass a process id.")
    limit_bytes = None if limit is None else parse_bytes(limit, "--limit")
    outputs = Outputs(is_once=once, is_json=json, record=record, port=prometheus, address=bind)
    if is_pid:
        with contextlib.suppress(KeyboardInterrupt):
            outputs.show(Watcher(int(target[0]), interval, limit_bytes), interval, limit_bytes)
        outputs.close()
        return
    command = LaunchedCommand(target, is_captured=outputs.is_live)
    try:
        outputs.show(Watcher(command.pid, interval, limit_bytes, target), interval, limit_bytes, command)
        outputs.close()
    except KeyboardInterrupt:  # The command got the interrupt, too, and decides whether to end.
        outputs.close()
    except Exception as error:  # A failure of the watch must not end the command.
        typer.echo(f"holdall watch: {type(error).__name__}: {error}. The command continues without it.", err=True)
    code = command.wait()
    with contextlib.suppress(Exception):  # A failure here must not replace the exit code of the command.
        outputs.print_end(command)
    if code:
        raise typer.Exit(code)


class Outputs:
    """Table, record, JSON lines and metrics of a watch. Files and ports are opened before a command starts."""

    def __init__(self, *, is_once: bool, is_json: bool, record: Path | None, port: int | None, address: str) -> None:
        self._is_once = is_once
        self.is_live = sys.stdout.isatty() and not is_once and not is_json
        self._recorders = [] if record is None else [WatchRecorder(record)]
        if is_json:
            self._recorders.append(WatchRecorder(None))
        self._exporter: Any = None
        if port is not None:
            from holdall.tools.watch.prometheus import Exporter  # noqa: PLC0415  Its package is an extra.

            self._exporter = Exporter(port, address)
        self._console = Console(markup=False)  # A name may contain brackets.
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop") if self.is_live else None
        self._view: RenderableType | None = None
        self._peak = 0
        self._has_table = not is_json

    def show(
        self, watcher: Watcher, interval_s: float, limit_bytes: int | None, command: LaunchedCommand | None = None
    ) -> None:
        """Show one pass after the other, until the process ends."""
        for recorder in self._recorders:
            recorder.write([make_header(watcher, interval_s, limit_bytes)])
        if self._live is not None:
            self._live.start()
        for latest in _run_passes(watcher, command):
            self._peak = latest.reading.peak
            for recorder in self._recorders:
                recorder.write(latest.as_lines())
            if self._exporter is not None:
                self._exporter.latest = latest
            if self._has_table:
                self._show_table(latest, watcher, has_agent=command is not None)
            if self._is_once:
                return

    def _show_table(self, latest: WatchPass, watcher: Watcher, *, has_agent: bool) -> None:
        words = [Path(word).name if "/" in word else word for word in watcher.command]
        title = replace_unprintable(f"{' '.join(words)} ({watcher.pid})")
        advice = "" if has_agent or watcher.latest_report is not None else shlex.join(watcher.command)
        self._view = draw_pass(latest, watcher.history, title, self._console.width, advice)
        if self._live is not None:
            self._live.update(self._view, refresh=True)
        elif not self._is_once:
            for verdict in latest.new_verdicts:
                typer.echo(f"holdall watch: {verdict.name}: {verdict.text}", err=True)

    def close(self) -> None:
        """Close files, and leave the last table on the screen."""
        for recorder in self._recorders:
            recorder.close()
        if self._live is not None:
            self._live.stop()
        elif self._view is not None:
            self._console.print(self._view)

    def print_end(self, command: LaunchedCommand) -> None:
        """Print how long the command ran, and its peak, which may be later than the last reading."""
        peak = max(self._peak, command.read_peak())
        self._console.print(f"ended after {format_seconds(command.seconds)}; peak {format_bytes(peak)}")


def _run_passes(watcher: Watcher, command: LaunchedCommand | None) -> Iterator[WatchPass]:
    """Yield passes until the process ends. Raise WatchError if a process that runs cannot be read."""
    while watcher.is_alive():
        try:
            latest = watcher.run_pass()
        except WatchError:
            if watcher.is_alive() or (command is None and not watcher.history.readings):
                raise
            return
        yield latest
        if watcher.pause(None if command is None else command.wait_for_end):
            return


# ---------------------------------------------------------------- drawing


def draw_pass(
    latest: WatchPass, history: ReadingHistory, title: str, width: int = 80, advice: str = ""
) -> RenderableType:
    """Return the view of a pass. `advice` is the command of a process that has no agent, or empty."""
    reading = latest.reading
    lines: list[RenderableType] = [
        _draw_headline(title, reading, width),
        _draw_curve(history, reading, width),
        _draw_table(reading, width),
    ]
    if reading.gpu is not None:
        figures = [f"{name} {format_bytes(value)}" for name, value in asdict(reading.gpu).items() if value is not None]
        lines.append(Text("GPU: " + ", ".join(figures)))
    notes = []
    if reading.pressure is not None:
        notes.append(f"memory pressure {reading.pressure:.1f} %")
    if reading.spilled:
        notes.append(f"{format_bytes(reading.spilled)} spilled to disk")
    if notes:
        lines.append(Text(", ".join(notes), style="dim"))
    lines += [_draw_verdict(verdict) for verdict in latest.verdicts]
    if not reading.exact:
        lines.append(Text("This system reports only sums: single mappings and pages are unknown.", style="yellow"))
    if advice:
        lines.append(Text(f"To see buffers, steps and leaks by name: holdall watch -- {replace_unprintable(advice)}"))
    return Group(*lines)


def _draw_verdict(verdict: WatchVerdict) -> Text:
    text = Text(f"{verdict.name}: ", style=_COLOURS[verdict.severity])
    text.append(verdict.text, style="default")
    if verdict.severity != "info":
        text.append(f". {verdict.remedy}", style="dim")
    return text


def _draw_headline(title: str, reading: MemoryReading, width: int) -> Text:
    facts = []
    if reading.step is not None:
        goal = f" of {reading.goal:,}" if reading.goal else ""
        facts.append(f"step {reading.step:,}{goal}")
    if reading.steps_per_second:
        facts.append(f"{reading.steps_per_second:,.0f}/s")
    if reading.phase:
        facts.append(reading.phase)
    facts.append(count_noun(reading.threads, "thread"))
    tail = "  ".join(facts)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(title[: max(width - len(tail) - 2, 10)], style="bold")
    return text.append("  " + tail)


def _draw_curve(history: ReadingHistory, reading: MemoryReading, width: int) -> Text:
    left = f"{format_bytes(reading.pss)} (peak {format_bytes(reading.peak)})"
    right = ""
    if reading.headroom:
        name, free = min(reading.headroom.items(), key=lambda limit: limit[1])
        where = " in the control group" if name.startswith("control group") else ""
        right = f"{format_bytes(max(free, 0))} left{where}"
    curve = draw_sparkline([one.pss for one in history.readings], max(width - len(left) - len(right) - 4, 8))
    text = Text(no_wrap=True, overflow="crop")
    return text.append(left, style="bold cyan").append(f"  {curve}  ", style="cyan").append(right)


def draw_sparkline(levels: list[int], columns: int) -> str:
    """Return levels over time in at most `columns` letters. Each letter shows the maximum of an interval."""
    count = min(columns, len(levels))
    highest = max([*levels, 1])
    letters = []
    for column in range(count):
        first = column * len(levels) // count
        last = max((column + 1) * len(levels) // count, first + 1)
        letters.append(_LEVELS[min(int(8 * max(levels[first:last]) / highest), 7)])
    return "".join(letters)


def _draw_table(reading: MemoryReading, width: int) -> Table:
    is_wide = width >= _WIDE
    max_width = max(width - 46, 34) if is_wide else max(width - 19, 8)
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("part", no_wrap=True, overflow="ellipsis", min_width=min(26, max_width), max_width=max_width)
    table.add_column("resident", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("", width=_BAR_WIDTH, no_wrap=True)
        table.add_column("allocated", justify="right", no_wrap=True)
    table.add_column("full", justify="right", no_wrap=True)
    for group in PART_GROUPS:
        parts = [part for part in reading.parts if part.group == group.name]
        if not parts:
            continue
        resident = sum(part.resident for part in parts)
        allocated = sum(part.allocated for part in parts)
        title = AttributedPart(group.name, group.title, resident, allocated)
        _add_row(table, title, reading.pss, is_wide=is_wide, mark="█", style="bold")
        if group.has_rows and (len(parts) > 1 or group.name in {"buffers", "shared"}):
            shown = [part for part in parts if group.name != "other" or part.resident >= _MIN_OTHER_BYTES]
            for part in shown[:_MAX_PARTS]:
                _add_row(table, part, reading.pss, is_wide=is_wide, mark="─", indent="  ")
            if len(shown) > _MAX_PARTS:
                rest = sum(part.resident for part in shown[_MAX_PARTS:])
                table.add_row(f"  {len(shown) - _MAX_PARTS} more", format_bytes(rest), style="dim")
    return table


def _add_row(
    table: Table, part: AttributedPart, pss: int, *, is_wide: bool, mark: str, style: str = "", indent: str = ""
) -> None:
    cells = [indent + replace_unprintable(part.name), format_bytes(part.resident)]
    if is_wide:
        cells += [mark * round(_BAR_WIDTH * part.resident / max(pss, 1)), format_bytes(part.allocated)]
    cells.append("" if part.fill is None else f"{part.fill:.0%}")
    table.add_row(*cells, style=style)

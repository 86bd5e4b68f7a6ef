"""`holdall watch`: where the memory of a training process is, how it grows, and why; drawn for 80 columns.

`holdall trim` has a process return what its C library keeps; `holdall report` makes a page of what was recorded.
In:  a process id, or a command to start.
Out: a live table, JSON lines, a record, a Prometheus page. Lines of JSON and the output of a command never mix.
Exit codes: that of the command for `holdall watch -- command`, whatever becomes of the watch; else 0, 1 an error that
holdall raised, 2 a mistake on the command line.
"""

from __future__ import annotations

import contextlib
import json as json_
import os
import shlex
import sys
import webbrowser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import psutil
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from holdall.cli import AsJson, OptInt, OptPath, OptText, OptTexts, Verbose, option, writing
from holdall.errors import ArgumentError, WatchError
from holdall.tools.report import read_report
from holdall.tools.watch.agent_files import trim_process, trim_self
from holdall.tools.watch.process_watcher import ProcessWatcher, WatchLoop, WatchPass
from holdall.tools.watch.reading import GROUPS, AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import WatchVerdict
from holdall.tools.watch.watcher_process import PrometheusServer, WatchRecorder, record_header
from holdall.units import counted, format_bytes, parse_bytes
from holdall.watch import LaunchedCommand

_TARGET = "A process id; or, after --, a command to start and watch."
_JSON = (
    "Print JSON lines, as they are recorded; to FILE, which ends in .json or .jsonl, or any as --json=FILE. Beside a "
    "command they go to descriptor 3 if it is open, else to stderr."
)
STDOUT = "-"
_JSON_DESCRIPTOR = 3
DrawPass = Callable[[Any, int], RenderableType]  # draws a turn in so many columns
_TITLES = {
    "buffers": "buffers", "torch": "torch and heap in use", "python": "Python", "heap_retained": "heap, kept",
    "stacks": "thread stacks", "libraries": "libraries", "shared": "shared memory", "workers": "workers",
    "other": "other", "unattributed": "unattributed",
}  # fmt: skip
_EXPANDED_GROUPS = ("buffers", "torch", "shared", "workers", "other", "unattributed")  # whose parts are shown, too
_ALWAYS_EXPANDED = ("buffers", "shared")  # even if there is one
_LEAST_OF_OTHER = 2**20  # of other parts, these are shown
_MOST_PARTS = 4
_BAR = 16
_WIDE = 72  # columns from which on there is room for the bar and what is allocated
_BESIDE_NAMES, _BESIDE_NAMES_NARROW = 46, 19  # columns that the figures of a part take
_LEVELS = "▁▂▃▄▅▆▇█"
_SEVERITY_COLOURS = {"error": "bold red", "warning": "yellow", "info": "green"}


def watch(
    target: Annotated[OptTexts, typer.Argument(help=_TARGET)] = None,
    once: Annotated[bool, option("Take one reading, print it, and end.", "--once")] = False,
    interval: Annotated[float, option("Seconds between two readings.", min=0.1)] = 2.0,
    record: Annotated[OptPath, option("Write every reading here, for `holdall report`.")] = None,
    prometheus: Annotated[OptInt, option("Serve the newest reading on this port.")] = None,
    bind: Annotated[str, option("The address to serve on.")] = "127.0.0.1",
    limit: Annotated[OptText, option("Memory that the process tree may use, as in 8GiB.")] = None,
    json: Annotated[OptText, option(_JSON, "--json", metavar="[FILE]")] = None,
    verbose: Verbose = False,
) -> None:
    """Watch a process that runs, or start one and watch it."""
    is_pid = len(target or []) == 1 and (target or [""])[0].isdigit()
    outputs = Outputs(once, _json_target(json, starts=not is_pid), record, prometheus, bind)
    if not target:
        raise typer.BadParameter("name a process id, or a command after --", param_hint="TARGET")
    limit_bytes = None if limit is None else parse_bytes(limit, "--limit")
    with outputs:
        if is_pid:
            # What runs has a command line; what was just started may not have its own yet.
            with contextlib.suppress(KeyboardInterrupt):
                _watch_process(int(target[0]), _command_line_of(int(target[0])), None, (interval, limit_bytes), outputs)
            return
        launched = LaunchedCommand(target, captured=outputs.shows_live)
        try:
            _watch_process(launched.pid, target, launched, (interval, limit_bytes), outputs)
        except KeyboardInterrupt:  # it was for the command, too
            pass
        except Exception as error:  # whatever it is, the command is not to suffer
            typer.echo(f"holdall watch: {type(error).__name__} {error}; the command goes on without it", err=True)
        code = launched.wait()
        outputs.close_for_command()
    if code:
        raise typer.Exit(code)


def _watch_process(
    pid: int, command: list[str], launched: LaunchedCommand | None, settings: tuple[float, int | None],
    outputs: Outputs,
) -> None:  # fmt: skip
    """Watch a process until it ends."""
    turns = WatchLoop(pid, *settings, scans=launched is None)
    title = _printable(f"{' '.join(Path(word).name if '/' in word else word for word in command)} ({pid})")

    def draw(turn: WatchPass, width: int) -> RenderableType:
        has_names = launched is not None or turns.watcher.latest_report is not None
        return process_view(turn, turns.history, title, width, "" if has_names else shlex.join(command))

    outputs.show(_passes(turns, launched), record_header(pid, command, *settings), draw)


def _passes(turns: WatchLoop, launched: LaunchedCommand | None) -> Iterator[WatchPass]:
    while turns.watcher.is_alive():
        try:
            turn = turns.run_pass()
        except WatchError:
            if turns.watcher.is_alive() or (launched is None and not turns.history.readings):
                raise
            return
        yield turn
        if turns.pause(None if launched is None else launched.ended_within):
            return


def _json_target(given: str | None, *, starts: bool) -> Path | int | None:
    """Return where lines of JSON go: a file, or an open descriptor; None if none are wanted."""
    if given is None or given != STDOUT:
        return None if given is None else Path(given)
    if not starts:
        return 1
    with contextlib.suppress(OSError):
        os.fstat(_JSON_DESCRIPTOR)
        return _JSON_DESCRIPTOR
    return 2  # what goes to stdout is the command's


class WatchCommand(TyperCommand):
    """`--json` may stand alone, or before a file whose name ends in .json or .jsonl; `--json=FILE` takes any name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of stdout behind a `--json` that stands alone."""
        end = args.index("--") if "--" in args else len(args)
        for at in range(end - 1, -1, -1):
            is_file = at + 1 < end and args[at + 1].endswith((".json", ".jsonl"))
            if args[at] == "--json" and not is_file:
                args.insert(at + 1, STDOUT)
        return super().parse_args(ctx, args)


WATCH_CLASS = WatchCommand  # for `holdall.cli`


def _command_line_of(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error as error:
        raise ArgumentError(f"pid ({pid}) is no process that runs; see 'ps' for its id") from error


class ScreenOutput:
    """The table: redrawn in a terminal; elsewhere printed at the end, and verdicts on stderr as they come."""

    def __init__(self, *, is_live: bool) -> None:
        self.draw: DrawPass | None = None
        self._last: Any = None
        self._console = Console(markup=False)  # a name may hold brackets
        self._live = None
        if is_live:
            self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop")
            self._live.start()

    def show(self, turn: Any) -> None:
        """Draw a turn in the place of the one before, or keep it for the end."""
        self._last = turn
        if self._live is not None and self.draw is not None:
            self._live.update(self.draw(turn, self._console.width), refresh=True)
            return
        for verdict in turn.new_verdicts:
            typer.echo(f"holdall watch: {verdict.name}: {verdict.text}", err=True)

    def close(self) -> None:
        """Leave the last turn on the screen."""
        if self._live is not None:
            self._live.stop()
        elif self._last is not None and self.draw is not None:
            self._console.print(self.draw(self._last, self._console.width))


WatchOutput = ScreenOutput | WatchRecorder | PrometheusServer


class Outputs:
    """Where readings go, as the options say; an output whose reader goes away is left out from then on."""

    def __init__(
        self, once: bool, json: Path | int | None, record: Path | None, prometheus: int | None, bind: str
    ) -> None:
        self._once = once
        self.shows_live = sys.stdout.isatty() and not once and json is None  # over the one before
        screen = partial(ScreenOutput, is_live=self.shows_live)
        self._makers: list[Callable[[], WatchOutput]] = [screen if json is None else partial(WatchRecorder, json)]
        self._makers += [] if record is None else [partial(WatchRecorder, record)]
        self._makers += [] if prometheus is None else [partial(PrometheusServer, prometheus, bind)]
        self._open: list[WatchOutput] = []
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Open all of them: what cannot be written is known before a command runs."""
        with contextlib.ExitStack() as stack:
            for make in self._makers:
                self._open.append(make())
                stack.callback(self._open[-1].close)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._closing.close()

    def close_for_command(self) -> None:
        """Close all; the exit code is that of the command, so that what goes wrong is only reported."""
        try:
            self._closing.close()
        except Exception as error:
            if not isinstance(error, OSError):
                typer.echo(f"holdall watch: {type(error).__name__} {error}; the last reading is not shown", err=True)

    def show(self, turns: Iterable[Any], first: dict[str, Any], draw: DrawPass) -> None:
        """Show one turn after the other, until there is no more or nobody looks.

        Args:
            first: The first line of a record.
            draw: Draws a turn for a screen.
        """
        for output in self._open:
            if isinstance(output, ScreenOutput):
                output.draw = draw
        self._to_all(lambda output: output.begin(first) if isinstance(output, WatchRecorder) else None)
        for turn in turns:
            self._to_all(lambda output, turn=turn: output.show(turn))  # type: ignore[misc]  # of this turn
            if self._once or not self._open:
                return

    def _to_all(self, do: Callable[[WatchOutput], None]) -> None:
        for output in list(self._open):
            try:
                do(output)
            except OSError as error:
                self._open.remove(output)
                if not isinstance(error, BrokenPipeError):
                    typer.echo(f"holdall watch: {error.strerror}; no more is written there", err=True)


def process_view(
    turn: WatchPass, history: ReadingHistory, title: str, width: int = 80, command: str = ""
) -> RenderableType:
    """Return a turn as it is shown.

    Args:
        command: What starts the process, if it has no agent.
    """
    reading = turn.reading
    lines: list[RenderableType] = [_headline(title, reading, width), _curve(history, reading, width)]
    lines.append(_table(reading, width))
    if reading.gpu is not None:
        lines.append(_gpu(reading))
    if beside := _outside_facts(reading):
        lines.append(Text(f"beside it: {', '.join(beside)}", style="dim"))
    lines += [verdict_line(verdict) for verdict in turn.verdicts]
    if not reading.exact:
        missing = "This system reports only sums: there is nothing about single mappings and pages."
        lines.append(Text(missing, style="yellow"))
    if command:
        lines.append(
            Text(f"Buffers, steps and leaks get names if it is started with: holdall watch -- {_printable(command)}")
        )
    return Group(*lines)


def verdict_line(verdict: WatchVerdict) -> Text:
    """Return a verdict as it is shown."""
    text = Text(f"{verdict.name}: ", style=_SEVERITY_COLOURS[verdict.severity])
    text.append(verdict.text, style="default")
    if verdict.severity != "info":
        text.append(f" -> {verdict.remedy}", style="dim")
    return text


def curve_of(history: ReadingHistory, room: int) -> str:
    """Return what was taken in the course of time, in so many columns."""
    levels = [one.pss for one in history.readings]
    levels = [max(levels[i * len(levels) // room : max((i + 1) * len(levels) // room, i * len(levels) // room + 1)])
              for i in range(min(room, len(levels)))]  # fmt: skip
    high = max([*levels, 1])
    return "".join(_LEVELS[min(int(8 * level / high), 7)] for level in levels)


def _headline(title: str, reading: MemoryReading, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    goal = f" of {reading.goal:,}" if reading.goal else ""
    facts = ["" if reading.step is None else f"step {reading.step:,}{goal}"]
    facts += [f"{reading.steps_per_second:,.0f}/s" if reading.steps_per_second else "", reading.phase or ""]
    tail = "  ".join(filter(None, [*facts, counted(reading.threads, "thread")]))
    text.append(title[: max(width - len(tail) - 2, 10)], style="bold")
    return text.append("  " + tail)


def _curve(history: ReadingHistory, reading: MemoryReading, width: int) -> Text:
    left = f"{format_bytes(reading.pss)} (peak {format_bytes(reading.peak)})"
    right = ""
    if reading.headroom:
        name, free = min(reading.headroom.items(), key=lambda limit: limit[1])
        where = " in the control group" if name.startswith("control group") else ""
        right = f"{format_bytes(max(free, 0))} left{where}"
    drawn = curve_of(history, max(width - len(left) - len(right) - 4, 8))
    text = Text(no_wrap=True, overflow="crop")
    return text.append(left, style="bold cyan").append(f"  {drawn}  ", style="cyan").append(right)


def _table(reading: MemoryReading, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    is_wide = width >= _WIDE
    widest = max(width - _BESIDE_NAMES, 34) if is_wide else max(width - _BESIDE_NAMES_NARROW, 8)
    table.add_column("part", no_wrap=True, overflow="ellipsis", min_width=min(26, widest), max_width=widest)
    for name in ("resident", "", "allocated", "full") if is_wide else ("resident", "full"):
        table.add_column(name, justify="right" if name else "left", width=None if name else _BAR, no_wrap=True)
    for group in GROUPS:
        parts = [part for part in reading.parts if part.group == group]
        if not parts:
            continue
        whole = AttributedPart(group, _TITLES[group], sum(p.resident for p in parts), sum(p.allocated for p in parts))
        _row(table, whole, reading.pss, is_wide, style="bold")
        if group in _EXPANDED_GROUPS and (len(parts) > 1 or group in _ALWAYS_EXPANDED):
            shown = [part for part in parts if group != "other" or part.resident >= _LEAST_OF_OTHER]
            for part in shown[:_MOST_PARTS]:
                _row(table, part, reading.pss, is_wide, indent="  ")
            if len(shown) > _MOST_PARTS:
                rest = sum(part.resident for part in shown[_MOST_PARTS:])
                table.add_row(f"  {len(shown) - _MOST_PARTS} more", format_bytes(rest), style="dim")
    return table


def _row(table: Table, part: AttributedPart, pss: int, is_wide: bool, style: str = "", indent: str = "") -> None:
    share = part.resident / pss if pss else 0.0
    bar = "█" * round(share * _BAR) if not indent else "─" * round(share * _BAR)
    fill = "" if part.fill is None else f"{100 * part.fill:.0f} %"
    beside = [bar, format_bytes(part.allocated)] if is_wide else []
    table.add_row(indent + _printable(part.name), format_bytes(part.resident), *beside, fill, style=style)


def _printable(text: str) -> str:
    """Return a name without what moves the cursor or changes colours: any process chooses its names."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _outside_facts(reading: MemoryReading) -> list[str]:
    """Return what is no part of the process's memory, and matters to it."""
    words = []
    if reading.page_cache is not None:
        words.append(f"page cache of the control group {format_bytes(reading.page_cache)}")
    if reading.pressure is not None:
        words.append(f"memory pressure {reading.pressure:.1f} %")
    if reading.spilled:
        words.append(f"{format_bytes(reading.spilled)} spilled to disk")
    return words


def _gpu(reading: MemoryReading) -> Text:
    held = {} if reading.gpu is None else asdict(reading.gpu)
    return Text("GPU: " + ", ".join(f"{name} {format_bytes(one)}" for name, one in held.items() if one is not None))


def trim(
    pid: Annotated[int | None, typer.Argument(help="A process with an agent: see `holdall watch`.")] = None,
    this: Annotated[bool, option("Trim this very process, to see that it works.", "--self")] = False,
    dry_run: Annotated[bool, option("Only say what a trim would return.", "--dry-run")] = False,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Return free memory of a process to the system."""
    if (pid is None) != this:
        raise ArgumentError("trim takes a process id, or --self; name one of them")
    would = None if pid is None else ProcessWatcher(pid).read().of("heap_retained")
    words: dict[str, int | None] = {"pid": pid, "would_return": would}
    if not dry_run:
        done = trim_self() if pid is None else trim_process(pid)
        words |= {"returned": done.returned, "before": done.before, "after": done.after}
    if json:
        typer.echo(json_.dumps(words))
        return
    if would is not None:
        typer.echo(f"would return up to {format_bytes(would)}")
    if not dry_run:
        span = f"{format_bytes(done.before)} before, {format_bytes(done.after)} after"
        typer.echo(f"returned {format_bytes(done.returned)}: {span}")


def report(
    file: Annotated[Path, typer.Argument(help="What `holdall watch --record` or `holdall bench` wrote.")],
    output: Annotated[OptPath, option("The page; FILE with the ending .html by default.", "--output", "-o")] = None,
    show: Annotated[bool, option("Open the page in the browser.", "--open")] = False,
    json: Annotated[bool, option("Print a summary as one JSON object, and write no page.", "--json")] = False,
    verbose: Verbose = False,
) -> None:
    """Turn a recorded run, or the results of a bench, into one HTML page that needs nothing else."""
    found = read_report(file)
    if json:
        typer.echo(json_.dumps({"file": str(file), "format": found.form} | found.summary()))
        return
    target = output or file.with_suffix(".html")
    if target.absolute() == file.absolute() or (target.exists() and target.samefile(file)):
        raise ArgumentError(f"output ({target}) is the file itself; name another one")
    with writing("output", target):
        target.write_text(found.page(), encoding="utf-8", errors="replace")  # a command may be no Unicode
    typer.echo(str(target))
    if show:
        webbrowser.open(target.absolute().as_uri())

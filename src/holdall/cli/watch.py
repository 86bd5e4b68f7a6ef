"""`holdall watch`: where the memory of a training process is, how it grows, and why; drawn for 80 columns.

In:  a process id, or a command to start; or the address of Ray's head, for every memory on a cluster, shard by shard.
Out: a live table, JSON lines, a record, a Prometheus page.
Exit codes: that of the command for `holdall watch -- command`; else 0, 1 an error that holdall raised, 2 a mistake on
the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import psutil
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdall.cli.conventions import OptInt, OptPath, OptText, OptTexts, Verbose, option
from holdall.cluster.security import use_token
from holdall.errors import ArgumentError, MissingPackageError, WatchError
from holdall.tools.watch.process_watcher import WatchLoop, WatchPass
from holdall.tools.watch.reading import GROUPS, AttributedPart, MemoryReading, ReadingHistory
from holdall.tools.watch.session import LaunchedCommand
from holdall.tools.watch.verdicts import WatchVerdict
from holdall.tools.watch.watcher_process import PrometheusServer, WatchRecorder, record_header
from holdall.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from holdall.cluster.watch import ClusterPass, ClusterWatch, SeenMemory, SeenShard

_TARGET = "A process id; or, after --, a command to start and watch; or, with --ray, the address of Ray's head."
DrawPass = Callable[[Any, int], RenderableType]  # draws a turn in so many columns
_TITLES = {
    "buffers": "buffers", "torch": "torch and heap in use", "python": "Python", "heap_retained": "heap, kept",
    "stacks": "thread stacks", "libraries": "libraries", "shared": "shared memory", "workers": "workers",
    "other": "other", "unattributed": "unattributed",
}  # fmt: skip
_EXPANDED_GROUPS = ("buffers", "torch", "workers", "unattributed")  # groups whose parts are shown, too
_MOST_PARTS = 4
_BAR = 16
_LEVELS = "▁▂▃▄▅▆▇█"
_SEVERITY_COLOURS = {"error": "bold red", "warning": "yellow", "info": "green"}


def watch(
    target: Annotated[OptTexts, typer.Argument(help=_TARGET)] = None,
    ray: Annotated[
        bool, option("Watch all memories of the Ray cluster at TARGET, or of this machine's.", "--ray")
    ] = False,
    once: Annotated[bool, option("Take one reading, print it, and end.", "--once")] = False,
    interval: Annotated[float, option("Seconds between two readings.", min=0.1)] = 2.0,
    record: Annotated[OptPath, option("Write every reading here, for `holdall report`.")] = None,
    prometheus: Annotated[OptInt, option("Serve the newest reading on this port.")] = None,
    bind: Annotated[str, option("The address to serve on.")] = "127.0.0.1",
    limit: Annotated[OptText, option("Memory that the process tree may use, as in 8GiB.")] = None,
    json: Annotated[bool, option("Print JSON lines, as they are recorded.", "--json")] = False,
    verbose: Verbose = False,
) -> None:
    """Watch a process that runs, or start one and watch it; or the memories of a Ray cluster."""
    options = OutputOptions(once, json, record, prometheus, bind)
    if ray:
        if limit is not None:
            raise typer.BadParameter("a cluster has limits of its own", param_hint="--limit")
        watch_ray(target or [], interval, options)
        return
    if not target:
        raise typer.BadParameter("name a process id, or a command after --", param_hint="TARGET")
    limit_bytes = None if limit is None else parse_bytes(limit, "--limit")
    is_pid = len(target) == 1 and target[0].isdigit()
    launched = None if is_pid else LaunchedCommand(target, captured=options.shows_live)
    pid = int(target[0]) if launched is None else launched.pid
    code = 0
    try:
        turns = WatchLoop(pid, interval, limit_bytes)
        # What was just started may not have its own command line yet.
        command = _command_line_of(pid) if launched is None else target
        title = f"{' '.join(Path(word).name if '/' in word else word for word in command)} ({pid})"
        first = record_header(pid, command, interval)
        options.show(
            _passes(turns, launched), first, lambda turn, width: process_view(turn, turns.history, title, width)
        )
    except KeyboardInterrupt:
        pass
    finally:
        if launched is not None:
            code = launched.wait()
    if code:
        raise typer.Exit(code)


def _passes(turns: WatchLoop, launched: LaunchedCommand | None) -> Iterator[WatchPass]:
    while turns.watcher.is_alive():
        try:
            turn = turns.run_pass()
        except WatchError:
            if turns.watcher.is_alive() or not turns.history.readings:
                raise
            return
        yield turn
        if turns.pause(None if launched is None else launched.ended_within):
            return


def _command_line_of(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error as error:
        raise ArgumentError(f"pid ({pid}) is no process that runs; see 'ps' for its id") from error


class LiveOutput:
    """A table in the terminal that each reading redraws."""

    def __init__(self, draw: DrawPass) -> None:
        self._draw = draw
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._live.start()

    def show(self, turn: WatchPass) -> None:
        """Draw a turn in the place of the one before."""
        self._live.update(self._draw(turn, self._console.width), refresh=True)

    def close(self) -> None:
        """Leave the last turn on the screen."""
        self._live.stop()


class PrintedOutput:
    """One table at the end, and verdicts on stderr as they come: for logs and pipes."""

    def __init__(self, draw: DrawPass) -> None:
        self._draw = draw
        self._last: WatchPass | None = None

    def show(self, turn: WatchPass) -> None:
        """Keep a turn; print its new verdicts."""
        self._last = turn
        for verdict in turn.new_verdicts:
            typer.echo(f"holdall watch: {verdict.name}: {verdict.text}", err=True)

    def close(self) -> None:
        """Print the last turn."""
        if self._last is not None:
            console = Console()
            console.print(self._draw(self._last, console.width))


WatchOutput = LiveOutput | PrintedOutput | WatchRecorder | PrometheusServer


class OutputOptions(NamedTuple):
    """Where readings go, as the options say."""

    once: bool
    json: bool
    record: Path | None
    prometheus: int | None
    bind: str

    @property
    def shows_live(self) -> bool:
        """Whether a reading is drawn over the one before."""
        return sys.stdout.isatty() and not self.once and not self.json

    def show(self, turns: Iterable[Any], first: dict[str, Any], draw: DrawPass) -> None:
        """Show one turn after the other; `first` is the first line of a record."""
        with ExitStack() as stack:
            outputs: list[WatchOutput] = []
            for output in self._outputs(first, draw):
                outputs.append(output)
                stack.callback(output.close)
            for turn in turns:
                for output in outputs:
                    output.show(turn)
                if self.once:
                    return

    def _outputs(self, first: dict[str, Any], draw: DrawPass) -> Iterator[WatchOutput]:
        if self.json:
            yield WatchRecorder(None, first)
        else:
            yield LiveOutput(draw) if self.shows_live else PrintedOutput(draw)
        if self.record is not None:
            yield WatchRecorder(self.record, first)
        if self.prometheus is not None:
            yield PrometheusServer(self.prometheus, self.bind)


def process_view(turn: WatchPass, history: ReadingHistory, title: str, width: int = 80) -> RenderableType:
    """Return a turn as it is shown."""
    reading = turn.reading
    lines: list[RenderableType] = [_headline(title, reading, width), _curve(history, reading, width), _table(reading)]
    if reading.gpu is not None:
        lines.append(_gpu(reading))
    if beside := _outside_facts(reading):
        lines.append(Text(f"beside it: {', '.join(beside)}", style="dim"))
    lines += [verdict_line(verdict) for verdict in turn.verdicts]
    if not reading.exact:
        missing = "This system reports only sums: there is nothing about single mappings and pages."
        lines.append(Text(missing, style="yellow"))
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


def _table(reading: MemoryReading) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("part", no_wrap=True, overflow="ellipsis", min_width=26, max_width=34)
    for name in ("resident", "", "allocated", "full"):
        table.add_column(name, justify="right" if name else "left", width=None if name else _BAR, no_wrap=True)
    for group in GROUPS:
        parts = [part for part in reading.parts if part.group == group]
        if not parts:
            continue
        whole = AttributedPart(group, _TITLES[group], sum(p.resident for p in parts), sum(p.allocated for p in parts))
        _row(table, whole, reading.pss, style="bold")
        if group in _EXPANDED_GROUPS and (len(parts) > 1 or group == "buffers"):
            for part in parts[:_MOST_PARTS]:
                _row(table, part, reading.pss, indent="  ")
            if len(parts) > _MOST_PARTS:
                rest = sum(part.resident for part in parts[_MOST_PARTS:])
                table.add_row(f"  {len(parts) - _MOST_PARTS} more", format_bytes(rest), style="dim")
    return table


def _row(table: Table, part: AttributedPart, pss: int, style: str = "", indent: str = "") -> None:
    share = part.resident / pss if pss else 0.0
    bar = "█" * round(share * _BAR) if not indent else "─" * round(share * _BAR)
    fill = "" if part.fill is None else f"{100 * part.fill:.0f} %"
    table.add_row(indent + part.name, format_bytes(part.resident), bar, format_bytes(part.allocated), fill, style=style)


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


_QUIET_RAY_SETTINGS = {
    "RAY_LOG_TO_DRIVER": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds in which a head has to answer, and not 20
}
"""What Ray reads when it is imported: the terminal belongs to the view."""

_SHORTEST_TIMEOUT_S, _LONGEST_TIMEOUT_S = 0.5, 5.0
"""How long shards may take to answer; they are asked again when the next turn is due."""
_WIDE = 92  # columns from which on there is room for more than at 80
_COLUMNS = ("#", "node", "pid", "transitions", "full", "held", "USS", "PSS", "of limit", "unacked")
_STATE_COLOURS = {"answers": "green", "drains": "cyan", "starts": "yellow", "restarts": "yellow"}
_UNREACHABLE_COLOUR = "bold red"


def watch_ray(target: list[str], interval: float, options: OutputOptions) -> None:
    """Watch a cluster until interrupted."""
    if len(target) > 1:
        raise ArgumentError(f"TARGET ({' '.join(target)}) is no address; name host and port of Ray's head, or nothing")
    for name, value in _QUIET_RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    use_token(os.environ)
    try:
        from holdall.cluster import watch as cluster_watch  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingPackageError("--ray needs ray; run \"pip install 'holdall[ray]'\"") from error
    timeout_s = min(max(interval, _SHORTEST_TIMEOUT_S), _LONGEST_TIMEOUT_S)
    monitor = cluster_watch.ClusterMonitor(target[0] if target else None, timeout_s)
    turns = cluster_watch.ClusterWatch(monitor, interval)
    try:
        options.show(
            _cluster_passes(turns), turns.header(), lambda turn, width: cluster_view(turn, turns.history, width)
        )
    except KeyboardInterrupt:
        pass
    finally:
        monitor.close()


def _cluster_passes(turns: ClusterWatch) -> Iterator[ClusterPass]:
    while True:
        yield turns.take()
        turns.pause()


def cluster_view(turn: ClusterPass, history: ReadingHistory, width: int = 80) -> RenderableType:
    """Return a turn as it is shown."""
    lines: list[RenderableType] = [_cluster_headline(turn, history, width)]
    lines += [verdict_line(verdict) for verdict in turn.verdicts]  # first: a screen may end before the shards do
    if not turn.memories:
        lines.append(Text("no memory runs here"))
    for memory, rate in zip(turn.memories, turn.rates, strict=True):
        lines += [Text(), *_memory_summary(memory, rate), _shards_table(memory, width)]
    return Group(*lines)


def _cluster_headline(turn: ClusterPass, history: ReadingHistory, width: int) -> Text:
    left = f"ray {turn.address}  {turn.nodes} {'node' if turn.nodes == 1 else 'nodes'}"
    middle = f"  {format_bytes(turn.reading.pss)} (peak {format_bytes(turn.reading.peak)})  "
    text = Text(no_wrap=True, overflow="crop").append(left, style="bold").append(middle)
    return text.append(curve_of(history, max(width - len(left) - len(middle), 8)), style="cyan")


def _memory_summary(memory: SeenMemory, rate: float) -> list[Text]:
    known = [shard.status for shard in memory.shards if shard.status is not None]
    answering = sum(shard.answers for shard in memory.shards)
    transitions = sum(0 if status.counters is None else status.counters.transitions for status in known)
    capacity = sum(status.capacity for status in known)
    held, plain = (sum(getattr(status, name) for status in known) for name in ("held_bytes", "plain_bytes"))
    first = Text(memory.name, style="bold", no_wrap=True, overflow="ellipsis")
    durable = "" if not known else ", durable" if known[0].is_durable else ", not durable"
    first.append(f"  {answering} of {len(memory.shards)} shards answer{durable}", style="default")
    if not known:
        return [first]
    words = [f"{transitions:,} of {capacity:,} transitions ({100 * transitions / max(1, capacity):.0f} %)"]
    if rate:
        words.append(f"{rate:,.0f}/s")
    if held:
        words.append(f"{format_bytes(held)} for {format_bytes(plain)} plain ({plain / held:.1f} x)")
    lines = [first, Text("  ".join(words), style="default")]
    if memory.limiter:
        limiter = memory.limiter
        ratio = limiter["sampled"] / max(1.0, limiter["inserted"])
        within = f"within {limiter['lowest']:,.0f} and {limiter['highest']:,.0f}"
        lines.append(Text(f"limiter: {ratio:.2f} samples an insert, error {limiter['error']:,.0f} {within}"))
    return lines


def _shards_table(memory: SeenMemory, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    shown = [at for at, name in enumerate(_COLUMNS) if width >= _WIDE or name not in {"full", "PSS"}]
    for name in (_COLUMNS[at] for at in shown):
        if name == "node":
            table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=9)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=len("restarts"))
    for shard in memory.shards:
        every = _shard_cells(shard)
        cells = [every[at] for at in shown]
        colour = _STATE_COLOURS.get(shard.state, _UNREACHABLE_COLOUR)
        table.add_row(*cells, Text(shard.state, style=colour), style="" if shard.answers else "dim")
    return table


def _shard_cells(shard: SeenShard) -> list[str]:
    """Return what a shard said last, in the order of the columns."""
    status = shard.status
    if status is None or status.counters is None:
        return [str(shard.number), *[""] * 9]
    held = status.counters.transitions
    sizes = map(format_bytes, (status.held_bytes, status.uss_bytes, status.pss_bytes))
    full, of_limit = held / max(1, status.capacity), status.uss_bytes / max(1, status.limit_bytes)
    cells = [str(shard.number), status.node, str(status.pid), f"{held:,}", f"{100 * full:.0f} %", *sizes]
    return [*cells, f"{100 * of_limit:.1f} %", format_bytes(status.counters.backlog)]

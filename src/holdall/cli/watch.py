"""`holdall watch`: where a training process's memory is, where it is going, and why.

Exit codes: that of the command for `holdall watch -- command`; else 0, 1 an error that holdall raised, 2 a mistake on
the command line.
"""

import json as json_
import sys
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.live import Live

from holdall.cli.verbosity import Verbose
from holdall.cli.watch_view import view
from holdall.errors import ArgumentError, WatchError
from holdall.units import parse_bytes
from holdall.watch.exposition import Exposition
from holdall.watch.launch import Launched
from holdall.watch.record import Recorder, header, lines_of
from holdall.watch.turn import Turn, Turns


def watch(
    target: Annotated[
        list[str], typer.Argument(help="A process id; or, after --, a command that is started and watched.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Take one reading, print it, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    record: Annotated[Path | None, typer.Option(help="Write every reading here, for `holdall report`.")] = None,
    prometheus: Annotated[int | None, typer.Option(help="Serve the newest reading on this port.")] = None,
    bind: Annotated[str, typer.Option(help="The address to serve on.")] = "127.0.0.1",
    limit: Annotated[str | None, typer.Option(help="Memory that the process tree may use, as in 8GiB.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines, as they are recorded.")] = False,
    verbose: Verbose = False,
) -> None:
    """Watch a process that runs, or start one and watch it."""
    limit_bytes = None if limit is None else parse_bytes(limit, "--limit")
    launched = None if len(target) == 1 and target[0].isdigit() else Launched(target, captured=_shows_live(once, json))
    pid = int(target[0]) if launched is None else launched.pid
    code = 0
    try:
        turns = Turns(pid, interval, limit_bytes)
        outputs = _outputs(pid, json, record, prometheus, bind, interval, once)
        try:
            _watch(turns, outputs, launched, once)
        finally:
            for output in outputs:
                output.close()
    except KeyboardInterrupt:
        pass
    finally:
        if launched is not None:
            code = launched.wait()
    if code:
        raise typer.Exit(code)


def _watch(turns: Turns, outputs: "list[Output]", launched: Launched | None, once: bool) -> None:
    while turns.watcher.is_alive():
        try:
            turn = turns.take()
        except WatchError:
            if turns.watcher.is_alive() or not turns.history.readings:
                raise
            return
        for output in outputs:
            output.show(turn, turns)
        if once:
            return
        if turns.pause(None if launched is None else launched.ended_within):
            return


def _shows_live(once: bool, json: bool) -> bool:
    return sys.stdout.isatty() and not once and not json


class Output:
    """Somewhere that turns go."""

    def show(self, turn: Turn, turns: Turns) -> None:
        """Take a turn."""

    def close(self) -> None:
        """End."""


class Lines(Output):
    """JSON lines on stdout."""

    def __init__(self, first: dict[str, object]) -> None:
        typer.echo(json_.dumps(first))

    def show(self, turn: Turn, turns: Turns) -> None:
        """Print what is new."""
        for line in lines_of(turn):
            typer.echo(json_.dumps(line))


class LiveView(Output):
    """A table in the terminal that is drawn anew."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._live.start()

    def show(self, turn: Turn, turns: Turns) -> None:
        """Draw a turn in the place of the one before."""
        self._live.update(view(turn, turns.history, self._title, self._console.width), refresh=True)

    def close(self) -> None:
        """Leave the last turn on the screen."""
        self._live.stop()


class Printed(Output):
    """One table at the end, and verdicts on stderr as they come: for logs and pipes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._last: tuple[Turn, Turns] | None = None

    def show(self, turn: Turn, turns: Turns) -> None:
        """Keep a turn; tell what is new in it."""
        self._last = (turn, turns)
        for verdict in turn.news:
            typer.echo(f"holdall watch: {verdict.name}: {verdict.text}", err=True)

    def close(self) -> None:
        """Print the last turn."""
        if self._last is not None:
            console = Console()
            turn, turns = self._last
            console.print(view(turn, turns.history, self._title, console.width))


class Recorded(Output):
    """A file."""

    def __init__(self, path: Path, first: dict[str, object]) -> None:
        self._recorder = Recorder(path, first)

    def show(self, turn: Turn, turns: Turns) -> None:
        """Add a turn."""
        self._recorder.show(turn)

    def close(self) -> None:
        """Close it."""
        self._recorder.close()


class Served(Output):
    """A page for Prometheus."""

    def __init__(self, port: int, bind: str) -> None:
        self._exposition = Exposition(port, bind)

    def show(self, turn: Turn, turns: Turns) -> None:
        """Serve a turn."""
        self._exposition.show(turn)

    def close(self) -> None:
        """End the server."""
        self._exposition.close()


def _outputs(
    pid: int, json: bool, record: Path | None, prometheus: int | None, bind: str, interval: float, once: bool
) -> list[Output]:
    command = _command(pid)
    first = header(pid, command, interval)
    title = f"{' '.join(Path(word).name if '/' in word else word for word in command)} ({pid})"
    if json:
        outputs: list[Output] = [Lines(first)]
    else:
        outputs = [LiveView(title) if _shows_live(once, json) else Printed(title)]
    if record is not None:
        outputs.append(Recorded(record, first))
    if prometheus is not None:
        outputs.append(Served(prometheus, bind))
    return outputs


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error as error:
        raise ArgumentError(f"pid ({pid}) is no process that runs; see 'ps' for its id") from error

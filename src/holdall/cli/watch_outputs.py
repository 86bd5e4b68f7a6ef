"""Where the turns of a watch go: a terminal, a pipe, a file, a page for Prometheus.

In:  turns, of a process or of a cluster, and how one is drawn.  Out: as asked for on the command line.
"""

import json as json_
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from holdall.watch.exposition import Exposition
from holdall.watch.record import Recorder
from holdall.watch.turn import Turn

Draw = Callable[[Any, int], RenderableType]
"""Draws a turn in so many columns."""


class Output:
    """Somewhere that turns go."""

    def show(self, turn: Turn) -> None:
        """Take a turn."""

    def close(self) -> None:
        """End."""


class Lines(Output):
    """JSON lines on stdout."""

    def __init__(self, first: dict[str, object]) -> None:
        typer.echo(json_.dumps(first))

    def show(self, turn: Turn) -> None:
        """Print what is new."""
        for line in turn.lines():
            typer.echo(json_.dumps(line))


class LiveView(Output):
    """A table in the terminal that is drawn anew."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._live.start()

    def show(self, turn: Turn) -> None:
        """Draw a turn in the place of the one before."""
        self._live.update(self._draw(turn, self._console.width), refresh=True)

    def close(self) -> None:
        """Leave the last turn on the screen."""
        self._live.stop()


class Printed(Output):
    """One table at the end, and verdicts on stderr as they come: for logs and pipes."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._last: Turn | None = None

    def show(self, turn: Turn) -> None:
        """Keep a turn; tell what is new in it."""
        self._last = turn
        for verdict in turn.news:
            typer.echo(f"holdall watch: {verdict.name}: {verdict.text}", err=True)

    def close(self) -> None:
        """Print the last turn."""
        if self._last is not None:
            console = Console()
            console.print(self._draw(self._last, console.width))


class Recorded(Output):
    """A file."""

    def __init__(self, path: Path, first: dict[str, object]) -> None:
        self._recorder = Recorder(path, first)

    def show(self, turn: Turn) -> None:
        """Add a turn."""
        self._recorder.show(turn)

    def close(self) -> None:
        """Close it."""
        self._recorder.close()


class Served(Output):
    """A page for Prometheus."""

    def __init__(self, port: int, bind: str) -> None:
        self._exposition = Exposition(port, bind)

    def show(self, turn: Turn) -> None:
        """Serve a turn."""
        self._exposition.show(turn)

    def close(self) -> None:
        """End the server."""
        self._exposition.close()


def shows_live(once: bool, json: bool) -> bool:
    """Whether turns are drawn over each other."""
    return sys.stdout.isatty() and not once and not json


def outputs_of(
    first: dict[str, Any], draw: Draw, once: bool, json: bool, record: Path | None, prometheus: int | None, bind: str
) -> list[Output]:
    """Open what was asked for.

    Args:
        first: The first line of a record.
    """
    if json:
        outputs: list[Output] = [Lines(first)]
    else:
        outputs = [LiveView(draw) if shows_live(once, json) else Printed(draw)]
    if record is not None:
        outputs.append(Recorded(record, first))
    if prometheus is not None:
        outputs.append(Served(prometheus, bind))
    return outputs

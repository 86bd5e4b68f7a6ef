"""`holdall watch`: where a training process's memory is, where it is going, and why.

Exit codes: that of the command for `holdall watch -- command`; else 0, 1 an error that holdall raised, 2 a mistake on
the command line.
"""

from pathlib import Path
from typing import Annotated

import psutil
import typer

from holdall.cli.verbosity import Verbose
from holdall.cli.watch_outputs import Output, outputs_of, shows_live
from holdall.cli.watch_view import view
from holdall.errors import ArgumentError, WatchError
from holdall.units import parse_bytes
from holdall.watch.launch import Launched
from holdall.watch.record import header
from holdall.watch.turn import Turns


def watch(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            help="A process id; or, after --, a command that is started and watched; or, with --ray, the address of "
            "Ray's head."
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Watch all memories of the Ray cluster at TARGET, or of this machine's.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Take one reading, print it, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    record: Annotated[Path | None, typer.Option(help="Write every reading here, for `holdall report`.")] = None,
    prometheus: Annotated[int | None, typer.Option(help="Serve the newest reading on this port.")] = None,
    bind: Annotated[str, typer.Option(help="The address to serve on.")] = "127.0.0.1",
    limit: Annotated[str | None, typer.Option(help="Memory that the process tree may use, as in 8GiB.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines, as they are recorded.")] = False,
    verbose: Verbose = False,
) -> None:
    """Watch a process that runs, or start one and watch it; or the memories of a Ray cluster."""
    if ray:
        if limit is not None:
            raise typer.BadParameter("a cluster has limits of its own", param_hint="--limit")
        from holdall.cli.watch_ray import watch_ray  # noqa: PLC0415  Ray takes a second to import

        watch_ray(target or [], once, interval, json, record, prometheus, bind)
        return
    if not target:
        raise typer.BadParameter("name a process id, or a command after --", param_hint="TARGET")
    limit_bytes = None if limit is None else parse_bytes(limit, "--limit")
    launched = None if len(target) == 1 and target[0].isdigit() else Launched(target, captured=shows_live(once, json))
    pid = int(target[0]) if launched is None else launched.pid
    code = 0
    try:
        turns = Turns(pid, interval, limit_bytes)
        # What was just started may not have its own command line yet.
        command = _command(pid) if launched is None else target
        title = f"{' '.join(Path(word).name if '/' in word else word for word in command)} ({pid})"
        outputs = outputs_of(
            header(pid, command, interval),
            lambda turn, width: view(turn, turns.history, title, width),
            once,
            json,
            record,
            prometheus,
            bind,
        )
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


def _watch(turns: Turns, outputs: list[Output], launched: Launched | None, once: bool) -> None:
    while turns.watcher.is_alive():
        try:
            turn = turns.take()
        except WatchError:
            if turns.watcher.is_alive() or not turns.history.readings:
                raise
            return
        for output in outputs:
            output.show(turn)
        if once:
            return
        if turns.pause(None if launched is None else launched.ended_within):
            return


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error as error:
        raise ArgumentError(f"pid ({pid}) is no process that runs; see 'ps' for its id") from error

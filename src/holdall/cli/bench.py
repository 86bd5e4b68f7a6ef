"""`holdall bench`: which settings and which buffers are best on this machine."""

from __future__ import annotations

import typer

from holdall.cli.bench_buffers import BuffersCommand, buffers

bench = typer.Typer(no_args_is_help=True, help="Measure settings and buffers on this machine, in fresh processes.")
bench.command("buffers", cls=BuffersCommand)(buffers)


@bench.callback()
def profiles() -> None:
    """Measure settings and buffers on this machine, in fresh processes."""

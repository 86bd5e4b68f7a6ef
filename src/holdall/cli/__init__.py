"""The command line: `holdall COMMAND`; the module of a command is imported when it is called.

Results go to stdout, progress and errors to stderr. Exit codes: 0 success, 1 an error that holdall raised, 2 a mistake
on the command line, 3 the command ran and its check failed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer

from holdall.cli.conventions import OneLineErrors, PipeWriter, Verbose

__all__ = ["app", "main"]

COMMANDS = {name: name for name in ("bench", "checkpoint", "demo", "lint", "plan", "watch")}
COMMANDS |= {"report": "watch", "trim": "watch"}
"""The module of each command. A function in it, or a Typer of subcommands, has the command's name."""


class LazyCommands(OneLineErrors):
    """A group whose commands are looked up in COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in alphabetical order."""
        return sorted({*COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"holdall.cli.{COMMANDS[cmd_name]}")
        found = getattr(module, cmd_name)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = cmd_name
            return group
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name, cls=getattr(module, f"{cmd_name.upper()}_CLASS", None))(found)
        return typer.main.get_command(alone)


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"holdall {version('holdall')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def holdall(verbose: Verbose = False, version: Version = False) -> None:
    """Experience memory for deep reinforcement learning."""


def main() -> None:
    """Run the command line; the entry point of the `holdall` script."""
    sys.stdout = PipeWriter(sys.stdout)
    app(prog_name="holdall")

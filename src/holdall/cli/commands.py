"""The commands by name; the module of a command is imported when it is asked for, and no other.

A command starts as fast as what it needs itself: `holdall lint` waits for neither tables nor plans.
"""

from importlib import import_module
from typing import Any

import typer

from holdall.cli.verbosity import OneLineErrors

COMMANDS = ("bench", "checkpoint", "demo", "lint", "plan", "report", "trim", "watch")
"""Each is a module here, with a function, or a Typer of subcommands, of the same name."""


class CommandsByName(OneLineErrors):
    """A group whose commands are looked up in COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in alphabetical order."""
        return sorted({*COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        found = getattr(import_module(f"holdall.cli.{cmd_name}"), cmd_name)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = cmd_name
            return group
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(found)
        return typer.main.get_command(alone)

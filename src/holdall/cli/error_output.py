"""How errors are printed: one line on stderr, or the whole traceback after -v.

`-v` is accepted before and after the command's name.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holdall.errors import HoldallError


def _remember_verbose(context: typer.Context, verbose: bool) -> bool:
    # One dict is shared by the contexts of the group and of its command.
    context.meta["holdall.verbose"] = verbose or context.meta.get("holdall.verbose", False)
    return verbose


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_remember_verbose, help="Show the traceback of an error.")
]


class OneLineErrors(TyperGroup):
    """A group of commands whose own errors end with one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:  # typer brings its own click in some versions, and depends on it in others
        """Run the command; without -v, turn an error of holdall into one line."""
        try:
            return super().invoke(ctx)
        except HoldallError as error:
            if ctx.meta.get("holdall.verbose", False):
                raise
            typer.echo(f"holdall: {error}", err=True)
            raise typer.Exit(1) from error

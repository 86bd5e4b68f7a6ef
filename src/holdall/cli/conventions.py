"""What all commands share: -v, --json, how errors end, and files that cannot be written.

An error that holdall raises becomes one line on stderr; after -v it keeps its traceback. `-v` is accepted before and
after the command's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holdall.errors import ArgumentError, HoldallError

_VERBOSE = "holdall.verbose"
ERROR_CODE = "holdall.error_code"
"""A command sets it in its context's `meta` where 1, the exit code of errors, means something else."""
# The types of options that may be left out.
OptBool = bool | None
OptInt = int | None
OptPath = Path | None
OptText = str | None
OptTexts = list[str] | None


def option(meaning: str, *names: str, **limits: Any) -> Any:
    """Describe an option; without names it is called like the parameter."""
    return typer.Option(*names, help=meaning, **limits)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _remember_verbose(context: typer.Context, verbose: bool) -> bool:
    # One dict is shared by the contexts of the group and of its command.
    context.meta[_VERBOSE] = verbose or context.meta.get(_VERBOSE, False)
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
            if ctx.meta.get(_VERBOSE, False):
                raise
            typer.echo(f"holdall: {error}", err=True)
            raise typer.Exit(ctx.meta.get(ERROR_CODE, 1)) from error


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Name the option and the file in the error, if the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(
            f"{option} ({path}) cannot be written: {error.strerror}; name a file in a directory that exists"
        ) from error

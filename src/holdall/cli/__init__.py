"""The command line `holdall COMMAND`, and the options and errors that all commands share.

The module of a command is imported when the command is called. Results go to stdout, progress and errors to stderr. An
error that holdall raises becomes one line on stderr. With -v, before or after the command's name, the traceback of the
error is shown.
Exit codes, unless the command says otherwise: 0 success, 1 an error that holdall raised, 2 a mistake on the command
line, 3 the command ran and its check failed.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdall.errors import ArgumentError, HoldallError

__all__ = ["app", "main"]

_VERBOSE = "holdall.verbose"
ERROR_CODE = "holdall.error_code"
"""Key in a context's `meta` for the exit code of errors. Commands set it if their exit code 1 has another meaning."""
_USAGE_CODES = {"plan": 64}
"""Exit codes of mistakes on the command line, for commands whose exit code 2 has another meaning."""
# The types of options that may be left out.
OptBool = bool | None
OptInt = int | None
OptPath = Path | None
OptText = str | None
OptTexts = list[str] | None


def option(meaning: str, *names: str, **limits: Any) -> Any:
    """Return an option with the help text `meaning`. Without names, it has the name of the parameter."""
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
    """A group of commands. An error that holdall raises ends with one line and exit code 1, or that of ERROR_CODE."""

    def invoke(self, ctx: Any) -> Any:  # `ctx` is Any: its class is in click or in typer, by version.
        """Run the command. Without -v, turn an error of holdall into one line."""
        try:
            return super().invoke(ctx)
        except HoldallError as error:
            if ctx.meta.get(_VERBOSE, False):
                raise
            typer.echo(f"holdall: {error}", err=True)
            raise typer.Exit(ctx.meta.get(ERROR_CODE, 1)) from error
        except Exception as error:
            code = _USAGE_CODES.get(str(ctx.invoked_subcommand))
            if code is not None and hasattr(error, "show"):  # click shows mistakes on the command line by this method.
                error.exit_code = code  # type: ignore[attr-defined]  # of typer's own click, which has no public name
            raise


COMMAND_AFTER_DASHES = "holdall.command"
"""Key in a context's `meta` for the words after `--`."""


class CommandAfterDashes(TyperCommand):
    """A command whose arguments after `--` are another command, even if they look like options of this one."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Store the words after `--` in the context, and parse only the words before it."""
        if "--" in args:
            position = args.index("--")
            ctx.meta[COMMAND_AFTER_DASHES] = args[position + 1 :]
            args = args[:position]
        return super().parse_args(ctx, args)


class PipeWriter:
    """Standard output that discards text once the reader has closed the pipe (`holdall plan ... | head`)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, unless the reader has closed the pipe."""
        try:
            return int(self._stream.write(text))
        except BrokenPipeError:
            self._discard_rest()
            return len(text)

    def flush(self) -> None:
        """Flush, unless the reader has closed the pipe."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard_rest()

    def _discard_rest(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # Python writes the rest of the stream's buffer there.
        os.close(nowhere)


_REMEDIES = {
    errno.ENOENT: "Name a file in a directory that exists.",
    errno.ENOSPC: "Free disk space, or name a path on another disk.",
    errno.EACCES: "Name a path that you may write to.",
}
"""What the user can do about an error of the operating system, by its `errno`."""
_ANY_REMEDY = "Name another path."


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into an error that names the option and the file."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(
            f"{option} ({path}) cannot be written: {error.strerror}. {_REMEDIES.get(error.errno or 0, _ANY_REMEDY)}"
        ) from error


COMMANDS = ("bench", "checkpoint", "demo", "lint", "plan", "report", "watch")
"""Commands. The module with a command's name has a function, or a Typer of subcommands, with the same name.

If the module defines `<NAME>_CLASS` (`PLAN_CLASS` for `plan`), the command is made with that class.
"""


class LazyCommands(OneLineErrors):
    """A group whose commands are looked up in COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in alphabetical order."""
        return sorted({*COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command. Return None for an unknown name."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"holdall.cli.{cmd_name}")
        command = getattr(module, cmd_name)
        if isinstance(command, typer.Typer):
            group = typer.main.get_group(command)
            group.name = cmd_name
            return group
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name, cls=getattr(module, f"{cmd_name.upper()}_CLASS", None))(command)
        return typer.main.get_command(single)


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
    """Run the command line. This is the entry point of the `holdall` script.

    If the encoding of a stream is UTF, the bytes of a file name are printed unchanged. If it is not, characters that it
    lacks are printed as "?".
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_unicode = stream.encoding.lower().startswith("utf")
            stream.reconfigure(errors="surrogateescape" if is_unicode else "replace")
    sys.stdout = PipeWriter(sys.stdout)
    app(prog_name="holdall")

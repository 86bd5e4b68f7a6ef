"""The command line: `holdall COMMAND`; one module a command, named as the command.

Results go to stdout, progress and errors to stderr. Exit codes: 0 all is well, 1 an error that holdall raised,
2 a mistake on the command line, 3 the command ran and what it checked does not hold.
"""

import typer

from holdall.cli.commands import CommandsByName
from holdall.cli.verbosity import Verbose

__all__ = ["app", "main"]

app = typer.Typer(cls=CommandsByName, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def holdall(verbose: Verbose = False) -> None:
    """Experience memory for deep reinforcement learning."""


def main() -> None:
    """Run the command line; the entry point of the `holdall` script."""
    app(prog_name="holdall")

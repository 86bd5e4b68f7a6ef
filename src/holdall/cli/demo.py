"""`holdall demo`: train with either replay buffer and print the comparison."""

from typing import Annotated

import typer
from rich.console import Console

from holdall.cli.verbosity import Verbose
from holdall.demo.comparison import compare, table, verdict

DIFFERENT = 3  # exit code: the demo ran, and the weights are not the same


def demo(
    steps: Annotated[int, typer.Option(help="Environment steps to train for.")] = 800,
    transitions: Annotated[int, typer.Option(help="Transitions to hold while memory is measured.")] = 20_000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train SAC twice, with Stable-Baselines3's replay buffer and with holdall's, and compare them."""
    comparison = compare(steps, transitions, Console(stderr=True))
    if json:
        typer.echo(comparison.as_json())
    else:
        console = Console()
        console.print(table(comparison))
        console.print(verdict(comparison), highlight=False)
    if not comparison.weights_identical:
        raise typer.Exit(DIFFERENT)

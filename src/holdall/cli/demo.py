"""`holdall demo`: plan, train, watch, checkpoint, kill and resume on the shipped environment; a table at the end.

Exit codes: 0 success, 1 an error that holdall raised, 2 a mistake on the command line, 3 a promise does not hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdall.cli.conventions import AsJson, OptText, Verbose, option
from holdall.tools.demo.walkthrough import run_demo, table, verdict
from holdall.units import parse_bytes

DIFFERENT = 3  # exit code: the demo ran, and what it promises does not hold


def demo(
    steps: Annotated[int, option("Environment steps to train for.")] = 500,
    transitions: Annotated[int, option("Transitions to hold while memory is measured.")] = 30_000,
    limit: Annotated[OptText, option("What the plan is held against; half-way between both needs by default.")] = None,
    out: Annotated[Path, option("Where checkpoint, record and page are left.")] = Path("holdall-demo"),
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Plan, train, watch, checkpoint, kill -9, resume, and compare with Stable-Baselines3's replay buffer."""
    story = Console(stderr=json, highlight=False)
    comparison = run_demo(steps, transitions, None if limit is None else parse_bytes(limit, "limit"), out, story)
    if json:
        typer.echo(comparison.as_json())
    else:
        story.print()
        story.print(table(comparison))
        story.print(verdict(comparison))
        story.print(f"The page of what was watched: {comparison.report}", soft_wrap=True)
        story.print(f"The demo took {comparison.seconds:.0f} s.", style="dim")
    if not comparison.holds:
        raise typer.Exit(DIFFERENT)

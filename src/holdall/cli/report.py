"""`holdall report`: one HTML page of a recorded run or of the results of a bench.

Exit codes: 0 the page is written, 1 the file cannot be read or the page cannot be written.
"""

from __future__ import annotations

import json as json_format
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from holdall.cli import OptPath, Verbose, option, writing
from holdall.errors import ArgumentError
from holdall.tools.report import read_report


def report(
    file: Annotated[Path, typer.Argument(help="A file that `holdall watch --record` or `holdall bench` wrote.")],
    output: Annotated[OptPath, option("The page; FILE with the ending .html by default.", "--output", "-o")] = None,
    show: Annotated[bool, option("Open the page in the browser.", "--open")] = False,
    json: Annotated[bool, option("Print a summary as one JSON object, and write no page.", "--json")] = False,
    verbose: Verbose = False,
) -> None:
    """Turn a recorded run, or the results of a bench, into one HTML page that needs no other files."""
    content = read_report(file)
    if json:
        typer.echo(json_format.dumps({"file": str(file), "format": content.format_name} | content.summary()))
        return
    target = output or file.with_suffix(".html")
    if target.absolute() == file.absolute() or (target.exists() and target.samefile(file)):
        raise ArgumentError(f"output ({target}) is the file itself. Name another file.")
    with writing("output", target):
        target.write_text(content.page(), encoding="utf-8", errors="replace")
    typer.echo(str(target))
    if show:
        webbrowser.open(target.absolute().as_uri())

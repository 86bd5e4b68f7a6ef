"""`holdall lint`: find mistakes in training scripts and hyperparameter files.

Exit codes: 0 nothing at or above --fail-on was found, 1 a file or setting that cannot be used, 2 a mistake on the
command line, 3 something was found.
"""

from __future__ import annotations

import json as json_
import math
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import holdall
from holdall.cli import OptText, OptTexts, Verbose, option
from holdall.errors import ArgumentError
from holdall.threads import usable_cores
from holdall.tools.lint import engine
from holdall.tools.lint.finding import Finding, apply_edits
from holdall.tools.lint.rules import RULES

FOUND = 3  # exit code: the files were read, and something was found
_FEW_FILES = 200  # below this, a second process takes longer to start than it saves
_CHUNK = 40  # files that one process checks in a row: most of them are of one repository
_MOST_PROCESSES = 4


class LintFormat(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"


def lint(
    paths: Annotated[list[Path] | None, typer.Argument(help="Scripts, YAML files, or directories of them.")] = None,
    select: Annotated[OptTexts, option("Only these rules: ids or prefixes, as M or M01.")] = None,
    ignore: Annotated[OptTexts, option("All but these rules: ids or prefixes.")] = None,
    form: Annotated[LintFormat, option("How to print the findings.", "--format")] = LintFormat.TEXT,
    json: Annotated[bool, option("The same as --format json.", "--json")] = False,
    fix: Annotated[bool, option("Make the safe corrections in the files.", "--fix")] = False,
    explain: Annotated[OptText, option("Explain one rule, and check nothing.")] = None,
    fail_on: Annotated[
        OptText, option("What makes the exit code 3: error (the default), warning, info or never.")
    ] = None,
    budget: Annotated[OptText, option("Compare with this much memory instead of this machine's: 32GB.")] = None,
    vram: Annotated[OptText, option("The memory of the GPU: 16GiB. Not known otherwise.")] = None,
    sb3_version: Annotated[
        OptText, option("Assume this version of Stable-Baselines3 instead of the installed one.")
    ] = None,
    exclude: Annotated[OptTexts, option("Leave these out of directories: names or patterns.")] = None,
    verbose: Verbose = False,
) -> None:
    """Find mistakes in training scripts and hyperparameter files, without running them."""
    if explain is not None:
        typer.echo(_explain(explain))
        return
    if not paths:
        raise ArgumentError("paths (none) must name at least one script, YAML file or directory")
    settings = engine.find_settings(Path.cwd()).but(
        select=_ids(select),
        ignore=_ids(ignore),
        fail_on=fail_on,
        budget=budget,
        vram=vram,
        sb3_version=sb3_version,
        exclude=None if exclude is None else tuple(exclude),
    )
    fails_from = settings.fails_from
    files = engine.find_files(paths, settings.exclude)
    findings = _check(files, paths, settings, fix)
    typer.echo(_format_findings(findings, len(files), LintFormat.JSON if json else form))
    if fails_from is not None and any(finding.severity >= fails_from for finding in findings):
        raise typer.Exit(FOUND)


def _ids(given: list[str] | None) -> tuple[str, ...] | None:
    """Take both `--select M --select L05` and `--select M,L05`."""
    return None if given is None else tuple(one.strip() for item in given for one in item.split(",") if one.strip())


def _check(files: list[Path], named: list[Path], settings: engine.LintSettings, fix: bool) -> list[Finding]:
    processes = _idle_cores() if len(files) >= _FEW_FILES and not fix else 1
    if processes > 1:
        return check_in_processes(processes, files, named, settings)
    checker = engine.FileChecker(settings.rules(), settings.machine())
    findings: list[Finding] = []
    for path in files:
        found = checker.check(path, walked=path not in named)
        fixable = fix and any(one.edit for one in found)
        corrected, made = apply_edits(engine.read_text(path), found) if fixable else ("", [])
        if made:
            engine.write_text(path, corrected)
            rules_and_lines = ", ".join(f"{one.rule} in line {one.place.line}" for one in made)
            typer.echo(f"{path}: corrected {rules_and_lines}", err=True)
            found = checker.check(path, corrected)
        findings += found
    return findings


def _idle_cores() -> int:
    """Return how many cores there are that nobody uses all the time, at most a few."""
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(_MOST_PROCESSES, math.ceil(usable_cores() - busy)))


def check_in_processes(
    count: int, files: list[Path], named: list[Path], settings: engine.LintSettings
) -> list[Finding]:
    """Return the findings of several processes, in the order of the files."""
    import multiprocessing  # noqa: PLC0415  one script is checked without it
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

    chunks = [files[at : at + _CHUNK] for at in range(0, len(files), _CHUNK)]
    context = multiprocessing.get_context("spawn")  # this process may have threads
    with ProcessPoolExecutor(count, context, _start_checking, (settings, frozenset(named))) as pool:
        return [finding for found in pool.map(_check_chunk, chunks) for finding in found]


def _start_checking(settings: engine.LintSettings, named: frozenset[Path]) -> None:
    """Make what checks all chunks of this process: it keeps what it has read of a repository."""
    _checking.append((engine.FileChecker(settings.rules(), settings.machine()), named))


_checking: list[tuple[engine.FileChecker, frozenset[Path]]] = []


def _check_chunk(paths: Iterable[Path]) -> list[Finding]:
    checker, named = _checking[-1]
    return [finding for path in paths for finding in checker.check(path, walked=path not in named)]


def _format_findings(findings: list[Finding], files: int, form: LintFormat) -> str:
    if form is LintFormat.TEXT:
        return engine.as_text(findings)
    data = (
        engine.as_json(findings, files)
        if form is LintFormat.JSON
        else engine.as_sarif(findings, RULES, holdall.__version__)
    )
    return json_.dumps(data, indent=2)


def _explain(name: str) -> str:
    rule = next((rule for rule in RULES.values() if name in {rule.id, rule.name}), None)
    if rule is None:
        raise ArgumentError(f"explain ({name!r}) is no rule; rules are {', '.join(RULES)}")
    return engine.explain(rule)

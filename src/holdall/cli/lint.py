"""`holdall lint`: find mistakes in training scripts, and in a run that is about to train.

Exit codes: 0 nothing at or above --fail-on was found, 1 a file, setting or command that cannot be used, 2 a mistake on
the command line, 3 something was found.
"""

from __future__ import annotations

import functools
import json as json_
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from holdall.cli import AsJson, OptText, OptTexts, Verbose, option
from holdall.errors import ArgumentError
from holdall.tools import lint as linter
from holdall.tools.lint.check import check_file, find_files, read_text, write_text
from holdall.tools.lint.described import describe_buffers, describe_models
from holdall.tools.lint.finding import Finding, Severity, apply_edits
from holdall.tools.lint.machine import format_size
from holdall.tools.lint.output import describe_findings, explain, format_findings
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.settings import LintSettings, find_settings
from holdall.tools.lint.subjects import TrainedBuffer, TrainedModel
from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import Snapshot
from holdall.units import counted

FOUND = 3
"""Exit code: everything was checked, and something was found."""
_COMMAND = "holdall.lint.command"


class LintCommand(TyperCommand):
    """Everything after `--` is the command of a training, whatever it looks like."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command out of the arguments."""
        if "--" in args:
            end = args.index("--")
            ctx.meta[_COMMAND] = args[end + 1 :]
            args = args[:end]
        return super().parse_args(ctx, args)


LINT_CLASS = LintCommand  # for `holdall.cli`


def lint(
    context: typer.Context,
    paths: Annotated[list[Path] | None, typer.Argument(help="Scripts, or directories of them.")] = None,
    select: Annotated[OptTexts, option("Only these rules: codes or prefixes, as M or M01.")] = None,
    ignore: Annotated[OptTexts, option("All rules except these: codes or prefixes.")] = None,
    infos: Annotated[bool, option("List infos, too; otherwise they are only counted.", "--infos")] = False,
    json: AsJson = False,
    fix: Annotated[bool, option("Make the safe corrections in the files.", "--fix")] = False,
    explain: Annotated[OptText, option("Explain one rule by code or name, and check nothing.")] = None,
    fail_on: Annotated[
        OptText, option("What makes the exit code 3: error (the default), warning, info or never.")
    ] = None,
    budget: Annotated[OptText, option("Compare with this much memory instead of this machine's: 32GB.")] = None,
    vram: Annotated[OptText, option("The memory of the GPU: 16GiB. Unknown otherwise.")] = None,
    exclude: Annotated[OptTexts, option("Leave these out of directories: names or patterns.")] = None,
    timeout: Annotated[float, option("Seconds after which a command is stopped wherever it is.")] = 300.0,
    verbose: Verbose = False,
) -> None:
    """Find mistakes in training scripts, and in the values of a run.

    Scripts are read and never run: holdall lint train.py

    A command after -- runs until it is about to train, and is then stopped: holdall lint -- python train.py --my args
    """
    if explain is not None:
        _print_text(_explain(explain))
        return
    command: list[str] | None = context.meta.get(_COMMAND)
    if not paths and not command:
        raise ArgumentError("paths (none) must name a script or a directory, or a command must follow --")
    settings = find_settings(Path.cwd()).change(
        {
            "select": _split_codes(select),
            "ignore": _split_codes(ignore),
            "fail_on": fail_on,
            "budget": budget,
            "vram": vram,
            "exclude": None if exclude is None else tuple(exclude),
        }
    )
    fails_from = settings.fails_from
    files = find_files(paths or [], settings.exclude)
    findings = _check_files(files, paths or [], settings, fix)
    run: Snapshot | None = None
    if command:
        settings.rules()
        run = _probe(command, timeout)
        findings += linter.snapshot(run, settings)
    if json:
        data = describe_findings(findings, len(files))
        if run is not None:
            data["run"] = _describe_run(run)
        typer.echo(json_.dumps(data, indent=2))
    else:
        least = Severity.INFO if infos or fails_from is Severity.INFO else Severity.WARNING
        lines = [] if run is None else _summarise_run(run)
        _print_text("\n".join([*lines, format_findings(findings, least)]))
    if fails_from is not None and any(finding.severity >= fails_from for finding in findings):
        raise typer.Exit(FOUND)
    if run is not None:
        _require_training(run)


def _split_codes(given: list[str] | None) -> tuple[str, ...] | None:
    """Accept both `--select M --select L05` and `--select M,L05`."""
    if given is None:
        return None
    return tuple(code.strip() for item in given for code in item.split(",") if code.strip())


def _check_files(files: list[Path], named: list[Path], settings: LintSettings, fix: bool) -> list[Finding]:
    rules = settings.rules()
    machine = settings.machine()
    findings: list[Finding] = []
    for path in files:
        found = check_file(path, rules, machine, is_named=path in named)
        if fix and any(finding.edit for finding in found):
            corrected, made = apply_edits(read_text(path), found)
            write_text(path, corrected)
            words = ", ".join(f"{finding.rule} in line {finding.place.line}" for finding in made)
            typer.echo(f"{path}: corrected {words}", err=True)
            found = check_file(path, rules, machine)
        findings += found
    return findings


def _probe(command: list[str], timeout_s: float) -> Snapshot:
    """Run a command until it is about to train, and say so before."""
    typer.echo(f"Running until training is about to start: {shlex.join(command)}", err=True)
    snapshot = probe(command, timeout_s)
    for note in snapshot.notes:
        typer.echo(f"note: {note}", err=True)
    return snapshot


def _require_training(run: Snapshot) -> None:
    """Raise ArgumentError if the command failed, or ended without anything to check."""
    has_objects = bool(run.models or run.buffers or run.memories)
    if run.is_ready or (has_objects and run.error is None):
        return
    lines = (run.error or "").strip().splitlines()
    has_reason = not lines or lines[-1] in run.stopped_by
    reason = run.stopped_by if has_reason else f"{run.stopped_by} ({lines[-1]})"
    raise ArgumentError(
        f"command did not get to training: {reason}. Run the command by itself to see all of its output"
    )


def _summarise_run(run: Snapshot) -> list[str]:
    """Return what the command had built, in a few lines."""
    lines = [f"stopped after {run.after_s:.1f} s: {run.stopped_by}"]
    models = describe_models(run)
    lines += [_describe_model(model) for model in models]
    owned = [model.buffer for model in models]
    lines += [_describe_buffer(buffer) for buffer in describe_buffers(run) if buffer not in owned]
    return lines if len(lines) > 1 else [*lines, "no model and no buffer was found"]


def _describe_model(model: TrainedModel) -> str:
    text = f"{model.algorithm}, {counted(model.n_envs, 'environment')}"
    if model.total_timesteps is not None:
        text += f", {counted(model.total_timesteps, 'step')}"
    return text if model.buffer is None else f"{text}, {_describe_buffer(model.buffer)}"


def _describe_buffer(buffer: TrainedBuffer) -> str:
    capacity = "" if buffer.capacity is None else f" of {counted(buffer.capacity, 'transition')}"
    if buffer.kind == "memory":
        budget = f", budget {format_size(buffer.nbytes)}" if buffer.nbytes else ""
        return f"{buffer.title}{capacity}{budget}"
    about = "" if buffer.is_exact else "about "
    return f"{buffer.title}{capacity}: {about}{format_size(buffer.nbytes)}"


def _describe_run(run: Snapshot) -> dict[str, Any]:
    """Return the key `run` of the object that `--json` prints."""
    buffers = [
        {"title": buffer.title, "capacity": buffer.capacity, "bytes": buffer.nbytes, "is_exact": buffer.is_exact}
        for buffer in describe_buffers(run)
    ]
    return {
        "stopped_by": run.stopped_by,
        "after_s": round(run.after_s, 3),
        "is_ready": run.is_ready,
        "models": [model.algorithm for model in describe_models(run)],
        "buffers": buffers,
        "error": run.error,
    }


def _print_text(text: str) -> None:
    """Print lines. A terminal breaks long ones between words; a file or a pipe gets them whole."""
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        wrap = functools.partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(line if len(line) <= columns else wrap(line) for line in text.splitlines())
    typer.echo(text)


def _explain(name: str) -> str:
    for rule in RULES.values():
        if name in {rule.code, rule.name}:
            return explain(rule)
    raise ArgumentError(f"explain ({name!r}) is not a rule. Rules are {', '.join(RULES)}")

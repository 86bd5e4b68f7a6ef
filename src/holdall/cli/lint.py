"""`holdall lint`: find mistakes in training scripts, and in a run that is about to train.

Exit codes: 0 no finding reaches --fail-on, 1 a file, setting or command cannot be used, 2 a mistake on the command
line, 3 a finding reaches --fail-on.
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

from holdall.cli import COMMAND_AFTER_DASHES, AsJson, CommandAfterDashes, OptText, OptTexts, Verbose, option
from holdall.errors import ArgumentError
from holdall.tools.lint.check import Rules, check_file, check_run, find_files, read_text, write_text
from holdall.tools.lint.finding import Finding, Severity, apply_edits
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.output import describe_findings, explain, format_findings
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.run import get_budget_bytes, name_buffer, pair_with_models
from holdall.tools.lint.settings import find_settings
from holdall.tools.probe.launch import probe
from holdall.tools.probe.snapshot import FoundBuffer, FoundMemory, FoundModel, Snapshot
from holdall.units import count_noun, format_bytes

FOUND = 3
"""Exit code: everything was checked, and a finding is at least as severe as --fail-on."""

LINT_CLASS = CommandAfterDashes


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
    timeout: Annotated[float, option("Seconds after which a command is stopped.")] = 300.0,
    verbose: Verbose = False,
) -> None:
    """Find mistakes in training scripts, and in the values of a run.

    Scripts are read and never run: holdall lint train.py

    A command after -- runs until it is about to train, and is then stopped: holdall lint -- python train.py --my args
    """
    if explain is not None:
        _print_text(_explain_rule(explain))
        return
    command: list[str] | None = context.meta.get(COMMAND_AFTER_DASHES)
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
    if paths and not files:
        raise ArgumentError(f"paths ({', '.join(map(str, paths))}) contain no Python script. Name other directories.")
    rules = settings.rules()
    machine = settings.machine()
    findings = _check_files(files, paths or [], rules, machine, fix)
    run: Snapshot | None = None
    if command:
        run = _probe(command, timeout)
        findings += check_run(run, rules, machine)
    if json:
        data = describe_findings(findings, len(files))
        if run is not None:
            data["run"] = _describe_run(run)
        typer.echo(json_.dumps(data, indent=2))
    else:
        min_severity = Severity.INFO if infos or fails_from is Severity.INFO else Severity.WARNING
        lines = [] if run is None else _summarise_run(run)
        _print_text("\n".join([*lines, format_findings(findings, min_severity, len(files))]))
    if fails_from is not None and any(finding.severity >= fails_from for finding in findings):
        raise typer.Exit(FOUND)
    if run is not None:
        _require_training(run)


def _split_codes(given: list[str] | None) -> tuple[str, ...] | None:
    """Accept both `--select M --select L05` and `--select M,L05`."""
    if given is None:
        return None
    return tuple(code.strip() for item in given for code in item.split(",") if code.strip())


def _check_files(files: list[Path], named: list[Path], rules: Rules, machine: Machine, fix: bool) -> list[Finding]:
    """Return the findings in `files`. With `fix`, correct the files first. The user named the paths `named`."""
    findings: list[Finding] = []
    for path in files:
        in_file = check_file(path, rules, machine, is_named=path in named)
        if fix and _correct_file(path, in_file):
            in_file = check_file(path, rules, machine)
        findings += in_file
    return findings


def _correct_file(path: Path, findings: list[Finding]) -> bool:
    """Make the edits of `findings` in a file. Return whether the file changed."""
    if not any(finding.edit for finding in findings):
        return False
    corrected, made = apply_edits(read_text(path), findings)
    if not made:
        return False
    write_text(path, corrected)
    words = ", ".join(f"{finding.rule} in line {finding.place.line}" for finding in made)
    typer.echo(f"{path}: corrected {words}", err=True)
    return True


def _probe(command: list[str], timeout_s: float) -> Snapshot:
    """Tell the user that `command` is run, and run it until it is about to train."""
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
    reason = run.stopped_by
    error_lines = (run.error or "").strip().splitlines()
    if error_lines and error_lines[-1] not in reason:
        reason += f" ({error_lines[-1]})"
    advice = "Pass a larger --timeout" if run.trigger == "timeout" else "Run the command by itself to see its output"
    raise ArgumentError(f"command did not get to training: {reason}. {advice}")


def _summarise_run(run: Snapshot) -> list[str]:
    """Return what the command had built, in a few lines."""
    lines = [f"stopped after {run.after_s:.1f} s: {run.stopped_by}"]
    lines += [_describe_model(model) for model in run.learning_models]
    lines += [_describe_buffer(buffer, model) for buffer, model in pair_with_models(run.buffers, run)]
    lines += [_describe_memory(memory) for memory, _ in pair_with_models(run.memories, run)]
    return lines if len(lines) > 1 else [*lines, "no model and no buffer was found"]


def _describe_model(model: FoundModel) -> str:
    text = f"{model.algorithm}, {count_noun(model.n_envs, 'environment')}"
    return text if model.run_steps is None else f"{text}, {count_noun(model.run_steps, 'step')}"


def _describe_buffer(buffer: FoundBuffer, model: FoundModel | None) -> str:
    capacity = "" if buffer.transitions is None else f" of {count_noun(buffer.transitions, 'transition')}"
    about = "" if buffer.is_exact else "about "
    return f"{name_buffer(buffer, model)}{capacity}: {about}{format_bytes(buffer.nbytes)}"


def _describe_memory(memory: FoundMemory) -> str:
    nbytes = get_budget_bytes(memory)
    budget = f", budget {format_bytes(nbytes)}" if nbytes else ""
    return f"{memory.owner} (holdall) of {count_noun(memory.capacity, 'transition')}{budget}"


def _describe_run(run: Snapshot) -> dict[str, Any]:
    """Return the key `run` of the object that `--json` prints."""
    buffers = [
        {
            "title": name_buffer(buffer, model),
            "capacity": buffer.transitions,
            "bytes": buffer.nbytes,
            "is_exact": buffer.is_exact,
        }
        for buffer, model in pair_with_models(run.buffers, run)
    ]
    buffers += [
        {"title": memory.owner, "capacity": memory.capacity, "bytes": get_budget_bytes(memory), "is_exact": True}
        for memory, _ in pair_with_models(run.memories, run)
    ]
    return {
        "stopped_by": run.stopped_by,
        "after_s": round(run.after_s, 3),
        "is_ready": run.is_ready,
        "models": [model.algorithm for model in run.learning_models],
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


def _explain_rule(name: str) -> str:
    for rule in RULES.values():
        if name in {rule.code, rule.name}:
            return explain(rule)
    raise ArgumentError(f"explain ({name!r}) is not a rule. Rules are {', '.join(RULES)}")

"""Run rules over a file, or over the snapshot of a run.

Nothing of a file is executed or imported. A file that cannot be parsed gives one finding (F01), never an exception.
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from holdall.errors import ArgumentError
from holdall.tools.lint.finding import Edit, Finding, Place
from holdall.tools.lint.ignores import IgnoreComment, read_ignores
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match, Rule
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.rules.files import NotParsed, UnusedIgnore
from holdall.tools.lint.source import Source
from holdall.tools.probe.snapshot import Snapshot

Rules = Mapping[str, Rule]
_SUFFIX = ".py"
_SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"})


def check_text(text: str, path: str, rules: Rules, machine: Machine) -> list[Finding]:
    """Return the findings in a Python file, in the order of its text."""
    found = list(_check_source(text, path, rules, machine))
    ignores = read_ignores(text, path)
    findings = [finding for finding in found if not any(ignore.accepts(finding) for ignore in ignores)]
    if UnusedIgnore.code in rules:
        findings += _find_unused_ignores(ignores, found, rules)
    return sorted(findings, key=lambda finding: (finding.place, finding.rule))


def _check_source(text: str, path: str, rules: Rules, machine: Machine) -> Iterator[Finding]:
    try:
        source = Source(path, text)
    except SyntaxError as error:
        line = error.lineno or 1
        column = error.offset or 1
        yield from _report_not_parsed(error.msg, Place(path, line, column, line, column + 1), rules)
        return
    except (ValueError, RecursionError, MemoryError) as error:
        yield from _report_not_parsed(str(error) or type(error).__name__, Place(path, 1, 1, 1, 1), rules)
        return
    for rule in rules.values():
        try:
            for match in rule.check_source(source, machine):
                yield rule.make_finding(match)
        except RecursionError:
            yield from _report_not_parsed(
                f"expressions are nested too deeply for {rule.code}", Place(path, 1, 1, 1, 1), rules
            )


def _report_not_parsed(message: str, place: Place, rules: Rules) -> Iterator[Finding]:
    if NotParsed.code in rules:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield NotParsed().make_finding(Match(f"cannot be parsed by Python {python}: {message}", place))


def _find_unused_ignores(ignores: list[IgnoreComment], found: list[Finding], rules: Rules) -> Iterator[Finding]:
    """Yield a finding for every comment that accepts nothing, or that names a rule for which it accepts nothing.

    A comment may still be needed if a rule that it accepts was not checked, because the rule is not in force or needs
    a run. Such a comment gives no finding.
    """
    checked = {code for code, rule in rules.items() if not rule.needs_run}
    all_codes = frozenset(code for code, rule in RULES.items() if not rule.needs_run)
    for ignore in ignores:
        used = {finding.rule for finding in found if ignore.accepts(finding)}
        if ignore.codes:
            unused = ignore.codes - used
            names = ", ".join(sorted(unused))
        else:
            unused = frozenset() if used else all_codes
            names = "all rules"
        if unused and unused <= checked:
            removal = Edit(ignore.place, ignore.text, "") if not used else None
            message = f"this comment ignores {names}, but nothing is found here"
            yield UnusedIgnore().make_finding(Match(message, ignore.place, edit=removal))


def check_run(run: Snapshot, rules: Rules, machine: Machine) -> list[Finding]:
    """Return the findings in the models and buffers of a run, the worst first."""
    findings = [rule.make_finding(match) for rule in rules.values() for match in rule.check_run(run, machine)]
    return sorted(findings, key=lambda finding: (-finding.severity, finding.rule))


def check_file(path: Path, rules: Rules, machine: Machine, *, is_named: bool = True) -> list[Finding]:
    """Return the findings in a file.

    A file that cannot be read raises ArgumentError if the user named it. In a directory, it gives a finding.
    """
    try:
        text = read_text(path)
    except ArgumentError as error:
        if is_named:
            raise
        return list(_report_not_parsed(str(error), Place(str(path), 1, 1, 1, 1), rules))
    return check_text(text, str(path), rules, machine)


def find_files(paths: Iterable[Path], exclude: Iterable[str] = ()) -> list[Path]:
    """Return the scripts that `paths` name or contain, each once."""
    patterns = tuple(exclude)
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(sorted(_walk(path, patterns)))
        elif not path.exists():
            raise ArgumentError(f"path ({path}) does not exist. Name a script or a directory.")
        elif path.is_file() and path.suffix == _SUFFIX:
            found[path] = None
        else:
            raise ArgumentError(
                f"path ({path}) is not a Python script. holdall lint reads files that end in {_SUFFIX}. "
                "To check the values of a run, write: holdall lint -- python train.py"
            )
    return list(found)


def _walk(directory: Path, exclude: tuple[str, ...]) -> Iterator[Path]:
    for entry in directory.iterdir():
        is_excluded = any(fnmatch(entry.name, pattern) or fnmatch(str(entry), pattern) for pattern in exclude)
        if entry.name.startswith(".") or is_excluded:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in _SKIPPED_FOLDERS and not (entry / "pyvenv.cfg").exists():
                yield from _walk(entry, exclude)
        elif entry.suffix == _SUFFIX and entry.is_file():
            yield entry


def read_text(path: Path) -> str:
    """Return the text of a file in the encoding that it declares, with its own line ends."""
    try:
        data = path.read_bytes()
        return data.decode(_detect_encoding(data))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ArgumentError(f"path ({path}) cannot be read: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write `text` in the encoding that the file on disk declares."""
    try:
        path.write_bytes(text.encode(_detect_encoding(path.read_bytes())))
    except OSError as error:
        raise ArgumentError(f"path ({path}) cannot be written: {error}") from error


def _detect_encoding(data: bytes) -> str:
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]

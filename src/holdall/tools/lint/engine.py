"""The lint itself: settings, files in, findings out, as lines, as JSON and as SARIF 2.1.0; a rule as Markdown.

In:  prefixes of rule ids and a `[tool.holdall.lint]` table; paths, or the text of a script or hyperparameter file.
Out: findings in the order of the text, without those that a comment ignores.
Invariant: nothing of a file is executed or imported; a file that cannot be parsed is one finding, not an exception.
"""

from __future__ import annotations

import codecs
import gc
import hashlib
import io
import os
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

from holdall.errors import ArgumentError, MissingPackageError
from holdall.tools.lint.finding import Edit, Finding, Severity, SourceRange, drop_stale_edits, read_ignores
from holdall.tools.lint.rule import Rule, RuleExample, not_parsed, unused_ignore
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.run import ConfiguredRun, Machine, buffer_of, detect_machine
from holdall.tools.lint.source.hyperparameters import YamlError, may_hold_runs, read_runs
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.repository import Repository
from holdall.tools.lint.source.script import Script
from holdall.tools.plan.spec import parse_version
from holdall.units import parse_bytes

ALL_RULES = "ALL"
YAML_SUFFIXES = (".yml", ".yaml")
Rules = Mapping[str, Rule]
_SUFFIXES = (".py", *YAML_SUFFIXES)
_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"})


@dataclass(frozen=True, slots=True)
class LintSettings:
    """What a user can set; None and empty stand for the default."""

    select: tuple[str, ...] = (ALL_RULES,)
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"  # or "warning", "info", "never"
    budget: str | int | None = None  # the memory to judge by, instead of this machine's
    vram: str | int | None = None
    sb3_version: str | None = None  # to judge by, instead of the one that is installed
    exclude: tuple[str, ...] = ()  # names or patterns of paths that a directory's walk leaves out

    def rules(self) -> dict[str, Rule]:
        """Return the rules in force."""
        for prefix in (*self.select, *self.ignore):
            if prefix != ALL_RULES and not any(rule.startswith(prefix) for rule in RULES):
                raise ArgumentError(
                    f"rule ({prefix!r}) is none; rules are {', '.join(RULES)}, or a prefix, or {ALL_RULES}"
                )
        chosen = (name for name in RULES if _matches(name, self.select) and not _matches(name, self.ignore))
        return {name: RULES[name] for name in chosen}

    def machine(self) -> Machine:
        """Return this machine, with the limits that were set."""
        return detect_machine(
            None if self.budget is None else parse_bytes(self.budget, "budget"),
            None if self.vram is None else parse_bytes(self.vram, "vram"),
            None if self.sb3_version is None else parse_version(self.sb3_version),
        )

    @property
    def fails_from(self) -> Severity | None:
        """The least severity that makes the command fail; None: nothing does."""
        if self.fail_on == "never":
            return None
        try:
            return Severity[self.fail_on.upper()]
        except KeyError:
            raise ArgumentError(f"fail_on ({self.fail_on!r}) must be one of error, warning, info, never") from None

    def but(self, **changes: Any) -> LintSettings:
        """Return the settings with those that are not None changed."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def _matches(name: str, prefixes: Sequence[str]) -> bool:
    return any(prefix == ALL_RULES or name.startswith(prefix) for prefix in prefixes)


def find_settings(start: Path) -> LintSettings:
    """Read `[tool.holdall.lint]` of the nearest pyproject.toml, upwards from a directory."""
    for directory in (start, *start.parents):
        file = directory / "pyproject.toml"
        if file.is_file():
            return read_settings(file)
    return LintSettings()


def read_settings(file: Path) -> LintSettings:
    """Read `[tool.holdall.lint]` of a file."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{file} cannot be read: {error}") from error
    table: Any = document
    for name in ("tool", "holdall", "lint"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise ArgumentError(f"{file}: {name} ({table!r}) must be a table; write [tool.holdall.lint]")
    known = {field.name.replace("_", "-"): field.name for field in fields(LintSettings)}
    given = {}
    for key, value in table.items():
        if key not in known:
            raise ArgumentError(f"{file}: [tool.holdall.lint] {key} is unknown; known are {', '.join(known)}")
        wants_list = isinstance(getattr(LintSettings(), known[key]), tuple)
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if wants_list != is_list:
            wanted = "a list of strings" if wants_list else "one value"
            raise ArgumentError(f"{file}: [tool.holdall.lint] {key} ({value!r}) must be {wanted}")
        given[known[key]] = tuple(value) if is_list else value
    return LintSettings().but(**given)


def check_text(
    text: str, path: str, rules: Rules, machine: Machine, repository: Repository | None = None
) -> list[Finding]:
    """Return what is wrong with a file: a Python script, or YAML by its name's ending.

    Args:
        repository: The files around a script that its imports may mean; None: the script stands alone.
    """
    if path.endswith(YAML_SUFFIXES):
        found = list(_check_yaml(text, path, rules, machine))
    else:
        found = list(_check_script(text, path, rules, machine, repository or Repository(None)))
    once: dict[tuple[str, SourceRange, str], Finding] = {}  # what holds under several conditions is said once
    for one in found:
        once.setdefault((one.rule, one.place, repr(one.numbers) if one.numbers else one.message), one)
    kept = drop_stale_edits(text, _not_ignored(list(once.values()), text, path, rules))
    return sorted(kept, key=lambda one: (one.place, one.rule))


def check_runs(runs: Iterable[ConfiguredRun], rules: Rules, machine: Machine) -> Iterator[Finding]:
    """Yield what is wrong with runs, whatever they were read from."""
    for run in runs:
        for rule in rules.values():
            if rule.about in {"run", "search", "buffer"}:
                variants = (run,) if rule.about == "search" else run.variants
                found: dict[SourceRange, Finding] = {}
                if rule.about == "buffer":  # the largest, of those that need no condition
                    order = {id(one): (one.condition != "", -(one.count("buffer_size") or 0)) for one in variants}
                    variants = tuple(sorted(variants, key=lambda one: order[id(one)]))
                for variant in variants:
                    of = buffer_of(variant, machine) if rule.about == "buffer" else variant
                    for one in _when(variant.condition, rule.findings(of, machine) if of is not None else ()):
                        found.setdefault(one.place, one)
                yield from found.values()


def _when(condition: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings, each with the condition under which it holds."""
    for one in findings:
        yield replace(one, message=f"{one.message} (when {condition})") if condition else one


def _check_script(text: str, path: str, rules: Rules, machine: Machine, repository: Repository) -> Iterator[Finding]:
    try:
        script = Script.parse(text, path)
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        yield from _not_parsed(rules, error.msg, SourceRange(path, line, column, line, column + 1))
        return
    except (ValueError, RecursionError, MemoryError) as error:
        yield from _not_parsed(rules, str(error) or type(error).__name__, SourceRange.whole(path))
        return
    training = TrainingReader(script, repository)
    yield from check_runs(training.runs, rules, machine)
    about_buffers = {name: rule for name, rule in rules.items() if rule.sees_buffers}
    yield from check_runs(training.buffers_as_runs, about_buffers, machine)
    for rule in rules.values():
        if rule.about == "script":
            if rule.concerns(text):
                yield from rule.findings(script, training, machine)
        elif rule.about == "buffer":
            for buffer in training.buffers:
                yield from _when(buffer.condition, rule.findings(buffer, machine))


class FileChecker:
    """Checks files one after the other, and keeps what it has read of their repositories."""

    def __init__(self, rules: Rules, machine: Machine) -> None:
        self._rules, self._machine = rules, machine
        self._repositories: dict[Path | None, Repository] = {}
        self._roots: dict[Path, Repository] = {}

    def check(self, path: Path, text: str | None = None, *, walked: bool = False) -> list[Finding]:
        """Return what is wrong with a file; `text` stands for what it holds."""
        try:
            text = read_text(path) if text is None else text
        except ArgumentError as error:
            if not walked:
                raise
            return list(_not_parsed(self._rules, str(error), SourceRange.whole(str(path))))
        if walked and path.suffix in YAML_SUFFIXES and not may_hold_runs(text):
            return []
        collects = gc.isenabled()
        gc.disable()  # a tree has no cycles, and its thousands of objects are looked through again and again
        try:
            return check_text(text, str(path), self._rules, self._machine, self._repository(path))
        except MissingPackageError:
            raise
        except Exception as error:
            message = f"lint failed on it ({type(error).__name__}: {error}); please report the file"
            return list(_not_parsed(self._rules, message, SourceRange.whole(str(path)), Severity.WARNING))
        finally:
            if collects:
                gc.enable()

    def _repository(self, path: Path) -> Repository:
        if path.suffix in YAML_SUFFIXES:
            return Repository(None)
        directory = path.resolve().parent
        if directory not in self._roots:
            found = Repository.around(path)
            self._roots[directory] = self._repositories.setdefault(found.root, found)
        return self._roots[directory]


def _check_yaml(text: str, path: str, rules: Rules, machine: Machine) -> Iterator[Finding]:
    try:
        runs = read_runs(text, path)
    except YamlError as error:
        yield from _not_parsed(rules, str(error), error.place)
        return
    yield from check_runs(runs, rules, machine)


def _not_parsed(
    rules: Rules, message: str, place: SourceRange, severity: Severity = Severity.ERROR
) -> Iterator[Finding]:
    if not_parsed.id in rules:
        yield from (replace(one, severity=severity) for one in not_parsed.findings(message, place))


def _not_ignored(found: list[Finding], text: str, path: str, rules: Rules) -> Iterator[Finding]:
    """Yield the findings that no comment accepts, and the comments that accept nothing."""
    ignores = read_ignores(text)
    yield from (one for one in found if not any(ignore.accepts(one) for ignore in ignores))
    for ignore in ignores:
        used = {one.rule for one in found if ignore.accepts(one)}
        idle = ignore.ids - used
        # A rule that was not asked for may well find something; only what was looked for is idle.
        if unused_ignore.id not in rules or not idle <= rules.keys() or (used if not ignore.ids else not idle):
            continue
        place = SourceRange(path, ignore.line, ignore.start + 1, ignore.line, ignore.end + 1)
        comment = text.split("\n")[ignore.line - 1][ignore.start : ignore.end]
        named = ", ".join(sorted(idle)) or "all rules"
        removal = Edit(place, comment, "") if idle == ignore.ids else None
        yield from unused_ignore.findings(named, place, removal)


def find_files(paths: Iterable[Path], exclude: Iterable[str] = ()) -> list[Path]:
    """Return the files that paths mean, each once."""
    patterns = tuple(exclude)
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(sorted(_walk(path, patterns)))
        elif path.is_file() and path.suffix in _SUFFIXES:
            found[path] = None
        elif path.exists():
            raise ArgumentError(
                f"path ({path}) is no script and no YAML file; holdall lint reads {', '.join(_SUFFIXES)}"
            )
        else:
            raise ArgumentError(f"path ({path}) does not exist")
    return list(found)


def _walk(directory: Path, exclude: tuple[str, ...]) -> Iterator[Path]:
    for entry in directory.iterdir():
        is_excluded = any(fnmatch(entry.name, pattern) or fnmatch(str(entry), pattern) for pattern in exclude)
        if entry.name.startswith(".") or is_excluded:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in _SKIPPED and not (entry / "pyvenv.cfg").exists():
                yield from _walk(entry, exclude)
        elif entry.suffix in _SUFFIXES and entry.is_file():
            yield entry


def read_text(path: Path) -> str:
    """Return a file's text, in the encoding that it declares and with the line ends that it has."""
    if path.exists() and not path.is_file():
        raise ArgumentError(f"path ({path}) cannot be read: it is no regular file")  # a pipe would be waited for
    try:
        data = path.read_bytes()
        return data.decode(_encoding(path, data))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ArgumentError(f"path ({path}) cannot be read: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file's text back, in the encoding that it declared."""
    try:
        path.write_bytes(text.encode(_encoding(path, path.read_bytes())))
    except OSError as error:
        raise ArgumentError(f"path ({path}) cannot be written: {error}") from error


def _encoding(path: Path, data: bytes) -> str:
    if path.suffix in YAML_SUFFIXES:
        return "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]


SCHEMA_VERSION = 1
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def as_line(finding: Finding) -> str:
    """Write one finding."""
    place = finding.place
    where = f"{place.path}:{place.line}:{place.column}" if place.line else place.path
    return f"{where}: {finding.rule} {finding.severity.word}: {finding.message} [{finding.name}]"


def as_text(findings: Sequence[Finding]) -> str:
    """Write findings, and what they are in all."""
    return "\n".join([*map(as_line, findings), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Count findings: `1 error, 2 warnings, 0 infos`."""
    counted = Counter(finding.severity for finding in findings)
    words = [f"{counted[s]} {s.word}{'' if counted[s] == 1 else 's'}" for s in sorted(Severity, reverse=True)]
    return ", ".join(words)


def as_json(findings: Sequence[Finding], files: int) -> dict[str, Any]:
    """Return the object that `--format json` prints."""
    counted = Counter(finding.severity.word for finding in findings)
    return {
        "schema_version": SCHEMA_VERSION,
        "files": files,
        "counts": {severity.word: counted[severity.word] for severity in sorted(Severity, reverse=True)},
        "findings": [_finding(finding) for finding in findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    what = {"rule": finding.rule, "name": finding.name, "severity": finding.severity.word, "message": finding.message}
    return what | asdict(finding.place) | {"numbers": dict(finding.numbers), "fixable": finding.edit is not None}


def as_sarif(findings: Sequence[Finding], rules: Mapping[str, Rule], version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log with one run."""
    indices = {name: index for index, name in enumerate(rules)}
    described = [_descriptor(rule) for rule in rules.values()]
    driver = {"name": "holdall lint", "semanticVersion": version, "rules": described}
    results = [_result(finding, indices[finding.rule]) for finding in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _descriptor(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.doc.what},
        "fullDescription": {"text": rule.doc.why},
        "help": {"text": f"{rule.doc.why} {rule.doc.fix}"},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(finding: Finding, index: int) -> dict[str, Any]:
    location = {"artifactLocation": _artifact(finding.place), "region": _region(finding.place)}
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"holdall/v1": _fingerprint(finding)},
    }
    if finding.edit is not None:
        edit = finding.edit
        replacement = {"deletedRegion": _region(edit.place), "insertedContent": {"text": edit.text}}
        change = {"artifactLocation": _artifact(edit.place), "replacements": [replacement]}
        result["fixes"] = [{"description": {"text": f"--fix for {finding.rule}"}, "artifactChanges": [change]}]
    return result


def _artifact(place: SourceRange) -> dict[str, str]:
    path = Path(place.path)
    return {"uri": path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))}


def _region(place: SourceRange) -> dict[str, int]:
    start = {"startLine": place.line, "startColumn": place.column}
    return start | {"endLine": place.end_line, "endColumn": place.end_column}


def _fingerprint(finding: Finding) -> str:
    """Name a finding by what it says and not by its line, so that it stays the same when lines move."""
    text = f"{finding.rule}|{finding.place.path}|{finding.message}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]  # a path may be no Unicode


def explain(rule: Rule) -> str:
    """Write one rule."""
    doc = rule.doc
    parts = [f"### {rule.id} {rule.name} ({rule.severity.word})", doc.what, f"**Why it matters.** {doc.why}"]
    parts += ["**Example.**", *map(_fenced, doc.bad), f"**Fix.** {doc.fix}", *map(_fenced, doc.good)]
    return "\n\n".join(parts)


def _fenced(case: RuleExample) -> str:
    language = "yaml" if case.file.endswith(".yml") else "python"
    name = [f"# {case.file}"] if language == "yaml" else []
    return "\n".join([f"```{language}", *name, case.source.rstrip("\n"), "```"])

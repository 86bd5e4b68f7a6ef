"""The lint itself: files in, findings out.

In:  the text of a script or hyperparameter file, or runs; the rules in force; the machine.
Out: findings in the order of the text, without those that a comment ignores.
Invariant: nothing of a file is executed or imported; a file that cannot be parsed is one finding, not an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from holdall.lint.finding import Finding, Place
from holdall.lint.fix import drop_impossible
from holdall.lint.ignores import read_ignores
from holdall.lint.machine import Machine
from holdall.lint.rule import Rule, RunRule, ScriptRule, Subject
from holdall.lint.rules.file import NotParsed, UnusedIgnore
from holdall.lint.run import Run
from holdall.lint.source.hyperparameters import YamlError, read_runs
from holdall.lint.source.script import Script
from holdall.lint.source.training import Training

YAML_SUFFIXES = (".yml", ".yaml")

Rules = Mapping[str, Rule]


def check_text(text: str, path: str, rules: Rules, machine: Machine) -> list[Finding]:
    """Return what is wrong with a file: a Python script, or YAML by its name's ending."""
    check = _check_yaml if path.endswith(YAML_SUFFIXES) else _check_script
    found = list(check(text, path, rules, machine))
    kept = drop_impossible(text, _not_ignored(found, text, path, rules))
    return sorted(kept, key=lambda one: (one.place, one.rule))


def check_runs(runs: Iterable[Run], rules: Rules, machine: Machine) -> Iterator[Finding]:
    """Yield what is wrong with runs, whatever they were read from."""
    for run in runs:
        for rule in rules.values():
            if isinstance(rule, RunRule):
                yield from _check_run(rule, run, machine)


def _check_run(rule: RunRule, run: Run, machine: Machine) -> Iterator[Finding]:
    seen: set[Place] = set()
    for variant in (run,) if rule.sees_searches else run.variants:
        for finding in rule.check(variant, machine):
            if finding.place not in seen:
                seen.add(finding.place)
                yield finding


def _check_script(text: str, path: str, rules: Rules, machine: Machine) -> Iterator[Finding]:
    try:
        script = Script.parse(text, path)
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        yield from _not_parsed(rules, error.msg, Place(path, line, column, line, column + 1))
        return
    except (ValueError, RecursionError, MemoryError) as error:
        yield from _not_parsed(rules, str(error) or type(error).__name__, Place.whole(path))
        return
    training = Training(script)
    yield from check_runs(training.runs, rules, machine)
    subject = Subject(script, training)
    for rule in rules.values():
        if isinstance(rule, ScriptRule):
            yield from rule.check(subject, machine)


def _check_yaml(text: str, path: str, rules: Rules, machine: Machine) -> Iterator[Finding]:
    try:
        runs = read_runs(text, path)
    except YamlError as error:
        yield from _not_parsed(rules, str(error), error.place)
        return
    yield from check_runs(runs, rules, machine)


def _not_parsed(rules: Rules, message: str, place: Place) -> Iterator[Finding]:
    rule = rules.get(NotParsed.id)
    if isinstance(rule, NotParsed):
        yield from rule.report(message, place)


def _not_ignored(found: list[Finding], text: str, path: str, rules: Rules) -> Iterator[Finding]:
    """Yield the findings that no comment accepts, and the comments that accept nothing."""
    ignores = read_ignores(text)
    yield from (one for one in found if not any(ignore.accepts(one) for ignore in ignores))
    unused = rules.get(UnusedIgnore.id)
    for ignore in ignores:
        used = {one.rule for one in found if ignore.accepts(one)}
        idle = ignore.ids - used
        # A rule that was not asked for may well find something; only what was looked for is idle.
        if not isinstance(unused, UnusedIgnore) or not idle <= rules.keys() or (not ignore.ids and used):
            continue
        if idle or not ignore.ids:
            place = Place(path, ignore.line, ignore.start + 1, ignore.line, ignore.end + 1)
            line = text.split("\n")[ignore.line - 1]
            yield from unused.report(ignore, idle, place, line[ignore.start : ignore.end])

"""Every rule about files finds the mistake of its bad examples, and nothing in its good ones.

The first examples are in the rule's docstring, further ones are in rule_cases.txt, in the same notation. Rules about
runs are tested in tests/integration/sb3/test_lint_runs.py, from their docstrings, too.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdall.tools.lint.check import check_text
from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Rule, RuleDoc, RuleExample
from holdall.tools.lint.rules import RULES, collect_rules

MACHINE = Machine(cores=8, ram_bytes=32 * 2**30, limit_bytes=32 * 2**30, limit_name="RAM", python=(3, 11))
FILE = Path(__file__).with_name("rule_cases.txt").read_text(encoding="utf-8")
PARTS = re.split(r"^== (\w+)\n", FILE, flags=re.MULTILINE)
FURTHER = {code: RuleDoc.read(text) for code, text in zip(PARTS[1::2], PARTS[2::2], strict=True)}
NOTHING = RuleDoc("", "", "", (), ())


def cases(kind: str) -> list[Any]:
    found = []
    for rule in RULES.values():
        examples = [*getattr(rule.doc, kind), *getattr(FURTHER.get(rule.code, NOTHING), kind)]
        if not rule.needs_run:
            found += [pytest.param(rule, one, id=f"{rule.code}-{number}") for number, one in enumerate(examples)]
    return found


def check(example: RuleExample) -> list[Finding]:
    machine = MACHINE
    if "python" in example.machine:
        major, minor = map(int, example.machine["python"].split("."))
        machine = replace(machine, python=(major, minor))
    return check_text(example.source, "train.py", RULES, machine)


@pytest.mark.parametrize(("rule", "example"), cases("bad"))
def test_a_bad_example_is_found(rule: Rule, example: RuleExample) -> None:
    findings = [finding for finding in check(example) if finding.rule == rule.code]
    assert findings
    lines = example.source.split("\n")
    for finding in findings:
        assert (finding.name, finding.severity) == (rule.name, rule.severity)
        assert 1 <= finding.place.line <= finding.place.end_line <= len(lines)
        assert 1 <= finding.place.column <= len(lines[finding.place.line - 1]) + 1
        assert finding.message
        assert "\n" not in finding.message


@pytest.mark.parametrize(("rule", "example"), cases("good"))
def test_a_good_example_is_left_alone(rule: Rule, example: RuleExample) -> None:
    assert [finding for finding in check(example) if finding.rule == rule.code] == []


@pytest.mark.parametrize(("rule", "example"), [*cases("bad"), *cases("good")])
def test_an_example_shows_no_error_but_that_of_its_rule(rule: Rule, example: RuleExample) -> None:
    errors = {finding.rule for finding in check(example) if finding.severity is Severity.ERROR}
    assert errors <= {rule.code}


@pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
def test_a_rule_is_explained_and_shown(rule: Rule) -> None:
    assert re.fullmatch(r"[FLMPS]\d\d", rule.code)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", rule.name)
    assert all(text.strip() for text in (rule.doc.what, rule.doc.why, rule.doc.fix))
    assert len(rule.doc.bad) == len(rule.doc.good) == 1


def test_no_two_rules_share_a_name_and_further_cases_have_a_rule() -> None:
    assert len({rule.name for rule in RULES.values()}) == len(RULES)
    assert FURTHER.keys() <= {code for code, rule in RULES.items() if not rule.needs_run}


def test_two_rules_cannot_have_one_code() -> None:
    class First(Rule):
        code = "X01"

    class Second(Rule):
        code = "X01"

    assert [type(rule) for rule in collect_rules([First, First, int, 1]).values()] == [First]
    with pytest.raises(ValueError, match="First and Second have the code X01"):
        collect_rules([First, Second])

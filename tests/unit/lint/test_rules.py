"""Every rule finds what its bad examples show, and nothing in its good ones.

The first of either kind stands in the rule's docstring, the others in rule_cases.txt, in the same notation.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdall.tools.lint import rules
from holdall.tools.lint.engine import check_text
from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.rule import REFERENCE_MACHINE, Rule, RuleDoc, RuleExample
from holdall.tools.lint.rules import RULES

_FILE = Path(__file__).with_name("rule_cases.txt").read_text(encoding="utf-8")
_PARTS = re.split(r"^== (\w+)\n", _FILE, flags=re.MULTILINE)
FURTHER = {name: RuleDoc.read(text) for name, text in zip(_PARTS[1::2], _PARTS[2::2], strict=True)}


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(rule, case, id=f"{rule.id}-{number}")
        for rule in RULES.values()
        for number, case in enumerate(
            [*getattr(rule.doc, kind), *(getattr(FURTHER[rule.id], kind) if rule.id in FURTHER else ())]
        )
    ]


def found(rule: Rule, case: RuleExample) -> list[Finding]:
    machine = replace(REFERENCE_MACHINE, **dict(case.machine))  # type: ignore[arg-type]  # a case names fields of Machine
    everything = check_text(case.source, case.file, RULES, machine)
    return [finding for finding in everything if finding.rule == rule.id]


@pytest.mark.parametrize(("rule", "case"), cases("bad"))
def test_what_is_wrong_is_found(rule: Rule, case: RuleExample) -> None:
    findings = found(rule, case)
    assert findings
    lines = case.source.split("\n")
    for finding in findings:
        assert (finding.name, finding.severity) == (rule.name, rule.severity)
        assert 1 <= finding.place.line <= finding.place.end_line <= len(lines)
        assert 1 <= finding.place.column <= len(lines[finding.place.line - 1]) + 1
        assert finding.message
        assert "\n" not in finding.message


@pytest.mark.parametrize(("rule", "case"), cases("good"))
def test_what_is_right_is_left_alone(rule: Rule, case: RuleExample) -> None:
    assert found(rule, case) == []


@pytest.mark.parametrize(("rule", "case"), [*cases("bad"), *cases("good")])
def test_a_case_shows_no_error_but_its_rules_own(rule: Rule, case: RuleExample) -> None:
    machine = replace(REFERENCE_MACHINE, **dict(case.machine))  # type: ignore[arg-type]  # a case names fields of Machine
    found_here = check_text(case.source, case.file, RULES, machine)
    assert {finding.rule for finding in found_here if finding.severity is Severity.ERROR} <= {rule.id}


@pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
def test_a_rule_is_explained_and_shown(rule: Rule) -> None:
    assert re.fullmatch(r"[FLMPS]\d\d", rule.id)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", rule.name)
    assert all(text.strip() for text in (rule.doc.what, rule.doc.why, rule.doc.fix))
    assert len(rule.doc.bad) == len(rule.doc.good) == 1


def test_the_further_cases_are_all_read() -> None:
    assert set(FURTHER) <= set(RULES)
    assert sum(len(doc.bad) + len(doc.good) for doc in FURTHER.values()) == len(re.findall(r"(?m)^(?:Bad|Good)", _FILE))
    assert len(cases("bad")) + len(cases("good")) >= 190


def test_every_family_of_rules_is_in_force() -> None:
    files = {file.stem for file in Path(rules.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {rule.check.__module__.rpartition(".")[2] for rule in RULES.values()} - {"rule"}


def test_there_are_thirty_rules_or_more_and_no_two_share_a_name() -> None:
    assert len(RULES) >= 30
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


def test_sizes_are_said_in_both_units() -> None:
    (finding,) = found(RULES["M01"], RULES["M01"].doc.bad[0])
    assert "42.63 GB (39.70 GiB)" in finding.message
    assert finding.numbers["needed_bytes"] == 42_628 * 1_000_000


def test_the_buffer_that_failed_is_not_recommended_larger() -> None:
    # 300,000 transitions did not fit into 9.21 GB; what is recommended instead has to.
    (finding,) = found(RULES["M01"], FURTHER["M01"].bad[0])
    (advised,) = [int(text.replace(",", "")) for text in re.findall(r"buffer_size=([\d,]+)", finding.message)]
    assert advised * 42_628 <= 0.8 * 9_210_000_000 < (advised + 1) * 42_628


def test_the_rollout_of_two_screens_is_what_was_measured() -> None:
    # (144, 160, 3) x 4 frames, 8192 steps of 2 environments: 4,320 MiB of observations, twice that at the first update.
    (finding,) = found(RULES["M14"], RULES["M14"].doc.bad[0])
    observations = 144 * 160 * 3 * 4 * 8192 * 2
    assert observations == 4_320 * 2**20
    rest = (8 + 6 * 4) * 8192 * 2
    assert finding.numbers["smallest_bytes"] == 2 * observations + rest
    assert finding.numbers["largest_bytes"] == 3 * (2 * observations + rest)


def test_old_versions_store_four_bytes_for_each_byte_of_an_image() -> None:
    (finding,) = found(RULES["M04"], RULES["M04"].doc.bad[0])
    assert finding.numbers["saved_bytes"] == 3 * 1_080 * 2**20

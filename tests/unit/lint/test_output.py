"""The output of lint: lines, counts, JSON with the documented keys, and the explanation of a rule."""

import json

from holdall.tools.lint import text
from holdall.tools.lint.finding import Severity
from holdall.tools.lint.output import describe_findings, explain, format_findings
from holdall.tools.lint.rules import RULES

FINDINGS = text(
    "import gc\nimport pickle\npickle.dump(replay_buffer, file, 4)\nfor b in c:\n    gc.collect()\n", "src/my train.py"
)


def test_infos_are_counted_and_listed_on_request() -> None:
    lines = format_findings(FINDINGS, Severity.WARNING).split("\n")
    assert len(lines) == 2
    assert lines[0].startswith("src/my train.py:3:1: S03 warning: replay_buffer is pickled with protocol 4")
    assert lines[0].endswith("[pickle-copies-arrays]")
    assert lines[1] == "0 errors, 1 warning, 1 info (--infos lists them)"
    all_lines = format_findings(FINDINGS, Severity.INFO).split("\n")
    assert all_lines[1].startswith("src/my train.py:5:5: P06 info: gc.collect() in a loop")
    assert all_lines[2] == "0 errors, 1 warning, 1 info"


def test_json_has_the_documented_keys() -> None:
    data = json.loads(json.dumps(describe_findings(FINDINGS, 1)))
    assert list(data) == ["schema_version", "files", "counts", "findings"]
    assert data["counts"] == {"error": 0, "warning": 1, "info": 1}
    assert data["findings"][0] == {
        "rule": "S03",
        "name": "pickle-copies-arrays",
        "severity": "warning",
        "message": FINDINGS[0].message,
        "path": "src/my train.py",
        "line": 3,
        "column": 1,
        "end_line": 3,
        "end_column": 36,
        "numbers": {"protocol": 4},
        "fixable": True,
    }


def test_a_rule_is_explained_with_its_examples() -> None:
    lines = explain(RULES["L05"]).split("\n")
    assert lines[0] == "# L05 batch-does-not-divide-rollout (warning)"
    assert lines.count("```python") == 2
    assert any(line.startswith("**Why is this bad?**") for line in lines)
    assert "`holdall lint -- COMMAND`" in lines[2]
    assert "`holdall lint FILES`" in explain(RULES["S03"])

"""What is printed: lines, JSON by its documented keys, SARIF as code hosts read it."""

import json

from holdall.tools.lint.engine import as_json, as_sarif, as_text, check_text, explain
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

FINDINGS = check_text(
    "import pickle\npickle.dump(replay_buffer, file)\nfor b in c:\n    loss.backward()\n    total += loss\n",
    "src/my train.py",
    RULES,
    REFERENCE_MACHINE,
)


def test_text_is_one_line_a_finding_and_one_that_counts() -> None:
    lines = as_text(FINDINGS).split("\n")
    assert lines[0].startswith("src/my train.py:2:1: S03 warning: ")
    assert lines[0].endswith("[pickle-copies-arrays]")
    assert lines[-1] == "0 errors, 2 warnings, 0 infos"


def test_json_has_the_documented_keys() -> None:
    data = json.loads(json.dumps(as_json(FINDINGS, 1)))
    assert list(data) == ["schema_version", "files", "counts", "findings"]
    assert data["counts"] == {"error": 0, "warning": 2, "info": 0}
    assert data["findings"][0] == {
        "rule": "S03",
        "name": "pickle-copies-arrays",
        "severity": "warning",
        "message": FINDINGS[0].message,
        "path": "src/my train.py",
        "line": 2,
        "column": 1,
        "end_line": 2,
        "end_column": 33,
        "numbers": {"protocol": 4},
        "fixable": True,
    }


def test_sarif_has_what_the_standard_requires() -> None:
    log = json.loads(json.dumps(as_sarif(FINDINGS, RULES, "0.1.0")))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        assert result["message"]["text"]
        (location,) = result["locations"]
        region = location["physicalLocation"]["region"]
        assert min(region.values()) >= 1
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "src/my%20train.py"
    (fix,) = run["results"][0]["fixes"]
    (change,) = fix["artifactChanges"]
    (replacement,) = change["replacements"]
    assert replacement["insertedContent"]["text"] == ", protocol=5"


def test_a_fingerprint_outlives_lines_that_move() -> None:
    text = "import pickle\npickle.dump(replay_buffer, file)\n"
    first, moved = (
        as_sarif(check_text(version, "a.py", RULES, REFERENCE_MACHINE), RULES, "0")["runs"][0]["results"][0]
        for version in (text, "\n\n" + text)
    )
    assert first["partialFingerprints"] == moved["partialFingerprints"]
    assert first["locations"] != moved["locations"]


def test_a_rule_is_explained_with_its_example() -> None:
    text = explain(RULES["L05"])
    assert text.startswith("### L05 batch-does-not-divide-rollout (warning)")
    assert "**Why it matters.**" in text
    assert "```yaml" in text


def test_a_path_that_is_no_unicode_is_quoted_byte_by_byte() -> None:
    """Python reads the byte 0xff of a file name as a lone surrogate."""
    found = check_text("import pickle\npickle.dump(replay_buffer, file)\n", "a\udcff.py", RULES, REFERENCE_MACHINE)
    (result,) = as_sarif(found, RULES, "0")["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%FF.py"
    assert result["partialFingerprints"]

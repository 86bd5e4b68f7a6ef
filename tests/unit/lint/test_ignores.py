"""`# holdall: ignore[...]` accepts the findings that it names, on its own line or the next line of code."""

import pytest

from holdall import lint

DUMP = "pickle.dump(replay_buffer, file, 4)"


def codes(text: str) -> list[str]:
    return [finding.rule for finding in lint.text(text)]


def test_a_finding_without_a_comment_is_reported() -> None:
    assert codes(f"import pickle\n{DUMP}") == ["S03"]


@pytest.mark.parametrize(
    "text",
    [
        f"import pickle\n{DUMP}  # holdall: ignore[S03]",
        f"import pickle\n{DUMP}  # holdall: ignore",
        f"import pickle\n{DUMP}  # because. holdall: no # holdall: ignore[S03]",
        f"import pickle\n# holdall: ignore[S03]\n{DUMP}",
        f"import pickle\n# holdall: ignore[S03]\n# for old readers\n\n{DUMP}",
        f"# holdall: ignore-file[S03]\nimport pickle\n{DUMP}\n{DUMP}",
        "import pickle\npickle.dump(\n    replay_buffer,\n    file,\n    4,\n)  # holdall: ignore[S03]",
    ],
)
def test_a_comment_accepts_the_findings_that_it_names(text: str) -> None:
    assert codes(text) == []


def test_a_comment_accepts_no_other_findings() -> None:
    assert codes(f"import pickle\n{DUMP}  # holdall: ignore[P01]\n{DUMP}") == ["S03", "F02", "S03"]


def test_an_unused_code_of_a_comment_is_found() -> None:
    (finding,) = lint.text(f"import pickle\n{DUMP}  # holdall: ignore[S03, P01]")
    assert (finding.rule, finding.edit) == ("F02", None)
    assert "P01" in finding.message
    assert "S03" not in finding.message


@pytest.mark.parametrize("comment", ["# holdall: ignore[S03]", "# holdall: ignore", "# holdall: ignore-file"])
@pytest.mark.parametrize("settings", [lint.Settings(select=("F02", "L01")), lint.Settings(ignore=("S03",))], ids=str)
def test_a_comment_is_not_unused_if_a_rule_that_it_accepts_was_not_checked(
    comment: str, settings: lint.Settings
) -> None:
    assert lint.text(f"import pickle\n{DUMP}  {comment}", settings=settings) == []


def test_a_comment_for_a_rule_about_runs_is_not_unused_in_a_file() -> None:
    assert codes("batch_size = 64  # holdall: ignore[L05]") == []


@pytest.mark.parametrize("comment", ["# holdall: ignore", "# holdall: ignore-file", "# holdall: ignore[S03]"])
def test_a_comment_that_accepts_nothing_is_found_and_can_be_removed(comment: str) -> None:
    (finding,) = lint.text(f"import pickle  {comment}")
    assert finding.rule == "F02"
    assert finding.edit is not None
    assert finding.edit.old.strip() == comment

"""`# holdall: ignore[...]` hides the findings that it names, on the lines that it is about, and no others."""

import pytest

from holdall import lint

DUMP = "pickle.dump(replay_buffer, file, 4)"


def codes(text: str) -> list[str]:
    return [finding.rule for finding in lint.text(text)]


def test_without_a_comment_it_is_found() -> None:
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
def test_a_comment_hides_what_it_names(text: str) -> None:
    assert codes(text) == []


def test_a_comment_hides_nothing_else() -> None:
    assert codes(f"import pickle\n{DUMP}  # holdall: ignore[P01]\n{DUMP}") == ["S03", "F02", "S03"]


def test_one_of_several_rules_in_a_comment_is_idle() -> None:
    (finding,) = lint.text(f"import pickle\n{DUMP}  # holdall: ignore[S03, P01]")
    assert (finding.rule, finding.edit) == ("F02", None)
    assert "P01" in finding.message
    assert "S03" not in finding.message


def test_a_rule_that_is_not_in_force_or_needs_a_run_is_not_called_idle() -> None:
    settings = lint.Settings(select=("F02", "L01"))
    assert lint.text(f"import pickle\n{DUMP}  # holdall: ignore[S03]", settings=settings) == []
    assert codes("batch_size = 64  # holdall: ignore[L05]") == []

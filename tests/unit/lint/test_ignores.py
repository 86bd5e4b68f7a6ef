"""`# holdall: ignore[...]` hides what it names, on the lines that it is about, and nothing else."""

import pytest

from holdall.tools.lint.engine import check_text
from holdall.tools.lint.rule import REFERENCE_MACHINE
from holdall.tools.lint.rules import RULES

DUMP = "pickle.dump(replay_buffer, file)"


def ids(text: str, path: str = "train.py") -> list[str]:
    return [finding.rule for finding in check_text(text, path, RULES, REFERENCE_MACHINE)]


def test_without_a_comment_it_is_found() -> None:
    assert ids(f"import pickle\n{DUMP}") == ["S03"]


@pytest.mark.parametrize(
    "text",
    [
        f"import pickle\n{DUMP}  # holdall: ignore[S03]",
        f"import pickle\n{DUMP}  # holdall: ignore",
        f"import pickle\n{DUMP}  # because. holdall: no # holdall: ignore[S03]",
        f"import pickle\n# holdall: ignore[S03]\n{DUMP}",
        f"import pickle\n# holdall: ignore[S03]\n# for old readers\n\n{DUMP}",
        f"# holdall: ignore-file[S03]\nimport pickle\n{DUMP}\n{DUMP}",
        "import pickle\npickle.dump(\n    replay_buffer,\n    file,\n)  # holdall: ignore[S03]",
    ],
)
def test_a_comment_hides_what_it_names(text: str) -> None:
    assert ids(text) == []


def test_a_comment_hides_nothing_else() -> None:
    text = f"import pickle\n{DUMP}  # holdall: ignore[M01]\n{DUMP}"
    assert ids(text) == ["S03", "F02", "S03"]


def test_several_rules_in_one_comment_and_one_of_them_idle() -> None:
    text = f"import pickle\n{DUMP}  # holdall: ignore[S03, M01]"
    (finding,) = check_text(text, "train.py", RULES, REFERENCE_MACHINE)
    assert (finding.rule, finding.edit) == ("F02", None)
    assert "M01" in finding.message
    assert "S03" not in finding.message


def test_a_rule_that_is_not_in_force_is_not_called_idle() -> None:
    only = {name: RULES[name] for name in ("F02", "L01")}
    assert check_text(f"import pickle\n{DUMP}  # holdall: ignore[S03]", "train.py", only, REFERENCE_MACHINE) == []


def test_comments_work_in_yaml_too() -> None:
    text = "A-v0:\n  policy: MlpPolicy\n  n_envs: 2\n  n_steps: 100\n  batch_size: 64"
    assert ids(text, "ppo.yml") == ["L05"]
    assert ids(text + "  # holdall: ignore[L05]", "ppo.yml") == []

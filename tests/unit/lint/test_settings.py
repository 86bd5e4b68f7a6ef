"""The rules in force: the command line replaces pyproject.toml, which replaces the defaults."""

from pathlib import Path

import pytest

from holdall.errors import ArgumentError
from holdall.machine import Limit
from holdall.tools.lint.finding import Severity
from holdall.tools.lint.machine import detect_machine
from holdall.tools.lint.rules import RULES
from holdall.tools.lint.settings import LintSettings, find_settings, read_settings


def test_all_rules_are_in_force_by_default() -> None:
    assert list(LintSettings().rules()) == list(RULES)


def test_prefixes_select_and_ignore() -> None:
    assert list(LintSettings(select=("P01", "F")).rules()) == ["F01", "F02", "P01"]
    chosen = LintSettings(select=("M",), ignore=("M0",)).rules()
    assert chosen
    assert all(name.startswith("M1") for name in chosen)


@pytest.mark.parametrize("wrong", [{"select": ("X",)}, {"ignore": ("M99",)}])
def test_a_rule_that_does_not_exist_is_refused(wrong: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ArgumentError, match="rule"):
        LintSettings().change(wrong).rules()


def test_limits_of_the_user_replace_those_of_the_machine() -> None:
    machine = LintSettings(budget="9.21GB", vram="16GiB").machine()
    assert (machine.limit_bytes, machine.limit_name) == (9_210_000_000, "the budget")
    assert machine.vram_bytes == 16 * 2**30
    assert machine.cores >= 1


def test_the_limit_of_a_container_counts_if_it_is_below_the_memory_of_the_machine() -> None:
    group = Limit("control group /sys/fs/cgroup/train", 0, 2**20)
    machine = detect_machine(groups=[group])
    assert (machine.limit_bytes, machine.limit_name) == (2**20, group.name)
    assert machine.is_contained
    assert machine.ram_bytes > 2**20


def test_a_budget_is_not_a_container() -> None:
    group = Limit("control group /sys/fs/cgroup/train", 0, 2**20)
    assert not detect_machine(budget_bytes=2**43, groups=[group]).is_contained


def test_severities_are_words() -> None:
    assert LintSettings(fail_on="warning").fails_from is Severity.WARNING
    assert LintSettings(fail_on="never").fails_from is None
    with pytest.raises(ArgumentError, match="fail_on"):
        _ = LintSettings(fail_on="often").fails_from


def test_the_nearest_pyproject_is_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.holdall.lint]\nselect = ["M", "L"]\nignore = ["L10"]\nfail-on = "warning"\nbudget = "32GB"\n'
    )
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings = find_settings(below)
    assert settings == LintSettings(select=("M", "L"), ignore=("L10",), fail_on="warning", budget="32GB")
    assert settings.change({"budget": "8GB", "ignore": None}).budget == "8GB"


@pytest.mark.parametrize(
    "table",
    ["choose = ['M']", "select = 'M'", "fail-on = ['error']", "fail-on = 3", "select = [1]", "= 3"],
    ids=lambda text: text,
)
def test_an_invalid_setting_is_refused_with_its_name(tmp_path: Path, table: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(f"[tool.holdall.lint]\n{table}\n")
    with pytest.raises(ArgumentError, match=r"pyproject\.toml"):
        read_settings(file)


def test_a_project_without_the_table_has_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_settings(tmp_path) == LintSettings()


@pytest.mark.parametrize("text", ["tool = 5", "[tool]\nholdall = [1]", "[tool.holdall]\nlint = 'M'"])
def test_a_pyproject_without_tables_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ArgumentError, match="must be a table"):
        read_settings(tmp_path / "pyproject.toml")

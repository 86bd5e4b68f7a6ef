"""`holdall lint`, run as its users run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import holdall.lint
from holdall.cli import app
from holdall.cli.lint import check_in_processes
from holdall.tools.lint.engine import LintSettings

BAD = """
from stable_baselines3 import SAC
SAC("MlpPolicy", "Pendulum-v1", learning_starts=10_000).learn(5_000)
"""
WARNS = "import pickle\npickle.dump(replay_buffer, file)\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "train.py").write_text(BAD)
    (tmp_path / "save.py").write_text(WARNS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lint(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lint", *arguments])


@pytest.mark.usefixtures("project")
def test_an_error_ends_with_exit_code_3_and_a_warning_with_0() -> None:
    told = lint("train.py")
    assert told.exit_code == 3
    assert "train.py:3:49: L03 error: " in told.stdout
    assert lint("save.py").exit_code == 0
    assert lint("save.py", "--fail-on", "warning").exit_code == 3
    assert lint("train.py", "--fail-on", "never").exit_code == 0


@pytest.mark.usefixtures("project")
def test_rules_are_selected_and_ignored() -> None:
    assert lint("train.py", "--ignore", "L03").exit_code == 0
    assert lint("train.py", "--select", "M,P").exit_code == 0
    assert lint("train.py", "--select", "M", "--select", "L03").exit_code == 3


def test_directories_are_walked_without_what_is_not_the_projects_own(project: Path) -> None:
    for name in (".venv", "node_modules", "deep"):
        (project / name).mkdir()
        (project / name / "other.py").write_text(BAD)
    (project / "notes.yml").write_text("services: {web: {image: nginx}}")
    data = json.loads(lint(".", "--json", "--fail-on", "never").stdout)
    assert data["files"] == 4
    late = {finding["path"] for finding in data["findings"] if finding["rule"] == "L03"}
    assert late == {"train.py", "deep/other.py"}
    data = json.loads(lint(".", "--json", "--exclude", "deep", "--fail-on", "never").stdout)
    assert data["files"] == 3


@pytest.mark.usefixtures("project")
def test_sarif_is_printed() -> None:
    log = json.loads(lint("train.py", "--format", "sarif").stdout)
    assert "L03" in {result["ruleId"] for result in log["runs"][0]["results"]}


def test_fix_changes_the_file_and_says_so(project: Path) -> None:
    told = lint("save.py", "--fix", "--fail-on", "warning")
    assert told.exit_code == 0
    assert told.stderr == "save.py: corrected S03 in line 2\n"
    assert (project / "save.py").read_text() == "import pickle\npickle.dump(replay_buffer, file, protocol=5)\n"


def test_settings_come_from_pyproject(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.holdall.lint]\nignore = ["L03"]\n')
    assert lint("train.py").exit_code == 0
    assert lint("train.py", "--ignore", "M").exit_code == 3


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "wrong",
    [
        ["nowhere.py"],
        [],
        ["pyproject.toml"],
        ["train.py", "--select", "Q"],
        ["train.py", "--budget", "lots"],
        ["train.py", "--fail-on", "sometimes"],
        ["--explain", "Q1"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_one_line_and_exit_code_1(wrong: list[str]) -> None:
    told = lint(*wrong)
    assert told.exit_code == 1
    assert told.stderr.startswith("holdall: ")
    assert told.stderr.count("\n") == 1


@pytest.mark.usefixtures("project")
def test_a_mistake_on_the_command_line_is_exit_code_2() -> None:
    assert lint("train.py", "--format", "xml").exit_code == 2


def test_a_rule_is_explained_by_id_and_by_name() -> None:
    assert lint("--explain", "M05").stdout == lint("--explain", "flatten-doubles-rollout").stdout
    assert "n_envs" in lint("--explain", "M14").stdout


def test_files_of_any_encoding_are_read_and_written_back(project: Path) -> None:
    file = project / "latin.py"
    text = "# -*- coding: latin-1 -*-\n# Gr\u00fc\u00dfe\nimport pickle\npickle.dump(replay_buffer, file)\n"
    file.write_bytes(text.encode("latin-1"))
    assert lint("latin.py", "--fix").exit_code == 0
    assert file.read_bytes() == text.replace("file)", "file, protocol=5)").encode("latin-1")


def test_nothing_of_a_script_is_executed_and_nothing_heavy_is_imported(project: Path) -> None:
    mark = project / "executed"
    head = f"open({str(mark)!r}, 'w').close()\nimport torch\nimport stable_baselines3\n"
    (project / "train.py").write_text(head + BAD)
    heavy = ["torch", "stable_baselines3", "yaml", "ray", "numba", "rich", "holdall.cli.plan", "holdall.cli.demo"]
    program = (
        "import sys, holdall.cli\n"
        "sys.argv = ['holdall', 'lint', 'train.py']\n"
        "try:\n    holdall.cli.main()\nexcept SystemExit as end:\n    assert end.code == 3, end.code\n"
        f"print(*[name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=project)
    assert done.stderr.split() == []
    assert not mark.exists()


def test_several_processes_find_what_one_finds_in_the_same_order(project: Path) -> None:
    sources = (BAD, WARNS, "import torch\nwhile True:\n    torch.cuda.empty_cache()\n")
    for number in range(50):
        (project / f"more_{number}.py").write_text(sources[number % 3])
    files = sorted(project.glob("*.py"))
    assert check_in_processes(2, files, [], LintSettings()) == holdall.lint.files(files)

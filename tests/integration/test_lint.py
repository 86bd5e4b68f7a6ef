"""`holdall lint`, run as its users run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdall.cli import app

ERROR = """\
from stable_baselines3.common.vec_env import SubprocVecEnv
env = SubprocVecEnv([make] * 4)
"""
WARNS = "import pickle\npickle.dump(replay_buffer, file, 4)\n"
INFOS = "import gc\nwhile True:\n    gc.collect()\n"
TRAINING = """\
import sys
from stable_baselines3 import SAC
starts = int(sys.argv[1])
model = SAC("MlpPolicy", "Pendulum-v1", buffer_size=20_000, learning_starts=starts)
model.learn(5_000)
open("trained", "w").close()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "train.py").write_text(ERROR)
    (tmp_path / "save.py").write_text(WARNS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lint(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lint", *arguments])


# ---------------------------------------------------------------- files


@pytest.mark.usefixtures("project")
def test_an_error_ends_with_exit_code_3_and_a_warning_with_0() -> None:
    result = lint("train.py")
    assert result.exit_code == 3
    assert "train.py:2:7: M12 error: " in result.stdout
    assert lint("save.py").exit_code == 0
    assert lint("save.py", "--fail-on", "warning").exit_code == 3
    assert lint("train.py", "--fail-on", "never").exit_code == 0


def test_infos_are_only_counted_unless_they_are_asked_for(project: Path) -> None:
    (project / "loop.py").write_text(INFOS)
    assert lint("loop.py").stdout == "0 errors, 0 warnings, 1 info in 1 file (--infos lists them)\n"
    assert "loop.py:3:5: P06 info: " in lint("loop.py", "--infos").stdout
    failed = lint("loop.py", "--fail-on", "info")
    assert failed.exit_code == 3
    assert "P06" in failed.stdout


@pytest.mark.usefixtures("project")
def test_rules_are_selected_and_ignored() -> None:
    assert lint("train.py", "--ignore", "M12").exit_code == 0
    assert lint("train.py", "--select", "L,P").exit_code == 0
    assert lint("train.py", "--select", "L", "--select", "M12").exit_code == 3


def test_directories_are_searched_without_installed_packages(project: Path) -> None:
    for name in (".venv", "node_modules", "deep"):
        (project / name).mkdir()
        (project / name / "other.py").write_text(ERROR)
    data = json.loads(lint(".", "--json", "--fail-on", "never").stdout)
    assert data["files"] == 3
    assert data["counts"] == {"error": 2, "warning": 1, "info": 0}
    found = {finding["path"] for finding in data["findings"] if finding["rule"] == "M12"}
    assert found == {"train.py", "deep/other.py"}
    data = json.loads(lint(".", "--json", "--exclude", "deep", "--fail-on", "never").stdout)
    assert data["files"] == 2
    (project / "data").mkdir()
    nothing = lint("data")
    assert nothing.exit_code == 1
    assert "paths (data) contain no Python script" in nothing.stderr


def test_fix_corrects_the_file_and_prints_the_correction(project: Path) -> None:
    result = lint("save.py", "--fix", "--fail-on", "warning")
    assert result.exit_code == 0
    assert result.stderr == "save.py: corrected S03 in line 2\n"
    assert (project / "save.py").read_text() == WARNS.replace("4", "5")


def test_fix_prints_nothing_about_an_unchanged_file(project: Path) -> None:
    """Edits of a file with old Macintosh line ends cannot be placed."""
    text = WARNS.replace("\n", "\r").encode()
    (project / "save.py").write_bytes(text)
    assert lint("save.py", "--fix").stderr == ""
    assert (project / "save.py").read_bytes() == text


def test_settings_come_from_pyproject(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.holdall.lint]\nignore = ["M12"]\n')
    assert lint("train.py").exit_code == 0
    assert lint("train.py", "--ignore", "P").exit_code == 3


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "wrong",
    [
        ["nowhere.py"],
        [],
        ["--"],
        ["pyproject.toml"],
        ["train.py", "--select", "Q"],
        ["train.py", "--budget", "lots"],
        ["train.py", "--fail-on", "sometimes"],
        ["--explain", "Q1"],
        ["--", "no-such-program"],
    ],
    ids=" ".join,
)
def test_an_unusable_argument_is_one_line_and_exit_code_1(wrong: list[str]) -> None:
    result = lint(*wrong)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("holdall: ")
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("project")
def test_a_mistake_on_the_command_line_is_exit_code_2() -> None:
    assert lint("train.py", "--format", "xml").exit_code == 2


def test_a_file_that_python_cannot_parse_is_an_error_at_its_place(project: Path) -> None:
    (project / "broken.py").write_text("def train(:\n    pass\n")
    result = lint("broken.py")
    assert result.exit_code == 3
    assert result.stdout.startswith("broken.py:1:11: F01 error: cannot be parsed by Python 3.")


def test_a_file_in_another_encoding_is_refused_by_name_and_skipped_in_a_directory(project: Path) -> None:
    (project / "latin.py").write_bytes("# Grüße\nx = 1\n".encode("latin-1"))
    result = lint("latin.py")
    assert result.exit_code == 1
    assert "latin.py" in result.stderr
    result = lint(".", "--ignore", "M12")
    assert result.exit_code == 3
    assert "latin.py:1:1: F01 error: " in result.stdout
    assert "save.py:2:1: S03 warning: " in result.stdout


def test_files_of_a_declared_encoding_are_read_and_written_back(project: Path) -> None:
    file = project / "latin.py"
    text = "# -*- coding: latin-1 -*-\n# Grüße\n" + WARNS
    file.write_bytes(text.encode("latin-1"))
    assert lint("latin.py", "--fix").exit_code == 0
    assert file.read_bytes() == text.replace("file, 4", "file, 5").encode("latin-1")


def test_a_rule_is_explained_by_code_and_by_name() -> None:
    assert lint("--explain", "M05").stdout == lint("--explain", "flatten-doubles-rollout").stdout
    assert "RolloutBuffer" in lint("--explain", "M05").stdout


def test_a_script_is_not_executed_and_heavy_packages_are_not_imported(project: Path) -> None:
    mark = project / "executed"
    head = f"open({str(mark)!r}, 'w').close()\nimport torch\nimport stable_baselines3\n"
    (project / "train.py").write_text(head + ERROR)
    heavy = ["torch", "stable_baselines3", "yaml", "ray", "rich", "holdall.cli.plan", "holdall.cli.demo"]
    program = (
        "import sys, holdall.cli\n"
        "sys.argv = ['holdall', 'lint', 'train.py']\n"
        "try:\n    holdall.cli.main()\nexcept SystemExit as end:\n    assert end.code == 3, end.code\n"
        f"print(*[name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=project)
    assert done.stderr.split() == []
    assert not mark.exists()


def test_a_closed_pipe_does_not_change_the_exit_code() -> None:
    command = f"{sys.executable} -m holdall lint --explain M05 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("0")
    assert done.stderr == ""


# ---------------------------------------------------------------- a command


def test_a_command_is_stopped_before_it_trains_and_its_values_are_checked(project: Path) -> None:
    (project / "sac.py").write_text(TRAINING)
    command = [sys.executable, "sac.py", "10000"]
    result = lint("save.py", "--budget", "1MB", "--", *command)
    assert result.exit_code == 3
    assert result.stderr.startswith("Running until training is about to start: ")
    lines = result.stdout.splitlines()
    assert "Stable-Baselines3 is about to learn" in lines[0]
    assert lines[1] == "SAC, 1 environment, 5,000 steps"
    assert lines[2] == "the replay buffer of 20,000 transitions: 781.2 KiB"
    assert lines[3].startswith("save.py:2:1: S03 warning: ")
    assert lines[4].startswith("live SAC: L03 error: learning starts after 10,000 steps, but the run ends after 5,000")
    assert lines[-1].startswith("1 error, ")
    assert not (project / "trained").exists()


def test_a_command_without_a_mistake_ends_with_0_and_json_has_its_buffers(project: Path) -> None:
    (project / "sac.py").write_text(TRAINING)
    result = lint("--json", "--", sys.executable, "sac.py", "100")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["counts"]["error"] == 0
    assert {finding["rule"] for finding in data["findings"]} == {"M09"}
    assert data["run"]["models"] == ["SAC"]
    assert data["run"]["is_ready"]
    (buffer,) = data["run"]["buffers"]
    assert buffer == {"title": "the replay buffer", "capacity": 20_000, "bytes": 20_000 * 40, "is_exact": True}


def test_a_command_without_models_and_buffers_says_so(project: Path) -> None:
    (project / "loop.py").write_text(
        "import gymnasium\nenv = gymnasium.make('CartPole-v1')\nenv.reset()\n"
        "while True:\n    if any(env.step(0)[2:4]):\n        env.reset()\n"
    )
    result = lint("--", sys.executable, "loop.py")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1:] == ["no model and no buffer was found", "0 errors, 0 warnings, 0 infos"]


def test_a_command_that_fails_is_exit_code_1_with_its_last_line(project: Path) -> None:
    (project / "sac.py").write_text("raise ValueError('no simulator here')\n")
    result = lint("--", sys.executable, "sac.py")
    assert result.exit_code == 1
    assert "ValueError: no simulator here" in result.stderr.splitlines()[-1]


def test_a_failed_allocation_is_reported_as_a_finding(project: Path) -> None:
    (project / "big.py").write_text("import numpy as np\nstates = np.ones((10**9, 84, 84, 4), np.float32)\n")
    result = lint("--", sys.executable, "big.py")
    assert result.exit_code == 3
    assert "failed allocation: M01 error: an array of shape (1000000000, 84, 84, 4) and dtype float32" in result.stdout
    assert "105142.6 GiB" in result.stdout

"""The demo, run as its users run it: real processes, a real training, at toy size."""

import importlib.util
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from holdall.cli import app
from holdall.demo import comparison
from holdall.demo.result import Result
from holdall.errors import HoldallError


def result(buffer: str, sha: str = "ab" * 32) -> Result:
    return Result(buffer, {"sb3": 42_000.0, "holdall": 21_000.0}[buffer], 1 << 30, 50.0, 3_000, sha)


def test_both_trainings_end_with_the_same_weights_and_holdall_takes_fewer_bytes() -> None:
    command = [sys.executable, "-m", "holdall", "demo", "--json", "--steps", "200", "--transitions", "4000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["weights_identical"]
    assert figures["sb3"]["weights_sha256"] == figures["holdall"]["weights_sha256"]
    assert figures["holdall"]["bytes_per_transition"] < 0.6 * figures["sb3"]["bytes_per_transition"]
    assert figures["holdall"]["peak_bytes"] < figures["sb3"]["peak_bytes"]
    assert figures["holdall"]["transitions"] == figures["sb3"]["transitions"] == 4_200


def test_the_table_has_one_row_per_buffer_and_says_that_the_weights_agree() -> None:
    both = comparison.Comparison(result("sb3"), result("holdall"))
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(comparison.table(both))
    text = captured.get()
    assert "42,000" in text
    assert "21,000" in text
    assert "1.0 GiB" in text
    assert comparison.verdict(both).startswith("Weights identical")


def test_different_weights_are_said_aloud_and_end_with_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    both = comparison.Comparison(result("sb3"), result("holdall", "cd" * 32))
    monkeypatch.setattr("holdall.cli.demo.compare", lambda *_: both)
    told = CliRunner().invoke(app, ["demo"])
    assert told.exit_code == 3
    assert "WEIGHTS DIFFER" in told.stdout


def test_without_stable_baselines3_one_line_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    told = CliRunner().invoke(app, ["demo"])
    assert told.exit_code == 1
    assert told.stderr.count("\n") == 1
    assert "pip install holdall[sb3]" in told.stderr


@pytest.mark.parametrize("wrong", [["--steps", "5"], ["--transitions", "5"]])
def test_a_number_too_small_is_one_line_on_stderr(wrong: list[str]) -> None:
    told = CliRunner().invoke(app, ["demo", *wrong])
    assert told.exit_code == 1
    assert told.stderr.startswith(f"holdall: {wrong[0][2:]} (5)")
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["-v", "demo", "--steps", "5"], ["demo", "--steps", "5", "-v"]])
def test_verbose_lets_the_error_through(command: list[str]) -> None:
    told = CliRunner().invoke(app, command)
    assert isinstance(told.exception, HoldallError)


def test_a_training_that_fails_is_reported_with_its_last_words() -> None:
    with pytest.raises(HoldallError, match=r"exit code 1 \(out of luck\)"):
        list(comparison._messages([sys.executable, "-c", "raise SystemExit('out of luck')"]))

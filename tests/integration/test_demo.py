"""The demo, run as its users run it: real processes, a real training, a real kill -9, at toy size."""

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from holdall.cli import app
from holdall.cli import demo as comparison
from holdall.cli.demo import DemoFit, describe_latest_reading
from holdall.errors import HoldallError
from holdall.tools.demo import CheckpointFingerprint, DemoResult

FIT = DemoFit(2**30, 2**31, "does not fit", 2**29, "fits")


def make_result(buffer: str, sha: str = "ab" * 32) -> DemoResult:
    return DemoResult(buffer, {"sb3": 42_000.0, "holdall": 21_000.0}[buffer], 1 << 30, 50.0, 3_000, sha)


def make_comparison(weights: str = "ab" * 32, batches: str = "ef" * 32) -> comparison.Comparison:
    saved = CheckpointFingerprint(100, "ef" * 32, 0.1, 1_000)
    resumed = CheckpointFingerprint(100, batches, 0.1, 1_000)
    return comparison.Comparison(FIT, make_result("sb3"), make_result("holdall", weights), saved, resumed)


@pytest.mark.nightly  # in make test, sb3/test_resume.py kills a training
@pytest.mark.timeout(900)  # three trainings, on whatever machine
def test_a_killed_and_resumed_training_has_the_weights_of_sb3s_buffer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdall", "demo", "--json", "--steps", "240", "--transitions", "2000"]
    done = subprocess.run(
        [*command, "--limit", "300MiB", "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["weights_identical"]
    assert figures["batches_identical"]
    assert figures["saved"]["step"] == figures["resumed"]["step"] == 120
    assert figures["sb3"]["weights_sha256"] == figures["holdall"]["weights_sha256"]
    assert figures["holdall"]["bytes_per_transition"] < 0.6 * figures["sb3"]["bytes_per_transition"]
    header = json.loads((tmp_path / "watch.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert header["limits"]["given"] == 300 * 2**20
    page = Path(figures["report"]).read_text(encoding="utf-8")
    assert "300.0 MiB, named for this run" in page
    assert "(above the plot)" not in page
    assert figures["holdall"]["transitions"] == figures["sb3"]["transitions"] == 2_240
    assert figures["fit"]["sb3"] == "does not fit"
    assert describe_latest_reading(tmp_path / "watch.jsonl").count("buffers") == 1
    assert Path(figures["report"]).read_text(encoding="utf-8").startswith("<!doctype html>")
    for words in (
        "Will 2,240 transitions of a camera fit, and a million?",
        "this machine has",
        "budget of 48MiB",
        "kill -9",
        "the next batches are identical",
    ):
        assert words in done.stderr


def test_the_table_has_both_buffers_and_the_verdict_on_the_weights() -> None:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(comparison.draw_table(make_comparison()))
    text = captured.get()
    assert "42,000" in text
    assert "21,000" in text
    assert "1.0 GiB" in text
    assert comparison.describe_verdict(make_comparison()).startswith("Weights identical")


@pytest.mark.parametrize(
    ("found", "message"),
    [(make_comparison(weights="cd" * 32), "WEIGHTS DIFFER"), (make_comparison(batches="cd" * 32), "BATCHES DIFFER")],
)
def test_a_difference_is_printed_and_ends_with_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, found: comparison.Comparison, message: str
) -> None:
    monkeypatch.setattr("holdall.cli.demo.run_demo", lambda *_: found)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 3
    assert message in result.stdout


def test_without_stable_baselines3_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "pip install holdall[sb3]" in result.stderr


@pytest.mark.parametrize("wrong", [["--steps", "5"], ["--transitions", "5"]])
def test_a_too_small_number_is_one_line_on_stderr(wrong: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *wrong])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"holdall: {wrong[0][2:]} (5)")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["-v", "demo", "--steps", "5"], ["demo", "--steps", "5", "-v"]])
def test_verbose_shows_the_traceback(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, HoldallError)


@pytest.mark.parametrize("text", [None, "", "no JSON\n", '{"kind": "reading"', '{"kind": "header"}\n'])
def test_a_record_without_a_reading_shows_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "watch.jsonl").write_text(text)
    assert not describe_latest_reading(tmp_path / "watch.jsonl")


@pytest.mark.parametrize("name", ["checkpoint", "spilled", "watch.jsonl", "report.html"])
def test_folders_that_no_demo_wrote_are_not_removed(name: str, tmp_path: Path) -> None:
    """`--out` may name a folder with a training in it."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("weeks of training")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "which no demo wrote" in result.stderr
    assert (tmp_path / name / "precious").read_text() == "weeks of training"


def test_a_folder_that_cannot_be_written_is_one_line_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr

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
from holdall.tools.bench import run_child
from holdall.tools.demo import CheckpointFingerprint, DemoResult

FIT = DemoFit(2**30, 2**31, "does not fit", 2**29, "fits")


def result(buffer: str, sha: str = "ab" * 32) -> DemoResult:
    return DemoResult(buffer, {"sb3": 42_000.0, "holdall": 21_000.0}[buffer], 1 << 30, 50.0, 3_000, sha)


def both(weights: str = "ab" * 32, batches: str = "ef" * 32) -> comparison.Comparison:
    saved = CheckpointFingerprint(100, "ef" * 32, 0.1, 1_000)
    resumed = CheckpointFingerprint(100, batches, 0.1, 1_000)
    return comparison.Comparison(FIT, result("sb3"), result("holdall", weights), saved, resumed)


@pytest.mark.nightly  # in make test, sb3/test_resume.py kills a training
@pytest.mark.timeout(900)  # three trainings, on whatever machine
def test_a_training_that_was_killed_and_resumed_ends_with_the_weights_of_sb3s_own(tmp_path: Path) -> None:
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


def test_the_table_has_one_row_per_buffer_and_says_that_the_weights_agree() -> None:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(comparison.draw_table(both()))
    text = captured.get()
    assert "42,000" in text
    assert "21,000" in text
    assert "1.0 GiB" in text
    assert comparison.describe_verdict(both()).startswith("Weights identical")


@pytest.mark.parametrize(
    ("found", "said"), [(both(weights="cd" * 32), "WEIGHTS DIFFER"), (both(batches="cd" * 32), "BATCHES DIFFER")]
)
def test_what_differs_is_said_aloud_and_ends_with_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, found: comparison.Comparison, said: str
) -> None:
    monkeypatch.setattr("holdall.cli.demo.run_demo", lambda *_: found)
    told = CliRunner().invoke(app, ["demo"])
    assert told.exit_code == 3
    assert said in told.stdout


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
        list(run_child([sys.executable, "-c", "raise SystemExit('out of luck')"]))


@pytest.mark.parametrize("text", [None, "", "no JSON\n", '{"kind": "reading"', '{"kind": "header"}\n'])
def test_a_record_without_a_reading_shows_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "watch.jsonl").write_text(text)
    assert not describe_latest_reading(tmp_path / "watch.jsonl")


@pytest.mark.parametrize("name", ["checkpoint", "spilled", "watch.jsonl", "report.html"])
def test_what_no_demo_wrote_is_never_removed(name: str, tmp_path: Path) -> None:
    """`--out` may name a folder with a training in it."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("weeks of training")
    told = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert told.exit_code == 1
    assert "which no demo wrote" in told.stderr
    assert (tmp_path / name / "precious").read_text() == "weeks of training"


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file")])
    assert told.exit_code == 1
    assert "cannot be written" in told.stderr

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from holdall.errors import WatchError
from holdall.tools.watch.process_watcher import WatchLoop, latest_reading, publish_latest
from holdall.tools.watch.reading import GROUPS
from holdall.tools.watch.watcher_process import PrometheusServer, WatchRecorder, prometheus_text, record_header

RECORDED = Path(__file__).parent / "run.jsonl"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


def check(lines: list[dict[str, Any]]) -> None:
    assert lines[0]["kind"] == "header"
    assert lines[0]["format"] == "holdall-watch-1"
    assert {line["kind"] for line in lines} <= {"header", "reading", "phase", "verdict", "event"}
    for line in lines:
        if line["kind"] == "reading":
            assert sum(part["resident"] for part in line["parts"]) == line["pss"]
            assert {part["group"] for part in line["parts"]} <= set(GROUPS)
        if line["kind"] == "verdict":
            assert line["severity"] in {"error", "warning", "info"}
            assert line["text"]
            assert line["remedy"]


def test_a_record_is_one_object_a_line(runtime: Path, tmp_path: Path) -> None:
    turns = WatchLoop(os.getpid(), 1.0)
    recorder = WatchRecorder(tmp_path / "run.jsonl", record_header(os.getpid(), ["python", "train.py"], 1.0))
    for _ in range(3):
        recorder.show(turns.run_pass())
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    check(lines)
    assert sum(line["kind"] == "reading" for line in lines) == 3
    assert lines[0]["limits"]["memory"] > 2**30


def test_the_recorded_run_that_pages_are_tested_with_is_of_this_format() -> None:
    check([json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(WatchError, match="--record"):
        WatchRecorder(tmp_path / "missing" / "run.jsonl", {})


def test_the_newest_turn_comes_back_whole(runtime: Path) -> None:
    turn = WatchLoop(os.getpid(), 1.0).run_pass()
    assert latest_reading(os.getpid()) is None
    publish_latest(os.getpid(), turn)
    assert latest_reading(os.getpid()) == (turn.reading, turn.verdicts)
    assert len(turn.lines()) >= 1


def test_prometheus_reads_the_newest_turn_from_the_loopback(runtime: Path) -> None:
    turn = WatchLoop(os.getpid(), 1.0).run_pass()
    served = PrometheusServer(0)
    try:
        served.show(turn)
        url = f"http://127.0.0.1:{served.port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert text == prometheus_text(turn)
        assert f"holdall_pss_bytes {turn.reading.pss}" in text.splitlines()
        total = sum(
            int(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("holdall_memory_bytes{")
        )
        assert total == turn.reading.pss
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/etc/passwd", timeout=10)
        with pytest.raises(WatchError, match="another port"):
            PrometheusServer(served.port)
    finally:
        served.close()

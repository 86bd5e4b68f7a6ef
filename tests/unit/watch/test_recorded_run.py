"""Records, published readings and metrics of a watch."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from holdall.errors import WatchError
from holdall.tools.part_groups import GROUP_NAMES
from holdall.tools.watch import exchange
from holdall.tools.watch.reading import MemoryReading
from holdall.tools.watch.watcher import Watcher, WatchRecorder, make_header

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
            assert {part["group"] for part in line["parts"]} <= set(GROUP_NAMES)
        if line["kind"] == "verdict":
            assert line["severity"] in {"error", "warning", "info"}
            assert line["text"]
            assert line["remedy"]


def test_a_record_has_one_object_per_line(runtime: Path, tmp_path: Path) -> None:
    watcher = Watcher(os.getpid(), 1.0, command=["python", "train.py"])
    recorder = WatchRecorder(tmp_path / "run.jsonl")
    recorder.write([make_header(watcher, 1.0, None)])
    for _ in range(3):
        recorder.write(watcher.run_pass().as_lines())
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    check(lines)
    assert sum(line["kind"] == "reading" for line in lines) == 3
    assert lines[0]["limits"]["memory"] > 2**30
    assert lines[0]["command"] == ["python", "train.py"]


def test_the_recorded_run_of_the_page_tests_has_this_format() -> None:
    check([json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()])


def test_a_record_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(WatchError, match=r"missing/run.jsonl cannot be written"):
        WatchRecorder(tmp_path / "missing" / "run.jsonl")


def test_the_latest_reading_is_read_as_it_was_published(runtime: Path) -> None:
    watcher = Watcher(os.getpid(), 1.0)
    latest = watcher.run_pass()
    assert exchange.read_latest(os.getpid()) is None
    watcher.publish(latest)
    found = exchange.read_latest(os.getpid())
    assert found is not None
    assert MemoryReading.from_dict(found["reading"]) == latest.reading


def test_prometheus_is_served_the_newest_reading(runtime: Path) -> None:
    pytest.importorskip("prometheus_client")
    from holdall.tools.watch.prometheus import Exporter

    latest = Watcher(os.getpid(), 1.0).run_pass()
    exporter = Exporter(0)
    try:
        exporter.latest = latest
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
        assert values["holdall_pss_bytes"] == latest.reading.pss
        total = sum(value for name, value in values.items() if name.startswith("holdall_memory_bytes{"))
        assert total == latest.reading.pss
        with pytest.raises(WatchError, match="another port"):
            Exporter(exporter.port)
    finally:
        exporter.close()

"""The pages of recorded runs, also of recordings without some values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.errors import ArgumentError
from holdall.tools.report import read_lines, read_report
from holdall.tools.report.recording import Recording
from holdall.tools.report.recording_page import summarize_recording, write_recording_page

HEADER = {"kind": "header", "format": "holdall-watch-1", "command": ["python", "train.py"], "limits": {"memory": 1000}}
RECORDED = Path(__file__).parents[1] / "watch" / "run.jsonl"


def _file(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _reading(time: float, **values: Any) -> dict[str, Any]:
    parts = [{"group": "buffers", "name": "replay", "resident": 60, "allocated": 100, "fill": 0.6}]
    return {"kind": "reading", "time": time, "pss": 60, "parts": parts} | values


def _summary(tmp_path: Path, *lines: dict[str, Any]) -> dict[str, Any]:
    report = read_report(_file(tmp_path, HEADER, *lines))
    assert "<!doctype html>" in report.page()
    return report.summary()


def test_the_groups_of_a_real_recording_add_up_to_its_memory() -> None:
    report = read_report(RECORDED)
    found = report.summary()
    assert found["readings"] > 10
    assert sum(found["groups"].values()) == found["last_bytes"]
    assert {phase["name"] for phase in found["phases"]} == {"collect", "train"}
    assert "leak" in {verdict["name"] for verdict in found["verdicts"]}
    assert report.page().count('"kind":"plot"') == 3


def test_the_last_record_of_a_phase_and_of_a_verdict_counts(tmp_path: Path) -> None:
    found = _summary(
        tmp_path,
        _reading(0),
        {"kind": "phase", "name": "train", "peak": 1, "count": 1, "seconds": 1.0},
        {"kind": "phase", "name": "train", "peak": 9, "count": 2, "seconds": 2.0},
        {"kind": "verdict", "time": 1, "name": "leak", "severity": "info", "text": "once"},
        {"kind": "verdict", "time": 2, "name": "leak", "severity": "error", "text": "again"},
        {"kind": "verdict", "time": 2, "name": "plateau", "severity": "no such", "text": ""},
    )
    assert found["phases"] == [{"name": "train", "peak_bytes": 9, "count": 2, "seconds": 2.0}]
    assert [(one["name"], one["severity"], one["times"]) for one in found["verdicts"]] == [
        ("leak", "error", 2),
        ("plateau", "info", 1),
    ]


def test_the_peak_and_the_buffers_at_the_peak_are_shown(tmp_path: Path) -> None:
    """Memory that was freed before the last reading is shown, too."""
    camera = {"group": "buffers", "name": "camera", "resident": 265 * 2**20, "allocated": 300 * 2**20, "fill": 0.9}
    peak = _reading(5, pss=265 * 2**20, parts=[camera])
    lines = [_reading(0), peak, _reading(9, pss=60, peak=400 * 2**20)]
    found = _summary(tmp_path, *lines)
    assert [(one["name"], one["resident_bytes"]) for one in found["buffers"]] == [("camera", 265 * 2**20)]
    assert (found["peak_bytes"], found["last_bytes"]) == (400 * 2**20, 60), "the recorded peak, as watch shows it"
    assert found["groups"]["buffers"] == 60
    assert found["groups_at_peak"]["buffers"] == 265 * 2**20
    page = read_report(_file(tmp_path, HEADER, *lines)).page()
    assert "Buffers at the peak" in page
    assert "At the peak, after 5 s." in page
    assert "between two readings; 265.0 MiB at the highest one, after 5 s" in page


@pytest.mark.parametrize(
    ("command", "title"),
    [
        (["/usr/bin/python3", "/home/me/runs/train.py", "--lr", "3e-4"], "train.py"),
        (["python", "-m", "runs.train", "--lr", "3e-4"], "runs.train"),
        (["./train", "fast"], "train"),
        (["python", "-c", "print()"], "python"),
    ],
)
def test_a_page_is_named_after_the_script(tmp_path: Path, command: list[str], title: str) -> None:
    page = read_report(_file(tmp_path, HEADER | {"command": command}, _reading(0))).page()
    assert f"<title>{title}</title>" in page
    assert all(word in page for word in command)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [_reading(5)],
        [{"kind": "reading"}],
        [{"kind": "reading", "time": 1, "parts": [{}]}],
        [_reading(5, parts=[{"group": "new", "resident": 5}], pss=None), _reading(1)],
        [_reading(0), {"kind": "verdict"}, {"kind": "event"}, {"kind": "phase"}, {"kind": "unheard of"}, {}],
        [_reading(0, gpu={}), _reading(1, gpu={"allocated": 5})],
        [_reading(0, gpu={"requested": 3, "allocated": 5, "reserved": 9, "limit": 10}, steps_per_second=0, pressure=0)],
    ],
)
def test_a_recording_without_some_values_has_a_page(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    assert _summary(tmp_path, *lines)["readings"] == sum(line.get("kind") == "reading" for line in lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (_reading(0, pss="much"), r"line 2: 'pss' \('much'\) must be a number"),
        (_reading(0, parts={}), "line 2: 'parts' .* must be a list"),
        (_reading(0, parts=[{"resident": -1}]), "line 2, 'parts': 'resident' .* must not be negative"),
        ({"kind": "phase", "name": 5}, "line 2: 'name' .* must be text"),
    ],
)
def test_an_invalid_value_is_refused_with_its_line(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_report(_file(tmp_path, HEADER, line))


def test_the_limit_of_a_recording_is_the_smallest_one(tmp_path: Path) -> None:
    header = HEADER | {"limits": {"memory": 1000, "cgroup": 500}}
    assert read_report(_file(tmp_path, header, _reading(0))).summary()["limit_bytes"] == 500
    header = HEADER | {"limits": {"memory": None, "cgroup": None}}
    assert read_report(_file(tmp_path, header, _reading(0))).summary()["limit_bytes"] is None


def test_the_page_of_a_long_recording_is_small_and_has_its_peak(tmp_path: Path) -> None:
    lines = [_reading(at, pss=60 + 2**20 * (at == 7_777)) for at in range(20_000)]
    for line in lines:
        line["parts"] = [{"group": "torch", "name": "heap", "resident": line["pss"]}]
    report = read_report(_file(tmp_path, HEADER, *lines))
    assert report.summary()["peak_bytes"] == 60 + 2**20
    text = report.page()
    assert len(text) < 200_000
    assert "1048636" in text


def test_the_axis_is_monotonic_if_the_clock_was_set_back(tmp_path: Path) -> None:
    path = _file(tmp_path, HEADER, _reading(10), _reading(4), _reading(12))
    lines = read_lines(path)
    recording = Recording.read(next(lines), lines)
    assert (np.diff(recording.times) >= 0).all()
    assert "after 2 s" in write_recording_page(recording)
    assert summarize_recording(recording)["seconds"] == 2


@pytest.mark.parametrize("count", [1, 2])
def test_speed_is_drawn_if_there_are_two_points(tmp_path: Path, count: int) -> None:
    readings = [_reading(second, steps_per_second=9.0 if second < count else None) for second in range(3)]
    text = read_report(_file(tmp_path, HEADER, *readings)).page()
    assert ("Steps a second" in text) == (count == 2)

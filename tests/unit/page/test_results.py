"""Results of benches: means over seeds, intervals, refused rankings, and failed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdall.errors import ArgumentError
from holdall.tools.report import Report, read_report
from holdall.tools.report.results import Interval

BENCH = {"kind": "header", "format": "holdall-bench-1", "env": "demo", "algo": "sac", "limit": 1000}
RECORDED = Path(__file__).parents[2] / "results" / "bench.jsonl"
BUFFERS = {"kind": "header", "format": "holdall-bench-buffers-1"}


def _report(tmp_path: Path, *lines: dict[str, Any]) -> Report:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return read_report(path)


def _run(profile: str, buffer: str, seed: int, **values: Any) -> dict[str, Any]:
    run = {"kind": "run", "profile": profile, "buffer": buffer, "seed": seed, "status": "done"}
    return run | {"peaks": {"train": 100 + seed, "construct": 10}, "steps_per_second": 50.0 + seed} | values


def test_an_interval_is_students_t() -> None:
    found = Interval.of([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert Interval.of([5.0]).half is None
    assert Interval.of([5.0]).overlaps(found)
    assert not Interval(0.0, 1.0).overlaps(Interval(3.0, 1.0))


def test_seeds_are_summarized_by_profile_and_buffer(tmp_path: Path) -> None:
    runs = [_run("fast", buffer, seed, rewards=[0, 0, 4, 6]) for buffer in ("sb3", "holdall") for seed in range(3)]
    found = _report(tmp_path, BENCH, *runs).summary()["profiles"]
    assert [(one["profile"], one["buffer"], one["done"]) for one in found] == [
        ("fast", "sb3", 3),
        ("fast", "holdall", 3),
    ]
    assert found[0]["peak_bytes"] == 101
    assert found[0]["steps_per_second"]["mean"] == 51
    assert found[0]["reward"]["mean"] == 5  # The mean of the later half.
    assert list(found[0]["peaks"]) == ["construct", "train"]


def test_a_figure_that_one_seed_lacks_does_not_count_as_zero(tmp_path: Path) -> None:
    whole = _run("fast", "sb3", 0, peaks={"train": 100, "save": 300}, rewards=[0, 0, 4, 6])
    lacking = _run("fast", "sb3", 1, peaks={"train": 100, "save": None}, rewards=[0, 0, None, 5])
    (found,) = _report(tmp_path, BENCH, whole, lacking).summary()["profiles"]
    assert found["peaks"] == {"train": 100, "save": 300}
    assert found["peak_bytes"] == 200  # The largest peaks of the runs are 300 and 100.
    assert found["reward"]["mean"] == pytest.approx((5 + 2.5) / 2)


def test_the_last_record_of_a_run_counts(tmp_path: Path) -> None:
    runs = [_run("fast", "sb3", 0, status="failed", reason="no room"), _run("fast", "sb3", 0)]
    found = _report(tmp_path, BENCH, *runs).summary()["profiles"]
    assert [(one["runs"], one["done"]) for one in found] == [(1, 1)]


def test_a_tie_in_a_ranking_is_written(tmp_path: Path) -> None:
    one = ["fast", "sb3"]
    other = ["fast", "holdall"]
    ranking = {"kind": "ranking", "by": "memory", "order": [one, other], "refused": None, "same": [[one, other]]}
    text = _report(tmp_path, BENCH, _run("fast", "sb3", 0), _run("fast", "holdall", 0), ranking).page()
    assert text.count("no clear difference to the next") == 1


def test_the_page_of_a_real_bench_has_its_rankings(tmp_path: Path) -> None:
    found = read_report(RECORDED).summary()
    assert [ranking["by"] for ranking in found["rankings"]] == ["memory", "speed", "reward"]
    least = min(found["profiles"], key=lambda one: one["peak_bytes"])
    assert found["rankings"][0]["order"][0] == [least["profile"], least["buffer"]]


def test_a_refused_ranking_has_its_reason_and_no_order(tmp_path: Path) -> None:
    refused = {"kind": "ranking", "by": "memory", "order": [], "refused": "fast held 5 of 100 transitions"}
    text = _report(tmp_path, BENCH, _run("fast", "sb3", 0), refused).page()
    assert "Not ranked" in text
    assert "Fast held 5 of 100 transitions." in text
    assert "Ranking by" not in text


def test_runs_without_figures_are_listed_with_their_reasons(tmp_path: Path) -> None:
    text = _report(tmp_path, BENCH, _run("fast", "sb3", 1, status="does not fit", reason="25 % of nothing")).page()
    assert "does not fit" in text
    assert "25 % of nothing" in text


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    found = _report(tmp_path, BENCH, _run("fast", "sb3", 0)).summary()["profiles"]
    assert found[0]["steps_per_second"] == {"mean": 50.0, "half_width_95": None}


@pytest.mark.parametrize("header", [BENCH, BUFFERS])
def test_a_bench_without_runs_has_a_page(tmp_path: Path, header: dict[str, Any]) -> None:
    assert "<!doctype html>" in _report(tmp_path, header).page()


def test_the_correctness_of_data_is_written_in_words(tmp_path: Path) -> None:
    lines = [
        {
            "kind": "buffer",
            "library": name,
            "case": "atari",
            "transitions": 10,
            "bytes": 500,
            "exact": exact,
            "note": "",
        }
        for name, exact in (("holdall", True), ("other", False), ("third", None))
    ]
    report = _report(
        tmp_path, BUFFERS, *lines, {"kind": "absent", "case": "atari", "library": "fourth", "reason": "not installed"}
    )
    text = report.page()
    assert all(word in text for word in ('"yes"', '"no"', "not compared", "fourth on atari: not installed"))
    assert [one["bytes_per_transition"] for one in report.summary()["buffers"]] == [50, 50, 50]


def test_the_repetitions_of_a_trace_are_written(tmp_path: Path) -> None:
    line = {"kind": "buffer", "library": "holdall", "case": "camera", "transitions": 10, "bytes": 50, "laps": 2.5}
    assert "played 2.5 times over" in _report(tmp_path, BUFFERS, line).page()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"kind": "run", "profile": 5}, "line 2: 'profile'"),
        ({"kind": "run", "peaks": {"train": "x"}}, "line 2, 'peaks': 'train'"),
        ({"kind": "ranking", "by": "memory", "order": [["a"]]}, "line 2: 'order'"),
    ],
)
def test_an_invalid_value_is_refused_with_its_line(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        _report(tmp_path, BENCH, line)


@pytest.mark.parametrize(
    "first", [{}, {"kind": "header"}, {"kind": "header", "format": "other-1"}, BENCH | {"kind": "run"}]
)
def test_a_file_of_another_format_is_refused(tmp_path: Path, first: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="holdall watch --record"):
        _report(tmp_path, first)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is empty"):
        _report(tmp_path)

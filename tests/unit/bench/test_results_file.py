"""Files of results: what is written can be read, also after an interruption."""

from pathlib import Path

import pytest

from holdall.errors import ArgumentError
from holdall.tools.bench.run import open_results, rank_runs, read_results, write_line
from holdall.tools.report import BENCH_FORMAT as FORMAT
from holdall.tools.report.results import TrainingRun

RUN = TrainingRun("fast", "sb3", 0, "done", 100, 32, peaks={"train": 7}, rewards=(1.0,), checkpoint={"seconds": 1.0})


def test_results_are_read_as_written_and_the_last_record_of_a_run_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with path.open("w") as file:
        write_line(file, {"kind": "header", "format": FORMAT})
        write_line(file, TrainingRun("fast", "sb3", 0, "failed", 100, 32).as_dict())
        write_line(file, RUN.as_dict() | {"later": "a key of a later version"})
    header, runs = read_results(path)
    assert header.text("format") == FORMAT
    assert runs == [RUN]


def test_the_results_of_a_real_bench_are_read_and_ranked() -> None:
    header, runs = read_results(Path(__file__).parents[2] / "results" / "bench.jsonl")
    assert (header.text("env"), header.text("algo")) == ("demo", "sac")
    assert len(runs) == 8
    by_memory = rank_runs(runs)[0]
    assert by_memory.refused is None
    assert by_memory.order == tuple(
        (profile, buffer) for profile in ("memory-efficient", "aggressive") for buffer in ("holdall", "sb3")
    )


def test_an_unfinished_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"kind": "header", "format": "{FORMAT}"}}\n{{"kind": "run", "prof')
    assert read_results(path)[1] == []


def test_a_resumed_file_has_no_unfinished_line_in_its_middle(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"kind": "header", "format": "{FORMAT}"}}\n{{"kind": "run", "prof')
    with open_results(path, is_resumed=True) as file:
        write_line(file, RUN.as_dict())
    assert read_results(path)[1] == [RUN]


@pytest.mark.parametrize("text", ["", '{"kind": "run"}\n', '{"kind": "header", "format": "other"}\n'])
def test_a_file_without_its_header_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(ArgumentError, match="holdall-bench-1"):
        read_results(tmp_path / "results.jsonl")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_results(tmp_path / "results.jsonl")

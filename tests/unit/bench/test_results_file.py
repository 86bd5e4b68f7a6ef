from pathlib import Path

import pytest

from holdall.errors import ArgumentError
from holdall.tools.bench.run import rankings, read_results, runs_of, write_line
from holdall.tools.report import BENCH_FORMAT as FORMAT
from holdall.tools.report.results import TrainingRun

RUN = TrainingRun("fast", "sb3", 0, "done", 100, 32, peaks={"train": 7}, rewards=(1.0,), checkpoint={"seconds": 1.0})


def test_what_was_written_is_read_and_the_last_of_a_name_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with path.open("w") as file:
        write_line(file, {"kind": "header", "format": FORMAT})
        write_line(file, TrainingRun("fast", "sb3", 0, "failed", 100, 32).as_dict())
        write_line(file, RUN.as_dict() | {"later": "a key of a version to come"})
    first, records = read_results(path)
    assert first["format"] == FORMAT
    assert runs_of(records) == [RUN]


def test_a_bench_that_was_really_run_is_read_and_ranked() -> None:
    first, records = read_results(Path(__file__).parents[2] / "results" / "bench.jsonl")
    assert (first["env"], first["algo"]) == ("demo", "sac")
    runs = runs_of(records)
    assert len(runs) == 8
    by_memory = rankings(runs)[0]
    assert by_memory.refused is None
    assert by_memory.order == tuple(
        (profile, buffer) for profile in ("memory-efficient", "aggressive") for buffer in ("holdall", "sb3")
    )


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"kind": "header", "format": "{FORMAT}"}}\n[]\n{{"kind": "run", "prof')
    assert read_results(path)[1] == []


@pytest.mark.parametrize("text", ["", "nonsense", '{"kind": "run"}', '{"kind": "header", "format": "other"}'])
def test_a_file_without_its_header_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(ArgumentError, match="do not begin with a header"):
        read_results(tmp_path / "results.jsonl")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_results(tmp_path / "results.jsonl")

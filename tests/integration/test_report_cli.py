"""`holdall report` as people call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "unit" / "watch" / "run.jsonl"


def _report(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "holdall", "report", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_page_is_written_beside_the_file_and_named(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(RECORDED.read_bytes())
    assert _report(file) == (0, f"{tmp_path / 'run.html'}\n", "")
    assert "</html>" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert file.read_bytes() == RECORDED.read_bytes()


def test_a_summary_is_one_json_object_and_no_page(tmp_path: Path) -> None:
    code, out, _ = _report(RECORDED, "--json")
    assert code == 0
    assert json.loads(out)["format"] == "holdall-watch-1"
    assert not RECORDED.with_suffix(".html").exists()


def test_errors_are_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"kind": "header", "format": "holdall-watch-1"}\n{"kind": "reading", "pss": "x"}\n')
    for file, output, said in (
        (broken, tmp_path / "a.html", "line 2"),
        (tmp_path / "none.jsonl", tmp_path / "a.html", "No such file"),
        (RECORDED, tmp_path / "no" / "folder.html", "cannot be written"),
        (broken, broken, "line 2"),
    ):
        code, out, err = _report(file, "-o", output)
        assert (code, out) == (1, "")
        assert err.startswith("holdall: ")
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "a.html").exists()


def test_a_file_is_never_written_over_by_its_own_page(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(RECORDED.read_bytes())
    code, _, err = _report(file, "-o", file)
    assert code == 1
    assert "is the file itself" in err
    assert file.read_bytes() == RECORDED.read_bytes()


def test_a_command_that_is_no_unicode_has_a_page(tmp_path: Path) -> None:
    """A recording keeps the bytes of its words as lone surrogates, which no page can hold."""
    file = tmp_path / "run.jsonl"
    header, *readings = RECORDED.read_text(encoding="utf-8").splitlines()
    command = json.dumps(json.loads(header) | {"command": ["python", "tr\udcffain.py"]})
    file.write_text("\n".join([command, *readings]) + "\n", encoding="utf-8")
    assert _report(file) == (0, f"{tmp_path / 'run.html'}\n", "")
    assert "tr?ain.py" in (tmp_path / "run.html").read_text(encoding="utf-8")

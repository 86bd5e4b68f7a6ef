"""The README's Python blocks run as they stand, in one namespace; its tables are those of the committed results."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_python_blocks_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        # Padded with empty lines, so that a traceback shows the README's own line numbers.
        exec(compile("\n" * line + block[1], str(README), "exec"), namespace)


def test_tables_of_the_readme_are_those_of_the_committed_results() -> None:
    text = README.read_text(encoding="utf-8")
    script = runpy.run_path(str(README.parent / "benchmarks" / "readme.py"))
    assert script["rewritten"](text) == text, "run `python benchmarks/readme.py`, or measure again"
    assert text.count("<!-- end of ") == len(script["PLACES"])

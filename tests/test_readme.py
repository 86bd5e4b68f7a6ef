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
    """Those of docs/benchmarks.md and of the guide for Stable-Baselines3, too."""
    script = runpy.run_path(str(README.parent / "benchmarks" / "readme.py"))
    docs = README.parent / "docs"
    assert set(script["PLACES"]) == {README, docs / "benchmarks.md", docs / "guides" / "sb3.md"}
    for page, places in script["PLACES"].items():
        text = page.read_text(encoding="utf-8")
        assert script["rewritten"](page) == text, "run `python benchmarks/readme.py`, or measure again"
        assert text.count("<!-- end of ") == len(places)


def test_the_first_screen_has_one_sentence_the_install_line_the_difference_and_five_rows() -> None:
    text = README.read_text(encoding="utf-8")
    places = [
        text.index(part) for part in ("bit for bit, in a fraction", "pip install", "```diff", "<picture>", "| a tran")
    ]
    assert places == sorted(places)
    assert text[: text.index("## ")].count("\n| ") == 1 + 5
    assert len(text.splitlines()) < 120


@pytest.mark.parametrize("name", ["picture", "kinds_picture"])
def test_the_pictures_are_those_of_the_committed_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(README.parent / "benchmarks"))
    script = runpy.run_path(str(README.parent / "benchmarks" / f"{name}.py"))
    for theme, path in script["PICTURES"].items():
        assert path.read_text(encoding="utf-8") == script["drawn"](theme), f"run `python benchmarks/{name}.py`"

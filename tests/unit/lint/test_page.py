"""Pages that are made by a script are what the script makes now."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[3] / "docs"


def script(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_page_of_lint_is_current() -> None:
    page = (DOCS / "lint.md").read_text(encoding="utf-8")
    assert script("lint_page").current(page) == page, "run python docs/lint_page.py"


def test_the_script_says_so_itself() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "lint_page.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

"""The tables of rules in docs/lint.md are those that docs/lint_page.py writes."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "docs" / "lint_page.py"


def test_the_page_of_lint_is_current() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""The notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_the_notebooks_are_these_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["camera_under_2_gib", "first_steps", "where_did_my_memory_go"]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.nightly] * (path.stem != "first_steps")) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_the_cells_of_a_notebook_run(path: Path, tmp_path: Path) -> None:
    """Here the cells run as a program. `make notebooks` runs them in a kernel."""
    if path.stem == "where_did_my_memory_go" and sys.platform != "linux":
        pytest.skip("reads /proc")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join(code), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, check=False, timeout=100, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    """Outputs would change with every run, and show the paths of a machine."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]

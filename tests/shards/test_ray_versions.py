"""The oldest version of Ray that pyproject.toml declares, in a process of its own. The newest is in .venv."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = "2.40.0"


def test_the_oldest_declared_version_is_tested() -> None:
    declared = re.search(r'"ray>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert declared is not None
    assert OLDEST.startswith(declared[1])
    assert f"ray=={OLDEST}" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_memory_works_with_the_oldest_version() -> None:
    folder = ROOT / ".cache" / "ray" / OLDEST
    if not (folder / "ray").is_dir():
        pytest.skip(f"Ray {OLDEST} is missing: make nightly fetches it")
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    script = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("other_ray.py")), OLDEST]
    ended = subprocess.run(script, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4_000:]

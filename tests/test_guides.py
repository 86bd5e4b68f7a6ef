"""Every program of every guide runs: what stands between the fences, and both sides of every difference.

Guides for a framework have tests of their own beside those of the framework. Packages of other libraries may be
missing; then only their own side of a difference is left out.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "guides"
HERE = [FOLDER / f"{name}.md" for name in ("plain_loop", "tianshou", "multi_agent", "offline", "from_reverb")]
WITH_DIFFERENCES = [guide for guide in HERE if "```diff" in guide.read_text(encoding="utf-8")]
ON_THEIR_OWN = [FOLDER / f"{name}.md" for name in ("autoreset", "drqv2", "lerobot", "maniskill")]
"""Guides whose programs show no side before."""
OTHERS = ("tianshou",)
"""Packages that only a guide's side before needs, and that the tests do not install."""
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def program(kind: str, text: str, side: str) -> str:
    """Return a block as a program; of a difference, one side."""
    if kind == "python":
        return text
    lines = [line[1:] for line in text.splitlines() if not line or line[0] in {" ", side}]
    return "\n".join(lines)


def test_the_programs_for_jax_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    """JAX has threads, and a process with it must not fork; other tests do. First the side before, then the other."""
    found = [(block[1], block[2]) for block in BLOCK.finditer((FOLDER / "jax.md").read_text(encoding="utf-8"))]
    until_difference = [kind for kind, _ in found].index("diff") + 1
    before = "\n".join(program(*block, side="-") for block in found[:until_difference])
    after = "\n".join(program(*block, side="+") for block in found)
    assert "import holdall" not in before
    assert "import holdall" in after
    for name, text in (("before", before), ("after", after)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    both = "import runpy, sys; runpy.run_path('before.py'); assert 'holdall' not in sys.modules"
    both += "; runpy.run_path('after.py')"
    subprocess.run([sys.executable, "-W", "error", "-c", both], cwd=tmp_path, check=True, timeout=300)


def run(guide: Path, side: str) -> dict[str, Any]:
    text = guide.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "guide"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2))
        exec(compile("\n" * line + program(block[1], block[2], side), str(guide), "exec"), names)
        if side == "-" and block[1] == "diff":
            return names  # what follows is about the other side
    return names


@pytest.mark.parametrize("guide", HERE + ON_THEIR_OWN, ids=lambda guide: guide.stem)
def test_the_programs_of_a_guide_run(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(guide, "+")
    assert "holdall" in names or {"ReplayBuffer", "ReplayBufferStorage"} & names.keys()


@pytest.mark.parametrize("guide", WITH_DIFFERENCES, ids=lambda guide: guide.stem)
def test_the_side_before_runs_too(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        names = run(guide, "-")
    except ModuleNotFoundError as missing:
        if missing.name not in OTHERS:
            raise
        pytest.skip(f"needs {missing.name}, whose own side it is")
    assert "holdall" not in names


def test_the_changed_line_of_drqv2_is_that_of_its_program() -> None:
    text = (FOLDER / "drqv2.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\+(from holdall.*)$", text, re.MULTILINE)
    (program_text,) = [block[2] for block in BLOCK.finditer(text) if block[1] == "python"]
    assert line in program_text.splitlines()


def test_the_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = runpy.run_path(str(ROOT / "benchmarks" / "migration.py"))
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))
    assert results.keys() == script["CASES"].keys()
    for name in results:
        path, text = script["rewritten"](name, results)
        assert path.read_text(encoding="utf-8") == text, "run python benchmarks/migration.py --docs"

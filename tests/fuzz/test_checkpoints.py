"""Directories of checkpoints that disks, people and strangers harmed. Checkpoint_cases.py has the rule."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdall

from .seeds import rotating_seed

ROOT = Path(__file__).parents[2]
CASES = 75
CASES_A_NIGHT = 5_000
CASES_OF_A_CHILD = 500

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.checkpoint_cases", *map(str, arguments)]
    in_memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    environment = os.environ | {"HOLDALL_THREADS": "2"} | in_memory | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3600)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that are harmed."""
    folder = tmp_path_factory.mktemp("templates")
    made = run("make", folder)
    assert made.returncode == 0, made.stderr[-3000:]
    return folder


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cases", [CASES, pytest.param(CASES_A_NIGHT, marks=pytest.mark.nightly)])
def test_a_harmed_directory_gives_what_was_acknowledged_or_an_error(templates: Path, cases: int) -> None:
    """Never another exception, a hang, a wrong row, much memory, or a change to what is not holdall's."""
    first = rotating_seed() * CASES_A_NIGHT if cases == CASES_A_NIGHT else 0
    broken = []
    for seed in range(first, first + cases, CASES_OF_A_CHILD):
        count = min(CASES_OF_A_CHILD, first + cases - seed)
        done = run("run", templates, seed, count)
        broken += re.findall(r"^BROKEN .*(?:\n(?!\w+ seed ).*)*", done.stdout, re.MULTILINE)
        if done.returncode != 0 and not broken:
            broken.append((done.stdout + done.stderr)[-3000:])
    assert not broken, "\n".join(broken[:5])


OLD_MISTAKES = {
    "a checkpoint that is not whole counts among those to keep": (
        "checkpoint/retention.py",
        "if _is_whole(manifest, reader, sizes):",
        "if True:",
        "is as it was written, and is not loaded",
    ),
    "an open block is taken for a closed one": (
        "checkpoint/save.py",
        "        is_open = block.is_open\n",
        "        is_open = False\n",
        "than was added",
    ),
}
"""What was wrong once: a file of holdall's, what stands there now, what stood there, and what the fuzz says of it."""


@pytest.mark.parametrize("mistake", OLD_MISTAKES)
def test_what_was_wrong_once_is_told_as_the_code_is_now(mistake: str) -> None:
    """Else a night finds out, or nobody."""
    file, now, _, _ = OLD_MISTAKES[mistake]
    text = (Path(holdall.__file__).parent / file).read_text(encoding="utf-8")
    assert text.count(now) == 1, f"{file} has changed; say what the mistake looks like now"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistake", OLD_MISTAKES)
def test_the_fuzz_finds_what_was_wrong_once(tmp_path: Path, mistake: str) -> None:
    """Put back into a copy, each of them breaks the rule."""
    file, now, then, message = OLD_MISTAKES[mistake]
    package = tmp_path / "src" / "holdall"
    shutil.copytree(Path(holdall.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / file).read_text(encoding="utf-8")
    (package / file).write_text(text.replace(now, then), encoding="utf-8")
    made = run("make", tmp_path / "templates", PYTHONPATH=str(package.parent))
    said = made.stderr
    if made.returncode == 0:
        said = run("run", tmp_path / "templates", 0, CASES_OF_A_CHILD, PYTHONPATH=str(package.parent)).stdout
    assert message in said, said[-3000:]

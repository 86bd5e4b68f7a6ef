"""Directories of checkpoints that were damaged by disks, people and strangers. checkpoint_cases.py has the rule."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdall

from .old_mistakes import OldMistake
from .seeds import choose_seed

ROOT = Path(__file__).parents[2]
CASES = 75
CASES_A_NIGHT = 5_000
CASES_OF_A_CHILD = 500

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run_cases(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.checkpoint_cases", *map(str, arguments)]
    in_memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    environment = os.environ | {"HOLDALL_THREADS": "2"} | in_memory | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3600)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the templates of checkpoints."""
    folder = tmp_path_factory.mktemp("templates")
    made = run_cases("make", folder)
    assert made.returncode == 0, made.stderr[-3000:]
    return folder


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cases", [CASES, pytest.param(CASES_A_NIGHT, marks=pytest.mark.nightly)])
def test_a_damaged_directory_gives_an_acknowledged_state_or_an_error(templates: Path, cases: int) -> None:
    """No case ends with another exception, hangs, returns a wrong row, or changes files that are not holdall's."""
    first = choose_seed() * CASES_A_NIGHT if cases == CASES_A_NIGHT else 0
    broken = []
    for seed in range(first, first + cases, CASES_OF_A_CHILD):
        count = min(CASES_OF_A_CHILD, first + cases - seed)
        done = run_cases("run", templates, seed, count)
        broken += re.findall(r"^BROKEN .*(?:\n(?!\w+ seed ).*)*", done.stdout, re.MULTILINE)
        if done.returncode != 0 and not broken:
            broken.append((done.stdout + done.stderr)[-3000:])
    assert not broken, "\n".join(broken[:5])


OLD_MISTAKES = {
    "a checkpoint that is not whole counts among those to keep": OldMistake(
        "checkpoint/retention.py",
        "if _is_whole(manifest, reader, sizes):",
        "if True:",
        "is as it was written, and is not loaded",
    ),
    "an open block is taken for a closed one": OldMistake(
        "checkpoint/save.py",
        "        is_open = block.is_open\n",
        "        is_open = False\n",
        "than was added",
    ),
}


@pytest.mark.parametrize("mistake", OLD_MISTAKES.values(), ids=OLD_MISTAKES)
def test_every_old_mistake_can_be_put_back_into_the_present_code(mistake: OldMistake) -> None:
    mistake.require_present_code()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistake", OLD_MISTAKES.values(), ids=OLD_MISTAKES)
def test_the_fuzz_notices_every_old_mistake(tmp_path: Path, mistake: OldMistake) -> None:
    package = tmp_path / "src" / "holdall"
    shutil.copytree(Path(holdall.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    mistake.put_back(package)
    made = run_cases("make", tmp_path / "templates", PYTHONPATH=str(package.parent))
    output = made.stderr
    if made.returncode == 0:
        output = run_cases("run", tmp_path / "templates", 0, CASES_OF_A_CHILD, PYTHONPATH=str(package.parent)).stdout
    assert re.search(mistake.message, output), output[-3000:]

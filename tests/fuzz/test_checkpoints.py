"""Directories of checkpoints that disks, people and strangers harmed; checkpoint_cases.py has the rule."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .seeds import rotating_seed

ROOT = Path(__file__).parents[2]
CASES, CASES_A_NIGHT = 150, 5_000
CASES_OF_A_CHILD = 500

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.checkpoint_cases", *map(str, arguments)]
    in_memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    environment = os.environ | {"HOLDALL_THREADS": "2"} | in_memory
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3600
    )  # fmt: skip


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

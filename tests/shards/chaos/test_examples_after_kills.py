"""The examples over shards learn, also if programs, actors, shards and Ray are killed meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(EXAMPLES.parent / "src"),
}
KILLED_AFTER = {"ape_x": 400, "r2d2": 200}
UPDATES = {"ape_x": 1_200, "r2d2": 800}
LEARNED = 95


def start_example(name: str, folder: Path) -> subprocess.Popen[str]:
    """Start an example in a session of its own, with its own token."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text("a" * 40)
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(UPDATES[name]), str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT | {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token"},
    )


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a process, and all processes that it started."""
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in everything:
        each.kill()
    psutil.wait_procs(everything)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["ape_x", "r2d2"])
def test_an_example_continues_and_learns_after_all_its_processes_were_killed(name: str, tmp_path: Path) -> None:
    with start_example(name, tmp_path) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith(f"update {KILLED_AFTER[name]}:"):
                break
        kill_all(first)
    with start_example(name, tmp_path) as second:
        output = second.communicate()[0]
    assert second.returncode == 0
    beginning = re.search(r"begins with (\d+) transitions, after update (\d+)", output)
    assert beginning is not None
    assert int(beginning[1]) > 500
    assert int(beginning[2]) >= KILLED_AFTER[name]
    last = re.findall(r"update \d+: (\d+)%", output)[-3:]
    assert max(int(share) for share in last) >= LEARNED

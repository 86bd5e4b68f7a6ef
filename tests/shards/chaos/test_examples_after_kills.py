"""The examples over shards learn, and go on after everything was killed: programs, actors, shards and Ray itself."""

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
IN_ALL = {"ape_x": 1_200, "r2d2": 800}
LEARNED = 95


def started(name: str, folder: Path) -> subprocess.Popen[str]:
    """Start an example in a session of its own, with a token of its own."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text("a" * 40)
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(IN_ALL[name]), str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT | {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token"},
    )


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a process, and all that it started."""
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in everything:
        each.kill()
    psutil.wait_procs(everything)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["ape_x", "r2d2"])
def test_an_example_learns_though_everything_is_killed(name: str, tmp_path: Path) -> None:
    with started(name, tmp_path) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith(f"update {KILLED_AFTER[name]}:"):
                break
        kill_all(first)
    with started(name, tmp_path) as second:
        said = second.communicate()[0]
    assert second.returncode == 0
    begun = re.search(r"begins with (\d+) transitions, after update (\d+)", said)
    assert begun is not None
    assert int(begun[1]) > 500
    assert int(begun[2]) >= KILLED_AFTER[name]
    last = re.findall(r"update \d+: (\d+)%", said)[-3:]
    assert max(int(share) for share in last) >= LEARNED

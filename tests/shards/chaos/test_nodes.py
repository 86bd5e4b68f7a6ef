"""A machine is lost, frozen or cut off: nothing acknowledged is lost, and what comes back writes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ..nodes import can_be_apart, settings

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("story", ["lost", "frozen", "cut"])
def test_a_machine_may_go_at_any_time(story: str, capsys: pytest.CaptureFixture[str]) -> None:
    if story == "cut" and not can_be_apart():
        pytest.skip("pulling a cable needs root and `ip`, for network namespaces")
    with tempfile.TemporaryDirectory(prefix="hr", dir="/tmp") as folder:  # names of sockets must be short
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        told = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.shards.chaos.story", story],
            cwd=ROOT,
            env=os.environ | settings(Path(folder)) | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
    assert told.returncode == 0, told.stderr[-4_000:]
    found = json.loads(told.stdout.splitlines()[-1])
    times = f"next batch after {found['first_batch_s']:.1f} s, all shards again after {found['recovered_s']:.1f} s"
    with capsys.disabled():
        sys.stdout.write(f"\n{story}: {times}; {found['transitions']} transitions settled\n")

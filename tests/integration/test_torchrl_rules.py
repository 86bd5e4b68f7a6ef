"""TorchRL's own tests of its replay buffers, with HoldallStorage in the place of LazyTensorStorage.

HOLDALL_TORCHRL_TESTS names the folder `test` of a checkout of TorchRL's repository, of about the installed version.
benchmarks/adapters/torchrl_tests.py runs the tests, and lists those that are left out, with the reason.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "adapters" / "torchrl_tests.py"
TESTS = os.environ.get("HOLDALL_TORCHRL_TESTS", "")
FILES = ("test_storages.py", "test_writers.py", "test_prioritized.py", "test_samplers.py", "test_rb_core.py")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the script defines."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TESTS, reason="HOLDALL_TORCHRL_TESTS does not name TorchRL's tests")
@pytest.mark.parametrize("file", FILES)
def test_torchrls_own_tests_pass(file: str) -> None:
    pytest.importorskip("torchrl")
    command = [sys.executable, str(SCRIPT), str(Path(TESTS).parent), "--file", file]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"HoldallStorage: [1-9]\d* passed", done.stderr), done.stderr[-4000:]


def test_all_files_of_the_script_are_run(script: dict[str, Any]) -> None:
    assert script["FILES"] == FILES


def test_tests_are_left_out_by_their_whole_names(script: dict[str, Any]) -> None:
    find_reason = script["find_reason"]
    name = "test_replay_buffer_read_write_all_in_order"
    assert "keys" in find_reason(name)
    assert find_reason(f"{name}_with_end") is None
    assert find_reason(f"TestOther::{name}") is None
    case = "TestStorages::test_extend_lazystack[{}]"
    assert find_reason(case.format("LazyTensorStorage")) is not None
    assert find_reason(case.format("LazyMemmapStorage")) is None

"""The readings of a watch agree with the bytes that torch has allocated on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdall.tools.watch.watcher import Watcher

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAM = """
import json, sys
import torch
from holdall.tools.watch.agent import get_agent

kept = [torch.ones(100_000_001, dtype=torch.uint8, device="cuda") for _ in range(3)]
freed = torch.ones(500_000_000, dtype=torch.uint8, device="cuda")
del freed
torch.cuda.synchronize()
get_agent().publish()
print(json.dumps({"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}), flush=True)
sys.stdin.readline()
"""


def test_requested_allocated_and_reserved_bytes_are_measured_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) as child:
        assert child.stdout is not None
        truth = json.loads(child.stdout.readline())
        reading = Watcher(child.pid, 1.0).run_pass().reading
        child.communicate("\n")
    gpu = reading.gpu
    assert gpu is not None
    assert gpu.requested == 300_000_003
    assert gpu.allocated == truth["allocated"]
    assert gpu.reserved == truth["reserved"]
    assert truth["reserved"] >= truth["allocated"] + 500_000_000
    assert gpu.limit is not None
    assert gpu.limit > 10**9
    assert gpu.other is None or gpu.other > 50 * 2**20, "a CUDA context takes more than 50 MiB"
    assert sum(part.resident for part in reading.parts) == reading.pss

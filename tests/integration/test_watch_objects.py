"""Arrays of a process that has no agent are named by reading its memory: it does not notice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdall.machine import LINUX, mappings
from holdall.tools.watch.attribution import ProcessMemory
from holdall.tools.watch.object_scan import scan_arrays

MIB = 2**20
PROGRAM = """
import sys
import numpy as np

class Buffer:
    def __init__(self):
        self.size = 5
        self.observations = np.ones((300, 4, 84, 84), np.uint8)
        self.next_observations = np.ones((200, 4, 84, 84), np.uint8)
        self.rewards = np.ones(2_000, np.uint8)  # too small
        self.view = self.observations[10:]

class Seen(Buffer):
    pass

buffer, seen = Buffer(), Seen()
vars(seen)["late"] = 1  # its attributes lie in a dict from now on
TABLE = np.ones((1024, 1024), np.float32)
frames = {"camera": np.ones(3 * 2**20, np.uint8)}
many = [np.ones((2, 2**20), np.uint8)]
print(sys.version_info[:2], flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not LINUX, reason="the memory of another process is read on Linux alone")
def test_arrays_are_named_without_an_agent() -> None:
    named = names_in(sys.executable)
    if named is None:
        pytest.skip("this user may not trace its own processes")
    frames = 300 * 4 * 84 * 84
    assert named["Buffer.observations"] == [frames]
    assert named["Buffer.next_observations"] == [200 * 4 * 84 * 84]  # one object may hold several arrays
    assert [frames] in [named.get(name) for name in ("Seen.observations", "observations")]
    assert named["TABLE"] == [4 * MIB]
    assert named["camera"] == [3 * MIB]
    assert named["array of 2 x 1048576"] == [2 * MIB]
    assert "Buffer.rewards" not in named
    assert "Buffer.view" not in named


def names_in(python: str) -> dict[str, list[int]] | None:
    """Return sizes of arrays by name, in a process of that Python; None if it cannot be read."""
    with subprocess.Popen([python, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with ProcessMemory(child.pid) as memory:
            found = scan_arrays(memory, mappings(child.pid)) if memory.is_readable else None
        child.communicate(b"\n")
    if found is None:
        return None
    named: dict[str, list[int]] = {}
    for region in found:
        named.setdefault(region.name, []).append(region.nbytes)
    return named

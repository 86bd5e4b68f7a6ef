"""The model of the C library's heap against the C library itself, block by block."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from holdall.tools.plan.c_heap import CHeap

KIB, MIB = 2**10, 2**20
# Does in C what the model does: allocates, touches, frees; says what the process has after each step.
PROGRAM = """
import ctypes, json, sys
libc = ctypes.CDLL("libc.so.6")
libc.aligned_alloc.restype = ctypes.c_void_p
libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc.mallinfo2.restype = Info
steps = json.load(sys.stdin)
libc.malloc_trim(0)
held, blocks = [], {}
for key, size in steps:
    if size:
        blocks[key] = libc.aligned_alloc(64, (size + 63) // 64 * 64)
    else:
        libc.free(blocks.pop(key))
    info = libc.mallinfo2()
    held.append(info.arena + info.hblkhd)
print(json.dumps(held))
"""


def updates(seed: int, largest: int, count: int = 6) -> list[tuple[int, int]]:
    """Blocks as an update takes them: some stay, most are freed in about the reverse order."""
    draw = np.random.default_rng(seed)
    sizes = (draw.random(40) ** 3 * largest).astype(int) + 2 * KIB
    stays = set(draw.choice(40, 6, replace=False).tolist())
    steps: list[tuple[int, int]] = []
    for update in range(count):
        keys = [key for key in range(40) if update == 0 or key not in stays]
        steps += [(key, int(sizes[key])) for key in keys]
        order = [key for key in keys[::-1] if key not in stays]
        for at in draw.integers(0, len(order) - 1, 8):
            order[at], order[at + 1] = order[at + 1], order[at]
        steps += [(key, 0) for key in order]
    return steps


@pytest.mark.skipif(sys.platform != "linux", reason="the model is of glibc")
@pytest.mark.parametrize("largest", [100 * KIB, 4 * MIB, 40 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_the_model_takes_what_the_library_takes(seed: int, largest: int) -> None:
    steps = updates(seed, largest)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(steps), capture_output=True, text=True, check=True
    )
    real = np.array(json.loads(done.stdout))
    heap, held = CHeap(), []
    for key, size in steps:
        heap.allocate(key, size) if size else heap.free(key)
        held.append(heap.held)
    real -= real[0] - held[0]  # what the interpreter itself holds
    assert heap.peak == pytest.approx(real.max(), rel=0.05, abs=MIB)
    live = np.cumsum([size if size else -dict(steps[:at][::-1])[key] for at, (key, size) in enumerate(steps)])
    assert heap.peak >= live.max()

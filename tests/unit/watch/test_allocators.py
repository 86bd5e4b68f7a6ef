"""The live bytes of the C library's heap."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdall.machine import LINUX
from holdall.tools.watch import allocators

pytestmark = pytest.mark.skipif(
    not LINUX or allocators.read_heap_use() is None, reason="only the GNU C library counts its heap"
)


def test_heap_in_use_and_mapped_blocks_are_counted_separately() -> None:
    program = """
import ctypes
from holdall.tools.watch.allocators import read_heap_use as heap
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)
before = heap()
small = [library.malloc(10_000) for _ in range(500)]
large = library.malloc(40 * 2**20)
after = heap()
assert abs(after.used - before.used - 5_000_000) < 250_000, (before, after)
assert abs(after.mapped - before.mapped - 40 * 2**20) < 2**19, (before, after)
for block in [*small, large]:
    library.free(block)
assert heap().used - before.used < 100_000, (before, heap())
"""
    # In a new process, because a heap with enough free memory would not map a large block.
    subprocess.run([sys.executable, "-c", program], check=True)

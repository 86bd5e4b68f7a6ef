"""Memory of processes, as the kernel counts it: unique bytes, peaks and mappings."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall import machine
from holdall.machine import LINUX, HeldReader, anonymous_bytes, begin_peak, held_bytes, mappings, peak_bytes

pytestmark = pytest.mark.skipif(not LINUX, reason="reads /proc")
MIB = 2**20


def reserve(nbytes: int) -> NDArray[np.uint8]:
    """Return untouched memory in a mapping of its own."""
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def test_unique_bytes_grow_by_the_written_bytes() -> None:
    """One undisturbed try is enough: pages of libraries become shared or unique when other processes begin or end."""
    tries = []
    for _ in range(10):
        block = reserve(64 * MIB)
        before = held_bytes()
        block[:: mmap.PAGESIZE] = 1
        after = held_bytes()
        growth = (
            after.unique - before.unique,
            after.resident - before.resident,
            after.anonymous - before.anonymous,
        )
        if all(abs(grown - 64 * MIB) < MIB for grown in growth):
            return
        tries.append(growth)
    pytest.fail(f"64 MiB were written, and these bytes were counted: {tries}")


def test_begin_peak_forgets_the_earlier_peak() -> None:
    block = reserve(64 * MIB)
    block[:: mmap.PAGESIZE] = 1
    with_it = peak_bytes()
    del block
    if not begin_peak():
        pytest.skip("this kernel cannot reset a peak")
    assert peak_bytes() < with_it - 32 * MIB


def test_mappings_sum_up_to_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = mappings(child.pid)
        whole = held_bytes(child.pid)
        child.communicate(b"\n")
    assert sum(one.resident for one in found) == whole.resident
    assert sum(one.unique for one in found) == whole.unique
    # The kernel rounds the total once, and every mapping by itself.
    assert abs(sum(one.proportional for one in found) - whole.proportional) <= 1024 * len(found)


def test_a_mapping_has_its_range_and_its_touched_pages() -> None:
    block = reserve(8 * MIB)
    block[: 2 * MIB : mmap.PAGESIZE] = 1
    start = block.ctypes.data
    here = [one for one in mappings() if one.start <= start < one.end]
    assert len(here) == 1
    assert here[0].end >= start + 8 * MIB
    assert here[0].permissions.startswith("rw")
    assert here[0].unique >= 2 * MIB


def test_mapped_files_have_their_names_also_with_spaces(tmp_path: Path) -> None:
    file = tmp_path / "a name with  spaces"
    file.write_bytes(bytes(4096))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[0] == 0
        assert str(file) in {one.name for one in mappings(os.getpid())}


def test_anonymous_bytes_are_those_that_no_file_backs() -> None:
    before = anonymous_bytes()
    block = reserve(64 * MIB)
    block[:: mmap.PAGESIZE] = 1
    assert abs(anonymous_bytes() - before - 64 * MIB) < 2 * MIB


def test_frequent_reads_return_a_recent_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    reads = [0]

    def read() -> object:
        reads[0] += 1
        now[0] += 1.0  # One reading takes a second.
        return object()

    monkeypatch.setattr(machine, "held_bytes", read)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reader = HeldReader()
    first = reader.read()
    now[0] += 48
    assert reader.read() is first
    now[0] += 2
    assert reader.read() is not first
    assert reads == [2]

"""The parts of a process's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdall.machine import LINUX
from holdall.tools.part_groups import GROUP_NAMES
from holdall.tools.watch.exchange import AgentReport, HeldField, Region
from holdall.tools.watch.reading import MemoryReading
from holdall.tools.watch.watcher import Watcher, attribute_sum

pytestmark = pytest.mark.skipif(not LINUX, reason="only Linux reports single mappings")
MIB = 2**20

PROGRAM = """
import json, mmap, sys, threading
import numpy as np
from holdall import watch
from holdall.tools.watch.agent import get_agent

big = np.zeros(64 * 2**20, np.uint8)           # a mapping of its own
big[: 20 * 2**20] = 1
small = np.ones(3000, np.float64)              # somewhere in the heap
unnamed = np.ones(32 * 2**20, np.uint8)
objects = [bytes(48) for _ in range(300_000)]  # 96 bytes each, about the mean
held = [threading.Event() for _ in range(1)]
threads = [threading.Thread(target=held[0].wait, daemon=True) for _ in range(20)]
for thread in threads:
    thread.start()
shared = mmap.mmap(-1, 8 * 2**20)              # between processes
shared.write(bytes(8 * 2**20))
strange = mmap.mmap(-1, 24 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # nobody's allocator knows of it
strange.write(bytes([1]) * (24 * 2**20))
watch.track("big.part", big, lambda: 20 / 64)
watch.track("small", small)
get_agent().step = 17
get_agent().publish()
print(json.dumps({"objects": sum(map(sys.getsizeof, objects))}), flush=True)
input()
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime") / "holdall"))
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) as child:
            assert child.stdout is not None
            yield child.pid, json.loads(child.stdout.readline())
            child.communicate("\n")


@pytest.fixture(scope="module")
def reading(trainer: tuple[int, dict[str, Any]]) -> MemoryReading:
    return Watcher(trainer[0], 1.0).run_pass().reading


def find_part(reading: MemoryReading, name: str) -> tuple[str, int, int]:
    found = [(one.group, one.resident, one.allocated) for one in reading.parts if one.name == name]
    assert len(found) == 1, name
    return found[0]


def test_the_parts_add_up_to_the_memory_of_the_process(reading: MemoryReading) -> None:
    assert sum(one.resident for one in reading.parts) == reading.pss
    assert {one.group for one in reading.parts} <= set(GROUP_NAMES)
    assert all(one.resident >= 0 for one in reading.parts)
    assert reading.pss * (1 - reading.attributed) == pytest.approx(reading.of("unattributed"))


def test_memory_that_no_allocator_counts_stays_unattributed(reading: MemoryReading) -> None:
    assert reading.of("unattributed") == pytest.approx(24 * MIB, rel=0.1)


def test_only_the_touched_pages_of_a_named_array_are_resident(reading: MemoryReading) -> None:
    group, resident, allocated = find_part(reading, "big.part")
    assert group == "buffers"
    assert allocated == 64 * MIB
    assert 20 * MIB <= resident <= 22 * MIB  # The last page may be a huge page of 2 MiB.
    assert find_part(reading, "small")[1] == 24_000


def test_python_objects_are_estimated_and_large_blocks_are_counted(
    reading: MemoryReading, trainer: tuple[int, dict[str, Any]]
) -> None:
    group, resident, _ = find_part(reading, "objects, estimated from their number")
    assert group == "python"
    assert resident >= trainer[1]["objects"]
    group, resident, _ = find_part(reading, "large blocks of malloc, at most")
    assert 32 * MIB <= resident < 40 * MIB


def test_stacks_have_resident_and_allocated_bytes(reading: MemoryReading) -> None:
    group, resident, allocated = find_part(reading, "threads")
    assert group == "stacks"
    assert allocated >= 20 * MIB
    assert resident < 2 * MIB
    assert reading.threads >= 21


def test_shared_memory_has_a_group_of_its_own(reading: MemoryReading) -> None:
    assert reading.of("shared") >= 8 * MIB
    assert reading.of("libraries") > MIB


def test_the_steps_of_a_reading_are_those_of_the_agent(reading: MemoryReading) -> None:
    assert reading.step == 17


def test_without_an_agent_only_the_kernels_figures_are_used(tmp_path: Path) -> None:
    """The mapping has 80 MiB, because one of 64 MiB at a multiple of 64 MiB looks like an arena of the C library."""
    program = (
        "import mmap; m = mmap.mmap(-1, 80 * 2**20, flags=2); m.write(bytes(16 * 2**20)); print(1, flush=True); input()"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = Watcher(child.pid, 1.0).run_pass().reading
        child.communicate("\n")
    assert sum(one.resident for one in found.parts) == found.pss
    mapped = [one for one in found.parts if one.name.startswith("mapping of 80.0 MiB")]
    assert len(mapped) == 1
    assert 16 * MIB <= mapped[0].resident <= 18 * MIB


def test_without_page_maps_named_buffers_are_estimated_from_their_fill() -> None:
    """macOS and Windows report only the sum of a process."""
    named = (Region("buffers", "replay.observations", 4096, 2 * MIB, 0.5),)
    held = (HeldField("replay.obs", MIB, 0.5, 3 * MIB),)
    report = AgentReport(os.getpid(), 0, 0.0, regions=named, held=held)
    observations, obs, rest = attribute_sum(os.getpid(), report)
    assert (observations.resident, observations.allocated) == (MIB, 2 * MIB)
    assert (obs.resident, obs.budget) == (MIB, 3 * MIB)
    assert rest.group == "unattributed"

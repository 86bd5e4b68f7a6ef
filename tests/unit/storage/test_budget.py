"""What `budget` and `prefer` say, and what the machine and its control group leave free."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdall import ReplayMemory, machine
from holdall.errors import ArgumentError, HoldallError
from holdall.machine import Limit, available_bytes
from holdall.schema import Bytes
from holdall.storage import address
from holdall.storage import tiers as budget
from holdall.storage.codec_choice import COST_CAPS
from holdall.storage.rings import FieldLayout
from holdall.storage.tiers import Budget

GIB = 1 << 30


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> list[Limit]:
    """A machine with 8 GiB free; control groups are put into the list that is returned."""
    found = [Limit("machine", 8 * GIB, 16 * GIB)]
    monkeypatch.setattr(machine, "memory_limits", lambda: sorted(found, key=lambda limit: limit.free_bytes))
    return found


def read_by_a_memory(**arguments: Any) -> Budget:
    """Return what the constructor of a memory makes of its arguments."""
    with ReplayMemory(spaces.Box(0, 1, (2,)), spaces.Discrete(2), 4, **arguments) as memory:
        return memory._budget


def test_the_smallest_limit_is_what_is_available(limits: list[Limit]) -> None:
    """The machine's memory, or a control group's if that is less."""
    assert available_bytes() == 8 * GIB
    limits.append(Limit("group", 2 * GIB, 3 * GIB))
    assert available_bytes() == 2 * GIB


def test_auto_keeps_a_quarter_of_what_is_available_raw(limits: list[Limit]) -> None:
    """Of the control group's, if that is less."""
    assert Budget(is_auto=True).raw_bytes == 2 * GIB
    limits.append(Limit("group", 2 * GIB, 3 * GIB))
    assert Budget(is_auto=True).raw_bytes == GIB // 2


def test_auto_spills_only_what_half_of_what_is_available_does_not_hold(limits: list[Limit]) -> None:
    """Without a disk tier nothing is bounded: the user named no limit."""
    assert Budget(is_auto=True, spills=True).closed_allowed(0, 0, 0) == 4 * GIB
    limits.append(Limit("group", 2 * GIB, 3 * GIB))
    assert Budget(is_auto=True, spills=True).closed_allowed(0, 0, 0) == GIB
    assert Budget(is_auto=True).closed_allowed(0, 0, 0) > 2**60


def test_none_keeps_nothing_raw() -> None:
    """All that is closed is compressed; with a disk tier, none of it stays in memory."""
    assert Budget().raw_bytes == 0
    assert Budget().closed_allowed(0, 0, 0) > 2**60
    assert Budget(spills=True).closed_allowed(0, 0, 0) == 0


def test_the_available_memory_is_read_once_and_not_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that is filled much later goes by the memory that is available then."""
    available = Mock(return_value=GIB)
    threads = Mock(return_value=3)
    monkeypatch.setattr(budget, "available_bytes", available)
    monkeypatch.setattr(budget, "pool_threads", threads)
    read = read_by_a_memory()
    assert not available.called
    assert [read.raw_bytes, read.raw_bytes] == [GIB // 4] * 2
    assert [read.threads, read.threads] == [3, 3]
    assert (available.call_count, threads.call_count) == (1, 1)


def test_a_bad_number_of_threads_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the `add` that fills the first block."""
    monkeypatch.setenv("HOLDALL_THREADS", "many")
    with pytest.raises(ArgumentError, match="HOLDALL_THREADS"):
        read_by_a_memory()


@pytest.mark.parametrize("prefer", COST_CAPS)
def test_the_preference_sets_the_cap(prefer: str) -> None:
    """Of every budget."""
    assert read_by_a_memory(budget=None, prefer=prefer).cost_cap == COST_CAPS[prefer]
    assert Budget(most_threads=3).threads == 3


@pytest.mark.parametrize(
    ("value", "limit"),
    [("8GiB", 8 * GIB), ("8 gib", 8 * GIB), ("500MB", 500_000_000), ("0.5 GiB", GIB // 2), (12_345, 12_345)],
)
@pytest.mark.parametrize("spills", [False, True])
def test_a_size_is_a_limit_over_everything(value: Any, limit: int, spills: bool, tmp_path: Path) -> None:
    """As written, in bytes or with a unit, whatever the machine has; raw blocks may take what is left of it."""
    read = read_by_a_memory(budget=value, spill_dir=tmp_path if spills else None)
    assert (read.limit, read.spills) == (limit, spills)
    assert read.raw_bytes == limit
    assert read.closed_allowed(0, 0, 0) + read.staging_bytes == limit


def test_without_a_size_there_is_no_limit() -> None:
    """Not for staging either, and nothing is refused."""
    for value in ("auto", None):
        read = read_by_a_memory(budget=value)
        assert read.limit is None
        assert read.staging_bytes > 2**60
        read.require(1 << 50, 1 << 50)


@pytest.mark.parametrize("limit", [32 << 20, GIB, 64 * GIB])
def test_everything_that_is_set_aside_leaves_room_within_a_limit(limit: int) -> None:
    """Segments on their way and staging together leave most of it for closed blocks."""
    read = Budget(limit)
    _, segment = read.choose([FieldLayout([0], 0, 1 << 10, 1 << 10)])
    room = read.closed_allowed(0, 0, segment)
    assert room + read.staging_bytes + budget.SEGMENTS_ON_THE_WAY * segment == limit
    assert room > limit // 2
    assert read.closed_allowed(1 << 20, 1 << 20, segment) == room - (2 << 20)
    assert read.closed_allowed(1 << 50, 0, 0) == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the machine is the same for all
@given(fixed=st.integers(0, 1 << 33), segment=st.integers(1, 1 << 26))
def test_a_limit_that_is_too_small_is_refused_with_the_least_that_will_do(fixed: int, segment: int) -> None:
    """And that least is taken, and leaves room for closed blocks."""
    with pytest.raises(ArgumentError, match=r"^budget \(1 B\) is too small") as caught:
        Budget(1).require(fixed, segment)
    told = re.search(r"give it at least (\d+) bytes", str(caught.value))
    assert told is not None
    least = Budget(int(told[1]))
    least.require(fixed, segment)
    assert least.closed_allowed(fixed, 0, segment) > 0


@pytest.mark.parametrize("value", ["much", "", "-1", "8 apples", "auto ", "8G", -5, True, 1.5, b"8GiB"])
def test_a_budget_that_is_none_is_refused(value: Any) -> None:
    """The message names argument, value, and what may be given instead."""
    with pytest.raises(ArgumentError, match=r"^budget \(.*\) is no size.*8GiB") as caught:
        read_by_a_memory(budget=value)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, HoldallError)


@pytest.mark.parametrize("value", ["fast", "", "Speed", None])
def test_a_preference_that_is_none_is_refused(value: Any) -> None:
    """Likewise."""
    with pytest.raises(ArgumentError, match=r"^prefer \(.*\) must be one of") as caught:
        read_by_a_memory(prefer=value)
    for word in (repr(value), *COST_CAPS):
        assert word in str(caught.value)


def flags_of_pages(array: Bytes) -> set[str]:
    """Return what the system was told of the memory that an array lies in."""
    place, inside = address(array), False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, end = (int(number, 16) for number in words[0].split("-"))
            inside = first <= place < end
        elif inside and words[0] == "VmFlags:":
            return set(words[1:])
    raise LookupError("the array lies nowhere")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says which pages memory is in")
@pytest.mark.parametrize(
    ("limit", "are_small"), [("auto", False), (None, True), ("256MiB", True), ("20GiB", False)], ids=str
)
def test_what_is_sealed_soon_lies_in_small_pages(limit: str | None, are_small: bool) -> None:
    """Who adds never waits for a large one there; what may stay raw is in large ones, which are read faster."""
    space, no = spaces.Box(0, 255, (3, 84, 84), np.uint8), np.zeros(1, np.bool_)
    frames = np.random.default_rng(0).integers(0, 256, (40, 1, 3, 84, 84), np.uint8)
    with ReplayMemory(space, spaces.Discrete(2), 100_000, budget=limit) as memory:
        for now, after in itertools.pairwise(frames):  # the first arena is a small one
            memory.add(now, np.zeros(1, np.int64), np.zeros(1, np.float32), after, no, no)
        (part,) = memory._open().large_segments.open.parts
        assert part.block is not None
        assert part.block.arena.nbytes >= 4 * 2**20
        flags = flags_of_pages(part.block.arena)
        assert ("nh" in flags, "hg" in flags) == (are_small, not are_small)

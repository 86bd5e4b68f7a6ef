"""What `budget` and `prefer` say, and what the machine and its control group leave free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from holdall.errors import ArgumentError, HoldallError
from holdall.experience import budget
from holdall.experience.budget import Budget, available_bytes
from holdall.experience.choice import COST_CAPS

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 8 GiB free; control groups are files in the folder that is returned."""

    class Memory:
        available = 8 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    for name in ("_CGROUP_LIMITS", "_CGROUP_USES"):
        monkeypatch.setattr(budget, name, tuple(tmp_path / path.name for path in getattr(budget, name)))
    return tmp_path


def write_group(folder: Path, version: int, limit: str, use: str) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (limit, use), strict=True):
        (folder / name).write_text(text + "\n")


def test_without_a_control_group_the_machine_counts() -> None:
    """What the system says is available."""
    assert available_bytes() == 8 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "use", "available"),
    [
        (3 * GIB, GIB, 2 * GIB),
        (100 * GIB, GIB, 8 * GIB),
        (GIB, GIB, 0),
        (GIB, 2 * GIB, 0),
        (9223372036854771712, GIB, 8 * GIB),  # version 1's way of saying that there is no limit
    ],
)
def test_a_control_groups_limit_counts_as_the_machines_memory(
    machine: Path, version: int, limit: int, use: int, available: int
) -> None:
    """Less what the group uses already; never below nothing, and never more than the machine has."""
    write_group(machine, version, str(limit), str(use))
    assert available_bytes() == available


@pytest.mark.parametrize(("limit", "use"), [("max", "5"), ("", "5"), ("5", "what?")])
def test_a_control_group_that_says_no_number_sets_no_limit(machine: Path, limit: str, use: str) -> None:
    """`max` is the usual one."""
    write_group(machine, 2, limit, use)
    assert available_bytes() == 8 * GIB


def test_auto_keeps_a_quarter_of_what_is_available_raw(machine: Path) -> None:
    """Of the control group's, if that is less."""
    assert Budget.of("auto", "balanced", 2).raw_bytes == 2 * GIB
    write_group(machine, 2, str(3 * GIB), str(GIB))
    assert Budget.of("auto", "balanced", 2).raw_bytes == GIB // 2


def test_none_keeps_nothing_raw() -> None:
    """All that is closed is compressed."""
    assert Budget.of(None, "balanced", 2).raw_bytes == 0


@pytest.mark.parametrize("prefer", COST_CAPS)
def test_the_preference_sets_the_cap(prefer: str) -> None:
    """And the hands are handed on."""
    assert Budget.of(None, prefer, 3) == Budget(0, COST_CAPS[prefer], 3)


@pytest.mark.parametrize("value", ["much", "", "-1", "8 apples", "auto ", -5])
def test_a_budget_that_is_none_is_refused(value: Any) -> None:
    """The message names argument, value, and what may be given instead."""
    with pytest.raises(ArgumentError, match=r"^budget \(.*\).*'auto' or None") as caught:
        Budget.of(value, "balanced", 1)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, HoldallError)


@pytest.mark.parametrize("value", ["fast", "", "Speed", None])
def test_a_preference_that_is_none_is_refused(value: Any) -> None:
    """Likewise."""
    with pytest.raises(ArgumentError, match=r"^prefer \(.*\) must be one of") as caught:
        Budget.of(None, value, 1)
    for word in (repr(value), *COST_CAPS):
        assert word in str(caught.value)

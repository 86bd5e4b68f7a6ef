"""Limits: every enclosing control group counts, in both versions, even if a container shows only a part of the tree."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from holdall.machine import control_groups, disk, largest_mapping, memory_limits

GIB = 2**30


def _write_group(path: Path, limit: str, usage: int, inactive: int, *, v2: bool) -> None:
    path.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{usage}\n")
    stat = f"anon 5\n{'inactive_file' if v2 else 'total_inactive_file'} {inactive}\n"
    (path / "memory.stat").write_text(stat)


def _write_proc(root: Path, cgroup: str, mountinfo: str) -> Path:
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mountinfo)
    return proc


def test_version_2_counts_the_group_and_all_that_enclose_it(tmp_path: Path) -> None:
    tree = tmp_path / "fs"
    _write_group(tree / "outer", str(8 * GIB), 3 * GIB, GIB, v2=True)
    _write_group(tree / "outer/inner", "max", GIB, 0, v2=True)
    mounts = f"24 1 0:22 / {tree} rw - cgroup2 cgroup2 rw,nsdelegate\n"
    proc = _write_proc(tmp_path, "0::/outer/inner\n", mounts)
    assert [(limit.free_bytes, limit.total_bytes) for limit in control_groups(proc)] == [(6 * GIB, 8 * GIB)]


def test_version_1_counts_the_memory_controller_alone(tmp_path: Path) -> None:
    tree = tmp_path / "memory"
    _write_group(tree, str(2**63 - 4096), 9 * GIB, 0, v2=False)
    _write_group(tree / "job", str(4 * GIB), GIB, 0, v2=False)
    mounts = (
        f"30 1 0:26 / {tree} rw - cgroup cgroup rw,memory\n31 1 0:27 / {tmp_path / 'cpu'} rw - cgroup cgroup rw,cpu\n"
    )
    proc = _write_proc(tmp_path, "5:memory:/job\n4:cpu,cpuacct:/\n0::/\n", mounts)
    assert [limit.free_bytes for limit in control_groups(proc)] == [3 * GIB]


def test_a_container_that_shows_only_its_own_group_is_read_at_the_mount(tmp_path: Path) -> None:
    tree = tmp_path / "memory"
    _write_group(tree, str(2 * GIB), GIB, 0, v2=False)
    mounts = f"30 1 0:26 /docker/abc {tree} ro - cgroup cgroup rw,memory\n"
    proc = _write_proc(tmp_path, "5:memory:/docker/abc\n", mounts)
    assert [limit.free_bytes for limit in control_groups(proc)] == [GIB]
    hidden = _write_proc(tmp_path / "namespace", "5:memory:/elsewhere\n", mounts)
    assert [limit.free_bytes for limit in control_groups(hidden)] == [GIB]


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    tree = tmp_path / "fs"
    _write_group(tree, str(GIB), 2 * GIB, 0, v2=True)
    proc = _write_proc(tmp_path, "0::/\n", f"24 1 0:22 / {tree} rw - cgroup2 cgroup2 rw\n")
    assert [limit.free_bytes for limit in control_groups(proc)] == [0]


def test_no_control_groups_are_no_limits(tmp_path: Path) -> None:
    assert control_groups(tmp_path / "nothing") == []


def test_the_smallest_limit_comes_first() -> None:
    limits = memory_limits(1234)
    assert (limits[0].name, limits[0].free_bytes) == ("--budget", 1234)
    assert any(limit.total_bytes == psutil.virtual_memory().total for limit in limits)


def test_one_array_may_not_ask_for_more_than_all_memory(tmp_path: Path) -> None:
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/overcommit_memory").write_text("1\n")
    assert largest_mapping(tmp_path) is None
    assert largest_mapping(tmp_path / "elsewhere") == psutil.virtual_memory().total + psutil.swap_memory().total


def test_a_directory_that_is_still_to_be_made_is_on_its_parents_disk(tmp_path: Path) -> None:
    found = disk(tmp_path / "runs" / "1")
    assert found is not None
    assert str(tmp_path) in found.name
    assert found.free_bytes == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.05)

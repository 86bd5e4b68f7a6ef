"""The memory pressure of a process is that of its own control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdall.tools.watch.pressure import read_stalled_percent

PRESSURE = "some avg10={percent} avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def make_process(folder: Path, mounts: Path, group: str) -> Path:
    """Make the files of a process in /proc. Its control group is `group` below `mounts`."""
    folder.mkdir()
    (folder / "cgroup").write_text(f"0::/{group}\n")
    (folder / "mountinfo").write_text(f"30 23 0:26 / {mounts} rw,nosuid - cgroup2 cgroup2 rw\n")
    return folder


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """Make two control groups: `busy`, whose processes wait for memory, and `quiet`."""
    mounts = tmp_path / "cgroup"
    for name, percent in (("busy", "42.50"), ("quiet", "0.00")):
        (mounts / name).mkdir(parents=True)
        (mounts / name / "memory.pressure").write_text(PRESSURE.format(percent=percent))
    return mounts


@pytest.mark.parametrize(("group", "percent"), [("busy", 42.5), ("quiet", 0.0)])
def test_pressure_is_that_of_the_processs_own_group(tmp_path: Path, mounts: Path, group: str, percent: float) -> None:
    assert read_stalled_percent(make_process(tmp_path / "process", mounts, group)) == percent


def test_a_group_without_the_file_has_the_pressure_of_the_next_larger_group(tmp_path: Path, mounts: Path) -> None:
    (mounts / "busy" / "worker").mkdir()
    assert read_stalled_percent(make_process(tmp_path / "process", mounts, "busy/worker")) == 42.5


def test_a_process_without_a_group_has_the_pressure_of_the_system(tmp_path: Path) -> None:
    system = tmp_path / "memory"
    assert read_stalled_percent(tmp_path, system) is None
    system.write_text(PRESSURE.format(percent="3.00"))
    assert read_stalled_percent(tmp_path, system) == 3.0

"""The files that a watched process and its watcher exchange: only what is sound and private is used."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from holdall.errors import WatchError
from holdall.tools.watch import exchange
from holdall.tools.watch.exchange import AgentReport, HeldField, PhasePeak, Region, make_folder, read_agent_report
from holdall.tools.watch.watcher import Watcher

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="rights of folders are POSIX's")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "holdall"
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(place))
    return place


def make_report(**changes: Any) -> AgentReport:
    values: dict[str, Any] = {
        "pid": os.getpid(),
        "started": exchange.get_start_time(os.getpid()),
        "time": 1.5,
        "step": 7,
        "goal": 100,
        "phase": "train",
        "regions": (Region("buffers", "replay.obs", 4096, 8192, 0.25, False),),
        "held": (HeldField("replay.obs", 7, 0.5, 9), HeldField("replay.reward", 7, 0.5)),
        "heap_used": 1,
        "python_objects": 5,
        "gpu": {"reserved": 1},
        "torch_threads": 2,
        "spilled": 9,
        "disk_free": 11,
        "phases": {"train": PhasePeak(1, 2, 3.0)},
        "events": ((1.0, "spilled"),),
        "seconds_spent": 0.1,
    }
    return AgentReport(**(values | changes))


def write_report(folder: Path, **changes: Any) -> Path:
    """Write a report, and return its file."""
    exchange.write_agent_report(make_report(**changes))
    return folder / f"agent-{os.getpid()}.json"


def test_a_report_is_read_as_it_was_written(folder: Path) -> None:
    write_report(folder)
    assert read_agent_report(os.getpid()) == make_report()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    exchange.remove_agent_report(os.getpid())
    assert read_agent_report(os.getpid()) is None


def test_the_report_of_an_earlier_process_with_the_same_id_is_ignored(folder: Path) -> None:
    write_report(folder, started=1)
    assert read_agent_report(os.getpid()) is None


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    write_report(folder)
    folder.chmod(0o777)
    assert read_agent_report(os.getpid()) is None
    with pytest.raises(WatchError, match="open to other users"):
        make_folder()


def test_a_link_in_place_of_a_report_is_not_followed(folder: Path, tmp_path: Path) -> None:
    file = write_report(folder)
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(WatchError, match="cannot be read"):
        read_agent_report(os.getpid())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "holdall-agent-0"),
        ("pid", -1),
        ("time", "soon"),
        ("time", float("nan")),
        ("step", 1.5),
        ("regions", [["buffers", "x", -5, 1, None, True]]),
        ("regions", [["kernel", "x", 5, 1, None, True]]),
        ("regions", [["buffers", "x" * 1000, 5, 1, None, True]]),
        ("regions", [["buffers", "x", 1, 1 << 70, None, True]]),
        ("regions", 5),
        ("heap_used", [1]),
        ("python_objects", []),
        ("held", [["x", 1, 0.5]]),
        ("gpu", []),
        ("phases", {"train": {}}),
        ("events", [[1.0]]),
        ("unknown", 1),
    ],
)
def test_a_report_with_a_value_of_another_type_is_refused(folder: Path, key: str, value: Any) -> None:
    file = write_report(folder)
    values = json.loads(file.read_text(encoding="utf-8"))
    values[key] = value
    file.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(WatchError, match="cannot be used"):
        read_agent_report(os.getpid())


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b" " * (17 * 2**20)], ids=len)
def test_a_file_that_is_no_report_is_refused(folder: Path, content: bytes) -> None:
    write_report(folder).write_bytes(content)
    with pytest.raises(WatchError):
        read_agent_report(os.getpid())


def test_a_watch_goes_on_without_a_refused_report_and_says_so_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_report(folder).write_text("{}", encoding="utf-8")
    watcher = Watcher(os.getpid(), 1.0)
    with caplog.at_level(logging.WARNING, "holdall"):
        readings = [watcher.run_pass().reading for _ in range(2)]
    assert [reading.step for reading in readings] == [None, None]
    (record,) = caplog.records
    assert f"process {os.getpid()} cannot be used" in record.getMessage()


def test_long_names_are_cut_by_the_writer(folder: Path) -> None:
    """One long name was written, and the whole report was refused."""
    long = "x" * 10_000
    write_report(
        folder,
        phase=long,
        regions=(Region("buffers", long, 1, 1),),
        held=(HeldField(long, 1, 0.5),),
        phases={long: PhasePeak(1, 2, 3.0)},
        events=((1.0, long),),
    )
    report = read_agent_report(os.getpid())
    assert report is not None
    names = [report.phase, report.regions[0].name, report.held[0].name, *report.phases, report.events[0][1]]
    assert set(names) == {"x" * 199 + "…"}


def test_names_cannot_contain_control_sequences(folder: Path) -> None:
    write_report(folder, phase="\x1b[2Jtrain\n")
    report = read_agent_report(os.getpid())
    assert report is not None
    assert report.phase == "?[2Jtrain?"


def test_files_of_ended_processes_are_removed(folder: Path) -> None:
    file = write_report(folder)
    (folder / "agent-999999999.json").write_text("{}", encoding="utf-8")
    exchange.remove_stale_files()
    assert list(folder.iterdir()) == [file]

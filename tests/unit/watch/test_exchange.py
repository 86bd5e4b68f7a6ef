from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from holdall.errors import WatchError
from holdall.tools.watch import exchange
from holdall.tools.watch.exchange import AgentReport, HeldField, PhasePeak, Region, make_folder, read_agent_report

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="rights of folders are POSIX's")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "holdall"
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(place))
    return place


def told(**changed: Any) -> AgentReport:
    words: dict[str, Any] = {
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
        "spilled": {"place": 9},
        "phases": {"train": PhasePeak(1, 2, 3.0)},
        "events": ((1.0, "spilled"),),
        "seconds_spent": 0.1,
    }
    return AgentReport(**(words | changed))


def test_what_is_told_is_what_is_read(folder: Path) -> None:
    exchange.write_agent_report(told())
    assert read_agent_report(os.getpid()) == told()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    exchange.remove_agent_report(os.getpid())
    assert read_agent_report(os.getpid()) is None


def test_a_process_that_had_the_same_id_is_not_believed(folder: Path) -> None:
    exchange.write_agent_report(told(started=1))
    assert read_agent_report(os.getpid()) is None


def test_a_folder_that_others_can_write_to_is_neither_used_nor_believed(folder: Path) -> None:
    exchange.write_agent_report(told())
    folder.chmod(0o777)
    assert read_agent_report(os.getpid()) is None
    with pytest.raises(WatchError, match="open to other users"):
        make_folder()


def test_a_link_in_the_place_of_the_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    exchange.write_agent_report(told())
    file = folder / f"agent-{os.getpid()}.json"
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    assert read_agent_report(os.getpid()) is None


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
        ("regions", 5),
        ("heap_used", [1]),
        ("python_objects", []),
        ("held", [["x", 1, 0.5]]),
        ("gpu", []),
        ("phases", {"train": {}}),
        ("events", [[1.0]]),
        ("regions", [["buffers", "x", 1, 1 << 70, None, True]]),
    ],
)
def test_words_that_make_no_sense_are_not_believed(folder: Path, key: str, value: Any) -> None:
    exchange.write_agent_report(told())
    file = folder / f"agent-{os.getpid()}.json"
    words = json.loads(file.read_text(encoding="utf-8"))
    assert read_agent_report(os.getpid()) is not None
    words[key] = value
    file.write_text(json.dumps(words), encoding="utf-8")
    assert read_agent_report(os.getpid()) is None


def test_bytes_that_are_no_json_and_files_beyond_bounds_are_not_believed(folder: Path) -> None:
    exchange.write_agent_report(told())
    file = folder / f"agent-{os.getpid()}.json"
    for content in (b"", b"\xff\xfe", b"[" * 100_000, b" " * (17 * 2**20)):
        file.write_bytes(content)
        assert read_agent_report(os.getpid()) is None


def test_names_cannot_hold_control_sequences(folder: Path) -> None:
    exchange.write_agent_report(told(phase="\x1b[2Jtrain\n"))
    found = read_agent_report(os.getpid())
    assert found is not None
    assert found.phase == "?[2Jtrain?"


def test_what_ended_processes_left_is_swept(folder: Path) -> None:
    exchange.write_agent_report(told())
    (folder / "agent-999999999.json").write_text("{}", encoding="utf-8")
    exchange.remove_stale_files()
    assert [path.name for path in folder.iterdir()] == [f"agent-{os.getpid()}.json"]

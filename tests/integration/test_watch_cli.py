"""`holdall watch`: run as a user runs it, on real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdall.cli import app
from holdall.machine import LINUX
from holdall.tools.watch.verdicts import suggest_memray

HOLDALL = [sys.executable, "-m", "holdall"]
MIB = 2**20

TRAINER = """
import sys
import numpy as np
import holdall
from gymnasium import spaces
from holdall import watch
from holdall.tools.watch.agent import get_agent

features = np.ones(4 * 2**20, np.uint8)
watch.track("features", features)
memory = holdall.ReplayMemory(spaces.Box(0, 255, (64, 64), np.uint8), spaces.Discrete(2), 2000)
kept = [np.ones(64 * 1024, np.uint8) for _ in range(1000)]
kept = kept[-1:]
no, obs = np.zeros(1, bool), np.zeros((1, 64, 64), np.uint8)
for i in range(500):
    obs = np.full((1, 64, 64), i % 251, np.uint8)
    memory.add(obs, np.zeros(1, np.int64), np.zeros(1), obs, no, no)
get_agent().publish()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"HOLDALL_RUNTIME_DIR": str(tmp_path / "runtime"), "COLUMNS": "80"}


@pytest.fixture
def trainer(environment: dict[str, str]) -> Iterator[int]:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", TRAINER], **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the agent reported by then
        yield child.pid
        child.communicate("\n")


def run_holdall(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*HOLDALL, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(not LINUX, reason="only Linux reports single mappings")
def test_once_prints_one_reading_of_a_running_process(environment: dict[str, str], trainer: int) -> None:
    done = run_holdall(environment, "watch", "--once", "--json", trainer)
    assert done.returncode == 0, done.stderr
    first, reading = (json.loads(line) for line in done.stdout.splitlines()[:2])
    assert first["format"] == "holdall-watch-1"
    assert sum(part["resident"] for part in reading["parts"]) == reading["pss"]
    assert reading["attributed"] > 0.95
    parts = {part["name"]: part for part in reading["parts"]}
    assert parts["replay.obs"]["resident"] > 500 * 64 * 64
    assert parts["replay.obs"]["fill"] == 0.25
    assert parts["features"]["resident"] == pytest.approx(4 * MIB, rel=0.01)
    seen = run_holdall(environment, "watch", "--once", trainer)
    assert seen.returncode == 0
    assert "replay.obs" in seen.stdout
    assert "unattributed" in seen.stdout
    assert max(map(len, seen.stdout.splitlines())) <= 80


def test_a_mistake_is_one_line_and_exit_code_1(environment: dict[str, str]) -> None:
    for arguments in (
        ["watch", "999999999"],
        ["watch", "--", "no-such-program-here"],
        ["watch", "--json", "--", "true"],
        ["watch", "--once", "--", "true"],
    ):
        done = run_holdall(environment, *arguments)
        assert done.returncode == 1, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_watched_command_sees_its_own_arguments_and_environment(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import builtins; builtins.MINE = 17", encoding="utf-8")
    program = (
        "import os, sys; print(MINE, sys.argv[1:], 'HOLDALL_WATCHED' in os.environ, os.environ.get('PYTHONPATH'));"
        f"import time; end = time.time() + 60; record = {str(tmp_path / 'run.jsonl')!r};"
        "exec('while time.time() < end and open(record).read().count(chr(10)) < 4: time.sleep(0.1)'); sys.exit(5)"
    )
    path = os.pathsep.join([str(tmp_path / "mine"), *filter(None, [os.environ.get("PYTHONPATH")])])
    record = tmp_path / "run.jsonl"
    done = run_holdall(
        environment | {"PYTHONPATH": path},
        "watch",
        "--interval",
        "0.2",
        "--record",
        record,
        "--",
        sys.executable,
        "-c",
        program,
        "--flag",
        "x y",
    )
    assert done.returncode == 5, done.stderr
    assert f"17 ['--flag', 'x y'] False {path}" in done.stdout.splitlines()
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["command"][1:] == ["-c", program, "--flag", "x y"]
    assert sum(line["kind"] == "reading" for line in lines) >= 2


@pytest.mark.skipif(not LINUX, reason="only Linux reports the peak of a child")
def test_a_short_command_is_read_when_its_agent_reports_and_has_the_peak_of_the_kernel(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The interval is longer than the command, so the peak comes after the last reading."""
    record = tmp_path / "run.jsonl"
    program = (
        f"import time; end = time.time() + 60; record = {str(record)!r};"
        "exec('while time.time() < end and open(record).read().count(chr(10)) < 3: time.sleep(0.01)');"
        "taken = bytearray(300 << 20); del taken"
    )
    done = run_holdall(environment, "watch", "--interval", 100, "--record", record, "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    readings = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()[1:]]
    assert len(readings) == 2
    assert any(part["name"] == "C heap in use" for part in readings[1]["parts"])  # The agent counts the heap.
    *_, last = done.stdout.splitlines()
    words = re.fullmatch(r"ended after [\d.]+ m?s; peak ([\d.]+) MiB", last)
    assert words is not None, last
    assert 300 < float(words[1]) < 600


@pytest.mark.parametrize(("ends", "code"), [("import sys; sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_a_command_that_ends_at_once_keeps_its_exit_code(
    environment: dict[str, str], ends: str, code: int, tmp_path: Path
) -> None:
    program = f"import os\n{ends}"
    done = run_holdall(environment, "watch", "--record", tmp_path / "run.jsonl", "--", sys.executable, "-c", program)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_the_record_does_not_contain_the_output_of_the_command(environment: dict[str, str], tmp_path: Path) -> None:
    program = "import time; print('mine'); time.sleep(0.8)"
    record = tmp_path / "run.jsonl"
    done = run_holdall(environment, "watch", "--interval", 0.2, "--record", record, "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "mine"
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines][:2] == ["header", "reading"]


def test_a_closed_pipe_does_not_change_the_exit_code(environment: dict[str, str]) -> None:
    program = "import time; time.sleep(0.7); raise SystemExit(5)"
    watch = [*HOLDALL, "watch", "--interval", "0.2", "--", sys.executable, "-c", program]
    with subprocess.Popen(watch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(60) == 5
        assert child.stderr is not None
        assert b"Traceback" not in child.stderr.read()


def test_a_signal_to_the_watch_is_forwarded_to_the_command(environment: dict[str, str]) -> None:
    program = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(3))\nprint('up', flush=True)\ntime.sleep(60)"
    )
    watch = [*HOLDALL, "watch", "--", sys.executable, "-c", program]
    with subprocess.Popen(watch, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.terminate()
        assert child.wait(60) == 3


def test_an_unwritable_record_is_refused_before_the_command_starts(environment: dict[str, str], tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'ran')!r}, 'w')"
    done = run_holdall(environment, "watch", "--record", tmp_path / "no" / "run", "--", sys.executable, "-c", program)
    assert done.returncode == 1
    assert not (tmp_path / "ran").exists()


WORKERS = """
import multiprocessing, sys, numpy as np
from multiprocessing.shared_memory import SharedMemory

def work(ready, end):
    kept = np.ones(80 * 2**20, np.uint8)
    ready.set()
    end.wait()

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ready, end = fork.Event(), fork.Event()
    fork.Process(target=work, args=(ready, end)).start()
    ready.wait()
    shared = SharedMemory("holdall-test-frames", create=True, size=6 * 2**20)
    shared.buf[:] = bytes(6 * 2**20)
    mapped = np.memmap(sys.argv[1], np.uint8, "w+", shape=5 * 2**20)
    mapped[:] = 1
    print("ready", flush=True)
    sys.stdin.readline()
    end.set()
    del mapped
    shared.close()
    shared.unlink()
"""


@pytest.mark.skipif(not LINUX, reason="only Linux reports single mappings")
def test_workers_count_for_the_peak_and_shared_memory_is_named_by_its_file(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "workers.py").write_text(WORKERS, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "workers.py"), str(tmp_path / "replay.dat")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        result = run_holdall(environment, "watch", "--once", "--json", child.pid).stdout
        seen = run_holdall(environment, "watch", "--once", child.pid).stdout
        child.communicate("\n")
    reading = json.loads(result.splitlines()[1])
    assert reading["peak"] >= reading["pss"] > 80 * MIB
    shared = {part["name"]: part["resident"] for part in reading["parts"] if part["group"] == "shared"}
    assert shared["/dev/shm/holdall-test-frames"] >= 6 * MIB
    assert shared[str(tmp_path / "replay.dat")] >= 5 * MIB
    assert "holdall-test-frames" in seen
    assert "replay.dat" in seen
    assert " 1 thread\n" in seen
    assert "holdall watch -- " in seen  # how its buffers would get names
    assert max(map(len, seen.splitlines())) <= 80


def test_the_watcher_loads_neither_numpy_nor_torch() -> None:
    for module in ("holdall.cli.watch", "holdall.tools.watch.watcher"):
        program = f"import {module}, sys; sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'gymnasium')))"
        subprocess.run([sys.executable, "-c", program], check=True)


def test_a_failing_view_does_not_change_the_exit_code_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("nothing can be drawn")

    monkeypatch.setattr("holdall.cli.watch.draw_pass", fail)
    result = CliRunner().invoke(app, ["watch", "--", sys.executable, "-c", "raise SystemExit(5)"])
    assert result.exit_code == 5
    assert "nothing can be drawn" in result.stderr


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_an_ascii_terminal_gets_the_reading(environment: dict[str, str]) -> None:
    """Bars become question marks. The figures are there."""
    done = subprocess.run(
        [*HOLDALL, "watch", "--once", str(os.getpid())],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "libraries" in done.stdout
    assert done.stdout.isascii()


def test_the_command_that_a_leak_verdict_names_finds_the_line(tmp_path: Path) -> None:
    memray = pytest.importorskip("memray", reason="needs memray")
    program = "import sys\nkept = []\nfor number in range(2_000):\n    kept.append(bytes(4_000))\nsys.exit(0)\n"
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    run, show = suggest_memray([sys.executable, "train.py", "0"]).split("; ")
    for command in (run, show):
        subprocess.run(shlex.split(command), cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "leak.html").stat().st_size > 0
    records = memray.FileReader(tmp_path / "leak.bin").get_leaked_allocation_records(merge_threads=True)
    largest = max(records, key=lambda record: record.size)
    assert largest.size >= 2_000 * 4_000
    _, file, line = largest.stack_trace(max_stacks=1)[0]
    assert (Path(file).name, line) == ("train.py", 4)

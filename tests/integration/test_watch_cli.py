"""`holdall watch` and `holdall trim`: run as a user runs them, on real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdall.machine import LINUX, held_bytes

HOLDALL = [sys.executable, "-m", "holdall"]
MIB = 2**20

TRAINER = """
import sys
import numpy as np
import holdall
from gymnasium import spaces
from holdall import watch

watch.track("features", np.ones(4 * 2**20, np.uint8))
memory = holdall.ReplayMemory(spaces.Box(0, 255, (64, 64), np.uint8), spaces.Discrete(2), 2000)
kept = [np.ones(64 * 1024, np.uint8) for _ in range(1000)]
kept = kept[-1:]
no, obs = np.zeros(1, bool), np.zeros((1, 64, 64), np.uint8)
for i in range(500):
    obs = np.full((1, 64, 64), i % 251, np.uint8)
    memory.add(obs, np.zeros(1, np.int64), np.zeros(1), obs, no, no)
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
        child.stdout.readline()
        time.sleep(1.2)  # the agent speaks twice a second
        yield child.pid
        child.communicate("\n")


def called(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*HOLDALL, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(not LINUX, reason="mappings are told apart on Linux alone")
def test_one_reading_of_a_process_that_runs(environment: dict[str, str], trainer: int) -> None:
    done = called(environment, "watch", "--once", "--json", trainer)
    assert done.returncode == 0, done.stderr
    first, reading = (json.loads(line) for line in done.stdout.splitlines()[:2])
    assert first["format"] == "holdall-watch-1"
    assert sum(part["resident"] for part in reading["parts"]) == reading["pss"]
    assert reading["attributed"] > 0.95
    parts = {part["name"]: part for part in reading["parts"]}
    assert parts["replay.obs"]["resident"] > 500 * 64 * 64
    assert parts["replay.obs"]["fill"] == 0.25
    seen = called(environment, "watch", "--once", trainer)
    assert seen.returncode == 0
    assert "replay.obs" in seen.stdout
    assert "unattributed" in seen.stdout
    assert max(map(len, seen.stdout.splitlines())) <= 80


@pytest.mark.skipif(not LINUX, reason="malloc_trim is the GNU C library's")
def test_a_trim_says_what_it_would_and_did_return(environment: dict[str, str], trainer: int) -> None:
    would = json.loads(called(environment, "trim", trainer, "--dry-run", "--json").stdout)
    assert would["would_return"] > 40 * MIB
    before = held_bytes(trainer).unique
    done = json.loads(called(environment, "trim", trainer, "--json").stdout)
    assert done["returned"] == pytest.approx(before - held_bytes(trainer).unique, abs=4 * MIB)
    assert done["returned"] > 40 * MIB
    assert json.loads(called(environment, "trim", "--self", "--json").stdout)["returned"] >= -MIB


def test_a_process_without_an_agent_cannot_be_trimmed(environment: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        done = called(environment, "trim", other.pid)
        other.communicate()
    assert done.returncode == 1
    assert "has no agent" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_mistakes_are_told_in_one_line(environment: dict[str, str]) -> None:
    for arguments in (["watch", "999999999"], ["watch", "--", "no-such-program-here"], ["trim"]):
        done = called(environment, *arguments)
        assert done.returncode == 1, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_command_runs_as_if_it_were_not_watched(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text("import builtins; builtins.MINE = 17", encoding="utf-8")
    program = (
        "import os, sys; print(MINE, sys.argv[1:], 'HOLDALL_WATCHED' in os.environ, os.environ.get('PYTHONPATH'));"
        "import time; time.sleep(1.5); sys.exit(5)"
    )
    path = os.pathsep.join([str(tmp_path / "mine"), *filter(None, [os.environ.get("PYTHONPATH")])])
    record = tmp_path / "run.jsonl"
    done = called(
        environment | {"PYTHONPATH": path}, "watch", "--json", "--interval", "0.2", "--record", record, "--",
        sys.executable, "-c", program, "--flag", "x y",
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert f"17 ['--flag', 'x y'] False {path}" in done.stdout.splitlines()
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["command"][1:] == ["-c", program, "--flag", "x y"]
    assert sum(line["kind"] == "reading" for line in lines) >= 2


def test_the_watcher_loads_neither_numpy_nor_torch() -> None:
    for module in ("holdall.cli.watch", "holdall.tools.watch.watcher_process"):
        program = f"import {module}, sys; sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'gymnasium')))"
        subprocess.run([sys.executable, "-c", program], check=True)

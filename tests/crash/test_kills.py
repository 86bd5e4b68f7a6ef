"""Trainers that are killed at any moment lose nothing that was acknowledged, and never see a wrong row."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdall import ReplayMemory

from .nursery import LANES, require_right

if sys.platform == "win32":
    pytest.skip("processes are killed and forked as POSIX does", allow_module_level=True)


class Nursery:
    """The process of `nursery.py`, which starts trainers. They run and are killed one at a time."""

    def __init__(self) -> None:
        program = [sys.executable, str(Path(__file__).with_name("nursery.py"))]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run_trainer(self, url: str, folder: Path, seed: int, saves: int, wait_s: float) -> tuple[int, int]:
        """Kill a trainer a moment after some saves. Return the ticks that it loaded and saved."""
        if self._process.stdin is None:
            raise RuntimeError("the nursery has no stdin")
        self._process.stdin.write(f"{url} {folder} {seed}\n")
        self._process.stdin.flush()
        loaded = -1
        saved = -1
        pid = 0
        deadline: float | None = None
        while True:
            left = 60.0 if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                word, _, rest = self._lines.get(timeout=left).partition(" ")
            except queue.Empty:
                assert deadline is not None, "the trainer printed nothing for a minute"
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + 60
                continue
            if word == "born":
                pid = int(rest)
            elif word == "loaded":
                loaded = int(rest)
            elif word == "saved":
                saved = int(rest)
                saves -= 1
            elif word == "failed":
                pytest.fail(rest)
            elif word == "gone":
                return loaded, saved
            if loaded >= 0 and saves <= 0 and deadline is None:
                deadline = time.monotonic() + wait_s

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)
        self._reader.join(timeout=30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line.strip())


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_kill_during_an_upload_loses_what_was_acknowledged(
    tmp_path: Path, url: str, request: pytest.FixtureRequest
) -> None:
    """No checkpoint names the objects of a killed writer."""
    # The nursery inherits the address of the server, so it starts after the server.
    nursery: Nursery = request.getfixturevalue("nursery")
    generator = random.Random(1)
    acknowledged = 0
    for number in range(60):
        loaded, saved = nursery.run_trainer(url, tmp_path, number, generator.randrange(3), generator.uniform(0, 0.1))
        assert loaded >= acknowledged, f"trainer {number} loaded tick {loaded}; {acknowledged} was acknowledged"
        acknowledged = max(acknowledged, loaded, saved)
    assert acknowledged > 0
    with ReplayMemory.load(url) as memory:
        assert memory.next_id // LANES >= acknowledged
        require_right(memory)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [12, *(pytest.param(kills, marks=pytest.mark.nightly) for kills in (50, 500))])
def test_no_kill_loses_what_was_acknowledged(nursery: Nursery, tmp_path: Path, kills: int) -> None:
    """A trainer is killed while it adds, compresses, spills, saves or collects. The next one continues its run."""
    generator = random.Random(kills)
    acknowledged = 0
    checkpoints = 0
    for number in range(kills):
        saves = generator.randrange(3)
        wait_s = generator.uniform(0, 0.06)
        loaded, saved = nursery.run_trainer(str(tmp_path / "run"), tmp_path, number, saves, wait_s)
        assert loaded >= acknowledged, f"trainer {number} loaded tick {loaded}; {acknowledged} was acknowledged"
        checkpoints += saved > acknowledged
        acknowledged = max(acknowledged, loaded, saved)
    assert checkpoints >= kills / 4
    with ReplayMemory.load(tmp_path / "run") as memory:
        assert memory.next_id // LANES >= acknowledged
        require_right(memory)

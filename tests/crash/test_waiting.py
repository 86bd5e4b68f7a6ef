"""Stores that do not answer: a save can be cancelled at any stage, and no call waits for ever."""

from __future__ import annotations

import errno
import inspect
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

from holdall import CheckpointError, ReplayMemory
from holdall import background as waiting
from holdall.checkpoint import LOAD_S, open_reader
from holdall.checkpoint import waiting as waits
from holdall.checkpoint.object_blobs import ObjectBlobs

from .nursery import LANES, SPACE, add, require_right
from .servers import Weed, find_free_ports

NO_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
SOON_S = 60.0
"""Seconds after which a call is regarded as hanging, also on a busy machine."""


def make_memory(ticks: int = 0) -> ReplayMemory:
    memory = ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1)
    for tick in range(ticks):
        add(memory, tick)
    return memory


@pytest.fixture
def unused_endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an endpoint without a server."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    (port,) = find_free_ports(1)
    for name, value in NO_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{port}")
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def freeze_server(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that stops the server. It then accepts connections and never answers."""
    yield lambda: os.kill(weed.process.pid, signal.SIGSTOP)
    os.kill(weed.process.pid, signal.SIGCONT)


@pytest.mark.usefixtures("unused_endpoint")
def test_saves_to_a_store_that_does_not_exist_can_be_cancelled() -> None:
    """The rule also holds for a save that waits for an earlier one."""
    with make_memory(5) as memory:
        first = memory.save("s3://runs/nowhere")
        second = memory.save("s3://runs/nowhere")
        second.cancel()  # This save waits for the first one.
        with pytest.raises(CheckpointError, match="cancelled before it started"):
            second.result(SOON_S)
        assert not first.done()
        first.cancel()
        with pytest.raises(CheckpointError, match="cancelled"):
            first.result(SOON_S)
        third = memory.save("s3://runs/nowhere")
        assert not third.done()
        third.cancel()
        with pytest.raises(CheckpointError, match="cancelled"):
            third.result(SOON_S)


def test_close_ends_a_save_to_a_store_that_does_not_exist(unused_endpoint: str) -> None:
    """The error names the endpoint. A second `close` does nothing."""
    memory = make_memory(5)
    handle = memory.save("s3://runs/nowhere")
    with pytest.raises(CheckpointError, match=unused_endpoint):
        memory.close(timeout=1)
    with pytest.raises(CheckpointError, match=unused_endpoint):
        handle.result(SOON_S)
    memory.close()


def read_with_load(timeout: float) -> None:
    ReplayMemory.load("s3://runs/nowhere", timeout=timeout)


def read_with_recover(timeout: float) -> None:
    ReplayMemory.load("s3://runs/nowhere", timeout=timeout, recover=True)


def read_with_ls(timeout: float) -> None:
    open_reader("s3://runs/nowhere", timeout=timeout).require_checkpoint()


READING = {"load": read_with_load, "recover": read_with_recover, "ls": read_with_ls}


@pytest.mark.parametrize("how", READING)
def test_reading_from_a_store_that_does_not_exist_ends_after_the_timeout(
    how: str, unused_endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the endpoint, and so does the error. The default timeout is half a minute."""
    monkeypatch.setattr(waits, "REMIND_S", 0.2)
    with caplog.at_level(logging.WARNING, "holdall"), pytest.raises(CheckpointError, match=unused_endpoint) as given_up:
        READING[how](1.0)
    assert given_up.value.errno == errno.ETIMEDOUT
    assert any("Still waiting" in record.message and unused_endpoint in record.message for record in caplog.records)
    assert inspect.signature(ReplayMemory.load).parameters["timeout"].default == LOAD_S == 30


def test_a_load_from_a_store_that_stopped_answering_ends_after_the_timeout(url: str, freeze_server: Any) -> None:
    """Without a limit, a call waits until the store answers."""
    with make_memory(60) as memory:
        memory.save(url).result(SOON_S)
    reader = open_reader(url, timeout=1)
    freeze_server()
    with pytest.raises(CheckpointError, match="did not answer for 1 s"):
        ReplayMemory.load(url, timeout=1)
    reader.waiting.limit_s = math.inf
    asking = threading.Thread(target=reader.numbers, daemon=True)
    asking.start()
    asking.join(2)
    assert asking.is_alive()


def test_finish_waits_while_the_save_makes_progress(unused_endpoint: str, tmp_path: Path) -> None:
    """It cancels a save that makes no progress."""
    with make_memory(30) as memory:
        with pytest.raises(CheckpointError, match=unused_endpoint):
            memory.save("s3://runs/nowhere").finish(timeout=0.5)
        slowly = memory.save(tmp_path, progress=lambda _phase, _nbytes: time.sleep(0.3))
        assert slowly.finish(timeout=SOON_S).number == 1


@pytest.mark.parametrize("seconds", [1, pytest.param(None, marks=pytest.mark.nightly, id="default")])
@pytest.mark.parametrize("end", ["close", "exit"])
def test_a_program_with_a_mistyped_endpoint_ends(unused_endpoint: str, end: str, seconds: float | None) -> None:
    """It ends in time, with an error that names the endpoint, also without a call of `close`."""
    if end == "exit" and seconds is None:
        pytest.skip("the exit has the same default timeout as close()")
    program = f"""
import time, holdall.background as waiting
from tests.crash.test_waiting import make_memory
waiting.CLOSE_S = {seconds} or waiting.CLOSE_S
memory = make_memory(5)
memory.save_every("s3://runs/nowhere", seconds=0.01)
memory.save("s3://runs/nowhere")
print("closes", flush=True)
{f"memory.close({'' if seconds is None else seconds})" if end == "close" else ""}
"""
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "closes"
    _, output = process.communicate(timeout=100)  # Without a limit, the program would never end.
    assert process.returncode == (end == "close")
    assert unused_endpoint in output.strip().splitlines()[-1]
    assert len(output.splitlines()[-1]) < 400


@pytest.mark.parametrize("after", ["stop", pytest.param("kill", marks=pytest.mark.nightly)])
def test_close_ends_if_the_store_vanishes(weed: Weed, url: str, freeze_server: Any, after: str) -> None:
    """The server is killed, or stopped with open connections. The previous checkpoint is unchanged."""
    memory = make_memory(30)
    memory.save(url).result(SOON_S)
    if after == "kill":
        weed.kill()
    else:
        freeze_server()
    try:
        add(memory, 30)
        memory.save(url)
        time.sleep(0.2)
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=weed.environment["AWS_ENDPOINT"]):
            memory.close(timeout=1)
        assert time.monotonic() - began < waiting.CLOSE_S
    finally:
        if after == "kill":
            weed.restart()
        else:
            os.kill(weed.process.pid, signal.SIGCONT)
    with ReplayMemory.load(url) as loaded:
        assert loaded.next_id in {30 * LANES, 31 * LANES}
        require_right(loaded)


def test_a_mirror_that_does_not_answer_delays_no_local_checkpoint(unused_endpoint: str, tmp_path: Path) -> None:
    """Waiting for the copy can be cancelled, and `close` ends it."""
    memory = make_memory(10)
    handle = memory.save(tmp_path, mirror="s3://runs/nowhere")
    handle.result(SOON_S)
    with pytest.raises(TimeoutError, match=r"was not in s3://runs/nowhere after .* Call mirrored\(\) again"):
        handle.mirrored(0.2)
    handle.cancel()
    with pytest.raises(CheckpointError, match="cancelled"):
        handle.mirrored(SOON_S)
    memory.save(tmp_path, mirror="s3://runs/nowhere").result(SOON_S)
    with pytest.raises(CheckpointError, match=unused_endpoint):
        memory.close(timeout=1)
    with ReplayMemory.load(tmp_path) as loaded:
        require_right(loaded)
        loaded.save(tmp_path).result(SOON_S)  # `close` released the lock of the directory.


STAGES = {
    "opening": (ObjectBlobs, "lock"),
    "numbering": (ObjectBlobs, "list"),
    "uploading": (ObjectBlobs, "create"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_can_be_cancelled_at_every_stage(
    weed: Weed, url: str, freeze_server: Any, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops answering when a stage is reached. The next save is whole."""
    owner, name = STAGES[stage]
    original = getattr(owner, name)
    reached = threading.Event()

    def freeze_and_call(*arguments: Any, **options: Any) -> Any:
        if not reached.is_set():
            freeze_server()
            reached.set()
        return original(*arguments, **options)

    memory = make_memory(20)
    if stage != "opening":
        memory.save(url).result(SOON_S)
        add(memory, 20)
    monkeypatch.setattr(owner, name, freeze_and_call)
    handle = memory.save(url)
    assert reached.wait(SOON_S)
    time.sleep(0.1)
    handle.cancel()
    with pytest.raises(CheckpointError, match="cancelled"):
        handle.result(SOON_S)
    os.kill(weed.process.pid, signal.SIGCONT)
    add(memory, memory.next_id // LANES)
    memory.save(url).result(SOON_S)
    memory.close()
    with ReplayMemory.load(url) as loaded:
        assert loaded.next_id == (21 if stage == "opening" else 22) * LANES
        require_right(loaded)


def test_a_local_save_can_be_cancelled_between_two_records(tmp_path: Path) -> None:
    """The next save is whole."""
    written = threading.Event()
    may_continue = threading.Event()

    def hold(_phase: str, _nbytes: int) -> None:
        written.set()
        may_continue.wait(SOON_S)

    with make_memory(30) as memory:
        handle = memory.save(tmp_path, progress=hold)
        assert written.wait(SOON_S)
        handle.cancel()
        may_continue.set()
        with pytest.raises(CheckpointError, match="cancelled"):
            handle.result(SOON_S)
        assert memory.save(tmp_path).result(SOON_S).number == 1
    with ReplayMemory.load(tmp_path) as loaded:
        require_right(loaded)


def test_a_long_wait_causes_a_warning_with_the_endpoint(
    unused_endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "REMIND_S", 0.2)
    memory = make_memory(5)
    with caplog.at_level(logging.WARNING, "holdall"):
        memory.save("s3://runs/nowhere")
        with pytest.raises(CheckpointError):
            memory.close(timeout=2)
    output = [record.message for record in caplog.records if "Still waiting" in record.message]
    assert output
    assert all(unused_endpoint in message for message in output)


@pytest.mark.parametrize("mirror", [False, True])
def test_a_thread_that_cannot_be_started_fails_one_save_only(
    mirror: bool, unused_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory can be saved again."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with make_memory(30) as memory:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                memory.save(tmp_path)
            with pytest.raises(RuntimeError, match="start new thread"):
                memory.save_every(tmp_path, seconds=1)
        assert memory.save(tmp_path).result(SOON_S).number == 1
        if mirror:
            handle = memory.save(tmp_path, mirror="s3://runs/nowhere")
            handle.result(SOON_S)
            handle.cancel()


def test_an_autosave_continues_after_a_thread_could_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again at the time of the next checkpoint."""
    refused = threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "holdall-saver" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with make_memory(30) as memory:
        memory.save_every(tmp_path, seconds=0.01)
        assert refused.wait(SOON_S)
        until = time.monotonic() + SOON_S
        while not list((tmp_path / "manifests").glob("*.json")) and time.monotonic() < until:
            time.sleep(0.05)
    with ReplayMemory.load(tmp_path) as loaded:
        require_right(loaded)


def test_a_program_ends_after_its_last_save_is_complete(tmp_path: Path) -> None:
    """The rule also holds for a child of multiprocessing, as long as the save makes progress."""
    program = f"""
import multiprocessing
from tests.crash.test_waiting import make_memory
def save(folder):
    memory = make_memory(60)
    memory.save(folder, progress=lambda phase, nbytes: __import__("time").sleep(0.02))
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=save, args=({str(tmp_path / "child")!r},))
    child.start()
    child.join()
    save({str(tmp_path / "own")!r})
"""
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=100)
    for name in ("child", "own"):
        with ReplayMemory.load(tmp_path / name) as loaded:
            assert loaded.next_id == 60 * LANES
            require_right(loaded)

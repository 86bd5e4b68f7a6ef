"""Checkpoints in a real S3 server: saves, loads, locks, mirrors, and a server that is killed."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import CheckpointError, FencedError, ReplayMemory
from holdall.checkpoint import open_reader
from holdall.checkpoint.object_blobs import ObjectBlobs
from holdall.dreamer import Replay
from holdall.errors import LockedError

from .nursery import LANES, SPACE, grow, require_right
from .servers import Forgetful, MissingServerError, Weed, run_azurite, run_google_emulator


def make_memory() -> ReplayMemory:
    return ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1)


def test_a_memory_is_saved_and_loaded(url: str) -> None:
    """Saves are incremental, and files that no checkpoint names are removed."""
    with make_memory() as memory:
        for _ in range(5):
            grow(memory, 90)
            memory.save(url, keep=2, attach={"agent": b"weights"}).result()
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == memory.next_id
            require_right(loaded)
            assert loaded.attached["agent"] == b"weights"
            assert loaded.sample(20).ids.tolist() == memory.sample(20).ids.tolist()
            grow(loaded, 5)
            with pytest.raises(LockedError, match=rf"process {os.getpid()} on .* \(another memory of this process\)"):
                loaded.save(url).result()
            memory.close()
            assert loaded.save(url).result().number == 6
    reader = open_reader(url)
    named = {name for number in reader.numbers() for name in reader.manifest(number).files}
    assert set(reader.file_sizes()) == named


def test_the_error_of_a_wrong_key_names_the_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule holds for all requests, also for those without a specific error of obstore."""
    with make_memory() as memory:
        grow(memory, 1)
        memory.save(url).result()
        monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(CheckpointError, match=r"refuses access .* Check the credentials") as refused:
            ReplayMemory.load(url)
        assert refused.value.errno == errno.EACCES
        with pytest.raises(CheckpointError, match=r"refuses access .* Check the credentials"):
            memory.save(f"{url}-other").result()


def test_a_replay_of_dreamer_starts_empty_where_nothing_was_saved(url: str) -> None:
    """An empty folder gives an empty replay, too."""
    with make_memory() as memory:  # The first object creates the bucket.
        grow(memory, 1)
        memory.save(f"{url}-other").result()
    replay = Replay(2, 100, url, save_wait=True)
    replay.load()
    assert len(replay) == 0
    for number in range(8):
        replay.add({"number": np.int64(number), "is_first": number == 0, "is_last": False, "is_terminal": False})
    replay.save()
    loaded = Replay(2, 100, url)
    loaded.load()
    assert len(loaded) == len(replay) > 0


@pytest.mark.nightly
def test_a_memory_is_saved_to_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator supports conditions, as the service does."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(run_azurite(tmp_path, "runs"))
        except MissingServerError as error:
            pytest.skip(f"needs Azurite (npm install azurite): {error}")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        memory = stack.enter_context(make_memory())
        for _ in range(4):
            grow(memory, 60)
            memory.save("az://runs/one", keep=2).result()
        loaded = stack.enter_context(ReplayMemory.load("az://runs/one"))
        assert loaded.next_id == memory.next_id
        require_right(loaded)
        assert open_reader("az://runs/one").numbers() == [4, 3]


@pytest.mark.nightly
def test_a_memory_is_saved_through_googles_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is moto with a translation. It tests what holdall assumes about the service."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(run_google_emulator("runs"))
        except MissingServerError as error:
            pytest.skip(f"needs moto (pip install 'moto[server]'): {error}")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        memory = stack.enter_context(make_memory())
        large = bytes(9 * 2**20)
        for _ in range(3):
            grow(memory, 30)
            memory.save("gs://runs/one", keep=2, attach={"agent": large}).result()
        loaded = stack.enter_context(ReplayMemory.load("gs://runs/one"))
        assert loaded.next_id == memory.next_id
        require_right(loaded)
        assert loaded.attached["agent"] == large
        assert open_reader("gs://runs/one").numbers() == [3, 2]
        for refused in (memory.save("gs://missing/one").result, lambda: ReplayMemory.load("gs://missing/one")):
            with pytest.raises(CheckpointError, match=r"gs://missing/one: there is no bucket") as refusal:
                refused()
            assert "\n" not in str(refusal.value)
            assert "disk" not in str(refusal.value)


def test_a_store_that_ignores_conditions_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One writer can still save to such a store."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    with Forgetful() as server, make_memory() as memory:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        grow(memory, 30)
        with caplog.at_level(logging.WARNING, "holdall"):
            for _ in range(3):
                grow(memory, 5)
                memory.save("s3://runs/forgetful", keep=1).result()
        assert "overwrites existing objects although it was asked not to" in caplog.text
        with ReplayMemory.load("s3://runs/forgetful") as loaded:
            assert loaded.next_id == memory.next_id
            require_right(loaded)
        server.shutdown()


def test_a_lock_that_is_not_renewed_can_be_taken_and_its_owner_is_fenced(url: str) -> None:
    """A process that was stopped for a long time notices the new writer, and commits nothing."""
    frozen = ObjectBlobs(url, lease_s=1.0)
    lease = frozen.lock("a writer that stops")
    lease._renewal.cancel()
    second = ObjectBlobs(url, lease_s=1.0).lock("its successor")
    with pytest.raises(FencedError, match="taken over by its successor"):
        lease.check()
    second.check()
    second.release()


def test_a_lock_that_was_renewed_lately_is_checked_without_a_request(url: str) -> None:
    blobs = ObjectBlobs(url, lease_s=60.0)
    lease = blobs.lock("a writer")
    before = blobs.read_lock()
    lease.check()
    assert blobs.read_lock() == before  # A renewal would have written another version.
    lease.release()


def test_an_expired_lock_is_renewed_if_no_other_writer_took_it(url: str) -> None:
    lease = ObjectBlobs(url, lease_s=0.5).lock("a writer")
    lease._renewal.cancel()
    time.sleep(1.0)
    lease.check()
    lease.release()


def test_a_writer_refuses_to_save_after_another_one_did(url: str) -> None:
    """Another memory had the lock meanwhile, and made a checkpoint."""
    with make_memory() as memory:
        grow(memory, 40)
        memory.save(url).result()
        memory._savers._savers[url].release()
        with ReplayMemory.load(url) as other:
            grow(other, 7)
            other.save(url).result()
        for _ in range(2):
            with pytest.raises(FencedError, match="Another writer made checkpoint 2"):
                memory.save(url).result()
    with ReplayMemory.load(url) as loaded:
        assert loaded.next_id == 47 * LANES
        require_right(loaded)


def test_a_run_that_lost_its_disk_continues_from_its_mirror(url: str, tmp_path: Path) -> None:
    """Checkpoints on the new disk are counted from 1. In the store, their numbers continue."""
    with make_memory() as memory:
        for _ in range(3):
            grow(memory, 20)
            memory.save(tmp_path / "lost", mirror=url).mirrored(timeout=60)
    with ReplayMemory.load(url) as memory:
        grow(memory, 5)
        assert memory.save(tmp_path / "new", mirror=url).mirrored(timeout=60).number == 1
    with ReplayMemory.load(url) as loaded:
        assert loaded.next_id == 65 * LANES
        require_right(loaded)


def test_a_copy_that_was_interrupted_continues(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were copied before are not sent again."""
    create = ObjectBlobs.create
    sent: list[str] = []
    max_files = 2

    def create_until_limit(own: ObjectBlobs, name: str, data: Any) -> bool:
        if not name.startswith("segments/"):
            return create(own, name, data)
        if len(sent) == max_files:
            raise CheckpointError("the connection is lost")
        sent.append(name)
        return create(own, name, data)

    monkeypatch.setattr(ObjectBlobs, "create", create_until_limit)
    with make_memory() as memory:
        grow(memory, 150)
        memory.save(tmp_path).result()
        grow(memory, 150)
        memory.save(tmp_path).result()
        handle = memory.save(tmp_path, mirror=url)
        with pytest.raises(CheckpointError, match="the connection is lost"):
            handle.mirrored(60)
        first = list(sent)
        assert open_reader(url).numbers() == []
        sent.clear()
        max_files = 1000
        memory.save(tmp_path, mirror=url).mirrored(60)
        assert sent
        assert not set(first) & set(sent)
    with ReplayMemory.load(url) as loaded:
        require_right(loaded)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_save_continues_after_the_server_was_killed_and_restarted(url: str, weed: Weed) -> None:
    """There is exactly one new checkpoint afterwards."""
    with make_memory() as memory:
        grow(memory, 60)
        memory.save(url).result()
        weed.kill()
        grow(memory, 60)
        handle = memory.save(url)
        time.sleep(1.5)
        assert not handle.done()
        weed.restart()
        assert handle.result(timeout=120).number == 2
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == memory.next_id
            require_right(loaded)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_save_to_a_dead_server_can_be_cancelled(url: str, weed: Weed) -> None:
    """The memory can still be used."""
    with make_memory() as memory:
        grow(memory, 10)
        memory.save(url).result()
        weed.kill()
        try:
            handle = memory.save(url)
            time.sleep(0.5)
            handle.cancel()
            with pytest.raises(CheckpointError, match="cancelled"):
                handle.result(timeout=100)
            assert len(memory.sample(4)) == 4
        finally:
            weed.restart()


def test_a_local_checkpoint_is_acknowledged_first_and_mirrored_later(url: str, tmp_path: Path) -> None:
    """Both places have the same transitions then."""
    with make_memory() as memory:
        for _ in range(4):
            grow(memory, 70)
            handle = memory.save(tmp_path / "run", keep=2, mirror=url)
            assert handle.result().url == str(tmp_path / "run")
        handle.mirrored(timeout=60)
        for place in (url, tmp_path / "run"):
            with ReplayMemory.load(place) as loaded:
                assert loaded.next_id == memory.next_id
                require_right(loaded)

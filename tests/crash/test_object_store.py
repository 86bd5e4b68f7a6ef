"""Checkpoints in a real S3 server: saved, resumed, fenced, and through the server's death."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

from holdall import CheckpointError, FencedError, ReplayMemory
from holdall.checkpoint.manifest import Manifest, Ref
from holdall.checkpoint.object_store import ObjectStoreWriter
from holdall.checkpoint.objects import Objects
from holdall.checkpoint.retention import commit_unique
from holdall.checkpoint.save import find_next_number

from .nursery import LANES, SPACE, add, require_right
from .servers import Forgetful, MissingServerError, Weed, azurite, google


def new_memory() -> ReplayMemory:
    return ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1)


def grow(memory: ReplayMemory, ticks: int) -> None:
    for _ in range(ticks):
        add(memory, memory.next_id // LANES)


def manifest_of(place: ObjectStoreWriter, number: int, commit: str) -> Manifest:
    file = place.new_file()
    file.write(b"record")
    file.finish()
    ref = Ref(file.name, 0, 6, "0" * 32)
    return Manifest(number, commit, place.writer_id, 0.0, 0, 0, 1, {}, {file.name: 6}, ref)


def test_a_memory_is_saved_and_loaded(url: str) -> None:
    """Incrementally, and with what nothing names removed."""
    with new_memory() as memory:
        for _ in range(5):
            grow(memory, 90)
            memory.save(url, keep=2, attach={"agent": b"weights"}).result()
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == memory.next_id
            require_right(loaded)
            assert loaded.attached["agent"] == b"weights"
            assert loaded.sample(20).ids.tolist() == memory.sample(20).ids.tolist()
            grow(loaded, 5)
            assert loaded.save(url).result().number == 6
    place = ObjectStoreWriter(url)
    reader = place.reader
    named = {name for number in reader.numbers() for name in reader.manifest(number).files}
    assert set(reader.file_sizes()) == named
    assert place.is_fenced


def test_a_memory_is_saved_to_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its emulator keeps to conditions as the service does."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(azurite(tmp_path, "runs"))
        except MissingServerError as error:
            pytest.skip(f"needs Azurite (npm install azurite): {error}")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        memory = stack.enter_context(new_memory())
        for _ in range(4):
            grow(memory, 60)
            memory.save("az://runs/one", keep=2).result()
        loaded = stack.enter_context(ReplayMemory.load("az://runs/one"))
        assert loaded.next_id == memory.next_id
        require_right(loaded)
        place = ObjectStoreWriter("az://runs/one")
        assert place.is_fenced
        assert place.reader.numbers() == [4, 3]
        with pytest.raises(FencedError):
            place.commit(manifest_of(place, 4, "b" * 32))


def test_a_memory_is_saved_through_googles_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """To moto, behind a translation: it tests what is assumed of the service, not the service."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(google("runs"))
        except MissingServerError as error:
            pytest.skip(f"needs moto (pip install 'moto[server]'): {error}")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        memory = stack.enter_context(new_memory())
        large = bytes(9 * 2**20)  # put in parts
        for _ in range(3):
            grow(memory, 30)
            memory.save("gs://runs/one", keep=2, attach={"agent": large}).result()
        loaded = stack.enter_context(ReplayMemory.load("gs://runs/one"))
        assert loaded.next_id == memory.next_id
        require_right(loaded)
        assert loaded.attached["agent"] == large
        place = ObjectStoreWriter("gs://runs/one")
        assert place.is_fenced
        assert place.reader.numbers() == [3, 2]
        with pytest.raises(FencedError):
            place.commit(manifest_of(place, 3, "b" * 32))
        for refused in (memory.save("gs://missing/one").result, lambda: ReplayMemory.load("gs://missing/one")):
            with pytest.raises(CheckpointError, match=r"gs://missing/one (has no bucket|holds no checkpoints)") as told:
                refused()
            assert "\n" not in str(told.value)
            assert "disk" not in str(told.value)


def test_a_store_that_ignores_conditions_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said so, and it can be saved to by one writer all the same."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    with Forgetful() as server, new_memory() as memory:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        grow(memory, 30)
        with caplog.at_level(logging.WARNING, "holdall"):
            for _ in range(3):
                grow(memory, 5)
                memory.save("s3://runs/forgetful", keep=1).result()
        assert "ignores conditions" in caplog.text
        with ReplayMemory.load("s3://runs/forgetful") as loaded:
            assert loaded.next_id == memory.next_id
            require_right(loaded)
        server.shutdown()


@pytest.mark.nightly
def test_of_twelve_writers_one_wins_every_number(url: str) -> None:
    """The others are told."""
    places = [ObjectStoreWriter(url) for _ in range(12)]
    for number in range(1, 6):
        outcomes: list[str] = []
        gate = threading.Barrier(len(places))

        def commit(place: ObjectStoreWriter, number: int = number, outcomes: Any = outcomes, gate: Any = gate) -> None:
            manifest = manifest_of(place, number, place.writer_id * 2)
            gate.wait()
            try:
                place.commit(manifest)
                outcomes.append(place.writer_id)
            except FencedError:
                outcomes.append("")

        threads = [threading.Thread(target=commit, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [epoch for epoch in outcomes if epoch]
        assert len(outcomes) == 12
        assert len(winners) == 1
        assert places[0].reader.manifest(number).writer_id == winners[0]


def test_a_cancelled_save_that_completes_late_does_not_fence_its_own_writer(url: str) -> None:
    """The store completes the last request of a cancelled save after the next save chose the same number."""
    place = ObjectStoreWriter(url)
    other = ObjectStoreWriter(url)

    def find_number() -> int:
        return find_next_number(place.reader, place.reader.numbers(), 0, place.writer_id)

    late = manifest_of(place, find_number(), "a" * 32)
    following = manifest_of(place, find_number(), "b" * 32)
    place.commit(late)
    assert commit_unique(place, following, find_number).number == 2
    assert place.reader.numbers() == [2, 1]
    assert place.reader.manifest(2).commit == "b" * 32

    late = manifest_of(other, 3, "c" * 32)
    following = manifest_of(place, find_number(), "d" * 32)
    other.commit(late)
    with pytest.raises(FencedError):
        commit_unique(place, following, find_number)


def test_a_writer_that_was_overtaken_stops(url: str) -> None:
    """It is told at its next save, however long ago the other one came; nothing of the other's is lost."""
    with new_memory() as memory:
        grow(memory, 40)
        memory.save(url).result()
        with ReplayMemory.load(url) as other:
            grow(other, 7)
            other.save(url).result()
            for _ in range(2):
                with pytest.raises(FencedError, match="Another writer made checkpoint 2"):
                    memory.save(url).result()
            grow(other, 60)
            assert other.save(url, keep=1).result().number == 3
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == 107 * LANES
            require_right(loaded)


def test_collecting_spares_what_another_writer_is_about_to_name(url: str) -> None:
    """And takes what one left that can commit no more."""
    first, second = ObjectStoreWriter(url), ObjectStoreWriter(url)
    first.commit(manifest_of(first, 1, "a" * 32))
    late = manifest_of(second, 2, "b" * 32)  # uploaded after the first one's commit, before it collects
    first.collect(1, ())
    second.commit(late)
    assert set(late.files) <= set(second.reader.file_sizes())
    stale = manifest_of(first, 3, "c" * 32)
    second.commit(manifest_of(second, 3, "d" * 32))
    second.collect(1, ())
    assert not set(stale.files) & set(second.reader.file_sizes())
    with pytest.raises(FencedError):
        first.commit(stale)


def test_a_run_that_lost_its_disk_goes_on_in_its_mirror(url: str, tmp_path: Path) -> None:
    """Checkpoints on the new disk are counted from 1; in the store they follow those that were there."""
    with new_memory() as memory:
        for _ in range(3):
            grow(memory, 20)
            memory.save(tmp_path / "lost", mirror=url).mirrored(timeout=60)
    with ReplayMemory.load(url) as memory:
        grow(memory, 5)
        assert memory.save(tmp_path / "new", mirror=url).mirrored(timeout=60).number == 1
    with ReplayMemory.load(url) as loaded:
        assert loaded.next_id == 65 * LANES
        require_right(loaded)


def test_a_copy_that_was_interrupted_goes_on_where_it_was(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that arrived are not sent again, by this process or another."""
    upload = ObjectStoreWriter.upload
    sent: list[str] = []
    most = 2

    def interrupted(own: ObjectStoreWriter, name: str, path: Path) -> None:
        if len(sent) == most:
            raise CheckpointError("the line is dead")
        upload(own, name, path)
        sent.append(name)

    monkeypatch.setattr(ObjectStoreWriter, "upload", interrupted)
    with new_memory() as memory:
        grow(memory, 150)
        memory.save(tmp_path).result()
        grow(memory, 150)
        memory.save(tmp_path).result()
        handle = memory.save(tmp_path, mirror=url)
        with pytest.raises(CheckpointError, match="the line is dead"):
            handle.mirrored(60)
        first = list(sent)
        assert len(first) == 2
        assert ObjectStoreWriter(url).reader.numbers() == []
    with ReplayMemory.load(tmp_path) as memory:
        sent.clear()
        most = 1000
        memory.save(tmp_path, mirror=url).mirrored(60)
        assert sent
        assert not set(first) & set(sent)
    with ReplayMemory.load(url) as loaded:
        require_right(loaded)


def test_an_answer_that_was_lost_is_found_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest stands, the client was told otherwise: it reads it back and knows it for its own."""
    place = ObjectStoreWriter(url)
    create = Objects.create
    monkeypatch.setattr(Objects, "create", lambda own, key, content: create(own, key, content) and False)
    place.commit(manifest_of(place, 1, "a" * 32))
    monkeypatch.undo()
    assert place.reader.numbers() == [1]
    with pytest.raises(FencedError):
        place.commit(manifest_of(place, 1, "b" * 32))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_save_outlasts_the_servers_death(url: str, weed: Weed) -> None:
    """Killed in the middle, started again: the checkpoint is there, once."""
    with new_memory() as memory:
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
def test_waiting_for_a_dead_server_can_be_given_up(url: str, weed: Weed) -> None:
    """The memory goes on."""
    with new_memory() as memory:
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
    """Both places hold the same then."""
    with new_memory() as memory:
        for _ in range(4):
            grow(memory, 70)
            handle = memory.save(tmp_path / "run", keep=2, mirror=url)
            assert handle.result().url == str(tmp_path / "run")
        handle.mirrored(timeout=60)
        for place in (url, tmp_path / "run"):
            with ReplayMemory.load(place) as loaded:
                assert loaded.next_id == memory.next_id
                require_right(loaded)

"""Loading from an object store: batches are read on demand, and are right."""

from __future__ import annotations

import multiprocessing
import operator
import os
import secrets
import signal
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import CheckpointError, ClosedError, Dataset, ReplayMemory
from holdall.checkpoint import fetch, open_blobs, open_reader
from holdall.checkpoint.data_file import PAGE_BYTES, RemoteFile
from holdall.checkpoint.object_blobs import ObjectBlobs
from holdall.store.tuning import Tuning
from holdall.testing import assert_same_bits

from .nursery import LANES, SPACE, add, require_right
from .servers import Weed

TICKS = 1_200
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def saved(weed: Weed) -> str:
    """Return the URL of a checkpoint with many blocks of several pages."""
    url = f"s3://runs/{secrets.token_hex(4)}"
    tuning = Tuning(block_bytes=8 * PAGE_BYTES)
    with ReplayMemory(SPACE, spaces.Discrete(5), TICKS * LANES, LANES, budget=None, seed=1, _tuning=tuning) as memory:
        for tick in range(TICKS):
            add(memory, tick)
        memory.save(url, attach={"agent": b"weights" * 10_000}).result()
    return url


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list, to which the size of every fetched range is appended."""
    sizes: list[int] = []
    read = ObjectBlobs.read

    def count_and_read(own: ObjectBlobs, name: str, start: int, length: int) -> bytes:
        if name.startswith("segments/"):
            sizes.append(length)
        return read(own, name, start, length)

    monkeypatch.setattr(ObjectBlobs, "read", count_and_read)
    return sizes


@pytest.fixture
def no_background_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off fetching in the background."""
    monkeypatch.setattr(fetch, "fetch_blocks", lambda *_: None)


@pytest.mark.usefixtures("no_background_fetch")
def test_a_batch_is_drawn_before_everything_was_fetched(saved: str, fetched: list[int], tmp_path: Path) -> None:
    """Only the pages with its slices are fetched."""
    total = sum(open_reader(saved).file_sizes().values())
    with ReplayMemory.load(saved, spill_dir=tmp_path / "spill") as memory:
        at_load = sum(fetched)
        ids = np.arange(200, 220)
        require_right(memory, ids)
        assert sum(fetched) < total / 2
        assert sum(fetched) - at_load < 40 * PAGE_BYTES
        count = len(fetched)
        require_right(memory, ids)
        assert len(fetched) == count, "fetched pages are not fetched again"
        assert memory.attached["agent"] == b"weights" * 10_000
        require_right(memory)
        assert sum(fetched) <= total + 2 * PAGE_BYTES * len(fetched)


def test_all_other_pages_are_fetched_in_the_background(saved: str, fetched: list[int]) -> None:
    """After that, no request is sent to the store."""
    with ReplayMemory.load(saved) as memory:
        until = time.monotonic() + PATIENCE_S
        while memory.host_store.before_read is not None and time.monotonic() < until:
            time.sleep(0.01)
        count = len(fetched)
        require_right(memory)
        assert len(fetched) == count
        assert memory.host_store.before_read is None


@pytest.mark.usefixtures("no_background_fetch")
def test_a_memory_loaded_from_a_store_is_saved_elsewhere(saved: str, tmp_path: Path) -> None:
    """The copy also has the transitions that were not fetched before."""
    with ReplayMemory.load(saved) as memory:
        memory.save(tmp_path / "run").result()
    with ReplayMemory.load(tmp_path / "run") as loaded:
        assert loaded.next_id == TICKS * LANES
        require_right(loaded)


@pytest.mark.usefixtures("no_background_fetch")
def test_a_file_that_another_writer_removed_is_not_reported_as_damage(saved: str, url: str) -> None:
    """The error is not about damage, and no row is returned."""
    with ReplayMemory.load(saved) as memory:
        memory.save(url).result()
    with ReplayMemory.load(url) as memory:
        blobs = open_blobs(url)
        for name, _ in blobs.list("segments/"):
            blobs.delete(name)
        with pytest.raises(CheckpointError, match="does not exist"):
            require_right(memory)


@pytest.mark.usefixtures("no_background_fetch")
def test_close_ends_a_wait_for_a_store_that_does_not_answer(saved: str, weed: Weed) -> None:
    """The waiting thread gets an error."""
    memory = ReplayMemory.load(saved)
    errors: list[str] = []

    def gather() -> None:
        try:
            memory.gather(np.arange(memory.first_id, memory.next_id))
        except CheckpointError as error:
            errors.append(str(error))

    os.kill(weed.process.pid, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=gather)
        thread.start()
        time.sleep(0.5)
        memory.close()
        thread.join(30)
    finally:
        os.kill(weed.process.pid, signal.SIGCONT)
    assert errors
    assert "the memory was closed" in errors[0]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_background_fetch")
def test_a_batch_waits_for_a_server_that_was_killed(saved: str, weed: Weed) -> None:
    """The batch is right once the server runs again."""
    with ReplayMemory.load(saved) as memory:
        weed.kill()
        results: list[str] = []

        def gather() -> None:
            require_right(memory)
            results.append("right")

        thread = threading.Thread(target=gather)
        thread.start()
        try:
            thread.join(2)
            assert thread.is_alive()
        finally:
            weed.restart()
        thread.join(120)
        assert results == ["right"]


def test_pages_are_fetched_once(tmp_path: Path) -> None:
    """Ranges may overlap, touch, be empty, and end after the file."""
    content = np.random.default_rng(0).bytes(5 * PAGE_BYTES + 17)
    blobs = open_blobs(tmp_path / "run")
    blobs.create("one", content)
    reads: list[tuple[int, int]] = []
    read = blobs.read

    def count_and_read(name: str, start: int, length: int) -> bytes:
        reads.append((start, length))
        return read(name, start, length)

    blobs.read = count_and_read  # type: ignore[method-assign]
    with (tmp_path / "copy").open("w+b", buffering=0) as raw:
        file = RemoteFile(blobs, "one", len(content), os.dup(raw.fileno()))
    page = PAGE_BYTES
    file.fetch(np.array([10, page - 1, 3 * page]), np.array([20, page + 1, 3 * page]))
    assert reads == [(0, 2 * page)]
    assert file.read(5 * page, 100) == content[5 * page :]
    assert reads[1:] == [(5 * page, 17)]
    assert file.read(0, len(content) + 5) == content
    assert reads[2:] == [(2 * page, 3 * page)]


def test_a_dataset_reads_on_demand_and_shares_fetched_pages(saved: str, fetched: list[int], tmp_path: Path) -> None:
    """A spawned process reads the same rows, and the main process finds the pages that the child fetched."""
    total = sum(open_reader(saved).file_sizes().values())
    near = list(range(200, 220))
    far = list(range(1_500, 1_520))
    with Dataset.open(saved, cache_dir=tmp_path / "cache") as dataset:
        rows = dataset[near]
        assert sum(fetched) < total / 2
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            of_child = pool.submit(operator.itemgetter(far), dataset).result(60)
            again = pool.submit(operator.itemgetter(near), dataset).result(60)
        count = len(fetched)
        assert_same_bits(dataset[far], of_child)
        assert_same_bits(again, rows)
        assert len(fetched) == count, "these pages were fetched by the child"
        with ReplayMemory.load(saved, spill_dir=tmp_path / "spill") as memory:
            expected = memory.gather(far)
        assert_same_bits(dataset.gather(far), expected)
        with dataset.to_memory(len(dataset)) as online:
            assert_same_bits(online.gather(far).obs, expected.obs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_must_open_a_remote_dataset_itself(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Dataset.open(saved) as dataset:
        assert list(tmp_path.glob("holdall-dataset-*"))
        context = multiprocessing.get_context("fork")
        answers = context.Queue()

        def read() -> None:
            try:
                dataset[0]
            except ClosedError as error:
                answers.put(str(error))

        child = context.Process(target=read)
        child.start()
        assert "multiprocessing_context='forkserver'" in answers.get(timeout=60)
        child.join()
    assert not list(tmp_path.glob("holdall-dataset-*"))

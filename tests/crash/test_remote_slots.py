"""Journals of shards in a real S3 server: every slot is written once, and killed and overtaken shards lose nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdall.checkpoint.blobs import open_blobs
from holdall.cluster.journal import Entry, Journal, list_journals, open_journal
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import CheckpointError, FencedError

from .servers import Forgetful, Weed

ANN = b"a" * 16
BEN = b"b" * 16


def make_entry(writer: bytes, sequence: int) -> Entry:
    return Entry(writer, sequence, bytes([sequence % 256]) * 100)


def open_and_read(url: str) -> tuple[Journal, list[Entry]]:
    journal = open_journal(url, 0, ClusterTuning())
    return journal, [entry for page in journal.open() for entry in page.entries]


def test_an_overtaken_shard_is_refused_and_all_other_entries_are_read_again(url: str) -> None:
    zombie, found = open_and_read(url)
    assert (found, zombie.epoch) == ([], 0)
    zombie.append([make_entry(ANN, 0), make_entry(BEN, 0)], 0)
    owner, found = open_and_read(url)
    assert found == [make_entry(ANN, 0), make_entry(BEN, 0)]
    for _ in range(2):
        with pytest.raises(FencedError, match="another shard has opened"):
            zombie.append([make_entry(ANN, 1)], 2)
    for number in range(1, 80):
        owner.append([make_entry(ANN, number)], 1 + number)
        owner.trim(1 + number)
    with pytest.raises(FencedError):
        zombie.append([make_entry(ANN, 1)], 2)
    again, found = open_and_read(url)
    assert again.expected == {ANN: 80, BEN: 1}
    assert found[-1] == make_entry(ANN, 79)
    assert len(list(open_blobs(url).list("journal/00000/"))) < 60


def test_list_journals_finds_the_journals_of_all_shards(url: str) -> None:
    assert list_journals(url) == []
    for shard in (0, 2, 11):
        list(open_journal(url, shard, ClusterTuning()).open())
    assert list_journals(url) == [0, 2, 11]


def test_a_store_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    server = Forgetful()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(CheckpointError, match="conditional puts"):
            open_and_read("s3://runs/one")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_killed_and_overtaken_shards_neither_lose_nor_repeat_steps(weed: Weed, url: str) -> None:
    pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")
    script = Path(__file__).with_name("journals_over_a_store.py")
    environment = os.environ | weed.environment | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, script, url], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["held"] == list(range(results["acknowledged"]))
    assert results["again"] == results["held"]
    assert results["kills"] == 3
    assert "another shard has opened" in results["zombie"]
    assert results["epochs"] == sorted(set(results["epochs"]))

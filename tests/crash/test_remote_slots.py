"""Journals of shards in a real S3 server: numbers are given once, a zombie is refused, and kill -9 loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdall.checkpoint import Slots
from holdall.cluster.journal import Entry, Journal, list_journals, open_journal
from holdall.cluster.tuning import ClusterTuning
from holdall.errors import CheckpointError, FencedError

from .servers import Forgetful, Weed

ANN, BEN = b"a" * 16, b"b" * 16


def entry(writer: bytes, sequence: int) -> Entry:
    return Entry(writer, sequence, bytes([sequence % 256]) * 100)


def opened(url: str) -> tuple[Journal, list[Entry]]:
    journal = Journal(Slots.at(url), ClusterTuning())
    return journal, [entry for page in journal.open() for entry in page.entries]


def test_of_many_that_create_a_slot_at_once_one_succeeds(url: str) -> None:
    won: list[int] = []

    def create(who: int) -> None:
        if Slots.at(url).create(7, bytes([who])):
            won.append(who)

    Slots.at(url).create(6, b"")  # a store takes seconds over its very first objects if they come all at once
    threads = [threading.Thread(target=create, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots = Slots.at(url)
    assert len(won) == 1
    assert slots.read(7) == bytes(won)
    assert slots.create(7, bytes(won))  # its answer was lost, and it is made again
    assert slots.numbers() == [6, 7]


def test_a_zombie_is_refused_and_all_else_is_found_again(url: str) -> None:
    zombie, found = opened(url)
    assert (found, zombie.epoch) == ([], 0)
    zombie.append([entry(ANN, 0), entry(BEN, 0)], 0)
    owner, found = opened(url)
    assert found == [entry(ANN, 0), entry(BEN, 0)]
    for _ in range(2):
        with pytest.raises(FencedError, match="another shard has opened"):
            zombie.append([entry(ANN, 1)], 2)
    for number in range(1, 80):
        owner.append([entry(ANN, number)], 1 + number)
        owner.trim(1 + number)
    with pytest.raises(FencedError):
        zombie.append([entry(ANN, 1)], 2)
    again, found = opened(url)
    assert again.expected == {ANN: 80, BEN: 1}
    assert found[-1] == entry(ANN, 79)
    assert len(Slots.at(url).numbers()) < 60


def test_a_slot_that_is_gone_is_none(url: str) -> None:
    slots = Slots.at(url)
    slots.create(3, b"three")
    slots.delete([3, 4])
    assert slots.read(3) is None
    assert slots.numbers() == []


def test_journals_are_found(url: str) -> None:
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
            opened("s3://runs/one")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_kill_9_and_a_zombie_over_a_store_lose_and_double_nothing(weed: Weed, url: str) -> None:
    pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")
    script = Path(__file__).with_name("journals_over_a_store.py")
    environment = os.environ | weed.environment | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, script, url], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["held"] == list(range(told["acknowledged"]))
    assert told["again"] == told["held"]
    assert told["kills"] == 3
    assert "another shard has opened" in told["zombie"]
    assert told["epochs"] == sorted(set(told["epochs"]))

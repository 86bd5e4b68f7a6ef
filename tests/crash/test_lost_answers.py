"""Answers that are lost, cut or late: the client reads the result back, and nothing is done twice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.checkpoint import open_blobs, open_reader

from .nursery import LANES, SPACE, add, require_right
from .proxy import HARMS, Proxy, proxy
from .servers import Weed

LARGE = bytes(9 * 2**20)
MOST_CALLS = 200


@pytest.fixture
def harming(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy(weed.environment["AWS_ENDPOINT"]) as server:
        monkeypatch.setenv("AWS_ENDPOINT", server.url)
        yield server


def grow(memory: ReplayMemory, ticks: int) -> None:
    for _ in range(ticks):
        add(memory, memory.next_id // LANES)


def require_whole(url: str, number: int, next_id: int) -> None:
    """The newest checkpoint has this number and is right, and every file is named by a checkpoint."""
    reader = open_reader(url)
    assert reader.numbers()[0] == number
    named = {name for each in reader.numbers() for name in reader.manifest(each).files}
    assert set(reader.file_sizes()) == named
    with ReplayMemory.load(url) as loaded:
        assert loaded.next_id == next_id
        require_right(loaded)


def lost_in_saves(server: Proxy, harm: str, every: int) -> list[str]:
    """Save again and again, and harm the answer to another call each time. Return what was harmed."""
    url = f"s3://runs/{secrets.token_hex(4)}"
    harmed = []
    with ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1) as memory:
        for _ in range(2):
            memory.save(url, keep=2, attach={"agent": LARGE}).result(60)
        for saves, at in enumerate(range(0, MOST_CALLS, every), start=3):
            grow(memory, 11)
            server.arm(harm, at)
            checkpoint = memory.save(url, keep=2, attach={"agent": LARGE}).result(60)
            what = server.harmed
            server.disarm()
            assert checkpoint.number == saves
            require_whole(url, saves, memory.next_id)
            if not what:
                break
            harmed.append(what)
    return harmed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", [HARMS[0], *(pytest.param(harm, marks=pytest.mark.nightly) for harm in HARMS[1:])])
@pytest.mark.parametrize("every", [pytest.param(3, id="some"), pytest.param(1, id="all", marks=pytest.mark.nightly)])
def test_a_save_survives_every_answer_that_is_lost(harming: Proxy, harm: str, every: int) -> None:
    """One at a time, each of them in its turn: of puts, of the manifest, of lists, of deletions."""
    harmed = lost_in_saves(harming, harm, every)
    assert sum(what.startswith("PUT") for what in harmed) >= (1 if every > 1 else 4)


KINDS = {
    "the manifest": "PUT .*/manifests/",
    "a file": "PUT .*/segments/[^?]*$",
    "the lock": "PUT .*/LOCK",
    "objects are listed": "GET .*list-type",
    "a manifest is read": "GET .*/manifests/[^?]*$",
    "an object is removed": "(POST .*[?]delete|DELETE)",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if name == "the manifest" else pytest.mark.nightly, id=name)
        for name, kind in KINDS.items()
    ],
)
def test_a_request_whose_answer_is_lost_is_done_once(harming: Proxy, harm: str, kind: str) -> None:
    """Every kind of request, the conditional put of the manifest first of all."""
    url = f"s3://runs/{secrets.token_hex(4)}"
    with ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1) as memory:
        for number in range(1, 4):
            grow(memory, 11)
            if number == (1 if kind == KINDS["the lock"] else 3):  # The first save takes the lock.
                harming.arm(harm, 0, kind)
            assert memory.save(url, keep=2, attach={"agent": LARGE}).result(60).number == number
        assert harming.harmed
        harming.disarm()
        require_whole(url, 3, memory.next_id)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", [HARMS[0], *(pytest.param(harm, marks=pytest.mark.nightly) for harm in HARMS[1:])])
def test_a_place_is_opened_through_every_answer_that_is_lost(harming: Proxy, harm: str) -> None:
    """What it is, and whether the store keeps to conditions, is found out all the same."""
    for at in range(MOST_CALLS):
        harming.arm(harm, at)
        lease = open_blobs(f"s3://runs/{secrets.token_hex(4)}").lock("a writer")
        lease.check()
        lease.release()
        if not harming.harmed:
            break
    assert at >= 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", [HARMS[1], *(pytest.param(h, marks=pytest.mark.nightly) for h in ("swallow", "fail"))])
def test_a_load_survives_every_answer_that_is_lost(harming: Proxy, harm: str) -> None:
    """Pages that came in part are asked for again."""
    url = f"s3://runs/{secrets.token_hex(4)}"
    with ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1) as memory:
        grow(memory, 150)
        memory.save(url).result(60)
    for at in range(MOST_CALLS):
        harming.arm(harm, at)
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == 150 * LANES
            require_right(loaded)
        if not harming.harmed:
            break
    assert at >= 5

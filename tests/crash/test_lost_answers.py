"""Answers of a server are lost, cut or late. The client checks the result, and no request is executed twice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.checkpoint import open_blobs, open_reader

from .nursery import LANES, SPACE, grow, require_right
from .proxy import HARMS, Proxy, run_proxy
from .servers import Weed

LARGE = bytes(9 * 2**20)
MAX_CALLS = 200


@pytest.fixture
def proxy(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with run_proxy(weed.environment["AWS_ENDPOINT"]) as server:
        monkeypatch.setenv("AWS_ENDPOINT", server.url)
        yield server


def require_whole(url: str, number: int, next_id: int) -> None:
    """Require that the newest checkpoint has this number and is right, and that a checkpoint names every file."""
    reader = open_reader(url)
    assert reader.numbers()[0] == number
    named = {name for each in reader.numbers() for name in reader.manifest(each).files}
    assert set(reader.file_sizes()) == named
    with ReplayMemory.load(url) as loaded:
        assert loaded.next_id == next_id
        require_right(loaded)


def save_with_lost_answers(server: Proxy, harm: str, every: int) -> list[str]:
    """Save repeatedly, and damage the answer to another call each time. Return the requests with damaged answers."""
    url = f"s3://runs/{secrets.token_hex(4)}"
    harmed = []
    with ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1) as memory:
        for _ in range(2):
            memory.save(url, keep=2, attach={"agent": LARGE}).result(60)
        for saves, at in enumerate(range(0, MAX_CALLS, every), start=3):
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
def test_a_save_succeeds_whichever_answer_is_lost(proxy: Proxy, harm: str, every: int) -> None:
    """The answers to puts, lists and deletions are damaged in turn."""
    harmed = save_with_lost_answers(proxy, harm, every)
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
def test_a_request_whose_answer_is_lost_is_executed_once(proxy: Proxy, harm: str, kind: str) -> None:
    """The rule holds for every kind of request. The conditional put of the manifest matters most."""
    url = f"s3://runs/{secrets.token_hex(4)}"
    with ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1) as memory:
        for number in range(1, 4):
            grow(memory, 11)
            if number == (1 if kind == KINDS["the lock"] else 3):  # The first save takes the lock.
                proxy.arm(harm, 0, kind)
            assert memory.save(url, keep=2, attach={"agent": LARGE}).result(60).number == number
        assert proxy.harmed
        proxy.disarm()
        require_whole(url, 3, memory.next_id)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", [HARMS[0], *(pytest.param(harm, marks=pytest.mark.nightly) for harm in HARMS[1:])])
def test_a_place_is_opened_whichever_answer_is_lost(proxy: Proxy, harm: str) -> None:
    """Opening a place checks what is there, and whether the store supports conditions."""
    for at in range(MAX_CALLS):
        proxy.arm(harm, at)
        lease = open_blobs(f"s3://runs/{secrets.token_hex(4)}").lock("a writer")
        lease.check()
        lease.release()
        if not proxy.harmed:
            break
    assert at >= 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", [HARMS[1], *(pytest.param(h, marks=pytest.mark.nightly) for h in ("swallow", "fail"))])
def test_a_load_succeeds_whichever_answer_is_lost(proxy: Proxy, harm: str) -> None:
    """Pages that were cut are requested again."""
    url = f"s3://runs/{secrets.token_hex(4)}"
    with ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1) as memory:
        grow(memory, 150)
        memory.save(url).result(60)
    for at in range(MAX_CALLS):
        proxy.arm(harm, at)
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == 150 * LANES
            require_right(loaded)
        if not proxy.harmed:
            break
    assert at >= 5

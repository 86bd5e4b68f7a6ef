"""Snapshots: rows are those of their moment, whatever is written over them before they are read."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.storage import snapshot
from holdall.storage.snapshot import (
    FrozenRows,
    RowChunk,
    chunk_ticks_of,
    is_settled,
    put_rows,
    rows_of,
)
from holdall.storage.store import Store

LANES = 2


def filled(capacity_ticks: int, ticks: int, obs_shape: tuple[int, ...] = (3,)) -> ReplayMemory:
    box = spaces.Box(-np.inf, np.inf, obs_shape, np.float32)
    memory = ReplayMemory(box, spaces.Discrete(5), capacity_ticks * LANES, LANES)
    add(memory, 0, ticks)
    return memory


def add(memory: ReplayMemory, first: int, ticks: int) -> None:
    shape = memory.schema.observation.leaves[0].shape
    for tick in range(first, first + ticks):
        obs = np.full((LANES, *shape), tick, np.float32)
        ended = np.array([tick % 5 == 0, False])
        following = np.where(ended.reshape(LANES, *[1] * len(shape)), -obs, obs + 1).astype(np.float32)
        action = np.full(LANES, tick, np.int64)
        memory.add(obs, action, np.full(LANES, tick, np.float64), following, ended, ~ended & (tick % 7 == 0))


def store_of(memory: ReplayMemory) -> Store:
    return memory._open()


def taken(rows: FrozenRows) -> list[RowChunk]:
    return [rows.take(number) for number in rows.wanted]


def joined(chunks: list[RowChunk], name: str) -> NDArray[Any]:
    return np.concatenate([chunk.columns[name] for chunk in chunks])


@pytest.mark.parametrize("later", [0, 1, 10, 150, 700])
def test_rows_are_those_of_the_moment_however_many_ticks_come_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """A ring that goes round several times in between leaves nothing of the old rows in place."""
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 800)
    with filled(capacity_ticks=200, ticks=330) as memory:
        store = store_of(memory)
        frozen = store.freeze({})
        assert frozen.rows.is_pending
        add(memory, 330, later)
        chunks = taken(frozen.rows)
        store.release(frozen.rows)
        assert joined(chunks, "reward.0")[:, 0].tolist() == list(range(130, 330))
        assert joined(chunks, "obs.0")[:, 0, 0].tolist() == list(range(130, 330))
        apart = np.concatenate([chunk.apart["obs.0"][0] for chunk in chunks])
        assert apart.tolist() == [tick * LANES for tick in range(130, 329) if tick % 5 == 0]


def test_flags_that_are_set_anew_do_not_reach_a_snapshot_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk is copied before its flags change; and the next snapshot knows that it changed."""
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 800)
    with filled(capacity_ticks=200, ticks=200) as memory:
        store = store_of(memory)
        frozen = store.freeze({})
        before = memory.gather(np.arange(400)).terminated.reshape(200, LANES)
        memory.set_flags(np.arange(40), np.ones(40, np.bool_), np.zeros(40, np.bool_))
        chunks = taken(frozen.rows)
        store.release(frozen.rows)
        assert (joined(chunks, "terminated.0") == before).all()
        saved = {number: (0, tuple(chunks[0].columns)) for number in range(1000)}
        again = store.freeze(saved)
        changed = {tick // again.rows.chunk_ticks for tick in range(20)}
        settled = {n for n in again.rows.wanted if is_settled(n, again.rows.chunk_ticks, 200)}
        assert settled == changed
        store.release(again.rows)


def test_chunks_that_were_saved_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is new, or not yet settled, is copied."""
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 800)
    with filled(capacity_ticks=500, ticks=300) as memory:
        store = store_of(memory)
        first = store.freeze({})
        columns = tuple(first.rows.take(0).columns)
        store.release(first.rows)
        second = store.freeze(dict.fromkeys(first.rows.wanted, (0, columns)))
        store.release(second.rows)
        assert second.rows.wanted
        assert not any(is_settled(n, second.rows.chunk_ticks, 300) for n in second.rows.wanted)
        other_columns = store.freeze(dict.fromkeys(first.rows.wanted, (0, ("reward.0",))))
        store.release(other_columns.rows)
        assert other_columns.rows.wanted == first.rows.wanted


def test_the_short_way_of_adding_comes_back_when_the_rows_were_read() -> None:
    """It does not look after rows that it writes over, so it rests meanwhile."""
    with filled(capacity_ticks=40_000, ticks=30_000) as memory:
        store = store_of(memory)
        offered = [store.fast_tick.is_open]
        frozen = store.freeze({})
        offered.append(store.fast_tick.is_open)
        add(memory, 30_000, 2)
        offered.append(store.fast_tick.is_open)
        store.release(frozen.rows)
        add(memory, 30_002, 2)
        assert [*offered, store.fast_tick.is_open] == [True, False, False, True]


def test_slices_of_an_open_block_are_those_of_the_moment() -> None:
    """The block goes on growing, behind what was numbered by then."""
    with filled(capacity_ticks=100, ticks=20, obs_shape=(60, 40)) as memory:
        frozen = store_of(memory).freeze({})
        (filling,) = frozen.filling
        before = filling.slices.copy()
        add(memory, 20, 60)
        assert (filling.slices == before).all()
        assert (frozen.next_tick, frozen.segments[-1].ticks, frozen.open_tick) == (20, 4, 16)


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 4), (3, 7), (5, 10), (7, 12), (13, 15), (8, 13)])
def test_rows_are_cut_out_of_a_ring_across_its_end(first: int, end: int) -> None:
    """Row t stands at t modulo the ring's length."""
    ring = np.zeros((5, 1), np.int64)
    for tick in range(first, min(end, first + 5)):
        ring[tick % 5] = tick
    if end - first <= 5:
        assert rows_of(ring, first, end)[:, 0].tolist() == list(range(first, end))
        other = np.zeros_like(ring)
        put_rows(other, first, rows_of(ring, first, end))
        assert (other == ring).all()


@pytest.mark.parametrize(("tick_bytes", "ticks"), [(1, 2**16), (95, 4096), (2**19, 1), (2**19 + 1, 1), (0, 2**16)])
def test_chunks_have_a_power_of_two_ticks(tick_bytes: int, ticks: int) -> None:
    """So that the chunks of two saves are the same."""
    assert chunk_ticks_of(tick_bytes) == ticks


def test_rows_are_copied_without_letting_go_of_pythons_lock() -> None:
    """To get it back may take a turn of another thread, and a save's pause would be that long."""
    ring, turns, is_over = np.ones((2**20, 8)), 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.is_set():
            turns += 1
            time.sleep(0.001)

    other, interval = threading.Thread(target=take_turns), sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to let go of it
    other.start()
    try:
        while not turns:
            time.sleep(0.001)
        before = turns
        rows = rows_of(ring, 2**20 - 5, 2**21 - 6)
        assert turns == before
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        other.join()
    assert rows.shape == (2**20 - 1, 8)
    assert rows.all()


def test_adding_and_taking_from_two_threads_keeps_rows_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the memory's lock each of them sees what the other left."""
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 800)
    with filled(capacity_ticks=300, ticks=600) as memory:
        store = store_of(memory)
        with memory._lock:
            frozen = store.freeze({})
        adding = threading.Thread(target=add, args=(memory, 600, 900))
        adding.start()
        chunks = []
        for number in frozen.rows.wanted:
            with memory._lock:
                chunks.append(frozen.rows.take(number))
        adding.join()
        assert joined(chunks, "action.0")[:, 1].tolist() == list(range(300, 600))

"""Flat rings: each observation once, what differs apart, and two rings where nothing is shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.native import chosen_kernels
from holdall.schema import Leaf
from holdall.storage import rings as ring
from holdall.storage.repair import Repair
from holdall.storage.rings import ObservationRing
from holdall.storage.snapshot import Apart, KeptApart
from holdall.storage.ticks import NOT_CONTINUED
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits
from holdall.testing.strategies import box

SCALAR = Leaf("", (), np.dtype("i8"))
VECTOR = Leaf("", (3,), np.dtype("f4"))


def compare_over(stream: Stream, capacity_ticks: int, ticks: int) -> ReplayMemory:
    """Add ticks to a memory and the oracle; everything held is compared after each."""
    capacity = capacity_ticks * stream.num_envs
    memory = ReplayMemory(stream.observation_space, stream.action_space, capacity, stream.num_envs)
    oracle = OracleMemory(capacity, stream.num_envs)
    for _ in range(ticks):
        given = stream.tick().arguments()
        memory.add(**given)
        oracle.add(**given)
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))
    return memory


def vectors(mishaps: Mishaps, lanes: int = 2) -> Stream:
    return Stream(box((3,), "f4"), spaces.Discrete(3), lanes, plans=[LeafPlan()], mishaps=mishaps)


@pytest.mark.parametrize("capacity_ticks", [1, 2, 3, 7, 50])
@pytest.mark.parametrize(
    "mishaps",
    [
        Mishaps(ends=0.0),
        Mishaps(ends=0.3),
        Mishaps(ends=0.1, silent_resets=0.1, skipped_steps=0.1, foreign_next=0.2),
        Mishaps(foreign_next=1.0),
    ],
    ids=["plain", "episodes", "everything", "nothing shared"],
)
def test_a_ring_gives_back_what_was_written_through_wrap_around(mishaps: Mishaps, capacity_ticks: int) -> None:
    """However episodes end and however small the ring, every row held is the row that was added."""
    compare_over(vectors(mishaps), capacity_ticks, 40)


def test_an_observation_is_stored_once_where_it_is_the_next_ones_first() -> None:
    """Next observations that follow cost no row of their own."""
    memory = compare_over(vectors(Mishaps(ends=0.0)), 100, 50)
    observed = memory.report().fields[0]
    assert observed.row_bytes == 50 * 2 * 12
    assert observed.finding == "flat rows; 100.0 % of next observations shared"


def test_only_what_differs_is_kept_apart() -> None:
    """An episode's end in one lane keeps one row apart, not a tick."""
    memory = ReplayMemory(box((3,), "f4"), spaces.Discrete(3), 1000, 10)
    stream = vectors(Mishaps(ends=0.0), lanes=10)
    given = [stream.tick().arguments() for _ in range(20)]
    for step in given[:10]:
        memory.add(**step)
    broken = {**given[10], "obs": given[10]["obs"].copy()}
    broken["obs"][7] += 1
    memory.add(**broken)
    assert memory.report().fields[0].finding == f"flat rows; {100 * (1 - 1 / 110):.1f} % of next observations shared"


def test_where_nothing_is_shared_the_ring_is_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past some unshared rows, two full rings are cheaper than rows by id; nothing is lost on the way."""
    monkeypatch.setattr(ring, "_UNSHARED_BEFORE_PAIRING", 20)
    memory = compare_over(vectors(Mishaps(foreign_next=1.0)), 60, 150)
    observed = memory.report().fields[0]
    assert "next observations seldom shared, so kept beside" in observed.finding
    assert observed.row_bytes == 61 * 2 * 12 * 2


def test_a_second_ring_counts_for_what_a_limit_sets_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows take when all have come is counted again as soon as next observations have rows of their own."""
    monkeypatch.setattr(ring, "_UNSHARED_BEFORE_PAIRING", 4)
    stream = vectors(Mishaps(foreign_next=1.0))
    memory = ReplayMemory(stream.observation_space, stream.action_space, 100, stream.num_envs)
    shared = memory._open()._rings.row_bytes
    for _ in range(20):
        memory.add(**stream.tick().arguments())
    assert memory._open()._rings.row_bytes == shared + VECTOR.nbytes


@pytest.mark.parametrize("capacity_ticks", [1, 5, 12, 100])
def test_pairing_in_the_middle_of_a_wrap_around_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capacity_ticks: int
) -> None:
    """A ring may be paired at any place of the ring."""
    for threshold in range(1, 30, 3):
        monkeypatch.setattr(ring, "_UNSHARED_BEFORE_PAIRING", threshold)
        compare_over(vectors(Mishaps(foreign_next=0.8)), capacity_ticks, 40)


def test_a_ring_that_is_seldom_broken_is_not_paired() -> None:
    """Episodes of usual length never cost a second ring."""
    memory = compare_over(vectors(Mishaps(ends=0.1)), 40, 100)
    assert "shared" in memory.report().fields[0].finding
    assert "beside" not in memory.report().fields[0].finding


def test_a_ring_compares_bytes_and_not_values() -> None:
    """0.0 and -0.0 are equal numbers, and NaN is none; the ring tells all of them apart by their bits."""
    memory = ReplayMemory(box((1,), "f4"), spaces.Discrete(2), 10, 1)
    zero, negative, nan = (np.array([[value]], "f4") for value in (0.0, -0.0, np.nan))
    for obs, next_obs in ((zero, negative), (zero, nan), (nan, zero), (negative, zero)):
        step = Stream(box((1,), "f4"), spaces.Discrete(2)).tick().arguments()
        memory.add(**{**step, "obs": obs, "next_obs": next_obs})
    batch = memory.gather([0, 1, 2, 3])
    assert np.signbit(batch.next_obs[:, 0]).tolist() == [True, False, False, False]
    assert np.isnan(batch.next_obs[:, 0]).tolist() == [False, True, False, False]
    assert np.signbit(batch.obs[:, 0]).tolist() == [False, False, False, True]


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_ring_lets_go_of_rows_whose_ticks_were_evicted(by_itself: bool) -> None:
    """Rows kept apart do not pile up over a long run, whoever keeps them."""
    leaf = Leaf("", (8,), np.dtype("f8"))
    observed = ObservationRing(leaf, lanes=1, ring_ticks=2001)
    rows = np.random.default_rng(0).random((2, 1, 8))
    writer = chosen_kernels().new_writer([observed.flat()], 2001, (0, 0), Repair())
    for tick in range(40_000):
        breaks = tick % 10 == 0
        tick_rows = [rows[0] + tick + (0.5 if breaks else 0), rows[0] + tick + 1]
        if writer.write(tick_rows, None, is_kept=False) == NOT_CONTINUED:
            observed.keep_apart(tick - 1, tick_rows[0])
            if by_itself:
                writer.keep_apart(bytearray(1))
            writer.write(tick_rows, None, is_kept=True)
    assert writer.next_tick == 40_000
    assert observed.is_shared
    assert observed.bytes_of(0) < 2 * 2001 / 10 * (64 + 8) + 64 * 72


# ---------------------------------------------------------------- rows by id


def numbered(ids: NDArray[np.int64]) -> NDArray[Any]:
    """Give every id a row that tells it."""
    return np.repeat(ids[:, None], 3, axis=1).astype("f4")


def test_rows_by_id_overwrite_the_rows_of_their_ids_alone() -> None:
    """Ids that are not held keep the row that they have."""
    held = Apart.none_of(VECTOR)
    held = held.appended(np.array([3, 7, 8]), numbered(np.array([3, 7, 8])))
    ids = np.array([8, 2, 3, 9, 8, 0])
    rows = np.full((6, 3), -1, "f4")
    held.write_over(rows, ids)
    assert rows[:, 0].tolist() == [8, -1, 3, -1, 8, -1]


def test_loops_append_rows_by_id_only_where_they_may() -> None:
    """What was frozen before stays as it was; room that was left is no room any more."""
    kept = KeptApart(VECTOR)
    assert kept.room[3] == 0
    kept.hold(kept.held.appended(np.array([3]), numbered(np.array([3]))), 5)
    frozen, room = kept.held, kept.room
    assert room[2:].tolist() == [1, 5]
    frozen.ids[1], frozen.rows[1] = 8, 8.0
    room[2] = 2  # as append.c does it
    assert len(kept.held) == 2
    assert frozen.end == 1
    rows = np.zeros((2, 3), "f4")
    kept.held.write_over(rows, np.array([8, 3]))
    assert rows[:, 0].tolist() == [8, 3]
    kept.hold(kept.held.appended(np.array([9]), numbered(np.array([9]))))
    assert (room[3], kept.room[3], len(kept.held)) == (0, 0, 3)


def test_rows_by_id_forget_what_is_dropped() -> None:
    """A dropped id is as one that was never there."""
    held = Apart.none_of(VECTOR)
    held = held.appended(np.arange(10), numbered(np.arange(10)))
    held = held.since(4)
    assert len(held) == 6
    rows = np.full((10, 3), -1, "f4")
    held.write_over(rows, np.arange(10))
    assert rows[:, 0].tolist() == [-1, -1, -1, -1, 4, 5, 6, 7, 8, 9]


def test_rows_by_id_agree_with_a_dict_over_a_long_run() -> None:
    """Appending and dropping at random, rows are those that a plain dict holds."""
    generator = np.random.default_rng(0)
    held, plain = Apart.none_of(SCALAR), dict[int, int]()
    first = upto = 0
    for _ in range(500):
        ids = upto + np.flatnonzero(generator.random(20) < 0.5)
        upto += 20
        held = held.appended(ids, ids * 5)
        plain.update(zip(ids.tolist(), (ids * 5).tolist(), strict=True))
        if generator.random() < 0.3:
            first = int(generator.integers(first, upto + 5))
            held = held.since(first)
            plain = {number: row for number, row in plain.items() if number >= first}
        asked = generator.integers(0, upto, 30)
        rows = np.full(30, -1)
        held.write_over(rows, asked)
        assert rows.tolist() == [plain.get(number, -1) for number in asked.tolist()]
        assert len(held) == len(plain)
    assert held.nbytes < 16 * 4 * 500


def test_rows_by_id_with_nothing_in_them_change_nothing() -> None:
    """An empty table may be asked."""
    rows = np.full((2, 3), -1, "f4")
    Apart.none_of(VECTOR).write_over(rows, np.array([0, 1]))
    assert (rows == -1).all()

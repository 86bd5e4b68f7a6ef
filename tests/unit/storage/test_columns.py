"""Columns of vectors: what repeats is found, packed, read back and given up without losing a row."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.machine import held_bytes
from holdall.native import chosen_kernels
from holdall.schema import Leaf, Schema
from holdall.storage import rings
from holdall.storage.codec_choice import COST_CAPS
from holdall.storage.column_plan import ColumnPlan, find_plan
from holdall.storage.store import Store
from holdall.storage.ticks import Tick
from holdall.storage.tiers import Budget

RUN_TICKS = 8


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_RUN_BYTES", 1), ("_LEAST_TICKS", RUN_TICKS), ("_LEAST_RUNS", 2)):
        monkeypatch.setattr(rings, name, value)


# ---------------------------------------------------------------- what is found


def plan_of(*fields: NDArray[Any]) -> ColumnPlan:
    """Find a plan for fields of one lane, (ticks, ...)."""
    leaves = [Leaf("", rows.shape[1:], rows.dtype) for rows in fields]
    seen = [np.ascontiguousarray(rows).view(np.uint8)[None] for rows in fields]
    found = find_plan(leaves, seen, np.zeros(sum(rows.shape[1] for rows in fields), np.bool_))
    assert found is not None
    return found


def noise(*shape: int, dtype: str = "f4", seed: int = 0) -> NDArray[Any]:
    drawn: NDArray[Any] = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    return drawn


def test_columns_that_never_change_and_those_that_equal_others_are_found() -> None:
    """In one field, or between two of the same size; a float32 never equals a float64."""
    rows = noise(64, 5, dtype="f8")
    rows[:, 1] = 3
    plan = plan_of(rows, rows[:, [0, 4]], rows[:, [0]].astype("f4"))
    first, second, third = plan.findings
    assert (first.constant, first.copied) == (1, 0)
    assert second.copied == 2
    assert third.copied == 0


def test_values_that_hold_are_found() -> None:
    """A goal an episode, and forces that are most often 0."""
    goals = np.repeat(noise(8, 3), 8, axis=0)
    forces = np.where((np.random.default_rng(1).random(64) < 0.2)[:, None], noise(64, 6), np.float32(0))
    plan = plan_of(np.concatenate([goals, forces, noise(64, 2, seed=2)], axis=1))
    assert plan.findings[0].held == 9
    assert "9 stored when they change" in plan.findings[0].describe()


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("order", ["step by step", "term by term", "terms of many numbers"])
def test_histories_are_found_in_every_order(order: str, newest_first: bool) -> None:
    """Of 12 numbers, 5 past values each; as robots' frameworks flatten them."""
    values = noise(70, 12)
    seen = np.lib.stride_tricks.sliding_window_view(values, 5, axis=0)  # (ticks, 12, 5), the newest last
    seen = seen[..., ::-1] if newest_first else seen
    if order == "step by step":
        flat = seen.swapaxes(1, 2).reshape(len(seen), -1)
    elif order == "term by term":
        flat = seen.reshape(len(seen), -1)
    else:  # three terms of 3, 1 and 8 numbers
        terms = [part.swapaxes(1, 2).reshape(len(seen), -1) for part in np.split(seen, [3, 4], axis=1)]
        flat = np.concatenate(terms, axis=1)
    finding = plan_of(flat).findings[0]
    assert (finding.histories, finding.in_histories) == (12, 48)


def test_where_nothing_repeats_there_is_no_plan() -> None:
    rows = noise(64, 10)
    leaf = Leaf("", (10,), rows.dtype)
    assert find_plan([leaf], [rows.view(np.uint8)[None]], np.zeros(10, np.bool_)) is None


# ---------------------------------------------------------------- stores


def tick_of(obs: NDArray[Any], next_obs: NDArray[Any]) -> Tick:
    lanes = len(obs)
    flags = np.zeros(lanes, np.bool_)
    return Tick([obs], [np.zeros(lanes, np.int64)], np.zeros(lanes), [next_obs], flags, flags, [], None)


def repeating(ticks: int, lanes: int, seed: int = 0) -> NDArray[Any]:
    """Return rows (ticks, lanes, 6), half of whose columns never change."""
    rows = noise(ticks, lanes, 6, dtype="f8", seed=seed)
    rows[..., 3:] = [-0.0, 1.5, np.nan]
    return rows


def new_store(kind: type[Store], lanes: int, capacity: int = 100) -> Any:
    schema = Schema.of(spaces.Box(-np.inf, np.inf, (6,), np.float64), spaces.Discrete(2), None, lanes)
    return kind(
        schema, capacity, chosen_kernels(), threading.Lock(), Budget(cost_cap=COST_CAPS["memory"], most_threads=1)
    )


def write(store: Store, rows: NDArray[Any], first: int, end: int) -> None:
    for t in range(first, end):
        store.write(tick_of(rows[t], rows[t + 1]))


def require_rows(store: Store, rows: NDArray[Any]) -> None:
    lanes = rows.shape[1]
    ids = np.arange(store.first_tick * lanes, store.next_tick * lanes)
    obs, next_obs = store.read(ids).small[0]
    held = rows[store.first_tick : store.next_tick + 1]
    assert obs.tobytes() == held[:-1].tobytes()
    assert next_obs.tobytes() == held[1:].tobytes()


def packed(store: Store) -> list[int]:
    runs = store._rings._runs
    return [] if runs is None else sorted(runs.runs)


def test_rows_frozen_before_they_are_packed_are_read_after_it() -> None:
    """A save that is under way while ticks are packed, and written over, saves what stood there when it began."""
    store, rows = new_store(Store, 2, capacity=30), repeating(60, 2)
    write(store, rows, 0, 7)
    assert not packed(store)
    frozen = store.freeze({})
    write(store, rows, 7, 40)
    assert packed(store)
    taken = [frozen.rows.take(number) for number in frozen.rows.wanted]
    assert np.concatenate([chunk.columns["obs.0"] for chunk in taken]).tobytes() == rows[:7].tobytes()
    again = store.freeze({})
    write(store, rows, 40, 55)
    chunks = [again.rows.take(number) for number in again.rows.wanted]
    assert np.concatenate([chunk.columns["obs.0"] for chunk in chunks]).tobytes() == rows[10:40].tobytes()
    store.close()


def test_a_store_adopts_behind_packed_ticks_and_hands_them_out() -> None:
    """A segment is made of packed ticks as of others; taking one over puts all rows back into rings."""
    store, rows = new_store(Store, 1), repeating(90, 1)
    write(store, rows, 0, 40)
    assert packed(store) == [0, 1, 2, 3, 4]
    segment = store.segment_at(0)
    assert segment.rows.columns["obs.0"].tobytes() == rows[:40].tobytes()
    assert segment.rows.columns["next.0"].tobytes() == rows[1:41].tobytes()
    other = new_store(Store, 1)
    write(other, rows[40:], 0, 20)
    store.adopt(other.segment_at(0))
    assert not packed(store)
    require_rows(store, rows[:61])
    write(store, rows, 60, 89)
    require_rows(store, rows)
    for each in (store, other):
        each.close()


def test_equality_that_breaks_in_one_row_keeps_that_row_whole() -> None:
    """At a payload of a NaN; the columns stay equal for all other rows."""
    rows = repeating(200, 1)
    rows[:, :, 3:] = rows[:, :, :3]
    rows.view(np.uint64)[[21, 22, 50], 0, 4] = 0x7FF4000000000001
    store = new_store(Store, 1, capacity=150)
    write(store, rows, 0, 199)
    require_rows(store, rows)
    assert len(packed(store)) > 15
    assert "3 equal others" in store.report()[0].finding
    store.close()


def test_a_column_that_is_constant_no_more_is_stored() -> None:
    """At any step of a run, for one step or for good; nothing is lost, and the report does not call it constant."""
    for at in range(30, 48):
        rows = repeating(120, 2)
        rows[at, 1, 4] = -1.5
        rows[at + 20 :, 0, 5] = noise(100 - at, dtype="f8")
        store = new_store(Store, 2)
        write(store, rows, 0, 119)
        require_rows(store, rows)
        assert "1 never change" in store.report()[0].finding
        store.close()


def test_rows_in_which_nothing_repeats_are_read_from_the_ring_alone() -> None:
    """So vectors of noise are read as fast as before."""
    store, rows = new_store(Store, 1), noise(80, 1, 6, dtype="f8")
    write(store, rows, 0, 79)
    assert not packed(store)
    table = store.row_table.columns()
    assert not table[:, -2].any()
    require_rows(store, rows)
    store.close()


def test_pages_of_packed_ticks_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is what is packed."""
    monkeypatch.setattr(rings, "_RUN_BYTES", 1 << 19)
    memory = ReplayMemory(spaces.Box(-np.inf, np.inf, (200,), np.float64), spaces.Discrete(2), 20_000, 1)
    rows = np.zeros((1000, 1, 200))
    rows[:, :, :10] = noise(1000, 1, 10, dtype="f8")
    flags, rewards, actions = np.zeros((999, 1), np.bool_), np.zeros((999, 1)), np.zeros((999, 1), np.int64)
    start = held_bytes().anonymous
    for _ in range(20):
        memory.extend(rows[:-1], actions, rewards, rows[1:], flags, flags)
    held = held_bytes().anonymous - start
    assert memory.report().total_bytes < 4e6
    assert held < 16e6, "32 MB lie in the ring otherwise"
    memory.close()

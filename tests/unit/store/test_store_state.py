"""What a store holds: snapshots, restored and adopted segments, flags, budgets and their reports."""

from __future__ import annotations

import gc
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall._native import Coded, Raw
from holdall.errors import ArgumentError, HoldallError, TransitionIdError
from holdall.schema import Schema
from holdall.store.budget import Budget
from holdall.store.snapshot import StoreState
from holdall.store.spill import SpillFolder
from holdall.store.store import Store
from holdall.store.tuning import Tuning

SMALL = Tuning(
    block_bytes=32_768,
    max_segment_ticks=16,
    min_segment_ticks=8,
    small_field_bytes=64,
    tiny_field_bytes=16,
    available_bytes=2**40,
    segments_per_limit=16,
    staging_divisor=64,
    spill_file_bytes=1,
    spill_files=10**6,
)
SPACE = spaces.Dict({"image": spaces.Box(0, 255, (32, 30), np.uint8), "speed": spaces.Box(-1, 1, (2,), np.float32)})
LANES = 2


def new_schema() -> Schema:
    return Schema.of(SPACE, spaces.Discrete(4), {"hidden": spaces.Box(-1, 1, (2,), np.float32)}, LANES, ())


def new_store(capacity_ticks: int = 1000, budget: Any = "auto", folder: SpillFolder | None = None) -> Store:
    schema = new_schema()
    made = Budget.from_settings(budget, schema, can_spill=folder is not None, tuning=SMALL)
    return Store(schema, capacity_ticks, made, tuning=SMALL, spill=folder)


NOISE = np.random.default_rng(0).integers(0, 16, (997, 32, 30), np.uint8)


def image_of(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the image of each observation, which its id decides. No two are equal."""
    images = NOISE[ids % len(NOISE)]
    images[:, 0, :4] = ids.astype(np.int32)[:, None].view(np.uint8)
    return images


def add(store: Store, ticks: int, valid: Any = None) -> None:
    for _ in range(ticks):
        ids = np.arange(store.next_id, store.next_id + LANES)
        obs = {"image": image_of(ids), "speed": np.stack([ids, -ids], 1).astype(np.float32)}
        next_obs = {"image": image_of(ids + LANES), "speed": np.stack([ids + 1, ids], 1).astype(np.float32)}
        ends = ids % 10 == 9
        extras = {"hidden": np.stack([ids, ids], 1).astype(np.float32)}
        store.append(obs, ids % 4, ids.astype(np.float32), next_obs, ends, np.zeros(LANES, np.bool_), extras, valid)


def check(store: Store, first_id: int | None = None, next_id: int | None = None) -> None:
    """Compare all rows that are held with what was added."""
    first = store.first_id if first_id is None else first_id
    end = store.next_id if next_id is None else next_id
    assert (store.first_id, store.next_id) == (first, end)
    ids = np.arange(first, end)
    columns = store.columns
    outputs = (*columns.obs_outputs, *columns.next_obs_outputs, columns.reward_output, columns.terminated_output)
    image, speed, next_image, next_speed, reward, terminated = store.view().read(ids, outputs)
    assert np.array_equal(image, image_of(ids))
    assert np.array_equal(next_image, image_of(ids + LANES))
    assert np.array_equal(speed, np.stack([ids, -ids], 1))
    assert np.array_equal(next_speed, np.stack([ids + 1, ids], 1))
    assert np.array_equal(reward, ids.astype(np.float32))
    assert np.array_equal(terminated, ids % 10 == 9)


# ---------------------------------------------------------------- small fields


def test_small_fields_are_read_for_ids_of_any_shape() -> None:
    store = new_store()
    add(store, 30)
    ids = np.arange(24).reshape(2, 3, 4)
    assert store.view().rewards(ids).shape == (2, 3, 4)
    assert np.array_equal(store.view().rewards(ids), ids)
    assert np.array_equal(store.view().are_ends(ids), ids % 10 == 9)
    assert store.view().extra(0, ids).shape == (2, 3, 4, 2)
    rewards, terminated, truncated = store.view().outcomes(ids)
    assert np.array_equal(rewards, ids)
    assert np.array_equal(terminated, ids % 10 == 9)
    assert not truncated.any()
    assert store.view().are_valid(ids).all()
    assert store.all_valid
    with pytest.raises(TransitionIdError):
        store.view().rewards(np.array([60]))


def test_invalid_entries_are_not_transitions_until_they_are_evicted() -> None:
    store = new_store(capacity_ticks=40)
    add(store, 10, np.array([True, False]))
    add(store, 10)
    assert len(store) == 30
    assert not store.all_valid
    assert np.array_equal(store.view().are_valid(np.arange(24)), (np.arange(24) % 2 == 0) | (np.arange(24) >= 20))
    add(store, 25)
    assert len(store) == 75  # Five ticks with one invalid entry each are held.
    add(store, 5)
    assert len(store) == 80
    assert store.all_valid


def test_flags_are_overwritten_and_the_rest_stays() -> None:
    store = new_store()
    add(store, 40, np.array([True, False]))
    ids = np.array([2, 70, 9])
    store.set_flags(ids, np.array([True, False, False]), np.array([False, True, False]))
    assert store.view().flags_changed == 1
    rewards, terminated, truncated = store.view().outcomes(ids)
    assert np.array_equal(rewards, ids)
    assert terminated.tolist() == [True, False, False]
    assert truncated.tolist() == [False, True, False]
    assert store.view().are_valid(ids).tolist() == [True, True, False]
    with pytest.raises(TransitionIdError, match="is not held"):
        store.set_flags(np.array([80]), np.zeros(1, np.bool_), np.zeros(1, np.bool_))


def test_the_hook_before_a_read_gets_the_catalog_and_the_ids() -> None:
    store = new_store()
    add(store, 5)
    seen: list[Any] = []
    store.before_read = lambda catalog, ids: seen.append((catalog, ids.tolist()))
    store.view().read(np.array([3]), (store.columns.reward_output,))
    store.view().rewards(np.array([4]))
    assert [ids for _, ids in seen] == [[3], [4]]
    assert seen[0][0].next_tick == 5


# ---------------------------------------------------------------- snapshots


def restored(state: StoreState, capacity_ticks: int = 1000, budget: Any = "auto") -> Store:
    store = new_store(capacity_ticks, budget)
    store.restore(state)
    return store


@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize("ticks", [1, 30, 200])
def test_a_restored_store_continues_where_the_saved_one_was(ticks: int, budget: Any) -> None:
    saved = new_store(budget=budget)
    add(saved, ticks)
    store = restored(saved.snapshot(), budget=budget)
    check(store, 0, LANES * ticks)
    add(store, 50)
    store.wait_idle()
    check(store, 0, LANES * (ticks + 50))
    check(saved, 0, LANES * ticks)


def test_a_smaller_capacity_keeps_the_newest_ticks() -> None:
    saved = new_store()
    add(saved, 200)
    store = restored(saved.snapshot(), capacity_ticks=30)
    check(store, 340, 400)
    assert store.segments <= 6
    add(store, 20)
    check(store, 380, 440)


def test_evicted_ticks_are_not_restored() -> None:
    saved = new_store()
    add(saved, 100)
    saved.evict(37)
    store = restored(saved.snapshot())
    check(store, 74, 200)
    with pytest.raises(TransitionIdError):
        store.view().rewards(np.array([73]))


def test_a_snapshot_leaves_out_segments_that_were_evicted_completely() -> None:
    """A store drops such a segment when it closes the next one. A save in between would write the segment."""
    saved = new_store(capacity_ticks=100)
    for _ in range(200):
        add(saved, 1)
        state = saved.snapshot()
        for segment in state.segments:
            assert segment.first_tick + segment.ticks > state.first_tick


def test_a_store_that_was_emptied_continues_with_its_ids() -> None:
    saved = new_store()
    add(saved, 30)
    saved.evict(30)
    state = saved.snapshot()
    assert (state.first_tick, state.next_tick, state.segments) == (30, 30, ())
    store = restored(state)
    assert (store.first_id, store.next_id, len(store)) == (60, 60, 0)
    add(store, 5)
    check(store, 60, 70)
    assert store.reward_dtype == np.float32


def test_a_snapshot_never_changes() -> None:
    saved = new_store(capacity_ticks=100)
    add(saved, 60)
    state = saved.snapshot()
    ids = np.arange(20)
    saved.set_flags(ids, np.ones(20, np.bool_), np.ones(20, np.bool_))
    saved.rewrite(ids, {0: np.zeros((20, 2), np.float32)})
    add(saved, 100)
    saved.relieve(2**30)
    saved.wait_idle()
    store = restored(state)
    check(store, 0, 120)
    assert np.array_equal(store.view().extra(0, ids), np.stack([ids, ids], 1))


def test_only_a_store_without_ticks_is_restored() -> None:
    store = new_store()
    add(store, 1)
    with pytest.raises(HoldallError, match="holds no transitions"):
        store.restore(store.snapshot())


# ---------------------------------------------------------------- adopted segments


def test_adopted_segments_follow_what_is_held() -> None:
    source = new_store()
    add(source, 100)
    store = new_store(capacity_ticks=60)
    store.set_reward_dtype(np.dtype(np.float32))
    for segment in source.snapshot().segments:
        store.adopt(segment)
    check(store, 80, 200)
    add(store, 10)
    check(store, 100, 220)
    with pytest.raises(ArgumentError, match="float32"):
        store.set_reward_dtype(np.dtype(np.float64))
    assert all(segment.ticks for segment in store.snapshot().segments), "an empty segment cannot be loaded"


def test_segments_are_adopted_while_another_thread_adds() -> None:
    source = new_store()
    add(source, 16)
    (segment,) = source.snapshot().segments[-1:]
    store = new_store(capacity_ticks=10**6)
    add(store, 1)
    adopter = threading.Thread(target=lambda: [store.adopt(segment) for _ in range(50)])
    adopter.start()
    add(store, 300)
    adopter.join()
    assert store.next_tick == 301 + 50 * segment.ticks
    store.view().read(np.arange(store.next_id), (store.columns.reward_output,))


def test_a_segment_of_another_shape_is_refused() -> None:
    other = Store(
        Schema.of(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4), {}, LANES, ()),
        100,
        Budget.automatic(2**40, can_spill=False, tuning=SMALL),
        tuning=SMALL,
    )
    rows = np.zeros((2, 3), np.float32)
    other.append(rows, np.zeros(2, np.int64), np.zeros(2), rows, np.zeros(2, np.bool_), np.zeros(2, np.bool_))
    store = new_store()
    add(store, 3)
    with pytest.raises(ValueError, match="other columns"):
        store.adopt(other.snapshot().segments[0])
    check(store, 0, 6)


# ---------------------------------------------------------------- budgets


def forms_of(store: Store) -> list[type]:
    parts = [segment.parts[0] for segment in store.catalog.segments]
    blocks = {part.block: None for part in parts if part.block is not None}
    return [type(block.form) for block in blocks if not block.is_open]


def test_relieving_compresses_raw_blocks_and_evicts_nothing() -> None:
    store = new_store()
    add(store, 300)
    assert set(forms_of(store)) == {Raw}
    store.relieve(100_000)
    store.wait_idle()
    forms = forms_of(store)
    assert forms.count(Coded) >= 2
    assert forms == sorted(forms, key=[Coded, Raw].index)  # The oldest blocks are compressed.
    check(store, 0, 600)
    store.relieve(2**30)
    store.wait_idle()
    assert set(forms_of(store)) == {Coded}
    check(store, 0, 600)
    store.close()


def test_an_automatic_budget_compresses_the_oldest_blocks() -> None:
    schema = new_schema()
    tuning = replace(SMALL, available_bytes=800_000)
    store = Store(schema, 10_000, Budget.automatic(2**40, can_spill=False, tuning=tuning), tuning=tuning)
    add(store, 500)
    store.wait_idle()
    forms = forms_of(store)
    assert forms[0] is Coded
    assert forms[-1] is Raw
    check(store, 0, 1000)
    store.close()


LIMIT = 600_000


def test_ticks_that_exceed_the_limit_are_dropped_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    store = new_store(100_000, LIMIT)
    with caplog.at_level(logging.WARNING, "holdall"):
        for _ in range(20):
            add(store, 100)
            check(store)
    assert store.dropped_early == store.first_id > 0
    assert "no spill_dir" in store.drop_reason
    fits = store.capacity_that_fits
    assert fits is not None
    assert len(store) == pytest.approx(fits, rel=0.3)
    warnings = [record.getMessage() for record in caplog.records]
    assert len([text for text in warnings if "were dropped before" in text]) == len({*warnings}) - 1 <= 4
    assert sum(field.total_bytes for field in store.report()) <= LIMIT
    store.close()


class FullDisk(SpillFolder):
    """A disk tier that takes `room_bytes`, and then nothing until blocks are deleted."""

    room_bytes = 200_000

    def store(self, coded: Coded) -> Coded:
        if coded.data is not None and self.disk_bytes + coded.data.nbytes > self.room_bytes:
            raise OSError(28, "No space left on device")
        return super().store(coded)


def test_a_full_disk_keeps_what_it_has_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    store = new_store(100_000, LIMIT, FullDisk(tmp_path, SMALL))
    held = []
    for _ in range(60):
        add(store, 100)
        store.wait_idle()
        check(store)
        if store.dropped_early:
            held.append(len(store))
            assert store.disk_bytes > 0.3 * FullDisk.room_bytes
            assert "No space left on device" in store.failure
            assert "Free disk space" in store.drop_reason
    assert len(held) > 5
    assert min(held) > 0.6 * max(held)
    assert store.dropped_early == store.first_id
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_tier_that_works_loses_nothing(tmp_path: Path) -> None:
    store = new_store(100_000, LIMIT, SpillFolder(tmp_path, SMALL))
    add(store, 1000)
    store.wait_idle()
    check(store, 0, 2000)
    assert store.dropped_early == 0
    assert store.failure == ""
    assert store.disk_bytes > 0
    report = store.report()
    assert sum(field.disk_bytes for field in report) > 0
    assert sum(field.total_bytes for field in report) <= LIMIT
    store.close()


def test_reports_name_every_field_and_what_was_found() -> None:
    store = new_store(budget=None)
    add(store, 300)
    store.wait_idle()
    fields = {field.name: field for field in store.report()}
    assert list(fields) == ["obs.image", "obs.speed", "action", "reward", "extras.hidden", "flags"]
    assert fields["obs.image"].plain_bytes == 2 * 600 * 960
    assert fields["obs.image"].total_bytes < 1.2 * 600 * 960
    assert "whole observations" in fields["obs.image"].finding
    assert fields["reward"].plain_bytes == 600 * 4
    store.close()


@pytest.mark.timeout(30)
def test_a_store_that_is_dropped_without_close_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    store = new_store(budget=None)
    add(store, 100)
    store.wait_idle()
    workers = set(threading.enumerate()) - before
    assert {worker.name for worker in workers} == {"holdall compactor"}
    del store
    gc.collect()
    for worker in workers:
        worker.join()


@pytest.mark.timeout(30)
def test_helpers_start_with_the_first_large_batch_and_end_with_the_store() -> None:
    schema = new_schema()
    tuning = replace(SMALL, bytes_per_thread=1024)
    budget = Budget.automatic(2**40, can_spill=False, tuning=tuning)
    store = Store(schema, 1000, budget, tuning=tuning, threads=3)
    add(store, 100)
    before = set(threading.enumerate())
    check(store)
    check(store)
    helpers = set(threading.enumerate()) - before
    assert [helper.name for helper in helpers] == ["holdall reader"] * 2
    check(store)
    assert set(threading.enumerate()) - before == helpers
    store.close()
    for helper in helpers:
        helper.join()

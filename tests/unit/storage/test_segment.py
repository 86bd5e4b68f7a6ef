"""Segments close, share blocks and go with their last tick; every row stays what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import FieldReport, ReplayMemory
from holdall.storage import segment
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits
from holdall.testing.strategies import box


class Pair:
    """A memory and the oracle, fed with the same ticks."""

    def __init__(self, stream: Stream, capacity_ticks: int) -> None:
        self.stream = stream
        capacity = capacity_ticks * stream.num_envs
        self.memory = ReplayMemory(stream.observation_space, stream.action_space, capacity, stream.num_envs)
        self.oracle = OracleMemory(capacity, stream.num_envs)

    def pass_ticks(self, count: int, compare_every: int = 0) -> Pair:
        for tick in range(count):
            given = self.stream.tick().arguments()
            self.memory.add(**given)
            self.oracle.add(**given)
            if compare_every and tick % compare_every == 0:
                self.compare()
        self.compare()
        return self

    def compare(self) -> None:
        assert_same_bits(self.memory.gather(self.oracle.ids), self.oracle.gather(self.oracle.ids))

    @property
    def observed(self) -> FieldReport:
        return self.memory.report().fields[0]


def stream_of(
    shape: tuple[int, ...], plan: LeafPlan, mishaps: Mishaps | None = None, dtype: str = "u1", lanes: int = 1
) -> Stream:
    usual = Mishaps(ends=0.02) if mishaps is None else mishaps
    return Stream(box(shape, dtype), spaces.Discrete(2), lanes, plans=[plan], mishaps=usual, seed=3)


STACK = LeafPlan(axis=0)
STACKED = (4, 36, 36)
QUIET = Mishaps(ends=0.0)


@pytest.mark.parametrize("capacity_ticks", [1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 18, 40])
def test_a_window_found_in_a_tiny_memory_loses_nothing(capacity_ticks: int) -> None:
    """A window found after ticks were evicted is applied to those that are held, and to no others."""
    Pair(stream_of(STACKED, STACK, QUIET), capacity_ticks).pass_ticks(40, compare_every=1)


@pytest.mark.parametrize("capacity_ticks", [1, 4, 9, 40])
def test_a_field_that_moves_to_the_segments_in_a_tiny_memory_loses_nothing(capacity_ticks: int) -> None:
    """The same for a field that lay in a ring until its window was found."""
    pair = Pair(stream_of((4, 16, 16), STACK, QUIET), capacity_ticks).pass_ticks(40, compare_every=1)
    assert pair.observed.finding.startswith("window of 4 along axis 0")


@pytest.mark.parametrize(
    ("shape", "dtype", "axis", "step"),
    [
        ((4, 84, 84), "u1", 0, 1),
        ((84, 84, 4), "u1", 2, 1),
        ((48, 40, 12), "u1", 2, 3),
        ((504, 17), "f4", 0, 1),
        ((504, 3), "f4", 0, 1),
        ((300, 9), "f8", 0, 5),
    ],
)
@pytest.mark.parametrize("padding", ["zero", "first"])
def test_windows_are_found_and_cost_one_slice_a_step(
    shape: tuple[int, ...], dtype: str, axis: int, step: int, padding: Any
) -> None:
    """Stacks on either axis, colour stacks and long histories: obs and next_obs cost what is new in them."""
    plan = LeafPlan(axis=axis, step=step, padding=padding)
    pair = Pair(stream_of(shape, plan, Mishaps(ends=0.005), dtype), 10_000).pass_ticks(250)
    count = shape[axis] // step
    assert pair.observed.finding.startswith(f"window of {count} along axis {axis}; ")
    whole = np.zeros(shape, dtype).nbytes
    assert pair.observed.slice_bytes < 250 * 1.2 * whole / count + 6 * whole


def test_every_dict_key_has_a_window_of_its_own() -> None:
    """What is found in one key says nothing about another."""
    space = spaces.Dict(first=box(STACKED, "u1"), last=box((36, 36, 4), "u1"), noise=box((36, 36, 4), "u1"))
    plans = [LeafPlan(axis=0), LeafPlan(axis=2), LeafPlan()]
    pair = Pair(Stream(space, spaces.Discrete(2), 2, plans=plans), 1000).pass_ticks(60)
    findings = {field.name: field.finding for field in pair.memory.report().fields}
    assert findings["obs.first"].startswith("window of 4 along axis 0")
    assert findings["obs.last"].startswith("window of 4 along axis 2")
    assert findings["obs.noise"] == "whole observations"


def test_next_obs_is_the_next_steps_obs_and_costs_nothing() -> None:
    """Even without a window, an observation is stored once."""
    pair = Pair(stream_of(STACKED, LeafPlan(), QUIET), 10_000).pass_ticks(100)
    assert pair.observed.finding == "whole observations"
    assert pair.observed.slice_bytes == 101 * 4 * 36 * 36


def test_a_screen_seen_before_costs_nothing() -> None:
    """Observations out of a small table are stored once each."""
    pair = Pair(stream_of(STACKED, LeafPlan(content="table")), 1000).pass_ticks(300)
    assert pair.observed.slice_bytes <= 40 * 4 * 36 * 36


def test_segments_close_and_are_freed_with_their_last_tick() -> None:
    """A full memory holds a bounded number of segments and bytes, and exactly its capacity."""
    pair = Pair(stream_of(STACKED, STACK, Mishaps(ends=0.02), lanes=2), 64).pass_ticks(100)
    held, segments = pair.observed.slice_bytes, pair.memory.report().segments
    for _ in range(6):
        pair.pass_ticks(100)
        report = pair.memory.report()
        assert len(pair.memory) == 128
        assert report.segments <= segments + 2
        assert pair.observed.slice_bytes < 2.5 * held


def test_a_field_that_repeats_its_days_goes_on_in_one_block() -> None:
    """Days that every episode shows are not repeated in every segment."""
    plan = LeafPlan(axis=0, content="table", padding="fresh")
    pair = Pair(stream_of((130, 41), plan, Mishaps(ends=0.05), "f4"), 320).pass_ticks(300, compare_every=25)
    assert pair.memory.report().segments > 8
    assert pair.observed.slice_bytes == 40 * 41 * 4


def test_fields_that_fill_their_blocks_do_not_close_a_segment_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block held before a segment began does not make that segment full."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 1)
    monkeypatch.setattr("holdall.testing.streams._TABLE_ROWS", 600)
    space = spaces.Dict(a=box((64, 50), "f4"), b=box((64, 50), "f4"))
    plan = LeafPlan(axis=0, content="table", padding="fresh")
    pair = Pair(Stream(space, spaces.Discrete(2), plans=[plan, plan], mishaps=Mishaps(ends=0.02)), 20_000)
    pair.pass_ticks(1600)
    assert pair.memory.report().segments < 20


@pytest.mark.parametrize("repeated_ticks", [20, 50])
@pytest.mark.parametrize("shape", [(600, 3), (130, 3)], ids=["large", "moved from a ring"])
def test_a_window_found_behind_a_long_static_start_has_room(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], repeated_ticks: int
) -> None:
    """Ticks that are replayed into a new part fit it, however little of them is shared."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 1)
    still = LeafPlan(content="constant", later=LeafPlan(axis=0), later_from=repeated_ticks)
    pair = Pair(stream_of(shape, still, QUIET, "f4"), 5000).pass_ticks(80, compare_every=7)
    assert pair.observed.finding.startswith(f"window of {shape[0]} along axis 0")


@pytest.mark.parametrize("replayed_ticks", [4, 64])
@pytest.mark.parametrize("later_from", [3, 30, 90])
def test_a_wrapper_that_changes_its_mind_costs_memory_and_never_truth(
    monkeypatch: pytest.MonkeyPatch, replayed_ticks: int, later_from: int
) -> None:
    """The stack may move to another axis in the middle of a run; the new window is found in time."""
    monkeypatch.setattr(segment, "_REPLAYED_TICKS", replayed_ticks)
    plan = LeafPlan(axis=0, later=LeafPlan(axis=2), later_from=later_from)
    pair = Pair(stream_of((4, 300, 4), plan, QUIET, lanes=2), 320).pass_ticks(400, compare_every=20)
    assert pair.observed.finding.startswith("window of 4 along axis 2")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_block_of_other_slices_is_not_gone_on_in(monkeypatch: pytest.MonkeyPatch, axis: int) -> None:
    """When a field is cut anew, its next segment has a block of its own, however much the old one shared."""
    monkeypatch.setattr(segment, "_REPLAYED_TICKS", 4)
    plan = LeafPlan(axis=axis, repeats=0.7)  # observations shown several times make the block worth going on in
    pair = Pair(stream_of((6, 40, 40), plan, QUIET), 1600).pass_ticks(100, compare_every=1)
    assert pair.observed.finding.startswith(f"window of {(6, 40)[axis]} along axis {axis}")


def test_a_window_that_stops_fitting_is_given_up() -> None:
    """A field that no longer slides is stored whole again, and the report says so."""
    plan = LeafPlan(axis=0, later=LeafPlan(), later_from=30)
    pair = Pair(stream_of(STACKED, plan, QUIET), 160).pass_ticks(300, compare_every=30)
    assert pair.observed.finding == "whole observations"


@pytest.mark.parametrize("segment_bytes", [1, 50_000, segment.SEGMENT_BYTES])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(
    "mishaps",
    [Mishaps(ends=0.1, silent_resets=0.1), Mishaps(skipped_steps=0.2), Mishaps(foreign_next=0.3), Mishaps(ends=0.5)],
    ids=["resets", "skipped steps", "foreign next", "short episodes"],
)
def test_no_mishap_makes_a_row_wrong(
    monkeypatch: pytest.MonkeyPatch, segment_bytes: int, lanes: int, mishaps: Mishaps
) -> None:
    """Whatever does not shift as the window says is stored whole, in every lane on its own."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", segment_bytes)
    Pair(stream_of(STACKED, STACK, mishaps, lanes=lanes), 50).pass_ticks(120, compare_every=10)


def test_figures_of_what_is_shared_stay_between_none_and_all() -> None:
    """Where more is stored than an observation a step, none of it is shared; never less than none."""
    pair = Pair(stream_of(STACKED, STACK, QUIET), 16).pass_ticks(12)
    generator = np.random.default_rng(0)
    for _ in range(20):
        given = {**pair.stream.tick().arguments()}
        given["obs"] = generator.integers(0, 256, (1, *STACKED), np.uint8)
        given["next_obs"] = generator.integers(0, 256, (1, *STACKED), np.uint8)
        pair.memory.add(**given)
        finding = pair.observed.finding
        if "slices shared" in finding:
            assert 0 <= float(finding.split("; ")[1].split(" of ")[0]) <= 4

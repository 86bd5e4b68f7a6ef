"""Plans and packed runs against plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall._native import (
    FULL,
    ROLE_FLAGS,
    ROLE_OBSERVATION,
    ROLE_ROW,
    WRITTEN,
    PackedRun,
    Part,
    Reader,
    Segment,
    Writer,
)
from holdall.store.packed_columns import PackingPlan, find_plan

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Rng = np.random.Generator
ANY_SIZE = 1000.0  # `max_share` of runs that are packed even if that saves nothing.


def as_bytes(leaf: Array) -> Bytes:
    """Return a leaf of (ticks, lanes, ...) as (ticks, lanes, bytes)."""
    row_bytes = int(np.prod(leaf.shape[2:])) * leaf.itemsize
    return np.ascontiguousarray(leaf).view(np.uint8).reshape(*leaf.shape[:2], row_bytes)


def plan_for(leaves: list[Array]) -> PackingPlan | None:
    """Search a plan in all rows of leaves of (ticks, lanes, items)."""
    samples = [as_bytes(leaf).swapaxes(0, 1) for leaf in leaves]
    rows = leaves[0].shape[0] * leaves[0].shape[1]
    return find_plan([sample.reshape(rows, sample.shape[2]) for sample in samples], [leaf.itemsize for leaf in leaves])


def pack(plan: PackingPlan, leaves: list[Array], max_share: float = ANY_SIZE) -> PackedRun | None:
    ticks, lanes = leaves[0].shape[:2]
    return PackedRun.pack(plan, [as_bytes(leaf) for leaf in leaves], ticks, lanes, max_share=max_share)


def pack_anyway(plan: PackingPlan | None, leaves: list[Array]) -> PackedRun:
    assert plan is not None
    run = pack(plan, leaves)
    assert run is not None
    return run


def assert_reads(run: PackedRun, leaves: list[Array], rng: Rng) -> None:
    """Compare all rows of a run, in random order, with the leaves that were packed."""
    ticks, lanes = leaves[0].shape[:2]
    order = rng.permutation(ticks * lanes)
    for number, leaf in enumerate(leaves):
        expected = as_bytes(leaf).reshape(ticks * lanes, -1)[order]
        assert run.read(number, order).tobytes() == expected.tobytes()


# ---------------------------------------------------------------- what environments show


def draw_noise(rng: Rng, ticks: int, lanes: int) -> list[Array]:
    return [rng.standard_normal((ticks, lanes, 3))]


def draw_constants(rng: Rng, ticks: int, lanes: int) -> list[Array]:
    leaf = rng.standard_normal((ticks, lanes, 5)).astype("f4")
    leaf[:, :, [0, 3]] = 7
    return [leaf]


def draw_copies(rng: Rng, ticks: int, lanes: int) -> list[Array]:
    state = rng.standard_normal((ticks, lanes, 6))
    return [state, state[:, :, 2:5].copy()]


def draw_goals(rng: Rng, ticks: int, lanes: int) -> list[Array]:
    """Return a state and a goal that changes every 20 ticks."""
    goals = rng.standard_normal((ticks // 20 + 1, lanes, 4)).astype("f4")
    return [rng.standard_normal((ticks, lanes, 3)).astype("f4"), np.repeat(goals, 20, axis=0)[:ticks]]


def draw_histories(rng: Rng, ticks: int, lanes: int) -> list[Array]:
    """Return the last six values of two quantities, newest last, and the last four of another one, newest first."""
    values = rng.standard_normal((ticks + 6, lanes, 3)).astype("f4")
    forwards = np.stack([values[i : i + ticks, :, :2] for i in range(6)], axis=2).reshape(ticks, lanes, 12)
    backwards = np.stack([values[5 - i : 5 - i + ticks, :, 2] for i in range(4)], axis=2)
    return [forwards, backwards]


def draw_nan_payloads(rng: Rng, ticks: int, lanes: int) -> list[Array]:
    """Return NaNs that differ in their bits only, and both zeros."""
    bits = np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 0], np.uint32)
    leaf = rng.choice(bits, (ticks, lanes, 8)).view(np.float32)
    leaf[:, :, 2] = leaf[:, :, 5]
    leaf[:, :, 6] = np.array(0x7FC12345, np.uint32).view(np.float32)
    return [leaf]


def draw_small_items(rng: Rng, ticks: int, lanes: int) -> list[Array]:
    held = np.repeat(rng.integers(0, 256, (ticks // 9 + 1, lanes, 11)), 9, axis=0)[:ticks]
    return [held.astype("u1"), rng.integers(0, 3, (ticks, lanes, 5)).astype("i2"), rng.random((ticks, lanes, 1)) < 0.1]


KINDS: dict[str, Callable[[Rng, int, int], list[Array]]] = {
    "noise": draw_noise,
    "constants": draw_constants,
    "copies": draw_copies,
    "goals": draw_goals,
    "histories": draw_histories,
    "nan payloads": draw_nan_payloads,
    "small items": draw_small_items,
}


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    ticks=st.integers(1, 150),
    lanes=st.integers(1, 4),
    resets=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_reads_as_it_was_packed(kinds: list[str], ticks: int, lanes: int, resets: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    leaves = [leaf for kind in kinds for leaf in KINDS[kind](rng, ticks, lanes)]
    for at in rng.integers(0, ticks, resets):
        for leaf in leaves:
            leaf[at, rng.integers(lanes)] = rng.integers(0, 2, leaf.shape[2]).astype(leaf.dtype)
    plan = plan_for(leaves)
    run = None if plan is None else pack(plan, leaves)
    if run is None:
        return
    assert (run.ticks, run.lanes) == (ticks, lanes)
    assert_reads(run, leaves, rng)
    assert_reads(PackedRun.from_bytes(run.to_bytes()), leaves, rng)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(sorted(set(KINDS) - {"noise"})),
    ticks=st.integers(1, 200),
    lanes=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_plan_packs_rows_that_it_was_not_made_for(kind: str, ticks: int, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_for(KINDS[kind](rng, 100, 2))
    assert plan is not None
    leaves = KINDS[kind](rng, ticks, lanes)
    run = pack(plan, leaves)
    if run is not None:
        assert_reads(run, leaves, rng)


@pytest.mark.parametrize(
    ("kind", "max_share"),
    # The words that repeat take nearly nothing; the share is what the other words, and the cursors, take.
    [("constants", 0.62), ("copies", 0.68), ("goals", 0.55), ("histories", 0.36), ("nan payloads", 0.8)],
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_values_that_repeat_are_stored_once(kind: str, max_share: float, lanes: int) -> None:
    leaves = KINDS[kind](np.random.default_rng(5), 2000, lanes)
    run = pack_anyway(plan_for(leaves), leaves)
    assert run.nbytes <= max_share * sum(leaf.nbytes for leaf in leaves)
    assert sum(run.leaf_nbytes) <= run.nbytes


def test_there_is_no_plan_where_nothing_repeats() -> None:
    assert plan_for(draw_noise(np.random.default_rng(1), 100, 2)) is None


@pytest.mark.parametrize("ticks", [0, 1])
def test_there_is_no_plan_for_fewer_than_two_rows(ticks: int) -> None:
    assert plan_for([np.zeros((ticks, 1, 3), np.float32)]) is None


@pytest.mark.parametrize("shape", [(5, 1, 5000), (5, 1, 0)])
def test_there_is_no_plan_for_leaves_that_cannot_be_packed(shape: tuple[int, ...]) -> None:
    assert plan_for([np.zeros(shape, np.uint8)]) is None


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"noise"}))
def test_one_row_can_be_packed(kind: str) -> None:
    rng = np.random.default_rng(2)
    leaves = [leaf[:1, :1] for leaf in KINDS[kind](rng, 60, 1)]
    run = pack_anyway(plan_for(KINDS[kind](rng, 60, 1)), leaves)
    assert_reads(run, leaves, rng)


def test_rows_that_do_not_follow_the_plan_are_stored_whole() -> None:
    rng = np.random.default_rng(3)
    leaves = draw_copies(rng, 200, 2)
    plan = plan_for(leaves)
    leaves[1][[7, 90], 1] += 1
    run = pack_anyway(plan, leaves)
    assert run.exceptions == 2
    assert_reads(run, leaves, rng)


def test_rows_are_not_packed_if_too_many_of_them_do_not_follow_the_plan() -> None:
    rng = np.random.default_rng(4)
    plan = plan_for(draw_copies(rng, 200, 1))
    assert plan is not None
    assert pack(plan, [rng.standard_normal((200, 1, 6)), rng.standard_normal((200, 1, 3))]) is None


def test_rows_are_not_packed_if_the_run_takes_too_large_a_share() -> None:
    leaves = draw_copies(np.random.default_rng(4), 500, 1)
    plan = plan_for(leaves)
    assert plan is not None
    assert pack(plan, leaves, max_share=0.5) is None
    assert pack(plan, leaves, max_share=0.75) is not None


# ---------------------------------------------------------------- damaged bytes and wrong arguments


def some_run() -> tuple[PackedRun, list[Array]]:
    rng = np.random.default_rng(6)
    leaves = [*draw_histories(rng, 40, 2), *draw_goals(rng, 40, 2)]
    plan = plan_for(leaves)
    leaves[0][20, 1, 3] += 1
    return pack_anyway(plan, leaves), leaves


@pytest.mark.parametrize("length", [0, 1, 31, 32, 100, -4, -1])
def test_bytes_that_were_cut_off_raise(length: int) -> None:
    data = some_run()[0].to_bytes()
    with pytest.raises(ValueError, match="packed run is not valid"):
        PackedRun.from_bytes(data[:length])


def test_additional_bytes_raise() -> None:
    with pytest.raises(ValueError, match="length"):
        PackedRun.from_bytes(some_run()[0].to_bytes() + b"\0")


@settings(max_examples=300, deadline=None)
@given(places=st.lists(st.integers(0, 2**20), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_damaged_bytes_raise_or_can_be_read(places: list[int], seed: int) -> None:
    """Values carry no checksum here, but no damage makes a read leave the run."""
    rng = np.random.default_rng(seed)
    run, leaves = some_run()
    data = bytearray(run.to_bytes())
    tables_end = 32 + 16 * len(leaves) + 32 * 4
    for place in places:
        end = tables_end if rng.random() < 0.7 else len(data)
        data[place % end] = int(rng.integers(256))
    try:
        damaged = PackedRun.from_bytes(data)
    except ValueError:
        return
    for leaf, nbytes in enumerate(damaged.leaf_bytes):
        rows = np.arange(damaged.ticks * damaged.lanes)
        assert damaged.read(leaf, rows).shape == (len(rows), nbytes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"leaf_bytes": ()}, "leaves"),
        ({"groups": ()}, "groups"),
        ({"groups": ((4, 1, True), (0, 1, False))}, "no frames"),
        ({"groups": ((4, 2, True),)}, "dense group"),
        ({"pieces": (((0, 0, 4, 1, 0, 0, False),),)}, "not covered"),
        ({"pieces": (((0, 0, 4, 2, 0, 8, False),),)}, "outside of its frames"),
        ({"pieces": (((0, 0, 8, 1, 0, 0, False), (0, 4, 4, 1, 4, 0, False)),)}, "overlap"),
        ({"pieces": (((1, 0, 8, 1, 0, 0, False),),)}, "no group"),
    ],
)
def test_inconsistent_plans_raise(changed: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "leaf_bytes": (8,),
        "groups": ((8, 1, True),),
        "pieces": (((0, 0, 8, 1, 0, 0, False),),),
    }
    rows = [np.zeros((3, 1, 8), np.uint8)]
    pack_anyway(PackingPlan(**fields), rows)
    with pytest.raises(ValueError, match=message):
        pack(PackingPlan(**{**fields, **changed}), rows)


def test_rows_of_another_size_raise() -> None:
    plan = plan_for(draw_copies(np.random.default_rng(4), 50, 1))
    assert plan is not None
    with pytest.raises(ValueError, match="bytes"):
        pack(plan, [np.zeros((5, 1, 6)), np.zeros((5, 1, 2))])
    with pytest.raises(ValueError, match="buffers"):
        pack(plan, [np.zeros((5, 1, 6))])


@pytest.mark.parametrize(("leaf", "row"), [(-1, 0), (4, 0), (0, -1), (0, 80)])
def test_rows_outside_of_the_run_raise(leaf: int, row: int) -> None:
    with pytest.raises(IndexError):
        some_run()[0].read(leaf, [row])


# ---------------------------------------------------------------- packed parts

STATE, GOAL, ACTION, REWARD, FLAGS = range(5)
LAYOUTS = (("shared",), ("shared",), None, None, None)
OUTPUTS = (0, 1, 2, 3, 4)


def new_writer(lanes: int, segment_ticks: int) -> Writer:
    columns = (
        (ROLE_OBSERVATION, int(np.dtype("f8").num), (6,)),
        (ROLE_OBSERVATION, int(np.dtype("f8").num), (3,)),
        (ROLE_ROW, int(np.dtype("i8").num), ()),
        (ROLE_ROW, int(np.dtype("f8").num), ()),
        (ROLE_FLAGS, int(np.dtype("u1").num), ()),
    )
    groups = ((2, ("state", "goal")), (1, None), (0, None))
    return Writer(columns, groups, lanes, 10_000, segment_ticks, 1 << 20, LAYOUTS)


def draw_observation(rng: Rng, lanes: int) -> list[Array]:
    state = rng.standard_normal((lanes, 6))
    state[:, 1] = 2.5
    return [state, state[:, 3:].copy()]


def write_episodes(writer: Writer, rng: Rng, lanes: int, ticks: int) -> list[Array]:
    """Write ticks in which every tenth next observation is not the following observation. Return what was written.

    The result has state, next state, goal, next goal and action as (ticks * lanes, ...).
    """
    steps = []
    obs = draw_observation(rng, lanes)
    for tick in range(ticks):
        next_obs = draw_observation(rng, lanes)
        action = rng.integers(0, 9, lanes)
        is_end = np.full(lanes, False)
        is_end[tick % lanes] = tick % 10 == 9
        arguments = (tuple(obs), action, np.zeros(lanes), tuple(next_obs), is_end, ~is_end)
        status = writer.append(*arguments)
        if status == FULL:
            writer.roll()
            status = writer.append(*arguments)
        assert status == WRITTEN
        steps.append([obs[0], next_obs[0], obs[1], next_obs[1], action])
        first = draw_observation(rng, lanes)
        obs = [np.where(is_end[:, None], new, old) for new, old in zip(first, next_obs, strict=True)]
    return [np.concatenate(arrays) for arrays in zip(*steps, strict=True)]


def pack_segment(segment: Segment) -> dict[int, Part]:
    """Return packed parts for the observations of a closed segment."""
    shape = (segment.ticks + 1, segment.lanes, -1)
    rows = [segment.parts[column].arrays()["rows"].view(np.float64).reshape(shape) for column in (STATE, GOAL)]
    run = pack_anyway(plan_for(rows), rows)
    return {column: Part.pack(run, column, segment.parts[column]) for column in (STATE, GOAL)}


def assert_gathers(writer: Writer, written: list[Array], rng: Rng) -> None:
    ids = rng.permutation(len(written[0]))
    for got, expected in zip(Reader().gather(writer.catalog, ids, OUTPUTS), written, strict=True):
        assert got.tobytes() == expected[ids].tobytes()


@pytest.mark.parametrize(("lanes", "ticks"), [(1, 1), (1, 95), (3, 64), (3, 257)])
def test_gather_reads_packed_segments_as_they_were_written(lanes: int, ticks: int) -> None:
    rng = np.random.default_rng(7)
    writer = new_writer(lanes, segment_ticks=64)
    written = write_episodes(writer, rng, lanes, ticks)
    writer.roll()
    plain_bytes = 0
    packed_bytes = 0
    exceptions = 0
    for segment in writer.catalog.segments[:-1]:
        if segment.ticks * lanes < 2:
            continue
        parts = pack_segment(segment)
        plain_bytes += sum(segment.parts[column].nbytes for column in parts)
        packed_bytes += sum(part.nbytes for part in parts.values())
        exceptions += sum(part.exceptions for part in parts.values())
        assert writer.replace(segment, parts)
    kinds = {segment.parts[STATE].kind for segment in writer.catalog.segments[:-1] if segment.ticks * lanes > 1}
    assert kinds <= {"packed"}
    assert_gathers(writer, written, rng)
    if ticks >= 64:
        assert packed_bytes < 0.75 * plain_bytes
        assert exceptions > 0


@pytest.fixture
def packed_part() -> Part:
    rng = np.random.default_rng(8)
    writer = new_writer(2, segment_ticks=50)
    write_episodes(writer, rng, 2, 50)
    segment = writer.roll()
    assert segment is not None
    return pack_segment(segment)[GOAL]


def test_packed_parts_are_restored_from_their_arrays(packed_part: Part) -> None:
    arrays = packed_part.arrays()
    assert packed_part.packed is not None
    assert arrays["run"].tobytes() == packed_part.packed[0].to_bytes()
    assert "exceptions" in arrays
    for run in (arrays["run"], packed_part.packed[0]):
        restored = Part.restore("packed", 50, 2, 24, {**arrays, "run": run}, None, None)
        assert restored.kind == "packed"
        assert {name: array.tobytes() for name, array in restored.arrays().items()} == {
            name: array.tobytes() for name, array in arrays.items()
        }


@pytest.mark.parametrize(
    "changed",
    [
        {"run": b"HPK1"},
        {"leaf": np.array([2], np.uint32)},
        {"leaf": np.array([0], np.uint32)},  # A leaf with rows of another size.
        {"leaf": np.array([1], np.int64)},
        {"exception_rows": np.array([100], np.uint32)},
    ],
)
def test_damaged_arrays_of_packed_parts_raise(packed_part: Part, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Part.restore("packed", 50, 2, 24, {**packed_part.arrays(), **changed}, None, None)


@pytest.mark.parametrize(("ticks", "lanes"), [(49, 2), (51, 2), (101, 1)])
def test_runs_of_another_length_raise(packed_part: Part, ticks: int, lanes: int) -> None:
    with pytest.raises(ValueError, match="observations"):
        Part.restore("packed", ticks, lanes, 24, packed_part.arrays(), None, None)


def test_only_shared_parts_can_be_packed(packed_part: Part) -> None:
    assert packed_part.packed is not None
    with pytest.raises(ValueError, match="'packed'"):
        Part.pack(packed_part.packed[0], GOAL, packed_part)


def test_a_value_that_nearly_equals_another_one_is_stored_as_a_copy() -> None:
    """A tenth of the rows is then stored whole, which costs less than a value in every row."""
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1_000, 1, 3))
    nearly_equal = state[:, :, :1].copy()
    nearly_equal[:100] = rng.standard_normal((100, 1, 1))
    leaf = np.concatenate([state, nearly_equal], axis=2)
    run = pack_anyway(plan_for([leaf]), [leaf])
    assert_reads(run, [leaf], rng)
    assert run.nbytes < 0.9 * leaf.nbytes

"""Writer and Reader against a plain list of what was written."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall._native import (
    FLAG_TERMINATED,
    FLAG_TRUNCATED,
    FULL,
    ROLE_FLAGS,
    ROLE_OBSERVATION,
    ROLE_ROW,
    UNCHECKED,
    WRITTEN,
    Block,
    Part,
    Reader,
    Segment,
    Writer,
)

Array = NDArray[Any]
SHARED = ("shared",)
PAIRED = ("paired",)
STACK = ("sliced", 4, 1, 6, 1)  # Four frames of six bytes on the first axis.
LAST_AXIS = ("sliced", 3, 4, 2, 1)  # Three slices of uint16 on the last axis.
OBS, FRAMES, TABLE, ACTION, REWARD, EXTRA, FLAGS = range(7)
OUTPUTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 13)


def columns() -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    def number(dtype: str) -> int:
        return int(np.dtype(dtype).num)

    return (
        (ROLE_OBSERVATION, number("f4"), (3,)),
        (ROLE_OBSERVATION, number("u1"), (4, 2, 3)),
        (ROLE_OBSERVATION, number("u2"), (4, 3)),
        (ROLE_ROW, number("i8"), ()),
        (ROLE_ROW, number("f8"), ()),
        (ROLE_ROW, number("f4"), (2,)),
        (ROLE_FLAGS, number("u1"), ()),
    )


GROUPS = ((3, ("obs", "frames", "table")), (1, None), (1, ("extra",)))


def layouts(*, paired: bool = False, sliced: bool = True) -> tuple[Any, ...]:
    whole = (("sliced", 1, 1, 24, 1), ("sliced", 1, 1, 24, 1))
    return (PAIRED if paired else SHARED, *((STACK, LAST_AXIS) if sliced else whole), None, None, None, None)


def new_writer(lanes: int, capacity: int, *, segment_ticks: int = 5, block_bytes: int = 200, **kind: bool) -> Writer:
    return Writer(columns(), GROUPS, lanes, capacity, segment_ticks, block_bytes, layouts(**kind))


class World:
    """Steps whose observations overlap as those of real environments do, and sometimes do not."""

    def __init__(self, lanes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.lanes = lanes
        self.now = self.fresh()
        self.steps: list[dict[str, Any]] = []  # What was written, tick by tick.

    def fresh(self) -> dict[str, Array]:
        draw = self.rng.integers
        return {
            "obs": self.rng.standard_normal((self.lanes, 3)).astype("f4"),
            "frames": draw(0, 3, (self.lanes, 4, 2, 3)).astype("u1"),
            "table": draw(0, 3, (self.lanes, 4, 3)).astype("u2"),
        }

    def advance(self, now: dict[str, Array]) -> dict[str, Array]:
        new = self.fresh()
        frames = np.concatenate([now["frames"][:, 1:], new["frames"][:, :1]], axis=1)
        table = np.concatenate([now["table"][:, :, 1:], new["table"][:, :, :1]], axis=2)
        return {"obs": new["obs"], "frames": frames, "table": table}

    def step(self) -> tuple[Any, ...]:
        now = self.now
        after = self.fresh() if self.rng.random() < 0.1 else self.advance(now)
        ends = self.rng.random((2, self.lanes)) < 0.2
        extras = {"extra": self.rng.standard_normal((self.lanes, 2)).astype("f4")}
        valid = None if self.rng.random() < 0.7 else self.rng.random(self.lanes) < 0.8
        action = self.rng.integers(0, 9, self.lanes)
        reward = self.rng.standard_normal(self.lanes)
        self.now = self.fresh() if self.rng.random() < 0.1 else after
        return now, action, reward, after, ends[0], ends[1], extras, valid

    def record(self, step: tuple[Any, ...]) -> None:
        obs, action, reward, next_obs, terminated, truncated, extras, valid = step
        rows = [obs["obs"], next_obs["obs"], obs["frames"], next_obs["frames"], obs["table"], next_obs["table"]]
        rows += [action, reward, extras["extra"], terminated, truncated]
        self.steps.append({"rows": [np.array(row) for row in rows], "valid": valid})


def check(world: World, writer: Writer, reader: Reader, catalog: Any = None) -> None:
    """Compare every held transition, in random order, with what was recorded."""
    catalog = catalog or writer.catalog
    ids = np.arange(catalog.first_tick * world.lanes, catalog.next_tick * world.lanes)
    world.rng.shuffle(ids)
    got = reader.gather(catalog, ids, OUTPUTS)
    for position, output in enumerate(got):
        expected = [world.steps[i // world.lanes]["rows"][position][i % world.lanes] for i in ids.tolist()]
        if ids.size:
            assert output.tobytes() == np.stack(expected).tobytes(), position
    missing = sum(
        0 if step["valid"] is None else int((~step["valid"]).sum())
        for step in world.steps[catalog.first_tick : catalog.next_tick]
    )
    assert catalog.invalid_count == missing


def write(world: World, writer: Writer) -> None:
    step = world.step()
    outcome = writer.append(*step)
    if outcome == FULL:
        writer.roll()
        outcome = writer.append(*step)
    assert outcome == WRITTEN
    world.record(step)


def rebuilt(segment: Segment) -> Segment:
    """Return a copy of a segment that went through the arrays of its parts."""
    sizes = [12, 24, 24, 8, 8, 8, 1]
    parts = [
        Part.restore(part.kind, segment.ticks, segment.lanes, row_bytes, part.arrays(), part.layout, closed_block(part))
        for part, row_bytes in zip(segment.parts, sizes, strict=True)
    ]
    return Segment(segment.first_tick, segment.ticks, segment.lanes, parts)


def closed_block(part: Part) -> Block | None:
    """Return a copy of the slices that a part may name."""
    if part.block is None:
        return None
    return Block(part.block.slice_bytes, part.slice_count, part.block.read(0, part.slice_count))


def test_an_adopted_segment_replaces_the_open_one() -> None:
    """Nothing but the caller refers to the earlier open segment afterwards."""
    world = World(2, seed=0)
    writer = new_writer(2, 40)
    write(world, writer)
    writer.roll()
    earlier = writer.catalog.last_segment
    writer.adopt(rebuilt(writer.catalog.segments[0]))
    alone = object()
    assert sys.getrefcount(earlier) == sys.getrefcount(alone)


@settings(max_examples=40, deadline=None)
@given(
    lanes=st.sampled_from([1, 2, 5]),
    capacity=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    moves=st.lists(
        st.sampled_from(["write", "write", "write", "roll", "cut", "evict", "rewrite", "adopt"]), max_size=60
    ),
    is_paired=st.booleans(),
)
def test_every_held_tick_reads_as_it_was_written(
    lanes: int, capacity: int, seed: int, moves: list[str], *, is_paired: bool
) -> None:
    world = World(lanes, seed)
    writer = new_writer(lanes, capacity, paired=is_paired, sliced=False)
    reader = Reader()
    snapshots: list[tuple[Any, list[dict[str, Any]]]] = []
    for move in moves:
        if move == "write":
            for _ in range(int(world.rng.integers(1, 8))):
                write(world, writer)
        elif move == "roll":
            writer.roll()
        elif move == "cut":
            snapshots.append((writer.snapshot(), [dict(step, rows=list(step["rows"])) for step in world.steps]))
            writer.roll(layouts(paired=bool(world.rng.integers(2))))
        elif move == "evict":
            writer.evict(int(world.rng.integers(writer.first_tick, writer.next_tick + 2)))
        elif move == "rewrite" and writer.next_tick > writer.first_tick:
            ids = world.rng.integers(writer.first_tick * lanes, writer.next_tick * lanes, 4)
            rows = world.rng.standard_normal((4, 2)).astype("f4")
            writer.rewrite(ids, (EXTRA,), (rows,))
            for i, row in zip(ids.tolist(), rows, strict=True):
                changed = world.steps[i // lanes]["rows"]
                changed[8] = changed[8].copy()
                changed[8][i % lanes] = row
        elif move == "adopt" and len(writer.catalog.segments) > 1:
            writer.roll()
            taken = writer.catalog.segments[0]
            first = writer.adopt(rebuilt(taken))
            assert first == len(world.steps)
            copies = world.steps[taken.first_tick : taken.first_tick + taken.ticks]
            world.steps += [dict(step, rows=list(step["rows"])) for step in copies]
        assert writer.next_tick - writer.first_tick <= capacity
        check(world, writer, reader)
    for catalog, steps in snapshots:
        past = World(lanes, seed)
        past.steps = steps
        check(past, writer, reader, catalog)


def test_arguments_that_do_not_fit_write_nothing() -> None:
    world = World(2, 0)
    writer = new_writer(2, 10)
    step = list(world.step())
    for position, wrong in [
        (0, {"obs": step[0]["obs"]}),
        (0, dict(step[0], obs=step[0]["obs"].astype("f8"))),
        (1, step[1].tolist()),
        (2, step[2][:1]),
        (3, dict(step[3], frames=step[3]["frames"][:, :3])),
        (4, step[4].astype("u1")),
        (6, None),
        (7, [True, False]),
    ]:
        arguments = [*step[:position], wrong, *step[position + 1 :]]
        assert writer.append(*arguments) == UNCHECKED
    assert writer.next_tick == 0
    with pytest.raises(TypeError, match="6 to 9 arguments"):
        writer.append(*step[:5])


def test_arrays_in_another_memory_order_are_stored_in_c_order() -> None:
    world = World(2, 1)
    writer = new_writer(2, 10)
    step = list(world.step())
    for position in (0, 3):
        step[position] = {key: np.asfortranarray(value) for key, value in step[position].items()}
    assert writer.append(*step) == WRITTEN
    world.record(tuple(step))
    check(world, writer, Reader())


def test_extend_writes_the_steps_that_append_would_write() -> None:
    world = World(3, 2)
    steps = [world.step() for _ in range(17)]
    for step in steps:
        world.record(step)
    obs, next_obs = (tuple(np.stack([step[at][key] for step in steps]) for key in GROUPS[0][1]) for at in (0, 3))
    rest = {at: np.stack([step[at] for step in steps]) for at in (1, 2, 4, 5)}
    extras = (np.stack([step[6]["extra"] for step in steps]),)
    valid = np.stack([np.ones(3, bool) if step[7] is None else step[7] for step in steps])
    arguments = (obs, (rest[1],), rest[2], next_obs, rest[4], rest[5], extras, valid)
    writer = new_writer(3, 100)
    written = 0
    while written < len(steps):
        written += writer.extend(arguments, np.array([written]))
        writer.roll()
    check(world, writer, Reader())


@pytest.mark.parametrize("capacity", [7, 100])
def test_only_transitions_of_an_early_eviction_count_as_dropped_early(capacity: int) -> None:
    """Invalid entries do not count, nor ticks that the capacity or an earlier eviction dropped."""
    world = World(3, 5)
    writer = new_writer(3, capacity)
    for _ in range(23):
        write(world, writer)

    def count_held() -> int:
        catalog = writer.catalog
        return (catalog.next_tick - catalog.first_tick) * 3 - catalog.invalid_count

    writer.evict(writer.first_tick + 1)
    assert writer.dropped_early == 0
    expected = 0
    for before_tick in (2, 19, 20, 20, 22, 99):
        held = count_held()
        writer.evict(before_tick, True)
        expected += held - count_held()
        assert writer.dropped_early == expected
    assert count_held() == 0
    assert expected > 0


def test_an_id_that_is_not_held_raises_index_error() -> None:
    world = World(2, 3)
    writer = new_writer(2, 4)
    for _ in range(9):
        write(world, writer)
    for wrong in (-1, writer.first_tick * 2 - 1, writer.next_tick * 2):
        with pytest.raises(IndexError, match="is not held"):
            Reader().gather(writer.catalog, np.array([wrong]), OUTPUTS)
        with pytest.raises(IndexError, match="is not held"):
            writer.rewrite(np.array([wrong]), (EXTRA,), (np.zeros((1, 2), "f4"),))


def test_ids_are_a_contiguous_array_of_one_dimension() -> None:
    world = World(2, 3)
    writer = new_writer(2, 4)
    for _ in range(9):
        write(world, writer)
    ids = writer.first_tick * 2 + np.arange(8)
    refused: list[Any] = [ids[::2], ids.reshape(2, 4), ids.astype(np.int32)]
    for wrong in refused:
        with pytest.raises(TypeError, match="contiguous array of int64"):
            Reader().gather(writer.catalog, wrong, OUTPUTS)


@pytest.mark.parametrize(
    ("column", "change"),
    [
        (FRAMES, {"cursors": np.full(4, 90, "u4")}),
        (FRAMES, {"log": np.full(40, 60_000, "u2")}),
        (FRAMES, {"log": np.zeros(41, "u2")}),
        (OBS, {"rows": np.zeros(5, "u1")}),
        (OBS, {"exception_rows": np.array([4], "u4"), "exceptions": np.zeros(12, "u1")}),
        (OBS, {"exception_rows": np.array([1, 1], "u4"), "exceptions": np.zeros(24, "u1")}),
    ],
)
def test_damaged_arrays_are_refused(column: int, change: dict[str, Array]) -> None:
    world = World(2, 4)
    writer = new_writer(2, 10)
    for _ in range(2):
        write(world, writer)
    segment = writer.roll()
    assert segment is not None
    part = segment.parts[column]
    row_bytes = 12 if column == OBS else 24
    with pytest.raises(ValueError, match=r"\w"):
        Part.restore(part.kind, 2, 2, row_bytes, {**part.arrays(), **change}, part.layout, closed_block(part))


def test_the_memory_of_freed_batches_is_used_again_but_not_that_of_batches_in_use() -> None:
    shape = (4, 64, 64)
    layout = ("sliced", 4, 1, 64 * 64, 1)
    native = (
        (ROLE_OBSERVATION, int(np.dtype("u1").num), shape),
        (ROLE_ROW, int(np.dtype("i8").num), ()),
        (ROLE_ROW, int(np.dtype("f8").num), ()),
        (ROLE_FLAGS, int(np.dtype("u1").num), ()),
    )
    writer = Writer(native, ((1, None), (1, None), (0, None)), 1, 100, 100, 1 << 24, (layout, None, None, None))
    images = [np.full((1, *shape), i, np.uint8) for i in range(61)]
    for i in range(60):
        assert writer.append(images[i], np.zeros(1, np.int64), np.zeros(1), images[i + 1], False, False) == WRITTEN
    reader = Reader(max_kept_bytes=1 << 24)
    living: list[tuple[int, Array]] = []
    addresses = set()
    for i in range(40):
        batch, _ = reader.gather(writer.catalog, np.full(16, i), (0, 1))
        addresses.add(batch.ctypes.data)
        if i % 3 == 0:
            living.append((i, batch))
        del batch
        for number, array in living:
            assert (array == number).all()
    assert len(addresses) < 40


@pytest.mark.parametrize("lanes", [2, 100])
def test_info_dicts_say_which_steps_a_time_limit_ended(lanes: int) -> None:
    columns = ((0, np.dtype("f4").num, (3,)), (1, np.dtype("f4").num, ()), (1, np.dtype("f4").num, ()))
    flags = (2, np.dtype("u1").num, ())
    layouts = (("shared",), None, None, None)
    writer = Writer((*columns, flags), ((1, None), (1, None), (0, None)), lanes, 10, 5, 1000, layouts)
    obs = np.zeros((lanes, 3), "f4")
    row = np.zeros(lanes, "f4")
    done = np.arange(lanes) < 2
    infos = [{"TimeLimit.truncated": lane in {0, 5}, "episode": lane} for lane in range(lanes)]

    assert writer.append(obs, row, row, obs, done, None, None, None, infos) == WRITTEN
    assert writer.append(obs, row, row, obs, done, None, None, None, infos[1:]) == UNCHECKED
    assert writer.append(obs, row, row, obs, done, None, None, None, [None] * lanes) == UNCHECKED
    assert writer.append(obs, row, row, obs, done, None) == UNCHECKED

    read = Reader().gather(writer.catalog, np.arange(lanes), (6, 7, 8, 9))
    truncated = np.array([info["TimeLimit.truncated"] for info in infos])
    terminated = done ^ truncated
    np.testing.assert_array_equal(read[0], terminated)
    np.testing.assert_array_equal(read[1], truncated)
    np.testing.assert_array_equal(read[2], terminated * FLAG_TERMINATED | truncated * FLAG_TRUNCATED)
    np.testing.assert_array_equal(read[3], (terminated & ~truncated).astype("f4")[:, None])
    assert all(array.ctypes.data % 64 == 0 for array in read)

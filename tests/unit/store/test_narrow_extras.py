"""Extras whose values need fewer than four bytes take fewer bytes, and stay exact when a value does not fit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall._native import Part, Segment
from holdall.store.columns import Columns
from holdall.store.format import pack_segment, unpack_segment
from holdall.store.tuning import Tuning
from holdall.testing import assert_same_bits

LANES = 2
TICKS = 64
SHAPE = (3, 7)
SMALL_SEGMENTS = Tuning(max_segment_ticks=16, segments_per_capacity=4, min_segment_ticks=16)
KINDS = ("bits", "halves", "rows")

Rows = NDArray[np.float32]


def make_rows(kind: str, count: int, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Rows:
    """Return rows that a part of this kind can represent, and no narrower one."""
    words = np.random.default_rng(seed).integers(0, 2**32, (count, *shape), np.uint32)
    if kind == "bits":
        return (words & 1).astype(np.float32)
    if kind == "halves":
        words &= np.uint32(0xFFFF0000)
        words[0, 0, 0] = 0x7FA10000  # A signalling NaN with a payload.
    return words.view(np.float32)


def make_memory(rows: Rows, **settings: Any) -> ReplayMemory:
    """Return a memory whose only extra has `rows`."""
    memory = ReplayMemory(
        spaces.Box(0, 9, (2,), np.float32),
        spaces.Discrete(2),
        max(len(rows), TICKS * LANES),
        LANES,
        extras={"latent": spaces.Box(-np.inf, np.inf, rows.shape[1:], np.float32)},
        **{"_tuning": SMALL_SEGMENTS, **settings},
    )
    ticks = len(rows) // LANES
    zeros = np.zeros((ticks, LANES))
    memory.extend(
        obs=np.zeros((ticks, LANES, 2), np.float32),
        action=zeros.astype(np.int64),
        reward=zeros,
        next_obs=np.zeros((ticks, LANES, 2), np.float32),
        terminated=zeros.astype(np.bool_),
        truncated=zeros.astype(np.bool_),
        extras={"latent": rows.reshape(ticks, LANES, *rows.shape[1:])},
    )
    return memory


def find_kinds(memory: ReplayMemory) -> list[str]:
    """Return the kinds of the closed parts of the extra."""
    column = memory.store.columns.first_extra
    return [segment.parts[column].kind for segment in memory.host_store.catalog.segments[:-1]]


def read(memory: ReplayMemory) -> Rows:
    rows: Rows = memory.gather(np.arange(memory.first_id, memory.next_id)).extras["latent"]
    return rows


def assert_equal(rows: Rows, expected: Rows) -> None:
    assert rows.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("kind", "row_bytes"), [("bits", 3), ("halves", 42), ("rows", 84)])
def test_a_closed_segment_stores_values_in_the_fewest_bytes(kind: str, row_bytes: int) -> None:
    rows = make_rows(kind, TICKS * LANES)
    with make_memory(rows) as memory:
        assert find_kinds(memory) == [kind] * 3
        assert_equal(read(memory), rows)
        part = memory.host_store.catalog.segments[0].parts[memory.store.columns.first_extra]
        assert part.row_bytes == 84
        assert part.arrays()["rows"].nbytes == 16 * LANES * row_bytes


@pytest.mark.parametrize("held", KINDS)
@pytest.mark.parametrize("new", KINDS)
def test_rewritten_rows_are_exact_and_widen_only_the_segments_that_need_it(held: str, new: str) -> None:
    rows = make_rows(held, TICKS * LANES)
    with make_memory(rows) as memory:
        ids = np.array([70, 5, 33, 5])  # Of all closed segments, the second twice.
        for seed in range(3):
            written = make_rows(new, len(ids), seed)
            memory.update(ids, latent=written)
            rows[ids[[0, 2, 3]]] = written[[0, 2, 3]]
            assert_equal(read(memory), rows)
        widest = max(held, new, key=KINDS.index)
        assert find_kinds(memory) == [widest] * 3
        memory.update([6], latent=make_rows("rows", 1))
        assert find_kinds(memory) == ["rows", widest, widest]


def test_a_part_is_widened_twice_by_one_update() -> None:
    rows = make_rows("bits", TICKS * LANES)
    with make_memory(rows) as memory:
        ids = np.array([3, 4, 5])
        rows[ids] = np.concatenate([make_rows("bits", 1), make_rows("halves", 1), make_rows("rows", 1)])
        memory.update(ids, latent=rows[ids])
        assert find_kinds(memory) == ["rows", "bits", "bits"]
        assert_equal(read(memory), rows)


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("value", [-0.0, np.float32(1) + np.finfo(np.float32).eps, 1e-45, np.nan, -1.0])
def test_one_value_that_does_not_fit_is_kept(place: int, value: float) -> None:
    rows = make_rows("bits", TICKS * LANES)
    with make_memory(rows) as memory:
        rows[7].reshape(-1)[place] = value
        memory.update([7], latent=rows[7:8])
        assert_equal(read(memory), rows)
    with make_memory(rows) as memory:
        assert find_kinds(memory)[0] != "bits"
        assert_equal(read(memory), rows)


def test_zeros_stay_rows_because_they_are_placeholders() -> None:
    with make_memory(np.zeros((TICKS * LANES, *SHAPE), np.float32)) as memory:
        assert find_kinds(memory) == ["rows"] * 3


def test_other_dtypes_and_fields_stay_rows() -> None:
    extras: dict[str, spaces.Space[Any]] = {
        "count": spaces.Box(0, 9, (2,), np.int32),
        "half": spaces.Box(0, 9, (2,), np.float16),
    }
    memory = ReplayMemory(
        spaces.Box(0, 9, (2,), np.float32),
        spaces.Box(0, 1, (2,), np.float32),
        64,
        extras=extras,
        _tuning=SMALL_SEGMENTS,
    )
    ones = np.ones((40, 1, 2), np.float32)
    flags = np.zeros((40, 1), np.bool_)
    values = {"count": ones.astype(np.int32), "half": ones.astype(np.float16)}
    memory.extend(ones, ones, flags.astype(np.float32), ones, flags, flags, values)
    parts = memory.host_store.catalog.segments[0].parts[1:]
    assert {part.kind for part in parts} == {"rows"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_keeps_the_rows_of_its_moment(kind: str) -> None:
    rows = make_rows("bits", TICKS * LANES)
    with make_memory(rows) as memory:
        state = memory.store.snapshot()
        memory.update(np.arange(0, 100, 7), latent=make_rows(kind, 15))
        with make_memory(rows[:0]) as copy:
            copy.store.restore(state)
            assert_equal(read(copy), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_and_pickles_keep_narrow_parts(kind: str, tmp_path: Path) -> None:
    rows = make_rows(kind, TICKS * LANES)
    with make_memory(rows) as memory:
        memory.save(tmp_path / "run").result(60)
        memory.update([7], latent=make_rows("halves", 1))
        rows[7] = make_rows("halves", 1)
        memory.save(tmp_path / "run").result(60)
        with ReplayMemory.load(tmp_path / "run") as loaded:
            assert find_kinds(loaded)[1:3] == [kind] * 2
            assert_equal(read(loaded), rows)
            loaded.update([8], latent=make_rows("rows", 1))
            rows[8] = make_rows("rows", 1)
            assert_equal(read(loaded), rows)
        copied = pickle.loads(pickle.dumps(memory, protocol=5))
        assert find_kinds(copied)[1:3] == [kind] * 2
        copied.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_that_is_sent_arrives_as_it_was(kind: str) -> None:
    rows = make_rows(kind, TICKS * LANES)
    with make_memory(rows) as memory:
        segment = memory.host_store.catalog.segments[1]
        columns = Columns(memory.schema)
        arrived = unpack_segment(pack_segment(segment), columns)
        part = arrived.parts[columns.first_extra]
        assert part.kind == kind
        assert_same_bits(part.arrays(), segment.parts[columns.first_extra].arrays())


def test_narrow_parts_of_other_columns_are_refused() -> None:
    """A damaged file cannot make a memory read integers as narrow floats."""
    with pytest.raises(ValueError, match="are not float32"):
        Part.restore("halves", 4, 1, 6, {"rows": np.zeros(12, np.uint8)}, None, None)
    with pytest.raises(ValueError, match="another dtype or length than 4"):
        Part.restore("bits", 4, 1, 32, {"rows": np.zeros(5, np.uint8)}, None, None)
    with make_memory(make_rows("rows", TICKS * LANES)) as memory:
        segment = memory.host_store.catalog.segments[0]
        rows = {"rows": np.zeros(16 * LANES * 4, np.uint8)}
        action = Part.restore("halves", 16, LANES, 8, rows, None, None)
        parts = [*segment.parts[:1], action, *segment.parts[2:]]
        with pytest.raises(ValueError, match="other columns or lanes"):
            memory.host_store.adopt(Segment(0, segment.ticks, LANES, parts))


def test_the_report_says_how_an_extra_is_stored() -> None:
    with make_memory(make_rows("bits", TICKS * LANES)) as memory:
        field = next(field for field in memory.report().fields if field.name == "extras.latent")
        assert field.finding == "rows of 1 bit per value, because all values are 0 or 1"


def test_extras_that_grow_are_compared_with_the_budget_at_once() -> None:
    """A limit that one bit per value meets, and four bytes do not: the oldest transitions are dropped."""
    rows = make_rows("bits", 1024, shape=(32, 32))
    with make_memory(rows, budget=rows.nbytes // 2, _tuning=None) as memory:
        assert len(memory) == 1024
        memory.update(np.arange(900), latent=make_rows("rows", 900, shape=(32, 32)))
        assert 0 < len(memory) < 1024
        assert memory.report().total_bytes < rows.nbytes // 2

"""The short fields of a batch: C, NumPy and a plain loop over rows copy the same bytes; and draws are NumPy's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall import ReplayMemory, TransitionIdError
from holdall.native import chosen_kernels, draw_slots
from holdall.schema import Bytes
from holdall.storage import ALIGNMENT_BYTES, COLUMN_FIELDS, Kernels, address, fresh_bytes
from holdall.testing import LeafPlan, Stream
from holdall.testing.strategies import box

SIZES = (0, 1, 2, 4, 7, 8, 12, 16, 33, 840)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return chosen_kernels()


class Columns:
    """Rings of random bytes, some with rows that stand apart, and what a plain loop reads from them."""

    def __init__(self, seed: int, ring_ticks: int, lanes: int) -> None:
        rng = np.random.default_rng(seed)
        self.ring_rows, self.lanes = ring_ticks * lanes, lanes
        next_tick = int(rng.integers(1, 4 * ring_ticks))
        self.held = (max(0, next_tick - ring_ticks + 1) * lanes, next_tick * lanes)
        self.rings, self.apart = [], []
        rows = []
        for size in rng.permutation(SIZES).tolist():
            ring = rng.integers(0, 256, (self.ring_rows, size), np.uint8)
            later, block = (lanes, 0) if rng.random() < 0.5 else (0, 1)
            some = np.sort(
                rng.choice(np.arange(*self.held), int(rng.integers(0, self.held[1] - self.held[0] + 1)), False)
            )
            ids = some if later else some[:0]
            kept = rng.integers(0, 256, (len(ids), size), np.uint8)
            self.rings.append((ring, later, block))
            self.apart.append((ids, kept))
            rows.append([address(ring), size, later, block, len(ids), address(ids), address(kept), 0, 0, 0])
        self.flags = rng.integers(0, 2, (2, self.ring_rows), np.uint8)
        rows.append([address(self.flags[0]), 4, 0, 1, 0, 0, 0, address(self.flags[1]), 0, 0])
        self.table = np.array(rows, np.int64).reshape(-1, len(COLUMN_FIELDS))

    def expected(self, ids: NDArray[np.int64]) -> list[tuple[int, bytes]]:
        """Return the block and the bytes of every column."""
        found = []
        for (ring, later, block), (apart_ids, apart) in zip(self.rings, self.apart, strict=True):
            by_id = dict(zip(apart_ids.tolist(), apart, strict=True))
            rows = [by_id.get(i, ring[(i + later) % self.ring_rows]).tobytes() for i in ids.tolist()]
            found.append((block, b"".join(rows)))
        ended, cut = (flags[ids % self.ring_rows] for flags in self.flags)
        return [*found, (1, np.where(ended & ~cut & 1, 1, 0).astype(np.float32).tobytes())]


def read(kernels: Kernels, columns: Columns, ids: NDArray[np.int64]) -> list[bytes] | None:
    blocks = (fresh_bytes(1 << 20), fresh_bytes(1 << 20))
    for memory in blocks:
        memory[:] = 7
    if not kernels.read_rows(columns.table, ids, columns.held, columns.ring_rows, blocks):
        assert all((memory == 7).all() for memory in blocks)
        return None
    first, found = [0, 0], []
    for block, rows in columns.expected(ids):
        found.append(blocks[block][first[block] : first[block] + len(rows)].tobytes())
        first[block] += -(-len(rows) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return found


@given(seed=st.integers(0, 2**32 - 1), ring_ticks=st.integers(2, 40), lanes=st.integers(1, 4), rows=st.integers(0, 60))
def test_rows_are_copied_from_rings_and_from_apart(
    kernels: Kernels, seed: int, ring_ticks: int, lanes: int, rows: int
) -> None:
    """Rows of every size, before and after the ring's end, in any order and more than once."""
    columns = Columns(seed, ring_ticks, lanes)
    ids = np.random.default_rng(seed).integers(*columns.held, rows)
    assert read(kernels, columns, ids) == [rows for _, rows in columns.expected(ids)]


@pytest.mark.parametrize("outside", [-1, 0])
def test_nothing_is_copied_if_one_id_is_not_held(kernels: Kernels, outside: int) -> None:
    """Neither one that left, nor one that was not added yet."""
    columns = Columns(3, 20, 2)
    ids = np.arange(*columns.held)
    ids[-1] = columns.held[0] - 1 if outside else columns.held[1]
    assert read(kernels, columns, ids) is None


def test_c_reads_nothing_behind_rings_that_are_too_short() -> None:
    """A caller that holds more ids than a ring has rows is refused, whatever it asks for."""
    columns = Columns(3, 20, 2)
    columns.held = (columns.held[0], columns.held[0] + columns.ring_rows + 1)
    assert read(chosen_kernels(), columns, np.arange(columns.held[0], columns.held[0] + 3)) is None


@given(seed=st.integers(0, 2**32 - 1), segments=st.integers(1, 9), lanes=st.integers(1, 5))
def test_segments_and_lanes_are_found(kernels: Kernels, seed: int, segments: int, lanes: int) -> None:
    """The segment is the last one that begins at the tick or before."""
    rng = np.random.default_rng(seed)
    first_ticks = np.cumsum(rng.integers(0, 5, segments))
    ids = rng.integers(first_ticks[0] * lanes, (first_ticks[-1] + 9) * lanes, 50)
    segment, lane = kernels.find(first_ticks, ids, lanes)
    for i, found, of_lane in zip(ids.tolist(), segment.tolist(), lane.tolist(), strict=True):
        assert found == max(k for k in range(segments) if first_ticks[k] <= i // lanes)
        assert of_lane == i % lanes


@given(
    seed=st.integers(0, 2**32 - 1), filled=st.integers(1, 2**32 - 1) | st.integers(1, 300), more=st.integers(0, 5),
    turns=st.integers(0, 3), lanes=st.integers(1, 5), rows=st.integers(0, 300),
)  # fmt: skip
def test_slots_are_drawn_as_numpy_draws_them(
    seed: int, filled: int, more: int, turns: int, lanes: int, rows: int
) -> None:
    """The same numbers, and the generator is left as NumPy leaves it."""
    slots, before = filled + more, np.random.get_state()  # noqa: NPY002  the generator of Stable-Baselines3
    newest = filled - 1 + turns * slots
    try:
        np.random.seed(seed)  # noqa: NPY002
        drawn = draw_slots(rows, filled, slots, newest, lanes)
        state = np.random.get_state()  # noqa: NPY002
        np.random.seed(seed)  # noqa: NPY002
        slot = np.random.randint(0, filled, size=rows)  # noqa: NPY002
        lane = np.random.randint(0, high=lanes, size=rows)  # noqa: NPY002
        expected = np.random.get_state()  # noqa: NPY002
    finally:
        np.random.set_state(before)  # noqa: NPY002
    assert drawn.tolist() == ((newest - (newest - slot) % slots) * lanes + lane).tolist()
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(state, expected, strict=True))


def filled_memory() -> ReplayMemory:
    observed = spaces.Dict(far=box((105,), "f8"), near=box((3,), "f4"), none=box((0,), "f4"))
    stream = Stream(observed, spaces.Box(-1, 1, (2,), np.float32), 2, plans=[LeafPlan()] * 3)
    memory = ReplayMemory(stream.observation_space, stream.action_space, 400, 2)
    memory.extend(**stream.ticks(200).arguments())
    return memory


def owner(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_every_column_begins_where_tensors_do_and_rewards_keep_no_large_observations() -> None:
    """Of a batch that is large enough to have two blocks."""
    memory = filled_memory()
    batch = memory.gather(np.arange(100, 300))
    columns: list[Bytes] = [*batch.obs.values(), *batch.next_obs.values(), batch.action, batch.reward]
    assert all(column.ctypes.data % ALIGNMENT_BYTES == 0 for column in columns if column.size)
    assert owner(batch.reward) is owner(batch.action)
    assert owner(batch.obs["far"]) is owner(batch.next_obs["near"]) is not owner(batch.reward)
    assert owner(batch.reward).nbytes < 10_000


def test_ids_that_are_not_held_are_refused_by_name() -> None:
    """By the store itself, which no caller has to ask first; ids that cannot be written to are read all the same."""
    memory = filled_memory()
    ids = np.arange(5)
    ids.flags.writeable = False
    assert memory.gather(ids).ids.tolist() == memory.gather(np.arange(10)[::2] // 2).ids.tolist()
    for wrong in (-1, 400):
        with pytest.raises(TransitionIdError, match=f"ids holds {wrong}"):
            memory.rows(np.array([1, wrong]))

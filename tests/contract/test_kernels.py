"""Ticks become parts of a segment, and batches are read from parts: always the bytes that were written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall import DamageError
from holdall.native import ThreadPool, chosen_kernels
from holdall.schema import Bytes, Leaf
from holdall.storage.batch_source import RECORD_FIELDS, Places
from holdall.storage.blocks import reserve
from holdall.storage.slices import ClosedPart, OpenPart, Window, lies_direct
from holdall.storage.ticks import Kernels
from holdall.testing import LeafPlan, Mishaps, Stream
from holdall.testing.strategies import box

ROOMY = 1 << 22
NEXT_IS_WHOLE = 1 << 31
"""Set in a cursor whose next observation is stored whole."""
NUMBER_BY_FIELD = {name: number for number, name in enumerate(RECORD_FIELDS)}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return chosen_kernels()


@dataclass(frozen=True)
class Layout:
    """A leaf, the axis it slides along and by how much; None: seen whole."""

    shape: tuple[int, ...]
    axis: int | None
    step: int = 1
    dtype: str = "u1"

    @property
    def leaf(self) -> Leaf:
        return Leaf("", self.shape, np.dtype(self.dtype))

    @property
    def window(self) -> Window:
        return Window.whole(self.leaf) if self.axis is None else Window.along(self.leaf, self.axis, self.step)


LAYOUTS = [
    Layout((4, 9, 7), 0),
    Layout((9, 7, 4), 2),
    Layout((9, 7, 12), 2, 3),
    Layout((5, 4, 6), 1, 2),
    Layout((6, 40), 0, 4),
    Layout((6, 40), 0, 3),
    Layout((50, 3), 0, dtype="f4"),  # slices short enough to lie in the log
    Layout((50, 9), 0, dtype="f4"),
    Layout((300,), 0, 7, dtype="f8"),
    Layout((300,), 0, 1),
    Layout((11, 13), None),
    Layout((1,), None),
]
MISHAPS = {
    "plain steps": Mishaps(ends=0.0),
    "episodes": Mishaps(ends=0.2),
    "everything": Mishaps(ends=0.1, silent_resets=0.1, skipped_steps=0.1, foreign_next=0.1),
    "nothing shared": Mishaps(foreign_next=1.0, silent_resets=1.0),
}

Ticks = list[tuple[Bytes, Bytes]]


def ticks_of(
    layout: Layout, lanes: int, count: int, seed: int, mishaps: Mishaps, plan: LeafPlan | None = None
) -> Ticks:
    """Draw ticks of one field, as rows of bytes."""
    moving = plan or LeafPlan(axis=layout.axis, step=layout.step, content="table" if seed % 2 else "noise")
    space = box(layout.shape, layout.dtype)
    stream = Stream(space, spaces.Discrete(2), lanes, plans=[moving], mishaps=mishaps, seed=seed)
    steps = [stream.tick() for _ in range(count)]
    return [(rows_of(step.obs), rows_of(step.next_obs)) for step in steps]


def rows_of(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


class Written:
    """Ticks written into one part by one kind of kernels."""

    def __init__(self, kernels: Kernels, window: Window, ticks: Ticks, block: Any = None) -> None:
        self.kernels = kernels
        self.lanes = len(ticks[0][0])
        if block is None and not lies_direct(window):
            block = kernels.new_block(window.slice_bytes, reserve(ROOMY))
        self.part = kernels.new_part(window, self.lanes, block, ROOMY)
        self.cursors = np.zeros((len(ticks), self.lanes), np.uint32)
        for tick, (obs, next_obs) in enumerate(ticks):
            self.part.append(obs, next_obs, self.cursors[tick])

    def places(self, part: OpenPart | ClosedPart | None = None) -> Places:
        """Say where everything lies, in the order of ticks and lanes."""
        part = self.part if part is None else part
        lane = np.tile(np.arange(self.lanes, dtype=np.int32), len(self.cursors))
        return Places(
            records=[np.array([part.record()], np.int64)],
            segment=np.zeros(lane.size, np.int32),
            cursors=[self.cursors.reshape(-1).copy()],
            lane=lane,
            lanes=self.lanes,
            held=((part.held,),),
        )

    def read(self, places: Places | None = None, pool: ThreadPool | None = None) -> tuple[Bytes, Bytes]:
        places = self.places() if places is None else places
        shape = (len(places.segment), self.part.obs_bytes)
        obs, next_obs = np.full(shape, 7, np.uint8), np.full(shape, 7, np.uint8)
        self.kernels.gather(places, 0, obs, next_obs, pool or ThreadPool(threads=1))
        return obs, next_obs

    def logged_slices(self) -> list[list[bytes]]:
        """Return the slices of every lane's log, whatever their numbers are."""
        part = self.part
        slice_bytes = part.window.slice_bytes
        slices = part.slices[: part.slices.size // slice_bytes * slice_bytes].reshape(-1, slice_bytes)
        entries = np.arange(part.longest * self.lanes).reshape(part.longest, self.lanes)
        numbers = entries if part.log is None else part.log[: part.longest]
        return [[slices[number].tobytes() for number in numbers[:, lane]] for lane in range(self.lanes)]

    @property
    def counts(self) -> tuple[int, ...]:
        part = self.part
        return (part.steps, part.broken_steps, part.pushed, part.longest, part.used_bytes, part.new_slices)


def assert_reads_back(written: Written, ticks: Ticks) -> None:
    for part in (written.part, written.part.closed()):
        obs, next_obs = written.read(written.places(part))
        assert obs.tobytes() == b"".join(obs.tobytes() for obs, _ in ticks)
        assert next_obs.tobytes() == b"".join(next_obs.tobytes() for _, next_obs in ticks)


class ReferenceLog:
    """What a part must hold of one lane, found step by step with lists."""

    def __init__(self, window: Window, steps: list[tuple[Bytes, Bytes]]) -> None:
        self.slices: list[bytes] = []
        self.cursors: list[int] = []
        self.broken_steps = 0
        last: bytes | None = None
        for obs, next_obs in steps:
            if obs.tobytes() != last:
                self._push(window, obs, window.count)
            cursor = len(self.slices) - window.count
            before, after = self._cut(window, obs), self._cut(window, next_obs)
            if before[window.shift :] == after[: window.count - window.shift]:
                self._push(window, next_obs, window.shift)
            else:
                self._push(window, next_obs, window.count)
                cursor |= NEXT_IS_WHOLE
                self.broken_steps += 1
            self.cursors.append(cursor)
            last = next_obs.tobytes()

    @staticmethod
    def _cut(window: Window, obs: Bytes) -> list[bytes]:
        return [one.tobytes() for one in window.newest(obs[None], window.count)[0]]

    def _push(self, window: Window, obs: Bytes, count: int) -> None:
        self.slices += self._cut(window, obs)[window.count - count :]


def assert_as_the_reference(window: Window, ticks: Ticks) -> None:
    written = Written(chosen_kernels(), window, ticks)
    lanes = range(written.lanes)
    expected = [ReferenceLog(window, [(obs[lane], later[lane]) for obs, later in ticks]) for lane in lanes]
    assert written.cursors.T.tolist() == [log.cursors for log in expected]
    logged = written.logged_slices()
    assert [logged[lane][: len(expected[lane].slices)] for lane in lanes] == [log.slices for log in expected]
    part = written.part
    assert part.steps == len(ticks) * written.lanes
    assert part.broken_steps == sum(log.broken_steps for log in expected)
    assert part.pushed == sum(len(log.slices) for log in expected)
    assert part.longest == max(len(log.slices) for log in expected)
    if part.log is not None:
        assert part.new_slices == len({one for log in expected for one in log.slices})
    assert_reads_back(written, ticks)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("mishaps", MISHAPS.values(), ids=MISHAPS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cursors_counts_and_slices_are_those_of_the_reference(layout: Layout, mishaps: Mishaps, lanes: int) -> None:
    """Each slice is kept once, and every observation that is no shift of the one before is kept whole."""
    for seed in range(2):
        assert_as_the_reference(layout.window, ticks_of(layout, lanes, 40, seed, mishaps))


@given(
    layout=st.sampled_from(LAYOUTS),
    plan=st.builds(
        LeafPlan,
        content=st.sampled_from(["noise", "table", "constant"]),
        repeats=st.sampled_from([0.0, 0.3, 0.9]),
        padding=st.sampled_from(["zero", "first", "fresh"]),
    ),
    slides=st.booleans(),
    mishaps=st.sampled_from(list(MISHAPS.values())),
    lanes=st.integers(1, 5),
    count=st.integers(1, 90),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_stream_is_written_as_the_reference_says(
    layout: Layout, plan: LeafPlan, slides: bool, mishaps: Mishaps, lanes: int, count: int, seed: int
) -> None:
    """Static screens, resets, streams that do not slide as the window says."""
    moving = replace(plan, axis=layout.axis if slides else None, step=layout.step)
    assert_as_the_reference(layout.window, ticks_of(layout, lanes, count, seed, mishaps, moving))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_batch_in_any_order_is_what_was_written(kernels: Kernels, layout: Layout) -> None:
    """Rows may be asked for in any order, several times, from open and closed parts at once."""
    ticks = ticks_of(layout, 3, 50, 1, MISHAPS["everything"])
    older, newer = Written(kernels, layout.window, ticks[:30]), Written(kernels, layout.window, ticks[30:])
    closed = older.part.closed()
    chosen = np.random.default_rng(0).integers(0, 150, 400)
    everywhere = np.concatenate([older.cursors, newer.cursors]).reshape(-1)
    places = Places(
        records=[np.array([closed.record(), newer.part.record()], np.int64)],
        segment=(chosen >= 90).astype(np.int32),
        cursors=[everywhere[chosen]],
        lane=(chosen % 3).astype(np.int32),
        lanes=3,
        held=((closed.held, newer.part.held),),
    )
    obs, next_obs = newer.read(places)
    assert obs.tobytes() == np.concatenate([obs for obs, _ in ticks])[chosen].tobytes()
    assert next_obs.tobytes() == np.concatenate([later for _, later in ticks])[chosen].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_either_observation_can_be_asked_for_alone(kernels: Kernels, layout: Layout) -> None:
    """The other is then not looked at, and the bytes are the same."""
    written = Written(kernels, layout.window, ticks_of(layout, 3, 50, 1, MISHAPS["everything"]))
    places, pool = written.places(), ThreadPool(threads=1)
    obs, next_obs = written.read()
    alone = np.full_like(obs, 7)
    kernels.gather(places, 0, alone, None, pool)
    assert alone.tobytes() == obs.tobytes()
    kernels.gather(places, 0, None, alone, pool)
    assert alone.tobytes() == next_obs.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_are_written_where_they_belong_in_a_larger_batch(kernels: Kernels, layout: Layout) -> None:
    """Rows that are meant for some places of a batch leave the others as they are."""
    written = Written(kernels, layout.window, ticks_of(layout, 3, 20, 1, MISHAPS["everything"]))
    rows = np.random.default_rng(0).permutation(100)[:60]
    expected = written.read()
    found = [np.full((100, written.part.obs_bytes), 7, np.uint8) for _ in expected]
    kernels.gather(replace(written.places(), rows=rows), 0, found[0], found[1], ThreadPool(threads=1))
    for side, some in zip(found, expected, strict=True):
        assert side[rows].tobytes() == some.tobytes()
        assert (np.delete(side, rows, axis=0) == 7).all()


@pytest.mark.parametrize("outside", [-1, 60])
def test_a_place_outside_the_batch_is_refused(kernels: Kernels, outside: int) -> None:
    """Nothing is written behind the arrays, nor before them."""
    layout = LAYOUTS[0]
    written = Written(kernels, layout.window, ticks_of(layout, 3, 20, 1, MISHAPS["everything"]))
    rows = np.arange(60)
    rows[17] = outside
    room = np.full((62, written.part.obs_bytes), 7, np.uint8)
    with pytest.raises(DamageError, match=r"row.* \(?17 "):
        kernels.gather(replace(written.places(), rows=rows), 0, room[1:61], None, ThreadPool(threads=1))
    assert (room[[0, 61]] == 7).all()


def test_several_threads_fill_a_batch_as_one_does(kernels: Kernels) -> None:
    """A batch that is shared out to threads has the bytes of one that is not."""
    layout = Layout((4, 84, 84), 0)
    written = Written(kernels, layout.window, ticks_of(layout, 2, 40, 0, MISHAPS["episodes"]))
    alone = written.read()
    pool = ThreadPool(threads=3)
    try:
        for _ in range(3):
            shared = written.read(pool=pool)
            assert shared[0].tobytes() == alone[0].tobytes()
            assert shared[1].tobytes() == alone[1].tobytes()
    finally:
        pool.dismiss()


def test_a_part_that_goes_on_in_a_block_reads_back_and_spares_slices(kernels: Kernels) -> None:
    """Two parts may name slices of one block; the older one stays as it was."""
    layout = Layout((50, 9), 0, dtype="f4")
    ticks = ticks_of(layout, 2, 60, 1, MISHAPS["episodes"])
    older = Written(kernels, layout.window, ticks[:30])
    closed = older.part.closed()
    newer = Written(kernels, layout.window, ticks[30:], older.part.block)
    assert_reads_back(newer, ticks[30:])
    obs, _ = older.read(older.places(closed))
    assert obs.tobytes() == b"".join(obs.tobytes() for obs, _ in ticks[:30])
    assert newer.part.new_slices < Written(kernels, layout.window, ticks[30:]).part.new_slices


def test_equal_slices_are_kept_once(kernels: Kernels) -> None:
    """A screen that never changes costs one observation, however long it is shown."""
    layout = Layout((11, 13), None)
    ticks = ticks_of(layout, 3, 50, 0, MISHAPS["episodes"], LeafPlan(content="constant"))
    assert Written(kernels, layout.window, ticks).part.new_slices == 1


def test_slices_that_differ_in_one_bit_are_both_kept(kernels: Kernels) -> None:
    """A hash only proposes; every byte decides."""
    generator = np.random.default_rng(0)
    window = Window.whole(Leaf("", (64,), np.dtype("u1")))
    one = generator.integers(0, 256, (1, 64), np.uint8)
    ticks = []
    for bit in range(512):
        other = one.copy()
        other[0, bit // 8] ^= 1 << bit % 8
        ticks.append((one, other))
    written = Written(kernels, window, ticks)
    assert written.part.new_slices == 513
    assert_reads_back(written, ticks)


def stirred(state: int, word: int) -> int:
    """Mix as append.c does, so that slices can be made which its hash does not tell apart."""
    mixed = (state ^ word) * 0x9E3779B97F4A7C15 % 2**64
    return mixed ^ (mixed >> 29)


def test_slices_with_one_hash_are_told_apart(kernels: Kernels) -> None:
    """Slices made to collide are kept side by side and come back as they were."""
    first = np.random.default_rng(0).integers(0, 2**63, 30).tolist()
    pairs = [(word, stirred(16, word) ^ stirred(16, first[0]) ^ 0xFEED) for word in first]
    assert len({stirred(stirred(16, one), other) for one, other in pairs}) == 1
    slices = np.array(pairs, np.uint64).view(np.uint8)  # (30, 16)
    ticks = [(slices[t : t + 1], slices[t + 1 : t + 2]) for t in range(29)] * 2
    written = Written(kernels, Window.whole(Leaf("", (16,), np.dtype("u1"))), ticks)
    assert_reads_back(written, ticks)


@pytest.mark.parametrize("count", [1 << 16, (1 << 16) + 1])
def test_a_closed_log_is_as_wide_as_its_numbers(kernels: Kernels, count: int) -> None:
    """65,536 slices are numbered in two bytes, one more in four; both read back."""
    lanes, steps = 64, -(-count // 64)
    numbers = np.minimum(np.arange(lanes * steps, dtype=np.uint64), count - 1).reshape(lanes, steps, 1)
    rows = np.concatenate([numbers.view(np.uint8)] * 5, axis=2)  # 40 bytes: too long to lie in the log
    window = Window.along(Leaf("", (4, 40), np.dtype("u1")), 0, 1)
    ticks = [(rows_of(rows[:, t : t + 4]), rows_of(rows[:, t + 1 : t + 5])) for t in range(steps - 4)]
    written = Written(kernels, window, ticks)
    part = written.part
    assert part.new_slices == count
    closed = part.closed()
    assert closed.log is not None
    assert closed.log.itemsize == (2 if count <= 1 << 16 else 4)
    written.cursors = written.cursors[-50:]
    assert_reads_back(written, ticks[-50:])


# ---------------------------------------------------------------- layouts


def in_order(array: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    """Copy an array so that its memory runs through the axes in the given order."""
    return np.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes))


def append_all(kernels: Kernels, window: Window, ticks: list[tuple[NDArray[Any], NDArray[Any]]]) -> Written:
    """Write ticks as arrays of any dtype and layout."""
    written = Written(kernels, window, [(rows_of(obs), rows_of(later)) for obs, later in ticks][:1])
    written.part = kernels.new_part(
        window,
        written.lanes,
        None if lies_direct(window) else kernels.new_block(window.slice_bytes, reserve(ROOMY)),
        ROOMY,
    )
    written.cursors = np.zeros((len(ticks), written.lanes), np.uint32)
    for (obs, later), cursors in zip(ticks, written.cursors, strict=True):
        written.part.append(obs, later, cursors)
    return written


@pytest.mark.parametrize("dtype", ["u1", "f4"])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 5), 0), ((6, 5, 4), 2), ((3, 6, 5), 0), ((8, 9), 0)], ids=str)
def test_ticks_in_any_layout_are_stored_alike(
    kernels: Kernels, shape: tuple[int, ...], axis: int, lanes: int, dtype: str
) -> None:
    """However the axes lie in the caller's memory, tick by tick, cursors and bytes are the same."""
    layout = Layout(shape, axis, dtype=dtype)
    space = box(shape, dtype)
    stream = Stream(space, spaces.Discrete(2), lanes, plans=[LeafPlan(axis=axis)], mishaps=MISHAPS["everything"])
    steps = [stream.tick() for _ in range(60)]
    plain = append_all(kernels, layout.window, [(step.obs, step.next_obs) for step in steps])
    generator = np.random.default_rng(0)
    orders = [tuple(generator.permutation(len(shape) + 1).tolist()) for _ in range(12)]
    for same_for_both in (True, False):
        ticks = []
        for number, step in enumerate(steps):
            first = orders[number // 4 % len(orders)]
            second = first if same_for_both else orders[number % len(orders)]
            ticks.append((in_order(step.obs, first), in_order(step.next_obs, second)))
        written = append_all(kernels, layout.window, ticks)
        assert written.cursors.tobytes() == plain.cursors.tobytes()
        assert written.counts == plain.counts
        assert_reads_back(written, [(rows_of(step.obs), rows_of(step.next_obs)) for step in steps])


def test_one_memory_in_two_layouts_is_two_observations(kernels: Kernels) -> None:
    """What was seen last is known by its values: equal bytes in another order, or of another tick, are not it."""
    generator = np.random.default_rng(0)
    one, two = generator.integers(0, 256, (2, 1, 6, 6), np.uint8)
    values = [one, two, one.transpose(0, 2, 1).copy(), two.transpose(0, 2, 1).copy()]
    orders = [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
    ticks = []
    for _ in range(300):
        obs, later = (values[number] for number in generator.integers(0, 4, 2))
        order = orders[generator.integers(0, 3)]
        ticks.append((in_order(obs, order), in_order(later, order)))
    window = Window.along(Leaf("", (6, 6), np.dtype("u1")), 0, 1)
    for cut in (window, Window.whole(Leaf("", (6, 6), np.dtype("u1")))):
        assert_reads_back(append_all(kernels, cut, ticks), [(rows_of(obs), rows_of(later)) for obs, later in ticks])


@pytest.mark.parametrize("lanes", [1, 2])
def test_images_with_interleaved_channels_are_parted_right(kernels: Kernels, lanes: int) -> None:
    """Three channels pixel by pixel, as cameras give them: every number of pixels, and not a byte beyond."""
    generator = np.random.default_rng(0)
    for pixels in [*range(1, 70), 255, 256, 257]:
        memory = generator.integers(0, 256, (2, lanes, pixels, 3), np.uint8)
        obs, later = (np.moveaxis(tick, -1, 1) for tick in memory)
        window = Window.whole(Leaf("", (3, pixels), np.dtype("u1")))
        written = append_all(kernels, window, [(obs, later), (later, obs)])
        assert_reads_back(written, [(rows_of(obs), rows_of(later)), (rows_of(later), rows_of(obs))])


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda array: np.repeat(array, 2, axis=2)[:, :, ::2],
        lambda array: array[:, ::-1].copy()[:, ::-1],
        lambda array: np.frombuffer(b"x" + array.tobytes(), array.dtype, offset=1).reshape(array.shape),
        lambda array: np.broadcast_to(array[:, :1], array.shape),
    ],
    ids=["every second", "backwards", "not aligned", "broadcast"],
)
def test_arrays_that_do_not_fill_their_memory_are_stored_alike(kernels: Kernels, lay_out: Any) -> None:
    """Strides of any kind, none and negative ones too, and arrays that cannot be written to."""
    generator = np.random.default_rng(0)
    window = Window.along(Leaf("", (4, 50), np.dtype("f4")), 0, 1)
    values = generator.random((9, 2, 4, 50), np.float32)
    ticks = [(lay_out(values[t]), lay_out(values[t + 1])) for t in range(8)]
    written = append_all(kernels, window, ticks)
    assert_reads_back(written, [(rows_of(obs), rows_of(later)) for obs, later in ticks])


# ---------------------------------------------------------------- damage


def damaged(written: Written, what: str) -> Places:
    """Return places of a closed part, of which one index is off in the middle row."""
    closed = written.part.closed()
    places = written.places(closed)
    row = len(places.segment) // 2
    if what.startswith("segment"):
        places.segment[row] = {"segment -1": -1, "segment 1": 1, "segment far": 2**31 - 1}[what]
    elif what.startswith("lane"):
        places.lane[row] = {"lane -1": -1, "lane past": written.lanes, "lane far": 2**31 - 1}[what]
    elif what == "cursor past":
        places.cursors[0][row] = closed.log_rows
    elif what == "cursor at the end":  # the observation fits, its next does not
        places.cursors[0][row] = closed.log_rows - closed.window.count
    elif what == "cursor far":
        places.cursors[0][row] = 2**32 - 1
    elif what == "slice number":
        assert closed.log is not None
        closed.log[:] = closed.slice_count
    elif what == "slice count":
        places.records[0][0, NUMBER_BY_FIELD["slice_count"]] = 1
    return places


DAMAGE = [
    *("segment -1", "segment 1", "segment far"),
    *("lane -1", "lane past", "lane far"),
    *("cursor past", "cursor at the end", "cursor far"),
    *("slice number", "slice count"),
]


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[6], LAYOUTS[10]], ids=str)
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_index_is_refused_and_nothing_outside_is_read(kernels: Kernels, layout: Layout, what: str) -> None:
    """An index that points outside its segment ends the call; it never crashes, nor gives another row."""
    written = Written(kernels, layout.window, ticks_of(layout, 3, 20, 0, MISHAPS["plain steps"]))
    if what == "slice number" and written.part.log is None:
        return  # there are no numbers where slices lie in the log
    with pytest.raises(DamageError, match="points outside its segment"):
        written.read(damaged(written, what))


@pytest.mark.parametrize("number", [-1, 1])
def test_records_beside_the_table_are_not_read(kernels: Kernels, number: int) -> None:
    """A segment before the first or behind the last is refused, even if a record happens to lie there."""
    written = Written(kernels, LAYOUTS[0].window, ticks_of(LAYOUTS[0], 2, 20, 0, MISHAPS["episodes"]))
    places = written.places()
    three = np.concatenate([places.records[0]] * 3)
    beside = replace(places, records=[three[1:2]])
    beside.segment[7] = number
    with pytest.raises(DamageError, match="points outside its segment"):
        written.read(beside)


def test_an_observation_of_another_size_is_refused(kernels: Kernels) -> None:
    """A record whose observations are not as long as the batch's rows is damage."""
    written = Written(kernels, LAYOUTS[0].window, ticks_of(LAYOUTS[0], 2, 20, 0, MISHAPS["episodes"]))
    places = written.places()
    places.records[0][0, NUMBER_BY_FIELD["run_bytes"]] -= 1
    with pytest.raises(DamageError):
        written.read(places)


def test_a_tick_of_another_size_is_refused(kernels: Kernels) -> None:
    """A part takes ticks of its own lanes and bytes only."""
    ticks = ticks_of(LAYOUTS[0], 2, 3, 0, MISHAPS["episodes"])
    written = Written(kernels, LAYOUTS[0].window, ticks)
    before = written.counts
    (obs, next_obs), cursors = ticks[0], np.zeros(2, np.uint32)
    for bad in ((obs[:1], next_obs, cursors), (obs, next_obs[:, :-1], cursors), (obs, next_obs, cursors[:1])):
        with pytest.raises(DamageError):
            written.part.append(*bad)
    assert written.counts == before


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[6]], ids=str)
def test_a_full_part_refuses_a_tick_and_stays_as_it_was(kernels: Kernels, layout: Layout) -> None:
    """What might not fit is refused before anything of it is written."""
    window = layout.window
    ticks = ticks_of(layout, 2, 60, 0, MISHAPS["nothing shared"], LeafPlan(padding="fresh"))
    room = 20 * 2 * 2 * layout.leaf.nbytes
    block = None if lies_direct(window) else kernels.new_block(window.slice_bytes, reserve(room))
    part = kernels.new_part(window, 2, block, room)
    cursors = np.zeros((60, 2), np.uint32)
    taken = 0
    while part.has_room():
        part.append(*ticks[taken], cursors[taken])
        taken += 1
    assert taken == 20
    before = (part.steps, part.pushed, part.longest, part.used_bytes, cursors.tobytes())
    with pytest.raises(DamageError, match="ran over"):
        part.append(*ticks[taken], cursors[taken])
    assert (part.steps, part.pushed, part.longest, part.used_bytes, cursors.tobytes()) == before

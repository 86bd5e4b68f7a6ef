"""A store that adopts segments holds what a plain list of their transitions holds, whoever wrote them."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import storage
from holdall.errors import ArgumentError, DamageError, HoldallError
from holdall.native import ThreadPool, chosen_kernels
from holdall.schema import Schema
from holdall.storage.blocks import Codec, Dictionary, KeptBlock, Method, Transform
from holdall.storage.codec_choice import COST_CAPS
from holdall.storage.records import SpillFolder
from holdall.storage.sealed_segment import SealedSegment, pack_segment, unpack_segment
from holdall.storage.store import Store
from holdall.storage.ticks import Kernels, Tick
from holdall.storage.tiers import Budget

SPACE = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (4, 12, 12), np.uint8),
        "speed": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "text": spaces.Box(0, 255, (600,), np.uint8),
    }
)
EXTRAS = {"note": spaces.Box(-1, 1, (2,), np.float32)}
LARGE = (0, 2)
FIRST = 7 << 36
ALONE = ThreadPool(threads=1)
FOR_MEMORY = Budget(cost_cap=COST_CAPS["memory"], most_threads=1)
STORAGE = str(Path(storage.__file__).parent)


def schema(lanes: int) -> Schema:
    return Schema.of(SPACE, spaces.Discrete(5), EXTRAS, lanes)


@dataclass(slots=True)
class Row:
    """A transition as it was added."""

    obs: list[NDArray[Any]]
    next_obs: list[NDArray[Any]]
    action: int
    reward: float
    flags: tuple[bool, bool]
    note: NDArray[np.float32]
    valid: bool


def no_rows() -> list[Row]:
    return []


class Writer:
    """Fills one store after another, each of which becomes a segment."""

    def __init__(self, seed: int, lanes: int) -> None:
        self.lanes = lanes
        self._random = np.random.default_rng(seed)
        self._frames = self._random.integers(0, 255, (lanes, 4, 12, 12), np.uint8)

    def segment(self, ticks: int, *, some_invalid: bool = False) -> tuple[SealedSegment, list[Row]]:
        kernels = chosen_kernels()
        store = Store(schema(self.lanes), 1000, kernels, threading.Lock(), FOR_MEMORY, large=LARGE)
        rows: list[Row] = []
        for _ in range(ticks):
            tick = self._tick(some_invalid)
            store.write(tick)
            rows += rows_of(tick, self.lanes)
        return store.segment_at(0), rows

    def _tick(self, some_invalid: bool) -> Tick:
        lanes, random = self.lanes, self._random
        frame = random.integers(0, 255, (lanes, 1, 12, 12), np.uint8)
        following = np.concatenate([self._frames[:, 1:], frame], axis=1)
        ended = random.random(lanes) < 0.1
        texts = [np.full((lanes, 600), random.integers(0, 9), np.uint8) for _ in range(2)]
        speeds = [random.normal(size=(lanes, 3)).astype(np.float32) for _ in range(2)]
        obs = self._frames
        fresh = random.integers(0, 255, (lanes, 4, 12, 12), np.uint8)
        self._frames = np.where(ended[:, None, None, None], fresh, following)
        return Tick(
            obs=[obs, speeds[0], texts[0]],
            action=[random.integers(0, 5, lanes)],
            reward=random.normal(size=lanes),
            next_obs=[following, speeds[1], texts[1]],
            terminated=ended,
            truncated=random.random(lanes) < 0.05,
            extras=[random.normal(size=(lanes, 2)).astype(np.float32)],
            valid=random.random(lanes) < 0.8 if some_invalid else None,
        )


def rows_of(tick: Tick, lanes: int) -> list[Row]:
    return [
        Row(
            [leaf[lane] for leaf in tick.obs],
            [leaf[lane] for leaf in tick.next_obs],
            int(tick.action[0][lane]),
            float(tick.reward[lane]),
            (bool(tick.terminated[lane]), bool(tick.truncated[lane])),
            tick.extras[0][lane],
            tick.valid is None or bool(tick.valid[lane]),
        )
        for lane in range(lanes)
    ]


def new_store(space: Schema, capacity: int, budget: Budget, *rest: Any, **settings: Any) -> Store:
    return Store(space, capacity, chosen_kernels(), threading.Lock(), budget, *rest, **settings)


def shard(capacity: int, folder: SpillFolder | None = None, first: int = FIRST) -> Store:
    budget = replace(FOR_MEMORY, spills=folder is not None)
    return Store(schema(1), capacity, chosen_kernels(), threading.Lock(), budget, folder, first_tick=first, large=LARGE)


def require_equal(store: Store, rows: list[Row], kernels: Kernels | None = None) -> None:
    """Hold all of a store against the newest of all rows that were ever adopted."""
    held = store.next_tick - store.first_tick
    expected = rows[len(rows) - held :]
    ids = np.random.default_rng(0).permutation(np.arange(store.first_tick, store.next_tick))
    wanted = [expected[id_ - store.first_tick] for id_ in ids.tolist()]
    assert store.transitions == sum(row.valid for row in expected)
    assert store.are_valid(ids).tolist() == [row.valid for row in wanted]
    assert store.are_ends(ids).tolist() == [any(row.flags) for row in wanted]
    if not held:
        return
    found = store.read(ids)
    assert found.large == LARGE
    assert found.places is not None
    for field, leaf in enumerate(LARGE):
        shape = SPACE[("image", "speed", "text")[leaf]].shape
        for of, name in ((0, "obs"), (1, "next_obs")):
            out: list[Any] = [None, None]
            out[of] = np.zeros((len(ids), math.prod(shape or ())), np.uint8)
            (kernels or chosen_kernels()).gather(found.places, field, out[0], out[1], ALONE)
            assert np.array_equal(out[of].reshape(-1, *(shape or ())), [getattr(row, name)[leaf] for row in wanted])
    assert np.array_equal(found.small[1][0], [row.obs[1] for row in wanted])
    assert np.array_equal(found.small[1][1], [row.next_obs[1] for row in wanted])
    assert np.array_equal(found.action[0], [row.action for row in wanted])
    assert np.array_equal(found.reward, [row.reward for row in wanted])
    assert np.array_equal(np.stack([found.terminated, found.truncated], 1), [row.flags for row in wanted])
    assert np.array_equal(found.extras[0], [row.note for row in wanted])


def moved(segment: SealedSegment, dictionaries: dict[str, Dictionary] | None = None) -> SealedSegment:
    coder = chosen_kernels().coder
    return unpack_segment(pack_segment(segment, coder), schema(1), dictionaries or {}, coder)


@pytest.mark.parametrize("capacity", [10_000, 400, 90])
def test_segments_of_interleaved_writers_equal_a_list(capacity: int) -> None:
    writers = [Writer(seed, lanes) for seed, lanes in enumerate((1, 3, 8))]
    store, rows = shard(capacity), no_rows()
    random = np.random.default_rng(1)
    for number in range(24):
        segment, added = writers[random.integers(3)].segment(
            int(random.integers(1, 40)), some_invalid=number in (5, 6, 20)
        )
        assert store.adopt(moved(segment)) == FIRST + len(rows)
        rows += added
        assert store.next_tick == FIRST + len(rows)
        assert store.first_tick == max(FIRST, store.next_tick - capacity)
        require_equal(store, rows)
    assert store.all_valid == all(row.valid for row in rows[-capacity:])


def test_windows_were_found_so_that_the_test_means_something() -> None:
    segment, _ = Writer(0, 3).segment(40)
    assert segment.lanes == 3
    assert segment.parts[0].window.count == 4
    assert segment.in_one_lane().parts[0].log_rows == segment.parts[0].log_rows * 3


def test_rows_before_a_number_are_forgotten_one_by_one() -> None:
    store, rows = shard(10_000), no_rows()
    writer = Writer(0, 2)
    for _ in range(5):
        segment, added = writer.segment(20)
        store.adopt(segment)
        rows += added
    for row in (FIRST + 1, FIRST + 39, FIRST + 40, FIRST + 41, FIRST + 199):
        store.forget_before(row)
        assert store.first_tick == row
        require_equal(store, rows)
    store.forget_before(FIRST + 10_000)
    assert store.first_tick == store.next_tick == FIRST + 200
    assert store.transitions == 0
    segment, added = writer.segment(3)
    assert store.adopt(segment) == FIRST + 200
    require_equal(store, rows + added)


def segments_of(store: Store) -> Iterator[SealedSegment]:
    tick = store.first_tick
    while tick < store.next_tick:
        segment = store.segment_at(tick)
        assert segment.rows.first_tick == tick
        yield segment
        tick += segment.rows.ticks


@pytest.mark.parametrize("capacity", [10_000, 130])
def test_all_segments_of_a_store_move_to_another(capacity: int) -> None:
    writer, store, rows = Writer(0, 4), shard(capacity), no_rows()
    for number in range(6):
        segment, added = writer.segment(15, some_invalid=number == 4)
        store.adopt(segment)
        rows += added
    other = shard(capacity, first=0)
    for segment in segments_of(store):
        other.adopt(moved(segment))
    assert other.transitions == store.transitions
    require_equal(other, rows)


def test_a_store_that_is_written_to_can_adopt_too() -> None:
    writer = Writer(0, 2)
    store = Store(schema(2), 1000, chosen_kernels(), threading.Lock(), FOR_MEMORY, large=LARGE)
    rows: list[Row] = []
    for ticks in (30, 7, 50):
        for _ in range(ticks):
            tick = writer._tick(False)
            store.write(tick)
            rows += rows_of(tick, 2)
        segment, added = writer.segment(20)
        assert store.adopt(moved(segment)) * 2 == len(rows)
        rows += added
    ids = np.arange(len(rows))
    found = store.read(ids)
    assert found.places is not None
    obs, next_obs = (np.zeros((len(ids), 576), np.uint8) for _ in range(2))
    chosen_kernels().gather(found.places, 0, obs, next_obs, ALONE)
    assert np.array_equal(obs, [row.obs[0].reshape(-1) for row in rows])
    assert np.array_equal(next_obs, [row.next_obs[0].reshape(-1) for row in rows])
    assert np.array_equal(found.small[1][0], [row.obs[1] for row in rows])
    assert np.array_equal(found.small[1][1], [row.next_obs[1] for row in rows])


def test_adopted_segments_spill_and_move_on_from_the_disk(tmp_path: Path) -> None:
    coder = chosen_kernels().coder
    store, rows = shard(10_000, SpillFolder(tmp_path, coder)), no_rows()
    writer = Writer(0, 2)
    for _ in range(6):
        segment, added = writer.segment(20)
        with store._lock:
            store.adopt(segment)
        rows += added
    assert store.sealer is not None
    store.sealer.drain()
    assert store.disk_bytes > 0
    require_equal(store, rows)
    other = shard(10_000)
    for segment in segments_of(store):
        other.adopt(moved(segment))
    require_equal(other, rows)
    store.forget_before(store.first_tick + 100)
    require_equal(store, rows)
    store.close()


def test_a_snapshot_keeps_the_rows_of_its_moment_while_segments_come() -> None:
    writer, store, rows = Writer(0, 1), shard(100), no_rows()
    for _ in range(4):
        segment, added = writer.segment(25)
        store.adopt(segment)
        rows += added
    frozen = store.freeze({})
    rewards = [row.reward for row in rows]
    for _ in range(3):
        store.adopt(writer.segment(30)[0])
    chunks = [frozen.rows.take(number) for number in frozen.rows.wanted]
    assert np.concatenate([chunk.columns["reward.0"] for chunk in chunks]).reshape(-1).tolist() == rewards
    assert len(frozen.segments) == 4
    store.release(frozen.rows)


@pytest.mark.parametrize("segments", [300, pytest.param(1000, marks=pytest.mark.nightly)])
def test_many_small_segments_leave_without_a_walk_over_all(segments: int) -> None:
    segment, _ = Writer(0, 1).segment(2)
    store = shard(2 * segments)
    for _ in range(3 * segments):
        store.adopt(segment)
    assert store.segments == segments + 1
    assert store.transitions == 2 * segments


def interrupted(call: Callable[[], object], at: int = 0) -> int:
    """Make a call, and raise at its `at`-th line of the storage; return how many lines there were until then."""
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(STORAGE):
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return at - left


@pytest.mark.parametrize("every", [pytest.param(1, id="all", marks=pytest.mark.nightly), pytest.param(9, id="some")])
@pytest.mark.parametrize("scene", ["full", "empty", "spills", "written to", "frozen"])
def test_an_interrupted_adopt_is_made_or_is_not(scene: str, every: int, tmp_path: Path) -> None:
    """After an exception at any line the next call goes on with all of the segment, or with nothing of it."""
    writer = Writer(0, 2)
    before = [writer.segment(20, some_invalid=number == 1) for number in range(0 if scene == "empty" else 4)]
    tick, coming, following = writer._tick(False), writer.segment(15), writer.segment(25)

    def made() -> tuple[Store, list[Row]]:
        folder = SpillFolder(tmp_path, chosen_kernels().coder) if scene == "spills" else None
        store, rows = shard(130, folder), no_rows()
        for segment, added in before:
            with store._lock:
                store.adopt(segment)
            rows += added
        if scene == "written to":
            for lane in range(2):
                store.write(tick.cut(slice(lane, lane + 1)))
            rows += rows_of(tick, 2)
        return store, rows

    store, _ = made()
    lines = interrupted(lambda: store.adopt(coming[0]))
    assert lines > 50
    store.close()
    took = 0
    for at in range(1 + len(scene) % every, lines + 1, every):
        store, rows = made()
        frozen = store.freeze({}) if scene == "frozen" else None
        rewards = [row.reward for row in rows[-130:]]
        with store._lock:
            reached = interrupted(lambda: store.adopt(coming[0]), at)  # noqa: B023  at once
            assert reached == at or scene == "spills"  # what the sealer has done by then differs
            store.repair.run()
        taken = store.next_tick > FIRST + len(rows)
        rows += coming[1] if taken else []
        took += taken
        assert store.next_tick == FIRST + len(rows)
        require_equal(store, rows)
        with store._lock:
            store.adopt(following[0])
        require_equal(store, rows + following[1])
        with store._lock:  # the sealer moves blocks to disk meanwhile
            parts = [part for each in store.large_segments.closed for part in each.parts]
            on_disk = [part.block.used_bytes for part in parts if part.block.is_on_disk]
            counted = sum(part.overhead_bytes for part in parts) + sum(on_disk), len(on_disk)
            assert (store.large_segments.overhead_bytes, store.large_segments.blocks_on_disk) == counted
        if frozen is not None:
            chunks = [frozen.rows.take(number) for number in frozen.rows.wanted]
            assert np.concatenate([chunk.columns["reward.0"] for chunk in chunks]).reshape(-1).tolist() == rewards
            store.release(frozen.rows)
        store.close()
    assert took


def test_a_report_counts_what_was_adopted() -> None:
    store = shard(1000)
    segment, _ = Writer(0, 2).segment(20)
    store.adopt(segment)
    fields = {field.name: field for field in store.report()}
    assert fields["obs.image"].plain_bytes == 2 * 40 * 576
    assert fields["obs.image"].slice_bytes > 0
    assert "window of 4" in fields["obs.image"].finding
    assert fields["action"].row_bytes == 40 * 8


# ---------------------------------------------------------------- what does not fit


def test_a_segment_of_another_reward_dtype_is_refused_before_anything_changes() -> None:
    store = shard(1000)
    segment, rows = Writer(0, 2).segment(5)
    store.adopt(segment)
    columns = dict(segment.rows.columns)
    columns["reward.0"] = columns["reward.0"].astype(np.float32)
    with pytest.raises(ArgumentError, match="never casts"):
        store.adopt(replace(segment, rows=replace(segment.rows, columns=columns)))
    require_equal(store, rows)


def test_a_segment_with_other_large_leaves_is_refused() -> None:
    store = new_store(schema(1), 100, FOR_MEMORY, large=(0,))
    with pytest.raises(ArgumentError, match="large"):
        store.adopt(Writer(0, 2).segment(5)[0])


# ---------------------------------------------------------------- damaged bytes


def packed(lanes: int = 2, ticks: int = 12) -> bytes:
    return pack_segment(Writer(0, lanes).segment(ticks)[0], chosen_kernels().coder)


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_noticed_wherever_it_is(seed: int) -> None:
    payload = packed()
    random, coder = np.random.default_rng(seed), chosen_kernels().coder
    for place in random.integers(0, len(payload), 60).tolist():
        damaged = bytearray(payload)
        damaged[place] ^= 1 << int(random.integers(8))
        try:
            unpack_segment(bytes(damaged), schema(1), {}, coder)
        except HoldallError:
            continue
        assert place % len(payload) in zero_bytes(payload), f"byte {place} was changed unnoticed"


def zero_bytes(payload: bytes) -> set[int]:
    """The last four bytes of every preamble, which mean nothing."""
    places, start = set(), payload.find(b"holdall\x01")
    while start >= 0:
        places |= set(range(start + 28, start + 32))
        start = payload.find(b"holdall\x01", start + 1)
    return places


def test_a_segment_that_was_cut_short_or_goes_on_is_refused() -> None:
    payload, coder = packed(), chosen_kernels().coder
    for end in (0, 1, 31, 32, 500, len(payload) // 2, len(payload) - 1):
        with pytest.raises(DamageError):
            unpack_segment(payload[:end], schema(1), {}, coder)
    with pytest.raises(DamageError):
        unpack_segment(payload + payload, schema(1), {}, coder)


def test_numbers_that_point_outside_are_refused() -> None:
    segment, _ = Writer(0, 2).segment(12)
    part = segment.parts[0]
    assert part.log is not None
    outside = part.log.copy()
    outside[3, 1] = part.slice_count
    with pytest.raises(DamageError, match="outside itself"):
        moved(replace(segment, parts=(replace(part, log=outside), *segment.parts[1:])))
    columns = dict(segment.rows.columns)
    columns["cursors.0"] = columns["cursors.0"] + np.uint32(len(part.log))
    with pytest.raises(DamageError, match="outside itself"):
        moved(replace(segment, rows=replace(segment.rows, columns=columns)))
    with pytest.raises(DamageError):
        moved(replace(segment, parts=segment.parts[::-1]))


def test_a_segment_of_other_spaces_is_refused() -> None:
    other = Schema.of(spaces.Box(0, 1, (3,), np.float32), spaces.Discrete(5), {}, 1)
    with pytest.raises(DamageError):
        unpack_segment(packed(), other, {}, chosen_kernels().coder)


def test_a_dictionary_travels_by_name() -> None:
    segment, _ = Writer(0, 1).segment(12)
    coder, dictionary = chosen_kernels().coder, Dictionary(bytes(range(256)) * 8)
    part = segment.parts[1]
    assert part.block.sealed is not None
    raw = np.frombuffer(np.asarray(part.block.sealed.coded.data), np.uint8).reshape(-1, 600)
    sealed = coder.seal(raw.copy(), Codec(Method.ZSTD, 3, Transform(600), dictionary))
    assert sealed is not None
    block = KeptBlock(600, sealed.count, sealed)
    named = replace(segment, parts=(segment.parts[0], replace(part, block=block)))
    payload = pack_segment(named, coder)
    with pytest.raises(DamageError):
        unpack_segment(payload, schema(1), {}, coder)
    store = shard(100)
    store.adopt(unpack_segment(payload, schema(1), {dictionary.name: dictionary}, coder))
    require_equal(store, Writer(0, 1).segment(12)[1])

"""A feed that is faster than the sealer: a tick waits for one piece, and codecs are chosen when there is time."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.native import NativeCoder, NativeKernels, chosen_kernels, writing
from holdall.schema import Bytes, Leaf
from holdall.storage import sealer, segment
from holdall.storage.block_sample import BlockSample
from holdall.storage.blocks import Codec, KeptBlock, Method, SealedSlices, SliceBlock, Transform, address
from holdall.storage.coded_units import Order
from holdall.storage.repair import Repair
from holdall.storage.sealer import Sealer
from holdall.storage.segment import Segments
from holdall.storage.slices import FrozenBlock, Window
from holdall.storage.ticks import Watch
from holdall.storage.tiers import Allowance, Budget, SealJob, SealQueue, Tiers
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.strategies import box

PATIENCE_S = 20
FRAME = 72 * 72
LEAF = Leaf("", (500,), np.dtype("u1"))
CAREFUL = Codec(Method.ZSTD, 9, Transform(500))
ARGUMENTS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.001)


class PiecewiseCoder(NativeCoder):
    """Seals blocks piece by piece, each when it is let to, and remembers the codecs."""

    def __init__(self, pieces: int = 0) -> None:
        super().__init__()
        self.gate = threading.Semaphore(pieces)
        self.codecs: list[Codec] = []

    def keeping(self) -> PiecewiseCoder:
        return self

    def seal(
        self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1, watch: Watch | None = None
    ) -> SealedSlices | None:
        def gated(done: int) -> None:
            assert self.gate.acquire(timeout=PATIENCE_S)
            assert watch is not None
            watch(done)

        self.codecs.append(codec)
        return super().seal(slices, codec, order, threads=threads, watch=None if watch is None else gated)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments of some frames, in pieces of three, and count every byte that waits."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 36 * FRAME)
    monkeypatch.setattr(Budget, "waiting_bytes", 0)
    monkeypatch.setattr(writing, "WATCHED_BYTES", 3 * FRAME)


def memory_with(coder: NativeCoder, patch: pytest.MonkeyPatch, capacity: int = 5_000) -> ReplayMemory:
    patch.setattr("holdall.replay.chosen_kernels", lambda: NativeKernels(coder))
    return ReplayMemory(box((72, 72), "u1"), spaces.Discrete(2), capacity, budget=None)


def tick_of(number: int) -> dict[str, Any]:
    """Return a tick that shows its number."""
    shown = [np.full((1, 72, 72), (number + i) % 251, np.uint8) for i in range(2)]
    for i, frame in enumerate(shown):
        frame[0, 0, 0] = (number + i) // 251
    never = np.zeros(1, np.bool_)
    return {
        "obs": shown[0], "next_obs": shown[1], "action": np.zeros(1, np.int64), "reward": np.zeros(1, np.float32),
        "terminated": never, "truncated": never,
    }  # fmt: skip


def somebody_waits(memory: ReplayMemory) -> bool:
    worker = memory._open().sealer
    return worker is not None and worker._queue.is_pressed


# ---------------------------------------------------------------- waiting


def test_every_piece_lets_a_tick_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits for a whole block; what is raw takes two segments at most; every bit is right."""
    monkeypatch.setattr(sealer, "choose", lambda *_: Codec(Method.ZSTD, 3, Transform(FRAME)))
    monkeypatch.setattr(SealQueue, "is_behind", True)
    oracle, ticks = OracleMemory(5_000), 400
    coder = PiecewiseCoder()
    memory = memory_with(coder, monkeypatch)
    store = memory._open()

    def feed() -> None:
        for number in range(ticks):
            memory.add(**tick_of(number))

    for number in range(ticks):
        oracle.add(**tick_of(number))
    adding = threading.Thread(target=feed)
    adding.start()
    waits = 0
    while adding.is_alive():
        wait_until(lambda: not adding.is_alive() or somebody_waits(memory))
        before = store.next_tick
        raw = store.sealer._queue.outstanding()[0] if store.sealer is not None else 0
        raw += store.large_segments.open_bytes()
        assert raw <= 2 * 36 * FRAME + 4 * FRAME
        waits += adding.is_alive()
        coder.gate.release()
        wait_until(lambda since=before: store.next_tick > since or not adding.is_alive())  # type: ignore[misc]
    coder.gate.release(1_000)
    memory.drain()
    assert waits > 36 // 3
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))
    memory.close()


def test_the_short_way_goes_as_far_as_the_worker_has_got() -> None:
    """It looks at what is sealed before every tick: it goes on as soon as there is more, and stops if there is less."""
    memory = ReplayMemory(box((72, 72), "u1"), spaces.Discrete(2), 5_000, budget=None)
    store, sealed = memory._open(), ctypes.c_int64(5 * FRAME)

    def come_at_once() -> int:
        """Return the frames that the open segment has once no more ticks come."""
        while memory.add_at_once(*(tick_of(store.next_tick)[key] for key in ARGUMENTS)):
            pass
        return store.large_segments.open_bytes() // FRAME

    for tick in range(40):
        memory.add(**tick_of(tick))
    memory.drain()
    assert store.large_segments.closed
    before = store.large_segments.open_bytes() // FRAME
    store._writer.limit((before - 5) * FRAME, sealed)
    assert come_at_once() == before + 1  # with the tick that exceeds it
    for more in (1, 2):
        sealed.value += FRAME
        assert come_at_once() == before + 1 + more
    sealed.value -= FRAME
    assert come_at_once() == before + 3
    sealed.value += 2 * FRAME
    assert come_at_once() == before + 4
    store._send_orders()
    sealed.value += 10 * FRAME
    assert come_at_once() == before + 4  # who gives an order looks again
    memory.close()


def test_a_block_that_goes_on_counts_what_is_new_in_it() -> None:
    """Slices of the segments before are not the open segment's; and a limit is of the parts that it was set for."""
    memory = ReplayMemory(box((72, 72), "u1"), spaces.Discrete(2), 5_000, budget=None)
    store, sealed = memory._open(), ctypes.c_int64(0)
    for tick in range(100):  # few frames, which come again and again: segments close by their ticks
        memory.add(**tick_of(tick % 10))
    store.large_segments._most_ticks = 50
    for tick in range(100, 130):
        memory.add(**tick_of(tick % 10))
    (part,) = store.large_segments.open.parts
    assert part.used_bytes > part.added_bytes == 0
    store._writer.blocks_pause_tick = 1 << 40
    store._writer.limit(0, sealed)
    assert memory.add_at_once(*(tick_of(130)[key] for key in ARGUMENTS))  # two frames that are new
    assert not memory.add_at_once(*(tick_of(131)[key] for key in ARGUMENTS))
    sealed.value = 2 * FRAME
    assert memory.add_at_once(*(tick_of(131)[key] for key in ARGUMENTS))
    store._writer.limit(1 << 40, sealed)
    vars(store._writer)["_parts"] = []  # others
    with memory._locked():
        store.write(store_tick(memory, 132))
    store._writer.blocks_pause_tick = 1 << 40
    assert not memory.add_at_once(*(tick_of(133)[key] for key in ARGUMENTS))
    memory.close()


def store_tick(memory: ReplayMemory, number: int) -> Any:
    return memory._fit((1,), *(tick_of(number)[key] for key in ARGUMENTS), None, None)


def test_what_came_is_sealed_or_outstanding() -> None:
    """However jobs are begun, begun again, withdrawn or ended twice; C reads the same number."""
    queue = SealQueue()
    jobs = [SealJob(frozen_block(), spill=False, nbytes=nbytes) for nbytes in (100, 20, 3)]
    queue.jobs.extend(jobs)

    def has(outstanding: int, sealed: int) -> None:
        assert queue.outstanding() == (outstanding, sealed)
        assert queue.sealed_bytes.value == sealed

    has(123, 0)
    assert queue.begin_next() is jobs[0]
    has(123, 0)
    queue.got_on(jobs[0], 60)
    has(63, 60)
    queue.got_on(jobs[0], 0)  # begun again
    has(123, 0)
    queue.got_on(jobs[0], 70)
    assert queue.begin_next() is jobs[1]  # between two steps of a choice
    queue.got_on(jobs[1], 5)
    has(118, 5)
    queue.end(jobs[1])
    has(103, 20)
    queue.got_on(jobs[0], 100)
    has(3, 120)
    for _ in range(2):
        queue.end(jobs[0])
        has(3, 120)
    queue.jobs.remove(jobs[2])  # withdrawn
    has(0, 120)


def test_the_worker_is_behind_once_half_of_what_may_wait_is_waiting() -> None:
    """Or if `add` waits; not if somebody waits until nothing is left, because then no more blocks come."""
    queue = SealQueue(min_waiting_bytes=1000)

    def is_behind_with(*waiting: int) -> bool:
        queue.jobs.clear()
        queue.jobs.extend(SealJob(frozen_block(), spill=False, nbytes=nbytes) for nbytes in waiting)
        return queue.is_behind

    assert not is_behind_with()
    assert not is_behind_with(500)
    assert is_behind_with(500, 1)
    queue.is_drained = True
    assert not is_behind_with(500, 1)
    queue.is_drained = False
    queue.came(300)  # two segments of it are less than what may wait anyway
    assert queue.max_waiting_bytes == 1000
    queue.spare_bytes = 900  # of a limit
    assert queue.max_waiting_bytes == 1500
    assert not is_behind_with(500, 1)
    with queue.waiting_for_room():
        assert is_behind_with()


def frozen_block() -> FrozenBlock:
    """Return slices that Zstandard makes smaller than LZ4 does."""
    slices = np.random.default_rng(0).integers(0, 3, 8 * 500, np.uint8)
    return FrozenBlock(0, LEAF, Window.whole(LEAF), KeptBlock(500, 8, slices))


class Keeper:
    """Takes what was sealed, as a memory does."""

    def __init__(self) -> None:
        self.kept: list[tuple[SliceBlock, Codec]] = []
        self.sealer: Sealer | None = None

    def collect(self) -> None:
        assert self.sealer is not None
        for block, sealed, _ in self.sealer.collect():
            if sealed is not None:
                self.kept.append((block, sealed.codec))
                block.replace_by(sealed)


def test_a_block_begins_again_with_the_fast_preset_if_add_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is not finished with the slower codec first, and it is handed in once."""
    monkeypatch.setattr(sealer, "choose", lambda *_: CAREFUL)
    monkeypatch.setattr(writing, "WATCHED_BYTES", 1000)
    coder, keeper = PiecewiseCoder(), Keeper()
    worker = keeper.sealer = Sealer(coder, 2.0, 1, keeper.collect, min_waiting_bytes=3 * 8 * 500)
    blocks = [frozen_block(), frozen_block()]
    worker.submit(blocks[0])
    wait_until(lambda: coder.codecs == [CAREFUL])
    worker.submit(blocks[1])
    waiting = threading.Thread(target=worker.wait_for_room, args=(lambda: 2 * 8 * 500,))
    waiting.start()
    wait_until(lambda: worker._queue.is_pressed)
    coder.gate.release()
    wait_until(lambda: len(coder.codecs) > 1)
    coder.gate.release(100)
    waiting.join(PATIENCE_S)
    worker.drain()
    assert [block for block, _ in keeper.kept] == [each.block for each in blocks]
    fast = keeper.kept[0][1]
    assert (fast.method, fast.level) == (Method.LZ4, 0)
    assert keeper.kept[1][1] in (CAREFUL, fast)  # the thread that waited may not have noticed yet that there is room
    worker.stop()


def test_small_blocks_may_wait_together_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is little, whatever their number; under a limit, what it leaves counts."""
    monkeypatch.setattr(sealer, "choose", lambda *_: CAREFUL)
    monkeypatch.setattr(writing, "WATCHED_BYTES", 500)
    coder, keeper = PiecewiseCoder(), Keeper()
    worker = keeper.sealer = Sealer(coder, 2.0, 1, keeper.collect, min_waiting_bytes=3 * 8 * 500)
    worker.submit(frozen_block())
    wait_until(lambda: len(coder.codecs) == 1)  # it stands at the gate
    for _ in range(2):
        worker.submit(frozen_block())
    assert not worker.is_crowded()
    assert worker.is_crowded(open_bytes=1)
    worker.queue.spare_bytes = 3 * 8 * 500 - 1
    assert worker.is_crowded()
    worker.queue.spare_bytes = 3 * 8 * 500
    assert not worker.is_crowded()
    coder.gate.release(1000)
    worker.drain()
    worker.stop()


# ---------------------------------------------------------------- the choice


class Choice:
    """Takes one codec, and remembers what it was shown."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.samples: list[BlockSample] = []
        patch.setattr(sealer, "choose", self._choose)

    def _choose(self, _coder: Any, _leaf: Any, window: Window, sample: BlockSample, *_: Any) -> Codec:
        self.samples.append(sample)
        return Codec(Method.ZSTD, 3, Transform(window.slice_bytes), group=4)


def test_a_codec_is_chosen_by_the_first_block_however_fast_blocks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same data gives the same codec, whatever the speed of the feed; blocks that wait do not take part in it."""
    choice, first = Choice(monkeypatch), []
    for waits in (False, True):
        memory = memory_with(PiecewiseCoder(10_000), monkeypatch, capacity=200)
        for number in range(400):
            memory.add(**tick_of(number))
            if waits and number % 10 == 0:
                memory.drain()
        memory.drain()
        first.append(choice.samples[0].spread)
        assert len(choice.samples) == 1
        assert "zstd3, 4 together" in str(memory.report())
        choice.samples.clear()
        memory.close()
    assert np.array_equal(first[0], first[1])


# ---------------------------------------------------------------- tiers and arenas


def test_sealing_begins_before_raw_blocks_reach_what_is_allowed() -> None:
    """If they come so fast that they would soon; else they stay raw while they fit."""
    tiers = Tiers(Budget(1 << 30))
    for _ in range(4):
        tiers.keep(frozen_block())
    allowance = Allowance(raw=5 * 4000, closed=10**6, at_most=10**6)
    for rate, sealed in ((0.0, 0), (8000.0, 0), (8002.0, 1), (16_002.0, 2), (1e9, 4)):
        tiers.settle(allowance, rate)
        assert len(tiers.under_way()[0]) == sealed


def test_a_limit_has_room_for_the_fast_preset_while_something_is_raw_or_free() -> None:
    """Without a limit there is always room."""
    tiers, little = Tiers(Budget(1 << 30)), Allowance(0, 4 * 4000, 4 * 4000)
    for _ in range(2):
        tiers.keep(frozen_block())
    assert tiers.has_room(little, 4 * 4000)  # half of it is raw
    assert not tiers.has_room(little, 4 * 4000 + 1)
    sealed = [frozen_block() for _ in range(4)]
    for frozen in sealed:
        kept = NativeCoder().seal(frozen.block.raw, Codec(Method.STORED, 0, Transform(500)))
        assert kept is not None
        frozen.block.replace_by(kept)
        tiers.keep(frozen)
    assert not tiers.has_room(little, 4000)
    assert Tiers(Budget()).has_room(little, 10**12)


def test_arenas_are_filled_again_if_blocks_come_fast() -> None:
    """Unless somebody reads what was in them; else they are given back."""
    leaf = Leaf("", (72, 72), np.dtype("u1"))
    segments = Segments(chosen_kernels(), [leaf], 1, 3_000, Repair())

    def fill(first: int) -> SliceBlock:
        for tick in range(first, first + 40):
            frames = [np.full((1, 72, 72), (tick + i) % 251, np.uint8) for i in range(2)]
            sliced = segments.prepare_tick(tick, frames[:1], frames[1:])
            segments.lengthen_logs()
            sliced.parts[0].append(frames[0], frames[1], sliced.cursors[0][tick % len(sliced.cursors[0])])
        return segments.take_frozen()[-1].block

    def seal(block: SliceBlock) -> None:
        sealed = chosen_kernels().coder.seal(block.raw, Codec(Method.LZ4, 0, Transform(FRAME)))
        assert sealed is not None
        segments.seal(block, sealed)

    block = fill(0)
    seal(block)
    assert not segments.arenas.spare
    segments.recycles = True
    block = fill(40)
    before = address(block.arena)
    seal(block)
    block = fill(80)
    fill(120)
    assert address(segments.closed[-1].parts[0].block.arena) == before
    reader = block.raw
    read = address(block.arena)
    seal(block)
    assert segments.arenas.take(block.capacity * FRAME) is not None
    assert [address(spare) for spare in segments.arenas.spare] == [read]
    del reader
    segments.recycles = False
    seal(fill(160))
    assert not segments.arenas.spare


def test_what_a_codec_is_chosen_by_goes_back_to_the_system() -> None:
    """It takes megabytes, which the heap of the worker's thread would keep: it is mapped on its own."""
    sample = BlockSample.of(np.zeros((300, 500), np.uint8), Window.whole(LEAF))
    for array in (sample.spread, sample.near, sample.changing, sample.learnt):
        owner: Any = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        owner = owner.obj if isinstance(owner, memoryview) else owner
        assert isinstance(owner, mmap.mmap)

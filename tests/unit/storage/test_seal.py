"""The worker seals blocks in order, never holds training up for long, and leaves raw what it cannot seal."""

from __future__ import annotations

import gc
import logging
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ReplayMemory
from holdall.native import NativeCoder, NativeKernels, ThreadPool, chosen_kernels
from holdall.schema import Bytes, Leaf
from holdall.storage import sealer as seal
from holdall.storage import segment
from holdall.storage.batch_source import Places
from holdall.storage.blocks import Codec, KeptBlock, Method, Predictor, SealedSlices, SliceBlock, Transform, address
from holdall.storage.codec import without_palette
from holdall.storage.coded_units import Order
from holdall.storage.repair import Repair
from holdall.storage.sealer import Sealer
from holdall.storage.segment import Segments
from holdall.storage.slices import FrozenBlock, Segment, Window
from holdall.storage.ticks import Watch
from holdall.storage.tiers import Budget, SealQueue
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.strategies import box

LEAF = Leaf("", (500,), np.dtype("u1"))
PATIENCE_S = 20
CODEC = Codec(Method.ZSTD, 9, Transform(500))


def frozen_block(content: str = "equal", seed: int = 0) -> FrozenBlock:
    slices = np.full((8, 500), 3, np.uint8)
    if content == "noise":
        slices = np.random.default_rng(seed).integers(0, 256, (8, 500), np.uint8)
    return FrozenBlock(0, LEAF, Window.whole(LEAF), KeptBlock(500, 8, slices.reshape(-1)))


class GatedCoder(NativeCoder):
    """Seals when it is let to, remembers the levels, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.levels: list[int] = []
        self.failing = False

    def seal(
        self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1, watch: Watch | None = None
    ) -> SealedSlices | None:
        self.begun.release()
        assert self.gate.acquire(timeout=PATIENCE_S)
        self.levels.append(codec.level)
        if self.failing:
            raise OSError("out of order")
        return super().seal(slices, codec, order, threads=threads, watch=watch)

    def keeping(self) -> GatedCoder:
        return self

    def open(self, times: int = 1000) -> None:
        self.gate.release(times)


class Keeper:
    """Takes what was sealed, in order."""

    def __init__(self) -> None:
        self.kept: list[tuple[SliceBlock, SealedSlices]] = []
        self.left: list[SliceBlock] = []  # as they are
        self.failing = False
        self.sealer: Sealer | None = None

    def collect(self) -> None:
        assert self.sealer is not None
        for block, sealed, _ in self.sealer.collect():
            if self.failing:
                raise OSError("no place")
            if sealed is None:
                self.left.append(block)
            else:
                self.kept.append((block, sealed))

    @property
    def blocks(self) -> list[SliceBlock]:
        return [block for block, _ in self.kept]


class Bench:
    """A sealer with a coder that can be held up and a list to seal into; always the same codec is chosen."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.codec = CODEC
        self.choices = 0
        patch.setattr(seal, "choose", self._choose)
        self.coder, self.keeper = GatedCoder(), Keeper()
        self.sealer = self.keeper.sealer = Sealer(
            self.coder, 2.0, 1, self.keeper.collect, min_waiting_bytes=4 * 8 * 500
        )

    def submit(self, *blocks: FrozenBlock) -> None:
        for block in blocks:
            self.sealer.submit(block)

    def rest(self) -> None:
        """Wait until the worker waits for blocks."""
        self.sealer.drain()
        wait_until(lambda: not self.sealer._queue.progress.begun)

    def _choose(self, *_: Any) -> Codec:
        self.choices += 1
        return self.codec


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.coder.open()
    bench.sealer.stop()


def append(segments: Segments, tick: int, obs: list[Any], next_obs: list[Any]) -> None:
    """Write a tick as a store does, part by part."""
    sliced = segments.prepare_tick(tick, obs, next_obs)
    segments.lengthen_logs()
    for part, cursors, now, after in zip(*sliced, strict=True):
        part.append(now, after, cursors[tick % len(cursors)])
    segments.look(tick, obs, next_obs)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.002)


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Leave aside the workers of memories that other tests dropped a moment ago."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdall-sealer" and thread not in OTHERS]


# ---------------------------------------------------------------- the queue


def test_blocks_are_sealed_in_the_order_they_came(bench: Bench) -> None:
    """And each one's sealed form is its own."""
    blocks = [frozen_block() for _ in range(6)]
    bench.coder.open()
    bench.submit(*blocks)
    bench.sealer.drain()
    assert bench.keeper.blocks == [each.block for each in blocks]
    assert bench.sealer.backlog == 0
    for block, sealed in bench.keeper.kept:
        out = np.empty((8, 500), np.uint8)
        bench.coder.decode(sealed, np.arange(8), out)
        assert out.tobytes() == block.arena.tobytes()


def test_the_backlog_counts_what_waits_and_what_is_being_sealed(bench: Bench) -> None:
    """From the moment a block is handed over until it is sealed."""
    bench.submit(frozen_block())
    assert bench.coder.begun.acquire(timeout=PATIENCE_S)
    bench.submit(frozen_block(), frozen_block())
    assert bench.sealer.backlog == 3
    bench.coder.open(1)
    wait_until(lambda: bench.sealer.backlog == 2)
    assert len(bench.keeper.kept) == 1


def test_there_is_no_worker_before_the_first_block(bench: Bench) -> None:
    """A memory that is never full of anything large costs no thread."""
    assert not workers()
    bench.sealer.drain()
    bench.sealer.wait_for_room()
    bench.submit(frozen_block())
    assert len(workers()) == 1


def test_the_fast_preset_is_used_while_many_blocks_wait(bench: Bench) -> None:
    """Until no more than half of what may wait is left. Every block is compressed once, in the order of arrival."""
    blocks = [frozen_block() for _ in range(6)]
    bench.submit(blocks[0])
    assert bench.coder.begun.acquire(timeout=PATIENCE_S)
    bench.submit(*blocks[1:])
    bench.coder.open()
    wait_until(lambda: bench.sealer.backlog == 0)
    assert bench.keeper.blocks == [each.block for each in blocks]
    fast = Codec(Method.LZ4, 0, Transform(500))
    assert [sealed.codec for _, sealed in bench.keeper.kept] == [CODEC, fast, fast, fast, CODEC, CODEC]


def test_blocks_are_compressed_well_for_a_caller_who_waits_for_all_of_them(bench: Bench) -> None:
    """However many they are: no more blocks come, so there is time."""
    bench.submit(frozen_block())
    assert bench.coder.begun.acquire(timeout=PATIENCE_S)
    bench.submit(*[frozen_block() for _ in range(5)])
    waiting = threading.Thread(target=bench.sealer.drain)
    waiting.start()
    wait_until(lambda: bench.sealer.queue.is_drained)
    bench.coder.open()
    waiting.join(PATIENCE_S)
    assert bench.coder.levels == [9] * 6


def test_the_fast_preset_is_not_used_where_it_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit without room for larger blocks, and with a disk tier."""
    monkeypatch.setattr(seal, "choose", lambda *_: CODEC)
    monkeypatch.setattr(SealQueue, "is_behind", True)
    for is_allowed, write in ((False, None), (True, lambda sealed: sealed)):
        keeper = Keeper()
        sealer = keeper.sealer = Sealer(chosen_kernels().coder, 2.0, 1, keeper.collect, write)
        sealer.allow_fast_preset(is_allowed=is_allowed)
        sealer.submit(frozen_block())
        sealer.drain()
        assert [sealed.codec for _, sealed in keeper.kept] == [CODEC]
        sealer.stop()


def test_blocks_that_come_one_by_one_are_compressed_well(bench: Bench) -> None:
    """The first one too."""
    bench.coder.open()
    seal_one_by_one(bench, ["equal"] * 4)
    assert bench.coder.levels == [9, 9, 9, 9]


def test_whoever_adds_waits_while_too_many_blocks_are_queued(bench: Bench) -> None:
    """So what is raw is bounded, however slow the compressor is."""
    bench.submit(frozen_block())
    assert bench.coder.begun.acquire(timeout=PATIENCE_S)
    bench.submit(*[frozen_block() for _ in range(3)])
    bench.sealer.wait_for_room()  # returns at once: there is room for one more
    bench.submit(frozen_block())
    waiting = threading.Thread(target=bench.sealer.wait_for_room)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    bench.coder.open(1)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_stopping_lets_go_of_whoever_waits(bench: Bench) -> None:
    """For room, or for the last block."""
    bench.submit(*[frozen_block() for _ in range(6)])
    waiting = [threading.Thread(target=act) for act in (bench.sealer.wait_for_room, bench.sealer.drain)]
    for thread in waiting:
        thread.start()
    stopping = threading.Thread(target=bench.sealer.stop)
    stopping.start()
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    bench.coder.open()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()


def test_stopping_ends_the_worker_after_the_block_it_is_at(bench: Bench) -> None:
    """What was not begun stays raw; stopping twice does no harm."""
    bench.submit(frozen_block())
    assert bench.coder.begun.acquire(timeout=PATIENCE_S)
    bench.submit(frozen_block(), frozen_block())
    stopping = threading.Thread(target=bench.sealer.stop)
    stopping.start()
    wait_until(lambda: bench.sealer._queue.stopped)
    bench.coder.open()
    stopping.join(PATIENCE_S)
    assert not workers()
    assert len(bench.coder.levels) == 1
    bench.sealer.stop()


def test_a_worker_that_hangs_is_told_of_and_left_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a disk that hangs, say; whoever waits says why, and the memory can be closed."""
    for name in ("_SAY_AFTER_S", "_LOOK_AGAIN_S", "_STOP_S"):
        monkeypatch.setattr(seal, name, 0.05)
    bench.submit(frozen_block())
    assert bench.coder.begun.acquire(timeout=PATIENCE_S)
    with caplog.at_level(logging.WARNING, "holdall"):
        waiting = threading.Thread(target=bench.sealer.drain)
        waiting.start()
        wait_until(lambda: "1 blocks are to be compressed or spilled" in caplog.text)
    bench.sealer.stop()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert workers()


# ---------------------------------------------------------------- the choice


def test_a_codec_is_chosen_once_and_kept(bench: Bench) -> None:
    """Measuring costs more than sealing."""
    bench.coder.open()
    bench.submit(*[frozen_block() for _ in range(30)])
    bench.sealer.drain()
    assert bench.choices == 1


def test_a_codec_is_chosen_for_each_field_and_window(bench: Bench) -> None:
    """What suits one need not suit another."""
    bench.coder.open()
    narrow = Window.along(LEAF, 0, 250)
    one = frozen_block()
    for field, window in ((0, one.window), (1, one.window), (0, narrow), (1, one.window)):
        bench.submit(FrozenBlock(field, LEAF, window, frozen_block().block))
    bench.sealer.drain()
    assert bench.choices == 3


def seal_one_by_one(bench: Bench, contents: list[str]) -> None:
    """Seal blocks, each after the one before."""
    for seed, content in enumerate(contents):
        bench.submit(frozen_block(content, seed))
        bench.rest()


def test_a_ratio_that_drifts_asks_for_a_new_choice(bench: Bench) -> None:
    """Slices that look different from those measured: not at once, but after some blocks."""
    bench.coder.open()
    seal_one_by_one(bench, ["equal"] * 3 + ["noise"] * 4)
    assert bench.choices == 1
    seal_one_by_one(bench, ["equal"] * 20)
    assert bench.choices == 1
    bench.codec = Codec(Method.LZ4, 0, Transform(500))
    seal_one_by_one(bench, ["noise"])
    assert bench.choices == 1
    seal_one_by_one(bench, ["equal"])
    assert bench.choices == 2
    assert bench.keeper.kept[-1][1].codec.method is Method.LZ4


def test_a_field_that_was_left_raw_is_looked_at_again(bench: Bench) -> None:
    """Now and then, not at every block."""
    bench.coder.open()
    bench.codec = Codec(Method.STORED, 0, Transform(500))
    seal_one_by_one(bench, ["noise"] * seal._REST)
    assert bench.choices == 1
    assert not bench.keeper.kept
    bench.codec = CODEC
    seal_one_by_one(bench, ["equal"] * 3)
    assert bench.choices == 2
    assert len(bench.keeper.kept) >= 1


def test_a_block_that_does_not_shrink_stays_raw(bench: Bench) -> None:
    """Offsets would only make it larger, and decoding slower."""
    bench.coder.open()
    block = frozen_block("noise")
    bench.submit(block)
    bench.sealer.drain()
    assert not bench.keeper.kept
    assert bench.keeper.left == [block.block]
    assert not bench.sealer.failure


@pytest.mark.parametrize(
    "form", [Transform(500, 4), Transform(498, 0, Predictor.COLOURS, 3, 2, 83)], ids=["words", "colours"]
)
def test_a_block_that_a_palette_does_not_hold_is_sealed_without_one(bench: Bench, form: Transform) -> None:
    """It was chosen on other slices; one with too much in it must not leave all of them raw."""
    bench.coder.open()
    bench.codec = Codec(Method.ZSTD, 3, form, group=4)
    size = form.slice_bytes
    pair = np.random.default_rng(0).integers(0, 256, (4, 1, 2, size), np.uint8)
    pixels = pair.repeat(2, axis=1).reshape(-1, size)  # units of two slices, twice each
    leaf = Leaf("", (size,), np.dtype("u1"))
    block = KeptBlock(size, len(pixels), np.ascontiguousarray(pixels).reshape(-1))
    bench.submit(FrozenBlock(0, leaf, Window.whole(leaf), block))
    bench.sealer.drain()
    ((_, sealed),) = bench.keeper.kept
    assert sealed.codec == without_palette(bench.codec)
    assert sealed.codec.transform.palette_bytes == 0
    out = np.empty_like(pixels)
    bench.coder.decode(sealed, np.arange(len(pixels)), out)
    assert out.tobytes() == pixels.tobytes()


# ---------------------------------------------------------------- what goes wrong


def test_an_error_leaves_the_block_raw_and_the_worker_at_work(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """It is told in the log and in `failure`; the next block is sealed as if nothing had been."""
    bench.coder.open()
    bench.coder.failing = True
    broken, whole = frozen_block(), frozen_block()
    with caplog.at_level(logging.WARNING, "holdall"):
        bench.submit(broken)
        bench.sealer.drain()
    assert bench.sealer.failure == "OSError: out of order"
    assert "could not be compressed" in caplog.text
    assert bench.keeper.left == [broken.block]
    bench.coder.failing = False
    bench.submit(whole)
    bench.sealer.drain()
    assert bench.keeper.blocks == [whole.block]


def test_a_place_that_fails_leaves_the_worker_at_work(bench: Bench) -> None:
    """Also where the error comes from whoever takes the sealed block."""
    bench.coder.open()
    bench.keeper.failing = True
    bench.submit(frozen_block())
    bench.sealer.drain()
    assert bench.sealer.failure == "OSError: no place"
    bench.keeper.failing = False
    bench.submit(frozen_block())
    bench.sealer.drain()
    assert len(bench.keeper.kept) == 1


@pytest.mark.parametrize("failing", [False, True], ids=["sealed", "failed"])
def test_the_worker_holds_on_to_nobody(monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    """When whoever takes the blocks is dropped, the worker lets go of it, whatever happened before."""
    monkeypatch.setattr(seal._LOG, "disabled", True)  # pytest keeps records, and with them the frames of an error
    bench = Bench(monkeypatch)
    bench.coder.open()
    bench.keeper.failing = failing
    block = frozen_block()
    bench.submit(block)
    bench.sealer.drain()
    owner, kept, sealer = weakref.ref(bench.keeper), weakref.ref(block.block), bench.sealer
    del block
    bench.keeper = Keeper()
    gc.collect()
    wait_until(lambda: owner() is None and kept() is None)
    sealer.stop()


# ---------------------------------------------------------------- in a memory


SPACE = box((4, 24, 24), "u1")


def fill(memory: ReplayMemory, ticks: int, oracle: OracleMemory | None = None, first: int = 0) -> None:
    """Add stacks of frames that say their numbers."""
    for tick in range(first, first + ticks):
        frames = (np.arange(tick, tick + 5) % 251).astype(np.uint8)
        film = np.broadcast_to(frames[:, None, None], (5, 24, 24))
        given: dict[str, Any] = {
            "obs": film[None, :4].copy(),
            "next_obs": film[None, 1:].copy(),
            "action": np.array([tick % 2]),
            "reward": np.array([tick], np.float32),
            "terminated": np.zeros(1, np.bool_),
            "truncated": np.zeros(1, np.bool_),
        }
        memory.add(**given)
        if oracle is not None:
            oracle.add(**given)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 20_000)


def memory_with(coder: NativeCoder | None, patch: pytest.MonkeyPatch, capacity: int = 5_000) -> ReplayMemory:
    """Make a memory that compresses everything, however small it is; with `coder`, if that is not None."""
    patch.setattr(Budget, "waiting_bytes", 0)
    if coder is not None:
        patch.setattr("holdall.replay.chosen_kernels", lambda: NativeKernels(coder))
        patch.setattr(seal, "choose", lambda *_: Codec(Method.LZ4, 0, Transform(576)))
    return ReplayMemory(SPACE, spaces.Discrete(2), capacity, budget=None)


@pytest.mark.usefixtures("small_segments")
def test_training_goes_on_when_compressing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is right, every block raw, and the report says why."""
    coder = GatedCoder()
    coder.open()
    coder.failing = True
    oracle = OracleMemory(5_000)
    with memory_with(coder, monkeypatch) as memory:
        fill(memory, 300, oracle)
        memory.drain()
        report = memory.report()
        assert report.failure == "OSError: out of order"
        assert "out of order" in str(report)
        assert "sealed by" not in str(report)
        fill(memory, 100, oracle, first=300)
        assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))
        assert len(coder.levels) > 5


@pytest.mark.usefixtures("small_segments")
def test_adding_waits_rather_than_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compressor that stands still, so does `add`, after a few blocks; the report shows the backlog."""
    coder = GatedCoder()
    with memory_with(coder, monkeypatch) as memory:
        adding = threading.Thread(target=fill, args=(memory, 2_000))
        adding.start()
        wait_until(lambda: memory.report().backlog > 1)
        adding.join(0.2)
        assert adding.is_alive()
        assert memory.report().backlog == 2
        assert "blocks wait to be compressed" in str(memory.report())
        memory.sample(8)  # reading does not wait
        coder.open()
        adding.join(PATIENCE_S)
        assert not adding.is_alive()
        memory.drain()
        assert memory.report().backlog == 0
        coder.open()


@pytest.mark.usefixtures("small_segments")
def test_extending_waits_rather_than_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long trajectory is held up as its steps would be."""
    coder = GatedCoder()
    frames = np.random.default_rng(0).integers(0, 9, (1_003, 24, 24), np.uint8)
    film = np.stack([frames[t : t + 4] for t in range(1_000)])[:, None]
    given = (film[:-1], np.zeros((999, 1), np.int64), np.zeros((999, 1), np.float32), film[1:])
    flags = np.zeros((999, 1), np.bool_)
    with memory_with(coder, monkeypatch) as memory:
        extending = threading.Thread(target=memory.extend, args=(*given, flags, flags))
        extending.start()
        extending.join(0.5)
        backlog = memory.report().backlog if extending.is_alive() else 1_000
        coder.open()
        extending.join(PATIENCE_S)
        assert backlog <= 2


@pytest.mark.usefixtures("small_segments")
def test_closing_a_memory_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is left behind."""
    memory = memory_with(None, monkeypatch)
    fill(memory, 300)
    assert workers()
    memory.close()
    assert not workers()


@pytest.mark.usefixtures("small_segments")
def test_dropping_a_memory_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `close` too: a worker holds on to no memory, so one that is let go of goes, and its worker with it."""
    memory = memory_with(None, monkeypatch)
    fill(memory, 300)
    memory.drain()
    assert workers()
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    wait_until(lambda: not workers())


@pytest.mark.usefixtures("small_segments")
def test_dropping_a_memory_in_the_middle_of_sealing_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block at work is finished for nobody."""
    coder = GatedCoder()
    memory = memory_with(coder, monkeypatch)
    fill(memory, 60)
    assert coder.begun.acquire(timeout=PATIENCE_S)
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    coder.open()
    wait_until(lambda: not workers())


def places_of(segments: Segments, ids: NDArray[np.int64]) -> Places:
    return Places.found(chosen_kernels(), segments, ids, [segments.cursors[0][ids, 0]], 1)


@pytest.mark.usefixtures("small_segments")
def test_readers_of_the_raw_form_keep_it() -> None:
    """Places that were looked up before a block was sealed read the same bytes after; none writes to its arena."""
    leaf = Leaf("", (4, 24, 24), np.dtype("u1"))
    kernels, oracle = chosen_kernels(), list[bytes]()
    segments = Segments(kernels, [leaf], 1, 3_000, Repair())
    film = np.random.default_rng(0).integers(0, 4, (700, 24, 24), np.uint8)

    def run(first: int, end: int) -> None:
        for tick in range(first, end):
            append(segments, tick, [film[None, tick : tick + 4]], [film[None, tick + 1 : tick + 5]])
            oracle.append(film[tick : tick + 4].tobytes())

    def read(places: Places) -> bytes:
        obs, next_obs = np.empty((300, leaf.nbytes), np.uint8), np.empty((300, leaf.nbytes), np.uint8)
        kernels.gather(places, 0, obs, next_obs, ThreadPool(threads=1))
        assert next_obs[:-1].tobytes() == obs[1:].tobytes()
        return obs.tobytes()

    run(0, 300)
    ticks = np.arange(300)
    before = places_of(segments, ticks)
    full = segments.take_frozen()
    arenas = {address(frozen.block.arena) for frozen in full}
    assert len(arenas) > 5
    for frozen in full:
        slices = frozen.block.arena[: frozen.block.used_bytes].reshape(frozen.block.used, -1)
        sealed = kernels.coder.seal(slices, Codec(Method.LZ4, 0, Transform(576)))
        assert sealed is not None
        segments.seal(frozen.block, sealed)
    run(300, 650)
    assert not arenas & {address(closed.parts[0].block.arena) for closed in segments.closed}
    assert read(before) == b"".join(oracle[:300])
    assert read(places_of(segments, ticks)) == b"".join(oracle[:300])


def seal_block(segments: Segments, block: SliceBlock) -> None:
    slices = block.arena[: block.used_bytes].reshape(block.used, -1)
    sealed = chosen_kernels().coder.seal(slices, Codec(Method.LZ4, 0, Transform(block.slice_bytes)))
    assert sealed is not None
    segments.seal(block, sealed)


@pytest.mark.usefixtures("small_segments")
def test_a_loaded_block_may_be_sealed_at_once() -> None:
    """Raw blocks of a loaded memory are listed for the sealer when everything else is in place."""
    leaf = Leaf("", (4, 24, 24), np.dtype("u1"))
    kernels = chosen_kernels()
    segments = Segments(kernels, [leaf], 1, 3_000, Repair())
    film = (np.arange(310, dtype=np.uint8)[:, None, None] * np.ones((24, 24), np.uint8))[:, None]
    for tick in range(300):
        append(segments, tick, [film[tick : tick + 4, 0][None]], [film[tick + 1 : tick + 5, 0][None]])
    for frozen in segments.take_frozen()[1::2]:
        seal_block(segments, frozen.block)
    first, opened = segments.open.first_tick, [part.closed() for part in segments.open.parts]
    saved = [*segments.closed, Segment(first, 300 - first, opened)]
    held = pickle.loads(pickle.dumps(saved, protocol=5))
    loaded = Segments(kernels, [], 1, 3_000, Repair())
    loaded.thaw(300, [leaf], segments.windows, held, segments.searches.state())
    loaded.cursors[0][:] = segments.cursors[0]
    for frozen in loaded.take_frozen():
        if frozen.block.sealed is None:
            seal_block(loaded, frozen.block)
    assert all(closed.parts[0].block.sealed is not None for closed in loaded.closed)
    obs, next_obs = np.empty((300, leaf.nbytes), np.uint8), np.empty((300, leaf.nbytes), np.uint8)
    places = places_of(loaded, np.arange(300))
    kernels.gather(places, 0, obs, next_obs, ThreadPool(threads=1))
    assert obs.tobytes() == b"".join(film[tick : tick + 4].tobytes() for tick in range(300))


class SealedWhenLookedAt(KeptBlock):
    """A block that the worker seals between two looks of another thread."""

    @property
    def sealed(self) -> SealedSlices | None:
        seen: SealedSlices | None = self.__dict__.get("hidden")
        if seen is None and self.__dict__.get("armed"):
            self.__dict__["armed"] = False
            slices = self.arena.reshape(self.used, -1)
            sealed = NativeCoder().seal(slices, CODEC)
            assert sealed is not None
            self.replace_by(sealed)
        return seen

    @sealed.setter
    def sealed(self, value: SealedSlices | None) -> None:
        self.__dict__["hidden"] = value


def test_a_block_that_is_sealed_while_it_is_pickled_is_pickled_whole() -> None:
    """In either form: a pickle is written outside the lock."""
    content = frozen_block().block.arena
    block = SealedWhenLookedAt(500, 8, content)
    block.__dict__["armed"] = True
    _, (_, used, kept) = block.__reduce__()
    assert used == 8
    raw = np.empty((8, 500), np.uint8)
    if isinstance(kept, SealedSlices):
        NativeCoder().decode(kept, np.arange(8), raw)
    else:
        raw = kept
    assert raw.tobytes() == content.tobytes()


EXIT = """
import threading, time
import numpy as np
from holdall.storage.codec_choice import choose
from holdall.storage.blocks import Codec, Method, Predictor, Transform
from holdall.native import chosen_kernels

coder = chosen_kernels().coder
slices = np.random.default_rng(0).integers(0, 40, (4, 1 << 21), np.uint8)
codec = Codec(Method.ZSTD, 19, Transform(1 << 21))
threading.Thread(target=coder.seal, args=(slices, codec), daemon=True).start()
time.sleep(0.3)
"""


def test_a_process_may_end_while_a_block_is_being_sealed() -> None:
    """Nothing is freed under the worker, which would end a finished training with a crash."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- cameras


SLOW_CODEC = Codec(Method.LZ4, 9, Transform(96 * 96, 0, Predictor.LEFT, planes=1, rows=96, columns=96))


@pytest.fixture
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 1 << 19)


def camera_memory(budget: Any, capacity: int = 4000) -> ReplayMemory:
    return ReplayMemory(spaces.Box(0, 255, (96, 96), np.uint8), spaces.Discrete(2), capacity, budget=budget, seed=0)


def sealer_of(memory: ReplayMemory) -> Sealer:
    """Return the sealer of a memory that has filled a block."""
    sealer = memory._open().sealer
    assert sealer is not None
    return sealer


def add_camera(memory: ReplayMemory, first: int, steps: int) -> None:
    """Add images with smooth ground and a little noise, so that one codec shrinks them more than another."""
    ground = np.add.outer(np.arange(96), np.arange(96)).astype(np.uint8)
    seen = [
        (ground + i % 60 + np.random.default_rng(i).integers(0, 3, (96, 96), np.uint8)).astype(np.uint8)
        for i in range(first, first + steps + 1)
    ]
    for i in range(steps):
        memory.add(seen[i][None], np.zeros(1, np.int64), np.ones(1), seen[i + 1][None], [False], [False])


def test_an_error_in_a_choice_leaves_the_block_as_it_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Codec:
        raise OSError("no codec")

    monkeypatch.setattr(seal, "choose", fail)
    bench.coder.open()
    bench.submit(frozen_block())
    bench.sealer.drain()
    assert "no codec" in bench.sealer.failure
    assert len(bench.keeper.left) == 1
    monkeypatch.setattr(seal, "choose", lambda *_: CODEC)
    bench.submit(frozen_block())
    bench.sealer.drain()
    assert len(bench.keeper.kept) == 1


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="there is no smaps")
def test_a_limit_holds_while_a_camera_is_faster_than_the_worker() -> None:
    """All that the process has for itself, at every moment, as the system counts it."""
    limit = 48 * 2**20

    def unique_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private"))

    space = spaces.Box(0, 255, (96, 96, 3), np.uint8)
    memory = ReplayMemory(space, spaces.Discrete(2), 100_000, budget=limit, seed=0)
    ground = np.arange(96 * 96 * 3, dtype=np.uint32).reshape(1, 96, 96, 3)
    images = [(ground * (i % 7 + 1) // 64 + i).astype(np.uint8) for i in range(64)]
    action, reward, never = np.zeros(1, np.int64), np.ones(1), np.zeros(1, np.bool_)
    before, most = unique_bytes(), 0
    for step in range(6_000):
        now, after = images[step * 7 % 61].copy(), images[(step + 1) * 7 % 61].copy()
        now[0, 0, :4, 0] = after[0, 0, :4, 0] = 0
        now[0, 0, 0] = [step % 251, step // 251 % 251, 1]
        after[0, 0, 0] = [(step + 1) % 251, (step + 1) // 251 % 251, 1]
        memory.add(now, action, reward, after, never, never)
        if step % 200 == 0:
            most = max(most, unique_bytes() - before)
            memory.sample(1)
    assert most <= limit + 16 * 2**20  # what the interpreter and this test take meanwhile
    assert memory.report().failure == ""
    memory.close()


# ---------------------------------------------------------------- while a codec is chosen


TOGETHER = Codec(Method.ZSTD, 3, Transform(500), group=8)
"""Smaller than anything quick."""


class SteppedChoice:
    """A choice that measures until it is let go, and then takes a codec; whoever adds waits for any block meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Budget, "waiting_bytes", 0)
        self.codec = SLOW_CODEC
        self.begun, self.done = threading.Event(), threading.Event()
        self.choices = 0
        patch.setattr(seal, "choose", self._choose)

    def _choose(self, coder: Any, _leaf: Any, window: Window, *_: Any) -> Codec:
        self.choices += 1
        samples = np.zeros((2, window.slice_bytes), np.uint8)
        self.begun.set()
        end = time.monotonic() + PATIENCE_S
        while True:
            coder.seal(samples, Codec(Method.LZ4, 0, Transform(window.slice_bytes)))
            if self.done.wait(0.001) or time.monotonic() > end:
                return self.codec


@pytest.mark.usefixtures("_small_segments")
def test_adding_goes_on_while_a_codec_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: blocks are compressed with the fast preset meanwhile, and stay so."""
    choice = SteppedChoice(monkeypatch)
    choice.codec = Codec(Method.ZSTD, 3, Transform(96 * 96, predictor=Predictor.LEFT, planes=1, rows=96, columns=96))
    memory = camera_memory(None)
    add_camera(memory, 0, 700)
    assert choice.begun.is_set()
    sealer = sealer_of(memory)
    was_choosing = sealer.is_choosing
    assert was_choosing  # nothing waited for it
    wait_until(lambda: memory.report().backlog <= 1)
    held = memory.gather(np.arange(memory.first_id, memory.next_id))
    assert "segments sealed by left+lz4" in str(memory.report())
    choice.done.set()
    memory.drain()
    assert not sealer.is_choosing
    assert_same_bits(memory.gather(np.arange(memory.first_id, memory.next_id)).obs, held.obs)
    assert "left+zstd3" in str(memory.report())
    assert choice.choices == 1
    tiers = memory._open()._tiers
    assert tiers._sealed.nbytes == sum(frozen.block.used_bytes for frozen in tiers._sealed.blocks.values())
    memory.close()


def test_a_choice_that_nobody_presses_is_what_its_block_is_sealed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not sealed twice."""
    choice, coder, keeper = SteppedChoice(monkeypatch), GatedCoder(), Keeper()
    choice.codec = CODEC
    coder.open()
    sealer = keeper.sealer = Sealer(coder, 2.0, 1, keeper.collect)
    sealer.submit(frozen_block())
    assert choice.begun.wait(PATIENCE_S)
    assert sealer.backlog == 1
    choice.done.set()
    sealer.drain()
    assert [sealed.codec for _, sealed in keeper.kept] == [CODEC]
    sealer.stop()


def test_a_field_whose_first_block_comes_during_a_choice_gets_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices follow each other; until then its blocks are compressed with the fast preset."""
    choice, coder, keeper = SteppedChoice(monkeypatch), GatedCoder(), Keeper()
    choice.codec = TOGETHER
    coder.open()
    sealer = keeper.sealer = Sealer(coder, 2.0, 1, keeper.collect, min_waiting_bytes=3 * 8 * 500)
    first, second, third = (frozen_block() for _ in range(3))
    sealer.submit(first)
    assert choice.begun.wait(PATIENCE_S)
    sealer.submit(FrozenBlock(1, LEAF, second.window, second.block))
    wait_until(lambda: len(keeper.kept) == 1)
    assert sealer.backlog == 1
    choice.done.set()
    sealer.drain()
    sealer.submit(FrozenBlock(1, LEAF, third.window, third.block))
    sealer.drain()
    assert keeper.blocks == [second.block, first.block, third.block]
    assert [sealed.codec.method for _, sealed in keeper.kept] == [Method.LZ4, Method.ZSTD, Method.ZSTD]
    assert choice.choices == 2
    sealer.stop()


def test_an_error_in_a_choice_leaves_no_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block stays raw, blocks that came meanwhile are compressed, and the next one asks for a choice again."""
    coder, keeper, fails = GatedCoder(), Keeper(), threading.Event()

    def fail(coder: Any, *_: Any) -> Codec:
        end = time.monotonic() + PATIENCE_S
        while not fails.is_set() and time.monotonic() < end:
            coder.seal(np.zeros((2, 500), np.uint8), CODEC)
        raise OSError("no codec")

    monkeypatch.setattr(seal, "choose", fail)
    coder.open(10**6)
    sealer = keeper.sealer = Sealer(coder, 2.0, 1, keeper.collect)
    blocks = [frozen_block() for _ in range(3)]
    for block in blocks[:2]:
        sealer.submit(block)
    wait_until(lambda: keeper.blocks == [blocks[1].block])
    fails.set()
    wait_until(lambda: "no codec" in sealer.failure)
    assert keeper.left == [blocks[0].block]
    monkeypatch.setattr(seal, "choose", lambda *_: TOGETHER)
    sealer.submit(blocks[2])
    sealer.drain()
    assert keeper.blocks == [blocks[1].block, blocks[2].block]
    assert sealer.backlog == 0
    sealer.stop()


def test_blocks_are_late_by_how_fast_they_would_come() -> None:
    """The time that whoever adds waits for room says nothing of how fast it adds."""
    queue = SealQueue()
    for _ in range(4):
        queue.came(10**6)
        with queue.waiting_for_room():
            before = queue.bytes_per_second
            time.sleep(0.02)
            assert queue.bytes_per_second == before
    assert queue.bytes_per_second == 0 or queue.bytes_per_second > 3 * 10**6 / 0.08


def test_threads_share_a_block_where_cores_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fast preset only, and fewer than there are: training needs one."""
    asked: list[tuple[int, Codec]] = []

    class Counting(NativeCoder):
        def seal(
            self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1,
            watch: Watch | None = None,
        ) -> SealedSlices | None:  # fmt: skip
            asked.append((threads, codec))
            return super().seal(slices, codec, order, threads=threads, watch=watch)

    monkeypatch.setattr(seal, "choose", lambda *_: TOGETHER)
    keeper = Keeper()
    sealer = keeper.sealer = Sealer(Counting(), 2.0, 4, keeper.collect)
    for is_behind, threads in ((False, 1), (True, 3)):
        monkeypatch.setattr(SealQueue, "is_behind", is_behind)
        sealer.submit(frozen_block())
        sealer.drain()
        assert asked[-1] == (threads, keeper.kept[-1][1].codec)
    assert [sealed.codec.method for _, sealed in keeper.kept] == [Method.ZSTD, Method.LZ4]
    sealer.stop()


def test_a_choice_leaves_pythons_lock_to_a_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It waits between two of its steps for as long as a snapshot takes at most, and goes on by itself."""
    memory, slept = camera_memory(None), list[float]()
    add_camera(memory, 0, 1)
    sealer = memory._open()._ensure_sealer()
    monkeypatch.setattr(seal, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    sealer._work._pause_choice()
    assert not slept
    before = time.monotonic()
    memory.save(tmp_path).result()
    assert before < sealer.queue.away_until < time.monotonic() + 0.1
    sealer.queue.away_until = time.monotonic() + 60
    sealer._work._pause_choice()
    assert 59 < slept[-1] < 61
    memory.close()

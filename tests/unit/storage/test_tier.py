"""The newest blocks stay raw, the older are sealed, the oldest go to disk; without one, they leave early."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall.native import chosen_kernels
from holdall.schema import Leaf
from holdall.storage import segment
from holdall.storage.batch_source import Places
from holdall.storage.blocks import Codec, Coded, Extent, KeptBlock, Method, SliceBlock, Transform
from holdall.storage.repair import Repair
from holdall.storage.segment import Segments
from holdall.storage.slices import FrozenBlock, Window
from holdall.storage.tiers import Allowance, Budget, Tiers

LEAF = Leaf("", (10,), np.dtype("u1"))
MUCH = 1 << 40


class Waiting:
    """Remembers what it was to do, and does nothing."""

    def __init__(self) -> None:
        self.submitted: list[FrozenBlock] = []
        self.spilled: list[FrozenBlock] = []
        self.withdrawn: set[int] = set()
        self.waiting: dict[tuple[int, bool], FrozenBlock] = {}

    def send(self, sealing: list[FrozenBlock], spilling: list[FrozenBlock]) -> None:
        """Take what is new of the orders, and forget what is not wanted any more."""
        orders = {(id(frozen.block), False): frozen for frozen in sealing}
        orders |= {(id(frozen.block), True): frozen for frozen in spilling}
        self.withdrawn |= {key[0] for key in self.waiting} - {key[0] for key in orders}
        for key, frozen in orders.items():
            if key not in self.waiting:
                (self.spilled if key[1] else self.submitted).append(frozen)
        self.waiting = orders

    def done(self, block: SliceBlock) -> None:
        self.waiting = {key: frozen for key, frozen in self.waiting.items() if key[0] != id(block)}


def append(segments: Segments, tick: int, obs: list[Any], next_obs: list[Any]) -> None:
    """Write a tick as a store does, part by part."""
    sliced = segments.prepare_tick(tick, obs, next_obs)
    segments.lengthen_logs()
    for part, cursors, now, after in zip(*sliced, strict=True):
        part.append(now, after, cursors[tick % len(cursors)])
    segments.look(tick, obs, next_obs)


def frozen_block(slices: int, field: int = 0) -> FrozenBlock:
    block = KeptBlock(LEAF.nbytes, slices, np.zeros(slices * LEAF.nbytes, np.uint8))
    return FrozenBlock(field, LEAF, Window.whole(LEAF), block)


def seal(block: SliceBlock, to_bytes: int) -> None:
    """Let a block be sealed to so many bytes, offsets and all."""
    codec, offsets = Codec(Method.LZ4, 0, Transform(LEAF.nbytes)), np.zeros(block.used + 1, np.uint32)
    data = np.zeros(to_bytes - offsets.nbytes, np.uint8)
    block.replace_by(chosen_kernels().coder.adopt(Coded(codec, block.used, offsets, np.zeros(0, np.uint8), data)))


def spill_file() -> Any:
    """Return a file that blocks can be in, and of which nothing is read."""
    return SimpleNamespace(descriptor=-1)


def on_disk(block: SliceBlock, file: Any = None) -> Coded:
    """Describe a block in `file`."""
    file = spill_file() if file is None else file
    codec, offsets = Codec(Method.LZ4, 0, Transform(block.slice_bytes)), np.zeros(block.used + 1, np.uint32)
    extent = Extent(file, 0, 100, np.zeros(block.used, np.uint32))
    return Coded(codec, block.used, offsets, np.zeros(0, np.uint8), extent)


def move_to_disk(block: SliceBlock, file: Any = None) -> None:
    """Let a block have been written to a file."""
    block.replace_by(chosen_kernels().coder.adopt(on_disk(block, file)))


class Memory:
    """Blocks that are held, oldest first; segments of one block each."""

    def __init__(self, sealer: Waiting, *, spills: bool = False, measures_early: bool = False) -> None:
        self.sealer = sealer
        self.tiers = Tiers(Budget(spills=spills), measures_early=measures_early)
        self.blocks: deque[SliceBlock] = deque()

    def forget(self, *blocks: SliceBlock) -> int:
        freed_bytes = self.tiers.forget(blocks)
        self.sealer.send(*self.tiers.under_way())
        return freed_bytes

    def take_back(self, block: SliceBlock) -> None:
        self.sealer.done(block)
        self.tiers.take_back(block)
        self.sealer.send(*self.tiers.under_way())

    def keep(self, frozen: FrozenBlock, raw: int, closed: int = MUCH) -> None:
        self.blocks.append(frozen.block)
        self.tiers.keep(frozen)
        self.settle(raw, closed)

    def settle(self, raw: int, closed: int, at_most: int | None = None, *, may_evict: bool = True) -> None:
        """Carry out what the tiers say, as a store does."""
        allowance = Allowance(raw, closed, closed if at_most is None else at_most)
        self.tiers.settle(allowance)
        self.sealer.send(*self.tiers.under_way())
        freed_bytes = 0
        while may_evict and self.blocks and self.tiers.is_over(allowance, freed_bytes):
            freed_bytes += self.forget(self.blocks.popleft())
        self.tiers.try_again(allowance, freed_bytes)
        self.sealer.send(*self.tiers.under_way())


# ---------------------------------------------------------------- raw


@given(counts=st.lists(st.integers(0, 9), max_size=30), allowed=st.integers(0, 200))
def test_the_newest_stay_raw_up_to_the_allowance(counts: list[int], allowed: int) -> None:
    """In the order in which they came, no earlier than needed, and no more than allowed ever stays."""
    sealer = Waiting()
    memory = Memory(sealer)
    blocks = []
    for count in counts:
        blocks.append(frozen_block(count))
        memory.keep(blocks[-1], allowed)
        assert sealer.submitted == blocks[: len(sealer.submitted)]
        raw = blocks[len(sealer.submitted) :]
        raw_bytes = sum(block.block.used_bytes for block in raw)
        assert raw_bytes <= allowed
        if sealer.submitted:
            assert raw_bytes + sealer.submitted[-1].block.used_bytes > allowed
    assert len(memory.blocks) == len(blocks)


def test_nothing_stays_raw_without_an_allowance() -> None:
    """Every block goes to the sealer when it comes."""
    sealer = Waiting()
    memory = Memory(sealer)
    blocks = [frozen_block(1) for _ in range(3)]
    for block in blocks:
        memory.keep(block, 0)
    assert sealer.submitted == blocks


def test_evicted_blocks_are_neither_counted_nor_sealed() -> None:
    """Their room is there for newer ones."""
    sealer = Waiting()
    memory = Memory(sealer)
    blocks = [frozen_block(1) for _ in range(6)]
    for block in blocks[:3]:
        memory.keep(block, 30)
    memory.forget(blocks[0].block, blocks[1].block, frozen_block(1).block)
    for block in blocks[3:5]:
        memory.keep(block, 30)
    assert sealer.submitted == []
    memory.keep(blocks[5], 30)
    assert sealer.submitted == [blocks[2]]


def test_the_first_block_of_every_field_is_sealed_early_where_that_is_wanted() -> None:
    """So that how much fits a limit is known soon; the second ones stay raw."""
    sealer = Waiting()
    memory = Memory(sealer, measures_early=True)
    blocks = [frozen_block(2, field) for field in (0, 1, 0, 1)]
    for block in blocks:
        memory.keep(block, MUCH)
    assert sealer.submitted == blocks[:2]


def test_what_blocks_shrink_to_is_known_when_one_of_every_field_was_sealed() -> None:
    """Not a guess from one field alone."""
    sealer = Waiting()
    memory = Memory(sealer, measures_early=True)
    tiers = memory.tiers
    assert tiers.shrinks_to is None
    for field in (0, 1):
        memory.keep(frozen_block(20, field), MUCH)
    seal(sealer.submitted[0].block, 100)
    memory.take_back(sealer.submitted[0].block)
    assert tiers.shrinks_to is None
    seal(sealer.submitted[1].block, 150)
    memory.take_back(sealer.submitted[1].block)
    assert tiers.shrinks_to == 250 / 400


# ---------------------------------------------------------------- too much


def test_raw_blocks_are_sealed_before_anything_leaves() -> None:
    """Nothing is evicted while compressing may be enough, and nothing spilled while something is raw."""
    sealer = Waiting()
    memory = Memory(sealer, spills=True)
    blocks = [frozen_block(20) for _ in range(3)]
    for block in blocks:
        memory.keep(block, MUCH, 550)
    assert sealer.submitted == blocks[:1]
    assert not sealer.spilled
    memory.settle(MUCH, 100)
    assert sealer.submitted == blocks
    assert not sealer.spilled


def test_what_does_not_fit_when_sealed_leaves_early_without_a_disk() -> None:
    """The oldest first, and no more of them than needed."""
    sealer = Waiting()
    memory = Memory(sealer)
    for _ in range(4):
        memory.keep(frozen_block(20), 0, 1000)
        seal(sealer.submitted[-1].block, 150)
        memory.take_back(sealer.submitted[-1].block)
    memory.settle(0, 1000)
    assert len(memory.blocks) == 4
    memory.settle(0, 450)
    assert list(memory.blocks) == [frozen.block for frozen in sealer.submitted[1:]]
    memory.settle(0, 0)
    assert not memory.blocks


@pytest.mark.parametrize("shrinks", [True, False], ids=["sealed", "tried in vain"])
def test_what_does_not_fit_when_sealed_is_spilled(shrinks: bool) -> None:
    """The oldest first, and no more of them than needed; nothing leaves."""
    sealer = Waiting()
    memory = Memory(sealer, spills=True)
    for _ in range(4):
        memory.keep(frozen_block(20), 0, MUCH)
        if shrinks:
            seal(sealer.submitted[-1].block, 150)
        memory.take_back(sealer.submitted[-1].block)
    memory.settle(0, 450 if shrinks else 600)
    assert sealer.spilled == sealer.submitted[:1]
    move_to_disk(sealer.spilled[0].block)
    memory.take_back(sealer.spilled[0].block)
    memory.settle(0, 450 if shrinks else 600)
    assert len(sealer.spilled) == 1
    memory.settle(0, 0)
    assert sealer.spilled == sealer.submitted
    assert len(memory.blocks) == 4


def test_blocks_leave_early_while_the_disk_takes_none() -> None:
    """Memory stays bounded; and the disk is tried again with the next block that comes."""
    sealer = Waiting()
    memory = Memory(sealer, spills=True)
    for _ in range(4):
        memory.keep(frozen_block(20), 0, MUCH)
        seal(sealer.submitted[-1].block, 150)
        memory.take_back(sealer.submitted[-1].block)
    memory.settle(0, 450)
    memory.take_back(sealer.spilled[-1].block)  # still in memory: it could not be written
    for _ in range(3):
        memory.settle(0, 450)
    assert list(memory.blocks) == [frozen.block for frozen in sealer.submitted[1:]]
    assert len(sealer.spilled) == 1, "the disk is not tried until something new comes"
    for _ in range(3):
        memory.keep(frozen_block(20), 0, 450)
        seal(sealer.submitted[-1].block, 150)
        memory.take_back(sealer.submitted[-1].block)
        memory.take_back(sealer.spilled[-1].block)
        memory.settle(0, 450)
        assert len(memory.blocks) == 3, "what is held is bounded while the disk takes nothing"
    assert len(sealer.spilled) == 4
    memory.keep(frozen_block(20), 0, 450)
    move_to_disk(sealer.spilled[-1].block)
    memory.take_back(sealer.spilled[-1].block)
    held = list(memory.blocks)
    memory.settle(0, 0)
    assert list(memory.blocks) == held, "from then on they are spilled again, and none leaves early"


def test_a_full_disk_costs_the_files_that_make_room_and_no_more() -> None:
    """What lies on disk takes no memory: giving it up makes room there, for what is to be spilled."""
    sealer = Waiting()
    memory = Memory(sealer, spills=True)
    files = [spill_file() for _ in range(5)]
    blocks = [frozen_block(10) for _ in range(13)]
    for number, block in enumerate(blocks[:10]):  # two in a file, 100 bytes each on disk
        memory.keep(block, 0, MUCH)
        seal(block.block, 60)
        memory.take_back(block.block)
        memory.settle(0, 0)
        move_to_disk(block.block, files[number // 2])
        memory.take_back(block.block)
    for block in blocks[10:]:
        memory.keep(block, 0, MUCH)
        seal(block.block, 120)
        memory.take_back(block.block)
    del sealer.spilled[:]

    memory.settle(0, 120)
    assert [spilled.block for spilled in sealer.spilled] == [blocks[10].block, blocks[11].block]
    memory.take_back(blocks[10].block)  # the disk is full
    memory.settle(0, 120, at_most=130)
    assert list(memory.blocks) == [block.block for block in blocks[4:]], "240 bytes need two files"
    assert [spilled.block for spilled in sealer.spilled[2:]] == [blocks[10].block, blocks[11].block]
    memory.settle(0, 120, at_most=130)
    assert len(memory.blocks) == 9, "nothing more leaves while these are written"

    memory.take_back(blocks[10].block)  # somebody else took the room
    memory.settle(0, 120, at_most=400)
    assert list(memory.blocks) == [block.block for block in blocks[8:]], "two more files"
    memory.take_back(blocks[10].block)  # and again
    memory.settle(0, 120, at_most=130)
    assert list(memory.blocks) == [blocks[12].block], "memory counts for more than the disk"


def test_a_disk_that_takes_blocks_again_is_not_given_up() -> None:
    """One success is enough: the next failure makes room on disk first, however much waits in memory."""
    sealer = Waiting()
    memory = Memory(sealer, spills=True)
    blocks = [frozen_block(10) for _ in range(8)]
    for block in blocks[:4]:
        memory.keep(block, 0, MUCH)
        seal(block.block, 60)
        memory.take_back(block.block)
        memory.settle(0, 0)
        move_to_disk(block.block, spill_file())
        memory.take_back(block.block)
    for block in blocks[4:6]:
        memory.keep(block, 0, MUCH)
        seal(block.block, 90)
        memory.take_back(block.block)
    memory.settle(0, 90)
    for _ in range(2):
        memory.take_back(blocks[4].block)  # room is made after the first time, and it fails again
        memory.settle(0, 90, at_most=180)
    move_to_disk(blocks[4].block, spill_file())
    memory.take_back(blocks[4].block)
    assert list(memory.blocks) == [block.block for block in blocks[2:6]]
    for block in blocks[6:]:
        memory.keep(block, 0, MUCH)
        seal(block.block, 90)
        memory.take_back(block.block)
    memory.settle(0, 90)
    memory.take_back(blocks[5].block)
    memory.settle(0, 90, at_most=100)
    assert list(memory.blocks) == [block.block for block in blocks[4:]], "two of 100 bytes for 180"


def test_blocks_that_a_disk_did_not_take_are_tried_again_in_their_order() -> None:
    """Those that waited behind the one that failed come back with it."""
    sealer = Waiting()
    memory = Memory(sealer, spills=True)
    blocks = [frozen_block(10) for _ in range(4)]
    for block in blocks:
        memory.keep(block, 0, MUCH)
        seal(block.block, 60)
        memory.take_back(block.block)
    memory.settle(0, 0)
    assert [spilled.block for spilled in sealer.spilled] == [block.block for block in blocks]
    memory.take_back(blocks[0].block)
    assert sealer.withdrawn == {id(block.block) for block in blocks[1:]}
    sealer.spilled.clear()
    memory.settle(0, 0, MUCH, may_evict=False)
    assert not sealer.spilled, "not before something new comes"
    memory.tiers.keep(frozen_block(1))
    memory.settle(MUCH, 0, MUCH, may_evict=False)
    assert [spilled.block for spilled in sealer.spilled] == [blocks[0].block], "one is enough to try"
    move_to_disk(blocks[0].block)
    memory.take_back(blocks[0].block)
    memory.settle(0, 0)
    assert [spilled.block for spilled in sealer.spilled] == [block.block for block in blocks]


def test_a_block_that_is_evicted_while_it_is_at_the_sealer_is_not_counted() -> None:
    """Whether it is being sealed or spilled; what comes of it is nobody's any more."""
    sealer = Waiting()
    memory = Memory(sealer, spills=True)
    sealing, spilling = frozen_block(20), frozen_block(20)
    memory.keep(spilling, 0, MUCH)
    memory.take_back(spilling.block)
    memory.settle(0, 0)
    memory.keep(sealing, 0, MUCH)
    assert (sealer.spilled, sealer.submitted[-1]) == ([spilling], sealing)
    memory.forget(sealing.block, spilling.block)
    assert sealer.withdrawn == {id(sealing.block), id(spilling.block)}
    memory.take_back(sealing.block)
    memory.take_back(spilling.block)
    newer = frozen_block(20)
    memory.keep(newer, 200, 200)
    assert sealer.submitted[-1] is sealing, "the newer one fits: the two that left take nothing"
    assert len(sealer.spilled) == 1


def places_of(segments: Segments, ids: NDArray[np.int64]) -> Places:
    return Places.found(chosen_kernels(), segments, ids, [segments.cursors[0][ids, 0]], 1)


def test_a_block_that_leaves_while_it_is_written_to_disk_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as one on disk nor by what its index takes: that would be taken from the budget for ever."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 4_000)
    leaf = Leaf("", (50,), np.dtype("u1"))
    segments = Segments(chosen_kernels(), [leaf], 1, 10_000, Repair())
    rows = np.random.default_rng(0).integers(0, 256, (900, 1, 50), np.uint8)
    for tick in range(800):
        append(segments, tick, [rows[tick]], [rows[tick + 1]])
    full = segments.take_frozen()
    assert len(full) > 5
    written = [chosen_kernels().coder.adopt(on_disk(frozen.block)) for frozen in full[:2]]
    before = segments.overhead_bytes
    segments.seal(full[1].block, written[1])
    held = places_of(segments, np.array([0]))
    assert held.reads_files
    assert segments.overhead_bytes == before + written[1].nbytes
    segments.prepare_eviction(segments.closed[2].first_tick)[1]()
    after = segments.overhead_bytes
    segments.seal(full[0].block, written[0])
    assert segments.overhead_bytes == after < before
    assert not places_of(segments, np.array([799])).reads_files


# ---------------------------------------------------------------- blocks of several segments


class Known:
    """The blocks that a store would know of by what segments say: those that were full, and not dropped since."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.blocks: set[int] = set()

    def append(self, tick: int, obs: Any, next_obs: Any, oldest: int) -> None:
        append(self._segments, tick, [obs], [next_obs])
        self.blocks |= {id(frozen.block) for frozen in self._segments.take_frozen()}
        if self._segments.has_before(oldest):
            gone, evict = self._segments.prepare_eviction(oldest)
            evict()
            self.blocks -= {id(block) for block in gone}


def test_a_block_is_forgotten_with_its_last_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments may share a block: one that an older segment left is still raw, counted, and sealed in turn."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 1)
    leaf = Leaf("", (50, 40), np.dtype("u1"))
    segments = Segments(chosen_kernels(), [leaf], 1, 400, Repair())
    known = Known(segments)
    days = np.random.default_rng(0).integers(0, 256, (2000, 40), np.uint8)
    shared = 0
    for tick in range(1500):
        obs, next_obs = (days[None, start : start + 50] for start in (tick, tick + 1))
        known.append(tick, obs, next_obs, tick - 399)
        if tick % 10 == 0:
            names: list[Any] = [closed.parts[0].block for closed in segments.closed]
            closed_blocks = {id(block) for block in names if block is not segments.open.parts[0].block}
            shared += len(names) > len({id(block) for block in names})
            assert closed_blocks <= known.blocks
    assert shared > 20, "the segments of this test have to share blocks"


@pytest.mark.parametrize("still_ticks", range(74, 84))
def test_a_block_that_a_new_window_leaves_behind_is_counted(still_ticks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments before may name it, too: it must not stay raw, and uncounted, until the last of them goes."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segment, "_SEGMENTS_OF_A_MEMORY", 4)
    monkeypatch.setattr(segment, "_REPLAYED_TICKS", 4)
    leaf = Leaf("", (4, 36, 36), np.dtype("u1"))
    segments = Segments(chosen_kernels(), [leaf], 1, 17, Repair())
    known = Known(segments)
    film = np.random.default_rng(0).integers(0, 256, (205, 36, 36), np.uint8)
    film[:still_ticks] = 0  # a still picture at first, whose window is found only when it begins to move
    for tick in range(200):
        known.append(tick, film[None, tick : tick + 4], film[None, tick + 1 : tick + 5], tick - 16)
        open_block = segments.open.parts[0].block
        closed = {id(each.parts[0].block) for each in segments.closed if each.parts[0].block is not open_block}
        assert closed <= known.blocks

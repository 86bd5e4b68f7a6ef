"""The newest blocks stay raw, as many as are allowed; the oldest are sealed first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdall.experience import segment
from holdall.experience.kernels import chosen_kernels
from holdall.experience.seal import FrozenBlock, Sealer
from holdall.experience.segment import Segments
from holdall.experience.slices import KeptBlock
from holdall.experience.tier import Tiers
from holdall.experience.window import Window
from holdall.schema import Leaf

LEAF = Leaf("", (10,), np.dtype("u1"))


class Waiting(Sealer):
    """Remembers what it was to seal, and seals nothing."""

    def __init__(self) -> None:
        self.submitted: list[FrozenBlock] = []

    def submit(self, frozen: FrozenBlock) -> None:
        self.submitted.append(frozen)


def frozen_block(slices: int) -> FrozenBlock:
    block = KeptBlock(LEAF.nbytes, slices, np.zeros(slices * LEAF.nbytes, np.uint8))
    return FrozenBlock(0, LEAF, Window.whole(LEAF), block)


@given(counts=st.lists(st.integers(0, 9), max_size=30), allowed=st.integers(0, 200))
def test_the_newest_stay_raw_up_to_the_allowance(counts: list[int], allowed: int) -> None:
    """In the order in which they came, no earlier than needed, and no more than allowed ever stays."""
    sealer = Waiting()
    tiers = Tiers(sealer, allowed)
    blocks = []
    for count in counts:
        blocks.append(frozen_block(count))
        tiers.keep(blocks[-1])
        assert sealer.submitted == blocks[: len(sealer.submitted)]
        raw = blocks[len(sealer.submitted) :]
        raw_bytes = sum(block.block.used_bytes for block in raw)
        assert raw_bytes <= allowed
        if sealer.submitted:
            assert raw_bytes + sealer.submitted[-1].block.used_bytes > allowed


def test_nothing_stays_raw_without_an_allowance() -> None:
    """Every block goes to the sealer when it comes."""
    sealer = Waiting()
    tiers = Tiers(sealer, 0)
    blocks = [frozen_block(1) for _ in range(3)]
    for block in blocks:
        tiers.keep(block)
    assert sealer.submitted == blocks


def test_evicted_blocks_are_neither_counted_nor_sealed() -> None:
    """Their room is there for newer ones."""
    sealer = Waiting()
    tiers = Tiers(sealer, 30)
    blocks = [frozen_block(1) for _ in range(6)]
    for block in blocks[:3]:
        tiers.keep(block)
    tiers.forget([blocks[0].block, blocks[1].block, object()])
    for block in blocks[3:5]:
        tiers.keep(block)
    assert sealer.submitted == []
    tiers.keep(blocks[5])
    assert sealer.submitted == [blocks[2]]


class Counting(Tiers):
    """Keeps everything raw and says what it still knows of."""

    def __init__(self) -> None:
        super().__init__(Waiting(), 1 << 40)

    @property
    def known(self) -> set[int]:
        return {id(frozen.block) for frozen in self._raw}


def test_a_block_is_forgotten_with_its_last_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments may share a block: one that an older segment left is still raw, counted, and sealed in turn."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 1)
    leaf = Leaf("", (50, 40), np.dtype("u1"))
    tiers = Counting()
    segments = Segments(chosen_kernels(), [leaf], 1, 400, tiers)
    days = np.random.default_rng(0).integers(0, 256, (2000, 40), np.uint8)
    shared = 0
    for tick in range(1500):
        obs, next_obs = (days[None, start : start + 50] for start in (tick, tick + 1))
        segments.append(tick, [obs], [next_obs])
        segments.evict_before(tick - 399)
        if tick % 10 == 0:
            names: list[Any] = [closed.parts[0].block for closed in segments._closed]
            closed_blocks = {id(block) for block in names if block is not segments._open.parts[0].block}
            shared += len(names) > len({id(block) for block in names})
            assert closed_blocks <= tiers.known
    assert shared > 20, "the segments of this test have to share blocks"

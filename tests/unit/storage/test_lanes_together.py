"""Slices of one lane lie together when a block is sealed, however many lanes brought them in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from holdall import ReplayMemory
from holdall.schema import Bytes, Leaf
from holdall.storage import segment
from holdall.storage.blocks import KeptBlock
from holdall.storage.slices import FrozenBlock, Window
from holdall.testing import OracleMemory, assert_same_bits

SIDE = 70
LEAF = Leaf("", (SIDE, SIDE), np.dtype("u1"))


def frozen_block(used: int, lanes: int, logs: list[Any]) -> FrozenBlock:
    block = KeptBlock(LEAF.nbytes, used, np.zeros(used * LEAF.nbytes, np.uint8))
    return FrozenBlock(0, LEAF, Window.whole(LEAF), block, lanes, lambda: logs)


def test_lane_after_lane_comes_in_the_order_in_which_it_showed_its_slices() -> None:
    """Over all segments that name the block; what none of them names comes last."""
    first, second = np.array([[0, 1], [2, 3]], np.uint16), np.array([[2, 4], [6, 3]], np.uint16)
    order = frozen_block(8, 2, [first, second]).lane_order()
    assert order is not None
    assert order.tolist() == [0, 2, 6, 1, 3, 4, 5, 7]


@given(data=st.data())
def test_every_slice_has_one_place(data: st.DataObject) -> None:
    """Whatever the logs say."""
    used, lanes, rows = data.draw(st.tuples(st.integers(1, 60), st.integers(2, 6), st.integers(0, 20)))
    log = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, used, (rows, lanes)).astype(np.uint16)
    order = frozen_block(used, lanes, [log, log[::-1]]).lane_order()
    assert order is not None
    assert sorted(order.tolist()) == list(range(used))


def test_one_lane_and_blocks_that_nothing_names_stay_in_order() -> None:
    """There is nothing to sort, or nothing to sort by."""
    assert frozen_block(4, 1, [np.zeros((4, 1), np.uint16)]).lane_order() is None
    assert frozen_block(4, 3, []).lane_order() is None


# ---------------------------------------------------------------- a memory


def walks(ticks: int, lanes: int) -> Bytes:
    """Draw scenes of noise, another one in each lane, with a square that walks through them."""
    generator = np.random.default_rng(0)
    scenes = generator.integers(0, 256, (lanes, SIDE, SIDE), np.uint8)
    frames = np.repeat(scenes[None], ticks, axis=0)
    for tick in range(ticks):
        for lane in range(lanes):
            y, x = (tick + lane) % (SIDE - 4), (tick * 3 + lane * 7) % (SIDE - 4)
            frames[tick, lane, y : y + 4, x : x + 4] = tick % 251
    return frames


def filled(frames: Bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[ReplayMemory, OracleMemory]:
    """Play frames whose lanes' episodes end at different ticks."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 2**20)
    ticks, lanes = len(frames) - 1, frames.shape[1]
    memory = ReplayMemory(
        spaces.Box(0, 255, (SIDE, SIDE), np.uint8),
        spaces.Discrete(2),
        ticks * lanes,
        lanes,
        budget=None,
        prefer="memory",
    )
    oracle = OracleMemory(ticks * lanes, lanes)
    for tick in range(ticks):
        step = {
            "obs": frames[tick], "action": np.zeros(lanes, np.int64), "reward": np.zeros(lanes, np.float32),
            "next_obs": frames[tick + 1], "terminated": (tick + np.arange(lanes)) % 29 == 0,
            "truncated": np.zeros(lanes, np.bool_),
        }  # fmt: skip
        memory.add(**step)
        oracle.add(**step)
    memory.drain()
    return memory, oracle


def sealed_bytes(memory: ReplayMemory) -> float:
    field = memory.report().fields[0]
    assert "sealed by" in field.finding
    return field.sealed_bytes / len(memory)


def test_many_lanes_take_hardly_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane's frames resemble each other and no other lane's; every transition is what it was."""
    frames = walks(1025, 8)
    memory, oracle = filled(frames, monkeypatch)
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))
    # One lane sees the same frames, one lane's after another's.
    alone, _ = filled(np.ascontiguousarray(frames.transpose(1, 0, 2, 3)).reshape(-1, 1, SIDE, SIDE), monkeypatch)
    assert sealed_bytes(memory) < 1.15 * sealed_bytes(alone) < SIDE * SIDE / 10

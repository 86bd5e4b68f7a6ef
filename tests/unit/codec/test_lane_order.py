"""Slices of one lane are neighbours in a compressed block, because they have most in common."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from gymnasium import spaces

from holdall._native import Block, decode, encode
from holdall.codec.choice import FieldCodec
from holdall.schema import Leaf, Schema
from holdall.store.budget import Budget
from holdall.store.store import Store
from holdall.store.tuning import Tuning
from holdall.store.windows import Window

SHAPE = (80, 80)
TICKS = 60


def fill_block(lanes: int) -> Block:
    """Return a full block of a store in which every lane shows its own scene, with a few changes per step."""
    rng = np.random.default_rng(0)
    tuning = Tuning(max_segment_ticks=TICKS, block_bytes=2 * TICKS * lanes * 6400)
    schema = Schema.of(spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(2), None, lanes)
    store = Store(schema, 10_000, Budget.automatic(2**40, can_spill=False, tuning=tuning), tuning=tuning, threads=1)
    frames = rng.integers(0, 256, (lanes, *SHAPE), np.uint8)
    none = np.zeros(lanes, np.bool_)
    block = store.catalog.segments[0].parts[0].block
    assert block is not None
    while block.is_open:
        after = frames.copy()
        after[:, rng.integers(0, 80), rng.integers(0, 80)] += 1
        store.append(frames, np.zeros(lanes, np.int64), np.zeros(lanes), after, none, none)
        frames = after
        block = store.catalog.segments[0].parts[0].block
        assert block is not None
    store.close()
    return block


def test_a_block_of_one_lane_keeps_its_order() -> None:
    assert fill_block(1).lane_order() is None


def test_slices_are_sorted_by_the_lane_that_stored_them_first() -> None:
    block = fill_block(4)
    order = block.lane_order()
    assert order is not None
    assert np.array_equal(np.sort(order), np.arange(block.slice_count))
    lanes = np.split(order, 4)
    slices = block.read(0, block.slice_count)
    for lane in lanes:
        assert (np.diff(lane.astype(np.int64)) > 0).all()
        # Slices of a lane differ in few bytes, and those of two lanes in nearly all.
        assert (slices[lane[:-1]] != slices[lane[1:]]).sum(axis=1).max() < 10


def test_sorted_slices_take_fewer_bytes() -> None:
    leaf = Leaf("image", SHAPE, np.dtype(np.uint8))
    block = fill_block(4)
    coded = FieldCodec(leaf, Window.whole(leaf), "memory", Tuning()).encode(block, is_behind=False)
    slices = block.read(0, block.slice_count)
    unsorted = encode(slices, replace(coded.codec, dictionary=None))
    by_lane = encode(slices, replace(coded.codec, dictionary=None), block.lane_order())
    assert unsorted is not None
    assert by_lane is not None
    assert 2 * by_lane.nbytes < unsorted.nbytes
    assert coded.places is not None
    assert decode(coded, 0, block.slice_count).tobytes() == slices.tobytes()


def test_lanes_are_forgotten_when_the_block_is_compressed() -> None:
    leaf = Leaf("image", SHAPE, np.dtype(np.uint8))
    block = fill_block(4)
    block.form = FieldCodec(leaf, Window.whole(leaf), "balanced", Tuning()).encode(block, is_behind=False)
    assert block.lane_order() is None

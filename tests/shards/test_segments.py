"""Segments: a shard holds the transitions that a writer was given, and refuses damaged or forged bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall import Uniform
from holdall.cluster.segment import SegmentBuilder, unpack_payload
from holdall.cluster.shard_store import ShardStore
from holdall.errors import ArgumentError, DamageError
from holdall.schema import Schema
from holdall.store.columns import Columns
from holdall.store.tuning import Tuning
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits
from holdall.testing.strategies import streams

from .desk import Desk

FRAMES = spaces.Box(0, 255, (4, 24, 24), np.uint8)


def make_schema(stream: Stream, lanes: int | None = None) -> Schema:
    lanes = stream.num_envs if lanes is None else lanes
    return Schema.of(stream.observation_space, stream.action_space, stream.extras, lanes)


def make_tick(stream: Stream) -> tuple[Any, ...]:
    step = stream.tick()
    return step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated, step.extras


@settings(max_examples=60, deadline=None)
@given(
    stream=streams(),
    ticks=st.integers(1, 40),
    capacity=st.integers(1, 90),
    segment_rows=st.integers(1, 60),
    block_bytes=st.sampled_from([1, 4_000, 2**20]),
    small_field_bytes=st.sampled_from([0, 64, 4096]),
    is_near=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_shard_holds_the_transitions_that_were_added(
    stream: Stream,
    ticks: int,
    capacity: int,
    segment_rows: int,
    block_bytes: int,
    small_field_bytes: int,
    is_near: bool,
    seed: int,
) -> None:
    """With any layout, any number of lanes, and both kinds of answers."""
    tuning = Tuning(
        block_bytes=block_bytes,
        small_field_bytes=small_field_bytes,
        tiny_field_bytes=min(16, small_field_bytes),
        detector_min_pairs=2,
    )
    desk = Desk(
        make_schema(stream), Uniform(), capacity * stream.num_envs, 0, segment_rows=segment_rows, is_near=is_near
    )
    desk.builder = SegmentBuilder(make_schema(stream), segment_rows, "memory", tuning)
    oracle: Any = OracleMemory(capacity * stream.num_envs, stream.num_envs)
    generator = np.random.default_rng(seed)
    for tick in range(ticks):
        step = make_tick(stream)
        valid = generator.random(stream.num_envs) < 0.8 if tick % 3 == 2 else None
        oracle.add(*step, valid=valid)
        desk.add(*step, valid)
        if generator.random() < 0.1:
            desk.send()
    desk.send()
    assert (desk.shard.store.first_row, desk.shard.store.next_row) == (oracle.first_id, oracle.next_id)
    ids = oracle.ids[oracle.are_valid(oracle.ids)]
    if len(ids):
        drawn = generator.choice(ids, 20)
        assert_same_bits(desk.gather(drawn), oracle.gather(drawn))


@settings(max_examples=40, deadline=None)
@given(stream=streams(), segment_rows=st.integers(1, 60), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_extend_adds_the_rows_that_add_would(stream: Stream, segment_rows: int, lengths: list[int]) -> None:
    schema = make_schema(stream)
    desk = Desk(schema, Uniform(), 10_000, 0, segment_rows=segment_rows)
    oracle = OracleMemory(10_000 * stream.num_envs, stream.num_envs)
    for length in lengths:
        steps = stream.ticks(length)
        given_steps = (
            steps.obs,
            steps.action,
            steps.reward,
            steps.next_obs,
            steps.terminated,
            steps.truncated,
            steps.extras,
        )
        oracle.extend(*given_steps)
        checked = desk.builder.check((length, stream.num_envs), (*given_steps, None))
        added = 0
        while added < length:
            count = desk.builder.extend(checked, added)
            added += count
            if count == 0:
                desk.send()
    desk.send()
    assert_same_bits(desk.gather(oracle.ids), oracle.gather(oracle.ids))


def test_windows_and_codecs_may_change_between_segments() -> None:
    """A codec is chosen in the background, and is used from some segment on."""
    turning = LeafPlan(axis=0, content="table", later=LeafPlan(), later_from=150)
    stream = Stream(FRAMES, spaces.Discrete(3), 2, plans=[turning], mishaps=Mishaps(ends=0.1))
    desk = Desk(make_schema(stream), Uniform(), 2_000, 0)
    oracle = OracleMemory(2_000, 2)
    for _ in range(600):
        step = make_tick(stream)
        oracle.add(*step)
        desk.add(*step)
    desk.send()
    assert_same_bits(desk.gather(oracle.ids), oracle.gather(oracle.ids))


def test_a_stack_of_frames_is_sent_once_per_frame() -> None:
    stream = Stream(FRAMES, spaces.Discrete(3), 1, plans=[LeafPlan(axis=0)])
    builder = SegmentBuilder(make_schema(stream), 128, "balanced", Tuning(small_field_bytes=256))
    sizes = []
    for _ in range(512):
        step = (*make_tick(stream), None)
        if not builder.append(step):
            sizes.append(len(builder.close()))
            builder.append(step)
    assert sizes[-1] < 1.2 * 128 * 24 * 24  # Frames of noise: only repetitions can be saved.


def pack_ticks(lanes: int = 2) -> tuple[bytes, Columns]:
    stream = Stream(FRAMES, spaces.Discrete(3), lanes, plans=[LeafPlan(axis=0, content="table")])
    builder = SegmentBuilder(make_schema(stream), 64, "balanced", Tuning(small_field_bytes=256))
    for _ in range(20):
        builder.append((*make_tick(stream), None))
    return builder.close(), Columns(make_schema(stream, 1))


def test_damaged_bytes_are_refused() -> None:
    payload, columns = pack_ticks()
    unpack_payload(payload, columns)
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(payload)
        damaged[generator.integers(len(payload))] ^= 1 << generator.integers(8)
        with pytest.raises(DamageError):
            unpack_payload(bytes(damaged), columns)
    for length in (0, 1, 31, 32, 100, len(payload) - 1):
        with pytest.raises(DamageError):
            unpack_payload(payload[:length], columns)
    with pytest.raises(DamageError):
        unpack_payload(payload + b"x", columns)


def test_a_segment_of_another_memory_is_refused() -> None:
    payload, _ = pack_ticks()
    other = Schema.of(spaces.Box(0, 255, (4, 24, 25), np.uint8), spaces.Discrete(3), {}, 1)
    with pytest.raises(DamageError):
        unpack_payload(payload, Columns(other))


def test_rewards_of_another_dtype_are_refused() -> None:
    schema = Schema.of(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3), {}, 1)
    store = ShardStore(schema, 100, 0, 1, Tuning())
    row = np.zeros((1, 3), np.float32)
    no = np.zeros(1, np.bool_)
    for dtype in (np.float32, np.float64):
        builder = SegmentBuilder(replace(schema, num_envs=1), 8, "balanced", Tuning())
        builder.append((row, np.zeros(1, np.int64), np.zeros(1, dtype), row, no, no, None, None))
        received = unpack_payload(builder.close(), store.columns)
        if dtype is np.float32:
            store.require_reward_dtype(received.reward_dtype)
            store.adopt(received.segment)
        else:
            with pytest.raises(ArgumentError, match="float64"):
                store.require_reward_dtype(received.reward_dtype)


def test_rows_that_the_capacity_evicts_take_no_memory() -> None:
    stream = Stream(FRAMES, spaces.Discrete(3), 1, plans=[LeafPlan()])
    desk = Desk(make_schema(stream), Uniform(), 100, 0, segment_rows=16)
    for _ in range(1_000):
        desk.add(*make_tick(stream))
    desk.send()
    assert len(desk.shard.store) == 100
    assert desk.shard.store.segments <= 100 // 16 + 2

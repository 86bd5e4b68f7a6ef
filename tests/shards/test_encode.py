"""Encoding: trajectories and single ticks become the same segments, byte for byte."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")


from holdall.native import chosen_kernels
from holdall.schema import Schema
from holdall.storage import sealed_segment
from holdall.storage.blocks import Codec, Method, Transform
from holdall.storage.sealed_segment import Encoder, SealedSegment, pack_segment
from holdall.storage.ticks import Tick
from holdall.testing import Stream
from holdall.testing.strategies import streams


def flat(stream: Stream, schema: Schema) -> Tick:
    step, leading = stream.tick(), (stream.num_envs,)
    return Tick(
        schema.observation.flatten(step.obs, leading, "obs"),
        schema.action.flatten(step.action, leading, "action"),
        step.reward,
        schema.observation.flatten(step.next_obs, leading, "next_obs"),
        step.terminated,
        step.truncated,
        schema.extras.flatten(step.extras, leading, "extras"),
        None,
    )


def together(ticks: list[Tick]) -> Tick:
    def stacked(name: str) -> list[NDArray[Any]]:
        return [np.stack(arrays) for arrays in zip(*(getattr(tick, name) for tick in ticks), strict=True)]

    rewards, terminated, truncated = (
        np.stack([getattr(tick, name) for tick in ticks]) for name in ("reward", "terminated", "truncated")
    )
    return Tick(
        stacked("obs"), stacked("action"), rewards, stacked("next_obs"), terminated, truncated, stacked("extras"), None
    )


def packed(segment: SealedSegment) -> bytes:
    return pack_segment(segment, chosen_kernels().coder)


def laid_out(array: NDArray[Any], lie: str) -> NDArray[Any]:
    """Return the same values, otherwise laid out in memory."""
    if lie == "every second":
        return np.repeat(array, 2, axis=0)[::2]
    return np.asfortranarray(array) if lie == "axes turned" else array


@settings(max_examples=80)
@given(
    stream=streams(),
    most=st.integers(1, 30),
    segment_bytes=st.sampled_from([1, 2_000, 4 * 2**20]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    lie=st.sampled_from(["one after another", "every second", "axes turned"]),
)
def test_a_trajectory_becomes_the_segments_of_its_ticks(
    stream: Stream, most: int, segment_bytes: int, lengths: list[int], lie: str
) -> None:
    """However its arrays lie in memory."""
    schema = Schema.of(stream.observation_space, stream.action_space, stream.extras, stream.num_envs)
    kernels = chosen_kernels()
    one, other = (Encoder(schema, stream.num_envs, most, kernels) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed_segment, "_SEGMENT_BYTES", segment_bytes)
        for length in lengths:
            ticks = [flat(stream, schema) for _ in range(length)]
            expected, found = [], []
            for tick in ticks:
                one.add(tick)
                if one.is_full:
                    expected.append(packed(one.close({})))
            steps, taken = together(ticks), 0
            obs, next_obs = ([laid_out(array, lie) for array in arrays] for arrays in (steps.obs, steps.next_obs))
            steps = steps._replace(obs=obs, next_obs=next_obs)
            while taken < length:
                taken += other.extend(steps, taken)
                if other.is_full:
                    found.append(packed(other.close({})))
            assert found == expected
            assert other.rows == one.rows
        if one.rows:
            assert packed(other.close({})) == packed(one.close({}))


@settings(max_examples=80)
@given(
    stream=streams(),
    most=st.integers(1, 30),
    rows=st.integers(0, 60),
    segment_bytes=st.sampled_from([1, 2_000, 4 * 2**20]),
    ways=st.lists(st.sampled_from(["short", "general", "some lanes", "run", "close"]), min_size=1, max_size=80),
)
def test_ticks_that_are_added_the_short_way_become_the_same_segments(
    stream: Stream, most: int, rows: int, segment_bytes: int, ways: list[str]
) -> None:
    """In any order with all other calls: what cannot be written so is not written at all."""
    schema = Schema.of(stream.observation_space, stream.action_space, stream.extras, stream.num_envs)
    one, other = (Encoder(schema, stream.num_envs, most, chosen_kernels()) for _ in range(2))
    add_at_once = other.short_way(threading.RLock(), rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed_segment, "_SEGMENT_BYTES", segment_bytes)
        for way in ways:
            if one.is_full or (way == "close" and one.rows):
                assert other.is_full == one.is_full
                assert packed(other.close({})) == packed(one.close({}))
            tick = flat(stream, schema)
            if way == "some lanes":
                tick = tick._replace(valid=np.arange(stream.num_envs) % 2 == 0)
            one.add(tick)
            if way == "run":
                assert other.extend(together([tick]), 0) == 1
            elif way != "short" or schema.extras.leaves or not add_at_once(*arguments(schema, tick)):
                other.add(tick)
            assert other.rows == one.rows
        if one.rows:
            assert packed(other.close({})) == packed(one.close({}))


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_lanes_without_a_step_are_known_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tick with such lanes makes a column; what was interrupted then is done by the next call."""
    schema = Schema.of(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), None, 2)
    given = np.zeros((2, 3), np.float32), np.zeros(2, np.int64), np.ones(2), np.ones((2, 3), np.float32)
    no = np.zeros(2, np.bool_)
    whole, partial = (
        Tick.fitted(schema, (2,), None, *given, no, no, None, valid) for valid in (None, np.array([True, False]))
    )
    kernels = chosen_kernels()
    encoder = Encoder(schema, 2, 8, kernels)
    encoder.add(whole)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "new_writer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            encoder.add(partial)
    encoder.add(partial)
    assert encoder.close({}).rows.columns["invalid.0"].tolist() == [[False, False], [False, True]]


def arguments(schema: Schema, tick: Tick) -> tuple[Any, ...]:
    obs, next_obs = (schema.observation.build(arrays) for arrays in (tick.obs, tick.next_obs))
    action = schema.action.build(tick.action)
    return obs, action, tick.reward, next_obs, tick.terminated, tick.truncated


def test_most_ticks_take_the_short_way() -> None:
    """And none while the lock is held, nor beyond the rows that it may fill."""
    frames = spaces.Dict({"image": spaces.Box(0, 255, (4, 20, 20), np.uint8), "goal": spaces.Box(-1, 1, (3,))})
    schema = Schema.of(frames, spaces.Discrete(4), None, 1)
    encoder, lock, short = Encoder(schema, 1, 128, chosen_kernels()), threading.RLock(), 0
    add_at_once = encoder.short_way(lock, 112)
    generator, no = np.random.default_rng(0), np.zeros(1, np.bool_)
    slices = generator.integers(0, 256, (1300, 20, 20), np.uint8)
    for step in range(1280):
        obs, next_obs = (
            {"image": slices[None, first : first + 4], "goal": np.full((1, 3), step, np.float32)}
            for first in (step, step + 1)
        )
        given = obs, np.zeros(1, np.int64), np.ones(1, np.float32), next_obs, no, no
        with lock:
            assert not add_at_once(*given)
        if add_at_once(*given):
            assert encoder.rows <= 112
            short += 1
            continue
        if encoder.is_full:
            encoder.close({})
        encoder.add(Tick.fitted(schema, (1,), encoder.reward_dtype, *given, None, None))
    assert short > 1000


def test_a_level_that_takes_hardly_more_room_is_preferred_if_it_is_quicker() -> None:
    generator = np.random.default_rng(0)
    frames = np.repeat(generator.integers(0, 256, (1, 84, 84), np.uint8), 512, axis=0)
    for frame, (row, column) in zip(frames, generator.integers(0, 76, (512, 2)).tolist(), strict=True):
        frame[row : row + 8, column : column + 8] = 255
    slices, coder = frames.reshape(512, -1), chosen_kernels().coder
    slow = Codec(Method.ZSTD, 12, Transform(84 * 84), None, 16)
    quick = sealed_segment.quicker(coder, slow, slices)
    sealed, again = coder.seal(slices, slow), coder.seal(slices, quick)
    assert sealed is not None
    assert again is not None
    assert quick.level <= 7
    assert again.coded.data.nbytes <= 1.06 * sealed.coded.data.nbytes

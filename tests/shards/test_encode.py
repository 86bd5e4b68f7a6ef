"""Encoding: trajectories and single ticks become the same segments, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")


from holdall.native import chosen_kernels
from holdall.schema import Schema
from holdall.storage import sealed_segment
from holdall.storage.codec import Codec, Method, Transform
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


@settings(max_examples=60)
@given(
    stream=streams(),
    most=st.integers(1, 30),
    segment_bytes=st.sampled_from([1, 2_000, 4 * 2**20]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_a_trajectory_becomes_the_segments_of_its_ticks(
    stream: Stream, most: int, segment_bytes: int, lengths: list[int]
) -> None:
    schema = Schema.of(stream.observation_space, stream.action_space, stream.extras, stream.num_envs)
    one, other = (Encoder(schema, stream.num_envs, most, chosen_kernels()) for _ in range(2))
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
            while taken < length:
                taken += other.extend(steps, taken)
                if other.is_full:
                    found.append(packed(other.close({})))
            assert found == expected
            assert other.rows == one.rows
        if one.rows:
            assert packed(other.close({})) == packed(one.close({}))


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
    assert again.coded.data.nbytes <= 1.03 * sealed.coded.data.nbytes

"""Tracks: which layout a field gets, when it is changed, and that every layout gives the same rows."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.native import ThreadPool, chosen_kernels
from holdall.schema import Leaf
from holdall.storage.rollout import RolloutField, RolloutFields
from holdall.storage.slices import OpenPart

LANES = 2
ALONE = ThreadPool(1)


def frames(ticks: int, seed: int = 0, size: int = 40) -> NDArray[np.uint8]:
    """Stacks of four that move on by a frame: (ticks, lanes, 4, size, size)."""
    film = np.random.default_rng(seed).integers(0, 256, (ticks + 3, LANES, size, size), np.uint8)
    return np.stack([film[t : t + 4].swapaxes(0, 1) for t in range(ticks)])


def noise(ticks: int, seed: int = 0, size: int = 40) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (ticks, LANES, 4, size, size), np.uint8)


def track_of(shape: tuple[int, ...], ticks: int = 64) -> RolloutField:
    return RolloutField(Leaf("", shape, np.dtype(np.uint8)), ticks, LANES, chosen_kernels(), compressed=False)


def fill(track: RolloutField, told: NDArray[np.uint8]) -> str:
    """Write a rollout, read it back, and return what was found about it."""
    track.reset()
    for tick, obs in enumerate(told):
        track.write(tick, obs)
    out = np.empty((told.shape[0] * LANES, *told.shape[2:]), np.uint8)
    order = np.random.default_rng(1).permutation(len(out))
    track.rows.gather(order, out, ALONE)
    assert out.tobytes() == told.reshape(out.shape)[order].tobytes()
    return track.report(len(told)).finding


def test_a_window_is_found_in_the_first_steps_and_each_frame_is_stored_once() -> None:
    track = track_of((4, 40, 40))
    assert fill(track, frames(64)) == "window of 4 along axis 0"
    report = track.report(64)
    assert report.slice_bytes == (64 + 3) * LANES * 1600
    assert report.plain_bytes == 64 * LANES * 6400


def test_short_fields_lie_flat_until_a_window_is_found() -> None:
    assert fill(track_of((4, 7, 7)), noise(64, size=7)) == "flat rows"
    assert fill(track_of((4, 20, 20)), noise(64, size=20)) == "flat rows"
    assert fill(track_of((4, 20, 20)), frames(64, size=20)) == "window of 4 along axis 0"


def test_a_static_screen_only_makes_the_search_longer() -> None:
    still = np.repeat(noise(1), 40, axis=0)
    assert fill(track_of((4, 40, 40)), np.concatenate([still, frames(24)])) == "window of 4 along axis 0"


def test_a_window_that_comes_with_a_later_rollout_is_found_then() -> None:
    """A search in vain is taken up again, ever more seldom."""
    track = track_of((4, 40, 40))
    found = [fill(track, noise(64, seed)) for seed in range(3)]
    found += [fill(track, frames(64, seed)) for seed in range(4)]
    assert found[:3] == ["whole observations"] * 3
    assert found[-1] == "window of 4 along axis 0"


def test_a_window_that_stops_fitting_is_looked_for_anew() -> None:
    """Stacks along the first axis, and later along the last."""
    track = track_of((4, 40, 40))
    assert fill(track, frames(64)) == "window of 4 along axis 0"
    film = np.random.default_rng(5).integers(0, 256, (64 + 39, LANES, 4, 40), np.uint8)
    sliding = np.stack([np.moveaxis(film[t : t + 40], 0, -1) for t in range(64)])
    found = [fill(track, sliding) for _ in range(6)]
    assert found[-1] == "window of 40 along axis 2"


def test_every_rollout_is_written_to_the_memory_of_the_first() -> None:
    track = track_of((4, 40, 40))
    fill(track, frames(64))
    part = track.rows._parts[0]  # type: ignore[union-attr]  # a window was found
    assert isinstance(part, OpenPart)
    place = part.slices.ctypes.data
    for seed in range(5):
        fill(track, frames(64, seed))
        assert track.rows._parts[0] is part  # type: ignore[union-attr]  # likewise
        assert part.slices.ctypes.data == place


def test_a_negative_place_gives_zeros() -> None:
    for shape, told in (((4, 40, 40), frames(64)), ((4, 7, 7), noise(64, size=7))):
        track = track_of(shape)
        fill(track, told)
        out = np.ones((3, *shape), np.uint8)
        track.rows.gather(np.array([-1, 5, -1]), out, ALONE)
        assert not out[[0, 2]].any()
        assert np.array_equal(out[1], told.reshape(-1, *shape)[5])


@functools.cache  # 33 million pixels, drawn once for all
def few_colours() -> NDArray[np.uint8]:
    """Draw frames for 640 ticks, and what the first of them look back on."""
    numbers = np.arange(643 * LANES * 160 * 160, dtype=np.uint32)
    return (numbers // 977 % 7).astype(np.uint8).reshape(643, LANES, 160, 160)


@pytest.mark.parametrize("compress", ["speed", "balanced", "memory"])
def test_compressed_rollouts_come_back_and_take_less(compress: str) -> None:
    """Frames of few colours, in segments that fill several times a rollout, rollout after rollout."""
    leaf = Leaf("", (4, 160, 160), np.dtype(np.uint8))
    tracks = RolloutFields([leaf], 640, LANES, compress, chosen_kernels())
    for seed in range(2):
        film = few_colours() + np.uint8(seed)
        tracks.reset()
        for tick in range(640):
            tracks.write(tick, [film[tick : tick + 4].swapaxes(0, 1)])
        tracks.drain()
        places = np.random.default_rng(seed).permutation(640 * LANES)[:200]
        out = np.empty((200, 4, 160, 160), np.uint8)
        tracks.gather(0, places, out)
        for row, place in zip(out, places.tolist(), strict=True):
            tick, lane = divmod(place, LANES)
            assert np.array_equal(row, film[tick : tick + 4, lane])
        (report,) = tracks.report(640, (), transitions=640, staging_bytes=0).fields
        assert "sealed by" in report.finding
        assert report.slice_bytes < report.plain_bytes / 6
    tracks.close()


def test_an_unknown_way_to_compress_is_refused() -> None:
    with pytest.raises(ArgumentError, match="compress"):
        RolloutFields([], 1, 1, "tightly", chosen_kernels())

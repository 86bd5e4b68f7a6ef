"""The compiled loops of rollouts give the same bits as plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.native import ThreadPool, chosen_kernels, estimate_advantages, native_library
from holdall.schema import Leaf
from holdall.storage.batch_source import Places
from holdall.storage.rollout import SlicedRows
from holdall.storage.slices import Window

Floats = NDArray[np.float32]


def expected_advantages(rewards: Floats, values: Floats, ends: Floats, last: Floats) -> tuple[Floats, Floats]:
    """Estimate advantages and returns as their definition says, every step in single precision."""
    gamma, decay = np.float32(0.99), np.float32(0.99 * 0.95)
    advantages = np.empty_like(values)
    next_values, later = last, np.zeros_like(last)
    for t in reversed(range(len(values))):
        going = np.float32(1) - ends[t]
        delta = rewards[t] + gamma * next_values * going - values[t]
        later = delta + decay * going * later
        advantages[t] = later
        next_values = values[t]
    return advantages, advantages + values


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (64, 3), (33, 16), (9, 7), (5, 65)])
def test_advantages_are_the_same_bits(shape: tuple[int, int], seed: int) -> None:
    """Also in place, where rewards and advantages are one array."""
    generator = np.random.default_rng(seed)
    rewards, values = (100 * generator.standard_normal((2, *shape), np.float32)) ** 3
    ends = (generator.random(shape) < 0.1).astype(np.float32)
    last = generator.standard_normal(shape[1], np.float32)
    expected, expected_returns = expected_advantages(rewards, values, ends, last)
    advantages, returns = np.empty(shape, np.float32), np.empty(shape, np.float32)
    estimate_advantages(rewards, values, ends, last, 0.99, 0.95, advantages, returns)
    assert advantages.tobytes() == expected.tobytes()
    assert returns.tobytes() == expected_returns.tobytes()
    estimate_advantages(rewards, values, ends, last, 0.99, 0.95, rewards, returns)
    assert rewards.tobytes() == expected.tobytes()
    assert returns.tobytes() == expected_returns.tobytes()


def filled(window: Window, leaf: Leaf) -> tuple[SlicedRows, NDArray[np.uint8]]:
    generator = np.random.default_rng(0)
    rows = SlicedRows(leaf, window, ticks=20, lanes=2, kernels=chosen_kernels(), compressed=False)
    frames = generator.integers(0, 255, (2, 40, 3), np.uint8)
    ticks = np.stack([frames[:, 2 * t : 2 * t + 5] for t in range(17)])
    for t, obs in enumerate(ticks):
        rows.write(t, obs)
    return rows, ticks


def test_windows_that_move_on_by_more_than_a_slice_come_back() -> None:
    leaf = Leaf("", (5, 3), np.dtype(np.uint8))
    rows, ticks = filled(Window.along(leaf, axis=0, step=2), leaf)
    out = np.empty((34, 5, 3), np.uint8)
    rows.gather(np.arange(34), out, ThreadPool(1))
    assert out.tobytes() == ticks.tobytes()


def test_places_outside_the_rollout_are_refused() -> None:
    leaf = Leaf("", (5, 3), np.dtype(np.uint8))
    rows, _ = filled(Window.along(leaf, axis=0, step=2), leaf)
    with pytest.raises(DamageError, match="outside the rollout"):
        rows.gather(np.array([0, 40]), np.empty((2, 5, 3), np.uint8), ThreadPool(1))


@pytest.mark.parametrize("channels", [1, 3, 4, 5, 8, 12, 31])
@pytest.mark.parametrize("image", [(1, 1), (3, 5), (4, 4), (7, 16), (84, 84)], ids=str)
def test_channels_are_parted_as_numpy_does(channels: int, image: tuple[int, int]) -> None:
    loops = native_library()
    pixels = np.random.default_rng(0).integers(0, 256, (3, *image, channels), np.uint8)
    planes = np.zeros((3, channels, *image), np.uint8)
    around = np.full(planes.size + 32, 7, np.uint8)
    loops.holdall_part_channels(pixels.ctypes.data, around[16:].ctypes.data, 3, image[0] * image[1], channels)
    planes[...] = np.moveaxis(pixels, -1, 1)
    assert around[16:-16].tobytes() == planes.tobytes()
    assert set(around[:16]) | set(around[-16:]) == {7}, "nothing is written beside"


@pytest.mark.parametrize("channels", [3, 4, 12])
def test_stacks_that_lie_pixel_by_pixel_come_back_channels_first(channels: int) -> None:
    leaf = Leaf("", (channels, 9, 17), np.dtype(np.uint8))
    rows = SlicedRows(leaf, Window.along(leaf, axis=0, step=1), 20, 2, chosen_kernels(), compressed=False)
    film = np.random.default_rng(0).integers(0, 256, (2, 9, 17, 20 + channels), np.uint8)
    told = [np.moveaxis(film[..., t : t + channels].copy(), -1, 1) for t in range(20)]
    for t, obs in enumerate(told):
        rows.write(t, obs)
    out = np.empty((40, *leaf.shape), np.uint8)
    rows.gather(np.arange(40), out, ThreadPool(1))
    assert out.tobytes() == np.stack(told).tobytes()


def as_it_lies(obs: NDArray[np.uint8], layout: str) -> NDArray[np.uint8]:
    """Return the same numbers in memory of another layout."""
    if layout == "pixel by pixel":
        return np.ascontiguousarray(obs.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    if layout == "backwards":
        return obs[::-1].copy()[::-1]
    return obs if layout == "as stored" else np.repeat(obs, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize("window", ["channels", "whole", "columns"])
@pytest.mark.parametrize("layout", ["as stored", "pixel by pixel", "backwards", "with gaps"])
def test_ticks_of_a_rollout_come_back_as_they_were_given(layout: str, window: str) -> None:
    """Also where a stream breaks, and where one tick is written twice because the first time was interrupted."""
    leaf, lanes, ticks = Leaf("", (4, 6, 7), np.dtype(np.uint8)), 2, 30
    cut = Window.whole(leaf) if window == "whole" else Window.along(leaf, 0 if window == "channels" else 2, 1)
    generator = np.random.default_rng(0)
    film = generator.integers(0, 256, (lanes, 4 + ticks, 6, 7 + ticks), np.uint8)
    given = [film[:, t : t + 4, :, :7] if window == "channels" else film[:, :4, :, t : t + 7] for t in range(ticks)]
    given[11] = generator.integers(0, 256, given[0].shape, np.uint8)
    given[20:22] = given[19:20] * 2
    written = [*given[:15], given[3], *given[15:]]
    at = [*range(15), 15, *range(15, ticks)]
    kernels = chosen_kernels()
    block = kernels.new_block(cut.slice_bytes, np.zeros(lanes * cut.slice_bytes * 600, np.uint8))
    part = kernels.new_part(cut, lanes, block, 0)
    at_hand, cursors = np.zeros((2, lanes, *leaf.shape), np.uint8), np.zeros((ticks, lanes), np.uint32)
    for tick, obs in zip(at, written, strict=True):
        changing = as_it_lies(obs.copy(), layout)
        kernels.append_next(part, at_hand, changing, cursors[tick])
        changing[...] = 7  # the caller's array is its own again
    closed = part.closed()
    assert part.steps == lanes * len(written)
    assert part.pushed < lanes * len(written) * cut.count or window == "whole"
    lane = np.tile(np.arange(lanes, dtype=np.int32), ticks)
    places = Places(
        records=[np.array([closed.record()], np.int64)],
        segment=np.zeros(lane.size, np.int32),
        cursors=[cursors.reshape(-1)],
        lane=lane,
        lanes=lanes,
        held=((closed.held,),),
    )
    read = np.empty((lane.size, leaf.nbytes), np.uint8)
    kernels.gather(places, 0, None, read, ThreadPool(threads=1))
    assert read.tobytes() == b"".join(obs.tobytes() for obs in given)


def test_a_tick_of_another_size_is_refused() -> None:
    leaf, kernels = Leaf("", (4, 5), np.dtype(np.uint8)), chosen_kernels()
    part = kernels.new_part(Window.whole(leaf), 2, kernels.new_block(20, np.zeros(2000, np.uint8)), 0)
    at_hand, cursors = np.zeros((2, 2, 4, 5), np.uint8), np.zeros(2, np.uint32)
    for ticks, obs, places in (
        (at_hand, at_hand[0, :, :3], cursors), (at_hand[:1], at_hand[0], cursors), (at_hand, at_hand[0], cursors[:1]),
    ):  # fmt: skip
        with pytest.raises(DamageError, match="a tick of"):
            kernels.append_next(part, ticks, obs, places)
    assert part.steps == 0

"""The compiled loops of rollouts and their NumPy twins: the same bits."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.experience.advantage import estimate_advantages
from holdall.experience.crew import Crew
from holdall.experience.kernels import chosen_kernels
from holdall.experience.native_rollout import JobStruct, rollout_loops
from holdall.experience.reels import Reels
from holdall.experience.window import Window
from holdall.schema import Leaf

pytestmark = pytest.mark.skipif(rollout_loops() is None, reason="the compiled library was not built")


def advantages(kernels: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], seed: int) -> list[bytes]:
    monkeypatch.setenv("HOLDALL_KERNELS", kernels)
    assert (rollout_loops() is None) == (kernels == "portable")
    generator = np.random.default_rng(seed)
    rewards, values = (100 * generator.standard_normal((2, *shape), np.float32)) ** 3
    ends = (generator.random(shape) < 0.1).astype(np.float32)
    last = generator.standard_normal(shape[1], np.float32)
    out, returns = np.empty(shape, np.float32), np.empty(shape, np.float32)
    estimate_advantages(rewards, values, ends, last, 0.99, 0.95, out, returns)
    in_place, again = rewards.copy(), np.empty(shape, np.float32)
    estimate_advantages(in_place, values, ends, last, 0.99, 0.95, in_place, again)
    assert in_place.tobytes() == out.tobytes()
    return [out.tobytes(), returns.tobytes(), again.tobytes()]


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (64, 3), (33, 16), (5, 65)])
def test_advantages_are_the_same_bits(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Also in place, where rewards and advantages are one array."""
    for seed in range(5):
        assert advantages("native", monkeypatch, shape, seed) == advantages("portable", monkeypatch, shape, seed)


def filled(window: Window, leaf: Leaf) -> tuple[Reels, NDArray[np.uint8]]:
    generator = np.random.default_rng(0)
    reels = Reels(leaf, window, ticks=20, lanes=2, kernels=chosen_kernels(), sealer=None)
    frames = generator.integers(0, 255, (2, 40, 3), np.uint8)
    ticks = np.stack([frames[:, 2 * t : 2 * t + 5] for t in range(17)])
    for t, obs in enumerate(ticks):
        reels.write(t, obs)
    return reels, ticks


@pytest.mark.parametrize("kernels", ["native", "portable"])
def test_windows_that_move_on_by_more_than_a_slice_come_back(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("HOLDALL_KERNELS", kernels)
    leaf = Leaf("", (5, 3), np.dtype(np.uint8))
    reels, ticks = filled(Window.along(leaf, axis=0, step=2), leaf)
    out = np.empty((34, 5, 3), np.uint8)
    reels.gather(np.arange(34), out, Crew(1))
    assert out.tobytes() == ticks.tobytes()


@pytest.mark.parametrize("kernels", ["native", "portable"])
def test_places_outside_the_rollout_are_refused(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("HOLDALL_KERNELS", kernels)
    leaf = Leaf("", (5, 3), np.dtype(np.uint8))
    reels, _ = filled(Window.along(leaf, axis=0, step=2), leaf)
    with pytest.raises(DamageError, match="outside the rollout"):
        reels.gather(np.array([0, 40]), np.empty((2, 5, 3), np.uint8), Crew(1))


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_share_out_every_piece_once_and_stop_where_they_are_told_to(threads: int) -> None:
    """Pieces of four chunks, of which two are allowed at first."""
    loops = rollout_loops()
    assert loops is not None
    generator = np.random.default_rng(0)
    source = generator.integers(0, 256, 64 * 1_000, np.uint8)
    target = np.zeros_like(source)
    order = np.arange(64)
    starts = [side.ctypes.data + order * 1_000 for side in (source, target)]
    table = np.stack([*starts, np.full(64, 1_000), order // 16])
    pieces, left = np.ascontiguousarray(table.T), np.full(4, 16)
    job = JobStruct(pieces.ctypes.data, 64, 0, 32, left.ctypes.data)
    at = ctypes.addressof(job)
    assert loops.copy_pieces(at, 3, 0) == 3
    assert loops.pieces_left(at, 0) == 13
    while loops.copy_pieces(at, 100, 0):
        pass
    assert left.tolist() == [0, 0, 16, 16]
    assert np.array_equal(target[:32_000], source[:32_000])
    assert not target[32_000:].any()
    copied: list[int] = []
    waiting = [threading.Thread(target=lambda: copied.append(loops.copy_pieces(at, 2**62, 1))) for _ in range(threads)]
    for thread in waiting:
        thread.start()
    job.allowed = 64
    for thread in waiting:
        thread.join(30)
    assert sum(copied) == 32
    assert np.array_equal(target, source)
    assert left.tolist() == [0] * 4


def test_who_waits_stops_when_the_job_is_called_off() -> None:
    loops = rollout_loops()
    assert loops is not None
    pieces, left = np.zeros((1, 4), np.int64), np.ones(1, np.int64)
    job = JobStruct(pieces.ctypes.data, 1, 0, 0, left.ctypes.data)
    waiting = threading.Thread(target=loops.copy_pieces, args=(ctypes.addressof(job), 2**62, 1))
    waiting.start()
    job.count = 0
    waiting.join(30)
    assert not waiting.is_alive()
    assert left.tolist() == [1]

"""ObservationLog: observations are read as they were written, and overlapping ones share memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall._native import ObservationLog
from holdall.schema import Leaf
from holdall.store.windows import Window

LANES = 3
LEAVES = {
    "first axis": (Leaf("", (4, 3, 5), np.dtype(np.uint8)), 0, 1),
    "two rows at once": (Leaf("", (6, 3), np.dtype(np.float32)), 0, 2),
    "two slices at once": (Leaf("", (5, 3), np.dtype(np.float32)), 0, 2),
    "last axis, two slices at once": (Leaf("", (4, 5), np.dtype(np.uint8)), 1, 2),
    "last axis, 8 channels": (Leaf("", (5, 7, 8), np.dtype(np.uint8)), 2, 1),
    "last axis, 2 channels": (Leaf("", (5, 7, 2), np.dtype(np.uint8)), 2, 1),
    "last axis, 3 channels": (Leaf("", (5, 7, 3), np.dtype(np.uint8)), 2, 1),
    "last axis, 4 channels": (Leaf("", (5, 7, 4), np.dtype(np.uint8)), 2, 1),
    "last axis, 5 channels": (Leaf("", (5, 7, 5), np.dtype(np.uint8)), 2, 1),
    "last axis, colours": (Leaf("", (5, 7, 12), np.dtype(np.uint8)), 2, 3),
    "last axis, floats": (Leaf("", (5, 4), np.dtype(np.float32)), 1, 1),
    "last axis, doubles": (Leaf("", (5, 4), np.dtype(np.float64)), 1, 1),
    "middle axis": (Leaf("", (2, 6, 3), np.dtype(np.uint8)), 1, 1),
    "whole": (Leaf("", (4, 4), np.dtype(np.int16)), None, 1),
}


def make_log(name: str, ticks: int) -> tuple[ObservationLog, Window, Leaf]:
    leaf, axis, step = LEAVES[name]
    window = Window.whole(leaf) if axis is None else Window.along(leaf, axis, step)
    return ObservationLog(window.layout(), ticks, LANES, leaf.nbytes), window, leaf


def make_tick(leaf: Leaf, generator: np.random.Generator) -> NDArray[np.generic]:
    content = generator.integers(0, 256, (LANES, leaf.nbytes), np.uint8)
    return content.view(leaf.dtype).reshape(LANES, *leaf.shape)


def make_next(tick: NDArray[np.generic], window: Window, generator: np.random.Generator) -> NDArray[np.generic]:
    """Shift some lanes by the window's step, repeat some, and replace the others."""
    leaf = Leaf("", tick.shape[1:], tick.dtype)
    after = make_tick(leaf, generator)
    for lane, kind in enumerate(generator.integers(0, 3, LANES)):
        if kind == 0:
            after[lane] = tick[lane]
        elif kind == 1 and window.count > 1:
            kept = np.moveaxis(tick[lane], window.axis, 0)[window.step :]
            np.moveaxis(after[lane], window.axis, 0)[: len(kept)] = kept
    return after


def read_all(log: ObservationLog, leaf: Leaf) -> NDArray[np.generic]:
    out = np.full((log.ticks * LANES, *leaf.shape), 7, leaf.dtype)
    log.gather(np.arange(log.ticks * LANES), out)
    return out


@pytest.mark.parametrize("name", LEAVES)
@given(seed=st.integers(0, 2**32 - 1), ticks=st.integers(1, 12))
def test_ticks_are_read_as_they_were_written(name: str, seed: int, ticks: int) -> None:
    """The observations are shifted, repeated or unrelated, and some are written twice."""
    generator = np.random.default_rng(seed)
    log, window, leaf = make_log(name, ticks)
    for _ in range(2):
        log.clear()
        written = [make_tick(leaf, generator)]
        while len(written) < ticks:
            written.append(make_next(written[-1], window, generator))
        for number, tick in enumerate(written):
            if generator.random() < 0.2:
                log.write(number, make_tick(leaf, generator))
            given_array = tick.copy()
            log.write(number, given_array)
            given_array[...] = 0  # The array belongs to the caller again.
        assert read_all(log, leaf).tobytes() == np.stack(written).tobytes()


@pytest.mark.parametrize("name", LEAVES)
def test_a_tick_that_is_written_again_replaces_later_ticks(name: str) -> None:
    """A call that follows an interrupted one does this."""
    generator = np.random.default_rng(0)
    log, window, leaf = make_log(name, 6)
    ticks = [make_tick(leaf, generator)]
    for number in range(6):
        log.write(number, ticks[-1])
        ticks.append(make_next(ticks[-1], window, generator))
    log.write(2, ticks[6])
    assert log.ticks == 3
    assert read_all(log, leaf).tobytes() == np.stack([ticks[0], ticks[1], ticks[6]]).tobytes()


@pytest.mark.parametrize("name", [name for name in LEAVES if name != "whole"])
def test_shifted_observations_share_memory(name: str) -> None:
    """A shifted observation takes only its new slices, a repeated one takes none, and an unrelated one all."""
    generator = np.random.default_rng(0)
    log, window, leaf = make_log(name, 4)
    first = make_tick(leaf, generator)
    shifted = make_tick(leaf, generator)
    np.moveaxis(shifted, window.axis + 1, 0)[: leaf.shape[window.axis] - window.step] = np.moveaxis(
        first, window.axis + 1, 0
    )[window.step :]
    expected = LANES * leaf.nbytes
    for number, (tick, added) in enumerate(
        [(first, 0), (shifted, window.shift * window.slice_bytes), (shifted, 0), (first, leaf.nbytes)]
    ):
        log.write(number, tick)
        expected += LANES * added
        assert log.slice_bytes == expected
    assert log.broken == LANES
    assert log.cursor_bytes == 4 * LANES * 4
    log.clear()
    assert (log.ticks, log.slice_bytes, log.cursor_bytes, log.broken) == (0, 0, 0, 0)


@pytest.mark.parametrize("layout", ["transposed", "reversed", "with gaps"])
def test_arrays_in_any_order_are_accepted(layout: str) -> None:
    """Images are often views whose channels were moved to the front."""
    generator = np.random.default_rng(0)
    log, _, leaf = make_log("first axis", 5)
    written = [make_tick(leaf, generator) for _ in range(5)]
    for number, tick in enumerate(written):
        if layout == "transposed":
            view = np.ascontiguousarray(np.moveaxis(tick, 1, -1))
            log.write(number, np.moveaxis(view, -1, 1))
        elif layout == "reversed":
            log.write(number, tick[::-1].copy()[::-1])
        else:
            log.write(number, np.repeat(tick, 2, axis=-1)[..., ::2])
    assert read_all(log, leaf).tobytes() == np.stack(written).tobytes()


def test_negative_places_give_zeros() -> None:
    """Negative places pad sequences."""
    log, _, leaf = make_log("first axis", 2)
    tick = make_tick(leaf, np.random.default_rng(0))
    log.write(0, tick)
    out = np.full((3, *leaf.shape), 7, leaf.dtype)
    log.gather(np.array([-1, 1, -9]), out)
    assert out.tobytes() == np.stack([0 * tick[0], tick[1], 0 * tick[0]]).tobytes()


def test_ticks_and_arrays_that_do_not_fit_are_refused() -> None:
    """Nothing is read or written outside the log."""
    log, _, leaf = make_log("first axis", 2)
    tick = make_tick(leaf, np.random.default_rng(0))
    with pytest.raises(IndexError, match="tick is 1"):
        log.write(1, tick)
    with pytest.raises(IndexError, match="tick is -1"):
        log.write(-1, tick)
    with pytest.raises(ValueError, match="obs must be an array of 3 rows of 60 bytes"):
        log.write(0, tick[:2])
    with pytest.raises(ValueError, match="obs must be"):
        log.write(0, tick[..., :4])
    log.write(0, tick)
    log.write(1, tick)
    with pytest.raises(IndexError, match="tick is 2"):
        log.write(2, tick)
    out = np.empty((1, *leaf.shape), leaf.dtype)
    with pytest.raises(IndexError, match=r"places\[0\] is 6"):
        log.gather(np.array([6]), out)
    with pytest.raises(ValueError, match="out must be"):
        log.gather(np.array([0, 1]), out)
    with pytest.raises(ValueError, match="out must be"):
        log.gather(np.array([0]), np.broadcast_to(out[:, :1], out.shape))
    with pytest.raises(TypeError, match="places must be"):
        log.gather(np.array([0], np.int32), out)


@pytest.mark.parametrize(
    ("layout", "ticks", "row_bytes"),
    [
        (("shared",), 2, 60),
        (("sliced", 4, 1, 15, 1), 0, 60),
        (("sliced", 4, 1, 15, 1), 2, 61),
        (("sliced", 4, 1, 15, 1), 1 << 60, 60),
    ],
)
def test_impossible_logs_are_refused(layout: tuple[str, int, int, int, int], ticks: int, row_bytes: int) -> None:
    """The refusal comes before memory is reserved."""
    with pytest.raises(ValueError, match=r"layout|ticks"):
        ObservationLog(layout, ticks, LANES, row_bytes)

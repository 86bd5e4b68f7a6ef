"""Where the slices of a block stand: lane after lane, in half a byte or one for each, and never in another's place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.native import PortableCoder, chosen_kernels
from holdall.storage import Codec, Method, SlicePlaces, Transform
from holdall.storage.coded_units import Order, order_by_lanes

SLICE = Transform(8)


def brought_by(lanes: NDArray[np.int64]) -> Order:
    """Order slices by the lane that brought each."""
    return lanes.argsort(kind="stable").astype(np.uint32)


def numbered(count: int) -> NDArray[np.uint8]:
    """Make slices that are their numbers."""
    return np.arange(count, dtype=np.uint64).view(np.uint8).reshape(count, 8)


def every_place(order: Order) -> list[int]:
    """Return the place of every slice, one by one."""
    return [int(place) for place in np.argsort(order)]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Lanes in turns, of which some are left out or come twice at times, or as they like."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    lanes = draw(st.sampled_from([1, 2, 15, 16, 17, 255, 256]))
    ticks = draw(st.integers(1, 2000 // lanes))
    if draw(st.booleans()):
        return brought_by(generator.integers(0, lanes, lanes * ticks))
    brought = np.full((ticks, lanes), 1)
    brought[generator.random(brought.shape) < draw(st.sampled_from([0.0, 0.01, 0.3]))] = generator.integers(0, 3)
    return brought_by(np.tile(np.arange(lanes), ticks).repeat(brought.reshape(-1)))


@given(orders())
def test_every_slice_stands_where_the_order_says(order: Order) -> None:
    """For NumPy and for C, before and after they were stored, whatever the order is."""
    count, slices = len(order), numbered(len(order))
    places = SlicePlaces.of(order)
    if places is None:
        assert order.tolist() == list(range(count))
        return
    again = SlicePlaces.stored(places.lanes, count)
    for one in (places, again):
        assert one.find(np.arange(count), count).tolist() == every_place(order)
        assert one.are_of(count)
    for coder in (chosen_kernels().coder, PortableCoder()):
        sealed = coder.seal(slices, Codec(Method.STORED, 0, SLICE, group=3), order)
        assert sealed is not None
        stored: Any = sealed.coded.data
        assert stored.reshape(count, 8).tobytes() == slices[order].tobytes()
        for reader in (chosen_kernels().coder, PortableCoder()):
            out = np.empty_like(slices)
            reader.decode(reader.adopt(sealed.coded), np.arange(count), out)
            assert out.tobytes() == slices.tobytes()


def test_lanes_take_little_room() -> None:
    """Half a byte a slice up to 16 of them, and a byte up to 256."""
    for lanes, most in ((16, 0.64), (17, 1.08), (64, 1.26)):
        places = SlicePlaces.of(brought_by(np.tile(np.arange(lanes), 4096 // lanes)))
        assert places is not None
        assert places.lanes.nbytes + places.firsts.nbytes < most * (4096 // lanes * lanes)


def test_more_slices_than_two_bytes_can_number() -> None:
    """They are counted in four."""
    order = brought_by(np.tile(np.arange(3), 30_000))
    places = SlicePlaces.of(order)
    assert places is not None
    assert places.firsts.dtype == np.uint32
    assert places.find(np.arange(90_000), 90_000).tolist() == every_place(order)
    coder, slices = chosen_kernels().coder, numbered(90_000)
    sealed = coder.seal(slices, Codec(Method.STORED, 0, SLICE), order)
    assert sealed is not None
    out = np.empty_like(slices)
    coder.decode(sealed, np.arange(90_000), out)
    assert out.tobytes() == slices.tobytes()


def test_orders_that_cannot_be_told_are_refused() -> None:
    """Two slices in one place, one in none, or more lanes than a byte can number."""
    for wrong in ([0, 2, 2], [1, 0, 3], np.arange(600)[::-1]):
        with pytest.raises(DamageError, match="slices stand"):
            SlicePlaces.of(np.array(wrong, np.uint32))
    for count in (0, 3, 9, 10, 13, 40):
        with pytest.raises(DamageError, match="lanes are said"):
            SlicePlaces.stored(np.zeros(6, np.uint8), count)


@pytest.mark.parametrize("lanes", [2, 16, 300, 1000])
def test_slices_are_ordered_by_the_lane_that_brought_them(lanes: int) -> None:
    """What several lanes show stands with the first; of very many lanes, neighbours share one."""
    ticks = 4
    log = np.arange(ticks * lanes).reshape(ticks, lanes)
    log[2] = log[1, 0]  # every lane shows what lane 0 brought before
    order = order_by_lanes(log, ticks * lanes + 1)
    assert order is not None
    assert sorted(order.tolist()) == list(range(ticks * lanes + 1))
    assert order[-1] == ticks * lanes  # nothing names it
    brought = order[: ticks * lanes] % lanes
    named = order < 2 * lanes
    assert (np.diff(brought[named[: ticks * lanes]].astype(np.int64)) >= (0 if lanes <= 255 else -4)).all()
    assert SlicePlaces.of(order) is not None
    assert order_by_lanes(log, ticks * lanes - 1) is None


@given(st.data())
def test_c_reads_nothing_that_is_not_there(data: st.DataObject) -> None:
    """Were damaged lanes to come as far as C, it would return a slice of the block, or say that there is none."""
    coder, slices = chosen_kernels().coder, numbered(300)
    order = brought_by(np.tile(np.arange(data.draw(st.sampled_from([5, 20]))), 60)[:300])
    sealed = coder.seal(slices, Codec(Method.STORED, 0, SLICE, group=4), order)
    assert sealed is not None
    assert sealed.coded.places is not None
    lanes, firsts = sealed.coded.places.lanes.copy(), sealed.coded.places.firsts.copy()
    lanes[data.draw(st.integers(0, len(lanes) - 1))] = data.draw(st.integers(0, 255))
    firsts[0, data.draw(st.integers(0, firsts.shape[1] - 1))] = data.draw(st.integers(0, 2**16 - 1))
    spoilt = replace(sealed.coded)
    object.__setattr__(
        spoilt,
        "places",
        SlicePlaces(lanes[: data.draw(st.integers(1, len(lanes)))], firsts[: data.draw(st.integers(0, 2))]),
    )
    adopted, out = coder.adopt(spoilt), np.empty((1, 8), np.uint8)
    for number in data.draw(st.lists(st.integers(-2, 301), min_size=1, max_size=20)):
        try:
            coder.decode(adopted, np.array([number]), out)
            assert int(out.view(np.uint64)[0, 0]) < 300
        except DamageError:
            pass

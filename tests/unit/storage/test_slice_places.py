"""Places of the slices of a block: sorted by lane, and no two slices in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_coder import ReferenceCoder

from holdall.errors import DamageError
from holdall.native import chosen_kernels
from holdall.storage import Codec, Method, Transform
from holdall.storage.coded_units import Order, order_by_lanes, places_in

SLICE = Transform(8)


def brought_by(lanes: NDArray[np.int64]) -> Order:
    """Order slices by the lane that brought each."""
    return lanes.argsort(kind="stable").astype(np.uint32)


def numbered(count: int) -> NDArray[np.uint8]:
    """Make slices that are their numbers."""
    return np.arange(count, dtype=np.uint64).view(np.uint8).reshape(count, 8)


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
def test_every_slice_is_where_the_order_says(order: Order) -> None:
    """For NumPy and for C, whatever the order is."""
    count, slices = len(order), numbered(len(order))
    places = places_in(order)
    if places is None:
        assert order.tolist() == list(range(count))
        return
    assert places.tolist() == np.argsort(order).tolist()
    for coder in (chosen_kernels().coder, ReferenceCoder()):
        sealed = coder.seal(slices, Codec(Method.STORED, 0, SLICE, group=3), order)
        assert sealed is not None
        stored: Any = sealed.coded.data
        assert stored.reshape(count, 8).tobytes() == slices[order].tobytes()
        for reader in (chosen_kernels().coder, ReferenceCoder()):
            out = np.empty_like(slices)
            reader.decode(reader.adopt(sealed.coded), np.arange(count), out)
            assert out.tobytes() == slices.tobytes()


@pytest.mark.parametrize(("count", "place_bytes"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_places_take_two_bytes_as_long_as_these_can_number_them(count: int, place_bytes: int) -> None:
    order = brought_by(np.arange(count) % 3)
    coder, slices = chosen_kernels().coder, numbered(count)
    sealed = coder.seal(slices, Codec(Method.STORED, 0, SLICE), order)
    assert sealed is not None
    assert sealed.coded.places is not None
    assert sealed.coded.places.nbytes == place_bytes * count
    out = np.empty_like(slices)
    coder.decode(sealed, np.arange(count), out)
    assert out.tobytes() == slices.tobytes()


@pytest.mark.parametrize("wrong", [[0, 2, 2], [1, 0, 3]])
def test_an_order_with_two_slices_in_one_place_is_refused(wrong: list[int]) -> None:
    with pytest.raises(DamageError, match="share a place"):
        places_in(np.array(wrong, np.uint32))


@pytest.mark.parametrize("lanes", [2, 16, 300, 1000])
def test_slices_are_ordered_by_the_lane_that_brought_them(lanes: int) -> None:
    """A slice that several lanes show belongs to the first of them."""
    ticks = 4
    log = np.arange(ticks * lanes).reshape(ticks, lanes)
    log[2] = log[1, 0]  # every lane shows what lane 0 brought before
    order = order_by_lanes(log, ticks * lanes + 1)
    assert order is not None
    assert sorted(order.tolist()) == list(range(ticks * lanes + 1))
    assert order[-1] == ticks * lanes  # nothing names it
    brought = order[: ticks * lanes] % lanes
    named = order < 2 * lanes
    assert (np.diff(brought[named[: ticks * lanes]].astype(np.int64)) >= 0).all()
    assert order_by_lanes(log, ticks * lanes - 1) is None


@given(st.data())
def test_c_reads_nothing_that_is_not_there(data: st.DataObject) -> None:
    """Were damaged places to come as far as C, it would return a slice of the block, or say that there is none."""
    coder, slices = chosen_kernels().coder, numbered(300)
    sealed = coder.seal(slices, Codec(Method.STORED, 0, SLICE, group=4), brought_by(np.arange(300) % 5))
    assert sealed is not None
    assert sealed.coded.places is not None
    places = sealed.coded.places.copy()
    places[data.draw(st.integers(0, 299))] = data.draw(st.integers(0, 2**16 - 1))
    adopted, out = coder.adopt(replace(sealed.coded, places=places)), np.empty((1, 8), np.uint8)
    for number in data.draw(st.lists(st.integers(-2, 301), min_size=1, max_size=20)):
        try:
            coder.decode(adopted, np.array([number]), out)
            assert int(out.view(np.uint64)[0, 0]) < 300
        except DamageError:
            pass

"""States: numbers, text and arrays are restored exactly, and anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdall.errors import CheckpointError, DamageError
from holdall.sampling import get_generator_state, restore_generator
from holdall.store.states import decode_state, encode_state


def encode_and_decode(value: Any) -> Any:
    arrays: list[NDArray[Any]] = []
    words = json.loads(json.dumps(encode_state(value, arrays, "value"), allow_nan=False))
    return decode_state(words, {number: array.tobytes() for number, array in enumerate(arrays)})


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -5, 2**53, -(2**127) - 1, 0.1, -0.0, float("inf"), "text", [1, [2]], {"a": {"b": 3}}, b"", b"ab\0"],
)
def test_numbers_and_text_are_restored(value: Any) -> None:
    found = encode_and_decode(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_restored() -> None:
    """JSON has no NaN."""
    assert np.isnan(encode_and_decode(float("nan")))


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u4", "i8", "f2", "f4", "f8"])
def test_arrays_are_restored_with_shape_and_dtype(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    found = encode_and_decode({"a": array})["a"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">i8", ">f4", ">f8"])
def test_numbers_in_any_byte_order_are_restored(dtype: str) -> None:
    """The state of a user's sampler may have them."""
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    np.testing.assert_array_equal(encode_and_decode({"a": array})["a"], array)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"$int": 3}, np.array(["a"]), np.array([object()]), 1j, {1, 2}])
def test_other_values_are_refused(value: Any) -> None:
    """Checkpoints have no pickles."""
    with pytest.raises(CheckpointError):
        encode_and_decode(value)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_generator_continues_where_it_was_saved(kind: str) -> None:
    """Its state has the half of a 64-bit number that is kept for the next draw."""
    generator = np.random.Generator(getattr(np.random, kind)(3))
    generator.integers(0, 10, size=7, dtype=np.int32)
    restored = restore_generator(encode_and_decode(get_generator_state(generator)))
    assert restored.integers(0, 2**31, 9, dtype=np.int32).tolist() == generator.integers(0, 2**31, 9, np.int32).tolist()
    assert restored.random(5).tolist() == generator.random(5).tolist()


@pytest.mark.parametrize("state", [{}, None, {"bit_generator": "os.system"}, {"bit_generator": "PCG64", "state": 3}])
def test_an_unknown_kind_of_generator_is_refused(state: Any) -> None:
    """Names from files are looked up in a list of kinds, never in a module."""
    with pytest.raises(DamageError):
        restore_generator(state)

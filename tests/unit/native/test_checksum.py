"""The compiled checksum is the low half of XXH64 as its own library computes it, whatever the length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdall.native import NativeCoder, PortableCoder, native_kernels
from holdall.storage.ticks import Coder


def native_coder() -> NativeCoder | None:
    kernels = native_kernels()
    coder = None if kernels is None else kernels.coder
    return coder if isinstance(coder, NativeCoder) else None


NATIVE = native_coder()
BOTH: list[Any] = [
    pytest.param(NATIVE, id="native", marks=pytest.mark.skipif(NATIVE is None, reason="no compiled coder here")),
    pytest.param(PortableCoder(), id="portable"),
]


def sums_of(coder: Coder, pieces: list[bytes]) -> list[int]:
    offsets = np.zeros(len(pieces) + 1, np.uint32)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    data = np.frombuffer(b"".join(pieces), np.uint8)
    return [int(each) for each in coder.checksums(data, offsets)]


def expected(piece: bytes) -> int:
    return xxhash.xxh64_intdigest(piece, seed=0) & 0xFFFFFFFF


@pytest.mark.parametrize("coder", BOTH)
def test_every_length_up_to_200(coder: Coder) -> None:
    """Stripes of 32 bytes, words of 8 and 4, and single bytes: every way in which a piece may end, at any address."""
    generator = np.random.default_rng(0)
    pieces = [generator.bytes(length) for length in range(201)]
    assert sums_of(coder, pieces) == [expected(piece) for piece in pieces]


@pytest.mark.parametrize("coder", BOTH)
@given(pieces=st.lists(st.binary(max_size=300), max_size=6))
def test_any_pieces(coder: Coder, pieces: list[bytes]) -> None:
    """Each unit on its own, empty ones included."""
    assert sums_of(coder, pieces) == [expected(piece) for piece in pieces]


@pytest.mark.parametrize("coder", BOTH)
def test_large_pieces_and_every_flipped_bit(coder: Coder) -> None:
    """A frame's worth of bytes; one bit more or less is another sum."""
    frame = np.random.default_rng(1).integers(0, 256, 7056, np.uint8)
    whole = sums_of(coder, [frame.tobytes()])
    assert whole == [expected(frame.tobytes())]
    for position in range(0, 7056, 331):
        for bit in range(8):
            spoilt = frame.copy()
            spoilt[position] ^= 1 << bit
            assert sums_of(coder, [spoilt.tobytes()]) != whole

"""The compiled checksum is the low half of XXH64 as its own library computes it, whatever the length."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdall.native import chosen_kernels
from holdall.storage.ticks import Coder


@pytest.fixture(scope="module")
def coder() -> Coder:
    return chosen_kernels().coder


def sums_of(coder: Coder, pieces: list[bytes]) -> list[int]:
    offsets = np.zeros(len(pieces) + 1, np.uint32)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    data = np.frombuffer(b"".join(pieces), np.uint8)
    return [int(each) for each in coder.checksums(data, offsets)]


def expected(piece: bytes) -> int:
    return xxhash.xxh64_intdigest(piece, seed=0) & 0xFFFFFFFF


def test_every_length_up_to_200(coder: Coder) -> None:
    """Stripes of 32 bytes, words of 8 and 4, and single bytes: every way in which a piece may end, at any address."""
    generator = np.random.default_rng(0)
    pieces = [generator.bytes(length) for length in range(201)]
    assert sums_of(coder, pieces) == [expected(piece) for piece in pieces]


@given(pieces=st.lists(st.binary(max_size=300), max_size=6))
def test_any_pieces(coder: Coder, pieces: list[bytes]) -> None:
    """Each unit on its own, empty ones included."""
    assert sums_of(coder, pieces) == [expected(piece) for piece in pieces]


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

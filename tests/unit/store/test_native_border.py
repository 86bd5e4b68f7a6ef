"""Odd arguments of the native types: each is refused or harmless, and nothing that is held changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdall._native import (
    ROLE_FLAGS,
    ROLE_OBSERVATION,
    ROLE_ROW,
    WRITTEN,
    Block,
    Dictionary,
    Part,
    Reader,
    Segment,
    Writer,
    decode,
    encode,
)
from holdall.codec.codec import Codec, Method

LANES = 16
SHARED = ("shared",)
NO_LAYOUTS = (None, None, None)  # Of actions, rewards and flags.


def new_writer(first_tick: int = 0) -> Writer:
    columns = (
        (ROLE_OBSERVATION, np.dtype("f4").num, (2,)),
        (ROLE_ROW, np.dtype("i8").num, ()),
        (ROLE_ROW, np.dtype("f8").num, ()),
        (ROLE_FLAGS, np.dtype("u1").num, ()),
    )
    return Writer(columns, ((1, None), (1, None), (0, ())), LANES, 1_000, 4, 4_096, (SHARED, *NO_LAYOUTS), first_tick)


def append(writer: Writer, tick: int) -> int:
    obs = np.full((LANES, 2), tick, np.float32)
    flags = np.zeros(LANES, np.bool_)
    numbers = np.zeros(LANES, np.int64)
    return writer.append(obs, numbers, numbers * 0.5, obs + 1, flags, flags, None, None)


@pytest.mark.parametrize("kind", [Block, Writer, Reader, Segment])
def test_no_object_exists_before_it_is_initialised(kind: Any) -> None:
    if kind is Reader:
        assert Reader.__new__(Reader).kept_bytes == 0  # All its arguments have defaults.
        return
    with pytest.raises(TypeError):
        kind.__new__(kind)


def test_ids_never_overflow() -> None:
    """A tick of at most 2^61 is not enough: an id is a tick times the lanes."""
    with pytest.raises(ValueError, match=r"ids be at most 2\^61"):
        new_writer(first_tick=2**60)
    flags = Part.restore("rows", 1, LANES, 1, {"rows": np.zeros(LANES, np.uint8)}, None, None)
    with pytest.raises(ValueError, match=r"ids of at most 2\^61"):
        Segment(2**60, 1, LANES, (flags,))
    writer = new_writer(first_tick=2**61 // LANES)
    with pytest.raises(IndexError, match="id 0 is not held"):
        Reader().gather(writer.catalog, np.zeros(1, np.int64), (0,))


def test_rolling_an_empty_segment_closes_nothing() -> None:
    writer = new_writer()
    assert writer.roll() is None
    assert append(writer, 0) == WRITTEN
    assert writer.roll() is not None
    assert writer.roll() is None
    assert [segment.ticks for segment in writer.catalog.segments] == [1, 0]


class AppendingNumber:
    """A number of a layout that adds a tick when it is read."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def __index__(self) -> int:
        append(self.writer, 1)
        return 1


def test_a_layout_that_adds_ticks_is_refused_and_no_tick_is_lost() -> None:
    writer = new_writer()
    append(writer, 0)
    layout: Any = ("sliced", AppendingNumber(writer), 1, 8, 1)
    with pytest.raises(RuntimeError, match="changed the writer"):
        writer.roll((layout, *NO_LAYOUTS))
    assert writer.next_tick == 2
    (rows,) = Reader().gather(writer.catalog, np.arange(2 * LANES, dtype=np.int64), (0,))
    assert np.array_equal(rows[:, 0], np.repeat([0.0, 1.0], LANES))


def test_lengths_are_checked_before_memory_is_allocated() -> None:
    """They may come from a damaged file. A MemoryError would not be reported as damage."""
    with pytest.raises(ValueError, match="'rows'"):
        Part.restore("rows", 2**31 - 1, 1, 2**20, {"rows": np.zeros(4, np.uint8)}, None, None)
    block = Block(1, 1, b"a")
    with pytest.raises(ValueError, match="'cursors'"):
        Part.restore("sliced", 2**31 - 1, 1, 1, {"cursors": np.zeros(1, np.uint32)}, ("sliced", 1, 1, 1, 1), block)


class ForgetfulCodec:
    """A codec that makes a new dictionary whenever it is asked for the dictionary."""

    def __init__(self, codec: Codec) -> None:
        self.parameters = codec.parameters

    @property
    def dictionary(self) -> Dictionary:
        return Dictionary(bytes(range(256)) * 16)


def test_compressed_slices_keep_the_dictionary_that_they_were_encoded_with() -> None:
    codec = Codec(64, Method.ZSTANDARD, level=3, group=1)
    slices = np.tile(np.arange(64, dtype=np.uint8), (8, 1))
    coded = encode(slices, ForgetfulCodec(codec))
    assert coded is not None
    for _ in range(100):
        assert decode(coded, 0, 8).tobytes() == slices.tobytes()
        assert coded.in_file(0, 0, None).offsets.tobytes() == coded.offsets.tobytes()


def test_compressed_slices_keep_the_numbers_of_their_codec() -> None:
    """Tables are copied by the numbers that the slices were encoded with, whatever the codec says later."""
    first = Codec(64, Method.ZSTANDARD, level=3, group=1)
    later = Codec(64, Method.ZSTANDARD, level=3, group=64)
    codec = SimpleNamespace(parameters=first.parameters, dictionary=None)
    coded = encode(np.zeros((640, 64), np.uint8), codec)
    assert coded is not None
    codec.parameters = later.parameters
    for _ in range(100):
        assert coded.in_file(0, 0, None).offsets.tobytes() == coded.offsets.tobytes()

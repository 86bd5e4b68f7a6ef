"""Records: what was packed is read back, and whatever is damaged is refused."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from holdall.errors import DamageError
from holdall.storage.records import MAGIC, PREAMBLE, Buffer, Read, numbers, pack, unpack

FIELDS = {"count": 3, "codec": {"method": 2}}
OFFSETS = np.array([0, 3, 6, 9], "<u4")
DATA = b"abcdefghi"


def packed(fields: Any = None, unchecked: frozenset[str] = frozenset({"data"})) -> bytes:
    parts: dict[str, Buffer] = {"offsets": OFFSETS.data, "data": DATA}
    return b"".join(bytes(piece) for piece in pack("slices", fields or FIELDS, parts, unchecked))


def reading(content: bytes) -> Read:
    return lambda start, nbytes: content[start : start + nbytes]


def rewritten(head: bytes, body: bytes) -> bytes:
    """Make a record whose checksums are right, whatever its head says."""
    start = struct.pack("<8sIIQ", MAGIC, len(head), zlib.crc32(head), len(body))
    return start + struct.pack("<II", zlib.crc32(start), 0) + head + body


def test_a_record_is_read_back_from_anywhere_in_a_file() -> None:
    """Several records stand in one file, one after another."""
    one = packed()
    content = one + one
    for start in (0, len(one)):
        record = unpack(reading(content), start, len(content))
        assert (record.kind, record.nbytes, record.head["count"]) == ("slices", len(one), 3)
        assert numbers(record.part("offsets", reading(content)), "u4").tolist() == OFFSETS.tolist()
        assert record.part("data", reading(content)) == DATA


def test_every_flipped_bit_is_noticed_except_in_parts_with_checksums_of_their_own() -> None:
    """One byte of a preamble, a head or a checked part is never read as something else."""
    whole = packed()
    for position in range(len(whole) - len(DATA)):
        for bit in (0, 3, 7):
            spoilt = bytearray(whole)
            spoilt[position] ^= 1 << bit
            if 28 <= position < 32:
                continue  # reserved: nobody reads it
            with pytest.raises(DamageError):
                unpack(reading(bytes(spoilt)), 0, len(spoilt)).part("offsets", reading(bytes(spoilt)))


def test_a_record_that_was_cut_short_is_refused_at_every_length() -> None:
    """A file that ends within a record has lost it."""
    whole = packed()
    for length in range(len(whole)):
        cut = whole[:length]
        with pytest.raises(DamageError):
            unpack(reading(cut), 0, len(cut)).part("data", reading(cut))


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b"{}",
        b'"slices"',
        b"{",
        b'{"kind":1,"parts":[]}',
        b'{"kind":"slices","parts":7}',
        b'{"kind":"slices","parts":[{"name":"data","bytes":-1}]}',
        b'{"kind":"slices","parts":[{"name":"data","bytes":8}]}',
        b'{"kind":"slices","parts":[{"name":"data","bytes":10}]}',
        b'{"kind":"slices","parts":[{"name":"data","bytes":true}]}',
        b'{"kind":"slices","parts":[{"name":"data","bytes":9.0}]}',
        b'{"kind":"slices","parts":[{"name":"data","bytes":4},{"name":"data","bytes":5}]}',
        b"[" * 100_000,
    ],
)
def test_a_head_that_makes_no_sense_is_refused(head: bytes) -> None:
    """Checksums tell damage from sense, not sense from malice."""
    content = rewritten(head, DATA)
    with pytest.raises(DamageError):
        unpack(reading(content), 0, len(content))


def test_a_size_beyond_the_file_is_refused_before_it_is_read() -> None:
    """Nobody allocates what a stranger's file claims."""
    asked = []

    def read(start: int, nbytes: int) -> bytes:
        asked.append(nbytes)
        return content[start : start + nbytes]

    for head_bytes, body_bytes in ((1 << 31, 0), (10, 1 << 62)):
        start = struct.pack("<8sIIQ", MAGIC, head_bytes, 0, body_bytes)
        content = start + struct.pack("<II", zlib.crc32(start), 0) + bytes(100)
        with pytest.raises(DamageError, match="cut short"):
            unpack(read, 0, len(content))
    assert set(asked) == {PREAMBLE.size}


def test_a_newer_format_is_named() -> None:
    """An old holdall says that it is old, instead of calling a sound file damaged."""
    start = struct.pack("<8sIIQ", MAGIC[:-1] + b"\x02", 2, 0, 0)
    content = start + struct.pack("<II", zlib.crc32(start), 0) + b"{}"
    with pytest.raises(DamageError, match="format version 2"):
        unpack(reading(content), 0, len(content))


def test_a_missing_part_and_a_crooked_array_are_refused() -> None:
    """What is asked for is there, whole, or there is an error."""
    content = packed()
    with pytest.raises(DamageError, match="palette"):
        unpack(reading(content), 0, len(content)).part("palette", reading(content))
    with pytest.raises(DamageError, match="no array"):
        numbers(b"abc", "u4")


def test_a_head_holds_json_only() -> None:
    """Not a number is not JSON, whatever Python writes."""
    with pytest.raises(ValueError, match="JSON"):
        packed({"ratio": float("nan")})
    assert json.loads(packed()[PREAMBLE.size :].split(b"}]}")[0] + b"}]}")["count"] == 3

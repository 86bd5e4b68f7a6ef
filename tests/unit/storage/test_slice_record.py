"""Blocks and dictionaries come back from a file as they were written; a head that makes no sense is refused."""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdall.errors import DamageError
from holdall.native import chosen_kernels
from holdall.schema import Bytes
from holdall.storage.blocks import (
    Codec,
    Coded,
    Dictionary,
    Extent,
    Method,
    Predictor,
    SealedSlices,
    SegmentFile,
    Transform,
)
from holdall.storage.codec import describe
from holdall.storage.coded_units import places_of
from holdall.storage.records import (
    DICTIONARY,
    MAGIC,
    PREAMBLE,
    SLICES,
    Record,
    codec_of,
    codec_words,
    pack_dictionary,
    pack_slices,
    unpack,
    unpack_dictionary,
    unpack_slices,
)
from holdall.storage.ticks import Coder

COUNT = 11
CODERS: list[Coder] = [chosen_kernels().coder]
COMMON = Dictionary(bytes(range(256)) * 3)
RGB = Transform(900, 0, Predictor.LEFT, 3, 15, 20, interleaved=True, green=True)
CODECS = [
    Codec(Method.STORED, 0, Transform(900)),
    Codec(Method.LZ4, 0, Transform(900)),
    Codec(Method.LZ4, 5, RGB, group=4),
    Codec(Method.ZSTD, 3, replace(RGB, predictor=Predictor.UP, interleaved=False)),
    Codec(Method.ZSTD, 3, Transform(900), COMMON),
    Codec(Method.ZSTD, 3, Transform(900, 4), COMMON, group=3),
    Codec(Method.ZSTD, 3, Transform(900, shuffle=4), group=16),
    Codec(Method.LZ4, 7, Transform(900), COMMON),
    Codec(Method.ZSTD, 9, replace(RGB, predictor=Predictor.PIXELS, interleaved=False, green=False)),
    Codec(Method.ZSTD, 9, Transform(900, 4), group=2),
    Codec(Method.ZSTD, 9, Transform(900, predictor=Predictor.CHANGES), COMMON, group=8),
    Codec(Method.LZ4, 5, Transform(900, 4, Predictor.CHANGES), group=5),
]
"""Codecs of level 9 are sealed in another order than their numbers'."""


def sealed_by(coder: Coder, codec: Codec) -> tuple[SealedSlices, Bytes]:
    generator = np.random.default_rng(codec.transform.slice_bytes)
    slices: Bytes = (generator.integers(0, 3, (COUNT, 900)).cumsum(axis=1) & 31).astype(np.uint8)
    if codec.transform.word_bytes:
        slices = np.arange(9, dtype="u4")[generator.integers(0, 9, (COUNT, 225))].view(np.uint8)
    sealed = coder.seal(slices, codec, generator.permutation(COUNT).astype(np.uint32) if codec.level == 9 else None)
    assert sealed is not None
    return sealed, slices


def written(path: Path, *records: list[Any]) -> SegmentFile:
    path.write_bytes(b"".join(bytes(buffer) for record in records for buffer in record))
    return SegmentFile(path, os.open(path, os.O_RDWR), is_temporary=False)


def records_of(file: SegmentFile) -> list[Record]:
    """Read every record of a file, one after another."""
    records, start, nbytes = [], 0, file.path.stat().st_size
    while start < nbytes:
        records.append(unpack(file.read, start, nbytes))
        start += records[-1].nbytes
    return records


def pack(coder: Coder, sealed: SealedSlices) -> list[Any]:
    assert isinstance(sealed.coded.data, np.ndarray)
    return pack_slices(sealed.coded, coder.checksums(sealed.coded.data, sealed.coded.offsets))


def decoded(coder: Coder, coded: Coded) -> bytes:
    out = np.empty((COUNT, coded.codec.transform.slice_bytes), np.uint8)
    coder.decode(coder.adopt(coded), np.arange(COUNT), out)
    return out.tobytes()


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("writer", CODERS, ids=lambda coder: type(coder).__name__)
@pytest.mark.parametrize("reader", CODERS, ids=lambda coder: type(coder).__name__)
@pytest.mark.parametrize("codec", CODECS, ids=describe)
def test_a_block_is_read_back_as_it_was(codec: Codec, reader: Coder, writer: Coder, tmp_path: Path) -> None:
    """Behind its dictionary, among others; the units stay in the file, where either coder reads them."""
    sealed, slices = sealed_by(writer, codec)
    other, _ = sealed_by(writer, CODECS[1])
    file = written(tmp_path / "a.seg", pack_dictionary(COMMON), pack(writer, other), pack(writer, sealed))
    told, _, block = records_of(file)
    assert [told.kind, block.kind] == [DICTIONARY, SLICES]
    dictionary = unpack_dictionary(told, file)
    assert dictionary.content == COMMON.content
    coded = unpack_slices(block, file, {COMMON.name: dictionary})
    assert isinstance(coded.data, Extent)
    assert replace(coded.codec, dictionary=None) == replace(codec, dictionary=None)
    assert (coded.codec.dictionary is dictionary) == (codec.dictionary is not None)
    assert coded.count == COUNT
    for name in ("offsets", "palette"):
        assert getattr(coded, name).tolist() == getattr(sealed.coded, name).tolist()
    assert places_of(coded, np.arange(COUNT)).tolist() == places_of(sealed.coded, np.arange(COUNT)).tolist()
    assert coded.data.read(0, coded.data.nbytes) == sealed.coded.data.tobytes()  # type: ignore[union-attr]
    assert decoded(reader, coded) == slices.tobytes()


def test_a_codec_that_is_not_known_is_refused() -> None:
    """A record of a later version, or a damaged one."""
    words = codec_words(CODECS[0])
    for name, wrong in (("method", 3), ("method", -1), ("level", "1"), ("group", None)):
        with pytest.raises((ValueError, TypeError, DamageError)):
            codec_of(words | {name: wrong}, {})
    del words["group"]
    with pytest.raises(KeyError):
        codec_of(words, {})


def test_a_transform_that_was_read_before_is_checked_again() -> None:
    """Transforms are remembered, and Python calls 1 and True equal; JSON's true is no count."""
    words = codec_words(Codec(Method.ZSTD, 3, Transform(16, shuffle=1)))
    assert codec_of(words, {}).transform == Transform(16, shuffle=1)
    for wrong in (True, 1.0, -1, "1", [1], None):
        with pytest.raises((DamageError, TypeError)):
            codec_of(words | {"transform": words["transform"] | {"shuffle": wrong}}, {})


def test_a_block_that_lies_in_a_file_is_not_packed_again(tmp_path: Path) -> None:
    """Its bytes are not in memory."""
    sealed, _ = sealed_by(CODERS[0], CODECS[1])
    file = written(tmp_path / "a.seg", pack(CODERS[0], sealed))
    coded = unpack_slices(records_of(file)[0], file, {})
    assert isinstance(coded.data, Extent)
    with pytest.raises(TypeError):
        pack_slices(coded, coded.data.checks)


def test_dictionaries_are_named_by_their_content() -> None:
    """The same bytes have one name, however often they are trained; others have another."""
    assert Dictionary(b"a" * 40).name == Dictionary(b"a" * 40).name
    assert Dictionary(b"a" * 40).name != Dictionary(b"a" * 41).name


# ---------------------------------------------------------------- what makes no sense


def rewritten(record: list[Any], **changes: Any) -> list[Any]:
    """Return a record with another head, whose checksums fit: written by somebody who knows the format."""
    head = json.loads(bytes(record[1]))
    for name, value in changes.items():
        place = head["transform"] if name in head["transform"] else head
        place[name] = value
        if value is DROPPED:
            del place[name]
    words = json.dumps(head).encode()
    body = sum(part["bytes"] for part in head["parts"])
    start = PREAMBLE.pack(MAGIC, len(words), zlib.crc32(words), body, 0, 0)[:24]
    return [start + struct.pack("<II", zlib.crc32(start), 0), words, *record[2:]]


DROPPED: Any = ...
HOSTILE: list[dict[str, Any]] = [
    {"count": -1}, {"count": COUNT + 1}, {"count": 2**40}, {"count": "11"}, {"count": None}, {"count": 11.0},
    {"count": True}, {"count": DROPPED}, {"group": 0}, {"group": -4}, {"group": 2**31}, {"group": 65}, {"group": []},
    {"method": 3}, {"method": -1}, {"method": DROPPED}, {"level": -1}, {"level": {}},
    {"slice_bytes": 0}, {"slice_bytes": 2**31}, {"slice_bytes": -900}, {"slice_bytes": DROPPED}, {"word_bytes": 3},
    {"word_bytes": 8}, {"predictor": 7}, {"planes": 0, "predictor": 1}, {"rows": 2**31, "predictor": 1},
    {"shuffle": 2**31}, {"transform": None}, {"transform": []}, {"dictionary": "unheard of"}, {"dictionary": []},
]  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
@pytest.mark.parametrize("codec", [CODECS[1], CODECS[2]], ids=describe)
def test_a_head_that_makes_no_sense_is_refused(codec: Codec, changes: dict[str, Any], tmp_path: Path) -> None:
    """Before a coder sees it; or where a coder decides, by the coder. Never by a crash, never with wrong rows."""
    sealed, _ = sealed_by(CODERS[0], codec)
    file = written(tmp_path / "a.seg", rewritten(pack(CODERS[0], sealed), **changes))
    for coder in CODERS:
        with pytest.raises(DamageError):
            decoded(coder, unpack_slices(records_of(file)[0], file, {}))


@pytest.mark.parametrize("lacking", ["palette", "offsets", "checks", "units"])
def test_a_block_that_lacks_a_part_is_refused(lacking: str, tmp_path: Path) -> None:
    """The message names the file."""
    sealed, _ = sealed_by(CODERS[0], CODECS[1])
    record = pack(CODERS[0], sealed)
    head = json.loads(bytes(record[1]))
    for part in head["parts"]:
        part["name"] = part["name"].replace(lacking, "other")
    file = written(tmp_path / "a.seg", rewritten(record, parts=head["parts"]))
    with pytest.raises(DamageError, match=lacking):
        unpack_slices(records_of(file)[0], file, {})


@pytest.mark.parametrize("name", ["offsets", "checks"])
@pytest.mark.parametrize("length", [-1, 1])
def test_too_few_or_too_many_numbers_are_refused(name: str, length: int, tmp_path: Path) -> None:
    """One offset per unit and one more; one checksum per unit."""
    sealed, _ = sealed_by(CODERS[0], CODECS[1])
    file = written(tmp_path / "a.seg", pack(CODERS[0], sealed))
    coded = unpack_slices(records_of(file)[0], file, {})
    assert isinstance(coded.data, Extent)
    before = coded.offsets if name == "offsets" else coded.data.checks
    wrong = np.resize(before, len(before) + length)
    change: dict[str, Any] = {"offsets": wrong} if name == "offsets" else {"data": replace(coded.data, checks=wrong)}
    with pytest.raises(DamageError):
        replace(coded, **change)


def test_a_dictionary_that_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    """Slices would be decoded to something else with it."""
    record = pack_dictionary(COMMON)
    head = json.loads(bytes(record[1]))
    changed = rewritten([*record[:1], json.dumps({**head, "transform": {}}).encode(), *record[2:]], name="0" * 64)
    file = written(tmp_path / "a.seg", changed)
    with pytest.raises(DamageError, match="not what its name says"):
        unpack_dictionary(records_of(file)[0], file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the file is written anew
@given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 5), cut=st.booleans())
def test_a_damaged_record_is_an_error_or_the_same_rows(seed: int, flips: int, cut: bool, tmp_path: Path) -> None:
    """Whatever bytes of the file were changed or lost: nothing else is ever returned."""
    generator = np.random.default_rng(seed)
    sealed, slices = sealed_by(CODERS[0], CODECS[2])
    content = bytearray(b"".join(bytes(buffer) for buffer in pack(CODERS[0], sealed)))
    for position in generator.integers(0, len(content), flips).tolist():
        content[position] ^= int(generator.integers(1, 256))
    if cut:
        del content[int(generator.integers(len(content))) :]
    file = written(tmp_path / "a.seg", [bytes(content)])
    for coder in CODERS:
        try:
            rows = decoded(coder, unpack_slices(unpack(file.read, 0, len(content)), file, {}))
        except DamageError:
            continue
        assert rows == slices.tobytes()

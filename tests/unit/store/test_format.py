"""The byte format of segments: what is read back is what was written, and damage is always noticed."""

from __future__ import annotations

import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall._native import WRITTEN, Block, Coded, Dictionary, PackedRun, Part, Reader, Segment, Writer, encode
from holdall.codec.codec import Codec, Method
from holdall.errors import DamageError, NewerFormatError
from holdall.schema import Schema
from holdall.store.columns import Columns
from holdall.store.format import (
    FilePlace,
    find_damaged_slices,
    list_blocks,
    mark_invalid,
    name_dictionary,
    pack_block,
    pack_dictionary,
    pack_parts,
    pack_segment,
    read_block,
    read_dictionary,
    read_parts,
    segments_from_arrays,
    segments_to_arrays,
    unpack_segment,
)
from holdall.store.records import pack_record, read_record, reader_of, split_records

LANES = 2
TICKS = 12
REWARD = np.dtype(np.float64)
SPACE = spaces.Dict(
    {
        "frames": spaces.Box(0, 255, (4, 6, 6), np.uint8),
        "image": spaces.Box(0, 255, (8, 8), np.uint8),
        "speed": spaces.Box(-1, 1, (3,), np.float32),
        "state": spaces.Box(-1, 1, (2,), np.float32),
    }
)
SCHEMA = Schema.of(SPACE, spaces.Discrete(4), {"hidden": spaces.Box(-1, 1, (2,), np.float32)}, LANES, ())
COLUMNS = Columns(SCHEMA)
LAYOUTS = (("sliced", 4, 1, 36, 1), ("sliced", 1, 1, 64, 1), ("shared",), ("paired",), None, None, None, None)
OUTPUTS = (
    *COLUMNS.obs_outputs,
    *COLUMNS.next_obs_outputs,
    *COLUMNS.action_outputs,
    COLUMNS.reward_output,
    *COLUMNS.extra_outputs,
    COLUMNS.terminated_output,
    COLUMNS.truncated_output,
)


def new_writer() -> Writer:
    writer = Writer(COLUMNS.list_columns(), COLUMNS.list_groups(), LANES, 1000, 100, 1 << 16, LAYOUTS)
    writer.set_type(COLUMNS.reward, REWARD.num)
    return writer


def fill_writer(writer: Writer, ticks: int = TICKS) -> None:
    rng = np.random.default_rng(7)
    frames = rng.integers(0, 9, (LANES, 4, 6, 6), np.uint8)
    for tick in range(ticks):
        newest = rng.integers(0, 9, (LANES, 1, 6, 6), np.uint8)
        following = np.concatenate([frames[:, 1:], newest], axis=1)
        obs = (frames, *_draw_others(rng))
        next_obs = (following, *_draw_others(rng))
        frames = rng.integers(0, 9, (LANES, 4, 6, 6), np.uint8) if tick % 5 == 4 else following
        flags = np.array([tick % 5 == 4] * LANES)
        outcome = writer.append(
            obs,
            (rng.integers(0, 4, LANES),),
            rng.standard_normal(LANES),
            next_obs,
            flags,
            np.zeros(LANES, np.bool_),
            (rng.standard_normal((LANES, 2)).astype(np.float32),),
            np.array([True, tick != 3]),
        )
        assert outcome == WRITTEN


def _draw_others(rng: np.random.Generator) -> tuple[NDArray[Any], ...]:
    image = rng.integers(0, 3, (LANES, 8, 8), np.uint8)
    speed = rng.standard_normal((LANES, 3)).astype(np.float32)
    state = rng.standard_normal((LANES, 2)).astype(np.float32)
    return image, speed, state


def make_segment() -> Segment:
    writer = new_writer()
    fill_writer(writer)
    # Another layout of the next segment closes the blocks.
    segment = writer.roll([("paired",) if layout is not None else None for layout in LAYOUTS])
    assert segment is not None
    return segment


def read_all(segment: Segment) -> tuple[NDArray[Any], ...]:
    writer = new_writer()
    writer.adopt(segment)
    ids = np.arange(segment.ticks * LANES, dtype=np.int64)
    return Reader().gather(writer.catalog, ids, OUTPUTS)


def assert_same(one: Segment, other: Segment) -> None:
    assert (one.first_tick, one.ticks, one.lanes) == (other.first_tick, other.ticks, other.lanes)
    assert one.invalid_count == other.invalid_count
    for left, right in zip(read_all(one), read_all(other), strict=True):
        np.testing.assert_array_equal(left, right)


def code_blocks(segment: Segment) -> Dictionary:
    dictionary = Dictionary(bytes(range(256)) * 8)
    for block in list_blocks(segment):
        coded = encode(block, Codec(block.slice_bytes, Method.ZSTANDARD, 3, 4, dictionary=dictionary))
        assert coded is not None
        block.form = coded
    return dictionary


def pack_speed(segment: Segment) -> Segment:
    """Return the segment with its third column as a packed run."""
    shared = segment.parts[2]
    plan = _Plan(leaf_bytes=(12,), groups=((12, 1, True),), pieces=(((0, 0, 12, 1, 0, 0, False),),))
    run = PackedRun.pack(plan, [shared.arrays()["rows"]], TICKS + 1, LANES, max_share=10.0)
    assert run is not None
    parts = [*segment.parts]
    parts[2] = Part.pack(run, 0, shared)
    return Segment(segment.first_tick, segment.ticks, segment.lanes, parts)


class _Plan:
    def __init__(self, leaf_bytes: Any, groups: Any, pieces: Any) -> None:
        self.leaf_bytes = leaf_bytes
        self.groups = groups
        self.pieces = pieces


@pytest.mark.parametrize("form", ["raw", "coded", "packed"])
def test_a_segment_is_read_back_as_it_was_packed(form: str) -> None:
    segment = make_segment()
    if form == "coded":
        code_blocks(segment)
    if form == "packed":
        segment = pack_speed(segment)
    unpacked = unpack_segment(pack_segment(segment), COLUMNS, reward_dtype=REWARD)
    assert_same(segment, unpacked)
    assert [part.kind for part in unpacked.parts] == [part.kind for part in segment.parts]
    assert all(isinstance(block.form, Coded) for block in list_blocks(unpacked))


def test_a_dictionary_is_packed_once_and_a_missing_one_is_noticed() -> None:
    segment = make_segment()
    dictionary = code_blocks(segment)
    packed = pack_segment(segment)
    assert [record.kind for record in split_records(packed)].count("dictionary") == 1
    without_dictionary = packed[len(b"".join(pack_dictionary(dictionary))) :]
    with pytest.raises(DamageError, match=f"dictionary '{name_dictionary(dictionary)}' of a block is missing"):
        unpack_segment(without_dictionary, COLUMNS)


def test_every_changed_byte_and_every_cut_is_noticed() -> None:
    segment = make_segment()
    code_blocks(segment)
    data = pack_segment(segment)
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 0x41
        with pytest.raises(DamageError):
            unpack_segment(bytes(damaged), COLUMNS)
    for end in range(0, len(data), 97):
        with pytest.raises(DamageError):
            unpack_segment(data[:end], COLUMNS)


def test_a_record_of_another_kind_is_refused_with_both_kinds() -> None:
    segment = make_segment()
    parts = b"".join(pack_parts(segment))
    with pytest.raises(DamageError, match="'segment' instead of 'block'"):
        read_block(split_records(parts)[0], reader_of(parts), {})
    dictionary = b"".join(pack_dictionary(Dictionary(bytes(64))))
    with pytest.raises(DamageError, match="'dictionary' instead of 'segment'"):
        read_parts(split_records(dictionary)[0], reader_of(dictionary), COLUMNS, list_blocks(segment), REWARD)


def test_a_dictionary_above_16_mib_is_refused() -> None:
    for nbytes, message in ((2**24, "another content than its name"), (2**24 + 1, "16777217 bytes")):
        arrays = {"content": np.zeros(nbytes, np.uint8), "palette": np.zeros(0, np.uint8)}
        record = b"".join(pack_record("dictionary", {"name": ""}, arrays, is_compressed=False))
        with pytest.raises(DamageError, match=message):
            read_dictionary(split_records(record)[0], reader_of(record))


def test_a_later_version_is_named() -> None:
    record = bytearray(b"".join(pack_record("x", {}, {})))
    record[7] = 2
    record[24:28] = struct.pack("<I", zlib.crc32(record[:24]))
    with pytest.raises(NewerFormatError, match="version 2"):
        split_records(bytes(record))


def test_blocks_stay_in_their_file_and_units_are_checked_when_read(tmp_path: Any) -> None:
    segment = make_segment()
    code_blocks(segment)
    block = list_blocks(segment)[0]
    assert isinstance(block.form, Coded)
    path = tmp_path / "block"
    content = bytearray(b"".join(pack_block(block.form)))
    path.write_bytes(content)
    dictionaries = {name_dictionary(block.form.codec.dictionary): block.form.codec.dictionary}
    with path.open("rb") as file:
        record = read_record(reader_of(content), 0, len(content))
        loaded = read_block(record, reader_of(content), dictionaries, FilePlace(file.fileno(), file))
        assert isinstance(loaded.form, Coded)
        assert loaded.form.location is not None
        np.testing.assert_array_equal(loaded.form.in_memory().data, block.form.data)
        content[-1] ^= 1
        is_damaged = find_damaged_slices(record, reader_of(content), loaded.form)
        assert is_damaged[-1]
        assert is_damaged.sum() <= block.form.codec.group


def test_parts_can_be_written_apart() -> None:
    segment = make_segment()
    data = b"".join(pack_parts(segment, columns={6}))
    record = split_records(data)[0]
    stored = read_parts(record, reader_of(data), COLUMNS, list_blocks(segment), REWARD)
    assert list(stored.parts) == [6]
    np.testing.assert_array_equal(stored.parts[6].arrays()["rows"], segment.parts[6].arrays()["rows"])


def test_lost_transitions_are_marked() -> None:
    segment = make_segment()
    is_lost = np.zeros(TICKS * LANES, np.bool_)
    is_lost[5] = True
    assert mark_invalid(segment, is_lost).invalid_count == segment.invalid_count + 1


@pytest.mark.parametrize("form", ["raw", "coded", "packed"])
def test_segments_are_pickled_without_a_copy_of_their_arrays(form: str) -> None:
    segment = make_segment()
    if form == "coded":
        code_blocks(segment)
    if form == "packed":
        segment = pack_speed(segment)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(segments_to_arrays([segment]), protocol=5, buffer_callback=buffers.append)
    if form == "raw":
        assert len(data) < 4096
    restored = segments_from_arrays(pickle.loads(data, buffers=buffers))
    assert_same(segment, restored[0])


def test_an_open_block_of_a_snapshot_is_packed() -> None:
    writer = new_writer()
    fill_writer(writer)
    segment = writer.snapshot().segments[0]
    fill_writer(writer, 3)
    assert_same(segment, unpack_segment(pack_segment(segment), COLUMNS))
    assert_same(segment, segments_from_arrays(segments_to_arrays([segment]))[0])


def test_serial_numbers_are_unique() -> None:
    serials = {Block(4, 1, b"abcd").serial for _ in range(10)}
    assert len(serials) == 10

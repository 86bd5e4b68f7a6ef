"""Blocks: what a writer sends, a run of ticks encoded once and never opened again before a learner reads it.

In:  columns of small fields, logs of slice numbers, and compressed slices.  Out: one checked record of bytes; and back.
Invariant: a block is self-contained but for the dictionaries that it names. Nothing that was received is trusted: the
record has checksums, and every number in it is held against the others before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.cluster.protocol import TravelLayout
from holdall.errors import DamageError
from holdall.json_state import dtype_name, dtype_of
from holdall.schema import Array, Leaf
from holdall.storage.blocks import Coded
from holdall.storage.codec import Codec, Dictionary
from holdall.storage.layout import Window
from holdall.storage.records import (
    Buffer,
    Record,
    codec_of,
    codec_words,
    dictionary_name,
    numbers,
    pack,
    unpack,
    window_of,
    window_words,
)
from holdall.storage.slices import NEXT_IS_WHOLE

BLOCK = "block"
MOST_ROWS = 2**20
MOST_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class SlicedField:
    """One observation leaf of a block: which slices make up its observations, and these, compressed."""

    window: Window
    cursors: NDArray[np.uint32]  # (rows,): where in its lane's log an observation begins, see experience/part.py
    log: NDArray[np.uint32]  # (lanes, entries): slice numbers
    coded: Coded  # whole units only, so that units of many blocks can be put together


@dataclass(frozen=True, slots=True)
class Block:
    """A run of ticks; row r is tick r // lanes, lane r % lanes."""

    lanes: int
    rows: int
    columns: dict[str, Array]  # (rows, ...)
    fields: tuple[SlicedField, ...]


def pack_block(block: Block) -> bytes:
    """Return a block as a record."""
    parts: dict[str, Buffer] = {name: as_buffer(column) for name, column in block.columns.items()}
    fields = []
    for i, field in enumerate(block.fields):
        coded = field.coded
        log = field.log.astype("<u2") if coded.count <= 1 << 16 else field.log
        parts |= {
            f"cursors/{i}": as_buffer(field.cursors),
            f"log/{i}": as_buffer(log),
            f"palette/{i}": as_buffer(coded.palette),
            f"offsets/{i}": as_buffer(coded.offsets),
            f"units/{i}": as_buffer(_in_memory(coded)),
        }
        fields.append(
            {
                "window": window_words(field.window),
                "log": dtype_name(log.dtype),
                "count": coded.count,
                "codec": codec_words(coded.codec),
            }
        )
    head = {
        "lanes": block.lanes,
        "rows": block.rows,
        "reward": dtype_name(block.columns["reward"].dtype),
        "fields": fields,
    }
    return b"".join(pack(BLOCK, head, parts, frozenset()))


def unpack_block(payload: bytes, layout: TravelLayout, dictionaries: Mapping[str, Dictionary]) -> Block:
    """Read a block that was received; DamageError if anything in it does not make sense."""
    record = open_record(payload, BLOCK)
    head = record.head
    try:
        lanes, rows = whole(head["lanes"], MOST_ROWS), whole(head["rows"], MOST_ROWS)
        if lanes < 1 or rows < 1 or rows % lanes or len(head["fields"]) != len(layout.sliced):
            raise DamageError(f"a block of {rows} rows, {lanes} lanes and {len(head['fields'])} sliced fields is none")
        like = layout.with_reward(dtype_of(head["reward"]))
        columns = {
            name: array_of(record, payload, name, dtype, (rows, *shape)) for name, (shape, dtype) in like.items()
        }
        fields = tuple(
            _field_of(record, payload, i, words, leaf, (lanes, rows), dictionaries)
            for i, (words, leaf) in enumerate(zip(head["fields"], layout.leaves, strict=True))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"a block makes no sense ({type(error).__name__}: {error}); nothing of it is used") from error
    return Block(lanes, rows, columns, fields)


def dictionaries_of(payload: bytes) -> list[str]:
    """Name the dictionaries that a block needs."""
    head = open_record(payload, BLOCK).head
    try:
        names = {field["codec"]["dictionary"] for field in head["fields"]}
    except (KeyError, TypeError) as error:
        raise DamageError(f"a block makes no sense ({type(error).__name__}: {error}); nothing of it is used") from error
    return [str(name) for name in names if name is not None]


def rows_of(payload: bytes) -> int:
    """Count the rows of a block, without reading them."""
    try:
        return whole(open_record(payload, BLOCK).head["rows"], MOST_ROWS)
    except (KeyError, ValueError) as error:
        raise DamageError(f"a block makes no sense ({error}); nothing of it is used") from error


def _field_of(
    record: Record,
    payload: bytes,
    i: int,
    words: Any,
    leaf: Leaf,
    shape: tuple[int, int],
    dictionaries: Mapping[str, Dictionary],
) -> SlicedField:
    lanes, rows = shape
    window = window_of(words["window"], leaf)
    coded = coded_of(record, payload, str(i), words, dictionaries)
    if coded.codec.transform.slice_bytes != window.slice_bytes or coded.count % coded.codec.group:
        raise DamageError(f"field {i} of a block has slices that do not fit its window; nothing of it is used")
    cursors = array_of(record, payload, f"cursors/{i}", np.dtype(np.uint32), (rows,))
    log_dtype = dtype_of(words["log"])
    if log_dtype not in (np.uint16, np.uint32):
        raise DamageError(f"field {i} of a block has a log of {log_dtype}")
    flat = numbers(read_part(record, payload, f"log/{i}"), log_dtype.str[1:]).astype(np.uint32)
    if flat.size % lanes:
        raise DamageError(f"field {i} of a block has a log of {flat.size} entries for {lanes} lanes")
    log = flat.reshape(lanes, -1)
    start = (cursors & ~NEXT_IS_WHOLE).astype(np.int64)
    end = start + window.count + np.where(cursors & NEXT_IS_WHOLE, window.count, window.shift)
    if end.max() > log.shape[1] or (flat.size and int(flat.max()) >= coded.count):
        raise DamageError(f"field {i} of a block points outside itself; nothing of it is used")
    return SlicedField(window, cursors, log, coded)


def coded_of(
    record: Record, payload: bytes, name: str, words: Mapping[str, Any], dictionaries: Mapping[str, Dictionary]
) -> Coded:
    """Read compressed slices out of the parts of a record; their units are a view of the payload."""
    codec: Codec = codec_of(words["codec"], dictionaries)
    offsets = numbers(read_part(record, payload, f"offsets/{name}"), "u4")
    palette = np.frombuffer(read_part(record, payload, f"palette/{name}"), np.uint8)
    units = np.frombuffer(read_part(record, payload, f"units/{name}"), np.uint8)
    coded = Coded(codec, whole(words["count"], 2**31), offsets, palette, units)
    ascending = offsets.size and offsets[0] == 0 and (np.diff(offsets.astype(np.int64)) >= 0).all()
    if not ascending or int(offsets[-1]) != units.size:
        raise DamageError("compressed slices lie outside their block; nothing of it is used")
    return coded


def open_record(payload: bytes, kind: str) -> Record:
    """Read the head of a record that fills a payload."""
    record = unpack(_reader(payload), 0, len(payload))
    if record.kind != kind or record.nbytes != len(payload):
        raise DamageError(f"{len(payload)} bytes were received that are no {kind}; nothing of them is used")
    return record


def records_in(content: bytes) -> Iterator[Record]:
    """Read the heads of records that stand one after another."""
    start = 0
    while start < len(content):
        record = unpack(_reader(content), start, len(content))
        yield record
        start += record.nbytes


def read_part(record: Record, payload: bytes, name: str) -> bytes:
    """Read a part of a record, checked."""
    return record.part(name, _reader(payload))


def array_of(record: Record, payload: bytes, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Read a part of a record as an array of known shape."""
    content = read_part(record, payload, name)
    expected = int(np.prod(shape)) * dtype.itemsize
    if len(content) != expected:
        raise DamageError(f"part {name!r} has {len(content)} bytes, expected {expected}; nothing of it is used")
    array: Array = np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)
    return array


def whole(value: Any, most: int) -> int:
    """Return a whole number that was received, if it is one within bounds."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no count up to {most}")
    return value


def _reader(payload: bytes) -> Any:
    return lambda start, nbytes: payload[start : start + nbytes]


def _in_memory(coded: Coded) -> Array:
    if not isinstance(coded.data, np.ndarray):
        raise TypeError("the slices lie in a file")
    return coded.data


def as_buffer(array: Array) -> memoryview:
    """See an array as the bytes that travel, in little-endian order."""
    little: Any = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    return memoryview(little)


DICTIONARY = "dictionary"


def pack_dictionary(dictionary: Dictionary) -> bytes:
    """Return a dictionary as a record."""
    name = dictionary_name(dictionary)
    return b"".join(pack(DICTIONARY, {"name": name}, {"content": dictionary.content}, frozenset()))


def unpack_dictionary(payload: bytes) -> Dictionary:
    """Read a dictionary that was received."""
    record = open_record(payload, DICTIONARY)
    dictionary = Dictionary(read_part(record, payload, "content"))
    if dictionary_name(dictionary) != record.head.get("name"):
        raise DamageError("a dictionary was received that is not what its name says; it is not used")
    return dictionary

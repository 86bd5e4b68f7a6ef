"""Records: the byte layout of everything that leaves memory, in checkpoints, journals and network messages.

    preamble (32 bytes) | head (JSON) | arrays, one after another

The preamble has the magic number with the format version, the length and the CRC-32 of the head, the length of all
arrays, and a CRC-32 of itself. The head has `kind`, fields of that kind, and `arrays`: name, length and CRC-32 of every
array, and its uncompressed length if it is compressed with Zstandard. All numbers are little-endian.

Guarantee: a reader checks every length against the file before it allocates memory, and every checksum before it
returns bytes. Nothing that is read runs code. Damaged bytes raise DamageError.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.checks import refuse_malformed
from holdall.errors import CheckpointError, DamageError, NewerFormatError

MAGIC = b"holdall\x01"
"""Seven letters, and one byte with the version of the format."""
PREAMBLE_BYTES = 32
MAX_HEAD_BYTES = 16 * 2**20
MAX_RECORD_BYTES = 2**31
"""Uncompressed bytes of all arrays of a record. Records that holdall writes are far smaller."""

_PREAMBLE = struct.Struct("<8sIIQ")
_CHECK = struct.Struct("<II")
_MIN_SAVING = 0.1
"""Share of an array that compression must save. Otherwise the array is stored uncompressed."""
_MIN_COMPRESSED_BYTES = 256
"""Smaller arrays are stored uncompressed."""

# JSON is refused if the parsed values would take far more memory than the text. These are estimates of that memory.
_LIST_BYTES = 64
_DICT_BYTES = 240
_VALUE_BYTES = 48
_ALWAYS_PARSED_BYTES = 64 * 2**20
"""Bytes of parsed values that are never too many."""
_MAX_EXPANSION = 8
"""Further bytes of parsed values that are allowed for each byte of text."""

Buffer = bytes | memoryview
Read = Callable[[int, int], bytes]
"""Function of an offset and a length that reads bytes of a file. The result is shorter at the end of the file."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The place of an array in a file."""

    start: int  # Position in the file.
    nbytes: int
    crc32: int | None  # None: the content has checksums of its own.
    raw_bytes: int | None  # Bytes without compression. None: the array is not compressed.


@dataclass(frozen=True, slots=True)
class Record:
    """A checked head, and the places of the arrays. An array is read from the file when it is needed."""

    start: int
    nbytes: int
    head_bytes: int  # Bytes of preamble and head.
    kind: str
    head: dict[str, Any]
    arrays: dict[str, StoredArray]  # By name.
    source: str = ""  # Name of the file, for errors.

    @property
    def place(self) -> str:
        """Where the record is, for errors."""
        return _describe_place(self.start, self.source)

    def find(self, name: str) -> StoredArray:
        """Return the place of an array. Raise DamageError if the record does not have it."""
        array = self.arrays.get(name)
        if array is None:
            raise DamageError(f"The {self.kind} record {self.place} has no array {name!r}.")
        return array

    def read_bytes(self, name: str, read: Read, max_bytes: int) -> bytes:
        """Read, check and decompress an array of at most `max_bytes` bytes."""
        array = self.find(name)
        raw_bytes = array.nbytes if array.raw_bytes is None else array.raw_bytes
        if raw_bytes > max_bytes:
            raise DamageError(f"{self._describe(name)} claims {raw_bytes} bytes. It can have at most {max_bytes}.")
        content = read(array.start, array.nbytes)
        if len(content) != array.nbytes:
            raise DamageError(f"{self._describe(name)} is cut short.")
        if array.crc32 is not None and zlib.crc32(content) != array.crc32:
            raise DamageError(f"{self._describe(name)} is damaged: its checksum does not match.")
        if array.raw_bytes is None:
            return content
        return self._decompress(name, content, array.raw_bytes)

    def read_array(self, name: str, read: Read, dtype: str, count: int) -> NDArray[Any]:
        """Read an array of exactly `count` items."""
        nbytes = count * np.dtype(dtype).itemsize
        content = self.read_bytes(name, read, nbytes)
        if len(content) != nbytes:
            raise DamageError(f"{self._describe(name)} has {len(content)} bytes instead of {nbytes}.")
        return np.frombuffer(content, dtype)

    def read_items(self, name: str, read: Read, dtype: str, max_count: int) -> NDArray[Any]:
        """Read an array of at most `max_count` items."""
        itemsize = np.dtype(dtype).itemsize
        content = self.read_bytes(name, read, max_count * itemsize)
        if len(content) % itemsize != 0:
            raise DamageError(f"{self._describe(name)} has {len(content)} bytes, not a multiple of {itemsize}.")
        return np.frombuffer(content, dtype)

    def require_kind(self, kind: str) -> None:
        """Raise DamageError if the record is of another kind."""
        if self.kind != kind:
            raise DamageError(f"The record {self.place} is of kind {self.kind!r} instead of {kind!r}.")

    def _decompress(self, name: str, content: bytes, raw_bytes: int) -> bytes:
        try:
            # The frame's own size is compared first, because a few bytes may claim any size.
            if zstandard.frame_content_size(content) != raw_bytes:
                raise DamageError(f"{self._describe(name)} has another size than its head says.")
            return zstandard.ZstdDecompressor().decompress(content, max_output_size=raw_bytes)
        except zstandard.ZstdError as error:
            raise DamageError(f"{self._describe(name)} cannot be decompressed: {error}.") from error

    def _describe(self, name: str) -> str:
        return f"Array {name!r} of the {self.kind} record {self.place}"


def pack_record(
    kind: str,
    fields: Mapping[str, Any],
    arrays: Mapping[str, Buffer | NDArray[Any]],
    *,
    is_compressed: bool = True,
    unchecked: frozenset[str] = frozenset(),
) -> list[Buffer]:
    """Return a record as buffers to write one after another: preamble, head, and one buffer per array.

    Args:
        fields: Further fields of the head. Only types that JSON has.
        is_compressed: Whether arrays are compressed if that saves a tenth of their bytes or more.
        unchecked: Names of arrays that have checksums of their own. They are not compressed.
    """
    entries = []
    buffers: list[Buffer] = []
    body_bytes = 0
    raw_bytes = 0
    for name, given in arrays.items():
        raw = _view_bytes(given)
        content: Buffer = raw
        entry: dict[str, Any] = {"name": name}
        if name not in unchecked:
            if is_compressed:
                content = _compress(raw)
            if content is not raw:
                entry["raw_bytes"] = raw.nbytes
            entry["crc32"] = zlib.crc32(content)
        entry["bytes"] = memoryview(content).nbytes
        entries.append(entry)
        buffers.append(content)
        body_bytes += entry["bytes"]
        raw_bytes += raw.nbytes
    if raw_bytes > MAX_RECORD_BYTES:
        raise CheckpointError(f"A {kind} record of {raw_bytes} bytes is too large. The limit is {MAX_RECORD_BYTES}.")
    head = dump_json({**fields, "kind": kind, "arrays": entries})
    if len(head) > MAX_HEAD_BYTES:
        raise CheckpointError(f"The head of a {kind} record has {len(head)} bytes. The limit is {MAX_HEAD_BYTES}.")
    start = _PREAMBLE.pack(MAGIC, len(head), zlib.crc32(head), body_bytes)
    return [start + _CHECK.pack(zlib.crc32(start), 0), head, *buffers]


def read_record(read: Read, start: int, file_bytes: int, source: str = "") -> Record:
    """Read and check the preamble and the head of the record at byte `start` of a file of `file_bytes` bytes.

    `source` names the file in errors.
    """
    place = _describe_place(start, source)
    preamble = read(start, PREAMBLE_BYTES)
    if len(preamble) != PREAMBLE_BYTES:
        raise DamageError(f"The record {place} is cut short: the file ends there.")
    magic, head_length, head_crc, body_bytes = _PREAMBLE.unpack_from(preamble)
    own_crc, zero = _CHECK.unpack_from(preamble, _PREAMBLE.size)
    if magic[:-1] != MAGIC[:-1] or zlib.crc32(preamble[: _PREAMBLE.size]) != own_crc or zero != 0:
        raise DamageError(f"There is no holdall record {place}, or its first bytes are damaged.")
    if magic != MAGIC:
        raise NewerFormatError(
            f"The record {place} has format version {magic[-1]}. This version of holdall reads version "
            f"{MAGIC[-1]}. Upgrade holdall."
        )
    head_bytes = PREAMBLE_BYTES + head_length
    nbytes = head_bytes + body_bytes
    if head_length > MAX_HEAD_BYTES or start + nbytes > file_bytes:
        raise DamageError(f"The record {place} claims {nbytes} bytes, more than the file has.")
    raw_head = read(start + PREAMBLE_BYTES, head_length)
    if len(raw_head) != head_length or zlib.crc32(raw_head) != head_crc:
        raise DamageError(f"The head of the record {place} is damaged.")
    with refuse_malformed(f"The head of the record {place}"):
        head = parse_json(raw_head)
        kind = head["kind"]
        if not isinstance(kind, str):
            raise TypeError("kind must be text")
        arrays = _locate_arrays(head["arrays"], start + head_bytes, body_bytes)
        return Record(start, nbytes, head_bytes, kind, head, arrays, source)


def _describe_place(start: int, source: str) -> str:
    return f"at byte {start} of {source}" if source else f"at byte {start}"


def split_records(data: bytes | memoryview) -> list[Record]:
    """Return the records of which `data` consists. Raise DamageError if there are bytes after the last one."""
    read = reader_of(data)
    records = []
    start = 0
    while start < len(data):
        record = read_record(read, start, len(data))
        records.append(record)
        start += record.nbytes
    return records


def reader_of(data: bytes | bytearray | memoryview) -> Read:
    """Return a function that reads bytes in memory like a file."""
    view = memoryview(data).cast("B")

    def read(start: int, nbytes: int) -> bytes:
        return bytes(view[start : start + nbytes])

    return read


def parse_json(text: bytes) -> Any:
    """Parse JSON. Raise DamageError if that would take far more memory than the text."""
    if not _fits_memory(text):
        raise DamageError(f"{len(text)} bytes of JSON hold more values than holdall writes.")
    return json.loads(text)


def dump_json(value: Any) -> bytes:
    """Return JSON with sorted keys and without spaces. Raise CheckpointError if `parse_json` would refuse it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if not _fits_memory(text):
        raise CheckpointError(f"{len(text)} bytes of JSON hold too many values. Keep numbers in arrays.")
    return text


def _fits_memory(text: bytes) -> bool:
    """Return whether the parsed values of a JSON text take a reasonable amount of memory."""
    parsed_bytes = _LIST_BYTES * text.count(b"[") + _DICT_BYTES * text.count(b"{") + _VALUE_BYTES * text.count(b",")
    return parsed_bytes <= _ALWAYS_PARSED_BYTES + _MAX_EXPANSION * len(text)


def _view_bytes(given: Buffer | NDArray[Any]) -> memoryview:
    if isinstance(given, np.ndarray):
        return np.ascontiguousarray(given).reshape(-1).view(np.uint8).data
    return memoryview(given).cast("B")


def _compress(raw: memoryview) -> Buffer:
    """Return `raw` compressed, or `raw` itself if compression does not pay."""
    if raw.nbytes < _MIN_COMPRESSED_BYTES:
        return raw
    compressed = zstandard.ZstdCompressor(level=1).compress(raw)
    return compressed if len(compressed) <= (1 - _MIN_SAVING) * raw.nbytes else raw


def _locate_arrays(entries: Any, start: int, body_bytes: int) -> dict[str, StoredArray]:
    """Return the places of all arrays. Raise ValueError unless they fill the record exactly."""
    arrays: dict[str, StoredArray] = {}
    end = start + body_bytes
    total_bytes = 0
    for entry in entries:
        name = entry["name"]
        nbytes = entry["bytes"]
        crc32 = entry.get("crc32")
        raw_bytes = entry.get("raw_bytes")
        if not isinstance(name, str) or name in arrays:
            raise ValueError(f"{name!r} is not a name, or occurs twice")
        for number in (nbytes, *[each for each in (crc32, raw_bytes) if each is not None]):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is not a length or a checksum")
        if start + nbytes > end:
            raise ValueError(f"array {name!r} ends after the record")
        arrays[name] = StoredArray(start, nbytes, crc32, raw_bytes)
        start += nbytes
        total_bytes += nbytes if raw_bytes is None else raw_bytes
    if start != end:
        raise ValueError(f"{end - start} bytes belong to no array")
    if total_bytes > MAX_RECORD_BYTES:
        raise ValueError(f"{total_bytes} bytes are more than a record can have")
    return arrays

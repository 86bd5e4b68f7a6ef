"""Records: the shape in which blocks leave memory, for the disk tier and for checkpoints.

A segment file is a sequence of records, each of which describes itself:

    preamble (32 bytes) | head (JSON) | parts, one after another

Invariant: nothing that was read is trusted. The preamble and the head have checksums, every size is held against the
file's before anything is allocated, and a part is handed out only if its own checksum fits.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError

MAGIC = b"holdall\x01"
"""Seven letters and the version of the format."""
PREAMBLE = struct.Struct("<8sIIQII")
"""Magic, bytes of the head, crc32 of the head, bytes of all parts, crc32 of what stands before, zero."""
MOST_HEAD_BYTES = 16 * 2**20

Buffer = bytes | memoryview
Read = Callable[[int, int], bytes]
"""Reads (offset, bytes) of a file; shorter at its end."""


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a record's body."""

    start: int  # from the file's first byte on
    nbytes: int
    crc32: int | None  # None: its content has checksums of its own


@dataclass(frozen=True, slots=True)
class Record:
    """What a head says, and where its parts lie."""

    start: int
    nbytes: int
    head: dict[str, Any]
    parts: dict[str, Part]

    @property
    def kind(self) -> str:
        """What the record holds."""
        return str(self.head["kind"])

    def part(self, name: str, read: Read) -> bytes:
        """Read one part whole, and check it."""
        part = self.parts.get(name)
        if part is None:
            raise DamageError(
                f"the {self.kind} record at byte {self.start} has no part {name!r}; nothing of it is used"
            )
        content = read(part.start, part.nbytes)
        if len(content) != part.nbytes or (part.crc32 is not None and zlib.crc32(content) != part.crc32):
            raise DamageError(
                f"part {name!r} of the {self.kind} record at byte {self.start} is damaged; nothing of it is used"
            )
        return content


def pack(kind: str, fields: Mapping[str, Any], parts: Mapping[str, Buffer], unchecked: frozenset[str]) -> list[Buffer]:
    """Return a record as buffers to write one after another.

    Args:
        fields: What else the head says; JSON's own types only.
        unchecked: Parts whose content has checksums of its own.
    """
    sized = []
    for name, content in parts.items():
        described: dict[str, Any] = {"name": name, "bytes": memoryview(content).nbytes}
        if name not in unchecked:
            described["crc32"] = zlib.crc32(content)
        sized.append(described)
    words = {**fields, "kind": kind, "parts": sized}
    head = json.dumps(words, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    body = sum(part["bytes"] for part in sized)
    start = PREAMBLE.pack(MAGIC, len(head), zlib.crc32(head), body, 0, 0)[:24]
    return [start + struct.pack("<II", zlib.crc32(start), 0), head, *parts.values()]


def unpack(read: Read, start: int, file_bytes: int) -> Record:
    """Read a record's preamble and head; its parts are read when they are asked for."""
    raw = read(start, PREAMBLE.size)
    if len(raw) != PREAMBLE.size:
        raise DamageError(f"the file ends within the record at byte {start}; it was cut short")
    magic, head_bytes, head_crc, body_bytes, own_crc, _zero = PREAMBLE.unpack(raw)
    if magic[:-1] != MAGIC[:-1] or zlib.crc32(raw[:24]) != own_crc:
        raise DamageError(f"there is no record at byte {start}; the file is damaged, or none of holdall's")
    if magic != MAGIC:
        raise DamageError(
            f"the record at byte {start} has format version {magic[-1]}, and this holdall reads {MAGIC[-1]}; upgrade it"
        )
    whole = PREAMBLE.size + head_bytes + body_bytes
    if head_bytes > MOST_HEAD_BYTES or start + whole > file_bytes:
        raise DamageError(f"the record at byte {start} claims {whole} bytes, more than the file has; it was cut short")
    raw = read(start + PREAMBLE.size, head_bytes)
    if len(raw) != head_bytes or zlib.crc32(raw) != head_crc:
        raise DamageError(f"the head of the record at byte {start} is damaged; nothing of it is used")
    try:
        head = json.loads(raw)
        return Record(start, whole, head, _parts_of(head, start + PREAMBLE.size + head_bytes, body_bytes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"the head of the record at byte {start} makes no sense ({error})") from error


def _parts_of(head: Any, start: int, body_bytes: int) -> dict[str, Part]:
    """Lay the parts out as the head says, which must fill the body."""
    parts: dict[str, Part] = {}
    end = start + body_bytes
    if not isinstance(head["kind"], str):
        raise TypeError("its kind is no text")
    for described in head["parts"]:
        name, nbytes, crc = described["name"], described["bytes"], described.get("crc32")
        if not isinstance(name, str) or type(nbytes) is not int or nbytes < 0 or start + nbytes > end or name in parts:
            raise ValueError(f"part {name!r} of {nbytes} bytes does not fit")
        parts[name] = Part(start, nbytes, crc)
        start += nbytes
    if start != end:
        raise ValueError(f"its parts leave {end - start} bytes over")
    return parts


def numbers(content: bytes, dtype: str) -> NDArray[Any]:
    """See a part's bytes as an array of its own, in this machine's byte order."""
    wanted = np.dtype(dtype).newbyteorder("<")
    if len(content) % wanted.itemsize:
        raise DamageError(f"{len(content)} bytes are no array of {dtype}; nothing of it is used")
    return np.frombuffer(content, wanted).astype(np.dtype(dtype))

"""Records: the one format in which data leaves memory, for checkpoints, for the network, and for the disk tier's files.

A file is a sequence of records, each of which describes itself:

    preamble (32 bytes) | head (JSON) | parts, one after another

Invariant: nothing that was read is trusted. The preamble and the head have checksums, every size is held against the
file's before anything is allocated, and a part is handed out only if its own checksum fits. A block counts as one on
disk only when all of it was written.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.errors import ArgumentError, CheckpointError, DamageError, NewerFormatError, SpillError
from holdall.schema import Array, Bytes, count_of, malformed_refused, require_path
from holdall.storage.blocks import (
    TRANSFORM_FIELDS,
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
from holdall.storage.coded_units import SlicePlaces, place_dtype, require_permutation
from holdall.storage.own_folder import OwnFolder
from holdall.storage.ticks import Coder

MAGIC = b"holdall\x01"
"""Seven letters and the version of the format."""
PREAMBLE = struct.Struct("<8sIIQII")
"""Magic, bytes of the head, crc32 of the head, bytes of all parts, crc32 of what stands before, zero."""
MOST_HEAD_BYTES = 16 * 2**20

Buffer = bytes | memoryview
Read = Callable[[int, int], bytes]
"""Reads (offset, bytes) of a file; shorter at its end."""


@dataclass(frozen=True, slots=True)
class RecordPart:
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
    parts: dict[str, RecordPart]

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
    sums = {name: {"crc32": zlib.crc32(content)} for name, content in parts.items() if name not in unchecked}
    sizes = {name: memoryview(content).nbytes for name, content in parts.items()}
    sized = [{"name": name, "bytes": nbytes, **sums.get(name, {})} for name, nbytes in sizes.items()]
    head = unparsed({**fields, "kind": kind, "parts": sized})
    body = sum(sizes.values())
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
        raise NewerFormatError(
            f"the record at byte {start} has format version {magic[-1]}, not {MAGIC[-1]}; upgrade holdall"
        )
    whole = PREAMBLE.size + head_bytes + body_bytes
    if head_bytes > MOST_HEAD_BYTES or start + whole > file_bytes:
        raise DamageError(f"the record at byte {start} claims {whole} bytes, more than the file has; it was cut short")
    raw = read(start + PREAMBLE.size, head_bytes)
    if len(raw) != head_bytes or zlib.crc32(raw) != head_crc:
        raise DamageError(f"the head of the record at byte {start} is damaged; nothing of it is used")
    with malformed_refused(f"the head of the record at byte {start}"):
        head = parsed(raw)
        return Record(start, whole, head, _parts_of(head, start + PREAMBLE.size + head_bytes, body_bytes))


_LIST_BYTES, _DICT_BYTES, _VALUE_BYTES = 64, 240, 48
_FREE_BYTES, _BYTES_PER_CHARACTER = 2**26, 8


def _is_modest(text: bytes) -> bool:
    """Whether parsed JSON takes about as much memory as holdall's own does: an empty list is three bytes, or 64."""
    takes = _LIST_BYTES * text.count(b"[") + _DICT_BYTES * text.count(b"{") + _VALUE_BYTES * text.count(b",")
    return takes <= _FREE_BYTES + _BYTES_PER_CHARACTER * len(text)


def parsed(text: bytes) -> Any:
    """Parse JSON, unless that takes far more memory than the text."""
    if not _is_modest(text):
        raise DamageError(f"{len(text)} bytes of JSON hold far more values than holdall's does; nothing of it is used")
    return json.loads(text)


def unparsed(words: Any) -> bytes:
    """Write JSON in one way, if `parsed` reads it again."""
    text = json.dumps(words, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if not _is_modest(text):
        raise CheckpointError(f"{len(text)} bytes of JSON hold too many values; a sampler keeps numbers in arrays")
    return text


def _parts_of(head: Any, start: int, body_bytes: int) -> dict[str, RecordPart]:
    """Lay the parts out as the head says, which must fill the body."""
    parts, end = dict[str, RecordPart](), start + body_bytes
    if not isinstance(head["kind"], str):
        raise TypeError("its kind is no text")
    for described in head["parts"]:
        name, nbytes, crc = described["name"], described["bytes"], described.get("crc32")
        if not isinstance(name, str) or type(nbytes) is not int or nbytes < 0 or start + nbytes > end or name in parts:
            raise ValueError(f"part {name!r} of {nbytes} bytes does not fit")
        parts[name] = RecordPart(start, nbytes, crc)
        start += nbytes
    if start != end:
        raise ValueError(f"its parts leave {end - start} bytes over")
    return parts


def numbers(content: bytes, dtype: str) -> NDArray[Any]:
    """See a part's bytes as an array of its own, in this machine's byte order."""
    wanted, own = _byte_orders(dtype)
    if len(content) % wanted.itemsize:
        raise DamageError(f"{len(content)} bytes are no array of {dtype}; nothing of it is used")
    return np.frombuffer(content, wanted).astype(own)


@functools.cache
def _byte_orders(dtype: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return a dtype in the byte order of records, and in this machine's."""
    return np.dtype(dtype).newbyteorder("<"), np.dtype(dtype)


# ---------------------------------------------------------------- parts that are compressed

_WORTH_IT, _FRAME_HEAD_BYTES = 0.9, 18
_MOST_RAW_BYTES = 2**31
"""Of all parts of a record as they were before they were compressed; none of holdall's comes near."""


class CompressedParts:
    """The parts of a record to be written, each compressed if that pays and there is time for it."""

    def __init__(self, *, compresses: bool = True) -> None:
        self._compresses, self._raw_bytes = compresses, 0
        self.content: dict[str, Buffer] = {}
        self.coded: list[str] = []

    def put(self, name: str, array: NDArray[Any]) -> None:
        """Add an array, in little-endian order."""
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        raw = little.reshape(-1).view(np.uint8).data
        small = zstandard.ZstdCompressor(level=1).compress(raw) if self._compresses else raw
        if len(small) < _WORTH_IT * raw.nbytes:
            self.content[name] = small
            self.coded.append(name)
            self._raw_bytes += raw.nbytes
        else:
            self.content[name] = raw

    def packed(self, kind: str, head: Mapping[str, Any]) -> list[Buffer]:
        """Return the record; its head says which parts are compressed."""
        if self._raw_bytes > _MOST_RAW_BYTES:
            raise CheckpointError(f"{self._raw_bytes} bytes of {kind} are more than one record takes; use fewer lanes")
        return pack(kind, {**head, "coded": self.coded}, self.content, frozenset())


def array_of(record: Record, name: str, read: Read, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Read a part as an array whose shape and dtype are known."""
    nbytes, raw = prod(shape) * dtype.itemsize, record.part(name, read)
    if name in record.head["coded"]:
        raw = _inflated(raw, nbytes, record)
    if len(raw) != nbytes:
        raise DamageError(
            f"part {name!r} of the {record.kind} record at byte {record.start} has {len(raw)} bytes, not {nbytes}"
        )
    little = np.frombuffer(raw, dtype.newbyteorder("<")).reshape(shape)
    return little.astype(dtype, copy=False)


def _inflated(raw: bytes, nbytes: int, record: Record) -> bytes:
    try:
        # Looked at before anything is allocated: a few bytes may claim any size.
        if zstandard.frame_content_size(raw) != nbytes:
            raise DamageError(
                f"the {record.kind} record at byte {record.start} claims another size than it should have"
            )
        return zstandard.ZstdDecompressor().decompress(raw, max_output_size=nbytes)
    except zstandard.ZstdError as error:
        raise DamageError(f"the {record.kind} record at byte {record.start} cannot be decompressed") from error


def require_kind(record: Record, kind: str, read: Read) -> None:
    """Refuse a record of another kind, or one whose parts claim too much, before any of them is decompressed."""
    coded = record.head.get("coded", [])
    if record.kind != kind or not isinstance(coded, list):
        raise DamageError(f"a record of kind {record.kind!r} stands where one of kind {kind!r} should")
    starts = [part.start for name, part in record.parts.items() if name in coded]
    try:
        sizes = [zstandard.frame_content_size(read(start, _FRAME_HEAD_BYTES)) for start in starts]
    except zstandard.ZstdError as error:
        raise DamageError(f"the {kind} record at byte {record.start} cannot be decompressed") from error
    if sum(sizes) > _MOST_RAW_BYTES:
        raise DamageError(f"the {kind} record at byte {record.start} claims to hold {sum(sizes)} bytes")


# ---------------------------------------------------------------- blocks of slices

SLICES, DICTIONARY = "slices", "dictionary"
_MOST_DICTIONARY_BYTES = 16 * 2**20
_MOST_SETTING = 2**32 - 1


def pack_dictionary(dictionary: Dictionary) -> list[Buffer]:
    """Return a dictionary as a record."""
    return pack(DICTIONARY, {"name": dictionary.name}, {"content": dictionary.content}, frozenset())


def unpack_dictionary(record: Record, file: SegmentFile) -> Dictionary:
    """Read a dictionary back."""
    if record.parts.get("content") is not None and record.parts["content"].nbytes > _MOST_DICTIONARY_BYTES:
        raise DamageError(f"the dictionary at byte {record.start} of {file.path} is larger than any; it is not used")
    dictionary = Dictionary(record.part("content", file.read))
    if dictionary.name != record.head.get("name"):
        raise DamageError(f"the dictionary at byte {record.start} of {file.path} is not what its name says")
    return dictionary


def pack_slices(coded: Coded, checks: NDArray[np.uint32]) -> list[Buffer]:
    """Return a block as a record, its units last."""
    if isinstance(coded.data, Extent):
        raise TypeError("the block lies in a file already")
    head = {"count": coded.count} | codec_words(coded.codec)
    parts: dict[str, Buffer] = {
        "palette": coded.palette.data,
        "offsets": coded.offsets.astype("<u4").data,
        "checks": checks.astype("<u4").data,
    }
    if coded.places is not None:
        parts["places"] = coded.places.astype(coded.places.dtype.newbyteorder("<")).data
    parts["units"] = coded.data.data
    return pack(SLICES, head, parts, frozenset({"units"}))


def unpack_slices(
    record: Record, file: SegmentFile, dictionaries: Mapping[str, Dictionary], read: Read | None = None
) -> Coded:
    """Read all of a block but its units; `read` may know some of the file's bytes already."""
    read = read or file.read
    units, checks = _units_of(record, read)
    return _coded_of(record, read, dictionaries, Extent(file, units.start, units.nbytes, checks, record.start))


def unpack_coded(record: Record, read: Read, dictionaries: Mapping[str, Dictionary], coder: Coder) -> Coded:
    """Read a block with its units, and hold each of them against its checksum."""
    units, checks = _units_of(record, read)
    data = np.frombuffer(read(units.start, units.nbytes), np.uint8)
    coded = _coded_of(record, read, dictionaries, data)
    offsets = coded.offsets.astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != data.size or (np.diff(offsets) < 0).any() or len(checks) != len(offsets) - 1:
        raise DamageError(f"the units of the block at byte {record.start} lie outside of it; nothing of it is used")
    if not np.array_equal(coder.checksums(data, coded.offsets), checks):
        raise DamageError(f"a unit of the block at byte {record.start} is damaged; nothing of it is used")
    return coded


def _units_of(record: Record, read: Read) -> tuple[RecordPart, NDArray[np.uint32]]:
    units = record.parts.get("units")
    if record.kind != SLICES or units is None:
        raise DamageError(f"the {record.kind} record at byte {record.start} is no block of slices, or has no units")
    return units, numbers(record.part("checks", read), "u4")


def _coded_of(record: Record, read: Read, dictionaries: Mapping[str, Dictionary], data: Bytes | Extent) -> Coded:
    with malformed_refused(f"the block at byte {record.start}"):
        codec, count = codec_of(record.head, dictionaries), count_of(record.head["count"], _MOST_SETTING)
        places = _places_of(record, read, count)
    palette, offsets = (record.part(name, read) for name in ("palette", "offsets"))
    return Coded(codec, count, numbers(offsets, "u4"), np.frombuffer(palette, np.uint8), data, places)


def _places_of(record: Record, read: Read, count: int) -> SlicePlaces | None:
    if "places" not in record.parts:
        return None
    places: SlicePlaces = numbers(record.part("places", read), place_dtype(count).str[1:])
    require_permutation(places)
    return places


def codec_words(codec: Codec) -> dict[str, Any]:
    """Describe a codec; its dictionary by name."""
    return {
        "method": int(codec.method),
        "level": codec.level,
        "group": codec.group,
        "transform": {name: int(getattr(codec.transform, name)) for name in TRANSFORM_FIELDS},
        "dictionary": None if codec.dictionary is None else codec.dictionary.name,
    }


def codec_of(head: Mapping[str, Any], dictionaries: Mapping[str, Dictionary]) -> Codec:
    """Make a codec of its description; KeyError, TypeError or ValueError if that makes no sense."""
    transform, name = _transform_of(*(head["transform"][name] for name in TRANSFORM_FIELDS)), head["dictionary"]
    dictionary = None if name is None else dictionaries[name]
    method, level, group = (count_of(head[key], _MOST_SETTING) for key in ("method", "level", "group"))
    return Codec(Method(method), level, transform, dictionary, group)


@functools.lru_cache(maxsize=64, typed=True)
def _transform_of(*settings: Any) -> Transform:
    """Make a transform of its settings; the blocks of a field have the same one, thousands of them."""
    claimed = {name: count_of(value, _MOST_SETTING) for name, value in zip(TRANSFORM_FIELDS, settings, strict=True)}
    predictor, interleaved, green = (claimed.pop(name) for name in ("predictor", "interleaved", "green"))
    return Transform(**claimed, predictor=Predictor(predictor), interleaved=bool(interleaved), green=bool(green))


# ---------------------------------------------------------------- the disk tier

_FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file takes at least _FILE_BYTES, and this share of all that was written if that is more: so the number of open
files grows with the logarithm of what is spilled. It never takes more than this share of the room that the disk has
for the folder, because a full disk gets room only when a whole file is deleted."""
_WRITE_BYTES = 4 * 2**20


class SpillFolder:
    """Writes blocks to files below `spill_dir`, in a folder of its own; used by one worker at a time.

    Blocks are records (records.py), several in a file, so that a large memory does not run out of descriptors. A file
    is deleted with the last block that lies in it; the folder, when the memory is closed or forgotten. A process that
    was killed leaves its folder behind: the next memory that spills to the same place removes it.
    """

    def __init__(self, spill_dir: str | os.PathLike[str], coder: Coder) -> None:
        self._coder = coder
        self._place = Path(require_path("spill_dir", spill_dir))
        self._open: _OpenFile | None = None
        self._files = self._written = 0
        self._room_bytes = 0  # of the folder on its disk when the open file was made
        try:
            self._folder = OwnFolder(self._place)
        except OSError as error:
            raise ArgumentError(
                f"spill_dir ({self._place}) cannot be written to ({error.strerror}); name a directory that can"
            ) from error

    def write(self, sealed: SealedSlices) -> SealedSlices:
        """Write a block to a file and return it as it is read from there."""
        data = sealed.coded.data
        if isinstance(data, Extent):
            return sealed
        if self._folder.process != os.getpid():  # a forked child writes to its own, and reads what the parent wrote
            self._open = None
            self._folder.leave_to_parent()
        checks = self._coder.checksums(data, sealed.coded.offsets)
        try:
            file = self._file()
            start, end = file.write_block(sealed, checks)
        except OSError as error:
            self._finish_file()  # what it holds already stays readable
            raise SpillError(
                f"spill_dir ({self._place}): a block of {data.nbytes} bytes could not be written ({error.strerror}); "
                "free disk space, or see that the directory is there and can be written to"
            ) from error
        self._written += data.nbytes
        extent = Extent(file.file, end - data.nbytes, data.nbytes, checks, start)
        return self._coder.adopt(replace(sealed.coded, data=extent))

    def close(self) -> None:
        """Delete the folder; blocks that are being read stay readable until then where the system allows it."""
        self._finish_file()
        self._folder.remove()

    def _finish_file(self) -> None:
        if self._open is not None:
            self._open.file.is_growing = False
            self._open = None

    def _file(self) -> _OpenFile:
        """Return the file that blocks are written to, a new one if the last is full."""
        max_bytes = min(max(_FILE_BYTES, self._written // _FILES), self._room_bytes // _FILES)
        if self._open is None or self._open.end >= max_bytes:
            self._finish_file()
            folder = self._folder.path_in_use()
            self._open = _OpenFile(folder / f"{self._files:08d}.seg")
            self._files += 1
            self._room_bytes = _room_bytes(folder)
        return self._open


def _room_bytes(folder: Path) -> int:
    """Return the bytes that a folder could take on its disk: those of its files, and those that are free."""
    nbytes = shutil.disk_usage(folder).free
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # its last block was evicted meanwhile
            nbytes += path.stat().st_size
    return nbytes


class _OpenFile:
    """A segment file that is still written to."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(path, flags, 0o644)  # others cannot enter the folder; they may read a checkpoint of it
        self.file = SegmentFile(path, descriptor, is_temporary=True)
        self.file.is_growing = True
        self.end = 0
        self._settled = 0
        self._dictionaries: set[str] = set()
        if hasattr(os, "posix_fadvise"):  # batches are drawn from anywhere: what lies behind a slice is not needed
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def lacks(self, dictionary: Dictionary) -> bool:
        """Whether a dictionary has to be written first; it then counts as written."""
        is_new = dictionary.name not in self._dictionaries
        self._dictionaries.add(dictionary.name)
        return is_new

    def write_block(self, sealed: SealedSlices, checks: NDArray[np.uint32]) -> tuple[int, int]:
        """Write a block and the dictionary that it needs; return where its record begins and ends.

        If that fails, the file is cut to what it held before: a disk that is full needs the room.
        """
        complete = self.end
        dictionary = sealed.codec.dictionary
        try:
            if dictionary is not None and self.lacks(dictionary):
                self.append(pack_dictionary(dictionary))
            start = self.end
            end = self.append(pack_slices(sealed.coded, checks))
            self.settle()
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.file.descriptor, complete)
            raise
        return start, end

    def append(self, record: list[Buffer]) -> int:
        """Write a record behind the others and return where it ends."""
        position = self.end
        os.lseek(self.file.descriptor, position, os.SEEK_SET)
        for buffer in record:
            left = memoryview(buffer).cast("B")
            while left:
                written = os.write(self.file.descriptor, left[:_WRITE_BYTES])
                left, position = left[written:], position + written
        self.end = position
        return position

    def settle(self) -> None:
        """Bring what was written to the disk and out of the page cache, which a container pays for."""
        if not hasattr(os, "posix_fadvise"):
            return
        os.fdatasync(self.file.descriptor)
        os.posix_fadvise(self.file.descriptor, self._settled, self.end - self._settled, os.POSIX_FADV_DONTNEED)
        self._settled = self.end

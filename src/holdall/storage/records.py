"""Records: the one format in which data leaves memory, for the disk tier, for checkpoints and for the network.

A file is a sequence of records, each of which describes itself:

    preamble (32 bytes) | head (JSON) | parts, one after another

Invariant: nothing that was read is trusted. The preamble and the head have checksums, every size is held against the
file's before anything is allocated, and a part is handed out only if its own checksum fits.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.errors import CheckpointError, DamageError, NewerFormatError
from holdall.json_state import counted, decode_state, dtype_of, encode_state, malformed_refused
from holdall.schema import Array, Bytes, Leaf, dtype_name
from holdall.storage.blocks import Coded, Coder, Extent, SegmentFile
from holdall.storage.codec import TRANSFORM_FIELDS, Codec, Dictionary, Method, Predictor, Transform
from holdall.storage.layout import Window
from holdall.storage.slices import ClosedPart
from holdall.storage.snapshot import RowChunk

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
    parts: dict[str, RecordPart] = {}
    end = start + body_bytes
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
    wanted = np.dtype(dtype).newbyteorder("<")
    if len(content) % wanted.itemsize:
        raise DamageError(f"{len(content)} bytes are no array of {dtype}; nothing of it is used")
    return np.frombuffer(content, wanted).astype(np.dtype(dtype))


SLICES, DICTIONARY = "slices", "dictionary"
_MOST_DICTIONARY_BYTES = 16 * 2**20
_MOST_SETTING = 2**32 - 1
_LATER_METHODS = 16
"""Added to the method of a block with keys, places, or a dictionary for LZ4."""


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
    head = {"count": coded.count} | codec_words(coded.codec, is_placed=len(coded.places) > 0)
    parts: dict[str, Buffer] = {
        "palette": coded.palette.data,
        "offsets": coded.offsets.astype("<u4").data,
        "checks": checks.astype("<u4").data,
    }
    if len(coded.places):
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


def unpack_slices_whole(record: Record, read: Read, dictionaries: Mapping[str, Dictionary], coder: Coder) -> Coded:
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
        codec, count = codec_of(record.head, dictionaries), counted(record.head["count"], _MOST_SETTING)
    palette, offsets = (record.part(name, read) for name in ("palette", "offsets"))
    width = 2 if count <= 1 << 16 else 4
    places = record.part("places", read) if "places" in record.parts else b""
    palette_words = np.frombuffer(palette, np.uint8)
    return Coded(codec, count, numbers(offsets, "u4"), palette_words, data, numbers(places, f"u{width}"))


def codec_words(codec: Codec, *, is_placed: bool = False) -> dict[str, Any]:
    """Describe a codec; its dictionary by name.

    Args:
        is_placed: Whether the slices are in another order than their numbers. Readers that do not know of that, of keys
            or of dictionaries for LZ4 must refuse the record: they know no such method.
    """
    is_later = codec.key > 0 or is_placed or (codec.method is Method.LZ4 and codec.dictionary is not None)
    keys = {"key": codec.key, "raw_keys": int(codec.raw_keys)} if is_later else {}
    return keys | {
        "method": int(codec.method) + (_LATER_METHODS if is_later else 0),
        "level": codec.level,
        "group": codec.group,
        "transform": {name: int(getattr(codec.transform, name)) for name in TRANSFORM_FIELDS},
        "dictionary": None if codec.dictionary is None else codec.dictionary.name,
    }


def codec_of(head: Mapping[str, Any], dictionaries: Mapping[str, Dictionary]) -> Codec:
    """Make a codec of its description; KeyError, TypeError or ValueError if that makes no sense."""
    claimed = {name: counted(head["transform"][name], _MOST_SETTING) for name in TRANSFORM_FIELDS}
    predictor, interleaved, green = (claimed.pop(name) for name in ("predictor", "interleaved", "green"))
    transform = Transform(
        **claimed, predictor=Predictor(predictor), interleaved=bool(interleaved), green=bool(green)
    )  # fmt: skip
    name = head["dictionary"]
    dictionary = None if name is None else dictionaries[name]
    method, level, group = (counted(head[key], _MOST_SETTING) for key in ("method", "level", "group"))
    if method < _LATER_METHODS:
        return Codec(Method(method), level, transform, dictionary, group)
    key, raw_keys = (counted(head[name], _MOST_SETTING) for name in ("key", "raw_keys"))
    return Codec(Method(method - _LATER_METHODS), level, transform, dictionary, group, key, bool(raw_keys))


ROWS, LOGS, PIECE, STATE, FILE = "rows", "logs", "piece", "state", "file"
PIECE_BYTES = 4 * 2**20
_WORTH_IT, _FRAME_HEAD_BYTES = 0.9, 18
_MOST_BYTES = 2**31
"""Of all parts of a record as they were before they were compressed; none of holdall's comes near."""

Like = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class _Parts:
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
        if self._raw_bytes > _MOST_BYTES:
            raise CheckpointError(f"{self._raw_bytes} bytes of {kind} are more than one record takes; use fewer lanes")
        return pack(kind, {**head, "coded": self.coded}, self.content, frozenset())


def _array(record: Record, name: str, read: Read, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
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
    if sum(sizes) > _MOST_BYTES:
        raise DamageError(f"the {kind} record at byte {record.start} claims to hold {sum(sizes)} bytes")


def pack_rows(chunk: RowChunk, *, compresses: bool = True) -> list[Buffer]:
    """Return a chunk of rows as a record."""
    parts = _Parts(compresses=compresses)
    for name, column in chunk.columns.items():
        parts.put(name, column)
    for name, (ids, rows) in chunk.apart.items():
        parts.put(f"{name}/ids", ids)
        parts.put(f"{name}/apart", rows)
    columns = [[name, dtype_name(array.dtype), list(array.shape[1:])] for name, array in chunk.columns.items()]
    apart = {name: len(ids) for name, (ids, _) in chunk.apart.items()}
    head = {"first_tick": chunk.first_tick, "ticks": chunk.ticks, "columns": columns, "apart": apart}
    return parts.packed(ROWS, head)


def unpack_rows(record: Record, read: Read, first_tick: int, ticks: int, like: Like) -> RowChunk:
    """Read a chunk of rows whose ticks and columns are known."""
    require_kind(record, ROWS, read)
    head = record.head
    columns = [[name, dtype_name(dtype), list(shape)] for name, (shape, dtype) in like.items()]
    if (head["first_tick"], head["ticks"]) != (first_tick, ticks) or sorted(head["columns"]) != sorted(columns):
        raise DamageError(f"the rows at byte {record.start} are of other ticks or columns than the manifest says")
    found = {name: _array(record, name, read, dtype, (ticks, *shape)) for name, (shape, dtype) in like.items()}
    apart = {}
    for name, count in head["apart"].items():
        (lanes, *shape), dtype = like[name]
        counted(count, ticks * lanes)
        ids = _array(record, f"{name}/ids", read, np.dtype(np.int64), (count,))
        ascending = (np.diff(ids) > 0).all() and (count == 0 or first_tick * lanes <= ids[0])
        if not ascending or (count and ids[-1] >= (first_tick + ticks) * lanes):
            raise DamageError(f"the rows at byte {record.start} keep ids apart that are not in order")
        apart[name] = ids, _array(record, f"{name}/apart", read, dtype, (count, *shape))
    return RowChunk(first_tick, ticks, found, apart)


def pack_logs(parts: Sequence[ClosedPart], *, compresses: bool = True) -> list[Buffer]:
    """Return the logs of a segment as a record."""
    written = _Parts(compresses=compresses)
    fields = []
    for number, part in enumerate(parts):
        if part.log is not None:
            written.put(f"log.{number}", part.log)
        log = None if part.log is None else dtype_name(part.log.dtype)
        counts = {"log_rows": part.log_rows, "slices": part.slice_count, "steps": part.steps}
        fields.append({"window": part.window.words(), "log": log, **counts, "new_slices": part.new_slices})
    return written.packed(LOGS, {"fields": fields})


def unpack_logs(
    record: Record, read: Read, lanes: int, leaves: Sequence[Leaf], blocks: Sequence[Any]
) -> list[ClosedPart]:
    """Read the logs of a segment, field by field; `blocks` are the blocks that they name."""
    require_kind(record, LOGS, read)
    fields = record.head["fields"]
    if len(fields) != len(leaves) or len(blocks) != len(leaves):
        raise DamageError(f"the logs at byte {record.start} are of {len(fields)} fields, not {len(leaves)}")
    parts = []
    for number, (words, leaf, block) in enumerate(zip(fields, leaves, blocks, strict=True)):
        window = Window.of_words(words["window"], leaf)
        rows, count, steps, new = (counted(words[key]) for key in ("log_rows", "slices", "steps", "new_slices"))
        if block.slice_bytes != window.slice_bytes or count > block.used:
            raise DamageError(f"the logs at byte {record.start} name another block than their own")
        log: Any = None
        if words["log"] is not None:
            dtype = dtype_of(words["log"])
            if dtype not in (np.uint16, np.uint32):
                raise DamageError(f"the logs at byte {record.start} are numbers of {dtype}")
            log = _array(record, f"log.{number}", read, dtype, (rows, lanes))
        elif rows * lanes != count or block.sealed is not None:
            raise DamageError(f"the logs at byte {record.start} count {rows} rows and {count} slices")
        parts.append(ClosedPart(window, log, rows, block, count, steps, new))
    return parts


def pack_piece(slices: NDArray[np.uint8], slice_bytes: int, first: int) -> list[Buffer]:
    """Return some slices of a block that is still being filled as a record."""
    parts = _Parts()
    parts.put("slices", slices)
    return parts.packed(PIECE, {"slice_bytes": slice_bytes, "first": first, "count": slices.size // slice_bytes})


def unpack_piece(record: Record, read: Read, slice_bytes: int, first: int, most: int) -> NDArray[np.uint8]:
    """Read some slices of a block, from number `first` on."""
    require_kind(record, PIECE, read)
    count = counted(record.head["count"])
    most = min(most, max(1, PIECE_BYTES // slice_bytes))
    if (record.head["slice_bytes"], record.head["first"]) != (slice_bytes, first) or count > most:
        raise DamageError(f"the slices at byte {record.start} are others than the manifest says")
    found: NDArray[np.uint8] = _array(record, "slices", read, np.dtype(np.uint8), (count * slice_bytes,))
    return found


def pack_state(state: Mapping[str, Any]) -> list[Buffer]:
    """Return a tree of numbers, text and arrays as a record."""
    arrays: list[NDArray[Any]] = []
    words = encode_state(state, arrays, "the memory's state")
    parts = _Parts()
    for number, array in enumerate(arrays):
        parts.put(str(number), array)
    parts.content["tree"] = unparsed(words)
    return parts.packed(STATE, {"sizes": [array.nbytes for array in arrays]})


def unpack_state(record: Record, read: Read) -> dict[str, Any]:
    """Read a tree back."""
    require_kind(record, STATE, read)
    sizes = [counted(nbytes) for nbytes in record.head["sizes"]]
    arrays = {i: _array(record, str(i), read, np.dtype(np.uint8), (nbytes,)) for i, nbytes in enumerate(sizes)}
    tree = decode_state(parsed(record.part("tree", read)), arrays)
    if not isinstance(tree, dict):
        raise DamageError(f"the state at byte {record.start} is no tree")
    return tree


def pack_file(content: bytes) -> list[Buffer]:
    """Return a piece of a trainer's own file as a record."""
    return pack(FILE, {}, {"content": content}, frozenset())


def unpack_file(record: Record, read: Read) -> bytes:
    """Read a piece of a trainer's own file."""
    require_kind(record, FILE, read)
    return record.part("content", read)


def records_in(payload: bytes) -> Iterator[Record]:
    """Read the heads of records that stand one after another."""
    start = 0
    while start < len(payload):
        record = unpack(lambda first, nbytes: payload[first : first + nbytes], start, len(payload))
        yield record
        start += record.nbytes

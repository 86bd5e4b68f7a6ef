"""The byte format of segments, blocks and dictionaries, and segments as arrays for pickles.

Everything is stored as records (see records.py) of three kinds:

    dictionary   content, palette                                     referred to by name, a hash of its content
    block        codec, offsets, checksums, palette, places, units    the compressed slices of one field
    segment      ticks, lanes, and the arrays of its parts            refers to blocks by number

A checkpoint stores the three kinds apart, and its manifest says where they are. Over the network, `pack_segment` sends
the dictionaries and blocks that a segment needs, and then the segment. Uncompressed blocks are compressed first.

Guarantee: reading returns bit for bit what was written, or raises DamageError. Every number is checked before
it is used, here or in the constructors of the native objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from holdall._native import FLAG_INVALID, Block, Coded, Dictionary, PackedRun, Part, Segment, checksums, encode
from holdall.checks import read_count, refuse_malformed
from holdall.codec.codec import Codec, Method
from holdall.errors import DamageError
from holdall.store.columns import Columns
from holdall.store.layouts import Layout, RowLayout, SlicedLayout
from holdall.store.records import (
    MAX_RECORD_BYTES,
    Buffer,
    Read,
    Record,
    pack_record,
    reader_of,
    split_records,
)

DICTIONARY = "dictionary"
BLOCK = "block"
SEGMENT = "segment"

NEXT_FOLLOWS = np.uint32(1 << 31)
"""Bit of a cursor: the next observation follows the observation in the log, instead of overlapping it. See engine.h."""

ROW_KINDS = frozenset({"rows", "halves", "bits"})
"""Kinds of the parts of actions, rewards, extras and flags."""

_BITS_BYTES = 32
"""Bytes of 8 float32 values, which a part of kind "bits" stores in one byte."""
_MAX_DICTIONARY_BYTES = 16 * 2**20
_MAX_NUMBER = 2**32 - 1
_DEFAULT_LEVEL = 3
_DEFAULT_UNIT_BYTES = 32_768
_MAX_DEFAULT_GROUP = 16

EncodeBlock = Callable[[int, Block], Coded]
"""Compresses an uncompressed block of the column with the given number."""


# ---------------------------------------------------------------- compression of uncompressed blocks


def encode_block(_column: int, block: Block) -> Coded:
    """Compress a block with Zstandard. For callers that know no codec of the field. Releases the GIL."""
    group = min(max(1, _DEFAULT_UNIT_BYTES // block.slice_bytes), _MAX_DEFAULT_GROUP)
    codec = Codec(block.slice_bytes, method=Method.ZSTANDARD, level=_DEFAULT_LEVEL, group=group)
    coded = encode(block, codec)
    if coded is None:
        raise AssertionError("A codec without a palette represents all slices.")
    return coded


def code_form(column: int, block: Block, encode_raw: EncodeBlock = encode_block) -> Coded:
    """Return the slices of a block compressed and in memory, whatever form the block has.

    `encode_raw` compresses the block if it is not compressed yet.
    """
    form = block.form
    if not isinstance(form, Coded):
        try:
            return encode_raw(column, block)
        except ValueError:
            # If the compactor compressed the block meanwhile, its new form is the result.
            form = block.form
            if not isinstance(form, Coded):
                raise
    return _load_form(form)


@runtime_checkable
class FetchedFile(Protocol):
    """A file whose ranges must be fetched before they can be read, such as a file in an object store."""

    def fetch(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Fetch ranges of the file."""


def _load_form(form: Coded) -> Coded:
    """Return the same slices with their data in memory. Raise DamageError if the file cannot be read."""
    location = form.location
    if location is not None and isinstance(form.file, FetchedFile):
        _, start, nbytes = location
        form.file.fetch(np.array([start], np.int64), np.array([start + nbytes], np.int64))
    try:
        return form.in_memory()
    except ValueError as error:
        raise DamageError(f"A block of the memory cannot be read from its file: {error}") from error


# ---------------------------------------------------------------- dictionaries


def name_dictionary(dictionary: Dictionary) -> str:
    """Return the name of a dictionary, which is a hash of its content."""
    digest = hashlib.sha256(dictionary.palette)
    digest.update(dictionary.content)
    return digest.hexdigest()[:32]


def pack_dictionary(dictionary: Dictionary) -> list[Buffer]:
    """Return a dictionary as a record."""
    arrays = {"content": dictionary.content, "palette": dictionary.palette}
    return pack_record(DICTIONARY, {"name": name_dictionary(dictionary)}, arrays, is_compressed=False)


def read_dictionary(record: Record, read: Read) -> tuple[str, Dictionary]:
    """Return the name and the dictionary of a record."""
    record.require_kind(DICTIONARY)
    content = record.read_bytes("content", read, _MAX_DICTIONARY_BYTES)
    palette = record.read_bytes("palette", read, _MAX_DICTIONARY_BYTES)
    with refuse_malformed(f"The dictionary {record.place}"):
        dictionary = Dictionary(content, palette)
        name = name_dictionary(dictionary)
        if name != record.head["name"]:
            raise DamageError(f"The dictionary {record.place} has another content than its name says.")
        return name, dictionary


# ---------------------------------------------------------------- blocks


class FilePlace(NamedTuple):
    """An open file that blocks are read from on demand."""

    descriptor: int
    owner: object  # Kept alive by the blocks, so that the descriptor stays open.


def pack_block(coded: Coded) -> list[Buffer]:
    """Return compressed slices, which must be in memory, as a record. The last buffer has the units."""
    if coded.data is None:
        raise ValueError("The slices are in a file. Call in_memory() first.")
    codec = coded.codec
    head = {
        "slices": coded.slice_count,
        "codec": _describe_codec(codec),
        "dictionary": None if codec.dictionary is None else name_dictionary(codec.dictionary),
    }
    arrays: dict[str, Buffer | NDArray[Any]] = {
        "palette": coded.palette,
        "offsets": coded.offsets,
        "checks": checksums(coded),
    }
    if coded.places is not None:
        arrays["places"] = coded.places
    arrays["units"] = coded.data
    return pack_record(BLOCK, head, arrays, is_compressed=False, unchecked=frozenset({"units"}))


def read_block(
    record: Record, read: Read, dictionaries: Mapping[str, Dictionary], file: FilePlace | None = None
) -> Block:
    """Return the block of a record.

    Args:
        file: File of the record. The units stay there, and each one is checked when it is read. None: all units are
            read and checked now.
    """
    record.require_kind(BLOCK)
    units = record.find("units")
    with refuse_malformed(f"The block {record.place}"):
        count = read_count(record.head["slices"], _MAX_NUMBER)
        codec = _read_codec(record.head, dictionaries)
        unit_count = -(-count // codec.group)
        offsets = record.read_array("offsets", read, "<u4", unit_count + 1)
        checks = record.read_array("checks", read, "<u4", unit_count)
        palette = record.read_items("palette", read, "u1", MAX_RECORD_BYTES)
        places = None
        if "places" in record.arrays:
            places = record.read_array("places", read, "<u2" if count <= 2**16 else "<u4", count)
        data: Any = None if file is None else (file.descriptor, units.start, units.nbytes)
        if file is None:
            data = record.read_bytes("units", read, MAX_RECORD_BYTES)
        owner = None if file is None else file.owner
        coded = Coded(codec, count, offsets, palette, data, places, checks, owner)
        if file is None and not np.array_equal(checksums(coded), checks):
            raise DamageError(f"The block {record.place} is damaged: the checksum of a unit does not match.")
        return Block(codec.slice_bytes, count, coded)


def find_damaged_slices(record: Record, read: Read, coded: Coded) -> NDArray[np.bool_]:
    """Read all units of a block and return, by slice number, whether the slice's bytes are damaged."""
    data = record.read_bytes("units", read, MAX_RECORD_BYTES)
    whole = Coded(coded.codec, coded.slice_count, coded.offsets, coded.palette, data, coded.places)
    is_damaged = checksums(whole) != coded.checks
    places = np.arange(coded.slice_count) if coded.places is None else coded.places.astype(np.int64)
    damaged: NDArray[np.bool_] = is_damaged[places // coded.codec.group]
    return damaged


def _describe_codec(codec: Codec) -> dict[str, int]:
    return {field.name: int(getattr(codec, field.name)) for field in fields(Codec) if field.name != "dictionary"}


def _read_codec(head: Mapping[str, Any], dictionaries: Mapping[str, Dictionary]) -> Codec:
    """Return the codec of a block's head. Raise KeyError, TypeError, ValueError or DamageError if it makes no sense."""
    numbers = head["codec"]
    values: dict[str, Any] = {}
    for field in fields(Codec):
        if field.name == "dictionary":
            continue
        kind = int if field.default is MISSING else type(field.default)
        values[field.name] = kind(read_count(numbers[field.name], _MAX_NUMBER))
    if len(numbers) != len(values) or values["group"] < 1:
        raise ValueError(f"{numbers!r} is not a codec")
    name = head["dictionary"]
    if name is not None and name not in dictionaries:
        raise DamageError(f"The dictionary {name!r} of a block is missing.")
    return Codec(**values, dictionary=None if name is None else dictionaries[name])


# ---------------------------------------------------------------- segments without their blocks


def list_blocks(segment: Segment) -> list[Block]:
    """Return the blocks of a segment, each once, in the order of columns. Segment records number them in this order."""
    blocks: dict[int, Block] = {}
    for part in segment.parts:
        if part.block is not None:
            blocks[part.block.serial] = part.block
    return list(blocks.values())


def pack_parts(segment: Segment, columns: Collection[int] | None = None) -> list[Buffer]:
    """Return a segment without its blocks as a record. If `columns` is given, write only the parts of these columns."""
    numbers = {block.serial: number for number, block in enumerate(list_blocks(segment))}
    runs: dict[int, tuple[int, PackedRun]] = {}  # By id: number of the run, and the run to keep the id valid.
    entries = []
    arrays: dict[str, Buffer | NDArray[Any]] = {}
    for column, part in enumerate(segment.parts):
        if columns is not None and column not in columns:
            continue
        entry: dict[str, Any] = {"column": column, "kind": part.kind}
        contents = part.arrays()
        if part.packed is not None:
            run, leaf = part.packed
            number, _ = runs.setdefault(id(run), (len(runs), run))
            entry["run"] = number
            entry["leaf"] = leaf
            arrays.setdefault(f"run.{number}", contents.pop("run"))
            del contents["leaf"]
        if part.block is not None:
            entry["block"] = numbers[part.block.serial]
            entry["layout"] = part.layout
            entry["log_bytes"] = contents["log"].itemsize
        arrays |= {f"{column}.{name}": array for name, array in contents.items()}
        entries.append(entry)
    head = {
        "first_tick": segment.first_tick,
        "ticks": segment.ticks,
        "lanes": segment.lanes,
        "blocks": len(numbers),
        "parts": entries,
    }
    return pack_record(SEGMENT, head, arrays)


class StoredParts(NamedTuple):
    """The parts that a segment record has, by column."""

    first_tick: int
    ticks: int
    lanes: int
    parts: dict[int, Part]


def read_parts(
    record: Record,
    read: Read,
    columns: Columns,
    blocks: Sequence[Block],
    reward_dtype: np.dtype[Any] | None,
) -> StoredParts:
    """Return the parts of a segment record.

    Args:
        blocks: The blocks of the segment, in the order of `list_blocks`.
        reward_dtype: Dtype of the rewards. None: any that fits.
    """
    record.require_kind(SEGMENT)
    head = record.head
    with refuse_malformed(f"The segment {record.place}"):
        ticks = read_count(head["ticks"], _MAX_NUMBER)
        lanes = read_count(head["lanes"], _MAX_NUMBER)
        if read_count(head["blocks"]) != len(blocks):
            raise ValueError(f"it needs {head['blocks']} blocks instead of {len(blocks)}")
        reader = _PartsReader(record, read, columns, blocks, ticks, lanes, reward_dtype)
        parts: dict[int, Part] = {}
        for entry in head["parts"]:
            column = read_count(entry["column"], columns.flags)
            if column in parts:
                raise ValueError(f"column {column} occurs twice")
            parts[column] = reader.read_part(column, entry)
        return StoredParts(read_count(head["first_tick"]), ticks, lanes, parts)


class _PartsReader:
    """Reads the parts of one segment record."""

    def __init__(
        self,
        record: Record,
        read: Read,
        columns: Columns,
        blocks: Sequence[Block],
        ticks: int,
        lanes: int,
        reward_dtype: np.dtype[Any] | None,
    ) -> None:
        self._record = record
        self._read = read
        self._columns = columns
        self._blocks = blocks
        self._ticks = ticks
        self._lanes = lanes
        self._transitions = ticks * lanes
        self._reward_dtype = reward_dtype
        self._runs: dict[int, PackedRun] = {}

    def read_part(self, column: int, entry: Mapping[str, Any]) -> Part:
        """Return the part that `entry` describes. Raise DamageError or ValueError if it does not fit the record."""
        kind = entry["kind"]
        if (kind in ROW_KINDS) != (column >= self._columns.observations):
            raise ValueError(f"column {column} cannot be stored as {kind!r}")
        row_bytes = self._find_row_bytes(column)
        layout: Layout | None = RowLayout(kind) if kind in ("shared", "paired") else None
        block = None
        if kind == "sliced":
            sliced = _read_layout(entry["layout"])
            layout = sliced
            block = self._blocks[read_count(entry["block"], len(self._blocks) - 1)]
            arrays = self._read_log(column, entry["log_bytes"], sliced.slice_count)
        elif kind == "packed":
            arrays = {"run": self._read_run(read_count(entry["run"])), "leaf": np.array([entry["leaf"]], np.uint32)}
        else:
            arrays = {"rows": self._read_rows(column, kind, row_bytes)}
        if kind in ("shared", "packed") and f"{column}.exception_rows" in self._record.arrays:
            arrays |= self._read_exceptions(column, row_bytes)
        return Part.restore(kind, self._ticks, self._lanes, row_bytes, arrays, layout, block)

    def _find_row_bytes(self, column: int) -> int:
        row_bytes = self._columns.count_row_bytes(column, self._reward_dtype)
        if row_bytes is not None:
            return row_bytes
        # The dtype of rewards is not known, so the bytes of a row follow from the length of the array.
        array = self._record.find(f"{column}.rows")
        nbytes = array.nbytes if array.raw_bytes is None else array.raw_bytes
        return nbytes // max(1, self._transitions)

    def _read_rows(self, column: int, kind: str, row_bytes: int) -> NDArray[Any]:
        count = self._transitions
        if kind == "shared":
            count = (self._ticks + 1) * self._lanes
        elif kind == "paired":
            count = 2 * self._transitions
        elif kind == "halves":
            row_bytes //= 2
        elif kind == "bits":
            row_bytes = -(-row_bytes // _BITS_BYTES)
        return self._record.read_array(f"{column}.rows", self._read, "u1", count * row_bytes)

    def _read_exceptions(self, column: int, row_bytes: int) -> dict[str, Any]:
        rows = self._record.read_items(f"{column}.exception_rows", self._read, "<u4", self._transitions)
        contents = self._record.read_array(f"{column}.exceptions", self._read, "u1", len(rows) * row_bytes)
        return {"exception_rows": rows, "exceptions": contents}

    def _read_log(self, column: int, log_bytes: int, window: int) -> dict[str, Any]:
        cursors = self._record.read_array(f"{column}.cursors", self._read, "<u4", self._transitions)
        # Every transition adds at most an observation and a next observation to the log of its lane.
        max_entries = 2 * window * (self._ticks + 1) * self._lanes
        dtype = {2: "<u2", 4: "<u4"}[log_bytes]
        log = self._record.read_items(f"{column}.log", self._read, dtype, max_entries)
        return {"cursors": cursors, "log": log}

    def _read_run(self, number: int) -> PackedRun:
        if number not in self._runs:
            content = self._record.read_bytes(f"run.{number}", self._read, MAX_RECORD_BYTES)
            self._runs[number] = PackedRun.from_bytes(content)
        return self._runs[number]


def _read_layout(values: Any) -> SlicedLayout:
    """Return the layout of a sliced part. Raise ValueError if `values` is not one."""
    kind, *numbers = values
    if kind != "sliced":
        raise ValueError(f"{values!r} is not the layout of a sliced part")
    count, outer, run_bytes, shift = [read_count(number, _MAX_NUMBER) for number in numbers]
    return SlicedLayout(kind, count, outer, run_bytes, shift)


# ---------------------------------------------------------------- whole segments


def pack_segment(segment: Segment, *, encode_raw: EncodeBlock = encode_block) -> bytes:
    """Return a closed segment with everything that it refers to.

    `encode_raw` compresses blocks that are not compressed yet.
    """
    buffers: list[Buffer] = []
    written: set[str] = set()  # Names of dictionaries.
    columns = {part.block.serial: column for column, part in enumerate(segment.parts) if part.block is not None}
    for block in list_blocks(segment):
        coded = code_form(columns[block.serial], block, encode_raw)
        dictionary = coded.codec.dictionary
        if dictionary is not None and name_dictionary(dictionary) not in written:
            written.add(name_dictionary(dictionary))
            buffers += pack_dictionary(dictionary)
        buffers += pack_block(coded)
    buffers += pack_parts(segment)
    return b"".join(buffers)


def unpack_segment(
    data: bytes | memoryview,
    columns: Columns,
    *,
    reward_dtype: np.dtype[Any] | None = None,
) -> Segment:
    """Return the segment that `pack_segment` packed. Raise DamageError if `data` is damaged or of another kind.

    `reward_dtype` is the dtype that rewards must have. None: any that fits.
    """
    read = reader_of(data)
    dictionaries: dict[str, Dictionary] = {}
    blocks: list[Block] = []
    records = split_records(data)
    if not records or records[-1].kind != SEGMENT:
        raise DamageError("The data does not end with a segment.")
    for record in records[:-1]:
        if record.kind == DICTIONARY:
            name, dictionary = read_dictionary(record, read)
            dictionaries[name] = dictionary
        else:
            blocks.append(read_block(record, read, dictionaries))
    return build_segment(read_parts(records[-1], read, columns, blocks, reward_dtype), columns)


def build_segment(stored: StoredParts, columns: Columns) -> Segment:
    """Return the segment of `stored`, which must have all columns."""
    with refuse_malformed(f"The segment of tick {stored.first_tick}"):
        parts = [stored.parts[column] for column in range(columns.flags + 1)]
        return Segment(stored.first_tick, stored.ticks, stored.lanes, parts)


def mark_invalid(segment: Segment, is_lost: NDArray[np.bool_]) -> Segment:
    """Return a copy of a segment with some transitions marked as invalid.

    `is_lost` has one bool per transition: all lanes of the first tick, then those of the next one.
    """
    flags = segment.parts[-1]
    arrays = flags.arrays()
    arrays["rows"][is_lost] |= FLAG_INVALID
    marked = Part.restore("rows", segment.ticks, segment.lanes, 1, arrays, None, None)
    return Segment(segment.first_tick, segment.ticks, segment.lanes, [*segment.parts[:-1], marked])


# ---------------------------------------------------------------- segments as arrays, for pickles


def segments_to_arrays(segments: Sequence[Segment]) -> dict[str, Any]:
    """Return segments as arrays and plain values. `segments_from_arrays` restores them.

    Pickle protocol 5 can store the arrays outside the pickle without another copy. Blocks and packed runs that several
    parts share are included once.
    """
    blocks: dict[int, int] = {}  # By serial: number of the block.
    packed_blocks: list[tuple[int, int, Any]] = []
    packed_segments = []
    for segment in segments:
        for block in list_blocks(segment):
            if block.serial not in blocks:
                blocks[block.serial] = len(packed_blocks)
                packed_blocks.append(_block_to_arrays(block))
        runs: list[PackedRun] = []
        parts = [_part_to_arrays(part, blocks, runs) for part in segment.parts]
        contents = [np.frombuffer(run.to_bytes(), np.uint8) for run in runs]
        packed_segments.append((segment.first_tick, segment.ticks, segment.lanes, parts, contents))
    return {"blocks": packed_blocks, "segments": packed_segments}


def segments_from_arrays(packed: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Return the segments that `segments_to_arrays` packed."""
    # Nothing else uses the arrays of a pickle, so each block takes over the memory of its array.
    blocks = [Block(slice_bytes, count, form, True) for slice_bytes, count, form in packed["blocks"]]
    segments = []
    for first_tick, ticks, lanes, packed_parts, contents in packed["segments"]:
        runs = [PackedRun.from_bytes(content) for content in contents]
        parts = []
        for kind, row_bytes, arrays, layout, block, run in packed_parts:
            given = arrays if run is None else {**arrays, "run": runs[run]}
            part_block = None if block is None else blocks[block]
            parts.append(Part.restore(kind, ticks, lanes, row_bytes, given, layout, part_block))
        segments.append(Segment(first_tick, ticks, lanes, parts))
    return tuple(segments)


def _block_to_arrays(block: Block) -> tuple[int, int, Any]:
    """Return slice bytes, slice count, and the slices as an array or as a Coded object, which can be pickled."""
    count = block.slice_count  # Read once, because an open block grows.
    form = block.form
    if not isinstance(form, Coded):
        try:
            return block.slice_bytes, count, block.share()[:count].reshape(-1)
        except ValueError:  # The compactor compressed the block meanwhile.
            form = block.form
    assert isinstance(form, Coded)  # `share` fails only for compressed blocks.
    return block.slice_bytes, count, _load_form(form)


def _part_to_arrays(part: Part, blocks: Mapping[int, int], runs: list[PackedRun]) -> tuple[Any, ...]:
    """Return kind, row bytes, arrays, layout, number of the block, and number of the run. New runs are appended."""
    arrays = part.arrays()
    run_number = None
    if part.packed is not None:
        run, _ = part.packed
        run_number = next((number for number, each in enumerate(runs) if each is run), None)
        if run_number is None:
            run_number = len(runs)
            runs.append(run)
        del arrays["run"]
    block_number = None if part.block is None else blocks[part.block.serial]
    return part.kind, part.row_bytes, arrays, part.layout, block_number, run_number

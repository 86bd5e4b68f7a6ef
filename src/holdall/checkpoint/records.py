"""What a checkpoint consists of, as records: rows, logs, slices of a block still being filled, state, files.

In:  pieces of a snapshot.  Out: buffers to write; and back, held against what the schema says.
Invariant: nothing is allocated that the schema and the manifest do not account for, and nothing that is read runs.
The slices of blocks that are full are records of the disk tier, see experience/disk/slice_record.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.checkpoint import plain
from holdall.errors import DamageError
from holdall.experience.disk.record import Buffer, Read, Record, pack
from holdall.experience.part import ClosedPart
from holdall.experience.snapshot import RowChunk
from holdall.experience.window import Window
from holdall.schema import Array, Leaf

ROWS, LOGS, PIECE, STATE, FILE = "rows", "logs", "piece", "state", "file"
PIECE_BYTES = 4 * 2**20
_WORTH_IT = 0.9
_MOST_BYTES = 2**31
"""Of one part as it was before it was compressed; none of holdall's comes near."""

Like = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class _Parts:
    """The parts of a record to be written, each compressed if that pays."""

    def __init__(self) -> None:
        self.content: dict[str, Buffer] = {}
        self.coded: list[str] = []

    def put(self, name: str, array: NDArray[Any]) -> None:
        """Add an array, in little-endian order."""
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        raw = little.reshape(-1).view(np.uint8).data
        small = zstandard.ZstdCompressor(level=1).compress(raw) if raw.nbytes else b""
        if len(small) < _WORTH_IT * raw.nbytes:
            self.content[name] = small
            self.coded.append(name)
        else:
            self.content[name] = raw

    def packed(self, kind: str, head: Mapping[str, Any]) -> list[Buffer]:
        return pack(kind, {**head, "coded": self.coded}, self.content, frozenset())


def _array(record: Record, name: str, read: Read, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Read a part as an array whose shape and dtype are known."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes > _MOST_BYTES:
        raise DamageError(f"the {record.kind} record at byte {record.start} claims {nbytes} bytes in one part")
    raw = record.part(name, read)
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


def _require_kind(record: Record, kind: str) -> None:
    if record.kind != kind or not isinstance(record.head.get("coded", []), list):
        raise DamageError(f"a record of kind {record.kind!r} stands where one of kind {kind!r} should")


def pack_rows(chunk: RowChunk) -> list[Buffer]:
    """Return a chunk of rows as a record."""
    parts = _Parts()
    for name, column in chunk.columns.items():
        parts.put(name, column)
    for name, (ids, rows) in chunk.apart.items():
        parts.put(f"{name}/ids", ids)
        parts.put(f"{name}/apart", rows)
    columns = [[name, plain.dtype_name(array.dtype), list(array.shape[1:])] for name, array in chunk.columns.items()]
    apart = {name: len(ids) for name, (ids, _) in chunk.apart.items()}
    head = {"first_tick": chunk.first_tick, "ticks": chunk.ticks, "columns": columns, "apart": apart}
    return parts.packed(ROWS, head)


def unpack_rows(record: Record, read: Read, first_tick: int, ticks: int, like: Like) -> RowChunk:
    """Read a chunk of rows whose ticks and columns are known."""
    _require_kind(record, ROWS)
    head = record.head
    columns = [[name, plain.dtype_name(dtype), list(shape)] for name, (shape, dtype) in like.items()]
    if (head["first_tick"], head["ticks"]) != (first_tick, ticks) or sorted(head["columns"]) != sorted(columns):
        raise DamageError(f"the rows at byte {record.start} are of other ticks or columns than the manifest says")
    found = {name: _array(record, name, read, dtype, (ticks, *shape)) for name, (shape, dtype) in like.items()}
    apart = {}
    for name, count in head["apart"].items():
        (lanes, *shape), dtype = like[name]
        if type(count) is not int or not 0 <= count <= ticks * lanes:
            raise DamageError(f"the rows at byte {record.start} keep {count!r} apart, of {ticks * lanes}")
        ids = _array(record, f"{name}/ids", read, np.dtype(np.int64), (count,))
        ascending = (np.diff(ids) > 0).all() and (count == 0 or first_tick * lanes <= ids[0])
        if not ascending or (count and ids[-1] >= (first_tick + ticks) * lanes):
            raise DamageError(f"the rows at byte {record.start} keep ids apart that are not in order")
        apart[name] = ids, _array(record, f"{name}/apart", read, dtype, (count, *shape))
    return RowChunk(first_tick, ticks, found, apart)


def pack_logs(parts: Sequence[ClosedPart]) -> list[Buffer]:
    """Return the logs of a segment as a record."""
    written = _Parts()
    fields = []
    for number, part in enumerate(parts):
        if part.log is not None:
            written.put(f"log.{number}", part.log)
        fields.append(
            {
                "window": window_words(part.window),
                "log": None if part.log is None else plain.dtype_name(part.log.dtype),
                "log_rows": part.log_rows,
                "slices": part.slice_count,
                "steps": part.steps,
                "new_slices": part.new_slices,
            }
        )
    return written.packed(LOGS, {"fields": fields})


def unpack_logs(
    record: Record, read: Read, lanes: int, leaves: Sequence[Leaf], blocks: Sequence[Any]
) -> list[ClosedPart]:
    """Read the logs of a segment, field by field; `blocks` are the blocks that they name."""
    _require_kind(record, LOGS)
    fields = record.head["fields"]
    if len(fields) != len(leaves) or len(blocks) != len(leaves):
        raise DamageError(f"the logs at byte {record.start} are of {len(fields)} fields, not {len(leaves)}")
    parts = []
    for number, (words, leaf, block) in enumerate(zip(fields, leaves, blocks, strict=True)):
        window = window_of(words["window"], leaf)
        rows, count, steps, new = (_count(words[key]) for key in ("log_rows", "slices", "steps", "new_slices"))
        if block.slice_bytes != window.slice_bytes or count > block.used:
            raise DamageError(f"the logs at byte {record.start} name another block than their own")
        log: Any = None
        if words["log"] is not None:
            dtype = plain.dtype_of(words["log"])
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
    _require_kind(record, PIECE)
    count = _count(record.head["count"])
    if (record.head["slice_bytes"], record.head["first"]) != (slice_bytes, first) or count > most:
        raise DamageError(f"the slices at byte {record.start} are others than the manifest says")
    found: NDArray[np.uint8] = _array(record, "slices", read, np.dtype(np.uint8), (count * slice_bytes,))
    return found


def pack_state(state: Mapping[str, Any]) -> list[Buffer]:
    """Return a tree of numbers, text and arrays as a record."""
    arrays: list[NDArray[Any]] = []
    words = plain.encode(state, arrays, "the memory's state")
    parts = _Parts()
    for number, array in enumerate(arrays):
        parts.put(str(number), array)
    text = json.dumps(words, sort_keys=True, allow_nan=False).encode()
    parts.content["tree"] = text
    return parts.packed(STATE, {"sizes": [array.nbytes for array in arrays]})


def unpack_state(record: Record, read: Read) -> dict[str, Any]:
    """Read a tree back."""
    _require_kind(record, STATE)
    arrays = {
        number: _array(record, str(number), read, np.dtype(np.uint8), (_count(nbytes),)).tobytes()
        for number, nbytes in enumerate(record.head["sizes"])
    }
    tree = plain.decode(json.loads(record.part("tree", read)), arrays)
    if not isinstance(tree, dict):
        raise DamageError(f"the state at byte {record.start} is no tree")
    return tree


def pack_file(content: bytes) -> list[Buffer]:
    """Return a piece of a trainer's own file as a record."""
    return pack(FILE, {}, {"content": content}, frozenset())


def unpack_file(record: Record, read: Read) -> bytes:
    """Read a piece of a trainer's own file."""
    _require_kind(record, FILE)
    return record.part("content", read)


def window_words(window: Window) -> list[int] | None:
    """Say along which axis a window slides and by how many elements; None if it does not."""
    return None if window.count == 1 else [window.axis, window.shift * window.unit]


def window_of(words: Any, leaf: Leaf) -> Window:
    """Cut a leaf as `window_words` says; whatever it says, the window fits the leaf."""
    if words is None:
        return Window.whole(leaf)
    axis, step = (_count(word) for word in words)
    if axis >= len(leaf.shape) or not 0 < step < leaf.shape[axis]:
        raise DamageError(f"a window of {step} along axis {axis} does not fit a field of shape {leaf.shape}")
    return Window.along(leaf, axis, step)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**40:
        raise DamageError(f"a record counts {value!r}, which is no count")
    return value

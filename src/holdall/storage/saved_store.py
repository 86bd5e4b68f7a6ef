"""All that a store holds at one moment, for checkpoints and pickles: frozen, thawed, rewritten; and as records.

In:  a store.  Out: `freeze()`, which `thaw` and `take_rows` take over; records of rows, logs, pieces, states and files.
Invariant: what is frozen does not change, whatever is written meanwhile. A record is read only as what it says it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdall.errors import CheckpointError, DamageError
from holdall.schema import Array, Leaf, dtype_name, dtype_of
from holdall.storage.blocks import SliceBlock
from holdall.storage.records import Buffer, Read, Record, pack, parsed, unparsed
from holdall.storage.rings import field_layouts
from holdall.storage.segment import Segments
from holdall.storage.slices import ClosedPart, Segment, Window
from holdall.storage.snapshot import (
    FrozenRows,
    FrozenStore,
    FullBlock,
    OpenSlices,
    Ring,
    RowChunk,
    StoreContent,
    chunk_ticks_of,
    chunks_of,
    last_rows,
    put_rows,
)
from holdall.storage.tick_store import TickStore
from holdall.units import count_of

_SNAPSHOT_S = 0.003
"""For so long no codec is chosen: a snapshot takes less, if it has Python's lock to itself."""


class SavedStore(TickStore):
    """A store that can be saved. Not locked: the memory that owns it is."""

    def set_flags(self, ids: NDArray[np.int64], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Overwrite how transitions ended."""
        self.flags_changed += 1
        self.rewrite(*last_rows(ids, {"terminated.0": terminated, "truncated.0": truncated}))

    def rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        """Write rows of some columns again; they are copies, see `last_rows`, since the next call may have to do so."""
        self.rewrites += 1
        self.repair.do(partial(self._rewrite, ids, columns))

    def _rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        self._snapshots.before_rewrite(ids, tuple(columns), self.chunk_ticks)
        self._rings.rewrite(ids, columns)

    def content(self) -> StoreContent:
        """Return all but the rows, sharing memory with the store; what is added later does not change it."""
        return StoreContent(**self._content([part.closed() for part in self.large_segments.open.parts]))

    def _content(self, open_parts: list[ClosedPart]) -> dict[str, Any]:
        """All but the rows, by name; closed segments by reference, since they never change."""
        segments, first = self.large_segments, self.large_segments.open.first_tick
        opened = Segment(first, self.next_tick - first, open_parts)
        held = [*segments.closed, opened] if opened.ticks and self._large else list(segments.closed)
        shared = {i: ring for i, ring in self._rings.small.items() if ring.is_shared}
        return {
            "first_tick": self.first_tick, "next_tick": self.next_tick, "large": list(self._large),
            "windows": list(segments.windows), "searches": segments.searches.state(), "segments": held,
            "newest": {i: ring.newest_next(self.next_tick) for i, ring in shared.items() if self.next_tick},
            "paired": [i for i in self._rings.small if i not in shared],
            "scouts": {str(i): scout.state() for i, scout in self._rings.scouts.items()},
            "reward_dtype": self.reward_dtype, "has_invalid": self._rings.invalid is not None,
        }  # fmt: skip

    def rows(self) -> list[RowChunk]:
        """Return the rows of all ticks held, in order, sharing memory with the rings."""
        return chunks_of(self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self._lanes)

    def freeze(self, saved: Mapping[int, tuple[int, tuple[str, ...]]]) -> FrozenStore:
        """Return what is held now; `release` when its rows were read.

        Args:
            saved: Chunks of rows that are not needed, by number: the version and the columns in which they were saved.
        """
        if self.sealer is not None:
            self.sealer.queue.away_until = time.monotonic() + _SNAPSHOT_S
        rows, versions = self._snapshots.freeze(
            self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self.chunk_ticks, saved
        )
        if rows.is_pending:
            self.fast_tick.end()
        opened = self.large_segments.open
        parts = [part.closed() for part in opened.parts]
        filling = [OpenSlices.of(*each) for each in zip(opened.parts, parts, strict=True)]
        content, first, count = self._content(parts), opened.first_tick, self.transitions
        return FrozenStore(
            **content, rows=rows, versions=versions, filling=filling, open_tick=first, transitions=count
        )  # fmt: skip

    def take_again(self, rows: FrozenRows, number: int, version: int) -> RowChunk | None:
        """Return a chunk of a snapshot's rows that was thought to be saved; None if it was written over since."""
        return self._snapshots.take_again(rows, number, version, self.next_tick)

    def release(self, rows: FrozenRows) -> None:
        """Forget a snapshot whose rows were read, or are not wanted any more."""
        self._snapshots.release(rows)

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks of large fields that are not known yet nor about to be sealed, newest first."""
        full = _full_blocks(self.large_segments, is_known) if self._large else []
        return [block for block in full if not self._tiers.is_changing(block.block)]

    def thaw(self, content: StoreContent, rows: Iterable[RowChunk] = ()) -> None:
        """Take over what was frozen, in a store as it was made; more rows may follow with `take_rows`, oldest first."""
        leaves = self._schema.observation.leaves
        self._not_before = self._begun_at = content.first_tick
        self._large = list(content.large)
        self._writer = self._new_writer(content.first_tick, content.next_tick)
        rings = self._rings
        rings.keep(i for i in range(len(leaves)) if i not in self._large)
        self._budget.choose(field_layouts(self._schema, self._ring_ticks, self._large))  # it may be another than here
        sliced = [leaves[i] for i in self._large]
        self.large_segments.thaw(self.next_tick, sliced, content.windows, content.segments, content.searches)
        self._settle(may_evict=True)
        rings.thaw(self.next_tick, self.first_tick, content.newest, content.paired, content.scouts)
        if content.reward_dtype is not None:
            rings.begin(content.reward_dtype, has_invalid=content.has_invalid)
        for chunk in rows:
            self.take_rows(chunk)

    def take_rows(self, chunk: RowChunk) -> None:
        """Take over the rows of some ticks; those that this store would not hold any more are passed over."""
        held = chunk.since(self.first_tick, self._lanes)
        if held is None:
            return
        self._end_batches()
        self._rings.put(held.first_tick, held.columns, held.apart)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            put_rows(cursors, held.first_tick, held.columns[f"cursors.{i}"])
        self._pack(held.first_tick + held.ticks)

    @property
    def chunk_ticks(self) -> int:
        """Ticks whose rows are written to a checkpoint as one chunk."""
        return chunk_ticks_of(sum(prod(ring.shape[1:]) * ring.dtype.itemsize for ring in self._columns().values()))

    def columns_like(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shape and dtype of one tick of every column."""
        return {name: (ring.shape[1:], ring.dtype) for name, ring in self._columns().items()}

    def _columns(self) -> dict[str, Ring]:
        """All rings by name, those of cursors too: what a chunk of rows consists of."""
        cursors = zip(self._large, self.large_segments.cursors, strict=True)
        return self._rings.columns() | {f"cursors.{i}": ring for i, ring in cursors}


def _full_blocks(segments: Segments, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
    """Return the blocks that are full, newest first, back to a segment that is known."""
    found: dict[int, FullBlock] = {}
    filling = {id(part.block) for part in segments.open.parts}
    for segment in reversed(segments.closed):
        new = [part for part in segment.parts if id(part.block) not in filling and not is_known(part.block)]
        if not new:
            break
        found |= {id(part.block): FullBlock(part.block, part.log is None) for part in new}
    return list(found.values())


# ---------------------------------------------------------------- as records


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
        count_of(count, ticks * lanes)
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
        rows, count, steps, new = (count_of(words[key]) for key in ("log_rows", "slices", "steps", "new_slices"))
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
    count = count_of(record.head["count"])
    most = min(most, max(1, PIECE_BYTES // slice_bytes))
    if (record.head["slice_bytes"], record.head["first"]) != (slice_bytes, first) or count > most:
        raise DamageError(f"the slices at byte {record.start} are others than the manifest says")
    found: NDArray[np.uint8] = _array(record, "slices", read, np.dtype(np.uint8), (count * slice_bytes,))
    return found


_SAFE = 2**53
_MOST_DEPTH = 32


def encode_state(value: Any, arrays: list[NDArray[Any]], what: str, depth: int = 0) -> Any:
    """Return what JSON can hold; arrays are appended to `arrays` and named by their place there."""
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"{what} is nested deeper than {_MOST_DEPTH}; make it flatter")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise CheckpointError(f"{what} has keys that are no text, or begin with $; name them otherwise")
        return {key: encode_state(child, arrays, f"{what}[{key!r}]", depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [encode_state(child, arrays, what, depth + 1) for child in value]
    if isinstance(value, np.ndarray):
        return _array_words(value, arrays, "$array", what)
    if isinstance(value, bytes):
        return _array_words(np.frombuffer(value, np.uint8), arrays, "$bytes", what)
    return _scalar_words(value.item() if isinstance(value, np.generic) else value, what)


def _array_words(value: NDArray[Any], arrays: list[NDArray[Any]], kind: str, what: str) -> Any:
    if value.dtype.kind not in "biuf":
        raise CheckpointError(f"{what} holds an array of {value.dtype}; only numbers can be saved")
    arrays.append(np.asarray(value, value.dtype.newbyteorder("<")))
    return {kind: len(arrays) - 1, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}


def _scalar_words(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_SAFE < value < _SAFE else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": value.hex()}
    raise CheckpointError(f"{what} holds a {type(value).__name__}; numbers, text, arrays, dicts and lists can be saved")


def decode_state(value: Any, arrays: Mapping[int, bytes | NDArray[np.uint8]], depth: int = 0) -> Any:
    """Return what `encode_state` was given; lists stand for tuples too."""
    if depth > _MOST_DEPTH:
        raise DamageError("a saved state is nested too deeply to be one of holdall's")
    if isinstance(value, list):
        return [decode_state(child, arrays, depth + 1) for child in value]
    if not isinstance(value, dict):
        return value
    if "$int" in value:
        return int(value["$int"], 16)
    if "$float" in value:
        return float.fromhex(value["$float"])
    if "$bytes" in value:
        return bytes(arrays[value["$bytes"]])
    if "$array" in value:
        rows = np.frombuffer(arrays[value["$array"]], dtype_of(value["dtype"]))
        return rows.reshape([int(length) for length in value["shape"]]).copy()
    return {key: decode_state(child, arrays, depth + 1) for key, child in value.items()}


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
    sizes = [count_of(nbytes) for nbytes in record.head["sizes"]]
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

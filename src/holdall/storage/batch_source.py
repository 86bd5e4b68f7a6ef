"""What batches are read from: places of large fields, a table of short rows, and all of it for who draws at once.

In:  where the fields of a memory lie.  Out: columns of rows; or a function that draws rows and returns new arrays.
Invariant: what is drawn and returned is what the general way draws and returns. Whatever changes where fields lie ends
this way, or is seen by it; it is offered again with the next batch that goes the general way.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import require_in_range
from holdall.errors import DamageError
from holdall.schema import Array, Bytes
from holdall.storage.blocks import SealedSlices, address
from holdall.storage.ticks import Coder

if TYPE_CHECKING:
    from holdall.storage.rings import ObservationRing, Rings
    from holdall.storage.segment import Segments
    from holdall.storage.slices import Cursors, OpenPart
    from holdall.storage.ticks import Kernels, TickWriter

APART_FIELDS = ("ids", "rows", "end", "room")
APART_END, APART_ROOM = 2, 3
"""Where next observations lie that no ring shows, and where compiled loops may add some."""
COLUMN_FIELDS = (
    "ring", "row_bytes", "later", "block", "apart_count", "apart_ids", "apart_rows", "unless", "runs", "leaf",
)  # fmt: skip
"""Columns of a table of columns, in the order of the struct `row_column` in structs.h; the loader compares them."""
Held = tuple[object, ...]
"""What the addresses of a record point into; referring to it keeps it from being freed."""
RECORD_FIELDS = (
    "log", "log_rows", "log_width", "slices", "slice_count", "outer", "run_bytes", "window", "shift",
    "sealed",
)  # fmt: skip
"""Columns of a table of records, in the order of the struct `part` in structs.h; the library's loader compares them."""
_SEALED = RECORD_FIELDS.index("sealed")
_WINDOW = RECORD_FIELDS.index("window")
ALIGNMENT_BYTES = 64
"""Where the columns of a batch begin, as torch's own tensors do: matrix products of floats that begin elsewhere add up
in another order, so that the last bits differ."""
ColumnSpan = tuple[tuple[int, ...], np.dtype[Any], int, int]
"""Shape, dtype, which block, and the first byte in it."""
_ONE_BLOCK_BYTES = 1 << 15
"""Both blocks are one up to this size: allocating another one takes longer than to copy it."""
_NO_BLOCK = 2
"""Where columns without bytes are: NumPy gives them other strides in a block than of their own."""


def fresh_bytes(nbytes: int) -> Bytes:
    """Allocate bytes from an aligned address on."""
    block: Any = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % ALIGNMENT_BYTES
    return block[start : start + nbytes]  # type: ignore[no-any-return]  # a buffer to ctypes, an array to NumPy


@dataclass(frozen=True, slots=True)
class Places:
    """Where the observations of a batch lie; holding it keeps them from being freed."""

    records: list[NDArray[np.int64]]  # per field: (segments, len(RECORD_FIELDS))
    segment: NDArray[np.int32]  # (batch,)
    cursors: list[Cursors]  # per field: (batch,)
    lane: NDArray[np.int32]  # (batch,)
    lanes: int
    held: tuple[Sequence[Held], ...]  # per field and segment
    rows: NDArray[np.int64] | None = None  # where in the arrays of a larger batch each goes; None: one after another
    reads_files: bool = False
    awaits_files: bool = False  # some of them lie elsewhere, and what is read has to be brought here first

    @classmethod
    def found(
        cls, kernels: Kernels, segments: Segments, ids: NDArray[np.int64], cursors: list[Cursors], lanes: int
    ) -> Places:
        """Find the observations of transitions in segments; `cursors` are theirs, field by field."""
        index = segments.index
        segment, lane = kernels.find(index.first_ticks, ids, lanes)
        if segments.awaited:
            segments.awaited = [file for file in segments.awaited if file.is_awaited]  # the rest is here by now
        reads, awaits, held = segments.blocks_on_disk > 0, bool(segments.awaited), tuple(index.held)
        return cls(list(index.records), segment, cursors, lane, lanes, held, reads_files=reads, awaits_files=awaits)

    def cut(self, some: slice, rows: NDArray[np.int64] | None) -> Places:
        """Return the places of some of a batch; `rows`: where in the arrays of a larger one each goes."""
        cursors = [each[some] for each in self.cursors]
        return replace(self, segment=self.segment[some], cursors=cursors, lane=self.lane[some], rows=rows)

    def window(self, field: int, segment: int) -> int:
        """Return how many slices make an observation of a field in a segment."""
        return int(self.records[field][segment, _WINDOW])

    def sealed_slices(self, field: int) -> dict[int, SealedSlices]:
        """Return the sealed slices that the records of a field name, by address."""
        contents = (content for held in self.held[field] for content in held)
        return {content.address: content for content in contents if isinstance(content, SealedSlices)}

    def damage(self, field: int, row: int, error: int) -> DamageError:
        """Say what is wrong with the block that holds a row.

        Args:
            error: What the system said when it read a file, or 0.
        """
        segment = int(self.segment[row])
        sealed = int(self.records[field][segment, _SEALED]) if 0 <= segment < len(self.records[field]) else 0
        named = self.sealed_slices(field).get(sealed)
        extent = None if named is None else named.extent
        if extent is None:
            return DamageError(
                f"row {row} of the batch points outside its segment, or its bytes are damaged; nothing of the batch "
                "is returned. Load the last checkpoint, and report this"
            )
        why = f"cannot be read ({os.strerror(error)})" if error else "is damaged or was cut short"
        return DamageError(
            f"{extent.file.path} {why}: row {row} of the batch lies in it, and nothing of the batch is returned. Check "
            "the disk, and load the last checkpoint"
        )


def read_tick(kernels: Kernels, part: OpenPart, cursors: Cursors) -> tuple[Bytes, Bytes]:
    """Read the observations and next observations of all lanes in one tick of an open part, as rows of bytes."""
    shape = (part.lanes, part.obs_bytes)
    obs, next_obs = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
    places = Places(
        records=[np.array([part.record()], np.int64)],
        segment=np.zeros(part.lanes, np.int32),
        cursors=[cursors.copy()],
        lane=np.arange(part.lanes, dtype=np.int32),
        lanes=part.lanes,
        held=((part.held,),),
    )
    kernels.gather(places, 0, obs, next_obs)
    return obs, next_obs


class Rows(NamedTuple):
    """What was read under some ids: copies of the small fields, places of the large ones."""

    small: dict[int, tuple[Array, Array]]  # by observation leaf: obs and next_obs
    large: tuple[int, ...]  # observation leaves whose places follow, in this order
    places: Places | None
    action: list[Array]
    reward: Array
    terminated: Array
    truncated: Array
    extras: list[Array]
    ended: Array  # float32: 1.0 where an episode ended and was not cut short

    def cut(self, some: slice) -> Rows:
        """Return some of the rows, of which all fields were read; nothing is copied."""
        return Rows(
            {i: (obs[some], next_obs[some]) for i, (obs, next_obs) in self.small.items()}, (), None,
            [each[some] for each in self.action], self.reward[some], self.terminated[some], self.truncated[some],
            [each[some] for each in self.extras], self.ended[some],
        )  # fmt: skip


class RowTable:
    """How kernels copy the short fields of a batch in one go: from which rings, and where to.

    Observations go to one block and everything else to another, so that rewards that a caller keeps do not keep large
    observations, too. Behind everything else comes a column of 1.0 where an episode ended that was not cut short.

    Args:
        cursors: Rings of cursors, which come last; the list that is passed grows when a field moves to segments.
    """

    def __init__(self, rings: Rings, cursors: list[NDArray[np.uint32]]) -> None:
        self._small, self._numbers, self._has_reward = tuple(rings.small.values()), tuple(rings.small), False
        self._counts = len(rings.action), len(rings.extras)
        rest = [*rings.action, rings.terminated, rings.truncated, *rings.extras]
        if rings.reward is not None:
            rest, self._has_reward = [*rest, rings.reward], True
        self._kept = [*rest, *cursors]
        self._cursors, self._cursor_count = cursors, len(cursors)
        self._ring_rows = rings.ring_ticks * rings.lanes
        self._leaves = [(ring.leaf.shape, ring.leaf.dtype, 0) for ring in self._small for _ in range(2)]
        self._leaves += [(ring.shape[2:], ring.dtype, 1) for ring in rest]
        self._leaves += [((), np.dtype(np.float32), 1)]
        self._leaves += [((), ring.dtype, 1) for ring in cursors]
        rows = [[ring.ctypes.data, ring[0, 0].nbytes, 0, 1, *[0] * 6] for ring in rest]
        rows += [[rings.terminated.ctypes.data, 4, 0, 1, 0, 0, 0, rings.truncated.ctypes.data, 0, 0]]
        rows += [[ring.ctypes.data, ring.itemsize, 0, 1, *[0] * 6] for ring in cursors]
        self._table = np.array([[0] * len(COLUMN_FIELDS)] * 2 * len(self._small) + rows, np.int64)
        self._seen: list[tuple[object, ...]] = [(None, 0)] * len(self._small)  # what the table points into, kept alive
        self._spans: tuple[int, int, int, list[ColumnSpan]] = (-1, 0, 0, [])

    def fits(self, rings: Rings, cursors: list[NDArray[np.uint32]]) -> bool:
        """Whether these are still all rings: fields only move, and rewards come with the first tick."""
        are_same = len(self._small) == len(rings.small) and self._has_reward is (rings.reward is not None)
        return are_same and self._cursors is cursors and self._cursor_count == len(cursors)

    def read(
        self, kernels: Kernels, ids: NDArray[np.int64], held: tuple[int, int], take: Callable[[int], Bytes]
    ) -> list[Array]:
        """Copy all fields of `ids` that are in rings, and the cursors to the others, into one array a column.

        Args:
            held: The first id held, and the one behind the last; others are refused.
            take: Returns memory, from an aligned address on.
        """
        _, observed_bytes, other_bytes, columns = self.spans(len(ids))
        if observed_bytes + other_bytes <= _ONE_BLOCK_BYTES:
            observed = take(observed_bytes + other_bytes)
            others = observed[observed_bytes:]
        else:
            observed, others = take(observed_bytes), take(other_bytes)
        if not kernels.read_rows(self.columns(), ids, held, self._ring_rows, (observed, others)):
            require_in_range(ids, *held)
            raise DamageError(f"rings of {self._ring_rows} rows are too short for the ids held, {held}; report this")
        blocks = (observed, others, None)
        return [np.ndarray(shape, dtype, blocks[block], first) for shape, dtype, block, first in columns]

    def rows(self, columns: list[Any], large: tuple[int, ...], places: Places | None) -> Rows:
        """Name the columns that `read` returned; the fields that are not in rings lie at `places`."""
        first = 2 * len(self._small)
        flags = first + self._counts[0]
        extras = flags + 2 + self._counts[1]
        return Rows(
            small={i: (columns[2 * k], columns[2 * k + 1]) for k, i in enumerate(self._numbers)},
            large=large,
            places=places,
            action=columns[first:flags],
            reward=columns[extras] if self._has_reward else np.empty(0, np.float32),
            terminated=columns[flags],
            truncated=columns[flags + 1],
            extras=columns[flags + 2 : extras],
            ended=columns[extras + self._has_reward],
        )

    def columns(self) -> NDArray[np.int64]:
        """Describe all columns as they are now, see `COLUMN_FIELDS`; cursors come last."""
        for i, ring in enumerate(self._small):
            following = ring.apart.now[1] if ring.paired is None else ring.paired
            end = int(following[APART_END]) if ring.paired is None else 0
            if self._seen[i][0] is not following or self._seen[i][1] != end:
                self._table[2 * i : 2 * i + 2] = _described(ring)
                self._seen[i] = following, end, ring.kept_apart
        return self._table

    def spans(self, rows: int) -> tuple[int, int, int, list[ColumnSpan]]:
        """Return, for so many rows, that number, the bytes of both blocks, and where every column stands."""
        spans = self._spans
        if spans[0] != rows:
            sizes, columns = [0, 0], []
            for shape, dtype, block in self._leaves:
                nbytes = rows * prod(shape) * dtype.itemsize
                columns.append(((rows, *shape), dtype, *((block, sizes[block]) if nbytes else (_NO_BLOCK, 0))))
                sizes[block] += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            spans = self._spans = (rows, sizes[0], sizes[1], columns)
        return spans


def _described(ring: ObservationRing) -> list[list[int]]:
    """Describe observations and next observations to the kernels, see `COLUMN_FIELDS`."""
    (rows, paired, *_), nbytes, apart = ring.flat(), ring.leaf.nbytes, ring.kept_apart
    start, runs = address(rows), [0, 0] if ring.runs is None else [ring.runs[0].address, ring.runs[1]]
    obs = [start, nbytes, 0, 0, 0, 0, 0, 0, *runs]
    if paired is not None:
        return [obs, [address(paired), nbytes, *[0] * 8]]
    ids, kept = (column[apart.first : apart.end] for column in (apart.ids, apart.rows))
    return [obs, [start, nbytes, rows.shape[1], 0, len(ids), address(ids), address(kept), 0, *runs]]


class RowSources(NamedTuple):
    """What batches are read from, as it is at one moment."""

    table: RowTable
    held: tuple[int, int]  # the first id, and the one behind the last
    ring_rows: int
    large: tuple[int, ...]  # observation leaves that lie in segments
    cursors: list[NDArray[np.uint32]]  # rings, one a large field
    first_ticks: NDArray[np.int64]  # of the segments
    records: list[NDArray[np.int64]]  # by large field and segment, see `RECORD_FIELDS`
    kept: object  # what the records point into


# ---------------------------------------------------------------- batches in one call


class BatchArray(NamedTuple):
    """An array of a batch: a column of the rows that are copied from rings, or a large field."""

    shape: tuple[int, ...]  # of one row
    dtype: np.dtype[Any]
    column: int  # -1: a large field, ...
    field: int  # ... this one, ...
    is_next: bool  # ... its next observations


class BatchSource(NamedTuple):
    """Where the fields of a memory lie now, and what a batch of them consists of."""

    rows: RowSources
    writer: Any  # the `TickWriter` that counts ticks
    first_tick: int  # no older one is held
    capacity_ticks: int
    lanes: int
    large_bytes: list[int]  # of an observation of each large field
    arrays: list[BatchArray]  # of a batch that is drawn, ...
    gathered: list[BatchArray]  # ... and of one whose ids are given

    @classmethod
    def of(cls, rows: RowSources, rings: Rings, writer: TickWriter, ticks: tuple[int, int]) -> BatchSource:
        """Name the arrays in the orders of `BatchReader`; numbers of batches that are drawn have rows of length one.

        Args:
            ticks: The oldest tick that may be held, and the capacity.
        """
        spans, leaves = rows.table.spans(1)[3], rings.schema.observation.leaves
        named: Any = rows.table.rows(list(range(len(spans))), rows.large, None)  # each column's number, in its place

        def short(column: int) -> BatchArray:
            return BatchArray(spans[column][0][1:], spans[column][1], column, -1, is_next=False)

        observed = list[BatchArray]()
        for i, leaf in enumerate(leaves):
            if i in named.small:
                observed += map(short, named.small[i])
            else:
                field = rows.large.index(i)
                observed += [
                    BatchArray(leaf.shape, leaf.dtype, -1, field, is_next=is_next) for is_next in (False, True)
                ]
        rest = [*named.action, named.reward, named.terminated, named.truncated, *named.extras]
        arrays = [*map(short, (named.action[0], named.ended, named.reward)), *observed]
        drawn = [array._replace(shape=array.shape or (1,)) for array in arrays]
        gathered = [*map(short, rest), *observed]
        return cls(rows, writer, *ticks, rings.lanes, [leaves[i].nbytes for i in rows.large], drawn, gathered)


class BatchReader:
    """Draws and copies batches in one call; this one never does.

    `draw(generator, rows, filled, slots)` draws rows as `draw_slots` does, and returns a tuple of new arrays: actions,
    ends, rewards, and observations and next observations, leaf by leaf. It returns 0, and nothing was drawn, if batches
    cannot be made this way now; and the ids that were drawn, if what lies under one of them is damaged.
    `gather(ids)` returns actions, rewards, both flags, extras, and observations as above; or 0; or the ids, also if one
    is not held.
    """

    nbytes = 0  # kept for the next batches
    draw: Callable[..., Any] = staticmethod(lambda *_: 0)
    gather: Callable[..., Any] = draw

    def needs(self, _rows: int) -> bool:
        """Whether it has to be told where fields lie before it draws so many rows."""
        return False

    def offer(self, _source: BatchSource, _rows: int) -> None:
        """Draw batches of up to so many rows from these fields from now on."""

    def close(self) -> None:
        """Draw no more, end the threads, and let go of everything."""

    def arrays(self) -> list[Array]:
        """Return what is kept for the next batches."""
        return []


_KEPT_FROM = 0.05
"""Share of its decoded bytes from which on a segment is kept decoded: others decode in the time of a copy."""
_NEWLY = 16
"""Segments that one answer decodes and keeps so."""
_SLICES = RECORD_FIELDS.index("slices")


class DecodedSegments:
    """Decoded slices of segments that are drawn from: as an ordinary memory leaves what it has room for uncompressed.

    Those of a segment go with it. Where there is no room left, others are decoded for every batch.

    Args:
        most_bytes: Kept at most.
    """

    def __init__(self, coder: Coder, most_bytes: int) -> None:
        self._coder = coder
        self._room = most_bytes
        self._slices: weakref.WeakKeyDictionary[SealedSlices, Bytes] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def instead(self, places: Places) -> Places:
        """Return the places of a batch, with decoded slices where these are kept."""
        if places.reads_files:
            return places
        touched, where = np.unique(places.segment, return_inverse=True)
        records, held, newly = [table[touched] for table in places.records], list[tuple[Held, ...]](), _NEWLY
        for table, contents in zip(records, places.held, strict=True):
            kept = list[Held]()
            for record, segment in zip(table, touched.tolist(), strict=True):
                log, content = contents[segment]
                if isinstance(content, SealedSlices):
                    slices = self._slices.get(content)
                    if slices is None and newly:
                        slices, newly = self._decode(content), newly - 1
                    if slices is not None:
                        record[_SLICES], record[_SEALED], content = slices.ctypes.data, 0, slices
                kept.append((log, content))
            held.append(tuple(kept))
        return replace(places, records=records, segment=where.astype(np.int32), held=tuple(held))

    def _decode(self, sealed: SealedSlices) -> Bytes | None:
        """Decode slices and keep them, if that pays and there is room."""
        nbytes = sealed.count * sealed.codec.transform.slice_bytes
        if np.asarray(sealed.coded.data).nbytes < _KEPT_FROM * nbytes:
            return None
        with self._lock:
            if nbytes > self._room:
                return None
            self._room -= nbytes
        slices = np.empty((sealed.count, sealed.codec.transform.slice_bytes), np.uint8)
        self._coder.decode(sealed, np.arange(sealed.count), slices)
        self._slices[sealed] = slices
        weakref.finalize(sealed, self._free, nbytes).atexit = False
        return slices

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self._room += nbytes

"""ShardStore: the rows of a shard, in a native writer with one lane that only adopts segments.

A tick of the writer is a row of the shard. Segments arrive compressed, so there is nothing to compress, and the
capacity alone decides what is evicted. The newest blocks are kept uncompressed, too, see raw_blocks.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from holdall._native import Catalog, Coded, Reader, Segment, Writer
from holdall.cluster.raw_blocks import RawBlocks
from holdall.cluster.segment import pack_payload
from holdall.errors import ArgumentError
from holdall.report import FieldReport
from holdall.schema import Schema
from holdall.store.columns import Columns
from holdall.store.field_reports import report_fields
from holdall.store.layouts import PAIRED
from holdall.store.reader_threads import ReaderThreads
from holdall.store.snapshot import StoreState
from holdall.store.tuning import Tuning
from holdall.store.view import BeforeRead, View
from holdall.store.windows import Window

_OPEN_TICKS = 1
"""Ticks of the writer's open segment, which is never written to."""
_KEPT_BYTES = 64 * 2**20
"""Bytes of freed arrays that are kept for the next batches. Memory from the system costs as much time as filling it."""


class ShardStore:
    """The rows of one shard. Thread-safe, because every change is one native call.

    Args:
        schema: Spaces of all fields, with one lane.
        capacity: Rows that are held at most.
        first_row: Number of the next row.
        threads: Threads that share the work of large batches.
        max_raw_bytes: Bytes of blocks that are kept uncompressed.

    Attributes:
        columns: Numbers of the columns and of their outputs.
        reward_dtype: Dtype of all rewards, which the first segment sets. None before it.
        before_read: Called with a catalog and rows before the rows are read, to fetch blocks from an object store.
    """

    def __init__(
        self, schema: Schema, capacity: int, first_row: int, threads: int, tuning: Tuning, max_raw_bytes: int = 0
    ) -> None:
        self.columns = Columns(schema)
        self.reward_dtype: np.dtype[Any] | None = None
        self.before_read: BeforeRead | None = None
        self._schema = schema
        leaf_count = len(schema.observation.leaves)
        layouts = (*[PAIRED] * leaf_count, *[None] * (self.columns.flags + 1 - leaf_count))
        self._writer = Writer(
            self.columns.list_columns(), self.columns.list_groups(), 1, capacity, _OPEN_TICKS, 1, layouts, first_row
        )
        self._reader = Reader(_KEPT_BYTES, tuning.bytes_per_thread)
        self._helpers = ReaderThreads(self._reader, threads)
        self._raw = RawBlocks(max_raw_bytes)

    @property
    def first_row(self) -> int:
        """The oldest row that is held."""
        return self._writer.first_tick

    @property
    def next_row(self) -> int:
        """The number of the next row."""
        return self._writer.next_tick

    @property
    def catalog(self) -> Catalog:
        """The immutable list of segments that are held now."""
        return self._writer.catalog

    def __len__(self) -> int:
        """Return the number of transitions. Entries added with `valid=False` are not transitions."""
        catalog = self._writer.catalog
        return catalog.next_tick - catalog.first_tick - catalog.invalid_count

    def require_reward_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise ArgumentError if the rewards that are held have another dtype. Set the dtype before the first ones."""
        if self.reward_dtype is None:
            self._writer.set_type(self.columns.reward, int(dtype.num))
            self.reward_dtype = dtype
        if dtype != self.reward_dtype:
            raise ArgumentError(
                f"reward has dtype {dtype}, but the rewards in this memory are {self.reward_dtype}. "
                "Convert the rewards of all writers to one dtype."
            )

    def adopt(self, segment: Segment) -> int:
        """Append a segment with one lane, whose rewards have `reward_dtype`. Return the number of its first row."""
        first_row = self._writer.adopt(segment)
        self._raw.keep(segment, first_row + segment.ticks, self._writer.first_tick)
        return first_row

    def evict(self, before_row: int) -> None:
        """Drop all rows before `before_row`."""
        self._writer.evict(before_row)

    def view(self) -> View:
        """Return a view of the rows that are held now. They stay readable until the view is dropped."""
        if self._reader.wanted_helpers > self._helpers.count:
            self._helpers.start()
        return View(self._writer.catalog, self._reader, self.columns, self.before_read)

    def snapshot(self) -> StoreState:
        """Return everything that is held, for a checkpoint."""
        catalog = self._writer.snapshot()
        leaves = self._schema.observation.leaves
        return StoreState(
            first_tick=self._writer.first_tick,
            next_tick=catalog.next_tick,
            segments=catalog.segments,
            layouts=tuple(PAIRED for _ in leaves),
            windows=tuple(Window.whole(leaf) for leaf in leaves),
            reward_dtype=self.reward_dtype,
        )

    def coded_forms(self) -> dict[int, Coded]:
        """Return the compressed forms of all uncompressed blocks, by serial number of the block."""
        return self._raw.coded_forms()

    def restore(self, state: StoreState) -> None:
        """Hold the rows of a checkpoint. The store must be empty, and start at the first row of the first segment."""
        if state.reward_dtype is not None:
            self.require_reward_dtype(state.reward_dtype)
        for segment in state.segments:
            self._writer.adopt(segment)
        self._writer.evict(state.first_tick)

    def list_segments(self) -> list[Segment]:
        """Return the closed segments, oldest first."""
        return list(self._writer.snapshot().segments)

    def pack(self, segment: Segment) -> bytes:
        """Return a segment as bytes, see `unpack_payload`."""
        if self.reward_dtype is None:
            raise AssertionError("A segment has rewards.")
        if self.before_read is not None:
            rows = np.arange(segment.first_tick, segment.first_tick + segment.ticks)
            self.before_read(self._writer.catalog, rows)
        return pack_payload(segment, self.reward_dtype)

    def report(self) -> list[FieldReport]:
        """Return the bytes of every field."""
        catalog = self._writer.catalog
        return report_fields(catalog, self._schema, self.columns, self.reward_dtype, _OPEN_TICKS, self._describe)

    @property
    def segments(self) -> int:
        """Number of segments that are held."""
        return len(self._writer.catalog.segments) - 1

    @staticmethod
    def _describe(_leaf: int) -> str:
        return "compressed by writers"

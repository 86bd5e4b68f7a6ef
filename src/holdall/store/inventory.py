"""Inventory: the sizes of all closed segments in a catalog, kept up to date from one segment to the next.

Describing all segments takes time in proportion to their number, so `Inventory.update` describes only the segments and
blocks that changed since the last call. A new inventory can be made from the catalog at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdall._native import Block, Catalog, Coded, Segment
from holdall.store.compactor import Result
from holdall.store.layouts import SlicedLayout, find_sliced_layout
from holdall.store.placement import BlockState, Form, Holdings
from holdall.store.spill import SpillFile


class Inventory:
    """Sizes and forms of the closed segments and blocks of a store, for `placement.plan`. Not thread-safe.

    Attributes:
        holdings: Sizes of the segments and blocks.
    """

    def __init__(self) -> None:
        self.holdings: Holdings[Block] = Holdings()
        self._next_tick = 0  # Tick after the newest segment in `holdings`.
        self._layouts: dict[Block, tuple[int, SlicedLayout]] = {}  # Observation leaf and layout of each block.
        self._open_blocks: set[Block] = set()  # Blocks of closed segments that the open segment still adds slices to.

    def update(self, catalog: Catalog, results: Iterable[Result] = ()) -> list[Block]:
        """Describe what changed since the last call. Return the blocks that were evicted.

        `results` are the results of the compactor since the last call.
        """
        for segment in catalog.closed_segments(self._next_tick):
            self._add_segment(segment)
        for block in [block for block in self._open_blocks if not block.is_open]:
            self._open_blocks.discard(block)
            self._describe(block)
        for result in results:
            if result.block in self.holdings:
                self._describe(result.block, is_kept=result.error is not None and not result.is_spill)
        return self.evict(catalog.first_tick)

    def evict(self, before_tick: int) -> list[Block]:
        """Remove the segments and blocks that only ticks before `before_tick` need. Return the removed blocks."""
        evicted = self.holdings.evict(before_tick)
        for block in evicted:
            del self._layouts[block]
            self._open_blocks.discard(block)
        return evicted

    def mark(self, block: Block, form: Form) -> None:
        """Record that the compactor gets a job for a block: `form` is COMPRESSING or MOVING."""
        self.holdings.change_block(block, replace(self.holdings[block], form=form))

    def layout_of(self, block: Block) -> tuple[int, SlicedLayout]:
        """Return the number of the observation leaf that a block belongs to, and its layout."""
        return self._layouts[block]

    def _add_segment(self, segment: Segment) -> None:
        states: dict[Block, BlockState] = {}
        rows_bytes = 0
        for column, part in enumerate(segment.parts):
            rows_bytes += part.nbytes
            block = part.block
            if block is None:
                continue
            self._layouts[block] = (column, find_sliced_layout(part))
            states[block] = describe_block(block, column)
            if block.is_open:
                self._open_blocks.add(block)
        self._next_tick = segment.first_tick + segment.ticks
        self.holdings.add_segment(self._next_tick, segment.ticks, rows_bytes, states)

    def _describe(self, block: Block, *, is_kept: bool = False) -> None:
        field, _ = self._layouts[block]
        self.holdings.change_block(block, describe_block(block, field, is_kept=is_kept))


def describe_block(block: Block, field: int, *, is_kept: bool = False) -> BlockState:
    """Return the form and the sizes of a block. `is_kept` says that its compression failed."""
    raw_bytes = block.slice_count * block.slice_bytes
    form = block.form
    if isinstance(form, Coded):
        if form.location is None:
            return BlockState(Form.CODED, raw_bytes, form.nbytes, field=field)
        file = form.file.number if isinstance(form.file, SpillFile) else None
        return BlockState(Form.FILED, raw_bytes, form.nbytes, form.disk_bytes, file, field)
    if block.is_open:
        return BlockState(Form.OPEN, raw_bytes, raw_bytes, field=field)
    return BlockState(Form.KEPT if is_kept else Form.RAW, raw_bytes, raw_bytes, field=field)

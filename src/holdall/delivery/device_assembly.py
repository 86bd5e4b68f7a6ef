"""A batch in one call of C and one or two launches: the device reads what it needs from pinned memory by itself.

In:  draws.  Out: batches, put together on the caller's own stream, or beside it if they are made ahead.
The flow: native/assemble.c looks rows up, names their slices and copies short fields into pinned memory;
`bring_slices` and `finish_batch` of native/device.cu do the rest.
Invariant: the host never waits, but for pinned memory that it writes to again; nothing that a launch reads is changed
or unpinned before that launch is done. Slices that are compressed are left to others, and so are other goals.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, require_in_range
from holdall.delivery.batch_layout import KEPT_BLOCKS, BatchPlan
from holdall.delivery.batches import MadeBatch
from holdall.delivery.cuda_program import CudaProgramError
from holdall.delivery.device import CudaStream, DeviceStream, RecordedSlot, StagingRing
from holdall.delivery.device_loops import device_program
from holdall.delivery.pinned_arenas import PinnedSlices
from holdall.errors import DamageError
from holdall.native import MOST_DEVICE_FIELDS, BatchRequestStruct, Refusal, SliceNamer, number_function
from holdall.schema import Array, Schema
from holdall.storage import RowSources, Store, address

_KEPT_PLANS = 16
"""Kinds of batches whose layouts are kept."""
_MOST_HEADS = 8
"""Batches whose pinned memory may still be read while the next one is looked up; then the host waits."""
_SHARE, _SHARE_OF_MANY, _MANY_ROWS = 6, 32, 512
"""The device begins with this part of a batch while the rest is looked up: to fetch takes longer. Of many rows with
less, since C goes on in pieces that grow."""
_FEWEST_ROWS = 32
"""It begins with so many at least: a launch takes time, too."""
_BLOCKS_OVER_BUS = 528
"""Enough to keep the bus busy, and few enough to leave the device to others."""
_MOST_SLICES = (1 << 31) - 1
"""What C numbers the places of a batch with."""
_NO_CONTEXT = 201
"""The driver's error for a thread that is new to it."""


class Launcher(NamedTuple):
    """How C launches kernels, and what gives a thread that is new to the driver its context."""

    function: int  # takes what cuLaunchKernel takes
    bring: int
    finish: int
    program: Any

    @classmethod
    def to(cls, torch: Any, stream: DeviceStream, namer: SliceNamer) -> Launcher | None:
        """Return the kernels of a device, if it and its compiler are there."""
        if isinstance(stream, CudaStream):
            try:
                program = device_program(torch, stream.device)
                if not stream.record_function:
                    return None
                return cls(program.launcher, program.find("bring_slices"), program.find("finish_batch"), program)
            except CudaProgramError:
                return None
        return cls(namer.launch_here, 1, 2, None) if stream.launches_here else None


class _Description(NamedTuple):
    """What the requests of all plans name, and the version of the segments that it is of."""

    version: int
    readable: PinnedSlices | None
    sources: RowSources


class SlotDraw(NamedTuple):
    """Rows that C draws from NumPy's global generator, as `draw_slots` does."""

    generator: Any
    filled: int
    slots: int


class DeviceAssembler:
    """Puts batches of one memory together on a device; called under the memory's lock.

    Attributes:
        behind: An event behind what was written beside the consumer's stream to blocks that nobody may see.
        most_blocks: Blocks of one kind of batch that are kept.
    """

    def __init__(self, torch: Any, stream: DeviceStream, schema: Schema, namer: SliceNamer, launcher: Launcher) -> None:
        self._torch, self._stream, self._schema, self._namer = torch, stream, schema, namer
        self._launcher = launcher
        self.behind: Any = None
        self.most_blocks = KEPT_BLOCKS
        self._heads = StagingRing(stream, RecordedSlot, _MOST_HEADS, is_sparing=True)  # batches are described there
        self._plans: dict[Any, BatchPlan] = {}
        self._plain: dict[int, BatchPlan] = {}  # by rows: of batches that are nothing but rows
        self._described: _Description | None = None
        self._under_way: deque[tuple[list[Any], _Description]] = deque()  # what is read until events have passed

    @classmethod
    def of(
        cls, torch: Any, stream: DeviceStream, schema: Schema, namer: SliceNamer | None
    ) -> DeviceAssembler | None:  # fmt: skip
        """Return one, where a device and its compiler are there."""
        if namer is None or len(schema.observation.leaves) > MOST_DEVICE_FIELDS:
            return None
        launcher = Launcher.to(torch, stream, namer)
        return None if launcher is None else cls(torch, stream, schema, namer, launcher)

    def assemble(self, draw: Draw, store: Store, readable: PinnedSlices | None, *, ahead: bool) -> MadeBatch | None:
        """Have a batch put together, but for other goals; None if the device cannot do that by itself."""
        sources, last = store.sources(), draw.last_ids
        if not draw.ids.size or (readable is None and sources.large):
            return None
        if any(array is not None and array.size != draw.ids.size for array in (last, draw.reward)):
            return None
        plan = self._plan(draw, sources)
        described = self._describe(_Description(store.large_segments.index.version, readable, sources))
        if plan is None or not self._tell(plan, described):
            return None
        arrays = self._fill(plan, draw)
        return self._make(plan, draw.ids, sources.held, arrays[: 1 if last is None else 2], ahead=ahead)

    def plain_plan(self, store: Store, readable: PinnedSlices | None, rows: int) -> BatchPlan | None:
        """Return the plan of batches of so many rows, any of those held, if it describes the store as it is now."""
        plan, described = self._plain.get(rows), self._described
        if plan is None or described is None or plan.described is not described or not store.all_valid:
            return None
        is_now = described.version == store.large_segments.index.version and described.readable is readable
        return plan if is_now and plan.table is store.row_table else None

    def assemble_plain(
        self, plan: BatchPlan, held: tuple[int, int], rows: NDArray[np.int64] | SlotDraw, *, ahead: bool
    ) -> MadeBatch | NDArray[np.int64]:
        """Have a batch of some rows put together, or of rows that are drawn now; return the ids if it cannot be."""
        request = plan.request
        request.last_ids, request.copied[0].source = None, plan.ones_at
        if not isinstance(rows, SlotDraw):
            request.ids = address(rows)
            return self._make(plan, rows, held, [rows], ahead=ahead) or rows
        ids = np.empty(request.rows, np.int64)
        request.ids, request.filled, request.drawn_slots = address(ids), rows.filled, rows.slots
        request.newest = held[1] // request.lanes - 1
        request.next_uint32, request.generator_state = number_function(rows.generator)
        try:
            with rows.generator.lock:
                made = self._make(plan, ids, held, [ids], ahead=ahead)
        finally:
            request.next_uint32 = None
        return made or ids

    def _make(
        self, plan: BatchPlan, ids: NDArray[np.int64], held: tuple[int, int], asked: list[Array], *, ahead: bool
    ) -> MadeBatch | None:  # fmt: skip
        """Call C for a request that says what to read; None if a slice is not where the device can read it."""
        stream, request = self._stream, plan.request
        if self._under_way:
            self._let_go()
        head, block = self._heads.next_slot(plan.pinned_bytes), plan.free_block(stream, self.most_blocks)
        head.read = head.event  # which C records, whatever becomes of the batch
        if ahead:
            stream.wait_for_consumer()
            request.stream, self.behind = stream.number, head.event
        else:
            if self.behind is not None:
                if not stream.has_passed(self.behind):
                    stream.let_consumer_wait(self.behind)
                self.behind = None
            request.stream = stream.consumer()
        request.head, request.event, request.block = head.start, head.event_number, block.start
        request.first_id, request.next_id = held
        plan.table.columns()  # so that they are those of now
        if not self._ask(request, asked, held):
            return None
        return MadeBatch(plan.batch(ids, block), head.event if ahead else None)

    def _plan(self, draw: Draw, sources: RowSources) -> BatchPlan | None:
        """Return the plan of such batches; None if a field is cut in several ways."""
        cuts = tuple(self._namer.cut(records, field) for field, records in enumerate(sources.records))
        known = [cut for cut in cuts if cut is not None]
        if len(known) < len(cuts):
            return None
        of_draw = (draw.weights, draw.reward, draw.discount, draw.mask)
        forms = [None if array is None else (array.dtype, array.shape) for array in of_draw]
        key = (draw.ids.shape, draw.last_ids is None, *forms)
        plan = self._plans.get(key)
        if plan is None or plan.table is not sources.table or plan.cuts != cuts:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
                self._plain.clear()
            if any(2 * draw.ids.size * window > _MOST_SLICES for *_, window in known):
                return None
            plan = self._plans[key] = BatchPlan(self._torch, self._schema, draw, sources, tuple(known))
            request, launcher = plan.request, self._launcher
            request.launch, request.bring, request.finish = launcher.function, launcher.bring, launcher.finish
            request.record = self._stream.record_function
            share = _SHARE if request.rows <= _MANY_ROWS else _SHARE_OF_MANY
            request.first_rows = max(_FEWEST_ROWS, request.rows // share)
            if plan.arrays == ["weights"] and draw.last_ids is None and draw.ids.ndim == 1:
                self._plain[draw.ids.size] = plan
        return plan

    def _describe(self, found: _Description) -> _Description:
        """Return what the store looks like, the same object as long as it does."""
        before = self._described
        if before is not None and before.version == found.version and before.readable is found.readable:
            return before
        if before is not None:  # launches may still read it
            self._under_way.append((self._heads.events, before))
        for plan in self._plans.values():
            plan.described = None
        self._described = found
        return found

    def _tell(self, plan: BatchPlan, described: _Description) -> bool:
        """Say in a plan's request where slices lie; False if the device cannot read one of them."""
        if plan.described is described:
            return True
        request, sources, readable = plan.request, described.sources, described.readable
        for field, records in enumerate(sources.records):
            if readable is None:
                return False
            source, task = request.source[field], request.task.field[field]
            task.base, source.starts = readable.base, address(readable.starts[field])
            source.parts, source.part_count = address(records), len(records)
            source.cursors, source.are_named = address(sources.cursors[field]), True
        request.most_blocks = _BLOCKS_OVER_BUS
        request.first_ticks, request.segments = address(sources.first_ticks), len(sources.first_ticks)
        request.ring_rows, plan.described = sources.ring_rows, described
        return True

    def _fill(self, plan: BatchPlan, draw: Draw) -> list[Array]:
        """Say what to read; return the arrays that the request names."""
        request = plan.request
        ids, request.last_ids = np.ascontiguousarray(draw.ids, np.int64), None
        request.ids, arrays = address(ids), [ids]
        if draw.last_ids is not None:
            arrays.append(np.ascontiguousarray(draw.last_ids, np.int64))
            request.last_ids = address(arrays[-1])
        for copied, name in zip(request.copied, plan.arrays, strict=False):
            arrays.append(np.ascontiguousarray(getattr(draw, name)))
            copied.source = address(arrays[-1])
        return arrays

    def _ask(self, request: BatchRequestStruct, asked: list[Array], held: tuple[int, int]) -> bool:
        """Call C for rows of some ids; False if a slice is not where the device can read it."""
        refused = self._namer.assemble(request)
        if refused is Refusal.BY_DRIVER and request.wrong == _NO_CONTEXT and self._launcher.program is not None:
            self._launcher.program.make_current()
            request.next_uint32 = None  # what was drawn stays so
            refused = self._namer.assemble(request)
        if refused is Refusal.BY_DRIVER:
            raise CudaProgramError(f"the CUDA driver refuses to put a batch together (error {request.wrong})")
        if refused is Refusal.NOT_HELD:
            for ids in asked:
                require_in_range(ids.reshape(-1), *held)
            raise DamageError(f"rings of {request.ring_rows} rows are too short for the ids held, {held}")
        return refused is Refusal.NONE

    def _let_go(self) -> None:
        """Let go of what the device has read."""
        while self._under_way and all(map(self._stream.has_passed, self._under_way[0][0])):
            self._under_way.popleft()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        return self._heads.nbytes

    def close(self) -> None:
        """Wait until the device has read everything."""
        self._heads.wait()
        self._under_way.clear()
        self._plans.clear()
        self._plain.clear()
        self._described = None

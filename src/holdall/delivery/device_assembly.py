"""A batch in one call of C and one or two launches: the device reads what it needs from pinned memory by itself.

In:  draws.  Out: batches, put together on the caller's own stream, or beside it if they are made ahead.
The flow: native/assemble.c looks rows up, names their slices and copies short fields into pinned memory;
`bring_slices` and `finish_batch` of native/device.cu do the rest.
Invariant: the host never waits, but for pinned memory that it writes to again; nothing that a launch reads is changed
or unpinned before that launch is done. Draws that need more (goals, slices that are compressed) are left to others.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdall.batch import Batch, Draw
from holdall.delivery.batches import BlockPool
from holdall.delivery.cuda_program import CudaProgramError
from holdall.delivery.device import CudaStream, DeviceStream, StagingSlot
from holdall.delivery.device_loops import device_program
from holdall.delivery.device_store import DeviceSnapshot, PinnedSnapshot
from holdall.errors import DamageError
from holdall.native import MOST_DEVICE_FIELDS, BatchRequestStruct, Cut, Refusal, RowPlaceStruct, SliceNamer
from holdall.schema import Array, Schema, require_in_range
from holdall.storage import ALIGNMENT_BYTES, RowSources, Store, address
from holdall.threads import fork_safe, left

if TYPE_CHECKING:
    import torch

_KEPT_PLANS = 16
"""Kinds of batches whose layouts are kept."""
_MOST_HEADS = 8
"""Batches whose pinned memory may still be read while the next one is looked up; then the host waits."""
_SHARE = 6
"""The device begins with this part of a batch while the rest is looked up: to fetch takes longer."""
_FEWEST_ROWS = 32
"""It begins with so many at least: a launch takes time, too."""
_BLOCKS_OVER_BUS = 528
"""Enough to keep the bus busy, and few enough to leave the device to others."""
_BLOCKS_ON_DEVICE = 4096
_MOST_SLICES = (1 << 31) - 1
"""What C numbers the places of a batch with."""
_NO_CONTEXT = 201
"""The driver's error for a thread that is new to it."""
_UNKNOWN: Any = object()
"""In place of the event behind which pinned memory was read."""

Readable = DeviceSnapshot | PinnedSnapshot | None
"""Where the device reads slices; None where there are none, or it cannot."""


@dataclass(frozen=True, slots=True)
class DeviceBatch(Batch):
    """A batch, and where episodes ended that were not cut short: float32, for frameworks that want that."""

    ended: Any = None


class MadeBatch(NamedTuple):
    """A batch that the device was told to put together, and the event behind which it is there.

    The event is None if the consumer's own stream does it.
    """

    batch: Batch
    ready: Any


class MadeJob:
    """A batch that the device was told to put together already."""

    is_quick = True

    def __init__(self, stream: DeviceStream, made: MadeBatch) -> None:
        self._stream, self._made = stream, made

    def work(self) -> None:
        """See `BatchJob`."""

    def receive(self) -> Batch:
        """See `BatchJob`; the consumer's stream, not the host, waits for what is under way."""
        if self._made.ready is not None:
            self._stream.let_consumer_wait(self._made.ready)
        return self._made.batch


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
                return cls(program.launcher, program.find("bring_slices"), program.find("finish_batch"), program)
            except CudaProgramError:
                return None
        return cls(namer.launch_here, 1, 2, None) if stream.launches_here else None


class _Span(NamedTuple):
    """A field of a batch in its block, as torch's `as_strided` takes it."""

    kind: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Plan:
    """Where everything lies in pinned memory and on the device, for batches of one kind.

    block:  short fields, once more under the last ids | arrays of the draw | large fields
    pinned: short fields, once more under the last ids | arrays of the draw | places of slices
    """

    def __init__(self, torch: Any, schema: Schema, draw: Draw, sources: RowSources, cuts: tuple[Cut, ...]) -> None:
        self._torch, self._schema = torch, schema
        self.table, self.cuts = sources.table, cuts
        self.described: tuple[Any, ...] = ()
        self.request = request = BatchRequestStruct()
        self._leading, count = draw.ids.shape, draw.ids.size
        self._size = 0
        _, observed, _, columns = sources.table.spans(count)
        columns = columns[: len(columns) - len(cuts)]  # not the cursors
        rest = max(first + _nbytes(shape, dtype) for shape, dtype, _, first in columns)
        starts = [(self._take(observed), self._take(rest)) for _ in range(1 if draw.last_ids is None else 2)]
        (request.observed, request.rest), (request.last_observed, request.last_rest) = starts[0], starts[-1]
        request.rows, request.column_count, request.task.fields = count, len(columns), len(cuts)
        request.lanes = schema.num_envs
        self._spans = self._short(columns, starts)
        self.arrays = [name for name in ("reward", "weights", "discount", "mask") if getattr(draw, name) is not None]
        request.copied_count = len(self.arrays)
        for copied, name in zip(request.copied, self.arrays, strict=False):
            array = getattr(draw, name)
            copied.bytes, copied.offset = array.nbytes, self._take(array.nbytes)
            shape = draw.ids.shape if name == "reward" else array.shape
            self._spans[name] = [self._span(array.dtype, shape, copied.offset)]
        request.task.head_bytes = self.pinned_bytes = self.block_bytes = self._size
        request.columns = address(sources.table.columns())
        leaves, firsts = schema.observation.leaves, [self._field(k, cut, count) for k, cut in enumerate(cuts)]
        large = zip(sources.large, firsts, strict=True)
        self._large = [
            (leaf, self._span(leaves[leaf].dtype, (2, *self._leading, *leaves[leaf].shape), first))
            for leaf, first in sorted(large)
        ]
        self._kinds = {span.kind for spans in self._spans.values() for span in spans} | {s.kind for _, s in self._large}
        slots = 1 << max(1, max([1, *(4 * count * window for *_, window in cuts)]) - 1).bit_length()
        self._scratch = (np.empty(slots * len(cuts), np.uint32), (RowPlaceStruct * count)())
        request.slots, request.slot_count = self._scratch[0].ctypes.data, slots
        request.found = ctypes.addressof(self._scratch[1])

    def _take(self, nbytes: int) -> int:
        first, self._size = self._size, self._size + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return first

    def _short(self, columns: Any, starts: list[tuple[int, int]]) -> dict[str, list[_Span]]:
        """Return where the columns of short fields lie, by the name of the batch's field; see `Rings.rows`."""

        def spans(chosen: Any, start: tuple[int, int]) -> list[_Span]:
            return [
                self._span(dtype, (*self._leading, *shape[1:]), (start[block] if _nbytes(shape, dtype) else 0) + first)
                for shape, dtype, block, first in chosen
            ]

        leaves, actions = len(self._schema.observation.leaves) - len(self.cuts), len(self._schema.action.leaves)
        flags, extras = 2 * leaves + actions, 2 * leaves + actions + 2
        rows, last = spans(columns, starts[0]), spans(columns, starts[-1])
        return {
            "obs": rows[0 : 2 * leaves : 2], "next_obs": last[1 : 2 * leaves : 2], "action": rows[2 * leaves : flags],
            "terminated": [last[flags]], "truncated": [last[flags + 1]], "extras": rows[extras:-2],
            "reward": [rows[-2]], "ended": [last[-1]],
        }  # fmt: skip

    def _field(self, k: int, cut: Cut, count: int) -> int:
        """Make room for a field in slices, on the device and for its places; return its first byte on the device."""
        source, task = self.request.source[k], self.request.task.field[k]
        task.outer, task.run_bytes, task.window = cut
        slices = 2 * count * task.window
        for name, nbytes in (("places", 8), ("positions", 4), ("repeats", 8)):
            setattr(source, name, self.pinned_bytes)
            self.pinned_bytes += -(-slices * nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        source.to, nbytes = self.block_bytes, slices * task.outer * task.run_bytes
        self.block_bytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return int(source.to)

    def _span(self, dtype: np.dtype[Any], shape: tuple[int, ...], first: int) -> _Span:
        kind = self._torch.from_numpy(np.empty(0, dtype)).dtype
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return _Span(kind, shape, strides, first // dtype.itemsize)

    def batch(self, draw: Draw, block: torch.Tensor) -> DeviceBatch:
        """Show a block as a batch."""
        whole = {kind: block.view(kind) for kind in self._kinds}
        fields = {
            name: [whole[kind].as_strided(shape, strides, offset) for kind, shape, strides, offset in spans]
            for name, spans in self._spans.items()
        }
        schema, sides = self._schema, (fields.pop("obs"), fields.pop("next_obs"))
        for leaf, (kind, shape, strides, offset) in self._large:
            for side, tensor in zip(sides, whole[kind].as_strided(shape, strides, offset).unbind(), strict=True):
                side.insert(leaf, tensor)
        return DeviceBatch(
            obs=schema.observation.build(sides[0]),
            next_obs=schema.observation.build(sides[1]),
            action=schema.action.build(fields.pop("action")),
            extras=schema.extras.build(fields.pop("extras")),
            ids=draw.ids,
            **{name: tensors[0] for name, tensors in fields.items()},
        )


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


class DeviceAssembler:
    """Puts batches of one memory together on a device.

    Attributes:
        behind: An event behind what was written beside the consumer's stream to blocks that nobody may see.
    """

    def __init__(
        self, torch: Any, stream: DeviceStream, schema: Schema, namer: SliceNamer, blocks: BlockPool, launcher: Launcher
    ) -> None:
        self._torch, self._stream, self._schema, self._namer, self._blocks = torch, stream, schema, namer, blocks
        self._launcher = launcher
        self.behind: Any = None
        self._heads: deque[StagingSlot] = deque()  # the one that was used last comes last
        self._plans: dict[Any, _Plan] = {}
        self._under_way: deque[tuple[Any, Any]] = deque()  # events, and what is read until they have passed
        self._lock = fork_safe(threading.RLock())

    @classmethod
    def of(
        cls, torch: Any, stream: DeviceStream, schema: Schema, namer: SliceNamer | None, blocks: BlockPool
    ) -> DeviceAssembler | None:
        """Return one, where a device and its compiler are there."""
        if namer is None or len(schema.observation.leaves) > MOST_DEVICE_FIELDS:
            return None
        launcher = Launcher.to(torch, stream, namer)
        return None if launcher is None else cls(torch, stream, schema, namer, blocks, launcher)

    def assemble(self, draw: Draw, store: Store, readable: Readable, *, ahead: bool) -> MadeBatch | None:
        """Have a batch put together; None if the device cannot do that by itself."""
        sources, last = store.sources(), draw.last_ids
        if draw.goals is not None or not draw.ids.size or (readable is None and sources.large):
            return None
        if any(array is not None and array.size != draw.ids.size for array in (last, draw.reward)):
            return None
        with left(self._lock):
            plan = self._plan(draw, sources)
            if plan is None or not self._describe(plan, sources, readable):
                return None
            stream, head = self._stream, self._free_head(plan.pinned_bytes)
            if ahead:
                stream.wait_for(stream.record_consumer())
            elif self.behind is not None:
                if not stream.has_passed(self.behind):
                    stream.let_consumer_wait(self.behind)
                self.behind = None
            head.read = _UNKNOWN  # until it is known: an interrupt may come
            user = self._blocks.claim(plan.block_bytes)
            arrays = self._fill(plan, draw, sources, head, stream.start_of(user))
            plan.request.stream = stream.number if ahead else stream.consumer()
            if not self._ask(plan.request, arrays[: 1 if last is None else 2], sources):
                return None
            event = head.read = stream.record() if ahead else stream.record_there()
            if ahead:
                self.behind = event
            self._let_go()
            self._under_way.append((event, (readable, sources.kept)))
            return MadeBatch(plan.batch(draw, self._blocks.see(user)), event if ahead else None)

    def _plan(self, draw: Draw, sources: RowSources) -> _Plan | None:
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
            if any(2 * draw.ids.size * window > _MOST_SLICES for *_, window in known):
                return None
            plan = self._plans[key] = _Plan(self._torch, self._schema, draw, sources, tuple(known))
            request, launcher = plan.request, self._launcher
            request.launch, request.bring, request.finish = launcher.function, launcher.bring, launcher.finish
            request.first_rows = max(_FEWEST_ROWS, request.rows // _SHARE)
        return plan

    def _describe(self, plan: _Plan, sources: RowSources, readable: Readable) -> bool:
        """Say where slices lie; False if the device cannot read one of them."""
        described = (readable, sources.first_ticks, *sources.records)
        before = plan.described
        if len(before) == len(described) and all(a is b for a, b in zip(before, described, strict=True)):
            return True
        request, plan.described = plan.request, ()
        for field, records in enumerate(sources.records):
            source, task = request.source[field], request.task.field[field]
            found = None if readable is None else readable.source(field)
            if found is None:
                return False
            task.base, starts = found
            source.starts, source.parts, source.part_count = address(starts), address(records), len(records)
            source.cursors = address(sources.cursors[field])
            source.are_named = isinstance(readable, PinnedSnapshot)
        request.most_blocks = _BLOCKS_ON_DEVICE if isinstance(readable, DeviceSnapshot) else _BLOCKS_OVER_BUS
        request.first_ticks, request.segments = address(sources.first_ticks), len(sources.first_ticks)
        request.ring_rows, plan.described = sources.ring_rows, described
        return True

    def _free_head(self, nbytes: int) -> StagingSlot:
        """Return pinned memory that the device has read, and does not read any more."""
        heads = self._heads
        read = heads[0].read if heads else None
        if read is _UNKNOWN:
            self._stream.wait_for_device()
            heads[0].read = None
        elif not heads or (read is not None and len(heads) < _MOST_HEADS and not self._stream.has_passed(read)):
            heads.appendleft(StagingSlot(self._stream, 0, nbytes))
        heads.rotate(-1)
        heads[-1].make_room(nbytes)
        return heads[-1]

    def _fill(self, plan: _Plan, draw: Draw, sources: RowSources, head: StagingSlot, start: int) -> list[Array]:
        """Say what to read and where to put it; return the arrays that the request names."""
        request = plan.request
        ids, request.last_ids = np.ascontiguousarray(draw.ids, np.int64), None
        request.ids, arrays = address(ids), [ids]
        if draw.last_ids is not None:
            arrays.append(np.ascontiguousarray(draw.last_ids, np.int64))
            request.last_ids = address(arrays[-1])
        for copied, name in zip(request.copied, plan.arrays, strict=False):
            arrays.append(np.ascontiguousarray(getattr(draw, name)))
            setattr(copied, "from", address(arrays[-1]))
        request.first_id, request.next_id = sources.held
        sources.table.columns()  # so that they are those of now
        request.head, request.block = head.host.data_ptr(), start
        return arrays

    def _ask(self, request: BatchRequestStruct, asked: list[Array], sources: RowSources) -> bool:
        """Call C for rows of some ids; False if a slice is not where the device can read it."""
        refused = self._namer.assemble(request)
        if refused is Refusal.BY_DRIVER and request.wrong == _NO_CONTEXT and self._launcher.program is not None:
            self._launcher.program.make_current()
            refused = self._namer.assemble(request)
        if refused is Refusal.BY_DRIVER:
            raise CudaProgramError(f"the CUDA driver refuses to put a batch together (error {request.wrong})")
        if refused is Refusal.NOT_HELD:
            for ids in asked:
                require_in_range(ids.reshape(-1), *sources.held)
            raise DamageError(f"rings of {sources.ring_rows} rows are too short for the ids held, {sources.held}")
        return refused is Refusal.NONE

    def _let_go(self) -> None:
        """Let go of what the device has read."""
        while self._under_way and self._stream.has_passed(self._under_way[0][0]):
            self._under_way.popleft()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(head.host.numel() for head in list(self._heads))

    def close(self) -> None:
        """Wait until the device has read everything."""
        with left(self._lock):
            for event, _ in self._under_way:
                self._stream.synchronize(event)
            self._under_way.clear()

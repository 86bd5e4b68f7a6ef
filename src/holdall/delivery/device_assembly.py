"""A batch in one or two launches: the device reads what it needs from pinned memory of the host by itself.

In:  draws, and rows whose small fields were copied into pinned memory.  Out: batches on the caller's own stream.
Invariant: the host never waits, but for pinned memory that it writes to again; nothing that a launch reads is changed
or unpinned before that launch is done. Draws that need more (goals, slices that are compressed) are left to others.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdall.batch import Batch, Draw
from holdall.delivery.batches import BlockPool, DrawnRows
from holdall.delivery.cuda_program import CudaProgramError
from holdall.delivery.device import CudaStream, DeviceScratch, StagingSlot
from holdall.delivery.device_loops import device_program
from holdall.native import Cut, SliceNamer
from holdall.schema import Array, Bytes, Schema
from holdall.storage import ALIGNMENT_BYTES, Places, Store, address

if TYPE_CHECKING:
    import torch

_MOST_FIELDS = 16
_MOST_BLOCKS = 4096
_THREADS = 256
_HEAD_BLOCKS = 64
_KEPT_PLANS = 32
_FIRST_HEAD_BYTES = 1 << 16


class _SlicedField(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("names", "places", "base", "unique", "to", "count", "moves", "window", "outer", "run_bytes")
    ]


class _Assembly(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("head_from", "head_to", "head_bytes", "fields")),
        ("field", _SlicedField * _MOST_FIELDS),
    ]


class PinnedRows:
    """Pinned memory that the small fields of one batch are copied into, piece by piece."""

    def __init__(self, stream: CudaStream) -> None:
        self._slot = StagingSlot(stream, 0, _FIRST_HEAD_BYTES)
        self._stream = stream
        self._wanted = 0
        self.used = 0

    @property
    def is_free(self) -> bool:
        """Whether the device has read what was here."""
        return self._slot.read is None or self._stream.has_passed(self._slot.read)

    def begin(self) -> None:
        """Start over, with room for as much as was wanted before."""
        self._slot.make_room(self._wanted)
        self.start, self.used = self._slot.host.data_ptr(), 0

    def take(self, nbytes: int) -> Bytes:
        """Return the next bytes; memory of its own where there is no room, which `offset` then moves here."""
        first = self.used
        self.used += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._wanted = max(self._wanted, self.used)
        if self.used > self._slot.array.nbytes:
            return np.empty(nbytes, np.uint8)
        piece: Bytes = self._slot.array[first : first + nbytes]
        return piece

    def had_room(self) -> bool:
        """Whether all that was taken is here."""
        return self.used <= self._slot.array.nbytes

    def copy(self, array: Array) -> Array:
        """Copy an array here, if it is not here yet."""
        if 0 <= address(array) - self.start < self._slot.array.nbytes:
            return array
        piece = self.take(array.nbytes)
        piece[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return piece.view(array.dtype).reshape(array.shape)

    def read_behind(self, event: Any) -> None:
        """Say behind which event the device has read all of it."""
        self._slot.read = event


class _Plan(NamedTuple):
    """Where the fields of batches of one kind lie, in the block on the device."""

    fields: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]  # dtype, shape, strides, offset
    small: list[int]  # observation leaves that are small


class DeviceAssembler:
    """Puts batches of one memory together on a CUDA device."""

    def __init__(self, torch: Any, stream: CudaStream, schema: Schema, namer: SliceNamer, blocks: BlockPool) -> None:
        self._torch, self._stream, self._schema, self._namer, self._blocks = torch, stream, schema, namer, blocks
        program = device_program(torch, stream.device)
        self._collect, self._stack = program.kernel("collect_slices"), program.kernel("stack_slices")
        self._heads: deque[PinnedRows] = deque()
        self._lock = threading.Lock()
        self._under_way: deque[tuple[Any, DrawnRows]] = deque()
        self._plans: dict[Any, _Plan] = {}
        self._scratch = DeviceScratch(stream)  # slices of a batch, each once, before they are stacked
        self._last_stream: Any = None
        self._task = _Assembly()

    @classmethod
    def of(
        cls, torch: Any, stream: Any, schema: Schema, namer: SliceNamer | None, blocks: BlockPool
    ) -> DeviceAssembler | None:
        """Return one, where a device and its compiler are there."""
        if not isinstance(stream, CudaStream) or namer is None or len(schema.observation.leaves) > _MOST_FIELDS:
            return None
        try:
            return cls(torch, stream, schema, namer, blocks)
        except CudaProgramError:
            return None

    def look_up(self, draw: Draw, store: Store) -> DrawnRows:
        """Read the rows of a draw, their small fields into pinned memory."""
        with self._lock:
            head = self._heads.popleft() if self._heads and self._heads[0].is_free else PinnedRows(self._stream)
        head.begin()
        return DrawnRows.of(draw, store, head.take)._replace(head=head)

    def give_back(self, head: PinnedRows, event: Any = None) -> None:
        """Let pinned memory be used again, once an event has passed."""
        head.read_behind(event)
        with self._lock:
            self._heads.append(head)

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch | None:
        """Put a batch together; None if the device cannot do that by itself."""
        head = drawn.head
        if head is None or draw.goals is not None or not head.had_room():
            return None
        with self._lock:
            small = self._small(draw, drawn, head)
            head_bytes, nbytes, sizes = head.used, head.used, list[tuple[int, int, int]]()
            collected = 0
            for field, leaf in enumerate(drawn.rows.large):
                unique = self._field(self._task.field[field], drawn, field, head)
                if unique is None:
                    return None
                size = 2 * draw.ids.size * self._schema.observation.leaves[leaf].nbytes
                sizes.append((nbytes, collected, unique))
                nbytes += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                collected += -(-unique // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if not head.had_room():
                return None
            block = self._blocks.take(nbytes)
            self._scratch.make_room(collected)
            if drawn.on_device is not None:  # slices may still be on their way there
                self._stream.let_consumer_wait(self._stream.record())
            self._launch(block, head, head_bytes, sizes)
            event = self._stream.record_consumer()
            head.read_behind(event)
            self._heads.append(head)
            while self._under_way and self._stream.has_passed(self._under_way[0][0]):
                self._under_way.popleft()
            if sizes:
                self._under_way.append((event, drawn))
            return self._batch(draw, drawn, block, self._plan(draw, drawn, head, small, sizes))

    def _small(self, draw: Draw, drawn: DrawnRows, head: PinnedRows) -> list[Array]:
        """All small fields of a batch, in pinned memory and in the order of `_batch`."""
        rows, last = drawn.rows, drawn.last or drawn.rows
        fields = [pair[0] for pair in rows.small.values()] + [pair[1] for pair in last.small.values()]
        reward = rows.reward if draw.reward is None else head.copy(draw.reward)
        fields += [*rows.action, *rows.extras, reward, last.terminated, last.truncated]
        return fields + [head.copy(a) for a in (draw.weights, draw.discount, draw.mask) if a is not None]

    def _field(self, task: _SlicedField, drawn: DrawnRows, field: int, head: PinnedRows) -> int | None:
        """Name the slices of a large field, and say where they are; return the bytes that collecting them takes."""
        places, namer = drawn.rows.places, self._namer
        cut = None if places is None else namer.cut(places, field)
        if places is None or cut is None:
            return None
        outer, run_bytes, window = cut
        count, slice_bytes = len(places.segment), outer * run_bytes
        names = head.take(8 * count * window).view(np.int32).reshape(2, count, window)
        there = None if drawn.on_device is None else drawn.on_device.fields.get(field)
        unique = self._name(places, drawn, field, cut, names, None if there is None else there.bases)
        task.names, task.count, task.moves = address(names), unique, 2 * count * window
        task.window, task.outer, task.run_bytes, task.places, task.unique = window, outer, run_bytes, 0, 0
        if there is not None:
            task.base = there.slices.data_ptr()
            return 0
        if drawn.pinned is None:
            return None
        where = head.take(8 * unique).view(np.int64)
        if not namer.where(drawn.pinned.starts[field], slice_bytes, 1, where):
            return None
        task.places, task.base = address(where), drawn.pinned.span.data_ptr()
        return unique * slice_bytes if window > 1 else 0

    def _name(self, places: Places, drawn: DrawnRows, field: int, cut: Cut, names: Any, bases: Any) -> int:
        last, namer = None if drawn.last is None else drawn.last.places, self._namer
        namer.begin(0 if bases is not None else names.size)
        if last is None:
            return namer.name(places, field, cut, names[0], names[1], bases)
        namer.name(places, field, cut, names[0], None, bases)
        return namer.name(last, field, cut, None, names[1], bases)

    def _launch(
        self, block: torch.Tensor, head: PinnedRows, head_bytes: int, sizes: list[tuple[int, int, int]]
    ) -> None:
        """Have the device read everything into the block, on the caller's stream."""
        task, start, fields = self._task, block.data_ptr(), len(sizes)
        task.head_from, task.head_to, task.head_bytes, task.fields = head.start, start, head_bytes, fields
        scratch = self._scratch.memory.data_ptr()
        for described, (first, collected, unique) in zip(task.field, sizes, strict=False):
            described.to, described.unique = start + first, scratch + collected if unique else 0
        stream = self._torch.cuda.current_stream(self._stream.device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        if any(unique for *_, unique in sizes):
            most = max(task.field[i].count for i in range(fields))
            self._collect((min(_MOST_BLOCKS, most), fields), (_THREADS, 1), stream.cuda_stream, task)
        most = max([_HEAD_BLOCKS, *(task.field[i].moves for i in range(fields))])
        self._stack((min(_MOST_BLOCKS, most), fields + 1), (_THREADS, 1), stream.cuda_stream, task)

    def _plan(
        self, draw: Draw, drawn: DrawnRows, head: PinnedRows, small: list[Array], sizes: list[tuple[int, int, int]]
    ) -> _Plan:
        """Return where every field of such a batch lies."""
        reward = small[-1].dtype if draw.reward is None else draw.reward.dtype
        key = (draw.ids.shape, drawn.rows.large, drawn.last is None, draw.discount is None, draw.mask is None, reward,
               drawn.rows.reward.dtype, tuple(first for first, *_ in sizes))  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            leading, leaves = draw.ids.shape, self._schema.observation.leaves
            of_draw = 1 + (draw.discount is not None) + (draw.mask is not None)
            fields = []
            for i, array in enumerate(small):
                shape = array.shape if i >= len(small) - of_draw else (*leading, *array.shape[1:])
                fields.append(self._span(array.dtype, shape, address(array) - head.start))
            for leaf, (first, *_) in zip(drawn.rows.large, sizes, strict=True):
                fields.append(self._span(leaves[leaf].dtype, (2, *leading, *leaves[leaf].shape), first))
            plan = _Plan(fields, [i for i in range(len(leaves)) if i not in drawn.rows.large])
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _span(self, dtype: np.dtype[Any], shape: tuple[int, ...], first: int) -> Any:
        kind = self._torch.from_numpy(np.empty(0, dtype)).dtype
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return kind, shape, strides, first // dtype.itemsize

    def _batch(self, draw: Draw, drawn: DrawnRows, block: torch.Tensor, plan: _Plan) -> Batch:
        schema, tensors = self._schema, list[Any]()
        seen: dict[Any, torch.Tensor] = {}
        for kind, shape, strides, offset in plan.fields:
            whole = seen.get(kind)
            if whole is None:
                whole = seen[kind] = block.view(kind)
            tensors.append(whole.as_strided(shape, strides, offset))
        parts, sides = iter(tensors), (dict[int, Any](), dict[int, Any]())
        for side in sides:
            side.update((leaf, next(parts)) for leaf in plan.small)
        large = tensors[len(tensors) - len(drawn.rows.large) :]
        for leaf, pair in zip(drawn.rows.large, large, strict=True):
            sides[0][leaf], sides[1][leaf] = pair.unbind()
        leaves = range(len(schema.observation.leaves))
        return Batch(
            obs=schema.observation.build([sides[0][leaf] for leaf in leaves]),
            next_obs=schema.observation.build([sides[1][leaf] for leaf in leaves]),
            action=schema.action.build([next(parts) for _ in schema.action.leaves]),
            extras=schema.extras.build([next(parts) for _ in schema.extras.leaves]),
            reward=next(parts),
            terminated=next(parts),
            truncated=next(parts),
            ids=draw.ids,
            weights=next(parts),
            discount=None if draw.discount is None else next(parts),
            mask=None if draw.mask is None else next(parts),
        )

    def close(self) -> None:
        """Wait until the device has read everything."""
        with self._lock:
            for event, _ in self._under_way:
                event.synchronize()
            self._under_way.clear()

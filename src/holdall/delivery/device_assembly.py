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
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.batch import Batch, Draw
from holdall.delivery.batches import DrawnRows
from holdall.delivery.cuda_program import CudaProgramError
from holdall.delivery.device import CudaStream, StagingSlot
from holdall.delivery.device_loops import device_program
from holdall.native import Cut, SliceNamer
from holdall.schema import Array, Bytes, Schema
from holdall.storage import ALIGNMENT_BYTES, Rows, Store, address

if TYPE_CHECKING:
    import torch

_MOST_FIELDS = 16
_MOST_BLOCKS = 4096
_THREADS = 256
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

    @property
    def has_room(self) -> bool:
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


class DeviceAssembler:
    """Puts batches of one memory together on a CUDA device."""

    def __init__(self, torch: Any, stream: CudaStream, schema: Schema, namer: SliceNamer) -> None:
        self._torch, self._stream, self._schema, self._namer = torch, stream, schema, namer
        program = device_program(torch, stream.device)
        self._collect, self._stack = program.kernel("collect_slices"), program.kernel("stack_slices")
        self._heads: deque[PinnedRows] = deque()
        self._lock = threading.Lock()
        self._under_way: deque[tuple[Any, DrawnRows]] = deque()
        self._kinds: dict[np.dtype[Any], torch.dtype] = {}

    @classmethod
    def of(cls, torch: Any, stream: Any, schema: Schema, namer: SliceNamer | None) -> DeviceAssembler | None:
        """Return one, where a device and its compiler are there."""
        if not isinstance(stream, CudaStream) or namer is None or len(schema.observation.leaves) > _MOST_FIELDS:
            return None
        try:
            return cls(torch, stream, schema, namer)
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
        if head is None or draw.goals is not None:
            return None
        rows, last = drawn.rows, drawn.last or drawn.rows
        with self._lock:
            task, kept = _Assembly(), list[Any]()
            both: dict[int, torch.Tensor] = {}
            for field, leaf in enumerate(rows.large):
                made = self._field(task.field[field], draw, drawn, field, leaf, head, kept)
                if made is None:
                    return None
                both[leaf] = made
            small = self._small(draw, rows, last, head)
            if not head.has_room:
                return None
            return self._launched(task, draw, drawn, head, both, small, kept)

    def _small(self, draw: Draw, rows: Rows, last: Rows, head: PinnedRows) -> list[tuple[Array, tuple[int, ...]]]:
        """All small fields of a batch, in pinned memory and in the order of `_batch`, with the shapes they get there."""
        fields = [pair[0] for pair in rows.small.values()] + [pair[1] for pair in last.small.values()]
        fields += [*rows.action, *rows.extras, rows.reward if draw.reward is None else draw.reward]
        fields += [last.terminated, last.truncated]
        shaped = [(head.copy(array), (*draw.ids.shape, *array.shape[1:])) for array in fields]
        of_draw = [array for array in (draw.weights, draw.discount, draw.mask) if array is not None]
        return shaped + [(head.copy(array), array.shape) for array in of_draw]

    def _field(
        self, task: _SlicedField, draw: Draw, drawn: DrawnRows, field: int, leaf: int, head: PinnedRows, kept: list[Any]
    ) -> torch.Tensor | None:
        """Name the slices of a large field, and say where they are; return where the device puts both observations."""
        places, namer, torch = drawn.rows.places, self._namer, self._torch
        cut = None if places is None else namer.cut(places, field)
        if places is None or cut is None:
            return None
        outer, run_bytes, window = cut
        count, slice_bytes = len(places.segment), outer * run_bytes
        names = head.take(8 * count * window).view(np.int32).reshape(2, count, window)
        there = None if drawn.on_device is None else drawn.on_device.fields.get(field)
        unique = self._name(drawn, field, cut, names, None if there is None else there.bases)
        task.names, task.count, task.moves = address(names), unique, 2 * count * window
        task.window, task.outer, task.run_bytes = window, outer, run_bytes
        if there is not None:
            task.base = there.slices.data_ptr()
        else:
            if drawn.pinned is None:
                return None
            where = head.take(8 * unique).view(np.int64)
            if not namer.where(drawn.pinned.starts[field], slice_bytes, 1, where):
                return None
            task.places, task.base = address(where), drawn.pinned.span.data_ptr()
            if window > 1:
                kept.append(scratch := torch.empty(unique * slice_bytes, dtype=torch.uint8, device=self._stream.device))
                task.unique = scratch.data_ptr()
        described = self._schema.observation.leaves[leaf]
        shape = (2, *draw.ids.shape, *described.shape)
        both: torch.Tensor = torch.empty(shape, dtype=self._kind(described.dtype), device=self._stream.device)
        task.to = both.data_ptr()
        return both

    def _name(self, drawn: DrawnRows, field: int, cut: Cut, names: Any, bases: Any) -> int:
        first, last = drawn.rows.places, None if drawn.last is None else drawn.last.places
        namer = self._namer
        namer.begin(0 if bases is not None else names.size)
        if last is None:
            return namer.name(first, field, cut, names[0], names[1], bases)  # type: ignore[arg-type]  # it is there
        namer.name(first, field, cut, names[0], None, bases)  # type: ignore[arg-type]
        return namer.name(last, field, cut, None, names[1], bases)

    def _launched(
        self, task: _Assembly, draw: Draw, drawn: DrawnRows, head: PinnedRows, both: dict[int, torch.Tensor],
        small: list[tuple[Array, tuple[int, ...]]], kept: list[Any],
    ) -> Batch:  # fmt: skip
        torch, device = self._torch, self._stream.device
        block = torch.empty(head.used, dtype=torch.uint8, device=device)
        task.head_from, task.head_to, task.head_bytes, task.fields = head.start, block.data_ptr(), head.used, len(both)
        stream = torch.cuda.current_stream(device)
        handle = stream.cuda_stream
        if drawn.on_device is not None:
            self._stream.let_consumer_wait(self._stream.record())  # slices that are still on their way there
        if kept:
            most = max(task.field[i].count for i in range(len(both)))
            self._collect((min(_MOST_BLOCKS, max(1, most)), len(both)), (_THREADS, 1), handle, task)
        most = max([task.field[i].moves for i in range(len(both))], default=64)
        self._stack((min(_MOST_BLOCKS, max(1, most)), len(both) + 1), (_THREADS, 1), handle, task)
        event = stream.record_event()
        head.read_behind(event)
        self._heads.append(head)
        while self._under_way and self._stream.has_passed(self._under_way[0][0]):
            self._under_way.popleft()
        if both:
            self._under_way.append((event, drawn))
        return self._batch(draw, block, head.start, both, small)

    def _batch(
        self, draw: Draw, block: torch.Tensor, start: int, both: dict[int, torch.Tensor], small: list[Array]
    ) -> Batch:
        schema, tensors = self._schema, []
        seen: dict[Any, torch.Tensor] = {}
        for array, shape in small:
            kind = self._kind(array.dtype)
            if kind not in seen:
                seen[kind] = block.view(kind)
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            tensors.append(seen[kind].as_strided(shape, strides, (address(array) - start) // array.itemsize))
        small_leaves = [leaf for leaf in range(len(schema.observation.leaves)) if leaf not in both]
        parts = iter(tensors)
        obs, next_obs = ({leaf: next(parts) for leaf in small_leaves} for _ in range(2))
        for leaf, pair in both.items():
            obs[leaf], next_obs[leaf] = pair[0], pair[1]
        leaves = range(len(schema.observation.leaves))
        return Batch(
            obs=schema.observation.build([obs[leaf] for leaf in leaves]),
            next_obs=schema.observation.build([next_obs[leaf] for leaf in leaves]),
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

    def _kind(self, dtype: np.dtype[Any]) -> torch.dtype:
        kind = self._kinds.get(dtype)
        if kind is None:
            kind = self._kinds[dtype] = self._torch.from_numpy(np.empty(0, dtype)).dtype
        return kind

    def close(self) -> None:
        """Wait until the device has read everything."""
        with self._lock:
            for event, _ in self._under_way:
                event.synchronize()
            self._under_way.clear()

"""The loops of a store on a device: ticks into rings, rows of rings into a batch.

In:  fields in rings on one device, and tensors there.  Out: rows there.
Invariant: `CudaLoops` and `TorchLoops` write and read the same bits. The first launches one kernel for all fields and
waits for nothing; the second, see `torch_loops`, serves devices that have no CUDA compiler, and tests.

Tick t lies in slot t modulo the number of slots, which is one more than the ticks that are held: behind the newest tick
stands its next observation, until the next tick shows whether it continues from there. Where it does not, the next
observation moves to the pool of its field, and `apart` says to which place. Of windows only the newest slice lies in
the ring, see `DeviceWindow`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.batch_layout import KEPT_BLOCKS, BlockLayout, DeviceBlock
from holdall.delivery.cuda_program import CudaProgram
from holdall.delivery.device import stream_to

if TYPE_CHECKING:
    import torch

SLACK_TICKS = 4
"""Ticks that the device may lag behind before the host waits, if every lane ended an episode in each of them."""
_POOLED_SHARE = 64
"""A pool begins with a place for every so many rows."""
_MOST_CHUNKS = 32
TERMINATED, TRUNCATED, INVALID = 1, 2, 4
"""Bits of a flag byte."""
MOST_FIELDS = 24
_WARP = 32
_ROWS_A_BLOCK = 8
_WIDE_BYTES = 2048
"""Rows from this size on are copied by a whole block of threads."""
_MOST_THREADS = 256
_COPIED_AT_ONCE_BYTES = 16
_WORD_BYTES = 8
_NO_CALL = -1
_KEPT_LAYOUTS = 4
"""Kinds of batches whose blocks are kept."""


class ApartPool:
    """Next observations of one field that no tick continues, and a queue of the places that are free.

    Attributes:
        chunks: The first has `first_chunk` places, each later one as many as all before.
        table: Where the chunks are.
        apart: By cell, the place in the pool, or -1.
        queue: Places that are free, from counts[0] to counts[1], modulo its length.
    """

    def __init__(self, torch: Any, device: torch.device, row_bytes: int, lanes: int, cells: int) -> None:
        self._torch, self._device, self._row_bytes = torch, device, row_bytes
        self.cells = cells
        self.first_chunk = self.places = first_places(lanes, cells)
        self.chunks = [self._new_chunk(self.places)]
        self.table = torch.zeros(_MOST_CHUNKS, dtype=torch.int64, device=device)
        self.table[0] = self.chunks[0].data_ptr()
        self.apart = torch.full((cells,), -1, dtype=torch.int32, device=device)
        self._fill_queue(torch.arange(self.places, dtype=torch.int32, device=device))

    def _new_chunk(self, places: int) -> torch.Tensor:
        chunk: torch.Tensor = self._torch.empty((places, self._row_bytes), dtype=self._torch.uint8, device=self._device)
        return chunk

    def _fill_queue(self, free: torch.Tensor) -> None:
        """Let the queue hold these places, with room for all that there are."""
        torch, length = self._torch, 1 << (self.places - 1).bit_length()
        self.queue = torch.zeros(length, dtype=torch.int32, device=self._device)
        self.queue[: len(free)] = free
        self.counts = torch.tensor([0, len(free), length - 1, 0], dtype=torch.int32, device=self._device)

    def free(self) -> torch.Tensor:
        """Return the places that are free; waits for the device."""
        taken, given, mask, _ = (number & 0xFFFFFFFF for number in self.counts.tolist())
        positions = self._torch.arange((given - taken) & 0xFFFFFFFF, device=self._device) + taken
        places: torch.Tensor = self.queue[positions & mask]
        return places

    def grow(self) -> int:
        """Add as many places as there are; return how many are free. The device is at rest."""
        free, new = self.free(), self.places
        self.chunks.append(self._new_chunk(new))
        self.table[len(self.chunks) - 1] = self.chunks[-1].data_ptr()
        self.places += new
        added = self._torch.arange(new, 2 * new, dtype=self._torch.int32, device=self._device)
        self._fill_queue(self._torch.cat([free, added]))
        return len(free) + new

    def put(self, cells: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep rows for cells that have none. The device is at rest."""
        while len(free := self.free()) < len(rows):
            self.grow()
        self.write(free[: len(rows)].long(), rows)
        self.apart[cells] = free[: len(rows)]
        self._fill_queue(free[len(rows) :])

    def write(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to places."""
        for here, within, chunk in self._chunks_of(places):
            chunk[within] = rows[here]

    def read(self, places: torch.Tensor) -> torch.Tensor:
        """Return the rows at places."""
        rows = self.chunks[0].new_empty((len(places), self._row_bytes))
        for here, within, chunk in self._chunks_of(places):
            rows[here] = chunk[within]
        return rows

    def _chunks_of(self, places: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return, chunk by chunk, which places lie in it, and where there."""
        first = 0
        for chunk in self.chunks:
            here = (places >= first) & (places < first + len(chunk))
            yield here, places[here] - first, chunk
            first += len(chunk)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in (*self.chunks, self.table, self.queue, self.counts, self.apart))


def first_places(lanes: int, cells: int) -> int:
    """Return how many places a pool begins with."""
    return min(max(SLACK_TICKS * lanes, cells // _POOLED_SHARE), max(cells, lanes))


class DeviceWindow(NamedTuple):
    """How an observation is cut, if each is the last one without its first slice and with a new one.

    Where a tick does not continue so, its observation lies whole in the pool.
    """

    slices: int  # of an observation
    outer: int
    run_bytes: int
    slots: int  # of the ring, which reaches back to slices of older ticks
    whole: torch.Tensor  # by cell: the place in the pool, or minus the ticks since one that has one, at most slices - 1
    newest: torch.Tensor  # (2 * lanes, row bytes): next observations of the newest tick, by its number modulo 2


class DeviceField(NamedTuple):
    """One field in a ring."""

    rows: torch.Tensor  # (slots * lanes, row bytes), bytes; of a window the newest slice
    kind: torch.dtype
    shape: tuple[int, ...]
    pool: ApartPool | None  # of an observation
    window: DeviceWindow | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a batch."""
        return int(self.rows.shape[1]) * (1 if self.window is None else self.window.slices)


class RingsOnDevice(NamedTuple):
    """All that the loops work on."""

    slots: int
    lanes: int
    fields: list[DeviceField]  # observations first
    flags: torch.Tensor  # (slots * lanes,), bytes
    counts: torch.Tensor  # next tick, first tick, calls; for draws inside a CUDA graph
    free: torch.Tensor  # memory of the host: the tick that was begun last, and by field how many places were free then


class TickOnDevice(NamedTuple):
    """One tick, lanes first; or several, one after another."""

    rows: Sequence[torch.Tensor]  # of every field
    next_obs: Sequence[torch.Tensor]
    terminated: torch.Tensor
    truncated: torch.Tensor
    valid: torch.Tensor | None


class PackedTicks(NamedTuple):
    """Some ticks in one piece of memory on the device: every field of all of them, one after another."""

    memory: torch.Tensor  # bytes
    firsts: NDArray[np.int64]  # where rows of every field begin, next observations, and flags
    ticks: int


class RowsOnDevice(NamedTuple):
    """Rows of a batch."""

    ids: torch.Tensor
    rows: list[torch.Tensor]  # of every field
    next_obs: list[torch.Tensor]
    terminated: torch.Tensor
    truncated: torch.Tensor
    ones: torch.Tensor  # float32: weights of rows that all weigh the same


class DeviceLoops(Protocol):
    """What writes and reads rings."""

    is_one_step: bool
    """Whether an interrupt finds a tick written or not; otherwise the same tick is written once more after one."""

    def write(self, number: int, tick: TickOnDevice, *, has_previous: bool, ticks: int = 1) -> None:
        """Write a tick, or several. Every pool has a free place for every lane and tick, and two for a window."""

    def write_packed(self, number: int, packed: PackedTicks, *, has_previous: bool) -> None:
        """Write some ticks whose fields lie in one piece of memory."""

    def restore(self, number: int, rows: Mapping[int, torch.Tensor], ticks: int, *, has_previous: bool) -> None:
        """Write observations, by field, of ticks that were saved; their next observations follow otherwise."""

    def read(self, ids: torch.Tensor, last_ids: torch.Tensor | None) -> RowsOnDevice:
        """Read rows that are held; next observations and flags under `last_ids`, if they are others."""

    def read_at(self, count: int, ids: int, last_ids: int, owner: torch.Tensor) -> RowsOnDevice:
        """The same for ids at addresses in a tensor; the rows' own ids are not wanted."""

    def draw(self, count: int, seed: int) -> RowsOnDevice:
        """Draw rows, every valid one with the same probability, and read them."""

    def draw_ids(self, count: int, seed: int) -> torch.Tensor:
        """Draw ids as `draw` does, and read nothing."""

    def attach(self, rings: RingsOnDevice) -> None:
        """Work on these rings from now on, some of which were moved."""

    def keep(self, batches: int) -> None:
        """Keep memory for so many batches in use."""


def device_program(torch: Any, device: torch.device) -> CudaProgram:
    """Return the kernels of native/device.cu for a device."""
    return CudaProgram(torch, device, (resources.files("holdall.native") / "device.cu").read_text(encoding="utf-8"))


_FIELD_WORDS = (
    "ring", "row_bytes", "is_observed", "source", "next_source", "source_stride", "next_source_stride",
    "target", "next_target", "apart", "pool", "queue", "chunks", "first_chunk",
    "slots", "window", "outer", "run_bytes", "whole", "newest",
)  # fmt: skip


class _Field(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _FIELD_WORDS]


class _Task(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "counts", "free", "slots", "lanes", "tick", "ticks", "has_previous", "fields", "rows", "ids", "last_ids",
            "draws", "call", "seed", "flags", "terminated", "truncated", "valid", "to_terminated", "to_truncated",
            "to_ones",
        )),
        ("field", _Field * MOST_FIELDS),
    ]  # fmt: skip


class CudaLoops:
    """One kernel for all fields of a tick, and one for all fields of a batch."""

    is_one_step = True

    def __init__(self, torch: Any, device: torch.device) -> None:
        self._torch, self._device = torch, device
        program = device_program(torch, device)
        self._write_ticks, self._gather_rows = program.kernel("write_ticks"), program.kernel("gather_rows")
        self._count_call = program.kernel("count_call")
        self._memory = stream_to(torch, device)
        self._last_stream = -1
        self._task = _Task()
        self._words = np.frombuffer(memoryview(self._task).cast("B"), np.int64)
        self._layouts: dict[tuple[int, int], BlockLayout] = {}
        self._most_blocks = KEPT_BLOCKS

    def attach(self, rings: RingsOnDevice) -> None:
        """See `DeviceLoops`."""
        self._rings, fields, task = rings, rings.fields, self._task
        if task.fields != len(fields):
            self._layouts.clear()
        first, width = _Task.field.offset // _WORD_BYTES, ctypes.sizeof(_Field) // _WORD_BYTES
        at = {name: first + i + width * np.arange(len(fields)) for i, name in enumerate(_FIELD_WORDS)}
        observed = sum(field.pool is not None for field in fields)
        self._sources, self._strides = (
            np.concatenate([at[name], at[f"next_{name}"][:observed]]) for name in ("source", "source_stride")
        )
        self._row_bytes = np.array([field.row_bytes for field in (*fields, *fields[:observed])], np.int64)
        flags = [_word("to_terminated"), _word("to_truncated"), _word("to_ones"), _word("ids")]
        self._targets = np.concatenate([at["target"], at["next_target"][:observed], flags])
        task.counts, task.free, task.flags = (t.data_ptr() for t in (rings.counts, rings.free, rings.flags))
        task.slots, task.lanes, task.fields = rings.slots, rings.lanes, len(fields)
        for described, field in zip(task.field, fields, strict=False):
            self._describe(described, field)
        widest = max(field.row_bytes for field in fields)
        warps = -(-widest // _COPIED_AT_ONCE_BYTES // _WARP)
        self._block = (min(_MOST_THREADS, warps * _WARP), 1) if widest >= _WIDE_BYTES else (_WARP, _ROWS_A_BLOCK)

    def _describe(self, described: _Field, field: DeviceField) -> None:
        described.ring, described.row_bytes = field.rows.data_ptr(), field.row_bytes
        described.slots, described.window = self._rings.slots, 1
        if (pool := field.pool) is not None:
            described.is_observed, described.first_chunk = 1, pool.first_chunk
            described.apart, described.pool = pool.apart.data_ptr(), pool.counts.data_ptr()
            described.queue, described.chunks = pool.queue.data_ptr(), pool.table.data_ptr()
        if (window := field.window) is not None:
            described.window, described.outer, described.run_bytes = window.slices, window.outer, window.run_bytes
            described.slots = window.slots
            described.whole, described.newest = window.whole.data_ptr(), window.newest.data_ptr()

    def write(self, number: int, tick: TickOnDevice, *, has_previous: bool, ticks: int = 1) -> None:
        """See `DeviceLoops`."""
        words, task, given = self._words, self._task, (*tick.rows, *tick.next_obs)
        words[self._sources] = [tensor.data_ptr() for tensor in given]
        words[self._strides] = [tensor.stride(0) * tensor.itemsize for tensor in given]
        task.terminated, task.truncated = tick.terminated.data_ptr(), tick.truncated.data_ptr()
        task.valid = 0 if tick.valid is None else tick.valid.data_ptr()
        self._write(number, ticks, has_previous, task.fields + 1)

    def write_packed(self, number: int, packed: PackedTicks, *, has_previous: bool) -> None:
        """See `DeviceLoops`."""
        words, task, where = self._words, self._task, packed.firsts + packed.memory.data_ptr()
        words[self._sources], words[self._strides] = where[:-2], self._row_bytes
        task.terminated, task.truncated, task.valid = int(where[-2]), int(where[-1]), 0
        self._write(number, packed.ticks, has_previous, task.fields + 1)

    def restore(self, number: int, rows: Mapping[int, torch.Tensor], ticks: int, *, has_previous: bool) -> None:
        """See `DeviceLoops`."""
        self._words[self._sources] = 0
        for i, tensor in rows.items():
            self._task.field[i].source = tensor.data_ptr()
            self._task.field[i].source_stride = tensor.stride(0) * tensor.itemsize
        self._write(number, ticks, has_previous, self._task.fields)

    def _write(self, number: int, ticks: int, has_previous: bool, fields: int) -> None:
        self._task.tick, self._task.ticks, self._task.has_previous = number, ticks, has_previous
        self._launch(self._write_ticks, self._rings.lanes, fields)

    def read(self, ids: torch.Tensor, last_ids: torch.Tensor | None) -> RowsOnDevice:
        """See `DeviceLoops`."""
        return self.read_at(len(ids), ids.data_ptr(), 0 if last_ids is None else last_ids.data_ptr(), ids)._replace(
            ids=ids
        )

    def read_at(self, count: int, ids: int, last_ids: int, owner: torch.Tensor) -> RowsOnDevice:
        """See `DeviceLoops`."""
        self._task.draws = 0
        return self._read(count, ids, last_ids)

    def draw(self, count: int, seed: int) -> RowsOnDevice:
        """See `DeviceLoops`; inside a CUDA graph every replay draws others."""
        self._begin_draw(seed)
        return self._read(count, 0, 0)

    def draw_ids(self, count: int, seed: int) -> torch.Tensor:
        """See `DeviceLoops`."""
        self._begin_draw(seed)
        ids: torch.Tensor = self._torch.empty(count, dtype=self._torch.int64, device=self._device)
        task = self._task
        self._words[self._targets] = 0
        task.rows, task.ids, task.last_ids, task.fields = count, ids.data_ptr(), 0, 0
        self._launch(self._gather_rows, count, 1)
        task.fields = len(self._rings.fields)
        return ids

    def _begin_draw(self, seed: int) -> None:
        """Have the next launch draw."""
        task = self._task
        task.draws, task.call, task.seed = 1, 0, seed
        if self._torch.cuda.is_current_stream_capturing():
            task.call = _NO_CALL
            self._count_call((1, 1), (1, 1), self._stream(), ctypes.c_int64(self._rings.counts.data_ptr()))

    def _read(self, count: int, ids: int, last_ids: int) -> RowsOnDevice:
        """Read rows of ids at an address, or of ids that are drawn now."""
        block, task = self._block_for(count), self._task
        self._words[self._targets] = block.starts
        task.ids = ids or task.ids
        task.rows, task.last_ids = count, last_ids
        if count:
            self._launch(self._gather_rows, count, task.fields + 1)
        found, fields = [tensor.data for tensor in block.tensors], len(self._rings.fields)
        *next_obs, terminated, truncated, ones, drawn = found[fields:]
        return RowsOnDevice(drawn, found[:fields], next_obs, terminated, truncated, ones)

    def _block_for(self, count: int) -> DeviceBlock:
        """Return memory for a batch that nobody else can see; blocks are used again on the same stream alone."""
        if self._torch.cuda.is_current_stream_capturing():
            return DeviceBlock(self._memory, _row_layout(self._torch, self._rings.fields, count))
        key = (count, self._memory.current())
        layout = self._layouts.pop(key, None) or _row_layout(self._torch, self._rings.fields, count)
        self._layouts[key] = layout
        if len(self._layouts) > _KEPT_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]  # the kind that was not used for longest
        return layout.free_block(self._memory, self._most_blocks)

    def keep(self, batches: int) -> None:
        """See `DeviceLoops`."""
        self._most_blocks = max(self._most_blocks, batches + 1)

    def _launch(self, kernel: Any, rows: int, fields: int) -> None:
        kernel((-(-rows // self._block[1]), fields), self._block, self._stream(), self._task)

    def _stream(self) -> int:
        """Return the caller's stream, which goes on when the one used before it is done with the rings."""
        number = self._memory.current()
        if number == self._last_stream or self._torch.cuda.is_current_stream_capturing():
            return number
        self._last_stream = number
        return self._memory.consumer()


def _word(name: str) -> int:
    return int(getattr(_Task, name).offset) // _WORD_BYTES


def _row_layout(torch: Any, fields: list[DeviceField], count: int) -> BlockLayout:
    """Lay out batches of so many rows: rows, next observations, flags, weights, ids."""
    layout = BlockLayout()
    for field in (*fields, *(field for field in fields if field.pool is not None)):
        layout.spans.append(layout.add(field.kind, (count, *field.shape)))
    layout.spans += [layout.add(kind, (count,)) for kind in (torch.bool, torch.bool, torch.float32, torch.int64)]
    return layout


def typed_rows(rows: torch.Tensor, kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return bytes as elements of a dtype; a field may have none, which torch does not see as another dtype."""
    return rows.view(kind).view(shape) if rows.numel() else rows.new_empty(shape, dtype=kind)

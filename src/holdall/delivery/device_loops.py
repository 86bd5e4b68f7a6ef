"""The two loops of a store on a device: a tick into rings, rows of rings into a batch.

In:  fields in rings on one device, and tensors there.  Out: rows there.
Invariant: `CudaLoops` and `TorchLoops` write and read the same bits. The first launches one kernel for all fields and
waits for nothing; the second serves devices that have no CUDA compiler, and tests.

Tick t lies in slot t modulo the number of slots, which is one more than the ticks that are held: behind the newest tick
stands its next observation, until the next tick shows whether it continues from there. Where it does not, the next
observation moves to the pool of its field, and `apart` says to which place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from holdall.delivery.cuda_program import CudaProgram, CudaProgramError

if TYPE_CHECKING:
    import torch

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


class Pool(Protocol):
    """Next observations of one field that no tick continues."""

    first_chunk: int
    chunks: list[torch.Tensor]  # the first has `first_chunk` places, each later one as many as all before
    table: torch.Tensor  # where the chunks are
    apart: torch.Tensor  # by cell: the place in the pool, or -1
    queue: torch.Tensor  # places that are free, from counts[0] to counts[1], modulo its length
    counts: torch.Tensor


class DeviceField(NamedTuple):
    """One field in a ring."""

    rows: torch.Tensor  # (slots * lanes, row bytes), bytes
    kind: torch.dtype
    shape: tuple[int, ...]
    pool: Pool | None  # of an observation


class RingsOnDevice(NamedTuple):
    """All that the loops work on."""

    slots: int
    lanes: int
    fields: list[DeviceField]  # observations first
    flags: torch.Tensor  # (slots * lanes,), bytes
    counts: torch.Tensor  # next tick, first tick, calls; for draws inside a CUDA graph
    free: torch.Tensor  # memory of the host: the tick that was begun last, and by field how many places were free then


class TickOnDevice(NamedTuple):
    """One tick, lanes first."""

    rows: Sequence[torch.Tensor]  # of every field
    next_obs: Sequence[torch.Tensor]
    terminated: torch.Tensor
    truncated: torch.Tensor
    valid: torch.Tensor | None


class RowsOnDevice(NamedTuple):
    """Rows of a batch."""

    ids: torch.Tensor
    rows: list[torch.Tensor]  # of every field
    next_obs: list[torch.Tensor]
    terminated: torch.Tensor
    truncated: torch.Tensor


class DeviceLoops(Protocol):
    """What writes and reads rings."""

    is_one_step: bool
    """Whether an interrupt finds a tick written or not; otherwise the same tick is written once more after one."""

    def write(self, number: int, tick: TickOnDevice, *, has_previous: bool) -> None:
        """Write a tick. Every pool has a free place for every lane."""

    def read(self, ids: torch.Tensor, last_ids: torch.Tensor | None) -> RowsOnDevice:
        """Read rows that are held; next observations and flags under `last_ids`, if they are others."""

    def draw(self, count: int, seed: int) -> RowsOnDevice:
        """Draw rows, every valid one with the same probability, and read them."""

    def draw_ids(self, count: int, seed: int) -> torch.Tensor:
        """Draw ids as `draw` does, and read nothing."""

    def attach(self, rings: RingsOnDevice) -> None:
        """Work on these rings from now on, some of which were moved."""


def loops_for(torch: Any, device: torch.device) -> DeviceLoops:
    """Return the quickest loops for a device."""
    if device.type == "cuda":
        try:
            return CudaLoops(torch, device)
        except CudaProgramError:
            pass
    return TorchLoops(torch)


def device_program(torch: Any, device: torch.device) -> CudaProgram:
    """Return the kernels of native/device.cu for a device."""
    return CudaProgram(torch, device, (resources.files("holdall.native") / "device.cu").read_text(encoding="utf-8"))


_FIELD_WORDS = (
    "ring", "row_bytes", "is_observed", "source", "next_source", "source_stride", "next_source_stride",
    "target", "next_target", "apart", "pool", "queue", "chunks", "first_chunk",
)  # fmt: skip


class _Field(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _FIELD_WORDS]


class _Task(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "counts", "free", "slots", "lanes", "tick", "has_previous", "fields", "rows", "ids", "last_ids", "draws",
            "call", "seed", "flags", "terminated", "truncated", "valid", "to_terminated", "to_truncated",
        )),
        ("field", _Field * MOST_FIELDS),
    ]  # fmt: skip


class CudaLoops:
    """One kernel for all fields of a tick, and one for all fields of a batch."""

    is_one_step = True

    def __init__(self, torch: Any, device: torch.device) -> None:
        self._torch, self._device = torch, device
        program = device_program(torch, device)
        self._write_tick, self._gather_rows = program.kernel("write_tick"), program.kernel("gather_rows")
        self._count_call = program.kernel("count_call")
        self._last_stream: Any = None
        self._task = _Task()
        self._words = np.frombuffer(memoryview(self._task).cast("B"), np.int64)

    def attach(self, rings: RingsOnDevice) -> None:
        """See `DeviceLoops`."""
        self._rings, fields, task = rings, rings.fields, self._task
        first, width = _Task.field.offset // _WORD_BYTES, ctypes.sizeof(_Field) // _WORD_BYTES
        at = {name: first + i + width * np.arange(len(fields)) for i, name in enumerate(_FIELD_WORDS)}
        self._sources, self._strides, self._targets = at["source"], at["source_stride"], at["target"]
        observed = sum(field.pool is not None for field in fields)
        self._next_sources, self._next_strides = at["next_source"][:observed], at["next_source_stride"][:observed]
        self._next_targets = at["next_target"][:observed]
        task.counts, task.free, task.flags = (t.data_ptr() for t in (rings.counts, rings.free, rings.flags))
        task.slots, task.lanes, task.fields = rings.slots, rings.lanes, len(fields)
        for described, field in zip(task.field, fields, strict=False):
            described.ring, described.row_bytes = field.rows.data_ptr(), field.rows.shape[1]
            if (pool := field.pool) is not None:
                described.is_observed, described.first_chunk = 1, pool.first_chunk
                described.apart, described.pool = pool.apart.data_ptr(), pool.counts.data_ptr()
                described.queue, described.chunks = pool.queue.data_ptr(), pool.table.data_ptr()
        widest = max(field.rows.shape[1] for field in fields)
        warps = -(-widest // _COPIED_AT_ONCE_BYTES // _WARP)
        self._block = (min(_MOST_THREADS, warps * _WARP), 1) if widest >= _WIDE_BYTES else (_WARP, _ROWS_A_BLOCK)

    def write(self, number: int, tick: TickOnDevice, *, has_previous: bool) -> None:
        """See `DeviceLoops`."""
        words, task = self._words, self._task
        words[self._sources] = [tensor.data_ptr() for tensor in tick.rows]
        words[self._strides] = [tensor.stride(0) * tensor.itemsize for tensor in tick.rows]
        words[self._next_sources] = [tensor.data_ptr() for tensor in tick.next_obs]
        words[self._next_strides] = [tensor.stride(0) * tensor.itemsize for tensor in tick.next_obs]
        task.tick, task.has_previous = number, has_previous
        task.terminated, task.truncated = tick.terminated.data_ptr(), tick.truncated.data_ptr()
        task.valid = 0 if tick.valid is None else tick.valid.data_ptr()
        self._launch(self._write_tick, self._rings.lanes)

    def read(self, ids: torch.Tensor, last_ids: torch.Tensor | None) -> RowsOnDevice:
        """See `DeviceLoops`."""
        self._task.draws = 0
        return self._read(ids, last_ids)

    def draw(self, count: int, seed: int) -> RowsOnDevice:
        """See `DeviceLoops`; inside a CUDA graph every replay draws others."""
        return self._read(self._drawn(count, seed), None)

    def draw_ids(self, count: int, seed: int) -> torch.Tensor:
        """See `DeviceLoops`."""
        ids, task = self._drawn(count, seed), self._task
        task.rows, task.ids, task.last_ids, task.to_terminated, task.to_truncated = count, ids.data_ptr(), 0, 0, 0
        task.fields = 0
        self._launch(self._gather_rows, count)
        task.fields = len(self._rings.fields)
        return ids

    def _drawn(self, count: int, seed: int) -> torch.Tensor:
        """Have the next launch draw; return where the ids go."""
        task, module = self._task, self._torch
        task.draws, task.call, task.seed = 1, 0, seed
        if module.cuda.is_current_stream_capturing():
            task.call = _NO_CALL
            self._count_call((1, 1), (1, 1), self._stream(), ctypes.c_int64(self._rings.counts.data_ptr()))
        ids: torch.Tensor = module.empty(count, dtype=module.int64, device=self._device)
        return ids

    def _read(self, ids: torch.Tensor, last_ids: torch.Tensor | None) -> RowsOnDevice:
        empty, device, count, fields = self._torch.empty, self._device, len(ids), self._rings.fields
        rows = [empty((count, *field.shape), dtype=field.kind, device=device) for field in fields]
        observed = fields[: len(self._next_targets)]
        next_obs = [empty((count, *field.shape), dtype=field.kind, device=device) for field in observed]
        terminated = empty(count, dtype=self._torch.bool, device=device)
        truncated = empty(count, dtype=self._torch.bool, device=device)
        words, task = self._words, self._task
        words[self._targets] = [tensor.data_ptr() for tensor in rows]
        words[self._next_targets] = [tensor.data_ptr() for tensor in next_obs]
        task.rows, task.ids, task.last_ids = count, ids.data_ptr(), 0 if last_ids is None else last_ids.data_ptr()
        task.to_terminated, task.to_truncated = terminated.data_ptr(), truncated.data_ptr()
        if count:
            self._launch(self._gather_rows, count)
        return RowsOnDevice(ids, rows, next_obs, terminated, truncated)

    def _launch(self, kernel: Any, rows: int) -> None:
        grid = (-(-rows // self._block[1]), self._task.fields + 1)
        kernel(grid, self._block, self._stream(), self._task)

    def _stream(self) -> int:
        """Return the caller's stream, which goes on when the one used before it is done with the rings."""
        stream = self._torch.cuda.current_stream(self._device)
        if stream != self._last_stream and not self._torch.cuda.is_current_stream_capturing():
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream
        handle: int = stream.cuda_stream
        return handle


class TorchLoops:
    """The same in operations of torch, one field after another; it waits for the device.

    A tick may be written again if the first time was interrupted: it then costs places of the pool, never a row.
    """

    is_one_step = False

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def attach(self, rings: RingsOnDevice) -> None:
        """See `DeviceLoops`."""
        self._rings = rings

    def write(self, number: int, tick: TickOnDevice, *, has_previous: bool) -> None:
        """See `DeviceLoops`."""
        rings, torch = self._rings, self._torch
        here, after = self._slot(number), self._slot(number + 1)
        for i, (field, value) in enumerate(zip(rings.fields, tick.rows, strict=True)):
            rows = _bytes_of(torch.uint8, value, rings.lanes)
            if field.pool is not None:
                if has_previous:
                    differs = (field.rows[here] != rows).any(dim=1).nonzero()[:, 0]
                    self._keep_apart(field.pool, self._slot(number - 1), field.rows[here][differs], differs)
                self._free(field.pool, after)
                field.rows[after] = _bytes_of(torch.uint8, tick.next_obs[i], rings.lanes)
                taken, given, _, _ = (count & 0xFFFFFFFF for count in field.pool.counts.tolist())
                rings.free[1 + i] = (given - taken) & 0xFFFFFFFF
            field.rows[here] = rows
        flags = tick.terminated.to(torch.uint8) * TERMINATED + tick.truncated.to(torch.uint8) * TRUNCATED
        if tick.valid is not None:
            flags += (~tick.valid).to(torch.uint8) * INVALID
        rings.flags[here] = flags
        rings.counts[0] = number + 1
        rings.counts[1].clamp_(min=number + 2 - rings.slots)
        rings.free[0] = number + 1

    def _keep_apart(self, pool: Pool, slot: slice, rows: torch.Tensor, lanes: torch.Tensor) -> None:
        taken, mask = int(pool.counts[0]), int(pool.counts[2])
        places = pool.queue[(self._torch.arange(len(lanes), device=lanes.device) + taken) & mask]
        pool.counts[0] += len(lanes)
        put_places(pool, places.long(), rows)
        pool.apart[slot.start + lanes] = places

    def _free(self, pool: Pool, slot: slice) -> None:
        places = pool.apart[slot]
        places = places[places >= 0]
        pool.apart[slot] = -1  # first, so that no place is given back twice
        given, mask = int(pool.counts[1]), int(pool.counts[2])
        pool.queue[(self._torch.arange(len(places), device=places.device) + given) & mask] = places
        pool.counts[1] += len(places)

    def read(self, ids: torch.Tensor, last_ids: torch.Tensor | None) -> RowsOnDevice:
        """See `DeviceLoops`."""
        rings = self._rings
        cells = rings.slots * rings.lanes
        here = ids % cells
        last = here if last_ids is None else last_ids % cells
        rows = [self._seen(field, field.rows[here]) for field in rings.fields]
        next_obs = []
        for field in rings.fields:
            if field.pool is not None:
                found = field.rows[(last + rings.lanes) % cells]
                places = field.pool.apart[last].long()
                kept = (places >= 0).nonzero()[:, 0]
                found[kept] = _at_places(field.pool, places[kept])
                next_obs.append(self._seen(field, found))
        flags = rings.flags[last]
        return RowsOnDevice(ids, rows, next_obs, (flags & TERMINATED) != 0, (flags & TRUNCATED) != 0)

    def draw(self, count: int, seed: int) -> RowsOnDevice:
        """See `DeviceLoops`."""
        return self.read(self.draw_ids(count, seed), None)

    def draw_ids(self, count: int, seed: int) -> torch.Tensor:
        """See `DeviceLoops`."""
        rings, generator = self._rings, np.random.default_rng(seed)
        end, first = (int(tick) * rings.lanes for tick in rings.counts[:2])
        ids = self._torch.from_numpy(generator.integers(first, end, count)).to(rings.flags.device)
        while len(missed := (rings.flags[ids % len(rings.flags)] & INVALID).nonzero()[:, 0]):
            ids[missed] = self._torch.from_numpy(generator.integers(first, end, len(missed))).to(ids.device)
        drawn: torch.Tensor = ids
        return drawn

    def _slot(self, tick: int) -> slice:
        first = tick % self._rings.slots * self._rings.lanes
        return slice(first, first + self._rings.lanes)

    def _seen(self, field: DeviceField, rows: torch.Tensor) -> torch.Tensor:
        return typed_rows(rows, field.kind, (len(rows), *field.shape))


class _Rollout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("advantages", "values", "ends", "last_values", "returns")),
        ("steps", ctypes.c_int64), ("lanes", ctypes.c_int64), ("gamma", ctypes.c_float), ("decay", ctypes.c_float),
    ]  # fmt: skip


Estimate = Callable[..., None]
"""Takes rewards, which become advantages, values, ends, last values, gamma, lambda, and where returns go."""


def advantages_on(torch: Any, device: torch.device) -> Estimate:
    """Return the loop that estimates advantages on a device, all of whose arrays are (steps, lanes) and float32."""
    if device.type == "cuda":
        try:
            launch = device_program(torch, device).kernel("estimate_advantages")
        except CudaProgramError:
            return _estimate_advantages
    else:
        return _estimate_advantages

    def estimate(
        advantages: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, last: torch.Tensor, gamma: float,
        gae_lambda: float, returns: torch.Tensor,
    ) -> None:  # fmt: skip
        steps, lanes = advantages.shape
        addresses = (tensor.data_ptr() for tensor in (advantages, values, ends, last, returns))
        task = _Rollout(*addresses, steps, lanes, gamma, np.float32(gamma * gae_lambda))
        stream = torch.cuda.current_stream(device).cuda_stream
        launch((-(-lanes // _WARP), 1), (_WARP, 1), stream, task)

    return estimate


def _estimate_advantages(
    advantages: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, last: torch.Tensor, gamma: float,
    gae_lambda: float, returns: torch.Tensor,
) -> None:  # fmt: skip
    """Do the same in operations of torch, step by step, in the order of the loop in C."""
    steps = len(advantages)
    discount, decay = (advantages.new_tensor(number) for number in (gamma, gamma * gae_lambda))
    for t in range(steps - 1, -1, -1):
        going = 1.0 - ends[t]
        ahead = discount * (last if t == steps - 1 else values[t + 1]) * going
        delta = advantages[t] + ahead - values[t]
        carried = decay * going * (advantages[t + 1] if t < steps - 1 else 0.0)
        advantages[t] = delta + carried
        returns[t] = advantages[t] + values[t]


def typed_rows(rows: torch.Tensor, kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return bytes as elements of a dtype; a field may have none, which torch does not see as another dtype."""
    return rows.view(kind).view(shape) if rows.numel() else rows.new_empty(shape, dtype=kind)


def _bytes_of(byte: torch.dtype, value: torch.Tensor, lanes: int) -> torch.Tensor:
    return value.contiguous().view(lanes, -1).view(byte) if value.numel() else value.new_empty((lanes, 0), dtype=byte)


def put_places(pool: Pool, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows to places of a pool."""
    first = 0
    for chunk in pool.chunks:
        here = (places >= first) & (places < first + len(chunk))
        chunk[places[here] - first] = rows[here]
        first += len(chunk)


def _at_places(pool: Pool, places: torch.Tensor) -> torch.Tensor:
    rows, first = pool.chunks[0].new_empty((len(places), pool.chunks[0].shape[1])), 0
    for chunk in pool.chunks:
        here = (places >= first) & (places < first + len(chunk))
        rows[here] = chunk[places[here] - first]
        first += len(chunk)
    return rows

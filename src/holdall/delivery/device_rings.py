"""Flat rings on a device: ticks are written and rows are read there, and the host waits for neither.

In:  tensors on the device, tick by tick; ids.  Out: tensors on the device; for checkpoints, arrays of the host.
Invariant: every row comes back bit for bit. An observation that continues from the last next observation is kept once,
and so is every slice of a window; the device compares them at every tick, and keeps what differs apart, in a pool that
grows before it can run out.

These are the rings of a store whose data is born on a device. The host knows the number of ticks. How many places of a
pool are free only the device knows; it leaves that in memory of the host at every tick, and the host counts on the
worst that can have happened since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device_fields import (
    FLAG,
    DeviceColumn,
    DeviceRing,
    WindowColumn,
    Windows,
    require_room,
)
from holdall.delivery.device_loops import (
    INVALID,
    MOST_FIELDS,
    SLACK_TICKS,
    TERMINATED,
    TRUNCATED,
    PackedTicks,
    RingsOnDevice,
    TickOnDevice,
)
from holdall.delivery.torch_loops import loops_for
from holdall.errors import ArgumentError
from holdall.report import FieldReport
from holdall.schema import Array, Leaf, Schema
from holdall.storage import NEVER, FlatField, Kernels, Repair, SlicedTick, TickWriter

if TYPE_CHECKING:
    import torch

_PATIENCE_SECONDS = 60.0


class DeviceRings:
    """All fields of a memory in rings on one device; the interface is that of the rings on the host.

    Args:
        windows: How observations are cut; None if that is found in rows that were saved.
        limit: Bytes that may be taken on the device.
        first_tick: Number of the first tick that will be written.
    """

    def __init__(
        self, torch: Any, device: torch.device, schema: Schema, ring_ticks: int, windows: Windows | None,
        limit: int | None, first_tick: int = 0,
    ) -> None:  # fmt: skip
        if len(schema.leaves) + 1 > MOST_FIELDS:
            raise ArgumentError(
                f"store_device ({device}): the spaces have {len(schema.leaves)} arrays, at most {MOST_FIELDS - 1} fit; "
                "join small ones into one Box"
            )
        self.torch, self.device, self.schema = torch, device, schema
        self.lanes, self.ring_ticks = schema.num_envs, ring_ticks
        self._writer: DeviceTickWriter | None = None
        self._begun_with = first_tick
        self.scouts: dict[int, Any] = {}
        self.pause_tick = NEVER  # nothing is packed on a device
        self.invalid: DeviceColumn | None = None
        self.reward: DeviceColumn | WindowColumn | None = None
        cells = ring_ticks * self.lanes
        self._flags = torch.zeros(cells, dtype=torch.uint8, device=device)
        self._counts = torch.tensor([first_tick, first_tick, 0], dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._free = torch.zeros(1 + MOST_FIELDS, dtype=torch.int64, pin_memory=pinned)
        self._seen_free = self._free.numpy()
        self.small: dict[int, DeviceRing] = {}
        self._limit = limit
        if windows is not None:
            self.lay_out(windows)
        self.action = [self._ring(leaf) for leaf in schema.action.leaves]
        self.extras = [self._ring(leaf) for leaf in schema.extras.leaves]
        self._reward_ring: DeviceRing | None = None
        self._constants: dict[Any, Any] = {}
        self.loops = loops_for(torch, device)

    def _all(self) -> list[DeviceRing]:
        """All fields in the order in which the loops know them."""
        reward = [] if self._reward_ring is None else [self._reward_ring]
        return [*self.small.values(), *self.action, *self.extras, *reward]

    def lay_out(self, windows: Windows) -> None:
        """Allocate the rings of observations; nothing was written yet."""
        require = partial(require_room, self.torch, self.device, self.schema, self.ring_ticks - 1, self._limit, windows)
        require()
        try:
            for i, leaf in enumerate(self.schema.observation.leaves):
                self.small[i] = self._ring(leaf, is_pooled=True, window=windows.get(i), read=partial(self._observed, i))
        except self.torch.OutOfMemoryError:
            self.small.clear()
            require(fits=False)

    def _ring(self, leaf: Leaf, *, is_pooled: bool = False, **cut: Any) -> DeviceRing:
        return DeviceRing(self.torch, self.device, leaf, self.lanes, self.ring_ticks, is_pooled=is_pooled, **cut)

    def _observed(self, i: int, first: int, end: int) -> Array:
        """Copy the observations of some ticks to the host."""
        found = self.loops.read(self.to_device(np.arange(first * self.lanes, end * self.lanes)), None).rows[i]
        array: Array = found.cpu().numpy().reshape(end - first, self.lanes, *found.shape[1:])
        return array

    def _grow(self, ring: DeviceRing, places: int) -> None:
        """See that a pool has so many places free. The device is at rest."""
        try:
            while ring.pool is not None and len(ring.pool.free()) < places:
                ring.pool.grow()
        except self.torch.OutOfMemoryError as error:
            raise ArgumentError(
                f"store_device ({self.device}) has no room for more observations {ring.leaf.name!r} that no other step "
                f"shows ({error}); nothing was added. Save the memory, and load it with a lower capacity"
            ) from error

    def _flag_column(self, bit: int) -> DeviceColumn:
        return DeviceColumn(self.torch, self._flags.view(self.ring_ticks, self.lanes), FLAG.dtype, bit)

    def columns(self) -> dict[str, Any]:
        """Return all rings by name."""
        columns: dict[str, Any] = {f"action.{i}": ring.column for i, ring in enumerate(self.action)}
        columns |= {f"extras.{i}": ring.column for i, ring in enumerate(self.extras)}
        if self.reward is not None:
            columns["reward.0"] = self.reward
        columns["terminated.0"], columns["truncated.0"] = self._flag_column(TERMINATED), self._flag_column(TRUNCATED)
        if self.invalid is not None:
            columns["invalid.0"] = self.invalid
        for i, leaf in enumerate(self.schema.observation.leaves):
            known, read = self.small.get(i), partial(self._observed, i)
            columns[f"obs.{i}"] = (
                WindowColumn(leaf, self.lanes, self.ring_ticks, read) if known is None else known.column
            )
        return columns

    def begin(self, reward_dtype: np.dtype[Any], *, has_invalid: bool = False) -> Any:
        """Make the ring of rewards, which the first one does; and remember that lanes without transitions come."""
        if self._reward_ring is None:
            self._reward_ring = self._ring(self.schema.reward_leaf(reward_dtype))
            self.reward = self._reward_ring.column
            self._attach()
        if has_invalid and self.invalid is None:
            self.invalid = self._flag_column(INVALID)
        return self.reward

    def _attach(self) -> None:
        """Show the loops where everything is, and how many places are free."""
        fields = [ring.field for ring in self._all()]
        self.loops.attach(RingsOnDevice(self.ring_ticks, self.lanes, fields, self._flags, self._counts, self._free))
        for i, ring in enumerate(self.small.values()):
            if ring.pool is not None:
                self._seen_free[1 + i] = len(ring.pool.free())
        self._seen_free[0] = self._next_tick

    def _rest(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def settle(self) -> None:
        """Wait for the device, and look how many places are free."""
        self._rest()
        self._attach()

    def prepare(self, tick: Any, first_tick: int, next_tick: int) -> list[Any]:
        """Return the rows of a tick of tensors, each in one piece, in the order in which the writer takes them."""
        if self._reward_ring is None or (tick.valid is not None and self.invalid is None):
            self.begin(_numpy_dtype(self.torch, tick.reward), has_invalid=tick.valid is not None)
        rows = [*tick.obs, *tick.action, *tick.extras, tick.reward, *tick.next_obs]
        rows = [_row_contiguous(row) for row in rows] + [tick.terminated.contiguous(), tick.truncated.contiguous()]
        return rows if tick.valid is None else [*rows, tick.valid.contiguous()]

    def new_writer(self, kernels: Kernels | None, ticks: tuple[int, int], repair: Repair) -> DeviceTickWriter:
        """Return what writes ticks here; `ticks` are the numbers of the first one ever and of the next."""
        self._writer = DeviceTickWriter(self, self._counts, ticks, repair)
        return self._writer

    def takes_runs(self, _writer: Any) -> bool:
        """Return False: ticks are written to a device one at a time."""
        return False

    def flat(self) -> list[FlatField]:
        """Return nothing: no ring lies on the host."""
        return []

    def fast_arguments(self, _large: list[int]) -> None:
        """Return nothing: there is no shorter way than `write`."""

    def keep(self, small: Iterable[int]) -> None:
        """Refuse what is saved in another form: every observation leaf has a ring here."""
        if list(small) != list(range(len(self.schema.observation.leaves))):
            raise ArgumentError("store_device: the checkpoint holds compressed fields, which a device does not read")

    def make_room(self, now: int, ticks: int = 1) -> None:
        """See that every pool has places for each lane of some ticks, whatever the device has done since."""
        if not self._short_of_places(now, ticks):
            return
        self._wait_for(now - 1)
        if short := self._short_of_places(now, ticks):
            self._rest()
            for ring in short:
                self._grow(ring, max(ticks, SLACK_TICKS) * self.lanes * ring.most_places)
            self._attach()

    @property
    def free_ticks(self) -> int:
        """Ticks for which every pool had places when the device last said so."""
        free = zip(self.small.values(), self._seen_free[1:].tolist(), strict=False)
        return min((some // (self.lanes * ring.most_places) for ring, some in free), default=NEVER)

    def _short_of_places(self, now: int, ticks: int) -> list[DeviceRing]:
        lag = now - int(self._seen_free[0])
        rings, free = self.small.values(), self._seen_free[1:].tolist()
        needed = (lag + ticks) * self.lanes
        return [ring for ring, some in zip(rings, free, strict=False) if some < needed * ring.most_places]

    def _wait_for(self, tick: int) -> None:
        """Wait until the device has begun a tick."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while int(self._seen_free[0]) < tick:
            if time.monotonic() > deadline:
                self._rest()
                return
            time.sleep(0)

    def to_device(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Bring ids to the device."""
        tensor: torch.Tensor = self.torch.from_numpy(np.array(ids).reshape(-1)).to(self.device)
        return tensor

    @property
    def first_id(self) -> int:
        """Lowest id held."""
        return self._first_held() * self.lanes

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next tick."""
        return self._next_tick * self.lanes

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the next id as the device knows them: right inside a CUDA graph, too."""
        ids = self._counts[:2] * self.lanes
        return ids[1], ids[0]

    def flag_bytes(self, ids: torch.Tensor) -> torch.Tensor:
        """Return how transitions ended, of ids of any shape on the device."""
        flags: torch.Tensor = self._flags[ids % len(self._flags)]
        return flags

    @property
    def reward_dtype(self) -> np.dtype[Any]:
        """NumPy's name of the rewards' dtype."""
        if self._reward_ring is None:
            raise ArgumentError("nothing was added yet; add transitions first")
        return self._reward_ring.leaf.dtype

    def reward_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rewards of ids of any shape on the device."""
        if self._reward_ring is None:
            raise ArgumentError("nothing was added yet; add transitions first")
        field = self._reward_ring.field
        rows: torch.Tensor = field.rows.view(field.kind)[ids % len(self._flags)]
        return rows.reshape(*ids.shape, *self.schema.reward_shape)

    def constant(self, key: Any, values: list[float], dtype: torch.dtype) -> torch.Tensor:
        """Return numbers as a tensor that is made once."""
        if key not in self._constants:
            self._constants[key] = self.torch.tensor(values, dtype=dtype, device=self.device)
        constant: torch.Tensor = self._constants[key]
        return constant

    def rewards(self, ids: NDArray[np.int64]) -> Array:
        """Copy the rewards of `ids`, of any shape, to the host."""
        if self._reward_ring is None:
            return np.empty(0, np.float32)
        rows = self._reward_ring.rows[self.to_device(ids) % len(self._flags)]
        array: Array = rows.cpu().numpy().view(self._reward_ring.leaf.dtype)
        return array.reshape(*ids.shape, *self.schema.reward_shape)

    def flags(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Copy how transitions ended to the host."""
        flags = self._flag_bytes(ids)
        return (flags & TERMINATED) != 0, (flags & TRUNCATED) != 0

    def are_valid(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell real transitions from lanes that made none."""
        if self.invalid is None:
            return np.ones(ids.shape, np.bool_)
        return np.asarray((self._flag_bytes(ids) & INVALID) == 0)

    def _flag_bytes(self, ids: NDArray[np.int64]) -> Array:
        array: Array = self._flags[self.to_device(ids) % len(self._flags)].cpu().numpy().reshape(ids.shape)
        return array

    def rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        """Write new rows of some columns, under ids that are all different."""
        cells, rings = self.to_device(ids) % len(self._flags), self.columns()
        for name, rows in columns.items():
            rings[name].put(cells, rows)

    def count_invalid(self, first_tick: int, next_tick: int) -> int:
        """Count the lanes that made no transition in some ticks; waits for the device if there were any."""
        if self.invalid is None:
            return 0
        slots = np.arange(first_tick, next_tick) % self.ring_ticks
        flags = self._flags.view(self.ring_ticks, self.lanes)[self.torch.from_numpy(slots).to(self.device)]
        return int(((flags & INVALID) != 0).sum())

    @property
    def _next_tick(self) -> int:
        return self._begun_with if self._writer is None else self._writer.next_tick

    def _first_held(self) -> int:
        first = self._begun_with if self._writer is None else self._writer.first_tick
        return max(first, self._next_tick + 1 - self.ring_ticks)

    def report(self, held: int, touched: int) -> list[FieldReport]:
        """Account for all fields but observations."""
        named = [("action", ring) for ring in self.action] + [("extras", ring) for ring in self.extras]
        named += [] if self._reward_ring is None else [("reward", self._reward_ring)]
        note = f"flat rows on {self.device}"
        fields = [
            FieldReport(
                f"{prefix}.{ring.leaf.name}" if ring.leaf.name else prefix,
                0,
                0,
                ring.nbytes,
                held * ring.leaf.nbytes,
                note,
            )
            for prefix, ring in named
        ]
        return [*fields, FieldReport("flags", 0, 0, self._flags.nbytes, 2 * held, note)]

    def arrays(self) -> list[tuple[str, Array]]:
        """Return nothing: no array of the host belongs to a field."""
        return []

    def pack(self, *_: Any) -> None:
        """Pack nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(ring.nbytes for ring in self._all()) + int(self._flags.nbytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one transition on the host: none."""
        return 0


class DeviceTickWriter(TickWriter):
    """Writes ticks of tensors in one launch, and counts them.

    The device counts, too. Where an interrupt came between a launch and the count of it, the device is asked.
    """

    def __init__(self, rings: DeviceRings, counts: torch.Tensor, ticks: tuple[int, int], repair: Repair) -> None:
        self.flat = ()
        self.first_tick, self.next_tick = ticks
        self._rings, self._loops, self._counts, self._repair = rings, rings.loops, counts, repair

    def write(self, rows: Sequence[Any], sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """See `TickWriter`."""
        fields, observed = len(self._rings.schema.leaves) + 1, len(self._rings.small)
        following, flags = rows[fields : fields + observed], rows[fields + observed :]
        tick = TickOnDevice(rows[:fields], following, flags[0], flags[1], flags[2] if len(flags) > 2 else None)
        return self._written(partial(self._loops.write, self.next_tick, tick), 1)

    def write_together(self, packed: PackedTicks) -> int:
        """Write some ticks; return how many were written in all."""
        return self._written(partial(self._loops.write_packed, self.next_tick, packed), packed.ticks)

    def _written(self, write: Callable[..., None], ticks: int) -> int:
        now = self.next_tick
        self._rings.make_room(now, ticks)
        self._repair.begin(self._ask_device if self._loops.is_one_step else partial(self._do, write, now, ticks))
        self._do(write, now, ticks)
        self._repair.end()
        return self.next_tick

    def _do(self, write: Callable[..., None], now: int, ticks: int) -> None:
        write(has_previous=now > self.first_tick)
        self.next_tick = now + ticks

    def begin_again(self, tick: int) -> None:
        """Go on with a later tick, which continues nothing."""
        self.first_tick = self.next_tick = tick
        self._rings.settle()

    def _ask_device(self) -> None:
        self.next_tick = int(self._counts[0])


def _row_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor each of whose rows lies in one piece."""
    if tensor.is_contiguous():  # which is quick to ask
        return tensor
    return tensor if tensor[0].is_contiguous() and tensor.stride(0) >= 0 else tensor.contiguous()


def _numpy_dtype(torch: Any, tensor: torch.Tensor) -> np.dtype[Any]:
    dtype: np.dtype[Any] = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return dtype

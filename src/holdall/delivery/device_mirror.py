"""A memory of the host whose rows are all on a device as well: batches are looked up and gathered there.

In:  the store, as it grows; draws.  Out: batches of rows that are on the device already.
Invariant: the rings on the device hold, row for row, what the store holds. The host draws, so that one seed gives the
batches that it gives everywhere; it sends ids, and waits for nothing but pinned memory that it writes to again.

Where a device has no compiler, or no room for all rows, batches are sent there, see `device_batch`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.delivery.batch_layout import aligned
from holdall.delivery.batches import BatchJob, DrawnRows, ObservationAssembler
from holdall.delivery.device import RecordedSlot, StagingRing, torch_dtype
from holdall.delivery.device_batch import DeviceBatches
from holdall.delivery.device_fields import LOOKED_AT, windows_of
from holdall.delivery.device_loops import PackedTicks, RowsOnDevice, typed_rows
from holdall.delivery.device_rings import DeviceRings, DeviceTickWriter
from holdall.delivery.resident import ResidentBatches
from holdall.errors import ArgumentError
from holdall.sampling import Uniform
from holdall.schema import Array, Schema
from holdall.storage import Repair, Store, Tick

if TYPE_CHECKING:
    import torch

_SENT_AT_ONCE_BYTES = 2 << 20
"""Bytes of rows that are sent at once; their next observations go with them."""
_ID_SLOTS = 8
"""Batches whose ids may still be on their way while the next one is drawn."""
_STAGED = 4
"""Pieces of ticks, or arrays of draws, that may be."""
_SHARE_OF_POOL = 8
"""Ticks that are sent at once take at most this part of the places for what is kept apart."""


class _MirroredSlot(RecordedSlot):
    """Pinned memory, and where it is copied to on the device."""

    def _allocate(self, nbytes: int) -> None:
        super()._allocate(nbytes)
        self.there = self._stream.device_bytes(self.host.numel())


class MirroredBatches(ResidentBatches):
    """Makes batches of copies of all rows on one device; as `other` does, where there are none.

    Args:
        other: Keeps nothing on the device.
    """

    device_types: ClassVar[set[str]] = {"cuda"}
    """Devices on which rows are kept: elsewhere there is nothing to gain."""

    def __init__(self, schema: Schema, other: DeviceBatches, assembler: ObservationAssembler) -> None:
        self._deliver(schema)
        self._other, self._assembler = other, assembler
        self._stream, self._device = other.stream, other.stream.device
        self._ids = StagingRing(self._stream, _MirroredSlot, _ID_SLOTS)
        self._ticks = StagingRing(self._stream, _MirroredSlot, _STAGED)
        self._repair, self._rewrites, self._kept = Repair(), 0, 0
        self._writer: DeviceTickWriter | None = None
        self._is_refused = self._device.type not in self.device_types
        self._rewritten: list[NDArray[np.int64]] = []

    def draw(self, sampler: Any, count: int, generator: np.random.Generator, store: Store) -> Batch | None:
        """See `Batches`: rows of a `Uniform` sampler."""
        if not self._up_to_date(store):
            return self._other.draw(sampler, count, generator, store)
        if type(sampler) is not Uniform or not store.all_valid or (held := store.held)[1] - held[0] < count:
            return None
        ids = generator.integers(*held, size=count)
        found = self._gathered(ids, None)
        return self._batch(found, ids, found.ones)

    def look_up(self, draw: Draw, store: Store, *, ahead: bool = False) -> DrawnRows:
        """See `Batches`; the batch is made here, in the order of the stream, but for goals: these are the caller's."""
        if not self._up_to_date(store):
            return self._other.look_up(draw, store, ahead=ahead)
        drawn = super().look_up(draw, store, ahead=ahead)
        if draw.goals is not None:
            return drawn
        found: Any = drawn.rows
        if draw.reward is not None:
            found.rows[-1] = self._sent(draw.reward.reshape(-1, *self._schema.reward_shape))
        weights = draw.weights
        is_plain = weights.dtype == np.float32 and weights.size == len(found.ones) and (weights == 1).all()
        of_draw = (None if array is None else self._sent(array) for array in (draw.discount, draw.mask))
        of_rows = found.ones if is_plain else self._sent(weights)
        return DrawnRows.of_made(self._batch(found, draw.ids, of_rows, *of_draw))

    def _gathered(self, ids: NDArray[np.int64], last_ids: NDArray[np.int64] | None) -> Any:
        """Have rows gathered; ids go through pinned memory that is not written to before they were read."""
        slot, count = self._ids.next_slot(16 * ids.size), ids.size
        numbers = slot.array.view(np.int64)
        numbers[:count] = ids if ids.ndim == 1 else ids.reshape(-1)
        if last_ids is not None:
            numbers[count : 2 * count] = last_ids.reshape(-1)
        self._stream.send(slot.there, slot.host, 8 * count if last_ids is None else 16 * count)
        where = slot.there.data_ptr()
        found = self._rings.loops.read_at(count, where, 0 if last_ids is None else where + 8 * count, slot.there)
        slot.was_given()
        return found

    def _sent(self, array: Array) -> torch.Tensor:
        """Bring an array of a draw to the device, without a wait."""
        slot, there = self._ticks.next_slot(array.nbytes), self._stream.device_bytes(array.nbytes)
        slot.array[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._stream.send(there, slot.host, array.nbytes)
        slot.was_given()
        return typed_rows(there, torch_dtype(self._other.torch, array.dtype), array.shape)

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`."""
        return super().start(draw, drawn) if _is_gathered(drawn) else self._other.start(draw, drawn)

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """See `Batches`."""
        return super().make(draw, drawn) if _is_gathered(drawn) else self._other.make(draw, drawn)

    def rewritten(self, ids: NDArray[np.int64]) -> None:
        """See `Batches`."""
        self._rewritten.append(ids)

    def keep(self, batches: int) -> None:
        """See `Batches`."""
        self._kept = max(self._kept, batches)
        self._other.keep(batches)
        if self._writer is not None:
            self._rings.loops.keep(batches)

    @property
    def pinned_bytes(self) -> int:
        """See `Batches`."""
        return self._ids.nbytes + self._ticks.nbytes + self._other.pinned_bytes

    def close(self) -> None:
        """See `Batches`."""
        self._ids.wait()
        self._ticks.wait()
        self._other.close()

    # ------------------------------------------------------------ what is on the device

    def _up_to_date(self, store: Store) -> bool:
        """Send what is new; False if rows are not kept on the device."""
        if self._is_refused:
            return False
        self._repair.run()
        first, end = store.first_tick, store.next_tick
        writer = self._writer or self._begin(store, first, end)
        if writer is None:
            return False
        if writer.next_tick < end:
            self._send_from(writer, store, first, end)
        if self._rewrites != store.rewrites or self._rewritten:
            self._send_again(store)
        return True

    def _begin(self, store: Store, first: int, end: int) -> DeviceTickWriter | None:
        """Allocate room for all rows that the store may hold; None if there is none, or nothing to hold."""
        if first == end or store.reward_dtype is None:
            return None
        schema, lanes = self._schema, self._schema.num_envs
        steps = self._read(store, first, min(end, first + -(-LOOKED_AT // lanes)))
        try:
            arguments = store.sources().ring_rows // lanes, windows_of(schema, steps), None, first
            rings = DeviceRings(self._other.torch, self._device, schema, *arguments)
        except ArgumentError:
            self._is_refused = True
            return None
        self._is_refused = self._device.type == "cuda" and not rings.loops.is_one_step
        if self._is_refused:
            return None
        rings.begin(store.reward_dtype)
        rings.loops.keep(self._kept)
        self._rings, self._rewrites = rings, store.rewrites
        self._writer = rings.new_writer(None, (first, first), self._repair)
        return self._writer

    def _read(self, store: Store, first: int, end: int) -> Tick:
        """Copy all fields of some ticks."""
        lanes, leaves = self._schema.num_envs, self._schema.observation.leaves
        rows = self._assembler.complete(store.read(np.arange(first * lanes, end * lanes)), leaves)
        pairs = [rows.small[i] for i in range(len(leaves))]
        obs, next_obs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return Tick(obs, rows.action, rows.reward, next_obs, rows.terminated, rows.truncated, rows.extras, None)

    def _send_from(self, writer: DeviceTickWriter, store: Store, first: int, end: int) -> None:
        """Send ticks up to `end`; those that were evicted before they were sent are left out."""
        if writer.next_tick < first:
            writer.begin_again(first)
        tick_bytes = self._schema.num_envs * sum(leaf.nbytes for leaf in self._schema.leaves)
        most = max(1, min(_SENT_AT_ONCE_BYTES // max(1, tick_bytes), self._rings.free_ticks // _SHARE_OF_POOL))
        while writer.next_tick < end:
            begin = writer.next_tick
            ticks = min(most, end - begin)
            slot, packed = self._staged(self._read(store, begin, begin + ticks), ticks)
            try:
                writer.write_together(packed)
            finally:
                slot.was_given()

    def _staged(self, tick: Tick, ticks: int) -> tuple[_MirroredSlot, PackedTicks]:
        """Bring some ticks to the device, in one copy."""
        rows = [*tick.obs, *tick.action, *tick.extras, tick.reward, *tick.next_obs, tick.terminated, tick.truncated]
        ends = list(accumulate(aligned(row.nbytes) for row in rows))
        slot = self._ticks.next_slot(ends[-1])
        for row, begin in zip(rows, [0, *ends], strict=False):
            slot.array[begin : begin + row.nbytes] = row.reshape(-1).view(np.uint8)
        self._stream.send(slot.there, slot.host, ends[-1])
        return slot, PackedTicks(slot.there, np.array([0, *ends[:-1]], np.int64), ticks)

    def _send_again(self, store: Store) -> None:
        """Send flags and extras that were written again: those that are known, or all of them."""
        ids = np.unique(np.concatenate(self._rewritten)) if self._rewritten else np.empty(0, np.int64)
        if self._rewrites + len(self._rewritten) != store.rewrites:
            ids = np.arange(*store.held)
        ids = ids[(ids >= store.held[0]) & (ids < store.held[1])]
        if ids.size:
            _, terminated, truncated = store.outcomes(ids)
            columns: dict[str, Array] = {"terminated.0": terminated, "truncated.0": truncated}
            for k in range(len(self._schema.extras.leaves)):
                columns[f"extras.{k}"] = store.extra(k, ids)
            self._rings.rewrite(ids, columns)
        self._rewrites, self._rewritten = store.rewrites, []


def _is_gathered(drawn: DrawnRows) -> bool:
    """Whether rows are on the device already, and only goals are missing."""
    rows: Any = drawn.rows
    return isinstance(rows, RowsOnDevice)

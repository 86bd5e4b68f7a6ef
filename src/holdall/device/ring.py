"""TickRing: the newest ticks of a memory on a device, and the room for the next ones.

How many slices a tick writes is known only to the device. The device reports how many are in use, and the report
arrives while more ticks are written. Until then, every tick counts with the most slices that it may have written. The
host waits for a report only if that leaves no room, and grows the tensors only if there is none.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from holdall.delivery.staging import is_asynchronous, record_event
from holdall.device.graph import PlaceGraph
from holdall.device.tensors import TensorPlan, Tensors, TensorStep
from holdall.errors import ArgumentError
from holdall.schema import Schema

_WARM_UP_TICKS = 4
"""Ticks that are written before a CUDA graph is captured."""
_RETRY_TICKS = 1024
"""Ticks that are written before capturing is tried again."""
_LOG = logging.getLogger("holdall")
_CHUNK_BYTES = 64 * 2**20
"""Bytes of observations that are written at once."""


class _Report(NamedTuple):
    """What the device says, or will say, of the slices in use."""

    tick: int  # The tick before which that was true.
    used: torch.Tensor  # On the host, see `Tensors.measure`.
    event: Any  # Recorded after the report was copied to the host. None if it is there.

    @property
    def has_arrived(self) -> bool:
        """Whether `used` can be read."""
        return self.event is None or bool(self.event.query())


class TickRing:
    """The ticks from `first_tick` to `next_tick` - 1. Not thread-safe.

    Attributes:
        tensors: All fields.
        next_tick: Number of the tick that is written next. A tick counts when this was increased.
        base_tick: Number of the first tick that was ever written.
        masked_tick: Newest tick that may have entries that are not transitions, or -1.
    """

    def __init__(self, schema: Schema, plan: TensorPlan, device: torch.device, first_tick: int) -> None:
        self.tensors = Tensors(schema, plan, device, first_tick)
        self.base_tick = first_tick
        self.next_tick = first_tick
        self.masked_tick = -1
        self._capacity_ticks = plan.capacity_ticks
        self._floor_tick = first_tick  # Older ticks are not held.
        self._device = device
        self._is_asynchronous = is_asynchronous(device)
        tick_bytes = schema.num_envs * sum(leaf.nbytes for leaf in schema.observation.leaves)
        self._chunk_ticks = min(max(1, _CHUNK_BYTES // max(1, tick_bytes)), plan.capacity_ticks)
        self._is_counted = True  # Whether the device has the same `next_tick`. False after an interrupt.
        self._graph: PlaceGraph | None = None
        self._eager_ticks = _WARM_UP_TICKS  # Ticks that are written before a graph is captured.
        self._pending: _Report | None = None
        self._room_end = first_tick  # There is certainly room for all ticks before this one.
        self._take_report(self._start_report())

    @property
    def first_tick(self) -> int:
        """Number of the oldest tick that is held."""
        return max(self._floor_tick, self.next_tick - self._capacity_ticks)

    def write(self, step: TensorStep) -> None:
        """Write ticks. After an interrupt, the first of them are held, each of them complete."""
        written = 0
        count = len(step.reward)
        while written < count:
            ticks = min(count - written, self._find_room(count - written))
            self._write_chunk(step if ticks == count else step.cut(written, written + ticks), ticks)
            written += ticks

    def write_tick(self, step: TensorStep) -> None:
        """Write one tick, without an axis of time. Uses a CUDA graph if that is possible."""
        graph = self._find_graph(step)
        if graph is None:
            self.write(step.add_time_axis())
            return
        if step.valid is not None:
            self.masked_tick = self.next_tick
        self._begin()
        self.tensors.write_placed(step, self.next_tick, graph.place(step))
        self._end(1)

    def _find_graph(self, step: TensorStep) -> PlaceGraph | None:
        """Return a graph that can write `step`, and make room for it. Return None if there is no such graph."""
        if not self._is_asynchronous:
            return None
        if self._eager_ticks > 0:
            self._eager_ticks -= 1
            return None
        self._find_room(1)
        tensors = self.tensors
        if self._graph is None or self._graph.tensors is not tensors:
            try:
                self._graph = PlaceGraph(tensors, step)
            except RuntimeError as error:
                # Something else in this thread disturbed the capture. Without a graph, writing is only slower.
                _LOG.info("capturing a CUDA graph failed: %s", error)
                self._eager_ticks = _RETRY_TICKS
                return None
        return self._graph

    def _write_chunk(self, step: TensorStep, ticks: int) -> None:
        # Only one slot is free. The ticks that several new ticks overwrite are evicted first.
        if ticks > 1:
            self._floor_tick = max(self._floor_tick, self.next_tick + ticks - self._capacity_ticks)
        if step.valid is not None:
            self.masked_tick = self.next_tick + ticks - 1
        self._begin()
        self.tensors.write(step, self.next_tick, has_previous=self.next_tick > self.base_tick)
        self._end(ticks)

    def _begin(self) -> None:
        """Prepare the device to write the next tick."""
        if not self._is_counted:
            self.tensors.set_next_tick(self.next_tick)
        self._is_counted = False

    def _end(self, ticks: int) -> None:
        """Count ticks that were written."""
        self.next_tick += ticks
        self._is_counted = True

    # ---------------------------------------------------------------- room

    def _find_room(self, wanted: int) -> int:
        """Return how many ticks can be written now: at least one, at most `wanted`."""
        if self._pending is not None and self._pending.has_arrived:
            self._take_report(self._pending)
        room = self._count_room()
        if self._pending is None and room <= self.tensors.plan.slack_ticks // 2:
            self._pending = self._start_report()
        if room < min(wanted, self._chunk_ticks):
            room = self._wait_for_room()
        return min(room, wanted, self._chunk_ticks)

    def _wait_for_room(self) -> int:
        """Wait for a report, and grow the tensors if there is no room. Return the room, which is at least one tick."""
        if self._pending is not None:
            self._take_report(self._pending)
        if self._count_room() < 1:
            self._take_report(self._start_report())
        if self._count_room() < 1:
            self._grow()
            self._take_report(self._start_report())
        return self._count_room()

    def _grow(self) -> None:
        try:
            self.tensors = self.tensors.grow(self._used, self.first_tick)
        except torch.OutOfMemoryError as error:
            raise ArgumentError(
                f"store_device ({self._device}) has no room for more observations that no other step shares ({error}). "
                "Nothing was added. Save the memory, and load it with a lower capacity."
            ) from error
        _LOG.info("The room for observations on %s was enlarged. Capture CUDA graphs of sample() again.", self._device)

    def _count_room(self) -> int:
        """Return how many ticks can be written in the worst case."""
        return self._room_end - self.next_tick

    def _take_report(self, report: _Report) -> None:
        """Wait for a report, and use it."""
        if report.event is not None:
            report.event.synchronize()
        self._used = report.used
        self._room_end = report.tick + self.tensors.count_room(report.used)
        self._pending = None

    def _start_report(self) -> _Report:
        """Ask the device for a report."""
        used = self.tensors.measure(self.next_tick, self.first_tick)
        if not self._is_asynchronous:
            return _Report(self.next_tick, used.cpu(), None)
        host = torch.empty(used.shape, dtype=used.dtype, pin_memory=True)
        host.copy_(used, non_blocking=True)
        return _Report(self.next_tick, host, record_event(self._device))

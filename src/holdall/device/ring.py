"""TickRing: the newest ticks of a memory on a device, and the room for the next ones.

Only the device knows how many slices a tick has written. It reports how many slices are in use, and the report arrives
while more ticks are written. Until then, the host assumes the maximum number of slices for every tick. It waits for a
report only if there would be no room under this assumption, and grows the tensors only if the report shows no room.
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
"""Ticks that are written after a failed capture, before the next attempt."""
_LOG = logging.getLogger("holdall")
_CHUNK_BYTES = 64 * 2**20
"""Maximum size of the observations that are written at once."""


class _Report(NamedTuple):
    """How many slices are in use, copied from the device to the host."""

    tick: int  # `next_tick` at the time of the measurement.
    used: torch.Tensor  # Result of `Tensors.measure`, on the host.
    event: Any  # Complete when `used` has arrived on the host. None if it has arrived already.

    @property
    def has_arrived(self) -> bool:
        """Whether `used` can be read."""
        return self.event is None or bool(self.event.query())


class TickRing:
    """The ticks from `first_tick` to `next_tick` - 1. Not thread-safe.

    Attributes:
        tensors: All fields.
        next_tick: Number of the tick that is written next. It is increased when a tick was written completely.
        base_tick: Number of the first tick that was ever written.
        masked_tick: Newest tick that may have entries that are not transitions. -1 if there is none.
    """

    def __init__(self, schema: Schema, plan: TensorPlan, device: torch.device, first_tick: int) -> None:
        self.tensors = Tensors(schema, plan, device, first_tick)
        self.base_tick = first_tick
        self.next_tick = first_tick
        self.masked_tick = -1
        self._capacity_ticks = plan.capacity_ticks
        self._floor_tick = first_tick  # Lower bound of `first_tick`.
        self._device = device
        self._is_asynchronous = is_asynchronous(device)
        tick_bytes = schema.num_envs * sum(leaf.nbytes for leaf in schema.observation.leaves)
        self._chunk_ticks = min(max(1, _CHUNK_BYTES // max(1, tick_bytes)), plan.capacity_ticks)
        self._is_clock_right = True  # Whether the device has the same `next_tick`. False after an interrupt.
        self._graph: PlaceGraph | None = None
        self._eager_ticks = _WARM_UP_TICKS  # Ticks that are still written before a graph is captured.
        self._pending: _Report | None = None
        self._room_end = first_tick  # There is room for all ticks before this tick, even in the worst case.
        self._take_report(self._start_report())

    @property
    def first_tick(self) -> int:
        """Number of the oldest tick that is held."""
        return max(self._floor_tick, self.next_tick - self._capacity_ticks)

    def write(self, step: TensorStep) -> None:
        """Write ticks. After an interrupt, some of the first ticks are held, each of them complete."""
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
        self._begin_writing()
        self.tensors.write_placed(step, self.next_tick, graph.place(step))
        self._end_writing(1)

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
                _LOG.info("A CUDA graph could not be captured: %s", error)
                self._eager_ticks = _RETRY_TICKS
                return None
        return self._graph

    def _write_chunk(self, step: TensorStep, ticks: int) -> None:
        # One slot is free. If several ticks are written, evict the ticks that they overwrite first.
        if ticks > 1:
            self._floor_tick = max(self._floor_tick, self.next_tick + ticks - self._capacity_ticks)
        if step.valid is not None:
            self.masked_tick = self.next_tick + ticks - 1
        self._begin_writing()
        self.tensors.write(step, self.next_tick, has_previous=self.next_tick > self.base_tick)
        self._end_writing(ticks)

    def _begin_writing(self) -> None:
        """Prepare the device to write the next tick."""
        if not self._is_clock_right:
            self.tensors.set_next_tick(self.next_tick)
        self._is_clock_right = False

    def _end_writing(self, ticks: int) -> None:
        """Record that `ticks` ticks were written."""
        self.next_tick += ticks
        self._is_clock_right = True

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
        """Wait for a report, and grow the tensors if there is no room. Return the room in ticks, at least one."""
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
                f"store_device ({self._device}) has no memory for further observations that share nothing with other "
                f"steps ({error}). The remaining steps of this call were not added. Save the memory, and load it with "
                "a lower capacity."
            ) from error
        _LOG.info("The room for observations on %s was enlarged. Capture CUDA graphs of sample() again.", self._device)

    def _count_room(self) -> int:
        """Return how many ticks can be written in the worst case."""
        return self._room_end - self.next_tick

    def _take_report(self, report: _Report) -> None:
        """Wait for a report, and compute the room from it."""
        if report.event is not None:
            report.event.synchronize()
        self._used = report.used
        self._room_end = report.tick + self.tensors.count_room(report.used)
        self._pending = None

    def _start_report(self) -> _Report:
        """Make the device measure the slices in use, and copy the result to the host."""
        used = self.tensors.measure(self.next_tick, self.first_tick)
        if not self._is_asynchronous:
            return _Report(self.next_tick, used.cpu(), None)
        host = torch.empty(used.shape, dtype=used.dtype, pin_memory=True)
        host.copy_(used, non_blocking=True)
        return _Report(self.next_tick, host, record_event(self._device))

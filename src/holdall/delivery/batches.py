"""Batches of one memory: which way they go, given the device they are wanted on.

In:  draws.  Out: jobs that end in batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdall.batch import Batch, Draw
from holdall.delivery.device import CudaStream, DeviceStream, HostStream
from holdall.delivery.device_batch import DeviceBuilder
from holdall.delivery.device_store import DeviceMirror, PinnedArenas
from holdall.delivery.host import (
    BatchBuilder,
    BatchJob,
    Builder,
    Delivery,
    DrawnRows,
    ObservationAssembler,
)
from holdall.native import SliceNamer
from holdall.schema import Schema
from holdall.storage.slices import Kernels
from holdall.storage.store import Store

if TYPE_CHECKING:
    import torch


class Batches:
    """Looks transitions up, and makes batches of them.

    Args:
        mirrored: Keep all slices on the delivery's device, and make batches of them there.
        pins: Whether raw blocks may be pinned; they then stay a while longer than they are needed.
    """

    def __init__(
        self,
        schema: Schema,
        kernels: Kernels,
        assembler: ObservationAssembler,
        delivery: Delivery,
        mirrored: bool,
        pins: bool,
    ) -> None:
        self._parts = (schema, kernels, assembler)
        self._pins = pins
        self._mirror: DeviceMirror | None = None
        self._arenas: PinnedArenas | None = None
        self._namer: SliceNamer | None = None
        plain = BatchBuilder(schema, assembler, delivery)
        self._builder: Builder = plain
        torch, device = delivery.module, delivery.torch_device
        if device is not None and (mirrored or is_remote(device)):
            line: DeviceStream = CudaStream(torch, device) if device.type == "cuda" else HostStream(torch)
            self._build_on(line, plain, mirrored, torch)

    def _build_on(self, line: DeviceStream, plain: BatchBuilder, mirrored: bool, torch: Any) -> None:
        schema, kernels, _ = self._parts
        self._namer = kernels.namer()
        self._builder = DeviceBuilder(schema, plain, line, self._namer, torch)
        if self._namer is None:
            return
        if mirrored:
            self._mirror = DeviceMirror(line, kernels.coder)
        elif self._pins:
            self._arenas = PinnedArenas(line)

    def keep(self, batches: int) -> None:
        """See to it that so many batches can be in use without new memory for each."""
        staging = self._parts[2].staging
        staging.most = max(staging.most, batches + 1)
        if isinstance(self._builder, DeviceBuilder):
            self._builder.blocks.most = max(self._builder.blocks.most, batches + 1)

    def elsewhere(self, delivery: Delivery) -> Batches:
        """Return the same for another device."""
        return Batches(*self._parts, delivery, mirrored=False, pins=self._pins)

    def look_up(self, draw: Draw, store: Store) -> DrawnRows:
        """Find all that a draw needs; under the memory's lock."""
        return DrawnRows.of(draw, store, self._mirror, self._arenas)

    def start(self, draw: Draw, reading: DrawnRows) -> BatchJob:
        """Begin a batch; without the lock, in the thread that will use it."""
        return self._builder.start(draw, reading)

    def make(self, draw: Draw, reading: DrawnRows) -> Batch:
        """Make a batch at once."""
        job = self.start(draw, reading)
        job.work()
        return job.receive()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory on the host."""
        return self._builder.pinned_bytes if isinstance(self._builder, DeviceBuilder) else 0

    def dismiss(self) -> None:
        """End the threads, and let go of what is pinned."""
        if isinstance(self._builder, DeviceBuilder):
            self._builder.finish()
        if self._arenas is not None:
            self._arenas.close()
        if self._namer is not None:
            self._namer.pool.dismiss()


def is_remote(device: torch.device) -> bool:
    """Whether a device has memory of its own, so that batches have to be sent there."""
    return device.type == "cuda"

"""A draw becomes a batch: NumPy arrays, or tensors on a device.

The chapters, in the order of the flow: `batches` (on the host; the entry), `device` (streams and memory of a device),
`pinned_arenas` (slices that it reads by itself), `device_assembly` (a batch in one call of C), `batch_layout` and
`device_batch` (sent once, stacked there; for JAX, too), `loader` (ahead of time), `to_device` (rollouts and
trajectories). For data that is born on a device: `cuda_program`, `device_loops` (the kernels), `torch_loops` (their
twins), `device_fields`, `device_rings`, `device_checkpoint` (where rows lie), `resident` (arguments, samplers and
batches), `device_mirror` (the same for rows that the host keeps, too), `device_rollout`.
Torch is imported when a device is asked for.
"""

from holdall.delivery.batch_layout import DeviceBatch
from holdall.delivery.batches import (
    Batches,
    BatchJob,
    Delivery,
    DrawnRows,
    HostBatches,
    ObservationAssembler,
)
from holdall.delivery.device import stream_to
from holdall.delivery.device_assembly import SlotDraw
from holdall.delivery.device_rollout import DeviceRollout
from holdall.delivery.loader import Loader, LoaderDraws, Prefetched, batches_for
from holdall.delivery.resident import ResidentBatches, TensorFit, is_on_device, rings_on
from holdall.delivery.to_device import SLOT_BYTES, CopyLoads, CopySpan, DeviceCopier, Gather, MinibatchDelivery
